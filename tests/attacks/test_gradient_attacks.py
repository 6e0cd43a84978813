# ruff: noqa: E501 - a kernel is one line
"""Hostile and careless backwards: refused, and passed where the one defence that sees them is switched off.

The honest twin of each is the candidate that it changes; a twin passes with every defence on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gradient_targets import candidate, find, write_repo
from switches import SWITCHES

from pytest_cudaforge.evaluation import backward
from pytest_cudaforge.evaluation.backward import BackwardVerifier
from pytest_cudaforge.evaluation.evaluator import Evaluator, EvaluatorSettings
from pytest_cudaforge.records import Candidate, CaseResult, Status, Verification

_TRUSTED = CaseResult("default::backward", "trusted", True, True, None, None)


def _trust(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks at gradients."""
    monkeypatch.setattr(BackwardVerifier, "verify", lambda *_: Verification((_TRUSTED,), "fp64", None))


def _few_families(monkeypatch: pytest.MonkeyPatch) -> None:
    """None in which rows nearly vanish."""
    monkeypatch.setattr(backward, "_FAMILIES", 5)


_BLIND, _UNWATCHED = SWITCHES["comparison"], SWITCHES["mutation"]
_WRONG = Status.INCORRECT_NUMERICAL
_GATE = candidate()
_WRITES_OUT = ("const float* out, const float* g,", "float* out, const float* g,")
#: Name -> the attack, the verdict on it, what its reason says, and the switch.
_ATTACKS: dict[str, tuple[Candidate, Status, str, Callable[[pytest.MonkeyPatch], None]]] = {
    "zeros for one parameter": (candidate(source=("dw[c] = (float)sum_w", "dw[c] = 0")), _WRONG, "parameter weight", _BLIND),
    "a forgotten term": (candidate(source=("* s * (1 - s)", "* s")), _WRONG, "input 0 (x)", _BLIND),
    "a term forgotten where it is small": (candidate("softmax", source=("(q[c] - sum)", "(q[c] - (std::fabs(sum) > .2 ? sum : 0))")), _WRONG, "input 0 (x)", _BLIND),
    "the formula of long rows for those that are shorter than eps": (candidate("unit", source=("if (n < 1e-6) n = 1e-6, along = 0;", "")), _WRONG, "/small: the gradient of input 0 (x)", _few_families),
    "nothing for what is multiplied by nothing": (candidate(source=("sum_w += (double)g[i] * s;", "sum_w += w[c] == 0 ? 0 : (double)g[i] * s;")), _WRONG, "parameter weight", SWITCHES["weights"]),
    "what was rounded beside a bias, by a gain of next to nothing": (candidate(source=("sum_w += (double)g[i] * s;", "sum_w += (double)g[i] * (std::fabs(w[c]) > 1e-9f ? ((double)(float)(w[c] * s + out[c]) - out[c]) / w[c] : s);"), plan=("(x, module.weight, out, grad_out, dx", "(x, module.weight, module.bias, grad_out, dx")), _WRONG, "parameter weight", SWITCHES["weights"]),
    "a gradient for what is padding": (candidate("Words", source=("ids[i] == padding ? 0 : g", "g")), _WRONG, "/named: the gradient of parameter weight", SWITCHES["named"]),
    "nothing for rows of zeros": (candidate(source=("dx[i] = g[i]", "bool none = true; for (long long k = 0; k < cols; ++k) none &= x[r * cols + k] == 0; dx[i] = none ? 0 : g[i]")), _WRONG, "/padded: the gradient of input 0 (x)", SWITCHES["padded"]),
    "a division by the distance of what is in one place": (candidate("apart", source=("d[r] > 0 ? g[r] / d[r] : 0", "g[r] / d[r]")), _WRONG, "/padded: the gradient of input 0 (x)", SWITCHES["padded"]),
    "all of it to each of equal ones": (candidate("peak", source=("g[r] / equal", "g[r]")), _WRONG, "/ties: the gradient of input 0 (x)", SWITCHES["ties"]),
    "the gradient of the sum whatever comes in": (candidate(source=("sum_b += g[i]", "sum_b += 1")), _WRONG, "parameter bias", _BLIND),
    "nothing for gradients that are next to nothing": (candidate(source=("sum_b += g[i]", "sum_b += std::fabs(g[i]) > 1e-9f ? g[i] : 0")), _WRONG, "parameter bias", _BLIND),
    "accumulates into what is there": (candidate(source=("db[c] = (float)sum_b", "db[c] += (float)sum_b")), _WRONG, "parameter bias", _BLIND),
    "the wrong order": (candidate(plan=('"weight": dw, "bias": db', '"weight": db, "bias": dw')), _WRONG, "parameter", _BLIND),
    "adds to the parameter": (candidate(source=("dw[c] = (float)sum_w;", "dw[c] = (float)sum_w; const_cast<float*>(w)[c] += dw[c];")), Status.REJECTED, "parameter weight: was changed", _trust),
    "writes into the saved output": (candidate(source=("db[c] = (float)sum_b;", "db[c] = (float)sum_b; const_cast<float*>(out)[c] = db[c];")), Status.REJECTED, "what forward returned: was changed", _UNWATCHED),
    "writes into the gradient it was given": (candidate(source=("db[c] = (float)sum_b;", "db[c] = (float)sum_b; const_cast<float*>(g)[c] = 0;")), Status.REJECTED, "grad_out: was changed", _UNWATCHED),
    "keeps its answer": (candidate(source=("for (long long c = 0; c < cols; ++c) {\n    double", "static float kept[1 << 12]; static int calls; bool late = calls++ > 40;\n  for (long long c = 0; late && c < rows * cols; ++c) dx[c] = kept[c];\n  for (long long c = 0; !late && c < cols; ++c) {\n    double")), _WRONG, "", _BLIND),
}  # fmt: skip


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repository")
    write_repo(root)
    return root


@pytest.fixture(scope="module")
def evaluator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Evaluator]:
    cache = tmp_path_factory.mktemp("cache")
    settings = EvaluatorSettings(cache_dir=cache, hang_limit_s=30.0, lock_dir=cache, times=False)
    with Evaluator(settings) as opened:
        yield opened


def _target(name: str) -> str:
    found = {"small": "softmax", "shorter": "unit", "equal": "peak", "padding": "Words", "distance": "apart"}
    return next((target for word, target in found.items() if word in name), "Gate")


@pytest.mark.parametrize("name", _ATTACKS)
def test_hostile_backward_is_refused(evaluator: Evaluator, repo: Path, name: str) -> None:
    attack, status, words, _ = _ATTACKS[name]
    found = evaluator.evaluate(attack, find(repo, _target(name)), timing=False)
    assert found.status is status and words in found.reason and "::backward" in found.reason, found.reason
    assert found.verification is not None and not found.verification.backward
    forward = [case for case in found.verification.cases if case.workload == "default" and case.contract]
    assert forward and all(case.passed for case in forward)


@pytest.mark.parametrize("name", _ATTACKS)
def test_it_passes_without_its_defence(
    evaluator: Evaluator, repo: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attack, _, _, switch = _ATTACKS[name]
    switch(monkeypatch)
    found = evaluator.evaluate(attack, find(repo, _target(name)), timing=False)
    assert found.status is Status.PASSED, found.reason


@pytest.mark.parametrize("name", ["Gate", "softmax", "unit", "parts", "peak", "Words", "apart"])
def test_honest_twin_passes(evaluator: Evaluator, repo: Path, name: str) -> None:
    found = evaluator.evaluate(candidate(name), find(repo, name), timing=False)
    assert found.status is Status.PASSED and "gradients verified" in found.reason, found.reason
