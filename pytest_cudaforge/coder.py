"""The Coder: evidence -> prompt, reply -> the files of a candidate. Pure; the loop makes the call."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pytest_cudaforge.chat import Message
from pytest_cudaforge.errors import ConfigError, ReplyError
from pytest_cudaforge.prompts import fence, sheets
from pytest_cudaforge.prompts import render as fill
from pytest_cudaforge.records import Baseline, DeviceFacts, Feedback, Proposal, Round, Target, TargetFacts

__all__ = ["CoderEvidence", "evidence", "parse", "render", "render_repair"]


@dataclass(frozen=True)
class CoderEvidence:
    """All the Coder is told. ``parent`` is the candidate to mend or improve (None: a first one), ``best`` the fastest
    correct one so far; ``allow`` the labels of work that may pass."""

    kind: Literal["first", "correction", "optimization"]
    language: str
    target: Target
    facts: TargetFacts
    device: DeviceFacts
    baselines: tuple[Baseline, ...]
    allow: tuple[str, ...]
    parent: Round | None = None
    best: Round | None = None
    feedback: Feedback | None = None


def evidence(
    target: Target,
    facts: TargetFacts,
    device: DeviceFacts,
    baselines: Sequence[Baseline],
    *,
    language: str,
    proposal: Proposal,
    rounds: Sequence[Round] = (),
    best: Round | None = None,
    feedback: Feedback | None = None,
    allow: Sequence[str] | None = None,
) -> CoderEvidence:
    """Built by the loop before each call. ``allow`` None: what the target itself allows.

    A proposal whose parent left no candidate (its reply could not be used) starts from an empty page.
    """
    parent = next((turn for turn in rounds if turn.number == proposal.parent and turn.candidate), None)
    return CoderEvidence(
        kind=proposal.kind if parent else "first",
        language=language,
        target=target,
        facts=facts,
        device=device,
        baselines=tuple(baselines),
        allow=tuple(facts.allow if allow is None else allow),
        parent=parent,
        best=best,
        feedback=feedback if parent else None,
    )


# -- the prompt --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Dialect:
    """What the prompts say differently for each language."""

    title: str
    source_name: str
    info: str
    source_role: str
    launch_keywords: str
    pointer_types: str
    launch_arguments: str = "launch_arguments_cxx"


_DIALECTS = {
    "cpp": _Dialect(
        "C++ (CPU)",
        "kernel.cpp",
        "cpp",
        "the kernels: C++17 functions that work on raw pointers, parallel through OpenMP.",
        "args=..., constants=None",
        "`const float*` for float32, `_Float16*` for float16, `__bf16*` for bfloat16, `long long*` for int64, "
        "`int*` for int32, `bool*` for bool",
    ),
    "cuda": _Dialect(
        "CUDA",
        "kernel.cu",
        "cuda",
        "the kernels: CUDA device code that works on raw pointers.",
        "args=..., grid=..., block=..., shared_bytes=0, constants=None, cluster=None, cooperative=False",
        "`const float*` for float32, `__half*` for float16, `__nv_bfloat16*` for bfloat16, `long long*` for int64, "
        "`int*` for int32, `bool*` for bool",
    ),
    "triton": _Dialect(
        "Triton",
        "kernel.py",
        "python",
        "the kernels: `@triton.jit` functions.",
        "args=..., grid=..., constants=None, num_warps=4, num_stages=3, num_ctas=1, maxnreg=0, cooperative=False",
        "`tl.float32`, `tl.float16`, `tl.bfloat16`, `tl.int64`, `tl.int32`, `tl.int1` for bool",
        "launch_arguments_triton",
    ),
}


def dialect(language: str) -> _Dialect:
    """Raises ``ConfigError`` for a language no prompt is written for."""
    if language not in _DIALECTS:
        raise ConfigError(
            f"there are no prompts for the language {language!r}",
            expected=f"one of {', '.join(_DIALECTS)}",
            remedy="set languages: to these",
        )
    return _DIALECTS[language]


def render(told: CoderEvidence) -> tuple[Message, ...]:
    """System and user message. The system message depends on the language alone, so that servers can cache it."""
    return (Message("system", _system(told.language)), Message("user", _task(told)))


def render_repair(messages: Sequence[Message], reply: str, error: ReplyError, language: str) -> tuple[Message, ...]:
    """The one repair round: the conversation so far, the reply, and what was wrong with it."""
    said = dialect(language)
    request = fill(
        "coder_repair",
        problem=error.what,
        expected=error.expected or "both files, whole",
        source_name=said.source_name,
        info=said.info,
    )
    # A reply may be endless; its form is what is in question, and its beginning shows that.
    return (*messages, Message("assistant", sheets.shorten(reply, 12_000) or "(empty)"), Message("user", request))


def _system(language: str) -> str:
    said = dialect(language)
    return fill(
        "coder_system",
        title=said.title,
        source_name=said.source_name,
        source_role=said.source_role,
        launch_keywords=said.launch_keywords,
        launch_arguments=fill(said.launch_arguments, pointer_types=said.pointer_types).rstrip("\n"),
        launch_rules=fill(f"launch_rules_{language}").rstrip("\n"),
        source_rules=fill(f"rules_{language}").strip(),
        example=fill(f"example_{language}").strip(),
    )


def _task(told: CoderEvidence) -> str:
    return fill(
        "coder_task",
        name=told.target.qualname,
        kind="a plain function" if told.target.kind == "function" else "an nn.Module",
        path=told.target.path,
        source=fence(told.target.source, "python"),
        workloads=sheets.render_workloads(told.facts.workloads),
        module=sheets.render_module(told.facts.module),
        contract=sheets.render_contract(told.facts, told.allow),
        gradients=_gradients(told),
        device=sheets.render_device(told.device),
        baselines=sheets.render_baselines(told.baselines),
        turn=_turn(told).strip(),
    )


def _gradients(told: CoderEvidence) -> str:
    """What a plan's backward is; "" where the target asks for none."""
    if not told.facts.grad:
        return ""
    return fill("gradients", arguments="x, ..." if told.target.kind == "function" else "module, x, ...").strip()


def _turn(told: CoderEvidence) -> str:
    parent = told.parent
    if parent is None or parent.candidate is None:
        return fill("coder_first", generated=sheets.render_generated(told.baselines))
    files = sheets.render_files(parent.candidate)
    if told.kind == "optimization":
        timing = parent.evaluation.timing if parent.evaluation else None
        return fill(
            "coder_optimization",
            files=files,
            timing=sheets.render_timing(timing) if timing else "",
            feedback=_feedback(told.feedback),
            best=_best(told),
            generated=sheets.render_generated(told.baselines),
        )
    verdict = sheets.render_verdict(parent.evaluation) if parent.evaluation else parent.failure
    return fill("coder_correction", files=files, verdict=verdict, feedback=_feedback(told.feedback))


def _feedback(feedback: Feedback | None) -> str:
    if feedback is None:
        return ""
    # The Judge is a model, too, and read the candidate: what it says is quoted, like anything that is not ours.
    place = {"place": f"place: {feedback.place}"} if feedback.place else {"place": ""}
    extra = place if feedback.kind == "optimization" else {}
    said = fill(f"feedback_{feedback.kind}", issue=feedback.issue, why=feedback.why, action=feedback.action, **extra)
    return f"A reviewer says:\n{fence(said, 'text')}"


def _best(told: CoderEvidence) -> str:
    best = told.best
    if best is None or best.candidate is None or best is told.parent or best.evaluation is None:
        return ""
    timing = sheets.render_timing(best.evaluation.timing) if best.evaluation.timing else ""
    return (
        f"The fastest correct one so far, another line of attack:\n\n{sheets.render_files(best.candidate)}\n\n{timing}"
    )


# -- the reply ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Block:
    """One fenced block: ``label`` is the text that may name its file, best first."""

    info: str
    before: str
    text: str
    closed: bool


_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})[ \t]*([^`]*?)[ \t]*$")
_FILE_NAME = re.compile(
    r"(?<![\w./-])((?:[\w-]+/)*[\w-]+\.(?:py|cpp|cc|cxx|cu|cuh|h|hpp|c|txt|json|toml|md|sh|yaml))(?![\w.-])"
)
_PYTHON_INFO = ("python", "py", "python3")
_KERNEL_INFO = {
    "cpp": ("cpp", "c++", "cc", "cxx", "c"),
    "cuda": ("cuda", "cu", "cuda-cpp", "cpp", "c++"),
    "triton": ("triton", *_PYTHON_INFO),
}
_DIFF_INFO = ("diff", "patch")
_HUNK = re.compile(r"^@@ .* @@|^--- (?:a/|\S+\.(?:py|cpp|cu)$)", re.MULTILINE)
_LEFT_OUT = (
    r"(?:\.{3}|…).*",
    r"(?:the )?rest (?:of (?:the |this )?(?:code|file|kernel) ?)?(?:is |stays )?(?:unchanged|the same|as before)?",
    r"(?:everything else |code )?(?:is |stays |remains )?(?:unchanged|the same|same|as) (?:as )?before",
    r"(?:existing|previous|remaining|other) (?:code|kernels?|functions?)(?: here| unchanged)?",
)
_ELISION = re.compile(rf"^\s*(?://|#|/\*)\s*(?:{'|'.join(_LEFT_OUT)})\.*\s*(?:\*/)?\s*$", re.MULTILINE | re.IGNORECASE)


def parse(text: str, language: str) -> Mapping[str, str]:
    """The files of a reply, by name: exactly ``plan.py`` and the language's kernel file, each whole.

    Lenient about where a file's name stands (info string, the line before, a comment in the first line, or nowhere
    where the blocks' languages settle it), about prose and about unnamed blocks in other languages. Raises
    ``ReplyError`` for anything that is not two whole files.
    """
    said = dialect(language)
    wanted = ("plan.py", said.source_name)
    blocks = list(_blocks(_without_thinking(text)))
    if not blocks:
        raise ReplyError("the reply has no fenced code block", expected=_expected(said))
    _refuse_diffs(blocks, said)
    named = _named(blocks, wanted, said)
    _guess(named, blocks, wanted, language)
    missing = [name for name in wanted if name not in named]
    if missing:
        cut = "; its last block is not closed, it was cut off" if not blocks[-1].closed else ""
        raise ReplyError(f"the reply has no {' and no '.join(missing)}{cut}", expected=_expected(said))
    return {name: _checked(name, named[name], said) for name in wanted}


def _expected(said: _Dialect) -> str:
    return f"two fenced blocks, one ```{said.info} {said.source_name} and one ```python plan.py, each the whole file"


def _without_thinking(text: str) -> str:
    """Local models print their reasoning first; drafts in it are not the reply."""
    text = text.replace("\r\n", "\n").lstrip("\ufeff")
    return re.sub(r"\A\s*<think(?:ing)?>.*?</think(?:ing)?>", "", text, count=1, flags=re.DOTALL)


def _blocks(text: str) -> Iterator[_Block]:
    """Fenced blocks as CommonMark reads them: a fence is closed by one of its kind, at least as long, without info."""
    mark, info, before, body = "", "", "", []  # type: str, str, str, list[str]
    last = ""
    for line in text.split("\n"):
        found = _FENCE.match(line)
        if not mark:
            if found:
                mark, info, before, body = found.group(1), found.group(2), last, []
            elif line.strip():
                last = line
        elif found and found.group(1).startswith(mark) and not found.group(2):
            yield _Block(info, before, "\n".join(body), True)
            mark, last = "", ""
        else:
            body.append(line)
    if mark:
        yield _Block(info, before, "\n".join(body), False)


def _refuse_diffs(blocks: Sequence[_Block], said: _Dialect) -> None:
    for block in blocks:
        word = block.info.split(" ")[0].lower()
        if word in _DIFF_INFO or _HUNK.search(block.text):
            raise ReplyError("the reply is a diff", expected=f"whole files, not changes to them: {_expected(said)}")


def _named(blocks: Sequence[_Block], wanted: Sequence[str], said: _Dialect) -> dict[str, _Block]:
    named: dict[str, _Block] = {}
    for block in blocks:
        name = _name_of(block)
        if not name:
            continue
        if name not in wanted:
            raise ReplyError(f"the reply holds a file {name}", expected=f"exactly two files: {_expected(said)}")
        if name in named and named[name].text.strip() != block.text.strip():
            raise ReplyError(f"the reply holds two different versions of {name}", expected="each file once")
        named[name] = block
    return named


def _name_of(block: _Block) -> str:
    """The file name that a block carries: in its info string, alone on the line before, or in a comment on line 1."""
    found = _FILE_NAME.search(block.info.replace(":", " ").replace("=", " ").replace('"', " ").replace("'", " "))
    if found:
        return _base(found.group(1))
    names = _FILE_NAME.findall(block.before)
    # A sentence may mention several files; a heading or a label names one, at its end or by itself.
    label = re.sub(r"[\s*_`#:.)(\-\[\]]+$", "", block.before)
    if len(names) == 1 and len(block.before) < 100 and label.endswith(names[0]):
        return _base(names[0])
    first = block.text.lstrip().split("\n", 1)[0]
    comment = re.match(
        r"^(?://|#(?!include|define|pragma|if)|/\*)\s*(?:file(?:name)?:?\s*)?(\S+?)\s*(?:\*/)?$", first, re.IGNORECASE
    )
    if comment and _FILE_NAME.fullmatch(comment.group(1)):
        return _base(comment.group(1))
    return ""


def _base(path: str) -> str:
    return path.rsplit("/", 1)[-1]


def _guess(named: dict[str, _Block], blocks: Sequence[_Block], wanted: Sequence[str], language: str) -> None:
    """Give an unnamed block its file where its info string leaves no choice."""
    infos = {"plan.py": _PYTHON_INFO, wanted[1]: _KERNEL_INFO[language]}
    unnamed = [block for block in blocks if not _name_of(block)]
    for name in wanted:
        fitting = [block for block in unnamed if block.info.split(" ")[0].lower() in infos[name]]
        if wanted[1].endswith(".py"):
            # Both are Python: only their contents tell them apart.
            fitting = [block for block in fitting if _is_plan(block) == (name == "plan.py")]
        if name not in named and len(fitting) == 1:
            named[name] = fitting[0]


def _is_plan(block: _Block) -> bool:
    return re.search(r"^def plan\(", block.text, re.MULTILINE) is not None


def _checked(name: str, block: _Block, said: _Dialect) -> str:
    if not block.closed:
        raise ReplyError(
            f"{name} is not closed: the reply was cut off", expected="a shorter reply, with both files whole"
        )
    if not block.text.strip():
        raise ReplyError(f"{name} is empty", expected=_expected(said))
    elided = _ELISION.search(block.text)
    if elided:
        raise ReplyError(
            f"{name} leaves code out: {elided.group(0).strip()[:80]!r}", expected="every line of both files"
        )
    return block.text.strip("\n") + "\n"
