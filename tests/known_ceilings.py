"""A cache that knows what this CPU can do, and what torch.compile compiled before: to find out takes a second and ten,
and decides nothing where neither is what a test is about."""

from __future__ import annotations

import os
from pathlib import Path

from pytest_cudaforge.hardware import detect, roofline
from pytest_cudaforge.wiring import cache_dir


def cache_with_ceilings(folder: Path, bytes_per_s: float = 2e10) -> Path:
    """``folder`` as an evaluator's cache, with invented ceilings in it."""
    roofline.store(detect("cpu"), folder, roofline.Ceilings(bytes_per_s, (("fp32", 1e11),)))
    return compiled_before(folder)


def compiled_before(folder: Path) -> Path:
    """``folder`` as an evaluator's cache, with torch.compile's own at the user's place: what the compiler asks g++
    about this CPU at first is the same for all tests."""
    shared = cache_dir(os.environ) / "inductor"
    shared.mkdir(parents=True, exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "inductor").symlink_to(shared)
    return folder
