"""Mode plan on real repositories: what it lists, leaves out and refuses, without torch and without their code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import guard_repo
import pytest
from cudaforge_action import plan
from cudaforge_action.inputs import Inputs, Runner
from cudaforge_action.plain import PlainHost
from cudaforge_action.plan import planned_shards
from guard_repo import Repo, kernel, layer

from pytest_cudaforge.errors import UsageError

CPU = Runner(("box",), "cpu", "", 2)


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repo:
    """Fine and Thin have kernels, New has none; the repo's own code would say that it ran."""
    made = guard_repo.repo(tmp_path / "repo")
    made.layers([layer("Fine"), layer("Thin", 3.0), layer("New", 4.0)])
    made.publish("Fine", kernel(), promised=1.5)
    made.publish("Thin", kernel(3.0), promised=1.02)
    made.write({"conftest.py": "raise SystemExit('conftest ran')\n"})
    made.commit("first")
    monkeypatch.chdir(made.root)
    for name in list(os.environ):
        if name.startswith(("CUDAFORGE_", "INPUT_")):
            monkeypatch.delenv(name)
    return made


def planned(**more: object) -> tuple[dict[str, str], list[dict[str, str]], str]:
    """Outputs, the work, and the summary."""
    folder = Path(".cudaforge/action")
    host = PlainHost(folder)
    inputs = Inputs("plan", runners=(CPU,))
    assert plan.run(replace(inputs, **more), host) == 0  # type: ignore[arg-type]
    outputs = json.loads((folder / "outputs.json").read_text())
    work = json.loads((folder / "plan" / "plan.json").read_text())["work"]
    return outputs, work, (folder / "summary.md").read_text()


def names(work: list[dict[str, str]]) -> list[tuple[str, str]]:
    return [(one["target"].partition("::")[2], one["reason"]) for one in work]


def test_what_is_listed(repo: Repo) -> None:
    repo.layers([layer("Fine", 2.5), layer("Thin", 3.0), layer("New", 4.0)])
    outputs, work, summary = planned()
    assert names(work) == [("Fine", "stale"), ("New", "new"), ("Thin", "thin")]
    assert (outputs["shards"], outputs["targets"]) == ("2", "3")
    rows = json.loads(outputs["matrix"])["include"]
    assert [row["name"] for row in rows] == ["01-cpu", "02-cpu"] and rows[0]["runs-on"] == ["box"]
    assert [json.loads(row["shard"])["name"] for row in rows] == ["01-cpu", "02-cpu"]
    assert {shard.name for shard in planned_shards(Path(".cudaforge/action/plan"))} == {"01-cpu", "02-cpu"}
    assert summary.index("Fine") < summary.index("New") < summary.index("Thin")
    assert "its source has changed" in summary and "verified with torch" in summary


def test_nothing_to_do_is_a_matrix_all_the_same(repo: Repo) -> None:
    outputs, work, summary = planned(targets=("Fine",))
    assert (outputs["shards"], outputs["targets"], work) == ("0", "0", [])
    assert json.loads(outputs["matrix"]) == {"include": []}
    assert "Nothing: 1 target looked at" in summary


def test_the_log_says_what_the_summary_says(repo: Repo, capfd: pytest.CaptureFixture[str]) -> None:
    planned(targets=("New", "Fine"))
    told = capfd.readouterr().out.splitlines()
    assert told[:2] == ["1 of 2 targets worth forging, in 1 job.", "layers.py::New: new, it has no kernel yet"]
    assert told[-1] == "plan: .cudaforge/action/plan/plan.json"


def test_a_project_without_targets_is_told_what_to_do(repo: Repo) -> None:
    repo.write({"plain.py": "x = 1\n"})
    assert "no target was found: mark a module with @forge_target" in planned(paths=("plain.py",))[2]


def test_a_folder_that_is_not_there_is_named_by_its_input(repo: Repo) -> None:
    with pytest.raises(UsageError, match="mend the input working-directory"):
        planned(working_directory=Path("gone"))


def test_damaged_files_are_stale(repo: Repo) -> None:
    (repo.root / "forged" / repo.entries["Fine"].directory / "kernel.cpp").write_text("// other\n")
    _, work, _ = planned()
    assert names(work)[0] == ("Fine", "stale") and "not those that were verified" in work[0]["why"]


def test_what_the_open_pull_request_brings_is_left_out(repo: Repo) -> None:
    repo.git("checkout", "-q", "-b", "work")
    repo.publish("New", kernel(4.0), promised=2.0)
    sha = repo.commit("perf: forge New")
    repo.git("checkout", "-q", "main")
    assert ("New", "new") in names(planned()[1])
    repo.git("update-ref", "refs/remotes/origin/cudaforge/forge-gpu", sha)
    assert ("New", "new") not in names(planned(branch_suffix="-gpu")[1])
    assert "no origin/cudaforge/forge:" in planned()[2]
    # Its source changes here: what lies there is void.
    repo.layers([layer("Fine"), layer("Thin", 3.0), layer("New", 5.0)])
    assert ("New", "stale") in names(planned(branch_suffix="-gpu")[1])


def test_a_branch_whose_manifest_is_broken_is_said(repo: Repo) -> None:
    repo.git("checkout", "-q", "-b", "work")
    repo.write({"forged/manifest.json": "{"})
    sha = repo.commit("oops")
    repo.git("checkout", "-q", "main")
    repo.git("update-ref", "refs/remotes/origin/cudaforge/forge", sha)
    _, work, summary = planned()
    assert names(work) == [("New", "new"), ("Thin", "thin")] and "not JSON" in summary


def test_targets_and_paths_narrow(repo: Repo) -> None:
    assert names(planned(targets=("*::T*", "Fine"))[1]) == [("Thin", "thin")]
    assert names(planned(targets=("layers.py::New::forge",))[1]) == [("New", "new")]
    repo.write({"more/other.py": guard_repo.HEADER + layer("Other", 7.0)})
    assert names(planned(paths=("more",))[1]) == [("Other", "new")]
    assert planned(paths=("more",))[1][0]["target"] == "more/other.py::Other"
    assert names(planned(paths=("more",), targets=("Other",), min_headroom=50.0)[1]) == [("Other", "new")]


@pytest.mark.parametrize("name", ["Fin", "layers.py::Fime", "nothing/*", "layers.py"])
def test_an_unknown_target_is_an_error(repo: Repo, name: str) -> None:
    with pytest.raises(UsageError, match="there is no target") as caught:
        planned(targets=(name,))
    assert "layers.py::Fine" in str(caught.value)
    if name.startswith(("Fin", "layers.py::F")):
        assert "did you mean" in str(caught.value)


def test_a_path_that_is_not_there(repo: Repo) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        planned(paths=("gone",))


def test_what_cannot_be_forged_is_a_remark_on_its_line(repo: Repo, capfd: pytest.CaptureFixture[str]) -> None:
    repo.write({"broken.py": guard_repo.HEADER + "\n@forge_target(inptus=1)\nclass Broken(nn.Module): ...\n"})
    planned()
    assert "broken.py:6: warning" in capfd.readouterr().err
    with pytest.raises(UsageError, match="cannot be forged"):
        planned(targets=("broken.py::Broken",))


def test_a_manifest_that_is_no_json_is_an_error(repo: Repo) -> None:
    repo.write({"forged/manifest.json": "{"})
    with pytest.raises(UsageError, match=r"manifest\.json"):
        planned()


def test_names_of_targets_are_text_in_the_summary(repo: Repo) -> None:
    repo.write({"a|b @team #1 ::error::.py": guard_repo.HEADER + layer("Odd", 7.0)})
    summary = planned()[2]
    row = next(line for line in summary.splitlines() if "Odd" in line)
    assert r"a\|b" in row and "@team" not in row and "#1" not in row


def test_no_torch_is_loaded_and_no_code_of_the_repo(repo: Repo) -> None:
    code = (
        "import sys; from cudaforge_action.__main__ import main; status = main(['plan']);"
        "print(status, [name for name in ('torch', 'openai', 'pytest', 'layers', 'conftest') if name in sys.modules])"
    )
    environ = {name: value for name, value in os.environ.items() if name not in ("GITHUB_ACTIONS", "GITLAB_CI")}
    done = subprocess.run([sys.executable, "-c", code], cwd=repo.root, env=environ, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["0 []"], done.stdout + done.stderr
