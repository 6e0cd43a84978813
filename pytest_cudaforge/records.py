"""The frozen records that pass between the rooms (stages never call each other; ``loop.py`` does).

Standard library only. Every record goes to JSON with :func:`to_json` and comes back with :func:`from_json`.
The few that production needs are in :mod:`pytest_cudaforge.facts`: to make them all takes as long as a first call.
Units are in the names. A *status* permits exactly the parts documented at :class:`Evaluation`.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pytest_cudaforge.facts import DeviceFacts as DeviceFacts
from pytest_cudaforge.facts import Guard as Guard
from pytest_cudaforge.facts import KernelResources as KernelResources
from pytest_cudaforge.facts import from_json as from_json
from pytest_cudaforge.facts import to_json as to_json
from pytest_cudaforge.plan import TensorSpec

Language = Literal["cuda", "triton", "cpp", "module", "compiler"]
Kind = Literal["class", "function", "kernelbench"]


# -- targets ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """One marked module, as the AST scan sees it; nothing was imported.

    ``id`` is ``posix/path/from/rootdir.py::Qualified.Name`` (a KernelBench file: ``path.py::Model``).
    ``source`` is the target with everything it needs from its file (and from files it imports relatively), the
    text shown to the Coder; ``digest`` is sha256 over it, so that changing one target leaves others valid. ``terms``
    are options that count instead of its own, by name: in guard mode those of the merge base (target.with_terms).
    ``guard``: does the mark say ``guard=True``? None where it is no literal, and only importing would tell.
    """

    id: str
    root: str
    path: str
    qualname: str
    kind: Kind
    line: int
    module_name: str
    import_root: str
    name: str
    source: str
    digest: str
    terms: tuple[tuple[str, Any], ...] = ()
    guard: bool | None = False

    @property
    def key(self) -> str:
        """Whose facts these are: where it lies, what its source says, on which terms."""
        return "\0".join((self.root, self.id, self.digest, repr(self.terms) if self.terms else ""))

    @property
    def slug(self) -> str:
        """Directory name: ``rms_norm-3f9a1c`` (snake case name, 6 hex of the id's sha256)."""
        return f"{self.name}-{hashlib.sha256(self.id.encode()).hexdigest()[:6]}"


@dataclass(frozen=True)
class WorkloadFacts:
    """One concrete input set as the oracle drew it: specs by flattened path, and the reference's outputs.

    ``flops`` are those of products and convolutions, ``convolution_flops`` the latter's part of them. ``writes``:
    ``input/<path>`` and ``state/<path>`` of the tensors that forward changes. ``shared``: paths of outputs that lie in
    the memory of one before them. ``unordered``: an output may be contiguous whatever order of dimensions the
    reference's has in memory (KernelBench compares values, and its solutions return what ``empty_like`` gives).
    """

    name: str
    inputs: tuple[tuple[str, TensorSpec | int | float | bool | str | None], ...]
    input_tree: Any
    outputs: tuple[tuple[str, TensorSpec | int | float | bool | str | None], ...]
    output_tree: Any
    input_bytes: int
    state_bytes: int
    output_bytes: int
    flops: int
    convolution_flops: int = 0
    writes: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    unordered: bool = False


@dataclass(frozen=True)
class TargetFacts:
    """What only importing the target tells; made by the oracle, never by the pytest process.

    ``module`` is a ModuleSpec as JSON data (runtime.signature) or None for a function target. ``chosen``: these are
    some of the target's workloads, for a kernel of their own. ``attributes``: path and value of those that forward
    reads, as ``module`` has them. ``buffers``: path and fingerprint (runtime.fingerprints) of the tensors that it reads
    and that are as constructed in every trial.
    """

    target_id: str
    precision: str
    atol: float | None
    rtol: float | None
    languages: tuple[str, ...]
    min_speedup: float
    allow: tuple[str, ...]
    mode: Literal["eval", "train"]
    grad: bool
    dynamic: bool
    strides: Literal["drawn", "any"]
    distributions: Literal["all", "drawn"]
    index_outputs: tuple[str, ...]
    nondeterministic: bool
    module: Any
    workloads: tuple[WorkloadFacts, ...]
    chosen: bool = False
    attributes: tuple[tuple[str, Any], ...] = ()
    buffers: tuple[tuple[str, tuple[str, str, tuple[float, ...]]], ...] = ()


# -- candidates ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """Sources of one attempt. ``files`` is sorted (name, text); ``parent`` is the digest it was derived from."""

    language: str
    files: tuple[tuple[str, str], ...]
    parent: str | None = None

    @classmethod
    def of(cls, language: str, files: Mapping[str, str], parent: str | None = None) -> Candidate:
        return cls(language, tuple(sorted(files.items())), parent)

    def file(self, name: str) -> str:
        return dict(self.files)[name]

    @property
    def digest(self) -> str:
        """sha256 of language and files: identity is content, not ancestry."""
        text = "\0".join([self.language, *(part for pair in self.files for part in pair)])
        return hashlib.sha256(text.encode()).hexdigest()


# -- evaluation ------------------------------------------------------------------------------------------------


class Status(str, enum.Enum):
    PASSED = "PASSED"
    BUILD_ERROR = "BUILD_ERROR"
    RUNTIME_ERROR = "RUNTIME_ERROR"
    TIMEOUT = "TIMEOUT"
    INCORRECT_SHAPE = "INCORRECT_SHAPE"
    INCORRECT_DTYPE = "INCORRECT_DTYPE"
    INCORRECT_NUMERICAL = "INCORRECT_NUMERICAL"
    REJECTED = "REJECTED"


#: The last is no kernel at all: the reference, compiled by torch.compile with chosen options.
Work = Literal["kernel", "mixed", "library", "rewrite", "compiler"]
Grade = Literal["A", "B", "C", "F"]
Decision = Literal["faster", "slower", "same", "inconclusive", "disturbed"]


@dataclass(frozen=True)
class Build:
    arch: str
    seconds: float
    cached: bool
    log: str = ""
    kernels: tuple[KernelResources, ...] = ()
    #: Binaries that are published with the source (Triton's): (key in the build cache, sha256 of the bytes there).
    binaries: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Mismatch:
    """Where and how one output differs. ``kind``: count shape dtype structure values slice bias nonfinite integer
    mutation unwritten redzone unstable. ``error_ratio`` = rms(c-o) / max(rms(r-o), floor); ``bound`` is what it may
    be."""

    output: str
    kind: str
    detail: str
    error_ratio: float | None = None
    bound: float | None = None
    index: tuple[int, ...] | None = None
    got: float | None = None
    expected: float | None = None
    pattern: str = ""


@dataclass(frozen=True)
class LintFinding:
    """What is wrong with a target as a task. ``kind``: constant zeros copy inputs weights tiny nonfinite random
    nondeterministic shape draws number refuse it (``refuses``); input output order saturated memory are notes for its
    author, as are tiny and nonfinite where other outputs are neither.
    ``text`` names the probe that showed it, with its numbers."""

    kind: str
    text: str
    refuses: bool = True


@dataclass(frozen=True)
class CaseResult:
    """One trial. ``case`` names it without giving its seed: "drawn", "shifted", "strided", ..."""

    workload: str
    case: str
    contract: bool
    passed: bool
    error_ratio: float | None
    bound: float | None
    mismatches: tuple[Mismatch, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class SanitizerFinding:
    """What one tool of compute-sanitizer found, ``count`` times. ``place``: ``kernel.cu:12``, or the instruction's
    offset in the kernel; ``refuses``: no honest kernel does that (see evaluation.sanitizer)."""

    tool: str
    kind: str
    kernel: str
    place: str
    count: int
    refuses: bool
    detail: str = ""


@dataclass(frozen=True)
class SanitizerReport:
    """compute-sanitizer's look at one call of ``workload``. ``tools`` ran to their end; ``notes`` say why others, or
    all, did not."""

    workload: str
    tools: tuple[str, ...]
    findings: tuple[SanitizerFinding, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def refusal(self) -> SanitizerFinding | None:
        """The first finding that refuses the candidate."""
        return next((finding for finding in self.findings if finding.refuses), None)


@dataclass(frozen=True)
class Verification:
    """``sanitizer``: only a winner's final verdict has one, and whoever asked for it."""

    cases: tuple[CaseResult, ...]
    oracle: Literal["fp64", "partial"]
    worst_ratio: float | None
    guard: Guard = field(default_factory=Guard)
    sanitizer: SanitizerReport | None = None

    @property
    def backward(self) -> bool:
        """Whether gradients were verified, too. Their cases are those of workloads named ``<workload>::backward``."""
        cases = [case for case in self.cases if case.contract and case.workload.endswith("::backward")]
        return bool(cases) and all(case.passed for case in cases)

    @property
    def contract_passed(self) -> bool:
        return bool(self.cases) and all(case.passed for case in self.cases if case.contract)


@dataclass(frozen=True)
class Sample:
    """Summary of one party's samples in one sitting; ``median_ns`` is per call."""

    median_ns: float
    low_ns: float
    high_ns: float
    samples: int
    blocks: int


@dataclass(frozen=True)
class Ratio:
    """speedup = baseline median / candidate median, from paired blocks, with its interval."""

    speedup: float
    low: float
    high: float
    confidence: float = 0.99


@dataclass(frozen=True)
class Baseline:
    """One workload's baselines, timed alone before a candidate exists. ``compile`` None: ``compile_note`` says why.

    ``generated``: the kernels that torch.compile wrote for it and the calls that run them, as text cut to a prompt's
    measure; "" where there are none, or none were caught."""

    workload: str
    eager: Sample
    compile: Sample | None
    compile_note: str
    roofline_ns: float | None
    min_bytes: int
    flops: int
    generated: str = ""


@dataclass(frozen=True)
class TimedBlock:
    """One block of a sitting: ns per call by party, in one process of the candidate's. ``foreign`` is the share of the
    block's time in which some process of the machine waited for a core; on a GPU in which others used it, 1.0 where it
    was slowed down."""

    process: int
    ns: tuple[tuple[str, float], ...]
    foreign: float = 0.0


@dataclass(frozen=True)
class Race:
    """One workload in one sitting of the guard: what is checked in now against its version at the merge base and its
    reference, block by block, each in fresh processes. Parties: "candidate", "base" where there was one, "eager" and
    "compile" (of a plain module there are "candidate" and "base" only).

    ``blocks`` are raw: disturbed ones (see ``TimedBlock.foreign``) are among them, and a question that was settled
    early has fewer than another, so a block need not hold every party.
    ``what``: "forward", or "backward" for a call with its gradients. ``disturbed``: why nothing may be decided from it;
    "" where it was calm. ``capped``: a GPU ran at its power limit. ``notes``: why there is no
    base, or no compiled reference. ``seconds``: of wall time, builds
    included; ``spent``: where they went, by phase.
    """

    workload: str
    clock: Literal["events", "supervisor"]
    blocks: tuple[TimedBlock, ...]
    what: Literal["forward", "backward"] = "forward"
    disturbed: str = ""
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    spent: tuple[tuple[str, float], ...] = ()
    capped: bool = False


@dataclass(frozen=True)
class RaceFailure:
    """What is checked in now failed in a race: it could not be built, or it crashed, hung or answered wrongly under the
    clock. As an Evaluation's ``status`` and ``reason``; nothing was measured that could be decided from."""

    workload: str
    status: Status
    reason: str


@dataclass(frozen=True)
class HostTiming:
    """Calls one after another with nothing between, ns per call by the supervisor's slope: what a caller sees whose
    calls are bound by their launches. ``device_ns``: the candidate's same calls by device events. Baselines are there
    where somebody is launch-bound."""

    candidate_ns: float
    device_ns: float
    eager_ns: float | None = None
    compile_ns: float | None = None


@dataclass(frozen=True)
class WorkloadTiming:
    """``blocks``: what everything else was reckoned from, kept on request. ``host``: CUDA plans only."""

    workload: str
    candidate: Sample
    eager: Sample
    compile: Sample | None
    vs_eager: Ratio
    vs_compile: Ratio | None
    launches: int
    roofline_ns: float | None = None
    incumbent: Sample | None = None
    vs_incumbent: Ratio | None = None
    blocks: tuple[TimedBlock, ...] = ()
    host: HostTiming | None = None


@dataclass(frozen=True)
class Timing:
    """``decision`` is against the faster baseline unless the target says otherwise; over several workloads the
    speedups are geometric means. ``vs_incumbent``: against another candidate, timed in the same sitting. ``clock``:
    "events" (device events) or "supervisor" (slope of the parent's clock)."""

    decision: Decision
    clock: Literal["events", "supervisor"]
    speedup_eager: float
    speedup_compile: float | None
    workloads: tuple[WorkloadTiming, ...]
    note: str = ""
    own_share: float | None = None
    vs_incumbent: Ratio | None = None


Rung = Literal["ncu", "cupti", "counters", "static"]
Depth = Literal["quick", "full"]


@dataclass(frozen=True)
class ProfiledKernel:
    """What a profiler saw of one kernel in one call: all its launches of the same shape together.

    ``own``: one of the candidate's, by the name that its source has (``function``); library kernels keep the name of
    their symbol. ``duration_ns`` is the sum over ``launches`` under the profiler, inside the call where that was
    counted, else from emptied caches: a share of the call, never a verdict's time. ``metrics``: (Nsight Compute's own
    name, value, its unit) of the longest launch, each looked at alone and from emptied caches but for ``in_call__...``.
    """

    function: str
    own: bool
    launches: int
    duration_ns: float | None
    grid: tuple[int, ...] = ()
    block: tuple[int, ...] = ()
    metrics: tuple[tuple[str, float, str], ...] = ()


@dataclass(frozen=True)
class RuleFinding:
    """A rule of the profiler that fired. ``speedup_percent``: its own estimate of what mending it may bring of the
    kernel's time, None where it gives none."""

    kernel: str
    rule: str
    text: str
    speedup_percent: float | None = None


@dataclass(frozen=True)
class HotLine:
    """A line of the candidate's source. ``share``: of its kernel's samples (0 to 1). ``figures``: (name, value, unit),
    such as the stall reasons' samples or excess sectors."""

    kernel: str
    file: str
    line: int
    source: str
    share: float | None
    figures: tuple[tuple[str, float, str], ...] = ()


@dataclass(frozen=True)
class Profile:
    """What one candidate does on the device, as far as it could be seen; never part of the verdict.

    ``rung`` is the ladder's: ncu (hardware counters of a GPU), cupti (kernel times), counters (perf, on a CPU), static
    (what the binary and the roofline tell). ``notes`` say why a higher one was not reached. ``facts`` are figures of
    the whole call, (name, value, unit): bytes, FLOPs, bandwidth reached, scaling over threads. ``remarks`` are lines
    of text from a compiler or a tool. ``report``: the profiler's own file, a path on this machine, "" without one.
    """

    rung: Rung
    depth: Depth
    candidate: str
    workload: str
    kernels: tuple[ProfiledKernel, ...] = ()
    rules: tuple[RuleFinding, ...] = ()
    lines: tuple[HotLine, ...] = ()
    facts: tuple[tuple[str, float, str], ...] = ()
    remarks: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    report: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Isolation:
    grade: Grade
    reasons: tuple[str, ...] = ()
    remedy: str = ""


@dataclass(frozen=True)
class Evaluation:
    """The verdict. Parts permitted by status:

    BUILD_ERROR: build may be None or hold the log · RUNTIME_ERROR, TIMEOUT, INCORRECT_*: build, verification so far ·
    REJECTED: any · PASSED: build and verification always, timing unless it was not asked for.
    """

    status: Status
    reason: str
    candidate: str
    target: str
    isolation: Isolation
    language: str = "cpp"
    device: str = "cpu"
    work: Work | None = None
    build: Build | None = None
    verification: Verification | None = None
    timing: Timing | None = None
    profile: Profile | None = None
    seconds: float = 0.0
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def passed(self) -> bool:
        return self.status is Status.PASSED


# -- loop ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Usage:
    """Tokens of one call; ``usd`` is None where the price is unknown."""

    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    usd: float | None = None


@dataclass(frozen=True)
class Feedback:
    """What the Judge tells the Coder. correction: issue, why, fix. optimization: bottleneck, method, plan.

    ``place``: where in the code, ``expected``: how many times as fast it is to become, both of an optimization.
    ``doubts``: what of it could not be verified against the evidence, also after it was returned once.
    """

    kind: Literal["correction", "optimization"]
    issue: str
    why: str
    action: str
    cites: tuple[str, ...] = ()
    place: str = ""
    expected: float | None = None
    doubts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Proposal:
    """What a Strategy wants next. ``parent`` is a round number or None for a first candidate. ``depth``: of the profile
    that the Judge gets; "full" asks it to plan anew, since the last optimizations brought nothing."""

    kind: Literal["first", "correction", "optimization"]
    parent: int | None
    depth: Depth = "quick"


@dataclass(frozen=True)
class Stop:
    reason: str


@dataclass(frozen=True)
class Round:
    """One turn of the loop. ``failure`` is set where no candidate came out of the replies; ``incumbent`` is the round
    that was timed in the same sitting."""

    number: int
    kind: Literal["first", "correction", "optimization"]
    parent: int | None
    candidate: Candidate | None
    evaluation: Evaluation | None
    feedback: Feedback | None = None
    failure: str = ""
    duplicate_of: int | None = None
    usage: Usage = Usage()
    recorded_status: str = ""
    notes: tuple[str, ...] = ()
    incumbent: int | None = None


Outcome = Literal["forged", "kept_reference", "failed", "skipped", "pending", "cancelled", "error"]


@dataclass(frozen=True)
class Trace:
    """All rounds of one target. ``winner`` is the round whose candidate won; ``final`` its fresh re-evaluation.

    ``baselines`` and ``hardware``: what the reference was measured to take before the rounds, and on which device with
    which ceilings; empty where the run ended before.
    """

    target: str
    language: str
    outcome: Outcome
    reason: str
    rounds: tuple[Round, ...] = ()
    winner: int | None = None
    final: Evaluation | None = None
    usage: Usage = Usage()
    seconds: float = 0.0
    files: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())
    baselines: tuple[Baseline, ...] = ()
    hardware: DeviceFacts | None = None
