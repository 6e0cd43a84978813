"""What the jobs of a forging workflow hand each other: written by one machine, read by another that does not trust it.

::

    forged/<shard>/                       of a forge job: nothing of it is believed but what a kernel's sources are
        shard.json                        a ForgedShard
        traces/<slug>-<language>.json     a winner's whole Trace: its sources, the Judge's trail, what it cost
        profiles/<slug>-<language>.ncu-rep
        junit.xml report.json report.html history.jsonl
    verified/<shard>/                     of a verify job, which had neither key nor token
        shard.json                        a VerifiedShard
        forged/<entry.directory>/         kernel.*, plan.py | options.json, evaluation.json, report.md, report.svg

Reading is strict: any other file, a link, a digest that does not fit, an entry that leads elsewhere and the like raise
:class:`ShardError`, and nothing of the folder is used. The files' bytes are in the records that come back, so that
whoever publishes them never opens the folder again.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from cudaforge_action.artifact import ArtifactError, cleared, files_below, read_bytes, read_json, refuse
from cudaforge_action.records import ForgedKernel, ForgedShard, VerifiedKernel, VerifiedShard
from pytest_cudaforge import durable, languages
from pytest_cudaforge.errors import ConfigError, SituationError, UsageError
from pytest_cudaforge.languages.published import FILE_NAME as BINARIES
from pytest_cudaforge.languages.published import PUBLISHED_LANGUAGES, binary_digest, decode_binaries
from pytest_cudaforge.publishing import refusal
from pytest_cudaforge.records import Candidate, Evaluation, Trace, from_json, to_json
from pytest_cudaforge.runtime import configuration
from pytest_cudaforge.runtime.manifest import Entry

__all__ = [
    "FORGED_DIR",
    "PROFILES",
    "REPORTS",
    "SHARD_FILE",
    "TRACES",
    "Forged",
    "ShardError",
    "Verified",
    "candidate_of",
    "check_name",
    "check_target",
    "emptied",
    "read_forged",
    "read_verified",
    "source_names",
    "tidied",
    "write_forged",
    "write_verified",
]

SHARD_FILE = "shard.json"
TRACES, PROFILES, FORGED_DIR = "traces", "profiles", "forged"
#: What a forge job may leave beside its kernels, and how large that may be.
REPORTS: Mapping[str, int] = {
    "junit.xml": 32 << 20,
    "report.json": 64 << 20,
    "report.html": 64 << 20,
    "history.jsonl": 64 << 20,
}
#: What is published with a kernel's sources: file name -> most bytes.
_TOLD: Mapping[str, int] = {"evaluation.json": 16 << 20, "report.md": 4 << 20, "report.svg": 4 << 20}
_OPTIONAL = "report.svg"

_FORMAT = {ForgedShard: "cudaforge-forged-shard", VerifiedShard: "cudaforge-verified-shard"}
_VERSION = 1
_MOST_KERNELS = 1_000
_SHARD_BYTES, _TRACE_BYTES, _SOURCE_BYTES, _BINARIES_BYTES = 64 << 20, 64 << 20, 4 << 20, 64 << 20
#: Of all traces of a shard: they are held in memory, those of every shard.
_TRACES_BYTES = 256 << 20
#: GitHub refuses single files of more than 100 MiB in a repository; an artifact has no such limit.
_PROFILE_BYTES = 1 << 30

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_TRACE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,150}\.json")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_VARIANT = re.compile(r"(?:[a-z0-9_]{1,40}-)?[0-9a-f]{6}")
_SLUG = re.compile(r"[a-z0-9_]{1,150}-[0-9a-f]{6}")
#: What makes a picture do more than show: scripts, other documents, handlers, references, entities.
_ACTIVE = re.compile(
    r"<\s*(?:script|foreignobject|iframe|image|use|a\b|animate|set\b|[!?])|<[^>]*(?:\bon[a-z]+\s*=|href)|url\s*\("
)
_ARCH = re.compile(r"cpu|sm_[0-9]{2,3}[af]?")

Record = TypeVar("Record", ForgedShard, VerifiedShard)


#: A shard is not what a job of ours leaves; ``what`` says which file and why.
ShardError = ArtifactError


@dataclass(frozen=True)
class Forged:
    """A forge job's folder. ``kernels``: each with its trace, whose winner has the digest that the kernel names.
    ``reports``: those of :data:`REPORTS` that are there. ``profiles``: names below ``profiles/``."""

    folder: Path
    shard: ForgedShard
    kernels: tuple[tuple[ForgedKernel, Trace], ...]
    reports: tuple[str, ...] = ()
    profiles: tuple[str, ...] = ()

    def trace_of(self, kernel: VerifiedKernel) -> Trace | None:
        """How it came about that this was verified; None where it is not of this shard."""
        wanted = (kernel.target, kernel.digest)
        return next((trace for one, trace in self.kernels if (one.target, one.digest) == wanted), None)


@dataclass(frozen=True)
class Verified:
    """A verify job's folder. ``files``: by the ``entry.directory`` of every kernel that may be published, file name to
    bytes; checked against entry and digest."""

    folder: Path
    shard: VerifiedShard
    files: Mapping[str, Mapping[str, bytes]]


# -- what may be named ----------------------------------------------------------------------------------------


def check_name(name: str) -> str:
    """A shard's name, which is a folder's and part of an artifact's. Raises :class:`ShardError`."""
    if not _NAME.fullmatch(name) or ".." in name:
        raise _wrong("shard", f"is named {name[:80]!r}", "letters, digits, '.', '_' and '-'")
    return name


def check_target(target: str) -> str:
    """A target's id inside a repo: ``path/from/rootdir.py::Qualified.Name``. Raises :class:`ShardError`."""
    path, separator, name = target.partition("::")
    parts = path.split("/")
    odd = not separator or not name or "\\" in path or not path.endswith(".py") or len(target) > 1000
    if odd or any(part in ("", ".", "..") for part in parts) or not target.isprintable():
        raise _wrong("shard", f"names the target {target[:200]!r}", "path/in/the/repo.py::Name")
    if not all(part.isidentifier() for part in name.split(".")):
        raise _wrong("shard", f"names the target {target[:200]!r}", "path/in/the/repo.py::Name")
    return target


def source_names(language: str) -> tuple[str, ...]:
    """The files of a candidate in ``language``. Raises :class:`ShardError` for one that may not be published."""
    if language == configuration.LANGUAGE:
        return (configuration.FILE_NAME,)
    if language not in languages.LANGUAGES:
        known = ", ".join([*languages.LANGUAGES, configuration.LANGUAGE])
        raise _wrong("shard", f"holds a kernel in {language[:60]!r}, which cannot be verified from source here", known)
    return languages.load(language).file_names


def emptied(output: Path, kind: str, name: str) -> Path:
    """``output/kind/name``, empty: what an earlier run left there is no result of this one.

    Raises :class:`UsageError` where a part of it is a link: what is checked out must not lead elsewhere.
    """
    folder = output / kind / check_name(name)
    cleared(folder)
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise UsageError(f"{folder} cannot be used: {error.strerror}", remedy="change output-dir") from None
    return folder


# -- a forge job's folder -------------------------------------------------------------------------------------


def write_forged(folder: Path, shard: ForgedShard, traces: Mapping[str, Trace]) -> None:
    """Write ``shard.json`` and the winners' traces (by :attr:`ForgedKernel.trace`); the shard's file comes last.

    Raises :class:`~pytest_cudaforge.errors.SituationError` where the folder cannot be written.
    """
    for name, trace in traces.items():
        _write(folder / TRACES / name, _dump(to_json(trace)))
    _write(folder / SHARD_FILE, _dump(_document(shard)))


def read_forged(folder: Path) -> Forged:
    """A forge job's folder, checked. Raises :class:`ShardError`."""
    listed = files_below(folder)
    traces = sum(size for name, size in listed.items() if name.startswith(f"{TRACES}/"))
    _refuse_size(folder / TRACES, traces, _TRACES_BYTES)
    shard = _record(ForgedShard, folder)
    _each_once([(kernel.target, kernel.language, kernel.variant) for kernel in shard.kernels], folder)
    kernels = tuple((kernel, _trace_of(kernel, folder, listed)) for kernel in shard.kernels)
    named = {f"{TRACES}/{kernel.trace}" for kernel in shard.kernels}
    profiles = _profiles(listed, folder)
    rest = listed.keys() - named - set(profiles) - REPORTS.keys() - {SHARD_FILE}
    if rest:
        raise refuse(folder, f"holds files that no forge job writes: {', '.join(sorted(rest)[:5])}")
    reports = tuple(name for name in REPORTS if name in listed)
    for name in reports:
        _refuse_size(folder / name, listed[name], REPORTS[name])
    return Forged(folder, shard, kernels, reports, tuple(name.partition("/")[2] for name in profiles))


def candidate_of(kernel: ForgedKernel, trace: Trace) -> Candidate:
    """The winner's sources, with a digest computed here. Raises :class:`ShardError`."""
    entry = next((entry for entry in trace.rounds if entry.number == trace.winner), None)
    if entry is None or entry.candidate is None:
        raise _wrong(kernel.trace, "has no winner", "the trace of a target that was forged")
    candidate = Candidate.of(entry.candidate.language, dict(entry.candidate.files))
    if (trace.target, candidate.language) != (kernel.target, kernel.language):
        raise _wrong(kernel.trace, "is about another target or language than the shard says")
    _check_sources(candidate, kernel.trace)
    if candidate.digest != kernel.digest or len(entry.candidate.files) != len(candidate.files):
        raise _wrong(kernel.trace, f"its winner's digest is {candidate.digest[:12]}", f"{kernel.digest[:12]}")
    return candidate


def _check_sources(candidate: Candidate, place: str) -> None:
    names = source_names(candidate.language)
    if {name for name, _ in candidate.files} != set(names):
        raise _wrong(place, "its winner has other files than its language", " and ".join(names))
    for name, text in candidate.files:
        # A NUL parts texts in the digest.
        if "\0" in text or len(text.encode()) > _SOURCE_BYTES:
            raise _wrong(place, f"{name} holds a NUL or is larger than {_SOURCE_BYTES >> 20} MiB", "a kernel's source")


def _trace_of(kernel: ForgedKernel, folder: Path, listed: Mapping[str, int]) -> Trace:
    _check_kernel(kernel)
    name = f"{TRACES}/{kernel.trace}"
    if not _TRACE_NAME.fullmatch(kernel.trace) or name not in listed:
        raise refuse(folder, f"has no trace {kernel.trace[:80]!r} of {kernel.target}")
    trace: Trace = _from_json(Trace, read_json(folder / name, _TRACE_BYTES), folder / name)
    candidate_of(kernel, trace)
    return trace


def _profiles(listed: Mapping[str, int], folder: Path) -> tuple[str, ...]:
    found = tuple(name for name in listed if re.fullmatch(rf"{PROFILES}/[^/]+\.ncu-rep", name))
    for name in found:
        _refuse_size(folder / name, listed[name], _PROFILE_BYTES)
    return found


# -- a verify job's folder ------------------------------------------------------------------------------------


def write_verified(folder: Path, shard: VerifiedShard) -> None:
    """Write ``shard.json`` beside the files that publishing left below ``forged/``.

    Raises :class:`~pytest_cudaforge.errors.SituationError` where the folder cannot be written.
    """
    _write(folder / SHARD_FILE, _dump(_document(shard)))


def tidied(folder: Path) -> None:
    """Remove what a verify process that was killed on this machine had not finished: files of kernels that its shard
    does not name yet, and halves of files. Raises :class:`ShardError` where the shard itself cannot be read."""
    shard = _record(VerifiedShard, folder)
    known = {kernel.entry.directory for kernel in shard.kernels if kernel.entry is not None}
    for path in sorted(folder.rglob("*"), reverse=True):
        inside = path.relative_to(folder / FORGED_DIR).parts if path.is_relative_to(folder / FORGED_DIR) else ()
        unfinished = path.name.startswith(".") or (inside and "/".join(inside[:2]) not in known)
        if path.is_file() and unfinished:
            path.unlink()


def read_verified(folder: Path) -> Verified:
    """A verify job's folder, checked: every entry against its files, its files against the digest that was verified,
    all of it against the verdict. Raises :class:`ShardError`."""
    listed = files_below(folder)
    shard = _record(VerifiedShard, folder)
    entries = [(kernel, kernel.entry) for kernel in shard.kernels if kernel.entry is not None]
    _each_once([entry.key for _, entry in entries], folder)
    _each_once([(entry.directory,) for _, entry in entries], folder)
    files = {entry.directory: _published(kernel, entry, folder, listed) for kernel, entry in entries}
    known = {f"{FORGED_DIR}/{directory}/{name}" for directory, named in files.items() for name in named}
    rest = listed.keys() - known - {SHARD_FILE}
    if rest:
        raise refuse(folder, f"holds files that no kernel of it has: {', '.join(sorted(rest)[:5])}")
    for kernel in shard.kernels:
        _check_kernel(kernel)
    return Verified(folder, shard, files)


def _published(kernel: VerifiedKernel, entry: Entry, folder: Path, listed: Mapping[str, int]) -> Mapping[str, bytes]:
    """The files of a kernel that may be published, by name."""
    _check_entry(kernel, entry)
    place = folder / FORGED_DIR / entry.directory
    sources = {name: read_bytes(place / name, _SOURCE_BYTES) for name in source_names(kernel.language)}
    if kernel.language in PUBLISHED_LANGUAGES:
        sources[BINARIES] = read_bytes(place / BINARIES, _BINARIES_BYTES)
        _check_binaries(kernel, place / BINARIES, sources[BINARIES])
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in sources.items()}
    if digests != {file.name: file.sha256 for file in entry.files} or len(digests) != len(entry.files):
        raise refuse(place, "its files are not those of its entry", ", ".join(sorted(digests)))
    texts = {name: _decoded(place / name, sources[name]) for name in source_names(kernel.language)}
    candidate = Candidate.of(kernel.language, texts)
    _check_sources(candidate, str(place))
    if candidate.digest != kernel.digest:
        raise refuse(place, f"holds the kernel {candidate.digest[:12]}", f"{kernel.digest[:12]}, which was verified")
    named = [name for name in _TOLD if name != _OPTIONAL or f"{FORGED_DIR}/{entry.directory}/{name}" in listed]
    told = {name: read_bytes(place / name, _TOLD[name]) for name in named}
    _check_told(kernel, place, told)
    return {**sources, **told}


def _check_binaries(kernel: VerifiedKernel, path: Path, data: bytes) -> None:
    """Production launches them as they are: they are those of the verdict."""
    build = kernel.evaluation.build if kernel.evaluation is not None else None
    wanted = {digest for _, digest in build.binaries} if build is not None else set()
    try:
        found = {binary_digest(binary) for binary in decode_binaries(_decoded(path, data))}
    except ConfigError as error:
        raise refuse(path, error.what) from None
    if not found or found != wanted:
        raise refuse(path, "holds other binaries than those that were verified")


def _check_told(kernel: VerifiedKernel, place: Path, told: Mapping[str, bytes]) -> None:
    """The verdict beside the sources is the shard's own, and the picture runs nothing."""
    assert kernel.evaluation is not None  # an entry has one
    if read_json(place / "evaluation.json", _TOLD["evaluation.json"]) != to_json(kernel.evaluation):
        raise refuse(place / "evaluation.json", "is another verdict than the shard's")
    _decoded(place / "report.md", told["report.md"])
    picture = _decoded(place / _OPTIONAL, told.get(_OPTIONAL, b"<svg")).lower()
    if not picture.startswith("<svg") or _ACTIVE.search(picture):
        raise refuse(place / _OPTIONAL, "is no picture of ours", "shapes and text only")


def _check_entry(kernel: VerifiedKernel, entry: Entry) -> None:
    """An entry says what was verified, and where it lies says whose it is."""
    verdict = kernel.evaluation
    if verdict is None or not _is_publishable(verdict, kernel):
        raise _wrong(kernel.target, "has an entry without a verdict that may be published", "PASSED, faster, isolated")
    path, _, qualname = kernel.target.partition("::")
    said = (entry.target, entry.path, entry.qualname, entry.language, entry.source_digest, entry.variant)
    if said != (kernel.target, path, qualname, kernel.language, kernel.source_digest, kernel.variant):
        raise _wrong(kernel.target, "has an entry of another target or kernel")
    if (entry.isolation, entry.work) != (verdict.isolation.grade, verdict.work):
        raise _wrong(kernel.target, "has an entry that says otherwise than its verdict")
    _check_directory(entry)
    for workload in entry.workloads:
        promised = (workload.speedup_eager, workload.speedup_compile, workload.least_eager, workload.least_compile)
        if not all(speedup is None or _is_positive(speedup) for speedup in promised):
            raise _wrong(kernel.target, "promises a speedup that is no number")


def _is_publishable(verdict: Evaluation, kernel: VerifiedKernel) -> bool:
    timing = verdict.timing
    if not verdict.passed or verdict.verification is None or timing is None or timing.decision != "faster":
        return False
    said = (verdict.candidate, verdict.target, verdict.language)
    return said == (kernel.digest, kernel.target, kernel.language) and not refusal(verdict)


def _check_directory(entry: Entry) -> None:
    slug, _, place = entry.directory.partition("/")
    compiler = configuration.LANGUAGE if entry.language == configuration.LANGUAGE else ""
    own = hashlib.sha256(entry.target.encode()).hexdigest()[:6]
    fits = _ARCH.fullmatch(entry.arch) and _SLUG.fullmatch(slug) and slug.endswith(f"-{own}")
    if not fits or place != "-".join(filter(None, (entry.arch, compiler, entry.variant))):
        raise _wrong(entry.target, f"has the folder {entry.directory[:200]!r}", "<name>-<digest>/<arch>")


def _is_positive(value: float) -> bool:
    return math.isfinite(value) and value > 0


# -- records and files ----------------------------------------------------------------------------------------


def _check_kernel(kernel: ForgedKernel | VerifiedKernel) -> None:
    check_target(kernel.target)
    source_names(kernel.language)
    if not _DIGEST.fullmatch(kernel.digest) or not _DIGEST.fullmatch(kernel.source_digest):
        raise _wrong(kernel.target, "has a digest that is none", "64 hex digits")
    if kernel.variant and not _VARIANT.fullmatch(kernel.variant):
        raise _wrong(kernel.target, f"has the variant {kernel.variant[:60]!r}")


def _each_once(keys: list[tuple[str, ...]], folder: Path) -> None:
    if len(keys) > _MOST_KERNELS:
        raise refuse(folder, f"holds more than {_MOST_KERNELS} kernels")
    if len(set(keys)) != len(keys):
        raise refuse(folder, "holds a kernel twice", "one kernel for each target, language and choice of workloads")


def _record(kind: type[Record], folder: Path) -> Record:
    data = read_json(folder / SHARD_FILE, _SHARD_BYTES)
    expected = f'{{"format": "{_FORMAT[kind]}", "version": {_VERSION}, "shard": …}}'
    if not isinstance(data, dict) or data.keys() != {"format", "version", "shard"}:
        raise refuse(folder / SHARD_FILE, "is no shard", expected)
    if (data["format"], data["version"]) != (_FORMAT[kind], _VERSION):
        raise refuse(folder / SHARD_FILE, "is of another kind or version", expected)
    shard: Record = _from_json(kind, data["shard"], folder / SHARD_FILE)
    check_name(shard.shard)
    if shard.commit and not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", shard.commit):
        raise refuse(folder / SHARD_FILE, "names a commit that is none")
    return shard


def _from_json(kind: type[Any], data: Any, place: Path) -> Any:
    try:
        return from_json(kind, data)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise refuse(place, f"cannot be read: {error}", f"a {kind.__name__}") from None


def _document(shard: ForgedShard | VerifiedShard) -> dict[str, Any]:
    return {"format": _FORMAT[type(shard)], "version": _VERSION, "shard": to_json(shard)}


def _dump(data: Any) -> bytes:
    text = json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    # A tool's output may hold half a character, which no file can.
    return text.encode("utf-8", "replace")


def _write(path: Path, data: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        durable.write_file(path, data)
    except OSError as error:
        raise SituationError(
            f"{path} cannot be written: {error.strerror or error}", expected="a folder with space left"
        ) from error


def _decoded(path: Path, data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise refuse(path, "is not UTF-8 text") from None


def _refuse_size(path: Path, size: int, most: int) -> None:
    if size > most:
        raise refuse(path, f"is larger than {most} bytes")


def _wrong(place: str, why: str, expected: str = "") -> ShardError:
    return refuse(place, why, expected)
