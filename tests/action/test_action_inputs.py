"""Inputs: what a workflow or a command line says, typed; what is wrong, named."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from subprocess import run

import pytest
from cudaforge_action.all import environment
from cudaforge_action.descriptions import MODE_DESCRIPTIONS
from cudaforge_action.handover import handover
from cudaforge_action.inputs import MODES, Inputs, Needs, Runner, as_environ, read
from cudaforge_action.records import Shard

from pytest_cudaforge.errors import UsageError

SHARD = Shard("01-cpu", ("self-hosted", "linux"), "cpu", ("a b.py::Norm", "layers.py::Mul"), 2.5)


def test_what_is_not_given_has_its_default() -> None:
    assert read({"INPUT_MODE": "plan", "INPUT_TITLE": "  ", "INPUT_MAX_SHARDS": ""}, ()) == Inputs("plan")


def test_the_command_line_wins_over_the_environment() -> None:
    environ = {"INPUT_MODE": "plan", "INPUT_BRANCH": "one", "INPUT_STRICT": "false"}
    found = read(environ, ["forge", "--branch", "two", "--strict", "--pytest-args=-x -k 'a b'", "--draft", "no"])
    assert (found.mode, found.branch, found.strict, found.draft) == ("forge", "two", True, False)
    assert found.pytest_args == ("-x", "-k", "a b")


def test_lists_are_separated_by_commas_or_lines_as_in_create_pull_request() -> None:
    found = read(
        {"INPUT_MODE": "publish", "INPUT_LABELS": "fast, forged\nci\n", "INPUT_TARGETS": "a.py::A\na.py::A"}, ()
    )
    assert found.labels == ("fast", "forged", "ci") and found.targets == ("a.py::A",)


def test_runners_are_yaml() -> None:
    text = "- {labels: [self-hosted, h200], device: cuda, arch: sm_90, shards: 4}\n- labels: hosted\n"
    found = read({"INPUT_MODE": "plan", "INPUT_RUNNERS": text}, ())
    assert found.runners == (Runner(("self-hosted", "h200"), "cuda", "sm_90", 4), Runner(("hosted",)))


def test_the_job_before_is_a_job_of_the_context_needs() -> None:
    one, two = "a" * 64, "b" * 64
    outputs = {
        "d0": json.dumps({"01-cpu": one, "03-cpu": one}),
        "d1": json.dumps({"02-cpu": two, "03-cpu": two}),  # two jobs of a matrix say it of the same shard
        **{"regressions": "1", "text": "no JSON", "list": "[1]", "odd": json.dumps({"04-cpu": "c" * 63, "05-cpu": 5})},
    }
    # As toJSON writes it: over several lines.
    text = json.dumps({"result": "failure", "outputs": outputs}, indent=2)
    found = read({"INPUT_MODE": "publish", "INPUT_NEEDS": text}, ()).needs
    assert found == Needs("failure", {"01-cpu": one, "02-cpu": two, "03-cpu": ""})
    assert read({"INPUT_MODE": "publish", "INPUT_NEEDS": '{"result": "skipped", "outputs": {}}'}, ()).needs == Needs(
        "skipped", {}
    )


def test_the_token_comes_from_the_environment_only_and_is_never_shown() -> None:
    assert read({"CUDAFORGE_TOKEN": "s3cret"}, ["report"]).token == "s3cret"
    assert "s3cret" not in repr(read({"INPUT_TOKEN": "s3cret"}, ["report"]))
    with pytest.raises(UsageError, match="command line"):
        read({}, ["report", "--token", "s3cret"])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mode", "gaurd"),
        ("device", "tpu"),
        ("comment", "always"),
        ("strict", "maybe"),
        ("max-shards", "257"),
        ("max-shards", "1e3"),
        ("min-headroom", "nan"),
        ("min-headroom", "0.5"),
        ("max-usd", "-1"),
        ("max-usd", "inf"),
        ("rounds", "0"),
        ("working-directory", "/etc"),
        ("output-dir", "../out"),
        ("branch", "-f"),
        ("branch", "a..b"),
        ("branch", "a b"),
        ("branch", "refs/heads/x.lock"),
        ("base", "main\nevil"),
        ("branch-suffix", "a:b"),
        ("title", "two\nlines"),
        ("title", "bell\x07"),
        ("pytest-args", "'open"),
        ("runners", "labels: [a]"),
        ("runners", "[{labels: []}]"),
        ("runners", "[{labels: [a], shards: 0}]"),
        ("runners", "[{labels: [a], shard: 2}]"),
        ("runners", "!!python/object/apply:os.system [id]"),
        ("runners", "[{labels: [a], device: tpu}]"),
        ("runners", "{"),
        ("needs", "null"),
        ("needs", "success"),
        ("needs", '{"outputs": {}}'),
        ("needs", '{"result": "success"}'),
        ("needs", '{"verify": {"result": "success", "outputs": {}}}'),
        ("shard", "{}"),
        ("shard", "[" * 2000),
        ("shard", json.dumps({"name": "../x", "runs_on": [], "device": "", "targets": []})),
        ("shard", json.dumps({"name": "a", "runs_on": "x", "device": "", "targets": []})),
        ("shard", json.dumps({"name": "a", "runs_on": [], "device": "", "targets": [], "evil": 1})),
    ],
)
def test_bad_input_is_named_with_what_was_expected(name: str, text: str) -> None:
    environ = {"INPUT_MODE": "plan", f"INPUT_{name.upper().replace('-', '_')}": text}
    with pytest.raises(UsageError, match=f"input {name}") as error:
        read(environ, ())
    assert error.value.expected and error.value.remedy


def test_no_mode_is_an_error_too() -> None:
    with pytest.raises(UsageError, match="input mode is missing"):
        read({}, ())


def test_help_says_what_each_mode_does_and_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read({}, ["--help"])
    told = capsys.readouterr().out
    assert tuple(MODE_DESCRIPTIONS) == MODES
    assert all(f"  {mode:9}{said}\n" in told for mode, said in MODE_DESCRIPTIONS.items())
    assert "(default: cudaforge/forge)" in told and "(default: 16)" in told


def test_inputs_go_to_another_process_and_come_back_the_same() -> None:
    given = Inputs(
        mode="forge",
        token="t",
        working_directory=Path("sub dir"),
        paths=("a b", "c'd"),
        pytest_args=("-k", 'x and "y"', ""),
        runners=(Runner(("a", "b c"), "cpu", "", 3),),
        targets=("a b.py::A", "c.py::*"),
        labels=("x y", "z"),
        shard=SHARD,
        needs=Needs("success", {"01-cpu": "a" * 64}),
        rounds=3,
        max_usd=0.5,
        strict=True,
        delete_branch=False,
        history=Path("h.jsonl"),
    )
    assert read(as_environ(given), ()) == given


def test_artifacts_of_two_sets_of_targets_are_told_apart() -> None:
    plain, other = Inputs("publish"), Inputs("publish", branch_suffix="forged/nightly")
    assert handover(plain)["fetch-forged"] == "cudaforge-forged-*"
    assert handover(other)["fetch-forged"] == "cudaforge_forged.nightly-forged-*"
    forged = handover(replace(other, mode="forge", shard=SHARD))
    assert forged == {
        "folder": ".cudaforge/action",
        "keep": "cudaforge_forged.nightly-forged-01-cpu",
        "keep-folder": "forged",
    }
    assert handover(Inputs("guard", status_context="cudaforge/guard[*]"))["keep"] == "cudaforge-guard"
    with pytest.raises(UsageError, match="no shard"):
        handover(Inputs("verify"))


def test_one_job_that_could_not_publish_spends_nothing(tmp_path: Path) -> None:
    (tmp_path / "layers.py").write_text("x = 1\n")
    code = "import sys; from cudaforge_action.__main__ import main; sys.exit(main(['all', '--base', 'main']))"
    environ = {"PATH": os.environ["PATH"], "GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}
    done = run([sys.executable, "-c", code], cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "git remote add origin" in done.stderr, done.stderr
    assert done.stdout == "" and not (tmp_path / ".cudaforge").exists()


def test_stages_of_one_job_are_given_what_they_need_and_no_more(tmp_path: Path) -> None:
    environ = {
        "PATH": "/bin",
        "OPENAI_API_KEY": "sk-1",
        "CUDAFORGE_TOKEN": "t-1",
        "GITHUB_TOKEN": "t-2",
        "INPUT_TOKEN": "t-3",
        "GITHUB_ENV": "/env",
        "GITHUB_OUTPUT": "/out",
        "GITHUB_REPOSITORY": "octo/kernels",
    }
    inputs = Inputs("all", working_directory=Path("."))
    for mode in ("plan", "forge", "verify", "publish"):
        given = environment(mode, environ, inputs)
        kept = {"PATH": "/bin", "GITHUB_OUTPUT": "/out", "GITHUB_REPOSITORY": "octo/kernels"}
        assert given == kept | ({"OPENAI_API_KEY": "sk-1"} if mode == "forge" else {})


def test_one_job_does_it_all_on_a_plain_machine(tmp_path: Path) -> None:
    origin, clone = tmp_path / "origin.git", tmp_path / "clone"
    run(["git", "init", "-q", "--bare", "-b", "main", origin], check=True)
    run(["git", "clone", "-q", origin, clone], check=True, capture_output=True)
    (clone / "layers.py").write_text("x = 1\n")
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    run(["git", "-C", clone, "add", "."], check=True)
    run(["git", "-C", clone, *who, "commit", "-q", "-m", "one"], check=True)
    run(["git", "-C", clone, "push", "-q", "origin", "HEAD:main"], check=True)
    done = run(
        [sys.executable, "-m", "cudaforge_action", "all", "--base", "main", "--device", "cpu"],
        cwd=clone,
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gives up" in done.stderr
    assert json.loads((clone / ".cudaforge/action/plan/plan.json").read_text())["shards"] == []
    assert json.loads((clone / ".cudaforge/action/outputs.json").read_text())["operation"] == "none"
