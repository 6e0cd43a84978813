"""Many targets at once: overlap, budgets in all, -x, Ctrl-C once and twice, publishing, the plan before it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from flow_evaluator import CORRECTION, OPTIMIZATION, TableEvaluator, reply
from flow_records import make_target

from pytest_cudaforge import config as configs
from pytest_cudaforge.chat import ChatReply, ChatRequest
from pytest_cudaforge.chat.scripted import ScriptedModel
from pytest_cudaforge.config import ForgeConfig
from pytest_cudaforge.errors import ConfigError, DeviceError, PublishError, TargetError
from pytest_cudaforge.events import ForgeEvent
from pytest_cudaforge.records import DeviceFacts, Isolation, Usage
from pytest_cudaforge.runtime.manifest import Manifest
from pytest_cudaforge.session import Models, SessionOptions, SessionResult, config_digest, forge_all, languages_for

SCRIPT = {
    "coder": [reply("BUILD_ERROR"), reply("PASSED 1.5"), reply("PASSED 2.5")],
    "judge": [CORRECTION, OPTIMIZATION],
}
NAMES = ("one", "two", "three")


def settings(root: Path, **changes: object) -> ForgeConfig:
    return replace(configs.load({"rounds": 3}, root=root), **changes)  # type: ignore[arg-type]


def forged(
    root: Path,
    evaluator: TableEvaluator | None = None,
    options: SessionOptions | None = None,
    model: ScriptedModel | None = None,
    **changes: object,
) -> SessionResult:
    targets = [make_target(root, name) for name in NAMES]
    model = model or ScriptedModel(SCRIPT)
    config = settings(root, **changes)
    return forge_all(targets, config, evaluator or TableEvaluator(), options=options, models=Models(model, model))


class Slow(ScriptedModel):
    async def complete(self, request: ChatRequest) -> ChatReply:
        await asyncio.sleep(0.1)
        return await super().complete(request)


def test_all_targets_are_forged_and_published(tmp_path: Path) -> None:
    result = forged(tmp_path)
    assert [(trace.target, trace.outcome) for trace in result.traces] == [
        (f"layers.py::{name}", "forged") for name in NAMES
    ]
    manifest = Manifest.load(tmp_path / "forged" / "manifest.json")
    assert len(manifest.entries) == 3
    assert result.traces[0].files[0] == f"forged/{make_target(tmp_path, 'one').slug}/cpu/kernel.cpp"
    assert result.totals.correct == 1.0
    assert result.totals.geomean_eager == pytest.approx(2.5)
    assert result.spent_usd == pytest.approx(3 * 5 * 0.01)


def test_calls_and_evaluations_of_targets_overlap(tmp_path: Path) -> None:
    evaluator, start = TableEvaluator(seconds=0.1), time.monotonic()
    forged(tmp_path, evaluator, model=Slow(SCRIPT), concurrency=3)
    # One after the other: 3 targets x (5 calls + 4 evaluations) x 0.1 s.
    assert time.monotonic() - start < 2.7
    assert evaluator.most_busy == 3


def test_concurrency_is_a_limit(tmp_path: Path) -> None:
    evaluator = TableEvaluator(seconds=0.02)
    forged(tmp_path, evaluator, concurrency=1)
    assert evaluator.most_busy == 1


def test_one_bad_target_leaves_the_others_alone(tmp_path: Path) -> None:
    result = forged(tmp_path, TableEvaluator(problems={"layers.py::two": TargetError("inputs raise")}))
    assert [trace.outcome for trace in result.traces] == ["forged", "error", "forged"]
    assert result.totals.tried == 2


def test_x_cancels_what_has_not_begun(tmp_path: Path) -> None:
    evaluator = TableEvaluator(problems={"layers.py::one": TargetError("inputs raise")})
    result = forged(tmp_path, evaluator, SessionOptions(stop_after_failure=True), concurrency=1)
    assert [trace.outcome for trace in result.traces] == ["error", "cancelled", "cancelled"]
    assert not result.interrupted


def test_the_cap_in_all_stops_every_target(tmp_path: Path) -> None:
    class Priced(Slow):
        pass

    config = replace(settings(tmp_path), max_usd=0.0)
    config = replace(config, chat=replace(config.chat, coder=replace(config.chat.coder, model="gpt-5")))
    model = Priced(SCRIPT)
    result = forge_all([make_target(tmp_path)], config, TableEvaluator(), models=Models(model, model))
    assert (result.traces[0].outcome, model.requests) == ("failed", [])
    assert "max_usd: 0.0000 of 0 USD are spent or reserved" in result.traces[0].reason


def test_unknown_prices_are_said_so(tmp_path: Path) -> None:
    result = forged(tmp_path, model=ScriptedModel(SCRIPT, usage=Usage(10, 10)), max_usd=1.0)
    assert result.notes == (
        "the price of 15 call(s) is not known: only tokens are counted; max_usd could not be kept for them",
    )
    assert result.totals.usage.usd is None


def test_winners_go_onto_a_branch(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", "-b", "main"], cwd=tmp_path, check=True)
    result = forged(tmp_path, options=SessionOptions(branch="kernels"))
    assert result.commit is not None
    log = subprocess.run(["git", "log", "--format=%s", "kernels"], cwd=tmp_path, check=True, capture_output=True)
    assert log.stdout.decode() == "perf: forge one, three, two\n"


def test_a_forge_dir_that_cannot_be_written_is_that_targets_error(tmp_path: Path) -> None:
    (tmp_path / "forged").write_text("")
    result = forged(tmp_path)
    assert {trace.outcome for trace in result.traces} == {"error"}
    assert "published by the next run" in result.traces[0].notes[-1]


def test_a_branch_that_cannot_be_written_is_said_before_the_first_call(tmp_path: Path) -> None:
    model = ScriptedModel(SCRIPT)
    with pytest.raises(PublishError, match="git init"):
        forged(tmp_path, options=SessionOptions(branch="kernels"), model=model)
    assert model.requests == []


def test_a_lost_device_stops_every_target(tmp_path: Path) -> None:
    evaluator = TableEvaluator(problems={"layers.py::one": DeviceError("cuda:0 is unhealthy")})
    result = forged(tmp_path, evaluator, concurrency=1)
    assert [(trace.outcome, trace.reason) for trace in result.traces][1:] == [("cancelled", "cuda:0 is unhealthy")] * 2


def test_a_verdict_without_isolation_is_shown_but_not_published(tmp_path: Path) -> None:
    result = forged(tmp_path, TableEvaluator(isolation=Isolation("F", (), "allow user namespaces")))
    assert result.traces[0].outcome == "forged"
    assert result.traces[0].notes[-1] == "a verdict of isolation grade F is not published; allow user namespaces"
    assert not (tmp_path / "forged").exists()


def test_two_runs_at_once_share_the_work(tmp_path: Path) -> None:
    """The second waits for the first one's target and finds everything paid."""
    models = [Slow(SCRIPT), Slow(SCRIPT)]
    results: list[SessionResult] = []
    threads = [threading.Thread(target=lambda m=model: results.append(forged(tmp_path, model=m))) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(trace.outcome for result in results for trace in result.traces) == ["forged"] * 6
    assert len(models[0].requests) + len(models[1].requests) == 3 * 5
    assert len(Manifest.load(tmp_path / "forged" / "manifest.json").entries) == 3


def test_the_device_decides_the_language(tmp_path: Path) -> None:
    cpu, gpu = DeviceFacts("cpu", "c", "cpu"), DeviceFacts("cuda", "H200", "sm_90")
    config = settings(tmp_path)
    assert languages_for(config, cpu) == ("cpp",)
    assert languages_for(config, gpu) == ("cuda",)
    both = replace(config, languages=("cuda", "triton", "cpp"))
    assert languages_for(both, gpu) == ("cuda", "triton") and languages_for(both, cpu) == ("cpp",)
    with pytest.raises(ConfigError, match="triton cannot run on c"):
        languages_for(replace(config, languages=("triton",)), cpu)
    with pytest.raises(ConfigError, match="cuda cannot run on c"):
        languages_for(replace(config, languages=("cuda",)), cpu)


def test_where_files_lie_does_not_change_the_digest(tmp_path: Path) -> None:
    config = settings(tmp_path)
    assert config_digest(config) == config_digest(replace(config, run_dir=tmp_path / "x", max_usd=3.0))
    assert config_digest(config) != config_digest(replace(config, rounds=7))


# -- Ctrl-C ------------------------------------------------------------------------------------------------------------

PROGRAM = """
import asyncio, json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from flow_evaluator import *; from flow_records import make_target
from pytest_cudaforge import config; from pytest_cudaforge.chat.scripted import ScriptedModel
from pytest_cudaforge.session import *; from pytest_cudaforge.session import Models

class Slow(ScriptedModel):
    async def complete(self, request):
        if request.key.round == 3:
            print("third", flush=True)
            await asyncio.sleep(float(sys.argv[3]))
        return await super().complete(request)

root = Path(sys.argv[1])
model = Slow({"coder": [reply("PASSED 1.5"), reply("PASSED 2.5"), reply("PASSED 3.0"), reply("PASSED 9.0")],
              "judge": OPTIMIZATIONS})
try:
    result = forge_all([make_target(root)], config.load({}, root=root), TableEvaluator(), models=Models(model, model))
    print(json.dumps([result.interrupted, result.traces[0].outcome, result.traces[0].winner]))
except KeyboardInterrupt:
    print("aborted", len(RunStore(root / ".cudaforge").target(make_target(root), "cpp").rounds()))
"""


def interrupted(root: Path, times: int, seconds: float) -> str:
    program = PROGRAM.replace(
        "import asyncio, json", "from pytest_cudaforge.store import RunStore\nimport asyncio, json"
    )
    command = [sys.executable, "-c", program, str(root), str(Path(__file__).parents[1]), str(seconds)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "third\n"
        for number in range(times):
            # Two signals at once are one: on a busy machine the first has to be seen before the second comes.
            time.sleep(1.0 if number else 0.0)
            os.kill(child.pid, signal.SIGINT)
        return child.communicate(timeout=20)[0].splitlines()[-1]
    finally:
        child.kill()
        child.wait()


def test_ctrl_c_once_stops_with_the_best_so_far(tmp_path: Path) -> None:
    assert json.loads(interrupted(tmp_path, 1, 0.6)) == [True, "forged", 2]
    assert (tmp_path / ".cudaforge/runs" / make_target(tmp_path).slug / "cpp/round-03/judge-reply.md").exists()


def test_ctrl_c_twice_aborts_and_keeps_what_was_finished(tmp_path: Path) -> None:
    start = time.monotonic()
    assert interrupted(tmp_path, 2, 30.0) == "aborted 2"
    assert time.monotonic() - start < 25


def test_outside_the_main_thread_signals_are_left_alone(tmp_path: Path) -> None:
    results: list[SessionResult] = []
    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=lambda: results.append(forged(tmp_path)))
    thread.start()
    thread.join()
    assert len(results[0].traces) == 3
    assert signal.getsignal(signal.SIGINT) is before


def test_an_observer_sees_the_session_go_by(tmp_path: Path) -> None:
    seen: list[ForgeEvent] = []

    class Watch:
        def on_event(self, event: ForgeEvent) -> None:
            seen.append(event)

    model = ScriptedModel(SCRIPT)
    forge_all([make_target(tmp_path)], settings(tmp_path), TableEvaluator(), Watch(), models=Models(model, model))
    kinds = [event.kind for event in seen]
    assert kinds[:2] == ["evaluating", "headroom"]
    assert kinds[-1] == "done"
    assert [event.round for event in seen if event.kind == "finished"] == [1, 2, 3]
    assert (seen[-1].status, seen[-1].best) == ("forged", 2.5)
    assert seen[-1].usd == pytest.approx(0.05)
