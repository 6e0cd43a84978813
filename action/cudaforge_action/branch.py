"""The branch of forged kernels: one commit on top of the base, built anew from what is valid, pushed on a difference.

::

    base's tree + kernels of the branch that are still valid + newly verified ones  ->  one commit

Valid is a kernel whose target still has the source that it was verified against, where the base says nothing else of
it. What the commit holds is a function of these alone: timings, dates and runs make no difference, so that a second run
without news pushes nothing. The commit says in its trailers what it was built from; anything on the branch that does
not fit them was put there by somebody else and is kept.
"""

from __future__ import annotations

import dataclasses
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Literal

from cudaforge_action.project import Project, project_at
from cudaforge_action.remote import Identity, Leaf, Remote
from pytest_cudaforge import config, discovery
from pytest_cudaforge.errors import ConfigError, PublishError, UsageError
from pytest_cudaforge.languages.published import FILE_NAME as BINARIES
from pytest_cudaforge.publishing import MANIFEST
from pytest_cudaforge.records import Target
from pytest_cudaforge.report.rows import geometric_mean
from pytest_cudaforge.runtime.manifest import Entry, Manifest

__all__ = [
    "Base",
    "Branch",
    "Built",
    "Kernel",
    "Key",
    "Plan",
    "Refused",
    "base_of",
    "branch_of",
    "built",
    "planned",
    "trailers",
]

#: How many clicks on "Update branch" since our commit are followed.
_DEPTH = 12
_TRAILER = re.compile(r"^(Cudaforge-[A-Za-z-]+): (.*)$", re.MULTILINE)
_TREE, _BASE = "Cudaforge-Tree", "Cudaforge-Base"
_REGULAR = "100644"
_TELLING = frozenset(
    [
        *config.FILE_NAMES,
        "pytest.toml",
        ".pytest.toml",
        "pytest.ini",
        ".pytest.ini",
        "pyproject.toml",
        "tox.ini",
        "setup.cfg",
    ]
)
Key = tuple[str, str, str, str]


@dataclass(frozen=True)
class Kernel:
    """A manifest's entry and every file of its folder, by name."""

    entry: Entry
    files: Mapping[str, bytes] = field(repr=False)

    @property
    def same(self) -> Entry:
        """What makes it another kernel than one that lies there already: not when, where or how fast it was measured.

        Of what was compiled from the same source only torch's version tells, which stays in.
        """
        guard = dataclasses.replace(self.entry.guard, reasons=())
        workloads = tuple(
            dataclasses.replace(one, speedup_eager=None, speedup_compile=None, least_eager=None, least_compile=None)
            for one in self.entry.workloads
        )
        sources = tuple(file for file in self.entry.files if file.name != BINARIES)
        return dataclasses.replace(self.entry, guard=guard, workloads=workloads, files=sources, device="", isolation="")


@dataclass(frozen=True)
class Base:
    """What the branch is built on: a commit, those of its targets that are asked about by id, its kernels, and where
    these lie (from the repo's top, posix)."""

    ref: str
    sha: str
    forge_dir: str
    targets: Mapping[str, Target]
    manifest: Manifest


@dataclass(frozen=True)
class Branch:
    """What lies on the server. ``tip``: None where there is no such branch. ``foreign``: why it is not ours to build
    anew, "" where it is. ``own``: our commit on it. ``merge_base``: the commit that it goes from; ``based``: is that
    still on the base? ``kernels``: those that it adds; ``before``: the entries at the merge base.
    """

    name: str
    tip: str | None = None
    foreign: str = ""
    own: str = ""
    merge_base: str = ""
    based: bool = False
    kernels: tuple[Kernel, ...] = ()
    before: Mapping[Key, Entry] = field(default_factory=dict)


@dataclass(frozen=True)
class Refused:
    """A kernel that is not published, and why."""

    target: str
    language: str
    why: str


@dataclass(frozen=True)
class Plan:
    """Which kernels the branch is to hold, in the manifest's order. ``fresh``: those that were not there yet, by key.
    ``refused``: newly verified ones that no longer fit the base. ``dropped``: the branch's that are void."""

    kernels: tuple[Kernel, ...]
    fresh: frozenset[Key] = frozenset()
    refused: tuple[Refused, ...] = ()
    dropped: tuple[Refused, ...] = ()


@dataclass(frozen=True)
class Built:
    """``action``: "push" the commit ``sha``; "keep" the branch, whose own commit that is; "nothing" to be held."""

    action: Literal["push", "keep", "nothing"]
    sha: str = ""


# -- the base ----------------------------------------------------------------------------------------------------------


def base_of(
    remote: Remote,
    ref: str,
    prefix: str,
    *,
    paths: Sequence[str] = (),
    given: Iterable[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Base:
    """The base as the server has it. Its targets are found in its files' syntax; nothing of it is imported.

    ``prefix``: where pytest is started, below the repo's top ("" for the top), with ``paths``. ``given``: the files
    (from rootdir) whose targets are asked about. Raises :class:`PublishError` where there is no such branch, or where
    its configuration or manifest cannot be read.
    """
    if ref not in remote.tips(ref):
        raise PublishError(
            f"the base branch {ref!r} is not on {remote.shown}",
            expected="a branch that pull requests can go into",
            remedy="name one with the input `base`",
        )
    sha = remote.fetch(ref, 1)
    with tempfile.TemporaryDirectory(prefix="cudaforge-base-") as scratch:
        # A package at the repo's top is named like the folder of a checkout.
        top = Path(scratch).resolve() / remote.url.rpartition("/")[2].removesuffix(".git")
        top.mkdir()
        remote.check_out(sha, [path for path in remote.leaves(sha) if _tells(path)], top)
        project = _project(top, prefix, paths, environ or {})
        files = [project.root / path for path in given if ".." not in PurePosixPath(path).parts]
        found = discovery.discover(files, project.root).targets
        forge_dir = _forge_dir(top, project)
    manifest = _manifest(remote, remote.leaves(sha, forge_dir), forge_dir, f"{ref}:")
    return Base(ref, sha, forge_dir, {target.id: target for target in found}, manifest)


def _tells(path: str) -> bool:
    """Targets, where they are looked for, and where rootdir is."""
    return path.endswith(".py") or PurePosixPath(path).name in _TELLING


def _project(top: Path, prefix: str, paths: Sequence[str], environ: Mapping[str, str]) -> Project:
    folder = top / prefix
    folder.mkdir(parents=True, exist_ok=True)
    try:
        project = project_at(folder, environ, [path for path in paths if (folder / path).exists()])
    except UsageError as error:
        raise PublishError(str(error).replace(f"{top}/", ""), expected="a base whose configuration is valid") from None
    return project if project.root.is_relative_to(top) else dataclasses.replace(project, root=folder)


def _forge_dir(top: Path, project: Project) -> str:
    found = Path(os.path.normpath(project.settings.forge_dir))
    if not found.is_relative_to(top) or found == top:
        raise PublishError("forge_dir lies outside of the repo", expected="a folder below the repo's top")
    return found.relative_to(top).as_posix()


def _manifest(remote: Remote, leaves: Mapping[str, Leaf], forge_dir: str, where: str) -> Manifest:
    leaf = leaves.get(f"{forge_dir}/{MANIFEST}")
    if leaf is None:
        return Manifest()
    try:
        return Manifest.parse(remote.contents([leaf.blob])[leaf.blob].decode("utf-8"), f"{where}{forge_dir}/{MANIFEST}")
    except UnicodeDecodeError:
        raise PublishError(f"{where}{forge_dir}/{MANIFEST} is not UTF-8", remedy="restore it from git") from None
    except ConfigError as error:
        raise PublishError(error.what, expected=error.expected, remedy=error.remedy) from None


# -- the branch as it is -----------------------------------------------------------------------------------------------


def branch_of(remote: Remote, name: str, base: Base) -> Branch:
    """The branch as the server has it, with the kernels that it adds to its merge base."""
    if name not in remote.tips(name):
        return Branch(name)
    tip = remote.fetch(name, _DEPTH)
    found = _own_commit(remote, tip, base.ref)
    if isinstance(found, str):
        return Branch(name, tip, foreign=found)
    own, merge_base = found
    before = {kernel.entry.key: kernel.entry for kernel in _kernels(remote, merge_base, base.forge_dir)}
    after = _kernels(remote, tip, base.forge_dir)
    kernels = tuple(kernel for kernel in after if before.get(kernel.entry.key) != kernel.entry)
    return Branch(name, tip, "", own, merge_base, remote.on_branch(merge_base, base.ref), kernels, before)


def _own_commit(remote: Remote, tip: str, base_ref: str) -> tuple[str, str] | str:
    """Our commit below ``tip`` and the merge base, or why somebody else has a hand in the branch.

    What lies above ours may only be merges of the base that change nothing beside it ("Update branch").
    """
    own, merged = tip, []
    while len(parents := _known_parents(remote, own)) == 2:
        merged.append((own, parents[1]))
        own = parents[0]
    told = trailers(remote.message(own))
    if told.get(_TREE) != remote.tree(own) or tuple(parents) != (told.get(_BASE),):
        return f"the commit {own[:9]} on it is not this action's"
    if not _known(remote, parents[0]):
        return f"the history of {own[:9]} cannot be read"
    changes = remote.changes(parents[0], own)
    for merge, base in reversed(merged):
        if not remote.on_branch(base, base_ref) or remote.changed_tree(base, changes) != remote.tree(merge):
            return f"the merge {merge[:9]} on it changes more than to update it from {base_ref}"
    return own, merged[0][1] if merged else parents[0]


def _known_parents(remote: Remote, sha: str) -> tuple[str, ...]:
    return remote.parents(sha) if _known(remote, sha) else ()


def _known(remote: Remote, sha: str) -> bool:
    try:
        remote.local("cat-file", "-e", f"{sha}^{{tree}}")
    except PublishError:
        return False
    return True


def trailers(message: str) -> dict[str, str]:
    """What a commit of ours says of itself."""
    return dict(_TRAILER.findall(message))


def _kernels(remote: Remote, sha: str, forge_dir: str) -> tuple[Kernel, ...]:
    leaves = remote.leaves(sha, forge_dir)
    manifest = _manifest(remote, leaves, forge_dir, f"{sha[:9]}:")
    contents = remote.contents({leaf.blob for leaf in leaves.values()})
    folders: dict[str, dict[str, bytes]] = {}
    for path, leaf in leaves.items():
        folder, _, name = path.rpartition("/")
        folders.setdefault(folder, {})[name] = contents[leaf.blob]
    return tuple(Kernel(entry, folders.get(f"{forge_dir}/{entry.directory}", {})) for entry in manifest.entries)


# -- the branch as it is to be -----------------------------------------------------------------------------------------


def planned(base: Base, branch: Branch, verified: Sequence[Kernel]) -> Plan:
    """Which kernels the branch is to hold. Pure."""
    merged = {entry.key: Kernel(entry, {}) for entry in base.manifest.entries}
    wanted: dict[Key, Kernel] = {}
    dropped: list[Refused] = []
    refused: list[Refused] = []
    for kernel in branch.kernels:
        if why := _void(kernel, base) or _overtaken(kernel, merged, branch):
            dropped.append(Refused(kernel.entry.target, kernel.entry.language, why))
        else:
            wanted[kernel.entry.key] = kernel
    fresh: set[Key] = set()
    for kernel in _best(verified):
        key = kernel.entry.key
        there = wanted.get(key) or merged.get(key)
        if why := _misfit(kernel, base) or (_slower(kernel, there) if there is not None else ""):
            refused.append(Refused(kernel.entry.target, kernel.entry.language, why))
        elif key in merged and merged[key].same == kernel.same:
            wanted.pop(key, None)
        elif there is None or there.same != kernel.same:
            wanted[key] = kernel
            fresh.add(key)
    return Plan(tuple(wanted[key] for key in sorted(wanted)), frozenset(fresh), tuple(refused), tuple(dropped))


def _best(verified: Sequence[Kernel]) -> Iterator[Kernel]:
    """Of two shards that did the same work, the faster result."""
    table: dict[Key, Kernel] = {}
    for kernel in sorted(verified, key=lambda kernel: promised(kernel.entry) or 0.0):
        table[kernel.entry.key] = kernel
    yield from (table[key] for key in sorted(table))


def promised(entry: Entry) -> float | None:
    """How many times as fast as the faster baseline it was, over its workloads; None where nobody measured it."""
    known = [
        min(filter(None, (one.speedup_eager, one.speedup_compile)))
        for one in entry.workloads
        if one.speedup_eager or one.speedup_compile
    ]
    return geometric_mean(known) if len(known) == len(entry.workloads) else None


def _slower(kernel: Kernel, there: Kernel) -> str:
    """Whoever takes the place of a kernel that is still good has to promise more. The numbers are of two sittings, so
    this keeps what is there in doubt."""
    old, new = there.entry, kernel.entry
    if there.same == kernel.same or (old.source_digest, old.torch, old.device) != (
        new.source_digest,
        new.torch,
        new.device,
    ):
        return ""
    before, after = promised(old), promised(new)
    if before is None or after is None or after > before:
        return ""
    return f"the kernel that is there promises {before:.2f}×, this one {after:.2f}×"


def _void(kernel: Kernel, base: Base) -> str:
    target = base.targets.get(kernel.entry.target)
    if target is None:
        return f"its target is gone from {base.ref}"
    if target.digest != kernel.entry.source_digest:
        return f"its target has changed on {base.ref} since it was verified"
    return ""


def _overtaken(kernel: Kernel, merged: Mapping[Key, Kernel], branch: Branch) -> str:
    """The base may have got a kernel of its own since the branch was built: this one, or another."""
    now = merged.get(kernel.entry.key)
    if now is None:
        return ""
    if now.same == kernel.same:
        return "it has been merged"
    return "" if branch.before.get(now.entry.key) == now.entry else "the base has got another kernel of its own"


def _misfit(kernel: Kernel, base: Base) -> str:
    """An entry is what production imports and runs: what it says of its target is what the base's syntax says."""
    if why := _void(kernel, base):
        return why
    entry, target = kernel.entry, base.targets[kernel.entry.target]
    said = (entry.import_name, entry.qualname, entry.kind, entry.path, entry.directory.partition("/")[0])
    if said != (target.module_name, target.qualname, target.kind, target.path, target.slug):
        return f"its entry says otherwise of the target than {base.ref} does"
    return ""


def built(
    remote: Remote, base: Base, branch: Branch, plan: Plan, message: str, identity: Identity, told: Mapping[str, str]
) -> Built:
    """The commit that holds the plan's kernels, where it differs from what lies there: the changes to its base held
    against those of the branch to its merge base. ``told``: further trailers."""
    tree = _tree(remote, base, plan)
    if tree == remote.tree(base.sha):
        return Built("nothing")
    changes = remote.changes(base.sha, tree)
    if branch.tip is not None and branch.based and remote.changes(branch.merge_base, branch.tip) == changes:
        return Built("keep", branch.own)
    # Ours come last, where they win over whatever the message holds.
    lines = {**told, _BASE: base.sha, _TREE: tree}
    text = f"{message.strip()}\n\n" + "".join(f"{name}: {_one_line(value)}\n" for name, value in lines.items() if value)
    return Built("push", remote.commit(tree, base.sha, text, identity))


def _one_line(text: str) -> str:
    return " ".join(text.split())[:2000]


def _tree(remote: Remote, base: Base, plan: Plan) -> str:
    """The base's tree with the kernels' folders in place of what was there. Its manifest is merged, never replaced."""
    leaves = remote.leaves(base.sha, base.forge_dir)
    manifest = base.manifest.merged(kernel.entry for kernel in plan.kernels)
    changes: dict[str, Leaf | None] = {path: None for path in _replaced(base, plan, manifest, leaves)}
    contents: dict[str, bytes] = {}
    for kernel in plan.kernels:
        for name, data in kernel.files.items():
            contents[_inside(base, f"{kernel.entry.directory}/{name}")] = data
    if plan.kernels:
        contents[_inside(base, MANIFEST)] = manifest.render().encode()
    blobs = remote.blobs(list(contents.values()))
    changes.update({path: Leaf(_REGULAR, blob) for path, blob in zip(contents, blobs, strict=True)})
    return remote.changed_tree(base.sha, changes)


def _replaced(base: Base, plan: Plan, manifest: Manifest, leaves: Mapping[str, Leaf]) -> Iterator[str]:
    """The files of folders that are written anew, and of those that no entry names any more."""
    new = {kernel.entry.key: kernel.entry for kernel in plan.kernels}
    gone = {old.directory for old in base.manifest.entries if old.key in new}
    gone -= {entry.directory for entry in manifest.entries} - {entry.directory for entry in new.values()}
    folders = {f"{base.forge_dir}/{directory}" for directory in gone | {entry.directory for entry in new.values()}}
    yield from (path for path in leaves if path.rpartition("/")[0] in folders)


def _inside(base: Base, name: str) -> str:
    """A path below the forge folder. Raises :class:`PublishError` for one that would lead elsewhere."""
    parts = name.split("/")
    if any(part in ("", ".", "..") or part.lower() == ".git" for part in parts) or not name.isprintable():
        raise PublishError(f"{name[:200]!r} lies outside of {base.forge_dir}", expected="a kernel's own folder")
    return f"{base.forge_dir}/{name}"
