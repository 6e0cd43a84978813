"""The note on a merge request: one, ours, changed only when its text does, and no quick action out of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cudaforge_action.context import gitlab_context
from cudaforge_action.merge_request import MergeRequestNotes, inert
from cudaforge_action.rest import ApiError
from fake_gitlab import TOKEN, FakeGitLab, fake_gitlab

from pytest_cudaforge.errors import UsageError

MARKER = "<!-- cudaforge guard -->"


@pytest.fixture
def lab() -> Iterator[FakeGitLab]:
    with fake_gitlab() as lab:
        yield lab


def notes(lab: FakeGitLab, token: str = TOKEN, waits: list[float] | None = None) -> MergeRequestNotes:
    slept = [] if waits is None else waits
    return MergeRequestNotes(gitlab_context(lab.environ), token, sleep=slept.append, clock=lambda: 1000.0)


def test_one_note_is_made_then_left_alone_then_changed_then_removed(lab: FakeGitLab) -> None:
    assert notes(lab).put(MARKER, f"{MARKER}\nall well") == "created"
    assert notes(lab).put(MARKER, f"{MARKER}\nall well\n") == "unchanged"
    assert notes(lab).put(MARKER, f"{MARKER}\nslower") == "updated"
    assert [note["body"] for note in lab.notes] == [f"{MARKER}\nslower"]
    assert len(lab.writes) == 2
    assert notes(lab).remove(MARKER) and not notes(lab).remove(MARKER)
    assert lab.notes == []


def test_ours_is_found_behind_many_and_a_strangers_marker_is_not_ours(lab: FakeGitLab) -> None:
    lab.write(f"{MARKER} gotcha", {"id": 66, "username": "mallory"})
    for number in range(150):
        lab.write(f"remark {number}", {"id": 66, "username": "mallory"})
    notes(lab).put(MARKER, f"{MARKER} one")
    assert notes(lab).put(MARKER, f"{MARKER} two") == "updated"
    assert lab.notes[0]["body"] == f"{MARKER} gotcha"
    assert [note["body"] for note in lab.notes if MARKER in note["body"]] == [f"{MARKER} gotcha", f"{MARKER} two"]


def test_quick_actions_and_references_of_others_do_nothing() -> None:
    text = "fine\n/merge\n  /assign @mallory\n> /close\n- /approve\nsee !12, a/b and https://x.org/merge, wow!"
    lines = inert(text).splitlines()
    assert not any(line.lstrip(" >-").startswith("/") for line in lines)
    assert "!12" not in inert(text)
    assert inert(text).replace("\u200b", "") == text
    assert lines[-1].endswith("a/b and https://x.org/merge, wow!")


@pytest.mark.parametrize(
    ("headers", "wait_s"), [({"Retry-After": "7"}, 7.0), ({"RateLimit-Reset": "1030"}, 31.0), ({}, 60.0)]
)
def test_a_limit_is_waited_for(lab: FakeGitLab, headers: dict[str, str], wait_s: float) -> None:
    lab.refusals = [(429, headers)]
    waits: list[float] = []
    assert notes(lab, waits=waits).put(MARKER, MARKER) == "created"
    assert waits == [wait_s]


def test_a_wrong_token_is_an_error_without_the_token(lab: FakeGitLab) -> None:
    with pytest.raises(ApiError) as caught:
        notes(lab, token="glpat-wrong").put(MARKER, MARKER)
    assert caught.value.status == 401
    assert "glpat-wrong" not in str(caught.value)


def test_a_pipeline_of_a_branch_has_nothing_to_write_on(lab: FakeGitLab) -> None:
    environ = {key: value for key, value in lab.environ.items() if "MERGE_REQUEST" not in key}
    with pytest.raises(UsageError, match="not one of a merge request"):
        MergeRequestNotes(gitlab_context(environ), TOKEN)
