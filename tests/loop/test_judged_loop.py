"""What the Judge is shown, when its reply goes back, and when the loop plans anew."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from flow_bench import MEND, OTHERS, SPEED, Bench
from flow_evaluator import OPTIMIZATIONS, TableEvaluator, optimization, reply
from flow_records import make_target

from pytest_cudaforge.chat.record import Recorder, read_conversations
from pytest_cudaforge.chat.replay import ReplayModel
from pytest_cudaforge.errors import DeviceError, OracleError
from pytest_cudaforge.records import Candidate, Depth, Profile, Target, Trace
from pytest_cudaforge.store import RunStore
from pytest_cudaforge.strategies import Limits

#: fast, slower, faster, slower twice
CODER = [reply(f"PASSED {speed}") for speed in ("2.0", "1.5", "3.0", "1.0", "0.9", "0.8")]


def bench(root: Path, rounds: int = 3, **changes: object) -> Bench:
    given = {"coder": CODER, "judge": OPTIMIZATIONS, "limits": Limits(rounds=rounds), **changes}
    return Bench(root, **given)  # type: ignore[arg-type]


def prompts(made: Bench, role: str = "judge") -> list[str]:
    return [request.messages[-1].content for request in made.model.requests if request.role == role]


def profiles(trace: Trace) -> list[str | None]:
    found = [entry.evaluation.profile if entry.evaluation else None for entry in trace.rounds]
    return [profile.depth if profile else None for profile in found]


# -- profiles --------------------------------------------------------------------------------------------------------


def test_the_profile_is_that_of_the_candidate_shown(tmp_path: Path) -> None:
    made = bench(tmp_path, 4)
    trace = made.forge()
    assert [entry.parent for entry in trace.rounds] == [None, 1, 1, 3]
    # Round 1 was profiled once for two rounds, round 3 once for the next and once in full as the winner.
    assert made.evaluator.profiles == [("PASSED 2.0", "quick"), ("PASSED 3.0", "quick"), ("PASSED 3.0", "full")]
    assert profiles(trace) == ["quick", None, "full", None]
    for entry in trace.rounds:
        if entry.evaluation and entry.evaluation.profile and entry.candidate:
            assert entry.evaluation.profile.candidate == entry.candidate.digest
    for shown in prompts(made):
        assert "quick profile of workload default, of this very candidate" in shown
        assert "ipc 1.5 inst/cycle" in shown
    assert made.watch.texts("profiling") == ["round 1, quick", "round 3, quick", "round 3, full"]


def test_the_winner_has_a_full_profile(tmp_path: Path) -> None:
    trace = bench(tmp_path).forge()
    assert trace.final is not None and trace.final.profile is not None and trace.rounds[2].evaluation is not None
    assert trace.final.profile == trace.rounds[2].evaluation.profile
    assert trace.final.profile.depth == "full"
    stored = RunStore(tmp_path / ".cudaforge").target(make_target(tmp_path), "cpp")
    assert stored.round(3).profile() == trace.final.profile


def test_a_profile_is_never_measured_again(tmp_path: Path) -> None:
    whole = bench(tmp_path).forge()
    again = bench(tmp_path)
    trace = again.forge()
    assert again.evaluator.profiles == []
    assert profiles(trace) == profiles(whole) == ["quick", None, "full"]
    assert trace.final is not None and whole.final is not None
    assert trace.final.profile == whole.final.profile


def test_the_profilers_own_file_is_kept_beside_the_round(tmp_path: Path) -> None:
    report = tmp_path / "somewhere" / "report.ncu-rep"
    report.parent.mkdir()
    report.write_bytes(b"\x00ncu")
    trace = bench(tmp_path, evaluator=TableEvaluator(report=str(report))).forge()
    report.unlink()
    kept = bench(tmp_path).store.directory / "round-01" / "profile.ncu-rep"
    assert kept.read_bytes() == b"\x00ncu"
    assert json.loads((kept.parent / "profile.json").read_text())["report"] == "profile.ncu-rep"
    assert json.loads((kept.parent / "round.json").read_text())["evaluation"]["profile"] is None, "one home"
    for entry in (trace.rounds[0], bench(tmp_path).store.rounds()[0]):
        assert entry.evaluation is not None and entry.evaluation.profile is not None
        assert entry.evaluation.profile.report == str(kept)
    kept.unlink()
    lost = bench(tmp_path).store.round(1).profile()
    assert lost is not None and lost.report == ""


@pytest.mark.parametrize(
    ("live", "policy", "taken"),
    [
        (True, "auto", True),
        (True, "always", True),
        (True, "never", False),
        (False, "auto", False),
        (False, "always", True),
        (False, "never", False),
    ],
)
def test_profiles_are_taken_for_a_live_judge_or_where_asked(
    tmp_path: Path, live: bool, policy: str, taken: bool
) -> None:
    talk = tmp_path / "talk.jsonl"
    bench(tmp_path / "recorded").forge(recorder=Recorder(talk))
    replay = ReplayModel(read_conversations(talk))
    made = bench(tmp_path / "again")
    trace = made.forge(profile=policy, **({} if live else {"coder": replay, "judge": replay}))
    assert trace.outcome == "forged"
    assert bool(made.evaluator.profiles) == taken
    assert (trace.final is not None and trace.final.profile is not None) == taken
    if live and not taken:
        assert "No profile was taken" in prompts(made)[0]


def test_a_lost_device_stops_the_run(tmp_path: Path) -> None:
    class Lost(TableEvaluator):
        def profile(self, candidate: Candidate, target: Target, *, depth: Depth = "quick") -> Profile:
            raise DeviceError("cuda:0 is unhealthy")

    trace = bench(tmp_path, evaluator=Lost()).forge()
    assert (trace.outcome, len(trace.rounds)) == ("error", 1)
    assert "cuda:0 is unhealthy" in trace.reason


def test_no_round_is_lost_for_want_of_a_profile(tmp_path: Path) -> None:
    class Dead(TableEvaluator):
        def profile(self, candidate: Candidate, target: Target, *, depth: Depth = "quick") -> Profile:
            raise OracleError("the oracle died")

    made = bench(tmp_path, evaluator=Dead())
    trace = made.forge()
    assert (trace.outcome, trace.winner) == ("forged", 3)
    assert "round 1 could not be profiled: the oracle died" in trace.notes
    assert "No profile was taken" in prompts(made)[0]


# -- what goes back --------------------------------------------------------------------------------------------------

WRONG = optimization(bottleneck="occupancy is 23 %")
NOWHERE = optimization("another", place="somewhere")


def test_a_figure_that_stands_nowhere_goes_back_once(tmp_path: Path) -> None:
    made = bench(tmp_path, 2, judge=[WRONG, SPEED])
    trace = made.forge()
    assert made.asked == [("coder", 1, 1), ("judge", 1, 2), ("judge", 2, 2), ("coder", 2, 2)]
    assert "could not be used: these figures do not stand in the evidence: 23 %" in prompts(made)[1]
    assert trace.rounds[1].feedback is not None and trace.rounds[1].feedback.doubts == ()
    assert trace.rounds[1].feedback.expected == 1.2
    assert (made.store.directory / "round-02" / "judge-repair-reply.md").exists()


def test_what_stays_doubtful_is_used_and_noted(tmp_path: Path) -> None:
    trace = bench(tmp_path, 2, judge=[WRONG, NOWHERE]).forge()
    (doubt,) = trace.rounds[1].feedback.doubts  # type: ignore[union-attr]
    assert doubt == "no place in the code is named: it has plan"
    assert trace.rounds[1].notes == (f"the Judge's reply: {doubt}",)
    assert trace.rounds[1].evaluation is not None, "the round is not lost for it"


def test_an_unreadable_answer_to_that_leaves_the_first(tmp_path: Path) -> None:
    trace = bench(tmp_path, 2, judge=[WRONG, "never mind"]).forge()
    feedback = trace.rounds[1].feedback
    assert feedback is not None and feedback.issue == "occupancy is 23 %"
    assert "23 %" in feedback.doubts[0]


def test_an_idea_that_failed_goes_back_with_what_it_brought(tmp_path: Path) -> None:
    made = bench(tmp_path, 3, judge=[SPEED, optimization("Vector loads."), OTHERS[0]])
    trace = made.forge()
    assert "that was tried in round 2 and brought 0.75x" in prompts(made)[2]
    assert "- round 2, from round 1 in plan.py, expected 1.2x: measured 0.75x, 667 ns" in prompts(made)[1]
    assert trace.rounds[2].feedback is not None and trace.rounds[2].feedback.why == "shared tiles"


def test_the_coder_reads_the_place(tmp_path: Path) -> None:
    made = bench(tmp_path, 2)
    made.forge()
    assert "method: vector loads\nplace: plan.py\nplan: use them" in prompts(made, "coder")[1]


def test_a_recorded_repair_is_replayed_whatever_is_measured_now(tmp_path: Path) -> None:
    talk = tmp_path / "talk.jsonl"
    bench(tmp_path / "recorded", judge=[WRONG, SPEED, OTHERS[0]]).forge(recorder=Recorder(talk))
    (conversation,) = read_conversations(talk)
    assert [said.call for said in conversation.replies if said.role == "judge"] == ["judge", "judge-repair", "judge"]
    # A judge whose first reply would stand here, and one whose single reply would not.
    first = next(said for said in conversation.replies if said.call == "judge")
    passing = conversation.with_reply(replace(first, text=SPEED))
    for recording in (conversation, passing):
        replay = ReplayModel((recording,))
        made = bench(tmp_path / f"again-{recording is passing}")
        trace = made.forge(coder=replay, judge=replay)
        assert [entry.feedback and entry.feedback.why for entry in trace.rounds] == [
            None,
            "vector loads",
            "shared tiles",
        ]


def test_a_recording_from_before_is_never_returned(tmp_path: Path) -> None:
    talk = tmp_path / "talk.jsonl"
    bench(tmp_path / "recorded", judge=[WRONG, WRONG, OTHERS[0]]).forge(recorder=Recorder(talk))
    (conversation,) = read_conversations(talk)
    judged = [said for said in conversation.replies if said.role == "judge"]
    old = [replace(said, ordinal=index + 1, call="") for index, said in enumerate(judged[1:])]
    before = replace(conversation, replies=(*[r for r in conversation.replies if r.role == "coder"], *old))
    replay = ReplayModel((before,))
    trace = bench(tmp_path / "again").forge(coder=replay, judge=replay)
    assert trace.outcome == "forged", trace.reason
    said = [entry.feedback for entry in trace.rounds if entry.feedback]
    assert [feedback.issue for feedback in said] == ["occupancy is 23 %", "memory"]
    assert all(feedback.doubts == () for feedback in said), "its figures were measured elsewhere"


# -- planning anew ---------------------------------------------------------------------------------------------------


def test_two_idle_optimizations_bring_a_full_profile_and_a_new_plan(tmp_path: Path) -> None:
    made = bench(tmp_path, 6)
    trace = made.forge()
    assert trace.winner == 3
    full = ["full profile of workload default" in shown for shown in prompts(made)]
    anew = ["plan anew, from this full profile" in shown for shown in prompts(made)]
    assert full == anew == [False, False, False, False, True]
    assert made.evaluator.profiles == [("PASSED 2.0", "quick"), ("PASSED 3.0", "quick"), ("PASSED 3.0", "full")]
    assert "optimization of round 3, planned anew" in made.watch.texts("round")


def test_a_correction_asks_for_no_profile(tmp_path: Path) -> None:
    made = bench(tmp_path, 2, coder=[reply("BUILD_ERROR"), reply("TIMEOUT")], judge=[MEND])
    made.forge()
    assert made.evaluator.profiles == []
