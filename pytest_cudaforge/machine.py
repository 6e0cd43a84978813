"""On what machine was it measured? Hardware and toolchain as one record; standard library only, nothing is imported
and no CUDA context is made to find them.

Two measurements may be held against each other where :attr:`Machine.key` is the same: the same model of device in the
same kind of host. Which of several devices of one model it was, and the host's kernel, are told but do not part
histories: a pool of equal GPUs, or a CI image that is renewed every week, would never have one.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import platform
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from pytest_cudaforge.hardware import cpu
from pytest_cudaforge.records import DeviceFacts

__all__ = ["Machine", "Toolchain", "describe"]

_PROC = Path("/proc")
_ASK_S = 10.0


@dataclass(frozen=True)
class Toolchain:
    """What turns a source into the code that runs. Versions as text, "" for what is not there.

    ``cuda``: what torch was built for. ``driver``: NVIDIA's. ``compiler``: of launch plans, g++ or NVRTC."""

    torch: str = ""
    triton: str = ""
    cuda: str = ""
    driver: str = ""
    compiler: str = ""

    def changes(self, since: Toolchain) -> tuple[str, ...]:
        """``torch 2.10.0 → 2.11.0`` for each part that is not as it was; none where both are the same."""
        return tuple(
            f"{name} {getattr(since, name) or 'none'} → {getattr(self, name) or 'none'}"
            for name in (field.name for field in dataclasses.fields(self))
            if getattr(self, name) != getattr(since, name)
        )


@dataclass(frozen=True)
class Machine:
    """``device``: its model; on a CPU that of the CPU. ``device_id``: eight hex digits of a digest of a GPU's UUID, ""
    of a CPU. ``cores``: those that this process may use. ``kernel``: the host's."""

    device: str
    arch: str
    cpu: str
    cores: int
    device_id: str = ""
    kernel: str = ""
    python: str = ""
    toolchain: Toolchain = Toolchain()

    @functools.cached_property
    def key(self) -> str:
        """12 hex digits over what makes two machines the same hardware: device model, arch, CPU model and cores."""
        parts = (self.device, self.arch, self.cpu, str(self.cores))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]

    @property
    def hardware(self) -> str:
        """``NVIDIA H200 (sm_90, id 1a2b3c4d), 16 cores of Intel Xeon``."""
        host = f"{self.cores} core{'' if self.cores == 1 else 's'}"
        if self.arch == "cpu":
            return f"{self.device}, {host}"
        told = f"{self.device} ({self.arch}, id {self.device_id})" if self.device_id else f"{self.device} ({self.arch})"
        return f"{told}, {host} of {self.cpu}" if self.cpu else f"{told}, {host}"

    @property
    def text(self) -> str:
        """All of it on one line, for a failure's text."""
        used = self.toolchain
        named = [("torch", used.torch), ("triton", used.triton), ("CUDA", used.cuda), ("driver", used.driver)]
        versions = [f"{name} {version}" for name, version in named if version]
        versions += [used.compiler] if used.compiler else []
        versions += [f"Python {self.python}"] if self.python else []
        return " · ".join([self.hardware, *versions, *([self.kernel] if self.kernel else [])])


def describe(device: DeviceFacts) -> Machine:
    """This machine, as ``device`` is used on it. Takes some milliseconds the first time in a process."""
    gpu = device.kind == "cuda"
    host = cpu.detect() if gpu else device
    return Machine(
        device=device.name,
        arch=device.arch,
        cpu=host.name,
        cores=host.sm_count,
        device_id=hashlib.sha256(device.uuid.encode()).hexdigest()[:8] if device.uuid else "",
        kernel=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        toolchain=_toolchain(gpu),
    )


@functools.lru_cache(maxsize=2)
def _toolchain(gpu: bool) -> Toolchain:
    torch, cuda = _torch_and_cuda()
    return Toolchain(
        torch=torch,
        triton=_version_of("triton", "pytorch-triton"),
        cuda=cuda if gpu else "",
        driver=_driver_version() if gpu else "",
        compiler=_nvrtc() if gpu else _gxx(),
    )


def _torch_and_cuda() -> tuple[str, str]:
    """Of the installed torch, from its own files: an import would take seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return "", ""
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return _version_of("torch"), ""
    return _assigned("__version__", text), _assigned("cuda", text)


def _assigned(name: str, text: str) -> str:
    match = re.search(rf"^{name}\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return match.group(1) if match else ""


def _version_of(*packages: str) -> str:
    for package in packages:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def _driver_version(proc: Path = _PROC) -> str:
    """As ``nvidia-smi`` shows it: from the driver's own file, or through NVML where that is not to be seen."""
    try:
        text = (proc / "driver" / "nvidia" / "version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    match = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", text.split("\n", 1)[0])
    return match.group(1) if match else _driver_by_nvml()


def _driver_by_nvml() -> str:
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return ""
    try:
        nvml.nvmlInit()
        version = nvml.nvmlSystemGetDriverVersion()
    except nvml.NVMLError:
        return ""
    return version.decode() if isinstance(version, bytes) else str(version)


def _nvrtc() -> str:
    version = _version_of("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")
    return f"nvrtc {version}" if version else ""


def _gxx() -> str:
    try:
        done = subprocess.run(["g++", "-dumpfullversion"], capture_output=True, text=True, timeout=_ASK_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    version = done.stdout.strip()
    return f"g++ {version}" if done.returncode == 0 and version else ""
