"""The search through session, loop, store and publishing; its verdicts are a table's."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from flow_evaluator import SAMPLE, TableEvaluator
from flow_records import make_evaluation, make_target

from pytest_cudaforge import config as configs
from pytest_cudaforge.records import Baseline, Candidate, Evaluation, Status, Target
from pytest_cudaforge.runtime.configuration import FILE_NAME
from pytest_cudaforge.runtime.manifest import Manifest
from pytest_cudaforge.session import SessionResult, forge_all


@dataclass
class OptionsEvaluator(TableEvaluator):
    """Configurations with one thread are fast, those in C++ fail, others gain nothing."""

    compiles: bool = True

    def baselines(self, target: Target, language: str = "") -> tuple[Baseline, ...]:
        assert language == "compiler"
        line = Baseline("default", SAMPLE, SAMPLE, "", 10.0, 256, 0)
        return (line if self.compiles else replace(line, compile=None, compile_note="torch.compile failed: no"),)

    def evaluate(self, candidate: Candidate, target: Target, **more: object) -> Evaluation:
        options = json.loads(candidate.file(FILE_NAME))
        self.evaluations[candidate.digest] += 1
        status = Status.RUNTIME_ERROR if "cpp_wrapper" in options else Status.PASSED
        speedup = 1.5 if "cpp.threads" in options and len(options) == 1 else 1.0
        verdict = make_evaluation(candidate, status, speedup, compiled=speedup, target=target.id)
        return replace(verdict, work="compiler", language="compiler", isolation=self.isolation)


def run(root: Path, evaluator: OptionsEvaluator, rounds: int) -> SessionResult:
    options = {"rounds": rounds, "chat.coder.provider": "compiler"}
    bandwidth = replace(evaluator.device, bandwidth_bytes_per_s=2.56e10)
    return forge_all([make_target(root)], configs.load(options, root=root), replace(evaluator, device=bandwidth))


def test_a_configuration_is_searched_resumed_and_published_as_data(tmp_path: Path) -> None:
    evaluator = OptionsEvaluator()
    first = run(tmp_path, evaluator, 1).traces[0]
    (trace,) = run(tmp_path, evaluator, 10).traces
    assert trace.rounds[:1] == first.rounds and trace.language == "compiler"
    tried = [json.loads(entry.candidate.file(FILE_NAME)) for entry in trace.rounds if entry.candidate]
    assert tried[0] == {"cpp.threads": 1} and all(options["cpp.threads"] == 1 for options in tried)
    assert [entry.evaluation.status.value for entry in trace.rounds[:2] if entry.evaluation] == [
        "PASSED",
        "RUNTIME_ERROR",
    ]
    assert sorted(evaluator.evaluations.values()) == [1, 1, 1, 3], "each once, the winner afresh in either run"
    assert trace.rounds[0].notes == ("bound by short calls: one thread: none to wake and to wait for",)
    assert trace.outcome == "forged" and trace.reason.startswith("the configuration cpp.threads=1 (round 1) is 1.50x")
    assert "no configuration is left to try (4 were" in trace.reason
    (entry,) = Manifest.load(tmp_path / "forged" / "manifest.json").entries
    assert (entry.language, entry.work, [file.name for file in entry.files]) == ("compiler", "compiler", [FILE_NAME])
    assert entry.directory.endswith("/cpu-compiler")
    run_dir = next((tmp_path / ".cudaforge" / "runs").glob("*/compiler"))
    assert not list(run_dir.rglob("*prompt*")) and not list(run_dir.rglob("*reply*"))


def test_what_torch_does_not_compile_is_skipped(tmp_path: Path) -> None:
    evaluator = OptionsEvaluator(compiles=False)
    (trace,) = run(tmp_path, evaluator, 3).traces
    assert (trace.outcome, trace.rounds) == ("skipped", ())
    assert "torch.compile failed: no" in trace.reason
