"""Mode guard around pytest: what it is told, what it may know, and that nothing but an answer is an answer.

Races, and a pull request that makes a kernel slower, are in tests/attacks/test_action_guard.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import guard_repo
import pytest
import yaml
from cudaforge_action import guard, guard_result
from cudaforge_action.inputs import Inputs
from cudaforge_action.plain import PlainHost
from cudaforge_action.process import Ended, run_quoted
from cudaforge_action.records import Context
from guard_repo import Repo, kernel, layer

from pytest_cudaforge.errors import SituationError, UsageError

PLUGINS = "-p no:hypothesispytest -p no:anyio -p no:cacheprovider -p no:xdist -p no:timeout"
OUTPUT = Path(".cudaforge/action")


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Repo]:
    made = guard_repo.repo(tmp_path / "repo")
    monkeypatch.chdir(made.root)
    monkeypatch.setenv("PYTEST_ADDOPTS", PLUGINS)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("GITHUB_BASE_REF", raising=False)
    yield made


def guarded(**inputs: Any) -> tuple[int, dict[str, Any], dict[str, str], str]:
    """Exit status, run.json, outputs and summary of a job."""
    host = PlainHost(OUTPUT)
    status = guard.run(Inputs("guard", **inputs), host)
    run = json.loads((OUTPUT / "guard/run.json").read_text())
    outputs = json.loads((OUTPUT / "outputs.json").read_text())
    assert (run["status"], run["outcome"]) == (status, outputs["outcome"])
    return status, run, outputs, (OUTPUT / "summary.md").read_text()


def program(folder: Path, *lines: str) -> str:
    """Something else than a Python with pytest."""
    path = folder / "program"
    path.write_text("\n".join(["#!/bin/sh", *lines]) + "\n")
    path.chmod(0o755)
    return str(path)


# -- what it comes to --------------------------------------------------------------------------------------------------


def test_a_repository_without_kernels_passes_and_says_so(repo: Repo) -> None:
    repo.commit("nothing yet")
    status, run, outputs, summary = guarded()
    assert status == 0 and run["pytest_status"] == 5 and outputs["checked"] == "0"
    assert json.loads(outputs["digests"]) == {"guard": guard_result.digest(OUTPUT / "guard")}
    assert "nothing to guard" in summary and "there is no forged kernel, and no target says" in summary


def test_wrong_and_stale_kernels_end_on_their_targets_lines(repo: Repo, capfd: pytest.CaptureFixture[str]) -> None:
    repo.layers([layer("Tampered"), layer("Stale")])
    repo.publish("Tampered", kernel())
    repo.publish("Stale", kernel())
    repo.commit("feat: kernels")
    repo.git("checkout", "-q", "-b", "work")
    (repo.root / "forged" / repo.entries["Tampered"].directory / "kernel.cpp").write_text("// another\n")
    repo.layers([layer("Tampered"), layer("Stale", 9.0)])
    (OUTPUT / "guard").mkdir(parents=True)
    (OUTPUT / "guard/left.json").write_text("of an earlier run")
    status, run, outputs, summary = guarded(base="main")
    assert status == 1 and outputs["failed"] == "1" and outputs["not-checked"] == "1" and outputs["checked"] == "1"
    said = capfd.readouterr()
    line = 1 + (repo.root / "layers.py").read_text().splitlines().index("class Tampered(nn.Module):")
    assert f"layers.py:{line}: error: Forged kernel is wrong: layers.py::Tampered [default]" in said.err
    assert "notice: Not checked: layers.py::Stale" in said.err and "1 failed, 1 skipped" in said.out
    assert "differs from what was verified" in summary and "forge them again" in summary
    assert "layers.py::Stale: source " in summary, "it is this change that made it stale"
    assert sorted(path.name for path in (OUTPUT / "guard").iterdir()) == [
        *("guard.json", "junit.xml", "report.html", "run.json")
    ]
    assert {name for name, _ in run["seconds"]} >= {"measuring", "preparing", "telling"}
    assert outputs["report-html"] == ".cudaforge/action/guard/report.html"


@pytest.mark.parametrize(
    ("lines", "status", "words"),
    [
        (
            ("echo the memory is full", "kill -9 $$"),
            137,
            "ended by signal 9 before it wrote a report\nthe memory is full",
        ),
        (("exit 0",), 2, "exit status 0 before it wrote a report"),
        (("echo 'ERROR: usage: pytest'; echo 'unrecognized arguments: --forge-guard'", "exit 4"), 4, "unrecognized"),
        (('for a; do case "$a" in --forge-json=*) echo "[" > "${a#*=}";; esac; done',), 2, "JSON as a job of ours"),
    ],
)
def test_no_answer_is_an_error_with_its_last_words(
    repo: Repo, tmp_path: Path, lines: tuple[str, ...], status: int, words: str
) -> None:
    ended, run, _, summary = guarded(python=program(tmp_path, *lines))
    assert (ended, run["outcome"]) == (status, "error") and words in run["error"]
    assert "the guard could not finish" in summary and words.splitlines()[-1] in summary


def test_nothing_found_where_there_is_something_is_an_error(repo: Repo, tmp_path: Path) -> None:
    repo.layers([layer("Plain", options="guard=True")])
    nothing = program(tmp_path, "exit 5")
    status, run, _, _ = guarded(python=nothing)
    assert status == 5 and "layers.py::Plain says guard=True" in run["error"]
    repo.layers([layer("Plain")])
    assert guarded(python=nothing)[0] == 0
    repo.publish("Plain", kernel())
    assert "forged/manifest.json lists forged kernels" in guarded(python=nothing)[1]["error"]
    (repo.root / "forged/manifest.json").write_text('{"manifest_version": 3}')
    (repo.root / "forged").rename(repo.root / "extension")
    assert guarded(python=nothing)[0] == 0, "another program's manifest"


# -- what pytest is told, and what it may know -------------------------------------------------------------------------


def test_tokens_keys_and_the_runners_files_are_out_of_reach(
    repo: Repo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("INPUT_TOKEN", "GITHUB_TOKEN", "OPENAI_API_KEY", "GITHUB_ENV", "ACTIONS_RUNTIME_TOKEN"):
        monkeypatch.setenv(name, "hush-hush")
    guarded(python=program(tmp_path, "env", "echo $MINE", "exit 1"), token="hush-hush")
    said = capfd.readouterr()
    assert "PATH=" in said.out and "hush-hush" not in said.out + said.err


def test_options_reach_pytest_with_ours_last(repo: Repo, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    repo.commit("nothing yet")
    python = program(tmp_path, 'printf "<%s>" "$@"', "exit 1")
    odd = "a b'$(touch hacked)\"`;*"
    guarded(
        python=python,
        pytest_args=("-k", odd, "--forge-json=mine.json"),
        paths=("forged", "-x"),
        device="cpu",
        strict=True,
        inconclusive="fail",
        history=Path("kept.jsonl"),
        base="nowhere",
    )
    told = capfd.readouterr().out
    folder = Path.cwd() / OUTPUT / "guard"
    for wanted in (
        f"<-m><pytest><--forge-guard><-k><{odd}><--forge-json=mine.json><--forge-json={folder}/guard.json>",
        "<--forge-base=origin/nowhere><--forge-guard-inconclusive=fail><--forge-device=cpu><--forge-strict>",
        "<--forge-history=kept.jsonl><forged><./-x>",
    ):
        assert wanted in told
    guarded(python=python, base="main")
    assert "<--forge-base=main>" in capfd.readouterr().out
    guarded(python=python)
    assert "--forge-base" not in capfd.readouterr().out and not (repo.root / "hacked").exists()


def test_the_base_is_the_hosts_word_and_known_as_origins(
    repo: Repo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    python = program(tmp_path, 'printf "<%s>" "$@"', "exit 1")

    def told(host: Literal["github", "gitlab"], base_ref: str = "", base: str = "") -> str:
        context = Context(host, Path.cwd(), base_ref=base_ref, default_branch="main")
        guard.run(Inputs("guard", python=python, base=base), PlainHost(OUTPUT, context))
        return capfd.readouterr().out

    assert "<--forge-base=origin/trunk>" in told("gitlab", "trunk")
    repo.commit("a commit")
    assert "<--forge-base=main>" in told("gitlab", "trunk", "main"), "origin has none of that name"
    repo.git("update-ref", "refs/remotes/origin/main", "main")
    assert "<--forge-base=origin/main>" in told("gitlab", "trunk", "main")
    assert "<--forge-base=origin/main>" in told("github"), "after a push"
    monkeypatch.setenv("GITHUB_BASE_REF", "trunk")
    assert "--forge-base" not in told("github", "trunk"), "pytest knows it by itself"


def test_a_token_in_gits_configuration_is_warned_of(
    repo: Repo, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    repo.git("config", "http.https://github.com/.extraheader", "AUTHORIZATION: basic c2VjcmV0")
    guarded(python=program(tmp_path, "exit 1"))
    said = capfd.readouterr().err
    assert "persist-credentials: false" in said and "c2VjcmV0" not in said


def test_bad_folders_and_programs_are_named(repo: Repo, tmp_path: Path) -> None:
    host = PlainHost(OUTPUT)
    for inputs, words in (
        (Inputs("guard", working_directory=Path("gone")), "input working-directory: 'gone'"),
        (Inputs("guard", python="no-such-python"), "input python: 'no-such-python'"),
    ):
        with pytest.raises(UsageError, match=words):
            guard.run(inputs, host)
    (repo.root / "elsewhere").symlink_to(tmp_path)
    with pytest.raises(UsageError, match="is a link"):
        guard.run(Inputs("guard", output_dir=Path("elsewhere/action")), host)
    assert not (tmp_path / "action").exists()


# -- the process -------------------------------------------------------------------------------------------------------


def run_lines(tmp_path: Path, *lines: str) -> Ended:
    return run_quoted([program(tmp_path, *lines)], tmp_path, os.environ, PlainHost(tmp_path), "a title")


def test_the_last_lines_are_kept_and_everything_is_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ended = run_lines(tmp_path, "seq 500; printf '%09999d' 7 >&2; printf '\\n\\377 end'; exit 3")
    out = capfd.readouterr().out
    assert out.startswith("1\n2\n") and len(out) > 10_000
    assert ended.status == 3 and ended.last_lines[-1] == "� end" and len(ended.last_lines) == 60
    assert max(map(len, ended.last_lines)) <= 400 and not ended.cancelled


def test_what_it_leaves_behind_is_not_waited_for(tmp_path: Path) -> None:
    began = time.monotonic()
    ended = run_lines(tmp_path, "sleep 600 & echo $! > left; echo done")
    assert ended.status == 0 and time.monotonic() - began < 60
    left = Path(f"/proc/{(tmp_path / 'left').read_text().strip()}")
    deadline = time.monotonic() + 30
    while left.exists() and "\nState:\tZ" not in (left / "status").read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left.exists() or "\nState:\tZ" in (left / "status").read_text()


def test_what_cannot_be_started_is_told(tmp_path: Path) -> None:
    with pytest.raises(SituationError, match="cannot be started"):
        run_quoted([str(tmp_path)], tmp_path, {}, PlainHost(tmp_path), "a title")


CANCELLED = """
import os, sys
from pathlib import Path
from cudaforge_action.plain import PlainHost
from cudaforge_action.process import run_quoted
ended = run_quoted([sys.argv[1]], Path.cwd(), os.environ, PlainHost(), "a title")
print("ENDED", ended.status, ended.cancelled)
"""


@pytest.mark.parametrize(
    ("trap", "presses", "wanted"),
    [("trap 'echo heard; exit 2' INT", 1, "ENDED 2 True"), ("trap 'echo heard' INT", 2, "ENDED -15 True")],
)
def test_a_cancelled_job_ends_politely_and_then_less_so(tmp_path: Path, trap: str, presses: int, wanted: str) -> None:
    waiting = program(tmp_path, trap, "echo ready", "while :; do sleep 0.05; done")
    job = subprocess.Popen([sys.executable, "-c", CANCELLED, waiting], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert job.stdout is not None and job.stdout.readline() == "ready\n"
    job.send_signal(signal.SIGTERM)
    assert job.stdout.readline() == "heard\n"
    if presses == 2:
        job.send_signal(signal.SIGTERM)
    assert wanted in job.stdout.read() and job.wait() == 0


def test_a_signal_to_the_steps_shell_reaches_the_job(tmp_path: Path) -> None:
    # Not SIGINT, which the runner sends first: who was started with it ignored cannot trap it in a shell.
    waiting = program(tmp_path, "trap 'echo heard; exit 2' TERM", "echo ready", "while :; do sleep 0.05; done")
    action = yaml.safe_load((Path(__file__).parents[2] / "action.yml").read_text())
    for step in (one for one in action["runs"]["steps"] if str(one.get("run", "")).endswith('/run.py"')):
        (tmp_path / "script.sh").write_text(step["run"])
        job = subprocess.Popen(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", tmp_path / "script.sh"],
            env={"PATH": os.environ["PATH"], "PYTHON": waiting, "GITHUB_ACTION_PATH": str(tmp_path)},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert job.stdout is not None and job.stdout.readline() == "ready\n"
        job.send_signal(signal.SIGTERM)
        assert job.stdout.read() == "heard\n" and job.wait() == 2, step["name"]


def test_last_words_begin_with_pytests_own_error() -> None:
    ended = Ended(4, ("a", "ERROR: first", "b", "ERROR: shallow", "  to do: fetch-depth: 0"))
    assert ended.last_words == "ERROR: shallow\n  to do: fetch-depth: 0"
    assert replace(ended, last_lines=("a", "b")).last_words == "a\nb"
