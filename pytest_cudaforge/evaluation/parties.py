"""Who is timed in a sitting, and by which clock: baselines in the oracle's process, candidates in their workers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from pytest_cudaforge.evaluation.module_worker import ModuleWorker
from pytest_cudaforge.evaluation.oracle import OracleClient
from pytest_cudaforge.evaluation.timing import PROBED_BELOW_NS, Turned, slope_ns, typical_ns
from pytest_cudaforge.evaluation.worker import Worker

__all__ = [
    "Clock",
    "EventParty",
    "EventTimes",
    "Party",
    "SlopeParty",
    "baseline_party",
    "request_ns",
    "rough_call_ns",
    "turn_of",
    "worker_party",
]

#: Whose clock decides: device events, or the supervisor's by slope (native host code, whose worker is not believed).
Clock = Literal["events", "supervisor"]
#: A turn that takes so many times its slice is taken as it is.
_CRAWL = 6.0
_MAX_CALLS = 20_000
#: How much of its share of the longer request a call counts at least; the rest is noise.
_SHARE = 0.95
_REQUESTS = 5
#: Calls of the first of two requests by both clocks at least, and how many slopes a median is taken of.
_FIRST_CALLS, _SLOPES = 4, 5
#: What fetching one answer of a module takes: less than it does on a busy machine, so that little can be hidden there.
_FETCH_NS, _FETCH_NS_PER_BYTE = 5_000.0, 0.15
#: A turn may take so many times its slice for the sake of a slope without the fetching of answers.
_PATIENCE = 10.0


class Party(Protocol):
    """Something that can be timed. ``turn`` gives ns per call; it makes ``least`` calls or more, over the buffer sets
    in order. ``calls`` is how many the last turn made at once. ``once`` gives ns per call of exactly ``calls`` calls,
    from the first set on and without a warm-up, whatever they cost. ``measure`` is a turn of so many calls: two parties
    that shall not be told apart make equally many. ``probe_ns`` is what the clock's probe took in the last turn, None
    where it has none."""

    calls: int
    probe_ns: float | None

    def turn(self, slice_ns: float, least: int = 1) -> float: ...

    def once(self, calls: int) -> float: ...

    def measure(self, calls: int) -> float: ...


def turn_of(name: str, party: Party, ns: float) -> Turned:
    """``party``'s last turn, which took ``ns`` per call."""
    return Turned(name, ns, party.probe_ns)


class SlopeParty:
    """Timed by this process's clock: ``run(calls, first)`` returns the ns of one request over the ``sets`` buffer sets,
    from the first on. Turns go on where the one before ended: few calls each would else find few sets, in warm caches.
    ``once``: of one over all sets there are, once each at most, where that are more.

    What a request costs besides its calls cancels in the slope over n and 2n calls. That alone could be bought: who
    idles through the first request has a slope of nothing. So a call never counts less than its share of the longer
    request, of which ``spare_ns`` is not the calls': what a request takes in a process that holds no candidate.

    ``fetched``: so many answers are fetched in a request, or all of fewer calls. That cancels in the slope where a turn
    makes as many calls, which it does unless they take very long.
    """

    def __init__(
        self,
        run: Callable[[int, int], int],
        sets: int,
        fetched: int = 1,
        spare_ns: float = 0.0,
        once: Callable[[int], int] | None = None,
    ) -> None:
        self._request, self._sets, self._position = run, sets, 0
        self._whole = once if once is not None else lambda calls: run(calls, 0)
        self._fetched, self._spare_ns = fetched, spare_ns
        self._per_call_ns = 0.0
        self.calls = 0
        self.probe_ns: float | None = None

    def turn(self, slice_ns: float, least: int = 1) -> float:
        if not self._per_call_ns:
            self._calibrate()
        if self._fetched * self._per_call_ns < _PATIENCE * slice_ns:
            least = max(least, self._fetched)
        calls = max(least, min(_MAX_CALLS, math.ceil(slice_ns / max(self._per_call_ns, 1.0))))
        once = self._run(calls)
        # Too few calls (the last turn was a slow one) would leave a slope of nothing but noise.
        while once < slice_ns / 2 and calls < _MAX_CALLS:
            calls = min(_MAX_CALLS, calls * max(2, min(16, round(slice_ns / once))))
            once = self._run(calls)
        self.calls = calls
        # A machine that is busy elsewhere can make threads wait for each other a thousand times longer: then the
        # request's own cost is nothing beside it, and repeating it would only burn the budget. (A call that takes long
        # anyway is measured like any other: a module's request has answers to fetch.)
        crawling = once > _CRAWL * max(slice_ns, calls * self._per_call_ns)
        per_call = once / calls if crawling else self._per_call(once, self._run(2 * calls), calls)
        if per_call > 0:
            self._per_call_ns = max(per_call, self._per_call_ns / 4)
        return per_call

    def once(self, calls: int) -> float:
        self._position = calls % self._sets
        return self._whole(calls) / calls

    def measure(self, calls: int) -> float:
        self.calls = calls
        once = self._run(calls)
        # As in a turn: where threads wait for each other, more of it says nothing and takes seconds.
        crawling = self._per_call_ns and once > _CRAWL * calls * self._per_call_ns
        return once / calls if crawling else self._per_call(once, self._run(2 * calls), calls)

    def _run(self, calls: int) -> int:
        first = self._position
        self._position = (first + calls) % self._sets
        return self._request(calls, first)

    def _per_call(self, once_ns: float, twice_ns: float, calls: int) -> float:
        share_ns = (twice_ns - self._spare_ns) / (2 * calls)
        return max(slope_ns(once_ns, twice_ns, calls), _SHARE * share_ns)

    def _calibrate(self) -> None:
        self._run(2)
        calls = 1
        while True:
            once, twice = self._run(calls), self._run(2 * calls)
            if twice - once > 5e5 or calls > 1 << 14:
                self._per_call_ns = max(1.0, self._per_call(once, twice, calls))
                return
            calls *= 4


@dataclass(frozen=True)
class EventTimes:
    """Device ns of calls, and of the clock's probe after each where it was asked for."""

    ns: Sequence[int]
    probe_ns: Sequence[int] = ()


class EventParty:
    """Timed by device events: ``sample(count, warm, probed)`` returns that many times; a turn is what is typical of
    them. Short calls are probed.

    ``both(calls)``: ns of so many calls one after another by the supervisor's clock, and by device events.
    """

    def __init__(
        self,
        sample: Callable[[int, bool, bool], EventTimes],
        both: Callable[[int], tuple[int, int]] | None = None,
    ) -> None:
        self._sample, self._both = sample, both
        self._per_call_ns = 0.0
        self.calls = 0
        self.probe_ns: float | None = None

    def turn(self, slice_ns: float, least: int = 1) -> float:
        if not self._per_call_ns:
            self._per_call_ns = float(sorted(self._sample(3, True, False).ns)[1])
        value = self.measure(max(3, least, min(15, int(slice_ns / max(self._per_call_ns, 1.0)))))
        self._per_call_ns = max(value, 1.0)
        return value

    def once(self, calls: int) -> float:
        return float(statistics.median(self._sample(calls, False, False).ns))

    def measure(self, calls: int) -> float:
        self.calls = calls
        found = self._sample(calls, True, self._per_call_ns < PROBED_BELOW_NS)
        self.probe_ns = typical_ns(found.probe_ns) if found.probe_ns else None
        return typical_ns(found.ns)

    def by_both_clocks(self, slice_ns: float) -> tuple[float, float] | None:
        """ns per call by the supervisor's slope and by device events, over the very same calls; None where only the
        device's clock can be had. What disturbs a slope makes it longer or shorter alike: the median of a few."""
        if self._both is None:
            return None
        self._both(2)
        once_ns, _ = self._both(_FIRST_CALLS)
        calls = max(_FIRST_CALLS, min(_MAX_CALLS, math.ceil(slice_ns * _FIRST_CALLS / max(once_ns, 1))))
        pairs = [(self._both(calls), self._both(2 * calls)) for _ in range(_SLOPES)]
        slopes = [[slope_ns(one[i], two[i], calls) for one, two in pairs] for i in (0, 1)]
        return statistics.median(slopes[0]), statistics.median(slopes[1])


def baseline_party(oracle: OracleClient, rotation: int, name: str, *, clock: Clock, flush_bytes: int) -> Party:
    """Eager or compiled reference, in the oracle's process over its ``rotation``; on the CPU every worker is stopped
    while it runs."""
    if clock == "events":

        def sample(count: int, warm: bool, probed: bool) -> EventTimes:
            asked = {"samples": count, "flush_bytes": flush_bytes, "probed": probed, "warm": warm}
            found = oracle.request("time_events", rotation=rotation, party=name, **asked)
            return EventTimes(*found)

        return EventParty(sample)

    def run(calls: int, first: int) -> int:
        # The rotation itself goes on where it ended.
        return oracle.timed_request("run_many", rotation=rotation, party=name, calls=calls)

    return SlopeParty(run, 1, spare_ns=request_ns(oracle, rotation, name))


def request_ns(oracle: OracleClient, rotation: int, name: str) -> float:
    """What a request without any call takes, by the fastest of a few: code that no candidate has touched."""
    return min(oracle.timed_request("run_many", rotation=rotation, party=name, calls=0) for _ in range(_REQUESTS))


def rough_call_ns(oracle: OracleClient, rotation: int, name: str, calls: int) -> float:
    """A call of a reference, by the fastest of a few requests of so many: to reckon with, not to decide from."""
    taken = [oracle.timed_request("run_many", rotation=rotation, party=name, calls=calls) for _ in range(_REQUESTS)]
    return min(taken) / calls


def worker_party(
    oracle: OracleClient,
    worker: Worker,
    sets: Sequence[Sequence[tuple[int, int]]],
    *,
    clock: Clock,
    flush_bytes: int,
    limit_s: float,
    among: int | None = None,
    spare_ns: float = 0.0,
    output_bytes: int = 0,
) -> Party:
    """A candidate in its worker over its buffer ``sets``, in turns over the first ``among`` of them (None: all);
    ``spare_ns`` as in SlopeParty, ``output_bytes`` of one call.

    By the supervisor's clock it runs while it is timed and at no other time, and the oracle stands still meanwhile: the
    worker comes and stays stopped.
    """
    rotated = among or len(sets)
    if clock == "events":

        def sample(count: int, warm: bool, probed: bool) -> EventTimes:
            found = worker.time_events(
                sets, count, flush_bytes=flush_bytes, timeout_s=limit_s, warm=warm, probed=probed
            )
            return EventTimes(found.ns, found.probe_ns)

        return EventParty(sample, lambda calls: worker.time_run(sets, calls, timeout_s=limit_s))

    def run(calls: int, first: int, among: int = rotated) -> int:
        # The worker goes on last and stops first: what a thread left behind computes beside the clock is not timed.
        with oracle.paused():
            worker.cont()
            try:
                return worker.run_many(sets, calls, timeout_s=limit_s, first_set=first, among=among)
            finally:
                worker.stop()

    def once(calls: int) -> int:
        return run(calls, 0, len(sets))

    if not isinstance(worker, ModuleWorker):
        return SlopeParty(run, rotated, spare_ns=spare_ns, once=once)
    # Its answers are copied into the arena at the end of each request, which is no part of a call.
    fetching_ns = rotated * (_FETCH_NS + output_bytes * _FETCH_NS_PER_BYTE)
    return SlopeParty(run, rotated, fetched=rotated, spare_ns=spare_ns + fetching_ns, once=once)
