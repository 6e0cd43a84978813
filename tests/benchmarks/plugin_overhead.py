"""What does the installed plugin cost a run that does not use it? Run: `python tests/benchmarks/plugin_overhead.py`.

Interleaved pairs of one-test pytest processes, with the plugin and with `-p no:cudaforge`, in changing order; every
other installed plugin is blocked in both, so that their imports do not water the ratio down.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import entry_points
from pathlib import Path

PAIRS = 60
LIMIT = 1.03


def one_run(folder: str, options: list[str]) -> float:
    """Seconds of wall clock of one pytest process."""
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, "test_one.py"]
    start = time.perf_counter()
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start
    assert done.returncode == 0, done.stdout + done.stderr
    return seconds


def main() -> int:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else PAIRS
    others = sorted({point.name for point in entry_points(group="pytest11")} - {"cudaforge"})
    blocked = [word for name in others for word in ("-p", f"no:{name}")]
    variants = {"with": blocked, "without": [*blocked, "-p", "no:cudaforge"]}
    seconds: dict[str, list[float]] = {"with": [], "without": []}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "test_one.py").write_text("def test_one():\n    assert 1 + 1 == 2\n")
        (Path(folder) / "pytest.ini").write_text("[pytest]\n")
        for name in variants:
            one_run(folder, variants[name])  # warm: byte code, page cache
        for number in range(pairs):
            for name in sorted(variants, reverse=bool(number % 2)):
                seconds[name].append(one_run(folder, variants[name]))
    ratios = [a / b for a, b in zip(seconds["with"], seconds["without"], strict=True)]
    ratio = statistics.median(seconds["with"]) / statistics.median(seconds["without"])
    quarters = statistics.quantiles(ratios, n=4)
    print(f"{pairs} pairs: with {statistics.median(seconds['with']) * 1e3:.1f} ms, "
          f"without {statistics.median(seconds['without']) * 1e3:.1f} ms")  # fmt: skip
    print(f"median of paired ratios {quarters[1]:.4f} (quartiles {quarters[0]:.4f} to {quarters[2]:.4f}), "
          f"ratio of medians {ratio:.4f}; wanted: at most {LIMIT}")  # fmt: skip
    return 0 if quarters[1] <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
