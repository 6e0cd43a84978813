"""Each row of ``verdict_rows``: refused with every defence on, passed with its own alone switched off; the twin passes.

Whole verdicts through ``Evaluator.evaluate``, by the real compilers, workers and oracle.
"""

from __future__ import annotations

import dataclasses
import itertools
import mmap
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from attacked import find, hostile, write_repo
from switches import SWITCHES, tries
from verdict_rows import ELSEWHERE, PYTHON, REFUSED, ROWS, Row

from pytest_cudaforge import languages
from pytest_cudaforge.errors import BuildFailure
from pytest_cudaforge.evaluation import building, cases, checks, probes, runs, verification, zygote
from pytest_cudaforge.evaluation.builder import Builder
from pytest_cudaforge.evaluation.building import Kitchen
from pytest_cudaforge.evaluation.cases import call_layout
from pytest_cudaforge.evaluation.chance import Chance
from pytest_cudaforge.evaluation.evaluator import Evaluator, EvaluatorSettings
from pytest_cudaforge.evaluation.oracle import TrialCase
from pytest_cudaforge.evaluation.plan_work import PlanWork
from pytest_cudaforge.evaluation.sandbox import Defences
from pytest_cudaforge.evaluation.view import package_paths
from pytest_cudaforge.evaluation.zygote import ForkServers
from pytest_cudaforge.languages import Unit, cpp
from pytest_cudaforge.languages.cache import BuildCache, build_key
from pytest_cudaforge.records import Candidate, Evaluation, Status

Servers = Callable[[Defences], ForkServers]
_SECRET = "an expected output"


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repository")
    write_repo(root)
    (root / "secret.h").write_text(f"// {_SECRET}\n")
    return root


@pytest.fixture(scope="module")
def evaluator(tmp_path_factory: pytest.TempPathFactory, guarded: ForkServers) -> Iterator[Evaluator]:
    """Limits for hangs are generous: honest kernels take microseconds, and the machine may be busy."""
    cache = tmp_path_factory.mktemp("cache")
    settings = EvaluatorSettings(cache_dir=cache, timing_budget_s=0.4, hang_limit_s=30.0, lock_dir=cache, times=False)
    with Evaluator(settings) as opened:
        own = opened.servers
        opened.servers = guarded  # their environment holds a secret
        yield opened
        opened.servers = own


def _aimed(candidate: Candidate, repo: Path) -> Candidate:
    files = {name: text.replace("@SECRET@", str(repo / "secret.h")) for name, text in candidate.files}
    return Candidate.of("cpp", files)


def _evaluate(evaluator: Evaluator, repo: Path, row: Row, candidate: Candidate) -> Evaluation:
    aimed = _aimed(candidate, repo)
    # What a build saw of the host must not come from the cache.
    fresh = "@SECRET@" in candidate.file("kernel.cpp")
    return evaluator.evaluate(aimed, find(repo, row.target), timing=row.timing, fresh=fresh)


def _switch_off(row: Row, evaluator: Evaluator, monkeypatch: pytest.MonkeyPatch, servers_with: Servers) -> None:
    if row.off in SWITCHES:
        SWITCHES[row.off](monkeypatch)
    else:
        servers = servers_with(dataclasses.replace(Defences(), **{row.off: False}))
        monkeypatch.setattr(evaluator, "servers", servers)


@pytest.fixture
def _also_off(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    if row.also_off:
        SWITCHES[row.also_off](monkeypatch)


_PLAIN_ROWS = [row for row in ROWS if row.off != "seeds"]


@pytest.mark.parametrize("row", _PLAIN_ROWS, ids=lambda row: row.name)
@pytest.mark.usefixtures("_also_off")
def test_the_attack_is_refused(row: Row, evaluator: Evaluator, repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The order is drawn; some orders let this one attack through, and this is not one of them.
    order = Chance()
    order.follow(10)
    monkeypatch.setattr(cases, "CHANCE", order)
    for _ in tries(evaluator):  # now and then drawn values show it before what it is for does
        evaluation = _evaluate(evaluator, repo, row, row.attack)
        assert evaluation.status in row.refused, evaluation.reason
        if row.words in evaluation.reason:
            break
    assert row.words in evaluation.reason


@pytest.mark.parametrize("row", _PLAIN_ROWS, ids=lambda row: row.name)
@pytest.mark.usefixtures("_also_off")
def test_it_passes_once_its_defence_is_off(
    row: Row, evaluator: Evaluator, repo: Path, monkeypatch: pytest.MonkeyPatch, servers_with: Servers
) -> None:
    _switch_off(row, evaluator, monkeypatch, servers_with)
    for _ in tries(evaluator):  # drawn values show by chance, now and then, what others are for
        evaluation = _evaluate(evaluator, repo, row, row.attack)
        if evaluation.status is Status.PASSED:
            break
    assert evaluation.status is Status.PASSED, evaluation.reason


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
@pytest.mark.usefixtures("_also_off")
def test_the_honest_twin_passes(row: Row, evaluator: Evaluator, repo: Path) -> None:
    evaluation = _evaluate(evaluator, repo, row, row.twin)
    assert evaluation.status is Status.PASSED, evaluation.reason


def test_every_promise_has_its_attack() -> None:
    promises = [row.promise for row in ROWS] + list(ELSEWHERE)
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert {promise[0] for promise in promises} == {"1", "2", "3", "4"}


# -- seeds: the table is made for this very run


class _Counted(Chance):
    """Seeds that anybody can foresee."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.count(1)

    def fresh_seed(self) -> int:
        return next(self._numbers)


def _energy_table(evaluator: Evaluator, repo: Path, seeds: range) -> str:
    """C++ that answers by the first input element, for inputs drawn from these seeds."""
    target = find(repo, "energy")
    attempt = hostile("energy")
    facts = evaluator.facts(target)
    builder = evaluator.servers.builder()
    kitchen = Kitchen(attempt, facts, evaluator.device, arch="cpu", builder=builder, cache=None)
    layout = call_layout(kitchen.trace(facts.workloads[0]), frames=1)
    bench, arena = evaluator.oracle.open_bench(target, "default", "", layout.data)
    rows = []
    for seed in seeds:
        evaluator.oracle.fill(bench, 0, TrialCase(seed), 0)
        with mmap.mmap(arena.fd, arena.nbytes, mmap.MAP_SHARED, mmap.PROT_READ) as memory:
            values = struct.unpack_from("<64f", memory, layout.offsets["f0/input/0"])
        rows.append(f"{{{values[0]!r}f, {sum(value * value for value in values)!r}f}}")
    arena.close()
    evaluator.oracle.close_bench(bench)
    return (
        f"static const float known[][2] = {{{', '.join(rows)}}};\n"
        "  for (auto& pair : known) if (pair[0] == x[0]) *y = pair[1];"
    )


@pytest.mark.parametrize("secret", [True, False])
def test_a_table_of_known_inputs_answers_only_where_seeds_are_foreseeable(
    evaluator: Evaluator, repo: Path, monkeypatch: pytest.MonkeyPatch, secret: bool
) -> None:
    candidate = hostile("energy", body=_energy_table(evaluator, repo, range(1, 80)))
    if not secret:
        SWITCHES["moved"](monkeypatch)  # values of no seed
        counted = _Counted()
        for module in (cases, checks, runs, probes, verification):
            monkeypatch.setattr(module, "CHANCE", counted)
    evaluation = evaluator.evaluate(candidate, find(repo, "energy"), timing=False)
    wanted = Status.INCORRECT_NUMERICAL if secret else Status.PASSED
    assert evaluation.status is wanted, evaluation.reason


# -- packages by another name


def test_packages_are_hidden_by_each_of_their_names(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A virtual environment behind a symbolic link is there twice: as it is named, and where it lies."""
    packages = next(path for path in package_paths() if (Path(path) / "torch").is_dir())
    alias = tmp_path / "site-packages"
    alias.symlink_to(packages)
    monkeypatch.setattr(sys, "path", [*sys.path, str(alias)])
    SWITCHES["imports"](monkeypatch)
    code = f"import sys; '{alias}' in sys.path or sys.path.insert(0, '{alias}'); import torch"
    attack = hostile(body=f'if (!python("{code}")) return; HONEST', before=PYTHON)

    def judged() -> Evaluation:
        with Evaluator(
            EvaluatorSettings(cache_dir=tmp_path, hang_limit_s=30.0, lock_dir=tmp_path, times=False)
        ) as opened:
            return opened.evaluate(attack, find(repo, "waves"), timing=False)

    refused = judged()
    assert refused.status is Status.INCORRECT_NUMERICAL, refused.reason
    monkeypatch.setattr(zygote, "package_paths", lambda _: (packages,))
    passed = judged()
    assert passed.status is Status.PASSED, passed.reason


# -- never a pass


@pytest.fixture
def quick(tmp_path: Path, guarded: ForkServers) -> Iterator[Evaluator]:
    """Short limits, so that what hangs ends soon."""
    settings = EvaluatorSettings(cache_dir=tmp_path / "cache", hang_limit_s=2.0, lock_dir=tmp_path, times=False)
    with Evaluator(settings) as opened:
        yield opened


@pytest.mark.timeout(600)  # some three dozen verdicts, a few of which end by a limit
def test_none_of_these_is_ever_a_pass_and_the_next_verdict_is_unharmed(
    quick: Evaluator, repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    SWITCHES["imports"](monkeypatch)  # most of them would not be built
    assert Builder.compile.__kwdefaults__ is not None
    monkeypatch.setitem(Builder.compile.__kwdefaults__, "timeout_s", 6)
    target, failed = find(repo, "waves"), []
    for name, candidate, statuses in REFUSED:
        began = time.monotonic()
        evaluation = quick.evaluate(candidate, target, timing=False)
        took_s = time.monotonic() - began
        if evaluation.status not in statuses or took_s > 60:
            failed.append(f"{name}: {evaluation.status.name} after {took_s:.0f} s: {evaluation.reason}")
    honest = quick.evaluate(hostile(), target, timing=False)
    assert honest.status is Status.PASSED, honest.reason
    assert not failed, "\n".join(failed)


def test_a_plan_whose_buffers_fit_once_but_not_as_often_as_they_are_timed(evaluator: Evaluator, repo: Path) -> None:
    count = evaluator.device.memory_bytes // 20 // 4
    plan = f"""from pytest_cudaforge.plan import empty, launch

def plan(x):
    z = empty(({count},), x.dtype)
    y = z[:x.numel()].view(x.shape)
    launch("kernel", args=(x, y, x.numel()))
    return y
"""
    evaluation = evaluator.evaluate(hostile(plan=plan), find(repo, "waves"), timing=False)
    assert evaluation.status is Status.REJECTED, evaluation.reason
    assert "the plan's buffers take" in evaluation.reason


# -- builds


@pytest.mark.parametrize("limited", [True, False])
def test_many_compilations_have_one_limit_together(
    evaluator: Evaluator, repo: Path, monkeypatch: pytest.MonkeyPatch, limited: bool
) -> None:
    """Each of up to 256 sets of constants has two minutes of its own: hours, where somebody wants them."""
    plan = f"""from pytest_cudaforge.plan import empty, launch

def plan(x):
    y = empty(x.shape, x.dtype)
    for i in range(8):
        launch("kernel", args=(x, y, x.numel()), constants={{"LIMITED_{limited:d}": i}})
    return y
"""
    monkeypatch.setattr(building, "_ALL_BUILDS_S", 0.2 if limited else 600.0)
    evaluation = evaluator.evaluate(hostile(plan=plan), find(repo, "waves"), timing=False)
    assert evaluation.status is (Status.TIMEOUT if limited else Status.PASSED), evaluation.reason
    assert not limited or "compilations took more than 0.2 s together" in evaluation.reason


def test_no_candidate_plants_a_build(
    evaluator: Evaluator, repo: Path, monkeypatch: pytest.MonkeyPatch, servers_with: Servers
) -> None:
    """A kernel writes an honest build under the key of a wrong one; without the defence the wrong one then passes."""
    SWITCHES["imports"](monkeypatch)  # it opens a file
    wrong, good = hostile(body="y[0] = 0; /* planted */"), hostile(body="HONEST /* seed of the plant */")
    target = find(repo, "waves")
    assert evaluator.evaluate(good, target, timing=False).passed
    unit = Unit((), ("kernel",))
    fingerprint = f"cpp {languages.load('cpp').fingerprint('cpu')}"
    keys = [build_key(c.file("kernel.cpp"), unit, fingerprint, "cpu") for c in (good, wrong)]
    stored = evaluator.cache.get(keys[0])
    assert isinstance(stored, languages.Binary)
    planted = Path(evaluator.settings.cache_dir, "planted")
    BuildCache(planted).put(keys[1], stored)
    entry = (planted / keys[1][:2] / keys[1][2:]).read_bytes()
    place = Path(evaluator.settings.cache_dir, "builds") / keys[1][:2] / keys[1][2:]
    place.parent.mkdir(parents=True, exist_ok=True)
    values = ",".join(map(str, entry))
    attack = hostile(
        before=f"static const unsigned char entry[] = {{{values}}};",
        body=f'int fd = open("{place}", O_CREAT | O_WRONLY, 0644);'
        " if (fd >= 0 && write(fd, entry, sizeof entry) > 0) close(fd); HONEST",
    )
    assert evaluator.evaluate(attack, target, timing=False).passed
    assert not place.exists()
    monkeypatch.setattr(evaluator, "servers", servers_with(Defences(files=False)))
    assert evaluator.evaluate(attack, target, timing=False).passed
    planted_verdict = evaluator.evaluate(wrong, target, timing=False)
    rebuilt = evaluator.evaluate(wrong, target, timing=False, fresh=True)
    place.unlink()
    assert planted_verdict.passed
    # The final verdict is built from source, whatever lies in the cache.
    assert rebuilt.status is Status.INCORRECT_NUMERICAL, rebuilt.reason


@pytest.mark.parametrize("cut", [True, False])
def test_a_log_shows_no_line_of_another_file(repo: Path, monkeypatch: pytest.MonkeyPatch, cut: bool) -> None:
    """In this process, where the compiler does see the file: what leaves the builder is cut all the same."""
    secret = repo / "lines.h"
    secret.write_text("this_is_the_expected_output here;\n")
    if not cut:
        monkeypatch.setattr(cpp, "reduce_log", lambda full, own, system: full)
    with pytest.raises(BuildFailure) as caught:
        languages.load("cpp").compile(f'#include "{secret}"\nvoid kernel() {{}}', Unit((), ("kernel",)), "cpu")
    assert ("this_is_the_expected_output" in caught.value.log) is not cut


# -- clock and label


_PATCH = """
static void fake() {
  auto run = (int (*)(const char*))dlsym(RTLD_DEFAULT, "PyRun_SimpleString");
  auto take = (int (*)())dlsym(RTLD_DEFAULT, "PyGILState_Ensure");
  auto give = (void (*)(int))dlsym(RTLD_DEFAULT, "PyGILState_Release");
  if (!run) return;
  int state = take();
  run("import time; time.perf_counter_ns = time.monotonic_ns = lambda: 0; time.perf_counter = lambda: 0.0");
  give(state);
}
extern "C" int clock_gettime(clockid_t, timespec* t) { t->tv_sec = 0; t->tv_nsec = 0; return 0; }
__attribute__((constructor)) static void early() { fake(); }
"""


def test_a_candidate_cannot_patch_the_clock(evaluator: Evaluator, repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stops every clock of its own process; a call of a millisecond still takes a millisecond."""
    SWITCHES["imports"](monkeypatch)  # it finds Python with dlsym
    slow = hostile(body="usleep(1000); HONEST", before=_PATCH)
    evaluation = evaluator.evaluate(slow, find(repo, "waves"))
    assert evaluation.status is Status.PASSED and evaluation.timing is not None, evaluation.reason
    (timed,) = evaluation.timing.workloads
    assert timed.candidate.median_ns > 0.9e6
    assert evaluation.timing.clock == "supervisor"


@pytest.mark.parametrize("allowed", [False, True])
def test_library_work_passes_only_where_it_is_allowed(
    evaluator: Evaluator, repo: Path, monkeypatch: pytest.MonkeyPatch, allowed: bool
) -> None:
    plan = 'from pytest_cudaforge.plan import op\n\ndef plan(x):\n    return op("aten._softmax", x, -1, False)\n'
    candidate = Candidate.of("cpp", {"kernel.cpp": "void unused() {}", "plan.py": plan})
    if allowed:
        settings = dataclasses.replace(evaluator.settings, allow=("rewrite",))
        monkeypatch.setattr(evaluator, "settings", settings)
    evaluation = evaluator.evaluate(candidate, find(repo, "softmax"), timing=False)
    assert evaluation.passed is allowed, evaluation.reason
    assert evaluation.work == "rewrite"


_BESIDE_A_LIBRARY = """
from pytest_cudaforge.plan import empty, launch, op

def plan(x, w):
    v = empty(w.shape, w.dtype)
    launch("scale", args=(w, v, w.numel(), BEFORE))
    z = op("aten.mm", x, USED)
    y = empty(z.shape, z.dtype)
    launch("scale", args=(z, y, z.numel(), AFTER))
    return y
"""
_SCALE = """
extern "C" void scale(const float* x, float* y, long long n, float by) {
  for (long long i = 0; i < n; ++i) y[i] = by * x[i];
}
"""


def test_a_launch_that_adds_nothing_to_a_library_is_none_and_its_twins_are(
    evaluator: Evaluator, repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that prepares what the library takes, or goes on from its answer."""

    def judged(target: str, used: str, before: float, after: float) -> Evaluation:
        plan = _BESIDE_A_LIBRARY.replace("BEFORE", str(before)).replace("AFTER", str(after)).replace("USED", used)
        candidate = Candidate.of("cpp", {"kernel.cpp": _SCALE, "plan.py": plan})
        return evaluator.evaluate(candidate, find(repo, target), timing=False)

    attack = judged("product", "w", 1.0, 1.0)
    assert (attack.status, attack.work) == (Status.REJECTED, "library"), attack.reason
    assert "aten.mm gives the answer by itself" in attack.reason
    for twin in (judged("doubled_product", "w", 1.0, 2.0), judged("doubled_product", "v", 2.0, 1.0)):
        assert (twin.status, twin.work) == (Status.PASSED, "kernel"), twin.reason
    monkeypatch.setattr(PlanWork, "answered_by", lambda *_: None)
    assert judged("product", "w", 1.0, 1.0).status is Status.PASSED


_BESIDE_SEVERAL = """
from pytest_cudaforge.plan import empty, launch, op

def plan(x, w):
    z = op("aten.relu", op("aten.mm", x, w))
    y = empty(z.shape, z.dtype)
    launch("scale", args=(z, y, z.numel(), BY))
    return y
"""


def test_a_launch_that_adds_nothing_to_several_operators_is_none(
    evaluator: Evaluator, repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where general operators may stand beside own kernels; the twin goes on from what they leave."""

    def judged(target: str, by: str) -> Evaluation:
        candidate = Candidate.of("cpp", {"kernel.cpp": _SCALE, "plan.py": _BESIDE_SEVERAL.replace("BY", by)})
        return evaluator.evaluate(candidate, find(repo, target), timing=False)

    attack = judged("bent_product", "1.0")
    assert (attack.status, attack.work) == (Status.REJECTED, "rewrite"), attack.reason
    assert "aten.relu gives the answer by itself" in attack.reason
    twin = judged("bent_twice", "2.0")
    assert (twin.status, twin.work) == (Status.PASSED, "mixed"), twin.reason
    monkeypatch.setattr(PlanWork, "answered_by", lambda *_: None)
    assert judged("bent_product", "1.0").status is Status.PASSED
