"""What a tensor of a module held when its kernel was verified, so that production can tell whether it still does.

A kernel may have a mask or a table built in that forward reads from a buffer. Bit for bit is too strict to hold a
module to that: cosines of two kinds of CPU differ in their last bit. So a fingerprint has a digest, which settles most
cases at once, and sums with signs drawn by position (a Rademacher sketch: Achlioptas 2003, "Database-friendly random
projections"), whose differences tell how far apart two tensors are without keeping either.
"""

from __future__ import annotations

import ctypes
import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["Fingerprint", "fingerprint_of", "is_alike"]

#: Digest of shape, dtype and bytes; digest of what has to be equal; the finite values' length; sums of them with signs.
#: The last two are empty where everything has to be equal: integers and booleans.
Fingerprint = tuple[str, str, tuple[float, ...]]

_SUMS = 8
#: Of the length: tables that two machines made differ by less, another mask or base by more.
_NEAR = 1e-4


def fingerprint_of(tensor: torch.Tensor) -> Fingerprint:
    """Of a dense tensor of any device and dtype; its bytes cross to the host."""
    exact = _digest(tensor)
    if not tensor.dtype.is_floating_point:
        return exact, exact, ()
    return exact, *_sketch(tensor)


def is_alike(tensor: torch.Tensor, then: Fingerprint) -> bool:
    """Are these the values that ``then`` was taken of, but for what another machine's rounding changes?"""
    exact, pattern, sums = then
    if _digest(tensor) == exact:
        return True
    if not tensor.dtype.is_floating_point or not sums:
        return False
    now_pattern, now_sums = _sketch(tensor)
    near = _NEAR * max(now_sums[0], sums[0])
    return now_pattern == pattern and all(abs(a - b) <= near for a, b in zip(now_sums, sums, strict=True))


def _digest(tensor: torch.Tensor) -> str:
    host = tensor.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{tuple(host.shape)} {host.dtype}".encode())
    size_bytes = host.numel() * host.element_size()
    if size_bytes:
        digest.update((ctypes.c_char * size_bytes).from_address(host.data_ptr()))
    return digest.hexdigest()


def _sketch(tensor: torch.Tensor) -> tuple[str, tuple[float, ...]]:
    """A digest of the shape and of where infinities and NaNs lie; length and signed sums of all else, in fp64."""
    import torch

    values = tensor.detach().cpu().double().flatten()
    finite = values.isfinite()
    kinds = torch.where(finite, 0.0, values.nan_to_num(nan=1.0, posinf=2.0, neginf=3.0)).to(torch.uint8)
    pattern = _digest(kinds.reshape(tensor.shape))
    values = torch.where(finite, values, 0.0)
    bits = _mixed(torch.arange(values.numel()))
    sums = [float((values * (1 - 2 * (bits >> k & 1))).sum()) for k in range(_SUMS)]
    return pattern, (float(values.norm()), *sums)


def _mixed(positions: torch.Tensor) -> torch.Tensor:
    """Bits that look drawn (SplitMix64: Steele et al. 2014), the same everywhere; int64, which wraps around."""
    mixed = (positions + 1) * -7046029254386353131
    mixed = (mixed ^ (mixed >> 30 & 0x3FFFFFFFF)) * -4658895280553007687
    mixed = (mixed ^ (mixed >> 27 & 0x1FFFFFFFFF)) * -7723592293110705685
    return mixed ^ (mixed >> 31 & 0x1FFFFFFFF)
