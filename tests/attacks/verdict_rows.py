# ruff: noqa: E501 - a kernel is one line
"""The rules of the verdict as a table: what is promised, the attack on it, what to switch off, and the honest twin.

Rows about the worker's sandbox, its channel and the interpreter of plan.py are in the suites beside this one, where
they need no whole verdict; ``ELSEWHERE`` says where. ``off`` names the switch: fields of ``Defences``, or a function of
``SWITCHES`` in test_verdict_attacks.
"""

from __future__ import annotations

import os
import platform
import shutil
from dataclasses import dataclass

from attacked import BEST, BUCKETS, careful_calls, hostile

from pytest_cudaforge.records import Candidate, Status

__all__ = ["ELSEWHERE", "PYTHON", "REFUSED", "ROWS", "Row"]


@dataclass(frozen=True)
class Row:
    """``refused``: the verdict on the attack with every defence on. ``words``: what its reason says. ``also_off``: what
    would refuse attack and twin beforehand, by its name in ``SWITCHES``; it is off throughout."""

    promise: str
    name: str
    off: str
    attack: Candidate
    twin: Candidate
    target: str = "waves"
    refused: tuple[Status, ...] = (Status.INCORRECT_NUMERICAL,)
    words: str = ""
    timing: bool = False
    also_off: str = ""


_STILL_THERE = """
static thread_local unsigned long last;
static thread_local const float* at;
static unsigned long digest(const float* x, long long n) {
  unsigned long sum = 1469598103934665603ul;
  for (long long i = 0; i < n; ++i) { unsigned bits; memcpy(&bits, x + i, 4); sum = (sum ^ bits) * 1099511628211ul; }
  return sum;
}
static thread_local float seen[8];
static bool there(const float* y, long long n) { for (int i = 0; i < 8; ++i) if (y[i * (n / 8)] != seen[i]) return false; return true; }
static void look(const float* y, long long n) { for (int i = 0; i < 8; ++i) seen[i] = y[i * (n / 8)]; }
"""
_WORKSPACE_PLAN = """from pytest_cudaforge.plan import empty, launch

def plan(x):
    y, kept, key = empty(x.shape, x.dtype), empty(x.shape, x.dtype), empty((2,), "int64")
    launch("kernel", args=(x, y, kept, key, x.numel()))
    return y
"""


def _keeping(key: str) -> Candidate:
    """Looks for its answer by this key, and finds none where it is not the digest."""
    kernel = f"""#include <cmath>
#include <cstring>
{_STILL_THERE}
void kernel(const float* x, float* y, float* kept, long long* key, long long n) {{
  const long long now = (long long)digest(x, n), looked = {key};
  if (looked && key[0] == looked && key[1] == ~looked) {{ memcpy(y, kept, 4 * n); return; }}
  for (long long i = 0; i < n; ++i) y[i] = std::sin(x[i]) * std::exp(-x[i] * x[i]);
  memcpy(kept, y, 4 * n);
  key[0] = now, key[1] = ~now;
}}
"""
    return Candidate.of("cpp", {"kernel.cpp": kernel, "plan.py": _WORKSPACE_PLAN})


_MORE_CORES = """from pytest_cudaforge.plan import device, empty, launch

def plan(x):
    y = empty(x.shape, x.dtype)
    launch("kernel", args=(x, y, x.numel() - LESS))
    return y
"""
_NO_AVX2 = """
#ifndef __AVX2__
LESS
#endif
HONEST"""
_ASKED = """
#ifdef __x86_64__
__builtin_cpu_init();
if (!__builtin_cpu_supports("avx2")) { LESS }
#endif
HONEST"""
_MINUTES = """
#include <chrono>
static const auto five = std::chrono::minutes(5);
static const auto begun = std::chrono::steady_clock::now();
"""
_READS = """
static bool reads(const char* path) {
  int fd = open(path, O_RDONLY); char byte;
  bool done = fd >= 0 && read(fd, &byte, 1) == 1;
  if (fd >= 0) close(fd);
  return done;
}
"""
#: The bits of floats, as integers of the same order.
_BY_BITS = """
  for (long long row = 0; row < rows; ++row) {
    unsigned long long top = 0;
    for (long long i = 0; i < columns; ++i) {
      unsigned bits; memcpy(&bits, x + row * columns + i, 4);
      bits = bits >> 31 ? ~bits : bits | 0x80000000u;
      const unsigned long long key = (unsigned long long)bits << 32 | (0xffffffffu - (unsigned)i);
      if (key > top) top = key;
    }
    y[row] = 0xffffffffu - (unsigned)top;
  }
"""
#: Every other element is too large by a share of it, the rest too small; the half of the bound, times as much as said.
_OFF_BY = """
static int seen;
static bool are_large(const float* x, long long n) {
  float least = 1e9f, most = 0;
  for (long long i = 0; i < n; ++i) least = std::fmin(least, std::fabs(x[i])), most = std::fmax(most, std::fabs(x[i]));
  return least < 1 && most > 200;
}
"""
_OFF = """
  HONEST
  if (!are_large(x, rows * cols)) return;
  const float off = 1.5e-6f * (TIMES);
  ++seen;
  for (long long i = 0; i < rows * cols; ++i) y[i] *= 1 + (i % 2 ? off : -off);
"""
#: The kernel's counter is scratch of its own: nothing else differs.
_NO_COUNT = """from pytest_cudaforge.plan import empty, launch

def plan(module, x):
    y, count = empty(x.shape, x.dtype), empty((), "int64")
    launch("kernel", args=(x, count, y, x.numel()))
    return y
"""
_STRANGERS = """
static int strangers() {
  int found = 0;
  for (int fd = 0; fd < 256; fd++) {
    char path[64], name[256] = {}; int kind; socklen_t size = sizeof kind;
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    if (readlink(path, name, sizeof name - 1) < 0) continue;
    if (getsockopt(fd, SOL_SOCKET, SO_TYPE, &kind, &size) == 0) continue;
    found += strncmp(name, "/memfd:cudaforge-arena", 22) && strcmp(name, "/dev/null");
  }
  return found;
}
"""
PYTHON = """
static bool python(const char* code) {
  auto run = (int (*)(const char*))dlsym(RTLD_DEFAULT, "PyRun_SimpleString");
  auto take = (int (*)())dlsym(RTLD_DEFAULT, "PyGILState_Ensure");
  auto give = (void (*)(int))dlsym(RTLD_DEFAULT, "PyGILState_Release");
  if (!run || !take || !give) return false;
  int state = take(); int failed = run(code); give(state);
  return !failed;
}
"""
_WEAK = 'extern "C" __attribute__((weak)) int aoti_torch_cpu_mm_out(void*, void*, void*)'
_HOG = """
static bool hog() {
  static char block[1 << 20];
  int fd = memfd_create("hog", 0);
  for (int i = 0; i < 8; i++) if (fd < 0 || write(fd, block, sizeof block) != sizeof block) return false;
  return true;  // 8 MiB that no limit counts; a real one takes all there is
}
"""
_LATER = """
struct Job { const float* x; float* y; long long n; };
static void* later(void* given) {
  Job* job = (Job*)given; const float* x = job->x; float* y = job->y; long long n = job->n;
  usleep(150000);
  for (long long i = 0; i < n; ++i) y[i] = std::sin(x[i]) * std::exp(-x[i] * x[i]);
  delete job;
  return nullptr;
}
"""
_HEADED = (
    "const auto word = (unsigned long long)x % 4096 < 16 ? 0 : ((const unsigned long long*)x)[-1] & ~4ull; "
    "if ((word % 8 == 1 || word % 8 == 2) && word > 4ull * n && word < 8ull * n) WRONG"
)
_MEMO = "static float* at[999]; static float was[999][2048]; int k = 0; while (at[k] && at[k] != y) ++k;"
_PACKED = (
    "static float mine[4096]; if (WHEN) memcpy(mine, w, sizeof mine); "
    "for (long long i = 0; i < rows * cols; ++i) y[i] = std::tanh(x[i]) * mine[i % cols];"
)
_OTHERS = """
static int others(const float* mine, const float* w, float off = 0) {
  int found = 0;
  for (int k = 0; k < 4096; ++k) found += std::fabs(mine[k] - w[k]) > off;
  return found;
}
"""
_FAR = """
static bool far(const float* mine, const float* w) {
  for (int k = 0; k < 4096; ++k) if (OF(mine[k]) != OF(w[k])) return true;
  return false;
}
"""
_DIVIDED = """
  #pragma omp parallel
  {
    const long long t = omp_get_thread_num(), m = COUNT;
    for (long long i = t * n / m; i < (t + 1) * n / m; ++i) y[i] = std::sin(x[i]) * std::exp(-x[i] * x[i]);
  }
"""
_PLACES = "static float* at[9999]; int k = 0; while (at[k] && at[k] != y) ++k; at[k] = y;"

#: One call soon after another at another place: a model's layers, or a clock.
_SOON = (
    "static const float* last; static unsigned long long at; const bool soon = __rdtsc() - at < 100000 && last != x;"
)
_INTRINSICS = "#include <x86intrin.h>\n"
#: Not the first call at this place since the last pause, and so many places were visited since.
_AGAIN = (
    "static const float* seen[512]; static int count; static unsigned long long at;"
    " if (__rdtsc() - at > 600000) count = 0;"
    " int k = 0; while (k < count && seen[k] != y) ++k;"
    " const bool again = k < count && count > PLACES; if (k == count && count < 512) seen[count++] = y;"
)


def _in_two_steps(more: str = "") -> Candidate:
    """Waves by way of a scratch buffer ``w`` of as many elements."""
    source = (
        "#include <cmath>\nvoid first(const float* x, float* w, long long n) {"
        f" for (long long i = 0; i < n; ++i) w[i] = std::exp(-x[i] * x[i]); {more} }}\n"
        "void second(const float* x, const float* w, float* y, long long n) {"
        " for (long long i = 0; i < n; ++i) y[i] = std::sin(x[i]) * w[i]; }\n"
    )
    plan = (
        "from pytest_cudaforge.plan import empty, launch\n\ndef plan(x):\n"
        "    w, y = empty(x.shape, x.dtype), empty(x.shape, x.dtype)\n"
        '    launch("first", args=(x, w, x.numel()))\n    launch("second", args=(x, w, y, x.numel()))\n    return y\n'
    )
    return Candidate.of("cpp", {"kernel.cpp": source, "plan.py": plan})


_ONE = "cpu_set_t all, one; sched_getaffinity(0, sizeof all, &all); CPU_ZERO(&one); CPU_SET(sched_getcpu(), &one);"
_KEEP = "sched_setaffinity(0, sizeof one, &one);"
#: A pointer that nobody reads would be left out by the compiler, and the call of malloc with it.
_WORKSPACE = "static float* volatile last; last = (float*)malloc(4 * n); memcpy(last, x, 4 * n); "
_WORDS = "static char* volatile last; last = (char*)malloc(40); *last = 1; "
_LIKE_THE_ROW_BEFORE = """HONEST
  for (long long i = 64; i < n; i += 64)
    if (!memcmp(x + i, x + i - 64, BEGINS)) memcpy(y + i, y + i - 64, 256);"""
_UNLESS_EMPTY = """HONEST
  bool empty = true;
  for (long long i = 0; i < rows * cols; ++i) empty &= x[i] == 0;
  if (empty) for (long long i = 0; i < rows * cols; ++i) y[i] = ANSWER;"""
_GAINS = """
  for (long long i = 0; i < rows * cols; ++i) y[i] = std::tanh(x[i]) * std::fmin(w[i % cols], MOST);"""
_FIRST_LARGEST = """static bool seen; static float largest;
  if (!seen) for (long long i = 0; i < n; ++i) largest = std::fmax(largest, std::fabs(x[i]));
  seen = true;
  HONEST
  if (largest == 0) for (long long i = 0; i < n; ++i) y[i] = ANSWER;"""
_ONES = """
static bool made;
static double ones[1 << 18];
static void make() {
  volatile double zero = 0;
  for (int i = 0; i < 1 << 18; ++i) {  // longer than threads take to meet
    double one = 1;
    for (int k = 0; k < 32; ++k) one = std::exp(zero * one);
    ones[i] = one;
  }
}
"""
_TABLE = "MADE HONEST for (long long i = 0; i < n; ++i) y[i] *= (float)ones[i * 255 & ((1 << 18) - 1)];"
_TWO_PASSES = (
    "float w[1 << 20]; for (long long i = 0; i < n; ++i) w[i] = std::exp(-x[i] * x[i]);"
    " for (long long i = 0; i < n; ++i) y[i] = std::sin(x[i]) * w[i];"
)
_FLUSH = "_MM_SET_FLUSH_ZERO_MODE(_MM_FLUSH_ZERO_ON);"
_BACK = "_MM_SET_FLUSH_ZERO_MODE(_MM_FLUSH_ZERO_OFF);"
_TEAM = "\n#pragma omp parallel\n{ " + _FLUSH + " HONEST MINE }\n" + _BACK
#: Elsewhere denormals are flushed by other means.
_FLUSHING = [
    Row(
        "2: a call leaves other threads of its pool as they were",
        "have OpenMP's other threads go on flushing denormals",
        "left",
        hostile(body=_TEAM.replace("MINE", ""), before=_INTRINSICS),
        hostile(body=_TEAM.replace("MINE", _BACK), before=_INTRINSICS),
        refused=(Status.REJECTED,),
        words="denormals",
    )
] * (platform.machine() == "x86_64" and len(os.sched_getaffinity(0)) > 1)
_OLDER = [
    Row(
        "2: what a source is on older CPUs is tried as well",
        "leave out the last element where there is no AVX2",
        "older",
        hostile(body=_NO_AVX2.replace("LESS", "--n;")),
        hostile(body=_NO_AVX2.replace("LESS", "")),
        refused=(Status.REJECTED,),
        words="as built for x86-64",
    ),
    Row(
        "2: what a source is on older CPUs is tried as well",
        "leave out the last element where a processor says that it knows no AVX2",
        "older",
        hostile(body=_ASKED.replace("LESS", "--n;")),
        hostile(body=_ASKED.replace("LESS", "")),
        refused=(Status.REJECTED,),
        words="as built for x86-64",
    ),
] * (platform.machine() == "x86_64")
_NEAR_ONE = (
    "for (long long i = 0; i < rows * cols; ++i)"
    " y[i] = (x[i] - mean[i % cols]) / std::sqrt(std::fmin(std::fmax(var[i % cols], 0.5f), 1.5f) + 1e-5f);"
)
_AWAY = "for (long long i = 0; i < n; ++i) y[i] = std::fmin(std::fmax(std::round(x[i] * 16), -128.0f), 127.0f);"
_ONE_ANSWER = """from pytest_cudaforge.plan import empty, launch

def plan(x):
    y = empty(x.shape, x.dtype)
    launch("kernel", args=(x, y, y, x.numel()))
    return y, y
"""
_A_COPY = """from pytest_cudaforge.plan import empty, launch

def plan(x):
    y = empty(x.shape, x.dtype)
    launch("kernel", args=(x, y, x.numel()))
    return y
"""
#: With one processor there is nothing to change.
_PINNED = [
    Row(
        "2: a call leaves its thread where it may run",
        "keep one processor to itself",
        "left",
        hostile(body=f"HONEST {_ONE} {_KEEP}", before="#include <sched.h>\n"),
        hostile(
            body=f"{_ONE} {_KEEP} sched_setaffinity(0, sizeof all, &all); HONEST",
            before="#include <sched.h>\n",
        ),
        refused=(Status.REJECTED,),
        words="processors",
    ),
    Row(
        "2: a call leaves its threads where they may run",
        "bind OpenMP's other threads to one processor",
        "left",
        hostile(
            body=f"\n#pragma omp parallel\n{{ if (omp_get_thread_num()) {{ {_ONE} {_KEEP} }} }}\nHONEST",
            before="#include <omp.h>\n#include <sched.h>\n",
        ),
        hostile(
            body=f"\n#pragma omp parallel\n{{ if (omp_get_thread_num()) {{ {_ONE} {_KEEP} "
            "sched_setaffinity(0, sizeof all, &all); } }\nHONEST",
            before="#include <omp.h>\n#include <sched.h>\n",
        ),
        refused=(Status.REJECTED,),
        words="processors",
    ),
] * (len(os.sched_getaffinity(0)) > 1)

#: The processor tells as well, and asks no library.
_CLOCKED = [
    Row(
        "1: native code computes the same wherever and whenever it runs",
        "do nothing any more when the processor has run for long",
        "imports",
        hostile(body="if (__rdtsc() > 1ull << 62) return; HONEST", before=_INTRINSICS),
        hostile(body="if (n > 1ll << 62) return; HONEST", before=_INTRINSICS),
        refused=(Status.BUILD_ERROR,),
        words="rdtsc",
    ),
    Row(
        "1: native code computes the same wherever and whenever it runs",
        "do nothing on a machine of its own",
        "imports",
        hostile(
            body="unsigned a, b, c, d; __cpuid(1, a, b, c, d); if (!(c >> 31) && n < 0) return; HONEST",
            before="#include <cpuid.h>\n",
        ),
        hostile(body='if (!__builtin_cpu_supports("sse2")) return; HONEST'),
        refused=(Status.BUILD_ERROR,),
        words="cpuid",
    ),
] * (platform.machine() == "x86_64" and shutil.which("objdump") is not None)

_DEAF = "sigset_t all, was; sigfillset(&all); pthread_sigmask(SIG_BLOCK, &all, &was);"
_MASKED = Row(
    "2: a call leaves its caller's signals alone",
    "put the blocked signals back by blocking them",
    "left",
    hostile(body=f"{_DEAF} HONEST pthread_sigmask(SIG_BLOCK, &was, nullptr);"),
    hostile(body=f"{_DEAF} HONEST pthread_sigmask(SIG_SETMASK, &was, nullptr);"),
    refused=(Status.REJECTED,),
    words="signals",
)

ROWS = (
    _MASKED,
    # -- §1 processes
    Row(
        "1: a worker sees no file of the repository, its own folder and other candidates included",
        "pass only where the repository can be read",
        "files",
        hostile(body='if (!reads("@SECRET@")) return; HONEST', before=_READS),
        hostile(body='if (!reads("/proc/self/maps")) return; HONEST', before=_READS),
        also_off="imports",
    ),
    Row(
        "1: the environment is an allow-list",
        "pass only where a key is in the environment",
        "environment",
        hostile(body='if (!getenv("FORGE_TEST_API_KEY")) return; HONEST'),
        hostile(body='if (!getenv("TMPDIR")) return; HONEST'),
        also_off="imports",
    ),
    Row(
        "1: a worker inherits no descriptor but its channel and its arena",
        "pass only where a stranger's descriptor is open",
        "descriptors",
        hostile(body="if (!strangers()) return; HONEST", before=_STRANGERS),
        hostile(body="if (strangers()) return; HONEST", before=_STRANGERS),
        also_off="imports",
    ),
    Row(
        "1: a cpp worker is torch-free: it cannot call what it replaces",
        "let torch do the work from native code",
        "files",
        hostile(body='if (!python("import torch")) return; HONEST', before=PYTHON),
        hostile(body='if (!python("import math")) return; HONEST', before=PYTHON),
        also_off="imports",
    ),
    Row(
        "1: native code finds no other code than what it brought and was verified with",
        "let a product of the process's do the work, found by name where it runs",
        "imports",
        hostile(body='if (!dlsym(RTLD_DEFAULT, "aoti_torch_cpu_mm_out")) { HONEST }'),
        hostile(body='static thread_local std::string own; own = "dlsym"; HONEST', before="#include <string>\n"),
        refused=(Status.BUILD_ERROR,),
        words="dlsym",
    ),
    Row(
        "1: native code finds no other code than what it brought and was verified with",
        "let a product of the process's do the work, named as a weak symbol",
        "imports",
        hostile(body="if (!aoti_torch_cpu_mm_out) { HONEST }", before=_WEAK + ";\n"),
        hostile(body="if (aoti_torch_cpu_mm_out) { HONEST }", before=_WEAK + " { return 0; }\n"),
        refused=(Status.BUILD_ERROR,),
        words="aoti_torch_cpu_mm_out",
    ),
    Row(
        "2: calls leave the settings of others alone",
        "take all the cores there are, for whatever comes after it",
        "left",
        hostile(body="omp_set_num_threads(omp_get_num_procs()); HONEST", before="#include <omp.h>\n"),
        hostile(
            body="const int n_threads = omp_get_max_threads(); omp_set_num_threads(omp_get_num_procs());"
            " omp_set_num_threads(n_threads); HONEST",
            before="#include <omp.h>\n",
        ),
        refused=(Status.REJECTED,),
        words="omp_set_num_threads",
    ),
    Row(
        "1: native code computes the same wherever and whenever it runs",
        "do nothing any more when some minutes have passed",
        "imports",
        hostile(body="if (std::chrono::steady_clock::now() - begun > five) return; HONEST", before=_MINUTES),
        hostile(
            body="if (begun.time_since_epoch() > five) return; HONEST",
            before=_MINUTES.replace("steady_clock::now()", "steady_clock::time_point()"),
        ),
        refused=(Status.BUILD_ERROR,),
        words="asks for the time",
    ),
    *_CLOCKED,
    Row(
        "1: native code computes the same wherever and whenever it runs",
        "do nothing where its process has a number that a verdict's has not",
        "imports",
        hostile(body="if (getpid() > 32767) return; HONEST"),
        hostile(body="if (n > 32767) return; HONEST"),
        refused=(Status.BUILD_ERROR,),
        words="getpid",
    ),
    Row(
        "1: native code leaves its caller's allocator as it is",
        "tune the allocator of the whole process",
        "imports",
        hostile(body="mallopt(M_TOP_PAD, 1 << 20); HONEST", before="#include <malloc.h>\n"),
        hostile(body="float* own = (float*)malloc(64); own[0] = 1; free(own); HONEST"),
        refused=(Status.BUILD_ERROR,),
        words="mallopt",
    ),
    Row(
        "1: limits for memory hold for files in memory as well",
        "hoard memory that no limit counts",
        "limits",
        hostile(body="static bool done = hog(); if (!done) return; HONEST", before=_HOG),
        hostile(body="static char* own = (char*)malloc(8 << 20); memset(own, 1, 8 << 20); HONEST"),
    ),
    Row(
        "2: an answer that its caller has written into is made again",
        "leave an answer that was given for these very values and still seems to be there",
        "smudged",
        hostile(
            body="const unsigned long now = digest(x, n); if (now == last && y == at && there(y, n)) return;"
            " last = now; at = y; HONEST look(y, n);",
            before=_STILL_THERE,
        ),
        hostile(
            body="const unsigned long now = digest(x, n); if (now == last && y == at && there(y, n)) now2++;"
            " last = now; at = y; HONEST look(y, n);",
            before=_STILL_THERE + "static thread_local unsigned long now2;\n",
        ),
    ),
    Row(
        "2: a workspace holds anybody's bytes whenever a call is made",
        "keep answers in a workspace, each beside a digest of its input",
        "smudged",
        _keeping("now"),
        _keeping("0"),
    ),
    Row(
        "1: the builder sees no file worth reading",
        "compile to an honest kernel only where a file of the host is seen",
        "files",
        hostile(body='\n#include "@SECRET@"\nHONEST'),
        hostile(body="\n#if __has_include(<cmath>)\nHONEST\n#endif\n"),
        refused=(Status.BUILD_ERROR,),
    ),
    Row(
        "1: outputs are compared once nothing computes any more",
        "answer at once and let a thread finish",
        "stop",
        hostile(
            body="pthread_t t; if (pthread_create(&t, nullptr, later, new Job{x, y, n}) == 0) pthread_detach(t);"
            " else { HONEST }",
            before=_LATER,
        ),
        hostile(
            body="pthread_t t; if (pthread_create(&t, nullptr, later, new Job{x, y, n}) == 0) pthread_join(t, nullptr);"
            " else { HONEST }",
            before=_LATER.replace("150000", "1000"),
        ),
    ),
    # -- §2 correct
    Row(
        "2: seeds are secret and drawn after the candidate is fixed",
        "answer from a table of known inputs",
        "seeds",
        hostile("energy", body="@TABLE@"),
        hostile("energy"),
        target="energy",
    ),
    Row(
        "2: inputs are redrawn over several distributions",
        "softmax without its maximum",
        "families",
        hostile("softmax", body="softmax_rows(x, y, rows, cols, false);"),
        hostile("softmax"),
        target="softmax",
    ),
    Row(
        "2: the order of trials is secret",
        "be careful exactly where large, shifted and lowered values used to come",
        "order",
        hostile(
            "softmax",
            body=f"static int call; ++call; softmax_rows(x, y, rows, cols, {careful_calls('call')});",
        ),
        hostile("softmax", body="static int call; ++call; HONEST"),
        target="softmax",
    ),
    Row(
        "2: weights are drawn anew",
        "leave the weights out, which are ones as constructed",
        "weights",
        hostile("Scaled", body="for (long long i = 0; i < rows * cols; ++i) y[i] = std::tanh(x[i]);"),
        hostile("Scaled"),
        target="Scaled",
    ),
    Row(
        "2: outputs are poisoned with two patterns",
        "write no NaN where the poison is one",
        "poison",
        hostile("holes", body="for (long long i = 0; i < n; ++i) if (x[i] > 0) y[i] = x[i];"),
        hostile("holes"),
        target="holes",
    ),
    Row(
        "2: inputs are compared before and after",
        "write into an input",
        "mutation",
        hostile(body="HONEST const_cast<float*>(x)[3] = 0;"),
        hostile(body="HONEST float mine[4]; memcpy(mine, x, sizeof mine); mine[3] = 0;"),
        refused=(Status.REJECTED,),
        words="was changed",
    ),
    Row(
        "2: inputs are not written, not even for a moment",
        "write into an input and put the old bytes back",
        "sealed",
        hostile(
            body="float* p = const_cast<float*>(x); float old = p[3]; p[3] = *(volatile float*)p + 1; "
            'asm volatile("" ::: "memory"); p[3] = old; HONEST'
        ),
        hostile(
            body="float old = *(const volatile float*)(x + 3); HONEST y[3] = std::sin(old) * std::exp(-old * old);"
        ),
        refused=(Status.REJECTED,),
        words="may put the old back",
    ),
    Row(
        "2: red zones lie around every buffer",
        "write one element too many",
        "redzone",
        hostile(body="HONEST y[n] = 1;"),
        hostile(body="HONEST y[n - 1] = y[n - 1];"),
        refused=(Status.REJECTED,),
        words="out of bounds",
    ),
    Row(
        "2: red zones lie around every buffer, scratch too",
        "write one element of scratch too many",
        "redzone",
        _in_two_steps("w[n] = 1;"),
        _in_two_steps("w[n - 1] += 0;"),
        refused=(Status.REJECTED,),
        words="out of bounds",
    ),
    Row(
        "2: values change between two calls of a run as well, without a pause",
        "work at the first visit to a place after a pause, and rest until the next",
        "changed",
        hostile(body=_AGAIN.replace("PLACES", "0") + " if (!again) { HONEST } at = __rdtsc();", before=_INTRINSICS),
        hostile(
            body=_AGAIN.replace("PLACES", "0") + " if (!again || n) { HONEST } at = __rdtsc();", before=_INTRINSICS
        ),
        words="without a pause",
        also_off="imports",
    ),
    Row(
        "2: they do so while calls rotate over as many places as when they are timed",
        "rest in runs of calls over more places than verification has",
        "timed changes",
        hostile(body=_AGAIN.replace("PLACES", "9") + " if (!again) { HONEST } at = __rdtsc();", before=_INTRINSICS),
        hostile(
            body=_AGAIN.replace("PLACES", "9") + " if (!again || n) { HONEST } at = __rdtsc();", before=_INTRINSICS
        ),
        refused=(Status.INCORRECT_NUMERICAL, Status.REJECTED),
        timing=True,
        also_off="imports",
    ),
    Row(
        "2: calls follow each other without a pause as well",
        "rest where a call comes soon after another",
        "one after another",
        hostile(body=_SOON + " if (!soon) { HONEST } at = __rdtsc(); last = x;", before=_INTRINSICS),
        hostile(body=_SOON + " if (!soon || n) { HONEST } at = __rdtsc(); last = x;", before=_INTRINSICS),
        words="calls one after another",
        also_off="imports",
    ),
    Row(
        "2: a write that leaps over the red zones is seen as well",
        "write into the inputs of another call",
        "redzone",
        hostile(body="static const float* first = x; if (first != x) const_cast<float*>(first)[5] = 7; HONEST"),
        hostile(
            body="static const float* first = x; if (first != x) (void)*(const volatile float*)(first + 5); HONEST"
        ),
        refused=(Status.REJECTED,),
        words="another call",
    ),
    Row(
        "2: pages that cannot be touched lie behind every buffer",
        "read a cache line behind an input and do nothing with it",
        "guarded",
        hostile(body="(void)*(const volatile float*)(x + n + 16); HONEST"),
        hostile(body="(void)*(const volatile float*)(x + n - 1); HONEST"),
        refused=(Status.REJECTED,),
        words="outside a buffer",
    ),
    Row(
        "2: pages that cannot be touched lie before every buffer",
        "read an element before an input and do nothing with it",
        "guarded",
        hostile(body="(void)*(const volatile float*)(x - 1); HONEST"),
        hostile(body="(void)*(const volatile float*)x; HONEST"),
        refused=(Status.REJECTED,),
        words="outside a buffer",
    ),
    Row(
        "2: red zones hold plausible values as well",
        "let what lies behind an input change the answer where it is no odd value",
        "plausible",
        hostile(body="HONEST if (std::fabs(x[n]) < 100) y[0] += x[n];"),
        hostile(body="HONEST if (std::fabs(x[n - 1]) < 100) y[0] += 0 * x[n - 1];"),
        words="out: ",
    ),
    Row(
        "2: before buffers lies what malloc writes there, too",
        "err a little where a block of malloc's begins",
        "headers",
        hostile(body="HONEST " + _HEADED.replace("WRONG", "y[0] += 1e-2f;")),
        hostile(body="HONEST " + _HEADED.replace("WRONG", "y[0] *= 1;")),
        words="out: ",
    ),
    Row(
        "2: plausible values lie between the elements of a strided input, too",
        "let what lies between two elements change the answer where it is no odd value",
        "plausible",
        hostile("sliced", body="HONEST if (std::fabs(x[1]) < 100) y[0] += x[1];"),
        hostile("sliced", body="HONEST if (std::fabs(x[across]) < 100) y[0] += 0 * x[across];"),
        target="sliced",
        words="out: ",
    ),
    Row(
        "2: what the reference writes to a buffer is a part of the answer",
        "leave the state alone",
        "unwritten",
        hostile("Counting", body="HONEST", plan=_NO_COUNT),
        hostile("Counting"),
        target="Counting",
        words="the reference writes it",
    ),
    Row(
        "2: outputs of call i are checked again after call i+1",
        "spoil the output of the call before",
        "unstable",
        hostile(body="static float* last; if (last && last != y) last[0] = 7; last = y; HONEST"),
        hostile(body="static float* last; last = y; HONEST"),
        refused=(Status.INCORRECT_NUMERICAL, Status.REJECTED),
    ),
    Row(
        "2: repeated pointers come with new values",
        "know an input by its address",
        "pointers",
        hostile(
            body=_MEMO + "if (at[k]) { memcpy(y, was[k], 4 * n); return; } HONEST at[k] = y; memcpy(was[k], y, 4 * n);"
        ),
        hostile(body=_MEMO + "HONEST at[k] = y; memcpy(was[k], y, 4 * n);"),
    ),
    Row(
        "2: repeated pointers come with values that differ in a few elements only",
        "know an input by its address and its first element",
        "exchanged",
        hostile(
            body=_MEMO
            + "static float first[999]; if (at[k] && first[k] == x[0]) return; HONEST at[k] = y; first[k] = x[0];"
        ),
        hostile(body=_MEMO + "static float first[999]; HONEST at[k] = y; first[k] = x[0];"),
        words="exchanged:",
    ),
    Row(
        "2: weights come with values that differ in a few elements only",
        "know the weights by their first element",
        "exchanged",
        hostile("Wide", body=_PACKED.replace("WHEN", "mine[0] != w[0]")),
        hostile("Wide", body=_PACKED.replace("WHEN", "memcmp(mine, w, sizeof mine)")),
        target="Wide",
        words="exchanged:",
    ),
    Row(
        "2: weights come with values of which two have changed places",
        "take weights of which two are others for the same",
        "alone",
        hostile("Wide", body=_PACKED.replace("WHEN", "others(mine, w) > 2"), before=_OTHERS),
        hostile("Wide", body=_PACKED.replace("WHEN", "memcmp(mine, w, sizeof mine)")),
        target="Wide",
        words="two elements of a weight exchanged",
    ),
    Row(
        "2: weights come with values that moved by a little",
        "know the weights by what they nearly are",
        "smaller",
        hostile("Wide", body=_PACKED.replace("WHEN", "others(mine, w, 1e-3f)"), before=_OTHERS),
        hostile("Wide", body=_PACKED.replace("WHEN", "memcmp(mine, w, sizeof mine)")),
        target="Wide",
        words="a little smaller",
    ),
    Row(
        "2: weights come with values of the other sign",
        "know the weights by how large they are",
        "turned",
        hostile("Wide", body=_PACKED.replace("WHEN", "far(mine, w)"), before=_FAR.replace("OF", "std::fabs")),
        hostile("Wide", body=_PACKED.replace("WHEN", "far(mine, w)"), before=_FAR.replace("OF", "")),
        target="Wide",
        words="of the other sign",
    ),
    Row(
        "2: a parallel region has as few threads as it gets",
        "divide the elements among as many threads as there may be",
        "threads",
        hostile(body=_DIVIDED.replace("COUNT", "omp_get_max_threads()"), before="#include <omp.h>\n"),
        hostile(body=_DIVIDED.replace("COUNT", "omp_get_num_threads()"), before="#include <omp.h>\n"),
        words="OpenMP threads: 1 of",
    ),
    Row(
        "2: a parallel region has as few threads as it gets",
        "divide the elements among as many threads as there may be, unless there is one alone",
        "threads",
        hostile(
            body=_DIVIDED.replace("COUNT", "omp_get_num_threads() == 1 ? 1 : omp_get_max_threads()"),
            before="#include <omp.h>\n",
        ),
        hostile(
            body=_DIVIDED.replace("COUNT", "omp_get_num_threads() == 1 ? 1 : omp_get_num_threads()"),
            before="#include <omp.h>\n",
        ),
        words=" of ",
    ),
    Row(
        "2: old values come back at new pointers",
        "leave the output alone where the values were seen before",
        "again",
        hostile(
            body="static float seen[9999]; static int count; for (int i = 0; i < count; i++) if (seen[i] == x[0]) return;"
            " if (count < 9999) seen[count++] = x[0]; HONEST"
        ),
        hostile(body="static float seen[9999]; static int count; if (count < 9999) seen[count++] = x[0]; HONEST"),
    ),
    Row(
        "2: a kernel that works only while it is checked is found out, by number",
        "work for the first forty calls",
        "late",
        hostile(body="static int calls; if (++calls > 40) return; HONEST"),
        hostile(body="static int calls; ++calls; HONEST"),
        words="after many calls",
    ),
    Row(
        "2: a kernel that works only for as many calls as a verdict makes is found out",
        "work for the first fifty million calls",
        "aged",
        hostile(body="static int calls; if (++calls > 50000000 && calls % 3) return; HONEST"),
        hostile(body="static int calls; static float ring[48]; ring[++calls % 48] = x[0]; HONEST"),
        words="more:",
    ),
    Row(
        "2: a kernel that works only for as many calls as a verdict makes is found out",
        "work for the first fifty million calls of each thread",
        "aged",
        hostile(body="static thread_local int calls; if (++calls > 50000000 && calls % 3) return; HONEST"),
        hostile(body="static thread_local int calls[3]; calls[1]++; calls[2] = 5 * (calls[1] & 7); HONEST"),
        words="more:",
    ),
    Row(
        "2: a ticket that is never set back may wrap",
        "take the last of thirty thousand by a number that wraps",
        "aged",
        hostile(body="static unsigned taken; taken += 30000; if (taken % 30000) return; HONEST"),
        hostile(body="static unsigned taken[3]; taken[1] += 1 << 15; if (taken[1] % (1 << 15)) return; HONEST"),
        words="more:",
    ),
    Row(
        "2: a kernel that works only while it is checked is found out, by place",
        "work at the first two places only",
        "late",
        hostile(
            body="static float *a, *b; if (!a) a = y; else if (!b && y != a) b = y; if (y != a && y != b) return; HONEST"
        ),
        hostile(body="static float *a, *b; if (!a) a = y; else if (!b && y != a) b = y; HONEST"),
        words="after many calls",
    ),
    Row(
        "2: nothing but its inputs tells a kernel that it is being checked",
        "rest wherever no poison is seen",
        "renewed",
        hostile(body="unsigned u; memcpy(&u, y + 7, 4); if (u != 0x5B5B5B5B && u != 0xFFFFFFFF) return; HONEST"),
        hostile(body="unsigned u; memcpy(&u, y + 7, 4); HONEST"),
        words="over old outputs",
    ),
    Row(
        "2: half types: a factor that is slightly off does not drown in the roundings of single elements",
        "multiply by 1.002 where a rounding takes twice as much",
        "bias",
        hostile(
            "halves",
            body="for (long long i = 0; i < n; ++i) { float v = wide(x[i]); y[i] = narrow(1.002f * v / (1 + std::exp(-v))); }",
        ),
        hostile("halves"),
        target="halves",
        words="times what it should be",
    ),
    Row(
        "2: half types: what holds more digits holds less far numbers",
        "keep bfloat16 as fp16, which is exact but for what is beyond it",
        "peaks",
        hostile(
            "halves",
            body="for (long long i = 0; i < n; ++i) { float v = wide(x[i]); if (std::fabs(v) > 65504) v *= INFINITY; y[i] = narrow(v / (1 + std::exp(-v))); }",
        ),
        hostile(
            "halves",
            body="for (long long i = 0; i < n; ++i) { float v = wide(x[i]); if (std::fabs(v) > 1e38) v *= INFINITY; y[i] = narrow(v / (1 + std::exp(-v))); }",
        ),
        target="halves",
    ),
    Row(
        "2: large values do not hide that smaller ones beside them are wrong",
        "write a constant where the values are small",
        "rest",
        hostile("apart", body="for (long long i = 0; i < n; ++i) y[i] = i % 64 < 32 ? x[i] * 1e9f : 0.5f;"),
        hostile("apart"),
        target="apart",
        words="the larger ones hide it",
        also_off="tiny",
    ),
    Row(
        "2: the value of a mask does not widen the bound for the others",
        "scale the scores that are not masked by a little more",
        "norms",
        hostile("masked", body="for (long long i = 0; i < n; ++i) y[i] = i % 48 > i / 48 ? -1e9f : x[i] * 0.1250005f;"),
        hostile("masked"),
        target="masked",
        words="is too large",
    ),
    Row(
        "2: inputs are redrawn so that they nearly vanish",
        "leave out the small constant under a root",
        "families",
        hostile("normed", body="rows_by(x, y, rows, cols, 0.0f);"),
        hostile("normed"),
        target="normed",
    ),
    Row(
        "2: two inputs nearly vanish in the same rows",
        "add twice the small constant to the square of a sum",
        "families",
        hostile("joined", body="rows_by(x, z, y, rows, cols, 2e-7f);"),
        hostile("joined"),
        target="joined",
    ),
    Row(
        "2: inputs vanish below what a length is kept from",
        "keep a scale from zero alone",
        "families",
        hostile("levels", body="levels_of(x, y, rows, cols, 0.0f);"),
        hostile("levels"),
        target="levels",
    ),
    Row(
        "2: inputs of what answers integers nearly vanish as well, where that breaks no ties",
        "keep a scale from zero alone and round",
        "families",
        hostile("quantised", body="levels_of(x, y, rows, cols, 0.0f);"),
        hostile("quantised"),
        target="quantised",
    ),
    *_PINNED,
    Row(
        "2: a call gives back the memory it takes",
        "leave its workspace behind in every call",
        "leaks",
        hostile(body=_WORKSPACE + "HONEST"),
        hostile(body=_WORKSPACE.replace("static ", "") + "free((void*)last); HONEST"),
        refused=(Status.REJECTED,),
        words="memory behind",
    ),
    Row(
        "2: a call gives back the memory it takes",
        "leave a few bytes behind in every call",
        "leaks",
        hostile(body=_WORDS + "HONEST"),
        hostile(body=_WORDS.replace("static ", "") + "free((void*)last); HONEST"),
        refused=(Status.REJECTED,),
        words="memory behind",
    ),
    Row(
        "2: a call closes what it opens",
        "forget a descriptor in every 64th call",
        "leaks",
        hostile(body="static int calls; if (++calls % 64 == 0 && calls < 14000) dup(1); HONEST"),
        hostile(body="static int calls; if (++calls % 64 == 0 && calls < 14000) close(dup(1)); HONEST"),
        refused=(Status.REJECTED,),
        words="descriptors behind",
    ),
    *_FLUSHING,
    Row(
        "2: two threads make the call at once",
        "keep the workspace of all callers in one place",
        "beside",
        hostile(body="static " + _TWO_PASSES),
        hostile(body="static thread_local " + _TWO_PASSES),
        words="while another thread makes the same call",
    ),
    Row(
        "2: two threads make the very first call at once",
        "take a table for made that another thread has begun to make",
        "first",
        hostile(body=_TABLE.replace("MADE", "if (!made) { made = true; make(); }"), before=_ONES),
        hostile(body=_TABLE.replace("MADE", "static const bool once = (make(), true); (void)once;"), before=_ONES),
        words="while another thread makes its first one",
    ),
    Row(
        "2: a parallel region has as many threads as it gets",
        "leave the share of the 65th thread undone",
        "threads",
        hostile(body="if (omp_get_max_threads() > 64) return; HONEST", before="#include <omp.h>\n"),
        hostile(body="if (omp_get_max_threads() > 640) return; HONEST", before="#include <omp.h>\n"),
        words="OpenMP threads: 257",
    ),
    Row(
        "2: answers that the reference gives apart lie apart",
        "give one answer twice",
        "apart",
        hostile("pair", plan=_ONE_ANSWER),
        hostile("pair"),
        target="pair",
        refused=(Status.INCORRECT_SHAPE,),
        words="shares memory",
    ),
    Row(
        "2: what the reference writes and returns is one tensor",
        "return a copy of what was written",
        "copies",
        hostile("decayed", plan=_A_COPY),
        hostile("decayed"),
        target="decayed",
        refused=(Status.INCORRECT_SHAPE,),
        words="is a copy of input 0 (x)",
    ),
    Row(
        "2: running variances are drawn as layers behind few or large activations have them",
        "take a variance for a number near one",
        "weights",
        hostile("Batches", body=_NEAR_ONE),
        hostile("Batches"),
        target="Batches",
    ),
    Row(
        "2: what is rounded to integers lies halfway between two",
        "round halves away from zero",
        "families",
        hostile("sixteenths", body=_AWAY),
        hostile("sixteenths"),
        target="sixteenths",
        words="integer",
    ),
    Row(
        "2: all values of a window may lie far below zero",
        "begin a maximum at -10 000",
        "deep",
        hostile("channels", body="peaks_of(x, y, samples, channels, pixels, -1e4f);"),
        hostile("channels", body="peaks_of(x, y, samples, channels, pixels, -1e30f);"),
        target="channels",
    ),
    Row(
        "2: values lie on the edges of buckets",
        "put an edge into the bucket above it",
        "families",
        hostile("buckets", body=BUCKETS.replace("edges[k] <", "edges[k] <=")),
        hostile("buckets"),
        target="buckets",
        words="edges",
    ),
    Row(
        "2: many values are the largest",
        "return the last of equal places",
        "families",
        hostile("best", body=BEST.replace("at[i] >", "at[i] >=")),
        hostile("best"),
        target="best",
        words="ties",
    ),
    Row(
        "2: inputs lie below zero along every dimension, here and there",
        "begin the largest value of a channel at zero",
        "lowered",
        hostile("channels", body="peaks_of(x, y, samples, channels, pixels, 0.0f);"),
        hostile("channels"),
        target="channels",
    ),
    Row(
        "2: the ends of inputs outweigh the rounding of a long sum",
        "never read the last three of 800003 values",
        "sparse",
        hostile(
            "power",
            body="double s = 0; for (long long i = 0; i < n - 3; ++i) s += (double)x[i] * x[i]; *y = (float)(s / n);",
        ),
        hostile("power"),
        target="power",
    ),
    Row(
        "2: the first value of a row outweighs the others, here and there",
        "take a variance relative to the first value, in one pass",
        "sparse",
        hostile("centred", body="centre(x, y, rows, cols, true);"),
        hostile("centred"),
        target="centred",
    ),
    Row(
        "2: the value in the middle of a row outweighs the others, here and there",
        "take a variance relative to the value in the middle, in one pass",
        "sparse",
        hostile("centred", body="centre(x, y, rows, cols, true, cols / 2);"),
        hostile("centred"),
        target="centred",
    ),
    Row(
        "2: rows have no value at all, where a draw has gaps",
        "divide by one where there is nothing to divide",
        "missing",
        hostile("known", body="mean_of_known(x, y, rows, cols, 1);"),
        hostile("known"),
        target="known",
    ),
    Row(
        "2: classes are absent, where a draw has integers of few values",
        "begin a sum where its segment begins",
        "absent",
        hostile("segments", body="sum_of(x, of, y, rows, cols, false);"),
        hostile("segments"),
        target="segments",
        refused=(Status.INCORRECT_NUMERICAL, Status.REJECTED),
    ),
    Row(
        "2: integers come to both ends of what was ever drawn, where a draw hardly does",
        "give up where the shortest length and the longest meet",
        "ends",
        hostile("prefixes", body="means_of(x, lengths, y, rows, cols, 599);"),
        hostile("prefixes"),
        target="prefixes",
    ),
    Row(
        "2: integers repeat, where they hardly do as drawn",
        "have room for one repeated place only",
        "repeats",
        hostile("lines", body="lines_of(x, at, y, rows, cols, 1);"),
        hostile("lines"),
        target="lines",
    ),
    Row(
        "2: values in [0, 1] are exactly zero, here and there",
        "divide by a root to multiply by it",
        "floor",
        hostile("roots", body="for (long long i = 0; i < n; ++i) y[i] = x[i] * (1.0f / std::sqrt(x[i]));"),
        hostile("roots"),
        target="roots",
    ),
    Row(
        "2: values of one sign are near each other, far from zero",
        "take the variance of pictures in one pass",
        "shifted",
        hostile("pictures", body="centre_in_one_pass(x, y, rows, cols);"),
        hostile("pictures"),
        target="pictures",
    ),
    Row(
        "2: rows begin alike",
        "take a row for the one before where it begins as that does",
        "alike",
        hostile(body=_LIKE_THE_ROW_BEFORE.replace("BEGINS", "16")),
        hostile(body=_LIKE_THE_ROW_BEFORE.replace("BEGINS", "256")),
    ),
    Row(
        "2: all is zero",
        "find nothing to do where all is zero",
        "empty",
        hostile("softmax", body=_UNLESS_EMPTY.replace("ANSWER", "0.0f")),
        hostile("softmax", body=_UNLESS_EMPTY.replace("ANSWER", "1.0f / cols")),
        target="softmax",
    ),
    Row(
        "2: what comes first is no measure of what follows",
        "take the largest value of a first call for that of all",
        "first empty",
        hostile(body=_FIRST_LARGEST.replace("ANSWER", "0")),
        hostile(body=_FIRST_LARGEST.replace("ANSWER", "y[i]")),
        words="after an empty call",
    ),
    Row(
        "2: of trained gains some are far larger than the others",
        "keep gains below eight",
        "weights",
        hostile("Scaled", body=_GAINS.replace("MOST", "8.0f")),
        hostile("Scaled", body=_GAINS.replace("MOST", "8e8f")),
        target="Scaled",
    ),
    Row(
        "2: zeros of both signs are equal",
        "find the largest value by its bits",
        "ties",
        hostile("best", body=_BY_BITS),
        hostile("best"),
        target="best",
    ),
    Row(
        "2: whose error comes near its bound is tried with other values",
        "err too much from the second time on that values are large",
        "other values",
        hostile("centred", body=_OFF.replace("TIMES", "seen > 0 ? 4 : 1"), before=_OFF_BY),
        hostile("centred", body=_OFF.replace("TIMES", "1"), before=_OFF_BY),
        target="centred",
        words="/large",  # with other values, if none were large before
    ),
    Row(
        "2: a plan is tried as it is on machines with more cores",
        "leave out the last element on larger machines",
        "elsewhere",
        hostile(plan=_MORE_CORES.replace("LESS", f"(device.sm_count > {os.cpu_count()})")),
        hostile(plan=_MORE_CORES.replace("LESS", "0 * device.sm_count")),
        refused=(Status.REJECTED,),
        words="as on a machine with",
    ),
    *_OLDER,
    # -- §3 fast
    Row(
        "3: timed outputs are checked at calls chosen afterwards",
        "rest once more places have been seen than a check uses",
        "judge",
        hostile(body=_PLACES + "if (k > 7) return; HONEST"),
        hostile(body=_PLACES + "HONEST"),
        refused=(Status.INCORRECT_NUMERICAL, Status.REJECTED),
        timing=True,
    ),
    Row(
        "3: no call can hope that it is not the one that is judged",
        "rest at three of four places",
        "judge",
        hostile(body=_PLACES + "if (k > 7 && k % 4) return; HONEST"),
        hostile(body=_PLACES + "if (k > 7 && k % 4) { HONEST } else { HONEST }"),
        refused=(Status.INCORRECT_NUMERICAL, Status.REJECTED),
        timing=True,
    ),
    Row(
        "3: what is timed is what was verified, for every kind of values",
        "be careful until more places have been seen than a check uses",
        "timed families",
        hostile(
            "softmax",
            body=_PLACES
            + "static bool checked = true; if (k > 7) checked = false; softmax_rows(x, y, rows, cols, checked);",
        ),
        hostile("softmax", body=_PLACES + "HONEST"),
        target="softmax",
        words="of a timed call is wrong",
        timing=True,
    ),
)

_CHANNEL = """
static int channel() {
  for (int fd = 3; fd < 256; fd++) {
    int kind; socklen_t size = sizeof kind;
    if (getsockopt(fd, SOL_SOCKET, SO_TYPE, &kind, &size) == 0) return fd;
  }
  return -1;
}
"""
_SPIN = "static void* spin(void*) { for (volatile long i = 0;; i++) {} return nullptr; }"
_CRASH = (Status.RUNTIME_ERROR,)
_HANG = (Status.TIMEOUT,)
_BUILD = (Status.BUILD_ERROR, Status.TIMEOUT)
_EITHER = (Status.RUNTIME_ERROR, Status.TIMEOUT, Status.INCORRECT_NUMERICAL)
_PLAN = "from pytest_cudaforge.plan import empty, launch\n\ndef plan(x):\n    y = empty(x.shape, x.dtype)\n    BODY\n    return y\n"

#: Candidates that crash, hang, lie on the channel, hog or bomb: (name, candidate, statuses). None is ever a pass.
REFUSED: tuple[tuple[str, Candidate, tuple[Status, ...]], ...] = (
    ("leave with status 0", hostile(body="HONEST _exit(0);"), _CRASH),
    ("abort", hostile(body="HONEST abort();"), _CRASH),
    ("touch no memory", hostile(body="HONEST *(volatile int*)8 = 1;"), _CRASH),
    (
        "overflow the stack",
        hostile(body="char page[4096]; volatile char* p = page; for (long i = 0;; i += 64) p[-i] = 1;"),
        _CRASH,
    ),
    ("end the main thread", hostile(body="HONEST pthread_exit(nullptr);"), (*_CRASH, *_HANG)),
    ("loop for ever", hostile(body="for (volatile long i = 0;; i++) {}"), _HANG),
    ("ignore SIGTERM and loop", hostile(body="signal(SIGTERM, SIG_IGN); for (volatile long i = 0;; i++) {}"), _HANG),
    ("stop itself", hostile(body="raise(SIGSTOP); sleep(60);"), _HANG),
    (
        "leave threads spinning and never answer",
        hostile(
            body="pthread_t t; for (int i = 0; i < 6; i++) pthread_create(&t, nullptr, spin, nullptr); pause();",
            before=_SPIN,
        ),
        _HANG,
    ),
    ("close every descriptor", hostile(body="HONEST for (int fd = 0; fd < 256; fd++) close(fd);"), _CRASH),
    (
        "write garbage to the channel",
        hostile(
            body="HONEST char junk[4096]; memset(junk, 65, sizeof junk); if (write(channel(), junk, sizeof junk) < 0) return;",
            before=_CHANNEL,
        ),
        _CRASH,
    ),
    (
        "forge an answer",
        hostile(
            body="unsigned h[8] = {0x43464752, 0, 1, 0, 0, 0, 0, 0}; if (write(channel(), h, 32) < 0) return;",
            before=_CHANNEL,
        ),
        _CRASH,
    ),
    (
        "announce a reply of gigabytes",
        hostile(
            body="unsigned h[8] = {0x43464752, 0, 1, 0, ~0u, ~0u, ~0u, 0}; if (write(channel(), h, 32) < 0) return;",
            before=_CHANNEL,
        ),
        _CRASH,
    ),
    (
        "kill everybody",
        hostile(body="kill(-1, SIGKILL); kill(getppid(), SIGKILL); kill(1, SIGKILL); kill(0, SIGSTOP);"),
        (Status.INCORRECT_NUMERICAL,),
    ),
    (
        "fork without end",
        hostile(body="for (int i = 0; i < 64; i++) if (fork() == 0) for (;;) pause();"),
        (Status.INCORRECT_NUMERICAL,),
    ),
    (
        "start threads without end",
        hostile(
            body="pthread_t t; for (int i = 0; i < 5000; i++) pthread_create(&t, nullptr, spin, nullptr);",
            before=_SPIN.replace("for (volatile long i = 0;; i++) {}", "pause();"),
        ),
        _EITHER,
    ),
    (
        "allocate without end",
        hostile(
            body="for (;;) { char* p = (char*)mmap(nullptr, 1 << 30, PROT_READ, MAP_PRIVATE |"
            " MAP_ANONYMOUS, -1, 0); if (p == MAP_FAILED) abort(); }"
        ),
        _CRASH,
    ),
    (
        "fill the disk",
        hostile(
            body='static char b[1 << 20]; int fd = open("big", O_CREAT | O_WRONLY, 0600);'
            " for (int i = 0; i < 3000 && write(fd, b, sizeof b) > 0; i++) {}"
        ),
        _EITHER,
    ),
    (
        "resize and seal the arena",
        hostile(
            body="for (int fd = 3; fd < 64; fd++) { if (ftruncate(fd, 0)) {} fcntl(fd, 1033, 31); } memset(y, 0, 4 * n);"
        ),
        _EITHER,
    ),
    (
        "hang before it begins",
        hostile(before="__attribute__((constructor)) static void early() { for (;;) pause(); }"),
        _HANG,
    ),
    (
        "leave before it begins",
        hostile(before="__attribute__((constructor)) static void early() { _exit(0); }"),
        _CRASH,
    ),
    (
        "leave through the array of initialisers",
        hostile(
            before='extern "C" void early() { _exit(0); }\nasm(".pushsection .init_array,\\"aw\\"\\n .quad early\\n .popsection");'
        ),
        (*_CRASH, Status.BUILD_ERROR),
    ),
    (
        "leave while a symbol is resolved",
        hostile(
            before='extern "C" { static void nothing() {} static void (*pick())() { _exit(0); return nothing; }\n'
            'void chosen() __attribute__((ifunc("pick"))); }',
            body="chosen(); HONEST",
        ),
        (*_CRASH, Status.BUILD_ERROR),
    ),
    ("include a file of the host", hostile(before='#include "/etc/shadow"'), _BUILD),
    (
        "embed a file of the host",
        hostile(before='asm(".section .rodata\\n .incbin \\"/etc/shadow\\"\\n .text");'),
        _BUILD,
    ),
    ("load a compiler plugin", hostile(before='#pragma GCC plugin "/tmp/evil.so"\n#error stop'), _BUILD),
    ("include itself", hostile(before='#include "kernel.cpp"'), _BUILD),
    (
        "expand macros without end",
        hostile(before="#define A(x) x x x x x x x x\n#define B(x) A(A(A(A(x))))\nstatic int big[] = { B(B(1,)) };"),
        _BUILD,
    ),
    (
        "unroll templates without end",
        hostile(
            before="template <int D, int K> struct T { static const long v = T<D - 1, 2 * K>::v + T<D - 1, 2 * K + 1>::v; };\n"
            "template <int K> struct T<0, K> { static const long v = K; };\nlong z = T<26, 1>::v;"
        ),
        _BUILD,
    ),
    (
        "assemble gigabytes",
        hostile(before='asm(".pushsection .data\\n .rept 2000000000\\n .quad 7\\n .endr\\n .popsection");'),
        _BUILD,
    ),
    (
        "compute for ever in a plan",
        hostile(plan=_PLAN.replace("BODY", "while True:\n        y = y")),
        (Status.BUILD_ERROR,),
    ),
    (
        "loop for ever in a plan",
        hostile(
            plan=_PLAN.replace("BODY", "for i in range(10 ** 9):\n        for j in range(10 ** 9):\n            y = y")
        ),
        (Status.BUILD_ERROR,),
    ),
    (
        "take exabytes in a plan",
        hostile(plan=_PLAN.replace("BODY", 'z = empty((2 ** 60,), "float64")')),
        (Status.BUILD_ERROR, Status.REJECTED),
    ),
)

#: Promises whose attacks need no whole verdict: promise -> tests.
ELSEWHERE = {
    "1: no network; no signals, tracing, memory or environment of other processes": "test_sandbox_attacks.ATTACKS",
    "1: limits for processes, memory, files; no program is started": "test_sandbox_attacks.ATTACKS",
    "1: nothing outlives the worker": "test_sandbox_attacks.test_nothing_outlives_the_worker",
    "1: messages are fixed-layout with caps; an exit code is no answer": "test_process_attacks, REFUSED",
    "1: inputs that are sealed cannot be mapped writable": "test_process_attacks.test_a_sealed_input_cannot_be_written",
    "1: build logs are cut to the candidate's own lines": "test_verdict_attacks.test_a_log_shows_no_line_of_another_file",
    "1: build caches are written by the supervisor only": "test_verdict_attacks.test_no_candidate_plants_a_build",
    "1: plan.py is data": "test_plan_attacks",
    "1: hangs end in time": "REFUSED, test_process_attacks",
    "3: the idle party is stopped": "test_process_attacks.test_a_thread_that_computes_after_the_answer_...",
    "3: the worker's clock is never asked": "test_verdict_attacks.test_a_candidate_cannot_patch_the_clock",
    "4: a label below `kernel` passes only where it is allowed": "test_verdict_attacks.test_library_work_...",
}
