"""Names for the types of what operations take and return."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import jax
import numpy as np

from replicax.tf._core import Composite, IndexedSlices, PerReplica, RaggedTensor, SparseTensor, Variable

# What operations take for a tensor; `tf.convert_to_tensor` refuses what has no form there. None is for arguments that
# may be left out.
TensorLike: TypeAlias = (
    "jax.typing.ArrayLike | Variable | Composite | IndexedSlices | PerReplica | str | bytes | "
    "Sequence[TensorLike] | None"
)
# A dtype as TensorFlow's users spell it: `tf.float32`, a name, a type of NumPy or Python.
DTypeLike: TypeAlias = "np.dtype | str | type"
# The sizes of dimensions, or a tensor of them.
ShapeLike: TypeAlias = "Sequence[int | None] | TensorLike"
# What an operation returns for a ragged tensor, or for a ragged or sparse one; for others, a dense tensor.
Rows: TypeAlias = "jax.Array | RaggedTensor"
Composed: TypeAlias = "jax.Array | RaggedTensor | SparseTensor"
