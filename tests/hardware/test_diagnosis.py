"""Which bound a kernel's metrics show."""

from __future__ import annotations

import pytest

from pytest_cudaforge.hardware import diagnosis
from pytest_cudaforge.hardware.diagnosis import diagnose
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


def test_kernels_of_a_library_are_not_the_candidates_to_mend() -> None:
    library = ProfiledKernel("gemm", False, 1, 30.0)
    own = ProfiledKernel("k", True, 1, 10.0)
    (found,) = diagnose(Profile("ncu", "quick", "digest", "main", (library, own)))
    assert (found.kernel, found.share) == ("k", 0.25)
