"""TensorFlow's names on replicax: `import replicax.tf as tf` in place of `import tensorflow as tf`.

The part that distributed training loops need first: all of `tf.distribute` that replicax has, variables, functions,
tapes, datasets and the most common operations. Tensors are JAX arrays. Importing this module gives them `numpy()` and
`get_shape()`, lets them print as TensorFlow's do, and lets JAX have 64-bit types where they are asked for.
"""

from __future__ import annotations

import contextlib
import importlib as _importlib
import types as _types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax import _conversion, _devices, _display, _files, _function, _nest, _private, _specs, _tpu_system
from replicax import _data as _datasets
from replicax import _types as _words
from replicax import cluster_resolver as _resolvers
from replicax import tpu as _tpu
from replicax import train as _train
from replicax._creation import name_scope, variable_creator_scope
from replicax._distributed_variables import MirroredVariable as _MirroredVariable
from replicax._errors import DataLossError, InvalidArgumentError, OutOfRangeError
from replicax._indexed_slices import IndexedSlices
from replicax._input import DistributedDataset, DistributedIterator
from replicax._specs import TensorShape, TensorSpec
from replicax._tape import GradientTape, UnconnectedGradients
from replicax._types import VariableAggregation, VariableSynchronization
from replicax._values import DistributedValues
from replicax._values import Mirrored as _Mirrored
from replicax._values import PerReplica as _PerReplica
from replicax._variables import Variable
from replicax.tf import _ops, _random, compat, distribute
from replicax.tf._module import Module
from replicax.tf._ops import (
    abs,
    add,
    add_n,
    argmax,
    cast,
    concat,
    cond,
    constant,
    convert_to_tensor,
    divide,
    equal,
    exp,
    fill,
    identity,
    is_tensor,
    matmul,
    maximum,
    minimum,
    multiply,
    one_hot,
    ones,
    ones_like,
    pow,
    print,
    range,
    reduce_all,
    reduce_any,
    reduce_max,
    reduce_mean,
    reduce_min,
    reduce_prod,
    reduce_sum,
    reshape,
    shape,
    sigmoid,
    sqrt,
    square,
    stack,
    subtract,
    tanh,
    zeros,
    zeros_like,
)

Tensor = jax.Array

for _name in [
    "float16",
    "float32",
    "float64",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "complex64",
    "complex128",
    "bool",
]:
    globals()[_name] = np.dtype(_name)
bfloat16 = np.dtype(jnp.bfloat16)
string = np.dtype(object)


def _namespace(name: str, doc: str, **members: Any) -> _types.ModuleType:
    module = _types.ModuleType(f"{__name__}.{name}", doc)
    module.__dict__.update(members)
    return module


def function(func: Any = None, input_signature: Any = None, autograph: bool = True, **options: Any) -> Any:
    """`replicax.function`, with AutoGraph unless `autograph=False`: control flow on tensors is compiled."""
    return _function.function(func, input_signature, autograph, **options)


function.__signature__ = __import__("inspect").signature(_function.function)  # type: ignore[attr-defined]


def device(device_name: Any) -> contextlib.AbstractContextManager[Any]:
    """A context in which operations run on this device; None for wherever JAX puts them."""
    return contextlib.nullcontext() if device_name is None else jax.default_device(_devices.find_device(device_name))


def type_spec_from_value(value: Any) -> Any:
    """The spec of a value."""
    if isinstance(value, _PerReplica):
        return _specs.PerReplicaSpec(*(_specs.spec_of(part) for part in value.values))
    return _specs.spec_of(value)


# tf.nest


def _flatten(structure: Any, expand_composites: bool = False) -> list[Any]:
    leaves = _nest.leaves(structure)
    if not expand_composites:
        return leaves
    return [part for leaf in leaves for part in (leaf.values if isinstance(leaf, DistributedValues) else (leaf,))]


def _map_structure(func: Any, *structures: Any, expand_composites: bool = False) -> Any:
    def apply(leaves: Any) -> Any:
        if expand_composites and isinstance(leaves[0], _PerReplica):
            return _PerReplica([func(*parts) for parts in zip(*(leaf.values for leaf in leaves))], leaves[0].mesh)
        return func(*leaves)

    return _nest.merge(structures, apply)


nest = _namespace("nest", "Structures.", flatten=_flatten, map_structure=_map_structure)


# tf.types


class _PerReplicaType(type):
    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, _PerReplica)


class _MirroredType(type):
    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, (_Mirrored, _MirroredVariable))


class _PerReplicaLike(metaclass=_PerReplicaType):
    """Holds for per-replica values."""


class _MirroredLike(metaclass=_MirroredType):
    """Holds for mirrored values and variables."""


types = _namespace(
    "types",
    "Types to check for.",
    experimental=_namespace(
        "types.experimental",
        "Types to check for.",
        distributed=_namespace(
            "types.experimental.distributed",
            "Types of distributed values.",
            PerReplica=_PerReplicaLike,
            Mirrored=_MirroredLike,
        ),
    ),
)


# tf.config


class LogicalDevice:
    """A device by name and type."""

    def __init__(self, name: str, device_type: str):
        self.name, self.device_type = name, device_type

    def __repr__(self) -> str:
        return f"{type(self).__name__}(name={self.name!r}, device_type={self.device_type!r})"


class PhysicalDevice(LogicalDevice):
    """A device of the machine."""


class LogicalDeviceConfiguration:
    """One virtual device, for `set_logical_device_configuration`."""

    memory_limit: Any = None
    experimental_priority: Any = None
    experimental_device_ordinal: Any = None

    def __init__(
        self,
        memory_limit: Any = None,
        experimental_priority: Any = None,
        experimental_device_ordinal: Any = None,
    ):
        self.memory_limit, self.experimental_priority = memory_limit, experimental_priority
        self.experimental_device_ordinal = experimental_device_ordinal


_logical_counts: dict[str, int] = {}


def _list_logical_devices(device_type: str | None = None) -> list[LogicalDevice]:
    names = [name for name in _devices.device_table() if device_type in (None, name.split(":")[0])]
    return [LogicalDevice(f"/device:{name}", name.split(":")[0]) for name in names]


def _list_physical_devices(device_type: str | None = None) -> list[PhysicalDevice]:
    kinds = ["CPU"] if device_type in (None, "CPU") else []
    found = [PhysicalDevice(f"/physical_device:{kind}:0", kind) for kind in kinds]
    for kind in {kind for kind in _devices._virtual if kind != "CPU" and device_type in (None, kind)}:
        found += [PhysicalDevice(f"/physical_device:{kind}:{i}", kind) for i in np.arange(_devices._virtual[kind])]
    if not _devices._virtual and device_type != "CPU":
        names = [n for n in _devices.device_table() if not n.startswith("CPU")]
        found += [PhysicalDevice(f"/physical_device:{n}", n.split(":")[0]) for n in names]
    return found


def _set_logical_device_configuration(device: PhysicalDevice, logical_devices: Any) -> None:
    """Makes a device appear as several; before JAX starts."""
    counts = {**_devices._virtual, device.device_type: len(list(logical_devices))}
    _devices.set_virtual_devices(counts)


config = _namespace(
    "config",
    "Devices, and running functions eagerly.",
    LogicalDevice=LogicalDevice,
    PhysicalDevice=PhysicalDevice,
    LogicalDeviceConfiguration=LogicalDeviceConfiguration,
    list_logical_devices=_list_logical_devices,
    list_physical_devices=_list_physical_devices,
    set_logical_device_configuration=_set_logical_device_configuration,
    experimental_connect_to_cluster=_tpu_system.experimental_connect_to_cluster,
    experimental_connect_to_host=_tpu_system.experimental_connect_to_host,
    run_functions_eagerly=_function.run_functions_eagerly,
    functions_run_eagerly=_function.functions_run_eagerly,
)

autograph = _namespace(
    "autograph",
    "Control flow on tensors.",
    experimental=_namespace(
        "autograph.experimental", "Control flow on tensors.", do_not_convert=_conversion.do_not_convert
    ),
)
errors = _namespace(
    "errors",
    "Exceptions.",
    DataLossError=DataLossError,
    InvalidArgumentError=InvalidArgumentError,
    OutOfRangeError=OutOfRangeError,
)
data = _namespace(
    "data",
    "Datasets.",
    AUTOTUNE=_datasets.AUTOTUNE,
    INFINITE_CARDINALITY=_datasets.INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY=_datasets.UNKNOWN_CARDINALITY,
    Dataset=_datasets.Dataset,
    DatasetSpec=_datasets.DatasetSpec,
    Iterator=_datasets.DatasetIterator,
    NumpyIterator=_datasets.NumpyIterator,
    Options=_datasets.Options,
    FixedLengthRecordDataset=_files.FixedLengthRecordDataset,
    TFRecordDataset=_files.TFRecordDataset,
    TextLineDataset=_files.TextLineDataset,
    experimental=_namespace(
        "data.experimental",
        "Datasets' options.",
        AUTOTUNE=_datasets.AUTOTUNE,
        INFINITE_CARDINALITY=_datasets.INFINITE_CARDINALITY,
        UNKNOWN_CARDINALITY=_datasets.UNKNOWN_CARDINALITY,
        AutoShardPolicy=_words.AutoShardPolicy,
        DistributeOptions=_datasets.DistributeOptions,
    ),
)
experimental = _namespace("experimental", "An element that may not be there.", Optional=_datasets.Optional)
io = _namespace("io", "Files of records.", TFRecordWriter=_files.TFRecordWriter)
train = _namespace(
    "train",
    "Checkpoints, and the cluster to train on.",
    **{name: getattr(_train, name) for name in _train.__all__},
    ClusterDef=_resolvers.ClusterDef,
    ClusterSpec=_resolvers.ClusterSpec,
    JobDef=_resolvers.JobDef,
)
math = _namespace(
    "math",
    "Mathematics.",
    **{
        name: getattr(_ops, name)
        for name in ["abs", "add", "add_n", "divide", "equal", "exp", "log", "maximum", "minimum", "multiply", "pow"]
    },
    **{
        name: getattr(_ops, name)
        for name in ["reduce_sum", "reduce_mean", "reduce_max", "reduce_min", "sigmoid", "sqrt", "square"]
    },
    **{name: getattr(_ops, name) for name in ["subtract", "tanh", "argmax"]},
)
tpu = _namespace(
    "tpu",
    "TPU systems.",
    experimental=_namespace("tpu.experimental", "TPU systems.", **{name: getattr(_tpu, name) for name in _tpu.__all__}),
)
nn = _namespace("nn", "Neural networks.", relu=_ops.relu, softmax=_ops.softmax, tanh=tanh, sigmoid=sigmoid)
random = _namespace(
    "random",
    "Random numbers.",
    Generator=_random.Generator,
    normal=_random.normal,
    uniform=_random.uniform,
    set_seed=_random.set_seed,
    stateless_normal=_random.stateless_normal,
    stateless_uniform=_random.stateless_uniform,
)


def _dress_arrays() -> None:
    """Gives JAX's arrays `numpy()`, `get_shape()` and TensorFlow's way of printing."""
    array_type: Any = _private.array_type()
    array_type.numpy = _ops_numpy
    array_type.get_shape = jax.core.Tracer.get_shape = _ops.get_shape  # type: ignore[attr-defined]
    array_type.__str__, array_type.__repr__ = _display.tensor_str, _display.tensor_repr
    _display.style, _specs.dtype_prefix = "tensorflow", "tf."
    jax.config.update("jax_explicit_x64_dtypes", "allow")


def _ops_numpy(self: Any) -> Any:
    """The array as a numpy array, a scalar as a numpy scalar."""
    return np.asarray(self)[()]


_dress_arrays()

__version__ = __import__("replicax").__version__


def __getattr__(name: str) -> Any:
    if name == "keras":  # loaded on use
        return _importlib.import_module(f"{__name__}.keras")
    raise AttributeError(
        f"replicax.tf has no {name!r}. It offers what distributed training loops need first; the operations of "
        "jax.numpy work on its tensors too."
    )


__all__ = [name for name in dict(globals()) if not name.startswith("_")]
