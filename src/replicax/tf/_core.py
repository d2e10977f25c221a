"""The door to the core: what `replicax.tf` takes from the rest of replicax comes through this module alone.

`tests/test_layers.py` checks that. A module that few programs need is imported at the first use of its name.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from replicax import _api, _rpc, data, partitioners
from replicax._base import (
    array_conversion,
    array_text,
    devices,
    doc_pages,
    errors,
    foreign_state,
    frontend,
    host_memory,
    jax_internals,
    jaxprs,
    nest,
    pickling,
    specs,
    thread_state,
    tracebacks,
)
from replicax._base.array_conversion import as_array
from replicax._base.atomic_files import AnyPath
from replicax._base.errors import (
    CancelledError,
    DataLossError,
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    InvalidOperandError,
    NotFoundError,
    OutOfRangeError,
    ReplicaxError,
    UnavailableError,
)
from replicax._base.foreign_state import Original, holds_variable, wrap
from replicax._base.host_memory import Pool
from replicax._base.indexed_slices import IndexedSlices
from replicax._base.jaxprs import equations
from replicax._base.messages import received, shown
from replicax._base.specs import PerReplicaSpec, TensorShape, TensorSpec, as_dtype, dtype_name, spec_of
from replicax._base.type_spec import TypeSpec
from replicax._base.types import (
    CommunicationImplementation,
    CommunicationOptions,
    InputContext,
    InputOptions,
    InputReplicationMode,
    Leaf,
    ReduceOp,
    RunOptions,
    Tree,
    ValueContext,
    VariableAggregation,
    VariableSynchronization,
)
from replicax._base.version import __version__
from replicax._checkpoint import object_graph
from replicax._checkpoint.preemption import PreemptionCheckpointHandler, TerminationConfig
from replicax._cluster import tpu_system
from replicax._cluster.preemption import PreemptionWatcher
from replicax._cluster.resolver import ClusterResolver
from replicax._cluster.topology import DeviceAssignment
from replicax._collectives.cross_device_ops import (
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
)
from replicax._control_flow import traced_block
from replicax._data import calls, files
from replicax._data.base import Variant
from replicax._data.blocks import Blocks, Signature, length, row, rows
from replicax._data.calls import call_user
from replicax._data.composites import Composite, has_composites, is_composite
from replicax._data.compression import TFRecordOptions, opened, record_compression
from replicax._data.dataset import Dataset, to_variant
from replicax._data.elements import (
    Nested,
    Probe,
    Strings,
    as_host,
    as_numpy,
    as_strings,
    as_tensor,
    cut,
    flatten,
    joined,
    stack,
    tensors_of,
)
from replicax._data.elsewhere import Item
from replicax._data.files import TFRecordDataset, TFRecordWriter
from replicax._data.functions import ElementFunction, MapOptions, Results
from replicax._data.iterators import DatasetIterator, Optional
from replicax._data.nodes.files import Files
from replicax._data.nodes.node import Node, node_of
from replicax._data.options import AutotuneOptions, OptimizationOptions, ServiceOptions, ThreadingOptions
from replicax._data.ragged import RaggedTensor, RaggedTensorSpec, select_rows
from replicax._data.reading import Draws, FunctionSeeds, Reading, use_default_seed
from replicax._data.skipping import Recipe, Skip
from replicax._data.sources import folder_of, names_of
from replicax._data.sparse import SparseTensor, SparseTensorSpec
from replicax._data.specs import DatasetSpec
from replicax._engine import function as function_module
from replicax._engine import modes
from replicax._engine.function import Function, function, is_function
from replicax._input.distributed_dataset import DistributedDataset
from replicax._input.iterator import DistributedIterator
from replicax._report.profiling import profile
from replicax._strategies.central_storage import CentralStorageStrategy
from replicax._strategies.default import get_strategy
from replicax._strategies.extended import StrategyExtended
from replicax._strategies.mirrored import MirroredStrategy
from replicax._strategies.multi_worker import ExperimentalMultiWorkerMirroredStrategy, MultiWorkerMirroredStrategy
from replicax._strategies.one_device import OneDeviceStrategy
from replicax._strategies.strategy import Strategy
from replicax._strategies.tpu import TPUExtended, TPUStrategy
from replicax._tracing import active_tapes, autograph_switch, context, dataset_reads, frames, step_failures
from replicax._tracing.context import (
    ReplicaContext,
    StrategyLike,
    experimental_set_strategy,
    get_replica_context,
    has_strategy,
    in_cross_replica_context,
)
from replicax._tracing.tape import GradientTape, UnconnectedGradients
from replicax._values import DistributedValues, Mirrored, PerReplica, mesh_of
from replicax._values import errors as value_errors
from replicax._variables import creators
from replicax._variables.assigned_alike import MayDiffer
from replicax._variables.creators import name_scope, variable_creator_scope
from replicax._variables.distributed import MirroredVariable
from replicax._variables.leaves import convert_dtype
from replicax._variables.resource import ResourceVariable
from replicax._variables.variable import Variable, hide

if TYPE_CHECKING:
    from replicax import cluster_resolver, coordinator, tpu, train
    from replicax._control_flow import cond_and_loops
    from replicax._parameter_server import scheduling
    from replicax._parameter_server.server import Server
    from replicax._saved_model import loading, saving
    from replicax._saved_model.asset import Asset
    from replicax._saved_model.signatures import DEFAULT
    from replicax._strategies.parameter_server import ParameterServerStrategy
    from replicax.cluster_resolver import TFConfigClusterResolver

# Where each name comes from that is imported on first use: the module, and the name in it (None for the module itself).
_LATER: dict[str, tuple[str, str | None]] = {
    "cluster_resolver": ("replicax.cluster_resolver", None),
    "coordinator": ("replicax.coordinator", None),
    "tpu": ("replicax.tpu", None),
    "train": ("replicax.train", None),
    "cond_and_loops": ("replicax._control_flow.cond_and_loops", None),
    "scheduling": ("replicax._parameter_server.scheduling", None),
    "Server": ("replicax._parameter_server.server", "Server"),
    "loading": ("replicax._saved_model.loading", None),
    "saving": ("replicax._saved_model.saving", None),
    "Asset": ("replicax._saved_model.asset", "Asset"),
    "DEFAULT": ("replicax._saved_model.signatures", "DEFAULT"),
    "ParameterServerStrategy": ("replicax._strategies.parameter_server", "ParameterServerStrategy"),
    "TFConfigClusterResolver": ("replicax.cluster_resolver", "TFConfigClusterResolver"),
}


def __getattr__(name: str) -> object:
    """Import a name of `_LATER`."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _LATER[name]
    value = importlib.import_module(module)
    result: object = value if attribute is None else getattr(value, attribute)
    globals()[name] = result
    return result
