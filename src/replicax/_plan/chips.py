"""The TPUs and GPUs that plans know, with the figures that their makers publish."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from replicax._base.messages import received
from replicax._base.planning import PlanError

_TOPOLOGY = re.compile(r"([a-z][a-z0-9-]*):(\d{1,5}(?:x\d{1,5})*)")
_DEVICES = re.compile(r"(?:cpu:)?(\d+)")
MOST_DEVICES = 8192  # the size of the largest slice of TPUs; a plan takes longer with each device
_GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """One kind of chip.

    Args:
        name: the name in a topology.
        memory: bytes of its memory. For a GPU, the bytes that CUDA reports.
        rates: the most operations of matrix products in a second, by the type of the factors: "float32" in full
            precision, "tf32", "bfloat16" (also float16) and "float8". A type that is missing is computed in the next
            wider one.
        memory_speed: the most bytes of memory that are read or written in a second.
        link_speed: the most bytes that a chip sends to chips of its host, or of its slice of TPUs, in a second.
        network_speed: the most bytes that a chip sends to other hosts in a second. TPUs of a slice need no network.
        source: the page with these figures.
        cores: the number of JAX's devices on it.
    """

    name: str
    memory: float
    rates: Mapping[str, float]
    memory_speed: float
    link_speed: float
    network_speed: float
    source: str
    cores: int = 1

    def rate(self, kind: str) -> float:
        """Return the most operations of products of this type in a second on one of JAX's devices.

        It is infinite for a type without a published rate.
        """
        names = ["float8", "bfloat16", "tf32", "float32"]
        if kind not in names:
            return math.inf
        wider = names[names.index(kind) :]
        return next((self.rates[name] for name in wider if name in self.rates), max(self.rates.values())) / self.cores


@dataclass(frozen=True)
class Tpu(Chip):
    """A kind of TPU; `largest` is the grid of the largest slice."""

    largest: tuple[int, ...] = ()


@dataclass(frozen=True)
class CudaDevice:
    """The facts of an NVIDIA GPU that XLA's compiler asks for.

    Args:
        capability: CUDA's compute capability.
        multiprocessors: how many there are.
        clock: the highest clock rate, in GHz.
        cache: bytes of the second cache.
    """

    capability: tuple[int, int]
    multiprocessors: int
    clock: float
    cache: int

    def target_config(self, chip: Gpu) -> str:
        """Return the text of a `GpuTargetConfigProto`, XLA's description of the GPU.

        The figures by compute capability are in NVIDIA's CUDA C++ Programming Guide, "Technical
        Specifications per Compute Capability".
        """
        major, minor = self.capability
        shared = {8: 164, 9: 228, 10: 228}[major] if minor == 0 else 100  # KiB of each multiprocessor
        extension = " feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
        facts = {
            "threads_per_block_limit": 1024,
            "threads_per_warp": 32,
            "shared_memory_per_block": 48 * 1024,
            "shared_memory_per_core": shared * 1024,
            "shared_memory_per_block_optin": (shared - 1) * 1024,
            "threads_per_core_limit": 1536 if (major, minor) == (8, 9) else 2048,
            "core_count": self.multiprocessors,
            "fpus_per_core": 64 if self.capability == (8, 0) else 128,
            "block_dim_limit_x": 2**31 - 1,
            "block_dim_limit_y": 65535,
            "block_dim_limit_z": 65535,
            "memory_bandwidth": int(chip.memory_speed),
            "l2_cache_size": self.cache,
            "clock_rate_ghz": self.clock,
            "device_memory_size": int(chip.memory),
            "registers_per_core_limit": 65536,
            "registers_per_block_limit": 65536,
        }
        lines = [f"  {name}: {value}" for name, value in facts.items()]
        capability = f"  cuda_compute_capability {{ major: {major} minor: {minor}{extension} }}"
        names = [
            'platform_name: "CUDA"',
            "dnn_version_info { major: 9 minor: 10 }",
            f'device_description_str: "{chip.name}"',
        ]
        return "\n".join(["gpu_device_info {", *lines, capability, "}", *names])


@dataclass(frozen=True)
class Gpu(Chip):
    """A kind of NVIDIA GPU; `device` has the facts for the compiler."""

    device: CudaDevice = CudaDevice((0, 0), 0, 0.0, 0)


GPUS_PER_HOST = 8  # the most GPUs of a usual host
_MIB = 2**20
_TPU = "https://cloud.google.com/tpu/docs/"
_NVIDIA = "https://www.nvidia.com/en-us/data-center/"
_ADA = "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"


def _rates(float32: float, tf32: float, bfloat16: float, float8: float | None = None) -> dict[str, float]:
    """Return the rates of a GPU, which are given in 10^12 operations in a second."""
    rates = {"float32": float32, "tf32": tf32, "bfloat16": bfloat16, "float8": float8}
    return {name: rate * 1e12 for name, rate in rates.items() if rate is not None}


_A100 = CudaDevice((8, 0), 108, 1.41, 40 * _MIB)
_H100 = CudaDevice((9, 0), 132, 1.98, 50 * _MIB)
_RATES_OF_A100, _RATES_OF_H100 = _rates(19.5, 156, 312), _rates(66.9, 494.7, 989.4, 1978.9)

# Rates are those without sparsity. Where the maker publishes two figures, the higher one counts, because a plan
# promises a least time. Links and networks are given for one direction. The network is a usual machine's: an
# adapter for each GPU of a DGX, and for the other GPUs their share of the network of a cloud's machine.
CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        Gpu("a100-40gb", 42331013120, _RATES_OF_A100, 1555e9, 300e9, 25e9, f"{_NVIDIA}a100/", device=_A100),
        Gpu("a100-80gb", 85100068864, _RATES_OF_A100, 2039e9, 300e9, 25e9, f"{_NVIDIA}a100/", device=_A100),
        Gpu(
            "a100-pcie", 85100068864, _RATES_OF_A100, 1935e9, 32e9, 2.5e9, f"{_NVIDIA}a100/", device=_A100,
        ),
        Gpu("h100", 84942979072, _RATES_OF_H100, 3352e9, 450e9, 50e9, f"{_NVIDIA}h100/", device=_H100),
        Gpu(
            "h100-pcie", 84942979072, _rates(51.2, 378, 756, 1513), 2039e9, 64e9, 5e9, f"{_NVIDIA}h100/",
            device=CudaDevice((9, 0), 114, 1.755, 50 * _MIB),
        ),
        Gpu("h200", 151397597184, _RATES_OF_H100, 4800e9, 450e9, 50e9, f"{_NVIDIA}h200/", device=_H100),
        Gpu(
            "b200", 191514411008, _rates(80, 1125, 2250, 4500), 8000e9, 900e9, 50e9, f"{_NVIDIA}hgx/",
            device=CudaDevice((10, 0), 148, 1.965, 132_644_864),
        ),
        Gpu(
            "l4", 23654532000, _rates(30.3, 60.5, 121, 242.5), 300e9, 32e9, 1.5625e9, f"{_NVIDIA}l4/",
            device=CudaDevice((8, 9), 58, 2.04, 48 * _MIB),
        ),
        Gpu(
            "l40s", 47680000000, _rates(91.6, 183, 366.5, 733), 864e9, 32e9, 6.25e9, f"{_NVIDIA}l40s/",
            device=CudaDevice((8, 9), 142, 2.52, 96 * _MIB),
        ),
        Gpu(
            "rtx4090", 25380000000, _rates(82.6, 82.6, 165.2, 660.6), 1008e9, 32e9, 1.25e9, _ADA,
            device=CudaDevice((8, 9), 128, 2.52, 72 * _MIB),
        ),
        Tpu("v4", 32 * _GIB, {"bfloat16": 275e12}, 1228e9, 300e9, 0, f"{_TPU}v4", 2, (16, 16, 16)),
        Tpu("v5e", 16 * _GIB, {"bfloat16": 197e12}, 819e9, 200e9, 0, f"{_TPU}v5e", 1, (16, 16)),
        Tpu("v5p", 95 * _GIB, {"bfloat16": 459e12}, 2765e9, 600e9, 0, f"{_TPU}v5p", 1, (16, 16, 24)),
        Tpu("v6e", 32 * _GIB, {"bfloat16": 918e12}, 1638e9, 400e9, 0, f"{_TPU}v6e", 1, (16, 16)),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Topology:
    """Devices to plan for: TPUs in a grid, the GPUs of some hosts, or virtual CPU devices.

    Attributes:
        name: the user's name for it; "cpu:8" for eight virtual CPU devices.
        size: the number of JAX's devices.
        chip: None for CPU devices.
        hosts: the number of hosts that a network connects.
        order: the device at each place of the program's mesh; empty for their own order.
    """

    name: str
    size: int
    chip: Chip | None
    hosts: int = 1
    order: tuple[int, ...] = ()

    @property
    def platform(self) -> str:
        """The platform of its devices, as JAX names it."""
        return "cpu" if self.chip is None else "gpu" if isinstance(self.chip, Gpu) else "tpu"

    @property
    def compiler(self) -> str:
        """The platform that XLA compiles for."""
        return "cuda" if self.platform == "gpu" else self.platform

    @property
    def per_host(self) -> int:
        """The number of devices that links connect."""
        return self.size // self.hosts

    def host_of(self, place: int) -> int:
        """Return the host of the device at a place of the program's mesh."""
        return (self.order[place] if self.order else place) // self.per_host

    @property
    def memory(self) -> float | None:
        """The bytes of memory of a device; None for CPU devices, which share the host's."""
        return None if self.chip is None else self.chip.memory / self.chip.cores


def parse(topology: Any) -> Topology:
    """Return the topology of this name, or of this number of CPU devices.

    Raises:
        PlanError: the topology does not exist, or it has more devices than a plan can have.

    >>> parse("v5p:2x2x4").size, parse("h100:2x8").hosts, parse(8).name
    (16, 2, 'cpu:8')
    """
    text = topology.strip().lower() if isinstance(topology, str) else _digits(topology)
    if (match := _DEVICES.fullmatch(text)) and (digits := match[1].lstrip("0")):
        if len(digits) > len(str(MOST_DEVICES)) or int(digits) > MOST_DEVICES:
            raise PlanError(
                f"A plan has at most {MOST_DEVICES} virtual CPU devices, got {text[:40]}. Plan for fewer: the memory "
                "and the communication of a device change little beyond that."
            )
        return Topology(f"cpu:{digits}", int(digits), None)
    match = _TOPOLOGY.fullmatch(text)
    sides = [int(side) for side in match[2].split("x")] if match else [0]
    if match is None or match[1] not in CHIPS or not all(sides):
        raise PlanError(_unknown(topology, text))
    chip = CHIPS[match[1]]
    if isinstance(chip, Tpu):
        _check_slice(text, chip, sides)
        return Topology(text, math.prod(sides) * chip.cores, chip)
    if len(sides) > 2 or sides[-1] > GPUS_PER_HOST or math.prod(sides) > MOST_DEVICES:
        raise PlanError(
            f"There is no {text}: GPUs are named by their number, such as '{chip.name}:{GPUS_PER_HOST}', or by hosts x "
            f"GPUs of each host, such as '{chip.name}:2x{GPUS_PER_HOST}'. A host has at most {GPUS_PER_HOST} GPUs, and "
            f"a plan at most {MOST_DEVICES}."
        )
    return Topology(text, math.prod(sides), chip, hosts=sides[0] if len(sides) == 2 else 1)


def _check_slice(text: str, chip: Tpu, sides: list[int]) -> None:
    """Raise PlanError if there is no slice of TPUs with this grid."""
    grid = sorted([1] * (len(chip.largest) - len(sides)) + sides)
    if len(grid) > len(chip.largest) or any(side > limit for side, limit in zip(grid, chip.largest)):
        largest = "x".join(map(str, chip.largest))
        raise PlanError(
            f"There is no {text}: the largest slice of {chip.name} is {chip.name}:{largest} ({chip.source})."
        )


def _unknown(topology: Any, text: str) -> str:
    """Return the message about a topology that has no chip of the table, or no number of chips."""
    name = text.partition(":")[0]
    near = [chip for chip in CHIPS if name and (chip.startswith(name) or name.startswith(chip))]
    hint = f" Did you mean {' or '.join(f'{chip}:8' for chip in near)}?" if near and name not in CHIPS else ""
    tpus = ", ".join(chip.name for chip in CHIPS.values() if isinstance(chip, Tpu))
    gpus = ", ".join(chip.name for chip in CHIPS.values() if isinstance(chip, Gpu))
    return (
        "A topology is a kind of GPU and their number, such as 'h100:8' or 'h100:2x8' (hosts x GPUs), a kind of TPU "
        "and the grid of its chips, such as 'v5e:2x4', or a number of virtual CPU devices, such as 8 or 'cpu:8'; got "
        f"{received(topology)}.{hint} The GPUs are {gpus}; the TPUs are {tpus}."
    )


def _digits(topology: Any) -> str:
    """Return a number as text, and an empty text for another object."""
    try:
        number = 0 if isinstance(topology, bool) else operator.index(topology)
    except TypeError:
        return ""
    return str(min(number, 10**40))  # Python refuses to write numbers of more than 4,300 digits
