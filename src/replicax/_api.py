"""The names of `replicax`. They are imported when one of them is first used, and JAX with them."""

import typing as _typing

from replicax import _wiring as _wiring  # puts the parts together
from replicax import config, data, experimental, tpu
from replicax._base.errors import (
    CancelledError,
    CheckpointError,
    DataLossError,
    DeviceError,
    InvalidArgumentError,
    JobError,
    OutOfRangeError,
    ReplicaError,
    ReplicaxError,
    StepError,
    UnavailableError,
)
from replicax._base.indexed_slices import IndexedSlices
from replicax._base.specs import PerReplicaSpec, TensorSpec
from replicax._base.types import (
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
from replicax._cluster.spec import ClusterSpec
from replicax._collectives.cross_device_ops import (
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
)
from replicax._engine.function import Function, function
from replicax._input.distributed_dataset import DistributedDataset
from replicax._input.iterator import DistributedIterator
from replicax._launch.function import launch
from replicax._optim.accumulate_gradients import accumulate_gradients
from replicax._optim.optimizer import Optimizer
from replicax._optim.share_of_mean import share_of_mean
from replicax._placement.step import show
from replicax._plan.api import plan
from replicax._plan.plans import Plan
from replicax._report.benchmark import Benchmark, Benchmarks
from replicax._report.placement import Placement
from replicax._report.profiling import profile
from replicax._strategies.default import _DefaultDistributionStrategy as _DefaultDistributionStrategy
from replicax._strategies.default import get_strategy
from replicax._strategies.extended import StrategyExtended
from replicax._strategies.mirrored import MirroredStrategy
from replicax._strategies.multi_worker import MultiWorkerMirroredStrategy
from replicax._strategies.one_device import OneDeviceStrategy
from replicax._strategies.strategy import Strategy
from replicax._strategies.tpu import TPUStrategy
from replicax._tracing.context import (
    ReplicaContext,
    experimental_set_strategy,
    get_replica_context,
    has_strategy,
    in_cross_replica_context,
)
from replicax._tracing.tape import GradientTape, UnconnectedGradients
from replicax._values import DistributedValues, Mirrored, PerReplica
from replicax._variables.creators import name_scope, variable_creator_scope
from replicax._variables.variable import Variable

if _typing.TYPE_CHECKING:
    from replicax import cluster_resolver, coordinator, train  # loaded on use
    from replicax.coordinator import ParameterServerStrategy

__all__ = [
    "Benchmark",
    "Benchmarks",
    "CancelledError",
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
    "ParameterServerStrategy",
    "PerReplica",
    "PerReplicaSpec",
    "Placement",
    "Plan",
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaContext",
    "ReplicaError",
    "ReplicaxError",
    "RunOptions",
    "StepError",
    "Strategy",
    "StrategyExtended",
    "TPUStrategy",
    "TensorSpec",
    "UnavailableError",
    "UnconnectedGradients",
    "ValueContext",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "accumulate_gradients",
    "cluster_resolver",
    "config",
    "coordinator",
    "data",
    "experimental",
    "experimental_set_strategy",
    "function",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "launch",
    "name_scope",
    "plan",
    "profile",
    "share_of_mean",
    "show",
    "tpu",
    "train",
    "variable_creator_scope",
]
