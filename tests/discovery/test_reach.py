"""Are two versions of a target surely the same code? Whole files of all that its import runs; in doubt they are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_cudaforge.discovery import discover
from pytest_cudaforge.reach import difference
from pytest_cudaforge.records import Target

FILES = {
    "src/pack/__init__.py": "from . import flags\n",
    "src/pack/flags.py": "FAST = True\n",
    "src/pack/ops/__init__.py": "",
    "src/pack/ops/norms.py": "import math\nimport torch\n\ndef norm(x):\n    return x\n",
    "src/pack/other.py": "unused = 1\n",
    "bench/layers.py": """
import torch
from torch import nn
from pack.ops.norms import norm
from pytest_cudaforge import forge_target

@forge_target(guard=True, inputs=lambda: [torch.randn(4)])
class Norm(nn.Module):
    def forward(self, x):
        return norm(x)
""",
    "README.md": "",
}


def _version(root: Path, **changed: str) -> Target:
    for name, text in {**FILES, **changed}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return discover([root / "bench"], root).targets[0]


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("README.md", "other", ""),
        ("src/pack/other.py", "unused = 2\n", ""),
        # An absolute import into src/, a file that only runs because its package does, a line no name leads to.
        ("src/pack/ops/norms.py", "def norm(x):\n    return x + 0\n", "src/pack/ops/norms.py changed"),
        ("src/pack/flags.py", "FAST = False\n", "src/pack/flags.py changed"),
        ("bench/layers.py", FILES["bench/layers.py"] + "\ntorch.set_num_threads(1)\n", "bench/layers.py changed"),
    ],
)
def test_what_its_import_runs_counts_and_nothing_else(tmp_path: Path, name: str, text: str, told: str) -> None:
    base, head = _version(tmp_path / "base"), _version(tmp_path / "head", **{name: text})
    assert difference(head, base) == told


@pytest.mark.parametrize(
    "text",
    [
        "from . import _C\n",
        "import importlib\nhidden = importlib.import_module('pack.hidden')\n",
        "from torch.utils import cpp_extension\n",
        "TABLE = open('table.bin').read()\n",
        "import sys\nsys.path.insert(0, 'elsewhere')\n",
        "def norm(x:\n",
    ],
)
def test_in_doubt_they_differ(tmp_path: Path, text: str) -> None:
    changed = {"src/pack/ops/norms.py": f"def norm(x):\n    return x\n\n{text}"}
    base, head = _version(tmp_path / "base", **changed), _version(tmp_path / "head", **changed)
    assert difference(head, base).startswith("what it runs cannot be told: src/pack/ops/norms.py")
