"""One candidate on its way through the stages of a verdict: built, verified, timed, raced."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_cudaforge.errors import ConfigError
from pytest_cudaforge.evaluation import backward, host_profiling, profiling
from pytest_cudaforge.evaluation import timing as statistics
from pytest_cudaforge.evaluation.builder import Builder
from pytest_cudaforge.evaluation.building import Kitchen, Product
from pytest_cudaforge.evaluation.cases import BIG_CALL_BYTES
from pytest_cudaforge.evaluation.contract import label_of
from pytest_cudaforge.evaluation.host_profiling import HostSeat
from pytest_cudaforge.evaluation.module_building import Workshop, compiles_itself
from pytest_cudaforge.evaluation.module_gradients import NO_GRADIENTS
from pytest_cudaforge.evaluation.module_work import PROFILED_CALLS, Workbench, least_own
from pytest_cudaforge.evaluation.parties import Clock
from pytest_cudaforge.evaluation.plan_work import Answered, PlanWork
from pytest_cudaforge.evaluation.pressure import wait_for_quiet
from pytest_cudaforge.evaluation.profiling import ProfiledCall
from pytest_cudaforge.evaluation.race import HANG_LIMIT_S, BaseFailed, Contest, Diary, RacePace, Reference
from pytest_cudaforge.evaluation.refusal import Refusal
from pytest_cudaforge.evaluation.sanitizing import joined
from pytest_cudaforge.evaluation.sitting import (
    Incumbent,
    Rotation,
    Sitting,
    frame_count,
    kept_blocks,
    summarise,
    time_alone,
    was_disturbed,
)
from pytest_cudaforge.evaluation.spares import Spares
from pytest_cudaforge.evaluation.teams import openmp_threads
from pytest_cudaforge.evaluation.verification import Verifier
from pytest_cudaforge.evaluation.worker import Worker
from pytest_cudaforge.languages import DEVICE_LANGUAGES, LANGUAGES
from pytest_cudaforge.records import (
    Build,
    Candidate,
    Depth,
    Guard,
    Profile,
    Race,
    Sample,
    SanitizerReport,
    Status,
    Target,
    TargetFacts,
    Timing,
    Verification,
    Work,
    WorkloadFacts,
    WorkloadTiming,
)
from pytest_cudaforge.runtime.configuration import LANGUAGE

if TYPE_CHECKING:
    from pytest_cudaforge.evaluation.evaluator import Evaluator, Known

__all__ = ["HOSTED", "Attempt"]

#: Languages whose workers run host code of more than the replay's.
HOSTED = frozenset({"module", LANGUAGE})
#: What torch.compile may take in the first call of a worker.
_COMPILE_S = 300.0
#: What Triton may take, with a dozen configurations to choose from, wherever a module's shapes are new to it.
_TUNING_S = 30.0
#: A speedup over torch.compile that asks for a second look.
_QUARANTINE = 10.0
#: From this time on two clocks on the same calls are held against each other, and within what share they agree.
_COMPARED_NS, _CLOCKS_AGREE = 50_000.0, 0.05
#: How long to wait for a quieter moment before a crowded sitting is repeated.
_QUIET_WAIT_S = 3.0

_NO_BASE = "the version at the merge base {} any more against today's target and was left out: {}"
_DISTURBED = "the baselines ran slower beside the candidate than alone, twice"
_CROWDED = "other processes kept the cores busy in nearly every block, twice"
_SLOWED = "the device was slowed down or used by others in nearly every block, twice"

_WHY: dict[Work, str] = {
    "kernel": "its own kernels do the work",
    "mixed": "general torch operators do part of the work",
    "library": "library products do nearly all of the work",
    "rewrite": "no kernel of its own does the work",
}


class Attempt:
    """One candidate on its way through the stages; holds the parts of the verdict found so far."""

    def __init__(
        self, evaluator: Evaluator, candidate: Candidate, target: Target, facts: TargetFacts, fresh: bool
    ) -> None:
        self.evaluator, self.candidate, self.target, self.facts = evaluator, candidate, target, facts
        self.fresh = fresh
        self.work: Work | None = None
        self.build: Build | None = None
        self.verification: Verification | None = None
        self.timing: Timing | None = None
        self.sanitize = self.sanitize_asked = False
        self.workloads = facts.workloads
        self.guard: Guard | None = None
        #: How long the device was not free to profile on.
        self.waited_s = 0.0
        self._products: tuple[Product, ...] = ()
        #: Plans of gradients, and what became of them, where the target asks for any.
        self._backwards: tuple[Product, ...] = ()
        self._gradients = ""
        self._workshop: Workshop | None = None
        self._raced_in: Kitchen | Workshop | None = None
        #: Another attempt, whose products are timed beside this one's.
        self.incumbent: Attempt | None = None
        self._own_share: float | None = None
        #: What gives a plan's answer without its launches.
        self._answered: Answered | None = None
        self._foreign = 0.0
        self._device_notes: dict[str, None] = {}
        self._lag = 1.0
        #: While it is verified.
        self._spares: Spares | None = None

    @property
    def summary(self) -> str:
        """The reason of a pass, in one line."""
        correct = f"correct ({self._gradients})" if self._gradients else "correct"
        if self.timing is None:
            return correct
        return f"{correct}, {self.timing.decision}: {self.timing.speedup_eager:.2f}x eager" + (
            f", {self.timing.speedup_compile:.2f}x torch.compile" if self.timing.speedup_compile is not None else ""
        )

    @property
    def _timed_as(self) -> str:
        """The language whose clock decides: "module" where either of two candidates in one sitting is one."""
        other = self.incumbent.candidate.language if self.incumbent is not None else ""
        return "module" if {self.candidate.language, other} & HOSTED else self.candidate.language

    @property
    def clock(self) -> Clock:
        return self.evaluator.clock_of(self._timed_as)

    def note(self, refusal: Refusal) -> None:
        """Keep what was known when a stage refused the candidate."""
        self.build = refusal.build or self.build
        self.verification = refusal.verification or self.verification

    def build_and_verify(self) -> None:
        """Trace and compile for every workload, then verify. Raises Refusal."""
        host = self.evaluator
        self.require_language()
        with host.lease.work(), host.servers.builder().kept() as builder, self._spares_ready():
            kitchen = self._module() if self.candidate.language in HOSTED else self._kitchen(builder)
            try:
                self._products = tuple(kitchen.produce(workload) for workload in self.workloads)
                if isinstance(kitchen, Workshop):
                    self._workbench(kitchen, self._products[0]).open()
                self.build = kitchen.build
                if not isinstance(kitchen, Workshop):
                    self._label(None)
                    self._build_others(kitchen)
                self.verification = self._verifier(kitchen).verify(self._products)
                if self.facts.grad:
                    self._verify_backward(kitchen)
                if isinstance(kitchen, Kitchen):
                    self.build = replace(self.build, binaries=kitchen.built_to_publish)
                    self._see_who_answers()
                if isinstance(kitchen, Workshop):
                    self._label_module(kitchen)
                if self.sanitize:
                    self._pass_sanitizer(kitchen)
            except Refusal as refusal:
                if isinstance(kitchen, Workshop):
                    kitchen.explain(refusal)
                raise
            finally:
                self.build = self.build or (kitchen.build if kitchen.seconds else None)

    @contextlib.contextmanager
    def _spares_ready(self) -> Iterator[None]:
        """Where workers take their time, the next one is made while one is at work; not beside what is timed."""
        if self.evaluator.kind == "cuda" and self.candidate.language in DEVICE_LANGUAGES:
            self._spares = self.evaluator.spares_of(self.candidate)
            self._spares.begin()
        try:
            yield
        finally:
            if self._spares is not None:
                self._spares.end()
                self._spares = None

    def _build_others(self, kitchen: Kitchen) -> None:
        """A probe is served where some workload's build has its kernels, chosen or not: what was found where all were
        verified together must be found again."""
        if self.guard is None or self.guard.drawn_shapes_only:
            return
        for workload in self.facts.workloads:
            if workload not in self.workloads:
                with contextlib.suppress(Refusal):
                    kitchen.produce(workload)

    def _verify_backward(self, kitchen: Kitchen | Workshop) -> None:
        """Where the target asks for gradients: those of ``plan_backward``, or of autograd through a module, if the
        candidate has any. Raises Refusal."""
        assert self.verification is not None
        names, oracle = [workload.name for workload in self.workloads], self.evaluator.oracle
        if isinstance(kitchen, Workshop):
            found = backward.of_module(kitchen, oracle, self.target, names)
        else:
            found = backward.produce(kitchen, oracle, self.target, names)
            self._backwards = found.products
        self._gradients = found.note or "gradients verified"
        if not found.products:
            return
        if isinstance(kitchen, Kitchen):
            self._label(None)
        try:
            gradients = self._verifier(kitchen, backward.BackwardVerifier).verify(found.products)
        except Refusal as refusal:
            if isinstance(kitchen, Workshop) and NO_GRADIENTS in refusal.reason:
                self._gradients = f"forward only: its {NO_GRADIENTS}"
                return
            raise backward.refused(self.verification, refusal) from refusal
        self.verification = backward.joined(self.verification, gradients)

    def _pass_sanitizer(self, kitchen: Kitchen | Workshop) -> None:
        """What its tools find goes into the verdict. Raises Refusal for what no honest kernel does."""
        assert self.verification is not None
        if self.evaluator.kind != "cuda" or isinstance(kitchen, Workshop):
            # On a CPU red zones, sealed inputs and repeated calls are what there is; a module's host code could tell
            # that it is being looked at.
            if self.sanitize_asked:
                report = SanitizerReport("", (), notes=("compute-sanitizer looks at launch plans on a GPU only",))
                self.verification = replace(self.verification, sanitizer=report)
            return
        report = self.evaluator.sanitizing.examine(self.target, self._products, kitchen.compiled_with_lines)
        if self._backwards and report.refusal is None:
            other = self.evaluator.sanitizing.examine(self.target, self._backwards, kitchen.compiled_with_lines)
            report = joined(report, other)
        self.verification = replace(self.verification, sanitizer=report)
        found = report.refusal
        if found is not None:
            times = f", {found.count} times" if found.count > 1 else ""
            reason = f'kernel "{found.kernel}" at {found.place}{times}' + (f": {found.detail}" if found.detail else "")
            raise Refusal(
                Status.REJECTED,
                f"{report.workload}: compute-sanitizer's {found.tool}: {found.kind}, {reason}",
                verification=self.verification,
            )

    def build_for_timing(self) -> Kitchen | Workshop:
        """Build what passed before. Raises Refusal."""
        kitchen = self._module() if self.candidate.language in HOSTED else self._kitchen()
        self._products = tuple(kitchen.produce(workload) for workload in self.facts.workloads)
        if isinstance(kitchen, Workshop):
            self._workbench(kitchen, self._products[0]).open()
        return kitchen

    def profile(self, kitchen: Kitchen | Workshop, depth: Depth) -> Profile:
        """Look at a call of the longest workload, alone on the device. Raises Refusal."""
        host = self.evaluator
        product = profiling.longest(self._products, self.facts, host.device)
        lined = kitchen.compiled_with_lines if isinstance(kitchen, Kitchen) else lambda _: None
        frames = frame_count(product.workload, host.kind, host.cache_bytes, self.clock)
        call = ProfiledCall(
            self.candidate,
            self.target,
            self.facts,
            product,
            host.device,
            lined,
            host.working_set(product.workload, frames),
        )
        asked = time.perf_counter()
        with host.lease.timing():
            self.waited_s = time.perf_counter() - asked
            if isinstance(kitchen, Workshop):
                try:
                    seen = self._workbench(kitchen, product).seen()
                except Refusal as refusal:
                    note = f"the candidate failed under the profile: {refusal.reason}"
                    return replace(profiling.static_profile(call, depth), notes=(note,))
                return profiling.module_profile(call, depth, seen, PROFILED_CALLS)
            if host.kind == "cuda":
                return host.profiler.profile(call, depth)
            return host_profiling.profile(call, depth, self._seat(frames))

    def _seat(self, frames: int) -> HostSeat:
        host = self.evaluator
        return HostSeat(
            oracle=host.oracle,
            worker_of=self._worker_of,
            places=host.servers.builder().places,
            frames=frames,
            threads=openmp_threads(),
            hang_limit_s=host.hang_limit_s(self._slowest()),
        )

    def beside(self, workload: str) -> Incumbent | None:
        """This attempt's product for ``workload``, as another's incumbent; None for calls that move gigabytes, of
        which a device may not hold two."""
        product = next((p for p in self._products if p.workload.name == workload), None)
        if product is None or product.workload.input_bytes + product.workload.output_bytes > BIG_CALL_BYTES:
            return None
        return Incumbent(product, self._worker_of, self._kept)

    def _kitchen(self, builder: Builder | None = None) -> Kitchen:
        host = self.evaluator
        return Kitchen(
            self.candidate,
            self.facts,
            host.device,
            arch=host.settings.arch or host.device.arch,
            builder=builder or host.servers.builder(),
            cache=host.cache,
            fresh=self.fresh,
        )

    def _module(self) -> Workshop:
        self._workshop = self.evaluator.workshop(self.candidate, self.target, self.facts, self.fresh)
        return self._workshop

    def _workbench(self, workshop: Workshop, product: Product) -> Workbench:
        host = self.evaluator
        return Workbench(workshop, host.oracle, self.target, product, self._limit_s(self._slowest()))

    def _limit_s(self, alone: Sample | None) -> float:
        """How long a call of this candidate's may take; one that is the first of its kind may compile."""
        settings, compiling_s = self.evaluator.settings, 0.0
        if self.candidate.language == LANGUAGE:
            compiling_s = _COMPILE_S
        elif self.candidate.language in HOSTED and settings.hang_limit_s is None:
            compiling_s = _TUNING_S if compiles_itself(self.candidate, settings.device) else 0.0
        return self.evaluator.hang_limit_s(alone) + compiling_s

    def _label_module(self, workshop: Workshop) -> None:
        """See what runs in a call of each workload, name the work and refuse what is not allowed."""
        if self.candidate.language == LANGUAGE:
            # By definition; whoever asked for configurations allowed them.
            self.work = LANGUAGE
            return
        found = least_own([self._workbench(workshop, product).work() for product in self._products])
        self._own_share = found.share
        self._require_allowed(found.work, found.detail)

    def require_language(self) -> None:
        language = self.candidate.language
        fitting = DEVICE_LANGUAGES if self.evaluator.kind == "cuda" else ("cpp",)
        if language in LANGUAGES and language not in fitting:
            raise ConfigError(
                f"a {language} candidate cannot run on {self.evaluator.settings.device}",
                expected=f"a {' or '.join(fitting)} candidate",
                remedy=f"pass --device {'cpu' if language == 'cpp' else 'cuda'}",
            )

    def _verifier(self, kitchen: Kitchen | Workshop, kind: type[Verifier] = Verifier) -> Verifier:
        host = self.evaluator
        return kind(
            self.target,
            self.facts,
            kitchen,
            host.oracle,
            self._worker_of,
            trials=host.settings.trials,
            hang_limit_s=self._limit_s(self._slowest()),
            kept=self._kept,
            timed_frames=lambda workload: frame_count(workload, host.kind, host.cache_bytes, self.clock),
            # Other shapes would be compiled one by one, and say nothing of a configuration.
            probed=self.candidate.language != LANGUAGE,
            guard=self.guard,
        )

    def _slowest(self) -> Sample | None:
        alone = self.evaluator.about(self.target, self.clock).alone.values()
        return max((samples["eager"] for samples in alone), key=lambda sample: sample.median_ns, default=None)

    @property
    def _kept(self) -> tuple[str, ...]:
        """State that the candidate does not take over."""
        return self._workshop.kept if self._workshop is not None else ()

    def _worker_of(self, product: Product) -> Worker:
        if self._workshop is not None:
            return self._workshop.start(product)
        return self.evaluator.worker_of(self.candidate, product, self._spares)

    def _label(self, own_share: float | None) -> None:
        """Name the work done, over all workloads the least own; refuse what is not allowed."""
        order: tuple[Work, ...] = ("kernel", "mixed", "library", "rewrite")
        labels = [label_of(product.traced.main, own_share) for product in self._products]
        # The share of the time is the forward's alone.
        labels += [label_of(product.traced.main, None) for product in self._backwards]
        label, answered = max(labels, key=order.index), self._answered
        if answered is None or order.index(answered.work) < order.index(label):
            self._require_allowed(label)
        else:
            detail = f"{answered.op} gives the answer by itself: its own launches add nothing to it"
            self._require_allowed(answered.work, detail)

    def _see_who_answers(self) -> None:
        """Raises Refusal where a library does, and the target does not allow that."""
        host = self.evaluator
        work = PlanWork(host.oracle, self.target, self._worker_of, self._limit_s(self._slowest()))
        self._answered = next(filter(None, map(work.answered_by, self._products)), None)
        if self._answered is not None:
            self._label(None)

    def _require_allowed(self, work: Work, detail: str = "") -> None:
        self.work = work
        allowed = {"kernel", *(self.evaluator.settings.allow or self.facts.allow)}
        if work not in allowed:
            raise Refusal(
                Status.REJECTED,
                f"the work is labelled {work!r}: {detail or _WHY[work]}; allowed here: {', '.join(sorted(allowed))}",
            )

    # -- timing

    def time(self) -> None:
        """Time every workload against its baselines. Raises Refusal where the candidate fails under the clock."""
        host, known = self.evaluator, self.evaluator.about(self.target, self.clock)
        host.baselines(self.target, self._timed_as)
        timed, notes, disturbed = [], [], False
        if self.incumbent is not None:
            try:
                with host.lease.work():
                    self.incumbent.build_for_timing()
            except Refusal as refusal:
                notes.append(f"the incumbent could not be built again: {refusal.reason}")
        for product in self._products:
            with known.lock:
                rotation = host.rotation(self.target, known, product.workload, self.clock)
            try:
                result, note = self._timed(product, rotation, known)
            finally:
                host.release(known, product.workload)
            disturbed |= note in (_DISTURBED, _CROWDED, _SLOWED)
            timed.append(result)
            notes += [f"{product.workload.name}: {note}"] if note else []
        self.timing = self._verdict(timed, notes, disturbed)
        if self._own_share is not None and self._workshop is None:
            self._label(self._own_share)

    def _timed(self, product: Product, rotation: Rotation, known: Known) -> tuple[WorkloadTiming, str]:
        host, name = self.evaluator, product.workload.name
        for attempt in range(2):
            with host.lease.timing():
                result, crowded = self._sit(product, rotation)
                self._check_physics(product, result)
                disturbed = was_disturbed(known.alone[name], result)
                busy = _CROWDED if host.kind == "cpu" else _SLOWED
                note = _DISTURBED if disturbed else busy if crowded else ""
                if not note:
                    break
                if disturbed:
                    # With the candidate gone: was it the candidate, or is the machine slower now?
                    known.alone[name] = time_alone(host.oracle, rotation, self.clock, host.pace(1), host.flush_bytes)
            if crowded and not attempt:
                wait_for_quiet(_QUIET_WAIT_S, statistics.FOREIGN, host.load)
        if result.vs_compile is not None and result.vs_compile.speedup > _QUARANTINE and not note:
            with host.lease.timing():
                second, _ = self._sit(product, rotation)
            note = f"more than {_QUARANTINE:g}x torch.compile: measured twice"
            result = min(result, second, key=lambda timing: timing.vs_eager.speedup)
        return result, note

    def _sit(self, product: Product, rotation: Rotation) -> tuple[WorkloadTiming, bool]:
        """One sitting, and whether others kept the cores busy all through it."""
        host = self.evaluator
        alone = host.about(self.target, self.clock).alone[product.workload.name]["eager"]
        sitting = Sitting(
            self.target,
            product,
            rotation,
            host.oracle,
            self._worker_of,
            device=host.kind,
            clock=self.clock,
            pace=host.pace(len(self._products)),
            flush_bytes=host.flush_bytes,
            hang_limit_s=max(self._limit_s(alone), self.incumbent._limit_s(alone) if self.incumbent else 0.0),
            memory_bytes=host.device.memory_bytes,
            alone_ns=alone.median_ns,
            incumbent=self.incumbent.beside(product.workload.name) if self.incumbent is not None else None,
            monitor=host.monitor,
            kept=self._kept,
        )
        blocks = sitting.measure()
        self._lag = max(self._lag, sitting.lag)
        self._device_notes |= dict.fromkeys(sitting.watch.notes if sitting.watch is not None else ())
        if sitting.own_share is not None:
            self._own_share = min(sitting.own_share, self._own_share or 1.0)
        if not blocks:
            raise Refusal(Status.REJECTED, f"{product.workload.name}: the clock gave no usable block")
        self._foreign = max(self._foreign, max(block.foreign for block in blocks))
        bound_ns = host.roofline_ns(product.workload, self.facts.precision, rotation.frames)
        placement_ns = 0.0
        if host.kind == "cuda":
            capped = sitting.watch is not None and sitting.watch.capped
            placement_ns = statistics.gpu_placement_ns(blocks[0].of("candidate"), self.clock, capped)
        summary = summarise(rotation, blocks, len(product.traced.main.launches), bound_ns, placement_ns)
        summary = replace(summary, host=sitting.host)
        summary = replace(summary, blocks=kept_blocks(blocks)) if host.settings.keep_blocks else summary
        return summary, sitting.crowded

    # -- racing

    def race(self, workload: WorkloadFacts, pace: RacePace, references: Sequence[Reference]) -> Race:
        """One workload's race against the incumbent, which is the version at the merge base. Raises Refusal where this
        candidate fails."""
        host, known = self.evaluator, self.evaluator.about(self.target, self.clock)
        diary = Diary()
        with diary.phase("building"), host.lease.work():
            entrant = self.entrant(workload)
            base = self._base_entrant(workload, diary)
        compiled = "compile" in references
        with diary.phase("references"), known.lock:
            rotation = host.rotation(self.target, known, workload, self.clock, compiled=compiled)
        if compiled and rotation.compile_note:
            diary.notes.append(f"no compiled reference: {rotation.compile_note}")
        rotation = replace(rotation, parties=tuple(p for p in rotation.parties if p in references))
        try:
            blocks, contest = self._raced(entrant, base, rotation, pace, diary)
        finally:
            host.release(known, workload)
        return Race(
            workload=workload.name,
            clock=self.clock,
            blocks=kept_blocks(blocks),
            disturbed=contest.disturbance if blocks else "the clock gave no usable block",
            capped=contest.capped,
            notes=tuple(dict.fromkeys(diary.notes)),
            seconds=round(diary.seconds, 3),
            spent=diary.told,
        )

    def entrant(self, workload: WorkloadFacts) -> Incumbent:
        """This candidate built for ``workload``. Raises Refusal."""
        if self._raced_in is None:
            self._raced_in = self._module() if self.candidate.language in HOSTED else self._kitchen()
        product = self._raced_in.produce(workload)
        if isinstance(self._raced_in, Workshop):
            self._workbench(self._raced_in, product).open()
        return Incumbent(product, self._worker_of, self._kept)

    def _base_entrant(self, workload: WorkloadFacts, diary: Diary) -> Incumbent | None:
        if self.incumbent is None:
            return None
        try:
            self.incumbent.require_language()
            return self.incumbent.entrant(workload)
        except (Refusal, ConfigError) as error:
            reason = error.reason if isinstance(error, Refusal) else str(error)
            diary.notes.append(_NO_BASE.format("cannot be built", reason))
            return None

    def _raced(
        self, entrant: Incumbent, base: Incumbent | None, rotation: Rotation, pace: RacePace, diary: Diary
    ) -> tuple[tuple[statistics.Block, ...], Contest]:
        """Blocks of the sitting, and the sitting. One that was disturbed is held again at a quieter moment."""
        host = self.evaluator
        for attempt in range(2):
            contest = self._contest(entrant, base, rotation, pace, diary)
            with host.lease.timing():
                try:
                    blocks = contest.measure()
                except BaseFailed as error:
                    diary.notes.append(_NO_BASE.format("does not run", error))
                    base, contest = None, self._contest(entrant, None, rotation, pace, diary)
                    blocks = contest.measure()
            # On a CPU a contest waits for quiet moments by itself.
            if not contest.disturbance or attempt or host.kind == "cpu":
                break
            with diary.phase("waiting for quiet"):
                wait_for_quiet(_QUIET_WAIT_S, statistics.FOREIGN, host.load)
        diary.notes += contest.watch.notes if contest.watch is not None else ()
        return blocks, contest

    def _contest(
        self, entrant: Incumbent, base: Incumbent | None, rotation: Rotation, pace: RacePace, diary: Diary
    ) -> Contest:
        host = self.evaluator
        return Contest(
            self.target,
            entrant.product,
            rotation,
            host.oracle,
            entrant.worker_of,
            device=host.kind,
            clock=self.clock,
            pace=pace,
            flush_bytes=host.flush_bytes,
            hang_limit_s=max(self._limit_s(None), 0.0 if host.settings.hang_limit_s else HANG_LIMIT_S),
            incumbent=base,
            monitor=host.monitor,
            diary=diary,
            memory_bytes=host.device.memory_bytes,
            kept=entrant.kept,
        )

    def _check_physics(self, product: Product, result: WorkloadTiming) -> None:
        """On a GPU nothing writes its outputs faster than the memory takes them."""
        device = self.evaluator.device
        if self.evaluator.kind != "cuda" or not device.bandwidth_bytes_per_s:
            return
        # The ceiling is measured as read plus write; a pure write may reach a little more. Small outputs stay in L2.
        floor_ns = 0.8 * product.workload.output_bytes / device.bandwidth_bytes_per_s * 1e9
        if product.workload.output_bytes > 2 * device.l2_bytes and result.candidate.median_ns < floor_ns:
            reason = f"{result.candidate.median_ns:.0f} ns is less than its outputs' bytes take ({floor_ns:.0f} ns)"
            raise Refusal(Status.REJECTED, f"{product.workload.name}: faster than physics allows: {reason}")

    def _verdict(self, timed: Sequence[WorkloadTiming], notes: list[str], disturbed: bool) -> Timing:
        deciding = []
        for result in timed:
            faster = result.compile is not None and result.compile.median_ns < result.eager.median_ns
            deciding.append(result.vs_compile if faster and result.vs_compile is not None else result.vs_eager)
            if result.roofline_ns is not None and result.candidate.median_ns < result.roofline_ns:
                notes.append(f"{result.workload}: faster than the roofline's estimate of all its bytes and operations")
            notes += _clocks_apart(result)
        compiled = [r.vs_compile for r in timed if r.vs_compile is not None]
        raced = [r.vs_incumbent for r in timed if r.vs_incumbent is not None]
        if self._lag > 1.0:
            notes.append(f"new values took {self._lag:.2f}x as long as values seen before: timed as on new values")
        notes += list(self._device_notes)
        if self._foreign > statistics.FOREIGN and self.evaluator.kind == "cpu":
            notes.append(f"other processes kept the cores busy: somebody waited {self._foreign:.0%} of the time")
        return Timing(
            decision="disturbed" if disturbed else statistics.decide(statistics.combine(deciding)),
            clock=self.clock,
            speedup_eager=statistics.combine([r.vs_eager for r in timed]).speedup,
            speedup_compile=statistics.combine(compiled).speedup if len(compiled) == len(timed) else None,
            workloads=tuple(timed),
            note="; ".join(notes),
            own_share=self._own_share,
            vs_incumbent=statistics.combine(raced) if len(raced) == len(timed) else None,
        )


def _clocks_apart(result: WorkloadTiming) -> list[str]:
    """A note where device events and the supervisor's clock tell different times of the same calls."""
    host = result.host
    if host is None or min(host.candidate_ns, host.device_ns) < _COMPARED_NS:
        return []
    apart = host.candidate_ns / host.device_ns - 1.0
    if abs(apart) <= _CLOCKS_AGREE:
        return []
    return [f"{result.workload}: the supervisor's clock tells {apart:+.1%} of what device events do for the same calls"]
