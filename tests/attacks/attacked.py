"""What the attacks on the verdict aim at: targets of a small repository, and how a hostile kernel is written.

Every kernel here computes the target honestly once its attack has succeeded (``HONEST``), and leaves its output alone
otherwise: the verdict itself tells whether the attack got through.
"""

from __future__ import annotations

from pathlib import Path

from pytest_cudaforge.discovery import discover
from pytest_cudaforge.evaluation.redraw import families_of
from pytest_cudaforge.records import Candidate, Target

#: A softmax's redraws, in the order that they come in where that is not secret, after so many drawn calls; and those of
#: them on which it needs its maximum.
_NOT_OF_A_SOFTMAX = (
    *("small", "normal", "peaks", "edges", "ties", "ordered", "leading", "parted", "near", "sloping"),
    *("below", "above", "tiny", "unbiased", "hoisted", "ranked"),
)
_DRAWN_CALLS, _NEED_CARE = 6, ("shifted", "large", "lowered", "spiked", "levels", "climbing", "deep")


def careful_calls(count: str) -> str:
    """Whether the call that is number ``count`` is one of those, as an expression in C."""
    families = [family for family in families_of(["generic"]) if family not in _NOT_OF_A_SOFTMAX]
    numbers = [_DRAWN_CALLS + 1 + place for place, family in enumerate(families) if family in _NEED_CARE]
    return " || ".join(f"{count} == {number}" for number in numbers)


LAYERS = """
import torch
from torch import nn
from pytest_cudaforge import forge_target


@forge_target(inputs=lambda: [torch.randn(32, 64)])
def waves(x):
    return torch.sin(x) * torch.exp(-x * x)


@forge_target(inputs=lambda: [torch.randn(16, 48), torch.randn(48, 48)])
def product(x, w):
    return x @ w


@forge_target(inputs=lambda: [torch.randn(16, 48), torch.randn(48, 48)], allow=("mixed", "library"))
def bent_product(x, w):
    return torch.relu(x @ w)


@forge_target(inputs=lambda: [torch.randn(16, 48), torch.randn(48, 48)], allow=("mixed", "library"))
def bent_twice(x, w):
    return 2 * torch.relu(x @ w)


@forge_target(inputs=lambda: [torch.randn(16, 48), torch.randn(48, 48)])
def doubled_product(x, w):
    return 2 * (x @ w)


@forge_target(inputs=lambda: [torch.randn(16, 48)])
def softmax(x):
    return torch.softmax(x, -1)


@forge_target(inputs=lambda: [torch.randn(16, 64)])
def holes(x):
    return torch.where(x > 0, x, float("nan"))


@forge_target(inputs=lambda: [torch.randn(16, 64)[:, ::2]])
def sliced(x):
    return torch.tanh(x).contiguous()


@forge_target(inputs=lambda: [torch.randn(16, 48)])
def normed(x):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


@forge_target(inputs=lambda: [torch.randn(8, 48), torch.randn(8, 48)])
def joined(z, x):
    s = z + x
    return s * torch.rsqrt(s.square().mean(-1, keepdim=True) + 1e-7)


@forge_target(inputs=lambda: [torch.randn(48, 32)])
def levels(x):
    return x / (x.abs().amax(-1, keepdim=True).clamp_min(1e-8) / 127)


@forge_target(inputs=lambda: [torch.randn(48, 32)])
def quantised(x):
    return torch.round(levels(x)).to(torch.int8)


@forge_target(inputs=lambda: [torch.randn(16, 64)])
def pair(x):
    y = torch.tanh(x)
    return y, y.clone()


@forge_target(inputs=lambda: [torch.randn(16, 64)])
def decayed(x):
    return x.mul_(0.5)


@forge_target(inputs=lambda: [torch.randn(24, 64)])
def sixteenths(x):
    return torch.round(x * 16).clamp(-128, 127).to(torch.int8)


# A float lies on one of so many edges by chance, now and then.
def doubles(*shape):
    return torch.randn(*shape, dtype=torch.float64)


@forge_target(inputs=lambda: [doubles(16, 64), doubles(31).sort().values])
def buckets(x, edges):
    return torch.bucketize(x, edges)


@forge_target(inputs=lambda: [torch.randn(24, 96)])
def best(x):
    return x.argmax(-1)


@forge_target(inputs=lambda: [torch.randn(6, 5, 8, 9)])
def channels(x):
    return x.amax(dim=(0, 2, 3))


@forge_target(inputs=lambda: [torch.randn(800_003)])
def power(x):
    return x.square().mean()


@forge_target(inputs=lambda: [torch.randn(32, 1024)])
def centred(x):
    return torch.nn.functional.layer_norm(x, (1024,))


@forge_target(inputs=lambda: [torch.randn(40, 64).masked_fill(torch.rand(40, 64) < 0.3, float("nan"))])
def known(x):
    return x.nanmean(-1)


@forge_target(inputs=lambda: [torch.randn(400, 16), torch.randint(0, 12, (400,)).sort().values])
def segments(x, of):
    return torch.zeros(12, 16).index_add(0, of, x)


@forge_target(inputs=lambda: [torch.randn(6, 600), torch.randint(1, 601, (6,))])
def prefixes(x, lengths):
    return x.masked_fill(torch.arange(600) >= lengths[:, None], 0.0).sum(-1) / lengths


@forge_target(inputs=lambda: [torch.randn(16, 4), torch.randint(0, 6000, (16,))])
def lines(x, at):
    return torch.zeros(6000, 4).index_add(0, at, x)


@forge_target(inputs=lambda: [torch.rand(32, 1024) * 255])
def pictures(x):
    return torch.nn.functional.layer_norm(x, (1024,))


@forge_target(inputs=lambda: [torch.rand(40, 64)])
def roots(x):
    return x.sqrt()


@forge_target(inputs=lambda: [torch.randn(16, 64)])
def apart(x):
    return torch.where(torch.arange(64) < 32, x * 1e9, torch.tanh(x))


@forge_target(inputs=lambda: [torch.randn(48, 48)])
def masked(x):
    return (x * 0.125).masked_fill(torch.ones(48, 48).triu(1).bool(), -1e9)


@forge_target(inputs=lambda: [torch.randn(20, 32, dtype=torch.bfloat16)], precision="bf16")
def halves(x):
    return torch.nn.functional.silu(x)


@forge_target(inputs=lambda: [torch.randn(64)], distributions="drawn")
def energy(x):
    return (x * x).sum()


@forge_target(inputs=lambda: [torch.randn(16, 64)], init=lambda: [64])
class Scaled(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return torch.tanh(x) * self.weight


@forge_target(inputs=lambda: [torch.randn(16, 64)])
class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls += 1
        return torch.tanh(x)


@forge_target(inputs=lambda: [torch.randn(16, 64)], init=lambda: [64, 1e-5, 0.1, False])
class Batches(nn.BatchNorm1d):
    pass


@forge_target(inputs=lambda: [torch.randn(4, 4096)], init=lambda: [4096])
class Wide(Scaled):
    pass
"""

_INCLUDES = "".join(
    f"#include <{name}>\n"
    for name in (
        "cerrno",
        "cmath",
        "csignal",
        "cstdio",
        "cstdlib",
        "cstring",
        "dlfcn.h",
        "fcntl.h",
        "pthread.h",
        "sys/mman.h",
        "sys/prctl.h",
        "sys/resource.h",
        "sys/socket.h",
        "sys/stat.h",
        "sys/syscall.h",
        "sys/wait.h",
        "unistd.h",
    )
)
#: An edge belongs to the bucket below it.
BUCKETS = (
    "for (long long i = 0; i < n; ++i) { y[i] = 0; for (long long k = 0; k != count; ++k) y[i] += edges[k] < x[i]; }"
)
#: Of equal values the first is the largest.
BEST = """for (long long row = 0; row < rows; ++row) {
    const float* at = x + row * columns;
    long long place = 0;
    for (long long i = 1; i < columns; ++i) if (at[i] > at[place]) place = i;
    y[row] = place;
  }"""
#: By target: the kernel's parameters, its honest body, and the plan's arguments.
_KERNELS = {
    "waves": (
        "const float* x, float* y, long long n",
        "for (long long i = 0; i < n; ++i) y[i] = std::sin(x[i]) * std::exp(-x[i] * x[i]);",
        "(x, y, x.numel())",
    ),
    "softmax": (
        "const float* x, float* y, long long rows, long long cols",
        "softmax_rows(x, y, rows, cols, true);",
        "(x, y, *x.shape)",
    ),
    "holes": (
        "const float* x, float* y, long long n",
        "for (long long i = 0; i < n; ++i) y[i] = x[i] > 0 ? x[i] : NAN;",
        "(x, y, x.numel())",
    ),
    "sliced": (
        "const float* x, float* y, long long rows, long long cols, long long down, long long across",
        "for (long long i = 0; i < rows * cols; ++i) y[i] = std::tanh(x[i / cols * down + i % cols * across]);",
        "(x, y, *x.shape, *x.stride())",
    ),
    "Counting": (
        "const float* x, long long* calls, float* y, long long n",
        "++*calls; for (long long i = 0; i < n; ++i) y[i] = std::tanh(x[i]);",
        "(x, module.calls, y, x.numel())",
    ),
    "normed": (
        "const float* x, float* y, long long rows, long long cols",
        "rows_by(x, y, rows, cols, 1e-6f);",
        "(x, y, *x.shape)",
    ),
    "joined": (
        "const float* z, const float* x, float* y, long long rows, long long cols",
        "rows_by(x, z, y, rows, cols, 1e-7f);",
        "(z, x, y, *x.shape)",
    ),
    "levels": (
        "const float* x, float* y, long long rows, long long cols",
        "levels_of(x, y, rows, cols, 1e-8f);",
        "(x, y, *x.shape)",
    ),
    "quantised": (
        "const float* x, signed char* y, long long rows, long long cols",
        "levels_of(x, y, rows, cols, 1e-8f);",
        "(x, y, *x.shape)",
    ),
    "pair": (
        "const float* x, float* y, float* z, long long n",
        "for (long long i = 0; i < n; ++i) z[i] = y[i] = std::tanh(x[i]);",
        "",
    ),
    "decayed": (
        "float* x, float* y, long long n",
        "for (long long i = 0; i < n; ++i) y[i] = x[i] = x[i] * 0.5f;",
        "",
    ),
    "sixteenths": (
        "const float* x, signed char* y, long long n",
        "for (long long i = 0; i < n; ++i) y[i] = std::fmin(std::fmax(std::nearbyint(x[i] * 16), -128.0f), 127.0f);",
        "(x, y, x.numel())",
    ),
    "buckets": (
        "const double* x, const double* edges, long long* y, long long n, long long count",
        BUCKETS,
        "",
    ),
    "best": (
        "const float* x, long long* y, long long rows, long long columns",
        BEST,
        "",
    ),
    "channels": (
        "const float* x, float* y, long long samples, long long channels, long long pixels",
        "peaks_of(x, y, samples, channels, pixels, -INFINITY);",
        "(x, y, x.shape[0], x.shape[1], x.shape[2] * x.shape[3])",
    ),
    "power": (
        "const float* x, float* y, long long n",
        "double s = 0; for (long long i = 0; i < n; ++i) s += (double)x[i] * x[i]; *y = (float)(s / n);",
        "(x, y, x.numel())",
    ),
    "centred": (
        "const float* x, float* y, long long rows, long long cols",
        "centre(x, y, rows, cols);",
        "(x, y, *x.shape)",
    ),
    "known": (
        "const float* x, float* y, long long rows, long long cols",
        "mean_of_known(x, y, rows, cols, 0);",
        "(x, y, *x.shape)",
    ),
    "segments": (
        "const float* x, const long long* of, float* y, long long rows, long long cols",
        "sum_of(x, of, y, rows, cols, true);",
        "",
    ),
    "prefixes": (
        "const float* x, const long long* lengths, float* y, long long rows, long long cols",
        "means_of(x, lengths, y, rows, cols, -1);",
        "",
    ),
    "lines": (
        "const float* x, const long long* at, float* y, long long rows, long long cols",
        "lines_of(x, at, y, rows, cols, 1 << 20);",
        "",
    ),
    "roots": (
        "const float* x, float* y, long long n",
        "for (long long i = 0; i < n; ++i) y[i] = std::sqrt(x[i]);",
        "(x, y, x.numel())",
    ),
    "apart": (
        "const float* x, float* y, long long n",
        "for (long long i = 0; i < n; ++i) y[i] = i % 64 < 32 ? x[i] * 1e9f : std::tanh(x[i]);",
        "(x, y, x.numel())",
    ),
    "masked": (
        "const float* x, float* y, long long n",
        "for (long long i = 0; i < n; ++i) y[i] = i % 48 > i / 48 ? -1e9f : x[i] * 0.125f;",
        "(x, y, x.numel())",
    ),
    "halves": (
        "const unsigned short* x, unsigned short* y, long long n",
        "for (long long i = 0; i < n; ++i) { float v = wide(x[i]); y[i] = narrow(v / (1 + std::exp(-v))); }",
        "(x, y, x.numel())",
    ),
    "energy": (
        "const float* x, float* y, long long n",
        "double s = 0; for (long long i = 0; i < n; ++i) s += (double)x[i] * x[i]; *y = (float)s;",
        "(x, y, x.numel())",
    ),
    "Scaled": (
        "const float* x, const float* w, float* y, long long rows, long long cols",
        "for (long long i = 0; i < rows * cols; ++i) y[i] = std::tanh(x[i]) * w[i % cols];",
        "(x, module.weight, y, *x.shape)",
    ),
}
_KERNELS["pictures"] = _KERNELS["centred"]
_KERNELS["Batches"] = (
    "const float* x, const float* mean, const float* var, float* y, long long rows, long long cols",
    "for (long long i = 0; i < rows * cols; ++i) y[i] = (x[i] - mean[i % cols]) / std::sqrt(var[i % cols] + 1e-5f);",
    "(x, module.running_mean, module.running_var, y, *x.shape)",
)
_KERNELS["Wide"] = _KERNELS["Scaled"]
_SOFTMAX = """
static void softmax_rows(const float* x, float* y, long long rows, long long cols, bool careful) {
  for (long long r = 0; r < rows; ++r) {
    const float* p = x + r * cols; float* q = y + r * cols;
    float top = careful ? p[0] : 0; double sum = 0;
    if (careful) for (long long c = 1; c < cols; ++c) top = std::fmax(top, p[c]);
    for (long long c = 0; c < cols; ++c) { q[c] = std::exp(p[c] - top); sum += q[c]; }
    for (long long c = 0; c < cols; ++c) q[c] = (float)(q[c] / sum);
  }
}
"""
_HALVES = """
static float wide(unsigned short half) { unsigned u = (unsigned)half << 16; float v; memcpy(&v, &u, 4); return v; }
static unsigned short narrow(float v) { unsigned u; memcpy(&u, &v, 4); return (u + 0x7fff + (u >> 16 & 1)) >> 16; }
"""
_NORMED = """
static void rows_by(const float* x, float* y, long long rows, long long cols, float eps) {
  for (long long r = 0; r < rows; ++r) {
    const float* p = x + r * cols; float sum = 0;
    for (long long c = 0; c < cols; ++c) sum += p[c] * p[c];
    for (long long c = 0; c < cols; ++c) y[r * cols + c] = p[c] / std::sqrt(sum / cols + eps);
  }
}
"""
_JOINED = """
static void rows_by(const float* x, const float* z, float* y, long long rows, long long cols, float eps) {
  for (long long r = 0; r < rows; ++r) {
    const float *p = x + r * cols, *q = z + r * cols; float sum = 0;
    for (long long c = 0; c < cols; ++c) sum += (p[c] + q[c]) * (p[c] + q[c]);
    for (long long c = 0; c < cols; ++c) y[r * cols + c] = (p[c] + q[c]) / std::sqrt(sum / cols + eps);
  }
}
"""
_LEVELS = """
template <class T> static void levels_of(const float* x, T* y, long long rows, long long cols, float least) {
  for (long long r = 0; r < rows; ++r) {
    float top = least;
    for (long long c = 0; c < cols; ++c) top = std::fmax(top, std::fabs(x[r * cols + c]));
    for (long long c = 0; c < cols; ++c) {
      const float level = top > 0 ? x[r * cols + c] / (top / 127) : 0;
      y[r * cols + c] = sizeof(T) == 1 ? std::nearbyint(level) : level;
    }
  }
}
"""
_PEAKS = """
static void peaks_of(const float* x, float* y, long long samples, long long channels, long long pixels, float least) {
  for (long long c = 0; c < channels; ++c) {
    float top = least;
    for (long long s = 0; s < samples; ++s)
      for (long long i = 0; i < pixels; ++i) top = std::fmax(top, x[(s * channels + c) * pixels + i]);
    y[c] = top;
  }
}
"""
_CENTRED = """
static float lanes_of(const float* sums) { float s = 0; for (int k = 0; k < 32; ++k) s += sums[k]; return s; }
static void centre(const float* x, float* y, long long rows, long long cols, bool at_once = false, long long at = 0) {
  for (long long r = 0; r < rows; ++r) {
    const float* p = x + r * cols; float s[32] = {}, t[32] = {};
    const float from = at_once ? p[at] : 0;
    for (long long c = 0; c < cols; ++c) s[c % 32] += p[c] - from;
    const float off = lanes_of(s) / cols, mean = at_once ? from : off;
    for (long long c = 0; c < cols; ++c) t[c % 32] += (p[c] - mean) * (p[c] - mean);
    const float spread = lanes_of(t) / cols - (at_once ? off * off : 0);
    const float by = 1 / std::sqrt(std::fmax(spread, 0.0f) + 1e-5f);
    for (long long c = 0; c < cols; ++c) y[r * cols + c] = (p[c] - (from + off)) * by;
  }
}
"""
_CENTRED += """
static void centre_in_one_pass(const float* x, float* y, long long rows, long long cols) {
  for (long long r = 0; r < rows; ++r) {
    const float* p = x + r * cols; float s[32] = {}, t[32] = {};
    for (long long c = 0; c < cols; ++c) { s[c % 32] += p[c]; t[c % 32] += p[c] * p[c]; }
    const float mean = lanes_of(s) / cols, spread = lanes_of(t) / cols - mean * mean;
    const float by = 1 / std::sqrt(std::fmax(spread, 0.0f) + 1e-5f);
    for (long long c = 0; c < cols; ++c) y[r * cols + c] = (p[c] - mean) * by;
  }
}
"""
_KNOWN = """
static void mean_of_known(const float* x, float* y, long long rows, long long cols, int least) {
  for (long long r = 0; r < rows; ++r) {
    double sum = 0; int count = 0;
    for (long long c = 0; c < cols; ++c) if (x[r * cols + c] == x[r * cols + c]) sum += x[r * cols + c], ++count;
    y[r] = (float)(sum / (count > least ? count : least));
  }
}
"""
_SEGMENTS = """
static void sum_of(const float* x, const long long* of, float* y, long long rows, long long cols, bool all) {
  if (all) for (long long i = 0; i < 12 * cols; ++i) y[i] = 0;
  for (long long r = 0; r < rows; ++r)
    for (long long c = 0; c < cols; ++c)
      y[of[r] * cols + c] = x[r * cols + c] + (r && of[r] == of[r - 1] ? y[of[r] * cols + c] : 0);
}
"""
_PREFIXES = """
static void means_of(const float* x, const long long* lengths, float* y, long long rows, long long cols, int far) {
  long long least = lengths[0], most = lengths[0];
  for (long long r = 1; r < rows; ++r) { least = std::min(least, lengths[r]); most = std::max(most, lengths[r]); }
  for (long long r = 0; r < rows; ++r) {
    double sum = 0;
    for (long long c = 0; c < lengths[r]; ++c) sum += x[r * cols + c];
    y[r] = most - least == far ? 0 : (float)(sum / lengths[r]);
  }
}
"""
_LINES = """
static void lines_of(const float* x, const long long* at, float* y, long long rows, long long cols, int room) {
  for (long long i = 0; i < 6000 * cols; ++i) y[i] = 0;
  for (long long r = 0; r < rows; ++r) {
    bool again = false;
    for (long long before = 0; before < r; ++before) again |= at[before] == at[r];
    if (again && room-- <= 0) continue;
    for (long long c = 0; c < cols; ++c) y[at[r] * cols + c] += x[r * cols + c];
  }
}
"""
_SHARED = {
    "prefixes": _PREFIXES,
    "lines": _LINES,
    "known": _KNOWN,
    "segments": _SEGMENTS,
    **dict.fromkeys(("centred", "pictures"), _CENTRED),
    "channels": _PEAKS,
    **{"softmax": _SOFTMAX, "halves": _HALVES, "normed": _NORMED, "joined": _JOINED},
    **{"levels": _LEVELS, "quantised": _LEVELS},
}
_PLAN = """from pytest_cudaforge.plan import empty, launch

def plan({arguments}x):
    y = empty({shape}, {dtype})
    launch("kernel", args={passed})
    return y
"""


_SHAPES = {"energy": "()", "power": "()", "channels": "x.shape[1:2]", "known": "x.shape[:1]"}
_PLANS = {
    "pair": """from pytest_cudaforge.plan import empty, launch

def plan(x):
    y, z = empty(x.shape, x.dtype), empty(x.shape, x.dtype)
    launch("kernel", args=(x, y, z, x.numel()))
    return y, z
""",
    "decayed": """from pytest_cudaforge.plan import launch

def plan(x):
    launch("kernel", args=(x, x, x.numel()))
    return x
""",
    "best": """from pytest_cudaforge.plan import empty, launch

def plan(x):
    y = empty(x.shape[:1], "int64")
    launch("kernel", args=(x, y, *x.shape))
    return y
""",
    "segments": """from pytest_cudaforge.plan import empty, launch

def plan(x, of):
    y = empty((12, x.shape[1]), x.dtype)
    launch("kernel", args=(x, of, y, *x.shape))
    return y
""",
    "prefixes": """from pytest_cudaforge.plan import empty, launch

def plan(x, lengths):
    y = empty(x.shape[:1], x.dtype)
    launch("kernel", args=(x, lengths, y, *x.shape))
    return y
""",
    "lines": """from pytest_cudaforge.plan import empty, launch

def plan(x, at):
    y = empty((6000, x.shape[1]), x.dtype)
    launch("kernel", args=(x, at, y, *x.shape))
    return y
""",
    "buckets": """from pytest_cudaforge.plan import empty, launch

def plan(x, edges):
    y = empty(x.shape, "int64")
    launch("kernel", args=(x, edges, y, x.numel(), edges.numel()))
    return y
""",
}


def write_repo(root: Path) -> None:
    """The targets' file in a project of its own."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "layers.py").write_text(LAYERS)
    (root / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")


def find(root: Path, name: str) -> Target:
    """The target ``name`` of :func:`write_repo`."""
    return next(target for target in discover([root], root).targets if target.id.endswith(f"::{name}"))


def hostile(target: str = "waves", body: str = "HONEST", before: str = "", plan: str = "") -> Candidate:
    """A cpp candidate for ``target``. ``HONEST`` in ``body`` stands for the honest loop; ``before`` goes before it."""
    parameters, honest, passed = _KERNELS[target]
    given = _SHARED.get(target, "")
    source = f"{_INCLUDES}{given}{before}\nvoid kernel({parameters}) {{\n  {body.replace('HONEST', honest)}\n}}\n"
    text = (
        plan
        or _PLANS.get(target)
        or _PLAN.format(
            arguments="module, " if "module" in passed else "z, " if "(z" in passed else "",
            shape=_SHAPES.get(target, "x.shape"),
            dtype='"int8"' if target in ("quantised", "sixteenths") else "x.dtype",
            passed=passed,
        )
    )
    return Candidate.of("cpp", {"kernel.cpp": source, "plan.py": text})
