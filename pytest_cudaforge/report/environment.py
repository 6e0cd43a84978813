"""On what a run took place: versions and devices, for whoever reads its report elsewhere."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Sequence

from pytest_cudaforge.records import Trace

__all__ = ["environment_of"]


def environment_of(traces: Sequence[Trace]) -> dict[str, str]:
    """Names and values, in the order they are shown; nothing of the user's own names, paths or keys."""
    devices = dict.fromkeys(f"{trace.hardware.name} ({trace.hardware.arch})" for trace in traces if trace.hardware)
    told = {
        "pytest-cudaforge": _version(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "devices": "; ".join(devices),
    }
    for name in ("torch", "cuda"):
        values = dict.fromkeys(dict(trace.final.environment).get(name, "") for trace in traces if trace.final)
        told[name] = ", ".join(value for value in values if value)
    return {name: value for name, value in told.items() if value}


def _version() -> str:
    try:
        return importlib.metadata.version("pytest-cudaforge")
    except importlib.metadata.PackageNotFoundError:
        # A checkout on PYTHONPATH works as well as an installation.
        return ""
