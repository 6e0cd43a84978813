"""The reusable workflows and the examples: what they hand on is what there is, and secrets are where they belong."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cudaforge_action.inputs import MATRIX_JOBS_LIMIT, Inputs, read

ROOT = Path(__file__).resolve().parents[2]
REUSABLE = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
EXAMPLES = [path for path in sorted((ROOT / "examples/workflows").glob("*.yml")) if path.name != "gitlab-ci.yml"]
ACTION = "./.cudaforge/ci"


def loaded(path: Path) -> dict[str, Any]:
    data = yaml.safe_load(path.read_text("utf-8"))
    # YAML 1.1 reads the key `on` as true.
    return {("on" if key is True else key): value for key, value in data.items()}


def steps(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, job in loaded(path)["jobs"].items():
        for step in job.get("steps", ()):
            yield name, step


@pytest.mark.parametrize("path", [*REUSABLE, *EXAMPLES], ids=lambda path: path.name)
def test_nothing_is_granted_to_all_jobs_and_every_foreign_action_is_pinned(path: Path) -> None:
    data = loaded(path)
    assert data["permissions"] == {}
    assert all("permissions" in job for job in data["jobs"].values())
    for line in path.read_text("utf-8").splitlines():
        if match := re.match(r"\s*(?:- )?uses: (\S+)", line):
            used = match.group(1)
            ours = used == ACTION or used.startswith("pytest-cudaforge/pytest-cudaforge/.github/workflows/")
            assert ours or re.search(r"uses: [\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$", line), line
    for _, step in steps(path):
        assert "${{" not in step.get("run", "")
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False


@pytest.mark.parametrize("path", REUSABLE, ids=lambda path: path.name)
def test_the_action_is_given_inputs_that_it_has_from_inputs_that_there_are(path: Path) -> None:
    declared = set(yaml.safe_load((ROOT / "action.yml").read_text("utf-8"))["inputs"])
    inputs = set(loaded(path)["on"]["workflow_call"]["inputs"])
    for job, step in steps(path):
        if step.get("uses") == ACTION:
            assert set(step["with"]) <= declared, job
    used = set(re.findall(r"\binputs\.([\w-]+)", path.read_text("utf-8")))
    assert used == inputs


@pytest.mark.parametrize("path", REUSABLE, ids=lambda path: path.name)
def test_defaults_of_the_workflows_are_valid_inputs(path: Path) -> None:
    wanted = {item.replace("_", "-") for item in Inputs.__dataclass_fields__}
    for name, spec in loaded(path)["on"]["workflow_call"]["inputs"].items():
        if name in wanted:
            text = str(spec["default"]).lower() if spec["type"] == "boolean" else str(spec["default"])
            field = name.replace("-", "_")
            found = read({"INPUT_MODE": "plan", f"INPUT_{field.upper()}": text}, ())
            assert name == "fork-heads" or getattr(found, field) == getattr(Inputs("plan"), field), name


def test_each_secret_and_each_write_permission_is_in_one_job_only() -> None:
    for path in REUSABLE:
        for name, job in loaded(path)["jobs"].items():
            text = yaml.safe_dump(job)
            writes = {key for key, value in job["permissions"].items() if value == "write"}
            assert ("secrets.llm-key" in text) == (name == "forge")
            assert ("secrets.app-private-key" in text) == (name == "publish")
            assert ("github.token" in text) == (name == "publish")
            assert bool(writes) == (name in ("publish", "report"))
            # What runs code of the repository neither writes nor reads more than the code.
            assert name in ("publish", "report") or job["permissions"] == {"contents": "read"}
            hosted = job["runs-on"] == "${{ inputs.hosted }}"
            assert hosted == (name in ("plan", "publish", "report"))


def test_every_job_of_the_matrix_has_an_output_of_its_own_to_vouch_by() -> None:
    """Outputs of a matrix are put together by name, empty ones left out; two of one name would overwrite each other."""
    jobs = loaded(ROOT / ".github/workflows/forge.yml")["jobs"]
    assert jobs["verify"]["outputs"] == {
        f"d{place}": f"${{{{ strategy.job-index == {place} && steps.verify.outputs.digests || '' }}}}"
        for place in range(MATRIX_JOBS_LIMIT)
    }
    assert [step["id"] for step in jobs["verify"]["steps"] if step.get("uses") == ACTION] == ["verify"]
    guard = loaded(ROOT / ".github/workflows/guard.yml")["jobs"]["guard"]
    assert guard["outputs"]["digests"] == "${{ steps.guard.outputs.digests }}"


def test_who_holds_a_token_asks_the_job_before_for_its_word() -> None:
    told = {
        name: step["with"].get("needs")
        for path in REUSABLE
        for name, step in steps(path)
        if step.get("uses") == ACTION and step["with"]["mode"] in ("publish", "report")
    }
    assert told == {"publish": "${{ toJSON(needs.verify) }}", "report": "${{ toJSON(needs.guard) }}"}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_call_workflows_that_there_are_with_what_they_take(path: Path) -> None:
    for job in loaded(path)["jobs"].values():
        owner, _, rest = job["uses"].partition("/.github/workflows/")
        assert owner == "pytest-cudaforge/pytest-cudaforge"
        called = loaded(ROOT / ".github/workflows" / rest.partition("@")[0])
        takes = called["on"]["workflow_call"]
        assert set(job.get("with", {})) <= set(takes["inputs"])
        assert set(job.get("secrets", {})) <= set(takes.get("secrets", {}))
        granted = job["permissions"]
        for inner in called["jobs"].values():
            assert all(granted.get(key) in (value, "write") for key, value in inner["permissions"].items())
        if "runners" in job.get("with", {}):
            assert read({"INPUT_MODE": "plan", "INPUT_RUNNERS": job["with"]["runners"]}, ()).runners
    assert "concurrency" in loaded(path)


def test_gitlab_s_jobs_run_modes_with_inputs_that_there_are() -> None:
    text = (ROOT / "examples/workflows/gitlab-ci.yml").read_text("utf-8")
    commands = re.findall(r"- cudaforge-ci (.*)", text)
    assert [read({}, re.sub(r'"\$[^"]*"', "main", command).split()).mode for command in commands] == [
        "guard",
        "report",
        "all",
    ]


def test_gitlab_s_variables_are_no_settings_and_reach_no_job_with_a_token() -> None:
    jobs = loaded(ROOT / "examples/workflows/gitlab-ci.yml")
    text = yaml.safe_dump(jobs)
    # pytest_cudaforge refuses a variable of its prefix that it does not know.
    assert set(re.findall(r"CUDAFORGE_\w+", text)) <= {"CUDAFORGE_TOKEN"}
    assert "dotenv" not in text
