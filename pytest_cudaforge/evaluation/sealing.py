"""Weights of a module where nobody can write them, for one call on a CPU.

Inputs lie in an arena that is mapped read-only; a module's weights are its own memory, beside much that it may write.
Who writes a row of them and puts the old one back shows in no comparison, and is wrong beside other threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["sealed"]

#: As torch's own allocator aligns.
_ALIGNMENT_BYTES = 64


@contextlib.contextmanager
def sealed(weights: Iterable[torch.Tensor]) -> Iterator[None]:
    """For as long as this lasts ``weights`` (dense, on the CPU) lie in memory whose writing ends the process; then they
    are where they were. What has been made of them meanwhile, a view that is kept, stays good: the memory lives on,
    and may be written again. Raises OSError where the kernel gives none."""
    import torch

    # A tied weight has two names, and is one tensor.
    apart = {id(weight): weight for weight in weights if weight.layout == torch.strided and weight.numel()}
    places, nbytes = [], 0
    for weight in apart.values():
        places.append(nbytes)
        nbytes += -(-_extent_bytes(weight) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    if not places:
        yield
        return
    # One page more: to read a little too far is for the guarded call to see, whose words fit.
    mapping = mmap.mmap(-1, nbytes + mmap.PAGESIZE)
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    usual = [weight.data for weight in apart.values()]
    for weight, old, place in zip(apart.values(), usual, places, strict=True):
        weight.data = _copied(old, memory[place : place + _extent_bytes(old)])
    _protect(memory, mmap.PROT_READ)
    try:
        yield
    finally:
        _protect(memory, mmap.PROT_READ | mmap.PROT_WRITE)
        for weight, old in zip(apart.values(), usual, strict=True):
            weight.data = old


def _extent_bytes(tensor: torch.Tensor) -> int:
    """From its first element to the end of its last."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (reach + 1) * tensor.element_size()


def _copied(tensor: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """The same values, shape and strides in ``memory`` (bytes, as many as it extends over)."""
    copy = memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
    return copy.copy_(tensor)


def _protect(memory: torch.Tensor, access: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    address, nbytes = ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.nbytes)
    if libc.mprotect(address, nbytes, access):
        raise OSError(ctypes.get_errno(), f"{memory.nbytes} bytes for weights cannot be protected")
