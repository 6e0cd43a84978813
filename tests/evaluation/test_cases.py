"""Which trials a verdict takes and how calls are laid out. Pure."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from pytest_cudaforge.evaluation.cases import _PATTERNS, call_layout, contract_trials, output_leaves
from pytest_cudaforge.evaluation.contract import compare_structure, label_of, status_of
from pytest_cudaforge.plan import Buffer, Launch, LaunchPlan, LibraryCall, TensorSpec, TracedPlan, View, overlap
from pytest_cudaforge.records import Mismatch, Status, WorkloadFacts
from pytest_cudaforge.runtime.gradients import backward_workload

FAMILIES = ("shifted", "large", "integer", "sparse", "normal", "uniform")
SPEC = TensorSpec((4, 8), "float32", (8, 1))
WORKLOAD = WorkloadFacts("default", (("0", SPEC),), {}, (("out", SPEC),), {}, 128, 32, 128, 0)


def _plan(outputs: object = View(2, (4, 8), (8, 1)), steps: tuple[object, ...] | None = None) -> LaunchPlan:
    buffers = (
        Buffer("input", SPEC, "0"),
        Buffer("state", TensorSpec((8,), "float32", (1,)), "weight"),
        Buffer("scratch", SPEC),
        Buffer("scratch", TensorSpec((4,), "float32", (1,))),
    )
    views = tuple(View(i, b.spec.shape, b.spec.strides) for i, b in enumerate(buffers))
    return LaunchPlan(buffers, steps or (Launch("f", views),), outputs)  # type: ignore[arg-type]


def test_trials_repeat_pointers_with_new_values_and_values_at_new_pointers() -> None:
    trials = contract_trials(WORKLOAD, FAMILIES, trials=5)
    pairs = list(itertools.pairwise(trials))
    assert any(a.frame == b.frame and a.case != b.case for a, b in pairs)
    assert any(a.frame != b.frame for a, b in pairs)
    again = next(trial for trial in trials if trial.name == "drawn again")
    assert again.case == trials[0].case and again.frame != trials[0].frame
    assert {trial.poison for trial in trials} == set(range(_PATTERNS))
    assert [t.case.weights_seed is None for t in trials if t.name == "drawn"] == [True]
    assert {t.name for t in trials} >= set(FAMILIES)


def test_seeds_are_fresh_every_time() -> None:
    first, second = (contract_trials(WORKLOAD, ()) for _ in range(2))
    assert len(first) == 13
    assert not {t.case.seed for t in first} & {t.case.seed for t in second}


def test_the_order_is_secret_and_the_last_trial_comes_late_at_new_pointers() -> None:
    orders = set()
    for _ in range(20):
        trials = contract_trials(WORKLOAD, FAMILIES)
        orders.add(tuple(trial.name for trial in trials))
        again = next(trial for trial in trials if trial.name == "drawn again")
        assert (trials[0].name, trials[0].frame, again.frame) == ("drawn", 0, 1)
        late, renewed, *alone, exchanged = trials[-7:]
        assert late.frame not in {trial.frame for trial in trials[:-7]}
        assert late.calls_before >= 64
        # Those calls must leave the outputs alone that the trial before was judged by: they are compared again.
        assert late.frame_before != trials[-8].frame
        assert renewed.renewed and (renewed.frame, renewed.case.weights_seed) == (late.frame, late.case.weights_seed)
        for trial in (*alone, exchanged):
            assert trial.exchanged and not trial.renewed and trial.frame == late.frame
        assert [trial.alone for trial in (*alone, exchanged)] == ["weight", "input", "", "", ""]
        assert [trial.moved for trial in (*alone, exchanged)] == ["", "", "turned", "smaller", ""]
    assert len(orders) > 1


def test_integers_that_may_belong_together_change_places_together() -> None:
    pairs, single = TensorSpec((2, 90), "int64", (90, 1)), TensorSpec((90,), "int64", (1,))
    for inputs, expected in (((pairs,), True), ((single, single), True), ((single, SPEC), False), ((SPEC,), False)):
        workload = dataclasses.replace(WORKLOAD, inputs=tuple((str(i), spec) for i, spec in enumerate(inputs)))
        assert ("together" in [trial.moved for trial in contract_trials(workload, ())]) is expected


def test_weights_that_add_nothing_are_one_trial_s_alone() -> None:
    """Calls behind it go by what the weights are then, and are drawn from the same family now and then."""
    trials = contract_trials(WORKLOAD, ("unbiased",))
    assert [trial.name for trial in trials if trial.case.unbiased] == ["unbiased"]
    late = next(trial for trial in trials if trial.calls_before)
    assert (late.case.family, late.case.unbiased) == ("unbiased", False)


def test_elements_are_exchanged_in_the_last_trials() -> None:
    trials = contract_trials(WORKLOAD, ())
    assert all(trial.exchanged for trial in trials[-5:])
    assert not any(trial.exchanged for trial in trials[:-5])


def test_sealed_bindings_leave_only_what_a_call_may_write() -> None:
    layout = call_layout(TracedPlan(_plan()), frames=1)
    assert [slot for slot, _ in layout.sealed_bindings(0, 0, 2, frozenset())] == [2, 2, 0, 0]
    assert [slot for slot, _ in layout.sealed_bindings(0, 0, 2, {"state/weight"})] == [2, 0, 0, 0]
    assert [slot for slot, _ in layout.sealed_bindings(0, 0, 2, {"input/0"})] == [0, 2, 0, 0]
    assert [place for _, place in layout.sealed_bindings(0, 0, 2, set())] == [p for _, p in layout.bindings(0)]


def test_without_redraws_every_trial_is_drawn() -> None:
    assert {t.case.family for t in contract_trials(WORKLOAD, ())} == {"drawn"}


def test_big_calls_get_one_frame_and_fewer_trials() -> None:
    big = dataclasses.replace(WORKLOAD, input_bytes=7 << 30)
    trials = contract_trials(big, FAMILIES)
    assert {t.frame for t in trials} == {0}
    assert [t.case.family for t in trials] == ["drawn", "drawn", "drawn", "shifted", "large", "integer"]
    assert {t.poison for t in trials} == set(range(_PATTERNS))


def test_layout_has_frames_and_zones_between_all_regions() -> None:
    layout = call_layout(TracedPlan(_plan()), frames=2)
    regions = sorted((offset, offset + nbytes, name) for name, offset, nbytes in layout.data["regions"])
    names = {name for _, _, name in regions}
    assert names == {"f0/input/0", "f1/input/0", "f0/out/2", "f1/out/2", "state/weight", "scratch/3"}
    zones = {tuple(zone) for zone in layout.data["redzones"]}
    for (_, end, _), (start, _, _) in itertools.pairwise(regions):
        assert any(o <= end < o + n or o < start <= o + n for o, n in zones), (end, start)
    first, second = layout.bindings(0), layout.bindings(1)
    assert first[0] != second[0] and first[2] != second[2]
    assert first[1] == second[1] and first[3] == second[3]
    assert all(slot == 0 and offset % 256 == 0 for slot, offset in first)


def test_skew_moves_every_buffer() -> None:
    bindings = call_layout(TracedPlan(_plan()), frames=1, skew_bytes=64).bindings(0)
    assert [offset % 256 for _, offset in bindings] == [64] * 4


@pytest.mark.parametrize(("aligned_to", "least"), [(1, 4), (16, 16), (32, 32), (64, 64)])
def test_misaligned_inputs_and_state_are_aligned_to_no_more(aligned_to: int, least: int) -> None:
    seen = set()
    for _ in range(20):
        layout = call_layout(TracedPlan(_plan()), frames=2, aligned_to=aligned_to)
        given, weight, *others = (offset for _, offset in layout.bindings(0))
        assert given % (2 * least) == weight % (2 * least) == least
        assert all(offset % 256 == 0 for offset in others)
        # Of the inputs in the second frame, one that is aligned beside a weight that is not.
        assert layout.bindings(1)[0][1] % 256 == 0
        seen.add((given % 256, weight % 256))
    assert len(seen) > 1 or aligned_to == 64


def test_prepared_values_are_where_prepare_leaves_them() -> None:
    weight = TensorSpec((8,), "float32", (1,))
    prepare = LaunchPlan(
        (Buffer("state", weight, "weight"), Buffer("scratch", weight)), (), {"w": View(1, (4,), (1,), 4)}
    )
    main = LaunchPlan((Buffer("prepared", TensorSpec((4,), "float32", (1,)), "out.w"),), (), None)
    layout = call_layout(TracedPlan(main, prepare), frames=1)
    assert layout.bindings(0)[0][1] == layout.prepare_bindings()[1][1] + 16


def test_output_leaves_name_region_spec_and_shift() -> None:
    plan = _plan({"a": View(2, (2, 8), (8, 1), 16), "n": 3})
    leaves = output_leaves(plan, call_layout(TracedPlan(plan), frames=1), 0)
    assert leaves == {"out.a": ["f0/out/2", [[2, 8], "float32", [8, 1]], 64], "out.n": 3}


def test_structure_is_compared_before_anything_runs() -> None:
    assert compare_structure(_plan(), WORKLOAD) == ()
    cases = {
        "count": (View(2, (4, 8), (8, 1)), 1),
        "shape": View(2, (8, 4), (4, 1)),
        "structure": View(2, (4, 8), (1, 4)),
    }
    for kind, outputs in cases.items():
        assert [m.kind for m in compare_structure(_plan(outputs), WORKLOAD)] == [kind]
    half = dataclasses.replace(WORKLOAD, outputs=(("out", TensorSpec((4, 8), "float16", (8, 1))),))
    assert [m.kind for m in compare_structure(_plan(), half)] == ["dtype"]
    assert "None" in compare_structure(_plan(None), WORKLOAD)[0].detail


@pytest.mark.parametrize(
    ("strides", "words"),
    [
        ((8, 1), "return a contiguous tensor, empty((4, 8), ...)"),
        ((1, 4), "empty((8, 4), ...).transpose(0, 1)"),
        ((0, 1), "return empty((1, 8), ...).expand(4, 8)"),
        ((16, 1), "allocate the larger buffer that this is a part of"),
    ],
)
def test_a_plan_is_told_how_to_get_the_strides(strides: tuple[int, ...], words: str) -> None:
    facts = dataclasses.replace(WORKLOAD, outputs=(("out", TensorSpec((4, 8), "float32", strides)),))
    (mismatch,) = compare_structure(_plan(View(2, (4, 8), (64, 2))), facts)
    assert mismatch.detail.startswith(f"strides (64, 2), expected {strides}: ") and words in mismatch.detail
    facts = dataclasses.replace(WORKLOAD, outputs=(("out", TensorSpec((2, 3, 4), "float32", (4, 8, 1))),))
    (mismatch,) = compare_structure(_plan(View(2, (2, 3, 4), (12, 4, 1))), facts)
    assert mismatch.detail.endswith("empty((3, 2, 4), ...).transpose(0, 1)")
    facts = dataclasses.replace(WORKLOAD, outputs=(("out", TensorSpec((2, 3, 4), "float32", (1, 8, 2))),))
    (mismatch,) = compare_structure(_plan(View(2, (2, 3, 4), (12, 4, 1))), facts)
    assert mismatch.detail.endswith("empty((3, 4, 2), ...).permute(2, 0, 1)")


@pytest.mark.parametrize(
    ("strides", "shape", "given", "fits"),
    [
        ((16, 1), (4, 8), (8, 1), True),  # y[:, :8]
        ((25,), (32,), (1,), True),  # d[:, -1]
        ((1, 16), (4, 8), (1, 4), True),
        ((1, 16), (4, 8), (8, 1), False),  # another order
        ((8, 1), (4, 8), (16, 1), False),  # gaps where the reference has none
        ((0, 1), (4, 8), (8, 1), False),
    ],
)
def test_a_part_of_a_larger_buffer_may_be_returned_without_gaps(
    strides: tuple[int, ...], shape: tuple[int, ...], given: tuple[int, ...], fits: bool
) -> None:
    facts = dataclasses.replace(WORKLOAD, outputs=(("out", TensorSpec(shape, "float32", strides)),))
    assert (not compare_structure(_plan(View(2, shape, given)), facts)) is fits


@pytest.mark.parametrize(
    ("strides", "given", "fits"),
    [
        ((1, 4), (8, 1), True),  # attention's answers on a GPU
        ((0, 1), (8, 1), True),
        ((8, 1), (1, 4), False),  # contiguous, or as the reference's
        ((1, 16), (16, 1), False),
    ],
)
def test_a_kernelbench_solution_may_return_contiguous_tensors(
    strides: tuple[int, ...], given: tuple[int, ...], fits: bool
) -> None:
    facts = dataclasses.replace(WORKLOAD, outputs=(("out", TensorSpec((4, 8), "float32", strides)),))
    plan = _plan(View(2, (4, 8), given))
    assert compare_structure(plan, facts) != ()
    assert (not compare_structure(plan, dataclasses.replace(facts, unordered=True))) is fits


def test_gradients_may_lie_in_any_order() -> None:
    outputs = (("out", TensorSpec((4, 8), "float32", (1, 4))),)
    facts = dataclasses.replace(WORKLOAD, name=backward_workload("default"), outputs=outputs)
    assert compare_structure(_plan(View(2, (4, 8), (8, 1))), facts) == ()
    assert [m.kind for m in compare_structure(_plan(View(2, (8, 4), (4, 1))), facts)] == ["shape"]


def test_labels_say_what_kind_of_work_a_plan_does() -> None:
    own = Launch("f", (View(2, (4, 8), (8, 1)),))
    product, other = (LibraryCall(f"aten.{name}", (), (), (2,)) for name in ("mm", "softmax"))
    assert label_of(_plan(steps=(own,))) == "kernel"
    assert label_of(_plan(steps=(product,))) == "library"
    assert label_of(_plan(steps=(other,))) == "rewrite"
    assert label_of(_plan(steps=(own, product))) == "kernel"
    assert label_of(_plan(steps=(own, product)), 0.02) == "library"
    assert label_of(_plan(steps=(own, other))) == "mixed"
    assert label_of(_plan(steps=(own, other)), 0.02) == "rewrite"
    assert label_of(_plan(steps=(own, other)), 0.95) == "kernel"
    assert label_of(LaunchPlan((), (), None)) == "rewrite"


def test_memory_errors_outrank_the_numbers_they_spoil() -> None:
    values, zone = Mismatch("out", "values", ""), Mismatch("out", "redzone", "")
    assert status_of((values, zone)) is Status.REJECTED
    assert status_of((values,)) is Status.INCORRECT_NUMERICAL
    assert status_of(()) is Status.PASSED


_VIEW = View(2, (4, 8), (8, 1))
_PAIR = {"tuple": [{"leaf": "out.0"}, {"leaf": "out.1"}]}
_TREE = {"tuple": [{"leaf": "out.0"}, {"list": [{"leaf": "out.1.0"}]}, {"dict": [[0, {"leaf": "out.2.0"}]]}]}


@pytest.mark.parametrize(
    ("outputs", "wrong"),
    [
        ((_VIEW, [_VIEW], {0: _VIEW}), ""),
        ([_VIEW, [_VIEW], {0: _VIEW}], "is a list, the reference returns a tuple"),
        ((_VIEW, (_VIEW,), {0: _VIEW}), "is a tuple, the reference returns a list"),
        ((_VIEW, [_VIEW], [_VIEW]), "is a list, the reference returns a dict"),
        ((_VIEW, [_VIEW], {"0": _VIEW}), "has the keys ['0'], the reference's are [0]"),
    ],
)
def test_answers_come_in_the_containers_of_the_reference(outputs: object, wrong: str) -> None:
    leaves = (("out.0", SPEC), ("out.1.0", SPEC), ("out.2.0", SPEC))
    workload = dataclasses.replace(WORKLOAD, outputs=leaves, output_tree=_TREE, shared=("out.1.0", "out.2.0"))
    mismatches = compare_structure(_plan(outputs), workload)
    assert [m.detail for m in mismatches] == ([wrong] if wrong else [])


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [
        (View(2, (4,), (1,)), View(2, (4,), (1,), 4), False),
        (View(2, (4,), (1,)), View(2, (4,), (1,), 3), True),
        (View(2, (4,), (1,)), View(3, (4,), (1,)), False),
        (View(2, (8,), (2,)), View(2, (8,), (2,), 1), False),  # every other element
        (View(2, (64, 100), (300, 1)), View(2, (64, 100), (300, 1), 100), False),  # parts of a packed answer
        (View(2, (64, 100), (300, 1)), View(2, (64, 100), (300, 1), 99), True),
        (View(2, (64, 100), (1, 64)), View(2, (), (), 640), True),
        (View(2, (0, 100), (100, 1)), View(2, (4,), (1,)), False),
        (View(2, (5000, 900), (900, 1)), View(2, (5000, 900), (900, 1), 1), True),
    ],
)
def test_windows_that_share_an_element(one: View, other: View, shared: bool) -> None:
    assert overlap(one, other) is shared and overlap(other, one) is shared


def test_answers_lie_apart_where_the_references_do() -> None:
    two = dataclasses.replace(WORKLOAD, outputs=(("out.0", SPEC), ("out.1", SPEC)), output_tree=_PAIR)
    (found,) = compare_structure(_plan((_VIEW, _VIEW)), two)
    assert (found.output, found.kind) == ("out.1", "structure") and "shares memory with out.0" in found.detail
    assert not compare_structure(_plan((_VIEW, _VIEW)), dataclasses.replace(two, shared=("out.1",)))
