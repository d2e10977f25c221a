"""`tf.compat.v1.distribute`: the strategies with the older methods mixed in, and names that stayed the same."""

from __future__ import annotations

import types as _modules
import typing as _typing
from typing import Any

from replicax.tf import distribute as _v2
from replicax.tf._older_strategies import V1Methods as _V1Methods
from replicax.tf._older_strategies import get_loss_reduction
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

if _typing.TYPE_CHECKING:
    from replicax.tf._core import ClusterResolver


def _with_v1_methods(name: str, strategy: type[_v2.Strategy], **own: object) -> type[_v2.Strategy]:
    """The strategy of this name with the older methods, and with what its older class alone had."""
    bases = (_V1Methods, strategy) if strategy is _v2.Strategy else (Strategy, strategy)
    return type(f"{name}V1", bases, {"__doc__": strategy.__doc__, "__module__": __name__, **own})


def _init_tpu(
    self: Any,
    tpu_cluster_resolver: ClusterResolver | None = None,
    steps_per_run: int | None = None,
    device_assignment: object = None,
) -> None:
    self._steps_per_run = 1 if steps_per_run is None else steps_per_run
    _v2.experimental.TPUStrategy.__init__(self, tpu_cluster_resolver, device_assignment)


def _init_parameter_servers(self: Any, cluster_resolver: ClusterResolver | None = None) -> None:
    from replicax.tf._core import TFConfigClusterResolver

    spec = (cluster_resolver or TFConfigClusterResolver()).cluster_spec()
    if "ps" in spec.jobs:
        raise NotImplementedError(
            "tf.compat.v1.distribute.experimental.ParameterServerStrategy with parameter servers needs TensorFlow 1's "
            f"sessions, which replicax has none of; the cluster is {spec}. Use tf.distribute.ParameterServerStrategy, "
            "and schedule functions with tf.distribute.coordinator.ClusterCoordinator."
        )
    _v2.experimental.CentralStorageStrategy.__init__(self)
    self.extended._cluster_resolver = cluster_resolver


Strategy = _with_v1_methods("Strategy", _v2.Strategy)
MirroredStrategy = _with_v1_methods("MirroredStrategy", _v2.MirroredStrategy)
OneDeviceStrategy = _with_v1_methods("OneDeviceStrategy", _v2.OneDeviceStrategy)

experimental = _modules.ModuleType(f"{__name__}.experimental", "Names that TensorFlow keeps under `experimental`.")
for _name in ("CollectiveCommunication", "CollectiveHints", "CommunicationImplementation", "CommunicationOptions"):
    setattr(experimental, _name, getattr(_v2.experimental, _name))
_steps_per_run = property(lambda self: self._steps_per_run, doc="As given; each `run` is one step.")
_own: dict[str, dict[str, object]] = {
    "CentralStorageStrategy": {},
    "MultiWorkerMirroredStrategy": {},
    "TPUStrategy": {"__init__": _init_tpu, "steps_per_run": _steps_per_run},
}
for _name, _members in _own.items():
    if hasattr(_v2.experimental, _name):
        setattr(experimental, _name, _with_v1_methods(_name, getattr(_v2.experimental, _name), **_members))

experimental.__dict__["ParameterServerStrategy"] = _with_v1_methods(
    "ParameterServerStrategy",
    _v2.experimental.CentralStorageStrategy,
    __doc__="Without parameter servers: one copy of each variable for the replicas of this process, one on each GPU.",
    __init__=_init_parameter_servers,
)

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
