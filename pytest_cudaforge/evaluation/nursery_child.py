"""The nursery's own process: an oracle with everything loaded and nothing begun, which forks one oracle per request.

A fresh oracle by itself takes seconds to import torch; one from here milliseconds. No code of a repo and no question to
a GPU's driver enters this process. Single-threaded but for libraries that mind a fork.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import gc
import importlib
import json
import os
import random
import socket
import sys
from typing import Any, NoReturn

from pytest_cudaforge.evaluation import oracle_child

__all__ = ["main"]

MAX_MESSAGE_BYTES = 1 << 16
#: What an oracle loads only when it times something; none of it asks a driver anything.
_PRELOADED = ("cuda.bindings.driver", "pytest_cudaforge.evaluation.event_clock")
#: By so much the memory of two children may be shifted against each other at most.
_HEAP_BYTES, _MAPPED_PAGES = 1 << 20, 512


def main() -> NoReturn:
    """Serve until the supervisor's end closes. ``argv``: the descriptor of the control socket."""
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    for name in _PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    control.send(b"{}")
    while True:
        message, descriptors = _receive(control)
        if message is None:
            os._exit(0)
        if "ended" in message:
            control.send(json.dumps({"status": _ended(int(message["ended"]))}).encode())
            continue
        pid = os.fork()
        if pid == 0:
            control.close()
            _be_oracle(message, *descriptors)
        # By both, so that the group is there whoever comes first.
        os.setpgid(pid, pid)
        for descriptor in descriptors:
            os.close(descriptor)
        control.send(json.dumps({"pid": pid}).encode())


def _be_oracle(message: dict[str, Any], channel: int, log: int) -> NoReturn:
    os.setpgid(0, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    _scatter()
    oracle_child.serve(socket.socket(fileno=channel), message["device"], message["threads"], tuple(message["paths"]))


def _scatter() -> None:
    """Siblings would have the very same addresses, and what those happen to cost in every one of them: shift the heap
    and what is mapped from here on."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = libc.mmap.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    chance = random.SystemRandom()
    libc.malloc(chance.randrange(1, _HEAP_BYTES))
    no_access, private_anonymous = 0, 0x22
    libc.mmap(None, chance.randrange(1, _MAPPED_PAGES) * 4096, no_access, private_anonymous, -1, 0)


def _ended(pid: int) -> int | None:
    """The exit status of a child (negative: its signal), None while it runs."""
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return 0
    return os.waitstatus_to_exitcode(status) if ended else None


def _receive(control: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    space = socket.CMSG_SPACE(2 * array.array("i").itemsize)
    data, ancillary, _, _ = control.recvmsg(MAX_MESSAGE_BYTES, space, socket.MSG_CMSG_CLOEXEC)
    descriptors = array.array("i")
    for _, kind, payload in ancillary:
        if kind == socket.SCM_RIGHTS:
            descriptors.frombytes(payload)
    return (json.loads(data) if data else None), list(descriptors)


if __name__ == "__main__":
    main()
