"""The oracle's judgement of references as people write them: for each family an honest other way passes, a wrong one
fails. Candidates are torch functions here, whose outputs are put where a worker would have left them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from judged_targets import find
from torch import Tensor
from torch.nn import functional as F

from pytest_cudaforge.evaluation import bench, expectation, usual
from pytest_cudaforge.evaluation.bench import Bench
from pytest_cudaforge.evaluation.frames import Case
from pytest_cudaforge.evaluation.subject import Subject
from pytest_cudaforge.runtime.signature import flatten_output, unflatten_call

TARGETS = """
import torch
from torch import nn
from torch.nn import functional as F
from pytest_cudaforge import forge_target


@forge_target(inputs=lambda: [torch.randn(32, 64), torch.randn(48, 64)])
def autocast(x, w):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.linear(x, w).float()


@forge_target(inputs=lambda: [torch.randn(2048, 256), torch.randn(2048, 256)])
def cosine_loss(p, t):
    return torch.mean(1 - F.cosine_similarity(p, t, dim=1))


@forge_target(inputs=lambda: [torch.randn(48, 64), torch.randn(64, 80), torch.randn(48, 80)])
def shut_gates(x, w, c):
    return torch.sigmoid(1e4 * (x @ w)) * c


@forge_target(inputs=lambda: [torch.randn(32, 64)])
def through_half(x):
    return x.half().float() * 2 + 1


@forge_target(inputs=lambda: [torch.randn(32, 64), torch.randn(64, 48)])
def product_in_bf16(x, w):
    return (x.to(torch.bfloat16) @ w.to(torch.bfloat16)).to(x.dtype)


@forge_target(inputs=lambda: [torch.randn(32, 64)])
def levels(x):
    return (x * 4).floor().long()


@forge_target(inputs=lambda: [torch.randn(32, 64), torch.randn(64, 8)])
def looked_up(x, table):
    return table[x.argmax(-1)] * x.amax(-1, keepdim=True)


@forge_target(inputs=lambda: [torch.randn(32, 64)])
def surprise(x):
    p = torch.softmax(x, -1) * (x > 0)
    return torch.log(p + torch.finfo(x.dtype).eps)


@forge_target(inputs=lambda: [torch.randn(32, 64)])
def masked_scores(x):
    return x.masked_fill(x > 1, torch.finfo(x.dtype).min)


@forge_target(inputs=lambda: [torch.randn(32, 64)])
def bits(x):
    return (x.view(torch.int32) & ~0xFFF).view(torch.float32) * 3


@forge_target(inputs=lambda: [torch.randn(16, 64)])
def spectrum(x):
    return torch.fft.rfft(x)


@forge_target(inputs=lambda: [torch.randn(16, 64), torch.randn(16, 64)])
def circular(x, y):
    return torch.fft.irfft(torch.fft.rfft(x) * torch.fft.rfft(y), n=64)


@forge_target(inputs=lambda: [torch.randn(2, 4, 32, 16) for _ in range(3)])
def attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@forge_target(inputs=lambda: [torch.randn(4, 3, 16, 16)])
class Convolved(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)

    def forward(self, x):
        return F.relu(self.bn(self.conv(x)))


@forge_target(inputs=lambda: [torch.randn(4, 6, 8)])
class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(8, 16, batch_first=True)

    def forward(self, x):
        out, (h, c) = self.rnn(x)
        return {"out": out, "state": [h, c]}


@forge_target(inputs=lambda: [torch.randn(8, 300), torch.rand(8, 300) > 0.5])
def masked_sums(x, mask):
    return torch.where(mask, x, torch.zeros_like(x)).cumsum(-1)


@forge_target(inputs=lambda: [torch.randint(0, 9, (8, 64)).float()], index_outputs=["out.1"])
def ranked(x):
    return torch.topk(x, 5, dim=-1)


@forge_target(inputs=lambda: [torch.randint(0, 9, (8, 64)).float()], index_outputs=["out"])
def order(x):
    return torch.sort(x, -1).indices


@forge_target(inputs=lambda: [torch.randn(16, 64)])
def moved(x):
    x.add_(1)
    return x * 2


@forge_target(inputs=lambda: [torch.randn(64, 32)], nondeterministic=True)
def noisy(x):
    return x + 1e-3 * torch.randn_like(x)


@forge_target(inputs=lambda: [torch.randn(64, 32)], nondeterministic=True)
def noisy_count(x):
    return (x * 100 + torch.randint(0, 2, x.shape)).long()


@forge_target(inputs=lambda: [torch.randn(4096)])
def total(x):
    return x.sum()


@forge_target(inputs=lambda: [torch.randn(1 << 18)])
def long_total(x):
    return x.mean()


@forge_target(inputs=lambda: [torch.randn(64, 4096)])
def with_loss(x):
    return F.gelu(x), (x * x).mean()


@forge_target(inputs=lambda: [torch.randn(6, 8)])
def nested(x):
    return {"a": [x > 0, (x * 8).to(torch.int32)], "b": (x[:0], x.sum(), torch.complex(x, -x))}


@forge_target(inputs=lambda: [torch.randn(64, 64)])
def eighth(x):
    return x.to(torch.float8_e4m3fn)


@forge_target(inputs=lambda: [torch.randn(32, 64)])
def single_loss(x):
    if x.dtype != torch.float32:
        raise TypeError("float32 only")
    return x.square().mean()


@forge_target(inputs=lambda: [torch.rand(128, 4096) * torch.rand(()), torch.rand(128, 4096), torch.rand(128, 4096)])
def triplet(a, p, n):
    return F.triplet_margin_loss(a, p, n)


@forge_target(inputs=lambda: [torch.randn(160, 12).double(), torch.randn(96, 12).double()])
def matern(x, z):
    scale = torch.linspace(-0.7, 0.7, 12).double().exp()
    r = 3**0.5 * torch.cdist(x * scale, z * scale, compute_mode="donot_use_mm_for_euclid_dist")
    return (1 + r) * (-r).exp()
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("judging")
    (folder / "layers.py").write_text(TARGETS)
    (folder / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    return folder


def _layout(outputs: dict[str, Any], inputs: dict[str, Any]) -> dict[str, Any]:
    regions, specs, offset = [], {}, 0
    named = [(f"f0/out/{p}", v) for p, v in outputs.items()] + [(f"f0/input/{p}", v) for p, v in inputs.items()]
    for name, value in named:
        if isinstance(value, Tensor):
            specs[name] = _spec(value)
            regions.append([name, offset, value.nbytes])
            offset += -(-max(1, value.nbytes) // 64) * 64
    return {"nbytes": offset, "regions": regions, "redzones": [], "frames": 1, "specs": specs}


def _spec(tensor: Tensor) -> list[Any]:
    tensor = tensor.contiguous()
    return [list(tensor.shape), str(tensor.dtype).removeprefix("torch."), list(tensor.stride())]


class Judged:
    """One target's bench, with a place for every output. ``check`` gives the kinds of mismatches of a candidate."""

    def __init__(self, root: Path, name: str) -> None:
        self.subject = Subject(find(root, f"::{name}"), "cpu")
        inputs, _, output = self.subject.trial_run("default")
        layout = _layout(flatten_output(output)[0], inputs)
        self.bench = Bench(self.subject, "default", "", layout)
        self.regions = layout["specs"]

    def check(self, candidate: Callable[..., Any], family: str = "drawn", seed: int = 5) -> list[str]:
        self.bench.fill(0, Case(seed, family, None), 0)
        frame = self.bench.frames[0]
        own = {p: v.clone() if isinstance(v, Tensor) else v for p, v in frame.inputs.items()}
        args, kwargs = unflatten_call(frame.tree, own)
        module = [] if self.subject.module is None else [self.subject.module]
        with torch.no_grad():
            leaves, _ = flatten_output(candidate(*module, *args, **kwargs))
        outputs: dict[str, Any] = {}
        for path, value in leaves.items():
            self.bench._write(f"f0/out/{path}", value)
            outputs[path] = [f"f0/out/{path}", _spec(value), 0]
        for path, value in own.items():
            self.bench._write(f"f0/input/{path}", value)
        self.checked = self.bench.check(0, outputs)
        return [mismatch.kind for mismatch in self.checked["mismatches"]]


def _tail_left_out(x: Tensor, w: Tensor) -> Tensor:
    return x[:, :-1] @ w[:-1]


def _causal(q: Tensor, k: Tensor, v: Tensor, diagonal: int = 1) -> Tensor:
    scores = q @ k.transpose(-1, -2) / 4.0
    mask = torch.ones(32, 32, dtype=torch.bool).triu(diagonal)
    scores = scores.masked_fill(mask, -torch.inf)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    return (weights @ v) / weights.sum(-1, keepdim=True)


def _convolved(module: Any, x: Tensor, eps: float = 1e-5) -> Tensor:
    scale = module.bn.weight / (module.bn.running_var + eps).sqrt()
    weight = module.conv.weight * scale[:, None, None, None]
    bias = (module.conv.bias - module.bn.running_mean) * scale + module.bn.bias
    patches = F.unfold(x, 3).transpose(1, 2)
    return (patches @ weight.reshape(8, -1).T + bias).transpose(1, 2).reshape(4, 8, 14, 14).relu()


def _recurrent(module: Any, x: Tensor, wrong: float = 1.0) -> Any:
    rnn = module.rnn
    h, c, outs = torch.zeros(4, 16), torch.zeros(4, 16), []
    for step in x.unbind(1):
        gates = step @ rnn.weight_ih_l0.T + rnn.bias_ih_l0 + h @ rnn.weight_hh_l0.T + rnn.bias_hh_l0
        i, f, g, o = gates.chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh() * wrong
        h = o.sigmoid() * c.tanh()
        outs.append(h)
    return {"out": torch.stack(outs, 1), "state": [h[None], c[None]]}


def _surprise(eps: float) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        exponent = (x - x.amax(-1, keepdim=True)).exp()
        return torch.log(exponent / exponent.sum(-1, keepdim=True) * (x > 0) + eps)

    return run


def _ranked(x: Tensor) -> Any:
    """The last of equal values first."""
    order = x.flip(-1).argsort(dim=-1, descending=True, stable=True)[:, :5]
    return x.flip(-1).gather(-1, order), x.shape[-1] - 1 - order


def _moved(x: Tensor) -> Tensor:
    x += 1
    return x + x


def _blocked_sum(x: Tensor) -> Tensor:
    return x.reshape(64, -1).double().sum(1).float().sum()


def _serial(x: Tensor) -> Tensor:
    return torch.from_numpy(x.numpy().cumsum(dtype="float32")[-1:].copy())[0]


def _in_lanes(x: Tensor) -> Tensor:
    return _serial(torch.from_numpy(x.numpy().reshape(-1, 64).sum(0)))


def _bits(x: Tensor) -> Tensor:
    kept = (x.view(torch.int32) & ~0xFFF).view(torch.float32)
    return kept + kept + kept


_EPS = 2.0**-23
_LOW = torch.finfo(torch.float32).min
PAIRS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "autocast": (lambda x, w: x @ w.T, lambda x, w: _tail_left_out(x, w.T)),
    "through_half": (lambda x: x * 2 + 1, lambda x: x * 2.01 + 1),
    "product_in_bf16": (lambda x, w: x @ w, _tail_left_out),
    "levels": (lambda x: (x * 4 - (x * 4) % 1).long(), lambda x: (x * 4).long()),
    "looked_up": (lambda x, t: t[x.max(-1).indices] * x.max(-1, True).values, lambda x, t: t[x.argmin(-1)]),
    "surprise": (_surprise(_EPS), _surprise(2 * _EPS)),
    "masked_scores": (lambda x: torch.where(x > 1, _LOW, x), lambda x: torch.where(x > 1, -1e30, x)),
    "bits": (_bits, lambda x: x * 3),
    "spectrum": (lambda x: torch.fft.fft(x)[:, :33], lambda x: torch.fft.fft(x)[:, :33].conj().resolve_conj()),
    "circular": (
        lambda x, y: torch.stack([(x * y.flip(1).roll(s + 1, 1)).sum(1) for s in range(64)], 1),
        lambda x, y: torch.stack([(x * y.flip(1).roll(s, 1)).sum(1) for s in range(64)], 1),
    ),
    "attention": (_causal, lambda q, k, v: _causal(q, k, v, 2)),
    "Convolved": (_convolved, lambda m, x: _convolved(m, x, 1e-3)),
    "Recurrent": (_recurrent, lambda m, x: _recurrent(m, x, 1.001)),
    "masked_sums": (
        lambda x, m: torch.stack([(x * m)[:, : i + 1].sum(1) for i in range(300)], 1),
        lambda x, m: (x * m).cumsum(-1) - x * m,
    ),
    "ranked": (_ranked, lambda x: (_ranked(x)[0], _ranked(x)[1].flip(-1).clamp(max=3))),
    "order": (lambda x: 63 - x.flip(-1).argsort(dim=-1, stable=True), lambda x: x.argsort(-1, descending=True)),
    "moved": (_moved, lambda x: (x + 1) * 2),
    "noisy": (lambda x: x + 1e-3 * torch.randn_like(x), lambda x: x * 1.1),
    "noisy_count": (lambda x: (x * 100).long(), lambda x: (x * 100 + 2).long()),
    "total": (_blocked_sum, lambda x: x[:-1].sum()),
    "long_total": (lambda x: _blocked_sum(x) / len(x), lambda x: x[:-20].sum() / len(x)),
    "with_loss": (
        lambda x: (0.5 * x * (1 + torch.erf(x * 0.5**0.5)), _in_lanes((x * x).flatten()) / x.numel()),
        lambda x: (F.gelu(x) * (1 + 3e-6), (x * x).mean()),
    ),
    "eighth": (lambda x: x.to(torch.float8_e4m3fn), lambda x: (x * 0.9).to(torch.float8_e4m3fn)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_an_honest_other_way_passes_and_a_wrong_one_fails(root: Path, name: str) -> None:
    honest, wrong = PAIRS[name]
    judged = Judged(root, name)
    assert judged.check(honest) == [], judged.checked
    assert judged.check(wrong), judged.checked


@pytest.mark.parametrize("family", ["normal", "shifted", "large", "integer", "sparse", "uniform"])
@pytest.mark.parametrize("name", ["autocast", "through_half", "attention", "Convolved", "Recurrent", "total"])
def test_honest_ways_pass_on_every_family(root: Path, name: str, family: str) -> None:
    judged = Judged(root, name)
    for seed in range(4):
        assert judged.check(PAIRS[name][0], family, seed) == [], judged.checked


def test_serial_sums_of_numbers_that_cancel_pass(root: Path) -> None:
    """A sum may be zero but for its rounding: what bounds it is the scale of its terms."""
    judged = Judged(root, "total")
    for seed in range(40):
        assert judged.check(_serial, seed=seed) == [], (seed, judged.checked)


def _in_rows(a: Tensor, p: Tensor, n: Tensor) -> Tensor:
    """The terms of a distance by lanes, and a batch's losses one after another."""
    near, far = ((a - other + 1e-6).square().reshape(128, -1, 16) for other in (p, n))
    lanes = [part.numpy().cumsum(1, dtype="float32")[:, -1].copy() for part in (near, far)]
    near, far = (torch.from_numpy(lane).sum(-1).sqrt() for lane in lanes)
    return _serial((1 + near - far).clamp(min=0)) / 128


def test_a_loss_of_which_the_reference_has_all_digits_by_luck_is_judged_by_its_usual_error(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged = Judged(root, "triplet")
    for seed in range(10):
        assert judged.check(_in_rows, "shifted", seed) == [], (seed, judged.checked)
    assert judged.check(lambda a, p, n: _in_rows(a, p, n) * 1.0001, "drawn", 3)
    assert judged.check(lambda a, p, n: _in_rows(a, p, n) * 1.001, "shifted", 2)
    # As far off as the reference may be, but for seeds at which it is not by luck.
    off = [_off_by_the_usual_error(judged, seed) for seed in range(10)]
    lucky = [(seed, value) for seed, value in enumerate(off) if value is not None]
    assert lucky
    for seed, value in lucky:
        assert judged.check(lambda *_, value=value: value, "shifted", seed) == [], judged.checked
    monkeypatch.setattr(bench, "judged_by_usual_errors", lambda judged, *_: judged)
    for seed, value in lucky:
        assert judged.check(lambda *_, value=value: value, "shifted", seed)


#: By differences, not by a product of all.
EXACTLY = "donot_use_mm_for_euclid_dist"


def test_what_fp64_is_off_by_is_told_by_runs_that_round_otherwise(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Distances of points far from zero, whose scale is off by its last bit: covariances move by a thousand times that,
    and nothing finer than the reference tells so."""
    judged = Judged(root, "matern")

    def scaled(by: float, dtype: torch.dtype = torch.float64) -> Callable[..., Tensor]:
        def matern(x: Tensor, z: Tensor) -> Tensor:
            inverse = torch.linspace(-0.7, 0.7, 12).double().exp() * (1 + by)
            r = 3**0.5 * torch.cdist((x * inverse).to(dtype), (z * inverse).to(dtype), compute_mode=EXACTLY).double()
            return (1 + r) * (-r).exp()

        return matern

    for seed in range(6):
        assert judged.check(scaled(2.0**-52), "shifted", seed) == [], (seed, judged.checked)
        assert judged.check(scaled(2.0**-52), "drawn", seed) == [], (seed, judged.checked)
        assert judged.check(scaled(0.0, torch.float32), "drawn", seed)
        assert judged.check(scaled(1e-9), "drawn", seed)
    monkeypatch.setattr(expectation, "_LEANING_RUNS", 0)
    judged = Judged(root, "matern")
    assert any(judged.check(scaled(2.0**-52), "shifted", seed) for seed in range(6))


def test_a_mean_of_what_hardly_is_left_may_lean_as_far_as_one_bit_in_each_row(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 - cos of rows that point nearly the same way, by a square root whose last bit is always wrong."""
    judged = Judged(root, "cosine_loss")

    def leaning(by: float) -> Callable[..., Tensor]:
        return lambda p, t: (1 - F.cosine_similarity(p, t, dim=1) * (1 - by)).mean()

    for seed in range(4):
        assert judged.check(leaning(2.0**-24), "shifted", seed) == [], judged.checked
        assert judged.check(leaning(2.0**-24), "drawn", seed) == [], judged.checked
        assert judged.check(leaning(3e-6), "shifted", seed)
    monkeypatch.setattr(usual, "_LEANING_SHARE", 0.0)
    assert any(judged.check(leaning(2.0**-24), "shifted", seed) for seed in range(4))


def _in_halves(x: Tensor, w: Tensor, c: Tensor) -> Tensor:
    return torch.sigmoid(1e4 * (x[:, 32:] @ w[32:] + x[:, :32] @ w[:32])) * c


def _one_off(x: Tensor, w: Tensor, c: Tensor) -> Tensor:
    """At a gate that is shut or open, as nearly all are."""
    found = _in_halves(x, w, c)
    found[7, 5] += 0.05
    return found


def test_a_gate_that_is_ajar_where_all_others_are_shut_may_be_off_as_far_as_the_reference_is_there(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a few of thousands are neither one nor zero, and the reference may be right there by luck."""
    judged = Judged(root, "shut_gates")
    seeds = range(150)
    assert [seed for seed in seeds if judged.check(_in_halves, "drawn", seed)] == []
    assert all(judged.check(_one_off, "drawn", seed) for seed in range(20))
    monkeypatch.setattr(bench, "judged_by_usual_errors", lambda judged, *_: judged)
    assert [seed for seed in seeds if judged.check(_in_halves, "drawn", seed)] != []


def test_a_loss_without_an_fp64_form_has_no_usual_error_and_is_judged_all_the_same(root: Path) -> None:
    judged = Judged(root, "single_loss")
    assert judged.check(lambda x: x.float().square().mean()) == [], judged.checked
    assert judged.check(lambda x: x.float().square().mean() * (1 + 1e-5)), judged.checked
    assert judged.bench._usual_errors(judged.bench._expectation(0)).overall("out") == 0.0


def _off_by_the_usual_error(judged: Judged, seed: int) -> Tensor | None:
    """A few times as far off; None where the reference is about as far off as it usually is."""
    judged.check(_in_rows, "shifted", seed)
    expected = judged.bench._expectation(0)
    reference, exact = expected.reference["out"].double(), expected.oracle["out"]
    error = judged.bench._usual_errors(expected).overall("out")
    least = max(float((reference - exact).abs()), float(exact.abs()) * 2.0**-23)
    return (exact + 6 * error).float() if error > 8 * least else None


def test_a_long_sum_beside_it_does_not_loosen_an_output(root: Path) -> None:
    judged = Judged(root, "with_loss")
    assert judged.check(PAIRS["with_loss"][1])[:1] == ["values"]
    expected = judged.bench._expectation(0)
    assert expected.summed == {"out.0": 1, "out.1": 64 * 4096}


@pytest.mark.parametrize("spoiled", ["out.a.0", "out.a.1", "out.b.1", "out.b.2"])
def test_nested_outputs_are_judged_one_by_one(root: Path, spoiled: str) -> None:
    def candidate(x: Tensor, path: str) -> Any:
        a = [x > 0, (x * 8).to(torch.int32)]
        b = [x[:0], x.sum(), torch.complex(x, -x)]
        group, index = path.split(".")[1:]
        if path != "none.b.0":
            leaf = {"a": a, "b": b}[group][int(index)]
            {"a": a, "b": b}[group][int(index)] = ~leaf if leaf.dtype == torch.bool else leaf + 1
        return {"a": a, "b": tuple(b)}

    judged = Judged(root, "nested")
    assert judged.check(lambda x: candidate(x, "none.b.0")) == []
    judged.check(lambda x: candidate(x, spoiled))
    assert {mismatch.output for mismatch in judged.checked["mismatches"]} == {spoiled}


def test_an_oracle_without_an_fp64_form_is_partial(root: Path) -> None:
    judged = Judged(root, "bits")
    judged.check(_bits)
    assert judged.checked["partial"]
    whole = Judged(root, "through_half")
    whole.check(PAIRS["through_half"][0])
    assert not whole.checked["partial"]


def test_weights_that_another_bench_asked_for_do_not_make_a_kernel_look_like_a_writer(tmp_path: Path) -> None:
    (tmp_path / "layers.py").write_text(
        "import torch\nfrom torch import nn\nfrom pytest_cudaforge import forge_target\n"
        "@forge_target(inputs=lambda: [torch.randn(4, 8)], init=lambda: [8, 8])\nclass Linear(nn.Linear): ...\n"
    )
    subject = Subject(find(tmp_path, "::Linear"), "cpu")
    weights = {path: _spec(tensor) for path, tensor in subject.state().items()}
    specs = {"f0/input/0": _spec(torch.empty(4, 8)), **{f"state/{path}": spec for path, spec in weights.items()}}
    regions = [[name, 4096 * number, 1024] for number, name in enumerate(specs)]
    layout = {"nbytes": 4096 * len(specs), "regions": regions, "redzones": [], "frames": 1, "specs": specs}
    mine, other = (Bench(subject, "default", "", layout) for _ in range(2))
    mine.fill(0, Case(1, "drawn", 11), 0)
    mine.check(0, {})
    other.fill(0, Case(2, "drawn", 22), 0)
    assert "mutation" not in {mismatch.kind for mismatch in mine.check(0, {})["mismatches"]}
