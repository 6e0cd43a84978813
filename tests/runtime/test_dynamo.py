"""Applied modules inside torch.compile, for real with g++ kernels that double the reference's result."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from forged_layers import RMS_KERNEL, RMS_PLAN, SCALED_KERNEL, SCALED_PLAN, Repo, with_rms

from pytest_cudaforge import apply, disabled
from pytest_cudaforge.languages import load
from pytest_cudaforge.runtime.dispatch import restore
from pytest_cudaforge.runtime.dynamo import LEAST_TORCH

pytestmark = [
    pytest.mark.skipif(bool(load("cpp").availability()), reason=load("cpp").availability() or "g++ is here"),
    pytest.mark.skipif(
        tuple(map(int, torch.__version__.split(".")[:2])) < LEAST_TORCH, reason="this torch compiles the reference"
    ),
]
X = torch.randn(4, 64)


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    before = os.environ.get("CUDAFORGE_CACHE_DIR")
    os.environ["CUDAFORGE_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))
    yield
    os.environ.pop("CUDAFORGE_CACHE_DIR")
    if before is not None:
        os.environ["CUDAFORGE_CACHE_DIR"] = before


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


class Graphs:
    """A backend that keeps what Dynamo gave it; ``aot``: and hands it to AOTAutograd."""

    def __init__(self, aot: bool = False) -> None:
        self.seen: list[Any] = []
        self.aot = aot

    def __call__(self, graph: Any, inputs: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        self.seen.append(graph)
        return aot_eager(graph, inputs) if self.aot else graph.forward

    @property
    def replays(self) -> int:
        return sum(node.target is torch.ops.cudaforge.replay for graph in self.seen for node in graph.graph.nodes)


def compiled(model: Any, aot: bool = False, **options: Any) -> tuple[Any, Graphs]:
    graphs = Graphs(aot)
    return torch.compile(model, backend=graphs, fullgraph=True, **options), graphs


def doubled(model: Any, *args: Any, **kwargs: Any) -> Any:
    with disabled():
        return 2 * model(*args, **kwargs)


def test_a_launch_plan_is_one_operator_of_the_surrounding_graph(tmp_path: Path) -> None:
    model = with_rms(tmp_path).module.Net().eval()
    report = apply(model)
    run, graphs = compiled(model, aot=True)
    with torch.no_grad():
        assert torch.allclose(run(X), model(X), rtol=1e-5)
        assert (len(graphs.seen), graphs.replays) == (1, 2)
        plans = {n.args[1] for n in graphs.seen[0].graph.nodes if n.target is torch.ops.cudaforge.replay}
        assert len(plans) == 1  # layers of one form share it
        model.layers[0].weight.mul_(3)  # values and storage may change
        model.layers[1].weight.data = torch.rand(64)
        other = torch.randn(4, 64)
        assert torch.allclose(run(other), model(other), rtol=1e-5)
    with torch.inference_mode():
        assert torch.allclose(run(X), model(X), rtol=1e-5)
    assert report.compiled["layers.0"] == {"kernel": 4} and "compiled 4 x in layers.1: kernel" in str(report)


def test_layers_compiled_one_by_one_share_their_code(tmp_path: Path) -> None:
    model = with_rms(tmp_path).module.Net(depth=6).eval()
    apply(model)
    graphs = Graphs()
    for layer in model.layers:
        layer.compile(backend=graphs, fullgraph=True)
    with torch.no_grad():
        model(X)
    assert len(graphs.seen) == 1 and graphs.replays == 1


def test_a_copy_is_served_and_a_restored_model_is_not(tmp_path: Path) -> None:
    model = with_rms(tmp_path).module.RMSNorm(64).eval()
    apply(model)
    run, graphs = compiled(copied := copy.deepcopy(model))
    with torch.no_grad():
        assert torch.allclose(run(X), doubled(copied, X), rtol=1e-5)
        restore(copied)
        assert torch.allclose(2 * run(X), doubled(copied, X), rtol=1e-5)
    assert graphs.replays == 1


def test_compiled_code_runs_in_a_forked_child(tmp_path: Path) -> None:
    model = with_rms(tmp_path).module.RMSNorm(64).eval()
    apply(model)
    run, graphs = compiled(model)
    with torch.no_grad():
        run(X)
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            got, kernels = (
                run(X),
                doubled(model, X),
            )  # the reference, where torch's number of threads made it compile anew
            os._exit(0 if any(torch.allclose(got, one, rtol=1e-5) for one in (kernels, kernels / 2)) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert graphs.replays == 1


def _changed(model: Any) -> None:
    model.eps = 0.25


def _trained(model: Any) -> None:
    model.train()


@pytest.mark.parametrize(
    ("reason", "context", "options", "change", "value"),
    [
        ("shapes are dynamic", torch.no_grad, {"dynamic": True}, None, X),
        ("for gradients", nullcontext, {}, None, X),
        ("autocast", lambda: torch.autocast("cpu", torch.bfloat16), {}, None, X),
        ("attribute changed", torch.no_grad, {}, _changed, X),
        ("attribute changed", torch.no_grad, {}, _trained, X),
        ("float64, verified with float32", torch.no_grad, {}, None, X.double()),
        ("not contiguous", torch.no_grad, {}, None, torch.randn(4, 128)[:, ::2]),
    ],
)
def test_elsewhere_the_reference_is_compiled(
    tmp_path: Path,
    reason: str,
    context: Callable[[], AbstractContextManager[Any]],
    options: dict[str, Any],
    change: Callable[[Any], None] | None,
    value: Any,
) -> None:
    from pytest_cudaforge.records import Guard

    model = with_rms(tmp_path, guard=Guard(contiguous_only=True)).module.RMSNorm(64).eval()
    if reason == "autocast":
        model.requires_grad_(False)
    report = apply(model)
    if change is not None:
        change(model)
    run, graphs = compiled(model, **options)
    with context():
        got = run(value)
        with disabled():
            assert torch.allclose(got, model(value), rtol=1e-5)
    assert graphs.seen and graphs.replays == 0
    assert reason in " ".join(report.compiled[""])


def test_exported_programs_hold_the_reference(tmp_path: Path) -> None:
    model = with_rms(tmp_path).module.RMSNorm(64).eval()
    apply(model)
    program = torch.export.export(model, (X,), strict=True)
    assert "cudaforge" not in str(program)


OUTPUTS = """
import torch
from torch import nn
from pytest_cudaforge import forge_target

@forge_target(inputs=lambda: [torch.randn(4, 64), 1])
class Split(nn.Module):
    def forward(self, x, shift):
        return {"sum": x + shift, "difference": x - shift}

@forge_target(inputs=lambda: [torch.randn(4, 64)])
class InPlace(nn.Module):
    def forward(self, x):
        return x.add_(1)
"""
SPLIT = """
extern "C" void split(float* x, float* a, float* b, long long n, float s) {
  for (long long i = 0; i < n; ++i) { a[i] = 2 * (x[i] + s); b[i] = 2 * (x[i] - s); }
}
extern "C" void inplace(float* x, long long n) { for (long long i = 0; i < n; ++i) x[i] = 2 * (x[i] + 1); }
"""
SPLIT_PLAN = """
from pytest_cudaforge.plan import empty, launch

def plan(module, x, shift):
    a, b = empty(x.shape, x.dtype), empty(x.shape, x.dtype)
    launch("split", args=(x, a, b, x.numel(), float(shift)))
    return {"sum": a, "difference": b}
"""
IN_PLACE_PLAN = """
from pytest_cudaforge.plan import launch

def plan(module, x):
    launch("inplace", args=(x, x.numel()))
    return x
"""


def test_several_outputs_and_a_pointer_that_is_not_const(tmp_path: Path) -> None:
    repo = Repo(tmp_path, OUTPUTS)
    repo.forge("Split", SPLIT, SPLIT_PLAN, (X, 3))
    model = repo.module.Split().eval()
    apply(model)
    run, graphs = compiled(model)
    with torch.no_grad():
        got = run(X, shift=3)
    assert list(got) == ["sum", "difference"] and graphs.replays == 1
    assert torch.allclose(got["sum"], 2 * (X + 3)) and torch.allclose(got["difference"], 2 * (X - 3))


def test_a_plan_that_writes_its_input_is_no_operator(tmp_path: Path) -> None:
    repo = Repo(tmp_path, OUTPUTS)
    repo.forge("InPlace", SPLIT, IN_PLACE_PLAN, (X,))
    model = repo.module.InPlace().eval()
    report = apply(model)
    run, graphs = compiled(model)
    with torch.no_grad():
        assert torch.allclose(run(X.clone()), X + 1)
    assert graphs.replays == 0 and "no fresh tensors" in " ".join(report.compiled[""])


def test_a_function_and_a_misaligned_input(tmp_path: Path) -> None:
    repo = Repo(tmp_path)
    repo.forge("scaled", SCALED_KERNEL, SCALED_PLAN, (X,))
    apply(repo.module)
    graphs = Graphs()
    run = torch.compile(lambda x: repo.module.scaled(x) + 1, backend=graphs, fullgraph=True)
    storage = torch.randn(257)
    with torch.no_grad():
        assert torch.allclose(run(X), 4 * X + 1)
        assert torch.allclose(run(storage[1:].view(4, 64)), 4 * storage[1:].view(4, 64) + 1)
    assert graphs.replays == len(graphs.seen) == 1


def test_a_kernel_that_does_not_build_leaves_the_reference(tmp_path: Path) -> None:
    repo = Repo(tmp_path)
    repo.forge("RMSNorm", RMS_KERNEL.replace("float* y", "flat* y"), RMS_PLAN, (X,))
    model = repo.module.RMSNorm(64).eval()
    report = apply(model)
    run, graphs = compiled(model)
    with torch.no_grad():
        assert torch.allclose(2 * run(X), doubled(model, X))
    assert graphs.replays == 0 and "refused the source" in " ".join(report.compiled[""])
