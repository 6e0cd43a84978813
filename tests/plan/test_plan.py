"""LaunchPlan as data: specs, JSON there and back, strict decoding of untrusted data, scratch placement."""

from __future__ import annotations

import copy
import itertools
import json
import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from pytest_cudaforge import plan as plans
from pytest_cudaforge.errors import PlanError, PlanLimitError, UsageError
from pytest_cudaforge.plan import (
    Buffer,
    Launch,
    LaunchPlan,
    LibraryCall,
    TensorSpec,
    TracedPlan,
    View,
    Zero,
    contiguous_strides,
    decode,
    encode,
    scratch_layout,
    step_buffers,
)


def spec(*shape: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(shape, dtype, contiguous_strides(shape))


def whole(index: int, buffer: Buffer) -> View:
    return View(index, buffer.spec.shape, buffer.spec.strides)


BUFFERS = (
    Buffer("input", spec(4, 8), "0"),
    Buffer("state", spec(8), "layers.0.weight"),
    Buffer("prepared", spec(8, dtype="bfloat16"), "out.packed"),
    Buffer("scratch", spec(4, 8)),
    Buffer("scratch", spec(4, 8)),
)
VIEWS = tuple(whole(i, buffer) for i, buffer in enumerate(BUFFERS))
PLAN = LaunchPlan(
    BUFFERS,
    (
        Zero(3),
        Launch(
            "norm<float, (4 > 2)>",
            (VIEWS[0], View(3, (2, 4), (16, 2), 1), None, True, -3, 2.5, math.inf, -math.inf, 1e-6),
            (7, 2, 1),
            (256, 1, 1),
            1024,
            (("COLS", 8), ("EPS", 0.5)),
            (1, 2, 1),
            True,
            12,
        ),
        LibraryCall(
            "aten.cat",
            ([VIEWS[3], VIEWS[0]], 0, None, "text", (1, 2)),
            (("dtype", "float32"), ("out", VIEWS[4])),
            (4,),
            13,
        ),
        Launch("k", (VIEWS[1], VIEWS[2], VIEWS[4])),
    ),
    {"y": [VIEWS[4], (VIEWS[0], 1, None)], 3: 2.0, "s": "text", "inf": math.inf},
    ((("COLS", 8), ("EPS", 0.5)), ()),
)
PREPARE = LaunchPlan((BUFFERS[1], BUFFERS[3]), (Launch("pack", (View(0, (8,), (1,)),)),), View(1, (8,), (1,)), ((),))
TRACED = TracedPlan(PLAN, PREPARE)


# -- specs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "strides", "extent", "contiguous"),
    [
        ((4, 8), (8, 1), 32, True),
        ((4, 8), (1, 4), 32, False),
        ((4, 1, 8), (8, 99, 1), 32, True),
        ((4, 8), (0, 1), 8, False),
        ((), (), 1, True),
        ((0, 8), (8, 1), 0, True),
        ((2, 3), (10, 2), 15, False),
    ],
)
def test_extent_and_contiguity(shape: tuple[int, ...], strides: tuple[int, ...], extent: int, contiguous: bool) -> None:
    tensor = TensorSpec(shape, "float16", strides)
    assert (tensor.extent, tensor.contiguous, tensor.extent_bytes) == (extent, contiguous, extent * 2)


def test_names_outside_a_plan_explain_themselves() -> None:
    for call in (
        lambda: plans.empty((2,), "float32"),
        lambda: plans.zeros((2,), "float32"),
        lambda: plans.launch("k", args=()),
        lambda: plans.op("aten.mm"),
        lambda: plans.device.sm_count,
    ):
        with pytest.raises(UsageError, match="outside a plan"):
            call()


# -- JSON --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("traced", [TRACED, TracedPlan(PLAN), TracedPlan(LaunchPlan((), (), None))])
def test_json_there_and_back(traced: TracedPlan) -> None:
    text = json.dumps(encode(traced), allow_nan=False)
    again = decode(json.loads(text))
    assert again == traced
    assert json.dumps(encode(again)) == text


def test_nan_survives() -> None:
    traced = TracedPlan(LaunchPlan((), (Launch("k", (math.nan,)),), None))
    (launch,) = decode(json.loads(json.dumps(encode(traced)))).main.launches
    assert isinstance(launch.args[0], float) and math.isnan(launch.args[0])


def test_numbers_keep_their_types() -> None:
    traced = TracedPlan(LaunchPlan((), (Launch("k", (1, 1.0, True)),), [1, 1.0, True]))
    main = decode(json.loads(json.dumps(encode(traced)))).main
    assert [type(arg) for arg in main.launches[0].args] == [int, float, bool]
    assert [type(leaf) for leaf in main.outputs] == [int, float, bool]


def put(*path: Any, value: Any) -> Callable[[Any], None]:
    """A change of one field of the encoded plan."""

    def change(data: Any) -> None:
        for key in path[:-1]:
            data = data[key]
        data[path[-1]] = value

    return change


MAIN = ("main",)
LAUNCH = ("main", "steps", 1)
CALL = ("main", "steps", 2)
BIG = 1 << 62

DAMAGE: list[tuple[Callable[[Any], None], str]] = [
    (put("version", value=2), "plan.version is 2"),
    (put("extra", value=2), "plan is not an object with the fields"),
    (put("main", value=None), "plan.main is not an object"),
    (put(*MAIN, "buffers", value={}), "plan.main.buffers is dict"),
    (put(*MAIN, "buffers", 0, value=[1]), "buffers[0] has 1 fields"),
    (put(*MAIN, "buffers", 0, 0, value="output"), "role is 'output'"),
    (put(*MAIN, "buffers", 0, 0, value=["input"]), "role is a list"),
    (put(*MAIN, "buffers", 0, 2, value=""), "source is ''"),
    (put(*MAIN, "buffers", 3, 2, value="x"), "source is 'x' for role scratch"),
    (put(*MAIN, "buffers", 0, 2, value="x" * 20_000), "source is"),
    (put(*MAIN, "buffers", 0, 1, 0, value=[4, -8]), "spec.shape[1] is -8"),
    (put(*MAIN, "buffers", 0, 1, 0, value=[4, 8.0]), "spec.shape[1] is 8.0"),
    (put(*MAIN, "buffers", 0, 1, 0, value=[4, True]), "spec.shape[1] is True"),
    (put(*MAIN, "buffers", 0, 1, 0, value=[BIG, BIG]), "spec.shape[0] is"),
    (put(*MAIN, "buffers", 0, 1, 0, value=[1 << 30, 1 << 30]), "elements"),
    (put(*MAIN, "buffers", 0, 1, 2, value=[1 << 39, 1]), "spans"),
    (put(*MAIN, "buffers", 0, 1, 0, value=[1] * 100), "at most 32"),
    (put(*MAIN, "buffers", 0, 1, 0, value=[4]), "1 sizes and 2 strides"),
    (put(*MAIN, "buffers", 0, 1, 1, value="float31"), "dtype is 'float31'"),
    (put(*MAIN, "buffers", 0, 1, 1, value={}), "dtype is a dict"),
    (put(*MAIN, "buffers", 0, 1, 2, value=[-8, 1]), "strides[0] is -8"),
    (put(*MAIN, "steps", 0, "step", value="exec"), "step is 'exec'"),
    (put(*MAIN, "steps", 0, value=[]), "step is None"),
    (put(*MAIN, "steps", 0, "buffer", value=0), "an input"),
    (put(*MAIN, "steps", 0, "buffer", value=5), "buffer is 5"),
    (put(*MAIN, "steps", 0, "buffer", value=-1), "buffer is -1"),
    (put(*LAUNCH, "kernel", value="k; x"), "kernel is 'k; x'"),
    (put(*LAUNCH, "kernel", value=3), "kernel is 3"),
    (put(*LAUNCH, "kernel", value="k" * 5000), "kernel is"),
    (put(*LAUNCH, "args", 0, value={"view": [9, [4], [1], 0]}), "args[0].buffer is 9"),
    (put(*LAUNCH, "args", 0, value={"view": [0, [4, 9], [8, 1], 0]}), "ends at element 33 of buffer 0"),
    (put(*LAUNCH, "args", 0, value={"view": [0, [4, 8], [8, 1], 1]}), "ends at element 33"),
    (put(*LAUNCH, "args", 0, value={"view": [0, [0], [1], 33]}), "ends at element 33"),
    (put(*LAUNCH, "args", 0, value={"view": [0, [4], [-1], 3]}), "strides[0] is -1"),
    (put(*LAUNCH, "args", 0, value={"view": [0, [4], [1], -1]}), "offset is -1"),
    (put(*LAUNCH, "args", 0, value={"view": [0, [4]]}), "has 2 fields"),
    (put(*LAUNCH, "args", 0, value="text"), "args[0] is a str"),
    (put(*LAUNCH, "args", 0, value={"list": []}), "args[0] is a list"),
    (put(*LAUNCH, "args", 0, value={"pickle": "x"}), "unknown kind 'pickle'"),
    (put(*LAUNCH, "args", 0, value={"float": "1e9"}), "unknown kind 'float'"),
    (put(*LAUNCH, "args", 0, value=math.inf), "args[0] is inf"),
    (put(*LAUNCH, "args", 0, value=1 << 80), "args[0] is"),
    (put(*LAUNCH, "args", value=[None] * 2000), "2000 items"),
    (put(*LAUNCH, "grid", value=[0, 1, 1]), "grid[0] is 0"),
    (put(*LAUNCH, "grid", value=[1, 1]), "grid has 2 sizes"),
    (put(*LAUNCH, "block", value=[1, 1, BIG]), "block[2] is"),
    (put(*LAUNCH, "shared_bytes", value=-1), "shared_bytes is -1"),
    (put(*LAUNCH, "cluster", value=3), "cluster is int"),
    (put(*LAUNCH, "cooperative", value=1), "cooperative is 1"),
    (put(*LAUNCH, "line", value="x"), "line is 'x'"),
    (put(*LAUNCH, "constants", value=[["2cols", 1]]), "constants[0] is '2cols'"),
    (put(*LAUNCH, "constants", value=[["A", 1], ["A", 2]]), "names 'A' twice"),
    (put(*LAUNCH, "constants", value=[["A", "x"]]), "constants.A is a str"),
    (put(*LAUNCH, "constants", value=[["A", True]]), "constants.A is a bool"),
    (put(*LAUNCH, "constants", value=[["A"]]), "expected: [name, value]"),
    (put(*LAUNCH, "new", value=1), "not an object with the fields"),
    (put(*CALL, "op", value="os.system('x')"), "op is"),
    (put(*CALL, "op", value="a.b.c.d"), "op is 'a.b.c.d'"),
    (put(*CALL, "args", value={"list": []}), "args is a list"),
    (put(*CALL, "outputs", value=[0]), "outputs[0] is buffer 0, an input"),
    (put(*CALL, "outputs", value=[True]), "outputs[0] is True"),
    (put(*CALL, "kwargs", value=[["a b", 1]]), "kwargs[0] is 'a b'"),
    (put(*MAIN, "outputs", value={"view": [7, [], [], 0]}), "outputs.buffer is 7"),
    (put(*MAIN, "outputs", value={"dict": [["a", 1], ["a", 2]]}), "fresh string or integer key"),
    (put(*MAIN, "outputs", value={"dict": [[None, 1]]}), "fresh string or integer key"),
    (put(*MAIN, "outputs", value={"dict": [1]}), "outputs[0] is int"),
    (put(*MAIN, "outputs", value=[1]), "outputs is a list"),
    (put("prepare", "buffers", 0, 0, value="input"), "role is 'input'"),
]


@pytest.mark.parametrize(("change", "message"), DAMAGE, ids=[message[:60] for _, message in DAMAGE])
def test_damaged_data_is_refused_by_name(change: Callable[[Any], None], message: str) -> None:
    data = json.loads(json.dumps(encode(TRACED)))
    change(data)
    with pytest.raises(PlanError) as caught:
        decode(data)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("data", [None, 3, "x", [], [[]], {}, {"version": 1}])
def test_no_plan_at_all(data: Any) -> None:
    with pytest.raises(PlanError, match="plan is not an object"):
        decode(data)


def test_counts_are_capped() -> None:
    data = json.loads(json.dumps(encode(TracedPlan(PLAN))))
    launch = data["main"]["steps"][3]
    data["main"]["steps"] = [launch] * 4097
    with pytest.raises(PlanLimitError, match="more than 4096 launches"):
        decode(data)
    data["main"]["steps"] = [launch] * 100_000
    with pytest.raises(PlanLimitError, match="100000 items"):
        decode(data)


def test_deep_and_wide_trees_are_capped() -> None:
    data = json.loads(json.dumps(encode(TracedPlan(PLAN))))
    deep: Any = 1
    for _ in range(100):
        deep = {"list": [deep]}
    data["main"]["outputs"] = deep
    with pytest.raises(PlanLimitError, match="too many nested values"):
        decode(data)
    wide: Any = {"list": [{"list": [{"list": [1] * 100}] * 100}] * 100}
    data["main"]["outputs"] = wide
    with pytest.raises(PlanLimitError, match="too many nested values"):
        decode(data)


def test_random_damage_never_escapes_as_another_error() -> None:
    generator = random.Random(7)
    junk = [
        None,
        True,
        -1,
        0,
        1 << 70,
        1.5,
        math.nan,
        "",
        "x",
        [],
        {},
        {"view": []},
        {"list": [{"view": 3}]},
        [[]],
        "scratch",
    ]
    refused = 0
    for _ in range(1500):
        data = copy.deepcopy(json.loads(json.dumps(encode(TRACED))))
        place, path = data, []
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = generator.choice(keys)
            path.append(key)
            if not isinstance(place[key], (dict, list)) or generator.random() < 0.15:
                place[key] = generator.choice(junk)
                break
            place = place[key]
        try:
            decode(data)
        except PlanError:
            refused += 1
    assert refused > 1000


# -- scratch -----------------------------------------------------------------------------------------------------


def chain(count: int, sizes: list[int] | None = None) -> LaunchPlan:
    """Buffer i+1 computed from buffer i; the last is the output."""
    sizes = sizes or [100] * (count + 1)
    buffers = (Buffer("input", spec(sizes[0]), "0"), *(Buffer("scratch", spec(size)) for size in sizes[1:]))
    steps = tuple(Launch("k", (whole(i, buffers[i]), whole(i + 1, buffers[i + 1]))) for i in range(count))
    return LaunchPlan(buffers, steps, whole(count, buffers[count]))


def test_a_chain_needs_two_places() -> None:
    layout = scratch_layout(chain(6))
    assert layout.total_bytes == 2 * 512
    assert set(layout.offsets) == {1, 2, 3, 4, 5}


def test_outputs_have_no_place_in_the_arena() -> None:
    plan = chain(3)
    assert plan.output_buffers == {3}
    assert 3 not in scratch_layout(plan).offsets


def test_unused_scratch_has_an_offset_and_no_room() -> None:
    plan = LaunchPlan((Buffer("scratch", spec(100)),), (), None)
    assert scratch_layout(plan) == plans.ScratchLayout(0, {0: 0})


@pytest.mark.parametrize("seed", range(20))
def test_living_buffers_never_overlap(seed: int) -> None:
    generator = random.Random(seed)
    count = generator.randint(1, 40)
    buffers = [Buffer("scratch", spec(generator.choice([0, 1, 63, 64, 65, 1000, 5000]))) for _ in range(count)]
    steps: list[plans.Step] = []
    for _ in range(60):
        picked = generator.sample(range(count), min(count, generator.randint(1, 4)))
        steps.append(
            Launch("k", tuple(whole(i, buffers[i]) for i in picked)) if generator.random() < 0.8 else Zero(picked[0])
        )
    plan = LaunchPlan(tuple(buffers), tuple(steps), [whole(0, buffers[0])])
    layout = scratch_layout(plan)
    for position in range(len(steps)):
        lives = [
            (layout.offsets[i], layout.offsets[i] + buffers[i].spec.extent_bytes)
            for i in range(1, count)
            if any(i in step_buffers(s) for s in steps[: position + 1])
            and any(i in step_buffers(s) for s in steps[position:])
        ]
        lives.sort()
        for (_, end), (begin, _) in itertools.pairwise(lives):
            assert end <= begin
        assert all(end <= layout.total_bytes and begin % 256 == 0 for begin, end in lives)


def test_four_thousand_launches_are_placed_quickly() -> None:
    import time

    plan = chain(4000)
    begin = time.process_time()
    layout = scratch_layout(plan)
    assert time.process_time() - begin < 2
    assert layout.total_bytes == 1024


def test_library_arguments_count_as_uses() -> None:
    assert step_buffers(PLAN.steps[2]) == (3, 0, 4, 4)


def test_what_an_aten_call_may_write() -> None:
    values = LibraryCall("aten.topk", (VIEWS[0], 3), (("values", VIEWS[3]), ("indices", VIEWS[4])), ())
    assert plans.call_writes(values) == {3, 4}
    assert plans.call_writes(LibraryCall("aten.mm", (VIEWS[0], VIEWS[0]), (("other", VIEWS[1]),), (4,))) == {4}


def test_a_plan_error_says_its_place_once() -> None:
    first = PlanError("no", line=3, expected="yes")
    again = PlanError(first.what, line=first.line, expected=first.expected)
    assert str(again) == str(first) == "plan.py:3: no\n  expected: yes"
    assert str(PlanError("no")) == "no"
