"""`tf.distribute`: the strategies and related names, as in TensorFlow."""

from __future__ import annotations

import types as _modules
import typing as _typing

from replicax.tf import _core
from replicax.tf._absent import missing_from as _missing_from
from replicax.tf._core import (
    CentralStorageStrategy,
    CommunicationImplementation,
    CommunicationOptions,
    CrossDeviceOps,
    DistributedDataset,
    DistributedIterator,
    DistributedValues,
    ExperimentalMultiWorkerMirroredStrategy,
    HierarchicalCopyAllReduce,
    InputContext,
    InputOptions,
    InputReplicationMode,
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    NcclAllReduce,
    OneDeviceStrategy,
    PreemptionCheckpointHandler,
    PreemptionWatcher,
    ReduceOp,
    ReductionToOneDevice,
    ReplicaContext,
    RunOptions,
    Strategy,
    StrategyExtended,
    TerminationConfig,
    TPUStrategy,
    ValueContext,
    _rpc,
    experimental_set_strategy,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
    partitioners,
)
from replicax.tf._older_strategies import ExperimentalTPUStrategy as _ExperimentalTPUStrategy

if _typing.TYPE_CHECKING:
    from replicax.tf._core import ParameterServerStrategy, Server, cluster_resolver, coordinator


class CollectiveHints:
    """The older spelling of `CommunicationOptions`; calling it makes one of those."""

    def __new__(cls, bytes_per_pack: int = 0, timeout_seconds: float | None = None) -> CommunicationOptions:  # type: ignore[misc]
        return CommunicationOptions(bytes_per_pack=bytes_per_pack, timeout_seconds=timeout_seconds)


_LATE = ("ParameterServerStrategy", "Server", "cluster_resolver", "coordinator")  # imported on first use


def _late(name: str) -> _typing.Any:
    """Return a name that is imported on first use."""
    return getattr(_core, name)


def _experimental_name(name: str) -> object:
    if name == "ParameterServerStrategy":
        return _late(name)
    if name == "coordinator":
        found = _modules.ModuleType(f"{__name__}.experimental.coordinator", _late(name).__doc__)
        for own in ("ClusterCoordinator", "RemoteValue"):
            setattr(found, own, getattr(_late(name), own))
        found.__dict__["PerWorkerValues"] = _late(name).PerWorkerValue
        experimental.__dict__["coordinator"] = found
        return found
    return _missing_from("distribute.experimental", otherwise="")(name)


_experimental_rpc = _modules.ModuleType(f"{__name__}.experimental.rpc", "Remote calls of compiled functions.")
_experimental_rpc.__dict__.update(Client=_rpc.Client, Server=_rpc.Server)
experimental = _modules.ModuleType(f"{__name__}.experimental", "Names that TensorFlow keeps under `experimental`.")
experimental.__dict__.update(
    CentralStorageStrategy=CentralStorageStrategy,
    CollectiveCommunication=CommunicationImplementation,
    CollectiveHints=CollectiveHints,
    CommunicationImplementation=CommunicationImplementation,
    CommunicationOptions=CommunicationOptions,
    MultiWorkerMirroredStrategy=ExperimentalMultiWorkerMirroredStrategy,
    PreemptionCheckpointHandler=PreemptionCheckpointHandler,
    PreemptionWatcher=PreemptionWatcher,
    TPUStrategy=_ExperimentalTPUStrategy,
    TerminationConfig=TerminationConfig,
    ValueContext=ValueContext,
    partitioners=partitioners,
    rpc=_experimental_rpc,
    __getattr__=_experimental_name,
)

__all__ = [
    "CrossDeviceOps",
    "DistributedDataset",
    "DistributedIterator",
    "DistributedValues",
    "HierarchicalCopyAllReduce",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaContext",
    "RunOptions",
    "Server",
    "Strategy",
    "StrategyExtended",
    "TPUStrategy",
    "cluster_resolver",
    "coordinator",
    "experimental",
    "experimental_set_strategy",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
]


def __getattr__(name: str) -> object:
    if name in _LATE:
        return _late(name)
    return _missing_from("distribute", otherwise="")(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
