"""Traces for the tests of reports: a run with everything, profiles of every rung, and text that attacks its reader."""

from __future__ import annotations

from dataclasses import replace

from flow_records import make_candidate, make_round

from pytest_cudaforge.records import (
    Baseline,
    DeviceFacts,
    Feedback,
    HotLine,
    Profile,
    ProfiledKernel,
    Round,
    RuleFinding,
    Sample,
    Status,
    Trace,
    Usage,
)

#: Markup of HTML, SVG and Markdown, a terminal's escapes, and characters that turn text around or hide in it.
HOSTILE = (
    "<script>alert(1)</script> \"onload='x' `tick` ``` | cell | **x** [a](http://b) ![i](http://evil/i.png) @octocat "
    "</svg></style></title><img src=http://evil/x onerror=alert(1)> ]]> <!-- --> \x1b[31mred\x1b]0;title\x07 "
    "\u202egnihton\u202c zero\u200bwidth \ud800 \ufffe &lt;b&gt; #12\n# heading\n- item"
)
DEVICE = DeviceFacts(
    "cpu", "Test CPU", "cpu", sm_count=2, bandwidth_bytes_per_s=50e9, peak_flops=(("fp32", 3e11), ("fp64", 1.5e11))
)
LINE = HotLine("scale", "kernel.cpp", 7, "y[i] = x[i] * w[i]; // | `a` <b>", 0.61, (("stall_long_scoreboard", 40, ""),))


def make_profile(candidate: str = "c", factor: float = 1.0, **rest: object) -> Profile:
    """An own kernel and one of a library; ``factor`` scales every time and metric."""
    metrics = (
        ("dram__throughput.avg.pct_of_peak_sustained_elapsed", 80.0, "%"),
        ("sm__throughput.avg.pct_of_peak_sustained_elapsed", 20.0 * factor, "%"),
    )
    kernels = (
        ProfiledKernel("scale", True, 1, 7500.0 * factor, (128, 1, 1), (256, 1, 1), metrics),
        ProfiledKernel("void gemm<float>(float const*)", False, 2, 2500.0, (4, 2, 1), (128,)),
    )
    profile = Profile(
        "ncu", "full", candidate, "default", kernels, (RuleFinding("scale", "Uncoalesced", "spread over", 31.0),),
        (LINE,), (("minimal_bytes", 4096.0, "byte"),), ("kernel.cpp:7: note: loop vectorized",), ("quick set only",),
    )  # fmt: skip
    return replace(profile, **rest)  # type: ignore[arg-type]


def profiled(entry: Round, factor: float = 1.0) -> Round:
    assert entry.evaluation is not None
    profile = make_profile(entry.evaluation.candidate, factor)
    return replace(entry, evaluation=replace(entry.evaluation, profile=profile))


def rich_trace(name: str = "layers.py::Scale", said: str = "memory waits") -> Trace:
    """A failure, two passes with profiles, a reply without code, and a winner; everything a page can show."""
    feedback = Feedback("optimization", said, said, said, (said,), "kernel.cpp:7", 1.5, (said,))
    timed = [make_round(2, "correction", 1, speedup=0.8, roofline_ns=200.0, text="a")]
    timed.append(make_round(3, "optimization", 2, speedup=2.0, roofline_ns=200.0, text="b"))
    rounds = (
        make_round(1, status=Status.BUILD_ERROR),
        profiled(timed[0]),
        replace(profiled(timed[1], 0.5), feedback=feedback),
        replace(make_round(4, "optimization", 3, status=None), failure=said),
    )
    sample = Sample(1000.0, 990.0, 1010.0, 30, 5)
    return Trace(
        name, "cpp", "forged", said, rounds, 3, rounds[2].evaluation, Usage(10, 20, 0, 0.5), 12.0, ("f/k.cpp",),
        (said,), (Baseline("default", sample, None, "no compiler", 200.0, 10_000, 4_000),), DEVICE,
    )  # fmt: skip


def hostile_trace() -> Trace:
    """Every text that a model, a candidate or a tool has a say in is :data:`HOSTILE`."""
    trace = rich_trace(said=HOSTILE)
    # Unpaired surrogates are replaced when a reply is stored, before a candidate is read from it.
    source = HOSTILE.replace("\ud800", "")
    candidate = replace(make_candidate(), files=(("kernel.cpp", source), ("plan.py", source)))
    profile = make_profile(
        kernels=(ProfiledKernel(HOSTILE, True, 1, 10.0, metrics=((HOSTILE, 1.0, HOSTILE),)),),
        rules=(RuleFinding(HOSTILE, HOSTILE, HOSTILE, 3.0),),
        lines=(replace(LINE, kernel=HOSTILE, file=HOSTILE, source=HOSTILE),),
        remarks=(HOSTILE,),
        notes=(HOSTILE,),
        workload=HOSTILE,
    )
    failed, *rest = trace.rounds
    assert failed.evaluation is not None and failed.evaluation.build is not None
    build = replace(failed.evaluation.build, log=HOSTILE)
    failed = replace(failed, candidate=candidate, evaluation=replace(failed.evaluation, reason=HOSTILE, build=build))
    attacked = []
    for entry in rest:
        verdict = entry.evaluation and replace(entry.evaluation, profile=profile, environment=((HOSTILE, HOSTILE),))
        attacked.append(replace(entry, candidate=candidate, evaluation=verdict, notes=(HOSTILE,)))
    final = trace.final and replace(trace.final, profile=profile, device=HOSTILE)
    return replace(trace, rounds=(failed, *attacked), final=final, notes=(HOSTILE,), target="layers.py::Scale")
