"""Facts of one NVIDIA GPU through the driver's attribute queries: ``cuInit``, but no context and no torch."""

from __future__ import annotations

import uuid
from typing import Any

from pytest_cudaforge.errors import DeviceError
from pytest_cudaforge.facts import DeviceFacts

__all__ = ["detect"]

_INSTALL = "pip install 'pytest-cudaforge[cuda]' on a machine with an NVIDIA driver, or use --forge-device cpu"


def detect(index: int) -> DeviceFacts:
    """The GPU with the driver's ordinal ``index`` (as CUDA_VISIBLE_DEVICES leaves it).

    ``max_shared_bytes`` is the opt-in maximum of one block, ``clock_mhz`` the maximum SM clock; ``extra`` holds
    ``driver_cuda``, ``memory_clock_mhz``, ``memory_bus_bits``, ``max_threads_per_sm``, ``max_blocks_per_sm``,
    ``shared_bytes_per_sm``, ``registers_per_sm``, ``registers_per_block``, ``reserved_shared_bytes`` (of each block),
    ``persisting_l2_bytes`` (how much of the L2 may be set aside), ``fp32_per_fp64`` (how many times faster),
    ``nominal_bandwidth_bytes_per_s`` (two transfers a clock).

    Raises DeviceError where binding, driver or device is missing.
    """
    driver = _driver()
    _initialise(driver)
    count = int(_check(driver, driver.cuDeviceGetCount(), "the devices could not be counted"))
    if index >= count:
        raise DeviceError(
            f"there is no cuda:{index}: the driver shows {count} GPU(s)",
            expected=f"an index below {count}" if count else "an NVIDIA GPU",
            remedy="look at `nvidia-smi -L` and CUDA_VISIBLE_DEVICES, or use --forge-device cpu",
        )
    device = _check(driver, driver.cuDeviceGet(index), f"cuda:{index} could not be opened")
    return _facts(driver, device, index)


def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DeviceError(
            f"no binding to the CUDA driver ({error})", expected="the package cuda-bindings", remedy=_INSTALL
        ) from None
    return driver


def _check(driver: Any, answer: tuple[Any, ...], what: str) -> Any:
    status, *values = answer
    if status != driver.CUresult.CUDA_SUCCESS:
        raise DeviceError(f"{what}: {status.name}", expected="a working NVIDIA driver and GPU", remedy=_INSTALL)
    return values[0] if values else None


def _initialise(driver: Any) -> None:
    # cuda.bindings raises RuntimeError, not a status, where libcuda.so is absent.
    try:
        status = driver.cuInit(0)
    except RuntimeError as error:
        raise DeviceError(
            f"the CUDA driver could not be loaded ({error})", expected="an NVIDIA driver", remedy=_INSTALL
        ) from None
    _check(driver, status, "the CUDA driver could not be initialised")


def _facts(driver: Any, device: Any, index: int) -> DeviceFacts:
    attributes = driver.CUdevice_attribute

    def ask(name: str) -> int:
        attribute = getattr(attributes, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(_check(driver, driver.cuDeviceGetAttribute(attribute, device), f"no answer for {name}"))

    name = _check(driver, driver.cuDeviceGetName(128, device), "the device has no name")
    major, minor = ask("COMPUTE_CAPABILITY_MAJOR"), ask("COMPUTE_CAPABILITY_MINOR")
    return DeviceFacts(
        kind="cuda",
        name=name.split(b"\0")[0].decode(errors="replace").strip(),
        arch=f"sm_{major}{minor}",
        index=index,
        uuid=_uuid(driver, device),
        sm_count=ask("MULTIPROCESSOR_COUNT"),
        l2_bytes=ask("L2_CACHE_SIZE"),
        max_shared_bytes=ask("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        memory_bytes=int(_check(driver, driver.cuDeviceTotalMem(device), "the device's memory could not be read")),
        clock_mhz=ask("CLOCK_RATE") // 1000,
        extra=_extra(driver, ask),
    )


def _uuid(driver: Any, device: Any) -> str:
    answer = _check(driver, driver.cuDeviceGetUuid(device), "the device has no UUID")
    return f"GPU-{uuid.UUID(bytes=bytes(answer.bytes))}"


def _extra(driver: Any, ask: Any) -> tuple[tuple[str, str], ...]:
    version = int(_check(driver, driver.cuDriverGetVersion(), "the driver has no version"))
    memory_khz, bus_bits = ask("MEMORY_CLOCK_RATE"), ask("GLOBAL_MEMORY_BUS_WIDTH")
    return (
        ("driver_cuda", f"{version // 1000}.{version % 1000 // 10}"),
        ("fp32_per_fp64", str(ask("SINGLE_TO_DOUBLE_PRECISION_PERF_RATIO"))),
        ("max_blocks_per_sm", str(ask("MAX_BLOCKS_PER_MULTIPROCESSOR"))),
        ("max_threads_per_sm", str(ask("MAX_THREADS_PER_MULTIPROCESSOR"))),
        ("memory_bus_bits", str(bus_bits)),
        ("memory_clock_mhz", str(memory_khz // 1000)),
        # Double data rate: two transfers a clock.
        ("nominal_bandwidth_bytes_per_s", str(2 * memory_khz * 1000 * bus_bits // 8)),
        ("persisting_l2_bytes", str(ask("MAX_PERSISTING_L2_CACHE_SIZE"))),
        ("registers_per_block", str(ask("MAX_REGISTERS_PER_BLOCK"))),
        ("registers_per_sm", str(ask("MAX_REGISTERS_PER_MULTIPROCESSOR"))),
        ("reserved_shared_bytes", str(ask("RESERVED_SHARED_MEMORY_PER_BLOCK"))),
        ("shared_bytes_per_sm", str(ask("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"))),
    )
