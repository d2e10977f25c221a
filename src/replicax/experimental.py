"""Names that `tf.distribute` keeps under `experimental`."""

from replicax import _wiring as _wiring  # puts the parts together
from replicax import partitioners as partitioners
from replicax._strategies.central_storage import CentralStorageStrategy as CentralStorageStrategy

__all__ = ["CentralStorageStrategy", "partitioners"]
