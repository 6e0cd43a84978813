"""How fast could it be? The time that bytes or operations need at least, from ceilings measured once per device.

``measure`` runs torch and is called in the oracle's process; everything else is plain arithmetic and one JSON file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import importlib.resources
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pytest_cudaforge.errors import DeviceError
from pytest_cudaforge.hardware import detect, parse_device
from pytest_cudaforge.records import DeviceFacts, WorkloadFacts, from_json, to_json

__all__ = [
    "Ceilings",
    "bandwidth",
    "bound",
    "load",
    "measure",
    "minimal_ns",
    "nominal",
    "reference_ns",
    "sol_percent",
    "store",
    "with_ceilings",
]

_FORMAT = 2
#: Products of a compensated one: high by high, high by low, low by high.
_PARTS = 3
_GPU_COPY_BYTES = 2**30
#: A copy that is to come from memory moves so many times what the caches hold, but no more bytes than these.
_BEYOND_CACHES, _MOST_CPU_COPY_BYTES = 2, 2**29
#: Copies within a GPU's cache take microseconds: so many at once, behind so many clocks of waiting.
_CACHED_COPIES, _WAIT_CLOCKS = 20, 400_000
_CPU_SIDES = (256, 1024)
_GPU_SIDES = (4096, 8192)
_TRIAL_S = 0.1
_MOST_TRIALS = 200


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """What a device can do: bytes read plus written per second from and to its memory, FLOP/s by precision, and
    (capacity in bytes, bytes/s) of its caches, innermost first. ``disturbed``: others used the device meanwhile."""

    bandwidth_bytes_per_s: float
    peak_flops: tuple[tuple[str, float], ...] = ()
    cache_bandwidths: tuple[tuple[int, float], ...] = ()
    disturbed: bool = False


# -- arithmetic ------------------------------------------------------------------------------------------------


def minimal_ns(
    min_bytes: int, flops: int, precision: str, facts: DeviceFacts, working_set_bytes: int | None = None
) -> float | None:
    """The roofline: the longer of bytes ÷ bandwidth and FLOPs ÷ peak, in ns; None where no bandwidth is known.

    Ceilings are the measured ones of ``facts``, else the nominal ones of hardware.yaml. Where the precision has no
    peak, the bytes decide alone. ``min_bytes`` counts every byte read and every byte written once;
    ``working_set_bytes`` as in :func:`bandwidth`.
    """
    bytes_per_s, peaks = bandwidth(facts, working_set_bytes), _peaks(facts)
    if not bytes_per_s:
        return None
    peak = peaks.get(precision)
    compute_s = flops / peak if peak else 0.0
    return max(min_bytes / bytes_per_s, compute_s) * 1e9


def bandwidth(facts: DeviceFacts, working_set_bytes: int | None = None) -> float | None:
    """Bytes a second that data of repeated calls can move with, at most; None where that is not known.

    ``working_set_bytes`` is all that the calls touch in turn. What of it fits a cache comes from there every time, as
    nothing could keep more of it near; the rest, and all of it where None is given, comes from memory.
    """
    fallback = nominal(facts)
    memory = facts.bandwidth_bytes_per_s or (fallback.bandwidth_bytes_per_s if fallback else None)
    if not memory or not working_set_bytes:
        return memory
    left, within, seconds = working_set_bytes, 0, 0.0
    for capacity_bytes, cache in facts.cache_bandwidths:
        part = max(0, min(left, capacity_bytes - within))
        seconds, left, within = seconds + part / max(cache, memory), left - part, max(within, capacity_bytes)
    return working_set_bytes / (seconds + left / memory)


def reference_ns(
    workload: WorkloadFacts, precision: str, facts: DeviceFacts, working_set_bytes: int | None = None
) -> float | None:
    """The roofline of one call of a reference, in ns; None where no bandwidth is known.

    ``precision`` "default" are torch's own defaults: products in fp32, convolutions on CUDA in tf32 (cuDNN's choice).
    Under "fp32" a product may be one of parts on tensor cores that loses no digit (3xTF32), where they are faster so.
    Only products and convolutions are counted as operations; ``working_set_bytes`` as in :func:`bandwidth`.
    """
    min_bytes = workload.input_bytes + workload.state_bytes + workload.output_bytes
    if precision == "fp32" and facts.kind == "cuda" and "tf32" in _peaks(facts):
        ways = ((workload.flops, "fp32"), (_PARTS * workload.flops, "tf32"))
        found = [minimal_ns(min_bytes, flops, way, facts, working_set_bytes) for flops, way in ways]
        return min((ns for ns in found if ns is not None), default=None)
    if precision != "default":
        return minimal_ns(min_bytes, workload.flops, precision, facts, working_set_bytes)
    convolutions = workload.convolution_flops if facts.kind == "cuda" else 0
    memory_ns = minimal_ns(min_bytes, 0, "fp32", facts, working_set_bytes)
    products_ns = minimal_ns(0, workload.flops - convolutions, "fp32", facts)
    convolutions_ns = minimal_ns(0, convolutions, "tf32", facts)
    if memory_ns is None or products_ns is None or convolutions_ns is None:
        return None
    return max(memory_ns, products_ns + convolutions_ns)


def bound(min_bytes: int, flops: int, precision: str, facts: DeviceFacts) -> str:
    """What limits the work on this device: ``"memory"``, ``"compute"`` or ``"unknown"``."""
    bytes_per_s, peak = bandwidth(facts), _peaks(facts).get(precision)
    if not bytes_per_s or not peak:
        return "unknown"
    return "compute" if flops / peak > min_bytes / bytes_per_s else "memory"


def sol_percent(measured_ns: float, minimal: float | None) -> float | None:
    """Speed of light in percent: the roofline's time ÷ the measured time; None where there is no roofline.

    More than 100 says that the estimate does not hold for this work: data came from a cache, operations were saved, or
    the ceiling was measured too low.
    """
    if minimal is None or measured_ns <= 0:
        return None
    return 100.0 * minimal / measured_ns


def _peaks(facts: DeviceFacts) -> dict[str, float]:
    fallback = nominal(facts)
    return {**dict(fallback.peak_flops if fallback else ()), **dict(facts.peak_flops)}


def nominal(facts: DeviceFacts) -> Ceilings | None:
    """The data sheet's ceilings of this device by name; failing that, what its clocks, its bus and its units say."""
    for row in _table()["devices"]:
        if facts.kind == "cuda" and row["match"] in facts.name:
            peaks = tuple((name, value * 1e12) for name, value in row["peaks_tflops"].items())
            return Ceilings(row["bandwidth_tb_per_s"] * 1e12, peaks)
    told = dict(facts.extra).get("nominal_bandwidth_bytes_per_s", "")
    if not told.isdigit() or not int(told):
        return None
    # A generation that the table does not know has at least what the newest one there has.
    lanes = _table()["fp32_lanes_per_sm"]
    per_sm = lanes.get(facts.arch) or list(lanes.values())[-1]
    # A fused multiply-add is two operations.
    peak = 2.0 * per_sm * facts.sm_count * facts.clock_mhz * 1e6
    return Ceilings(float(told), (("fp32", peak),) if peak else ())


@functools.cache
def _table() -> dict[str, Any]:
    import yaml

    text = importlib.resources.files("pytest_cudaforge.hardware").joinpath("hardware.yaml").read_text(encoding="utf-8")
    table: dict[str, Any] = yaml.safe_load(text)
    return table


# -- the cache -------------------------------------------------------------------------------------------------


def with_ceilings(
    facts: DeviceFacts, cache_dir: Path, measure_here: Callable[[], Ceilings] | None = None
) -> DeviceFacts:
    """``facts`` with measured ceilings: from the cache, else from ``measure_here()`` (which asks the oracle), kept
    unless they were ``disturbed``.

    Without ``measure_here`` and without a cached answer the facts come back as they are. A cache that cannot be
    written costs the next session a measurement and nothing else.
    """
    ceilings = load(facts, cache_dir)
    if ceilings is None and measure_here is not None:
        ceilings = measure_here()
        if not ceilings.disturbed:
            store(facts, cache_dir, ceilings)
    if ceilings is None:
        return facts
    return dataclasses.replace(
        facts,
        bandwidth_bytes_per_s=ceilings.bandwidth_bytes_per_s,
        peak_flops=ceilings.peak_flops,
        cache_bandwidths=ceilings.cache_bandwidths,
    )


def load(facts: DeviceFacts, cache_dir: Path) -> Ceilings | None:
    """The ceilings kept for this device and torch version; None where there are none or the file is broken."""
    try:
        data = json.loads(_cache_file(facts, cache_dir).read_text(encoding="utf-8"))
        found: Ceilings = from_json(Ceilings, data["ceilings"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    figures = [found.bandwidth_bytes_per_s, *(value for _, value in (*found.peak_flops, *found.cache_bandwidths))]
    return found if all(value > 0 for value in figures) and data.get("format") == _FORMAT else None


def store(facts: DeviceFacts, cache_dir: Path, ceilings: Ceilings) -> bool:
    """Write the ceilings atomically; False where the directory cannot be written."""
    file = _cache_file(facts, cache_dir)
    data = {
        "format": _FORMAT,
        "device": facts.name,
        "uuid": facts.uuid,
        "measured_on": time.strftime("%Y-%m-%d"),
        "ceilings": to_json(ceilings),
    }
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".tmp", delete=False, encoding="utf-8") as out:
            json.dump(data, out, indent=1)
        os.replace(out.name, file)
    except OSError:
        return False
    return True


def _cache_file(facts: DeviceFacts, cache_dir: Path) -> Path:
    try:
        torch_version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch_version = "none"
    identity = [facts.name, facts.arch, facts.uuid, facts.sm_count, facts.l2_bytes, facts.extra, torch_version]
    digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
    return cache_dir / f"ceilings-{facts.arch}-{digest}.json"


# -- measurement (in the oracle's process) ---------------------------------------------------------------------


def measure(device: str) -> Ceilings:
    """Copy bandwidth of memory and caches (bytes read plus written per second) and matrix-product peaks per precision.

    Uses torch and takes about 2 s; best of several trials, since a ceiling is what the device can do, not what it
    does on average. Call it in the oracle's process with nothing else running on the device.

    Raises DeviceError where torch does not see the device.
    """
    import torch

    kind, _ = parse_device(device)
    if kind == "cuda" and not torch.cuda.is_available():
        raise DeviceError(
            f"torch does not see {device}",
            expected="a torch built for CUDA and a GPU",
            remedy="install a CUDA build of torch, or use --forge-device cpu",
        )
    facts = detect(device)
    caches = _cache_sizes(facts)
    # Events belong to the current device.
    with torch.inference_mode(), torch.cuda.device(device) if kind == "cuda" else contextlib.nullcontext():
        memory = _copy_bandwidth(torch, device, kind, _beyond(facts, caches))
        cached = tuple((size, _cache_bandwidth(torch, device, kind, size)) for size in caches)
        peaks = tuple((name, value) for name in _precisions(kind) if (value := _product_peak(torch, device, name)))
    if kind == "cuda":
        torch.cuda.empty_cache()
    return Ceilings(memory, peaks, cached)


def _precisions(kind: str) -> tuple[str, ...]:
    return ("fp32", "tf32", "bf16", "fp16", "fp64") if kind == "cuda" else ("fp32", "bf16", "fp64")


def _cache_sizes(facts: DeviceFacts) -> tuple[int, ...]:
    """Capacities in bytes that all cores together see, innermost first: a CPU's L2s and its L3, a GPU's L2."""
    if facts.kind == "cuda":
        return (facts.l2_bytes,) if facts.l2_bytes else ()
    outer = int(dict(facts.extra).get("l3_bytes") or 0)
    inner = facts.l2_bytes * max(1, facts.sm_count)
    return tuple(size for size in (inner, outer) if size) if outer > inner else tuple(filter(None, (inner,)))


def _beyond(facts: DeviceFacts, caches: Sequence[int]) -> int:
    """How large a copied buffer has to be so that caches hold little of it, in bytes."""
    if facts.kind == "cuda":
        return _GPU_COPY_BYTES
    wanted = _BEYOND_CACHES * max(caches, default=16 * 2**20)
    return max(2**24, min(wanted, _MOST_CPU_COPY_BYTES, (facts.memory_bytes or 2**32) // 16))


def _copy_bandwidth(torch: Any, device: str, kind: str, size_bytes: int) -> float:
    source = torch.ones(max(1, size_bytes // 4), device=device)
    seconds = _best_seconds(torch, kind, functools.partial(torch.empty_like(source).copy_, source))
    return 2.0 * float(source.nbytes) / seconds


def _cache_bandwidth(torch: Any, device: str, kind: str, capacity_bytes: int) -> float:
    """Of copies whose two buffers fill half of the cache, so that there is room for what else is there.

    A GPU's take a few microseconds, of which a launch is a good part: what twice as much takes longer is the copy's.
    """
    if kind == "cpu":
        return _copy_bandwidth(torch, device, kind, capacity_bytes // 4)
    source = torch.ones(max(2, capacity_bytes // 16), device=device)
    target, half = torch.empty_like(source), len(source) // 2
    more_s = _queued_seconds(torch, functools.partial(target.copy_, source))
    less_s = _queued_seconds(torch, functools.partial(target[:half].copy_, source[:half]))
    return 2.0 * 4.0 * (len(source) - half) / max(more_s - less_s, 0.25 * more_s)


def _product_peak(torch: Any, device: str, precision: str) -> float:
    """FLOP/s of a square product on random data (zeros run faster than any real work), 0 where torch has none."""
    kind = parse_device(device)[0]
    name = {"fp32": "float32", "tf32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}[precision]
    best = 0.0
    with _Tf32(torch, precision == "tf32"):
        for side in _CPU_SIDES if kind == "cpu" else _GPU_SIDES:
            a = torch.randn(side, side, device=device, dtype=torch.float32).to(getattr(torch, name))
            out = torch.empty_like(a)
            try:
                seconds = _best_seconds(torch, kind, functools.partial(torch.mm, a, a, out=out))
            except RuntimeError:  # this build has no such product: no peak, and the bytes decide alone
                return best
            best = max(best, 2 * side**3 / seconds)
    return best


class _Tf32:
    """Sets torch's switch for tf32 products and puts back what was there."""

    def __init__(self, torch: Any, allowed: bool) -> None:
        self._switch, self._allowed = torch.backends.cuda.matmul, allowed

    def __enter__(self) -> None:
        self._before = self._switch.allow_tf32
        self._switch.allow_tf32 = self._allowed

    def __exit__(self, *_: object) -> None:
        self._switch.allow_tf32 = self._before


def _best_seconds(torch: Any, kind: str, call: Callable[[], object]) -> float:
    """Shortest time of one call, over trials that together take about ``_TRIAL_S``: the first ones may be slow by far
    (fresh pages, clocks that rise, units that wake up), and say nothing of how many are to come."""
    clock = _event_seconds if kind == "cuda" else _host_seconds
    call()
    best, trials, end = float("inf"), 0, time.perf_counter() + _TRIAL_S
    while trials < 3 or (trials < _MOST_TRIALS and time.perf_counter() < end):
        best, trials = min(best, clock(torch, call)), trials + 1
    return best


def _host_seconds(_torch: Any, call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _event_seconds(torch: Any, call: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _queued_seconds(torch: Any, call: Callable[[], object]) -> float:
    """Time of a call on a GPU, of several queued behind a kernel that waits: the host is slower than they are."""
    call()
    best = float("inf")
    for _ in range(20):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(_WAIT_CLOCKS)
        start.record()
        for _ in range(_CACHED_COPIES):
            call()
        end.record()
        end.synchronize()
        best = min(best, float(start.elapsed_time(end)) / 1e3 / _CACHED_COPIES)
    return best
