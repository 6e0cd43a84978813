"""apply() on the CPU with g++ for real: test kernels double the reference's result, which shows who of the two ran."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import multiprocessing
import os
import pickle
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from forged_layers import RMS_KERNEL, RMS_PLAN, SCALED_KERNEL, SCALED_PLAN, Repo, with_rms

from pytest_cudaforge import apply, disabled
from pytest_cudaforge.errors import ConfigError, UsageError
from pytest_cudaforge.languages import load
from pytest_cudaforge.records import Guard
from pytest_cudaforge.runtime.dispatch import ForgeWarning, restore
from pytest_cudaforge.runtime.fingerprints import fingerprint_of
from pytest_cudaforge.runtime.manifest import Manifest

pytestmark = pytest.mark.skipif(bool(load("cpp").availability()), reason=load("cpp").availability() or "g++ is here")


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    before = os.environ.get("CUDAFORGE_CACHE_DIR")
    os.environ["CUDAFORGE_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))
    yield
    os.environ.pop("CUDAFORGE_CACHE_DIR")
    if before is not None:
        os.environ["CUDAFORGE_CACHE_DIR"] = before


@pytest.fixture(scope="module")
def warm_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repo with a kernel, and below it the cache that one call left."""
    root = tmp_path_factory.mktemp("warm")
    before = os.environ.get("CUDAFORGE_CACHE_DIR", "")
    os.environ["CUDAFORGE_CACHE_DIR"] = str(root / "cache")
    model = with_rms(root).module.RMSNorm(64).eval()
    apply(model)
    assert ran(model, X) == "kernel"
    os.environ["CUDAFORGE_CACHE_DIR"] = before
    return root


def import_layers(root: Path) -> Any:
    (file,) = root.glob("layers_*.py")
    return sys.modules[file.stem]


def ran(module: Any, *args: Any, **kwargs: Any) -> str:
    """Which of the two answered: "kernel" (twice the reference's values) or "reference"."""
    with torch.no_grad():
        return which(module, *args, **kwargs)


def which(module: Any, *args: Any, **kwargs: Any) -> str:
    output = module(*args, **kwargs)
    with disabled():
        expected = module(*args, **kwargs)
    assert type(output) is torch.Tensor
    assert (output.shape, output.dtype) == (expected.shape, expected.dtype)
    if torch.allclose(output, 2 * expected, rtol=1e-5, atol=1e-6):
        return "kernel"
    assert torch.allclose(output, expected, rtol=1e-6)
    return "reference"


def reasons(report: Any, path: str = "") -> list[str]:
    return [reason for reason in report.fallbacks.get(path, {}) if reason != "inside disabled()"]


X = torch.randn(4, 64)
TURNS = """
import torch
from torch import nn
from pytest_cudaforge import forge_target

@forge_target(inputs=lambda: [torch.randn(4, 64), torch.randn(4, 64), 2.0], init=lambda: [64])
class Blend(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size), requires_grad=False)
        self.tied = self.weight

    def forward(self, x, y, factor=2.0):
        return (x + y * factor) * self.weight
"""
TURNS_KERNEL = """
extern "C" void blend(const float* x, const float* y, const float* w, float* out, int n, int cols) {
  for (int i = 0; i < n; ++i) out[i] = 2 * (x[i] + 2 * y[i]) * w[i % cols];
}
"""
TURNS_PLAN = """
from pytest_cudaforge.plan import empty, launch

def plan(module, x, y, factor=2.0):
    assert y.is_contiguous()
    out = empty(x.shape, x.dtype)
    launch("blend", args=(x, y, module.tied, out, x.numel(), x.shape[1]))
    return out
"""


# -- what is swapped -------------------------------------------------------------------------------------------


def test_every_target_in_a_model_is_swapped(tmp_path: Path) -> None:
    repo = with_rms(tmp_path)
    model = repo.module.Net().eval()
    report = apply(model)
    assert [row.path for row in report.swapped] == ["layers.0", "layers.1"]
    assert report.kept == ()
    assert "2 swapped, 0 kept" in str(report) and "swapped layers.0" in str(report)
    assert ran(model.layers[0], X) == ran(model.layers[1], X) == "kernel"


@pytest.mark.parametrize("graphs", [False, True])
def test_the_model_itself_may_be_the_target(tmp_path: Path, graphs: bool) -> None:
    repo = with_rms(tmp_path)
    model = repo.module.RMSNorm(64).eval()
    report = apply(model, graphs=graphs)  # on a CPU there is nothing to capture
    assert "(the model itself)" in str(report)
    assert ran(model, X) == "kernel"


def test_a_model_without_targets(tmp_path: Path) -> None:
    assert str(apply(torch.nn.Linear(2, 2))) == "forged kernels: 0 swapped, 0 kept"


def test_without_apply_nothing_changes_for_other_instances(tmp_path: Path) -> None:
    repo = with_rms(tmp_path)
    applied, other = repo.module.RMSNorm(64).eval(), repo.module.RMSNorm(64).eval()
    apply(applied)
    assert (ran(applied, X), ran(other, X)) == ("kernel", "reference")


def test_a_subclass_keeps_its_own_forward(tmp_path: Path) -> None:
    repo = with_rms(tmp_path)
    apply(repo.module.RMSNorm(64))
    child = repo.module.Child(64).eval()
    report = apply(child)
    assert report.swapped == () and report.kept == ()
    assert ran(child, X) == "reference"


def test_applying_twice_is_applying_once(tmp_path: Path) -> None:
    repo = with_rms(tmp_path)
    model = repo.module.RMSNorm(64).eval()
    apply(model)
    apply(model)
    assert ran(model, X) == "kernel"
    assert not hasattr(type(model).forward.__wrapped__, "__wrapped__")


def test_restore_brings_the_reference_back(tmp_path: Path) -> None:
    repo = with_rms(tmp_path)
    model = repo.module.Net().eval()
    apply(model)
    restore(model)
    assert ran(model.layers[0], X) == "reference"


def test_shapes_that_were_not_drawn_are_traced_anew(tmp_path: Path) -> None:
    repo = with_rms(tmp_path)
    model = repo.module.RMSNorm(64).eval()
    apply(model)
    for rows in (1, 3, 17):
        assert ran(model, torch.randn(rows, 64)) == "kernel"
    assert ran(model, X) == "kernel"


def test_a_functions_name_dispatches(tmp_path: Path) -> None:
    repo = Repo(tmp_path)
    repo.forge("scaled", SCALED_KERNEL, SCALED_PLAN, (X, 3.0), (X,))
    report = apply(repo.module)
    assert [row.path for row in report.swapped] == ["scaled"]
    assert [row.path for row in report.kept] == []
    assert ran(repo.module.scaled, X, 3.0) == "kernel"
    assert ran(repo.module.scaled, X, factor=3.0) == "kernel"
    assert ran(repo.module.scaled, X) == "kernel"
    assert ran(repo.module.scaled, X, 4.0) == "reference"
    assert reasons(report, "scaled") == ["factor is 4.0, verified with 3.0"]
    assert pickle.loads(pickle.dumps(repo.module.scaled)) is repo.module.scaled
    apply(repo.module)
    assert ran(repo.module.scaled, X, 3.0) == "kernel"
    restore(repo.module)
    assert ran(repo.module.scaled, X, 3.0) == "reference"


@pytest.mark.parametrize("thing", [None, "model", dict, lambda x: x])
def test_anything_else_is_refused(thing: Any) -> None:
    with pytest.raises(UsageError, match=r"apply\(\) was given a .*\n.*an nn.Module, or a Python module"):
        apply(thing)


# -- what is kept, and why -------------------------------------------------------------------------------------


def kept_reason(model: Any, **options: Any) -> str:
    report = apply(model, **options)
    assert report.swapped == ()
    (row,) = report.kept
    assert row.reason in str(report)
    assert ran(model, X) == "reference"
    return str(row.reason)


def test_no_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").touch()
    assert "no forged/manifest.json was found" in kept_reason(Repo(tmp_path).module.RMSNorm(64).eval())


def test_no_entry(tmp_path: Path) -> None:
    repo = Repo(tmp_path)
    repo.forge("scaled", SCALED_KERNEL, SCALED_PLAN, (X,))
    assert "no forged kernel for it in" in kept_reason(repo.module.RMSNorm(64).eval())


def test_a_tampered_kernel_is_not_loaded(tmp_path: Path) -> None:
    repo = with_rms(tmp_path)
    (kernel,) = repo.manifest.parent.glob("*/cpu/kernel.cpp")
    kernel.write_text(RMS_KERNEL.replace("2 * x", "3 * x"))
    with pytest.warns(ForgeWarning, match="differs from what was verified"):
        assert "kernel.cpp: differs from what was verified" in kept_reason(repo.module.RMSNorm(64).eval())


def test_a_missing_kernel_file(tmp_path: Path) -> None:
    repo = with_rms(tmp_path)
    next(repo.manifest.parent.glob("*/cpu/plan.py")).unlink()
    with pytest.warns(ForgeWarning, match="cannot be read"):
        assert "plan.py: cannot be read" in kept_reason(repo.module.RMSNorm(64).eval())


def test_a_reference_that_changed_since(tmp_path: Path) -> None:
    repo = with_rms(tmp_path)
    repo.file.write_text(repo.file.read_text().replace("+ self.eps)", "+ self.eps + 0)"))
    assert "the reference changed since this kernel was forged" in kept_reason(repo.module.RMSNorm(64).eval())


def test_a_change_elsewhere_in_the_file_is_no_change(tmp_path: Path) -> None:
    repo = with_rms(tmp_path)
    repo.file.write_text(repo.file.read_text().replace("return x * factor", "return factor * x"))
    model = repo.module.RMSNorm(64).eval()
    apply(model)
    assert ran(model, X) == "kernel"


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a GPU here")
def test_another_arch(tmp_path: Path) -> None:
    repo = with_rms(tmp_path, language="cuda", arch="sm_90")
    assert "forged for sm_90; the module is on cpu" in kept_reason(repo.module.RMSNorm(64).eval())


def test_the_module_tier_is_not_dispatched(tmp_path: Path) -> None:
    repo = with_rms(tmp_path)
    repo.forge("RMSNorm", RMS_KERNEL, RMS_PLAN, (X,), language="module", arch="sm_90")
    report = apply(repo.module.RMSNorm(64).eval())
    assert [row.kernel for row in report.swapped] == [report.swapped[0].kernel] and "cpu" in report.swapped[0].kernel


def test_a_forward_replaced_on_the_instance_is_left_alone(tmp_path: Path) -> None:
    repo = with_rms(tmp_path)
    model = repo.module.RMSNorm(64).eval()
    model.forward = lambda x: x
    report = apply(model)
    assert report.kept[0].reason == "its forward was replaced on the instance"
    assert model(X) is X


def test_a_malformed_manifest_warns_and_keeps(tmp_path: Path) -> None:
    repo = with_rms(tmp_path)
    repo.manifest.write_text("{")
    with pytest.warns(ForgeWarning, match="not JSON"):
        assert "not JSON" in kept_reason(repo.module.RMSNorm(64).eval())


@pytest.mark.parametrize("name", ["missing.json", "."])
def test_a_named_manifest_must_be_there(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read"):
        apply(Repo(tmp_path).module.RMSNorm(64), manifest=tmp_path / name)


@pytest.mark.parametrize("as_folder", [True, False])
def test_a_named_manifest_is_used(tmp_path: Path, as_folder: bool) -> None:
    repo = with_rms(tmp_path)
    elsewhere = tmp_path / "kernels"
    repo.manifest.parent.rename(elsewhere)
    model = repo.module.RMSNorm(64).eval()
    apply(model, manifest=elsewhere if as_folder else str(elsewhere / "manifest.json"))
    assert ran(model, X) == "kernel"


def test_the_manifest_is_found_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "repo").mkdir()
    repo = with_rms(tmp_path / "repo")
    here = tmp_path / "checkout" / "deep"
    here.mkdir(parents=True)
    repo.manifest.parent.rename(tmp_path / "checkout" / "forged")
    monkeypatch.chdir(here)
    model = repo.module.RMSNorm(64).eval()
    apply(model)
    assert ran(model, X) == "kernel"


# -- guards ----------------------------------------------------------------------------------------------------


def refused(repo: Repo, *args: Any, model: Any = None, **kwargs: Any) -> str:
    model = repo.module.RMSNorm(64).eval() if model is None else model
    report = apply(model)
    assert ran(model, *args, **kwargs) == "reference"
    (reason,) = reasons(report)
    return reason


def test_dtype(tmp_path: Path) -> None:
    repo = with_rms(tmp_path)
    assert refused(repo, X.double(), model=repo.module.RMSNorm(64).double().eval()) == (
        "x is float64, verified with float32"
    )


def test_rank(tmp_path: Path) -> None:
    assert refused(with_rms(tmp_path), torch.randn(2, 4, 64)) == "x has 3 dimensions, verified with 2"


def test_drawn_shapes_only(tmp_path: Path) -> None:
    repo = with_rms(tmp_path, guard=Guard(drawn_shapes_only=True))
    assert "verified for (4, 64) only" in refused(repo, torch.randn(5, 64))


def test_fixed_sizes(tmp_path: Path) -> None:
    repo = with_rms(tmp_path, guard=Guard(fixed_sizes=(64,)))
    model = repo.module.RMSNorm(64).eval()
    apply(model)
    assert ran(model, torch.randn(5, 64)) == "kernel"
    assert refused(repo, torch.randn(5, 32), model=repo.module.RMSNorm(32).eval()) == (
        "x has 32 in dimension 1, verified for 64 only"
    )


def test_contiguous_only(tmp_path: Path) -> None:
    repo = with_rms(tmp_path, guard=Guard(contiguous_only=True))
    assert refused(repo, torch.randn(64, 4).t()) == "x is not contiguous"


def test_alignment(tmp_path: Path) -> None:
    repo = with_rms(tmp_path, guard=Guard(align_bytes=16))
    model = repo.module.RMSNorm(64).eval()
    report = apply(model)
    storage = torch.randn(4 * 64 + 1)
    assert ran(model, storage[:-1].view(4, 64)) == "kernel"
    assert ran(model, storage[1:].view(4, 64)) == "reference"
    assert ran(model, storage[:-1].view(4, 64)) == "kernel"
    weight, shifted = model.weight, torch.nn.Parameter(torch.ones(65))
    model.weight = torch.nn.Parameter(shifted.detach()[1:])
    assert ran(model, storage[:-1].view(4, 64)) == "reference"
    model.weight = weight
    assert ran(model, storage[:-1].view(4, 64)) == "kernel"
    assert reasons(report) == ["an input or weight is misaligned, or inputs overlap"]


def test_train_mode_and_back(tmp_path: Path) -> None:
    repo = with_rms(tmp_path)
    model = repo.module.RMSNorm(64)
    report = apply(model)
    assert "in train mode now" in report.swapped[0].note
    assert ran(model, X) == "reference"
    assert reasons(report) == ["verified in eval mode, the module is in train mode"]
    assert ran(model.eval(), X) == "kernel"
    assert ran(model.train(), X) == "reference"
    assert ran(model.eval(), X) == "kernel"


def test_grad_mode(tmp_path: Path) -> None:
    repo = with_rms(tmp_path)
    model = repo.module.RMSNorm(64).eval()
    report = apply(model)
    assert which(model, X) == "reference"
    model.weight.requires_grad_(False)
    assert which(model, X) == "kernel"
    assert which(model, X.clone().requires_grad_()) == "reference"
    assert reasons(report) == [
        "parameters require grad: called without no_grad",
        "inputs require grad: called without no_grad",
    ]


def test_gradients_still_flow(tmp_path: Path) -> None:
    repo = with_rms(tmp_path)
    model = repo.module.RMSNorm(64).eval()
    apply(model)
    x = X.clone().requires_grad_()
    model(x).sum().backward()
    assert x.grad is not None and model.weight.grad is not None


def test_inference_mode(tmp_path: Path) -> None:
    repo = with_rms(tmp_path)
    model = repo.module.RMSNorm(64).eval()
    apply(model)
    with torch.inference_mode():
        assert which(model, torch.randn(4, 64)) == "kernel"
        assert model(torch.randn(4, 64)).is_inference()


def test_autocast(tmp_path: Path) -> None:
    repo = with_rms(tmp_path)
    model = repo.module.RMSNorm(64).eval()
    report = apply(model)
    for _ in range(2):  # before any call was bound, and after
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            assert which(model, X) == "reference"
        assert ran(model, X) == ran(model, X) == "kernel"
    assert reasons(report) == ["autocast is on"]


@pytest.mark.parametrize("shortcuts", [True, False])
def test_calls_that_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shortcuts: bool) -> None:
    """Modes, shapes, grad and one tensor given twice, each after each: a call must never be taken for another one."""
    from pytest_cudaforge.runtime import shortcut

    if not shortcuts:
        monkeypatch.setattr(shortcut, "_guards", None)
    repo = Repo(tmp_path, TURNS)
    repo.forge("Blend", TURNS_KERNEL, TURNS_PLAN, (X, X, 2.0))
    model = repo.module.Blend(64).eval()
    apply(model)
    y, wide = torch.randn(4, 64), torch.randn(4, 128)[:, ::2]
    graded = X.clone().requires_grad_()
    no_grad, inference, autocast = torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)
    calls = [
        (no_grad, (X, y, 2.0), {}, "kernel"),
        (no_grad, (X, X, 2.0), {}, "kernel"),
        (inference, (X, y, 2.0), {}, "kernel"),
        (no_grad, (X, y), {"factor": 2.0}, "kernel"),
        (no_grad, (X, wide, 2.0), {}, "reference"),
        (no_grad, (graded, y, 2.0), {}, "kernel"),
        (torch.enable_grad, (graded, y, 2.0), {}, "reference"),
        (no_grad, (X, y, 3.0), {}, "reference"),
        (no_grad, (X, y, 2), {}, "reference"),
        (autocast, (X, y, 2.0), {}, "reference"),
        (no_grad, (X[:2], y[:2], 2.0), {}, "kernel"),
        (no_grad, (X.double(), y.double(), 2.0), {}, "reference"),
    ]
    shuffled = random.Random(5)
    for _ in range(12):
        for mode, args, kwargs, expected in shuffled.sample(calls, len(calls)):
            with mode():
                assert which(model, *args, **kwargs) == expected, (mode, args, kwargs)
        with torch.no_grad():
            model.weight.mul_(1.1)


def _vmap(model: Any) -> Any:
    return torch.func.vmap(lambda row: model(row.unsqueeze(0)))(X)


def _functional(model: Any) -> Any:
    return torch.func.grad(lambda x: model(x).sum())(X)


def _forward_ad(model: Any) -> Any:
    with torch.autograd.forward_ad.dual_level():
        return model(torch.autograd.forward_ad.make_dual(X, torch.ones_like(X)))


def _traced(model: Any) -> Any:
    return torch.jit.trace(model, X, check_trace=False)(X)


def _counted(model: Any) -> Any:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False):
        return model(X)


def _fake(model: Any) -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return model(mode.from_tensor(X))


def _fx(model: Any) -> Any:
    return torch.fx.symbolic_trace(model)(X)


class Mine(torch.Tensor):
    """A subclass without any behaviour of its own is still not ours to judge."""


def _subclass(model: Any) -> Any:
    return model(X.as_subclass(Mine))


@pytest.mark.parametrize("call", [_vmap, _functional, _forward_ad, _traced, _counted, _fake, _fx, _subclass])
def test_transforms_tracers_and_modes_see_the_reference(tmp_path: Path, call: Callable[[Any], Any]) -> None:
    repo = with_rms(tmp_path)
    model = repo.module.RMSNorm(64).eval()
    with torch.no_grad():
        expected = call(model)
        apply(model)
        model(X)
        got = call(model)
        assert type(got) is type(expected)
        if type(got).__name__ != "FakeTensor":
            assert torch.equal(torch.as_tensor(got), torch.as_tensor(expected))
        assert ran(model, X) == "kernel"


def test_a_default_device_does_not_stop_a_kernel(tmp_path: Path) -> None:
    repo = with_rms(tmp_path)
    model = repo.module.RMSNorm(64).eval()
    apply(model)
    with torch.device("cpu"):
        assert ran(model, X) == "kernel"


def test_other_kinds_of_input(tmp_path: Path) -> None:
    repo = with_rms(tmp_path)
    model = repo.module.RMSNorm(64).eval()
    report = apply(model)
    assert ran(model, X, **{}) == "kernel"
    assert ran(model, x=X) == "kernel"
    with torch.no_grad():
        with pytest.raises(TypeError):
            model(X, 3)
        with pytest.raises(TypeError):
            model()
        negative = torch.complex(X, X).conj().imag
        assert negative.is_neg()
        assert which(model, negative) == "reference"
    assert "an input is no plain tensor, number or container of these" in reasons(report)


def test_a_meta_tensor_is_not_an_address(tmp_path: Path) -> None:
    repo = with_rms(tmp_path)
    model = repo.module.RMSNorm(64).eval()
    apply(model)
    assert ran(model, X) == "kernel"
    meta = copy.deepcopy(model).to("meta")
    with torch.no_grad():
        assert meta(torch.empty(4, 64, device="meta")).device.type == "meta"
    model.to("meta")
    with torch.no_grad():
        assert model(torch.empty(4, 64, device="meta")).shape == (4, 64)


# -- a module that changes -------------------------------------------------------------------------------------


def test_an_attribute_that_changes_is_traced_anew(tmp_path: Path) -> None:
    repo = with_rms(tmp_path)
    model = repo.module.RMSNorm(64).eval()
    apply(model)
    assert ran(model, X) == "kernel"
    model.eps = 10.0
    assert ran(model, X) == "kernel"
    other = repo.module.RMSNorm(64, eps=3.0).eval()
    apply(other)
    assert ran(other, X) == "kernel"
    assert ran(model, X) == "kernel"


def test_a_value_that_may_be_built_in_holds(tmp_path: Path) -> None:
    plan = RMS_PLAN.replace("module.eps", "1e-6")
    repo = Repo(tmp_path)
    repo.forge("RMSNorm", RMS_KERNEL, plan, (torch.randn(4, 64),), attributes=(("eps", 1e-6),))
    model, other = repo.module.RMSNorm(64, eps=1e-6).eval(), repo.module.RMSNorm(64, eps=3.0).eval()
    apply(model)
    report = apply(other)
    assert ran(model, X) == "kernel" and ran(other, X) == "reference"
    assert reasons(report)[-1] == "verified with eps = 1e-06, this module has 3.0"
    with torch.no_grad():
        compiled = torch.compile(other, fullgraph=True)(X)
        assert torch.allclose(compiled, other(X))
    model.eps = 1e-5
    assert ran(model, X) == "reference"
    model.eps = 1e-6
    assert ran(model, X) == "kernel"
    del model.eps
    model.__dict__["epsilon"] = 1e-6
    with pytest.raises(AttributeError, match="eps"):  # the reference's own
        model(X)


TRIANGLE = """
import torch
from torch import nn
from pytest_cudaforge import forge_target

@forge_target(inputs=lambda: [torch.randn(4, 64)])
class Triangle(nn.Module):
    def __init__(self, diagonal=0):
        super().__init__()
        self.register_buffer("mask", torch.ones(4, 64).tril(diagonal))

    def forward(self, x):
        return x * self.mask
"""
TRIANGLE_KERNEL = """
extern "C" void triangle(const float* x, float* y, long long rows, long long cols) {
  for (long long r = 0; r < rows; ++r)
    for (long long c = 0; c < cols; ++c) y[r * cols + c] = c > r ? 0 : 2 * x[r * cols + c];
}
"""
TRIANGLE_PLAN = """
from pytest_cudaforge.plan import empty, launch

def plan(module, x):
    y = empty(x.shape, x.dtype)
    launch("triangle", args=(x, y, *module.mask.shape))
    return y
"""


def test_a_mask_that_may_be_built_in_holds(tmp_path: Path) -> None:
    repo = Repo(tmp_path, TRIANGLE)
    mask = torch.ones(4, 64).tril()
    held = (("mask", fingerprint_of(mask)),)
    repo.forge("Triangle", TRIANGLE_KERNEL, TRIANGLE_PLAN, (torch.randn(4, 64),), buffers=held)
    model, other = repo.module.Triangle().eval(), repo.module.Triangle(2).eval()
    apply(model)
    report = apply(other)
    for _ in range(3):  # also by the short way
        assert ran(model, X) == "kernel" and ran(other, X) == "reference"
    assert reasons(report)[-1] == "verified with other values in mask"
    model.mask[0, 5] = 1
    assert ran(model, X) == "reference"
    model.mask[0, 5] = 0
    assert ran(model, X) == "kernel" and ran(model, X) == "kernel"
    model.load_state_dict(other.state_dict())
    assert ran(model, X) == "reference"
    other.mask = mask.clone()
    assert ran(other, X) == "kernel" and ran(copy.deepcopy(other), X) == "kernel"
    with torch.inference_mode():
        other.mask = mask.clone()
    assert [ran(other, X) for _ in range(2)] == ["reference"] * 2


def test_compiled_code_watches_no_values(tmp_path: Path) -> None:
    repo = Repo(tmp_path, TRIANGLE)
    held = (("mask", fingerprint_of(torch.ones(4, 64).tril())),)
    repo.forge("Triangle", TRIANGLE_KERNEL, TRIANGLE_PLAN, (torch.randn(4, 64),), buffers=held)
    model = repo.module.Triangle().eval()
    report = apply(model)
    with torch.no_grad():
        assert torch.equal(torch.compile(model, fullgraph=True, backend="eager")(X), X * model.mask)
    assert any("built in" in reason for found in report.compiled.values() for reason in found), report


def test_weights_may_change_and_move(tmp_path: Path) -> None:
    repo = with_rms(tmp_path)
    model = repo.module.RMSNorm(64).eval()
    report = apply(model)
    assert ran(model, X) == "kernel"
    with torch.no_grad():
        model.weight.mul_(3)
    assert ran(model, X) == "kernel"
    model.weight.data = torch.randn(64)
    assert ran(model, X) == "kernel"
    model.weight = torch.nn.Parameter(torch.randn(64))
    assert ran(model, X) == "kernel"
    model.load_state_dict({"weight": torch.full((64,), 5.0)})
    assert ran(model, X) == "kernel"
    model.double()
    assert ran(model, X.double()) == "reference"
    model.float()
    assert ran(model, X) == "kernel"
    model.weight.data = torch.randn(128)[::2]
    assert ran(model, X) == "reference"
    assert reasons(report)[-1] == "weight is not contiguous"
    model.half()
    with torch.no_grad():
        assert model(X.half()).dtype == torch.half


def test_a_weight_of_another_dtype_never_reaches_the_kernel(tmp_path: Path) -> None:
    repo = with_rms(tmp_path)
    model = repo.module.RMSNorm(64).eval()
    apply(model)
    assert ran(model, X) == "kernel"
    model.weight.data = model.weight.data.double()
    with torch.no_grad(), disabled():
        expected = model(X)
    with torch.no_grad(), pytest.warns(ForgeWarning, match=r"argument 2 of 6 \(const float\*\)"):
        assert torch.equal(model(X), expected)


def test_a_parametrised_module_goes_to_the_reference(tmp_path: Path) -> None:
    class Half(torch.nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight / 2

    repo = with_rms(tmp_path)
    model = repo.module.RMSNorm(64).eval()
    apply(model)
    assert ran(model, X) == "kernel"
    torch.nn.utils.parametrize.register_parametrization(model, "weight", Half())
    assert ran(model, X) == "reference"


def test_functional_call_uses_the_given_weights(tmp_path: Path) -> None:
    repo = with_rms(tmp_path)
    model = repo.module.RMSNorm(64).eval()
    apply(model)
    with torch.no_grad():
        weight = torch.randn(64)
        got = torch.func.functional_call(model, {"weight": weight}, (X,))
        with disabled():
            expected = torch.func.functional_call(model, {"weight": weight}, (X,))
    assert torch.allclose(got, 2 * expected, rtol=1e-5)


def test_plain_tensor_attributes_and_lists_are_state_too(tmp_path: Path) -> None:
    kernel = """
    extern "C" void both(const float* x, const float* a, const float* b, float* y, long long rows, long long cols) {
      for (long long i = 0; i < rows * cols; ++i) y[i] = 2 * (x[i] * a[i % cols] + b[i % cols]);
    }
    """
    plan = """
from pytest_cudaforge.plan import empty, launch

def plan(module, x):
    y = empty(x.shape, x.dtype)
    launch("both", args=(x, module.scale, module.shifts[0], y, x.shape[0], x.shape[1]))
    return y
"""
    repo = multi(tmp_path)
    x = torch.randn(8, 16)
    repo.forge("Plain", kernel, plan, (x,))
    model = repo.module.Plain(16).eval()
    report = apply(model)
    assert ran(model, x) == "kernel"
    model.scale = torch.randn(16)
    assert ran(model, x) == "kernel"
    model.shifts[0] = torch.randn(16)
    assert ran(model, x) == "kernel"
    model.shifts.append(3)
    assert ran(model, x) == "kernel"
    del model.scale
    with torch.no_grad(), pytest.raises(AttributeError):
        model(x)
    assert len(reasons(report)) == 1


def test_hooks_run(tmp_path: Path) -> None:
    repo = with_rms(tmp_path)
    model = repo.module.RMSNorm(64).eval()
    apply(model)
    seen = []
    model.register_forward_hook(lambda module, args, output: seen.append(output))
    model.register_forward_pre_hook(lambda module, args: (args[0] * 1,))
    assert ran(model, X) == "kernel"
    assert len(seen) == 2


# -- the module stays a module ---------------------------------------------------------------------------------


def test_state_dict_class_and_repr_stay(tmp_path: Path) -> None:
    repo = with_rms(tmp_path)
    model = repo.module.Net().eval()
    before, text, kind = list(model.state_dict()), repr(model), type(model.layers[0])
    apply(model)
    ran(model.layers[0], X)
    assert (list(model.state_dict()), repr(model)) == (before, text)
    assert type(model.layers[0]) is kind is repo.module.RMSNorm


def test_a_deep_copy_is_applied_and_independent(tmp_path: Path) -> None:
    repo = with_rms(tmp_path)
    model = repo.module.RMSNorm(64).eval()
    apply(model)
    assert ran(model, X) == "kernel"
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.weight.fill_(7.0)
    assert ran(twin, X) == ran(model, X) == "kernel"
    with torch.no_grad():
        assert torch.allclose(twin(X), 7 * model(X), rtol=1e-5)


def test_a_shallow_copy_does_not_use_the_originals_weights(tmp_path: Path) -> None:
    repo = with_rms(tmp_path)
    model = repo.module.RMSNorm(64).eval()
    apply(model)
    assert ran(model, X) == "kernel"
    replica = model._replicate_for_data_parallel()
    replica._parameters["weight"] = torch.full((64,), 3.0)
    assert ran(replica, X) == ran(model, X) == "kernel"
    with torch.no_grad():
        assert torch.allclose(replica(X), 3 * model(X), rtol=1e-5)


def test_pickle_and_torch_save(tmp_path: Path) -> None:
    repo = with_rms(tmp_path)
    model = repo.module.RMSNorm(64).eval()
    apply(model)
    assert ran(model, X) == "kernel"
    again = pickle.loads(pickle.dumps(model))
    assert ran(again, X) == "reference"
    apply(again)
    assert ran(again, X) == "kernel"
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    assert b"pytest_cudaforge" not in stream.getvalue()
    assert ran(torch.load(stream, weights_only=False), X) == "reference"


def test_a_deleted_model_frees_its_memory_at_once(tmp_path: Path) -> None:
    repo = with_rms(tmp_path)
    model = repo.module.Net().eval()
    report = apply(model)
    assert ran(model.layers[0], X) == "kernel"
    with torch.no_grad():
        model(torch.randn(3, 64)), model(X.double().float().t().contiguous().t())
    gone = weakref.ref(model.layers[0].weight)
    gc.collect()
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()
    assert report.fallbacks == {}


def test_disabled_is_for_this_thread_only(tmp_path: Path) -> None:
    repo = with_rms(tmp_path)
    model = repo.module.RMSNorm(64).eval()
    apply(model)
    found = []
    with disabled():
        assert ran_plain(model) == "reference"
        thread = threading.Thread(target=lambda: found.append(ran_plain(model)))
        thread.start()
        thread.join()
    assert found == ["kernel"]
    assert ran_plain(model) == "kernel"


def ran_plain(model: Any) -> str:
    with torch.no_grad():
        output = model(X)
        expected = type(model).forward.__wrapped__(model, X)
    return "kernel" if torch.allclose(output, 2 * expected, rtol=1e-5) else "reference"


def test_many_threads(tmp_path: Path) -> None:
    repo = with_rms(tmp_path)
    model = repo.module.RMSNorm(64).eval()
    apply(model)
    failures: list[str] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for _ in range(50):
                x = torch.randn(1 + seed % 3, 64, generator=generator)
                got, expected = model(x), 2 * type(model).forward.__wrapped__(model, x)
                if not torch.allclose(got, expected, rtol=1e-4, atol=1e-6):
                    failures.append(f"thread {seed}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def _child(model: Any, queue: Any) -> None:
    torch.set_num_threads(1)
    with torch.no_grad():
        queue.put(model(X).sum().item())


@pytest.mark.parametrize("called_before", [True, False])
def test_a_forked_child_gets_an_answer(tmp_path: Path, called_before: bool) -> None:
    repo = with_rms(tmp_path)
    model = repo.module.RMSNorm(64).eval()
    apply(model)
    if called_before:
        assert ran(model, X) == "kernel"
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_child, args=(model, queue))
    child.start()
    answer = queue.get(timeout=60)
    child.join(60)
    with torch.no_grad(), disabled():
        expected = model(X).sum().item()
    assert child.exitcode == 0
    assert min(abs(answer - expected), abs(answer - 2 * expected)) < 1e-2
    assert ran(model, X) == "kernel"


# -- plans of other shapes -------------------------------------------------------------------------------------

MULTI = """
import torch
from torch import nn
from pytest_cudaforge import forge_target


@forge_target(inputs=lambda: [torch.randn(8, 16)])
class Pair(nn.Module):
    def forward(self, x, scale=None):
        return {"sum": x.sum(-1), "parts": (x[:, :8] * 1, x)}


@forge_target(inputs=lambda: [torch.randn(8, 16), torch.randn(8, 16)])
class Accumulate(nn.Module):
    def forward(self, total, x):
        return total.add_(x)


@forge_target(inputs=lambda: [torch.randn(8, 16)], init=lambda: [16])
class Scaled(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(float(size)))

    def forward(self, x):
        return x * (self.weight * self.weight)


@forge_target(inputs=lambda: [torch.randn(8, 16), torch.randn(8, 16)])
class Remember(nn.Module):
    def forward(self, total, x):
        return total.add_(x).clone()


@forge_target(inputs=lambda: [torch.randn(8, 16)], init=lambda: [16])
class Plain(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.scale = torch.arange(float(size))
        self.shifts = [torch.ones(size)]

    def forward(self, x):
        return x * self.scale + self.shifts[0]


@forge_target(inputs=lambda: [torch.randn(8, 16)], init=lambda: [16])
class Tied(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.first = Scaled(size)
        self.second = self.first

    def forward(self, x):
        return x * self.first.weight * self.second.weight


@forge_target(inputs=lambda: [torch.randn(8, 16)], init=lambda: [16])
class Linear(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.inner = nn.Linear(size, size, bias=False)

    def forward(self, x):
        return torch.relu(self.inner(x))
"""


def multi(root: Path) -> Repo:
    return Repo(root, MULTI)


def test_nested_outputs_scratch_zeros_and_returned_inputs(tmp_path: Path) -> None:
    kernel = """
    extern "C" void copy(const float* x, float* t, long long n) { for (long long i = 0; i < n; ++i) t[i] = x[i]; }
    extern "C" void sums(const float* t, float* s, long long rows, long long cols) {
      for (long long r = 0; r < rows; ++r) for (long long c = 0; c < cols; ++c) s[r] += t[r * cols + c];
    }
    """
    plan = """
from pytest_cudaforge.plan import empty, launch, zeros

def plan(module, x):
    rows, cols = x.shape
    t = empty(x.shape, x.dtype)
    whole = empty(x.shape, x.dtype)
    s = zeros((rows,), x.dtype)
    launch("copy", args=(x, t, x.numel()))
    launch("copy", args=(x, whole, x.numel()))
    launch("sums", args=(t, s, rows, cols))
    return {"sum": s, "parts": (whole[:, :8], x)}
"""
    repo = multi(tmp_path)
    x = torch.randn(8, 16)
    repo.forge("Pair", kernel, plan, (x,))
    model = repo.module.Pair().eval()
    report = apply(model)
    with torch.no_grad():
        first, second = model(x), model(x)
    for output in (first, second):
        assert list(output) == ["sum", "parts"] and type(output["parts"]) is tuple
        assert torch.allclose(output["sum"], x.sum(-1), atol=1e-5)
        assert torch.equal(output["parts"][0], x[:, :8])
        assert output["parts"][1] is x
    assert first["sum"].data_ptr() != second["sum"].data_ptr()
    assert report.fallbacks == {}


SCRATCH_KERNEL = """
#include <cmath>
extern "C" void finish(const float* x, const float* w, const double* t, float* y, long long rows, long long cols,
                       float eps) {
  for (long long r = 0; r < rows; ++r)
    for (long long c = 0; c < cols; ++c)
      y[r * cols + c] = 2 * x[r * cols + c] / std::sqrt(float(t[r] / cols) + eps) * w[c];
}
extern "C" void squares(const float* x, float* s, long long n) { for (long long i = 0; i < n; ++i) s[i] = x[i] * x[i]; }
extern "C" void total(const float* s, double* t, long long cols) {
  for (long long c = 0; c < cols; ++c) *t += s[c];
}
"""
SCRATCH_PLAN = """
from pytest_cudaforge.plan import empty, launch, zeros

def plan(module, x):
    rows, cols = x.shape
    s = empty(x.shape, x.dtype)
    t = zeros((rows,), "float64")
    y = empty(x.shape, x.dtype)
    launch("squares", args=(x, s, x.numel()))
    for row in range(rows):
        launch("total", args=(s[row], t[row], cols))
    launch("finish", args=(x, module.weight, t, y, rows, cols, module.eps))
    return y
"""


@pytest.mark.parametrize("align_bytes", [1, 16])
def test_scratch_zeros_and_addresses_inside_buffers_again_and_again(tmp_path: Path, align_bytes: int) -> None:
    repo = Repo(tmp_path)
    guard = Guard(align_bytes=align_bytes)
    repo.forge("RMSNorm", SCRATCH_KERNEL, SCRATCH_PLAN, (X,), guard=guard)
    model = repo.module.RMSNorm(64).eval()
    apply(model)
    for _ in range(3):
        assert ran(model, torch.randn(4, 64)) == ran(model, torch.randn(2, 64)) == "kernel"
        storage = torch.randn(4 * 64 + 1)
        assert ran(model, storage[1:].view(4, 64)) == ("reference" if align_bytes > 1 else "kernel")


def test_a_plan_that_writes_its_input(tmp_path: Path) -> None:
    kernel = """
    extern "C" void add(float* t, const float* x, long long n) { for (long long i = 0; i < n; ++i) t[i] += x[i]; }
    """
    plan = """
from pytest_cudaforge.plan import launch

def plan(module, total, x):
    launch("add", args=(total, x, x.numel()))
    return total
"""
    repo = multi(tmp_path)
    x = torch.randn(8, 16)
    repo.forge("Accumulate", kernel, plan, (x, x.clone()))
    model = repo.module.Accumulate().eval()
    report = apply(model)
    total = torch.zeros(8, 16)
    with torch.no_grad():
        version = total._version
        assert model(total, x) is total
        assert torch.equal(total, x)
        assert total._version > version
        assert report.fallbacks == {}
        model(total, total)
        assert torch.equal(total, 2 * x)
    assert reasons(report) == ["an input or weight is misaligned, or inputs overlap"]


def test_a_plan_that_returns_nothing(tmp_path: Path) -> None:
    source = """
    import torch
    from pytest_cudaforge import forge_target

    @forge_target(inputs=lambda: [torch.zeros(8, 16), torch.randn(8, 16)])
    def add_to(total, x):
        total.add_(x)
    """
    kernel = """
    extern "C" void add(float* t, const float* x, long long n) { for (long long i = 0; i < n; ++i) t[i] += 2 * x[i]; }
    """
    plan = """
from pytest_cudaforge.plan import launch

def plan(total, x):
    launch("add", args=(total, x, x.numel()))
"""
    repo = Repo(tmp_path, source)
    total, x = torch.zeros(8, 16), torch.randn(8, 16)
    repo.forge("add_to", kernel, plan, (total, x))
    report = apply(repo.module)
    with torch.no_grad():
        for calls in (1, 2, 3):
            assert repo.module.add_to(total, x) is None
            assert torch.allclose(total, 2 * calls * x)
    assert report.fallbacks == {}


def test_a_pointer_that_is_not_const_is_no_write(tmp_path: Path) -> None:
    repo = Repo(tmp_path)
    repo.forge("RMSNorm", RMS_KERNEL.replace("const float*", "float*"), RMS_PLAN, (X,))
    model = repo.module.RMSNorm(64).eval()
    apply(model)
    x = X.clone()
    versions = x._version, model.weight._version
    assert ran(model, x) == ran(model, x) == "kernel"
    assert (x._version, model.weight._version) == versions


def test_an_input_written_but_not_returned_counts_its_version(tmp_path: Path) -> None:
    kernel = """
    extern "C" void step(float* total, float* x, float* y, long long n) {
      for (long long i = 0; i < n; ++i) { total[i] += x[i]; y[i] = 2 * total[i]; }
    }
    """
    plan = """
from pytest_cudaforge.plan import empty, launch

def plan(module, total, x):
    y = empty(x.shape, x.dtype)
    launch("step", args=(total, x, y, x.numel()))
    return y
"""
    repo = multi(tmp_path)
    x = torch.randn(8, 16)
    repo.forge("Remember", kernel, plan, (x, x.clone()))
    model = repo.module.Remember().eval()
    apply(model)
    total = torch.zeros(8, 16)
    with torch.no_grad():
        for turn in range(1, 4):
            assert torch.allclose(model(total, x), 2 * turn * x, rtol=1e-5)
            assert (total._version, x._version) == (turn, 0)


PREPARE = """
from pytest_cudaforge.plan import empty, launch

def prepare(module):
    squares = empty(module.weight.shape, module.weight.dtype)
    launch("square", args=(module.weight, squares, module.weight.numel()))
    return {"squares": squares}

def plan(module, x, prepared):
    y = empty(x.shape, x.dtype)
    launch("scale", args=(x, prepared["squares"], y, x.shape[0], x.shape[1]))
    return y
"""
PREPARE_KERNEL = """
extern "C" void square(const float* w, float* s, long long n) {
  for (long long i = 0; i < n; ++i) s[i] = 2 * w[i] * w[i];
}
extern "C" void scale(const float* x, const float* s, float* y, long long rows, long long cols) {
  for (long long i = 0; i < rows * cols; ++i) y[i] = x[i] * s[i % cols];
}
"""


def test_prepare_runs_again_when_a_weight_changes(tmp_path: Path) -> None:
    repo = multi(tmp_path)
    x = torch.randn(8, 16)
    repo.forge("Scaled", PREPARE_KERNEL, PREPARE, (x,), prepared=True)
    model = repo.module.Scaled(16).eval()
    apply(model)
    twin = copy.deepcopy(model)
    assert ran(model, x) == "kernel"
    with torch.no_grad():
        model.weight.add_(1)
    assert ran(model, x) == "kernel"
    model.load_state_dict({"weight": torch.randn(16)})
    assert ran(model, x) == "kernel"
    model.weight = torch.nn.Parameter(torch.randn(16))
    assert ran(model, x) == "kernel"
    model.weight.data = torch.randn(16)
    assert ran(model, x) == "kernel"
    assert ran(twin, x) == "kernel"


def test_what_prepares_weights_gets_them_aligned(tmp_path: Path) -> None:
    repo = multi(tmp_path)
    x = torch.randn(8, 16)
    kernel = "#include <cstdint>\n" + PREPARE_KERNEL.replace("2 * w", "((uintptr_t)w % 16 ? 0 : 2) * w")
    repo.forge("Scaled", kernel, PREPARE, (x,), prepared=True, guard=Guard(align_bytes=16))
    model = repo.module.Scaled(16).eval()
    flat = torch.randn(17)
    model.weight = torch.nn.Parameter(flat[1:])
    apply(model)
    assert model.weight.data_ptr() % 16 and ran(model, x) == "kernel"
    with torch.no_grad():
        flat.add_(1)
    assert ran(model, x) == "kernel"


def test_weights_that_cannot_tell_of_changes_are_not_prepared(tmp_path: Path) -> None:
    repo = multi(tmp_path)
    x = torch.randn(8, 16)
    repo.forge("Scaled", PREPARE_KERNEL, PREPARE, (x,), prepared=True)
    with torch.inference_mode():
        model = repo.module.Scaled(16).eval()
    report = apply(model)
    assert ran(model, x) == "reference"
    assert "inference tensors" in reasons(report)[0]


def test_a_submodule_that_lies_under_two_names(tmp_path: Path) -> None:
    kernel = """
    extern "C" void twice(const float* x, const float* a, const float* b, float* y, long long rows, long long cols) {
      for (long long i = 0; i < rows * cols; ++i) y[i] = 2 * x[i] * a[i % cols] * b[i % cols];
    }
    """
    plan = """
from pytest_cudaforge.plan import empty, launch

def plan(module, x):
    y = empty(x.shape, x.dtype)
    launch("twice", args=(x, module.first.weight, module.second.weight, y, x.shape[0], x.shape[1]))
    return y
"""
    repo = multi(tmp_path)
    x = torch.randn(8, 16)
    repo.forge("Tied", kernel, plan, (x,))
    model = repo.module.Tied(16).eval()
    report = apply(model)
    assert ran(model, x) == "kernel"
    model.second = repo.module.Scaled(16).eval()
    assert ran(model, x) == "kernel"
    assert reasons(report) == []


def test_a_plan_with_a_library_call(tmp_path: Path) -> None:
    kernel = """
    extern "C" void relu2(const float* a, float* y, long long n) {
      for (long long i = 0; i < n; ++i) y[i] = a[i] > 0 ? 2 * a[i] : 0;
    }
    """
    plan = """
from pytest_cudaforge.plan import empty, launch, op

def plan(module, x):
    a = op("aten.mm", x, module.inner.weight.t())
    y = empty(a.shape, a.dtype)
    launch("relu2", args=(a, y, a.numel()))
    return y
"""
    repo = multi(tmp_path)
    x = torch.randn(8, 16)
    repo.forge("Linear", kernel, plan, (x,))
    model = repo.module.Linear(16).eval()
    report = apply(model)
    assert ran(model, x) == "kernel"
    model.inner = torch.nn.Linear(16, 16, bias=False).eval()
    assert ran(model, x) == "kernel"
    assert set(reasons(report)) == set()


# -- kernels that do not work ----------------------------------------------------------------------------------


@contextlib.contextmanager
def one_warning(match: str) -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    texts = [str(w.message) for w in caught if issubclass(w.category, ForgeWarning)]
    assert len(texts) == 1 and match in texts[0], texts


@pytest.mark.parametrize(
    ("kernel", "plan", "match"),
    [
        ("int x = ;", RMS_PLAN, "g++ refused the source"),
        (RMS_KERNEL, RMS_PLAN.replace('"rms"', '"other"'), "other"),
        (RMS_KERNEL, RMS_PLAN.replace("module.eps)", "1)").replace(", rows, cols", ""), "arguments"),
        (RMS_KERNEL, "def plan(module, x):\n    return x.values()\n", "plan.py:2"),
        (RMS_KERNEL, "def plan(:\n", "plan.py:1"),
        (RMS_KERNEL, RMS_PLAN.replace("empty(x.shape", "empty((1 << 50,)"), "plan.py:6"),
    ],
)
def test_a_kernel_that_does_not_build_warns_once(tmp_path: Path, kernel: str, plan: str, match: str) -> None:
    repo = Repo(tmp_path)
    repo.forge("RMSNorm", kernel, plan, (X,))
    model = repo.module.Net().eval()
    report = apply(model)
    with one_warning(match), torch.no_grad():
        for _ in range(3):
            model(X)
    assert sum(report.fallbacks["layers.0"].values()) == 3


def test_a_plan_that_refuses_is_no_news(tmp_path: Path) -> None:
    plan = RMS_PLAN.replace(
        "from pytest_cudaforge.plan import empty", "from pytest_cudaforge.plan import Unsupported, empty"
    )
    plan = plan.replace("    y = empty", '    if rows % 4:\n        raise Unsupported("rows % 4")\n    y = empty')
    repo = Repo(tmp_path)
    repo.forge("RMSNorm", RMS_KERNEL, plan, (X,))
    model = repo.module.RMSNorm(64).eval()
    report = apply(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ran(model, X) == "kernel"
        assert ran(model, torch.randn(3, 64)) == "reference"
    assert any("rows % 4" in reason for reason in reasons(report))


def test_no_compiler_and_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repo = with_rms(tmp_path)
    code = f"""
import importlib.util, sys, torch, warnings
from pytest_cudaforge import apply
spec = importlib.util.spec_from_file_location({repo.file.stem!r}, {str(repo.file)!r})
layers = importlib.util.module_from_spec(spec); sys.modules[spec.name] = layers; spec.loader.exec_module(layers)
model = layers.RMSNorm(64).eval()
report = apply(model)
x = torch.randn(4, 64)
with warnings.catch_warnings(record=True) as caught, torch.no_grad():
    warnings.simplefilter("always")
    model(x); model(x)
print(len(caught), report.fallbacks, *[w.message for w in caught])
for name in ("pytest", "openai", "git", "_pytest"):
    assert name not in sys.modules, name
"""
    environment = {**os.environ, "PATH": str(tmp_path), "CUDAFORGE_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("1 {'': {'g++ is not on PATH': 2}}"), done.stdout


def test_no_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    monkeypatch.setenv("CUDAFORGE_CACHE_DIR", str(tmp_path / "cache"))
    repo = with_rms(tmp_path)
    model = repo.module.RMSNorm(64).eval()
    apply(model)
    with one_warning("temporary directory"), torch.no_grad():
        model(X)
        model(X)


# -- the cache of binaries -------------------------------------------------------------------------------------


def test_a_second_process_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("CUDAFORGE_CACHE_DIR", str(cache))
    repo = with_rms(tmp_path)
    first, second = repo.module.RMSNorm(64).eval(), repo.module.RMSNorm(64).eval()
    apply(first)
    assert ran(first, X) == "kernel"
    assert cache.stat().st_mode & 0o777 == 0o700
    files = {path: path.stat().st_mtime_ns for path in cache.rglob("*") if path.is_file()}
    assert files
    apply(second)  # a new apply has kernels of its own: what they share is the disk
    assert ran(second, X) == "kernel"
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*") if path.is_file()} == files


def _truncated(path: Path, _: bytes) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def _garbage(path: Path, _: bytes) -> None:
    path.write_bytes(path.read_bytes()[:-7] + b"garbage")


def _empty(path: Path, _: bytes) -> None:
    path.write_bytes(b"")


def _anothers(path: Path, other: bytes) -> None:
    path.write_bytes(other)


def _folder(path: Path, _: bytes) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [_truncated, _garbage, _empty, _anothers, _folder])
def test_a_corrupt_cache_is_rebuilt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_cache: Path, damage: Callable[[Path, bytes], None]
) -> None:
    cache = tmp_path / "cache"
    shutil.copytree(warm_cache / "cache", cache)
    monkeypatch.setenv("CUDAFORGE_CACHE_DIR", str(cache))
    files = sorted(path for path in cache.rglob("*") if path.is_file())
    before = [path.read_bytes() for path in files]
    assert len(files) == 2  # the binary, and plan and binary ready to load
    for path, other in zip(files, reversed(before), strict=True):
        damage(path, other)
    model = import_layers(warm_cache).RMSNorm(64).eval()
    apply(model, manifest=warm_cache / "forged")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if damage is _folder else "error")
        assert ran(model, X) == "kernel"
    if damage is not _folder:
        assert [len(path.read_bytes()) for path in files] == [len(data) for data in before]


def test_only_what_is_ready_to_load_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_cache: Path
) -> None:
    """Neither compiler nor interpreter: the binary's own entry is gone, and stays gone."""
    cache = tmp_path / "cache"
    shutil.copytree(warm_cache / "cache", cache)
    monkeypatch.setenv("CUDAFORGE_CACHE_DIR", str(cache))
    for path in cache.rglob("*"):
        if path.is_file() and b"CFCACHE1B" in path.read_bytes()[:9]:
            path.unlink()
    model = import_layers(warm_cache).RMSNorm(64).eval()
    apply(model, manifest=warm_cache / "forged")
    assert ran(model, X) == "kernel"
    assert len([path for path in cache.rglob("*") if path.is_file()]) == 1


def test_a_cache_that_others_can_write_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(0o777)
    monkeypatch.setenv("CUDAFORGE_CACHE_DIR", str(cache))
    repo = with_rms(tmp_path)
    model = repo.module.RMSNorm(64).eval()
    apply(model)
    assert ran(model, X) == "kernel"
    assert list(cache.iterdir()) == []


def test_entries_of_several_archs_live_together(tmp_path: Path) -> None:
    repo = with_rms(tmp_path)
    repo.forge("RMSNorm", "__global__ void rms() {}", RMS_PLAN, (X,), language="cuda", arch="sm_90")
    model = repo.module.RMSNorm(64).eval()
    report = apply(model)
    assert report.swapped[0].kernel.count("rms_norm") == 2
    assert ran(model, X) == "kernel"


def test_an_entry_may_be_found_by_its_path(tmp_path: Path) -> None:
    """The same file under another import name, as `python layers.py` or a differing root would give it."""
    repo = Repo(tmp_path)
    entry = repo.forge("RMSNorm", RMS_KERNEL, RMS_PLAN, (X,))
    repo.forge("RMSNorm", RMS_KERNEL, RMS_PLAN, (X,), **{"import_name": f"package.{entry.import_name}"})
    assert replace(entry, import_name="x") != entry
    model = repo.module.RMSNorm(64).eval()
    apply(model)
    assert ran(model, X) == "kernel"


# -- several kernels of one target -----------------------------------------------------------------------------


def test_the_kernel_that_was_measured_fastest_nearby_serves_a_call(tmp_path: Path) -> None:
    """Factors tell which: 2 was drawn at 4 rows, 3 at 4 and 512 rows, 5 in float64, and 7 is stale."""
    repo = Repo(tmp_path)
    calls = {2: [torch.randn(4, 64)], 3: [torch.randn(4, 64), torch.randn(512, 64)], 5: [torch.randn(4, 64).double()]}
    for factor, drawn in calls.items():
        kernel = RMS_KERNEL.replace("= 2 *", f"= {factor} *")
        kernel = kernel.replace("float*", "double*") if factor == 5 else kernel
        changes: dict[str, Any] = {"variant": f"v{factor}"} if factor != 3 else {}
        repo.forge("RMSNorm", kernel, RMS_PLAN, *((x,) for x in drawn), **changes)
    stale = RMS_KERNEL.replace("= 2 *", "= 7 *")
    repo.forge("RMSNorm", stale, RMS_PLAN, (torch.randn(9, 64),), variant="v7", source_digest="0" * 64)
    _set_speedups(repo.manifest, {"v2": 3.0, "": 2.0, "v5": 1.5, "v7": 9.0})
    report = apply(model := repo.module.RMSNorm(64).eval())
    assert report.swapped[0].kernel.count(",") == 2
    served = {rows: _factor(model, torch.randn(rows, 64)) for rows in (4, 5, 300, 512, 2000)}
    assert served == {4: 2, 5: 2, 300: 3, 512: 3, 2000: 3}
    assert _factor(model.double(), torch.randn(4, 64).double()) == 5
    assert report.fallbacks == {}


def _set_speedups(manifest: Path, speedups: dict[str, float]) -> None:
    loaded = Manifest.load(manifest)
    entries = [
        replace(e, workloads=tuple(replace(w, speedup_eager=speedups[e.variant]) for w in e.workloads))
        for e in loaded.entries
    ]
    loaded.merged(entries).write(manifest)


def _factor(model: Any, x: Any) -> int:
    with torch.no_grad():
        output = model(x)
        expected = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + model.eps) * model.weight
    return round(float((output / expected).median()))
