"""The file system as a child sees it: toolchain and installed packages, read-only, and a /tmp and /proc of its own."""

from __future__ import annotations

import os
import shutil
import stat
import sys
from collections.abc import Iterable
from pathlib import Path

from pytest_cudaforge.evaluation import kernel_calls
from pytest_cudaforge.evaluation.sandbox import ChildSpec

__all__ = ["CUDA_PATHS", "PROC_FILES", "build_view", "devices", "package_paths", "readable_paths"]

_SYSTEM_PATHS = (
    "/usr",
    "/lib",
    "/lib64",
    "/lib32",
    "/bin",
    "/sbin",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/alternatives",
    "/sys/devices/system/cpu",
    "/sys/devices/system/node",
)
CUDA_PATHS = ("/sys/devices", "/sys/bus", "/sys/module", "/etc/vulkan", "/run/nvidia-persistenced")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
#: Files of the host's /proc that are safe to read where a fresh /proc cannot be mounted.
PROC_FILES = (
    "/proc/self",
    "/proc/cpuinfo",
    "/proc/meminfo",
    "/proc/stat",
    "/proc/devices",
    "/proc/driver",
    "/proc/version",
)


def package_paths(readable: Iterable[str] = ()) -> tuple[str, ...]:
    """Where installed packages lie, torch among them: a child of native code without torch has no use for any. By each
    name that a path of ``readable`` gives them (a symbolic link to a virtual environment, /lib for /usr/lib)."""
    patterns = (f"{sys.base_prefix}/lib", "/usr/lib", "/usr/local/lib")
    found = [str(path) for top in patterns for path in Path(top).glob("python3*/*-packages")]
    found += [entry for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]
    real = [os.path.realpath(path) for path in found]
    tops = {path: os.path.realpath(path) for path in readable}
    aliases = [
        top + path[len(target) :]
        for path in real
        for top, target in tops.items()
        if path == target or path.startswith(target + "/")
    ]
    return tuple(dict.fromkeys([*real, *(os.path.abspath(path) for path in found), *aliases]))


def readable_paths(extra: Iterable[str] = ()) -> tuple[str, ...]:
    """Toolchain, installed packages and this package: everything a child may read, whether it exists or not."""
    packages = [entry for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]
    own_package = str(Path(__file__).resolve().parents[1])
    # Not sys.prefix as a whole: a virtual environment may be somebody's home or repository.
    interpreter = [sys.base_prefix + "/lib", sys.base_prefix + "/include", sys.base_prefix + "/bin"]
    paths = [*_SYSTEM_PATHS, *interpreter, *packages, own_package, *_compiler_paths(), *_ninja(), *extra]
    real = [os.path.realpath(path) for path in paths]
    return tuple(dict.fromkeys(path for path in [*paths, *real] if path.startswith("/") and path != "/"))


def _ninja() -> list[str]:
    """The one program of a virtual environment's bin folder that a build needs."""
    found = shutil.which("ninja") or shutil.which("ninja", path=str(Path(sys.prefix) / "bin"))
    return [found] if found else []


def _compiler_paths() -> list[str]:
    """The installation prefix of a compiler that lies outside the system (conda, a module system)."""
    found = [shutil.which(name) for name in (os.environ.get("CXX") or "g++", "g++", "nvcc")]
    prefixes = [Path(os.path.realpath(path)).parents[1] for path in found if path]
    home = Path(os.path.realpath(os.path.expanduser("~")))
    # A compiler in ~/bin does not open the home directory.
    return [str(prefix) for prefix in prefixes if len(prefix.parts) > 1 and not home.is_relative_to(prefix)]


def devices(spec: ChildSpec) -> list[str]:
    """What a child may open below /dev. A compiler would read an endless one until its time is up."""
    wanted = _DEVICES[:1] if spec.role == "builder" else _DEVICES
    found = [path for path in wanted if os.path.exists(path)]
    if spec.cuda:
        found += sorted(str(path) for path in Path("/dev").glob("nvidia*"))
    return found


def build_view(spec: ChildSpec, fresh_proc: bool) -> None:
    """In a new mount namespace: a root of read-only toolchain and packages, own /tmp, own /proc. Raises OSError."""
    kernel_calls.mount("", "/", flags=kernel_calls.MS_REC | kernel_calls.MS_PRIVATE)
    os.umask(0o022)
    wanted = [*_outermost([*spec.readable, *(CUDA_PATHS if spec.cuda else ())]), *devices(spec)]
    sources = [(path, os.open(path, os.O_PATH | os.O_CLOEXEC)) for path in wanted if os.path.exists(path)]
    # This package may be installed among those that are hidden.
    kept = [path for path in spec.readable if any(path.startswith(folder + "/") for folder in spec.hidden)]
    inside = [(path, os.open(path, os.O_PATH | os.O_CLOEXEC)) for path in kept if os.path.exists(path)]
    proc = os.open("/proc", os.O_PATH | os.O_CLOEXEC)
    root = next(path for path in ("/tmp", "/mnt", "/var", "/run") if os.path.isdir(path))
    kernel_calls.mount("tmpfs", root, "tmpfs", kernel_calls.MS_NOSUID, "mode=755,size=16m")
    # Before the binds: a virtual environment may lie below /tmp.
    os.makedirs(f"{root}/tmp")
    size = f",size={spec.limits.tmp_bytes}" if spec.defences.limits else ""
    flags = kernel_calls.MS_NOSUID | kernel_calls.MS_NODEV
    kernel_calls.mount("tmpfs", f"{root}/tmp", "tmpfs", flags, f"mode=1777{size}")
    for path, fd in sources:
        _bind(fd, root, path)
    _hide(root, spec.hidden)
    for path, fd in inside:
        _bind(fd, root, path)
    _mount_proc(proc, f"{root}/proc", spec, fresh_proc)
    kernel_calls.pivot_root(root)
    readonly = kernel_calls.MS_REMOUNT | kernel_calls.MS_BIND | kernel_calls.MS_RDONLY | kernel_calls.MS_NOSUID
    kernel_calls.mount("", "/", flags=readonly)


def _outermost(paths: Iterable[str]) -> list[str]:
    """``paths`` without those that lie below another."""
    kept: list[str] = []
    for path in sorted(set(paths), key=len):
        if not any(path.startswith(other + "/") for other in kept):
            kept.append(path)
    return kept


def _bind(source: int, root: str, path: str) -> None:
    target = root + path
    mode = os.fstat(source).st_mode
    if stat.S_ISDIR(mode):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "ab"):
            pass
    kernel_calls.mount(f"/proc/self/fd/{source}", target, flags=kernel_calls.MS_BIND | kernel_calls.MS_REC)
    os.close(source)
    if not stat.S_ISCHR(mode):
        kernel_calls.protect_mount(target)


def _hide(root: str, folders: Iterable[str]) -> None:
    """Cover folders that are there with empty ones; no child of ours may write to those (Landlock, or its user id)."""
    for folder in folders:
        if os.path.isdir(root + folder):
            kernel_calls.mount("tmpfs", root + folder, "tmpfs", kernel_calls.MS_NOSUID, "mode=755,size=64k")


def _mount_proc(host_proc: int, target: str, spec: ChildSpec, fresh: bool) -> None:
    os.makedirs(target, exist_ok=True)
    if fresh and spec.defences.processes:
        flags = kernel_calls.MS_NOSUID | kernel_calls.MS_NODEV | kernel_calls.MS_NOEXEC
        # The CUDA driver (570 and newer) names its threads through /proc/self/task/*/comm and fails with error 304
        # where it cannot.
        kernel_calls.mount("proc", target, "proc", flags if spec.cuda else flags | kernel_calls.MS_RDONLY)
        if spec.cuda:
            _protect_settings(target)
    elif spec.cuda or not spec.defences.processes:
        # The driver needs /proc/driver and /proc/self; Landlock leaves only those open.
        flags = kernel_calls.MS_BIND | kernel_calls.MS_REC
        kernel_calls.mount(f"/proc/self/fd/{host_proc}", target, flags=flags)
    os.close(host_proc)


def _protect_settings(proc: str) -> None:
    """Read-only again: the parts of a writable /proc that set up the kernel."""
    for name in ("acpi", "bus", "fs", "irq", "scsi", "sys", "sysrq-trigger"):
        path = f"{proc}/{name}"
        if os.path.exists(path):
            kernel_calls.mount(path, path, flags=kernel_calls.MS_BIND | kernel_calls.MS_REC)
            kernel_calls.protect_mount(path)
