"""Where a target's parties stand below the roofline: eager, ``torch.compile``, the first candidate, the last. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pytest_cudaforge.records import Evaluation, Round, Timing, Trace, WorkloadTiming

__all__ = ["Standing", "first_timed", "judged_round", "standings", "timing_of"]


@dataclass(frozen=True)
class Standing:
    """How near one party comes to the speed of light on one workload. ``party``: eager, compile, "round 3".

    ``min_bytes`` and ``flops`` are what the workload cannot do without; 0 where the run ended before they were known.
    """

    workload: str
    party: str
    time_ns: float
    roofline_ns: float
    min_bytes: int = 0
    flops: int = 0

    @property
    def sol_percent(self) -> float:
        """Speed of light: the roofline's time ÷ the measured one."""
        return 100.0 * self.roofline_ns / self.time_ns


def timing_of(verdict: Evaluation | None) -> Timing | None:
    return verdict.timing if verdict is not None else None


def first_timed(trace: Trace) -> Round | None:
    """The first round whose candidate was right and timed."""
    return next((entry for entry in trace.rounds if timing_of(entry.evaluation) is not None), None)


def judged_round(trace: Trace) -> Round | None:
    """The round of the last verdict: the winner, or whoever was re-evaluated and did not win, or the last one timed."""
    digest = trace.final.candidate if trace.final is not None else None
    for entry in trace.rounds:
        if entry.number == trace.winner or (entry.candidate is not None and entry.candidate.digest == digest):
            return entry
    timed = [entry for entry in trace.rounds if timing_of(entry.evaluation) is not None]
    return timed[-1] if timed else None


def standings(trace: Trace) -> tuple[Standing, ...]:
    """By workload: the baselines, the first candidate that passed, and the one judged last; only with a roofline.

    Times are those of the sitting that the last verdict comes from, the first candidate's those of its own round;
    without a candidate, those of the baselines alone.
    """
    judged, first = judged_round(trace), first_timed(trace)
    last = timing_of(trace.final) or (timing_of(judged.evaluation) if judged is not None else None)
    if last is None or judged is None:
        return tuple(_of_baselines(trace))
    needs = {entry.workload: (entry.min_bytes, entry.flops) for entry in trace.baselines}
    before = timing_of(first.evaluation) if first is not None and first is not judged else None
    found = []
    for entry in last.workloads:
        times = [("eager", entry.eager.median_ns)]
        times += [("compile", entry.compile.median_ns)] if entry.compile is not None else []
        earlier = _named(before, entry.workload)
        times += [(f"round {first.number}", earlier.candidate.median_ns)] if earlier is not None and first else []
        times += [(f"round {judged.number}", entry.candidate.median_ns)]
        found += [
            Standing(entry.workload, party, time_ns, entry.roofline_ns, *needs.get(entry.workload, (0, 0)))
            for party, time_ns in times
            if entry.roofline_ns and time_ns > 0
        ]
    return tuple(found)


def _of_baselines(trace: Trace) -> Iterator[Standing]:
    for entry in trace.baselines:
        for party, sample in (("eager", entry.eager), ("compile", entry.compile)):
            if sample is not None and sample.median_ns > 0 and entry.roofline_ns:
                yield Standing(entry.workload, party, sample.median_ns, entry.roofline_ns, entry.min_bytes, entry.flops)


def _named(timing: Timing | None, workload: str) -> WorkloadTiming | None:
    timed = timing.workloads if timing is not None else ()
    return next((entry for entry in timed if entry.workload == workload), None)
