"""Kernels that are right for the calls that anybody expects: other sizes, strides, addresses and threads show them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from judged_targets import find
from switches import tries, without_checks

from pytest_cudaforge.evaluation import cases, probes, variants
from pytest_cudaforge.evaluation.evaluator import Evaluator, EvaluatorSettings
from pytest_cudaforge.evaluation.oracle import OracleClient
from pytest_cudaforge.plan import TensorSpec
from pytest_cudaforge.records import Candidate, Evaluation, Guard, Status

TARGETS = """
import torch
from torch import nn
from pytest_cudaforge import forge_target

@forge_target(inputs=lambda: [torch.randn(20, 257)], dynamic=True)
def largest(x):
    return x.amax(-1)

@forge_target(inputs=lambda: [torch.randn(20, 257)])
def largest_drawn(x):
    return x.amax(-1)

@forge_target(inputs=lambda: [torch.randn(20, 64)], strides="any")
def largest_anywhere(x):
    return x.amax(-1)

@forge_target(inputs=lambda: [torch.randn(3, 5, 6, 7)], strides="any")
def planes_anywhere(x):
    return x.amax(3)

@forge_target(inputs=lambda: [torch.randn(3, 5, 6, 7)])
def planes_drawn(x):
    return x.amax(3)

@forge_target(inputs=lambda: [torch.randn(2, 3, 32, 32)], dynamic=True)
def brightest(x):
    return x.amax((2, 3))

@forge_target(inputs=lambda: [torch.randint(0, 256, (250, 256), dtype=torch.uint8)], dynamic=True)
def levels(x):
    found = x.flatten().long()
    return torch.zeros(256, dtype=torch.int64).scatter_add_(0, found, torch.ones_like(found))

@forge_target(inputs=lambda: [torch.randn(2, 1500), torch.randn(2, 1600)], dynamic=True)
def stretched(x, y):
    return y + x[:, torch.arange(y.shape[1]) * x.shape[1] // y.shape[1]]

@forge_target(inputs=lambda: [torch.randn(24, 16), torch.randn(24, 16)], dynamic=True)
def weigh(q, k):
    return (q @ k.transpose(0, 1)).sum(-1, keepdim=True)

@forge_target(inputs=lambda: [torch.randn(24, 16), torch.randn(24, 16)])
def weigh_drawn(q, k):
    return (q @ k.transpose(0, 1)).sum(-1, keepdim=True)

@forge_target(inputs=lambda: [torch.randn(6, 20)], dynamic=True)
def on_a_grid(x):
    return torch.nn.functional.adaptive_max_pool1d(x.unsqueeze(0), 7)[0]

@forge_target(inputs=lambda: [torch.randn(20, 64)], init=lambda: [64])
class Weighted(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return (x * self.weight).amax(-1)

@forge_target(inputs=lambda: [torch.randn(20, 64)], init=lambda: [64], strides="any")
class WeightedAnywhere(Weighted): ...
"""
PLAN = """
from pytest_cudaforge.plan import empty, launch

def plan(MODULEx):
    y = empty(x.shape[:1], x.dtype)
    launch("kernel", args=(x, WEIGHTy, x.shape[0], x.shape[1], x.stride(0), x.stride(1)))
    return y
"""
REFUSING = 'def plan(MODULEx):\n    assert x.shape[1] <= 512, "rows of 512 at most"'
KERNEL = """
#include <cmath>
#include <cstdint>
#include <omp.h>
void kernel(const float* x, WEIGHTfloat* y, long long rows, long long cols, long long down, long long right) {
  BEFORE
  for (long long r = FIRST; r < LAST; ++r) {
    float m = -INFINITY;
    for (long long c = 0; c < cols; ++c) m = std::fmax(m, x[r * down + AT]TIMES);
    y[r] = m;
  }
}
"""
SHARED = "#pragma omp parallel\n{ long long here = omp_get_thread_num(), all = THREADS;"


def _candidate(
    before: str = "", at: str = "c * right", weighted: bool = False, plan: str = PLAN, threads: str = ""
) -> Candidate:
    source = KERNEL.replace("BEFORE", f"{before}\n{SHARED}".replace("THREADS", threads) if threads else before)
    if threads:
        source = source.replace("FIRST", "rows * here / all").replace("LAST", "rows * (here + 1) / all") + "}\n"
    else:
        source = source.replace("FIRST", "0").replace("LAST", "rows")
    source = source.replace("AT", at).replace("WEIGHT", "const float* w, " if weighted else "")
    source = source.replace("TIMES", " * w[c]" if weighted else "")
    text = plan.replace("MODULE", "module, " if weighted else "").replace(
        "WEIGHT", "module.weight, " if weighted else ""
    )
    return Candidate.of("cpp", {"kernel.cpp": source, "plan.py": text})


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repo")
    (root / "layers.py").write_text(TARGETS)
    return root


@pytest.fixture(scope="module")
def evaluator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Evaluator]:
    cache = tmp_path_factory.mktemp("cache")
    with Evaluator(EvaluatorSettings(cache_dir=cache, lock_dir=cache, times=False)) as opened:
        yield opened


Judged = Callable[[str, Candidate], Evaluation]


@pytest.fixture
def judged(evaluator: Evaluator, repo: Path) -> Judged:
    return lambda name, candidate: evaluator.evaluate(candidate, find(repo, f"::{name}"), timing=False)


def _guard(evaluation: Evaluation) -> Guard:
    assert evaluation.status is Status.PASSED, evaluation.reason
    assert evaluation.verification is not None
    return evaluation.verification.guard


def _sizes(evaluation: Evaluation) -> tuple[int, ...]:
    """Those that a call must have to be dispatched to."""
    guard = _guard(evaluation)
    assert not guard.drawn_shapes_only
    return guard.fixed_sizes


def _only(monkeypatch: pytest.MonkeyPatch, wanted: Callable[[str], bool]) -> None:
    """Of the variants, those whose names are ``wanted``, and none next to a number that a kernel names."""
    original = OracleClient.variants
    monkeypatch.setattr(OracleClient, "variants_near", lambda *_: ())
    monkeypatch.setattr(
        OracleClient, "variants", lambda *given: tuple(each for each in original(*given) if wanted(each[0]))
    )


def _near(name: str) -> bool:
    sizes = [int(size) for size in re.findall(r"\d+", name)]
    return not name.startswith(("size", "tall", "mixed")) or max(sizes[1::2]) < sizes[0] + 100


SMALL = _candidate("if (cols > 512) return;")
HONEST = _candidate()


def test_rows_of_a_known_length_only(judged: Judged, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = judged("largest", SMALL)
    assert refused.status is Status.REJECTED and "size 257 -> " in refused.reason
    assert _sizes(judged("largest_drawn", SMALL)) == (257,)
    assert not _sizes(judged("largest_drawn", HONEST))
    _only(monkeypatch, _near)
    assert not _sizes(judged("largest", SMALL))
    assert not _sizes(judged("largest_drawn", SMALL))


def test_a_tail_that_is_wrong_for_one_remainder(judged: Judged, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_LEFT_S", 30.0)  # on busy cores not all would have their turn
    tail = _candidate("if ((cols & 31) * 3 % 32 == 1) return;")  # eleven are left
    # Another size may leave as many by chance.
    _only(monkeypatch, lambda name: name.startswith("left") or "11" not in _remainders(name))
    refused = judged("largest", tail)
    assert refused.status is Status.REJECTED and ": left " in refused.reason, refused.reason
    assert not _sizes(judged("largest", HONEST))
    _only(monkeypatch, lambda name: "11" not in _remainders(name))
    assert not _sizes(judged("largest", tail))


def _remainders(name: str) -> list[str]:
    return [str(int(new) % 32) for new in re.findall(r"-> (\d+)", name)]


def test_other_constants_than_those_of_the_drawn_calls(judged: Judged) -> None:
    """Of these production would build what nobody tried; larger sizes have the drawn ones, and are right."""
    wrong = KERNEL.replace("BEFORE", "if (NARROW) return;").replace("FIRST", "0").replace("LAST", "rows")
    source = wrong.replace("AT", "c * right").replace("WEIGHT", "").replace("TIMES", "")
    narrow = PLAN.replace("MODULE", "").replace("WEIGHT", "").replace("x.stride(1))", "x.stride(1)), CONSTANTS")
    for constants, sizes in (
        ('{"NARROW": int(x.shape[1] < 257)}', (257,)),
        ('{"NARROW": int(x.shape[0] < 20)}', (20,)),
        ('{"NARROW": 0}', ()),
    ):
        plan = narrow.replace("CONSTANTS", f"constants={constants}")
        judgement = judged("largest_drawn", Candidate.of("cpp", {"kernel.cpp": source, "plan.py": plan}))
        assert _sizes(judgement) == sizes


def test_a_plan_that_says_what_it_cannot_do_passes(judged: Judged) -> None:
    plan = PLAN.replace("def plan(MODULEx):", REFUSING)
    for name in ("largest", "largest_drawn"):
        assert not _sizes(judged(name, _candidate("if (cols > 512) return;", plan=plan)))


def test_strides_of_known_patterns_only(judged: Judged, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = _candidate("if (right != 1 && down != 1) return;")
    refused = judged("largest_anywhere", packed)
    assert refused.status is Status.REJECTED and "strided step" in refused.reason
    assert not _guard(judged("largest_anywhere", HONEST)).contiguous_only
    _only(monkeypatch, lambda name: name == "strided")
    assert not _guard(judged("largest_anywhere", packed)).contiguous_only


PLANES_PLAN = """
from pytest_cudaforge.plan import empty, launch

def plan(x):
    y = empty(x.shape[:3], x.dtype)
    down, right = x.stride(2), x.stride(3)
    if WHEN:  # channels_last
        down, right = x.shape[3] * x.shape[1], x.shape[1]
    launch("kernel", args=(x, y, *x.shape, x.stride(0), x.stride(1), down, right))
    return y
"""
PLANES = """
#include <cmath>
void kernel(const float* x, float* y, long long n, long long channels, long long h, long long w,
            long long by_sample, long long by_channel, long long down, long long right) {
  for (long long s = 0; s < n; ++s)
    for (long long c = 0; c < channels; ++c)
      for (long long i = 0; i < h; ++i) {
        float m = -INFINITY;
        for (long long j = 0; j < w; ++j) m = std::fmax(m, x[s * by_sample + c * by_channel + i * down + j * right]);
        y[(s * channels + c) * h + i] = m;
      }
}
"""


def test_strides_of_a_memory_format_that_one_of_them_promises(judged: Judged, monkeypatch: pytest.MonkeyPatch) -> None:
    dense = "x.stride(1) == 1 and right == x.shape[1] and down == right * x.shape[3]"
    wrong, honest = (
        Candidate.of("cpp", {"kernel.cpp": PLANES, "plan.py": PLANES_PLAN.replace("WHEN", when)})
        for when in ("x.stride(1) == 1", dense)
    )
    refused = judged("planes_anywhere", wrong)
    assert refused.status is Status.REJECTED and "second innermost" in refused.reason
    assert _guard(judged("planes_drawn", wrong)).contiguous_only
    for name in ("planes_anywhere", "planes_drawn"):
        assert not _guard(judged(name, honest)).contiguous_only
    _only(monkeypatch, lambda name: not name.startswith("strided order"))
    for name in ("planes_anywhere", "planes_drawn"):
        assert not _guard(judged(name, wrong)).contiguous_only


@pytest.mark.parametrize(
    "dense",
    [
        "x.stride(1) == 1 and right == x.shape[1] and down == right * x.shape[3]",
        "right == 1 and down == x.shape[3] and x.stride(1) == down * x.shape[2]",
    ],
    ids=["channels last", "contiguous"],
)
def test_strides_of_all_but_the_outermost_dimension(
    judged: Judged, monkeypatch: pytest.MonkeyPatch, dense: str
) -> None:
    plan = PLANES_PLAN.replace("    if WHEN:", "    by_sample = BY if WHEN else x.stride(0)\n    if False:")
    plan = plan.replace("x.stride(0), x.stride(1)", "by_sample, x.stride(1)").replace("WHEN", dense)
    wrong, honest = (
        Candidate.of("cpp", {"kernel.cpp": PLANES, "plan.py": plan.replace("BY", by)})
        for by in ("x.numel() // x.shape[0]", "x.stride(0)")
    )
    refused, narrowed = judged("planes_anywhere", wrong), _guard(judged("planes_drawn", wrong))
    assert refused.status is Status.REJECTED and "any strides: strided " in refused.reason, refused.reason
    assert narrowed.contiguous_only and "strided outer" in str(narrowed.reasons)
    for name in ("planes_anywhere", "planes_drawn"):
        assert not _guard(judged(name, honest)).contiguous_only
    # Rows of zero stride, or windows that overlap, lie behind one another otherwise as well.
    _only(monkeypatch, lambda name: not name.startswith(("strided outer", "strided expanded", "strided overlapping")))
    for name in ("planes_anywhere", "planes_drawn"):
        assert not _guard(judged(name, wrong)).contiguous_only


def test_wider_loads_than_its_tensors_are_aligned_to(judged: Judged, monkeypatch: pytest.MonkeyPatch) -> None:
    aligned = _candidate("if ((uintptr_t)x % 32) return;")
    assert _guard(judged("largest_drawn", aligned)).align_bytes == 32
    assert _guard(judged("largest_drawn", HONEST)).align_bytes == 1
    monkeypatch.setattr(probes, "_ALIGNMENTS", (1,))
    monkeypatch.setitem(probes._CONTRACT_ALIGNMENT, "cpu", 16)
    assert _guard(judged("largest_drawn", aligned)).align_bytes == 16


def test_wider_loads_where_any_part_of_a_tensor_is_promised(judged: Judged, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice begins at any element: a guard that asks for alignment would leave what is promised to the reference."""
    aligned = _candidate("if ((uintptr_t)x % 16) return;")
    refused = judged("largest_anywhere", aligned)
    assert refused.status is Status.REJECTED and "any strides: misaligned inputs" in refused.reason
    assert _guard(judged("largest_anywhere", HONEST)).align_bytes == 1
    monkeypatch.setattr(probes.Prober, "_require_any_address", lambda *_: None)
    assert _guard(judged("largest_anywhere", aligned)).align_bytes == 16


def test_weights_need_not_lie_anywhere_for_that(judged: Judged) -> None:
    """They are whole tensors: what asks for their alignment keeps its guard."""
    aligned = _candidate("if ((uintptr_t)w % 16) return;", weighted=True)
    assert _guard(judged("WeightedAnywhere", aligned)).align_bytes == 16


def test_whole_vectors_that_end_behind_a_tensor(judged: Judged, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is aligned to as much as they are wide none of them crosses a page."""
    whole = _candidate("if (down == cols) { volatile float last = x[(rows * cols - 1) / 16 * 16 + 15]; (void)last; }")
    assert _guard(judged("largest_drawn", whole)).align_bytes == 64
    original = probes.Prober._problem

    def without_pages(self: probes.Prober, *given: Any, **how: Any) -> str:
        return "" if given[2].endswith("at the end of a page") else original(self, *given, **how)

    monkeypatch.setattr(probes.Prober, "_problem", without_pages)
    assert _guard(judged("largest_drawn", whole)).align_bytes == 1


def test_wider_loads_than_its_weights_are_aligned_to(judged: Judged, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight may be a view into a flat parameter."""
    aligned = _candidate("if ((uintptr_t)w % 16) return;", weighted=True)
    assert _guard(judged("Weighted", aligned)).align_bytes == 16
    assert _guard(judged("Weighted", _candidate(weighted=True))).align_bytes == 1
    original = cases.skews_of

    def inputs_only(specs: Mapping[str, TensorSpec], aligned_to: int) -> dict[str, int]:
        found = original(specs, aligned_to)
        return {name: 0 if name.startswith("state/") else skew for name, skew in found.items()}

    monkeypatch.setattr(cases, "skews_of", inputs_only)
    assert _guard(judged("Weighted", aligned)).align_bytes == 1


def test_an_input_that_is_aligned_says_nothing_about_the_weight(
    judged: Judged, monkeypatch: pytest.MonkeyPatch
) -> None:
    fooled = _candidate("if ((uintptr_t)x % 16 == 0 && (uintptr_t)w % 16) return;", weighted=True)
    assert _guard(judged("Weighted", fooled)).align_bytes == 16
    original = probes.Prober._problem

    def first_frame(self: probes.Prober, *given: Any, **how: Any) -> str:
        return original(self, *given, **{**how, "frames": 1})

    monkeypatch.setattr(probes.Prober, "_problem", first_frame)
    assert _guard(judged("Weighted", fooled)).align_bytes == 1


def test_as_many_threads_as_there_were_cores(judged: Judged, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = _candidate(threads="omp_get_num_procs()")
    refused = judged("largest", counted)
    assert refused.status is Status.INCORRECT_NUMERICAL and "OpenMP threads: 1" in refused.reason
    assert judged("largest", _candidate(threads="omp_get_num_threads()")).status is Status.PASSED
    without_checks(monkeypatch, "thread counts")
    monkeypatch.setattr(probes, "_TEAM", os.cpu_count())
    assert judged("largest", counted).status is Status.PASSED


def test_more_threads_than_it_has_room_for(judged: Judged) -> None:
    """Right with one thread, and with as many as there are cores."""
    roomy = "long long most = 2 * omp_get_num_procs(); if (omp_get_max_threads() > most) return;"
    refused = judged("largest", _candidate(roomy, threads="omp_get_num_threads()"))
    assert refused.status is Status.INCORRECT_NUMERICAL and "OpenMP threads: " in refused.reason


def test_a_buffer_for_rows_of_any_vocabulary_but_the_longest(judged: Judged, monkeypatch: pytest.MonkeyPatch) -> None:
    short = _candidate("if (cols > 131072 || rows > 131072) return;")
    refused = judged("largest", short)
    assert refused.status is Status.REJECTED and "tall" in refused.reason, refused.reason
    assert judged("largest", HONEST).status is Status.PASSED
    _only(monkeypatch, lambda name: not name.startswith("tall"))
    assert judged("largest", short).status is Status.PASSED


def test_a_row_that_memory_has_once(judged: Judged, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stride of zero taken for one that nobody gave."""
    taken = _candidate("if (down == 0 && rows > 1) return;")
    refused = judged("largest_anywhere", taken)
    assert refused.status is Status.REJECTED and "strided expanded" in refused.reason, refused.reason
    assert judged("largest_anywhere", HONEST).status is Status.PASSED
    _only(monkeypatch, lambda name: name != "strided expanded")
    assert judged("largest_anywhere", taken).status is Status.PASSED


def test_rows_that_share_memory(judged: Judged, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of a signal begin within the one before."""
    taken = _candidate("if (right == 1 && down > 0 && down < cols) down = cols;")
    refused = judged("largest_anywhere", taken)
    assert refused.status is Status.REJECTED and "strided overlapping" in refused.reason, refused.reason
    _only(monkeypatch, lambda name: not name.startswith("strided overlapping"))
    assert judged("largest_anywhere", taken).status is Status.PASSED


def test_one_row_alone(judged: Judged, monkeypatch: pytest.MonkeyPatch) -> None:
    several = _candidate("if (rows == 1) return;")
    refused = judged("largest", several)
    assert refused.status is Status.REJECTED and re.search(r"-> 1\b", refused.reason), refused.reason
    guard = _guard(judged("largest_drawn", several))
    assert guard.drawn_shapes_only or guard.fixed_sizes == (20,)  # all tiny at once may be one, too
    _only(monkeypatch, lambda name: not re.search(r"-> 1\b", name))
    assert judged("largest", several).status is Status.PASSED


def test_thousands_of_rows(judged: Judged, monkeypatch: pytest.MonkeyPatch) -> None:
    between = _candidate("if (rows > 1400 && rows < 65000 && cols >= 16) return;")
    refused = judged("largest", between)
    assert refused.status is Status.REJECTED and re.search(r"(tall|size) 20 -> ", refused.reason), refused.reason
    many = r"(tall|mixed|size|left) .*\b20 -> (\d+)"  # by chance others have so many as well
    rows = lambda name: int(found[2]) if (found := re.match(many, name)) else 0  # noqa: E731
    _only(monkeypatch, lambda name: not 1400 < rows(name) < 65_000)
    assert judged("largest", between).status is Status.PASSED


def test_values_of_other_kinds_at_promised_sizes(judged: Judged, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong where most values are far off, at sizes that were not drawn alone."""
    near = _candidate("if (cols != 257 && std::fabs(x[0]) + std::fabs(x[right]) + std::fabs(x[2 * right]) > 8) return;")
    found = [judged("largest", near) for _ in range(2)]
    refused = next(one for one in found if one.status is not Status.PASSED)
    assert refused.status is Status.REJECTED and "->" in refused.reason, refused.reason
    monkeypatch.setattr(probes, "_OF_ANY_SIZE", ())
    monkeypatch.setattr(probes, "_TELLING", ())
    assert judged("largest", near).status is Status.PASSED


def test_the_end_of_rows_that_are_longer_than_drawn(
    judged: Judged, evaluator: Evaluator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a long row the last element is hardly ever the largest: where ends lie far out it is."""
    short, twin = _candidate("if (cols > 257) --cols;"), _candidate("if (cols < 0) --cols;")
    _only(monkeypatch, lambda name: name.startswith("size 257 -> ") and int(name.split()[-1]) > 257)
    refused = judged("largest", short)
    assert refused.status is Status.REJECTED and "size 257 -> " in refused.reason, refused.reason
    assert judged("largest", twin).status is Status.PASSED
    monkeypatch.setattr(probes, "_TELLING", "")
    monkeypatch.setattr(probes, "_OF_ANY_SIZE", ("uniform",))
    for _ in tries(evaluator):  # now and then it is the largest by chance
        off = judged("largest", short)
        if off.status is Status.PASSED:
            break
    assert off.status is Status.PASSED, off.reason


WEIGH_PLAN = """
from pytest_cudaforge.plan import empty, launch

def plan(q, k):
    ASSERTy = empty((q.shape[0], 1), q.dtype)
    launch("kernel", args=(q, k, y, q.shape[0], KEYS, q.shape[1]))
    return y
"""
WEIGH = """
void kernel(const float* q, const float* k, float* y, long long queries, long long keys, long long dim) {
  for (long long r = 0; r < queries; ++r) {
    double sum = 0;
    for (long long s = 0; s < keys; ++s)
      for (long long c = 0; c < dim; ++c) sum += (double)q[r * dim + c] * k[s * dim + c];
    y[r] = (float)sum;
  }
}
"""


LARGEST = """
void kernel(const float* x, float* y, long long rows, long long cols) {
  const long long most = MOST;
  for (long long r = 0; r < rows; ++r) {
    y[r] = x[r * cols];
    for (long long c = 1; c < most; ++c) y[r] = x[r * cols + c] > y[r] ? x[r * cols + c] : y[r];
  }
}
"""
LARGEST_PLAN = """
from pytest_cudaforge.plan import empty, launch

def plan(x):
    y = empty(x.shape[:1], x.dtype)
    launch("kernel", args=(x, y, x.shape[0], x.shape[1]))
    return y
"""


@pytest.mark.parametrize("tier", ["cols > 7000 && cols < 7100", "cols > (7 << 10) && cols < 0x1c40"])
def test_a_tier_of_sizes_between_those_that_are_drawn_blindly(
    judged: Judged, monkeypatch: pytest.MonkeyPatch, tier: str
) -> None:
    """Half of a row is left out where it has some thousands of elements: the numbers say so themselves."""
    attack, twin = (
        Candidate.of("cpp", {"kernel.cpp": LARGEST.replace("MOST", most), "plan.py": LARGEST_PLAN})
        for most in (f"{tier} ? cols / 2 : cols", f"{tier} ? cols - 1 + rows / rows : cols")
    )
    found = judged("largest", attack)
    assert found.status is Status.REJECTED and "dynamic shapes: size 257 -> 7" in found.reason, found.reason
    assert _guard(judged("largest", twin)).fixed_sizes == ()
    monkeypatch.setattr(OracleClient, "variants_near", lambda *_: ())
    assert judged("largest", attack).status is Status.PASSED


BRIGHTEST_PLAN = """
from pytest_cudaforge.plan import empty, launch

def plan(x):
    y = empty(x.shape[:2], x.dtype)
    launch("kernel", args=(x, y, x.shape[0] * x.shape[1], x.shape[2] * x.shape[3]))
    return y
"""


def test_pictures_that_are_large_in_both_directions(judged: Judged, monkeypatch: pytest.MonkeyPatch) -> None:
    """More pictures, or one that is long, have no more elements than a number counts; a megapixel does."""
    attack, twin = (
        Candidate.of("cpp", {"kernel.cpp": LARGEST.replace("MOST", most), "plan.py": BRIGHTEST_PLAN})
        for most in ("rows == 3 && cols > 65000 ? cols / 2 : cols", "cols")
    )
    found = judged("brightest", attack)
    assert found.status is Status.REJECTED and "dynamic shapes: tall 2 -> 1, 32 -> " in found.reason, found.reason
    assert judged("brightest", twin).status is Status.PASSED
    _only(monkeypatch, lambda name: not name.startswith("tall 2 -> 1, 32 -> "))
    off = judged("brightest", attack)
    assert off.status is Status.PASSED, off.reason


COUNTED = """
#include <cstdint>
extern "C" void kernel(const unsigned char* x, long long* counts, long long pixels) {
  std::uint16_t some[256] = {};
  for (int level = 0; level < 256; ++level) counts[level] = 0;
  for (long long at = 0; at < pixels; ++at) {
    ++some[x[at]];
    if (at % (MOST) == (MOST) - 1 || at == pixels - 1)
      for (int level = 0; level < 256; ++level) counts[level] += some[level], some[level] = 0;
  }
}
"""
COUNTED_PLAN = """
from pytest_cudaforge.plan import Unsupported, empty, launch

def plan(x):
    if not x.is_contiguous():
        raise Unsupported("dense pictures")
    counts = empty((256,), "int64")
    launch("kernel", args=(x, counts, x.numel()))
    return counts
"""


def test_large_pictures_are_plain_ones_too(judged: Judged, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many numbers of one level no drawn picture has, however large it is."""
    attack, twin = (
        Candidate.of("cpp", {"kernel.cpp": COUNTED.replace("MOST", most), "plan.py": COUNTED_PLAN})
        for most in ("1 << 22", "65535")
    )
    found = judged("levels", attack)
    assert found.status is Status.REJECTED and "dynamic shapes: " in found.reason, found.reason
    assert judged("levels", twin).status is Status.PASSED
    monkeypatch.setattr(probes, "_TELLING", ())
    off = judged("levels", attack)
    assert off.status is Status.PASSED, off.reason


STRETCHED = """
#include <cstdint>
extern "C" void kernel(const float* x, const float* y, float* z, long long rows, long long have, long long want) {
  for (long long r = 0; r < rows; ++r)
    for (long long c = 0; c < want; ++c)
      z[r * want + c] = y[r * want + c] + x[r * have + (PLACE)(c * have) / (PLACE)want];
}
"""
STRETCHED_PLAN = """
from pytest_cudaforge.plan import Unsupported, empty, launch

def plan(x, y):
    if x.shape[0] != y.shape[0]:
        raise Unsupported("as many rows of each")
    z = empty(y.shape, y.dtype)
    launch("kernel", args=(x, y, z, x.shape[0], x.shape[1], y.shape[1]))
    return z
"""


def test_two_lengths_of_which_a_product_has_more_than_32_bits(judged: Judged, monkeypatch: pytest.MonkeyPatch) -> None:
    attack, twin = (
        Candidate.of("cpp", {"kernel.cpp": STRETCHED.replace("PLACE", place), "plan.py": STRETCHED_PLAN})
        for place in ("std::uint32_t", "long long")
    )
    found = judged("stretched", attack)
    assert found.status is Status.REJECTED and "1600 -> " in found.reason, found.reason
    assert judged("stretched", twin).status is Status.PASSED
    _only(monkeypatch, lambda name: min(map(int, re.findall(r"-> (\d+)", name)), default=0) < 65_536)
    off = judged("stretched", attack)
    assert off.status is Status.PASSED, off.reason


GRID = """
#include <cmath>
extern "C" void kernel(const float* x, float* y, long long rows, long long cols) {
  for (long long r = 0; r < rows; ++r)
    for (long long i = 0; i < 7; ++i) {
      const long long begin = i * cols / 7, end = BEHIND;
      float found = -INFINITY;
      for (long long c = begin; c < (end < cols ? end : cols); ++c)
        if (x[r * cols + c] > found || x[r * cols + c] != x[r * cols + c]) found = x[r * cols + c];
      y[r * 7 + i] = found;
    }
}
"""


def _on_a_grid(behind: str) -> Candidate:
    plan = LARGEST_PLAN.replace("x.shape[:1]", "(x.shape[0], 7)")
    return Candidate.of("cpp", {"kernel.cpp": GRID.replace("BEHIND", behind), "plan.py": plan})


_EXACT = "((i + 1) * cols + 6) / 7"


def test_a_grid_is_right_at_all_sizes(judged: Judged) -> None:
    """The twin of the next two."""
    assert judged("on_a_grid", _on_a_grid(_EXACT)).status is Status.PASSED


def test_a_quotient_that_is_whole(judged: Judged, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reciprocal in single precision gives one element too many to parts of a row that seven goes into."""
    attack = _on_a_grid(f"cols % 28 ? {_EXACT} : (long long)std::ceil((float)((i + 1) * cols) * (1.0f / 7.0f))")
    found = judged("on_a_grid", attack)
    assert found.status is Status.REJECTED and "dynamic shapes: " in found.reason, found.reason
    # A size that is drawn is a multiple now and then.
    _only(monkeypatch, lambda name: all(int(new) % 28 for new in re.findall(r"-> (\d+)", name)))
    off = judged("on_a_grid", attack)
    assert off.status is Status.PASSED, off.reason


def test_a_size_that_people_choose(judged: Judged, monkeypatch: pytest.MonkeyPatch) -> None:
    """One element too many where a size is some hundreds and a half, which the source does not say by itself."""
    attack = _on_a_grid(f"{_EXACT} + (cols * cols % 22500 == 0)")
    found = judged("on_a_grid", attack)
    size = re.search(r"size \d+ -> (\d+)", found.reason)
    assert found.status is Status.REJECTED and size and int(size[1]) in variants._DECIMAL, found.reason
    _only(monkeypatch, lambda name: all(int(new) % 150 for new in re.findall(r"-> (\d+)", name)))
    off = judged("on_a_grid", attack)
    assert off.status is Status.PASSED, off.reason


def _weigh(keys: str, refuses: str = "") -> Candidate:
    return Candidate.of(
        "cpp", {"kernel.cpp": WEIGH, "plan.py": WEIGH_PLAN.replace("KEYS", keys).replace("ASSERT", refuses)}
    )


@pytest.mark.parametrize("name", ["weigh", "weigh_drawn"])
def test_as_many_keys_as_queries(judged: Judged, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Where there are fewer it reads behind the last one: dispatch leaves such calls to the reference, unless any size
    is promised."""
    found = judged(name, _weigh("q.shape[0]"))
    if name == "weigh":
        assert found.status is Status.REJECTED and "dynamic shapes: apart 24 -> " in found.reason, found.reason
    else:
        assert _guard(found).equal_sizes_only and not _guard(found).drawn_shapes_only
        assert any(reason.startswith("apart 24 -> ") for reason in _guard(found).reasons)
    assert not _guard(judged(name, _weigh("k.shape[0]"))).equal_sizes_only
    # Constants are compiled anew for sizes that are promised, and tried.
    built = WEIGH.replace("long long keys, ", "").replace(
        "void kernel", "constexpr long long keys = KEYS;\nvoid kernel"
    )
    special = WEIGH_PLAN.replace("KEYS, ", "").replace("q.shape[1]))", 'q.shape[1]), constants={"KEYS": k.shape[0]})')
    fixed = Candidate.of("cpp", {"kernel.cpp": built, "plan.py": special.replace("ASSERT", "")})
    assert judged(name, fixed).status is Status.PASSED, judged(name, fixed).reason
    refusing = _weigh("q.shape[0]", 'assert q.shape[0] == k.shape[0], "as many keys as queries"\n    ')
    assert not _guard(judged(name, refusing)).equal_sizes_only
    _only(monkeypatch, lambda name: not name.startswith("apart"))
    assert not _guard(judged(name, _weigh("q.shape[0]"))).equal_sizes_only
