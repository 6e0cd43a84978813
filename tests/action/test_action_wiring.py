"""action.yml: its own steps, run with bash; what each of them is given, and what becomes of hostile inputs."""

from __future__ import annotations

import ast
import json
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
from composite import Composite, Ran, loaded
from cudaforge_action.descriptions import DESCRIPTIONS
from cudaforge_action.inputs import MODES, Inputs, read
from cudaforge_action.outputs import OUTPUTS
from publish_repo import layers

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "action" / "cudaforge_action"
TOKEN = "ghs_" + "s3cret" * 6
SHARD = json.dumps({"name": "01-cpu", "runs_on": ["self-hosted"], "device": "cpu", "targets": ["layers.py::Norm"]})


@pytest.fixture
def job(tmp_path: Path) -> Composite:
    """The real action on an empty checkout, with a Python that has the package already."""
    workspace, temp = tmp_path / "work", tmp_path / "temp"
    workspace.mkdir()
    temp.mkdir()
    event = tmp_path / "event.json"
    event.write_text("{}")
    environ = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
        "GITHUB_EVENT_PATH": str(event),
        "GITHUB_EVENT_NAME": "schedule",
        "GITHUB_REPOSITORY": "octo/kernels",
        "GITHUB_SHA": "a" * 40,
        "GITHUB_REF_NAME": "main",
    }
    return Composite(ROOT, workspace, temp, tmp_path / "artifacts", {"token": TOKEN}, environ)


def on_event(job: Composite, name: str, event: Mapping[str, Any]) -> Composite:
    Path(job.environ["GITHUB_EVENT_PATH"]).write_text(json.dumps(event))
    job.environ = {**job.environ, "GITHUB_EVENT_NAME": name}
    return job


# -- three places, one truth -------------------------------------------------------------------------------------------


def declared() -> dict[str, Any]:
    return loaded((ROOT / "action.yml").read_text("utf-8"))


def kebab(name: str) -> str:
    return name.replace("_", "-")


def test_the_inputs_of_action_yml_are_those_of_the_code() -> None:
    assert set(declared()["inputs"]) == {kebab(item.name) for item in fields(Inputs)}


def test_defaults_of_action_yml_are_those_of_the_code() -> None:
    defaults = {name: str(spec["default"]) for name, spec in declared()["inputs"].items() if name != "token"}
    environ = {f"INPUT_{name.upper().replace('-', '_')}": text for name, text in defaults.items()}
    plain = Inputs(mode="guard")
    for item in fields(Inputs):
        if item.name not in ("mode", "token"):
            assert item.default is not MISSING
    assert read(environ, ()) == plain


def test_descriptions_of_action_yml_are_those_of_the_code() -> None:
    said = {name.replace("-", "_"): spec["description"] for name, spec in declared()["inputs"].items()}
    assert said == dict(DESCRIPTIONS)
    outputs = {name: text for names in OUTPUTS.values() for name, text in names.items()}
    assert set(outputs) == set(declared()["outputs"])


def test_the_outputs_of_action_yml_are_those_of_the_code() -> None:
    assert set(declared()["outputs"]) == {name for names in OUTPUTS.values() for name in names}


def table_of_readme(heading: str) -> dict[str, list[str]]:
    """Rows of the table under a heading: first cell -> the others."""
    text = (ROOT / "action" / "README.md").read_text("utf-8")
    section = text.split(heading, 1)[1]
    rows: dict[str, list[str]] = {}
    for line in section.splitlines()[1:]:
        if line.startswith("| `"):
            cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line.strip("| "))]
            rows[cells[0].strip("`")] = cells[1:]
        elif rows and not line.startswith("|"):
            break
    return rows


def test_the_readme_lists_every_input_with_its_default() -> None:
    rows = table_of_readme("| input | default |")
    assert list(rows) == list(declared()["inputs"])
    for name, spec in declared()["inputs"].items():
        default = str(spec["default"])
        assert rows[name][0] == (f"`{default}`" if default else ""), name


def test_the_readme_lists_every_output() -> None:
    rows = table_of_readme("| output | of mode |")
    expected: dict[str, str] = {}
    for mode, names in OUTPUTS.items():
        for name in names:
            expected[name] = f"{expected[name]}, {mode}" if name in expected else mode
    assert {name: cells[0] for name, cells in rows.items()} == expected


def outputs_told(path: Path) -> Iterator[str]:
    """First arguments of ``….output("name", …)`` in a module."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "output":
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield argument.value


def test_no_mode_tells_an_output_that_nobody_hands_on() -> None:
    known = {name for names in OUTPUTS.values() for name in names}
    told = {name for path in PACKAGE.glob("*.py") for name in outputs_told(path)}
    assert told <= known


# -- what each step is given -------------------------------------------------------------------------------------------


def modules_of(mode: str) -> set[Path]:
    """The mode's module and what it imports of this package, at any depth."""
    found: set[Path] = set()
    waiting = [PACKAGE / f"{mode}.py"]
    while waiting:
        path = waiting.pop()
        if path in found or not path.exists():
            continue
        found.add(path)
        for name in re.findall(r"cudaforge_action\.(\w+)", path.read_text("utf-8")):
            # What another mode's module lends out does not read that mode's inputs.
            waiting += [PACKAGE / f"{name}.py"] if name not in MODES else []
    return found - {PACKAGE / f"{name}.py" for name in ("inputs", "handover", "__main__")}


def inputs_read_by(mode: str) -> set[str]:
    """Fields of Inputs that a mode looks at: ``inputs.name`` anywhere in its modules."""
    names = {item.name for item in fields(Inputs)} | {"output", "head_branch", "history_file"}
    found = set()
    for path in modules_of(mode):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "inputs":
                found.add(node.attr)
    assert found <= names
    derived = {"output": (), "head_branch": ("branch", "branch_suffix"), "history_file": ("history",)}
    return {part for name in found for part in derived.get(name, (name,))} - {"mode"}


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "all"])
def test_each_step_is_given_what_its_mode_reads(mode: str) -> None:
    step = {"report": "report", "publish": "publish"}.get(mode, "measure")
    given = next(raw["env"] for raw in declared()["runs"]["steps"] if raw.get("id") == step)
    wanted = inputs_read_by(mode) - (set() if step != "measure" else {"token"})
    missing = {name for name in wanted if f"INPUT_{name.upper()}" not in given}
    assert not missing


def test_no_script_holds_an_expression_and_no_foreign_action_is_unpinned() -> None:
    for raw in declared()["runs"]["steps"]:
        assert "${{" not in raw.get("run", "")
        if "uses" in raw:
            assert re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40}", raw["uses"])


@pytest.fixture
def spied(job: Composite, tmp_path: Path) -> Composite:
    """action.yml as it is, over scripts that do nothing: only the wiring is looked at, and only `handover` is real."""
    action = tmp_path / "action-under-test"
    (action / "action").mkdir(parents=True)
    shutil.copy(ROOT / "action.yml", action / "action.yml")
    (action / "action" / "refuse.py").write_text("run=true\n")
    (action / "action" / "install.py").write_text(f"python={tmp_path / 'python'}\n")
    (action / "action" / "run.py").write_text("")
    # A "Python" that copies its script into the step's outputs; a mode leaves the folder that LEFT names.
    python = tmp_path / "python"
    handover = f'exec "{sys.executable}" "{ROOT}/action/run.py" handover'
    leave = (
        'mkdir -p "$INPUT_WORKING_DIRECTORY/.cudaforge" && cp -r "$LEFT" "$INPUT_WORKING_DIRECTORY/.cudaforge/action"'
    )
    python.write_text(
        f'#!/bin/sh\nif [ "$2" = handover ]; then {handover}; fi\n'
        f'case "$1" in *run.py) if [ -n "$LEFT" ]; then {leave}; fi;; esac\nexec cat "$1" >> "$GITHUB_OUTPUT"\n'
    )
    python.chmod(0o755)
    job.action = action
    return job


def test_the_token_is_in_no_step_that_runs_code_of_the_repository(spied: Composite, tmp_path: Path) -> None:
    for mode in ("guard", "forge", "all"):
        ran = spied.run({"mode": mode, "python": str(tmp_path / "python"), "shard": SHARD})
        assert ran.ok, ran.log
        holding = {name for name, step in ran.steps.items() if any(TOKEN in value for value in step.env.values())}
        assert holding == {"guard": {"report"}, "forge": set(), "all": {"publish"}}[mode]
        assert ran.steps["measure"].outcome == "success"
    report = spied.run({"mode": "report", "python": str(tmp_path / "python")})
    assert report.steps["measure"].outcome == "skipped"
    assert report.steps["report"].env["INPUT_TOKEN"] == TOKEN


def test_what_was_forged_is_published_though_some_of_it_failed(spied: Composite, tmp_path: Path) -> None:
    (spied.action / "action" / "run.py").unlink()  # the step that runs fails, and so does publishing after it
    given = {"python": str(tmp_path / "python"), "shard": SHARD}
    outcomes = {mode: spied.run({"mode": mode, **given}).steps["publish"].outcome for mode in ("all", "forge", "guard")}
    assert outcomes == {"all": "failure", "forge": "skipped", "guard": "skipped"}


def test_comment_off_leaves_the_token_out_of_a_guard_job(spied: Composite, tmp_path: Path) -> None:
    ran = spied.run({"mode": "guard", "comment": "off", "python": str(tmp_path / "python")})
    assert ran.steps["report"].outcome == "skipped"
    assert not any(TOKEN in value for step in ran.steps.values() for value in step.env.values())


def test_artifacts_travel_from_job_to_job_by_their_names(spied: Composite, tmp_path: Path) -> None:
    python = {"python": str(tmp_path / "python"), "working-directory": "sub"}
    results, left = spied.workspace / "sub/.cudaforge/action", tmp_path / "left"
    (left / "forged/01-cpu/.hidden").mkdir(parents=True)
    (left / "forged/01-cpu/shard.json").write_text("{}")
    (left / "forged/01-cpu/.hidden/file").write_text("x")
    spied.environ = {**spied.environ, "LEFT": str(left)}
    spied.run({"mode": "forge", "shard": SHARD, **python})
    shutil.rmtree(spied.workspace / "sub")
    spied.run({"mode": "forge", "shard": SHARD, "branch-suffix": "-nightly", **python})
    spied.environ = {**spied.environ, "LEFT": ""}
    assert sorted(path.name for path in spied.artifacts.iterdir()) == [
        "cudaforge-forged-01-cpu",
        "cudaforge_nightly-forged-01-cpu",
    ]
    shutil.rmtree(spied.workspace / "sub")
    spied.run({"mode": "publish", **python})
    assert (results / "forged/01-cpu/shard.json").is_file() and (results / "forged/01-cpu/.hidden/file").is_file()
    shutil.rmtree(spied.workspace / "sub")
    spied.run({"mode": "publish", "artifacts": "off", **python})
    assert not (spied.workspace / "sub").exists()


def test_what_a_commit_brings_as_a_result_is_handed_on_by_nobody(spied: Composite, tmp_path: Path) -> None:
    python = {"python": str(tmp_path / "python"), "shard": SHARD}
    results = spied.workspace / ".cudaforge/action"
    filled = {"guard": "guard", "plan": "plan", "forge": "forged", "verify": "verified", "publish": "verified"}
    for mode, name in filled.items():
        (results / name / "02-evil").mkdir(parents=True)
        (results / name / "02-evil/shard.json").write_text("{}")
        assert spied.run({"mode": mode, **python}).ok
        assert not (results / name).exists()
    assert not list(spied.artifacts.rglob("*.json"))


def test_results_that_would_lie_elsewhere_stop_the_job(spied: Composite, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere/action/guard"
    elsewhere.mkdir(parents=True)
    (elsewhere / "run.json").write_text("{}")
    (spied.workspace / ".cudaforge").symlink_to(tmp_path / "elsewhere")
    ran = spied.run({"mode": "guard", "python": str(tmp_path / "python")})
    assert not ran.ok and "is a link" in errors(ran)
    assert {name for name, step in ran.steps.items() if step.outcome == "success"} == {"safe", "install"}
    assert (elsewhere / "run.json").exists() and not spied.artifacts.exists()


# -- hostile inputs ----------------------------------------------------------------------------------------------------

HOSTILE = (
    "$(touch {flag})",
    "`touch {flag}`",
    "'; touch {flag}; '",
    '"; touch {flag}; "',
    "x\n::set-output name=branch::evil\n::add-path::/evil",
    "x\n##[set-env name=PATH]/evil",
    "${{{{ github.token }}}}",
    "\\$(touch {flag})\\",
    "--help",
    "${{IFS}}$PATH",
)


#: Checked before a name or a path is made of them: tested below.
NAMES = ("mode", "token", "python", "working-directory", "output-dir", "artifacts", "shard")


@pytest.mark.parametrize("shift", range(3))
def test_hostile_texts_reach_no_shell(spied: Composite, tmp_path: Path, shift: int) -> None:
    texts = [text.format(flag=tmp_path / "flag") for text in HOSTILE]
    free = [name for name in declared()["inputs"] if name not in (*NAMES, "branch-suffix", "status-context")]
    wanted = {name: texts[(place + 3 * shift) % len(texts)] for place, name in enumerate(free)}
    for mode in ("publish", "plan")[: 2 - shift % 2]:
        ran = spied.run({**wanted, "mode": mode, "python": str(tmp_path / "python")})
        assert ran.ok, ran.log
        assert not (tmp_path / "flag").exists() and ran.commands == []
        step = ran.steps["publish" if mode == "publish" else "measure"]
        given = {name: f"INPUT_{name.upper().replace('-', '_')}" for name in free}
        assert {name: step.env[key] for name, key in given.items() if key in step.env}.items() <= wanted.items()
        assert spied.environ == spied._environ and spied._path == []


@pytest.mark.parametrize("name", [name for name in NAMES if name != "token"])
def test_hostile_texts_where_they_become_paths_and_names_are_refused(
    spied: Composite, tmp_path: Path, name: str
) -> None:
    hostile = f"../$(touch {tmp_path / 'flag'})`touch {tmp_path / 'flag'}`\n::set-env name=A::b\n##[add-path]/evil"
    ran = spied.run({"mode": "forge", "shard": SHARD, "python": str(tmp_path / "python"), name: hostile})
    assert not ran.ok and ran.steps["measure"].outcome == "skipped"
    assert not (tmp_path / "flag").exists()
    assert {command.name for command in ran.commands} == {"error"}
    assert not any(step.with_ for step in ran.steps.values())


# -- refusals, for real ------------------------------------------------------------------------------------------------


def pull(head: str) -> dict[str, Any]:
    base = {"ref": "main", "repo": {"full_name": "octo/kernels"}}
    return {"pull_request": {"number": 3, "head": {"sha": "b" * 40, "repo": {"full_name": head}}, "base": base}}


def errors(ran: Ran) -> str:
    return "\n".join(command.data for command in ran.commands if command.name == "error")


def test_pull_request_target_is_refused_before_anything_is_installed(job: Composite) -> None:
    ran = on_event(job, "pull_request_target", pull("octo/kernels")).run({"python": sys.executable})
    assert not ran.ok and "pull_request_target" in errors(ran)
    assert [name for name, step in ran.steps.items() if step.outcome != "skipped"] == ["safe"]


def test_heads_from_forks_are_refused_or_skipped(job: Composite) -> None:
    on_event(job, "pull_request", pull("stranger/kernels"))
    refused = job.run({"python": sys.executable})
    assert not refused.ok and "fork" in errors(refused)
    skipped = job.run({"python": sys.executable, "fork-heads": "skip"})
    assert skipped.ok and {step.outcome for name, step in skipped.steps.items() if name != "safe"} == {"skipped"}


def test_a_python_that_is_not_there_says_so(job: Composite) -> None:
    ran = job.run({"python": "/no/such/python"})
    assert not ran.ok and "input python" in errors(ran)


def test_a_python_without_torch_cannot_guard(job: Composite, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o755)
    ran = job.run({"python": str(bare)})
    assert not ran.ok and "torch" in errors(ran) and ran.steps["install"].outcome == "failure"


# -- the real scripts --------------------------------------------------------------------------------------------------


def test_a_wrong_input_ends_as_one_clear_error(job: Composite) -> None:
    ran = job.run({"mode": "plan", "python": sys.executable, "max-shards": "300\n::set-output name=a::b"})
    assert not ran.ok and "max-shards" in errors(ran) and "256" in errors(ran)
    assert [command.name for command in ran.commands] == ["error"]


def test_a_plan_s_outputs_and_its_artifact_arrive(job: Composite) -> None:
    (job.workspace / "layers.py").write_text(layers("Norm"))
    # Nothing of the checkout is imported, whatever it calls itself.
    for name in ("yaml", "json", "cudaforge_action", "sitecustomize"):
        (job.workspace / f"{name}.py").write_text("raise SystemExit('code of the checkout ran')\n")
    job.environ = {**job.environ, "OPENAI_API_KEY": "sk-1234567890", "MY_SECRET": "none"}
    ran = job.run({"mode": "plan", "python": sys.executable, "runners": "[{labels: [lab], device: cpu}]"})
    assert ran.ok, ran.log
    (row,) = json.loads(ran.outputs["matrix"])["include"]
    assert row["runs-on"] == ["lab"] and json.loads(row["shard"])["targets"] == ["layers.py::Norm"]
    assert (ran.outputs["shards"], ran.outputs["targets"]) == ("1", "1")
    assert "layers.py" in ran.steps["measure"].summary
    assert (job.artifacts / "cudaforge-plan" / "plan.json").is_file()
    assert not any(TOKEN in value for step in ran.steps.values() for value in step.env.values())
    assert ran.steps["measure"].log.masks == ["sk-1234567890"]
