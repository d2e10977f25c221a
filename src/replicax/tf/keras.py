"""Keras 3 itself, on its JAX backend and on the strategies: `replicax.tf.keras` and everything in it.

>>> from replicax.tf import keras
>>> keras.backend.backend()
'jax'
"""

import sys

from replicax import _adapters

sys.modules[__name__] = _adapters.load("keras")
