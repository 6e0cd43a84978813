"""What the cases of many committed kernels cost an ordinary run of pytest.

To run: `python tests/benchmarks/cases.py [kernels] [-n WORKERS] [--keep FOLDER] [--stages]`. A repo of so many (200)
different targets is written, with one cpp kernel each that the evaluator has verified (no model, no clock); then
`pytest` runs there as a process of its own, first with no build cache (cold), then twice more (warm). Printed are
seconds from start to end of each process, its and its children's processor time, and the machine's load. With
`--keep` the repo is made once and used again; `--stages` tells instead where the time of verdicts goes.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_cudaforge.discovery import discover
from pytest_cudaforge.evaluation.child import Child
from pytest_cudaforge.evaluation.evaluator import Evaluator, EvaluatorSettings
from pytest_cudaforge.evaluation.oracle import OracleClient
from pytest_cudaforge.evaluation.zygote import _ForkServer
from pytest_cudaforge.kernel_cases import Case, Inspector
from pytest_cudaforge.publishing import publish
from pytest_cudaforge.records import Candidate, Round, Target, Trace
from pytest_cudaforge.runtime.manifest import Manifest

PER_FILE = 10
HEAD = """\
import torch
import torch.nn.functional as F
from torch import nn
from pytest_cudaforge import forge_target
"""
PLAN = """\
from pytest_cudaforge.plan import empty, launch

def plan(module, x{more}):
    y = empty({shape}, x.dtype)
    launch("kernel", args=({tensors}, x.numel() // x.shape[-1]{scalars}), constants={{"COLS": x.shape[-1]}})
    return y
"""
#: A C++ kernel that goes row by row; BODY computes `out[...]` from `in[...]`.
KERNEL = """\
#include <cmath>
#include <algorithm>

extern "C" void kernel(const float* __restrict__ x{params}, float* __restrict__ y, long long rows{scalars}) {{
#pragma omp parallel for{when}
  for (long long row = 0; row < rows; ++row) {{
    const float* in = x + row * COLS;
    float* out = y + row * {width};
{body}
  }}
}}
"""


@dataclass(frozen=True)
class Kind:
    """A way to compute something. ``C`` in the texts stands for a number that is another one in each target.

    ``weight``: a parameter of the row's length; ``reduces``: one value a row comes out.
    """

    name: str
    reference: str
    body: str
    weight: bool = False
    reduces: bool = False


def _each(expression: str) -> str:
    return f"for (int c = 0; c < COLS; ++c) {{ const float v = in[c]; out[c] = {expression}; }}"


_SUM = "double sum = 0; for (int c = 0; c < COLS; ++c) sum += {};"
_MAX = "float top = in[0]; for (int c = 1; c < COLS; ++c) top = std::max(top, in[c]);"
_SPREAD = f"{_SUM.format('in[c]')} const double mean = sum / COLS; double sq = 0; " + (
    "for (int c = 0; c < COLS; ++c) sq += (in[c] - mean) * (in[c] - mean);"
)

KINDS = (
    Kind("Silu", "F.silu(x * C)", _each("v * Cf / (1.0f + std::exp(-v * Cf))")),
    Kind("Tanh", "torch.tanh(x) * C", _each("std::tanh(v) * Cf")),
    Kind("Sigmoid", "torch.sigmoid(x * C)", _each("1.0f / (1.0f + std::exp(-v * Cf))")),
    Kind("Gelu", "F.gelu(x) + C", _each("0.5f * v * (1.0f + std::erf(v * 0.70710678118f)) + Cf")),
    Kind("Square", "F.relu(x).square() * C", _each("v > 0 ? v * v * Cf : 0.0f")),
    Kind("Swish", "F.hardswish(x) * C", _each("v * std::min(std::max(v + 3.0f, 0.0f), 6.0f) / 6.0f * Cf")),
    Kind("Clip", "x.clamp(-C, C)", _each("std::min(std::max(v, -Cf), Cf)")),
    Kind("Affine", "x * self.weight + C", _each("v * weight[c] + Cf"), weight=True),
    Kind("Elu", "F.elu(x) * C", _each("(v > 0 ? v : std::expm1(v)) * Cf")),
    Kind(
        "RMSNorm",
        "x * torch.rsqrt(x.square().mean(-1, keepdim=True) + C) * self.weight",
        _SUM.format("double(in[c]) * in[c]")
        + " const float scale = 1.0 / std::sqrt(sum / COLS + C);"
        + " for (int c = 0; c < COLS; ++c) out[c] = in[c] * scale * weight[c];",
        weight=True,
    ),
    Kind(
        "LayerNorm",
        "F.layer_norm(x, (x.shape[-1],), self.weight, None, C)",
        _SPREAD
        + " const double scale = 1.0 / std::sqrt(sq / COLS + C);"
        + " for (int c = 0; c < COLS; ++c) out[c] = (in[c] - mean) * scale * weight[c];",
        weight=True,
    ),
    Kind(
        "Softmax",
        "torch.softmax(x * C, -1)",
        _MAX
        + " double sum = 0; for (int c = 0; c < COLS; ++c) { out[c] = std::exp((in[c] - top) * Cf); sum += out[c]; }"
        + " const float scale = 1.0 / sum; for (int c = 0; c < COLS; ++c) out[c] *= scale;",
    ),
    Kind(
        "LogSoftmax",
        "torch.log_softmax(x * C, -1)",
        _MAX
        + " double sum = 0; for (int c = 0; c < COLS; ++c) sum += std::exp(double(in[c] - top) * C);"
        + " const double low = std::log(sum); for (int c = 0; c < COLS; ++c) out[c] = double(in[c] - top) * C - low;",
    ),
    Kind("Mean", "x.mean(-1) * C", _SUM.format("in[c]") + " out[0] = sum / COLS * C;", reduces=True),
    Kind("Norm", "torch.linalg.vector_norm(x, dim=-1) * C",
         _SUM.format("double(in[c]) * in[c]") + " out[0] = std::sqrt(sum) * C;", reduces=True),
    Kind("Variance", "x.var(-1) * C", _SPREAD + " out[0] = sq / (COLS - 1) * C;", reduces=True),
    Kind("Peak", "x.abs().amax(-1) * C",
         "float top = 0; for (int c = 0; c < COLS; ++c) top = std::max(top, std::fabs(in[c])); out[0] = top * Cf;",
         reduces=True),
    Kind("Dot", "(x * self.weight).sum(-1) * C",
         _SUM.format("double(in[c]) * weight[c]") + " out[0] = sum * C;", weight=True, reduces=True),
    Kind("LogSumExp", "torch.logsumexp(x * C, -1)",
         _MAX + " double sum = 0; for (int c = 0; c < COLS; ++c) sum += std::exp(double(in[c] - top) * C);"
         " out[0] = std::log(sum) + double(top) * C;", reduces=True),
    Kind("Cumsum", "torch.cumsum(x * C, -1)",
         "double sum = 0; for (int c = 0; c < COLS; ++c) { sum += double(in[c] * Cf); out[c] = sum; }"),
)  # fmt: skip


def _target(number: int) -> tuple[str, Candidate]:
    """Text of a target's class, and its kernel."""
    kind, turn = KINDS[number % len(KINDS)], number // len(KINDS)
    rows, cols, constant = 4 + 3 * turn, 32 * (1 + (number * 7) % 12), repr(0.5 + 0.125 * turn)
    weight = "        self.weight = nn.Parameter(torch.rand(cols) + 0.5)\n" if kind.weight else ""
    reference = re.sub(r"\bC\b", constant, kind.reference)
    text = (
        f"\n\n@forge_target(inputs=lambda: [torch.randn({rows}, {cols})], init=lambda: [{cols}])\n"
        f"class {kind.name}{number}(nn.Module):\n    def __init__(self, cols):\n        super().__init__()\n{weight}\n"
        f"    def forward(self, x):\n        return {reference}\n"
    )
    plan = PLAN.format(
        more="",
        shape="x.shape[:-1]" if kind.reduces else "x.shape",
        tensors="x, module.weight, y" if kind.weight else "x, y",
        scalars="",
    )
    body = re.sub(r"\bC(f?)\b", lambda match: constant + match[1], kind.body)
    params = ", const float* __restrict__ weight" if kind.weight else ""
    # A third of the kernels wakes all threads at each call.
    when = "" if turn % 3 == 0 else " if (rows * COLS > 65536)"
    source = KERNEL.format(
        when=when, params=params, scalars="", width=1 if kind.reduces else "COLS", body="    " + body
    )
    return text, Candidate.of("cpp", {"kernel.cpp": source, "plan.py": plan})


def write_repo(folder: Path, kernels: int) -> None:
    """The repo: files of ten targets each, and the verified kernels in ``forged/``."""
    candidates: dict[str, Candidate] = {}
    for start in range(0, kernels, PER_FILE):
        name, texts = f"layers_{start // PER_FILE:02d}.py", [HEAD]
        for number in range(start, min(start + PER_FILE, kernels)):
            text, candidate = _target(number)
            texts.append(text)
            candidates[f"{name}::{KINDS[number % len(KINDS)].name}{number}"] = candidate
        (folder / name).write_text("".join(texts), encoding="utf-8")
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    (folder / "test_own.py").write_text("def test_own(): pass\n", encoding="utf-8")
    with Evaluator(EvaluatorSettings(cache_dir=folder / ".first", python_paths=(str(folder),))) as evaluator:
        for target in discover([folder], folder).targets:
            _commit(evaluator, target, candidates[target.id], folder / "forged")


def _commit(evaluator: Evaluator, target: Target, candidate: Candidate, forge_dir: Path) -> None:
    verdict = evaluator.evaluate(candidate, target, timing=False)
    if not verdict.passed:
        raise SystemExit(f"{target.id}: {verdict.status.value}: {verdict.reason}")
    turn = Round(1, "first", None, candidate, verdict)
    trace = Trace(target.id, candidate.language, "forged", "correct", (turn,), winner=1, final=verdict)
    publish(trace, target, evaluator.facts(target), forge_dir)


def run(folder: Path, cache: Path, options: list[str]) -> tuple[float, float]:
    """Seconds of wall clock and of processor time of one `pytest` there."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    print(done.stdout.strip().splitlines()[-1])
    if done.returncode:
        raise SystemExit(done.stdout[-4000:] + done.stderr[-2000:])
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def stages(folder: Path, cache: Path) -> None:
    """Where the time of verdicts goes, one after another in this process: milliseconds and calls of each."""
    spent: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    _clocked(OracleClient, "_request", lambda args: f"oracle: {args[1]}", spent, calls)
    _clocked(Child, "ask", lambda args: f"child: {args[-1]}", spent, calls)
    _clocked(Child, "close", lambda args: "child: its end", spent, calls)
    _clocked(_ForkServer, "spawn", lambda args: f"child: start of a {args[1].role}", spent, calls)
    manifest = folder / "forged" / "manifest.json"
    entries = Manifest.load(manifest).entries
    settings = EvaluatorSettings(cache_dir=cache, python_paths=(str(folder),))
    with Evaluator(settings) as evaluator:
        inspector = Inspector(folder, lambda device: evaluator)
        for number, entry in enumerate(entries):
            if number == 1:  # the first one starts oracle and fork server
                spent.clear(), calls.clear()
                began = time.perf_counter()
            for workload in entry.workloads:
                inspector.check(Case(manifest, entry, workload))
    count, total = len(entries) - 1, time.perf_counter() - began
    print(f"{count} verdicts, {total / count * 1e3:.0f} ms each; load {os.getloadavg()[0]:.1f}")
    spent["all else in the supervisor"] = total - sum(spent.values())
    for name, seconds in spent.most_common():
        print(f"{name:40s} {seconds / total:6.1%} {seconds / count * 1e3:7.1f} ms {calls[name] / count:6.1f} calls")


def _clocked(kind: type, method: str, name_of: Callable[[Any], str], spent: Counter[str], calls: Counter[str]) -> None:
    """Have the time of a method's calls added up by name."""
    plain = getattr(kind, method)

    def timed(*args: Any, **kwargs: Any) -> Any:
        name, began = name_of((*args, kwargs.get("phase"))), time.perf_counter()
        try:
            return plain(*args, **kwargs)
        finally:
            spent[name] += time.perf_counter() - began
            calls[name] += 1

    setattr(kind, method, timed)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kernels", nargs="?", type=int, default=200)
    parser.add_argument("-n", dest="workers", default="")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--stages", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = asked.keep or Path(scratch) / "repo"
        if not (folder / "forged").is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            began = time.perf_counter()
            write_repo(folder, asked.kernels)
            print(f"{asked.kernels} kernels verified in {time.perf_counter() - began:.1f} s, one after another")
            shutil.rmtree(folder / ".first", ignore_errors=True)
        if asked.stages:
            stages(folder, Path(scratch) / "cache")
            return
        options = ["-n", asked.workers] if asked.workers else []
        for name in ("cold", "warm", "warm"):
            seconds, cpu = run(folder, Path(scratch) / "cache", options)
            load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
            print(f"{name}: {seconds:.1f} s, {cpu:.1f} s of processor time; load {load:.1f} on {cores} cores")


if __name__ == "__main__":
    main()
