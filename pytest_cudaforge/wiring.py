"""From settings to the parts that a run is made of; what the pytest plugin and the command line share."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_cudaforge.config import ForgeConfig
    from pytest_cudaforge.evaluation.evaluator import Evaluator

__all__ = ["cache_dir", "open_evaluator"]


def open_evaluator(
    config: ForgeConfig,
    *,
    device: str | None = None,
    python_paths: Sequence[str | Path] = (),
    keep_blocks: bool = False,
    times: bool = True,
    workloads: Sequence[str] | None = None,
) -> Evaluator:
    """The evaluator that the settings describe; a context manager.

    ``device`` overrides the settings' own. ``python_paths`` are importable for targets, after their own import root
    and before the root of the repo. ``keep_blocks``: timings hold their raw blocks. ``times``: False
    where nothing will be timed. ``workloads``: names or patterns
    of those that count, None: all of a target's. Starts nothing by itself: children
    start when they are first needed. Raises ``DeviceError`` for a device that cannot be.
    """
    from pytest_cudaforge.evaluation.evaluator import Evaluator, EvaluatorSettings
    from pytest_cudaforge.hardware import choose

    return Evaluator(
        EvaluatorSettings(
            device=choose(device or config.device),
            arch=config.arch,
            isolation=config.isolation,
            cache_dir=cache_dir(os.environ),
            trials=config.trials,
            timing_budget_s=config.timing_budget_s,
            allow=config.allow,
            python_paths=tuple(str(path) for path in (*python_paths, config.root)),
            keep_blocks=keep_blocks,
            times=times,
            workloads=tuple(workloads) if workloads is not None else None,
        )
    )


def cache_dir(environ: Mapping[str, str]) -> Path:
    """Where builds and measured ceilings are kept: one place per user, so that a new checkout starts warm."""
    given = environ.get("XDG_CACHE_HOME", "")
    return (Path(given) if given else Path.home() / ".cache") / "cudaforge"
