"""kill -9 at random moments of real ``pytest --forge`` runs, then resume: what is lost, what is paid twice?

Run by hand: ``python tests/benchmarks/kill_resume.py [--kills 20] [--seed 1]``. A command provider plays both roles
and logs every call; each run is killed at a random moment, and after each kill the run directory is read as a person
would. The next run resumes. When a run comes to its end, a new repo is begun.

Printed: finished rounds lost or changed, stored replies lost or changed, calls made again although their reply was
stored, and processes left behind. Calls that were under way at the kill are asked again and counted apart: nobody had
received their reply.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

TARGET = """
import torch
from torch import nn
from pytest_cudaforge import forge_target

@forge_target(inputs=lambda: [torch.randn(32, 512)])
class Scale(nn.Module):
    def forward(self, x):
        return x * 2.0 + 1.0
"""

SETTINGS = """
rounds: {rounds}
patience: 99
roofline_stop: 99
min_headroom: 0
device: cpu
chat:
  coder: {{provider: command}}
  judge: {{provider: command}}
  command: {{argv: [{python}, {agent}, {log}]}}
"""

AGENT = """
import json, os, sys, time
role, number = os.environ["CUDAFORGE_ROLE"], int(os.environ["CUDAFORGE_ROUND"])
def log(event):
    line = json.dumps({"event": event, "role": role, "round": number, "time": time.time()}) + chr(10)
    with open(sys.argv[1], "a") as stream:
        stream.write(line)
log("start")
sys.stdin.read()
time.sleep(0.25)
if role == "judge":
    keys = ("issue", "why", "fix", "bottleneck", "plan")
    said = dict.fromkeys(keys, "as it is") | {"method": f"idea {number}", "place": "scale", "cites": ["1 launch"]}
    print(json.dumps(said))
else:
    count = "rows" if number % 3 else "not_declared"
    print(f'''```cpp kernel.cpp
// round {number}
extern "C" void scale(const float* x, float* y, long long rows) {{
  for (long long i = 0; i < {count}; ++i) y[i] = x[i] * 2.0f + 1.0f;
}}
```
```python plan.py
from pytest_cudaforge.plan import empty, launch

def plan(module, x):
    y = empty(x.shape, x.dtype)
    launch("scale", args=(x, y, x.numel()))
    return y
```''')
sys.stdout.flush()
log("done")
"""

ROUNDS = 9


@dataclass
class Tally:
    kills: int = 0
    runs_completed: int = 0
    rounds_seen: int = 0
    rounds_lost: int = 0
    replies_lost: int = 0
    paid_twice: int = 0
    under_way: int = 0
    answered_but_not_stored: int = 0
    orphans: int = 0
    moments: Counter[str] = field(default_factory=Counter)


@dataclass
class Snapshot:
    """What was on disk right after a kill: path below the run directory -> bytes. ``unstored``: calls whose program
    had ended before the kill, without its reply on disk."""

    rounds: dict[str, bytes]
    replies: dict[str, bytes]
    log_lines: int
    unstored: int

    @classmethod
    def of(cls, repo: Path, killed_at: float = float("inf")) -> Snapshot:
        runs = repo / ".cudaforge" / "runs"
        read = {
            kind: {
                str(path.relative_to(runs)): path.read_bytes() for path in sorted(runs.glob(f"*/cpp/round-*/{name}"))
            }
            for kind, name in (("rounds", "round.json"), ("replies", "*reply.md"))
        }
        log = calls(repo)
        answered = {(entry["role"], entry["round"]) for entry in log if _ended(entry, killed_at)}
        return cls(**read, log_lines=len(log), unstored=len(answered - {_call_of(name) for name in read["replies"]}))


def calls(repo: Path) -> list[dict[str, object]]:
    log = repo / "calls.jsonl"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def make_repo(folder: Path) -> Path:
    repo = folder / f"repo-{len(list(folder.iterdir()))}"
    repo.mkdir()
    (repo / "layers.py").write_text(TARGET)
    (repo / "agent.py").write_text(AGENT)
    settings = SETTINGS.format(rounds=ROUNDS, python=sys.executable, agent=repo / "agent.py", log=repo / "calls.jsonl")
    (repo / "cudaforge.yaml").write_text(settings)
    return repo


def start(repo: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--forge", "layers.py"]
    with open(repo / "out.txt", "ab") as output:
        return subprocess.Popen(command, cwd=repo, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)


def wait_for_work(repo: Path, run: subprocess.Popen[bytes], before: int) -> None:
    """Until the run has made its first call: before it there is nothing to lose."""
    while run.poll() is None and len(calls(repo)) <= before:
        time.sleep(0.01)


def _ended(entry: dict[str, object], killed_at: float) -> bool:
    # The program is in a group of its own and outlives a kill by the rest of its answer.
    return entry["event"] == "done" and float(str(entry["time"])) <= killed_at


def kill_once(repo: Path, rng: random.Random, tally: Tally, play_s: float) -> float | None:
    """Start or resume, kill at a random moment and return it; None where the run came to its end before."""
    run = start(repo)
    begin = time.monotonic()
    if rng.random() < 0.8:
        wait_for_work(repo, run, len(calls(repo)))
        phase = "playing"
        delay_s = rng.uniform(0, play_s)
    else:
        phase = "anywhere"
        delay_s = rng.uniform(0, 20)
    try:
        run.wait(delay_s)
    except subprocess.TimeoutExpired:
        killed_at = time.time()
        os.kill(run.pid, signal.SIGKILL)
        run.wait()
        tally.kills += 1
        tally.moments[phase] += 1
        print(f"kill {tally.kills:2}: {phase}, {time.monotonic() - begin:5.1f} s after the start", flush=True)
        return killed_at
    return None


def judge_run(repo: Path, snapshots: list[Snapshot], tally: Tally) -> None:
    """Compare the end of a run with everything that was on disk after its kills."""
    end, log = Snapshot.of(repo), calls(repo)
    for snapshot in snapshots:
        tally.rounds_seen += len(snapshot.rounds)
        tally.rounds_lost += sum(end.rounds.get(name) != data for name, data in snapshot.rounds.items())
        tally.replies_lost += sum(end.replies.get(name) != data for name, data in snapshot.replies.items())
        again = {(entry["role"], entry["round"]) for entry in log[snapshot.log_lines :] if entry["event"] == "start"}
        tally.paid_twice += len(again & {_call_of(name) for name in snapshot.replies})
    starts = Counter((entry["role"], entry["round"]) for entry in log if entry["event"] == "start")
    tally.under_way += sum(starts.values()) - len(starts)
    tally.answered_but_not_stored += sum(snapshot.unstored for snapshot in snapshots)


def _call_of(name: str) -> tuple[str, int]:
    folder, file = Path(name).parent.name, Path(name).name
    return ("judge" if file.startswith("judge") else "coder", int(folder.removeprefix("round-")))


def orphans_of(repo: Path) -> int:
    """Processes of killed runs that are still there 3 s later: those that have the repo's path in their arguments."""
    time.sleep(3.0)
    found = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += str(repo).encode() in path.read_bytes()
        except OSError:  # it ended meanwhile
            continue
    return found


def run_to_the_end(repo: Path) -> str:
    run = start(repo)
    run.wait()
    traces = list((repo / ".cudaforge" / "runs").glob("*/cpp/trace.json"))
    return str(json.loads(traces[0].read_text())["outcome"]) if traces else (repo / "out.txt").read_text()[-2000:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--play-s", type=float, default=4.0, help="longest delay after a run's first call")
    options = parser.parse_args()
    rng, tally = random.Random(options.seed), Tally()
    with tempfile.TemporaryDirectory(prefix="cudaforge-kill-") as folder:
        while tally.kills < options.kills:
            repo, snapshots = make_repo(Path(folder)), []
            while tally.kills < options.kills and (killed_at := kill_once(repo, rng, tally, options.play_s)):
                snapshots.append(Snapshot.of(repo, killed_at))
            outcome = run_to_the_end(repo)
            tally.runs_completed += 1
            judge_run(repo, snapshots, tally)
            tally.orphans += orphans_of(repo)
            print(f"resumed to its end: {outcome}, {len(Snapshot.of(repo).rounds)} rounds", flush=True)
    print(f"kills: {tally.kills} ({dict(tally.moments)}), runs resumed to their end: {tally.runs_completed}")
    print(f"finished rounds seen after kills: {tally.rounds_seen}, lost or changed: {tally.rounds_lost}")
    print(f"stored replies lost or changed: {tally.replies_lost}, stored replies paid twice: {tally.paid_twice}")
    print(
        f"calls under way at a kill, asked again: {tally.under_way}; of these the program had just ended, "
        f"its reply not yet stored: {tally.answered_but_not_stored}"
    )
    print(f"processes left behind: {tally.orphans}")
    return 1 if tally.rounds_lost or tally.replies_lost or tally.paid_twice or tally.orphans else 0


if __name__ == "__main__":
    sys.exit(main())
