"""The costs of a compiled program's instructions: operations of products, bytes of memory, and the least time."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from replicax._benchmark.hlo import KINDS
from replicax._benchmark.hlo_collectives import Collective
from replicax._benchmark.hlo_module import Instruction, Module, called_by, rounds_of
from replicax._plan.chips import Topology

_ARRAY = re.compile(r"(pred|token|[a-z]+(\d+)\w*)\[([\d,]*)\](?:\{([^}]*)\})?")
_FREE = {
    "parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "partition-id", "replica-id",
    "opt-barrier", "async-update", "while", "call", "conditional", *KINDS,
}  # fmt: skip
_SLICES = {"dynamic-slice", "slice", "gather"}
_TYPES = {
    "f64": "float32",
    "f32": "float32",
    "bf16": "bfloat16",
    "f16": "bfloat16",
    "c64": "float32",
    "c128": "float32",
}


@dataclass
class Cost:
    """The cost of an instruction.

    Attributes:
        products: the operations of matrix products and convolutions, by the type of the factors (see `Chip.rates`).
        bytes: the bytes of memory that it reads and writes.
    """

    products: Counter[str] = field(default_factory=Counter)
    bytes: float = 0.0

    def add(self, other: Cost, times: int = 1) -> None:
        """Add the cost of another instruction."""
        for kind, count in other.products.items():
            self.products[kind] += count * times
        self.bytes += other.bytes * times


class Costs:
    """The costs of a program's instructions.

    Args:
        module: the program.
        platform: the platform of the devices. GPUs compute products of float32 in TF32, unless the program asks for
            more precision.
    """

    def __init__(self, module: Module, platform: str):
        self._module, self._is_gpu = module, platform == "gpu"
        self._costs: dict[tuple[str, str], Cost] = {}  # rounds of a loop ask again
        self._shapes = {
            name: {instruction.name: instruction.shape for instruction in body}
            for name, body in module.computations.items()
        }

    def total(self, computation: str | None = None, *, all_rounds: bool = True) -> Cost:
        """Return the cost of a computation, by default of the program.

        Args:
            computation: its name.
            all_rounds: whether a loop counts as often as it runs, or once.
        """
        name = self._module.entry if computation is None else computation
        instructions, result = self._module.computations.get(name, []), Cost()
        for instruction in instructions:
            result.add(self.of(name, instruction))
            if instruction.opcode in ("while", "call", "conditional", "async-start"):
                rounds = (
                    rounds_of(self._module, instructions, instruction)
                    if instruction.opcode == "while" and all_rounds
                    else 1
                )
                for called in called_by(instruction):
                    result.add(self.total(called, all_rounds=all_rounds), rounds)
        return result

    def of(self, computation: str, instruction: Instruction) -> Cost:
        """Return the cost of an instruction, but for the computations that a loop, a call or a condition runs."""
        if (key := (computation, instruction.name)) not in self._costs:
            self._costs[key] = self._count(computation, instruction)
        return self._costs[key]

    def _count(self, computation: str, instruction: Instruction) -> Cost:
        if instruction.opcode == "copy-start":  # of TPUs, between their memory and the one beside the arithmetic
            return Cost(bytes=sum(arrays_in_memory(instruction.shape)[:2]))
        if instruction.opcode in _FREE or instruction.opcode.endswith(("-start", "-done")):
            return Cost()
        shapes = self._shapes[computation]
        if instruction.opcode == "fusion":
            return self._of_fusion(instruction, shapes)
        cost = Cost(self._products(instruction, shapes))
        operands = [_bytes(shapes.get(operand, "")) for operand in instruction.operands]
        if instruction.opcode in _SLICES:
            cost.bytes = 2 * _bytes(instruction.shape)
        elif instruction.opcode == "dynamic-update-slice":
            cost.bytes = 2 * operands[1]
        else:
            cost.bytes = sum(operands) + _bytes(_without_workspace(instruction))
        return cost

    def _of_fusion(self, instruction: Instruction, shapes: Mapping[str, str]) -> Cost:
        name = instruction.attribute("calls") or ""
        inside, cost = self._module.computations.get(name, []), Cost()
        for part in inside:
            cost.products.update(self._products(part, self._shapes[name]))
            for called in called_by(part):
                cost.products.update(self.total(called).products)
        inputs = {i: _bytes_read(inside, part) for part in inside if (i := _number(part)) is not None}
        for i, operand in enumerate(instruction.operands):
            whole = _bytes(shapes.get(operand, ""))
            cost.bytes += min(whole, inputs.get(i, whole))
        cost.bytes += _bytes_written(inside) if inside else _bytes(instruction.shape)
        return cost

    def _products(self, instruction: Instruction, shapes: Mapping[str, str]) -> Counter[str]:
        """Return the operations of a product or a convolution, by the type of its factors."""
        if instruction.opcode not in ("dot", "convolution", "custom-call") or len(instruction.operands) < 2:
            return Counter()
        left, right = (shapes.get(operand, "") for operand in instruction.operands[:2])
        if "__cudnn$fmha" in instruction.target:
            return Counter({self._kind(instruction, left): 2 * _multiplications_of_attention(instruction, left)})
        if instruction.opcode == "dot" or "matmul" in instruction.target:
            count = math.prod(dimensions(instruction.shape)) * _contraction_size(instruction, dimensions(left))
        elif instruction.opcode == "convolution" or "$conv" in instruction.target:
            count = _multiplications_of_convolution(instruction, dimensions(left), dimensions(right))
        else:
            return Counter()
        factor = 4 if left.startswith("c") else 1  # a complex product is four of real numbers
        return Counter({self._kind(instruction, left): 2 * factor * count})

    def _kind(self, instruction: Instruction, shape: str) -> str:
        match = _ARRAY.search(shape)
        dtype = match[1] if match else ""
        if dtype.startswith("f8"):
            return "float8"
        kind = _TYPES.get(dtype, "integer")
        exact = re.search(r'HIGHEST|operand_precision=\{highest|"ALG_DOT_F32_F32_F32"', instruction.text)
        return "tf32" if self._is_gpu and dtype in ("f32", "c64") and not exact else kind


def seconds_of(cost: Cost, topology: Topology) -> float:
    """Return the least time of an instruction on one device."""
    chip = topology.chip
    if chip is None:
        return 0.0
    computing = sum(count / chip.rate(kind) for kind, count in cost.products.items())
    return max(computing, cost.bytes / (chip.memory_speed / chip.cores))


def links_and_network(collective: Collective, topology: Topology) -> tuple[float, float]:
    """Return the least seconds that a collective keeps the links within a host, and the network between hosts, busy.

    It counts once, however often it runs. Of an array that is gathered among h hosts of g devices each, a device takes
    at least (g - 1) / g of the bytes from its own host, and 1 / g of the (h - 1) / h that its host lacks from the
    network; a reduction to all devices takes both twice. See Thakur, Rabenseifner and Gropp, "Optimization of
    Collective Communication Operations in MPICH", 2005.
    """
    chip = topology.chip
    if chip is None:
        return 0.0, 0.0
    within = across = 0.0
    for group in collective.groups or (tuple(range(collective.devices)),):
        hosts = len({topology.host_of(place) for place in group})
        per_host = len(group) / hosts
        if collective.kind in ("collective-permute", "collective-broadcast"):
            shares = (0.0, 1.0) if hosts > 1 else (1.0, 0.0)
        elif "all-to-all" in collective.kind:
            shares = (per_host - 1) / len(group), (len(group) - per_host) / len(group)
        else:
            ways = 2 if collective.kind == "all-reduce" else 1
            shares = ways * (per_host - 1) / per_host, ways * (hosts - 1) / (hosts * per_host)
        within, across = max(within, shares[0]), max(across, shares[1])
    network = across * collective.bytes * chip.cores / chip.network_speed if chip.network_speed else 0.0
    return within * collective.bytes * chip.cores / chip.link_speed, network


def dimensions(shape: str) -> list[int]:
    """Return the dimensions of an array, or of the first one of a tuple, by its shape in HLO."""
    match = _ARRAY.search(shape)
    return [int(size) for size in match[3].split(",") if size] if match else []


def arrays_in_memory(shape: str) -> list[int]:
    """Return the bytes of each array of a shape in HLO; 0 for one that XLA keeps beside the arithmetic of a TPU."""
    arrays = []
    for _, bits, sizes, layout in _ARRAY.findall(shape):
        count = math.prod(int(size) for size in sizes.split(",") if size)
        arrays.append(0 if "S(" in layout else -(-count * int(bits or 8) // 8))
    return arrays


def _bytes(shape: str) -> int:
    return sum(arrays_in_memory(shape))


def _without_workspace(instruction: Instruction) -> str:
    """Return the shape of the result of an instruction, without the workspace of a library's call."""
    match = (
        _ARRAY.search(instruction.shape) if instruction.opcode == "custom-call" and "$" in instruction.target else None
    )
    return match[0] if match else instruction.shape


def _number(instruction: Instruction) -> int | None:
    match = re.search(r"parameter\((\d+)\)", instruction.text) if instruction.opcode == "parameter" else None
    return int(match[1]) if match else None


def _bytes_read(inside: Sequence[Instruction], parameter: Instruction) -> float:
    """Return the bytes that a fusion reads of one of its inputs; it may use only slices."""
    total = 0
    for instruction in inside:
        if parameter.name not in instruction.operands:
            continue
        first = instruction.operands[0] == parameter.name
        if first and instruction.opcode in _SLICES:
            total += _bytes(instruction.shape)
        elif not (first and instruction.opcode == "dynamic-update-slice"):
            return _bytes(parameter.shape)
    return total


def _bytes_written(inside: Sequence[Instruction]) -> float:
    """Return the bytes that a fusion writes, which updates some of its inputs in their place."""
    named = {instruction.name: instruction for instruction in inside}

    def bytes_of(instruction: Instruction) -> float:
        if instruction.opcode == "tuple":
            return sum(bytes_of(named[operand]) for operand in instruction.operands if operand in named)
        if instruction.opcode == "bitcast" and instruction.operands[0] in named:
            return bytes_of(named[instruction.operands[0]])
        if instruction.opcode == "dynamic-update-slice" and instruction.operands[1] in named:
            return _bytes(named[instruction.operands[1]].shape)
        return _bytes(instruction.shape)

    return bytes_of(inside[-1])


def _contraction_size(instruction: Instruction, left: list[int]) -> int:
    """Return how many products are added up for an element of the result of a matrix product."""
    match = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.text)
    match = match or re.search(r'"lhs_contracting_dimensions": ?\[([^\]]*)\]', instruction.text)
    axes = [int(axis) for axis in re.findall(r"\d+", match[1])] if match else []
    return math.prod(left[axis] for axis in axes if axis < len(left))


def _multiplications_of_attention(instruction: Instruction, query: str) -> int:
    """Return the multiplications of cuDNN's attention: two products, or five for its gradient.

    Half of the pairs of positions count if the attention is causal.
    """
    pairs = re.search(r'"intermediate_tensor_shape": ?\{[^}]*?"dimensions": ?\[([^\]]*)\]', instruction.text)
    count = math.prod(int(size) for size in re.findall(r"\d+", pairs[1])) if pairs else 0
    products = 5 if "Backward" in instruction.target else 2
    whole = products * count * dimensions(query)[-1]
    return whole // 2 if '"CAUSAL"' in instruction.text else whole


def _multiplications_of_convolution(instruction: Instruction, left: list[int], right: list[int]) -> int:
    """Return the multiplications of a convolution, without those of padding."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.text)
    backward = re.search(r"convBackward(Input|Filter)", instruction.target)
    image, kernel, output = left, right, dimensions(instruction.shape)
    if backward:  # cuDNN names the dimensions of the convolution that it is the gradient of
        image, kernel, output = (output, right, left) if backward[1] == "Input" else (left, output, right)
    if labels is None or [len(label) for label in labels.groups()] != [len(image), len(kernel), len(output)]:
        return 0
    total = kernel[labels[2].index("i")] * output[labels[3].index("b")] * output[labels[3].index("f")]
    window = dict(re.findall(r"(\w+)=([\d_x-]+)", (re.search(r"window=\{([^}]*)\}", instruction.text) or [""])[0]))
    spatial = sorted(label for label in labels[3] if label.isdigit())
    for place, label in enumerate(spatial):
        sizes = [shape[names.index(label)] for shape, names in zip((image, kernel, output), labels.groups())]
        total *= _places(sizes, {name: value.split("x")[place] for name, value in window.items()})
    return total


def _places(sizes: Sequence[int], window: Mapping[str, str]) -> int:
    """Return how many pairs of an element of the output and one of the kernel meet an element of the image.

    Args:
        sizes: the sizes of the image, the kernel and the output along one dimension.
        window: the attributes of XLA's window along this dimension.
    """
    image, kernel, output = sizes
    stride, image_step, kernel_step = (int(window.get(name, "1")) for name in ("stride", "lhs_dilate", "rhs_dilate"))
    start = int(window.get("pad", "0_0").split("_")[0])
    places = 0
    for offset in range(-start, kernel * kernel_step - start, kernel_step):
        if image_step == 1:
            first, last = max(0, -(offset // stride)), min(output - 1, (image - 1 - offset) // stride)
            places += max(0, last - first + 1)
        else:
            inside = (offset + stride * i for i in range(output))
            places += sum(i % image_step == 0 and 0 <= i <= (image - 1) * image_step for i in inside)
    return places
