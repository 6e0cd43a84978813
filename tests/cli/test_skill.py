"""SKILL.md: its files build, its fields tell what goes wrong. Its commands: tests/whole/test_whole_skill.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from skill_text import blocks, fields, printed

from pytest_cudaforge import cli, languages
from pytest_cudaforge.records import DeviceFacts
from pytest_cudaforge.runtime.signature import Signature, describe_module
from pytest_cudaforge.runtime.trace import trace


@pytest.fixture(scope="module")
def skill() -> str:
    return printed()


def test_what_does_not_build_is_not_profiled(skill: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = blocks(skill)
    (tmp_path / "layers.py").write_text(files["layers.py"])
    (tmp_path / "candidate").mkdir()
    (tmp_path / "candidate" / "kernel.cpp").write_text("#error no\n")
    (tmp_path / "candidate" / "plan.py").write_text(files["candidate/plan.py"])
    argv = ["profile", f"{tmp_path}/layers.py", f"{tmp_path}/candidate", "--device", "cpu", "--no-timing", "--no-lint"]
    assert cli.main([*argv, "--json", "-"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["status"] == data["verdict"]["status"] == "BUILD_ERROR" and data["reason"]
    assert (data["profile"], data["evidence"], data["bounds"], data["rung"]) == (None, "", [], None)


def test_profile_needs_what_evaluate_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["profile", str(tmp_path / "nowhere.py"), str(tmp_path)]) == 2
    assert "nowhere.py is not a file" in capsys.readouterr().err


def test_the_skill_is_short_and_has_its_head(skill: str) -> None:
    assert skill.startswith("---\nname: cudaforge\ndescription: ")
    assert len(skill) < 9000
    assert {file for file, _ in fields(skill)} == {"lint.json", "verdict.json", "profile.json"}


def test_the_cuda_example_builds(skill: str) -> None:
    torch = pytest.importorskip("torch")
    chosen = languages.load("cuda")
    if chosen.availability() and "torch was built" not in chosen.availability():
        pytest.skip(chosen.availability())
    files = blocks(skill)
    names: dict[str, Any] = {"__name__": "layers"}
    exec(files["layers.py"], names)
    facts = DeviceFacts("cuda", "some GPU", "sm_90", sm_count=132, max_shared_bytes=232_448)
    module, x = names["SquaredReLU"](1024), torch.randn(64, 1024)
    traced = trace(files["plan.py for kernel.cu"], Signature.of((x,), {}, describe_module(module), facts, "cuda"))
    source = files["candidate/kernel.cu"]
    binaries = [chosen.compile(source, unit, facts.arch) for unit in languages.units_of(traced)]
    languages.check_arguments(traced, binaries)
    (launch,) = traced.main.launches
    assert (launch.grid, launch.block) == ((64, 1, 1), (256, 1, 1))
