"""The tolerance rule: when does a candidate's output count as correct? Pure functions on tensors.

For an output *y* there are three versions: the oracle ``o`` (the reference carried in fp64), the reference ``r``
under its declared precision, and the candidate ``c``. The reference's own distance from the oracle says how much
rounding the task involves; the candidate may be ``kappa`` times as far away, never more:

1. ``rms(c-o) <= kappa * max(rms(r-o), 2*u*rms(o))`` (a smaller floor for half types where nothing is summed);
2. every slice's largest error is bounded by the reference's *global* largest error (one destroyed row cannot hide in
   a global norm; honest rows may be many times worse than the same row of the reference);
3. a slice that lost its leading digit while the reference kept four is destroyed, whatever the other slices' scale;
   large values hide nothing: one that many elements share bit for bit (a mask's) is left out of all norms, and what is
   far smaller than the largest elements is judged once more without them;
4. ``|mean(c-o)|`` stays within what rounding allows; for half types the mean errors of elements of one size do, too
   (another formula, or a cut instead of a rounding, errs to one side there; roundings do not), and so does the slope
   of ``c`` over ``o`` (a factor that is slightly off drowns in the roundings of single elements);
5. the user's ``atol``/``rtol`` is an outer bound;
6. NaN, +Inf and -Inf stand where the reference has them; integers and booleans are bitwise equal.

The constants are measured: see tests/benchmarks/README.md.

Everything walks over row blocks, so that outputs of several gigabytes need only small temporaries. torch is imported
lazily: the supervisor reads the constants without it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_cudaforge.records import Mismatch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["TOLERANCES", "Judgement", "Rule", "Tolerance", "judge_indices", "judge_output", "judge_pointed"]


@dataclass(frozen=True)
class Tolerance:
    """Constants of one output dtype. ``unit_roundoff`` is half an ulp at 1; the others multiply error norms.

    ``kappa``: global rms. ``kappa_max``: largest error of any slice. ``kappa_bias``: mean error, in unit roundoffs of
    mean(|o|): rounding to nearest has none, truncation about 0.7, so half types allow 1. ``least``: errors below it do
    not count, where kernels may take denormals for zero.
    """

    unit_roundoff: float
    kappa: float
    kappa_max: float
    kappa_bias: float
    least: float = 0.0


#: The smallest normal number of fp64, and of fp32 and bf16, 2^30 times over: an exponential that is cut off there (as
#: many are) is multiplied by values far from zero, and added up, before it comes out. Half types keep their denormals,
#: which are not that small.
_TINY_DOUBLE, _TINY = 2.0**-992, 2.0**-96
#: The one table of constants; tests/evaluation/test_correctness.py holds honest and wrong kernels against it.
TOLERANCES: dict[str, Tolerance] = {
    "float64": Tolerance(2.0**-53, 64.0, 512.0, 64.0, _TINY_DOUBLE),
    "complex128": Tolerance(2.0**-53, 64.0, 512.0, 64.0, _TINY_DOUBLE),
    "float32": Tolerance(2.0**-24, 16.0, 64.0, 16.0, _TINY),
    "complex64": Tolerance(2.0**-24, 16.0, 64.0, 16.0, _TINY),
    "float16": Tolerance(2.0**-11, 4.0, 16.0, 1.0),
    "bfloat16": Tolerance(2.0**-8, 4.0, 16.0, 1.0, _TINY),
    "float8_e4m3fn": Tolerance(2.0**-4, 4.0, 16.0, 1.0),
    "float8_e5m2": Tolerance(2.0**-3, 4.0, 16.0, 1.0),
}

#: Sums of this length and more: kappa is half as large again (a serial softmax sum at K = 4096 reaches 17.6), and
#: from KAPPA_REDUCTION on it grows with the length, up to MAX_GROWTH: faster than its root, since serial sums of one
#: sign drift.
LONG_REDUCTION = 1024
LONG_FACTOR = 1.5
KAPPA_REDUCTION = 4096
GROWTH_POWER = 0.75
#: No honest sum needs more: longer ones are summed in pieces, by the reference as by any kernel worth its name. Where
#: an output is the sums themselves there is room for a serial one; wrong ones are two orders of magnitude away.
MAX_GROWTH = 5.0
SUM_GROWTH = 16.0
#: Half types, no sum: one rounding leaves 0.4 unit roundoffs (rms), eager code that rounds at each step up to 0.7.
POINTWISE_ROUNDINGS = 0.75
#: Half types: the mean errors of groups of elements of one size, in unit roundoffs and in standard deviations.
SYSTEMATIC = 0.35
SYSTEMATIC_CHANCE = 4.0
SYSTEMATIC_GROUPS, SYSTEMATIC_SAMPLE, SYSTEMATIC_LEAST = 16, 16384, 1024
#: Half types: what the slope of c over o may differ from 1 by, in unit roundoffs, and in standard deviations beyond
#: that; where a few sums decide all elements, the rounding of one of them is a factor, too.
GAIN, GAIN_OF_FEW, GAIN_CHANCE = 0.2, 2.0, 4.0
GAIN_LEAST, GAIN_SAMPLE, GAIN_SUMS = 64, 1 << 17, 8
#: Fp64 values between 2 to the minus and to the plus of this have squares.
_MIDDLE = 400
SLICE = 256  # elements per slice where an output has a single row
SHORT = 32  # elements of a slice: fewer say nothing
DESTROYED = 0.1  # relative rms error of a slice without its leading digit
DESTROYED_RATIO = 1000.0  # ... while the reference's own error in that slice is this much smaller
#: A mask's value: so large (and as many times larger than the others), shared by such a part of all elements, and so
#: many of them: a causal mask's, a padding's, and both added up.
FILL, FILL_SHARE, FILL_SAMPLE, FILLS = 100.0, 0.01, 16384, 3
#: Elements of less than 1, 16, 256, ... are judged without the larger ones where they are such a part of all, and this
#: many. A quarter as strictly as a slice: of elements with one spread and one error, an eighth are small by chance, and
#: to those the bound is no closer than to all.
REST_BITS, REST_SHARE, REST_LEAST, REST_ROOM, REST_SAMPLE = 4, 0.125, 32, 4.0, 16384
BLOCK_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 26}
#: ... and in which nothing but sums is kept: a core's cache holds what is made of so many.
CACHED_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 26}


@dataclass(frozen=True)
class Rule:
    """What one comparison knows of its task.

    ``reduction``: the longest sum behind an output element (1: none). ``partial``: the oracle had to fall back to the
    reference's precision somewhere, so the floor is the rounding of such a sum, sqrt(K)*u. ``noise``: how far the
    rounding of its own sums moves the oracle (rms), for outputs of few elements that may cancel by chance. ``alike``:
    all sums have addends alike, of two sizes in the same order, whose roundings may be common to all of them (a share
    of 1/3, that merged means are moved by).
    """

    reduction: int = 1
    partial: bool = False
    noise: float = 0.0
    atol: float | None = None
    rtol: float | None = None
    alike: bool = False


@dataclass(frozen=True)
class Judgement:
    """One output's verdict. ``error_ratio`` is rms(c-o) over max(rms(r-o), floor); ``bound`` what it may be. ``small``:
    where the small elements alone are off, (below which size they are, what their rms(c-o) may be)."""

    error_ratio: float | None
    bound: float | None
    mismatches: tuple[Mismatch, ...]
    partial: bool = False
    small: tuple[float, float] | None = None


@dataclass
class _Sums:
    """Running sums over finite elements, in fp64."""

    count: int = 0
    oracle_square: float = 0.0
    oracle_abs: float = 0.0
    oracle_max: float = 0.0
    top: float = 0.0  # the reference's value where the oracle's is largest
    candidate_square: float = 0.0
    reference_square: float = 0.0
    candidate_sum: float = 0.0
    reference_sum: float = 0.0
    candidate_max: float = 0.0
    reference_max: float = 0.0
    worst_row: int = 0
    destroyed_row: int = -1
    destroyed_error: float = 0.0


def judge_output(
    path: str, candidate: Tensor, reference: Tensor, oracle: Tensor, rule: Rule, others: Sequence[Tensor] = ()
) -> Judgement:
    """Apply the rule to one output. ``oracle`` is fp64, of one shape with the others (integers: the reference).

    ``others``: what more runs of a reference gave that is declared non-deterministic; the worst of them sets the bound.
    """
    import torch

    if tuple(candidate.shape) != tuple(reference.shape):
        detail = f"shape {tuple(candidate.shape)}, expected {tuple(reference.shape)}"
        return Judgement(None, None, (Mismatch(path, "shape", detail),))
    if candidate.dtype != reference.dtype:
        detail = f"dtype {candidate.dtype}, expected {reference.dtype}"
        return Judgement(None, None, (Mismatch(path, "dtype", detail),))
    if candidate.numel() == 0:
        return Judgement(0.0, None, ())
    if not (candidate.is_floating_point() or candidate.is_complex()):
        return _judge_exact(path, candidate, reference, others)
    dtype = str(candidate.dtype).removeprefix("torch.")
    if candidate.is_complex():
        candidate, reference, oracle = (torch.view_as_real(t.resolve_conj()) for t in (candidate, reference, oracle))
        others = [torch.view_as_real(t.resolve_conj()) for t in others]
    return _judge_floating(path, dtype, candidate, reference, oracle, rule, others)


def _judge_exact(path: str, candidate: Tensor, reference: Tensor, others: Sequence[Tensor] = ()) -> Judgement:
    import torch

    if candidate.dtype == reference.dtype == torch.bool:
        # A true that is not 1 would be true to some readers and false to others.
        candidate, reference = candidate.view(torch.uint8), reference.view(torch.uint8)
        others = [other.view(torch.uint8) for other in others]
    wrong = candidate != reference
    if others:
        wrong = _outside_spread(candidate, [reference, *others])
    count = int(wrong.sum())
    if not count:
        return Judgement(0.0, 0.0, ())
    index = _first(wrong)
    detail = f"{count} of {wrong.numel()} elements differ; integers and booleans must be equal"
    mismatch = Mismatch(
        path,
        "integer",
        detail,
        index=index,
        got=float(candidate[index]),
        expected=float(reference[index]),
        pattern=_describe(wrong.reshape(_rows_of(wrong)), tuple(wrong.shape)),
    )
    return Judgement(None, 0.0, (mismatch,))


def _outside_spread(candidate: Tensor, runs: Sequence[Tensor]) -> Tensor:
    """Where an integer is none that a run of a non-deterministic reference gave.

    Some may be: of the runs themselves one is not always between the others. So many, and so far off, are let pass.
    """
    import torch

    values = torch.stack([run.to(torch.int64) for run in runs])
    low, high = values.amin(0), values.amax(0)
    found = candidate.to(torch.int64)
    outside = (found < low) | (found > high)
    rest = values[1:]
    usual = float(((values[0] < rest.amin(0)) | (values[0] > rest.amax(0))).double().mean())
    if float(outside.double().mean()) > 4.0 * usual:
        return outside
    reach = (high - low).max()
    return (found < low - reach) | (found > high + reach)


def _judge_floating(
    path: str,
    dtype: str,
    candidate: Tensor,
    reference: Tensor,
    oracle: Tensor,
    rule: Rule,
    others: Sequence[Tensor],
) -> Judgement:
    limits, factor = TOLERANCES[dtype], _to_the_middle(dtype, oracle)
    if factor == 1.0:
        return _judge_in_the_middle(path, dtype, candidate, reference, oracle, rule, limits, others)
    candidate, reference, oracle, *others = (t * factor for t in (candidate, reference, oracle, *others))
    limits = dataclasses.replace(limits, least=limits.least * factor)
    atol = None if rule.atol is None else rule.atol * factor
    rule = dataclasses.replace(rule, noise=rule.noise * factor, atol=atol)
    judged = _judge_in_the_middle(path, dtype, candidate, reference, oracle, rule, limits, others)
    small = None if judged.small is None else (judged.small[0] / factor, judged.small[1] / factor)
    told = tuple(_told_of(mismatch, factor) for mismatch in judged.mismatches)
    return dataclasses.replace(judged, mismatches=told, small=small)


def _told_of(mismatch: Mismatch, factor: float) -> Mismatch:
    """The same of values that were multiplied by ``factor``."""
    got, expected = (None if value is None else value / factor for value in (mismatch.got, mismatch.expected))
    detail = f"{mismatch.detail} (all values times 2^{math.frexp(factor)[1] - 1})"
    return dataclasses.replace(mismatch, detail=detail, got=got, expected=expected)


def _judge_in_the_middle(
    path: str,
    dtype: str,
    candidate: Tensor,
    reference: Tensor,
    oracle: Tensor,
    rule: Rule,
    limits: Tolerance,
    others: Sequence[Tensor],
) -> Judgement:
    shape = tuple(candidate.shape)
    rows = _rows_of(candidate)
    c, r, o = (t.reshape(rows) for t in (candidate, reference, oracle))
    spread = [t.reshape(rows) for t in others]
    nonfinite = _judge_nonfinite(path, c, r, o, spread, shape, dtype)
    sums, fills = _without_fills(c, r, o, limits)
    for other in spread:
        _widen_by(sums, _accumulate(other, r, o, limits, fills))
    if not sums.count:
        return Judgement(None, None, nonfinite)
    exact = sums.reference_square == 0.0 and rule.reduction > 1
    partial = rule.partial or exact
    floor = _floor(sums, limits, rule, partial, candidate.numel())
    scale = max(_rms(sums.reference_square, sums.count), floor)
    kappa = limits.kappa * _growth(rule.reduction, limits)
    error = _rms(sums.candidate_square, sums.count)
    ratio = error / scale if scale else (0.0 if error == 0.0 else math.inf)
    found = list(nonfinite)
    slice_bound = _slice_bound(sums, limits, rule, partial, candidate.numel())
    if ratio > kappa:
        found.append(_locate(path, "values", c, r, o, shape, kappa * scale, ratio, kappa, fills))
    elif sums.candidate_max > slice_bound:
        found.append(_locate(path, "slice", c, r, o, shape, slice_bound, ratio, kappa, fills))
    elif sums.destroyed_row >= 0:
        found.append(_destroyed(path, sums, rows, ratio, kappa))
    chance = kappa * scale / math.sqrt(1 if rule.alike else _independent(shape, rule.reduction))
    found.extend(_judge_bias(path, sums, limits, chance, ratio, kappa))
    small = None
    if not found and (
        rest := _judge_rest(path, c, r, o, spread, shape, fills, sums, rule, limits, partial, ratio, kappa)
    ):
        found.append(rest[0])
        small = rest[1:]
    if not found:
        found.extend(_judge_systematic(path, c, r, o, shape, fills, rule, limits, error, ratio, kappa))
    if not found:
        found.extend(_judge_gain(path, candidate, reference, oracle, fills, rule, limits, ratio, kappa))
    found.extend(_judge_user_bound(path, c, r, o, shape, rule))
    return Judgement(ratio, kappa, tuple(found), rule.partial or exact, small)


def _to_the_middle(dtype: str, oracle: Tensor) -> float:
    """A power of two that brings fp64 values to where their squares neither vanish nor overflow; 1 as a rule, and where
    the largest is a mask's."""
    if dtype not in ("float64", "complex128"):
        return 1.0
    sizes = oracle.nan_to_num(0.0, 0.0, 0.0).abs()
    top = float(sizes.max())
    if not top or abs(math.log2(top)) < _MIDDLE or (top > 1.0 and float((sizes == top).double().mean()) > FILL_SHARE):
        return 1.0
    return math.ldexp(1.0, min(1000, -math.frexp(top)[1]))


def _widen_by(sums: _Sums, other: _Sums) -> None:
    """Let another run of the reference count where it lies further off than the first."""
    sums.reference_square = max(sums.reference_square, other.candidate_square)
    sums.reference_max = max(sums.reference_max, other.candidate_max)
    sums.reference_sum = max(sums.reference_sum, other.candidate_sum, key=abs)


def _floor(sums: _Sums, limits: Tolerance, rule: Rule, partial: bool, elements: int) -> float:
    least = max(_roundings(limits, rule, partial) * _rms(sums.oracle_square, sums.count), rule.noise, limits.least)
    return least * _sum_growth(rule.reduction, limits, elements)


def _roundings(limits: Tolerance, rule: Rule, partial: bool) -> float:
    """What an element of size 1 may be off by where the reference is luckier than that."""
    if partial:
        return max(2.0, math.sqrt(rule.reduction)) * limits.unit_roundoff
    pointwise = rule.reduction == 1 and limits.unit_roundoff > 1e-6
    return (POINTWISE_ROUNDINGS if pointwise else 2.0) * limits.unit_roundoff


def _slice_bound(sums: _Sums, limits: Tolerance, rule: Rule, partial: bool, elements: int) -> float:
    floor = max(_roundings(limits, rule, partial) * sums.oracle_max, rule.noise, limits.least)
    floor *= _sum_growth(rule.reduction, limits, elements)
    return limits.kappa_max * _growth(rule.reduction, limits) * max(sums.reference_max, floor)


def _growth(reduction: int, limits: Tolerance) -> float:
    """How much longer sums widen the bound: not for half types, whose sums are carried in fp32."""
    if limits.unit_roundoff > 1e-6:
        return 1.0
    long = LONG_FACTOR if reduction >= LONG_REDUCTION else 1.0
    return long * min(MAX_GROWTH, _grown(reduction))


def _sum_growth(reduction: int, limits: Tolerance, elements: int) -> float:
    """How much more still the floor grows for an output of fewer elements than one of its sums has terms.

    It is such sums, where wrong ones are far away; a larger one was only scaled or moved by them, and there the error
    of an unstable formula is not far from that of a serial sum. A reference's own error grows by itself.
    """
    if limits.unit_roundoff > 1e-6 or elements >= reduction:
        return 1.0
    return max(1.0, min(SUM_GROWTH, _grown(reduction)) / MAX_GROWTH)


def _grown(reduction: int) -> float:
    return math.pow(max(1.0, reduction / KAPPA_REDUCTION), GROWTH_POWER)


def _rms(square: float, count: int) -> float:
    return math.sqrt(square / count) if count else 0.0


def _rows_of(tensor: Tensor) -> tuple[int, int]:
    """The (rows, columns) a tensor is cut into: its last dimension, or slices of 256 where that is all there is."""
    total = tensor.numel()
    columns = int(tensor.shape[-1]) if tensor.dim() else 1
    if columns == total and total > SLICE and total % SLICE == 0:
        return (total // SLICE, SLICE)
    if columns == 1 and total % SLICE == 0:
        return (total // SLICE, SLICE)
    return (total // columns, columns)


def _blocks(
    c: Tensor, r: Tensor, o: Tensor, fills: tuple[float, ...] = (), most: Mapping[str, int] = BLOCK_ELEMENTS
) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """Blocks of rows as fp64, with the number of their first row.

    Beyond the dtype's range (a mask's value, an overflow) the oracle has nothing to say: the reference stands in. Where
    candidate and reference have one of ``fills`` it is NaN.
    """
    import torch

    largest = float(torch.finfo(c.dtype).max)
    limit = most.get(c.device.type, 1 << 22)
    step = max(1, limit // max(1, int(c.shape[1])))
    for start in range(0, int(c.shape[0]), step):
        part = slice(start, start + step)
        cb, rb, ob = (t[part].to(torch.float64) for t in (c, r, o))
        if not _largest_of(ob) <= largest:
            ob = ob.where(ob.abs() <= largest, rb)
        yield start, cb, rb, _unfilled(cb, rb, ob, fills)


def _largest_of(tensor: Tensor) -> float:
    """Its largest magnitude, NaN where one is, 0 where there is none: one pass over memory."""
    if not tensor.numel():
        return 0.0
    if tensor.element_size() == 1:  # torch orders no 8-bit floats
        tensor = tensor.float()
    low, high = tensor.aminmax()
    return float(high.maximum(-low))


def _unfilled(c: Tensor, r: Tensor, o: Tensor, fills: tuple[float, ...]) -> Tensor:
    """``o``, NaN where ``c`` and ``r`` both have one of these values."""
    for value in fills:
        o = o.masked_fill((c == value) & (r == value), math.nan)
    return o


def _without_fills(c: Tensor, r: Tensor, o: Tensor, limits: Tolerance) -> tuple[_Sums, tuple[float, ...]]:
    """The sums, and the large values they leave out since many elements share them bit for bit: a mask's.

    Such a value says nothing of what rounding leaves in the others. They count as if of size 1 where they are smaller:
    a saturated function (a softmax in per cent) has one value in many places, too, and digits of that size to lose.
    """
    everything = sums = _accumulate(c, r, o, limits)
    fills: tuple[float, ...] = ()
    while abs(sums.top) >= FILL and len(fills) < FILLS and _is_shared(c, r, sums.top):
        fills = (*fills, sums.top)
        sums = _accumulate(c, r, o, limits, fills)
        if sums.count and min(map(abs, fills)) >= FILL * max(1.0, _rms(sums.oracle_square, sums.count)):
            sums.oracle_square, sums.oracle_abs = (max(s, sums.count) for s in (sums.oracle_square, sums.oracle_abs))
            sums.oracle_max = max(sums.oracle_max, 1.0)
            return sums, fills
    return everything, ()


def _is_shared(c: Tensor, r: Tensor, value: float) -> bool:
    step = max(1, c.numel() // FILL_SAMPLE) | 1  # odd, so that it visits all columns
    cs, rs = (t.reshape(-1)[::step].double() for t in (c, r))
    return float(((cs == value) & (rs == value)).double().mean()) >= FILL_SHARE


def _accumulate(c: Tensor, r: Tensor, o: Tensor, limits: Tolerance, fills: tuple[float, ...] = ()) -> _Sums:
    """One pass over memory for each figure: this is most of what judging takes."""
    import torch
    from torch.linalg import vector_norm

    sums = _Sums()
    by_row: list[tuple[Tensor, ...]] = []
    for start, cb, rb, ob in _blocks(c, r, o, fills, CACHED_ELEMENTS):
        ce, re, of, in_row = _finite_errors(cb, rb, ob)
        sums.count += int(in_row.sum())
        sums.oracle_abs += float(of.abs().sum())
        sums.candidate_sum += float(ce.sum())
        sums.reference_sum += float(re.sum())
        tops, per_row = (t.abs().amax(dim=1) for t in (of, ce))
        top, worst = int(tops.argmax()), int(per_row.argmax())
        if float(tops[top]) > sums.oracle_max:
            sums.oracle_max, sums.top = float(tops[top]), float(rb[top, of[top].abs().argmax()])
        if float(per_row[worst]) > sums.candidate_max:
            sums.candidate_max, sums.worst_row = float(per_row[worst]), start + worst
        sums.reference_max = max(sums.reference_max, _largest_of(re))
        norms = tuple(vector_norm(t, dim=1) for t in (ce, re, of))
        candidate, reference, oracle = (float(norm.square().sum()) for norm in norms)
        sums.candidate_square += candidate
        sums.reference_square += reference
        sums.oracle_square += oracle
        by_row.append((*(norm / math.sqrt(ce.shape[1]) for norm in norms), in_row))
    if by_row and c.shape[1] >= SHORT:  # a shorter row may cancel to almost nothing by chance
        _find_destroyed(sums, [torch.cat(parts) for parts in zip(*by_row, strict=True)], limits)
    return sums


def _finite_errors(c: Tensor, r: Tensor, o: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``c - o``, ``r - o`` and ``o``, 0 where one of them is not finite; how many elements of each row are."""
    import torch

    ce, re = c - o, r - o
    if math.isfinite(_largest_of(ce)) and math.isfinite(_largest_of(re)):
        return ce, re, o, torch.full((len(o),), o.shape[1], device=o.device)
    finite = c.isfinite() & r.isfinite() & o.isfinite()
    return ce.where(finite, 0.0), re.where(finite, 0.0), o.where(finite, 0.0), finite.sum(dim=1)


def _find_destroyed(sums: _Sums, by_row: Sequence[Tensor], limits: Tolerance) -> None:
    """``by_row``: rms of the candidate's errors, of the reference's, of the oracle's values; how many are finite. Rows
    that the reference has destroyed itself say nothing here."""
    rms_c, rms_r, rms_o, in_row = by_row
    typical = math.sqrt(sums.oracle_square / max(1, sums.count))
    floor = limits.unit_roundoff * rms_o
    bad = (rms_c > DESTROYED * rms_o) & (rms_c > DESTROYED_RATIO * rms_r.maximum(floor)) & (rms_o > 1e-3 * typical)
    bad &= (in_row >= SHORT) & (rms_c > limits.least) & (rms_r <= DESTROYED * rms_o)
    if bool(bad.any()):
        row = int(bad.to(dtype=rms_c.dtype).argmax())
        sums.destroyed_row, sums.destroyed_error = row, float(rms_c[row] / rms_o[row])


def _judge_rest(
    path: str,
    c: Tensor,
    r: Tensor,
    o: Tensor,
    spread: Sequence[Tensor],
    shape: tuple[int, ...],
    fills: tuple[float, ...],
    sums: _Sums,
    rule: Rule,
    limits: Tolerance,
    partial: bool,
    ratio: float,
    kappa: float,
) -> tuple[Mismatch, float, float] | None:
    """Is what is small beside the largest elements right, too? None, or what is wrong below which size, and what the
    rms of the errors there may be.

    The error of elements below some size, over that of the reference in the same ones or what rounding leaves of their
    size, or of size 1 where they are smaller still: an honest formula may have such terms where the reference has none
    (1 + erf, log(1 + exp)), and lose an activation's tail. It has none of the size of other elements.
    """
    unit = _roundings(limits, rule, partial)
    room = REST_ROOM * limits.kappa_max * _growth(rule.reduction, limits)
    room *= _sum_growth(rule.reduction, limits, c.numel())
    if sums.oracle_max <= 1.0 or not _may_hide(c, r, o, fills, sums, room * unit):
        return None
    by_size = _by_size(c, r, o, fills)
    for other in spread:
        by_size[2] = by_size[2].maximum(_by_size(other, r, o, fills)[1])
    counts, squares, references, oracles = by_size.cumsum(1).tolist()
    for number, count in enumerate(counts[:-1]):
        found, own, size = (_rms(row[number], int(count)) for row in (squares, references, oracles))
        bound = room * max(own, unit * max(1.0, size), rule.noise)
        if found > bound and count >= max(REST_LEAST, REST_SHARE * counts[-1]):
            below = 2.0 ** (REST_BITS * number)
            wrong = _locate(path, "slice", c, r, o, shape, bound, ratio, kappa, fills, below)
            detail = (
                f"{int(count)} of {int(counts[-1])} elements are smaller than {below:.3g}; their error norm is "
                f"{found:.3g}, rounding allows {bound:.3g}: the larger ones hide it"
            )
            return dataclasses.replace(wrong, detail=detail), below, bound
    return None


def _may_hide(c: Tensor, r: Tensor, o: Tensor, fills: tuple[float, ...], sums: _Sums, relative: float) -> bool:
    """Would all the errors, were they those of some elements of one size, exceed ``relative`` times that size?

    Sizes are told from a sample, by halves: what is judged are large parts. It spares nearly all outputs a second walk.
    """
    if sums.candidate_square < REST_SHARE * sums.count * relative**2:
        return False
    if c.numel() <= 4 * REST_SAMPLE:
        return True
    step = max(1, c.numel() // REST_SAMPLE) | 1  # odd, so that it visits all columns
    cs, rs, os = (t.reshape(-1)[::step].reshape(1, -1) for t in (c, r, o))
    counts, _, _, oracles = _by_size(cs, rs, os, fills).cumsum(1)
    sizes = (oracles / counts.clamp(min=1.0)).sqrt().div(2.0).clamp(min=1.0)
    shares = counts / counts[-1].clamp(min=1.0)
    allowed = shares / 2.0 * sums.count * (relative * sizes).square()
    return bool(((2.0 * shares >= REST_SHARE) & (sums.candidate_square >= allowed)).any())


def _by_size(c: Tensor, r: Tensor, o: Tensor, fills: tuple[float, ...]) -> Tensor:
    """(4, sizes) in fp64, for elements of less than 1, 2**REST_BITS, ...: how many, squares of c-o, of r-o, of o."""
    import torch

    total = torch.zeros(4, 2 + 1024 // REST_BITS, dtype=torch.float64, device=c.device)
    for _, cb, rb, ob in _blocks(c, r, o, fills):
        finite = cb.isfinite() & rb.isfinite() & ob.isfinite()
        ob = ob.where(finite, 0.0)
        size = ob.frexp().exponent.clamp_(min=0).add_(REST_BITS - 1).div_(REST_BITS, rounding_mode="floor").flatten()
        for row, values in enumerate((torch.ones_like(ob), cb - ob, rb - ob, ob)):
            weights = values.where(finite, 0.0).square_().flatten()
            total[row] += torch.bincount(size, weights, total.shape[1])
    return total


def _destroyed(path: str, sums: _Sums, rows: tuple[int, int], ratio: float, bound: float) -> Mismatch:
    detail = (
        f"slice {sums.destroyed_row} of {rows[0]} ({rows[1]} elements each) is destroyed: relative error "
        f"{sums.destroyed_error:.2g} where the reference keeps its digits; the global norm hides it"
    )
    return Mismatch(path, "slice", detail, error_ratio=ratio, bound=bound, pattern=f"slice {sums.destroyed_row}")


def _judge_nonfinite(
    path: str, c: Tensor, r: Tensor, o: Tensor, spread: Sequence[Tensor], shape: tuple[int, ...], dtype: str
) -> tuple[Mismatch, ...]:
    import torch

    if math.isfinite(_largest_of(c)) and math.isfinite(_largest_of(r)):
        return ()
    most = float(torch.finfo(getattr(torch, _real_dtype(dtype))).max)
    edge = 0.98 * most
    for start, cb, rb, _ in _blocks(c, r, r):
        wrong = _other_mask(cb, rb)
        for other in spread:
            wrong &= _other_mask(cb, other[start : start + len(cb)].to(torch.float64))
        if not bool(wrong.any()):
            continue
        # At the edge of the range a rounding decides between the largest number and infinity.
        near = cb.isinf() & (rb.abs() >= edge) & (cb.sign() == rb.sign())
        # Far beyond it nothing is left to rounding: who stops at the largest number is wrong.
        exact = o[start : start + len(cb)].to(torch.float64)
        far = exact.isfinite() & (exact.abs() > most / 0.98)
        near |= rb.isinf() & cb.isfinite() & (cb.abs() >= edge) & (cb.sign() == rb.sign()) & ~far
        wrong &= ~(near & ~rb.isnan() & ~cb.isnan())
        count = int(wrong.sum())
        if not count:
            continue
        row, column = _first(wrong)
        detail = f"NaN or Inf where the reference has none, or the other way round ({count} elements in this block)"
        index = _unravel((start + row) * int(c.shape[1]) + column, shape)
        got, expected = float(cb[row, column]), float(rb[row, column])
        pattern = _describe(wrong, shape) if start == 0 else ""
        return (Mismatch(path, "nonfinite", detail, index=index, got=got, expected=expected, pattern=pattern),)
    return ()


def _other_mask(c: Tensor, r: Tensor) -> Tensor:
    """Where one is NaN, +Inf or -Inf and the other is not."""
    return (c.isnan() != r.isnan()) | (c.isposinf() != r.isposinf()) | (c.isneginf() != r.isneginf())


def _real_dtype(dtype: str) -> str:
    return {"complex64": "float32", "complex128": "float64"}.get(dtype, dtype)


def _independent(shape: tuple[int, ...], reduction: int) -> int:
    """How many errors are drawn independently: one per row, since a row's elements share its sum's error.

    A single row behind which there are sums counts as one error: it is a softmax's, or one sum per element, whose terms
    may share what they err by (a gain's gradient: each row's rounded mean is in all of its sums). A sum longer than a
    row may be behind several of them (a group's, a channel's).
    """
    rows, elements = math.prod(shape[:-1]), math.prod(shape)
    if shape and reduction > shape[-1] and elements % reduction == 0:
        rows = min(rows, elements // reduction)
    return rows if rows > 1 or reduction > 1 else elements


def _judge_bias(path: str, sums: _Sums, limits: Tolerance, chance: float, ratio: float, kappa: float) -> list[Mismatch]:
    """``chance`` is the standard deviation of the mean error that the error bound allows."""
    mean = abs(sums.candidate_sum) / sums.count
    reference = abs(sums.reference_sum) / sums.count
    systematic = max(limits.kappa * reference, limits.kappa_bias * limits.unit_roundoff * sums.oracle_abs / sums.count)
    bound = max(systematic + 4.0 * chance, limits.least)
    if mean <= bound:
        return []
    detail = f"the mean error is {mean:.3g}, rounding allows {bound:.3g}: something is left out or one-sided"
    return [Mismatch(path, "bias", detail, error_ratio=ratio, bound=kappa, got=mean, expected=bound)]


def _judge_systematic(
    path: str,
    c: Tensor,
    r: Tensor,
    o: Tensor,
    shape: tuple[int, ...],
    fills: tuple[float, ...],
    rule: Rule,
    limits: Tolerance,
    error: float,
    ratio: float,
    kappa: float,
) -> list[Mismatch]:
    """Half types only: is the mean error of elements of one size what rounding to nearest leaves?

    Errors of one row (of one channel) may be drawn together where the row was summed: that many are independent.
    """
    if limits.unit_roundoff < 1e-6 or c.numel() < SYSTEMATIC_LEAST:
        return []
    found, allowed, scale, count = _systematic(c, r, o, fills)
    leading = max(shape[:-1], default=1)
    independent = leading if rule.reduction > 1 else count
    bound = max(
        limits.kappa * allowed,
        SYSTEMATIC * limits.unit_roundoff * scale + SYSTEMATIC_CHANCE * error / math.sqrt(max(1, independent)),
    )
    if found <= bound:
        return []
    detail = (
        f"errors of elements of one size lie on one side: {found:.3g} (rms of their means), rounding to nearest "
        f"allows {bound:.3g}: another formula, or digits cut off"
    )
    return [Mismatch(path, "bias", detail, error_ratio=ratio, bound=kappa, got=found, expected=bound)]


def _systematic(c: Tensor, r: Tensor, o: Tensor, fills: tuple[float, ...]) -> tuple[float, float, float, int]:
    """Over groups of elements of one size of ``o``: rms of the mean errors of ``c`` and of ``r``; rms(o); how many."""
    import torch

    step = max(1, c.numel() // SYSTEMATIC_SAMPLE) | 1  # odd, so that it visits all columns
    cs, rs, os = (t.reshape(-1)[::step].to(torch.float64) for t in (c, r, o))
    os = _unfilled(cs, rs, os, fills)
    finite = cs.isfinite() & rs.isfinite() & (os.abs() <= float(torch.finfo(c.dtype).max))
    order = os[finite].argsort()
    cs, rs, os = (t[finite][order] for t in (cs, rs, os))
    if len(os) < SYSTEMATIC_LEAST // 2:
        return 0.0, 0.0, 0.0, len(os)
    errors = torch.stack([cs - os, rs - os], 1)
    means = torch.stack([group.mean(0) for group in errors.tensor_split(SYSTEMATIC_GROUPS)])
    of_c, of_r = means.square().mean(0).sqrt().tolist()
    return of_c, of_r, float(os.square().mean().sqrt()), len(os)


def _judge_gain(
    path: str,
    c: Tensor,
    r: Tensor,
    o: Tensor,
    fills: tuple[float, ...],
    rule: Rule,
    limits: Tolerance,
    ratio: float,
    kappa: float,
) -> list[Mismatch]:
    """Half types only: is the candidate the oracle times one, up to what its roundings leave by chance?

    Roundings may be shared along any dimension (a row's scale, a channel's weight), so the chance is that of the
    dimension whose entries differ most.
    """
    if limits.unit_roundoff < 1e-6 or c.numel() < GAIN_LEAST:
        return []
    step = [slice(None, None, step) for step in _thinned(tuple(c.shape), GAIN_SAMPLE)]
    cs, rs, os = (t[tuple(step)].double() for t in (c, r, o))
    os = _unfilled(cs, rs, os, fills)
    seen = cs.isfinite() & rs.isfinite() & (os.abs() <= float(_finfo(c).max))
    cs, rs, os = (t.where(seen, t.new_zeros(())) for t in (cs, rs, os))
    total = float(os.square().sum())
    if not total:
        return []
    gain, allowed = (float(((t - os) * os).sum()) / total for t in (cs, rs))
    few = rule.reduction > 1 and max(c.shape[:-1], default=1) < GAIN_SUMS
    bound = max(limits.kappa * abs(allowed), (GAIN_OF_FEW if few else GAIN) * limits.unit_roundoff)
    bound += GAIN_CHANCE * _gain_chance(cs, os, gain, total)
    if abs(gain) <= bound:
        return []
    detail = (
        f"it is {1 + gain:.6f} times what it should be, all elements together; rounding allows {bound:.2g} more or less"
    )
    return [Mismatch(path, "bias", detail, error_ratio=ratio, bound=kappa, got=abs(gain), expected=bound)]


def _gain_chance(c: Tensor, o: Tensor, gain: float, total: float) -> float:
    """Standard deviation of the slope, from how entries of one dimension differ: the largest over all dimensions."""
    left = (c - o - gain * o) * o
    found = 0.0
    for dim, size in enumerate(left.shape):
        if size > 1:
            others = [d for d in range(left.dim()) if d != dim]
            parts = left.sum(others) if others else left
            # A few entries may agree by chance.
            room = (1.0 + 6.0 / (size - 1)) * math.sqrt(size / (size - 1))
            found = max(found, room * float(parts.square().sum().sqrt()) / total)
    return found


def _thinned(shape: tuple[int, ...], most: int) -> list[int]:
    """A step per dimension, the longest ones first, that leaves at most about so many elements; never all even."""
    steps = [1] * len(shape)
    while math.prod(-(-size // step) for size, step in zip(shape, steps, strict=True)) > most:
        longest = max(range(len(shape)), key=lambda d: shape[d] / steps[d])
        steps[longest] = 2 * steps[longest] + 1
    return steps


def _finfo(tensor: Tensor) -> Any:
    import torch

    return torch.finfo(tensor.dtype)


#: Where the reference is outside of the user's bound itself, a candidate may be as far off, and a little more.
_REACHED = 2.0


def _farthest(r: Tensor, o: Tensor) -> float:
    """The largest error of the reference's finite elements."""
    return max(
        (float((rb - ob).abs().nan_to_num(0.0, 0.0, 0.0).max()) for _, _, rb, ob in _blocks(r, r, o)), default=0.0
    )


def _judge_user_bound(path: str, c: Tensor, r: Tensor, o: Tensor, shape: tuple[int, ...], rule: Rule) -> list[Mismatch]:
    if rule.atol is None and rule.rtol is None:
        return []
    atol, rtol = rule.atol or 0.0, rule.rtol or 0.0
    reached: float | None = None
    for start, cb, _, ob in _blocks(c, r, o):
        away = (cb - ob).abs()
        wrong = (away > atol + rtol * ob.abs()) & cb.isfinite() & ob.isfinite()
        if not bool(wrong.any()):
            continue
        reached = _farthest(r, o) if reached is None else reached
        wrong &= away > _REACHED * reached
        if not bool(wrong.any()):
            continue
        row, column = _first(wrong)
        index = _unravel((start + row) * int(c.shape[1]) + column, shape)
        detail = f"outside the target's own atol={atol:g}, rtol={rtol:g}"
        return [
            Mismatch(path, "values", detail, index=index, got=float(cb[row, column]), expected=float(ob[row, column]))
        ]
    return []


def _locate(
    path: str,
    kind: str,
    c: Tensor,
    r: Tensor,
    o: Tensor,
    shape: tuple[int, ...],
    limit: float,
    ratio: float,
    bound: float,
    fills: tuple[float, ...],
    below: float = math.inf,
) -> Mismatch:
    """Where the error is: the worst element, how many are off, and the pattern of their indices.

    Elements of the oracle's that are not ``below`` some size do not count, nor do ``fills``.
    """
    worst, place, got, expected, off = -1.0, 0, 0.0, 0.0, 0
    pattern = ""
    for start, cb, _, ob in _blocks(c, r, o, fills):
        error = (cb - ob).abs().nan_to_num(0.0, 0.0).where(ob.abs() < below, 0.0)
        wrong = error > limit
        off += int(wrong.sum())
        top = int(error.argmax())
        if float(error.flatten()[top]) > worst:
            worst, place = float(error.flatten()[top]), start * int(c.shape[1]) + top
            got, expected = float(cb.flatten()[top]), float(ob.flatten()[top])
        if not pattern and bool(wrong.any()):
            pattern = _describe(wrong, shape if c.shape[0] == wrong.shape[0] else (), start)
    total = c.numel()
    norm = "error norm" if kind == "values" else "largest error of a slice"
    detail = (
        f"{norm} is too large: {off} of {total} elements are off by more than {limit:.3g}, the worst by {worst:.3g}"
    )
    return Mismatch(path, kind, detail, ratio, bound, _unravel(place, shape), got, expected, pattern)


def _describe(wrong: Tensor, shape: tuple[int, ...], first_row: int = 0) -> str:
    """Name the pattern of wrong elements of a (rows, columns) mask in a few words."""
    rows, columns = int(wrong.shape[0]), int(wrong.shape[1])
    bad_rows = wrong.any(dim=1).nonzero().flatten().tolist()
    bad_columns = wrong.any(dim=0).nonzero().flatten().tolist()
    count = int(wrong.sum())
    if count == rows * columns:
        return "every element"
    words = []
    if len(bad_rows) < rows:
        words.append(_span("row", bad_rows, rows, first_row))
    if len(bad_columns) < columns:
        words.append(_span("column", bad_columns, columns, 0))
    filled = count / max(1, len(bad_rows) * len(bad_columns))
    words.append("all elements there" if filled > 0.999 else f"{filled:.0%} of the elements there")
    return "; ".join(words) + (f" (rows along the last dimension of {shape})" if len(shape) > 2 else "")


#: Steps whose ordinal ends otherwise, as far as one is likely.
_ORDINALS = {2: "nd", 3: "rd", 22: "nd", 23: "rd"}


def _span(noun: str, found: Sequence[int], total: int, first: int) -> str:
    low, high, count = found[0], found[-1], len(found)
    if count == 1:
        last = " (the last)" if low == total - 1 else ""
        return f"only {noun} {low + first}{last}"
    if high - low + 1 == count:
        if high == total - 1:
            return f"{noun}s from {low + first} to the end"
        return f"{noun}s {low + first} to {high + first}"
    steps = {b - a for a, b in itertools.pairwise(found)}
    if len(steps) == 1:
        step = steps.pop()
        return f"every {step}{_ORDINALS.get(step, 'th')} {noun} from {low + first}"
    return f"{count} of {total} {noun}s, between {low + first} and {high + first}"


def _first(mask: Tensor) -> tuple[int, ...]:
    place = int(mask.flatten().byte().argmax())
    return _unravel(place, tuple(mask.shape))


def _unravel(place: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    index: list[int] = []
    for size in reversed(shape):
        index.append(place % size)
        place //= size
    return tuple(reversed(index))


def judge_indices(path: str, candidate: Tensor, reference: Tensor, sources: Sequence[Tensor]) -> Judgement:
    """An output the target declares to be indices (top-k, argmax, sort): ties may be broken either way.

    ``sources`` are fp64 tensors the indices may point into (the inputs); the first whose shape fits decides. Compared
    are the values at the indices, their range, and that no index occurs twice where the reference repeats none.
    """
    import torch

    if tuple(candidate.shape) != tuple(reference.shape) or candidate.dtype != reference.dtype:
        return _judge_exact_shape(path, candidate, reference)
    if torch.equal(candidate, reference):
        return Judgement(0.0, 0.0, ())
    for source in sources:
        dim = _indexed_dim(tuple(candidate.shape), tuple(source.shape))
        if dim is not None:
            return _judge_gathered(path, candidate, reference, source, dim)
    return _judge_exact(path, candidate, reference)


def judge_pointed(
    path: str, candidate: Tensor, reference: Tensor, values: Tensor, exact: Tensor, dim: int
) -> Judgement:
    """Indices into computed values, such as the top k of a softmax: compared are the values pointed at.

    ``values`` is what the reference searched along ``dim``, ``exact`` the same in fp64. Where rounding moved them,
    neighbours closer than that are ties, to the reference as to any kernel; where nothing was rounded only equal
    values are.
    """
    if tuple(candidate.shape) != tuple(reference.shape) or candidate.dtype != reference.dtype:
        return _judge_exact_shape(path, candidate, reference)
    limits = TOLERANCES.get(str(values.dtype).removeprefix("torch."), TOLERANCES["float32"])
    source = values.double()
    finite = source.isfinite() & exact.isfinite()
    moved = (source - exact).masked_fill(~finite, 0.0)
    error = float(moved.square().mean().sqrt())
    floor = 2.0 * limits.unit_roundoff * float(exact.masked_fill(~finite, 0.0).square().mean().sqrt())
    within = 2.0 * limits.kappa * max(error, floor) if error else 0.0
    return _judge_gathered(path, candidate, reference, source, dim, exact, within)


def _judge_exact_shape(path: str, candidate: Tensor, reference: Tensor) -> Judgement:
    same = tuple(candidate.shape) == tuple(reference.shape)
    kind = "dtype" if same else "shape"
    detail = f"{candidate.dtype} {tuple(candidate.shape)}, expected {reference.dtype} {tuple(reference.shape)}"
    return Judgement(None, None, (Mismatch(path, kind, detail),))


def _indexed_dim(index_shape: tuple[int, ...], source_shape: tuple[int, ...]) -> int | None:
    """Along which dimension of the source an index tensor of this shape points; -1 for a flattened last dimension."""
    if len(index_shape) == len(source_shape):
        differing = [d for d, (a, b) in enumerate(zip(index_shape, source_shape, strict=True)) if a != b]
        if not differing:
            return len(source_shape) - 1
        return differing[0] if len(differing) == 1 else None
    if len(index_shape) == len(source_shape) - 1:
        for dim in reversed(range(len(source_shape))):
            if source_shape[:dim] + source_shape[dim + 1 :] == index_shape:
                return dim
    return None


def _judge_gathered(
    path: str,
    candidate: Tensor,
    reference: Tensor,
    source: Tensor,
    dim: int,
    exact: Tensor | None = None,
    within: float = 0.0,
) -> Judgement:
    """Values of ``source`` (or of its fp64 form ``exact``) at the candidate's places may be ``within`` of those at the
    reference's."""
    import torch

    squeezed = candidate.dim() < source.dim()
    c, r = (t.to(torch.int64).unsqueeze(dim) if squeezed else t.to(torch.int64) for t in (candidate, reference))
    outside = (c < 0) | (c >= source.shape[dim])
    if bool(outside.any()):
        index = _first(outside)
        detail = f"{int(outside.sum())} indices outside 0..{source.shape[dim] - 1}"
        return Judgement(None, 0.0, (Mismatch(path, "integer", detail, index=index, got=float(c[index])),))
    got, expected = source.gather(dim, c), source.gather(dim, r)
    wrong = (got != expected) & ~(got.isnan() & expected.isnan())
    for values in (source, exact) if within and exact is not None else ():
        wrong &= ~((values.gather(dim, c) - values.gather(dim, r)).abs() <= within)
    if bool(wrong.any()):
        index = _first(wrong)
        detail = f"{int(wrong.sum())} of {wrong.numel()} indices point at other values than the reference's"
        return Judgement(
            None,
            0.0,
            (Mismatch(path, "integer", detail, index=index, got=float(got[index]), expected=float(expected[index])),),
        )
    ordered_c, ordered_r = c.sort(dim=dim).values, r.sort(dim=dim).values
    repeats_c = int((ordered_c.diff(dim=dim) == 0).sum())
    if repeats_c > int((ordered_r.diff(dim=dim) == 0).sum()):
        return Judgement(None, 0.0, (Mismatch(path, "integer", f"{repeats_c} indices occur twice"),))
    return Judgement(0.0, 0.0, ())
