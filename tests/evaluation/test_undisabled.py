"""Modes that load no compiler, and are left alone by it once it is there; in a fresh process, since this one has it."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from pytest_cudaforge.evaluation.oracle_child import _counted
from pytest_cudaforge.evaluation.precision import Fp64Mode
from pytest_cudaforge.evaluation.undisabled import undisabled


class Plain(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


wrapped = Plain.__dict__["__torch_dispatch__"]
undisabled(Plain)
x = torch.ones(4, 4)
with Plain() as mode, Fp64Mode() as wide:
    (x + 1).sum()
assert {"add", "sum"} <= set(mode.seen) and wide.reduction == 16, (mode.seen, wide.reduction)
(flops, convolutions), product = _counted(lambda: x @ x)
assert (flops, convolutions) == (128, 0), flops
assert "torch._dynamo" not in sys.modules

compiled = torch.compile(lambda x: (x * 2).relu(), backend="eager")
with Plain() as mode:
    assert compiled(x).sum() == 32
assert "relu" in mode.seen, mode.seen
assert Plain.__dict__["__torch_dispatch__"] is wrapped
assert _counted(lambda: x @ x)[0] == (128, 0)
"""


def test_the_compiler_is_loaded_by_who_compiles_only() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
