"""The Linux system calls that Python does not offer, through ctypes. Every function raises OSError on failure."""

from __future__ import annotations

import ctypes
import os
import platform

__all__ = [
    "MS_BIND",
    "MS_NODEV",
    "MS_NOEXEC",
    "MS_NOSUID",
    "MS_PRIVATE",
    "MS_RDONLY",
    "MS_REC",
    "MS_REMOUNT",
    "call",
    "detach_mount",
    "drop_capabilities",
    "mount",
    "pivot_root",
    "prctl",
    "protect_mount",
    "unshare",
]

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 32, 4096, 16384, 1 << 18
_MNT_DETACH = 2
_MOUNT_SETATTR = 442
_AT_RECURSIVE = 0x8000
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID = 1, 2
_PR_CAPBSET_DROP, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 24, 47, 4
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CAPSET = {"x86_64": 126, "aarch64": 91}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _checked(result: int, doing: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{doing}: {os.strerror(code)}")
    return result


def call(number: int, *args: object) -> int:
    """A raw system call; integers are passed as longs."""
    passed = [ctypes.c_long(a) if isinstance(a, int) else a for a in args]
    return _checked(int(_libc.syscall(ctypes.c_long(number), *passed)), f"system call {number}")


def prctl(option: int, *args: object) -> int:
    """prctl(2), missing arguments zero."""
    passed = [ctypes.c_ulong(a) if isinstance(a, int) else a for a in args]
    passed += [ctypes.c_ulong(0)] * (4 - len(passed))
    return _checked(int(_libc.prctl(ctypes.c_int(option), *passed)), f"prctl {option}")


def unshare(flags: int) -> None:
    """unshare(2); Python has it from 3.12 on."""
    _checked(_libc.unshare(ctypes.c_int(flags)), f"unshare({flags:#x})")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """mount(2); empty strings are passed as NULL."""
    text = [part.encode() if part else None for part in (source, target, kind)]
    result = _libc.mount(*text, ctypes.c_ulong(flags), options.encode() if options else None)
    _checked(int(result), f"mount {source} on {target}")


def protect_mount(target: str) -> None:
    """Make ``target`` and every mount below it read-only without set-user-id programs.

    mount_setattr (Linux 5.12) keeps the other flags, which a user namespace may not clear; older kernels take the
    remount, which covers the top mount only.
    """
    attributes = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID, 0, 0, 0)
    try:
        size = ctypes.c_long(ctypes.sizeof(attributes))
        call(_MOUNT_SETATTR, -100, target.encode(), _AT_RECURSIVE, ctypes.byref(attributes), size)
    except OSError:
        kept = os.statvfs(target).f_flag & (MS_NOSUID | MS_NODEV | MS_NOEXEC)
        mount("", target, flags=MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | kept)


def pivot_root(new_root: str) -> None:
    """Make ``new_root`` (a mount) the root and drop the old one."""
    os.chdir(new_root)
    call(_PIVOT_ROOT[platform.machine()], b".", b".")
    detach_mount(".")
    os.chdir("/")


def detach_mount(target: str) -> None:
    """umount2 with MNT_DETACH."""
    _checked(_libc.umount2(target.encode(), ctypes.c_int(_MNT_DETACH)), f"unmount {target}")


def drop_capabilities() -> None:
    """Give up every capability of this thread, for good: ambient, bounding, effective, permitted, inheritable."""
    try:
        prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
        for capability in range(64):
            prctl(_PR_CAPBSET_DROP, capability)
    except OSError:
        pass  # numbers past the last capability, or no right to drop: without capabilities there is nothing to lose
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    data = (ctypes.c_uint32 * 6)()
    call(_CAPSET[platform.machine()], ctypes.byref(header), ctypes.byref(data))
