"""Pages of Nsight Compute 2025.3.1 from an H200, one set for each planted fault (without columns that nobody reads)."""

from __future__ import annotations

import csv
import functools
import io
from dataclasses import replace
from pathlib import Path

import planted_faults
import pytest
import torch
from evidence_numbers import foreign
from planted_faults import FAULTS, Fault

from pytest_cudaforge import evidence, languages
from pytest_cudaforge.evaluation.building import Product
from pytest_cudaforge.evaluation.counter_reading import profile_of, readable_name
from pytest_cudaforge.evaluation.profiling import ProfiledCall, static_profile
from pytest_cudaforge.hardware import metrics, ncu
from pytest_cudaforge.hardware.diagnosis import diagnose
from pytest_cudaforge.languages import units_of
from pytest_cudaforge.plan import TensorSpec
from pytest_cudaforge.records import (
    DeviceFacts,
    Evaluation,
    Isolation,
    Profile,
    Status,
    Target,
    TargetFacts,
    WorkloadFacts,
    from_json,
    to_json,
)
from pytest_cudaforge.runtime.library import MetaShapes
from pytest_cudaforge.runtime.signature import Signature, flatten_call
from pytest_cudaforge.runtime.trace import trace

PAGES = Path(__file__).parent / "data" / "ncu"
H200 = DeviceFacts(
    kind="cuda",
    name="NVIDIA H200",
    arch="sm_90",
    sm_count=132,
    l2_bytes=60 << 20,
    bandwidth_bytes_per_s=4.2e12,
    extra=(
        ("max_blocks_per_sm", "32"),
        ("max_threads_per_sm", "2048"),
        ("registers_per_sm", "65536"),
        ("shared_bytes_per_sm", "233472"),
    ),
)


def _call(fault: Fault) -> ProfiledCall:
    cuda = languages.load("cuda")
    if reason := cuda.availability():
        pytest.skip(reason)
    shape = (64, 1 << 18) if fault.target == "scaled" else (4096, 4096)
    spec = TensorSpec(shape, "float32", (shape[1], 1))
    tree = flatten_call((torch.empty(1),), {})[1]
    nbytes = spec.extent_bytes
    workload = WorkloadFacts("default", (("0", spec),), tree, (), None, nbytes, 0, nbytes, 0)
    facts = TargetFacts(
        "faults.py::target", "default", None, None, ("cuda",), 1.0, ("kernel",), "eval", False, False, "drawn", "all",
        (), False, None, (workload,),
    )  # fmt: skip
    target = Target("faults.py::target", "/", "faults.py", "target", "function", 1, "faults", "/", "target", "", "")
    traced = trace(fault.plan, Signature(workload.inputs, tree, None, H200, "cuda"), MetaShapes())
    binaries = tuple(cuda.compile(fault.source, unit, "sm_90") for unit in units_of(traced))
    return ProfiledCall(fault.candidate, target, facts, Product(workload, traced, binaries), H200)


@functools.cache
def _profile(name: str) -> Profile:
    fault = next(fault for fault in FAULTS if fault.name == name)
    call = _call(fault)
    pages = {page: (PAGES / f"{name}-{page}.csv").read_text() for page in ("raw", "details", "source")}
    return profile_of(call, static_profile(call, "full"), ncu.read_pages(pages))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_planted_fault_is_named_with_its_line(fault: Fault) -> None:
    profile = _profile(fault.name)
    assert profile.rung == "ncu" and profile.candidate == fault.candidate.digest
    assert all(kernel.own for kernel in profile.kernels)
    for found in diagnose(profile):
        assert found.bound == fault.bound, found
        assert len(found.figures) >= 2
        assert found.lines[0].line in fault.lines, [line.line for line in found.lines]
        assert found.lines[0].source == fault.source.splitlines()[found.lines[0].line - 1].strip()
    assert from_json(Profile, to_json(profile)) == profile


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_evidence_page_names_bound_and_line(fault: Fault) -> None:
    profile = _profile(fault.name)
    evaluation = Evaluation(
        Status.PASSED, "", profile.candidate, "", Isolation("A"), language="cuda", device="NVIDIA H200", profile=profile
    )
    text = evidence.page(evaluation).text
    assert evidence.estimate_tokens(text) <= evidence.MAX_TOKENS
    assert foreign(text, evaluation) == [], "every number stands in the stored profile"
    bounds = text.partition("What bounds it:")[2].strip().splitlines()[0]
    assert f": {fault.bound}: " in bounds
    assert int(bounds.rpartition(" At kernel.cu:")[2].rstrip(".")) in fault.lines
    hot = text.partition("Hot lines of the source:")[2].partition("```text\n")[2].partition("```")[0].splitlines()
    assert hot[0] == f"In `{profile.kernels[0].function}`:"
    shares = [float(line.partition(" ")[2].partition(" ")[0]) for line in hot[1:] if "% of samples" in line]
    assert len(profile.kernels) > 1 or (len(shares) > 2 and shares == sorted(shares, reverse=True))


@pytest.mark.parametrize(
    "fault", [f for f in FAULTS if f.name in ("spilling", "lonely", "travelling")], ids=lambda f: f.name
)
def test_what_binary_and_plan_tell_is_told_without_counters(fault: Fault) -> None:
    assert {found.bound for found in diagnose(static_profile(_call(fault), "quick"))} == {fault.bound}


def test_figures_are_what_the_page_says() -> None:
    profile = _profile("conflicting")
    (kernel,) = profile.kernels
    known = {name: (value, unit) for name, value, unit in kernel.metrics}
    # "88,128.00" ns, "16,366,060.00" conflicts
    assert kernel.duration_ns == 88128.0 and (kernel.grid, kernel.block) == ((128, 128, 1), (256, 1, 1))
    assert known["l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"] == (16366060.0, "")
    # In 169,204.18 cycles of 132 SMs.
    assert known["derived__shared_conflict_cycles_share"][0] == pytest.approx(73.28, abs=0.01)
    assert known["launch__registers_per_thread"] == (32.0, "register/thread")
    line = next(line for line in profile.lines if line.line == 10)
    figures = {name: value for name, value, _ in line.figures}
    assert figures["L1 Wavefronts Shared Excessive"] == 16252928.0
    rule = profile.rules[0]
    assert (rule.kernel, rule.rule, rule.speedup_percent) == ("tiles", "UncoalescedSharedAccess", 90.74)


def _without(page: str, words: tuple[str, ...]) -> str:
    """The source page without the columns whose names have one of these words."""
    rows, kept = list(csv.reader(io.StringIO(page))), list[int]()
    out = io.StringIO()
    for row in rows:
        if row[0] == "Line No":
            kept = [index for index, name in enumerate(row) if not any(word in name for word in words)]
        named = row[0] in ("File Path", "Function Name")
        csv.writer(out).writerow(row if named else [row[index] for index in kept if index < len(row)])
    return out.getvalue()


@pytest.mark.parametrize("name", ["scattered", "conflicting"])
def test_lines_need_no_columns_that_only_the_section_has(name: str) -> None:
    call = _call(next(fault for fault in FAULTS if fault.name == name))
    pages = {page: (PAGES / f"{name}-{page}.csv").read_text() for page in ("raw", "source")}
    whole = profile_of(call, static_profile(call, "quick"), ncu.read_pages(pages))
    pages["source"] = _without(pages["source"], ("Excessive", "Samples"))
    bare = profile_of(call, static_profile(call, "quick"), ncu.read_pages(pages))
    assert [line.line for line in bare.lines] == [line.line for line in whole.lines]
    assert diagnose(bare)[0].lines[0].figures[1:] == diagnose(whole)[0].lines[0].figures[1:]


def test_an_estimate_for_one_unit_is_no_estimate_for_the_kernel() -> None:
    rules = {rule.rule: rule.speedup_percent for rule in _profile("lonely").rules}
    assert rules["HighPipeUtilization"] is None and rules["LaunchConfiguration"] == 96.97


def test_a_few_waves_are_not_rounded_to_none() -> None:
    figures = {name: value for name, value, _ in _profile("lonely").kernels[0].metrics}
    assert figures["launch__waves_per_multiprocessor"] == pytest.approx(4 / (8 * 132))


def test_the_call_is_the_sum_of_its_kernels() -> None:
    profile = _profile("travelling")
    facts = {name: value for name, value, _ in profile.facts}
    assert [kernel.launches for kernel in profile.kernels] == [1, 1, 1]
    assert facts["kernel_time"] == sum(kernel.duration_ns or 0 for kernel in profile.kernels) == 144096.0
    assert facts["dram_bytes"] == 345644544.0 and facts["own_share"] == 100.0
    assert facts["derived__dram_bytes_by_minimal"] == pytest.approx(345644544 / facts["minimal_bytes"])


def test_times_and_bytes_are_those_inside_the_call() -> None:
    """From empty caches each kernel reads its input anew; the ones after the first find some of it in the L2."""
    call = _call(FAULTS[-1])
    reading = ncu.read_pages({"raw": (PAGES / "travelling-raw.csv").read_text()})
    counted = {"gpu__time_duration.sum": 3e4, "dram__bytes_read.sum": 1e6, "dram__bytes_write.sum": 2e6}
    figures = {name: (value, "") for name, value in counted.items()}
    inside = tuple(replace(launch, figures=figures) for launch in reading.kernels)
    profile = profile_of(call, static_profile(call, "quick"), reading, inside)
    facts = {name: value for name, value, _ in profile.facts}
    assert (facts["kernel_time"], facts["dram_bytes"]) == (9e4, 9e6)
    metrics_of = {name: value for name, value, _ in profile.kernels[0].metrics}
    assert profile.kernels[0].duration_ns == metrics_of["in_call__duration"] == 3e4
    assert metrics_of["in_call__dram_bytes"] == 3e6 and metrics_of["gpu__time_duration.sum"] > 4e4
    assert metrics_of["in_call__dram_share_of_ceiling"] == pytest.approx(100 * 1e11 / 4.2e12)
    assert {found.bound for found in diagnose(profile)}.isdisjoint({"redundant global traffic"})


#: Of a kernel that copies asynchronously to shared memory (an H200's ncu, a product of 64 by 64 tiles): by addresses a
#: third of its sectors is in excess, and wavefronts conflict which the hardware never served.
COPYING = {
    "memory_l2_theoretical_sectors_global": 6561792.0, "memory_l2_theoretical_sectors_global_ideal": 4464640.0,
    "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum": 4857856.0,
    "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum": 131767.0,
    "memory_l1_wavefronts_shared": 5898240.0, "memory_l1_wavefronts_shared_ideal": 4194304.0,
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum": 175.0, "sm__cycles_active.avg": 77309.0,
    "device__attribute_multiprocessor_count": 132.0, "launch__waves_per_multiprocessor": 0.97,
}  # fmt: skip


def test_what_was_counted_goes_before_what_addresses_suggest() -> None:
    figures = {name: (value, "") for name, value in COPYING.items()}
    derived = {name: value for name, value, _ in metrics.derived(figures)}
    assert derived["derived__global_excess_sectors_share"] == pytest.approx(10.52, abs=0.01)
    assert derived["derived__shared_conflict_cycles_share"] < 0.01
    assert metrics.contradicted(figures) == {"global", "shared"}
    call = _call(FAULTS[0])
    symbol = call.product.binaries[0].kernels[0].symbol
    launch = ncu.RawKernel(0, symbol, (4, 64, 1), (256, 1, 1), figures)
    texts = {
        "UncoalescedGlobalAccess": "2097152 excessive sectors",
        "UncoalescedSharedAccess": "excessive wavefronts",
        "TheoreticalOccupancy": "limited by the number of required registers",
        "MemoryCacheAccessPattern": "for global loads from L2: only 32.0 of the 32 bytes of a sector are used",
        "FPInstructions": "5 non-fused",
    }
    rules = tuple(ncu.RawRule(0, name, text, 30.0) for name, text in texts.items())
    excess = {"L2 Theoretical Sectors Global Excessive": 4.0, "L1 Wavefronts Shared Excessive": 3.0, "# Samples": 9.0}
    lines = (ncu.SourceLine(symbol, "kernel.cu", 5, "", excess),)
    profile = profile_of(call, static_profile(call, "full"), ncu.Reading((launch,), rules, lines))
    assert [rule.rule for rule in profile.rules] == ["FPInstructions"]
    assert [name for name, _, _ in profile.lines[0].figures] == ["samples"]


def test_lines_of_an_assembler_statement_are_told_with_it() -> None:
    source = 'void f() {\n  asm(\n      "mma.sync {%0};"\n      : "+f"(c)\n      : "r"(a));\n}\n'
    call = _call(FAULTS[0])
    symbol = call.product.binaries[0].kernels[0].symbol
    lines = tuple(ncu.SourceLine(symbol, "kernel.cu", n, "", {"# Samples": 9.0 - n}) for n in (5, 6))
    launch = ncu.RawKernel(0, symbol, (1, 1, 1), (32, 1, 1), {})
    call = replace(call, candidate=replace(FAULTS[0], source=source).candidate)
    told = profile_of(call, static_profile(call, "quick"), ncu.Reading((launch,), (), lines)).lines
    assert [line.source for line in told] == ['asm( "mma.sync {%0};" : "+f"(c) : "r"(a));', "}"]


def test_one_launch_stands_for_all_of_its_shape() -> None:
    fault = FAULTS[-1]
    doubling = '    launch("twice", grid=x.numel() // 256, block=256, args=(x, a))\n'
    assert doubling in fault.plan
    call = _call(replace(fault, plan=fault.plan.replace(doubling, 5 * doubling)))
    pages = {"raw": (PAGES / "travelling-raw.csv").read_text()}
    profile = profile_of(call, static_profile(call, "quick"), ncu.read_pages(pages), once=True)
    assert {kernel.function: kernel.launches for kernel in profile.kernels} == {
        "twice": 5,
        "increment": 1,
        "positive": 1,
    }
    assert profile.kernels[0].function == "twice" and profile.kernels[0].duration_ns == 5 * 48320.0
    assert dict((name, value) for name, value, _ in profile.facts)["kernel_time"] == 144096.0 + 4 * 48320.0
    assert any("stands" in note or "one launch" in note for note in profile.notes)


def test_kernels_that_are_not_in_the_report_are_not_lost() -> None:
    page = (PAGES / "travelling-raw.csv").read_text().splitlines(keepends=True)
    call = _call(FAULTS[-1])
    reading = ncu.read_pages({"raw": "".join(line for line in page if "increment" not in line)})
    profile = profile_of(call, static_profile(call, "quick"), reading)
    assert [kernel.function for kernel in profile.kernels if kernel.duration_ns is None] == ["increment"]
    assert any("not in ncu's report" in note for note in profile.notes)
    assert profile_of(call, static_profile(call, "quick"), ncu.read_pages({"raw": "".join(page)})).notes == ()


def test_metrics_that_the_device_lacks_are_learnt_from_its_answer(tmp_path: Path) -> None:
    page = (PAGES / "lonely-raw.csv").read_text()
    asked = metrics.chosen(None)
    assert {name for names in metrics.floor() for name in names} <= set(asked) and len(metrics.floor()) == 24
    (kernel,) = ncu.parse_raw(page)
    lacking = metrics.lacking(set(kernel.figures))
    assert "smsp__warp_issue_stalled_memory_dependency_per_warp_active.pct" in lacking
    file = tmp_path / "kept" / "answers.json"
    assert metrics.load_unknown(file) is None
    metrics.store_unknown(file, lacking)
    known = metrics.load_unknown(file)
    assert known == lacking
    again = metrics.chosen(known)
    assert not set(again) & lacking and "smsp__warp_issue_stalled_lg_throttle_per_warp_active.pct" in again
    file.write_text("{")
    assert metrics.load_unknown(file) is None


_ANONYMOUS = "_GLOBAL__N__a1b2c3d4_12_SoftMax_cu"


@pytest.mark.parametrize(
    ("symbol", "name"),
    [
        ("_Z5twicePKfPf", "twice"),
        ("sm90_xmma_gemm_f32f32_tf32f32_f32_nn_n", "sm90_xmma_gemm_f32f32_tf32f32_f32_nn_n"),
        ("_ZN2at6native18elementwise_kernelILi4ENS0_11FillFunctorIfEEEEviT0_T1_", "at::native::elementwise_kernel"),
        (f"_ZN2at6native{len(_ANONYMOUS)}{_ANONYMOUS}7softmaxEv", "at::native::softmax"),
    ],
)
def test_names_of_a_librarys_kernels(symbol: str, name: str) -> None:
    assert readable_name(symbol) == name


@pytest.mark.parametrize(
    "text",
    [
        "",
        "==PROF== Connected\n",
        '"ID","Kernel Name"\n',
        "\x00\x01,\n,,\n",
        "ID,Kernel Name\n,\nx,y\n",
        "File Path\nLine No\n1\n",
        f"Line No,Source\n{'9' * 5000},x\n",
        f'ID,Kernel Name\n,\n0,"{"x" * 200_000}"\n',
        "a\rb,\x00\n",
    ],
    ids=range(9),
)
def test_what_is_no_page_holds_nothing(text: str) -> None:
    assert not any(kernel.figures for kernel in ncu.parse_raw(text))
    assert ncu.parse_rules(text) == () and ncu.parse_source(text) == ()


def test_the_planted_kernels_know_their_lines() -> None:
    assert all(fault.lines for fault in FAULTS) and not planted_faults.HONEST_ONE.lines
