"""Names that `tf.distribute` keeps under `experimental`."""

from replicax._central import CentralStorageStrategy as CentralStorageStrategy

__all__ = ["CentralStorageStrategy"]
