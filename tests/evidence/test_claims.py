"""What a Judge claims: which numbers are figures, which of them stand in the evidence, and what is a place."""

from __future__ import annotations

import pytest

from pytest_cudaforge.claims import functions, names_a_place, unfounded
from pytest_cudaforge.records import Candidate

EVIDENCE = """- default: now 71.9 us (70 us to 73.2 us), eager 412 us, bound 62.4 us (reached to 87%); 1 launch
- `greedy` (own): 100 %, 69.3 us, 1 launch, grid 2048, block 320
dram__throughput.avg.pct_of_peak_sustained_elapsed 84.4 %; launch__registers_per_thread 36 register/thread
moves at least 262 MB; memory 4.2 TB/s, 132 SMs, 1980 MHz; stall_long_scoreboard 1200 sample
measured 0.97x of round 2"""
CODE = """constexpr int BATCH = 5;  // 20 exponentials each
template <int N> __device__ float merge(const float (&x)[N], float (*f)(float)) {
  return x[0];
}
extern "C" __global__ void __launch_bounds__(640)
    greedy(const float4* __restrict__ in, float* out) {
  for (int i = threadIdx.x; i < 17408; i += 320) { if (i > 3) { out[i] = merge(in); } }
}
"""
PLAN = 'def plan(x):\n    y = empty(x.shape, x.dtype)\n    launch("greedy<4>", args=(x, y))\n    return y\n'
CANDIDATE = Candidate.of("cuda", {"kernel.cu": CODE, "plan.py": PLAN})


@pytest.mark.parametrize(
    "claim",
    [
        "71.9 us against 62.4 us (87 %)",
        "about 72 us, that is 0.072 ms or 71900 ns",
        "13 % short of the bound, 1.15x it",
        "DRAM at 84 % of its peak, 36 registers a thread",
        "2048 blocks of 320 threads on 132 SMs at 1.98 GHz",
        "0.262 GB move at least, 250 MiB",
        "262 MB / 71.9 us = 3.64 TB/s",
        "262 MB in 71.9 us is 3.64 TB/s of 4.2 TB/s (87 %)",
        "71.9 us for 262 MB is 3.64 TB/s",
        "71.9 us for 262 MB, 3.64 TB/s",
        "now 71.9 us against a bound of 62.4 us, 1.15x",
        "71.9 us against 412 us eager \u2192 5.73x",
        "71.9 us of the 412 us that eager takes, or 17.5 %",
        "3 % slower than round 2, as in rounds 11 and 12",
        # What the code says may be said again, without a unit.
        "17408 elements, launch bounds of 640",
        # Names, kinds and common knowledge are no observations.
        "float4 loads of 16 bytes... no: 16-byte loads, 128-bit, a 32-way conflict in sm_90's L2",
        "a warp's 32 lanes touch 32 B sectors and 128 B lines in kernel.cu:6 (kernel.cu, line 612)",
        "the code is within 5 % of the bound",
        "two passes, 2 loops, 4 loads, 8 blocks",
        "two bytes an element; one B tile, two passes; 64-bit, 16B-aligned",
        "eighty-four percent of DRAM, seventy-two microseconds; 17'408 or 17_408 elements",
        "no figure at all",
    ],
)
def test_figures_that_stand(claim: str) -> None:
    assert unfounded([claim], EVIDENCE, CODE) == ()


@pytest.mark.parametrize(
    ("claim", "missing"),
    [
        ("occupancy is 23.5 %", ("23.5 %",)),
        ("now 71.9 us, at 91 % of peak", ("91 %",)),
        ("3.64 TB/s", ("3.64 TB/s",)),  # true, but without its working
        ("262 MB / 71.9 us = 5.1 TB/s", ("5.1 TB/s",)),
        ("71.9 us against a bound of 62.4 us, 1.4x", ("1.4x",)),
        ("71.9 us and 412 us. Then 5.73x", ("5.73x",)),
        ("400 MB / 71.9 us = 5.56 TB/s", ("400 MB", "5.56 TB/s")),
        ("40 registers, 1024 threads", ("40", "1024")),
        ("17408 us are lost in 640 MB", ("17408 us", "640 MB")),  # numbers of the code are no times
        ("stalled for 1300 samples", ("1300",)),
        ("12 us and again 12 us", ("12 us",)),
        # An amount is one however it is written.
        ("ninety-two percent of peak", ("ninety-two percent",)),
        ("Forty-five microseconds", ("Forty-five microseconds",)),
        ("two hundred and five thousand bytes", ("two hundred and five thousand bytes",)),
        ("1_234_567 bytes and 1'234'567 bytes", ("1_234_567 bytes", "1'234'567 bytes")),
        ("1 million cycles, 9 trillion bytes", ("1 million", "9 trillion")),
        ("92%-of-peak, 93-percent, a 45-us tail", ("92%", "93", "45")),
        ("in round 92 % of it, from line 45 us on, within 45 %", ("92 %", "45 us", "45 %")),
        ("8 % of peak", ("8 %",)),  # where 87 % is known, 13 % are left, not 8
        ("a gain of 1.7x", ("1.7x",)),
    ],
)
def test_figures_that_do_not(claim: str, missing: tuple[str, ...]) -> None:
    assert unfounded([claim], EVIDENCE, CODE) == missing


def test_functions_are_found_where_they_are_defined_or_launched() -> None:
    assert functions(CANDIDATE) == {"merge", "greedy", "plan"}
    module = Candidate.of("module", {"model.py": "class ModelNew(nn.Module):\n    def forward(self, x): ..."})
    assert functions(module) == {"ModelNew", "forward"}


@pytest.mark.parametrize(
    ("place", "plan"),
    [
        ("greedy", ""),
        ("the loop of `greedy` over batches", ""),
        ("kernel.cu:5", ""),
        ("kernel.cu, lines 5 to 7", ""),
        ("plan", "fewer buffers"),
        ("plan.py: launch of greedy", ""),
        ("", "In greedy, load twice."),
        ("", "give plan.py's launch 640 threads"),
        ("nowhere", "split merge() in two"),
        ("", "Halve what `merge` reads."),
    ],
)
def test_places_that_the_code_has(place: str, plan: str) -> None:
    assert names_a_place(place, plan, CANDIDATE)


@pytest.mark.parametrize(
    ("place", "plan"),
    [
        ("", ""),
        ("the kernel", "make the plan better and run it"),
        ("kernel.cu:512", "softmax_kernel, all of it"),
        ("kernel.cpp:3", ""),
        ("", "plan.py could be shorter"),
        ("", "Merge the loops and plan the greedy way."),
        ("for", "if"),
    ],
)
def test_places_that_it_has_not(place: str, plan: str) -> None:
    assert not names_a_place(place, plan, CANDIDATE)


def test_hostile_text_takes_no_time() -> None:
    import time

    start = time.process_time()  # this process's own: others may be busy
    for text in ("a(" * 20_000, "f" * 50_000 + "(", "1," * 20_000, "1 x " * 10_000, "rounds 1, " * 5_000, "(" * 50_000):
        unfounded([text[:3000]], text, text)
        functions(Candidate.of("cuda", {"kernel.cu": text}))
        names_a_place(text[:200], text[:3000], CANDIDATE)
    assert time.process_time() - start < 5
