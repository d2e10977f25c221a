"""The programming model of tf.distribute on JAX.

Write what one replica does; a `Strategy` runs it on every replica, keeps the variables in step, splits the input and
reduces the results. The names below have docstrings with examples; docs/guide.md is the guide.
"""

import importlib as _importlib
import typing as _typing

from replicax import _devices

_devices.configure_from_environment()

# ruff: noqa: E402
from replicax import config, data, experimental, tpu
from replicax._accumulating import accumulate_gradients
from replicax._cluster.spec import ClusterSpec
from replicax._context import (
    ReplicaContext,
    experimental_set_strategy,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from replicax._creation import name_scope, variable_creator_scope
from replicax._cross_device_ops import (
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
)
from replicax._default import _DefaultDistributionStrategy as _DefaultDistributionStrategy
from replicax._errors import (
    CheckpointError,
    DataLossError,
    DeviceError,
    InvalidArgumentError,
    JobError,
    OutOfRangeError,
    ReplicaError,
    ReplicaxError,
)
from replicax._extended import StrategyExtended
from replicax._figures import Benchmark, Benchmarks
from replicax._function import Function, function
from replicax._indexed_slices import IndexedSlices
from replicax._input import DistributedDataset, DistributedIterator
from replicax._mirrored import MirroredStrategy
from replicax._multi_worker import MultiWorkerMirroredStrategy
from replicax._one_device import OneDeviceStrategy
from replicax._optimizer import Optimizer
from replicax._profiling import profile
from replicax._specs import PerReplicaSpec, TensorSpec
from replicax._strategy import Strategy
from replicax._tape import GradientTape, UnconnectedGradients
from replicax._tpu import TPUStrategy
from replicax._types import (
    CommunicationImplementation,
    CommunicationOptions,
    InputContext,
    InputOptions,
    InputReplicationMode,
    ReduceOp,
    RunOptions,
    ValueContext,
    VariableAggregation,
    VariableSynchronization,
)
from replicax._values import DistributedValues, Mirrored, PerReplica
from replicax._variables import Variable

if _typing.TYPE_CHECKING:
    from replicax import cluster_resolver, train

__version__ = "0.1.0"

__all__ = [
    "Benchmark",
    "Benchmarks",
    "CheckpointError",
    "ClusterSpec",
    "CommunicationImplementation",
    "CommunicationOptions",
    "CrossDeviceOps",
    "DataLossError",
    "DeviceError",
    "DistributedDataset",
    "DistributedIterator",
    "DistributedValues",
    "Function",
    "GradientTape",
    "HierarchicalCopyAllReduce",
    "IndexedSlices",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "InvalidArgumentError",
    "JobError",
    "Mirrored",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "Optimizer",
    "OutOfRangeError",
    "PerReplica",
    "PerReplicaSpec",
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaContext",
    "ReplicaError",
    "ReplicaxError",
    "RunOptions",
    "Strategy",
    "StrategyExtended",
    "TPUStrategy",
    "TensorSpec",
    "UnconnectedGradients",
    "ValueContext",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "accumulate_gradients",
    "cluster_resolver",
    "config",
    "data",
    "experimental",
    "experimental_set_strategy",
    "function",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "name_scope",
    "profile",
    "tpu",
    "train",
    "variable_creator_scope",
]


def __getattr__(name: str) -> object:
    if name in ("cluster_resolver", "train"):  # loaded on use
        return _importlib.import_module(f"replicax.{name}")
    raise AttributeError(f"module 'replicax' has no attribute {name!r}", name=name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
