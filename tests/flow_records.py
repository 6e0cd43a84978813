"""Small builders of records for the tests of loop, strategies, store, publishing and report."""

from __future__ import annotations

from pathlib import Path

from pytest_cudaforge.plan import TensorSpec
from pytest_cudaforge.records import (
    Build,
    Candidate,
    CaseResult,
    Evaluation,
    Isolation,
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


def make_target(root: Path, name: str = "scale", source: str = "class Scale: ...", digest: str = "d1") -> Target:
    return Target(
        id=f"layers.py::{name}",
        root=str(root),
        path="layers.py",
        qualname=name,
        kind="class",
        line=1,
        module_name="layers",
        import_root=str(root),
        name=name,
        source=source,
        digest=digest,
    )


def make_facts(target: Target, min_speedup: float = 1.0) -> TargetFacts:
    spec = TensorSpec((4, 8), "float32", (8, 1))
    workload = WorkloadFacts("default", (("0", spec),), ["0"], (("out", spec),), {"leaf": "out"}, 128, 0, 128, 32)
    return TargetFacts(
        target_id=target.id,
        precision="fp32",
        atol=None,
        rtol=None,
        languages=("cpp",),
        min_speedup=min_speedup,
        allow=("kernel",),
        mode="eval",
        grad=False,
        dynamic=False,
        strides="drawn",
        distributions="all",
        index_outputs=(),
        nondeterministic=False,
        module=None,
        workloads=(workload,),
    )


def make_candidate(text: str = "a", parent: str | None = None) -> Candidate:
    return Candidate.of("cpp", {"kernel.cpp": f"// {text}\n", "plan.py": "def plan(x):\n    return x\n"}, parent)


def make_timing(speedup: float, compiled: float | None = None, roofline_ns: float | None = None) -> Timing:
    eager = Sample(1000.0, 990.0, 1010.0, 30, 5)
    candidate = Sample(1000.0 / speedup, 0.99e3 / speedup, 1.01e3 / speedup, 30, 5)
    ratio = Ratio(speedup, speedup * 0.98, speedup * 1.02)
    workload = WorkloadTiming(
        "default",
        candidate,
        eager,
        None if compiled is None else eager,
        ratio,
        None if compiled is None else Ratio(compiled, compiled * 0.98, compiled * 1.02),
        launches=1,
        roofline_ns=roofline_ns,
    )
    best = speedup if compiled is None else min(speedup, compiled)
    decision = "faster" if best > 1.02 else ("slower" if best < 0.98 else "same")
    return Timing(decision, "supervisor", speedup, compiled, (workload,))


def make_evaluation(
    candidate: Candidate,
    status: Status = Status.PASSED,
    speedup: float = 2.0,
    *,
    compiled: float | None = None,
    roofline_ns: float | None = None,
    target: str = "layers.py::scale",
) -> Evaluation:
    passed = status is Status.PASSED
    mismatch = Mismatch("out", "values", "rows 0-3 differ", 120.0, 16.0, (0, 3), 1.5, 2.5, "every row")
    case = CaseResult("default", "drawn", True, passed, 0.9 if passed else 120.0, 16.0, () if passed else (mismatch,))
    return Evaluation(
        status=status,
        reason="" if passed else f"{status.value} for the test",
        candidate=candidate.digest,
        target=target,
        isolation=Isolation("B", ("user namespace", "seccomp")),
        work="kernel",
        build=Build("cpu", 0.4, False, "" if passed else "kernel.cpp:1: error: no"),
        verification=None if status is Status.BUILD_ERROR else Verification((case,), "fp64", case.error_ratio),
        timing=make_timing(speedup, compiled, roofline_ns) if passed else None,
        seconds=1.2,
        environment=(("torch", "2.13.0"),),
    )


def make_round(
    number: int,
    kind: str = "first",
    parent: int | None = None,
    status: Status | None = Status.PASSED,
    speedup: float = 2.0,
    *,
    text: str | None = None,
    duplicate_of: int | None = None,
    roofline_ns: float | None = None,
) -> Round:
    """``status`` None: a round whose replies held no candidate."""
    if status is None:
        return Round(number, kind, parent, None, None, failure="no code in the reply")  # type: ignore[arg-type]
    candidate = make_candidate(text or f"round {number}")
    verdict = make_evaluation(candidate, status, speedup, roofline_ns=roofline_ns)
    return Round(number, kind, parent, candidate, verdict, duplicate_of=duplicate_of)  # type: ignore[arg-type]
