"""Timed processes go first where the system allows it, and only as long as they are timed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from pytest_cudaforge.evaluation.priority import NICE, favoured


def priorities(pid: int) -> tuple[int, str]:
    # Empty in a control group of its own, as in most containers: sessions are not scheduled as groups there.
    group = Path(f"/proc/{pid}/autogroup")
    return os.getpriority(os.PRIO_PROCESS, pid), "".join(group.read_text().split()[-1:]) if group.exists() else ""


def test_for_as_long_as_it_lasts() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True) as child:
        before, own = priorities(child.pid), priorities(os.getpid())
        with favoured({child.pid, os.getpid()}):
            # Without the privilege nothing happens.
            assert priorities(child.pid)[0] in (NICE, before[0])
            assert priorities(child.pid)[1] in (str(NICE), before[1])
            # Whoever sits at the terminal has our session, too.
            assert priorities(os.getpid())[1] == own[1]
        assert (priorities(child.pid), priorities(os.getpid())) == (before, own)
        child.communicate(b"\n")
    with favoured({child.pid}):
        pass
