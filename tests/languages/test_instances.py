"""Names of Triton instances: what a plan's launch is specialised on. No Triton needed."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from pytest_cudaforge.errors import PlanError
from pytest_cudaforge.languages.binary import (
    Binary,
    CompiledLaunch,
    KernelInfo,
    binary_from_bytes,
    binary_to_bytes,
    block_sizes,
    settled,
    units_of,
)
from pytest_cudaforge.languages.instances import OPTIONS, Instance, argument_word, parse_instance
from pytest_cudaforge.languages.parameters import argument_problem
from pytest_cudaforge.plan import Launch, LaunchPlan, TensorSpec, View, Zero, decode, encode
from pytest_cudaforge.records import DeviceFacts, KernelResources
from pytest_cudaforge.runtime.signature import Signature, describe_module
from pytest_cudaforge.runtime.trace import trace

H200 = DeviceFacts("cuda", "NVIDIA H200", "sm_90", sm_count=132, max_shared_bytes=227 << 10, memory_bytes=140 << 30)
ROWS = TensorSpec((64, 4096), "float32", (4096, 1))
PLAN = """
from pytest_cudaforge.plan import empty, launch

def plan(x):
    y = empty(x.shape, x.dtype)
    launch("relu", {})
    return y
"""


def traced(arguments: str, spec: TensorSpec = ROWS) -> Launch:
    signature = Signature.of((spec,), {}, None, H200, "triton")
    plan = trace(PLAN.format(arguments), signature)
    assert decode(json.loads(json.dumps(encode(plan)))) == plan
    (launch,) = plan.main.launches
    return launch


@pytest.mark.parametrize(
    ("value", "word"),
    [
        (View(0, (8,), (1,)), "*fp32:16"),
        (View(0, (8,), (1,), offset=4), "*fp32:16"),
        (View(0, (8,), (1,), offset=1), "*fp32"),
        (View(1, (8,), (1,), offset=8), "*bf16:16"),
        (View(1, (8,), (1,), offset=4), "*bf16"),
        (View(2, (8,), (1,)), "*i1:16"),
        (1, "1"),
        (True, "u1"),
        (None, "none"),
        (0.5, "fp32"),
        (1.0, "fp32"),
        (0, "i32:16"),
        (-16, "i32:16"),
        (7, "i32"),
        (2**31 - 1, "i32"),
        (2**31, "i64:16"),
        (-(2**31) - 1, "i64"),
        (2**63 + 1, "u64"),
    ],
)
def test_what_an_argument_is_specialised_on(value: Any, word: str) -> None:
    buffers = [TensorSpec((64,), dtype, (1,)) for dtype in ("float32", "bfloat16", "bool")]
    assert argument_word(value, buffers, 0) == word
    name = Instance("f", (word,), tuple(OPTIONS.items())).expression
    assert parse_instance(name).arguments == (word,)


def test_a_dtype_that_triton_has_not_is_named() -> None:
    with pytest.raises(PlanError, match=r"args\[3\] is a complex64 tensor"):
        argument_word(View(0, (8,), (1,)), [TensorSpec((8,), "complex64", (1,))], 3)


def test_a_launch_names_its_instance() -> None:
    launch = traced(
        "grid=(64,), args=(x, y, x.shape[1], 1e-5), constants={'BLOCK': 4096, 'is_causal': True}, num_warps=8"
    )
    assert launch.kernel == "relu<*fp32:16, *fp32:16, i32:16, fp32, num_warps=8, num_stages=3>"
    assert launch.constants == (("BLOCK", 4096), ("is_causal", 1)) and launch.block == (1, 1, 1)
    assert traced("args=(x,), num_ctas=2, maxnreg=64").kernel.endswith("num_stages=3, num_ctas=2, maxnreg=64>")


def test_an_option_goes_through_the_name() -> None:
    name = traced("args=(x, 5), num_warps=2, num_stages=1, num_ctas=4").kernel
    assert parse_instance(name) == Instance(
        "relu", ("*fp32:16", "i32"), (("num_warps", 2), ("num_stages", 1), ("num_ctas", 4), ("maxnreg", 0))
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("args=(x,), block=(256,)", "num_warps=4 gives 128 threads"),
        ("args=(x,), shared_bytes=64", "Triton takes what it needs"),
        ("args=(x,), cluster=2", "num_ctas=2"),
        ("args=(x,), num_warps=3", "num_warps is 3"),
        ("args=(x,), num_warps=64", "a power of two from 1 to 32"),
        ("args=(x,), num_stages=0", "num_stages is 0"),
        ("args=(x,), num_ctas=16", "num_ctas is 16"),
        ("args=(x,), num_warps=4.0", "num_warps is"),
        ("args=(x,), warps=4", "no argument 'warps'"),
        ("args=(x,), constants={'MODE': 'gelu'}", "a number"),
        ("args=(x,), constants={'a b': 1}", "the name"),
        ("args=" + "(x,) * 200", "args"),
    ],
)
def test_what_a_triton_launch_may_not_say(arguments: str, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        traced(arguments)
    assert message in str(caught.value)


@pytest.mark.parametrize("kernel", ["relu<float>", "a::relu", "relu(x)"])
def test_a_kernel_is_the_name_of_a_function(kernel: str) -> None:
    signature = Signature.of((ROWS,), {}, None, H200, "triton")
    source = PLAN.replace('"relu", {}', f'"{kernel}", args=(x, y)')
    with pytest.raises(PlanError, match=r"@triton\.jit function"):
        trace(source, signature)


@pytest.mark.parametrize("language", ["cuda", "cpp"])
def test_other_languages_have_no_warps_and_no_lower_case_constants(language: str) -> None:
    signature = Signature.of((ROWS,), {}, None, H200, language)
    for arguments in ("args=(x, y), num_warps=4", "args=(x, y), constants={'cols': 4}"):
        with pytest.raises(PlanError):
            trace(PLAN.format(arguments), signature)


@pytest.mark.parametrize(
    "name", ["", "relu", "relu<", "relu<float>", "relu<*fp32; i32>", "relu<warps=4>", "re lu<i32>", "r<num_warps=x>"]
)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError):
        parse_instance(name)


def kernel(**changes: int) -> KernelInfo:
    compiled = {"threads": 256, "shared_bytes": 1024, "cluster_blocks": 1, "scratch_pointers": 2}
    part = CompiledLaunch(**{**compiled, "code_start": 0, "code_bytes": 4, **changes})
    return KernelInfo("f<1>", "f", ("float*", "constexpr", "int"), KernelResources("f<1>"), part)


def test_a_launch_is_settled_by_what_the_compiler_decided() -> None:
    view = View(0, (8,), (1,))
    launch = Launch("f<1>", (view, 1, 7), grid=(3, 5, 2))
    complete, params = settled(launch, kernel(cluster_blocks=2))
    assert (complete.grid, complete.block, complete.cluster) == ((6, 5, 2), (256, 1, 1), (2, 1, 1))
    assert complete.shared_bytes == 1024 and complete.args == (view, 7, None, None)
    assert params == ("float*", "int", "void*", "void*")
    assert settled(launch, kernel())[0].cluster is None


def test_a_launch_of_the_plan_alone_stays_as_it_is() -> None:
    launch = Launch("f", (View(0, (8,), (1,)),), block=(64, 1, 1), shared_bytes=8)
    info = KernelInfo("f", "f", ("float*",), KernelResources("f"))
    assert settled(launch, info) == (launch, ("float*",))


def test_a_binary_keeps_what_the_compiler_decided() -> None:
    binary = Binary("triton", "sm_90", (("BLOCK", 4),), b"code", (kernel(),))
    assert binary_from_bytes(binary_to_bytes(binary)) == binary


@pytest.mark.parametrize(
    "changes",
    [
        {"threads": 0},
        {"threads": 2048},
        {"shared_bytes": -1},
        {"cluster_blocks": 0},
        {"scratch_pointers": 3},
        {"code_start": -1},
        {"code_start": 1},
        {"code_bytes": 5},
        {"code_bytes": -1},
    ],
)
def test_a_forged_launch_is_refused(changes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="out of bounds"):
        binary_from_bytes(binary_to_bytes(Binary("triton", "sm_90", (), b"code", (kernel(**changes),))))


def test_a_folded_parameter_takes_only_what_it_was_folded_for() -> None:
    assert argument_problem("constexpr", 1, None) == argument_problem("constexpr", None, None) == ("", "")
    for argument in (2, True, 1.0):
        assert argument_problem("constexpr", argument, None)[0]


def test_instances_with_equal_constants_are_one_unit() -> None:
    source = """
from pytest_cudaforge.plan import empty, launch

def plan(x):
    y = empty(x.shape, x.dtype)
    launch("f", args=(x, y))
    launch("g", args=(y, y))
    launch("f", args=(x[:, 1:], y))
    return y
"""
    units = units_of(trace(source, Signature.of((ROWS,), {}, None, H200, "triton")))
    end = "num_warps=4, num_stages=3>"
    (unit,) = units
    assert unit.kernels == tuple(
        f"{name}, {end}" for name in ("f<*fp32:16, *fp32:16", "g<*fp32:16, *fp32:16", "f<*fp32, *fp32:16")
    )


def test_what_prepare_returned_is_aligned_where_its_view_is() -> None:
    source = """
from pytest_cudaforge.plan import empty, launch

def prepare(module):
    w = empty((64,), "float32")
    launch("pack", args=(module.weight, w))
    return {"whole": w, "sum": 3, "from_one": w[1:], "from_four": w[4:]}

def plan(module, x, prepared):
    y = empty(x.shape, x.dtype)
    launch("f", args=(x, prepared["whole"], prepared["from_one"], prepared["from_four"], prepared["from_one"][3:], y))
    return y
"""
    module = describe_module(torch.nn.LayerNorm(64))
    launch = trace(source, Signature.of((ROWS,), {}, module, H200, "triton")).main.launches[0]
    aligned, anywhere = "*fp32:16", "*fp32"
    # What lies 3 elements behind a shifted beginning may be aligned, but is not promised to be.
    assert parse_instance(launch.kernel).arguments == (aligned, aligned, anywhere, aligned, anywhere, aligned)


def test_block_sizes_are_those_of_the_launches_as_the_device_gets_them() -> None:
    own = KernelInfo("g", "g", ("float*",), KernelResources("g"))
    binaries = (
        Binary("triton", "sm_90", (), b"code", (kernel(),)),
        Binary("cuda", "sm_90", (("N", 1),), b"code", (own,)),
    )
    steps = (
        Zero(0),
        Launch("f<1>", (View(0, (8,), (1,)), 1, 7)),
        Launch("g", (View(0, (8,), (1,)),), block=(8, 4, 2), constants=(("N", 1),)),
        Launch("g", (View(0, (8,), (1,)),), block=(8, 4, 2), constants=(("N", 1),)),
    )
    assert block_sizes(LaunchPlan((), steps, None), binaries) == {256, 64}
    assert block_sizes(LaunchPlan((), steps[:1], None), binaries) == frozenset()
