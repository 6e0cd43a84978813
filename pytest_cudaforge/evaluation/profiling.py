"""The ladder of profiles: one candidate, one workload, the highest rung that this machine lets us stand on.

ncu (hardware counters) → cupti (kernel times) → static (binary, plan and roofline). No rung is ever fatal: where one
cannot be reached the profile says why and the next lower one answers. Nothing here is part of a verdict.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from pytest_cudaforge.errors import DeviceError
from pytest_cudaforge.evaluation import kernel_times
from pytest_cudaforge.evaluation.contract import CallProfile
from pytest_cudaforge.evaluation.counter_profiling import CounterProfiler
from pytest_cudaforge.evaluation.oracle import OracleClient
from pytest_cudaforge.evaluation.profiled_call import ProfiledCall, longest
from pytest_cudaforge.evaluation.replayed import Refused, Replayed
from pytest_cudaforge.evaluation.static_profile import static_facts, static_kernels
from pytest_cudaforge.hardware import ncu
from pytest_cudaforge.records import Candidate, Depth, Profile, ProfiledKernel, Rung

__all__ = ["ProfiledCall", "Profiler", "longest", "module_profile", "static_profile", "unbuilt"]


#: How often a profiler may run into its time limit before it is left alone.
_MOST_STUCK = 2


def static_profile(call: ProfiledCall, depth: Depth) -> Profile:
    """The lowest rung; it always answers."""
    began = time.monotonic()
    profile = Profile(
        rung="static",
        depth=depth,
        candidate=call.candidate.digest,
        workload=call.product.workload.name,
        kernels=static_kernels(call.product, call.device),
        facts=static_facts(call.product, call.facts.precision, call.device, call.working_set_bytes),
    )
    return replace(profile, seconds=round(time.monotonic() - began, 3))


def unbuilt(candidate: Candidate, depth: Depth, reason: str) -> Profile:
    """What is left to say of a candidate that cannot be built (any more)."""
    return Profile("static", depth, candidate.digest, "", notes=(f"the candidate could not be built: {reason}",))


def module_profile(call: ProfiledCall, depth: Depth, seen: CallProfile, calls: int) -> Profile:
    """Of a ModelNew, from what torch's profiler saw of ``calls`` calls in its sandboxed worker: kernels on a GPU,
    elsewhere its own functions together and every operator beside them. Its host code could tell that a profiler looks,
    so this is advice."""
    static = static_profile(call, depth)
    timed = list(_module_kernels(call, seen)) if seen.kernels else list(_module_work(seen))
    kernels = tuple(
        ProfiledKernel(name, own, max(1, round(count / calls)), ns / calls)
        for name, own, count, ns in sorted(timed, key=lambda entry: -entry[3])
    )
    facts = (("own_share", 100.0 * seen.own_share, "%"), ("host_time", seen.host_ns / calls, "ns"))
    note = "a module's host code runs in the sandbox, where torch's profiler is what can look at it"
    rung: Rung = "cupti" if seen.kernels else "static"
    return replace(static, rung=rung, kernels=kernels, facts=(*static.facts, *facts), notes=(note,))


def _module_work(seen: CallProfile) -> Iterator[tuple[str, bool, int, int]]:
    if seen.own_calls:
        yield "its own functions", True, seen.own_calls, seen.own_ns
    for name, ns in seen.operators:
        if ns:
            yield name, False, 1, ns


def _module_kernels(call: ProfiledCall, seen: CallProfile) -> Iterator[tuple[str, bool, int, int]]:
    """A kernel is the candidate's where its text names it."""
    texts = [text for _, text in call.candidate.files]
    for name, ns, launches in seen.kernels:
        plain = name.partition(" (")[0] if name.startswith(("Mem", "mem")) else kernel_times.bare_name(name)
        word = re.compile(rf"\b{re.escape(plain.rpartition('::')[2])}\b")
        if ns:
            yield plain, any(word.search(text) for text in texts), launches, ns


class Profiler:
    """Profiles of launch plans on one GPU. It remembers which rungs will not bear any candidate.

    One call at a time: whoever calls holds the device alone, and another one waits.
    """

    def __init__(
        self, device: str, oracle: OracleClient, cache_dir: Path, environ: Mapping[str, str] = os.environ
    ) -> None:
        self._replayed = Replayed(device, oracle)
        self._cache_dir, self._environ = cache_dir, environ
        self._lock = threading.Lock()
        self._counters: CounterProfiler | None = None
        self._broken: dict[str, str] = {}
        self._stuck: Counter[str] = Counter()

    def profile(self, call: ProfiledCall, depth: Depth) -> Profile:
        """Climb as high as it goes. Raises OracleError and TargetError where the call's inputs cannot be drawn."""
        static = static_profile(call, depth)
        if not call.product.traced.main.steps:
            return replace(static, notes=("the plan runs nothing on the device",))
        rungs: tuple[tuple[str, Callable[[ProfiledCall, Profile], Profile]], ...] = (
            ("Nsight Compute", self._with_counters),
            ("kernel times", self._with_times),
        )
        notes: list[str] = []
        with self._lock:
            for name, look in rungs:
                try:
                    if name in self._broken:
                        raise Refused(self._broken[name])
                    found = look(call, static)
                    return replace(found, notes=(*notes, *found.notes))
                except Refused as refusal:
                    notes.append(f"no {name}: {refusal}")
                    self._stuck[name] += refusal.stuck
                    if refusal.lasting or self._stuck[name] >= _MOST_STUCK:
                        self._broken[name] = str(refusal)
                except DeviceError as error:
                    notes.append(f"no {name}: {error.what}")
                except OSError as error:
                    # No room for temporary files, say.
                    notes.append(f"no {name}: {error}")
        return replace(static, notes=tuple(notes))

    def _with_counters(self, call: ProfiledCall, static: Profile) -> Profile:
        if self._counters is None:
            program = ncu.find_ncu(self._environ)
            if program is None:
                raise Refused("ncu was not found; `cudaforge doctor` says what to install", lasting=True)
            self._counters = CounterProfiler(program, self._replayed, self._cache_dir)
        return self._counters.look(call, static)

    def _with_times(self, call: ProfiledCall, static: Profile) -> Profile:
        return kernel_times.look(self._replayed, call, static)
