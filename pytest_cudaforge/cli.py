"""``cudaforge evaluate | profile | lint | list | calibrate | history | doctor | skill``: for people and agents.

Exit status: 0 for ``PASSED`` (or nothing wrong), 1 for any other verdict, 2 for a usage or situation error.
The JSON documents of ``evaluate``, ``profile`` and ``lint`` are stable contracts; see :func:`evaluation_document`,
:func:`profile_document` and :func:`lint_document`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.resources
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_cudaforge.errors import ForgeError, TargetError, UsageError
from pytest_cudaforge.report.escaping import plain
from pytest_cudaforge.target import WORKS

if TYPE_CHECKING:
    from pytest_cudaforge.config import ForgeConfig
    from pytest_cudaforge.discovery import Discovery
    from pytest_cudaforge.evaluation.evaluator import Evaluator
    from pytest_cudaforge.history import History
    from pytest_cudaforge.records import Candidate, Evaluation, LintFinding, Target

__all__ = [
    "evaluation_document",
    "lint_document",
    "main",
    "profile_document",
    "read_candidate",
    "root_of",
    "target_named",
]

#: A folder that has one of these is the root that ids start from, as for pytest.
ROOT_MARKS = ("pytest.ini", "pyproject.toml", "tox.ini", "setup.cfg", ".git")
#: Nobody's candidate is bigger than this; a wrong path should not fill the memory.
MAX_SOURCE_BYTES = 4 << 20


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    arguments = _parser().parse_args(argv)
    try:
        status: int = arguments.run(arguments)
    except ForgeError as error:
        print(f"cudaforge: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("cudaforge: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # `cudaforge list | head`: the reader has what it wanted. Python would complain again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cudaforge", description="Check and time kernels against PyTorch modules.")
    commands = parser.add_subparsers(required=True, metavar="command")

    evaluate = commands.add_parser("evaluate", help="build, verify and time one candidate")
    _add_candidate(evaluate, "write the verdict as JSON; - for stdout")
    evaluate.add_argument(
        "--sanitize",
        action=argparse.BooleanOptionalAction,
        help="CUDA plans: run compute-sanitizer, as for winners (default: where it is installed)",
    )
    evaluate.add_argument("--blocks", action="store_true", help="keep every timed block in the JSON")
    evaluate.set_defaults(run=_evaluate)

    profile = commands.add_parser("profile", help="say where a right candidate's time goes, and what bounds it")
    _add_candidate(profile, "write verdict, profile and evidence as JSON; - for stdout")
    profile.add_argument(
        "--depth", choices=("quick", "full"), default="quick", help="full: rules, hot source lines, every metric"
    )
    profile.set_defaults(run=_profile, sanitize=False, blocks=False)

    lint = commands.add_parser("lint", help="say which targets a trivial kernel would pass, and which none can")
    lint.add_argument(
        "targets", nargs="*", help="files, folders, path/to/file.py::Name (default: forge_paths, or here)"
    )
    lint.add_argument("--device", default="auto", help="cpu, cuda or cuda:N (default: a GPU where there is one)")
    lint.add_argument("--json", type=Path, metavar="FILE", help="write the findings as JSON; - for stdout")
    lint.add_argument("--config", type=Path, metavar="FILE", help="cudaforge.yaml to read")
    lint.set_defaults(run=_lint, isolation=None, allow=[])

    listing = commands.add_parser("list", help="print the targets found, without importing anything")
    listing.add_argument("paths", nargs="*", type=Path, help="files and folders (default: forge_paths, or here)")
    listing.add_argument("--json", action="store_true", help="as JSON")
    listing.set_defaults(run=_list)

    calibrate = commands.add_parser("calibrate", help="try the guard on this runner: false alarms, and what it misses")
    calibrate.add_argument("--device", default="auto", help="cpu, cuda or cuda:N (default: a GPU where there is one)")
    calibrate.add_argument(
        "--minutes", type=float, default=3.0, metavar="M", help="about how long (default 3); runs add up"
    )
    calibrate.add_argument("--afresh", action="store_true", help="forget what earlier runs found on this machine")
    calibrate.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON; - for stdout")
    calibrate.add_argument("--config", type=Path, metavar="FILE", help="cudaforge.yaml to read")
    calibrate.set_defaults(run=_calibrate, isolation=None, allow=[])

    history = commands.add_parser("history", help="show what the guard measured over time, and what is alarming in it")
    history.add_argument("file", nargs="?", type=Path, help="JSON lines (default: `history` of cudaforge.yaml)")
    history.add_argument("--target", default="", metavar="T", help="only targets whose id holds this text")
    history.add_argument("--json", action="store_true", help="as JSON")
    history.add_argument("--html", type=Path, metavar="FILE", help="write it as a page")
    history.add_argument(
        "--export",
        nargs=2,
        metavar=("FORMAT", "FILE"),
        help="write the newest figures; FORMAT: github-action-benchmark",
    )
    history.add_argument(
        "--merge", action="append", type=Path, default=[], metavar="FILE", help="first add the lines of this history"
    )
    history.add_argument("--config", type=Path, metavar="FILE", help="cudaforge.yaml to read")
    history.set_defaults(run=_history)

    doctor = commands.add_parser("doctor", help="say what this machine can and cannot do, and how to mend it")
    doctor.add_argument("--json", action="store_true", help="as JSON")
    doctor.set_defaults(run=_doctor)

    skill = commands.add_parser("skill", help="print how a coding agent works with these commands")
    skill.set_defaults(run=_skill)
    return parser


def _add_candidate(command: argparse.ArgumentParser, json_help: str) -> None:
    """What every command takes that begins with a verdict on one candidate."""
    command.add_argument("target", help="path/to/file.py::Name, or a KernelBench file")
    command.add_argument("candidate", type=Path, help="a folder with plan.py and kernel.*, or a .py with ModelNew")
    command.add_argument("--device", default="auto", help="cpu, cuda or cuda:N (default: a GPU where there is one)")
    command.add_argument("--json", type=Path, metavar="FILE", help=json_help)
    command.add_argument("--allow", action="append", choices=WORKS[1:], default=[], help="let this work pass too")
    command.add_argument("--no-lint", action="store_true", help="do not check first whether the target is worth it")
    command.add_argument("--no-timing", action="store_true", help="correctness only")
    command.add_argument(
        "--isolation", choices=("auto", "none"), default=None, help="none: no sandbox; not publishable"
    )
    command.add_argument("--config", type=Path, metavar="FILE", help="cudaforge.yaml to read")


# -- evaluate --------------------------------------------------------------------------------------------------


def _evaluate(arguments: argparse.Namespace) -> int:
    with _opened(arguments) as (target, candidate, evaluator):
        evaluation = _verdict(arguments, target, candidate, evaluator)
    _tell(arguments, _verdict_text(target, evaluation), evaluation_document(evaluation))
    return 0 if evaluation.passed else 1


@contextlib.contextmanager
def _opened(arguments: argparse.Namespace) -> Iterator[tuple[Target, Candidate, Evaluator]]:
    """Target, candidate and evaluator that the command names; everything is checked before the work begins."""
    from pytest_cudaforge.wiring import open_evaluator

    target = target_named(arguments.target)
    candidate = read_candidate(arguments.candidate)
    if arguments.json is not None and arguments.json != Path("-"):
        _check_writable(arguments.json)
    config = _settings(arguments, Path(target.root))
    with open_evaluator(config, keep_blocks=arguments.blocks) as evaluator:
        yield target, candidate, evaluator


def _verdict(arguments: argparse.Namespace, target: Target, candidate: Candidate, evaluator: Evaluator) -> Evaluation:
    faults = () if arguments.no_lint else evaluator.lint(target)
    if faults:
        return _refused(faults, candidate, target, evaluator)
    return evaluator.evaluate(candidate, target, timing=not arguments.no_timing, sanitize=arguments.sanitize)


def _verdict_text(target: Target, evaluation: Evaluation) -> str:
    from pytest_cudaforge.display import evaluation_text

    return f"{target.id} ({evaluation.language}, {evaluation.device})\n{evaluation_text(evaluation)}"


def _tell(arguments: argparse.Namespace, text: str, document: dict[str, Any]) -> None:
    """Text for a person on stdout and the document in ``--json``'s file, or the document alone on stdout."""
    dumped = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False)
    print(dumped if arguments.json == Path("-") else text)
    if arguments.json is not None and arguments.json != Path("-"):
        _write(arguments.json, dumped + "\n")


def _refused(faults: Sequence[str], candidate: Candidate, target: Target, evaluator: Evaluator) -> Evaluation:
    """The verdict on a target that the linter refuses: no candidate can show anything there."""
    from pytest_cudaforge.records import Evaluation, Status

    return Evaluation(
        status=Status.REJECTED,
        reason="the linter refuses this target: " + "; ".join(faults) + " (--no-lint evaluates all the same)",
        candidate=candidate.digest,
        target=target.id,
        isolation=evaluator.isolation,
        language=candidate.language,
        device=evaluator.settings.device,
    )


def evaluation_document(evaluation: Evaluation) -> dict[str, Any]:
    """The verdict as the stable JSON contract: within a version fields are added, never renamed or removed.

    ``work`` is null until something was labelled, the speedups where nothing was timed; ``timing`` and
    ``verification`` are the records, or null where the status allows none.
    """
    from pytest_cudaforge.records import to_json

    timing = evaluation.timing
    work = {"label": evaluation.work, "own_share": timing.own_share if timing is not None else None}
    document: dict[str, Any] = {
        "format": "cudaforge-evaluation",
        "version": 1,
        "status": evaluation.status,
        "reason": evaluation.reason,
        "target": evaluation.target,
        "candidate": evaluation.candidate,
        "language": evaluation.language,
        "device": evaluation.device,
        "isolation": evaluation.isolation.grade,
        "isolation_reasons": evaluation.isolation.reasons,
        "isolation_remedy": evaluation.isolation.remedy,
        "work": work if evaluation.work is not None else None,
        "speedup": {
            "eager": timing.speedup_eager if timing is not None else None,
            "compile": timing.speedup_compile if timing is not None else None,
        },
        "timing": timing,
        "verification": evaluation.verification,
        "build": evaluation.build,
        "seconds": evaluation.seconds,
        "environment": dict(evaluation.environment),
    }
    return {name: to_json(value) for name, value in document.items()}


# -- profile ---------------------------------------------------------------------------------------------------


def _profile(arguments: argparse.Namespace) -> int:
    from pytest_cudaforge import evidence

    with _opened(arguments) as (target, candidate, evaluator):
        evaluation = _verdict(arguments, target, candidate, evaluator)
        if not evaluation.passed:
            _tell(arguments, _verdict_text(target, evaluation), profile_document(evaluation, ""))
            return 1
        profile = evaluator.profile(candidate, target, depth=arguments.depth)
        evaluation = dataclasses.replace(evaluation, profile=profile)
        page = evidence.page(evaluation, device=evaluator.device)
    kept = f"\n\nThe profiler's own file: {profile.report}" if profile.report else ""
    text = f"{_verdict_text(target, evaluation)}\n\n{plain(page.text)}{kept}"
    _tell(arguments, text, profile_document(evaluation, page.text))
    return 0


def profile_document(evaluation: Evaluation, page: str) -> dict[str, Any]:
    """What ``profile`` found, as the stable JSON contract: within a version fields are added, never renamed or removed.

    ``profile`` is the record and ``evidence`` the page as text, null and "" where the verdict is not ``PASSED``.
    ``bounds``: what bounds the candidate's kernels, and a library's that takes much of the time, with the figures and
    source lines that show it. ``verdict`` is the document of ``evaluate``.
    """
    from pytest_cudaforge.hardware.diagnosis import diagnose
    from pytest_cudaforge.records import to_json

    profile = evaluation.profile
    return {
        "format": "cudaforge-profile",
        "version": 1,
        "status": evaluation.status.value,
        "reason": evaluation.reason,
        "target": evaluation.target,
        "candidate": evaluation.candidate,
        "rung": profile.rung if profile is not None else None,
        "bounds": to_json(diagnose(profile)) if profile is not None else [],
        "profile": to_json(profile),
        "evidence": page,
        "verdict": evaluation_document(evaluation),
    }


# -- what the commands name ------------------------------------------------------------------------------------


def target_named(name: str) -> Target:
    """The target that ``path/to/file.py::Name`` means, or the one target of ``path/to/file.py``.

    Raises ``UsageError`` with the names that the file does hold.
    """
    from pytest_cudaforge.discovery import discover

    file, _, qualname = name.partition("::")
    path = Path(file)
    if not path.is_file():
        raise UsageError(f"{file} is not a file", expected="path/to/file.py::Name, or a KernelBench file")
    found = discover([path], root_of(path))
    qualname = qualname.removesuffix("::forge")
    named = [target for target in found.targets if not qualname or target.qualname == qualname]
    if len(named) == 1:
        return named[0]
    for problem in found.problems:
        if not qualname or problem.id.partition("::")[2] in (qualname, ""):
            raise UsageError(f"{problem.path}:{problem.line}: {problem.text}")
    here = ", ".join(target.qualname for target in found.targets) or "no target"
    what = f"{file} holds no target {qualname}" if qualname else f"{file} does not name one target"
    raise UsageError(what, expected=f"path/to/file.py::Name; {file} holds: {here}")


def read_candidate(path: Path) -> Candidate:
    """A candidate from a folder (``plan.py`` and ``kernel.cu``, ``kernel.py`` or ``kernel.cpp``), a ``.py`` with
    ``ModelNew``, or an ``options.json`` (or its folder), a compiler configuration.

    The files are read as text, never imported. Raises ``UsageError``.
    """
    from pytest_cudaforge.records import Candidate
    from pytest_cudaforge.runtime.configuration import FILE_NAME, LANGUAGE

    options = path / FILE_NAME if path.is_dir() else path
    if options.name == FILE_NAME and options.is_file():
        return Candidate.of(LANGUAGE, {FILE_NAME: _source(options)})
    if path.is_file() and path.suffix == ".py":
        text = _source(path)
        if "class ModelNew" not in text:
            raise UsageError(f"{path} defines no ModelNew", expected="a .py file with `class ModelNew(nn.Module)`")
        return Candidate.of("module", {path.name: text})
    if not path.is_dir():
        raise UsageError(f"{path} is no candidate", expected="a folder with plan.py and kernel.*, or a .py file")
    from pytest_cudaforge.languages import LANGUAGES, load

    for name in LANGUAGES:
        language = load(name)
        if (path / language.source_name).is_file():
            return Candidate.of(name, {file: _source(path / file) for file in language.file_names})
    names = " or ".join(load(name).source_name for name in LANGUAGES)
    raise UsageError(f"{path} holds no kernel", expected=f"plan.py beside {names}")


def _source(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_SOURCE_BYTES:
            raise UsageError(f"{path} is larger than {MAX_SOURCE_BYTES >> 20} MiB", expected="a kernel's source")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", expected="plan.py beside kernel.*") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8 text", expected="a kernel's source") from None


def root_of(path: Path) -> Path:
    """The folder that ids start from: the nearest one upwards with a pytest or project file, else the working one."""
    start = Path(os.path.abspath(path))
    for folder in (start, *start.parents):
        if any((folder / mark).exists() for mark in ROOT_MARKS):
            return folder
    return Path.cwd()


def _settings(arguments: argparse.Namespace, root: Path) -> ForgeConfig:
    from pytest_cudaforge.config import load

    options: dict[str, object] = {"config": arguments.config, "isolation": arguments.isolation}
    if arguments.device != "auto":
        options["device"] = arguments.device
    if arguments.allow:
        options["allow"] = ",".join(["kernel", *arguments.allow])
    return load(options, root=root, start=Path.cwd(), environ=os.environ)


def _check_writable(path: Path) -> None:
    # Before the work, not after it.
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise UsageError(f"--json: {path} cannot be written", expected="a file in a folder that can be written")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--json: {path} cannot be written: {error.strerror}", remedy="give another file") from None


# -- lint ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Linted:
    """One target's findings by workload, or the ``error`` that its own code ended with."""

    target: Target
    findings: tuple[tuple[str, LintFinding], ...]
    error: str

    @property
    def status(self) -> str:
        if self.error:
            return "error"
        return "refused" if any(finding.refuses for _, finding in self.findings) else "ok"


def _lint(arguments: argparse.Namespace) -> int:
    from pytest_cudaforge.wiring import open_evaluator

    if arguments.json is not None and arguments.json != Path("-"):
        _check_writable(arguments.json)
    found = [_scan([], None)] if not arguments.targets else [_named_or_below(name) for name in arguments.targets]
    targets = list({(target.root, target.id): target for part in found for target in part.targets}.values())
    problems = [problem for part in found for problem in part.problems]
    linted: list[_Linted] = []
    quiet = arguments.json == Path("-")
    if targets:
        with open_evaluator(_settings(arguments, Path(targets[0].root))) as evaluator:
            for target in targets:
                linted.append(_linted(target, evaluator))
                if not quiet:
                    print("\n".join(_lint_lines(linted[-1])), flush=True)
    for problem in problems:
        print(f"{problem.path}:{problem.line}: {problem.text}", file=sys.stderr)
    if not targets and not problems:
        print("no targets; mark one with @forge_target", file=sys.stderr)
    document = json.dumps(lint_document(linted, problems), indent=1, ensure_ascii=False)
    if quiet:
        print(document)
    elif arguments.json is not None:
        _write(arguments.json, document + "\n")
    return 1 if problems or any(one.status != "ok" for one in linted) else 0


def _named_or_below(name: str) -> Discovery:
    """What ``path::Name``, a file or a folder holds. Raises ``UsageError``."""
    from pytest_cudaforge.discovery import Discovery

    if "::" in name:
        return Discovery((target_named(name),), (), 1)
    return _scan([Path(name)], root_of(Path(name)))


def _linted(target: Target, evaluator: Evaluator) -> _Linted:
    try:
        return _Linted(target, evaluator.findings(target), "")
    except TargetError as error:
        return _Linted(target, (), error.what)


def _lint_lines(linted: _Linted) -> list[str]:
    words = {"ok": "ok", "refused": "refused", "error": "cannot be run"}
    lines = [f"{linted.target.id}: {words[linted.status]}"]
    lines += [f"  {line}" for line in linted.error.splitlines()]
    for workload, finding in linted.findings:
        lines.append(f"  {'refused' if finding.refuses else 'note'}  {workload}: {finding.text}")
    return lines


def lint_document(linted: Sequence[_Linted], problems: Sequence[Any]) -> dict[str, Any]:
    """The findings as the stable JSON contract: within a version fields are added, never renamed or removed.

    ``status`` of a target: ok (notes at most), refused, error (its own code failed). ``problems``: what the scan
    could not make a target of.
    """
    from pytest_cudaforge.records import to_json

    targets = [
        {
            "target": one.target.id,
            "status": one.status,
            "error": one.error,
            "findings": [{"workload": workload, **to_json(finding)} for workload, finding in one.findings],
        }
        for one in linted
    ]
    return {"format": "cudaforge-lint", "version": 1, "targets": targets, "problems": to_json(list(problems))}


# -- list ------------------------------------------------------------------------------------------------------


def _scan(paths: Sequence[Path], root: Path | None) -> Discovery:
    """Targets below ``paths``, or below the settings' forge_paths, or here. Raises ``UsageError``."""
    from pytest_cudaforge.config import load
    from pytest_cudaforge.discovery import discover

    root = root or root_of(Path.cwd())
    for path in paths:
        if not path.exists():
            raise UsageError(f"{path} does not exist", expected="files and folders to scan")
    settings = None if paths else load({}, root=root, start=Path.cwd(), environ=os.environ)
    return discover(paths or (settings.forge_paths if settings is not None else ()) or [Path.cwd()], root)


def _list(arguments: argparse.Namespace) -> int:
    from pytest_cudaforge.records import to_json

    found = _scan(arguments.paths, None)
    if arguments.json:
        print(json.dumps({"targets": to_json(found.targets), "problems": to_json(found.problems)}, indent=1))
    else:
        for target in found.targets:
            print(target.id)
        for problem in found.problems:
            print(f"{problem.path}:{problem.line}: {problem.text}", file=sys.stderr)
        if not found.targets and not found.problems:
            print(f"no targets in {found.files} Python files; mark one with @forge_target", file=sys.stderr)
    return 1 if found.problems else 0


# -- calibrate -------------------------------------------------------------------------------------------------


def _calibrate(arguments: argparse.Namespace) -> int:
    from pytest_cudaforge import calibration
    from pytest_cudaforge.wiring import cache_dir, open_evaluator

    if not 0 < arguments.minutes < 24 * 60:
        raise UsageError(f"--minutes {arguments.minutes:g}", expected="more than 0 and less than a day")
    if arguments.json is not None and arguments.json != Path("-"):
        _check_writable(arguments.json)
    place, quiet = cache_dir(os.environ), arguments.json == Path("-")
    with open_evaluator(_settings(arguments, root_of(Path.cwd()))) as evaluator:
        found = calibration.calibrate(
            evaluator,
            minutes=arguments.minutes,
            earlier=None if arguments.afresh else calibration.load(evaluator.device, place),
            on_trial=lambda trial: None if quiet else print(calibration.line(trial), flush=True),
        )
    file = calibration.store(found, place)
    _tell(arguments, f"{calibration.told(found)}\nkept in {file}", calibration.document(found))
    return 0 if found.fit else 1


# -- history ---------------------------------------------------------------------------------------------------

_EXPORTS = ("github-action-benchmark",)


def _history(arguments: argparse.Namespace) -> int:
    from pytest_cudaforge import history
    from pytest_cudaforge.config import load
    from pytest_cudaforge.report import history_rows, history_text

    config = load({"config": arguments.config}, root=root_of(Path.cwd()), start=Path.cwd(), environ=os.environ)
    path = arguments.file or config.history
    if arguments.export and arguments.export[0] not in _EXPORTS:
        raise UsageError(f"--export: no format {arguments.export[0]!r}", expected=", ".join(_EXPORTS))
    if arguments.merge:
        came = history.merge(path, arguments.merge, max_bytes=int(config.history_mb * 1e6))
        print(f"{came} line{'' if came == 1 else 's'} came into {path}", file=sys.stderr)
    if arguments.file is not None and not path.is_file():
        raise UsageError(f"there is no history {path}", expected="a file that pytest --forge-guard appended to")
    found = history.read(path)
    _write_history(arguments, found)
    kept = [one for one in found.measurements if arguments.target in one.target]
    alarms = history_rows.last_alarms(kept)
    if arguments.json:
        rows = history_rows.series_rows(kept)
        document = history_rows.document(rows, alarms, found.notes)
        print(json.dumps(document, indent=1, ensure_ascii=True, allow_nan=False))
        return 0
    rows = history_rows.series_rows(kept, most=history_text.MOST_RUNS)
    if not rows:
        of = f" of targets named {arguments.target}" if arguments.target else ""
        print(f"no measurements{of} in {path}; pytest --forge-guard appends them", file=sys.stderr)
    if told := history_text.text(rows, alarms, found.notes):
        print(told)
    return 0


def _write_history(arguments: argparse.Namespace, found: History) -> None:
    """The files that were asked for. Raises ``UsageError`` for one that cannot be written."""
    from pytest_cudaforge.report import files, github_benchmark, history_page, history_rows

    kept = [one for one in found.measurements if arguments.target in one.target]
    if arguments.html is not None:
        rows, alarms = history_rows.series_rows(kept), history_rows.last_alarms(kept)
        files.write(arguments.html, history_page.page(rows, alarms, found.notes), "--html")
    if arguments.export:
        if not history_rows.last_runs(kept):
            raise UsageError("--export: there is no measurement to write", expected="a history with one at least")
        files.write(Path(arguments.export[1]), github_benchmark.render(kept), "--export")


# -- doctor ----------------------------------------------------------------------------------------------------


def _doctor(arguments: argparse.Namespace) -> int:
    from pytest_cudaforge.doctor import examine, findings_text
    from pytest_cudaforge.records import to_json

    findings = examine(root_of(Path.cwd()), os.environ)
    print(json.dumps(to_json(findings), indent=1) if arguments.json else findings_text(findings))
    return 0 if all(finding.works or finding.optional for finding in findings) else 1


# -- skill -----------------------------------------------------------------------------------------------------


def _skill(arguments: argparse.Namespace) -> int:
    del arguments
    print(importlib.resources.files("pytest_cudaforge").joinpath("SKILL.md").read_text(encoding="utf-8"), end="")
    return 0
