"""The order of the stages, and what becomes of a target that goes wrong on the way."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from flow_bench import CODER, JUDGE, MEND, OTHERS, SPEED, Bench, Watch, kinds
from flow_evaluator import OPTIMIZATIONS, TableEvaluator, reply
from flow_records import make_target

from pytest_cudaforge.budget import Caps, Ledger
from pytest_cudaforge.chat import ChatReply, ChatRequest
from pytest_cudaforge.chat.record import Recorder, read_conversations
from pytest_cudaforge.chat.replay import ReplayModel
from pytest_cudaforge.chat.scripted import ScriptedModel
from pytest_cudaforge.errors import ProviderError, ReplyPending, TargetError
from pytest_cudaforge.events import ForgeEvent
from pytest_cudaforge.exchange import StopSignal
from pytest_cudaforge.loop import ForgeContext, forge
from pytest_cudaforge.records import DeviceFacts, Status
from pytest_cudaforge.store import RunStore
from pytest_cudaforge.strategies import Limits
from pytest_cudaforge.strategies.refine import Refine

GPU = DeviceFacts("cuda", "test gpu", "sm_90")


def test_a_good_run_from_first_candidate_to_winner(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    trace = bench.forge()
    assert kinds(trace) == [
        ("first", None, "BUILD_ERROR"),
        ("correction", 1, "PASSED"),
        ("optimization", 2, "PASSED"),
        ("optimization", 2, "PASSED"),
    ]
    assert (trace.outcome, trace.winner) == ("forged", 4)
    assert trace.final is not None
    assert bench.evaluator.evaluations["fresh"] == 1
    assert trace.usage.usd == pytest.approx(0.07)
    assert bench.asked == [
        ("coder", 1, 1),
        ("judge", 1, 2), ("coder", 2, 2),
        ("judge", 2, 3), ("coder", 3, 3),
        ("judge", 3, 4), ("coder", 4, 4),
    ]  # fmt: skip


def test_everything_is_on_disk_to_be_read(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.forge()
    folder = bench.store.directory / "round-02"
    assert {path.name for path in folder.iterdir()} == {
        "proposal.json", "judge-prompt.md", "judge-reply.md", "feedback.json", "prompt.md", "reply.md", "kernel.cpp",
        "plan.py", "evaluation.json", "round.json", "profile.json",
    }  # fmt: skip
    assert json.loads((bench.store.directory / "trace.json").read_text())["outcome"] == "forged"
    assert "class Scale" in (folder / "prompt.md").read_text()


def test_a_finished_run_is_not_paid_twice(tmp_path: Path) -> None:
    Bench(tmp_path).forge()
    again = Bench(tmp_path)
    trace = again.forge()
    assert again.asked == []
    assert (trace.outcome, trace.winner, len(trace.rounds)) == ("forged", 4, 4)
    assert again.evaluator.evaluations == {"fresh": 1}, "the winner is measured here and now"
    assert "resumed after round 4" in "".join(again.watch.texts("note"))


def test_more_rounds_go_on_where_it_stopped(tmp_path: Path) -> None:
    Bench(tmp_path).forge()
    longer = Bench(tmp_path, coder=[*CODER, reply("PASSED 3.0")], judge=[*JUDGE, OTHERS[1]], limits=Limits(rounds=5))
    assert longer.forge().winner == 5
    assert longer.asked == [("judge", 4, 5), ("coder", 5, 5)]


@pytest.mark.parametrize("role", ["coder", "judge"])
@pytest.mark.parametrize("ordinal", [1, 2, 3])
def test_a_run_that_broke_off_resumes_at_the_very_call(tmp_path: Path, role: str, ordinal: int) -> None:
    script = {"coder": list(CODER), "judge": list(JUDGE)}
    script[role][ordinal - 1] = ProviderError("the line is dead")  # type: ignore[call-overload]
    broken = Bench(tmp_path, **script)  # type: ignore[arg-type]
    trace = broken.forge()
    assert (trace.outcome, trace.reason) == ("error", "the line is dead")
    resumed = Bench(tmp_path)
    final = resumed.forge()
    assert (final.outcome, final.winner) == ("forged", 4)
    whole = Bench(tmp_path / "whole")
    whole.forge()
    assert broken.asked[:-1] + resumed.asked == whole.asked
    assert final.usage.usd == pytest.approx(0.07)


def test_a_pending_reply_leaves_the_target_pending(tmp_path: Path) -> None:
    first = Bench(tmp_path, judge=[ReplyPending("no reply yet")])
    trace = first.forge()
    assert (trace.outcome, trace.reason, len(trace.rounds)) == ("pending", "no reply yet", 1)
    assert trace.usage.usd == pytest.approx(0.01)
    assert Bench(tmp_path).forge().outcome == "forged"


def test_an_unreadable_reply_gets_one_repair(tmp_path: Path) -> None:
    bench = Bench(tmp_path, coder=["no code, sorry", reply("PASSED 2.0")], limits=Limits(rounds=1))
    trace = bench.forge()
    assert (trace.outcome, len(trace.rounds)) == ("forged", 1)
    assert bench.asked == [("coder", 1, 1), ("coder", 2, 1)]
    assert "no fenced code block" in bench.model.requests[1].messages[-1].content
    assert (bench.store.directory / "round-01" / "repair-reply.md").exists()


def test_two_unreadable_replies_are_a_failed_round(tmp_path: Path) -> None:
    bench = Bench(tmp_path, coder=["no", "no again", reply("PASSED 2.0")], limits=Limits(rounds=2))
    trace = bench.forge()
    assert "the coder's repaired reply: the reply has no fenced code block" in trace.rounds[0].failure
    assert (trace.outcome, trace.winner) == ("forged", 2)


def test_an_unreadable_judge_is_repaired_too(tmp_path: Path) -> None:
    bench = Bench(tmp_path, judge=["hm", MEND, "hm", "hm", SPEED], limits=Limits(rounds=4))
    trace = bench.forge()
    assert [entry.failure for entry in trace.rounds] == ["", "", trace.rounds[2].failure, ""]
    assert "the judge's repaired reply" in trace.rounds[2].failure
    assert trace.rounds[2].candidate is None


def test_a_candidate_seen_before_is_not_evaluated_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path, coder=[reply("PASSED 2.0"), reply("PASSED 2.0")], judge=[SPEED], limits=Limits(rounds=2))
    trace = bench.forge()
    assert trace.rounds[1].duplicate_of == 1
    first, second = (entry.evaluation for entry in trace.rounds)
    assert first is not None and second == replace(first, profile=None), "the original has the profile"
    assert sorted(bench.evaluator.evaluations.values()) == [1, 1]


def test_no_headroom_is_skipped_before_the_first_call(tmp_path: Path) -> None:
    bench = Bench(tmp_path, evaluator=TableEvaluator(device=GPU, roofline_ns=950.0))
    trace = bench.forge()
    assert trace.outcome == "skipped"
    assert "within 1.05x of the roofline" in trace.reason
    assert bench.asked == []
    assert bench.watch.texts("headroom") == ["headroom over the faster baseline: 1.05x to the roofline"]


def test_on_a_cpu_the_roofline_informs_and_never_skips_or_stops(tmp_path: Path) -> None:
    bench = Bench(tmp_path, evaluator=TableEvaluator(roofline_ns=999.0))
    assert bench.forge().outcome == "forged"
    assert "1.00x to the roofline" in bench.watch.texts("headroom")[0]


def test_a_target_that_a_trivial_kernel_could_pass_is_not_forged(tmp_path: Path) -> None:
    bench = Bench(tmp_path, evaluator=TableEvaluator(faults=("default: zeros would pass",)))
    trace = bench.forge()
    assert (trace.outcome, bench.asked) == ("skipped", [])
    assert "zeros would pass" in trace.reason


def test_rivals_within_the_noise_are_measured_again_and_the_better_one_wins(tmp_path: Path) -> None:
    coder = [reply("PASSED 2.5"), reply("PASSED 1.2"), reply("PASSED 2.4")]
    evaluator = TableEvaluator(fresh={"PASSED 2.5": "PASSED 2.0", "PASSED 2.4": "PASSED 2.3"})
    bench = Bench(tmp_path, coder=coder, judge=OPTIMIZATIONS, evaluator=evaluator, limits=Limits(rounds=3))
    trace = bench.forge()
    assert (trace.outcome, trace.winner) == ("forged", 3)
    assert evaluator.evaluations["fresh"] == 2


def test_each_candidate_is_timed_beside_the_best_so_far(tmp_path: Path) -> None:
    coder = [reply("PASSED 2.0"), reply("PASSED 2.5"), reply("PASSED 1.9")]
    evaluator = TableEvaluator(races={"PASSED 2.0": 0.83, "PASSED 2.5": 0.9, "PASSED 1.9": 1.2})
    trace = Bench(tmp_path, coder=coder, judge=OPTIMIZATIONS, evaluator=evaluator, limits=Limits(rounds=3)).forge()
    first, second, third = (entry.candidate for entry in trace.rounds)
    assert [entry.incumbent for entry in trace.rounds] == [None, 1, 1]
    # Three rounds; then the finalists: the best by its sitting first, its rivals beside the leader.
    assert evaluator.incumbents[:3] == [None, first, first]
    assert evaluator.incumbents[3] is None and set(evaluator.incumbents[4:]) <= {first, second, third}
    assert (trace.outcome, trace.winner) == ("forged", 3)


def test_who_lost_to_the_best_in_one_sitting_is_not_measured_again(tmp_path: Path) -> None:
    coder = [reply("PASSED 2.0"), reply("PASSED 1.95"), reply("PASSED 2.1")]
    evaluator = TableEvaluator(races={"PASSED 1.95": 0.9, "PASSED 2.1": 1.2})
    trace = Bench(tmp_path, coder=coder, judge=OPTIMIZATIONS, evaluator=evaluator, limits=Limits(rounds=3)).forge()
    assert (trace.outcome, trace.winner) == ("forged", 3)
    # Round 1 was the incumbent that round 3 beat; round 2 never met round 3.
    assert evaluator.evaluations["fresh"] == 2


def test_a_recording_for_other_hardware_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "talk.jsonl"
    Bench(tmp_path).forge(recorder=Recorder(path))
    replay = ReplayModel(read_conversations(path))
    trace = Bench(tmp_path / "elsewhere").forge(coder=replay, judge=replay, language="cuda")
    assert (trace.outcome, trace.reason) == ("skipped", "its conversation is recorded for cpp only, not for cuda")


def test_a_language_the_target_excludes_is_skipped(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    trace = bench.forge(language="cuda")
    assert (trace.outcome, trace.reason) == ("skipped", "the target is forged in cpp only, not in cuda")


def test_the_budget_stops_it_with_the_best_so_far(tmp_path: Path) -> None:
    bench = Bench(tmp_path, caps=Caps(max_usd_per_target=0.035))
    trace = bench.forge(price=lambda role, tokens: 0.01)
    assert (trace.outcome, trace.winner, len(trace.rounds)) == ("forged", 2, 2)
    assert "max_usd_per_target: 0.0300 of 0.035 USD" in trace.reason
    richer = Bench(tmp_path, caps=Caps(max_usd_per_target=0.5))
    assert richer.forge(price=lambda role, tokens: 0.01).winner == 4


def test_money_an_earlier_run_spent_counts(tmp_path: Path) -> None:
    Bench(tmp_path, judge=[ReplyPending("later")]).forge()
    bench = Bench(tmp_path, caps=Caps(max_usd_per_target=0.015))
    trace = bench.forge(price=lambda role, tokens: 0.01)
    assert (trace.outcome, bench.asked) == ("failed", [])


@pytest.mark.parametrize("verdict", ["INCORRECT_NUMERICAL", "PASSED 1.0"])
def test_a_winner_must_win_again(tmp_path: Path, verdict: str) -> None:
    evaluator = TableEvaluator(fresh={"PASSED 2.5": verdict})
    trace = Bench(tmp_path, evaluator=evaluator).forge()
    assert (trace.outcome, trace.winner) == ("forged", 2)
    assert evaluator.evaluations["fresh"] == 2
    failed = "round 4 passed once and failed its re-evaluation" in "".join(trace.notes)
    assert failed == (verdict == "INCORRECT_NUMERICAL")


@pytest.mark.parametrize(
    ("fresh", "min_speedup", "outcome", "reason"),
    [
        (
            dict.fromkeys(["PASSED 2.5", "PASSED 1.5", "PASSED 1.2"], "PASSED 1.0"),
            1.0,
            "kept_reference",
            "round 4, correct, re-measured 1.00x (same)",
        ),
        ({}, 3.0, "kept_reference", "less than min_speedup 3"),
        ({"PASSED 2.5": "TIMEOUT", "PASSED 1.5": "TIMEOUT", "PASSED 1.2": "TIMEOUT"}, 1.0, "failed", "re-evaluation"),
    ],
)
def test_nothing_better_keeps_the_reference(
    tmp_path: Path, fresh: dict[str, str], min_speedup: float, outcome: str, reason: str
) -> None:
    trace = Bench(tmp_path, evaluator=TableEvaluator(fresh=fresh, min_speedup=min_speedup)).forge()
    assert (trace.outcome, trace.winner) == (outcome, None)
    assert reason in trace.reason


def test_slower_candidates_keep_the_reference_without_another_look(tmp_path: Path) -> None:
    bench = Bench(tmp_path, coder=[reply("PASSED 0.5")], judge=[], limits=Limits(rounds=1))
    assert bench.forge().outcome == "kept_reference"
    assert bench.evaluator.evaluations["fresh"] == 0


def test_nothing_correct_is_a_failure(tmp_path: Path) -> None:
    bench = Bench(tmp_path, coder=[reply("TIMEOUT")], limits=Limits(rounds=1))
    trace = bench.forge()
    assert (trace.outcome, trace.reason) == ("failed", "no correct candidate; all 1 rounds are played")
    assert trace.rounds[0].evaluation is not None
    assert trace.rounds[0].evaluation.status is Status.TIMEOUT


def test_a_target_that_cannot_be_forged_says_why(tmp_path: Path) -> None:
    problem = TargetError("inputs raise: NameError", remedy="mend the inputs")
    trace = Bench(tmp_path, evaluator=TableEvaluator(problems={"layers.py::scale": problem})).forge()
    assert (trace.outcome, trace.reason) == ("error", str(problem))


def test_a_stop_ends_before_the_next_step_with_the_best(tmp_path: Path) -> None:
    stop = StopSignal()

    class StopsAfterTheSecondRound(Watch):
        def on_event(self, event: ForgeEvent) -> None:
            if event.kind == "finished" and event.round == 2:
                stop.request("stopped by Ctrl-C")

    bench = Bench(tmp_path, watch=StopsAfterTheSecondRound())
    trace = bench.forge(stop=stop)
    assert (trace.outcome, trace.winner, len(trace.rounds)) == ("forged", 2, 2)
    assert "stopped by Ctrl-C" in trace.reason


def test_a_target_in_use_is_waited_for_and_named(tmp_path: Path) -> None:
    holder = RunStore(tmp_path / ".cudaforge").target(make_target(tmp_path), "cpp")
    assert holder.acquire() is None
    bench = Bench(tmp_path)
    trace = bench.forge(lock_wait_s=0.0)
    assert trace.outcome == "error"
    assert "is being forged by another run: process" in trace.reason
    stopped = Bench(tmp_path).forge(stop=StopSignal("stopped by Ctrl-C"))
    assert (stopped.outcome, stopped.reason) == ("cancelled", "stopped by Ctrl-C")
    holder.release()
    assert Bench(tmp_path).forge().outcome == "forged"


def test_fresh_starts_anew(tmp_path: Path) -> None:
    Bench(tmp_path).forge()
    fresh = Bench(tmp_path)
    trace = fresh.forge(fresh=True)
    assert len(fresh.asked) == 7
    assert "--forge-fresh was given" in trace.notes[0]


def test_a_recording_is_whole_after_a_resume_and_replays_with_its_parents(tmp_path: Path) -> None:
    path = tmp_path / "talk.jsonl"
    Bench(tmp_path, judge=[MEND, ReplyPending("later")]).forge()
    Bench(tmp_path).forge(recorder=Recorder(path))
    conversation = read_conversations(path)[0]
    assert len(conversation.replies) == 7
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    replay = ReplayModel(read_conversations(path))
    # Elsewhere there is no headroom, and a roofline in reach: neither cuts a recording short.
    bench = Bench(elsewhere, evaluator=TableEvaluator(device=GPU, roofline_ns=999.0), limits=Limits(rounds=10))
    trace = bench.forge(coder=replay, judge=replay)
    assert [entry.parent for entry in trace.rounds] == [None, 1, 2, 2]
    assert [entry.recorded_status for entry in trace.rounds][1:] == [
        entry.status + f" {entry.speedup:.2f}x" for entry in conversation.verdicts if entry.speedup
    ]
    assert (trace.outcome, trace.usage.usd) == ("forged", 0.0)
    assert "the recorded conversation ends after round 4" in trace.reason
    assert "played all the same" in "".join(trace.notes)


def test_a_model_that_answers_slowly_does_not_block_another_target(tmp_path: Path) -> None:
    class Slow(ScriptedModel):
        async def complete(self, request: ChatRequest) -> ChatReply:
            await asyncio.sleep(0.2)
            return await super().complete(request)

    async def both() -> None:
        slow = Slow({"coder": CODER, "judge": JUDGE})
        loop = asyncio.get_running_loop()
        start = loop.time()
        with ThreadPoolExecutor(2) as executor:
            await asyncio.gather(*(one(slow, executor, name) for name in ("a", "b")))
        assert loop.time() - start < 2 * 7 * 0.2

    async def one(model: ScriptedModel, executor: ThreadPoolExecutor, name: str) -> None:
        target = make_target(tmp_path, name)
        store = RunStore(tmp_path / ".cudaforge").target(target, "cpp")
        context = ForgeContext(
            "cpp", TableEvaluator(), model, model, Refine(), Limits(rounds=4), store, Ledger(Caps()), Watch(), executor
        )
        assert (await forge(target, context)).outcome == "forged"

    asyncio.run(both())
