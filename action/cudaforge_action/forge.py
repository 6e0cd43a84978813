"""``mode: forge``: ``pytest --forge`` on one shard's targets, and what it won as a folder for a job that verifies it.

The only mode that holds a model's key. What it reports of its kernels is for readers: whoever publishes them has them
verified from source by a job without one.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cudaforge_action.environment import for_forging, key_names, token_names
from cudaforge_action.held import checked_out
from cudaforge_action.host import Host
from cudaforge_action.inputs import Inputs
from cudaforge_action.interpreter import interpreter
from cudaforge_action.process import Ended, run_quoted
from cudaforge_action.project import Project, project_at
from cudaforge_action.records import ForgedKernel, ForgedShard, Shard
from cudaforge_action.shards import PROFILES, candidate_of, check_target, emptied, write_forged
from pytest_cudaforge import machine
from pytest_cudaforge.discovery import discover
from pytest_cudaforge.errors import ForgeError, SituationError, UsageError
from pytest_cudaforge.forging import with_own_runs
from pytest_cudaforge.languages import LANGUAGES
from pytest_cudaforge.records import Evaluation, Target, Trace
from pytest_cudaforge.report.markdown import escape
from pytest_cudaforge.runtime import configuration
from pytest_cudaforge.store import RunStore, TargetStore, total_usage

__all__ = ["run"]

_UNFINISHED = "the forge job ended before it could say what it forged"
#: What pytest's exit status means: https://docs.pytest.org/en/stable/reference/exit-codes.html
_ENDED: Mapping[int, str] = {
    2: "pytest was interrupted",
    3: "pytest had an internal error",
    4: "pytest refused its command line or the configuration",
    5: "pytest found none of the shard's targets",
}
_REPORT_OPTIONS: Mapping[str, str] = {
    "junit.xml": "--junit-xml",
    "report.json": "--forge-json",
    "report.html": "--forge-html",
}


def run(inputs: Inputs, host: Host) -> int:
    """Forge ``inputs.shard``; writes ``forged/<shard>/``.

    0 where all went its way, also where no faster kernel was found; 1 where pytest could not do its work, or nothing
    was forged and some target failed (with ``strict``: where any did). Raises :class:`UsageError` for a shard that is
    missing or holds ids that are none, and for isolation none beside a key or token.
    """
    shard = _shard(inputs)
    project = project_at(inputs.working_directory, os.environ, inputs.paths)
    argv = _argv(inputs, shard, project)
    folder = emptied(inputs.output, "forged", shard.name)
    unverified = emptied(inputs.output, "unverified", shard.name)
    commit = checked_out(project.root) or host.context.sha
    write_forged(folder, ForgedShard(shard.name, commit, error=_UNFINISHED), {})
    began = time.monotonic()
    ended = run_quoted(
        # The checkout's own kernels stay as they are until a job without a key has verified these.
        [*argv, f"--override-ini=forge_dir={unverified.resolve()}", *_reports(folder), *_ids(shard, project)],
        project.folder,
        for_forging(os.environ, project.settings) | {"PYTHONUNBUFFERED": "1"},
        host,
        f"pytest --forge ({shard.name})",
    )
    found = _collected(shard, project, folder)
    error = _error(ended, folder)
    told = ForgedShard(
        *(shard.name, commit, found.machine, found.kernels, _spent(folder, found), time.monotonic() - began, error)
    )
    write_forged(folder, told, found.traces)
    _tell(host, told, found, folder)
    return _status(ended, told, inputs.strict)


# -- before ------------------------------------------------------------------------------------------------------------


def _shard(inputs: Inputs) -> Shard:
    if inputs.shard is None:
        raise UsageError(
            "input shard is missing",
            expected="one shard that mode plan made, as JSON",
            remedy="in a workflow `shard: ${{ matrix.shard }}`; elsewhere one of `shards` in plan/plan.json",
        )
    if not inputs.shard.targets:
        raise UsageError(f"the shard {inputs.shard.name} holds no targets", expected="ids of targets")
    for target in inputs.shard.targets:
        check_target(target)
    return inputs.shard


def _argv(inputs: Inputs, shard: Shard, project: Project) -> list[str]:
    """Everything but the files of the results and the ids. What is given twice counts by its last: ours."""
    python = interpreter(inputs)
    device = shard.device or inputs.device
    options = [
        f"--rootdir={project.root}",
        *([f"--config-file={project.inifile}"] if project.inifile is not None else []),
        *([f"--forge-config={project.settings.file}"] if project.settings.file is not None else []),
        *([f"--forge-device={device}"] if device else []),
        *([f"--forge-rounds={inputs.rounds}"] if inputs.rounds is not None else []),
        *([f"--forge-max-usd={inputs.max_usd}"] if inputs.max_usd is not None else []),
        *(["--forge-strict"] if inputs.strict else []),
        _isolation(inputs, project),
    ]
    _refuse_workloads(inputs.pytest_args)
    return [python, "-m", "pytest", "--forge", *inputs.pytest_args, *options]


def _isolation(inputs: Inputs, project: Project) -> str:
    """Raises :class:`UsageError` where candidates would run unconfined beside something worth stealing."""
    given = list(_values(inputs.pytest_args, "--forge-isolation"))
    wanted = given[-1] if given else project.settings.isolation
    if wanted != "none":
        # Said once more: an option of an ini file, or of PYTEST_ADDOPTS, must not say otherwise unseen.
        return "--forge-isolation=auto"
    secrets = (*token_names(os.environ), *key_names(os.environ, project.settings))
    if secrets:
        raise UsageError(
            f"isolation is none, and the environment holds {', '.join(secrets)}: a kernel could read that",
            expected="isolation auto in a job that has a key or a token",
            remedy="leave isolation at auto; `cudaforge doctor` says what this machine lacks for it",
        )
    return "--forge-isolation=none"


def _values(args: Sequence[str], option: str) -> Iterator[str]:
    for place, argument in enumerate(args):
        if argument.startswith(option + "="):
            yield argument.partition("=")[2]
        elif argument == option and place + 1 < len(args):
            yield args[place + 1]


def _refuse_workloads(args: Sequence[str]) -> None:
    if any(argument.partition("=")[0] == "--forge-workload" for argument in args):
        raise UsageError(
            "input pytest-args: --forge-workload is not known to the job that verifies",
            expected="`workloads:` in cudaforge.yaml, or the variable CUDAFORGE_WORKLOADS in both jobs",
        )


def _reports(folder: Path) -> list[str]:
    return [f"{option}={folder.resolve() / name}" for name, option in _REPORT_OPTIONS.items()]


def _ids(shard: Shard, project: Project) -> list[str]:
    return [f"{project.root / path}::{name}" for path, _, name in (one.partition("::") for one in shard.targets)]


# -- after -------------------------------------------------------------------------------------------------------------


@dataclass
class _Found:
    """What the run directory holds of the shard's targets, finished or not. ``usd``: what their rounds cost, None where
    a price is unknown."""

    kernels: tuple[ForgedKernel, ...] = ()
    traces: dict[str, Trace] = field(default_factory=dict)
    outcomes: list[Trace] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    usd: float | None = None
    machine: str = ""


def _collected(shard: Shard, project: Project, folder: Path) -> _Found:
    """From the run directory, where every finished step of a killed run is as well."""
    found, usages = _Found(), []
    settings = with_own_runs(project.settings)
    for target in _targets(shard, project):
        for language in (*LANGUAGES, configuration.LANGUAGE):
            store = RunStore(settings.run_dir).target(target, language)
            try:
                trace = _trace(store, target)
                usages += [entry.usage for entry in (store.rounds() if trace is None else ())]
                if trace is not None:
                    usages.append(trace.usage)
                    _keep(trace, target, store, folder, found)
            except ForgeError as error:
                found.notes.append(f"{target.id} ({language}): {error.what}")
    found.usd = total_usage(usages).usd
    return found


def _keep(trace: Trace, target: Target, store: TargetStore, folder: Path, found: _Found) -> None:
    """Raises ``ForgeError`` for a winner that could not be handed on."""
    found.outcomes.append(trace)
    if trace.hardware is not None and not found.machine:
        found.machine = machine.describe(trace.hardware).text
    if (kernel := _kernel(trace, target)) is not None:
        kernel = _with_provenance(kernel, trace, store)
        found.kernels = (*found.kernels, kernel)
        found.traces[kernel.trace] = _without_paths(trace)
        _keep_profile(store, trace, folder / PROFILES / f"{target.slug}-{trace.language}.ncu-rep", found)


def _targets(shard: Shard, project: Project) -> list[Target]:
    paths = sorted({project.root / one.partition("::")[0] for one in shard.targets})
    wanted = set(shard.targets)
    return [target for target in discover(paths, project.root).targets if target.id in wanted]


def _trace(store: TargetStore, target: Target) -> Trace | None:
    """The outcome that was written for this very source, None where there is none."""
    header = store.directory / "target.json"
    if not header.is_file():
        return None
    try:
        data = json.loads(header.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SituationError(f"{header} cannot be read: {error}") from None
    known = isinstance(data, dict) and (data.get("id"), data.get("source_digest")) == (target.id, target.digest)
    return store.trace() if known else None


def _kernel(trace: Trace, target: Target) -> ForgedKernel | None:
    if trace.outcome != "forged":
        return None
    entry = next((entry for entry in trace.rounds if entry.number == trace.winner), None)
    if entry is None or entry.candidate is None:
        return None
    name = f"{target.slug}-{trace.language}.json"
    kernel = ForgedKernel(target.id, target.digest, trace.language, entry.candidate.digest, name)
    candidate_of(kernel, trace)
    return kernel


def _with_provenance(kernel: ForgedKernel, trace: Trace, store: TargetStore) -> ForgedKernel:
    """Who was asked, and the digests of what they were asked, as far as the run directory still says."""
    try:
        replies = [reply for entry in trace.rounds for reply in store.round(entry.number).replies().values()]
    except ForgeError:
        return kernel
    models = tuple(dict.fromkeys(reply.model for reply in replies if reply.model))
    return dataclasses.replace(kernel, models=models, prompts=tuple(reply.prompt_digest for reply in replies))


def _without_paths(trace: Trace) -> Trace:
    """Where a profiler's file lies on this machine is nobody's business elsewhere."""
    rounds = tuple(dataclasses.replace(one, evaluation=_cleaned(one.evaluation)) for one in trace.rounds)
    return dataclasses.replace(trace, rounds=rounds, final=_cleaned(trace.final))


def _cleaned(verdict: Evaluation | None) -> Evaluation | None:
    if verdict is None or verdict.profile is None:
        return verdict
    return dataclasses.replace(verdict, profile=dataclasses.replace(verdict.profile, report=""))


def _keep_profile(store: TargetStore, trace: Trace, path: Path, found: _Found) -> None:
    if trace.winner is None:
        return
    profile = store.round(trace.winner).profile()
    if profile is None or not profile.report.endswith(".ncu-rep"):
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(profile.report, path)
    except OSError as error:
        found.notes.append(f"{trace.target}: its profile was not kept: {error.strerror or error}")


def _spent(folder: Path, found: _Found) -> float | None:
    """As pytest reported it, else what the rounds on disk cost."""
    try:
        told = json.loads((folder / "report.json").read_text(encoding="utf-8"))["totals"]["usage"]["usd"]
    except (OSError, ValueError, KeyError, TypeError):
        return found.usd
    return float(told) if isinstance(told, (int, float)) else None


def _error(ended: Ended, folder: Path) -> str:
    """Why the run did not do its work, "" where it did. A target for which nothing was found is no such thing."""
    if ended.cancelled:
        return "the job was cancelled"
    if ended.status < 0:
        return f"pytest was killed by signal {-ended.status}"
    if ended.status in _ENDED:
        return f"{_ENDED[ended.status]}: {ended.last_words[-600:]}"
    if ended.status not in (0, 1):
        return f"pytest ended with the unknown status {ended.status}"
    return "" if (folder / "report.json").is_file() else f"pytest wrote no report\n{ended.last_words[-600:]}"


def _status(ended: Ended, told: ForgedShard, strict: bool) -> int:
    if told.error:
        return 1
    return 1 if ended.status and (strict or not told.kernels) else 0


# -- what is told ------------------------------------------------------------------------------------------------------


def _tell(host: Host, told: ForgedShard, found: _Found, folder: Path) -> None:
    best = max((_speedup(trace) for trace in found.traces.values()), default=None)
    host.output("forged", str(len(told.kernels)))
    host.output("spent-usd", f"{told.usd:.4f}" if told.usd is not None else "")
    host.output("best-speedup", f"{best:.3f}" if best is not None else "")
    page = folder / "report.html"
    host.output("report-html", page.as_posix() if page.is_file() else "")
    if told.error:
        first = told.error.splitlines()[0]
        host.warning(f"{told.shard}: {first}; {len(told.kernels)} kernels were finished and are kept")
    elif not told.kernels:
        host.notice(f"{told.shard}: no faster kernel was found")
    host.summary(_summary(told, found))


def _speedup(trace: Trace) -> float:
    timing = trace.final.timing if trace.final is not None else None
    return timing.speedup_eager if timing is not None else 0.0


def _summary(told: ForgedShard, found: _Found) -> str:
    cost = f", ${told.usd:.2f}" if told.usd is not None else ""
    count = f"{len(told.kernels)} {'kernel' if len(told.kernels) == 1 else 'kernels'}"
    lines = [f"## Forged: {escape(told.shard)}", "", f"{count} in {told.seconds:.0f} s{cost}."]
    lines += ["", f"**Ended early:** {escape(told.error[:600])}"] if told.error else []
    if found.outcomes:
        lines += ["", "| target | language | outcome | vs eager |", "|---|---|---|---|"]
    for trace in found.outcomes[:200]:
        gain = f"{_speedup(trace):.2f}x" if trace.outcome == "forged" else "—"
        reason = escape(f"{trace.outcome}: {trace.reason}"[:300])
        lines.append(f"| {escape(trace.target)} | {escape(trace.language)} | {reason} | {gain} |")
    lines += ["", *(f"- {escape(note[:300])}" for note in found.notes[:20])] if found.notes else []
    told_also = "Nothing is published yet: a job without key or token verifies every kernel from its source first."
    return "\n".join([*lines, "", told_also]) + "\n"
