"""The tolerance rule: honest kernels pass on every distribution, wrong ones fail on at least one."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from pytest_cudaforge.evaluation.correctness import TOLERANCES, Judgement, Rule, judge_indices, judge_output
from pytest_cudaforge.evaluation.expectation import SUM_NOISE
from pytest_cudaforge.evaluation.precision import Fp64Mode
from pytest_cudaforge.evaluation.redraw import FAMILIES, redraw
from pytest_cudaforge.evaluation.usual import judged_by_usual_errors

K = 4096


def _inputs(family: str, shape: tuple[int, ...] = (64, K), dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    drawn = torch.empty(shape, dtype=torch.float32).normal_(generator=generator).to(dtype)
    return redraw(family, drawn, "generic", generator)


def _serial_sum(x: Tensor) -> Tensor:
    total = torch.zeros(x.shape[0], dtype=x.dtype)
    for column in range(x.shape[1]):
        total = total + x[:, column]
    return total


def _pairwise_sum(x: Tensor) -> Tensor:
    while x.shape[1] > 1:
        x = x[:, ::2] + x[:, 1::2]
    return x[:, 0]


def _lanes_sum(x: Tensor) -> Tensor:
    """How an OpenMP simd reduction over 16 lanes and 2 threads sums."""
    lanes = torch.zeros(x.shape[0], 2, 16, dtype=x.dtype)
    for part in x.reshape(x.shape[0], 2, -1, 16).unbind(2):
        lanes = lanes + part
    return lanes.sum((1, 2))


HONEST_SUMS = {"serial": _serial_sum, "pairwise": _pairwise_sum, "lanes": _lanes_sum}


def _judge(candidate: Tensor, reference: Tensor, oracle: Tensor, reduction: int = K) -> Judgement:
    return judge_output("out", candidate, reference, oracle, Rule(reduction=reduction))


def _rms_norm(x: Tensor, total: Callable[[Tensor], Tensor]) -> Tensor:
    return x * torch.rsqrt(total(x * x)[:, None] / x.shape[1] + 1e-6)


def _layer_norm(x: Tensor, total: Callable[[Tensor], Tensor]) -> Tensor:
    mean = total(x)[:, None] / x.shape[1]
    centered = x - mean
    return centered * torch.rsqrt(total(centered * centered)[:, None] / x.shape[1] + 1e-5)


def _softmax(x: Tensor, total: Callable[[Tensor], Tensor]) -> Tensor:
    exponent = torch.exp(x - x.amax(1, keepdim=True))
    return exponent / total(exponent)[:, None]


def _row_sum(x: Tensor, total: Callable[[Tensor], Tensor]) -> Tensor:
    return total(x)


HONEST = {"rms_norm": _rms_norm, "layer_norm": _layer_norm, "softmax": _softmax, "row_sum": _row_sum}


#: Drawn where references carry something along, or are homogeneous.
PARTICULAR = ("below", "above", "tiny", "unbiased")


def _reference(task: str, x: Tensor) -> Tensor:
    if task == "rms_norm":
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    if task == "layer_norm":
        return torch.nn.functional.layer_norm(x, x.shape[-1:])
    return torch.softmax(x, -1) if task == "softmax" else x.sum(-1)


@pytest.mark.parametrize(
    "family", [name for name in FAMILIES if name not in (*PARTICULAR, "ties", "ordered", "parted")]
)
@pytest.mark.parametrize("summing", HONEST_SUMS)
@pytest.mark.parametrize("task", HONEST)
def test_honest_reductions_pass(task: str, summing: str, family: str) -> None:
    x = _inputs(family)
    judgement = _judge(HONEST[task](x, HONEST_SUMS[summing]), _reference(task, x), _reference(task, x.double()))
    assert not judgement.mismatches, judgement


@pytest.mark.parametrize("family", ["normal", "uniform", "large"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_honest_half_precision_outputs_pass(dtype: torch.dtype, family: str) -> None:
    x = _inputs(family, dtype=dtype)
    candidate = _rms_norm(x.float(), _serial_sum).to(dtype)
    judgement = _judge(candidate, _reference("rms_norm", x.float()).to(dtype), _reference("rms_norm", x.double()))
    assert not judgement.mismatches, judgement


def test_fast_exponential_of_a_gpu_passes() -> None:
    x = _inputs("normal")
    noisy = torch.sigmoid(x) * (1 + 2.0**-22 * torch.randn_like(x))  # about two ulp, as __expf leaves
    oracle = torch.sigmoid(x.double())
    assert not _judge(noisy, torch.sigmoid(x), oracle, 1).mismatches


def test_exponentials_may_be_cut_off_where_denormals_begin() -> None:
    x = _inputs("normal") - 95
    oracle, reference = (torch.sigmoid(of) * 1e8 for of in (x.double(), x))
    assert not _judge(torch.sigmoid(x.clamp(min=-87)) * 1e8, reference, oracle, 1).mismatches
    assert _judge(torch.sigmoid(x.clamp(min=-60)) * 1e8, reference, oracle, 1).mismatches


def test_denormals_may_be_taken_for_zero_but_not_in_half_types() -> None:
    x = _inputs("normal").abs() + 9.3
    oracle = torch.exp(-x.double().square())
    reference = torch.exp(-x.square())
    flushed = torch.where(reference.abs() < 2.0**-126, 0.0, reference)
    assert float(flushed.abs().max()) < 1e-37 and bool((flushed != reference).any())
    assert not _judge(flushed, reference, oracle, 1).mismatches
    assert not _judge(flushed[:, :40] * 0, reference[:, :40], oracle[:, :40].clamp(max=1e-38), 1).mismatches
    assert _judge(flushed * 1e30, reference * 1e30, oracle * 1e30, 1).mismatches
    half = (reference * 2.0**110).half()
    lost = torch.where(half.abs() < 2.0**-14, 0.0, half.float()).half()
    assert float(half.max()) > 0 and _judge(lost, half, oracle * 2.0**110, 1).mismatches


def _gelu_in_steps(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))


def _truncated(x: Tensor, dtype: torch.dtype) -> Tensor:
    near = x.to(dtype)
    return torch.where(near.float().abs() > x.abs(), torch.nextafter(near, torch.zeros_like(near)), near)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in PARTICULAR])
def test_half_pointwise_kernels_that_round_at_the_end_or_at_each_step_pass(family: str, dtype: torch.dtype) -> None:
    x = _inputs(family, (16, K), dtype)
    reference, oracle = torch.nn.functional.gelu(x), torch.nn.functional.gelu(x.double())
    for candidate in (_gelu_in_steps(x.float()).to(dtype), _gelu_in_steps(x)):
        assert not _judge(candidate, reference, oracle, 1).mismatches


# -- wrong kernels -------------------------------------------------------------------------------------------------


def _fails_somewhere(make: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]], reduction: int = K) -> list[str]:
    found = []
    for family in FAMILIES:
        candidate, reference, oracle = make(_inputs(family))
        if _judge(candidate, reference, oracle, reduction).mismatches:
            found.append(family)
    return found


def test_one_percent_of_k_dropped_fails_everywhere() -> None:
    def make(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        kept = x.clone()
        kept[:, : K // 100] = 0
        return kept.sum(-1), x.sum(-1), x.double().sum(-1)

    # Nothing of zeros can be left out.
    assert _fails_somewhere(make) == [family for family in FAMILIES if family != "empty"]


def test_tanh_gelu_for_gelu_fails_on_drawn_values() -> None:
    gelu = torch.nn.functional.gelu

    def make(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return gelu(x, approximate="tanh"), gelu(x), gelu(x.double())

    assert {"normal", "uniform", "integer"} <= set(_fails_somewhere(make, 1))


def test_one_pass_variance_fails_on_shifted_inputs() -> None:
    def make(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean = x.mean(-1, keepdim=True)
        variance = (x * x).mean(-1, keepdim=True) - mean * mean
        norm = (x - mean) * torch.rsqrt(variance.clamp_min(0) + 1e-5)
        return norm, _reference("layer_norm", x), _reference("layer_norm", x.double())

    assert "shifted" in _fails_somewhere(make)


def test_softmax_without_max_fails_on_large_inputs() -> None:
    def make(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x.exp() / x.exp().sum(-1, keepdim=True), torch.softmax(x, -1), torch.softmax(x.double(), -1)

    assert "large" in _fails_somewhere(make)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_accumulation_fails(dtype: torch.dtype) -> None:
    x = _inputs("normal")
    accumulated = _serial_sum(x.to(dtype)).float()
    assert _judge(accumulated, x.sum(-1), x.double().sum(-1)).mismatches


def _tf32(x: Tensor) -> Tensor:
    return (x.view(torch.int32) + 0x1000 & ~0x1FFF).view(torch.float32)


@pytest.mark.parametrize("family", ["normal", "uniform", "shifted", "integer", "sparse"])
def test_tf32_product_under_fp32_fails(family: str) -> None:
    a, b = _inputs(family, (128, 1024)), _inputs("normal", (1024, 128))
    judgement = _judge(_tf32(a) @ _tf32(b), a @ b, a.double() @ b.double(), 1024)
    assert judgement.mismatches
    assert not _judge((a.flip(1)) @ (b.flip(0)), a @ b, a.double() @ b.double(), 1024).mismatches


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_pointwise_kernels_of_another_formula_or_rounding_fail(dtype: torch.dtype) -> None:
    x = _inputs("normal", (16, K), dtype)
    gelu = torch.nn.functional.gelu
    wide = x.float()
    wrong = {
        "sigmoid": (wide * torch.sigmoid(1.702 * wide)).to(dtype),
        "truncated": _truncated(gelu(wide), dtype),
    }
    if dtype == torch.float16:
        wrong["bf16 inside"] = gelu(x.bfloat16().float()).to(dtype)
    passed = [name for name, c in wrong.items() if not _judge(c, gelu(x), gelu(x.double()), 1).mismatches]
    assert passed == []


def test_a_value_beyond_the_dtypes_range_in_the_oracle_does_not_widen_the_bound() -> None:
    x = _inputs("normal", (8, 64))
    low = torch.finfo(torch.float32).min
    reference, oracle = x.masked_fill(x > 1, low), x.double().masked_fill(x > 1, torch.finfo(torch.float64).min)
    assert not _judge(reference.clone(), reference, oracle, 1).mismatches
    assert _judge(reference * 0.9, reference, oracle, 1).mismatches


def test_zeros_fail() -> None:
    x = _inputs("normal")
    assert _judge(torch.zeros_like(x), x * 1e-3, x.double() * 1e-3, 1).mismatches


def test_half_output_with_one_percent_missing_is_caught_by_its_bias() -> None:
    x = _inputs("uniform", (2048, 1024)).abs().to(torch.bfloat16)
    total = x.double().sum(-1)
    reference = total.to(torch.bfloat16)
    judgement = _judge((total * 0.99).to(torch.bfloat16), reference, total)
    assert [m.kind for m in judgement.mismatches] == ["bias"]


def test_errors_of_sums_with_addends_alike_may_lie_on_one_side() -> None:
    """Merged means of rows at 450 and at -450, of each of 512 channels: the share 1/3 is rounded in all of them."""
    torch.manual_seed(0)
    oracle = torch.randn(512, 1, dtype=torch.float64) * 0.01
    reference = oracle + 8e-8 * torch.randn(512, 1, dtype=torch.float64)
    candidate = oracle + 1.2e-6 + 1e-6 * torch.randn(512, 1, dtype=torch.float64)
    one_sided = judge_output("out", candidate.float(), reference.float(), oracle, Rule(16384))
    assert [m.kind for m in one_sided.mismatches] == ["bias"]
    assert not judge_output("out", candidate.float(), reference.float(), oracle, Rule(16384, alike=True)).mismatches


def test_sums_into_one_row_may_share_the_errors_of_their_terms() -> None:
    """A gain's gradient: each channel's sum runs over all rows, and a row's rounded mean is in all of them."""
    torch.manual_seed(0)
    oracle = torch.randn(512, dtype=torch.float64)
    shared, own = 5e-6, 2e-6 * torch.randn(512, dtype=torch.float64)
    reference = oracle + 1e-6 * torch.randn(512, dtype=torch.float64)
    assert not judge_output("out", (oracle + shared + own).float(), reference.float(), oracle, Rule(8192)).mismatches
    assert judge_output("out", (oracle + 50 * shared).float(), reference.float(), oracle, Rule(8192)).mismatches


def test_destroyed_last_row_is_named() -> None:
    x = _inputs("normal")
    broken = x.clone()
    broken[-1] = 0
    judgement = _judge(broken, x, x.double(), 1)
    assert judgement.mismatches[0].pattern == "only row 63 (the last); all elements there"


def test_destroyed_small_row_cannot_hide_beside_large_ones() -> None:
    x = _inputs("normal")
    x[:32] *= 100.0
    reference = x * (1 + 1e-6 * torch.randn_like(x))  # a reference with errors of its own
    broken = reference.clone()
    broken[40] = reference[41]
    judgement = _judge(broken, reference, x.double(), 1)
    assert judgement.mismatches


def test_a_row_that_the_reference_has_destroyed_itself_says_nothing() -> None:
    torch.manual_seed(0)
    oracle = 100 * torch.randn(64, 4096, dtype=torch.float64)
    oracle[40] *= 2e-3
    reference = oracle + torch.randn_like(oracle)
    candidate = reference.clone()
    candidate[40] = oracle[40] + 45 * torch.randn(4096, dtype=torch.float64)

    def destroyed(off: float) -> bool:
        reference[40] = oracle[40] + off * torch.randn(4096, dtype=torch.float64)
        found = judge_output("out", candidate.float(), reference.float(), oracle, Rule(1)).mismatches
        return any("is destroyed" in mismatch.detail for mismatch in found)

    assert destroyed(1e-3) and not destroyed(0.04)


def test_what_is_shaky_in_small_rows_of_several_sizes_is_judged_by_what_it_usually_is_off_by() -> None:
    torch.manual_seed(0)
    oracle = 0.1 * torch.randn(320, 32, dtype=torch.float64)
    oracle[:100] *= 1e2
    oracle[300:] *= 1e6
    reference = oracle * (1 + 1e-7 * torch.randn_like(oracle))
    reference[300:] += 0.1 * torch.randn(20, 32, dtype=torch.float64)  # beside which the errors of others are nothing
    candidate = reference.clone()
    usual = torch.zeros_like(oracle)
    for row, off in ((150, 0.5), (20, 2.0)):
        candidate[row] += off
        usual[row] = off

    def judge(found: Tensor, rule: Rule) -> Judgement:
        return judge_output("out", found, reference.float(), oracle, rule)

    def judged(errors: Tensor) -> Judgement:
        known = SimpleNamespace(of_each=lambda path: errors, overall=lambda path: 0.0)
        first = judge(candidate.float(), Rule(1))
        return judged_by_usual_errors(first, "out", candidate.float(), oracle, Rule(1), lambda: known, judge)

    first = judge(candidate.float(), Rule(1))
    assert first.small is not None and first.mismatches
    assert not judged(usual).mismatches
    usual[20] = 0.0  # who is off where the reference is never
    assert judged(usual).mismatches


def test_unwritten_tail_is_located() -> None:
    x = _inputs("normal")
    broken = x.clone()
    broken[:, 4000:] = float("nan")
    mismatch = _judge(broken, x, x.double(), 1).mismatches[0]
    assert mismatch.kind == "nonfinite"
    assert "columns from 4000 to the end" in mismatch.pattern


# -- large values beside smaller ones ----------------------------------------------------------------------------------


def _beside(front: Tensor, *versions: Tensor) -> tuple[Tensor, ...]:
    """Versions of an output with the same right values in the columns in front."""
    return tuple(torch.cat([front.to(version.dtype), version], 1) for version in versions)


def _scores(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x = _inputs("normal", (32, 256), dtype)
    return (x.double() * 0.125).to(dtype), x.double() * 0.125


_FILLS = [(torch.float32, -1e9), (torch.float32, -1e4), (torch.bfloat16, -1e9), (torch.float16, -65504.0)]
_FILLS += [(torch.float32, torch.finfo(torch.float32).min), (torch.float64, torch.finfo(torch.float64).min)]


@pytest.mark.parametrize(("dtype", "value"), _FILLS)
def test_the_value_of_a_mask_hides_nothing(dtype: torch.dtype, value: float) -> None:
    scores, oracle = _scores(dtype)
    front = torch.full((32, 64), value, dtype=torch.float64)
    limits = TOLERANCES[str(dtype).removeprefix("torch.")]
    off = 1 + 50 * limits.kappa * limits.unit_roundoff
    for wrong in (torch.zeros_like(scores), (oracle * off).to(dtype)):
        assert _judge(*_beside(front, wrong, scores, oracle), 1).mismatches
    assert not _judge(*_beside(front, scores.clone(), scores, oracle), 1).mismatches
    other = _beside(front, scores.clone(), scores, oracle)
    other[0][3, 3] = 0.5 * value
    assert _judge(*other, 1).mismatches  # a mask's value is compared like any other


def test_two_masks_added_up_hide_nothing_and_name_what_is_wrong() -> None:
    scores, oracle = _scores(torch.float32)
    front = torch.cat([torch.full((32, 40), -1e9), torch.full((32, 24), -2e9)], 1)
    wrong = scores.clone()
    wrong[5, 100] += 0.01
    judgement = _judge(*_beside(front, wrong, scores, oracle), 1)
    assert [(m.kind, m.index) for m in judgement.mismatches] == [("values", (5, 164))]
    # Added to the scores, a mask's value swallows them, but not in the oracle.
    swallowed = oracle.clone()
    swallowed[:, :64] -= 1e9
    candidate, reference = scores.clone(), scores.clone()
    candidate[:, :64] = reference[:, :64] = -1e9
    assert not _judge(candidate, reference, swallowed, 1).mismatches
    assert _judge(candidate * 1.0001, reference, swallowed, 1).mismatches
    candidate[:, 64:] *= 1.0001
    assert _judge(candidate, reference, swallowed, 1).mismatches


def test_a_saturated_function_is_no_mask() -> None:
    """A softmax in per cent where every row has one winner: the others are judged by what is lost from 100."""
    x = _inputs("large", (8, 64))
    x[:, 0] = x.amax(1) + 30.0
    oracle = 100 * torch.softmax(x.double(), 1)
    candidate = (100 * torch.softmax(x + 1e-6 * torch.randn_like(x), 1)).float()
    assert not _judge(candidate, oracle.float(), oracle, 64).mismatches


@pytest.mark.parametrize("size", [40.0, 1e4, 1e9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_larger_values_hide_nothing(dtype: torch.dtype, size: float) -> None:
    x = _inputs("normal", (32, 256), dtype)
    reference, oracle = torch.tanh(x), torch.tanh(x.double())
    front = (size * (1 + torch.rand(32, 256, generator=torch.Generator().manual_seed(1)))).to(dtype).double()
    for wrong in (torch.full_like(x, 7.0), -reference, torch.zeros_like(x)):
        judgement = _judge(*_beside(front, wrong, reference, oracle), 1)
        assert judgement.mismatches
        assert size < 1e9 or "the larger ones hide it" in judgement.mismatches[0].detail
    by_exp = (1 - 2 / (torch.exp(2 * x.float()) + 1)).to(dtype)
    assert not _judge(*_beside(front, by_exp, reference, oracle), 1).mismatches


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("style", ["softplus", "silu", "tanh", "expm1", "log1p"])
def test_an_activations_tail_may_be_lost_beside_larger_values(style: str, dtype: torch.dtype) -> None:
    """Honest formulas that round at the size of 1, in fp32 or at each step, where the reference keeps its digits."""
    low = torch.linspace(-30, -4, 16 * 64).reshape(16, 64)
    tail = low.exp() if style in ("tanh", "expm1", "log1p") else low
    x = torch.cat([tail, torch.linspace(5, 400, 16 * 64).reshape(16, 64)]).to(dtype)
    reference, honest = {
        "softplus": (torch.nn.functional.softplus, lambda v: v.clamp(min=0) + torch.log(1 + torch.exp(-v.abs()))),
        "silu": (torch.nn.functional.silu, lambda v: v * (0.5 + 0.5 * torch.tanh(0.5 * v))),
        "tanh": (lambda v: torch.tanh(v) * v.abs().ceil(), lambda v: (1 - 2 / (torch.exp(2 * v) + 1)) * v.abs().ceil()),
        "expm1": (lambda v: torch.expm1(v / 64), lambda v: torch.exp(v / 64) - 1),
        "log1p": (lambda v: torch.log1p(v) * v.ceil(), lambda v: torch.log(1 + v) * v.ceil()),
    }[style]
    for candidate in (honest(x.float()).to(dtype), honest(x)):
        if not (style == "expm1" and dtype != torch.float32):  # overflows there
            assert not _judge(candidate, reference(x), reference(x.double()), 1).mismatches


@pytest.mark.parametrize("huge", [3, 1 << 18])
def test_few_huge_values_or_many_hide_nothing_in_a_large_output(huge: int) -> None:
    x = torch.randn(1024, 512, generator=torch.Generator().manual_seed(1))
    x.flatten()[torch.randperm(x.numel(), generator=torch.Generator().manual_seed(2))[:huge]] *= 1e9
    small = x.abs() < 100
    wrong = x.clone()
    wrong[small & (torch.rand(x.shape) < 0.01)] = 1.5
    (found,) = _judge(wrong, x, x.double(), 1).mismatches
    assert "the larger ones hide it" in found.detail
    assert found.index is not None and small[found.index] and found.got == 1.5
    assert not _judge(x * (1 + 1e-7), x, x.double(), 1).mismatches


def test_what_the_reference_loses_a_candidate_may_lose() -> None:
    """Small results of large terms: their error is that of the terms, to the reference as to any kernel."""
    x = _inputs("shifted", (64, 64))
    oracle = torch.cat([x.double() * 100, (x.double() + 1e6) - 1e6 - 300], 1)
    reference = torch.cat([x * 100, (x + 1e6) - 1e6 - 300], 1)
    candidate = torch.cat([x * 100, (x + 2e6) - 2e6 - 300], 1)
    assert not _judge(candidate, reference, oracle, 1).mismatches


# -- special values ------------------------------------------------------------------------------------------------


def test_nonfinite_masks_are_the_references() -> None:
    reference = torch.tensor([[1.0, math.inf, -math.inf, math.nan]])
    assert not _judge(reference.clone(), reference, reference.double(), 1).mismatches
    for place, value in [(0, math.nan), (1, 1.0), (2, math.inf), (3, 1.0)]:
        wrong = reference.clone()
        wrong[0, place] = value
        assert _judge(wrong, reference, reference.double(), 1).mismatches[0].kind == "nonfinite"


def test_fp16_may_round_either_way_at_the_edge_of_its_range() -> None:
    reference = torch.tensor([[65504.0, 1.0]], dtype=torch.float16)
    candidate = torch.tensor([[math.inf, 1.0]], dtype=torch.float16)
    oracle = torch.tensor([[65519.0, 1.0]], dtype=torch.float64)
    assert not _judge(candidate, reference, oracle, 1).mismatches
    assert not _judge(reference, candidate, oracle, 1).mismatches
    assert _judge(-candidate, reference, oracle, 1).mismatches


def test_far_beyond_its_range_fp16_is_infinite() -> None:
    reference = torch.tensor([[math.inf, -math.inf, 1.0]], dtype=torch.float16)
    candidate = torch.tensor([[65504.0, -65504.0, 1.0]], dtype=torch.float16)
    for size, mismatched in ((65519.0, False), (1e6, True), (math.inf, False)):  # of that nobody knows
        oracle = torch.tensor([[size, -size, 1.0]], dtype=torch.float64)
        assert bool(_judge(candidate, reference, oracle, 1).mismatches) is mismatched
        assert not _judge(reference, reference, oracle, 1).mismatches


def test_integers_and_booleans_are_bitwise_equal() -> None:
    reference = torch.arange(10)
    wrong = reference.clone()
    wrong[3] = 4
    mismatch = _judge(wrong, reference, reference).mismatches[0]
    assert (mismatch.kind, mismatch.index, mismatch.got, mismatch.expected) == ("integer", (3,), 4.0, 3.0)
    assert not _judge(reference > 3, reference > 3, reference > 3).mismatches


def test_exact_reference_on_a_reduction_is_partial_and_bounded_by_sqrt_k() -> None:
    x = torch.ones(64, K)
    judgement = _judge(x.sum(-1) * (1 + 3e-6), x.sum(-1), x.double().sum(-1))
    assert judgement.partial
    assert not judgement.mismatches
    assert _judge(x.sum(-1) * (1 + 1e-3), x.sum(-1), x.double().sum(-1)).mismatches


def test_user_tolerance_is_an_outer_bound() -> None:
    x = _inputs("normal")
    near = x * (1 + 5e-7)
    assert not _judge(near, x, x.double(), 1).mismatches
    tight = judge_output("out", near, x, x.double(), Rule(atol=0.0, rtol=1e-8))
    assert "atol=0, rtol=1e-08" in tight.mismatches[0].detail


def test_user_tolerance_is_no_closer_than_the_reference_comes() -> None:
    x = _inputs("normal")
    off = x * (1 + 1e-4)  # of the reference, which promises 1e-6 and does not keep it
    rule = Rule(atol=0.0, rtol=1e-6)
    assert not judge_output("out", x * (1 - 1e-4), off, x.double(), rule).mismatches
    mismatches = judge_output("out", x * (1 - 4e-4), off, x.double(), rule).mismatches
    assert any("rtol=1e-06" in one.detail for one in mismatches)


def test_complex_and_empty_outputs() -> None:
    z = torch.randn(16, 32, dtype=torch.complex64)
    assert not _judge(z.clone(), z, z.to(torch.complex128), 1).mismatches
    assert _judge(z.conj().resolve_conj(), z, z.to(torch.complex128), 1).mismatches
    assert not _judge(torch.empty(0, 4), torch.empty(0, 4), torch.empty(0, 4, dtype=torch.float64)).mismatches


def test_shape_and_dtype_are_judged_first() -> None:
    x = torch.randn(4, 4)
    assert _judge(x[:2], x, x.double()).mismatches[0].kind == "shape"
    assert _judge(x.half(), x, x.double()).mismatches[0].kind == "dtype"


# -- indices -------------------------------------------------------------------------------------------------------


def test_a_true_that_is_not_one_is_wrong() -> None:
    right = torch.tensor([True, False, True])
    odd = torch.tensor([2, 0, 1], dtype=torch.uint8).view(torch.bool)
    assert not judge_output("out", right.clone(), right, right, Rule()).mismatches
    assert judge_output("out", odd, right, right, Rule()).mismatches[0].kind == "integer"


def test_indices_may_break_ties_either_way() -> None:
    source = torch.tensor([[3.0, 3.0, 1.0, 2.0]], dtype=torch.float64)
    reference = torch.tensor([[0, 1, 3]])
    assert not judge_indices("out", torch.tensor([[1, 0, 3]]), reference, [source]).mismatches
    assert "occur twice" in judge_indices("out", torch.tensor([[0, 0, 3]]), reference, [source]).mismatches[0].detail
    assert "outside 0..3" in judge_indices("out", torch.tensor([[0, 7, 3]]), reference, [source]).mismatches[0].detail
    assert "other values" in judge_indices("out", torch.tensor([[0, 1, 2]]), reference, [source]).mismatches[0].detail


def test_argmax_without_the_dimension_is_matched() -> None:
    source = torch.tensor([[1.0, 5.0, 5.0], [2.0, 0.0, 1.0]], dtype=torch.float64)
    reference = torch.tensor([1, 0])
    assert not judge_indices("out", torch.tensor([2, 0]), reference, [source]).mismatches
    assert judge_indices("out", torch.tensor([0, 0]), reference, [source]).mismatches


def test_every_plan_dtype_that_floats_has_a_tolerance() -> None:
    from pytest_cudaforge.plan import DTYPE_BYTES

    assert set(TOLERANCES) == {name for name in DTYPE_BYTES if "float" in name or "complex" in name}


def _half_product(gain: float, dtype: torch.dtype, seed: int) -> Judgement:
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(shape, generator=generator).to(dtype).double() for shape in ((23, 512), (512, 31)))
    oracle = a @ b
    return _judge((gain * oracle).to(dtype), oracle.to(dtype), oracle, reduction=512)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_factor_slightly_off_shows_in_few_half_precision_elements(dtype: torch.dtype) -> None:
    off = TOLERANCES[str(dtype).removeprefix("torch.")].unit_roundoff
    for seed in range(20):
        assert not _half_product(1.0, dtype, seed).mismatches
        assert not _half_product(1.0 + off / 10, dtype, seed).mismatches
        assert [m.kind for m in _half_product(1.0 + off, dtype, seed).mismatches] == ["bias"]
        assert [m.kind for m in _half_product(1.0 - off, dtype, seed).mismatches] == ["bias"]


def test_roundings_that_a_row_shares_are_no_factor() -> None:
    """A scale that is rounded once for every row is off by one rounding there, either way."""
    for seed in range(20):
        x = torch.randn(48, 96, generator=torch.Generator().manual_seed(seed)).bfloat16()
        scale = torch.rsqrt(x.double().square().mean(1, keepdim=True))
        oracle = x.double() * scale
        candidate = (x.float() * scale.bfloat16().float()).bfloat16()
        assert not _judge(candidate, oracle.bfloat16(), oracle, reduction=96).mismatches


def _serial_layer_norm(x: Tensor) -> Tensor:
    flat = x.flatten(1)
    mean = _serial_sum(flat)[:, None] / flat.shape[1]
    deviation = (_serial_sum((flat - mean).square())[:, None] / flat.shape[1] + 1e-5).sqrt()
    return ((flat - mean) / deviation).reshape(x.shape)


@pytest.mark.parametrize("family", ["shifted", "lowered", "faint", "normal"])
def test_a_few_means_that_the_reference_got_nearly_right_do_not_set_the_bound(family: str) -> None:
    """Three samples of 1615 elements: the mean error of each is one draw."""
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        x = redraw(family, torch.rand(3, 5, 17, 19, generator=generator), "generic", generator)
        reference = torch.nn.functional.layer_norm(x, x.shape[1:])
        modes = Fp64Mode(), Fp64Mode(noise=SUM_NOISE * 2.0**-24)
        oracles = []
        for mode in modes:
            with mode:
                oracles.append(torch.nn.functional.layer_norm(x.double(), x.shape[1:]))
        assert modes[0].spreads
        noise = float((oracles[1] - oracles[0]).square().mean().sqrt())
        rule = Rule(1615, noise=noise)
        assert not judge_output("out", _serial_layer_norm(x), reference, oracles[0], rule).mismatches
        one_pass = x.flatten(1).square().mean(1) - x.flatten(1).mean(1).square()
        wrong = (x - x.flatten(1).mean(1)[:, None, None, None]) * torch.rsqrt(one_pass.clamp_min(0) + 1e-5)[
            :, None, None, None
        ]
        if family == "shifted":
            assert judge_output("out", wrong, reference, oracles[0], rule).mismatches


@pytest.mark.parametrize("power", [-900, -700, 0, 700, 900])
def test_fp64_values_whose_squares_vanish_or_overflow_are_judged(power: int) -> None:
    generator = torch.Generator().manual_seed(3)
    exact = torch.randn(64, 96, dtype=torch.float64, generator=generator) * 2.0**power
    rule = Rule(noise=2.0**power * 1e-15, alike=True)
    assert not judge_output("out", exact * (1 + 2.0**-52), exact, exact, rule).mismatches
    # All are off by a hundred times what the noise is, none by as much more as a slice may be.
    off = exact * (1 + 1e-13 * torch.randn(64, 96, dtype=torch.float64, generator=generator).sign())
    (told,) = judge_output("out", off, exact, exact, rule).mismatches
    assert told.kind == "values" and told.index is not None
    assert (told.got, told.expected) == (float(off[told.index]), float(exact[told.index]))
    assert ("all values times 2^" in told.detail) is bool(power)
