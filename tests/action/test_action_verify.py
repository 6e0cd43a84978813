"""Mode verify where no kernel needs to run: what it refuses, and what it says of kernels that it cannot judge. Real
verdicts are in tests/attacks/test_action_work.py."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import shard_records
from cudaforge_action import verification, verify
from cudaforge_action.artifact import digest_of
from cudaforge_action.inputs import Inputs
from cudaforge_action.plain import PlainHost
from cudaforge_action.records import ForgedKernel, Shard, VerifiedKernel, VerifiedShard
from cudaforge_action.shards import FORGED_DIR, ShardError, read_verified, tidied, write_forged, write_verified
from cudaforge_action.verification import until_undisturbed
from flow_records import make_candidate, make_evaluation

from pytest_cudaforge.discovery import discover
from pytest_cudaforge.errors import UsageError
from pytest_cudaforge.records import Candidate, Target

LAYERS = """
from torch import nn
from pytest_cudaforge import forge_target

@forge_target(inputs=lambda: [])
class scale(nn.Module): ...
"""
SHARD = Shard("01-cpu", ("box",), "", ("layers.py::scale",))
PLACE = Path(".cudaforge/action")


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Target:
    """Of a repo that is the working directory."""
    for name in list(os.environ):
        if name.startswith(("CUDAFORGE_", "INPUT_")) or name.endswith(("_API_KEY", "_TOKEN")):
            monkeypatch.delenv(name)
    (tmp_path / "layers.py").write_text(LAYERS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    monkeypatch.chdir(tmp_path)
    return discover([tmp_path / "layers.py"], tmp_path).targets[0]


def verified(**more: object) -> tuple[int, VerifiedShard, Mapping[str, str]]:
    inputs = dataclasses.replace(Inputs("verify", shard=SHARD), **more)  # type: ignore[arg-type]
    status = verify.run(inputs, PlainHost(PLACE))
    return status, read_verified(PLACE / "verified/01-cpu").shard, json.loads((PLACE / "outputs.json").read_text())


def judged(*options: str) -> VerifiedShard:
    """What the process that verifies does, in this one."""
    (PLACE / "verified/01-cpu").mkdir(parents=True, exist_ok=True)
    folders = [str(PLACE / "forged/01-cpu"), str(PLACE / "verified/01-cpu"), "."]
    assert verification.main([*folders, *options]) == 0
    return read_verified(PLACE / "verified/01-cpu").shard


@pytest.mark.parametrize("name", ["OPENAI_API_KEY", "INPUT_TOKEN", "GITHUB_TOKEN", "GH_TOKEN", "MY_SERVICE_PASSWORD"])
def test_a_job_with_a_secret_verifies_nothing(target: Target, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    shard_records.forged(PLACE / "forged/01-cpu", [target])
    monkeypatch.setenv(name, "not-to-be-shown")
    with pytest.raises(UsageError, match=name) as caught:
        verified()
    assert "not-to-be-shown" not in str(caught.value) and not (PLACE / "verified").exists()


def test_all_shards_without_a_name_beside_gitlabs_own_tokens(
    target: Target, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CI_JOB_TOKEN", "in every job")
    monkeypatch.setenv("CI_REGISTRY_PASSWORD", "in every job")
    for name in ("01-cpu", "02-cpu"):
        shard_records.forged(PLACE / "forged" / name, [dataclasses.replace(target, digest="0" * 64)])
    status, shard, outputs = verified(shard=None)
    assert status == 0 and outputs["verified"] == "0" and shard.kernels[0].entry is None
    assert sorted(path.name for path in (PLACE / "verified").iterdir()) == ["01-cpu", "02-cpu"]
    assert json.loads(outputs["digests"]) == {
        name: digest_of(PLACE / "verified" / name) for name in ("01-cpu", "02-cpu")
    }
    assert "0 of 2 kernels may be published." in capfd.readouterr().out
    assert "has changed" in (PLACE / "summary.md").read_text()


def test_without_any_shard_there_is_nothing_to_verify(target: Target) -> None:
    with pytest.raises(UsageError, match="there is nothing to verify"):
        verified(shard=None)


def test_a_lost_shard_is_an_error_with_a_shard_named(target: Target) -> None:
    with pytest.raises(UsageError, match="no shard 01-cpu"):
        verified()


def test_a_target_that_changed_is_not_verified(target: Target) -> None:
    shard_records.forged(PLACE / "forged/01-cpu", [dataclasses.replace(target, digest="0" * 64)])
    (kernel,) = judged().kernels
    assert (kernel.evaluation, kernel.entry) == (None, None) and "has changed" in kernel.reason


@pytest.mark.parametrize("gone", ["the file", "the class", "the mark"])
def test_a_target_that_is_gone_is_not_verified(target: Target, gone: str) -> None:
    shard_records.forged(PLACE / "forged/01-cpu", [target])
    if gone == "the file":
        Path("layers.py").unlink()
    else:
        mark = "@forge_target(inputs=lambda: [])\n"
        Path("layers.py").write_text(
            LAYERS.replace("scale", "other") if gone == "the class" else LAYERS.replace(mark, "")
        )
    assert "gone from this checkout" in judged().kernels[0].reason


def cuda_shard(target: Target) -> None:
    trace = shard_records.trace(target)
    candidate = Candidate.of("cuda", {"kernel.cu": "// fast\n", "plan.py": "def plan(x):\n    return x\n"})
    rounds = (dataclasses.replace(trace.rounds[1], number=2, candidate=candidate),)
    trace = dataclasses.replace(trace, language="cuda", rounds=rounds)
    kernel = ForgedKernel(target.id, target.digest, "cuda", candidate.digest, "a.json")
    shard = dataclasses.replace(shard_records.forged(PLACE / "forged/01-cpu", []), kernels=(kernel,))
    write_forged(PLACE / "forged/01-cpu", shard, {"a.json": trace})


def test_without_a_gpu_a_cuda_kernel_is_not_verified(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    cuda_shard(target)
    assert "no GPU here" in judged().kernels[0].reason
    assert "on cpu only" in judged("--device=cpu").kernels[0].reason


def raced(name: str, decision: str, turns: int = 1) -> VerifiedKernel:
    candidate = make_candidate(name)
    verdict = make_evaluation(candidate)
    assert verdict.timing is not None
    verdict = dataclasses.replace(verdict, timing=dataclasses.replace(verdict.timing, decision=decision))
    return VerifiedKernel(f"layers.py::{name}", "d1", "cpp", candidate.digest, verdict, turns=turns)


@dataclasses.dataclass
class Night:
    """Time that passes only by waiting, and a machine on which races are decided from a moment on."""

    quiet_from_s: float
    now_s: float = 0.0
    raced: list[tuple[float, str]] = dataclasses.field(default_factory=list)

    def sleep(self, wait_s: float) -> None:
        self.now_s += wait_s

    def judged(self, *decisions: str, patience_s: float = 600.0) -> list[VerifiedKernel]:
        done = [raced(f"k{number}", decision) for number, decision in enumerate(decisions)]
        for place in until_undisturbed(done, patience_s, sleep=self.sleep):
            decision = "disturbed" if self.now_s < self.quiet_from_s else "faster"
            done[place] = raced(f"k{place}", decision, done[place].turns + 1)
            self.raced.append((self.now_s, f"k{place}"))
        return done


def test_a_race_that_was_disturbed_is_held_again_once_the_machine_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    night = Night(quiet_from_s=30.0)
    done = night.judged("disturbed", "faster", "slower", "inconclusive", "disturbed")
    assert [one.evaluation.timing.decision for one in done] == [  # type: ignore[union-attr]
        *("faster", "faster", "slower", "inconclusive", "faster")
    ]
    assert [one.turns for one in done] == [3, 1, 1, 1, 3]
    assert night.raced == [(10.0, "k0"), (10.0, "k4"), (30.0, "k0"), (30.0, "k4")]
    assert capsys.readouterr().out.count("disturbed 2 races: again in") == 2


def test_a_machine_that_stays_busy_is_given_up() -> None:
    night = Night(quiet_from_s=math.inf)
    (kernel,) = night.judged("disturbed")
    assert [moment for moment, _ in night.raced] == [10.0, 30.0, 70.0, 150.0, 310.0, 470.0] and kernel.turns == 7
    hasty = Night(quiet_from_s=0.0)
    assert hasty.judged("disturbed", patience_s=9.0)[0].turns == 1 and hasty.now_s == 0.0
    quiet = Night(quiet_from_s=0.0)
    assert quiet.judged("faster", "slower")[0].turns == 1 and quiet.now_s == 0.0


def test_a_folder_that_no_forge_job_leaves_is_an_error(target: Target) -> None:
    shard_records.forged(PLACE / "forged/01-cpu", [target])
    (PLACE / "forged/01-cpu/conftest.py").write_text("raise SystemExit")
    with pytest.raises(ShardError):
        verified()
    assert not (PLACE / "verified").exists()


def test_a_shard_of_another_name_is_an_error(target: Target) -> None:
    shard_records.forged(PLACE / "forged/02-cpu", [target])
    (PLACE / "forged/02-cpu").rename(PLACE / "forged/01-cpu")
    with pytest.raises(ShardError, match="02-cpu"):
        verified()


def test_a_process_that_dies_leaves_a_shard_that_says_so(target: Target) -> None:
    shard_records.forged(PLACE / "forged/01-cpu", [target])
    Path("cudaforge.yaml").write_text("")
    Path("killer").write_text("#!/bin/sh\nkill -9 $$\n")
    Path("killer").chmod(0o755)
    status, shard, _ = verified(python="./killer")
    assert status == 1 and "killed by signal 9" in shard.error and shard.kernels == ()


def half_a_kernel(folder: Path) -> None:
    place = folder / FORGED_DIR / "shift-000000" / "cpu"
    place.mkdir(parents=True)
    (place / "kernel.cpp").write_text("half")


def half_a_file(folder: Path) -> None:
    (folder / ".shard.json.x.tmp").write_text("{")


def a_manifest(folder: Path) -> None:
    (folder / FORGED_DIR / "manifest.json").write_text("{}")


@pytest.mark.parametrize("harm", [half_a_kernel, half_a_file, a_manifest])
def test_what_a_killed_process_had_not_finished_is_removed(target: Target, harm: Callable[[Path], None]) -> None:
    folder = PLACE / "verified/01-cpu"
    shard = shard_records.verified(folder, [target])
    harm(folder)
    with pytest.raises(ShardError):
        read_verified(folder)
    tidied(folder)
    assert read_verified(folder).shard == shard
    write_verified(folder, dataclasses.replace(shard, error="killed"))
    assert read_verified(folder).shard.error == "killed"
