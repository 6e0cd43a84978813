"""The cuda language with the real NVRTC, on machines with and without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_cudaforge.errors import BuildFailure, ToolchainError
from pytest_cudaforge.languages import Binary, Unit, cubin, load
from pytest_cudaforge.languages.cuda import compile_arch, resources_in

_MISSING = load("cuda").availability()
pytestmark = pytest.mark.skipif(bool(_MISSING), reason=f"no NVRTC: {_MISSING}")


def build(source: str, *kernels: str, arch: str = "sm_90", lineinfo: bool = False) -> Binary:
    unit = Unit((("SIZE", 8), ("EPS", -1e-5)), kernels or ("f",))
    return load("cuda").compile(source, unit, arch, lineinfo=lineinfo)


def failure(source: str, *kernels: str) -> BuildFailure:
    with pytest.raises(BuildFailure) as caught:
        build(source, *kernels)
    return caught.value


def test_the_language_says_what_a_candidate_is_made_of() -> None:
    language = load("cuda")
    assert (language.source_name, language.file_names) == ("kernel.cu", ("kernel.cu", "plan.py"))
    assert language.fingerprint("sm_90") == language.fingerprint("sm_90") != language.fingerprint("sm_80")


@pytest.mark.parametrize(
    ("source", "kernel", "params"),
    [
        ("__global__ void f(const float* x, float* y, int n) {}", "f", ("const float*", "float*", "int")),
        ('extern "C" __global__ void f(void* p, size_t n) {}', "f", ("void*", "unsigned long")),
        ("using real = double; __global__ void f(const real* __restrict__ x) {}", "f", ("const double*",)),
        ("template <class T, int N> __global__ void f(T* x) {}", "f<float, SIZE>", ("float*",)),
        ("template <class T, int N> __global__ void f(T* x) {}", "f<unsigned, 4>", ("unsigned int*",)),
        ("__global__ void f(float4* x, const uint4* y, float2 z) {}", "f", ("float4*", "const uint4*", "float2")),
        (
            "#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n"
            "__global__ void f(const half* x, __nv_bfloat16* y, __half2* z, __nv_bfloat162* w, half s) {}",
            "f",
            ("const __half*", "__nv_bfloat16*", "__half2*", "__nv_bfloat162*", "__half"),
        ),
        ("#include <cuda_fp8.h>\n__global__ void f(__nv_fp8_e4m3* x) {}", "f", ("__nv_fp8_e4m3*",)),
        ("#include <cstdint>\n__global__ void f(std::int64_t n, uint8_t* x) {}", "f", ("long long", "unsigned char*")),
        ("namespace a { __global__ void f(bool b, char* c) {} }", "a::f", ("bool", "char*")),
        ("__global__ void f() {}", "f", ()),
    ],
)
def test_parameter_types_are_exact(source: str, kernel: str, params: tuple[str, ...]) -> None:
    assert build(source, kernel).kernels[0].params == params


@pytest.mark.parametrize(
    "body",
    [
        "#include <cuda_runtime.h>\n#include <stdio.h>\n__global__ void f(float* x) { x[0] = 1; }",
        "#include <cooperative_groups.h>\nnamespace cg = cooperative_groups;\n"
        "__global__ void f(float* x) { cg::this_grid().sync(); }",
        "#include <mma.h>\n#include <cuda_fp16.h>\nusing namespace nvcuda;\n__global__ void f(half* x) {\n"
        "  wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> a; wmma::load_matrix_sync(a, x, 16); }",
        "#include <cmath>\n#include <cfloat>\n#include <climits>\n#include <algorithm>\n__global__ void f(float* x) {\n"
        "  x[0] = std::sqrt(x[1]) + INFINITY + FLT_MAX + M_PI + NAN + std::max(INT_MAX, 2); }",
        "#include <limits>\n#include <type_traits>\n#include <cstddef>\n#include <utility>\n"
        "template <class T, class = std::enable_if_t<std::is_floating_point_v<T>>> T g() {\n"
        "  return -std::numeric_limits<T>::infinity() + std::numeric_limits<T>::quiet_NaN(); }\n"
        'static_assert(std::is_same_v<std::decay_t<const float&>, float> && !std::is_integral<float>::value, "");\n'
        'static_assert(std::numeric_limits<int>::lowest() < 0 && std::numeric_limits<float>::max() > 1e38f, "");\n'
        "__global__ void f(float* x, std::size_t n) { x[0] = g<float>(); }",
        "#include <limits>\n#include <type_traits>\n#include <algorithm>\n#include <cstdint>\n#include <cuda_fp16.h>\n"
        "#include <cuda/std/limits>\n#include <cuda/std/cstdint>\n#include <cooperative_groups.h>\n"
        "__global__ void f(float* x) { x[0] = cuda::std::numeric_limits<float>::max() + std::min(1, 2); }",
        "#include <cuda_pipeline.h>\n__global__ void f(float* x) { __pipeline_commit(); }",
        'int helper(int x) { return x + 1; }\n__global__ void f(int* x) { x[0] = helper(x[1]); printf("%d", x[0]); }',
        'extern "C" __global__ void f(float* y) { asm volatile("wgmma.fence.sync.aligned;"); y[0] = 7; }',
        "__global__ void __launch_bounds__(256, 2) f(float* x) { __shared__ float s[SIZE]; x[0] = s[0] * EPS; }",
    ],
)
def test_what_kernels_are_made_of_compiles(body: str) -> None:
    binary = build(body)
    assert binary.code[:4] == b"\x7fELF"
    assert binary.arch == "sm_90"


def test_constants_of_one_letter_do_not_break_the_describer() -> None:
    constants = tuple((name, 1) for name in "ABCDEFGHIJKLMNOPQRSTUVWXYZ_")
    source = "#include <algorithm>\n#include <cmath>\n__global__ void f(float* x) { x[A] = std::max(N, T); }"
    assert load("cuda").compile(source, Unit(constants, ("f",)), "sm_90").kernels[0].params == ("float*",)


def test_a_source_with_a_zero_byte_is_refused() -> None:
    assert "no C++ text" in str(failure("__global__ void f() {}\0"))


def test_a_source_does_not_ask_what_lies_where_a_program_was_started() -> None:
    """NVRTC looks for quoted names there: in an empty folder here, in a project later."""
    assert "pyproject.toml" in str(failure('#if __has_include("pyproject.toml")\n#endif\n__global__ void f() {}'))
    build("#if __has_include(<cuda_fp16.h>)\n#include <cuda_fp16.h>\n#endif\n__global__ void f(half* x) {}")


@pytest.mark.parametrize("taken", ["(float*)malloc(64)", "new float[16]"])
def test_memory_of_the_devices_heap_is_refused(taken: str) -> None:
    source = 'extern "C" __global__ void k(float* x) {{ float* p = {}; p[threadIdx.x & 15] = 3; x[0] = p[1]; }}'
    with pytest.raises(BuildFailure, match=r"device's heap"):
        build(source.format(taken), "k")
    build(source.format("x + 4"), "k")


def test_variables_in_global_memory_are_listed() -> None:
    source = """
    __device__ unsigned tickets[3]; static __device__ long long calls = 5; __constant__ float table[8];
    extern "C" __global__ void k(float* x) {
      __shared__ float s[33]; static __device__ int inner; s[threadIdx.x] = x[0]; __syncthreads();
      tickets[1] += 1; calls += 2; inner += 3; x[0] = tickets[0] + calls + inner + table[threadIdx.x] + s[3]; }
    """
    code = build(source, "k").code
    assert sorted(nbytes for _, nbytes in cubin.variables(code)) == [4, 8, 12]
    assert "tickets" in dict(cubin.variables(code))
    assert cubin.variables(build('extern "C" __global__ void k(float* x) { x[0] = 1; }', "k").code) == ()
    with pytest.raises(BuildFailure, match="cannot be read"):
        cubin.variables(code[: len(code) // 2])


def test_resources_are_read_in_the_samebuild() -> None:
    source = """
    __global__ void f(float* x) { __shared__ float s[33]; s[threadIdx.x] = x[0]; __syncthreads(); x[1] = s[5]; }
    __global__ void g(float* x, int n) { float local[100]; for (int i = 0; i < n; ++i) local[i % 97] = x[i];
                                         x[0] = local[n]; }
    """
    f, g = (kernel.resources for kernel in build(source, "f", "g").kernels)
    assert (f.kernel, f.static_shared_bytes, f.local_bytes, f.spill_bytes) == ("f", 132, 0, 0)
    assert f.registers is not None and f.registers > 0
    assert g.local_bytes is not None and g.local_bytes >= 400


def test_a_report_of_spills_is_read() -> None:
    log = (
        "ptxas info    : Compiling entry function '_Z1fPf' for 'sm_90a'\n"
        "ptxas info    : Function properties for _Z1fPf\n"
        "ptxas         .     48 bytes stack frame, 40 bytes spill stores, 44 bytes spill loads\n"
        "ptxas info    : Used 255 registers, used 1 barriers, 48 bytes cumulative stack size, 2048 bytes smem\n"
    )
    found = resources_in(log)["_Z1fPf"]
    assert (found.registers, found.static_shared_bytes, found.local_bytes, found.spill_bytes) == (255, 2048, 48, 84)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("__global__ void f(float* x) {\n  y = 1;\n}", 'kernel.cu(2): error: identifier "y" is undefined'),
        ("#include <nowhere.h>\n", 'kernel.cu(1): catastrophic error: cannot open source file "nowhere.h"'),
        ("#error told you\n", "kernel.cu(1): catastrophic error: #error directive: told you"),
        ("__global__ void f(float* x) {", 'error: expected a "}"'),
        ("__global__ void g() {}", 'kernel f: error: identifier "f" is undefined'),
        ("int f = 3;", "kernel f: error: not a function"),
        ("__device__ void f() {}", "kernel f: error: Name expression cannot form address of a non-__global__"),
        ("__global__ void f(int) {} __global__ void f(float) {}", "kernel f: error: cannot determine which instance"),
        ('__global__ void f() { asm volatile("bogus.x;"); }', "Not a name of any known instruction: 'bogus'"),
        ("__device__ int g();\n__global__ void f(int* x) { x[0] = g(); }", "Unresolved extern function"),
        (
            "__global__ void f(float* x) { __shared__ float a[100000]; a[threadIdx.x] = x[0]; __syncthreads();"
            " x[1] = a[threadIdx.y]; }",
            "uses too much shared data",
        ),
    ],
)
def test_a_log_names_the_candidates_own_lines(source: str, expected: str) -> None:
    error = failure(source)
    assert expected in error.log
    assert "__forge" not in error.log and "ptxas info" not in error.log
    assert str(error).startswith("NVRTC refused the source")


def test_a_log_shows_no_line_of_another_file(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("token = swordfish\n")
    error = failure(f'#include "{secret}"\n__global__ void f() {{}}')
    assert "swordfish" not in error.log + str(error)


def test_line_information_is_added_on_request() -> None:
    source = "__global__ void f(float* x) { x[0] = 1; }"
    assert b"debug_line" in build(source, lineinfo=True).code
    assert b"debug_line" not in build(source).code


def test_own_instructions_of_an_architecture_are_let_in() -> None:
    assert (compile_arch("sm_80"), compile_arch("sm_90"), compile_arch("sm_90a")) == ("sm_80", "sm_90a", "sm_90a")


def test_a_torch_of_another_cuda_is_said_with_its_remedy(tmp_path: Path) -> None:
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('nobody imports torch to learn its version')\n")
    (package / "version.py").write_text("__version__ = '2.6.0'\ncuda: Optional[str] = '9.2'\n")
    program = "from pytest_cudaforge.languages import load; print(load('cuda').availability())"
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.getcwd()}"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert "torch was built for CUDA 9" in done.stdout
    assert 'pip install "cuda-bindings==9.*"' in done.stdout


@pytest.mark.parametrize("arch", ["cpu", "sm_9", "sm_35", "90", "sm_90; rm"])
def test_an_unknown_architecture_is_a_toolchain_error(arch: str) -> None:
    with pytest.raises(ToolchainError, match=r"architecture|cannot compile for"):
        build("__global__ void f() {}", arch=arch)


def test_compiling_leaves_pythons_shared_strings_alone() -> None:
    program = (
        "from pytest_cudaforge.languages import Unit, load\n"
        "load('cuda').compile('__global__ void f() {}', Unit((), ('f',)), 'sm_90')\n"
        "print('a', 'b')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout == b"a b\n"
