"""A call without the processor's clock, and without the kernel but through libraries.

The time-stamp counter is read by an instruction that no linker sees, and a disassembler only where it looks for one:
two bytes of a constant are such an instruction for who jumps into its midst. The kernel can refuse it, and with it the
page through which libraries tell the time (PR_SET_TSC, prctl(2); x86 alone). Threads inherit that from who starts them,
so that a team of OpenMP's has none either where it begins in such a call. A system call may be hidden in the same way;
the kernel can tell where one comes from, and honest code has libraries for all of them.

Standard library only, in the worker, where no other thread wants Python's lock: who waits for that asks the clock.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from pytest_cudaforge.evaluation.kernel_calls import prctl
from pytest_cudaforge.evaluation.seccomp import end_calls_from

__all__ = ["clockless"]

_PR_SET_TSC, _ENABLE, _SIGSEGV = 26, 1, 2


@contextlib.contextmanager
def clockless(code: Iterable[tuple[int, int]] = ()) -> Iterator[None]:
    """Who asks the processor for the time gets SIGSEGV, and ``code`` (address and bytes) that calls the kernel itself
    ends the process by SIGSYS, from now on; both where the kernel can do that."""
    with contextlib.suppress(OSError):
        for start, nbytes in code:
            end_calls_from(start, start + nbytes)
    try:
        prctl(_PR_SET_TSC, _SIGSEGV)
    except OSError:  # other processors, and sandboxes of the machine's own
        yield
        return
    try:
        yield
    finally:
        prctl(_PR_SET_TSC, _ENABLE)
