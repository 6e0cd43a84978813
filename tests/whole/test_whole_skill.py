"""SKILL.md as an agent uses it: its files, its commands and its fields, and nothing else."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from skill_text import blocks, fields, printed


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


def test_an_agent_gets_from_nothing_to_a_profile(tmp_path: Path) -> None:
    skill = printed()
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
