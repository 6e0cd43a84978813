"""The decorator marks and does nothing else."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

from pytest_cudaforge import forge_target
from pytest_cudaforge.errors import UsageError
from pytest_cudaforge.target import MARK, TargetOptions, file_options, options_of


def draw() -> list[torch.Tensor]:
    return [torch.ones(3)]


class Plain(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


@forge_target(inputs=draw)
class Marked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + 1


@forge_target
class Bare(nn.Module): ...


class Derived(Marked): ...


def test_returns_the_same_object() -> None:
    assert forge_target(inputs=draw)(Plain) is Plain
    assert forge_target(Plain) is Plain


def test_with_and_without_parentheses() -> None:
    assert options_of(Bare) == TargetOptions()
    options = options_of(Marked)
    assert options is not None and options.inputs is draw


def test_subclass_instance_and_others_are_no_targets() -> None:
    assert options_of(Derived) is None
    assert options_of(Marked()) is None
    assert options_of(3) is None


def test_marks_a_function() -> None:
    @forge_target(inputs=draw, name="twice")
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    options = options_of(double)
    assert options is not None and options.name == "twice" and double(torch.ones(1)).item() == 2


def test_module_pickles_copies_and_keeps_its_state_dict() -> None:
    module = Marked()
    again = pickle.loads(pickle.dumps(module))
    assert type(again) is Marked and torch.equal(again(torch.ones(3)), module(torch.ones(3)))
    assert type(copy.deepcopy(module)) is Marked
    assert list(module.state_dict()) == ["weight"]


def test_torch_compile_sees_one_graph() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(Marked(), backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))


def test_input_sets_put_default_first() -> None:
    assert list(TargetOptions(inputs=draw, workloads={"a": draw}).input_sets) == ["default", "a"]
    assert list(TargetOptions(workloads={"a": draw}).input_sets) == ["a"]
    assert TargetOptions().input_sets == {}


def test_file_options_take_what_the_mark_left_out() -> None:
    namespace = {"get_inputs": draw, "get_init_inputs": list}
    found = file_options(TargetOptions(), namespace)
    assert found.inputs is draw and found.init is list and found.precision == "fp32"
    assert file_options(None, namespace).precision == "default"
    own = TargetOptions(inputs=list)
    assert file_options(own, namespace) is own
    assert file_options(TargetOptions(), {}).input_sets == {}


def test_values_are_normalised() -> None:
    marked = forge_target(languages="cpp", allow=["kernel", "mixed"], min_speedup=2, index_outputs="out.1")(Plain)
    options = options_of(marked)
    assert options is not None
    assert (options.languages, options.allow) == (("cpp",), ("kernel", "mixed"))
    assert (options.min_speedup, options.index_outputs) == (2.0, ("out.1",))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inputs": [1]}, "inputs= is a list, not a function"),
        ({"init": 4096}, "write init=lambda: [...]"),
        ({"input": draw}, "did you mean 'inputs'?"),
        ({"colour": 1}, "unknown option 'colour'"),
        ({"workloads": [draw]}, "a dict of workload name -> function"),
        ({"workloads": {"a": 3}}, "workloads['a']= is a int"),
        ({"workloads": {"a": None}}, "workloads['a']=None is not valid"),
        ({"workloads": {"": draw}}, "non-empty strings"),
        ({"precision": "fp12"}, "one of 'fp32', 'tf32'"),
        ({"atol": -1}, "a finite number of at least 0"),
        ({"rtol": "tight"}, "rtol='tight' is not valid"),
        ({"min_speedup": float("nan")}, "min_speedup=nan"),
        ({"atol": True}, "atol=True"),
        ({"languages": [1]}, "languages=[1] is not valid"),
        ({"allow": "everything"}, "kernel, mixed, library, rewrite"),
        ({"strides": "some"}, "one of 'drawn', 'any'"),
        ({"distributions": "none"}, "one of 'all', 'drawn'"),
        ({"mode": "test"}, "one of 'eval', 'train'"),
        ({"grad": 1}, "True or False"),
        ({"name": ""}, "at least one letter or digit"),
    ],
)
def test_bad_options_are_refused_at_the_decoration(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        forge_target(**options)  # type: ignore[call-overload]
    assert message in str(caught.value)


def test_a_lambda_by_position_is_refused() -> None:
    with pytest.raises(UsageError, match="by position"):
        forge_target(lambda: [1])


@pytest.mark.parametrize("thing", [3, "text", (1, 2), object()])
def test_marking_what_takes_no_attribute_never_breaks_an_import(thing: object) -> None:
    assert forge_target(inputs=draw)(thing) is thing


def test_import_is_light() -> None:
    code = (
        "import sys, pytest_cudaforge\n"
        "from pytest_cudaforge import forge_target\n"
        "forge_target(inputs=list)(type('T', (), {}))\n"
        "print([name for name in ('torch', 'pytest', 'openai', 'yaml', 'rich', 'asyncio') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_mark_is_one_attribute() -> None:
    before = set(vars(Derived))
    forge_target(Derived)
    assert set(vars(Derived)) - before == {MARK}
    delattr(Derived, MARK)
