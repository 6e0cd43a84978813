"""A small repo whose targets a scripted model forges, as the tests of the plugin and the command line use it."""

from __future__ import annotations

import importlib.metadata
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

#: The kernel is faster by far on any machine, and not by so much (ten times) that it has to be measured twice.
LAYERS = """
import torch
from torch import nn
from pytest_cudaforge import forge_target


@forge_target(inputs=lambda: [torch.randn(64, 512)], init=lambda: [512])
class PeakNorm(nn.Module):
    def __init__(self, cols, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(cols))

    def forward(self, x):
        peak = x.abs().amax(dim=-1, keepdim=True)
        return x / (peak + self.eps) * self.weight
"""
RAISES = """
from torch import nn
from pytest_cudaforge import forge_target


@forge_target(inputs=lambda: 1 / 0)
class Raises(nn.Module):
    def forward(self, x):
        return x
"""
PLAN = """
from pytest_cudaforge.plan import empty, launch

def plan(module, x):
    cols = x.shape[-1]
    y = empty(x.shape, x.dtype)
    launch("peak_norm", args=(x, module.weight, y, x.numel() // cols, module.eps), constants={"COLS": cols})
    return y
"""
KERNEL = """
#include <cmath>
extern "C" void peak_norm(const float* __restrict__ x, const float* __restrict__ w, float* __restrict__ y,
                          long long rows, float eps) {
  for (long long row = 0; row < rows; ++row) {
    const float* in = x + row * COLS;
    float peak = 0.0f;
#pragma omp simd reduction(max : peak)
    for (int c = 0; c < COLS; ++c) { float m = std::fabs(in[c]); peak = m > peak ? m : peak; }
    const float divisor = peak + eps;
    for (int c = 0; c < COLS; ++c) y[row * COLS + c] = in[c] / divisor * SCALE;
  }
}
"""
CHAT = f"""
import asyncio
import os

from pytest_cudaforge.chat.scripted import ScriptedModel

class SlowModel(ScriptedModel):
    # Answers after SCRIPTED_DELAY_S seconds, so that a test can press Ctrl-C meanwhile.
    async def complete(self, request):
        await asyncio.sleep(float(os.environ.get("SCRIPTED_DELAY_S", "0")))
        return await super().complete(request)

def reply(scale):
    kernel = {KERNEL!r}.replace("SCALE", scale)
    return f"```cpp kernel.cpp\\n{{kernel}}\\n```\\n\\n```python plan.py\\n" + {PLAN!r} + "\\n```\\n"

CORRECTION = '{{"issue": "wrong", "why": "it is", "fix": "mend it"}}'

def make(config, role):
    return SlowModel({{"coder": [reply("weight[c]"), reply("w[c]")], "judge": [CORRECTION]}})
"""
SETTINGS = """
device: cpu
rounds: 2
min_headroom: 0
roofline_stop: 99
timing_budget_s: 0.3
chat:
  coder: {provider: "scripted_chat:make"}
  judge: {provider: "scripted_chat:make"}
"""
#: Prints, at the end of a run, what the pytest process must never have imported.
CONFTEST = """
import sys

def pytest_unconfigure(config):
    if not hasattr(config, "workerinput"):
        print("IMPORTED", [name for name in ("torch", "layers", "raises", "cuda") if name in sys.modules])
"""


def write(folder: Path, *, raises: bool = False) -> Path:
    """The repo in ``folder``: one target that is forged in its second round and, where wanted, one that cannot be."""
    files = {
        "layers.py": LAYERS,
        "scripted_chat.py": CHAT,
        "cudaforge.yaml": SETTINGS,
        "conftest.py": CONFTEST,
        "pytest.ini": "[pytest]\n",
        "test_own.py": "def test_own(): pass\n",
    }
    for name, text in (files | ({"raises.py": RAISES} if raises else {})).items():
        (folder / name).write_text(text.lstrip())
    return folder


def _plugin() -> list[str]:
    """Where the package is only on the path, pytest has to be told of its plugin."""
    known = importlib.metadata.entry_points(group="pytest11", name="cudaforge")
    return [] if known else ["-p", "pytest_cudaforge.plugin"]


def pytest_in(folder: Path, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run pytest there in its own process, without the slow plugins of this environment."""
    argv = [sys.executable, "-m", "pytest", "-p", "no:hypothesispytest", "-p", "no:anyio", *_plugin(), *options]
    environment = {**os.environ, **variables}
    return subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def forge(folder: Path, *options: str) -> str:
    """Forge the repo that :func:`write` wrote there; what the run printed. It leaves junit.xml, out/report.json and the
    conversation in talk.jsonl.

    Where others keep the machine so busy that no sitting says that the kernel is the faster one, it is tried again.
    """
    files = ("--junit-xml=junit.xml", "--forge-json=out/report.json", "--forge-record=talk.jsonl")
    manifest = folder / "forged" / "manifest.json"
    before = manifest.read_bytes() if manifest.is_file() else b""
    for attempt in range(5):
        again = ("--forge-fresh",) if attempt else ()
        (folder / "talk.jsonl").unlink(missing_ok=True)
        done = pytest_in(folder, "--forge", *files, *options, *again)
        if manifest.is_file() and manifest.read_bytes() != before:
            break
    return done.stdout + done.stderr


def case_in(folder: Path) -> str:
    """The id of the one case of the forged repo."""
    (kernel,) = (folder / "forged").glob("peak_norm-*")
    return f"forged/{kernel.name}/cpu/plan.py::case[default]"


def interrupted(folder: Path, presses: int, *options: str, reply_takes_s: float) -> tuple[int, str]:
    """`pytest --forge` there, with Ctrl-C pressed so often once the first reply is under way: exit status, output."""
    argv = [sys.executable, "-m", "pytest", "-p", "no:hypothesispytest", *_plugin(), "--forge", "-v", *options]
    environment = {**os.environ, "SCRIPTED_DELAY_S": str(reply_takes_s), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        argv,
        cwd=folder,
        env=environment,
        text=True,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if " asked" in line:
                break
        for _ in range(presses):
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to everybody in the foreground
            time.sleep(0.5)
        lines += process.stdout.readlines()
        return process.wait(timeout=60), "".join(lines)
