"""What device is here and how fast it can be: facts asked from the system, ceilings measured once.

No torch is imported here; :mod:`pytest_cudaforge.hardware.roofline` imports it inside ``measure`` only.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from pytest_cudaforge.errors import DeviceError
from pytest_cudaforge.facts import DeviceFacts, from_json

__all__ = ["choose", "describe", "detect", "detect_in_child", "parse_device"]

_CHILD_TIMEOUT_S = 60.0
_DEVICE = re.compile(r"(cpu)|cuda(?::(\d{1,3}))?")


def parse_device(device: str) -> tuple[str, int]:
    """``"cpu"``, ``"cuda"`` or ``"cuda:1"`` as (kind, index).

    Raises DeviceError for anything else.
    """
    match = _DEVICE.fullmatch(device)
    if match is None:
        raise DeviceError(
            f"unknown device {device!r}",
            expected="cpu, cuda or cuda:N",
            remedy="pass --forge-device cpu or --forge-device cuda:0",
        )
    if match.group(1):
        return "cpu", 0
    return "cuda", int(match.group(2) or 0)


def detect(device: str) -> DeviceFacts:
    """Facts of ``device``, without torch and without a CUDA context.

    For a CUDA device this calls ``cuInit`` in the calling process, and a process that has done so must not fork
    and use CUDA in the child: call it in a child that is about to end, in the oracle, or in production where CUDA
    is in use anyway. Everybody else calls :func:`detect_in_child`.

    Raises DeviceError where there is no such device, no driver or no binding to it.
    """
    kind, index = parse_device(device)
    if kind == "cpu":
        from pytest_cudaforge.hardware import cpu

        return cpu.detect()
    from pytest_cudaforge.hardware import gpu

    return gpu.detect(index)


def detect_in_child(device: str, *, timeout_s: float = _CHILD_TIMEOUT_S) -> DeviceFacts:
    """As :func:`detect`, asked of a short-lived child Python: the caller stays free of CUDA and may fork.

    Raises DeviceError with the child's own words, or where the child died or stayed silent for ``timeout_s``.
    """
    kind, _ = parse_device(device)
    if kind == "cpu":
        return detect(device)
    argv = [sys.executable, "-m", "pytest_cudaforge.hardware", device]
    try:
        # `-m` puts the working directory first on the path: "/" holds no module that could shadow one.
        done = subprocess.run(
            argv, env=_child_environment(), cwd="/", capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise DeviceError(
            f"the driver did not answer for {device} within {timeout_s:g} s",
            remedy="see whether `nvidia-smi` answers; a device that hangs needs its administrator",
        ) from None
    return _child_answer(device, done)


def _child_environment() -> dict[str, str]:
    # The child must find this very package, also where it is importable only through the parent's sys.path.
    root = str(Path(__file__).resolve().parents[2])
    inherited = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, *([inherited] if inherited else [])])}


def _child_answer(device: str, done: subprocess.CompletedProcess[str]) -> DeviceFacts:
    try:
        data = json.loads(done.stdout)
        if "error" in data:
            raise DeviceError(data["error"], expected=data.get("expected", ""), remedy=data.get("remedy", ""))
        facts: DeviceFacts = from_json(DeviceFacts, data["facts"])
    except (ValueError, KeyError, TypeError):
        tail = (done.stderr.strip().splitlines() or ["nothing on stderr"])[-1]
        raise DeviceError(
            f"the child that asks for {device} ended with status {done.returncode}: {tail}",
            remedy=f"run `{sys.executable} -m pytest_cudaforge.hardware {device}` to see it in full",
        ) from None
    return facts


def choose(device: str) -> str:
    """The device that a setting means: ``"auto"`` is ``"cuda:0"`` where a GPU answers, else ``"cpu"``.

    Asks a child only where the kernel shows an NVIDIA device, so that it costs nothing on other machines.
    """
    if device != "auto":
        kind, index = parse_device(device)
        return kind if kind == "cpu" else f"cuda:{index}"
    if not _driver_is_loaded():
        return "cpu"
    try:
        detect_in_child("cuda:0")
    except DeviceError:
        return "cpu"
    return "cuda:0"


def _driver_is_loaded() -> bool:
    # /dev/dxg is how WSL shows a GPU.
    return any(Path(path).exists() for path in ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg"))


def describe(facts: DeviceFacts) -> str:
    """One line for a report or `cudaforge doctor`: name, arch, units, caches, memory and measured ceilings."""
    extra = dict(facts.extra)
    parts = [facts.name, facts.arch]
    if facts.kind == "cpu":
        parts += [f"{facts.sm_count} cores", f"L2 {_mib(facts.l2_bytes)} a core", f"L3 {_mib(int(extra['l3_bytes']))}"]
        parts += [extra["isa"].replace(",", " ")] if extra.get("isa") else []
    else:
        parts += [f"{facts.sm_count} SMs", f"L2 {_mib(facts.l2_bytes)}"]
        parts += [f"{facts.max_shared_bytes / 1024:.0f} KiB shared a block"]
    parts.append(f"{facts.memory_bytes / 2**30:.0f} GiB")
    if facts.bandwidth_bytes_per_s:
        parts.append(f"copy {facts.bandwidth_bytes_per_s / 1e9:.3g} GB/s")
    parts += [f"{speed / 1e9:.3g} GB/s within {_mib(capacity)}" for capacity, speed in facts.cache_bandwidths]
    parts += [f"{name} {flops / 1e12:.3g} TFLOP/s" for name, flops in facts.peak_flops]
    return " · ".join(parts)


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.3g} MiB"
