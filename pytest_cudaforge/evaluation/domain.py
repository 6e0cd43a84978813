"""Which other values a reference takes: what its inputs mean, and what it answers. In the oracle's process only."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from pytest_cudaforge.errors import TargetError
from pytest_cudaforge.evaluation.decisions import (
    CHOOSING,
    EXTREMAL,
    ORDERING,
    SCORING,
    SUBTRACTING,
    SUMMING,
    WEIGHING,
    DecidingMode,
    MarginMode,
    NamingMode,
    decided_by_rounding,
    exact,
)
from pytest_cudaforge.evaluation.exchanges import between, near_rows, trail, with_values_of
from pytest_cudaforge.evaluation.faults import is_fatal
from pytest_cudaforge.evaluation.generic import HALVES, LEVELS, TINY, UNBIASED
from pytest_cudaforge.evaluation.measures import beyond_alike, nonfinite, same_values, size_of
from pytest_cudaforge.evaluation.pointing import PointingMode, pointed_by
from pytest_cudaforge.evaluation.rarities import Rarities
from pytest_cudaforge.evaluation.redraw import HUNDREDS, SHORTCUTS, families_of, may_be_ranked, redraw
from pytest_cudaforge.evaluation.slopes import SLOPING, ScoresMode, Slope, find_slopes, put_slope
from pytest_cudaforge.evaluation.structures import (
    REDRAWN,
    Structure,
    looks_normal,
    ordered_values,
    structure_of,
    structures_of,
)
from pytest_cudaforge.runtime.signature import flatten_call, unflatten_call

if TYPE_CHECKING:
    from pytest_cudaforge.evaluation.subject import Subject

__all__ = ["TYING", "WHOLE", "Domain", "redraw_leaves"]

#: Redraws of few different values, or of entries that are all zero; and those with entries that nearly are.
TYING = ("integer", "faint", "floor", "alike", "rectified", "empty")
_SMALL = ("small", "faded")
WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
#: Families for half types alone, and for others alone.
_BY_TYPE = {"peaks": True, "hoisted": True, "deep": False, "bumped": False}
#: Redraws that tell a domain: an input's own range is kept where the reference fails on either.
_DOMAIN_FAMILIES = ("normal", "large")
#: The share of integers that rounding may have made others.
_EDGES = 1e-3
#: Draws in which rounding may decide.
_EDGE_DRAWS = 4
#: How many of a call's elements lie between neighbours of "skewed", wherever most of those are.
_SKEWED_SHARE = 0.5
#: What an answer to zeros comes to, of that to drawn values, at least.
_LEAST_LEFT = 1e-2
#: "tiny": the highest power, and what fp64 may be off by.
_MOST_POWER, _POWER_ERROR = 4, 1e-9
#: How long levels are looked for between which values may lie.
_HALVES_S = 1.0
#: Further draws that show whether values of one sign always have it, and the most that they may take.
_SIGN_DRAWS, _SIGNED_BYTES = 5, 1 << 27
#: Inputs in [0, 1] that are widened one by one where not all of them may be.
_MAX_WIDENED = 8


class Domain:
    """What a call of ``subject`` may be given in place of what it draws, by workload; each question is asked once."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._structures: dict[str, dict[str, Structure]] = {}
        #: Which families are taken, as far as is known.
        self._families: dict[str, dict[str, bool]] = {}
        self._names: dict[str, NamingMode] = {}
        self._rarities = Rarities(subject)
        self._nonfinites: dict[str, int] = {}
        self._drawn_edges: dict[str, int | None] = {}
        self._slopes: dict[str, tuple[Slope, ...]] = {}
        #: The family that the reference is being tried on.
        self.trying = ""

    def structures(self, workload: str, *, widen: bool = True) -> dict[str, Structure]:
        """By input path: which redraws keep the input's meaning. Found from two draws, once.

        ``torch.rand`` says nothing of what an input means: values in [0, 1] are kept only where the reference does
        not take others (a logarithm, a root). ``widen`` False keeps them everywhere, and runs nothing.
        """
        if workload not in self._structures:
            first, second = (flatten_call(*self.subject.draw(workload, seed))[0] for seed in (1, 2))
            found = structures_of(first, second)
            del first, second
            self._forget_chance_signs(workload, found)
            self._structures[workload] = self._widened(workload, found) if widen else found
        return self._structures[workload]

    def _forget_chance_signs(self, workload: str, found: dict[str, Structure]) -> None:
        """Of a few draws two have the same sign by chance: what has the other one in a further draw is generic."""
        signed = [path for path, structure in found.items() if structure == "signed"]
        first = flatten_call(*self.subject.draw(workload, 1))[0] if signed else {}
        if sum(first[path].nbytes for path in signed) > _SIGNED_BYTES:
            return
        for seed in range(3, 3 + _SIGN_DRAWS) if signed else ():
            further = flatten_call(*self.subject.draw(workload, seed))[0]
            for path in signed:
                if path in further and structure_of(first[path], further[path]) == "generic":
                    found[path] = "generic"

    def _widened(self, workload: str, found: dict[str, Structure]) -> dict[str, Structure]:
        """``found`` with each input in [0, 1] generic where the reference takes other values there.

        All at once first, which is the common case; else one by one, so that a probability keeps its range and the
        tensor beside it does not.
        """
        unit = [path for path, kind in found.items() if kind == "unit"]
        everything: dict[str, Structure] = {path: "generic" if kind == "unit" else kind for path, kind in found.items()}
        if not unit:
            return found
        if self._takes_all(workload, everything):
            self._families[workload] = dict.fromkeys(_DOMAIN_FAMILIES, True)
            return everything
        kept = dict(found)
        for path in unit[:_MAX_WIDENED] if len(unit) > 1 else ():
            tried: dict[str, Structure] = {**kept, path: "generic"}
            if self._takes_all(workload, tried):
                kept = tried
        return kept

    def _takes_all(self, workload: str, structures: Mapping[str, Structure]) -> bool:
        return all(self._takes(workload, family, structures) for family in _DOMAIN_FAMILIES)

    def families(
        self, workload: str, most: int | None = None, *, without: Collection[str] = (), rare: bool = True
    ) -> tuple[str, ...]:
        """The redraws of this workload, those that show most first, at most ``most``; none of those ``without``, and
        of ``rare`` values where they are asked for.

        A family stays out where the reference raises on it, or overflows where it does not as drawn: nothing is
        promised there, and a kernel that does better would be called wrong.
        """
        if self.subject.options.distributions == "drawn":
            return ()
        structures, known = self.structures(workload), self._families.setdefault(workload, {})
        known |= dict.fromkeys(without, False)
        taken: list[str] = []
        for family in families_of(structures.values()):
            if family in _BY_TYPE and family not in known and self._has_halves(workload) is not _BY_TYPE[family]:
                known[family] = False
            if family == "ceiling" and self.subject.device.type == "cuda":
                known[family] = False  # a place that follows from it may be one too far, which ends the process there
            if family == "normal" and family not in known and self._is_normal(workload, structures):
                known[family] = False  # it was drawn so, several times
            if most is not None and len(taken) >= most:
                break
            if family == "small" and "faint" in taken:
                continue
            if family not in known:
                special = {"edges": self._takes_edges, "ties": self._takes_ties}
                special |= {"empty": self._takes_empty, "shut": self._takes_shut, "open": self._takes_shut}
                special |= dict.fromkeys(("stretches", "fronts", "afar"), self._takes_shut)
                special |= {"ordered": self._takes_ordered, "climbing": self._takes_climbing}
                special |= {SLOPING: self._takes_sloping}
                special |= {"leading": self._takes_leading, "parted": self._takes_parted, "near": self._takes_near}
                special |= {"grouped": self._takes_grouped, "tiny": self._takes_tiny}
                special |= {UNBIASED: self._takes_unbiased, "ranked": self._takes_ranked}
                special |= {"below": self._takes_one_side, "above": self._takes_one_side}
                takes = special.get(family, self._takes)
                known[family] = self._tried(family, functools.partial(takes, workload, family, structures))
            taken += [family] if known[family] else []
        if most is None:
            taken += self._halves(workload, known, structures)
            taken += self._rare(workload, known) if rare else []
        return tuple(taken)

    def _halves(self, workload: str, known: dict[str, bool], structures: Mapping[str, Structure]) -> list[str]:
        """Where the reference rounds: values halfway between two levels, if nothing is rounded before."""
        names = [f"{HALVES} {most}" for most in LEVELS] if "generic" in structures.values() else []
        if any(name in known for name in names) or not names:
            return [name for name in names if known.get(name)]
        until = time.monotonic() + _HALVES_S
        for name in names if "round" in self._operators(workload) else ():
            known[name] = self._tried(name, functools.partial(self._takes_halves, workload, name, structures))
            if known[name]:
                return [name]
            if time.monotonic() > until:
                break
        return []

    def _takes_halves(self, workload: str, family: str, structures: Mapping[str, Structure]) -> bool:
        leaves, tree = self._redrawn(workload, family, structures)
        watch = NamingMode()
        with watch:
            outputs = self.subject.outputs(*unflatten_call(tree, leaves))
        fits = nonfinite(outputs) <= self._nonfinite_as_drawn(workload)
        return watch.halves and fits and self._decides_exactly(leaves, tree)

    def _operators(self, workload: str) -> frozenset[str]:
        """The names of those that forward runs, as drawn."""
        return self._named(workload).names

    def _named(self, workload: str) -> NamingMode:
        if workload not in self._names:
            watch, drawn = NamingMode(), self.subject.draw(workload, 1)
            with watch:
                self.subject.outputs(*drawn)
            self._names[workload] = watch
        return self._names[workload]

    def _takes_ordered(self, workload: str, family: str, structures: Mapping[str, Structure]) -> bool:
        names = self._operators(workload)
        told = ORDERING & names or (EXTREMAL & names and not SUMMING & names)
        return bool(told) and self._takes(workload, family, structures)

    def _takes_climbing(self, workload: str, family: str, structures: Mapping[str, Structure]) -> bool:
        names = self._operators(workload)
        told = SCORING & names or (EXTREMAL & names and WEIGHING & names)
        return bool(told) and self._takes(workload, family, structures)

    def _takes_sloping(self, workload: str, family: str, structures: Mapping[str, Structure]) -> bool:
        """Are there several inputs, one of which makes scores climb alone? Of a single one "climbing" says as much."""
        several = sum(kind == "generic" for kind in structures.values()) > 1
        scores = several and SCORING & self._operators(workload)
        return bool(scores and self._slopes_of(workload, structures)) and self._takes(workload, family, structures)

    def _slopes_of(self, workload: str, structures: Mapping[str, Structure]) -> tuple[Slope, ...]:
        if workload not in self._slopes:
            leaves, tree = flatten_call(*self.subject.draw(workload, 1))

            def scores_of(climbing: Mapping[str, Any]) -> list[torch.Tensor]:
                watch = ScoresMode()

                def takes() -> bool:
                    with watch:
                        self.subject.outputs(*unflatten_call(tree, dict(climbing)))
                    return True

                return watch.found if self._agrees(takes) else []

            generic = [path for path, kind in structures.items() if kind == "generic"]
            self._slopes[workload] = find_slopes(leaves, generic, scores_of)
        return self._slopes[workload]

    def _put_near(
        self, leaves: dict[str, Any], structures: Mapping[str, Structure], generator: torch.Generator
    ) -> None:
        """Rows beside rows of weights, as they are now, or of an input behind them, as long as they are; of an
        input without either, each beside the one before it."""
        weights = [tensor for tensor in self.subject.state().values() if _has_rows(tensor)]
        for path in reversed(_inputs_of_rows(leaves, structures)):
            leaf = leaves[path]
            others = [one for one in weights if one.shape[-1] == leaf.shape[-1]]
            leaves[path] = near_rows(leaf, others, generator) if others else trail(leaf, generator)
            weights.append(leaves[path])

    def _takes_near(self, workload: str, family: str, structures: Mapping[str, Structure]) -> bool:
        """Are there rows, and are differences told?"""
        leaves, _ = flatten_call(*self.subject.draw(workload, 1))
        if not SUBTRACTING & self._operators(workload) or not _inputs_of_rows(leaves, structures):
            return False
        return self._takes(workload, family, structures)

    def _takes_grouped(self, workload: str, family: str, structures: Mapping[str, Structure]) -> bool:
        leaves, _ = flatten_call(*self.subject.draw(workload, 1))
        weighs = (SCORING | WEIGHING) & self._operators(workload)
        return bool(weighs and _inputs_of_rows(leaves, structures)) and self._takes(workload, family, structures)

    def _takes_one_side(self, workload: str, family: str, structures: Mapping[str, Structure]) -> bool:
        """Of others the last digits of an activation's tail would be all that is left."""
        return self._named(workload).accumulates and self._takes(workload, family, structures)

    def _takes_tiny(self, workload: str, family: str, structures: Mapping[str, Structure]) -> bool:
        """Is the answer a power of the factor times what it is else, in full precision, and what is whole the same? A
        kernel then has all digits that it has else, whatever it is made of."""
        (usual, tree), (tiny, _) = (self._redrawn(workload, one, structures) for one in ("normal", family))
        moved = [leaf for path, leaf in tiny.items() if structures.get(path) == "generic"]
        if any(leaf.dtype not in (torch.float32, torch.float64) for leaf in moved):
            return False
        exact, small = (self.subject.in_fp64(leaves, tree) for leaves in (usual, tiny))
        if exact is None or small is None or not self._takes(workload, family, structures):
            return False
        numbers = any(value.is_floating_point() for value in exact.values())
        return numbers and all(_is_power(small[path], value) for path, value in exact.items())

    def _takes_ranked(self, workload: str, family: str, structures: Mapping[str, Structure]) -> bool:
        leaves, _ = flatten_call(*self.subject.draw(workload, 1))
        some = any(kind in REDRAWN and may_be_ranked(leaves[path]) for path, kind in structures.items())
        return some and self._takes(workload, family, structures)

    def _takes_unbiased(self, workload: str, family: str, structures: Mapping[str, Structure]) -> bool:
        """Is it so where what the module adds to channels is zero, as it often is at first, and not else?"""
        if not self.subject.biases or self._families[workload].get("tiny"):
            return False
        with self.subject.unbiased():
            return self._takes_tiny(workload, family, structures)

    def _takes_parted(self, workload: str, family: str, structures: Mapping[str, Structure]) -> bool:
        """Nothing is added up, or weighed: who adds half of a row to what is far larger rounds more than by halves."""
        names = self._operators(workload)
        fits = CHOOSING & names and not (SUMMING | WEIGHING | SCORING) & names
        return bool(fits) and self._takes(workload, family, structures)

    def _takes_leading(self, workload: str, family: str, structures: Mapping[str, Structure]) -> bool:
        return bool(CHOOSING & self._operators(workload)) and self._takes(workload, family, structures)

    def _tried(self, family: str, takes: Callable[[], bool]) -> bool:
        """A GPU tells of a fault when somebody waits for it: before the next family is tried."""
        self.trying = family
        found = self._agrees(takes)
        if self.subject.device.type == "cuda":
            torch.cuda.synchronize(self.subject.device)
        self.trying = ""
        return found

    def _agrees(self, takes: Callable[[], bool]) -> bool:
        """Not where the reference refuses such values, or fp64 (own kernels inside, checks of a dtype), and not where
        there is no memory to see what it makes of them."""
        try:
            return takes()
        except TargetError as error:
            if is_fatal(error):
                raise
            return False
        except torch.OutOfMemoryError:
            self.subject.give_memory_back()
            return False

    def _is_normal(self, workload: str, structures: Mapping[str, Structure]) -> bool:
        leaves, _ = flatten_call(*self.subject.draw(workload, 1))
        generic = [leaves[path] for path, structure in structures.items() if structure == "generic"]
        return all(looks_normal(leaf) for leaf in generic)

    def _rare(self, workload: str, known: dict[str, bool]) -> list[str]:
        found = self._rarities.families(workload)
        for family in found:
            if family not in known:
                usual = self._nonfinite_as_drawn(workload)
                known[family] = self._tried(family, functools.partial(self._rarities.takes, workload, family, usual))
        return [family for family in found if known[family]]

    def shortcuts(self, workload: str) -> tuple[str, ...]:
        """Those of the redraws that leave an operation nothing to do on which the reference runs, as in families."""
        structures = self.structures(workload)
        if self.subject.options.distributions == "drawn" or not {"generic", "unit"} & set(structures.values()):
            return ()
        return tuple(family for family in SHORTCUTS if self._takes(workload, family, structures))

    def hundreds(self, workload: str) -> tuple[str, ...]:
        """Those of the redraws that are worth drawing by the hundred on which the reference runs, as in families."""
        structures = self.structures(workload)
        if self.subject.options.distributions == "drawn" or "generic" not in structures.values():
            return ()
        weighs = bool(WEIGHING & self._operators(workload))
        return tuple(family for family in HUNDREDS if weighs and self._takes(workload, family, structures))

    def redraw(self, workload: str, leaves: dict[str, Any], family: str, seed: int) -> None:
        """Put values of ``family`` in place of a call's tensors where that keeps their meaning; "drawn": of none."""
        if family != "drawn" and not self._rarities.put(workload, leaves, family, seed):
            generator = torch.Generator(device=self.subject.device).manual_seed(seed ^ 0x5EED)
            self._redraw_call(workload, leaves, self.structures(workload), family, generator)

    def _redraw_call(
        self,
        workload: str,
        leaves: dict[str, Any],
        structures: Mapping[str, Structure],
        family: str,
        generator: torch.Generator,
    ) -> None:
        if family != SLOPING:
            self._redraw_leaves(leaves, structures, family, generator)
        elif slopes := self._slopes_of(workload, structures):
            put_slope(leaves, slopes, generator)

    def _redraw_leaves(
        self, leaves: dict[str, Any], structures: Mapping[str, Structure], family: str, generator: torch.Generator
    ) -> None:
        edges = self._edges(leaves) if family == "edges" else []
        redraw_leaves(leaves, structures, family, generator)
        if family == "near":
            self._put_near(leaves, structures, generator)
        skewed = between(self._edges(leaves)) if family == "skewed" else []
        for path, leaf in leaves.items() if edges or skewed else ():
            if structures.get(path) == "generic":
                leaf = with_values_of(leaf, edges, generator)
                leaves[path] = with_values_of(leaf, skewed, generator, _SKEWED_SHARE)

    def _redrawn(
        self, workload: str, family: str, structures: Mapping[str, Structure], seed: int = 1
    ) -> tuple[dict[str, Any], Any]:
        """A call's leaves, of ``family``, and their tree."""
        leaves, tree = flatten_call(*self.subject.draw(workload, seed))
        generator = torch.Generator(device=self.subject.device).manual_seed(seed)
        self._redraw_call(workload, leaves, structures, family, generator)
        return leaves, tree

    def _takes(self, workload: str, family: str, structures: Mapping[str, Structure]) -> bool:
        """Does the reference run on values redrawn from ``family``, and stay finite where it is finite as drawn?

        Few different values tie, and then either of two places of a maximum is right: not for outputs that would be
        compared as integers, unless each of these tells of one element, by numbers that nobody has rounded. Small ones
        tie where rounding takes their differences, and then fp64 answers otherwise. Where such values meet the limit of
        a comparison as no drawn ones do, rounding decides.
        """
        limit = self._nonfinite_as_drawn(workload)
        leaves, tree = self._redrawn(workload, family, structures)
        try:
            outputs = self.subject.outputs(*unflatten_call(tree, leaves))
            if family != "missing" and nonfinite(outputs) > limit:
                return family == "peaks" and self._overflows_truly(outputs, leaves, tree)
            if not (family in TYING or family in _SMALL):
                return True
            if self._rounding_decides(workload, family, structures):
                return False
            if not self.breaks_ties(outputs):
                return True
            if family == "integer":
                return self._tells_each(structures, leaves, tree, outputs) and self._decides_exactly(leaves, tree)
            return family in _SMALL and self._keeps_order(outputs, leaves, tree)
        except TargetError as error:
            if is_fatal(error):
                raise
            return False

    def _overflows_truly(self, outputs: Mapping[str, torch.Tensor], leaves: Mapping[str, Any], tree: Any) -> bool:
        """Is the reference infinite where fp64 is beyond its outputs' range, and nowhere else? Then any kernel is."""
        wide = self.subject.in_fp64(leaves, tree)
        if wide is None:
            return False
        floats = [(value, wide[path]) for path, value in outputs.items() if value.is_floating_point()]
        return all(beyond_alike(value, exact) for value, exact in floats)

    def _takes_edges(self, workload: str, family: str, structures: Mapping[str, Structure]) -> bool:
        """Are there edges, and whole numbers that tell element by element on which side of them the inputs lie? A place
        in a tensor is no such number: of two equal values either may be the largest."""
        leaves, tree = flatten_call(*self.subject.draw(workload, 1))
        if not self._edges(leaves):
            return False
        outputs = self.subject.outputs(*unflatten_call(tree, leaves))
        return self._tells_each(structures, leaves, tree, outputs) and self._takes(workload, family, structures)

    def _takes_ties(self, workload: str, family: str, structures: Mapping[str, Structure]) -> bool:
        """Are the whole numbers among the outputs places, the first of equal ones by torch's promise, in values that
        nobody has rounded? Other operators may return any of them, and rounding decides which of two sums is larger."""
        found, wide = PointingMode(), PointingMode()

        def places(outputs: dict[str, torch.Tensor]) -> bool:
            whole = [value for value in outputs.values() if value.dtype in WHOLE]
            pointed = all(pointed_by(value, found.found) is not None for value in whole)
            return self.breaks_ties(outputs) and pointed and all(search.first for search in found.found)

        watched = self._watched(workload, family, structures, (found, wide), places)
        return watched and found.searched_the_same(wide)

    def _watched(
        self,
        workload: str,
        family: str,
        structures: Mapping[str, Structure],
        watch: tuple[AbstractContextManager[Any], AbstractContextManager[Any]],
        worth: Callable[[dict[str, torch.Tensor]], bool],
    ) -> bool:
        """Run the reference on values of ``family``, the first of ``watch`` looking on, and, where its outputs are
        ``worth`` it, in fp64, the second one looking on. False where that ends early: also by answers that are less
        finite than as drawn, and by too little memory for fp64."""
        leaves, tree = self._redrawn(workload, family, structures)
        with watch[0]:
            outputs = self.subject.outputs(*unflatten_call(tree, leaves))
        if nonfinite(outputs) > self._nonfinite_as_drawn(workload) or not worth(outputs):
            return False
        return self.subject.in_fp64(leaves, tree, watch[1]) is not None

    def _takes_empty(self, workload: str, family: str, structures: Mapping[str, Structure]) -> bool:
        """Is there, where all is zero, an answer that is more than nothing, or what rounding leaves of a difference? Of
        zero no error is a small one, and good approximations of functions err there by the last bits of one."""
        if not self._takes(workload, family, structures):
            return False
        leaves, tree = flatten_call(*self.subject.draw(workload, 1))
        usual = self.subject.outputs(*unflatten_call(tree, leaves))
        self._redraw_leaves(leaves, structures, family, torch.Generator(device=self.subject.device).manual_seed(1))
        wide = self.subject.in_fp64(leaves, tree)
        if wide is None:
            return False
        floats = [path for path, value in usual.items() if value.is_floating_point() or value.is_complex()]
        return all(0 < _LEAST_LEFT * size_of(usual[path]) <= size_of(wide[path]) for path in floats)

    def _takes_shut(self, workload: str, family: str, structures: Mapping[str, Structure]) -> bool:
        """Does the reference answer by numbers, infinite ones among them, where nothing is left to count?"""
        leaves, tree = self._redrawn(workload, family, structures)
        outputs = self.subject.outputs(*unflatten_call(tree, leaves))
        return not any(bool(value.isnan().any()) for value in outputs.values() if value.is_floating_point())

    def _tells_each(
        self, structures: Mapping[str, Structure], leaves: Mapping[str, Any], tree: Any, outputs: Mapping[str, Any]
    ) -> bool:
        """Are there whole numbers among ``outputs``, and does each follow from the inputs' elements at its place? They
        have to stay where half of the other elements change."""
        whole = {path: value for path, value in outputs.items() if value.dtype in WHOLE}
        changing = [path for path, kind in structures.items() if kind == "generic"]
        shapes = {leaves[path].shape for path in changing}
        if not whole or any(value.shape not in shapes for value in whole.values()):
            return False
        generator, mixed = torch.Generator(device=self.subject.device).manual_seed(2), dict(leaves)
        kept = {shape: torch.rand(shape, generator=generator, device=self.subject.device) < 0.5 for shape in shapes}
        for path in changing:
            drawn = leaves[path]
            mixed[path] = torch.where(kept[drawn.shape], drawn, redraw("normal", drawn, "generic", generator))
        found = self.subject.outputs(*unflatten_call(tree, mixed))
        return all(same_values(found[path][kept[v.shape]], v[kept[v.shape]]) for path, v in whole.items())

    def _decides_exactly(self, leaves: Mapping[str, Any], tree: Any) -> bool:
        """Does the reference round, compare and cast numbers alone that are the same in fp64?"""
        found, wide = DecidingMode(), DecidingMode()
        with found:
            self.subject.outputs(*unflatten_call(tree, leaves))
        return self.subject.in_fp64(leaves, tree, wide) is not None and exact(found.found, wide.found)

    def _rounding_decides(self, workload: str, family: str, structures: Mapping[str, Structure]) -> bool:
        """Oftener than on drawn values, in one of some draws?"""
        for seed in range(1, 1 + _EDGE_DRAWS):
            leaves, tree = flatten_call(*self.subject.draw(workload, seed))
            self._redraw_leaves(
                leaves, structures, family, torch.Generator(device=self.subject.device).manual_seed(seed)
            )
            found = self._rounded_edges(leaves, tree)
            if found is None or found > (self._edges_as_drawn(workload) or 0):
                return found is not None
        return False

    def _rounded_edges(self, leaves: Mapping[str, Any], tree: Any) -> int | None:
        """How often does rounding decide which branch the reference takes, or what comes first? What it masks or picks
        there is its own; other sums, as good, go the other way. None where it takes no branch."""
        found, wide = MarginMode(), MarginMode()
        with found:
            self.subject.outputs(*unflatten_call(tree, leaves))
        if not found.found or self.subject.in_fp64(leaves, tree, wide) is None:
            return None
        return decided_by_rounding(found.found, wide.found)

    def _edges_as_drawn(self, workload: str) -> int | None:
        if workload not in self._drawn_edges:
            self._drawn_edges[workload] = self._rounded_edges(*flatten_call(*self.subject.draw(workload, 1)))
        return self._drawn_edges[workload]

    def _edges(self, leaves: Mapping[str, Any]) -> list[torch.Tensor]:
        """The sorted tensors among a call's inputs and the module's own, plain attributes among them, which stay where
        they are as a module moves to a device."""
        return ordered_values(
            [*leaves.values(), *(value.to(self.subject.device) for value in self.subject.state().values())]
        )

    def _has_halves(self, workload: str) -> bool:
        leaves, _ = flatten_call(*self.subject.draw(workload, 1))
        dtypes = {leaf.dtype for leaf in leaves.values() if isinstance(leaf, torch.Tensor)}
        return bool(dtypes & {torch.float16, torch.bfloat16})

    def _nonfinite_as_drawn(self, workload: str) -> int:
        if workload not in self._nonfinites:
            self._nonfinites[workload] = nonfinite(self.subject.outputs(*self.subject.draw(workload, 1)))
        return self._nonfinites[workload]

    def breaks_ties(self, outputs: Mapping[str, torch.Tensor]) -> bool:
        """Is there an output that may be the place of a maximum, or an order, and is not declared as such?"""
        declared = {
            *self.subject.options.index_outputs,
            *(f"out.{path}" for path in self.subject.options.index_outputs),
        }
        return any(value.dtype in WHOLE and path not in declared for path, value in outputs.items())

    def chooses(self, workload: str) -> bool:
        """Does forward choose among values, of which several may be equal?"""
        return bool(CHOOSING & self._operators(workload))

    def _keeps_order(self, outputs: Mapping[str, torch.Tensor], leaves: Mapping[str, Any], tree: Any) -> bool:
        """Are the integers among ``outputs`` those that fp64 gives, but for what falls upon a rounding's edge?"""
        wide = self.subject.in_fp64(leaves, tree)
        if wide is None:
            return False
        whole = [(value, wide[path]) for path, value in outputs.items() if value.dtype in WHOLE]
        return all(int((value != other).sum()) <= _EDGES * value.numel() for value, other in whole)


def _is_power(small: torch.Tensor, usual: torch.Tensor) -> bool:
    """Is ``small`` as much as ``usual`` times a power of "tiny"'s factor, or, of whole numbers, the same?"""
    if not usual.is_floating_point():
        return not usual.is_complex() and torch.equal(small, usual)
    sizes = size_of(small), size_of(usual)
    if not all(math.isfinite(size) and size > 0 for size in sizes):
        return False
    power = round(math.log(sizes[0] / sizes[1], TINY))
    return 1 <= power <= _MOST_POWER and size_of(small - usual * TINY**power) <= _POWER_ERROR * sizes[0]


def _inputs_of_rows(leaves: Mapping[str, Any], structures: Mapping[str, Structure]) -> list[str]:
    return [path for path, leaf in leaves.items() if structures.get(path) == "generic" and _has_rows(leaf)]


def _has_rows(tensor: Any) -> bool:
    """Of real numbers that no few bits hold, and more than one long."""
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16)
        and tensor.dim() > 1
        and tensor.shape[-1] > 1
        and tensor.numel() > 0
    )


def redraw_leaves(
    leaves: dict[str, Any], structures: Mapping[str, Structure], family: str, generator: torch.Generator
) -> None:
    """Put values of ``family`` in place of the tensors whose structure allows it."""
    shared = 0
    if family in ("faint", "small", "faded", "alike", "levels", "padded", "sinks", "grouped"):
        shared = int(torch.randint(1 << 31, (1,), generator=generator, device=generator.device))
    if family == "certain":
        # Of several the one that is held against the others, whose logarithm may be taken, comes last as a rule.
        shares = [path for path in leaves if structures.get(path) in ("shares", "logarithms")]
        structures = {path: structures[path] for path in shares[-1:]}
    for path, leaf in leaves.items():
        if isinstance(leaf, torch.Tensor) and structures.get(path, "drawn") != "drawn":
            leaves[path] = redraw(family, leaf, structures[path], generator, shared)
