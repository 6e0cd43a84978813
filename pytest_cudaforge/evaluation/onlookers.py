"""Functions that Python tells of what other code does: who leaves one behind a call can finish the call's work later,
just before anybody looks, and whoever looks by other ways finds it undone.

Such a function may take itself away in time where the asking is itself an event: a call of C code is one to
``sys.setprofile``'s. So the thread's own record in the interpreter is read, by an index, which is no event at all.
"""

from __future__ import annotations

import ctypes
import socket
import sys
import threading
from typing import Any

from pytest_cudaforge.languages.imports import computes

__all__ = ["AUDITED", "COMPUTING", "NETWORKED", "ONLOOKERS", "Onlookers", "onlookers"]

ONLOOKERS = "the functions that look on (sys.setprofile, sys.settrace)"
AUDITED = "the hooks that Python's audited events go through (sys.addaudithook)"
NETWORKED = "the network, which it looks for and which is not here"
COMPUTING = "the libraries that compute, one of whose functions it calls by ctypes, where no profiler sees it"
_INTERNET = ((socket.AF_INET,), (socket.AF_INET6,))
_NETWORK = frozenset({"socket.connect", "socket.sendto", "socket.sendmsg", "socket.bind", "socket.getaddrinfo"})
#: ``PyThreadState`` begins with as many words, in CPython 3.10 to 3.14.
_WORDS = 32


def onlookers() -> tuple[object, ...]:
    """Who is told of each call or line: functions of this thread's and of new ones', and tools (Python 3.12)."""
    named = getattr(sys, "monitoring", None)
    tools = tuple(named.get_tool(number) for number in range(6)) if named is not None else ()
    watching = (sys.getprofile(), sys.gettrace(), threading.getprofile(), threading.gettrace())
    return (*(None if one is None else id(one) for one in watching), *tools)


class Onlookers:
    """Those of the thread that makes one of these, and the audit hooks of its process, from now on.

    ``words[place]``, for each (place, word) of ``usual``, tells whether that is so still: whoever asks sets ``left``
    where it is not. There are no places without CPython's record, nor with somebody looking on already (a debugger).
    """

    def __init__(self) -> None:
        self.left = self._audited = self._networked = self._computing = False
        self.words, places = _record()
        self.usual = tuple((place, self.words[place]) for place in places)
        sys.addaudithook(self._audit)

    @property
    def seen(self) -> tuple[str, ...]:
        """What there has been, by name."""
        found = {ONLOOKERS: self.left, AUDITED: self._audited, NETWORKED: self._networked, COMPUTING: self._computing}
        return tuple(name for name, seen in found.items() if seen)

    def _audit(self, event: str, given: tuple[Any, ...]) -> None:
        """One that is added from here on is noted, and not added: that is what an exception here is for."""
        if event in _NETWORK or (event == "socket.__new__" and given[1:2] in _INTERNET):
            self._networked = True
        elif event in ("ctypes.dlsym", "ctypes.dlsym/handle") and isinstance(given[1], str):
            self._computing = self._computing or computes(given[1])
        elif event == "sys.addaudithook":
            self._audited = True
            raise RuntimeError("no audit hooks here")


def _record() -> tuple[Any, tuple[int, ...]]:
    """The thread's words, and which of them change as a function is told of calls, or of lines."""
    if sys.implementation.name != "cpython" or sys.getprofile() is not None or sys.gettrace() is not None:
        return (), ()
    ctypes.pythonapi.PyThreadState_Get.restype = ctypes.c_void_p
    words = (ctypes.c_size_t * _WORDS).from_address(ctypes.pythonapi.PyThreadState_Get())

    def told(*_: object) -> None: ...

    places = set[int]()
    for tell in (sys.setprofile, sys.settrace):
        before = words[:]
        tell(told)
        among = words[:]
        tell(None)
        after = words[:]
        places |= {at for at in range(_WORDS) if before[at] == after[at] != among[at]}
    return words, tuple(sorted(places))
