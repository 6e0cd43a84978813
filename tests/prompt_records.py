"""Records to render prompts from: one small target, its facts, a machine, and rounds of every outcome."""

from __future__ import annotations

import dataclasses
import hashlib

from pytest_cudaforge.plan import TensorSpec, contiguous_strides
from pytest_cudaforge.records import (
    Baseline,
    Build,
    Candidate,
    CaseResult,
    DeviceFacts,
    Evaluation,
    Feedback,
    Isolation,
    KernelResources,
    Mismatch,
    Ratio,
    Round,
    Sample,
    Status,
    Target,
    TargetFacts,
    Timing,
    Verification,
    WorkloadFacts,
    WorkloadTiming,
)

SOURCE = """class PeakNorm(nn.Module):
    def forward(self, x):
        return x / x.abs().amax(-1, keepdim=True) * self.weight
"""


def spec(*shape: int, dtype: str = "float32", strides: tuple[int, ...] | None = None) -> TensorSpec:
    return TensorSpec(shape, dtype, strides or contiguous_strides(shape))


def target() -> Target:
    return Target(
        id="layers.py::PeakNorm",
        root="repo",
        path="layers.py",
        qualname="PeakNorm",
        kind="class",
        line=3,
        module_name="layers",
        import_root="repo",
        name="peak_norm",
        source=SOURCE,
        digest=hashlib.sha256(SOURCE.encode()).hexdigest(),
    )


def facts(**changes: object) -> TargetFacts:
    workload = WorkloadFacts(
        name="default",
        inputs=(("0", spec(64, 4096)), ("kw.mask", spec(64, 64, strides=(1, 64))), ("1.0", 3)),
        input_tree={},
        outputs=(("out", spec(64, 4096)),),
        output_tree={},
        input_bytes=1_064_960,
        state_bytes=16_384,
        output_bytes=1_048_576,
        flops=524_288,
    )
    module = {
        "class": "PeakNorm",
        "attributes": {
            "eps": 1e-6,
            "name": "peak",
            "weight": {"tensor": {"shape": [4096], "dtype": "float32", "strides": [1]}, "path": "weight"},
            "layers": {
                "module": {
                    "class": "ModuleList",
                    "items": ["0"],
                    "attributes": {"0": {"module": {"class": "Linear", "attributes": {"in_features": 8}}}},
                }
            },
            "limits": {"list": [1, {"float": "inf"}]},
            "hook": {"opaque": "function"},
        },
    }
    base = TargetFacts(
        target_id="layers.py::PeakNorm",
        precision="fp32",
        atol=None,
        rtol=None,
        languages=("cpp",),
        min_speedup=1.0,
        allow=("kernel",),
        mode="eval",
        grad=False,
        dynamic=False,
        strides="drawn",
        distributions="all",
        index_outputs=(),
        nondeterministic=False,
        module=module,
        workloads=(workload,),
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def device() -> DeviceFacts:
    return DeviceFacts(
        kind="cpu",
        name="Some CPU @ 2.0 GHz",
        arch="cpu",
        sm_count=2,
        bandwidth_bytes_per_s=12.5e9,
        peak_flops=(("fp32", 1.2e11),),
    )


def sample(median_ns: float) -> Sample:
    return Sample(median_ns, median_ns * 0.98, median_ns * 1.03, 60, 6)


def baseline() -> Baseline:
    return Baseline("default", sample(400_000.0), sample(300_000.0), "", 100_000.0, 2_113_536, 524_288)


def candidate(mark: str = "one") -> Candidate:
    return Candidate.of(
        "cpp", {"kernel.cpp": f"// {mark}\nvoid f() {{}}\n", "plan.py": "def plan(module, x):\n    return x\n"}
    )


def evaluation(status: Status = Status.PASSED, reason: str = "", **changes: object) -> Evaluation:
    base = Evaluation(status, reason, "c0ffee", "layers.py::PeakNorm", Isolation("C"))
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def timing(candidate_ns: float = 200_000.0) -> Timing:
    ratio = Ratio(400_000.0 / candidate_ns, 1.0, 9.0)
    line = WorkloadTiming(
        "default", sample(candidate_ns), sample(400_000.0), sample(300_000.0), ratio, ratio, 1, 100_000.0
    )
    return Timing("faster", "supervisor", ratio.speedup, ratio.speedup * 0.75, (line,))


def passed(number: int, candidate_ns: float, parent: int | None = None) -> Round:
    resources = (KernelResources("peak_norm<float>", registers=40, spill_bytes=16),)
    verdict = evaluation(timing=timing(candidate_ns), build=Build("cpu", 0.5, False, "", resources))
    feedback = (
        Feedback("optimization", "two reads of x", "keep the row in registers", "fuse the loops") if parent else None
    )
    return Round(number, "optimization" if parent else "first", parent, candidate(f"round {number}"), verdict, feedback)


def failed_build(number: int, log: str = "kernel.cpp:7:3: error: 'y' was not declared") -> Round:
    verdict = evaluation(Status.BUILD_ERROR, "kernel.cpp did not compile", build=Build("cpu", 0.2, False, log))
    return Round(number, "first", None, candidate(f"round {number}"), verdict)


def wrong_numbers(number: int, parent: int | None = None) -> Round:
    mismatch = Mismatch("out", "values", "3 of 64 rows", 120.5, 16.0, (3, 17), 1.25, 1.5, "every 64th column")
    verification = Verification(
        (
            CaseResult("default", "drawn", True, True, 2.0, 16.0),
            CaseResult("default", "shifted", True, False, 120.5, 16.0, (mismatch,)),
            CaseResult("default", "strided", False, False, 9.0, 16.0),
        ),
        "fp64",
        120.5,
    )
    verdict = evaluation(Status.INCORRECT_NUMERICAL, "out is wrong", verification=verification)
    feedback = Feedback("correction", "a race", "no barrier", "add a barrier") if parent else None
    return Round(number, "correction" if parent else "first", parent, candidate(f"round {number}"), verdict, feedback)
