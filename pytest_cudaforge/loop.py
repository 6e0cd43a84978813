"""Forge one target: the only file that knows the order of the stages.

::

    lock, resume ─ facts, baselines ─ headroom ─┬─ propose ─ profile ─ judge ─ coder ─ build, verify, time ─┐
                                                └────────────────── until the strategy stops ───────────────┘
                 ─ select: re-evaluate the best afresh ─ forged, with a full profile, or kept the reference

Each step is on disk before the next begins, and each looks there first: a resumed run walks the same path and finds
what was done. Stages never call each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar

from pytest_cudaforge import coder, compiler, judge
from pytest_cudaforge.budget import Ledger
from pytest_cudaforge.chat import ChatModel
from pytest_cudaforge.chat.record import RecordedVerdict, Recorder
from pytest_cudaforge.errors import (
    BudgetExhausted,
    DeviceError,
    ForgeError,
    ReplyError,
    ReplyPending,
    StoreError,
)
from pytest_cudaforge.events import EventKind, ForgeEvent, Observer
from pytest_cudaforge.exchange import Exchange, Price, Stopped, StopSignal
from pytest_cudaforge.records import (
    Baseline,
    Candidate,
    Depth,
    DeviceFacts,
    Evaluation,
    Feedback,
    Outcome,
    Profile,
    Proposal,
    Round,
    Stop,
    Target,
    TargetFacts,
    Trace,
)
from pytest_cudaforge.store import RoundFolder, TargetStore, total_usage
from pytest_cudaforge.strategies import Limits, Strategy, best_round, speedup_of, worthwhile
from pytest_cudaforge.strategies.recorded import Recorded, RecordedRound

__all__ = ["Evaluates", "ForgeContext", "forge", "headroom"]

Result = TypeVar("Result")

#: A winner that does not win again gives way to the next best; more than this many would be no winner at all.
_FINALISTS = 3
#: A candidate within this share of the best's speedup may be the better one in a fresh sitting.
_NEAR = 0.9
_LOCK_POLL_S = 0.5


class Evaluates(Protocol):
    """What the loop needs of :class:`~pytest_cudaforge.evaluation.evaluator.Evaluator`; called from threads."""

    @property
    def device(self) -> DeviceFacts: ...

    def facts(self, target: Target) -> TargetFacts: ...

    def lint(self, target: Target) -> tuple[str, ...]: ...

    def baselines(self, target: Target, language: str = "") -> tuple[Baseline, ...]: ...

    def evaluate(
        self,
        candidate: Candidate,
        target: Target,
        *,
        timing: bool = True,
        fresh: bool = False,
        incumbent: Candidate | None = None,
    ) -> Evaluation: ...

    def profile(self, candidate: Candidate, target: Target, *, depth: Depth = "quick") -> Profile: ...


@dataclass(frozen=True)
class ForgeContext:
    """Everything one target's forging needs; shared by all targets but ``store`` and ``language``."""

    language: str
    evaluator: Evaluates
    coder: ChatModel
    judge: ChatModel
    strategy: Strategy
    limits: Limits
    store: TargetStore
    ledger: Ledger
    observer: Observer
    executor: Executor
    config_digest: str = ""
    fresh: bool = False
    min_headroom: float = 1.1
    lock_wait_s: float = 600.0
    allow: tuple[str, ...] | None = None
    price: Price = field(default=lambda role, tokens: None)
    stop: StopSignal = field(default_factory=StopSignal)
    recorder: Recorder | None = None
    profile: Literal["auto", "always", "never"] = "auto"


async def forge(target: Target, context: ForgeContext) -> Trace:
    """Forge one target in one language. What goes wrong with it is in the trace's outcome, never raised.

    Only cancellation passes through: the second Ctrl-C. Then every finished step is on disk already.
    """
    return await _Forging(target, context).run()


def headroom(baselines: Sequence[Baseline]) -> float | None:
    """Faster baseline ÷ roofline, as geometric mean over workloads; None where a roofline is not known."""
    logs: list[float] = []
    for entry in baselines:
        fastest_ns = min(entry.eager.median_ns, entry.compile.median_ns if entry.compile else math.inf)
        if not entry.roofline_ns or fastest_ns <= 0:
            return None
        logs.append(math.log(fastest_ns / entry.roofline_ns))
    return math.exp(sum(logs) / len(logs)) if logs else None


@dataclass(frozen=True)
class _Choice:
    """The end of the selection: which round won, by which fresh verdict."""

    outcome: Outcome
    reason: str
    winner: int | None = None
    final: Evaluation | None = None


class _Forging:
    """The walk through the stages for one target; holds what the steps leave for each other."""

    def __init__(self, target: Target, context: ForgeContext) -> None:
        self.target = target
        self.context = context
        self.rounds: list[Round] = []
        self.notes: list[str] = []
        self.recorded = _recorded_verdicts(target, context)
        self.started_s = time.monotonic()
        self.exchange = Exchange(
            target,
            context.language,
            {"coder": context.coder, "judge": context.judge},
            context.ledger.account(),
            context.price,
            context.stop,
            context.recorder,
            lambda kind, number, text: self._tell(kind, number, text=text),
        )
        self.facts: TargetFacts
        self.baselines: tuple[Baseline, ...] = ()
        #: In the Coder's and the strategy's place, where configurations of the compiler are searched.
        self.search: compiler.Search | None = None

    # -- the order of the stages -----------------------------------------------------------------------------------

    async def run(self) -> Trace:
        try:
            await self._lock()
            try:
                return await self._forge_locked()
            finally:
                self.context.store.release()
        except Stopped as stop:
            return self._trace(_Choice("cancelled", str(stop)), stored=False)
        except ForgeError as error:
            return self._trace(_Choice("error", str(error)), stored=False)

    async def _forge_locked(self) -> Trace:
        self._resume()
        try:
            reason = await self._why_skip()
            choice = _Choice("skipped", reason) if reason else await self._select(await self._play())
            choice = await self._with_profile(choice)
        except ReplyPending as error:
            choice = _Choice("pending", error.what)
        except DeviceError as error:
            # A device that is lost or unhealthy is so for every target: stop before more money goes into it.
            self.context.stop.request(error.what)
            choice = _Choice("error", str(error))
        except ForgeError as error:
            choice = _Choice("error", str(error))
        return self._trace(choice)

    async def _play(self) -> str:
        """Rounds until there is a reason to stop, which is returned."""
        try:
            while True:
                proposal = self._strategy().propose(self.rounds, self._limits())
                if isinstance(proposal, Stop):
                    return proposal.reason
                self.exchange.check()
                self.rounds.append(await self._round(proposal))
        except BudgetExhausted as stop:
            return stop.what
        except Stopped as stop:
            return str(stop)

    async def _round(self, proposal: Proposal) -> Round:
        folder = self.context.store.round(len(self.rounds) + 1)
        proposal = folder.begin(lambda: proposal)
        self._tell("round", folder.number, text=_describe(proposal))
        feedback: Feedback | None = None
        try:
            feedback = await self._feedback(folder, proposal)
            candidate = await self._candidate(folder, proposal, feedback)
        except ReplyError as error:
            return self._finish(folder, proposal, feedback, None, None, failure=error.what)
        twin = next((entry for entry in self.rounds if _digest(entry) == candidate.digest), None)
        if twin is not None:
            number, known = twin.duplicate_of or twin.number, twin.evaluation
            # Its profile stays with the original.
            verdict = dataclasses.replace(known, profile=None) if known is not None else None
            return self._finish(folder, proposal, feedback, candidate, verdict, duplicate_of=number)
        evaluation = await self._evaluation(folder, candidate)
        return self._finish(folder, proposal, feedback, candidate, evaluation)

    # -- before the first call -------------------------------------------------------------------------------------

    async def _lock(self) -> None:
        """Wait for another run on this target, but not for ever. Raises :class:`StoreError` naming it."""
        store, deadline_s, told = self.context.store, time.monotonic() + self.context.lock_wait_s, False
        while (holder := store.acquire()) is not None:
            if self.context.stop.reason:
                raise Stopped(self.context.stop.reason)
            if time.monotonic() >= deadline_s:
                raise StoreError(
                    f"{self.target.id} is being forged by {holder}",
                    expected="one run for each target at a time",
                    remedy="wait for that run, or stop it; its finished rounds are kept",
                )
            if not told:
                self._tell("waiting", text=f"waiting for {holder}")
                told = True
            await asyncio.sleep(_LOCK_POLL_S)

    def _resume(self) -> None:
        context = self.context
        device = f"{context.evaluator.device.arch} {context.evaluator.device.name}"
        for note in context.store.open(config_digest=context.config_digest, device=device, fresh=context.fresh):
            self._note(note)
        self.rounds = list(context.store.rounds())
        for entry in self.rounds:
            self.exchange.recall(entry, context.store.round(entry.number).replies())
        unfinished = context.store.round(len(self.rounds) + 1).usage()
        spent = total_usage([*(entry.usage for entry in self.rounds), unfinished])
        self.exchange.account = context.ledger.account(spent.usd or 0.0)
        if self.rounds:
            self._note(
                f"resumed after round {len(self.rounds)}: its replies are not paid again (--forge-fresh starts anew)"
            )

    async def _why_skip(self) -> str:
        """Learn what the target is; "" to go on, else why nothing is asked of a model.

        Rounds that are already paid for are never skipped for want of headroom.
        """
        evaluator, language = self.context.evaluator, self.context.language
        if reason := _only_elsewhere(self.target, self.context):
            return reason
        self._tell("evaluating", text="the reference: inputs, outputs, baselines")
        self.facts = await self._in_thread(lambda: evaluator.facts(self.target))
        searching = language == compiler.LANGUAGE
        if language not in self.facts.languages and not searching:
            return f"the target is forged in {', '.join(self.facts.languages)} only, not in {language}"
        if faults := await self._in_thread(lambda: evaluator.lint(self.target)):
            return "the linter refuses this target: " + "; ".join(faults)
        self.baselines = await self._in_thread(lambda: evaluator.baselines(self.target, language))
        self.context.store.write_generated(self.baselines)
        if searching and (reason := compiler.obstacle(self.baselines)):
            return reason
        self.search = compiler.Search(evaluator.device, self.baselines) if searching else None
        return self._no_headroom()

    def _no_headroom(self) -> str:
        room = headroom(self.baselines)
        text = "the roofline is not known here" if room is None else f"{room:.2f}x to the roofline"
        self._tell("headroom", text=f"headroom over the faster baseline: {text}")
        if room is None or room >= self.context.min_headroom or self.rounds or self._soft_roofline:
            return ""
        reason = f"no headroom: the faster baseline is within {room:.2f}x of the roofline"
        if self.recorded:
            self._note(f"{reason}; the recorded conversation is played all the same, it costs nothing")
            return ""
        return f"{reason} (min_headroom is {self.context.min_headroom:g})"

    @property
    def _soft_roofline(self) -> bool:
        """On a CPU small data stays in caches faster than the memory the bound counts on: it informs, no more."""
        return self.context.evaluator.device.kind == "cpu"

    def _limits(self) -> Limits:
        limits = self.context.limits
        return dataclasses.replace(limits, roofline_stop=math.inf) if self._soft_roofline else limits

    # -- one round's steps -----------------------------------------------------------------------------------------

    async def _feedback(self, folder: RoundFolder, proposal: Proposal) -> Feedback | None:
        subject = self._round_of(proposal.parent)
        if proposal.kind == "first" or subject is None or subject.evaluation is None or self.search is not None:
            return None
        if proposal.kind == "optimization" and subject.evaluation.passed and self._profiles:
            subject = await self._profiled(subject, proposal.depth)
        context = self.context
        told = judge.evidence(
            self.target, self.facts, context.evaluator.device, self.baselines,
            language=context.language, kind=proposal.kind, subject=subject, rounds=self.rounds, allow=context.allow,
            depth=proposal.depth,
        )  # fmt: skip
        feedback = await self._advice(folder, told)
        if self._recorded_judge:
            # It spoke of figures that were measured there and then.
            feedback = dataclasses.replace(feedback, doubts=())
        folder.write_feedback(feedback)
        return feedback

    async def _advice(self, folder: RoundFolder, told: judge.JudgeEvidence) -> Feedback:
        """The Judge's feedback; its reply goes back once. Raises ``ReplyError`` where neither reply can be read."""
        messages, schema = judge.render(told), judge.SCHEMA[told.kind]
        reply = await self.exchange.ask(folder, "judge", messages, schema)
        first = judge.read(reply.text, told)
        doubtful = first.problem is not None
        if first.feedback is not None and not self.exchange.goes_back("judge", doubtful):
            return first.feedback
        again = judge.render_repair(messages, reply.text, first.problem or ReplyError("it went back when recorded"))
        reply = await self.exchange.ask(folder, "judge-repair", again, schema)
        second = judge.read(reply.text, told)
        feedback = second.feedback or first.feedback
        if feedback is None:
            assert second.problem is not None  # what holds no feedback says why
            raise _of_the_repair("judge", second.problem)
        return feedback

    # -- profiles --------------------------------------------------------------------------------------------------

    @property
    def _profiles(self) -> bool:
        """Whether candidates are profiled: a recorded Judge said what it says already."""
        wanted = "never" if self.search is not None else self.context.profile
        return wanted == "always" or (wanted == "auto" and not self._recorded_judge)

    @property
    def _recorded_judge(self) -> bool:
        return hasattr(self.context.judge, "verdicts")

    async def _profiled(self, entry: Round, depth: Depth) -> Round:
        """The round with a profile of its own candidate, at least that deep: found on disk, or taken now and kept.

        No round is lost for want of a profile, but a lost device ends the run. Raises ``DeviceError``, ``Stopped``,
        ``BudgetExhausted``, ``StoreError``.
        """
        evaluation, candidate = entry.evaluation, entry.candidate
        assert evaluation is not None and candidate is not None  # only what passed is profiled
        if evaluation.profile is not None and evaluation.profile.depth in (depth, "full"):
            return entry
        self.exchange.check()
        self._tell("profiling", entry.number, text=f"round {entry.number}, {depth}")
        try:
            profile = await self._in_thread(lambda: self.context.evaluator.profile(candidate, self.target, depth=depth))
        except DeviceError:
            raise
        except ForgeError as error:
            self._note(f"round {entry.number} could not be profiled: {error.what}")
            return entry
        assert profile.candidate == candidate.digest, "a profile belongs to the candidate that is shown with it"
        kept = self.context.store.round(entry.number).write_profile(profile)
        profiled = dataclasses.replace(entry, evaluation=dataclasses.replace(evaluation, profile=kept))
        self.rounds[entry.number - 1] = profiled
        return profiled

    async def _with_profile(self, choice: _Choice) -> _Choice:
        """The winner's verdict with a full profile, for who reads of it."""
        entry = self._round_of(choice.winner)
        if entry is None or entry.evaluation is None or choice.final is None:
            return choice
        if self._profiles and not self.context.stop.reason:
            with contextlib.suppress(BudgetExhausted, Stopped):
                entry = await self._profiled(entry, "full")
        profile = entry.evaluation.profile if entry.evaluation is not None else None
        return dataclasses.replace(choice, final=dataclasses.replace(choice.final, profile=profile))

    # -- candidate and verdict -------------------------------------------------------------------------------------

    async def _candidate(self, folder: RoundFolder, proposal: Proposal, feedback: Feedback | None) -> Candidate:
        context = self.context
        if self.search is not None:
            found = self.search.candidate(self.rounds)
            folder.write_candidate(found)
            return found
        told = coder.evidence(
            self.target, self.facts, context.evaluator.device, self.baselines,
            language=context.language, proposal=proposal, rounds=self.rounds, best=best_round(self.rounds),
            feedback=feedback, allow=context.allow,
        )  # fmt: skip
        messages = coder.render(told)
        reply = await self.exchange.ask(folder, "coder", messages)
        try:
            files = coder.parse(reply.text, context.language)
        except ReplyError as error:
            again = coder.render_repair(messages, reply.text, error, context.language)
            reply = await self.exchange.ask(folder, "coder-repair", again)
            try:
                files = coder.parse(reply.text, context.language)
            except ReplyError as repaired:
                raise _of_the_repair("coder", repaired) from repaired
        parent = self._round_of(proposal.parent)
        candidate = Candidate.of(context.language, files, _digest(parent) if parent else None)
        folder.write_candidate(candidate)
        return candidate

    async def _evaluation(self, folder: RoundFolder, candidate: Candidate) -> Evaluation:
        stored = folder.evaluation()
        if stored is not None and stored.candidate == candidate.digest:
            return stored
        self.exchange.check()
        self._tell("evaluating", folder.number)
        best = best_round(self.rounds)
        evaluation = await self._in_thread(
            lambda: self.context.evaluator.evaluate(
                candidate, self.target, incumbent=best.candidate if best is not None else None
            )
        )
        folder.write_evaluation(evaluation)
        speedup = speedup_of(evaluation.timing) or None
        self._tell("evaluated", folder.number, evaluation.status.value, speedup, text=evaluation.reason)
        return evaluation

    def _incumbent_of(self, evaluation: Evaluation | None, duplicate_of: int | None) -> int | None:
        """The round whose candidate was timed beside this evaluation's, if one was."""
        best = best_round(self.rounds)
        raced = evaluation is not None and evaluation.timing is not None and evaluation.timing.vs_incumbent is not None
        return best.number if raced and best is not None and duplicate_of is None else None

    def _finish(
        self,
        folder: RoundFolder,
        proposal: Proposal,
        feedback: Feedback | None,
        candidate: Candidate | None,
        evaluation: Evaluation | None,
        *,
        failure: str = "",
        duplicate_of: int | None = None,
    ) -> Round:
        notes = tuple(dict.fromkeys(reply.note for reply in folder.replies().values() if reply.note))
        notes += tuple(f"the Judge's reply: {doubt}" for doubt in feedback.doubts) if feedback is not None else ()
        notes += (self.search.reason(self.rounds),) if self.search is not None else ()
        entry = Round(
            folder.number, proposal.kind, proposal.parent, candidate, evaluation, feedback, failure, duplicate_of,
            folder.usage(), self._recorded_status(folder.number), notes, self._incumbent_of(evaluation, duplicate_of),
        )  # fmt: skip
        folder.finish(entry)
        self.exchange.close(entry)
        status = evaluation.status.value if evaluation is not None else "NO CANDIDATE"
        text = failure or (f"same as round {duplicate_of}" if duplicate_of is not None else "")
        speedup = speedup_of(evaluation.timing) or None if evaluation is not None else None
        self._tell("finished", folder.number, status, speedup, text=text, rounds=[*self.rounds, entry])
        return entry

    # -- the winner ------------------------------------------------------------------------------------------------

    async def _select(self, why_stopped: str) -> _Choice:
        """The best correct round, verified and timed afresh: what won a contest of noise must win again."""
        passed = [entry for entry in self.rounds if worthwhile(entry) and entry.duplicate_of is None]
        best = best_round(self.rounds)
        passed.sort(key=lambda entry: (entry is not best, -_speed(entry)))
        if not passed:
            stopped = bool(self.context.stop.reason)
            return _Choice("cancelled" if stopped else "failed", f"no correct candidate; {why_stopped}")
        if _decision(passed[0].evaluation) == "slower":
            return _Choice("kept_reference", f"no correct candidate was faster than the reference; {why_stopped}")
        choices: list[_Choice] = []
        leader: _Choice | None = None
        rivals = self._rivals(passed)
        for entry in [passed[0], *rivals, *(e for e in passed[1:] if e not in rivals)][:_FINALISTS]:
            if entry not in rivals and choices and not self._still_open(choices, entry):
                continue
            final = await self._fresh_verdict(entry, self._round_of(leader.winner) if leader else None)
            if not final.passed:
                self._note(f"round {entry.number} passed once and failed its re-evaluation: {final.reason}")
                continue
            choices.append(self._judged(entry, final, why_stopped))
            if choices[-1].outcome == "forged" and (leader is None or _overtakes(final, leader)):
                leader = choices[-1]
        if leader is not None:
            return leader
        return choices[0] if choices else _Choice("failed", f"no candidate passed its re-evaluation; {why_stopped}")

    def _rivals(self, passed: Sequence[Round]) -> list[Round]:
        """Who is measured again beside the best by ratio: one near it, or with a shorter time of its own, that did
        not lose to it in a sitting of theirs.

        Ratios of different sittings stand on baselines that were measured again each time; on a busy machine those
        move more than the kernels do.
        """
        best = passed[0]
        found = [
            entry
            for entry in passed[1:]
            if self._promising(entry)
            and not _lost(entry, best)
            and (_speed(entry) >= _NEAR * _speed(best) or _kernel_ns(entry) < _kernel_ns(best))
        ]
        # The strongest: every fresh verdict costs what a round does, and one contest shows whether the best was luck.
        return sorted(found, key=_kernel_ns)[:1]

    def _still_open(self, choices: Sequence[_Choice], entry: Round) -> bool:
        """Whether a lesser round may still win where a better one did not keep its promise."""
        return self._promising(entry) and all(choice.outcome != "forged" for choice in choices)

    def _promising(self, entry: Round) -> bool:
        return _decision(entry.evaluation) == "faster" and _speed(entry) >= self.facts.min_speedup

    async def _fresh_verdict(self, entry: Round, leader: Round | None) -> Evaluation:
        candidate, incumbent = entry.candidate, leader.candidate if leader is not None else None
        assert candidate is not None
        self._tell("selecting", entry.number, text=f"round {entry.number} is evaluated afresh")

        def measure() -> Evaluation:
            return self.context.evaluator.evaluate(candidate, self.target, fresh=True, incumbent=incumbent)

        final = await self._in_thread(measure)
        if final.passed and _decision(final) in ("inconclusive", "disturbed"):
            final = await self._in_thread(measure)
        return final

    def _judged(self, entry: Round, final: Evaluation, why_stopped: str) -> _Choice:
        speedup, wanted = speedup_of(final.timing), self.facts.min_speedup
        if _decision(final) == "faster" and speedup >= wanted:
            who = f"round {entry.number}"
            if self.search is not None and entry.candidate is not None:
                who = f"the configuration {compiler.described(entry.candidate)} (round {entry.number})"
            reason = f"{who} is {speedup:.2f}x as fast as the faster baseline; {why_stopped}"
            return _Choice("forged", reason, entry.number, final)
        measured = f"round {entry.number}, correct, re-measured {speedup:.2f}x ({_decision(final)})"
        limit = f", less than min_speedup {wanted:g}" if speedup < wanted else ""
        return _Choice("kept_reference", f"{measured}{limit}; {why_stopped}", None, final)

    def _trace(self, choice: _Choice, *, stored: bool = True) -> Trace:
        trace = Trace(
            target=self.target.id,
            language=self.context.language,
            outcome=choice.outcome,
            reason=choice.reason,
            rounds=tuple(self.rounds),
            winner=choice.winner,
            final=choice.final,
            usage=total_usage([*(entry.usage for entry in self.rounds), *self.exchange.open_usages]),
            seconds=time.monotonic() - self.started_s,
            notes=tuple(self.notes),
            baselines=self.baselines,
            hardware=self.context.evaluator.device if self.baselines else None,
        )
        if stored:
            self.context.store.write_trace(trace)
        speedup = speedup_of(choice.final.timing) or None if choice.final is not None else None
        self._tell("done", len(self.rounds), choice.outcome, speedup, text=choice.reason)
        return trace

    # -- small things ----------------------------------------------------------------------------------------------

    def _strategy(self) -> Strategy:
        if self.search is not None:
            return self.search
        if not self.recorded:
            return self.context.strategy
        return Recorded([RecordedRound(entry.round, entry.parent, entry.kind) for entry in self.recorded])

    def _recorded_status(self, number: int) -> str:
        entry = next((entry for entry in self.recorded if entry.round == number), None)
        if entry is None:
            return ""
        return entry.status + (f" {entry.speedup:.2f}x" if entry.speedup is not None else "")

    def _round_of(self, number: int | None) -> Round | None:
        return next((entry for entry in self.rounds if entry.number == number), None)

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self.context.executor, work)

    def _note(self, text: str) -> None:
        self.notes.append(text)
        self._tell("note", text=text)

    def _tell(
        self,
        kind: EventKind,
        number: int = 0,
        status: str = "",
        speedup: float | None = None,
        *,
        text: str = "",
        rounds: Sequence[Round] | None = None,
    ) -> None:
        best = best_round(self.rounds if rounds is None else rounds)
        best_speedup = speedup_of(best.evaluation.timing) if best is not None and best.evaluation is not None else None
        language, usd = self.context.language, self.exchange.account.usd
        self.context.observer.on_event(
            ForgeEvent(self.target.id, kind, language, number, status, speedup, best_speedup, usd, text)
        )


def _only_elsewhere(target: Target, context: ForgeContext) -> str:
    """A recording in another language is no error: on other hardware the same command plays other conversations."""
    told = getattr(context.coder, "only_elsewhere", None)
    return str(told(target.id, target.digest, context.language)) if told is not None else ""


def _recorded_verdicts(target: Target, context: ForgeContext) -> tuple[RecordedVerdict, ...]:
    """The recorded rounds where the Coder is a recording, else nothing."""
    verdicts = getattr(context.coder, "verdicts", None)
    return tuple(verdicts(target.id, target.digest, context.language)) if verdicts is not None else ()


def _of_the_repair(role: str, error: ReplyError) -> ReplyError:
    """What refuses a second reply ends the round, and the reader should know whose reply it was."""
    return ReplyError(f"the {role}'s repaired reply: {error.what}", expected=error.expected)


def _lost(entry: Round, best: Round) -> bool:
    """Whether one sitting held both and said clearly that ``entry`` is the slower one."""
    for later, earlier, sign in ((entry, best, 1), (best, entry, -1)):
        timing = later.evaluation.timing if later.evaluation is not None else None
        if later.incumbent == earlier.number and timing is not None and timing.vs_incumbent is not None:
            ratio = timing.vs_incumbent
            return ratio.high < 1.0 if sign > 0 else ratio.low > 1.0
    return False


def _overtakes(final: Evaluation, leader: _Choice) -> bool:
    """Whether a fresh verdict beats the leader's: beside it in one sitting, or else by the ratios to the baselines."""
    if final.timing is not None and final.timing.vs_incumbent is not None:
        return final.timing.vs_incumbent.speedup > 1.0
    return speedup_of(final.timing) > speedup_of(leader.final.timing if leader.final is not None else None)


def _speed(entry: Round) -> float:
    return speedup_of(entry.evaluation.timing if entry.evaluation is not None else None)


def _kernel_ns(entry: Round) -> float:
    """Geometric mean of the candidate's own times over its workloads; infinite where nothing was timed."""
    timing = entry.evaluation.timing if entry.evaluation is not None else None
    if timing is None or not timing.workloads:
        return math.inf
    return math.exp(sum(math.log(entry.candidate.median_ns) for entry in timing.workloads) / len(timing.workloads))


def _digest(entry: Round) -> str | None:
    return entry.candidate.digest if entry.candidate is not None else None


def _decision(evaluation: Evaluation | None) -> str:
    return evaluation.timing.decision if evaluation is not None and evaluation.timing is not None else "inconclusive"


def _describe(proposal: Proposal) -> str:
    anew = ", planned anew" if proposal.depth == "full" else ""
    return proposal.kind if proposal.parent is None else f"{proposal.kind} of round {proposal.parent}{anew}"
