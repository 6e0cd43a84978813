"""A table of verdicts behind the Evaluator's methods, for tests of the flow alone (the real one: tests/evaluation).

A candidate's kernel says what its verdict is: ``// PASSED 2.0`` or ``// BUILD_ERROR``. ``fresh`` re-evaluations may
be told to differ.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from flow_records import make_evaluation, make_facts

from pytest_cudaforge.errors import ForgeError
from pytest_cudaforge.records import (
    Baseline,
    Candidate,
    Depth,
    DeviceFacts,
    Evaluation,
    Isolation,
    Profile,
    ProfiledKernel,
    Ratio,
    Sample,
    Status,
    Target,
    TargetFacts,
)

SAMPLE = Sample(1000.0, 990.0, 1010.0, 30, 5)


def reply(verdict: str, comment: str = "") -> str:
    """A Coder's reply whose candidate gets ``verdict``."""
    plan = "def plan(x):\n    return x"
    return f"Here.\n```cpp kernel.cpp\n// {verdict}\n// {comment}\n```\n```python plan.py\n{plan}\n```\n"


CORRECTION = '{"issue": "it does not build", "why": "a typo", "fix": "mend it"}'


def optimization(method: str = "vector loads", **changes: object) -> str:
    """A Judge's reply that stands on what TableEvaluator measures, and names a place that its candidates have."""
    said = {"bottleneck": "memory", "method": method, "place": "plan.py", "plan": "use them", "cites": ["eager 1 us"]}
    return json.dumps({**said, "expected_speedup": 1.2, **changes})


OPTIMIZATION = optimization()
#: One idea after the other: what was tried and brought nothing is not taken again.
OPTIMIZATIONS = tuple(map(optimization, ["vector loads", "shared tiles", "fewer launches", "unrolling", "streams"]))


@dataclass
class TableEvaluator:
    """``fresh`` maps a verdict to the one its re-evaluation gets, ``races`` to its speedup over an incumbent;
    ``problems`` a target's id to what facts() raises; ``profiles`` keeps the verdict and depth of what was profiled."""

    device: DeviceFacts = field(default_factory=lambda: DeviceFacts("cpu", "test cpu", "cpu"))
    roofline_ns: float | None = None
    min_speedup: float = 1.0
    faults: tuple[str, ...] = ()
    fresh: Mapping[str, str] = field(default_factory=dict)
    problems: Mapping[str, ForgeError] = field(default_factory=dict)
    isolation: Isolation = field(default_factory=lambda: Isolation("B", ("native code",)))
    seconds: float = 0.0
    evaluations: Counter[str] = field(default_factory=Counter)
    incumbents: list[Candidate | None] = field(default_factory=list)
    races: Mapping[str, float] = field(default_factory=dict)
    profiles: list[tuple[str, str]] = field(default_factory=list)
    report: str = ""
    busy: int = 0
    most_busy: int = 0
    closed: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def facts(self, target: Target) -> TargetFacts:
        if target.id in self.problems:
            raise self.problems[target.id]
        return make_facts(target, self.min_speedup)

    def lint(self, target: Target) -> tuple[str, ...]:
        return self.faults

    def baselines(self, target: Target, language: str = "") -> tuple[Baseline, ...]:
        return (Baseline("default", SAMPLE, None, "not asked", self.roofline_ns, 256, 32),)

    def evaluate(
        self,
        candidate: Candidate,
        target: Target,
        *,
        timing: bool = True,
        fresh: bool = False,
        incumbent: Candidate | None = None,
    ) -> Evaluation:
        with self.lock:
            self.busy += 1
            self.most_busy = max(self.most_busy, self.busy)
            self.evaluations["fresh" if fresh else candidate.digest] += 1
            self.incumbents.append(incumbent)
        self.closed.wait(self.seconds)
        with self.lock:
            self.busy -= 1
        line = candidate.file("kernel.cpp").splitlines()[0].removeprefix("// ")
        status, _, speedup = (self.fresh.get(line, line) if fresh else line).partition(" ")
        verdict = make_evaluation(candidate, Status(status), float(speedup or 1.0), target=target.id)
        if incumbent is not None and line in self.races and verdict.timing is not None:
            ratio = self.races[line]
            raced = replace(verdict.timing, vs_incumbent=Ratio(ratio, ratio * 0.99, ratio * 1.01))
            verdict = replace(verdict, timing=raced)
        return replace(verdict, isolation=self.isolation)

    def profile(self, candidate: Candidate, target: Target, *, depth: Depth = "quick") -> Profile:
        self.profiles.append((candidate.files[0][1].splitlines()[0].lstrip("/# "), depth))
        kernel = ProfiledKernel("scale", True, 1, 900.0, metrics=(("ipc", 1.5, "inst/cycle"),))
        return Profile("counters", depth, candidate.digest, "default", (kernel,), report=self.report)

    def close(self) -> None:
        self.closed.set()

    def wait_until_busy(self, deadline_s: float = 5.0) -> None:
        end = time.monotonic() + deadline_s
        while not self.busy and time.monotonic() < end:
            time.sleep(0.005)
