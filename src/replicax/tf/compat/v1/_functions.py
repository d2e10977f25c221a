"""Functions of TensorFlow 1 that no function of TensorFlow 2 stands for."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from replicax.tf import _indexing
from replicax.tf._core import TFRecordDataset, doc_pages
from replicax.tf._host import jnp
from replicax.tf._ops import convert_to_tensor
from replicax.tf._types import TensorLike


def summary_iterator(path: str) -> Iterator[Any]:
    """Returns an iterator over the events in a file of summaries, as tensorboardX's messages of type `Event`."""
    try:
        events = importlib.import_module("tensorboardX.proto.event_pb2")
    except ImportError as error:
        install = doc_pages.install("summary")
        raise ImportError(f"tf.compat.v1.train.summary_iterator needs tensorboardX: {install}.") from error
    return (events.Event.FromString(record) for record in TFRecordDataset(path).as_numpy_iterator())


def where(condition: TensorLike, x: TensorLike = None, y: TensorLike = None, name: str | None = None) -> jax.Array:
    """Returns elements of `x` where the condition is true and of `y` elsewhere; a vector chooses among their rows."""
    chosen, several = convert_to_tensor(condition), None if x is None else convert_to_tensor(x)
    if several is not None and np.ndim(chosen) == 1 < np.ndim(several):
        chosen = jnp.reshape(chosen, (-1, *[1] * (np.ndim(several) - 1)))
    return _indexing.where(chosen, several, y)


BY_NAME = {"train.summary_iterator": summary_iterator, "where": where}
