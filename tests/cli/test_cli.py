"""`cudaforge list | doctor | evaluate`: exit status, messages, and the JSON contract."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_cudaforge import cli, doctor
from pytest_cudaforge.errors import UsageError
from pytest_cudaforge.records import Candidate, Evaluation, Isolation, Ratio, Sample, Status, Timing, WorkloadTiming

LAYERS = """
import torch
from torch import nn
from pytest_cudaforge import forge_target

@forge_target(inputs=lambda: [torch.randn(32, 512)])
class Twice(nn.Module):
    def forward(self, x):
        return x * 2

@forge_target(inputs=lambda: [torch.randn(8)])
class Constant(nn.Module):
    def forward(self, x):
        return torch.ones(8)
"""
PLAN = """
from pytest_cudaforge.plan import empty, launch

def plan(module, x):
    y = empty(x.shape, x.dtype)
    launch("twice", args=(x, y, x.numel()))
    return y
"""
KERNEL = """
extern "C" void twice(const float* x, float* y, long long n) {
  for (long long i = 0; i < n; ++i) y[i] = x[i] * FACTOR;
}
"""


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "layers.py").write_text(LAYERS)
    for name, factor in (("right", "2.0f"), ("wrong", "2.1f"), ("broken", "2.0f;;}{")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "plan.py").write_text(PLAN)
        (folder / "kernel.cpp").write_text(KERNEL.replace("FACTOR", factor))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def said(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    return captured.out + captured.err


# -- list ----------------------------------------------------------------------------------------------------------


def test_list_prints_ids(repo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list"]) == 0
    assert capsys.readouterr().out.splitlines() == ["layers.py::Twice", "layers.py::Constant"]


def test_list_ids_do_not_depend_on_the_working_directory(repo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.chdir(repo / "right")
    assert cli.main(["list", ".."]) == 0
    assert "layers.py::Twice" in capsys.readouterr().out.splitlines()


def test_list_as_json(repo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "--json", "layers.py"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [target["qualname"] for target in data["targets"]] == ["Twice", "Constant"] and data["problems"] == []


def test_list_uses_forge_paths(repo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (repo / "other").mkdir()
    (repo / "cudaforge.yaml").write_text("forge_paths: [other]\n")
    assert cli.main(["list"]) == 0
    assert "no targets in 0 Python files" in said(capsys)


def test_list_shows_problems_and_fails(repo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (repo / "bad.py").write_text("from pytest_cudaforge import forge_target\n@forge_target\nclass A: ...\n")
    assert cli.main(["list"]) == 1
    assert "bad.py:3: A is not an nn.Module" in said(capsys)


def test_list_of_nothing(repo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "nowhere"]) == 2
    assert "nowhere does not exist" in said(capsys)


def test_list_imports_neither_pytest_nor_torch(repo: Path) -> None:
    code = (
        "import sys; from pytest_cudaforge.cli import main; main(['list']);"
        "print([name for name in ('torch', 'pytest', 'openai', 'layers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_as_a_module_and_into_a_closed_pipe(repo: Path) -> None:
    command = f"{sys.executable} -m pytest_cudaforge list | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stderr == ""


# -- bad input of evaluate -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere.py::A", "right"), "nowhere.py is not a file"),
        (("layers.py::Nothing", "right"), "holds no target Nothing"),
        (("layers.py", "right"), "layers.py holds: Twice, Constant"),
        (("layers.py::Twice", "nowhere"), "nowhere is no candidate"),
        (("layers.py::Twice", "."), "plan.py beside kernel.cpp or kernel.cu or kernel.py"),
        (("layers.py::Twice", "layers.py"), "defines no ModelNew"),
        (("layers.py::Twice", "right", "--json", "/nowhere/x.json"), "cannot be written"),
        (("layers.py::Twice", "right", "--device", "tpu"), "cuda:<index>"),
        (("layers.py::Twice", "right", "--config", "none.yaml"), "none.yaml does not exist"),
    ],
)
def test_bad_input(repo: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str) -> None:
    assert cli.main(["evaluate", *arguments]) == 2
    text = said(capsys)
    assert message in text and text.startswith("cudaforge: ")


def test_a_problem_of_the_target_is_said(repo: Path) -> None:
    (repo / "bad.py").write_text("from pytest_cudaforge import forge_target\n@forge_target\nclass A: ...\n")
    with pytest.raises(UsageError, match=r"A is not an nn\.Module"):
        cli.target_named("bad.py::A")


def test_a_candidate_without_plan_or_not_text(repo: Path) -> None:
    (repo / "right" / "plan.py").unlink()
    with pytest.raises(UsageError, match=r"plan\.py cannot be read"):
        cli.read_candidate(repo / "right")
    (repo / "wrong" / "kernel.cpp").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="not UTF-8"):
        cli.read_candidate(repo / "wrong")
    (repo / "broken" / "kernel.cpp").write_bytes(b" " * (cli.MAX_SOURCE_BYTES + 1))
    with pytest.raises(UsageError, match="larger than 4 MiB"):
        cli.read_candidate(repo / "broken")


def test_candidates(repo: Path) -> None:
    assert cli.read_candidate(repo / "right").language == "cpp"
    (repo / "right" / "kernel.cpp").rename(repo / "right" / "kernel.cu")
    assert [name for name, _ in cli.read_candidate(repo / "right").files] == ["kernel.cu", "plan.py"]
    (repo / "right" / "kernel.cu").rename(repo / "right" / "kernel.py")
    assert cli.read_candidate(repo / "right").language == "triton"
    (repo / "new.py").write_text("class ModelNew(nn.Module): ...\n")
    assert cli.read_candidate(repo / "new.py") == Candidate.of("module", {"new.py": "class ModelNew(nn.Module): ...\n"})
    (repo / "configured").mkdir()
    (repo / "configured" / "options.json").write_text("{}\n")
    found = Candidate.of("compiler", {"options.json": "{}\n"})
    assert cli.read_candidate(repo / "configured") == cli.read_candidate(repo / "configured" / "options.json") == found


def test_target_names(repo: Path) -> None:
    assert cli.target_named("layers.py::Twice").id == "layers.py::Twice"
    assert cli.target_named("layers.py::Twice::forge").id == "layers.py::Twice"
    (repo / "swish.py").write_text("class Model(M): ...\ndef get_inputs(): ...\ndef get_init_inputs(): ...\n")
    assert cli.target_named("swish.py").kind == "kernelbench"


# -- the contract --------------------------------------------------------------------------------------------------

SAMPLE = Sample(100.0, 90.0, 110.0, 20, 5)
EVALUATION = Evaluation(Status.PASSED, "correct", "digest", "a.py::A", Isolation("B", ("native code",)), work="kernel")


def test_document_of_a_timed_pass() -> None:
    workload = WorkloadTiming("default", SAMPLE, SAMPLE, None, Ratio(1.5, 1.4, 1.6), None, 1)
    timing = Timing("faster", "supervisor", 1.5, None, (workload,), own_share=1.0)
    data = cli.evaluation_document(Evaluation(**{**vars(EVALUATION), "timing": timing}))
    assert (data["status"], data["reason"], data["isolation"]) == ("PASSED", "correct", "B")
    assert data["work"] == {"label": "kernel", "own_share": 1.0}
    assert data["speedup"] == {"eager": 1.5, "compile": None}
    assert data["timing"]["workloads"][0]["vs_eager"]["speedup"] == 1.5
    json.dumps(data, allow_nan=False)


def test_document_without_timing_has_the_same_keys() -> None:
    data = cli.evaluation_document(EVALUATION)
    wanted = {"status", "reason", "isolation", "work", "speedup", "timing", "verification"}
    assert wanted <= data.keys()
    assert data["timing"] is None and data["speedup"] == {"eager": None, "compile": None}
    failed = Evaluation(Status.BUILD_ERROR, "no", "digest", "a.py::A", Isolation("B"))
    assert cli.evaluation_document(failed).keys() == data.keys() and cli.evaluation_document(failed)["work"] is None


# -- evaluate, for real (other verdicts: test_skill.py) -------------------------------------------------------------


def evaluate(*arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "pytest_cudaforge", "evaluate", *arguments, "--device", "cpu"]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


def test_a_right_candidate_passes(repo: Path) -> None:
    done = evaluate("layers.py::Twice", "right", "--json", "verdict.json", "--blocks")
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads((repo / "verdict.json").read_text())
    assert data["status"] == "PASSED" and data["work"]["label"] == "kernel"
    assert data["speedup"]["eager"] > 0 and data["timing"]["decision"] in (
        "faster",
        "slower",
        "same",
        "inconclusive",
        "disturbed",
    )
    assert data["verification"]["cases"] and data["isolation"] in "ABC"
    (workload,) = data["timing"]["workloads"]
    assert {name for name, _ in workload["blocks"][0]["ns"]} >= {"candidate", "eager"}
    assert "vs eager" in done.stdout and "cases right" in done.stdout


@pytest.mark.parametrize(("flags", "sanitize"), [([], None), (["--sanitize"], True), (["--no-sanitize"], False)])
def test_compute_sanitizer_looks_where_it_is_unless_somebody_says_otherwise(
    flags: list[str], sanitize: bool | None
) -> None:
    assert cli._parser().parse_args(["evaluate", "layers.py::Twice", "right", *flags]).sanitize is sanitize


def test_a_target_that_a_trivial_kernel_passes_is_rejected(repo: Path) -> None:
    done = evaluate("layers.py::Constant", "right", "--no-timing")
    assert done.returncode == 1 and "REJECTED" in done.stdout and "--no-lint" in done.stdout, done.stderr


def test_a_target_that_raises_is_a_situation(repo: Path) -> None:
    (repo / "layers.py").write_text(LAYERS.replace("return x * 2", "return x.no_such_thing"))
    done = evaluate("layers.py::Twice", "right")
    assert done.returncode == 2 and "no_such_thing" in done.stderr and "Traceback" not in done.stderr


# -- lint, for real ------------------------------------------------------------------------------------------------


def test_lint_says_what_a_trivial_kernel_would_pass(repo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["lint", "layers.py", "--device", "cpu", "--json", "lint.json"]) == 1
    assert "layers.py::Twice: ok" in said(capsys)
    data = json.loads((repo / "lint.json").read_text())
    assert data["format"] == "cudaforge-lint" and data["problems"] == []
    status = {target["target"]: target["status"] for target in data["targets"]}
    assert status == {"layers.py::Twice": "ok", "layers.py::Constant": "refused"}
    (finding,) = data["targets"][1]["findings"]
    assert (finding["workload"], finding["kind"], finding["refuses"]) == ("default", "constant", True)
    assert finding["text"].startswith("a constant would pass; right on all of another draw, shifted inputs")


def test_lint_of_nothing(repo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (repo / "empty").mkdir()
    assert cli.main(["lint", "empty"]) == 0 and "no targets" in capsys.readouterr().err


def test_lint_of_what_cannot_be_run_goes_on_with_the_rest(repo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (repo / "layers.py").write_text(LAYERS.replace("return x * 2", "return x.no_such_thing"))
    assert cli.main(["lint", "--device", "cpu"]) == 1
    text = capsys.readouterr().out
    assert "layers.py::Twice: cannot be run" in text and "no_such_thing" in text
    assert "layers.py::Constant: refused\n  refused  default: a constant would pass" in text


@pytest.mark.parametrize(
    "arguments", [["nowhere"], ["layers.py::Nothing"], ["layers.py", "--json", "no/such/folder.json"]]
)
def test_lint_usage(repo: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert cli.main(["lint", *arguments, "--device", "cpu"]) == 2 and "cudaforge: " in capsys.readouterr().err


# -- doctor --------------------------------------------------------------------------------------------------------


def test_doctor_says_everything_and_never_a_key(tmp_path: Path) -> None:
    findings = doctor.examine(tmp_path, {**os.environ, "OPENAI_API_KEY": "sk-very-secret"})
    names = [finding.name for finding in findings]
    for name in (
        "torch",
        "compiler",
        "OpenMP",
        "GPU",
        "NVRTC",
        "ncu",
        "perf",
        "namespaces",
        "seccomp",
        "Landlock",
        "disk",
    ):
        assert name in names
    text = doctor.findings_text(findings)
    assert "OPENAI_API_KEY is set" in text and "secret" not in text
    assert "C++ kernels for this CPU: yes" in text
    assert all(finding.works or finding.remedy for finding in findings)


def test_doctor_without_a_compiler(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "pytest_cudaforge", "doctor"]
    environment = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    for wanted in ("MISS  compiler", "MISS  OpenMP", "OPENAI_API_KEY is not set", "kernels for this CPU: no", "g++"):
        assert wanted in done.stdout
    assert "to do: export OPENAI_API_KEY" in done.stdout and "note  git" in done.stdout
    assert "without a model `pytest --forge` searches torch.compile's options" in done.stdout


def test_doctor_with_a_broken_configuration(tmp_path: Path) -> None:
    (tmp_path / "cudaforge.yaml").write_text("ruonds: 3\n")
    findings = {finding.name: finding for finding in doctor.examine(tmp_path, {})}
    assert "ruonds" in findings["configuration"].text and "unknown until" in findings["key"].text


def test_doctor_of_a_replaying_configuration(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("")
    (tmp_path / "cudaforge.yaml").write_text(
        "chat: {coder: {provider: replay}, judge: {provider: replay}, replay: {paths: [a.jsonl]}}\n"
    )
    findings = {finding.name: finding for finding in doctor.examine(tmp_path, {})}
    assert findings["key"].works and "not needed" in findings["key"].text


def test_doctor_command(repo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = cli.main(["doctor", "--json"])
    findings = json.loads(capsys.readouterr().out)
    assert status == (0 if all(finding["works"] or finding["optional"] for finding in findings) else 1)
