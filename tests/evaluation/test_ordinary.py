"""What counts as next to the reference's answer, and what no other rounding explains."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import pytest

torch = pytest.importorskip("torch")

from pytest_cudaforge.evaluation.ordinary import all_near, leaning_modes, plainly_wrong  # noqa: E402
from pytest_cudaforge.records import Mismatch  # noqa: E402

Tensors = Mapping[str, torch.Tensor]
NAN, INF = float("nan"), float("inf")


def test_a_few_roundoffs_are_near_and_more_are_not() -> None:
    x = torch.tensor([1.0, -3.0, 0.0, 1e-3])
    assert all_near({"out": x * (1 + 1e-6)}, {"out": x})
    assert not all_near({"out": x * (1 + 1e-4)}, {"out": x})
    assert not all_near({"out": x + torch.tensor([0.0, 0.0, 0.1, 0.0])}, {"out": x})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_next_number_of_each_type_is_near(dtype: torch.dtype) -> None:
    x = torch.linspace(1, 2, 9, dtype=dtype)
    assert all_near({"out": x * (1 + torch.finfo(dtype).eps)}, {"out": x})
    assert not all_near({"out": x * 1.25}, {"out": x})


def test_what_is_not_finite_is_the_same_or_not_near() -> None:
    x = torch.tensor([NAN, INF, -INF, 1.0])
    assert all_near({"out": x.clone()}, {"out": x})
    assert not all_near({"out": x.nan_to_num(0.0, INF, -INF)}, {"out": x})
    assert not all_near({"out": x.neg()}, {"out": x})
    assert not all_near({"out": torch.tensor([NAN, INF, -INF, INF])}, {"out": x})


def test_integers_and_masks_are_the_same_or_not_near() -> None:
    for x in (torch.arange(5), torch.arange(5) > 2, torch.arange(5, dtype=torch.int8)):
        other = x.clone()
        other[3] = 0
        assert all_near({"out": x.clone()}, {"out": x}) and not all_near({"out": other}, {"out": x})


def test_what_is_missing_or_of_another_form_is_not_near() -> None:
    x = torch.ones(4)
    assert not all_near({}, {"out": x})
    assert not all_near({"out": torch.ones(5)}, {"out": x})
    assert not all_near({"out": x.double()}, {"out": x})
    assert all_near({"out": x, "more": x}, {"out": x, "name": "not a tensor"})
    assert all_near({"out": torch.empty(0)}, {"out": torch.empty(0)})


def _told(kind: str, ratio: float | None = None, output: str = "out") -> Mismatch:
    return Mismatch(output, kind, "is wrong", ratio, None if ratio is None else 4.0)


def _otherwise(*outputs: torch.Tensor) -> Callable[[], Iterator[Tensors]]:
    return lambda: iter([{"out": output} for output in outputs])


def test_an_error_next_to_its_bound_may_be_rounding() -> None:
    x, far = torch.ones(8), torch.full((8,), 2.0)
    never = _otherwise()
    assert plainly_wrong([_told("values", 5.0)], {"out": far}, {"out": x}, never) == []
    assert plainly_wrong([_told("bias", None)], {"out": far}, {"out": x}, never) == []
    assert len(plainly_wrong([_told("values", 400.0)], {"out": far}, {"out": x}, never)) == 1
    assert len(plainly_wrong([_told("values", NAN)], {"out": far}, {"out": x}, never)) == 1


def test_what_the_reference_may_round_either_way_is_not_wrong() -> None:
    x = torch.tensor([3, 4, 5])
    other, both = torch.tensor([3, 5, 5]), torch.tensor([4, 5, 5])
    told = [_told("integer")]
    assert plainly_wrong(told, {"out": other}, {"out": x}, _otherwise(x, other)) == []
    assert plainly_wrong(told, {"out": other}, {"out": x}, _otherwise(x, x)) == told
    assert plainly_wrong(told, {"out": both}, {"out": x}, _otherwise(x, other)) == told


def test_a_step_that_the_reference_has_beside_an_input_is_not_wrong() -> None:
    """Whether a place lies left or right of a pixel's middle, for one: no sum tells of it."""
    x, other = torch.ones(8), torch.ones(8)
    other[3] = 2.0
    told, never = [_told("values", 400.0)], _otherwise()
    stepped, moved, elsewhere = x.clone(), x + 1e-3, x.clone()
    stepped[3], elsewhere[4] = 1.9, 2.0
    assert plainly_wrong(told, {"out": other}, {"out": x}, never, beside=_otherwise(x, stepped)) == []
    for beside in (x, moved, elsewhere):
        assert plainly_wrong(told, {"out": other}, {"out": x}, never, beside=_otherwise(beside)) == told


def test_nothing_explains_what_was_written_elsewhere() -> None:
    x = torch.ones(3)
    told = [_told("mutation", output="input 0"), _told("redzone")]
    assert plainly_wrong(told, {"out": x}, {"out": x}, _otherwise(x + 1)) == told


def test_a_quotient_has_one_right_rounding_and_a_sum_has_not() -> None:
    x = torch.randn(512, generator=torch.Generator().manual_seed(1))

    def under(mode: str, work: Callable[[torch.Tensor], torch.Tensor]) -> bool:
        found = []
        for modes in leaning_modes():
            with getattr(modes, mode):
                found.append(work(x))
        return all(torch.equal(one, work(x)) for one in found)

    assert under("integers", lambda x: x / 3 * 5 - 1)
    assert not under("integers", lambda x: (x / 3).sum())
    assert not under("integers", lambda x: x.exp())
    assert not under("floats", lambda x: x / 3)
