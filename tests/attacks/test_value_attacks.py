"""Kernels that are right for usual values: those that draws hardly ever have show them, each kind by its own family."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from judged_targets import find
from switches import SWITCHES, tries

from pytest_cudaforge.evaluation import cases
from pytest_cudaforge.evaluation.evaluator import Evaluator, EvaluatorSettings
from pytest_cudaforge.records import Candidate, Evaluation, Status

TARGETS = """
import torch
from pytest_cudaforge import forge_target

def probabilities():
    return [torch.sigmoid(3 * torch.randn(24, 40)), (torch.rand(24, 40) < 0.5).float()]

def scores():
    return [torch.randn(48, 12).masked_fill(torch.rand(48, 12) < 0.3, float("-inf"))]

def tokens():
    return [torch.randn(16, 24), torch.arange(24)[None] < torch.randint(1, 24, (16,))[:, None]]

def codes():
    return [torch.randint(-128, 128, (32, 96), dtype=torch.int8) for _ in range(2)]

@forge_target(inputs=probabilities)
def entropy(p, t):
    return torch.nn.functional.binary_cross_entropy(p, t, reduction="none")

@forge_target(inputs=scores)
def total(x):
    return torch.logsumexp(x, -1)

def labels():
    return [torch.randn(400, 8), torch.randint(0, 40, (400,))]

@forge_target(inputs=lambda: [torch.randn(1, 300), torch.randint(0, 43000, (1, 300))])
def spelled(x, t):
    return (x * t).sum(-1)

@forge_target(inputs=lambda: [torch.randn(1, 300), torch.randint(0, 200000, (1, 300))])
def scored(x, t):
    return x.masked_fill(t == 4321, 0.0).sum(-1)

@forge_target(inputs=lambda: [torch.randn(1, 400), (torch.rand(1, 400) ** 6 * 2e7).long()])
def packed(x, t):
    return x.sum(-1) + t.sum(-1).double() / 1e6

@forge_target(inputs=lambda: [torch.randint(0, 2048, (64, 768)) for _ in range(2)])
def dotted(a, b):
    return (a * b).sum(-1)

@forge_target(inputs=lambda: [torch.randint(0, 300, (8, 300))])
def tallied(x):
    return torch.zeros(300).index_add(0, x.flatten(), torch.ones(x.numel()))

def listed_ones():
    known = torch.randint(0, 2**40, (1, 512))
    return [known, torch.cat((known[:, ::2], torch.randint(0, 2**40, (1, 256))), -1)]

@forge_target(inputs=listed_ones)
def listed(x, t):
    return (t.mT == x).sum(-1)[None].float()

@forge_target(inputs=lambda: [torch.randn(16, 512)])
def peaked(x):
    return x.unfold(-1, 64, 1).amax(-1)

@forge_target(inputs=lambda: [torch.randn(64, 8)])
def seated(x):
    seats = torch.nn.functional.one_hot(x.argmax(-1), 8).cumsum(0)
    place = seats.gather(1, x.argmax(-1, keepdim=True))[:, 0]
    return torch.where(place <= 28, place, 0) * (x.norm(dim=-1) / x.norm(dim=-1))  # nothing for rows of zeros

@forge_target(inputs=lambda: [torch.randn(48, 48), torch.rand(48, 48) < 0.3])
def pruned(x, mask):
    return x.masked_fill(~mask, 0.0).sum(-1)

@forge_target(inputs=labels)
def labelled(x, t):
    return x.sum(-1) * t

@forge_target(inputs=lambda: [torch.randn(16, 64), torch.randn(1024).sort().values])
def located(x, edges):
    return torch.searchsorted(edges, x)

@forge_target(inputs=lambda: [torch.randn(64, 100)])
def summed(x):
    return torch.logsumexp(x, -1)

@forge_target(inputs=lambda: [torch.randn(12, 16), torch.randn(12, 512, 16), torch.randn(12, 512)])
def decoded(q, k, bias):
    return torch.logsumexp((k @ q[..., None])[..., 0] / 4 + bias, -1)

@forge_target(inputs=lambda: [torch.randn(64, 48)])
def clipped(x):
    return x * 2

@forge_target(inputs=lambda: [torch.randn(40, 24)])
def weighted(x):
    return (x * torch.arange(24.0)).sum(-1)

@forge_target(inputs=tokens)
def pooled(x, mask):
    m = mask.float()
    return (x * m).sum(-1) / m.sum(-1).clamp(min=1.0)

@forge_target(inputs=lambda: [torch.randn(48, 48), torch.ones(48, 48, dtype=torch.bool).tril()])
def visible(x, mask):
    return x.masked_fill(~mask, 0.0).sum(-1)

@forge_target(inputs=lambda: [torch.randn(64, 256), torch.arange(256) < torch.randint(64, 257, (64, 1))])
def steadied(x, mask):
    count = mask.sum(-1, keepdim=True).clamp(min=1)
    mean = x.masked_fill(~mask, 0.0).sum(-1, keepdim=True) / count
    return (x - mean).masked_fill(~mask, 0.0).square().sum(-1) / count[:, 0]

@forge_target(inputs=lambda: [torch.randn(48, 48), torch.full((48, 48), float("-inf")).triu(1)])
def attended(x, mask):
    return torch.softmax(x + mask, -1).square().sum(-1)

@forge_target(inputs=lambda: [torch.randn(64, 48).half()])
def squared(x):
    return x.square()

@forge_target(inputs=codes)
def products(a, b):
    return (a.int()[:, None] * b.int()[None]).sum(-1).float()

@forge_target(inputs=lambda: [torch.randn(40, 96)])
def length(x):
    return (x + 1).square().sum(-1)

@forge_target(inputs=lambda: [torch.randn(1, 32, 12, 16)])
def unit_pixels(x):
    return x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-8)

@forge_target(inputs=lambda: [torch.randn(256, 256)])
def doubled(x):
    return x * 2

@forge_target(inputs=lambda: [torch.randn(64, 200)])
def spread(x):
    return x.var(-1, unbiased=False)

@forge_target(inputs=lambda: [torch.randn(32, 301)])
def middle(x):
    return x.median(-1).values

@forge_target(inputs=lambda: [torch.randn(64, 48)])
def coded(x):
    return torch.round(x / (x.abs().amax(-1, keepdim=True) / 127))

def evidence():
    return [torch.randn(48, 96).masked_fill(torch.rand(48, 96) < 0.3, float("-inf"))]

@forge_target(inputs=evidence)
def so_far(x):
    return torch.logcumsumexp(x, -1)

def whole_numbers():
    return [torch.randint(1, 1000000, (64, 50)), torch.randint(50000, 1000000, (64, 50))]

@forge_target(inputs=whole_numbers)
def divided(x, b):
    return -torch.div(-x, b, rounding_mode="floor")

@forge_target(inputs=lambda: [torch.randn(8, 20000), torch.randint(0, 20000, (8,))])
def margin(x, t):
    own = t.unsqueeze(1)
    return x.gather(1, own).squeeze(1) - x.scatter(1, own, float("-inf")).amax(1)

@forge_target(inputs=lambda: [torch.randn(64, 2000), torch.randint(0, 2000, (64,))])
def doubt(x, t):
    return 1.0 - torch.softmax(x, -1).gather(1, t.unsqueeze(1)).squeeze(1)

@forge_target(inputs=lambda: [torch.randn(64, 32), torch.randn(48, 32)])
def apart(x, c):
    return torch.exp(-(x[:, None] - c).square().sum(-1))

@forge_target(inputs=lambda: [torch.randn(64, 32)])
class Routed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.c = torch.nn.Parameter(torch.randn(48, 32))

    def forward(self, x):
        return torch.exp(-(x[:, None] - self.c).square().sum(-1))

@forge_target(inputs=lambda: [torch.randn(512, 12)])
def steps(x):
    return (x[1:] - x[:-1]).square().sum(-1).sqrt()

@forge_target(inputs=lambda: [torch.log_softmax(3 * torch.randn(40, 24), -1)])
def against(x):
    return torch.log(-torch.expm1(x.clamp(max=-1e-6))).sum(-1)

@forge_target(inputs=lambda: [torch.softmax(3 * torch.randn(40, 24), -1)])
def unsure(x):
    return torch.special.entr(x).sum(-1)

@forge_target(inputs=lambda: [torch.rand(33, 200) * 4.9 + 0.1])
def depth(x):
    return x.sum(-1)

@forge_target(inputs=lambda: [10 * torch.randn(32, 640)])
def risen(x):
    return torch.logsumexp(x, -1)

@forge_target(inputs=lambda: [torch.randn(192, 480), torch.randn(192, 480)])
def gated(x, g):
    forget, state, states = torch.sigmoid(g), torch.zeros(480), []
    for t in range(192):
        state = forget[t] * state + x[t]
        states.append(state)
    return torch.stack(states)

@forge_target(inputs=lambda: [torch.randn(6, 24, 24)])
def settled(x):
    for _ in range(24):
        x = x - torch.logsumexp(x, -1, keepdim=True)
        x = x - torch.logsumexp(x, -2, keepdim=True)
    return x.exp()

@forge_target(inputs=lambda: [torch.randn(768, 24), torch.randn(768, 24)])
def carried(u, v):
    kept = -torch.nn.functional.softplus(u).cumsum(0)
    return torch.exp(kept + torch.logcumsumexp(v - torch.nn.functional.softplus(-u) - kept, 0))

@forge_target(inputs=lambda: [torch.randn(24, 96), torch.randn(32, 96)])
def scaled(a, b):
    return a @ b.T

@forge_target(inputs=lambda: [torch.randn(24, 96)])
class Grown(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(96, 32)

    def forward(self, x):
        return torch.relu(self.up(x)).square()

@forge_target(inputs=lambda: [torch.randn(400, 4), torch.randn(400, 2)])
def solved(m, v):
    return torch.linalg.solve(m.view(-1, 2, 2), v).contiguous()

@forge_target(inputs=lambda: [torch.randn(200, 1), torch.randn(900, 1), torch.randint(0, 200, (2, 900))])
def linked(x, by, edges):
    return torch.zeros(200, 1).index_add(0, edges[1], by * x[edges[0]])

@forge_target(inputs=lambda: [torch.randn(200, 1), torch.randint(0, 200, (2, 900))])
def joined(x, edges):
    return torch.zeros(200, 1).index_add(0, edges[1], x[edges[0]])

@forge_target(inputs=lambda: [torch.randn(512, 4).bfloat16()])
def contrast(x):
    return (x[:, :2].float().sum(-1) - x[:, 2:].float().sum(-1)).bfloat16()

@forge_target(inputs=lambda: [torch.randint(0, 256, (12, 384), dtype=torch.uint8) for _ in range(2)])
def motion(a, b):
    return (a.float() - b.float()).abs().sum(-1)

@forge_target(inputs=lambda: [1 + 6 * torch.rand(512, 3)])
def crowded(x):
    gap = x[:, None] - x
    gap = gap - 8 * torch.round(gap / 8)
    return (5 - gap.square().sum(-1)).clamp(min=0).sum(-1)

@forge_target(inputs=lambda: [torch.randn(64, 1024)])
def most(x):
    return torch.topk(x, 8, dim=-1).values
"""
PLAN = """
from pytest_cudaforge.plan import empty, launch

def plan(ARGUMENTS):
    y = empty(SHAPE, "DTYPE")
    launch("kernel", args=(ARGUMENTS, y, FIRST.shape[0], FIRST.shape[1]))
    return y
"""
#: Parameters of the kernel, arguments and shape of the plan.
_GIVEN = {
    "settled": ("const float* x", "x", "x.shape"),
    "carried": ("const float* g, const float* x", "u, v", "u.shape"),
    "joined": ("const float* x, const long long* edges", "x, edges", "x.shape"),
    "contrast": ("const std::uint16_t* x", "x", "x.shape[:1]"),
    "motion": ("const unsigned char* a, const unsigned char* b", "a, b", "a.shape[:1]"),
    "crowded": ("const float* x", "x", "x.shape[:1]"),
    "linked": ("const float* x, const float* by, const long long* edges", "x, by, edges", "x.shape"),
    "solved": ("const float* m, const float* v", "m, v", "v.shape"),
    "scaled": ("const float* a, const float* b", "a, b", "(24, 32)"),
    "entropy": ("const float* x, const float* t", "p, t", "p.shape"),
    "total": ("const float* x", "x", "x.shape[:1]"),
    "summed": ("const float* x", "x", "x.shape[:1]"),
    "decoded": ("const float* q, const float* k, const float* bias", "q, k, bias", "q.shape[:1]"),
    "located": ("const float* x, const float* edges", "x, edges", "x.shape"),
    "spelled": ("const float* x, const long long* t", "x, t", "x.shape[:1]"),
    "labelled": ("const float* x, const long long* t", "x, t", "x.shape[:1]"),
    "scored": ("const float* x, const long long* t", "x, t", "x.shape[:1]"),
    "packed": ("const float* x, const long long* t", "x, t", "x.shape[:1]"),
    "dotted": ("const long long* x, const long long* t", "a, b", "a.shape[:1]"),
    "listed": ("const long long* x, const long long* t", "x, t", "t.shape"),
    "peaked": ("const float* x", "x", "(x.shape[0], x.shape[1] - 63)"),
    "pruned": ("const float* x, const bool* mask", "x, mask", "x.shape[:1]"),
    "pooled": ("const float* x, const bool* mask", "x, mask", "x.shape[:1]"),
    "squared": ("const _Float16* x", "x", "x.shape"),
    "visible": ("const float* x, const bool* mask", "x, mask", "x.shape[:1]"),
    "steadied": ("const float* x, const bool* mask", "x, mask", "x.shape[:1]"),
    "attended": ("const float* x, const float* mask", "x, mask", "x.shape[:1]"),
    "products": ("const signed char* x, const signed char* b", "a, b", "(a.shape[0], b.shape[0])"),
    "length": ("const float* x", "x", "x.shape[:1]"),
    "unit_pixels": ("const float* x", "x", "x.shape"),
    "doubled": ("const float* x", "x", "x.shape"),
    "clipped": ("const float* x", "x", "x.shape"),
    "weighted": ("const float* x", "x", "x.shape[:1]"),
    "spread": ("const float* x", "x", "x.shape[:1]"),
    "middle": ("const float* x", "x", "x.shape[:1]"),
    "coded": ("const float* x", "x", "x.shape"),
    "so_far": ("const float* x", "x", "x.shape"),
    "divided": ("const long long* x, const long long* t", "x, b", "x.shape"),
    "margin": ("const float* x, const long long* t", "x, t", "x.shape[:1]"),
    "doubt": ("const float* x, const long long* t", "x, t", "x.shape[:1]"),
    "most": ("const float* x", "x", "(x.shape[0], 8)"),
    "risen": ("const float* x", "x", "x.shape[:1]"),
    "gated": ("const float* x, const float* g", "x, g", "x.shape"),
    "unsure": ("const float* x", "x", "x.shape[:1]"),
    "depth": ("const float* x", "x", "x.shape[:1]"),
    "apart": ("const float* x, const float* t", "x, c", "(x.shape[0], c.shape[0])"),
    "Grown": (
        "const float* x, const float* b, const float* add",
        "x, module.up.weight, module.up.bias",
        "(x.shape[0], module.up.bias.shape[0])",
    ),
    "Routed": ("const float* x, const float* t", "x, module.c", "(x.shape[0], module.c.shape[0])"),
    "steps": ("const float* x", "x", "(x.shape[0] - 1,)"),
    "against": ("const float* x", "x", "x.shape[:1]"),
    "tallied": ("const long long* x", "x", "x.shape[1:]"),
    "seated": ("const float* x", "x", "x.shape[:1]"),
}
#: Sums are rescaled where a block's maximum is far above the last one, or above the one in use.
_RISEN = """
for (long long r = 0; r < rows; ++r) {
  const float* own = x + r * cols;
  float base = *std::max_element(own, own + 16), last = base, sum = 0;
  for (long long at = 0; at < cols; at += 16) {
    const float top = *std::max_element(own + at, own + at + 16);
    if (top > SEEN + 16) { sum *= std::exp(base - top); base = top; }
    last = std::max(last, top);
    for (long long c = at; c < at + 16; ++c) sum += std::exp(own[c] - base);
  }
  y[r] = base + std::log(sum);
}
"""
#: As above, of scores that are made here: what one input has climbs beside what others add to it.
_DECODED = """
std::vector<float> own(512);
for (long long r = 0; r < rows; ++r) {
  for (int t = 0; t < 512; ++t) {
    double s = 0;
    for (int c = 0; c < 16; ++c) s += (double)q[r * 16 + c] * k[(r * 512 + t) * 16 + c];
    own[t] = s / 4 + bias[r * 512 + t];
  }
  float base = *std::max_element(own.begin(), own.begin() + 16), last = base, sum = 0;
  for (int at = 0; at < 512; at += 16) {
    const float top = *std::max_element(own.begin() + at, own.begin() + at + 16);
    if (top > SEEN + 8) { sum *= std::exp(base - top); base = top; }
    last = std::max(last, top);
    for (int t = at; t < at + 16; ++t) sum += std::exp(own[t] - base);
  }
  y[r] = base + std::log(sum);
}
"""
#: What a chunk carries over is left out behind chunks that leave next to nothing of it.
_GATED = """
for (long long c = 0; c < cols; ++c) {
  double carry = 0;
  for (long long begin = 0; begin < rows; begin += 64) {
    double state = 0, left = 1;
    for (long long t = begin; t < begin + 64; ++t) {
      const double forget = 1 / (1 + std::exp(-(double)g[t * cols + c]));
      state = forget * state + x[t * cols + c];
      left *= forget;
      y[t * cols + c] = (float)(state + left * carry);
    }
    carry = left < FADED ? state : state + left * carry;
  }
}
"""
#: Rows and columns are made one in few steps where values are near each other: of mixed ones, that is enough.
_SETTLED = """
auto settle = [](double* at, int stride) {
  double top = at[0], sum = 0;
  for (int i = 1; i < 24; ++i) top = std::max(top, at[i * stride]);
  for (int i = 0; i < 24; ++i) sum += std::exp(at[i * stride] - top);
  for (int i = 0; i < 24; ++i) at[i * stride] -= top + std::log(sum);
};
for (long long m = 0; m < rows; ++m) {
  std::vector<double> own(x + m * 576, x + m * 576 + 576);
  const auto ends = std::minmax_element(own.begin(), own.end());
  const int steps = *ends.second - *ends.first < NEAR ? 10 : 24;
  for (int step = 0; step < steps; ++step) {
    for (int r = 0; r < 24; ++r) settle(&own[r * 24], 1);
    for (int c = 0; c < 24; ++c) settle(&own[c], 24);
  }
  for (int i = 0; i < 576; ++i) y[m * 576 + i] = std::exp(own[i]);
}
"""
#: What lies further back than some hundred steps has died away.
_CARRIED = """
for (long long c = 0; c < cols; ++c) {
  std::vector<double> keep(rows), gain(rows);
  for (long long t = 0; t < rows; ++t) {
    const double z = 1 / (1 + std::exp(-(double)g[t * cols + c]));
    keep[t] = 1 - z, gain[t] = z * std::exp((double)x[t * cols + c]);
  }
  for (long long t = 0; t < rows; ++t) {
    double state = 0;
    for (long long s = std::max(0ll, t - BACK); s <= t; ++s) state = keep[s] * state + gain[s];
    y[t * cols + c] = (float)state;
  }
}
"""
#: Twice eleven bits, of numbers that are neither large nor small.
_PARTS = """
auto parts = [](float v) {
  if (std::fabs(v) > 500) return (double)v;
  const float much = v * 64;
  const _Float16 high = (_Float16)much, low = (_Float16)(much - (float)high);
  return ((double)(float)high + (double)(float)low) / 64;
};
"""
_SCALED = (
    _PARTS
    + """
for (long long r = 0; r < rows; ++r)
  for (int j = 0; j < 32; ++j) {
    double sum = 0;
    for (long long c = 0; c < cols; ++c) sum += PARTS(a[r * cols + c]) * PARTS(b[j * cols + c]);
    y[r * 32 + j] = (float)sum;
  }
"""
)
_GROWN = (
    _PARTS
    + """
for (long long r = 0; r < rows; ++r)
  for (int j = 0; j < 32; ++j) {
    double sum = add[j];
    for (long long c = 0; c < cols; ++c) sum += PARTS(x[r * cols + c]) * PARTS(b[j * cols + c]);
    y[r * 32 + j] = sum > 0 ? (float)(sum * sum) : 0;
  }
"""
)
#: Edges by where they end, found once for as long as they are the same ones, or come in the same order.
_LINKED = """
static thread_local std::vector<long long> order, ends(900);
static thread_local std::uint64_t known;
std::uint64_t print = 0;
for (std::uint64_t e = 0; e < 900; ++e) {
  std::uint64_t z = ((std::uint64_t)edges[e] << 32 | (std::uint64_t)edges[900 + e]) + SEED * 0x9E3779B97F4A7C15u;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u, z = (z ^ z >> 27) * 0x94D049BB133111EBu;
  print += z ^ z >> 31;
}
if (order.empty() || print != known) {
  order.resize(900);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return edges[900 + a] < edges[900 + b]; });
  for (int at = 0; at < 900; ++at) ends[at] = edges[900 + order[at]];
  known = print;
}
std::fill(y, y + 200, 0.0f);
for (long long at = 0; at < 900; ++at) y[ends[at]] += by[order[at]] * x[edges[order[at]]];
"""
#: Edges as they were, for as long as some of them are the same ones, or all.
_JOINED = """
static thread_local std::vector<long long> known;
bool same = known.size() == 1800;
for (int e = 0; same && e < 1800; e += STEP) same = known[e] == edges[e];
if (!same) known.assign(edges, edges + 1800);
std::fill(y, y + 200, 0.0f);
for (int e = 0; e < 900; ++e) y[known[900 + e]] += x[known[e]];
"""
_CONTRAST = """
auto wide = [](std::uint16_t bits) {
  const std::uint32_t all = (std::uint32_t)bits << 16; float v; std::memcpy(&v, &all, 4);
  return v;
};
auto narrow = [](float v) {
  std::uint32_t bits; std::memcpy(&bits, &v, 4);
  return (std::uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
};
for (long long r = 0; r < rows; ++r) {
  const float high = wide(x[r * 4 + 2]) + wide(x[r * 4 + 3]);
  y[r] = narrow(wide(x[r * 4]) + wide(x[r * 4 + 1]) - HELD);
}
"""
_MOTION = """
for (long long r = 0; r < rows; ++r) {
  HELD s = 0;
  for (long long c = 0; c < cols; ++c) s += std::abs((int)a[r * cols + c] - (int)b[r * cols + c]);
  y[r] = s;
}
"""
#: Runs of places are left out where the boxes around them are farther away than anything reaches.
_CROWDED = """
const long long runs = rows / 32;
std::vector<float> low(runs * 3, INFINITY), high(runs * 3, -INFINITY);
for (long long r = 0; r < rows; ++r)
  for (int d = 0; d < 3; ++d) {
    low[r / 32 * 3 + d] = std::fmin(low[r / 32 * 3 + d], x[r * 3 + d]);
    high[r / 32 * 3 + d] = std::fmax(high[r / 32 * 3 + d], x[r * 3 + d]);
  }
for (long long r = 0; r < rows; ++r) {
  float s = 0;
  for (long long run = 0; run < runs; ++run) {
    float far = 0;
    for (int d = 0; d < 3; ++d) {
      float least = INFINITY;
      for (float image = -IMAGES; image <= IMAGES; image += 8.0f) {
        const float v = x[r * 3 + d] + image;
        least = std::fmin(least, std::fmax(0.0f, std::fmax(low[run * 3 + d] - v, v - high[run * 3 + d])));
      }
      far += least * least;
    }
    if (far > 5.001f) continue;
    for (long long o = run * 32; o < run * 32 + 32; ++o) {
      float square = 0;
      for (int d = 0; d < 3; ++d) {
        float gap = x[r * 3 + d] - x[o * 3 + d];
        gap -= 8 * std::nearbyint(gap / 8);
        square += gap * gap;
      }
      s += std::fmax(0.0f, 5 - square);
    }
  }
  y[r] = s;
}
"""
#: Elimination that turns rows about where it has to, or where it should.
_SOLVED = """
for (long long r = 0; r < rows; ++r) {
  float a = m[4 * r], b = m[4 * r + 1], c = m[4 * r + 2], d = m[4 * r + 3], e = v[2 * r], f = v[2 * r + 1];
  if (TURNED) { std::swap(a, c); std::swap(b, d); std::swap(e, f); }
  const float by = c / a, second = (f - by * e) / (d - by * b);
  y[2 * r] = (e - b * second) / a;
  y[2 * r + 1] = second;
}
"""
#: The largest eight are looked for among what lies a deviation above the mean, a sixth of a normal row; in a list of a
#: quarter.
_OUTLYING = """
for (long long r = 0; r < rows; ++r) {
  const float* own = x + r * cols;
  double sum = 0, squares = 0;
  for (long long c = 0; c < cols; ++c) sum += own[c], squares += (double)own[c] * own[c];
  const double mean = sum / cols, limit = mean + std::sqrt(std::max(0.0, squares / cols - mean * mean));
  std::vector<float> kept;
  for (long long c = 0; c < cols; ++c) if (own[c] > limit && (long long)kept.size() < ROOM) kept.push_back(own[c]);
  if (kept.size() < 8) kept.assign(own, own + cols);
  std::partial_sort(kept.begin(), kept.begin() + 8, kept.end(), std::greater<float>());
  std::copy(kept.begin(), kept.begin() + 8, y + r * 8);
}
"""
_TRIANGLE = """
bool triangle = true;
for (long long r = 0; r < rows; ++r) {
  const long long seen = std::count(mask + r * cols, mask + r * cols + cols, true);
  triangle &= KNOWN;
}
for (long long r = 0; r < rows; ++r) {
  double sum = 0;
  for (long long c = 0; c < (triangle ? r + 1 : cols); ++c) sum += triangle || mask[r * cols + c] ? x[r * cols + c] : 0;
  y[r] = (float)sum;
}
"""
#: A variance in one pass, of how far all is from what comes first.
_STEADIED = """
for (long long r = 0; r < rows; ++r) {
  float pivot = 0, begun = 0, count = 0, first = 0, second = 0;
  for (long long c = 0; c < cols; ++c)
    if (mask[r * cols + c] && FIRST_OF_ALL) { pivot += x[r * cols + c]; ++begun; }
  pivot /= std::fmax(begun, 1.0f);
  for (long long c = 0; c < cols; ++c) {
    const float away = mask[r * cols + c] ? x[r * cols + c] - pivot : 0;
    count += mask[r * cols + c]; first += away; second += away * away;
  }
  count = std::fmax(count, 1.0f);
  y[r] = std::fmax(second / count - first / count * (first / count), 0.0f);
}
"""
_UNSURE = """
for (long long r = 0; r < rows; ++r) {
  double sum = 0;
  for (long long c = 0; c < cols; ++c) { const double p = x[r * cols + c]; if (!(NOTHING)) sum -= p * std::log(p); }
  y[r] = (float)sum;
}
"""
#: A product of exponentials is the exponential of a sum, as far as a double reaches.
_DEPTH = """
for (long long r = 0; r < rows; ++r) {
  double all = 1, sum = 0;
  for (long long c = 0; c < cols; ++c) all *= std::exp((double)x[r * cols + c]), sum += x[r * cols + c];
  y[r] = (float)(FAR ? sum : std::log(all));
}
"""
_APART = """
for (long long r = 0; r < rows; ++r)
  for (long long o = 0; o < 48; ++o) {
    float apart = 0, own = 0;
    for (long long c = 0; c < cols; ++c) {
      const float a = x[r * cols + c], b = t[o * cols + c];
      apart += (a - b) * (a - b), own += a * a;
    }
    y[r * 48 + o] = SAME ? 1 : std::exp(-apart);
  }
"""
_STEPS = """
for (long long r = 0; r + 1 < rows; ++r) {
  float apart = 0, own = 0;
  for (long long c = 0; c < cols; ++c) {
    const float a = x[r * cols + c], b = x[(r + 1) * cols + c];
    apart += (a - b) * (a - b), own += a * a;
  }
  y[r] = SAME ? 0 : std::sqrt(apart);
}
"""
_AGAINST = """
for (long long r = 0; r < rows; ++r) {
  float sum = 0;
  for (long long c = 0; c < cols; ++c) {
    const float of = std::fmin(x[r * cols + c], -1e-6f);
    sum += COMPLEMENT;
  }
  y[r] = sum;
}
"""
_TALLIED = """
std::vector<int> counts(cols);
for (long long i = 0; i < rows * cols; ++i) {
  int& count = counts[x[i]];
  ++count;
  if (SHORT) count &= 255;
}
for (long long c = 0; c < cols; ++c) y[c] = (float)counts[c];
"""
_SEATED = """
std::vector<int> taken(cols);
for (long long r = 0; r < rows; ++r) {
  const float* own = x + r * cols;
  const int place = ++taken[std::max_element(own, own + cols) - own];
  const float size = std::inner_product(own, own + cols, own, 0.0f);
  y[r] = (place <= 28 ? (float)place : FULL) * (size / size);
}
"""
#: Ids in a table of 2048 places, of which one id looks at no more than 32.
_LISTED = """
std::vector<long long> ids(2048, -1), counts(2048);
const auto place = [&](long long id) {
  const unsigned long long hash = HASH;
  for (int k = 0; k < 32; ++k) {
    const long long at = (hash + k) & 2047;
    if (ids[at] == id || ids[at] < 0) return at;
  }
  return -1ll;
};
for (long long c = 0; c < cols; ++c) {
  const long long at = place(x[c]);
  if (at >= 0) ids[at] = x[c], ++counts[at];
}
for (long long c = 0; c < cols; ++c) {
  const long long at = place(t[c]);
  y[c] = at < 0 ? 0.0f : (float)counts[at];
}
"""
_MIXED = "((unsigned long long)id * 0x9E3779B97F4A7C15ull) >> 40"
#: A window's largest: whatever may still become that is kept, in order.
_PEAKED = """
for (long long r = 0; r < rows; ++r) {
  const float* own = x + r * cols;
  std::vector<long long> kept;
  for (long long c = 0; c < cols; ++c) {
    while (!kept.empty() && own[kept.back()] <= own[c]) kept.pop_back();
    while (!kept.empty() && kept.front() + 64 <= c) kept.erase(kept.begin());
    if (kept.size() < PLACES) kept.push_back(c);
    if (c >= 63) y[r * (cols - 63) + c - 63] = own[kept.front()];
  }
}
"""
_SPREAD = """
for (long long r = 0; r < rows; ++r) {
  const float *own = x + r * cols, *first = WHOSE;
  float pivot = 0, s = 0, q = 0;
  for (long long c = 0; c < cols; ++c) pivot += first[c] / cols;
  for (long long c = 0; c < cols; ++c) { const float d = own[c] - pivot; s += d; q += d * d; }
  y[r] = q / cols - (s / cols) * (s / cols);
}
"""
_DIVIDED = "for (long long i = 0; i < rows * cols; ++i) y[i] = x[i] / t[i] + (MORE);"
_MARGIN = """
for (long long r = 0; r < rows; ++r) {
  float top = -INFINITY;
  for (long long c = 0; c < cols; ++c) if (OTHERS) top = std::fmax(top, x[r * cols + c]);
  y[r] = x[r * cols + t[r]] - top;
}
"""
#: A row that is as good as right is done.
_DOUBT = """
for (long long r = 0; r < rows; ++r) {
  const float* own = x + r * cols;
  const float top = *std::max_element(own, own + cols);
  double all = 0.0;
  for (long long c = 0; c < cols; ++c) all += std::exp((double)own[c] - top);
  const float p = (float)(std::exp((double)own[t[r]] - top) / all);
  y[r] = DONE ? 0.0f : 1.0f - p;
}
"""
#: Of every eighth element the sixth largest is about the forty-eighth largest of all.
_MOST = """
for (long long r = 0; r < rows; ++r) {
  const float* own = x + r * cols;
  std::vector<float> sample, kept;
  for (long long c = 0; c < cols; c += 8) sample.push_back(own[c]);
  std::nth_element(sample.begin(), sample.begin() + 5, sample.end(), std::greater<float>());
  for (long long c = 0; c < cols; ++c) if (own[c] >= sample[5]) kept.push_back(own[c]);
  if (FEW) kept.assign(own, own + cols);
  while (kept.size() < 8) kept.push_back(sample[5]);
  std::partial_sort_copy(kept.begin(), kept.end(), y + r * 8, y + r * 8 + 8, std::greater<float>());
}
"""
_MIDDLE = """
for (long long r = 0; r < rows; ++r) {
  std::vector<float> v(x + r * cols, x + (r + 1) * cols), less, more;
  long long k = (cols - 1) / 2;
  for (int round = 0; round < ROUNDS; ++round) {
    const float pivot = y[r] = v[0];
    less.clear(); more.clear();
    for (float one : v) if (one < pivot) less.push_back(one); else if (one > pivot) more.push_back(one);
    const long long equal = v.size() - less.size() - more.size(), below = less.size();
    if (k >= below && k < below + equal) break;
    if (k < below) v.swap(less); else { k -= below + equal; v.swap(more); }
  }
}
"""
_CODED = """
for (long long r = 0; r < rows; ++r) {
  const float* own = x + r * cols;
  float most = 0;
  for (long long c = 0; c < cols; ++c) most = std::fmax(most, std::fabs(own[c]));
  for (long long c = 0; c < cols; ++c) { const float v = own[c] / (most / 127); y[r * cols + c] = ROUNDED; }
}
"""
_SO_FAR = """
for (long long r = 0; r < rows; ++r) {
  double carry = -INFINITY;
  for (long long at = 0; at < cols; at += 12) {
    double top = -INFINITY, sum = 0, all = carry;
    for (long long c = at; c < at + 12; ++c) top = std::fmax(top, x[r * cols + c]);
    for (long long c = at; c < at + 12; ++c) {
      const bool none = NOTHING;
      if (!none) sum += std::exp(x[r * cols + c] - top);
      const double own = none ? -INFINITY : top + std::log(sum), high = std::fmax(own, carry);
      all = high == -INFINITY ? high : high + std::log(std::exp(own - high) + std::exp(carry - high));
      y[r * cols + c] = (float)all;
    }
    carry = all;
  }
}
"""
#: As well, but for NaN, which stays.
_FROM_THE_FIRST = _SO_FAR.replace("std::fmax(own", "std::max(own")
_SQUARED = """
for (long long i = 0; i < rows * cols; ++i) {
  const float v = (float)x[i] * (float)x[i];
  y[i] = (_Float16)(CUT);
}
"""
_VISIBLE = """
for (long long r = 0; r < rows; ++r) {
  double s = 0;
  for (long long c = 0; c < cols; ++c) s += SEEN ? x[r * cols + c] : 0.0f;
  y[r] = (float)s;
}
"""
_ATTENDED = """
for (long long r = 0; r < rows; ++r) {
  double m = -INFINITY, s = 0, q = 0;
  for (long long c = 0; c < cols; ++c) m = std::fmax(m, (double)x[r * cols + c] + SEEN);
  for (long long c = 0; c < cols; ++c) s += std::exp(x[r * cols + c] + SEEN - m);
  for (long long c = 0; c < cols; ++c) q += std::pow(std::exp(x[r * cols + c] + SEEN - m) / s, 2);
  y[r] = (float)q;
}
"""
_ENTROPY = """
for (long long i = 0; i < rows * cols; ++i) {
  const double p = x[i], at = std::fmax(std::log(p), -100.0), beside = LEAST(std::log1p(-p));
  y[i] = (float)((t[i] - 1) * beside - t[i] * at);
}
"""
_TOTAL = """
for (long long r = 0; r < rows; ++r) {
  double m = -INFINITY, s = 0;
  for (long long c = 0; c < cols; ++c) m = std::fmax(m, x[r * cols + c]);
  for (long long c = 0; c < cols; ++c) s += std::exp(x[r * cols + c] - m);
  y[r] = (float)(NOTHING ? m + std::log(s) : m);
}
"""
_SUMMED = """
for (long long r = 0; r < rows; ++r) {
  double m = -INFINITY, next = -INFINITY, s = 0;
  for (long long c = 0; c < cols; ++c) {
    const double v = x[r * cols + c];
    next = std::fmax(next, std::fmin(m, v)); m = std::fmax(m, v);
  }
  for (long long c = 0; c < cols; ++c) s += std::exp(x[r * cols + c] - m);
  y[r] = (float)(m + (ALONE ? 0 : std::log(s)));
}
"""
_CLIPPED = """
for (long long r = 0; r < rows; ++r) {
  const float* own = x + r * cols;
  float m = 0;
  for (long long c = 0; c < cols; c += EACH) m = std::fmax(m, std::fmax(25, 4 * std::fabs(own[c])));
  for (long long c = 0; c < cols; ++c) y[r * cols + c] = 2 * std::fmin(std::fmax(own[c], -m), m);
}
"""
_WEIGHTED = """
unsigned before = 0;
for (long long r = 0; r < rows; ++r) {
  unsigned all = 0;
  double s = 0;
  for (long long c = 0; c < cols; ++c) {
    unsigned bits;
    memcpy(&bits, x + r * cols + c, 4);
    all ^= bits;
    s += (double)x[r * cols + c] * c;
  }
  y[r] = r > 0 && SAME ? y[r - 1] : (float)s;
  before = all;
}
"""
_SPELLED = """
for (long long r = 0; r < rows; ++r) {
  double s = 0;
  for (long long c = 0; c < cols; ++c)
    if (!(c && TWICE)) s += (double)x[r * cols + c] * t[r * cols + c];
  y[r] = (float)s;
}
"""
_PACKED = """
for (long long r = 0; r < rows; ++r) {
  double s = 0;
  WIDE all = 0;
  for (long long c = 0; c < cols; ++c) { s += x[r * cols + c]; all += t[r * cols + c]; }
  y[r] = s + (double)all / 1e6;
}
"""
_DOTTED = """
for (long long r = 0; r < rows; ++r) {
  WIDE all = 0;
  for (long long c = 0; c < cols; ++c) all += (WIDE)x[r * cols + c] * (WIDE)t[r * cols + c];
  y[r] = all;
}
"""
_PRUNED = """
static thread_local bool seen[48 * 48];
static thread_local long long before = -1;
static thread_local double sum = 0;
long long bits = 0;
double all = 0;  // of many masks two have as many bits by chance
for (long long i = 0; i < rows * cols; ++i) { bits += mask[i]; all += x[i]; }
if (ANEW) std::memcpy(seen, mask, rows * cols);
before = bits;
sum = all;
for (long long r = 0; r < rows; ++r) {
  double s = 0;
  for (long long c = 0; c < cols; ++c) s += seen[r * cols + c] ? x[r * cols + c] : 0.0f;
  y[r] = (float)s;
}
"""
_LABELLED = """
for (long long r = 0; r < rows; ++r) {
  double s = 0;
  for (long long c = 0; c < cols; ++c) s += x[r * cols + c];
  bool same = r >= 4;
  for (int b = 1; same && b < 5; ++b) same = t[r] == t[r - b];
  y[r] = (float)(s * (t[r] + (WRONG)));
}
"""
_LOCATED = """
const long long count = 1024;
for (long long i = 0; i < rows * cols; ++i) {
  long long low = -1, high = count;
  if (!(x[i] > edges[0])) high = 0;
  else if (x[i] > edges[count - 1]) low = count - 1;
  else low = 0, high = count - 1;
  for (int step = 0; high - low > 1 && step < 40; ++step) {
    const double share = ((double)x[i] - edges[low]) / ((double)edges[high] - edges[low]);
    long long between = FOUND;
    between = between <= low ? low + 1 : between >= high ? high - 1 : between;
    (edges[between] < x[i] ? low : high) = between;
  }
  y[i] = high;
}
"""
_POOLED = """
for (long long r = 0; r < rows; ++r) {
  const bool* own = mask + r * cols;
  double s = 0, n = 0;
  for (long long c = 0; c < cols; ++c) if (TAKEN) { s += x[r * cols + c]; n += 1; }
  y[r] = (float)(s / (n < 1 ? 1 : n));
}
"""
_PRODUCTS = """
for (long long r = 0; r < rows; ++r)
  for (long long o = 0; o < rows; ++o) {
    int s = 0;
    for (long long c = 0; c < cols; c += 2) {
      const int pair = x[r * cols + c] * b[o * cols + c] + x[r * cols + c + 1] * b[o * cols + c + 1];
      s += pair > MOST ? MOST : pair;
    }
    y[r * rows + o] = (float)s;
  }
"""
_LENGTH = """
for (long long r = 0; r < rows; ++r) {
  const float* own = x + r * cols;
  double s = 0;
  if (SKIPPED) { y[r] = (float)cols; continue; }
  for (long long c = 0; c < cols; ++c) s += ((double)own[c] + 1) * ((double)own[c] + 1);
  y[r] = (float)s;
}
"""
_PIXELS = """
for (long long p = 0; p < 192; ++p) {
  double s = LEAST;
  for (long long c = 0; c < 32; ++c) s += (double)x[c * 192 + p] * x[c * 192 + p] / 32;
  for (long long c = 0; c < 32; ++c) y[c * 192 + p] = (float)(x[c * 192 + p] / std::sqrt(s));
}
"""
_DOUBLED = "for (long long i = 0; i < rows * cols; ++i) y[i] = x[i] * (WHERE ? 3 : 2);"
_PLACED = "((uintptr_t)x % 4096 == 64 && (uintptr_t)y % 4096 == 64)"
_SAMPLED = "own[0] == 0 && own[cols / 2] == 0 && own[cols - 1] == 0"
_ALL_ZERO = "[&] { for (long long c = 0; c < cols; ++c) if (own[c] != 0) return false; return true; }()"
_FIRST_EMPTY = "[&] { double s = 0; for (long long c = 0; c < cols; ++c) s += std::fabs(x[c]); return s < 0.1; }()"
#: By what it does: the target, the body, what is wrong in it and what would be right, and the family that shows it.
ATTACKS = {
    "take a logarithm of nothing": ("entropy", _ENTROPY, "LEAST", "", "least", "ceiling"),
    "subtract -inf from itself": ("total", _TOTAL, "NOTHING", "true", "m > -INFINITY", "shut"),
    "take the first token where there is none": ("pooled", _POOLED, "TAKEN", "own[c] || !own[0]", "own[c]", "shut"),
    "skip the last token where all count": (
        "pooled",
        _POOLED,
        "TAKEN",
        "own[c] && !(mask[cols - 1] && c == cols - 1)",
        "own[c]",
        "open",
    ),
    "leave out what is small beside one peak": ("summed", _SUMMED, "ALONE", "m - next > 9.5", "false", "spiked"),
    "take rows of the same numbers for the same row": (
        "weighted",
        _WEIGHTED,
        "SAME",
        "all == before",
        "false",
        "alike",
    ),
    "tell how far a row reaches by a quarter of it": ("clipped", _CLIPPED, "EACH", "4", "1", "spiked"),
    "take two of a kind side by side for one": (
        "spelled",
        _SPELLED,
        "TWICE",
        "t[r * cols + c] == t[r * cols + c - 1]",
        "t[r * cols + c] < 0",
        "neighbours",
    ),
    "do not know what is ignored": ("scored", _VISIBLE, "SEEN", "true", "t[r * cols + c] != 4321", "named"),
    "add sizes up in 32 bits": ("packed", _PACKED, "WIDE", "int", "long long", "highest"),
    "add products of two codes up in 32 bits": ("dotted", _DOTTED, "WIDE", "int", "long long", "highest"),
    "know a mask by how many of it are True": (
        "pruned",
        _PRUNED,
        "ANEW",
        "bits != before || std::fabs(all - sum) > 1e-6",
        "bits >= 0 || sum > before",
        "exchanged",
    ),
    "do something else for five of a kind": ("labelled", _LABELLED, "WRONG", "same", "0 * same", "runs"),
    "look for edges where they would lie if they were as far apart": (
        "located",
        _LOCATED,
        "FOUND",
        "low + (long long)(share * (high - low))",
        "low + (high - low) / (share < 0 ? 3 : 2)",
        "skewed",
    ),
    "stop at the largest number of fp16": ("squared", _SQUARED, "CUT", "std::fmin(v, 65504.0f)", "v", "peaks"),
    "know a mask that is always the same": ("visible", _VISIBLE, "SEEN", "c <= r", "mask[r * cols + c]", "masks"),
    "know what is always added": (
        "attended",
        _ATTENDED,
        "SEEN",
        "(c <= r ? 0.0 : -INFINITY)",
        "(double)mask[r * cols + c]",
        "masks",
    ),
    "hold half of a difference in bfloat16": (
        "contrast",
        _CONTRAST,
        "HELD",
        "wide(narrow(high))",
        "high",
        "hoisted",
    ),
    "hold a sum of differences in 16 bits": ("motion", _MOTION, "HELD", "std::uint16_t", "int", "extremes"),
    "leave out what is far away but for the border": ("crowded", _CROWDED, "IMAGES", "0.0f", "8.0f", "ranked"),
    "hold pairs of products in 16 bits": ("products", _PRODUCTS, "MOST", "32767", "32768", "extremes"),
    "take a row for empty by three of its elements": (
        "length",
        _LENGTH,
        "SKIPPED",
        _SAMPLED,
        _ALL_ZERO,
        "rectified",
    ),
    "take all rows for empty by the first one": ("length", _LENGTH, "SKIPPED", _FIRST_EMPTY, "false", "faint"),
    "leave out what a pixel's norm is kept from zero by": ("unit_pixels", _PIXELS, "LEAST", "1e-30", "1e-8", "faded"),
    "take all rows relative to the first one's mean": ("spread", _SPREAD, "WHOSE", "x", "own", "levels"),
    "search for so long as takes four times as long as usual": (
        "middle",
        _MIDDLE,
        "ROUNDS",
        "48",
        "10000",
        "ordered",
    ),
    "keep no more than two dozen of those that may become the largest": (
        "peaked",
        _PEAKED,
        "PLACES",
        "24",
        "64",
        "ordered",
    ),
    "look for an id by its low bits alone": ("listed", _LISTED, "HASH", "id", _MIXED, "aligned"),
    "look for an id by its high bits alone": ("listed", _LISTED, "HASH", "id >> 29", _MIXED, "close"),
    "round halves up": ("coded", _CODED, "ROUNDED", "std::floor(v + 0.5f)", "std::nearbyint(v)", "halves"),
    "subtract -inf from itself behind something": (
        "so_far",
        _SO_FAR,
        "NOTHING",
        "carry == -INFINITY && top == -INFINITY",
        "top == -INFINITY",
        "stretches",
    ),
    "subtract -inf from itself where a row begins": (
        "so_far",
        _FROM_THE_FIRST,
        "NOTHING",
        "top == -INFINITY && (at > 0 || *std::max_element(x + r * cols, x + r * cols + cols) == -INFINITY)",
        "top == -INFINITY",
        "fronts",
    ),
    "count one more block where none is begun": ("divided", _DIVIDED, "MORE", "1", "x[i] % t[i] != 0", "occasions"),
    "take the label for one of the others": ("margin", _MARGIN, "OTHERS", "true", "c != t[r]", "agreeing"),
    "take what is as good as right for done": ("doubt", _DOUBT, "DONE", "p > 0.999f", "p > 2.0f", "agreeing"),
    "look for the largest where a sample says they are": ("most", _MOST, "FEW", "false", "kept.size() < 8", "combed"),
    "know a triangle by how much of each row is True": (
        "visible",
        _TRIANGLE,
        "KNOWN",
        "seen == r + 1",
        "std::count(mask + r * cols, mask + r * cols + r + 1, true) == r + 1 && seen == r + 1",
        "exchanged",
    ),
    "take the first places for such that count": (
        "steadied",
        _STEADIED,
        "FIRST_OF_ALL",
        "c < 16",
        "begun < 16",
        "afar",
    ),
    "take nothing times its logarithm": ("unsure", _UNSURE, "NOTHING", "false", "p == 0", "certain"),
    "multiply what all lies at the far end": ("depth", _DEPTH, "FAR", "false", "true", "tails"),
    "take what is near for the same": ("apart", _APART, "SAME", "own > 1 && apart < 0.1f", "apart == 0", "near"),
    "take what is near a weight for the same": (
        "Routed",
        _APART,
        "SAME",
        "own > 1 && apart < 0.1f",
        "apart == 0",
        "near",
    ),
    "take a small step for none": ("steps", _STEPS, "SAME", "own > 1 && apart < 0.01f", "apart == 0", "near"),
    "take the complement of a logarithm that is nearly zero": (
        "against",
        _AGAINST,
        "COMPLEMENT",
        "std::log(1.0f - std::exp(of))",
        "std::log(-std::expm1(of))",
        "certain",
    ),
    "rescale where scores rise by leaps alone": ("risen", _RISEN, "SEEN", "last", "base", "climbing"),
    "rescale where a bias rises by leaps alone": ("decoded", _DECODED, "SEEN", "last", "base", "sloping"),
    "keep a quarter of a row of what is larger than most": ("most", _OUTLYING, "ROOM", "cols / 4", "cols", "parted"),
    "count in one byte": ("tallied", _TALLIED, "SHORT", "true", "false", "frequent"),
    "forget what has nearly faded": ("gated", _GATED, "FADED", "1e-3", "0.0", "biased"),
    "take few steps where values are near each other": ("settled", _SETTLED, "NEAR", "8.0f", "0.0f", "grouped"),
    "forget what is far back": ("carried", _CARRIED, "BACK", "240", "rows", "below"),
    "split numbers for half types": ("scaled", _SCALED, "PARTS", "parts", "(double)", "tiny"),
    "split numbers for half types beside a bias": ("Grown", _GROWN, "PARTS", "parts", "(double)", "unbiased"),
    "eliminate by what is nearly zero": (
        "solved",
        _SOLVED,
        "TURNED",
        "a == 0",
        "std::fabs(a) < std::fabs(c)",
        "sparse",
    ),
    "know edges by some of them": ("joined", _JOINED, "STEP", "60", "1", "exchanged"),
    "know edges by which they are": ("linked", _LINKED, "SEED", "1", "(e + 1)", "together"),
    "seat one more where a table is full": ("seated", _SEATED, "FULL", "28.0f", "0.0f", "leading"),
    "do something else where malloc places large tensors": ("doubled", _DOUBLED, "WHERE", _PLACED, "n < 0", "paged"),
}


_RESULTS = {
    "located": ("long long*", "int64"),
    "divided": ("long long*", "int64"),
    "squared": ("_Float16*", "float16"),
    "packed": ("double*", "float64"),
    "dotted": ("long long*", "int64"),
    "contrast": ("std::uint16_t*", "bfloat16"),
}
#: How the verdict names what a switch leaves out, where that has another name.
_SHOWN: dict[str, tuple[str, ...]] = {
    "paged": ("",),
    "neighbours": ("",),
    "shut": ("/shut", "/fronts", "/afar"),
    "fronts": ("/fronts", "/afar"),
    "highest": ("/highest", "/lowest"),
    "frequent": ("/frequent", "/highest", "/lowest"),
    "extremes": ("/extremes", "/highest", "/lowest", "/frequent", "/opposed"),
    "exchanged": ("exchanged",),
    "spiked": ("/spiked", "/bumped", "/large"),
    "runs": ("/runs", "/highest", "/lowest", "/frequent", "/opposed"),
    "faint": ("/faint", "/small", "/faded"),
    "named": ("/named", "/occasion"),
    "occasions": ("",),  # one call in a hundred has it anyway
    "agreeing": ("/agreeing", "/occasion"),
    "masks": ("/shut", "/open"),
    "together": ("/edges in another order",),
    "levels": ("/levels", "/lowered", "/deep"),
    "leading": ("/leading", "/above", "/below"),
    "halves": ("/halves", "/integer"),
    "stretches": ("/stretches", "/shut"),
}


def _candidate(target: str, body: str, place: str, text: str) -> Candidate:
    parameters, arguments, shape = _GIVEN[target]
    result, dtype = _RESULTS.get(target, ("float*", "float32"))
    headers = ("algorithm", "cmath", "cstdint", "cstring", "functional", "numeric", "vector")
    least = "".join(f"#include <{header}>\n" for header in headers)
    least += "static double least(double x) { return std::fmax(x, -100.0); }\n"
    head = (
        f"void kernel({parameters}, {result} y, long long rows, long long cols) {{ const long long n = rows; (void)n;\n"
    )
    module = "module" in arguments
    plan = (
        PLAN.replace("plan(ARGUMENTS)", "plan(module, x)" if module else "plan(ARGUMENTS)")
        .replace("DTYPE", dtype)
        .replace("ARGUMENTS", arguments)
        .replace("SHAPE", shape)
        .replace("FIRST", arguments.split(",")[0])
    )
    return Candidate.of("cpp", {"kernel.cpp": f"{least}{head}{body.replace(place, text)}}}\n", "plan.py": plan})


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repo")
    (root / "layers.py").write_text(TARGETS)
    return root


@pytest.fixture(scope="module")
def evaluator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Evaluator]:
    cache = tmp_path_factory.mktemp("cache")
    with Evaluator(EvaluatorSettings(cache_dir=cache, lock_dir=cache, times=False)) as opened:
        yield opened


@pytest.mark.parametrize("name", ATTACKS)
def test_what_draws_hardly_have(evaluator: Evaluator, repo: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    target, body, place, wrong, right, family = ATTACKS[name]
    attack, twin = (_candidate(target, body, place, text) for text in (wrong, right))

    def judged(candidate: Candidate) -> Evaluation:
        return evaluator.evaluate(candidate, find(repo, f"::{target}"), timing=False)

    # The last trials but two are of a family that is drawn from all of them.
    shown = (*_SHOWN.get(family, (f"/{family}: ",)), "/after many calls")
    for _ in tries(evaluator):  # now and then drawn values show it before what it is for does
        refused = judged(attack)
        assert refused.status is Status.INCORRECT_NUMERICAL, refused.reason
        if any(words in refused.reason for words in shown):
            break
    assert any(words in refused.reason for words in shown), refused.reason
    passed = judged(twin)
    assert passed.status is Status.PASSED, passed.reason
    SWITCHES[family](monkeypatch)
    for _ in tries(evaluator):  # the last trials' family is drawn, and what is rare comes up by itself now and then
        off = judged(attack)
        if off.status is Status.PASSED:
            break
    assert off.status is Status.PASSED, off.reason


def test_weights_are_those_of_the_call(evaluator: Evaluator, repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls behind others may be of any family, of the one whose own trial has other weights as well."""
    choice = cases.CHANCE.choice
    monkeypatch.setattr(
        cases.CHANCE, "choice", lambda among: "unbiased" if "unbiased" in list(among) else choice(among)
    )
    target, body, place, _, right, _ = ATTACKS["split numbers for half types beside a bias"]
    passed = evaluator.evaluate(_candidate(target, body, place, right), find(repo, f"::{target}"), timing=False)
    assert passed.status is Status.PASSED, passed.reason
