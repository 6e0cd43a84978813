"""Figures in text: what is one, what it is worth, and which two are the same."""

from __future__ import annotations

import pytest

from pytest_cudaforge.figures import found, read, show


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("now 71.9 us (70 us to 1.2 ms)", [(71.9e-6, "time"), (70e-6, "time"), (1.2e-3, "time")]),
        ("91.2 % of 4.2 TB/s for 262 MB", [(0.912, "share"), (4.2e12, "byte rate"), (262e6, "bytes")]),
        ("1.5e6 ns, 3µs, 2 milliseconds", [(1.5e-3, "time"), (3e-6, "time"), (2e-3, "time")]),
        ("1,234,567 instructions and 65k more", [(1234567.0, ""), (65e3, "")]),
        ("1.3x, 2× or 3 times as fast", [(1.3, "ratio"), (2.0, "ratio"), (3.0, "ratio")]),
        ("12 kFLOP at 3 GFLOP/s, 1980 MHz", [(12e3, "flop"), (3e9, "flop rate"), (1.98e9, "frequency")]),
        ("64 KiB, 96 kB/block", [(65536.0, "bytes"), (96e3, "bytes")]),
        ("(75.0%) of 32B sectors", [(0.75, "share"), (32.0, "bytes")]),
        ("2^31 elements, [64, 4096]", [(2.0**31, ""), (64.0, ""), (4096.0, "")]),
        ("10 x 20 tiles", [(10.0, ""), (20.0, "")]),
        ("it ends in 12.", [(12.0, "")]),
    ],
)
def test_figures_have_values_in_base_units(text: str, expected: list[tuple[float, str]]) -> None:
    assert [(pytest.approx(figure.value), figure.dimension) for figure in read(text)] == expected


@pytest.mark.parametrize(
    "text",
    [
        "float4 and fp32",
        "sm_90a",
        "kernel.cu:12",
        "kernel.cu, line 14",
        "kernel.cpp lines 3 to 9",
        "x4x4 tile",
        "0x1f",
        "version 1.2.3",
        "v2",
        "the L2 cache",
        "__half2",
        "conv2d_3x3",
        "3xTF32 4x4",
    ],
)
def test_numbers_in_names_are_no_figures(text: str) -> None:
    assert read(text) == ()


@pytest.mark.parametrize(
    ("claim", "known"),
    [
        ("1.5 ms", "1500321 ns"),
        ("about 72 us", "71.9 us"),
        ("72", "now 71.9 us"),
        ("71.9", "71.9 us"),
        ("87 %", "reached to 87%"),
        ("87.3 %", "share 0.8731"),
        ("13 % short of it", "reached to 87%"),
        ("2.04x its bound", "reached to 49%"),
        ("50 % more", "1.5x"),
        ("64 KB", "65536 B"),
        ("48 kB", "49152 byte"),
        ("a quarter of a million, 250,000", "250000 inst"),
        ("4200 GB/s", "4.2 TB/s"),
        ("-3 %", "-3%"),
        ("100 us", "bound 103 us"),
    ],
)
def test_the_same_figure_in_other_words(claim: str, known: str) -> None:
    assert all(found(figure, read(known)) for figure in read(claim)), (read(claim), read(known))


@pytest.mark.parametrize(
    ("claim", "known"),
    [
        ("72 ms", "71.9 us"),
        ("75 us", "71.9 us"),
        ("92 %", "87 %"),
        ("3.65 TB/s", "4.2 TB/s, 262 MB, 71.8 us"),
        ("32 MB", "32 us"),
        ("512 threads", "256, 1024"),
        ("41 registers", "36 registers"),
        ("100 us", "bound 140 us"),
        ("1.9x", "1.5x"),
    ],
)
def test_another_figure(claim: str, known: str) -> None:
    assert not found(read(claim)[0], read(known))


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (71_900, "ns", "71.9 us"),
        (71.9, "usecond", "71.9 us"),
        (1.5e9, "byte", "1.5 GB"),
        (1.98, "Gbyte/second", "1.98 GB/s"),
        (49_152, "byte/block", "49.2 kB/block"),
        (41.53, "%", "41.5 %"),
        (36, "register/thread", "36 register/thread"),
        (12_345_670, "inst", "12.3 M inst"),
        (3.3, "sector/request", "3.3 sector/request"),
        (0.8731, "", "0.873"),
        (16_384, "block", "16384 block"),
        (1.98e9, "Hz", "1.98 GHz"),
        (float("nan"), "%", "nan %"),
        (float("inf"), "", "inf"),
        (0, "byte", "0 B"),
    ],
)
def test_figures_are_written_with_three_digits(value: float, unit: str, text: str) -> None:
    assert show(value, unit) == text
