"""What a step says to GitHub's runner, read back as the runner reads it; whatever is printed stays text."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cudaforge_action import workflow
from cudaforge_action.github import GitHubHost
from cudaforge_action.records import Annotation
from cudaforge_action.workflow import MAX_SUMMARY_BYTES, append_summary, command, set_variable
from runner_log import Command, commands, variables

from pytest_cudaforge.errors import SituationError, UsageError

HOSTILE = (
    "::set-output name=a::b",
    "  ::error file=x.py,line=1::planted",
    "ok\n::add-mask::e\n##[add-path]/tmp/evil",
    "100%25 %0A::warning::x %0D\r::notice::y",
    "a,b:c=d\u2028\u202e\x1b[2J\x00",
    "$(touch /tmp/x) `id` ${{ secrets.KEY }} '\"",
)


# -- commands ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", HOSTILE)
def test_a_command_arrives_as_it_was_meant_and_brings_no_other(text: str) -> None:
    line = command("error", text, file=text, line=3, title=text)
    assert "\n" not in line and "\r" not in line
    assert commands(line) == [Command("error", text, {"file": text, "line": "3", "title": text})]


def test_an_annotation_has_no_place_where_there_is_none(capfd: pytest.CaptureFixture[str]) -> None:
    host = GitHubHost({})
    host.annotate([Annotation("warning", "t", "m"), Annotation("notice", "t", "m", "a/b.py", 0)])
    plain, placed = commands(capfd.readouterr().out)
    assert plain == Command("warning", "m", {"title": "t"})
    assert placed == Command("notice", "m", {"title": "t", "file": "a/b.py"})


def test_what_terminals_obey_is_gone_from_annotations(capfd: pytest.CaptureFixture[str]) -> None:
    GitHubHost({}).annotate([Annotation("error", "a\x1b[2J\nb", "c\x1b]0;t\x07\u202ed", "x\ny.py", 2)])
    [one] = commands(capfd.readouterr().out)
    assert one.properties["title"] == "a[2J b" and one.data == "c]0;td"


def test_a_secret_of_several_lines_is_masked_line_by_line(capfd: pytest.CaptureFixture[str]) -> None:
    GitHubHost({}).mask("first\n\nse%cond\n")
    masked = [one.data for one in commands(capfd.readouterr().out)]
    assert masked == ["first\n\nse%cond", "first", "se%cond"]
    GitHubHost({}).mask("  \n")
    assert capfd.readouterr().out == ""


# -- output of others --------------------------------------------------------------------------------------------------


PRINTING = """
import json, subprocess, sys
from cudaforge_action.github import GitHubHost

host = GitHubHost({})
print("before")
with host.quoting():
    for text in json.loads(sys.argv[1]):
        print(text)
        print("::error::from stderr", file=sys.stderr)
    subprocess.run(["sh", "-c", "echo ::error::child; echo ::error::child >&2; printf '::error::no end'"], check=True)
host.notice("after")
"""


def test_what_is_printed_inside_quoting_is_text_from_whatever_process() -> None:
    done = subprocess.run([sys.executable, "-c", PRINTING, json.dumps(HOSTILE)], capture_output=True, check=True)
    out = done.stdout.decode("utf-8", "surrogateescape")
    assert commands(out) == [Command("notice", "after")]
    # Read beside standard output in no order: it must not be there at all.
    assert done.stderr == b""
    assert out.startswith("before\n::stop-commands::")
    assert out.count("::error::child") == 2 and out.count("::error::from stderr") == len(HOSTILE)


def test_the_token_is_another_each_time_and_not_to_be_had_from_the_environment(
    capfd: pytest.CaptureFixture[str],
) -> None:
    host = GitHubHost({})
    for _ in range(2):
        with host.quoting():
            subprocess.run(["env"], check=True)
    lines = capfd.readouterr().out.splitlines()
    tokens = [line[len("::stop-commands::") :] for line in lines if line.startswith("::stop-commands::")]
    assert len(set(tokens)) == 2 and all(len(token) == 64 for token in tokens)
    assert sum(token in line for token in tokens for line in lines) == 4


def test_a_child_that_outlives_the_block_is_not_heard_any_more(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fifo = tmp_path / "go"
    os.mkfifo(fifo)
    host = GitHubHost({})
    with host.quoting():
        late = subprocess.Popen(["sh", "-c", f"echo early; read line < {fifo}; echo ::error::late"])
        # Wait for it to be at its FIFO, so that "early" is written.
        gate = os.open(fifo, os.O_WRONLY)
    os.write(gate, b"go\n")
    os.close(gate)
    assert late.wait(30) != 0
    out = capfd.readouterr().out
    assert "early" in out and "late" not in out and commands(out) == []


def test_nothing_printed_is_lost_and_descriptors_are_given_back(capfd: pytest.CaptureFixture[str]) -> None:
    host = GitHubHost({})
    before = sorted(os.listdir("/proc/self/fd"))
    with host.quoting():
        subprocess.run(["head", "-c", "500000", "/dev/zero"], check=True)
    out = capfd.readouterr().out
    assert out.count("\0") == 500_000
    assert sorted(os.listdir("/proc/self/fd")) == before


MUCH = """
import os, signal, subprocess, sys
from cudaforge_action.github import GitHubHost

signal.signal(signal.SIGPIPE, signal.SIG_IGN)
with GitHubHost({}).quoting():
    for descriptor in map(int, sys.argv[1:]):
        os.close(descriptor)
    subprocess.run(["head", "-c", "500000", "/dev/zero"], check=True)
"""


def test_a_log_that_nobody_reads_lets_nobody_wait() -> None:
    reader, writer = os.pipe()
    # The child has the only reading end, and closes it on its way.
    command = [sys.executable, "-c", MUCH, str(reader)]
    process = subprocess.Popen(command, stdout=writer, stderr=subprocess.DEVNULL, pass_fds=[reader])
    os.close(reader)
    os.close(writer)
    assert process.wait(60) in (1, 120)


def test_a_log_that_does_not_block_loses_nothing() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with subprocess.Popen([sys.executable, "-c", MUCH], stdout=writer) as process, os.fdopen(reader, "rb") as log:
        os.close(writer)
        assert log.read().count(b"\0") == 500_000
    assert process.returncode == 0


def test_commands_run_again_after_an_exception(capfd: pytest.CaptureFixture[str]) -> None:
    host = GitHubHost({})
    with pytest.raises(ZeroDivisionError), host.quoting():
        raise ZeroDivisionError
    host.warning("still here")
    assert commands(capfd.readouterr().out) == [Command("warning", "still here")]


def test_a_mask_inside_quoting_would_be_shown_and_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    host = GitHubHost({})
    with host.quoting(), pytest.raises(RuntimeError):
        host.mask("s3cret")
    assert "s3cret" not in capfd.readouterr().out


def test_a_group_is_closed_and_its_title_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    with GitHubHost({}).group("a\n::error::b"):
        pass
    assert commands(capfd.readouterr().out) == [Command("group", "a ::error::b"), Command("endgroup", "")]


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [*HOSTILE, "", "\n", "a\n\n", "ghadelimiter_1\nx<<EOF\ny\nEOF\nz=1", "é😀"])
def test_an_output_comes_back_as_it_was_and_adds_no_other(tmp_path: Path, value: str) -> None:
    file = tmp_path / "output"
    file.write_text("before=1\n")
    environ = {"GITHUB_OUTPUT": str(file)}
    set_variable(environ, "GITHUB_OUTPUT", "best-speedup", value)
    set_variable(environ, "GITHUB_OUTPUT", "after", "2")
    with file.open(newline="") as stream:
        assert variables(stream.read()) == {"before": "1", "best-speedup": value, "after": "2"}


@pytest.mark.parametrize("name", ["", "a b", "a=b", "a<<b", "a\nb", "1a", "a;b"])
def test_an_outputs_name_is_checked(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="output's name"):
        set_variable({"GITHUB_OUTPUT": str(tmp_path / "o")}, "GITHUB_OUTPUT", name, "x")
    assert not (tmp_path / "o").exists()


def test_an_output_above_the_limit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="1048578 bytes"):
        set_variable({"GITHUB_OUTPUT": str(tmp_path / "o")}, "GITHUB_OUTPUT", "matrix", "é" * (512 * 1024 + 1))


def test_a_way_to_another_file_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "bashrc"
    victim.write_text("")
    (tmp_path / "summary").symlink_to(victim)
    with pytest.raises(SituationError, match="GITHUB_STEP_SUMMARY cannot be written"):
        append_summary({"GITHUB_STEP_SUMMARY": str(tmp_path / "summary")}, "text")
    assert victim.read_text() == ""


def test_a_file_that_the_runner_did_not_give_is_named() -> None:
    with pytest.raises(SituationError, match="GITHUB_OUTPUT is not set"):
        GitHubHost({}).output("a", "b")


def test_summaries_of_a_step_add_up_and_stay_within_the_limit(tmp_path: Path) -> None:
    file = tmp_path / "summary"
    environ = {"GITHUB_STEP_SUMMARY": str(file)}
    append_summary(environ, "# one")
    append_summary(environ, "two\n\n")
    assert file.read_text() == "# one\n\ntwo\n\n"
    append_summary(environ, "ünicode line\n" * 200_000)
    size = file.stat().st_size
    assert MAX_SUMMARY_BYTES - 200 < size <= MAX_SUMMARY_BYTES
    text = file.read_text("utf-8")
    assert "the rest does not fit" in text and text.splitlines()[-3] == "ünicode line"
    append_summary(environ, "more" * 100)
    assert file.stat().st_size == size <= workflow.MAX_SUMMARY_BYTES
