"""First dispatched call of a process, cold and with a warm cache of binaries. Run by hand:

    PYTHONPATH=. python tests/benchmarks/dispatch_first_call.py [--device cpu|cuda] [--processes 5]

Each sample is a process of its own that has imported torch and, on a GPU, made its CUDA context. Printed: median and
range of `apply` and of the first call, in milliseconds, of the second call for comparison, and of
`apply` and the first call together.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent

CHILD = """
import importlib.util, sys, time
import torch
file, device = sys.argv[1:]
spec = importlib.util.spec_from_file_location(file.rpartition("/")[2][:-3], file)
layers = importlib.util.module_from_spec(spec); sys.modules[spec.name] = layers; spec.loader.exec_module(layers)
model = layers.Scale(64).to(device).eval()
x = torch.randn(4, 64, device=device)
import pytest_cudaforge
with torch.no_grad():
    (x * model.weight).sum().item()
    times = [time.perf_counter()]
    report = pytest_cudaforge.apply(model)
    times.append(time.perf_counter())
    for _ in range(2):
        model(x).sum().item()
        times.append(time.perf_counter())
assert not report.fallbacks and not report.kept, str(report)
print(*((b - a) * 1e3 for a, b in zip(times, times[1:])))
"""


def sample(file: Path, device: str, cache: str) -> list[float]:
    # The package as pip installs it: byte code lies beside the sources.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"CUDAFORGE_CACHE_DIR": cache, "PYTHONPYCACHEPREFIX": str(file.parent / "bytecode")}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(file), device], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return [float(word) for word in done.stdout.split()]


def main() -> None:
    sys.path.insert(0, str(HERE))
    from dispatch_overhead import forged

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--processes", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        module = forged(Path(folder), options.device)
        sample(Path(module.__file__), options.device, tempfile.mkdtemp(dir=folder))  # leaves the byte code
        caches = {"cold": [tempfile.mkdtemp(dir=folder) for _ in range(options.processes)]}
        caches["warm"] = [caches["cold"][0]] * options.processes
        for kind, directories in caches.items():
            rows = [sample(Path(module.__file__), options.device, cache) for cache in directories]
            rows = [[*row, row[0] + row[1]] for row in rows]
            names = ("apply", "first call", "second call", "both")
            for name, values in zip(names, zip(*rows, strict=True), strict=True):
                shown = f"{statistics.median(values):8.2f} ms [{min(values):.2f}, {max(values):.2f}]"
                print(f"{kind} cache, {name:12} {shown}  ({options.processes} processes)")


if __name__ == "__main__":
    main()
