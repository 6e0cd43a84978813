"""Kernels named like functions of the toolchain: fair names that must build."""

from __future__ import annotations

import pytest

from pytest_cudaforge.errors import BuildFailure
from pytest_cudaforge.languages import Unit, load
from pytest_cudaforge.languages.renaming import Renaming, clashing

BODY = "(const float* x, float* y, int n) { y[0] = x[0]; }\n"


@pytest.mark.parametrize(
    ("source", "kernel"),
    [
        ("__global__ void norm" + BODY, "norm"),
        ('extern "C" __global__ void norm' + BODY, "norm"),
        ('extern "C" __global__ void tanh' + BODY, "tanh"),
        ("__global__ void max" + BODY, "max"),
        ("template <class T> __global__ void norm(const T* x, T* y, int n) { y[0] = x[0]; }\n", "norm<float>"),
    ],
)
def test_cuda_builds_kernels_named_like_builtins(source: str, kernel: str) -> None:
    cuda = load("cuda")
    if cuda.availability():
        pytest.skip(cuda.availability())
    (found,) = cuda.compile(source, Unit((), (kernel,)), "sm_90").kernels
    assert found.expression == kernel
    assert found.params == ("const float*", "float*", "int")
    assert found.resources.registers is not None


@pytest.mark.parametrize("name", ["round", "gamma", "index", "norm"])
def test_cpp_builds_kernels_named_like_library_functions(name: str) -> None:
    source = f"#include <cmath>\n#include <complex>\nvoid {name}{BODY}float use(float x) {{ return std::round(x); }}\n"
    (found,) = load("cpp").compile(source, Unit((), (name,)), "cpu").kernels
    assert found.params == ("const float*", "float*", "int")


def test_another_fault_keeps_its_own_log() -> None:
    source = "#include <cmath>\nvoid round(const float* x, float* y, int n) { y[0] = x[0] * missing; }\n"
    with pytest.raises(BuildFailure, match="missing") as caught:
        load("cpp").compile(source, Unit((), ("round",)), "cpu")
    assert "__forge" not in caught.value.log


def test_only_names_the_log_complains_of_are_renamed() -> None:
    log = 'kernel norm: error: cannot determine which instance of overloaded function "norm" is intended'
    renaming = clashing(log, ["norm", "norm_rows<4>"])
    assert renaming == Renaming(("norm",))
    assert renaming.apply("norm<float>") == "__forge_kernel_norm<float>"
    assert renaming.apply("norm_rows<4>") == "norm_rows<4>"
    assert renaming.restore("__forge_kernel_norm") == "norm"
