"""Regions of an arena: tensors over its bytes, how values are written where elements share memory, and red zones."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from pytest_cudaforge.evaluation.arena import HOST_ALIGN_BYTES, DeviceArena, HostArena
from pytest_cudaforge.evaluation.tensors import bytes_at
from pytest_cudaforge.plan import TensorSpec

__all__ = ["Header", "RedZones", "arena_bytes", "is_lent", "put", "region_view", "repeated", "same_bytes"]

Header = Literal["heap", "mapped"]
#: Bytes of the chunk before where that is free, then this one's size.
_HEADER = struct.Struct("<QQ")


def arena_bytes(arena: HostArena | DeviceArena, device: torch.device) -> Tensor:
    """The arena as one uint8 tensor on its device, without a copy."""
    return bytes_at(arena.address, arena.nbytes, device)


def region_view(bytes_: Tensor, offset: int, spec: TensorSpec) -> Tensor:
    """A tensor of ``spec`` whose first element lies at byte ``offset`` (which may be misaligned: then a copy)."""
    dtype = getattr(torch, spec.dtype)
    part = bytes_[offset : offset + spec.extent_bytes]
    flat = part.view(dtype) if offset % spec.itemsize_bytes == 0 else part.clone().view(dtype)
    return flat.as_strided(spec.shape, spec.strides)


def _once(tensor: Tensor, strides: Sequence[int] | None = None) -> Tensor:
    """Its elements but for those that memory has once and a stride of zero repeats (``strides``: another tensor's)."""
    for dim, stride in enumerate(tensor.stride() if strides is None else strides):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def repeated(leaves: Mapping[str, Any], drawn: Mapping[str, Any]) -> dict[str, Any]:
    """``leaves``, and what ``drawn`` has in memory once for several elements (a stride of zero, windows that slide) is
    one value in them, too."""
    found = dict(leaves)
    for path, leaf in leaves.items():
        like = drawn.get(path)
        if leaf is not like and isinstance(leaf, Tensor) and isinstance(like, Tensor) and leaf.shape == like.shape:
            found[path] = _in_memory_of(leaf, like) if _has_less_memory(like) else leaf
    return found


def _has_less_memory(tensor: Tensor) -> bool:
    """Do elements share it, as far as its size, or a stride of zero, says so?"""
    expanded = any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.numel() > 1 and (expanded or _extent(tensor) < tensor.numel())


def _extent(tensor: Tensor) -> int:
    """Elements from the first to the last in memory."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _in_memory_of(value: Tensor, like: Tensor) -> Tensor:
    """``value`` as memory that is laid out as ``like``'s can hold it: where elements share it, the first one's."""
    once, part = _once(value, like.stride()), _once(like)
    extent = _extent(part)
    if extent < part.numel():
        places = torch.arange(extent, device=value.device).as_strided(part.shape, part.stride()).flatten()
        order = torch.arange(len(places), device=value.device)
        # The least is the same on every device, and each time; what is written last to a place need not be.
        first = places.new_full((extent,), len(places) - 1).scatter_reduce_(0, places, order, "amin")
        once = once.flatten()[first].as_strided(part.shape, part.stride())
    return once.expand(like.shape)


def put(place: Tensor, value: Tensor, spec: TensorSpec) -> None:
    """Write a value where a region lies. Rows that overlap in memory are written as the bytes that they share."""
    if value.stride() == spec.strides and spec.extent_bytes < value.nbytes and 0 not in spec.strides:
        length = (spec.extent_bytes // spec.itemsize_bytes,)
        place.as_strided(length, (1,)).copy_(value.as_strided(length, (1,)))
    else:
        _once(place).copy_(_once(value, spec.strides))


class RedZones:
    """The bytes between an arena's regions: what they held before a call, and which of them it changed.

    See ``ZONES``.
    """

    def __init__(self, bytes_: Tensor, zones: Sequence[tuple[int, ...]], regions: Sequence[tuple[int, int]]) -> None:
        self.bytes, self.zones, self._regions = bytes_, zones, regions
        places = [torch.arange(offset, offset + nbytes) for offset, nbytes in zones]
        sources = [_neighbour(place, regions) for place in places]
        self._places, self._sources = (
            torch.cat([*t, torch.empty(0).long()]).to(bytes_.device) for t in (places, sources)
        )
        # On a host slices are faster than places, on a device one kernel is faster than many.
        self._views = [bytes_[o : o + n] for o, n in self.zones] if bytes_.device.type == "cpu" else []
        self._image = torch.empty(0)

    def write(self, pattern: int | Header | None) -> None:
        """Fill all of them: with one byte, or (None) with those of the region before; or with 0xFF, but for the bytes
        before each region, where malloc keeps what it has to know of a block."""
        if pattern is None:
            self._image = self.bytes[self._sources]
        elif isinstance(pattern, str):
            self._image = self._with_headers(pattern)
        else:
            self._image = torch.full_like(self._places, pattern, dtype=torch.uint8)
        for view, part in zip(self._views, self._parts(), strict=False):
            view.copy_(part)
        if not self._views:
            self.bytes[self._places] = self._image

    def _with_headers(self, kind: Header) -> Tensor:
        image = torch.full_like(self._places, 0xFF, dtype=torch.uint8)
        if not self._views:
            return image  # a GPU's memory has no such
        begin = 0
        for offset, nbytes in self.zones:
            end, begin = begin + nbytes, begin + nbytes
            sizes = [size for start, size in self._regions if start == offset + nbytes and size]
            if sizes and nbytes >= _HEADER.size:
                header = torch.frombuffer(bytearray(_header(kind, sizes[0])), dtype=torch.uint8)
                image[end - _HEADER.size : end] = header
        return image

    def changed(self) -> list[int]:
        """Offsets of the zones that do not hold any more what was written there."""
        if self._views:
            held = zip(self.zones, self._views, self._parts(), strict=True)
            return [offset for (offset, _), view, part in held if not torch.equal(view, part)]
        wrong = self.bytes[self._places] != self._image
        if not bool(wrong.any()):
            return []
        places = self._places[wrong]
        return [o for o, n in self.zones if bool(((places >= o) & (places < o + n)).any())]

    def _parts(self) -> Sequence[Tensor]:
        """What was written, zone by zone."""
        return torch.split(self._image, [nbytes for _, nbytes in self.zones]) if self._views else ()


def _header(kind: Header, nbytes: int) -> bytes:
    """What glibc's malloc has before a block of so many bytes that begins at a multiple of 64: the chunk's size with
    flags in its lowest bits (the one before is in use; it was mapped), and how far into its pages a mapped one is."""
    if kind == "heap":
        return _HEADER.pack(0, -(-(nbytes + 8) // 16) * 16 | 1)
    before = HOST_ALIGN_BYTES - _HEADER.size
    return _HEADER.pack(before, (-(-(nbytes + HOST_ALIGN_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE - before) | 2)


def _neighbour(zone: Tensor, regions: Sequence[tuple[int, int]]) -> Tensor:
    """For each byte of a zone one of the region before it (of the first one where it is before all)."""
    filled = [region for region in regions if region[1]]
    if not len(zone) or not filled:
        return zone
    before = [region for region in filled if region[0] <= int(zone[0])]
    offset, nbytes = max(before) if before else min(filled)
    return offset + torch.arange(len(zone)) % nbytes


def is_lent(region: str) -> bool:
    """Is it an input's, or the module's, and no output's?"""
    return region.startswith("state/") or region.partition("/")[2].startswith("input/")


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Bitwise equality, NaN payloads included, of two tensors of one spec."""
    if a.numel() == 0:
        return True
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(a.element_size())
    if width is None or a.is_complex():
        return torch.equal(torch.view_as_real(a.contiguous()), torch.view_as_real(b.contiguous()))
    return torch.equal(a.contiguous().view(width), b.contiguous().view(width))
