"""Functions that workers run for a coordinator, with variables on parameter servers; see `ParameterServerStrategy`.

>>> from replicax.coordinator import Server
>>> Server.create_local_server(start=False).server_def.job_name
'localhost'
"""

from replicax import _wiring as _wiring  # puts the parts together
from replicax._parameter_server.coordinator import ClusterCoordinator
from replicax._parameter_server.datasets import PerWorkerValue
from replicax._parameter_server.remote_value import RemoteValue
from replicax._parameter_server.scheduling import experimental_get_current_worker_index
from replicax._parameter_server.server import Server
from replicax._strategies.parameter_server import ParameterServerStrategy

__all__ = [
    "ClusterCoordinator",
    "ParameterServerStrategy",
    "PerWorkerValue",
    "RemoteValue",
    "Server",
    "experimental_get_current_worker_index",
]
