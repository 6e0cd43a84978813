"""apply() under autograd: forward's kernel with its verified backward, by the real compiler, against the reference."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import gradient_targets as targets
import pytest
import torch
from forged_layers import Repo
from torch import nn
from torch.utils.checkpoint import checkpoint

from pytest_cudaforge import apply
from pytest_cudaforge.runtime.manifest import Manifest

X = torch.randn(33, 64, generator=torch.Generator().manual_seed(1))


def _repo(tmp_path: Path, name: str = "Gate", plan: tuple[str, str] = ("", ""), **changes: Any) -> Repo:
    repo = Repo(tmp_path, targets.LAYERS)
    made = targets.candidate(name, plan=plan)
    settings: dict[str, Any] = {"backward": True, "mode": "train" if name == "Gate" else "eval", **changes}
    calls: dict[str, Any] = {"Gate": ((X,), {}), "softmax": ((torch.randn(16, 300),), {})}
    calls["parts"] = ((), {"x": torch.randn(8, 64), "scale": 2.0, "shift": torch.randn(64)})
    args, kwargs = calls[name]
    repo.forge(name, made.file("kernel.cpp"), made.file("plan.py"), args, kwargs=kwargs, **settings)
    return repo


def _replayed(output: torch.Tensor) -> bool:
    return type(output.grad_fn).__name__ == "_ReplayedBackward"


def _gates(repo: Repo) -> tuple[nn.Module, nn.Module, Any]:
    """A model whose forward is forged, its twin that is not, and the report."""
    torch.manual_seed(0)
    model: nn.Module = repo.module.Gate(64)
    with torch.no_grad():
        model.weight.normal_()
        model.bias.normal_()
    twin = copy.deepcopy(model)
    report = apply(model)
    assert report.swapped
    return model, twin, report


def _grads(model: nn.Module, x: torch.Tensor, out_grad: torch.Tensor) -> dict[str, torch.Tensor | None]:
    x = x.clone().requires_grad_()
    model(x).backward(out_grad)
    return {"x": x.grad, **{name: p.grad for name, p in model.named_parameters()}}


def _same(found: dict[str, torch.Tensor | None], expected: dict[str, torch.Tensor | None]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=lambda text, name=name: f"{name}: {text}")


def test_gradients_are_the_reference_s(tmp_path: Path) -> None:
    model, twin, report = _gates(_repo(tmp_path))
    assert _replayed(model(X))
    grad = torch.randn(33, 64)
    _same(_grads(model, X, grad), _grads(twin, X, grad))
    assert not reasons(report)


def reasons(report: Any) -> list[str]:
    return list(report.fallbacks.get("", {}))


def test_a_model_trains_along_the_reference_s_curve(tmp_path: Path) -> None:
    repo = _repo(tmp_path)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.gates = nn.Linear(16, 64), nn.ModuleList(repo.module.Gate(64) for _ in range(3))
            self.last = nn.Linear(64, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.first(x)
            for gate in self.gates:
                h = h + gate(h)
            return self.last(h)

    torch.manual_seed(3)
    forged = Net()
    reference = copy.deepcopy(forged)
    apply(forged)
    data = torch.randn(33, 16)
    goal = data.sin().sum(1, keepdim=True)
    curves = []
    for model in (forged, reference):
        optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.01), []
        for _ in range(40):
            optimizer.zero_grad()
            loss = (model(data) - goal).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        curves.append(torch.tensor(losses))
    assert curves[0][-1] < 0.2 * curves[0][0]
    torch.testing.assert_close(curves[0], curves[1], rtol=1e-3, atol=1e-5)


def test_only_what_requires_grad_gets_one(tmp_path: Path) -> None:
    model, twin, report = _gates(_repo(tmp_path))
    for each in (model, twin):
        each.weight.requires_grad_(False)
        each(X).sum().backward()
    assert model.weight.grad is None
    _same({"bias": model.bias.grad}, {"bias": twin.bias.grad})
    with torch.no_grad():
        assert model(X).grad_fn is None
    assert not reasons(report)


def test_gradients_accumulate_outside(tmp_path: Path) -> None:
    model, twin, _ = _gates(_repo(tmp_path))
    for each in (model, twin):
        output = each(X)
        output.sum().backward(retain_graph=True)
        output.square().mean().backward()
    _same(dict(model.named_parameters()), dict(twin.named_parameters()))
    _same({n: p.grad for n, p in model.named_parameters()}, {n: p.grad for n, p in twin.named_parameters()})


def test_double_backward_says_that_there_is_none(tmp_path: Path) -> None:
    model, _, _ = _gates(_repo(tmp_path))
    x = X.clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_what_was_saved_may_not_change(tmp_path: Path) -> None:
    model, _, _ = _gates(_repo(tmp_path))
    output = model(X)
    with torch.no_grad():
        model.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_gradients_of_any_layout_come_in(tmp_path: Path) -> None:
    model, twin, _ = _gates(_repo(tmp_path))
    shifted = torch.randn(33 * 64 + 1)[1:].view(33, 64)
    for grad in (torch.ones(()).expand(33, 64), torch.randn(64, 33).t(), shifted):
        for each in (model, twin):
            each.zero_grad()
        _same(_grads(model, X, grad), _grads(twin, X, grad))


def test_what_hooks_kept_may_come_back_anywhere(tmp_path: Path) -> None:
    model, twin, _ = _gates(_repo(tmp_path))

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        """A byte-for-byte copy off its alignment, and with other strides where it has two dimensions."""
        if tensor.dim() == 2:
            return tensor.t().contiguous().t()
        return torch.cat([torch.zeros(1), tensor])[1:]

    grad = torch.randn(33, 64)
    with torch.autograd.graph.saved_tensors_hooks(moved, lambda tensor: tensor):
        found = _grads(model, X, grad)
    _same(found, _grads(twin, X, grad))


def test_checkpointing_replays_forward(tmp_path: Path) -> None:
    model, twin, _ = _gates(_repo(tmp_path))
    for each in (model, twin):
        x = X.clone().requires_grad_()
        checkpoint(each, x, use_reentrant=False).sum().backward()
    _same({n: p.grad for n, p in model.named_parameters()}, {n: p.grad for n, p in twin.named_parameters()})


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda model: model(X[:32]), "gradients were verified for the drawn shapes and strides only"),
        (lambda model: model(X.t().contiguous().t()), "gradients were verified for the drawn shapes and strides only"),
        (lambda model: model.eval()(X), "verified in train mode, the module is in eval mode"),
    ],
)
def test_elsewhere_the_reference_runs(tmp_path: Path, call: Any, reason: str) -> None:
    model, _, report = _gates(_repo(tmp_path))
    output = call(model)
    assert output.grad_fn is not None and not _replayed(output)
    assert reasons(report) == [reason]


def test_misaligned_input(tmp_path: Path) -> None:
    model, _, report = _gates(_repo(tmp_path))
    shifted = torch.randn(33 * 64 + 1)[1:].view(33, 64)
    assert not _replayed(model(shifted)) and "misaligned" in reasons(report)[0]


def test_autocast_and_transforms_run_the_reference(tmp_path: Path) -> None:
    model, _, report = _gates(_repo(tmp_path))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not _replayed(model(X))
    torch.func.grad(lambda x: model(x).sum())(X)
    assert set(reasons(report)) == {"autocast is on", "inside a torch.func transform (vmap, grad, ...)"}


@pytest.mark.parametrize("backward", [False, None])
def test_forward_only(tmp_path: Path, backward: bool | None) -> None:
    model, _, report = _gates(_repo(tmp_path, backward=backward))
    assert not _replayed(model(X))
    assert reasons(report) == ["parameters require grad: called without no_grad"]


def test_a_parameter_without_a_gradient_goes_to_the_reference(tmp_path: Path) -> None:
    model, _, report = _gates(_repo(tmp_path, plan=('"weight": dw, "bias": db', '"weight": dw')))
    assert not _replayed(model(X))
    assert reasons(report) == ["bias requires grad, and plan_backward has no gradient of it"]
    model.bias.requires_grad_(False)
    assert _replayed(model(X))


def test_weights_that_are_laid_out_otherwise_go_to_the_reference(tmp_path: Path) -> None:
    model, _, report = _gates(_repo(tmp_path))
    model.weight = nn.Parameter(torch.randn(64, 2)[:, 0])
    assert not _replayed(model(X)) and reasons(report) == ["weight is not contiguous"]


def test_one_buffer_for_two_gradients(tmp_path: Path) -> None:
    model, _, _ = _gates(_repo(tmp_path, plan=('"weight": dw, "bias": db', '"weight": dw, "bias": dw')))
    for _ in range(2):
        model(X).sum().backward()
    model.weight.grad.zero_()
    assert model.bias.grad.abs().sum() > 0


def test_a_changed_module_is_bound_anew(tmp_path: Path) -> None:
    model, _, _ = _gates(_repo(tmp_path))
    model(X).sum().backward()
    model.weight = nn.Parameter(torch.randn(64))
    model.note = 1
    twin = copy.deepcopy(model)
    grad = torch.randn(33, 64)
    model.zero_grad()
    assert _replayed(model(X))
    found = _grads(model, X, grad)
    expected = X.sigmoid() * (1 - X.sigmoid()) * twin.weight.detach() * grad
    torch.testing.assert_close(found["x"], expected)


def test_a_function_that_reads_what_forward_returned(tmp_path: Path) -> None:
    repo = _repo(tmp_path, "softmax")
    reference = repo.module.softmax
    apply(repo.module)
    x = torch.randn(16, 300)
    one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    weight = torch.randn(16, 300)
    output = repo.module.softmax(one)
    assert _replayed(output)
    (output * weight).sum().backward()
    (reference(other) * weight).sum().backward()
    torch.testing.assert_close(one.grad, other.grad)


def test_several_outputs_of_which_one_is_unused_and_one_has_none(tmp_path: Path) -> None:
    repo = _repo(tmp_path, "parts")
    reference = repo.module.parts
    apply(repo.module)
    found = []
    for function in (repo.module.parts, reference):
        generator = torch.Generator().manual_seed(5)
        x = torch.randn(8, 64, generator=generator).requires_grad_()
        shift = torch.randn(64, generator=generator).requires_grad_()
        outputs = function(x=x, scale=2.0, shift=shift)
        assert not outputs["count"].requires_grad
        outputs["moved"].square().sum().backward()
        found.append((outputs, x.grad, shift.grad))
    assert _replayed(found[0][0]["moved"]) and list(found[0][0]) == ["moved", "count", "square"]
    torch.testing.assert_close(found[0][1:], found[1][1:])


def test_manifest_says_so_only_where_gradients_were_asked_for(tmp_path: Path) -> None:
    repo = _repo(tmp_path)
    (entry,) = Manifest.load(repo.manifest).entries
    assert entry.backward is True
    data = json.loads(repo.manifest.read_text())
    del data["entries"][0]["backward"]
    (old,) = Manifest.parse(json.dumps(data)).entries
    assert old.backward is None
    assert "backward" not in Manifest((old,)).render()
