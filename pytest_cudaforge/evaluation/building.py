"""From a candidate's text to traced plans and binaries, through the sandboxed builder and the build cache."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from pytest_cudaforge import languages
from pytest_cudaforge.errors import (
    BuildFailure,
    PlanError,
    Unsupported,
    WorkerFailure,
    WorkerTimeout,
)
from pytest_cudaforge.evaluation.builder import Builder
from pytest_cudaforge.evaluation.landmarks import landmarks
from pytest_cudaforge.evaluation.refusal import Refusal
from pytest_cudaforge.languages import (
    DEVICE_LANGUAGES,
    Binary,
    Language,
    Unit,
    clocks,
    imports,
    instructions,
    triton_text,
)
from pytest_cudaforge.languages.cache import BuildCache, build_key
from pytest_cudaforge.languages.cpp import older_archs
from pytest_cudaforge.languages.published import (
    FILE_NAME,
    PUBLISHED_LANGUAGES,
    binary_digest,
    decode_binaries,
    find_binary,
)
from pytest_cudaforge.plan import TracedPlan
from pytest_cudaforge.records import Build, Candidate, DeviceFacts, KernelResources, Status, TargetFacts, WorkloadFacts
from pytest_cudaforge.runtime.signature import Signature

__all__ = ["Kitchen", "Product"]

_PARALLEL_BUILDS = 2
#: A plan of many sets of constants is many compilations, each with a limit of its own; together they have this one.
_ALL_BUILDS_S = 600.0


@dataclass(frozen=True)
class Product:
    """One workload's traced plan with its binaries, ready for a worker."""

    workload: WorkloadFacts
    traced: TracedPlan
    binaries: tuple[Binary, ...]


class Kitchen:
    """Builds one candidate. Raises Refusal where the candidate is at fault, SituationErrors otherwise."""

    tells_structure = True
    own_code = True

    def __init__(
        self,
        candidate: Candidate,
        facts: TargetFacts,
        device: DeviceFacts,
        *,
        arch: str,
        builder: Builder,
        cache: BuildCache | None,
        fresh: bool = False,
    ) -> None:
        self.candidate, self.facts, self.device = candidate, facts, device
        self.arch, self.builder, self.cache, self.fresh = arch, builder, cache, fresh
        self.language: Language = languages.load(candidate.language)
        files = dict(candidate.files)
        missing = [name for name in self.language.file_names if name not in files]
        if missing:
            raise Refusal(Status.BUILD_ERROR, f"the candidate has no {' and no '.join(missing)}")
        self.source, self.plan_source = files[self.language.source_name], files["plan.py"]
        self._binaries: dict[Unit, Binary] = {}
        self._keys: dict[Unit, str] = {}
        self._publishes = candidate.language in PUBLISHED_LANGUAGES
        #: What production runs is what a check of a published kernel has to be about.
        self._published = decode_binaries(files[FILE_NAME]) if self._publishes and FILE_NAME in files else ()
        self.seconds, self.cached = 0.0, True

    @property
    def landmarks(self) -> tuple[int, ...]:
        return landmarks(text for _, text in self.candidate.files)

    @property
    def build(self) -> Build:
        """What has been built so far, as the verdict shows it."""
        resources: dict[str, KernelResources] = {}
        log = []
        for binary in self._binaries.values():
            log.append(binary.log)
            for kernel in binary.kernels:
                resources.setdefault(kernel.expression, kernel.resources)
        text = "\n".join(dict.fromkeys(part for part in log if part))
        return Build(
            self.arch, round(self.seconds, 4), self.cached, text, tuple(resources.values()), self.built_to_publish
        )

    @property
    def built_to_publish(self) -> tuple[tuple[str, str], ...]:
        """``Build.binaries`` as of now: probes of other shapes than the contract's add to them."""
        if not self._publishes:
            return ()
        built = [(self._keys[unit], binary) for unit, binary in self._binaries.items() if unit in self._keys]
        return tuple((key, binary_digest(binary)) for key, binary in built)

    def trace(
        self, workload: WorkloadFacts, function: str = "plan", *, device: DeviceFacts | None = None
    ) -> TracedPlan:
        """Trace a function of plan.py for one signature, on another ``device`` than this one where it is given. Raises
        Unsupported as it is: a probe may be refused."""
        signature = Signature(
            workload.inputs, workload.input_tree, self.facts.module, device or self.device, self.candidate.language
        )
        try:
            return self.builder.trace(self.plan_source, signature, function)
        except Unsupported:
            raise
        except WorkerTimeout as error:
            raise Refusal(Status.TIMEOUT, str(error)) from error
        except (PlanError, BuildFailure, WorkerFailure) as error:
            raise Refusal(Status.BUILD_ERROR, str(error)) from error

    def older(self) -> Iterator[tuple[str, Kitchen]]:
        """(which CPU, the same kitchen for it) for older CPUs that this one can stand in for, if the source is other
        code there."""
        for arch in older_archs(self.source) if self.candidate.language == "cpp" else ():
            given = (self.candidate, self.facts, self.device)
            kitchen = Kitchen(*given, arch=arch, builder=self.builder, cache=self.cache, fresh=self.fresh)
            yield arch.removeprefix("cpu-"), kitchen

    def produce(self, workload: WorkloadFacts, function: str = "plan") -> Product:
        """Trace and compile for a contract workload."""
        try:
            traced = self.trace(workload, function)
        except Unsupported as error:
            reason = f"plan.py refuses the contract workload {workload.name!r}: {error}"
            raise Refusal(Status.REJECTED, reason) from error
        return Product(workload, traced, self.compile(traced))

    def knows(self, traced: TracedPlan) -> bool:
        """Are all units of this plan built already? Triton's count as built whatever it specialises them on."""
        units = languages.units_of(traced)
        if self.candidate.language == "triton":
            return {unit.constants for unit in units} <= {unit.constants for unit in self._binaries}
        return all(unit in self._binaries for unit in units)

    def compile(self, traced: TracedPlan) -> tuple[Binary, ...]:
        """All units of a plan, several at once, and the check of every launch's arguments."""
        units = languages.units_of(traced)
        fresh = [unit for unit in units if unit not in self._binaries]
        began = time.perf_counter()
        compile_ = functools.partial(self._compile_unit, until=began + _ALL_BUILDS_S)
        try:
            if self.candidate.language == "triton":
                triton_text.check(self.source)
            with ThreadPoolExecutor(_PARALLEL_BUILDS) as pool:
                for unit, binary in zip(fresh, pool.map(compile_, fresh), strict=True):
                    self._binaries[unit] = binary
            binaries = tuple(self._binaries[unit] for unit in units)
            languages.check_arguments(traced, binaries)
        except BuildFailure as error:
            build = Build(self.arch, time.perf_counter() - began, False, error.log or str(error))
            raise Refusal(Status.BUILD_ERROR, _headline(error), build=build) from error
        except WorkerTimeout as error:
            raise Refusal(Status.TIMEOUT, str(error)) from error
        except WorkerFailure as error:
            raise Refusal(Status.BUILD_ERROR, f"the compiler's process failed: {error}") from error
        finally:
            self.seconds += time.perf_counter() - began
        return binaries

    def compiled_with_lines(self, binary: Binary) -> Binary | None:
        """The unit of ``binary`` once more with line numbers; None where the language or the compiler has none.

        A cpp binary's log then says what became of each loop (see ``languages.remarks``)."""
        if self.candidate.language not in ("cuda", "cpp"):
            return None
        unit = next((unit for unit, known in self._binaries.items() if known is binary), None)
        if unit is None:
            return None
        key = self._key(unit, lineinfo=True)
        known = self.cache.get(key) if self.cache is not None and not self.fresh else None
        if isinstance(known, Binary):
            return known
        try:
            lined = self.builder.compile(self.candidate.language, self.source, unit, self.arch, lineinfo=True)
        except (BuildFailure, WorkerFailure):
            return None
        if self.cache is not None:
            self.cache.put(key, lined)
        return lined

    def _compile_unit(self, unit: Unit, until: float) -> Binary:
        if time.perf_counter() > until:
            raise WorkerTimeout(
                f"the plan's compilations took more than {_ALL_BUILDS_S:g} s together", limit_s=_ALL_BUILDS_S
            )
        published = find_binary(self._published, unit, self.arch)
        if published is not None:
            return published
        key = self._keys[unit] = self._key(unit)
        if self.cache is None or self.fresh:
            return _checked(self._built(key, unit))
        with _turn(key):
            known = self.cache.get(key)
            if isinstance(known, BuildFailure):
                raise known
            return _checked(known if isinstance(known, Binary) else self._built(key, unit))

    def _built(self, key: str, unit: Unit) -> Binary:
        self.cached = False
        try:
            binary = self.builder.compile(self.candidate.language, self.source, unit, self.arch)
        except BuildFailure as error:
            if self.cache is not None:
                self.cache.put(key, error)
            raise
        if self.cache is not None:
            self.cache.put(key, binary)
        return binary

    def _key(self, unit: Unit, *, lineinfo: bool = False) -> str:
        fingerprint = self.language.fingerprint(self.arch)
        # Two languages may compile one text with one compiler.
        return build_key(self.source, unit, f"{self.candidate.language} {fingerprint}", self.arch, lineinfo=lineinfo)


def _checked(binary: Binary) -> Binary:
    """Here, where no candidate's code runs, and on what a cache gave as well. Raises BuildFailure."""
    if binary.language == "cpp":
        imports.check(binary.code)
        instructions.check(binary.asks)
    if binary.language in DEVICE_LANGUAGES:
        # Triton's kernels are a cubin each.
        parts = [kernel.compiled for kernel in binary.kernels if kernel.compiled]
        for code in [binary.code[part.code_start :][: part.code_bytes] for part in parts] or [binary.code]:
            clocks.check(code)
    return binary


@contextlib.contextmanager
def _turn(key: str) -> Iterator[None]:
    """One thread after another for a key: what two workloads of a kernel share is built once, not twice at a time."""
    with _TURNS_LOCK:
        turn = _TURNS.setdefault(key, _Turn())
        turn.waiting += 1
    try:
        with turn.lock:
            yield
    finally:
        with _TURNS_LOCK:
            turn.waiting -= 1
            if not turn.waiting:
                del _TURNS[key]


class _Turn:
    def __init__(self) -> None:
        self.lock, self.waiting = threading.Lock(), 0


_TURNS: dict[str, _Turn] = {}
_TURNS_LOCK = threading.Lock()


def _headline(error: BuildFailure) -> str:
    lines = str(error).strip().splitlines()
    return "\n".join(lines[:3]) if lines else "the compiler refused the source"


def launch_count(products: Sequence[Product]) -> int:
    """Launches of all workloads' plans together."""
    return sum(len(product.traced.main.launches) for product in products)
