"""Baselines in rotation, in this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_cudaforge.discovery import discover
from pytest_cudaforge.evaluation.rotation import Rotation
from pytest_cudaforge.evaluation.subject import Subject

TARGET = """
import torch
from pytest_cudaforge import forge_target

@forge_target(inputs=lambda: [torch.randn(512, 1024)])
def halves(x):
    return {"low": x[:, :512] * 2, "high": x[:, 512:] * 3}
"""


@pytest.fixture
def rotation(tmp_path: Path) -> Rotation:
    (tmp_path / "targets.py").write_text(TARGET)
    (target,) = discover([tmp_path], tmp_path).targets
    return Rotation(Subject(target, "cpu"), "default", 2)


def test_writing_an_answer_is_told_by_answer_and_takes_no_less_than_memory_does(rotation: Rotation) -> None:
    rotation.hold_places(True)
    bytes_an_answer, fastest_memory = 512 * 1024 * 4, 2e12
    for answers in (1, 8):
        assert bytes_an_answer / fastest_memory * 1e9 < rotation.writing_ns(answers) < 1e9
