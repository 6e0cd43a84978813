"""The cpp language with the real g++."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path

import pytest

from pytest_cudaforge.errors import BuildFailure, ToolchainError
from pytest_cudaforge.languages import Unit, cpp, load
from pytest_cudaforge.languages.cpp import CppLanguage


def build(source: str, *kernels: str, constants: tuple[tuple[str, int | float], ...] = ()) -> tuple[str, ...]:
    """The parameter types of the first kernel."""
    return load("cpp").compile(source, Unit(constants, kernels), "cpu").kernels[0].params


def failure(source: str, *kernels: str) -> BuildFailure:
    with pytest.raises(BuildFailure) as caught:
        build(source, *(kernels or ("f",)))
    return caught.value


def test_the_language_is_available_and_says_what_a_candidate_is_made_of() -> None:
    language = load("cpp")
    assert language.availability() == ""
    assert (language.source_name, language.file_names) == ("kernel.cpp", ("kernel.cpp", "plan.py"))
    assert len(language.fingerprint("cpu")) == 64
    assert language.fingerprint("cpu") == language.fingerprint("cpu")


@pytest.mark.parametrize(
    ("source", "kernel", "params"),
    [
        ("void f(const float* x, float* y, int n) {}", "f", ("const float*", "float*", "int")),
        ('extern "C" void f(void* p, const void* q) {}', "f", ("void*", "const void*")),
        ("using real = double; void f(const real* __restrict__ x) {}", "f", ("const double*",)),
        ("#include <cstdint>\nvoid f(int64_t n, uint16_t* h, bool b) {}", "f", ("long", "unsigned short*", "bool")),
        ("template <class T, int N> void f(T* x) {}", "f<float, 4>", ("float*",)),
        ("template <class T, int N> void f(T* x) {}", "f<float, SIZE>", ("float*",)),
        ("void f(int) {} void f(float) {}", "static_cast<void (*)(float)>(f)", ("float",)),
        ("namespace a { void f(long long n, unsigned char* b) {} }", "a::f", ("long long", "unsigned char*")),
        ("struct V { float a, b; }; void f(const V* v) {}", "f", ("const V*",)),
        ("namespace { struct V { int a; }; } static void f(V* v) {}", "f", ("(anonymous namespace)::V*",)),
        ("#include <complex>\nvoid f(std::complex<float>* x) {}", "f", ("std::complex<float>*",)),
        ("void f(_Float16 x, const _Float16* y) {}", "f", ("_Float16", "const _Float16*")),
        ("void f(float* x) noexcept {}", "f", ("float*",)),
        ("int f(float x) { return x; }", "&f", ("float",)),
        ("#define F g\nvoid g(char* x) {}", "F", ("char*",)),
        ("void f() {}", "f", ()),
        ("void f(const int n, float x[4]) {}", "f", ("int", "float*")),
    ],
)
def test_parameter_types_are_exact(source: str, kernel: str, params: tuple[str, ...]) -> None:
    assert build(source, kernel, constants=(("SIZE", 8),)) == params


def test_several_kernels_and_constants_share_a_unit() -> None:
    source = 'static_assert(COLS == 3 && EPS < 0, "");\nvoid a(float* x) {}\nvoid b(int n) {}'
    binary = load("cpp").compile(source, Unit((("COLS", 3), ("EPS", -1e-5)), ("b", "a")), "cpu")
    assert [(k.expression, k.symbol, k.params) for k in binary.kernels] == [
        ("b", "__forge_launch_0", ("int",)),
        ("a", "__forge_launch_1", ("float*",)),
    ]
    assert (binary.language, binary.arch, binary.code[:4]) == ("cpp", "cpu", b"\x7fELF")


def test_macros_of_the_candidate_do_not_break_the_launchers() -> None:
    assert build("#define class struct\n#define type T\n#define value V\nvoid f(float* x) {}", "f") == ("float*",)


def test_nothing_of_the_candidate_runs_while_it_is_compiled(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    source = f'#include <cstdio>\nstatic FILE* opened = std::fopen("{marker}", "w");\nvoid f(float* x) {{}}'
    build(source, "f")
    assert not marker.exists()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("void f(float* x) {\n  y = 1;\n}", "kernel.cpp:2:3: error: 'y' was not declared"),
        ("#include <nowhere.h>\nvoid f() {}", "kernel.cpp:1:10: fatal error: nowhere.h: No such file"),
        ("#error told you\nvoid f() {}", "kernel.cpp:1:2: error: #error told you"),
        ("void g();\nvoid f() { g(); }", "kernel.cpp: error: undefined reference to `g()'"),
        ("void f(float* x) {", "end of kernel.cpp:1:1: error: 'namespace' definition is not allowed here"),
        ("void g() {}", "kernel f: error: 'f' was not declared in this scope"),
        ("int f = 3;", "kernel f: error: not a function"),
        ('void f() { asm("bogus %eax"); }', "kernel.cpp:1: Error: no such instruction: `bogus %eax'"),
        ('asm("bogus %eax");\nvoid f() {}', "kernel.cpp: error: the assembler: no such instruction: `bogus %eax'"),
        (
            'void g() {} __attribute__((section(".preinit_array"), used)) void (*p)() = g;\nvoid f() {}',
            "kernel.cpp: error: the linker: .preinit_array section is not allowed in DSO",
        ),
        ("void f(int) {} void f(float) {}", "kernel f: error: 'decltype' cannot resolve address of overloaded"),
        (
            "#include <vector>\nstruct A { A(A&) = delete; A() {} };\nvoid f() { std::vector<A> v(3, A()); }",
            "kernel.cpp:",
        ),
    ],
)
def test_a_log_names_the_candidates_own_lines(source: str, expected: str) -> None:
    error = failure(source)
    assert expected in error.log
    assert "forge_unit" not in error.log and "__forge" not in error.log
    assert str(error).startswith("g++ refused the source")


def test_a_log_shows_no_line_of_another_file(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("token = swordfish\n")
    error = failure(f'#include "{secret}"\nvoid f() {{}}')
    assert "swordfish" not in error.log + str(error) and "token" not in error.log + str(error)
    assert "errors in other files are not shown" in error.log


def test_the_assembler_shows_no_line_of_another_file(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("swordfish is no instruction\n")
    error = failure(f'asm(".include \\"{secret}\\"");\nvoid f() {{}}')
    assert "swordfish" not in error.log + str(error)


def test_warnings_do_not_fail_a_build_and_are_kept() -> None:
    binary = load("cpp").compile("void f() {\n#warning mind this\n}", Unit((), ("f",)), "cpu")
    assert "kernel.cpp:2:2: warning: #warning mind this" in binary.log


@pytest.mark.parametrize("expression", ["", "  ", 'f"', "f; int g", "f\n#include", "f\\", "f#"])
def test_a_kernel_that_is_no_expression_is_refused(expression: str) -> None:
    with pytest.raises(BuildFailure, match="no C\\+\\+ expression"):
        build("void f() {}", expression)


@pytest.mark.parametrize("source", ["void f() {}\0", "// \ud800\nvoid f() {}", "x" * (5 * 1024 * 1024)])
def test_a_source_that_is_no_text_is_refused(source: str) -> None:
    assert "no C++ text" in str(failure(source))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('#if __has_include("/etc/passwd")\n#endif', "__has_include of /etc/passwd"),
        ('#if __has_include("pyproject.toml")\n#endif', "__has_include of pyproject.toml"),
        ("#if __has_include(<../secret.h>)\n#endif", "__has_include of ../secret.h"),
        ("#define WHERE <cmath>\n#if __has_include(WHERE)\n#endif", "__has_include of a computed name"),
        ("#define ASK __has_include\n#if ASK(<cmath>)\n#endif", "__has_include of a computed name"),
        ('#if __has_inc\\\nlude("/etc/passwd")\n#endif', "__has_include of /etc/passwd"),
        ("const char* when = __DATE__;", "__DATE__"),
        ("const char* when = __DA\\ \nTE__;", "__DATE__"),
        ("#define P(a, b) a##b\nconst char* when = P(__DA, TE__);", "what it pastes together of __DA"),
        ("%:define P(a, b) a %:%: b\nconst char* when = P(__, TIME__);", "what it pastes together of __"),
        ("#define P(a, b) a##b\n#if P(__has, _include)(<omp.h>)\n#endif", "what it pastes together of __has"),
        ("const char* when = __TIME__;", "__TIME__"),
    ],
)
def test_a_source_that_asks_for_its_machine_is_refused(text: str, told: str) -> None:
    assert f"the source asks for {told}" in str(failure(f"{text}\nvoid f() {{}}", "f"))


@pytest.mark.parametrize(
    "text",
    [
        "#ifdef __has_include\n#endif",
        "#if defined(__has_include) && __has_include(<cmath>)\n#include <cmath>\n#endif",
        "int my__DATE__s = 3;",
        "#define P(a, b) a##b\nint P(my__DA, TE__s) = 3;",
    ],
)
def test_a_source_may_ask_for_headers(text: str) -> None:
    build(f"{text}\nvoid f() {{}}", "f")


def test_constants_of_one_letter_do_not_break_the_launchers() -> None:
    names = "ABCDEFGHIJKLMNOPQRSTUVWXYZ_"
    constants = tuple((name, 1) for name in names)
    assert build("void f(float* x) { x[A] = N; }", "f", constants=constants) == ("float*",)


def test_a_candidate_cannot_pass_for_a_broken_toolchain() -> None:
    for text in ("/usr/bin/ld: cannot find -lgomp", "No space left on device", "cannot execute 'cc1plus'"):
        assert text in failure(f"#error {text}").log


@pytest.mark.parametrize("constants", [(("a b", 1),), (("cols", 1),), (("A=1 -I/", 1),), (("A", float("nan")),)])
def test_a_constant_that_is_no_macro_is_refused(constants: tuple[tuple[str, int | float], ...]) -> None:
    with pytest.raises(BuildFailure, match="constant"):
        build("void f() {}", "f", constants=constants)


def test_a_parameter_a_plan_cannot_pass_still_compiles_and_is_named_later() -> None:
    assert build("struct S { int a, b; };\nvoid f(S s, float& r) {}", "f") == ("S", "float&")


def test_another_arch_is_refused() -> None:
    with pytest.raises(BuildFailure, match="sm_90"):
        load("cpp").compile("", Unit((), ()), "sm_90")


@pytest.mark.parametrize(
    "words", ["/usr/bin/ld: cannot find -lgomp", "cc1plus: No space left on device", "g++: cannot execute this"]
)
def test_a_candidate_cannot_pass_for_a_broken_compiler(words: str) -> None:
    """A broken compiler ends a whole run: that is the machine's to say; ``#line`` puts it where g++ names a file."""
    assert "g++ refused the source" in str(failure(f'#line 1 "{words}"\nint broken = ;\nvoid f() {{}}'))


def test_a_broken_compiler_is_told_from_a_broken_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\necho '/usr/bin/ld: cannot find -lgomp' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(ToolchainError, match="cannot find -lgomp"):
        build("void f() {}", "f")


def test_a_missing_compiler_is_said_with_its_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    cpp._compiler_version.cache_clear()
    try:
        assert "g++ is not on PATH" in CppLanguage().availability()
        assert "apt-get install g++" in CppLanguage().availability()
        with pytest.raises(ToolchainError):
            build("void f() {}", "f")
    finally:
        cpp._compiler_version.cache_clear()


def test_line_information_is_added_on_request() -> None:
    unit = Unit((), ("f",))
    source = "void f(float* x) { x[0] = 1; }"
    plain = load("cpp").compile(source, unit, "cpu").code
    assert b".debug_line" in load("cpp").compile(source, unit, "cpu", lineinfo=True).code
    assert b".debug_line" not in plain


_ASKING = """
__attribute__((target_clones("avx2", "default"))) int cloned(int x) { return x + 1; }
extern "C" int asked() {
  __builtin_cpu_init();
  return !!__builtin_cpu_supports("sse2") + 2 * !!__builtin_cpu_supports("avx2")
    + 4 * !!__builtin_cpu_supports("avx512f") + 8 * (__builtin_cpu_is("intel") || __builtin_cpu_is("amd"));
}
void f(int* y) { *y = cloned(*y); }
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="CPUs of x86-64")
@pytest.mark.parametrize(("arch", "most"), [("cpu-x86-64-v3", 3), ("cpu-x86-64", 1)])
def test_what_is_asked_in_a_call_is_answered_as_an_older_cpu_would(tmp_path: Path, arch: str, most: int) -> None:
    native, older = (load("cpp").compile(_ASKING, Unit((), ("f",)), one).code for one in ("cpu", arch))
    (tmp_path / "native.so").write_bytes(native)
    (tmp_path / "older.so").write_bytes(older)
    usual, found = (ctypes.CDLL(str(tmp_path / name)).asked() for name in ("native.so", "older.so"))
    assert found == usual & most and found & 1
    assert b"cloned" in older and native.count(b"resolver") > older.count(b"resolver") == 0
    assert arch in cpp.older_archs(_ASKING) or not usual & 2
