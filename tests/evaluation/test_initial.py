"""Init arguments as another layer of a network has them."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from pytest_cudaforge.evaluation.initial import decode_init, encode_init, other_settings  # noqa: E402


def _layer(dim: int, heads: list[int], *more: float, cap: float = 8.0, bias: bool = True, dtype: Any = None) -> None:
    pass


def test_numbers_are_others_and_nothing_else_is() -> None:
    kwargs = {"dtype": torch.float16, "bias": True}
    (both, named), (fractions, _), (_, chosen) = other_settings(_layer, (16, [2, 4], 0.5), kwargs)
    assert both == (32, [4, 8], 0.0625) and named == {"cap": 1.0, "bias": True, "dtype": torch.float16}
    assert fractions == (16, [2, 4], 0.0625)
    assert chosen == {"cap": 8.0, "bias": False, "dtype": torch.float16}
    assert [args for args, _ in other_settings(_layer, (16, [2, 4]), kwargs, whole=False)] == [(16, [2, 4])] * 2


def test_small_settings_change_alone_as_well_as_together() -> None:
    given = ({"theta": 8.0, "scaling": {"factor": 4.0, "kind": "linear"}}, True)
    found = [args for args, _ in other_settings(lambda config, flag: None, given, {}, whole=False, alone=True)]
    scaled = {"factor": 0.5, "kind": "linear"}
    assert found == [
        ({"theta": 1.0, "scaling": scaled}, True),
        ({"theta": 8.0, "scaling": {"factor": 4.0, "kind": "linear"}}, False),
        ({"theta": 1.0, "scaling": {"factor": 4.0, "kind": "linear"}}, True),
        ({"theta": 8.0, "scaling": scaled}, True),
    ]


def test_without_numbers_there_are_other_choices_or_none() -> None:
    assert other_settings(lambda name, flag=True: None, ("relu",), {}) == [(("relu", False), {})]
    assert other_settings(lambda name: None, ("relu",), {}) == []


def test_arguments_that_do_not_fit_are_an_error() -> None:
    with pytest.raises(TypeError, match="heads"):
        other_settings(_layer, (16,), {})


def test_plain_data_comes_back_as_it_was() -> None:
    args, kwargs = (
        (1, 0.5, (2, [3, None])),
        {"dtype": torch.bfloat16, "device": torch.device("cpu"), "deep": {"a": "b"}},
    )
    assert decode_init(encode_init(args, kwargs)) == (args, kwargs)
