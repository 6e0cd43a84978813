"""The run directory: durable before the next step, resumed exactly, readable, clear when it cannot be written."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest
from flow_records import make_candidate, make_evaluation, make_round, make_target

from pytest_cudaforge.errors import StoreError
from pytest_cudaforge.records import Feedback, Profile, ProfiledKernel, Proposal, Status, Trace, Usage
from pytest_cudaforge.store import RunStore, StoredReply, TargetStore, total_usage

FIRST = Proposal("first", None)


def opened(tmp_path: Path, **changes: object) -> TargetStore:
    store = RunStore(tmp_path / ".cudaforge").target(replace(make_target(tmp_path), **changes), "cpp")  # type: ignore[arg-type]
    assert store.acquire() is None
    store.open(config_digest="c", device="cpu")
    return store


def test_a_round_comes_back_as_it_was(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for entry in (make_round(1, status=Status.INCORRECT_NUMERICAL), make_round(2, "correction", 1)):
        folder = store.round(entry.number)
        folder.begin(lambda: FIRST)
        folder.finish(entry)
    store.release()
    assert opened(tmp_path).rounds() == (
        make_round(1, status=Status.INCORRECT_NUMERICAL),
        make_round(2, "correction", 1),
    )


def test_every_step_is_a_file_a_person_can_read(tmp_path: Path) -> None:
    store = opened(tmp_path)
    folder = store.round(1)
    folder.begin(lambda: FIRST)
    folder.write_prompt("coder", "You write kernels.\n\nForge Scale.\n")
    folder.write_reply("coder", StoredReply("```cpp kernel.cpp\nint x;\n```", "m", Usage(10, 5, 0, 0.01)))
    candidate = make_candidate()
    folder.write_candidate(candidate)
    folder.write_evaluation(make_evaluation(candidate))
    folder.write_feedback(Feedback("correction", "i", "w", "a"))
    names = {path.name for path in folder.directory.iterdir()}
    assert names == {
        "proposal.json", "prompt.md", "reply.md", "kernel.cpp", "plan.py", "evaluation.json", "feedback.json",
    }  # fmt: skip
    assert "Forge Scale." in (folder.directory / "prompt.md").read_text()
    assert (folder.directory / "kernel.cpp").read_text() == "// a\n"
    assert (tmp_path / ".cudaforge" / ".gitignore").read_text() == "*\n"


@pytest.mark.parametrize("text", ["", "a\r\nb\n", "ends with -->\n\n", "<!-- cudaforge {} -->", "π \ud800 end"])
def test_a_reply_comes_back_byte_for_byte_with_its_price(tmp_path: Path, text: str) -> None:
    folder = opened(tmp_path).round(1)
    folder.begin(lambda: FIRST)
    reply = StoredReply(text, "a --> model", Usage(10, 5, 2, 0.25), 1.5, "digest", "note")
    stored = folder.write_reply("coder", reply)
    assert folder.reply("coder") == stored
    assert stored == replace(reply, text=text.replace("\ud800", "?"))
    assert folder.reply("judge") is None
    assert folder.usage() == Usage(10, 5, 2, 0.25)


def test_a_begun_round_keeps_its_proposal(tmp_path: Path) -> None:
    folder = opened(tmp_path).round(2)
    assert not folder.begun
    folder.begin(lambda: Proposal("optimization", 1))
    assert folder.begin(lambda: FIRST) == Proposal("optimization", 1)
    assert folder.begun


def test_rounds_end_at_the_first_unfinished_one(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for number in (1, 3):
        store.round(number).begin(lambda: FIRST)
        store.round(number).finish(make_round(number))
    assert [entry.number for entry in store.rounds()] == [1]


def test_a_changed_reference_moves_only_its_own_rounds_aside(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.round(1).begin(lambda: FIRST)
    store.round(1).finish(make_round(1))
    other = RunStore(tmp_path / ".cudaforge").target(make_target(tmp_path, "other"), "cpp")
    assert other.acquire() is None
    other.open(config_digest="c", device="cpu")
    other.round(1).begin(lambda: FIRST)
    other.round(1).finish(make_round(1))
    store.release()

    changed = RunStore(tmp_path / ".cudaforge").target(make_target(tmp_path, digest="d2"), "cpp")
    assert changed.acquire() is None
    notes = changed.open(config_digest="c", device="cpu")
    assert "the reference changed: the earlier rounds were moved to" in notes[0]
    assert changed.rounds() == ()
    assert (changed.directory.parent / "cpp.old-1" / "round-01" / "round.json").exists()
    assert len(other.rounds()) == 1


@pytest.mark.parametrize(
    ("arguments", "note", "kept"),
    [
        ({"fresh": True}, "--forge-fresh was given", 0),
        ({"device": "cuda:NVIDIA H200"}, "measured on 'cpu'", 0),
        ({"config_digest": "other"}, "configuration changed", 1),
        ({}, "", 1),
    ],
)
def test_what_a_second_run_keeps(tmp_path: Path, arguments: dict[str, object], note: str, kept: int) -> None:
    store = opened(tmp_path)
    store.round(1).begin(lambda: FIRST)
    store.round(1).finish(make_round(1))
    notes = store.open(**{"config_digest": "c", "device": "cpu", **arguments})  # type: ignore[arg-type]
    assert note in "".join(notes)
    assert len(store.rounds()) == kept


def test_a_second_run_is_told_who_holds_the_target(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import sys, time; from pathlib import Path
        sys.path.insert(0, sys.argv[2])
        from flow_records import make_target; from pytest_cudaforge.store import RunStore
        root = Path(sys.argv[1])
        store = RunStore(root / ".cudaforge").target(make_target(root), "cpp")
        assert store.acquire() is None
        print("held", flush=True); time.sleep(60)
        """
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path), str(Path(__file__).parents[1])], stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        store = RunStore(tmp_path / ".cudaforge").target(make_target(tmp_path), "cpp")
        assert str(holder.pid) in str(store.acquire())
    finally:
        holder.kill()
        holder.wait()
    assert store.acquire() is None, "a killed run's lock is free at once"
    store.release()


def test_a_killed_writer_leaves_whole_files(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import sys; from pathlib import Path
        from pytest_cudaforge import durable
        while True:
            for letter in "ab":
                durable.write_file(Path(sys.argv[1]) / "x", letter * 200_000)
        """
    )
    for attempt in range(5):
        writer = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)])
        while not (tmp_path / "x").exists():
            time.sleep(0.01)
        time.sleep(0.01 * attempt)
        writer.kill()
        writer.wait()
        text = (tmp_path / "x").read_text()
        assert len(text) == 200_000
        assert len(set(text)) == 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("round.json", "{", "not JSON"),
        ("round.json", '{"number": "x"}', "Round.number"),
        ("reply.md", "no header", "first line"),
    ],
)
def test_a_file_edited_by_hand_is_named_with_the_way_out(tmp_path: Path, name: str, content: str, message: str) -> None:
    store = opened(tmp_path)
    store.round(1).begin(lambda: FIRST)
    (store.round(1).directory / name).write_text(content)
    with pytest.raises(StoreError, match=message) as caught:
        store.round(1).finished()
        store.round(1).reply("coder")
    assert "--forge-fresh" in str(caught.value)


def test_two_targets_of_one_slug_are_told_apart(tmp_path: Path) -> None:
    store = opened(tmp_path)
    path = store.directory / "target.json"
    path.write_text(path.read_text().replace("layers.py::scale", "other.py::scale"))
    with pytest.raises(StoreError, match=r"belongs to 'other\.py::scale'"):
        store.open(config_digest="c", device="cpu")


def test_a_run_directory_that_is_a_file_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / ".cudaforge").write_text("")
    with pytest.raises(StoreError, match="set run_dir to another folder"):
        RunStore(tmp_path / ".cudaforge").target(make_target(tmp_path), "cpp").acquire()


IN_A_SMALL_DISK = """
import sys; from pathlib import Path
sys.path.insert(0, sys.argv[2])
from flow_records import make_target; from pytest_cudaforge.errors import StoreError
from pytest_cudaforge.records import Proposal; from pytest_cudaforge.store import *
store = RunStore(Path(sys.argv[1]) / ".cudaforge").target(make_target(Path("/")), "cpp")
try:
    assert store.acquire() is None
    store.open(config_digest="c", device="cpu")
    store.round(1).begin(lambda: Proposal("first", None))
    store.round(1).write_reply("coder", StoredReply("x" * 10_000_000, "m"))
except StoreError as error:
    print(error); print(sorted(p.name for p in Path(sys.argv[1]).rglob("*.tmp")))
"""


@pytest.mark.parametrize(
    ("options", "message"), [("size=256k", "No space left on device"), ("ro,size=256k", "Read-only file system")]
)
def test_a_full_or_read_only_disk_is_a_store_error(tmp_path: Path, options: str, message: str) -> None:
    if subprocess.run(["unshare", "-rm", "true"], check=False, capture_output=True).returncode:
        pytest.skip("this machine allows no user namespace, so no small disk can be mounted")
    command = f'mount -t tmpfs -o {options} none "$1" && exec "$0" -c "$2" "$1" "$3"'
    arguments = [sys.executable, str(tmp_path), IN_A_SMALL_DISK, str(Path(__file__).parents[1])]
    result = subprocess.run(
        ["unshare", "-rm", "sh", "-c", command, *arguments], check=False, capture_output=True, text=True, env=os.environ
    )
    assert message in result.stdout, result.stderr
    assert "to do: free space or set run_dir" in result.stdout
    assert result.stdout.endswith("[]\n"), "no torn file is left"


def test_the_outcome_is_kept(tmp_path: Path) -> None:
    store = opened(tmp_path)
    assert store.trace() is None
    trace = Trace("layers.py::scale", "cpp", "forged", "2x", (make_round(1),), 1)
    store.write_trace(trace)
    assert store.trace() == trace


def test_an_unknown_price_makes_the_sum_unknown() -> None:
    assert total_usage([Usage(1, 1, 0, 0.5), Usage(2, 2, 0, None)]) == Usage(3, 3, 0, None)
    assert total_usage([Usage(1, 1, 0, 0.5), Usage(2, 2, 1, 0.25)]) == Usage(3, 3, 1, 0.75)
    assert total_usage([Usage(1, 1, 0, 0.5), Usage()]) == Usage(1, 1, 0, 0.5), "a round without a call costs nothing"
    assert total_usage([]) == Usage()


def test_a_profile_of_hostile_values_is_kept(tmp_path: Path) -> None:
    folder = opened(tmp_path).round(1)
    folder.begin(lambda: Proposal("first", None))
    kernel = ProfiledKernel("half a character \ud800", True, 1, 1.0, metrics=(("rate", float("inf"), "byte/s"),))
    kept = folder.write_profile(Profile("cupti", "quick", "digest", "w", (kernel,)))
    stored = folder.profile()
    assert stored is not None and stored == kept and stored.kernels[0].metrics == kernel.metrics
    assert stored.kernels[0].function == "half a character ?"
