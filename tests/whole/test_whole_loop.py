"""The whole loop with nothing stood in for but the model: real oracle, compiler, sandbox, clock."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from evidence_numbers import foreign

from pytest_cudaforge import config as configs
from pytest_cudaforge.chat.scripted import ScriptedModel
from pytest_cudaforge.discovery import discover
from pytest_cudaforge.evaluation.evaluator import Evaluator
from pytest_cudaforge.runtime.manifest import Manifest
from pytest_cudaforge.session import Models, forge_all
from pytest_cudaforge.wiring import open_evaluator

TARGET = """
import torch
from torch import nn
from pytest_cudaforge import forge_target

@forge_target(inputs=lambda: [torch.randn(64, 1024)], init=lambda: [1024])
class PeakNorm(nn.Module):
    def __init__(self, cols, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(cols))

    def forward(self, x):
        peak = x.abs().amax(dim=-1, keepdim=True)
        return x / (peak + self.eps) * self.weight
"""

KERNEL = """
#include <cmath>
extern "C" void peak_norm(const float* __restrict__ x, const float* __restrict__ w, float* __restrict__ y,
                          long long rows, float eps) {
%(parallel)s
  for (long long row = 0; row < rows; ++row) {
    const float* in = x + row * COLS;
    float peak = 0.0f;
#pragma omp simd reduction(max : peak)
    for (int c = 0; c < COLS; ++c) { float m = std::fabs(in[c]); peak = m > peak ? m : peak; }
    const float divisor = peak + eps;
    for (int c = 0; c < COLS; ++c) y[row * COLS + c] = in[c] / divisor %(scale)s;
  }
}
"""

PLAN = """
from pytest_cudaforge.plan import empty, launch

def plan(module, x):
    cols = x.shape[-1]
    y = empty(x.shape, x.dtype)
    launch("peak_norm", args=(x, module.weight, y, x.numel() // cols, module.eps), constants={"COLS": cols})
    return y
"""


def reply(kernel: str, plan: str = PLAN) -> str:
    return f"```cpp kernel.cpp\n{kernel}\n```\n\n```python plan.py\n{plan}\n```\n"


GOOD = {"parallel": "", "scale": "* w[c]"}
CODER = [
    reply(KERNEL % {**GOOD, "scale": "* weight[c]"}),
    reply(KERNEL % {**GOOD, "scale": ""}),
    reply(KERNEL % GOOD),
    reply(KERNEL % {**GOOD, "parallel": "#pragma omp parallel for"}),
    # Two optimizations with their corrections, and a third one, that all come to nothing: no plan.
    *(reply(KERNEL % GOOD, f"{number}") for number in range(7)),
]
CORRECTION = '{"issue": "wrong", "why": "it is", "fix": "mend it"}'


def optimization(bottleneck: str, method: str, plan: str) -> str:
    told = {"bottleneck": bottleneck, "method": method, "place": "peak_norm", "plan": plan}
    return json.dumps({**told, "expected_speedup": 1.8, "cites": ["1 launch"]})


JUDGE = [
    CORRECTION,
    CORRECTION,
    optimization("one thread", "OpenMP", "a parallel loop over rows"),
    optimization("stores", "streaming writes past the caches", "non-temporal intrinsics for y"),
    CORRECTION,
    CORRECTION,
    optimization("the maximum", "several partial maxima", "unroll the reduction and join at its end"),
    CORRECTION,
    CORRECTION,
    optimization("division", "reciprocal once per row", "multiply instead of dividing"),
]


@pytest.fixture
def evaluator(tmp_path: Path) -> Iterator[Evaluator]:
    with open_evaluator(replace(configs.load({"device": "cpu"}, root=tmp_path))) as evaluator:
        yield evaluator


def test_from_a_marked_module_to_a_published_kernel(tmp_path: Path, evaluator: Evaluator) -> None:
    (tmp_path / "layers.py").write_text(textwrap.dedent(TARGET))
    (target,) = discover([tmp_path], tmp_path).targets
    limits = {"rounds": 11, "patience": 11, "min_headroom": 0, "roofline_stop": 99}
    config = configs.load({"device": "cpu", **limits}, root=tmp_path)
    model = ScriptedModel({"coder": CODER, "judge": JUDGE})
    result = forge_all([target], config, evaluator, models=Models(model, model))
    trace = result.traces[0]
    statuses = [entry.evaluation.status.value if entry.evaluation else entry.failure for entry in trace.rounds]
    assert statuses == ["BUILD_ERROR", "INCORRECT_NUMERICAL", "PASSED", "PASSED", *7 * ["BUILD_ERROR"]], trace.reason
    assert trace.outcome in ("forged", "kept_reference"), trace.reason
    assert "weight" in model.requests[1].messages[-1].content, "the Judge sees the compiler's complaint"
    shown = [request.messages[-1].content for request in model.requests if request.role == "judge"]
    page = shown[2].partition("# Evidence")[2]
    assert "`peak_norm` (own)" in page and "workload default, of this very candidate" in page, page
    assert "kernel.cpp:" in page.partition("The compiler remarks:")[2], page
    # Two optimizations in a row brought nothing: the Judge plans anew, from a full look at the best.
    assert "full profile of workload default" in shown[-1], shown[-1]
    assert "plan anew, from this full profile" in shown[-1] and "The compiler remarks:" in shown[-1]
    subject = trace.rounds[2].evaluation
    assert subject is not None and subject.profile is not None
    assert subject.profile.candidate == subject.candidate
    # A winner's profile is a deeper one than the Judge was shown.
    if subject.profile.depth == "quick":
        assert foreign(page, subject) == [], "every number of the page stands in the stored evaluation and profile"
    if trace.outcome == "forged":
        assert trace.final is not None and trace.final.profile is not None and trace.final.profile.depth == "full"
        (entry,) = Manifest.load(tmp_path / "forged" / "manifest.json").entries
        assert (entry.qualname, entry.arch, entry.isolation) == ("PeakNorm", "cpu", trace.final.isolation.grade)  # type: ignore[union-attr]
        assert "peak_norm" in entry.sources(tmp_path / "forged" / "manifest.json")["kernel.cpp"]
