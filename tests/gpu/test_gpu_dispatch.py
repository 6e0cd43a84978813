"""apply() on a real GPU: streams, threads, CUDA graphs, devices, and the kernels' own memory."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_cudaforge import apply, disabled, hardware
from pytest_cudaforge.records import Guard

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU that torch can see"),
]

KERNEL = """
extern "C" __global__ void rms(const float* x, const float* w, float* y, int cols, float eps) {
  __shared__ float total;
  const float* row = x + (long long)blockIdx.x * cols;
  if (threadIdx.x == 0) total = 0;
  __syncthreads();
  float sum = 0;
  for (int c = threadIdx.x; c < cols; c += blockDim.x) sum += row[c] * row[c];
  atomicAdd(&total, sum);
  __syncthreads();
  float scale = rsqrtf(total / cols + eps);
  for (int c = threadIdx.x; c < cols; c += blockDim.x)
    y[(long long)blockIdx.x * cols + c] = 2 * row[c] * scale * w[c];
}
"""
PLAN = """
from pytest_cudaforge.plan import empty, launch

def plan(module, x):
    rows, cols = x.shape
    y = empty(x.shape, x.dtype)
    launch("rms", grid=rows, block=64, args=(x, module.weight, y, cols, module.eps))
    return y
"""
TWO_KERNELS = """
extern "C" __global__ void squares(const float* x, float* s, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) s[i] = x[i] * x[i];
}
extern "C" __global__ void rows(const float* s, float* t, int cols) {
  atomicAdd(t + blockIdx.x, s[blockIdx.x * cols + threadIdx.x]);
}
extern "C" __global__ void finish(const float* x, const float* w, const float* t, float* y, int cols, float eps) {
  int i = blockIdx.x * cols + threadIdx.x;
  y[i] = 2 * x[i] * rsqrtf(t[blockIdx.x] / cols + eps) * w[threadIdx.x];
}
"""
TWO_PLAN = """
from pytest_cudaforge.plan import empty, launch, zeros

def plan(module, x):
    rows, cols = x.shape
    s = empty(x.shape, x.dtype)
    t = zeros((rows,), x.dtype)
    y = empty(x.shape, x.dtype)
    launch("squares", grid=rows, block=cols, args=(x, s, x.numel()))
    launch("rows", grid=rows, block=cols, args=(s, t, cols))
    launch("finish", grid=rows, block=cols, args=(x, module.weight, t, y, cols, module.eps))
    return y
"""


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    before = os.environ.get("CUDAFORGE_CACHE_DIR")
    os.environ["CUDAFORGE_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))
    yield
    os.environ.pop("CUDAFORGE_CACHE_DIR")
    if before is not None:
        os.environ["CUDAFORGE_CACHE_DIR"] = before


def forged(root: Path, kernel: str = KERNEL, plan: str = PLAN, **changes: Any) -> Any:
    from forged_layers import Repo

    repo = Repo(root)
    arch = hardware.detect("cuda:0").arch
    repo.forge("RMSNorm", kernel, plan, (torch.randn(4, 64),), language="cuda", arch=arch, **changes)
    return repo


def which(module: Any, x: Any) -> str:
    with torch.no_grad():
        output = module(x)
        with disabled():
            expected = module(x)
    if torch.allclose(output, 2 * expected, rtol=1e-4, atol=1e-5):
        return "kernel"
    assert torch.allclose(output, expected, rtol=1e-5)
    return "reference"


def test_a_kernel_runs_after_the_model_moved(tmp_path: Path) -> None:
    repo = forged(tmp_path)
    model = repo.module.RMSNorm(64).eval()
    report = apply(model)
    assert report.swapped[0].note.startswith("forged for sm_")
    assert which(model, torch.randn(4, 64)) == "reference"
    model.cuda()
    assert which(model, torch.randn(4, 64, device="cuda")) == "kernel"
    assert which(model, torch.randn(9, 64, device="cuda")) == "kernel"
    assert which(model.cpu(), torch.randn(4, 64)) == "reference"
    assert which(model.cuda(), torch.randn(4, 64, device="cuda")) == "kernel"


def test_scratch_zeros_and_several_launches(tmp_path: Path) -> None:
    repo = forged(tmp_path, TWO_KERNELS, TWO_PLAN)
    model = repo.module.RMSNorm(64).cuda().eval()
    apply(model)
    for rows in (4, 1, 33):
        assert which(model, torch.randn(rows, 64, device="cuda")) == "kernel"


def test_streams_run_side_by_side(tmp_path: Path) -> None:
    repo = forged(tmp_path, TWO_KERNELS, TWO_PLAN)
    model = repo.module.RMSNorm(64).cuda().eval()
    apply(model)
    inputs = [torch.randn(64, 64, device="cuda") for _ in range(4)]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    with torch.no_grad():
        with disabled():
            expected = [2 * model(x) for x in inputs]
        torch.cuda.synchronize()
        for _ in range(20):
            got = []
            for stream, x in zip(streams, inputs, strict=True):
                with torch.cuda.stream(stream):
                    got.append(model(x))
            torch.cuda.synchronize()
            for output, want in zip(got, expected, strict=True):
                assert torch.allclose(output, want, rtol=1e-4, atol=1e-5)


def test_threads_without_a_context_of_their_own(tmp_path: Path) -> None:
    repo = forged(tmp_path)
    model = repo.module.RMSNorm(64).cuda().eval()
    apply(model)
    x = torch.randn(8, 64, device="cuda")
    assert which(model, x) == "kernel"
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(which(model, x))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == ["kernel"] * 8


def test_capture_in_a_cuda_graph(tmp_path: Path) -> None:
    repo = forged(tmp_path, TWO_KERNELS, TWO_PLAN)
    model = repo.module.RMSNorm(64).cuda().eval()
    report = apply(model)
    x = torch.randn(8, 64, device="cuda")
    with torch.no_grad():
        model(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = model(x)
        assert report.fallbacks == {}
        for _ in range(3):
            x.copy_(torch.randn(8, 64, device="cuda"))
            graph.replay()
            with disabled():
                assert torch.allclose(y, 2 * model(x), rtol=1e-4, atol=1e-5)


def test_the_first_call_inside_a_capture_is_the_reference(tmp_path: Path) -> None:
    repo = forged(tmp_path)
    model = repo.module.RMSNorm(64).cuda().eval()
    report = apply(model)
    x = torch.randn(8, 64, device="cuda")
    with torch.no_grad():
        with disabled():
            model(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model(x)
    assert "call once before capturing" in " ".join(report.fallbacks[""])
    assert which(model, x) == "kernel"


def test_inference_mode_autocast_and_grad(tmp_path: Path) -> None:
    repo = forged(tmp_path)
    model = repo.module.RMSNorm(64).cuda().eval()
    report = apply(model)
    x = torch.randn(8, 64, device="cuda")
    with torch.inference_mode():
        assert model(x).is_inference()
    assert report.fallbacks == {}
    with torch.autocast("cuda"):
        assert which(model, x) == "reference"
    assert model(x).requires_grad
    assert which(model.half(), x.half()) == "reference"


def _graphs(model: Any) -> int:
    """How many graphs the last call's plan has."""
    return len(model.__dict__["_cudaforge_attachment"]._last.call._graphs._known)


def test_a_plan_of_several_launches_as_a_graph(tmp_path: Path) -> None:
    repo = forged(tmp_path, TWO_KERNELS, TWO_PLAN)
    model = repo.module.RMSNorm(64).cuda().eval()
    report = apply(model, graphs=True)
    x = torch.randn(8, 64, device="cuda")
    kept, wanted = [], []
    with torch.no_grad():
        for turn in range(12):
            x.normal_()
            if turn == 6:
                model.weight.mul_(3)  # in place: the same address
            if turn == 9:
                model.weight.data = torch.rand(64, device="cuda")
            kept.append(model(x))
            with disabled():
                wanted.append(2 * model(x))
        assert _graphs(model) == 2
        other = torch.randn(8, 64, device="cuda")
        assert which(model, other) == "kernel"
    torch.cuda.synchronize()
    for output, expected in zip(kept, wanted, strict=True):  # none was written again by a later replay
        assert torch.allclose(output, expected, rtol=1e-4, atol=1e-5)
    assert set(report.fallbacks[""]) == {"inside disabled()"}


def test_graphs_on_several_streams_and_threads(tmp_path: Path) -> None:
    repo = forged(tmp_path, TWO_KERNELS, TWO_PLAN)
    model = repo.module.RMSNorm(64).cuda().eval()
    apply(model, graphs=True)
    found: list[bool] = []

    def work() -> None:
        stream, x = torch.cuda.Stream(), torch.randn(64, 64, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(stream), torch.no_grad():
            with disabled():
                expected = 2 * model(x)
            outputs = [model(x) for _ in range(50)]
            stream.synchronize()
        found.append(all(torch.allclose(output, expected, rtol=1e-4, atol=1e-5) for output in outputs))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 4


def test_graphs_inside_the_callers_own_graph(tmp_path: Path) -> None:
    repo = forged(tmp_path, TWO_KERNELS, TWO_PLAN)
    model = repo.module.RMSNorm(64).cuda().eval()
    report = apply(model, graphs=True)
    x = torch.randn(8, 64, device="cuda")
    with torch.no_grad():
        for _ in range(3):
            model(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = model(x)
        x.normal_()
        graph.replay()
        assert report.fallbacks == {}
        with disabled():
            assert torch.allclose(y, 2 * model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_inside_torch_compile(tmp_path: Path, mode: str) -> None:
    from pytest_cudaforge.runtime.dynamo import LEAST_TORCH

    if tuple(map(int, torch.__version__.split(".")[:2])) < LEAST_TORCH:
        pytest.skip("this torch compiles the reference")
    repo = forged(tmp_path, TWO_KERNELS, TWO_PLAN)
    model = repo.module.Net(depth=3).cuda().eval()
    report = apply(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, mode=mode)
    with torch.no_grad():
        for turn in range(4):
            x = torch.randn(8, 64, device="cuda")
            if turn == 2:
                model.layers[0].weight.mul_(2)
            assert torch.allclose(compiled(x), model(x), rtol=1e-3, atol=1e-4)
        with torch.inference_mode():
            assert torch.allclose(compiled(x), model(x), rtol=1e-3, atol=1e-4)
    assert set(report.compiled["layers.0"]) == {"kernel"}
    assert compiled(x).requires_grad  # compiled anew, from the reference


def test_misaligned_inputs(tmp_path: Path) -> None:
    repo = forged(tmp_path, guard=Guard(align_bytes=16))
    model = repo.module.RMSNorm(64).cuda().eval()
    apply(model)
    storage = torch.randn(4 * 64 + 1, device="cuda")
    assert which(model, storage[1:].view(4, 64)) == "reference"
    assert which(model, storage[:-1].view(4, 64)) == "kernel"


def test_inputs_and_weights_on_different_devices(tmp_path: Path) -> None:
    repo = forged(tmp_path)
    model = repo.module.RMSNorm(64).cuda().eval()
    apply(model)
    with torch.no_grad(), pytest.raises(RuntimeError, match="device"):
        model(torch.randn(4, 64))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_another_gpu_than_the_current_one(tmp_path: Path) -> None:
    repo = forged(tmp_path)
    model = repo.module.RMSNorm(64).to("cuda:1").eval()
    apply(model)
    assert which(model, torch.randn(4, 64, device="cuda:1")) == "kernel"
    assert which(copy.deepcopy(model).to("cuda:0"), torch.randn(4, 64, device="cuda:0")) == "kernel"


def test_pythons_shared_strings_stay_whole(tmp_path: Path) -> None:
    """A binding that writes a zero into a bytes object of length one writes it into every b" " of the process."""
    code = (
        "import json, sys; from pytest_cudaforge import hardware; from pytest_cudaforge.languages import Unit, load\n"
        "space = lambda: bytes([32])[0]\n"
        "steps = {'start': space()}\n"
        "hardware.detect('cuda:0'); steps['detect'] = space()\n"
        "load('cuda').fingerprint('sm_90'); steps['fingerprint'] = space()\n"
        "binary = load('cuda').compile('__global__ void f() {}', Unit((), ('f',)), hardware.detect('cuda:0').arch)\n"
        "steps['compile'] = space()\n"
        "from pytest_cudaforge.plan import Launch, LaunchPlan\n"
        "from pytest_cudaforge.runtime.replay import load_program\n"
        "load_program(LaunchPlan((), (Launch('f', ()),), None), [binary], 'cuda:0').bind(()).run()\n"
        "steps['launch'] = space()\n"
        "sys.stdout.buffer.write(json.dumps(steps).encode())"
    )
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": root}, capture_output=True, text=True, check=True
    )
    assert set(json.loads(done.stdout).values()) == {32}, done.stdout


def test_host_cost_of_a_one_launch_plan() -> None:
    script = Path(__file__).parents[1] / "benchmarks" / "dispatch_overhead.py"
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, str(script), "--device", "cuda"],
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=True,
    )
    print("\n" + done.stdout)
    rows = {line[:26].strip(): float(line[26:].split()[0]) for line in done.stdout.splitlines()[2:]}
    # 15 µs on an undisturbed H200; a slow host slows eager torch as much.
    assert rows["beyond nn.Module call"] <= max(15.0, 1.4 * rows["eager module"])
