"""A target, imported: its module, its inputs, its reference run. In the oracle's process only.

Files are loaded by path under a name of their own, so that two files with one name never meet; targets inside a
package are imported by their real name, because their relative imports need it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import importlib
import importlib.util
import inspect
import linecache
import random
import secrets
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from pytest_cudaforge.errors import DeviceError, TargetError
from pytest_cudaforge.evaluation.decisions import (
    ORDERING,
    DecidingMode,
    MarginMode,
    NamingMode,
    decided_by_rounding,
    exact,
)
from pytest_cudaforge.evaluation.exchanges import between, with_values_of
from pytest_cudaforge.evaluation.generic import HALVES, LEVELS
from pytest_cudaforge.evaluation.occasions import (
    AGREEING,
    OCCASIONS,
    WitnessMode,
    agreeing,
    decisions_of,
    may_have_occasions,
    meetings_of,
    occasional_draws,
)
from pytest_cudaforge.evaluation.pointing import PointingMode, pointed_by
from pytest_cudaforge.evaluation.precision import Fp64Mode, declared_dtype, declared_limits, precision_flags, widened
from pytest_cudaforge.evaluation.rare import (
    RARE,
    RARE_DRAWS,
    OverwritingMode,
    Rare,
    RareDraws,
    named_integers,
    rare_draws_of,
    rarities_of,
    sizes_near,
)
from pytest_cudaforge.evaluation.reads import reads_of
from pytest_cudaforge.evaluation.redraw import SHORTCUTS, families_of, redraw
from pytest_cudaforge.evaluation.structures import Structure, looks_normal, ordered_values, structure_of, structures_of
from pytest_cudaforge.evaluation.weights import (
    HABITS,
    exchange_weights,
    exchangeable_weights,
    nudge_weights,
    rerandomise,
    takes_on,
)
from pytest_cudaforge.records import Target
from pytest_cudaforge.runtime.signature import (
    flatten_call,
    flatten_output,
    module_tensors,
    split_call,
    split_init,
    unflatten_call,
)
from pytest_cudaforge.target import TargetOptions, file_options, options_of, with_terms

__all__ = [
    "INIT_SEED",
    "TYING",
    "WHOLE",
    "Subject",
    "imported",
    "is_fatal",
    "options_asked",
    "seed_generators",
    "user_text",
]

INIT_SEED = 20_240_229  # weights as constructed are the same in every process; verdicts re-randomise them
#: Families for half types alone, and for others alone.
_BY_TYPE = {"peaks": True, "deep": False, "bumped": False}
#: Redraws that tell a domain: an input's own range is kept where the reference fails on either.
_DOMAIN_FAMILIES = ("normal", "large")
#: Redraws of few different values, or of entries that are all zero.
TYING = ("integer", "faint", "floor", "alike", "rectified", "empty")
WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
#: How the names of torch's own counters end, by which nothing finds its place.
_COUNTER = "num_batches_tracked"
#: More than any check makes calls, and no more than a loop or a tensor of so many bears.
_MANY_PLACES = 1 << 20
#: The share of integers that rounding may have made others.
_EDGES = 1e-3
#: Draws in which rounding may decide.
_EDGE_DRAWS = 4
#: How many of a call's elements lie between neighbours of "skewed", wherever most of those are.
_SKEWED_SHARE = 0.5
#: What an answer to zeros comes to, of that to drawn values, at least.
_LEAST_LEFT = 1e-2
#: How long levels are looked for between which values may lie.
_HALVES_S = 1.0
#: Further draws that show whether values of one sign always have it, and the most that they may take.
_SIGN_DRAWS, _SIGNED_BYTES = 5, 1 << 27
#: So many draws show what integers are rare, and no more than take so long; redraws by them that are tried first.
_RARE_DRAWS, _RARE_DRAWS_S, _RARE_TRIED = 1024, 0.5, 3
#: In so many draws, and so long, occasions are looked for, of inputs and once more of answers; if they are no fewer.
_OCCASION_DRAWS, _OCCASIONS_S, _OCCASIONS_LEAST, _OCCASIONS_FIRST, _OCCASIONS_WAIT = 2048, 0.75, 64, 8, 4
#: Inputs in [0, 1] that are widened one by one where not all of them may be.
_MAX_WIDENED = 8
#: What the driver calls faults that a context does not survive.
_STICKY = (
    *("CUDA_ERROR_ILLEGAL_ADDRESS", "CUDA_ERROR_MISALIGNED_ADDRESS", "CUDA_ERROR_INVALID_ADDRESS_SPACE"),
    *("CUDA_ERROR_ASSERT", "CUDA_ERROR_LAUNCH_FAILED", "CUDA_ERROR_LAUNCH_TIMEOUT", "CUDA_ERROR_INVALID_PC"),
    *("CUDA_ERROR_ILLEGAL_INSTRUCTION", "CUDA_ERROR_HARDWARE_STACK_ERROR", "CUDA_ERROR_ECC_UNCORRECTABLE"),
)


def is_fatal(error: BaseException | None) -> bool:
    """Did CUDA fail in, or behind, ``error``? Such a fault stays: every later call of this process would fail, too."""
    # torch before 2.8 has no class for it.
    kind = getattr(torch, "AcceleratorError", ())
    while error is not None:
        if isinstance(error, kind) or (isinstance(error, RuntimeError) and str(error).startswith("CUDA error:")):
            return True
        if isinstance(error, DeviceError) and any(name in error.what for name in _STICKY):
            return True
        error = error.__cause__ or error.__context__
    return False


def user_text(error: BaseException, root: str) -> str:
    """The traceback's frames that lie under ``root``, then the error's own line."""
    lines = []
    for frame in traceback.extract_tb(error.__traceback__):
        path = Path(frame.filename)
        if not path.is_relative_to(root) or "site-packages" in path.parts:
            continue
        lines.append(f"{path.relative_to(root)}:{frame.lineno} in {frame.name}: {(frame.line or '').strip()}")
    return "\n".join([*lines, f"{type(error).__name__}: {error}"])


@dataclass(frozen=True)
class Weights:
    """How values of a module's parameters, and of its running statistics, come about. ``seed`` None: as constructed.

    Those at the paths ``kept`` are as constructed in any case. ``exchanged``: a few elements of the others change
    places, as this seed says, or two of ``exchanged_alone``, or all are ``nudged``. ``others``: paths of those that are
    drawn from ``others_seed`` instead.
    """

    seed: int | None = None
    kept: tuple[str, ...] = ()
    exchanged: int | None = None
    others: tuple[str, ...] = ()
    others_seed: int | None = None
    exchanged_alone: str = ""
    nudged: int | None = None


@dataclass(frozen=True)
class _Rarities:
    """What draws of a workload show rarely; ``agree``: has it labels that may be what scores say?"""

    rare: Rare | None = None
    draws: Mapping[str, RareDraws] = field(default_factory=dict)
    agree: bool = False


class Subject:
    """One loaded target on one device. Raises TargetError with the author's own traceback wherever its code fails."""

    #: What training may do to weights that drawn ones do in turn, where the reference bears it.
    habits: tuple[str, ...] = HABITS
    #: Whether the fp64 form tells which sums are behind which output.
    tells_sums_apart = True

    def __init__(self, target: Target, device: str, python_paths: tuple[str, ...] = ()) -> None:
        self.target = target
        self.device = torch.device(device)
        namespace = self._guarded("importing its file", lambda: _load_file(target, python_paths))
        self.obj = _find(target, namespace)
        options = options_of(self.obj)
        self.options: TargetOptions = with_terms(file_options(options, vars(namespace)), target.terms)
        if not self.options.input_sets:
            raise TargetError(
                f"{target.id}: no inputs are declared",
                expected="forge_target(inputs=...), workloads=..., or get_inputs() in its file",
                remedy="@forge_target(inputs=lambda: [torch.randn(64, 4096)])",
            )
        #: Paths of the parameters that train, as constructed.
        self.trained: tuple[str, ...] = ()
        self.module: torch.nn.Module | None = self._construct()
        #: What :meth:`set_weights` was given last; None: unknown.
        self._weights: Weights | None = Weights()
        self._constructed = {path: tensor.clone() for path, tensor in self.state().items()}
        self._wide: torch.nn.Module | None = None
        #: torch.compile's version, made once, and why it failed where it did.
        self.compiled: Any = None
        self.compile_note = ""
        #: Its kernels by workload, as text.
        self.generated: dict[str, str] = {}
        self._structures: dict[str, dict[str, Structure]] = {}
        self._families: dict[str, dict[str, bool]] = {}
        self._names: dict[str, frozenset[str]] = {}
        self._rare: dict[str, _Rarities] = {}
        self._nonfinites: dict[str, int] = {}
        self._drawn_edges: dict[str, int | None] = {}
        self._mutates: dict[str, frozenset[str]] = {}
        #: Workloads whose forward draws random numbers.
        self._draws: set[str] = set()
        self._follows: dict[str, bool] = {}
        self._places: dict[str, bool] = {}
        self._borne: tuple[str, ...] | None = None

    def run(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Call ``function`` under no_grad; what it raises becomes a TargetError with the author's frames."""

        def call() -> Any:
            with torch.no_grad():
                return function(*args, **kwargs)

        return self._guarded("its forward", call)

    # -- weights

    def state(self) -> dict[str, torch.Tensor]:
        """Parameters, buffers and plain tensor attributes by path."""
        return {} if self.module is None else module_tensors(self.module)

    def set_weights(self, wanted: Weights) -> None:
        """Weights as constructed, or drawn."""
        if self.module is None or wanted == self._weights:
            return
        self._put(self._constructed)
        if wanted.seed is not None:
            self._draw_weights(wanted.seed, wanted.kept)
            if wanted.others and wanted.others_seed is not None:
                drawn = {path: tensor.clone() for path, tensor in self.state().items() if path not in wanted.others}
                self._put(self._constructed)
                self._draw_weights(wanted.others_seed, wanted.kept)
                self._put(drawn)
            if wanted.exchanged is not None:
                constructed = self._constructed
                exchange_weights(self.module, wanted.exchanged, wanted.kept, wanted.exchanged_alone, constructed)
            if wanted.nudged is not None:
                nudge_weights(self.module, wanted.nudged, wanted.kept)
        self._weights = wanted

    def _draw_weights(self, seed: int, kept: tuple[str, ...]) -> None:
        assert self.module is not None
        if self._borne is None:
            self._borne = tuple(habit for habit in self.habits if self._bears(habit))
            self._put(self._constructed)
        rerandomise(self.module, seed, self._borne)
        self._put({path: self._constructed[path] for path in kept})

    def _bears(self, habit: str) -> bool:
        """Does the reference run on weights of this habit, as finite as on others? Rows of zeros tie."""
        assert self.module is not None
        if not takes_on(self.module, habit):
            return False
        try:
            plain = _nonfinite(self._outputs_with(()))
            worn = self._outputs_with((habit,))
        except TargetError as error:
            if is_fatal(error):
                raise
            return False
        return _nonfinite(worn) <= plain and not (habit == "pruned" and self._breaks_ties(worn))

    def _outputs_with(self, habits: tuple[str, ...]) -> dict[str, torch.Tensor]:
        """What the reference returns for its first workload's inputs, with drawn weights."""
        assert self.module is not None
        self._put(self._constructed)
        leaves, tree = flatten_call(*self.draw(next(iter(self.options.input_sets)), 1))
        rerandomise(self.module, 1, habits, trained=True)
        args, kwargs = unflatten_call(tree, self.completed(leaves, tree))
        with precision_flags(self.options.precision):
            outputs, _ = flatten_output(self.run(self.function, args, kwargs))
        return {path: value for path, value in outputs.items() if isinstance(value, torch.Tensor)}

    def _put(self, values: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for path, tensor in self.state().items():
                if path in values:
                    tensor.copy_(values[path])

    def put_state(self, values: Mapping[str, torch.Tensor]) -> None:
        """Other values in some of its tensors, until weights are set again."""
        self._weights = None
        self._put(values)

    def wide(self) -> Any:
        """The function, or the module as it now is, carried in fp64."""
        module = self.module
        if module is None:
            return self.obj
        if self._wide is None:
            self._wide = self._guarded("copying it", lambda: copy.deepcopy(module).double())
            assert self._wide is not None
        now = self.state()
        with torch.no_grad():
            for path, tensor in module_tensors(self._wide).items():
                tensor.copy_(now[path])
        return self._wide

    def restore(self) -> None:
        """Weights and state as constructed, whatever forward has written since."""
        self._weights = None
        self.set_weights(Weights())

    def exchangeable_weights(self, kept: Collection[str]) -> list[str]:
        """The parameters of which a few elements may change places."""
        return [] if self.module is None else list(exchangeable_weights(self.module, kept, self._constructed))

    @contextlib.contextmanager
    def as_constructed(self) -> Iterator[None]:
        """Weights and state as constructed inside, and again afterwards, also where the target's code raises."""
        self.set_weights(Weights())
        try:
            yield
        finally:
            self.restore()

    def never_redrawn(self) -> frozenset[str]:
        """Paths of the module's tensors, parameters aside, that are as constructed in every trial."""
        if self.module is None:
            return frozenset()
        with self.as_constructed():
            self.set_weights(Weights(1))
            kept = {path for path, tensor in self.state().items() if _same_values(tensor, self._constructed[path])}
        return frozenset(kept - {path for path, _ in self.module.named_parameters(remove_duplicate=False)})

    # -- what its inputs are like

    def input_name(self, path: str) -> str:
        """An input leaf as the caller knows it: ``input 0 (x)``, ``input 1.0 (states[0])``, ``input mask``."""
        return _input_name(self.module.forward if self.module is not None else self.obj, path)

    def state_name(self, path: str) -> str:
        """A tensor of the module as its author knows it: ``parameter weight``, ``buffer norm.running_mean``."""
        module = self.module
        kinds = {"parameter": module.named_parameters(), "buffer": module.named_buffers()} if module is not None else {}
        return next((f"{kind} {path}" for kind, named in kinds.items() if path in dict(named)), f"attribute {path}")

    def output_name(self, path: str) -> str:
        """An output leaf as a verdict names it."""
        return path

    def completed(self, leaves: dict[str, Any], tree: Any) -> dict[str, Any]:
        """A call's leaves, those made anew that follow from the others and from the weights (a forward's never do)."""
        return leaves

    def structures(self, workload: str, *, widen: bool = True) -> dict[str, Structure]:
        """By input path: which redraws keep the input's meaning. Found from two draws, once.

        ``torch.rand`` says nothing of what an input means: values in [0, 1] are kept only where the reference does
        not take others (a logarithm, a root). ``widen`` False keeps them everywhere, and runs nothing.
        """
        if workload not in self._structures:
            first, second = (flatten_call(*self.draw(workload, seed))[0] for seed in (1, 2))
            found = structures_of(first, second)
            del first, second
            self._forget_chance_signs(workload, found)
            self._structures[workload] = self._widened(workload, found) if widen else found
        return self._structures[workload]

    def _forget_chance_signs(self, workload: str, found: dict[str, Structure]) -> None:
        """Of a few draws two have the same sign by chance: what has the other one in a further draw is generic."""
        signed = [path for path, structure in found.items() if structure == "signed"]
        first = flatten_call(*self.draw(workload, 1))[0] if signed else {}
        if sum(first[path].nbytes for path in signed) > _SIGNED_BYTES:
            return
        for seed in range(3, 3 + _SIGN_DRAWS) if signed else ():
            further = flatten_call(*self.draw(workload, seed))[0]
            for path in signed:
                if path in further and structure_of(first[path], further[path]) == "generic":
                    found[path] = "generic"

    def _widened(self, workload: str, found: dict[str, Structure]) -> dict[str, Structure]:
        """``found`` with each input in [0, 1] generic where the reference takes other values there.

        All at once first, which is the common case; else one by one, so that a probability keeps its range and the
        tensor beside it does not.
        """
        unit = [path for path, kind in found.items() if kind == "unit"]
        everything: dict[str, Structure] = {path: "generic" if kind == "unit" else kind for path, kind in found.items()}
        if not unit:
            return found
        if self._takes_all(workload, everything):
            self._families[workload] = dict.fromkeys(_DOMAIN_FAMILIES, True)
            return everything
        kept = dict(found)
        for path in unit[:_MAX_WIDENED] if len(unit) > 1 else ():
            tried: dict[str, Structure] = {**kept, path: "generic"}
            if self._takes_all(workload, tried):
                kept = tried
        return kept

    def _takes_all(self, workload: str, structures: Mapping[str, Structure]) -> bool:
        return all(self._takes(workload, family, structures) for family in _DOMAIN_FAMILIES)

    def families(self, workload: str, most: int | None = None) -> tuple[str, ...]:
        """The redraws of this workload, those that show most first, at most ``most``.

        A family stays out where the reference raises on it, or overflows where it does not as drawn: nothing is
        promised there, and a kernel that does better would be called wrong.
        """
        if self.options.distributions == "drawn":
            return ()
        structures, known = self.structures(workload), self._families.setdefault(workload, {})
        taken: list[str] = []
        for family in families_of(structures.values()):
            if family in _BY_TYPE and family not in known and self._has_halves(workload) is not _BY_TYPE[family]:
                known[family] = False
            if family == "ceiling" and torch.device(self.device).type == "cuda":
                known[family] = False  # a place that follows from it may be one too far, which ends the process there
            if family == "normal" and family not in known and self._is_normal(workload, structures):
                known[family] = False  # it was drawn so, several times
            if most is not None and len(taken) >= most:
                break
            if family == "small" and "faint" in taken:
                continue
            if family not in known:
                special = {"edges": self._takes_edges, "ties": self._takes_ties}
                special |= {"empty": self._takes_empty, "shut": self._takes_shut, "open": self._takes_shut}
                special |= {"stretches": self._takes_shut, "ordered": self._takes_ordered}
                takes = special.get(family, self._takes)
                known[family] = self._agrees(functools.partial(takes, workload, family, structures))
            taken += [family] if known[family] else []
        if most is None:
            taken += self._halves(workload, known, structures)
            taken += self._rare_families(workload, known)
        return tuple(taken)

    def _halves(self, workload: str, known: dict[str, bool], structures: Mapping[str, Structure]) -> list[str]:
        """Where the reference rounds: values halfway between two levels, if nothing is rounded before."""
        names = [f"{HALVES} {most}" for most in LEVELS] if "generic" in structures.values() else []
        if any(name in known for name in names) or not names:
            return [name for name in names if known.get(name)]
        until = time.monotonic() + _HALVES_S
        for name in names if "round" in self._operators(workload) else ():
            known[name] = self._agrees(functools.partial(self._takes_halves, workload, name, structures))
            if known[name]:
                return [name]
            if time.monotonic() > until:
                break
        return []

    def _takes_halves(self, workload: str, family: str, structures: Mapping[str, Structure]) -> bool:
        leaves, tree = flatten_call(*self.draw(workload, 1))
        self._redraw_leaves(leaves, structures, family, torch.Generator(device=self.device).manual_seed(1))
        watch = NamingMode()
        with watch:
            outputs = self._outputs(*unflatten_call(tree, leaves))
        fits = _nonfinite(outputs) <= self._nonfinite_as_drawn(workload)
        return watch.halves and fits and self._decides_exactly(leaves, tree)

    def _operators(self, workload: str) -> frozenset[str]:
        """The names of those that forward runs, as drawn."""
        if workload not in self._names:
            watch, drawn = NamingMode(), self.draw(workload, 1)
            with watch:
                self._outputs(*drawn)
            self._names[workload] = frozenset(watch.names)
        return self._names[workload]

    def _takes_ordered(self, workload: str, family: str, structures: Mapping[str, Structure]) -> bool:
        return bool(ORDERING & self._operators(workload)) and self._takes(workload, family, structures)

    def _agrees(self, takes: Callable[[], bool]) -> bool:
        """Not where the reference refuses such values, or fp64 (own kernels inside, checks of a dtype), and not where
        there is no memory to see what it makes of them."""
        try:
            return takes()
        except TargetError as error:
            if is_fatal(error):
                raise
            return False
        except torch.OutOfMemoryError:
            self._give_memory_back()
            return False

    def _give_memory_back(self) -> None:
        """What nobody uses any more: a worker is started next."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _is_normal(self, workload: str, structures: Mapping[str, Structure]) -> bool:
        leaves, _ = flatten_call(*self.draw(workload, 1))
        generic = [leaves[path] for path, structure in structures.items() if structure == "generic"]
        return all(looks_normal(leaf) for leaf in generic)

    def _rare_families(self, workload: str, known: dict[str, bool]) -> list[str]:
        found = self._rarities(workload)
        kinds = [*(found.rare.kinds if found.rare is not None else ()), *found.draws]
        kinds += [AGREEING] if found.agree else []
        for kind in kinds:
            if kind not in known:
                known[kind] = self._takes_rare(workload, kind)
        return [kind for kind in kinds if known[kind]]

    def _rarities(self, workload: str) -> _Rarities:
        """What many draws show of the integers among a call's inputs; so many as take no long."""
        if workload not in self._rare:
            base, until = secrets.randbits(61), time.monotonic() + _RARE_DRAWS_S
            first = flatten_call(*self.draw(workload, base))[0]

            def draws() -> Iterator[tuple[int, Mapping[str, Any]]]:
                yield base, first
                for number in range(1, _RARE_DRAWS):
                    if number > 1 and time.monotonic() > until:
                        return
                    yield base + number, flatten_call(*self.draw(workload, base + number))[0]

            named = named_integers(self.module, self.obj if self.module is None else type(self.module).forward)
            rare = rarities_of((leaves for _, leaves in draws()), named, sizes_near(first))
            until = time.monotonic() + _RARE_DRAWS_S
            known = rare_draws_of(draws(), named) if rare is None else {}
            with _one_thread():
                known |= occasional_draws(self._occasions(workload)) if may_have_occasions(first) else {}
            agree = bool(agreeing(first, torch.Generator(device=self.device).manual_seed(1)))
            self._rare[workload] = _Rarities(rare, known, agree)
        return self._rare[workload]

    def _occasions(self, workload: str) -> Iterator[tuple[int, dict[str, bool]]]:
        """What so many draws show as can be looked at in a while, their inputs first, and what the reference makes of
        some; nothing where these are few."""
        base = secrets.randbits(61)

        def meetings(seed: int) -> dict[str, bool]:
            return meetings_of(flatten_call(*self.draw(workload, seed))[0])

        for look in (meetings, functools.partial(self._decisions, workload)):
            # Of this thread: what waits for others' processes has looked at nothing.
            began, until = time.thread_time(), time.monotonic() + _OCCASIONS_WAIT * _OCCASIONS_S
            found = []
            for seed in range(base, base + _OCCASION_DRAWS):
                found.append((seed, look(seed)))
                spent = time.thread_time() - began
                # The first ones load what the others find.
                slow = len(found) >= _OCCASIONS_FIRST and spent / len(found) > _OCCASIONS_S / _OCCASIONS_LEAST
                if spent > _OCCASIONS_S or slow or time.monotonic() > until:
                    break
            yield from found if len(found) >= _OCCASIONS_LEAST else ()

    def _decisions(self, workload: str, seed: int) -> dict[str, bool]:
        watch = WitnessMode()
        try:
            with watch:
                outputs = self._outputs(*self.draw(workload, seed))
        except TargetError as error:
            if is_fatal(error):
                raise
            return {}
        return decisions_of(watch.found, outputs)

    def _takes_rare(self, workload: str, kind: str) -> bool:
        """Does the reference run there, as finite as drawn, and say which of two values it leaves at one place? Where
        it searches what may be alike now, it may say nothing of which comes first."""
        limit = self._nonfinite_as_drawn(workload)
        for seed in range(1, 1 + _RARE_TRIED):
            leaves, tree = flatten_call(*self.draw(workload, seed))
            self.redraw(workload, leaves, kind, seed)
            watch, search = OverwritingMode(), PointingMode()
            try:
                with watch, search:
                    outputs = self._outputs(*unflatten_call(tree, leaves))
            except TargetError as error:
                if is_fatal(error):
                    raise
                return False
            draws = self._rarities(workload).draws.get(kind)
            extreme, drawn = kind in ("highest", "lowest"), kind in OCCASIONS
            repeats = extreme or drawn or kind in ("repeats", "neighbours") or (draws is not None and draws.repeats)
            endless = _nonfinite(outputs) > limit and not drawn  # what is drawn may be infinite
            if endless or (repeats and watch.found) or (extreme and search.found):
                return False
        return True

    def shortcuts(self, workload: str) -> tuple[str, ...]:
        """Those of the redraws that leave an operation nothing to do on which the reference runs, as in families."""
        structures = self.structures(workload)
        if self.options.distributions == "drawn" or not {"generic", "unit"} & set(structures.values()):
            return ()
        return tuple(family for family in SHORTCUTS if self._takes(workload, family, structures))

    def _takes(self, workload: str, family: str, structures: Mapping[str, Structure]) -> bool:
        """Does the reference run on values redrawn from ``family``, and stay finite where it is finite as drawn?

        Few different values tie, and then either of two places of a maximum is right: not for outputs that would be
        compared as integers, unless each of these tells of one element, by numbers that nobody has rounded. Small ones
        tie where rounding takes their differences, and then fp64 answers otherwise. Where such values meet the limit of
        a comparison as no drawn ones do, rounding decides.
        """
        limit = self._nonfinite_as_drawn(workload)
        leaves, tree = flatten_call(*self.draw(workload, 1))
        generator = torch.Generator(device=self.device).manual_seed(1)
        self._redraw_leaves(leaves, structures, family, generator)
        try:
            outputs = self._outputs(*unflatten_call(tree, leaves))
            if family != "missing" and _nonfinite(outputs) > limit:
                return family == "peaks" and self._overflows_truly(outputs, leaves, tree)
            if not (family in TYING or family == "small"):
                return True
            if self._rounding_decides(workload, family, structures):
                return False
            if not self._breaks_ties(outputs):
                return True
            if family == "integer":
                return self._tells_each(structures, leaves, tree, outputs) and self._decides_exactly(leaves, tree)
            return family == "small" and self._keeps_order(outputs, leaves, tree)
        except TargetError as error:
            if is_fatal(error):
                raise
            return False

    def _overflows_truly(self, outputs: Mapping[str, torch.Tensor], leaves: Mapping[str, Any], tree: Any) -> bool:
        """Is the reference infinite where fp64 is beyond its outputs' range, and nowhere else? Then any kernel is."""
        wide = self._in_fp64(leaves, tree)
        if wide is None:
            return False
        floats = [(value, wide[path]) for path, value in outputs.items() if value.is_floating_point()]
        return all(_beyond_alike(value, exact) for value, exact in floats)

    def _takes_edges(self, workload: str, family: str, structures: Mapping[str, Structure]) -> bool:
        """Are there edges, and whole numbers that tell element by element on which side of them the inputs lie? A place
        in a tensor is no such number: of two equal values either may be the largest."""
        leaves, tree = flatten_call(*self.draw(workload, 1))
        if not self._edges(leaves):
            return False
        outputs = self._outputs(*unflatten_call(tree, leaves))
        return self._tells_each(structures, leaves, tree, outputs) and self._takes(workload, family, structures)

    def _takes_ties(self, workload: str, family: str, structures: Mapping[str, Structure]) -> bool:
        """Are the whole numbers among the outputs places, the first of equal ones by torch's promise, in values that
        nobody has rounded? Other operators may return any of them, and rounding decides which of two sums is larger."""
        found, wide = PointingMode(), PointingMode()

        def places(outputs: dict[str, torch.Tensor]) -> bool:
            whole = [value for value in outputs.values() if value.dtype in WHOLE]
            pointed = all(pointed_by(value, found.found) is not None for value in whole)
            return self._breaks_ties(outputs) and pointed and all(search.first for search in found.found)

        watched = self._watched(workload, family, structures, (found, wide), places)
        return watched and found.searched_the_same(wide)

    def _watched(
        self,
        workload: str,
        family: str,
        structures: Mapping[str, Structure],
        watch: tuple[AbstractContextManager[Any], AbstractContextManager[Any]],
        worth: Callable[[dict[str, torch.Tensor]], bool],
    ) -> bool:
        """Run the reference on values of ``family``, the first of ``watch`` looking on, and, where its outputs are
        ``worth`` it, in fp64, the second one looking on. False where that ends early: also by answers that are less
        finite than as drawn, and by too little memory for fp64."""
        leaves, tree = flatten_call(*self.draw(workload, 1))
        self._redraw_leaves(leaves, structures, family, torch.Generator(device=self.device).manual_seed(1))
        with watch[0]:
            outputs = self._outputs(*unflatten_call(tree, leaves))
        if _nonfinite(outputs) > self._nonfinite_as_drawn(workload) or not worth(outputs):
            return False
        return self._in_fp64(leaves, tree, watch[1]) is not None

    def _takes_empty(self, workload: str, family: str, structures: Mapping[str, Structure]) -> bool:
        """Is there, where all is zero, an answer that is more than nothing, or what rounding leaves of a difference? Of
        zero no error is a small one, and good approximations of functions err there by the last bits of one."""
        if not self._takes(workload, family, structures):
            return False
        leaves, tree = flatten_call(*self.draw(workload, 1))
        usual = self._outputs(*unflatten_call(tree, leaves))
        self._redraw_leaves(leaves, structures, family, torch.Generator(device=self.device).manual_seed(1))
        wide = self._in_fp64(leaves, tree)
        if wide is None:
            return False
        floats = [path for path, value in usual.items() if value.is_floating_point() or value.is_complex()]
        return all(0 < _LEAST_LEFT * _size_of(usual[path]) <= _size_of(wide[path]) for path in floats)

    def _takes_shut(self, workload: str, family: str, structures: Mapping[str, Structure]) -> bool:
        """Does the reference answer by numbers, infinite ones among them, where nothing is left to count?"""
        leaves, tree = flatten_call(*self.draw(workload, 1))
        generator = torch.Generator(device=self.device).manual_seed(1)
        self._redraw_leaves(leaves, structures, family, generator)
        outputs = self._outputs(*unflatten_call(tree, leaves))
        return not any(bool(value.isnan().any()) for value in outputs.values() if value.is_floating_point())

    def _tells_each(
        self, structures: Mapping[str, Structure], leaves: Mapping[str, Any], tree: Any, outputs: Mapping[str, Any]
    ) -> bool:
        """Are there whole numbers among ``outputs``, and does each follow from the inputs' elements at its place? They
        have to stay where half of the other elements change."""
        whole = {path: value for path, value in outputs.items() if value.dtype in WHOLE}
        changing = [path for path, kind in structures.items() if kind == "generic"]
        shapes = {leaves[path].shape for path in changing}
        if not whole or any(value.shape not in shapes for value in whole.values()):
            return False
        generator, mixed = torch.Generator(device=self.device).manual_seed(2), dict(leaves)
        kept = {shape: torch.rand(shape, generator=generator, device=self.device) < 0.5 for shape in shapes}
        for path in changing:
            drawn = leaves[path]
            mixed[path] = torch.where(kept[drawn.shape], drawn, redraw("normal", drawn, "generic", generator))
        found = self._outputs(*unflatten_call(tree, mixed))
        return all(_same_values(found[path][kept[v.shape]], v[kept[v.shape]]) for path, v in whole.items())

    def _decides_exactly(self, leaves: Mapping[str, Any], tree: Any) -> bool:
        """Does the reference round, compare and cast numbers alone that are the same in fp64?"""
        found, wide = DecidingMode(), DecidingMode()
        with found:
            self._outputs(*unflatten_call(tree, leaves))
        return self._in_fp64(leaves, tree, wide) is not None and exact(found.found, wide.found)

    def _rounding_decides(self, workload: str, family: str, structures: Mapping[str, Structure]) -> bool:
        """Oftener than on drawn values, in one of some draws?"""
        for seed in range(1, 1 + _EDGE_DRAWS):
            leaves, tree = flatten_call(*self.draw(workload, seed))
            self._redraw_leaves(leaves, structures, family, torch.Generator(device=self.device).manual_seed(seed))
            found = self._rounded_edges(leaves, tree)
            if found is None or found > (self._edges_as_drawn(workload) or 0):
                return found is not None
        return False

    def _rounded_edges(self, leaves: Mapping[str, Any], tree: Any) -> int | None:
        """How often does rounding decide which branch the reference takes, or what comes first? What it masks or picks
        there is its own; other sums, as good, go the other way. None where it takes no branch."""
        found, wide = MarginMode(), MarginMode()
        with found:
            self._outputs(*unflatten_call(tree, leaves))
        if not found.found or self._in_fp64(leaves, tree, wide) is None:
            return None
        return decided_by_rounding(found.found, wide.found)

    def _edges_as_drawn(self, workload: str) -> int | None:
        if workload not in self._drawn_edges:
            self._drawn_edges[workload] = self._rounded_edges(*flatten_call(*self.draw(workload, 1)))
        return self._drawn_edges[workload]

    def _edges(self, leaves: Mapping[str, Any]) -> list[torch.Tensor]:
        """The sorted tensors among a call's inputs and the module's own, plain attributes among them, which stay where
        they are as a module moves to a device."""
        return ordered_values([*leaves.values(), *(value.to(self.device) for value in self.state().values())])

    def _has_halves(self, workload: str) -> bool:
        leaves, _ = flatten_call(*self.draw(workload, 1))
        dtypes = {leaf.dtype for leaf in leaves.values() if isinstance(leaf, torch.Tensor)}
        return bool(dtypes & {torch.float16, torch.bfloat16})

    def _nonfinite_as_drawn(self, workload: str) -> int:
        if workload not in self._nonfinites:
            self._nonfinites[workload] = _nonfinite(self._outputs(*self.draw(workload, 1)))
        return self._nonfinites[workload]

    def _outputs(self, args: Any, kwargs: Any) -> dict[str, torch.Tensor]:
        """The tensors that the reference returns, weights and state as constructed before and afterwards."""
        with self.as_constructed(), precision_flags(self.options.precision):
            outputs, _ = flatten_output(self.run(self.function, args, kwargs))
        return {path: value for path, value in outputs.items() if isinstance(value, torch.Tensor)}

    def _breaks_ties(self, outputs: Mapping[str, torch.Tensor]) -> bool:
        """Is there an output that may be the place of a maximum, or an order, and is not declared as such?"""
        declared = {*self.options.index_outputs, *(f"out.{path}" for path in self.options.index_outputs)}
        return any(value.dtype in WHOLE and path not in declared for path, value in outputs.items())

    def _keeps_order(self, outputs: Mapping[str, torch.Tensor], leaves: Mapping[str, Any], tree: Any) -> bool:
        """Are the integers among ``outputs`` those that fp64 gives, but for what falls upon a rounding's edge?"""
        wide = self._in_fp64(leaves, tree)
        if wide is None:
            return False
        whole = [(value, wide[path]) for path, value in outputs.items() if value.dtype in WHOLE]
        return all(int((value != other).sum()) <= _EDGES * value.numel() for value, other in whole)

    def _in_fp64(
        self, leaves: Mapping[str, Any], tree: Any, watch: AbstractContextManager[Any] | None = None
    ) -> Mapping[str, Any] | None:
        """What the reference returns in fp64, ``watch`` looking on; None where there is no memory for it."""
        wide = {path: widened(leaf) for path, leaf in leaves.items()}
        mode = Fp64Mode(declared_dtype(leaves, self.state()))
        try:
            with self.as_constructed():
                function = self.wide()  # copied before the mode rewrites what copying does
                with watch or contextlib.nullcontext(), mode, declared_limits(mode.declared):
                    found, _ = flatten_output(self.run(function, *unflatten_call(tree, wide)))
        except torch.OutOfMemoryError:
            self._give_memory_back()
            return None
        return found

    def redraw(self, workload: str, leaves: dict[str, Any], family: str, seed: int) -> None:
        """Put values of ``family`` in place of a call's tensors where that keeps their meaning; "drawn": of none."""
        known = self._rarities(workload) if family in (*RARE, *RARE_DRAWS, *OCCASIONS) else _Rarities()
        rare, draws = known.rare, known.draws
        if rare is not None and family in RARE:
            rare.put(family, leaves, torch.Generator().manual_seed(seed ^ 0x5EED))
        elif family in draws:
            chosen = random.Random(seed).choice(draws[family].seeds)
            _take_over(leaves, flatten_call(*self.draw(workload, chosen))[0])
        elif family == AGREEING:
            leaves.update(agreeing(leaves, torch.Generator(device=self.device).manual_seed(seed ^ 0x5EED)))
        elif family != "drawn":
            generator = torch.Generator(device=self.device).manual_seed(seed ^ 0x5EED)
            self._redraw_leaves(leaves, self.structures(workload), family, generator)

    def _redraw_leaves(
        self, leaves: dict[str, Any], structures: Mapping[str, Structure], family: str, generator: torch.Generator
    ) -> None:
        edges = self._edges(leaves) if family == "edges" else []
        redraw_leaves(leaves, structures, family, generator)
        skewed = between(self._edges(leaves)) if family == "skewed" else []
        for path, leaf in leaves.items() if edges or skewed else ():
            if structures.get(path) == "generic":
                leaf = with_values_of(leaf, edges, generator)
                leaves[path] = with_values_of(leaf, skewed, generator, _SKEWED_SHARE)

    def mutates(self, workload: str) -> frozenset[str]:
        """``input/<path>`` and ``state/<path>`` of the tensors that forward writes, found by running it once."""
        if workload not in self._mutates:
            self.trial_run(workload)
        return self._mutates[workload]

    def draws_numbers(self, workload: str) -> bool:
        """Does forward draw torch's random numbers? Found by running it once."""
        self.mutates(workload)
        return workload in self._draws

    def follows_state(self, workload: str) -> bool:
        """Do outputs depend on state that earlier calls wrote? Found by a second call on the same inputs, once."""
        if workload not in self._follows:
            written = self.mutates(workload)
            stateful = any(path.startswith("state/") for path in written)
            alone = not any(path.startswith("input/") for path in written)
            self._follows[workload] = stateful and alone and self._differs_in_a_second_call(workload)
        return self._follows[workload]

    def keeps_places(self, workload: str) -> bool:
        """Does the forward write whole numbers that it finds its place in something by, so that many calls come to an
        end? Not where it takes any number, as what merely counts does; on a GPU that cannot be tried."""
        if workload not in self._places:
            args, kwargs = self.draw(workload, 0)
            leaves, tree = flatten_call(args, kwargs)
            known = {f"input/{p}": t for p, t in leaves.items()} | {f"state/{p}": t for p, t in self.state().items()}
            written = {path: known[path] for path in self.mutates(workload) if path in known}
            whole = [
                tensor for path, tensor in written.items() if tensor.dtype in WHOLE and not path.endswith(_COUNTER)
            ]
            tried = bool(whole) and self.device.type == "cpu"
            self._places[workload] = not self._takes_any(tree, leaves, whole) if tried else bool(whole)
        return self._places[workload]

    def _takes_any(self, tree: Any, leaves: Mapping[str, Any], whole: Collection[torch.Tensor]) -> bool:
        """Does the forward run where these, which are its own, are far from what they were?"""
        with self.as_constructed(), torch.no_grad():
            for tensor in whole:
                tensor.fill_(min(torch.iinfo(tensor.dtype).max, _MANY_PLACES))
            try:
                self.run(self.function, *unflatten_call(tree, leaves))
            except TargetError as error:
                if is_fatal(error):
                    raise
                return False
        return True

    def _differs_in_a_second_call(self, workload: str) -> bool:
        """From a first one on its inputs, or where the call before was on others. (Of a maximum so far, or a mean, the
        first is not true.)"""
        calls = [self.draw(workload, seed) for seed in (0, 1)]
        first, second = self._outputs_in_a_row(calls[0], calls[0])
        (alone,) = self._outputs_in_a_row(calls[1])
        _, behind = self._outputs_in_a_row(*calls)
        pairs = ((first, second), (alone, behind))
        return not all(_same_values(now[path], value) for before, now in pairs for path, value in before.items())

    def _outputs_in_a_row(self, *calls: tuple[tuple[Any, ...], dict[str, Any]]) -> list[dict[str, torch.Tensor]]:
        """The tensors that each call returns, from the state as constructed on."""
        found = []
        with self.as_constructed(), precision_flags(self.options.precision):
            for args, kwargs in calls:
                outputs, _ = flatten_output(self.run(self.function, args, kwargs))
                # An output may be the state itself.
                found.append({path: v.clone() for path, v in outputs.items() if isinstance(v, torch.Tensor)})
        return found

    def trial_run(self, workload: str) -> tuple[dict[str, Any], Any, Any]:
        """Draw and run once: input leaves, their tree and the output. Remembers what was written."""
        args, kwargs = self.draw(workload, 0)
        leaves, tree = flatten_call(args, kwargs)
        watched = {f"input/{p}": t for p, t in leaves.items() if isinstance(t, torch.Tensor)}
        watched |= {f"state/{p}": t for p, t in self.state().items()}
        before = {path: tensor._version for path, tensor in watched.items()}
        # By value too: batch_norm updates its running statistics without counting a version.
        values = {path: tensor.clone() for path, tensor in self.state().items()}
        generators = [torch.default_generator, *(torch.cuda.default_generators if _has_gpu() else ())]
        states = [generator.get_state() for generator in generators]
        try:
            with precision_flags(self.options.precision):
                output = self.run(self.function, args, kwargs)
        except TargetError:
            self.restore()
            raise
        if not all(torch.equal(g.get_state(), state) for g, state in zip(generators, states, strict=True)):
            self._draws.add(workload)
        written = {path for path, t in watched.items() if t._version != before[path]}
        written |= {f"state/{path}" for path, t in self.state().items() if not _same_values(t, values[path])}
        self._mutates[workload] = frozenset(written)
        if any(path.startswith("state/") for path in self._mutates[workload]):
            self.restore()
        return leaves, tree, output

    def attributes_read(self, workload: str) -> frozenset[str]:
        """The paths of the module's attributes that a call reads; none where the module does not bear being watched."""
        if self.module is None:
            return frozenset()
        args, kwargs = self.draw(workload, 0)
        try:
            with self.as_constructed(), precision_flags(self.options.precision), reads_of(self.module) as found:
                self.run(self.function, args, kwargs)
        except TargetError as error:
            if is_fatal(error):
                raise
            return frozenset()
        return frozenset(found)

    @property
    def function(self) -> Any:
        """What a caller calls: the module instance, or the function."""
        return self.module if self.module is not None else self.obj

    def draw(self, workload: str, seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments of ``workload``, drawn after seeding every generator with ``seed``."""
        make = self.options.input_sets[workload]
        seed_generators(seed)
        drawn = self._guarded(f"drawing inputs of workload {workload!r}", lambda: self._draw_on_device(make, seed))
        args, kwargs = split_call(drawn)
        return _to(args, self.device), _to(kwargs, self.device)

    def _draw_on_device(self, make: Callable[[], Any], seed: int) -> Any:
        if self.device.type == "cpu":
            return make()
        try:
            # Gigabytes drawn on the host would cost more than everything else.
            with torch.device(self.device):
                return make()
        except RuntimeError:
            seed_generators(seed)
            return make()

    def init_arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the target's class is constructed with; nothing for a function."""
        if not isinstance(self.obj, type) or self.options.init is None:
            return (), {}
        return split_init(self.options.init())

    def _construct(self) -> torch.nn.Module | None:
        if not isinstance(self.obj, type):
            return None
        args, kwargs = split_init(self.options.init() if self.options.init is not None else None)
        seed_generators(INIT_SEED)
        module = self._guarded("constructing it", lambda: self.obj(*args, **kwargs))
        if not isinstance(module, torch.nn.Module):
            raise TargetError(f"{self.target.id}: is not an nn.Module", expected="a subclass of torch.nn.Module")
        if self.target.kind != "kernelbench":
            module.train(self.options.mode == "train")
        self.trained = tuple(path for path, parameter in module.named_parameters() if parameter.requires_grad)
        return module.to(self.device).requires_grad_(False)

    def _guarded(self, doing: str, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except (TargetError, torch.OutOfMemoryError):
            raise  # too little memory is the device's lack, not the author's mistake
        except (Exception, SystemExit) as error:
            raise self.error(doing, error) from error

    def error(self, doing: str, error: BaseException) -> TargetError:
        """A TargetError that shows the author's own frames."""
        return TargetError(f"{self.target.id}: {doing} failed\n{user_text(error, self.target.root)}")


#: Modification times of every module imported from below a target's root, by file.
_seen_files: dict[str, int] = {}
_own_path = list(sys.path)


def _load_file(target: Target, python_paths: tuple[str, ...]) -> ModuleType:
    path = Path(target.root) / target.path
    _drop_stale_modules(target)
    entries = (str(path.parent), target.import_root, target.root, *python_paths)
    # Behind everything else, so that a target's neighbours cannot shadow an installed package.
    sys.path[:] = [*_own_path, *dict.fromkeys(entry for entry in entries if entry and entry not in _own_path)]
    importlib.invalidate_caches()
    linecache.checkcache()
    if (path.parent / "__init__.py").exists() and "." in target.module_name:
        module = importlib.import_module(target.module_name)
    else:
        module = _load_plain_file(target, path)
    _seen_files.update((str(file), file.stat().st_mtime_ns) for _, file in _modules_below(target.root) if file.exists())
    return module


def imported(target: Target, python_paths: tuple[str, ...]) -> tuple[Any, TargetOptions]:
    """The target's class or function, and its options. Raises TargetError, and whatever its file raises."""
    namespace = _load_file(target, python_paths)
    found = _find(target, namespace)
    return found, file_options(options_of(found), vars(namespace))


def options_asked(target: Target, python_paths: tuple[str, ...]) -> TargetOptions:
    """The target's options, with nothing done but the import of its file. Raises TargetError."""
    try:
        return imported(target, python_paths)[1]
    except TargetError:
        raise
    except (Exception, SystemExit) as error:
        raise TargetError(f"{target.id}: importing its file failed\n{user_text(error, target.root)}") from error


def _load_plain_file(target: Target, path: Path) -> ModuleType:
    name = f"_forge_target_{hashlib.sha256(f'{path} {target.digest}'.encode()).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _modules_below(root: str) -> list[tuple[str, Path]]:
    """Imported modules (name, file) that lie in ``root`` and are not installed there."""
    found = []
    # By their text: torch alone brings two thousand modules, and a path object for each would cost more than a trial.
    prefix = str(Path(root)).rstrip("/") + "/"
    for name, module in list(sys.modules.items()):
        origin = getattr(module, "__file__", None)
        if origin and origin.startswith(prefix) and "site-packages" not in Path(origin).parts:
            found.append((name, Path(origin)))
    return found


def _drop_stale_modules(target: Target) -> None:
    """Forget modules whose file changed (with their whole package), and another root's modules of the same name."""
    stale = set()
    for name, file in _modules_below(target.root):
        known = _seen_files.get(str(file))
        if known is not None and (not file.exists() or file.stat().st_mtime_ns != known):
            stale.add(name.split(".")[0])
    local = {entry.stem for folder in {Path(target.import_root), (Path(target.root) / target.path).parent}
             if folder.is_dir() for entry in folder.iterdir()}  # fmt: skip
    for name in local & sys.modules.keys():
        origin = getattr(sys.modules[name], "__file__", None) or ""
        if origin in _seen_files and not Path(origin).is_relative_to(target.root):
            stale.add(name)
    for name in [name for name in sys.modules if name.split(".")[0] in stale] if stale else ():
        del sys.modules[name]


def _find(target: Target, namespace: ModuleType) -> Any:
    found: Any = namespace
    for part in target.qualname.split("."):
        found = getattr(found, part, None)
        if found is None:
            raise TargetError(
                f"{target.id}: the file has no {target.qualname} after importing it",
                expected="the decorated class or function at module level",
                remedy="define it unconditionally, or remove the decorator",
            )
    if not callable(found) or (isinstance(found, type) and not issubclass(found, torch.nn.Module)):
        kind = "a plain class" if isinstance(found, type) else f"a {type(found).__name__}"
        raise TargetError(f"{target.id}: is {kind}", expected="an nn.Module class or a function")
    return found


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Many small calls: a team of threads would wait for each of them beside other processes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _same_values(first: torch.Tensor, second: torch.Tensor) -> bool:
    return bool(torch.equal(first, second) or ((first == second) | ((first != first) & (second != second))).all())


def _beyond_alike(value: torch.Tensor, exact: torch.Tensor) -> bool:
    most = torch.finfo(value.dtype).max
    signed = exact.sign() == value.sign()
    inside, outside = exact.abs() <= most / 0.98, (exact.abs() >= 0.98 * most) & signed
    return not bool((value.isnan() | exact.isnan()).any()) and bool(torch.where(value.isinf(), outside, inside).all())


def _nonfinite(outputs: Mapping[str, torch.Tensor]) -> int:
    """How many elements are NaN or infinite."""
    floats = [value for value in outputs.values() if value.is_floating_point() or value.is_complex()]
    # Types of one byte have no isfinite.
    floats = [value.float() if value.itemsize == 1 else value for value in floats]
    return sum(value.numel() - int(value.isfinite().sum()) for value in floats)


def _take_over(leaves: dict[str, Any], others: Mapping[str, Any]) -> None:
    """Another draw's leaves, unless those of a variant are of other shapes."""
    shapes, wanted = ({p: getattr(leaf, "shape", None) for p, leaf in call.items()} for call in (leaves, others))
    if shapes == wanted:
        leaves.update(others)


def _size_of(value: torch.Tensor) -> float:
    """The root of the mean square of what is finite."""
    size = value.abs().double().nan_to_num(posinf=0.0)
    return float(size.square().mean().sqrt()) if value.numel() else 0.0


def redraw_leaves(
    leaves: dict[str, Any], structures: Mapping[str, Structure], family: str, generator: torch.Generator
) -> None:
    """Put values of ``family`` in place of the tensors whose structure allows it."""
    shared = 0
    if family in ("faint", "small", "alike", "levels", "padded"):
        shared = int(torch.randint(1 << 31, (1,), generator=generator, device=generator.device))
    for path, leaf in leaves.items():
        if isinstance(leaf, torch.Tensor) and structures.get(path, "drawn") != "drawn":
            leaves[path] = redraw(family, leaf, structures[path], generator, shared)


def _input_name(function: Callable[..., Any], path: str) -> str:
    head, *rest = path.removeprefix("kw.").split(".")
    inner = "".join(f"[{part}]" if part.isdecimal() else f"[{part!r}]" for part in rest)
    if path.startswith("kw."):
        return f"input {head}{inner}"
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return f"input {path}"  # a callable of C code, or one that hides its signature
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    number = int(head)
    if number < len(places):
        return f"input {path} ({places[number].name}{inner})"
    rest_name = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "")
    return f"input {path} ({rest_name}[{number - len(places)}]{inner})" if rest_name else f"input {path}"


@functools.lru_cache(maxsize=1)
def _has_gpu() -> bool:
    return torch.cuda.is_available()


def seed_generators(seed: int) -> None:
    """Seed torch's, Python's and NumPy's generators."""
    if _has_gpu():
        torch.manual_seed(seed)
    else:
        # torch would note, with a stack trace each time, to seed devices that are not there.
        torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % (1 << 32))


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to(device)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_to(item, device) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_to(item, device) for item in value)
    if isinstance(value, dict):
        return {key: _to(item, device) for key, item in value.items()}
    return value
