"""The Action's jobs that need a GPU, by the entry that all hosts share: a recorded CUDA conversation is forged, rebuilt
and verified without it, and the guard passes what was verified and fails what became slower."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cudaforge_action.shards import read_forged, read_verified
from fake_git import git

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
TARGET = "examples/masked_softmax.py::MaskedSoftmax"
SHARD = {"name": "01-cuda", "runs_on": ["self-hosted", "gpu"], "device": "cuda", "targets": [TARGET]}
SETTINGS = """
trials: 3
chat:
  coder: {provider: replay}
  judge: {provider: replay}
  replay: {paths: [examples/conversations]}
"""


class Checkout:
    """A repo with one target and its recorded conversation, and the jobs that run in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.results = root / ".cudaforge" / "action"

    def write(self, name: str, text: str) -> None:
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_text(text)

    def commit(self, text: str) -> None:
        """On ``main``; the branch ``before`` is where it was."""
        if (self.root / ".git" / "refs" / "heads" / "main").exists():
            git(self.root, "branch", "-f", "before")
        git(self.root, "add", "-A")
        git(self.root, "commit", "-q", "-m", text)

    def job(self, mode: str, **inputs: str) -> subprocess.CompletedProcess[str]:
        """A mode on a plain machine, without key and token."""
        # Where the package is only on the path, pytest has to be told of its plugin.
        known = importlib.metadata.entry_points(group="pytest11", name="cudaforge")
        given = {"device": "cuda", "pytest_args": "" if known else "-p pytest_cudaforge.plugin", **inputs}
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("GITHUB_", "GITLAB_"))}
        environ |= {f"INPUT_{name.upper()}": value for name, value in given.items()}
        argv = [sys.executable, "-m", "cudaforge_action", mode]
        return subprocess.run(argv, cwd=self.root, env=environ, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkout]:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU here")
    made = Checkout(tmp_path_factory.mktemp("action") / "repo")
    for name in ("examples/masked_softmax.py", "examples/conversations/masked_softmax.cuda.jsonl"):
        made.write(name, (ROOT / name).read_text("utf-8"))
    made.write("cudaforge.yaml", SETTINGS)
    made.write("pytest.ini", "[pytest]\n")
    made.write(".gitignore", ".cudaforge\n__pycache__\n")
    git(made.root, "init", "-q", "-b", "main")
    made.commit("feat: a softmax")
    yield made


@pytest.fixture(scope="module")
def verified(checkout: Checkout) -> Any:
    done = checkout.job("forge", shard=json.dumps(SHARD))
    assert done.returncode == 0, done.stdout + done.stderr
    [(kernel, _)] = read_forged(checkout.results / "forged" / "01-cuda").kernels
    assert (kernel.target, kernel.language) == (TARGET, "cuda")
    done = checkout.job("verify", shard=json.dumps(SHARD))
    assert done.returncode == 0, done.stdout + done.stderr
    return read_verified(checkout.results / "verified" / "01-cuda")


def test_a_forged_kernel_is_rebuilt_and_verified_with_everything_a_winner_passes(verified: Any) -> None:
    [kernel] = verified.shard.kernels
    assert kernel.entry is not None, kernel.reason
    verdict = kernel.evaluation
    assert (verdict.status.value, verdict.isolation.grade, verdict.timing.decision) == ("PASSED", "A", "faster")
    assert kernel.entry.arch.startswith("sm_") and verdict.build is not None and not verdict.build.cached
    report = verdict.verification.sanitizer
    assert report is not None and (report.tools or report.notes)


def test_the_guard_passes_it_and_fails_what_does_the_work_three_times(checkout: Checkout, verified: Any) -> None:
    [kernel] = verified.shard.kernels
    shutil.copytree(checkout.results / "verified" / "01-cuda" / "forged", checkout.root / "forged", dirs_exist_ok=True)
    from pytest_cudaforge.runtime.manifest import merge

    merge(checkout.root / "forged" / "manifest.json", [kernel.entry])
    checkout.commit("perf: forge it")
    done = checkout.job("guard", base="before")
    assert done.returncode == 0, done.stdout + done.stderr
    slow(checkout, kernel.entry)
    done = checkout.job("guard", base="before")
    run = json.loads((checkout.results / "guard" / "guard.json").read_text())
    assert done.returncode == 1, done.stdout + done.stderr
    assert "regression" in [record["outcome"] for record in run["guard"]["records"]]


def slow(checkout: Checkout, entry: Any) -> None:
    """A commit whose plan launches everything three times; its manifest goes along."""
    import hashlib
    from dataclasses import replace

    from pytest_cudaforge.runtime.manifest import EntryFile, merge

    path = checkout.root / "forged" / entry.directory / "plan.py"
    plan = path.read_text()
    launch = plan[plan.index("    launch(") : plan.rindex("    return ")]
    path.write_text(plan.replace(launch, launch * 3))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    files = tuple(EntryFile(one.name, digest) if one.name == "plan.py" else one for one in entry.files)
    merge(checkout.root / "forged" / "manifest.json", [replace(entry, files=files)])
    checkout.commit("perf: trust me")
