"""Names for the types of what operations take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

# What `tf.convert_to_tensor` makes a tensor of: numbers, text, arrays, variables, lists of them. It says itself what it
# refuses, so no type is narrower.
TensorLike: TypeAlias = object
# A dtype as TensorFlow's users spell it: `tf.float32`, a name, a type of NumPy or Python.
DTypeLike: TypeAlias = "np.dtype | str | type"
# The sizes of dimensions, or a tensor of them.
ShapeLike: TypeAlias = "Sequence[int | None] | TensorLike"
