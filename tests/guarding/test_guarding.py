"""`pytest --forge-guard`: what is collected, what a run says, and an attack by a whole pull request, for real."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import guard_repo
import pytest
from forge_repo import pytest_in
from guard_repo import Repo, kernel, layer

from pytest_cudaforge.config import ForgeConfig
from pytest_cudaforge.guard import Thresholds
from pytest_cudaforge.guard_options import BaseOptions, trusted_base
from pytest_cudaforge.guard_session import BaseTree, GuardedKernel, GuardSession, Runner
from pytest_cudaforge.hardware import detect
from pytest_cudaforge.machine import describe
from pytest_cudaforge.merge_base import find_merge_base, worktree


@pytest.fixture
def repo(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Repo:
    """Three kernels of which none can be raced anywhere, so that nothing starts, and two guarded modules."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(pytester.path.parent / "cache"))
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:hypothesispytest -p no:anyio -p no:cacheprovider -p no:xdist")
    made = guard_repo.repo(pytester.path)
    made.layers([layer("Tampered"), layer("Stale"), layer("Elsewhere"), layer("Plain", options="guard=True")])
    made.publish("Tampered", kernel())
    made.publish("Stale", kernel())
    made.arch = "sm_50"
    made.publish("Elsewhere", guard_repo.kernel(language="cuda"))
    made.commit("feat: kernels")
    made.git("checkout", "-q", "-b", "work")
    return made


def spoil(repo: Repo) -> None:
    """What the names of its kernels say, in a pull request that also drops one and guards another module."""
    folder = repo.root / "forged" / repo.entries["Tampered"].directory
    (folder / "kernel.cpp").write_text("// another\n")
    repo.layers([layer("Tampered"), layer("Stale", 9.0), layer("Elsewhere"), layer("New", options="guard=True")])


def ids(done: pytest.RunResult) -> list[str]:
    return [line for line in done.outlines if "::" in line and not line.startswith("E")]


# -- what is collected -------------------------------------------------------------------------------------------


def test_cases_and_races_of_kernels_and_guarded_modules_are_collected(pytester: pytest.Pytester, repo: Repo) -> None:
    pytester.makepyfile(test_own="def test_own(): pass")
    wanted = [repo.item(name, what) for name in ("Elsewhere", "Stale", "Tampered") for what in ("case", "guard")]
    done = pytester.runpytest_inprocess("--forge-guard", "--collect-only", "-q")
    assert ids(done) == [*wanted, "layers.py::Plain::guard"]
    for options, chosen in (
        (["-k", "Stale"], wanted[2:4]),
        (["-k", "guard and not Plain"], wanted[1::2]),
        ([wanted[3]], wanted[3:4]),
        (["forged", "-m", "cudaforge"], wanted),
        (["layers.py"], ["layers.py::Plain::guard"]),
        (["layers.py::Plain::guard"], ["layers.py::Plain::guard"]),
    ):
        done = pytester.runpytest_inprocess("--forge-guard", "--collect-only", "-q", *options)
        assert ids(done) == chosen, options


def test_plain_pytest_races_nothing(pytester: pytest.Pytester, repo: Repo) -> None:
    done = pytester.runpytest_inprocess("--collect-only", "-q")
    assert all("::case[" in line for line in ids(done)) and ids(done)


# -- what a run says ---------------------------------------------------------------------------------------------


def check_spoilt(repo: Repo, outlines: list[str]) -> None:
    text = "\n".join(outlines)
    for wanted in (
        "guard: against main at ",
        "not calibrated (cudaforge calibrate",
        "differs from what was verified",
        "Stale has changed since its kernel was verified",
        "this kernel was made for sm_50",
        "new: the merge base has nothing to compare it with",
        "layers.py::Plain: guard=True gone, at the merge base given",
        "reproduce: pytest --forge-guard --forge-base ",
        "1 failed, 3 skipped in",
    ):
        assert wanted in text, text
    table = [line for line in outlines if line.startswith(("forged/", "layers.py::")) and "::guard" in line]
    assert [line.split()[1] for line in table[-4:]] == ["failed", "skipped", "skipped", "skipped"]


def test_failed_stale_and_absent_are_told_apart(pytester: pytest.Pytester, repo: Repo) -> None:
    spoil(repo)
    before = repo.git("status", "--porcelain")
    done = pytester.runpytest_inprocess(
        "--forge-guard", "--junit-xml=../junit.xml", "--forge-json=../guard.json", "--forge-html=../guard.html"
    )
    assert done.ret == pytest.ExitCode.TESTS_FAILED
    done.assert_outcomes(failed=2, skipped=5)
    check_spoilt(repo, done.outlines)
    data = json.loads((pytester.path.parent / "guard.json").read_text())
    outcomes = [record["outcome"] for record in data["guard"]["records"]]
    assert outcomes.count("failed") == 2 and data["guard"]["base_sha"] == repo.git("rev-parse", "main")
    causes = {record["target"]: (record["cause"], len(record["changes"])) for record in data["guard"]["records"]}
    # What this branch made stale says so.
    assert causes["layers.py::Stale"] == ("stale", 1) and causes["layers.py::Elsewhere"] == ("absent", 0)
    assert causes["layers.py::New"] == ("new", 0) and causes["layers.py::Tampered"] == ("", 0)
    assert "differs from what was verified" in (pytester.path.parent / "guard.html").read_text()
    junit = ElementTree.parse(pytester.path.parent / "junit.xml")
    found = [node.get("value") for node in junit.iter("property") if node.get("name") == "guard"]
    assert sorted(map(str, found)) == ["failed"] * 2 + ["skipped"] * 5
    assert repo.git("status", "--porcelain") == before
    assert repo.git("worktree", "list").count("\n") == 0


def test_strict_fails_what_could_not_be_verified(pytester: pytest.Pytester, repo: Repo) -> None:
    done = pytester.runpytest_inprocess("--forge-guard", "--forge-strict", "-k", "Elsewhere")
    done.assert_outcomes(failed=2, deselected=5)


def test_workers_report_what_the_controller_found(repo: Repo) -> None:
    spoil(repo)
    done = pytest_in(repo.root, "--forge-guard", "-n1", PYTEST_ADDOPTS="-p no:cacheprovider")
    assert done.returncode == 1 and "created: 1/1 worker" in done.stdout, done.stdout
    check_spoilt(repo, done.stdout.splitlines())
    assert repo.git("worktree", "list").count("\n") == 0


def test_nothing_to_guard_says_what_to_do(pytester: pytest.Pytester) -> None:
    made = guard_repo.repo(pytester.path)
    made.commit("nothing yet")
    done = pytester.runpytest_inprocess("--forge-guard")
    assert done.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    done.stdout.fnmatch_lines(["*nothing to guard: no *manifest.json was found*pytest --forge*"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--forge-base", "nowhere"], "--forge-base nowhere: this clone has no such commit"),
        (["--forge"], "two runs"),
        (["--forge-json", "."], "cannot be written"),
        (["--forge-guard-inconclusive", "maybe"], "invalid choice"),
    ],
)
def test_bad_options_are_usage_errors(pytester: pytest.Pytester, repo: Repo, options: list[str], words: str) -> None:
    done = pytester.runpytest_inprocess("--forge-guard", *options)
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    assert words in done.stderr.str()


def test_outside_of_git_it_says_so(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]")
    done = pytester.runpytest_inprocess("--forge-guard")
    assert done.ret == pytest.ExitCode.USAGE_ERROR and "is not in a git repo" in done.stderr.str()


# -- the merge base's word ---------------------------------------------------------------------------------------


def test_the_ini_file_of_a_pull_request_does_not_choose_its_base(pytester: pytest.Pytester, repo: Repo) -> None:
    repo.write({"pytest.ini": "[pytest]\naddopts = --forge-base HEAD --forge-guard-inconclusive neutral\n"})
    repo.commit("chore: options")
    base, (change,) = trusted_base(pytester.parseconfig())
    assert base.sha == repo.git("rev-parse", "main") and not change.obeyed and change.head == "HEAD"
    said, changes = trusted_base(pytester.parseconfig("--forge-base", "HEAD"))
    assert said.sha == repo.git("rev-parse", "HEAD") and changes == ()
    # Once it is merged it is the merge base's own word.
    repo.git("branch", "-f", "main", "HEAD")
    assert trusted_base(pytester.parseconfig())[1] == ()


def test_settings_are_read_from_both_sides(pytester: pytest.Pytester, repo: Repo, tmp_path: Path) -> None:
    from pytest_cudaforge.forging import forge_config

    base = tmp_path / "base"
    base.mkdir()
    (base / "cudaforge.yaml").write_text("trials: 7\nguard: {inconclusive: fail}\n")
    (base / "pytest.ini").write_text("[pytest]\nforge_dir = kernels\n")
    repo.write({"pytest.ini": "[pytest]\naddopts = --forge-guard-inconclusive=neutral --forge-isolation=none\n"})
    repo.write({"cudaforge.yaml": "trials: 1\nguard: {relative: 5.0}\nallow: [rewrite]\n"})
    config = pytester.parseconfig()
    options = BaseOptions(config, base)
    assert options.forge_dir == base / "kernels"
    used, changes = options.trusted(forge_config(config))
    assert (used.trials, used.isolation, used.allow, used.guard.relative) == (7, "auto", None, 0.03)
    assert used.guard.inconclusive == "fail"
    assert {change.name for change in changes} == {
        *("trials", "isolation", "allow", "guard.relative", "guard.inconclusive", "addopts", "forge_dir", "is"),
        "--forge-guard-inconclusive in addopts",
    }
    # Whoever starts the run may say what he likes.
    config = pytester.parseconfig("--forge-guard-inconclusive=neutral")
    assert BaseOptions(config, base).trusted(forge_config(config))[0].guard.inconclusive == "neutral"


def test_a_base_without_kernels_is_no_error(repo: Repo, tmp_path: Path) -> None:
    commit = find_merge_base(repo.root, "main", {})
    tree = BaseTree(commit, tmp_path, tmp_path / "forged")
    assert tree.manifest_of(repo.root / "forged" / "manifest.json", repo.root) is None
    assert tree.entries(None) == ()


def test_the_same_bytes_are_not_raced_and_others_are(repo: Repo) -> None:
    base, facts = find_merge_base(repo.root, "main", {}), detect("cpu")
    runner = Runner(facts, describe(facts), Thresholds(), "")
    repo.arch = "cpu"
    with worktree(base) as folder:
        tree = BaseTree(base, folder, folder / "forged")
        session = GuardSession(ForgeConfig(), repo.root, tree, lambda _: runner, print)

        def entrant(name: str) -> Any:
            manifest = repo.root / "forged" / "manifest.json"
            kernel = GuardedKernel("place", manifest, repo.entries[name], races=("default",))
            return session._entrant(kernel, ["default"], runner)

        same = entrant("Tampered")
        assert (same.base, same.since, same.compared) == (None, base.short, False)
        repo.publish("Tampered", kernel(turns=2), promised=0.5)
        other = entrant("Tampered")
        assert other.base is not None and other.base.digest == same.candidate.digest and other.compared
        assert (other.since, other.promises["default"].eager) == ("", None)
        assert "unknown device" in other.promises["default"].incomparable
        assert [change.name for change in other.changes] == ["speedup_eager of default"]
        repo.layers([layer("Fresh")])
        repo.publish("Fresh", kernel(), promised=1.5)
        fresh = entrant("Fresh")
        assert (fresh.base, fresh.since, fresh.compared, fresh.promises["default"].eager) == (None, "", False, 1.5)
        told = {"environment": [["device", facts.name], ["threads", str(len(os.sched_getaffinity(0)))]]}
        folder_of = f"forged/{repo.entries['Fresh'].directory}"
        repo.write({f"{folder_of}/evaluation.json": json.dumps(told)})
        assert entrant("Fresh").promises["default"].incomparable == ""
