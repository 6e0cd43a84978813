"""Repeated calls on the same values: a kernel that is right most of the time is found out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from judged_targets import find, write_repo
from switches import SWITCHES, no_edits, without_checks
from written_inputs import GROWN_KERNEL, GROWN_PLAN, HELD, WRITTEN, cached_kernel

from pytest_cudaforge.evaluation import checks, evaluator, runs
from pytest_cudaforge.evaluation.chance import Chance
from pytest_cudaforge.evaluation.evaluator import Evaluator, EvaluatorSettings
from pytest_cudaforge.records import Candidate, Status

PLAN = """from pytest_cudaforge.plan import empty, launch

def plan(x):
    y = empty(x.shape, x.dtype)
    launch("twice", args=(x, y, x.numel()))
    return y
"""
#: What threads that race do, without luck: wrong at every seventh call on values that it has just seen.
KERNEL = """
void twice(const float* x, float* y, long n) {
  static float last; static int same;
  same = x[0] == last ? same + 1 : 0;
  last = x[0];
  for (long k = 0; k < n; ++k) y[k] = x[k] * 2 + 1;
  if (SPOIL) y[0] += 1;
}
"""


def _status(root: Path, spoil: str) -> tuple[Status, str]:
    write_repo(root)
    candidate = Candidate.of("cpp", {"kernel.cpp": KERNEL.replace("SPOIL", spoil), "plan.py": PLAN})
    with Evaluator(EvaluatorSettings(cache_dir=root / "cache", lock_dir=root)) as opened:
        evaluation = opened.evaluate(candidate, find(root, "::only_fp32"), timing=False)
    return evaluation.status, evaluation.reason


def test_a_kernel_that_is_sometimes_wrong_is_refused_and_its_twin_passes(tmp_path: Path) -> None:
    status, reason = _status(tmp_path / "wrong", "same && same % 7 == 0")
    assert status is Status.INCORRECT_NUMERICAL, reason
    assert "a repeated call on the same inputs" in reason
    assert _status(tmp_path / "right", "same < 0")[0] is Status.PASSED


def test_without_the_repeats_it_would_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_checks(monkeypatch, "repeated")
    without_checks(monkeypatch, "changed")  # many calls as well
    without_checks(monkeypatch, "beside")
    assert _status(tmp_path, "same && same % 7 == 0")[0] is Status.PASSED


BINS = """
import torch
from pytest_cudaforge import forge_target

@forge_target(inputs=lambda: [torch.randint(0, 1000, (2000,))])
def bins(ids):
    return torch.bincount(ids, minlength=1000)
"""
BINS_PLAN = """from pytest_cudaforge.plan import empty, launch

def plan(ids):
    y = empty((1000,), ids.dtype)
    launch("bins", args=(ids, y, ids.numel()))
    return y
"""
BINS_KERNEL = """
void bins(const long long* ids, long long* y, long n) {
  for (int k = 0; k < 1000; ++k) y[k] = 0;
  #pragma omp parallel for
  for (long i = 0; i < n; ++i) {
    ATOMIC
    y[ids[i]]++;
  }
}
"""


def _verdict(root: Path, layers: str, name: str, kernel: str, plan: str, *, times: bool = True) -> tuple[Status, str]:
    """On one target in a repository of its own."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    (root / "layers.py").write_text(layers)
    with Evaluator(EvaluatorSettings(cache_dir=root / "cache", lock_dir=root, times=times)) as opened:
        candidate = Candidate.of("cpp", {"kernel.cpp": kernel, "plan.py": plan})
        found = opened.evaluate(candidate, find(root, name), timing=False)
    return found.status, found.reason


def _counts(root: Path, atomic: str) -> tuple[Status, str]:
    # Nothing is timed, so that threads would sleep between calls.
    return _verdict(root, BINS, "::bins", BINS_KERNEL.replace("ATOMIC", atomic), BINS_PLAN, times=False)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two threads do not race on one processor")
def test_threads_that_race_are_refused_and_their_twin_passes(tmp_path: Path) -> None:
    # Where others keep the cores busy threads hardly meet: that it is refused is said of a machine that has time.
    found = [_counts(tmp_path / "wrong", "")]
    found += [_counts(tmp_path / "again", "")] if found[0][0] is Status.PASSED else []
    assert found[-1][0] is Status.INCORRECT_NUMERICAL, found
    assert _counts(tmp_path / "right", "#pragma omp atomic")[0] is Status.PASSED


def test_where_threads_sleep_and_one_answer_is_looked_at_they_would_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluator, "_short_spins", lambda _: ())
    without_checks(monkeypatch, "repeated", "changed", "beside", "first at once", "thread counts", "ordinary")
    # A sleeping thread may be woken beside its waker all the same, and one call of some thirty then tells: of eight
    # verdicts three passed on two idle cores.
    assert Status.PASSED in (_counts(tmp_path / str(attempt), "")[0] for attempt in range(12))


COUNTED = """
import torch
from torch import nn
from pytest_cudaforge import forge_target

@forge_target(inputs=lambda: [torch.randn(64, 32)])
class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.seen += 1
        return x * 2 + 1
"""
COUNTED_PLAN = """from pytest_cudaforge.plan import empty, launch

def plan(module, x):
    y = empty(x.shape, x.dtype)
    launch("twice", args=(x, module.seen, y, x.numel()))
    return y
"""
COUNTED_KERNEL = """
void twice(const float* x, long long* seen, float* y, long n) {
  COUNT;
  for (long k = 0; k < n; ++k) y[k] = x[k] * 2 + 1;
}
"""


def _counted(root: Path, count: str) -> tuple[Status, str]:
    return _verdict(root, COUNTED, "::Counted", COUNTED_KERNEL.replace("COUNT", count), COUNTED_PLAN)


def test_state_that_is_right_after_the_first_call_only_is_refused_and_its_twin_passes(tmp_path: Path) -> None:
    status, reason = _counted(tmp_path / "wrong", "*seen = 1")
    assert status is Status.INCORRECT_NUMERICAL, reason
    assert "a second call" in reason and "buffer seen" in reason
    assert _counted(tmp_path / "right", "++*seen")[0] is Status.PASSED


def test_without_the_second_call_it_would_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_checks(monkeypatch, "later calls", "in a row", "beside")
    assert _counted(tmp_path, "*seen = 1")[0] is Status.PASSED


def _cached(root: Path, rest: str) -> tuple[Status, str]:
    candidate = cached_kernel(rest)
    return _verdict(root, WRITTEN, "::cached", candidate.file("kernel.cpp"), candidate.file("plan.py"))


def _grown(root: Path, rest: str) -> tuple[Status, str]:
    return _verdict(root, WRITTEN, "::grown", GROWN_KERNEL.replace("REST", rest), GROWN_PLAN)


def test_a_cache_that_holds_the_entry_already_is_no_answer_and_the_twin_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    SWITCHES["empty"](monkeypatch)  # where all is zero a cache holds it, too
    status, reason = _cached(tmp_path / "wrong", HELD)
    assert status is Status.INCORRECT_NUMERICAL, reason
    assert "a second call" in reason and "never written" in reason
    assert _cached(tmp_path / "right", "")[0] is Status.PASSED


def test_without_a_call_on_what_another_left_it_would_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    SWITCHES["empty"](monkeypatch)
    without_checks(monkeypatch, "later calls", "beside")
    no_edits(monkeypatch)
    assert _cached(tmp_path, HELD)[0] is Status.PASSED


def test_a_second_call_behind_the_first_is_no_clocks_and_the_twin_passes(tmp_path: Path) -> None:
    status, reason = _grown(tmp_path / "wrong", "true")
    assert status is Status.INCORRECT_NUMERICAL, reason
    assert "right behind the first" in reason
    assert _grown(tmp_path / "right", "false")[0] is Status.PASSED


def test_without_a_second_call_behind_the_first_it_would_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_checks(monkeypatch, "in a row", "beside")
    assert _grown(tmp_path, "true")[0] is Status.PASSED


STREAM = """
import torch
from pytest_cudaforge import forge_target

@forge_target(inputs=lambda: {"frame": torch.randn(8), "cache": torch.randn(64, 8), "at": torch.randint(0, 64, (1,))})
def context(frame, cache, at):
    cache.index_copy_(0, at, frame[None])
    seen = (torch.arange(64) <= at).float()
    mean = (cache * seen[:, None]).sum(0) / (at + 1)
    at.add_(1).remainder_(64)
    return frame - mean
"""
#: Sums that go on from the call before, where it was one place earlier in this cache and left what is there.
STREAM_KERNEL = """
#include <cstring>
static thread_local double sums[8];
static thread_local float last[8];
static thread_local const float* known;
static thread_local long long then = -1;

extern "C" void context(const float* frame, float* cache, long long* at, float* out) {
  const long long now = *at;
  std::memcpy(cache + now * 8, frame, sizeof last);
  const bool on = now && cache == known && now == then + 1 && !std::memcmp(cache + then * 8, last, sizeof last);
  const long long begin = on && TRUSTED ? now : 0;
  for (long long i = 0; i < 8; ++i) {
    if (!begin) sums[i] = 0.0;
    for (long long t = begin; t <= now; ++t) sums[i] += cache[t * 8 + i];
    out[i] = frame[i] - (float)(sums[i] / (double)(now + 1));
  }
  std::memcpy(last, frame, sizeof last);
  known = cache, then = now;
  *at = (now + 1) % 64;
}
"""
STREAM_PLAN = """from pytest_cudaforge.plan import empty, launch

def plan(frame, cache, at):
    out = empty(frame.shape, frame.dtype)
    launch("context", args=(frame, cache, at, out))
    return out
"""


def _streamed(root: Path, trusted: str) -> tuple[Status, str]:
    return _verdict(root, STREAM, "::context", STREAM_KERNEL.replace("TRUSTED", trusted), STREAM_PLAN)


def test_a_cache_that_was_edited_between_two_steps_is_no_longer_known_and_the_twin_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, reason = _streamed(tmp_path / "wrong", "true")
    assert status is Status.INCORRECT_NUMERICAL and "had left were exchanged" in reason, reason
    assert _streamed(tmp_path / "right", "false")[0] is Status.PASSED
    no_edits(monkeypatch)
    assert _streamed(tmp_path / "off", "true")[0] is Status.PASSED


FADING = """
import torch
from torch import nn
from pytest_cudaforge import forge_target

@forge_target(inputs=lambda: [torch.randn(64, 32)])
class Fading(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("power", torch.ones(()))

    def forward(self, x):
        self.power *= 0.99
        return x / (1 - self.power)
"""
FADING_KERNEL = """
void twice(const float* x, float* power, float* y, long n) {
  *power *= 0.99f;
  const float by = DONE ? 1.0f : 1.0f - *power;
  for (long k = 0; k < n; ++k) y[k] = x[k] / by;
}
"""


def _fading(root: Path, done: str) -> tuple[Status, str]:
    plan = COUNTED_PLAN.replace("module.seen", "module.power")
    return _verdict(root, FADING, "::Fading", FADING_KERNEL.replace("DONE", done), plan)


def test_a_correction_that_ends_after_hundreds_of_calls_is_refused_and_its_twin_passes(tmp_path: Path) -> None:
    status, reason = _fading(tmp_path / "wrong", "*power < 0.08f")
    assert status is Status.INCORRECT_NUMERICAL, reason
    assert "a later call" in reason
    assert _fading(tmp_path / "right", "*power < 0.0f")[0] is Status.PASSED


def test_without_the_later_call_it_would_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_LATER_CALLS", ())
    assert _fading(tmp_path, "*power < 0.08f")[0] is Status.PASSED


#: Two passes over one workspace, which belongs to whom?
SHARED_KERNEL = """
#include <cmath>
void grown(float* x, float* y, long rows, long n) {
  static WHOSE double kept[64 * 32];
  for (long i = 0; i < rows * n; ++i) kept[i] = std::tanh((double)x[i]);
  for (long r = 0; r < rows; ++r) {
    double s = 0;
    for (long k = 0; k < n; ++k) { x[r * n + k] += kept[r * n + k]; s += x[r * n + k]; }
    y[r] = s;
  }
}
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two threads take turns on one processor")
def test_calls_that_write_their_inputs_share_no_workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Where others keep the cores busy the threads may take turns.
    for attempt in range(3):
        kernel = SHARED_KERNEL.replace("WHOSE", "")
        status, reason = _verdict(tmp_path / str(attempt), WRITTEN, "::grown", kernel, GROWN_PLAN)
        if status is not Status.PASSED:
            break
    assert status is Status.INCORRECT_NUMERICAL and "while another thread" in reason, reason
    own = SHARED_KERNEL.replace("WHOSE", "thread_local")
    assert _verdict(tmp_path / "own", WRITTEN, "::grown", own, GROWN_PLAN)[0] is Status.PASSED
    without_checks(monkeypatch, "beside", "first at once")
    assert _verdict(tmp_path / "off", WRITTEN, "::grown", kernel, GROWN_PLAN)[0] is Status.PASSED


class _FirstLast(Chance):
    """Of several places the first one comes last."""

    def sample(self, population: Any, k: int, **_: Any) -> list[Any]:
        return list(population)[:k][::-1]


def test_calls_that_tell_how_often_it_was_called_leave_no_answer_to_be_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They go on where the last answer lies that was looked at, and every call there gives another one."""
    without_checks(monkeypatch, "thread counts")  # a GPU has none, and what lies there is looked at in it
    monkeypatch.setattr(runs, "CHANCE", _FirstLast())
    kernel = GROWN_KERNEL.replace("REST", "false").replace("{", "{ static long calls; ++calls;", 1)
    status, reason = _verdict(tmp_path, WRITTEN, "::grown", kernel, GROWN_PLAN, times=False)
    assert status is Status.PASSED, reason
