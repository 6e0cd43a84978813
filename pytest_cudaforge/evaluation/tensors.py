"""Tensors over memory that is not torch's: arenas, seen by the oracle and by a module's worker."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pytest_cudaforge.errors import TargetError
from pytest_cudaforge.plan import TensorSpec
from pytest_cudaforge.runtime.signature import flatten_output

__all__ = ["bytes_at", "fetch", "tensor_at"]


def bytes_at(address: int, nbytes: int, device: torch.device) -> Tensor:
    """``nbytes`` of memory at ``address`` as a uint8 tensor with a storage of its own, without a copy."""
    if device.type == "cpu":
        # From the address, not from a mapping: a tensor must not keep a descriptor open.
        return torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), dtype=torch.uint8)
    return torch.as_tensor(_Exported(address, nbytes), device=device)


class _Exported:
    """Device memory as torch.as_tensor takes it."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


def tensor_at(address: int, spec: TensorSpec, device: torch.device) -> Tensor:
    """A tensor of ``spec`` whose first element lies at ``address``, a multiple of its element's size."""
    dtype: Any = getattr(torch, spec.dtype)
    if spec.numel == 0:
        return torch.empty_strided(spec.shape, spec.strides, dtype=dtype, device=device)
    return bytes_at(address, spec.extent_bytes, device).view(dtype).as_strided(spec.shape, spec.strides)


def fetch(output: Any, places: Mapping[str, Tensor]) -> None:
    """Copy the tensors that a call returned to their ``places``, by path. What does not fit leaves the old values."""
    if type(output) is Tensor:  # the most common answer, and it is timed
        leaves = {"out": output}
    else:
        try:
            leaves, _ = flatten_output(output)
        except TargetError:
            return
    for path, leaf in leaves.items():
        place = places.get(path)
        if place is None or not isinstance(leaf, Tensor) or leaf.device != place.device:
            continue
        if leaf.shape == place.shape and leaf.dtype == place.dtype:
            place.copy_(leaf)
