"""A Coder that needs no model: it searches torch.compile's options, one after the other, for one target.

What bounds the target (its baselines against the roofline) says which options may help, and in which order they are
tried. Each is tried on top of the best configuration so far, and kept where that became faster. Pure: the loop has
every candidate verified and timed as any other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pytest_cudaforge.chat import ChatReply, ChatRequest, Role
from pytest_cudaforge.config import ForgeConfig
from pytest_cudaforge.errors import ConfigError, ProviderError
from pytest_cudaforge.records import Baseline, Candidate, DeviceFacts, Proposal, Round, Stop
from pytest_cudaforge.runtime.configuration import FILE_NAME, GRAPHS, LANGUAGE, Configuration, parse
from pytest_cudaforge.strategies import Limits, best_round, speed_of_light

__all__ = ["LANGUAGE", "Bound", "NoModel", "Search", "bound_of", "described", "load", "obstacle"]

Bound = Literal["launches", "memory", "products"]

#: Below this a call's launches may take longer than its work.
_SHORT_NS = {"cuda": 100_000.0, "cpu": 100_000.0}
#: So many times the roofline a short call is bound by something else than memory or arithmetic.
_FAR = 3.0
#: Many short launches make a long call: so far from the roofline they are it, unless a single one may last as long.
_VERY_FAR, _LONG_NS = 30.0, 5e6
#: What an option has to gain to be kept; the clock's own noise gains less.
_GAIN = 1.02


@dataclass(frozen=True)
class Move:
    """Options to try together, and what they do."""

    options: Mapping[str, bool | int]
    what: str


_TUNING = Move(
    {"max_autotune_pointwise": True, "coordinate_descent_tuning": True}, "tile sizes of pointwise kernels by measuring"
)
_WIDER_TUNING = Move(
    {
        "max_autotune_pointwise": True,
        "coordinate_descent_tuning": True,
        "coordinate_descent_check_all_directions": True,
    },
    "tile sizes in all directions",
)
_GRAPH = Move({GRAPHS: True}, "one CUDA graph for all launches; outputs are copied out of it")
_COMBINED = Move({"combo_kernels": True, "benchmark_combo_kernel": True}, "independent kernels in one launch")
_GEMM = Move({"max_autotune_gemm": True}, "products by the fastest of several kernels, with what follows fused")
_FUSION = Move({"aggressive_fusion": True, "benchmark_fusion": True}, "more fusion, where measuring favours it")
_COOPERATIVE = Move({"triton.cooperative_reductions": True}, "several blocks share one reduction")
_ONE_THREAD = Move({"cpp.threads": 1}, "one thread: none to wake and to wait for")
_WRAPPER = Move({"cpp_wrapper": True}, "calls between kernels in C++")
_COARSE = Move({"cpp.min_chunk_size": 4096}, "fewer threads for short loops")
_NARROW = Move({"cpp.simdlen": 256}, "vectors of 256 bits")
_UNTILED = Move({"cpp.enable_tiling_heuristics": False}, "loops tiled wherever that is possible")
_WIDE_FUSION = Move({"aggressive_fusion": True, "max_fusion_size": 256}, "more fusion")

_MOVES: dict[tuple[str, Bound], tuple[Move, ...]] = {
    ("cuda", "launches"): (_GRAPH, _COMBINED, _FUSION, _GEMM, _TUNING),
    ("cuda", "memory"): (_TUNING, _COOPERATIVE, _FUSION, _GRAPH, _WIDER_TUNING),
    ("cuda", "products"): (_GEMM, _TUNING, _GRAPH, _FUSION, _COMBINED),
    ("cpu", "launches"): (_ONE_THREAD, _WRAPPER, _COARSE, _WIDE_FUSION),
    ("cpu", "memory"): (_WRAPPER, _NARROW, _COARSE, _UNTILED, _WIDE_FUSION, _ONE_THREAD),
    ("cpu", "products"): (_WRAPPER, _WIDE_FUSION, _UNTILED, _NARROW),
}
_BOUND_BY = {"launches": "short calls", "memory": "memory traffic", "products": "products and convolutions"}


class Search:
    """The configurations of one target, as a strategy and as the Coder behind it."""

    def __init__(self, device: DeviceFacts, baselines: Sequence[Baseline]) -> None:
        self.bound = bound_of(device, baselines)
        self._moves = _MOVES[device.kind, self.bound]

    def propose(self, rounds: Sequence[Round], limits: Limits) -> Proposal | Stop:
        if len(rounds) >= limits.rounds:
            return Stop(f"all {limits.rounds} rounds are played")
        if not self._left(rounds):
            return Stop(f"no configuration is left to try ({len(rounds)} were, for a target bound by {self._shown})")
        best = _kept(rounds)
        idle = len(rounds) - (best.number if best is not None else 0)
        if limits.patience and idle >= limits.patience:
            return Stop(f"{idle} configurations in a row brought nothing")
        timing = best.evaluation.timing if best is not None and best.evaluation is not None else None
        reached = speed_of_light(timing)
        if best is not None and reached is not None and reached >= limits.roofline_stop:
            return Stop(f"round {best.number} runs at {reached:.0%} of the roofline: little is left to gain")
        return Proposal("first", None) if best is None else Proposal("optimization", best.number)

    def candidate(self, rounds: Sequence[Round]) -> Candidate:
        """The next one: the best configuration so far with the next move's options."""
        best = _kept(rounds)
        tried = _configuration(best).with_(self._left(rounds)[0].options)
        parent = best.candidate.digest if best is not None and best.candidate is not None else None
        return Candidate.of(LANGUAGE, {FILE_NAME: tried.render()}, parent)

    def reason(self, rounds: Sequence[Round]) -> str:
        """Why :meth:`candidate` is tried next, in words."""
        return f"bound by {self._shown}: {self._left(rounds)[0].what}"

    def _left(self, rounds: Sequence[Round]) -> list[Move]:
        """The moves that no round has made: a resumed search may stand on other baselines, and another list, than the
        rounds before."""
        tried = [set(_configuration(entry).options) for entry in rounds]
        return [move for move in self._moves if not any(set(move.options.items()) <= options for options in tried)]

    @property
    def _shown(self) -> str:
        return _BOUND_BY[self.bound]


def obstacle(baselines: Sequence[Baseline]) -> str:
    """Why there is nothing to search: torch.compile fails on the reference as it is. "" where it does not."""
    failed = next((line for line in baselines if line.compile is None), None)
    return f"workload {failed.workload}: {failed.compile_note}" if failed is not None else ""


def bound_of(device: DeviceFacts, baselines: Sequence[Baseline]) -> Bound:
    """What the workload that takes longest is bound by: a short call far above the roofline by its launches, and a
    longer one very far above it; else by whichever of bytes and FLOPs gives the roofline."""
    line = max(baselines, key=_fastest_ns)
    fastest_ns, bandwidth = _fastest_ns(line), device.bandwidth_bytes_per_s
    if line.roofline_ns is None or not bandwidth:
        return "products" if line.flops else "memory"
    short = fastest_ns < _SHORT_NS[device.kind]
    if fastest_ns > (_FAR if short else _VERY_FAR) * line.roofline_ns and fastest_ns < _LONG_NS:
        return "launches"
    memory_ns = line.min_bytes / bandwidth * 1e9
    return "products" if line.roofline_ns > 1.05 * memory_ns else "memory"


def _fastest_ns(line: Baseline) -> float:
    return min(line.eager.median_ns, line.compile.median_ns if line.compile is not None else math.inf)


def _kept(rounds: Sequence[Round]) -> Round | None:
    """The best configuration, where it is clearly faster than torch.compile as it comes."""
    best = best_round(rounds)
    timing = best.evaluation.timing if best is not None and best.evaluation is not None else None
    if timing is None:
        return None
    gain = timing.speedup_eager if timing.speedup_compile is None else timing.speedup_compile
    return best if gain > _GAIN else None


def _configuration(entry: Round | None) -> Configuration:
    if entry is None or entry.candidate is None:
        return Configuration()
    return parse(entry.candidate.file(FILE_NAME))


def described(candidate: Candidate) -> str:
    """A configuration's options in one line."""
    return str(parse(candidate.file(FILE_NAME)))


# -- in a model's place ------------------------------------------------------------------------------------------


class NoModel:
    """``provider: compiler``: nobody is asked."""

    name = "torch.compile's options"

    async def complete(self, request: ChatRequest) -> ChatReply:
        raise ProviderError(f"the {request.role} is no model", expected="no question", remedy="set chat.coder.provider")


def load(config: ForgeConfig, role: Role) -> NoModel:
    """Raises ``ConfigError`` for a Judge: the search asks none, and a model's Judge has to read."""
    del config
    if role == "judge":
        raise ConfigError(
            "chat.judge.provider: compiler", expected="a model: the compiler searches, it does not read", remedy=""
        )
    return NoModel()
