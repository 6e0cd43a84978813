"""Probes: the same call with other strides, neighbouring shapes, or other values of an input that is always the same.
In the oracle's process only.

A variant has a name that says all: ``""`` (as drawn), ``"strided"``, ``"strided step 3"``, ``"strided pad 5"``,
``"strided expanded"``, ``"strided overlapping 8421"`` (by a seed), ``"strided in front"``, ``"strided outer 2"`` and
``"strided outer 2, channels last"``, ``"strided order 8421"`` and ``"strided order 8421, second innermost"`` (by a
seed),
``"size 64 -> 43"``, ``"size 64 -> 791"``, ``"tiny 64 -> 5, 480 -> 33"`` (all at once),
``"tall 64 -> 70001, 480 -> 6"``, ``"mixed 64 -> 9, 480 -> 1031"``, ``"left 64 -> 75, 480 -> 491"``,
``"only last 64 -> 43"``,
``"all but last 64 -> 43"``, ``"apart 64 -> 43 at 1[0], 2[0]"`` (by path and dimension),
``"further 64 -> 791"`` (where integers point into it), ``"other kw.mask"`` (by path). Numbers are drawn secretly, so
that no kernel can know the sizes and strides that it will be tried with.
"""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pytest_cudaforge.evaluation.chance import CHANCE
from pytest_cudaforge.runtime.signature import flatten_call, unflatten_call

__all__ = [
    "APART",
    "EXPANDED",
    "IN_FRONT",
    "LEFT",
    "MIXED",
    "MOST_TALL",
    "ORDER",
    "OTHER",
    "OUTER",
    "OVERLAPPING",
    "PARTED",
    "STRIDED",
    "TALL",
    "TINY",
    "apart_names",
    "apply_variant",
    "fixed_names",
    "front_names",
    "further_names",
    "grown_size",
    "grows_far",
    "kind_of",
    "landmark_names",
    "left_names",
    "long_names",
    "mixed_names",
    "multiple_names",
    "neighbour_names",
    "order_names",
    "outer_names",
    "parted_names",
    "plane_names",
    "rounder_names",
    "side_of",
    "single_names",
    "smaller_tall",
    "strided_names",
    "tall_names",
    "tiny_names",
    "twins_of",
    "usual_names",
    "vast_names",
    "vaster_names",
    "wide_names",
]

#: How the names of variants begin that have other values.
OTHER = "other "
#: And those that have other strides.
STRIDED = "strided"
#: With one dimension expanded from a single element.
EXPANDED = f"{STRIDED} expanded"
#: With rows that begin within the one before, as windows of a signal do.
OVERLAPPING = f"{STRIDED} overlapping"
#: With the dimensions before the last one swapped in memory, as heads and positions are behind a transpose.
IN_FRONT = f"{STRIDED} in front"
#: With the outermost dimension's entries apart and all else dense, as a slice of maps, or every other sample, is.
OUTER = f"{STRIDED} outer"
#: With all dimensions in another order in memory, such as no memory format has, perhaps with padding between.
ORDER = f"{STRIDED} order"
#: With several sizes far smaller.
TINY = "tiny"
#: With one size beyond what a grid's second dimension takes, and the others far smaller.
TALL = "tall"
#: With all sizes others, larger and smaller ones.
MIXED = "mixed"
#: With all sizes others, of which as much is left behind the last whole vector as a number says.
LEFT = "left"
#: With a size changed in last dimensions alone, or in all others alone.
PARTED = ("only last", "all but last")
#: With a size changed in some tensors, and left in others.
APART = "apart"

_SIZE = re.compile(r"size (\d+) -> (\d+)")
_FURTHER = re.compile(r"further (\d+) -> (\d+)")
_CHANGE = re.compile(r"(\d+) -> (\d+)")
_SPREAD = re.compile(rf"{STRIDED} (step|pad) (\d+)")
_OVERLAP = re.compile(rf"{OVERLAPPING} (\d+)")
_ORDER, _SECOND = re.compile(rf"{ORDER} (\d+)(.*)"), ", second innermost"
_ORDER_PADS = (0, 3)
_OUTER, _CHANNELS_LAST, _OUTER_PADS = re.compile(rf"{OUTER} (\d+)(.*)"), ", channels last", (1, 3)
_MAX_NEIGHBOURS = 3
#: How many sizes that integers point into grow, and how far these reach at least.
_MAX_FURTHER, _FURTHER_PLACES = 2, 300
#: How many sizes may shrink, one by one or together, and by how much to be tiny.
_MAX_SMALLER, _TINY = 6, (16, 8)
#: What can be in order.
_ORDERED = (torch.int64, torch.int32, torch.int16, torch.float64, torch.float32, torch.float16, torch.bfloat16)
#: In so few places each choice of them is tried.
_MOST_PLACES = 5
#: A size so small may be taken by accident: one goes with any other size, and so does half of two. Then others tell.
_ACCIDENTAL, _TWINS = 4, (6, 8, 10, 12)
#: How many rows come between far and tall, and how many elements each of them has.
_WIDE, _WIDE_OTHERS = (1500, 60_000), (16, 48)
#: By how much all sizes change at once, at least and at most: by less where that is too much.
_MIXED, _LEAST_MIXED, _MOST_MIXED = ((0.15, 8.0), (0.3, 3.0), (0.3, 1.5)), 5, 3
#: What may be left of a size behind its last whole vector, or tile; a size as long as most are, where it is longer by
#: far; and all tensors' elements at most.
_LANES, _LEFT_SPREAD, _LEFT_LEAST, _LEFT_ELEMENTS = 32, 1.5, 8, 1 << 17
#: How many pairs of neighbouring sizes grow, and by how much at most, by less where that is too much.
_MOST_ASPECTS, _ASPECTS = 2, (6.0, 3.0, 3.0, 1.5, 1.5, 1.2)
#: Elements of a call with large pictures, whose sides have grown by this at least.
_PLANES, _LEAST_GROWN = (1.5 * 2**22, 2.0**23), 1.5
#: More elements than 24 bits count, and all tensors' at most; now and then nearly all.
_VAST, _VAST_ALL, _VAST_CHANCE = ((1.02 * 2**24, 1.1 * 2**24), (1.9 * 2**24, 2.9 * 2**24)), 3 << 24, 1 / 3
#: On a GPU also nearly as many as a kernel is dispatched to.
_VASTER, _VASTER_ALL = (6.0 * 2**24, 7.9 * 2**24), 1 << 28
#: Sizes of which the product of two has more than 32 bits.
_LONG = (65_600, 75_000)
#: How many words models know (Llama, GPT-2, padded, Llama 3, padded, Qwen), and elements of a batch of logits.
_WORDS, _USUAL = (32_000, 50_257, 50_304, 128_000, 128_256, 151_936), (1.5 * 2**24, 2.9 * 2**24)
#: So many calls have a size next to a number that a candidate names.
_MOST_LANDMARKS = 18
#: Factors of sizes, how many of them, how often they are doubled, and how many of these sizes are tried.
_LEAST_FACTOR, _MOST_FACTOR, _MOST_FACTORS, _DOUBLED, _MULTIPLES, _MOST_MULTIPLES = 3, 64, 4, 6, 3, 6
#: Sizes that people choose, and how many of those are tried.
_DECIMAL = (50, 60, 90, 100, 120, 150, 180, 200, 240, 250, 300, 360, 400, 450, 500, 600, 750, 900, 1000, 1200, 1500)
_MOST_DECIMAL = 32
#: By how much a size grows to be a near one: by more than any vector is wide; and so in the end, for plans that refuse
#: all others.
_NEAR, _GROWTH = (33, 99), 67
#: How many times as large a far size is, at most, and a call with it: so many elements, or times its own.
_FAR, _FAR_ELEMENTS, _FAR_CALL = 16, 1 << 19, 2.5
_FAR_ROUND = (1, 128, 256, 1024)
#: Beyond 65 535, the most blocks in a grid's second and third dimension, and beyond twice that, as much as a buffer for
#: a row has that was made for vocabularies; for so many sizes, with calls of so many elements, or times their own.
_TALL, MOST_TALL, _TALL_ELEMENTS, _TALL_CALL = ((131_100, 150_000), (65_600, 75_000)), 2, 1 << 22, 1.0
#: ... and where no other size may change: enough for numbers of elements that floats have no room for.
_TALL_MOST = 1 << 27
#: Rows by which it is told how long so many would take.
_STEPS = (1 << 10, 1 << 12)
_GROWS_FAR = 2
#: What sizes are multiples of that are tried where the reference takes none of the others.
_ROUND = (2, 4, 16, 64)
_MAX_FIXED = 2


def apply_variant(
    name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call with every tensor changed as the variant's name says; values stay where that is possible."""
    leaves, tree = flatten_call(args, kwargs)
    if name == STRIDED:
        leaves = {path: _strided(leaf) if isinstance(leaf, Tensor) else leaf for path, leaf in leaves.items()}
    elif match := _SPREAD.fullmatch(name):
        change, count = _stepped if match[1] == "step" else _padded, int(match[2])
        leaves = {path: change(leaf, count) if isinstance(leaf, Tensor) else leaf for path, leaf in leaves.items()}
    elif name == EXPANDED:
        leaves = {path: _expanded(leaf) if isinstance(leaf, Tensor) else leaf for path, leaf in leaves.items()}
    elif match := _OVERLAP.fullmatch(name):
        leaves = {
            path: _overlapping(leaf, random.Random(f"{match[1]} {path}")) if isinstance(leaf, Tensor) else leaf
            for path, leaf in leaves.items()
        }
    elif name == IN_FRONT:
        leaves = {path: _swapped_in_front(leaf) if isinstance(leaf, Tensor) else leaf for path, leaf in leaves.items()}
    elif match := _OUTER.fullmatch(name):
        pad, last = int(match[1]), match[2] == _CHANNELS_LAST
        leaves = {path: _outer(leaf, pad, last) if isinstance(leaf, Tensor) else leaf for path, leaf in leaves.items()}
    elif match := _ORDER.fullmatch(name):
        # Each in an order of its own: what holds for one tensor says nothing of the next.
        found = {path: random.Random(f"{match[1]} {path}") for path in leaves}
        leaves = {
            path: _reordered(leaf, found[path], match[2] == _SECOND) if isinstance(leaf, Tensor) else leaf
            for path, leaf in leaves.items()
        }
    elif name.startswith(TALL):
        # The others first: what grows is small by then.
        for old, new in sorted(_changes(name).items(), key=lambda change: change[1] > change[0]):
            leaves = {k: _resized(leaf, old, new) if isinstance(leaf, Tensor) else leaf for k, leaf in leaves.items()}
    elif name.startswith((TINY, MIXED, LEFT, *PARTED)):
        sizes = _changes(name)
        places = _places_of(name)
        leaves = {
            path: _cut(leaf, sizes, places) if isinstance(leaf, Tensor) else leaf for path, leaf in leaves.items()
        }
    elif name.startswith(APART):
        sizes, some = _changes(name), set(name.partition(" at ")[2].split(", "))
        leaves = {
            path: _cut(leaf, sizes, _named_in(some, path)) if isinstance(leaf, Tensor) else leaf
            for path, leaf in leaves.items()
        }
    elif match := _SIZE.fullmatch(name):
        old, new = int(match[1]), int(match[2])
        leaves = {path: _resized(leaf, old, new) if isinstance(leaf, Tensor) else leaf for path, leaf in leaves.items()}
    elif match := _FURTHER.fullmatch(name):
        old, new = int(match[1]), int(match[2])
        leaves = {path: _further(leaf, old, new) if isinstance(leaf, Tensor) else leaf for path, leaf in leaves.items()}
    elif (path := name.removeprefix(OTHER)) in leaves and path != name:
        leaves[path] = _mirrored(leaves[path])
    return unflatten_call(tree, leaves)


def kind_of(name: str) -> str:
    """A variant's name without the numbers that were drawn."""
    return re.sub(r" \d+", "", name)


def fixed_names(first: tuple[Any, ...], second: tuple[Any, ...]) -> Iterator[str]:
    """Names of variants with other values of what two draws, each (args, kwargs), have in common: a mask, positions.

    A kernel may have them built in. Rows of the last dimension are mirrored, so that none of a mask's loses its last
    entry.
    """
    leaves, others = (flatten_call(*call)[0] for call in (first, second))
    fixed = [path for path, leaf in leaves.items() if isinstance(leaf, Tensor) and _same(leaf, others.get(path))]
    for path in [path for path in fixed if not _same(leaves[path], _mirrored(leaves[path]))][:_MAX_FIXED]:
        yield f"{OTHER}{path}"


def _same(leaf: Tensor, other: Any) -> bool:
    return isinstance(other, Tensor) and leaf.shape == other.shape and torch.equal(leaf, other)


def _mirrored(leaf: Tensor) -> Tensor:
    """With each row of the last dimension back to front, or rotated by one where that is the same."""
    if leaf.dim() == 0 or leaf.shape[-1] < 2:
        return leaf
    mirrored = leaf.flip(-1)
    return leaf.roll(1, -1) if torch.equal(mirrored, leaf) else mirrored


def _strided(tensor: Tensor) -> Tensor:
    """The same values, with the last two dimensions swapped in memory and padding at each row's end."""
    if tensor.numel() < 2 or tensor.dim() == 0:
        return tensor
    if tensor.dim() == 1:
        return torch.stack([tensor, tensor], dim=1)[:, 0]
    swapped = tensor.transpose(-1, -2)
    padded = torch.cat([swapped, swapped[..., :1]], dim=-1)
    return padded[..., :-1].transpose(-1, -2)


def front_names(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[str]:
    """:data:`IN_FRONT`, where a tensor has such dimensions."""
    leaves, _ = flatten_call(args, kwargs)
    if any(not _swapped_in_front(leaf).is_contiguous() for leaf in leaves.values() if isinstance(leaf, Tensor)):
        yield IN_FRONT


def _swapped_in_front(tensor: Tensor) -> Tensor:
    """The same values, with the two dimensions before the last swapped in memory."""
    return tensor if tensor.dim() < 3 else tensor.transpose(-3, -2).contiguous().transpose(-3, -2)


def order_names(args: tuple[Any, ...], kwargs: Mapping[str, Any], promised: bool) -> Iterator[str]:
    """:data:`ORDER`, where a tensor has three dimensions: with the second one innermost, which is not yet
    channels_last, and, where any strides are promised, with another one."""
    leaves, _ = flatten_call(args, kwargs)
    if any(isinstance(leaf, Tensor) and len(_wide_dims(leaf)) > 2 for leaf in leaves.values()):
        yield f"{ORDER} {CHANCE.randrange(1 << 20)}{_SECOND}"
        if promised:
            yield f"{ORDER} {CHANCE.randrange(1 << 20)}"


def _wide_dims(tensor: Tensor) -> list[int]:
    return [dim for dim, size in enumerate(tensor.shape) if size > 1] if tensor.numel() else []


def _reordered(tensor: Tensor, chance: random.Random, second: bool) -> Tensor:
    """The same values with the dimensions in an order in memory that is neither their own nor channels_last."""
    wide = _wide_dims(tensor)
    if len(wide) < 3:
        return tensor
    known, order = (wide, [dim for dim in wide if dim != 1] + [1]), wide
    while order in known or (order[-1] == 1) != (second and 1 in wide):
        order = chance.sample(wide, len(wide))
    padded, pad = chance.randrange(1, len(wide)), chance.randint(*_ORDER_PADS)
    return _laid_out(tensor, order, order[padded], pad)


def outer_names(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[str]:
    """:data:`OUTER`, in either known order, where a tensor has three dimensions: who knows an order by its inner
    strides may take the outermost one for what it is as a rule."""
    leaves, _ = flatten_call(args, kwargs)
    deep = [leaf for leaf in leaves.values() if isinstance(leaf, Tensor) and len(_wide_dims(leaf)) > 2]
    if deep:
        yield f"{OUTER} {CHANCE.randint(*_OUTER_PADS)}"
    if any(1 in _wide_dims(leaf) for leaf in deep):
        yield f"{OUTER} {CHANCE.randint(*_OUTER_PADS)}{_CHANNELS_LAST}"


def _outer(tensor: Tensor, pad: int, channels_last: bool) -> Tensor:
    """The same values, with ``pad`` slices more behind the second dimension in memory."""
    wide = _wide_dims(tensor)
    if len(wide) < 3:
        return tensor
    order = [*(dim for dim in wide if dim != 1), *(dim for dim in wide if dim == 1)] if channels_last else wide
    return _laid_out(tensor, order, order[1], pad)


def _laid_out(tensor: Tensor, order: Sequence[int], padded: int, pad: int) -> Tensor:
    """The same values, the dimensions in memory in this ``order``, ``pad`` entries more behind ``padded``."""
    # Sizes of one have no place of their own.
    order = [dim for dim in range(tensor.dim()) if dim not in order] + [*order]
    place = order.index(padded)
    moved = tensor.permute(order)
    moved = torch.cat([moved, *[moved.narrow(place, 0, 1)] * pad], dim=place).contiguous()
    return moved.narrow(place, 0, tensor.shape[padded]).permute(sorted(range(tensor.dim()), key=order.__getitem__))


def _places_of(name: str) -> Callable[[int, int], bool]:
    """Whether a variant of this name changes the size of a dimension of so many."""
    if name.startswith(PARTED[0]):
        return lambda dim, dims: dim == dims - 1
    if name.startswith(PARTED[1]):
        return lambda dim, dims: dim < dims - 1
    return lambda dim, dims: True


def _named_in(some: Collection[str], path: str) -> Callable[[int, int], bool]:
    return lambda dim, dims: _place(path, dim) in some


def _place(path: str, dim: int) -> str:
    return f"{path}[{dim}]"


def _cut(tensor: Tensor, sizes: Mapping[int, int], places: Callable[[int, int], bool]) -> Tensor:
    for dim, size in enumerate(tensor.shape):
        if places(dim, tensor.dim()):
            new = sizes.get(size, size)
            tensor = _grown(tensor, dim, new) if new > size else tensor.narrow(dim, 0, new)
    return tensor.contiguous()


def strided_names(promised: bool = False, shared: bool = True) -> Iterator[str]:
    """Dimensions swapped in memory, elements apart, rows apart: a kernel that takes all of them takes strides as they
    come, not the two or three that it was written for. Where any are promised a stride may be zero, or shorter than a
    row, too (``shared``: several elements may be one); dispatch keeps such tensors from all other kernels."""
    yield STRIDED
    yield f"{STRIDED} step {CHANCE.randint(2, 4)}"
    yield f"{STRIDED} pad {CHANCE.randint(1, 7)}"
    if promised and shared:
        yield EXPANDED
        yield f"{OVERLAPPING} {CHANCE.randrange(1 << 20)}"


def _expanded(tensor: Tensor) -> Tensor:
    """All rows the first one, which memory has once: a stride of zero."""
    if tensor.numel() < 2 or tensor.dim() == 0:
        return tensor
    dim = next((dim for dim, size in enumerate(tensor.shape[:-1]) if size > 1), tensor.dim() - 1)
    return tensor.narrow(dim, 0, 1).contiguous().expand_as(tensor)


def _overlapping(tensor: Tensor, chance: random.Random) -> Tensor:
    """Each row of the last dimension begins within the row before. Only where values have either sign: rows that sum to
    one, or are sorted, would do so no more."""
    if tensor.dim() < 2 or min(tensor.shape[-2:]) < 2 or not tensor.is_floating_point():
        return tensor
    if not (bool((tensor < 0).any()) and bool((tensor > 0).any())):
        return tensor
    count, size = tensor.shape[-2:]
    step = chance.randrange(1, size)
    length = (count - 1) * step + size
    memory = tensor.reshape(*tensor.shape[:-2], count * size)[..., :length].contiguous()
    return memory.as_strided(tensor.shape, (*memory.stride()[:-1], step, 1))


def _stepped(tensor: Tensor, step: int) -> Tensor:
    """The same values, in every ``step``-th element of a wider tensor, from the second one on."""
    if tensor.numel() < 2 or tensor.dim() == 0:
        return tensor
    return tensor.repeat_interleave(step, -1)[..., 1::step]


def _padded(tensor: Tensor, pad: int) -> Tensor:
    """The same values with ``pad`` elements before each row and as many behind it."""
    if tensor.numel() < 2 or tensor.dim() == 0:
        return tensor
    edge = tensor[..., :1].expand(*tensor.shape[:-1], pad)
    return torch.cat([edge, tensor, edge], dim=-1)[..., pad : pad + tensor.shape[-1]]


def _resized(tensor: Tensor, old: int, new: int) -> Tensor:
    for dim, size in enumerate(tensor.shape):
        if size == old:
            tensor = (_grown(tensor, dim, new) if new > old else tensor.narrow(dim, 0, new)).contiguous()
    return tensor


def _grown(tensor: Tensor, dim: int, new: int) -> Tensor:
    """With the same values again along ``dim``, each time of other rows: what is largest in a part of one need not be
    so in all of it, and who looks at a part only is wrong."""
    others = [place for place in range(tensor.dim()) if place != dim]
    along = max(others, key=lambda place: (tensor.shape[place] > 1, place != tensor.dim() - 1), default=None)
    parts = [tensor]
    for part in range(1, -(-new // tensor.shape[dim])):
        parts.append(tensor if along is None else tensor.roll(part, along))
    grown = torch.cat(parts, dim=dim).narrow(dim, 0, new)
    return grown.sort(dim).values if _rises(tensor, dim) else grown


def _rises(tensor: Tensor, dim: int) -> bool:
    """Does it go up along this dimension, and not down anywhere? Offsets and edges have to stay in order."""
    steps = tensor.diff(dim=dim) if tensor.dtype in _ORDERED and tensor.shape[dim] > 2 else tensor[:0]
    return steps.numel() > 0 and bool((steps >= 0).all()) and bool((steps > 0).any())


def _further(tensor: Tensor, old: int, new: int) -> Tensor:
    """Grown where it has this size; of integers that point into it the upper half point as far from the end as they
    did. Which of them are equal, and their order, stays."""
    points = _may_index(tensor) and int(tensor.min()) >= 0 and _points_into(tensor, old)
    resized = _resized(tensor, old, new)
    return torch.where(resized >= old - old // 2, resized + (new - old), resized) if points else resized


def further_names(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[str]:
    """Names of variants with one size grown that integers point into, and pointed further: a table of another length, a
    cache with more places."""
    tensors, _ = _sizes(args, kwargs)
    indices = [tensor for tensor in tensors if _may_index(tensor) and torch.iinfo(tensor.dtype).bits > 8]
    sizes = dict.fromkeys(int(size) for tensor in tensors for size in tensor.shape if size > 1)
    pointed = [size for size in sizes if any(_points_into(tensor, size) for tensor in indices)]
    for size in pointed[:_MAX_FURTHER]:
        new = max(size + CHANCE.randint(*_NEAR), _FURTHER_PLACES + CHANCE.randint(*_NEAR))
        if _elements(tensors, size, new) <= max(_FAR_ELEMENTS, _FAR_CALL * sum(tensor.numel() for tensor in tensors)):
            yield f"further {size} -> {new}"


def neighbour_names(args: tuple[Any, ...], kwargs: Mapping[str, Any], dynamic: bool = False) -> Iterator[str]:
    """Names of variants with one size changed wherever it occurs, for the leading sizes: smaller, and several times as
    large. One after another of the same size and direction are for plans that refuse the ones before, or have other
    constants there; the first size (``dynamic``, where any size is promised: each of them) has such larger ones."""
    tensors, safe = _sizes(args, kwargs)
    for size in safe:
        yield from _renamed(size, (_smaller(size), size - 1))
    for place, size in enumerate(safe[:_MAX_NEIGHBOURS]):
        near = (size + CHANCE.randint(*_NEAR), size + _GROWTH) if dynamic or place == 0 else ()
        far = _far(size, tensors)
        yield from _renamed(size, (far, *near) if far else near)


def tiny_names(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[str]:
    """Names of variants with all sizes far smaller, or one of them; the first that the reference takes will do. A
    kernel may count on as many rows, warps or tiles as half the drawn sizes still have."""
    _, safe = _sizes(args, kwargs)
    found = [(size, CHANCE.randint(max(1, size // _TINY[0]), size // _TINY[1])) for size in safe if size >= _TINY[0]]
    together = [found] if len(found) > 1 else []
    for some in [*together, *([pair] for pair in found)]:
        yield f"{TINY} " + ", ".join(f"{old} -> {new}" for old, new in some)


def single_names(args: tuple[Any, ...], kwargs: Mapping[str, Any], dynamic: bool = False) -> Iterator[str]:
    """Names of variants with one size come down to one: the leading one, a batch of a single sample; each (``dynamic``)
    where any size is promised."""
    _, safe = _sizes(args, kwargs)
    yield from (f"{TINY} {size} -> 1" for size in (safe if dynamic else safe[:1]))


def twins_of(name: str) -> list[str]:
    """The same variant with another number in the place of each that the reference may take by accident (broadcast
    against what has another size): a size of which it takes no other number is none that may change."""
    found = []
    for old, new in _changes(name).items():
        if new < old and new <= _ACCIDENTAL:
            other = CHANCE.choice([size for size in _TWINS if size not in (old, *_changes(name))])
            found.append(re.sub(rf"\b{old} -> {new}\b", f"{old} -> {other}", name))
    return found


def smaller_tall(name: str) -> list[str]:
    """A tall variant with fewer rows, or whatever grows most, and with four times as many: how long such calls take
    tells how long tall ones would."""
    grown = sorted((new, old) for old, new in _changes(name).items() if new > old)
    if not grown or grown[-1][1] >= _STEPS[0] or grown[-1][0] <= _STEPS[1]:
        return []
    new, old = grown[-1]
    return [name.replace(f"{old} -> {new}", f"{old} -> {step}") for step in _STEPS]


def grown_size(name: str) -> int:
    """The largest size that a variant's name says."""
    return max(_changes(name).values())


def wide_names(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[str]:
    """Names of variants with thousands of rows, and tens of elements in each: larger than far ones, smaller than tall
    ones, for the leading size."""
    tensors, safe = _sizes(args, kwargs)
    for size in safe[:1]:
        rows = int(math.exp(CHANCE.uniform(*(math.log(end) for end in _WIDE))))
        least, most = _WIDE_OTHERS
        few = [number for number in range(least, most) if number != size]
        others = {other: CHANCE.choice(few) for other in safe if other != size and other > most}
        changes = {size: rows, **others}
        if rows > size and sum(_numel_with(tensor, changes) for tensor in tensors) <= _TALL_ELEMENTS:
            yield f"{TALL} " + ", ".join(f"{old} -> {new}" for old, new in changes.items() if old != new)


def mixed_names(args: tuple[Any, ...], kwargs: Mapping[str, Any], free: Collection[int]) -> Iterator[str]:
    """Names of variants in which all sizes are others that are ``free`` to change, or all but one of several: what
    fits pictures that are wider than high may not fit high ones."""
    tensors, safe = _sizes(args, kwargs)
    sizes = [size for size in safe if size in free]
    room = max(_FAR_ELEMENTS, _FAR_CALL * sum(tensor.numel() for tensor in tensors))
    ways = [sizes] * _MOST_MIXED if len(sizes) > 1 else []
    # A size that stays may be what a kernel is written for.
    ways += [[size for size in sizes if size != kept] for kept in sizes[:_MOST_MIXED]] if len(sizes) > 2 else []
    for changing in ways:
        for most in _MIXED:
            changes = {
                size: max(_LEAST_MIXED, int(size * math.exp(CHANCE.uniform(*map(math.log, most))))) for size in changing
            }
            fits = sum(_numel_with(tensor, changes) for tensor in tensors) <= room
            if fits and len({*changes.values(), *safe}) == len(changes) + len(safe):
                yield f"{MIXED} " + ", ".join(f"{old} -> {new}" for old, new in changes.items())
                break
    yield from _aspects(tensors, sizes, safe, room)


def left_names(args: tuple[Any, ...], kwargs: Mapping[str, Any], free: Collection[int]) -> Iterator[str]:
    """Names of variants in which all sizes that are ``free`` to change leave each remainder once, in no order, whatever
    number of lanes up to :data:`_LANES` a power of two is: a tail may be right for some of them only."""
    tensors, safe = _sizes(args, kwargs)
    sizes = [size for size in safe if size in free]
    most = _few_elements(tensors, sizes)
    orders = {size: CHANCE.sample(range(_LANES), _LANES) for size in sizes}
    for number in range(_LANES if most else 0):
        changes = {size: _that_leaves(order[number], most[size]) for size, order in orders.items()}
        if len({*changes.values(), *safe}) == len(changes) + len(safe):
            yield f"{LEFT} " + ", ".join(f"{old} -> {new}" for old, new in changes.items())


def _few_elements(tensors: Collection[Tensor], sizes: Sequence[int]) -> dict[int, int]:
    """How long each of ``sizes`` may be, the leading ones little where it were too many elements; none, where it is so
    even then."""
    most = {size: max(2 * _LANES, int(_LEFT_SPREAD * size)) for size in sizes}
    for size in sizes:
        if sum(_numel_with(tensor, most) for tensor in tensors) <= _LEFT_ELEMENTS:
            break
        most[size] = min(most[size], 2 * _LANES)
    return most if sum(_numel_with(tensor, most) for tensor in tensors) <= 2 * _LEFT_ELEMENTS else {}


def _that_leaves(remainder: int, most: int) -> int:
    """A number of which so many lanes leave ``remainder``, up to ``most``, as a rule no small one."""
    numbers = range(remainder, most + 1, _LANES)
    return CHANCE.choice([number for number in numbers if number >= _LEFT_LEAST] or list(numbers))


def _aspects(tensors: Collection[Tensor], sizes: Sequence[int], safe: Sequence[int], room: float) -> Iterator[str]:
    """Two neighbouring sizes of a tensor, the last ones that are free, are larger than drawn, and each of them is the
    larger one once, so that there are as many elements both times."""
    pairs = {
        (int(tensor.shape[dim - 1]), int(tensor.shape[dim])): tensor
        for tensor in tensors
        for dim in range(tensor.dim() - 1, 0, -1)
    }
    for pair in [pair for pair in pairs if len(set(pair)) > 1 and {*pair} <= {*sizes}][:_MOST_ASPECTS]:
        least = max(pair)
        for most in _ASPECTS:
            found = [CHANCE.randint(least + 1, max(least + 2, int(most * least))) for _ in range(2)]
            short, long = sorted(found)
            ways = [dict(zip(pair, way, strict=True)) for way in ((short, long + 1), (long + 1, short))]
            if all(sum(_numel_with(tensor, way) for tensor in tensors) <= room for way in ways):
                for way in ways:
                    if not {*way.values()} & {*safe}:
                        yield f"{MIXED} " + ", ".join(f"{old} -> {new}" for old, new in way.items())
                break


def vast_names(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[str]:
    """Names of variants with more elements in one tensor than 24 bits count, by the leading size alone."""
    ways = _VAST if CHANCE.random() < _VAST_CHANCE else _VAST[:1]
    for elements in reversed(ways):
        yield from _with_elements(elements, _VAST_ALL, args, kwargs)


def vaster_names(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[str]:
    """The same for a GPU, which counts more in the same time: floats tell one of four of so many apart."""
    yield from _with_elements(_VASTER, _VASTER_ALL, args, kwargs)


def _with_elements(
    elements: tuple[float, float], most: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[str]:
    tensors, safe = _sizes(args, kwargs)
    for size in safe[:1]:
        # As many as the tensor gets that has the most then; a square has the size twice.
        ways = [(list(t.shape).count(size), math.prod(other for other in t.shape if other != size)) for t in tensors]
        rows = min(int((CHANCE.uniform(*elements) / max(1, rest)) ** (1 / times)) for times, rest in ways if times)
        if rows > size and sum(_numel_with(tensor, {size: rows}) for tensor in tensors) <= most:
            yield f"{TALL} {size} -> {rows}"


def long_names(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[str]:
    """Names of variants in which rows of two tensors or more, each as long as its own, are so long that a product of
    two lengths has more than 32 bits."""
    tensors, safe = _sizes(args, kwargs)
    last = [size for size in dict.fromkeys(int(tensor.shape[-1]) for tensor in tensors) if size in safe]
    for others in ({}, {size: CHANCE.randint(5, 9) for size in safe if size not in last}):
        changes = {**others, **{size: CHANCE.randint(*_LONG) for size in last if size < _LONG[0]}}
        fits = sum(_numel_with(tensor, changes) for tensor in tensors) <= _TALL_ELEMENTS
        if len(last) > 1 and fits and len({*changes.values(), *safe}) == len(changes) + len(safe):
            yield f"{TALL} " + ", ".join(f"{old} -> {new}" for old, new in changes.items())


def plane_names(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[str]:
    """Names of variants with large pictures, in both directions, and one of them where there were several: what is
    counted in one of them may have no room, and what is summed there no digits, while more pictures change nothing."""
    tensors, safe = _sizes(args, kwargs)
    for tensor in (one for one in tensors if one.dim() >= 4):
        sides = [int(side) for side in tensor.shape[-2:]]
        changes = {safe[0]: 1} if safe and safe[0] == tensor.shape[0] and safe[0] not in sides else {}
        times = math.sqrt(CHANCE.uniform(*_PLANES) / max(1, _numel_with(tensor, changes)))
        times = min(times, CHANCE.uniform(_FAR / 2, _FAR))
        changes |= {side: int(side * times) for side in sides}
        fits = sum(_numel_with(other, changes) for other in tensors) <= _VAST_ALL
        if {*sides} <= {*safe} and times > _LEAST_GROWN and fits and not {*safe} & {*changes.values()}:
            yield f"{TALL} " + ", ".join(f"{old} -> {new}" for old, new in changes.items())
            return


def usual_names(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[str]:
    """Names of variants with as many columns as models have words, and as many rows as make some ten million elements:
    a batch of logits."""
    tensors, safe = _sizes(args, kwargs)
    last = {int(tensor.shape[-1]) for tensor in tensors}
    for size, other in itertools.product(safe[:1], (one for one in safe[1:] if one in last)):
        changes = {size: 1, other: CHANCE.choice(_WORDS)}
        changes[size] = rows = int(CHANCE.uniform(*_USUAL) / max(_numel_with(tensor, changes) for tensor in tensors))
        fits = sum(_numel_with(tensor, changes) for tensor in tensors) <= _VAST_ALL
        if rows > 1 and not {*changes} & {*changes.values()} and fits:
            yield f"{TALL} " + ", ".join(f"{old} -> {new}" for old, new in changes.items())


def landmark_names(args: tuple[Any, ...], kwargs: Mapping[str, Any], marks: Collection[int], most: int) -> list[str]:
    """Names of variants in which one size is one of ``marks``, or on either side of it, or a tensor's number of
    elements just beyond it, of ``most`` elements in all: some of them, drawn secretly, the sides of marks first."""
    tensors, safe = _sizes(args, kwargs)
    beside: dict[str, None] = {}
    beyond: dict[str, None] = {}
    for mark, size in itertools.product(marks, safe):
        largest = max(tensor.numel() // size for tensor in tensors if size in tensor.shape)
        sides = ((mark + 1, beside), (mark - 1, beside), (mark, beside))
        for new, found in (*sides, (mark // max(1, largest) + 1, beyond)):
            if new not in (size, 0, 1) and sum(_numel_with(tensor, {size: new}) for tensor in tensors) <= most:
                found[f"size {size} -> {new}"] = None
    drawn = [*CHANCE.sample(list(beside), len(beside)), *CHANCE.sample(list(beyond), len(beyond))]
    return list(dict.fromkeys(drawn))[:_MOST_LANDMARKS]


def multiple_names(args: tuple[Any, ...], kwargs: Mapping[str, Any], named: Collection[int], most: int) -> list[str]:
    """Names of variants in which one size is a multiple of a number that the target knows by name (a grid, a stride, a
    window), twice or four times it and so on, as sizes are: there a quotient is a whole number, or just not; and beside
    such a number, sizes that people choose (seconds of frames), whose quotients by it are short fractions."""
    tensors, safe = _sizes(args, kwargs)
    factors = [number for number in named if _LEAST_FACTOR <= number <= _MOST_FACTOR]
    found: dict[str, None] = {}

    def take(size: int, among: Iterable[int], count: int) -> None:
        other = [new for new in among if new not in safe]
        fits = [new for new in other if sum(_numel_with(tensor, {size: new}) for tensor in tensors) <= most]
        for new in CHANCE.sample(fits, min(len(fits), count)):
            found[f"size {size} -> {new}"] = None

    for size, factor in itertools.product(safe, CHANCE.sample(factors, min(len(factors), _MOST_FACTORS))):
        take(size, (factor << power for power in range(_DOUBLED)), _MULTIPLES)
    multiples = CHANCE.sample(list(found), min(len(found), _MOST_MULTIPLES))
    found.clear()
    for size in safe if factors else ():
        take(size, _DECIMAL, len(_DECIMAL))
    return [*multiples, *CHANCE.sample(list(found), min(len(found), _MOST_DECIMAL))]


def tall_names(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Names of variants with more rows than a grid has blocks in its second dimension, for the leading sizes: a kernel
    that starts as many as fit and does no more than one row in each leaves the others undone. For each size, those of
    which the first one will do that the reference takes: all other sizes are few, or as drawn where a device has room.
    """
    tensors, safe = _sizes(args, kwargs)
    room = max(_TALL_ELEMENTS, int(_TALL_CALL * sum(tensor.numel() for tensor in tensors)))
    for size in [size for size in safe if size < _TALL[-1][0]]:
        # None becomes the size that grows afterwards.
        few = [number for number in range(5, 10) if number != size]
        others = {other: CHANCE.choice(few) for other in safe if other != size and other > 9}
        ways = []
        for among, most in ((others, room), ({}, max(room, _TALL_MOST))):
            tall = ({size: CHANCE.randint(*one), **among} for one in _TALL)
            ways += [way for way in tall if sum(_numel_with(tensor, way) for tensor in tensors) <= most][:1]
        names = [f"{TALL} " + ", ".join(f"{old} -> {less}" for old, less in way.items()) for way in ways]
        if names:
            yield tuple(dict.fromkeys(names))


def _numel_with(tensor: Tensor, changes: Mapping[int, int]) -> int:
    return math.prod(changes.get(size, size) for size in tensor.shape)


def parted_names(args: tuple[Any, ...], kwargs: Mapping[str, Any], dynamic: bool = False) -> Iterator[str]:
    """Names of variants in which what has one size in last dimensions and in others has two: rows need not be as long
    as there are rows. ``dynamic``, where any size is promised: also far longer, or far more."""
    tensors, safe = _sizes(args, kwargs)
    for size in safe:
        last = any(tensor.shape[-1] == size for tensor in tensors)
        if last and any(size in tensor.shape[:-1] for tensor in tensors):
            yield from (f"{kind} {size} -> {_smaller(size)}" for kind in PARTED)
            far = _far(size, tensors) if dynamic else 0
            yield from (f"{kind} {size} -> {far}" for kind in PARTED if far)


def apart_names(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Iterator[str]]:
    """For each size that several tensors have, names of variants in which some of them have another one: there need not
    be as many queries as keys. In few places at first; which ones belong together only the reference can tell."""
    leaves, _ = flatten_call(args, kwargs)
    for size in _sizes(args, kwargs)[1]:
        found = [
            (path, dim)
            for path, leaf in leaves.items()
            if isinstance(leaf, Tensor)
            for dim, other in enumerate(leaf.shape)
            if other == size
        ]
        if len({path for path, _ in found}) > 1 and len(found) <= _MOST_PLACES:
            yield _apart(size, [_place(*one) for one in found])


def _apart(size: int, places: Sequence[str]) -> Iterator[str]:
    for count in range(1, len(places)):
        for some in itertools.combinations(places, count):
            yield f"{APART} {size} -> {_smaller(size)} at {', '.join(some)}"


def _sizes(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Tensor], list[int]]:
    """The tensors of a call, and the leading sizes among theirs that may change."""
    leaves, _ = flatten_call(args, kwargs)
    sizes: dict[int, None] = {}
    tensors = [leaf for leaf in leaves.values() if isinstance(leaf, Tensor) and leaf.dim()]
    for dim in range(max((t.dim() for t in tensors), default=0)):
        for tensor in tensors:
            if dim < tensor.dim() and tensor.shape[dim] > 1:
                sizes.setdefault(int(tensor.shape[dim]))
    indices = [tensor for tensor in tensors if _may_index(tensor)]
    safe = [size for size in sizes if not any(_points_into(tensor, size) for tensor in indices)]
    return tensors, safe[:_MAX_SMALLER]


def _renamed(size: int, found: Collection[int]) -> Iterator[str]:
    for new in dict.fromkeys(found):
        yield f"size {size} -> {new}"


def side_of(name: str) -> tuple[int, bool]:
    """The size that changes, and whether it grows: one of each that the reference takes has to be tried."""
    match = _SIZE.fullmatch(name)
    return (int(match[1]), int(match[2]) > int(match[1])) if match else (0, False)


def rounder_names(name: str) -> list[str]:
    """Sizes instead of ``name``'s, on its side of what was drawn, for references that take no odd ones, or only
    multiples of more: each of the four that can be."""
    match = _SIZE.fullmatch(name)
    if match is None:
        return []
    old, new = int(match[1]), int(match[2])
    least, most = (max(1, old // 2), old - 1) if new < old else (old + _NEAR[0], old + 2 * _NEAR[1])
    found = [range(-(-least // step) * step, most + 1, step) for step in _ROUND]
    return list(_renamed(old, [CHANCE.choice(sizes) for sizes in found if sizes]))


def grows_far(name: str) -> bool:
    """Whether a size grows by so much that a product of it with itself may fill a machine."""
    return any(new > _GROWS_FAR * old for old, new in _changes(name).items())


def _changes(name: str) -> dict[int, int]:
    return {int(old): int(new) for old, new in _CHANGE.findall(name)}


def _smaller(size: int) -> int:
    """Half of it at least; where that can be, one that no vector divides."""
    found = range(max(1, size // 2), size)
    return CHANCE.choice([new for new in found if new % 4] or list(found))


def _far(size: int, tensors: Collection[Tensor]) -> int:
    """A size beyond the next powers of two; 0 where a call with it would be too large."""
    now = sum(tensor.numel() for tensor in tensors)
    room = max(_FAR_ELEMENTS, int(_FAR_CALL * now))
    least = size + _NEAR[1] + 1
    most = max(_FAR * size, 2 * least)
    while most >= least and _elements(tensors, size, most) > room:
        most = int(0.9 * most)
    if most < least:
        return 0
    far = CHANCE.randint(max(least, most // 2), most)
    # Production's sizes are round ones, as a rule: some kernels have a way of their own for those.
    step = CHANCE.choice(_FAR_ROUND)
    rounded = far // step * step
    return rounded if rounded >= least else far


def _elements(tensors: Collection[Tensor], old: int, new: int) -> float:
    return sum(tensor.numel() * (new / old) ** list(tensor.shape).count(old) for tensor in tensors)


def _may_index(tensor: Tensor) -> bool:
    whole = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
    return whole and tensor.numel() > 0


def _points_into(tensor: Tensor, size: int) -> bool:
    """May the integers be indices into a dimension of ``size``, such as class numbers of so many classes?

    One left pointing behind a smaller dimension is undefined: on a device an assertion that ends the process.
    """
    largest = int(tensor.max())
    if largest >= size:
        return False
    # A size of the integers' own (a batch) is one they point into only where they reach far into it.
    return size not in tensor.shape or 2 * largest >= size
