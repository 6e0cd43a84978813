"""A target's file, imported by its path. In the oracle's process only.

Files are loaded by path under a name of their own, so that two files with one name never meet; targets inside a
package are imported by their real name, because their relative imports need it.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import linecache
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from pytest_cudaforge.errors import TargetError
from pytest_cudaforge.evaluation.faults import user_text
from pytest_cudaforge.records import Target
from pytest_cudaforge.target import TargetOptions, file_options, options_of

__all__ = ["find", "imported", "load_file", "options_asked"]

#: Modification times of every module imported from below a target's root, by file.
_seen_files: dict[str, int] = {}
_own_path = list(sys.path)


def imported(target: Target, python_paths: tuple[str, ...]) -> tuple[Any, TargetOptions]:
    """The target's class or function, and its options. Raises TargetError, and whatever its file raises."""
    namespace = load_file(target, python_paths)
    found = find(target, namespace)
    return found, file_options(options_of(found), vars(namespace))


def options_asked(target: Target, python_paths: tuple[str, ...]) -> TargetOptions:
    """The target's options, with nothing done but the import of its file. Raises TargetError."""
    try:
        return imported(target, python_paths)[1]
    except TargetError:
        raise
    except (Exception, SystemExit) as error:
        raise TargetError(f"{target.id}: importing its file failed\n{user_text(error, target.root)}") from error


def load_file(target: Target, python_paths: tuple[str, ...]) -> ModuleType:
    path = Path(target.root) / target.path
    _drop_stale_modules(target)
    entries = (str(path.parent), target.import_root, target.root, *python_paths)
    # Behind everything else, so that a target's neighbours cannot shadow an installed package.
    sys.path[:] = [*_own_path, *dict.fromkeys(entry for entry in entries if entry and entry not in _own_path)]
    importlib.invalidate_caches()
    linecache.checkcache()
    if (path.parent / "__init__.py").exists() and "." in target.module_name:
        module = importlib.import_module(target.module_name)
    else:
        module = _load_plain_file(target, path)
    _seen_files.update((str(file), file.stat().st_mtime_ns) for _, file in _modules_below(target.root) if file.exists())
    return module


def _load_plain_file(target: Target, path: Path) -> ModuleType:
    name = f"_forge_target_{hashlib.sha256(f'{path} {target.digest}'.encode()).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _modules_below(root: str) -> list[tuple[str, Path]]:
    """Imported modules (name, file) that lie in ``root`` and are not installed there."""
    found = []
    # By their text: torch alone brings two thousand modules, and a path object for each would cost more than a trial.
    prefix = str(Path(root)).rstrip("/") + "/"
    for name, module in list(sys.modules.items()):
        origin = getattr(module, "__file__", None)
        if origin and origin.startswith(prefix) and "site-packages" not in Path(origin).parts:
            found.append((name, Path(origin)))
    return found


def _drop_stale_modules(target: Target) -> None:
    """Forget modules whose file changed (with their whole package), and another root's modules of the same name."""
    stale = set()
    for name, file in _modules_below(target.root):
        known = _seen_files.get(str(file))
        if known is not None and (not file.exists() or file.stat().st_mtime_ns != known):
            stale.add(name.split(".")[0])
    local = {entry.stem for folder in {Path(target.import_root), (Path(target.root) / target.path).parent}
             if folder.is_dir() for entry in folder.iterdir()}  # fmt: skip
    for name in local & sys.modules.keys():
        origin = getattr(sys.modules[name], "__file__", None) or ""
        if origin in _seen_files and not Path(origin).is_relative_to(target.root):
            stale.add(name)
    for name in [name for name in sys.modules if name.split(".")[0] in stale] if stale else ():
        del sys.modules[name]


def find(target: Target, namespace: ModuleType) -> Any:
    found: Any = namespace
    for part in target.qualname.split("."):
        found = getattr(found, part, None)
        if found is None:
            raise TargetError(
                f"{target.id}: the file has no {target.qualname} after importing it",
                expected="the decorated class or function at module level",
                remedy="define it unconditionally, or remove the decorator",
            )
    if not callable(found) or (isinstance(found, type) and not issubclass(found, torch.nn.Module)):
        kind = "a plain class" if isinstance(found, type) else f"a {type(found).__name__}"
        raise TargetError(f"{target.id}: is {kind}", expected="an nn.Module class or a function")
    return found
