"""Which kernels a branch holds: pure, without git. What git makes of it is of test_action_publish.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from cudaforge_action.branch import Base, Branch, Kernel, Plan, built, planned, promised, trailers
from cudaforge_action.inputs import Inputs
from cudaforge_action.publish import _base_ref
from cudaforge_action.records import Context
from cudaforge_action.remote import Identity, opened
from cudaforge_action.shards import read_verified
from fake_github import TOKEN, fake_github
from shard_records import target, verified

from pytest_cudaforge.errors import PublishError, UsageError
from pytest_cudaforge.runtime.manifest import Manifest


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    folder = tmp_path_factory.mktemp("verified") / "01-cpu"
    verified(folder, [target(folder)])
    read = read_verified(folder)
    (entry,) = [one.entry for one in read.shard.kernels if one.entry is not None]
    return Kernel(entry, read.files[entry.directory])


@pytest.fixture
def base(kernel: Kernel, tmp_path: Path) -> Base:
    made = target(tmp_path)
    return Base("main", "b" * 40, "forged", {made.id: made}, Manifest())


def faster(kernel: Kernel, speedup: float, **changes: object) -> Kernel:
    workloads = tuple(replace(one, speedup_eager=speedup) for one in kernel.entry.workloads)
    return replace(kernel, entry=replace(kernel.entry, workloads=workloads, **changes))  # type: ignore[arg-type]


NOBODY = Branch("cudaforge/forge")


def test_a_new_kernel_is_fresh_and_one_that_is_there_is_not(base: Base, kernel: Kernel) -> None:
    plan = planned(base, NOBODY, [kernel])
    assert (plan.kernels, plan.fresh, plan.refused) == ((kernel,), {kernel.entry.key}, ())
    there = replace(NOBODY, tip="t", kernels=(faster(kernel, 1.5),))
    plan = planned(base, there, [kernel])
    assert (plan.kernels, plan.fresh) == (there.kernels, frozenset())


def test_the_faster_of_two_shards_counts(base: Base, kernel: Kernel) -> None:
    other = faster(kernel, 9.0, torch="2.99")
    assert planned(base, NOBODY, [other, kernel]).kernels == (other,)
    assert promised(other.entry) == pytest.approx(9.0)


LIES = (
    {"import_name": "os"},
    {"qualname": "Other"},
    {"kind": "function"},
    {"path": "setup.py"},
    {"directory": "x/cpu"},
)


@pytest.mark.parametrize("lie", LIES)
def test_an_entry_that_says_otherwise_than_the_base_is_refused(base: Base, kernel: Kernel, lie: dict[str, str]) -> None:
    lying = replace(kernel, entry=replace(kernel.entry, **lie))
    plan = planned(base, NOBODY, [lying])
    assert plan.kernels == ()
    assert "says otherwise of the target than main does" in plan.refused[0].why


def test_what_the_base_says_now_counts(base: Base, kernel: Kernel) -> None:
    gone = replace(base, targets={})
    assert planned(gone, NOBODY, [kernel]).refused[0].why == "its target is gone from main"
    there = replace(NOBODY, tip="t", kernels=(kernel,))
    assert planned(gone, there, []).dropped[0].why == "its target is gone from main"
    merged = replace(base, manifest=Manifest((kernel.entry,)))
    assert planned(merged, there, []).dropped[0].why == "it has been merged"
    assert planned(merged, there, [kernel]).kernels == ()
    theirs = replace(base, manifest=Manifest((faster(kernel, 1.1, torch="2.99").entry,)))
    assert planned(theirs, there, []).dropped[0].why == "the base has got another kernel of its own"
    # One that this branch replaces was there before.
    before = replace(there, before={kernel.entry.key: theirs.manifest.entries[0]})
    assert planned(theirs, before, []).kernels == (kernel,)


@pytest.mark.parametrize("name", ["../../evil", "a/../../evil", ".git/config", "/etc/x", "a\nb", ""])
def test_no_file_leaves_the_forge_folder(tmp_path: Path, base: Base, kernel: Kernel, name: str) -> None:
    with fake_github(tmp_path) as hub:
        hub.commit("main", {"a": "a"})
        with opened(hub.git_url, TOKEN) as remote:
            here = replace(base, sha=remote.fetch("main", 1))
            plan = Plan((replace(kernel, files={**kernel.files, name: b"x"}),))
            with pytest.raises(PublishError, match="lies outside of forged"):
                built(remote, here, NOBODY, plan, "m", Identity("a", "b"), {})
        assert set(hub.branches) == {"main"}


def test_trailers_are_the_commits_last_word() -> None:
    assert trailers("feat\n\nCudaforge-Tree: mine\n\nCudaforge-Tree: ours\nOther: x\n") == {"Cudaforge-Tree": "ours"}


@pytest.mark.parametrize(
    ("given", "context", "wanted"),
    [
        ("refs/heads/release", {}, "release"),
        ("origin/release", {"base_ref": "main"}, "release"),
        ("", {"base_ref": "next", "ref": "refs/pull/3/merge", "default_branch": "main"}, "next"),
        ("", {"ref": "refs/heads/feature/x", "default_branch": "main"}, "feature/x"),
        ("", {"ref": "refs/tags/v1", "default_branch": "main"}, "main"),
    ],
)
def test_the_base_is_what_the_run_is_about(given: str, context: dict[str, str], wanted: str) -> None:
    told = Context(host="github", workspace=Path(), **context)  # type: ignore[arg-type]
    assert _base_ref(Inputs("publish", base=given), told) == wanted
    with pytest.raises(UsageError, match="base: main"):
        _base_ref(Inputs("publish"), Context(host="github", workspace=Path()))
