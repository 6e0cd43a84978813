"""Landlock: what a process may open, by path, whatever its user id. Needs no privilege; Linux 5.13 and newer."""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Iterable

from pytest_cudaforge.evaluation.kernel_calls import call, prctl

__all__ = ["abi", "restrict"]

_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446
_VERSION_FLAG = 1
_PATH_BENEATH = 1
_EXECUTE, _WRITE, _READ, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REFER, _TRUNCATE, _IOCTL_DEVICE = 1 << 13, 1 << 14, 1 << 15
_FIRST_ABI_RIGHTS = (1 << 13) - 1
_FILE_RIGHTS = _EXECUTE | _WRITE | _READ | _TRUNCATE | _IOCTL_DEVICE
_NET_BIND_CONNECT = 3
_SCOPE_ABSTRACT_UNIX, _SCOPE_SIGNAL = 1, 2
_PR_SET_NO_NEW_PRIVS = 38


def abi() -> int:
    """The kernel's Landlock version, 0 where there is none."""
    try:
        return call(_CREATE, ctypes.c_void_p(None), ctypes.c_size_t(0), _VERSION_FLAG)
    except OSError:
        return 0


def _handled(version: int) -> int:
    rights = _FIRST_ABI_RIGHTS
    if version >= 2:
        rights |= _REFER
    if version >= 3:
        rights |= _TRUNCATE
    if version >= 5:
        rights |= _IOCTL_DEVICE
    return rights


def restrict(
    readable: Iterable[str],
    writable: Iterable[str],
    devices: Iterable[str],
    *,
    changeable: Iterable[str] = (),
    network: bool = True,
    processes: bool = True,
) -> None:
    """Allow this thread to read and execute below ``readable``, to do anything below ``writable`` and to use
    ``devices``; refuse every other path, for good. Below ``changeable`` files that exist may also be written.
    Paths that do not exist are left out.

    ``network`` also refuses TCP (ABI 4), ``processes`` signals and abstract sockets to the outside (ABI 6).
    Raises OSError.
    """
    version = abi()
    handled = _handled(version)
    attributes = struct.pack("<Q", handled)
    if version >= 4:
        attributes += struct.pack("<Q", _NET_BIND_CONNECT if network else 0)
    if version >= 6:
        attributes += struct.pack("<Q", _SCOPE_ABSTRACT_UNIX | _SCOPE_SIGNAL if processes else 0)
    ruleset = call(_CREATE, attributes, ctypes.c_size_t(len(attributes)), 0)
    try:
        for path in readable:
            _allow(ruleset, path, (_EXECUTE | _READ | _READ_DIR) & handled)
        for path in changeable:
            # The CUDA driver opens its threads' comm files with O_TRUNC.
            _allow(ruleset, path, (_WRITE | _TRUNCATE) & handled)
        for path in writable:
            _allow(ruleset, path, handled)
        for path in devices:
            _allow(ruleset, path, (_READ | _WRITE | _IOCTL_DEVICE) & handled)
        prctl(_PR_SET_NO_NEW_PRIVS, 1)
        call(_RESTRICT, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            rights &= _FILE_RIGHTS
        call(_ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("<Qi", rights, fd), 0)
    finally:
        os.close(fd)
