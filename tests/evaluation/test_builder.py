"""The builder: traces and compiles in the sandbox, and brings the candidate's errors back as they were."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from pytest_cudaforge import errors
from pytest_cudaforge.errors import (
    BuildFailure,
    ForgeError,
    PlanError,
    PlanLimitError,
    PlanSyntaxError,
    SandboxError,
    Unsupported,
    WorkerCrash,
    WorkerProtocol,
)
from pytest_cudaforge.evaluation.builder import _TRACE, Builder, _error_of
from pytest_cudaforge.evaluation.channel import BUILDER_CAPS, Reply
from pytest_cudaforge.evaluation.child import Child
from pytest_cudaforge.evaluation.sandbox import Defences, child_environment
from pytest_cudaforge.evaluation.zygote import ForkServers
from pytest_cudaforge.languages import Unit
from pytest_cudaforge.plan import LibraryCall, TensorSpec
from pytest_cudaforge.records import DeviceFacts
from pytest_cudaforge.runtime.signature import Signature

SPEC = TensorSpec((4, 8), "float32", (8, 1))
SIGNATURE = Signature.of((SPEC, SPEC), {}, None, DeviceFacts("cpu", "a CPU", "cpu"), "cpp")
PLAN = """
from pytest_cudaforge.plan import empty, launch, Unsupported

def plan(x, y):
    z = empty(x.shape, x.dtype)
    launch("add", args=(x, y, z, x.numel()))
    return z
"""


@pytest.fixture(scope="module")
def servers() -> Iterator[ForkServers]:
    with ForkServers() as opened:
        yield opened


def test_a_plan_is_traced(servers: ForkServers) -> None:
    traced = servers.builder().trace(PLAN, SIGNATURE)
    assert [launch.kernel for launch in traced.main.launches] == ["add"]
    assert traced.main.launches[0].args[3] == 32 and traced.prepare is None


def test_one_process_serves_the_calls_of_a_candidate(servers: ForkServers) -> None:
    started = []

    def spawn(kind: str) -> Child:
        started.append(servers._spawn_builder(kind))
        return started[-1]

    with Builder(spawn).kept() as builder:
        first = builder.trace(PLAN, SIGNATURE)
        with pytest.raises(PlanSyntaxError):
            builder.trace("import os\n", SIGNATURE)
        assert builder.trace(PLAN, SIGNATURE) == first and len(started) == 1
        started[0].kill()
        with pytest.raises(WorkerCrash):
            builder.trace(PLAN, SIGNATURE)
        assert builder.trace(PLAN, SIGNATURE) == first and len(started) == 2
    with pytest.raises(WorkerCrash):
        started[1].ask(_TRACE, {}, phase="tracing", caps=BUILDER_CAPS, timeout_s=1)


def test_instructions_are_led_back_to_lines_in_the_sandbox(servers: ForkServers) -> None:
    source = "void f(float* x) {\n  for (int i = 0; i < 64; ++i)\n    x[i] = x[i] * 2.0f + 1.0f;\n}\n"
    builder = servers.builder()
    binary = builder.compile("cpp", source, Unit((), ("f",)), "cpu", lineinfo=True)
    assert "kernel.cpp:2: loop vectorized" in binary.log
    found = builder.places(binary, range(0x1000, 0x1400))
    assert len(found) == 0x400 and any(place.line == 3 and place.instruction for place in found)
    junk = builder.places(dataclasses.replace(binary, code=b"\x7fELF" + b"\xff" * 4000), [64, 128])
    assert [place.line for place in junk] == [None, None]


def test_a_plan_with_library_calls_is_traced_with_torch(servers: ForkServers) -> None:
    source = "from pytest_cudaforge.plan import op\n\ndef plan(x, y):\n    return op('aten.mm', x, y.t())\n"
    (step,) = servers.builder().trace(source, SIGNATURE).main.steps
    assert isinstance(step, LibraryCall) and step.op.startswith("aten.mm")


def test_an_operator_whose_shapes_need_the_users_name_is_traced(servers: ForkServers) -> None:
    # addmm's meta kernel imports torch's compiler, which calls getpass.getuser(): a child's user id has no entry.
    source = "from pytest_cudaforge.plan import op\n\ndef plan(x, y):\n    return op('aten.addmm', y, x, x.t())\n"
    square = TensorSpec((4, 4), "float32", (4, 1))
    signature = Signature.of((SPEC, square), {}, None, DeviceFacts("cpu", "a CPU", "cpu"), "cpp")
    assert len(servers.builder().trace(source, signature).main.steps) == 1


def test_what_meta_kernels_import_is_there_before_the_fork(servers: ForkServers) -> None:
    servers.warm("shapes")
    server = servers._servers["shapes"]._process.pid
    assert len(os.listdir(f"/proc/{server}/task")) == 1, "fork is not safe beside threads"
    library = "from pytest_cudaforge.plan import op\n\ndef plan(x, y):\n    return op('aten.mm', x, x.t())\n"
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        servers.builder().trace(library, SIGNATURE)
        seconds.append(time.perf_counter() - began)
    # Importing it anew in each child took 0.3 s for mm and 1 s for addmm on a fast disk, up to 13 s on a slow one.
    assert min(seconds) < 2


def test_a_child_has_a_users_name() -> None:
    environment = child_environment({"PATH": "/bin", "USER": "somebody"}, Defences())
    program = (
        "import os, getpass\n"
        "if os.getuid() == 0:\n    os.setresuid(61999, 61999, 61999)\n"
        "import pwd\nprint(getpass.getuser())"
    )
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "cudaforge"


def test_a_fault_of_our_own_is_not_the_candidates(servers: ForkServers) -> None:
    # A request that no supervisor would send fails in our code, before the plan is looked at.
    payload = {"signature": SIGNATURE.to_json(), "library": False}
    with pytest.raises(SandboxError, match=r"(?s)by no fault of the candidate.*Traceback.*builder\.py.*KeyError"):
        servers.builder()._ask("plain", _TRACE, payload, "tracing plan.py", 30)


def test_a_fault_told_by_the_builder_has_no_control_characters() -> None:
    error = _error_of(Reply(3, (), "Traceback\n\x1b[2J KeyError", b""), "tracing plan.py")
    assert isinstance(error, SandboxError) and "\x1b" not in str(error) and "KeyError" in str(error)


@pytest.mark.parametrize(
    ("body", "kind", "text"),
    [
        ("    import os", PlanSyntaxError, "plan.py:5"),
        ("    raise Unsupported('needs contiguous x')", Unsupported, "needs contiguous x"),
        ("    for i in range(10 ** 9):\n        pass", PlanLimitError, "step"),
        ("    return empty((1 << 40,), 'float32')", PlanError, ""),
        ("    return x.grad", PlanError, "grad"),
    ],
)
def test_errors_of_a_plan_come_back_with_their_line(
    servers: ForkServers, body: str, kind: type[ForgeError], text: str
) -> None:
    source = PLAN.replace("    z = empty", f"{body}\n    z = empty")
    with pytest.raises(kind) as caught:
        servers.builder().trace(source, SIGNATURE)
    assert text in str(caught.value)


def test_a_build_failure_comes_back_with_its_log(servers: ForkServers) -> None:
    with pytest.raises(BuildFailure) as caught:
        servers.builder().compile("cpp", "void act() { int x = missing; }", Unit((), ("act",)), "cpu")
    assert "missing" in caught.value.log


def test_an_unknown_language_is_named(servers: ForkServers) -> None:
    with pytest.raises(errors.ConfigError, match="fortran"):
        servers.builder().compile("fortran", "", Unit((), ("act",)), "cpu")


def test_many_builds_at_once(servers: ForkServers) -> None:
    def build(number: int) -> int:
        source = f"void act(float* x) {{ x[0] = {number}; }}"
        return len(servers.builder().compile("cpp", source, Unit((), ("act",)), "cpu").code)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(build, range(8)))


@pytest.mark.parametrize(
    ("status", "data"),
    [
        (1, {"error": "KeyboardInterrupt", "what": "x"}),
        (1, {"error": "SandboxError", "what": "x"}),
        (1, ["PlanError"]),
        (1, None),
        (2, {"error": "PlanError", "what": "x"}),
        (77, {"error": "PlanError", "what": "x"}),
    ],
)
def test_only_errors_of_the_short_list_are_believed(status: int, data: object) -> None:
    assert isinstance(_error_of(Reply(status, (), json.dumps(data), b""), "tracing"), WorkerProtocol)


def test_odd_fields_of_an_error_do_no_harm() -> None:
    data = {"error": "PlanError", "what": ["no", "text"], "line": "12; drop", "log": 3, "expected": None}
    error = _error_of(Reply(1, (), json.dumps(data), b""), "tracing")
    assert isinstance(error, PlanError) and error.line is None


def test_deep_nesting_is_no_crash() -> None:
    assert isinstance(_error_of(Reply(1, (), "[" * 100_000, b""), "tracing"), WorkerProtocol)
