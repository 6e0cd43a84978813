"""From a ModelNew's text to running workers: plans that stand for its calls, extensions built by the builder."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from pytest_cudaforge.errors import BuildFailure, ForgeError, LaunchFailure, WorkerFailure, WorkerTimeout
from pytest_cudaforge.evaluation.building import Product
from pytest_cudaforge.evaluation.cases import AGAIN
from pytest_cudaforge.evaluation.extensions import MAX_EXTENSIONS, NeedsBuild
from pytest_cudaforge.evaluation.landmarks import landmarks
from pytest_cudaforge.evaluation.module_plan import kept_state, matched_state, plan_of_call, state_specs
from pytest_cudaforge.evaluation.module_requests import ModuleRecipe
from pytest_cudaforge.evaluation.module_worker import ModuleWorker
from pytest_cudaforge.evaluation.refusal import Refusal
from pytest_cudaforge.languages import Binary, flags
from pytest_cudaforge.languages.extension import ExtensionRequest
from pytest_cudaforge.plan import TracedPlan
from pytest_cudaforge.records import Build, Candidate, DeviceFacts, Status, Target, TargetFacts, WorkloadFacts

__all__ = ["Workshop", "compiles_itself"]

#: Gives the library and whether it was there already.
Compile = Callable[[ExtensionRequest], tuple[Binary, bool]]


def compiles_itself(candidate: Candidate, torch_device: str) -> bool:
    """Whether a module's calls compile, and may choose among what they compiled: Triton does so in the process that
    launches."""
    jit = re.compile(r"\b(?:triton|compile)\b")
    return torch_device != "cpu" and any(jit.search(source) for _, source in candidate.files)


class Workshop:
    """Starts workers for one ModelNew. Raises Refusal where the candidate is at fault, SituationErrors otherwise.

    ``initial`` is what :meth:`OracleClient.initial` gave; ``spawn`` makes an empty worker, which may start programs
    where its argument says so; ``compile_`` builds an extension (or finds it in the cache) and raises BuildFailure and
    the builder's other failures. ``own_code``: False of a compiler configuration, where nothing is the candidate's.
    """

    tells_structure = False

    def __init__(
        self,
        candidate: Candidate,
        target: Target,
        facts: TargetFacts,
        device: DeviceFacts,
        *,
        initial: Mapping[str, Any],
        torch_device: str,
        threads: int,
        start_limit_s: float,
        spawn: Callable[[bool], ModuleWorker],
        compile_: Compile,
        written: tuple[str, ...] = (),
        own_code: bool = True,
    ) -> None:
        self.own_code = own_code
        ((name, source),) = _one_file(candidate)
        self.landmarks = landmarks([source])
        self.facts, self.device = facts, device
        self._recipe = ModuleRecipe(
            file_name=name,
            source=source,
            init=initial["init"],
            # A KernelBench file's model is used as constructed.
            mode="" if target.kind == "kernelbench" else facts.mode,
            precision=facts.precision,
            seed=initial["seed"],
            threads=threads,
            written=written,
        )
        self._torch_device, self._start_limit_s = torch_device, start_limit_s
        self._spawn, self._compile = spawn, compile_
        self._libraries: dict[str, bytes] = {}
        #: Later workers get what the first one compiled.
        self._compiles_itself = compiles_itself(candidate, torch_device)
        self._compiled = b""
        self._logs: list[str] = []
        self.seconds, self.cached = 0.0, True
        #: State paths of the reference that the candidate may have under another name, shape or dtype.
        self.kept: tuple[str, ...] = ()
        self._loads_weights = False
        self.extensions: tuple[str, ...] = ()

    @property
    def build(self) -> Build:
        """What has been built so far, as the verdict shows it."""
        log = "\n".join(dict.fromkeys(part for part in self._logs if part))
        return Build(self.device.arch, round(self.seconds, 4), self.cached, log)

    @property
    def has_own_code(self) -> bool:
        """Was anything built for it, or may it have been where it runs, as many libraries do for a GPU?"""
        return bool(self._libraries) or self._torch_device != "cpu"

    # -- what the verifier asks of a kitchen

    def trace(self, workload: WorkloadFacts, *, device: DeviceFacts | None = None) -> TracedPlan:
        """Whatever ``device`` it is for: nothing is traced of a module."""
        return plan_of_call(workload, self.facts.module)

    def knows(self, traced: TracedPlan) -> bool:
        """A module is built once for all shapes."""
        return True

    def compile(self, traced: TracedPlan) -> tuple[Binary, ...]:
        return ()

    def older(self) -> Iterator[tuple[str, Workshop]]:
        """None: what a module compiles, and with which flags, is its own business."""
        return iter(())

    def produce(self, workload: WorkloadFacts) -> Product:
        return Product(workload, self.trace(workload), ())

    def explain(self, refusal: Refusal) -> None:
        """Add a hint to ``refusal`` where the candidate is right with the weights as constructed and with no others."""
        found = refusal.verification
        if found is None or refusal.status is not Status.INCORRECT_NUMERICAL or not self._loads_weights:
            return
        constructed = [case.passed for case in found.cases if case.case in ("drawn", AGAIN)]
        # Zeros are zeros under any weights.
        told = [case for case in found.cases if case.case not in ("drawn", AGAIN, "empty") and case.contract]
        others = [case.passed for case in told]
        if not constructed or not all(constructed) or any(others):
            return
        hint = (
            "it is right with the weights as constructed only: what __init__ derives from them, and what is built in, "
            "sees no loaded weights"
        )
        refusal.reason += f"\n  {hint}"

    # -- workers

    def start(self, product: Product, sabotage: str = "") -> ModuleWorker:
        """A fresh worker with the candidate constructed. Raises Refusal, WorkerFailure or LaunchFailure."""
        while True:
            worker = self._spawn(self._compiles_itself)
            try:
                self._start_once(worker, product, sabotage)
            except NeedsBuild as need:
                worker.close()
                self.provide(need.request)
                continue
            except (ForgeError, Refusal):
                worker.close()
                raise
            return worker

    def _start_once(self, worker: ModuleWorker, product: Product, sabotage: str) -> None:
        try:
            started = worker.start_module(
                replace(self._recipe, sabotage=sabotage),
                product.traced,
                product.workload,
                self._libraries,
                self._torch_device,
                compiled=self._compiled,
                timeout_s=self._start_limit_s,
            )
        except NeedsBuild:
            raise
        except BuildFailure as error:
            raise Refusal(Status.BUILD_ERROR, str(error), build=self.build) from error
        except LaunchFailure as error:
            raise Refusal(Status.RUNTIME_ERROR, str(error), build=self.build) from error
        except WorkerTimeout as error:
            raise Refusal(Status.TIMEOUT, str(error), build=self.build) from error
        except WorkerFailure as error:
            raise Refusal(Status.RUNTIME_ERROR, str(error), build=self.build) from error
        reference = state_specs(self.facts.module)
        matched = matched_state(reference, started.state)
        self.kept = kept_state(reference, started.state)
        self._loads_weights = bool(matched or not self.kept)

    def keep_compiled(self, worker: ModuleWorker, timeout_s: float) -> None:
        """Take over what Triton has compiled in ``worker``, for this candidate's later workers and nobody else's."""
        if self._compiles_itself:
            self._compiled = worker.compiled(timeout_s=timeout_s)

    def provide(self, request: ExtensionRequest) -> None:
        """Have an extension built that a worker asked for. Raises Refusal."""
        if len(self._libraries) >= MAX_EXTENSIONS:
            reason = f"the candidate builds more than {MAX_EXTENSIONS} extensions"
            raise Refusal(Status.REJECTED, reason, build=self.build)
        began = time.perf_counter()
        try:
            flags.check(request.name, request.cflags, request.cuda_cflags, request.ldflags)
            binary, known = self._compile(request)
        except BuildFailure as error:
            self._logs.append(error.log)
            self.cached = False
            self.seconds += time.perf_counter() - began
            raise Refusal(Status.BUILD_ERROR, str(error), build=self.build) from error
        except WorkerTimeout as error:
            raise Refusal(Status.TIMEOUT, str(error), build=self.build) from error
        except WorkerFailure as error:
            reason = f"the compiler's process failed: {error}"
            raise Refusal(Status.BUILD_ERROR, reason, build=self.build) from error
        self.seconds += time.perf_counter() - began
        self.cached = self.cached and known
        self._logs.append(binary.log)
        self._libraries[request.key] = binary.code
        self.extensions = (*self.extensions, request.name)


def _one_file(candidate: Candidate) -> tuple[tuple[str, str], ...]:
    sources = [(name, text) for name, text in candidate.files if name.endswith(".py")]
    if len(sources) != 1 or len(candidate.files) != 1:
        raise Refusal(Status.BUILD_ERROR, "a module candidate is one .py file with class ModelNew(nn.Module)")
    return tuple(sources)
