"""Hostile kernel.py files: Python that runs while Triton compiles, in the builder's sandbox and nowhere else.

Each finds what it looks for once the defence against it is off.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import SECRET, SECRET_NAME

from pytest_cudaforge.errors import BuildFailure, WorkerFailure
from pytest_cudaforge.evaluation.sandbox import Defences
from pytest_cudaforge.evaluation.zygote import ForkServers
from pytest_cudaforge.languages import Unit, load

_MISSING = load("triton").availability()
pytestmark = pytest.mark.skipif(bool(_MISSING), reason=f"no Triton: {_MISSING}")

UNIT = Unit((("BLOCK", 64),), ("double<*fp32:16, num_warps=1, num_stages=1>",))
HONEST = """
import triton
import triton.language as tl

@triton.jit
def double(x, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x + i, 2 * tl.load(x + i))
"""


def told(servers: ForkServers, source: str) -> str:
    """What a kernel.py that ends in an error says."""
    with pytest.raises(BuildFailure) as caught:
        servers.builder().compile("triton", source, UNIT, "sm_90")
    return caught.value.what


def reading(path: Path) -> str:
    return f"raise ValueError(open({str(path)!r}).read())"


def test_an_honest_kernel_is_compiled(guarded: ForkServers) -> None:
    assert guarded.builder().compile("triton", HONEST, UNIT, "sm_90").code[:4] == b"\x7fELF"


def test_no_file_of_the_host_is_read(
    guarded: ForkServers, servers_with: Callable[[Defences], ForkServers], tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("an expected output")
    assert "an expected output" not in told(guarded, reading(secret))
    assert "an expected output" in told(servers_with(Defences(files=False)), reading(secret))


def test_no_secret_of_the_environment_is_seen(
    guarded: ForkServers, servers_with: Callable[[Defences], ForkServers], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Triton's own fork server starts when it is first asked: below.
    open_to_it = servers_with(Defences(environment=False))
    monkeypatch.setenv(SECRET_NAME, SECRET)
    source = f"import os\nraise ValueError(os.environ.get({SECRET_NAME!r}))"
    assert SECRET not in told(guarded, source)
    assert SECRET in told(open_to_it, source)


def test_nobody_is_told_over_the_network(guarded: ForkServers, servers_with: Callable[[Defences], ForkServers]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(5)
        address = listener.getsockname()
        source = f"import socket\nsocket.create_connection({address!r}, timeout=5)\nraise ValueError('connected')"
        assert "connected" not in told(guarded, source)
        assert "connected" in told(servers_with(Defences(network=False)), source)


def test_no_other_process_is_signalled(guarded: ForkServers, servers_with: Callable[[Defences], ForkServers]) -> None:
    source = f"import os\nos.kill({os.getpid()}, 0)\nraise ValueError('it is there')"
    assert "it is there" not in told(guarded, source)
    if os.getuid() == 0:
        # An own user id is part of this defence and of that of files.
        found = told(servers_with(Defences(processes=False, files=False)), source)
        assert "it is there" in found


def test_the_builder_is_not_anybodys_word(guarded: ForkServers) -> None:
    """kernel.py can answer in the builder's name: what it says is checked, and no situation of ours."""
    forgery = """
import dataclasses, pytest_cudaforge.languages.triton as language
from pytest_cudaforge.languages.binary import CompiledLaunch
honest = language._Compiled.info
def info(self, expression, start):
    found = honest(self, expression, start)
    return dataclasses.replace(found, CHANGE)
language._Compiled.info = info
"""
    for change in (
        "expression='another<1>'",
        "compiled=CompiledLaunch(1 << 20, 0, 1, 2, 0, 9)",
        "compiled=CompiledLaunch(32, 0, 1, 2, 0, 1 << 40)",
        "params=('float*',) * 5000",
        "symbol='x' * 5000",
    ):
        with pytest.raises(WorkerFailure):
            guarded.builder().compile("triton", forgery.replace("CHANGE", change) + HONEST, UNIT, "sm_90")
    assert guarded.builder().compile("triton", HONEST, UNIT, "sm_90").kernels
