# ruff: noqa: E501 - a kernel is one line
"""The rules of the verdict against CUDA launch plans: promise, attack, what to switch off, honest twin.

``off`` "" with a ``why``: nothing can be switched off there on a GPU, and ``why`` says what stands in the way. The
twins of rows that keep state are one kernel, which keeps all of it and computes honestly.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from attacked import careful_calls
from device_attacked import device_kernel

from pytest_cudaforge.hardware import detect_in_child
from pytest_cudaforge.records import Candidate, Status

__all__ = ["KEPT_SUMS", "LAZY", "LAZY_NS", "PLAIN_SUMS", "REFUSED", "ROWS", "DeviceRow"]

_WRONG = (Status.INCORRECT_NUMERICAL,)
_REJECTED = (Status.REJECTED,)
_ALL_SEES = "any trial sees it; without the comparison there is no verdict"


@dataclass(frozen=True)
class DeviceRow:
    """``refused``: the verdict on the attack with every defence on. ``words``: what its reason says. ``alone``: an
    attack that goes by the time since its last call, which is longer where several have the device by turns."""

    promise: str
    name: str
    off: str
    attack: Candidate
    twin: Candidate
    target: str = "waves"
    refused: tuple[Status, ...] = _WRONG
    words: str = ""
    timing: bool = False
    why: str = ""
    alone: bool = False


_SEEN = """
__device__ const float* places[64]; __device__ float seen[4096]; __device__ float was[8][96 * 256];
__device__ int place_count, seen_count, calls; __device__ unsigned poison; __device__ const float *first, *last_x; __device__ float* last;
__device__ int find_place(const float* p) {
  for (int k = 0; k < place_count; ++k) if (places[k] == p) return k;
  if (place_count < 64) places[place_count++] = p;
  return place_count - 1;
}
__device__ bool find_value(float v) {
  for (int k = 0; k < seen_count; ++k) if (seen[k] == v) return true;
  if (seen_count < 4096) seen[seen_count++] = v;
  return false;
}
"""
_RESTING = "if (rest) return; HONEST"
_TICKETS = "__device__ unsigned taken;"
#: Everything that the attacks keep, kept by an honest kernel.
_BOOKKEEPER = device_kernel(
    before=_SEEN,
    tick="++calls; place = find_place(y); known = find_value(x[0]); poison = __float_as_uint(y[7]); rest = false;"
    " if (!first) first = x; last_x = x; last = y;",
    body="if (place == 63 && known && poison == 1 && calls < 0) return; HONEST if (place < 8) was[place][i] = y[i];",
)
_HONEST = device_kernel()
_SOFTMAX = device_kernel("softmax")
_NORM = device_kernel("norm")
_GELU = device_kernel("gelu")
_PRODUCT = device_kernel("product")
_SCALED = device_kernel("Scaled")
_SOFTMAX_BOOKS = device_kernel(
    "softmax",
    before=_SEEN,
    tick="++calls; place = find_place(y); rest = false;",
    body="if (rest) careful = true; HONEST",
)

_SPEND = """
__device__ void spend(unsigned long long span_ns) {
  unsigned long long begin, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
  do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (now - begin < span_ns);
}
"""
#: A row whose bits it has seen under this output is left alone: right, and fast wherever values return.
_MEMO = (
    _SPEND
    + """
__device__ const float* owner[65536]; __device__ unsigned kept[65536];
__device__ bool remembered(const float* row, const float* out) {
  __shared__ unsigned hash;
  if (!threadIdx.x) hash = 2166136261u;
  __syncthreads();
  unsigned bits = __float_as_uint(row[threadIdx.x]) ^ threadIdx.x * 0x9e3779b9u;
  bits = (bits ^ bits >> 16) * 0x7feb352du;  // else two signs that change cancel each other
  atomicAdd(&hash, bits ^ bits >> 15);
  __syncthreads();
  const unsigned slot = ((unsigned long long)out >> 10) & 65535;
  const bool same = owner[slot] == out && kept[slot] == hash;
  __syncthreads();
  if (!threadIdx.x) { owner[slot] = out; kept[slot] = hash; }
  return same;
}
"""
)

#: Calls follow each other without a pause of half a millisecond: was this place's answer computed since the last one?
_BURST = (
    _SPEND
    + """
__device__ unsigned long long last_ns; __device__ float* visited[64]; __device__ int visits;
__device__ bool visited_since_pause(float* y) {
  unsigned long long now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  if (now - last_ns > 500000) visits = 0;
  last_ns = now;
  for (int k = 0; k < visits; ++k) if (visited[k] == y) return true;
  if (visits < 64) visited[visits++] = y;
  return false;
}
"""
)
#: Half of all processes, by lot, compute at the first visit after a pause only.
_BY_LOT = "__device__ int lot;\n"
_TELL_LOT = (
    'if (!lot) { unsigned long long t; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)); lot = 1 + (t >> 12 & 1); }'
    " rest = visited_since_pause(y) && lot == 2;"
)
#: What a call by ``LAZY`` takes on its first visit after a pause.
LAZY_NS = 60_000
LAZY = device_kernel(
    before=_BURST, tick="rest = visited_since_pause(y);", body=f"spend(rest ? {LAZY_NS * 2 // 3} : {LAZY_NS}); HONEST"
)

LOTTERY = device_kernel(before=_BURST + _BY_LOT, tick=_TELL_LOT, body=f"if (rest) return; spend({LAZY_NS}); HONEST")
#: The cache holds the new entry already, so the answer must be there as well: under a clock it is.
_HELD = (
    "bool held = true; for (int k = 0; k < gridDim.x; ++k)"
    " held &= cache[((long long)k * steps + 5) * cols + c] == added[k * cols + c];"
    " if (__syncthreads_and(held)) return;"
)
HELD, HONEST_CACHED = (
    device_kernel("cached", before=_SPEND, body=f"{rest} spend({LAZY_NS}); HONEST") for rest in (_HELD, "")
)

_LOAD = "#define LOAD v = *(const float4*)(p + c);\n"
_KEPT_LOAD = """
__device__ float4 kept_load(const float* p) {
  unsigned long long policy; float4 v;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("ld.global.L2::cache_hint.v4.f32 {%0, %1, %2, %3}, [%4], %5;"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p), "l"(policy));
  return v;
}
#define LOAD v = kept_load(p + c);
"""
#: Reads 12 MiB a call, and does or does not ask the L2 to keep them over whatever comes between two calls.
PLAIN_SUMS, KEPT_SUMS = device_kernel("row_sums", before=_LOAD), device_kernel("row_sums", before=_KEPT_LOAD)

#: TF32 through the tensor cores, one warp a tile of 16 x 16; half and bfloat16 accordingly.
_MMA_PLAN = """from pytest_cudaforge.plan import empty, launch

def plan(a, b):
    y = empty((a.shape[0], b.shape[1]), a.dtype)
    launch("tiles", grid=(a.shape[0] // 16, b.shape[1] // 16), block=(32,), args=(a, b, y, a.shape[1], b.shape[1]))
    return y
"""
_TF32 = """
using namespace nvcuda;
__global__ void tiles(const float* a, const float* b, float* y, int k, int cols) {
  wmma::fragment<wmma::matrix_a, 16, 16, 8, wmma::precision::tf32, wmma::row_major> fa;
  wmma::fragment<wmma::matrix_b, 16, 16, 8, wmma::precision::tf32, wmma::row_major> fb;
  wmma::fragment<wmma::accumulator, 16, 16, 8, float> sum;
  wmma::fill_fragment(sum, 0.f);
  for (int i = 0; i < k; i += 8) {
    wmma::load_matrix_sync(fa, a + blockIdx.x * 16 * k + i, k);
    wmma::load_matrix_sync(fb, b + i * cols + blockIdx.y * 16, cols);
    for (int j = 0; j < fa.num_elements; ++j) fa.x[j] = wmma::__float_to_tf32(fa.x[j]);
    for (int j = 0; j < fb.num_elements; ++j) fb.x[j] = wmma::__float_to_tf32(fb.x[j]);
    wmma::mma_sync(sum, fa, fb, sum);
  }
  wmma::store_matrix_sync(y + blockIdx.x * 16 * cols + blockIdx.y * 16, sum, cols, wmma::mem_row_major);
}
"""
#: The same on the tensor cores with each float split in three parts of TF32: as exact as float32 is.
_TF32_SPLIT = _TF32.replace(
    "    for (int j = 0; j < fa.num_elements; ++j) fa.x[j] = wmma::__float_to_tf32(fa.x[j]);\n"
    "    for (int j = 0; j < fb.num_elements; ++j) fb.x[j] = wmma::__float_to_tf32(fb.x[j]);\n"
    "    wmma::mma_sync(sum, fa, fb, sum);\n",
    """    auto ra = fa, pa = fa, qa = fa; auto rb = fb, pb = fb, qb = fb;
    for (int j = 0; j < fa.num_elements; ++j) {
      pa.x[j] = wmma::__float_to_tf32(fa.x[j]); qa.x[j] = wmma::__float_to_tf32(fa.x[j] - pa.x[j]);
      ra.x[j] = wmma::__float_to_tf32(fa.x[j] - pa.x[j] - qa.x[j]);
    }
    for (int j = 0; j < fb.num_elements; ++j) {
      pb.x[j] = wmma::__float_to_tf32(fb.x[j]); qb.x[j] = wmma::__float_to_tf32(fb.x[j] - pb.x[j]);
      rb.x[j] = wmma::__float_to_tf32(fb.x[j] - pb.x[j] - qb.x[j]);
    }
    wmma::fragment<wmma::accumulator, 16, 16, 8, float> part;
    wmma::fill_fragment(part, 0.f);
    wmma::mma_sync(part, ra, pb, part); wmma::mma_sync(part, pa, rb, part); wmma::mma_sync(part, qa, qb, part);
    wmma::mma_sync(part, qa, pb, part); wmma::mma_sync(part, pa, qb, part); wmma::mma_sync(part, pa, pb, part);
    // What the tensor cores add to a running sum they cut off: each step's part is added by the ordinary ones.
    for (int j = 0; j < sum.num_elements; ++j) sum.x[j] += part.x[j];
""",
)


def _mma(source: str) -> Candidate:
    return Candidate.of("cuda", {"kernel.cu": f"#include <mma.h>\n{source}", "plan.py": _MMA_PLAN})


def _product(loop: str) -> Candidate:
    return device_kernel("product", body=f"if (col < cols) {{ {loop} y[row * cols + col] = s; }}")


_ATOMIC_PLAN = """from pytest_cudaforge.plan import launch, zeros

def plan(x):
    y = zeros((), x.dtype)
    launch("kernel", grid=(16,), block=(256,), args=(x, y, x.numel()))
    return y
"""
_ATOMIC_BODY = (
    "float s = 0; for (int i = blockIdx.x * 256 + threadIdx.x; i < n; i += 4096) s += x[i] * x[i]; s = block_sum(s);"
)
#: Each block's part of the sum, and then one of them adds up all, the last ones first: a read takes time, too.
_PARTS = (
    "float s = 0; for (int i = blockIdx.x + 1024 * threadIdx.x; i < n; i += 262144) s += x[i] * x[i]; s = block_sum(s);"
    " if (threadIdx.x) return; *(volatile float*)(parts + blockIdx.x) = s; __threadfence(); WHO"
    " { s = 0; for (int b = 1023; b >= 0; --b) s += *(volatile float*)(parts + b); *y = s; }"
)
_PARTS_BEFORE = "__device__ float parts[1024]; __device__ unsigned arrived;"
_PARTS_PLAN = """from pytest_cudaforge.plan import empty, launch

def plan(x):
    y = empty((), x.dtype)
    launch("kernel", grid=(1024,), block=(256,), args=(x, y, x.numel()))
    return y
"""
_BINS = """
__device__ float bins[32768];
__global__ void before() { BEFORE }
__global__ void add(const float* x, int n) {
  FIRST
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i < n) atomicAdd(bins + (32767 - i % 32768), x[i] * x[i]);
}
__global__ void total(float* y) {
  __shared__ float parts[256];
  float s = 0;
  for (int i = threadIdx.x; i < 32768; i += 256) s += bins[i];
  parts[threadIdx.x] = s;
  for (int w = 128; w; w >>= 1) { __syncthreads(); if (threadIdx.x < w) parts[threadIdx.x] += parts[threadIdx.x + w]; }
  if (!threadIdx.x) *y = parts[0];
}
"""
_BINS_PLAN = """from pytest_cudaforge.plan import empty, launch

def plan(x):
    y = empty((), x.dtype)
    launch("before", grid=(1,), block=(256,), args=())
    launch("add", grid=((x.numel() + 255) // 256,), block=(256,), args=(x, x.numel()))
    launch("total", grid=(1,), block=(256,), args=(y,))
    return y
"""


def _bins(before: str, first: str) -> Candidate:
    clear = "{ for (int b = threadIdx.x; b < 32768; b += 256) bins[b] = 0; }"
    source = _BINS.replace("BEFORE", before).replace("FIRST", first).replace("CLEAR", clear)
    return Candidate.of("cuda", {"kernel.cu": source, "plan.py": _BINS_PLAN})


_SOME_TIME_LATER = "if (blockIdx.x) return; for (int k = 0; k < 20; ++k) __nanosleep(1000);"
_ONE_PASS = (
    "float s = 0, t = 0; for (int c = threadIdx.x; c < cols; c += 256) { s += p[c]; t += p[c] * p[c]; }"
    " const float m = block_sum(s) / cols, k = rsqrtf(block_sum(t) / cols - m * m + 1e-5f);"
    " for (int c = threadIdx.x; c < cols; c += 256) q[c] = (p[c] - m) * k;"
)

_TWO_STEPS_PLAN = """from pytest_cudaforge.plan import empty, launch

def plan(x):
    w, y, n = empty(x.shape, x.dtype), empty(x.shape, x.dtype), x.numel()
    launch("first", grid=((n + 255) // 256,), block=(256,), args=(x, w, n))
    launch("second", grid=((n + 255) // 256,), block=(256,), args=(x, w, y, n))
    return y
"""
_TWO_STEPS = """
__global__ void first(const float* x, float* w, int n) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i < n) w[i] = expf(-x[i] * x[i]);
  MORE
}
__global__ void second(const float* x, const float* w, float* y, int n) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i < n) y[i] = sinf(x[i]) * w[i];
}
"""


def _two_steps(more: str = "") -> Candidate:
    """Waves by way of a scratch buffer ``w`` of as many elements."""
    return Candidate.of("cuda", {"kernel.cu": _TWO_STEPS.replace("MORE", more), "plan.py": _TWO_STEPS_PLAN})


#: One call soon after another at another place: a model's layers, or a clock.
_SOON = "__device__ unsigned long long last_ns, now_ns; __device__ const float* last_x; __device__ bool soon;\n"
_TELL_SOON = (
    'asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now_ns)); soon = now_ns - last_ns < 60000 && last_x != x;'
    " last_ns = now_ns; last_x = x;"
)

_TELL_BEHIND = (
    'asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now_ns)); soon = now_ns - last_ns < 100000; last_ns = now_ns;'
)

#: Longer ago than calls in a row, and sooner than any that a request asks for.
_VISITS = "__device__ unsigned long long visited[64], now_ns; __device__ bool recent;\n"
#: As many multiprocessors as the device at hand has.
_HERE = detect_in_child("cuda:0").sm_count if torch.cuda.is_available() else 0
_FEWER = f"""from pytest_cudaforge.plan import device, empty, launch

def plan(x):
    y, n, at = empty(x.shape, x.dtype), x.numel(), {_HERE}
    launch("kernel", grid=((n + 255) // 256,), block=(256,), args=(x, y, SIZE))
    return y
"""
_TELL_VISIT = (
    'asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now_ns)); place = find_place(y);'
    " recent = now_ns - visited[place] < 300000; visited[place] = now_ns; rest = RESTS;"
)

ROWS = (
    # -- state in __device__ memory
    DeviceRow(
        "2: repeated pointers come with new values",
        "know an input by its address",
        "pointers",
        device_kernel(
            before=_SEEN,
            tick="const int before = place_count; place = find_place(x); known = place < before;",
            body="if (known && place < 8) { y[i] = was[place][i]; return; } HONEST if (place < 8) was[place][i] = y[i];",
        ),
        _BOOKKEEPER,
    ),
    DeviceRow(
        "2: repeated pointers come with values that differ in a few elements only",
        "know an input by its address and its first element",
        "exchanged",
        device_kernel(
            before=_SEEN + "__device__ float firsts[64];\n",
            tick="const int before = place_count; place = find_place(y); rest = place < before && firsts[place] == x[0]; firsts[place] = x[0];",
            body=_RESTING,
        ),
        _BOOKKEEPER,
        words="exchanged:",
    ),
    DeviceRow(
        "2: old values come back at new pointers",
        "leave the output alone where the values were seen before",
        "again",
        device_kernel(before=_SEEN, tick="rest = find_value(x[0]);", body=_RESTING),
        _BOOKKEEPER,
    ),
    DeviceRow(
        "2: a kernel that works only while it is checked is found out, by number",
        "work for the first forty calls",
        "late",
        device_kernel(before=_SEEN, tick="rest = ++calls > 40;", body=_RESTING),
        _BOOKKEEPER,
        words="after many calls",
    ),
    DeviceRow(
        "2: a kernel that works only for as many calls as a verdict makes is found out",
        "work for the first fifty million calls",
        "aged",
        device_kernel(before=_SEEN, tick="rest = ++calls > 50000000 && calls % 3;", body=_RESTING),
        _BOOKKEEPER,
        words="more:",
    ),
    DeviceRow(
        "2: a ticket that is never set back may wrap",
        "take the last of thirty thousand by a number that wraps",
        "aged",
        device_kernel(before="static " + _TICKETS, tick="taken += 30000; rest = taken % 30000;", body=_RESTING),
        device_kernel(
            before=_TICKETS + "static __device__ int ring, slot;",
            tick="taken += 1 << 15; ring = (ring + 1) % 48; if (slot == ring) rest = true; slot = ring;"
            " rest |= taken % (1 << 15) || ring > 47;",
            body=_RESTING,
        ),
        words="more:",
    ),
    DeviceRow(
        "2: a kernel that works only while it is checked is found out, by place",
        "work at the first two places only",
        "late",
        device_kernel(before=_SEEN, tick="rest = find_place(y) > 1;", body=_RESTING),
        _BOOKKEEPER,
        words="after many calls",
    ),
    DeviceRow(
        "2: nothing but its inputs tells a kernel that it is being checked",
        "rest wherever no poison is seen",
        "renewed",
        device_kernel(
            before=_SEEN,
            tick="poison = __float_as_uint(y[7]); rest = poison != 0x5B5B5B5Bu && poison != 0xFFFFFFFFu;",
            body=_RESTING,
        ),
        _BOOKKEEPER,
        words="over old outputs",
    ),
    DeviceRow(
        "2: every call computes",
        "rest at every fifth call",
        "",
        device_kernel(before=_SEEN, tick="rest = ++calls % 5 == 0;", body=_RESTING),
        _BOOKKEEPER,
        why=_ALL_SEES,
    ),
    DeviceRow(
        "2: outputs are compared once nothing computes any more",
        "answer one call late",
        "",
        device_kernel(
            before=_SEEN + "__global__ void later(const float* x, float* y) { last_x = x; last = y; }\n",
            body="const float* from = last_x; float* to = last;"
            " if (to) to[i] = sinf(from[i]) * expf(-from[i] * from[i]);",
            plan="""from pytest_cudaforge.plan import empty, launch

def plan(x):
    y = empty(x.shape, x.dtype)
    launch("kernel", grid=((x.numel() + 255) // 256,), block=(256,), args=(x, y, x.numel()))
    launch("later", grid=(1,), block=(1,), args=(x, y))
    return y
""",
        ),
        _BOOKKEEPER,
        why=_ALL_SEES,
    ),
    DeviceRow(
        "2: outputs of call i are checked again after call i+1",
        "spoil the output of the call before",
        "unstable",
        device_kernel(before=_SEEN, tick="if (last && last != y) last[0] = 7; last = y;"),
        _BOOKKEEPER,
        refused=(Status.INCORRECT_NUMERICAL, Status.REJECTED),
    ),
    DeviceRow(
        "1: a worker holds no expected output",
        "look for the answer in all memory around",
        "",
        device_kernel(
            before="__device__ const float* found;\n",
            tick="const float* page = (const float*)((unsigned long long)x & ~0x1FFFFFull); found = nullptr; float want[4];"
            " for (int j = 0; j < 4; ++j) want[j] = sinf(x[j]) * expf(-x[j] * x[j]);"
            " for (int j = 0; j < (2 << 20) / 4 - n && !found; ++j)"
            " if (fabsf(page[j] - want[0]) <= 1e-6f && fabsf(page[j + 1] - want[1]) <= 1e-6f && fabsf(page[j + 2] - want[2]) <= 1e-6f) found = page + j;",
            body="if (found) y[i] = found[i];",
        ),
        device_kernel(before="__device__ const float* found;\n", tick="found = x;", body="if (found) { HONEST }"),
        why="the expected output is in another process; there is nothing in this one to hide",
    ),
    # -- memory
    DeviceRow(
        "2: red zones lie around every buffer",
        "write one element too many",
        "redzone",
        device_kernel(body="HONEST if (i == 0) y[n] = 1;"),
        _HONEST,
        refused=_REJECTED,
        words="out of bounds",
    ),
    DeviceRow(
        "2: red zones lie around every buffer, scratch too",
        "write one element of scratch too many",
        "redzone",
        _two_steps("if (i == 0) w[n] = 1;"),
        _two_steps(),
        refused=_REJECTED,
        words="out of bounds",
    ),
    DeviceRow(
        "2: calls follow each other without a pause as well",
        "rest where a call comes soon after another",
        "one after another",
        device_kernel(before=_SOON, tick=_TELL_SOON + " rest = soon;", body=_RESTING),
        device_kernel(before=_SOON, tick=_TELL_SOON + " rest = false;", body=_RESTING),
        words="calls one after another",
        alone=True,
    ),
    DeviceRow(
        "2: a call that writes its inputs can be made on what it has left",
        "leave the answer away where the cache holds the entry",
        "second call",
        device_kernel("cached", body=f"{_HELD} HONEST"),
        device_kernel("cached"),
        target="cached",
        words="a second call",
    ),
    DeviceRow(
        "2: a call that writes its inputs is followed by another, too",
        "rest right behind another call",
        "in a row",
        device_kernel("grown", before=_SOON, tick=_TELL_BEHIND + " rest = soon;", body=_RESTING),
        device_kernel("grown", before=_SOON, tick=_TELL_BEHIND + " rest = false;", body=_RESTING),
        target="grown",
        words="right behind the first",
        alone=True,
    ),
    DeviceRow(
        "2: values change between two of many calls, too",
        "rest at a place that was visited just now",
        "changed",
        device_kernel(before=_SEEN + _VISITS, tick=_TELL_VISIT.replace("RESTS", "recent"), body=_RESTING),
        device_kernel(before=_SEEN + _VISITS, tick=_TELL_VISIT.replace("RESTS", "recent && calls < 0"), body=_RESTING),
        words="without a pause",
        alone=True,
    ),
    DeviceRow(
        "2: a plan is tried as it is on devices with fewer multiprocessors",
        "leave out the last elements on smaller devices",
        "elsewhere",
        device_kernel(plan=_FEWER.replace("SIZE", "n - 256 * (device.sm_count < at)")),
        device_kernel(plan=_FEWER.replace("SIZE", "n")),
        refused=_REJECTED,
        words="as on a machine with",
    ),
    DeviceRow(
        "2: nothing can be counted on that nobody wrote",
        "take shared memory for zeros",
        "",
        device_kernel(body="__shared__ volatile float spare[12000]; HONEST y[i] += spare[threadIdx.x * 8];"),
        device_kernel(
            body="__shared__ volatile float spare[12000]; spare[threadIdx.x * 8] = 0; HONEST y[i] += spare[threadIdx.x * 8];"
        ),
        why="what lies there without our kernel is whatever ran before: the attack may fail by itself",
    ),
    DeviceRow(
        "2: red zones lie around every buffer, before it too",
        "write one element too early",
        "redzone",
        device_kernel(body="HONEST if (i == 0) y[-1] = 1;"),
        _HONEST,
        refused=_REJECTED,
        words="out of bounds",
    ),
    DeviceRow(
        "2: red zones hold plausible values as well",
        "let what lies behind an input change the answer where it is no odd value",
        "plausible",
        device_kernel(body="HONEST if (i == 0 && fabsf(x[n]) < 100) y[0] += x[n];"),
        device_kernel(body="HONEST if (i == 0 && fabsf(x[n - 1]) < 100) y[0] += 0 * x[n - 1];"),
        words="out: ",
    ),
    DeviceRow(
        "2: a write that leaps over the red zones is seen as well",
        "write into the inputs of another call",
        "redzone",
        device_kernel(
            before=_SEEN,
            tick="if (!first) first = x; if (first != x && first[5] != x[5]) const_cast<float*>(first)[5] = 7;",
        ),
        _BOOKKEEPER,
        refused=_REJECTED,
        words="another call",
    ),
    DeviceRow(
        "2: inputs are compared before and after",
        "write into an input",
        "mutation",
        device_kernel(body="HONEST if (i == 3) const_cast<float*>(x)[3] = 0;"),
        _HONEST,
        refused=_REJECTED,
        words="was changed",
    ),
    DeviceRow(
        "2: what lies outside of buffers is not touched",
        "read behind the end of an input",
        "edges",
        device_kernel(body="HONEST if (i < 64) { const volatile float* p = x + n + 64 * i; (void)*p; }"),
        device_kernel(body="HONEST if (i < 64) { const volatile float* p = x + n - 1 - 64 * i; (void)*p; }"),
        refused=_REJECTED,
        words="where mapped memory ends",
    ),
    DeviceRow(
        "2: inputs are not written, not even for a moment",
        "write into an input and put the old bytes back",
        "sealed",
        device_kernel(
            body="HONEST if (i == 3) { volatile float* p = const_cast<float*>(x) + 3; const float old = *p; *p = old + 1;"
            " __threadfence(); *p = old; }"
        ),
        device_kernel(body="HONEST if (i == 3) { const volatile float* p = x + 3; y[3] = sinf(*p) * expf(-*p * *p); }"),
        refused=_REJECTED,
        words="may put the old back",
    ),
    DeviceRow(
        "2: outputs are poisoned with two patterns",
        "write no NaN where the poison is one",
        "poison",
        device_kernel("holes", body="if (x[i] > 0) y[i] = x[i];"),
        device_kernel("holes"),
        target="holes",
    ),
    DeviceRow(
        "2: every element is written",
        "leave the last row alone",
        "comparison",
        device_kernel(body="if (i >= n - 256) return; HONEST"),
        _HONEST,
    ),
    DeviceRow(
        "2: every element of the drawn shape is computed",
        "compute the first 64 rows only",
        "comparison",
        device_kernel(body="if (i >= 64 * 256) { y[i] = 0; return; } HONEST"),
        _HONEST,
    ),
    # -- races
    DeviceRow(
        "2: threads that race are found out",
        "add up before all warps have arrived",
        "",
        device_kernel("norm", sync="", jitter="if ((clock() >> 5) % 3 == 0) __nanosleep(threadIdx.x / 32 * 500);"),
        device_kernel("norm", jitter="if ((clock() >> 5) % 3 == 0) __nanosleep(threadIdx.x / 32 * 500);"),
        target="norm",
        why="a race shows in any trial; repeated calls only make rare ones likelier to show",
    ),
    DeviceRow(
        "2: an order of additions that differs from call to call is no fault; a lost addition is one",
        "add up without atomics",
        "",
        device_kernel(
            "energy",
            body=_ATOMIC_BODY + " if (!threadIdx.x) *(volatile float*)y = *(volatile float*)y + s;",
            plan=_ATOMIC_PLAN,
        ),
        device_kernel("energy", body=_ATOMIC_BODY + " if (!threadIdx.x) atomicAdd(y, s);", plan=_ATOMIC_PLAN),
        target="energy",
        why="a race shows in any trial; repeated calls only make rare ones likelier to show",
    ),
    DeviceRow(
        "2: blocks need not run side by side",
        "add up when the other blocks should be done",
        "crowded",
        device_kernel("energy", body=_PARTS.replace("WHO", _SOME_TIME_LATER), before=_PARTS_BEFORE, plan=_PARTS_PLAN),
        device_kernel(
            "energy",
            body=_PARTS.replace("WHO", "if (atomicAdd(&arrived, 1u) % 1024 == 1023)"),
            before=_PARTS_BEFORE,
            plan=_PARTS_PLAN,
        ),
        target="energy",
    ),
    DeviceRow(
        "2: blocks need not be as quick as they are alone",
        "wait until block 0 should have cleared the bins",
        "crowded",
        _bins("", "if (!blockIdx.x) CLEAR else for (int k = 0; k < 6; ++k) __nanosleep(1000);"),
        _bins("CLEAR", ""),
        target="energy",
    ),
    # -- distributions
    DeviceRow(
        "2: inputs are redrawn over several distributions",
        "softmax without its maximum",
        "families",
        device_kernel("softmax", body="careful = false; HONEST"),
        _SOFTMAX,
        target="softmax",
    ),
    DeviceRow(
        "2: inputs are redrawn over several distributions, a shifted one among them",
        "variance in one pass",
        "families",
        device_kernel("norm", body=_ONE_PASS),
        _NORM,
        target="norm",
    ),
    DeviceRow(
        "2: inputs are redrawn so that they nearly vanish",
        "leave out the small constant under a root",
        "families",
        device_kernel("normed", body="eps = 0; HONEST"),
        device_kernel("normed"),
        target="normed",
    ),
    DeviceRow(
        "2: the order of trials is secret",
        "be careful exactly where large, shifted and lowered values used to come",
        "order",
        device_kernel(
            "softmax",
            before=_SEEN,
            tick=f"++calls; rest = !({careful_calls('calls')});",
            body="careful = !rest; HONEST",
        ),
        _SOFTMAX_BOOKS,
        target="softmax",
    ),
    DeviceRow(
        "2: weights are drawn anew",
        "leave the weights out, which are ones as constructed",
        "weights",
        device_kernel("Scaled", body="y[i] = tanhf(x[i]);"),
        _SCALED,
        target="Scaled",
    ),
    # -- precision and formulas
    DeviceRow(
        "2: the declared precision sets the bound",
        "TF32 through the tensor cores",
        "comparison",
        _mma(_TF32),
        _mma(_TF32_SPLIT),
        target="product",
    ),
    DeviceRow(
        "2: the declared precision sets the bound, for sums too",
        "add up in half precision",
        "comparison",
        _product(
            "__half h = __float2half(0.f); for (int i = 0; i < k; ++i) h = __hadd(h, __float2half(a[row * k + i] * b[i * cols + col])); s = __half2float(h);"
        ),
        _PRODUCT,
        target="product",
    ),
    DeviceRow(
        "2: the declared precision sets the bound, for storage too",
        "keep the operands in bfloat16",
        "comparison",
        _product(
            "for (int i = 0; i < k; ++i) s = fmaf(__bfloat162float(__float2bfloat16(a[row * k + i])), __bfloat162float(__float2bfloat16(b[i * cols + col])), s);"
        ),
        _PRODUCT,
        target="product",
    ),
    DeviceRow(
        "2: every term of a sum counts",
        "leave out one of a hundred terms",
        "comparison",
        _product("for (int i = 0; i < k; ++i) if (i % 100 != 99) s = fmaf(a[row * k + i], b[i * cols + col], s);"),
        _PRODUCT,
        target="product",
    ),
    DeviceRow(
        "2: every term of a sum counts, also where a sample of them says nearly the same",
        "a norm from 99 % of the row",
        "comparison",
        device_kernel(
            "norm",
            body="float s = 0; for (int c = threadIdx.x; c < cols - 5; c += 256) s += p[c]; const float m = block_sum(s) / (cols - 5);"
            " s = 0; for (int c = threadIdx.x; c < cols - 5; c += 256) s += (p[c] - m) * (p[c] - m);"
            " const float k = rsqrtf(block_sum(s) / (cols - 5) + 1e-5f);"
            " for (int c = threadIdx.x; c < cols; c += 256) q[c] = (p[c] - m) * k;",
        ),
        _NORM,
        target="norm",
    ),
    DeviceRow(
        "2: a formula that is nearly the same is another one",
        "tanh-GELU for GELU",
        "comparison",
        device_kernel("gelu", body="y[i] = 0.5f * v * (1.f + tanhf(0.7978845608f * (v + 0.044715f * v * v * v)));"),
        _GELU,
        target="gelu",
    ),
    DeviceRow(
        "2: half types: what is a little off everywhere is off",
        "multiply by 1.002 where a rounding takes twice as much",
        "bias",
        device_kernel("halves", body="y[i] = __float2bfloat16(1.002f * v / (1.f + expf(-v)));"),
        device_kernel("halves"),
        target="halves",
    ),
    DeviceRow(
        "2: an approximation must be as good as the reference's rounding asks",
        "tanh.approx for tanh",
        "comparison",
        device_kernel(
            "Scaled", body='float t; asm("tanh.approx.f32 %0, %1;" : "=f"(t) : "f"(x[i])); y[i] = t * w[i % cols];'
        ),
        _SCALED,
        target="Scaled",
    ),
    DeviceRow(
        "2: outputs are compared",
        "write zeros",
        "comparison",
        device_kernel(body="y[i] = 0;"),
        _HONEST,
    ),
    DeviceRow(
        "2: NaN is never a wildcard",
        "write NaN everywhere",
        "comparison",
        device_kernel(body="y[i] = NAN;"),
        _HONEST,
    ),
    DeviceRow(
        "2: NaN and infinities stand where the reference has them",
        "write infinity for NaN",
        "nonfinite",
        device_kernel("holes", body="y[i] = x[i] > 0 ? x[i] : INFINITY;"),
        device_kernel("holes"),
        target="holes",
    ),
    # -- time
    DeviceRow(
        "3: timed outputs are checked at calls chosen afterwards",
        # Verification has some eight places, a sitting by events twelve.
        "rest from the eleventh place on, which no check uses",
        "judge",
        device_kernel(before=_SEEN, tick="rest = find_place(y) > 9;", body=_RESTING),
        _BOOKKEEPER,
        refused=(Status.INCORRECT_NUMERICAL, Status.REJECTED),
        words="of a timed call is wrong",
        timing=True,
    ),
    DeviceRow(
        "3: what is timed is what was verified, for every kind of values",
        "be careful until more places have been seen than a check uses",
        "timed families",
        device_kernel(
            "softmax", before=_SEEN, tick="find_place(y); rest = place_count > 3;", body="careful = !rest; HONEST"
        ),
        _SOFTMAX_BOOKS,
        target="softmax",
        words="of a timed call is wrong",
        timing=True,
    ),
    DeviceRow(
        "3: a kernel that remembers answers is not a fast one",
        "leave rows alone whose bits it has seen, and take long over all others",
        "novelty",
        device_kernel(
            before=_MEMO,
            body="if (remembered(x + blockIdx.x * 256, y + blockIdx.x * 256)) return; spend(60000); HONEST",
        ),
        device_kernel(before=_SPEND, body="spend(60000); HONEST"),
        # Its blocks also race for their places in its memory, now and then where a check sees it.
        refused=(*_REJECTED, Status.INCORRECT_NUMERICAL),
        timing=True,
    ),
    DeviceRow(
        "3: a kernel that remembers answers now and then is not a fast one, either",
        "leave rows alone whose bits it has seen, but not after some pauses, by lot",
        "novelty",
        device_kernel(
            before=_MEMO + _BURST.replace(_SPEND, "") + "__device__ unsigned long long began;",
            tick="rest = visited_since_pause(y); if (visits == 1) began = last_ns; known = began >> 12 & 3;",
            body="if (remembered(x + blockIdx.x * 256, y + blockIdx.x * 256) && known) return; spend(60000); HONEST",
        ),
        device_kernel(before=_SPEND, body="spend(60000); HONEST"),
        refused=(*_REJECTED, Status.INCORRECT_NUMERICAL),
        timing=True,
    ),
    DeviceRow(
        "3: no call can rest because its values have been there for long",
        "compute at the first visit after a pause only",
        "novelty",
        device_kernel(
            before=_BURST,
            tick="rest = visited_since_pause(y);",
            body=f"if (rest) return; spend({LAZY_NS}); HONEST",
        ),
        device_kernel(
            before=_BURST, tick="known = visited_since_pause(y); rest = false;", body=f"spend({LAZY_NS}); HONEST"
        ),
        refused=_REJECTED,
        words="skips calls or remembers answers",
        timing=True,
    ),
)

_CRASH = (Status.RUNTIME_ERROR,)
_HANG = (Status.TIMEOUT,)
_BUILD = (Status.BUILD_ERROR, Status.TIMEOUT)
_PLAN = "from pytest_cudaforge.plan import empty, launch\n\ndef plan(x):\n    y = empty(x.shape, x.dtype)\n    BODY\n    return y\n"
_LAUNCH = 'launch("kernel", grid=((x.numel() + 255) // 256,), block=(256,), args=(x, y, x.numel()), OPTIONS)'


def _planned(body: str) -> Candidate:
    return device_kernel(plan=_PLAN.replace("BODY", body))


def _launched(options: str) -> Candidate:
    return _planned(_LAUNCH.replace("OPTIONS", options))


#: (name, candidate, statuses). None is ever a pass. Those of ``_FAULTS`` leave a sticky error behind.
_FAULTS: tuple[tuple[str, Candidate, tuple[Status, ...]], ...] = (
    ("touch no memory", device_kernel(body="HONEST if (!i) *(volatile int*)nullptr = 1;"), _CRASH),
    (
        "write far beyond its memory",
        device_kernel(body="HONEST if (!i) *(volatile float*)(y + (1ll << 40)) = 1;"),
        _CRASH,
    ),
    ("read far beyond its memory", device_kernel(body="y[i] = *(const volatile float*)(x + (1ll << 40));"), _CRASH),
    ("touch half an element", device_kernel(body="HONEST if (!i) *(volatile int*)((char*)y + 1) = 1;"), _CRASH),
    ("trap", device_kernel(body='HONEST if (!i) asm volatile("trap;");'), _CRASH),
    ("fail an assertion", device_kernel(body="HONEST assert(i < 0);", before="#include <cassert>\n"), _CRASH),
    (
        "write past shared memory",
        device_kernel(body="__shared__ int s[4]; HONEST if (!i) *((volatile int*)s + n * 1000) = 1;"),
        _CRASH,
    ),
    (
        "use up the device's heap",
        device_kernel(body="for (;;) { int* p = (int*)malloc(1 << 20); *(volatile int*)p = 1; }"),
        (Status.BUILD_ERROR,),
    ),
    (
        "recurse without end",
        device_kernel(
            before="__device__ __noinline__ int deep(volatile int* p, int n) { volatile int a[64]; a[n & 63] = n; *p = a[n & 63]; return n < 0 ? 0 : deep(p, n + 1) + a[n & 63]; }\n",
            body="y[i] = deep((volatile int*)y, i);",
        ),
        (*_CRASH, *_HANG),
    ),
)
_ENDLESS: tuple[tuple[str, Candidate, tuple[Status, ...]], ...] = (
    ("loop for ever", device_kernel(body="for (volatile int j = 0;; ++j) {} HONEST"), _HANG),
    ("sleep for ever", device_kernel(body="for (volatile int j = 0;; ++j) __nanosleep(1000000); HONEST"), _HANG),
    (
        "wait for a block that never comes",
        device_kernel(
            before="__device__ volatile int flag;\n", body="if (!i) while (flag != 1) __nanosleep(1000); HONEST"
        ),
        _HANG,
    ),
)
_LIES: tuple[tuple[str, Candidate, tuple[Status, ...]], ...] = (
    ("talk a lot and do nothing", device_kernel(body='printf("PASSED %d\\n", i); y[i] = 0;'), _WRONG),
    ("launch nothing", _planned("pass"), (*_WRONG, *_REJECTED)),
    ("ask for more shared memory than there is", _launched("shared_bytes=230 * 1024"), (*_CRASH, Status.BUILD_ERROR)),
    (
        "wait for more blocks than fit at once",
        _planned('launch("kernel", grid=(1000000,), block=(256,), args=(x, y, x.numel()), cooperative=True)'),
        (*_CRASH, Status.BUILD_ERROR),
    ),
    ("take more memory than a candidate may", _planned("z = empty((40 << 30,), x.dtype)\n    " + _LAUNCH.replace(", OPTIONS", "").replace("(x, y,", "(x, z,")), (Status.REJECTED, Status.BUILD_ERROR)),
    ("take exabytes in a plan", _planned('z = empty((2 ** 60,), "float64")\n    ' + _LAUNCH.replace(", OPTIONS", "")), (Status.BUILD_ERROR, Status.REJECTED)),
)  # fmt: skip
BOMBS: tuple[tuple[str, Candidate, tuple[Status, ...]], ...] = (
    (
        "unroll templates without end",
        device_kernel(
            before="template <int D, int K> struct T { static const long v = T<D - 1, 2 * K>::v + T<D - 1, 2 * K + 1>::v; };\n"
            "template <int K> struct T<0, K> { static const long v = K; };\n",
            body="y[i] = T<26, 1>::v;",
        ),
        _BUILD,
    ),
    (
        "expand macros without end",
        device_kernel(before="#define A(x) x x x x x x x x\n#define B(x) A(A(A(A(x))))\n__device__ long big = 0 B(B(+ 1));\n"),
        _BUILD,
    ),
    (
        "unroll a loop without end",
        device_kernel(body="float s = 0;\n#pragma unroll\nfor (int a = 0; a < 200000; ++a) s = sinf(s + x[(i + a) % n] * y[(a * i) % n]);\ny[i] = s;"),
        (*_BUILD, *_WRONG),
    ),
)  # fmt: skip
COMPILES: tuple[tuple[str, Candidate, tuple[Status, ...]], ...] = (
    ("include a file of the host", device_kernel(before='#include "/etc/passwd"\n'), _BUILD),
    (
        "embed a file of the host in PTX",
        device_kernel(body='asm volatile(".incbin \\"/etc/passwd\\";"); HONEST'),
        _BUILD,
    ),
    (
        "leave the assembler's block",
        device_kernel(body='asm volatile("ret; } .visible .entry other() { ret;"); HONEST'),
        (*_BUILD, *_WRONG, *_CRASH),
    ),
    ("include itself", device_kernel(before='#include "kernel.cu"\n'), _BUILD),
    ("read a device of the host", device_kernel(before='#include "/dev/zero"\n'), _BUILD),
    ("redefine what the builder adds", device_kernel(before="#define __forge_type stolen\n#define kernel tick\n"), _BUILD),
    ("call what is not there", device_kernel(before='extern "C" __device__ int cudaDeviceReset();\n', body="y[i] = cudaDeviceReset();"), _BUILD),
    ("smuggle an option in a constant's name", _launched('constants={"X=1 -include /etc/passwd": 1}'), _BUILD),
    ("smuggle text in a constant's value", _launched('constants={"X": "1\\n#include \\"/etc/passwd\\""}'), _BUILD),
    ("name a kernel by an expression that escapes", _planned(_LAUNCH.replace('"kernel"', '"kernel>(); } int a[1<<30]; void f() { g<1"').replace(", OPTIONS", "")), _BUILD),
)  # fmt: skip
REFUSED = (*_LIES, *COMPILES, *_FAULTS, *_ENDLESS)
