"""How long does the scan for targets take over 10 000 Python files? To run: `python tests/benchmarks/discovery.py`.

The tree is made of real files (this interpreter's standard library, repeated), 100 targets and one re-exported alias
among them, so that both passes over the bytes are paid for.
"""

from __future__ import annotations

import statistics
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from pytest_cudaforge.discovery import discover

FILES = 10_000
TARGETS = 100
RUNS = 5
LIMIT_S = 3.0

TARGET = """import torch
from torch import nn

from {module} import {name}


@{name}(inputs=lambda: [torch.randn(4, 8)])
class Norm(nn.Module):
    def forward(self, x):
        return x / x.norm()
"""


def library_files() -> list[bytes]:
    """Python files of the standard library, as bytes."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    found = [path for path in sorted(folder.rglob("*.py")) if not {"site-packages", "test"} & set(path.parts)]
    return [path.read_bytes() for path in found]


def make_tree(root: Path) -> int:
    """Write the tree; returns its size in bytes."""
    bodies = library_files()
    (root / "marks.py").write_text("from pytest_cudaforge import forge_target as forged\n")
    total = 0
    for number in range(FILES - TARGETS - 1):
        folder = root / f"package{number // 100}"
        folder.mkdir(exist_ok=True)
        body = bodies[number % len(bodies)]
        (folder / f"module{number}.py").write_bytes(body)
        total += len(body)
    for number in range(TARGETS):
        module, name = ("marks", "forged") if number % 2 else ("pytest_cudaforge", "forge_target")
        (root / f"target{number}.py").write_text(TARGET.format(module=module, name=name))
    return total


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        total_bytes = make_tree(Path(folder))
        seconds = []
        for _ in range(RUNS):
            start = time.perf_counter()
            found = discover([folder], folder)
            seconds.append(time.perf_counter() - start)
            assert len(found.targets) == TARGETS and found.files == FILES, (len(found.targets), found.files)
    median_s = statistics.median(seconds)
    print(f"{FILES} files, {total_bytes / 1e6:.0f} MB, {TARGETS} targets: median {median_s:.2f} s of {RUNS} runs")
    print(f"slowest {max(seconds):.2f} s; wanted: under {LIMIT_S} s")
    return 0 if median_s < LIMIT_S else 1


if __name__ == "__main__":
    sys.exit(main())
