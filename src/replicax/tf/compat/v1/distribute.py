"""`tf.compat.v1.distribute`: the strategies with the older methods mixed in, and names that stayed the same."""

from __future__ import annotations

import types as _modules
from collections.abc import Callable
from typing import Any

from replicax._older import V1Methods, get_loss_reduction
from replicax.tf import distribute as _v2
from replicax.tf.distribute import (
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    InputContext,
    InputReplicationMode,
    NcclAllReduce,
    ReduceOp,
    ReductionToOneDevice,
    ReplicaContext,
    RunOptions,
    StrategyExtended,
    experimental_set_strategy,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)


def _with_v1_methods(strategy: Any, init: Callable[..., None] | None = None) -> Any:
    """The strategy's class with the older methods; `init` takes the older arguments, where they were others."""
    contents = {"__doc__": strategy.__doc__, "__module__": __name__, **({"__init__": init} if init else {})}
    bases = (V1Methods, strategy) if strategy is _v2.Strategy else (Strategy, strategy)
    return type(f"{strategy.__name__}V1", bases, contents)


def _init_multi_worker(
    self: Any, communication: Any = _v2.experimental.CommunicationImplementation.AUTO, cluster_resolver: Any = None
) -> None:
    options = _v2.experimental.CommunicationOptions(implementation=communication)
    _v2.experimental.MultiWorkerMirroredStrategy.__init__(self, cluster_resolver, options)


def _init_tpu(
    self: Any, tpu_cluster_resolver: Any = None, steps_per_run: Any = None, device_assignment: Any = None
) -> None:
    self.steps_per_run = 1 if steps_per_run is None else steps_per_run  # of TensorFlow 1's loops on the TPU
    _v2.experimental.TPUStrategy.__init__(self, tpu_cluster_resolver, device_assignment)


Strategy = _with_v1_methods(_v2.Strategy)
MirroredStrategy = _with_v1_methods(_v2.MirroredStrategy)
OneDeviceStrategy = _with_v1_methods(_v2.OneDeviceStrategy)

experimental = _modules.ModuleType(f"{__name__}.experimental", "Names that TensorFlow keeps under `experimental`.")
for _name in ("CollectiveCommunication", "CollectiveHints", "CommunicationImplementation", "CommunicationOptions"):
    setattr(experimental, _name, getattr(_v2.experimental, _name))
_constructors: dict[str, Any] = {
    "CentralStorageStrategy": None,
    "MultiWorkerMirroredStrategy": _init_multi_worker,
    "TPUStrategy": _init_tpu,
}
for _name, _init in _constructors.items():
    if hasattr(_v2.experimental, _name):
        setattr(experimental, _name, _with_v1_methods(getattr(_v2.experimental, _name), _init))
experimental.TPUStrategy.steps_per_run = 1  # accepted, and without effect

__all__ = [
    "CrossDeviceOps",
    "HierarchicalCopyAllReduce",
    "InputContext",
    "InputReplicationMode",
    "MirroredStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaContext",
    "RunOptions",
    "Strategy",
    "StrategyExtended",
    "experimental",
    "experimental_set_strategy",
    "get_loss_reduction",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
]
for _name in ("Server", "cluster_resolver"):
    if hasattr(_v2, _name):
        globals()[_name] = getattr(_v2, _name)
        __all__ += [_name]
