"""The triton language with the real Triton, on machines with and without a GPU; and in the sandbox of the builder."""

from __future__ import annotations

import os
import sys
import tempfile
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from flow_records import make_facts, make_target

from pytest_cudaforge.errors import BuildFailure, ForgeError, ToolchainError, WorkerFailure, WorkerTimeout
from pytest_cudaforge.evaluation.building import Kitchen
from pytest_cudaforge.evaluation.zygote import ForkServers
from pytest_cudaforge.languages import Binary, Unit, check_arguments, load, units_of
from pytest_cudaforge.languages.cache import BuildCache
from pytest_cudaforge.languages.published import binary_digest
from pytest_cudaforge.languages.triton import compute_capability
from pytest_cudaforge.plan import TensorSpec
from pytest_cudaforge.records import Candidate, DeviceFacts
from pytest_cudaforge.runtime.signature import Signature

_MISSING = load("triton").availability()
pytestmark = pytest.mark.skipif(bool(_MISSING), reason=f"no Triton: {_MISSING}")

H200 = DeviceFacts("cuda", "NVIDIA H200", "sm_90", sm_count=132, max_shared_bytes=227 << 10, memory_bytes=140 << 30)
HEAD = "import triton\nimport triton.language as tl\n\n"
RELU = (
    HEAD
    + """
@triton.jit
def half(v):
    return v * 0.5

@triton.jit
def relu(x, y, n, factor, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n)
    tl.store(y + i, half(tl.maximum(v, 0.0)) * factor, mask=i < n)
"""
)
INSTANCE = "relu<*fp32:16, *fp32:16, i32:16, fp32, num_warps=4, num_stages=3>"
UNIT = Unit((("BLOCK", 1024),), (INSTANCE,))
#: What only the sandbox may run: it ends the process, or answers in the builder's name.
RUDE = {
    "exits": "raise SystemExit(3)",
    "exits as if we had failed": "import os\nos._exit(70)",
    "exits well": "import os\nos._exit(0)",
    "kills itself": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
    "forges a situation": "from pytest_cudaforge.evaluation import builder\n"
    "from pytest_cudaforge.errors import ToolchainError\n"
    "def f(request):\n    raise ToolchainError('your Triton is broken')\n"
    "import pytest_cudaforge.languages.triton as t\nt._function = lambda *a: f(0)",
    "forges a fault of ours": "import pytest_cudaforge.languages.triton as t\nt._function = None\n" + RELU,
    "replaces the compiler": "import triton.compiler\ntriton.compiler.compile = lambda *a, **k: 3\n" + RELU,
    "starts threads and leaves": "import threading, time\nthreading.Thread(target=time.sleep, args=(99,)).start()\n1/0",
}


def build(source: str, *kernels: str, constants: tuple[tuple[str, int | float], ...] = (("BLOCK", 1024),)) -> Binary:
    return load("triton").compile(source, Unit(constants, kernels or (INSTANCE,)), "sm_90")


def failure(source: str, *kernels: str, constants: tuple[tuple[str, int | float], ...] = (("BLOCK", 1024),)) -> str:
    with pytest.raises(BuildFailure) as caught:
        build(source, *kernels, constants=constants)
    return f"{caught.value}\n{caught.value.log}"


def test_the_language_says_what_a_candidate_is_made_of() -> None:
    language = load("triton")
    assert (language.source_name, language.file_names) == ("kernel.py", ("kernel.py", "plan.py"))
    assert language.fingerprint("sm_90") == language.fingerprint("sm_90") != language.fingerprint("sm_80")


def test_asking_for_the_language_does_not_import_triton() -> None:
    code = (
        "import sys; from pytest_cudaforge.languages import load; l = load('triton'); "
        "assert not l.availability() and l.fingerprint('sm_90'); assert 'triton' not in sys.modules"
    )
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code]) == 0


def test_a_kernel_becomes_a_cubin() -> None:
    (kernel,) = build(RELU).kernels
    assert kernel.params == ("float*", "float*", "int", "float") and kernel.symbol == "relu"
    assert kernel.compiled is not None and kernel.compiled.threads == 128 and kernel.compiled.code_start == 0
    assert kernel.compiled.scratch_pointers in (1, 2) and kernel.resources.registers
    assert build(RELU).code[:4] == b"\x7fELF"


def test_one_source_gives_one_binary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A builder has a /tmp of its own; other tests have this one's at the same time.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert build(RELU) == build(RELU)


def test_instances_of_one_unit_have_a_cubin_each() -> None:
    other = "relu<*bf16:16, *bf16, i64, fp32, num_warps=8, num_stages=2>"
    binary = build(RELU, INSTANCE, other)
    first, second = (kernel.compiled for kernel in binary.kernels)
    assert first is not None and second is not None
    assert second.code_start == first.code_bytes and len(binary.code) == first.code_bytes + second.code_bytes
    assert binary.code[second.code_start :][:4] == b"\x7fELF" and second.threads == 256
    assert binary.kernels[1].params == ("__nv_bfloat16*", "__nv_bfloat16*", "long long", "float")


@pytest.mark.parametrize(
    ("parameters", "words", "params"),
    [
        ("x: tl.const, n: tl.int64", "*fp16:16, i32:16", ("const __half*", "long long")),
        ("x, n", "*i64:16, 1", ("long long*", "constexpr")),
        ("x, n", "none, u1", ("constexpr", "bool")),
        ("x, s: tl.float32", "*u8, 1", ("unsigned char*", "float")),
        ("x, s: tl.float64", "*i1:16, fp32", ("bool*", "double")),
        ("x, n", "*fp8e4nv:16, u64", ("__nv_fp8_e4m3*", "unsigned long long")),
        ("x, n: tl.uint32", "*i16, i64", ("short*", "unsigned int")),
    ],
)
def test_parameter_types_are_tritons(parameters: str, words: str, params: tuple[str, ...]) -> None:
    source = f"{HEAD}@triton.jit\ndef f({parameters}):\n    pass\n"
    (kernel,) = build(source, f"f<{words}, num_warps=1, num_stages=1>", constants=()).kernels
    assert kernel.params == params


def test_what_is_not_to_be_specialised_is_not() -> None:
    source = f"{HEAD}@triton.jit(do_not_specialize=['n'])\ndef f(x, n):\n    tl.store(x, n)\n"
    (kernel,) = build(source, "f<*i32:16, 1, num_warps=1, num_stages=1>", constants=()).kernels
    assert kernel.params == ("int*", "int")


def test_constants_reach_their_parameters() -> None:
    source = HEAD + "@triton.jit\ndef f(x, num_warps: tl.constexpr, A: tl.constexpr, b: tl.constexpr = 7):\n"
    source += "    tl.static_assert(num_warps == 2)\n    tl.static_assert(A == 0.5)\n    tl.static_assert(b == 7)\n"
    build(source, "f<*i32, num_warps=2, num_stages=1>", constants=(("A", 0.5),))
    assert "static" in failure(source, "f<*i32, num_warps=2, num_stages=1>", constants=(("A", 0.5), ("b", 8)))


def test_tiles_in_shared_memory_are_counted() -> None:
    source = HEAD + (
        "@triton.jit\ndef f(a, b, c, K, N: tl.constexpr):\n    i = tl.arange(0, N)\n"
        "    s = tl.zeros((N, N), tl.float32)\n    for k in range(0, K, N):\n"
        "        p = i[:, None] * K + k + i[None, :]\n"
        "        s = tl.dot(tl.load(a + p), tl.load(b + p), s, input_precision='ieee')\n"
        "    tl.store(c + i[:, None] * N + i[None, :], s)\n"
    )
    words = "*fp32:16, *fp32:16, *fp32:16, i32:16, num_warps=4"
    small, large = (
        build(source, f"f<{words}, num_stages={stages}>", constants=(("N", 64),)).kernels[0] for stages in (1, 4)
    )
    assert small.compiled is not None and large.compiled is not None
    assert large.compiled.shared_bytes > small.compiled.shared_bytes > 0
    assert large.resources.static_shared_bytes == large.compiled.shared_bytes


@pytest.mark.parametrize(
    ("change", "words", "constants", "message"),
    [
        ("", "*fp32:16", {"BLOCK": 64}, "y, n, factor missing"),
        ("", "*fp32, *fp32, i32, fp32, fp32", {"BLOCK": 64}, "1 too many"),
        ("", "*fp32, *fp32, i32, fp32", {}, "parameter BLOCK has no value"),
        ("", "*fp32, *fp32, i32, fp32", {"BLOCK": 64, "n": 3}, "constant n is a parameter, but no tl.constexpr"),
        ("", "*fp32, *fp32, i32, fp32", {"BLOCK": 64, "WIDE": 3}, "constant WIDE is no parameter"),
        ("", "*fp32, *fp32, i32, fp32", {"BLOCK": 64, "num_warps": 8}, "launch(..., num_warps=8), beside constants"),
        ("", "*fp32, *fp32, i32, fp32", {"BLOCK": 65}, "power of 2"),
        ("", "fp32, *fp32, i32, fp32", {"BLOCK": 64}, "relu"),
        ("relu = 3", "*fp32, *fp32, i32, fp32", {"BLOCK": 64}, "names nothing to launch in kernel.py"),
        ("half = nothere", "*fp32, *fp32, i32, fp32", {"BLOCK": 64}, "nothere"),
        ("import not_a_package", "*fp32", {}, "ModuleNotFoundError"),
        ("def f(:", "*fp32", {}, "SyntaxError"),
        ("raise KeyboardInterrupt('mine')", "*fp32", {}, "KeyboardInterrupt: mine"),
        ("print('x' * 99)\nraise SystemExit(2)", "*fp32", {}, "SystemExit: 2"),
    ],
)  # fmt: skip
def test_a_mistake_is_named(change: str, words: str, constants: dict[str, int], message: str) -> None:
    kernel = f"relu<{words}, num_warps=4, num_stages=3>"
    assert message in failure(RELU + "\n" + change, kernel, constants=tuple(sorted(constants.items())))


def test_an_error_shows_the_lines_of_the_kernel_alone() -> None:
    text = failure(RELU.replace("tl.maximum(v, 0.0)", "v @ 3"))
    assert "v @ 3" in text and "site-packages" not in text and "code_generator" not in text


def test_a_long_message_is_cut() -> None:
    text = failure("raise ValueError('\\n'.join(str(i) * 900 for i in range(9999)))")
    assert len(text) < 60_000 and "more lines" in text


def test_endless_output_takes_no_memory() -> None:
    loud = "for _ in range(400):\n    print('x' * (1 << 20))\n"
    tracemalloc.start()
    try:
        assert build(loud + RELU).log == ""
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()


def test_an_autotuned_kernel_is_told_where_choices_are_made() -> None:
    source = RELU.replace(
        "@triton.jit\ndef relu", "@triton.heuristics({'BLOCK': lambda args: 64})\n@triton.jit\ndef relu"
    )
    assert "wrapped by heuristics" in failure(source)


def test_a_kernel_that_wants_scratch_memory_is_refused() -> None:
    source = HEAD + (
        "@triton.jit\ndef f(x, y, N: tl.constexpr):\n"
        "    a = tl.make_tensor_descriptor(x, [N, N], [N, 1], [16, 16])\n"
        "    b = tl.make_tensor_descriptor(y, [N, N], [N, 1], [16, 16])\n    b.store([0, 0], a.load([0, 0]))\n"
    )
    text = failure(source, "f<*fp32:16, *fp32:16, num_warps=4, num_stages=3>", constants=(("N", 64),))
    assert "needs scratch memory" in text and "make_tensor_descriptor" in text


def test_an_architecture_must_be_one() -> None:
    assert compute_capability("sm_90") == 90
    with pytest.raises(ToolchainError, match="--device cuda"):
        compute_capability("cpu")


def test_settings_and_files_are_gone_afterwards() -> None:
    before = dict(os.environ)
    build(RELU)
    failure("raise ValueError")
    assert dict(os.environ) == before and "kernel" not in sys.modules


# -- in the builder's sandbox ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def servers() -> Iterator[ForkServers]:
    with ForkServers() as opened:
        yield opened


def test_the_builder_compiles_what_a_plan_launches(servers: ForkServers) -> None:
    spec = TensorSpec((64, 4096), "float32", (4096, 1))
    signature = Signature.of((spec,), {}, None, H200, "triton")
    plan = (
        "from pytest_cudaforge.plan import empty, launch\n\ndef plan(x):\n    y = empty(x.shape, x.dtype)\n"
        "    launch('relu', grid=x.numel() // 1024, args=(x, y, x.numel(), 0.5), constants={'BLOCK': 1024})\n"
        "    return y\n"
    )
    builder = servers.builder()
    traced = builder.trace(plan, signature)
    (unit,) = units_of(traced)
    binary = builder.compile("triton", RELU, unit, "sm_90")
    check_arguments(traced, [binary])
    # One source, one binary: the path and the time that a cubin holds are the same in every builder.
    assert binary == builder.compile("triton", RELU, unit, "sm_90")


def test_the_server_is_ready_to_fork(servers: ForkServers) -> None:
    servers.warm("triton")
    server = servers._servers["triton"]._process.pid
    assert len(os.listdir(f"/proc/{server}/task")) == 1, "fork is not safe beside threads"


def test_a_verdict_names_the_binaries_that_are_published(servers: ForkServers, tmp_path: Path) -> None:
    plan = (
        "from pytest_cudaforge.plan import empty, launch\n\ndef plan(x):\n    y = empty(x.shape, x.dtype)\n"
        "    launch('relu', grid=9, args=(x, y, x.numel(), 0.5), constants={'BLOCK': 1024})\n    return y\n"
    )
    candidate = Candidate.of("triton", {"kernel.py": RELU, "plan.py": plan})
    facts, cache = make_facts(make_target(tmp_path)), BuildCache(tmp_path)
    drawn, odd = (
        servers.builder().trace(
            plan, Signature.of((TensorSpec((9, cols), "float32", (cols, 1)),), {}, None, H200, "triton")
        )
        for cols in (1024, 77)
    )

    def kitchen(fresh: bool) -> Kitchen:
        builder = servers.builder()
        return Kitchen(candidate, facts, H200, arch="sm_90", builder=builder, cache=cache, fresh=fresh)

    first = kitchen(False)
    (binary,) = first.compile(drawn)
    ((key, digest),) = first.build.binaries
    assert cache.get(key) == binary and binary_digest(binary) == digest
    # Another shape with the same constants is another instance, not another candidate.
    assert first.knows(odd) and first.compile(odd) != (binary,) and len(first.built_to_publish) == 2
    # A final verdict builds anew, and what it built is what there is from then on.
    cache.put(key, replace(binary, log="of another build"))
    assert kitchen(False).compile(drawn)[0].log and not kitchen(True).compile(drawn)[0].log
    assert cache.get(key) == binary


@pytest.mark.parametrize("source", RUDE.values(), ids=RUDE)
def test_rude_code_is_the_candidates_failure(servers: ForkServers, source: str) -> None:
    with pytest.raises(ForgeError) as caught:
        servers.builder().compile("triton", source, UNIT, "sm_90")
    assert isinstance(caught.value, (BuildFailure, WorkerFailure)), caught.value


def test_code_that_hangs_is_ended(servers: ForkServers) -> None:
    with pytest.raises(WorkerTimeout):
        servers.builder().compile("triton", "while True: pass", UNIT, "sm_90", timeout_s=1)


def test_code_sees_no_files_sockets_or_processes(servers: ForkServers, tmp_path: object) -> None:
    secret = os.path.join(str(tmp_path), "secret.txt")
    with open(secret, "w") as stream:
        stream.write("the answer")
    source = f"""
import os, socket
found = []
for name, attempt in (
    ("file", lambda: open({secret!r}).read()),
    ("socket", lambda: socket.socket()),
    ("signal", lambda: os.kill({os.getpid()}, 0)),
    ("ancestor", lambda: os.kill(os.getppid(), 9)),
    ("package", lambda: open({__file__!r}.replace("tests", "pytest_cudaforge"), "w")),
):
    try:
        attempt()
        found.append(name)
    except OSError:
        pass
raise ValueError(f"found {{found}}")
"""
    with pytest.raises(BuildFailure, match=r"found \[\]"):
        servers.builder().compile("triton", source, UNIT, "sm_90")
