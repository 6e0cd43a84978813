"""Ctrl-C, once and twice, pressed in a real `pytest --forge` while a reply is under way."""

from __future__ import annotations

from pathlib import Path

import forge_repo
import pytest


@pytest.mark.parametrize(
    ("presses", "reply_takes_s", "message"),
    [(1, 1.5, "forging was stopped by Ctrl-C"), (2, 4.0, "KeyboardInterrupt")],
    ids=["once", "twice"],
)
def test_ctrl_c(tmp_path: Path, presses: int, reply_takes_s: float, message: str) -> None:
    folder = forge_repo.write(tmp_path)
    status, output = forge_repo.interrupted(folder, presses, reply_takes_s=reply_takes_s)
    assert status == pytest.ExitCode.INTERRUPTED, output
    assert message in output and "INTERNALERROR" not in output
    assert ("reply.md" in {path.name for path in folder.rglob("*.md")}) is (presses == 1), "a reply is never lost"
