"""Draws in which something comes together that hardly ever does. In the oracle's process only.

A label that is what the scores say, a sample that hits what it stands against, a number that is a multiple of another,
a value that lies on an edge, two masks that shut the same place, a comparison of integers that for once is true: the
user's function draws them now and then, and a kernel that is wrong there passes all verdicts but one in some hundred.
So many draws are looked at, and those kept that show what few of them do; the values are none but the user's.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_cudaforge.evaluation.chance import CHANCE
from pytest_cudaforge.evaluation.rare import RareDraws
from pytest_cudaforge.evaluation.structures import INTEGERS, ordered_values, readable
from pytest_cudaforge.evaluation.undisabled import undisabled

__all__ = [
    "AGREEING",
    "OCCASIONS",
    "WitnessMode",
    "agreeing",
    "decisions_of",
    "may_have_occasions",
    "meetings_of",
    "occasional_draws",
]

#: Families of draws that are taken as they are, as many kinds at most; the rarest first.
OCCASIONS = tuple(f"occasion {number}" for number in range(1, 7))
#: Labels that are, half of them, what the scores say: as a trained model's are, and drawn ones hardly ever.
AGREEING = "agreeing"
#: How far a likely score is ahead then, at most.
_MOST_AHEAD = 20.0
#: So many elements are compared with so many others, and so many decisions of a reference looked at, at most.
_MOST_ELEMENTS, _MOST_PAIRS, _MOST_DECISIONS = 1 << 16, 1 << 20, 64
#: What operators tell of floating numbers whatever was rounded.
_SURE = frozenset(["isinf", "isnan", "isposinf", "isneginf"])
#: The largest of n labels that are drawn from all classes misses the last one by no more than so many n-th of them, but
#: for once in some thousand draws, and by half of them where they are few.
_MISSED, _MOST_MISSED = 8.0, 0.5
#: So few may be in order by chance.
_FEW_LABELS = 6
#: What most draws show anyway is no occasion; so many draws of one are kept.
_USUAL, _MOST_KEPT = 0.25, 64


@undisabled
class WitnessMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes of each tensor of yes and no that operators make, in the order they run, whether any is True, and all. Of
    floating numbers alone whether they are infinite: what else is asked of these, rounding may decide."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[tuple[bool, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        told = isinstance(result, Tensor) and result.dtype == torch.bool and len(self.found) < _MOST_DECISIONS
        rounded = any(isinstance(a, Tensor) and a.dtype not in (*INTEGERS, torch.bool) for a in args)
        if told and result.numel() and (not rounded or func.overloadpacket.__name__ in _SURE):
            self.found.append((bool(result.any()), bool(result.all())))
        return result


def may_have_occasions(leaves: Mapping[str, Any]) -> bool:
    """Are there integers, masks, infinities or edges among a call's inputs? Others hardly ever meet."""
    tensors = [leaf for leaf in leaves.values() if isinstance(leaf, Tensor) and leaf.numel() > 1]
    if any(leaf.dtype in INTEGERS or leaf.dtype == torch.bool for leaf in tensors):
        return True
    floats = [readable(leaf) for leaf in tensors if leaf.is_floating_point()]
    return any(bool(leaf.isinf().any()) for leaf in floats) or (len(floats) > 1 and bool(ordered_values(floats)))


def meetings_of(leaves: Mapping[str, Any]) -> dict[str, bool]:
    """What a call's inputs show together, by what one could see in any."""
    shown: dict[str, bool] = {}
    tensors = {path: readable(leaf.detach()) for path, leaf in leaves.items() if _is_looked_at(leaf)}
    for (path, one), (other_path, other) in itertools.combinations(tensors.items(), 2):
        shown |= {f"{path} and {other_path} {what}": seen for what, seen in _meetings(one, other)}
    return shown


def decisions_of(decisions: Iterable[tuple[bool, bool]], outputs: Mapping[str, Any]) -> dict[str, bool]:
    """What a reference made of a call. ``decisions``: a witness's."""
    shown: dict[str, bool] = {}
    for number, (any_is, all_are) in enumerate(decisions):
        shown[f"decision {number} is true somewhere"], shown[f"decision {number} is true"] = any_is, all_are
    for path, value in outputs.items():
        if _is_looked_at(value):
            value = readable(value)
            shown[f"zero in {path}"] = bool((value == 0).any())
            shown[f"infinity in {path}"] = value.is_floating_point() and bool(value.isinf().any())
    return shown


def agreeing(leaves: Mapping[str, Any], generator: torch.Generator, free: Collection[str] = ()) -> dict[str, Tensor]:
    """By path, labels half of which are the places of the largest scores; empty where a call has no such. Negative ones
    (what is ignored) stay. Of scores that are ``free`` to change, every other one of those is ahead by more, as a
    trained model's are, up to where a softmax leaves the others next to nothing."""
    whole = {p: leaf for p, leaf in leaves.items() if isinstance(leaf, Tensor) and leaf.dtype in INTEGERS}
    labels = next(iter(whole.values()), None)
    if len(whole) != 1 or labels is None or labels.numel() < 2:
        return {}
    for name, scores in leaves.items():
        if isinstance(scores, Tensor) and scores.is_floating_point():
            for dim in _class_dims(scores, labels):
                low, high = int(labels[labels >= 0].min()), int(labels.max())
                likely = low + readable(scores.detach()).narrow(dim, low, 1 + high - low).argmax(dim)
                chosen = (torch.rand(labels.shape, generator=generator, device=labels.device) < 0.5) & (labels >= 0)
                found = {path: torch.where(chosen, likely.to(labels.dtype), labels) for path in whole}
                if name in free:
                    ahead = _MOST_AHEAD * torch.rand(labels.shape, generator=generator, device=labels.device)
                    ahead *= chosen & (torch.rand(labels.shape, generator=generator, device=labels.device) < 0.5)
                    found[name] = _raised(scores.detach(), dim, likely, ahead)
                return found
    return {}


def _raised(scores: Tensor, dim: int, places: Tensor, by: Tensor) -> Tensor:
    """``scores``, in their order of memory, higher ``by`` so much at one place of each."""
    raised = readable(scores).scatter_add(dim, places.unsqueeze(dim), by.unsqueeze(dim).to(readable(scores).dtype))
    return torch.empty_like(scores).copy_(raised)


def _class_dims(scores: Tensor, labels: Tensor) -> Iterator[int]:
    """Dimensions of ``scores`` into which ``labels`` may point: one for each of all others. What is longer than any
    label reaches is a row of features, and the labels are groups of rows; so are labels in order."""
    last, count = int(labels.max()), int((labels >= 0).sum())
    flat = labels.flatten()
    if last <= 0 or (count > _FEW_LABELS and bool((flat[1:] >= flat[:-1]).all())):
        return
    reached = 1.0 - min(_MOST_MISSED, _MISSED / count)
    for dim in range(scores.dim()):
        others = (*scores.shape[:dim], *scores.shape[dim + 1 :])
        if others == labels.shape and reached * scores.shape[dim] <= 1 + last <= scores.shape[dim]:
            yield dim


def _is_looked_at(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and 0 < leaf.numel() <= _MOST_ELEMENTS and not leaf.is_complex()


def _meetings(one: Tensor, other: Tensor) -> Iterator[tuple[str, bool]]:
    edges = one.is_floating_point() and bool(ordered_values((one, other)))
    if one.dtype == other.dtype and (edges or one.dtype in INTEGERS):
        yield "have a number in common", bool(torch.isin(one, other).any())
        if one.dim() and other.dim() and one.shape[0] == other.shape[0]:
            rows, others = one.reshape(len(one), -1, 1), other.reshape(len(other), 1, -1)
            if rows.shape[1] * others.numel() <= _MOST_PAIRS:
                yield "have a number in common in one row", bool((rows == others).any())
    if one.shape == other.shape:
        yield from _at_one_place(one, other)
    for labels, scores in ((one, other), (other, one)):
        if labels.dtype in INTEGERS and scores.is_floating_point():
            for dim in _class_dims(scores, labels):
                yield f"agree on the largest along {dim}", bool((scores.argmax(dim) == labels).any())


def _at_one_place(one: Tensor, other: Tensor) -> Iterator[tuple[str, bool]]:
    if one.dtype == torch.bool and other.dtype == torch.bool:
        yield "are both true", bool((one & other).any())
        yield "are both false", bool((one | other).logical_not().any())
    elif one.is_floating_point() and other.is_floating_point():
        yield "are both infinite", bool((one.isinf() & other.isinf()).any())
    elif one.dtype in INTEGERS and other.dtype in INTEGERS:
        for name, a, b in (("first", one, other), ("second", other, one)):
            multiples = torch.where(b != 0, a.remainder(b.masked_fill(b == 0, 1)) == 0, False)
            yield f"are multiples, the {name} one of the other", bool((multiples & (a != 0)).any())


def occasional_draws(shown: Iterable[tuple[int, Mapping[str, bool]]]) -> dict[str, RareDraws]:
    """By the name of a family, seeds of draws that show what few do, the rarest first. ``shown``: (seed, what that draw
    shows)."""
    seen_in: dict[str, tuple[list[int], list[int]]] = {}
    for seed, occasions in shown:
        for what, seen in occasions.items():
            seen_in.setdefault(what, ([], []))[seen].append(seed)
    found: dict[tuple[int, ...], str] = {}
    for what, sides in seen_in.items():
        for name, seeds in zip((f"not: {what}", what), sides, strict=True):
            if 0 < len(seeds) < _USUAL * sum(map(len, sides)):
                found.setdefault(tuple(seeds), name)
    rarest = sorted(found, key=lambda seeds: (len(seeds), CHANCE.random()))[: len(OCCASIONS)]
    kept = [RareDraws(found[seeds], part) for seeds, part in _shared_out(rarest, len(OCCASIONS))]
    return dict(zip(OCCASIONS, kept, strict=False))


def _shared_out(rarest: Sequence[tuple[int, ...]], most: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Each of ``rarest`` with some of its own, ``most`` times in all, as evenly as they are many: a draw that shows
    something need not show all that may be wrong there."""
    places = [0] * len(rarest)
    while sum(places) < most and any(n < len(seeds) for n, seeds in zip(places, rarest, strict=True)):
        for at, seeds in enumerate(rarest):
            places[at] += places[at] < len(seeds) and sum(places) < most
    for count, seeds in zip(places, rarest, strict=True):
        for turn in range(count):
            yield seeds, seeds[turn::count][:_MOST_KEPT]
