"""Hostile evaluations in a row: does anything of them stay, and is the next honest verdict unchanged?

To run: `python tests/benchmarks/hostile_endurance.py [evaluations] [seed] [--device cuda:0] [--plans]` (default 200 and
0 on the CPU; about two seconds each; `--plans`: no modules, which take longest). Candidates are drawn from the attack
suite, each with a text of its own, so that no build comes from the cache. Limits for hangs are 1 s for a call and 5 s
for a compile. Printed: verdicts by status, then what was there after the first ten evaluations and at the end, on a GPU
its memory and processes as nvidia-smi tells them. This process adopts whatever its children leave behind, so an orphan
counts as a process.
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "attacks"))

import attacked
import device_attacked
import device_modules
from attacked import hostile
from device_attacked import device_kernel
from device_modules import MODULE_ENDLESS, MODULE_REFUSED, MODULE_ROWS
from device_rows import REFUSED as DEVICE_REFUSED
from device_rows import ROWS as DEVICE_ROWS
from verdict_rows import REFUSED, ROWS

from pytest_cudaforge.evaluation.builder import Builder
from pytest_cudaforge.evaluation.evaluator import Evaluator, EvaluatorSettings
from pytest_cudaforge.languages import clocks
from pytest_cudaforge.records import Candidate, Evaluation, Target

_PR_SET_CHILD_SUBREAPER = 36
_WARM_UP = 10
#: What may come and go: this process's own pages, and what torch's allocator keeps in the oracle.
_SLACK = {"resident MB of this process": 8.0, "MB of the device in use": 64.0}
#: What the table needs of a row: its name, its candidate, its target.
Attack = tuple[str, Candidate, str]


def _attacks(secret: Path) -> list[Attack]:
    """All of the suite that a defended evaluator refuses whatever the draw."""
    rows = [(row.name, row.attack, row.target) for row in ROWS if row.off not in ("seeds", "order") and not row.timing]
    found = [*rows, *((name, candidate, "waves") for name, candidate, _ in REFUSED)]
    return [(name, _with(candidate, "@SECRET@", str(secret)), target) for name, candidate, target in found]


def _device_attacks(modules: bool) -> list[Attack]:
    """As :func:`_attacks`, of launch plans and modules on a GPU; what no default refuses there is left out."""
    rows = [row for row in DEVICE_ROWS if row.off != "order" and not row.timing]
    rows += [row for row in MODULE_ROWS if modules and row.off != "sealed"]
    found = [(row.name, row.attack, row.target) for row in rows]
    found += [(name, candidate, "waves") for name, candidate, _ in DEVICE_REFUSED]
    ends = (*MODULE_REFUSED, *MODULE_ENDLESS) if modules else ()
    return found + [(name, candidate, "twice_any") for name, candidate, _ in ends]


def _with(candidate: Candidate, old: str, new: str) -> Candidate:
    return Candidate.of(candidate.language, {name: text.replace(old, new) for name, text in candidate.files})


def _numbered(candidate: Candidate, number: int) -> Candidate:
    files = dict(candidate.files)
    name = next(name for name in files if name != "plan.py")
    mark = "#" if name.endswith(".py") else "//"
    return Candidate.of(candidate.language, {**files, name: f"{files[name]}\n{mark} evaluation {number}\n"})


# -- what is there


def _descendants() -> dict[int, str]:
    """Every process below this one, orphans included, by id."""
    parents, names = {}, {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                name, _, rest = Path(entry.path, "stat").read_text().rpartition(")")
            except OSError:
                continue
            parents[int(entry.name)], names[int(entry.name)] = int(rest.split()[1]), name.partition("(")[2]
    found: dict[int, str] = {}
    grown = {os.getpid()}
    while grown:
        grown = {pid for pid, parent in parents.items() if parent in grown}
        found |= {pid: names[pid] for pid in grown}
    return found


def _count(pid: int, kind: str) -> tuple[int, int]:
    """(descriptors, arenas open or mapped) of a process."""
    try:
        links = [os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd")]
        maps = Path(f"/proc/{pid}/maps").read_text().count(kind)
    except OSError:
        return 0, 0
    return len(links), sum(kind in link for link in links) + maps


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _leftovers() -> set[str]:
    """What this project names in the shared temporary directories; other jobs may make such, too."""
    return {entry.path for folder in ("/tmp", "/dev/shm") for entry in os.scandir(folder) if "forge-" in entry.name}


def _device_inventory(uuid: str) -> dict[str, float]:
    """What the driver says is in use; a process of another namespace counts as well."""

    def ask(query: str) -> list[str]:
        command = ["nvidia-smi", query, "--format=csv,noheader,nounits", "-i", uuid]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split()

    return {
        "MB of the device in use": float(ask("--query-gpu=memory.used")[0]),
        "processes on the device": float(len(ask("--query-compute-apps=pid"))),
    }


def _settled() -> dict[str, float]:
    """The inventory with the fewest processes of two seconds: a guardian ends a moment after its child."""
    found = []
    for _ in range(20):
        found.append(_inventory())
        time.sleep(0.1)
    return min(found, key=lambda inventory: (inventory["processes below this one"], -found.index(inventory)))


def _inventory() -> dict[str, float]:
    below = _descendants()
    own, arenas = _count(os.getpid(), "cudaforge-arena")
    others = [_count(pid, "cudaforge-arena") for pid in below]
    return {
        "processes below this one": len(below),
        "descriptors of this process": own,
        "descriptors of its children": sum(count for count, _ in others),
        "arenas open or mapped anywhere": arenas + sum(count for _, count in others),
        "mounts seen from here": len(Path("/proc/self/mountinfo").read_text().splitlines()),
        "resident MB of this process": round(_resident_bytes() / 1e6, 1),
    }


# -- the run


def _honest(evaluator: Evaluator, target: Target, number: int) -> Evaluation:
    candidate = hostile() if evaluator.kind == "cpu" else device_kernel()
    evaluation = evaluator.evaluate(_numbered(candidate, number), target, timing=False)
    assert evaluation.passed, evaluation.reason
    return evaluation


def _warm_module_tier(evaluator: Evaluator, targets: dict[str, Target]) -> None:
    """Fork servers start when they are first needed; what they take is nobody's leftover."""
    for row in MODULE_ROWS:
        if row.name in ("call torch", "launch on a stream of its own"):
            evaluation = evaluator.evaluate(row.twin, targets[row.target], timing=False)
            assert evaluation.passed, evaluation.reason


def _cases(evaluation: Evaluation) -> list[tuple[str, bool]]:
    assert evaluation.verification is not None
    return sorted((case.case, case.passed) for case in evaluation.verification.cases)


def main(count: int, seed: int, device: str, modules: bool) -> int:
    """Print the table; 1 where something passed that should not, or something stayed."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    assert Builder.compile.__kwdefaults__ is not None
    Builder.compile.__kwdefaults__["timeout_s"] = 5
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="endurance-") as folder:
        root = Path(folder)
        attacks = _laid_out(root / "repository", device, modules)
        settings = EvaluatorSettings(device=device, cache_dir=root / "cache", hang_limit_s=1.0, lock_dir=root)
        if device != "cpu" and modules:
            settings = replace(settings, hang_limit_s=3.0)  # Triton compiles in the first call
        # Many tell the time, and would end as failed builds.
        with patch.object(clocks, "check", lambda _: None), Evaluator(settings) as evaluator:
            return _run(evaluator, root / "repository", attacks, count, chance)


def _laid_out(repo: Path, device: str, modules: bool) -> list[Attack]:
    """The targets on disk, and what attacks them."""
    if device != "cpu":
        device_attacked.write_repo(repo)
        (repo / "device_modules.py").write_text(device_modules.LAYERS)
        return _device_attacks(modules)
    attacked.write_repo(repo)
    secret = repo / "secret.h"
    secret.write_text("// an expected output\n")
    return _attacks(secret)


def _run(evaluator: Evaluator, repo: Path, attacks: list[Attack], count: int, chance: random.Random) -> int:
    on_gpu = evaluator.kind == "cuda"
    uuid = evaluator.device.uuid
    find = device_attacked.find if on_gpu else attacked.find
    targets = {name: find(repo, name) for name in {target for _, _, target in attacks}}
    first = _honest(evaluator, targets["waves"], -1)
    if any(candidate.language == "module" for _, candidate, _ in attacks):
        _warm_module_tier(evaluator, targets)
    verdicts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    seconds, passed = [], []
    # Each attack as often as any other, in a drawn order.
    chance.shuffle(attacks)
    order = [attacks[i % len(attacks)] for i in range(count)]
    chance.shuffle(order)
    before, there = {}, _leftovers()
    for number, (name, candidate, target) in enumerate(order):
        if number == min(_WARM_UP, count // 2):
            before = _settled() | (_device_inventory(uuid) if on_gpu else {})
            print("there now:", ", ".join(f"{name} {value:g}" for name, value in before.items()), flush=True)
        began = time.monotonic()
        evaluation = evaluator.evaluate(_numbered(candidate, number), targets[target], timing=False)
        seconds.append(time.monotonic() - began)
        verdicts[evaluation.status.name][name] += 1
        passed += [f"{name}: {evaluation.reason}"] if evaluation.passed else []
        print(f"{number:4d} {evaluation.status.name:20s} {seconds[-1]:5.1f} s  {name}", flush=True)
    last = _honest(evaluator, targets["waves"], count)
    after = _settled() | (_device_inventory(uuid) if on_gpu else {})
    _print(verdicts, seconds, before, after)
    same = _cases(first) == _cases(last) and first.status is last.status
    left = sorted(_leftovers() - there)
    print(f"the next honest verdict: {last.status.name}, {'unchanged' if same else 'CHANGED'}, {last.seconds:.2f} s")
    print(f"new in /tmp and /dev/shm: {', '.join(left) or 'nothing'}")
    print(f"passed: {'; '.join(passed) or 'none'}")
    grown = [name for name in after if after[name] > before[name] + _SLACK.get(name, 0.0)]
    print(f"grown: {', '.join(grown) or 'nothing'}; load {os.getloadavg()[0]:.1f}")
    return int(bool(passed or grown or not same))


def _print(
    verdicts: dict[str, collections.Counter[str]],
    seconds: list[float],
    before: dict[str, float],
    after: dict[str, float],
) -> None:
    print(f"{len(seconds)} hostile evaluations in {sum(seconds):.0f} s, median {statistics.median(seconds):.2f} s, "
          f"longest {max(seconds):.1f} s")  # fmt: skip
    for status, names in sorted(verdicts.items()):
        print(f"  {status:20s} {sum(names.values()):4d}   {len(names)} kinds of attack")
    print(f"{'':34s}{'after ten':>12s}{'at the end':>12s}")
    for name, value in before.items():
        print(f"{name:34s}{value:12g}{after[name]:12g}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Does anything stay of hostile evaluations?")
    parser.add_argument("evaluations", type=int, nargs="?", default=200)
    parser.add_argument("seed", type=int, nargs="?", default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--plans", action="store_true")
    arguments = parser.parse_args()
    sys.exit(main(arguments.evaluations, arguments.seed, arguments.device, not arguments.plans))
