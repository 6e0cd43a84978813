"""Native candidates for tests of the sandbox: one C++ kernel ``act(in, out)`` over 64 + 64 signed 64-bit integers."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from pytest_cudaforge.evaluation.arena import HostArena, lay_out
from pytest_cudaforge.evaluation.sandbox import Limits
from pytest_cudaforge.evaluation.worker import Binding, Worker
from pytest_cudaforge.evaluation.zygote import ForkServers
from pytest_cudaforge.languages import Binary, units_of
from pytest_cudaforge.plan import Buffer, Launch, LaunchPlan, TensorSpec, TracedPlan, View

COUNT = 64
_SPEC = TensorSpec((COUNT,), "int64", (1,))
_VIEWS = (View(0, (COUNT,), (1,)), View(1, (COUNT,), (1,)))
LAYOUT = lay_out([("in", 8 * COUNT), ("out", 8 * COUNT)])
BINDINGS: tuple[Binding, ...] = ((0, LAYOUT.offset("in")), (0, LAYOUT.offset("out")))

#: Every include an attack needs, and the kernel's frame; ``BODY`` sees ``in`` and ``out``.
_FRAME = """
#include <arpa/inet.h>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>
%s
extern "C" void act(const long long* in, long long* out) {
%s
}
"""


def plan_of_act() -> TracedPlan:
    """One launch of ``act`` on an input and an output buffer."""
    buffers = (Buffer("input", _SPEC, "0"), Buffer("scratch", _SPEC))
    return TracedPlan(LaunchPlan(buffers, (Launch("act", _VIEWS),), _VIEWS[1]))


def compile_act(servers: ForkServers, body: str, before: str = "") -> tuple[Binary, ...]:
    """Compile ``act`` with this body in a sandboxed builder."""
    (unit,) = units_of(plan_of_act())
    return (servers.builder().compile("cpp", _FRAME % (before, body), unit, "cpu"),)


@dataclass
class Act:
    """A started worker with its arena."""

    worker: Worker
    arena: HostArena

    def run(self, values: Sequence[int] = (), timeout_s: float = 20) -> tuple[int, ...]:
        """Run ``act`` with ``values`` as its first inputs; its outputs."""
        padded = [*values, *[0] * (COUNT - len(values))]
        with self.arena.memory() as memory:
            struct.pack_into(f"<{COUNT}q", memory, LAYOUT.offset("in"), *padded)
        self.worker.run("main", BINDINGS, timeout_s=timeout_s)
        return self.outputs()

    def outputs(self) -> tuple[int, ...]:
        with self.arena.memory() as memory:
            return struct.unpack_from(f"<{COUNT}q", memory, LAYOUT.offset("out"))


@contextmanager
def started(servers: ForkServers, binaries: Sequence[Binary], limits: Limits | None = None) -> Iterator[Act]:
    """A worker that has loaded ``binaries`` and attached one arena under slot 0."""
    worker = servers.worker("cpp", limits=limits)
    with worker, HostArena.create(LAYOUT.nbytes) as arena:
        worker.start(plan_of_act(), binaries)
        worker.attach(0, arena)
        yield Act(worker, arena)
