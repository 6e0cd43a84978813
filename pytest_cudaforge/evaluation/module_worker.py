"""The supervisor's handle to an untrusted child that runs a ModelNew (:mod:`.module_service`).

Nothing the child says is believed: what a call returned is data that is compared with the reference's, and time is
taken by the supervisor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_cudaforge import plan
from pytest_cudaforge.errors import (
    BuildFailure,
    DeviceError,
    LaunchFailure,
    WorkerProtocol,
)
from pytest_cudaforge.evaluation import extensions
from pytest_cudaforge.evaluation.channel import Reply, ReplyCaps
from pytest_cudaforge.evaluation.child import Child
from pytest_cudaforge.evaluation.contract import CallProfile
from pytest_cudaforge.evaluation.extensions import NeedsBuild
from pytest_cudaforge.evaluation.module_plan import returned_plan
from pytest_cudaforge.evaluation.module_requests import (
    ANSWERING,
    BUILD_REFUSED,
    CALL_ANOTHER,
    COMPILED,
    DEVICE_REFUSED,
    LAUNCH_REFUSED,
    NEEDS_BUILD,
    OK,
    PROFILE,
    RELOAD,
    RUN,
    RUN_FRESH,
    RUN_KEPT,
    START,
    TORCH_THREADS,
    TURN,
    ModuleRecipe,
    NewInstance,
)
from pytest_cudaforge.evaluation.worker import ALLOCATED, LEFT, Binding, Which, Worker
from pytest_cudaforge.plan import LaunchPlan, TracedPlan
from pytest_cudaforge.records import WorkloadFacts
from pytest_cudaforge.runtime.gradients import is_backward

__all__ = ["ModuleStart", "ModuleWorker"]

_CAPS = ReplyCaps(values=16, text_bytes=8 << 20, blob_bytes=256 << 20)
_MAX_ERROR_CHARS = 4000
_MAX_SETTINGS = 20
#: What the host code of a few calls may take beside what it calls before it counts as work.
_HOST_NS = 1_000_000


@dataclass(frozen=True)
class ModuleStart:
    """What a started candidate holds: path -> (shape, dtype) of its parameters and buffers."""

    state: Mapping[str, tuple[Any, ...]]


class ModuleWorker(Worker):
    """A handle to one sandboxed process with one ModelNew; see :class:`Worker` for what every operation raises.

    NeedsBuild is raised by ``start_module`` and ``run`` where an extension is asked for that was not given; the
    process is of no use then. BuildFailure: the file could not be imported.
    """

    #: Does the caller, when the next call has returned, write into the answer of the call before?
    writes_over = True

    def __init__(self, child: Child) -> None:
        super().__init__(child)
        self._plan: LaunchPlan | None = None
        self._workload: WorkloadFacts | None = None

    def __enter__(self) -> ModuleWorker:
        return self

    def start_module(
        self,
        recipe: ModuleRecipe,
        traced: TracedPlan,
        workload: WorkloadFacts,
        libraries: Mapping[str, bytes],
        device: str,
        *,
        compiled: bytes = b"",
        timeout_s: float = 60,
    ) -> ModuleStart:
        """Import the candidate, construct it and move it to ``device``.

        ``libraries``: built extensions by key. ``compiled``: what :meth:`compiled` gave in another of its workers.
        """
        self._on_gpu = device != "cpu"
        self._plan, self._workload = traced.main, workload
        payload = {
            **_call_of(traced, workload),
            "recipe": {name: getattr(recipe, name) for name in recipe.__dataclass_fields__},
            "device": device,
            "libraries": [[key, len(library)] for key, library in libraries.items()],
        }
        blob = b"".join([*libraries.values(), compiled])
        reply = self._ask(START, payload, "constructing ModelNew", timeout_s, blob=blob)
        return _start_of(reply.text)

    def set_threads(self, count: int, *, alone: bool = False, limit: int = 0) -> None:
        """CPU only: torch.set_num_threads, which says how many OpenMP's parallel regions get, too; of a module nobody
        asks for teams of fewer (``alone``, ``limit``)."""
        self._ask(TORCH_THREADS, {"count": count}, "setting the number of threads", 30)

    def run(
        self,
        which: Which,
        bindings: Sequence[Binding],
        *,
        timeout_s: float,
        room: int | None = None,
        at_work: bool = False,
        late: bool = False,
        elsewhere: str = "",
    ) -> LaunchPlan:
        """Call the candidate once, copy its outputs into the arena and synchronise. (Nobody crowds a module's device.)

        Returns the plan as the candidate answered it: compare its outputs with the workload's before anything is
        judged, then judge where ``module_plan.judged_plan`` says.
        """
        if which != "main" or room is not None or at_work:
            raise LaunchFailure("a module has no prepare plan and no crowded calls")
        how = {"late": late, "elsewhere": elsewhere, "write_over": self.writes_over}
        asked = {"bindings": [list(b) for b in bindings], **how}
        reply = self._ask(RUN, asked, "running forward", timeout_s)
        assert self._plan is not None and self._workload is not None
        return returned_plan(self._plan, self._workload, reply.text, "running forward")

    def another_instance(self, name: str, *, how: NewInstance = "beside", timeout_s: float) -> None:
        """Construct ModelNew once more, and call that one from now on, unless it has other settings ("otherwise").
        Those before it live on (``how`` "beside"), or are gone by then ("next"): its weights ("weights alone"), or
        itself ("alone"), may lie at their addresses. "copy": a deep copy of the one before, which lives on, "copy as
        old": whose weights have the version that the first one's have; LaunchFailure where it cannot be copied."""
        self._sets = None
        self._ask(RELOAD, {"how": how}, f"loading the kernels again for {name}", timeout_s)

    def call_another(self, bindings: Sequence[Binding], *, timeout_s: float) -> None:
        """Make an instance with other fractions among its settings, where ModelNew takes such, and call it: nobody
        looks at its answer, or at what it raises. LaunchFailure where the device is lost by it."""
        self._sets = None
        payload = {"bindings": [list(binding) for binding in bindings]}
        self._ask(CALL_ANOTHER, payload, "calling an instance of other settings", timeout_s)

    def turn(self, traced: TracedPlan, workload: WorkloadFacts, *, timeout_s: float) -> None:
        """From now on calls are those of another workload, of the same instance. Arenas stay attached."""
        self._sets = None
        self._plan, self._workload = traced.main, workload
        self._ask(TURN, _call_of(traced, workload), "turning to another workload", timeout_s)

    def run_kept(
        self, sets: Sequence[Sequence[Binding]], order: Sequence[int], *, first: bool = True, timeout_s: float
    ) -> tuple[int, int]:
        """A call on ``sets[n]`` for each n of ``order``, all answers kept until the last, those of the calls before as
        well unless these are the ``first``: how many of them are others by then, and how many lie in memory that holds
        another call's, too, by the child's own words."""
        payload = {"sets": [[list(b) for b in bindings] for bindings in sets], "order": list(order), "first": first}
        doing = "calls whose answers are kept"
        changed_, _, shared = self._ask(RUN_KEPT, payload, doing, timeout_s).text.partition(" ")
        return _number_of(changed_, doing), _number_of(shared, doing)

    def run_fresh(self, bindings: Sequence[Binding], calls: int, *, timeout_s: float) -> int:
        """So many calls, each on copies of the inputs, fewer where they take long: how many were not made, or left no
        copy that somebody still holds, by the child's own words. No answer is looked at."""
        self._sets, doing = None, "calls on copies of the inputs"
        payload = {"bindings": [list(b) for b in bindings], "calls": calls}
        return _number_of(self._ask(RUN_FRESH, payload, doing, timeout_s).text, doing)

    def left_changed(self, *, timeout_s: float) -> tuple[str, ...]:
        """The names of the settings that calls have left changed, by the child's own words."""
        reply = self._ask(LEFT, {}, "asking what calls have left changed", timeout_s)
        return _left_of(reply.text)

    def allocated_bytes(self, *, timeout_s: float) -> int:
        """What malloc has given out in the child, by its own words; 0 where they make no sense."""
        text = self._ask(ALLOCATED, {}, "asking what is allocated", timeout_s).text
        return int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else 0

    def compiled(self, *, timeout_s: float) -> bytes:
        """The files of Triton's cache in the child, packed by the child: of use to its like alone."""
        return self._ask(COMPILED, {}, "reading what was compiled", timeout_s).blob

    def profile(self, bindings: Sequence[Binding], calls: int, *, timeout_s: float) -> CallProfile:
        """Untimed calls under torch's profiler: the child's own words on what ran."""
        payload = {"bindings": [list(b) for b in bindings], "calls": calls}
        reply = self._ask(PROFILE, payload, "profiling forward", timeout_s)
        return _profile_of(reply.text)

    def answering(self, bindings: Sequence[Binding], *, timeout_s: float) -> tuple[str, ...]:
        """The operators of which each gives the answer of a call by itself: by the child's own words."""
        payload = {"bindings": [list(b) for b in bindings]}
        text = self._ask(ANSWERING, payload, "watching torch's operators", timeout_s).text
        return tuple(
            "".join(filter(str.isprintable, name[:100])) for name in text[:_MAX_ERROR_CHARS].split(",") if name
        )

    def _ask(
        self,
        operation: int,
        payload: Any,
        phase: str,
        timeout_s: float,
        *,
        blob: bytes = b"",
        descriptors: Sequence[int] = (),
    ) -> Reply:
        reply = self._child.ask(
            operation, payload, phase=phase, caps=_CAPS, timeout_s=timeout_s, blob=blob, descriptors=descriptors
        )
        if reply.status == OK:
            return reply
        if reply.status == NEEDS_BUILD:
            self._child.kill()
            raise NeedsBuild(extensions.decode_request(reply.text))
        text = "".join(c if c.isprintable() or c == "\n" else "?" for c in reply.text[:_MAX_ERROR_CHARS])
        if reply.status == BUILD_REFUSED:
            raise BuildFailure(text or f"refused while {phase}", log=text)
        if reply.status == LAUNCH_REFUSED:
            raise LaunchFailure(text or f"refused while {phase}")
        if reply.status == DEVICE_REFUSED and self._on_gpu:
            raise DeviceError(f"{phase}: {text}")
        self._child.kill()
        raise WorkerProtocol(f"the worker failed while {phase}: {text}", phase=phase)


def _call_of(traced: TracedPlan, workload: WorkloadFacts) -> dict[str, Any]:
    """What a child has to know of a workload's calls."""
    return {
        "traced": plan.encode(traced),
        "leaves": {
            path: plan.encode_tree(leaf) for path, leaf in workload.inputs if not isinstance(leaf, plan.TensorSpec)
        },
        "tree": workload.input_tree,
        "shared": list(workload.shared),
        "backward": is_backward(workload.name),
    }


def _start_of(text: str) -> ModuleStart:
    try:
        data = json.loads(text)
        state = {str(path): (tuple(int(n) for n in shape), str(dtype)) for path, shape, dtype in data["state"]}
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise WorkerProtocol(f"the candidate's description is malformed: {error}", phase="start") from None
    return ModuleStart(state)


def _left_of(text: str) -> tuple[str, ...]:
    try:
        names = [str(name)[:100] for name in json.loads(text)]
    except (ValueError, TypeError, RecursionError) as error:
        raise WorkerProtocol(f"the names of settings are malformed: {error}", phase="asking for settings") from None
    return tuple("".join(c for c in name if c.isprintable()) for name in names[:_MAX_SETTINGS])


def _profile_of(text: str) -> CallProfile:
    try:
        data = json.loads(text)
        operators = tuple((str(name)[:100], int(ns)) for name, ns in data["operators"])
        kernels = tuple((str(name)[:200], int(ns), int(count)) for name, ns, count in data.get("kernels", ()))
        own_calls, own_ns, thread_ns = (int(data[name]) for name in ("own_calls", "own_ns", "thread_ns"))
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
        raise WorkerProtocol(f"the profile is malformed: {error}", phase="profiling forward") from None
    # Host code that computes by itself (numpy, plain Python) shows in no operator; calling them costs a little, too.
    unseen_ns = thread_ns - own_ns - sum(ns for _, ns in operators)
    host_ns = unseen_ns if unseen_ns > _HOST_NS + thread_ns // 2 else 0
    return CallProfile(own_calls, own_ns, operators, host_ns, bool(data.get("compiled")), kernels)


def _number_of(text: str, doing: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 20):
        raise WorkerProtocol("a number is malformed", phase=doing)
    return int(text)
