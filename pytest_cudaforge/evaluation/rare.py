"""Integers that the user's function draws now and then: the ends of their range, those that the target names, two that
are alike in one row, or side by side.

A length that is the largest of all, the first line of a table, a place that two rows add to, a token that pads: one
draw of a few hardly shows them, and users meet them sooner or later. So many draws
are looked at, and what was seen in one of them is put into another where it stood. Where one tensor's integers may
follow from another's, or from a mask, such a draw is taken as it is. Nothing is put anywhere that was never drawn, but
for numbers that the target names, which lie within what was. In the oracle's process only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_cudaforge.evaluation.chance import CHANCE
from pytest_cudaforge.evaluation.extremes import bound_together
from pytest_cudaforge.evaluation.structures import INTEGERS
from pytest_cudaforge.evaluation.undisabled import undisabled

__all__ = [
    "RARE",
    "RARE_DRAWS",
    "OverwritingMode",
    "Rare",
    "RareDraws",
    "named_integers",
    "rare_draws_of",
    "rarities_of",
    "sizes_near",
]

#: ends: the least and the largest number that were ever drawn; repeats: numbers that a row had twice; neighbours: side
#: by side (two letters that are one sound, a page that is loaded again). named: an integer that the target knows by
#: name (what pads, what is ignored).
RARE = ("ends", "repeats", "neighbours", "named")
#: Rare draws that are taken as they are, as many kinds at most.
RARE_DRAWS = tuple(f"rare {number}" for number in range(1, 7))
#: So many numbers of a draw are looked at, at most, and so many of all draws; and so many repeats are kept.
_MOST_NUMBERS, _MOST_IN_ALL, _MOST_REPEATS = 1 << 16, 1 << 21, 64
#: So many integers that a target names are looked for.
_MOST_NAMED = 32
#: And what is near to so many sizes.
_MOST_SIZES = 4
#: So many times the usual distance of two numbers that were drawn is a gap.
_GAP = 16
#: What most draws show anyway is not rare.
_USUAL = 0.5
#: Operators that leave undefined which of two values stays where both are written to one place.
_OVERWRITING = frozenset(
    ["scatter", "scatter_", "index_put", "index_put_", "_index_put_impl_", "index_copy", "index_copy_", "put", "put_"]
)


@dataclass(frozen=True)
class Rare:
    """What draws of the integers at ``path``, of ``shape``, showed now and then.

    ``least`` and ``most``: (number, where it stood); ``repeats`` and ``neighbours``: (number, both of its places);
    ``named``: (number, places where both less and more stood). Places count flat.
    """

    path: str
    shape: tuple[int, ...]
    least: tuple[int, int]
    most: tuple[int, int]
    repeats: tuple[tuple[int, int, int], ...]
    neighbours: tuple[tuple[int, int, int], ...]
    kinds: tuple[str, ...]
    named: tuple[tuple[int, tuple[int, ...]], ...] = ()

    def put(self, kind: str, leaves: dict[str, Any], generator: torch.Generator) -> None:
        """Into a call's leaves, which stay as they are in a variant of another shape. ``generator``: on the CPU."""
        leaf = leaves.get(self.path)
        if not isinstance(leaf, Tensor) or tuple(leaf.shape) != self.shape:
            return
        flat = leaf.flatten().clone()
        if kind == "ends":
            for number, place in (self.least, self.most):
                if not bool((flat == number).any()):  # where each number is there once it stays so
                    flat[place] = number
        elif kind == "named":
            taken: set[int] = set()
            for number, places in self.named:
                free = [place for place in places if place not in taken]
                if free and 2 * len(taken) <= flat.numel() and not bool((flat == number).any()):
                    place = free[int(torch.randint(len(free), (), generator=generator))]
                    flat[place] = number
                    taken.add(place)
        else:
            pairs = self.repeats if kind == "repeats" else self.neighbours
            chosen = torch.randperm(len(pairs), generator=generator)[: max(1, len(pairs) // 2)]
            for number, one, other in (pairs[int(at)] for at in chosen):
                flat[one] = flat[other] = number
        leaves[self.path] = torch.empty_like(leaf).copy_(flat.reshape(leaf.shape))


@dataclass(frozen=True)
class RareDraws:
    """Seeds of draws that show ``what``: an end of a tensor's range, or ``repeats``."""

    what: str
    seeds: tuple[int, ...]

    @property
    def repeats(self) -> bool:
        return self.what.startswith("repeats")


def rare_draws_of(draws: Iterable[tuple[int, Mapping[str, Any]]], named: Collection[int] = ()) -> dict[str, RareDraws]:
    """By the name of a family, seeds of draws that show something rare about one of several tensors of integers, or of
    one beside a mask. ``draws``: (seed, a call's leaves); ``named``: integers that the target names."""
    seeds: list[int] = []
    drawn: dict[str, list[Tensor]] = {}
    for seed, leaves in draws:
        whole = {p: leaf for p, leaf in leaves.items() if isinstance(leaf, Tensor) and leaf.dtype in INTEGERS}
        masks = [p for p, leaf in leaves.items() if isinstance(leaf, Tensor) and leaf.dtype == torch.bool]
        if not whole or len(whole) + len(masks) < 2 or (drawn and set(whole) != set(drawn)):
            return {}
        seeds.append(seed)
        for path, leaf in whole.items():
            drawn.setdefault(path, []).append(leaf.detach().cpu())
        if len(seeds) * sum(leaf.numel() for leaf in whole.values()) > _MOST_IN_ALL:
            break
    found = [one for path, tensors in drawn.items() for one in _rare_seeds(path, tensors, seeds, named)]
    chosen = CHANCE.sample(found, min(len(RARE_DRAWS), len(found)))
    return dict(zip(RARE_DRAWS, chosen, strict=False))


def _rare_seeds(
    path: str, drawn: Sequence[Tensor], seeds: Sequence[int], named: Collection[int]
) -> Iterator[RareDraws]:
    first = drawn[0]
    if any(leaf.shape != first.shape for leaf in drawn) or not 0 < first.numel() <= _MOST_NUMBERS:
        return
    flat = torch.stack([leaf.flatten() for leaf in drawn]).to(torch.int64)
    shows = {f"{which} of {path}": (flat == number).any(1) for which, number in _range_of(flat).items()}
    shows |= {f"{number} in {path}": (flat == number).any(1) for number in sorted(named)}
    rows = flat.reshape(len(flat), -1, first.shape[-1] if first.dim() else 1)
    shows[f"repeats in {path}"] = (rows.sort(dim=-1).values.diff(dim=-1) == 0).any(-1).any(-1)
    shows[f"repeats side by side in {path}"] = (rows.diff(dim=-1) == 0).any(-1).any(-1)
    for what, where in shows.items():
        if 0 < float(where.double().mean()) < _USUAL:
            yield RareDraws(what, tuple(seeds[int(at)] for at in where.nonzero().flatten()[:_MOST_REPEATS]))


def _range_of(flat: Tensor) -> dict[str, int]:
    return {"least": int(flat.min()), "most": int(flat.max())}


def rarities_of(
    draws: Iterable[Mapping[str, Any]], named: Collection[int] = (), near: Collection[int] = ()
) -> Rare | None:
    """What many draws of a call show of its integers, of those that the target has ``named``, and of others that are
    ``near`` to something. None where there is nothing rare about them, or where more than themselves may follow from
    them: other integers, a mask, or that all draws add up to, or multiply to, the same."""
    drawn: list[Tensor] = []
    path = ""
    for leaves in draws:
        whole = [p for p, leaf in leaves.items() if isinstance(leaf, Tensor) and leaf.dtype in (*INTEGERS, torch.bool)]
        if len(whole) != 1 or leaves[whole[0]].dtype == torch.bool or path not in ("", whole[0]):
            return None
        path = whole[0]
        if not 0 < leaves[path].numel() <= _MOST_NUMBERS:
            return None
        drawn.append(leaves[path].detach().cpu())
        if drawn[-1].shape != drawn[0].shape:
            return None
        if len(drawn) * drawn[0].numel() > _MOST_IN_ALL:
            break
    if len(drawn) < 2:
        return None
    shape = tuple(drawn[0].shape)
    flat = torch.stack([leaf.flatten() for leaf in drawn]).to(torch.int64)
    if bound_together(flat, shape):
        return None
    least, most, ends = _ends(flat)
    repeats, repeated = _repeats(flat, shape)
    neighbours, met = _neighbours(flat, shape)
    highest, lowest = flat.max(0).values, flat.min(0).values
    known = (
        _known(flat, (*sorted(named), *sorted({*near} - {*named})), lowest, highest)
        if _unordered_rows(flat, shape) is not None
        else ()
    )
    kinds = tuple(kind for kind, rare in zip(RARE, (ends, repeated, met, bool(known)), strict=True) if rare)
    return Rare(path, shape, least, most, repeats, neighbours, kinds, known) if kinds else None


def _known(
    flat: Tensor, named: Sequence[int], lowest: Tensor, highest: Tensor
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Those of the numbers ``named`` that few draws have, each with places where less stood as well as more; none in a
    gap of what is drawn: between what is ignored (-100) and the first class there is nothing."""
    found = []
    values = torch.unique(flat)
    for number in (one for one in named if not _in_gap(one, values)):
        places = ((lowest < number) & (highest > number)).nonzero().flatten()
        if len(places) and float((flat == number).any(1).double().mean()) < _USUAL:
            found.append((number, tuple(places[:: -(-len(places) // _MOST_REPEATS)].tolist())))
    return tuple(found)


def _in_gap(number: int, values: Tensor) -> bool:
    """``values``: all that were drawn, in order."""
    at = int(torch.searchsorted(values, number))
    if at in (0, len(values)):
        return True
    steps = values.diff()
    return bool(values[at] != number) and int(steps[at - 1]) > _GAP * int(steps.median())


def _ends(flat: Tensor) -> tuple[tuple[int, int], tuple[int, int], bool]:
    """The least and the largest number, each with a place of its own where it stood in one draw or another, as far as
    there are two; and whether most draws lack one of the two."""
    found: list[tuple[int, int]] = []
    shares = []
    for number in _range_of(flat).values():
        places = (flat == number).nonzero()[:, 1].tolist()
        free = [place for place in places if place not in [taken for _, taken in found]]
        found.append((number, (free or places)[0]))
        shares.append(float((flat == number).any(1).double().mean()))
    return found[0], found[1], min(shares) < _USUAL


def _repeats(flat: Tensor, shape: tuple[int, ...]) -> tuple[tuple[tuple[int, int, int], ...], bool]:
    """Numbers that a row had twice, and whether that is rare; none where rows are ordered."""
    rows = _unordered_rows(flat, shape)
    if rows is None:
        return (), False
    values, order = rows.sort(dim=-1, stable=True)
    row, at = (values.diff(dim=-1) == 0).nonzero(as_tuple=True)
    return _pairs(flat, rows, row, (values[row, at], order[row, at], order[row, at + 1]))


def _neighbours(flat: Tensor, shape: tuple[int, ...]) -> tuple[tuple[tuple[int, int, int], ...], bool]:
    """Numbers that stood side by side in a row with themselves, and whether that is rare, as in :func:`_repeats`."""
    rows = _unordered_rows(flat, shape)
    if rows is None:
        return (), False
    row, at = (rows.diff(dim=-1) == 0).nonzero(as_tuple=True)
    return _pairs(flat, rows, row, (rows[row, at], at, at + 1))


def _unordered_rows(flat: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    rows = flat.reshape(-1, shape[-1] if shape else 1)
    steps = rows.diff(dim=-1)
    ordered = bool((steps >= 0).all()) or bool((steps <= 0).all())
    return None if rows.shape[1] < 2 or ordered else rows


def _pairs(
    flat: Tensor, rows: Tensor, row: Tensor, found: tuple[Tensor, Tensor, Tensor]
) -> tuple[tuple[tuple[int, int, int], ...], bool]:
    """Some pairs (number, both places), from draws all over, and whether most draws have none. ``found``: the numbers
    in ``row`` of all draws' ``rows`` and where in it they stand."""
    many = flat.shape[1] // rows.shape[1]
    share = len(set((row // many).tolist())) / len(flat)
    base = row % many * rows.shape[1]
    pairs = torch.stack([found[0], base + found[1], base + found[2]], 1)
    pairs = pairs[:: -(-len(pairs) // _MOST_REPEATS) or 1]
    return tuple((number, one, other) for number, one, other in pairs.tolist()), 0 < share < _USUAL


def named_integers(module: torch.nn.Module | None, function: Any) -> frozenset[int]:
    """Integers that a target knows by name: attributes of the module and of what it consists of, and what the globals
    and constants are that ``function``'s code names."""
    found: set[int] = set()
    for part in module.modules() if module is not None else ():
        found.update(value for value in vars(part).values() if type(value) is int)
    code = getattr(function, "__code__", None)
    if code is not None:
        named = (function.__globals__.get(name) for name in code.co_names)
        found.update(value for value in (*code.co_consts, *named) if type(value) is int)
    return frozenset(sorted(found)[:_MOST_NAMED])


def sizes_near(leaves: Mapping[str, Any]) -> frozenset[int]:
    """Sizes of a call's tensors, their halves, and the neighbours of both: lengths and places end there."""
    sizes = {size for leaf in leaves.values() if isinstance(leaf, Tensor) for size in leaf.shape if size > 3}
    middles = {part for size in sorted(sizes)[-_MOST_SIZES:] for part in (size, size // 2)}
    return frozenset(middle + step for middle in middles for step in (-1, 0, 1))


@undisabled
class OverwritingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether values are written to places that a tensor names, and not added up there."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ in _OVERWRITING:
            names = [argument.name for argument in func._schema.arguments]
            given = dict(zip(names, args, strict=False)) | kwargs
            added = given.get("accumulate") or given.get("reduce") in ("add", "multiply")
            written = (given.get(name) for name in ("src", "values", "source"))
            several = any(isinstance(values, Tensor) and values.numel() > 1 for values in written)
            self.found = self.found or (several and not added)
        return func(*args, **kwargs)
