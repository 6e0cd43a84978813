"""What the contract does not promise: other sizes, strides, alignments. Whatever fails there narrows the guard."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from pytest_cudaforge.errors import DeviceError, LaunchFailure, TargetError, Unsupported, WorkerFailure
from pytest_cudaforge.evaluation.arena import ALIGN_BYTES, HOST_ALIGN_BYTES
from pytest_cudaforge.evaluation.benches import Benches
from pytest_cudaforge.evaluation.building import Product
from pytest_cudaforge.evaluation.cases import CallLayout, Trial, call_layout
from pytest_cudaforge.evaluation.chance import CHANCE
from pytest_cudaforge.evaluation.contract import compare_structure
from pytest_cudaforge.evaluation.module_worker import ModuleWorker
from pytest_cudaforge.evaluation.oracle import NO_ROOM, TrialCase
from pytest_cudaforge.evaluation.refusal import Refusal
from pytest_cudaforge.evaluation.runs import Run
from pytest_cudaforge.evaluation.teams import openmp_threads
from pytest_cudaforge.evaluation.worker import Worker
from pytest_cudaforge.languages import Binary
from pytest_cudaforge.plan import LaunchPlan, TracedPlan
from pytest_cudaforge.records import CaseResult, DeviceFacts, Guard, Status, TargetFacts, WorkloadFacts

__all__ = ["Plans", "Prober", "narrow"]

#: How the names of probes begin that have other values, and other strides, as in ``variants``, which needs torch.
_OTHER, _STRIDED, _APART = "other ", "strided", "apart"
#: ... and those of probes that say something where a plan takes such a call, and nothing where it does not.
_TINY, _TALL, _LEFT = "tiny", "tall", "left"
#: So many OpenMP threads as are more than there is to do.
_TEAM = 193
_IF_TAKEN = ("strided in front", "strided outer", "strided order", _TINY, _TALL, "mixed", "only last", "all but last")
#: So many times the limit may a call on more rows than usual take.
_TALL_PATIENCE = 6
#: How long calls of all remainders are made.
_LEFT_S = 1.5
_SIZE, _CHANGE = re.compile(r"size (\d+) -> (\d+)"), re.compile(r"(\d+) -> (\d+)")
#: A tensor's least alignments that are tried, in this order, and the one that all contract trials have.
_ALIGNMENTS = (1, 16, 32, 64)
_CONTRACT_ALIGNMENT = {"cpu": HOST_ALIGN_BYTES, "cuda": ALIGN_BYTES}
_TRITON_ALIGNMENT = 16
#: How many cores more other machines have: as a server, as a desktop.
_MORE_CORES = ((24, 192), (6, 16))
#: How often calls are repeated with so many threads, which take turns on the cores here and meet the less.
_MORE_REPEATS = 8
#: Kinds of values that are as well defined at other sizes; the one that shows what a long sum leaves out.
_OF_ANY_SIZE, _TELLING = ("shifted", "large", "lowered", "sparse", "normal", "uniform"), ("sparse", "extremes")
#: How torch begins what it says of a device's fault.
_LOST = "CUDA error:"


class _Untried(Exception):
    """A probe that was not run: the plan refuses it, or has no kernel for it yet."""


class _Refused(_Untried):
    """The plan refuses such calls: in production, too, where the reference gets them."""


class _Specialised(_Untried):
    """Other constants, or kernels, than the drawn calls have: production would build what nobody tried."""


class _NoRoom(_Untried):
    """A probe that took more memory than the device has, or values that the reference does not take: nobody's fault."""


class Plans(Protocol):
    """Makes plans and binaries for shapes beside the declared ones."""

    device: DeviceFacts

    #: Whether outputs are laid out as the plan says; a module's are as a call returns them.
    @property
    def tells_structure(self) -> bool: ...

    #: Numbers that the candidate's sources name.
    @property
    def landmarks(self) -> tuple[int, ...]: ...

    #: Whether any code is the candidate's.
    @property
    def own_code(self) -> bool: ...

    def trace(self, workload: WorkloadFacts, *, device: DeviceFacts | None = None) -> TracedPlan: ...

    def knows(self, traced: TracedPlan) -> bool: ...

    def compile(self, traced: TracedPlan) -> tuple[Binary, ...]: ...

    def older(self) -> Iterator[tuple[str, Plans]]: ...


def narrow(
    benches: Benches,
    reason: str,
    *,
    contiguous: bool = False,
    drawn: bool = False,
    fixed: int = 0,
    equal: bool = False,
    align_bytes: int = 1,
) -> None:
    """The guard excludes more from now on, for ``reason``."""
    guard = benches.findings.guard
    benches.findings.guard = replace(
        guard,
        contiguous_only=guard.contiguous_only or contiguous,
        align_bytes=max(guard.align_bytes, align_bytes),
        drawn_shapes_only=guard.drawn_shapes_only or drawn,
        fixed_sizes=tuple(sorted({*guard.fixed_sizes, *([fixed] if fixed else [])})),
        equal_sizes_only=guard.equal_sizes_only or equal,
        reasons=(*guard.reasons, reason),
    )


def machines_like(device: DeviceFacts) -> tuple[DeviceFacts, ...]:
    """Machines that share ``device``'s arch, by what a plan may know of them; their sizes are drawn, secretly.

    Of a GPU's smaller ones only: a grid that has to be on the device at once has no more blocks than fit on this one.
    Of a CPU's larger ones only: what has room for as many threads as cores has room for those that run here.
    """
    if device.kind == "cuda":
        fewer = CHANCE.randint(max(1, device.sm_count // 2), max(1, device.sm_count - 1))
        return (replace(device, sm_count=fewer, l2_bytes=device.l2_bytes // 2),)
    sizes = [device.sm_count + CHANCE.randint(*more) for more in _MORE_CORES]
    return tuple(replace(device, sm_count=cores, l2_bytes=2 * device.l2_bytes) for cores in sizes)


class Prober:
    """The probes of one workload. ``excluded``: a guard outside of which nothing is looked at, or None."""

    def __init__(
        self, benches: Benches, product: Product, facts: TargetFacts, kitchen: Plans, excluded: Guard | None
    ) -> None:
        self.benches, self.product, self.facts, self.kitchen = benches, product, facts, kitchen
        self.excluded = excluded
        #: A module's worker whose last probe passed.
        self._ready: ModuleWorker | None = None
        #: A launch plan's worker that goes from probe to probe; None: each has a fresh one.
        self._going: list[Worker] | None = None
        #: May another instance be called before it?
        self._beside = True

    @property
    def _guard(self) -> Guard:
        return self.benches.findings.guard

    @property
    def _kind(self) -> str:
        return self.kitchen.device.kind

    @property
    def _mutates(self) -> bool:
        return bool(self.benches.setting.oracle.mutates(self.benches.target, self.product.workload.name))

    @property
    def _contract_alignment(self) -> int:
        return _CONTRACT_ALIGNMENT[self._kind]

    # -- sizes, strides, values

    def leave_alone(self) -> None:
        """Where a call moves too much to be probed."""
        reason, align_bytes = "the call moves gigabytes and was not probed", self._contract_alignment
        narrow(self.benches, reason, contiguous=True, drawn=True, align_bytes=align_bytes)

    def look_around(self) -> None:
        """Raises Refusal where something fails that the target promises."""
        if self.excluded is not None and not any(self._is_open(strided) for strided in (True, False)):
            return
        try:
            self._try_all()
        finally:
            self._let_go()

    def _try_all(self) -> None:
        sizes, tiny, remainders = 0, False, list[tuple[str, WorkloadFacts]]()
        variants = self.benches.setting.oracle.variants(self.benches.target, self.product.workload.name)
        for (name, _), members in itertools.groupby(variants, key=_kind_of):
            if name.startswith(_OTHER):
                for other, variant in members if self.excluded is None else ():
                    self._try_other_values(other, variant)
                continue
            strided = name.startswith(_STRIDED)
            if name.startswith(_APART):
                for apart, variant in members:
                    self._try_apart(apart, variant)
                continue
            if name.startswith(_LEFT):
                remainders += members
                continue
            if name.startswith(_IF_TAKEN) and not self._takes(name, self.product.traced.main):
                continue
            sizes += not strided
            if not strided and self._keeps(name):
                continue
            few = name.startswith(_TINY) and not name.endswith("-> 1")
            if self._is_open(strided) and not (few and tiny):
                self._try_first(list(members), strided)
                tiny = tiny or few
        if self.facts.dynamic and self.kitchen.own_code:
            self._try_remainders(remainders)
            self._try_landmarks()
        if not sizes:
            narrow(self.benches, "no neighbouring shape could be drawn", drawn=True)

    def _try_remainders(self, members: Sequence[tuple[str, WorkloadFacts]]) -> None:
        """As many of them as there is time for, of kernels that are built already: a tail is code of theirs."""
        until, self._going = time.monotonic() + _LEFT_S, []
        try:
            for name, workload in members:
                if time.monotonic() > until:
                    return
                try:
                    problem = self._variant_problem(name, workload, contract=False)
                except _NoRoom:
                    self._close_going()  # it was stopped while its answer was to be looked at
                    continue
                except _Untried:
                    continue
                self._conclude(name, problem, True, strided=False)
        finally:
            self._close_going()
            self._going = None

    def _close_going(self) -> None:
        while self._going:
            self._going.pop().close()

    def _try_landmarks(self) -> None:
        """Sizes next to those that the candidate names; one that it refuses it may name for that."""
        oracle, drawn = self.benches.setting.oracle, self.product.workload.name
        for name, workload in oracle.variants_near(self.benches.target, drawn, self.kitchen.landmarks):
            try:
                problem = self._variant_problem(name, workload, contract=True)
            except _Untried:
                continue
            self._conclude(name, problem, True, strided=False)

    def _takes(self, name: str, plan: LaunchPlan) -> bool:
        """Is a variant worth a process of its own that says nothing of who does not take it?"""
        if not plan.steps:  # nothing of a module is dispatched to; but what its target promises
            return self.facts.strides == "any" if name.startswith(_STRIDED) else self.facts.dynamic
        # A grid's first dimension is as long as any tensor, but what is counted in it may have no room for as many.
        deep = any(max(launch.grid[1:], default=1) > 1 for launch in plan.launches)
        return not name.startswith(_TALL) or deep or self.facts.dynamic

    def _keeps(self, name: str) -> bool:
        """Does dispatch keep calls away in which the sizes change that change here?"""
        fixed = {*self._guard.fixed_sizes, *(self.excluded.fixed_sizes if self.excluded is not None else ())}
        kept = not fixed.isdisjoint(_changed(name))
        if kept and name.startswith(_TALL) and self._guard.fixed_sizes and not self._guard.drawn_shapes_only:
            narrow(self.benches, "no call with so many rows could be tried", drawn=True)
        return kept

    def _is_promised(self, strided: bool) -> bool:
        return self.facts.strides == "any" if strided else self.facts.dynamic

    def _is_open(self, strided: bool) -> bool:
        """Whether such calls are in use although not drawn, or promised by the target whatever the guard says."""
        guard = self.excluded
        if guard is None or self._is_promised(strided):
            return True
        return not (guard.contiguous_only if strided else guard.drawn_shapes_only)

    def _try_other_values(self, name: str, workload: WorkloadFacts) -> None:
        """An input that is the same in every draw, with other values: right answers are not promised, but who relies on
        them should know."""
        try:
            problem = self._variant_problem(name, workload, contract=False)
        except _Untried as error:
            problem = str(error)
        if problem:
            path = name.removeprefix(_OTHER)
            narrow(self.benches, f"input {path} is the same in every draw; with other values of it: {problem}")

    def _try_apart(self, name: str, workload: WorkloadFacts) -> None:
        """Sizes that are equal as drawn, and not here. A kernel that is written for equal ones is no less right where
        they are: it is not dispatched to where they differ. Where any size is promised a plan may refuse them, and a
        module raise, but neither give a wrong answer."""
        guard, module = self._guard, not self.product.traced.main.steps
        closed = guard.drawn_shapes_only or guard.equal_sizes_only or (module and not self.facts.dynamic)
        closed = closed or (self.excluded is not None and self.excluded.equal_sizes_only)
        if closed or self._keeps(name) or not self._is_open(strided=False):
            return
        contract = self.facts.dynamic and not module
        try:
            problem = self._variant_problem(name, workload, contract)
        except _Refused:
            return
        except _Untried as error:
            problem, contract = str(error), False
        last = self.benches.findings.cases[-1]
        answered = self.facts.dynamic and last.case == name and bool(last.mismatches)
        if problem and (contract or answered):
            self._conclude(name, problem, True, strided=False)
        if problem:
            narrow(self.benches, f"{name}: {problem}", equal=True)

    def _try_first(self, members: Sequence[tuple[str, WorkloadFacts]], strided: bool) -> None:
        """The first of them that the plan takes. A plan that refuses a size sends production's call to the reference,
        and one that has other constants there would be compiled anew: then the next one tells more."""
        contract = self._is_promised(strided)
        if not contract and (self._guard.contiguous_only if strided else self._guard.drawn_shapes_only):
            return
        refused, special, lacking = "", "", False
        for name, workload in members:
            try:
                problem = self._variant_problem(name, workload, contract)
            except _Specialised as error:
                special = str(error)
                continue
            except _Untried as error:
                refused, lacking = str(error), isinstance(error, _NoRoom)
                continue
            # Where others are built for some of these sizes, nobody knows which those are.
            self._conclude(name, problem or special, contract, strided)
            return
        if special:
            self._conclude(members[-1][0], special, contract, strided)
            return
        if members[0][0].startswith(_IF_TAKEN):
            return
        # Where nothing but a far size was drawn, it was for kernels that take it as they are.
        if contract or strided or len(members) > 1 or not _grows(members[0][0]):
            self._conclude(members[-1][0], refused, contract and not lacking, strided)

    def _conclude(self, name: str, problem: str, contract: bool, strided: bool) -> None:
        """Raises Refusal for a problem with what the target promises; any other narrows the guard."""
        if problem and contract:
            case = CaseResult(self.product.workload.name, name, True, False, None, None, note=problem)
            self.benches.findings.cases.append(case)
            promised = f"the target promises {'any strides' if strided else 'dynamic shapes'}"
            raise self.benches.refusal(Status.REJECTED, f"{promised}: {name}: {problem}")
        changed = _changed(name)
        fixed = changed.pop() if len(changed) == 1 and not strided else 0
        if problem:
            narrow(self.benches, f"{name}: {problem}", contiguous=strided, drawn=not strided and not fixed, fixed=fixed)

    def _variant_problem(self, name: str, workload: WorkloadFacts, contract: bool) -> str:
        """ "" where it passes, else what went wrong. Raises _Untried where it was not run for a plan's reasons."""
        try:
            traced = self.kitchen.trace(workload)
        except Unsupported as error:
            raise _Refused(f"plan.py refuses it: {error.what}") from error
        except Refusal as refusal:
            return refusal.reason
        if not contract and not self.kitchen.knows(traced):
            raise _Specialised("its kernels are specialised to the drawn shapes by constants")
        try:
            return self._problem_of(traced, workload, name, variant=name, contract=contract)
        except DeviceError as error:
            if not error.what.startswith(NO_ROOM):
                raise
            raise _NoRoom(f"not tried: {error.what}") from error
        except TargetError as error:
            if _LOST in error.what:
                raise
            # It takes calls of such shapes with some values (offsets that happen to fit), and these are others.
            raise _NoRoom("not tried: the reference takes calls of that kind now and then") from error

    # -- other machines

    def look_elsewhere(self) -> None:
        """The plan as it is traced on machines of other sizes, where it is another one there: the kernel is published
        for all that share this one's arch. Raises Refusal where it is wrong."""
        tried = [self.product.traced.main]
        for device in machines_like(self.kitchen.device):
            try:
                traced = self.kitchen.trace(self.product.workload, device=device)
            except Unsupported:  # there the reference runs
                continue
            if traced.main in tried:
                continue
            tried.append(traced.main)
            name = f"as on a machine with {device.sm_count} {'SMs' if device.kind == 'cuda' else 'cores'}"
            threads = device.sm_count if device.kind == "cpu" else None
            problem = self._problem_of(traced, self.product.workload, name, contract=True, threads=threads)
            if problem:
                raise self.benches.refusal(Status.REJECTED, f"{self.product.workload.name}: {name}: {problem}")
        self._look_at_older()

    def _look_at_older(self) -> None:
        """What a repo holds is the source, and every machine builds its own code of it."""
        for arch, kitchen in self.kitchen.older():
            name = f"as built for {arch}"
            try:
                traced = kitchen.trace(self.product.workload)
                product = Product(self.product.workload, traced, kitchen.compile(traced))
            except (Unsupported, Refusal):  # there the reference runs
                continue
            problem = self._problem(product, call_layout(traced, frames=1), name, contract=True)
            if problem:
                raise self.benches.refusal(Status.REJECTED, f"{self.product.workload.name}: {name}: {problem}")

    def _problem_of(
        self,
        traced: TracedPlan,
        workload: WorkloadFacts,
        name: str,
        *,
        contract: bool,
        variant: str = "",
        threads: int | None = None,
    ) -> str:
        mismatches = compare_structure(traced.main, workload) if self.kitchen.tells_structure else ()
        if mismatches:
            return f"{mismatches[0].output}: {mismatches[0].detail}"
        try:
            product = Product(workload, traced, self.kitchen.compile(traced))
        except Refusal as refusal:
            return refusal.reason
        layout = call_layout(traced, frames=1)
        return self._problem(product, layout, name, variant=variant, contract=contract, threads=threads)

    # -- alignment

    def look_at_alignment(self, worker: Worker) -> None:
        """The last thing the contract's worker does: a misaligned access may well end it. The guard asks for the least
        alignment with which inputs and weights were right."""
        if any(binary.language == "triton" for binary in self.product.binaries):
            reason = "Triton's kernels are compiled for 16-byte aligned tensors"
            narrow(self.benches, reason, align_bytes=_TRITON_ALIGNMENT)
            return
        if self._is_promised(strided=True):
            self._require_any_address(worker)
        known, most = self._guard.align_bytes, self._contract_alignment
        kept: Worker | None = worker
        tried = [align for align in _ALIGNMENTS if known <= align < most]
        # A GPU's worker does not survive a misaligned vector, and a fresh one takes its time: what most kernels ask for
        # comes first there, less only where that is right.
        less = tried[:1] if self._kind == "cuda" and tried[:2] == [1, 16] else []
        upwards = tried[len(less) :]
        for align, more in zip(upwards, [*upwards[1:], most], strict=True):
            if self._right_where_aligned(align, more, kept):
                break
            kept = None
        if less and kept is not None:
            self._right_where_aligned(1, 16, kept)

    def _require_any_address(self, worker: Worker) -> None:
        """A part of a tensor, which is what has strides, begins at any of its elements. Weights are whole. Raises
        Refusal where it is wrong."""
        traced = self.product.traced
        if not any(buffer.role == "input" for buffer in traced.main.buffers):
            return
        layout = call_layout(traced, frames=2, aligned_to=1, of_state=False)
        problem = self._problem(self.product, layout, "misaligned inputs", contract=True, kept=worker, frames=2)
        if problem:
            promised = f"the target promises any strides: misaligned inputs: {problem}"
            raise self.benches.refusal(Status.REJECTED, f"{self.product.workload.name}: {promised}")

    def _right_where_aligned(self, align: int, more: int, kept: Worker | None) -> bool:
        """Where it is not, the guard asks for ``more``."""
        problem = self._misaligned_problem(align, kept)
        if problem:
            what = "misaligned tensors" if align == 1 else f"tensors aligned to {align} bytes"
            narrow(self.benches, f"{what}: {problem}", align_bytes=more)
        return not problem

    def _misaligned_problem(self, aligned_to: int, kept: Worker | None) -> str:
        """Once with no tensor aligned to more, then with some that are: a kernel may look at one address and mean all
        of them."""
        traced = self.product.traced
        plans = [plan for plan in (traced.main, traced.prepare) if plan is not None]
        places = {buffer.source for plan in plans for buffer in plan.buffers if buffer.role in ("input", "state")}
        if not places:
            return ""
        layout = call_layout(traced, frames=2, aligned_to=aligned_to)
        name = "misaligned" if aligned_to == 1 else f"aligned to {aligned_to} bytes"
        frames = 1 if len(places) == 1 else 2
        problem = self._problem(self.product, layout, name, contract=False, kept=kept, frames=frames)
        if problem or self._kind != "cpu":
            return problem
        # A vector that is aligned crosses no page: only such tensors can end where it reads on.
        layout = call_layout(traced, frames=1, aligned_to=aligned_to, guarded=True)
        return self._problem(self.product, layout, f"{name}, at the end of a page", contract=False, kept=kept)

    # -- one probe

    def _problem(
        self,
        product: Product,
        layout: CallLayout,
        name: str,
        *,
        contract: bool,
        variant: str = "",
        kept: Worker | None = None,
        frames: int = 1,
        threads: int | None = None,
    ) -> str:
        """ "" where the probe passes in all ``frames``, else what went wrong. ``threads``: as many of OpenMP's take
        part, in many calls on the last one's values, too."""
        workload = self.product.workload.name
        case = CaseResult(workload, name, contract, False, None, None)
        if not product.traced.main.steps and kept is None:
            self._ready = self._ready or self._begun()
        try:
            with self._opened(product, layout, variant, kept) as run:
                if threads is not None:
                    run.worker.set_threads(threads)
                if variant.startswith(_TALL):
                    run.hang_limit_s *= _TALL_PATIENCE
                for frame in range(frames):
                    # Weights as constructed are often all alike: whose they are shows in no answer.
                    drawn = TrialCase(CHANCE.fresh_seed(), weights_seed=CHANCE.fresh_seed())
                    trial = Trial(name, drawn, frame, 0)
                    case = run.case(workload, trial, contract=contract)
                    sized = variant and not variant.startswith((_STRIDED, _OTHER))
                    for family in self._other_kinds() if contract and sized and not self._mutates else ():
                        if case.passed:
                            other = replace(drawn, seed=CHANCE.fresh_seed(), family=family)
                            case = run.case(workload, replace(trial, case=other), contract=contract)
                    if case.passed and contract and self._is_for_a_team(product, variant):
                        run.worker.set_threads(_TEAM)
                        case = run.case(workload, replace(trial, name=f"{name}, {_TEAM} threads"), contract=contract)
                        run.worker.set_threads(openmp_threads())
                    for _ in range(_MORE_REPEATS if threads is not None and not self._mutates else 0):
                        case = run.repeated(workload, trial) if case.passed else case
                    if not case.passed:
                        break
        except (WorkerFailure, LaunchFailure) as error:
            case = replace(case, passed=False, note=str(error))
        except Refusal as refusal:
            case = replace(case, passed=False, note=refusal.reason)
        self.benches.findings.cases.append(case)
        if case.passed:
            return ""
        self._let_go()
        return case.note or f"{case.mismatches[0].output}: {case.mismatches[0].detail}"

    def _is_for_a_team(self, product: Product, variant: str) -> bool:
        """Of a few elements most threads of a large machine get none."""
        return variant.startswith(_TINY) and self.kitchen.device.kind == "cpu" and bool(product.traced.main.steps)

    def _other_kinds(self) -> tuple[str, ...]:
        """Other values than drawn ones, where sizes are promised: the telling kind and one more that any size has."""
        known = self.benches.setting.oracle.families(self.benches.target, self.product.workload.name)
        telling = tuple(family for family in _TELLING if family in known)
        others = [family for family in known if family in _OF_ANY_SIZE and family not in telling]
        return (*telling, CHANCE.choice(others or ["drawn"]))

    @contextlib.contextmanager
    def _opened(self, product: Product, layout: CallLayout, variant: str, kept: Worker | None) -> Iterator[Run]:
        """A run on a fresh worker, or on ``kept``; a module's on one that has made a call that was drawn, and goes from
        probe to probe as long as they pass: in production, too, one instance gets all of them, and what it sized by its
        first call is wrong later."""
        workload = self.product.workload.name
        if product.traced.main.steps or kept is not None:
            kept = kept or self._gone_on_with(product)
            with self.benches.open(product, layout, variant=variant, workload=workload, kept=kept) as run:
                yield run
            return
        assert self._ready is not None
        with self.benches.open(product, layout, variant=variant, workload=workload, kept=self._ready) as run:
            self._ready.turn(product.traced, product.workload, timeout_s=self.benches.setting.hang_limit_s)
            yield run

    def _gone_on_with(self, product: Product) -> Worker | None:
        """The worker that goes from probe to probe, with this product loaded; None where each has a fresh one."""
        if not self._going:
            if self._going is None:
                return None
            self._going.append(self.benches.started(product))
            return self._going[0]
        setting, (worker,) = self.benches.setting, self._going
        worker.start(product.traced, product.binaries, setting.oracle.device, timeout_s=setting.hang_limit_s)
        return worker

    def _begun(self) -> ModuleWorker:
        """A fresh worker that has made a call that was drawn, after one of an instance of other settings, as another
        layer's is: what all instances share is this one's, too. Raises Refusal where the answer is wrong now."""
        if self._beside:
            with contextlib.suppress(WorkerFailure, LaunchFailure, DeviceError):
                return self._begun_with("after a call of an instance of other settings", Run.of_another)
            self._beside = False  # nobody promised that it survives such a call
        return self._begun_with("before other calls", lambda *_: None)

    def _begun_with(self, name: str, prepared: Callable[[Run, Trial], None]) -> ModuleWorker:
        """Raises what ``prepared`` does, too."""
        with contextlib.ExitStack() as unless_right:
            worker = self.benches.started(self.product)
            unless_right.callback(worker.close)
            assert isinstance(worker, ModuleWorker)
            layout = call_layout(self.product.traced, frames=1)
            trial = Trial(name, TrialCase(CHANCE.fresh_seed()), 0, 0)
            failed: list[Exception] = []
            with self.benches.open(self.product, layout, kept=worker) as run:
                try:
                    prepared(run, trial)
                except (WorkerFailure, LaunchFailure, DeviceError) as error:
                    failed.append(error)  # which would be the candidate's own fault to ``open``
                else:
                    self.benches.require(self.product, trial, functools.partial(run.case, contract=True))
            if failed:
                raise failed[0]
            unless_right.pop_all()
        return worker

    def _let_go(self) -> None:
        if self._ready is not None:
            self._ready.close()
        self._ready = None


def _changed(name: str) -> set[int]:
    """The sizes that are others in a variant of this name."""
    return {int(old) for old, _ in _CHANGE.findall(name)}


def _kind_of(variant: tuple[str, WorkloadFacts]) -> tuple[str, bool]:
    """What variants have in common of which the first that can be tried will do: the size that changes, and whether it
    grows."""
    name = variant[0]
    match = _SIZE.fullmatch(name)
    return (f"size {match[1]}", _grows(name)) if match else (name, False)


def _grows(name: str) -> bool:
    match = _SIZE.fullmatch(name)
    return match is not None and int(match[2]) > int(match[1])
