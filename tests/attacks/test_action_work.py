"""What a machine that forged might hand to the one that verifies: nothing of it is believed but a kernel's sources.

Nothing is forged here: a hostile machine's shard is whatever it likes to write, so these are written by hand. They are
verified for real: oracle, compiler, sandbox and clock. Their honest twins, forged and verified by jobs of a workflow,
are in tests/whole/test_whole_action.py.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import forge_repo
import pytest
from cudaforge_action.records import ForgedKernel, ForgedShard, VerifiedKernel
from cudaforge_action.shards import read_forged, read_verified, write_forged
from flow_records import make_evaluation

from pytest_cudaforge.discovery import discover
from pytest_cudaforge.records import Candidate, Isolation, Round, Target, Trace

SETTINGS = "device: cpu\ntrials: 3\nroofline_stop: 99\ntiming_budget_s: 0.3\n"
OUTPUT = Path(".cudaforge/action")
SHARD = "01-cpu"
GOOD = forge_repo.KERNEL.replace("SCALE", "w[c]")
#: Close, but no answer.
WRONG = forge_repo.KERNEL.replace("SCALE", "w[c] * 1.001f")
#: The work sixty times: slower than any baseline.
SLOW = GOOD.replace("for (long long row", "for (int turn = 0; turn < 60; ++turn)\n  for (long long row", 1).replace(
    "float peak = 0.0f;", 'float peak = 0.0f;\n    asm volatile("" ::: "memory");'
)
#: A compiler's log shows the lines that it does not like.
LOUD = 'extern "C" int x = ::error::y;\n#error ::set-output name=a::b\n##[add-mask]c\n'
#: Class to what a machine says is its winner.
LIES = {"WrongNorm": WRONG, "SlowNorm": SLOW, "LoudNorm": LOUD}
pytestmark = pytest.mark.timeout(600)


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


def boast(target: Target, kernel: str) -> Trace:
    """Whatever the kernel is: it passed, a thousand times as fast, in the best of sandboxes."""
    candidate = Candidate.of("cpp", {"kernel.cpp": kernel, "plan.py": forge_repo.PLAN})
    verdict = make_evaluation(candidate, speedup=1000.0, target=target.id)
    verdict = replace(verdict, isolation=Isolation("A", ("everything",)))
    rounds = (Round(1, "first", None, candidate, verdict),)
    return Trace(target.id, "cpp", "forged", "trust me", rounds, 1, verdict)


def repo(root: Path, *names: str) -> list[Target]:
    """A repository with a target of each name."""
    head, mark, body = forge_repo.LAYERS.partition("@forge_target")
    root.mkdir()
    (root / "layers.py").write_text(head + "\n\n".join(mark + body.replace("PeakNorm", name) for name in names))
    (root / "cudaforge.yaml").write_text(SETTINGS)
    (root / "pytest.ini").write_text("[pytest]\n")
    found = {one.qualname: one for one in discover([root], root).targets}
    return [found[name] for name in names]


def handed_on(root: Path, traces: dict[Target, Trace]) -> str:
    """The shard as an artifact brings it; its JSON. All digests fit."""
    files = {f"{number}.json": trace for number, trace in enumerate(traces.values())}
    kernels = tuple(
        ForgedKernel(target.id, target.digest, "cpp", trace.rounds[0].candidate.digest, name)  # type: ignore[union-attr]
        for target, (name, trace) in zip(traces, files.items(), strict=True)
    )
    folder = root / OUTPUT / "forged" / SHARD
    write_forged(folder, ForgedShard(SHARD, "", kernels=kernels), files)
    assert len(read_forged(folder).kernels) == len(traces)
    ids = [target.id for target in traces]
    return json.dumps({"name": SHARD, "runs_on": ["cpu"], "device": "cpu", "targets": ids})


# -- what is judged ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Judged:
    """A verify job's answer to a shard of lies. ``told``: its log and its summary."""

    root: Path
    status: int
    outputs: dict[str, str]
    told: str
    kernels: dict[str, VerifiedKernel]


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Judged:
    root = tmp_path_factory.mktemp("work") / "repo"
    targets = repo(root, *LIES)
    shard = handed_on(root, {one: boast(one, LIES[one.qualname]) for one in targets})
    status, outputs, log = cudaforge_ci(root, "verify", shard=shard, quiet_minutes="1")
    found = read_verified(root / OUTPUT / "verified" / SHARD)
    assert not found.files and found.shard.error == "", log
    told = log + (root / OUTPUT / "summary.md").read_text()
    return Judged(root, status, outputs, told, {one.target.partition("::")[2]: one for one in found.shard.kernels})


def test_no_boast_is_published(judged: Judged) -> None:
    assert (judged.status, judged.outputs["verified"], judged.outputs["best-speedup"]) == (0, "0", ""), judged.told
    assert judged.kernels.keys() == LIES.keys() and all(one.entry is None for one in judged.kernels.values())
    assert not (judged.root / "forged").exists()  # the checkout's own kernels are publish's business


def test_a_claim_of_passed_is_not_believed(judged: Judged) -> None:
    assert judged.kernels["WrongNorm"].reason.startswith("INCORRECT_NUMERICAL")


def test_a_claim_of_speed_is_not_believed(judged: Judged) -> None:
    """Measured here, and by far too slow."""
    kernel = judged.kernels["SlowNorm"]
    assert kernel.evaluation is not None and kernel.evaluation.passed and kernel.evaluation.timing is not None
    assert kernel.entry is None, "nor is it published where nothing could be measured"
    if "no winner" in kernel.reason:
        pytest.skip(f"this machine is too busy to time anything in {kernel.turns} turns")
    assert "not faster" in kernel.reason and 0 < kernel.evaluation.timing.speedup_eager < 0.5


def test_a_build_that_fails_here_has_a_reason(judged: Judged) -> None:
    assert judged.kernels["LoudNorm"].reason.startswith("BUILD_ERROR")
    assert "::set-output" in judged.told  # shown


def test_the_text_of_a_kernel_is_no_command_of_the_runner(judged: Judged) -> None:
    assert not [line for line in judged.told.splitlines() if line.startswith(("::", "##["))]


# -- what is refused before anything runs ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shard:
    """One kernel, as another machine handed it on."""

    root: Path
    json: str

    @property
    def folder(self) -> Path:
        return self.root / OUTPUT / "forged" / SHARD


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Shard:
    root = tmp_path_factory.mktemp("refused") / "repo"
    (target,) = repo(root, "PeakNorm")
    return Shard(root, handed_on(root, {target: boast(target, GOOD)}))


@pytest.fixture
def shard(made: Shard, tmp_path: Path) -> Shard:
    """A copy, to be spoilt."""
    shutil.copytree(made.root, tmp_path / "repo")
    return Shard(tmp_path / "repo", made.json)


def smuggle_source(files: list[list[str]]) -> None:
    files.append(["../../../conftest.py", "raise SystemExit"])


def rename_source(files: list[list[str]]) -> None:
    files[0][0] = "forged/../kernel.cpp"


@pytest.mark.parametrize("change", [smuggle_source, rename_source])
def test_sources_beyond_a_kernels_are_refused_before_anything_runs(
    shard: Shard, change: Callable[[list[list[str]]], None]
) -> None:
    path = shard.folder / "traces" / "0.json"
    trace: dict[str, Any] = json.loads(path.read_text())
    change(trace["rounds"][0]["candidate"]["files"])
    digest = Candidate.of("cpp", dict(trace["rounds"][0]["candidate"]["files"])).digest
    claims = json.loads((shard.folder / "shard.json").read_text())
    claims["shard"]["kernels"][0]["digest"] = digest  # it fits
    path.write_text(json.dumps(trace))
    (shard.folder / "shard.json").write_text(json.dumps(claims))
    status, outputs, log = cudaforge_ci(shard.root, "verify", shard=shard.json)
    assert status == 2 and outputs == {} and "has other files than its language" in log, log
    assert not (shard.root / OUTPUT / "verified").exists() and not (shard.root / "conftest.py").exists()


@pytest.mark.parametrize("name", ["forged/x.py", "traces/x.json", ".git/config", "verified.json"])
def test_files_beyond_a_shards_are_refused_before_anything_runs(shard: Shard, name: str) -> None:
    path = shard.folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{}")
    status, outputs, log = cudaforge_ci(shard.root, "verify", shard=shard.json)
    assert status == 2 and outputs == {} and "nothing of it was used" in log, log
    assert not (shard.root / OUTPUT / "verified").exists()
