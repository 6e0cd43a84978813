"""Which Python runs the repository's modules."""

from __future__ import annotations

import sys
import venv
from pathlib import Path

import pytest
from cudaforge_action.inputs import Inputs
from cudaforge_action.interpreter import interpreter

from pytest_cudaforge.errors import UsageError


def test_one_without_torch_is_refused_before_its_failures_look_like_a_kernels(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", symlinks=True)
    python = tmp_path / "bare" / "bin" / "python"
    with pytest.raises(UsageError, match="has no torch, and mode guard runs") as caught:
        interpreter(Inputs("guard", python=str(python)))
    assert str(python) in str(caught.value) and "install torch" in str(caught.value)


def test_without_the_input_it_is_this_one() -> None:
    assert interpreter(Inputs("forge")) == sys.executable


def test_a_relative_one_is_seen_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "env").symlink_to(sys.prefix)
    monkeypatch.chdir(tmp_path)
    name = Path(sys.executable).relative_to(sys.prefix)
    assert interpreter(Inputs("verify", python=str("env" / name))) == str(tmp_path / "env" / name)
