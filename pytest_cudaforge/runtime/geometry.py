"""Views of a strided tensor as arithmetic on shape, strides and offset, by torch's rules; no storage is touched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pytest_cudaforge.errors import PlanError
from pytest_cudaforge.plan import TensorSpec, contiguous_strides
from pytest_cudaforge.runtime.values import describe

MAX_RANK = 32
MAX_PIECES = 4096
MAX_SIZE = 1 << 40  # elements


@dataclass(frozen=True)
class Layout:
    """Shape, strides and offset, all in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @property
    def numel(self) -> int:
        return TensorSpec(self.shape, "uint8", self.strides).numel

    @property
    def contiguous(self) -> bool:
        return self.numel == 0 or TensorSpec(self.shape, "uint8", self.strides).contiguous


def integer(value: Any, what: str) -> int:
    """``value`` as an int. Raises PlanError naming ``what``; a float gets the advice to use //."""
    if type(value) is int:
        return value
    hint = "use // instead of / for whole numbers" if type(value) is float else ""
    raise PlanError(f"{what} is {describe(value)}", expected="an integer", remedy=hint)


def dimension(layout: Layout, dim: Any, what: str, extra: int = 0) -> int:
    """``dim`` counted from the front; ``extra`` dimensions more than there are may be named (unsqueeze)."""
    rank = len(layout.shape) + extra
    number = integer(dim, what)
    # Like torch, a 0-dimensional tensor takes 0 and -1.
    if not -max(rank, 1) <= number < max(rank, 1):
        raise PlanError(f"{what} is {number}", expected=f"a dimension of a tensor of shape {layout.shape}")
    return number % max(rank, 1)


def sizes(values: Sequence[Any], what: str) -> tuple[int, ...]:
    """Sizes given as ``f(2, 3)`` or ``f((2, 3))``."""
    items = values[0] if len(values) == 1 and isinstance(values[0], (tuple, list)) else values
    if len(items) > MAX_RANK:
        raise PlanError(f"{what} has {len(items)} dimensions", expected=f"at most {MAX_RANK}")
    return tuple(integer(item, f"{what}[{i}]") for i, item in enumerate(items))


def permuted(layout: Layout, order: tuple[int, ...]) -> Layout:
    axes = [dimension(layout, axis, "permute dimension") for axis in order]
    if sorted(axes) != list(range(len(layout.shape))):
        raise PlanError(f"permute{order} of shape {layout.shape}", expected="every dimension once")
    return Layout(tuple(layout.shape[a] for a in axes), tuple(layout.strides[a] for a in axes), layout.offset)


def transposed(layout: Layout, first: Any, second: Any) -> Layout:
    a, b = dimension(layout, first, "transpose dimension"), dimension(layout, second, "transpose dimension")
    order = list(range(len(layout.shape)))
    if order:
        order[a], order[b] = order[b], order[a]
    return permuted(layout, tuple(order))


def viewed(layout: Layout, shape: tuple[int, ...], method: str) -> Layout:
    """``view`` and ``reshape``. Raises PlanError where that would need a copy."""
    shape = _completed(layout, shape, method)
    if layout.numel == 0 or layout.contiguous:
        return Layout(shape, contiguous_strides(shape), layout.offset)
    strides = _view_strides(layout, shape)
    if strides is None:
        raise PlanError(
            f"{method}{shape} of a tensor with shape {layout.shape} and strides {layout.strides} needs a copy",
            remedy='pass the strides to the kernel, copy with op("aten.clone", x), or raise Unsupported',
        )
    return Layout(shape, strides, layout.offset)


def _completed(layout: Layout, shape: tuple[int, ...], method: str) -> tuple[int, ...]:
    known = 1
    for size in shape:
        if size < -1:
            raise PlanError(f"{method}{shape}", expected="sizes of at least 0, or one -1")
        known *= size if size != -1 else 1
    if shape.count(-1) == 1 and known and layout.numel % known == 0:
        shape = tuple(layout.numel // known if size == -1 else size for size in shape)
        known = layout.numel
    if -1 in shape or known != layout.numel:
        raise PlanError(f"{method}{shape} of a tensor of shape {layout.shape}", expected=f"{layout.numel} elements")
    return shape


def _view_strides(layout: Layout, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Strides of the new shape over the same storage, or None: runs of mergeable dimensions are split anew."""
    runs = _mergeable_runs(layout)
    strides = [0] * len(shape)
    place = len(shape) - 1
    for count, step in reversed(runs):
        taken = 1
        while place >= 0 and (taken < count or shape[place] == 1):
            strides[place] = taken * step
            taken *= shape[place]
            place -= 1
        if taken != count:
            return None
    return tuple(strides) if place == -1 else None


def _mergeable_runs(layout: Layout) -> list[tuple[int, int]]:
    """(elements, stride of the innermost) of each maximal run of dimensions that lie in storage as one."""
    runs: list[tuple[int, int]] = []
    for size, stride in zip(layout.shape, layout.strides, strict=True):
        if size == 1:
            continue
        if runs and runs[-1][1] == size * stride:
            runs[-1] = (runs[-1][0] * size, stride)
        else:
            runs.append((size, stride))
    return runs or [(1, 1)]


def expanded(layout: Layout, shape: tuple[int, ...]) -> Layout:
    lead = len(shape) - len(layout.shape)
    if lead < 0:
        raise PlanError(f"expand{shape} of shape {layout.shape}", expected=f"at least {len(layout.shape)} sizes")
    new_shape, strides = list(shape), [0] * len(shape)
    for i, size in enumerate(shape):
        old = layout.shape[i - lead] if i >= lead else 1
        if size == -1 and i >= lead:
            new_shape[i] = old
        if new_shape[i] < 0 or (old not in (1, new_shape[i])):
            raise PlanError(f"expand{shape} of shape {layout.shape}", expected="sizes of 1 grow, others stay")
        if i >= lead and old == new_shape[i]:
            strides[i] = layout.strides[i - lead]
    result = Layout(tuple(new_shape), tuple(strides), layout.offset)
    if result.numel > MAX_SIZE:
        raise PlanError(f"expand{shape} has {result.numel} elements", expected=f"at most {MAX_SIZE}")
    return result


def squeezed(layout: Layout, dims: tuple[Any, ...] | None) -> Layout:
    axes = range(len(layout.shape)) if dims is None else [dimension(layout, dim, "squeeze dimension") for dim in dims]
    kept = [i for i, size in enumerate(layout.shape) if not (size == 1 and i in axes)]
    return Layout(tuple(layout.shape[i] for i in kept), tuple(layout.strides[i] for i in kept), layout.offset)


def unsqueezed(layout: Layout, dim: Any) -> Layout:
    place = dimension(layout, dim, "unsqueeze dimension", extra=1)
    step = layout.shape[place] * layout.strides[place] if place < len(layout.shape) else 1
    shape = (*layout.shape[:place], 1, *layout.shape[place:])
    return Layout(shape, (*layout.strides[:place], step, *layout.strides[place:]), layout.offset)


def flattened(layout: Layout, start: Any, end: Any) -> Layout:
    if not layout.shape:
        return Layout((1,), (1,), layout.offset)
    first, last = dimension(layout, start, "flatten start_dim"), dimension(layout, end, "flatten end_dim")
    if first > last:
        raise PlanError(f"flatten from dimension {first} to {last}", expected="start_dim before end_dim")
    middle = 1
    for size in layout.shape[first : last + 1]:
        middle *= size
    return viewed(layout, (*layout.shape[:first], middle, *layout.shape[last + 1 :]), "flatten")


def narrowed(layout: Layout, dim: Any, start: Any, length: Any) -> Layout:
    axis = dimension(layout, dim, "narrow dimension")
    if not layout.shape:
        raise PlanError("narrow() of a 0-dimensional tensor")
    size = layout.shape[axis]
    begin, count = integer(start, "narrow start"), integer(length, "narrow length")
    begin = begin + size if begin < 0 else begin
    if count < 0 or not 0 <= begin <= size - count:
        raise PlanError(f"narrow({dim}, {start}, {length}) of shape {layout.shape}", expected=f"a part of its {size}")
    return _sliced(layout, axis, begin, count, 1)


def _sliced(layout: Layout, axis: int, begin: int, count: int, step: int) -> Layout:
    shape, strides = list(layout.shape), list(layout.strides)
    shape[axis], strides[axis] = count, layout.strides[axis] * step
    # An empty view never moves past the end of its buffer.
    offset = layout.offset + (begin * layout.strides[axis] if count else 0)
    return Layout(tuple(shape), tuple(strides), offset)


def split(layout: Layout, parts: Any, dim: Any) -> list[Layout]:
    """``split``: pieces of ``parts`` elements, or of the lengths listed."""
    axis = dimension(layout, dim, "split dimension")
    if not layout.shape:
        raise PlanError("split() of a 0-dimensional tensor")
    size = layout.shape[axis]
    if isinstance(parts, (tuple, list)):
        lengths = [integer(part, "split size") for part in parts]
        if sum(lengths) != size or min(lengths, default=0) < 0:
            raise PlanError(f"split sizes {tuple(lengths)} along {size}", expected=f"lengths that sum to {size}")
    else:
        step = integer(parts, "split size")
        if step <= 0:
            raise PlanError(f"split size {step}", expected="a positive integer")
        if -(-size // step) > MAX_PIECES:
            raise PlanError(f"split into {-(-size // step)} pieces", expected=f"at most {MAX_PIECES}")
        lengths = [min(step, size - begin) for begin in range(0, size, step)] or [0]
    pieces: list[Layout] = []
    begin = 0
    for length in lengths:
        pieces.append(_sliced(layout, axis, begin, length, 1))
        begin += length
    return pieces


def chunked(layout: Layout, chunks: Any, dim: Any) -> list[Layout]:
    count = integer(chunks, "chunks")
    axis = dimension(layout, dim, "chunk dimension")
    if count <= 0 or not layout.shape:
        raise PlanError(f"chunk({count}) of shape {layout.shape}", expected="a positive number of chunks")
    size = layout.shape[axis]
    if size == 0:
        return [layout] * min(count, MAX_PIECES)
    return split(layout, -(-size // count), axis)


def indexed(layout: Layout, key: Any) -> Layout:
    """``x[key]`` with integers, slices of positive step, None and one Ellipsis."""
    keys = key if isinstance(key, tuple) else (key,)
    for part in keys:
        if not (part is None or part is Ellipsis or type(part) is int or isinstance(part, slice)):
            raise PlanError(
                f"a tensor index of {describe(part)}",
                expected="integers, slices, None and ...",
                remedy="gather in a kernel: a plan never sees values",
            )
    named = sum(1 for part in keys if part is not None and part is not Ellipsis)
    if named > len(layout.shape) or sum(part is Ellipsis for part in keys) > 1:
        raise PlanError(
            f"{len(keys)} indices into a tensor of shape {layout.shape}", expected="at most one per dimension"
        )
    if Ellipsis not in keys:
        keys = (*keys, Ellipsis)
    axis = 0
    for part in keys:
        if part is Ellipsis:
            axis += len(layout.shape) - axis - _named_after(keys)
        elif part is None:
            layout, axis = unsqueezed(layout, axis), axis + 1
        elif isinstance(part, slice):
            layout, axis = _slice_along(layout, axis, part), axis + 1
        else:
            layout = selected(layout, axis, part)
    return layout


def _named_after(keys: tuple[Any, ...]) -> int:
    """Dimensions that the indices after the Ellipsis take."""
    place = next(i for i, part in enumerate(keys) if part is Ellipsis)
    return sum(1 for part in keys[place + 1 :] if part is not None)


def selected(layout: Layout, axis: int, index: Any) -> Layout:
    size = layout.shape[axis]
    number = integer(index, "index")
    if not -size <= number < size:
        raise PlanError(f"index {number} is out of range for dimension {axis} of shape {layout.shape}")
    shape, strides = list(layout.shape), list(layout.strides)
    offset = layout.offset + (number % size) * strides[axis]
    del shape[axis], strides[axis]
    return Layout(tuple(shape), tuple(strides), offset)


def _slice_along(layout: Layout, axis: int, part: slice) -> Layout:
    for bound in (part.start, part.stop, part.step):
        if bound is not None:
            integer(bound, "slice bound")
    if part.step is not None and part.step <= 0:
        raise PlanError(
            f"a tensor slice with step {part.step}", expected="a positive step", remedy="reverse in the kernel"
        )
    begin, end, step = part.indices(layout.shape[axis])
    count = max(0, -(-(end - begin) // step))
    return _sliced(layout, axis, begin, count, step)
