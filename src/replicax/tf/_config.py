"""`tf.config`: devices, and settings at the start of a program."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from typing import NamedTuple

import jax

from replicax.tf import _accelerators
from replicax.tf._core import devices as _devices
from replicax.tf._core import jax_internals, modes, tpu_system


class LogicalDevice(NamedTuple):
    """A device by name and type."""

    name: str
    device_type: str


class PhysicalDevice(LogicalDevice):
    """A device of the machine."""

    __slots__ = ()


class LogicalDeviceConfiguration(NamedTuple):
    """One virtual device, for `set_logical_device_configuration`."""

    memory_limit: float | None = None
    experimental_priority: int | None = None
    experimental_device_ordinal: int | None = None


def list_logical_devices(device_type: str | None = None) -> list[LogicalDevice]:
    """Returns the devices of one type, or all."""
    names = [name for name in _devices.device_table() if device_type in (None, name.split(":")[0])]
    return [LogicalDevice(f"/device:{name}", name.split(":")[0]) for name in names]


def list_physical_devices(device_type: str | None = None) -> list[PhysicalDevice]:
    """Returns the devices of the machine, of one type or all: one CPU, and all accelerators.

    If the accelerators are NVIDIA's, or if there are none, this does not start JAX: devices may still be configured.
    """
    kinds = ["CPU"] if device_type in (None, "CPU") else []
    found = [PhysicalDevice(f"/physical_device:{kind}:0", kind) for kind in kinds]
    for kind in {kind for kind in _devices._virtual if kind != "CPU" and device_type in (None, kind)}:
        found += [PhysicalDevice(f"/physical_device:{kind}:{i}", kind) for i in range(_devices._virtual[kind])]
    if not _devices._virtual and device_type != "CPU":
        found += [PhysicalDevice(f"/physical_device:{name}", name.split(":")[0]) for name in _accelerator_names()]
    return [device for device in found if device_type in (None, device.device_type)]


_visible_gpus: list[LogicalDevice] | None = None  # as `set_visible_devices` has chosen them


def _accelerator_names() -> list[str]:
    counts = None
    if _visible_gpus is not None or not jax_internals.backend_started():
        counts = _accelerators.counted()
    if counts is None:
        return [name for name in _devices.device_table() if not name.startswith("CPU")]
    return [f"{kind}:{i}" for kind, count in counts.items() for i in range(count)]


def set_logical_device_configuration(
    device: PhysicalDevice, logical_devices: Iterable[LogicalDeviceConfiguration]
) -> None:
    """Makes a device appear as several; before JAX starts.

    Several devices are virtual devices on the CPU, with a warning if they replace an accelerator. A single one is the
    accelerator itself; only the environment can limit its memory.
    """
    configurations = list(logical_devices)
    virtual = device.device_type == "CPU" or device.device_type in _devices._virtual
    if not virtual and device.name in {there.name for there in list_physical_devices(device.device_type)}:
        if len(configurations) < 2:
            if any(configuration.memory_limit is not None for configuration in configurations):
                warnings.warn(
                    f"The memory limit of {device.name} is not set: JAX takes it from the environment. Start the "
                    "program with XLA_PYTHON_CLIENT_MEM_FRACTION, such as 0.5 for half of the memory.",
                    stacklevel=2,
                )
            return
        warnings.warn(
            f"{len(configurations)} virtual devices on the CPU replace {device.name}, which is not used: JAX "
            "cannot divide an accelerator.",
            stacklevel=2,
        )
    counts = {**_devices._virtual, device.device_type: len(configurations)}
    _devices.set_virtual_devices(counts)


def get_visible_devices(device_type: str | None = None) -> list[PhysicalDevice]:
    """Returns the devices of the machine, without those that `set_visible_devices` has hidden."""
    devices = list_physical_devices(device_type)
    if _visible_gpus is None:
        return devices
    return [d for d in devices if d.device_type != "GPU" or d.name in {gpu.name for gpu in _visible_gpus}]


def set_visible_devices(devices: LogicalDevice | Iterable[LogicalDevice], device_type: str | None = None) -> None:
    """Hides all accelerators, or some GPUs of NVIDIA, before JAX starts.

    Raises:
        RuntimeError: JAX has started, or `devices` lacks some of the CPUs or of other accelerators.
    """
    global _visible_gpus
    devices = [devices] if isinstance(devices, LogicalDevice) else list(devices)
    if not _devices._virtual and not jax_internals.backend_started():
        if device_type in ("GPU", "TPU") and not devices:
            jax.config.update("jax_platforms", "cpu")
            return
        gpus = [device for device in devices if device.device_type == "GPU"]
        known = {device.name for device in list_physical_devices("GPU")} if gpus else set()
        if gpus and {device.name for device in gpus} <= known and _accelerators.counted():
            _visible_gpus = gpus
            jax.config.update("jax_cuda_visible_devices", ",".join(gpu.name.rpartition(":")[2] for gpu in gpus))
            return
    there = {device.name for device in get_visible_devices(device_type)}
    if {device.name for device in devices} != there:
        raise RuntimeError(
            f"The visible devices cannot be changed from {sorted(there)} "
            f"to {sorted(d.name for d in devices)} now. "
            "Choose them in the environment (CUDA_VISIBLE_DEVICES=0,1 or JAX_PLATFORMS=cpu), or name them to the "
            'strategy, as in tf.distribute.MirroredStrategy(["GPU:0"]).'
        )


def set_memory_growth(device: PhysicalDevice, enable: bool) -> None:
    """Makes JAX allocate GPU memory as it is needed, not most of it at once; for all GPUs, before JAX starts."""
    if _devices._virtual or device.device_type != "GPU":
        return
    value = "false" if enable else "true"
    if jax_internals.backend_started() and os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "true").lower() != value:
        warnings.warn(
            f"JAX has started already: set XLA_PYTHON_CLIENT_PREALLOCATE={value} in the environment of the program.",
            stacklevel=2,
        )
        return
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = value


def get_memory_growth(device: PhysicalDevice) -> bool:
    """Returns whether JAX allocates GPU memory as it is needed."""
    return os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "true").lower() in ("false", "0")


_soft_placement = True


def set_soft_device_placement(enabled: bool) -> None:
    """Sets whether `tf.device` lets JAX choose the device where there is none of its name, or raises an error."""
    global _soft_placement
    _soft_placement = enabled


def get_soft_device_placement() -> bool:
    """Returns whether `tf.device` lets JAX choose the device where there is none of its name."""
    return _soft_placement


def get_memory_info(device: str) -> dict[str, int]:
    """Returns the bytes in use on a device, now ("current") and at most ("peak"); raises `ValueError` without such
    counts.
    """
    stats = _devices.find_device(device).memory_stats()
    if not stats:
        raise ValueError(f"JAX does not count the memory of {device}.")
    return {"current": stats["bytes_in_use"], "peak": stats["peak_bytes_in_use"]}


def enable_op_determinism() -> None:
    """Makes XLA compile deterministic GPU operations, if JAX has not started; random numbers need `set_seed`."""
    flag = "--xla_gpu_deterministic_ops=true"
    if flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()


def enable_tensor_float_32_execution(enabled: bool) -> None:
    """Sets whether matrix products of float32 may use less precision: `jax_default_matmul_precision`."""
    jax.config.update("jax_default_matmul_precision", "tensorfloat32" if enabled else "float32")


def set_jit(enabled: object) -> None:
    """Does nothing: XLA compiles every function."""


def get_jit() -> str:
    """Always "autoclustering": XLA compiles every function."""
    return "autoclustering"


def set_threads(num_threads: int) -> None:
    """Does nothing: XLA uses as many threads as there are cores (or as NPROC says)."""


def get_threads() -> int:
    """Returns 0: as many threads as there are cores."""
    return 0


CONFIG: dict[str, object] = {
    "LogicalDevice": LogicalDevice,
    "LogicalDeviceConfiguration": LogicalDeviceConfiguration,
    "PhysicalDevice": PhysicalDevice,
    "experimental_connect_to_cluster": tpu_system.experimental_connect_to_cluster,
    "experimental_connect_to_host": tpu_system.experimental_connect_to_host,
    "experimental_functions_run_eagerly": modes.functions_run_eagerly,
    "experimental_run_functions_eagerly": modes.run_functions_eagerly,
    "functions_run_eagerly": modes.functions_run_eagerly,
    "get_soft_device_placement": get_soft_device_placement,
    "get_visible_devices": get_visible_devices,
    "list_logical_devices": list_logical_devices,
    "list_physical_devices": list_physical_devices,
    "run_functions_eagerly": modes.run_functions_eagerly,
    "set_logical_device_configuration": set_logical_device_configuration,
    "set_soft_device_placement": set_soft_device_placement,
    "set_visible_devices": set_visible_devices,
}
EXPERIMENTAL: dict[str, object] = {
    "VirtualDeviceConfiguration": LogicalDeviceConfiguration,
    "enable_op_determinism": enable_op_determinism,
    "enable_tensor_float_32_execution": enable_tensor_float_32_execution,
    "get_memory_growth": get_memory_growth,
    "get_memory_info": get_memory_info,
    "get_visible_devices": get_visible_devices,
    "list_logical_devices": list_logical_devices,
    "list_physical_devices": list_physical_devices,
    "set_memory_growth": set_memory_growth,
    "set_virtual_device_configuration": set_logical_device_configuration,
    "set_visible_devices": set_visible_devices,
}
THREADING: dict[str, object] = {
    "get_inter_op_parallelism_threads": get_threads,
    "get_intra_op_parallelism_threads": get_threads,
    "set_inter_op_parallelism_threads": set_threads,
    "set_intra_op_parallelism_threads": set_threads,
}
OPTIMIZER: dict[str, object] = {"get_jit": get_jit, "set_jit": set_jit}


# `tf.test`


def is_gpu_available(cuda_only: bool = False, min_cuda_compute_capability: object = None) -> bool:
    """Returns whether there is a GPU; virtual GPUs count."""
    return bool(list_physical_devices("GPU"))


def gpu_device_name() -> str:
    """Returns the name of the first GPU, or an empty string."""
    found = list_logical_devices("GPU")
    return found[0].name if found else ""


def is_built_with_cuda() -> bool:
    """Returns whether JAX's CUDA plugin is installed."""
    from importlib.util import find_spec

    return any(find_spec(f"jax_cuda{version}_plugin") is not None for version in (12, 13))


def is_built_with_gpu_support() -> bool:
    """Returns whether JAX's CUDA plugin is installed."""
    return is_built_with_cuda()


def is_built_with_xla() -> bool:
    """Returns True: XLA is the engine."""
    return True


TEST = "gpu_device_name is_built_with_cuda is_built_with_gpu_support is_built_with_xla is_gpu_available"
