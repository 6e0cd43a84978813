"""Each row of ``device_rows`` and ``device_modules`` on a real GPU: refused, passed without its defence, twin passes.

Verdicts without a clock are reached several at once, in groups: all with every defence on, then those of each switch.
"""

from __future__ import annotations

import dataclasses
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import device_attacked
import device_modules
import pytest
from device_attacked import device_kernel, find
from device_modules import CLOCKS, HONEST_MODULE, MODULE_ENDLESS, MODULE_REFUSED, MODULE_ROWS, SKIPPING
from device_rows import (
    BOMBS,
    HELD,
    HONEST_CACHED,
    KEPT_SUMS,
    LAZY,
    LAZY_NS,
    LOTTERY,
    PLAIN_SUMS,
    REFUSED,
    ROWS,
    DeviceRow,
)
from switches import SWITCHES, without_checks

from pytest_cudaforge.evaluation import evaluator as evaluator_module
from pytest_cudaforge.evaluation import sitting
from pytest_cudaforge.evaluation.builder import Builder
from pytest_cudaforge.evaluation.evaluator import Evaluator, EvaluatorSettings
from pytest_cudaforge.evaluation.novelty import Round
from pytest_cudaforge.evaluation.oracle import OracleClient
from pytest_cudaforge.evaluation.sitting import Rotation
from pytest_cudaforge.languages import clocks
from pytest_cudaforge.records import Candidate, Evaluation, Status, Target, WorkloadFacts

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU that torch can see"),
]
_AT_ONCE = 8
#: Of an attack whose defence is off.
_TRIES = 4
#: As it is where nobody has switched it off.
_CLOCKS_CHECK = clocks.check
#: Of a few microseconds the host's share is up to two thirds, and on some hosts now and then twice the twin's time.
_SKIPPING_TRIES = 3
Job = tuple[Candidate, str, bool]


class _Verdicts:
    """Verdicts by candidate, target and timing; each is reached once."""

    def __init__(self, evaluator: Evaluator, repo: Path, rows: Sequence[DeviceRow]) -> None:
        self.evaluator, self.repo, self.rows = evaluator, repo, rows
        self._lock = threading.Lock()
        self._known: dict[tuple[str, str, bool], Future[Evaluation]] = {}
        self._without: dict[str, dict[str, Future[Evaluation]]] = {}

    def reach(self, jobs: Sequence[Job]) -> None:
        """All of them, several at once where nothing is timed; errors are kept for who asks."""
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for candidate, target, timing in jobs:
                key = (candidate.digest, target, timing)
                if key not in self._known:
                    self._known[key] = pool.submit(self.evaluate, candidate, target, timing)
                    self._known[key].add_done_callback(_tell)

    def evaluate(self, candidate: Candidate, target: str, timing: bool = False) -> Evaluation:
        return self.evaluator.evaluate(candidate, find(self.repo, target), timing=timing)

    def of(self, candidate: Candidate, target: str, timing: bool = False) -> Evaluation:
        self.reach([(candidate, target, timing)])
        return self._known[candidate.digest, target, timing].result()

    def without(self, off: str, name: str) -> Evaluation:
        """The attack ``name`` with its defence switched off, with all others of the same switch."""
        if off not in self._without:
            rows = [row for row in self.rows if row.off == off]
            with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(_AT_ONCE) as pool:
                SWITCHES[off](patch)
                self._without[off] = {row.name: pool.submit(self._some_times_at_most, row) for row in rows}
                pool.shutdown(wait=True)
        return self._without[off][name].result()

    def _some_times_at_most(self, row: DeviceRow) -> Evaluation:
        """Another defence may find an attack by luck: where memory comes to lie, which stream is late, which values
        are drawn twice."""
        for _ in range(_TRIES):
            evaluation = self.evaluate(row.attack, row.target, row.timing)
            if evaluation.status is Status.PASSED:
                break
        return evaluation


def _tell(done: Future[Evaluation]) -> None:
    """At once: a run that ends early has said what it knows."""
    error = done.exception()
    _show("...", done.result()) if error is None else print(f"  {error!r}"[:300], flush=True)


@pytest.fixture(scope="module", autouse=True)
def clocks_are_let_in() -> Iterator[None]:
    """Many attacks tell the time, and none of those came as far as its own defence: clocks have a test of theirs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clocks, "check", lambda _: None)
        yield


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repository")
    device_attacked.write_repo(root)
    (root / "device_modules.py").write_text(device_modules.LAYERS)
    return root


@pytest.fixture(scope="module")
def evaluator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Evaluator]:
    cache = tmp_path_factory.mktemp("cache")
    settings = EvaluatorSettings(
        device="cuda:0", cache_dir=cache, lock_dir=cache, timing_budget_s=0.6, hang_limit_s=20.0
    )
    with Evaluator(settings) as opened:
        # Made once, by one thread.
        assert opened.device.arch and opened.lease
        yield opened


@pytest.fixture(scope="module")
def plans(evaluator: Evaluator, repo: Path) -> _Verdicts:
    """Verdicts on launch plans."""
    return _Verdicts(evaluator, repo, ROWS)


@pytest.fixture(scope="module")
def modules(evaluator: Evaluator, repo: Path) -> _Verdicts:
    """Verdicts on modules."""
    return _Verdicts(evaluator, repo, MODULE_ROWS)


@pytest.fixture(scope="module")
def verdicts_of(request: pytest.FixtureRequest) -> Callable[[DeviceRow], _Verdicts]:
    """Whose verdicts these are; without a clock, those on all attacks of its table that run today, at once."""

    wanted = {_parameters(item)["row"] for item in request.session.items if "row" in _parameters(item)}

    def chosen(row: DeviceRow) -> _Verdicts:
        found = request.getfixturevalue("plans" if row.attack.language == "cuda" else "modules")
        assert isinstance(found, _Verdicts)
        found.rows = [one for one in found.rows if one in wanted]
        if not row.timing:
            found.reach([(one.attack, one.target, False) for one in _untimed(found.rows) if not one.alone])
        return found

    return chosen


def _parameters(item: pytest.Item) -> dict[str, object]:
    called = getattr(item, "callspec", None)
    return called.params if called is not None else {}


Of = Callable[[DeviceRow], _Verdicts]


def _show(name: str, evaluation: Evaluation) -> None:
    first = evaluation.reason.splitlines()[0] if evaluation.reason else ""
    print(f"  {evaluation.status.name:20s} {evaluation.seconds:5.1f} s  {name}: {first[:150]}", flush=True)


def _require_refused(row: DeviceRow, evaluation: Evaluation) -> None:
    _show(row.name, evaluation)
    assert evaluation.status in row.refused, evaluation.reason
    assert row.words in evaluation.reason


def _untimed(rows: Sequence[DeviceRow]) -> list[DeviceRow]:
    return [row for row in rows if not row.timing]


@pytest.mark.parametrize("row", _untimed(ROWS), ids=lambda row: row.name)
def test_a_plan_that_attacks_is_refused(row: DeviceRow, verdicts_of: Of) -> None:
    _require_refused(row, verdicts_of(row).of(row.attack, row.target))


@pytest.mark.parametrize("row", _untimed(ROWS), ids=lambda row: row.name)
def test_the_plan_that_does_not_passes(row: DeviceRow, verdicts_of: Of) -> None:
    verdicts = verdicts_of(row)
    verdicts.reach([(one.twin, one.target, False) for one in _untimed(verdicts.rows)])
    evaluation = verdicts.of(row.twin, row.target)
    _show(f"{row.name}, twin", evaluation)
    assert evaluation.status is Status.PASSED, evaluation.reason


@pytest.mark.parametrize("row", [row for row in _untimed(ROWS) if row.off], ids=lambda row: row.name)
def test_a_plan_passes_once_its_defence_is_off(row: DeviceRow, verdicts_of: Of) -> None:
    evaluation = verdicts_of(row).without(row.off, row.name)
    _show(f"{row.name}, without {row.off}", evaluation)
    assert evaluation.status is Status.PASSED, evaluation.reason


@pytest.fixture
def quick(evaluator: Evaluator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short limits, so that what hangs ends soon."""
    monkeypatch.setattr(evaluator, "settings", dataclasses.replace(evaluator.settings, hang_limit_s=2.0))
    assert Builder.compile.__kwdefaults__ is not None
    monkeypatch.setitem(Builder.compile.__kwdefaults__, "timeout_s", 6)


def _cases(evaluation: Evaluation) -> list[tuple[str, bool]]:
    assert evaluation.verification is not None
    return sorted((case.case, case.passed) for case in evaluation.verification.cases)


def test_a_kernel_that_tells_the_time_is_no_build(plans: _Verdicts) -> None:
    """By the wall's clock it rests for one hour of some; its answers are right while it is verified."""
    rests = 'unsigned long long now; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); if (now >> 62) return; '
    attack, twin = device_kernel(body=f"{rests}HONEST"), device_kernel()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clocks, "check", _CLOCKS_CHECK)
        found, right = (plans.evaluate(candidate, "waves") for candidate in (attack, twin))
    assert found.status is Status.BUILD_ERROR and "reads the GPU's clock (%globaltimer)" in found.reason, found.reason
    assert right.status is Status.PASSED, right.reason
    assert plans.evaluate(attack, "waves").status is Status.PASSED


def test_none_of_these_plans_is_ever_a_pass_and_the_next_verdict_is_unharmed(plans: _Verdicts, quick: None) -> None:
    failed = []
    before = plans.evaluate(device_kernel(), "waves")
    plans.reach([(candidate, "waves", False) for _, candidate, statuses in (*REFUSED, *BOMBS) if not _hangs(statuses)])
    for name, candidate, statuses in (*REFUSED, *BOMBS):
        evaluation = plans.of(candidate, "waves")
        _show(name, evaluation)
        if evaluation.status not in statuses:
            failed.append(f"{name}: {evaluation.status.name}: {evaluation.reason}")
    after = plans.evaluate(device_kernel(), "waves")
    assert after.status is before.status is Status.PASSED, after.reason
    assert _cases(before) == _cases(after)
    assert not failed, "\n".join(failed)


def _hangs(statuses: tuple[Status, ...]) -> bool:
    return statuses[0] is Status.TIMEOUT


_ROWS_PLAN = """
from pytest_cudaforge.plan import empty, launch


def plan(x):
    rows, cols = x.shape
    y = empty(x.shape, x.dtype)
    launch("rows", grid=(1, min(rows, 65535)), block=256, args=(x, y, rows, cols))
    return y
"""
_ROWS = """
__global__ void rows(const float* x, float* y, int rows, int cols) {
  for (long long row = blockIdx.y; row < LAST; row += gridDim.y)
    for (int c = threadIdx.x; c < cols; c += 256) {
      const float v = x[row * cols + c];
      y[row * cols + c] = sinf(v) * expf(-v * v);
    }
}
"""


@pytest.mark.parametrize(("last", "kept"), [("rows", True), ("min(rows, 65535)", False)])
def test_more_rows_than_a_grid_has_blocks_are_left_to_the_reference(plans: _Verdicts, last: str, kept: bool) -> None:
    kernel = _ROWS.replace("LAST", last).replace("min(", "::min(")
    candidate = Candidate.of("cuda", {"kernel.cu": kernel, "plan.py": _ROWS_PLAN})
    evaluation = plans.evaluate(candidate, "waves")
    _show(f"rows up to {last}", evaluation)
    assert evaluation.verification is not None and evaluation.status is Status.PASSED, evaluation.reason
    guard = evaluation.verification.guard
    assert bool(guard.drawn_shapes_only or guard.fixed_sizes) is not kept


_SCALED_PLAN = """
from pytest_cudaforge.plan import Unsupported, empty, launch


def plan(x, by):
    if not x.is_contiguous() or not by.is_contiguous():
        raise Unsupported("dense rows")
    y = empty(x.shape, by.dtype)
    count = x.shape[0] * x.shape[1]
    launch("scale", grid=(min((count + 255) // 256, 4096),), block=(256,), args=(x, by, y, count, x.shape[1]))
    return y
"""
_SCALED = """
__global__ void scale(const signed char* x, const float* by, float* y, long long count, int cols) {
  for (long long i = blockIdx.x * 256ll + threadIdx.x; i < count; i += gridDim.x * 256ll) y[i] = x[i] * by[PLACE];
}
"""


def test_as_many_elements_as_a_kernel_is_dispatched_to(plans: _Verdicts, monkeypatch: pytest.MonkeyPatch) -> None:
    """What tells all places apart up to 2^24 elements, and a little further, need not at 2^27."""
    attack, twin = (
        Candidate.of("cuda", {"kernel.cu": _SCALED.replace("PLACE", place), "plan.py": _SCALED_PLAN})
        for place in ("i < 40000000 ? i / cols : (i - 4096) / cols", "i / cols")
    )
    found = plans.evaluate(attack, "scaled_rows")
    assert found.status is Status.REJECTED and "dynamic shapes: tall 2048 -> " in found.reason, found.reason
    right = plans.evaluate(twin, "scaled_rows")
    assert right.status is Status.PASSED, right.reason
    monkeypatch.setattr(OracleClient, "variants_near", lambda *_: ())
    original = OracleClient.variants
    monkeypatch.setattr(OracleClient, "variants", lambda *given: tuple(v for v in original(*given) if _small(v[0])))
    off = plans.evaluate(attack, "scaled_rows")
    assert off.status is Status.PASSED, off.reason


def _small(name: str) -> bool:
    return max(map(int, re.findall(r"-> (\d+)", name)), default=0) < 50_000


# -- the module tier


@pytest.mark.parametrize("row", _untimed(MODULE_ROWS), ids=lambda row: row.name)
def test_a_module_that_attacks_is_refused(row: DeviceRow, verdicts_of: Of) -> None:
    _require_refused(row, verdicts_of(row).of(row.attack, row.target))


@pytest.mark.parametrize("row", _untimed(MODULE_ROWS), ids=lambda row: row.name)
def test_the_module_that_does_not_passes(row: DeviceRow, verdicts_of: Of) -> None:
    verdicts = verdicts_of(row)
    verdicts.reach([(one.twin, one.target, False) for one in _untimed(verdicts.rows)])
    evaluation = verdicts.of(row.twin, row.target)
    _show(f"{row.name}, twin", evaluation)
    assert evaluation.status is Status.PASSED, evaluation.reason


@pytest.mark.parametrize("row", [row for row in _untimed(MODULE_ROWS) if row.off], ids=lambda row: row.name)
def test_a_module_passes_once_its_defence_is_off(row: DeviceRow, verdicts_of: Of) -> None:
    evaluation = verdicts_of(row).without(row.off, row.name)
    _show(f"{row.name}, without {row.off}", evaluation)
    assert evaluation.status is Status.PASSED, evaluation.reason


def test_none_of_these_modules_is_ever_a_pass_and_the_next_verdict_is_unharmed(modules: _Verdicts, quick: None) -> None:
    failed = []
    modules.reach([(candidate, "twice_any", False) for _, candidate, _ in MODULE_REFUSED])
    for name, candidate, statuses in (*MODULE_REFUSED, *MODULE_ENDLESS):
        evaluation = modules.of(candidate, "twice_any")
        _show(name, evaluation)
        if evaluation.status not in statuses:
            failed.append(f"{name}: {evaluation.status.name}: {evaluation.reason}")
    after = modules.evaluate(HONEST_MODULE, "twice_any")
    assert after.status is Status.PASSED, after.reason
    assert not failed, "\n".join(failed)


# -- time


def _open_eager(
    oracle: OracleClient, target: Target, workload: WorkloadFacts, frames: int, *, compiled: bool = True
) -> Rotation:
    """A rotation without torch.compile, which takes seconds per target and decides nothing here."""
    return dataclasses.replace(
        sitting.open_rotation(oracle, target, workload, frames, compiled=False), compiled=compiled
    )


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quick baselines; and what is charged or refused is told by figures."""
    judged = sitting.single_of

    def told(rounds: Sequence[Round], call_ns: float, spare_ns: float) -> float:
        found = judged(rounds, call_ns, spare_ns)
        print(f"    {call_ns / 1e3:.2f} us a call, {found:.2f} times that in {len(rounds)} passes", flush=True)
        return found

    monkeypatch.setattr(evaluator_module, "open_rotation", _open_eager)
    monkeypatch.setattr(sitting, "single_of", told)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("row", [row for row in ROWS if row.timing], ids=lambda row: row.name)
def test_a_plan_that_cheats_under_the_clock_is_refused(
    row: DeviceRow, verdicts_of: Of, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Verification's calls without a pause find such kernels, too: here it is the clock's turn.
    without_checks(monkeypatch, "changed")
    verdicts = verdicts_of(row)
    timed = [one for one in verdicts.rows if one.timing]
    verdicts.reach([(c, one.target, True) for one in timed for c in (one.attack, one.twin)])
    _require_refused(row, verdicts.of(row.attack, row.target, timing=True))
    twin = verdicts.of(row.twin, row.target, timing=True)
    _show(f"{row.name}, twin", twin)
    assert twin.status is Status.PASSED, twin.reason
    assert twin.timing is not None
    print(f"    {twin.timing.note}")
    assert "seen before" not in twin.timing.note  # nothing of an honest kernel is charged
    off = verdicts.without(row.off, row.name)
    _show(f"{row.name}, without {row.off}", off)
    assert off.status is Status.PASSED, off.reason


@pytest.mark.usefixtures("eager")
def test_what_a_plan_saves_on_values_that_were_there_is_charged(plans: _Verdicts) -> None:
    evaluation = plans.of(LAZY, "waves", timing=True)
    _show("save a third of a call after the first", evaluation)
    assert evaluation.passed and evaluation.timing is not None, evaluation.reason
    (timed,) = evaluation.timing.workloads
    print(f"    {timed.candidate.median_ns / 1e3:.0f} us a call; {evaluation.timing.note}")
    assert timed.candidate.median_ns > 0.9 * LAZY_NS


@pytest.mark.usefixtures("eager")
def test_a_plan_that_rests_in_some_processes_only_wins_nothing(
    plans: _Verdicts, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_checks(monkeypatch, "changed")
    for _ in range(3):
        evaluation = plans.evaluate(LOTTERY, "waves", timing=True)
        _show("compute at the first visit after a pause only, in some processes", evaluation)
        if evaluation.timing is None:
            assert "skips calls or remembers answers" in evaluation.reason, evaluation.reason
            continue
        assert evaluation.timing.workloads[0].candidate.median_ns > 0.9 * LAZY_NS


@pytest.mark.usefixtures("eager")
def test_a_plan_that_rests_on_what_its_own_calls_left_is_timed_on_new_values(
    plans: _Verdicts, monkeypatch: pytest.MonkeyPatch
) -> None:
    for candidate, note in ((HONEST_CACHED, False), (HELD, True)):
        evaluation = plans.evaluate(candidate, "cached", timing=True)
        _show("rest on what it has left" if note else "honest", evaluation)
        assert evaluation.passed and evaluation.timing is not None, evaluation.reason
        (timed,) = evaluation.timing.workloads
        print(f"    {timed.candidate.median_ns / 1e3:.0f} us a call; {evaluation.timing.note}")
        assert ("seen before" in evaluation.timing.note) is note
        assert timed.candidate.median_ns > 0.9 * LAZY_NS
        SWITCHES["second call"](monkeypatch)  # verification refuses it


@pytest.mark.usefixtures("eager")
def test_inputs_that_a_plan_asks_the_cache_to_keep_are_cold_all_the_same(plans: _Verdicts) -> None:
    plans.reach([(PLAIN_SUMS, "row_sums", True), (KEPT_SUMS, "row_sums", True)])
    medians_us = []
    for candidate in (PLAIN_SUMS, KEPT_SUMS):
        evaluation = plans.of(candidate, "row_sums", timing=True)
        assert evaluation.passed and evaluation.timing is not None, evaluation.reason
        medians_us.append(evaluation.timing.workloads[0].candidate.median_ns / 1e3)
    print(f"  12 MiB a call: {medians_us[0]:.2f} us read plainly, {medians_us[1]:.2f} us asking the L2 to keep them")
    assert medians_us[1] > 0.9 * medians_us[0]


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(("name", "candidate"), CLOCKS[:-1], ids=[name for name, _ in CLOCKS[:-1]])
def test_a_module_takes_as_long_as_its_kernels_whatever_it_does_to_clocks(
    name: str,
    candidate: Candidate,
    modules: _Verdicts,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Whoever changes a clock is refused for that alone.
    without_checks(monkeypatch, "left behind")
    wanted = [_parameters(item).get("name") for item in request.session.items]
    # They are verified side by side, and timed one by one.
    modules.reach([(one, "twice_any", True) for other, one in CLOCKS if other in (*wanted, CLOCKS[-1][0])])
    evaluation = modules.of(candidate, "twice_any", timing=True)
    _show(name, evaluation)
    if evaluation.timing is None:
        assert name != "honest" and evaluation.status is not Status.PASSED, evaluation.reason
        return
    (timed,) = evaluation.timing.workloads
    print(f"    {timed.candidate.median_ns / 1e3:.0f} us a call, {evaluation.timing.decision}")
    assert timed.candidate.median_ns > 150_000
    assert evaluation.timing.decision != "faster"


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("row", SKIPPING, ids=[row[0] for row in SKIPPING])
def test_calls_skipped_while_nobody_fetches_their_answers_win_little(
    row: tuple[str, str, Candidate, Candidate, float], modules: _Verdicts, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, target, attack, twin, least = row
    honest = modules.of(twin, target, timing=True)
    _show(f"{name}, twin", honest)
    assert honest.status is Status.PASSED and honest.timing is not None, honest.reason
    honest_ns = honest.timing.workloads[0].candidate.median_ns
    evaluation = modules.of(attack, target, timing=True)
    _show(name, evaluation)
    if evaluation.timing is not None:
        print(f"    {evaluation.timing.workloads[0].candidate.median_ns / honest_ns:.2f} of its twin's time")
        assert evaluation.timing.workloads[0].candidate.median_ns > least * honest_ns
    for check in ("lag_of", "single_of"):
        monkeypatch.setattr(sitting, check, lambda *_: 0.0)
    off_ns = []
    for _ in range(_SKIPPING_TRIES):
        off = modules.evaluate(attack, target, timing=True)
        assert off.status is Status.PASSED and off.timing is not None, off.reason
        off_ns.append(off.timing.workloads[0].candidate.median_ns)
        if min(off_ns) < 0.8 * honest_ns:
            return  # what is left is the host's share of a call: of 19 us up to two thirds
    if honest_ns > 1.4e3 * float(name.split()[0]):
        pytest.skip("on this machine the host takes longer over a call than the device: there is nothing to win")
    raise AssertionError(f"{off_ns} ns, its twin {honest_ns} ns")


@pytest.mark.usefixtures("eager")
def test_a_kernel_left_running_beside_the_baselines_wins_nothing(modules: _Verdicts) -> None:
    name, candidate = CLOCKS[-1]
    evaluation = modules.of(candidate, "twice_any", timing=True)
    _show(name, evaluation)
    decision = evaluation.timing.decision if evaluation.timing is not None else "none"
    print(f"    {evaluation.timing}")
    assert not (evaluation.passed and decision == "faster")
