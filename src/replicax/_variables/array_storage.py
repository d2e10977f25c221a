"""Storage of one copy: each leaf is an array on one device."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import jax

from replicax._variables import packed_storage
from replicax._variables.storage import Storage, Types, on_one_device


class ArrayStorage(Storage):
    """The arrays of a variable that has one copy.

    Args:
        name, types, lent: see `Storage`.
        arrays: the leaves.
    """

    def __init__(self, name: str, types: Types, arrays: list[Any], lent: bool):
        super().__init__(name, types, None, lent)
        self.arrays = arrays

    def stay_on(self, device: jax.Device, arrays: list[Any]) -> None:
        """Keeps these arrays in place of those so far, and all later ones, on this device."""
        self.device, self.arrays = device, arrays

    def placed(self, leaves: list[Any]) -> list[Any]:
        """Returns the leaves on the device that they stay on, or where they are."""
        return [on_one_device(leaf, self.device) for leaf in leaves]

    def returned(self, leaves: Sequence[Any]) -> Sequence[Any]:
        return self.placed(list(leaves))

    def vector_home(self, index: int) -> Hashable:
        leaf = self.arrays[index]
        if not leaf.is_fully_addressable:
            return None
        (device, *others) = leaf.devices()
        return (
            None
            if others
            else packed_storage.VectorHome(device, committed=leaf.committed, stays=self.device is not None)
        )

    def may_be_listed(self, spread: bool) -> bool:
        return not spread
