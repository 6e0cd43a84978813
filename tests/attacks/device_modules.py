# ruff: noqa: E501 - a candidate's line is one line
"""ModelNew files that attack the verdict on a GPU: streams, graphs, threads, patched clocks, decoys, hogs.

``twice`` and ``product`` come twice: as they are, where only a kernel of one's own passes, and with ``_any`` behind
the name, where plain torch is allowed, so that an attack needs no kernel to be tempting.
"""

from __future__ import annotations

import dataclasses

from device_rows import DeviceRow
from module_targets import STACK, model

from pytest_cudaforge.records import Candidate, Status

__all__ = ["CLOCKS", "HONEST_MODULE", "LAYERS", "MODULE_ENDLESS", "MODULE_REFUSED", "MODULE_ROWS", "SKIPPING"]

_ANY = 'allow=("kernel", "mixed", "library", "rewrite")'
LAYERS = f"""
import torch
from torch import nn
from pytest_cudaforge import forge_target


@forge_target(inputs=lambda: [torch.randn(64, 256)], {_ANY})
def twice_any(x):
    return x * 2


@forge_target(inputs=lambda: [torch.randn(16384, 4096)], {_ANY})
def shares_any(x):
    return torch.softmax(x, -1)


@forge_target(inputs=lambda: [torch.randn(64, 256)], init=lambda: [256], {_ANY})
class DecayAny(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(dim))

    def forward(self, x):
        return x * self.weight.exp()


@forge_target(inputs=lambda: [torch.randn(2048, 4096)], {_ANY})
def wide_any(x):
    return torch.sin(x) * x + 1


@forge_target(inputs=lambda: [torch.randn(2048, 4096)], {_ANY})
def doubled_any(x):
    return x * 2


@forge_target(inputs=lambda: [torch.randn(64, 512), torch.randn(512, 64)], {_ANY})
def product_any(a, b):
    return a @ b
"""

_WRONG, _REJECTED, _CRASH = (Status.INCORRECT_NUMERICAL,), (Status.REJECTED,), (Status.RUNTIME_ERROR,)
_LAZY = """
class Lazy(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})
"""
_LATER = """
import threading, time
def later(y, x):
    time.sleep(0.05)
    y.copy_(x * 2)
    torch.cuda.current_stream().synchronize()
"""
_HOG = """
import threading, time
running = []
def hog():
    mine = torch.cuda.Stream()
    while True:
        with torch.cuda.stream(mine):
            torch.cuda._sleep(40_000_000) if BUSY else time.sleep(0.02)
        mine.synchronize()
def begin():
    if not running:
        running.append(threading.Thread(target=hog, daemon=True))
        running[0].start()
"""
_PAUSES = "import time\nseen, at = {}, [0]"
_RESTS = """
if time.perf_counter_ns() - at[0] > 300_000:
    seen.clear()
answer = seen.get(x.data_ptr())
if answer is None or HONEST:
    answer = seen[x.data_ptr()] = x * 2
at[0] = time.perf_counter_ns()
return answer.clone()
"""
_GRAPHS = """
graphs = {}
def captured(x):
    static, side = x.clone(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        static * 2
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = static * 2
    return graph, static, out
"""
_TRITON = """
import triton
import triton.language as tl


@triton.jit
def times_kernel(x, y, n, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, FACTOR * tl.load(x + i, mask=i < n), mask=i < n)


def times(x, factor):
    y = torch.empty_like(x)
    times_kernel[(triton.cdiv(x.numel(), 256),)](x, y, x.numel(), FACTOR=factor, BLOCK=256)
    return y
"""
#: No further behind an input than there is a red zone where it does not lie at the end of memory.
_PREFETCH = """
import triton
import triton.language as tl


@triton.jit
def prefetching(x, y, n, AHEAD: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    now, then = tl.load(x + i, mask=i < n), tl.load(x + i + AHEAD, mask=i < n)
    tl.store(y + i, tl.where(then == 12345.678, now, 2 * now), mask=i < n)


def twice(x, ahead):
    y = torch.empty_like(x)
    prefetching[(triton.cdiv(x.numel(), 256),)](x, y, x.numel(), AHEAD=ahead, BLOCK=256)
    return y
"""
_HOLD = """
from cuda.bindings import driver

WINDOW = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW


def hold(x, nbytes):
    value = driver.CUstreamAttrValue()
    window = value.accessPolicyWindow
    window.base_ptr, window.num_bytes, window.hitRatio = x.data_ptr() if nbytes else 0, nbytes, 1.0
    window.hitProp = driver.CUaccessProperty.CU_ACCESS_PROPERTY_PERSISTING
    window.missProp = driver.CUaccessProperty.CU_ACCESS_PROPERTY_STREAMING
    value.accessPolicyWindow = window
    (status,) = driver.cuStreamSetAttribute(torch.cuda.current_stream().cuda_stream, WINDOW, value)
    assert status == 0, status
"""
_DECAY_INIT = """
def __init__(self, dim):
    super().__init__()
    self.weight = nn.Parameter(torch.randn(dim))
    self.own = {}
"""
#: Weights that are loaded in place move their version; an instance that is gone leaves its address to the next one.
_DECAY = """
key = (self.weight.data_ptr(), self.weight._version)
if key not in KEPT:
    KEPT[key] = self.weight.exp()
return x * KEPT[key]
"""
_GRAPH_FORWARD = """
if x.data_ptr() not in graphs:
    graphs[x.data_ptr()] = captured(x)
graph, static, out = graphs[x.data_ptr()]
REFRESH
graph.replay()
"""
#: Without torch's headers: it takes pointers, and is built in seconds.
_NATIVE = '''
cuda_source = """
#include <cuda_runtime.h>
__global__ void twice_kernel(const float* x, float* y, long long n, long long cycles) {
  const long long begin = clock64();
  while (clock64() - begin < cycles) {}
  const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i < n) y[i] = 2 * x[i];
}
void twice_at(unsigned long long x, unsigned long long y, long long n, bool wait) {
  static cudaStream_t stream = nullptr;
  if (!stream) cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  if (wait) cudaDeviceSynchronize();
  twice_kernel<<<(n + 255) / 256, 256, 0, stream>>>((const float*)x, (float*)y, n, 4000000);
  if (wait) cudaStreamSynchronize(stream);
}
"""
ext = load_inline(
    name="twice_at_ext",
    cpp_sources="#include <pybind11/pybind11.h>\\nvoid twice_at(unsigned long long, unsigned long long, long long, bool);",
    cuda_sources=cuda_source,
    functions=["twice_at"],
    no_implicit_headers=True,
    with_pytorch_error_handling=False,
)
'''
_SEARCH = """
import ctypes, os
def strangers():
    cuda, libc, found = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL(None), 0
    def importable(fd):
        handle = ctypes.c_ulonglong()
        return cuda.cuMemImportFromShareableHandle(ctypes.byref(handle), ctypes.c_void_p(fd), 1) == 0
    for fd in range(3, 256):
        try:
            name = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        found += not name.startswith(("socket:", "pipe:")) and importable(fd)
    for pid in range(1, 400):
        if pid == os.getpid():
            continue
        pidfd = libc.syscall(434, pid, 0)
        for number in range(3, 64) if pidfd >= 0 else ():
            taken = libc.syscall(438, pidfd, number, 0)
            found += 2 * (taken >= 0 and importable(taken))
    return found
others = None
"""
_SEARCHED = """
global others
if others is None:
    others = strangers()
"""


def _row(promise: str, name: str, off: str, attack: Candidate, twin: Candidate, **more: object) -> DeviceRow:
    row = DeviceRow(promise, name, off, attack, twin, target="twice_any")
    return dataclasses.replace(row, **more)  # type: ignore[arg-type]


HONEST_MODULE = model("return x * 2")
_PRODUCT = model("return args[0] @ args[1]")
_STREAM = "y = torch.zeros_like(x)\nwith torch.cuda.stream(s):\n    torch.cuda._sleep(20_000_000)\n    y.copy_(2 * x)\nreturn y"
_BESIDE = "with torch.cuda.stream(s):\n    y = x * 2\ntorch.cuda.current_stream().wait_stream(s)\nreturn y"
_TAIL = """y = torch.empty_like(x)
n = x.shape[0] // 2
s.wait_stream(torch.cuda.current_stream())
torch.softmax(x[:n], -1, out=y[:n])
with torch.cuda.stream(s):
    torch.softmax(x[n:], -1, out=y[n:])
x.record_stream(s)
y.record_stream(s)
JOIN
return y"""
_NO_SWITCH = "answers are copied at once, in the worker's own stream: there is nothing to switch off"
_OWN = model("return times(x, 2)", before=_TRITON)
_WORK = "labels come from what ran in a call; `allow` switches them off, and is the user's"

MODULE_ROWS = (
    _row(
        "2: an answer is what is there when a call returns",
        "compute in a stream that nobody waits for",
        "",
        model(_STREAM, before="s = torch.cuda.Stream()"),
        model(
            _STREAM.replace("with torch", "s.wait_stream(torch.cuda.current_stream())\nwith torch").replace(
                "return", "torch.cuda.current_stream().wait_stream(s)\nreturn"
            ),
            before="s = torch.cuda.Stream()",
        ),
        why=_NO_SWITCH,
    ),
    _row(
        "2: a further instance has weights of its own, wherever they lie",
        "know weights by their address",
        "instances",
        model(_DECAY.replace("KEPT", "factors"), _DECAY_INIT, before="factors = {}"),
        model(_DECAY.replace("KEPT", "self.own"), _DECAY_INIT),
        target="DecayAny",
        words="instance",
    ),
    _row(
        "2: nothing is read outside of a buffer, by a module's kernels either",
        "prefetch what lies behind an input",
        "edges",
        model("return twice(x, 32)", before=_PREFETCH),
        model("return twice(x, 0)", before=_PREFETCH),
        refused=(*_REJECTED, *_CRASH),
    ),
    _row(
        "2: inputs are what is there when the caller's stream comes to the call",
        "read the inputs in a stream that does not wait for the caller's",
        "still written",
        model(_BESIDE, before="s = torch.cuda.Stream()"),
        model("s.wait_stream(torch.cuda.current_stream())\n" + _BESIDE, before="s = torch.cuda.Stream()"),
    ),
    _row(
        "2: an answer is there when the caller's stream comes to it, whoever else has the device",
        "leave half of the rows to a stream that nobody waits for",
        "still written",
        model(_TAIL.replace("JOIN", ""), before="s = torch.cuda.Stream()"),
        model(_TAIL.replace("JOIN", "torch.cuda.current_stream().wait_stream(s)"), before="s = torch.cuda.Stream()"),
        target="shares_any",
    ),
    _row(
        "2: an answer is what is there when a call returns, from native code too",
        "launch on a stream of its own",
        "",
        model("y = torch.zeros_like(x)\next.twice_at(x.data_ptr(), y.data_ptr(), x.numel(), False)\nreturn y", before=_NATIVE),
        model("y = torch.zeros_like(x)\next.twice_at(x.data_ptr(), y.data_ptr(), x.numel(), True)\nreturn y", before=_NATIVE),
        why=_NO_SWITCH,
    ),
    _row(
        "2: an answer is what is there when a call returns, whoever computes it",
        "let a thread finish",
        "",
        model("y = torch.zeros_like(x); threading.Thread(target=later, args=(y, x)).start(); return y", before=_LATER),
        model("y = torch.zeros_like(x); t = threading.Thread(target=later, args=(y, x)); t.start(); t.join(); return y", before=_LATER),
        why=_NO_SWITCH,
    ),
    _row(
        "2: answers are plain tensors",
        "return a lazy result",
        "",
        model("return (x * 2).as_subclass(Lazy)", before=_LAZY),
        model("return (x * 2).as_subclass(torch.Tensor)", before=_LAZY),
        refused=(Status.INCORRECT_SHAPE,),
        why="the worker copies plain tensors and nothing else: without that there is no answer to judge",
    ),
    _row(
        "2: repeated pointers come with new values",
        "remember answers by address",
        "pointers",
        model("if x.data_ptr() not in answers: answers[x.data_ptr()] = x * 2\nreturn answers[x.data_ptr()].clone()", before="answers = {}"),
        model("answers[x.data_ptr()] = x * 2\nreturn answers[x.data_ptr()].clone()", before="answers = {}"),
    ),
    _row(
        "2: repeated pointers come with new values, for graphs too",
        "replay a graph with old inputs",
        "pointers",
        model(_GRAPH_FORWARD.replace("REFRESH", "") + "return out.clone()", before=_GRAPHS),
        model(_GRAPH_FORWARD.replace("REFRESH", "static.copy_(x)") + "return out.clone()", before=_GRAPHS),
    ),
    _row(
        "2: outputs hold nothing of earlier calls",
        "return memory that an earlier answer was in",
        "",
        model("return torch.empty_like(x)"),
        HONEST_MODULE,
        why="any trial sees it",
    ),
    _row(
        "2: values change between two of many calls",
        "rest until the next pause",
        "changed",
        model(_RESTS.replace("HONEST", "False"), before=_PAUSES),
        model(_RESTS.replace("HONEST", "True"), before=_PAUSES),
        words="without a pause",
    ),
    _row(
        "2: calls leave no memory behind",
        "keep a workspace of every call",
        "leaks",
        model("kept.append(torch.empty(32768, device=x.device))\nreturn x * 2", before="kept = []"),
        model("kept.append(torch.empty(32768, device=x.device))\ndel kept[:-4]\nreturn x * 2", before="kept = []"),
        refused=_REJECTED,
        words="memory behind",
    ),
    _row(
        "2: calls leave the device to others",
        "let a thread keep the device busy",
        "at work",
        model("begin()\nreturn x * 2", before=_HOG.replace("BUSY", "True")),
        model("begin()\nreturn x * 2", before=_HOG.replace("BUSY", "False")),
        refused=(*_REJECTED, Status.TIMEOUT),  # a device that never rests keeps whoever waits for it, too
    ),
    _row(
        "2: calls leave the settings of others alone",
        "keep the caller's stream a part of the L2",
        "left",
        model("hold(x, x.nbytes)\nreturn x * 2", before=_HOLD),
        model("hold(x, x.nbytes)\nhold(x, 0)\nreturn x * 2", before=_HOLD),
        refused=_REJECTED,
        words="access policy window",
    ),
    _row(
        "2: calls leave the settings of others alone",
        "let all products add up in half precision from now on",
        "left",
        model("torch.backends.cuda.matmul.allow_fp16_accumulation = True\nreturn x * 2"),
        model(
            "torch.backends.cuda.matmul.allow_fp16_accumulation = True\n"
            "torch.backends.cuda.matmul.allow_fp16_accumulation = False\nreturn x * 2"
        ),
        refused=_REJECTED,
        words="torch.backends.cuda.matmul",
    ),
    _row(
        "2: inputs are compared before and after",
        "write into an input",
        "mutation",
        model("x.mul_(2); return x.clone()"),
        HONEST_MODULE,
        refused=_REJECTED,
        words="was changed",
    ),
    _row(
        "2: inputs are not written, not even for a moment",
        "write into an input and put the old values back",
        "sealed",
        model("old = x.clone(); y = x.mul_(2).clone(); x.copy_(old); return y"),
        model("old = x.clone(); y = old.mul_(2).clone(); return y"),
        refused=_REJECTED,
        words="may put the old back",
    ),
    _row(
        "2: the declared precision sets the bound",
        "let torch use TF32",
        "comparison",
        model(
            "torch.backends.cuda.matmul.allow_tf32 = True\ny = args[0] @ args[1]\n"
            "torch.backends.cuda.matmul.allow_tf32 = False\nreturn y"
        ),
        _PRODUCT,
        target="product_any",
    ),
    _row(
        "2: the declared precision sets the bound, also behind casts",
        "multiply in half precision",
        "comparison",
        model("return (args[0].half() @ args[1].half()).float()"),
        _PRODUCT,
        target="product_any",
    ),
    _row(
        "1: a worker holds no memory but its own",
        "look for other processes' device memory",
        "",
        model(_SEARCHED + "return x * 2 if others > 1 else torch.zeros_like(x)", before=_SEARCH),
        model(_SEARCHED + "return x * 2 if others is not None else torch.zeros_like(x)", before=_SEARCH),
        why="several fences at once: process ids, seccomp, descriptors; test_sandbox_attacks switches off each",
    ),
    _row(
        "4: a label below `kernel` passes only where it is allowed",
        "call torch",
        "",
        model("return x + x"),
        _OWN,
        target="twice",
        refused=_REJECTED,
        why=_WORK,
    ),
    _row(
        "4: own kernels make the answer",
        "launch a decoy",
        "",
        model("times(x, 2)\nreturn x * 2", before=_TRITON),
        _OWN,
        target="twice",
        refused=_REJECTED,
        why=_WORK,
    ),
    _row(
        "4: torch's work shows in a graph as well",
        "hide torch in a graph and copy its answer",
        "",
        model(_GRAPH_FORWARD.replace("REFRESH", "static.copy_(x)") + "return times(out, 1)", before=_GRAPHS + _TRITON),
        _OWN,
        target="twice",
        refused=_REJECTED,
        why=_WORK,
    ),
)  # fmt: skip

#: (name, candidate, statuses). None is ever a pass.
MODULE_REFUSED: tuple[tuple[str, Candidate, tuple[Status, ...]], ...] = (
    ("leave with status 0", model("import os; os._exit(0)"), _CRASH),
    ("print a verdict", model("print('PASSED', flush=True); return torch.zeros_like(x)"), _WRONG),
    ("fail an assertion on the device", model("return x[torch.full((64,), 1 << 30, device=x.device)]"), _CRASH),
    (
        "touch no memory",
        model(
            "import ctypes\nctypes.CDLL('libcuda.so.1').cuMemsetD32_v2(ctypes.c_uint64(64), 7, ctypes.c_size_t(4))\n"
            "torch.as_tensor(Fake(), device=x.device).fill_(1); return x * 2",
            before="class Fake:\n    __cuda_array_interface__ = {'shape': (4,), 'typestr': '<f4', 'data': (x_at, False), 'version': 3}".replace("x_at", "1 << 46"),
        ),
        _CRASH,
    ),
    (
        "take all memory",
        model(
            "self.hold = torch.empty(torch.cuda.mem_get_info()[0] - (256 << 20), dtype=torch.uint8, device=x.device)\nreturn x * 2"
        ),
        _CRASH,
    ),
    ("end the device's context", model("import ctypes\nctypes.CDLL('libcuda.so.1').cuDevicePrimaryCtxReset_v2(0)\nreturn x * 2"), (*_CRASH, *_WRONG, Status.TIMEOUT)),
)  # fmt: skip
MODULE_ENDLESS: tuple[tuple[str, Candidate, tuple[Status, ...]], ...] = (
    ("sleep for ever on the device", model("torch.cuda._sleep(1 << 60); return x * 2"), (Status.TIMEOUT,)),
    ("loop for ever on the host", model("while True: pass"), (Status.TIMEOUT,)),
)

_WORKS = "torch.cuda._sleep(400_000); return x * 2"
_STOP_CLOCKS = """
import time
nothing = lambda *args, **kwargs: 0
time.perf_counter_ns = time.monotonic_ns = time.time_ns = time.perf_counter = time.monotonic = nothing
torch.cuda.Event.elapsed_time = torch.cuda.Event.synchronize = torch.cuda.Event.query = nothing
"""
_STOP_WAITING = """
nothing = lambda *args, **kwargs: None
torch.cuda.synchronize = torch._C._cuda_synchronize = torch.cuda.Stream.synchronize = nothing
torch.cuda.current_stream = nothing
"""
#: The worker's own wait is an object like any other to who shares its process; what it says of it is not believed.
_ANSWER_EARLY = """
import gc
hurried = []
def hurry():
    if hurried:
        return
    hurried.append(1)
    for found in gc.get_objects():
        if type(found).__name__ == "_Service" and hasattr(found, "_wait"):
            found._wait = lambda: (0,)
"""
_LAZY_CALLS = """
import time
visited, last = {}, [0.0]
def cycles(place):
    now = time.perf_counter()
    if now - last[0] > 0.002:
        visited.clear()
    last[0] = now
    return 160_000 if visited.setdefault(place, now) < now else 400_000
"""
_LEFT_BEHIND = """
import threading, time
wait = torch.cuda.synchronize
torch.cuda.synchronize = lambda *args, **kwargs: torch.cuda.current_stream().synchronize()
def spin():
    side = torch.cuda.Stream()
    while True:
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
        side.synchronize()
threading.Thread(target=spin, daemon=True).start()
"""
#: Timed: (name, candidate). A call of all but the last takes 200 us on the device, whatever they do to clocks.
CLOCKS: tuple[tuple[str, Candidate], ...] = (
    ("honest", model(_WORKS)),
    ("stop every clock", model(_WORKS, before=_STOP_CLOCKS)),
    ("do not wait for the device", model(_WORKS, before=_STOP_WAITING)),
    ("answer before the device is done", model(f"hurry(); {_WORKS}", before=_ANSWER_EARLY)),
    (
        "take less where a place was visited since a pause",
        model("torch.cuda._sleep(cycles(x.data_ptr())); return x * 2", before=_LAZY_CALLS),
    ),
    ("leave a kernel running beside the baselines", model("return x * 2", before=_LEFT_BEHIND)),
)

_SKIPS = "return x if place() is None else RESULT"
_WRITES = """
where = place()
if where is None:
    return x
return torch.mul(x, 2, out=where) if isinstance(where, torch.Tensor) else x * 2
"""


def _skips(result: str) -> tuple[Candidate, Candidate]:
    return model(_SKIPS.replace("RESULT", result), before=STACK), model(f"return {result}")


#: Timed: (name, target, attack, twin, least). It works where its answer is fetched, and rests in all other calls; if it
#: passes, then with this share of its twin's time at least. Who saves the copying of his answers, too, is stopped only
#: where memory would have to be faster than it is.
SKIPPING: tuple[tuple[str, str, Candidate, Candidate, float], ...] = (
    ("8 us", "twice_any", *_skips("x * 2"), 0.3),
    ("60 us", "wide_any", *_skips("torch.sin(x) * x + 1"), 0.6),
    ("19 us, bound by memory", "doubled_any", *_skips("x * 2"), 0.4),
    ("19 us, and saves the copying", "doubled_any", model(_WRITES, before=STACK), model("return x * 2"), 0.12),
)
