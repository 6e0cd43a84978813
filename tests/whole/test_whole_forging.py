"""`pytest --forge` and the cases it leaves under xdist, onto a branch, from a record: whole runs, each of which times
for real. One quick run of each way is in the unit suite (tests/plugin/test_forging.py)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import forge_repo
import pytest
from forge_repo import pytest_in
from quietness import Quietness

from pytest_cudaforge.runtime.manifest import Entry, Manifest


@pytest.fixture(scope="module")
def forged(tmp_path_factory: pytest.TempPathFactory, quietness: Quietness) -> Path:
    """A repo after one `pytest --forge`."""
    folder = forge_repo.write(tmp_path_factory.mktemp("forged"))
    with quietness.alone():
        forge_repo.forge(folder)
    return folder


@pytest.fixture
def repo(forged: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "repo"
    shutil.copytree(forged, folder)
    return folder


def test_workers_run_own_tests_and_cases(repo: Path) -> None:
    done = pytest_in(repo, "-v", "-n", "2")
    assert "2 passed" in done.stdout, done.stdout + done.stderr
    assert forge_repo.case_in(repo) in done.stdout and "IMPORTED []" in done.stdout


def test_a_case_by_its_id_reports_workloads(repo: Path) -> None:
    done = pytest_in(repo, "-rA", forge_repo.case_in(repo))
    assert "1 passed" in done.stdout and "workload default:" in done.stdout, done.stdout + done.stderr


def test_under_xdist_the_controller_forges_and_the_workers_report(repo: Path) -> None:
    """Resumed, quiet, and onto a branch."""
    (repo / "raises.py").write_text(forge_repo.RAISES)
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    for command in (("init", "-q"), ("add", "layers.py"), (*identity, "commit", "-qm", "x")):
        subprocess.run(["git", *command], cwd=repo, check=True)
    for again in ((), ("--forge-fresh",), ("--forge-fresh",)):
        done = pytest_in(repo, "--forge", "-n", "2", "-q", "--forge-branch", "forge/kernels", *again)
        if "(disturbed)" not in done.stdout:  # others kept the cores busy while the winner was measured again
            break
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert done.stdout.count(" done: ") == 2 and "finished" not in done.stdout and "IMPORTED []" in done.stdout
    assert "drawing inputs of workload 'default' failed" in done.stdout
    assert "committed on branch forge/kernels" in done.stdout, done.stdout + done.stderr
    listed = subprocess.run(
        ["git", "ls-tree", "-r", "--name-only", "forge/kernels"], cwd=repo, capture_output=True, text=True, check=True
    ).stdout
    assert "kernel.cpp" in listed and "forged/manifest.json" in listed


def test_workers_forge_only_what_was_selected(repo: Path) -> None:
    (repo / "raises.py").write_text(forge_repo.RAISES)
    done = pytest_in(repo, "--forge", "-k", "Raises", "-n", "2")
    assert "1 failed" in done.stdout and "PeakNorm" not in done.stdout


def test_a_recorded_conversation_plays_again(repo: Path) -> None:
    shutil.rmtree(repo / ".cudaforge")
    shutil.rmtree(repo / "forged")
    (repo / "scripted_chat.py").unlink()
    chat = "chat: {coder: {provider: replay}, judge: {provider: replay}, replay: {paths: [talk.jsonl]}}\n"
    (repo / "cudaforge.yaml").write_text("device: cpu\nrounds: 1\nmin_headroom: 0\nroofline_stop: 99\n" + chat)
    done = pytest_in(repo, "--forge", "-rA")
    assert "BUILD_ERROR" in done.stdout and "1 failed" in done.stdout, done.stdout + done.stderr
    assert "every prompt, reply and verdict: .cudaforge/runs/peak_norm-" in done.stdout


def test_ctrl_c_under_xdist(tmp_path: Path) -> None:
    folder = forge_repo.write(tmp_path)
    status, output = forge_repo.interrupted(folder, 1, "-n", "2", reply_takes_s=1.5)
    assert status == pytest.ExitCode.INTERRUPTED, output
    assert "forging was stopped by Ctrl-C" in output and "INTERNALERROR" not in output
    assert "reply.md" in {path.name for path in folder.rglob("*.md")}, "a reply is never lost"


def test_a_kernel_for_one_workload_lives_beside_the_one_for_all(tmp_path: Path) -> None:
    folder = forge_repo.write(tmp_path)
    tall = 'init=lambda: [512], workloads={"tall": lambda: [torch.randn(256, 512)]})'
    (folder / "layers.py").write_text(forge_repo.LAYERS.lstrip().replace("init=lambda: [512])", tall))
    refused = pytest_in(folder, "--forge", "--forge-workload", "wide")
    assert "1 failed" in refused.stdout and "Traceback" not in refused.stdout, refused.stdout
    assert "wide" in refused.stdout and "tall" in refused.stdout and not (folder / "forged").exists()
    (alone,) = entries_after(folder, forge_repo.forge(folder, "--forge-workload", "ta*"), 1)
    assert [workload.name for workload in alone.workloads] == ["tall"] and alone.variant
    # Afresh: what was asked and measured for one workload is not taken for all of them.
    output = forge_repo.forge(folder)
    assert "resumed" not in output, output
    entries = entries_after(folder, output, 2)
    assert alone in entries and len({entry.directory for entry in entries}) == 2, entries
    (whole,) = (entry for entry in entries if entry.key != alone.key)
    assert sorted(workload.name for workload in whole.workloads) == ["default", "tall"] and not whole.variant
    done = pytest_in(folder, "-v")
    assert "4 passed" in done.stdout, done.stdout + done.stderr
    assert done.stdout.count("::case[tall]") == 2 and done.stdout.count("::case[default]") == 1


def entries_after(folder: Path, output: str, count: int) -> tuple[Entry, ...]:
    """What is in the manifest. Skips where a right kernel was not seen to be faster, three times, by others' doing."""
    manifest = folder / "forged" / "manifest.json"
    entries = Manifest.load(manifest).entries if manifest.is_file() else ()
    if len(entries) < count and "kept_reference" in output and "(disturbed)" in output:
        pytest.skip("others kept the machine busy: no sitting was undisturbed")
    assert len(entries) == count, output
    return entries
