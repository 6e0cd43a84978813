"""The only door to a verdict: ``Evaluator.evaluate(candidate, target) -> Evaluation``.

The process that calls it imports no torch, no target and no candidate and makes no CUDA context. It owns the lease,
the secrets, the deciding clock and the build cache; everything else happens in children.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import os
import platform
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Literal

from pytest_cudaforge import hardware
from pytest_cudaforge.errors import BuildFailure, ConfigError, DeviceError, ForgeError, OracleError, TargetError
from pytest_cudaforge.evaluation import backward, host_profiling, profiling
from pytest_cudaforge.evaluation import timing as statistics
from pytest_cudaforge.evaluation.builder import Builder
from pytest_cudaforge.evaluation.building import Kitchen, Product
from pytest_cudaforge.evaluation.cases import BIG_CALL_BYTES
from pytest_cudaforge.evaluation.compiled_module import OWN_INIT, UNCONFINED, module_of
from pytest_cudaforge.evaluation.contract import label_of
from pytest_cudaforge.evaluation.host_profiling import HostSeat
from pytest_cudaforge.evaluation.module_building import Workshop
from pytest_cudaforge.evaluation.module_work import PROFILED_CALLS, Workbench, least_own
from pytest_cudaforge.evaluation.nursery import Nursery
from pytest_cudaforge.evaluation.oracle import OracleClient, compiler_caches, oracle_environment
from pytest_cudaforge.evaluation.parties import Clock
from pytest_cudaforge.evaluation.plain_race import PlainRace, plain_pace
from pytest_cudaforge.evaluation.pressure import DeviceWatch, ForeignLoad, Load, stalled_share, wait_for_quiet
from pytest_cudaforge.evaluation.profiling import ProfiledCall
from pytest_cudaforge.evaluation.race import HANG_LIMIT_S, BaseFailed, Contest, Diary, RacePace, Reference
from pytest_cudaforge.evaluation.refusal import Refusal
from pytest_cudaforge.evaluation.sandbox import SandboxSettings
from pytest_cudaforge.evaluation.sanitizing import Sanitizing, joined
from pytest_cudaforge.evaluation.sitting import (
    Incumbent,
    Pace,
    Rotation,
    Sitting,
    frame_count,
    kept_blocks,
    open_rotation,
    summarise,
    time_alone,
    was_disturbed,
)
from pytest_cudaforge.evaluation.verification import Verifier
from pytest_cudaforge.evaluation.worker import Worker
from pytest_cudaforge.evaluation.zygote import ForkServers
from pytest_cudaforge.hardware import nvml, roofline
from pytest_cudaforge.languages import DEVICE_LANGUAGES, LANGUAGES, Binary, Unit, extension
from pytest_cudaforge.languages.cache import BuildCache, build_key
from pytest_cudaforge.languages.extension import ExtensionRequest
from pytest_cudaforge.lease import DeviceLease
from pytest_cudaforge.records import (
    Baseline,
    Build,
    Candidate,
    Depth,
    DeviceFacts,
    Evaluation,
    Guard,
    Isolation,
    LintFinding,
    Profile,
    Race,
    RaceFailure,
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
    from_json,
)
from pytest_cudaforge.runtime.configuration import LANGUAGE

__all__ = ["Evaluator", "EvaluatorSettings"]

#: Languages whose workers run host code of more than the replay's.
_HOSTED = frozenset({"module", LANGUAGE})
#: What torch.compile may take in the first call of a worker.
_COMPILE_S = 300.0
_TIMING_BUDGET_S = {"cpu": 0.9, "cuda": 1.5}
_HANG_LIMIT_S = 10.0
#: A speedup over torch.compile that asks for a second look.
_QUARANTINE = 10.0
#: From this time on two clocks on the same calls are held against each other, and within what share they agree.
_COMPARED_NS, _CLOCKS_AGREE = 50_000.0, 0.05
#: How long to wait for a quieter moment before a crowded sitting is repeated.
_QUIET_WAIT_S = 3.0
#: Rotations that hold more than this are closed after use.
_KEEP_ROTATION_BYTES = 1 << 30


@dataclass(frozen=True)
class EvaluatorSettings:
    """``device``: "cpu" or "cuda:N". ``arch`` None: the device's own. ``hang_limit_s`` None: from the reference's time,
    at least 10 s. ``timing_budget_s`` is per candidate, over all its workloads. ``allow`` None: the target's own.
    ``keep_blocks``: timings hold every block they were reckoned from. ``workloads``: names or patterns of those that
    count, None: all."""

    device: str = "cpu"
    arch: str | None = None
    isolation: Literal["auto", "none"] = "auto"
    cache_dir: Path = field(default_factory=lambda: Path.home() / ".cache" / "cudaforge")
    trials: int = 5
    hang_limit_s: float | None = None
    timing_budget_s: float | None = None
    allow: tuple[str, ...] | None = None
    python_paths: tuple[str, ...] = ()
    lock_dir: Path | None = None
    keep_blocks: bool = False
    #: False: nothing will be timed, so that no ceilings need to be measured, and waiting threads may sleep.
    times: bool = True
    workloads: tuple[str, ...] | None = None


@dataclass
class _Known:
    """What has been learnt about one target: facts, baselines and open rotations by workload."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    facts: TargetFacts | None = None
    rotations: dict[str, Rotation] = field(default_factory=dict)
    alone: dict[str, dict[str, Sample]] = field(default_factory=dict)
    baselines: tuple[Baseline, ...] | None = None


class Evaluator:
    """A context manager; thread-safe. Children start on first use and are kept warm until :meth:`close`."""

    def __init__(self, settings: EvaluatorSettings) -> None:
        if settings.trials < 1:
            raise ConfigError(f"trials = {settings.trials}", expected="at least 1")
        self.kind, index = hardware.parse_device(settings.device)
        # torch wants the index said.
        settings = replace(settings, device="cpu" if self.kind == "cpu" else f"cuda:{index}")
        self.settings = settings
        self._threads = _thread_policy(settings.times) if self.kind == "cpu" else ()
        self.oracle = OracleClient(
            settings.device,
            cache_dir=settings.cache_dir,
            python_paths=settings.python_paths,
            environment=self._threads,
        )
        self._nursery = Nursery(oracle_environment(settings.device, settings.cache_dir, dict(self._threads)))
        self._servers = ForkServers(
            SandboxSettings(isolation=settings.isolation, environment=self._threads),
            compiler_environment=compiler_caches(settings.cache_dir),
        )
        self._cache = BuildCache(settings.cache_dir / "builds")
        self.sanitizing = Sanitizing(settings.device, self.oracle)
        self.profiler = profiling.Profiler(settings.device, self.oracle, settings.cache_dir)
        self._known: dict[str, _Known] = {}
        self._lock = threading.Lock()

    def close(self) -> None:
        """End every child; a second call does nothing."""
        self.oracle.close()
        self._nursery.close()
        self._servers.close()

    def __enter__(self) -> Evaluator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- facts

    @functools.cached_property
    def device(self) -> DeviceFacts:
        """The device at hand with measured ceilings (measured once per machine, about 2 s)."""
        facts = hardware.detect_in_child(self.settings.device)
        measure = self._measure_ceilings if self.settings.times else None
        return roofline.with_ceilings(facts, self.settings.cache_dir, measure)

    def _measure_ceilings(self) -> roofline.Ceilings:
        load = ForeignLoad()
        found: roofline.Ceilings = from_json(roofline.Ceilings, self.oracle.request("ceilings"))
        return replace(found, disturbed=self.kind == "cpu" and load.share() > statistics.FOREIGN)

    @functools.cached_property
    def lease(self) -> DeviceLease:
        """Who may use the device now."""
        identity = self.device.uuid if self.kind == "cuda" else f"cpu-{platform.node()}"
        return DeviceLease(
            self.kind if self.kind == "cpu" else self.settings.device,
            identity=identity,
            lock_dir=self.settings.lock_dir,
        )

    @functools.cached_property
    def monitor(self) -> nvml.DeviceMonitor | None:
        """What tells of throttling and foreign load on the GPU; None where nothing does (doctor says why)."""
        found = nvml.open_monitor(self.device.uuid) if self.kind == "cuda" else ""
        return None if isinstance(found, str) else found

    def _users(self) -> tuple[int, ...]:
        """The oracle, where it runs: it has a context on the device."""
        return (self.oracle.pid,) if self.oracle.pid is not None else ()

    def load(self) -> Load:
        """What others do with the device from now on."""
        return ForeignLoad() if self.monitor is None else DeviceWatch(self.monitor, self._users).load()

    @property
    def isolation(self) -> Isolation:
        """Grade of this machine for the device's own language (cuda or cpp)."""
        return self._servers.isolation("cuda" if self.kind == "cuda" else "cpp")

    def facts(self, target: Target) -> TargetFacts:
        """What importing and running the target tells; kept. Raises TargetError."""
        known = self._about(target)
        with known.lock:
            if known.facts is None:
                with self.lease.work():
                    known.facts = _matching(self.oracle.facts(target), self.settings.workloads)
            return known.facts

    def lint(self, target: Target) -> tuple[str, ...]:
        """Reasons to refuse the target: a trivial kernel could pass, or none can. Empty where none was found.

        Raises TargetError.
        """
        return tuple(f"{name}: {finding.text}" for name, finding in self.findings(target) if finding.refuses)

    def findings(self, target: Target) -> tuple[tuple[str, LintFinding], ...]:
        """All that the linter says, notes included, by workload. Raises TargetError."""
        facts = self.facts(target)
        with self.lease.work():
            return tuple(
                (workload.name, finding)
                for workload in facts.workloads
                for finding in self.oracle.lint(target, workload.name)
            )

    def _about(self, target: Target, clock: Clock | None = None) -> _Known:
        """By clock, too: what is timed by one says nothing of what is timed by the other."""
        key = f"{target.key}\0{clock or self.clock_of('')}"
        with self._lock:
            return self._known.setdefault(key, _Known())

    @property
    def builds(self) -> BuildCache:
        """Where the binaries of its verdicts are kept."""
        return self._cache

    # -- baselines

    def clock_of(self, language: str) -> Clock:
        """Device events where the host code is ours, the supervisor's clock for a module and on the CPU."""
        return "events" if self.kind == "cuda" and language not in _HOSTED else "supervisor"

    def baselines(self, target: Target, language: str = "") -> tuple[Baseline, ...]:
        """Eager and torch.compile, each timed alone by the clock that times ``language``; once per target, then kept.

        Raises TargetError.
        """
        facts, clock = self.facts(target), self.clock_of(language)
        known = self._about(target, clock)
        with known.lock:
            if known.baselines is None:
                known.baselines = tuple(
                    self._baseline(target, known, workload, facts.precision, clock) for workload in facts.workloads
                )
            return known.baselines

    def _baseline(
        self, target: Target, known: _Known, workload: WorkloadFacts, precision: str, clock: Clock
    ) -> Baseline:
        rotation = self._rotation(target, known, workload, clock)
        with self.lease.timing():
            alone = time_alone(self.oracle, rotation, clock, self._pace(1), self._flush_bytes)
        known.alone[workload.name] = alone
        self._release(known, workload)
        min_bytes = workload.input_bytes + workload.state_bytes + workload.output_bytes
        return Baseline(
            workload=workload.name,
            eager=alone["eager"],
            compile=alone.get("compile"),
            compile_note=rotation.compile_note,
            roofline_ns=self._roofline_ns(workload, precision, rotation.frames),
            min_bytes=min_bytes,
            flops=workload.flops,
            generated=rotation.generated,
        )

    def _rotation(
        self, target: Target, known: _Known, workload: WorkloadFacts, clock: Clock, *, compiled: bool = True
    ) -> Rotation:
        """``compiled``: with torch.compile's version, or why there is none."""
        rotation = known.rotations.get(workload.name)
        if rotation is None or rotation.generation != self.oracle.generation or (compiled and not rotation.compiled):
            if rotation is not None:
                self._end_rotation(rotation)
            frames = frame_count(workload, self.kind, self._cache_bytes, clock)
            with self.lease.work():
                rotation = open_rotation(self.oracle, target, workload, frames, compiled=compiled)
            known.rotations[workload.name] = rotation
        return rotation

    def _end_rotation(self, rotation: Rotation) -> None:
        if rotation.generation == self.oracle.generation:
            self.oracle.request("end_rotation", rotation=rotation.number)

    def _roofline_ns(self, workload: WorkloadFacts, precision: str, frames: int) -> float | None:
        return roofline.reference_ns(workload, precision, self.device, self._working_set(workload, frames))

    def _working_set(self, workload: WorkloadFacts, frames: int) -> int | None:
        """Bytes that calls on a CPU touch in turn, which its caches may hold; a GPU's are overwritten between calls."""
        if self.kind == "cuda":
            return None
        return frames * (workload.input_bytes + workload.output_bytes) + workload.state_bytes

    def _release(self, known: _Known, workload: WorkloadFacts) -> None:
        """Give a rotation of gigabytes back; small ones stay for the next candidate."""
        rotation = known.rotations.get(workload.name)
        if rotation is not None and rotation.frames * workload.input_bytes > _KEEP_ROTATION_BYTES:
            self._end_rotation(known.rotations.pop(workload.name))

    @property
    def _cache_bytes(self) -> int:
        return self.device.l2_bytes * (self.device.sm_count if self.kind == "cpu" else 1)

    @property
    def _flush_bytes(self) -> int:
        return 2 * self.device.l2_bytes if self.kind == "cuda" else 0

    def _pace(self, workloads: int) -> Pace:
        budget_s = self.settings.timing_budget_s or _TIMING_BUDGET_S[self.kind]
        return Pace.of(self.kind, budget_s / max(1, workloads))

    # -- the verdict

    def evaluate(
        self,
        candidate: Candidate,
        target: Target,
        *,
        timing: bool = True,
        fresh: bool = False,
        incumbent: Candidate | None = None,
        sanitize: bool = False,
        workloads: Sequence[str] | None = None,
        guard: Guard | None = None,
    ) -> Evaluation:
        """Build, verify and time one candidate. A failed candidate is an Evaluation; a bad situation raises.

        ``fresh``: build from source in a fresh sandbox, past the build cache (the winner's final verdict); CUDA plans
        then pass compute-sanitizer, too. ``sanitize``: let them pass it in any case.
        ``incumbent``: a candidate that passed before, timed in the same sitting (``Timing.vs_incumbent``): two ratios
        to baselines from two sittings compare worse than one ratio from one.
        ``workloads``: names, None: all; ConfigError for one that the target does not have. ``guard``: where the
        candidate is used already: nothing outside is probed, and the verdict's guard is this one, or narrower.
        """
        began = time.perf_counter()
        facts = self.facts(target)
        attempt = _Attempt(self, candidate, target, facts, fresh)
        attempt.workloads, attempt.guard = tuple(_chosen(facts, workloads)), guard
        attempt.sanitize, attempt.sanitize_asked = fresh or sanitize, sanitize
        if timing and incumbent is not None:
            attempt.incumbent = _Attempt(self, incumbent, target, facts, fresh=False)
        try:
            attempt.build_and_verify()
            if timing:
                attempt.time()
            status, reason = Status.PASSED, attempt.summary
        except Refusal as refusal:
            attempt.note(refusal)
            status, reason = refusal.status, refusal.reason
            self._after_failure(refusal)
        return Evaluation(
            status=status,
            reason=reason,
            candidate=candidate.digest,
            target=target.id,
            isolation=UNCONFINED if candidate.language == LANGUAGE else self._servers.isolation(candidate.language),
            language=candidate.language,
            device=self.device.name if self.kind == "cuda" else "cpu",
            work=attempt.work,
            build=attempt.build,
            verification=attempt.verification,
            timing=attempt.timing,
            seconds=round(time.perf_counter() - began, 4),
            environment=self._environment(facts),
        )

    def race(
        self,
        candidate: Candidate,
        target: Target,
        *,
        base: Candidate | None = None,
        processes: int | None = None,
        budget_s: float | None = None,
        references: Sequence[Reference] = ("eager", "compile"),
        workloads: Sequence[str] | None = None,
    ) -> tuple[Race, ...] | RaceFailure:
        """Measure for the guard: a candidate that was verified before against ``base``, another version of it, and its
        ``references``, in one sitting per workload. A candidate that fails is a RaceFailure; a base that cannot be
        built or run any more is left out, and the race's notes say why.

        ``processes``: fresh ones of candidate and base each, None: until the answer is clear; ``budget_s``: of the
        blocks of one workload, None: what suffices on this kind of device. ``workloads``: names, None: all. Raises what
        :meth:`evaluate` raises, and ConfigError for a workload that the target does not have.
        """
        facts = self.facts(target)
        entrant = _Attempt(self, candidate, target, facts, fresh=False)
        entrant._require_language()
        if base is not None:
            entrant.incumbent = _Attempt(self, base, target, facts, fresh=False)
        hosted = bool({candidate.language, base.language if base is not None else ""} & _HOSTED)
        pace = RacePace.racing(self.kind, processes, budget_s, hosted)
        races = []
        for workload in _chosen(facts, workloads):
            try:
                races.append(entrant.race(workload, pace, references))
            except Refusal as refusal:
                self._after_failure(refusal)
                return RaceFailure(workload.name, refusal.status, refusal.reason)
        return tuple(races)

    def race_modules(
        self,
        target: Target,
        base_target: Target,
        *,
        processes: int | None = None,
        budget_s: float | None = None,
        workloads: Sequence[str] | None = None,
    ) -> tuple[Race, ...]:
        """Measure for the guard: a plain module as it is checked in now against ``base_target``, its version in another
        checkout; a race for each workload, and one more with gradients where either asks for them (``grad=True``).

        Parties are "candidate" and "base". A race without blocks says in ``disturbed`` why there is nothing to compare:
        the base cannot be imported or run, or the workload is another one (its ``workload`` is "" where not even the
        names are known). ``notes`` say what else differs, results included. Arguments as of :meth:`race`. Raises
        TargetError where what is checked in now fails, ConfigError for a workload that it does not have.
        """
        race = PlainRace(
            target,
            base_target,
            self._fresh_oracle,
            device=self.kind,
            clock=self.clock_of(""),
            pace=plain_pace(self.kind, processes, budget_s),
            lease=self.lease,
            python_paths=self.settings.python_paths,
            cache_bytes=self._cache_bytes,
            flush_bytes=self._flush_bytes,
            monitor=self.monitor,
            users=self._users,
        )
        return race.run(workloads)

    def guarded(self, target: Target) -> bool:
        """Does the target ask for a guard? For those of which only importing tells (``Target.guard`` is None).

        Raises TargetError.
        """
        with self._fresh_oracle(self.settings.python_paths) as oracle:
            return oracle.guarded(target)

    def _fresh_oracle(self, python_paths: Sequence[str]) -> OracleClient:
        """One that is forked in milliseconds; the caller ends it."""
        return OracleClient(
            self.settings.device,
            cache_dir=self.settings.cache_dir,
            python_paths=python_paths,
            nursery=self._nursery,
        )

    def profile(self, candidate: Candidate, target: Target, *, depth: Depth = "quick") -> Profile:
        """What a candidate that passed before does on the device, on the workload that takes longest.

        It never raises for a profiler that is missing, refused or stuck: a lower rung of the ladder answers, and the
        profile's notes say why. Raises what :meth:`evaluate` raises.
        """
        began = time.perf_counter()
        attempt = _Attempt(self, candidate, target, self.facts(target), fresh=False)
        attempt._require_language()
        waited_s = 0.0
        try:
            asked = time.perf_counter()
            with self.lease.work():
                waited_s = time.perf_counter() - asked
                kitchen = attempt.build_for_timing()
            profile = attempt.profile(kitchen, depth)
        except Refusal as refusal:
            profile = profiling.unbuilt(candidate, depth, refusal.reason)
        waited_s += attempt.waited_s
        return replace(profile, seconds=round(time.perf_counter() - began - waited_s, 3))

    def _after_failure(self, refusal: Refusal) -> None:
        """A candidate that crashed or hung may have hurt the device: ask it for a known answer."""
        if self.kind != "cuda" or refusal.status not in (Status.RUNTIME_ERROR, Status.TIMEOUT):
            return
        try:
            self.oracle.request("canary", timeout_s=60.0)
        except (DeviceError, OracleError) as error:
            raise DeviceError(
                f"{self.settings.device} is unhealthy after a candidate failed: {error.what}",
                expected="a known answer from a simple kernel",
                remedy="look at nvidia-smi and the kernel log before the next run",
            ) from error

    def _environment(self, facts: TargetFacts) -> tuple[tuple[str, str], ...]:
        hello = self.oracle.hello()
        return (
            ("python", hello["python"]),
            ("torch", hello["torch"]),
            ("cuda", hello["cuda"]),
            ("threads", str(hello["threads"])),
            ("device", self.device.name),
            ("arch", self.device.arch),
            ("precision", facts.precision),
            ("mode", facts.mode),
            ("omp_wait_policy", dict(self._threads).get("OMP_WAIT_POLICY", "default")),
            ("host", f"{platform.system()} {platform.release()}"),
        )

    def workshop(self, candidate: Candidate, target: Target, facts: TargetFacts, fresh: bool) -> Workshop:
        """What builds and starts a ModelNew. Raises TargetError where its init arguments are no plain data."""
        cuda, configured = self.kind == "cuda", candidate.language == LANGUAGE
        return Workshop(
            module_of(candidate, target, self.settings.python_paths) if configured else candidate,
            target,
            facts,
            self.device,
            initial=OWN_INIT if configured else self.oracle.initial(target),
            torch_device=self.settings.device,
            threads=self.oracle.threads,
            start_limit_s=self.hang_limit_s(None) + 20,
            spawn=lambda compilers: self._servers.module_worker(cuda=cuda, compilers=compilers, trusted=configured),
            compile_=functools.partial(self._extension, fresh),
        )

    def _extension(self, fresh: bool, request: ExtensionRequest) -> tuple[Binary, bool]:
        """Build an extension, or take it from the cache: only this process writes there, and what is stored depends on
        sources, flags and toolchain alone. Raises BuildFailure and the builder's failures."""
        arch = self.settings.arch or self.device.arch
        key = build_key(request.key, Unit((), ()), extension.fingerprint(arch, request.with_cuda), arch)
        known = None if fresh else self._cache.get(key)
        if isinstance(known, BuildFailure):
            raise known
        if known is not None:
            return known, True
        try:
            built: Binary | BuildFailure = self._servers.builder().extension(request, arch)
        except BuildFailure as error:
            built = error
        if not fresh:
            self._cache.put(key, built)
        if isinstance(built, BuildFailure):
            raise built
        return built, False

    def worker_of(self, candidate: Candidate, product: Product) -> Worker:
        """A fresh worker with the product loaded. Raises the worker's failures."""
        library_calls = bool(product.traced.main.library_calls)
        if product.traced.prepare is not None:
            library_calls |= bool(product.traced.prepare.library_calls)
        worker = self._servers.worker(candidate.language, library_calls=library_calls)
        # torch or a CUDA context take their time; a shared object that does is the candidate's own doing.
        limit_s = self.hang_limit_s(None) + (20 if library_calls or self.kind == "cuda" else 0)
        try:
            worker.start(product.traced, product.binaries, self.settings.device, timeout_s=limit_s)
        except ForgeError:
            worker.close()
            raise
        return worker

    def hang_limit_s(self, alone: Sample | None) -> float:
        """Soft limit of one operation of a candidate."""
        if self.settings.hang_limit_s is not None:
            return self.settings.hang_limit_s
        return max(_HANG_LIMIT_S, 200 * alone.median_ns / 1e9 if alone else 0.0)


class _Attempt:
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
        self.incumbent: _Attempt | None = None
        self._own_share: float | None = None
        self._foreign = 0.0
        self._device_notes: dict[str, None] = {}
        self._lag = 1.0

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
        return "module" if {self.candidate.language, other} & _HOSTED else self.candidate.language

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
        self._require_language()
        with host.lease.work(), host._servers.builder().kept() as builder:
            kitchen = self._module() if self.candidate.language in _HOSTED else self._kitchen(builder)
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
        """Where the target asks for gradients: those of ``plan_backward``, if the candidate has one. Raises Refusal."""
        assert self.verification is not None
        if isinstance(kitchen, Workshop):
            self._gradients = "forward only: a ModelNew's gradients are not verified"
            return
        names = [workload.name for workload in self.workloads]
        found = backward.produce(kitchen, self.evaluator.oracle, self.target, names)
        self._gradients = found.note or "gradients verified"
        if not found.products:
            return
        self._backwards = found.products
        self._label(None)
        try:
            gradients = self._verifier(kitchen, backward.BackwardVerifier).verify(found.products)
        except Refusal as refusal:
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
        kitchen = self._module() if self.candidate.language in _HOSTED else self._kitchen()
        self._products = tuple(kitchen.produce(workload) for workload in self.facts.workloads)
        if isinstance(kitchen, Workshop):
            self._workbench(kitchen, self._products[0]).open()
        return kitchen

    def profile(self, kitchen: Kitchen | Workshop, depth: Depth) -> Profile:
        """Look at a call of the longest workload, alone on the device. Raises Refusal."""
        host = self.evaluator
        product = profiling.longest(self._products, self.facts, host.device)
        lined = kitchen.compiled_with_lines if isinstance(kitchen, Kitchen) else lambda _: None
        frames = frame_count(product.workload, host.kind, host._cache_bytes, self.clock)
        call = ProfiledCall(
            self.candidate,
            self.target,
            self.facts,
            product,
            host.device,
            lined,
            host._working_set(product.workload, frames),
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
            places=host._servers.builder().places,
            frames=frames,
            threads=_openmp_threads(),
            hang_limit_s=host.hang_limit_s(self._slowest()),
        )

    def beside(self, workload: str) -> Incumbent | None:
        """This attempt's product for ``workload``, as another's incumbent; None for calls that move gigabytes, of
        which a device may not hold two."""
        product = next((p for p in self._products if p.workload.name == workload), None)
        if product is None or product.workload.input_bytes + product.workload.output_bytes > BIG_CALL_BYTES:
            return None
        return Incumbent(product, self._worker_of)

    def _kitchen(self, builder: Builder | None = None) -> Kitchen:
        host = self.evaluator
        return Kitchen(
            self.candidate,
            self.facts,
            host.device,
            arch=host.settings.arch or host.device.arch,
            builder=builder or host._servers.builder(),
            cache=host._cache,
            fresh=self.fresh,
        )

    def _module(self) -> Workshop:
        self._workshop = self.evaluator.workshop(self.candidate, self.target, self.facts, self.fresh)
        return self._workshop

    def _workbench(self, workshop: Workshop, product: Product) -> Workbench:
        host = self.evaluator
        return Workbench(workshop, host.oracle, self.target, product, self._limit_s(self._slowest()))

    def _limit_s(self, alone: Sample | None) -> float:
        """How long a call of this candidate's may take; the first one of a worker may compile."""
        compiling_s = _COMPILE_S if self.candidate.language == LANGUAGE else 0.0
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

    def _require_language(self) -> None:
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
            kept=kitchen.kept if isinstance(kitchen, Workshop) else (),
            timed_frames=lambda workload: frame_count(workload, host.kind, host._cache_bytes, self.clock),
            # Other shapes would be compiled one by one, and say nothing of a configuration.
            probed=self.candidate.language != LANGUAGE,
            guard=self.guard,
        )

    def _slowest(self) -> Sample | None:
        alone = self.evaluator._about(self.target, self.clock).alone.values()
        return max((samples["eager"] for samples in alone), key=lambda sample: sample.median_ns, default=None)

    def _worker_of(self, product: Product) -> Worker:
        if self._workshop is not None:
            return self._workshop.start(product)
        return self.evaluator.worker_of(self.candidate, product)

    def _label(self, own_share: float | None) -> None:
        """Name the work done, over all workloads the least own; refuse what is not allowed."""
        order: tuple[Work, ...] = ("kernel", "mixed", "library", "rewrite")
        labels = [label_of(product.traced.main, own_share) for product in self._products]
        # The share of the time is the forward's alone.
        labels += [label_of(product.traced.main, None) for product in self._backwards]
        self._require_allowed(max(labels, key=order.index))

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
        host, known = self.evaluator, self.evaluator._about(self.target, self.clock)
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
                rotation = host._rotation(self.target, known, product.workload, self.clock)
            try:
                result, note = self._timed(product, rotation, known)
            finally:
                host._release(known, product.workload)
            disturbed |= note in (_DISTURBED, _CROWDED, _SLOWED)
            timed.append(result)
            notes += [f"{product.workload.name}: {note}"] if note else []
        self.timing = self._verdict(timed, notes, disturbed)
        if self._own_share is not None and self._workshop is None:
            self._label(self._own_share)

    def _timed(self, product: Product, rotation: Rotation, known: _Known) -> tuple[WorkloadTiming, str]:
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
                    known.alone[name] = time_alone(host.oracle, rotation, self.clock, host._pace(1), host._flush_bytes)
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
        alone = host._about(self.target, self.clock).alone[product.workload.name]["eager"]
        sitting = Sitting(
            self.target,
            product,
            rotation,
            host.oracle,
            self._worker_of,
            device=host.kind,
            clock=self.clock,
            pace=host._pace(len(self._products)),
            flush_bytes=host._flush_bytes,
            hang_limit_s=max(self._limit_s(alone), self.incumbent._limit_s(alone) if self.incumbent else 0.0),
            incumbent=self.incumbent.beside(product.workload.name) if self.incumbent is not None else None,
            monitor=host.monitor,
        )
        blocks = sitting.measure()
        self._lag = max(self._lag, sitting.lag)
        self._device_notes |= dict.fromkeys(sitting.watch.notes if sitting.watch is not None else ())
        if sitting.own_share is not None:
            self._own_share = min(sitting.own_share, self._own_share or 1.0)
        if not blocks:
            raise Refusal(Status.REJECTED, f"{product.workload.name}: the clock gave no usable block")
        self._foreign = max(self._foreign, max(block.foreign for block in blocks))
        bound_ns = host._roofline_ns(product.workload, self.facts.precision, rotation.frames)
        placement_ns = statistics.GPU_PLACEMENT_NS if host.kind == "cuda" else 0.0
        summary = summarise(rotation, blocks, len(product.traced.main.launches), bound_ns, placement_ns)
        summary = replace(summary, host=sitting.host)
        summary = replace(summary, blocks=kept_blocks(blocks)) if host.settings.keep_blocks else summary
        return summary, sitting.crowded

    # -- racing

    def race(self, workload: WorkloadFacts, pace: RacePace, references: Sequence[Reference]) -> Race:
        """One workload's race against the incumbent, which is the version at the merge base. Raises Refusal where this
        candidate fails."""
        host, known = self.evaluator, self.evaluator._about(self.target, self.clock)
        diary = Diary()
        with diary.phase("building"), host.lease.work():
            entrant = self.entrant(workload)
            base = self._base_entrant(workload, diary)
        compiled = "compile" in references
        with diary.phase("references"), known.lock:
            rotation = host._rotation(self.target, known, workload, self.clock, compiled=compiled)
        if compiled and rotation.compile_note:
            diary.notes.append(f"no compiled reference: {rotation.compile_note}")
        rotation = replace(rotation, parties=tuple(p for p in rotation.parties if p in references))
        try:
            blocks, disturbed = self._raced(entrant, base, rotation, pace, diary)
        finally:
            host._release(known, workload)
        return Race(
            workload=workload.name,
            clock=self.clock,
            blocks=kept_blocks(blocks),
            disturbed=disturbed,
            notes=tuple(dict.fromkeys(diary.notes)),
            seconds=round(diary.seconds, 3),
            spent=diary.told,
        )

    def entrant(self, workload: WorkloadFacts) -> Incumbent:
        """This candidate built for ``workload``. Raises Refusal."""
        if self._raced_in is None:
            self._raced_in = self._module() if self.candidate.language in _HOSTED else self._kitchen()
        product = self._raced_in.produce(workload)
        if isinstance(self._raced_in, Workshop):
            self._workbench(self._raced_in, product).open()
        return Incumbent(product, self._worker_of)

    def _base_entrant(self, workload: WorkloadFacts, diary: Diary) -> Incumbent | None:
        if self.incumbent is None:
            return None
        try:
            self.incumbent._require_language()
            return self.incumbent.entrant(workload)
        except (Refusal, ConfigError) as error:
            reason = error.reason if isinstance(error, Refusal) else str(error)
            diary.notes.append(_NO_BASE.format("cannot be built", reason))
            return None

    def _raced(
        self, entrant: Incumbent, base: Incumbent | None, rotation: Rotation, pace: RacePace, diary: Diary
    ) -> tuple[tuple[statistics.Block, ...], str]:
        """Blocks of the sitting, and why they say nothing. One that was disturbed is held again at a quieter moment."""
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
        return blocks, contest.disturbance if blocks else "the clock gave no usable block"

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
            flush_bytes=host._flush_bytes,
            hang_limit_s=max(self._limit_s(None), 0.0 if host.settings.hang_limit_s else HANG_LIMIT_S),
            incumbent=base,
            monitor=host.monitor,
            diary=diary,
            memory_bytes=host.device.memory_bytes,
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


def _matching(facts: TargetFacts, patterns: Sequence[str] | None) -> TargetFacts:
    """The facts with the workloads that a pattern fits. Raises TargetError where none does."""
    if patterns is None:
        return facts
    chosen = tuple(one for one in facts.workloads if any(fnmatch.fnmatchcase(one.name, p) for p in patterns))
    if not chosen:
        names = ", ".join(workload.name for workload in facts.workloads)
        raise TargetError(
            f"{facts.target_id} has no workload like {' or '.join(patterns)}", expected=f"some of {names}"
        )
    return replace(facts, workloads=chosen, chosen=len(chosen) < len(facts.workloads))


def _chosen(facts: TargetFacts, names: Sequence[str] | None) -> list[WorkloadFacts]:
    """Raises ConfigError for a name that no workload has."""
    known = {workload.name: workload for workload in facts.workloads}
    for name in names or ():
        if name not in known:
            raise ConfigError(f"{facts.target_id} has no workload {name!r}", expected=", ".join(known))
    return [known[name] for name in names] if names is not None else list(known.values())


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


def _thread_policy(times: bool) -> tuple[tuple[str, str], ...]:
    """How waiting OpenMP threads behave, in references and candidates alike.

    Spinning is torch's default and the fast one: sleeping threads made a 4 us eager softmax take 85 us. But where
    other processes keep the cores busy, spinning threads wait for each other a thousand times longer; there they sleep,
    and where nothing is timed: candidates are then verified beside each other.
    """
    chosen = os.environ.get("OMP_WAIT_POLICY", "")
    if not chosen and (not times or stalled_share() > statistics.FOREIGN):
        chosen = "passive"
    return (("OMP_WAIT_POLICY", chosen),) if chosen else ()


def _openmp_threads() -> int:
    """How many threads a candidate's parallel regions get, as libgomp reckons: a container's quota does not count."""
    told = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(told) if told.isdigit() and int(told) else len(os.sched_getaffinity(0))
