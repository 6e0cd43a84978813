"""How far from fp64 are honest kernels, and how far are wrong ones? The measurement behind the tolerance's constants.

To run: `python tests/benchmarks/tolerance_calibration.py [--device cuda] [--ops a,b] [--elements N] [--seeds N]
[--save FILE]`, or `--table FILE` to print the table of a saved run (its verdicts are those of that run).

Each style of kernel is emulated in its own arithmetic (numpy and torch, on the CPU): serial, vectorised, blocked,
pairwise and compensated sums, Welford, online softmax, split products, fast exponentials; and the classic wrong ones.
The reference is torch on ``--device`` (cuBLAS, cuDNN and ATen there; MKL and ATen here), the oracle is torch in fp64.
Every row goes through the rule itself; the table (README.md beside this file has it) says per operator, type and length
how large an honest error ratio gets, how small a wrong one's largest one is over all six families of inputs, and what
the rule lets pass and refuses.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from pytest_cudaforge.evaluation.correctness import Rule, judge_output
from pytest_cudaforge.evaluation.expectation import SUM_NOISE
from pytest_cudaforge.evaluation.precision import FEW, Fp64Mode
from pytest_cudaforge.evaluation.redraw import FAMILIES, redraw

LENGTHS = (16, 256, 1024, 4096, 16384, 65536, 1 << 18, 1 << 20, 1 << 22)
LANES = 256
Sum = Callable[[Tensor], Tensor]
Kernel = Callable[..., Tensor]


# -- sums: (rows, K) -> (rows,) in the arithmetic of the argument ----------------------------------------------------


def _np(x: Tensor) -> np.ndarray:
    return x.contiguous().numpy()


def serial(x: Tensor) -> Tensor:
    if x.shape[0] == 1:
        return torch.from_numpy(np.add.accumulate(_np(x), axis=1)[:, -1].copy())
    # numpy adds a leading dimension up one slice after the other (a single row it would add in pairs).
    return torch.from_numpy(np.add.reduce(np.ascontiguousarray(_np(x).T), axis=0))


def lanes(count: int) -> Sum:
    """``count`` lanes that stride through the row, then a tree over them."""

    def total(x: Tensor) -> Tensor:
        rows, k = x.shape
        if k <= count:
            return pairwise(x)
        padded = F.pad(x, (0, -k % count))
        partial = np.add.reduce(_np(padded).reshape(rows, -1, count), axis=1)
        return pairwise(torch.from_numpy(partial))

    return total


def pairwise(x: Tensor) -> Tensor:
    while x.shape[1] > 1:
        x = F.pad(x, (0, x.shape[1] % 2))
        x = x[:, ::2] + x[:, 1::2]
    return x[:, 0]


def blocked(x: Tensor) -> Tensor:
    """Chunks of 128 one after the other, then the chunks one after the other."""
    padded = F.pad(x, (0, -x.shape[1] % 128))
    return serial(serial(padded.reshape(-1, 128)).reshape(x.shape[0], -1))


def atomics(x: Tensor) -> Tensor:
    """Blocks of 1024 by a tree, added up in any order."""
    padded = F.pad(x, (0, -x.shape[1] % 1024))
    parts = pairwise(padded.reshape(-1, 1024)).reshape(x.shape[0], -1)
    return serial(parts[:, torch.randperm(parts.shape[1])])


def split(x: Tensor) -> Tensor:
    """Eight pieces of 256 lanes each, added up one after the other."""
    return serial(torch.stack([lanes(LANES)(part) for part in x.chunk(8, 1)], 1))


def kahan(x: Tensor) -> Tensor:
    """A compensated sum over 32 lanes."""
    steps = F.pad(x, (0, -x.shape[1] % 32)).reshape(x.shape[0], -1, 32).transpose(0, 1).contiguous()
    total, lost = torch.zeros_like(steps[0]), torch.zeros_like(steps[0])
    for step in steps:
        due = step - lost
        new = total + due
        lost, total = (new - total) - due, new
    return pairwise(total)


def wide(x: Tensor) -> Tensor:
    return x.double().sum(1).to(x.dtype)


def in_type(dtype: torch.dtype) -> Sum:
    """256 lanes that add in a half type, then a tree in it: wrong."""

    def total(x: Tensor) -> Tensor:
        low = F.pad(x, (0, -x.shape[1] % LANES)).reshape(x.shape[0], -1, LANES).to(dtype)
        lane = torch.zeros_like(low[:, 0])
        for step in low.unbind(1):
            lane = lane + step
        return pairwise(lane).to(x.dtype)

    return total


def without(fraction: float) -> Sum:
    """Leaves out the last ``fraction`` of the row, or one element where it is 0: wrong."""

    def total(x: Tensor) -> Tensor:
        kept = x.shape[1] - max(1, math.ceil(x.shape[1] * fraction))
        return wide(x[:, :kept])

    return total


def sampled(x: Tensor) -> Tensor:
    """99 % of the row, scaled up: wrong."""
    kept = x.shape[1] - math.ceil(x.shape[1] / 100)
    return (x[:, :kept].double().sum(1) * (x.shape[1] / kept)).to(x.dtype)


HONEST_SUMS: dict[str, Sum] = {
    "lanes 32": lanes(32),
    "lanes 256": lanes(LANES),
    "lanes 1024": lanes(1024),
    "pairwise": pairwise,
    "blocked": blocked,
    "atomics": atomics,
    "split": split,
    "kahan": kahan,
    "fp64": wide,
}
WRONG_SUMS: dict[str, Sum] = {
    "bf16 sum": in_type(torch.bfloat16),
    "fp16 sum": in_type(torch.float16),
    "1 % left out": without(0.01),
    "1 element left out": without(0.0),
    "99 % sampled": sampled,
}


# -- pieces of arithmetic --------------------------------------------------------------------------------------------


def fast_exp(x: Tensor) -> Tensor:
    """CUDA's __expf: the argument is scaled and rounded in fp32, ex2.approx is good to two ulp."""
    scaled = (x * 1.4426950408889634).double()
    return (scaled.exp2() * (1 + 2.0**-23 * (2 * torch.rand_like(scaled) - 1) * 2)).to(x.dtype)


def newton_rsqrt(x: Tensor) -> Tensor:
    """A 12-bit estimate and one Newton step."""
    first = rough_rsqrt(x)
    return first * (1.5 - 0.5 * x * first * first)


def rough_rsqrt(x: Tensor) -> Tensor:
    return (x.double().rsqrt() * (1 + 1.5 * 2.0**-12 * (2 * torch.rand(x.shape) - 1))).to(x.dtype)


def tf32(x: Tensor, truncate: bool = False) -> Tensor:
    bits = x.contiguous().view(torch.int32)
    return ((bits if truncate else bits + 0x1000) & ~0x1FFF).view(torch.float32)


def through(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda x: x.to(dtype).to(x.dtype)


def truncated(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Towards zero instead of to nearest."""
    near = x.to(dtype)
    away = near.to(x.dtype).abs() > x.abs()
    return torch.where(away, torch.nextafter(near, torch.zeros_like(near)), near)


# -- styles ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Style:
    """One way to write a kernel. ``kind``: honest, serial (one running sum per row), wrong, or open (a question)."""

    name: str
    kind: str
    run: Kernel


@dataclass(frozen=True)
class Op:
    """``make`` gives the reference's arguments; styles take them in fp32 and return fp32."""

    name: str
    reference: Kernel
    styles: tuple[Style, ...]
    make: Callable[[str, int, int, torch.dtype, torch.Generator], tuple[Tensor, ...]]
    largest: int = 1 << 18
    smallest: int = 16
    reduces: bool = True
    #: the same in single operators of the declared type, as eager code has them
    stepwise: Kernel | None = None
    seeds: int = field(default=1)


def by_sums(kernel: Callable[..., Tensor], **more: Kernel) -> list[Style]:
    """``kernel(total, *args)`` under every way to sum."""

    def bound(total: Sum) -> Kernel:
        return lambda *args: kernel(total, *args)

    found = [Style("serial", "serial", bound(serial))]
    found += [Style(name, "honest", bound(total)) for name, total in HONEST_SUMS.items()]
    found += [Style(name, "wrong", bound(total)) for name, total in WRONG_SUMS.items()]
    return found + [_named(name, run) for name, run in more.items()]


def _named(name: str, run: Kernel) -> Style:
    kind, _, rest = name.partition("_")
    return Style(rest.replace("_", " "), kind, run)


def named(**more: Kernel) -> list[Style]:
    return [_named(name, run) for name, run in more.items()]


def rows_of(family: str, rows: int, k: int, dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor, ...]:
    drawn = torch.empty(rows, k).normal_(generator=generator).to(dtype)
    return (redraw(family, drawn, "generic", generator),)


def layer_norm(total: Sum, x: Tensor, rsqrt: Kernel = torch.rsqrt, eps: float = 1e-5, less: int = 0) -> Tensor:
    mean = total(x)[:, None] / x.shape[1]
    centred = x - mean
    return centred * rsqrt(total(centred * centred)[:, None] / (x.shape[1] - less) + eps)


def one_pass_norm(total: Sum, x: Tensor) -> Tensor:
    mean = total(x)[:, None] / x.shape[1]
    variance = total(x * x)[:, None] / x.shape[1] - mean * mean
    return (x - mean) * torch.rsqrt(variance.clamp_min(0) + 1e-5)


def welford(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance over 64 lanes and more of Welford's recurrence, merged as Chan does."""
    width = max(64, x.shape[1] // 4096) if x.shape[1] >= 64 else 1
    steps = x.reshape(x.shape[0], -1, width).transpose(0, 1).contiguous()
    mean, m2 = torch.zeros_like(steps[0]), torch.zeros_like(steps[0])
    for count, step in enumerate(steps, 1):
        delta = step - mean
        mean = mean + delta / count
        m2 = m2 + delta * (step - mean)
    each = len(steps)
    while mean.shape[1] > 1:
        delta = mean[:, 1::2] - mean[:, ::2]
        m2 = m2[:, ::2] + m2[:, 1::2] + delta * delta * (each / 2)
        mean, each = mean[:, ::2] + delta / 2, each * 2
    return mean, m2 / x.shape[1]


def welford_norm(x: Tensor) -> Tensor:
    mean, variance = welford(x)
    return (x - mean) * torch.rsqrt(variance + 1e-5)


def first_shifted_norm(x: Tensor) -> Tensor:
    """One pass over x minus the row's first element."""
    shift = x[:, :1]
    return one_pass_norm(lanes(LANES), x - shift)


def rms_norm(total: Sum, x: Tensor, rsqrt: Kernel = torch.rsqrt, eps: float = 1e-6) -> Tensor:
    return x * rsqrt(total(x * x)[:, None] / x.shape[1] + eps)


def softmax(total: Sum, x: Tensor, exp: Kernel = torch.exp) -> Tensor:
    exponent = exp(x - x.amax(1, keepdim=True))
    return exponent / total(exponent)[:, None]


def online_total(x: Tensor, width: int = 64) -> tuple[Tensor, Tensor]:
    """Running maximum and rescaled sum over tiles of the row."""
    top = torch.full((x.shape[0], 1), -math.inf)
    total = torch.zeros(x.shape[0], 1)
    for tile in x.split(width, 1):
        new = torch.maximum(top, tile.amax(1, keepdim=True))
        total = total * torch.exp(top - new) + (tile - new).exp().sum(1, keepdim=True)
        top = new
    return top, total


def online_softmax(x: Tensor) -> Tensor:
    top, total = online_total(x)
    return torch.exp(x - top) / total


def sum_styles() -> list[Style]:
    return by_sums(lambda total, x: total(x))


def norm_styles() -> list[Style]:
    short = lanes(LANES)
    return by_sums(layer_norm) + named(
        honest_welford=welford_norm,
        honest_newton=lambda x: layer_norm(short, x, newton_rsqrt),
        honest_one_pass_in_fp64=lambda x: one_pass_norm(wide, x.double()).float(),
        honest_pass_shifted_by_first=first_shifted_norm,
        wrong_one_pass=lambda x: one_pass_norm(short, x),
        wrong_one_pass_fp64_sums=lambda x: one_pass_norm(wide, x),
        wrong_unbiased=lambda x: layer_norm(wide, x, less=1),
        wrong_no_eps=lambda x: layer_norm(wide, x, eps=0.0),
        wrong_eps_1e6=lambda x: layer_norm(wide, x, eps=1e-6),
        wrong_eps_outside=lambda x: layer_norm(wide, x, lambda v: 1 / ((v - 1e-5).clamp_min(0).sqrt() + 1e-5)),
        wrong_rough_rsqrt=lambda x: layer_norm(short, x, rough_rsqrt),
        wrong_bf16_inside=lambda x: layer_norm(short, x.bfloat16().float()),
    )


def rms_styles() -> list[Style]:
    short = lanes(LANES)
    return by_sums(rms_norm) + named(
        honest_newton=lambda x: rms_norm(short, x, newton_rsqrt),
        honest_square_root=lambda x: rms_norm(short, x, lambda v: 1 / v.sqrt()),
        wrong_no_eps=lambda x: rms_norm(wide, x, eps=0.0),
        wrong_eps_1e5=lambda x: rms_norm(wide, x, eps=1e-5),
        wrong_eps_outside=lambda x: rms_norm(wide, x, lambda v: 1 / ((v - 1e-6).clamp_min(0).sqrt() + 1e-6)),
        wrong_rough_rsqrt=lambda x: rms_norm(short, x, rough_rsqrt),
        wrong_bf16_inside=lambda x: rms_norm(short, x.bfloat16().float()),
    )


def softmax_styles() -> list[Style]:
    short = lanes(LANES)
    return by_sums(softmax) + named(
        honest_online=online_softmax,
        honest_fast_exp=lambda x: softmax(short, x, fast_exp),
        wrong_no_maximum=lambda x: x.exp() / short(x.exp())[:, None],
        wrong_exp_in_bf16=lambda x: softmax(short, x, lambda v: v.exp().bfloat16().float()),
        wrong_exp_in_fp16=lambda x: softmax(short, x, lambda v: v.exp().half().float()),
        wrong_bf16_inside=lambda x: softmax(short, x.bfloat16().float()),
    )


def logsumexp_styles() -> list[Style]:
    def kernel(total: Sum, x: Tensor, exp: Kernel = torch.exp) -> Tensor:
        top = x.amax(1, keepdim=True)
        return top[:, 0] + total(exp(x - top)).log()

    def online(x: Tensor) -> Tensor:
        top, total = online_total(x)
        return (top + total.log())[:, 0]

    return by_sums(kernel) + named(
        honest_online=online,
        honest_fast_exp=lambda x: kernel(lanes(LANES), x, fast_exp),
        wrong_no_maximum=lambda x: wide(x.exp()).log(),
        wrong_bf16_inside=lambda x: kernel(wide, x.bfloat16().float()),
    )


def variance_styles() -> list[Style]:
    def kernel(total: Sum, x: Tensor, less: int = 1) -> Tensor:
        centred = x - total(x)[:, None] / x.shape[1]
        return total(centred * centred) / (x.shape[1] - less)

    def one_pass(total: Sum, x: Tensor) -> Tensor:
        mean = total(x) / x.shape[1]
        return (total(x * x) / x.shape[1] - mean * mean) * (x.shape[1] / (x.shape[1] - 1))

    return by_sums(kernel) + named(
        honest_welford=lambda x: welford(x)[1][:, 0] * (x.shape[1] / (x.shape[1] - 1)),
        wrong_one_pass=lambda x: one_pass(lanes(LANES), x),
        wrong_one_pass_fp64_sums=lambda x: one_pass(wide, x),
        wrong_biased=lambda x: kernel(wide, x, 0),
        wrong_bf16_inside=lambda x: kernel(wide, x.bfloat16().float()),
    )


def length_styles() -> list[Style]:
    return by_sums(lambda total, x: total(x * x).sqrt()) + named(
        wrong_bf16_inside=lambda x: wide(x.bfloat16().float().square()).sqrt(),
    )


def cumsum_styles() -> list[Style]:
    def scan(x: Tensor, width: int) -> Tensor:
        padded = F.pad(x, (0, -x.shape[1] % width)).reshape(x.shape[0], -1, width)
        inner = torch.from_numpy(np.add.accumulate(_np(padded), axis=2))
        before = torch.from_numpy(np.add.accumulate(_np(inner[:, :, -1]), axis=1))
        before = F.pad(before, (1, 0))[:, :-1, None]
        return (inner + before).reshape(x.shape[0], -1)[:, : x.shape[1]]

    def doubling(x: Tensor) -> Tensor:
        step = 1
        while step < x.shape[1]:
            x = x + F.pad(x, (step, 0))[:, : x.shape[1]]
            step *= 2
        return x

    return named(
        serial_serial=lambda x: torch.from_numpy(np.add.accumulate(_np(x), axis=1)),
        honest_scan_256=lambda x: scan(x, 256),
        honest_scan_1024=lambda x: scan(x, 1024),
        honest_doubling=doubling,
        wrong_exclusive=lambda x: F.pad(x.double().cumsum(1), (1, 0))[:, :-1].float(),
        wrong_block_start_lost=lambda x: (x.double().cumsum(1) - (torch.arange(x.shape[1]) >= 8) * x[:, 7:8]).float(),
        wrong_bf16_inside=lambda x: x.bfloat16().double().cumsum(1).float(),
    )


def products(family: str, rows: int, k: int, dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor, ...]:
    m = max(4, min(64, (1 << 20) // k))
    a = rows_of(family, m, k, dtype, generator)[0]
    b = (torch.empty(k, m).normal_(generator=generator) / math.sqrt(k)).to(dtype)
    return a, b


def product_by(total: Sum) -> Kernel:
    def run(a: Tensor, b: Tensor) -> Tensor:
        m, n = a.shape[0], b.shape[1]
        terms = (a[:, None, :] * b.T[None]).reshape(m * n, -1)
        return total(terms).reshape(m, n)

    return run


def tiled_product(a: Tensor, b: Tensor, tile: int = 32) -> Tensor:
    """Tiles of K, each product rounded once: what tensor cores with an fp32 accumulator do with exact inputs."""
    total = torch.zeros(a.shape[0], b.shape[1])
    for part in range(0, a.shape[1], tile):
        total = total + (a[:, part : part + tile].double() @ b[part : part + tile].double()).float()
    return total


def fused_product(a: Tensor, b: Tensor) -> Tensor:
    """One running sum of fused multiply-adds per element, as a plain loop of a GPU kernel compiles to."""
    total, left, right = torch.zeros(a.shape[0], b.shape[1]), a.double().T, b.double()
    for column, row in zip(left, right, strict=True):
        total = (total.double() + column[:, None] * row).float()
    return total


def split_product(terms: int) -> Kernel:
    """TF32 with error compensation: two or three products of high and low parts."""

    def run(a: Tensor, b: Tensor) -> Tensor:
        ah, bh = tf32(a), tf32(b)
        al, bl = tf32(a - ah), tf32(b - bh)
        total = ah.double() @ bh.double() + ah.double() @ bl.double()
        return (total + (al.double() @ bh.double() if terms > 2 else 0)).float()

    return run


def product_styles() -> list[Style]:
    return named(
        serial_serial=product_by(serial),
        serial_fused=fused_product,
        honest_lanes_32=product_by(lanes(32)),
        honest_pairwise=product_by(pairwise),
        honest_tiles_of_8=lambda a, b: tiled_product(a, b, 8),
        honest_tiles_of_32=tiled_product,
        honest_split_k=lambda a, b: sum(tiled_product(x, y) for x, y in zip(a.chunk(8, 1), b.chunk(8), strict=True)),
        honest_three_tf32=split_product(3),
        wrong_tf32=lambda a, b: tf32(a) @ tf32(b),
        wrong_tf32_truncated=lambda a, b: tf32(a, True) @ tf32(b, True),
        wrong_tf32_one_side=lambda a, b: tf32(a) @ b,
        wrong_two_tf32=split_product(2),
        wrong_bf16=lambda a, b: a.bfloat16().float() @ b.bfloat16().float(),
        wrong_fp16=lambda a, b: a.half().float() @ b.half().float(),
        wrong_last_row_left_out=lambda a, b: a[:, :-1] @ b[:-1],
        wrong_1_percent_left_out=lambda a, b: a[:, : -max(1, len(b) // 100)] @ b[: -max(1, len(b) // 100)],
    )


def heads(family: str, rows: int, k: int, dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor, ...]:
    q = rows_of(family, 16, 64, dtype, generator)[0]
    return (q, *(torch.empty(k, 64).normal_(generator=generator).to(dtype) for _ in range(2)))


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q[None], k[None], v[None])[0]


def flash(exp: Kernel = torch.exp, low: Kernel | None = None) -> Kernel:
    """Tiles of 64 keys with a running maximum; ``low`` rounds the operands of both products."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        top, total = torch.full((q.shape[0], 1), -math.inf), torch.zeros(q.shape[0], 1)
        out = torch.zeros_like(q)
        same = low or (lambda t: t)
        for start in range(0, k.shape[0], 64):
            scores = same(q) @ same(k[start : start + 64]).T * (1 / math.sqrt(q.shape[1]))
            new = torch.maximum(top, scores.amax(1, keepdim=True))
            weights, scale = exp(scores - new), exp(top - new)
            total, top = total * scale + weights.sum(1, keepdim=True), new
            out = out * scale + same(weights) @ same(v[start : start + 64])
        return out / total

    return run


def attention_styles() -> list[Style]:
    def plain(q: Tensor, k: Tensor, v: Tensor, scale: float = 0.125) -> Tensor:
        return softmax(lanes(LANES), q @ k.T * scale) @ v

    def no_maximum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = (q @ k.T * 0.125).exp()
        return (weights @ v) / weights.sum(1, keepdim=True)

    return named(
        honest_plain=plain,
        honest_flash=flash(),
        honest_flash_fast_exp=flash(fast_exp),
        honest_scaled_first=lambda q, k, v: plain(q * 0.125, k, v, 1.0),
        wrong_tf32=flash(low=tf32),
        wrong_bf16=flash(low=through(torch.bfloat16)),
        wrong_no_maximum=no_maximum,
        wrong_last_key_left_out=lambda q, k, v: plain(q, k[:-1], v[:-1]),
        wrong_scale=lambda q, k, v: plain(q, k, v, 0.124),
    )


def sigmoid_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def abramowitz_gelu(x: Tensor) -> Tensor:
    """erf by Abramowitz and Stegun 7.1.26, 1.5e-7 absolute."""
    z = x.abs() * math.sqrt(0.5)
    t = 1 / (1 + 0.3275911 * z)
    poly = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    return 0.5 * x * (1 + torch.sign(x) * (1 - poly * torch.exp(-z * z)))


def gelu_styles() -> list[Style]:
    return named(
        honest_erf=lambda x: 0.5 * x * (1 + torch.erf(x * math.sqrt(0.5))),
        honest_erfc=lambda x: 0.5 * x * torch.erfc(-x * math.sqrt(0.5)),
        open_abramowitz_erf=abramowitz_gelu,
        wrong_tanh=lambda x: F.gelu(x, approximate="tanh"),
        wrong_sigmoid=sigmoid_gelu,
    )


def tanh_gelu_styles() -> list[Style]:
    def kernel(tanh: Kernel) -> Kernel:
        return lambda x: 0.5 * x * (1 + tanh(0.7978845608 * (x + 0.044715 * x * x * x)))

    return named(
        honest_tanh=kernel(torch.tanh),
        honest_by_exp=kernel(lambda v: 1 - 2 / (torch.exp(2 * v) + 1)),
        honest_by_fast_exp=kernel(lambda v: 1 - 2 / (fast_exp(2 * v) + 1)),
        honest_as_sigmoid=lambda x: x / (1 + torch.exp(-1.5957691216 * (x + 0.044715 * x * x * x))),
        open_tanh_approx=kernel(lambda v: torch.tanh(v) * (1 + 2.0**-11 * (2 * torch.rand_like(v) - 1))),
        wrong_erf=F.gelu,
        wrong_sigmoid=sigmoid_gelu,
    )


def silu_styles() -> list[Style]:
    return named(
        honest_division=lambda x: x / (1 + torch.exp(-x)),
        honest_fast_exp=lambda x: x / (1 + fast_exp(-x)),
        honest_by_tanh=lambda x: x * (0.5 + 0.5 * torch.tanh(0.5 * x)),
        wrong_hard=lambda x: F.hardswish(x),
        open_exp_in_half=lambda x: x / (1 + torch.exp(-x.half()).float()),
    )


def tanh_styles() -> list[Style]:
    return named(
        honest_by_exp=lambda x: 1 - 2 / (torch.exp(2 * x) + 1),
        honest_by_fast_exp=lambda x: 1 - 2 / (fast_exp(2 * x) + 1),
        open_tanh_approx=lambda x: torch.tanh(x) * (1 + 2.0**-11 * (2 * torch.rand_like(x) - 1)),
        wrong_pade=lambda x: (x * (27 + x * x) / (27 + 9 * x * x)).clamp(-1, 1),
        open_in_half=lambda x: torch.tanh(x.half()).float(),
    )


def stepwise_rms(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def stepwise_norm(x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt((centred * centred).mean(-1, keepdim=True) + 1e-5)


def stepwise_softmax(x: Tensor) -> Tensor:
    exponent = torch.exp(x - x.amax(-1, keepdim=True))
    return exponent / exponent.sum(-1, keepdim=True)


def _tanh_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def stepwise_gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))


def stepwise_tanh_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x * x * x)))


def stepwise_silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


OPS = {
    op.name: op
    for op in (
        Op("sum", lambda x: x.sum(-1), tuple(sum_styles()), rows_of, 1 << 22),
        Op("sum of all", lambda x: x.sum(), tuple(by_sums(lambda total, x: total(x)[0])), rows_of, seeds=4),
        Op("l2 norm", lambda x: x.norm(dim=-1), tuple(length_styles()), rows_of),
        Op("variance", lambda x: x.var(-1), tuple(variance_styles()), rows_of),
        Op("logsumexp", lambda x: x.logsumexp(-1), tuple(logsumexp_styles()), rows_of),
        Op("rms_norm", stepwise_rms, tuple(rms_styles()), rows_of, stepwise=stepwise_rms),
        Op(
            "layer_norm",
            lambda x: F.layer_norm(x, x.shape[-1:]),
            tuple(norm_styles()),
            rows_of,
            1 << 20,
            stepwise=stepwise_norm,
        ),
        Op("softmax", lambda x: x.softmax(-1), tuple(softmax_styles()), rows_of, stepwise=stepwise_softmax),
        Op("cumsum", lambda x: x.cumsum(-1), tuple(cumsum_styles()), rows_of, largest=1 << 18),
        Op("product", lambda a, b: a @ b, tuple(product_styles()), products, largest=1 << 18),
        Op("attention", attention, tuple(attention_styles()), heads, smallest=64, largest=16384),
        Op("gelu", F.gelu, tuple(gelu_styles()), rows_of, 4096, 4096, False, stepwise_gelu),
        Op("gelu tanh", _tanh_gelu, tuple(tanh_gelu_styles()), rows_of, 4096, 4096, False, stepwise_tanh_gelu),
        Op("silu", F.silu, tuple(silu_styles()), rows_of, 4096, 4096, False, stepwise_silu),
        Op("tanh", torch.tanh, tuple(tanh_styles()), rows_of, 4096, 4096, False),
    )
}
HALF_LENGTHS = (64, 1024, 16384)


# -- measuring -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One style on one draw. ``ratio`` as the rule has it (before kappa); ``refused``: the kinds of mismatches."""

    op: str
    dtype: str
    k: int
    rows: int
    family: str
    style: str
    kind: str
    ratio: float | None
    bound: float | None
    refused: tuple[str, ...]
    device: str
    seed: int


def half_styles(op: Op, dtype: torch.dtype) -> list[Style]:
    """fp32 inside and rounded once; the usual ways to go wrong with half types; the wrong formulas of fp32."""

    def once(run: Kernel) -> Kernel:
        return lambda *args: run(*(a.float() for a in args)).to(dtype)

    kept = [s for s in op.styles if s.name not in ("bf16 sum", "fp16 sum", "bf16 inside", "bf16", "fp16", "kahan")]
    kept = [s for s in kept if not (dtype == torch.bfloat16 and s.name.endswith(("in bf16", "in fp16", "in half")))]
    found = [Style(s.name, "open" if "tf32" in s.name else s.kind, once(s.run)) for s in kept]
    honest = next(s for s in op.styles if s.kind == "honest")
    found.append(Style("truncated", "wrong", lambda *args: truncated(honest.run(*(a.float() for a in args)), dtype)))
    if dtype == torch.float16:
        low = through(torch.bfloat16)
        found.append(Style("bf16 inside", "wrong", lambda *args: honest.run(*(low(a.float()) for a in args)).to(dtype)))
    found += [Style(s.name, s.kind, once(s.run)) for s in op.styles if s.name in ("bf16 sum", "fp16 sum")]
    if op.stepwise is not None:
        found.append(Style("stepwise", "honest", op.stepwise))
    return found


def judged(op: Op, args: tuple[Tensor, ...]) -> tuple[Tensor, Rule]:
    """The oracle and the rule, as the evaluation has them."""
    wide_args = tuple(a.double() for a in args)
    mode = Fp64Mode(args[0].dtype)
    with mode:
        oracle = op.reference(*wide_args)
    noise = 0.0
    if mode.spreads or (mode.cancels and oracle.numel() <= FEW):
        with Fp64Mode(args[0].dtype, noise=SUM_NOISE * 2.0**-24):
            noise = float((op.reference(*wide_args) - oracle).square().mean().sqrt())
    return oracle, Rule(mode.summed(oracle), noise=noise)


def beside_others(beside: str, *versions: Tensor) -> tuple[Tensor, ...]:
    """Versions of an output with as many elements in front that are right in all, and large: ``fill`` ones that share
    one value as a mask's do, or ``spread`` ones."""
    if not beside:
        return versions
    dtype, count = versions[0].dtype, versions[0].numel()
    size = 3e4 if dtype == torch.float16 else 1e9
    front = torch.full((count,), -size) if beside == "fill" else size * (0.5 + torch.rand(count))
    front = front.to(dtype)
    return tuple(torch.cat([front.to(t.dtype), t.flatten()]).reshape(2, -1) for t in versions)


def measure(
    op: Op, dtype: torch.dtype, k: int, elements: int, device: str, seed: int, beside: str = ""
) -> Iterator[Row]:
    rows = 1 if op.name == "sum of all" else max(1, min(4096, elements // k))
    generator = torch.Generator().manual_seed(1000 * seed + k % 997)
    torch.manual_seed(seed)
    styles = list(op.styles) if dtype == torch.float32 else half_styles(op, dtype)
    for family in FAMILIES:
        args = op.make(family, rows, k, dtype, generator)
        reference = op.reference(*(a.to(device) for a in args)).cpu()
        oracle, rule = judged(op, args)
        for style in styles:
            if style.name == "fused" and k > 16384:
                continue
            found = style.run(*args).to(reference.dtype)
            versions = beside_others(beside, found, reference, oracle)
            verdict = judge_output("out", *versions, rule)
            ratio = verdict.error_ratio if verdict.error_ratio is None else float(f"{verdict.error_ratio:.4g}")
            kinds = tuple(m.kind for m in verdict.mismatches)
            name = str(dtype).removeprefix("torch.")
            yield Row(op.name, name, k, rows, family, style.name, style.kind, ratio, verdict.bound, kinds, device, seed)


def measured(args: argparse.Namespace) -> Iterator[Row]:
    for name in args.ops.split(",") if args.ops else OPS:
        op = OPS[name]
        for dtype in (getattr(torch, name) for name in args.dtypes.split(",")):
            for k in LENGTHS if dtype == torch.float32 or not op.reduces else HALF_LENGTHS:
                if not op.smallest <= k <= op.largest:
                    continue
                began = time.perf_counter()
                for seed in range(op.seeds * args.seeds):
                    yield from measure(op, dtype, k, args.elements, args.device, seed, args.beside)
                print(f"{name} {dtype} {k}: {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)


def packed(rows: list[Row]) -> list[str]:
    """One JSON line per style, length and seed: by family the ratio and the kinds of mismatches."""
    groups: dict[tuple[object, ...], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.op, row.dtype, row.k, row.style, row.seed].append(row)
    lines = []
    for group in groups.values():
        shared = {k: v for k, v in asdict(group[0]).items() if k not in ("family", "ratio", "refused")}
        lines.append(json.dumps(shared | {"by_family": {r.family: [r.ratio, *r.refused] for r in group}}))
    return lines


def unpacked(lines: list[str]) -> Iterator[Row]:
    for line in lines:
        shared = json.loads(line)
        for family, (ratio, *refused) in shared.pop("by_family").items():
            yield Row(**shared, family=family, ratio=ratio, refused=tuple(refused))


# -- the table -------------------------------------------------------------------------------------------------------


def table(rows: list[Row]) -> str:
    """Markdown: per operator, type and length the worst honest and the best hidden wrong style."""
    groups: dict[tuple[str, str, int], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.op, row.dtype, row.k].append(row)
    lines = [
        "| operator | type | K | bound | honest, worst | serial, worst | wrong, best hidden | honest refused "
        "| wrong passed |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (op, dtype, k), group in groups.items():
        cells = (op, dtype, str(k), _bound(group), _worst(group, "honest"), _worst(group, "serial"), _hidden(group))
        lines.append(f"| {' | '.join(cells)} | {_refused(group)} | {_passed(group)} |")
    return "\n".join(lines)


def brief(rows: list[Row]) -> str:
    """Markdown, one line per operator and type; a cell is honest / serial / best hidden wrong < bound."""
    spans = {"K <= 4096": (0, 4096), "16384": (4097, 16384), "65536": (16385, 65536), "more": (65537, 1 << 30)}
    lines = [
        "| operator | type | " + " | ".join(spans) + " | honest refused | serial refused | wrong passed, K <= 4096 |",
        "|---" * (len(spans) + 5) + "|",
    ]
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.op, row.dtype].append(row)
    for (op, dtype), group in groups.items():
        cells = [_cell([row for row in group if low <= row.k <= high]) for low, high in spans.values()]
        counts = [_count([row for row in group if row.kind == kind]) for kind in ("honest", "serial")]
        short = [row for row in group if row.k <= 4096]
        lines.append(f"| {op} | {dtype} | {' | '.join(cells)} | {' | '.join(counts)} | {_passed(short)} |")
    return "\n".join(lines)


def _cell(group: list[Row]) -> str:
    if not group:
        return ""
    worst = [max((r.ratio or 0.0 for r in group if r.kind == kind), default=None) for kind in ("honest", "serial")]
    shown = ["–" if value is None else f"{value:.2g}" for value in worst]
    return f"{shown[0]} / {shown[1]} / {_hidden(group).split(' ')[0] or '–'}, bound {_bound(group)}"


def _count(rows: list[Row]) -> str:
    return f"{sum(bool(row.refused) for row in rows)} of {len(rows)}" if rows else "–"


def _bound(group: list[Row]) -> str:
    return f"{max(row.bound or 0.0 for row in group):.3g}"


def _worst(group: list[Row], kind: str) -> str:
    found = [row for row in group if row.kind == kind and row.ratio is not None]
    if not found:
        return ""
    worst = max(found, key=lambda row: row.ratio or 0.0)
    return f"{worst.ratio:.3g} ({worst.style}, {worst.family})" if kind == "honest" else f"{worst.ratio:.3g}"


def _by_style(group: list[Row]) -> dict[tuple[str, int, int], list[Row]]:
    """Wrong styles by name, length and seed: of each, all six families."""
    found: dict[tuple[str, int, int], list[Row]] = defaultdict(list)
    for row in group:
        if row.kind == "wrong":
            found[row.style, row.k, row.seed].append(row)
    return found


def _hidden(group: list[Row]) -> str:
    """The wrong style whose largest ratio over the families is the smallest."""
    largest = {
        key: max((math.inf if "nonfinite" in row.refused else row.ratio or 0.0) for row in rows)
        for key, rows in _by_style(group).items()
    }
    if not largest:
        return ""
    style = min(largest, key=lambda key: largest[key])
    return f"{largest[style]:.3g} ({style[0]})"


def _refused(group: list[Row]) -> str:
    rows = [row for row in group if row.kind in ("honest", "serial")]
    refused = [row for row in rows if row.refused]
    names = sorted({f"{row.style}: {row.refused[0]} on {row.family}" for row in refused})
    return f"{len(refused)} of {len(rows)}" + (f" ({'; '.join(names[:4])})" if names else "")


def _passed(group: list[Row]) -> str:
    styles = _by_style(group)
    passed = [key for key, rows in styles.items() if not any(row.refused for row in rows)]
    names = sorted({style for style, _, _ in passed})
    return f"{len(passed)} of {len(styles)}" + (f" ({', '.join(names)})" if names else "")


def main() -> None:
    """Measure, print the table, save the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--ops", default="", help="comma-separated; default all")
    parser.add_argument("--elements", type=int, default=1 << 18, help="of an input, where K leaves the choice")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--dtypes", default="float32,bfloat16,float16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--beside", choices=("", "fill", "spread"), default="", help="large right values, too")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--table", type=Path, help="print the table of a saved run")
    parser.add_argument("--brief", action="store_true", help="one line per operator and type")
    args = parser.parse_args()
    if args.table:
        rows = list(unpacked(args.table.read_text(encoding="utf-8").splitlines()))
    else:
        torch.set_num_threads(args.threads)
        rows = list(measured(args))
        if args.save:
            args.save.write_text("\n".join(packed(rows)) + "\n", encoding="utf-8")
    print(brief(rows) if args.brief else table(rows))
    print(f"{len(rows)} rows, reference on {', '.join(sorted({row.device for row in rows}))}")


if __name__ == "__main__":
    main()
