"""Kernels that read a GPU's clocks, by their instructions: with the real NVRTC, and in cubins made by hand."""

from __future__ import annotations

import struct

import pytest

from pytest_cudaforge.errors import BuildFailure
from pytest_cudaforge.evaluation import building
from pytest_cudaforge.languages import Unit, clocks, load

_MISSING = load("cuda").availability()
_READ = {
    "clock()": "%clock",
    "clock64()": "%clock",
    "special<%clock_hi, u32>": "%clock_hi",
    "special<%globaltimer, u64>": "%globaltimer",
    "special<%globaltimer_lo, u32>": "%globaltimer",
    "special<%globaltimer_hi, u32>": "%globaltimer_hi",
}


def _source(read: str) -> str:
    """A kernel that adds what it reads to what it is given."""
    if not read.startswith("special"):
        return f"__global__ void f(const float* x, float* y) {{ y[threadIdx.x] = x[threadIdx.x] + (float)({read}); }}"
    name, kind = read.removeprefix("special<").removesuffix(">").split(", ")
    of, held = ("l", "unsigned long long") if kind == "u64" else ("r", "unsigned")
    return (
        f"__global__ void f(const float* x, float* y) {{ {held} t; "
        f'asm volatile("mov.{kind} %0, %{name};" : "={of}"(t)); y[threadIdx.x] = x[threadIdx.x] + t; }}'
    )


def _cubin(*instructions: tuple[int, int], section: str = ".text.f") -> bytes:
    """As little of a 64-bit ELF file as holds one section of these."""
    names = b"\0" + section.encode() + b"\0.shstrtab\0"
    text = b"".join(struct.pack("<QQ", *words) for words in instructions)
    begin, table = 64, 64 + len(text) + len(names)
    header = b"\x7fELF\x02\x01" + bytes(0x22) + struct.pack("<Q", table) + bytes(10) + struct.pack("<HHH", 64, 2, 1)
    of_text = struct.pack("<IIQQQQIIQQ", 1, 1, 0, 0, begin, len(text), 0, 0, 16, 0)
    of_names = struct.pack("<IIQQQQIIQQ", len(section) + 2, 3, 0, 0, begin + len(text), len(names), 0, 0, 1, 0)
    return header.ljust(64, b"\0")[:64] + text + names + of_text + of_names


@pytest.mark.parametrize(
    ("operation", "number", "clock"),
    [
        (0x805, 0x50, "%clock"),
        (0x919, 0x51, "%clock_hi"),
        (0x9C3, 0x52, "%globaltimer"),
        (0x805, 0x53, "%globaltimer_hi"),
        (0x8CB, 0x50, "%clock"),
    ],
)
def test_each_instruction_that_reads_each_clock_is_known(operation: int, number: int, clock: str) -> None:
    reads = (0xFF00000 << 12 | operation, 0xAB << 16 | number << 8)
    assert clocks.found(_cubin((0x918, 0), reads)) == (clock,)
    assert clocks.found(_cubin(reads, section=".nv.info.f")) == ()


def test_other_registers_and_other_instructions_are_anybodys() -> None:
    thread, multiprocessor, adds = (0x919, 0x2100), (0x919, 0x4300), (0x221, 0x5000)
    assert clocks.found(_cubin(thread, multiprocessor, adds)) == ()
    clocks.check(_cubin(thread))


def test_what_is_no_cubin_is_a_failed_build() -> None:
    with pytest.raises(BuildFailure, match="cannot be read"):
        clocks.found(b"MZ")


@pytest.mark.skipif(bool(_MISSING), reason=f"no NVRTC: {_MISSING}")
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("read", _READ)
def test_a_kernel_that_reads_a_clock_is_refused(read: str, arch: str) -> None:
    binary = load("cuda").compile(_source(read), Unit((), ("f",)), arch)
    assert clocks.found(binary.code) == (_READ[read],)
    with pytest.raises(BuildFailure, match=r"reads the GPU's clock .* another time than when it is verified"):
        building._checked(binary)


@pytest.mark.skipif(bool(_MISSING), reason=f"no NVRTC: {_MISSING}")
def test_a_kernel_that_waits_without_one_is_not() -> None:
    waits = "__global__ void f(const float* x, float* y) { __nanosleep(100); y[threadIdx.x] = x[threadIdx.x]; }"
    binary = load("cuda").compile(waits, Unit((), ("f",)), "sm_90")
    assert building._checked(binary) is binary
