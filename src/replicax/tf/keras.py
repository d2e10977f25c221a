"""Keras 3 itself, on its JAX backend and with support for strategies: `replicax.tf.keras` and everything in it.

The names are those of TensorFlow's `tf.keras`. Keras has them in a module of its own, since names such as
`losses.Reduction` and `losses.MSE` are not in `import keras` any more. The classes are the same.

>>> from replicax.tf import keras
>>> keras.backend.backend()
'jax'
>>> keras.losses.Reduction.NONE
'none'
"""

import importlib
import sys
from typing import Any

from replicax.tf import _deferred, _imports, _keras_export, _preprocessing
from replicax.tf._core import foreign_state


def _through_our_summaries() -> None:
    """Makes the callback TensorBoard write through `tf.summary`; Keras's imports TensorFlow on every backend."""
    from replicax import tf

    callback: Any = keras.callbacks.TensorBoard
    callback.summary = property(lambda self: tf.summary)
    callback._write_keras_model_summary = lambda self: None  # it draws the layers with TensorFlow's protocol buffers


with _deferred.deferring():
    foreign_state.load("keras")
    keras: Any = importlib.import_module("keras._tf_keras.keras")
_through_our_summaries()
_imports.introduce_to_keras()
_preprocessing.serve()
_keras_export.serve(keras)
sys.modules[__name__] = keras
