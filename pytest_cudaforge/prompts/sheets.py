"""Records as prompt text: short, exact, with units. Pure; both Coder and Judge read the same sheets.

Text that a model or a candidate had a hand in is fenced by the caller or by :func:`pytest_cudaforge.prompts.fence`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pytest_cudaforge.plan import TensorSpec
from pytest_cudaforge.prompts import fence
from pytest_cudaforge.records import (
    Baseline,
    Build,
    Candidate,
    CaseResult,
    DeviceFacts,
    Evaluation,
    KernelResources,
    Mismatch,
    Sample,
    TargetFacts,
    Timing,
    Verification,
    WorkloadFacts,
    WorkloadTiming,
)

MAX_LOG_CHARACTERS = 4000
MAX_ATTRIBUTES = 60
MAX_MISMATCHES = 4
MAX_DETAILED_CASES = 2
INFO_STRINGS = {"plan.py": "python", "kernel.cpp": "cpp", "kernel.cu": "cuda", "kernel.py": "python"}


# -- numbers -----------------------------------------------------------------------------------------------------


def render_ns(time_ns: float) -> str:
    """Three significant digits in the unit that suits: ``412 ns``, ``3.71 us``, ``1.5 ms``."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if time_ns >= size:
            return f"{time_ns / size:.3g} {unit}" if time_ns < 999.5 * size else f"{time_ns / size:.0f} {unit}"
    return f"{time_ns:.0f} ns"


def render_bytes(count: int | float) -> str:
    """``1.5 MB`` (powers of ten, as bandwidths are quoted)."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}" if count < 999.5 * size else f"{count / size:.0f} {unit}"
    return f"{count:.0f} B"


def render_count(count: int | float) -> str:
    """``1.5 G`` for 1.5e9."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} "


# -- the task ----------------------------------------------------------------------------------------------------


def render_spec(spec: object) -> str:
    """``float32[64, 4096]``, with strides where the tensor is not contiguous; a number or None as it is."""
    if not isinstance(spec, TensorSpec):
        return repr(spec)
    strides = "" if spec.contiguous else f" strides {list(spec.strides)}"
    return f"{spec.dtype}{list(spec.shape)}{strides}"


def render_path(path: str) -> str:
    """A leaf's path as a reader of the call would say it: ``argument 1``, ``mask=``, ``argument 2 .mask``."""
    first, _, rest = path.partition(".")
    if first == "kw":
        name, _, inner = rest.partition(".")
        return f"{name}=" + (f".{inner}" if inner else "")
    return f"argument {int(first) + 1}" + (f" .{rest}" if rest else "") if first.isdigit() else path


def render_workloads(workloads: Sequence[WorkloadFacts]) -> str:
    return "\n".join(_workload(facts) for facts in workloads)


def _workload(facts: WorkloadFacts) -> str:
    inputs = ", ".join(f"{render_path(path)}: {render_spec(spec)}" for path, spec in facts.inputs)
    outputs = ", ".join(f"{path}: {render_spec(spec)}" for path, spec in facts.outputs)
    traffic = facts.input_bytes + facts.state_bytes + facts.output_bytes
    work = f"; moves at least {render_bytes(traffic)}"
    work += f", {render_count(facts.flops)}FLOP" if facts.flops else ""
    line = f"- {facts.name}: {inputs or 'no arguments'} -> {outputs or 'nothing'}{work}"
    if not facts.writes:
        return line
    written = ", ".join(_written(path) for path in facts.writes)
    return f"{line}\n  The original also changes {written}: your launches leave there what it leaves, it is compared."


def _written(path: str) -> str:
    kind, _, name = path.partition("/")
    return f"`module.{name}`" if kind == "state" else render_path(name)


def render_module(module: Any) -> str:
    """The attributes plan.py may read, from ``runtime.signature.describe_module``'s data; "" for a function target."""
    if not isinstance(module, Mapping):
        return "The target is a plain function: plan takes no `module`."
    lines = list(_attributes(module, "module"))
    if len(lines) > MAX_ATTRIBUTES:
        hidden = len(lines) - MAX_ATTRIBUTES
        lines = [*lines[:MAX_ATTRIBUTES], f"- and {hidden} more, of the same pattern"]
    return "Attributes of `module`:\n" + ("\n".join(lines) or "- none")


def _attributes(module: Mapping[str, Any], prefix: str) -> Iterator[str]:
    elements = module.get("items") or []
    for name, value in module.get("attributes", {}).items():
        place = f"{prefix}[{name}]" if name in elements and str(name).isdigit() else f"{prefix}.{name}"
        yield from _attribute(value, place)


def _attribute(value: Any, place: str) -> Iterator[str]:
    if not isinstance(value, Mapping):
        yield f"- `{place}` = {value!r}"
    elif "tensor" in value:
        yield f"- `{place}`: {render_spec(_spec(value['tensor']))}"
    elif "module" in value:
        nested = value["module"]
        yield f"- `{place}`: {nested.get('class', 'Module')}"
        yield from _attributes(nested, place)
    elif "list" in value or "tuple" in value:
        for index, item in enumerate(value.get("list", value.get("tuple"))):
            yield from _attribute(item, f"{place}[{index}]")
    elif "dict" in value:
        for key, item in value["dict"]:
            yield from _attribute(item, f"{place}[{key!r}]")
    elif "opaque" not in value:
        yield f"- `{place}` = {next(iter(value.values()), None)}"


def _spec(data: Any) -> object:
    if isinstance(data, TensorSpec):
        return data
    if isinstance(data, Mapping):
        return TensorSpec(tuple(data["shape"]), str(data["dtype"]), tuple(data["strides"]))
    from pytest_cudaforge.plan import decode_spec

    return decode_spec(data)


_PRECISIONS = {
    "fp32": "fp32: float32 accuracy throughout; no TF32 and no half precision inside, unless error compensation "
    "(products of parts, as in 3xTF32) restores every digit",
    "tf32": "tf32: products may use TF32; everything else float32",
    "fp16": "fp16: half-precision data, accumulate in float32",
    "bf16": "bf16: bfloat16 data, accumulate in float32",
    "fp64": "fp64: double precision throughout",
    "default": "torch's own defaults: products in full float32, convolutions may use TF32",
}
_ALLOWED = {
    "kernel": "your own kernels do the work; `op(...)` for matrix products, convolutions, attention and copies alone, "
    "and beside them your own kernels take at least 5 % of the time",
    "mixed": "your own kernels beside general library calls through `op(...)`",
    "library": "library products, convolutions, attention and copies through `op(...)` with little work of your own",
    "rewrite": "a plan of library calls alone",
}


def render_contract(facts: TargetFacts, allow: Sequence[str]) -> str:
    """Precision, tolerances, what kind of work is allowed, and what the target promises beyond the drawn workloads."""
    lines = [f"Precision: {_PRECISIONS.get(facts.precision, facts.precision)}."]
    if facts.atol is not None or facts.rtol is not None:
        lines.append(f"Outer bound on every element: atol {facts.atol}, rtol {facts.rtol}.")
    lines.append("Allowed: " + "; ".join(_ALLOWED.get(work, work) for work in allow) + ".")
    if facts.dynamic:
        lines.append("Shapes: any sizes of the same rank must be right, not only those above.")
    if facts.strides == "any":
        lines.append("Strides: any strides and alignments must be right.")
    if facts.distributions == "drawn":
        lines.append("Inputs: all of them come from the task's own function, with other seeds.")
    if facts.mode == "train":
        lines.append("The module is in training mode.")
    if facts.grad:
        lines.append("Gradients are asked for: those that plan_backward gives are checked like outputs.")
    if facts.index_outputs:
        lines.append(f"Outputs that are indices: {', '.join(facts.index_outputs)}.")
    if facts.nondeterministic:
        lines.append("The original is not deterministic; its own spread is the tolerance.")
    if facts.min_speedup > 1:
        lines.append(f"Worth publishing from a speedup of {facts.min_speedup:g}.")
    return "\n".join(lines)


def render_device(device: DeviceFacts) -> str:
    parts = [device.name] if device.kind == "cpu" else [device.name, device.arch]
    if device.sm_count:
        parts.append(f"{device.sm_count} {'SMs' if device.kind == 'cuda' else 'cores'}")
    if device.clock_mhz:
        parts.append(f"{device.clock_mhz} MHz")
    if device.l2_bytes:
        parts.append(f"L2 {render_bytes(device.l2_bytes)}")
    if device.max_shared_bytes:
        parts.append(f"shared memory per block up to {device.max_shared_bytes} B")
    if device.bandwidth_bytes_per_s:
        parts.append(f"memory {render_bytes(device.bandwidth_bytes_per_s)}/s")
    parts += [f"{render_bytes(speed)}/s within {render_bytes(size)}" for size, speed in device.cache_bandwidths]
    parts += [f"{name} {render_count(peak)}FLOP/s" for name, peak in device.peak_flops]
    return ", ".join(parts + [text for text in map(_extra, device.extra) if text])


#: Which of a device's further facts help to write code, and how the sheet calls them.
_EXTRA = {
    "isa": "instructions",
    "l1d_bytes": "L1D",
    "l3_bytes": "L3",
    "max_threads_per_sm": "threads per SM",
    "max_blocks_per_sm": "blocks per SM",
    "registers_per_sm": "registers per SM",
    "shared_bytes_per_sm": "shared memory per SM",
}


def _extra(fact: tuple[str, str]) -> str:
    key, value = fact
    if key not in _EXTRA:
        return ""
    shown = render_bytes(int(value)) if key.endswith("_bytes") and value.isdigit() else value.replace(",", " ")
    return f"{_EXTRA[key]} {shown}"


def render_baselines(baselines: Sequence[Baseline]) -> str:
    return "\n".join(_baseline(line) for line in baselines) or "- not timed"


#: A bound counts every byte at the speed of main memory and every operation of the original at the measured peak. What
#: runs below it has data in a cache, or saves operations, or meets a peak measured too low: nobody knows which.
_BELOW = "already below it: it says nothing here"


def _baseline(line: Baseline) -> str:
    parts = [f"eager {render_ns(line.eager.median_ns)}"]
    parts.append(f"torch.compile {render_ns(line.compile.median_ns)}" if line.compile else "no torch.compile time")
    if line.roofline_ns:
        best = min(sample.median_ns for sample in (line.eager, line.compile) if sample)
        room = best / line.roofline_ns
        reach = f"up to {room:.3g}x faster is possible" if room > 1 else _BELOW
        parts.append(f"bound {render_ns(line.roofline_ns)} ({reach})")
    return f"- {line.workload}: " + ", ".join(parts)


def render_generated(baselines: Sequence[Baseline]) -> str:
    """What torch.compile wrote for the first workload of which its code is known; "" where it is of none."""
    line = next((line for line in baselines if line.generated), None)
    if line is None:
        return ""
    triton = "@triton.jit" in line.generated
    hint = "" if triton else "; `at::vec` and torch's headers are not there for you"
    return (
        f"torch.compile's own kernels for workload {line.workload}, the baseline to beat (the comments show the calls "
        f"that run them{hint}):\n\n{fence(line.generated, 'python' if triton else 'cpp')}"
    )


# -- the candidate -----------------------------------------------------------------------------------------------


def render_files(candidate: Candidate) -> str:
    """Each file fenced, in the form that a reply has, too."""
    return "\n\n".join(
        fence(text, f"{INFO_STRINGS.get(name, 'text')} {name}") for name, text in sorted(candidate.files)
    )


_LEFT_OUT_CHARACTERS = len("\n[... 100 characters left out ...]\n")


def shorten(text: str, limit: int = MAX_LOG_CHARACTERS) -> str:
    """The head of ``text``, and a little of its end: a compiler's first error is the one that counts."""
    text = text.strip()
    # To say that something is missing takes room, too.
    if len(text) <= limit + _LEFT_OUT_CHARACTERS:
        return text
    head = limit * 4 // 5
    return f"{text[:head].rstrip()}\n[... {len(text) - limit} characters left out ...]\n{text[head - limit :].lstrip()}"


def render_verdict(evaluation: Evaluation) -> str:
    """Why a candidate did not pass: the reason, the build log, or where and how the outputs differ."""
    # A reason may quote the candidate (a plan's own message, a compiler's line), so it is fenced like its files.
    reason = fence(shorten(evaluation.reason, 1500), "text") if evaluation.reason else ""
    log = evaluation.build.log if evaluation.build and not evaluation.verification else ""
    quoted = evaluation.reason.partition(": ")[2]
    parts = [f"Status {evaluation.status.value}.", "" if quoted and quoted in log else reason]
    if log:
        parts.append("Build log:\n" + fence(shorten(log), "text"))
    if evaluation.verification:
        parts.append(render_verification(evaluation.verification))
    return "\n\n".join(part for part in parts if part)


def render_verification(verification: Verification) -> str:
    """Failed cases in full (the first few), passed ones by name: what does work narrows the cause down."""
    failed = [case for case in verification.cases if case.contract and not case.passed]
    passed = [case for case in verification.cases if case.contract and case.passed]
    lines: list[str] = []
    for place, case in enumerate(failed):
        lines.append(f"- failed: {_case(case)}")
        shown = case.mismatches[:MAX_MISMATCHES] if place < MAX_DETAILED_CASES else ()
        lines += [f"  - {_mismatch(mismatch)}" for mismatch in shown]
    if passed:
        lines.append("- passed: " + ", ".join(dict.fromkeys(f"{case.workload}/{case.case}" for case in passed)))
    return shorten("\n".join(lines))


def _case(case: CaseResult) -> str:
    ratio = "" if case.error_ratio is None else f", error ratio {case.error_ratio:.4g}"
    bound = "" if case.bound is None else f" (bound {case.bound:.4g})"
    return f"workload {case.workload}, inputs {case.case}{ratio}{bound}" + (f"; {case.note}" if case.note else "")


def _mismatch(mismatch: Mismatch) -> str:
    parts = [f"{mismatch.output}: {mismatch.kind}: {mismatch.detail}"]
    if mismatch.error_ratio is not None:
        bound = "" if mismatch.bound is None else f" of at most {mismatch.bound:.4g}"
        parts.append(f"error ratio {mismatch.error_ratio:.4g}{bound}")
    if mismatch.index is not None:
        got, expected = (f"{value:.9g}" if value is not None else "?" for value in (mismatch.got, mismatch.expected))
        parts.append(f"worst at {list(mismatch.index)}: got {got}, expected {expected}")
    if mismatch.pattern:
        parts.append(f"pattern: {mismatch.pattern}")
    return "; ".join(parts)


def render_timing(timing: Timing) -> str:
    compiled = f", {timing.speedup_compile:.3g}x vs torch.compile" if timing.speedup_compile else ""
    lines = [f"Speedup {timing.speedup_eager:.3g}x vs eager{compiled} ({timing.decision})."]
    lines += [_workload_timing(line) for line in timing.workloads]
    if timing.own_share is not None and timing.own_share < 0.995:
        alone = "what the library calls, timed by themselves, leave of it"
        lines.append(f"Own kernels take {timing.own_share:.0%} of the time by the clock: {alone}.")
    if timing.note:
        lines.append(timing.note)
    return "\n".join(lines)


def _workload_timing(line: WorkloadTiming) -> str:
    times = [f"now {_sample(line.candidate)}", f"eager {render_ns(line.eager.median_ns)}"]
    if line.compile:
        times.append(f"torch.compile {render_ns(line.compile.median_ns)}")
    if line.roofline_ns:
        share = line.roofline_ns / line.candidate.median_ns
        reach = f"reached to {share:.0%}" if share <= 1 else _BELOW
        times.append(f"bound {render_ns(line.roofline_ns)} ({reach})")
    return f"- {line.workload}: {', '.join(times)}; {line.launches} launch{'es' if line.launches != 1 else ''}"


def _sample(sample: Sample) -> str:
    return f"{render_ns(sample.median_ns)} ({render_ns(sample.low_ns)} to {render_ns(sample.high_ns)})"


def render_resources(build: Build | None) -> str:
    """Registers, shared memory and spills of each kernel; "" where the language has none (cpp)."""
    lines = [line for line in map(_resources, build.kernels if build else ()) if line]
    return "Kernels as compiled:\n" + "\n".join(lines) if lines else ""


def _resources(kernel: KernelResources) -> str:
    known = (
        ("registers", kernel.registers, ""),
        ("static shared memory", kernel.static_shared_bytes, " B"),
        ("local memory", kernel.local_bytes, " B"),
        ("spills", kernel.spill_bytes, " B"),
        ("at most", kernel.max_threads, " threads a block"),
    )
    parts = [f"{name} {value}{unit}" for name, value, unit in known if value is not None]
    name = kernel.kernel.replace("`", "'")
    return f"- `{name}`: {', '.join(parts)}" if parts else ""
