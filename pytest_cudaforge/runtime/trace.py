"""plan.py and a signature in, a TracedPlan out: buffers, launches, library calls and outputs as plain data.

No torch, unless the plan calls ``op``; its :class:`OpShapes` then does. The result depends on the text and the
signature alone; every trace runs twice and compares.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from pytest_cudaforge.errors import PlanError, PlanLimitError
from pytest_cudaforge.languages import instances
from pytest_cudaforge.plan import (
    CONSTANT_PATTERN,
    KERNEL_PATTERN,
    MAX_BUFFERS,
    MAX_BYTES,
    MAX_LAUNCH_ARGS,
    MAX_LAUNCHES,
    OP_PATTERN,
    Buffer,
    Constants,
    Launch,
    LaunchPlan,
    LibraryCall,
    Step,
    TensorSpec,
    TracedPlan,
    View,
    Zero,
    contiguous_strides,
    distinct_constants,
    encode,
    output_views,
    scratch_layout,
)
from pytest_cudaforge.runtime import geometry, gradients, interpreter
from pytest_cudaforge.runtime.geometry import integer
from pytest_cudaforge.runtime.interpreter import ArgumentMismatch, Program, Run
from pytest_cudaforge.runtime.signature import Signature, flatten_output, unflatten_call, unflatten_output
from pytest_cudaforge.runtime.standins import DeviceStandIn, ModuleStandIn, Storage, TensorStandIn, tensor_for
from pytest_cudaforge.runtime.values import NUMBERS, Meter, Native, bind, describe, dtype_named

MAX_OUTPUTS = 4096
MAX_CONSTANT_SETS = 256
MAX_BLOCK_THREADS = 1024
MAX_GRID = (2**31 - 1, 65_535, 65_535)
MAX_BLOCK = (1024, 1024, 64)


class OpShapes(Protocol):
    """Output specs of ATen calls; :class:`pytest_cudaforge.runtime.library.MetaShapes` is the torch-backed one."""

    def resolve(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[TensorSpec, ...]:
        """Specs of the fresh outputs of ``op(name, *args, **kwargs)``, where tensors are given as TensorSpecs.

        Empty for an ``out`` overload. Raises PlanError where the call is unknown, wrong or not allowed.
        """
        ...


def trace(source: str, signature: Signature, ops: OpShapes | None = None, function: str = "plan") -> TracedPlan:
    """Run plan.py on stand-ins of ``signature``, twice. ``ops`` None: torch's meta device, imported when first needed.

    ``function`` "plan_backward": its call has forward's inputs, ``out`` and ``grad_out`` (see runtime.gradients).

    Raises PlanSyntaxError, PlanError, PlanLimitError (each with the line), Unsupported where plan.py says so.
    """
    program = interpreter.parse(source)
    shapes = _RememberedShapes(ops)
    once = _trace_backward if function == gradients.FUNCTION else _trace_once
    first = once(program, signature, shapes)
    second = once(program, signature, shapes)
    # Equal text decides where values do not: a NaN differs from itself.
    if second != first and encode(second) != encode(first):
        raise PlanError("tracing twice gave two different plans", expected="a plan that depends on the signature alone")
    return first


class _RememberedShapes:
    """Asks ``ops`` once for each call: torch's meta kernels are most of what tracing a library call costs."""

    def __init__(self, ops: OpShapes | None) -> None:
        self._ops = ops
        self._known: dict[str, tuple[TensorSpec, ...]] = {}

    def resolve(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[TensorSpec, ...]:
        if self._ops is None:
            from pytest_cudaforge.runtime.library import MetaShapes

            self._ops = MetaShapes()
        key = repr((name, args, kwargs))
        if key not in self._known:
            self._known[key] = self._ops.resolve(name, args, kwargs)
        return self._known[key]


def _trace_once(program: Program, signature: Signature, ops: OpShapes) -> TracedPlan:
    device = DeviceStandIn(signature.device)
    module = None if signature.module is None else ModuleStandIn(signature.module, "module", device)
    keywords: dict[str, Any] = {}
    prepare, shifted = None, frozenset[str]()
    if "prepare" in program.functions:
        _check_prepare(program, module)
        prepare, keywords["prepared"] = _trace_prepare(program, signature, module, device, ops)
        shifted = _shifted(prepare)
    args, kwargs = unflatten_call(signature.input_tree, _input_leaves(signature, device))
    lead = () if module is None else (module,)
    recorder = Recorder(signature, device, ops, shifted)
    return TracedPlan(recorder.record(program, "plan", (*lead, *args), {**kwargs, **keywords}), prepare)


def _trace_backward(program: Program, signature: Signature, ops: OpShapes) -> TracedPlan:
    device = DeviceStandIn(signature.device)
    call = gradients.BackwardCall(program, signature)
    lead = () if signature.module is None else (ModuleStandIn(signature.module, "module", device),)
    args, kwargs = unflatten_call(signature.input_tree, _input_leaves(signature, device))
    recorder = Recorder(signature, device, ops)
    given = call.arguments(kwargs)
    return TracedPlan(recorder.record(program, gradients.FUNCTION, (*lead, *args), given, call.returned))


def _input_leaves(signature: Signature, device: DeviceStandIn) -> dict[str, Any]:
    return {
        path: tensor_for(Storage("input", leaf, path), device, path) if isinstance(leaf, TensorSpec) else leaf
        for path, leaf in signature.inputs
    }


def _check_prepare(program: Program, module: ModuleStandIn | None) -> None:
    node = program.functions["plan"].args
    names = [arg.arg for arg in (*node.posonlyargs, *node.args, *node.kwonlyargs)]
    line = program.functions["prepare"].lineno
    if module is None:
        raise PlanError(
            "prepare() in a plan for a function", line=line, expected="a module: only weights can be prepared"
        )
    if "prepared" not in names:
        raise PlanError(
            "plan() does not take what prepare() returns",
            line=program.functions["plan"].lineno,
            expected=f"a last parameter named prepared: def plan({', '.join([*names, 'prepared'])})",
        )


def _trace_prepare(
    program: Program, signature: Signature, module: ModuleStandIn | None, device: DeviceStandIn, ops: OpShapes
) -> tuple[LaunchPlan, Any]:
    recorder = Recorder(signature, device, ops)
    plan = recorder.record(program, "prepare", (module,), {})
    leaves, tree = flatten_output(_output_specs(plan, plan.outputs))
    prepared = {
        path: tensor_for(Storage("prepared", leaf, path), device, f"prepared ({path})")
        if isinstance(leaf, TensorSpec)
        else leaf
        for path, leaf in leaves.items()
    }
    return plan, unflatten_output(tree, prepared)


def _shifted(prepare: LaunchPlan) -> frozenset[str]:
    """Paths of prepared values that do not begin at an aligned address."""
    leaves, _ = flatten_output(_output_specs(prepare, prepare.outputs))
    paths = [path for path, leaf in leaves.items() if isinstance(leaf, TensorSpec)]
    found = zip(paths, output_views(prepare.outputs), strict=True)
    return frozenset(
        path for path, view in found if not instances.keeps_alignment(view, prepare.buffers[view.buffer].spec)
    )


def _output_specs(plan: LaunchPlan, outputs: Any) -> Any:
    if isinstance(outputs, View):
        return TensorSpec(outputs.shape, plan.buffers[outputs.buffer].spec.dtype, outputs.strides)
    if isinstance(outputs, (list, tuple)):
        items = [_output_specs(plan, item) for item in outputs]
        return items if isinstance(outputs, list) else tuple(items)
    if isinstance(outputs, dict):
        return {key: _output_specs(plan, item) for key, item in outputs.items()}
    return outputs


class Recorder:
    """Collects the buffers and steps of one LaunchPlan while plan.py runs."""

    def __init__(
        self, signature: Signature, device: DeviceStandIn, ops: OpShapes, shifted: frozenset[str] = frozenset()
    ) -> None:
        self._signature = signature
        self._shifted = shifted
        self._device = device
        self._ops = ops
        self._buffers: list[Buffer] = []
        self._indices: dict[int | tuple[str, str], int] = {}
        self._kept: list[Storage] = []
        self._constants: set[Constants] = set()
        self._steps: list[Step] = []
        self._launches = 0
        self._run: Run | None = None

    def record(
        self,
        program: Program,
        function: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        returned: Callable[[Any], Any] = lambda result: result,
    ) -> LaunchPlan:
        """Call ``function`` of the plan with stand-ins and keep what it did. Raises PlanError, Unsupported.

        ``returned`` makes the plan's outputs of what the function returned.
        """
        calls = {"empty": self._empty, "zeros": self._zeros, "launch": self._launch, "op": self._op}
        names: dict[str, Any] = {name: Native(name, call) for name, call in calls.items()}
        run = self._run = program.start({**names, "device": self._device})
        try:
            result = run.call(function, args, kwargs)
        except ArgumentMismatch as error:
            raise _explained(error, function, args, kwargs) from None
        plan: LaunchPlan = run.located(lambda: self._finished(returned(result), function))
        return plan

    @property
    def _line(self) -> int:
        return self._run.line if self._run is not None else 0

    # -- buffers -------------------------------------------------------------------------------------------------

    def _index(self, storage: Storage) -> int:
        """The storage's buffer; made at first use, so that a plan binds only what it touches."""
        # Two paths of stand-ins may lead to one input or weight; scratch is itself.
        key = (storage.role, storage.source) if storage.source else id(storage)
        if key not in self._indices:
            if len(self._buffers) >= MAX_BUFFERS:
                raise PlanLimitError(f"more than {MAX_BUFFERS} buffers")
            self._indices[key] = len(self._buffers)
            self._kept.append(storage)  # keeps id() unique
            self._buffers.append(Buffer(storage.role, storage.spec, storage.source))
        return self._indices[key]

    def _view(self, tensor: TensorStandIn) -> View:
        return tensor.view_of(self._index(tensor.storage))

    def _scratch(self, spec: TensorSpec) -> TensorStandIn:
        memory = self._signature.device.memory_bytes
        cap = min(MAX_BYTES, memory) if memory > 0 else MAX_BYTES
        if spec.extent_bytes > cap:
            raise PlanLimitError(
                f"a buffer of shape {spec.shape} and dtype {spec.dtype} takes {spec.extent_bytes} bytes",
                expected=f"at most the {cap} bytes of the device",
            )
        return tensor_for(Storage("scratch", spec), self._device, "")

    def _fresh(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> TensorStandIn:
        bound = bind(name, args, kwargs, ("shape", "dtype"), {"device": None}, positional=2)
        if bound["device"] is not None and not isinstance(bound["device"], DeviceStandIn):
            raise PlanError(f"{name}() on device {describe(bound['device'])}", remedy="leave device out: there is one")
        shape = bound["shape"]
        sizes = geometry.sizes([shape] if not isinstance(shape, (tuple, list)) else shape, f"{name}() shape")
        for i, size in enumerate(sizes):
            if size < 0:
                raise PlanError(f"{name}() shape[{i}] is {size}", expected="a size of at least 0")
            if size > MAX_BYTES:
                raise PlanLimitError(f"{name}() shape[{i}] is {size}", expected=f"at most {MAX_BYTES}")
        dtype = dtype_named(bound["dtype"], f"{name}() dtype")
        return self._scratch(TensorSpec(sizes, str(dtype), contiguous_strides(sizes)))

    def _empty(self, meter: Meter, args: list[Any], kwargs: dict[str, Any]) -> TensorStandIn:
        return self._fresh("empty", args, kwargs)

    def _zeros(self, meter: Meter, args: list[Any], kwargs: dict[str, Any]) -> TensorStandIn:
        tensor = self._fresh("zeros", args, kwargs)
        self._add(Zero(self._index(tensor.storage)))
        return tensor

    def _add(self, step: Step) -> None:
        if not isinstance(step, Zero):
            self._launches += 1
        if self._launches > MAX_LAUNCHES or len(self._steps) >= 2 * MAX_LAUNCHES:
            raise PlanLimitError(f"more than {MAX_LAUNCHES} launches", remedy="loop inside a kernel")
        self._steps.append(step)

    # -- launches ------------------------------------------------------------------------------------------------

    def _launch(self, meter: Meter, args: list[Any], kwargs: dict[str, Any]) -> None:
        language = self._signature.language
        defaults = {**_LAUNCH_DEFAULTS, **instances.OPTIONS} if language == "triton" else dict(_LAUNCH_DEFAULTS)
        bound = bind("launch", args, kwargs, ("kernel", "args"), defaults, positional=1)
        if language == "cpp":
            _check_no_geometry(bound)
        if language == "triton":
            _check_no_block(bound)
        grid = triple(bound["grid"], "grid")
        block = triple(bound["block"], "block")
        cluster = None if bound["cluster"] is None else triple(bound["cluster"], "cluster")
        shared_bytes = integer(bound["shared_bytes"], "shared_bytes")
        cooperative = bound["cooperative"]
        if type(cooperative) is not bool:
            raise PlanError(f"launch() cooperative is {describe(cooperative)}", expected="True or False")
        self._check_limits(grid, block, shared_bytes, cluster)
        pattern = _TRITON_CONSTANT if language == "triton" else CONSTANT_PATTERN
        launch = Launch(
            kernel=kernel_expression(bound["kernel"]),
            args=self._arguments(meter, bound["args"]),
            grid=grid,
            block=block,
            shared_bytes=shared_bytes,
            constants=constants(bound["constants"], pattern),
            cluster=cluster,
            cooperative=cooperative,
            line=self._line,
        )
        self._constants.add(launch.constants)
        if len(self._constants) > MAX_CONSTANT_SETS:
            raise PlanLimitError(
                f"more than {MAX_CONSTANT_SETS} different sets of constants, each a compilation of its own",
                remedy="pass what changes from launch to launch as an argument",
            )
        self._add(self._instance(launch, bound) if language == "triton" else launch)

    def _instance(self, launch: Launch, bound: dict[str, Any]) -> Launch:
        """The launch with its kernel's name as Triton's compiler is asked for it."""
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", launch.kernel):
            raise PlanError(
                f'launch() kernel is "{launch.kernel}"', expected="the name of a @triton.jit function in kernel.py"
            )
        specs = [buffer.spec for buffer in self._buffers]
        shifted = {
            i for i, buffer in enumerate(self._buffers) if buffer.role == "prepared" and buffer.source in self._shifted
        }
        words = tuple(instances.argument_word(argument, specs, i, shifted) for i, argument in enumerate(launch.args))
        instance = instances.Instance(launch.kernel, words, _options(bound))
        return replace(launch, kernel=instance.expression)

    def _check_limits(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        cluster: tuple[int, int, int] | None,
    ) -> None:
        for name, sizes, caps in (("grid", grid, MAX_GRID), ("block", block, MAX_BLOCK)):
            for i, (size, cap) in enumerate(zip(sizes, caps, strict=True)):
                if size > cap:
                    hint = "put the long dimension first" if name == "grid" and i else ""
                    raise PlanError(f"launch() {name}[{i}] is {size}", expected=f"at most {cap}", remedy=hint)
        threads = block[0] * block[1] * block[2]
        if threads > MAX_BLOCK_THREADS:
            raise PlanError(f"launch() block {block} has {threads} threads", expected=f"at most {MAX_BLOCK_THREADS}")
        most = self._signature.device.max_shared_bytes
        if shared_bytes < 0 or (most > 0 and shared_bytes > most):
            raise PlanError(
                f"launch() shared_bytes is {shared_bytes}", expected=f"0 to {most} (device.max_shared_bytes)"
            )
        if cluster is not None and any(size % part for size, part in zip(grid, cluster, strict=True)):
            raise PlanError(f"launch() grid {grid} with cluster {cluster}", expected="a grid that is a multiple of it")

    def _arguments(self, meter: Meter, args: Any) -> tuple[Any, ...]:
        if not isinstance(args, (tuple, list)):
            raise PlanError(
                f"launch() args is {describe(args)}", expected="a tuple", remedy="write args=(x,) for one argument"
            )
        if len(args) > MAX_LAUNCH_ARGS:
            raise PlanLimitError(f"launch() with {len(args)} args", expected=f"at most {MAX_LAUNCH_ARGS}")
        meter.charge(len(args))
        return tuple(self._argument(arg, i) for i, arg in enumerate(args))

    def _argument(self, arg: Any, place: int) -> Any:
        if isinstance(arg, TensorStandIn):
            return self._view(arg)
        if arg is None or type(arg) in (bool, float):
            return arg
        if type(arg) is int:
            if not -(1 << 63) <= arg < 1 << 64:
                raise PlanError(f"launch() args[{place}] is {arg}", expected="an integer of at most 64 bits")
            return arg
        advice = "pass each number as an argument of its own" if isinstance(arg, (tuple, list)) else ""
        if isinstance(arg, str):
            advice = 'choose the kernel by its expression, e.g. "norm<float>", or use constants='
        raise PlanError(
            f"launch() args[{place}] is {describe(arg)}",
            expected="a tensor, an int, a float, a bool or None",
            remedy=advice,
        )

    # -- library calls -------------------------------------------------------------------------------------------

    def _op(self, meter: Meter, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if not args or type(args[0]) is not str or not OP_PATTERN.fullmatch(args[0]):
            said = describe(args[0]) if args else "nothing"
            raise PlanError(f"op() of {said}", expected='the name of an ATen operator, e.g. op("aten.mm", a, b)')
        name = args[0]
        specs = self._ops.resolve(name, *_mapped(meter, (args[1:], kwargs), lambda tensor: tensor.spec))
        results = [self._scratch(spec) for spec in specs]
        views, named = _mapped(meter, (args[1:], kwargs), self._view)
        outputs = tuple(self._index(result.storage) for result in results)
        self._add(LibraryCall(name, tuple(views), tuple(named.items()), outputs, self._line))
        if not results:
            return _written(kwargs)
        return results[0] if len(results) == 1 else tuple(results)

    # -- the end -------------------------------------------------------------------------------------------------

    def _finished(self, result: Any, function: str) -> LaunchPlan:
        outputs = self._output(result, function, 0, [0])
        launches = [step for step in self._steps if isinstance(step, Launch)]
        plan = LaunchPlan(tuple(self._buffers), tuple(self._steps), outputs, distinct_constants(launches))
        self._check_total(plan)
        return plan

    def _output(self, value: Any, function: str, depth: int, count: list[int]) -> Any:
        count[0] += 1
        if depth > 16 or count[0] > MAX_OUTPUTS:
            raise PlanLimitError(f"{function}() returns too many nested values", expected=f"at most {MAX_OUTPUTS}")
        if isinstance(value, TensorStandIn):
            return self._view(value)
        if value is None or type(value) in NUMBERS:
            return value
        if isinstance(value, str):
            return str(value)
        if isinstance(value, (tuple, list)):
            items = [self._output(item, function, depth + 1, count) for item in value]
            return items if isinstance(value, list) else tuple(items)
        if isinstance(value, dict) and all(type(key) in (str, int) for key in value):
            return {key: self._output(item, function, depth + 1, count) for key, item in value.items()}
        raise PlanError(
            f"{function}() returns {describe(value)}", expected="tensors, numbers and None in lists, tuples and dicts"
        )

    def _check_total(self, plan: LaunchPlan) -> None:
        reached = plan.output_buffers
        fresh = sum(plan.buffers[i].spec.extent_bytes for i in reached if plan.buffers[i].role == "scratch")
        total = fresh + scratch_layout(plan).total_bytes
        memory = self._signature.device.memory_bytes
        cap = min(MAX_BYTES, memory) if memory > 0 else MAX_BYTES
        if total > cap:
            raise PlanLimitError(f"the plan needs {total} bytes at once", expected=f"at most the {cap} of the device")


def _explained(error: ArgumentMismatch, function: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PlanError:
    """The mismatch of plan() or prepare() with what the call gives; that of another function as it is."""
    said = error.what.removeprefix(f"plan.py:{error.line}: ")
    if not said.startswith(f"{function}() "):
        return error
    given = [describe(arg) for arg in args] + [f"{name}={describe(value)}" for name, value in kwargs.items()]
    remedy = f"the call to be planned gives ({', '.join(given)})"
    return PlanError(said, line=error.line, expected=error.expected, remedy=remedy)


_LAUNCH_DEFAULTS: dict[str, Any] = {
    "grid": 1,
    "block": 1,
    "shared_bytes": 0,
    "constants": None,
    "cluster": None,
    "cooperative": False,
}


def _check_no_geometry(bound: dict[str, Any]) -> None:
    for name, default in _LAUNCH_DEFAULTS.items():
        if name == "constants":
            continue
        value = bound[name]
        if value != default and value not in ((1,), (1, 1), (1, 1, 1), [1]):
            raise PlanError(
                f"launch() {name} is {describe(value)} in a cpp plan",
                expected=f"no {name}: a cpp kernel is one function call",
                remedy="loop inside the kernel, with `#pragma omp parallel for`",
            )


_TRITON_CONSTANT = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
#: Launch options of Triton's: the least, the most, whether it must be a power of two.
_OPTION_RANGES = {
    "num_warps": (1, 32, True),
    "num_stages": (1, 32, False),
    "num_ctas": (1, 8, True),
    "maxnreg": (0, 255, False),
}


def _options(bound: dict[str, Any]) -> tuple[tuple[str, int], ...]:
    found = []
    for name, (least, most, power) in _OPTION_RANGES.items():
        value = integer(bound[name], f"launch() {name}")
        if not least <= value <= most or (power and value & (value - 1)):
            kind = "a power of two" if power else "an integer"
            raise PlanError(f"launch() {name} is {value}", expected=f"{kind} from {least} to {most}")
        found.append((name, value))
    return tuple(found)


def _check_no_block(bound: dict[str, Any]) -> None:
    """Triton's compiler decides on these."""
    remedies = {
        "block": "num_warps=4 gives 128 threads; sizes of tiles are constants, e.g. constants={'BLOCK': 1024}",
        "shared_bytes": "Triton takes what it needs",
        "cluster": "num_ctas=2 makes clusters of two blocks",
    }
    for name, remedy in remedies.items():
        if bound[name] != _LAUNCH_DEFAULTS[name]:
            raise PlanError(
                f"launch() {name} is {describe(bound[name])} in a Triton plan", expected=f"no {name}", remedy=remedy
            )


def triple(value: Any, name: str) -> tuple[int, int, int]:
    """A grid, block or cluster as three positive integers. Raises PlanError naming the part that is off."""
    parts = list(value) if isinstance(value, (tuple, list)) else [value]
    if not 1 <= len(parts) <= 3:
        raise PlanError(f"launch() {name} has {len(parts)} sizes", expected="an integer or 1 to 3 integers")
    sizes = [integer(part, f"launch() {name}[{i}]") for i, part in enumerate(parts)]
    for i, size in enumerate(sizes):
        if size < 1:
            remedy = "for an empty tensor return before the launch: `if x.numel() == 0: return y`" if size == 0 else ""
            raise PlanError(f"launch() {name}[{i}] is {size}", expected="at least 1", remedy=remedy)
    x, y, z = [*sizes, 1, 1][:3]
    return x, y, z


def kernel_expression(value: Any) -> str:
    """A C++ expression that names a kernel. Raises PlanError for anything that could be more."""
    if type(value) is not str or not KERNEL_PATTERN.fullmatch(value):
        raise PlanError(
            f"launch() kernel is {describe(value)}", expected='a C++ name or template instance, e.g. "norm<float, 4>"'
        )
    return value


def constants(value: Any, pattern: re.Pattern[str] = CONSTANT_PATTERN) -> Constants:
    """``constants=`` as sorted pairs. Raises PlanError naming the entry that is off."""
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise PlanError(f"launch() constants is {describe(value)}", expected='a dict such as {"COLS": cols}')
    pairs: list[tuple[str, int | float]] = []
    for name, number in value.items():
        if type(name) is not str or not pattern.fullmatch(name):
            upper = re.sub(r"[^A-Z0-9_]", "_", str(name).upper())[:40]
            raise PlanError(
                f"launch() constants has the name {describe(name)}",
                expected="names of A-Z, 0-9 and _",
                remedy=f"call it {upper!r}" if CONSTANT_PATTERN.fullmatch(upper) else "",
            )
        if type(number) not in NUMBERS:
            raise PlanError(f"launch() constants[{name!r}] is {describe(number)}", expected="a number")
        if type(number) is float and number - number != 0.0:
            raise PlanError(f"launch() constants[{name!r}] is {number}", expected="a finite number")
        if type(number) is int and not -(1 << 63) <= number < 1 << 64:
            raise PlanError(f"launch() constants[{name!r}] is {number}", expected="an integer of at most 64 bits")
        pairs.append((name, int(number) if type(number) is bool else number))
    return tuple(sorted(pairs))


def _mapped(meter: Meter, value: Any, change: Any, depth: int = 0) -> Any:
    """Arguments of an op with every tensor changed; lists stay lists."""
    meter.charge(1)
    if depth > 8:
        raise PlanLimitError("op() arguments nested too deeply")
    if isinstance(value, TensorStandIn):
        return change(value)
    if isinstance(value, (tuple, list)):
        items = [_mapped(meter, item, change, depth + 1) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict) and depth == 1:
        return {name: _mapped(meter, item, change, depth + 1) for name, item in value.items()}
    if value is None or type(value) in NUMBERS:
        return value
    if isinstance(value, str):
        return str(value)
    raise PlanError(
        f"op() argument is {describe(value)}", expected="tensors, numbers, strings, None and lists of these"
    )


def _written(kwargs: dict[str, Any]) -> Any:
    """What a call with ``out=`` returns: the tensors it was given."""
    tensors = [value for value in kwargs.values() if isinstance(value, TensorStandIn)]
    return tensors[0] if len(tensors) == 1 else tuple(tensors)
