"""compute-sanitizer's logs as findings, the call as its replay wants it, and what a cubin says of itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from known_ceilings import cache_with_ceilings

from pytest_cudaforge import languages
from pytest_cudaforge.discovery import discover
from pytest_cudaforge.errors import BuildFailure
from pytest_cudaforge.evaluation.building import Product
from pytest_cudaforge.evaluation.cases import call_layout
from pytest_cudaforge.evaluation.evaluator import Evaluator, EvaluatorSettings
from pytest_cudaforge.evaluation.oracle import ExportedArena, OracleClient
from pytest_cudaforge.evaluation.sanitizer import Sanitizer, find_sanitizer, parse_log
from pytest_cudaforge.evaluation.sanitizing import joined
from pytest_cudaforge.evaluation.trusted_replay import buffers_of
from pytest_cudaforge.languages import Unit
from pytest_cudaforge.languages.cubin import same_code, sections, uses_transaction_barriers
from pytest_cudaforge.plan import TensorSpec
from pytest_cudaforge.records import (
    Candidate,
    SanitizerFinding,
    SanitizerReport,
    Verification,
    WorkloadFacts,
    from_json,
    to_json,
)
from pytest_cudaforge.runtime.signature import Signature, flatten_call
from pytest_cudaforge.runtime.trace import trace

OUT_OF_BOUNDS = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at scale+0x90 in kernel.cu:6
=========     by thread (0,0,0) in block (4,0,0)
=========     Address 0x710fdc800400 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x710fdc800000 of size 1,024 bytes
=========
========= Invalid __global__ write of size 4 bytes
=========     at scale+0x90 in kernel.cu:6
=========     by thread (1,0,0) in block (4,0,0)
=========     Address 0x710fdc800404 is out of bounds
=========     and is 5 bytes after the nearest allocation at 0x710fdc800000 of size 1,024 bytes
=========
========= Invalid __shared__ read of size 4 bytes
=========     at 0x120 in kernel.cu:9:scale(float *)
=========     by thread (1,0,0) in block (4,0,0)
=========     Address 0x400 is out of bounds
=========
========= ERROR SUMMARY: 3 errors
"""

RACES = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at flip+0x90 in kernel.cu:4
=========     and Read access at flip+0x100 in kernel.cu:5 [508 hazards]
=========
========= Warning: Race reported between Write access at flip+0x190
=========     and Write access at flip+0x200 [4 hazards]
=========     and Read access at flip+0x210 [8 hazards]
=========
========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""


def test_equal_reports_are_one_finding() -> None:
    parsed = parse_log("memcheck", OUT_OF_BOUNDS)
    assert parsed.complete and not parsed.trouble
    first, second = parsed.records
    assert (first.kind, first.function, first.place, first.count) == (
        "Invalid __global__ write of size 4 bytes",
        "scale",
        "kernel.cu:6",
        2,
    )
    assert first.grave and "0x710fdc800400" in first.detail
    assert (second.function, second.place) == ("scale(float *)", "kernel.cu:9")


def test_races_keep_their_severity_and_both_places() -> None:
    error, warning = parse_log("racecheck", RACES).records
    assert error.grave and error.count == 508 and error.place == "kernel.cu:4 and kernel.cu:5"
    assert error.kind == "race in shared memory: write against read"
    assert not warning.grave and warning.count == 12 and warning.place == "+0x190 and +0x200 and +0x210"


@pytest.mark.parametrize(
    ("text", "complete"),
    [
        ("========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n", True),
        ("========= COMPUTE-SANITIZER\n========= Error: Target application terminated before first API call\n", False),
        ("", False),
    ],
)
def test_only_a_summary_is_a_clean_run(text: str, complete: bool) -> None:
    parsed = parse_log("memcheck", text)
    assert parsed.complete is complete and not parsed.records


def test_what_the_tool_says_of_itself_is_no_finding() -> None:
    text = (
        "========= Warning: Detected overflow of tracked cuda::barrier structures. Results might be incorrect. Try\n"
        "========= Internal Sanitizer Error: out of memory\n"
    )
    parsed = parse_log("racecheck", text + RACES)
    assert parsed.lost_track and parsed.trouble and len(parsed.records) == 2


def test_a_summary_that_somebody_else_wrote_takes_nothing_back() -> None:
    forged = OUT_OF_BOUNDS.replace("kernel.cu:6", "x\x1b[2J:6\n========= ERROR SUMMARY: 0 errors", 1)
    parsed = parse_log("memcheck", forged)
    assert any(record.kind.startswith("Invalid __global__ write") for record in parsed.records)
    assert all("\x1b" not in record.place + record.function for record in parsed.records)


def test_a_report_goes_to_json_and_back() -> None:
    finding = SanitizerFinding("memcheck", "Invalid", "scale", "kernel.cu:6", 2, True, "output 1")
    verification = Verification((), "fp64", None, sanitizer=SanitizerReport("default", ("memcheck",), (finding,)))
    assert from_json(Verification, json.loads(json.dumps(to_json(verification)))) == verification
    assert verification.sanitizer is not None and verification.sanitizer.refusal == finding
    # Verdicts that were stored before there was one.
    assert from_json(Verification, {"cases": [], "oracle": "fp64", "worst_ratio": None}).sanitizer is None


def test_gradients_are_looked_at_too() -> None:
    finding = SanitizerFinding("memcheck", "Invalid", "dx", "kernel.cu:6", 2, True)
    forward = SanitizerReport("default", ("memcheck", "initcheck"), seconds=2.0)
    backward = SanitizerReport("default~", ("memcheck",), (finding,), ("initcheck was left out",), 1.5)
    both = joined(forward, backward)
    assert both.tools == ("memcheck",) and both.refusal == finding and both.seconds == 3.5
    assert both.notes == ("default~: initcheck was left out",)


# -- the call ------------------------------------------------------------------------------------------------------

SOURCE = """
extern "C" __global__ void twice(const float* x, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = 2.f * x[i];
}
extern "C" __global__ void flip(float* x) {
  __shared__ float part[64];
  part[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = part[63 - threadIdx.x];
}
extern "C" __global__ void wait(float* x) {
  __shared__ unsigned long long barrier;
  unsigned place = (unsigned)__cvta_generic_to_shared(&barrier);
  if (threadIdx.x == 0) asm volatile("mbarrier.init.shared.b64 [%0], 64;" ::"r"(place));
  __syncthreads();
  asm volatile("{ .reg .b64 t; .reg .pred p; mbarrier.arrive.shared.b64 t,[%0];"
               "W: mbarrier.test_wait.shared.b64 p,[%0],t; @!p bra W; }" ::"r"(place) : "memory");
  x[threadIdx.x] += 1;
}
"""

PLAN = """
from pytest_cudaforge.plan import empty, launch, op

def plan(x):
    n = x.numel()
    half, y = empty(x.shape, x.dtype), empty(x.shape, x.dtype)
    launch("twice", grid=(1,), block=(256,), args=(x, half, n))
    product = op("aten.mm", half, x)
    launch("twice", grid=(1,), block=(256,), args=(product, y, n))
    return y
"""


def traced_product(plan_source: str = PLAN) -> Product:
    from pytest_cudaforge.hardware import detect
    from pytest_cudaforge.runtime.library import MetaShapes

    spec = TensorSpec((8, 8), "float32", (8, 1))
    facts = WorkloadFacts("default", (("0", spec),), [["0"], {}], (), None, 256, 0, 256, 0)
    signature = Signature((("0", spec),), flatten_call((torch.zeros(8, 8),), {})[1], None, detect("cpu"), "cuda")
    return Product(facts, trace(plan_source, signature, MetaShapes()), ())


def test_every_buffer_has_memory_of_its_own_and_only_inputs_have_values() -> None:
    product = traced_product()
    layout = call_layout(product.traced, frames=1)
    buffers = buffers_of(product, layout)
    by_name = {name: (nbytes, offset, fill) for name, nbytes, offset, fill in buffers.memory}
    assert by_name["input/0"] == (256, layout.offsets["f0/input/0"], None)
    outputs = [entry for name, entry in by_name.items() if name.startswith("output")]
    assert outputs == [(256, None, None)]
    # One scratch buffer a kernel writes, the other the library: what it would have written is filled in.
    scratch = sorted(entry[2] or 0 for name, entry in by_name.items() if name.startswith("scratch"))
    assert scratch == [0, 0x3C]
    assert len(buffers.main) == len(product.traced.main.buffers)
    assert all(shift == 0 for _, shift in buffers.main)


def cubin(*, lineinfo: bool) -> bytes:
    language = languages.load("cuda")
    if reason := language.availability():
        pytest.skip(reason)
    unit = Unit((), ("twice", "flip", "wait"))
    return language.compile(SOURCE, unit, "sm_90", lineinfo=lineinfo).code


def test_line_numbers_leave_the_code_as_it_is() -> None:
    plain, lined = cubin(lineinfo=False), cubin(lineinfo=True)
    assert plain != lined and same_code(plain, lined)
    position = plain.index(sections(plain)[".text.twice"])
    other = plain[: position + 8] + bytes([plain[position + 8] ^ 1]) + plain[position + 9 :]
    assert not same_code(other, lined)


def test_mbarriers_show_in_the_cubin() -> None:
    code = cubin(lineinfo=False)
    assert uses_transaction_barriers(code, "wait")
    assert not uses_transaction_barriers(code, "flip") and not uses_transaction_barriers(code, "twice")


@pytest.mark.parametrize("data", [b"", b"\x7fELF\x02\x01" + b"\xff" * 100, b"MZ" * 100])
def test_what_is_no_cubin_is_told(data: bytes) -> None:
    with pytest.raises(BuildFailure, match="cannot be read"):
        sections(data)


# -- what refuses --------------------------------------------------------------------------------------------------

#: Of compute-sanitizer 2025.3.1 on an H200.
OVERRUN = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at twice+0xa0 in kernel.cu:4
=========     by thread (255,0,0) in block (15,0,0)
=========     Access to 0x7f6be6804000 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f6be6800000 of size 16,384 bytes
=========
========= ERROR SUMMARY: 1 error
"""
UNWRITTEN = """\
========= COMPUTE-SANITIZER
========= Uninitialized __global__ memory read of size 4 bytes
=========     at KERNEL+0xa0 in kernel.cu:4
=========     by thread (64,0,0) in block (14,0,0)
=========     Address 0x7f6be6900004
=========
========= ERROR SUMMARY: 200 errors
========= ERROR SUMMARY: 3896 errors were not printed. Use --print-limit option to adjust the number of printed errors
"""


def findings(
    tool: str, log: str, buffers: list[list[object]], product: Product, *, lost: bool = False
) -> list[SanitizerFinding]:
    sanitizer, parsed = Sanitizer(Path("/bin/false"), "cuda:0"), parse_log(tool, log)
    outcome = {"done": True, "buffers": buffers}
    return [sanitizer._judged(tool, record, product, outcome, lost or parsed.lost_track) for record in parsed.records]


@pytest.fixture(scope="module")
def compiled() -> Product:
    language = languages.load("cuda")
    if reason := language.availability():
        pytest.skip(reason)
    binary = language.compile(SOURCE, Unit((), ("twice", "flip", "wait")), "sm_90")
    return replace(traced_product(), binaries=(binary,))


def test_an_access_out_of_bounds_refuses_and_names_the_buffer(compiled: Product) -> None:
    (found,) = findings("memcheck", OVERRUN, [["input/0", 0x7F6BE6800000, 16384]], compiled)
    assert found.refuses and found.kernel == "twice" and found.place == "kernel.cu:4"
    assert found.detail == "input/0, 1 bytes behind its end"


@pytest.mark.parametrize(("name", "refuses"), [("output 2", True), ("scratch 1", False), ("prepared/0", False)])
def test_only_unwritten_outputs_refuse(compiled: Product, name: str, refuses: bool) -> None:
    buffers: list[list[object]] = [["input/0", 0x7F6BE6800000, 16384], [name, 0x7F6BE6900000, 64]]
    (found,) = findings("initcheck", UNWRITTEN.replace("KERNEL", "twice"), buffers, compiled)
    assert found.refuses is refuses and found.detail == f"{name}, byte 4 of 64"
    (bulk,) = findings("initcheck", UNWRITTEN.replace("KERNEL", "wait"), buffers, compiled)
    assert not bulk.refuses


def test_races_refuse_where_nothing_unseen_orders_them(compiled: Product) -> None:
    error, warning = findings("racecheck", RACES, [], compiled)
    assert error.refuses and error.kernel == "flip" and not warning.refuses
    assert not any(found.refuses for found in findings("racecheck", RACES.replace("flip", "wait"), [], compiled))
    assert not any(found.refuses for found in findings("racecheck", RACES, [], compiled, lost=True))


# -- the processes -------------------------------------------------------------------------------------------------


def test_a_tool_that_does_not_run_refuses_nothing(tmp_path: Path) -> None:
    product = traced_product(PLAN.replace('op("aten.mm", half, x)', "half"))
    layout = call_layout(product.traced, frames=1)
    (tmp_path / "values").write_bytes(b"\0" * layout.data["nbytes"])
    with open(tmp_path / "values", "rb") as values:
        arena = ExportedArena(values.fileno(), layout.data["nbytes"])
        report = Sanitizer(Path("/bin/false"), "cuda:0").examine(product, layout, arena)
    assert report.tools == () and report.findings == () and report.refusal is None
    assert [note.split()[0] for note in report.notes] == ["memcheck", "racecheck", "initcheck"]


def test_the_replay_says_why_it_could_not(tmp_path: Path) -> None:
    call = {"traced": {}, "binaries": [], "device": "cuda:63", "limit_s": 30, "memory": [], "main": [], "prepare": []}
    (tmp_path / "call.json").write_text(json.dumps(call))
    (tmp_path / "values.bin").write_bytes(b"")
    argv = [sys.executable, "-m", "pytest_cudaforge.evaluation.sanitized_replay", str(tmp_path)]
    root = str(Path(languages.__file__).resolve().parents[2])
    subprocess.run(argv, env={**os.environ, "PYTHONPATH": root}, check=True, timeout=60)
    outcome = json.loads((tmp_path / "outcome.json").read_text())
    assert outcome["done"] is False and "Error" in outcome["error"] and outcome["buffers"] == []


def test_the_tool_is_found_beside_a_toolkit(tmp_path: Path) -> None:
    program = tmp_path / "bin" / "compute-sanitizer"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert find_sanitizer({"CUDA_HOME": str(tmp_path), "PATH": ""}) == program
    assert find_sanitizer({"PATH": str(program.parent)}) == program


LAYERS = """
import torch
from pytest_cudaforge import forge_target

@forge_target(inputs=lambda: [torch.randn(8, 64)])
def doubled(x):
    return x * 2
"""

CPP = """
extern "C" void twice(const float* x, float* y, long n) { for (long i = 0; i < n; ++i) y[i] = 2.f * x[i]; }
"""

CPP_PLAN = """
from pytest_cudaforge.plan import empty, launch

def plan(x):
    y = empty(x.shape, x.dtype)
    launch("twice", args=(x, y, x.numel()))
    return y
"""


def test_asked_for_on_a_cpu_the_verdict_says_why_not(tmp_path: Path) -> None:
    (tmp_path / "layers.py").write_text(LAYERS)
    target = discover([tmp_path / "layers.py"], tmp_path).targets[0]
    candidate = Candidate.of("cpp", {"kernel.cpp": CPP, "plan.py": CPP_PLAN})
    settings = EvaluatorSettings(cache_dir=cache_with_ceilings(tmp_path / "cache"), lock_dir=tmp_path)
    with Evaluator(settings) as evaluator:
        verdict = evaluator.evaluate(candidate, target, timing=False, sanitize=True)
        winner = evaluator.evaluate(candidate, target, timing=False, fresh=True)
        by_hand = evaluator.evaluate(candidate, target, timing=False, sanitize=None)
    assert verdict.passed and winner.passed and by_hand.passed, verdict.reason
    assert by_hand.verification is not None and by_hand.verification.sanitizer is None
    assert verdict.verification is not None and verdict.verification.sanitizer is not None
    assert "on a GPU only" in verdict.verification.sanitizer.notes[0]
    assert winner.verification is not None and winner.verification.sanitizer is None


def test_a_copy_of_an_arena_holds_what_the_arena_holds(tmp_path: Path) -> None:
    (tmp_path / "layers.py").write_text(LAYERS)
    target = discover([tmp_path / "layers.py"], tmp_path).targets[0]
    layout = {
        "nbytes": 4096,
        "regions": [["f0/input/0", 256, 2048], ["f0/out/1", 2560, 1024]],
        "redzones": [],
        "frames": 1,
        "specs": {"f0/input/0": [[8, 64], "float32", [64, 1]]},
    }
    with OracleClient(cache_dir=tmp_path) as oracle:
        bench, arena = oracle.open_bench(target, "default", "", layout)
        oracle.fill_all(bench, [7], 0)
        values = oracle.snapshot(bench)
        oracle.close_bench(bench)
        copied, original = os.pread(values.fd, 4096, 0), os.pread(arena.fd, 4096, 0)
        values.close()
        arena.close()
    assert copied == original and any(copied[256:2304])
