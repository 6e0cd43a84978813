"""Everything one forging needs, in reach of a test: scripted models, a table of verdicts, a real store."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from flow_evaluator import CORRECTION, OPTIMIZATIONS, TableEvaluator, reply
from flow_records import make_target

from pytest_cudaforge.budget import Caps, Ledger
from pytest_cudaforge.chat.scripted import ScriptedModel
from pytest_cudaforge.errors import ForgeError
from pytest_cudaforge.events import ForgeEvent
from pytest_cudaforge.loop import ForgeContext, forge
from pytest_cudaforge.records import Trace
from pytest_cudaforge.store import RunStore
from pytest_cudaforge.strategies import Limits
from pytest_cudaforge.strategies.refine import Refine

MEND, (SPEED, *OTHERS) = CORRECTION, OPTIMIZATIONS
#: broken, mended, slower, faster: what a good run looks like
CODER = [reply("BUILD_ERROR"), reply("PASSED 1.5"), reply("PASSED 1.2"), reply("PASSED 2.5")]
JUDGE = [MEND, SPEED, OTHERS[0]]


@dataclass
class Watch:
    events: list[ForgeEvent] = field(default_factory=list)

    def on_event(self, event: ForgeEvent) -> None:
        self.events.append(event)

    def texts(self, kind: str) -> list[str]:
        return [event.text for event in self.events if event.kind == kind]


@dataclass
class Bench:
    """Everything one forging needs, with its parts in reach of the test."""

    root: Path
    coder: Sequence[str | ForgeError] = field(default_factory=lambda: CODER)
    judge: Sequence[str | ForgeError] = field(default_factory=lambda: JUDGE)
    evaluator: TableEvaluator = field(default_factory=TableEvaluator)
    limits: Limits = field(default_factory=lambda: Limits(rounds=4))
    caps: Caps = field(default_factory=Caps)
    watch: Watch = field(default_factory=Watch)
    changes: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.model = ScriptedModel({"coder": self.coder, "judge": self.judge})
        self.target = make_target(self.root)
        self.store = RunStore(self.root / ".cudaforge").target(self.target, "cpp")

    def forge(self, **changes: object) -> Trace:
        with ThreadPoolExecutor(2) as executor:
            context = ForgeContext(
                "cpp", self.evaluator, self.model, self.model, Refine(), self.limits, self.store, Ledger(self.caps),
                self.watch, executor,
            )  # fmt: skip
            return asyncio.run(forge(self.target, replace(context, **{**self.changes, **changes})))  # type: ignore[arg-type]

    @property
    def asked(self) -> list[tuple[str, int, int]]:
        return [(request.role, request.key.ordinal, request.key.round) for request in self.model.requests]


def kinds(trace: Trace) -> list[tuple[str, int | None, str]]:
    return [
        (entry.kind, entry.parent, entry.evaluation.status.value if entry.evaluation else entry.failure)
        for entry in trace.rounds
    ]
