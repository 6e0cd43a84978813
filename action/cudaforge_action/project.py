"""A folder as pytest and the forging session see it, found without running either: plan and verify jobs run no
``conftest.py``, no plugin and no option of an ini file.

Root and ini file are found as pytest does: https://docs.pytest.org/en/stable/reference/customize.html.
"""

from __future__ import annotations

import configparser
import importlib
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cudaforge_action.environment import settings_of
from pytest_cudaforge import config, discovery
from pytest_cudaforge.config import ForgeConfig
from pytest_cudaforge.errors import UsageError

__all__ = ["Project", "project_at"]

_TREE_END = "give the root of the project with the input working-directory"


@dataclass(frozen=True)
class Project:
    """``root``: where ids start from (pytest's rootdir). ``inifile``: None where there is none. ``paths``: what a run
    without arguments collects. ``python_paths``: importable for targets (pytest's ``pythonpath``)."""

    folder: Path
    root: Path
    inifile: Path | None
    settings: ForgeConfig
    paths: tuple[Path, ...]
    no_recurse: tuple[str, ...]
    python_paths: tuple[Path, ...]

    @property
    def manifest(self) -> Path:
        """Where its forged kernels are listed; the file need not be there."""
        return self.settings.forge_dir / "manifest.json"


def project_at(folder: Path, environ: Mapping[str, str], paths: Sequence[str] = ()) -> Project:
    """The project in ``folder``, where pytest would be started with ``paths``.

    Raises :class:`UsageError` (ConfigError) for a folder or path that is not there and for files that cannot be read.
    """
    folder = Path(os.path.abspath(folder))
    given = tuple(Path(os.path.abspath(folder / path)) for path in paths)
    for path in (folder, *given):
        if not path.exists():
            name = "paths" if path != folder else "working-directory"
            raise UsageError(
                f"{path} does not exist", expected="a path in the checkout", remedy=f"mend the input {name}"
            )
    root, inifile, ini = _setup(folder, given)
    start = Path(os.path.commonpath(given)) if given else folder
    options: dict[str, object] = {}
    if base := _paths(ini.get("forge_paths"), inifile):
        options["forge_paths"] = [str(path) for path in base]
    if ini.get("forge_dir"):
        options["forge_dir"] = str(root / str(ini["forge_dir"]))
    start = start if start.is_dir() else start.parent
    settings = config.load(options, root=root, start=start, environ=settings_of(environ))
    return Project(
        folder=folder,
        root=root,
        inifile=inifile,
        settings=settings,
        paths=given or settings.forge_paths or (folder,),
        no_recurse=tuple(_words(ini["norecursedirs"])) if "norecursedirs" in ini else discovery.NO_RECURSE,
        python_paths=tuple(_paths(ini.get("pythonpath"), inifile)),
    )


# -- pytest's own search ----------------------------------------------------------------------------------------


def _setup(folder: Path, given: Sequence[Path]) -> tuple[Path, Path | None, Mapping[str, Any]]:
    folders = [path if path.is_dir() else path.parent for path in given]
    ancestor = Path(os.path.commonpath(folders)) if folders else folder
    found = _located([ancestor])
    if found is None:
        for place in (ancestor, *ancestor.parents):
            if (place / "setup.py").is_file():
                return place, None, {}
        found = _located(folders) if folders and folders != [ancestor] else None
    if found is not None:
        return found
    shared = Path(os.path.commonpath([folder, ancestor]))
    return (ancestor if shared == Path(shared.anchor) else shared), None, {}


def _located(starts: Sequence[Path]) -> tuple[Path, Path | None, Mapping[str, Any]] | None:
    """The nearest file that configures pytest, else the nearest pyproject.toml, from each start upwards."""
    fallback: Path | None = None
    for start in starts:
        for folder in (start, *start.parents):
            for name, read in _READERS.items():
                path = folder / name
                if not path.is_file():
                    continue
                if name == "pyproject.toml" and fallback is None:
                    fallback = path
                if (values := read(path)) is not None:
                    return folder, path, values
    return (fallback.parent, fallback, {}) if fallback is not None else None


def _section(name: str, always: bool) -> Callable[[Path], Mapping[str, Any] | None]:
    def read(path: Path) -> Mapping[str, Any] | None:
        parser = configparser.RawConfigParser(interpolation=None, strict=False, allow_no_value=True)
        try:
            parser.read_string(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, configparser.Error) as error:
            raise _unreadable(path, error) from None
        if parser.has_section(name):
            return {key: value or "" for key, value in parser.items(name)}
        return {} if always else None

    return read


def _pyproject(path: Path) -> Mapping[str, Any] | None:
    table = _toml(path).get("tool", {}).get("pytest", {})
    own = {key: value for key, value in table.items() if key != "ini_options"}
    found: Mapping[str, Any] | None = own or table.get("ini_options")
    return found


def _pytest_toml(path: Path) -> Mapping[str, Any]:
    found: Mapping[str, Any] = _toml(path).get("pytest", {})
    return found


def _toml(path: Path) -> dict[str, Any]:
    # Before Python 3.11 pytest brings tomli.
    reader: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        found: dict[str, Any] = reader.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None
    return found


def _unreadable(path: Path, error: Exception) -> UsageError:
    return UsageError(f"{path} cannot be read: {error}", expected="a file that pytest can read", remedy=_TREE_END)


_READERS: Mapping[str, Callable[[Path], Mapping[str, Any] | None]] = {
    "pytest.toml": _pytest_toml,
    ".pytest.toml": _pytest_toml,
    "pytest.ini": _section("pytest", always=True),
    ".pytest.ini": _section("pytest", always=True),
    "pyproject.toml": _pyproject,
    "tox.ini": _section("pytest", always=False),
    "setup.cfg": _section("tool:pytest", always=False),
}


def _words(value: Any) -> list[str]:
    return [str(one) for one in value] if isinstance(value, list) else shlex.split(str(value or ""))


def _paths(value: Any, inifile: Path | None) -> list[Path]:
    return [inifile.parent / word for word in _words(value)] if inifile is not None and value else []
