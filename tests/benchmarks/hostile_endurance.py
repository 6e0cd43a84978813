"""Hostile evaluations in a row on the CPU: does anything of them stay, and is the next honest verdict unchanged?

To run: `python tests/benchmarks/hostile_endurance.py [evaluations] [seed]` (default 200 and 0; about two seconds each).
Candidates are drawn from the attack suite, each with a text of its own, so that no build comes from the cache. Limits
for hangs are 1 s for a call and 5 s for a compile. Printed: verdicts by status, then what was there after the first ten
evaluations and at the end. This process adopts whatever its children leave behind, so an orphan counts as a process.
"""

from __future__ import annotations

import collections
import ctypes
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "attacks"))

from attacked import find, hostile, write_repo
from verdict_rows import REFUSED, ROWS

from pytest_cudaforge.evaluation.builder import Builder
from pytest_cudaforge.evaluation.evaluator import Evaluator, EvaluatorSettings
from pytest_cudaforge.records import Candidate, Evaluation, Target

_PR_SET_CHILD_SUBREAPER = 36
_WARM_UP = 10
#: What the table needs of a row: its name, its candidate, its target.
Attack = tuple[str, Candidate, str]


def _attacks(secret: Path) -> list[Attack]:
    """All of the suite that a defended evaluator refuses whatever the draw."""
    rows = [(row.name, row.attack, row.target) for row in ROWS if row.off not in ("seeds", "order") and not row.timing]
    found = [*rows, *((name, candidate, "waves") for name, candidate, _ in REFUSED)]
    return [(name, _with(candidate, "@SECRET@", str(secret)), target) for name, candidate, target in found]


def _with(candidate: Candidate, old: str, new: str) -> Candidate:
    return Candidate.of("cpp", {name: text.replace(old, new) for name, text in candidate.files})


def _numbered(candidate: Candidate, number: int) -> Candidate:
    source = candidate.file("kernel.cpp") + f"\n// evaluation {number}\n"
    return Candidate.of("cpp", {"kernel.cpp": source, "plan.py": candidate.file("plan.py")})


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
    evaluation = evaluator.evaluate(_numbered(hostile(), number), target, timing=False)
    assert evaluation.passed, evaluation.reason
    return evaluation


def _cases(evaluation: Evaluation) -> list[tuple[str, bool]]:
    assert evaluation.verification is not None
    return sorted((case.case, case.passed) for case in evaluation.verification.cases)


def main(count: int, seed: int) -> int:
    """Print the table; 1 where something passed that should not, or something stayed."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    assert Builder.compile.__kwdefaults__ is not None
    Builder.compile.__kwdefaults__["timeout_s"] = 5
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="endurance-") as folder:
        root = Path(folder)
        write_repo(root / "repository")
        secret = root / "repository" / "secret.h"
        secret.write_text("// an expected output\n")
        attacks = _attacks(secret)
        settings = EvaluatorSettings(cache_dir=root / "cache", hang_limit_s=1.0, lock_dir=root)
        with Evaluator(settings) as evaluator:
            return _run(evaluator, root / "repository", attacks, count, chance)


def _run(evaluator: Evaluator, repo: Path, attacks: list[Attack], count: int, chance: random.Random) -> int:
    targets = {name: find(repo, name) for name in {target for _, _, target in attacks}}
    first = _honest(evaluator, targets["waves"], -1)
    verdicts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    seconds, passed = [], []
    # Each attack as often as any other, in a drawn order.
    order = [attacks[i % len(attacks)] for i in range(count)]
    chance.shuffle(order)
    before, there = {}, _leftovers()
    for number, (name, candidate, target) in enumerate(order):
        if number == min(_WARM_UP, count // 2):
            before = _settled()
        began = time.monotonic()
        evaluation = evaluator.evaluate(_numbered(candidate, number), targets[target], timing=False)
        seconds.append(time.monotonic() - began)
        verdicts[evaluation.status.name][name] += 1
        passed += [f"{name}: {evaluation.reason}"] if evaluation.passed else []
    last = _honest(evaluator, targets["waves"], count)
    after = _settled()
    _print(verdicts, seconds, before, after)
    same = _cases(first) == _cases(last) and first.status is last.status
    left = sorted(_leftovers() - there)
    print(f"the next honest verdict: {last.status.name}, {'unchanged' if same else 'CHANGED'}, {last.seconds:.2f} s")
    print(f"new in /tmp and /dev/shm: {', '.join(left) or 'nothing'}")
    print(f"passed: {'; '.join(passed) or 'none'}")
    grown = [name for name in after if after[name] > before[name] + (8 if name.startswith("resident") else 0)]
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
    sys.exit(main(*(int(word) for word in [*sys.argv[1:], *("200", "0")[len(sys.argv) - 1 :]])))
