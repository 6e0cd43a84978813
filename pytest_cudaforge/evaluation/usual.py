"""How far a reference is off as a rule: on inputs that are nearly the same. In the oracle's process only.

Of the few sums of a loss one may come out right to the last digit by luck, and a gate that next to all of a call's
elements have shut may be ajar in one alone, whose digits are whatever rounding left. The reference's own error on these
very inputs then says little of what another kernel, as good, may be off by. Runs of it on inputs a few roundoffs away,
each compared with the oracle's answer to them, say more (as stochastic arithmetic does, CADNA and Verificarlo).
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pytest_cudaforge.errors import TargetError
from pytest_cudaforge.evaluation.contract import ROUNDING
from pytest_cudaforge.evaluation.correctness import Judgement, Rule
from pytest_cudaforge.evaluation.faults import is_fatal
from pytest_cudaforge.evaluation.leaning import LeaningMode
from pytest_cudaforge.evaluation.precision import FEW

__all__ = ["UsualErrors", "judged_by_usual_errors", "nearly"]

#: By the path of an output, what the reference is off by: (inputs, a mode that it runs under).
Errors = Callable[[Mapping[str, Any], AbstractContextManager[Any]], Mapping[str, Tensor]]

#: Runs on inputs nearby, and what they may take together; how far away these inputs are at most, in roundoffs.
_RUNS, _RUNS_S, _NEARLY = 12, 2.0, 8.0
#: An output of few elements is judged by them where it is off by at most so many times its bound.
_LUCKY = 100.0
#: Runs on the inputs themselves, each sum rounded a little otherwise, which tell what is shaky: what is so nearly a tie
#: that rounding decides is none any more on other inputs.
_SCATTERED_RUNS = 12
#: So many of these runs are repeated with operators that lean to one side, and this share of what that comes to is
#: usual: by the rule a kernel may then be off by what one eps in each operator leaves, and not by more.
_LEANING_RUNS, _LEANING_SHARE = 4, 1 / 16
#: Of an output of many elements some may be shaky: this share of them, and so many at least and at most. (Where a sum
#: decides which of two wins, a gradient goes one way or the other, with all that a convolution makes of it.)
_SHAKY_SHARE, _SHAKY_LEAST, _SHAKY_MOST = 5e-3, 64, 512
#: How often some are: those of one size may hide those of another.
_SHAKY_ROUNDS = 4
#: Above this further runs of the oracle cost too much.
_MOST = 1 << 22


class UsualErrors:
    """Of one call. ``errors`` runs the reference and the oracle on other inputs."""

    def __init__(self, inputs: Mapping[str, Any], errors: Errors) -> None:
        self._inputs, self._errors = inputs, errors
        self._looked = self._scattered = False
        #: Of each run, by path, the mean of all elements' squares; the sum over all runs of each element's square.
        self._near: list[dict[str, float]] = []
        self._leaning: list[dict[str, float]] = []
        self._squares: dict[str, Tensor] = {}
        self._squared = 0

    def overall(self, path: str) -> float:
        """The root of the mean square over all elements of an output and all runs; 0 where the reference has no fp64
        form, or no memory for one."""
        self._look()
        near, leaning = (_root_mean([means[path] for means in runs]) for runs in (self._near, self._leaning))
        return max(near, _LEANING_SHARE * leaning)

    def of_each(self, path: str) -> Tensor | None:
        """The root of the mean square of each element over all runs, in fp64; None where there is no fp64 form, or no
        memory for one."""
        self._look()
        if self._near and path in self._squares and not self._scattered:
            self._scatter()
        return (self._squares[path] / self._squared).sqrt() if self._near and path in self._squares else None

    def _look(self) -> None:
        until = time.monotonic() + _RUNS_S
        seeds, self._looked = range(0 if self._looked else _RUNS), True
        try:
            for seed in seeds:
                errors = self._run(seed, contextlib.nullcontext())
                self._near.append({path: _mean_square(error) for path, error in errors.items()})
                self._add_squares(errors)
                if seed < _LEANING_RUNS and any(error.numel() <= FEW for error in errors.values()):
                    leaning = self._run(seed, LeaningMode(seed))
                    self._leaning.append({path: _mean_square(error) for path, error in leaning.items()})
                if time.monotonic() > until:
                    break
        except torch.OutOfMemoryError:
            self._near.clear()
        except TargetError as error:
            if is_fatal(error):
                raise
            self._near.clear()

    def _scatter(self) -> None:
        self._scattered, until = True, time.monotonic() + _RUNS_S
        for seed in range(_SCATTERED_RUNS):
            try:
                self._add_squares(self._errors(self._inputs, LeaningMode(seed, each=True)))
            except torch.OutOfMemoryError:
                return
            if time.monotonic() > until:
                return

    def _add_squares(self, errors: Mapping[str, Tensor]) -> None:
        self._squared += 1
        for path, error in errors.items():
            if error.numel() <= _MOST:
                square = error.square().nan_to_num_(posinf=0.0)
                self._squares[path] = self._squares[path].add_(square) if path in self._squares else square

    def _run(self, seed: int, mode: AbstractContextManager[Any]) -> Mapping[str, Tensor]:
        near = {p: nearly(leaf, seed) if isinstance(leaf, Tensor) else leaf for p, leaf in self._inputs.items()}
        return self._errors(near, mode)


def judged_by_usual_errors(
    judged: Judgement,
    path: str,
    candidate: Tensor,
    oracle: Tensor,
    rule: Rule,
    usual: Callable[[], UsualErrors],
    judge: Callable[[Tensor, Rule], Judgement],
) -> Judgement:
    """``judged``, or what ``judge`` says once it is known how far the reference is off as a rule: all of an output of
    few elements, or the few of many that alone are off. An element that is no further off than the bound on all allows,
    by the error that the reference has there, counts as right; what is left is judged as before, and once more where
    elements of another size are off then."""
    if not judged.mismatches or any(mismatch.kind not in ROUNDING for mismatch in judged.mismatches):
        return judged
    if judged.error_ratio is None or judged.bound is None or not candidate.is_floating_point():
        return judged
    if candidate.numel() <= FEW:
        if judged.error_ratio > _LUCKY * judged.bound:
            return judged
        return judge(candidate, replace(rule, noise=max(rule.noise, usual().overall(path))))
    for _ in range(_SHAKY_ROUNDS if candidate.numel() <= _MOST else 0):
        shaky = _off_alone(judged, candidate, oracle)
        errors = usual().of_each(path) if shaky is not None else None
        if shaky is None or errors is None or judged.bound is None:
            break
        excused = shaky & ((candidate.double() - oracle).abs() <= judged.bound * errors)
        if not bool(excused.any()):
            break
        candidate = torch.where(excused, oracle.to(candidate.dtype), candidate)
        judged = judge(candidate, rule)
        if not judged.mismatches or any(mismatch.kind not in ROUNDING for mismatch in judged.mismatches):
            break
    return judged


def _off_alone(judged: Judgement, candidate: Tensor, oracle: Tensor) -> Tensor | None:
    """Which elements are off by more than the bound on all, or on small ones; None where these are more than a few."""
    error = (candidate.double() - oracle).abs()
    size = _root_mean([_mean_square(error)])
    if judged.error_ratio is None or judged.bound is None:
        return None
    if judged.small is not None:
        below, bound = judged.small
        found = (oracle.abs() < below) & (error > bound)
    else:
        found = error > judged.bound * size / judged.error_ratio if judged.error_ratio else error > 0
    count, most = int(found.sum()), min(_SHAKY_MOST, max(_SHAKY_LEAST, int(_SHAKY_SHARE * found.numel())))
    return found if 0 < count <= most else None


def _mean_square(error: Tensor) -> float:
    return float(error.abs().square().mean())


def _root_mean(squares: Sequence[float]) -> float:
    known = [square for square in squares if math.isfinite(square)]
    return math.sqrt(sum(known) / len(known)) if known else 0.0


def nearly(leaf: Tensor, seed: int) -> Tensor:
    """Floating values a few roundoffs away, to either side; zeros stay, and so does memory's order."""
    if not leaf.is_floating_point() or leaf.itemsize == 1:
        return leaf
    generator = torch.Generator(device=leaf.device).manual_seed(seed)
    chance = torch.rand(leaf.shape, generator=generator, device=leaf.device)
    away = (2 * chance - 1) * (_NEARLY * torch.finfo(leaf.dtype).eps)
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device).copy_(
        leaf + leaf * away
    )
