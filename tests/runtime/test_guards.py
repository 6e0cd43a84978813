"""Which calls an entry's kernel may serve; pure, no torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pytest_cudaforge.plan import TensorSpec
from pytest_cudaforge.records import Guard
from pytest_cudaforge.runtime.guards import named_paths, parameter_names, refusal, was_drawn
from pytest_cudaforge.runtime.manifest import Entry, EntryWorkload

DRAWN = TensorSpec((4, 8), "float32", (8, 1))
MASK = TensorSpec((4,), "bool", (1,))
NAMES = ("x", "mask")
INPUTS = (("0", DRAWN), ("1", MASK))


def entry(*workloads: Any, guard: Guard | None = None, mode: str = "eval", arch: str = "cpu") -> Entry:
    return Entry(
        target="layers.py::T",
        import_name="layers",
        qualname="T",
        kind="class",
        path="layers.py",
        source_digest="",
        language="cpp" if arch == "cpu" else "cuda",
        arch=arch,
        directory="t-000000/cpu",
        files=(),
        guard=guard or Guard(),
        workloads=tuple(EntryWorkload(f"w{i}", inputs) for i, inputs in enumerate(workloads)),
        torch="2",
        device="",
        precision="fp32",
        mode=mode,
    )


def spec(*shape: int, dtype: str = "float32", strides: tuple[int, ...] | None = None) -> TensorSpec:
    contiguous = (shape[1], 1) if len(shape) == 2 else (1,)
    return TensorSpec(shape, dtype, strides or contiguous)


def test_the_drawn_call_is_served() -> None:
    assert refusal(entry(INPUTS), INPUTS, NAMES, False) == ""
    assert was_drawn(entry(INPUTS), INPUTS, NAMES)


def test_a_name_and_a_position_are_the_same_argument() -> None:
    by_name = (("0", DRAWN), ("kw.mask", MASK))
    assert named_paths(by_name, NAMES) == named_paths(INPUTS, NAMES)
    assert refusal(entry(INPUTS), by_name, NAMES, False) == ""


def test_nested_paths_keep_their_tail() -> None:
    assert named_paths((("1.a.0", DRAWN), ("kw.x.b", DRAWN)), NAMES) == {"mask.a.0": DRAWN, "x.b": DRAWN}


def test_more_positions_than_names_stay_positions() -> None:
    assert named_paths((("5", DRAWN),), NAMES) == {"5": DRAWN}


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ((("0", DRAWN),), "called with (x), verified with (x, mask)"),
        ((("0", spec(4, 8, dtype="float16")), ("1", MASK)), "x is float16, verified with float32"),
        ((("0", TensorSpec((8,), "float32", (1,))), ("1", MASK)), "x has 1 dimensions, verified with 2"),
        ((("0", 3), ("1", MASK)), "x is 3, verified with a float32 tensor"),
        ((("0", DRAWN), ("1", None)), "mask is None, verified with a bool tensor"),
    ],
)
def test_what_was_not_verified_is_refused(inputs: Any, reason: str) -> None:
    assert refusal(entry(INPUTS), inputs, NAMES, False) == reason
    assert not was_drawn(entry(INPUTS), inputs, NAMES)


@pytest.mark.parametrize(("now", "served"), [(2.0, True), (2, False), (True, False), (2.5, False), (None, False)])
def test_numbers_are_served_as_drawn_with_their_type(now: Any, served: bool) -> None:
    drawn = (("0", DRAWN), ("1", 2.0))
    assert (refusal(entry(drawn), (("0", DRAWN), ("1", now)), NAMES, False) == "") is served


def test_any_workload_will_do() -> None:
    both = entry(INPUTS, (("0", spec(4, 8, dtype="float16")), ("1", MASK)))
    assert refusal(both, (("0", spec(2, 8, dtype="float16")), ("1", MASK)), NAMES, False) == ""


def test_neighbouring_shapes_are_served_unless_the_guard_says_otherwise() -> None:
    call = (("0", spec(5, 8)), ("1", MASK))
    assert refusal(entry(INPUTS), call, NAMES, False) == ""
    narrow = entry(INPUTS, guard=Guard(drawn_shapes_only=True))
    assert refusal(narrow, call, NAMES, False) == "x has shape (5, 8), verified for (4, 8) only"
    assert refusal(narrow, INPUTS, NAMES, False) == ""


def test_sizes_that_were_equal_stay_equal_where_the_guard_says_so() -> None:
    drawn = (("0", spec(24, 16)), ("1", spec(24, 16)))
    narrow = entry(drawn, guard=Guard(equal_sizes_only=True))
    for first, second, reason in (
        ((30, 8), (30, 8), ""),
        ((30, 30), (30, 30), ""),
        ((30, 16), (24, 16), "mask has 24 in dimension 0 and x[0] is 30, verified where they are equal only"),
        ((24, 16), (24, 15), "mask has 15 in dimension 1 and x[1] is 16, verified where they are equal only"),
    ):
        call = (("0", spec(*first)), ("1", spec(*second)))
        assert refusal(narrow, call, NAMES, False) == reason
        assert refusal(entry(drawn), call, NAMES, False) == ""


def test_strides_under_a_contiguous_guard() -> None:
    narrow = Guard(contiguous_only=True)
    transposed = spec(4, 8, strides=(1, 4))
    assert refusal(entry(INPUTS), (("0", transposed), ("1", MASK)), NAMES, False) == ""
    assert refusal(entry(INPUTS, guard=narrow), (("0", transposed), ("1", MASK)), NAMES, False) == "x is not contiguous"
    drawn_so = (("0", transposed), ("1", MASK))
    assert refusal(entry(drawn_so, guard=narrow), drawn_so, NAMES, False) == ""


def test_nothing_is_served_that_no_probe_was_as_large_as_or_that_is_empty() -> None:
    large = (1 << 20, 1 << 12)
    for shape, reason in ((large, "x has 4294967296 elements, more than any number"), ((0, 8), "x is empty")):
        call = (("0", spec(*shape)), ("1", MASK))
        assert refusal(entry(INPUTS), call, NAMES, False).startswith(reason)
        assert refusal(entry(call), call, NAMES, False) == ""
    for arch, rows in (("cpu", 3 << 16), ("sm_90", 1 << 19)):  # of 256 elements each
        one = entry(INPUTS, arch=arch)
        assert refusal(one, (("0", spec(rows, 256)), ("1", MASK)), NAMES, False) == ""
        assert "more than any" in refusal(one, (("0", spec(rows + 1, 256)), ("1", MASK)), NAMES, False)


def test_nothing_is_served_that_reaches_further_than_any_probe() -> None:
    for stride, reason in ((1 << 23, ""), (1 << 24, "x reaches over 4227858464 bytes, further than any that")):
        far = (("0", spec(64, 8, strides=(stride, 1))), ("1", MASK))
        found = refusal(entry(INPUTS), far, NAMES, False)
        assert found.startswith(reason) and bool(found) is bool(reason), found
        assert refusal(entry(far), far, NAMES, False) == ""


@pytest.mark.parametrize("strides", [(0, 1), (1, 0), (1, 1), (4, 1)])
def test_elements_that_share_memory_unless_they_were_drawn_so(strides: tuple[int, ...]) -> None:
    shared = (("0", spec(4, 8, strides=strides)), ("1", MASK))
    assert refusal(entry(INPUTS), shared, NAMES, False) == "x has elements that share memory"
    assert refusal(entry(shared), shared, NAMES, False) == ""


@pytest.mark.parametrize(("shape", "strides"), [((4, 8), (16, 2)), ((4, 1), (1, 0)), ((4, 8), (1, 9))])
def test_elements_apart_share_no_memory(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    assert refusal(entry(INPUTS), (("0", spec(*shape, strides=strides)), ("1", MASK)), NAMES, False) == ""


def test_modes() -> None:
    assert refusal(entry(INPUTS), INPUTS, NAMES, True) == "verified in eval mode, the module is in train mode"
    assert refusal(entry(INPUTS, mode="train"), INPUTS, NAMES, True) == ""
    assert "eval mode" in refusal(entry(INPUTS, mode="train"), INPUTS, NAMES, False)
    assert refusal(entry(INPUTS, mode="train"), INPUTS, NAMES, None) == ""


def test_an_entry_without_workloads_serves_nothing() -> None:
    assert refusal(entry(), INPUTS, NAMES, False) == "no workload was verified"


def test_parameter_names() -> None:
    def method(self: Any, x: Any, /, mask: Any = None, *rest: Any, scale: float = 1.0, **more: Any) -> None: ...

    assert parameter_names(method, method=True) == ("x", "mask")
    assert parameter_names(method, method=False) == ("self", "x", "mask")
    assert parameter_names(print, method=False) == () or "sep" not in parameter_names(print, method=False)


@pytest.mark.parametrize(
    ("path", "then", "reason"),
    [
        ("eps", 1e-5, ""),
        ("eps", 1e-6, "verified with eps = 1e-06, this module has 1e-05"),
        ("norm.shape", {"tuple": [8, 2]}, ""),
        ("norm.shape", {"tuple": [8, 3]}, "verified with norm.shape = (8, 3), this module has (8, 2)"),
        ("norm.top", {"float": "inf"}, ""),
        ("norm.top", 1.0, "verified with norm.top = 1.0, this module has inf"),
        ("norm.gone", True, "verified with norm.gone = True, which this module does not have"),
        ("other.eps", 1, "verified with other.eps = 1, which this module does not have"),
        ("norm.weight", 1, "verified with norm.weight = 1, which this module does not have"),
    ],
)
def test_values_that_may_be_built_in(path: str, then: Any, reason: str) -> None:
    inner = {
        "shape": {"tuple": [8, 2]},
        "top": {"float": "inf"},
        "weight": {"tensor": [[8], "float32", [1]], "path": "w"},
    }
    module = {"attributes": {"eps": 1e-5, "norm": {"module": {"attributes": inner}}}}
    held = replace(entry(INPUTS), attributes=((path, then),))
    assert refusal(held, INPUTS, NAMES, False, lambda: module) == reason
    assert refusal(held, INPUTS, NAMES, None) == ""  # a function has none
