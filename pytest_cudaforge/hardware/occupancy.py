"""Theoretical occupancy from a kernel's resources and its launch, as CUDA's occupancy calculator reckons it. Pure.

What cannot be asked from the device (granularities of allocation) holds for every GPU since compute capability 7.0:
registers are handed out in 256s to a warp and warps in fours to an SM, shared memory in steps of 128 bytes (256 before
8.0) with 1 KiB of the system's in each block from 8.0 on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pytest_cudaforge.facts import DeviceFacts

__all__ = ["Occupancy", "theoretical"]

_WARP = 32
_REGISTERS_STEP, _WARPS_STEP = 256, 4
_RESERVED_SHARED_BYTES = 1024


@dataclass(frozen=True)
class Occupancy:
    """Blocks that one SM may hold by each limit; None where a limit is not known. ``waves``: the grid's blocks by what
    all SMs hold at once."""

    warps_per_block: int
    limit_blocks: int | None
    limit_warps: int | None
    limit_registers: int | None
    limit_shared: int | None
    blocks_per_sm: int
    percent: float
    waves: float

    @property
    def limited_by(self) -> str:
        """Which resources allow the fewest blocks: "registers", "shared memory", "warps", "blocks"."""
        named = {
            "registers": self.limit_registers,
            "shared memory": self.limit_shared,
            "warps": self.limit_warps,
            "blocks": self.limit_blocks,
        }
        return ", ".join(name for name, limit in named.items() if limit == self.blocks_per_sm)


def theoretical(
    device: DeviceFacts, grid: Sequence[int], block: Sequence[int], registers: int | None, shared_bytes: int
) -> Occupancy | None:
    """Occupancy of one launch; ``registers`` a thread, ``shared_bytes`` a block, static and dynamic together. None
    where the device does not tell how many threads its SMs take."""
    extra = dict(device.extra)
    most_warps = _number(extra, "max_threads_per_sm") // _WARP
    if not most_warps or not device.sm_count:
        return None
    warps = -(-_product(block) // _WARP)
    limits = {
        "blocks": _number(extra, "max_blocks_per_sm") or None,
        "warps": most_warps // warps,
        "registers": _by_registers(_number(extra, "registers_per_sm"), registers, warps),
        "shared": _by_shared(_number(extra, "shared_bytes_per_sm"), shared_bytes, device.arch),
    }
    blocks = min((limit for limit in limits.values() if limit is not None), default=0)
    return Occupancy(
        warps_per_block=warps,
        limit_blocks=limits["blocks"],
        limit_warps=limits["warps"],
        limit_registers=limits["registers"],
        limit_shared=limits["shared"],
        blocks_per_sm=blocks,
        percent=100.0 * blocks * warps / most_warps,
        waves=_product(grid) / (blocks * device.sm_count) if blocks else 0.0,
    )


def _by_registers(per_sm: int, registers: int | None, warps: int) -> int | None:
    if not per_sm or not registers:
        return None
    per_warp = _up(registers * _WARP, _REGISTERS_STEP)
    held_warps = per_sm // per_warp // _WARPS_STEP * _WARPS_STEP
    return held_warps // warps


def _by_shared(per_sm: int, shared_bytes: int, arch: str) -> int | None:
    if not per_sm:
        return None
    modern = _capability(arch) >= 80
    needed = _up(shared_bytes + (_RESERVED_SHARED_BYTES if modern else 0), 128 if modern else 256)
    return per_sm // needed if needed else None


def _capability(arch: str) -> int:
    digits = "".join(char for char in arch if char.isdigit())
    return int(digits) if digits else 0


def _number(extra: dict[str, str], name: str) -> int:
    text = extra.get(name, "")
    return int(text) if text.isdigit() else 0


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


def _product(sizes: Sequence[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total
