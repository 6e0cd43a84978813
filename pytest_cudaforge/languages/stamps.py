"""Which toolchain would compile here, told by where it lies: for a first call that wants to compile nothing.

``Language.fingerprint`` asks the compiler itself, which means to start or load it: more than the rest of a first call.
A stamp names the files instead (place, size, time) or the versions of installed wheels. It changes whenever they are
replaced; where it cannot tell, it is None. Standard library only.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

__all__ = ["files_stamp", "toolchain_stamp"]

_CPUINFO = Path("/proc/cpuinfo")
_CPU_FIELDS = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags", "Features", "CPU part")
#: Distributions whose versions say what NVRTC and CUDA's headers are.
_CUDA_WHEELS = ("cuda_bindings-", "cuda_core-", "cuda_python-", "nvidia_cuda_")


def toolchain_stamp(language: str) -> str | None:
    """What a binary of ``language`` depends on beside its source; None for a language that this does not know."""
    if language == "cpp":
        return _cpp_stamp()
    if language == "cuda":
        return _cuda_stamp()
    # Triton's kernels are compiled where they are forged.
    return "" if language == "triton" else None


def files_stamp(paths: Sequence[Path]) -> str:
    """Name, size and time of files; of one that is not there, that it is not."""
    return "\n".join(_file_stamp(path) for path in paths)


def _file_stamp(path: Path) -> str:
    try:
        facts = path.stat()
    except OSError:
        return f"{path} is absent"
    return f"{path} {facts.st_size} {facts.st_mtime_ns}"


def _cpp_stamp() -> str | None:
    """g++ and, as it compiles for this very CPU, what that is."""
    compiler = shutil.which("g++")
    if compiler is None:
        return None
    try:
        with _CPUINFO.open(encoding="utf-8", errors="replace") as file:
            first = file.read(16384).partition("\n\n")[0]
    except OSError:
        return None
    processor = [line for line in first.splitlines() if line.partition(":")[0].strip() in _CPU_FIELDS]
    return "\n".join((files_stamp([Path(compiler).resolve()]), *processor))


def _cuda_stamp() -> str | None:
    specs = [importlib.util.find_spec(name) for name in ("cuda", "nvidia")]
    places = {os.path.dirname(place) for spec in specs if spec for place in spec.submodule_search_locations or ()}
    wheels = sorted(name for place in places for name in _wheels(place))
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    toolkits = [Path(home).resolve() / "version.json" for home in homes if home]
    return "\n".join((*wheels, files_stamp(toolkits))) if places else None


def _wheels(folder: str) -> list[str]:
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    return [name for name in names if name.startswith(_CUDA_WHEELS) and name.endswith(".dist-info")]
