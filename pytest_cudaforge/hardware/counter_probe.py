"""Can Nsight Compute read this GPU's counters? Asked once, with one kernel that does nothing.

``python -m pytest_cudaforge.hardware.counter_probe DEVICE`` is the process that ncu looks at in it.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from pytest_cudaforge.errors import DeviceError
from pytest_cudaforge.hardware import ncu, parse_device
from pytest_cudaforge.programs import end_in_time
from pytest_cudaforge.records import Rung

__all__ = ["Probe", "probe"]

_LIMIT_S = 30.0
_METRIC = "sm__cycles_active.avg"
#: The driver compiles it for whatever GPU there is.
_PTX = b".version 6.4\n.target sm_50\n.address_size 64\n.visible .entry forge_probe() { ret; }\n\0"
_PASSED_ON = (
    *("PATH", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"),
    *("NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "VIRTUAL_ENV", "LANG", "LC_ALL"),
)

INSTALL = "install Nsight Compute (it comes with the CUDA toolkit) and put ncu on the PATH"
PERMISSION = (
    "ask the administrator for `options nvidia NVreg_RestrictProfilingToAdminUsers=0` in "
    "/etc/modprobe.d/nvidia-profiling.conf and a reload of the driver (or a reboot); in a container, start it with "
    "`--cap-add SYS_ADMIN`, which the host's setting must allow, too"
)
_REMEDIES = (
    ("ERR_NVGPUCTRPERM", PERMISSION),
    ("DCGM", "ask whoever runs it to pause it: `dcgmi profile --pause`, afterwards `dcgmi profile --resume`"),
    ("LibraryNotLoaded", "a container runtime that shields the driver hides the counters: use another one (runc)"),
    ("too old", "install the ncu of the driver's own CUDA version, or a newer driver"),
)


class Probe(NamedTuple):
    """The highest rung of the ladder that can be reached for launch plans on this GPU, what an administrator can do
    about a lower one than "ncu", and what ncu said ("" for "ncu")."""

    rung: Rung
    remedy: str
    reason: str = ""


def probe(device: str = "cuda:0", environ: Mapping[str, str] | None = None) -> Probe:
    """Run ncu once on a kernel that does nothing; asked again, the answer is the first one. Never raises."""
    found = ncu.find_ncu(os.environ if environ is None else environ)
    passed = tuple((name, (environ or os.environ)[name]) for name in _PASSED_ON if name in (environ or os.environ))
    return _probed(device, found, passed)


@functools.lru_cache(maxsize=8)
def _probed(device: str, program: Path | None, environment: tuple[tuple[str, str], ...]) -> Probe:
    lower: Rung = "cupti" if importlib.util.find_spec("torch") is not None else "static"
    if program is None:
        return Probe(lower, INSTALL, "ncu was not found")
    reason = _reason(device, program, dict(environment))
    if not reason:
        return Probe("ncu", "")
    remedy = next((remedy for word, remedy in _REMEDIES if word in reason), f"try `{program} --version` by hand")
    return Probe(lower, remedy, reason)


def _reason(device: str, program: Path, environment: dict[str, str]) -> str:
    """Why ncu read no counter, in its own words where it has some; "" where it did."""
    root = str(Path(__file__).resolve().parents[2])
    with tempfile.TemporaryDirectory(prefix="cudaforge-probe-") as name:
        folder = Path(name)
        argv = [str(program), "--clock-control", "none", "--metrics", _METRIC, "--csv", "--page", "raw"]
        argv += [sys.executable, "-B", "-m", "pytest_cudaforge.hardware.counter_probe", device]
        own = {"HOME": name, "TMPDIR": name, "PYTHONPATH": root}
        try:
            status = end_in_time(argv, folder, {**environment, **own}, _LIMIT_S)
        except OSError as error:
            return f"ncu could not be started: {error}"
        if status is None:
            return f"ncu was ended after {_LIMIT_S:g} s"
        text = (folder / "output.txt").read_text(encoding="utf-8", errors="replace")
    if any(_METRIC in kernel.figures for kernel in ncu.parse_raw(text)):
        return ""
    return ncu.refusal_in(text) or f"ncu printed nothing that can be read: {' '.join(text.split())[:160]!r}"


def main() -> None:
    """Launch the kernel and wait for it. Raises DeviceError."""
    from cuda.bindings import driver

    def ask(answer: tuple[object, ...]) -> object:
        if answer[0] != driver.CUresult.CUDA_SUCCESS:
            raise DeviceError(f"the probe's kernel could not run: {answer[0]}")
        return answer[1] if len(answer) > 1 else None

    ask(driver.cuInit(0))
    handle = ask(driver.cuDeviceGet(parse_device(sys.argv[1])[1]))
    ask(driver.cuCtxSetCurrent(ask(driver.cuDevicePrimaryCtxRetain(handle))))
    function = ask(driver.cuModuleGetFunction(ask(driver.cuModuleLoadData(_PTX)), b"forge_probe"))
    ask(driver.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0))
    ask(driver.cuCtxSynchronize())


if __name__ == "__main__":
    main()
