"""plan -> forge in two shards -> verify, for real: oracle, compiler, sandbox and clock; only the model is a recording.
Then what a machine that forged might hand to the one that verifies.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import forge_repo
import pytest
from cudaforge_action.records import ForgedKernel, ForgedShard
from cudaforge_action.shards import Verified, read_forged, read_verified, write_forged

from pytest_cudaforge.chat.record import Conversation, RecordedReply, render_conversations
from pytest_cudaforge.discovery import discover
from pytest_cudaforge.records import Candidate
from pytest_cudaforge.store import RunStore

SETTINGS = """
device: cpu
rounds: 1
trials: 3
min_headroom: 0
roofline_stop: 99
timing_budget_s: 0.3
chat:
  coder: {provider: replay}
  judge: {provider: replay}
  replay: {paths: [conversations]}
"""
GOOD = forge_repo.KERNEL.replace("SCALE", "w[c]")
RUNNERS = "[{labels: [self-hosted, cpu], device: cpu, shards: 2}]"
OUTPUT = Path(".cudaforge/action")
#: A busy machine leaves a race undecided; what was forged is kept, so that asking again costs a sitting, no more.
ATTEMPTS = 3
pytestmark = pytest.mark.timeout(900)


def cudaforge_ci(root: Path, mode: str, **inputs: str) -> tuple[int, dict[str, str], str]:
    """One job: exit status, outputs, and its log."""
    kept = ("PATH", "HOME", "LD_LIBRARY_PATH", "TMPDIR", "PYTHONPATH", "XDG_CACHE_HOME")
    environ = {name: os.environ[name] for name in kept if name in os.environ}
    environ |= {f"INPUT_{name.upper()}": value for name, value in inputs.items()} | {"OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-m", "cudaforge_action", mode]
    done = subprocess.run(argv, cwd=root, env=environ, capture_output=True, text=True, check=False)
    path = root / OUTPUT / "outputs.json"
    outputs = json.loads(path.read_text()) if path.is_file() else {}
    path.unlink(missing_ok=True)
    return done.returncode, outputs, done.stdout + done.stderr


def undecided(log: str) -> bool:
    return re.search(r"\b(?:disturbed|inconclusive)\)", log) is not None


def until_decided(root: Path, mode: str, shard: str) -> tuple[int, dict[str, str], str]:
    """A job whose clock said something."""
    for _ in range(ATTEMPTS):
        status, outputs, log = cudaforge_ci(root, mode, shard=shard)
        told = log + (root / OUTPUT / "summary.md").read_text()
        if not undecided(told):
            break
    return status, outputs, told


@pytest.fixture(scope="module")
def forged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A repo with two targets, each forged by a job of its own; and the shards."""
    root = tmp_path_factory.mktemp("work")
    wide = forge_repo.LAYERS.replace("PeakNorm", "WideNorm").replace("4, 64", "8, 64")
    files = {"layers.py": forge_repo.LAYERS, "wide.py": wide, "cudaforge.yaml": SETTINGS, "pytest.ini": "[pytest]\n"}
    for name, text in files.items():
        (root / name).write_text(text.lstrip())
    reply = f"```cpp kernel.cpp\n{GOOD}\n```\n\n```python plan.py\n{forge_repo.PLAN}\n```\n"
    talks = [
        Conversation(target.id, target.digest, "cpp", (RecordedReply("coder", 1, reply),))
        for target in discover([root], root).targets
    ]
    (root / "conversations").mkdir()
    (root / "conversations" / "all.jsonl").write_text(render_conversations(talks))
    status, outputs, log = cudaforge_ci(root, "plan", runners=RUNNERS)
    assert (status, outputs["shards"]) == (0, "2"), log
    shards = [row["shard"] for row in json.loads(outputs["matrix"])["include"]]
    for shard in shards:
        status, outputs, log = until_decided(root, "forge", shard)
        if undecided(log):
            promote(root, json.loads(shard))
        else:
            assert (status, outputs["forged"]) == (0, "1"), log
    return root, shards


def promote(root: Path, shard: dict[str, Any]) -> None:
    """What is right but was raced on a busy machine, as if it had won: what follows is about whom to believe."""
    (target,) = [one for one in discover([root], root).targets if one.id in shard["targets"]]
    trace = RunStore(root / ".cudaforge").target(target, "cpp").trace()
    assert trace is not None and trace.final is not None and trace.final.passed
    trace = replace(trace, outcome="forged", winner=1)
    digest = trace.final.candidate if trace.final is not None else ""
    kernel = ForgedKernel(target.id, target.digest, "cpp", digest, "a.json")
    folder = root / OUTPUT / "forged" / shard["name"]
    write_forged(folder, ForgedShard(shard["name"], "", kernels=(kernel,)), {"a.json": trace})


@pytest.fixture
def repo(forged: tuple[Path, list[str]], tmp_path: Path) -> Path:
    """A copy, as another machine fetched it."""
    shutil.copytree(forged[0], tmp_path / "repo", ignore=shutil.ignore_patterns("verified"))
    return tmp_path / "repo"


def test_two_shards_are_forged_and_verified(forged: tuple[Path, list[str]]) -> None:
    root, shards = forged
    assert sorted(json.loads(shard)["targets"] for shard in shards) == [["layers.py::PeakNorm"], ["wide.py::WideNorm"]]
    for shard in shards:
        status, outputs, log = until_decided(root, "verify", shard)
        found = read_verified(root / OUTPUT / "verified" / json.loads(shard)["name"])
        if undecided(log):
            (kernel,) = found.shard.kernels
            assert status == 0 and kernel.evaluation is not None and kernel.evaluation.passed
            assert kernel.entry is None and "no winner" in kernel.reason
            continue
        assert (status, outputs["verified"]) == (0, "1") and float(outputs["best-speedup"]) > 1, log
        check_verified(found, root)
    assert not (root / OUTPUT / "verified" / "01-cpu" / "forged" / "manifest.json").exists()
    assert not (root / "forged").exists()  # the checkout's own kernels are publish's business


def check_verified(found: Verified, root: Path) -> None:
    (kernel,) = found.shard.kernels
    assert kernel.entry is not None and kernel.evaluation is not None and found.shard.error == ""
    files = found.files[kernel.entry.directory]
    assert files["kernel.cpp"].decode().strip() == GOOD.strip()
    (mine,) = [trace for _, trace in read_forged(root / OUTPUT / "forged" / found.shard.shard).kernels]
    assert mine.final is not None and mine.final.timing != kernel.evaluation.timing  # measured anew
    assert b"verified anew" in files["report.md"]
    assert kernel.evaluation.verification is not None and kernel.evaluation.isolation.grade in "AB"


# -- what a machine that forged might say --------------------------------------------------------------------------


def tampered(root: Path, change: Callable[[dict[str, Any]], None], kernel: str = "") -> str:
    """The first shard, with another winner and whatever else is changed; all digests fit. Its JSON."""
    folder = root / OUTPUT / "forged" / "01-cpu"
    (path,) = (folder / "traces").iterdir()
    trace, shard = json.loads(path.read_text()), json.loads((folder / "shard.json").read_text())
    winner = next(entry for entry in trace["rounds"] if entry["number"] == trace["winner"])
    files = dict(winner["candidate"]["files"]) | ({"kernel.cpp": kernel} if kernel else {})
    winner["candidate"]["files"] = [list(pair) for pair in sorted(files.items())]
    change(trace)
    files = dict(winner["candidate"]["files"])
    digest = Candidate.of("cpp", files).digest
    for verdict in (winner["evaluation"], trace["final"]):
        verdict["candidate"] = digest
    shard["shard"]["kernels"][0]["digest"] = digest
    path.write_text(json.dumps(trace))
    (folder / "shard.json").write_text(json.dumps(shard))
    target = shard["shard"]["kernels"][0]["target"]
    return json.dumps({"name": "01-cpu", "runs_on": ["cpu"], "device": "cpu", "targets": [target]})


def boast(trace: dict[str, Any]) -> None:
    trace["final"]["timing"]["speedup_eager"] = 1000.0
    trace["final"]["isolation"]["grade"] = "A"


def test_a_claim_of_passed_is_not_believed(repo: Path) -> None:
    shard = tampered(repo, boast, forge_repo.KERNEL.replace("SCALE", "w[c] * 1.001f"))
    assert read_forged(repo / OUTPUT / "forged" / "01-cpu").kernels[0][1].final.passed  # type: ignore[union-attr]
    status, outputs, log = cudaforge_ci(repo, "verify", shard=shard)
    assert (status, outputs["verified"], outputs["best-speedup"]) == (0, "0", ""), log
    found = read_verified(repo / OUTPUT / "verified" / "01-cpu")
    (kernel,) = found.shard.kernels
    assert kernel.entry is None and kernel.reason.startswith("INCORRECT_NUMERICAL") and not found.files


def test_a_claim_of_speed_is_not_believed(repo: Path) -> None:
    slow = GOOD.replace("for (long long row", "for (int turn = 0; turn < 300; ++turn)\n  for (long long row", 1)
    slow = slow.replace("float peak = 0.0f;", 'float peak = 0.0f;\n    asm volatile("" ::: "memory");')
    status, outputs, log = cudaforge_ci(repo, "verify", shard=tampered(repo, boast, slow))
    assert (status, outputs["verified"]) == (0, "0"), log
    (kernel,) = read_verified(repo / OUTPUT / "verified" / "01-cpu").shard.kernels
    assert kernel.entry is None and kernel.evaluation is not None and kernel.evaluation.passed
    # A busy machine says that there is no winner; the boast is believed in no case.
    assert "not faster" in kernel.reason or "no winner" in kernel.reason


def test_a_build_that_fails_here_has_a_reason(repo: Path) -> None:
    status, outputs, log = cudaforge_ci(repo, "verify", shard=tampered(repo, boast, "nonsense"))
    assert (status, outputs["verified"]) == (0, "0"), log
    (kernel,) = read_verified(repo / OUTPUT / "verified" / "01-cpu").shard.kernels
    assert kernel.reason.startswith("BUILD_ERROR") and kernel.entry is None


def smuggle_source(trace: dict[str, Any]) -> None:
    trace["rounds"][0]["candidate"]["files"].append(["../../../conftest.py", "raise SystemExit"])


def rename_source(trace: dict[str, Any]) -> None:
    trace["rounds"][0]["candidate"]["files"][0][0] = "forged/../kernel.cpp"


@pytest.mark.parametrize("change", [smuggle_source, rename_source])
def test_sources_beyond_a_kernels_are_refused_before_anything_runs(
    repo: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    status, outputs, log = cudaforge_ci(repo, "verify", shard=tampered(repo, change))
    assert status == 2 and outputs == {} and "has other files than its language" in log, log
    assert not (repo / OUTPUT / "verified").exists() and not (repo / "conftest.py").exists()


@pytest.mark.parametrize("name", ["forged/x.py", "traces/x.json", ".git/config", "verified.json"])
def test_files_beyond_a_shards_are_refused_before_anything_runs(repo: Path, name: str) -> None:
    shard = tampered(repo, boast)
    path = repo / OUTPUT / "forged" / "01-cpu" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{}")
    status, outputs, log = cudaforge_ci(repo, "verify", shard=shard)
    assert status == 2 and outputs == {} and "nothing of it was used" in log, log
    assert not (repo / OUTPUT / "verified").exists()


def test_the_text_of_a_kernel_is_no_command_of_the_runner(repo: Path) -> None:
    """A compiler's log shows the line that it does not like."""
    loud = 'extern "C" int x = ::error::y;\n#error ::set-output name=a::b\n##[add-mask]c\n'
    status, _, log = cudaforge_ci(repo, "verify", shard=tampered(repo, boast, loud))
    assert status == 0, log
    told = (repo / OUTPUT / "summary.md").read_text()
    assert not [line for line in (log + told).splitlines() if line.startswith(("::", "##["))]
