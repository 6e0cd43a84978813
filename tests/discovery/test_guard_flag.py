"""Which targets ask for a guard, by their syntax alone."""

from __future__ import annotations

from pathlib import Path

from pytest_cudaforge.discovery import discover

MARKS = """
from functools import partial
from pytest_cudaforge import forge_target
half = forge_target(precision="fp16", guard=True)
third = partial(forge_target, guard=True)
plainly = forge_target
"""
LAYERS = """
import pytest_cudaforge as cf
from pytest_cudaforge import forge_target
from marks import half, third as t3, plainly
import marks as m
from torch import nn
YES = True
@forge_target
class NotSaid(nn.Module): ...
@forge_target(guard=True)
class Said(nn.Module): ...
@forge_target(guard=False)
class Denied(nn.Module): ...
@forge_target(guard=YES)
class ByName(nn.Module): ...
@forge_target(**{"guard": True})
class Unpacked(nn.Module): ...
@half
class Alias(nn.Module): ...
@t3(inputs=None)
class Partial(nn.Module): ...
@t3(guard=False)
class Overridden(nn.Module): ...
@m.half
class Dotted(nn.Module): ...
@m.plainly
class DottedPlain(nn.Module): ...
@plainly(guard=True)
class Renamed(nn.Module): ...
class Called(nn.Module): ...
Called = cf.forge_target(guard=True)(Called)
class CalledPlain(nn.Module): ...
CalledPlain = forge_target(CalledPlain)
@forge_target(guard=True)
def function(x): ...
"""


def test_guard_is_read_through_aliases_and_what_is_no_literal_is_left_open(tmp_path: Path) -> None:
    (tmp_path / "marks.py").write_text(MARKS)
    (tmp_path / "layers.py").write_text(LAYERS)

    found = {target.qualname: target.guard for target in discover([tmp_path], tmp_path).targets}

    assert {name for name, guard in found.items() if guard} == {
        *("Said", "Alias", "Partial", "Dotted", "Renamed", "Called", "function")
    }
    assert {name for name, guard in found.items() if guard is None} == {"ByName", "Unpacked"}
    assert {name for name, guard in found.items() if guard is False} == {
        *("NotSaid", "Denied", "Overridden", "DottedPlain", "CalledPlain")
    }
