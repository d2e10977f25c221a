"""`tf.TensorArray`: tensors written one by one, in loops too."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import TypeAlias

import jax
import numpy as np

from replicax.tf._core import InvalidArgumentError, OutOfRangeError, TensorShape, as_dtype, frames
from replicax.tf._host import jnp
from replicax.tf._ops import as_int, convert_to_tensor, is_known, known
from replicax.tf._types import DTypeLike, TensorLike

# What a program knows of an array: the dtype, whether it grows, and the size.
_Known: TypeAlias = tuple[np.dtype, bool, int]
_BOUND = "Pass its size, or its largest possible size, as `size=`."


@jax.tree_util.register_pytree_node_class
class TensorArray:
    """A list of tensors of one shape and dtype, which are written and read by index.

    Methods that write return the new array: `array = array.write(i, x)`. In compiled code the size must be known: a
    function in which an array grows (`dynamic_size=True`) in a loop on tensors runs on the host.

    Args:
        dtype: the dtype of the tensors.
        size: their number.
        dynamic_size: whether writing beyond the size makes it larger.
        clear_after_read: accepted for compatibility: a tensor may be read again.
        tensor_array_name: accepted for compatibility.
        handle: accepted for compatibility.
        flow: accepted for compatibility.
        infer_shape: True: all tensors have one shape.
        element_shape: their shape, if it has to be known before the first is written.
        colocate_with_first_write_call: accepted for compatibility.
        name: accepted for compatibility.

    Raises:
        OutOfRangeError: an index is known to be beyond the size.
        ValueError: `infer_shape=False`, which would allow tensors of different shapes, or a tensor differs in shape
            from those before.

    >>> import replicax.tf as tf
    >>> array = tf.TensorArray(tf.float32, size=2)
    >>> array = array.write(0, [1.0, 2.0]).write(1, [3.0, 4.0])
    >>> array.stack().numpy().tolist(), array.read(1).numpy().tolist()
    ([[1.0, 2.0], [3.0, 4.0]], [3.0, 4.0])
    """

    def __init__(
        self,
        dtype: DTypeLike,
        size: TensorLike = None,
        dynamic_size: bool | None = None,
        clear_after_read: bool | None = None,
        tensor_array_name: str | None = None,
        handle: object = None,
        flow: object = None,
        infer_shape: bool = True,
        element_shape: Iterable[int | None] | int | None = None,
        colocate_with_first_write_call: bool = True,
        name: str | None = None,
    ):
        if not infer_shape:
            raise ValueError(
                "A TensorArray holds tensors of one shape, and got infer_shape=False. Collect tensors of different "
                "shapes in a Python list, and join them with tf.concat."
            )
        self._dtype, self._dynamic = as_dtype(dtype), bool(dynamic_size)
        self._size = 0 if size is None else as_int(size, "The size of a TensorArray")
        # The stacked tensors, padded with zeros to avoid a program for each size; None before the first shape is known.
        self._tensors: jax.Array | None = None
        shape = None if element_shape is None else TensorShape(element_shape)
        if shape is not None and shape.is_fully_defined():
            self._tensors = jnp.zeros((self._size, *shape), self._dtype)

    def tree_flatten(self) -> tuple[tuple[jax.Array | None], _Known]:
        return (self._tensors,), (self._dtype, self._dynamic, self._size)

    @classmethod
    def tree_unflatten(cls, known: _Known, children: tuple[jax.Array | None]) -> TensorArray:
        array = object.__new__(cls)
        array._dtype, array._dynamic, array._size = known
        (array._tensors,) = children
        return array

    def _with(self, tensors: jax.Array, size: int) -> TensorArray:
        """Returns this array with other tensors. Outside of compiled code it is the same object, as in TensorFlow."""
        array = copy.copy(self) if frames.is_tracing() else self
        array._tensors, array._size = tensors, size
        return array

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the tensors."""
        return self._dtype

    @property
    def dynamic_size(self) -> bool:
        """Whether writing makes it larger."""
        return self._dynamic

    @property
    def element_shape(self) -> TensorShape:
        """The shape of the tensors."""
        return TensorShape(None if self._tensors is None else self._tensors.shape[1:])

    def size(self, name: str | None = None) -> jax.Array:
        """Returns the number of tensors."""
        return convert_to_tensor(self._size)

    def identity(self) -> TensorArray:
        """Returns the array."""
        return self

    def close(self, name: str | None = None) -> None:
        """Does nothing."""

    def _room_for(self, index: TensorLike) -> None:
        """Grows the array for a tensor at this index; raises `OutOfRangeError` if it cannot grow."""
        if not self._dynamic and not is_known(index):
            return
        number = int(known(index, "An index at which a TensorArray may grow", _BOUND))
        if number < 0 or (number >= self._size and not self._dynamic):
            raise OutOfRangeError(
                f"Tried to write to index {number} but array is not resizeable and size is: {self._size}. Give it a "
                "larger `size`, or dynamic_size=True."
            )

    def write(self, index: TensorLike, value: TensorLike, name: str | None = None) -> TensorArray:
        """Returns the array with `value` at this index."""
        index, value = convert_to_tensor(index), convert_to_tensor(value, dtype_hint=self._dtype)
        self._room_for(index)
        tensors, size = self._stacked_like(value), self._size
        if self._dynamic:
            size = max(size, int(known(index, "The place", _BOUND)) + 1)
        if size > len(tensors):
            more = max(size, 2 * len(tensors)) - len(tensors)
            tensors = jnp.concatenate([tensors, jnp.zeros((more, *tensors.shape[1:]), tensors.dtype)])
        return self._with(tensors.at[index].set(value), size)

    def _stacked_like(self, value: jax.Array) -> jax.Array:
        """Returns the stacked tensors, with the shape of `value`."""
        if value.dtype != self._dtype:
            raise InvalidArgumentError(
                f"A TensorArray of {self._dtype} cannot take a tensor of {value.dtype}. Cast it with tf.cast."
            )
        if self._tensors is None:
            return jnp.zeros((self._size, *value.shape), self._dtype)
        if self._tensors.shape[1:] != value.shape:
            raise ValueError(
                f"A TensorArray of tensors of shape {self._tensors.shape[1:]} cannot take one of shape {value.shape}."
            )
        return self._tensors

    def _written(self) -> jax.Array:
        if self._tensors is None:
            raise InvalidArgumentError(
                f"Nothing has been written to this TensorArray of {self._size} tensors, so that their shape is not "
                "known. Give it an `element_shape`."
            )
        return self._tensors if len(self._tensors) == self._size else self._tensors[: self._size]

    def read(self, index: TensorLike, name: str | None = None) -> jax.Array:
        """Returns the tensor at this index."""
        if is_known(index) and not 0 <= (number := as_int(index, "The place")) < self._size:
            raise OutOfRangeError(f"Tried to read from index {number} but array size is: {self._size}.")
        return self._written()[convert_to_tensor(index)]

    def stack(self, name: str | None = None) -> jax.Array:
        """Stacks all tensors along a new first axis."""
        return self._written()

    def concat(self, name: str | None = None) -> jax.Array:
        """Concatenates all tensors along their first axis."""
        tensors = self._written()
        if tensors.ndim < 2:
            raise ValueError("Scalars cannot be concatenated along their first axis: use `stack`.")
        return tensors.reshape(-1, *tensors.shape[2:])

    def gather(self, indices: TensorLike, name: str | None = None) -> jax.Array:
        """Stacks the tensors at some indices along a new first axis."""
        return self._written()[convert_to_tensor(indices)]

    def unstack(self, value: TensorLike, name: str | None = None) -> TensorArray:
        """Returns the array with the slices of `value` along its first axis."""
        return self.scatter(np.arange(len(convert_to_tensor(value))), value)

    def scatter(self, indices: TensorLike, value: TensorLike, name: str | None = None) -> TensorArray:
        """Returns the array with the slices of `value` at some indices."""
        array = self
        for index, part in zip(
            np.asarray(known(indices, "The indices to scatter to", _BOUND)), convert_to_tensor(value)
        ):
            array = array.write(index, part)
        return array

    def split(self, value: TensorLike, lengths: TensorLike, name: str | None = None) -> TensorArray:
        """Returns the array with `value` split along its first axis into parts of these lengths, which must be
        equal.
        """
        counts = known(lengths, "The lengths of pieces", _BOUND)
        if len({*counts.tolist()}) > 1:
            raise ValueError(f"The tensors of a TensorArray have one shape, got parts of lengths {counts.tolist()}.")
        value = convert_to_tensor(value)
        return self.unstack(value.reshape(len(counts), -1, *value.shape[1:]))
