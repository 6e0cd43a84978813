"""Values for inputs that may have any: what each family of :mod:`pytest_cudaforge.evaluation.redraw` is. In the
oracle's process only."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pytest_cudaforge.evaluation.structures import LOW_PRECISION

__all__ = ["CALM", "ENDS", "HALVES", "LEVELS", "TINY", "UNBIASED", "Draw", "generic"]

#: Whole numbers up to these, times a power of two: where a reference rounds to so many levels, by a scale or a range
#: that it takes from the values, half of them lie between two levels, and nothing is rounded before. The name of the
#: family has the number behind it.
HALVES = "halves"
LEVELS = (254, 255, 15, 14, 256, 510, 30, 31, 62, 63, 6, 7, 2, 3, 127)

#: "rectified": one row in so many; the share of zeros in it, and how far they reach in long ones.
_RECTIFIED_SHARE, _ZEROED, _LONG, _NEAR_ZERO = 4, 0.85, 512, 32
#: Standard deviation of "tails": activations bend, saturate and leave their polynomials between 2 and 10.
_TAILS = 3.5
#: Share of zeros of each sign in "tails".
_ZEROS = 0.01
#: Scales of the vanishing entries of "faint", in this order: about the root of what norms add (1e-5, 1e-6, 1e-12),
#: and below what a scale or a length is often kept from (1e-8); half precision makes that a zero.
_FAINT = (1e-4, 0.0, 1e-3, 1e-5, 1e-6, 1e-2, 1e-9)
#: Those of "small": no zeros, and none that are few different values in half precision.
_SMALL = {False: (1e-9, 1e-4, 1e-3, 1e-5, 1e-6, 1e-2), True: (1e-4, 1e-3, 1e-2)}
#: One entry in so many.
_FAINT_SHARE = 6
#: "faded": of the lines along each dimension, and of the slices across it, one in so many nearly vanishes, to one of
#: these scales: a single slice has one of them, so none is smaller than most constants are kept from zero by.
_FADED_SHARE, _FEWEST_SLICES = 16, 4
_FADED = {False: (1e-4, 1e-3, 1e-5, 1e-6), True: (1e-4, 1e-3, 1e-2)}
#: One entry in so many along each dimension but the leading one is below zero in "lowered".
_LOWERED_SHARE = 4
#: How many elements at either end of a tensor are far out in "sparse"; and the first one of one row in so many, the
#: last one of as many others, and so on, if that is not more than one element in so many.
ENDS, _ENDS_SHARE, _ENDS_LEAST = 3, 1 / 4, 256
#: How far apart the ends of "halves" lie.
_END_PERIOD = 8
#: A permutation of so many takes no time.
_FEW_ROWS = 4096
#: How far, at least, and for each element of the tensor at its ends: a mean of the magnitudes of n may be off by 7e-6 n
#: of their standard deviations.
_FAR_OUT, _FAR_OUT_EACH = 2.0, 2e-5
#: How far one of n elements is, for their root: its square is half of what theirs come to in all, whatever n. A
#: variance whose data are taken relative to that element has lost its digits then.
_FAR_OUT_ROOT = 0.15
#: How far a spike is, at least, and in "bumped" at most, in standard deviations.
_SPIKE, _BUMP = 3.0, 20.0
#: Standard deviation of "peaks", in those of the draw.
_PEAKS = 100.0
#: In bfloat16 so few are about so large, beyond what fp16 holds, which has more digits; more of them would be scores of
#: attention that are the same but for rounding.
_BEYOND_HALF_COUNT, _BEYOND_HALF = 4, 3e5
#: The share of "sparse" that is as rounding leaves a zero, and how much that is of the deviation.
_LEFT_SHARE, _LEFT = 0.03, 2.0**-25
#: The share of "exact" that is.
_EXACT_SHARE = 0.15
#: "combed": how far apart teeth are, how far out they lie, and what is left of the values between them.
_COMBS, _TOOTH, _BETWEEN_TEETH = (2, 3, 4, 5, 7, 8, 10, 16, 20, 32, 64, 100, 128), 2.0, 0.1
#: How many different values there are in "ties".
_TIES = 7
#: "deep": minus a normal's size, and this much more, times so much; in each type a share of what it holds at most.
_DEEPEST, _DEEP, _DEEPER = 0.1, 1e5, 8.0
#: Mean of "hoisted", in standard deviations: there bfloat16 still tells some twenty values apart.
_HOISTED = 32.0
#: Standard deviation of "calm", in those of the draw.
CALM = 0.01
#: Factor of "tiny", of which each power is exact, and a few are far from where fp32 ends.
TINY = 2.0**-20
#: The same, under weights that add nothing.
UNBIASED = "unbiased"
#: "below" and "above": so many deviations from zero, and as many more at most, each dimension having its share of them.
_NEAREST, _FARTHER = 3.5, 5.0
#: "grouped": how far from zero groups lie, at least and at most, and how far apart their members.
_GROUPS, _WITHIN = (1.5, 4.5), 0.5

#: "parted": half of how far the heaps are apart, in deviations.
_APART = 5.0
#: "climbing": how far rows reach, from and to, and how many times as far as they were drawn at most.
_CLIMBS, _CLIMB = (60.0, 300.0), 8.0
#: By so many deviations one place of each row is ahead in "leading".
_AHEAD = 3.0
#: "biased": so many deviations entries lie to either side at most: there gates are neither open nor shut, and what is
#: left of the one that is open the longest does not hide what goes wrong in others.
_BIASED = (1.5, 3.5)
#: "sinks": how far from each other rows lie, and the one of them that stands out from all, at least and at most.
_BESIDE_EACH_OTHER, _STANDING_OUT = 0.05, (3.0, 24.0)


@dataclass(frozen=True, slots=True)
class Draw:
    """What a family is drawn with: ``values``, fp32 and yet to be filled, of the input's shape; its own standard
    deviation; the dtype that they will have; how many of those deviations "large" and "shifted" are away; and a
    generator for what all inputs of a call have in common."""

    values: Tensor
    scale: float
    dtype: torch.dtype
    spread: tuple[float, float]
    generator: torch.Generator
    common: torch.Generator

    @property
    def half(self) -> bool:
        return self.dtype in LOW_PRECISION


def generic(family: str, draw: Draw) -> Tensor:
    """``draw.values`` as numbers of ``family``; those of a normal distribution where nothing else is said of it."""
    if family.startswith(HALVES):
        return _between_levels(draw.values, draw.scale, int(family.removeprefix(HALVES)), draw.generator)
    if family in _DRAWN:
        return _DRAWN[family](draw)
    draw.values.normal_(generator=draw.generator).mul_(draw.scale)
    return _FROM_NORMAL[family](draw) if family in _FROM_NORMAL else draw.values


def _uniform(draw: Draw) -> Tensor:
    return draw.values.uniform_(-1.0, 1.0, generator=draw.generator).mul_(math.sqrt(3.0) * draw.scale)


def _whole(draw: Draw) -> Tensor:
    """Whole numbers times a power of two: the products of two need more bits than TF32, half or bfloat16 keep."""
    top = 2047 if draw.dtype == torch.float16 else 255 if draw.half else 4095
    step = 2.0 ** round(math.log2(2.0 * draw.scale / top))
    return draw.values.random_(-top, top + 1, generator=draw.generator).mul_(step)


def _far_below(draw: Draw) -> Tensor:
    """All below zero, and below what a maximum is often begun with for -inf."""
    deep = min(max(_DEEP, draw.spread[0] * draw.scale), torch.finfo(draw.dtype).max / _DEEPER)
    return draw.values.div_(draw.scale).abs_().add_(_DEEPEST).mul_(-deep)


def _shifted(draw: Draw) -> Tensor:
    return draw.values.add_(draw.spread[1] * draw.scale)


def _at_levels(draw: Draw) -> Tensor:
    offsets = _offsets(draw.values, draw.generator, draw.common)
    return draw.values.add_(offsets.mul_(draw.spread[1] * draw.scale))


def _leading(draw: Draw) -> Tensor:
    """One place of all rows lies ahead by a few deviations."""
    values = draw.values
    if values.dim() < 2 or not values.numel():
        return values
    place = torch.randint(values.shape[-1], (), generator=draw.generator, device=values.device)
    values.select(-1, int(place)).add_(_AHEAD * draw.scale)
    return values


def _parted(draw: Draw) -> Tensor:
    """Each row is two heaps far apart, of which the upper one holds a share of it that is the row's own: who looks for
    what is large among the elements beyond some deviations of the mean finds more of them there than of any normal
    ones, or none."""
    values = draw.values
    if not values.dim() or not values.numel():
        return values
    share = torch.rand((*values.shape[:-1], 1), generator=draw.generator, device=values.device)
    upper = torch.rand(values.shape, generator=draw.generator, device=values.device) < share
    return values.add_(torch.where(upper, _APART, -_APART) * draw.scale)


def _climbing(draw: Draw) -> Tensor:
    """Some rows rise from zero, by and by and far, others fall to it, and others are in no order: none of it is of two
    signs, so that sums round no more than of shifted ones. Half of them reach as far as makes exponentials overflow,
    half some times as far as what was drawn."""
    values = _sorted_rows(draw.values, draw.generator)
    if not values.dim() or not values.numel():
        return values
    values.sub_(values.amin(-1, keepdim=True))
    chance, side = torch.rand((2, *values.shape[:-1], 1), generator=draw.generator, device=values.device)
    reach = (math.log(_CLIMBS[0]) + chance * math.log(_CLIMBS[1] / _CLIMBS[0])).exp()
    most = values.amax(-1, keepdim=True).clamp_min(torch.finfo(values.dtype).tiny)
    return values.mul_(torch.where(side < 1 / 2, reach / most, 1 + chance * (_CLIMB - 1)))


def _biased(draw: Draw) -> Tensor:
    """What lies along one dimension, the last but one as a rule, or along the last two, has a level of its own by some
    deviations from zero, as channels behind a bias have: gates that are nearly open, and stay so for a whole sequence.
    "levels" lie further apart, and rows as a whole on them."""
    values = draw.values
    dims, chance = values.dim(), int(torch.randint(8 * 12, (), generator=draw.common, device=draw.common.device))
    usual, other = max(0, dims - 2), chance // 8 % max(1, dims)
    along = {usual if chance % 8 else other, *([dims - 1] if dims >= 4 and chance // 8 % 2 else [])}
    shape = [1 if dim in along else size for dim, size in enumerate(values.shape)]
    far = torch.empty((), device=draw.common.device).uniform_(*_BIASED, generator=draw.common)
    level = torch.empty(shape, device=values.device).uniform_(-1.0, 1.0, generator=draw.generator)
    return values.add_(level.mul_(float(far) * draw.scale))


def _sinks(draw: Draw) -> Tensor:
    """Rows are nearly alike but for one, the same in all inputs of a call, which stands out from little to far: its
    score is ahead of all others' by anything, and those come to something together however little each of them is."""
    values = draw.values
    if values.dim() < 2 or values.shape[-2] < 2 or not values.numel():
        return values
    place = int(torch.randint(1 << 30, (), generator=draw.common, device=draw.common.device)) % values.shape[-2]
    out = values.select(-2, place).clone()
    values.mul_(_BESIDE_EACH_OTHER).add_(
        torch.empty_like(values[..., :1, :]).normal_(generator=draw.generator) * draw.scale
    )
    least, most = _STANDING_OUT
    # One of each step of the way in some order, so that none is left out where there are but some.
    steps = torch.rand(out.shape[:-1], generator=draw.generator, device=values.device).flatten().argsort()
    chance = torch.rand(len(steps), generator=draw.generator, device=values.device)
    far = (math.log(least) + (steps + chance) / len(steps) * math.log(min(most, draw.spread[0]) / least)).exp()
    values.select(-2, place).copy_(out * far.view(*out.shape[:-1], 1))
    return values


def _on_one_side(draw: Draw, side: float) -> Tensor:
    """All lies to one ``side`` of zero, by some deviations, at a level that differs along every dimension: gates that
    are nearly shut, or open, for all of a sequence, as those are that a network is to remember by."""
    level = torch.full((), _NEAREST, device=draw.values.device)
    for dim, size in enumerate(draw.values.shape):
        shape = [size if other == dim else 1 for other in range(draw.values.dim())]
        share = torch.rand(shape, generator=draw.generator, device=draw.values.device)
        level = level + share * (_FARTHER / draw.values.dim())
    return draw.values.mul_(_WITHIN).add_(level * (side * draw.scale))


def _grouped(draw: Draw) -> Tensor:
    """Rows are of two groups, and so are columns, the same ones in all inputs with as many: entries lie to one side of
    zero where the two are of a kind, and to the other else, in each of the leading entries so far as is its own. Of
    scores such are blocks, between which hardly anything passes."""
    values = draw.values
    if values.dim() < 2 or not values.numel():
        return values
    far = torch.empty((*values.shape[:-2], 1, 1), device=values.device).uniform_(*_GROUPS, generator=draw.generator)
    seed = int(torch.randint(1 << 30, (), generator=draw.common, device=draw.common.device))
    columns = torch.Generator(device=values.device).manual_seed(seed)
    kinds = [
        torch.randint(2, (size,), generator=generator, device=values.device) * 2.0 - 1.0
        for size, generator in ((values.shape[-2], draw.generator), (values.shape[-1], columns))
    ]
    return values.mul_(_WITHIN).add_(kinds[0][:, None] * kinds[1] * (far * draw.scale))


def _lowered(draw: Draw) -> Tensor:
    return draw.values.add_(_signs(draw.values, draw.dtype, draw.generator).mul_(draw.spread[1] * draw.scale))


def _peaked(draw: Draw) -> Tensor:
    """Large in half types; in bfloat16 a few beyond what fp16 holds."""
    values = draw.values.mul_(_PEAKS if draw.dtype in (torch.float16, torch.bfloat16) else 1.0)
    if draw.dtype != torch.bfloat16:
        return values
    factors = torch.ones_like(values).view(-1)
    places = torch.randint(len(factors), (_BEYOND_HALF_COUNT,), generator=draw.generator, device=values.device)
    factors.index_fill_(0, places, max(1.0, _BEYOND_HALF / (_PEAKS * draw.scale)))
    return values.mul_(factors.view(values.shape))


def _vanishing(draw: Draw, sizes: Sequence[float]) -> Tensor:
    """Some entries are of these ``sizes``. Of a sum of minus zeros the sign is that of whatever it is begun with:
    zeros are plain ones, "tails" has the others one by one."""
    factors = _faintness(draw.values, draw.scale, sizes, draw.generator, draw.common)
    return draw.values.mul_(factors).add_(0.0)


def _faded(draw: Draw) -> Tensor:
    """Along each dimension some lines nearly vanish, and across it some slices: whatever a norm runs over (the channels
    of one pixel, one channel of all samples), there is one that is next to nothing. "faint" has leading entries, which
    are a matrix's rows: of one, columns do here.
    """
    values, sizes = draw.values, _FADED[draw.dtype == torch.float16]
    shape = values.shape if values.dim() > 1 and values.numel() else ()
    for dim, size in enumerate(shape[: 1 if len(shape) == 2 else None]):
        if size > 1:
            line = [1 if at == dim else other for at, other in enumerate(shape)]
            values.mul_(_some_small(math.prod(line), sizes, draw).reshape(line))
        if dim and size >= _FEWEST_SLICES:
            values.mul_(_some_small(size, sizes, draw).reshape([size if at == dim else 1 for at in range(len(shape))]))
    return values.add_(0.0)


def _some_small(count: int, sizes: Sequence[float], draw: Draw) -> Tensor:
    """``count`` factors: one for most, and what makes the draw's scale one of ``sizes`` for some, but never for all."""
    device = draw.values.device
    keys = torch.rand(count, generator=draw.common, device=device)
    chosen = keys < 1 / _FADED_SHARE
    chosen[keys.argmin()] = True
    chosen[keys.argmax()] = False
    which = torch.randint(len(sizes), (count,), generator=draw.generator, device=device)
    small = torch.tensor(sizes, device=device)[which].div(draw.scale)
    return torch.where(chosen, small, small.new_ones(()))


def _sparse(draw: Draw) -> Tensor:
    """Nine in ten are small but not equal: equal addends make an honest serial sum drift one way. A few are next to
    nothing, as what rounding leaves of a zero is (the cosine of a right angle)."""
    chance = torch.empty_like(draw.values).uniform_(generator=draw.generator)
    draw.values.mul_(torch.where(chance > 0.1, 0.1, torch.where(chance < _LEFT_SHARE, _LEFT, 1.0)))
    return _with_far_ends(draw.values, draw.scale, draw.spread[0], draw.generator)


def _rectified(values: Tensor, generator: torch.Generator) -> Tensor:
    """One row in so many is as a ReLU leaves it, most of it zeros; a long one at its ends, its middle and its quarters
    alone, as sums of equal addends that come one after another drift, honest ones, too."""
    rows = values.reshape(-1, values.shape[-1]) if values.dim() else values.reshape(1, 1)
    chosen = torch.rand(len(rows), generator=generator, device=values.device).argsort()
    chosen = chosen[: max(1, len(rows) // _RECTIFIED_SHARE)]
    size = rows.shape[-1]
    if size > _LONG:
        kept = (
            (torch.arange(size, device=values.device) * 4 / (size - 1) + 0.5) % 1 - 0.5
        ).abs() * size > _NEAR_ZERO * 4
    else:
        kept = torch.rand(len(chosen), size, generator=generator, device=values.device) >= _ZEROED
        # What has no length may have no answer.
        left = torch.randint(size, (len(chosen), 1), generator=generator, device=values.device)
        kept.scatter_(1, left, torch.ones_like(left, dtype=torch.bool))
    return rows.index_copy_(0, chosen, rows[chosen] * kept).view(values.shape)


def _spiked(values: Tensor, scale: float, most: float, generator: torch.Generator) -> Tensor:
    """One element of each row lies between a few and ``most`` deviations from zero: the place, the side and how far, by
    its logarithm, are each row's own. Two lie as far as any may, so that no draw is bearable where others are not."""
    rows = values.view(-1, values.shape[-1]) if values.dim() else values.view(1, 1)
    if not rows.numel():
        return values
    places = torch.randint(rows.shape[1], (len(rows), 1), generator=generator, device=values.device)
    far = torch.empty_like(rows[:, :1]).uniform_(math.log(_SPIKE), math.log(most), generator=generator).exp_()
    sides = torch.randint(2, far.shape, generator=generator, device=values.device) * 2 - 1
    rows.scatter_(1, places, far * sides * scale)
    one = int(torch.randint(len(rows), (), generator=generator, device=values.device))
    other, beside = (one + 1) % len(rows), int(len(rows) == 1)
    rows[one, places[one, 0]] = most * scale
    rows[other, (places[other, 0] + beside) % rows.shape[1]] = -most * scale
    return values


def _with_exact(values: Tensor, generator: torch.Generator) -> Tensor:
    """Some elements are exactly zero, one, or minus one."""
    chance = torch.empty_like(values).uniform_(generator=generator)
    exact = torch.randint(-1, 2, values.shape, generator=generator, device=values.device)
    return torch.where(chance < _EXACT_SHARE, exact.to(values.dtype), values)


def _with_far_ends(values: Tensor, scale: float, most: float, generator: torch.Generator) -> Tensor:
    """The first and the last elements, and one of each of some samples, channels and rows, so far out that none of
    them can be left out, and no further than "large" is (``most``)."""
    flat = values.view(-1)
    # Of a sample the first one is its first row's as well: that of the most counts.
    for dim in range(values.dim() - 1, 0, -1) if values.numel() else ():
        shape, rows = values.shape[dim:], values.view(-1, math.prod(values.shape[dim:]))
        share = min(_ENDS_SHARE, rows.shape[1] / _ENDS_LEAST)
        turns, least = _turns(len(rows), 2 * int(1 / share), generator, values.device), math.sqrt(rows.shape[1])
        for number, place in enumerate(_places(shape)):
            far = _far(rows[:, place], _FAR_OUT_ROOT * least, scale, most, generator)
            # At each place to either side, as far as there are rows: a maximum tells of one of them alone.
            far = far.abs() * (turns % 2 * 2 - 1)
            rows[:, place] = torch.where(turns // 2 == number, far, rows[:, place])
    for end in (flat[:ENDS], flat[-ENDS:]):
        end.copy_(_far(end, _FAR_OUT_EACH * len(flat), scale, most, generator))
    return values


def _turns(count: int, period: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """A number below ``period`` for each of so many rows; of few rows each has another one, in a drawn order."""
    if count > _FEW_ROWS:
        return torch.randint(period, (count,), generator=generator, device=device, dtype=torch.int16)
    offset = torch.randint(period, (), generator=generator, device=device)
    return (torch.randperm(count, generator=generator, device=device) + offset).remainder(period)


def _places(shape: Sequence[int]) -> list[int]:
    """What comes first to mind: the first and the last element, the one in the middle of the memory, and that of all
    dimensions."""
    centre = 0
    for size in shape:
        centre = centre * size + size // 2
    count = math.prod(shape)
    return list(dict.fromkeys((0, count - 1, count // 2, centre)))


def _far(values: Tensor, out: float, scale: float, most: float, generator: torch.Generator) -> Tensor:
    """As many of either sign, ``out`` times as large as ``scale`` at least and none of them near zero; two inputs have
    others, whose difference is as large."""
    drawn = torch.randn(values.shape, generator=generator, device=values.device)
    return (drawn + torch.where(drawn < 0, -1.0, 1.0)) * min(most, max(_FAR_OUT, out)) * scale


def _tied(values: Tensor, generator: torch.Generator) -> Tensor:
    """Few different values, zeros of both signs among them, which are equal; of leading entries, a third has no value
    above them and a third none below."""
    few = values.flatten()[:_TIES].clone()
    few[-2:] = torch.tensor([0.0, -0.0], device=values.device)[-len(few) :]
    tied = few[torch.randint(len(few), values.shape, generator=generator, device=values.device)]
    count = values.shape[0] if values.dim() > 1 else 1
    sides = torch.randint(3, (count,), generator=generator, device=values.device)
    sides = sides.reshape(-1, *(1,) * (values.dim() - 1)) if values.dim() else sides[0]
    zero = tied == 0  # abs would take their signs
    return torch.where(zero | (sides == 0), tied, torch.where(sides == 1, tied.abs(), -tied.abs()))


def _combed(draw: Draw) -> Tensor:
    """Of each row some elements at equal distances, or short runs of them, are larger than the others, and lie to one
    side of zero in two rows of three: who looks at every so many sees them alone, or none of them. Half of the rows
    have single ones, and half have the first of all among them, with which samples mostly begin."""
    rows = draw.values.view(-1, draw.values.shape[-1]) if draw.values.dim() else draw.values.view(1, 1)
    if not rows.numel():
        return draw.values

    def of_each_row(most: Tensor | int) -> Tensor:
        chance = torch.rand((len(rows), 1), generator=draw.generator, device=rows.device)
        return (chance * most).long()

    periods = torch.tensor(_COMBS, device=rows.device)[of_each_row(len(_COMBS))]
    widths, offsets = 1 + of_each_row(2) * of_each_row(periods // 2), of_each_row(2) * of_each_row(periods)
    teeth = (torch.arange(rows.shape[1], device=rows.device) + offsets).remainder(periods) < widths
    sides = (of_each_row(3) - 1) * (_TOOTH * draw.scale)
    return torch.where(teeth, rows + sides, rows * _BETWEEN_TEETH).view(draw.values.shape)


def _alike(values: Tensor, generator: torch.Generator, common: torch.Generator) -> Tensor:
    """The first half of some rows is that of the row before, and of others zero, and others are all of the row before,
    in another order, at least one of each kind where there is room; rows of one dimension alone or of all but the
    leading ones, the same in all inputs of a call (``common``)."""
    inner = int(torch.randint(1 << 30, (), generator=common, device=common.device))
    size = math.prod(values.shape[-1 - inner % max(1, values.dim() - 1) :]) if values.numel() else 0
    if size < 2:
        return values
    rows, half = values.view(-1, size), size // 2
    kinds = torch.randint(4, (len(rows), 1), generator=generator, device=values.device)
    kinds = torch.where(kinds.roll(-1, 0) == 3, 2, kinds)  # whom another one repeats stays as it is
    some, every = (torch.randperm(n, generator=generator, device=values.device) for n in (len(rows) // 2, 3))
    places, after = 1 + 2 * some[:3], (2 + 2 * some[:3]) % len(rows)
    kinds[after] = torch.where(kinds[after] == 3, 2, kinds[after])
    kinds[places - 1] = 2
    kinds[places, 0] = torch.tensor([0, 1, 3], device=values.device)[every[: len(places)]]
    before = rows.roll(1, 0)
    turned = before.roll(1 + inner % (size - 1), 1)
    rows[:, :half] = torch.where(kinds == 0, before[:, :half], torch.where(kinds == 1, 0.0, rows[:, :half]))
    return rows.copy_(torch.where(kinds == 3, turned, rows)).view(values.shape)


def _offsets(values: Tensor, generator: torch.Generator, common: torch.Generator) -> Tensor:
    """What slices lie about, between -1 and 1: some leading entries are a slice as they are, others fall into one for
    each entry of the first two dimensions, and so on down to rows; the same ones in all inputs (``common``)."""
    offsets = torch.zeros_like(values)
    if values.dim() < 2 or not values.numel():
        return offsets
    first = int(torch.randint(1 << 30, (), generator=common, device=common.device))
    turns = torch.arange(len(values), device=values.device).add(first).remainder(values.dim() - 1)
    for inner in range(1, values.dim()):
        shape = (*values.shape[:inner], *(1,) * (values.dim() - inner))
        level = torch.empty(shape, device=values.device).uniform_(-1.0, 1.0, generator=generator)
        chosen = (turns == inner - 1).reshape(-1, *(1,) * (values.dim() - 1))
        offsets = torch.where(chosen, level, offsets)
    return offsets


def _sorted_rows(values: Tensor, generator: torch.Generator) -> Tensor:
    """Some rows of the last dimension rise, others fall, and others are as they were drawn."""
    if values.dim() == 0:
        return values
    kinds = torch.randint(3, (*values.shape[:-1], 1), generator=generator, device=values.device)
    rising = values.sort(dim=-1).values
    return torch.where(kinds == 0, values, torch.where(kinds == 1, rising, rising.flip(-1)))


def _between_levels(values: Tensor, scale: float, most: int, generator: torch.Generator) -> Tensor:
    """Whole numbers from ``-most`` to ``most``, times a power of two, both ends of which occur within each eight
    elements along every dimension."""
    values.random_(-most, most + 1, generator=generator)
    places = torch.zeros((), dtype=torch.int64, device=values.device)
    for dim, size in enumerate(values.shape):
        along = torch.arange(size, device=values.device)
        places = places + along.reshape(-1, *(1,) * (values.dim() - 1 - dim))
    turn = places.remainder(_END_PERIOD)
    values = torch.where(turn == 0, float(most), torch.where(turn == _END_PERIOD // 2, -float(most), values))
    return values.mul_(2.0 ** round(math.log2(_TAILS * scale / most)))


def _signs(values: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """-1 for half of the leading entries and for a few along each other dimension, since whatever a maximum runs over,
    all of it must lie below zero once; 1 for the others: a scale for what nearly vanishes below zero.

    Without one, half types would be judged by the last digits of an activation's tail; a single entry of theirs stays.
    """
    count = values.shape[0] if values.dim() > 1 else 1
    if count < 2:
        return values.new_zeros(()) if dtype in LOW_PRECISION else values.new_full((), -1.0)
    lowered = torch.zeros((), dtype=torch.bool, device=values.device)
    for dim, size in enumerate(values.shape):
        few = (size + 1) // 2 if dim == 0 else min(size - 1, max(1, size // _LOWERED_SHARE))
        order = torch.rand(size, generator=generator, device=values.device).argsort()
        lowered = lowered | (order < few).reshape(-1, *(1,) * (values.dim() - 1 - dim))
    return torch.where(lowered, -1.0, 1.0).to(values.dtype)


def _faintness(
    values: Tensor, scale: float, sizes: Sequence[float], generator: torch.Generator, common: torch.Generator
) -> Tensor:
    """Factors that let a few of the leading entries, or of those of the first two dimensions, nearly vanish. The others
    keep their size, so that what is no quotient is not judged by its last digits; and they are many: equal addends make
    a serial sum drift one way.

    The first one is among them, by which some judge all; and half of the few are the same ones in all inputs of so many
    entries: the sum of two vanishes only where both do.
    """
    inner = int(torch.randint(1 << 30, (), generator=common, device=common.device))
    leading = values.shape[: 1 + inner % 2 if values.dim() > 2 else 1] if values.dim() > 1 else ()
    count = math.prod(leading)
    if count < 2:
        return values.new_ones(())
    few = max(min(2, count - 1), count // _FAINT_SHARE)
    keys = torch.rand(count, generator=common, device=values.device)
    keys[0] = -1.0
    together = keys.argsort()[: (few + 1) // 2]
    keys = torch.rand(count, generator=generator, device=values.device).index_fill_(0, together, 2.0)
    chosen = torch.cat([together, keys.argsort()[: few // 2]])
    scales = torch.tensor(sizes, device=values.device).repeat(-(-few // len(sizes)))[:few]
    factors = values.new_ones(count).index_copy_(0, chosen, scales.div(scale))
    return factors.reshape(*leading, *(1,) * (values.dim() - len(leading)))


def _with_zeros(values: Tensor, generator: torch.Generator) -> Tensor:
    """A few exact zeros of either sign."""
    chance = torch.empty_like(values).uniform_(generator=generator)
    values.masked_fill_(chance < 2 * _ZEROS, 0.0)
    return values.masked_fill_(chance < _ZEROS, -0.0)


#: Families that are no normal numbers changed.
_DRAWN: Mapping[str, Callable[[Draw], Tensor]] = {"uniform": _uniform, "integer": _whole}

#: Families by what becomes of normal numbers of the draw's deviation.
_FROM_NORMAL: Mapping[str, Callable[[Draw], Tensor]] = {
    "above": lambda draw: _on_one_side(draw, 1.0),
    "afar": _shifted,  # beside masks that begin late
    "alike": lambda draw: _alike(draw.values, draw.generator, draw.common),
    "below": lambda draw: _on_one_side(draw, -1.0),
    "biased": _biased,
    "bumped": lambda draw: _spiked(draw.values, draw.scale, _BUMP, draw.generator),
    "combed": _combed,
    "calm": lambda draw: draw.values.mul_(CALM),
    "deep": _far_below,
    "empty": lambda draw: draw.values.zero_(),
    "faded": _faded,
    "faint": lambda draw: _vanishing(draw, _FAINT),
    "large": lambda draw: draw.values.mul_(draw.spread[0]),
    "leading": _leading,
    "parted": _parted,
    "climbing": _climbing,
    "levels": _at_levels,
    "grouped": _grouped,
    "hoisted": lambda draw: draw.values.add_(_HOISTED * draw.scale),
    "lowered": _lowered,
    "ordered": lambda draw: _sorted_rows(draw.values, draw.generator),
    "padded": lambda draw: _vanishing(draw, (0.0,)),
    "peaks": _peaked,
    "raised": lambda draw: draw.values.abs_(),
    "rectified": lambda draw: _rectified(draw.values, draw.generator),
    "shifted": _shifted,
    "sinks": _sinks,
    "small": lambda draw: _vanishing(draw, _SMALL[draw.dtype == torch.float16]),
    "sparse": _sparse,
    "exact": lambda draw: _with_exact(draw.values, draw.generator),
    "spiked": lambda draw: _spiked(draw.values, draw.scale, draw.spread[0], draw.generator),
    "sunk": lambda draw: draw.values.abs_().mul_(-1.0),
    "tails": lambda draw: _with_zeros(draw.values.mul_(_TAILS / draw.scale), draw.generator),
    "tiny": lambda draw: draw.values.mul_(TINY),
    "ties": lambda draw: _tied(draw.values, draw.generator),
    UNBIASED: lambda draw: draw.values.mul_(TINY),
}
