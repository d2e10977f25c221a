"""`tf.autograph.to_graph`: a function converted by AutoGraph."""

from __future__ import annotations

import functools
from collections.abc import Callable

from replicax.tf._core import Tree, autograph_switch


def to_graph(
    entity: Callable[..., Tree], recursive: bool = True, experimental_optional_features: object = None
) -> Callable[..., Tree]:
    """Returns a function with its control flow on tensors converted, for use within functions that are not.

    The functions that it calls are converted too.
    """

    @functools.wraps(entity)
    def converted(*args: Tree, **kwargs: Tree) -> Tree:
        return autograph_switch.call(entity, args, kwargs)

    return converted
