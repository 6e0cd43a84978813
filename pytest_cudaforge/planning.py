"""The plan of a run before any money is spent: targets, sizes of prompts, an estimate of the cost. Writes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pytest_cudaforge import coder, evidence, judge
from pytest_cudaforge.chat import estimate_tokens, prices
from pytest_cudaforge.config import ForgeConfig
from pytest_cudaforge.errors import ForgeError
from pytest_cudaforge.loop import Evaluates
from pytest_cudaforge.records import (
    Candidate,
    DeviceFacts,
    Evaluation,
    Isolation,
    Proposal,
    Round,
    Status,
    Target,
    TargetFacts,
)
from pytest_cudaforge.runtime.configuration import LANGUAGE
from pytest_cudaforge.store import RunStore

__all__ = ["PlannedTarget", "WorkPlan", "plan_work", "render_plan"]

#: What replies are assumed to be long, in tokens: two files of code; a JSON object of three texts.
CODER_REPLY_TOKENS = 4000
JUDGE_REPLY_TOKENS = 400


@dataclass(frozen=True)
class PlannedTarget:
    """One target in one language. Token and USD figures are estimates for all rounds still to play, none stopped early.

    ``usd`` None: a price is not known. ``problem`` "" or why this target cannot be forged.
    """

    target: str
    language: str
    rounds_done: int
    rounds_left: int
    prompt_tokens: int
    input_tokens: int
    output_tokens: int
    usd: float | None
    problem: str = ""


@dataclass(frozen=True)
class WorkPlan:
    targets: tuple[PlannedTarget, ...]
    coder: str
    judge: str

    @property
    def usd(self) -> float | None:
        """The sum; None where one is not known."""
        known = [entry.usd for entry in self.targets if not entry.problem]
        return None if None in known else sum(value for value in known if value is not None)


def plan_work(targets: Sequence[Target], config: ForgeConfig, evaluator: Evaluates) -> WorkPlan:
    """What ``forge_all`` would do. Asks the oracle for facts (which imports the targets) but times nothing."""
    from pytest_cudaforge.session import languages_for

    languages = languages_for(config, evaluator.device)
    planned = tuple(_planned(target, name, config, evaluator) for target in targets for name in languages)
    return WorkPlan(planned, _model_name(config, "coder"), _model_name(config, "judge"))


def render_plan(plan: WorkPlan) -> list[str]:
    """The plan as lines for a terminal."""
    lines = [f"coder: {plan.coder}, judge: {plan.judge}", "tokens and cost are estimates, all rounds played"]
    for entry in plan.targets:
        if entry.problem:
            lines.append(f"{entry.target} ({entry.language}): {entry.problem}")
            continue
        done = f", {entry.rounds_done} already played" if entry.rounds_done else ""
        if entry.language == LANGUAGE:
            lines.append(f"{entry.target}: at most {entry.rounds_left} configurations of torch.compile{done}, no model")
            continue
        lines.append(
            f"{entry.target} ({entry.language}): {entry.rounds_left} rounds to play{done}, "
            f"first prompt about {entry.prompt_tokens} tokens, in all about {entry.input_tokens} in and "
            f"{entry.output_tokens} out, {_cost(entry.usd)}"
        )
    return [*lines, f"in all {_cost(plan.usd)}"]


def _planned(target: Target, language: str, config: ForgeConfig, evaluator: Evaluates) -> PlannedTarget:
    try:
        facts = evaluator.facts(target)
        done = len(RunStore(config.run_dir).target(target, language).rounds())
        if language == LANGUAGE:
            return PlannedTarget(target.id, language, done, max(config.rounds - done, 0), 0, 0, 0, 0.0)
        first = estimate_tokens(coder.render(_first(target, facts, evaluator.device, language)))
        review = _review_tokens(target, facts, evaluator.device, language)
    except ForgeError as error:
        return PlannedTarget(target.id, language, 0, 0, 0, 0, 0, None, error.what)
    if language not in facts.languages:
        problem = f"forged in {', '.join(facts.languages)} only"
        return PlannedTarget(target.id, language, 0, 0, 0, 0, 0, None, problem)
    left = max(config.rounds - done, 0)
    # Every round but the first shows the Coder its last files, about as long as its reply, and asks the Judge.
    later = left if done else max(left - 1, 0)
    coder_in = left * first + later * CODER_REPLY_TOKENS
    judge_in = later * review
    usd = _usd(config, (coder_in, left * CODER_REPLY_TOKENS), (judge_in, later * JUDGE_REPLY_TOKENS))
    out = left * CODER_REPLY_TOKENS + later * JUDGE_REPLY_TOKENS
    return PlannedTarget(target.id, language, done, left, first, coder_in + judge_in, out, usd)


def _first(target: Target, facts: TargetFacts, device: DeviceFacts, language: str) -> coder.CoderEvidence:
    return coder.evidence(target, facts, device, (), language=language, proposal=Proposal("first", None))


def _review_tokens(target: Target, facts: TargetFacts, device: DeviceFacts, language: str) -> int:
    """The Judge's prompt about a candidate that is not there yet: rendered around an empty one, plus its length."""
    candidate = Candidate.of(language, {"plan.py": ""})
    verdict = Evaluation(Status.RUNTIME_ERROR, "", candidate.digest, target.id, Isolation("A"))
    subject = Round(1, "first", None, candidate, verdict)
    told = judge.evidence(target, facts, device, (), language=language, kind="correction", subject=subject)
    return estimate_tokens(judge.render(replace(told, kind="optimization"))) + CODER_REPLY_TOKENS + evidence.MAX_TOKENS


def _usd(config: ForgeConfig, coder_tokens: tuple[int, int], judge_tokens: tuple[int, int]) -> float | None:
    table = prices.load(config.prices)
    total = 0.0
    for settings, (tokens_in, tokens_out) in (
        (config.chat.coder, coder_tokens),
        (config.chat.judge, judge_tokens),
    ):
        if settings.provider == "replay":
            continue
        # A command or a provider of the user's own bills elsewhere.
        usd = table.reserve_usd(settings.model, tokens_in, tokens_out) if settings.provider == "openai" else None
        if tokens_in and usd is None:
            return None
        total += (usd or 0.0) if tokens_in else 0.0
    return total


def _model_name(config: ForgeConfig, role: str) -> str:
    settings = config.chat.coder if role == "coder" else config.chat.judge
    if settings.provider == "command":
        return "command:" + " ".join(config.chat.command.argv[:1])
    return settings.model or settings.provider


def _cost(usd: float | None) -> str:
    return "price unknown (tokens only)" if usd is None else f"about ${usd:.2f}"
