"""`tf.required_space_to_batch_paddings`."""

from __future__ import annotations

from typing import Any

import numpy as np

from replicax._base.errors import InvalidArgumentError
from replicax.tf._ops import convert_to_tensor, known
from replicax.tf._types import TensorLike


def required_space_to_batch_paddings(
    input_shape: TensorLike, block_shape: TensorLike, base_paddings: TensorLike = None, name: str | None = None
) -> tuple[Any, Any]:
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
