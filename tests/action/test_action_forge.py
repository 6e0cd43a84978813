"""Mode forge around pytest: what it refuses, what pytest is given, and what is kept when pytest dies. Nothing is
forged here (tests/whole/test_whole_action.py does that)."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import shard_records
from cudaforge_action import forge
from cudaforge_action.inputs import Inputs
from cudaforge_action.plain import PlainHost
from cudaforge_action.records import Shard
from cudaforge_action.shards import read_forged

from pytest_cudaforge.discovery import discover
from pytest_cudaforge.errors import UsageError
from pytest_cudaforge.records import Profile, Target, Trace
from pytest_cudaforge.store import RunStore

LAYERS = """
from torch import nn
from pytest_cudaforge import forge_target

@forge_target(inputs=lambda: [])
class scale(nn.Module): ...

@forge_target(inputs=lambda: [])
class shift(nn.Module): ...
"""
#: Ends pytest before it collects anything, and leaves what it was given.
CONFTEST = """
import json, os, signal, sys

def pytest_configure(config):
    with open("seen.json", "w") as file:
        json.dump({"environ": dict(os.environ), "argv": sys.argv[1:]}, file)
    %s
"""
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
SHARD = Shard("01-cpu", ("box",), "cpu", ("layers.py::scale", "layers.py::shift"))


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in list(os.environ):
        if name.startswith(("CUDAFORGE_", "INPUT_", "GITHUB_", "PYTEST_ADDOPTS")) or name.endswith("_API_KEY"):
            monkeypatch.delenv(name)
    files = {"layers.py": LAYERS, "pytest.ini": "[pytest]\n", "conftest.py": CONFTEST % KILL, "cudaforge.yaml": ""}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def forged(shard: Shard | None = SHARD, **more: object) -> tuple[int, Mapping[str, str]]:
    """Exit status and outputs."""
    folder = Path(".cudaforge/action")
    inputs = Inputs("forge", shard=shard)
    status = forge.run(dataclasses.replace(inputs, **more), PlainHost(folder))  # type: ignore[arg-type]
    return status, json.loads((folder / "outputs.json").read_text())


def seen() -> tuple[dict[str, str], list[str]]:
    data = json.loads(Path("seen.json").read_text())
    return data["environ"], data["argv"]


def played(root: Path, name: str, trace: Trace | None = None, **change: object) -> Target:
    """A run directory as a finished run leaves it."""
    target = next(one for one in discover([root / "layers.py"], root).targets if one.qualname == name)
    trace = trace or shard_records.trace(target)
    store = RunStore(root / ".cudaforge").target(dataclasses.replace(target, **change), trace.language)  # type: ignore[arg-type]
    store.acquire()
    store.open(config_digest="c", device="cpu")
    for entry in trace.rounds:
        folder = store.round(entry.number)
        folder.directory.mkdir(parents=True)
        folder.finish(entry)
    store.write_trace(trace)
    store.release()
    return target


# -- refused -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shard",
    [
        None,
        Shard("01-cpu", (), "cpu", ()),
        Shard("01-cpu", (), "cpu", ("../x.py::A",)),
        Shard("01-cpu", (), "cpu", ("--forge-coder=x.py::A B",)),
        Shard("../01", (), "cpu", ("layers.py::scale",)),
    ],
)
def test_shards_that_are_none(repo: Path, shard: Shard | None) -> None:
    with pytest.raises(UsageError):
        forged(shard)
    assert not Path("seen.json").exists()


@pytest.mark.parametrize("how", ["yaml", "args", "args apart", "environment"])
@pytest.mark.parametrize("name", ["OPENAI_API_KEY", "MY_AGENT", "GITHUB_TOKEN", "AWS_SECRET_ACCESS_KEY"])
def test_no_isolation_beside_a_secret(repo: Path, monkeypatch: pytest.MonkeyPatch, how: str, name: str) -> None:
    settings = "chat: {command: {env: [MY_AGENT]}}\n"
    args = {"args": ("--forge-isolation=none",), "args apart": ("--forge-isolation", "none")}.get(how, ())
    (repo / "cudaforge.yaml").write_text(settings + ("isolation: none\n" if how == "yaml" else ""))
    if how == "environment":
        monkeypatch.setenv("CUDAFORGE_ISOLATION", "none")
    monkeypatch.setenv(name, "not-to-be-shown")
    with pytest.raises(UsageError, match=name) as caught:
        forged(pytest_args=args)
    assert "not-to-be-shown" not in str(caught.value) and not Path("seen.json").exists()


def test_a_choice_of_workloads_must_be_known_to_both_jobs(repo: Path) -> None:
    with pytest.raises(UsageError, match="CUDAFORGE_WORKLOADS"):
        forged(pytest_args=("--forge-workload=a",))


def test_results_never_go_through_a_link(repo: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "kept").touch()
    (repo / ".cudaforge").mkdir()
    (repo / ".cudaforge" / "action").symlink_to(elsewhere)
    with pytest.raises(UsageError, match="link"):
        forged()
    assert [path.name for path in elsewhere.iterdir()] == ["kept"]


# -- what pytest is given ------------------------------------------------------------------------------------------


def test_the_key_goes_to_pytest_and_tokens_do_not(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = ("INPUT_TOKEN", "CUDAFORGE_TOKEN", "GITHUB_TOKEN", "GH_TOKEN", "GITLAB_TOKEN", "CI_JOB_TOKEN")
    files = ("GITHUB_ENV", "GITHUB_OUTPUT", "GITHUB_PATH", "GITHUB_STEP_SUMMARY", "ACTIONS_RUNTIME_TOKEN")
    for name in (*secrets, *files, "INPUT_SHARD"):
        monkeypatch.setenv(name, f"write-{name}")
    header = {"COUNT": "1", "KEY_0": "http.https://github.com/.extraheader", "VALUE_0": "AUTHORIZATION: basic x"}
    for name, value in header.items():
        monkeypatch.setenv(f"GIT_CONFIG_{name}", value)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-model")
    monkeypatch.setenv("MY_AGENT", "agent")
    monkeypatch.setenv("HTTPS_PROXY", "http://me:word@proxy:3128")
    (repo / "cudaforge.yaml").write_text("chat: {command: {env: [MY_AGENT, GITHUB_TOKEN]}}\n")
    forged()
    environ, argv = seen()
    assert not {name for name in (*secrets, *files, "INPUT_SHARD") if name in environ}
    assert not any("write-" in value or "basic x" in value for value in environ.values())
    assert (environ["OPENAI_API_KEY"], environ["MY_AGENT"]) == ("sk-model", "agent")
    assert environ["HTTPS_PROXY"] == "http://me:word@proxy:3128"
    assert "--forge-isolation=auto" in argv


def test_options_and_ids(repo: Path) -> None:
    forged(pytest_args=("-x", "--forge-device=cuda", "--forge-isolation=auto"), rounds=3, max_usd=1.5, strict=True)
    _, argv = seen()
    assert argv[:4] == ["--forge", "-x", "--forge-device=cuda", "--forge-isolation=auto"]
    given = {"--forge-device=cpu", "--forge-rounds=3", "--forge-max-usd=1.5", "--forge-strict", f"--rootdir={repo}"}
    assert given <= set(argv[4:])
    assert argv[-2:] == [f"{repo}/layers.py::scale", f"{repo}/layers.py::shift"]
    folder = repo / ".cudaforge" / "action" / "forged" / "01-cpu"
    assert {f"--junit-xml={folder}/junit.xml", f"--forge-json={folder}/report.json"} <= set(argv)
    assert f"--override-ini=forge_dir={folder.parents[1]}/unverified/01-cpu" in argv


# -- what is kept --------------------------------------------------------------------------------------------------


def test_a_killed_run_leaves_a_shard_with_what_was_finished(repo: Path) -> None:
    stale = Path(".cudaforge/action/forged/01-cpu/traces/of-an-earlier-run.json")
    stale.parent.mkdir(parents=True)
    stale.write_text("{}")
    target = played(repo, "scale")
    status, outputs = forged()
    found = read_forged(Path(".cudaforge/action/forged/01-cpu"))
    assert status == 1 and "killed by signal 9" in found.shard.error
    assert [kernel.target for kernel, _ in found.kernels] == [target.id]
    assert found.kernels[0][1].rounds[1].feedback is not None
    assert (outputs["forged"], outputs["best-speedup"], outputs["spent-usd"]) == ("1", "2.000", "0.0300")
    assert outputs["report-html"] == "" and found.shard.usd == pytest.approx(0.03)


def test_what_was_forged_for_another_source_is_not_kept(repo: Path) -> None:
    played(repo, "scale", digest="0" * 64)
    assert forged()[1]["forged"] == "0"
    assert read_forged(Path(".cudaforge/action/forged/01-cpu")).kernels == ()


def test_a_profile_is_kept_beside_its_trace(repo: Path) -> None:
    target = next(one for one in discover([repo / "layers.py"], repo).targets if one.qualname == "scale")
    trace = shard_records.trace(target)
    candidate, verdict = shard_records.winner(trace)
    (repo / "mine.ncu-rep").write_bytes(b"NVR")
    profile = Profile("ncu", "full", candidate.digest, "default", report=str(repo / "mine.ncu-rep"))
    seen_verdict = dataclasses.replace(verdict, profile=profile)
    rounds = (trace.rounds[0], dataclasses.replace(trace.rounds[1], evaluation=seen_verdict))
    played(repo, "scale", dataclasses.replace(trace, rounds=rounds, final=seen_verdict))
    store = RunStore(repo / ".cudaforge").target(target, "cpp")
    store.round(2).write_profile(profile)
    forged()
    found = read_forged(Path(".cudaforge/action/forged/01-cpu"))
    assert found.profiles == (f"{target.slug}-cpp.ncu-rep",)
    text = (found.folder / "traces" / found.kernels[0][0].trace).read_text()
    assert str(repo) not in text and '"report": ""' in text


def test_a_damaged_trace_is_said_and_the_others_kept(repo: Path) -> None:
    played(repo, "shift")
    target = played(repo, "scale")
    (repo / ".cudaforge" / "runs" / target.slug / "cpp" / "trace.json").write_text('{"target":')
    assert forged()[1]["forged"] == "1"
    assert "not JSON" in Path(".cudaforge/action/summary.md").read_text()


@pytest.mark.parametrize(
    ("conftest", "targets", "words"),
    [
        ("import pytest; pytest.exit('enough', returncode=5)", SHARD.targets, "found none of the shard's targets"),
        ("raise ValueError('mine')", SHARD.targets, "internal error"),
        ("pass", ("layers.py::Gone",), "refused its command line"),
        ("import pytest; pytest.exit('well', returncode=0)", SHARD.targets, "wrote no report"),
    ],
)
def test_whatever_is_no_success_is_told_apart_from_one(
    repo: Path, conftest: str, targets: tuple[str, ...], words: str
) -> None:
    (repo / "conftest.py").write_text(CONFTEST % conftest)
    status, outputs = forged(dataclasses.replace(SHARD, targets=targets))
    found = read_forged(Path(".cudaforge/action/forged/01-cpu"))
    assert status == 1 and words in found.shard.error and outputs["forged"] == "0"
