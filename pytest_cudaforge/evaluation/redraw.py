"""New values for a call's inputs that keep what they mean. In the oracle's process only.

A generic dense float input is redrawn from several families, because one distribution is never enough (a one-pass
variance shows only on shifted inputs, a softmax without max only on large ones). A structured one changes only its
seed, or lacks something.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from pytest_cudaforge.evaluation.absences import LACKING
from pytest_cudaforge.evaluation.generic import CALM, ENDS, Draw, generic
from pytest_cudaforge.evaluation.structures import LOW_PRECISION, REDRAWN, Structure, sample_of

__all__ = ["FAMILIES", "HUNDREDS", "SHORTCUTS", "families_of", "may_be_ranked", "redraw"]


FAMILIES = (
    *("normal", "uniform", "shifted", "lowered", "large", "sparse"),
    *(
        "tails",
        "integer",
        "faint",
        "small",
        "faded",
        "peaks",
        "edges",
        "ties",
        "alike",
        "rectified",
        "spiked",
        "bumped",
        "combed",
        "levels",
        "hoisted",
        "biased",
        "ordered",
        "leading",
        "parted",
        "climbing",
        "sloping",
        "near",
        "grouped",
        "below",
        "above",
        "tiny",
        "unbiased",
        "padded",
        "exact",
        "deep",
        "afar",
        "ranked",
        "empty",
    ),
)

#: Values that leave an operation nothing to do: none out of bounds, all of one sign. Who then returns its input itself
#: gives the caller something else than usual; of what the values come to, the families say more.
SHORTCUTS = ("calm", "raised", "sunk")
#: Values of which hundreds are drawn, as what goes wrong on few of them may do so by far: sinks, where many are weighed
#: against each other.
HUNDREDS = ("sinks",)
#: (factor of "large", mean of "shifted"), in standard deviations, for full and for half precision
_SPREAD = {False: (100.0, 300.0), True: (8.0, 8.0)}
#: "ranked": rows of so many numbers at most, so many of them at least; runs of which the order is kept.
_PLACE, _FEWEST_RANKED, _RUNS = 8, 64, (32, 128)
#: The share of exact zeros in "floor", and of ones in "ceiling".
_FLOOR = 1 / 16


def families_of(structures: Collection[Structure]) -> tuple[str, ...]:
    """The families worth drawing, those first that show what nothing else does: a call of gigabytes gets only three.

    shifted shows a one-pass variance, large a missing max and other overflows, integer every dropped, rounded or
    half-precision term, since all addends are alike and need their bits; lowered has entries along every dimension
    (samples, channels, columns) without any positive value, which show a maximum that starts at 0; sparse is for terms
    left out by a sample, or at either end, where those few outweigh rounding in however long a sum; tails reaches where
    activations bend whatever the scale of the draw, and has exact zeros of both signs; faint has entries that nearly
    or wholly vanish, which show a small constant that keeps a division finite, and small none that wholly vanish,
    for references that take no such; faded has lines and slices of all dimensions that nearly vanish; peaks, for
    half types alone, overflow them where they are squared or added up, and fp16 where it stands for bfloat16;
    edges, for answers that are integers, has values that are those of a sorted tensor beside it: which side is it?
    ties, for answers that are places of an extreme, has so few values that most are equal: which of them comes
    first? alike has rows that begin as others do, or with zeros, empty is zero throughout, as calls that warm up
    are; rectified has rows that are mostly zeros, as a ReLU leaves them: who looks at some of a row takes it for
    empty; spiked has one element of each row further out than the others, by little or by much, wherever it lies,
    bumped by little alone, since answers to the far ones hide much; combed has large ones at equal distances; in
    levels rows, or whatever else slices are, lie far from zero each at a place of its own: who takes all relative
    to the first one's mean loses the others' digits; hoisted, for half types alone, is shifted as far as sums in
    full precision bear; in biased channels, or whatever else there is, lie by little to one side of zero, each at a
    place of its own, as behind a bias: gates that stay nearly open; ordered, for references that order or search,
    has rows that rise or fall; leading, for those that choose, one column that is
    ahead of all others in most rows, as a router's favourite is, and parted, rows that are two heaps far apart;
    climbing, for those that weigh by exponentials, rows that rise or fall by little at a time, and far in all; sloping,
    one input alone does, beside others as drawn, where scores then do (see slopes); near,
    where differences are told, rows beside rows of another input, or of a weight, or beside the row before; grouped,
    for those that weigh, rows and columns of two groups each; below and above, for those that carry something along,
    all of it to one side of zero by some deviations; tiny, where the answer is so many times smaller for it and nothing
    else, all of it next to nothing, and unbiased, where that is so of weights that add nothing; padded, for
    gradients alone, entries that are zero throughout, as what fills up a batch is; deep is below what a maximum is
    often begun with for -inf. No draw happens to have what these do: floor exact zeros where values are in [0, 1],
    ceiling exact ones, missing rows and columns that are NaN throughout, shut rows that are -inf, or of a mask all
    False, stretches such rows for a part, fronts such from their first element on, afar such beside values that are
    far from zero: who takes all relative to what comes first finds nothing there, open such that are nowhere -inf,
    or all True, absent fewer classes, runs the same one several times in a row, certain rows of probabilities of
    which one is one, extremes bytes at both ends of their range alone, whose products are the largest, ranked rows of a
    few numbers each, as places have, of which those that follow each other are near each other, as sorted ones are.
    """
    lacking = tuple(dict.fromkeys(family for structure, family in LACKING if structure in structures))
    lacking = tuple(family for family in lacking if family != "afar" or "generic" in structures)
    unit = ("floor", "ceiling") if "unit" in structures else ()
    ranked = ("ranked",) if {"generic", "unit", "signed"} & set(structures) else ()
    return (*_redrawn_families(structures), *unit, *lacking, *ranked)


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
            "combed",
            "tails",
            "faint",
            "small",
            "faded",
            "normal",
            "bumped",
            "uniform",
            "peaks",
            "edges",
            "ties",
            "alike",
            "levels",
            "hoisted",
            "biased",
            "ordered",
            "leading",
            "parted",
            "climbing",
            "sloping",
            "near",
            "grouped",
            "below",
            "above",
            "tiny",
            "unbiased",
            "deep",
            "empty",
        )
    if {"signed", "logarithms"} & set(structures):
        return ("shifted", "sparse", "tails")
    return ("shifted", "sparse") if "unit" in structures else ()


def redraw(
    family: str, drawn: Tensor, structure: Structure, generator: torch.Generator, shared: int | None = None
) -> Tensor:
    """``drawn`` with new values of ``family``, of the same shape, dtype, device and memory layout.

    The scale is the draw's own standard deviation. ``large`` and ``shifted`` are smaller for half types, whose range
    and precision are. ``shared``: a seed for what several inputs of a call have in common.
    """
    if family == "ranked":
        return _ranked(drawn, generator) if structure in REDRAWN and may_be_ranked(drawn) else drawn
    lacks = LACKING.get((structure, family))
    if lacks is not None or structure not in REDRAWN:
        return drawn if lacks is None else lacks(drawn, generator)
    if drawn.is_complex():
        parts = redraw(family, torch.view_as_real(drawn.resolve_conj()), structure, generator, shared)
        return torch.empty_like(drawn).copy_(torch.view_as_complex(parts.contiguous()))
    spread = _SPREAD[drawn.dtype in LOW_PRECISION]
    values = torch.empty(drawn.shape, dtype=torch.float32, device=drawn.device)
    if structure in ("signed", "logarithms"):
        return _SIGNED[family](drawn, values, spread[1], generator) if family in _SIGNED else drawn
    if structure == "unit":
        values.uniform_(generator=generator)
        values = _UNIT[family](values) if family in _UNIT else values
    else:
        scale = float(sample_of(drawn).std()) if drawn.numel() > 1 else 1.0
        common = generator if shared is None else torch.Generator(device=drawn.device).manual_seed(shared)
        values = generic(family, Draw(values, scale or 1.0, drawn.dtype, spread, generator, common))
    result = torch.empty_strided(drawn.shape, drawn.stride(), dtype=drawn.dtype, device=drawn.device)
    return result.copy_(values)


def may_be_ranked(drawn: Tensor) -> bool:
    """Has it many rows of a few numbers?"""
    return drawn.dim() > 1 and 2 <= drawn.shape[-1] <= _PLACE and drawn.shape[-2] >= _FEWEST_RANKED


def _ranked(drawn: Tensor, generator: torch.Generator) -> Tensor:
    """With rows in the order of one of their numbers, all of them where there are few; runs of more are in any order,
    as a sum of rows that rise from far below zero to far above goes a long way."""
    column = int(torch.randint(drawn.shape[-1], (), generator=generator, device=drawn.device))
    order = drawn.select(-1, column).argsort(-1)
    count, run = drawn.shape[-2], int(_RUNS[int(torch.randint(2, (), generator=generator, device=drawn.device))])
    if count > run and bool((drawn < 0).any()):
        places = torch.arange(count, device=drawn.device)
        keys = torch.rand(-(-count // run), generator=generator, device=drawn.device)[places // run]
        order = order.index_select(-1, keys.argsort(stable=True))
    rows = order.unsqueeze(-1).expand(drawn.shape)
    return torch.empty_strided(drawn.shape, drawn.stride(), dtype=drawn.dtype, device=drawn.device).copy_(
        drawn.gather(-2, rows)
    )


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
    flat[:ENDS] = flat[-ENDS:] = far
    return torch.empty_like(drawn).copy_(values)


def _far(drawn: Tensor, values: Tensor, distance: float, generator: torch.Generator) -> Tensor:
    """All near the end of the draw's range that is farthest from zero: what adds up, or decays, does so most there."""
    near, far = sorted((float(drawn.min()), float(drawn.max())), key=abs)
    values.uniform_(generator=generator).mul_((near - far) / distance).add_(far)
    return torch.empty_like(drawn).copy_(values)


_SIGNED: Mapping[str, Callable[[Tensor, Tensor, float, torch.Generator], Tensor]] = {
    "shifted": _level,
    "sparse": _peaked,
    "tails": _far,
}

_UNIT: Mapping[str, Callable[[Tensor], Tensor]] = {
    "shifted": lambda values: values.mul(0.1).add(0.9),
    "sparse": lambda values: values.pow(4),
    "calm": lambda values: values.mul(CALM),
    "floor": lambda values: values.sub(_FLOOR).clamp_min(0.0).div(1 - _FLOOR),
    "ceiling": lambda values: values.div(1 - _FLOOR).clamp_max(1.0),
}
