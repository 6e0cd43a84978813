"""Replay on the CPU: real g++ binaries, plans written by hand."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys

import pytest

from pytest_cudaforge.errors import DeviceError, LaunchFailure
from pytest_cudaforge.languages import Binary, Unit, load, units_of
from pytest_cudaforge.plan import Buffer, Launch, LaunchPlan, LibraryCall, TensorSpec, TracedPlan, View, Zero
from pytest_cudaforge.runtime.replay import load_program

# First of all, as a process that replays library calls has it.
torch = pytest.importorskip("torch")

SOURCE = """
#include <cstdint>
#ifndef BIAS
#define BIAS 0
#endif
template <class T> void scale(const T* x, T* y, int64_t n, float factor, bool negate) {
  for (int64_t i = 0; i < n; ++i) y[i] = (negate ? -1 : 1) * x[i] * factor + BIAS;
}
static int calls = 0;
extern "C" void count(float* y) { y[0] = ++calls; }
template <class T> T& counter() { static T value = 0; return value; }
extern "C" void count_unique(float* y) { y[0] = ++counter<int>(); }
"""


def vector(n: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec((n,), dtype, (1,))


def view(buffer: int, n: int, offset: int = 0) -> View:
    return View(buffer, (n,), (1,), offset)


def compile_all(plan: LaunchPlan, source: str = SOURCE) -> list[Binary]:
    return [load("cpp").compile(source, unit, "cpu") for unit in units_of(TracedPlan(plan))]


def addresses(*arrays: object) -> list[int]:
    return [ctypes.addressof(array) for array in arrays]  # type: ignore[arg-type]


def test_launches_run_in_order_with_offsets_scalars_and_constants() -> None:
    plan = LaunchPlan(
        buffers=(Buffer("input", vector(6), "0"), Buffer("scratch", vector(4)), Buffer("scratch", vector(4))),
        steps=(
            Launch("scale<float>", (view(0, 4, 2), view(1, 4), 4, 2.0, False)),
            Launch("scale<float>", (view(1, 4), view(2, 4), 4, 1, True), constants=(("BIAS", 100),)),
        ),
        outputs=view(2, 4),
    )
    x, t, y = (ctypes.c_float * 6)(0, 1, 2, 3, 4, 5), (ctypes.c_float * 4)(), (ctypes.c_float * 4)()
    with load_program(plan, compile_all(plan)) as program:
        bound = program.bind(addresses(x, t, y))
        bound.run()
        assert list(t) == [4, 6, 8, 10]
        assert list(y) == [96, 94, 92, 90]
        other = (ctypes.c_float * 6)(*([1.0] * 6))
        bound.rebind(addresses(other, t, y))
        bound.run()
        assert list(y) == [98, 98, 98, 98]


def test_a_zero_step_fills_the_buffer_and_a_fresh_load_resets_globals() -> None:
    plan = LaunchPlan(
        buffers=(Buffer("scratch", vector(3)), Buffer("scratch", vector(1)), Buffer("scratch", vector(1))),
        steps=(Zero(0), Launch("count", (view(1, 1),)), Launch("count_unique", (view(2, 1),))),
        outputs=view(0, 3),
    )
    binaries = compile_all(plan)
    for _ in range(2):
        z, a, b = (ctypes.c_float * 3)(1, 2, 3), (ctypes.c_float * 1)(), (ctypes.c_float * 1)()
        with load_program(plan, binaries) as program, load_program(plan, binaries) as twin:
            bound = program.bind(addresses(z, a, b))
            bound.run()
            bound.run()
            assert (list(z), a[0], b[0]) == ([0, 0, 0], 2.0, 2.0)
            twin.bind(addresses(z, a, b)).run()
            assert (a[0], b[0]) == (1.0, 1.0)


def test_the_static_variables_of_the_code_are_found() -> None:
    plan = LaunchPlan((Buffer("scratch", vector(1)),), (Launch("count", (view(0, 1),)),), view(0, 1))
    y = (ctypes.c_float * 1)()
    with load_program(plan, compile_all(plan)) as program:
        bound = program.bind(addresses(y))
        bound.run()
        before = [ctypes.string_at(*region) for region in program.variables()]
        bound.run()
        after = [ctypes.string_at(*region) for region in program.variables()]
        changed = [
            (old[k], new[k])
            for old, new in zip(before, after, strict=True)
            for k in range(len(old))
            if old[k] != new[k]
        ]
        assert changed == [(1, 2)]
    with load_program(plan, compile_all(plan)) as again:
        bound = again.bind(addresses(y))
        bound.run()
        assert y[0] == 1


def test_a_library_call_runs_on_the_same_memory() -> None:
    plan = LaunchPlan(
        buffers=(
            Buffer("input", TensorSpec((2, 3), "float32", (3, 1)), "0"),
            Buffer("scratch", TensorSpec((2, 2), "float32", (2, 1))),
        ),
        steps=(LibraryCall("aten.mm", (View(0, (2, 3), (3, 1)), View(0, (3, 2), (1, 3))), (), (1,)),),
        outputs=View(1, (2, 2), (2, 1)),
    )
    x, y = (ctypes.c_float * 6)(1, 2, 3, 4, 5, 6), (ctypes.c_float * 4)()
    other = (ctypes.c_float * 6)(1, 0, 0, 0, 1, 0)
    with load_program(plan, []) as program:
        bound = program.bind(addresses(x, y))
        for _ in range(2):
            bound.run()
            assert list(y) == [14, 32, 32, 77]
        bound.rebind(addresses(other, y))
        bound.run()
        assert list(y) == [1, 0, 0, 1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64", "int64", "int8", "uint8", "bool"])
def test_a_library_call_sees_every_dtype_and_empty_tensors(dtype: str) -> None:
    x = torch.tensor([[1, 0, 1], [0, 1, 1]]).to(getattr(torch, dtype))
    y, empty = torch.zeros(3, 2, dtype=x.dtype), torch.zeros(0, 3, dtype=x.dtype)
    flat = TensorSpec((2, 3), dtype, (3, 1))
    plan = LaunchPlan(
        (
            Buffer("input", flat, "0"),
            Buffer("scratch", TensorSpec((3, 2), dtype, (2, 1))),
            Buffer("scratch", TensorSpec((0, 3), dtype, (3, 1))),
        ),
        (
            Zero(2),
            LibraryCall("aten.clone", (View(0, (3, 2), (1, 3)),), (("memory_format", "contiguous_format"),), (1,)),
            LibraryCall("aten.clone", (View(2, (0, 3), (3, 1)),), (), (2,)),
        ),
        View(1, (3, 2), (2, 1)),
    )
    with load_program(plan, []) as program:
        program.bind([x.data_ptr(), y.data_ptr(), empty.data_ptr()]).run()
    assert torch.equal(y, x.t())


def test_a_library_call_that_fits_no_overload_is_a_launch_failure() -> None:
    spec = TensorSpec((2, 3), "float32", (3, 1))
    step = LibraryCall("aten.mm", (View(0, (2, 3), (3, 1)), 3), (), (0,), line=5)
    plan = LaunchPlan((Buffer("input", spec, "0"),), (step,), View(0, (2, 3), (3, 1)))
    with load_program(plan, []) as program, pytest.raises(LaunchFailure, match=r"plan\.py:5: "):
        program.bind([0])


def test_loading_and_running_imports_no_torch() -> None:
    program = (
        "import sys, ctypes\n"
        "from pytest_cudaforge.languages import Unit, load\n"
        "from pytest_cudaforge.plan import *\n"
        "from pytest_cudaforge.plan import Buffer, Launch, LaunchPlan, TensorSpec, View\n"
        "from pytest_cudaforge.runtime.replay import load_program\n"
        "plan = LaunchPlan((Buffer('scratch', TensorSpec((1,), 'float32', (1,))),),\n"
        "                  (Launch('one', (View(0, (1,), (1,)),)),), View(0, (1,), (1,)))\n"
        "binary = load('cpp').compile('void one(float* y) { *y = 1; }', Unit((), ('one',)), 'cpu')\n"
        "y = (ctypes.c_float * 1)()\n"
        "load_program(plan, [binary]).bind([ctypes.addressof(y)]).run()\n"
        "print(y[0], sorted({'torch', 'cuda', 'openai', 'pytest'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1.0 []"


ONE = LaunchPlan((Buffer("scratch", vector(1)),), (Launch("count", (view(0, 1),)),), view(0, 1))


def test_a_launch_for_the_cpu_takes_no_grid() -> None:
    plan = LaunchPlan(ONE.buffers, (Launch("count", (view(0, 1),), grid=(2, 1, 1)),), ONE.outputs)
    with pytest.raises(LaunchFailure, match="takes no grid"):
        load_program(plan, compile_all(plan))


def test_a_wrong_number_of_arguments_never_reaches_the_kernel() -> None:
    plan = LaunchPlan(ONE.buffers, (Launch("count", (view(0, 1), 3)),), ONE.outputs)
    with pytest.raises(LaunchFailure, match="launched with 2 arguments"):
        load_program(plan, compile_all(plan))


def test_a_damaged_binary_is_a_launch_failure() -> None:
    binary = compile_all(ONE)[0]
    damaged = Binary(binary.language, binary.arch, binary.constants, b"not an object", binary.kernels)
    with pytest.raises(LaunchFailure, match="cannot be loaded"):
        load_program(ONE, [damaged])


def test_a_cubin_is_refused_on_the_cpu() -> None:
    binary = compile_all(ONE)[0]
    cubin = Binary("cuda", "sm_90", binary.constants, binary.code, binary.kernels)
    with pytest.raises(LaunchFailure, match="cannot be loaded on the CPU"):
        load_program(ONE, [cubin])


def test_a_missing_binary_is_named() -> None:
    with pytest.raises(LaunchFailure, match='no compiled kernel "count"'):
        load_program(ONE, [])


def test_an_unknown_device_is_named() -> None:
    with pytest.raises(DeviceError, match="'tpu:0'"):
        load_program(ONE, compile_all(ONE), "tpu:0")


def test_binding_checks_the_number_of_addresses_and_closing() -> None:
    program = load_program(ONE, compile_all(ONE))
    with pytest.raises(ValueError, match="1 buffers, 2 addresses"):
        program.bind([0, 0])
    program.close()
    program.close()
    with pytest.raises(ValueError, match="closed"):
        program.bind([0])


def test_a_unit_without_kernels_compiles() -> None:
    assert load("cpp").compile("", Unit((), ()), "cpu").kernels == ()


@pytest.mark.parametrize("name", ["step", "index", "advance", "y0", "signal"])
def test_a_kernel_named_like_a_function_of_the_c_library_is_itself(name: str) -> None:
    source = f'extern "C" void {name}(float* y, long long n) {{ for (long long i = 0; i < n; ++i) y[i] = 7; }}'
    spec = vector(4)
    plan = LaunchPlan((Buffer("scratch", spec),), (Launch(name, (view(0, 4), 4)),), view(0, 4))
    memory = (ctypes.c_float * 4)()
    with load_program(plan, compile_all(plan, source)) as program:
        program.bind([ctypes.addressof(memory)]).run()
    assert list(memory) == [7.0] * 4


_MODES = """
#include <cfenv>
#include <immintrin.h>
void modes(float* y) {
  _MM_SET_FLUSH_ZERO_MODE(_MM_FLUSH_ZERO_ON);
  _mm_setcsr(_mm_getcsr() | 0x0040);  // denormals are zeros
  std::fesetround(FE_UPWARD);
  volatile float one = 1, tiny = 1e-30f;
  y[0] = one + tiny;
  y[1] = tiny * 1e-10f;
}
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the kernel is written for x86-64")
def test_a_kernels_rounding_and_denormals_are_its_own_matter() -> None:
    """Kernels flush denormals for speed; whoever called them must not compute another way from then on."""
    plan = LaunchPlan((Buffer("scratch", vector(2)),), (Launch("modes", (view(0, 2),)),), view(0, 2))
    memory, least = (ctypes.c_float * 2)(), ctypes.c_double(sys.float_info.min)
    third = 1 / least.value
    with load_program(plan, compile_all(plan, _MODES)) as program:
        program.bind(addresses(memory)).run()
        half, same = least.value / 2, 1 / least.value == third and 1.0 + least.value == 1.0
    assert memory[0] > 1.0 and memory[1] == 0.0
    assert half > 0 and same
