"""Winners into files, and files onto a branch.

::

    forged/
        manifest.json
        scale-3f9a1c/cpu/{kernel.cpp, plan.py, evaluation.json, report.md, report.svg}
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_cudaforge import durable
from pytest_cudaforge.errors import ConfigError, PublishError
from pytest_cudaforge.languages import DEVICE_LANGUAGES, Binary
from pytest_cudaforge.languages.cache import BuildCache
from pytest_cudaforge.languages.published import FILE_NAME, PUBLISHED_LANGUAGES, binary_digest, encode_binaries
from pytest_cudaforge.records import Candidate, Evaluation, Guard, Target, TargetFacts, Trace, WorkloadFacts, to_json
from pytest_cudaforge.report import markdown, pictures
from pytest_cudaforge.runtime.configuration import LANGUAGE
from pytest_cudaforge.runtime.containers import containers_of
from pytest_cudaforge.runtime.fingerprints import Fingerprint
from pytest_cudaforge.runtime.manifest import Entry, EntryFile, EntryWorkload, Manifest, merge

if TYPE_CHECKING:
    from git import Repo

__all__ = ["MANIFEST", "PICTURE", "Commit", "Published", "check_branch", "commit_branch", "publish", "refusal"]

MANIFEST = "manifest.json"
PICTURE = "report.svg"
_IDENTITY = ("pytest-cudaforge", "pytest-cudaforge@localhost")


@dataclass(frozen=True)
class Published:
    """What :func:`publish` wrote: its entry, the folder of all kernels, and every file (absolute paths)."""

    entry: Entry
    forge_dir: Path
    files: tuple[Path, ...]


@dataclass(frozen=True)
class Commit:
    """``changed`` is False where the branch already held exactly this; ``sha`` is its tip then."""

    branch: str
    sha: str
    changed: bool


# -- files -------------------------------------------------------------------------------------------------------------


def publish(
    trace: Trace, target: Target, facts: TargetFacts, forge_dir: Path, *, builds: BuildCache | None = None
) -> Published:
    """Write the winner's sources, ``evaluation.json``, ``report.md`` and its picture, then merge it into the manifest.

    ``builds`` has the binaries of the final verdict, for languages that production does not compile.

    The manifest comes last: a crash before it leaves files nobody loads. Raises :class:`PublishError` where there is
    no winner, where the verdict may not be published, or where the folder cannot be written.
    """
    candidate, final = _winner(trace)
    _refuse_unisolated(final)
    files = {**dict(candidate.files), **_compiled(final, builds)}
    entry = _entry(candidate, final, target, facts, files)
    folder = forge_dir / entry.directory
    contents = {
        **files,
        "evaluation.json": json.dumps(to_json(_public(final)), indent=1, ensure_ascii=False, allow_nan=False) + "\n",
        **_told(trace),
    }
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in contents.items():
            durable.write_file(folder / name, text)
        merge(forge_dir / MANIFEST, [entry])
    return Published(entry, forge_dir, (*(folder / name for name in contents), forge_dir / MANIFEST))


def _public(final: Evaluation) -> Evaluation:
    """The verdict without the path of the profiler's file, which lies on the machine that forged."""
    if final.profile is None or not final.profile.report:
        return final
    return dataclasses.replace(final, profile=dataclasses.replace(final.profile, report=""))


def _told(trace: Trace) -> dict[str, str]:
    """The readable report, and a picture of it that a pull request shows."""
    picture = pictures.summary(trace)
    if picture is None:
        return {"report.md": markdown.report(trace)}
    return {"report.md": markdown.report(trace, picture=PICTURE), PICTURE: picture.standalone()}


def _winner(trace: Trace) -> tuple[Candidate, Evaluation]:
    entry = next((entry for entry in trace.rounds if entry.number == trace.winner), None)
    if entry is None or entry.candidate is None or trace.final is None or not trace.final.passed:
        raise PublishError(f"{trace.target} has no winner to publish", expected="a trace whose final verdict is PASSED")
    if trace.final.candidate != entry.candidate.digest:
        raise PublishError(f"{trace.target}: the final verdict is about another candidate than the winner")
    return entry.candidate, trace.final


def refusal(final: Evaluation) -> str:
    """Why this verdict may not be published, "" where it may."""
    # Native candidate code with our own rights could have written its own verdict.
    # A configuration has no code at all.
    grade, native = final.isolation.grade, final.language not in (*DEVICE_LANGUAGES, LANGUAGE)
    if grade == "F" or (native and grade == "C"):
        return f"a verdict of isolation grade {grade} is not published"
    return ""


def _refuse_unisolated(final: Evaluation) -> None:
    reason = refusal(final)
    if reason:
        raise PublishError(
            f"{final.target}: {reason}",
            expected="grade A or B (cuda and triton launch plans: C as well)",
            remedy=final.isolation.remedy or "run on a machine that allows user namespaces; see cudaforge doctor",
        )


def _compiled(final: Evaluation, builds: BuildCache | None) -> dict[str, str]:
    """The binaries that were verified, by file name; nothing for a language that production compiles itself."""
    if final.language not in PUBLISHED_LANGUAGES:
        return {}
    wanted = final.build.binaries if final.build is not None else ()
    found = [(builds.get(key), digest) for key, digest in wanted] if builds is not None else []
    binaries = [one for one, digest in found if isinstance(one, Binary) and binary_digest(one) == digest]
    if not binaries or len(binaries) < len(wanted):
        raise PublishError(
            f"{final.target}: the compiled kernels of its verdict are gone from the build cache",
            expected=f"{len(wanted)} binaries",
            remedy="forge again (pytest --forge), which builds and verifies them anew",
        )
    return {FILE_NAME: encode_binaries(binaries)}


def _entry(
    candidate: Candidate, final: Evaluation, target: Target, facts: TargetFacts, files: Mapping[str, str]
) -> Entry:
    arch = final.build.arch if final.build is not None else final.device
    compiler = LANGUAGE if candidate.language == LANGUAGE else ""
    variant = variant_of(facts)
    return Entry(
        target=target.id,
        import_name=target.module_name,
        qualname=target.qualname,
        kind=target.kind,
        path=target.path,
        source_digest=target.digest,
        language=candidate.language,
        arch=arch,
        directory="-".join(filter(None, (f"{target.slug}/{arch}", compiler, variant))),
        files=tuple(EntryFile(name, hashlib.sha256(text.encode()).hexdigest()) for name, text in sorted(files.items())),
        guard=final.verification.guard if final.verification is not None else Guard(),
        workloads=tuple(_workload(workload, final) for workload in facts.workloads),
        torch=dict(final.environment).get("torch", ""),
        device=final.device,
        precision=facts.precision,
        mode=facts.mode,
        work=final.work or "kernel",
        isolation=final.isolation.grade,
        backward=final.verification is not None and final.verification.backward if facts.grad else None,
        variant=variant,
        attributes=_built_in(facts, files.get("plan.py")),
        buffers=_buffers_built_in(facts, files.get("plan.py")),
        containers=containers_of(*(workload.output_tree for workload in facts.workloads)),
    )


#: What a plan reads of tensors says nothing of a module's attribute of that name.
_TENSORS_OWN = {"shape", "dtype", "device", "ndim"}


def _built_in(facts: TargetFacts, plan: str | None) -> tuple[tuple[str, Any], ...]:
    """The attributes that forward reads and the plan does not: its author knew their values, or did without them."""
    if plan is None:
        return ()
    read = {node.attr for node in ast.walk(ast.parse(plan)) if isinstance(node, ast.Attribute)} - _TENSORS_OWN
    return tuple((path, value) for path, value in facts.attributes if path.rpartition(".")[2] not in read)


#: What of a tensor tells nothing of its values.
_METADATA = {"shape", "dtype", "device", "ndim", "dim", "size", "stride", "numel", "element_size", "is_contiguous"}


def _buffers_built_in(facts: TargetFacts, plan: str | None) -> tuple[tuple[str, Fingerprint], ...]:
    """The same of buffers: a plan that takes no more than the shape of a mask has what is in it built in."""
    if plan is None:
        return ()
    nodes = list(ast.walk(ast.parse(plan)))
    asked = {id(node.value) for node in nodes if isinstance(node, ast.Attribute) and node.attr in _METADATA}
    taken = {node.attr for node in nodes if isinstance(node, ast.Attribute) and id(node) not in asked}
    return tuple((path, found) for path, found in facts.buffers if path.rpartition(".")[2] not in taken)


def variant_of(facts: TargetFacts) -> str:
    """What tells a kernel for some of a target's workloads from its other kernels; "" for one that serves them all.

    The same choice has the same name, whatever patterns it was made by: forging again replaces that kernel alone.
    """
    if not facts.chosen:
        return ""
    names = sorted(workload.name for workload in facts.workloads)
    readable = re.sub(r"[^a-z0-9]+", "_", "-".join(names).lower()).strip("_")[:40]
    return f"{readable}-{hashlib.sha256(json.dumps(names).encode()).hexdigest()[:6]}".lstrip("-")


def _workload(workload: WorkloadFacts, final: Evaluation) -> EntryWorkload:
    timed = final.timing.workloads if final.timing is not None else ()
    timing = next((entry for entry in timed if entry.workload == workload.name), None)
    return EntryWorkload(
        workload.name,
        workload.inputs,
        timing.vs_eager.speedup if timing else None,
        timing.vs_compile.speedup if timing and timing.vs_compile else None,
        timing.vs_eager.low if timing else None,
        timing.vs_compile.low if timing and timing.vs_compile else None,
    )


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PublishError(
            f"{error.filename or folder}: {error.strerror or error}",
            expected="a folder that can be written, with space left",
            remedy="free space or set forge_dir to another folder; the winner is kept in the run directory",
        ) from error


# -- branch ------------------------------------------------------------------------------------------------------------


def commit_branch(root: Path, branch: str, published: Sequence[Published], message: str) -> Commit:
    """Commit the published files onto ``branch``; the user's index, working tree and HEAD stay as they are.

    A new branch starts at HEAD (or at nothing, in a repo without commits); an existing one gets a commit on top, and
    only where something differs. Its manifest is merged, not replaced: it may list kernels that are not here.
    Raises :class:`PublishError` where there is no git, no repo, or the branch cannot be written.
    """
    with _git_errors(branch), _repo(root) as repo:
        tip = _tip(repo, branch)
        base = tip or _head(repo)
        with tempfile.TemporaryDirectory(prefix="cudaforge-index-") as scratch:
            tree = _write_tree(repo, base, published, Path(scratch))
        if base is not None and tree == repo.git.rev_parse(f"{base}^{{tree}}"):
            if tip is None:
                _move_branch(repo, branch, base, None)
            return Commit(branch, base, False)
        parents = ["-p", base] if base is not None else []
        with repo.git.custom_environment(**_identity(repo)):
            sha = str(repo.git.commit_tree(tree, *parents, "-m", message))
        _move_branch(repo, branch, sha, tip)
        return Commit(branch, sha, True)


def check_branch(root: Path, branch: str) -> None:
    """Raises :class:`PublishError` where :func:`commit_branch` could not work: asked before any money is spent."""
    with _git_errors(branch), _repo(root) as repo:
        _tip(repo, branch)


def _write_tree(repo: Repo, base: str | None, published: Sequence[Published], scratch: Path) -> str:
    """The tree of ``base`` with the published folders replaced, built in an index of its own."""
    work_tree = Path(str(repo.working_tree_dir)).resolve()
    with repo.git.custom_environment(GIT_INDEX_FILE=str(scratch / "index")):
        if base is None:
            repo.git.read_tree("--empty")
        else:
            repo.git.read_tree(base)
        for item in published:
            _stage_folder(repo, work_tree, item)
        for forge_dir in sorted({item.forge_dir.resolve() for item in published}):
            entries = [item.entry for item in published if item.forge_dir.resolve() == forge_dir]
            _stage_manifest(repo, base, _inside(work_tree, forge_dir / MANIFEST), entries, scratch / MANIFEST)
        return str(repo.git.write_tree())


def _stage_folder(repo: Repo, work_tree: Path, item: Published) -> None:
    folder = _inside(work_tree, (item.forge_dir / item.entry.directory).resolve())
    stale = [name for name in repo.git.ls_files("-z", "--", f":(top,literal){folder}").split("\0") if name]
    if stale:
        repo.git.update_index("--force-remove", "--", *stale)
    for path in item.files:
        if path.name != MANIFEST:
            _stage(repo, _inside(work_tree, path.resolve()), path)


def _stage_manifest(repo: Repo, base: str | None, name: str, entries: Sequence[Entry], scratch: Path) -> None:
    before = Manifest()
    if base is not None and repo.git.ls_tree(base, "--", f":(top,literal){name}"):
        before = Manifest.parse(repo.git.cat_file("blob", f"{base}:{name}"), f"{base[:9]}:{name}")
    before.merged(entries).write(scratch)
    _stage(repo, name, scratch)


def _stage(repo: Repo, name: str, path: Path) -> None:
    sha = repo.git.hash_object("-w", f"--path={name}", "--", str(path))
    repo.git.update_index("--add", "--cacheinfo", f"100644,{sha},{name}")


def _inside(work_tree: Path, path: Path) -> str:
    if not path.is_relative_to(work_tree):
        raise PublishError(
            f"{path} lies outside the git repo {work_tree}",
            expected="forge_dir inside the repo",
            remedy="set forge_dir to a folder of the repo, or leave out --forge-branch",
        )
    return path.relative_to(work_tree).as_posix()


def _tip(repo: Repo, branch: str) -> str | None:
    repo.git.check_ref_format("--branch", branch)
    if branch in _checked_out(repo):
        raise PublishError(
            f"branch {branch!r} is checked out",
            expected="a branch that no working tree is on: its files would look deleted there",
            remedy="give another name with --forge-branch",
        )
    return _commit_of(repo, f"refs/heads/{branch}")


def _checked_out(repo: Repo) -> set[str]:
    lines = repo.git.worktree("list", "--porcelain").splitlines()
    return {line.removeprefix("branch refs/heads/") for line in lines if line.startswith("branch ")}


def _head(repo: Repo) -> str | None:
    return _commit_of(repo, "HEAD")


def _commit_of(repo: Repo, name: str) -> str | None:
    from git import GitCommandError

    try:
        return str(repo.git.rev_parse("--verify", "--quiet", f"{name}^{{commit}}"))
    except GitCommandError:
        return None


def _move_branch(repo: Repo, branch: str, sha: str, old: str | None) -> None:
    # With the old value given, a branch that somebody moved meanwhile is refused instead of overwritten.
    repo.git.update_ref("-m", "pytest --forge", f"refs/heads/{branch}", sha, old or "0" * len(sha))


def _identity(repo: Repo) -> dict[str, str]:
    """Environment for a committer where git knows none (CI): nothing where the user has a name."""
    from git import GitCommandError

    found: dict[str, str] = {}
    for role in ("AUTHOR", "COMMITTER"):
        try:
            repo.git.var(f"GIT_{role}_IDENT")
        except GitCommandError:
            found[f"GIT_{role}_NAME"], found[f"GIT_{role}_EMAIL"] = _IDENTITY
    return found


@contextlib.contextmanager
def _repo(root: Path) -> Iterator[Repo]:
    from git import InvalidGitRepositoryError, NoSuchPathError, Repo

    try:
        repo = Repo(root, search_parent_directories=True)
    except (InvalidGitRepositoryError, NoSuchPathError) as error:
        raise PublishError(
            f"{root} is not in a git repo, so --forge-branch has nowhere to commit to",
            expected="a git repo",
            remedy="run `git init`, or leave out --forge-branch: the files are in forge_dir",
        ) from error
    with repo:
        if repo.bare:
            raise PublishError(f"{root} is a bare git repo", expected="a repo with a working tree")
        yield repo


@contextlib.contextmanager
def _git_errors(branch: str) -> Iterator[None]:
    try:
        import git
    except ImportError as error:  # GitPython raises it as well where there is no git program.
        raise PublishError(
            f"--forge-branch {branch}: git cannot be used: {_first_line(error)}",
            remedy="install git (and pip install gitpython)",
        ) from error
    try:
        yield
    except git.GitCommandError as error:
        detail = " ".join(str(error.stderr).split()) or _first_line(error)
        raise PublishError(
            f"--forge-branch {branch}: git failed: {detail}",
            expected="a valid branch name in a repo that can be written",
            remedy="mend the repo or give another name; the files are in forge_dir",
        ) from error
    except ConfigError as error:
        raise PublishError(f"--forge-branch {branch}: {error.what}", expected=error.expected) from error
    except OSError as error:
        raise PublishError(f"--forge-branch {branch}: {os.strerror(error.errno or 0)}: {error}") from error


def _first_line(error: Any) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
