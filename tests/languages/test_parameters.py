"""Which arguments a parameter takes, and the bytes they become. Pure."""

from __future__ import annotations

import math
import struct

import pytest

from pytest_cudaforge.errors import BuildFailure, ConfigError
from pytest_cudaforge.languages import Binary, KernelInfo, Unit, check_arguments, load, units_of
from pytest_cudaforge.languages.logs import MAX_LOG_LINES, reduce_log
from pytest_cudaforge.languages.parameters import argument_problem, canonical, pack, pointee, size_bytes
from pytest_cudaforge.languages.symbols import demangle, describers_in, parameter_types
from pytest_cudaforge.plan import DTYPE_BYTES, Argument, Buffer, Launch, LaunchPlan, TensorSpec, TracedPlan, View
from pytest_cudaforge.records import KernelResources

VIEW = View(0, (1,), (1,))


@pytest.mark.parametrize(
    ("param", "dtypes"),
    [
        ("const float*", {"float32"}),
        ("float*", {"float32"}),
        ("double*", {"float64"}),
        ("const __half*", {"float16"}),
        ("__half2*", {"float16"}),
        ("_Float16*", {"float16"}),
        ("__nv_bfloat16*", {"bfloat16"}),
        ("const __nv_bfloat162*", {"bfloat16"}),
        ("unsigned short*", {"int16", "float16", "bfloat16"}),
        ("const short*", {"int16", "float16", "bfloat16"}),
        ("int*", {"int32"}),
        ("unsigned int*", {"int32"}),
        ("const long*", {"int64"}),
        ("long long*", {"int64"}),
        ("bool*", {"bool"}),
        ("signed char*", {"int8", "uint8", "bool", "float8_e4m3fn", "float8_e5m2"}),
        ("unsigned char*", {"int8", "uint8", "bool", "float8_e4m3fn", "float8_e5m2"}),
        ("__nv_fp8_e4m3*", {"float8_e4m3fn"}),
        ("float4*", {"float32", "complex64"}),
        ("const double2*", {"float64", "complex128"}),
        ("std::complex<float>*", {"complex64"}),
        ("volatile int*", {"int32"}),
        ("void*", set(DTYPE_BYTES)),
        ("const void*", set(DTYPE_BYTES)),
        ("char*", set(DTYPE_BYTES)),
        ("const uint4*", set(DTYPE_BYTES)),
        ("Packed*", set(DTYPE_BYTES)),
        ("(anonymous namespace)::V*", set(DTYPE_BYTES)),
        ("float**", set()),
        ("const float* const*", set()),
        ("void (*)(int)", set()),
    ],
)
def test_pointers_take_their_own_dtypes(param: str, dtypes: set[str]) -> None:
    assert {dtype for dtype in DTYPE_BYTES if argument_problem(param, VIEW, dtype) == ("", "")} == dtypes


@pytest.mark.parametrize(
    ("param", "value", "packed"),
    [
        ("int", 7, struct.pack("<i", 7)),
        ("int", -(2**31), struct.pack("<i", -(2**31))),
        ("unsigned int", 2**32 - 1, b"\xff" * 4),
        ("long long", 2**40, struct.pack("<q", 2**40)),
        ("long", -1, b"\xff" * 8),
        ("unsigned long", 2**64 - 1, b"\xff" * 8),
        ("short", -2, struct.pack("<h", -2)),
        ("char", 65, b"A"),
        ("unsigned char", 255, b"\xff"),
        ("int", True, struct.pack("<i", 1)),
        ("float", 1e-5, struct.pack("<f", 1e-5)),
        ("float", 3, struct.pack("<f", 3.0)),
        ("float", math.inf, struct.pack("<f", math.inf)),
        ("double", 1e300, struct.pack("<d", 1e300)),
        ("__half", 1.5, struct.pack("<e", 1.5)),
        ("__nv_bfloat16", 1.0, b"\x80\x3f"),
        ("__nv_bfloat16", -math.inf, b"\x80\xff"),
        ("__nv_bfloat16", 1.00390625, b"\x80\x3f"),
        ("__nv_bfloat16", 1.01171875, b"\x82\x3f"),
        ("bool", True, b"\x01"),
        ("bool", 0, b"\x00"),
    ],
)
def test_numbers_that_fit_are_packed(param: str, value: int | float | bool, packed: bytes) -> None:
    assert argument_problem(param, value, None) == ("", "")
    assert pack(param, value) == packed
    assert size_bytes(param) == len(packed)


@pytest.mark.parametrize(
    ("param", "value", "words"),
    [
        ("int", 2**31, "does not fit"),
        ("int", 1.0, "float 1.0"),
        ("unsigned int", -1, "does not fit"),
        ("long long", 2**63, "does not fit"),
        ("unsigned char", 256, "does not fit"),
        ("float", 1e39, "1e+39"),
        ("__half", 70000.0, "70000"),
        ("bool", 2, "2"),
        ("bool", 1.0, "1.0"),
        ("int", None, "None"),
        ("float", VIEW, "float32 tensor"),
        ("float*", 3, "number 3"),
        ("Struct", 3, "type Struct"),
        ("float&", 3.0, "type float&"),
        ("float4", VIEW, "type float4"),
        ("__int128", 3, "type __int128"),
    ],
)
def test_what_does_not_fit_is_said(param: str, value: Argument, words: str) -> None:
    what, expected = argument_problem(param, value, "float32")
    assert words in what
    assert expected


def test_none_is_a_null_pointer() -> None:
    assert argument_problem("const float*", None, None) == ("", "")


def test_packing_refuses_what_was_not_checked() -> None:
    for param, value in (("Struct", 1), ("int", 2**40), ("int", 1.5)):
        with pytest.raises(ValueError, match=r"cannot be passed|no number"):
            pack(param, value)


def plan_of(*launches: Launch, dtype: str = "float32") -> TracedPlan:
    spec = TensorSpec((4,), dtype, (1,))
    return TracedPlan(LaunchPlan((Buffer("input", spec, "0"),), launches, View(0, (4,), (1,))))


def binary(*params: str, constants: tuple[tuple[str, int | float], ...] = ()) -> Binary:
    return Binary("cpp", "cpu", constants, b"", (KernelInfo("f", "f", params, KernelResources("f")),))


def test_a_launch_that_matches_is_silent() -> None:
    check_arguments(plan_of(Launch("f", (VIEW, 4, 0.5))), [binary("const float*", "int", "float")])


def test_a_wrong_argument_is_named_by_kernel_position_and_type() -> None:
    with pytest.raises(BuildFailure) as caught:
        check_arguments(plan_of(Launch("f", (VIEW, 4), line=9), dtype="bfloat16"), [binary("const float*", "int")])
    text = str(caught.value)
    assert 'plan.py:9: kernel "f", argument 1 of 2 (const float*): it is a bfloat16 tensor' in text
    assert "float32 for const float*" in text


def test_a_wrong_count_shows_the_parameters() -> None:
    with pytest.raises(BuildFailure, match=r"launched with 1 arguments\n  expected: 2: \(const float\*, int\)"):
        check_arguments(plan_of(Launch("f", (VIEW,))), [binary("const float*", "int")])


def test_the_prepare_plan_is_checked_too() -> None:
    plan = plan_of(Launch("f", (VIEW, 1.5)))
    with pytest.raises(BuildFailure, match=r"float 1\.5"):
        check_arguments(TracedPlan(plan_of().main, plan.main), [binary("const float*", "int")])


def test_a_kernel_nobody_compiled_is_named() -> None:
    with pytest.raises(BuildFailure, match='no compiled kernel "g"'):
        check_arguments(plan_of(Launch("g", ())), [binary()])


def test_constants_that_differ_only_in_type_are_refused() -> None:
    plan = plan_of(Launch("f", (), constants=(("A", 1),)), Launch("f", (), constants=(("A", 1.0),)))
    with pytest.raises(BuildFailure, match="differ only in int and float"):
        check_arguments(plan, [binary(constants=(("A", 1),))])


def test_units_group_kernels_by_constants_in_order() -> None:
    a, b = (("A", 1),), (("A", 2),)
    plan = plan_of(
        Launch("f", (), constants=a), Launch("g", ()), Launch("h", (), constants=a), Launch("f", (), constants=b)
    )
    prepare = plan_of(Launch("p", ()), Launch("g", ())).main
    assert units_of(TracedPlan(plan.main, prepare)) == (Unit(a, ("f", "h")), Unit((), ("g", "p")), Unit(b, ("f",)))


def test_languages_load_by_name_and_by_path() -> None:
    assert load("cpp").name == "cpp"
    assert load("pytest_cudaforge.languages.cpp:CppLanguage").name == "cpp"


@pytest.mark.parametrize(
    "name", ["rust", "", "no.such:Thing", "json:loads", "pytest_cudaforge.languages:Nothing", ":x"]
)
def test_an_unknown_language_is_a_config_error(name: str) -> None:
    with pytest.raises(ConfigError):
        load(name)


def test_types_are_written_as_people_write_them() -> None:
    assert canonical("float const*") == "const float*"
    assert canonical("unsigned short const*") == "const unsigned short*"
    assert canonical("float**") == "float**"
    assert pointee("const volatile float*") == "float"
    assert pointee("int") is None


def test_describers_are_read_from_bytes_without_running_anything() -> None:
    code = b"\0_Z12__forge_typeILi0EFvPKfPfiEE\0junk\0_ZL12__forge_typeILi1EFvvEE\0"
    found = describers_in(code)
    assert parameter_types(found[0], "f") == ("const float*", "float*", "int")
    assert parameter_types(found[1], "g") == ()


def test_describers_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(BuildFailure, match="__forge_"):
        describers_in(b"\0_Z12__forge_typeILi0EFviEE\0_Z12__forge_typeILi0EFvfEE\0")


@pytest.mark.parametrize("symbol", ["", "f", "_Z1fv", "_Z12__forge_typeILi0EFv", "_Z" + "P" * 5000, "\N{BULLET}"])
def test_a_symbol_that_spells_no_types_is_a_build_failure(symbol: str) -> None:
    with pytest.raises(BuildFailure, match="cannot be read"):
        parameter_types(symbol, "f")


def test_demangling_foreign_text_answers_none() -> None:
    assert demangle("hello") is None
    assert demangle("_Z1fi") == "f(int)"


def test_a_long_log_is_capped() -> None:
    log = "\n".join(f"kernel.cpp:{i}:1: error: no" for i in range(1, 1000))
    lines = reduce_log(log, {"kernel.cpp"}).splitlines()
    assert len(lines) == MAX_LOG_LINES + 1
    assert lines[-1] == f"... {999 - MAX_LOG_LINES} more lines"


def test_other_files_lines_and_their_excerpts_are_dropped() -> None:
    log = (
        "/etc/passwd:1:1: error: 'root' does not name a type\n"
        "    1 | root:x:0:0\n"
        "      | ^~~~\n"
        "kernel.cpp:2:3: error: mine\n"
        "    2 | mine\n"
        "/usr/include/../../etc/passwd:3:1: error: root:x\n"
        "/usr/include/vector:9:1: error: static assertion failed: sorted\n"
        "    9 | their line\n"
    )
    assert reduce_log(log, {"kernel.cpp"}, ("/usr/include/",)) == (
        "kernel.cpp:2:3: error: mine\n    2 | mine\n"
        "/usr/include/vector:9:1: error: static assertion failed: sorted\n"
        "(2 errors in other files are not shown)"
    )
