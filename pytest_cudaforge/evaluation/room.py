"""How much memory the reference may take at sizes that grew far. One that grows in one place grows twice in a product
of it with itself, and what is judged is computed again in fp64, several times over. In the oracle's process only.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import torch

from pytest_cudaforge.hardware.cpu import available_bytes

__all__ = ["free_bytes", "share_bytes", "within"]

#: The reference's share of what is free: its answers in fp64, what they are compared with and by how much they may
#: differ take several times what it took itself.
_SHARE = 8


def free_bytes(device: str) -> int:
    """Bytes that can be had on ``device``, ``"cpu"`` or ``"cuda:0"``."""
    if torch.device(device).type == "cuda":
        with torch.cuda.device(device):
            unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
            return torch.cuda.mem_get_info()[0] + unused
    return available_bytes()


def share_bytes(device: str) -> int:
    """Bytes that one call of a reference may take in a probe, so that its answer can be judged, too; 0 where nothing
    says how many are free."""
    return free_bytes(device) // _SHARE


@contextlib.contextmanager
def within(device: str, nbytes: int) -> Iterator[None]:
    """Whoever asks for more than ``nbytes`` on top of what this process has gets an error from his allocator: on a CPU
    a RuntimeError or MemoryError, on a GPU torch.OutOfMemoryError. The kernel would have ended the process otherwise,
    or another one. 0: no limit."""
    if not nbytes:
        yield
        return
    if torch.device(device).type == "cuda":
        with torch.cuda.device(device):
            total = torch.cuda.mem_get_info()[1]
            torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_allocated() + nbytes) / total))
            try:
                yield
            finally:
                torch.cuda.set_per_process_memory_fraction(1.0)
        return
    # Not of addresses: malloc reserves many for each thread that it never uses.
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    pages = int(Path("/proc/self/statm").read_text().split()[5])
    most = pages * os.sysconf("SC_PAGESIZE") + nbytes
    if soft != resource.RLIM_INFINITY:
        most = min(most, soft)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
