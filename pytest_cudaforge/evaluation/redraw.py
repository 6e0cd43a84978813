"""New values that keep a target's meaning: redrawn inputs and re-randomised weights. In the oracle's process only.

Two draws of an input show its structure. A generic dense float input is redrawn from several families, because one
distribution is never enough (a one-pass variance shows only on shifted inputs, a softmax without max only on large
ones). A structured one changes only its seed: a pattern of zeros (masks, triangles, diagonals, padding), one sign,
slices that sum to one or have unit length (probabilities, directions, rotations), integers and other codes of few
values (labels, lengths, indices as floats), sorted values (which may lie as dense as they like), symmetric matrices
(positive-definite ones among them).
Values in [0, 1] that show no other structure count as generic where the reference takes others (see the subject); other
values of one sign keep the range of their draw. Complex numbers are what their parts are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

__all__ = [
    *(
        "FAMILIES",
        "HALVES",
        "LEVELS",
        "HABITS",
        "INTEGERS",
        "REDRAWN",
        "SHORTCUTS",
        "Structure",
        "between",
        "exchange_weights",
        "exchangeable_weights",
        "exchangeable",
        "exchanged",
        "exchanged_integers",
        "exchanged_mask",
        "families_of",
        "looks_normal",
        "nudge_weights",
        "nudged_values",
        "ordered_values",
        "redraw",
        "rerandomise",
    ),
    *("structure_of", "structures_of", "takes_on", "unravelled", "with_values_of"),
]

#: Pairs of elements that change places where only few of them shall.
EXCHANGES = 4
#: By how much of itself, or twice that.
_NUDGE = 1e-5
#: Integers of so few elements may be sizes, lengths or choices.
_LEAST_EXCHANGED = 32
#: Pairs of them: answers that count or add up take some changes for none.
_EXCHANGED_INTEGERS = 16
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
#: Between which logarithms running variances are drawn: a layer behind few or large activations has such.
_LOG_VARIANCES = (-2.0, 2.0)

#: generic: any finite values will do · unit: keep [0, 1] · signed: keep the draw's range · drawn: only the user's
#: function may draw it, as it may the others, of which however something may be missing: gaps, NaN for what was not
#: measured, barred, -inf for what does not count, mask, which says that, classes, integers of few values, bytes, of all
#: that they can be, pattern, a mask, or -inf beside others, that is the same in every draw, and sorted values, which
#: lie as dense as they happen to
Structure = Literal[
    "generic", "unit", "signed", "drawn", "gaps", "barred", "mask", "pattern", "classes", "bytes", "sorted"
]
#: Those of which any element may have another value.
REDRAWN: frozenset[Structure] = frozenset({"generic", "unit", "signed"})

FAMILIES = (
    *("normal", "uniform", "shifted", "lowered", "large", "sparse"),
    *(
        "tails",
        "integer",
        "faint",
        "small",
        "peaks",
        "edges",
        "ties",
        "alike",
        "rectified",
        "spiked",
        "bumped",
        "levels",
        "ordered",
        "padded",
        "deep",
        "empty",
    ),
)

#: Whole numbers up to these, times a power of two: where a reference rounds to so many levels, by a scale or a range
#: that it takes from the values, half of them lie between two levels, and nothing is rounded before. The name of the
#: family has the number behind it.
HALVES = "halves"
LEVELS = (254, 255, 15, 14, 256, 510, 30, 31, 62, 63, 6, 7, 2, 3, 127)

#: Values that leave an operation nothing to do: none out of bounds, all of one sign. Who then returns its input itself
#: gives the caller something else than usual; of what the values come to, the families say more.
SHORTCUTS = ("calm", "raised", "sunk")

_SAMPLE = 1 << 21
#: Leading entries of the other dimensions looked at where a structure lies along one, and elements in all.
_SLICES, _SLICED_ELEMENTS = 64, 1 << 22
#: An input of few values is a code: labels, levels, a lattice. Half types and narrower have few values by nature.
_FEW_VALUES, _MANY_ELEMENTS = 256, 4096
_LOW_PRECISION = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


def structures_of(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Structure]:
    """The structure of every tensor among the leaves of two draws of a call. Where another leaf may follow from a
    tensor's gaps, bars or order (a mask of its shape, where its values had been), a mask (another one, integers) or
    classes (other integers), it is as "drawn"."""
    pairs = ((path, leaf, second.get(path)) for path, leaf in first.items())
    tensors = {path: (a, b) for path, a, b in pairs if isinstance(a, Tensor) and isinstance(b, Tensor)}
    found = {path: structure_of(a, b) for path, (a, b) in tensors.items()}
    masks = [path for path, structure in found.items() if structure in ("mask", "pattern")]
    integers = [path for path, (a, _) in tensors.items() if a.dtype in INTEGERS and a.numel() > 1]
    for path, structure in tuple(found.items()):
        shape = tensors[path][0].shape
        alike = [other for other in found if other != path and tensors[other][0].shape == shape]
        masked = structure in ("gaps", "barred", "pattern") and any(found[other] not in REDRAWN for other in alike)
        masked = masked or (structure == "sorted" and any(found[other] not in REDRAWN for other in alike))
        told = (
            structure in ("mask", "pattern")
            and tensors[path][0].dtype == torch.bool
            and (integers or len(masks) > 1 or any(found[o] not in REDRAWN for o in alike))
        )
        if masked or told or (structure == "classes" and len(integers) > 1):
            found[path] = "drawn"
    return found


def families_of(structures: Collection[Structure]) -> tuple[str, ...]:
    """The families worth drawing, those first that show what nothing else does: a call of gigabytes gets only three.

    shifted shows a one-pass variance, large a missing max and other overflows, integer every dropped, rounded or
    half-precision term, since all addends are alike and need their bits; lowered has entries along every dimension
    (samples, channels, columns) without any positive value, which show a maximum that starts at 0; sparse is for terms
    left out by a sample, or at either end, where those few outweigh rounding in however long a sum; tails reaches where
    activations bend whatever the scale of the draw, and has exact zeros of both signs; faint has entries that nearly
    or wholly vanish, which show a small constant that keeps a division finite, and small none that wholly vanish, for
    references that take no such; peaks, for half types alone, overflow them where they are squared or added up, and
    fp16 where it stands for bfloat16; edges, for answers that are integers, has values that are those of a sorted
    tensor beside it: which side is it? ties, for answers that are places of an extreme, has so few values that most are
    equal: which of them comes first? alike has rows that begin as others do, or with zeros, empty is zero throughout,
    as calls that warm up are; rectified has rows that are mostly zeros, as a ReLU leaves them: who looks at some of a
    row takes it for empty; spiked has one element of each row further out than the others, by little or by much,
    wherever it lies, bumped by little alone, since answers to the far ones hide much; in levels rows, or whatever else
    slices are, lie far from zero each at a place of its own: who takes all relative to the first one's mean loses the
    others' digits; ordered, for references that order or search, has rows that rise or fall; padded, for gradients
    alone, entries that are zero throughout, as what fills up a batch is; deep is below what a maximum is often
    begun with for -inf. No draw happens to have what these do: floor exact zeros where values are in [0, 1],
    ceiling exact ones, missing rows and columns that are NaN throughout, shut rows that are -inf, or of a mask all
    False, stretches such rows for a part, open such that are nowhere -inf, or all True, absent fewer classes, runs
    the same one several times in a row, extremes bytes at both ends of their range alone, whose products are the
    largest.
    """
    lacking = tuple(dict.fromkeys(family for structure, family in _LACKING if structure in structures))
    unit = ("floor", "ceiling") if "unit" in structures else ()
    return (*_redrawn_families(structures), *unit, *lacking)


def _redrawn_families(structures: Collection[Structure]) -> tuple[str, ...]:
    if "generic" in structures:
        return (
            "shifted",
            "large",
            "integer",
            "lowered",
            "sparse",
            "rectified",
            "spiked",
            "tails",
            "faint",
            "small",
            "normal",
            "bumped",
            "uniform",
            "peaks",
            "edges",
            "ties",
            "alike",
            "levels",
            "ordered",
            "deep",
            "empty",
        )
    return ("shifted", "sparse") if {"unit", "signed"} & set(structures) else ()


def structure_of(first: Tensor, second: Tensor) -> Structure:
    """What two independent draws of one input leaf have in common. Booleans are "drawn"."""
    if first.numel() == 0 or first.shape != second.shape:
        return "drawn"
    if first.is_complex():
        return structure_of(*(torch.view_as_real(one.detach().resolve_conj()) for one in (first, second)))
    if first.dtype == torch.bool:
        mixed = all(bool(draw.any()) and not bool(draw.all()) for draw in (first, second))
        known: Structure = "pattern" if torch.equal(first, second) else "mask"
        return known if mixed and first.dim() > 1 else "drawn"
    if not first.is_floating_point():
        if all(draw.dtype in _BYTES and len(draw.unique()) >= _MANY_BYTES for draw in (first, second)):  # type: ignore[no-untyped-call]
            return "bytes"
        classes = not torch.equal(first, second) and _are_classes(first) and _are_classes(second)
        return "classes" if classes else "drawn"
    a, b = _sample(first), _sample(second)
    if torch.equal(a, b) or bool(a.isinf().any() or b.isinf().any()):
        known = "pattern" if torch.equal(a, b) else "barred"
        return known if _is_barred(a, b) else "drawn"
    if bool(a.isnan().any() or b.isnan().any()):
        return "gaps" if bool(a.isnan().any() and b.isnan().any()) and not bool(a.isnan().all()) else "drawn"
    if _has_zeros(a, b, first.dtype) or _is_coded(a, first.dtype):
        return "drawn"
    if any(shows(first) and shows(second) for shows in (_ordered, _symmetric, _normed)):
        return "sorted" if _skewed(first) is not first and _skewed(second) is not second else "drawn"
    low, high = float(torch.minimum(a.min(), b.min())), float(torch.maximum(a.max(), b.max()))
    if low >= 0 or high <= 0:
        return ("unit" if low >= 0 and high <= 1 else "signed") if first.dim() else "drawn"
    return "generic"


def _is_barred(a: Tensor, b: Tensor) -> bool:
    """Are some elements of both draws -inf, others each time, or is all of it the same (a mask)? Values that change
    where others never do have a structure."""
    shut = [draw == -math.inf for draw in (a, b)]
    plain = not bool(torch.cat([a, b]).isnan().any() or (torch.cat([a, b]) == math.inf).any())
    mixed = plain and all(bool(some.any()) and not bool(some.all()) for some in shut)
    return mixed and (torch.equal(a, b) or not torch.equal(*shut))


def _sample(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1) if tensor.is_contiguous() else tensor.detach().flatten()
    if flat.numel() > 2 * _SAMPLE:
        flat = torch.cat([flat[:_SAMPLE], flat[-_SAMPLE:]])
    return flat.double()


def _are_classes(tensor: Tensor) -> bool:
    """Integers of at least three values, each of them several times, and not once in every row (as places are)."""
    if tensor.dtype not in INTEGERS or not _LEAST_EXCHANGED <= tensor.numel() <= _SLICED_ELEMENTS:
        return False
    rows = tensor.reshape(-1, tensor.shape[-1])
    if tensor.shape[-1] > 1 and bool((rows.sort(-1).values.diff(dim=-1) != 0).all()):
        return False
    values = tensor.unique()  # type: ignore[no-untyped-call]
    return _FEWEST_CLASSES <= len(values) <= tensor.numel() // _CLASS_SIZE


def _has_zeros(a: Tensor, b: Tensor, dtype: torch.dtype) -> bool:
    """Many exact zeros, or few at the same places in both draws (a diagonal, a padded end)."""
    zero, other = a == 0, b == 0
    count = int(zero.sum())
    # bfloat16 has 256 equidistant values in [0, 1): one in 256 is zero by chance.
    if count > (2e-2 if dtype in _LOW_PRECISION else 1e-3) * a.numel():
        return True
    return count > 0 and 2 * int((zero & other).sum()) >= count


def _is_coded(a: Tensor, dtype: torch.dtype) -> bool:
    """Integers, one value everywhere, or so few values that they are codes."""
    if torch.equal(a, a.round()) or (a.numel() > 1 and bool((a == a[0]).all())):
        return True
    if dtype in _LOW_PRECISION or a.numel() < _MANY_ELEMENTS:
        return False
    head = a[: 1 << 16]
    steps = head.sort().values.diff()
    return 1 + int((steps > 0).sum()) <= min(_FEW_VALUES, head.numel() // 16)


def _slices(tensor: Tensor, dim: int) -> Tensor:
    """Some of the tensor as whole rows along ``dim``."""
    room, others = _SLICED_ELEMENTS / tensor.shape[dim], max(1, tensor.dim() - 1)
    leading = slice(0, max(2, min(_SLICES, int(room ** (1 / others)))))
    part = tensor.detach()[tuple(slice(None) if d == dim else leading for d in range(tensor.dim()))]
    rows = part.movedim(dim, -1).reshape(-1, tensor.shape[dim])
    return rows.float() if tensor.dtype in _LOW_PRECISION else rows


def _ordered(tensor: Tensor) -> bool:
    """Sorted along some dimension, up or down."""
    for dim in range(tensor.dim()):
        if tensor.shape[dim] >= 8:
            rows = _slices(tensor, dim)[:, :_SLICED_ELEMENTS]
            if bool((rows[:, 1:] >= rows[:, :-1]).all()) or bool((rows[:, 1:] <= rows[:, :-1]).all()):
                return True
    return False


def _symmetric(tensor: Tensor) -> bool:
    """Square matrices that equal their transpose, or its negative, up to the rounding of a product."""
    if tensor.dim() < 2 or tensor.shape[-1] != tensor.shape[-2] or tensor.shape[-1] < 2:
        return False
    matrices = tensor.detach().reshape(-1, *tensor.shape[-2:])[:4].double()
    flipped, scale = matrices.mT, 1e-5 * float(matrices.abs().max())
    return bool(((matrices - flipped).abs() <= scale).all()) or bool(((matrices + flipped).abs() <= scale).all())


def _normed(tensor: Tensor) -> bool:
    """Slices along some dimension that all sum to one, or all have unit length: both lost by any redraw."""
    tolerance = 1e-2 if tensor.dtype in _LOW_PRECISION else 1e-3
    for dim in range(tensor.dim()):
        if tensor.shape[dim] > 1:
            rows = _slices(tensor, dim)
            lengths = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float64)
            for measure in (rows.sum(dim=-1, dtype=torch.float64), lengths):
                if bool(((measure - 1).abs() < tolerance).all()):
                    return True
    return False


def looks_normal(drawn: Tensor) -> bool:
    """Are there many values, and do as many of them lie far from their mean as of a normal distribution?"""
    sample = _sample(torch.view_as_real(drawn.resolve_conj()) if drawn.is_complex() else drawn)
    if len(sample) < _FEWEST_NORMAL:
        return False
    away = (sample - sample.mean()) / sample.std()
    return abs(float(away.pow(4).mean()) - 3.0) < 0.5 and abs(float(away.pow(3).mean())) < 0.3


def redraw(
    family: str, drawn: Tensor, structure: Structure, generator: torch.Generator, shared: int | None = None
) -> Tensor:
    """``drawn`` with new values of ``family``, of the same shape, dtype, device and memory layout.

    The scale is the draw's own standard deviation. ``large`` and ``shifted`` are smaller for half types, whose range
    and precision are. ``shared``: a seed for what several inputs of a call have in common.
    """
    if structure not in REDRAWN:
        lacks = _LACKING.get((structure, family))
        return drawn if lacks is None else lacks(drawn, generator)
    if drawn.is_complex():
        parts = redraw(family, torch.view_as_real(drawn.resolve_conj()), structure, generator, shared)
        return torch.empty_like(drawn).copy_(torch.view_as_complex(parts.contiguous()))
    spread = _SPREAD[drawn.dtype in _LOW_PRECISION]
    values = torch.empty(drawn.shape, dtype=torch.float32, device=drawn.device)
    if structure == "signed":
        return _SIGNED[family](drawn, values, spread[1], generator) if family in _SIGNED else drawn
    if structure == "unit":
        values.uniform_(generator=generator)
        values = _UNIT[family](values) if family in _UNIT else values
    else:
        scale = float(_sample(drawn).std()) if drawn.numel() > 1 else 1.0
        common = None if shared is None else torch.Generator(device=drawn.device).manual_seed(shared)
        values = _generic(family, values, scale or 1.0, drawn.dtype, spread, generator, common)
    result = torch.empty_strided(drawn.shape, drawn.stride(), dtype=drawn.dtype, device=drawn.device)
    return result.copy_(values)


def _level(drawn: Tensor, values: Tensor, distance: float, generator: torch.Generator) -> Tensor:
    """About the middle of the draw's range, ``distance`` times as far from zero as its values are apart."""
    low, high = float(drawn.min()), float(drawn.max())
    middle = (low + high) / 2
    values.normal_(generator=generator).mul_(abs(middle) / distance).add_(middle).clamp_(low, high)
    return torch.empty_like(drawn).copy_(values)


def _peaked(drawn: Tensor, values: Tensor, distance: float, generator: torch.Generator) -> Tensor:
    """Near the end of the draw's range that is nearest to zero, but for the first and the last ones, which lie at the
    other end."""
    near, far = sorted((float(drawn.min()), float(drawn.max())), key=abs)
    values.uniform_(generator=generator).mul_((far - near) / distance).add_(near)
    flat = values.view(-1)
    flat[:_ENDS] = flat[-_ENDS:] = far
    return torch.empty_like(drawn).copy_(values)


_SIGNED: Mapping[str, Callable[[Tensor, Tensor, float, torch.Generator], Tensor]] = {
    "shifted": _level,
    "sparse": _peaked,
}


def _missing(drawn: Tensor, generator: torch.Generator) -> Tensor:
    """With a few entries along each dimension that are NaN throughout; a vector stays as it was drawn."""
    changed = drawn.clone()
    for dim, size in enumerate(drawn.shape):
        if size > 1 and drawn.numel() > size:
            order = torch.rand(size, generator=generator, device=drawn.device).argsort()
            changed.index_fill_(dim, order[: max(1, size // _LACKING_SHARE)], math.nan)
    return changed


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


def _shut(drawn: Tensor, generator: torch.Generator) -> Tensor:
    """With a few rows of the last dimension that are -inf throughout, or False."""
    return _with_rows(drawn, False if drawn.dtype == torch.bool else -math.inf, generator)


def _stretched(drawn: Tensor, generator: torch.Generator) -> Tensor:
    """With rows of which a stretch is -inf throughout, or False (of some True), as what is padded, or far away, is;
    something is left of each that had something."""
    if drawn.dim() < 2 or drawn.shape[-1] < _FEWEST_STRETCHED:
        return drawn
    size, device = drawn.shape[-1], drawn.device
    begins, lengths, chances = (
        torch.rand((*drawn.shape[:-1], 1), generator=generator, device=device) for _ in range(3)
    )
    begins, lengths = (begins * size / 2 + 1).floor(), (size * (1 + lengths) / 4).floor()
    places = torch.arange(size, device=device)
    within = (places >= begins) & (places < begins + lengths) & (chances < _STRETCHED)
    if drawn.dtype != torch.bool:
        shut = drawn.masked_fill(within, -math.inf)
        return torch.where((shut > -math.inf).any(-1, keepdim=True), shut, drawn)
    shut = drawn & ~within
    shut = torch.where(shut.any(-1, keepdim=True), shut, drawn)
    return torch.where(chances < _STRETCHED / 2, shut, drawn | within)


def _open(drawn: Tensor, generator: torch.Generator) -> Tensor:
    """A mask of which the first row, and a few others, are True throughout, or nowhere -inf."""
    opened = drawn | True if drawn.dtype == torch.bool else drawn.masked_fill(drawn == -math.inf, 0.0)
    changed = _with_rows(drawn, opened, generator)
    if changed is not drawn:
        changed.view(-1, changed.shape[-1])[0] = opened.view(-1, changed.shape[-1])[0]
    return changed


def _with_rows(drawn: Tensor, value: float | Tensor, generator: torch.Generator) -> Tensor:
    """With a few rows of the last dimension that are ``value`` throughout, or those of ``value``; a vector stays as it
    was drawn."""
    if drawn.numel() in (0, drawn.shape[-1]) or not drawn.is_contiguous():
        return drawn
    changed = drawn.clone()
    rows = changed.view(-1, changed.shape[-1])
    order = torch.rand(len(rows), generator=generator, device=drawn.device).argsort()
    chosen = order[: max(1, len(rows) // _LACKING_SHARE)]
    if isinstance(value, Tensor):
        rows[chosen] = value.view(rows.shape)[chosen]
    else:
        rows.index_fill_(0, chosen, value)
    return changed


def _extremes(drawn: Tensor, generator: torch.Generator) -> Tensor:
    """The least and the largest that were drawn, whatever stood there."""
    upper = torch.rand(drawn.shape, generator=generator, device=drawn.device) < 0.5
    return torch.empty_like(drawn).copy_(torch.where(upper, drawn.max(), drawn.min()))


def _absent(drawn: Tensor, generator: torch.Generator) -> Tensor:
    """Without some of the classes, in whose place stand their neighbours, so that what is sorted stays so. The
    commonest one, which may be padding, stays, and the last one, which may tell how many there are."""
    values, at, counts = drawn.unique(return_inverse=True, return_counts=True)  # type: ignore[no-untyped-call]
    chance = torch.rand(len(values), generator=generator, device=drawn.device)
    chance[counts.argmax()] = chance[-1] = 2.0
    kept = values[chance.argsort()[max(1, len(values) // _LACKING_SHARE) :]].sort().values
    neighbours = kept[(torch.searchsorted(kept, values, right=True) - 1).clamp_min(0)]
    return torch.empty_like(drawn).copy_(neighbours[at])


def _in_runs(drawn: Tensor, generator: torch.Generator) -> Tensor:
    """Many elements are what the one before is; what is sorted stays so."""
    flat = drawn.flatten()
    begins = torch.rand(len(flat), generator=generator, device=drawn.device) < _RUN_BEGINS
    begins[0] = True
    places = torch.arange(len(flat), device=drawn.device)
    return torch.empty_like(drawn).copy_(flat[places.where(begins, 0).cummax(0).values].view(drawn.shape))


def _skewed(drawn: Tensor, _: torch.Generator | None = None) -> Tensor:
    """As many sorted values with the same ends, ever further apart, as exponents are; the drawn ones where they are too
    few, or would no longer be different."""
    if drawn.dim() != 1 or len(drawn) < _FEWEST_SORTED:
        return drawn
    first, last = float(drawn[0]), float(drawn[-1])
    share = torch.linspace(0.0, 1.0, len(drawn), dtype=torch.float64, device=drawn.device)
    share = torch.expm1(_SKEW * (share if first < last else 1.0 - share)) / math.expm1(_SKEW)
    low, high = min(first, last), max(first, last)
    skewed = (low + share * (high - low)).to(drawn.dtype)
    return skewed if math.isfinite(high - low) and bool((skewed.diff() != 0).all()) else drawn


_LACKING: Mapping[tuple[Structure, str], Callable[[Tensor, torch.Generator], Tensor]] = {
    ("gaps", "missing"): _missing,
    ("barred", "shut"): _shut,
    ("mask", "shut"): _shut,
    ("barred", "stretches"): _stretched,
    ("mask", "stretches"): _stretched,
    ("mask", "open"): _open,
    ("barred", "open"): _open,
    ("pattern", "open"): _open,  # whoever always gives the same may never shut a row
    ("classes", "absent"): _absent,
    ("classes", "runs"): _in_runs,
    ("bytes", "extremes"): _extremes,
    ("sorted", "skewed"): _skewed,
}
#: One entry, and one class, in so many is missing; classes are so many and so large.
_LACKING_SHARE, _FEWEST_CLASSES, _CLASS_SIZE = 8, 3, 4
#: The share of rows with a stretch in "stretches", and the shortest such rows.
_STRETCHED, _FEWEST_STRETCHED = 0.5, 8
#: The share of elements of "runs" that begin one.
_RUN_BEGINS = 0.4
#: "rectified": one row in so many; the share of zeros in it, and how far they reach in long ones.
_RECTIFIED_SHARE, _ZEROED, _LONG, _NEAR_ZERO = 4, 0.85, 512, 32
#: "skewed": values from the one end lie by this exponent denser than those at the other.
_SKEW, _FEWEST_SORTED = 9.0, 8
#: Integers of one byte that have so many values are data, not codes.
_BYTES, _MANY_BYTES = (torch.int8, torch.uint8), 160

_UNIT: Mapping[str, Callable[[Tensor], Tensor]] = {
    "shifted": lambda values: values.mul(0.1).add(0.9),
    "sparse": lambda values: values.pow(4),
    "calm": lambda values: values.mul(_CALM),
    "floor": lambda values: values.sub(_FLOOR).clamp_min(0.0).div(1 - _FLOOR),
    "ceiling": lambda values: values.div(1 - _FLOOR).clamp_max(1.0),
}
#: The share of exact zeros in "floor", and of ones in "ceiling".
_FLOOR = 1 / 16
#: So many values tell a distribution.
_FEWEST_NORMAL = 512
#: Standard deviation of "calm", in those of the draw.
_CALM = 0.01
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
#: One entry in so many along each dimension but the leading one is below zero in "lowered".
_LOWERED_SHARE = 4
#: How many elements at either end of a tensor are far out in "sparse"; and the first one of one row in so many, the
#: last one of as many others, and so on, if that is not more than one element in so many.
_ENDS, _ENDS_SHARE, _ENDS_LEAST = 3, 1 / 4, 256
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
#: Of how many seeds weights are as trained ones: a share of them is so many times as large as the others; and a gain
#: that is constant and smaller than this is drawn around that.
_TRAINED, _OUTLIERS, _OUTLYING, _FEWEST_WEIGHTS = 0.5, 1 / 1024, 16.0, 256
_SMALL_GAIN, _GROWN_GAIN, _FEWEST_CHANNELS, _FEWEST_OUTLIERS = 0.01, 0.3, 4, 32

#: What training may do to weights, where the reference bears it. turned: some gains of many are negative, which nothing
#: keeps from it (a maximum taken before the gain is then a minimum); muted: some of a vector are zero, as the last gain
#: of a residual branch is at first (what was multiplied by them cannot be told from the answer); pruned: some rows are
#: zero, which show a small constant that keeps a division finite; thinned: some elements are zero, wherever they lie.
HABITS = ("turned", "muted", "pruned", "thinned")
_TURNED, _MUTED, _PRUNED, _THINNED, _FEWEST_ROWS = 1 / 8, 1 / 16, 1 / 32, 1 / 8, 8
#: How many different values there are in "ties".
_TIES = 7
#: How many of the elements of "edges" are another tensor's.
_EDGES_SHARE = 1 / 16
#: "deep": minus a normal's size, and this much more, times so much; in each type a share of what it holds at most.
_DEEPEST, _DEEP, _DEEPER = 0.1, 1e5, 8.0
#: (factor of "large", mean of "shifted"), in standard deviations, for full and for half precision
_SPREAD = {False: (100.0, 300.0), True: (8.0, 8.0)}


def _generic(
    family: str,
    values: Tensor,
    scale: float,
    dtype: torch.dtype,
    spread: tuple[float, float],
    generator: torch.Generator,
    common: torch.Generator | None,
) -> Tensor:
    if family == "uniform":
        return values.uniform_(-1.0, 1.0, generator=generator).mul_(math.sqrt(3.0) * scale)
    if family == "integer":
        # The products of two such numbers need more bits than TF32, half or bfloat16 keep.
        top = 2047 if dtype == torch.float16 else 255 if dtype in _LOW_PRECISION else 4095
        step = 2.0 ** round(math.log2(2.0 * scale / top))
        return values.random_(-top, top + 1, generator=generator).mul_(step)
    values.normal_(generator=generator).mul_(scale)
    if family == "ties":
        return _tied(values, generator)
    if family == "large":
        return values.mul_(spread[0])
    if family == "shifted":
        return values.add_(spread[1] * scale)
    if family == "empty":
        return values.zero_()
    if family == "deep":
        deep = min(max(_DEEP, spread[0] * scale), torch.finfo(dtype).max / _DEEPER)
        return values.div_(scale).abs_().add_(_DEEPEST).mul_(-deep)
    if family == "rectified":
        return _rectified(values, generator)
    if family in ("spiked", "bumped"):
        return _spiked(values, scale, spread[0] if family == "spiked" else _BUMP, generator)
    if family == "alike":
        return _alike(values, generator, common or generator)
    if family == "levels":
        return values.add_(_offsets(values, generator, common or generator).mul_(spread[1] * scale))
    if family == "ordered":
        return _sorted_rows(values, generator)
    if family == "padded":
        return values.mul_(_faintness(values, scale, (0.0,), generator, common or generator)).add_(0.0)
    if family.startswith(HALVES):
        return _between_levels(values, scale, int(family.removeprefix(HALVES)), generator)
    if family == "lowered":
        return values.add_(_signs(values, dtype, generator).mul_(spread[1] * scale))
    if family in SHORTCUTS:
        return values.mul_(_CALM) if family == "calm" else values.abs_().mul_(1.0 if family == "raised" else -1.0)
    if family == "peaks":
        values.mul_(_PEAKS if dtype in (torch.float16, torch.bfloat16) else 1.0)
        if dtype == torch.bfloat16:
            factors = torch.ones_like(values).view(-1)
            places = torch.randint(len(factors), (_BEYOND_HALF_COUNT,), generator=generator, device=values.device)
            values.mul_(factors.index_fill_(0, places, max(1.0, _BEYOND_HALF / (_PEAKS * scale))).view(values.shape))
        return values
    if family in ("faint", "small"):
        sizes = _FAINT if family == "faint" else _SMALL[dtype == torch.float16]
        values.mul_(_faintness(values, scale, sizes, generator, common or generator))
        # Of a sum of minus zeros the sign is that of whatever it is begun with; "tails" has them one by one.
        return values.add_(0.0)
    if family == "tails":
        return _with_zeros(values.mul_(_TAILS / scale), generator)
    if family == "sparse":
        # Nine in ten are small but not equal: equal addends make an honest serial sum drift one way.
        small = torch.empty_like(values).uniform_(generator=generator) > 0.1
        values.mul_(torch.where(small, 0.1, 1.0))
        return _with_far_ends(values, scale, spread[0], generator)
    return values


def ordered_values(tensors: Iterable[Any]) -> list[Tensor]:
    """Those of ``tensors`` that are floating, finite and sorted: the edges of buckets, the nodes of a table."""
    found = (tensor for tensor in tensors if isinstance(tensor, Tensor) and tensor.is_floating_point())
    return [tensor for tensor in found if _ordered(tensor) and bool(tensor.isfinite().all())]


def between(tensors: Iterable[Tensor]) -> list[Tensor]:
    """What lies in the middle of two neighbours each, along the last dimension."""
    return [(tensor[..., 1:] + tensor[..., :-1]) / 2 for tensor in tensors if tensor.dim()]


def with_values_of(
    leaf: Tensor, others: Sequence[Tensor], generator: torch.Generator, share: float = _EDGES_SHARE
) -> Tensor:
    """``leaf`` with a share of its elements exchanged for elements of ``others`` of its dtype; itself where none is."""
    pools = [other.detach().flatten() for other in others if other.dtype == leaf.dtype]
    if not pools or not leaf.numel():
        return leaf
    pool = torch.cat(pools)
    places = torch.randint(len(pool), leaf.shape, generator=generator, device=leaf.device)
    chosen = torch.rand(leaf.shape, generator=generator, device=leaf.device) < share
    changed = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
    return changed.copy_(torch.where(chosen, pool[places], leaf))


def _with_far_ends(values: Tensor, scale: float, most: float, generator: torch.Generator) -> Tensor:
    """The first and the last elements, and one of each of some samples, channels and rows, so far out that none of
    them can be left out, and no further than "large" is (``most``)."""
    flat = values.view(-1)
    # Of a sample the first one is its first row's as well: that of the most counts.
    for dim in range(values.dim() - 1, 0, -1) if values.numel() else ():
        shape, rows = values.shape[dim:], values.view(-1, math.prod(values.shape[dim:]))
        share = min(_ENDS_SHARE, rows.shape[1] / _ENDS_LEAST)
        chosen = _turns(len(rows), int(1 / share), generator, values.device)
        for number, place in enumerate(_places(shape)):
            far = _far(rows[:, place], _FAR_OUT_ROOT * math.sqrt(rows.shape[1]), scale, most, generator)
            rows[:, place] = torch.where(chosen == number, far, rows[:, place])
    for end in (flat[:_ENDS], flat[-_ENDS:]):
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


def _alike(values: Tensor, generator: torch.Generator, common: torch.Generator) -> Tensor:
    """The first half of some rows is that of the row before, and of others zero, and others are all of the row before,
    in another order; rows of one dimension alone or of all but the leading ones, the same in all inputs of a call
    (``common``)."""
    inner = int(torch.randint(1 << 30, (), generator=common, device=common.device))
    size = math.prod(values.shape[-1 - inner % max(1, values.dim() - 1) :]) if values.numel() else 0
    if size < 2:
        return values
    rows, half = values.view(-1, size), size // 2
    kinds = torch.randint(4, (len(rows), 1), generator=generator, device=values.device)
    kinds = torch.where(kinds.roll(-1, 0) == 3, 2, kinds)  # whom another one repeats stays as it is
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
        return values.new_zeros(()) if dtype in _LOW_PRECISION else values.new_full((), -1.0)
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


def rerandomise(
    module: torch.nn.Module, seed: int, habits: Collection[str] = (), *, trained: bool | None = None
) -> None:
    """Draw new floating parameters in place: the old ones' scale (fan-in for constants), ties and exact zeros kept,
    what was positive stays positive. Running statistics get plausible values; other buffers stay as constructed.

    Of some seeds (of all or none, as ``trained`` says) a few weights are far larger than the others, as trained ones
    are (what stores a row's weights by its largest one in few bits errs there), small gains have grown, as those of
    residual branches do, and weights have ``habits``, of :data:`HABITS`.
    """
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    generator = torch.Generator(device=device).manual_seed(seed)
    drawn = bool(torch.rand((), generator=generator, device=device) < _TRAINED)
    trained = drawn if trained is None else trained
    for parameter in module.parameters():
        if parameter.is_floating_point() and parameter.numel():
            _rerandomise_parameter(parameter, generator, trained)
    for name, buffer in module.named_buffers():
        if name.endswith("running_mean"):
            buffer.normal_(generator=generator).mul_(0.5)
        elif name.endswith("running_var"):
            buffer.uniform_(*_LOG_VARIANCES, generator=generator).exp_()
            if trained and buffer.numel() >= _FEWEST_CHANNELS:  # a channel that is always off
                buffer[torch.randint(buffer.numel(), (), generator=generator, device=buffer.device)] = 0.0
    for habit in HABITS if trained else ():
        for parameter in module.parameters() if habit in habits else ():
            if _takes_on(habit, parameter):
                _wear(habit, parameter, generator)


def takes_on(module: torch.nn.Module, habit: str) -> bool:
    """Has it weights that would be others with this habit of :data:`HABITS`?"""
    return any(_takes_on(habit, parameter) for parameter in module.parameters())


def _takes_on(habit: str, weights: Tensor) -> bool:
    """A single gain may be an exponent or a temperature, and few rows are no rows of classes or channels."""
    if not weights.is_floating_point():
        return False
    if habit == "turned":
        return weights.numel() >= _FEWEST_CHANNELS and bool((weights > 0).all())
    if habit == "muted":
        return weights.dim() == 1 and len(weights) >= _FEWEST_CHANNELS and bool((weights != 0).all())
    if habit == "thinned":
        return weights.dim() > 1 and weights.numel() >= _FEWEST_WEIGHTS
    return weights.dim() > 1 and weights.shape[0] >= _FEWEST_ROWS and weights.numel() >= _FEWEST_WEIGHTS


def _wear(habit: str, weights: Tensor, generator: torch.Generator) -> None:
    """Some numbers of ``weights`` become negative, or zero, or some rows zero: at least one."""
    with torch.no_grad():
        if habit == "turned":
            turned = _some(weights.numel(), _TURNED, generator, weights.device).reshape(weights.shape)
            weights.copy_(torch.where(turned, -weights, weights))
        elif habit in ("muted", "thinned"):
            share = _MUTED if habit == "muted" else _THINNED
            weights[_some(weights.numel(), share, generator, weights.device).reshape(weights.shape)] = 0.0
        else:
            weights[_some(weights.shape[0], _PRUNED, generator, weights.device)] = 0.0


def _some(count: int, share: float, generator: torch.Generator, device: torch.device) -> Tensor:
    """A mask of ``count`` places, about ``share`` of them chosen, and at least one."""
    chosen = torch.rand(count, generator=generator, device=device) < share
    chosen[torch.randint(count, (), generator=generator, device=device)] = True
    return chosen


def _rerandomise_parameter(parameter: Tensor, generator: torch.Generator, trained: bool) -> None:
    old = parameter.detach().float()
    low, spread = float(old.min()), float(old.std()) if old.numel() > 1 else 0.0
    noise = torch.empty_like(old).normal_(generator=generator)
    if low > 0:
        grown = trained and spread == 0 and low < _SMALL_GAIN
        new = (_GROWN_GAIN if grown else old.mean()) * torch.exp(0.25 * noise)
        if trained and old.numel() >= _FEWEST_OUTLIERS:
            new = torch.where(
                _some(old.numel(), _OUTLIERS, generator, old.device).reshape(old.shape), _OUTLYING * new, new
            )
    elif spread > 0 and math.isfinite(spread):
        if trained and old.dim() > 1 and old.numel() >= _FEWEST_WEIGHTS:
            chance = torch.empty_like(old).uniform_(generator=generator)
            noise = torch.where(chance < _OUTLIERS, _OUTLYING * noise, noise)
        new = old.mean() + spread * noise
    else:
        fan_in = max(1, old.numel() // max(1, old.shape[0])) if old.dim() > 1 else 100
        new = float(old.mean()) + noise / math.sqrt(fan_in)
    zeros = old == 0
    if bool(zeros.any()) and not bool(zeros.all()):
        new = new.masked_fill(zeros, 0.0)
    with torch.no_grad():
        parameter.copy_(new)


def exchange_weights(
    module: torch.nn.Module,
    seed: int,
    kept: Collection[str] = (),
    alone: str = "",
    constructed: Mapping[str, Tensor] | None = None,
) -> None:
    """A few elements of each floating parameter change places, or two of the one at ``alone``: of those that
    :func:`exchangeable_weights` names."""
    generator = torch.Generator().manual_seed(seed)
    for path, parameter in exchangeable_weights(module, kept, constructed).items():
        if alone in ("", path):
            with torch.no_grad():
                parameter.copy_(exchanged(parameter.detach(), generator, 1 if alone else EXCHANGES))


def nudge_weights(module: torch.nn.Module, seed: int, kept: Collection[str] = ()) -> None:
    """Each floating parameter moves by a little, but for those at the paths ``kept``."""
    generator = torch.Generator().manual_seed(seed)
    for path, parameter in module.named_parameters():
        if path not in kept:
            with torch.no_grad():
                parameter.copy_(nudged_values(parameter.detach(), generator))


def nudged_values(leaf: Tensor, generator: torch.Generator) -> Tensor:
    """``leaf`` a little smaller, as a step of an optimizer moves it: by more than rounding, and by so little that who
    asks whether it is nearly what it was may say yes."""
    less = 1 - _NUDGE * (1 + torch.rand((), generator=generator).item())
    return leaf * less if leaf.is_floating_point() or leaf.is_complex() else leaf


def exchangeable_weights(
    module: torch.nn.Module, kept: Collection[str], constructed: Mapping[str, Tensor] | None = None
) -> dict[str, torch.nn.Parameter]:
    """The floating parameters, but for those at the paths ``kept``, and for those with exact zeros beside other values,
    as they were ``constructed``: where these lie may mean something."""
    found = {path: p for path, p in module.named_parameters() if path not in kept and p.is_floating_point()}
    first = {path: (constructed or {}).get(path, p).detach().float() for path, p in found.items()}
    return {path: p for path, p in found.items() if int((first[path] == 0).sum()) in (0, p.numel())}


def exchangeable(leaf: Tensor) -> bool:
    """Whether numbers of ``leaf`` may change places: integers that follow no order along any dimension."""
    if leaf.dtype not in INTEGERS or leaf.numel() < _LEAST_EXCHANGED:
        return False
    for dim in range(leaf.dim()):
        if leaf.shape[dim] > 1:
            steps = leaf.diff(dim=dim)
            if bool((steps >= 0).all(dim).any()) or bool((steps <= 0).all(dim).any()):
                return False
    return True


def exchanged_integers(leaf: Tensor, generator: torch.Generator) -> Tensor:
    """``leaf`` with a few pairs of numbers exchanged, those of a pair in one row where no row has a number twice; the
    commonest number, which may be padding, stays where it is."""
    changed = leaf.clone()
    rows = changed.reshape(-1, leaf.shape[-1])
    once = bool((rows.sort(-1).values.diff(dim=-1) != 0).all())
    places = (rows != rows.flatten().mode().values).nonzero().cpu()
    if len(places) < 2:
        return leaf
    for _ in range(_EXCHANGED_INTEGERS):
        first = places[int(torch.randint(len(places), (1,), generator=generator))]
        others = places[places[:, 0] == first[0]] if once else places
        other = others[int(torch.randint(len(others), (1,), generator=generator))]
        one, two = tuple(first.tolist()), tuple(other.tolist())
        rows[one], rows[two] = rows[two].clone(), rows[one].clone()
    return rows.reshape(leaf.shape)


def exchanged_mask(mask: Tensor, generator: torch.Generator) -> Tensor:
    """``mask`` with a few pairs of True and False exchanged: as many of either are left."""
    changed = mask.flatten().clone()
    sides = [(changed == side).nonzero().flatten().cpu() for side in (True, False)]
    count = min(EXCHANGES, *map(len, sides))
    for side, places in zip((False, True), sides, strict=True):
        chosen = torch.randperm(len(places), generator=generator)[:count]
        changed[places[chosen].to(mask.device)] = side
    return torch.empty_like(mask).copy_(changed.view(mask.shape))


def exchanged(leaf: Tensor, generator: torch.Generator, pairs: int = EXCHANGES) -> Tensor:
    """``leaf`` with a few pairs of elements exchanged, those of each pair as far from each other as a few allow; every
    other pair within a row, so that nothing of that row but its order is another."""
    if leaf.numel() < 2:
        return leaf
    changed = leaf.clone()
    for pair in range(pairs):
        places = torch.randint(leaf.numel(), (16,), generator=generator).tolist()
        if pair % 2 and leaf.dim() and leaf.shape[-1] > 1:
            row = places[0] // leaf.shape[-1] * leaf.shape[-1]
            places = [row + place % leaf.shape[-1] for place in places]
        indices = [tuple(unravelled(place, tuple(leaf.shape))) for place in places]
        values = [float(changed[index].abs() if leaf.is_complex() else changed[index]) for index in indices]
        far = max(range(len(values)), key=lambda i: abs(values[i] - values[0]))
        one, other = changed[indices[0]].clone(), changed[indices[far]].clone()
        changed[indices[0]], changed[indices[far]] = other, one
    return changed


def unravelled(place: int, shape: tuple[int, ...]) -> list[int]:
    index = []
    for size in reversed(shape):
        index.append(place % size)
        place //= size
    return index[::-1]
