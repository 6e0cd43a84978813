"""A compiler configuration in production: real torch.compile on the CPU."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forged_layers import Repo

from pytest_cudaforge import apply
from pytest_cudaforge.evaluation.generated import captured, kernels_of
from pytest_cudaforge.languages import load
from pytest_cudaforge.records import Guard
from pytest_cudaforge.runtime.configuration import FILE_NAME, LANGUAGE
from pytest_cudaforge.runtime.dispatch import ForgeWarning
from pytest_cudaforge.runtime.manifest import EntryFile

pytestmark = pytest.mark.skipif(bool(load("cpp").availability()), reason=load("cpp").availability() or "g++ is here")

LAYERS = """
import torch
from torch import nn
from pytest_cudaforge import forge_target

@forge_target(inputs=lambda: [torch.randn(4, 8)])
class Gain(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((8,), 3.0))

    def forward(self, x):
        return (x * self.weight).relu()
"""
X = torch.randn(4, 8)
GUARD = Guard(contiguous_only=True, drawn_shapes_only=True)


def configured(root: Path, text: str = '{"cpp.threads": 1}') -> Repo:
    repo = Repo(root, LAYERS)
    digest = hashlib.sha256(text.encode()).hexdigest()
    entry = repo.forge(
        "Gain", "", "", (X,), language=LANGUAGE, guard=GUARD, files=(EntryFile(FILE_NAME, digest),), work="compiler"
    )
    (repo.manifest.parent / entry.directory / FILE_NAME).write_text(text)
    return repo


@pytest.fixture(scope="module")
def headers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled once for all tests here: they take longer than all the rest."""
    return tmp_path_factory.mktemp("inductor")


@pytest.fixture(autouse=True)
def _fresh_compiler(headers: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import torch._inductor.config

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(headers))
    torch._dynamo.reset()
    with torch._inductor.config.patch({"fx_graph_cache": False}):
        yield


def reasons(report: Any) -> str:
    return "; ".join(report.fallbacks.get("", {}))


def test_calls_as_drawn_are_compiled_and_others_go_to_the_reference(tmp_path: Path) -> None:
    module = configured(tmp_path).module.Gain().eval()
    report = apply(module)
    assert "compiler configuration cpp.threads=1" in str(report)
    from torch._inductor.graph import GraphLowering

    hook = vars(GraphLowering)["save_output_code"]
    with captured() as compiled, torch.no_grad():
        assert torch.equal(module(X), (X * 3).relu())
        module.weight.mul_(2)  # nothing of the weights is compiled in
        assert torch.equal(module(X), (X * 6).relu())
        assert reasons(report) == "" and len(compiled) == 1
        assert torch.equal(module(X[:2]), (X[:2] * 6).relu())
        assert "verified for (4, 8) only" in reasons(report)
        module.train()
        module(X)
        assert "the module is in train mode" in reasons(report)
    module.eval()(X).sum().backward()
    assert "called without no_grad" in reasons(report)
    assert len(compiled) == 1 and vars(GraphLowering)["save_output_code"] is hook
    assert 'extern "C"' in kernels_of(compiled)


def test_where_the_compiler_fails_the_reference_answers_and_one_warning_says_so(tmp_path: Path) -> None:
    module = configured(tmp_path).module.Gain().eval()
    report = apply(module)
    with torch.no_grad(), torch._inductor.config.patch({"cpp.cxx": ("/bin/false",)}):
        with pytest.warns(ForgeWarning, match="torch.compile failed"):
            assert torch.equal(module(X), (X * 3).relu())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            module(X)
    assert "torch.compile failed" in reasons(report)


@pytest.mark.parametrize("text", ['{"freezing": true}', '{"cpp.threads": 2}'], ids=["not an option", "edited"])
def test_a_configuration_that_was_not_verified_is_not_used(tmp_path: Path, text: str) -> None:
    repo = configured(tmp_path, '{"freezing": true}' if "freezing" in text else '{"cpp.threads": 1}')
    (path,) = repo.manifest.parent.rglob(FILE_NAME)
    path.write_text(text)
    module = repo.module.Gain().eval()
    with pytest.warns(ForgeWarning):
        report = apply(module)
    assert not report.swapped and report.kept
    assert torch.equal(module(X), (X * 3).relu())
