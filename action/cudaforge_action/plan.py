"""``mode: plan``: find the targets that are worth a forge job, and emit a balanced matrix of shards.

Runs on a hosted runner: no torch, no key, no token, and no code of the repository; targets are found in its syntax.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from cudaforge_action import held
from cudaforge_action.host import Host, log
from cudaforge_action.inputs import Inputs
from cudaforge_action.matrix import Known, Work, matrix, select, shards
from cudaforge_action.project import Project, project_at
from cudaforge_action.records import Annotation, Shard
from pytest_cudaforge import durable, history
from pytest_cudaforge.discovery import Discovery, discover
from pytest_cudaforge.errors import SituationError, UsageError
from pytest_cudaforge.records import Target, to_json
from pytest_cudaforge.report.markdown import escape

__all__ = ["PLAN_FILE", "planned_shards", "run"]

PLAN_FILE = "plan.json"
#: A summary of a thousand rows is read by nobody; all of them are in the artifact.
_MOST_ROWS = 200
_MOST_ANNOTATIONS = 10


def run(inputs: Inputs, host: Host) -> int:
    """Writes ``plan/plan.json``; outputs ``matrix``, ``shards`` and ``targets``. Always 0.

    Raises :class:`UsageError` for an unknown target, a path that is not there, or files that cannot be read.
    """
    project = project_at(inputs.working_directory, os.environ, inputs.paths)
    found = discover(project.paths, project.root, no_recurse=project.no_recurse)
    _tell_problems(found, project, host)
    targets = _chosen(found, inputs.targets)
    kernels, notes = _kernels(project, inputs)
    past = history.read(inputs.history_file or project.settings.history)
    work = select(targets, kernels, inputs.runners, min_headroom=inputs.min_headroom, measured=past.measurements)
    made = shards(work, inputs.runners, inputs.max_shards)
    notes += [*past.notes, *_unknown(kernels, past.measurements), *_gone(kernels, found, project), *_left(work, made)]
    _write(inputs.output / "plan", work, made)
    host.output("matrix", matrix(made))
    host.output("shards", str(len(made)))
    host.output("targets", str(len({one.target for one in work})))
    few = _few(work, made, len(targets), found)
    host.summary(_table(work, made, few, notes))
    file = (inputs.output / "plan" / PLAN_FILE).as_posix()
    log(host, [few, *(f"{one.target}: {one.reason}, {one.why}" for one in work), *notes, f"plan: {file}"])
    return 0


def planned_shards(folder: Path) -> tuple[Shard, ...]:
    """The shards of a plan of this very machine, for whoever runs them one after the other.

    Raises :class:`SituationError` where there is no plan.
    """
    from pytest_cudaforge.records import from_json

    try:
        data = json.loads((folder / PLAN_FILE).read_text(encoding="utf-8"))
        return tuple(from_json(Shard, one) for one in data["shards"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SituationError(f"{folder / PLAN_FILE} is no plan: {error}", remedy="run mode plan first") from None


# -- what there is ----------------------------------------------------------------------------------------------


def _chosen(found: Discovery, wanted: Sequence[str]) -> list[Target]:
    """The targets that the input names by id, name or pattern, all of them without it. Raises :class:`UsageError`."""
    if not wanted:
        return list(found.targets)
    chosen: dict[str, Target] = {}
    for name in wanted:
        fitting = [target for target in found.targets if _fits(target, name)]
        if not fitting:
            raise _unknown_target(name, found)
        chosen.update((target.id, target) for target in fitting)
    return [target for target in found.targets if target.id in chosen]


def _fits(target: Target, name: str) -> bool:
    name = name.removesuffix("::forge")
    return name in (target.id, target.qualname) or fnmatchcase(target.id, name) or fnmatchcase(target.qualname, name)


def _unknown_target(name: str, found: Discovery) -> UsageError:
    problem = next((one for one in found.problems if one.id in (name, name.removesuffix("::forge"))), None)
    if problem is not None:
        return UsageError(f"input targets: {name} cannot be forged: {problem.path}:{problem.line}: {problem.text}")
    known = [one for target in found.targets for one in (target.id, target.qualname)]
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]}?" if close else ""
    shown = ", ".join(target.id for target in found.targets[:20]) or "none"
    return UsageError(
        f"input targets: there is no target {name[:200]}{hint}",
        expected=f"a target's id, its name, or a pattern of either; found here: {shown}",
        remedy="mend the input, or mark the module with @forge_target",
    )


def _kernels(project: Project, inputs: Inputs) -> tuple[list[Known], list[str]]:
    kernels = list(held.here(project.manifest))
    on_branch = held.proposed(project.settings.forge_dir, inputs.head_branch)
    notes = [f"{on_branch.note}: a kernel that waits there for its merge counts as missing"] if on_branch.note else []
    return [*kernels, *on_branch.kernels], notes


# -- what is told -----------------------------------------------------------------------------------------------


def _tell_problems(found: Discovery, project: Project, host: Host) -> None:
    top = Path.cwd()
    remarks = []
    for problem in found.problems:
        path = project.root / problem.path
        shown = path.relative_to(top).as_posix() if path.is_relative_to(top) else problem.path
        remarks.append(Annotation("warning", "this target cannot be forged", problem.text, shown, problem.line))
    host.annotate(remarks[:_MOST_ANNOTATIONS])


def _unknown(kernels: Sequence[Known], measured: Sequence[history.Measurement]) -> list[str]:
    """What would need a runner to be told: whether its torch is still the one that kernels were verified with."""
    known = {one.run.machine.arch for one in measured}
    unknown = sorted({kernel.entry.arch for kernel in kernels} - known)
    versions = sorted({kernel.entry.torch for kernel in kernels if kernel.entry.arch in unknown and kernel.entry.torch})
    if not versions:
        return []
    return [
        f"no history of the guard says which torch the runners of {', '.join(unknown)} have; their kernels were "
        f"verified with torch {', '.join(versions)}"
    ]


def _gone(kernels: Sequence[Known], found: Discovery, project: Project) -> list[str]:
    """Kernels whose target is nowhere: nothing to forge, but something to tidy up."""
    if project.paths != (project.folder,) or project.folder != project.root:
        return []
    ids = {target.id for target in found.targets} | {problem.id for problem in found.problems}
    gone = sorted({one.entry.target for one in kernels if not one.proposed and one.entry.target not in ids})
    return [f"{target} is gone, but its kernel is still in {project.manifest.parent.name}/" for target in gone]


def _left(work: Sequence[Work], made: Sequence[Shard]) -> list[str]:
    count = len(work) - sum(len(shard.targets) for shard in made)
    return [f"{count} targets did not fit into this run's jobs; the next run finds them again"] if count else []


def _few(work: Sequence[Work], made: Sequence[Shard], targets: int, found: Discovery) -> str:
    if not targets:
        where = "; what cannot be forged is told above" if found.problems else ": mark a module with @forge_target"
        return f"Nothing: no target was found{where}."
    if not work:
        return f"Nothing: {_counted(targets, 'target')} looked at, each has what it needs."
    wanted = len({one.target for one in work})
    return f"{wanted} of {_counted(targets, 'target')} worth forging, in {_counted(len(made), 'job')}."


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")


def _table(work: Sequence[Work], made: Sequence[Shard], few: str, notes: Sequence[str]) -> str:
    lines = ["## What to forge", "", few]
    if work:
        lines += ["", "| target | why | runner | job |", "|---|---|---|---|"]
        lines += [_row(one, made) for one in work[:_MOST_ROWS]]
    if len(work) > _MOST_ROWS:
        lines.append(f"\n… and {len(work) - _MOST_ROWS} more, in {PLAN_FILE} of the artifact.")
    lines += ["", *(f"- {escape(note)}" for note in notes[:50])] if notes else []
    return "\n".join(lines) + "\n"


def _row(one: Work, made: Sequence[Shard]) -> str:
    job = next(
        (shard.name for shard in made if shard.runs_on == one.runner.labels and one.target in shard.targets), "—"
    )
    runner = ", ".join(one.runner.labels)
    return f"| {escape(one.target)} | {one.reason}: {escape(one.why)} | {escape(runner)} | {escape(job)} |"


def _write(folder: Path, work: Sequence[Work], made: Sequence[Shard]) -> None:
    data = {"format": "cudaforge-plan", "version": 1, "shards": to_json(list(made)), "work": to_json(list(work))}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        durable.write_file(folder / PLAN_FILE, json.dumps(data, indent=1, ensure_ascii=False) + "\n")
    except OSError as error:
        raise SituationError(f"{folder / PLAN_FILE} cannot be written: {error.strerror or error}") from error
