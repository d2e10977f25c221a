"""`tf.autograph.to_graph`: a function converted by AutoGraph."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from replicax.tf._core import autograph_switch


def to_graph(
    entity: Callable[..., Any], recursive: bool = True, experimental_optional_features: Any = None
) -> Callable[..., Any]:
    """Returns a function with its control flow on tensors converted, for use within functions that are not.

    The functions that it calls are converted too.
    """

    @functools.wraps(entity)
    def converted(*args: Any, **kwargs: Any) -> Any:
        return autograph_switch.call(True, entity, args, kwargs)

    return converted
