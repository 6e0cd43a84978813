"""A compiler configuration: options for ``torch.compile``, as data (``options.json``). Torch is imported lazily.

Only options are known here that choose *how* the same arithmetic is carried out: tile sizes, fusion, launches, threads.
Those that change what is computed (fast mathematics, TF32, half-precision accumulation, emulated casts) are none, and
neither is ``freezing``, which copies the weights into the code: a module whose weights are loaded later would go on
with the old ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pytest_cudaforge.errors import BuildFailure

__all__ = ["FILE_NAME", "GRAPHS", "LANGUAGE", "OPTIONS", "Configuration", "compiled", "parse"]

#: What a candidate of this kind is called where others are cuda or cpp.
LANGUAGE: Literal["compiler"] = "compiler"
FILE_NAME = "options.json"
#: CUDA graphs: an output lies in memory that the next call writes again, so every call's outputs are copied out.
GRAPHS = "triton.cudagraphs"

#: Inductor's names with the type of their values; all of them are there in torch 2.6 and later.
OPTIONS: Mapping[str, type] = {
    "aggressive_fusion": bool,
    "benchmark_combo_kernel": bool,
    "benchmark_fusion": bool,
    "combo_kernels": bool,
    "coordinate_descent_check_all_directions": bool,
    "coordinate_descent_tuning": bool,
    "cpp.enable_tiling_heuristics": bool,
    "cpp.max_horizontal_fusion_size": int,
    "cpp.min_chunk_size": int,
    "cpp.simdlen": int,
    "cpp.threads": int,
    "cpp_wrapper": bool,
    "epilogue_fusion": bool,
    "layout_optimization": bool,
    "loop_ordering_after_fusion": bool,
    "max_autotune_gemm": bool,
    "max_autotune_pointwise": bool,
    "max_fusion_size": int,
    "shape_padding": bool,
    "split_reductions": bool,
    GRAPHS: bool,
    "triton.cooperative_reductions": bool,
    "triton.persistent_reductions": bool,
    "unroll_reductions_threshold": int,
}


@dataclass(frozen=True)
class Configuration:
    """``options``: sorted (Inductor's name, value); none at all is torch.compile's default."""

    options: tuple[tuple[str, bool | int], ...] = ()

    @classmethod
    def of(cls, options: Mapping[str, bool | int]) -> Configuration:
        return cls(tuple(sorted(options.items())))

    def with_(self, more: Mapping[str, bool | int]) -> Configuration:
        """These options with ``more`` in place of theirs."""
        return Configuration.of({**dict(self.options), **more})

    def render(self) -> str:
        """The text of ``options.json``."""
        return json.dumps(dict(self.options), indent=1) + "\n"

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.options) or "torch.compile's default"


def parse(text: str) -> Configuration:
    """The configuration of an ``options.json``. Raises BuildFailure naming the option that is none, or no longer."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise BuildFailure(f"{FILE_NAME} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise BuildFailure(f"{FILE_NAME} is no object of options")
    for name, value in data.items():
        if name not in OPTIONS:
            raise BuildFailure(
                f"{FILE_NAME}: {name!r} is no option that may be chosen",
                expected="one of " + ", ".join(OPTIONS),
            )
        if type(value) is not OPTIONS[name]:
            raise BuildFailure(f"{FILE_NAME}: {name} = {value!r}", expected=f"a {OPTIONS[name].__name__}")
    return Configuration.of(data)


def compiled(function: Callable[..., Any], configuration: Configuration) -> Callable[..., Any]:
    """``function`` compiled for static shapes with these options; nothing is compiled before its first call.

    Raises BuildFailure where this torch has no such option.
    """
    import torch

    options: dict[str, Any] = dict(configuration.options)
    try:
        run = torch.compile(function, dynamic=False, options=options)
    except RuntimeError as error:
        first = str(error).strip().splitlines()[0]
        raise BuildFailure(f"torch {torch.__version__} does not take these options: {first[:300]}") from error
    return _copied_out(run) if options.get(GRAPHS) else run


def _copied_out(run: Callable[..., Any]) -> Callable[..., Any]:
    """No step is marked: torch tells the calls apart by itself, until somebody in the process once marks one."""
    import torch
    from torch.utils import _pytree

    def call(*args: Any, **kwargs: Any) -> Any:
        output = run(*args, **kwargs)
        if type(output) is torch.Tensor:
            return output.clone()
        return _pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, output)

    return call
