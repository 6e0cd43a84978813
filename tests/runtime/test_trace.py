"""plan.py files as an LLM writes them, traced; and every mistake it may make, with its message."""

from __future__ import annotations

import argparse
import json
import textwrap
from typing import Any

import pytest
import torch
from torch import nn

from pytest_cudaforge import plan as plans
from pytest_cudaforge.errors import PlanError, PlanLimitError, PlanSyntaxError, Unsupported
from pytest_cudaforge.plan import Launch, LaunchPlan, LibraryCall, TensorSpec, TracedPlan, View, Zero
from pytest_cudaforge.records import DeviceFacts
from pytest_cudaforge.runtime.signature import Signature, describe_module
from pytest_cudaforge.runtime.trace import trace

H200 = DeviceFacts(
    "cuda", "NVIDIA H200", "sm_90", sm_count=132, l2_bytes=60 << 20, max_shared_bytes=227 << 10, memory_bytes=140 << 30
)
CPU = DeviceFacts("cpu", "a CPU", "cpu", sm_count=0, memory_bytes=8 << 30)


def spec(*shape: int, dtype: str = "float32", strides: tuple[int, ...] | None = None) -> TensorSpec:
    return TensorSpec(shape, dtype, plans.contiguous_strides(shape) if strides is None else strides)


def traced(
    text: str, *args: Any, module: nn.Module | None = None, device: DeviceFacts = H200, **kwargs: Any
) -> TracedPlan:
    """Trace ``text``; checks in passing that the plan survives JSON and that scratch fits its layout."""
    described = None if module is None else describe_module(module)
    language = "cpp" if device.kind == "cpu" else "cuda"
    signature = Signature.of(args, kwargs, described, device, language)
    plan = trace(textwrap.dedent(text), signature)
    assert plans.decode(json.loads(json.dumps(plans.encode(plan), allow_nan=False))) == plan
    layout = plans.scratch_layout(plan.main)
    for index, offset in layout.offsets.items():
        assert offset + plan.main.buffers[index].spec.extent_bytes <= layout.total_bytes or offset == 0
    return plan


def launches(text: str, *args: Any, **kwargs: Any) -> tuple[Launch, ...]:
    return traced(text, *args, **kwargs).main.launches


class RMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = 1e-6


RMS_NORM = """
    from pytest_cudaforge.plan import empty, launch

    def plan(module, x):
        rows, cols = x.shape
        y = empty(x.shape, x.dtype)
        launch("rms_norm", grid=(rows,), block=(256,), args=(x, module.weight, y, cols, module.eps))
        return y
"""


def test_the_design_example() -> None:
    main = traced(RMS_NORM, spec(64, 4096), module=RMSNorm(4096)).main
    assert [(b.role, b.source) for b in main.buffers] == [("input", "0"), ("state", "weight"), ("scratch", "")]
    (launch,) = main.launches
    assert (launch.kernel, launch.grid, launch.block, launch.line) == ("rms_norm", (64, 1, 1), (256, 1, 1), 7)
    assert launch.args == (
        View(0, (64, 4096), (4096, 1)),
        View(1, (4096,), (1,)),
        View(2, (64, 4096), (4096, 1)),
        4096,
        1e-6,
    )
    assert main.outputs == View(2, (64, 4096), (4096, 1))
    assert main.output_buffers == {2}


# -- realistic plans ---------------------------------------------------------------------------------------------


def test_layer_norm_with_several_outputs_and_constants() -> None:
    text = """
        import math
        from pytest_cudaforge.plan import device, empty, launch

        def next_power_of_two(n):
            return 1 << max(0, (n - 1).bit_length())

        def plan(module, x, *, return_stats=False):
            *lead, cols = x.shape
            rows = x.numel() // x.shape[-1]
            y = empty(x.shape, x.dtype)
            mean = empty(lead, "float32")
            rstd = empty((*lead,), dtype="float32")
            vec = 4 if cols % 4 == 0 and x.dtype in ("float32", "bfloat16") else 1
            block = min(1024, max(32, next_power_of_two(cols // vec)))
            bias = module.bias if module.bias is not None else None
            launch(
                f"layer_norm<{'float' if x.dtype == 'float32' else '__nv_bfloat16'}, {vec}>",
                grid=min(rows, device.sm_count * 8),
                block=block,
                args=(x, module.weight, bias, y, mean, rstd, rows, cols, float(module.eps)),
                shared_bytes=block // 32 * 4 * 2,
                constants={"COLS": cols, "HAS_BIAS": bias is not None, "INV": 1.0 / cols},
            )
            return (y, mean, rstd) if return_stats else y
    """
    module = nn.LayerNorm(768)
    main = traced(text, spec(4, 128, 768), module=module, return_stats=True).main
    (launch,) = main.launches
    assert launch.kernel == "layer_norm<float, 4>" and launch.grid == (512, 1, 1) and launch.block == (256, 1, 1)
    assert launch.constants == (("COLS", 768), ("HAS_BIAS", 1), ("INV", 1.0 / 768))
    assert launch.shared_bytes == 64 and len(main.outputs) == 3 and main.outputs[1].shape == (4, 128)
    module = nn.LayerNorm(768, bias=False)
    main = traced(text, spec(4, 128, 768, dtype="bfloat16"), module=module).main
    (launch,) = main.launches
    assert launch.args[2] is None and launch.kernel == "layer_norm<__nv_bfloat16, 4>"
    assert isinstance(main.outputs, View)


MASKED_SOFTMAX = """
    from pytest_cudaforge.plan import empty, launch, Unsupported

    def plan(module, scores, mask=None, scale=1.0):
        if not scores.is_contiguous():
            raise Unsupported("needs contiguous scores")
        b, h, q, k = scores.shape
        out = empty(scores.shape, scores.dtype)
        kernel = "softmax_masked" if mask is not None else "softmax"
        strides = (0, 0, 0, 0)
        if mask is not None:
            full = mask.expand(b, h, q, k)
            strides = full.stride()
            launch(kernel, grid=(q, h, b), block=128, args=(scores, full, out, k, *strides, scale))
        else:
            launch(kernel, grid=(q, h, b), block=128, args=(scores, out, k, scale))
        return {"probs": out, "scale": scale}
"""


def test_masked_softmax_with_optional_mask() -> None:
    module = nn.Identity()
    (with_mask,) = launches(MASKED_SOFTMAX, spec(2, 4, 8, 16), spec(1, 1, 8, 16, dtype="bool"), module=module)
    assert with_mask.kernel == "softmax_masked" and with_mask.args[1] == View(1, (2, 4, 8, 16), (0, 0, 16, 1))
    assert with_mask.args[4:8] == (0, 0, 16, 1)
    plan = traced(MASKED_SOFTMAX, spec(2, 4, 8, 16), mask=None, scale=0.5, module=module)
    assert plan.main.launches[0].args[-1] == 0.5 and plan.main.outputs["scale"] == 0.5
    (keyword,) = launches(MASKED_SOFTMAX, spec(2, 4, 8, 16), mask=spec(8, 16), module=module)
    assert keyword.kernel == "softmax_masked"
    with pytest.raises(Unsupported, match=r"plan.py:6: needs contiguous scores"):
        traced(MASKED_SOFTMAX, spec(2, 4, 8, 16, strides=(1, 2, 8, 64)), module=module)


def test_rope_with_interleaved_slices() -> None:
    text = """
        from pytest_cudaforge.plan import empty, launch

        def plan(q, k, cos, sin):
            out = []
            for t in (q, k):
                assert t.shape[-1] % 2 == 0, "odd head size"
                y = empty(t.shape, t.dtype)
                even, odd = t[..., 0::2], t[..., 1::2]
                half = t.shape[-1] // 2
                first, second = t.chunk(2, dim=-1)
                launch("rope", grid=((t.numel() // 2 + 255) // 256,), block=(256,),
                       args=[even, odd, first, second, cos[: t.shape[2]], sin[:, None], y, half])
                out.append(y)
            return tuple(out)
    """
    q = spec(2, 8, 128, 64, dtype="float16")
    first, second = launches(text, q, q, spec(256, 64), spec(256, 64))
    assert first.args[0] == View(0, (2, 8, 128, 32), (65536, 8192, 64, 2), 0)
    assert first.args[1] == View(0, (2, 8, 128, 32), (65536, 8192, 64, 2), 1)
    assert first.args[3] == View(0, (2, 8, 128, 32), (65536, 8192, 64, 1), 32)
    assert first.args[5] == View(2, (256, 1, 64), (64, 64, 1))
    assert second.args[0].buffer != first.args[0].buffer


class SwiGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(64, 128, bias=False)
        self.up = nn.Linear(64, 128, bias=True)
        self.down = nn.Linear(128, 64)


def test_mlp_with_library_products() -> None:
    text = """
        from pytest_cudaforge.plan import empty, launch, op

        def linear(x, layer):
            if layer.bias is None:
                return op("aten.mm", x, layer.weight.t())
            return op("aten.addmm", layer.bias, x, layer.weight.t())

        def plan(module, x):
            flat = x.reshape(-1, x.shape[-1])
            g, u = linear(flat, module.gate), linear(flat, module.up)
            launch("swiglu", grid=(g.numel() + 255) // 256, block=256, args=(g, u, g.numel()))
            y = op("aten.linear", g, module.down.weight, module.down.bias)
            return y.view(*x.shape[:-1], module.down.out_features)
    """
    main = traced(text, spec(2, 8, 64), module=SwiGLU()).main
    kinds = [type(step).__name__ for step in main.steps]
    assert kinds == ["LibraryCall", "LibraryCall", "Launch", "LibraryCall"]
    assert main.library_calls[0] == LibraryCall(
        "aten.mm", (View(0, (16, 64), (64, 1)), View(1, (64, 128), (1, 64))), (), (2,), 6
    )
    assert main.outputs.shape == (2, 8, 64)
    sources = {buffer.source for buffer in main.buffers if buffer.role == "state"}
    assert sources == {"gate.weight", "up.weight", "up.bias", "down.weight", "down.bias"}
    layout = plans.scratch_layout(main)
    assert layout.total_bytes == 2 * 16 * 128 * 4


def test_convolution_through_op() -> None:
    text = """
        from pytest_cudaforge.plan import empty, launch, op

        def plan(module, x):
            conv = module.conv
            y = op("aten.convolution", x, conv.weight, conv.bias, conv.stride, conv.padding, conv.dilation,
                   False, [0, 0], conv.groups)
            launch("relu_inplace", grid=((y.numel() + 1023) // 1024,), block=1024, args=(y, y.numel()))
            return y
    """
    module = nn.Module()
    module.conv = nn.Conv2d(3, 8, 3, padding=1, stride=2)
    main = traced(text, spec(2, 3, 32, 32), module=module).main
    assert main.outputs.shape == (2, 8, 16, 16)


def test_two_stage_reduction_with_scratch() -> None:
    text = """
        from pytest_cudaforge.plan import device, empty, launch, zeros

        THREADS = 256

        def blocks_for(n, per_block=THREADS * 4):
            return max(1, min(-(-n // per_block), 2 * device.sm_count))

        def plan(x, dim=None):
            n = x.numel()
            blocks = blocks_for(n)
            partial = empty(blocks, "float32")
            counter = zeros((1,), "int32")
            y = empty((), x.dtype)
            launch("sum_stage1", grid=blocks, block=THREADS, args=(x, partial, counter, n), shared_bytes=4 * THREADS)
            launch("sum_stage2", grid=1, block=min(1024, blocks), args=(partial, y, blocks), cooperative=True)
            return y
    """
    main = traced(text, spec(1 << 20)).main
    assert [type(step) for step in main.steps] == [Zero, Launch, Launch]
    assert main.launches[0].grid == (264, 1, 1) and main.launches[1].cooperative
    assert main.outputs == View(3, (), ())
    assert plans.scratch_layout(main).total_bytes == 264 * 4 + (256 - 264 * 4 % 256) + 256


def test_several_constant_sets_are_units() -> None:
    text = """
        from pytest_cudaforge.plan import empty, launch
        def plan(x):
            y = empty(x.shape, x.dtype)
            for width in (32, 64, 32):
                launch("k", args=(x, y), block=width, constants={"B": width, "A": 1})
            return y
    """
    main = traced(text, spec(8)).main
    assert main.unit_constants == ((("A", 1), ("B", 32)), (("A", 1), ("B", 64)))


class Tower(nn.Module):
    scale_class = 0.5

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4, bias=i % 2 == 0) for i in range(3)])
        self.heads = nn.ModuleDict({"a": nn.Linear(4, 2), "b": nn.Linear(4, 3)})
        self.net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.gains = nn.ParameterList([nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(4))])
        self.register_buffer("running", torch.zeros(4))
        self.extra = [torch.ones(2), {"k": 3}]
        self.sizes = (4, 4)
        self.act = torch.relu
        self.out_dtype = torch.float16
        self.limit = float("inf")


def test_module_attributes_nested() -> None:
    text = """
        from pytest_cudaforge.plan import empty, launch

        def plan(module, x):
            y = empty(x.shape, module.out_dtype)
            assert len(module.layers) == 3 and len(module.heads) == 2
            for i, layer in enumerate(module.layers):
                launch("layer", args=(x, layer.weight, layer.bias, i))
            for name in module.heads:
                launch("head_" + name, args=(module.heads[name].weight,))
            for name, head in module.heads.items():
                launch("again_" + name, args=(head.bias,))
            launch("more", args=(module.net[0].weight, module.layers[-1].weight, module.gains[0], module.gains[1],
                                 module.running, module.extra[0], module.extra[1]["k"], module.sizes[0], module.limit,
                                 module.scale_class, module.training, getattr(module, "missing", None),
                                 hasattr(module, "act"), y))
            return [y, module.running]
    """
    module = Tower()
    main = traced(text, spec(4), module=module).main
    last = main.launches[-1]
    assert last.args[6:13] == (3, 4, float("inf"), 0.5, True, None, True)
    sources = [buffer.source for buffer in main.buffers if buffer.role == "state"]
    assert sources == [
        *("layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.2.weight", "layers.2.bias"),
        *("heads.a.weight", "heads.b.weight", "heads.a.bias", "heads.b.bias"),
        *("net.0.weight", "gains.0", "gains.1", "running", "extra.0"),
    ]
    assert main.launches[1].args[2] is None
    assert last.args[2] == View(sources.index("gains.0") + 1, (), ())


def test_plans_read_configuration_objects() -> None:
    text = """
        from pytest_cudaforge.plan import empty, launch
        def plan(module, x):
            y = empty((module.config.heads, x.shape[-1]), x.dtype)
            launch("k", args=(x, y, module.config.eps))
            return y
    """
    module = nn.Module()
    module.config = argparse.Namespace(heads=3, eps=0.5)
    assert traced(text, spec(4), module=module).main.outputs.shape == (3, 4)
    with pytest.raises(
        PlanError, match=r"module.config \(Namespace\) has no attribute 'head' \(did you mean 'heads'\?\)"
    ):
        traced(text.replace("config.heads", "config.head"), spec(4), module=module)


def test_prepare_runs_on_weights_and_hands_its_result_on() -> None:
    text = """
        from pytest_cudaforge.plan import empty, launch

        def prepare(module):
            packed = empty((2, module.weight.numel()), "bfloat16")
            launch("pack", args=(module.weight, packed))
            return {"packed": packed, "rows": packed[1], "t": module.weight.t(), "n": 7}

        def plan(module, x, prepared):
            y = empty((x.shape[0], module.weight.shape[0]), x.dtype)
            launch("k", args=(x, prepared["packed"], prepared["rows"], prepared["t"], y, prepared["n"]))
            return y
    """
    plan = traced(text, spec(8, 4), module=nn.Linear(4, 3))
    assert plan.prepare is not None
    assert [b.role for b in plan.prepare.buffers] == ["state", "scratch"]
    assert plan.prepare.outputs["rows"] == View(1, (12,), (1,), 12)
    found = [(b.role, b.source, b.spec) for b in plan.main.buffers]
    assert found[1:4] == [
        ("prepared", "out.packed", spec(2, 12, dtype="bfloat16")),
        ("prepared", "out.rows", spec(12, dtype="bfloat16")),
        ("prepared", "out.t", TensorSpec((4, 3), "float32", (1, 4))),
    ]
    assert plan.main.launches[0].args[-1] == 7


def test_outputs_may_be_inputs_views_and_any_tree() -> None:
    text = """
        from pytest_cudaforge.plan import empty, launch
        def plan(x, cache):
            y = empty((4, 2), x.dtype)
            launch("update", args=(x, cache["k"], y))
            return {"y": y.t(), "cache": [cache["k"], x[1:]], "n": (3, None, 1.5)}
    """
    main = traced(text, spec(4, 2), {"k": spec(8), "unused": spec(3)}).main
    assert main.outputs == {
        "y": View(2, (2, 4), (1, 2)),
        "cache": [View(1, (8,), (1,)), View(0, (3, 2), (2, 1), 2)],
        "n": (3, None, 1.5),
    }
    assert [b.source for b in main.buffers] == ["0", "1.k", ""]
    assert main.output_buffers == {0, 1, 2}


def test_cpp_plan_on_the_cpu() -> None:
    text = """
        from pytest_cudaforge.plan import empty, launch
        def plan(module, x):
            y = empty(x.shape, x.dtype)
            launch("rms_norm", args=(x, module.weight, y, x.numel() // x.shape[-1], x.size(-1), module.eps))
            return y
    """
    (launch,) = launches(text, spec(3, 8), module=RMSNorm(8), device=CPU)
    assert launch.grid == launch.block == (1, 1, 1) and launch.args[3:] == (3, 8, 1e-6)


def test_tensor_facts() -> None:
    text = """
        from pytest_cudaforge.plan import device, empty, launch
        def plan(x):
            facts = (x.ndim, x.dim(), x.numel(), x.element_size(), x.size(0), x.stride(-1), x.nbytes, len(x),
                     x.is_contiguous(), x.shape.numel(), x.dtype.itemsize, x.is_floating_point(), x.is_cuda,
                     x.dtype.is_floating_point)
            assert x.dtype == "float16" and x.dtype == "half" and "torch.float16" == x.dtype and x.dtype != "float32"
            assert x.device.type == "cuda" and device.arch == "sm_90" and str(x.dtype) == "float16"
            names = {"float16": "__half"}
            launch(f"k_{x.dtype}_{names[x.dtype]}", args=(x,))
            return facts
    """
    main = traced(text, spec(2, 3, dtype="float16")).main
    assert main.outputs == (2, 2, 6, 2, 2, 1, 12, 2, True, 6, 2, True, True, True)
    assert main.launches[0].kernel == "k_float16___half"


def test_views_reach_the_launch_with_offsets() -> None:
    text = """
        from pytest_cudaforge.plan import launch
        def plan(x):
            a = x.unsqueeze(0).squeeze().permute(2, 0, 1).flatten(1)
            b = x.transpose(0, 1)[1, :, 2:]
            c, d = x.split((1, 3), dim=-1)
            e = x.narrow(2, 1, 2).select(0, 1)
            f = x.unbind(0)[1].T
            g = x.view(-1).unflatten(0, (4, 6)) if x.is_contiguous() else x.contiguous()
            h = x.data.ravel().view_as(x).reshape_as(x).expand_as(x)
            launch("k", args=(a, b, c, d, e, f, g, x.mT, x.detach(), h))
            return x
    """
    (launch,) = launches(text, spec(2, 3, 4))
    assert launch.args == (
        View(0, (4, 6), (1, 4)),
        View(0, (2, 2), (12, 1), 6),
        View(0, (2, 3, 1), (12, 4, 1)),
        View(0, (2, 3, 3), (12, 4, 1), 1),
        View(0, (3, 2), (4, 1), 13),
        View(0, (4, 3), (1, 4), 12),
        View(0, (4, 6), (6, 1)),
        View(0, (2, 4, 3), (12, 1, 4)),
        View(0, (2, 3, 4), (12, 4, 1)),
        View(0, (2, 3, 4), (12, 4, 1)),
    )


# -- mistakes ----------------------------------------------------------------------------------------------------


def launch_with(arguments: str) -> str:
    """A plan whose line 6 is a launch with these arguments."""
    return (
        "import math\nfrom pytest_cudaforge.plan import device, empty, launch, op, zeros\n\n"
        f"def plan(module, x):\n    y = empty(x.shape, x.dtype)\n    {arguments}\n    return y\n"
    )


MISTAKES = [
    ('launch("k")', "launch() misses the argument 'args'"),
    ('launch("k", (x, y))', "name the others: args, grid"),
    ('launch("k", args=x)', "args is the tensor 0", "write args=(x,)"),
    ('launch("k", args=(x, "float"))', "args[1] is 'float' (str)", "constants="),
    ('launch("k", args=(x, x.shape))', "args[1] is a tuple of 2", "pass each number"),
    ('launch("k", args=(x, 1 << 70))', "args[1] is 1180591620717411303424", "64 bits"),
    ('launch("k", args=(x, module))', "args[1] is module (RMSNorm)"),
    ('launch("k", args=(x, launch))', "args[1] is the function launch"),
    ('launch("k", gird=3, args=())', "launch() has no argument 'gird' (did you mean 'grid'?)"),
    ('launch("", args=())', "kernel is '' (str)"),
    ('launch("k; system(1)", args=())', "kernel is"),
    ('launch("k\\n#include <x>", args=())', "kernel is"),
    ("launch(launch, args=())", "kernel is the function launch"),
    ('launch("k", grid=x.shape[0] / 2, args=())', "grid[0] is 32.0 (float)", "use // instead of /"),
    ('launch("k", grid=(0, 1), args=())', "grid[0] is 0", "return before the launch"),
    ('launch("k", grid=-4, args=())', "grid[0] is -4"),
    ('launch("k", grid=(1, 2, 3, 4), args=())', "grid has 4 sizes"),
    ('launch("k", grid="64", args=())', "grid[0] is '64' (str)"),
    ('launch("k", grid=(1, 100000), args=())', "grid[1] is 100000", "put the long dimension first"),
    ('launch("k", grid=1 << 31, args=())', "grid[0] is 2147483648"),
    ('launch("k", grid=True, args=())', "grid[0] is True (bool)"),
    ('launch("k", block=2048, args=())', "block[0] is 2048", "at most 1024"),
    ('launch("k", block=(64, 32), args=())', "has 2048 threads"),
    ('launch("k", block=(1, 1, 128), args=())', "block[2] is 128", "at most 64"),
    ('launch("k", shared_bytes=1 << 20, args=())', "shared_bytes is 1048576", "device.max_shared_bytes"),
    ('launch("k", shared_bytes=-1, args=())', "shared_bytes is -1"),
    ('launch("k", shared_bytes=1.5, args=())', "shared_bytes is 1.5"),
    ('launch("k", cooperative=1, args=())', "cooperative is 1 (int)"),
    ('launch("k", grid=3, cluster=2, args=())', "grid (3, 1, 1) with cluster (2, 1, 1)"),
    ('launch("k", constants=[1], args=())', "constants is a list of 1"),
    ('launch("k", constants={"cols": 1}, args=())', "'cols' (str)", "call it 'COLS'"),
    ('launch("k", constants={"T": "float"}, args=())', "constants['T'] is 'float'"),
    ('launch("k", constants={"T": math.inf}, args=())', "constants['T'] is inf"),
    ('launch("k", constants={"N": 1 << 65}, args=())', "constants['N'] is"),
    ('launch("k", constants={"N": x}, args=())', "constants['N'] is the tensor 0"),
    ("empty(x.shape)", "empty() misses the argument 'dtype'"),
    ("empty(2, 3, x.dtype)", "empty() got 3 positional arguments"),
    ('empty(x.shape, "fp16")', "'fp16' is no dtype (did you mean 'float16'?)"),
    ('empty(x.shape, "floot32")', "did you mean 'float32'?"),
    ("empty(x.shape, 4)", "4 (int) is no dtype"),
    ("empty(x.shape, x)", "the tensor 0 is no dtype"),
    ("empty((2, -1), x.dtype)", "shape[1] is -1"),
    ("empty((2, 1.5), x.dtype)", "shape[1] is 1.5"),
    ("empty(x, x.dtype)", "shape[0] is the tensor 0"),
    ('empty(2, x.dtype, device="cuda")', "leave device out"),
    ("zeros((1,) * 40, x.dtype)", "at most 32"),
    ("x + y", "cannot compute the tensor 0 + a tensor", "compute in a kernel"),
    ("x[x]", "a tensor index of the tensor 0", "gather in a kernel"),
    ("x[0, 0, 0]", "3 indices into a tensor of shape (64, 16)"),
    ("x[100]", "index 100 is out of range"),
    ("x[::-1]", "step -1"),
    ("x[0] = 3", "cannot assign into the tensor 0", "launch a kernel"),
    ("x.view(3, -1)", "view(3, -1) of a tensor of shape (64, 16)", "1024 elements"),
    ("x.t().view(-1)", "needs a copy", "raise Unsupported"),
    ("x.t().contiguous()", "is a copy", "aten.clone"),
    ("x.expand_as(3)", "expand_as() of 3"),
    ("x.shap", "did you mean 'shape'?"),
    ("x.data_ptr()", "pass the tensor itself"),
    ("x.float()", "aten._to_copy"),
    ("x.sum()", "no attribute 'sum'", "never sees values"),
    ("x.permute(0)", "every dimension once"),
    ("x.transpose(0, 2)", "transpose dimension is 2"),
    ("x.expand(3, 16)", "sizes of 1 grow"),
    ("x.chunk(0)", "positive number of chunks"),
    ("x.split(5, 9)", "split dimension is 9"),
    ("x.split((5, 5))", "lengths that sum to 64"),
    ("module.wieght", "did you mean 'weight'?"),
    ("module(x)", "cannot be called", "launch a kernel with its weights"),
    ("module.forward(x)", "no attribute 'forward'"),
    ("module[0]", "has no item 0 (int)"),
    ("len(module)", "cannot be iterated"),
    ("device.sm_cont", "did you mean 'sm_count'?"),
    ('x.dtype == "fp32"', "'fp32' is no dtype (did you mean 'float32'?)"),
    ("bool(x)", "the truth of the tensor 0"),
    ("float(x)", "float() of the tensor 0"),
    ("math.sqrt(x)", "math.sqrt() of the tensor 0", "never sees values"),
    ("op()", "op() of nothing"),
    ("op(x)", "op() of the tensor 0"),
    ('op("aten.mmm", x)', "did you mean 'mm'?"),
    ('op("aten.mm", x, x)', "must have same reduction dim"),
    ('op("aten.mm", x)', "misses 'mat2'"),
    ('op("aten.rand_like", x)', "is random"),
    ('op("aten.nonzero", x)', "shape depends on values"),
    ('op("aten.add_", x, 1)', "changes its argument 'self'"),
    ('op("aten.relu", module)', "op() argument is module"),
    ('op("prims.add", x, x)', "outside ATen"),
    ('op("aten._local_scalar_dense", x)', "private to torch"),
    ('op("aten.mm", x, x.t(), out=empty((3, 3), x.dtype))', "out= has the shape (3, 3)"),
]


@pytest.mark.parametrize("case", MISTAKES, ids=[case[0][:50] for case in MISTAKES])
def test_mistake_names_the_argument_and_the_line(case: tuple[str, ...]) -> None:
    with pytest.raises(PlanError) as caught:
        traced(launch_with(case[0]), spec(64, 16), module=RMSNorm(16))
    for part in case[1:]:
        assert part in str(caught.value)
    assert caught.value.line == 6


@pytest.mark.parametrize("field", ["grid=2", "block=32", "shared_bytes=4", "cooperative=True", "cluster=2"])
def test_cpp_refuses_launch_geometry(field: str) -> None:
    text = (
        f"from pytest_cudaforge.plan import launch\ndef plan(x):\n    launch('k', args=(x,), {field})\n    return x\n"
    )
    with pytest.raises(PlanError, match=r"in a cpp plan[\s\S]*omp parallel for"):
        traced(text, spec(3), device=CPU)


CALLS = [
    ("def plan(module):\n    return None\n", "plan() is called with 2 positional arguments"),
    ("def plan(module, x, mask, y):\n    return x\n", "plan() misses the argument 'y'"),
    (
        "def plan(module, x, mask, y):\n    return x\n",
        "the call to be planned gives (module (RMSNorm), the tensor 0, mask=None",
    ),
    ("def plan(module, x, *, masc=None):\n    return x\n", "plan() has no argument 'mask' (did you mean 'masc'?)"),
    ("def plan(module, x, mask=None):\n    return module\n", "plan() returns module (RMSNorm)"),
    ("def plan(module, x, mask=None):\n    return plan\n", "plan() returns the function plan"),
    ("def plan(module, x, mask=None):\n    return x[0], [{(1, 2): x}]\n", "plan() returns a dict of 1"),
    ("def plan(module, x, mask=None):\n    y = [x]\n    y.append(y)\n    return y\n", "too many nested values"),
    (
        "def plan(module, x, mask=None):\n    y = [x]\n    for i in range(40):\n        y = [y, y]\n    return y\n",
        "nested",
    ),
    ("def prepare(module):\n    return 1\ndef plan(module, x, mask=None):\n    return x\n", "parameter named prepared"),
    (
        "def prepare(m, x):\n    return 1\ndef plan(module, x, mask=None, prepared=0):\n    return x\n",
        "misses the argument 'x'",
    ),
    (
        "def prepare(module):\n    return module\ndef plan(module, x, prepared, mask=None):\n    return x\n",
        "prepare() returns",
    ),
]


@pytest.mark.parametrize(("text", "message"), CALLS)
def test_mistakes_in_parameters_and_results(text: str, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        traced(text, spec(3), mask=None, module=RMSNorm(3))
    assert message in str(caught.value)
    assert caught.value.line is not None


def test_prepare_needs_a_module() -> None:
    with pytest.raises(PlanError, match="only weights can be prepared"):
        traced("def prepare(m):\n    return 1\ndef plan(x, prepared):\n    return x\n", spec(3))


def test_recorded_outputs_of_prepare_may_not_reach_inputs() -> None:
    text = "def prepare(module):\n    return module.weight\ndef plan(module, x, prepared):\n    return prepared\n"
    plan = traced(text, spec(3), module=RMSNorm(3))
    assert plan.prepare is not None and plan.prepare.outputs == View(0, (3,), (1,))
    assert plan.main.buffers[0].role == "prepared" and plan.main.buffers[0].source == "out"


# -- caps --------------------------------------------------------------------------------------------------------


def test_launch_cap() -> None:
    text = (
        "from pytest_cudaforge.plan import launch\ndef plan(x):\n    for i in range(5000):\n"
        "        launch('k', args=(x, i))\n    return x\n"
    )
    with pytest.raises(PlanLimitError, match=r"more than 4096 launches[\s\S]*loop inside a kernel"):
        traced(text, spec(3))
    assert len(traced(text.replace("5000", "4096"), spec(3)).main.launches) == 4096


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("y = empty((1 << 20, 1 << 20), 'float32')", "takes 4398046511104 bytes"),
        ("y = empty((1 << 50,), 'float32')", "shape[0] is 1125899906842624"),
        ("y = [empty((1 << 30,), 'float32') for i in range(40)]\n    launch('k', args=y)", "bytes at once"),
        ("y = [zeros((1,), 'float32') for i in range(20000)]", "launches"),
        ("y = [x[i % 3] for i in range(100000)]", "65536"),
        ("y = [op('aten.relu', x) for i in range(5000)]", "more than 4096 launches"),
        ("launch('k', args=[x] * 2000)", "2000 args"),
        ("[launch('k', args=[x], constants={'I': i}) for i in range(300)]", "more than 256 different sets"),
        ("y = [x] * 5000\n    return y", "at most 4096"),
    ],
)
def test_sizes_are_capped(body: str, message: str) -> None:
    text = f"from pytest_cudaforge.plan import empty, launch, op, zeros\ndef plan(x):\n    {body}\n    return x\n"
    with pytest.raises(PlanLimitError) as caught:
        traced(text, spec(3))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "body",
    [
        "x.split(1)",
        "x.unbind()",
        "x.chunk(4096)",
        "[y for y in x]",
        "len(x)",
        "hasattr(x, 'shap')",
        "getattr(x, 'shap', None)",
        "x.view(-1)[i:].unsqueeze(0).expand(9, -1)",
        "empty((i,), 'float32')",
        "x.shape == x.shape",
        "f'{x.shape}{x.dtype}'",
    ],
)
def test_loops_over_tensor_methods_meet_the_step_cap(body: str) -> None:
    import time

    head = "from pytest_cudaforge.plan import empty\ndef plan(x):\n    for i in range(10 ** 9):\n"
    text = f"{head}        {body}\n    return x\n"
    begin = time.process_time()
    with pytest.raises(PlanLimitError, match="more than 500000 steps"):
        traced(text, spec(4096, 3))
    assert time.process_time() - begin < 20  # about a second on an idle core


def test_many_short_lived_buffers_share_memory() -> None:
    text = """
        from pytest_cudaforge.plan import empty, launch
        def plan(x):
            for i in range(1000):
                y = empty((1 << 28,), "float32")
                launch("k", args=(x, y))
                x = y
            return x
    """
    main = traced(text, spec(1 << 28)).main
    assert plans.scratch_layout(main).total_bytes == 2 << 30


# -- determinism and speed ---------------------------------------------------------------------------------------


def test_same_signature_same_plan_and_key() -> None:
    module = RMSNorm(16)
    first = Signature.of((torch.randn(4, 16),), {}, describe_module(module), H200, "cuda")
    second = Signature.of((torch.randn(4, 16),), {}, describe_module(RMSNorm(16)), H200, "cuda")
    assert first == second and first.key() == second.key()
    text = textwrap.dedent(RMS_NORM)
    assert trace(text, first) == trace(text, second)


def test_a_nan_among_the_arguments_is_no_difference() -> None:
    text = """
        from pytest_cudaforge.plan import launch
        def plan(x):
            launch("k", args=(x, float("nan")))
            return [x, float("nan")]
    """
    signature = Signature.of((spec(3),), {}, None, H200, "cuda")
    (launch,) = trace(textwrap.dedent(text), signature).main.launches
    assert launch.args[1] != launch.args[1]


def test_tracing_is_fast_enough_for_production(record_property: Any) -> None:
    import time

    signature = Signature.of((spec(64, 4096),), {}, describe_module(RMSNorm(4096)), H200, "cuda")
    text = textwrap.dedent(RMS_NORM)
    trace(text, signature)
    samples = []
    for _ in range(20):
        begin = time.process_time()
        trace(text, signature)
        samples.append(time.process_time() - begin)
    record_property("median_ms", sorted(samples)[10] * 1e3)
    assert min(samples) < 5e-3


def test_a_syntax_error_comes_before_anything_runs() -> None:
    with pytest.raises(PlanSyntaxError, match=r"plan.py:2: a while loop"):
        traced("def plan(x):\n    while True: pass\n", spec(3))


def test_plan_without_launch_is_still_a_plan() -> None:
    assert traced("def plan(x):\n    return x\n", spec(3)).main == LaunchPlan(
        (plans.Buffer("input", spec(3), "0"),), (), View(0, (3,), (1,)), ()
    )
