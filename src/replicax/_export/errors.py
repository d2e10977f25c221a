"""The error of `replicax export`."""


class ExportError(ValueError):
    """A saved model cannot be converted."""
