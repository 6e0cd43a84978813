"""Onlookers: in processes of their own, as an audit hook stays for good."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

_BEGIN = """
import sys
from pytest_cudaforge.evaluation.onlookers import AUDITED, NETWORKED, ONLOOKERS, Onlookers, onlookers

def shy(frame, event, *_):
    if event in ("c_call", "line"):
        LEAVE(None)

def look():
    for place, usual in found.usual:
        if found.words[place] != usual:
            found.left = True

found = Onlookers()
"""


def _run(code: str, leave: str = "sys.setprofile") -> None:
    begin = _BEGIN.replace("LEAVE", leave)
    subprocess.run([sys.executable, "-c", begin + textwrap.dedent(code)], check=True, timeout=60)


def test_who_takes_itself_away_when_asked_for_is_seen() -> None:
    _run(
        """
        look()
        assert not found.left and found.seen == ()
        sys.setprofile(shy)
        look()
        assert sys.getprofile() is None
        assert found.seen == (ONLOOKERS,)
        """
    )


def test_who_is_told_of_lines_is_seen() -> None:
    _run("sys.settrace(shy)\nlook()\nassert found.seen == (ONLOOKERS,)", "sys.settrace")


def test_audit_hooks_are_noted_and_not_added() -> None:
    _run(
        """
        told = []
        sys.addaudithook(lambda *given: told.append(given))
        sys.audit("anything")
        assert found.seen == (AUDITED,) and told == []
        """
    )


def test_a_debugger_s_own_functions_are_left_alone() -> None:
    _run("sys.setprofile(print)\nlater = Onlookers()\nsys.setprofile(None)\nassert later.usual == ()")


@pytest.mark.parametrize("tell", ["sys.setprofile", "sys.settrace", "threading.setprofile"])
def test_who_stays_is_another_answer(tell: str) -> None:
    _run(f"import threading\nbefore = onlookers()\n{tell}(lambda *_: None)\nassert onlookers() != before")


def test_who_looks_for_the_network_is_seen() -> None:
    _run(
        """
        import socket
        socket.socketpair()
        assert found.seen == ()
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM).close()
        assert found.seen == (NETWORKED,), found.seen
        """
    )
