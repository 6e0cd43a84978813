"""The plan of a run: writes nothing, counts what is done, says that its figures are estimates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from flow_evaluator import CORRECTION, OPTIMIZATION, TableEvaluator, reply
from flow_records import make_target

from pytest_cudaforge import config as configs
from pytest_cudaforge.chat.scripted import ScriptedModel
from pytest_cudaforge.config import ForgeConfig
from pytest_cudaforge.errors import TargetError
from pytest_cudaforge.planning import plan_work, render_plan
from pytest_cudaforge.records import DeviceFacts
from pytest_cudaforge.session import Models, forge_all

NAMES = ("one", "two", "three")


def priced(root: Path) -> ForgeConfig:
    config = configs.load({"rounds": 3}, root=root)
    coder = replace(config.chat.coder, model="gpt-5")
    return replace(config, chat=replace(config.chat, coder=coder, judge=coder))


def test_the_plan_writes_nothing_and_says_what_it_would_cost(tmp_path: Path) -> None:
    evaluator = TableEvaluator(problems={"layers.py::two": TargetError("inputs raise")})
    plan = plan_work([make_target(tmp_path, name) for name in NAMES], priced(tmp_path), evaluator)
    assert list(tmp_path.iterdir()) == []
    assert [entry.problem for entry in plan.targets] == ["", "inputs raise", ""]
    assert plan.usd is not None
    assert 0.05 < plan.usd < 5
    text = "\n".join(render_plan(plan))
    assert "3 rounds to play, first prompt about" in text
    assert "layers.py::two (cpp): inputs raise" in text
    assert "estimates" in text


def test_rounds_already_played_are_not_counted_again(tmp_path: Path) -> None:
    model = ScriptedModel(
        {
            "coder": [reply("BUILD_ERROR"), reply("PASSED 1.5"), reply("PASSED 2.5")],
            "judge": [CORRECTION, OPTIMIZATION],
        }
    )
    config = configs.load({"rounds": 3}, root=tmp_path)
    forge_all([make_target(tmp_path, "one")], config, TableEvaluator(), models=Models(model, model))
    plan = plan_work([make_target(tmp_path, "one")], replace(config, rounds=5), TableEvaluator())
    assert (plan.targets[0].rounds_done, plan.targets[0].rounds_left) == (3, 2)
    assert plan.usd is None, "no model is configured, so no price is known"
    assert "3 already played" in "".join(render_plan(plan))


def test_a_language_that_the_target_excludes_is_a_problem(tmp_path: Path) -> None:
    gpu = TableEvaluator(device=DeviceFacts("cuda", "H200", "sm_90"))
    plan = plan_work([make_target(tmp_path)], priced(tmp_path), gpu)
    assert plan.targets[0].problem == "forged in cpp only"


def test_a_replay_costs_nothing(tmp_path: Path) -> None:
    config = priced(tmp_path)
    coder = replace(config.chat.coder, provider="replay")
    config = replace(config, chat=replace(config.chat, coder=coder, judge=coder))
    assert plan_work([make_target(tmp_path)], config, TableEvaluator()).usd == 0.0
