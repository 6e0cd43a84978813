"""Calls, outputs, modules and signatures as data."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import math
import subprocess
import sys
import types
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from pytest_cudaforge.errors import PlanError, TargetError, UsageError
from pytest_cudaforge.plan import TensorSpec
from pytest_cudaforge.records import DeviceFacts
from pytest_cudaforge.runtime.signature import (
    Signature,
    describe_module,
    flatten_call,
    flatten_output,
    module_tensors,
    spec_of,
    split_call,
    split_init,
    unflatten_call,
    unflatten_output,
)

CPU = DeviceFacts("cpu", "a CPU", "cpu", memory_bytes=1 << 33)
X = torch.arange(6.0).reshape(2, 3)


# -- calls -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "args", "kwargs"),
    [
        ([1, 2], (1, 2), {}),
        ((1, 2), (1, 2), {}),
        ({"x": 1}, (), {"x": 1}),
        (([1], {"mask": 2}), (1,), {"mask": 2}),
        (((1, 2), {}), (1, 2), {}),
        ([[1], {"mask": 2}], ([1], {"mask": 2}), {}),
        (([1], {3: 2}), ([1], {3: 2}), {}),
        (7, (7,), {}),
        ([], (), {}),
        ({}, (), {}),
    ],
)
def test_what_an_inputs_function_returns(given: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    assert split_call(given) == (args, kwargs)


def test_a_single_tensor_is_one_positional() -> None:
    args, kwargs = split_call(X)
    assert args[0] is X and not kwargs


def test_init_none_is_nothing() -> None:
    assert split_init(None) == ((), {})
    assert split_init(([4], {"eps": 1e-6})) == ((4,), {"eps": 1e-6})


def test_keyword_names_must_be_names() -> None:
    with pytest.raises(TargetError, match="keyword argument named 'a b'"):
        split_call({"a b": 1})


def test_paths_of_leaves() -> None:
    args = (X, {"mask": None, "deep": [1, (X, "s")]})
    leaves, tree = flatten_call(args, {"scale": 0.5, "extra": [True]})
    assert list(leaves) == ["0", "1.mask", "1.deep.0", "1.deep.1.0", "1.deep.1.1", "kw.scale", "kw.extra.0"]
    again = unflatten_call(json.loads(json.dumps(tree)), leaves)
    assert again[0][0] is X and again[0][1]["deep"][1] == (X, "s") and again[1] == {"scale": 0.5, "extra": [True]}
    assert isinstance(again[0][1]["deep"][1], tuple)


def test_paths_of_outputs() -> None:
    assert list(flatten_output(X)[0]) == ["out"]
    assert list(flatten_output((X, X))[0]) == ["out.0", "out.1"]
    leaves, tree = flatten_output({"logits": X, "aux": [None, 3]})
    assert list(leaves) == ["out.logits", "out.aux.0", "out.aux.1"]
    assert unflatten_output(tree, leaves)["aux"] == [None, 3]


def test_named_containers_are_marked() -> None:
    _, tree = flatten_output(torch.topk(torch.randn(4), 2))
    assert tree["type"] == "torch.return_types.topk" and "tuple" in tree
    _, tree = flatten_output(collections.OrderedDict(a=1))
    assert tree["type"] == "collections.OrderedDict"
    assert "type" not in flatten_output((1,))[1]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), "out: a builtins.object"),
        ([1, {"a": {2, 3}}], "out.1.a: a builtins.set"),
        (1j, "out: a builtins.complex"),
        ({(1, 2): 3}, r"out: a dict with the key \(1, 2\)"),
        ({1: 2, "1": 3}, "two leaves have the path out.1"),
        ({"a.b": 2, "a": {"b": 3}}, "two leaves have the path out.a.b"),
    ],
)
def test_leaves_no_plan_can_take(value: Any, message: str) -> None:
    with pytest.raises(TargetError, match=message):
        flatten_output(value)


def test_endless_nests_are_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(TargetError, match="nested deeper than 32"):
        flatten_output(value)


# -- tensors and modules -----------------------------------------------------------------------------------------


def test_spec_of_a_view() -> None:
    assert spec_of(X.t()[1:]) == TensorSpec((2, 2), "float32", (1, 3))
    assert spec_of(torch.tensor(3)) == TensorSpec((), "int64", ())
    assert spec_of(torch.empty(2, dtype=torch.float8_e4m3fn)).dtype == "float8_e4m3fn"


def test_spec_of_sparse_or_exotic() -> None:
    with pytest.raises(UsageError, match="sparse"):
        spec_of(X.to_sparse())
    with pytest.raises(UsageError, match=r"torch.uint16[\s\S]*expected: a dense tensor"):
        spec_of(torch.zeros(2, dtype=torch.uint16))


def test_memory_that_is_not_the_value() -> None:
    with pytest.raises(UsageError, match="lazily conjugated"):
        spec_of(torch.zeros(2, dtype=torch.complex64).conj())
    assert describe_module(nn.LazyLinear(3))["attributes"]["weight"] == {"opaque": "uninitialized tensor"}


class Block(nn.Module):
    alpha = 0.25
    names = ("a", "b")
    _hidden = 1

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 2)
        self.norm = nn.LayerNorm(2, elementwise_affine=False)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("steps", torch.tensor(3), persistent=False)
        self.register_parameter("absent", None)
        self.layers = nn.ModuleList([nn.Linear(2, 2, bias=False)])
        self.table = {"k": torch.ones(2), 1: [1.5, None]}
        self.limit = -math.inf
        self.act = torch.relu
        self.kind = torch.bfloat16
        self._secret = torch.ones(1)
        self.me = [self]
        self.huge = list(range(10_000))

    @property
    def computed(self) -> int:
        raise AssertionError("properties are not run")


def test_a_module_as_data() -> None:
    module = Block()
    spec = describe_module(module)
    assert json.loads(json.dumps(spec, allow_nan=False)) == spec
    attributes = spec["attributes"]
    assert spec["class"] == "Block" and attributes["training"] is True
    assert attributes["scale"] == {"tensor": [[], "float32", []], "path": "scale"}
    assert attributes["steps"] == {"tensor": [[], "int64", []], "path": "steps"}
    assert attributes["absent"] is None
    assert attributes["lin"]["module"]["attributes"]["weight"]["path"] == "lin.weight"
    assert attributes["norm"]["module"]["attributes"]["weight"] is None
    assert attributes["layers"]["module"]["items"] == ["0"]
    assert attributes["table"]["dict"][1] == [1, {"list": [1.5, None]}]
    assert attributes["limit"] == {"float": "-inf"}
    assert attributes["kind"] == {"dtype": "bfloat16"}
    assert attributes["me"] == {"list": [{"opaque": "cycle"}]}
    assert attributes["huge"] == {"opaque": "list"} and "opaque" in attributes["act"]
    assert (attributes["alpha"], attributes["names"]) == (0.25, {"tuple": ["a", "b"]})
    assert not {"_secret", "_hidden", "computed", "dump_patches"} & set(attributes)


def test_module_tensors_have_the_same_paths() -> None:
    module = Block()
    tensors = module_tensors(module)
    assert list(tensors) == ["scale", "steps", "lin.weight", "lin.bias", "layers.0.weight", "table.k"]
    assert tensors["lin.weight"] is module.lin.weight and tensors["table.k"] is module.table["k"]


@dataclasses.dataclass
class Config:
    heads: int = 4
    bias: bool = True
    kind: torch.dtype = torch.float16
    owner: Any = None
    _cache: int = 3


def test_configuration_objects_are_mirrored() -> None:
    module = nn.Module()
    module.config = Config()
    module.config.owner = module.config
    module.options = argparse.Namespace(eps=1e-5, sizes=(3, 4), inner=types.SimpleNamespace(name="x"))
    module.trainer = subprocess.Popen
    module.other = object()
    attributes = describe_module(module)["attributes"]
    assert attributes["config"]["module"] == {
        "class": "Config",
        "attributes": {"heads": 4, "bias": True, "kind": {"dtype": "float16"}, "owner": {"opaque": "Config"}},
    }
    assert attributes["options"]["module"]["attributes"]["sizes"] == {"tuple": [3, 4]}
    assert attributes["options"]["module"]["attributes"]["inner"]["module"]["attributes"] == {"name": "x"}
    assert attributes["trainer"] == {"opaque": "type"} and attributes["other"] == {"opaque": "object"}


def test_a_changed_configuration_is_another_signature_and_ends_a_plan() -> None:
    from pytest_cudaforge.runtime.circumstances import survey

    module = nn.Module()
    module.config = Config()
    module.nested = [[X, Config()], {"k": (X, 1)}]
    before, circumstances = signature(X, module=module).key(), survey(module)
    own = vars(module)
    assert circumstances.hold(torch.device("cpu"), own)
    assert {slot.path for slot in circumstances.slots} == set(module_tensors(module)) == {"nested.0.0", "nested.1.k.0"}
    for config in (module.config, module.nested[0][1]):
        config.heads = 8
        assert signature(X, module=module).key() != before
        assert not circumstances.hold(torch.device("cpu"), own)
        config.heads = 4
        assert circumstances.hold(torch.device("cpu"), own) and signature(X, module=module).key() == before


def test_class_of_torch_adds_no_constants() -> None:
    assert set(describe_module(nn.ReLU())["attributes"]) == {"training", "inplace"}


def test_parameter_containers() -> None:
    listed = nn.ParameterList([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(()))])
    assert describe_module(listed)["items"] == ["0", "1"] and list(module_tensors(listed)) == ["0", "1"]
    keyed = nn.ParameterDict({"a": nn.Parameter(torch.ones(2))})
    assert describe_module(keyed)["keys"] == ["a"] and list(module_tensors(keyed)) == ["a"]


# -- signatures --------------------------------------------------------------------------------------------------


def signature(*args: Any, module: nn.Module | None = None, device: DeviceFacts = CPU, **kwargs: Any) -> Signature:
    return Signature.of(args, kwargs, None if module is None else describe_module(module), device, "cpp")


def test_signature_there_and_back() -> None:
    first = signature(X, [1, 1.0, True, None, "s", math.inf], scale=-math.inf, module=Block())
    data = json.loads(json.dumps(first.to_json(), allow_nan=False))
    again = Signature.from_json(data)
    assert again == first and again.key() == first.key()
    assert [type(leaf) for _, leaf in again.inputs[1:5]] == [int, float, bool, type(None)]


def test_what_changes_the_key() -> None:
    base = signature(X, 1).key()
    assert signature(X.clone(), 1).key() == base
    different = [
        signature(X, 1.0),
        signature(X, True),
        signature(X, 2),
        signature(X.t(), 1),
        signature(X.double(), 1),
        signature([X], 1),
        signature(X, y=1),
        signature(X, 1, module=nn.Identity()),
        signature(X, 1, device=DeviceFacts("cuda", "x", "sm_90")),
    ]
    keys = {each.key() for each in different}
    assert len(keys) == len(different) and base not in keys


def test_the_devices_place_does_not_change_the_key() -> None:
    other = DeviceFacts("cpu", "another name", "cpu", index=3, uuid="u", memory_bytes=1 << 33, clock_mhz=5)
    assert signature(X, device=other).key() == signature(X).key()


def test_same_weights_other_values_same_key() -> None:
    assert signature(X, module=nn.Linear(3, 2)).key() == signature(X, module=nn.Linear(3, 2)).key()
    assert signature(X, module=nn.Linear(3, 2)).key() != signature(X, module=nn.Linear(3, 2).eval()).key()


@pytest.mark.parametrize("data", [None, {}, {"inputs": 3}, {"inputs": [["0", {}]]}, [1]])
def test_no_signature(data: Any) -> None:
    with pytest.raises(PlanError, match="this is no signature"):
        Signature.from_json(data)


def test_tracing_loads_no_torch() -> None:
    text = """
import sys
from pytest_cudaforge.plan import TensorSpec
from pytest_cudaforge.records import DeviceFacts
from pytest_cudaforge.runtime.signature import Signature
from pytest_cudaforge.runtime.trace import trace
signature = Signature.of((TensorSpec((2, 3), "float32", (3, 1)),), {}, None, DeviceFacts("cpu", "c", "cpu"), "cpp")
source = '''
from pytest_cudaforge.plan import empty, launch
def plan(x):
    y = empty(x.shape, x.dtype)
    launch("k", args=(x, y))
    return y
'''
assert len(trace(source, signature).main.launches) == 1
loaded = {"torch", "pytest", "openai", "numpy"} & set(sys.modules)
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", text], check=True, timeout=60)


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


def test_a_named_tuple_is_one_again_and_in_a_plan_s_outputs_a_plain_one() -> None:
    leaves, tree = flatten_call((Pair(torch.ones(2), torch.zeros(3)),), {})
    ((again,), _) = unflatten_call(json.loads(json.dumps(tree)), leaves)
    assert type(again) is Pair and again.second is leaves["0.1"]
    tree["args"][0]["type"] = "elsewhere.Pair"  # as in a process that has never seen the target
    ((like,), _) = unflatten_call(tree, leaves)
    assert type(like) is not Pair and type(like).__name__ == "Pair" and like.first is leaves["0.0"]
    outputs, tree = flatten_output(Pair(torch.ones(2), torch.zeros(3)))
    assert type(unflatten_output(tree, outputs)) is tuple
