"""Whose files an import finds, where two checkouts of one repo are on a machine. In an oracle's process only.

An environment knows one of them: an editable install points at what is checked out now, whatever version was meant to
be imported. Here imports that would end there are led to the same place in the other checkout.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

__all__ = ["installed_copies", "relocate"]

_INSTALLED = ("site-packages", "dist-packages")


def relocate(foreign: str, own: str, package: str, import_root: str) -> None:
    """Import from ``own`` what would come from ``foreign`` (two roots of checkouts), from now on; and the top-level
    ``package`` from ``import_root`` in any case ("": there is none)."""
    sys.meta_path.insert(0, _Relocation(foreign, own, package, import_root))


def installed_copies(root: str, import_root: str) -> list[str]:
    """Top-level modules that were imported from where packages are installed, although this checkout has them, too:
    its versions of them were not what ran."""
    found = []
    for name, module in sorted(sys.modules.items()):
        parts = (getattr(module, "__file__", None) or "").split(os.sep)
        if "." in name or not any(part in _INSTALLED for part in parts):
            continue
        places = [os.path.join(folder, name) for folder in (import_root, root, os.path.join(root, "src"))]
        if any(os.path.isfile(os.path.join(place, "__init__.py")) or os.path.isfile(f"{place}.py") for place in places):
            found.append(name)
    return found


class _Relocation:
    """A finder of top-level modules; what lies inside a package is found by its path."""

    def __init__(self, foreign: str, own: str, package: str, import_root: str) -> None:
        self._foreign, self._own = os.path.realpath(foreign), os.path.realpath(own)
        self._package, self._import_root = package, import_root
        self._asking = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if path is not None or self._asking:
            return None
        if name == self._package:
            return PathFinder.find_spec(name, [self._import_root])
        found = self._by_others(name)
        places = _places(found)
        moved = [self._moved(place) for place in places]
        if not found or not places or any(place is None for place in moved):
            return None
        return PathFinder.find_spec(name, [os.path.dirname(str(place)) for place in moved])

    def _by_others(self, name: str) -> ModuleSpec | None:
        self._asking = True
        try:
            return importlib.util.find_spec(name)
        except (ImportError, ValueError):
            return None
        finally:
            self._asking = False

    def _moved(self, place: str) -> str | None:
        """The same place in our checkout; None where it is not in the foreign one, or not there in ours."""
        real = os.path.realpath(place)
        inside = _below(real, self._foreign) and not _below(real, self._own)
        if not inside or any(part in _INSTALLED for part in real.split(os.sep)):
            return None
        moved = os.path.join(self._own, os.path.relpath(real, self._foreign))
        return moved if os.path.exists(moved) else None


def _places(spec: ModuleSpec | None) -> list[str]:
    """The folders of a package, or a module's file."""
    if spec is None:
        return []
    if spec.submodule_search_locations is not None:
        return list(spec.submodule_search_locations)
    return [spec.origin] if spec.origin and spec.has_location else []


def _below(path: str, root: str) -> bool:
    return path == root or path.startswith(root.rstrip(os.sep) + os.sep)
