"""New weights that keep what the old ones mean. In the oracle's process only."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from pytest_cudaforge.evaluation.exchanges import EXCHANGES, Moved, exchanged, moved_values

__all__ = [
    "EMPTYING",
    "GAPS",
    "HABITS",
    "biases_of",
    "device_of",
    "exchange_weights",
    "exchangeable_weights",
    "move_weights",
    "rerandomise",
    "takes_on",
]

#: Between which logarithms running variances are drawn: a layer behind few or large activations has such.
_LOG_VARIANCES = (-2.0, 2.0)
#: Of how many seeds weights are as trained ones: a share of them is so many times as large as the others; and a gain
#: that is constant and smaller than this is drawn around that.
_TRAINED, _OUTLIERS, _OUTLYING, _FEWEST_WEIGHTS = 0.5, 1 / 1024, 16.0, 256
_SMALL_GAIN, _GROWN_GAIN, _FEWEST_CHANNELS, _FEWEST_OUTLIERS = 0.01, 0.3, 4, 32

#: What training may do to weights, where the reference bears it. turned: some gains of many are negative, which nothing
#: keeps from it (a maximum taken before the gain is then a minimum); muted: some of a vector are zero, as the last gain
#: of a residual branch is at first (what was multiplied by them cannot be told from the answer); pruned: some rows are
#: zero, which show a small constant that keeps a division finite; thinned: some elements are zero, wherever they lie;
#: faded: some of a vector are next to nothing, as regularised gains come to be (who divides by them what was rounded
#: behind them has lost its digits); strayed: some of a vector that differ lie far beyond the others, as logits of
#: decays and gates come to (a sigmoid is nearly one there, and what was said to die away lasts). And of the last ones,
#: of which no weights have more than one: blank, the first rows are zero, or the last ones, as of an adapter that is
#: trained for some of what it adapts; delayed, rows are zero for a while, from their first element on, within, or up to
#: the last one, as responses are (who looks at the first few, or stops where nothing more seems to come, leaves the
#: rest out); framed, small filters in large ones, as reparametrised ones are. And leaning, filters are nearly a column
#: times a row, as those of trained edge detectors are, but for as little as rounding leaves alone.
HABITS = ("turned", "muted", "pruned", "thinned", "faded", "strayed", "blank", "delayed", "framed", "leaning")
GAPS = HABITS[-4:-1]
_LEANING = (1e-5, 1e-2)
#: What may leave a row, or a score of a row's, with nothing but zeros.
EMPTYING = ("pruned", *GAPS)
_ONE_OF = HABITS[-4:]
#: The share of weights that have one of those, that of rows, and how much of a row, or of all of them, is zero.
_GAPPED, _GAPPED_ROWS, _GAP, _FEWEST_IN_A_ROW = 2 / 3, 1 / 3, (1 / 16, 1 / 2), 8
_TURNED, _MUTED, _PRUNED, _THINNED, _FEWEST_ROWS = 1 / 8, 1 / 16, 1 / 32, 1 / 8, 8
_FADED, _FADING = 1 / 16, (1e-6, 1e-3)
#: In standard deviations of the vector, to either side.
_STRAYED, _STRAYING = 1 / 4, (4.0, 8.0)


def rerandomise(
    module: torch.nn.Module, seed: int, habits: Collection[str] = (), *, trained: bool | None = None
) -> None:
    """Draw new floating parameters in place: the old ones' scale (fan-in for constants), ties and exact zeros kept,
    what was positive stays positive. Running statistics get plausible values; other buffers stay as constructed.

    Of some seeds (of all or none, as ``trained`` says) a few weights are far larger than the others, as trained ones
    are (what stores a row's weights by its largest one in few bits errs there), small gains have grown, as those of
    residual branches do, and weights have ``habits``, of :data:`HABITS`.
    """
    device = device_of(module)
    generator = torch.Generator(device=device).manual_seed(seed)
    drawn = bool(torch.rand((), generator=generator, device=device) < _TRAINED)
    trained = drawn if trained is None else trained
    for parameter in module.parameters():
        if parameter.is_floating_point() and parameter.numel():
            _rerandomise_parameter(parameter, generator, trained)
    for name, buffer in module.named_buffers():
        if name.endswith("running_mean"):
            buffer.normal_(generator=generator).mul_(0.5)
        elif name.endswith("running_var"):
            buffer.uniform_(*_LOG_VARIANCES, generator=generator).exp_()
            if trained and buffer.numel() >= _FEWEST_CHANNELS:  # a channel that is always off
                buffer[torch.randint(buffer.numel(), (), generator=generator, device=buffer.device)] = 0.0
    # Before any is worn: one may leave what another one does not take on.
    parameters: list[Tensor] = [*module.parameters()] if trained else []
    worn = [
        (habit, weights) for habit in HABITS if habit in habits for weights in parameters if _takes_on(habit, weights)
    ]
    for habit, weights in _with_few_gaps(worn, generator) if len(habits) > 1 else worn:
        _wear(habit, weights, generator)


def _with_few_gaps(worn: list[tuple[str, Tensor]], generator: torch.Generator) -> list[tuple[str, Tensor]]:
    """One kind of gaps for some of the weights, and none for the others: little can be told from what is zero."""
    kinds: dict[int, list[str]] = {}
    for habit, parameter in worn:
        if habit in _ONE_OF:
            kinds.setdefault(id(parameter), []).append(habit)
    chosen = {}
    for key, habits in kinds.items():
        chance = float(torch.rand((), generator=generator, device=generator.device)) / _GAPPED
        chosen[key] = habits[int(chance * len(habits))] if chance < 1 else ""
    return [(habit, p) for habit, p in worn if habit not in _ONE_OF or chosen[id(p)] == habit]


def device_of(module: torch.nn.Module) -> torch.device:
    """Where its weights lie: its statistics, where it has nothing but those."""
    return next((tensor.device for tensor in (*module.parameters(), *module.buffers())), torch.device("cpu"))


def takes_on(module: torch.nn.Module, habit: str) -> bool:
    """Has it weights that would be others with this habit of :data:`HABITS`?"""
    return any(_takes_on(habit, parameter) for parameter in module.parameters())


def _takes_on(habit: str, weights: Tensor) -> bool:
    """A single gain may be an exponent or a temperature, and few rows are no rows of classes or channels."""
    if not weights.is_floating_point():
        return False
    if habit == "turned":
        return weights.numel() >= _FEWEST_CHANNELS and bool((weights > 0).all())
    if habit in ("muted", "faded"):
        return weights.dim() == 1 and len(weights) >= _FEWEST_CHANNELS and bool((weights != 0).all())
    if habit == "strayed":  # what is positive may be a rate, of which a little more has no end
        return weights.dim() == 1 and len(weights) > 1 and bool((weights <= 0).any()) and _spread(weights) > 0
    if habit == "thinned":
        return weights.dim() > 1 and weights.numel() >= _FEWEST_WEIGHTS
    if habit == "delayed":
        return weights.dim() > 1 and weights.numel() >= _FEWEST_IN_A_ROW * max(1, weights.shape[0])
    if habit == "blank" and weights.dim() == 1:
        return len(weights) >= _FEWEST_OUTLIERS and bool((weights != 0).all())
    if habit == "leaning":
        return weights.dim() > 3 and min(weights.shape[-2:]) > 1
    if habit == "framed":
        return any(size > 2 for size in weights.shape[2:])
    return weights.dim() > 1 and weights.shape[0] >= _FEWEST_ROWS and weights.numel() >= _FEWEST_WEIGHTS


def _wear(habit: str, weights: Tensor, generator: torch.Generator) -> None:
    """Some numbers of ``weights`` become negative, small or zero, or some rows zero: at least one."""
    with torch.no_grad():
        if habit == "turned":
            turned = _some(weights.numel(), _TURNED, generator, weights.device).reshape(weights.shape)
            weights.copy_(torch.where(turned, -weights, weights))
        elif habit == "faded":
            faded = _some(weights.numel(), _FADED, generator, weights.device)
            size = torch.empty_like(weights).uniform_(*map(math.log, _FADING), generator=generator).exp_()
            weights.copy_(torch.where(faded, weights * size, weights))
        elif habit == "strayed":
            strayed = _some(weights.numel(), _STRAYED, generator, weights.device) & (weights != 0)
            far = torch.empty_like(weights).uniform_(*_STRAYING, generator=generator) * _spread(weights)
            up = torch.rand(weights.shape, generator=generator, device=weights.device) < 0.5
            weights.copy_(torch.where(strayed, weights.mean() + torch.where(up, far, -far), weights))
        elif habit == "delayed":
            weights.masked_fill_(_in_gaps(weights.flatten(1), generator).view(weights.shape), 0.0)
        elif habit == "framed":
            weights.masked_fill_(_in_frames(weights, generator), 0.0)
        elif habit == "leaning":
            some = _some(weights.shape[0], _GAPPED_ROWS, generator, weights.device)
            weights.copy_(
                torch.where(some.reshape(-1, *(1,) * (weights.dim() - 1)), _leant(weights, generator), weights)
            )
        elif habit == "blank":
            rows = _gap_lengths(1, len(weights), generator)
            (weights[: int(rows)] if _is_chosen(1, 2 / 3, generator) else weights[-int(rows) :]).zero_()
        elif habit in ("muted", "thinned"):
            share = _MUTED if habit == "muted" else _THINNED
            weights[_some(weights.numel(), share, generator, weights.device).reshape(weights.shape)] = 0.0
        else:
            weights[_some(weights.shape[0], _PRUNED, generator, weights.device)] = 0.0


def _gap_lengths(count: int, size: int, generator: torch.Generator) -> Tensor:
    """So many lengths of gaps in what has ``size`` elements, small ones as often as large ones."""
    least, most = (math.log(share) for share in _GAP)
    chance = torch.rand(count, generator=generator, device=generator.device)
    return ((least + chance * (most - least)).exp() * size).long().clamp_min(1)


def _is_chosen(count: int, share: float, generator: torch.Generator) -> Tensor:
    return torch.rand(count, generator=generator, device=generator.device) < share


def _in_gaps(rows: Tensor, generator: torch.Generator) -> Tensor:
    """True in some rows where they are zero for a while: at their start, within, or at their end."""
    count, size = rows.shape
    lengths = _gap_lengths(count, size, generator)
    room = torch.rand(count, generator=generator, device=rows.device)
    begins = (torch.where(room < 1 / 3, 0.0, torch.where(room < 2 / 3, 3 * room - 1, 1.0)) * (size - lengths)).long()
    places = torch.arange(size, device=rows.device)
    within = (places >= begins[:, None]) & (places < (begins + lengths)[:, None])
    return within & _some(count, _GAPPED_ROWS, generator, rows.device)[:, None]


def _leant(filters: Tensor, generator: torch.Generator) -> Tensor:
    """Those of one row's, and one column's, making, and a little of their own."""
    column, row = filters[..., :1], filters[..., :1, :]
    shape = (*filters.shape[:-2], 1, 1)
    size = torch.empty(shape, device=filters.device).uniform_(*map(math.log, _LEANING), generator=generator).exp()
    product = column * row * (filters.std() / (column * row).std().clamp_min(1e-30))
    return product + filters * size


def _in_frames(weights: Tensor, generator: torch.Generator) -> Tensor:
    """True along the sides of some filters, the dimensions behind the second one."""
    inside = torch.ones((), dtype=torch.bool, device=weights.device)
    for dim, size in list(enumerate(weights.shape))[2:]:
        chance = float(torch.rand((), generator=generator, device=weights.device))
        width = 1 + int(chance * ((size - 1) // 2)) if size > 2 else 0
        places = torch.arange(size, device=weights.device)
        kept = (places >= width) & (places < size - width)
        inside = inside & kept.reshape(-1, *(1,) * (weights.dim() - 1 - dim))
    some = _some(weights.shape[0], _GAPPED_ROWS, generator, weights.device)
    return ~inside & some.reshape(-1, *(1,) * (weights.dim() - 1))


def _spread(weights: Tensor) -> float:
    return float(weights.detach().float().std())


def _some(count: int, share: float, generator: torch.Generator, device: torch.device) -> Tensor:
    """A mask of ``count`` places, about ``share`` of them chosen, and at least one."""
    chosen = torch.rand(count, generator=generator, device=device) < share
    chosen[torch.randint(count, (), generator=generator, device=device)] = True
    return chosen


def _rerandomise_parameter(parameter: Tensor, generator: torch.Generator, trained: bool) -> None:
    old = parameter.detach().float()
    zeros = old == 0
    # What lies beside exact zeros, which stay, says by itself what it is like: a diagonal is positive, or it is not.
    told = old[~zeros] if bool(zeros.any()) and not bool(zeros.all()) else old
    low, spread = float(told.min()), float(told.std()) if told.numel() > 1 else 0.0
    noise = torch.empty_like(old).normal_(generator=generator)
    if low > 0:
        grown = trained and spread == 0 and low < _SMALL_GAIN
        new = (_GROWN_GAIN if grown else told.mean()) * torch.exp(0.25 * noise)
        if trained and old.numel() >= _FEWEST_OUTLIERS:
            new = torch.where(
                _some(old.numel(), _OUTLIERS, generator, old.device).reshape(old.shape), _OUTLYING * new, new
            )
    elif spread > 0 and math.isfinite(spread):
        if trained and old.dim() > 1 and old.numel() >= _FEWEST_WEIGHTS:
            chance = torch.empty_like(old).uniform_(generator=generator)
            noise = torch.where(chance < _OUTLIERS, _OUTLYING * noise, noise)
        new = told.mean() + spread * noise
    else:
        fan_in = max(1, old.numel() // max(1, old.shape[0])) if old.dim() > 1 else 100
        new = float(told.mean()) + noise / math.sqrt(fan_in)
    if told is not old:
        new = new.masked_fill(zeros, 0.0)
    with torch.no_grad():
        parameter.copy_(new)


def exchange_weights(
    module: torch.nn.Module,
    seed: int,
    kept: Collection[str] = (),
    alone: str = "",
    constructed: Mapping[str, Tensor] | None = None,
) -> None:
    """A few elements of each floating parameter change places, or two of the one at ``alone``: of those that
    :func:`exchangeable_weights` names."""
    generator = torch.Generator().manual_seed(seed)
    for path, parameter in exchangeable_weights(module, kept, constructed).items():
        if alone in ("", path):
            with torch.no_grad():
                parameter.copy_(exchanged(parameter.detach(), generator, 1 if alone else EXCHANGES))


def move_weights(
    module: torch.nn.Module, seed: int, how: Moved, kept: Collection[str] = (), habits: Collection[str] = ()
) -> None:
    """Each floating parameter moves by a little, or a few elements of it are turned, but for those at the paths
    ``kept``; gains, where ``habits`` say that the reference bears it."""
    generator = torch.Generator().manual_seed(seed)
    for path, parameter in module.named_parameters():
        if path not in kept:
            either = "turned" in habits and _takes_on("turned", parameter)
            with torch.no_grad():
                parameter.copy_(moved_values(parameter.detach(), how, generator, either=either))


def biases_of(module: torch.nn.Module) -> tuple[str, ...]:
    """Paths of what it adds, as it is constructed: vectors that are not positive throughout, as gains are, and running
    means."""
    vectors = [(path, p) for path, p in module.named_parameters() if p.is_floating_point() and _is_vector(p)]
    means = [(path, mean) for path, mean in module.named_buffers() if path.endswith("running_mean")]
    return tuple(path for path, vector in (*vectors, *means) if bool((vector <= 0).any()))


def _is_vector(tensor: Tensor) -> bool:
    """Also one that lies along one of several dimensions."""
    return tensor.numel() == max(tensor.shape, default=0)


def exchangeable_weights(
    module: torch.nn.Module, kept: Collection[str], constructed: Mapping[str, Tensor] | None = None
) -> dict[str, torch.nn.Parameter]:
    """The floating parameters, but for those at the paths ``kept``, and for those with exact zeros beside other values,
    as they were ``constructed``: where these lie may mean something."""
    found = {path: p for path, p in module.named_parameters() if path not in kept and p.is_floating_point()}
    first = {path: (constructed or {}).get(path, p).detach().float() for path, p in found.items()}
    return {path: p for path, p in found.items() if int((first[path] == 0).sum()) in (0, p.numel())}
