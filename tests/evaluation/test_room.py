"""Probes of the reference take no more memory than leaves room for judging them, and end no process."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch

from pytest_cudaforge.discovery import discover
from pytest_cudaforge.evaluation import oracle_child, room, variants
from pytest_cudaforge.evaluation.oracle import OracleClient
from pytest_cudaforge.hardware.cpu import available_bytes
from pytest_cudaforge.records import to_json

MIB = 1 << 20

TARGET = """
import torch
from pytest_cudaforge.target import forge_target


def draw():
    return torch.randn(64, 40), torch.randn(40, 64)


@forge_target(inputs=draw, dynamic=True)
def product(a, b):
    return a @ b
"""


def test_more_than_that_is_an_error_and_less_is_not() -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with room.within("cpu", 256 * MIB):
        torch.zeros(64 * MIB, dtype=torch.uint8)
        with pytest.raises(RuntimeError, match="memory"):
            torch.zeros(2048 * MIB, dtype=torch.uint8)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    torch.zeros(512 * MIB, dtype=torch.uint8)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU that torch can see")
def test_a_device_gives_no_more_either() -> None:
    free = room.free_bytes("cuda:0")
    with room.within("cuda:0", 256 * MIB):
        torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda:0")
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(2048 * MIB, dtype=torch.uint8, device="cuda:0")
    torch.zeros(2048 * MIB, dtype=torch.uint8, device="cuda:0")
    assert room.free_bytes("cuda:0") > free - 4096 * MIB


def test_a_size_that_grows_on_both_sides_of_a_product_is_not_tried(tmp_path: Path) -> None:
    """131 100 rows and as many columns are 64 GiB of answers, and several times that to judge them."""
    (tmp_path / "layers.py").write_text(TARGET)
    with OracleClient(cache_dir=tmp_path / "cache") as oracle:
        found = oracle.variants(discover([tmp_path / "layers.py"], tmp_path).targets[0], "default")
    assert any(name.startswith("size 64 -> ") for name, _ in found)
    answers = [spec.shape for _, facts in found for _, spec in facts.outputs]
    assert max(rows * columns * 4 for rows, columns in answers) <= room.share_bytes("cpu")


def test_calls_of_about_the_drawn_size_are_tried_however_much_they_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "layers.py").write_text(TARGET.replace("64, 40", "4096, 40").replace("40, 64", "40, 4096"))
    target = to_json(discover([tmp_path / "layers.py"], tmp_path).targets[0])
    monkeypatch.setattr(oracle_child, "share_bytes", lambda device: MIB)
    oracle = oracle_child._Oracle("cpu", ())
    names = [name for name, _ in oracle.do_variants(target, "default")]
    # 64 MiB of answers each; the others were stopped at one.
    assert {"strided", "strided expanded"} & set(names) and any(name.startswith("size 4096 -> ") for name in names)
    assert [name for name in names if variants.grows_far(name) and name.startswith(("size 4096", "tall 4096"))] == []


def test_what_a_container_leaves(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 4096 kB\nMemAvailable: 2048 kB\n")
    assert available_bytes(tmp_path, tmp_path) == 2 * MIB
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert available_bytes(tmp_path, tmp_path) == 600_000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes(tmp_path, tmp_path) == 2 * MIB
    assert available_bytes(tmp_path / "none", tmp_path) == 0
