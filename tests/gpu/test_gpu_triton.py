"""Triton launch plans on a real GPU: kernel.py is compiled in the builder, our replay launches the cubins."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_cudaforge import apply, disabled
from pytest_cudaforge.discovery import discover
from pytest_cudaforge.evaluation.evaluator import Evaluator, EvaluatorSettings
from pytest_cudaforge.languages import load
from pytest_cudaforge.publishing import publish
from pytest_cudaforge.records import Candidate, Evaluation, Round, Status, Target, Trace

torch = pytest.importorskip("torch")
_MISSING = load("triton").availability()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU that torch can see"),
    pytest.mark.skipif(bool(_MISSING), reason=f"no Triton: {_MISSING}"),
]

LAYERS = """
import torch
from torch import nn
from pytest_cudaforge import forge_target


@forge_target(inputs=lambda: [torch.randn(3001, 257)])
def relu(x):
    return torch.relu(x)


@forge_target(inputs=lambda: [torch.randn(1024, 2048, dtype=torch.bfloat16)])
def gelu16(x):
    return torch.nn.functional.gelu(x)


@forge_target(inputs=lambda: [torch.randn(2048, 4096)], init=lambda: [4096])
class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


@forge_target(inputs=lambda: [torch.randn(512, 384), torch.randn(384, 768)])
def product(a, b):
    return torch.relu(a @ b)
"""
HEAD = "import triton\nimport triton.language as tl\n"
PLAN_HEAD = "from pytest_cudaforge.plan import device, empty, launch\n"

ELEMENTWISE = (
    HEAD
    + """
@triton.jit
def pointwise(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n).to(tl.float32)
    tl.store(y + i, BODY, mask=i < n)
"""
)
ELEMENTWISE_PLAN = (
    PLAN_HEAD
    + """
def plan(x):
    y = empty(x.shape, x.dtype)
    n = x.numel()
    launch("pointwise", grid=(n + 1023) // 1024, args=(x, y, n), constants={"BLOCK": 1024}OPTIONS)
    return y
"""
)
RELU, GELU = "tl.maximum(v, 0.0)", "0.5 * v * (1.0 + tl.erf(v * 0.70710678118))"

NORM = (
    HEAD
    + """
@triton.jit
def norm(x, w, y, cols, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * cols
    c = tl.arange(0, BLOCK)
    v = tl.load(x + row + c, mask=c < CEND, other=0.0)
    scale = 1.0 / tl.sqrt(tl.sum(v * v) / cols + eps)
    tl.store(y + row + c, v * scale * tl.load(w + c, mask=c < cols), mask=c < cols)
    AFTER
"""
)
NORM_PLAN = (
    PLAN_HEAD
    + """
def plan(module, x):
    rows, cols = x.shape
    y = empty(x.shape, x.dtype)
    block = 1
    for i in range(20):
        if block < cols:
            block = block * 2
    launch("norm", grid=rows, args=(x, module.weight, y, cols, module.eps), constants={"BLOCK": block}, num_warps=8)
    return y
"""
)

PRODUCT = (
    HEAD
    + """
@triton.jit
def product(a, b, y, M, N, K, MB: tl.constexpr, NB: tl.constexpr, KB: tl.constexpr):
    m = tl.program_id(0) * MB + tl.arange(0, MB)
    n = tl.program_id(1) * NB + tl.arange(0, NB)
    k = tl.arange(0, KB)
    total = tl.zeros((MB, NB), tl.float32)
    for start in range(0, K, KB):
        at = tl.load(a + m[:, None] * K + (start + k)[None, :])
        bt = tl.load(b + (start + k)[:, None] * N + n[None, :])
        total = tl.dot(at, bt, total, input_precision="PRECISION")
    tl.store(y + m[:, None] * N + n[None, :], tl.maximum(total, 0.0))
"""
)
PRODUCT_PLAN = (
    PLAN_HEAD
    + """
def plan(a, b):
    (M, K), N = a.shape, b.shape[1]
    y = empty((M, N), a.dtype)
    launch("product", grid=(M // 64, N // 64), args=(a, b, y, M, N, K),
           constants={"MB": 64, "NB": 64, "KB": 32}, num_warps=4, num_stages=3)
    return y
"""
)


def _candidate(kernel: str, plan: str) -> Candidate:
    return Candidate.of("triton", {"kernel.py": kernel, "plan.py": plan})


def _pointwise(body: str, options: str = "") -> Candidate:
    return _candidate(ELEMENTWISE.replace("BODY", body), ELEMENTWISE_PLAN.replace("OPTIONS", options))


def _norm(cend: str = "cols", after: str = "") -> Candidate:
    return _candidate(NORM.replace("CEND", cend).replace("AFTER", after), NORM_PLAN)


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repo")
    (root / "triton_layers.py").write_text(LAYERS)
    return root


@pytest.fixture(scope="module")
def evaluator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Evaluator]:
    with Evaluator(EvaluatorSettings(device="cuda:0", cache_dir=tmp_path_factory.mktemp("cache"))) as opened:
        yield opened


def _target(root: Path, name: str) -> Target:
    return next(target for target in discover([root], root).targets if target.id.endswith(f"::{name}"))


def _show(evaluation: Evaluation) -> None:
    build = evaluation.build
    print(f"\n{evaluation.status.value} {evaluation.reason[:600]}")
    print(f"  {evaluation.seconds:.2f} s, grade {evaluation.isolation.grade}, build {build and build.seconds} s")
    if build is not None:
        print(f"  {build.kernels}")
    if evaluation.timing is not None:
        print(f"  eager {evaluation.timing.speedup_eager}, compile {evaluation.timing.speedup_compile}")
    if evaluation.verification is not None:
        print(f"  worst ratio {evaluation.verification.worst_ratio}, guard {evaluation.verification.guard}")


def _judge(evaluator: Evaluator, repo: Path, name: str, candidate: Candidate, *, timing: bool = False) -> Evaluation:
    evaluation = evaluator.evaluate(candidate, _target(repo, name), timing=timing)
    _show(evaluation)
    return evaluation


def test_a_row_reduction_is_timed_by_device_events(evaluator: Evaluator, repo: Path) -> None:
    evaluation = _judge(evaluator, repo, "RMSNorm", _norm(), timing=True)
    assert evaluation.status is Status.PASSED, evaluation.reason
    assert evaluation.work == "kernel" and evaluation.timing is not None and evaluation.timing.clock == "events"
    # Device code alone: no host code of the candidate's runs beside data.
    assert evaluation.isolation.grade in ("A", "C"), evaluation.isolation
    assert evaluation.verification is not None and evaluation.verification.guard.align_bytes == 16
    assert evaluation.timing.speedup_eager > 1.5


@pytest.mark.parametrize(
    ("name", "body", "options"),
    [
        ("relu", RELU, ""),
        ("gelu16", GELU, ", num_warps=2"),
        ("gelu16", GELU, ", num_warps=8, maxnreg=64"),
        ("relu", RELU, ", num_ctas=2"),
        ("relu", RELU, ", cooperative=False, num_stages=1"),
    ],
)
def test_elementwise_kernels_pass(evaluator: Evaluator, repo: Path, name: str, body: str, options: str) -> None:
    evaluation = _judge(evaluator, repo, name, _pointwise(body, options))
    assert evaluation.status is Status.PASSED, evaluation.reason


@pytest.mark.parametrize(
    ("precision", "status"),
    [("ieee", Status.PASSED), ("tf32x3", Status.PASSED), ("tf32", Status.INCORRECT_NUMERICAL)],
)
def test_a_product_needs_the_declared_precision(
    evaluator: Evaluator, repo: Path, precision: str, status: Status
) -> None:
    candidate = _candidate(PRODUCT.replace("PRECISION", precision), PRODUCT_PLAN)
    evaluation = _judge(evaluator, repo, "product", candidate)
    assert evaluation.status is status, evaluation.reason


@pytest.mark.parametrize(
    ("candidate", "status"),
    [
        (_norm(cend="cols - 41"), Status.INCORRECT_NUMERICAL),
        (_norm(after="tl.store(y + row + c, 0.0, mask=(c < 8) & (tl.program_id(0) == 7))"), Status.INCORRECT_NUMERICAL),
        (_norm(after="tl.store(y + row + cols, 7.0, mask=tl.program_id(0) == 2047)"), Status.REJECTED),
        (_norm(after="tl.store(x + row, 3.0)"), Status.REJECTED),
        (_norm(after="tl.store(y + (1 << 45), 3.0)"), Status.RUNTIME_ERROR),
        (_norm(after="nonsense(x)"), Status.BUILD_ERROR),
        (_candidate("raise SystemExit(0)", NORM_PLAN), Status.BUILD_ERROR),
        (_candidate("import os\nos._exit(70)", NORM_PLAN), Status.BUILD_ERROR),
        (_candidate(NORM, NORM_PLAN.replace(", cols, module.eps", ", cols")), Status.BUILD_ERROR),
    ],
)  # fmt: skip
def test_wrong_kernels_are_refused_and_the_next_is_unharmed(
    evaluator: Evaluator, repo: Path, candidate: Candidate, status: Status
) -> None:
    assert _judge(evaluator, repo, "RMSNorm", candidate).status is status
    assert _judge(evaluator, repo, "RMSNorm", _norm()).status is Status.PASSED


#: In the builder kernel.py may do as it likes: it describes parameters that the cubin does not have.
LIAR = """
import dataclasses
import pytest_cudaforge.languages.triton as language

_described = language._described

def lie(*args):
    return dataclasses.replace(_described(*args), CHANGE)

language._described = lie
"""


@pytest.mark.parametrize(
    ("change", "statuses"),
    [
        ("scratch_pointers=0", (Status.RUNTIME_ERROR, Status.BUILD_ERROR)),
        ("symbol='other'", (Status.RUNTIME_ERROR, Status.BUILD_ERROR)),
        ("code=bytes(99)", (Status.RUNTIME_ERROR, Status.BUILD_ERROR)),
        ("params=('float*', 'float*', 'float*', 'long long', 'float')", (Status.RUNTIME_ERROR, Status.BUILD_ERROR)),
        # Triton's code checks nothing of its block's size: half of the threads do half of the work.
        ("threads=128", (Status.RUNTIME_ERROR, Status.BUILD_ERROR, Status.INCORRECT_NUMERICAL)),
    ],
)
def test_a_lying_builder_gets_nothing(
    evaluator: Evaluator, repo: Path, change: str, statuses: tuple[Status, ...]
) -> None:
    candidate = _candidate(LIAR.replace("CHANGE", change) + _norm().file("kernel.py"), NORM_PLAN)
    assert _judge(evaluator, repo, "RMSNorm", candidate).status in statuses


def test_production_runs_what_was_verified_and_compiles_nothing(
    evaluator: Evaluator, repo: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    target, candidate = _target(repo, "RMSNorm"), _norm()
    final = _judge(evaluator, repo, "RMSNorm", candidate)
    rounds = (Round(1, "first", None, candidate, final),)
    trace = Trace(target.id, "triton", "forged", "", rounds, 1, final)
    entry = publish(trace, target, evaluator.facts(target), tmp_path, builds=evaluator.builds).entry
    # A check of what is published asks no compiler either.
    published = Candidate.of("triton", entry.sources(tmp_path / "manifest.json"))
    checked = evaluator.evaluate(published, target, timing=False)
    assert checked.passed and checked.build is not None and checked.build.binaries == ()

    monkeypatch.syspath_prepend(str(repo))
    import triton_layers  # type: ignore[import-not-found]

    model = triton_layers.RMSNorm(4096).cuda().eval()
    report = apply(model, manifest=tmp_path / "manifest.json")
    assert len(report.swapped) == 1, str(report)
    with torch.no_grad():
        x = torch.randn(2048, 4096, device="cuda")
        got, again = model(x), model(x)
        assert report.fallbacks == {}, str(report)
        with disabled():
            wanted = model(x)
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
        assert torch.equal(got, again)
        # Compiled for 16-byte aligned tensors: another one is the reference's to serve.
        misaligned = torch.randn(2048 * 4096 + 1, device="cuda")[1:].view(2048, 4096)
        with disabled():
            wanted = model(misaligned)
        assert torch.equal(model(misaligned), wanted) and "misaligned" in str(report)
    assert "kernel" not in sys.modules, "kernel.py was imported"
