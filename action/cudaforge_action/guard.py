"""Mode ``guard``: ``pytest --forge-guard`` on what is checked out, and what it found in every form a reader may want.

pytest runs as a process of its own, without tokens: it runs the repo's code, and a pull request's. It never decides by
itself: no report, half a report or an odd exit status is an error, never a pass.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from cudaforge_action import guard_result, telling
from cudaforge_action.annotations import Places, limited, remarks
from cudaforge_action.artifact import ArtifactError
from cudaforge_action.guard_result import GuardResult
from cudaforge_action.host import Host
from cudaforge_action.inputs import Inputs
from cudaforge_action.interpreter import interpreter
from cudaforge_action.process import Ended, run_quoted
from cudaforge_action.records import GuardRun, Unchecked
from cudaforge_action.scrubbing import scrubbed
from pytest_cudaforge.discovery import NEVER, discover
from pytest_cudaforge.errors import ConfigError, ForgeError, UsageError
from pytest_cudaforge.guarded import GuardReport
from pytest_cudaforge.runtime.manifest import Manifest

__all__ = ["run"]

_NOTHING_COLLECTED = 5
_NOTHING = "Nothing to guard: there is no forged kernel, and no target says @forge_target(guard=True)."
_LOST = (
    "pytest found nothing to guard, but there is something: {what}. "
    "Look at the inputs paths and pytest-args, and at forge_dir."
)


@dataclass
class _Stopwatch:
    """Seconds by phase, each from the end of the one before."""

    began: float = field(default_factory=time.monotonic)
    seconds: list[tuple[str, float]] = field(default_factory=list)

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.seconds.append((name, round(now - self.began, 3)))
        self.began = now


def run(inputs: Inputs, host: Host) -> int:
    """Guard, tell, and end with pytest's exit status.

    Raises :class:`~pytest_cudaforge.errors.UsageError` where the folders given are not ones that it can work in.
    """
    watch = _Stopwatch()
    start = _existing(inputs.working_directory)
    folder = _cleared(inputs.output, "guard", Path.cwd())
    argv = [*_pytest(inputs), *_options(inputs, host, start, folder)]
    environ = scrubbed(os.environ) | {"PYTHONUNBUFFERED": "1"}
    watch.lap("preparing")
    ended = run_quoted(argv, start, environ, host, "pytest --forge-guard")
    watch.lap("pytest")
    result = _result(ended, folder, start, host)
    result = _timed(result, watch)
    guard_result.write_run(folder, result.run)
    _warn_of_credentials(start, host)
    tell(result, inputs, host, start, folder, watch)
    return result.run.status


# -- before ------------------------------------------------------------------------------------------------------------


def _existing(folder: Path) -> Path:
    if not folder.is_dir():
        raise UsageError(
            f"input working-directory: {str(folder)!r} is no folder of this checkout",
            expected="a folder, seen from the checkout's top",
            remedy="check out the repository first, and look at the name",
        )
    return folder.resolve()


def _cleared(output: Path, name: str, top: Path) -> Path:
    """``output/name``, empty: a runner keeps its folders, and what an earlier run left there is no result of this one.

    Raises UsageError where a part of it is a link: what is checked out must not lead elsewhere.
    """
    folder = output / name
    for part in (folder, *folder.parents):
        if part.is_symlink() and (top / part).is_relative_to(top):
            raise UsageError(f"{part} is a link", expected="a folder", remedy="choose another output-dir")
    try:
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
    except OSError as error:
        raise UsageError(f"{folder} cannot be used: {error.strerror}", remedy="choose another output-dir") from None
    return folder.resolve()


def _pytest(inputs: Inputs) -> list[str]:
    return [interpreter(inputs), "-m", "pytest"]


def _options(inputs: Inputs, host: Host, start: Path, folder: Path) -> Iterator[str]:
    """Ours come after the user's: of an option that is given twice the last one counts."""
    yield "--forge-guard"
    yield from inputs.pytest_args
    yield f"--forge-json={folder / guard_result.JSON}"
    yield f"--junit-xml={folder / guard_result.JUNIT}"
    yield f"--forge-html={folder / guard_result.HTML}"
    base = _base(inputs, host, start)
    if base:
        yield f"--forge-base={base}"
    if inputs.inconclusive == "fail":  # as a rule what the repo's own settings say
        yield "--forge-guard-inconclusive=fail"
    if inputs.device:
        yield f"--forge-device={inputs.device}"
    if inputs.strict:
        yield "--forge-strict"
    if inputs.history is not None:
        yield f"--forge-history={inputs.history}"
    # A path that begins with a dash is a path.
    yield from (f"./{path}" if path.startswith("-") else path for path in inputs.paths)


def _base(inputs: Inputs, host: Host, start: Path) -> str:
    """What to guard against, as git knows it here; "" where pytest finds it by itself.

    CI services check out one commit, and know branches as origin's; a local one of that name is of an earlier job.
    """
    context = host.context
    told = "" if os.environ.get("GITHUB_BASE_REF") else context.base_ref or context.default_branch
    named = inputs.base or told
    if not named:
        return ""
    places = (named, f"origin/{named}") if context.host == "plain" else (f"origin/{named}", named)
    found = (name for name in places if _git(start, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}"))
    return next(found, f"origin/{named}")


def _git(folder: Path, *args: str) -> str:
    """What git answers, "" where it does not."""
    try:
        done = subprocess.run(
            ["git", *args], cwd=folder, capture_output=True, text=True, check=False, timeout=60, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _warn_of_credentials(start: Path, host: Host) -> None:
    if _git(start, "config", "--name-only", "--get-regexp", r"^http\..*\.extraheader$"):
        host.warning(
            "actions/checkout left its token in git's configuration, where the code that is guarded can read it; "
            "to do: persist-credentials: false"
        )


# -- after -------------------------------------------------------------------------------------------------------------


def _result(ended: Ended, folder: Path, start: Path, host: Host) -> GuardResult:
    """What pytest left, and what it comes to."""
    report, problem = _report(folder)
    empty = report is None or not (report.records or report.error)
    if ended.status == _NOTHING_COLLECTED and empty and not problem:
        return _nothing(report or GuardReport(), ended, start, host)
    outcome = guard_result.judge(report, ended.status)
    run = GuardRun(
        outcome=outcome,
        status=guard_result.exit_status(report, ended.status),
        pytest_status=ended.status,
        unchecked=tuple(guard_result.unchecked(report)) if report is not None else (),
        sha=host.context.sha,
    )
    if outcome != "error":
        return GuardResult(run, report)
    error = problem or (report.error if report is not None else "") or _error(ended, report)
    return GuardResult(replace(run, error=error, unchecked=(*run.unchecked, _everything(ended, start, host))), report)


def _report(folder: Path) -> tuple[GuardReport | None, str]:
    path = folder / guard_result.JSON
    if not path.exists() and not path.is_symlink():
        return None, ""
    try:
        return guard_result.read_report(path), ""
    except ArtifactError as error:
        return None, str(error)


def _error(ended: Ended, report: GuardReport | None) -> str:
    """Why there is no answer, in pytest's own last words."""
    if ended.cancelled:
        known = "what it knew by then is told here" if report is not None else "it knew nothing yet"
        return f"the job was cancelled before the guard's end: {known}"
    if ended.status < 0:
        how = f"pytest was ended by signal {-ended.status}"
    else:
        how = f"pytest ended with exit status {ended.status}"
    how += " before it wrote a report" if report is None else ""
    return f"{how}\n{ended.last_words}".rstrip()


def _everything(ended: Ended, start: Path, host: Host) -> Unchecked:
    if ended.cancelled:
        return Unchecked("all that is not listed here", "the run was cancelled", "run the job again")
    if _git(start, "rev-parse", "--is-shallow-repository") == "true":
        remedy = "GIT_DEPTH: 0" if host.context.host == "gitlab" else "fetch-depth: 0 in the inputs of actions/checkout"
        return Unchecked("all that is not listed here", "this clone is shallow, and may lack the merge base", remedy)
    return Unchecked("all that is not listed here", "the guard could not finish: see above", "")


def _nothing(report: GuardReport, ended: Ended, start: Path, host: Host) -> GuardResult:
    """pytest collected nothing: well where there is nothing, an error where something was not found."""
    found = _guarded_things(start)
    known = GuardRun("pass", 0, ended.status, sha=host.context.sha, note=_NOTHING)
    if found:
        told = _LOST.format(what=found)
        known = replace(known, outcome="error", status=_NOTHING_COLLECTED, note="", error=f"{told}\n{ended.last_words}")
    return GuardResult(known, report)


def _guarded_things(start: Path) -> str:
    """A forged kernel, or a target that asks for a guard, below ``start``; "" where there is none."""
    for place, folders, files in os.walk(start):
        if "pyvenv.cfg" in files:
            folders.clear()
            continue
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in NEVER)
        manifest = Path(place) / "manifest.json"
        if manifest.name in files and _has_entries(manifest):
            return f"{manifest.relative_to(start)} lists forged kernels"
    asked = (target for target in discover([start], start).targets if target.guard is not False)
    return next((f"{target.id} says guard=True" for target in asked), "")


def _has_entries(manifest: Path) -> bool:
    """Another program's manifest is none of ours; one of ours that is damaged is still one."""
    try:
        return bool(Manifest.load(manifest).entries)
    except (ConfigError, UnicodeDecodeError):
        return (manifest.parent.name == "forged") and manifest.stat().st_size > 0


# -- telling -----------------------------------------------------------------------------------------------------------


def _timed(result: GuardResult, watch: _Stopwatch) -> GuardResult:
    """With where time went: of pytest's, what was spent on verifying and racing, and what around it."""
    seconds = dict(watch.seconds)
    report = result.report or GuardReport()
    measuring = min(sum(max(0.0, record.seconds) for record in report.records), seconds["pytest"])
    session = min(max(report.seconds, measuring), seconds["pytest"])
    phases = (
        ("measuring", measuring),
        ("opening and closing the session", session - measuring),
        ("starting pytest, collecting, reporting", seconds["pytest"] - session),
        ("preparing", seconds["preparing"]),
    )
    rounded = tuple((name, round(value, 1)) for name, value in phases)
    return replace(result, run=replace(result.run, seconds=rounded))


def tell(result: GuardResult, inputs: Inputs, host: Host, start: Path, folder: Path, watch: _Stopwatch) -> None:
    """Files, summary, annotations and outputs. What cannot be written is a warning: the exit status stands."""
    shown = inputs.output / "guard"
    places = Places(_top(start), start)
    told = limited(remarks(result, places), f"the summary of this job, or {shown / guard_result.HTML}")
    steps: Sequence[tuple[str, Callable[[], object]]] = (
        ("annotations", lambda: host.annotate(told)),
        ("the summary", lambda: host.summary(telling.summary(result))),
        ("outputs", lambda: _outputs(result, host, shown, folder)),
    )
    for name, step in steps:
        try:
            step()
        except (OSError, ForgeError) as error:
            host.warning(f"{name} could not be written: {error}")
    watch.lap("telling")
    seconds = (*result.run.seconds, ("telling", round(dict(watch.seconds)["telling"], 1)))
    result = replace(result, run=replace(result.run, seconds=seconds))
    guard_result.write_run(folder, result.run)
    _vouch(host, folder)
    print(f"guard: {telling.headline(result)} ({telling.times(result)})", flush=True)


def _outputs(result: GuardResult, host: Host, shown: Path, folder: Path) -> None:
    host.output("outcome", result.outcome)
    host.output("regressions", str(result.count("regression")))
    host.output("failed", str(result.count("failed")))
    host.output("inconclusive", str(result.count("inconclusive", "unfit")))
    host.output("checked", str(result.count("pass", "regression", "unfit", "failed", "inconclusive")))
    host.output("not-checked", str(result.count("skipped", "cancelled")))
    files = {"report-html": guard_result.HTML, "junit-xml": guard_result.JUNIT, "report-json": guard_result.JSON}
    for name, file in files.items():
        host.output(name, str(shown / file) if (folder / file).is_file() else "")


def _vouch(host: Host, folder: Path) -> None:
    """The last word: what this very job left. Artifacts outlive the attempt of a run that made them."""
    try:
        host.output("digests", json.dumps({guard_result.VOUCHED: guard_result.digest(folder)}))
    except ArtifactError as error:
        host.warning(f"outputs could not be written: {error}")


def _top(start: Path) -> Path:
    """The root of the repo, from which hosts count paths."""
    return next((folder for folder in (start, *start.parents) if (folder / ".git").exists()), start)
