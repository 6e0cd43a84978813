"""What a pull request may not decide about itself: settings, promises, guards and a target's terms are the merge
base's. What differs is told as a :class:`Change`. Pure but for the ini files that it reads.

A pull request's own ``conftest.py`` runs inside pytest and could do anything there, the digests in its manifest are its
own, and the reference is its own code: this stops accidents and shows what a reviewer has to look at, no attacker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pytest_cudaforge.config import ForgeConfig
from pytest_cudaforge.guarded import Change
from pytest_cudaforge.records import Guard
from pytest_cudaforge.runtime.manifest import Entry, EntryWorkload

__all__ = [
    "GUARD_KEYS",
    "guard_changes",
    "ini_changes",
    "promise_changes",
    "suspicious_files",
    "trusted_settings",
    "trusted_terms",
    "wider",
]

#: Settings that a verdict rests on. Where its history goes, and on which device it runs, is the caller's business.
_SETTINGS = ("allow", "trials", "isolation", "timing_budget_s", "arch")
_GUARD_SETTINGS = ("relative", "absolute_us", "promise_margin", "inconclusive")
#: Keys of pytest's ini file that say what is collected, and with which options.
GUARD_KEYS = ("addopts", "forge_dir", "forge_paths", "forge_cases", "norecursedirs", "pythonpath")
_PROMISES = ("speedup_eager", "speedup_compile", "least_eager", "least_compile")


# -- settings ----------------------------------------------------------------------------------------------------


def trusted_settings(head: ForgeConfig, base: ForgeConfig) -> tuple[ForgeConfig, tuple[Change, ...]]:
    """``head`` with the merge base's word wherever a verdict rests on it."""
    place = head.file or base.file
    shown = place.name if place is not None else "cudaforge.yaml"
    changes = [*_differences(shown, "", _SETTINGS, base, head)]
    changes += _differences(shown, "guard.", _GUARD_SETTINGS, base.guard, head.guard)
    guard = replace(head.guard, **{name: getattr(base.guard, name) for name in _GUARD_SETTINGS})
    return replace(head, guard=guard, **{name: getattr(base, name) for name in _SETTINGS}), tuple(changes)


def _differences(place: str, prefix: str, names: Sequence[str], base: Any, head: Any) -> list[Change]:
    pairs = [(name, getattr(base, name), getattr(head, name)) for name in names]
    return [Change(place, prefix + name, _shown(old), _shown(new)) for name, old, new in pairs if old != new]


def ini_changes(name: str, base: Mapping[str, Any], head: Mapping[str, Any]) -> tuple[Change, ...]:
    """What pytest's ini file says otherwise; pytest has obeyed it before anybody could ask."""
    pairs = [(key, _shown(base.get(key)), _shown(head.get(key))) for key in GUARD_KEYS]
    return tuple(Change(name, key, old, new, obeyed=True) for key, old, new in pairs if old != new)


def suspicious_files(changed: Sequence[str]) -> tuple[Change, ...]:
    """Files that run inside pytest, or start it: no reading of settings can make up for them."""
    named = [name for name in changed if Path(name).name == "conftest.py" or name.startswith(".github/workflows/")]
    return tuple(Change(name, "its text", "another", "changed", obeyed=True) for name in named)


# -- a target's terms --------------------------------------------------------------------------------------------


def trusted_terms(
    target: str, base: Sequence[tuple[str, Any]], head: Sequence[tuple[str, Any]]
) -> tuple[tuple[tuple[str, Any], ...], tuple[Change, ...]]:
    """The terms that count, and what the head says otherwise. Gradients are verified where either asks for them."""
    told = dict(head)
    changes = [Change(target, name, _shown(old), _shown(told.get(name))) for name, old in base if told.get(name) != old]
    either = bool(dict(base).get("grad")) or bool(told.get("grad"))
    return tuple((name, either if name == "grad" else value) for name, value in base), tuple(changes)


# -- the manifest ------------------------------------------------------------------------------------------------


def promise_changes(head: Entry, base: Entry | None) -> tuple[Change, ...]:
    """Promises and workloads of the manifest that are not the merge base's."""
    if base is None:
        return ()
    changes = []
    for old in base.workloads:
        new, where = _workload(head, old.name), f"{head.target} ({head.language}, {head.arch})"
        if new is None:
            changes.append(Change(where, f"workload {old.name}", "guarded", "gone", obeyed=True))
            continue
        if new.inputs != old.inputs:
            changes.append(Change(where, f"inputs of {old.name}", "others", "changed", obeyed=True))
        for name in _PROMISES:
            was, now = getattr(old, name), getattr(new, name)
            if was != now:
                changes.append(Change(where, f"{name} of {old.name}", _shown(was), _shown(now)))
    return tuple(changes)


def guard_changes(head: Entry, base: Entry | None) -> tuple[Change, ...]:
    """Where dispatch may use the kernel, if the head allows more than the merge base. It is what production would
    read, so it cannot be left unread: whether the kernel is right there is verified."""
    if base is None or not wider(head.guard, base.guard):
        return ()
    place = f"{head.target} ({head.language}, {head.arch})"
    return (Change(place, "guard", _limits(base.guard), _limits(head.guard), obeyed=True),)


def wider(one: Guard, other: Guard) -> bool:
    """Does ``one`` let dispatch use a kernel where ``other`` does not?"""
    return (
        (other.contiguous_only and not one.contiguous_only)
        or (other.drawn_shapes_only and not one.drawn_shapes_only)
        or bool(set(other.fixed_sizes) - set(one.fixed_sizes) and not one.drawn_shapes_only)
        or (other.equal_sizes_only and not (one.equal_sizes_only or one.drawn_shapes_only))
        or one.align_bytes < other.align_bytes
    )


def _limits(guard: Guard) -> str:
    limits = ["contiguous only"] if guard.contiguous_only else []
    limits += ["drawn shapes only"] if guard.drawn_shapes_only else []
    limits += [f"{size} only" for size in guard.fixed_sizes]
    limits += ["equal sizes only"] if guard.equal_sizes_only else []
    limits += [f"{guard.align_bytes}-byte aligned"] if guard.align_bytes > 1 else []
    return ", ".join(limits) or "everything"


def _workload(entry: Entry | None, name: str) -> EntryWorkload | None:
    return next((one for one in entry.workloads if one.name == name), None) if entry is not None else None


def _shown(value: Any) -> str:
    if value is None or value == ():
        return ""
    if isinstance(value, (list, tuple)):
        return ", ".join(str(part) for part in value)
    return f"{value:g}" if isinstance(value, float) else str(value)
