"""``forge_target`` marks a module class or a function; nothing else happens to it. Standard library only.

The mark is one attribute in the object's own ``__dict__``: the class stays the same object, so pickling, subclassing,
``state_dict`` and ``torch.compile`` behave as before, and a subclass of a target is not itself a target.

What is refused when (decided once, here):

* An option of a wrong type or an unknown value is a :class:`~pytest_cudaforge.errors.UsageError` at the decoration, as
  with any other call: it shows at the first import on the author's machine, never first in production.
* A decorator on something that cannot be forged (a plain class, a method, a number) never raises: a production process
  that imports the file must not die of a mark. The scan, or the oracle, reports it at that target's item.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar, overload

from pytest_cudaforge.errors import UsageError

__all__ = [
    "MARK",
    "PRECISIONS",
    "TERMS",
    "WORKS",
    "TargetOptions",
    "file_options",
    "forge_target",
    "options_of",
    "terms_of",
    "with_terms",
]

#: Name of the attribute that holds the options.
MARK = "__forge_target__"

#: What a target may promise about its arithmetic. "default" means torch's own defaults (KernelBench files).
PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "fp64", "default")

#: What a candidate's work may be labelled as (see records.Work).
WORKS = ("kernel", "mixed", "library", "rewrite")

#: The options that a verdict is reached on; the others say what is called, and with what.
TERMS = (
    *("precision", "atol", "rtol", "languages", "min_speedup", "dynamic", "strides", "distributions", "allow"),
    *("mode", "grad", "index_outputs", "nondeterministic"),
)

_Marked = TypeVar("_Marked")
InputsFunction = Callable[[], Any]


@dataclass(frozen=True)
class TargetOptions:
    """The decorator's options, as given. Read them with :func:`options_of`.

    ``inputs`` is called without arguments and returns what the target is called with: a list or tuple of positional
    arguments, a dict of keyword arguments, ``(list, dict)`` for both, or a single tensor. ``init`` does the same for
    the constructor (None: no arguments). ``workloads`` are further named input sets; with ``inputs`` alone there is
    one workload, "default". ``atol``/``rtol`` are outer bounds on top of the verdict's own rule. ``allow`` None: own
    kernels that do the work, library products beside them; in a whole network other operators of torch's, too.
    ``grad``: gradients are wanted, of the parameters and of the inputs drawn with ``requires_grad`` (of every floating
    input where none is drawn so); a module that is trained says ``mode="train"`` as well. ``guard``: where it has no
    forged kernel, ``pytest --forge-guard`` races it as it stands against its version at the merge base, with gradients
    where ``grad`` asks for them; written as ``guard=True`` in the decorator (or in an alias of it) it is found without
    importing anything.
    """

    inputs: InputsFunction | None = None
    init: InputsFunction | None = None
    name: str | None = None
    workloads: Mapping[str, InputsFunction] = field(default_factory=dict)
    precision: str = "fp32"
    atol: float | None = None
    rtol: float | None = None
    languages: tuple[str, ...] | None = None
    min_speedup: float = 1.0
    dynamic: bool = False
    strides: Literal["drawn", "any"] = "drawn"
    distributions: Literal["all", "drawn"] = "all"
    allow: tuple[str, ...] | None = None
    mode: Literal["eval", "train"] = "eval"
    grad: bool = False
    guard: bool = False
    index_outputs: tuple[str, ...] = ()
    nondeterministic: bool = False

    @property
    def input_sets(self) -> dict[str, InputsFunction]:
        """Every workload by name, "default" first where ``inputs`` is given; empty where nothing was declared."""
        sets = {} if self.inputs is None else {"default": self.inputs}
        return {**sets, **self.workloads}


@overload
def forge_target(target: _Marked, /) -> _Marked: ...


@overload
def forge_target(
    *,
    inputs: InputsFunction | None = ...,
    init: InputsFunction | None = ...,
    name: str | None = ...,
    workloads: Mapping[str, InputsFunction] | None = ...,
    precision: str = ...,
    atol: float | None = ...,
    rtol: float | None = ...,
    languages: str | Iterable[str] | None = ...,
    min_speedup: float = ...,
    dynamic: bool = ...,
    strides: Literal["drawn", "any"] = ...,
    distributions: Literal["all", "drawn"] = ...,
    allow: str | Iterable[str] = ...,
    mode: Literal["eval", "train"] = ...,
    grad: bool = ...,
    guard: bool = ...,
    index_outputs: str | Iterable[str] = ...,
    nondeterministic: bool = ...,
) -> Callable[[_Marked], _Marked]: ...


def forge_target(target: Any = None, /, **options: Any) -> Any:
    """Mark an ``nn.Module`` class or a plain function as a target; returns the same object.

    Works with and without parentheses; the options are the fields of :class:`TargetOptions`. Without ``inputs`` and
    ``workloads`` the target's file must define ``get_inputs()`` (and ``get_init_inputs()``), as KernelBench files do.

    Raises:
        UsageError: an unknown option, or one of a wrong type or value.
    """
    checked = _checked_options(options)
    if getattr(target, "__name__", "") == "<lambda>":
        # `@forge_target(lambda: [...])`: without this the class body's line would fail with a puzzling TypeError.
        raise UsageError("forge_target: a lambda was given by position", expected="inputs=lambda: [...]")
    if target is not None:
        return _mark(target, checked)
    return lambda real: _mark(real, checked)


def options_of(obj: Any) -> TargetOptions | None:
    """The options ``obj`` itself was marked with; None for a subclass of a target, an instance, or anything else."""
    marked = getattr(obj, "__dict__", {}).get(MARK)
    return marked if isinstance(marked, TargetOptions) else None


def file_options(options: TargetOptions | None, namespace: Mapping[str, Any]) -> TargetOptions:
    """Fill what the mark left out from its file: ``get_inputs`` and ``get_init_inputs``.

    ``options`` None stands for a KernelBench file, which declares nothing: torch's default precision.
    ``namespace`` is the ``__dict__`` of the module that defines the target.
    """
    found = TargetOptions(precision="default") if options is None else options
    if found.input_sets:
        return found
    inputs, init = namespace.get("get_inputs"), namespace.get("get_init_inputs")
    return replace(found, inputs=inputs, init=found.init if found.init is not None else init)


def terms_of(options: TargetOptions) -> dict[str, Any]:
    """What a verdict is reached on: the options that are plain data, by name (tuples as lists)."""
    values = {name: getattr(options, name) for name in TERMS}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def with_terms(options: TargetOptions, terms: Iterable[tuple[str, Any]]) -> TargetOptions:
    """``options`` with other terms. Raises UsageError for a term that is none, or of a wrong value."""
    values: dict[str, Any] = {}
    for name, value in terms:
        if name not in TERMS:
            raise unknown_option(name)
        values[name] = value if value is None else _CHECKS[name](name, value)
    return replace(options, **values)


def _mark(target: Any, options: TargetOptions) -> Any:
    # A static mark on something that takes no attributes is reported by the scan, not here (see the module's text).
    try:
        setattr(target, MARK, options)
    except (AttributeError, TypeError):
        return target
    return target


# -- checks ----------------------------------------------------------------------------------------------------


def _checked_options(options: dict[str, Any]) -> TargetOptions:
    known = TargetOptions.__dataclass_fields__
    for name in options:
        if name not in known:
            raise unknown_option(name)
    values = {name: _CHECKS[name](name, value) for name, value in options.items()}
    return TargetOptions(**values)


def unknown_option(name: str) -> UsageError:
    """The error for an option that does not exist, with the nearest one that does (the scan uses it too)."""
    # Only a mistake pays for difflib; the decorator itself stays light.
    from difflib import get_close_matches

    known = tuple(TargetOptions.__dataclass_fields__)
    close = get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else "remove it"
    return UsageError(f"forge_target: unknown option {name!r}", expected=", ".join(known), remedy=hint)


def _refuse(name: str, value: Any, expected: str) -> UsageError:
    return UsageError(f"forge_target: {name}={value!r} is not valid", expected=expected)


def _function(name: str, value: Any) -> Any:
    if value is None or callable(value):
        return value
    raise UsageError(
        f"forge_target: {name}= is a {type(value).__name__}, not a function",
        expected="a function without arguments that returns the arguments",
        remedy=f"write {name}=lambda: [...], so that nothing is made at import",
    )


def _workloads(name: str, value: Any) -> Any:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _refuse(name, value, "a dict of workload name -> function")
    for key, function in value.items():
        if not isinstance(key, str) or not key or "::" in key:
            raise _refuse(name, key, "workload names that are non-empty strings without '::'")
        if function is None:
            raise _refuse(f"{name}[{key!r}]", function, "a function")
        _function(f"{name}[{key!r}]", function)
    return dict(value)


def _name(name: str, value: Any) -> str | None:
    if value is None or (isinstance(value, str) and any(char.isalnum() for char in value)):
        return value
    raise _refuse(name, value, "a string with at least one letter or digit")


def _one_of(*choices: str) -> Callable[[str, Any], str]:
    def check(name: str, value: Any) -> str:
        if isinstance(value, str) and value in choices:
            return value
        raise _refuse(name, value, "one of " + ", ".join(repr(choice) for choice in choices))

    return check


def _number(least: float, *, optional: bool) -> Callable[[str, Any], float | None]:
    def check(name: str, value: Any) -> float | None:
        if value is None and optional:
            return None
        if isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value < float("inf"):
            return float(value)
        raise _refuse(name, value, f"a finite number of at least {least:g}")

    return check


def _flag(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise _refuse(name, value, "True or False")


def _strings(*choices: str, optional: bool = False) -> Callable[[str, Any], tuple[str, ...] | None]:
    def check(name: str, value: Any) -> tuple[str, ...] | None:
        if value is None and optional:
            return None
        items = (value,) if isinstance(value, str) else value
        if isinstance(items, (list, tuple, set, frozenset)) and all(isinstance(item, str) and item for item in items):
            ordered = tuple(sorted(items)) if isinstance(items, (set, frozenset)) else tuple(items)
            if all(item in choices for item in ordered) or not choices:
                return ordered
        raise _refuse(name, value, f"strings out of {', '.join(choices)}" if choices else "a string or several")

    return check


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "inputs": _function,
    "init": _function,
    "name": _name,
    "workloads": _workloads,
    "precision": _one_of(*PRECISIONS),
    "atol": _number(0.0, optional=True),
    "rtol": _number(0.0, optional=True),
    "languages": _strings(optional=True),
    "min_speedup": _number(0.0, optional=False),
    "dynamic": _flag,
    "strides": _one_of("drawn", "any"),
    "distributions": _one_of("all", "drawn"),
    "allow": _strings(*WORKS, optional=True),
    "mode": _one_of("eval", "train"),
    "grad": _flag,
    "guard": _flag,
    "index_outputs": _strings(),
    "nondeterministic": _flag,
}
