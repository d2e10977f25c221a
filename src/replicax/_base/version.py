"""The version of replicax. This is its only place: the package's metadata is made from it."""

__version__ = "0.1.0"
