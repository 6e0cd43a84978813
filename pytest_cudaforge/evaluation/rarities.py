"""What a target's draws have rarely, and whether its reference takes calls with it. In the oracle's process only."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pytest_cudaforge.errors import TargetError
from pytest_cudaforge.evaluation.chance import CHANCE
from pytest_cudaforge.evaluation.extremes import EXTREMES, Extremes, extremes_of
from pytest_cudaforge.evaluation.faults import is_fatal
from pytest_cudaforge.evaluation.hubs import HUB, Hubs, hubs_of
from pytest_cudaforge.evaluation.identifiers import IDENTIFIERS, Identifiers, identifiers_of
from pytest_cudaforge.evaluation.matches import MATCHING, matches_of, matching
from pytest_cudaforge.evaluation.measures import nonfinite
from pytest_cudaforge.evaluation.occasions import (
    AGREEING,
    OCCASIONS,
    WitnessMode,
    agreeing,
    decisions_of,
    may_have_occasions,
    meetings_of,
    occasional_draws,
)
from pytest_cudaforge.evaluation.pointing import PointingMode
from pytest_cudaforge.evaluation.rare import (
    RARE,
    RARE_DRAWS,
    OverwritingMode,
    Rare,
    RareDraws,
    named_integers,
    rare_draws_of,
    rarities_of,
    sizes_near,
)
from pytest_cudaforge.evaluation.structures import INTEGERS
from pytest_cudaforge.evaluation.teams import one_thread
from pytest_cudaforge.runtime.signature import flatten_call, unflatten_call

if TYPE_CHECKING:
    from pytest_cudaforge.evaluation.subject import Subject

__all__ = ["OF_RARITIES", "Rarities"]

#: The families that a target's own draws tell of.
OF_RARITIES = frozenset({*RARE, *EXTREMES, *IDENTIFIERS, *RARE_DRAWS, *OCCASIONS, AGREEING, HUB, MATCHING})
#: So many draws show what integers are rare, and no more than take so long, or have so many numbers; redraws by them
#: that are tried first.
_RARE_DRAWS, _RARE_DRAWS_S, _MOST_NUMBERS, _RARE_TRIED = 1024, 0.5, 1 << 23, 3
#: In so many draws, and so long, occasions are looked for, of inputs and once more of answers; if they are no fewer.
_OCCASION_DRAWS, _OCCASIONS_S, _OCCASIONS_LEAST, _OCCASIONS_FIRST, _OCCASIONS_WAIT = 2048, 0.75, 64, 8, 4


@dataclass(frozen=True)
class _Found:
    """What draws of a workload show rarely; ``agree``: has it labels that may be what scores say? ``match``: rows of
    integers that may be another tensor's?"""

    rare: Rare | None = None
    extremes: Extremes | None = None
    identifiers: Identifiers | None = None
    draws: Mapping[str, RareDraws] = field(default_factory=dict)
    agree: bool = False
    hubs: Hubs | None = None
    match: bool = False

    @property
    def families(self) -> tuple[str, ...]:
        kinds = self.rare.kinds if self.rare is not None else ()
        kinds += self.extremes.families if self.extremes is not None else ()
        kinds += IDENTIFIERS if self.identifiers is not None else ()
        kinds += (HUB,) if self.hubs is not None else ()
        kinds += (MATCHING,) if self.match else ()
        return (*kinds, *self.draws, *((AGREEING,) if self.agree else ()))


class Rarities:
    """What hardly ever comes up in draws of ``subject``, by workload; looked for once."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._found: dict[str, _Found] = {}

    def families(self, workload: str) -> tuple[str, ...]:
        """The kinds of rare calls that can be had."""
        return self._of(workload).families

    def put(self, workload: str, leaves: dict[str, Any], family: str, seed: int) -> bool:
        """Put values of ``family`` in place of a call's own. False where draws tell nothing of such a family."""
        if family not in OF_RARITIES:
            return False
        found = self._of(workload)
        if found.rare is not None and family in RARE:
            found.rare.put(family, leaves, torch.Generator().manual_seed(seed ^ 0x5EED))
        elif found.extremes is not None and family in EXTREMES:
            found.extremes.put(family, leaves, torch.Generator().manual_seed(seed ^ 0x5EED))
        elif found.identifiers is not None and family in IDENTIFIERS:
            found.identifiers.put(family, leaves)
        elif found.hubs is not None and family == HUB:
            found.hubs.put(leaves, torch.Generator().manual_seed(seed ^ 0x5EED))
        elif found.match and family == MATCHING:
            matching(leaves, self.subject.state(), torch.Generator().manual_seed(seed ^ 0x5EED))
        elif family in found.draws:
            chosen = random.Random(seed).choice(found.draws[family].seeds)
            _take_over(leaves, self._leaves(workload, chosen))
        elif family == AGREEING:
            structures = self.subject.domain.structures(workload)
            free = [path for path, structure in structures.items() if structure == "generic"]
            generator = torch.Generator(device=self.subject.device).manual_seed(seed ^ 0x5EED)
            leaves.update(agreeing(leaves, generator, free))
        else:
            return False
        return True

    def takes(self, workload: str, family: str, nonfinite_as_drawn: int) -> bool:
        """Does the reference run there, as finite as drawn, and say which of two values it leaves at one place? Where
        it searches what may be alike now, it may say nothing of which comes first."""
        draws = self._of(workload).draws.get(family)
        extreme, drawn = family in (*EXTREMES, HUB, MATCHING), family in OCCASIONS
        repeats = extreme or drawn or family in ("repeats", "neighbours", *IDENTIFIERS)
        repeats = repeats or (draws is not None and draws.repeats)
        for seed in range(1, 1 + _RARE_TRIED):
            leaves, tree = flatten_call(*self.subject.draw(workload, seed))
            self.put(workload, leaves, family, seed)
            watch, search = OverwritingMode(), PointingMode()
            try:
                with watch, search:
                    outputs = self.subject.outputs(*unflatten_call(tree, leaves))
            except TargetError as error:
                if is_fatal(error):
                    raise
                return False
            endless = nonfinite(outputs) > nonfinite_as_drawn and not drawn  # what is drawn may be infinite
            if endless or (repeats and watch.found) or (extreme and search.found):
                return False
        return True

    def _leaves(self, workload: str, seed: int) -> dict[str, Any]:
        return flatten_call(*self.subject.draw(workload, seed))[0]

    def _of(self, workload: str) -> _Found:
        """What many draws show of the integers among a call's inputs; so many as take no long."""
        if workload not in self._found:
            base = CHANCE.getrandbits(61)
            first = self._leaves(workload, base)
            drawn = [(base, _whole(first)), *self._further(workload, base, _whole(first))]
            wholes = [whole for _, whole in drawn]
            named = named_integers(self.subject.module, self.subject.code)
            rare, extremes = rarities_of(wholes, named, sizes_near(first)), extremes_of(wholes)
            draws = rare_draws_of(drawn, named) if rare is None else {}
            with one_thread():
                draws |= occasional_draws(self._occasions(workload)) if may_have_occasions(first) else {}
            agree = bool(agreeing(first, torch.Generator(device=self.subject.device).manual_seed(1)))
            ids, hubs, match = identifiers_of(wholes), hubs_of(wholes), bool(matches_of(first, self.subject.state()))
            self._found[workload] = _Found(rare, extremes, ids, draws, agree, hubs, match)
        return self._found[workload]

    def _further(
        self, workload: str, base: int, first: Mapping[str, Tensor]
    ) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Seeds behind ``base`` and the integers and masks that they draw, where there are integers, and not too many.
        Of masks alone nothing is told."""
        until, numbers = time.monotonic() + _RARE_DRAWS_S, sum(leaf.numel() for leaf in first.values())
        whole = numbers and any(leaf.dtype != torch.bool for leaf in first.values())
        for number in range(1, min(_RARE_DRAWS, _MOST_NUMBERS // numbers) if whole else 1):
            if number > 1 and time.monotonic() > until:
                return
            yield base + number, _whole(self._leaves(workload, base + number))

    def _occasions(self, workload: str) -> Iterator[tuple[int, dict[str, bool]]]:
        """What so many draws show as can be looked at in a while, their inputs first, and what the reference makes of
        some; nothing where these are few."""
        base = CHANCE.getrandbits(61)
        for look in (self._meetings, self._decisions):
            # Of this thread: what waits for others' processes has looked at nothing.
            began, until = time.thread_time(), time.monotonic() + _OCCASIONS_WAIT * _OCCASIONS_S
            found = []
            for seed in range(base, base + _OCCASION_DRAWS):
                found.append((seed, look(workload, seed)))
                spent = time.thread_time() - began
                # The first ones load what the others find.
                slow = len(found) >= _OCCASIONS_FIRST and spent / len(found) > _OCCASIONS_S / _OCCASIONS_LEAST
                if spent > _OCCASIONS_S or slow or time.monotonic() > until:
                    break
            yield from found if len(found) >= _OCCASIONS_LEAST else ()

    def _meetings(self, workload: str, seed: int) -> dict[str, bool]:
        return meetings_of(self._leaves(workload, seed))

    def _decisions(self, workload: str, seed: int) -> dict[str, bool]:
        watch = WitnessMode()
        try:
            with watch:
                outputs = self.subject.outputs(*self.subject.draw(workload, seed))
        except TargetError as error:
            if is_fatal(error):
                raise
            return {}
        return decisions_of(watch.found, outputs)


def _whole(leaves: Mapping[str, Any]) -> dict[str, Tensor]:
    """A call's integers and masks, on the CPU unless they are very many."""
    tensors = {path: leaf for path, leaf in leaves.items() if isinstance(leaf, Tensor)}
    whole = {path: leaf.detach() for path, leaf in tensors.items() if leaf.dtype in (*INTEGERS, torch.bool)}
    few = sum(leaf.numel() for leaf in whole.values()) <= _MOST_NUMBERS
    return {path: leaf.cpu() for path, leaf in whole.items()} if few else whole


def _take_over(leaves: dict[str, Any], others: Mapping[str, Any]) -> None:
    """Another draw's leaves, unless those of a variant are of other shapes."""
    shapes, wanted = ({p: getattr(leaf, "shape", None) for p, leaf in call.items()} for call in (leaves, others))
    if shapes == wanted:
        leaves.update(others)
