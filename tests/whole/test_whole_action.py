"""The Action from its first job to a pull request and back, each job on a machine of its own.

A repository with two modules and their recorded conversations lies on a GitHub of ours. ``plan`` makes two shards,
each is forged and verified in a fresh clone, ``publish`` opens the pull request. What its branch holds passes plain
``pytest``. Then two pull requests come: one that slows a kernel down, one that does nothing to them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cudaforge_action.shards import read_forged, read_verified
from fake_git import git
from fake_github import TOKEN, fake_github
from forge_repo import KERNEL, PLAN, pytest_in
from forge_repo import LAYERS as LAYERS_OF_ONE
from forge_repo import SETTINGS as SCRIPTED
from machines import Machines, ended_well

from pytest_cudaforge.chat.record import Conversation, RecordedReply, render_conversations
from pytest_cudaforge.discovery import discover

#: Small tensors and one thread: the kernels win by far on any machine. Two targets of the same work.
LAYERS = LAYERS_OF_ONE + LAYERS_OF_ONE[LAYERS_OF_ONE.index("@forge_target") :].replace("PeakNorm", "SecondNorm")
REPLAYED = SCRIPTED.replace('"scripted_chat:make"', "replay").replace(
    "chat:", "chat:\n  replay: {paths: [recorded.jsonl]}"
)
#: Two targets are forged and verified before the first test ends; among busy processes every race waits for quiet.
pytestmark = pytest.mark.timeout(1500)
RUNNERS = "[{labels: [self-hosted, cpu], device: cpu, shards: 2}]"
GOOD = KERNEL.replace("SCALE", "w[c]")
#: A quiet machine needs one.
NIGHTS = 5


def recorded(folder: Path, layers: str) -> str:
    """The conversations of both targets: the first kernel does not build, what the Judge says of it mends it."""
    folder.mkdir()
    (folder / "layers.py").write_text(layers)
    kernels = (KERNEL.replace("SCALE", "weight[c]"), GOOD)
    broken, mended = (f"```cpp kernel.cpp\n{text}\n```\n\n```python plan.py\n{PLAN}\n```\n" for text in kernels)
    advice = json.dumps({"issue": "weight is undeclared", "why": "it is called w", "fix": "write w[c]"})
    said = (RecordedReply("coder", 1, broken), RecordedReply("judge", 1, advice), RecordedReply("coder", 2, mended))
    return render_conversations(
        Conversation(one.id, one.digest, "cpp", said) for one in discover([folder], folder).targets
    )


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    folder = tmp_path_factory.mktemp("action")
    files = {"layers.py": LAYERS, "pytest.ini": "[pytest]\n", ".gitignore": ".cudaforge\n__pycache__\n"}
    talks = {"recorded.jsonl": recorded(folder / "recorded", LAYERS)}
    with fake_github(folder / "hub") as hub:
        hub.commit("main", files | {"cudaforge.yaml": REPLAYED} | talks)
        yield Machines(hub, folder)


@pytest.fixture(scope="module")
def forged(machines: Machines) -> dict[str, Any]:
    """Nights from plan to publish, until there is no work left: a kernel that could not be timed on a busy machine is
    the next night's, and joins the same pull request. ``artifacts``: of each target, those of the night that had it."""
    nights: list[dict[str, Any]] = []
    artifacts: dict[str, tuple[Path, Path]] = {}
    log = ""
    for night in map(str, range(1, NIGHTS + 1)):
        planned = ended_well(machines.job("plan", run=night, runners=RUNNERS)[0])
        rows = json.loads(planned.outputs["matrix"])["include"]
        if not rows:
            break
        log = "".join(ended_well(machines.job("forge", run=night, shard=row["shard"])[0]).log for row in rows)
        verified = [machines.job("verify", run=night, shard=row["shard"], quiet_minutes="1") for row in rows]
        needs = {
            "result": "success",
            "outputs": {f"d{n}": ran.outputs["digests"] for n, (ran, _) in enumerate(verified)},
        }
        published = ended_well(machines.job("publish", run=night, token=TOKEN, needs=json.dumps(needs))[0])
        nights.append({"planned": planned, "rows": rows, "published": published, "night": night})
        for row, (ran, checkout) in zip(rows, verified, strict=True):
            log += ended_well(ran).log
            shard = json.loads(row["shard"])
            places = [checkout / ".cudaforge/action" / kind / shard["name"] for kind in ("forged", "verified")]
            artifacts |= dict.fromkeys(shard["targets"], (places[0], places[1]))
    else:
        left = json.loads(machines.job("plan", run="left", runners=RUNNERS)[0].outputs["matrix"])["include"]
        if left and re.search("no winner|disturbed|inconclusive", log):
            pytest.skip(f"this machine is too busy: {NIGHTS} nights left {len(left)} shards without a decided race")
    operations = [night["published"].outputs.get("operation", "") for night in nights]
    return {**nights[0], "published": nights[-1]["published"], "operations": operations, "artifacts": artifacts}


def test_two_targets_are_two_shards(forged: dict[str, Any]) -> None:
    assert forged["planned"].outputs["shards"] == "2"
    assert [row["runs-on"] for row in forged["rows"]] == [["self-hosted", "cpu"]] * 2
    targets = [target for row in forged["rows"] for target in json.loads(row["shard"])["targets"]]
    assert sorted(targets) == ["layers.py::PeakNorm", "layers.py::SecondNorm"] == sorted(forged["artifacts"])


@pytest.mark.parametrize("target", ["layers.py::PeakNorm", "layers.py::SecondNorm"])
def test_what_was_forged_is_built_from_source_and_measured_anew(forged: dict[str, Any], target: str) -> None:
    claimed, judged = (
        read(place) for read, place in zip((read_forged, read_verified), forged["artifacts"][target], strict=True)
    )
    (kernel,) = judged.shard.kernels
    ((_, trace),) = claimed.kernels
    assert kernel.entry is not None and kernel.evaluation is not None and judged.shard.error == ""
    assert trace.final is not None and trace.final.timing != kernel.evaluation.timing
    assert kernel.evaluation.verification is not None and kernel.evaluation.isolation.grade in "AB"
    files = judged.files[kernel.entry.directory]
    assert files["kernel.cpp"].decode().strip() == GOOD.strip() and b"verified anew" in files["report.md"]
    # The shard says what is in it, and the checkout's own kernels are publish's business.
    assert not list(judged.folder.rglob("manifest.json")) and not (judged.folder.parents[3] / "forged").exists()


def test_a_pull_request_is_opened_once(machines: Machines, forged: dict[str, Any]) -> None:
    outputs = forged["published"].outputs
    [pull] = machines.hub.open_pulls
    # Of the first night that had a kernel; on a busy machine that may be a later one.
    operation = "updated" if "created" in forged["operations"][:-1] else "created"
    assert (outputs["operation"], outputs["pull-request-number"]) == (operation, str(pull.number))
    assert outputs["pull-request-head-sha"] == machines.hub.branches[outputs["branch"]]
    assert "PeakNorm" in pull.body and "SecondNorm" in pull.body and float(outputs["best-speedup"]) > 1.0
    changed = git(machines.hub.bare, "diff", "--name-only", "main", outputs["branch"]).splitlines()
    assert changed and all(path.startswith("forged/") for path in changed)
    [status] = [one for one in machines.hub.statuses if one.sha == outputs["pull-request-head-sha"]]
    assert status.state == "success"


def test_what_the_branch_holds_passes_plain_pytest(machines: Machines, forged: dict[str, Any], tmp_path: Path) -> None:
    git(tmp_path, "clone", "-q", "-b", forged["published"].outputs["branch"], str(machines.hub.bare), "repo")
    done = pytest_in(tmp_path / "repo", "-q", "forged", CUDAFORGE_DEVICE="cpu")
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout + done.stderr


def test_another_run_without_news_writes_nothing(machines: Machines, forged: dict[str, Any]) -> None:
    machines.hub.forget()
    again = ended_well(machines.job("publish", run=forged["night"], token=TOKEN)[0])
    assert (again.outputs["operation"], machines.hub.writes, machines.hub.pushes) == ("none", [], 0)
    # What waits in the pull request is no work of the next night.
    planned = ended_well(machines.job("plan", run="idle", runners=RUNNERS)[0])
    assert planned.outputs["shards"] == "0" and json.loads(planned.outputs["matrix"])["include"] == []


# -- pull requests afterwards ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def merged(machines: Machines, forged: dict[str, Any]) -> str:
    """The pull request is merged: main has the kernels."""
    branch = forged["published"].outputs["branch"]
    git(machines.hub.bare, "update-ref", "refs/heads/main", machines.hub.branches[branch])
    return machines.hub.branches["main"]


def slowed(plan: str) -> str:
    """The same plan, which does its work six times."""
    launch = plan[plan.index("    launch(") : plan.index("    return ")]
    return plan.replace(launch, launch * 40)


def test_a_planted_regression_fails_with_its_place(machines: Machines, merged: str) -> None:
    hub = machines.hub
    git(machines.folder, "clone", "-q", str(hub.bare), "slow")
    checkout = machines.folder / "slow"
    [plan] = checkout.glob("forged/peak_norm-*/cpu/plan.py")
    plan.write_text(slowed(plan.read_text()))
    _bless(checkout, plan)
    git(checkout, "checkout", "-q", "-b", "slow")
    git(checkout, "commit", "-q", "-a", "-m", "perf: trust me")
    git(checkout, "push", "-q", "origin", "slow")
    pull = hub.open_pull("slow")
    hub.forget()
    asked = {"base": "main", "pytest_args": "-k peak_norm"}  # the other kernel's turn is the next test's
    ran, _ = machines.job(
        "guard", run="slow", ref="slow", event="pull_request", payload=hub.pull_event(pull), token=TOKEN, **asked
    )
    assert ran.outputs["checked"] == "1"
    assert not ran.ok and ran.outputs["outcome"] == "regression", ran.log[-8000:]
    errors = [command for command in ran.commands if command.name == "error"]
    line = _line_of(checkout / "layers.py", "class PeakNorm")
    assert any(
        (one.properties.get("file"), one.properties.get("line")) == ("layers.py", str(line)) for one in errors
    ), errors
    [comment] = [one for one in hub.comments.values() if one.number == pull.number]
    assert "PeakNorm" in comment.body or "peak_norm" in comment.body
    assert [one.state for one in hub.statuses if one.sha == pull.head_sha] == ["failure"]


def test_an_unchanged_pull_request_passes(machines: Machines, merged: str) -> None:
    hub = machines.hub
    hub.commit("docs", {"README.md": "# Kernels\n"})
    pull = hub.open_pull("docs")
    ran, _ = machines.job(
        "guard", run="docs", ref="docs", event="pull_request", payload=hub.pull_event(pull), base="main"
    )
    assert ran.outputs["outcome"] in ("pass", "inconclusive") and ran.outputs["regressions"] == "0", ran.log[-8000:]
    assert ran.ok, ran.log[-8000:]
    if ran.outputs["outcome"] == "inconclusive":
        pytest.skip("this machine is too busy: it failed nothing, and did not decide that nothing is slower")


def _line_of(path: Path, words: str) -> int:
    return next(number for number, line in enumerate(path.read_text().splitlines(), 1) if line.startswith(words))


def _bless(checkout: Path, changed: Path) -> None:
    """The pull request's author brings the manifest along."""
    manifest = checkout / "forged/manifest.json"
    data = json.loads(manifest.read_text())
    for entry in data["entries"]:
        for file in entry["files"]:
            if (checkout / "forged" / entry["directory"] / file["name"]) == changed:
                file["sha256"] = hashlib.sha256(changed.read_bytes()).hexdigest()
    manifest.write_text(json.dumps(data, indent=1) + "\n")
