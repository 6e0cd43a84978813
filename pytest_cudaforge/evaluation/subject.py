"""A target on a device: its module, its inputs, its reference run. In the oracle's process only."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import random
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from pytest_cudaforge.errors import TargetError
from pytest_cudaforge.evaluation.domain import WHOLE, Domain
from pytest_cudaforge.evaluation.exchanges import Moved
from pytest_cudaforge.evaluation.faults import is_fatal, user_text
from pytest_cudaforge.evaluation.importing import find, load_file
from pytest_cudaforge.evaluation.measures import nonfinite, same_values
from pytest_cudaforge.evaluation.precision import Fp64Mode, declared_dtype, declared_limits, precision_flags, widened
from pytest_cudaforge.evaluation.reads import reads_of
from pytest_cudaforge.evaluation.weights import (
    EMPTYING,
    GAPS,
    HABITS,
    biases_of,
    exchange_weights,
    exchangeable_weights,
    move_weights,
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

__all__ = ["INIT_SEED", "Subject", "Weights", "in_one_storage", "seed_generators"]

INIT_SEED = 20_240_229  # weights as constructed are the same in every process; verdicts re-randomise them
#: How the names of torch's own counters end, by which nothing finds its place.
_COUNTER = "num_batches_tracked"
#: More than any check makes calls, and no more than a loop or a tensor of so many bears.
_MANY_PLACES = 1 << 20


@dataclass(frozen=True)
class Weights:
    """How values of a module's parameters, and of its running statistics, come about. ``seed`` None: as constructed.

    Those at the paths ``kept`` are as constructed in any case. ``exchanged``: a few elements of the others change
    places, as this seed says, or two of ``exchanged_alone``, or they are ``moved`` (how, and by which seed).
    ``others``: paths of those that are drawn from ``others_seed`` instead. ``unbiased``: what is added is zero.
    """

    seed: int | None = None
    kept: tuple[str, ...] = ()
    exchanged: int | None = None
    others: tuple[str, ...] = ()
    others_seed: int | None = None
    exchanged_alone: str = ""
    moved: tuple[tuple[Moved, int], ...] = ()
    unbiased: bool = False


class Subject:
    """One loaded target on one device. Raises TargetError with the author's own traceback wherever its code fails."""

    #: What training may do to weights that drawn ones do in turn, where the reference bears it.
    habits: tuple[str, ...] = HABITS
    #: Whether the fp64 form tells which sums are behind which output.
    tells_sums_apart = True

    def __init__(self, target: Target, device: str, python_paths: tuple[str, ...] = ()) -> None:
        self.target = target
        self.device = torch.device(device)
        namespace = self._guarded("importing its file", lambda: load_file(target, python_paths))
        self.obj = find(target, namespace)
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
        #: Paths of what it adds.
        self.biases: tuple[str, ...] = biases_of(self.module) if self.module is not None else ()
        self._wide: torch.nn.Module | None = None
        #: torch.compile's version, made once, and why it failed where it did.
        self.compiled: Any = None
        self.compile_note = ""
        #: Its kernels by workload, as text.
        self.generated: dict[str, str] = {}
        #: What else its calls may be given.
        self.domain = self._new_domain()
        self._mutates: dict[str, frozenset[str]] = {}
        #: Workloads whose forward draws random numbers.
        self._draws: set[str] = set()
        self._follows: dict[str, bool] = {}
        self._places: dict[str, bool] = {}
        self._borne: tuple[str, ...] | None = None

    def _new_domain(self) -> Domain:
        return Domain(self)

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
            for how, seed in wanted.moved:
                move_weights(self.module, seed, how, wanted.kept, self._borne or ())
        if wanted.unbiased:
            added = [path for path in self.biases if path not in wanted.kept]
            self._put({path: torch.zeros_like(self._constructed[path]) for path in added})
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
        self._put(self._constructed)
        if not takes_on(self.module, habit):
            return False
        try:
            # Of many rows that are nothing either may be the best, to whoever looks for that.
            if habit in GAPS and self.domain.chooses(next(iter(self.options.input_sets))):
                return False
            plain = nonfinite(self._outputs_with(()))
            worn = self._outputs_with((habit,))
        except TargetError as error:
            if is_fatal(error):
                raise
            return False
        return nonfinite(worn) <= plain and not (habit in EMPTYING and self.domain.breaks_ties(worn))

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

    @contextlib.contextmanager
    def unbiased(self) -> Iterator[None]:
        """As constructed means that what is added is zero, inside."""
        constructed = self._constructed
        self._constructed = constructed | {path: torch.zeros_like(constructed[path]) for path in self.biases}
        self.restore()
        try:
            yield
        finally:
            self._constructed = constructed
            self.restore()

    def never_redrawn(self) -> frozenset[str]:
        """Paths of the module's tensors, parameters aside, that are as constructed in every trial."""
        if self.module is None:
            return frozenset()
        with self.as_constructed():
            self.set_weights(Weights(1))
            kept = {path for path, tensor in self.state().items() if same_values(tensor, self._constructed[path])}
        return frozenset(kept - {path for path, _ in self.module.named_parameters(remove_duplicate=False)})

    # -- what its inputs are like

    def input_name(self, path: str) -> str:
        """An input leaf as the caller knows it: ``input 0 (x)``, ``input 1.0 (states[0])``, ``input mask``."""
        return _input_name(self.code, path)

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

    def give_memory_back(self) -> None:
        """What nobody uses any more: a worker is started next."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def outputs(self, args: Any, kwargs: Any) -> dict[str, torch.Tensor]:
        """The tensors that the reference returns, weights and state as constructed before and afterwards."""
        with self.as_constructed(), precision_flags(self.options.precision):
            outputs, _ = flatten_output(self.run(self.function, args, kwargs))
        return {path: value for path, value in outputs.items() if isinstance(value, torch.Tensor)}

    def in_fp64(
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
            self.give_memory_back()
            return None
        return found

    def mutates(self, workload: str) -> frozenset[str]:
        """``input/<path>`` and ``state/<path>`` of the tensors that forward writes, found by running it once."""
        if workload not in self._mutates:
            self.trial_run(workload)
        return self._mutates[workload]

    def in_one_storage(self, outputs: Mapping[str, Any]) -> tuple[str, ...]:
        """Paths of what a call has just returned that lie in the storage of one before them."""
        return in_one_storage(outputs)

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
        return not all(same_values(now[path], value) for before, now in pairs for path, value in before.items())

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
        written |= {f"state/{path}" for path, t in self.state().items() if not same_values(t, values[path])}
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
    def code(self) -> Any:
        """What its author wrote: the module's forward, or the function itself."""
        return self.obj if self.module is None else self.module.forward

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


def in_one_storage(outputs: Mapping[str, Any]) -> tuple[str, ...]:
    """Paths of the tensors that lie in the storage of one before them."""
    seen, found = set[int](), []
    for path, value in outputs.items():
        if isinstance(value, torch.Tensor) and value.numel():
            memory = value.untyped_storage().data_ptr()
            found += [path] if memory in seen else []
            seen.add(memory)
    return tuple(found)
