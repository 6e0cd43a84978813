"""One arena on which a candidate works, filled and judged by the oracle. In the oracle's process only.

The arena holds *frames*: complete copies of a call's inputs and outputs, and one copy of state and scratch. Between
all regions lie red zones. The candidate's worker sees the arena and nothing else; the oracle keeps private copies.
"""

from __future__ import annotations

import ctypes
import functools
import math
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pytest_cudaforge.errors import TargetError
from pytest_cudaforge.evaluation.advances import Advances
from pytest_cudaforge.evaluation.arena import DeviceArena, HostArena
from pytest_cudaforge.evaluation.contract import ROUNDING
from pytest_cudaforge.evaluation.correctness import (
    Judgement,
    Rule,
    judge_indices,
    judge_output,
    judge_pointed,
)
from pytest_cudaforge.evaluation.exchanges import (
    EXCHANGES,
    Moved,
    exchangeable,
    exchanged,
    exchanged_integers,
    exchanged_mask,
    exchanged_together,
    moved_values,
    unravelled,
)
from pytest_cudaforge.evaluation.expectation import Expected, Expecting
from pytest_cudaforge.evaluation.faults import is_fatal
from pytest_cudaforge.evaluation.frames import Case, Frame
from pytest_cudaforge.evaluation.ordinary import BY_FAR, BY_FAR_MADE, STEPS, all_near, leaning_modes, plainly_wrong
from pytest_cudaforge.evaluation.poison import POISON, ZONES, unwritten
from pytest_cudaforge.evaluation.regions import (
    RedZones,
    arena_bytes,
    is_lent,
    put,
    region_view,
    repeated,
    same_bytes,
)
from pytest_cudaforge.evaluation.structures import REDRAWN
from pytest_cudaforge.evaluation.subject import Subject
from pytest_cudaforge.evaluation.usual import UsualErrors, judged_by_usual_errors, nearly
from pytest_cudaforge.evaluation.variants import apply_variant
from pytest_cudaforge.plan import TensorSpec
from pytest_cudaforge.records import Mismatch
from pytest_cudaforge.runtime.signature import flatten_call

__all__ = ["Bench"]

#: Inputs of which a second copy costs neither time nor memory to speak of.
_SMALL_CALL_BYTES = 1 << 28
#: How a parameter is told from an input of that path.
_WEIGHT = "state/"
#: Differing bytes that are no further apart than this are written at once.
_PIECE_GAP_BYTES = 64
#: Of a workspace no more is smudged than so much, in pieces of this size.
_SMUDGED_BYTES, _SMUDGED_PIECE_BYTES = 1 << 30, 64
#: What values that change between two calls may be at most.
_STAGED_BYTES = 1 << 20


#: Where the reference writes to an input, a parameter or a buffer, that is a part of the answer.
_LEFT_ALONE = "is left as it was: the reference writes it, the candidate does not take it"


#: So many times its bound is an error at least that tells of gradients that went to others.
_FAR_BEYOND = 64.0
#: What a wrong place of an extreme may come of.
_ANY_PLACE = "; of equal values the first is the answer, or any of them where the target declares index_outputs"


def _among_ties(judged: Judgement) -> Judgement:
    """What "ties" are drawn for: whole numbers, and all else that is no matter of rounding: of few different values it
    all goes one way, in honest sums that come one after another."""
    told = [mismatch for mismatch in judged.mismatches if mismatch.kind not in ROUNDING]
    whole = [replace(m, detail=m.detail + _ANY_PLACE) if m.kind == "integer" else m for m in told]
    return replace(judged, error_ratio=None, bound=None, mismatches=tuple(whole))


def _shared(judged: Judgement) -> Judgement:
    """What "ties" are drawn for in gradients: who gets them. No sum of equal terms drifts as far as that."""
    far = judged.error_ratio is not None and judged.bound and judged.error_ratio > _FAR_BEYOND * judged.bound
    return judged if far else replace(judged, error_ratio=None, bound=None, mismatches=())


class Bench:
    """Raises TargetError where the target's own code fails, DeviceError where memory does not suffice."""

    def __init__(self, subject: Subject, workload: str, variant: str, layout: Mapping[str, Any]) -> None:
        self.subject, self.workload, self.variant = subject, workload, variant
        self.device = subject.device
        self.regions = {name: (offset, nbytes) for name, offset, nbytes in layout["regions"]}
        self.redzones = [tuple(zone) for zone in layout["redzones"]]
        self.specs = {name: TensorSpec(tuple(s[0]), s[1], tuple(s[2])) for name, s in layout["specs"].items()}
        self.arena: HostArena | DeviceArena
        if self.device.type == "cpu":
            self.arena = HostArena.create(layout["nbytes"])
        else:
            if layout["nbytes"] > 1 << 28:
                torch.cuda.empty_cache()  # torch keeps freed memory for itself; the arena comes from the driver
            self.arena = DeviceArena.create(layout["nbytes"], self.device.index or 0)
        self.bytes = arena_bytes(self.arena, self.device)
        self.frames: dict[int, Frame] = {i: Frame() for i in range(layout["frames"])}
        self.poison = POISON[0]
        #: Do values like those of its own lie around each buffer, and between the elements of a strided one?
        self._plausible = False
        self._zones = RedZones(self.bytes, self.redzones, list(self.regions.values()))
        self._expecting = Expecting(subject, workload)
        self._advances = Advances(self._expecting, self._draw)
        self._expected: Expected | None = None
        #: How often a few elements of all tensors have changed places.
        self._exchanged = 0
        self._copy: HostArena | None = None

    def snapshot(self) -> HostArena:
        """A copy of the whole arena in host memory, which is this bench's to close."""
        if self._copy is not None:
            self._copy.close()
        self._copy = HostArena.create(self.arena.nbytes)
        arena_bytes(self._copy, torch.device("cpu")).copy_(self.bytes)
        return self._copy

    def close(self) -> None:
        """Give the arena back; tensors over it must not be used afterwards."""
        if self._copy is not None:
            self._copy.close()
            self._copy = None
        for frame in self.frames.values():
            frame.inputs.clear()
        self.frames.clear()
        self._expected = None
        self._zones = RedZones(torch.empty(0), [], [])
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.bytes = torch.empty(0)
        self.arena.close()

    # -- filling

    def fill(self, frame: int, case: Case, poison: int) -> None:
        """Draw the case's values into the frame, poison outputs, scratch and red zones, and set the weights."""
        target = self.frames[frame]
        if target.case != case or case.advanced:
            same = next((f for f in self.frames.values() if f.case == case and not case.advanced), None)
            if same is None:
                # Gigabytes of the case before must be gone before new ones are drawn.
                target.inputs, self._expected = {}, None
                if not case.advanced:
                    self._set_subject(case)  # inputs may lie near to weights
            target.inputs, target.tree = (same.inputs, same.tree) if same else self._draw(case)
        target.case = case
        if case.advanced:
            self._advances.advance(target)
        self._write_poison(frame, poison)
        self.set_weights(case)
        self._write_inputs(frame)
        target.held = {}
        self._zones.write(ZONES[poison % len(ZONES)])
        self._synchronise()

    def follow(self, frame: int, calls: int) -> bool:
        """Judge the frame from now on as after so many calls more, on what each one left of inputs and state; nothing
        is written. False, and all is as it was, where inputs that the reference has written may be none for it."""
        target = self.frames[frame]
        assert target.case is not None, "a frame is filled before calls follow"
        before = replace(target)
        target.case, self._expected, target.held = replace(target.case, advanced=calls), None, {}
        if self._advances.advance(target, alike=True):
            return True
        self.frames[frame] = before
        self._set_subject(before.case or target.case)
        return False

    def edit(self, frame: int, seed: int) -> bool:
        """Judge the frame from now on as after one call more, and write what that one leaves, but for a few elements of
        inputs and parameters that have changed places. False as in :meth:`follow`."""
        if not self.follow(frame, 1):
            return False
        self.exchange(frame, seed)
        return True

    def fill_all(
        self, seeds: Sequence[int], poison: int, weights_seed: int | None = None, kept: tuple[str, ...] = ()
    ) -> None:
        """Every frame at once, each with values drawn from its own seed, and one set of weights; all else poisoned."""
        self.poison = POISON[poison % len(POISON)]
        self.bytes.fill_(self.poison)
        self._zones.write(self.poison)
        self._expected = None
        for frame, seed in zip(self.frames, seeds, strict=True):
            case = Case(seed, "drawn", weights_seed, kept)
            self._draw_into(frame, case)
            self.frames[frame].held = {}
        self.set_weights(case)
        self._synchronise()

    def touch(self, frame: int, seed: int) -> None:
        """Change one element of each floating input, and nothing else: outputs keep what the last call left. Where the
        inputs' own draws are all that counts, draw them anew."""
        target = self.frames[frame]
        assert target.case is not None, "a frame is filled before it is touched"
        generator = torch.Generator().manual_seed(seed)
        self._expected = None
        for other in self.frames.values():
            other.held = {}  # calls go on in all of them, and need not add up in one order
        if self._as_drawn:
            target.case = replace(target.case, seed=seed, family="drawn")
            target.inputs, target.tree = self._draw(target.case)
        else:
            before = target.inputs
            touched = {path: _touched(leaf, generator) for path, leaf in before.items()}
            target.inputs = repeated(touched, before)
            target.case = replace(target.case, seed=seed, family="touched")
            self._write_taken(frame, before)
            return
        self._write_inputs(frame)
        self._synchronise()

    def exchange(self, frame: int, seed: int, *, alone: str = "", moved: Moved | None = None) -> None:
        """A few elements of each parameter, and of each input that may be redrawn, is a mask or holds integers in no
        order, change places, and nothing else: sums, extremes and all but a few samples of it stay as they were, and
        outputs keep what the last call left. ``alone``: two of one "weight" or "input"; ``moved``: all of them move a
        little instead, or some are turned."""
        target = self.frames[frame]
        assert target.case is not None, "a frame is filled before its elements are exchanged"
        generator = torch.Generator().manual_seed(seed)
        structures = self.subject.domain.structures(self.workload)
        free = self._free(target)
        weighted = target.case.weights_seed is not None
        chosen = self._one_of(target, free, seed, weighted=weighted, first=alone) if alone else None
        self._expected, target.held = None, {}
        pairs = 1 if alone else EXCHANGES
        self._exchanged += not alone and not moved

        def changed(path: str, leaf: Any) -> Any:
            if self._as_drawn:
                return leaf
            if moved:
                return moved_values(leaf, moved, generator) if path in free and isinstance(leaf, Tensor) else leaf
            if chosen is None and structures.get(path) in ("mask", "pattern") and leaf.dtype == torch.bool:
                return exchanged_mask(leaf, generator, by_columns=self._exchanged % 2 == 0)
            return _exchanged(leaf, generator, pairs, free=path in free) if chosen in (None, path) else leaf

        before = target.inputs
        target.inputs = repeated({path: changed(path, leaf) for path, leaf in before.items()}, before)
        case = replace(target.case, seed=seed, family="exchanged")
        if weighted and moved:
            case = replace(case, moved=(*case.moved, (moved, seed)))  # whatever changed places before
        elif weighted and chosen is None:
            case = replace(case, exchanged=seed, exchanged_alone="", moved=())
        elif weighted and chosen is not None and chosen.startswith(_WEIGHT):
            case = replace(case, exchanged=seed, exchanged_alone=chosen.removeprefix(_WEIGHT), moved=())
        target.case = case
        self.set_weights(target.case)
        self._write_taken(frame, before)

    def exchange_together(self, frame: int, seed: int) -> None:
        """Integers that belong together change places together, and nothing else."""
        target = self.frames[frame]
        assert target.case is not None, "a frame is filled before its elements are exchanged"
        self._expected, target.held = None, {}
        before = target.inputs
        generator = torch.Generator().manual_seed(seed)
        others = {} if self._as_drawn else exchanged_together(before, generator)
        target.inputs = repeated(before | others, before)
        target.case = replace(target.case, seed=seed, family="exchanged")
        self._write_taken(frame, before)

    def _write_taken(self, frame: int, before: dict[str, Any]) -> None:
        """Write the frame's inputs, or those ``before`` where the target's own checks of its inputs say that these are
        none (boxes whose corners have changed places)."""
        self._write_inputs(frame)
        try:
            self._expectation(frame)
        except TargetError as error:
            if is_fatal(error):
                raise
            self.frames[frame].inputs = before
            self._write_inputs(frame)
        self._synchronise()

    @property
    def _as_drawn(self) -> bool:
        """Are the inputs' own draws all that counts?"""
        return self.subject.options.distributions == "drawn"

    def _free(self, target: Frame) -> set[str]:
        """Paths of the inputs that may be redrawn."""
        structures = self.subject.domain.structures(self.workload)
        return {p for p in target.inputs if structures.get(p) in REDRAWN and not self._as_drawn}

    def _one_of(self, target: Frame, free: Collection[str], seed: int, *, weighted: bool, first: str) -> str:
        """The path of an input whose elements may change places, or of a parameter, behind ``_WEIGHT``; of those that
        come ``first``, where there are any; "" where none may."""
        whole = {p for p, v in target.inputs.items() if isinstance(v, Tensor) and exchangeable(v)}
        inputs = [] if self._as_drawn else [path for path in target.inputs if path in {*free, *whole}]
        kept = target.case.kept if target.case is not None else ()
        weights = [_WEIGHT + path for path in self.subject.exchangeable_weights(kept)] if weighted else []
        paths = (weights or inputs) if first == "weight" else (inputs or weights)
        return random.Random(seed).choice(paths) if paths else ""

    def stage(self, frame: int, seed: int, renewed: bool) -> list[tuple[int, bytes]]:
        """Other values for the frame's inputs, to be written by others: (offset in the arena, bytes) of what differs.

        A few elements of each input that may be redrawn have changed places; all values are drawn anew where
        ``renewed``, or where no input may, and what forward writes has to be written whole. Nothing of the arena
        changes here, and nothing at all where that would be megabytes: they take so long to write that it is a pause,
        which others look at. No answer can then be expected of a call that finds what those before it wrote.
        """
        target = self.frames[frame]
        assert target.case is not None, "a frame is filled before its values are to change"
        for other in self.frames.values():
            other.held = {}  # calls go on in all of them
        free = self._free(target)
        small = sum(leaf.nbytes for leaf in target.inputs.values() if isinstance(leaf, Tensor)) <= _STAGED_BYTES
        inputs, tree = target.inputs, target.tree
        case = replace(target.case, seed=seed, family="exchanged" if free and not (renewed and small) else "drawn")
        if case.family == "exchanged":
            generator = torch.Generator().manual_seed(seed)
            others = {path: exchanged(leaf, generator) if path in free else leaf for path, leaf in inputs.items()}
            inputs = repeated(others, inputs)
        elif small:
            inputs, tree = self._draw(case)
        self._set_subject(case)
        inputs = self.subject.completed(inputs, tree)
        if case.family == "exchanged" and not self._takes(inputs, tree):
            return []
        mutates = self.subject.mutates(self.workload)
        found = [
            piece
            for path, value in inputs.items()
            for piece in self._pieces(f"f{frame}/input/{path}", value, whole=f"input/{path}" in mutates)
        ]
        if sum(len(data) for _, data in found) > 2 * _STAGED_BYTES:
            return []
        self._expected = None
        target.case, target.inputs, target.tree = case, inputs, tree
        return found

    def _takes(self, inputs: dict[str, Any], tree: Any) -> bool:
        """Does the target take these for inputs, as far as its own checks say?"""
        try:
            self._expecting.reference_run(Frame(inputs=inputs, tree=tree))
        except TargetError as error:
            if is_fatal(error):
                raise
            return False
        return True

    def _pieces(self, region: str, value: Any, *, whole: bool) -> Iterator[tuple[int, bytes]]:
        """(offset in the arena, bytes) of what ``region`` would have to hold in other places than it does; all of it
        where it is ``whole``, as calls before may have written it."""
        if region not in self.regions or not isinstance(value, Tensor):
            return
        offset, spec = self.regions[region][0], self.specs[region]
        before = self.bytes[offset : offset + spec.extent_bytes]
        after = before.clone()
        put(region_view(after, 0, spec), value, spec)
        if whole:
            before = after.bitwise_not()
        differing = (before != after).nonzero().flatten().cpu()
        if not len(differing):
            return
        after = after.cpu()
        ends = (differing.diff() > _PIECE_GAP_BYTES).nonzero().flatten()
        firsts = differing[torch.cat([torch.zeros(1, dtype=ends.dtype), ends + 1])].tolist()
        lasts = differing[torch.cat([ends, torch.tensor([len(differing) - 1])])].tolist()
        for first, last in zip(firsts, lasts, strict=True):
            yield offset + first, ctypes.string_at(after.data_ptr() + first, last + 1 - first)

    def renew(self, seeds: Sequence[int], family: str = "drawn") -> None:
        """Other values of ``family`` in every input of every frame; outputs keep what the last call left, so that
        nothing shows but the inputs."""
        self._expected = None
        for frame, seed in zip(self.frames, seeds, strict=True):
            before = self.frames[frame].case
            assert before is not None, "a frame is filled before it is renewed"
            self._draw_into(frame, replace(before, seed=seed, family=family))
            self.frames[frame].held = {}
        self._synchronise()

    def _draw_into(self, frame: int, case: Case) -> None:
        target = self.frames[frame]
        target.inputs = {}  # gigabytes of the case before must be gone before new ones are drawn
        target.inputs, target.tree = self._draw(case)
        target.case = case
        self._write_inputs(frame)

    def _write_inputs(self, frame: int) -> None:
        target = self.frames[frame]
        assert target.case is not None, "a frame's inputs belong to a case"
        # What follows from the weights follows from this case's: another bench may have given the module others since.
        self._set_subject(target.case)
        target.inputs = self.subject.completed(target.inputs, target.tree)
        for path, value in target.inputs.items():
            self._write(f"f{frame}/input/{path}", value)

    def rewrite(self) -> None:
        """All that :meth:`renew` does to caches and clocks, and the same values once more into every input."""
        for frame, target in self.frames.items():
            assert target.case is not None, "a frame is filled before it is written again"
            target.held = {}
            if sum(value.nbytes for value in target.inputs.values() if isinstance(value, Tensor)) < _SMALL_CALL_BYTES:
                # Drawn and dropped: what the target draws need not be the same twice.
                self._draw(target.case)
            self._write_inputs(frame)
        self._synchronise()

    def _set_subject(self, case: Case) -> None:
        self.subject.set_weights(case.weights)
        if case.advanced:
            self.subject.put_state(self._advances.state)

    def set_weights(self, case: Case) -> None:
        """Put the case's weights into the module and the state regions."""
        self._set_subject(case)
        for path, tensor in self.subject.state().items():
            self._write(f"state/{path}", tensor)

    def _draw(self, case: Case) -> tuple[dict[str, Any], Any]:
        args, kwargs = self.subject.draw(self.workload, case.seed)
        args, kwargs = apply_variant(self.variant, args, kwargs)
        leaves, tree = flatten_call(args, kwargs)
        drawn = dict(leaves)
        self.subject.domain.redraw(self.workload, leaves, case.family, case.seed)
        return repeated(leaves, drawn), tree

    def _write(self, region: str, value: Any) -> None:
        if region in self.regions and isinstance(value, Tensor):
            offset, _ = self.regions[region]
            spec = self.specs[region]
            if self._plausible and spec.extent_bytes > value.nbytes > 0:
                self._fill_gaps(offset, spec, value)
            if offset % spec.itemsize_bytes == 0:
                put(region_view(self.bytes, offset, spec), value, spec)
            else:
                staged = self.bytes[offset : offset + spec.extent_bytes].clone()
                put(staged.view(getattr(torch, spec.dtype)).as_strided(spec.shape, spec.strides), value, spec)
                self.bytes[offset : offset + spec.extent_bytes] = staged

    def _fill_gaps(self, offset: int, spec: TensorSpec, value: Tensor) -> None:
        """What lies between the elements of a strided tensor, its own values: a caller's slice lies among others."""
        around = value.contiguous().reshape(-1).view(torch.uint8)
        times = -(-spec.extent_bytes // len(around))
        self.bytes[offset : offset + spec.extent_bytes] = around.repeat(times)[: spec.extent_bytes]

    def _write_poison(self, frame: int, poison: int) -> None:
        self.poison = POISON[poison % len(POISON)]
        self._plausible = ZONES[poison % len(ZONES)] is None
        keep = (f"f{frame}/", "scratch/")
        for name, (offset, nbytes) in self.regions.items():
            if name.startswith(keep):
                self.bytes[offset : offset + nbytes] = self.poison

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # -- judging

    def check(
        self, frame: int, outputs: Mapping[str, Any], *, zones: bool = True, told: bool = False
    ) -> dict[str, Any]:
        """Judge what the worker left in ``frame``. ``outputs``: path -> [region, spec, byte offset] or a plain value.

        Outputs are copied before anything is compared, so that nothing can change under the comparison.
        """
        private = {path: self._take(leaf) for path, leaf in outputs.items() if isinstance(leaf, list)}
        found = list(self._zones_changed(outputs)) if zones else []
        found += self._held_changed(frame)
        expected = self._expectation(frame)
        found += self._inputs_changed(frame, expected)
        found += self._others_changed(frame, expected)
        judgements = []
        for path, value in expected.reference.items():
            judgement = self._judge_leaf(path, outputs, private, value, expected)
            judgements.append(judgement)
            if judgement.mismatches and path in private and isinstance(value, Tensor):
                pattern = judgement.mismatches[0].pattern
                found += unwritten(path, private[path], value, self.poison, pattern)
            found += judgement.mismatches
        found += self._aliasing(outputs, expected)
        found += self._copies(outputs, expected) if told else []
        # A parameter that forward returns is drawn anew where it lies.
        own = {path for path in private if not outputs[path][0].startswith("state/")}
        self.frames[frame].held = {path: private[path] for path in own if private[path].numel() < 1 << 26}
        self.frames[frame].held_at = {path: outputs[path] for path in private}
        ratios = [j.error_ratio for j in judgements if j.error_ratio is not None]
        bounds = [j.bound for j in judgements if j.bound]
        return {
            "mismatches": [replace(m, output=self.subject.output_name(m.output)) for m in found],
            "error_ratio": max(ratios, default=None),
            "bound": min(bounds, default=None),
            "partial": expected.partial or any(j.partial for j in judgements),
        }

    def recheck(self, frame: int, outputs: Mapping[str, Any]) -> dict[str, Any]:
        """Judge one more call on values that :meth:`check` has seen: at once where its outputs are bitwise the same."""
        seen = self.frames[frame]
        paths = [path for path, leaf in outputs.items() if isinstance(leaf, list)]
        if set(paths) == set(seen.held) and all(same_bytes(self._take(outputs[p]), seen.held[p]) for p in paths):
            return {"mismatches": [], "error_ratio": None, "bound": None, "partial": False}
        return self.check(frame, outputs)

    def look(self, outputs: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
        """Judge ordinary calls by the hundred: ``outputs`` by frame, as in :meth:`check`. The first that is plainly
        wrong (see ``ordinary``) is told."""
        for frame, leaves in outputs.items():
            private = {path: self._take(leaf) for path, leaf in leaves.items() if isinstance(leaf, list)}
            found = None if self._all_near(frame, private) else self.check(frame, leaves, zones=False)
            if found is None or not found["mismatches"]:
                continue
            nearby = functools.partial(self._nearby, frame)
            names = {self.subject.output_name(path): value for path, value in private.items()}
            reference = {self.subject.output_name(p): v for p, v in self._expectation(frame).reference.items()}
            case = self.frames[frame].case
            by_far = BY_FAR if case is None or case.family == "drawn" else BY_FAR_MADE
            beside = functools.partial(self._beside, frame)
            if wrong := plainly_wrong(found["mismatches"], names, reference, nearby, by_far, beside):
                return {**found, "mismatches": wrong}
        return {"mismatches": [], "error_ratio": None, "bound": None, "partial": False}

    def _all_near(self, frame: int, outputs: Mapping[str, Tensor]) -> bool:
        """Are they next to the reference's, and what it writes as well? What it returns beside tensors is judged."""
        target = self.frames[frame]
        assert target.case is not None, "a frame is filled before it is looked at"
        self._set_subject(target.case)
        reference, written, _ = self._expecting.reference_run(target)
        if not all(isinstance(value, Tensor) for value in reference.values()):
            return False
        regions = {key: key if key.startswith(_WEIGHT) else f"f{frame}/{key}" for key in written}
        left = {key: now for key, region in regions.items() if (now := self._now(region)) is not None}
        return all_near({**outputs, **left}, {**reference, **written})

    def _nearby(self, frame: int) -> Iterator[Mapping[str, Any]]:
        """What the reference gives where it rounds otherwise; integers by what has no one right rounding alone."""
        for mode in leaning_modes():
            with mode.floats:
                outputs, _, _ = self._expecting.reference_run(self.frames[frame])
            with mode.integers:
                others, _, _ = self._expecting.reference_run(self.frames[frame])
            whole = {p: v for p, v in others.items() if isinstance(v, Tensor) and not v.is_floating_point()}
            yield {self.subject.output_name(path): value for path, value in {**outputs, **whole}.items()}

    def _beside(self, frame: int) -> Iterator[Mapping[str, Any]]:
        """What the reference gives for inputs some roundoffs away."""
        target = self.frames[frame]
        for seed in range(STEPS):
            inputs = {p: nearly(leaf, seed) if isinstance(leaf, Tensor) else leaf for p, leaf in target.inputs.items()}
            outputs, _, _ = self._expecting.reference_run(replace(target, inputs=inputs))
            yield {self.subject.output_name(path): value for path, value in outputs.items()}

    def smudge(self, outputs: Mapping[str, Any], seed: int, count: int) -> None:
        """Invert the bits of ``count`` elements of each output where it lies: a call has to write all of them again;
        and of half of each workspace, in which a call finds anybody's bytes."""
        chance = random.Random(seed)
        for region in (name for name in self.regions if name.startswith("scratch/")):
            self._smudge_half(*self.regions[region], seed)
        for region, spec, shift in (leaf for leaf in outputs.values() if isinstance(leaf, list)):
            if "/out/" not in region:
                continue  # a view of an input
            where = TensorSpec(tuple(spec[0]), spec[1], tuple(spec[2]))
            if not math.prod(where.shape):
                continue
            for _ in range(count):
                at = sum(chance.randrange(n) * step for n, step in zip(where.shape, where.strides, strict=True))
                begin = self.regions[region][0] + shift + at * where.itemsize_bytes
                self.bytes[begin : begin + where.itemsize_bytes].bitwise_not_()
        self._synchronise()

    def _smudge_half(self, offset: int, nbytes: int, seed: int) -> None:
        """Piece by piece, little as a whole: a key that is as it was may lie beside an answer that is not."""
        size = min(nbytes, _SMUDGED_BYTES)
        piece = _SMUDGED_PIECE_BYTES if size >= 2 * _SMUDGED_PIECE_BYTES else max(1, size)
        pieces = self.bytes[offset : offset + size // piece * piece].view(-1, piece)
        generator = torch.Generator(device=self.device).manual_seed(seed ^ offset)
        share = 0.5 if len(pieces) > 1 else 0.25
        chosen = torch.rand((len(pieces), 1), generator=generator, device=self.device) < share
        pieces.bitwise_xor_(chosen.to(torch.uint8) * 0xFF)

    def _take(self, leaf: list[Any]) -> Tensor:
        region, spec, shift = leaf
        offset, _ = self.regions[region]
        if spec[1] == "bool":  # a copy of booleans makes every true a 1
            return self._take([region, [spec[0], "uint8", spec[2]], shift]).view(torch.bool)
        return region_view(self.bytes, offset + shift, TensorSpec(tuple(spec[0]), spec[1], tuple(spec[2]))).clone()

    def _judge_leaf(
        self, path: str, outputs: Mapping[str, Any], private: Mapping[str, Tensor], value: Any, expected: Expected
    ) -> Judgement:
        if not isinstance(value, Tensor):
            same = path in outputs and not isinstance(outputs[path], list) and outputs[path] == value
            wrong = Mismatch(path, "structure", f"is {outputs.get(path)!r}, the reference returns {value!r}")
            return Judgement(None, None, () if same else (wrong,))
        if path not in private:
            return Judgement(None, None, (Mismatch(path, "count", "the plan does not return this output"),))
        options = self.subject.options
        if self._expecting.is_index(path):
            if path in expected.pointed:
                search, exact = expected.pointed[path]
                return judge_pointed(path, private[path], value, search.source, exact, search.dim)
            sources = [t.double() for t in self._tensor_inputs(expected.case).values() if t.is_floating_point()]
            return judge_indices(path, private[path], value, sources)
        rule = expected.rule(path, options.atol, options.rtol)
        exact, spread = expected.oracle[path], expected.spread_of(path)

        def judge(candidate: Tensor, rule: Rule) -> Judgement:
            return judge_output(path, candidate, value, exact, rule, spread)

        usual = functools.partial(self._usual_errors, expected)
        judged = judge(private[path], rule)
        judged = judged_by_usual_errors(judged, path, private[path], exact, rule, usual, judge)
        if expected.case.family != "ties":
            return judged
        return _among_ties(judged) if self.subject.tells_sums_apart else _shared(judged)

    def _tensor_inputs(self, case: Case) -> dict[str, Tensor]:
        return {path: leaf for path, leaf in self._frame_of(case).inputs.items() if isinstance(leaf, Tensor)}

    def _frame_of(self, case: Case) -> Frame:
        return next(frame for frame in self.frames.values() if frame.case == case)

    def _usual_errors(self, expected: Expected) -> UsualErrors:
        return self._expecting.usual_errors(expected, self._frame_of(expected.case))

    def _zones_changed(self, outputs: Mapping[str, Any]) -> Iterator[Mismatch]:
        for offset in self._zones.changed():
            before = [name for name, (o, n) in self.regions.items() if o + n <= offset]
            near = max(before, key=lambda name: self.regions[name][0], default="")
            where = self._place(near, outputs) if near else "memory before the first buffer"
            detail = "memory behind it was written out of bounds" if near else "was written out of bounds"
            yield Mismatch(where, "redzone", detail)

    def _place(self, region: str, outputs: Mapping[str, Any]) -> str:
        """A region as the kernel's author knows it."""
        kind, _, rest = region.partition("/")
        if kind.startswith("f"):
            kind, _, rest = rest.partition("/")
        if kind == "input":
            return self.subject.input_name(rest)
        if kind == "state":
            return self.subject.state_name(rest)
        if kind == "out":
            return next((f"output {p}" for p, v in outputs.items() if isinstance(v, list) and v[0] == region), kind)
        return {"scratch": "a scratch buffer", "prepared": "a buffer of prepare()"}.get(kind, region)

    def _held_changed(self, frame: int) -> list[Mismatch]:
        found = []
        for number, other in self.frames.items():
            if number == frame:
                continue
            now = {path: self._take(other.held_at[path]) for path in other.held}
            changed = [path for path, tensor in other.held.items() if not same_bytes(now[path], tensor)]
            if changed and self._is_wrong(number, now):
                detail = "an output of an earlier call changed during a later call"
                found += [Mismatch(path, "unstable", detail) for path in changed]
            other.held = {}
        return found

    def _is_wrong(self, frame: int, outputs: Mapping[str, Tensor]) -> bool:
        """Are outputs that are other bits than before no answer to the frame's values, either? Calls that nobody judged
        may have been made there, and sums whose terms come in no order need not be the same twice."""
        if self.subject.mutates(self.workload):
            return True
        expected, at = self._expectation(frame), self.frames[frame].held_at
        leaves = ((path, value) for path, value in expected.reference.items() if path in outputs)
        return any(self._judge_leaf(path, at, outputs, value, expected).mismatches for path, value in leaves)

    def _inputs_changed(self, frame: int, expected: Expected) -> list[Mismatch]:
        found: list[Mismatch] = []
        name = self.subject.input_name, self.subject.state_name
        pairs = [(f"f{frame}/input/{path}", name[0](path), value) for path, value in self.frames[frame].inputs.items()]
        pairs += [(f"state/{path}", name[1](path), value) for path, value in self.subject.state().items()]
        for region, path, value in pairs:
            if not isinstance(value, Tensor) or region.removeprefix("state/") in self._kept(frame):
                continue  # the candidate may have it under another name: nobody but the oracle writes there
            key = region.split("/", 1)[1] if region.startswith("f") else region
            now = self._now(region)
            if key in expected.mutated:
                reference, oracle = expected.mutated[key]
                spread = expected.spread_of(key)
                left = value if now is None else now.clone()
                wrong = judge_output(path, left, reference, oracle, expected.rule(key), spread).mismatches
                found += [replace(wrong[0], kind="unwritten", detail=_LEFT_ALONE)] if wrong and now is None else wrong
            elif now is not None and not same_bytes(now, value):
                found.append(Mismatch(path, "mutation", "was changed by the kernel; the reference does not write it"))
        return found

    def _now(self, region: str) -> Tensor | None:
        """What ``region`` holds; None where the candidate does not bind it."""
        if region not in self.regions:
            return None
        return region_view(self.bytes, self.regions[region][0], self.specs[region])

    def _others_changed(self, frame: int, expected: Expected) -> Iterator[Mismatch]:
        """A write that leaps over a red zone may land in the inputs of a call that is not this one's."""
        for number, other in self.frames.items():
            for path, value in other.inputs.items() if number != frame else ():
                region = f"f{number}/input/{path}"
                if f"input/{path}" in expected.mutated or region not in self.regions or not isinstance(value, Tensor):
                    continue
                if not same_bytes(region_view(self.bytes, self.regions[region][0], self.specs[region]), value):
                    detail = "was changed where it belongs to another call: memory far out of bounds was written"
                    yield Mismatch(self.subject.input_name(path), "redzone", detail)

    def _kept(self, frame: int) -> tuple[str, ...]:
        case = self.frames[frame].case
        return case.kept if case is not None else ()

    def _aliasing(self, outputs: Mapping[str, Any], expected: Expected) -> list[Mismatch]:
        found = []
        for path, leaf in outputs.items():
            if isinstance(leaf, list) and is_lent(leaf[0]) and path not in expected.aliases:
                detail = f"shares memory with {self._place(leaf[0], {})}; the reference returns a fresh tensor"
                found.append(Mismatch(path, "structure", detail))
        return found

    def _copies(self, outputs: Mapping[str, Any], expected: Expected) -> list[Mismatch]:
        """Of an input that the reference writes and returns: whoever gets it back goes on with it, in place. Of what
        nobody writes, or of a part, a copy is as good."""
        found = []
        for path, same in expected.aliases.items():
            leaf, written = outputs.get(path), expected.mutated.get(f"input/{same}")
            whole = written is not None and written[0].numel() == expected.reference[path].numel()
            if whole and isinstance(leaf, list) and not is_lent(leaf[0]):
                name = self.subject.input_name(same)
                detail = f"is a copy of {name}; the reference returns {name} itself, into which it has written"
                found.append(Mismatch(path, "structure", detail))
        return found

    # -- what is expected

    def _expectation(self, frame: int) -> Expected:
        case = self.frames[frame].case
        assert case is not None, "a frame is filled before it is checked"
        # Another bench may have given the module other weights since: what was not written is compared with them.
        self._set_subject(case)
        if self._expected is None or self._expected.case != case:
            self._expected = None
            self._expected = self._expecting.compute(case, self.frames[frame])
        return self._expected


def _exchanged(leaf: Any, generator: torch.Generator, pairs: int, *, free: bool) -> Any:
    """``leaf`` with a few elements exchanged where it is ``free`` to be redrawn, or holds integers in no order."""
    if free:
        return exchanged(leaf, generator, pairs)
    return exchanged_integers(leaf, generator) if isinstance(leaf, Tensor) and exchangeable(leaf) else leaf


def _touched(leaf: Any, generator: torch.Generator) -> Any:
    """``leaf`` with one element set to another element's value, or moved by half where all are equal."""
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or not leaf.numel():
        return leaf
    places = torch.randint(leaf.numel(), (64,), generator=generator).tolist()
    indices = [tuple(int(i) for i in unravelled(place, tuple(leaf.shape))) for place in places]
    values = [float(leaf[index]) for index in indices]
    # The most distant of a few: the output must change by more than rounding.
    far = max(range(len(values)), key=lambda i: abs(values[i] - values[0]))
    changed = leaf.clone()
    changed[indices[0]] = values[far] if values[far] != values[0] else values[0] + 0.5
    return changed
