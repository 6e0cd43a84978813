"""What native code asks the processor for, in real builds of g++."""

from __future__ import annotations

import platform
import shutil

import pytest

from pytest_cudaforge.errors import BuildFailure
from pytest_cudaforge.languages import Unit, binary_from_bytes, binary_to_bytes, instructions, load

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or shutil.which("objdump") is None, reason="no x86-64, or no objdump"
)


def _build(body: str) -> None:
    source = f"#include <immintrin.h>\nvoid f(float* y, long n) {{ {body} }}"
    built = binary_from_bytes(binary_to_bytes(load("cpp").compile(source, Unit((), ("f",)), "cpu")))
    instructions.check(built.asks)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("*y = __rdtsc() & 1;", "rdtsc"),
        ("unsigned a; *y = __rdtscp(&a) & 1;", "rdtscp"),
        ('long r; asm volatile("syscall" : "=a"(r) : "a"(39) : "rcx", "r11", "memory"); *y = r;', "syscall"),
        ('asm volatile("int $0x80" : : "a"(20) : "memory");', "int $0x80"),
        ('unsigned a = 1, b, c = 0, d; asm volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d)); *y = c;', "cpuid"),
        ('unsigned long r; asm volatile("rdrand %0" : "=r"(r)); *y = r;', "rdrand"),
    ],
)
def test_who_asks_the_machine_is_refused(body: str, told: str) -> None:
    with pytest.raises(BuildFailure, match="asks the machine itself") as caught:
        _build(body)
    assert told in caught.value.what


@pytest.mark.parametrize(
    "body",
    [
        "for (long i = 0; i < n; ++i) y[i] = y[i] * 2;",
        "static const unsigned char bytes[] = {0x0f, 0x05, 0x0f, 0x31}; *y = bytes[n & 3];",
        "*y = (n == 0x050f050f0f310f31);",  # the same bytes within an instruction
        'if (__builtin_cpu_supports("avx2")) *y = 1;',
    ],
)
def test_bytes_that_are_no_such_instruction(body: str) -> None:
    _build(body)


def test_where_nothing_is_suspected_no_disassembler_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert instructions.found(b"\x90" * 64) == ()
    assert instructions.found(b"\x0f\x05") == ()  # without objdump nothing is said
