import asyncio
import os
import signal
import sys
import time

import pytest
from chat_requests import config, request

from pytest_cudaforge import chat
from pytest_cudaforge.errors import ConfigError, ProviderError, ReplyPending

SECRET = "sk-anothersecret-987654321"


def model(tmp_path, program, *, lease=None, **options):
    """The command provider with a Python program; ``chat.command.*`` by keyword."""
    script = tmp_path / "agent.py"
    script.write_text(program)
    settings = {"chat.coder.provider": "command", "chat.command.argv": [sys.executable, str(script)]}
    settings |= {f"chat.command.{name}": value for name, value in options.items()}
    from pytest_cudaforge.config import load

    return chat.load(load(settings, root=tmp_path, environ={}), "coder", lease)


def ask(model, asked=None):
    return asyncio.run(model.complete(asked or request()))


class Gate:
    """A lease as the provider sees it: keeps what was registered, and whether the group was alive then."""

    def __init__(self):
        self.open, self.seen = set(), []

    def register(self, pgid):
        self.open.add(pgid)
        self.seen.append((pgid, os.getpgid(pgid)))

    def unregister(self, pgid):
        self.open.discard(pgid)


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rsplit(")", 1)[1].split()[0] == "Z"


def wait_until_gone(pid, seconds=5.0):
    end = time.monotonic() + seconds
    while not gone(pid):
        assert time.monotonic() < end, f"process {pid} is still there"
        time.sleep(0.02)


def test_the_prompt_goes_in_and_the_reply_comes_out(tmp_path):
    asked = request(text="naïve prompt ✓")
    reply = ask(model(tmp_path, "import sys\nprint('got:', sys.stdin.read())"), asked)
    assert reply.text.startswith("got: ===== Instructions =====\n\nYou write kernels.")
    assert "===== Task =====\n\nnaïve prompt ✓" in reply.text
    assert reply.model.startswith("command:python")
    assert reply.usage.usd is None
    assert reply.prompt_digest == asked.digest
    assert reply.seconds > 0


def test_a_long_prompt_and_a_long_reply_do_not_block_each_other(tmp_path):
    long = request(text="x" * 3_000_000)
    program = "import sys\nsys.stdout.write('y' * 2_000_000); sys.stdout.flush(); sys.stdin.read()"
    assert len(ask(model(tmp_path, program), long).text) == 2_000_000


def test_a_program_that_reads_nothing_is_fine(tmp_path):
    assert ask(model(tmp_path, "print('deaf')"), request(text="x" * 500_000)).text == "deaf\n"


def test_the_environment_is_an_allow_list(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    monkeypatch.setenv("SOME_TOKEN", SECRET)
    monkeypatch.setenv("WANTED", "yes")
    monkeypatch.setenv("LANG", "C.UTF-8")
    program = "import os\nfor name in sorted(os.environ): print(name, os.environ[name])"
    said = ask(model(tmp_path, program, env=["WANTED", "NOT_SET"]), request(3)).text
    names = {line.split(" ")[0] for line in said.splitlines()}
    ours = {"CUDAFORGE_ROLE", "CUDAFORGE_TARGET", "CUDAFORGE_LANGUAGE", "CUDAFORGE_ROUND"}
    assert names - {"LC_CTYPE"} == {"PATH", "HOME", "LANG", "WANTED"} | ours
    assert SECRET not in said
    assert "CUDAFORGE_ROLE coder" in said
    assert "CUDAFORGE_TARGET layers.py::Norm" in said
    assert "CUDAFORGE_ROUND 3" in said


def test_a_named_key_is_passed_on(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    program = "import os\nprint(len(os.environ['OPENAI_API_KEY']))"
    answering = model(tmp_path, program, env=["OPENAI_API_KEY"])
    assert ask(answering).text == f"{len(SECRET)}\n"
    assert SECRET not in repr(answering)


def test_status_75_is_no_reply_yet(tmp_path):
    with pytest.raises(ReplyPending, match=r"no reply yet for the coder of layers\.py::Norm") as caught:
        ask(model(tmp_path, "raise SystemExit(75)"))
    assert "again later" in caught.value.remedy


def test_a_failure_shows_the_end_of_stderr_without_named_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("AGENT_KEY", SECRET)
    program = (
        "import os, sys\nprint('x' * 5000, file=sys.stderr)\n"
        "print('bad key', os.environ['AGENT_KEY'], file=sys.stderr)\nraise SystemExit(3)"
    )
    with pytest.raises(ProviderError, match="ended with exit status 3") as caught:
        ask(model(tmp_path, program, env=["AGENT_KEY"]))
    assert "bad key [AGENT_KEY]" in str(caught.value)
    assert SECRET not in str(caught.value)
    assert len(str(caught.value)) < 1500


def test_a_signal_is_named(tmp_path):
    with pytest.raises(ProviderError, match="was ended by SIGKILL"):
        ask(model(tmp_path, "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"))


@pytest.mark.parametrize("program", ["", "print('  ')"])
def test_silence_is_an_error(tmp_path, program):
    with pytest.raises(ProviderError, match="wrote nothing to stdout"):
        ask(model(tmp_path, program))


def test_binary_output_is_an_error(tmp_path):
    with pytest.raises(ProviderError, match="not UTF-8"):
        ask(model(tmp_path, "import sys\nsys.stdout.buffer.write(b'\\xff\\xfe\\x00')"))


def test_endless_output_is_stopped(tmp_path):
    start = time.monotonic()
    with pytest.raises(ProviderError, match="more than 4000000 bytes"):
        ask(model(tmp_path, "while True: print('spam' * 1000)"))
    assert time.monotonic() - start < 10


def test_a_timeout_kills_the_whole_group(tmp_path):
    note = tmp_path / "pids"
    program = (
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(note)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        "time.sleep(60)\n"
    )
    start = time.monotonic()
    with pytest.raises(ProviderError, match=r"no reply within 1 s and was killed") as caught:
        ask(model(tmp_path, program, timeout_s=1.0))
    assert time.monotonic() - start < 8
    assert "chat.command.timeout_s" in caught.value.remedy
    for pid in map(int, note.read_text().split()):
        wait_until_gone(pid)


def test_a_child_left_behind_neither_delays_the_reply_nor_survives_it(tmp_path):
    program = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid)\n"
    )
    start = time.monotonic()
    reply = ask(model(tmp_path, program))
    assert time.monotonic() - start < 10
    wait_until_gone(int(reply.text))


def test_cancelling_ends_the_program(tmp_path):
    note = tmp_path / "pid"
    program = f"import os, time\nopen({str(note)!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)\n"
    answering = model(tmp_path, program)

    async def cancelled():
        task = asyncio.ensure_future(answering.complete(request()))
        while not (note.exists() and note.read_text()):
            await asyncio.sleep(0.02)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled())
    wait_until_gone(int(note.read_text()))


def test_its_process_group_is_known_to_the_lease_while_it_runs(tmp_path):
    gate = Gate()
    reply = ask(model(tmp_path, "import os\nprint(os.getpgrp())", lease=gate))
    ((pgid, group),) = gate.seen
    assert pgid == group == int(reply.text)
    assert gate.open == set()


def test_a_group_stopped_by_the_lease_is_killed_at_the_timeout_all_the_same(tmp_path):
    class Stopping(Gate):
        def register(self, pgid):
            super().register(pgid)
            os.killpg(pgid, signal.SIGSTOP)

    gate = Stopping()
    with pytest.raises(ProviderError, match="no reply within"):
        ask(model(tmp_path, "import time; time.sleep(60)", lease=gate, timeout_s=0.5))
    wait_until_gone(gate.seen[0][0])
    assert gate.open == set()


def test_a_program_that_is_not_there(tmp_path):
    answering = chat.load(
        config(tmp_path, chat__coder__provider="command", chat__command__argv=["no-such-agent-here"]), "coder"
    )
    with pytest.raises(ProviderError, match="'no-such-agent-here' could not be started: No such file"):
        ask(answering)


def test_a_program_that_may_not_be_run(tmp_path):
    (tmp_path / "agent").write_text("#!/bin/sh\necho hi\n")
    answering = chat.load(
        config(tmp_path, chat__coder__provider="command", chat__command__argv=[str(tmp_path / "agent")]), "coder"
    )
    with pytest.raises(ProviderError, match="Permission denied"):
        ask(answering)


def test_no_program_named(tmp_path):
    with pytest.raises(ConfigError, match=r"chat\.command\.argv is empty"):
        chat.load(config(tmp_path, chat__judge__provider="command"), "judge")


def test_it_runs_in_the_folder_of_the_config(tmp_path):
    assert ask(model(tmp_path, "import os\nprint(os.getcwd())")).text.strip() == str(tmp_path.resolve())
