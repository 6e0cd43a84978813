"""Which trials a verdict takes, and how a call is laid out in an arena. Pure: standard library only.

Contract trials run in one fresh worker, in an order that makes each of them prove two things: the frames alternate
(new pointers), the values change at repeated pointers, a value returns at other pointers, outputs of the call before
must survive the next call, and the poison alternates between two patterns. Which values come when is drawn afresh, so
that no kernel knows a trial by its number; the last one comes after many calls, at pointers never seen before.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any, Literal

from pytest_cudaforge.evaluation.arena import lay_out, lay_out_edged, lay_out_guarded
from pytest_cudaforge.evaluation.chance import CHANCE
from pytest_cudaforge.evaluation.oracle import TrialCase
from pytest_cudaforge.plan import LaunchPlan, TensorSpec, TracedPlan, View, step_buffers
from pytest_cudaforge.records import WorkloadFacts

__all__ = ["CallLayout", "Trial", "call_layout", "contract_trials", "output_leaves", "skews_of"]

#: Above this, one frame only and fewer trials: moving gigabytes is what such a case costs.
BIG_CALL_BYTES = 1 << 30
#: Then the redraws that show most: a one-pass variance (shifted), a missing max (large), dropped terms (integer), or
#: the next best ones where the reference itself fails on one of these.
BIG_CALL_FAMILIES = 3
REDZONE_BYTES = 256
#: From here on malloc gives a block pages of its own.
_LARGE_BYTES = 1 << 17
AGAIN = "drawn again"
#: Calls before the last trial, at least and at most: more than anybody would guess that a check takes.
CALLS_BEFORE = (64, 2048)
#: How many patterns there are, of ``poison.ZONES``, which needs torch.
_PATTERNS = 6
#: The frame of that trial: no call has seen its pointers.
_NEW_FRAME = 2
#: As ``generic`` calls it, which needs torch.
_UNBIASED = "unbiased"
_WHOLE = ("int16", "int32", "int64")
#: Of what two elements alone change places: who looks at a sample of them, or for more changes, sees nothing.
_ALONE: tuple[Literal["weight", "input"], ...] = ("weight", "input")
Elsewhere = Literal["", "thread", "training", "inference", "sealed", "images", "clockless"]


@dataclass(frozen=True)
class Trial:
    """One call of the candidate: which values, in which frame, over which poison (a number into ``POISON``, modulo its
    length, and into ``ZONES``).

    ``calls_before``: how many calls that nobody looks at go before it, in ``frame_before`` (outputs of the other
    frame are held, to be compared once more). ``renewed``: nothing but the inputs changes since the trial before, so
    that a kernel finds its own last answer where poison lies in all other trials; ``exchanged``: not even they but for
    a few elements of theirs and of the parameters, which change places, ``alone``: but for two of one tensor;
    ``moved``: all of them are a little smaller instead, or some of another sign, or integers change places "together".
    ``room``: on a GPU that is busy but for one multiprocessor (0), or so many threads of it; ``at_work``: beside others
    that take its turns.
    ``late``: a GPU writes the inputs of a module only after forward was called, in the stream of the caller.
    ``elsewhere``: a module is called in a "thread" that is new, where gradients are recorded; in such a one,
    "training", with inputs and parameters that ask for gradients; under torch's "inference" mode; or, on a CPU, with
    weights "sealed"; a plan on a CPU, where libraries' "images" are closed, or "clockless".
    """

    name: str
    case: TrialCase
    frame: int
    poison: int
    zones: bool = True
    calls_before: int = 0
    frame_before: int = 0
    renewed: bool = False
    exchanged: bool = False
    alone: Literal["", "weight", "input"] = ""
    moved: Literal["", "smaller", "turned", "together"] = ""
    room: int | None = None
    at_work: bool = False
    late: bool = False
    elsewhere: Elsewhere = ""


def contract_trials(workload: WorkloadFacts, families: Sequence[str], *, trials: int = 5) -> tuple[Trial, ...]:
    """The contract trials of one workload. Seeds are secret and fresh: call it after the candidate is fixed.

    ``families``: the redraws that keep the inputs' meaning, those first that show most (the oracle knows them).
    """
    big = workload.input_bytes + workload.output_bytes > BIG_CALL_BYTES
    cases: list[tuple[str, TrialCase]] = [("drawn", TrialCase(CHANCE.fresh_seed()))]
    drawn = max(2, min(trials, 3)) if big else max(trials, 5)
    cases += [(f"drawn {i + 1}", TrialCase(CHANCE.fresh_seed(), "drawn", _seed())) for i in range(1, drawn)]
    if not big:
        # The values of the first case at the other frame's pointers.
        cases.append((AGAIN, cases[0][1]))
    for family in families[:BIG_CALL_FAMILIES] if big else families:
        # Weights that add nothing are this trial's alone: calls that follow others under the same ones have theirs.
        unbiased = family == _UNBIASED
        cases.append((family, TrialCase(CHANCE.fresh_seed(), family, _seed(), unbiased=unbiased)))
    if big:
        return tuple(Trial(name, case, 0, i % _PATTERNS) for i, (name, case) in enumerate(cases))
    ordered = _shuffled(cases)
    found = [Trial(name, case, _frame(i), i % _PATTERNS) for i, (name, case) in enumerate(ordered)]
    family = CHANCE.choice(families) if families else "drawn"
    late = TrialCase(CHANCE.fresh_seed(), family, _seed())
    calls = CHANCE.randint(*CALLS_BEFORE)
    before = 1 - found[-1].frame
    poison = len(found) % _PATTERNS
    last = [
        Trial("after many calls", late, _NEW_FRAME, poison, True, calls, before),
        Trial("over old outputs", replace(late, family="drawn"), _NEW_FRAME, poison, renewed=True),
    ]
    few = replace(last[-1], name="a few elements exchanged", renewed=False, exchanged=True)
    last += [replace(few, name=f"two elements of a {which} exchanged", alone=which) for which in _ALONE]
    last.append(replace(few, name="some elements of the other sign", moved="turned"))
    last += [replace(few, name="edges in another order", moved="together")] if _lists_pairs(workload) else []
    last += [replace(few, name="all elements a little smaller", moved="smaller"), few]
    return (*found, *last)


def _lists_pairs(workload: WorkloadFacts) -> bool:
    """Are there integers of which some may belong together, as the ends of an edge do?"""
    whole = [spec for _, spec in workload.inputs if isinstance(spec, TensorSpec) and spec.dtype in _WHOLE]
    return len(whole) > 1 or any(len(spec.shape) > 1 for spec in whole)


def _shuffled(cases: Sequence[tuple[str, TrialCase]]) -> list[tuple[str, TrialCase]]:
    """The first case first, the others in a secret order; what comes twice comes at the other frame again."""
    rest = list(cases[1:])
    CHANCE.shuffle(rest)
    ordered = [cases[0], *rest]
    again = next(i for i, (name, _) in enumerate(ordered) if name == AGAIN)
    elsewhere = CHANCE.choice([i for i in range(len(ordered)) if _frame(i) != _frame(0)])
    ordered[again], ordered[elsewhere] = ordered[elsewhere], ordered[again]
    return ordered


def _frame(index: int) -> int:
    # 0 1 1 0 0 1 1 0: every second step keeps the pointers and changes the values.
    return ((index + 1) // 2) % 2


def _seed() -> int:
    return CHANCE.fresh_seed()


# -- layout ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CallLayout:
    """Where every buffer of a traced plan lies, per frame. ``data`` is what the oracle's ``open_bench`` takes.

    ``guards``: (offset, bytes) of the pages that a worker must not touch.
    """

    data: Mapping[str, Any]
    main: tuple[tuple[tuple[str, int], ...], ...]
    prepare: tuple[tuple[str, int], ...]
    offsets: Mapping[str, int]
    guards: tuple[tuple[int, int], ...] = ()

    def bindings(self, frame: int, slot: int = 0) -> list[tuple[int, int]]:
        """(slot, byte offset) of every buffer of the main plan in ``frame``."""
        return [(slot, self.offsets[region] + shift) for region, shift in self.main[frame]]

    def sealed_bindings(
        self, frame: int, slot: int, sealed_slot: int, written: AbstractSet[str]
    ) -> list[tuple[int, int]]:
        """As :meth:`bindings`, with inputs, state and prepared values under ``sealed_slot`` but for those ``written``
        by the reference ("input/<path>", "state/<path>")."""
        found = []
        for region, shift in self.main[frame]:
            name = region.partition("/")[2] if region.startswith("f") else region
            sealed = name.startswith(("input/", "state/", "prepared/")) and name not in written
            found.append((sealed_slot if sealed else slot, self.offsets[region] + shift))
        return found

    def prepare_bindings(self, slot: int = 0) -> list[tuple[int, int]]:
        return [(slot, self.offsets[region] + shift) for region, shift in self.prepare]


def call_layout(
    traced: TracedPlan,
    *,
    frames: int,
    skew_bytes: int = 0,
    aligned_to: int = 0,
    of_state: bool = True,
    redzones: bool = True,
    paged: bool = False,
    guarded: bool = False,
    edges: tuple[str, str] | None = None,
) -> CallLayout:
    """Lay out ``frames`` copies of a call's inputs and outputs, and one of state, prepared values and scratch.

    ``skew_bytes``: how far past its alignment every buffer begins. ``aligned_to``: inputs and state begin at a multiple
    of so many bytes and of no more (see :func:`skews_of`), or inputs alone (not ``of_state``). ``paged``: large buffers
    of the last frame, and state, lie in their pages where malloc places torch's. ``guarded``: every buffer ends at a
    page that nobody may touch, as far as its alignment allows, and those of odd frames begin behind one. ``edges``: the
    regions that lie at the arena's start and at its end.
    """
    sizes: dict[str, int] = {}
    specs: dict[str, TensorSpec] = {}
    prepared = _prepared_places(traced.prepare) if traced.prepare is not None else {}
    main = []
    for frame in range(frames):
        main.append(tuple(_places(traced.main, frame, prepared, sizes, specs)))
    prepare = tuple(_prepare_places(traced.prepare, sizes, specs)) if traced.prepare is not None else ()
    if guarded:
        odd = {name for name in sizes if re.match(r"f\d*[13579]/", name)}
        widths = {name: max(aligned_to, spec.itemsize_bytes) for name, spec in specs.items() if aligned_to}
        guards = lay_out_guarded(sizes.items(), odd, aligns=widths)
        offsets = {region.name: region.offset for region in guards.regions}
        data = _layout_data(guards.nbytes, offsets, sizes, guards.redzones, frames, specs)
        return CallLayout(data, tuple(main), prepare, offsets, guards.guards)
    if edges is not None:
        edged = lay_out_edged(sizes.items(), *edges)
        offsets = {region.name: region.offset for region in edged.regions}
        data = _layout_data(edged.nbytes, offsets, sizes, edged.redzones, frames, specs)
        return CallLayout(data, tuple(main), prepare, offsets)
    zone = REDZONE_BYTES if redzones else 0
    moved = {name: spec for name, spec in specs.items() if of_state or not name.startswith("state/")}
    skews = skews_of(moved, aligned_to) if aligned_to else {}
    last = (f"f{frames - 1}/", "state/")
    large = [name for name, nbytes in sizes.items() if paged and nbytes >= _LARGE_BYTES and name.startswith(last)]
    arena = lay_out(sizes.items(), redzone_bytes=zone, skew_bytes=skew_bytes, skews=skews, paged=large)
    offsets = {region.name: region.offset for region in arena.regions}
    zones = [list(each) for each in arena.redzones] if redzones else []
    data = _layout_data(arena.nbytes, offsets, sizes, zones, frames, specs)
    return CallLayout(data, tuple(main), prepare, offsets)


def skews_of(specs: Mapping[str, TensorSpec], aligned_to: int) -> dict[str, int]:
    """How many bytes past its alignment each input and piece of state begins, so that none is aligned to more than
    ``aligned_to`` bytes, or than its elements are wide: odd multiples, drawn for each, as one skew for all would suit a
    kernel that looks at one tensor's address only. For the same reason some inputs of frame 1 are aligned."""
    skews = {}
    for name, spec in specs.items():
        skews[name] = max(aligned_to, spec.itemsize_bytes) * CHANCE.choice((1, 3, 5, 7))
    second = [name for name in specs if name.startswith("f1/")]
    for name in CHANCE.sample(second, CHANCE.randint(1, len(second))) if second else ():
        skews[name] = 0
    return skews


def _layout_data(
    nbytes: int,
    offsets: Mapping[str, int],
    sizes: Mapping[str, int],
    redzones: Sequence[Sequence[int]],
    frames: int,
    specs: Mapping[str, TensorSpec],
) -> dict[str, Any]:
    return {
        "nbytes": nbytes,
        "regions": [[name, offset, sizes[name]] for name, offset in offsets.items()],
        "redzones": [list(zone) for zone in redzones],
        "frames": frames,
        "specs": {name: [list(s.shape), s.dtype, list(s.strides)] for name, s in specs.items()},
    }


def _places(
    plan: LaunchPlan,
    frame: int,
    prepared: Mapping[str, tuple[str, int]],
    sizes: dict[str, int],
    specs: dict[str, TensorSpec],
) -> Iterator[tuple[str, int]]:
    """(region, byte shift) of every buffer, and the regions' sizes on the way."""
    outputs, named = plan.output_buffers, {index for step in plan.steps for index in step_buffers(step)}
    for index, buffer in enumerate(plan.buffers):
        size, shift = buffer.spec.extent_bytes, 0
        if buffer.role == "input":
            region = f"f{frame}/input/{buffer.source}"
        elif buffer.role == "state":
            region = f"state/{buffer.source}"
        elif buffer.role == "prepared":
            region, shift = prepared[buffer.source]
            yield region, shift
            continue
        elif index in outputs:
            region = f"f{frame}/out/{index}"
        else:
            # Each in a place of its own, with its own red zones, although production has those share bytes whose lives
            # do not meet: a zone that another buffer may overwrite proves nothing.
            region, size = f"scratch/{index}", size if index in named else 0
        if region not in sizes or size > sizes[region]:
            sizes[region] = size
        if buffer.role in ("input", "state"):
            specs[region] = buffer.spec
        yield region, shift


def _prepare_places(plan: LaunchPlan, sizes: dict[str, int], specs: dict[str, TensorSpec]) -> Iterator[tuple[str, int]]:
    for index, buffer in enumerate(plan.buffers):
        region = f"state/{buffer.source}" if buffer.role == "state" else f"prepared/{index}"
        sizes[region] = max(sizes.get(region, 0), buffer.spec.extent_bytes)
        if buffer.role == "state":
            specs[region] = buffer.spec
        yield region, 0


def _prepared_places(plan: LaunchPlan) -> dict[str, tuple[str, int]]:
    """Path in what ``prepare`` returned -> (region, byte shift) of that value."""
    found: dict[str, tuple[str, int]] = {}
    for path, view in tree_leaves(plan.outputs, "out"):
        if isinstance(view, View):
            buffer = plan.buffers[view.buffer]
            region = f"state/{buffer.source}" if buffer.role == "state" else f"prepared/{view.buffer}"
            found[path] = (region, view.offset * buffer.spec.itemsize_bytes)
    return found


def tree_leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Leaves of an output tree with their dotted paths ("out", "out.0", "out.logits")."""
    items: Sequence[tuple[Any, Any]]
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, (list, tuple)):
        items = list(enumerate(value))
    else:
        yield path, value
        return
    for key, item in items:
        yield from tree_leaves(item, f"{path}.{key}" if path else str(key))


def output_leaves(plan: LaunchPlan, layout: CallLayout, frame: int) -> dict[str, Any]:
    """By output path: [region, spec, byte shift] for the oracle's ``check``, or the plain value."""
    found: dict[str, Any] = {}
    for path, leaf in tree_leaves(plan.outputs, "out"):
        if isinstance(leaf, View):
            buffer = plan.buffers[leaf.buffer]
            region, shift = layout.main[frame][leaf.buffer]
            spec = [list(leaf.shape), buffer.spec.dtype, list(leaf.strides)]
            found[path] = [region, spec, shift + leaf.offset * buffer.spec.itemsize_bytes]
        else:
            found[path] = leaf
    return found
