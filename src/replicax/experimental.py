"""Names that `tf.distribute` keeps under `experimental`.

>>> import replicax as rx
>>> rx.experimental.CentralStorageStrategy(["GPU:0", "GPU:1"]).num_replicas_in_sync
2
"""

import importlib as _importlib
import typing as _typing

from replicax import _wiring as _wiring  # puts the parts together
from replicax import partitioners as partitioners
from replicax._base.planning import abstract_variables as abstract_variables
from replicax._strategies.central_storage import CentralStorageStrategy as CentralStorageStrategy

if _typing.TYPE_CHECKING:
    from replicax import _rpc as rpc
    from replicax._checkpoint.preemption import PreemptionCheckpointHandler as PreemptionCheckpointHandler
    from replicax._checkpoint.preemption import TerminationConfig as TerminationConfig
    from replicax._cluster.preemption import PreemptionWatcher as PreemptionWatcher
    from replicax._saved_model.pytrees import load_model as load_model
    from replicax._saved_model.pytrees import save_model as save_model

# Imported on use.
_MODULES = {
    "PreemptionCheckpointHandler": "_checkpoint.preemption",
    "PreemptionWatcher": "_cluster.preemption",
    "TerminationConfig": "_checkpoint.preemption",
    "load_model": "_saved_model.pytrees",
    "save_model": "_saved_model.pytrees",
}

__all__ = [
    "CentralStorageStrategy",
    "PreemptionCheckpointHandler",
    "PreemptionWatcher",
    "TerminationConfig",
    "abstract_variables",
    "load_model",
    "partitioners",
    "rpc",
    "save_model",
]


def __getattr__(name: str) -> object:
    if name == "rpc":
        return _importlib.import_module("replicax._rpc")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    return getattr(_importlib.import_module(f"replicax.{_MODULES[name]}"), name)
