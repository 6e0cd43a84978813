"""SKILL.md as an agent uses it: its files, its commands and its fields, and nothing else."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pytest_cudaforge import cli, languages
from pytest_cudaforge.records import DeviceFacts
from pytest_cudaforge.runtime.signature import Signature, describe_module
from pytest_cudaforge.runtime.trace import trace


@pytest.fixture(scope="module")
def skill() -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pytest_cudaforge", "skill"], capture_output=True, text=True, check=True
    )
    return done.stdout


def blocks(skill: str) -> dict[str, str]:
    """The code blocks by what follows the language on their first line: a file's name, or "" for the commands."""
    found = re.findall(r"^```(\w+) ?(.*)\n((?s:.*?))^```$", skill, re.MULTILINE)
    return {name: text for _, name, text in found}


def fields(skill: str) -> list[tuple[str, str]]:
    return re.findall(r"^\| `(\w+\.json)` \| `([^`]+)` \|", skill, re.MULTILINE)


def values(data: Any, path: str) -> list[Any]:
    """What lies at ``a.b[].c``; raises where a name is not there. Null ends the walk."""
    found = [data]
    for step in path.split("."):
        name, many = step.removesuffix("[]"), step.endswith("[]")
        found = [value[name] for value in found if value is not None]
        found = [item for value in found for item in value] if many else found
    return found


def run(folder: Path, command: str) -> int:
    """One line of the skill, as it stands, on the CPU."""
    program, *arguments = shlex.split(command)
    assert program == "cudaforge"
    argv = [sys.executable, "-m", "pytest_cudaforge", *arguments]
    environment = {**os.environ, "CUDAFORGE_DEVICE": "cpu"}
    return subprocess.run(argv, cwd=folder, env=environment, capture_output=True, check=False).returncode


def test_an_agent_gets_from_nothing_to_a_profile(skill: str, tmp_path: Path) -> None:
    files = blocks(skill)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "candidate").mkdir()
    for name in ("layers.py", "candidate/kernel.cpp", "candidate/plan.py"):
        (tmp_path / name).write_text(files[name])
    lint, evaluate, profile = files[""].splitlines()
    kernel = tmp_path / "candidate" / "kernel.cpp"

    assert run(tmp_path, lint) == 0
    (target,) = json.loads((tmp_path / "lint.json").read_text())["targets"]
    assert target == {"target": "layers.py::SquaredReLU", "status": "ok", "error": "", "findings": []}
    kernel.write_text(files["candidate/kernel.cpp"].replace("v * v", "v"))
    assert run(tmp_path, evaluate) == 1
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert verdict["status"] == "INCORRECT_NUMERICAL" and verdict["reason"]
    kernel.write_text(files["candidate/kernel.cpp"])
    assert run(tmp_path, profile) == 0

    found = json.loads((tmp_path / "profile.json").read_text())
    assert (found["format"], found["status"]) == ("cudaforge-profile", "PASSED")
    assert found["bounds"][0]["kernel"] == "squared_relu" and "squared_relu" in found["evidence"]
    # `profile` begins with the verdict that `evaluate` gives.
    told = {"lint.json": {"targets": [target]}, "verdict.json": found["verdict"], "profile.json": found}
    for file, path in fields(skill):
        assert values(told[file], path) or path.startswith("timing."), f"{file}: {path}"


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
