"""Variables as arrays: arithmetic, indexing and conversion to other types, all of which work on the value."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jax.typing import DTypeLike

from replicax._base import frontend
from replicax._base.types import Leaf, Tree
from replicax._tracing import lost_values
from replicax._values import ArrayOperators, PerReplica


class ArrayProtocol(ArrayOperators):
    """Makes an object that has a value usable in place of its value."""

    value: Callable[[], Tree]
    numpy: Callable[[], Tree]

    def _operand(self) -> Tree:
        return self.value()

    def _check_other(self, other: object) -> None:
        if isinstance(other, PerReplica):
            raise AttributeError(
                "A PerReplica value has no dtype and is no operand of arithmetic outside of a replica: pass it to "
                "`strategy.run` and compute there."
            )

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.numpy(), dtype=dtype)

    def __getitem__(self, index: Tree) -> Leaf:
        part = super().__getitem__(index)
        if (note_part := frontend.current.note_part) is not None:
            note_part(part, self, index)
        return part

    def _waiting(self) -> lost_values.explaining:
        return lost_values.explaining(self)
