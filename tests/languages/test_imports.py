"""What a library asks of the dynamic loader, read from real builds of g++."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_cudaforge.errors import BuildFailure
from pytest_cudaforge.languages import Unit, load
from pytest_cudaforge.languages.imports import Import, check, check_extension, imports


def _code(source: str) -> bytes:
    return load("cpp").compile(source, Unit((), ("f",)), "cpu").code


HONEST = {
    "plain": "#include <cmath>\nvoid f(const float* x, float* y) { *y = std::exp(*x); }",
    "OpenMP": "#include <omp.h>\nvoid f(float* x) {\n#pragma omp parallel for\nfor (int i = 0; i < 9; ++i) x[i] = "
    "omp_get_thread_num(); }",
    "the standard library": """
#include <condition_variable>
#include <future>
#include <iostream>
#include <memory>
#include <mutex>
#include <random>
#include <regex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>
struct Base { virtual ~Base() {} virtual int get() = 0; };
struct Own : Base { int get() override { return 1; } };
static std::vector<float> all(10, 1.0f);
static thread_local std::vector<int> mine;
static std::once_flag once;
static std::mutex lock;
void f(const float* x, float* y, long n) {
  std::call_once(once, [] { all.push_back(2); });
  std::unique_ptr<Base> own(new Own);
  try { if (n < 0) throw std::runtime_error("negative"); dynamic_cast<Own&>(*own).get(); }
  catch (const std::exception& error) { std::cerr << error.what(); }
  std::thread other([&] { std::lock_guard<std::mutex> held(lock); mine.push_back(1); });
  other.join();
  std::condition_variable waits; waits.notify_all();
  std::unordered_map<int, std::string> names; names[1] = "one";
  *y = *x + std::async(std::launch::async, [] { return 1; }).get() + std::regex_match(names[1], std::regex("o.*"));
}
""",
    "a constructor": "static int ready; __attribute__((constructor)) static void early() { ready = 1; }\n"
    "void f(int* x) { *x = ready; }",
    "weak, and there": "__attribute__((weak)) int other() { return 1; }\nvoid f(int* x) { if (other) *x = other(); }",
    "a name of its own": "int dlopen(int x) { return x + 1; }\nvoid f(int* x) { *x = dlopen(*x); }",
}


@pytest.mark.parametrize("source", HONEST.values(), ids=HONEST)
def test_an_honest_library_asks_for_what_every_process_has(source: str) -> None:
    check(_code(source))


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ('#include <dlfcn.h>\nvoid f(void** x) { *x = dlsym(dlopen("libtorch_cpu.so", 4), "a"); }', "dlopen, dlsym"),
        (
            "#include <link.h>\nint see(dl_phdr_info*, size_t, void*);\nvoid f(int* x) { *x = dl_iterate_phdr(0, x); }",
            "dl_i",
        ),
        ("#include <link.h>\nvoid f(void** x) { *x = _r_debug.r_map; }", "_r_debug"),
        ('extern "C" void* table() __asm__("dlsym");\nvoid f(void** x) { *x = table(); }', "dlsym"),
        ("#include <dlfcn.h>\nstatic auto* volatile by = &dlsym;\nvoid f(void** x) { *x = (void*)by; }", "dlsym"),
        ('extern "C" __attribute__((weak)) int aoti(int);\nvoid f(int* x) { *x = aoti ? aoti(1) : 2; }', "aoti weak"),
        ('asm(".weak hidden_name\\n.data\\n.quad hidden_name\\n.text");\nvoid f(int* x) {}', "hidden_name weak"),
        (
            "#include <chrono>\nvoid f(long* x) { *x = std::chrono::system_clock::now().time_since_epoch().count(); }",
            "time",
        ),
        ("#include <omp.h>\nvoid f(double* x) { *x = omp_get_wtime(); }", "the time with omp_get_wtime"),
        ('#include <cstdlib>\nvoid f(bool* x) { *x = std::getenv("CI"); }', "files with getenv"),
        ("#include <unistd.h>\nvoid f(char*** x) { *x = environ; }", "environ"),
        (
            "#include <errno.h>\nvoid f(int* x) { *x = program_invocation_short_name[0]; }",
            "program_invocation_short_name",
        ),
        ('#include <fstream>\nvoid f(int* x) { std::ifstream("/etc/hostname") >> *x; }', "basic_filebuf"),
        ("#include <malloc.h>\nvoid f(int* x) { *x = mallopt(M_PERTURB, 7); }", "mallopt"),
    ],
)
def test_one_that_looks_for_other_code_is_refused(source: str, words: str) -> None:
    code = _code(source)
    with pytest.raises(BuildFailure, match=words) as caught:
        check(code)
    assert caught.value.expected and caught.value.remedy


def test_symbols_are_those_that_the_loader_binds() -> None:
    found = imports(_code(HONEST["plain"]))
    assert Import("__cxa_finalize", weak=True) in found
    assert any(one.name == "expf" and not one.weak for one in found)


@pytest.mark.parametrize("cut", [0, 5, 60, 200, 2000])
def test_what_is_no_library_is_refused(cut: int) -> None:
    with pytest.raises(BuildFailure, match="cannot be read"):
        imports(_code(HONEST["plain"])[:cut])


_PAST = """
namespace at {
struct Tensor { int x; };
namespace cpu { Tensor gelu(const Tensor&); }
namespace native { Tensor gelu_cpu(const Tensor&); }
namespace _ops {
struct add_Tensor { static Tensor redispatch(int, const Tensor&); static Tensor call(const Tensor&); };
}
Tensor add(const Tensor&);
}
extern "C" int f() { at::Tensor x{1}; return at::CALL.x; }
"""


@pytest.mark.parametrize("call", ["cpu::gelu(x)", "native::gelu_cpu(x)", "_ops::add_Tensor::redispatch(1, x)"])
def test_operators_past_the_dispatcher_are_no_own_work(call: str, tmp_path: Path) -> None:
    with pytest.raises(BuildFailure, match="past the dispatcher"):
        check_extension(_library(tmp_path, _PAST.replace("CALL", call)))


def test_no_process_ends_before_its_time(tmp_path: Path) -> None:
    for name in ("_exit", "_Exit", "quick_exit"):
        code = _library(tmp_path, f'extern "C" void {name}(int);\nvoid f() {{ {name}(0); }}')
        with pytest.raises(BuildFailure, match="end its process at once"):
            check_extension(code)
    check_extension(_library(tmp_path, 'extern "C" void exit(int);\nvoid f() { exit(1); }'))


@pytest.mark.parametrize("checked", [check, check_extension])
def test_nothing_runs_as_a_library_is_unloaded(checked: Callable[[bytes], None]) -> None:
    bye = "__attribute__((destructor)) static void bye() { __builtin_trap(); }\nvoid f() {}"
    with pytest.raises(BuildFailure, match="as it is unloaded"):
        checked(_code(bye))
    checked(_code(bye.replace("destructor", "constructor").replace("__builtin_trap();", "")))


@pytest.mark.parametrize("call", ["add(x)", "_ops::add_Tensor::call(x)"])
def test_operators_that_everybody_calls(call: str, tmp_path: Path) -> None:
    check_extension(_library(tmp_path, _PAST.replace("CALL", call)))


_DECLARED = """
namespace at {
void enableRecordFunction(bool);
struct RecordFunctionTLS {};
void set_record_function_tls_(const RecordFunctionTLS&);
void clearThreadLocalCallbacks();
void removeCallback(unsigned long);
bool isRecordFunctionEnabled();
}
namespace at::compositeexplicitautograd { void ones(int); }
namespace dnnl { void sgemm(int); }
namespace c10 { struct Dispatcher { static void realSingleton(); void findSchemaOrThrow(const char*, const char*); }; }
extern "C" {
void sgemm_(int);
void cblas_sgemm(int);
void vsExp(int);
void vmsTanh(int);
void mkl_sparse_s_mv(int);
void dnnl_primitive_execute(int);
void LAPACKE_sgesv(int);
void SAXPY(int);
void aoti_torch_cpu_gelu(int);
void* dlsym(void*, const char*);
void* dlopen(const char*, int);
int dladdr(const void*, void*);
void cublasSgemm_v2(int);
void mine(int);
float expf(float);
float sincosf(float);
int vsnprintf(int);
void f(int n) { CALL; }
}
"""


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("at::compositeexplicitautograd::ones(n)", "past the dispatcher"),
        ("c10::Dispatcher::realSingleton()", "past the dispatcher"),
        ('c10::Dispatcher().findSchemaOrThrow("aten::gelu", "")', "past the dispatcher"),
        ("aoti_torch_cpu_gelu(n)", "past the dispatcher"),
        ('dlsym(nullptr, "cblas_sgemm")', "as it runs"),
        ('dlopen("libmkl_rt.so", n)', "as it runs"),
    ],
)
def test_nobody_looks_for_what_is_not_to_be_called(call: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(BuildFailure, match=words):
        check_extension(_library(tmp_path, _DECLARED.replace("CALL", call)))


@pytest.mark.parametrize(
    "call",
    [
        "at::enableRecordFunction(false)",
        "at::set_record_function_tls_(at::RecordFunctionTLS())",
        "at::clearThreadLocalCallbacks()",
        "at::removeCallback(n)",
    ],
)
def test_nobody_turns_a_profiler_off(call: str, tmp_path: Path) -> None:
    with pytest.raises(BuildFailure, match="turns off what sees"):
        check_extension(_library(tmp_path, _DECLARED.replace("CALL", call)))


@pytest.mark.parametrize(
    "call",
    [
        *("dnnl::sgemm(n)", "sgemm_(n)", "cblas_sgemm(n)", "vsExp(n)", "vmsTanh(n)", "mkl_sparse_s_mv(n)"),
        *("dnnl_primitive_execute(n)", "LAPACKE_sgesv(n)", "SAXPY(n)"),
    ],
)
def test_a_librarys_functions_are_no_own_work(call: str, tmp_path: Path) -> None:
    with pytest.raises(BuildFailure, match="a library that lies in torch's own"):
        check_extension(_library(tmp_path, _DECLARED.replace("CALL", call)))


@pytest.mark.parametrize(
    "call",
    [
        "dladdr(&n, &n)",
        "cublasSgemm_v2(n)",
        "mine(n)",
        "expf(n)",
        "sincosf(n)",
        "vsnprintf(n)",
        "at::isRecordFunctionEnabled()",
    ],
)
def test_other_functions_are_nobodys_concern(call: str, tmp_path: Path) -> None:
    check_extension(_library(tmp_path, _DECLARED.replace("CALL", call)))


def _library(folder: Path, source: str) -> bytes:
    """As torch links an extension: others define what it does not."""
    (folder / "a.cpp").write_text(source)
    subprocess.run(["g++", "-shared", "-fPIC", "-o", folder / "a.so", folder / "a.cpp"], check=True)
    return (folder / "a.so").read_bytes()
