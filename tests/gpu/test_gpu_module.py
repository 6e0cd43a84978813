"""The module tier on a real GPU: CUDA through load_inline, Triton, and what is not their work."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from module_targets import HEAD, find, model, write_repo

from pytest_cudaforge.evaluation.evaluator import Evaluator, EvaluatorSettings
from pytest_cudaforge.records import Candidate, Evaluation, Status

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU that torch can see"),
]

INLINE = '''
cuda_source = """
__global__ void twice_kernel(const float* x, float* y, int64_t n) {
  const int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
  if (i < n) y[i] = 2 * x[i];
}
torch::Tensor twice(torch::Tensor x) {
  auto y = torch::empty_like(x);
  const int64_t n = x.numel();
  twice_kernel<<<(n + 255) / 256, 256>>>(x.data_ptr<float>(), y.data_ptr<float>(), n);
  return y;
}
"""
ext = load_inline(
    name="twice_ext", cpp_sources="torch::Tensor twice(torch::Tensor x);", cuda_sources=cuda_source, functions=["twice"]
)
'''
TRITON = """
import triton
import triton.language as tl


@triton.jit
def twice_kernel(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, 2 * tl.load(x + i, mask=i < n), mask=i < n)


def twice(x):
    y = torch.empty_like(x)
    twice_kernel[(triton.cdiv(x.numel(), 256),)](x, y, x.numel(), BLOCK=256)
    return y
"""


DISGUISED = INLINE.replace("y[i] = 2 * x[i]", "y[i] = x[i]").replace(
    "auto y = torch::empty_like(x);", "x = at::mul(x, 2);\n  auto y = torch::empty_like(x);"
)
TUNED = (
    TRITON.replace(
        "@triton.jit",
        "@triton.autotune([triton.Config({'BLOCK': b}, num_warps=w) for b in (128, 256, 512, 1024) for w in (1, 2, 4)],"
        " key=['n'])\n@triton.jit",
    )
    .replace("triton.cdiv(x.numel(), 256),", "triton.cdiv(x.numel(), 128),")
    .replace(", BLOCK=256)", ")")
)


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repo")
    write_repo(root)
    return root


@pytest.fixture(scope="module")
def evaluator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Evaluator]:
    cache = tmp_path_factory.mktemp("cache")
    with Evaluator(EvaluatorSettings(device="cuda:0", cache_dir=cache, lock_dir=cache)) as opened:
        yield opened


def _evaluate(evaluator: Evaluator, repo: Path, candidate: Candidate, timing: bool = False) -> Evaluation:
    return evaluator.evaluate(candidate, find(repo, "::twice"), timing=timing)


@pytest.mark.parametrize(
    "candidate",
    [
        model("return ext.twice(x)", before=INLINE),
        model("return twice(x)", before=TRITON),
        model("return twice(x)", before=TUNED),
    ],
    ids=["load_inline", "triton", "autotuned"],
)
def test_own_kernels_pass_by_the_supervisors_clock(evaluator: Evaluator, repo: Path, candidate: Candidate) -> None:
    evaluation = _evaluate(evaluator, repo, candidate, timing=True)
    print(f"{evaluation.seconds:.1f} s, build {evaluation.build and evaluation.build.seconds}, {evaluation.timing}")
    assert (evaluation.status, evaluation.work) == (Status.PASSED, "kernel"), evaluation.reason
    assert evaluation.timing is not None and evaluation.timing.clock == "supervisor"


@pytest.mark.parametrize(
    "candidate",
    [
        model("return x * 2"),
        model("ext.twice(x)\nreturn x * 2", before=INLINE),
        model("try:\n    return twice(x.cpu()).to(x.device)\nexcept Exception:\n    return x * 2", before=TRITON),
        model("return torch.compile(lambda t: t * 2)(x)"),
        model("return ext.twice(x)", before=DISGUISED),
    ],
    ids=["rewrite", "decoy", "fallback", "compiled", "disguised"],
)
def test_other_peoples_work_is_refused(evaluator: Evaluator, repo: Path, candidate: Candidate) -> None:
    evaluation = _evaluate(evaluator, repo, candidate)
    print(evaluation.status, evaluation.reason)
    assert evaluation.status is Status.REJECTED, evaluation.reason


def test_a_side_stream_that_nobody_waits_for_is_wrong(evaluator: Evaluator, repo: Path) -> None:
    body = "torch.cuda._sleep(200_000_000)\n    y.copy_(2 * x)"
    late = f"y = torch.zeros_like(x)\nwith torch.cuda.stream(s):\n    {body}\nreturn y"
    evaluation = _evaluate(evaluator, repo, model(late, before="s = torch.cuda.Stream()"))
    print(evaluation.status, evaluation.reason)
    assert evaluation.status in (Status.INCORRECT_NUMERICAL, Status.REJECTED), evaluation.reason


def test_a_cuda_build_error_names_the_candidates_line(evaluator: Evaluator, repo: Path) -> None:
    source = HEAD + INLINE.replace("2 * x[i]", "nonsense") + "class ModelNew(nn.Module): ...\n"
    evaluation = _evaluate(evaluator, repo, Candidate.of("module", {"c.py": source}))
    assert evaluation.status is Status.BUILD_ERROR, evaluation.reason
    assert evaluation.build is not None and "nonsense" in evaluation.build.log
