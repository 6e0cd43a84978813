"""Switches of the verdict's rules: each takes one defence away and nothing else. ``SWITCHES`` names them."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pytest_cudaforge.evaluation import building, cases, checks, contract, probes, sitting, verification
from pytest_cudaforge.evaluation.cases import Trial
from pytest_cudaforge.evaluation.evaluator import Evaluator
from pytest_cudaforge.evaluation.extremes import EXTREMES
from pytest_cudaforge.evaluation.generic import HALVES, LEVELS
from pytest_cudaforge.evaluation.occasions import AGREEING, OCCASIONS
from pytest_cudaforge.evaluation.oracle import Check, OracleClient
from pytest_cudaforge.evaluation.rare import RARE_DRAWS
from pytest_cudaforge.evaluation.sitting import Sitting
from pytest_cudaforge.evaluation.worker import Worker

__all__ = ["SWITCHES", "TRIES", "no_edits", "tries", "without_checks"]

#: So often at most is an attack tried whose defence is off: values are drawn, and what is rare comes up now and then.
TRIES = 20


def tries(evaluator: Evaluator) -> Iterator[int]:
    """Up to :data:`TRIES`, each of which looks anew for what draws have rarely: an oracle finds that once."""
    for number in range(TRIES):
        if number:
            evaluator.oracle.close()
        yield number


_NAMED = frozenset(check.name for check in checks.CHECKS)
#: By a check's name another one that shows the same: threads that meet do so in repeated calls, and are many.
_AS_WELL = {"left behind": "left at last", "repeated": "meeting", "thread counts": "meeting"}


def without_checks(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Nobody makes these of ``checks.CHECKS`` any more."""
    assert _NAMED.issuperset(names), names  # else nothing were switched off
    for name, as_well in _AS_WELL.items():
        names = (*names, as_well) if name in names else names
    monkeypatch.setattr(checks, "CHECKS", tuple(check for check in checks.CHECKS if check.name not in names))


def _trials(monkeypatch: pytest.MonkeyPatch, change: Callable[[tuple[Trial, ...]], Any]) -> None:
    original = verification.contract_trials  # as an earlier switch has left it
    monkeypatch.setattr(verification, "contract_trials", lambda *a, **k: tuple(change(original(*a, **k))))


def _case(trial: Trial, **changes: Any) -> Trial:
    return dataclasses.replace(trial, case=dataclasses.replace(trial.case, **changes))


def _blind(original: Callable[..., Check], kinds: tuple[str, ...]) -> Callable[..., Check]:
    def check(*args: Any, **options: Any) -> Check:
        found = original(*args, **options)
        kept = tuple(mismatch for mismatch in found.mismatches if mismatch.kind not in kinds)
        return dataclasses.replace(found, mismatches=kept)

    return check


def _without(*kinds: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Nobody looks at mismatches of these kinds any more."""

    def switch(monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("check", "recheck", "look"):
            monkeypatch.setattr(OracleClient, name, _blind(getattr(OracleClient, name), kinds))

    return switch


def _unsaid(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks at mismatches any more of which this is said."""

    def blind(original: Callable[..., Check]) -> Callable[..., Check]:
        def check(*args: Any, **options: Any) -> Check:
            found = original(*args, **options)
            kept = tuple(mismatch for mismatch in found.mismatches if words not in mismatch.detail)
            return dataclasses.replace(found, mismatches=kept)

        return check

    for name in ("check", "recheck", "look"):
        monkeypatch.setattr(OracleClient, name, blind(getattr(OracleClient, name)))


def _no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    # Where all is zero, everything is small.
    _undrawn_in("empty", monkeypatch)
    _unsaid("the larger ones hide it", monkeypatch)


def _no_seal(monkeypatch: pytest.MonkeyPatch) -> None:
    without_checks(monkeypatch, "sealed")


def _no_mutation(monkeypatch: pytest.MonkeyPatch) -> None:
    # These see lasting writes as well, by themselves or by what comes of them: unjudged calls, too, go on with the
    # input that was changed, and their answers with it.
    _without("mutation", "redzone", "unstable")(monkeypatch)
    _no_seal(monkeypatch)
    _no_changes(monkeypatch)
    without_checks(monkeypatch, "repeated", "first at once", "come around")


def _wait_instead_of_stopping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Worker, "stop", lambda self: time.sleep(0.5))
    without_checks(monkeypatch, "ordinary")  # looks at once, and stops nobody
    _no_late(monkeypatch)


def _first_values_only(monkeypatch: pytest.MonkeyPatch) -> None:
    _trials(monkeypatch, lambda trials: [_case(t, family="drawn") for t in trials])


def _no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    _trials(monkeypatch, lambda trials: [_case(t, weights_seed=None) for t in trials])
    without_checks(monkeypatch, "weights one by one")


def _undrawn(family: str) -> Callable[[tuple[Trial, ...]], list[Trial]]:
    """Drawn values instead of this family's."""
    return lambda trials: [_case(t, family="drawn") if t.case.family == family else t for t in trials]


def _undrawn_in(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In verification and under the clock."""
    families = OracleClient.families
    monkeypatch.setattr(
        OracleClient, "families", lambda *given: tuple(name for name in families(*given) if name != family)
    )


def _undrawn_all(monkeypatch: pytest.MonkeyPatch, *families: str) -> None:
    for family in families:
        _undrawn_in(family, monkeypatch)


def _no_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    without_checks(monkeypatch, "images", "clockless")  # what code may not ask for it may not look for, or hide, either
    for rules in (building.imports, building.instructions):
        monkeypatch.setattr(rules, "check", lambda _: None)


def _no_ages(monkeypatch: pytest.MonkeyPatch) -> None:
    without_checks(monkeypatch, "aged")


def _no_late(monkeypatch: pytest.MonkeyPatch) -> None:
    _trials(monkeypatch, lambda trials: [t for t in trials if not (t.calls_before or t.renewed or t.exchanged)])
    # Repeated calls are late ones as well, and so are those at places never seen before.
    without_checks(monkeypatch, "repeated")
    without_checks(monkeypatch, "leaks")
    _no_quick_calls(monkeypatch)
    _no_guards(monkeypatch)
    _no_ages(monkeypatch)  # later than any of them


def _known_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "_shuffled", list)
    _no_late(monkeypatch)
    _no_seal(monkeypatch)  # it repeats the last trial's family: one more call


def _no_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    _no_changes(monkeypatch)  # there only inputs change as well
    _trials(monkeypatch, lambda trials: [t for t in trials if not (t.renewed or t.exchanged)])


def _no_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sitting, "_judge", lambda *_: None)


def _one_poison(monkeypatch: pytest.MonkeyPatch) -> None:
    _no_changes(monkeypatch)  # old answers lie there instead of poison
    _trials(
        monkeypatch, lambda trials: [dataclasses.replace(t, poison=0) for t in trials if not (t.renewed or t.exchanged)]
    )


def _fresh_pointers(monkeypatch: pytest.MonkeyPatch) -> None:
    _trials(
        monkeypatch,
        lambda trials: [
            dataclasses.replace(t, frame=i, calls_before=0, renewed=False, exchanged=False)
            for i, t in enumerate(trials)
        ],
    )
    # These come back to the last trial's outputs.
    _no_seal(monkeypatch)
    without_checks(monkeypatch, "thread counts", "images")
    _no_quick_calls(monkeypatch)
    # A call of a module in a thread of its own comes back to them as well, and so do others.
    without_checks(
        monkeypatch, "ordinary", "repeated", "instances", "in another thread", "in training", "inference mode"
    )
    without_checks(monkeypatch, "after an empty call", "come around")


def _no_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    without_checks(monkeypatch, "guarded", "edges")  # at places never seen before, without a red zone behind them


def _no_zones(monkeypatch: pytest.MonkeyPatch) -> None:
    _without("redzone")(monkeypatch)
    _no_quick_calls(monkeypatch)  # another call's inputs are its own
    _no_guards(monkeypatch)


def _odd_zones(monkeypatch: pytest.MonkeyPatch) -> None:
    _trials(monkeypatch, lambda trials: [dataclasses.replace(t, poison=t.poison % 2) for t in trials])
    _no_guards(monkeypatch)


def _no_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    _trials(monkeypatch, lambda trials: [dataclasses.replace(t, poison=t.poison % 4) for t in trials])


def _no_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    _trials(monkeypatch, lambda trials: [t for t in trials if not t.exchanged])
    _no_changes(monkeypatch)  # of a few elements
    no_edits(monkeypatch)


def no_edits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what calls have left, before one that is behind them."""
    monkeypatch.setattr(OracleClient, "edit", lambda *_: False)


def _unmoved(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _trials(monkeypatch, lambda trials: [t for t in trials if t.moved != how])


def _no_return(monkeypatch: pytest.MonkeyPatch) -> None:
    _trials(monkeypatch, lambda trials: [t for t in trials if t.name != cases.AGAIN and not t.exchanged])
    _no_guards(monkeypatch)  # the same values at two places
    _no_changes(monkeypatch)  # nearly so


def _no_novelty(monkeypatch: pytest.MonkeyPatch) -> None:
    # What computes after a pause only shows there as well.
    without_checks(monkeypatch, "changed")
    monkeypatch.setattr(sitting, "lag_of", lambda *_: 1.0)
    monkeypatch.setattr(sitting, "single_of", lambda *_: 0.0)


def _no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    _without("unstable")(monkeypatch)
    _no_guards(monkeypatch)
    _no_quick_calls(monkeypatch)  # there the call before has not been judged yet
    without_checks(monkeypatch, "ordinary")  # nor there


def _no_quick_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    without_checks(monkeypatch, "one after another", "first at once", "ordinary")
    _no_changes(monkeypatch)


def _left_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    without_checks(monkeypatch, "left behind", "left running")


def _no_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    without_checks(monkeypatch, "beside", "first at once")


def _no_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    _no_beside(monkeypatch)  # many calls, at places never seen before, of new values
    without_checks(monkeypatch, "changed")
    monkeypatch.setattr(Sitting, "_check_changed", lambda *_: None)
    monkeypatch.setattr(Sitting, "_check_written", lambda *_: None)


def _no_timed_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sitting, "_check_changed", lambda *_: None)
    monkeypatch.setattr(Sitting, "_check_written", lambda *_: None)
    _no_novelty(monkeypatch)  # what rests in a run of calls takes longer in a pass


def _no_other_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "_NEAR", float("inf"))
    # Its family is drawn, and may be that of another trial.
    _trials(monkeypatch, lambda trials: [_case(t, family="drawn") if t.calls_before else t for t in trials])


def _no_smudges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OracleClient, "smudge", lambda *_: None)


def _and_no_smudges(switch: Callable[[pytest.MonkeyPatch], None]) -> Callable[[pytest.MonkeyPatch], None]:
    """Whoever leaves an answer as it lies there, for whatever reason, leaves what was written into it as well."""

    def both(monkeypatch: pytest.MonkeyPatch) -> None:
        switch(monkeypatch)
        _no_smudges(monkeypatch)

    return both


#: Families that are left out, each by itself, in all of a verdict.
_FAMILIES = (
    *("floor", "ceiling", "shifted", "alike", "empty", "peaks", "deep", "rectified", "shut", "open"),
    *("bumped", "combed", "skewed", "ordered", "stretches", "fronts", "padded", "exact", "leading", "aligned", "close"),
    *("parted", "climbing", "sloping", "near", "certain", "tails", "biased", "afar"),
    *("grouped", "below", "tiny", "unbiased", "hoisted", "ranked", "matching", "faded"),
)
_SINGLE: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "stop": _wait_instead_of_stopping,
    "families": _first_values_only,
    "lowered": lambda patch: (_trials(patch, _undrawn("lowered")), _undrawn_in("deep", patch))[0],
    "sparse": lambda patch: _undrawn_all(patch, "sparse", "spiked", "bumped"),
    "missing": lambda patch: _trials(patch, _undrawn("missing")),
    "absent": lambda patch: _trials(patch, _undrawn("absent")),
    **{name: functools.partial(_undrawn_in, name) for name in _FAMILIES},
    # Values of one sign are far from zero at the far end of their range as well.
    "shifted": lambda patch: _undrawn_all(patch, "shifted", "tails"),
    "spiked": lambda patch: _undrawn_all(patch, "spiked", "bumped"),
    # Rows that begin with nothing look like those that have nothing.
    "shut": lambda patch: _undrawn_all(patch, "shut", "fronts", "afar"),
    "fronts": lambda patch: _undrawn_all(patch, "fronts", "afar"),
    "levels": lambda patch: _undrawn_all(patch, "levels", "lowered", "deep"),
    # Where all lies to one side, one column is ahead as well.
    "leading": lambda patch: _undrawn_all(patch, "leading", "above", "below"),
    "halves": lambda patch: _undrawn_all(patch, *(f"{HALVES} {most}" for most in LEVELS)),
    "faint": lambda patch: _undrawn_all(patch, "faint", "small", "faded"),
    # What is named is met with now and then.
    "named": lambda patch: _undrawn_all(patch, "named", *OCCASIONS),
    # What shows something else rarely may show this one, too, time and again.
    "occasions": lambda patch: _undrawn_all(patch, *OCCASIONS, *RARE_DRAWS, *EXTREMES),
    "agreeing": lambda patch: _undrawn_all(patch, AGREEING, *OCCASIONS),
    "masks": lambda patch: (_undrawn_all(patch, "shut", "open", "afar"), _no_exchanges(patch))[0],
    # Neighbours are repeats, and of the highest and the lowest numbers many are alike.
    "repeats": lambda patch: _undrawn_all(patch, "repeats", "neighbours", *EXTREMES),
    "ends": lambda patch: _undrawn_all(patch, "ends", *EXTREMES),
    "neighbours": lambda patch: _undrawn_all(patch, "neighbours", *EXTREMES),
    "runs": lambda patch: _undrawn_all(patch, "runs", *EXTREMES),
    "highest": lambda patch: _undrawn_all(patch, *EXTREMES),
    "frequent": lambda patch: _undrawn_all(patch, *EXTREMES),
    "extremes": lambda patch: _undrawn_all(patch, "extremes", *EXTREMES),
    "ties": lambda patch: _trials(patch, _undrawn("ties")),
    "other values": _no_other_values,
    "order": _known_order,
    "weights": _no_weights,
    "poison": _one_poison,
    "mutation": _no_mutation,
    "unwritten": _without("unwritten"),
    "sealed": _no_seal,
    "redzone": _no_zones,
    "bias": _without("bias"),
    "rest": _no_rest,
    "norms": _without("values", "bias"),
    "unstable": _no_memory,
    "comparison": _without("values", "slice", "bias", "nonfinite"),
    "nonfinite": _without("nonfinite"),
    "pointers": _fresh_pointers,
    "again": _no_return,
    "late": _no_late,
    "aged": _no_ages,
    "leaks": lambda patch: without_checks(patch, "leaks"),
    "beside": _no_beside,
    "first empty": lambda patch: without_checks(patch, "after an empty call"),
    "first": lambda patch: without_checks(patch, "first at once"),
    "imports": _no_imports,
    "instances": lambda patch: without_checks(patch, "instances"),
    "threads": lambda patch: without_checks(patch, "thread counts"),
    "copies": functools.partial(_unsaid, "is a copy of"),
    "apart": lambda patch: patch.setattr(contract, "_overlapping", lambda *_: ()),
    "left": lambda patch: without_checks(patch, "left behind"),
    "at work": _left_at_work,
    "renewed": _no_renewed,
    "guarded": _no_guards,
    "paged": lambda patch: patch.setattr(cases, "_LARGE_BYTES", 1 << 40),
    # Copies of a module's inputs fill whole segments of memory, one of them to its end.
    "edges": lambda patch: without_checks(patch, "edges", "leaks"),
    "plausible": _odd_zones,
    "headers": _no_headers,
    "exchanged": _no_exchanges,
    "alone": lambda patch: _trials(patch, lambda trials: [t for t in trials if not t.alone]),
    **{how: functools.partial(_unmoved, how) for how in ("smaller", "turned", "together")},
    "moved": lambda patch: _trials(patch, lambda trials: [t for t in trials if not t.moved]),
    "one after another": _no_quick_calls,
    "older": lambda patch: patch.setattr(building, "older_archs", lambda source: ()),
    "elsewhere": lambda patch: patch.setattr(probes, "machines_like", lambda device: ()),
    "second call": lambda patch: (without_checks(patch, "later calls"), no_edits(patch))[0],
    "in a row": lambda patch: without_checks(patch, "in a row", "one after another", "changed"),
    "crowded": lambda patch: without_checks(patch, "crowded"),
    # Values that change between calls find a stream that is late, too, by luck: on a busy host almost always.
    "still written": lambda patch: without_checks(patch, "still written", "changed"),
    "changed": _no_changes,
    "timed changes": _no_timed_changes,
    "judge": _no_judge,
    "novelty": _no_novelty,
    "timed families": lambda patch: patch.setattr(Sitting, "_check_families", lambda *_: None),
}
SWITCHES = {"smudged": _no_smudges, **{name: _and_no_smudges(switch) for name, switch in _SINGLE.items()}}
