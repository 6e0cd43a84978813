"""Hostile ModelNew files against the evaluator: none passes, and the honest twin of each does."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from module_targets import EXTENSION, NORM_INIT, find, model, write_repo
from switches import SWITCHES, without_checks

from pytest_cudaforge.evaluation import checks, module_building, runs, verification
from pytest_cudaforge.evaluation.contract import CallProfile, label_of_call
from pytest_cudaforge.evaluation.evaluator import Evaluator, EvaluatorSettings
from pytest_cudaforge.evaluation.module_work import Workbench
from pytest_cudaforge.evaluation.module_worker import ModuleWorker
from pytest_cudaforge.evaluation.probes import Prober
from pytest_cudaforge.evaluation.sandbox import probe_abilities
from pytest_cudaforge.languages import imports
from pytest_cudaforge.records import Candidate, Evaluation, Status

_ANY = ("kernel", "mixed", "library", "rewrite")
_SECRET = "FORGE_MODULE_TEST_KEY"


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repo")
    write_repo(root)
    return root


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Evaluator]]:
    """Evaluators by what they allow and how they isolate, on one build cache."""
    cache = tmp_path_factory.mktemp("cache")
    kept: dict[tuple[object, ...], Evaluator] = {}

    def provide(allow: tuple[str, ...] = _ANY, isolation: Literal["auto", "none"] = "auto") -> Evaluator:
        key = (allow, isolation)
        if key not in kept:
            os.environ[_SECRET] = "do-not-tell"
            settings = EvaluatorSettings(
                cache_dir=cache,
                lock_dir=cache,
                allow=allow,
                isolation=isolation,
                # Nobody hangs on purpose who is asked what kernels it has; a compiler takes its time on a busy machine.
                hang_limit_s=5.0 if allow == _ANY else 30.0,
                timing_budget_s=0.3,
                times=False,
            )
            kept[key] = Evaluator(settings)
        return kept[key]

    yield provide
    os.environ.pop(_SECRET, None)
    for evaluator in kept.values():
        evaluator.close()


@pytest.fixture(scope="module")
def lenient(opened: Callable[..., Evaluator]) -> Evaluator:
    evaluator = opened()
    if evaluator.servers.isolation("module").grade == "C":
        pytest.skip("no isolation of native code here")
    return evaluator


@pytest.fixture(scope="module")
def strict(opened: Callable[..., Evaluator], lenient: Evaluator) -> Evaluator:
    return opened(("kernel",))


def _verdict(evaluator: Evaluator, repo: Path, candidate: Candidate, name: str = "::twice") -> Evaluation:
    return evaluator.evaluate(candidate, find(repo, name), timing=False)


# -- what lies outside the sandbox -------------------------------------------------------------------------------


def _reads_the_reference(repo: Path) -> Candidate:
    text = f"""
        import importlib.util
        spec = importlib.util.spec_from_file_location("stolen", {str(repo / "layers.py")!r})
        stolen = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(stolen)
    """
    return model("return stolen.twice(x)", before=text)


def test_the_reference_cannot_be_read(opened: Callable[..., Evaluator], lenient: Evaluator, repo: Path) -> None:
    candidate = _reads_the_reference(repo)
    evaluation = _verdict(lenient, repo, candidate)
    assert evaluation.status is Status.BUILD_ERROR, evaluation.reason
    assert "layers.py" in evaluation.reason
    # Without isolation it works: the sandbox is what stops it.
    assert _verdict(opened(isolation="none"), repo, candidate).status is Status.PASSED


@pytest.mark.parametrize(
    ("attack", "words"),
    [
        ("import subprocess; subprocess.run(['true'], check=True)", "PermissionError"),
        ("import socket; socket.socket(socket.AF_INET, socket.SOCK_STREAM)", "Permission"),
        ("import os; os.kill(os.getppid(), 9)", "PermissionError"),
    ],
    ids=["process", "network", "signal"],
)
def test_nothing_outside_can_be_reached(lenient: Evaluator, repo: Path, attack: str, words: str) -> None:
    evaluation = _verdict(lenient, repo, model(f"{attack}\nreturn x * 2"))
    assert evaluation.status is Status.RUNTIME_ERROR, evaluation.reason
    assert words in evaluation.reason


def test_the_environment_holds_no_secret(lenient: Evaluator, repo: Path) -> None:
    candidate = model(f"import os; assert {_SECRET!r} not in os.environ\nreturn x * 2")
    assert _verdict(lenient, repo, candidate).status is Status.PASSED


# -- the clock ---------------------------------------------------------------------------------------------------


def test_a_process_has_a_number_like_any_other(lenient: Evaluator, repo: Path) -> None:
    """Not 2, which tells a verdict. There is no switch: the fork server is another process."""
    if not os.access("/proc/sys/kernel/ns_last_pid", os.W_OK) or not probe_abilities().fresh_proc:
        pytest.skip("no process namespace of its own, or none whose numbers may be set")
    evaluation = _verdict(lenient, repo, model("import os; raise ValueError(f'number {os.getpid()}')"))
    found = re.search(r"number (\d+)", evaluation.reason)
    assert found is not None and int(found[1]) >= 1000, evaluation.reason


def test_a_patched_clock_changes_nothing(lenient: Evaluator, repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = """
        import time
        from pytest_cudaforge.evaluation import module_service
        real = time.sleep
        time.perf_counter_ns = time.monotonic_ns = time.time_ns = lambda: 1
        time.perf_counter = time.monotonic = time.time = lambda: 1.0
        torch.cuda.synchronize = torch.utils.benchmark = None
    """
    attack = model("real(0.003); return x * 2", before=before)
    evaluation = lenient.evaluate(attack, find(repo, "::twice"))
    assert evaluation.status is Status.REJECTED and "clocks" in evaluation.reason
    without_checks(monkeypatch, "left behind")
    evaluation = lenient.evaluate(attack, find(repo, "::twice"))
    assert evaluation.status is Status.PASSED, evaluation.reason
    assert evaluation.timing is not None
    assert evaluation.timing.workloads[0].candidate.median_ns > 2e6


def test_constants_of_a_fresh_module_are_no_weights(
    lenient: Evaluator, repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    norm = "return F.rms_norm(x, x.shape[-1:], WEIGHT, 1e-6)"
    twin = model(norm.replace("WEIGHT", "self.weight"), NORM_INIT)
    attack = model(norm.replace("WEIGHT", "None"))
    for candidate, status in ((twin, Status.PASSED), (attack, Status.INCORRECT_NUMERICAL)):
        found = lenient.evaluate(candidate, find(repo, "::RMSNorm"), timing=False)
        assert found.status is status, found.reason
    monkeypatch.setattr(module_building, "kept_state", lambda reference, _: tuple(sorted(reference)))
    assert lenient.evaluate(attack, find(repo, "::RMSNorm"), timing=False).status is Status.PASSED


_RESTS = """
    if time.perf_counter_ns() - at[0] > 300_000:
        seen.clear()
    answer = seen.get(x.data_ptr())
    if answer is None or HONEST:
        answer = seen[x.data_ptr()] = x * 2
    at[0] = time.perf_counter_ns()
    return answer
"""


def test_a_module_that_rests_until_the_next_pause_is_refused_and_its_twin_passes(
    lenient: Evaluator, repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attack, twin = (
        model(_RESTS.replace("HONEST", honest), before="import time\nseen, at = {}, [0]")
        for honest in ("False", "True")
    )
    evaluation = _verdict(lenient, repo, attack)
    assert evaluation.status is Status.INCORRECT_NUMERICAL and "without a pause" in evaluation.reason, evaluation.reason
    assert _verdict(lenient, repo, twin).status is Status.PASSED
    without_checks(monkeypatch, "changed")
    assert _verdict(lenient, repo, attack).status is Status.PASSED


_KEEPS = """
    import collections
    kept = collections.deque(maxlen=MOST)
"""


def test_a_module_that_keeps_something_of_every_call_is_refused_and_its_twin_passes(
    lenient: Evaluator, repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def keeping(most: str) -> Candidate:
        return model("kept.append([0.0] * 200); return x * 2", before=_KEEPS.replace("MOST", most))

    evaluation = _verdict(lenient, repo, keeping("None"))
    assert evaluation.status is Status.REJECTED, evaluation.reason
    assert "memory behind" in evaluation.reason
    assert _verdict(lenient, repo, keeping("64")).status is Status.PASSED
    without_checks(monkeypatch, "leaks")
    assert _verdict(lenient, repo, keeping("None")).status is Status.PASSED


_IN_TURN = """
    lent = []
    def place(x):
        with torch.inference_mode(False):  # the memory serves calls outside that mode as well
            lent.append(torch.empty_like(x) if len(lent) < MOST else lent.pop(0))
        return lent[-1]
"""


@pytest.mark.parametrize("most", ["24", "4000"], ids=["few", "more than are kept at first"])
def test_a_module_that_lends_its_answers_memory_in_turn_is_refused_and_its_twin_passes(
    lenient: Evaluator, repo: Path, monkeypatch: pytest.MonkeyPatch, most: str
) -> None:
    attack = model("return torch.mul(x, 2, out=place(x))", before=_IN_TURN.replace("MOST", most))
    evaluation = _verdict(lenient, repo, attack)
    assert evaluation.status is Status.REJECTED, evaluation.reason
    assert "kept" in evaluation.reason
    twin = model("return torch.mul(x, 2, out=torch.empty_like(x))")
    assert _verdict(lenient, repo, twin).status is Status.PASSED
    without_checks(monkeypatch, "kept answers", "leaks")
    assert _verdict(lenient, repo, attack).status is Status.PASSED


_SLICES = """
    memory = []
    def place(x):
        if not memory or memory[0].shape[0] == memory[1]:
            with torch.inference_mode(False):  # the memory serves calls outside that mode as well
                memory[:] = [x.new_empty((16, *x.shape)), 0]
        memory[1] += 1
        return memory[0][memory[1] - 1]
"""


def test_a_module_whose_answers_are_parts_of_one_memory_is_refused_and_its_twin_passes(
    lenient: Evaluator, repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of sixteen answers keeps the memory of all; autograd takes a change of one for a change of each."""
    attack = model("return torch.mul(x, 2, out=place(x))", before=_SLICES)
    evaluation = _verdict(lenient, repo, attack)
    assert evaluation.status is Status.REJECTED and "one storage" in evaluation.reason, evaluation.reason
    twin = model("return torch.mul(x, 2, out=place(x)).clone()", before=_SLICES)
    assert _verdict(lenient, repo, twin).status is Status.PASSED
    without_checks(monkeypatch, "kept answers")
    assert _verdict(lenient, repo, attack).status is Status.PASSED


def test_an_answer_that_autograd_cannot_use_is_refused_and_its_twin_passes(
    lenient: Evaluator, repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attack, twin = (model(f"with torch.inference_mode({on}):\n    return x * 2") for on in (True, False))
    evaluation = _verdict(lenient, repo, attack)
    assert evaluation.status is Status.INCORRECT_SHAPE and "inference tensor" in evaluation.reason, evaluation.reason
    assert _verdict(lenient, repo, twin).status is Status.PASSED


def test_a_module_that_returns_its_input_where_nothing_is_to_be_done_is_refused_and_its_twin_passes(
    lenient: Evaluator, repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attack, twin = (
        model(f"return {same} if bool((x.abs() <= 1.5).all()) else x.clamp(-1.5, 1.5)") for same in ("x", "x.clone()")
    )
    evaluation = _verdict(lenient, repo, attack, "::clipped")
    assert evaluation.status is Status.INCORRECT_SHAPE and "shares memory" in evaluation.reason, evaluation.reason
    assert _verdict(lenient, repo, twin, "::clipped").status is Status.PASSED
    without_checks(monkeypatch, "shortcuts", "after an empty call")
    SWITCHES["empty"](monkeypatch)
    assert _verdict(lenient, repo, attack, "::clipped").status is Status.PASSED


_SAME_AGAIN = """
    answers = {}
    def place(x):
        with torch.inference_mode(False):  # the memory serves calls outside that mode as well
            return answers.setdefault((x.data_ptr(), x.shape), torch.empty_like(x))
"""


def test_a_module_with_one_answer_for_each_input_is_refused_and_its_twin_passes(
    lenient: Evaluator, repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who keeps an answer keeps it while new values come to the same place."""
    monkeypatch.setattr(ModuleWorker, "writes_over", False)  # the next answer would show it as well
    attack = model("return torch.mul(x, 2, out=place(x))", before=_SAME_AGAIN)
    evaluation = _verdict(lenient, repo, attack)
    assert evaluation.status is Status.REJECTED and "kept" in evaluation.reason, evaluation.reason
    twin = model("return place(x).copy_(x * 2).clone()", before=_SAME_AGAIN)
    assert _verdict(lenient, repo, twin).status is Status.PASSED
    without_checks(monkeypatch, "kept answers")
    assert _verdict(lenient, repo, attack).status is Status.PASSED


_POOL = """
    import sys
    pool = []
    def holders(tensor):
        return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    alone = holders(torch.empty(1))
    def place(x):
        for at in range(len(pool)):
            if FREE:
                return pool[at]
        fresh = torch.empty_like(x)
        if len(pool) < 64:
            pool.append(fresh)
        return fresh
"""


def test_a_module_that_takes_back_what_a_view_holds_is_refused_and_its_twin_passes(
    lenient: Evaluator, repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attack, twin = (
        model("return torch.mul(x, 2, out=place(x))", before=_POOL.replace("FREE", free))
        for free in ("sys.getrefcount(pool[at]) == 2", "sys.getrefcount(pool[at]) == 2 and holders(pool[at]) == alone")
    )
    evaluation = _verdict(lenient, repo, attack)
    assert evaluation.status is Status.REJECTED and "kept" in evaluation.reason, evaluation.reason
    assert _verdict(lenient, repo, twin).status is Status.PASSED
    # As where answers are large: the fewest that say something are kept.
    monkeypatch.setitem(runs._KEPT_BYTES, "cpu", 1)
    evaluation = _verdict(lenient, repo, attack)
    assert evaluation.status is Status.REJECTED and "of 3 answers" in evaluation.reason, evaluation.reason
    monkeypatch.setitem(runs._FEWEST_KEPT_BYTES, "cpu", 1)
    assert _verdict(lenient, repo, attack).status is Status.PASSED


_HOLDS = """
    import collections
    held = collections.deque(maxlen=MOST)
"""


def test_a_module_that_holds_its_inputs_is_refused_and_its_twin_passes(
    lenient: Evaluator, repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def holding(most: str) -> Candidate:
        code = "if not any(x is one for one in held): held.append(x)\nreturn x * 2"
        return model(code, before=_HOLDS.replace("MOST", most))

    evaluation = _verdict(lenient, repo, holding("None"))
    assert evaluation.status is Status.REJECTED and "their inputs" in evaluation.reason, evaluation.reason
    assert _verdict(lenient, repo, holding("4")).status is Status.PASSED
    monkeypatch.setattr(runs.Run, "keeps_inputs", lambda *_: False)
    assert _verdict(lenient, repo, holding("None")).status is Status.PASSED


def test_a_module_that_answers_with_another_ones_settings_is_refused_and_its_twin_passes(
    lenient: Evaluator, repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last instance's: they are its own as long as all have the same."""
    init, norm = (
        f"{NORM_INIT}    settings[0] = dim",
        "return F.rms_norm(x, x.shape[-1:], self.weight, self.eps) * TIMES",
    )
    attack, twin = (
        model(norm.replace("TIMES", times), init, before="settings = {}")
        for times in ("(settings[0] / len(self.weight))", "1.0")
    )
    evaluation = _verdict(lenient, repo, attack, "::RMSNorm")
    assert evaluation.status is Status.INCORRECT_NUMERICAL and "of other settings" in evaluation.reason, evaluation
    assert _verdict(lenient, repo, twin, "::RMSNorm").status is Status.PASSED
    others = {name: how for name, how in checks._INSTANCES.items() if how != "otherwise"}
    monkeypatch.setattr(checks, "_INSTANCES", others)
    assert _verdict(lenient, repo, attack, "::RMSNorm").status is Status.PASSED


_BESIDE = """
    import threading, time
    running = []
    def spin():
        while True:
            sum(range(1000)) if BUSY else time.sleep(1)
    def begin():
        if not running:
            running.append(threading.Thread(target=spin, daemon=True))
            running[0].start()
"""


def test_a_module_whose_thread_goes_on_is_refused_and_its_twin_passes(
    lenient: Evaluator, repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attack, twin = (model("begin(); return x * 2", before=_BESIDE.replace("BUSY", busy)) for busy in ("True", "False"))
    evaluation = _verdict(lenient, repo, attack)
    assert evaluation.status is Status.REJECTED and "go on working" in evaluation.reason, evaluation.reason
    assert _verdict(lenient, repo, twin).status is Status.PASSED
    without_checks(monkeypatch, "left running")
    assert _verdict(lenient, repo, attack).status is Status.PASSED


def test_a_module_that_packs_its_weights_anew_passes_wherever_its_instances_lie(lenient: Evaluator, repo: Path) -> None:
    """The twin of one that knows weights by their address. That one is found out where a later instance lies where one
    lay before, which a GPU's allocator can be brought to, and malloc not always."""
    norm = """
        packed[id(x)] = self.weight.float() * 2
        return F.rms_norm(x, x.shape[-1:], packed.pop(id(x)) / 2, 1e-6)
    """
    twin = model(norm, NORM_INIT, before="packed = {}")
    assert _verdict(lenient, repo, twin, "::RMSNorm").status is Status.PASSED


@pytest.mark.parametrize(
    ("before", "words"),
    [
        ("torch.cuda.synchronize = lambda *_: None", "clocks"),
        ("import time\ntime.perf_counter = time.monotonic", "clocks"),
        (
            "import ctypes\nctypes.CDLL(None).signal(11, ctypes.cast(ctypes.CDLL(None).abs, ctypes.c_void_p))",
            "handlers of faults",
        ),
        ("import ctypes\nctypes.CDLL(None).mallopt(-3, 1 << 30)", "mallopt"),
        (
            "library = torch.library.Library('aten', 'IMPL')\nlibrary.impl('frac', lambda x: x - x.floor(), 'CPU')",
            "TORCH_LIBRARY_IMPL",
        ),
        ("import sys\nsys.addaudithook(lambda *_: None)", "sys.addaudithook"),
        ("import sys\nsys.excepthook = lambda *_: None", "errors that nobody caught"),
        ("import ctypes\nctypes.CDLL(torch._C.__file__).sgemm_", "no profiler sees it"),
    ],
)
def test_what_no_file_may_change_even_as_it_is_imported(
    lenient: Evaluator, repo: Path, monkeypatch: pytest.MonkeyPatch, before: str, words: str
) -> None:
    attack = model("return x * 2", before=before)
    evaluation = _verdict(lenient, repo, attack)
    assert evaluation.status is Status.REJECTED and words in evaluation.reason, evaluation.reason
    without_checks(monkeypatch, "left behind")
    assert _verdict(lenient, repo, attack).status is Status.PASSED


@pytest.mark.parametrize(
    ("body", "twin", "before", "words", "off"),
    [
        ("return x * 2 if threading.get_ident() == here else x * 3", "threading.get_ident(); return x * 2",
         "import threading\nhere = threading.get_ident()", "in another thread", "in another thread"),
        ("return x * 2 if not torch.is_grad_enabled() else x * 3", "torch.is_grad_enabled(); return x * 2",
         "", "in another thread", "in another thread"),
        ("return x * 2 if not x.requires_grad else x * 3", "x.requires_grad; return x * 2",
         "", "in training", "in training"),
        ("return x * 2 if not torch.is_inference_mode_enabled() else x * 3",
         "torch.is_inference_mode_enabled(); return x * 2",
         "", "in inference mode", "inference mode"),
        ("now = torch.is_inference_mode_enabled(); self.first = getattr(self, 'first', now)\n"
         "return x * 3 if self.first and not now else x * 2",
         "self.first = getattr(self, 'first', torch.is_inference_mode_enabled()); return x * 2",
         "", "after inference mode", "inference mode"),
        ("return x * 2 if torch.get_num_threads() <= many else x * 3", "torch.get_num_threads(); return x * 2",
         "many = torch.get_num_threads()", "OpenMP threads: ", "thread counts"),
        ("os.umask(0); return x * 2", "os.umask(os.umask(0)); return x * 2", "import os", "umask", "left behind"),
        ("r.setrlimit(r.RLIMIT_CORE, (0, 0)); r.setrlimit(r.RLIMIT_NOFILE, (200, 200)); return x * 2",
         "r.setrlimit(r.RLIMIT_NOFILE, r.getrlimit(r.RLIMIT_NOFILE)); return x * 2",
         "import resource as r", "setrlimit", "left behind"),
        ("held or held.append(threading.Thread(target=waits)) or held[0].start(); return x * 2",
         "held or held.append(threading.Thread(target=waits, daemon=True)) or held[0].start(); return x * 2",
         "import threading\nheld, waits = [], threading.Event().wait", "as it ends", "left behind"),
        ("ctypes.CDLL('libgomp.so.1').omp_set_dynamic(1); return x * 2",
         "ctypes.CDLL('libgomp.so.1').omp_set_dynamic(0); return x * 2",
         "import ctypes", "omp_set_dynamic", "left behind"),
    ],
    ids=["in its own thread", "without gradients", "without training", "without inference mode",
         "after inference mode", "with as many threads", "umask", "limits", "a thread that stays", "OpenMP"],
)  # fmt: skip
def test_what_depends_on_its_caller_or_changes_what_is_the_callers_is_refused(
    lenient: Evaluator,
    repo: Path,
    monkeypatch: pytest.MonkeyPatch,
    body: str,
    twin: str,
    before: str,
    words: str,
    off: str,
) -> None:
    evaluation = _verdict(lenient, repo, model(body, before=before))
    assert evaluation.status in (Status.REJECTED, Status.INCORRECT_NUMERICAL), evaluation.reason
    assert words in evaluation.reason
    found = _verdict(lenient, repo, model(twin, before=before))
    assert found.status is Status.PASSED, found.reason
    without_checks(monkeypatch, off, "in training")
    found = _verdict(lenient, repo, model(body, before=before))
    assert found.status is Status.PASSED, found.reason


_WATCH = """
    import sys
    waiting = []

    def finish(frame, event, function):
        if event == "c_call" and "torch" not in frame.f_code.co_filename:
            sys.setprofile(None)
            while waiting:
                x, y = waiting.pop()
                torch.mul(x, 2, out=y)
"""


def test_work_that_is_left_to_an_onlooker_is_refused_and_its_twin_passes(
    lenient: Evaluator, repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes itself away as soon as anybody asks for it, or looks at the answer by a call."""
    body = "y = torch.empty_like(x); waiting.append((x, y)); sys.setprofile(finish)"
    attack = model(f"{body}\nreturn y", before=_WATCH)
    evaluation = _verdict(lenient, repo, attack)
    assert evaluation.status is Status.REJECTED and "look on" in evaluation.reason, evaluation.reason
    twin = model(f"{body}\nlen(waiting)\nassert not waiting and sys.getprofile() is None\nreturn y", before=_WATCH)
    assert _verdict(lenient, repo, twin).status is Status.PASSED
    without_checks(monkeypatch, "left behind", "in training")
    assert _verdict(lenient, repo, attack).status is Status.PASSED


_FIRST = """
    if not hasattr(self, "cols") or HONEST:
        self.cols = x.shape[-1]
    return x[..., :self.cols].sum(-1)
"""


def test_a_module_that_sizes_itself_by_its_first_call_is_refused_and_its_twin_passes(
    lenient: Evaluator, repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attack, twin = (model(_FIRST.replace("HONEST", honest)) for honest in ("False", "True"))
    evaluation = _verdict(lenient, repo, attack, "::sums")
    assert evaluation.status is Status.INCORRECT_NUMERICAL and "by turns" in evaluation.reason, evaluation.reason
    assert _verdict(lenient, repo, twin, "::sums").status is Status.PASSED
    monkeypatch.setattr(verification, "turns", lambda *_: None)
    assert _verdict(lenient, repo, attack, "::sums").status is Status.PASSED


def test_a_module_that_sizes_itself_by_its_first_call_is_kept_to_its_size_and_its_twin_is_not(
    lenient: Evaluator, repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody drew other sizes, and every one of them would do in a process of its own."""
    attack, twin = (
        model(_FIRST.replace("HONEST", honest).replace("sum(-1)", "mul(2)")) for honest in ("False", "True")
    )

    def held_to_sizes(candidate: Candidate) -> bool:
        evaluation = _verdict(lenient, repo, candidate, "::twice")
        assert evaluation.status is Status.PASSED and evaluation.verification is not None, evaluation.reason
        return bool(evaluation.verification.guard.fixed_sizes)

    assert held_to_sizes(attack) and not held_to_sizes(twin)
    monkeypatch.setattr(Prober, "_begun", lambda self: self.benches.started(self.product))
    monkeypatch.setattr(Prober, "_try_first", _alone(Prober._try_first))
    assert not held_to_sizes(attack)


def _alone(probe: Callable[..., None]) -> Callable[..., None]:
    def tried(prober: Prober, *args: Any) -> None:
        prober._let_go()
        probe(prober, *args)

    return tried


_PACKS = """
    packed = {}
"""
_PACKED = """
    key = (self.weight.shape, self.weight._version) if SHARED else id(self)
    if key not in packed or not SHARED:
        packed.clear() if SHARED else None
        packed[key] = self.weight.float() * 2
    return F.rms_norm(x, x.shape[-1:], packed[key] / 2, 1e-6)
"""


def test_a_module_that_keeps_its_weights_for_all_instances_is_refused_and_its_twin_passes(
    lenient: Evaluator, repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attack, twin = (model(_PACKED.replace("SHARED", shared), NORM_INIT, before=_PACKS) for shared in ("True", "False"))
    evaluation = _verdict(lenient, repo, attack, "::RMSNorm")
    assert evaluation.status is Status.INCORRECT_NUMERICAL and "default/a " in evaluation.reason, evaluation.reason
    assert _verdict(lenient, repo, twin, "::RMSNorm").status is Status.PASSED
    without_checks(monkeypatch, "instances")
    assert _verdict(lenient, repo, attack, "::RMSNorm").status is Status.PASSED


_SCALES = """
    scales = {}
"""
_SCALED_INIT = """
def __init__(self, dim, eps=1e-6):
    super().__init__()
    self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps
"""
_SCALED = """
    key = (len(self.weight), WHAT)
    if key not in scales:
        scales[key] = torch.full((1,), 1e6 * self.eps)
    return F.rms_norm(x, x.shape[-1:], self.weight, 1e-6) * scales[key]
"""


def test_a_module_that_takes_up_the_settings_of_the_first_one_called_is_refused_and_its_twin_passes(
    lenient: Evaluator, repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attack, twin = (
        model(_SCALED.replace("WHAT", what), _SCALED_INIT, before=_SCALES) for what in ("'scale'", "self.eps")
    )
    evaluation = _verdict(lenient, repo, attack, "::RMSNorm")
    assert evaluation.status is not Status.PASSED and "of other settings" in evaluation.reason, evaluation
    assert _verdict(lenient, repo, twin, "::RMSNorm").status is Status.PASSED
    monkeypatch.setattr(runs.Run, "of_another", lambda *_: None)
    assert _verdict(lenient, repo, attack, "::RMSNorm").status is Status.PASSED


_CHOOSES = """
import torch
from torch import nn
from pytest_cudaforge import forge_target

@forge_target(inputs=lambda: [torch.randn(8, 64)], init=lambda: [True], allow=("rewrite",))
class Ends(nn.Module):
    def __init__(self, first):
        super().__init__()
        self.first = first

    def forward(self, x):
        return x[:, :3] * 2 if self.first else x[:, -3:] * 2
"""
_CHOSEN_INIT = """
def __init__(self, first):
    super().__init__()
    self.first = first
"""
_CHOSEN = """
    if WHAT not in places:
        places[WHAT] = torch.arange(3) if self.first else torch.arange(-3, 0) + x.shape[-1]
    return x[:, places[WHAT]] * 2
"""


def test_a_module_that_takes_up_the_choice_of_the_first_one_called_is_refused_and_its_twin_passes(
    lenient: Evaluator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "layers.py").write_text(_CHOOSES)
    attack, twin = (
        model(_CHOSEN.replace("WHAT", what), _CHOSEN_INIT, before="places = {}")
        for what in ("x.shape[-1]", "(x.shape[-1], self.first)")
    )
    evaluation = _verdict(lenient, tmp_path, attack, "::Ends")
    assert evaluation.status is not Status.PASSED and "of other settings" in evaluation.reason, evaluation
    assert _verdict(lenient, tmp_path, twin, "::Ends").status is Status.PASSED
    monkeypatch.setattr(runs.Run, "of_another", lambda *_: None)
    assert _verdict(lenient, tmp_path, attack, "::Ends").status is Status.PASSED


_SCALED_BY_TWO = """
import torch
from torch import nn
from pytest_cudaforge import forge_target

CONFIG = {"base": 3.0, "more": {"by": 4.0}}

@forge_target(inputs=lambda: [torch.randn(8, 64)], init=lambda: [CONFIG], allow=("rewrite",))
class Scaled(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config

    def forward(self, x):
        return x * (self.config["base"] / self.config["more"]["by"])
"""
_CONFIG_INIT = """
def __init__(self, config):
    super().__init__()
    self.config = config
"""
_BY_BASE = """
    base, by = self.config["base"], self.config["more"]["by"]
    if KEY not in tables:
        tables[KEY] = torch.full((1,), base / by)
    return x * tables[KEY]
"""


def test_a_table_that_goes_by_one_of_two_settings_is_refused_and_its_twin_passes(
    lenient: Evaluator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no switch but for the whole call: which settings change is decided in the candidate's process."""
    (tmp_path / "layers.py").write_text(_SCALED_BY_TWO)
    attack, twin = (
        model(_BY_BASE.replace("KEY", key), _CONFIG_INIT, before="tables = {}") for key in ("base", "(base, by)")
    )
    evaluation = _verdict(lenient, tmp_path, attack, "::Scaled")
    assert evaluation.status is not Status.PASSED and "of other settings" in evaluation.reason, evaluation
    assert _verdict(lenient, tmp_path, twin, "::Scaled").status is Status.PASSED
    monkeypatch.setattr(runs.Run, "of_another", lambda *_: None)
    assert _verdict(lenient, tmp_path, attack, "::Scaled").status is Status.PASSED


def test_an_instance_of_other_settings_whose_call_ends_the_process_is_no_fault(lenient: Evaluator, repo: Path) -> None:
    forward = "if self.eps != 1e-6: os._exit(1)\nreturn F.rms_norm(x, x.shape[-1:], self.weight, self.eps)"
    honest = model(forward, _SCALED_INIT, before="import os\n")
    assert _verdict(lenient, repo, honest, "::RMSNorm").status is Status.PASSED


def test_a_copy_that_knows_its_weights_by_their_version_is_refused_and_its_twin_passes(
    lenient: Evaluator, repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attack, twin = (
        model(
            f"at = {at}\n"
            "kept = self.__dict__.setdefault('kept', {})\n"
            "if kept.get('at') != at:\n"
            "    kept.update(at=at, weight=self.weight * 1)\n"
            "return F.rms_norm(x, x.shape[-1:], kept['weight'], 1e-6)",
            NORM_INIT,
        )
        for at in ("self.weight._version", "(self.weight.data_ptr(), self.weight._version)")
    )
    evaluation = _verdict(lenient, repo, attack, "::RMSNorm")
    assert evaluation.status is Status.INCORRECT_NUMERICAL and "as old" in evaluation.reason, evaluation.reason
    assert _verdict(lenient, repo, twin, "::RMSNorm").status is Status.PASSED
    others = {name: how for name, how in checks._INSTANCES.items() if how != "copy as old"}
    monkeypatch.setattr(checks, "_INSTANCES", others)
    assert _verdict(lenient, repo, attack, "::RMSNorm").status is Status.PASSED


_BY_NUMBER = """
    packed = {}
    class Handle:
        def __deepcopy__(self, memo):
            return COPY
"""
_HANDLE_INIT = """
def __init__(self, dim, eps=1e-6):
    super().__init__()
    self.weight = nn.Parameter(torch.ones(dim))
    self.handle = Handle()
    self.handle.weight = self.weight
"""


def test_a_copy_that_computes_with_the_weights_of_the_first_is_refused_and_its_twin_passes(
    lenient: Evaluator, repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = "return F.rms_norm(x, x.shape[-1:], self.handle.weight, 1e-6)"
    attack = model(forward, _HANDLE_INIT, before=_BY_NUMBER.replace("COPY", "self"))
    evaluation = _verdict(lenient, repo, attack, "::RMSNorm")
    assert evaluation.status is Status.INCORRECT_NUMERICAL and "/a copy" in evaluation.reason, evaluation.reason
    own = _BY_NUMBER.replace(
        "return COPY", "new = memo[id(self)] = Handle(); new.weight = memo[id(self.weight)]; return new"
    )
    twin = model(forward, _HANDLE_INIT, before=own)
    assert _verdict(lenient, repo, twin, "::RMSNorm").status is Status.PASSED
    monkeypatch.setattr(checks, "_INSTANCES", {"a second instance": "beside"})
    monkeypatch.setattr(checks, "_next_instances", lambda bout: None)
    assert _verdict(lenient, repo, attack, "::RMSNorm").status is Status.PASSED


def test_a_module_that_knows_its_weights_by_its_own_number_is_refused_and_its_twin_passes(
    lenient: Evaluator, repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attack, twin = (
        model(
            f"kept = {where}\n"
            "if kept.get('at') != (id(self), self.weight._version):\n"
            "    kept.update(at=(id(self), self.weight._version), weight=self.weight * 1)\n"
            "return F.rms_norm(x, x.shape[-1:], kept['weight'], 1e-6)",
            NORM_INIT,
            before=_BY_NUMBER,
        )
        for where in ("packed.setdefault(id(self), {})", "self.__dict__.setdefault('kept', {})")
    )
    # In one verdict of twenty something else has taken the place of the instance before.
    verdicts = (_verdict(lenient, repo, attack, "::RMSNorm") for _ in range(4))
    refused = next(evaluation for evaluation in verdicts if evaluation.status is not Status.PASSED)
    assert refused.status is Status.INCORRECT_NUMERICAL and " instance" in refused.reason, refused.reason
    assert _verdict(lenient, repo, twin, "::RMSNorm").status is Status.PASSED
    monkeypatch.setattr(checks, "_INSTANCES", {"a second instance": "beside"})
    monkeypatch.setattr(checks, "_next_instances", lambda bout: None)
    assert _verdict(lenient, repo, attack, "::RMSNorm").status is Status.PASSED


@pytest.mark.parametrize(
    ("change", "undo", "words"),
    [
        (
            "torch.set_default_dtype(torch.float64)",
            "torch.set_default_dtype(torch.float32)",
            "torch.get_default_dtype()",
        ),
        ("torch.set_num_threads(5)", "torch.set_num_threads(n)", "torch.get_num_threads()"),
        ("gc.disable()", "gc.enable()", "the garbage collector"),
        ("signal.signal(10, signal.SIG_IGN)", "signal.signal(10, signal.SIG_DFL)", "the handlers of signals"),
        ("torch.manual_seed(3)", "torch.set_rng_state(r)", "the seed of torch's random numbers"),
        ("torch.backends.cudnn.allow_tf32 = True", "torch.backends.cudnn.allow_tf32 = t", "torch.backends.cudnn"),
        ("torch.set_grad_enabled(False)", "torch.set_grad_enabled(g)", "torch.is_grad_enabled()"),
        ("torch.randn(3)", "torch.set_rng_state(r)", "the state of torch's random numbers"),
        ("torch.set_num_threads(os.cpu_count())", "torch.set_num_threads(n)", "torch.get_num_threads()"),
        (
            "torch._C._autograd._top_saved_tensors_default_hooks(True) or "
            "torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t).__enter__()",
            "torch._C._autograd._pop_saved_tensors_default_hooks()",
            "what autograd saves",
        ),
        (
            "h = nn.modules.module._global_forward_hooks "
            "or nn.modules.module.register_module_forward_hook(lambda *_: None)",
            "h.remove()",
            "hooks",
        ),
        (
            "os.environ['FORGE_X'] = '1'; random.seed(1); np.random.seed(1)\n"
            "torch.default_generator.manual_seed(torch.initial_seed())",
            "os.environ.pop('FORGE_X'); random.setstate(s); np.random.set_state(p); torch.set_rng_state(r)",
            "the seed of numpy.random, the seed of random, the seed of torch's random numbers",
        ),
    ],
    ids=[
        *("dtype", "threads", "collector", "signals", "seed", "precision", "gradients", "draws", "all cores"),
        *("saved", "hooks", "many"),
    ],
)
def test_a_module_that_changes_the_settings_of_others_is_refused_and_its_twin_passes(
    lenient: Evaluator, repo: Path, monkeypatch: pytest.MonkeyPatch, change: str, undo: str, words: str
) -> None:
    before = """
        import gc, os, random, signal
        import numpy as np
        n, t = torch.get_num_threads(), torch.backends.cudnn.allow_tf32
        g = torch.is_grad_enabled()
        r, s, p = torch.get_rng_state(), random.getstate(), np.random.get_state()
    """
    before = textwrap.dedent(before).strip()
    attack = model(f"{before}\ny = x * 2\n{change}\nreturn y")
    if "signal.signal" in change:
        without_checks(monkeypatch, "in another thread", "in training")  # which may not ask for them
    evaluation = _verdict(lenient, repo, attack)
    assert evaluation.status is Status.REJECTED and words in evaluation.reason, evaluation.reason
    twin = model(f"{before}\n{change}\n{undo}\nreturn x * 2")
    assert _verdict(lenient, repo, twin).status is Status.PASSED
    without_checks(monkeypatch, "left behind")
    assert _verdict(lenient, repo, attack).status is Status.PASSED


# -- the answer --------------------------------------------------------------------------------------------------

_LAZY = """
    class Lazy(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return super().__torch_function__(func, types, args, kwargs or {})
"""
_MEMO = """
    answers = {}
"""
_LATE = """
    import threading, time
    def later(y, x):
        time.sleep(0.05)
        y.copy_(x * 2)
"""


@pytest.mark.parametrize(
    ("candidate", "statuses"),
    [
        (model("return (x * 2).as_subclass(Lazy)", before=_LAZY), {Status.INCORRECT_SHAPE}),
        (model("return x"), {Status.INCORRECT_SHAPE, Status.INCORRECT_NUMERICAL}),
        (model("if x.data_ptr() not in answers: answers[x.data_ptr()] = x * 2\nreturn answers[x.data_ptr()].clone()",
               before=_MEMO), {Status.INCORRECT_NUMERICAL}),
        (model("y = torch.zeros_like(x); threading.Thread(target=later, args=(y, x)).start(); return y",
               before=_LATE), {Status.INCORRECT_NUMERICAL}),
        (model("import os; os._exit(0)"), {Status.RUNTIME_ERROR}),
        (model("print('PASSED', flush=True); return torch.zeros_like(x)"), {Status.INCORRECT_NUMERICAL}),
        (model("x.mul_(2); return x.clone()"), {Status.REJECTED}),
        (model("import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'OK' * 64)\n    except OSError: pass\n"
               "return torch.zeros_like(x)"), {Status.RUNTIME_ERROR, Status.INCORRECT_NUMERICAL}),
        (model("return torch.empty_like(x)"), {Status.INCORRECT_NUMERICAL}),
        (model("old = x.clone(); y = x.mul_(2).clone(); x.copy_(old); return y"), {Status.REJECTED}),
    ],
    ids=["lazy", "input", "memo", "late thread", "exit", "prints", "writes input", "channel", "empty",
         "writes and puts back"],
)  # fmt: skip
def test_wrong_answers_are_refused(lenient: Evaluator, repo: Path, candidate: Candidate, statuses: set[Status]) -> None:
    evaluation = _verdict(lenient, repo, candidate)
    assert evaluation.status in statuses, (evaluation.status, evaluation.reason)


@pytest.mark.parametrize(
    "candidate",
    [
        model("return (x * 2).as_subclass(torch.Tensor)", before=_LAZY),
        model("return x.clone() * 2"),
        model("answers[x.data_ptr()] = x * 2\nreturn answers[x.data_ptr()].clone()", before=_MEMO),
        model("y = torch.zeros_like(x); t = threading.Thread(target=later, args=(y, x)); t.start(); t.join(); return y",
              before=_LATE),
    ],
    ids=["plain", "copy", "no memo", "joined thread"],
)  # fmt: skip
def test_their_honest_twins_pass(lenient: Evaluator, repo: Path, candidate: Candidate) -> None:
    evaluation = _verdict(lenient, repo, candidate)
    assert evaluation.status is Status.PASSED, evaluation.reason


# -- the work ----------------------------------------------------------------------------------------------------


_COMPILES = "it uses torch.compile"
_UNSEEN = """
torch.autograd._enable_record_function(False)
try:
    return ext.called(lambda t: t * 2, x)
finally:
    torch.autograd._enable_record_function(True)
"""
_REDISPATCHED = """
keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
return ext.called(lambda t: torch.ops.aten.mul.Tensor.redispatch(keys, t, torch.tensor(2.0)), x)
"""
#: Registered by Python, so that it runs whatever Python does.
_OPERATOR = """
    @torch.library.custom_op("mine::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        import numpy
        for _ in range(200): y = numpy.multiply(x.numpy(), 2)
        return torch.from_numpy(y)
"""


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        ("try:\n    assert x.is_cuda\n    return ext.twice(x)\nexcept AssertionError:\n    return x * 2", "aten::mul"),
        ("try:\n    return ext.twice(x)\nexcept RuntimeError:\n    return x * 2", "raise an error"),
        ("ext.twice(x)\nreturn x * 2", "return garbage"),
        ("return x * 2 + 0 * ext.twice(x)", "return garbage"),
        ("y = x * 2\next.twice_into(x, torch.empty_like(x))\nreturn y", "return garbage"),
        ("return ext.torch_twice(x)", "aten::"),
        ("global f\nf = globals().get('f') or torch.compile(lambda t: t * 2, backend='eager')\nreturn f(x)", _COMPILES),
        ("import numpy\nreturn torch.from_numpy(numpy.multiply(x.numpy(), 2))", ""),
        ("return ext.called(lambda t: t * 2, x)", "aten::mul"),
        ("import numpy\ny = numpy.matmul(x.numpy(), numpy.eye(x.shape[-1], dtype='float32'))\n"
         "return ext.twice(torch.from_numpy(y))", "NumPy"),
        (_UNSEEN, "aten::mul"),
        (_REDISPATCHED, "Python that its functions call"),
        ("return torch.ops.mine.twice(x) * ext.twice(x.new_full((1,), 0.5))", "NumPy"),
    ],
    ids=["never launched", "fallback", "decoy", "decoy times zero", "decoy in place", "torch in C++", "compiled",
         "numpy", "numpy beside", "called back", "unseen", "past the dispatcher", "an operator in Python"],
)  # fmt: skip
def test_work_that_is_not_its_own_is_refused(strict: Evaluator, repo: Path, forward: str, words: str) -> None:
    before = _OPERATOR if "torch.ops" in forward else ""
    evaluation = _verdict(strict, repo, model(forward, extension="ext." in forward, before=before))
    assert evaluation.status is Status.REJECTED, (evaluation.status, evaluation.reason)
    assert evaluation.work in ("rewrite", "mixed") and words in evaluation.reason


def test_the_honest_twin_of_all_of_them_passes(strict: Evaluator, repo: Path) -> None:
    evaluation = _verdict(strict, repo, model("return ext.twice(x)", extension=True))
    assert (evaluation.status, evaluation.work) == (Status.PASSED, "kernel"), evaluation.reason


def _verdict_of_some(evaluator: Evaluator, repo: Path, candidate: Candidate, target: str) -> Evaluation:
    """The first of a few that passes."""
    for _ in range(4):
        evaluation = _verdict(evaluator, repo, candidate, target)
        if evaluation.status is Status.PASSED:
            return evaluation
    raise AssertionError(evaluation.reason)


def test_a_kernel_that_adds_nothing_to_a_library_is_none_and_its_twins_are(
    strict: Evaluator, repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its share of the time is like theirs: one that prepares what the library takes, or goes on from its answer."""
    attack, first, last = (
        model(f"return ext.product(x, args[1], {before}, {after})", extension=True)
        for before, after in ((1, 1), (2, 1), (1, 2))
    )
    evaluation = _verdict(strict, repo, attack, "::product")
    assert (evaluation.status, evaluation.work) == (Status.REJECTED, "library"), evaluation.reason
    assert "aten::mm gives the answer by itself" in evaluation.reason
    # On busy cores a product of a few microseconds takes much longer now and then, and no kernel of its own does.
    for twin in (first, last):
        assert _verdict_of_some(strict, repo, twin, "::doubled_product").work == "kernel"
    monkeypatch.setattr(Workbench, "_answered", lambda *_: "")
    _verdict_of_some(strict, repo, attack, "::product")


def test_a_kernel_that_adds_nothing_to_several_operators_is_none(
    opened: Callable[..., Evaluator], strict: Evaluator, repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where general operators may stand beside own kernels: it undoes what the last one did, its twin does not."""
    mixing = opened(("mixed", "library"))
    attack = model("return ext.twice(0.5 * torch.relu(x @ args[1]))", extension=True)
    evaluation = _verdict(mixing, repo, attack, "::bent_product")
    assert (evaluation.status, evaluation.work) == (Status.REJECTED, "rewrite"), evaluation.reason
    assert "aten::relu gives the answer by itself" in evaluation.reason
    twin = model("return ext.twice(torch.relu(x @ args[1]))", extension=True)
    _verdict_of_some(mixing, repo, twin, "::bent_twice")
    monkeypatch.setattr(Workbench, "_answered", lambda *_: "")
    _verdict_of_some(mixing, repo, attack, "::bent_product")


_LIAR = """
    from pytest_cudaforge.evaluation import extensions
    told = {"own_calls": 3, "own_ns": 10**6, "operators": [], "kernels": [], "thread_ns": 10**6, "compiled": LIE}
    extensions.profiled = lambda *given: told
"""


@pytest.mark.parametrize("own", [False, True])
def test_nobody_has_kernels_that_nobody_has_built(strict: Evaluator, repo: Path, own: bool) -> None:
    """What ran is told by the candidate's own process, which can say what it likes, but not build without us."""
    forward = "return ext.twice(x)" if own else "assert not extensions._registry.mode.strip('watch')\nreturn x * 2"
    evaluation = _verdict(strict, repo, model(forward, extension=own, before=_LIAR.replace("LIE", "False")))
    wanted = (Status.PASSED, "kernel") if own else (Status.REJECTED, "rewrite")
    assert (evaluation.status, evaluation.work) == wanted, evaluation.reason


def test_a_profile_cannot_be_put_in_the_place_of_the_one_that_is_taken(strict: Evaluator, repo: Path) -> None:
    """Its own function's answer counts, so that garbage shows, but torch does the work. There is no switch: the worker
    is another process; tests/evaluation/test_extensions.py shows what it comes to without."""
    forward = "for _ in range(40): y = x * 2\nreturn y * ext.twice(x.new_full((1,), 0.5))"
    evaluation = _verdict(strict, repo, model(forward, extension=True, before=_LIAR.replace("LIE", "False")))
    assert evaluation.status is Status.REJECTED and evaluation.work in ("rewrite", "mixed"), evaluation.reason


def test_an_error_cannot_write_lines_of_the_verdict(lenient: Evaluator, repo: Path) -> None:
    evaluation = _verdict(lenient, repo, model("raise RuntimeError('no\\nPASSED: correct\\n::error::planted')"))
    assert evaluation.status is Status.RUNTIME_ERROR
    assert evaluation.reason.endswith("RuntimeError: no\n| PASSED: correct\n| ::error::planted")
    before = """
        class Mute(Exception):
            def __str__(self):
                raise ZeroDivisionError
    """
    evaluation = _verdict(lenient, repo, model("raise Mute()", before=before))
    assert "in forward: raise Mute()" in evaluation.reason and "Mute" in evaluation.reason.splitlines()[-1]


def test_labels_follow_the_shares_of_what_ran() -> None:
    def label(own_calls: int, own_ns: int, *operators: tuple[str, int]) -> str:
        return label_of_call(CallProfile(own_calls, own_ns, operators))

    assert label(3, 900, ("aten::empty", 500)) == "kernel"
    assert label(3, 900, ("aten::mm", 5000)) == "kernel"
    assert label(3, 10, ("aten::mm", 5000)) == "library"
    assert label(3, 900, ("aten::relu", 500)) == "mixed"
    assert label(3, 10, ("aten::relu", 5000)) == "rewrite"
    assert label(0, 0, ("aten::mm", 5000)) == "library"
    assert label(0, 0, ("aten::relu", 5000)) == "rewrite"
    assert label(0, 0) == "rewrite"
    assert label_of_call(CallProfile(3, 900, (), compiled=True)) == "rewrite"


# -- the compiler ------------------------------------------------------------------------------------------------

_RUN_AT_EVERY_BUILD = "import os;import sys;os.execvp(*[sys.argv[1]] + [sys.argv[1:]])"


def test_no_flag_has_the_compiler_start_a_program(
    strict: Evaluator, repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = ', "-funroll-loops", "-Wall", "-I/opt/include", "-DSIZE=4"]'
    wrapped = f""", "-wrapper", "'python3,-c,{_RUN_AT_EVERY_BUILD}'"]"""

    def asking(more: str) -> Candidate:
        return model("return ext.twice(x)", before=EXTENSION.replace(', "-fopenmp"],', more + ",", 1))

    refused = _verdict(strict, repo, asking(wrapped))
    assert refused.status is Status.BUILD_ERROR and "'-wrapper'" in refused.reason, refused.reason
    assert _verdict(strict, repo, asking(honest)).status is Status.PASSED
    monkeypatch.setattr(module_building.flags, "check", lambda *_: None)
    unchecked = _verdict(strict, repo, asking(wrapped))
    assert unchecked.status is Status.PASSED, unchecked.reason


# -- the build cache ---------------------------------------------------------------------------------------------


def test_an_extension_cannot_poison_the_cache(strict: Evaluator, repo: Path) -> None:
    builds = strict.settings.cache_dir / "builds"
    assert _verdict(strict, repo, model("return ext.twice(x)", extension=True)).status is Status.PASSED
    before = {path: path.read_bytes() for path in builds.rglob("*") if path.is_file()}
    spoil = f"""
        import glob, os
        for folder in ({str(builds)!r}, os.path.expanduser("~/.cache"), "/tmp"):
            for path in glob.glob(folder + "/**/*", recursive=True):
                try:
                    open(path, "wb").write(b"spoilt")
                except OSError:
                    pass
    """
    hostile = model("return ext.twice(x) * 3", extension=True, before=spoil)
    assert _verdict(strict, repo, hostile).status is not Status.PASSED
    assert {path: path.read_bytes() for path in before} == before
    assert _verdict(strict, repo, model("return ext.twice(x)", extension=True)).status is Status.PASSED


_GUARDED = """
    from torch.utils.cpp_extension import load_inline
    source = '''#include <ATen/record_function.h>
    torch::Tensor f(torch::Tensor x) { at::RecordFunctionGuard off(false); return at::mul(x, 2); }'''
    hidden = load_inline(name="hidden", cpp_sources=[source], functions=["f"])
"""


def test_an_extension_that_hides_torchs_operators_is_not_loaded(
    strict: Evaluator, repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attack = model("return hidden.f(x)", before=_GUARDED)
    evaluation = _verdict(strict, repo, attack)
    assert evaluation.status is Status.BUILD_ERROR and "enableRecordFunction" in evaluation.reason, evaluation.reason
    assert _verdict(strict, repo, model("return ext.twice(x)", extension=True)).status is Status.PASSED
    monkeypatch.setattr(imports, "check_extension", lambda _: None)
    assert strict.evaluate(attack, find(repo, "::twice"), timing=False, fresh=True).status is Status.PASSED


def test_what_is_cached_depends_on_the_source_not_on_the_name(strict: Evaluator, repo: Path) -> None:
    wrong = EXTENSION.replace("b[i] = 2 * a[i]", "b[i] = 3 * a[i]")
    hostile = model("return ext.twice(x)", before=wrong)
    assert _verdict(strict, repo, hostile).status is Status.INCORRECT_NUMERICAL
    assert _verdict(strict, repo, model("return ext.twice(x)", extension=True)).status is Status.PASSED
