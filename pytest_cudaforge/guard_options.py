"""Which settings count in a run of the guard: those of whoever started it, and the merge base's.

A pull request may bring another ``addopts`` with it, and pytest has read that before anybody could ask. What was said
on the command line (or in ``PYTEST_ADDOPTS``) is the workflow's word; what only the ini file says counts where the
merge base's ini file says so, too.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_cudaforge import trusted
from pytest_cudaforge.config import ForgeConfig, load
from pytest_cudaforge.errors import ConfigError, UsageError
from pytest_cudaforge.forging import search_start
from pytest_cudaforge.guarded import Change
from pytest_cudaforge.merge_base import MergeBase, find_merge_base, text_at
from pytest_cudaforge.plugin import forge_dir

__all__ = ["BaseOptions", "trusted_base"]

#: Settings that options of pytest's give; see :func:`pytest_cudaforge.forging.forge_config`.
_OPTIONS = ("device", "arch", "config", "isolation")


def trusted_base(config: pytest.Config) -> tuple[MergeBase, tuple[Change, ...]]:
    """The merge base to guard against, and whether the ini file asked for another. Raises UsageError."""
    ref, root = config.getoption("forge_base"), config.rootpath
    if ref is None or _said(config, "--forge-base"):
        return find_merge_base(root, ref, os.environ), ()
    try:
        usual = find_merge_base(root, None, os.environ)
    except UsageError:
        # Nothing else tells the base: a clone of one branch, with its name in the ini file.
        return find_merge_base(root, ref, os.environ), ()
    name = config.inipath.relative_to(root) if config.inipath is not None else Path()
    if _names(text_at(usual, usual.prefix / name), "--forge-base", ref):
        return find_merge_base(root, ref, os.environ), ()
    return usual, (Change(str(name), "--forge-base in addopts", "", str(ref)),)


class BaseOptions:
    """The merge base's word on settings; ``root`` is rootdir in its worktree. Raises ConfigError where its own
    configuration cannot be read."""

    def __init__(self, config: pytest.Config, root: Path) -> None:
        self.config, self.root = config, root
        self._ini = self._moved(config.inipath) if config.inipath is not None else None
        self._ini_text = _text(self._ini) if self._ini is not None else ""
        self.ini = _ini_values(self._ini)
        self.settings = self._settings()

    @property
    def forge_dir(self) -> Path:
        """Where the merge base keeps its kernels, in its worktree."""
        given = str(self.ini.get("forge_dir") or "")
        return self.root / given if given else self.settings.forge_dir

    def trusted(self, head: ForgeConfig) -> tuple[ForgeConfig, tuple[Change, ...]]:
        """The settings that count, and what the head says otherwise."""
        settings, changes = trusted.trusted_settings(head, self.settings)
        how = self.config.getoption("forge_guard_inconclusive")
        if how is not None and self._counts("--forge-guard-inconclusive", how):
            settings = replace(settings, guard=replace(settings.guard, inconclusive=how))
        elif how is not None and how != settings.guard.inconclusive:
            name = self.config.inipath.name if self.config.inipath is not None else "addopts"
            changes += (Change(name, "--forge-guard-inconclusive in addopts", settings.guard.inconclusive, str(how)),)
        kept = forge_dir(self.config), self.config.rootpath
        if _below(self.forge_dir, self.root) != _below(*kept):
            changes += (Change("forge_dir", "is", _below(self.forge_dir, self.root), _below(*kept), obeyed=True),)
        if self.config.inipath is not None:
            name = self.config.inipath.name
            changes += trusted.ini_changes(name, self.ini, _ini_values(self.config.inipath))
        return settings, changes

    def _settings(self) -> ForgeConfig:
        options: dict[str, object] = {}
        for name in _OPTIONS:
            value = self.config.getoption("forge_" + name)
            if value is not None and self._counts("--forge-" + name, value):
                options[name] = value
        start = self._moved(search_start(self.config)) or self.root
        if "config" in options:
            options["config"] = self._config_file(str(options["config"]))
        return load(options, root=self.root, start=start if start.is_dir() else self.root, environ=os.environ)

    def _config_file(self, given: str) -> str | None:
        """The merge base's version of a configuration file of the repo; one from elsewhere is the caller's own."""
        path = search_start(self.config) / given
        moved = self._moved(path)
        return str(path) if moved is None else str(moved) if moved.is_file() else None

    def _counts(self, flag: str, value: object) -> bool:
        return _said(self.config, flag) or _names(self._ini_text, flag, value)

    def _moved(self, path: Path) -> Path | None:
        """The same place in the worktree; None for what lies outside of rootdir."""
        root = self.config.rootpath
        return self.root / path.relative_to(root) if path.is_relative_to(root) else None


def _below(path: Path, root: Path) -> str:
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)


def _said(config: pytest.Config, flag: str) -> bool:
    """Was it given by whoever started pytest?"""
    given = [*map(str, config.invocation_params.args), *shlex.split(os.environ.get("PYTEST_ADDOPTS", ""))]
    return any(word == flag or word.startswith(flag + "=") for word in given)


def _names(text: str, flag: str, value: object) -> bool:
    """Does the text of an ini file give the option this value?"""
    return re.search(rf"{re.escape(flag)}[\s=\"',]+{re.escape(str(value))}(?![\w/.~^-])", text) is not None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _ini_values(path: Path | None) -> Mapping[str, Any]:
    """What an ini file says to pytest; nothing where it cannot be read (pytest has complained of the head's)."""
    from _pytest.config.findpaths import load_config_dict_from_file

    try:
        found = load_config_dict_from_file(path) if path is not None and path.is_file() else None
    except (pytest.UsageError, OSError, ValueError):
        found = None
    # Newer versions of pytest wrap the values.
    return {name: getattr(value, "value", value) for name, value in (found or {}).items()}


def read_base_options(config: pytest.Config, root: Path) -> BaseOptions | str:
    """The merge base's options, or why they cannot be read."""
    try:
        return BaseOptions(config, root)
    except ConfigError as error:
        return error.what
