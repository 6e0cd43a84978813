"""Circumstances in which kernels fail that were right in every trial: ``CHECKS``, a table in the order they are tried.

Each check is a function that raises Refusal. What it is about, and which candidates it concerns, stands in its row.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from pytest_cudaforge.errors import ForgeError, LaunchFailure, WorkerCrash, WorkerFailure, WorkerTimeout
from pytest_cudaforge.evaluation.benches import Benches
from pytest_cudaforge.evaluation.building import Product
from pytest_cudaforge.evaluation.cases import Elsewhere, Trial, call_layout
from pytest_cudaforge.evaluation.chance import CHANCE
from pytest_cudaforge.evaluation.module_requests import NewInstance
from pytest_cudaforge.evaluation.module_worker import ModuleWorker
from pytest_cudaforge.evaluation.oracle import FOLLOWS_STATE, OracleClient, TrialCase
from pytest_cudaforge.evaluation.runs import AGED_CALLS, Run
from pytest_cudaforge.evaluation.settings import DRAWN
from pytest_cudaforge.evaluation.teams import openmp_threads
from pytest_cudaforge.languages.binary import block_sizes
from pytest_cudaforge.plan import LibraryCall
from pytest_cudaforge.records import CaseResult, Status, Target
from pytest_cudaforge.runtime.gradients import is_backward

__all__ = ["CHECKS", "Bout", "Check", "checks_for", "turns"]

#: How many calls of the reference's there were before later ones: some, as what wears off may be nothing at last.
_LATER_CALLS = ((2, 9), (300, 700), (4200, 9000))
#: Calls on the same values where these have to be written again before each, and for how long.
_REPEATED, _REPEATED_S = 24, 0.3
#: What a call does that looks like no call of a library's.
_OWN_CLOCK, _OWN_CALL = "a call asks the processor for the time (rdtsc)", "a call calls the kernel by itself (syscall)"
#: Loaded alike, and the first one long ago. Whoever goes by where weights lie, or the module itself, by a number that a
#: copy takes over, or by what all of its class have in common, answers with another one's. One of other settings is
#: never called itself.
_INSTANCES: dict[str, NewInstance] = {
    "a second instance": "beside",
    "beside one of other settings": "otherwise",
    "a copy": "copy",
    "a copy that is as old": "copy as old",
    "a third instance": "weights alone",
    "a fourth instance": "alone",
}
#: How many instances there are after those, each in the place of the one before, and for how long: a GPU's allocator
#: gives the same memory again at once.
_NEXT_INSTANCES, _NEXT_S = 16, {"cpu": 2.0, "cuda": 0.3}
#: A process that makes no call takes less than this share of a core's time (or waits for it, on a busy machine), in one
#: of some intervals at least, each so long: OpenMP's threads look out for work for a while.
_IDLE_SHARE, _IDLE_S = 0.4, (0.03, 0.03, 0.1, 0.3, 0.5)
#: The weights of a module that is made three times, at most.
_MOST_WEIGHTS_BYTES = 1 << 28
_FLOATING = ("float", "bfloat")
#: How often calls that write their inputs, or state, are made beside others.
_ROWS_BESIDE = 4
#: In how many processes: on a busy machine threads do not always meet.
_FIRST_AT_ONCE = 2
#: How many of a module's weights are changed alone, one after another.
_MOST_WEIGHTS_ALONE = 6
#: How many buffers lie at the end of a GPU's mapped memory, one after another; one where a call is larger.
_MOST_EDGES, _EDGES_BYTES = 4, 1 << 28
#: More threads than most machines have cores, and as many as a sandbox surely allows.
_MANY_THREADS, _MOST_THREADS = 257, 512
#: Families of which many numbers are alike: those of :mod:`.extremes` and :mod:`.hubs`, which are the oracle's.
_CROWDING = ("highest", "lowest", "frequent", "hub")
#: ... and those where all threads meet at one place, of so many times as many as there are cores.
_MEETING, _MEETING_THREADS = ("frequent", "hub"), 4


@dataclass(frozen=True)
class Bout:
    """One workload's candidate that was right in all of its trials, on the bench where it was.

    ``last``: the last of these trials. ``mutated``: what the reference writes of its inputs and its state, by path.
    """

    target: Target
    product: Product
    device_kind: str
    oracle: OracleClient
    benches: Benches
    hang_limit_s: float
    run: Run
    last: Trial
    mutated: frozenset[str]

    @property
    def name(self) -> str:
        return self.product.workload.name

    def trial(self, name: str, case: TrialCase | None = None, **changes: Any) -> Trial:
        """As the last one, over poison, with other values where ``case`` says so."""
        plain = replace(self.last, name=name, case=case or self.last.case, calls_before=0, renewed=False)
        return replace(plain, exchanged=False, **changes)

    def new_values(self, family: str = "") -> TrialCase:
        """Under the same weights; of the last trial's family, or of this one, or as drawn ("drawn")."""
        return replace(self.last.case, seed=CHANCE.fresh_seed(), family=family or self.last.case.family)

    def require(self, trial: Trial, judge: Callable[[str, Trial], CaseResult] | None = None) -> None:
        """Raises Refusal where a trial fails; by default it is one call, as in the contract."""
        self.benches.require(self.product, trial, judge or functools.partial(self.run.case, contract=True))

    def reject(self, reason: str) -> None:
        """Raises Refusal."""
        raise self.benches.refusal(Status.REJECTED, f"{self.name}: {reason}")


@dataclass(frozen=True)
class Check:
    """``of``: launch plans or modules alone; ``on``: one kind of device alone. ``mutating``: also where the reference
    writes its inputs or its state, so that values differ from call to call; ``big``: also where a call moves gigabytes.
    ``own_code``: only where code is the candidate's; torch's compiler would compile a configuration anew for it.
    """

    name: str
    made: Callable[[Bout], None]
    of: Literal["plan", "module", ""] = ""
    on: Literal["cpu", "cuda", ""] = ""
    mutating: bool = False
    big: bool = False
    own_code: bool = False

    def concerns(self, *, module: bool, device_kind: str, mutates: bool, big: bool, own_code: bool) -> bool:
        kind = "module" if module else "plan"
        if self.own_code and not own_code:
            return False
        if self.of not in ("", kind) or self.on not in ("", device_kind):
            return False
        return (self.mutating or not mutates) and (self.big or not big)


def checks_for(
    product: Product, device_kind: str, *, mutates: bool, big: bool, own_code: bool = True
) -> tuple[Check, ...]:
    """Those of ``CHECKS`` that concern a candidate, in order."""
    found = {"module": not product.traced.main.steps, "mutates": mutates, "big": big, "own_code": own_code}
    return tuple(check for check in CHECKS if check.concerns(device_kind=device_kind, **found))


# -- what a call leaves behind


def left_behind(bout: Bout) -> None:
    """A call that is right and leaves another rounding, or another default dtype, makes others wrong."""
    try:
        left = _changed_settings(bout)
    except WorkerTimeout as error:
        raise bout.benches.broken(bout.product, bout.last, Status.TIMEOUT, error) from error
    if DRAWN in left and bout.oracle.draws(bout.target, bout.name):
        left = tuple(name for name in left if name != DRAWN)
    if left:
        told = ", ".join(left)
        bout.reject(f"a call leaves changed what other code answers by: {told}; put it back before returning")


def _changed_settings(bout: Bout) -> tuple[str, ...]:
    """By name. A C++ plan makes one more call: who takes all cores leaves no trace where there were as many threads
    before; with one more none of the team goes unasked."""
    worker = bout.run.worker
    usual = openmp_threads() if bout.device_kind == "cpu" and bout.product.traced.main.steps else 0
    if usual:
        worker.set_threads(usual + 1)
        bout.run.call(bout.last.frame)
    left = worker.left_changed(timeout_s=bout.hang_limit_s)
    if usual:
        worker.set_threads(usual)
    if bout.device_kind == "cpu" and len(worker.processors()) > 1:
        left = (*left, "the processors that its threads may run on")
    return left


def left_running(bout: Bout) -> None:
    """Threads that go on when a call has returned take their time from whoever is timed next."""
    worker = bout.run.worker
    for interval_s in _IDLE_S:
        before_ns = worker.processor_ns()
        time.sleep(interval_s)
        taken_ns = worker.processor_ns() - before_ns
        if taken_ns < _IDLE_SHARE * interval_s * 1e9 and not worker.at_work():
            return
    bout.reject("threads of the candidate go on working when its calls have returned")


def leaks(bout: Bout) -> None:
    """Does call after call leave memory behind, or descriptors? A launch plan on a GPU takes none itself."""
    if (bout.device_kind == "cuda" and bout.product.traced.main.steps) or _come_to_an_end(bout):
        return
    leak = bout.run.leak()
    if not leak and bout.run.keeps_inputs():
        leak = "calls keep hold of their inputs, each of them, and of the memory that those take"
    if leak:
        bout.reject(leak)


# -- many calls


def repeated(bout: Bout) -> None:
    """Many calls on the last trial's values: threads that race each other are right most of the time."""
    trial = replace(bout.last, name="repeated", calls_before=0)
    if not bout.mutated:
        bout.require(trial, bout.run.repeated)
        return
    until = time.monotonic() + _REPEATED_S
    for _ in range(_REPEATED):
        bout.require(bout.trial("repeated"))  # which writes all of them again
        if time.monotonic() > until:
            return


def after_an_empty_call(bout: Bout) -> None:
    """A process's first call is on zeros, as many warm up, and nobody looks at it: a kernel that finds its scale by
    what comes first answers wrongly from then on. (A module's is that of a new instance.)"""
    generic = "generic" in bout.oracle.structures(bout.target, bout.name).values()
    if not generic or not bout.oracle.families(bout.target, bout.name):
        return
    empty, other = (bout.trial("after an empty call", bout.new_values(family)) for family in ("empty", "drawn"))
    if bout.product.traced.main.steps and bout.device_kind == "cpu":
        # Who is loaded again may end the process, by what was never meant to be unloaded.
        with bout.benches.open(bout.product, call_layout(bout.product.traced, frames=1)) as run:
            run.unjudged(replace(empty, frame=0))
            bout.require(replace(other, frame=0), functools.partial(run.case, contract=True))
        return
    try:
        bout.run.worker.reload("a first call on zeros", timeout_s=bout.hang_limit_s)
        bout.run.unjudged(empty)
    except LaunchFailure:
        if isinstance(bout.run.worker, ModuleWorker):
            return  # nobody promised that there may be two instances
        raise
    bout.require(other)


def later_calls(bout: Bout) -> None:
    """Where forward writes its state or its inputs, from what the reference's first call leaves: a counter that is set
    to one, what is derived from the state as constructed, and who leaves its answer away where a cache holds the new
    entry already, is right in a first call only. Then from what some, and some hundreds, of the reference's calls
    leave: a table that is full, a correction that wears off."""
    if not bout.mutated:
        return
    later = [("a later call", CHANCE.randrange(*calls)) for calls in _LATER_CALLS]
    for name, calls in (("a second call", 1), *later):
        case = TrialCase(CHANCE.fresh_seed(), weights_seed=bout.last.case.weights_seed, advanced=calls)
        bout.require(bout.trial(name, case))


def one_after_another(bout: Bout) -> None:
    """New values in two frames, then a call in each without a pause, as a model makes them: a kernel that takes quick
    calls for a clock's, or keeps something from one to the next, is right in all other trials."""
    if FOLLOWS_STATE in bout.mutated:
        return  # the second call's answer follows from the first
    bout.require(bout.trial("one after another"), bout.run.one_after_another)


def in_a_row(bout: Bout) -> None:
    """Where forward writes its inputs or its state: calls right behind each other, on what each one left. A kernel that
    takes them for a clock's, which nobody looks at, is right in all other trials."""
    if bout.mutated:
        writes = any(path.startswith("input/") for path in bout.mutated)
        judged = functools.partial(bout.run.in_a_row, writes_inputs=writes)
        bout.require(bout.trial("calls right behind the first"), judged)


def changed(bout: Bout) -> None:
    """Values that change between two calls of a burst: a kernel that works after a pause only, when somebody may have
    looked or written, is right in all other trials."""
    if FOLLOWS_STATE in bout.mutated or _come_to_an_end(bout):
        return
    writes = any(path.startswith("input/") for path in bout.mutated)
    bout.require(bout.trial("changed between calls"), functools.partial(bout.run.changed, writes_inputs=writes))


def ordinary(bout: Bout) -> None:
    """Hundreds of calls on values as the target draws them: what goes wrong in one of some hundred is right in all
    other trials, unless somebody has thought of it."""
    judged = functools.partial(bout.run.ordinary, writes=bool(bout.mutated))
    bout.require(bout.trial("ordinary calls", bout.new_values("drawn")), judged)
    for family in bout.oracle.hundreds(bout.target, bout.name):
        bout.require(bout.trial(f"hundreds of calls on {family}", bout.new_values(family)), judged)


def aged(bout: Bout) -> None:
    """As after thousands of calls, and after as many as an hour makes, where the code keeps count of its calls: what
    does less from then on, and a ticket that wraps, is right in all other trials."""
    if _come_to_an_end(bout):
        return
    worker, moved = bout.run.worker, False
    # Also where blocks come one after another: who sums up too early may be slower than those that it forgot.
    busy = 0 if bout.device_kind == "cuda" else None
    for further in bout.run.ages(bout.trial("how old it is")):
        worker.advance_calls(further, timeout_s=bout.hang_limit_s)
        moved, calls = True, "as many calls as its count of them can hold" if further is None else f"{further} calls"
        for number in range(AGED_CALLS):
            trial = bout.trial(f"as after {calls} more", bout.new_values(), room=busy if number % 2 else None)
            bout.require(trial)
    if moved:
        worker.reload("the checks that follow", timeout_s=bout.hang_limit_s)


def _come_to_an_end(bout: Bout) -> bool:
    """May many calls, of which each goes on where the one before left off?"""
    return bool(bout.mutated) and bout.oracle.keeps_places(bout.target, bout.name)


# -- modules: instances, answers, inputs


def kept_answers(bout: Bout) -> None:
    """Answers that the caller keeps while it goes on, as a loop does that appends them to a list: a module that returns
    memory of its own, in turn, overwrites them sooner or later. A plan's answers lie where the caller says."""
    if _come_to_an_end(bout):
        return
    trial = bout.trial("answers are kept")
    try:
        count, altered, shared = bout.run.kept_answers(trial)
    except WorkerTimeout as error:
        raise bout.benches.broken(bout.product, trial, Status.TIMEOUT, error) from error
    except (WorkerFailure, LaunchFailure) as error:
        raise bout.benches.broken(bout.product, trial, Status.RUNTIME_ERROR, error) from error
    if altered or shared:
        what = f"{altered} changed" if altered else f"{shared} are parts of one storage with another call's"
        were = f"of {count} answers that were kept while the module was called again, {what}"
        bout.reject(f"{were}: return memory of each call's own")


def come_around(bout: Bout) -> None:
    """Calls on much, and then on little, as many as a number of few bits counts: what the first one left behind, under
    the number that a call has now, is right in all other trials. (A plan has no memory of its own but variables: see
    :func:`aged`.)"""
    known = bout.oracle.families(bout.target, bout.name)
    much = "highest" if "highest" in known else "drawn"
    little = next((family for family in ("lowest", "empty") if family in known), "drawn")
    judged = functools.partial(bout.run.come_around, much=bout.new_values(much))
    bout.require(bout.trial("as many calls as a byte counts", bout.new_values(little)), judged)


def instances(bout: Bout) -> None:
    """Another instance beside the first, as a network's second layer is, with weights of its own: a module that keeps
    what it derived from weights for all of its class answers with the first one's."""
    for name, how in _INSTANCES.items():
        if _another(bout, name, how):
            case = TrialCase(CHANCE.fresh_seed(), weights_seed=CHANCE.fresh_seed())
            bout.require(bout.trial(name, case))
        elif name == "a second instance":
            return  # nobody promised that there may be two
    _next_instances(bout)


def _next_instances(bout: Bout) -> None:
    """One after another, each made when the one before is gone and loaded as often, as who tries networks makes them:
    now and then one's weights lie where another's lay."""
    if not any(buffer.role == "state" for buffer in bout.product.traced.main.buffers):
        return
    began = time.monotonic()
    for number in range(1, _NEXT_INSTANCES + 1):
        name = f"the next instance, number {number}"
        if time.monotonic() - began > _NEXT_S[bout.device_kind] or not _another(bout, name, "next"):
            return
        case = TrialCase(CHANCE.fresh_seed(), weights_seed=CHANCE.fresh_seed())
        bout.require(bout.trial(name, case))


def _another(bout: Bout, name: str, how: NewInstance) -> bool:
    """Has an instance taken the place of the one that is called? Not where several may be more than there is room for,
    nor where it may not be copied, or be another one, which nobody promised."""
    weights = (buffer for buffer in bout.product.traced.main.buffers if buffer.role == "state")
    if sum(buffer.spec.extent_bytes for buffer in weights) > _MOST_WEIGHTS_BYTES:
        return False
    worker = bout.run.worker
    assert isinstance(worker, ModuleWorker)
    try:
        worker.another_instance(name, how=how, timeout_s=bout.hang_limit_s)
    except LaunchFailure as error:
        if how in ("beside", "copy", "copy as old", "otherwise"):
            return False
        trial = replace(bout.last, name=name)
        raise bout.benches.broken(bout.product, trial, Status.RUNTIME_ERROR, error) from error
    return True


def weights_one_by_one(bout: Bout) -> None:
    """A step of training, or a part of a checkpoint, changes one of the weights and leaves the others: a module that
    derives something from several of them, and looks at one to see whether it is still right, answers with the old."""
    state = [buffer for buffer in bout.product.traced.main.buffers if buffer.role == "state"]
    paths = [b.source for b in state if b.source not in bout.run.kept and b.spec.dtype.startswith(_FLOATING)]
    if len(paths) < 2:
        return
    order = CHANCE.sample(paths, min(len(paths), _MOST_WEIGHTS_ALONE))
    weights_seed, others_seed = CHANCE.fresh_seed(), CHANCE.fresh_seed()
    for count in range(len(order) + 1):
        others = tuple(order[:count])
        case = TrialCase(CHANCE.fresh_seed(), weights_seed=weights_seed, others=others, others_seed=others_seed)
        bout.require(bout.trial(f"{others[-1]} alone is another one" if others else "before one weight changes", case))


def shortcuts(bout: Bout) -> None:
    """Values that leave an operation nothing to do: host code that then returns its input itself gives the caller what
    it must not write into. How near the answers come is the contract trials' to say."""

    def judged(name: str, trial: Trial) -> CaseResult:
        found = bout.run.case(name, trial, contract=True)
        told = tuple(mismatch for mismatch in found.mismatches if mismatch.kind in ("structure", "mutation"))
        return replace(found, passed=not told, error_ratio=None, bound=None, mismatches=told)

    for family in bout.oracle.shortcuts(bout.target, bout.name):
        case = TrialCase(CHANCE.fresh_seed(), family, bout.last.case.weights_seed)
        bout.require(bout.trial(family, case), judged)


def in_another_thread(bout: Bout) -> None:
    """A call in a new thread, outside of no_grad: what is made ready in the thread that imported the file, and who does
    less where gradients are recorded, is right in all other trials."""
    bout.require(bout.trial("in another thread", bout.new_values(), elsewhere="thread"))


def training(bout: Bout) -> None:
    """A call whose inputs and parameters ask for gradients, as in training: who answers otherwise then, or leaves the
    state alone, is right in all other trials. Who raises gives no wrong answer."""

    def judged(name: str, trial: Trial) -> CaseResult:
        try:
            return bout.run.case(name, trial, contract=True)
        except LaunchFailure as error:
            return CaseResult(name, trial.name, False, True, None, None, note=f"not possible: {error}")

    if not is_backward(bout.name) and not any(path.startswith("input/") for path in bout.mutated):
        bout.require(bout.trial("in training", bout.new_values(), elsewhere="training"), judged)


def in_inference_mode(bout: Bout) -> None:
    """A call under torch's inference mode, the last one: what a module makes there may be of no use elsewhere. Then one
    there that is the first of an instance, and another one outside: whoever looks at a model before it is trained. What
    forward writes may be an inference tensor from then on, the reference's as well."""
    if not is_backward(bout.name):
        bout.require(bout.trial("in inference mode", bout.new_values(), elsewhere="inference"))
    if bout.mutated or not _another(bout, "an instance that begins in inference mode", "beside"):
        return
    bout.require(bout.trial("first in inference mode", bout.new_values(), elsewhere="inference"))
    if not is_backward(bout.name):
        bout.require(bout.trial("after inference mode", bout.new_values()))


def still_written(bout: Bout) -> None:
    """New values that the caller's stream writes after the call: host code that works in another stream has to wait for
    it. In all other trials the inputs have been there for long."""
    case = TrialCase(CHANCE.fresh_seed(), weights_seed=bout.last.case.weights_seed)
    bout.require(bout.trial("inputs that are still being written", case, late=True))


# -- company


def beside(bout: Bout) -> None:
    """Two threads make the call at once, each with values and scratch of its own, as a server's do: a kernel whose
    workspace is static mixes them up."""
    layout = call_layout(bout.product.traced, frames=1)
    with bout.benches.open(bout.product, layout, kept=bout.run.worker) as second:
        trial = bout.trial("two callers at once", frame=0)
        if not bout.mutated:
            bout.require(trial, functools.partial(bout.run.beside, second))
            return
        endless = not _come_to_an_end(bout)
        for _ in range(_ROWS_BESIDE):
            bout.require(trial, functools.partial(bout.run.row_beside, second, endless=endless))


def first_at_once(bout: Bout) -> None:
    """In a new process two threads make its first call at once: tables that a first call makes, and another one takes
    for made, are wrong in no later one."""
    layout = call_layout(bout.product.traced, frames=1)
    opened = functools.partial(bout.benches.open, bout.product, layout)
    for _ in range(_FIRST_AT_ONCE):
        with opened() as run, opened(kept=run.worker) as second:
            trial = bout.trial("two first calls at once", frame=0)
            bout.require(trial, functools.partial(run.first_at_once, second))


def crowded(bout: Bout) -> None:
    """New values, and a call while one multiprocessor is free, or one block's share of it: blocks that else run side by
    side run one after another, so that who reads what others have not written yet finds what the call before left. Then
    two blocks beside others that take their turns: who waits by the clock comes too soon."""
    sizes = block_sizes(bout.product.traced.main, bout.product.binaries)
    rooms = [(0, False), *((size, False) for size in sorted({max(sizes), min(sizes)} if sizes else ()))]
    if sizes:
        rooms.append((2 * max(sizes), True))
    for room, at_work in rooms:
        case = TrialCase(CHANCE.fresh_seed(), weights_seed=bout.last.case.weights_seed)
        name = f"beside a busy device, {room} threads free" if room else "beside a busy device"
        name += ", its turns taken" if at_work else ""
        bout.require(bout.trial(name, case, room=room, at_work=at_work))


def thread_counts(bout: Bout) -> None:
    """With one OpenMP thread, and with more than there are cores: production's torch.set_num_threads is one that no
    verification foresees, and a kernel that counts on this machine's leaves work undone there, or writes behind its
    arrays. A plan's then with one of as many, as OpenMP may give within another's parallel region, and with a few of
    them (OMP_THREAD_LIMIT, and what a busy machine gives)."""
    usual, worker, module = openmp_threads(), bout.run.worker, isinstance(bout.run.worker, ModuleWorker)
    counts = {1, min(2 * usual + 1, _MOST_THREADS), *(() if module else (_MANY_THREADS,))}
    for count in sorted(counts):
        worker.set_threads(count)
        bout.require(bout.trial(f"OpenMP threads: {count}", bout.new_values()))
        # One thread alone gets all that many share: sums of its own are the largest there.
        for family in bout.oracle.families(bout.target, bout.name) if count == 1 else ():
            if family in _CROWDING:
                bout.require(bout.trial(f"OpenMP threads: 1, {family}", bout.new_values(family)))
    if not module:
        worker.set_threads(2 * usual, alone=True)
        bout.require(bout.trial(f"OpenMP threads: 1 of {2 * usual}", bout.new_values()))
        many, few = 2 * usual + 2, usual + 1
        worker.set_threads(many, limit=few)
        bout.require(bout.trial(f"OpenMP threads: {few} of {many}", bout.new_values()))
    worker.set_threads(usual)


def meeting(bout: Bout) -> None:
    """Several threads a core, which are interrupted in the midst of what others then do as well: who adds to a sum that
    all of them have, without an atomic, is wrong in some of a hundred calls there, and in none of a thousand where each
    thread has a core. The more so where all end with the same sum."""
    usual, worker = openmp_threads(), bout.run.worker
    worker.set_threads(min(_MEETING_THREADS * usual, _MOST_THREADS))
    families = [family for family in bout.oracle.families(bout.target, bout.name) if family in _MEETING]
    for family in ("drawn", *families):
        trial = bout.trial(f"threads that meet, {family}", bout.new_values(family))
        bout.require(trial)
        bout.require(trial, functools.partial(bout.run.repeated, racing=family in _MEETING))
    worker.set_threads(usual)


# -- memory


def sealed(bout: Bout) -> None:
    """Once more with inputs, parameters and prepared values mapped read-only: a kernel that writes them and puts the
    old bytes back shows in no comparison. (A module's host code could map a GPU's memory as it likes.)"""
    run = bout.run
    weights: Elsewhere = "sealed" if isinstance(run.worker, ModuleWorker) and bout.device_kind == "cpu" else ""
    trial = bout.trial("sealed inputs", bout.new_values(), elsewhere=weights)
    run.seal(bout.mutated)
    try:
        case = run.case(bout.name, trial, contract=True)
    except (WorkerCrash, LaunchFailure) as error:
        if isinstance(error, LaunchFailure) and bout.device_kind == "cpu":
            raise bout.benches.broken(bout.product, trial, Status.RUNTIME_ERROR, error) from error
        # A GPU refuses the write itself; all that has changed since the calls before is the mapping.
        reason = f"a call writes to its inputs, parameters or prepared values, and may put the old back: {error}"
        raise bout.benches.broken(bout.product, trial, Status.REJECTED, ForgeError(reason)) from error
    except WorkerFailure as error:
        raise bout.benches.broken(bout.product, trial, Status.RUNTIME_ERROR, error) from error
    bout.require(trial, lambda *_: case)


def images(bout: Bout) -> None:
    """Once more where nobody can read libraries' headers and symbol tables, or ask the kernel's page for the time: by
    these native code finds what it may not import."""
    plan = bout.product.traced.main
    if any(isinstance(step, LibraryCall) for step in plan.steps):
        return  # torch's libraries are bound as they are used
    trial = bout.trial("closed images", bout.new_values(), elsewhere="images")
    try:
        case = bout.run.case(bout.name, trial, contract=True)
    except WorkerCrash as error:
        reason = (
            f"a call looks for other code in memory (libraries' headers and symbol tables), or for the time: {error}"
        )
        raise bout.benches.broken(bout.product, trial, Status.REJECTED, ForgeError(reason)) from error
    except (LaunchFailure, WorkerFailure) as error:
        raise bout.benches.broken(bout.product, trial, Status.RUNTIME_ERROR, error) from error
    bout.require(trial, lambda *_: case)


def clockless(bout: Bout) -> None:
    """A new process's first call, where the processor tells nobody the time, and the kernel is there for libraries
    alone: by either who leaves out work knows when it is late, or watched. Instructions that a disassembler does not
    see are found there, too."""
    if any(isinstance(step, LibraryCall) for step in bout.product.traced.main.steps):
        return  # torch's own code may ask
    layout = call_layout(bout.product.traced, frames=1)
    trial = bout.trial("without a clock", bout.new_values(), frame=0, elsewhere="clockless")
    with bout.benches.open(bout.product, layout) as run:
        try:
            case = run.case(bout.name, trial, contract=True)
        except WorkerCrash as error:
            reason = f"{_OWN_CALL if error.signal == 'SIGSYS' else _OWN_CLOCK}: {error}"
            raise bout.benches.broken(bout.product, trial, Status.REJECTED, ForgeError(reason)) from error
        except (LaunchFailure, WorkerFailure) as error:
            raise bout.benches.broken(bout.product, trial, Status.RUNTIME_ERROR, error) from error
        bout.require(trial, lambda *_: case)


def guarded(bout: Bout) -> None:
    """Once more with every buffer's end, then with its start, at a page that cannot be touched: a kernel that reads out
    of bounds and does nothing with it shows in no output."""
    layout = call_layout(bout.product.traced, frames=2, guarded=True)
    with bout.benches.open(bout.product, layout, kept=bout.run.worker) as run:
        case = bout.new_values()
        for frame, name in enumerate(("at the end of a page", "at the start of a page")):
            trial = bout.trial(name, case, frame=frame)
            _require_in_bounds(bout, run, trial, f"a call reads or writes memory outside a buffer {name}")


def edges(bout: Bout) -> None:
    """On a GPU: once more with one buffer after another where mapped memory ends, and with one where it begins."""
    product = bout.product
    usual = call_layout(product.traced, frames=1)
    names = [name for name, _, nbytes in usual.data["regions"] if nbytes]
    if not product.traced.main.steps:  # a module's weights and answers lie in memory of its own
        names = [name for name in names if "/input/" in name]
    most = _MOST_EDGES if usual.data["nbytes"] < _EDGES_BYTES else 1
    for at_end in CHANCE.sample(names, min(most, len(names))):
        layout = call_layout(product.traced, frames=1, edges=(names[names.index(at_end) - 1], at_end))
        trial = bout.trial(f"{at_end.removeprefix('f0/')} at the end of memory", bout.new_values(), frame=0)
        with bout.benches.open(product, layout, kept=bout.run.worker) as run:
            told = "a call touches memory outside a buffer that lies where mapped memory ends"
            _require_in_bounds(bout, run, trial, told)


def _require_in_bounds(bout: Bout, run: Run, trial: Trial, told: str) -> None:
    """Raises Refusal, with the words ``told`` where the call ended the worker, or the device refused it."""
    failures = (WorkerCrash, LaunchFailure) if bout.device_kind == "cuda" else (WorkerCrash,)
    try:
        case = run.case(bout.name, trial, contract=True)
    except failures as error:
        raise bout.benches.broken(bout.product, trial, Status.REJECTED, ForgeError(f"{told}: {error}")) from error
    bout.require(trial, lambda *_: case)


# -- several workloads


def turns(one: Bout, other: Product) -> None:
    """One instance of a module is called with both workloads by turns: what it sized, or kept, by its first call is
    wrong afterwards. A launch plan has an instance of its own for each."""
    worker, benches = one.run.worker, one.benches
    assert isinstance(worker, ModuleWorker)
    with benches.open(other, call_layout(other.traced, frames=1), kept=worker) as second:
        for turned in (one.run, second, one.run):
            worker.turn(turned.product.traced, turned.product.workload, timeout_s=one.hang_limit_s)
            trial = Trial("workloads by turns", TrialCase(CHANCE.fresh_seed()), frame=0, poison=0)
            benches.require(turned.product, trial, functools.partial(turned.case, contract=True))


CHECKS = (
    Check("left behind", left_behind, mutating=True, big=True),
    Check("left running", left_running, mutating=True, big=True),
    Check("repeated", repeated, mutating=True),
    Check("leaks", leaks, mutating=True),
    Check("after an empty call", after_an_empty_call, own_code=True),
    Check("later calls", later_calls, mutating=True),
    Check("in a row", in_a_row, mutating=True),
    Check("one after another", one_after_another, mutating=True),
    Check("kept answers", kept_answers, of="module", mutating=True),
    Check("come around", come_around, of="module", own_code=True),
    Check("weights one by one", weights_one_by_one, mutating=True, own_code=True),
    Check("instances", instances, of="module", mutating=True, own_code=True),
    Check("shortcuts", shortcuts, of="module", mutating=True, own_code=True),
    Check("in another thread", in_another_thread, of="module", mutating=True, own_code=True),
    Check("beside", beside, of="plan", on="cpu", mutating=True),
    Check("first at once", first_at_once, of="plan", on="cpu", mutating=True),
    Check("crowded", crowded, of="plan", on="cuda", mutating=True),
    Check("still written", still_written, of="module", on="cuda"),
    Check("changed", changed, mutating=True),
    Check("thread counts", thread_counts, on="cpu", mutating=True),
    Check("meeting", meeting, on="cpu"),
    Check("ordinary", ordinary, mutating=True),
    Check("aged", aged, of="plan", mutating=True),
    Check("sealed", sealed, mutating=True),
    Check("images", images, of="plan", on="cpu", mutating=True),
    Check("clockless", clockless, of="plan", on="cpu", mutating=True),
    Check("guarded", guarded, on="cpu", mutating=True),
    Check("edges", edges, on="cuda", mutating=True),
    Check("in training", training, of="module", mutating=True, own_code=True),
    Check("inference mode", in_inference_mode, of="module", mutating=True, own_code=True),
    Check("left at last", left_behind, of="module", mutating=True),
)
