"""The guard's measuring on a real GPU: device events, fresh processes, one sitting. No test depends on a time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from benchmarks.null_test import CUDA, TARGET, kernel
from judged_targets import find

from pytest_cudaforge.evaluation.evaluator import Evaluator, EvaluatorSettings
from pytest_cudaforge.records import Candidate, Race, RaceFailure, Status, Target

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU that torch can see"),
]


@pytest.fixture(scope="module")
def evaluator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Evaluator]:
    cache = tmp_path_factory.mktemp("cache")
    with Evaluator(EvaluatorSettings(device="cuda:0", cache_dir=cache)) as opened:
        yield opened


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tmp_path_factory.mktemp("repo")
    (folder / "norm_256.py").write_text(TARGET.format(rows=256))
    return find(folder, "::Norm256")


def _changed(old: str, new: str) -> Candidate:
    files = dict(kernel("cuda", 0.0).files)
    assert old in CUDA
    return Candidate.of("cuda", {**files, "kernel.cu": CUDA.replace(old, new)})


def test_blocks_of_every_process_by_device_events(evaluator: Evaluator, target: Target) -> None:
    found = evaluator.race(kernel("cuda", 0.0), target, base=kernel("cuda", 0.0), processes=2)
    assert isinstance(found, tuple), found
    (race,) = found
    assert isinstance(race, Race) and race.clock == "events"
    assert {block.process for block in race.blocks} == {0, 1}
    assert all([name for name, _ in block.ns] == ["candidate", "base", "eager", "compile"] for block in race.blocks)
    assert {"building", "references", "starting workers", "blocks", "judging"} <= set(dict(race.spent))


def test_a_base_that_faults_is_left_out_and_the_device_goes_on(evaluator: Evaluator, target: Target) -> None:
    faulty = _changed("y[row * 1024 + threadIdx.x", "y[(1ll << 50) + row * 1024 + threadIdx.x")
    found = evaluator.race(kernel("cuda", 0.0), target, base=faulty, processes=1, references=("eager",))
    assert isinstance(found, tuple), found
    assert "does not run any more" in " ".join(found[0].notes)
    assert all([name for name, _ in block.ns] == ["candidate", "eager"] for block in found[0].blocks)


def test_a_candidate_that_is_wrong_under_the_clock_is_a_failure(evaluator: Evaluator, target: Target) -> None:
    # Right in its first calls, and wrong in those that are timed.
    row = "    const long long row ="
    counted = _changed(row, f"    if (threadIdx.x == 0 && blockIdx.x == 0) atomicAdd(&calls, 1);\n{row}")
    source = "__device__ int calls;\n" + counted.file("kernel.cu").replace(
        "float k = rsqrtf(", "float k = (calls > 8 ? 1.01f : 1.0f) * rsqrtf("
    )
    late = Candidate.of("cuda", {**dict(counted.files), "kernel.cu": source})
    found = evaluator.race(late, target, base=kernel("cuda", 0.0), processes=1, references=("eager",))
    assert isinstance(found, RaceFailure), found
    assert found.status is Status.INCORRECT_NUMERICAL
