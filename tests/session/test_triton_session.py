"""`languages: [triton]`: a session with a table of verdicts, from the Coder's reply to the manifest."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from flow_evaluator import CORRECTION, OPTIMIZATION, TableEvaluator
from flow_records import make_target

from pytest_cudaforge import config as configs
from pytest_cudaforge.chat.scripted import ScriptedModel
from pytest_cudaforge.errors import ConfigError
from pytest_cudaforge.languages.binary import Binary, CompiledLaunch, KernelInfo
from pytest_cudaforge.languages.cache import BuildCache
from pytest_cudaforge.languages.published import FILE_NAME, binary_digest, decode_binaries
from pytest_cudaforge.records import Build, Candidate, DeviceFacts, Evaluation, Isolation, KernelResources, Target
from pytest_cudaforge.runtime.manifest import Manifest
from pytest_cudaforge.session import Models, SessionResult, forge_all

KEY = "ab" * 32
NAME = "scale<*fp32:16, num_warps=4, num_stages=3>"
BINARY = Binary(
    "triton",
    "sm_90",
    (),
    b"cubin",
    (KernelInfo(NAME, "scale", ("float*",), KernelResources(NAME), CompiledLaunch(128, 0, 1, 2, 0, 5)),),
)


def reply(verdict: str) -> str:
    plan = "def plan(x):\n    return x"
    return f"```python kernel.py\n# {verdict}\n```\n```python plan.py\n{plan}\n```\n"


@dataclass
class TritonTable(TableEvaluator):
    device: DeviceFacts = field(default_factory=lambda: DeviceFacts("cuda", "H200", "sm_90"))
    isolation: Isolation = field(default_factory=lambda: Isolation("A"))
    builds: BuildCache | None = None

    def facts(self, target: Target) -> Any:
        return replace(super().facts(target), languages=("triton",))

    def evaluate(self, candidate: Candidate, target: Target, **how: Any) -> Evaluation:
        assert candidate.language == "triton" and {name for name, _ in candidate.files} == {"kernel.py", "plan.py"}
        text = candidate.file("kernel.py").replace("# ", "// ")
        found = super().evaluate(Candidate.of("cpp", {"kernel.cpp": text}), target, **how)
        build = Build("sm_90", 0.2, False, binaries=((KEY, binary_digest(BINARY)),))
        return replace(found, candidate=candidate.digest, language="triton", build=build)


def forged(root: Path, languages: tuple[str, ...], *, cached: bool = True) -> SessionResult:
    builds = BuildCache(root / "builds")
    if cached:
        builds.put(KEY, BINARY)
    script = {"coder": [reply("BUILD_ERROR"), reply("PASSED 2.5")], "judge": [CORRECTION, OPTIMIZATION]}
    model = ScriptedModel(script)
    config = replace(configs.load({"rounds": 2}, root=root), languages=languages)
    evaluator = TritonTable(builds=builds)
    return forge_all([make_target(root)], config, evaluator, models=Models(model, model))


def test_a_triton_winner_is_published_with_its_binaries(tmp_path: Path) -> None:
    (trace,) = forged(tmp_path, ("triton",)).traces
    assert (trace.language, trace.outcome) == ("triton", "forged"), trace.reason
    manifest = tmp_path / "forged" / "manifest.json"
    (entry,) = Manifest.load(manifest).entries
    assert (entry.language, entry.arch) == ("triton", "sm_90")
    sources = entry.sources(manifest)
    assert set(sources) == {"kernel.py", "plan.py", FILE_NAME} and decode_binaries(sources[FILE_NAME]) == (BINARY,)


def test_a_target_of_triton_alone_is_not_forged_in_cuda(tmp_path: Path) -> None:
    assert [trace.outcome for trace in forged(tmp_path, ("cuda",)).traces] == ["skipped"]


def test_a_winner_whose_binaries_are_gone_is_not_published(tmp_path: Path) -> None:
    (trace,) = forged(tmp_path, ("triton",), cached=False).traces
    assert trace.outcome == "error" and "gone from the build cache" in trace.reason
    assert not (tmp_path / "forged" / "manifest.json").exists()


def test_on_a_cpu_it_is_a_clear_error(tmp_path: Path) -> None:
    config = replace(configs.load({"rounds": 2}, root=tmp_path), languages=("triton",))
    nobody = Models(ScriptedModel({}), ScriptedModel({}))
    with pytest.raises(ConfigError, match="triton cannot run on"):
        forge_all([make_target(tmp_path)], config, TableEvaluator(), models=nobody)
