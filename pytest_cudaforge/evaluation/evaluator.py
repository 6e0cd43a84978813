"""The only door to a verdict: ``Evaluator.evaluate(candidate, target) -> Evaluation``.

The process that calls it imports no torch, no target and no candidate and makes no CUDA context. It owns the lease,
the secrets, the deciding clock and the build cache; everything else happens in children.
"""

from __future__ import annotations

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
from pytest_cudaforge.errors import BuildFailure, ConfigError, DeviceError, ForgeError, OracleError
from pytest_cudaforge.evaluation import profiling
from pytest_cudaforge.evaluation import timing as statistics
from pytest_cudaforge.evaluation.attempt import HOSTED, Attempt
from pytest_cudaforge.evaluation.building import Product
from pytest_cudaforge.evaluation.compiled_module import OWN_INIT, UNCONFINED, module_of
from pytest_cudaforge.evaluation.module_building import Workshop
from pytest_cudaforge.evaluation.nursery import Nursery
from pytest_cudaforge.evaluation.oracle import OracleClient, compiler_caches, oracle_environment
from pytest_cudaforge.evaluation.parties import Clock
from pytest_cudaforge.evaluation.plain_race import PlainRace, plain_pace
from pytest_cudaforge.evaluation.pressure import DeviceWatch, ForeignLoad, Load, stalled_share
from pytest_cudaforge.evaluation.race import RacePace, Reference
from pytest_cudaforge.evaluation.refusal import Refusal
from pytest_cudaforge.evaluation.sandbox import SandboxSettings
from pytest_cudaforge.evaluation.sanitizing import Sanitizing
from pytest_cudaforge.evaluation.sitting import (
    Pace,
    Rotation,
    frame_count,
    open_rotation,
    time_alone,
)
from pytest_cudaforge.evaluation.spares import Spares
from pytest_cudaforge.evaluation.worker import Worker
from pytest_cudaforge.evaluation.workloads import chosen, matching
from pytest_cudaforge.evaluation.zygote import ForkServers
from pytest_cudaforge.hardware import nvml, roofline
from pytest_cudaforge.languages import Binary, Unit, extension, imports
from pytest_cudaforge.languages.cache import BuildCache, build_key
from pytest_cudaforge.languages.extension import ExtensionRequest
from pytest_cudaforge.lease import DeviceLease
from pytest_cudaforge.records import (
    Baseline,
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
    Status,
    Target,
    TargetFacts,
    WorkloadFacts,
    from_json,
)
from pytest_cudaforge.runtime.configuration import LANGUAGE

__all__ = ["Evaluator", "EvaluatorSettings", "Known"]

_TIMING_BUDGET_S = {"cpu": 0.9, "cuda": 1.5}
_HANG_LIMIT_S = 10.0
#: What torch, or a CUDA context, may take besides.
_CONTEXT_S = 20.0
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
class Known:
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
        self.servers = ForkServers(
            SandboxSettings(isolation=settings.isolation, environment=self._threads + _short_spins(self._threads)),
            compiler_environment=compiler_caches(settings.cache_dir),
        )
        self.cache = BuildCache(settings.cache_dir / "builds")
        self.sanitizing = Sanitizing(settings.device, self.oracle)
        self.profiler = profiling.Profiler(settings.device, self.oracle, settings.cache_dir)
        self._known: dict[str, Known] = {}
        self._lock = threading.Lock()

    def close(self) -> None:
        """End every child; a second call does nothing."""
        self.oracle.close()
        self._nursery.close()
        self.servers.close()

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
        return self.servers.isolation("cuda" if self.kind == "cuda" else "cpp")

    def facts(self, target: Target) -> TargetFacts:
        """What importing and running the target tells; kept. Raises TargetError."""
        known = self.about(target)
        with known.lock:
            if known.facts is None:
                with self.lease.work():
                    known.facts = matching(self.oracle.facts(target), self.settings.workloads)
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

    def about(self, target: Target, clock: Clock | None = None) -> Known:
        """By clock, too: what is timed by one says nothing of what is timed by the other."""
        key = f"{target.key}\0{clock or self.clock_of('')}"
        with self._lock:
            return self._known.setdefault(key, Known())

    @property
    def builds(self) -> BuildCache:
        """Where the binaries of its verdicts are kept."""
        return self.cache

    # -- baselines

    def clock_of(self, language: str) -> Clock:
        """Device events where the host code is ours, the supervisor's clock for a module and on the CPU."""
        return "events" if self.kind == "cuda" and language not in HOSTED else "supervisor"

    def baselines(self, target: Target, language: str = "") -> tuple[Baseline, ...]:
        """Eager and torch.compile, each timed alone by the clock that times ``language``; once per target, then kept.

        Raises TargetError.
        """
        facts, clock = self.facts(target), self.clock_of(language)
        known = self.about(target, clock)
        with known.lock:
            if known.baselines is None:
                known.baselines = tuple(
                    self._baseline(target, known, workload, facts.precision, clock) for workload in facts.workloads
                )
            return known.baselines

    def _baseline(
        self, target: Target, known: Known, workload: WorkloadFacts, precision: str, clock: Clock
    ) -> Baseline:
        rotation = self.rotation(target, known, workload, clock)
        with self.lease.timing():
            alone = time_alone(self.oracle, rotation, clock, self.pace(1), self.flush_bytes)
        known.alone[workload.name] = alone
        self.release(known, workload)
        min_bytes = workload.input_bytes + workload.state_bytes + workload.output_bytes
        return Baseline(
            workload=workload.name,
            eager=alone["eager"],
            compile=alone.get("compile"),
            compile_note=rotation.compile_note,
            roofline_ns=self.roofline_ns(workload, precision, rotation.frames),
            min_bytes=min_bytes,
            flops=workload.flops,
            generated=rotation.generated,
        )

    def rotation(
        self, target: Target, known: Known, workload: WorkloadFacts, clock: Clock, *, compiled: bool = True
    ) -> Rotation:
        """``compiled``: with torch.compile's version, or why there is none."""
        rotation = known.rotations.get(workload.name)
        if rotation is None or rotation.generation != self.oracle.generation or (compiled and not rotation.compiled):
            if rotation is not None:
                self._end_rotation(rotation)
            frames = frame_count(workload, self.kind, self.cache_bytes, clock)
            with self.lease.work():
                rotation = open_rotation(self.oracle, target, workload, frames, compiled=compiled)
            known.rotations[workload.name] = rotation
        return rotation

    def _end_rotation(self, rotation: Rotation) -> None:
        if rotation.generation == self.oracle.generation:
            self.oracle.request("end_rotation", rotation=rotation.number)

    def roofline_ns(self, workload: WorkloadFacts, precision: str, frames: int) -> float | None:
        return roofline.reference_ns(workload, precision, self.device, self.working_set(workload, frames))

    def working_set(self, workload: WorkloadFacts, frames: int) -> int | None:
        """Bytes that calls on a CPU touch in turn, which its caches may hold; a GPU's are overwritten between calls."""
        if self.kind == "cuda":
            return None
        return frames * (workload.input_bytes + workload.output_bytes) + workload.state_bytes

    def release(self, known: Known, workload: WorkloadFacts) -> None:
        """Give a rotation of gigabytes back; small ones stay for the next candidate."""
        rotation = known.rotations.get(workload.name)
        if rotation is not None and rotation.frames * workload.input_bytes > _KEEP_ROTATION_BYTES:
            self._end_rotation(known.rotations.pop(workload.name))

    @property
    def cache_bytes(self) -> int:
        return self.device.l2_bytes * (self.device.sm_count if self.kind == "cpu" else 1)

    @property
    def flush_bytes(self) -> int:
        return 2 * self.device.l2_bytes if self.kind == "cuda" else 0

    def pace(self, workloads: int) -> Pace:
        budget_s = self.settings.timing_budget_s or _TIMING_BUDGET_S[self.kind]
        return Pace.of(self.kind, budget_s / max(1, workloads))

    # -- the verdict

    def _verdict(self, attempt: Attempt, timing: bool) -> tuple[Status, str]:
        """What comes of an attempt, with the reason."""
        try:
            attempt.build_and_verify()
            if timing:
                attempt.time()
            return Status.PASSED, attempt.summary
        except Refusal as refusal:
            attempt.note(refusal)
            self._after_failure(refusal)
            return refusal.status, refusal.reason

    def evaluate(
        self,
        candidate: Candidate,
        target: Target,
        *,
        timing: bool = True,
        fresh: bool = False,
        incumbent: Candidate | None = None,
        sanitize: bool | None = False,
        workloads: Sequence[str] | None = None,
        guard: Guard | None = None,
    ) -> Evaluation:
        """Build, verify and time one candidate. A failed candidate is an Evaluation; a bad situation raises.

        ``fresh``: build from source in a fresh sandbox, past the build cache (the winner's final verdict); CUDA plans
        then pass compute-sanitizer, too. ``sanitize``: let them pass it in any case; None: and say nothing where
        it looks at no such candidate.
        ``incumbent``: a candidate that passed before, timed in the same sitting (``Timing.vs_incumbent``): two ratios
        to baselines from two sittings compare worse than one ratio from one.
        ``workloads``: names, None: all; ConfigError for one that the target does not have. ``guard``: where the
        candidate is used already: nothing outside is probed, and the verdict's guard is this one, or narrower.
        """
        began = time.perf_counter()
        facts = self.facts(target)

        def attempted() -> tuple[Attempt, Status, str]:
            attempt = Attempt(self, candidate, target, facts, fresh)
            attempt.workloads, attempt.guard = tuple(chosen(facts, workloads)), guard
            attempt.sanitize, attempt.sanitize_asked = fresh or sanitize is not False, bool(sanitize)
            if timing and incumbent is not None:
                attempt.incumbent = Attempt(self, incumbent, target, facts, fresh=False)
            return attempt, *self._verdict(attempt, timing)

        generation = self.oracle.generation
        try:
            attempt, status, reason = attempted()
        except OracleError:
            if self.oracle.generation == generation:
                raise
            # A reference that another evaluation tried took the oracle's process down, and what this one had there.
            attempt, status, reason = attempted()
        return Evaluation(
            status=status,
            reason=reason,
            candidate=candidate.digest,
            target=target.id,
            isolation=UNCONFINED if candidate.language == LANGUAGE else self.servers.isolation(candidate.language),
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
        entrant = Attempt(self, candidate, target, facts, fresh=False)
        entrant.require_language()
        if base is not None:
            entrant.incumbent = Attempt(self, base, target, facts, fresh=False)
        hosted = bool({candidate.language, base.language if base is not None else ""} & HOSTED)
        pace = RacePace.racing(self.kind, processes, budget_s, hosted)
        races = []
        for workload in chosen(facts, workloads):
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
            cache_bytes=self.cache_bytes,
            flush_bytes=self.flush_bytes,
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
        attempt = Attempt(self, candidate, target, self.facts(target), fresh=False)
        attempt.require_language()
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
            spawn=lambda compilers: self.servers.module_worker(cuda=cuda, compilers=compilers, trusted=configured),
            compile_=functools.partial(self._extension, fresh),
            written=self._written(target, facts),
            own_code=not configured,
        )

    def _written(self, target: Target, facts: TargetFacts) -> tuple[str, ...]:
        """Paths of the state that the reference's forward writes."""
        found = {path for workload in facts.workloads for path in self.oracle.mutates(target, workload.name)}
        return tuple(sorted(path.removeprefix("state/") for path in found if path.startswith("state/")))

    def _extension(self, fresh: bool, request: ExtensionRequest) -> tuple[Binary, bool]:
        """Build an extension, or take it from the cache: only this process writes there, and what is stored depends on
        sources, flags and toolchain alone. Raises BuildFailure and the builder's failures."""
        arch = self.settings.arch or self.device.arch
        key = build_key(request.key, Unit((), ()), extension.fingerprint(arch, request.with_cuda), arch)
        known = None if fresh else self.cache.get(key)
        if isinstance(known, BuildFailure):
            raise known
        if known is not None:
            imports.check_extension(known.code)  # it may have been built when less was known to hide work
            return known, True
        try:
            library = self.servers.builder().extension(request, arch)
            imports.check_extension(library.code)
            built: Binary | BuildFailure = library
        except BuildFailure as error:
            built = error
        if not fresh:
            self.cache.put(key, built)
        if isinstance(built, BuildFailure):
            raise built
        return built, False

    def spares_of(self, candidate: Candidate) -> Spares:
        """Workers on the GPU, for products without library calls, that are made ready before they are needed."""

        def make() -> Worker:
            worker = self.servers.worker(candidate.language)
            try:
                worker.open(self.settings.device, timeout_s=self.hang_limit_s(None) + _CONTEXT_S)
            except ForgeError:
                worker.close()
                raise
            return worker

        return Spares(make)

    def worker_of(self, candidate: Candidate, product: Product, spares: Spares | None = None) -> Worker:
        """A fresh worker with the product loaded, one of the ``spares`` where it may be. Raises the worker's
        failures."""
        library_calls = any(plan.library_calls for plan in (product.traced.main, product.traced.prepare) if plan)
        if spares is not None and not library_calls:
            worker = spares.take()
        else:
            worker = self.servers.worker(candidate.language, library_calls=library_calls)
        # torch or a CUDA context take their time; a shared object that does is the candidate's own doing.
        limit_s = self.hang_limit_s(None) + (_CONTEXT_S if library_calls or self.kind == "cuda" else 0)
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


#: Some tens of microseconds: longer than from one call to the next, and no burden where many are verified at once.
_SPINS = "2000"


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


def _short_spins(policy: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Candidates' threads wait awake for a moment even so, where they are not timed: a sleeper is woken on its waker's
    own processor, and then two threads of a team take turns, and never race."""
    sleeps = dict(policy).get("OMP_WAIT_POLICY", "").lower() == "passive" and "OMP_WAIT_POLICY" not in os.environ
    return (("GOMP_SPINCOUNT", _SPINS),) if sleeps else ()
