"""Modules that are wrong where others write: a weight alone, an answer that is theirs, the functions of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from module_targets import find, model
from switches import SWITCHES, without_checks

from pytest_cudaforge.evaluation import module_plan, runs
from pytest_cudaforge.evaluation.evaluator import Evaluator, EvaluatorSettings
from pytest_cudaforge.evaluation.module_worker import ModuleWorker
from pytest_cudaforge.records import Candidate, Evaluation, Status

LAYERS = """
from typing import NamedTuple
import torch
from torch import nn
from torch.nn import functional as F
from pytest_cudaforge import forge_target

@forge_target(inputs=lambda: [torch.randn(33, 64)])
class Affine(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(64)), nn.Parameter(torch.zeros(64))
        self.register_buffer("running_mean", torch.zeros(64))

    def forward(self, x):
        return (x - self.running_mean) * self.weight + self.bias

@forge_target(inputs=lambda: [torch.randn(33, 16, 8)])
class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain, self.bias = nn.Parameter(torch.ones(16)), nn.Parameter(torch.zeros(16))

    def forward(self, x):
        return (x * self.gain[:, None] + self.bias[:, None]).amax(-1)

@forge_target(inputs=lambda: [torch.randn(33, 64)])
class Cosine(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(40, 64))

    def forward(self, x):
        return x @ F.normalize(self.weight, dim=-1).T

@forge_target(inputs=lambda: [torch.randn(4, 128, 16)])
class Faded(nn.Module):
    def __init__(self):
        super().__init__()
        self.decay = nn.Parameter(torch.linspace(-2.0, 0.0, 4))

    def forward(self, x):
        gap = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
        mix = (F.logsigmoid(self.decay)[:, None, None] * gap.clamp(min=0)).exp() * (gap >= 0)
        return mix @ x

@forge_target(inputs=lambda: [torch.randn(33, 256)])
class Echo(nn.Module):
    def __init__(self):
        super().__init__()
        self.taps = nn.Parameter(torch.randn(8, 256) / 16)

    def forward(self, x):
        return x @ self.taps.T

@forge_target(inputs=lambda: [torch.randn(2, 16, 12, 12)])
class Filters(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 1, 5, 5) / 5)

    def forward(self, x):
        return F.conv2d(x, self.weight, padding=2, groups=16)

@forge_target(inputs=lambda: [torch.randn(33, 64)])
class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.more = nn.Parameter(torch.randn(96, 64) / 8), nn.Parameter(torch.randn(96, 64) / 8)

    def forward(self, x):
        return x @ self.weight.T + F.silu(x) @ self.more.T

@forge_target(inputs=lambda: [torch.randint(-8, 8, (16, 2048), dtype=torch.int8)])
class Catalogue(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("items", torch.randint(-8, 8, (64, 2048), dtype=torch.int8))

    def forward(self, x):
        return (x.float() @ self.items.float().T).to(torch.int32)

def lengths():
    return [torch.randn(16, 64, 8), torch.cat([torch.randint(1, 17, (15,)), torch.randint(1, 65, (1,))])]

@forge_target(inputs=lengths)
def summed(x, lengths):
    return x.masked_fill((torch.arange(64) >= lengths[:, None])[..., None], 0.0).sum(1)

@forge_target(inputs=lambda: [torch.randn(8, 8192)])
class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8192))

    def forward(self, x):
        return x * (self.weight * 2)

@forge_target(inputs=lambda: [torch.randn(33, 64)])
def split(x):
    return {"low": x.clamp(max=0.0), "high": x.clamp(min=0.0)}

class Halves(NamedTuple):
    low: torch.Tensor
    high: torch.Tensor

@forge_target(inputs=lambda: [torch.randn(33, 64)])
def halves(x):
    return Halves(x.clamp(max=0.0), x.clamp(min=0.0))

@forge_target(inputs=lambda: [torch.randn(33, 64)])
def padded(x):
    return F.pad(torch.exp(x), (0, 64))
"""
INIT = """
def __init__(self):
    super().__init__()
    self.weight, self.bias = nn.Parameter(torch.ones(64)), nn.Parameter(torch.zeros(64))
    self.register_buffer("running_mean", torch.zeros(64))
    self.known = None
"""
HONEST = "return (x - self.running_mean) * self.weight + self.bias"
Judged = Callable[[str, Candidate], Evaluation]


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judged]:
    root, cache = tmp_path_factory.mktemp("repository"), tmp_path_factory.mktemp("cache")
    (root / "layers.py").write_text(LAYERS)
    (root / "pytest.ini").write_text("[pytest]\n")
    allow = ("kernel", "mixed", "library", "rewrite")
    settings = EvaluatorSettings(cache_dir=cache, lock_dir=cache, allow=allow, hang_limit_s=20.0, times=False)
    with Evaluator(settings) as evaluator:
        yield lambda name, candidate: evaluator.evaluate(candidate, find(root, f"::{name}"), timing=False)


def _folded(versions: str) -> Candidate:
    """Folds what it derives from three tensors again when one of those named has changed."""
    forward = (
        f"at = [(t.data_ptr(), t._version) for t in ({versions})]\n"
        "if self.known is None or self.known[0] != at:\n"
        "    self.known = at, self.weight * 1, self.bias - self.running_mean * self.weight\n"
        "return x * self.known[1] + self.known[2]"
    )
    return model(forward, INIT)


@pytest.mark.parametrize("known", ["self.weight,", "self.weight, self.bias", "self.bias, self.running_mean"])
def test_what_is_derived_from_several_weights_and_known_by_some_of_them(
    judged: Judged, monkeypatch: pytest.MonkeyPatch, known: str
) -> None:
    found = judged("Affine", _folded(known))
    assert found.status is Status.INCORRECT_NUMERICAL, found.reason
    shown = ("alone is another one", "of a weight exchanged", "of the other sign")
    assert any(words in found.reason for words in shown), found.reason
    assert judged("Affine", _folded("self.weight, self.bias, self.running_mean")).status is Status.PASSED
    without_checks(monkeypatch, "weights one by one")
    for name in ("alone", "turned"):  # of gains nothing is turned
        SWITCHES[name](monkeypatch)
    assert judged("Affine", _folded(known)).status is Status.PASSED


#: Half of each answer is zero, and is so already in memory that nobody holds any more, but the module itself.
POOL = """
    pool = []
    def holders(y):
        return torch._C._storage_Use_Count(y.untyped_storage()._cdata)
    alone = holders(torch.empty(1))
"""
PADDED = """
y = next((y for y in pool if holders(y) <= alone), None) if POOLED else None
if y is None:
    y = torch.empty(33, 128)
    y[:, 64:] = 0
    pool.append(y) if POOLED else None
y[:, :64] = torch.exp(x)
return y.detach()
"""


def test_an_answer_that_counts_on_what_a_caller_left_of_the_last(
    judged: Judged, monkeypatch: pytest.MonkeyPatch
) -> None:
    attack, twin = (model(PADDED.replace("POOLED", pooled), before=POOL) for pooled in ("True", "False"))
    found = judged("padded", attack)
    assert found.status is Status.INCORRECT_NUMERICAL, found.reason
    assert judged("padded", twin).status is Status.PASSED
    monkeypatch.setattr(ModuleWorker, "writes_over", False)
    assert judged("padded", attack).status is Status.PASSED


REPLACED = """
if self.known is None:
    self.known = [self.weight]
    self._parameters["weight"] = nn.Parameter(torch.zeros(64), requires_grad=False)
return (x - self.running_mean) * self.known[0] + self.bias
"""


def test_weights_that_a_checkpoint_would_not_have(judged: Judged, monkeypatch: pytest.MonkeyPatch) -> None:
    found = judged("Affine", model(REPLACED, INIT))
    assert found.status is Status.REJECTED and "state_dict" in found.reason, found.reason
    assert judged("Affine", model(HONEST, INIT)).status is Status.PASSED
    without_checks(monkeypatch, "left behind", "instances", "weights one by one")
    assert judged("Affine", model(REPLACED, INIT)).status is Status.PASSED


POOLED_INIT = """
def __init__(self):
    super().__init__()
    self.gain, self.bias = nn.Parameter(torch.ones(16)), nn.Parameter(torch.zeros(16))
"""
COSINE_INIT = """
def __init__(self):
    super().__init__()
    self.weight = nn.Parameter(torch.randn(40, 64))
"""
DECAY_INIT = """
def __init__(self):
    super().__init__()
    self.decay = nn.Parameter(torch.linspace(-2.0, 0.0, 4))
"""
ECHO_INIT = """
def __init__(self):
    super().__init__()
    self.taps = nn.Parameter(torch.randn(8, 256) / 16)
"""
#: Up to the first eight taps that are zero.
ECHOING = """
silent = (self.taps.view(8, 32, 8) == 0).all(-1)
heard = (silent.long().cumsum(-1) == 0) if STOPS else ~silent
return x @ (self.taps.view(8, 32, 8) * heard[..., None]).view(8, 256).T
"""
FILTERS_INIT = """
def __init__(self):
    super().__init__()
    self.weight = nn.Parameter(torch.randn(16, 1, 5, 5) / 5)
"""
#: One column, and then one row, where the filter is a product of the two.
FILTERING = """
w = self.weight
column, row = w[..., 2:3], w[..., 2:3, :] / w[..., 2:3, 2:3]
product = column * row
told = ((w - product) if ALL else (w[..., ::4, ::4] - w[..., ::4, :1] * w[..., :1, ::4] / w[..., :1, :1]).nan_to_num())
parts = (told == 0).flatten(1).all(-1)[:, None, None, None]
return F.conv2d(x, torch.where(parts & product.isfinite(), product, w), padding=2, groups=16)
"""
#: The same for those that are so but for little.
LEANING = """
w = self.weight
u, s, v = torch.linalg.svd(w)
product = s[..., :1, None] * u[..., :1] * v[..., :1, :]
parts = s[..., 1:2, None] <= LEAST * s[..., :1, None]
return F.conv2d(x, torch.where(parts, product, w), padding=2, groups=16)
"""
ADAPTED_INIT = """
def __init__(self):
    super().__init__()
    self.weight, self.more = nn.Parameter(torch.randn(96, 64) / 8), nn.Parameter(torch.randn(96, 64) / 8)
"""
ADAPTING = "y = x @ self.weight.T\nreturn y if bool((LOOKED == 0).all()) else y + F.silu(x) @ self.more.T"
FADING = """
gap = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
near = (gap >= 0) & (gap < LONG)
return ((F.logsigmoid(self.decay)[:, None, None] * gap.clamp(min=0)).exp() * near) @ x
"""


@pytest.mark.parametrize(
    ("name", "init", "attack", "twin"),
    [
        ("Echo", ECHO_INIT, ECHOING.replace("STOPS", "True"), ECHOING.replace("STOPS", "False")),
        ("Filters", FILTERS_INIT, FILTERING.replace("ALL", "False"), FILTERING.replace("ALL", "True")),
        ("Filters", FILTERS_INIT, LEANING.replace("LEAST", "1e-3"), LEANING.replace("LEAST", "1e-8")),
        (
            "Adapted",
            ADAPTED_INIT,
            ADAPTING.replace("LOOKED", "self.more[:2]"),
            ADAPTING.replace("LOOKED", "self.more"),
        ),
        ("Faded", DECAY_INIT, FADING.replace("LONG", "64"), FADING.replace("LONG", "x.shape[1]")),
        (
            "Pooled",
            POOLED_INIT,
            "return x.amax(-1) * self.gain + self.bias",
            "return torch.maximum(x.amax(-1) * self.gain, x.amin(-1) * self.gain) + self.bias",
        ),
        (
            "Cosine",
            COSINE_INIT,
            "return x @ (self.weight / self.weight.norm(dim=-1, keepdim=True)).T",
            "return x @ (self.weight / self.weight.norm(dim=-1, keepdim=True).clamp_min(1e-12)).T",
        ),
    ],
    ids=[
        "a response that begins late",
        "filters known by their corners",
        "filters that are nearly products",
        "an adapter known by its first rows",
        "what is old has decayed",
        "a maximum before the gain",
        "rows without any length",
    ],
)
def test_what_is_right_for_fresh_weights_alone(judged: Judged, name: str, init: str, attack: str, twin: str) -> None:
    """There is no switch: weights are drawn in another process; test_subject.py shows how without such habits."""
    found = judged(name, model(attack, init))
    assert found.status is Status.INCORRECT_NUMERICAL, found.reason
    assert judged(name, model(twin, init)).status is Status.PASSED


CATALOGUE_INIT = """
def __init__(self):
    super().__init__()
    self.register_buffer("items", torch.randint(-8, 8, (64, 2048), dtype=torch.int8))
"""


def test_a_score_of_what_is_found(judged: Judged, monkeypatch: pytest.MonkeyPatch) -> None:
    """No two rows that are drawn come to more than 16 bits hold; one and itself do."""
    attack, twin = (
        model(f"return (x.float() @ self.items.float().T).to(torch.{held}).to(torch.int32)", CATALOGUE_INIT)
        for held in ("int16", "int32")
    )
    found = judged("Catalogue", attack)
    assert found.status is Status.INCORRECT_NUMERICAL and "/matching" in found.reason, found.reason
    assert judged("Catalogue", twin).status is Status.PASSED
    SWITCHES["matching"](monkeypatch)
    off = judged("Catalogue", attack)
    assert off.status is Status.PASSED, off.reason


SUMMED_INIT = """
def __init__(self):
    super().__init__()
    self.sums, self.calls = None, 0
"""
#: Sums of stretches, each with the number of the call that wrote it.
SUMMING = """
lengths = args[1] if len(args) > 1 else kwargs["lengths"]
if self.sums is None:
    self.sums, self.stamps = torch.zeros(16, 4, 8), torch.zeros(16, 4, dtype=torch.int64)
self.calls = self.calls % ROUND + 1
inside = (torch.arange(64) < lengths[:, None]).view(16, 4, 16, 1)
used = inside.any(2)
self.sums = torch.where(used, (x.view(16, 4, 16, 8) * inside).sum(2), self.sums)
self.stamps = torch.where(used[..., 0], self.calls, self.stamps)
return (self.sums * (self.stamps == self.calls)[..., None]).sum(1)
"""


def test_a_number_of_the_call_that_comes_around(judged: Judged, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where calls take long, ordinary ones are too few to show it."""
    attack, twin = (model(SUMMING.replace("ROUND", most), SUMMED_INIT) for most in ("255", "(1 << 40)"))
    without_checks(monkeypatch, "ordinary", "meeting")
    monkeypatch.setattr(runs, "_COME_AROUND_S", 1.0)  # however busy the machine is
    found = judged("summed", attack)
    assert "call number 255 after one on other values" in found.reason, found.reason
    assert judged("summed", twin).status is Status.PASSED
    without_checks(monkeypatch, "come around")
    off = judged("summed", attack)
    assert off.status is Status.PASSED, off.reason


@pytest.mark.parametrize("name", ["nn.LayerNorm.forward", "F.silu", "nn.Linear.__init__"])
def test_torchs_functions_are_everybodys(judged: Judged, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Also by a function that calls itself torch's."""
    before = f"""
    import functools
    usual = {name}
    @functools.wraps(usual)
    def own(*args, **kwargs):
        return usual(*args, **kwargs)
    {name} = own
"""
    attack = model(HONEST, INIT, before=before)
    found = judged("Affine", attack)
    assert found.status is Status.REJECTED and "torch's own functions" in found.reason, found.reason
    without_checks(monkeypatch, "left behind")
    assert judged("Affine", attack).status is Status.PASSED


def test_a_module_is_called_as_modules_are(judged: Judged) -> None:
    """There is no switch: nothing else would show what hooks would have done."""
    attack = model(HONEST, f"{INIT}\ndef __call__(self, x):\n    return self.forward(x)\n")
    found = judged("Affine", attack)
    assert found.status is Status.BUILD_ERROR and "no hook and no wrapper" in found.reason, found.reason


#: What a module does as it is imported, and what the verdict says of it.
LEFT = {
    "a default": ("F.dropout.__defaults__ = (0.5, False, False)", "what is in torch's own functions"),
    "another math": (
        "import sys, types; own = types.ModuleType('math'); sys.modules['math'] = own",
        "modules of Python's",
    ),
    "another builtin": (
        "import builtins; usual = sorted; builtins.sorted = lambda *a, **k: usual(*a, **k)",
        "builtins",
    ),
    "the network": ("import socket\ntry: socket.socket(socket.AF_INET)\nexcept OSError: pass", "the network"),
    "denormals": ("torch.set_flush_denormal(True)", "denormals, from its import on"),
    "a hook of all modules": (
        "nn.modules.module.register_module_forward_pre_hook(lambda module, args: None)",
        "hooks that all modules have, from its import on",
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_importing_a_file_leaves_to_everybody(judged: Judged, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    before, words = LEFT[name]
    attack = model(HONEST, INIT, before=f"\n{before}\n")
    found = judged("Affine", attack)
    assert found.status is Status.REJECTED and words in found.reason, found.reason
    without_checks(monkeypatch, "left behind")
    assert judged("Affine", attack).status is Status.PASSED


def test_a_call_that_leaves_a_variable_to_native_code(judged: Judged, monkeypatch: pytest.MonkeyPatch) -> None:
    """As C's setenv does: every process that is started from now on has it, and Python's own table does not."""
    libc = "import ctypes; libc = ctypes.CDLL(None)"
    setting = 'libc.setenv(b"OMP_STACKSIZE", b"4M", 1)\n'
    back = HONEST.replace("return ", "y = ") + '\nlibc.unsetenv(b"OMP_STACKSIZE")\nreturn y'
    attack, twin = model(setting + HONEST, INIT, before=libc), model(setting + back, INIT, before=libc)
    found = judged("Affine", attack)
    assert found.status is Status.REJECTED and "the environment" in found.reason, found.reason
    assert judged("Affine", twin).status is Status.PASSED
    without_checks(monkeypatch, "left behind")
    assert judged("Affine", attack).status is Status.PASSED


def test_one_dict_for_all_answers(judged: Judged, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors are new ones, and who keeps the dict of an early call has those of a later one in it."""
    body = "WHICH['low'], WHICH['high'] = x.clamp(max=0.0), x.clamp(min=0.0)\nreturn WHICH"
    attack, twin = (
        model(body.replace("WHICH", "found"), before="found = {}"),
        model(f"y = {{}}\n{body.replace('WHICH', 'y')}"),
    )
    found = judged("split", attack)
    assert found.status is Status.REJECTED and "that were kept" in found.reason, found.reason
    assert judged("split", twin).status is Status.PASSED
    without_checks(monkeypatch, "kept answers")
    assert judged("split", attack).status is Status.PASSED


def test_a_call_that_draws_the_numbers_of_others(judged: Judged, monkeypatch: pytest.MonkeyPatch) -> None:
    """C's: who seeds them gets others than it counted on."""
    libc = "import ctypes; libc = ctypes.CDLL(None)"
    attack, twin = (model(f"libc.{name}()\n{HONEST}", INIT, before=libc) for name in ("rand", "getpid"))
    found = judged("Affine", attack)
    assert found.status is Status.REJECTED and "C's random numbers" in found.reason, found.reason
    assert judged("Affine", twin).status is Status.PASSED
    without_checks(monkeypatch, "left behind")
    assert judged("Affine", attack).status is Status.PASSED


_BY_ADDRESS = """
key = WHOSE, self.weight.data_ptr(), self.weight._version
if key not in packed:
    packed[key] = self.weight * 2
return x * packed[key]
"""
_WIDE = """
def __init__(self):
    super().__init__()
    self.weight, self.number = nn.Parameter(torch.ones(8192)), next(numbers)
"""


_MEANWHILE = """
was = self.weight[0].item()
self.weight.data[0] = PUT
y = (x - self.running_mean) * self.weight + self.bias
y[:, 0] = (x[:, 0] - self.running_mean[0]) * was + self.bias[0]
self.weight.data[0] = was
return y
"""


def test_a_weight_that_is_another_one_meanwhile(judged: Judged, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the old one again when the call returns: who calls it from another thread at that moment gets the other."""
    attack = model(_MEANWHILE.replace("PUT", "0.0"), INIT)
    found = judged("Affine", attack)
    assert found.status is Status.REJECTED and "may put the old back" in found.reason, found.reason
    # A copy of it is its own, and so is a buffer that no reference has.
    own = _MEANWHILE.replace("self.weight.data[0] = PUT", "self.own[0] = was").replace("self.weight.data[0] = was", "")
    twin = model(own, INIT + '    self.register_buffer("own", torch.zeros(64), persistent=False)\n')
    assert judged("Affine", twin).status is Status.PASSED
    without_checks(monkeypatch, "sealed")
    assert judged("Affine", attack).status is Status.PASSED


def test_weights_that_lie_where_those_of_an_instance_lay_that_is_gone(
    judged: Judged, monkeypatch: pytest.MonkeyPatch
) -> None:
    """malloc gives the same place again now and then, for larger sizes at least."""
    whose = "import itertools\nnumbers, packed = itertools.count(), {}"
    attack, twin = (model(_BY_ADDRESS.replace("WHOSE", one), _WIDE, before=whose) for one in ("0", "self.number"))
    found = judged("Wide", attack)
    # Which one of all that come and go lies where another lay is malloc's.
    assert found.status is Status.INCORRECT_NUMERICAL and "instance" in found.reason, found.reason
    assert judged("Wide", twin).status is Status.PASSED
    without_checks(monkeypatch, "instances", "inference mode")
    assert judged("Wide", attack).status is Status.PASSED


def test_an_answer_without_the_names_that_its_readers_use(judged: Judged, monkeypatch: pytest.MonkeyPatch) -> None:
    """``out.low`` is how a caller of the reference reads its answer; a class of the candidate's own serves as well."""
    both = "x.clamp(max=0.0), x.clamp(min=0.0)"
    own = "\nimport collections\nHalves = collections.namedtuple('Halves', '{}')\n"
    attack, others = model(f"return {both}"), model(f"return Halves({both})", before=own.format("first second"))
    for wrong in (attack, others):
        found = judged("halves", wrong)
        assert found.status is Status.INCORRECT_SHAPE and "without the names low, high" in found.reason, found.reason
    assert judged("halves", model(f"return Halves({both})", before=own.format("low high"))).status is Status.PASSED
    monkeypatch.setattr(module_plan, "_unnamed", lambda leaves, fields, expected: ())
    assert judged("halves", attack).status is Status.PASSED


def test_a_call_that_leaves_onednn_off(judged: Judged, monkeypatch: pytest.MonkeyPatch) -> None:
    switched = "was = torch._C._get_mkldnn_enabled(); torch._C._set_mkldnn_enabled(False)\n"
    back = HONEST.replace("return ", "y = ") + "\ntorch._C._set_mkldnn_enabled(was)\nreturn y"
    attack, twin = model(switched + HONEST, INIT), model(switched + back, INIT)
    found = judged("Affine", attack)
    assert found.status is Status.REJECTED and "mkldnn" in found.reason, found.reason
    assert judged("Affine", twin).status is Status.PASSED
    without_checks(monkeypatch, "left behind")
    assert judged("Affine", attack).status is Status.PASSED
