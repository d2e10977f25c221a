"""`tf.space_to_batch`, its inverse, and what has to be padded for it."""

from __future__ import annotations

import jax
import numpy as np

from replicax.tf._core import InvalidArgumentError
from replicax.tf._host import jnp
from replicax.tf._operations import operations
from replicax.tf._ops import convert_to_tensor, known
from replicax.tf._types import TensorLike


def required_space_to_batch_paddings(
    input_shape: TensorLike, block_shape: TensorLike, base_paddings: TensorLike = None, name: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """Returns what must be padded, and cropped again, so that sizes are multiples of those of a block.

    Args:
        input_shape: sizes, `[n]`.
        block_shape: those of a block, `[n]`.
        base_paddings: what is padded at least, `[n, 2]`; by default nothing.

    Returns:
        the paddings and the crops, each `[n, 2]`, int32.
    """
    sizes, block = (np.asarray(known(x, "A size", "Give numbers."), np.int32) for x in (input_shape, block_shape))
    if sizes.shape != block.shape:
        raise InvalidArgumentError(f"Sizes {sizes.tolist()} and those of a block, {block.tolist()}, differ in number.")
    base = np.zeros((len(sizes), 2), np.int32) if base_paddings is None else np.asarray(base_paddings, np.int32)
    extra = (block - (sizes + base.sum(1)) % block) % block
    paddings = np.stack([base[:, 0], base[:, 1] + extra], 1).astype(np.int32)
    crops = np.stack([np.zeros_like(extra), extra], 1).astype(np.int32)
    return convert_to_tensor(paddings), convert_to_tensor(crops)


def space_to_batch(
    input: TensorLike, block_shape: TensorLike, paddings: TensorLike, name: str | None = None
) -> jax.Array:
    """Pads axes after the first, cuts them into blocks, and moves the places in a block into the batch.

    Args:
        input: `[batch, *sizes, ...]`.
        block_shape: the sizes of a block, `[n]`.
        paddings: zeros before and after each of the n axes, `[n, 2]`.
        name: accepted for compatibility.

    Returns:
        `[batch * places, *sizes of blocks, ...]`.
    """
    tensor = convert_to_tensor(input)
    block, widths = (known(x, what, "Give numbers.") for x, what in ((block_shape, "A block"), (paddings, "Paddings")))
    count, batch = len(block), tensor.shape[0]
    padded = jnp.pad(tensor, [(0, 0), *map(tuple, widths.tolist()), *[(0, 0)] * (tensor.ndim - 1 - count)])
    sizes, rest = padded.shape[1 : count + 1], padded.shape[count + 1 :]
    if any(size % each for size, each in zip(sizes, block)):
        raise InvalidArgumentError(f"Padded sizes {list(sizes)} are not multiples of the block's {block.tolist()}.")
    split = [part for size, each in zip(sizes, block.tolist()) for part in (size // each, each)]
    parts = jnp.reshape(padded, (batch, *split, *rest))
    inner, outer = list(range(2, 2 * count + 1, 2)), list(range(1, 2 * count + 1, 2))
    moved = jnp.transpose(parts, [*inner, 0, *outer, *range(2 * count + 1, parts.ndim)])
    return jnp.reshape(moved, (batch * int(np.prod(block)), *(s // b for s, b in zip(sizes, block.tolist())), *rest))


def batch_to_space(input: TensorLike, block_shape: TensorLike, crops: TensorLike, name: str | None = None) -> jax.Array:
    """Moves places in a block out of the batch, and crops the axes: the inverse of `space_to_batch`."""
    tensor = convert_to_tensor(input)
    block, widths = (known(x, what, "Give numbers.") for x, what in ((block_shape, "A block"), (crops, "Crops")))
    block = np.atleast_1d(block) if np.ndim(block) else np.array([int(block)] * 2)
    count, places = len(block), int(np.prod(block))
    sizes, rest = tensor.shape[1 : count + 1], tensor.shape[count + 1 :]
    if tensor.shape[0] % places:
        raise InvalidArgumentError(f"A batch of {tensor.shape[0]} is no multiple of the {places} places of a block.")
    parts = jnp.reshape(tensor, (*block.tolist(), tensor.shape[0] // places, *sizes, *rest))
    axes = [axis for i in range(count) for axis in (count + 1 + i, i)]
    moved = jnp.transpose(parts, [count, *axes, *range(2 * count + 1, parts.ndim)])
    whole = jnp.reshape(moved, (tensor.shape[0] // places, *(s * b for s, b in zip(sizes, block.tolist())), *rest))
    return whole[(slice(None), *(slice(a, whole.shape[i + 1] - b) for i, (a, b) in enumerate(widths.tolist())))]


operations(globals())
