"""A cache that knows what this CPU can do: to find out takes a second, and decides nothing where that is not what a
test is about."""

from __future__ import annotations

from pathlib import Path

from pytest_cudaforge.hardware import detect, roofline


def cache_with_ceilings(folder: Path, bytes_per_s: float = 2e10) -> Path:
    """``folder`` as an evaluator's cache, with invented ceilings in it."""
    roofline.store(detect("cpu"), folder, roofline.Ceilings(bytes_per_s, (("fp32", 1e11),)))
    return folder
