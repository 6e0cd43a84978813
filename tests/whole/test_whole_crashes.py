"""A crash after every single write of a run, then resume: nothing finished is lost, nothing is paid twice."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from flow_evaluator import CORRECTION, OPTIMIZATIONS, TableEvaluator, reply
from flow_records import make_target

from pytest_cudaforge import durable
from pytest_cudaforge.budget import Caps, Ledger
from pytest_cudaforge.chat import ChatRequest
from pytest_cudaforge.chat.scripted import ScriptedModel
from pytest_cudaforge.events import Silent
from pytest_cudaforge.loop import ForgeContext, forge
from pytest_cudaforge.records import Candidate, Depth, Profile, Round, Target, Trace
from pytest_cudaforge.store import RunStore, TargetStore
from pytest_cudaforge.strategies import Limits
from pytest_cudaforge.strategies.refine import Refine

#: an unreadable reply and its repair, a broken candidate, a duplicate, a better one
CODER = ["nothing", reply("BUILD_ERROR"), reply("PASSED 1.5"), reply("PASSED 1.5"), reply("PASSED 2.5")]
JUDGE = ["nothing", CORRECTION, *OPTIMIZATIONS[:2]]


def store_of(root: Path) -> TargetStore:
    return RunStore(root / ".cudaforge").target(make_target(root), "cpp")


def forge_once(root: Path) -> Trace:
    script = {"coder": CODER, "judge": JUDGE}

    def log(call: str) -> None:
        with open(root / "calls", "a") as calls:
            calls.write(f"{call}\n")

    def logged(request: ChatRequest) -> str:
        log(f"{request.role} {request.key.ordinal}")
        return script[request.role][request.key.ordinal - 1]

    class Logged(TableEvaluator):
        def profile(self, candidate: Candidate, target: Target, *, depth: Depth = "quick") -> Profile:
            log(f"profile {candidate.digest} {depth}")
            return super().profile(candidate, target, depth=depth)

    model = ScriptedModel(logged)
    with ThreadPoolExecutor(1) as executor:
        context = ForgeContext(
            "cpp", Logged(), model, model, Refine(), Limits(rounds=4), store_of(root), Ledger(Caps()),
            Silent(), executor,
        )  # fmt: skip
        return asyncio.run(forge(make_target(root), context))


def unprofiled(entry: Round) -> Round:
    """A finished round, without what a later one had profiled of it."""
    return replace(entry, evaluation=replace(entry.evaluation, profile=None)) if entry.evaluation else entry


def crash_after(root: Path, writes: int) -> bool:
    """Forge in a child that dies right after its n-th write; False where it came to its end before."""
    pid = os.fork()
    if pid == 0:
        left, write = [writes], durable.write_file

        def write_then_die(path: Path, data: str | bytes) -> None:
            write(path, data)
            left[0] -= 1
            if left[0] == 0:
                os._exit(9)

        durable.write_file = write_then_die
        forge_once(root)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9


def test_a_crash_after_any_write_costs_nothing(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    expected = forge_once(whole)
    assert (expected.outcome, expected.winner, expected.rounds[2].duplicate_of) == ("forged", 4, 2)
    assert expected.rounds[1].evaluation and expected.rounds[1].evaluation.profile
    for writes in range(1, 200):
        root = tmp_path / str(writes)
        root.mkdir()
        crashed = crash_after(root, writes)
        before = store_of(root).rounds()
        trace = forge_once(root)
        calls = Counter((root / "calls").read_text().splitlines())
        assert set(calls.values()) == {1}, f"paid twice after write {writes}: {calls}"
        assert list(map(unprofiled, trace.rounds[: len(before)])) == list(map(unprofiled, before))
        assert trace.rounds == expected.rounds
        assert trace.usage == expected.usage
        if not crashed:
            assert writes > 30
            return
    raise AssertionError("the run never came to its end")


def test_crashes_in_a_row_still_reach_the_end(tmp_path: Path) -> None:
    crashes = 0
    # Each try opens the run (2 writes) and writes feedback and candidate of its round again (3) before it gets on.
    while crash_after(tmp_path, 8):
        crashes += 1
    assert crashes >= 5
    assert set(Counter((tmp_path / "calls").read_text().splitlines()).values()) == {1}
    assert forge_once(tmp_path).winner == 4
