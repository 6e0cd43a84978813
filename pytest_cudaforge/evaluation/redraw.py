"""New values that keep a target's meaning: redrawn inputs and re-randomised weights. In the oracle's process only.

Two draws of an input show its structure. A generic dense float input is redrawn from several families, because one
distribution is never enough (a one-pass variance shows only on shifted inputs, a softmax without max only on large
ones). A structured one (mask, triangle, probabilities, sorted values, integers) changes only its seed. Values in [0, 1]
that show no other structure count as generic where the reference takes others (see the subject).
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

__all__ = ["FAMILIES", "Structure", "redraw", "rerandomise", "structure_of"]

#: generic: any finite values are meaningful · unit: keep [0, 1] · drawn: only the user's function may draw it
Structure = Literal["generic", "unit", "drawn"]

FAMILIES = ("normal", "uniform", "shifted", "large", "sparse", "integer")

_SAMPLE = 1 << 21
_LOW_PRECISION = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


def structure_of(first: Tensor, second: Tensor) -> Structure:
    """What two independent draws of one input leaf have in common. Integers and booleans are always "drawn"."""
    if not first.is_floating_point() or first.numel() == 0:
        return "drawn"
    a, b = _sample(first), _sample(second)
    if torch.equal(a, b) or not bool(a.isfinite().all()):
        return "drawn"
    if float((a == 0).float().mean()) > 1e-3 or torch.equal(a, a.round()):
        return "drawn"
    low, high = float(torch.minimum(a.min(), b.min())), float(torch.maximum(a.max(), b.max()))
    if low >= 0 or high <= 0:
        return "unit" if _is_unit(first, low, high) else "drawn"
    return "drawn" if _ordered(first) or _symmetric(first) else "generic"


def _sample(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1) if tensor.is_contiguous() else tensor.detach().flatten()
    if flat.numel() > 2 * _SAMPLE:
        flat = torch.cat([flat[:_SAMPLE], flat[-_SAMPLE:]])
    return flat.double()


def _is_unit(tensor: Tensor, low: float, high: float) -> bool:
    if low < 0 or high > 1 or tensor.dim() == 0:
        return False
    sums = tensor[tuple([slice(0, 64)] * (tensor.dim() - 1))].double().sum(dim=-1)
    rows_of_probabilities = tensor.shape[-1] > 1 and bool(((sums - 1).abs() < 1e-2).all())
    return not rows_of_probabilities and not _ordered(tensor)


def _ordered(tensor: Tensor) -> bool:
    if tensor.dim() == 0 or tensor.shape[-1] < 8:
        return False
    rows = tensor.reshape(-1, tensor.shape[-1])[:64].double()
    steps = rows.diff(dim=-1)
    return bool((steps >= 0).all()) or bool((steps <= 0).all())


def _symmetric(tensor: Tensor) -> bool:
    if tensor.dim() < 2 or tensor.shape[-1] != tensor.shape[-2] or tensor.shape[-1] < 2:
        return False
    matrix = tensor.reshape(-1, *tensor.shape[-2:])[0]
    return torch.equal(matrix, matrix.T)


def redraw(family: str, drawn: Tensor, structure: Structure, generator: torch.Generator) -> Tensor:
    """``drawn`` with new values of ``family``, of the same shape, dtype, device and memory layout.

    The scale is the draw's own standard deviation. ``large`` and ``shifted`` are smaller for half types, whose range
    and precision are.
    """
    if structure == "drawn":
        return drawn
    spread = _SPREAD[drawn.dtype in _LOW_PRECISION]
    values = torch.empty(drawn.shape, dtype=torch.float32, device=drawn.device)
    if structure == "unit":
        values.uniform_(generator=generator)
        values = {"shifted": lambda v: 0.9 + 0.1 * v, "sparse": lambda v: v**4}.get(family, lambda v: v)(values)
    else:
        values = _generic(family, values, float(_sample(drawn).std()) or 1.0, drawn.dtype, spread, generator)
    result = torch.empty_strided(drawn.shape, drawn.stride(), dtype=drawn.dtype, device=drawn.device)
    return result.copy_(values)


#: (factor of "large", mean of "shifted"), in standard deviations, for full and for half precision
_SPREAD = {False: (100.0, 300.0), True: (8.0, 8.0)}


def _generic(
    family: str,
    values: Tensor,
    scale: float,
    dtype: torch.dtype,
    spread: tuple[float, float],
    generator: torch.Generator,
) -> Tensor:
    if family == "uniform":
        return values.uniform_(-1.0, 1.0, generator=generator).mul_(math.sqrt(3.0) * scale)
    if family == "integer":
        # The products of two such numbers need more bits than TF32, half or bfloat16 keep.
        top = 2047 if dtype == torch.float16 else 255 if dtype in _LOW_PRECISION else 4095
        step = 2.0 ** round(math.log2(2.0 * scale / top))
        return values.random_(-top, top + 1, generator=generator).mul_(step)
    values.normal_(generator=generator).mul_(scale)
    if family == "large":
        return values.mul_(spread[0])
    if family == "shifted":
        return values.add_(spread[1] * scale)
    if family == "sparse":
        # Nine in ten are small but not equal: equal addends make an honest serial sum drift one way.
        small = torch.empty_like(values).uniform_(generator=generator) > 0.1
        return values.mul_(torch.where(small, 0.1, 1.0))
    return values


def rerandomise(module: torch.nn.Module, seed: int) -> None:
    """Draw new floating parameters in place: the old ones' scale (fan-in for constants), ties and exact zeros kept,
    what was positive stays positive. Running statistics get plausible values; other buffers stay as constructed."""
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    generator = torch.Generator(device=device).manual_seed(seed)
    for parameter in module.parameters():
        if parameter.is_floating_point() and parameter.numel():
            _rerandomise_parameter(parameter, generator)
    for name, buffer in module.named_buffers():
        if name.endswith("running_mean"):
            buffer.normal_(generator=generator).mul_(0.5)
        elif name.endswith("running_var"):
            buffer.uniform_(0.5, 1.5, generator=generator)


def _rerandomise_parameter(parameter: Tensor, generator: torch.Generator) -> None:
    old = parameter.detach().float()
    low, spread = float(old.min()), float(old.std()) if old.numel() > 1 else 0.0
    noise = torch.empty_like(old).normal_(generator=generator)
    if low > 0:
        new = old.mean() * torch.exp(0.25 * noise)
    elif spread > 0 and math.isfinite(spread):
        new = old.mean() + spread * noise
    else:
        fan_in = max(1, old.numel() // max(1, old.shape[0])) if old.dim() > 1 else 100
        new = float(old.mean()) + noise / math.sqrt(fan_in)
    zeros = old == 0
    if bool(zeros.any()) and not bool(zeros.all()):
        new = new.masked_fill(zeros, 0.0)
    with torch.no_grad():
        parameter.copy_(new)
