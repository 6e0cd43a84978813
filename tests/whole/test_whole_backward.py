"""Gradients in the verdict: real compilers, real workers, and autograd in fp64 as the oracle."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gradient_targets import candidate, find, write_repo
from known_ceilings import cache_with_ceilings

from pytest_cudaforge.evaluation.bench import Bench
from pytest_cudaforge.evaluation.cases import call_layout
from pytest_cudaforge.evaluation.evaluator import Evaluator, EvaluatorSettings
from pytest_cudaforge.evaluation.frames import Case
from pytest_cudaforge.evaluation.gradients import GradientSubject
from pytest_cudaforge.evaluation.regions import region_view
from pytest_cudaforge.records import Candidate, DeviceFacts, Evaluation, Status, from_json, to_json
from pytest_cudaforge.runtime.gradients import FUNCTION, backward_workload
from pytest_cudaforge.runtime.signature import Signature, describe_module
from pytest_cudaforge.runtime.trace import trace


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repo")
    write_repo(root)
    return root


@pytest.fixture(scope="module")
def evaluator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Evaluator]:
    cache = tmp_path_factory.mktemp("cache")
    settings = EvaluatorSettings(
        cache_dir=cache_with_ceilings(cache), timing_budget_s=0.4, hang_limit_s=5.0, lock_dir=cache
    )
    with Evaluator(settings) as opened:
        yield opened


def _evaluate(evaluator: Evaluator, repo: Path, tried: Candidate, name: str = "Gate") -> Evaluation:
    return evaluator.evaluate(tried, find(repo, name), timing=False)


@pytest.mark.parametrize("name", ["Gate", "softmax", "parts"])
def test_honest_gradients_are_verified(evaluator: Evaluator, repo: Path, name: str) -> None:
    evaluation = _evaluate(evaluator, repo, candidate(name), name)
    assert evaluation.status is Status.PASSED, evaluation.reason
    assert evaluation.reason == "correct (gradients verified)"
    verification = evaluation.verification
    assert verification is not None and verification.backward
    backward = {case.case for case in verification.cases if case.workload == "default::backward"}
    assert backward >= {"drawn", "after many calls", "over old outputs", "repeated", "sealed inputs"}
    again = from_json(Evaluation, to_json(evaluation))
    assert to_json(again) == to_json(evaluation) and again.verification.backward


def test_every_workload_has_a_backward(evaluator: Evaluator, repo: Path) -> None:
    evaluation = _evaluate(evaluator, repo, candidate("softmax"), "softmax")
    assert evaluation.verification is not None
    names = {case.workload for case in evaluation.verification.cases}
    assert names == {"default", "wide", "default::backward", "wide::backward"}


def test_what_forward_returned_follows_values_and_weights(repo: Path) -> None:
    subject, name = GradientSubject(find(repo, "Gate"), "cpu"), backward_workload("default")
    args, kwargs = subject.draw(name, 0)
    assert subject.module is not None
    facts = DeviceFacts("cpu", "a CPU", "cpu", memory_bytes=1 << 30)
    signature = Signature.of(args, kwargs, describe_module(subject.module), facts, "cpp")
    layout = call_layout(trace(candidate().file("plan.py"), signature, function=FUNCTION), frames=1).data
    one, other = Bench(subject, name, "", layout), Bench(subject, name, "", layout)
    one.fill(0, Case(1, "drawn", 11), 0)
    place = one.regions["state/weight"][0], one.specs["state/weight"]
    drawn = region_view(one.bytes, *place).clone()
    for change in (lambda: one.exchange(0, 5), lambda: one.renew([6]), lambda: one.touch(0, 7)):
        other.fill(0, Case(2, "drawn", 22), 0)
        change()
        inputs, weights = one.frames[0].inputs, subject.state()
        expected = inputs["0"].sigmoid() * weights["weight"] + weights["bias"]
        torch.testing.assert_close(inputs["kw.out"], expected)
        # What the candidate sees is what its inputs were made with: a few elements of what was drawn are exchanged.
        seen = region_view(one.bytes, *place)
        assert torch.equal(seen, weights["weight"])
        assert 0 < int((seen != drawn).sum()) <= 8
        assert torch.equal(seen.flatten().sort().values, drawn.flatten().sort().values)
    one.close()
    other.close()


@pytest.mark.parametrize("renewed", [False, True])
def test_what_is_staged_is_written_by_others_and_what_follows_from_it_as_well(repo: Path, renewed: bool) -> None:
    subject, name = GradientSubject(find(repo, "Gate"), "cpu"), backward_workload("default")
    args, kwargs = subject.draw(name, 0)
    assert subject.module is not None
    facts = DeviceFacts("cpu", "a CPU", "cpu", memory_bytes=1 << 30)
    signature = Signature.of(args, kwargs, describe_module(subject.module), facts, "cpp")
    layout = call_layout(trace(candidate().file("plan.py"), signature, function=FUNCTION), frames=1).data
    bench = Bench(subject, name, "", layout)
    bench.fill(0, Case(1, "drawn", 11), 0)
    before, drawn = bench.bytes.clone(), bench.frames[0].inputs["0"].clone()
    pieces = bench.stage(0, 5, renewed)
    assert torch.equal(bench.bytes, before)
    for offset, data in pieces:
        bench.bytes[offset : offset + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    inputs, weights = bench.frames[0].inputs, subject.state()
    torch.testing.assert_close(inputs["kw.out"], inputs["0"].sigmoid() * weights["weight"] + weights["bias"])
    for path, value in inputs.items():
        region = f"f0/input/{path}"
        if region in bench.regions:
            assert torch.equal(region_view(bench.bytes, bench.regions[region][0], bench.specs[region]), value)
    changed = int((inputs["0"] != drawn).sum())
    assert changed > drawn.numel() // 2 if renewed else 0 < changed <= 8
    bench.close()


def test_candidate_without_plan_backward_is_forward_only(evaluator: Evaluator, repo: Path) -> None:
    evaluation = _evaluate(evaluator, repo, candidate(forward_only=True))
    assert evaluation.status is Status.PASSED, evaluation.reason
    assert "forward only: plan.py has no plan_backward" in evaluation.reason
    assert evaluation.verification is not None and not evaluation.verification.backward


_NO_BIAS = ('"weight": dw, "bias": db', '"weight": dw')
_HALF = ("db = empty(module.bias.shape, x.dtype)", 'db = empty(module.bias.shape, "float16")')


@pytest.mark.parametrize(
    ("changed", "status", "words"),
    [
        (candidate(plan=_NO_BIAS), Status.INCORRECT_SHAPE, "returns no gradient of parameter bias"),
        (candidate(plan=('"bias": db', '"bais": db')), Status.BUILD_ERROR, "a gradient of 'bais'"),
        (candidate(plan=('{"x": dx, "weight": dw, "bias": db}', "dx, dw, db")), Status.BUILD_ERROR, "a dict of grad"),
        (candidate(plan=("x, out, grad_out", "x, out, grad_out, more")), Status.BUILD_ERROR, "misses the argument"),
        (candidate(plan=("module.bias.shape", "module.bias.shape * 2")), Status.INCORRECT_SHAPE, "expected (64,)"),
        (candidate(plan=_HALF), Status.BUILD_ERROR, "float16"),
        (candidate(plan=('"x": dx', '"x": grad_out')), Status.INCORRECT_SHAPE, "shares memory"),
        (candidate(source=("db[c] = (float)sum_b", "(void)0")), Status.INCORRECT_NUMERICAL, "of parameter bias"),
        (candidate(source=("g[i] * w[c]", "w[c]")), Status.INCORRECT_NUMERICAL, "the gradient of input 0 (x)"),
        (candidate(source=("dw[c] = (float)sum_w;", "dw[c + 1] = (float)sum_w;")), Status.REJECTED, "out of bounds"),
    ],
)  # fmt: skip
def test_wrong_backward_is_refused(
    evaluator: Evaluator, repo: Path, changed: Candidate, status: Status, words: str
) -> None:
    evaluation = _evaluate(evaluator, repo, changed)
    assert (evaluation.status, words in evaluation.reason) == (status, True), evaluation.reason
    assert evaluation.verification is None or not evaluation.verification.backward


@pytest.mark.parametrize(
    ("name", "words"),
    [("scale_", "forward writes input/0"), ("signs", "no input and no parameter has a gradient")],
)
def test_reference_without_a_backward_is_said(evaluator: Evaluator, repo: Path, name: str, words: str) -> None:
    reason, workloads = evaluator.oracle.backward(find(repo, name))
    assert words in reason and not workloads


def test_inputs_that_ask_for_gradients_are_the_only_ones(evaluator: Evaluator, repo: Path) -> None:
    reason, (workload,) = evaluator.oracle.backward(find(repo, "product"))
    assert not reason and [path for path, _ in workload.outputs] == ["out.0"]


def test_values_that_cancel_to_nothing_are_not_asked_about(repo: Path) -> None:
    """A shifted attention looks at one entry alone: what the reference gives for q is the rounding of zero."""
    attention, gate = (GradientSubject(find(repo, name), "cpu") for name in ("attention", "Gate"))
    name = backward_workload("default")
    assert "shifted" not in attention.domain.families(name) and attention.domain.families(name)
    assert "shifted" in gate.domain.families(name) and len(gate.domain.families(name, 3)) == 3


def test_every_floating_output_has_a_gradient(evaluator: Evaluator, repo: Path) -> None:
    _, (workload,) = evaluator.oracle.backward(find(repo, "parts"))
    leaves = dict(workload.inputs)
    assert leaves["kw.grad_out.count"] is None and leaves["kw.scale"] == 2.0
    assert leaves["kw.grad_out.moved"] == leaves["kw.out.moved"]
    assert [path for path, _ in workload.outputs] == ["out.kw.shift", "out.kw.x"]
