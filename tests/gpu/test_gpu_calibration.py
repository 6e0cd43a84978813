"""`cudaforge calibrate` on a real device: a decision of each sort, kept and told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_cudaforge import calibration, cli
from pytest_cudaforge.hardware import detect_in_child

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU that torch can see"),
]


def test_calibrate_makes_keeps_and_tells_decisions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    status = cli.main(["calibrate", "--device", "cuda:0", "--minutes", "0.1", "--json", "out.json"])
    document = json.loads((tmp_path / "out.json").read_text())
    assert status == (0 if document["fit"] else 1)
    assert document["false_alarms"]["decisions"] >= 1 and document["caught"]["decisions"] >= 1
    out = capsys.readouterr().out
    assert "nothing changed" in out and "5 % more work" in out
    kept = calibration.load(detect_in_child("cuda:0"), tmp_path / "cudaforge")
    assert kept is not None and kept.fit == document["fit"]
