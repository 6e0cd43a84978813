"""pytest hooks, thin: everything that costs an import waits until a forge item is really wanted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_cudaforge.config import ForgeConfig
    from pytest_cudaforge.items import ForgedFolder

MANIFEST_NAME = "manifest.json"
DEFAULT_FORGE_DIR = "forged"
CONFIG_NAME = "cudaforge.yaml"
_SETTINGS: pytest.StashKey[ForgeConfig] = pytest.StashKey()

MARKER = "cudaforge: forge items and the cases of forged kernels (added by pytest-cudaforge)"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("cudaforge", "forging kernels (pytest-cudaforge)")
    group.addoption("--forge", action="store_true", help="forge kernels for the targets found; runs nothing else")
    group.addoption("--forge-device", metavar="DEVICE", help="auto, cpu, cuda or cuda:N")
    group.addoption("--forge-arch", metavar="ARCH", help="build for this arch (sm_90) instead of the device's own")
    group.addoption(
        "--forge-coder", metavar="WHO", help="openai, command, replay, or compiler: search torch.compile's options"
    )
    group.addoption("--forge-rounds", metavar="N", help="rounds of the loop per target")
    group.addoption("--forge-config", metavar="FILE", help="cudaforge.yaml to read")
    group.addoption("--forge-record", metavar="FILE", help="record the conversations as JSON lines, to replay later")
    group.addoption("--forge-json", metavar="FILE", help="write the results as JSON")
    group.addoption(
        "--forge-html", metavar="FILE", help="where the page of the run goes (default: .cudaforge/report.html)"
    )
    group.addoption("--forge-fresh", action="store_true", help="start anew instead of resuming an earlier run")
    group.addoption("--forge-dry-run", action="store_true", help="show targets, prompt sizes and a cost estimate only")
    group.addoption(
        "--forge-workload",
        action="append",
        dest="forge_workloads",
        metavar="NAME",
        help="forge for these workloads alone (a name or pattern; may be repeated), beside the target's other kernels",
    )
    group.addoption("--forge-branch", metavar="NAME", help="commit the winners on this git branch")
    group.addoption("--forge-isolation", metavar="HOW", help="auto, or none to run native code without a sandbox")
    group.addoption("--forge-profile", metavar="WHEN", help="profile for the Judge: auto (a live one), always or never")
    group.addoption("--forge-max-usd", metavar="USD", help="stop cleanly at this cost, all targets together")
    group.addoption("--forge-max-minutes", metavar="MIN", help="stop cleanly after this time, all targets together")
    group.addoption(
        "--forge-strict",
        action="store_true",
        help="a target that got no new kernel fails, and so does a case that cannot be verified here",
    )
    group.addoption(
        "--forge-guard", action="store_true", help="race the forged kernels against their merge base and reference"
    )
    group.addoption(
        "--forge-base", metavar="REF", help="guard against the merge base with this (default: the default branch)"
    )
    group.addoption(
        "--forge-guard-inconclusive",
        metavar="HOW",
        choices=("neutral", "fail"),
        help="what an undecided race is: neutral (default), or fail",
    )
    group.addoption("--forge-history", metavar="FILE", help="the guard's history (default: .cudaforge/history.jsonl)")
    parser.addini("forge_paths", "files and folders that --forge scans when no path is given", type="paths")
    parser.addini("forge_cases", "run the cases of forged kernels when no path is given", type="bool", default=False)
    parser.addini("forge_dir", "folder of the forged kernels, below rootdir (default: forged)", default="")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", MARKER)
    if config.getoption("forge") and config.getoption("forge_guard"):
        raise pytest.UsageError("--forge and --forge-guard are two runs: forge first, then guard what was merged")
    if config.getoption("forge"):
        from pytest_cudaforge.forging import ForgeRun

        config.pluginmanager.register(ForgeRun.prepare(config), "cudaforge-run")
    elif config.getoption("forge_guard"):
        from pytest_cudaforge.guarding import GuardRun
        from pytest_cudaforge.items import GUARD_PLUGIN

        config.pluginmanager.register(GuardRun.prepare(config), GUARD_PLUGIN)
    elif config.args_source is not pytest.Config.ArgsSource.ARGS and _cases_wanted(config):
        _add_cases(config)


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> ForgedFolder | None:
    # A folder of forged kernels is ours alone: its plan.py files must never be collected, let alone imported.
    if not os.path.isfile(os.path.join(path, MANIFEST_NAME)):
        return None
    if path.name != DEFAULT_FORGE_DIR and path != forge_dir(parent.config):
        return None
    from pytest_cudaforge.items import ForgedFolder

    return ForgedFolder.from_parent(parent, path=path)


def forge_dir(config: pytest.Config) -> Path:
    """Where forged kernels live: the ini file's word, else cudaforge.yaml's, else `forged` at the rootdir."""
    given = str(config.getini("forge_dir"))
    if given or not _configured(config):
        return config.rootpath / (given or DEFAULT_FORGE_DIR)
    return _settings(config).forge_dir


def _cases_wanted(config: pytest.Config) -> bool:
    if config.getini("forge_cases"):
        return True
    return _configured(config) and _settings(config).forge_cases


def _configured(config: pytest.Config) -> bool:
    """Is there anything but the ini file to ask? Reading YAML would cost every run that has no use for it."""
    if any(name in os.environ for name in ("CUDAFORGE_FORGE_CASES", "CUDAFORGE_FORGE_DIR")):
        return True
    try:
        text = (config.rootpath / CONFIG_NAME).read_bytes()
    except OSError:
        return False
    return b"forge_cases" in text or b"forge_dir" in text


def _settings(config: pytest.Config) -> ForgeConfig:
    found = config.stash.get(_SETTINGS, None)
    if found is None:
        from pytest_cudaforge.errors import UsageError
        from pytest_cudaforge.forging import forge_config

        try:
            found = config.stash[_SETTINGS] = forge_config(config)
        except UsageError as error:
            raise pytest.UsageError(str(error)) from None
    return found


def _add_cases(config: pytest.Config) -> None:
    folder = forge_dir(config)
    below = any(folder.is_relative_to(config.invocation_params.dir / arg.partition("::")[0]) for arg in config.args)
    if not below and (folder / MANIFEST_NAME).is_file():
        config.args.append(str(folder))
