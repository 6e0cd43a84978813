"""What g++ says of loops, reduced to a line each: from real compiles."""

from __future__ import annotations

import pytest

from pytest_cudaforge.languages import Unit, load
from pytest_cudaforge.languages.cpp import places
from pytest_cudaforge.languages.remarks import LoopRemark, loop_remarks, remark_of

SOURCE = """\
#include <cmath>
static inline float raised(float x) {
  return x * x + 1.0f;
}
void plain(const float* x, float* y, long n) {
  for (long i = 0; i < n; ++i)
    y[i] = raised(x[i]);
}
void calls(const float* x, float* y, long n) {
  for (long i = 0; i < n; ++i)
    y[i] = std::exp(x[i]);
}
void chain(float* y, long n) {
  for (long i = 1; i < n; ++i)
    y[i] += 0.5f * y[i - 1];
}
void by_columns(const float* x, float* y, long rows, long cols) {
  #pragma omp parallel for
  for (long c = 0; c < cols; ++c)
    for (long r = 0; r < rows; ++r)
      y[r * cols + c] = x[r * cols + c] * 2.0f;
}
"""
NAMES = ("plain", "calls", "chain", "by_columns")


@pytest.fixture(scope="module")
def remarks() -> dict[int, LoopRemark]:
    log = load("cpp").compile(SOURCE, Unit((), NAMES), "cpu", lineinfo=True).log
    found = [remark_of(line) for line in log.splitlines()]
    assert None not in found, log
    return {remark.line: remark for remark in found if remark is not None}


def test_a_vectorized_loop_is_told_with_its_width(remarks: dict[int, LoopRemark]) -> None:
    assert remarks[6].vector_bytes >= 16


def test_a_call_that_prevents_vectors_is_named(remarks: dict[int, LoopRemark]) -> None:
    assert remarks[10].vector_bytes == 0 and "calls expf" in remarks[10].reason


def test_a_loop_that_needs_its_own_last_result_is_not_vectorized(remarks: dict[int, LoopRemark]) -> None:
    assert remarks[14].vector_bytes == 0


def test_the_reason_goes_to_the_innermost_loop(remarks: dict[int, LoopRemark]) -> None:
    # Compilers differ in whether they vectorize it by single elements; who does not says what hinders him.
    inner = remarks[20]
    assert inner.vector_bytes or "strided" in inner.reason


def test_an_optimized_build_says_nothing_of_its_loops() -> None:
    assert load("cpp").compile(SOURCE, Unit((), NAMES), "cpu").log == ""


LOG = """\
kernel.cpp:34:22: missed: couldn't vectorize loop
kernel.cpp:34:22: missed: not vectorized: multiple nested loops.
kernel.cpp:35:24: missed: couldn't vectorize loop
kernel.cpp:38:32: missed: not vectorized: not suitable for strided load _12 = *_11;
kernel.cpp:37:26: missed: couldn't vectorize loop
kernel.cpp:38:32: missed: not vectorized: no vectype for stmt: _12 = *_11;
 scalar_type: const float
/usr/include/c++/12/cmath:223:26: missed: statement clobbers memory: _32 = __builtin_expf (_25);
kernel.cpp:9:6: missed: statement clobbers memory: __builtin_GOMP_parallel (f, &.omp_data_o.2, 0, 0);
kernel.cpp:50:24: optimized: loop vectorized using 64 byte vectors
kernel.cpp:50:24: optimized:  loop versioned for vectorization because of possible aliasing
kernel.cpp:50:24: optimized: loop vectorized using 32 byte vectors
kernel.cpp:60:11: optimized: basic block part vectorized using 64 byte vectors
other.h:3:1: missed: couldn't vectorize loop
"""


def test_a_nest_is_told_by_its_inner_loop_and_noise_is_left_out() -> None:
    assert loop_remarks(LOG, "kernel.cpp") == (
        LoopRemark("kernel.cpp", 37, 0, "not suitable for strided load", 38),
        LoopRemark("kernel.cpp", 50, 64),
    )


@pytest.mark.parametrize("remark", loop_remarks(LOG, "kernel.cpp"))
def test_a_remark_comes_back_from_its_text(remark: LoopRemark) -> None:
    assert remark_of(str(remark)) == remark


def test_instructions_are_led_back_to_their_lines_through_inlining() -> None:
    binary = load("cpp").compile(SOURCE, Unit((), NAMES), "cpu", lineinfo=True)
    found = [place for place in places(binary.code, range(0x1000, min(len(binary.code), 0x1800))) if place.instruction]
    assert {place.line for place in found} >= {3, 11, 15}
    assert any(place.line == 3 and place.outer_line in (6, 7) for place in found)


def test_lines_of_what_is_no_binary_are_unknown() -> None:
    (place,) = places(b"no shared object", [64])
    assert place.line is None and place.instruction == ""
