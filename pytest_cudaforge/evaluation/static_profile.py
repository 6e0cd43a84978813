"""The lowest rung of profiling: what the binary, the plan and the roofline tell without a single measured call. Pure.

Metrics that Nsight Compute has, too, carry its names (``launch__registers_per_thread``), so that an evidence page reads
alike on every rung; what only the compiler tells begins with ``static__``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from pytest_cudaforge.evaluation.building import Product
from pytest_cudaforge.hardware import roofline
from pytest_cudaforge.hardware.occupancy import theoretical
from pytest_cudaforge.languages.binary import KernelInfo, settled
from pytest_cudaforge.plan import Launch, LaunchPlan, step_buffers
from pytest_cudaforge.records import DeviceFacts, KernelResources, ProfiledKernel, WorkloadFacts

__all__ = ["launch_shapes", "static_facts", "static_kernels", "work_ns"]

Figure = tuple[str, float, str]


def launch_shapes(product: Product) -> dict[tuple[str, tuple[int, ...], tuple[int, ...], int], list[Launch]]:
    """The main plan's launches as the device gets them, by kernel, grid, block and dynamic shared bytes."""
    found: dict[tuple[str, tuple[int, ...], tuple[int, ...], int], list[Launch]] = {}
    for launch in product.traced.main.launches:
        kernel = _compiled(product, launch)
        complete = settled(launch, kernel)[0] if kernel is not None else launch
        key = (launch.kernel, complete.grid, complete.block, complete.shared_bytes)
        found.setdefault(key, []).append(complete)
    return found


def static_kernels(product: Product, device: DeviceFacts) -> tuple[ProfiledKernel, ...]:
    """One record for each shape of launch in the main plan; library calls have no binary here and are left out."""
    kernels = []
    for (name, grid, block, shared_bytes), launches in launch_shapes(product).items():
        kernel = _compiled(product, launches[0])
        resources = kernel.resources if kernel is not None else KernelResources(name)
        metrics = (*_resources(resources), *_occupancy(device, grid, block, shared_bytes, resources))
        on_gpu = device.kind == "cuda"
        kernels.append(
            ProfiledKernel(
                function=name,
                own=True,
                launches=len(launches),
                duration_ns=None,
                grid=grid if on_gpu else (),
                block=block if on_gpu else (),
                metrics=metrics,
            )
        )
    return tuple(kernels)


def _compiled(product: Product, launch: Launch) -> KernelInfo | None:
    binary = next((b for b in product.binaries if b.constants == launch.constants), None)
    return binary.kernel(launch.kernel) if binary is not None else None


def _resources(resources: KernelResources) -> Iterator[Figure]:
    named = (
        ("launch__registers_per_thread", resources.registers, "register/thread"),
        ("launch__shared_mem_per_block_static", resources.static_shared_bytes, "byte/block"),
        ("static__local_bytes_per_thread", resources.local_bytes, "byte/thread"),
        ("static__spill_bytes_per_thread", resources.spill_bytes, "byte/thread"),
    )
    for name, value, unit in named:
        if value is not None:
            yield name, float(value), unit


def _occupancy(
    device: DeviceFacts, grid: tuple[int, ...], block: tuple[int, ...], dynamic_bytes: int, resources: KernelResources
) -> Iterator[Figure]:
    if device.kind != "cuda":
        return
    yield "launch__grid_size", float(math.prod(grid)), ""
    yield "launch__block_size", float(math.prod(block)), ""
    if device.sm_count:
        yield "device__attribute_multiprocessor_count", float(device.sm_count), ""
    yield "launch__shared_mem_per_block_dynamic", float(dynamic_bytes), "byte/block"
    shared_bytes = dynamic_bytes + (resources.static_shared_bytes or 0)
    found = theoretical(device, grid, block, resources.registers, shared_bytes)
    if found is None:
        return
    limits = (
        ("launch__occupancy_limit_blocks", found.limit_blocks),
        ("launch__occupancy_limit_registers", found.limit_registers),
        ("launch__occupancy_limit_shared_mem", found.limit_shared),
        ("launch__occupancy_limit_warps", found.limit_warps),
    )
    for name, limit in limits:
        if limit is not None:
            yield name, float(limit), "block"
    yield "sm__maximum_warps_per_active_cycle_pct", found.percent, "%"
    yield "launch__waves_per_multiprocessor", found.waves, ""


# -- the whole call ----------------------------------------------------------------------------------------------


def work_ns(workload: WorkloadFacts, precision: str, device: DeviceFacts) -> float:
    """The roofline's time of one call in ns, for telling the longest workload; bytes where no ceiling is known."""
    known = roofline.reference_ns(workload, precision, device)
    return known if known is not None else float(_minimal_bytes(workload))


def static_facts(
    product: Product, precision: str, device: DeviceFacts, working_set_bytes: int | None = None
) -> tuple[Figure, ...]:
    """Counted bytes and FLOPs of one call, what its plan moves at least, and the time at the speed of light.

    ``working_set_bytes`` as in ``roofline.bandwidth``.
    """
    workload, main = product.workload, product.traced.main
    min_bytes = _minimal_bytes(workload)
    facts: list[Figure] = [
        ("minimal_bytes", float(min_bytes), "byte"),
        ("flops", float(workload.flops), "FLOP"),
    ]
    if main.steps:
        facts += [
            ("plan_bytes", float(_plan_bytes(main)), "byte"),
            ("scratch_bytes", float(_scratch_bytes(main)), "byte"),
            ("launches", float(len(main.launches)), ""),
            ("library_calls", float(len(main.library_calls)), ""),
        ]
        if min_bytes:
            facts.append(("derived__plan_bytes_by_minimal", _plan_bytes(main) / min_bytes, ""))
    if min_bytes:
        facts.append(("arithmetic_intensity", workload.flops / min_bytes, "FLOP/byte"))
    if device.bandwidth_bytes_per_s:
        ceiling = roofline.bandwidth(device, working_set_bytes) or device.bandwidth_bytes_per_s
        facts.append(("bandwidth_ceiling", ceiling, "byte/s"))
    bound_ns = roofline.reference_ns(workload, precision, device, working_set_bytes)
    if bound_ns is not None:
        facts.append(("speed_of_light", bound_ns, "ns"))
        plain_ns = roofline.minimal_ns(min_bytes, workload.flops, "fp32", device, working_set_bytes)
        if precision == "fp32" and plain_ns is not None and plain_ns > bound_ns:
            facts.append(("speed_of_light_plain_fp32", plain_ns, "ns"))
    if device.kind == "cuda" and device.l2_bytes:
        facts.append(("l2_bytes", float(device.l2_bytes), "byte"))
    return tuple(facts)


def _minimal_bytes(workload: WorkloadFacts) -> int:
    return workload.input_bytes + workload.state_bytes + workload.output_bytes


def _plan_bytes(main: LaunchPlan) -> int:
    """What the steps move where each of them touches each of its buffers once."""
    return sum(main.buffers[index].spec.extent_bytes for step in main.steps for index in set(step_buffers(step)))


def _scratch_bytes(main: LaunchPlan) -> int:
    """The part of it that goes to and from buffers which are neither inputs nor outputs of the call: round trips."""
    kept = main.output_buffers
    inner = {i for i, buffer in enumerate(main.buffers) if buffer.role == "scratch" and i not in kept}
    return sum(main.buffers[i].spec.extent_bytes for step in main.steps for i in set(step_buffers(step)) & inner)
