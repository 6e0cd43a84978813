"""Native code that finds other code by itself, in the memory of its process, and asks the dynamic loader nothing; or
that hides an instruction in the midst of another one."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from judged_targets import find
from switches import without_checks

from pytest_cudaforge.evaluation.evaluator import Evaluator, EvaluatorSettings
from pytest_cudaforge.evaluation.kernel_calls import prctl
from pytest_cudaforge.records import Candidate, Evaluation, Status

_PR_SET_TSC, _ENABLE = 26, 1

TARGETS = """
import torch
from pytest_cudaforge import forge_target

@forge_target(inputs=lambda: [torch.randn(256, 64)])
def decay(x):
    return torch.exp(-x.abs())
"""
PLAN = """
from pytest_cudaforge.plan import empty, launch

def plan(x):
    y = empty(x.shape, x.dtype)
    launch("decay", args=(x, y, x.numel()))
    return y
"""
#: ``now``: seconds since 1970 by a function that nobody imports.
KERNEL = """
#include <cmath>
#include <cstdint>
#include <cstring>
#include <elf.h>

static long long asked(uintptr_t function) {
  long long now[2] = {0, 0};
  if (function) reinterpret_cast<int (*)(int, void*)>(function)(0, now);
  return now[0];
}

static uintptr_t named(const char* name, uintptr_t base, const Elf64_Dyn* d) {
  uintptr_t symbols = 0, strings = 0;
  for (; d->d_tag != DT_NULL; ++d) {
    if (d->d_tag == DT_SYMTAB) symbols = d->d_un.d_ptr;
    if (d->d_tag == DT_STRTAB) strings = d->d_un.d_ptr;
  }
  if (!symbols || !strings) return 0;
  if (symbols < base) symbols += base;
  if (strings < base) strings += base;
  for (auto* s = reinterpret_cast<const Elf64_Sym*>(symbols); reinterpret_cast<uintptr_t>(s + 1) <= strings; ++s)
    if (s->st_shndx && !std::strcmp(reinterpret_cast<const char*>(strings + s->st_name), name))
      return base + s->st_value;
  return 0;
}

FIND

void decay(const float* x, float* y, long long n) {
  static const uintptr_t clock = clock_of();
  const float slope = asked(clock) > 4000000000LL ? 2.0f : 1.0f;
#pragma omp parallel for
  for (long long i = 0; i < n; ++i) y[i] = expf(-fabsf(x[i]) * slope);
}
"""
FINDS = {
    "the image around a function": """
static uintptr_t clock_of() {
  uintptr_t base = reinterpret_cast<uintptr_t>(&std::memcpy) & ~uintptr_t(4095);
  while (*reinterpret_cast<const uint32_t*>(base) != 0x464c457fu) base -= 4096;
  const auto* head = reinterpret_cast<const Elf64_Ehdr*>(base);
  const auto* segment = reinterpret_cast<const Elf64_Phdr*>(base + head->e_phoff);
  for (int i = 0; i < head->e_phnum; ++i)
    if (segment[i].p_type == PT_DYNAMIC)
      return named("clock_gettime", base, reinterpret_cast<const Elf64_Dyn*>(base + segment[i].p_vaddr));
  return 0;
}
""",
    "the kernel's page": """
static uintptr_t clock_of() {
  // What the kernel tells a program lies behind its environment, at the upper end of the stack: AT_SYSINFO_EHDR.
  auto* word = static_cast<const uintptr_t*>(__builtin_frame_address(0));
  while (!(word[0] == 33 && word[1] > 0x7f0000000000 && word[1] % 4096 == 0 && (word[2] == 51 || word[2] == 16)))
    ++word;
  const uintptr_t base = word[1];
  const auto* head = reinterpret_cast<const Elf64_Ehdr*>(base);
  const auto* segment = reinterpret_cast<const Elf64_Phdr*>(base + head->e_phoff);
  for (int i = 0; i < head->e_phnum; ++i)
    if (segment[i].p_type == PT_DYNAMIC)
      return named("__vdso_clock_gettime", base, reinterpret_cast<const Elf64_Dyn*>(base + segment[i].p_offset));
  return 0;
}
""",
}
NOWHERE = "static uintptr_t clock_of() { return 0; }"
Judged = Callable[..., Evaluation]


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judged]:
    root, cache = tmp_path_factory.mktemp("repo"), tmp_path_factory.mktemp("cache")
    (root / "layers.py").write_text(TARGETS)
    with Evaluator(EvaluatorSettings(cache_dir=cache, lock_dir=cache, times=False)) as evaluator:

        def judge(how: str, kernel: str = KERNEL) -> Evaluation:
            files = {"kernel.cpp": kernel.replace("FIND", how), "plan.py": PLAN}
            return evaluator.evaluate(Candidate.of("cpp", files), find(root, "::decay"), timing=False)

        yield judge


def _kernels_page_is_sealed() -> bool:
    """Newer kernels may seal what they map for the time of day (mseal of system mappings, Linux 6.15)."""
    maps = Path("/proc/self/smaps").read_text()
    flags = re.search(r"\[vdso\]\n.*?^VmFlags:(.*?)$", maps, re.DOTALL | re.MULTILINE)
    return flags is not None and "sl" in flags[1].split()


@pytest.mark.parametrize("how", FINDS)
def test_code_that_is_found_in_memory(judged: Judged, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    if how == "the kernel's page" and _kernels_page_is_sealed():
        pytest.skip("this kernel seals its page: what finds functions there stays unseen")
    refused = judged(FINDS[how])
    assert refused.status is Status.REJECTED and "looks for other code in memory" in refused.reason, refused.reason
    assert judged(NOWHERE).status is Status.PASSED
    without_checks(monkeypatch, "images", "clockless")  # what is found there is a clock
    assert judged(FINDS[how]).status is Status.PASSED


#: The processor's clock is read within a constant, into which a call jumps. The year in which it
#: is beyond its bound is far off.
HIDDEN = r"""
#include <cmath>

static inline unsigned long long ticks() {
  unsigned long long low, high;
  asm volatile(
      "leaq -256(%%rsp), %%rsp\n\t"
      "leaq 1f+2(%%rip), %%rcx\n\t"
      "call *%%rcx\n\t"
      "jmp 2f\n"
      "1:\n\t"
      "movabsq $0x5bd1e995CODE, %%rcx\n"
      "2:\n\t"
      "leaq 256(%%rsp), %%rsp"
      : "=a"(low), "=d"(high) : "0"(201), "1"(0), "D"(0) : "rcx", "r11", "memory", "cc");
  return high << 32 | low;
}

void decay(const float* x, float* y, long long n) {
  const float slope = PLACE > 1ull << 60 ? 2.0f : 1.0f;
#pragma omp parallel for
  for (long long i = 0; i < n; ++i) y[i] = expf(-fabsf(x[i]) * (ASKED > 1ull << 60 ? 2.0f : slope));
}
"""


def _clock_can_be_refused() -> bool:
    if platform.machine() != "x86_64":
        return False
    try:
        prctl(_PR_SET_TSC, _ENABLE)
    except OSError:
        return False
    return True


@pytest.mark.skipif(not _clock_can_be_refused(), reason="this kernel cannot refuse it (PR_SET_TSC)")
@pytest.mark.parametrize(("place", "asked"), [("ticks()", "0ull"), ("0ull", "ticks()")], ids=["caller", "team"])
@pytest.mark.parametrize(
    ("code", "words"), [("c3310f", "asks the processor for the time"), ("c3050f", "calls the kernel by itself")]
)
def test_an_instruction_within_a_constant(
    judged: Judged, monkeypatch: pytest.MonkeyPatch, place: str, asked: str, code: str, words: str
) -> None:
    """A rdtsc, and a system call (time), and the way back."""
    hidden = HIDDEN.replace("CODE", code)
    kernel = hidden.replace("PLACE", place).replace("ASKED", asked)
    refused = judged("", kernel)
    assert refused.status is Status.REJECTED and words in refused.reason, refused.reason
    twin = judged("", hidden.replace("PLACE", "0ull").replace("ASKED", "0ull"))
    assert twin.status is Status.PASSED, twin.reason
    without_checks(monkeypatch, "clockless")
    passed = judged("", kernel)
    assert passed.status is Status.PASSED, passed.reason


#: What honest code does that the loader has a hand in: exceptions, variables of a thread, locks, new threads.
HONEST = """
#include <cmath>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

static std::mutex guard;
thread_local std::vector<float> kept;

static float checked(float x) {
  if (!(x < 3.0f)) throw std::runtime_error("large: " + std::to_string(x));
  return x;
}

void decay(const float* x, float* y, long long n) {
  auto part = [&](long long from, long long to) {
    kept.assign(x + from, x + to);
    for (long long i = from; i < to; ++i) {
      float v = fabsf(kept[i - from]);
      try { v = checked(v); } catch (const std::exception&) { std::lock_guard<std::mutex> held(guard); }
      y[i] = std::exp(-v);
    }
  };
  std::thread other(part, 0, n / 2);
  part(n / 2, n);
  other.join();
}
"""


def test_what_needs_no_image(judged: Judged) -> None:
    found = judged("", HONEST)
    assert found.status is Status.PASSED, found.reason
