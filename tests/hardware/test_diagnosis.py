"""Which bound a kernel's metrics show."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_cudaforge.hardware import diagnosis
from pytest_cudaforge.hardware.diagnosis import diagnose, telling_metrics
from pytest_cudaforge.records import HotLine, Profile, ProfiledKernel

STALL = "smsp__warp_issue_stalled_{}_per_warp_active.pct"
LOADED, STORED = (f"l1tex__t_sectors_pipe_lsu_mem_global_op_{way}.sum" for way in ("ld", "st"))
BUSY = {diagnosis.DURATION: 50_000.0, diagnosis.GRID: 4096.0, diagnosis.SM_COUNT: 132.0}


def _profile(metrics: dict[str, float], facts: dict[str, float], lines: tuple[HotLine, ...] = ()) -> Profile:
    kernel = ProfiledKernel(
        "k", True, 1, metrics.get(diagnosis.DURATION), metrics=tuple((n, v, "") for n, v in metrics.items())
    )
    figures = tuple((name, value, "") for name, value in facts.items())
    return Profile("ncu", "full", "digest", "main", (kernel,), lines=lines, facts=figures)


@pytest.mark.parametrize(
    ("metrics", "bound", "first"),
    [
        ({diagnosis.GRID: 4.0}, "tiny grid", diagnosis.GRID),
        ({diagnosis.DURATION: 2000.0}, "launch overhead", diagnosis.DURATION),
        ({diagnosis.SPILLED: 64.0, diagnosis.LOCAL_SHARE: 60.0, diagnosis.L2: 70.0}, "register spills",
         diagnosis.SPILLED),
        ({diagnosis.SPILLED: 64.0}, "register spills", diagnosis.SPILLED),
        ({diagnosis.CONFLICTS: 80.0, STALL.format("mio_throttle"): 50.0}, "shared memory bank conflicts",
         diagnosis.CONFLICTS),
        ({diagnosis.EXCESS: 87.0, diagnosis.DRAM: 80.0}, "uncoalesced access", diagnosis.EXCESS),
        ({diagnosis.EXCESS: 78.0, diagnosis.L2: 83.0, diagnosis.DRAM: 10.0}, "uncoalesced access", diagnosis.EXCESS),
        ({diagnosis.EXCESS: 87.0, STALL.format("long_scoreboard"): 80.0}, "uncoalesced access", diagnosis.EXCESS),
        ({diagnosis.SM: 85.0, diagnosis.DRAM: 20.0}, "compute", diagnosis.SM),
        ({diagnosis.SM: 30.0, diagnosis.DRAM: 91.0}, "memory bandwidth", diagnosis.DRAM),
        ({diagnosis.L2: 75.0, diagnosis.DRAM: 20.0}, "cache bandwidth", diagnosis.L2),
        # Patterns that are bad where they occur, and occur too seldom to bound anything.
        ({diagnosis.SPILLED: 4.0, diagnosis.LOCAL_SHARE: 0.1, diagnosis.DRAM: 90.0}, "memory bandwidth",
         diagnosis.DRAM),
        ({diagnosis.SPILLED: 400.0, diagnosis.LOCAL_SHARE: 60.0, diagnosis.L1: 20.0, diagnosis.SM: 90.0}, "compute",
         diagnosis.SM),
        ({diagnosis.EXCESS: 0.1, diagnosis.STORES: 32.0, diagnosis.DRAM: 86.0}, "memory bandwidth", diagnosis.DRAM),
        ({diagnosis.EXCESS: 80.0, diagnosis.L1: 15.0, diagnosis.SM: 88.0}, "compute", diagnosis.SM),
        ({diagnosis.CONFLICTS: 3.0, STALL.format("mio_throttle"): 50.0, diagnosis.DRAM: 80.0}, "memory bandwidth",
         diagnosis.DRAM),
        ({diagnosis.DRAM: 8.0, diagnosis.REDUNDANCY: 4.0, diagnosis.SM: 3.0, STALL.format("barrier"): 60.0},
         "synchronization", STALL.format("barrier")),
        ({diagnosis.OCCUPANCY: 12.0, diagnosis.THEORETICAL: 12.5, diagnosis.SM: 85.0}, "compute", diagnosis.SM),
        ({diagnosis.DRAM: 88.0, diagnosis.REDUNDANCY: 3.0}, "redundant global traffic", diagnosis.REDUNDANCY),
        ({diagnosis.OCCUPANCY: 12.0, diagnosis.THEORETICAL: 12.5}, "occupancy", diagnosis.OCCUPANCY),
        # More than one wave: resources keep warps away. One at most: the grid does, whatever the registers are.
        ({diagnosis.OCCUPANCY: 12.0, diagnosis.THEORETICAL: 12.5, diagnosis.WAVES: 1.5}, "occupancy",
         diagnosis.OCCUPANCY),
        ({diagnosis.OCCUPANCY: 6.2, diagnosis.THEORETICAL: 12.5, diagnosis.WAVES: 0.485, diagnosis.SM: 60.1,
          diagnosis.L1: 61.5}, "small grid", diagnosis.WAVES),
        ({diagnosis.OCCUPANCY: 12.2, diagnosis.THEORETICAL: 12.5, diagnosis.WAVES: 0.97, diagnosis.SM: 74.9,
          diagnosis.L1: 67.8, diagnosis.FMA: 68.7}, "compute", diagnosis.SM),
        # A kernel of the tensor cores with few warps, which wait for them: more warps would wait longer.
        ({diagnosis.OCCUPANCY: 22.3, diagnosis.THEORETICAL: 25.0, diagnosis.SM: 46.7, diagnosis.TENSOR: 31.0,
          STALL.format("math_pipe_throttle"): 26.3, STALL.format("wait"): 17.3, STALL.format("selected"): 40.0},
         "math pipe", STALL.format("math_pipe_throttle")),
        # Beside another kernel a small one finds its input in the L2: what the profiler's emptied caches cost is none.
        ({diagnosis.DRAM: 45.0, diagnosis.IN_CALL_DRAM: 3.0, diagnosis.IN_CALL_BYTES: 2e7, diagnosis.REDUNDANCY: 4.0,
          diagnosis.MOVED: 5e7, diagnosis.L2: 78.0}, "cache bandwidth", diagnosis.L2),
        ({diagnosis.DRAM: 45.0, diagnosis.IN_CALL_DRAM: 80.0, diagnosis.IN_CALL_BYTES: 3e7, diagnosis.REDUNDANCY: 4.0,
          diagnosis.MOVED: 5e7}, "redundant global traffic", diagnosis.REDUNDANCY),
        (
            {STALL.format("long_scoreboard"): 70.0, STALL.format("selected"): 90.0},
            "memory latency",
            STALL.format("long_scoreboard"),
        ),
        ({STALL.format("barrier"): 70.0}, "synchronization", STALL.format("barrier")),
        ({STALL.format("wait"): 70.0}, "instruction latency", STALL.format("wait")),
        ({}, "unknown", diagnosis.DURATION),
    ],
)  # fmt: skip
def test_the_bound_and_the_figure_that_shows_it(metrics: dict[str, float], bound: str, first: str) -> None:
    profile = _profile({**BUSY, **metrics}, {"minimal_bytes": 1e6})
    (found,) = diagnose(profile)
    assert (found.bound, found.figures[0][0], found.share) == (bound, first, 1.0)
    stored = {*profile.kernels[0].metrics, *profile.facts}
    assert set(found.figures) <= stored
    assert not any(char.isdigit() for char in found.explanation)


def test_the_line_that_shows_the_bound_comes_first() -> None:
    lines = (
        HotLine("k", "kernel.cu", 3, "a", 0.7, (("stall_wait", 70.0, "sample"),)),
        HotLine("k", "kernel.cu", 9, "b", 0.3, (("L2 Theoretical Sectors Global Excessive", 4096.0, "sector"),)),
        HotLine("other", "kernel.cu", 20, "c", 1.0),
    )
    (found,) = diagnose(_profile({**BUSY, diagnosis.EXCESS: 87.0, diagnosis.DRAM: 80.0}, {}, lines))
    assert [line.line for line in found.lines] == [9, 3]


def test_a_library_that_takes_the_time_has_a_bound_too() -> None:
    counted = ((diagnosis.SM, 75.0, "%"),)
    library, short = ProfiledKernel("gemm", False, 1, 80.0, metrics=counted), ProfiledKernel("copy", False, 1, 5.0)
    own = ProfiledKernel("k", True, 1, 15.0)
    found = diagnose(Profile("ncu", "quick", "digest", "main", (short, own, library)))
    assert [(one.kernel, one.own, one.bound, one.share) for one in found] == [
        ("gemm", False, "compute", 0.8),
        ("k", True, "unknown", 0.15),
    ]


def test_what_a_kernel_alone_reads_may_be_in_the_l2_inside_its_call() -> None:
    """Where it was looked at alone only: from empty caches a small kernel's input comes from memory."""
    busy = {diagnosis.DRAM: 45.0, diagnosis.L2: 78.0, diagnosis.REDUNDANCY: 4.0, diagnosis.MOVED: 5e7}
    profile = _profile({**BUSY, **busy, diagnosis.READ: 2e7}, {"l2_bytes": 6e7})
    assert diagnose(profile)[0].bound == "redundant global traffic", "alone is what it is: the only kernel"
    beside = replace(profile, kernels=(*profile.kernels, replace(profile.kernels[0], function="other")))
    assert {found.bound for found in diagnose(beside)} == {"cache bandwidth"}
    large = replace(beside, facts=(("l2_bytes", 1e7, "byte"),))
    assert {found.bound for found in diagnose(large)} == {"redundant global traffic"}


def test_the_resource_that_fits_fewest_blocks_is_named() -> None:
    limits = {f"launch__occupancy_limit_{name}": fits for name, fits in (("registers", 5.0), ("shared_mem", 2.0))}
    few = {diagnosis.OCCUPANCY: 12.0, diagnosis.THEORETICAL: 12.5, **limits}
    (found,) = diagnose(_profile({**BUSY, **few}, {}))
    assert found.figures[-1] == ("launch__occupancy_limit_shared_mem", 2.0, "")


def test_a_few_instructions_in_the_tensor_pipe_are_no_tensor_code() -> None:
    def told(**metrics: float) -> set[str]:
        names = {"issued": diagnosis.TENSOR_ISSUED, "cycles": diagnosis.TENSOR}
        kernel = ProfiledKernel("k", True, 1, 1.0, metrics=tuple((names[n], v, "%") for n, v in metrics.items()))
        return {name for name, _, _ in telling_metrics(kernel)}

    assert told(issued=0.85, cycles=0.2) == set()
    assert told(issued=14.6) == {diagnosis.TENSOR_ISSUED}
    assert told(issued=14.6, cycles=31.0) == {diagnosis.TENSOR}
