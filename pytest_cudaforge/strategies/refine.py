"""CudaForge's own sequence, with a way back.

First candidate; correction while it fails; optimization when it passes; N rounds; the best correct one wins. Unlike
the published loop it never optimizes from a slower kernel than the best, and never goes on from a broken one for
ever: after ``corrections`` failed repairs of a broken optimization it returns to the best. Where the last optimizations
brought nothing, the next is planned anew, from a full profile.
"""

from __future__ import annotations

from collections.abc import Sequence

from pytest_cudaforge.records import Depth, Proposal, Round, Stop
from pytest_cudaforge.strategies import Limits, best_round, speed_of_light, worthwhile

__all__ = ["Refine"]


#: Measurement error of time and ceiling together.
_STILL_A_BOUND = 1.05
#: Optimizations in a row that brought nothing, after which the Judge plans anew.
_STUCK = 2


class Refine:
    """Serial refinement; pure."""

    def propose(self, rounds: Sequence[Round], limits: Limits) -> Proposal | Stop:
        if len(rounds) >= limits.rounds:
            return Stop(f"all {limits.rounds} rounds are played")
        if not rounds:
            return Proposal("first", None)
        best = best_round(rounds)
        if best is None:
            return _towards_a_first_pass(rounds, limits)
        return _reason_to_stop(rounds, best, limits) or _from_the_best(rounds, best, limits)


def _towards_a_first_pass(rounds: Sequence[Round], limits: Limits) -> Proposal:
    last = rounds[-1]
    if last.candidate is None:
        return _again(last)
    if len(_broken_chain(rounds)) > limits.restart_after:
        return Proposal("first", None)
    return Proposal("correction", last.number)


def _from_the_best(rounds: Sequence[Round], best: Round, limits: Limits) -> Proposal:
    last = rounds[-1]
    optimization = Proposal("optimization", best.number, _depth(rounds, best))
    # The chain holds the broken optimization itself and every failed repair of it.
    if worthwhile(last) or len(_broken_chain(rounds)) > limits.corrections:
        return optimization
    if last.candidate is None:
        return optimization if last.kind == "optimization" and last.parent == best.number else _again(last)
    return Proposal("correction", last.number)


def _depth(rounds: Sequence[Round], best: Round) -> Depth:
    """How closely the Judge looks: a full profile where the last optimizations brought nothing."""
    idle = [
        entry for entry in rounds if entry.number > best.number and entry.kind == "optimization" and entry.candidate
    ]
    return "full" if len(idle) >= _STUCK else "quick"


def _reason_to_stop(rounds: Sequence[Round], best: Round, limits: Limits) -> Stop | None:
    reached = speed_of_light(best.evaluation.timing) if best.evaluation is not None else None
    # Far above the bound the kernel skips what the bound counts (masked data, zeros): it bounds nothing here.
    if reached is not None and limits.roofline_stop <= reached <= _STILL_A_BOUND:
        return Stop(f"round {best.number} runs at {reached:.0%} of the roofline: little is left to gain")
    idle = sum(1 for entry in rounds if entry.number > best.number)
    if limits.patience and idle >= limits.patience:
        return Stop(f"{idle} rounds brought nothing better than round {best.number}")
    return None


def _again(last: Round) -> Proposal:
    """No candidate came out of the last replies: ask once more for the same thing."""
    return Proposal(last.kind, last.parent)


def _broken_chain(rounds: Sequence[Round]) -> list[Round]:
    """The failed rounds at the end, back to the optimization or first candidate that started them."""
    chain: list[Round] = []
    for entry in reversed(rounds):
        if worthwhile(entry):
            break
        chain.append(entry)
        if entry.kind != "correction" and entry.candidate is not None:
            break
    return chain
