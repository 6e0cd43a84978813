"""The plan that stands for a ModelNew's call, so that arenas, trials and the oracle serve both tiers. Pure.

It has a buffer per input, per state tensor of the reference and per output of the reference, and no steps: the worker
calls the candidate and copies what it returns. What was returned comes back as data and is compared as a plan's
outputs are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from pytest_cudaforge.errors import PlanError, WorkerProtocol
from pytest_cudaforge.evaluation.cases import tree_leaves
from pytest_cudaforge.plan import Buffer, LaunchPlan, TensorSpec, TracedPlan, View, contiguous_strides, decode_spec
from pytest_cudaforge.records import WorkloadFacts
from pytest_cudaforge.runtime.signature import named_parts, unflatten_output

__all__ = ["Opaque", "kept_state", "matched_state", "plan_of_call", "returned_plan", "state_specs"]

MAX_LEAVES = 4096
_MAX_TEXT = 200


class Opaque:
    """A returned leaf that is no plain tensor of the target's device; it prints as its description."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def plan_of_call(workload: WorkloadFacts, module: Any) -> TracedPlan:
    """The plan of one call of ``workload``; ``module`` is the reference's ModuleSpec, or None for a function."""
    buffers = [Buffer("input", spec, path) for path, spec in workload.inputs if isinstance(spec, TensorSpec)]
    buffers += [Buffer("state", spec, path) for path, spec in state_specs(module).items()]
    leaves: dict[str, Any] = {}
    for path, want in workload.outputs:
        leaves[path] = want
        if isinstance(want, TensorSpec):
            spec = want if _is_dense(want) else replace(want, strides=contiguous_strides(want.shape))
            leaves[path] = View(len(buffers), spec.shape, spec.strides)
            buffers.append(Buffer("scratch", spec))
    return TracedPlan(LaunchPlan(tuple(buffers), (), unflatten_output(workload.output_tree, leaves)))


def _is_dense(spec: TensorSpec) -> bool:
    """Does every element have a place of its own, without gaps?"""
    return spec.extent == spec.numel and all(
        stride for size, stride in zip(spec.shape, spec.strides, strict=True) if size > 1
    )


def state_specs(module: Any) -> dict[str, TensorSpec]:
    """Tensors of a ModuleSpec by path."""
    found: dict[str, TensorSpec] = {}
    open_nodes = [module]
    while open_nodes:
        node = open_nodes.pop()
        if isinstance(node, dict):
            if set(node) == {"tensor", "path"}:
                found[node["path"]] = decode_spec(node["tensor"], node["path"])
            else:
                open_nodes += reversed(list(node.values()))
        elif isinstance(node, list):
            open_nodes += reversed(node)
    return found


def matched_state(reference: Mapping[str, TensorSpec], candidate: Mapping[str, tuple[Any, ...]]) -> frozenset[str]:
    """Paths that both have, with one shape and dtype; ``candidate``: path -> (shape, dtype)."""
    return frozenset(path for path, spec in reference.items() if candidate.get(path) == (tuple(spec.shape), spec.dtype))


def kept_state(reference: Mapping[str, TensorSpec], candidate: Mapping[str, tuple[Any, ...]]) -> tuple[str, ...]:
    """Paths of the reference that stay as constructed, since the candidate may hold them under other names. Who has no
    other tensors has them built in, and constants that happen to be those of a fresh module are no weights."""
    matched = matched_state(reference, candidate)
    return tuple(sorted(set(reference) - matched)) if set(candidate) - matched else ()


# -- what a call returned ----------------------------------------------------------------------------------------


def returned_plan(plan: LaunchPlan, workload: WorkloadFacts, text: str, phase: str) -> LaunchPlan:
    """``plan`` with the outputs that the worker reported: JSON ``[[path, leaf], ...]``, untrusted.

    A leaf is ``{"tensor": spec, "alias": [buffer, byte offset] or null}``, ``{"value": plain}`` or
    ``{"opaque": text}``; ``{"fields": [names]}`` tells that what lies there is read by names. Raises WorkerProtocol
    where the text is nothing of the kind.
    """
    try:
        data = json.loads(text)
        if not isinstance(data, list) or len(data) > MAX_LEAVES:
            raise ValueError("no list of outputs, or too many")
        leaves: dict[str, Any] = {}
        fields: dict[str, tuple[str, ...]] = {}
        buffers = list(plan.buffers)
        for path, leaf in data:
            if "fields" in leaf:
                fields[_text(path)] = tuple(_text(name) for name in leaf["fields"])
            else:
                leaves[_text(path)] = _decode_leaf(leaf, buffers)
    except (ValueError, TypeError, KeyError, RecursionError, PlanError) as error:
        raise WorkerProtocol(f"what the call returned is malformed: {error}", phase=phase) from None
    # The worker tells paths and names, not kinds of containers; and a dict's order is no part of its value.
    same = set(leaves) == {path for path, _ in workload.outputs}
    leaves.update(list(_unnamed(leaves, fields, workload.output_tree)))
    outputs = unflatten_output(workload.output_tree, leaves) if same else _tree_of(leaves)
    return replace(plan, buffers=tuple(buffers), outputs=outputs)


def _unnamed(
    leaves: Mapping[str, Any], fields: Mapping[str, tuple[str, ...]], expected: Any
) -> Iterator[tuple[str, Opaque]]:
    """Leaves in a container that lacks the names by which callers read the reference's (``out.hidden``)."""
    for path, names in named_parts(expected):
        if fields.get(path) != names:
            text = f"in a container without the names {', '.join(names)}"[:_MAX_TEXT]
            yield from ((leaf, Opaque(text)) for leaf in leaves if leaf.startswith(f"{path}."))


def _tree_of(leaves: Mapping[str, Any]) -> Any:
    """A tree whose leaves have these paths ("out", or "out.…")."""
    if list(leaves) == ["out"]:
        return leaves["out"]
    return {path.removeprefix("out."): leaf for path, leaf in leaves.items()}


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > _MAX_TEXT or not value.isprintable():
        raise ValueError("a text is missing or too long")
    return value


def _decode_leaf(leaf: Any, buffers: list[Buffer]) -> Any:
    if "opaque" in leaf:
        return Opaque(_text(leaf["opaque"]))
    if "value" in leaf:
        value = leaf["value"]
        if isinstance(value, dict):
            return float(value["float"])
        if value is not None and not isinstance(value, (bool, int, float, str)):
            raise ValueError("a value that is no number, text or None")
        return value
    spec = decode_spec(leaf["tensor"], "output")
    if leaf["alias"] is not None:
        index, offset = leaf["alias"]
        aliased = _aliased(spec, buffers, int(index), int(offset))
        if aliased is not None:
            return aliased
    buffers.append(Buffer("scratch", spec))
    return View(len(buffers) - 1, spec.shape, spec.strides)


def _aliased(spec: TensorSpec, buffers: list[Buffer], index: int, offset_bytes: int) -> View | None:
    """A window onto an input or parameter; None where it is seen as another dtype (its values are judged then)."""
    if not 0 <= index < len(buffers) or buffers[index].role not in ("input", "state"):
        raise ValueError("an alias of a buffer that is none")
    base = buffers[index].spec
    offset = offset_bytes // base.itemsize_bytes
    if base.dtype != spec.dtype or offset_bytes < 0 or offset + spec.extent > base.extent:
        return None
    return View(index, spec.shape, spec.strides, offset)


def judged_plan(plan: LaunchPlan, returned: LaunchPlan) -> LaunchPlan:
    """Where the answers lie: in the output regions, in their layout, or in what they alias."""
    own = dict(tree_leaves(plan.outputs, "out"))
    count = len(plan.buffers)
    leaves = {}
    for path, leaf in tree_leaves(returned.outputs, "out"):
        fresh = isinstance(leaf, View) and leaf.buffer >= count
        leaves[path] = own[path] if fresh else leaf
    return replace(plan, outputs=_tree_of(leaves))
