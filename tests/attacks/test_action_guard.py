"""Mode guard for real: pull requests that make a kernel slower, or wrong, and one that changes nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import guard_repo
import pytest
from fake_github import TOKEN, fake_github
from guard_repo import Repo, kernel, layer
from runner_log import Command, commands
from test_guard_attacks import uncompiled

FOLDER = ".cudaforge/action/guard"
LOUD = """
def pytest_report_header():
    return ["::error file=a.py::evil", "##[error]evil", "::set-output name=outcome::evil", "::stop-commands::evil"]
"""


@dataclass(frozen=True)
class Job:
    """A job of a workflow, as its runner sees it."""

    status: int
    log: str
    step: Path

    @property
    def remarks(self) -> list[Command]:
        return [one for one in commands(self.log) if one.name in ("error", "warning", "notice")]

    @property
    def summary(self) -> str:
        return (self.step / "github_step_summary").read_text()


def step(repo: Repo, mode: str, environ: dict[str, str], *options: str) -> Job:
    """``python -m cudaforge_action MODE`` there, as action.yml runs it."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("GITHUB_", "CI"))}
    plugins = "-p no:hypothesispytest -p no:anyio -p no:cacheprovider -p no:xdist"
    # One thread: others would wait for each other on a busy machine.
    told = own | environ | {"PYTEST_ADDOPTS": plugins, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "cudaforge_action", mode, *options],
        cwd=repo.root,
        env=told,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    return Job(done.returncode, done.stdout.decode(), Path(environ["GITHUB_EVENT_PATH"]).parent)


@dataclass(frozen=True)
class World:
    """A GitHub, and a clone of its repository in which a job has run on a pull request that does harm."""

    repo: Repo
    environ: dict[str, str]
    guarded: Job
    reported: list[Job]
    comments: list[str]
    states: list[tuple[str, str]]


def kernels(folder: Path) -> Repo:
    """Four kernels: one to keep, one to slow down, one to break, and one for a GPU of long ago."""
    made = guard_repo.repo(folder)
    made.write({"cudaforge.yaml": "trials: 2\ntiming_budget_s: 0.1\n", "conftest.py": LOUD})
    made.layers(map(uncompiled, [layer("Same"), layer("Slow", 1.5), layer("Wrong", 2.5), layer("Elsewhere", 3.0)]))
    for name, factor in (("Same", 2.0), ("Slow", 1.5), ("Wrong", 2.5)):
        made.publish(name, kernel(factor))
    made.arch = "sm_50"
    made.publish("Elsewhere", kernel(3.0, language="cuda"))
    made.arch = "cpu"
    made.commit("feat: kernels")
    # As a CI service checks out: the base is known as origin's alone.
    made.git("update-ref", "refs/remotes/origin/main", "main")
    return made


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("guarded")
    repo = kernels(folder / "repo")
    with fake_github(folder) as hub:
        hub.commit("main", {"layers.py": "x = 1\n"})
        hub.commit("harm", {"layers.py": "x = 2\n"}, base="main")
        environ = hub.environ(folder / "step", "pull_request", hub.pull_event(hub.open_pull("harm")))
        repo.git("checkout", "-q", "-b", "harm")
        repo.git("branch", "-q", "-D", "main")
        repo.publish("Slow", kernel(1.5, turns=6))
        repo.publish("Wrong", kernel(2.5, wrong=" + (std::fabs(x[i]) > 0.5f ? 1.0f : 0.0f)"))
        repo.commit("perf: trust me")
        guarded = step(
            repo, "guard", environ | {"GITHUB_TOKEN": "hush-hush"}, "--pytest-args", "-k 'not (Same and guard)'"
        )
        reports = [step(repo, "report", environ | {"INPUT_TOKEN": TOKEN}) for _ in range(2)]
        states = [(one.state, one.description) for one in hub.statuses]
        yield World(repo, environ, guarded, reports, [one.body for one in hub.comments.values()], states)


def run_of(repo: Repo) -> dict[str, Any]:
    return dict(json.loads((repo.root / FOLDER / "run.json").read_text()))


def line_of(repo: Repo, name: str) -> str:
    return str(1 + (repo.root / "layers.py").read_text().splitlines().index(f"class {name}(nn.Module):"))


def test_the_job_fails_on_the_lines_of_the_targets(world: World) -> None:
    assert world.guarded.status == 1, world.guarded.log
    remarks = {one.properties.get("title", ""): one for one in world.guarded.remarks}
    wrong = remarks["Forged kernel is wrong: layers.py::Wrong [default]"]
    assert (wrong.name, wrong.properties["file"]) == ("error", "layers.py")
    assert wrong.properties["line"] == line_of(world.repo, "Wrong") and "INCORRECT_NUMERICAL" in wrong.data
    slow = slow_of(world)
    assert (slow.properties["file"], slow.properties["line"]) == ("layers.py", line_of(world.repo, "Slow"))
    assert not any("layers.py::Same" in title for title in remarks)


def slow_of(world: World) -> Command:
    return next(one for one in world.guarded.remarks if "layers.py::Slow" in one.properties.get("title", ""))


def test_a_slower_kernel_is_an_error_of_the_job(world: World) -> None:
    slow = slow_of(world)
    if "nothing was decided" in slow.data or "not confirmed" in slow.data:
        assert slow.name == "warning"  # it fails nothing
        pytest.skip("this machine is too busy to decide whether six times the work is slower")
    assert slow.name == "error" and "slower" in slow.data


def test_what_the_runner_lacks_is_told(world: World) -> None:
    (absent,) = [one for one in run_of(world.repo)["unchecked"] if "sm_50" in one["why"]]
    assert absent["count"] == 1 and "elsewhere" in absent["what"]
    assert "this kernel was made for sm_50" in world.guarded.summary and "**Not checked**" in world.guarded.summary


def test_the_job_costs_little_beyond_its_measurements(world: World) -> None:
    seconds = dict(run_of(world.repo)["seconds"])
    assert seconds["measuring"] > 0.0
    # Asked are 30 s; what a busy machine takes is no business of this test.
    assert sum(seconds.values()) - seconds["measuring"] < 120.0


def test_what_pytest_prints_is_shown_and_not_obeyed(world: World) -> None:
    assert world.guarded.log.count("::error file=a.py::evil") == 1 and "##[error]evil" in world.guarded.log
    assert not any("evil" in one.data for one in commands(world.guarded.log))
    assert "evil" not in (world.guarded.step / "github_output").read_text() + world.guarded.summary


def test_the_token_was_in_nobodys_reach(world: World) -> None:
    shown = [line for line in world.guarded.log.splitlines() if "hush-hush" in line]
    assert shown == ["::add-mask::hush-hush"], "but where it is masked"
    for file in (world.repo.root / FOLDER).iterdir():
        assert "hush-hush" not in file.read_text()


def test_the_report_is_one_comment_and_one_status_however_often_it_is_made(world: World) -> None:
    assert [one.status for one in world.reported] == [0, 0], world.reported[0].log
    (comment,) = world.comments
    assert "1 wrong" in comment and "INCORRECT_NUMERICAL" in comment and "not checked" in comment
    ((state, told),) = world.states
    assert state == "failure" and "1 wrong" in told
    assert TOKEN not in comment and world.reported[0].log.count(TOKEN) == 1, "but where it is masked"


def test_a_change_of_something_else_passes(world: World, tmp_path: Path) -> None:
    repo = world.repo
    repo.git("checkout", "-q", "-b", "peace", "origin/main")
    repo.write({"README.md": "Better words.\n"})
    repo.commit("docs: words")
    (tmp_path / "step").mkdir()
    environ = world.environ | {
        name: str(tmp_path / "step" / name.lower()) for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")
    }
    job = step(repo, "guard", environ, "--pytest-args", "-k Same")
    assert job.status == 0, job.log
    assert run_of(repo)["outcome"] == "pass" and job.remarks == []
    assert "outcome<<" in (tmp_path / "step/github_output").read_text()


def test_a_clone_without_the_base_says_how_to_get_it(world: World, tmp_path: Path) -> None:
    url = world.repo.root.as_uri()
    subprocess.run(["git", "clone", "-q", "--depth", "1", "--branch", "harm", url, tmp_path / "shallow"], check=True)
    shallow = Repo(tmp_path / "shallow")
    job = step(shallow, "guard", world.environ | {"GITHUB_OUTPUT": str(tmp_path / "output")})
    assert job.status == 4 and run_of(shallow)["outcome"] == "error"
    assert "fetch-depth: 0" in run_of(shallow)["error"]
    assert any("fetch-depth: 0" in one["remedy"] for one in run_of(shallow)["unchecked"])
    assert any(one.name == "error" and "main" in one.data for one in job.remarks)
