"""Python objects on their way to a worker: datasets and the functions that make them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from replicax._base.messages import received


def packed(value: object, local: bool) -> tuple[dict[str, object], Sequence[np.ndarray]]:
    """Returns an object as the head and the arrays of a call. To a task of this process it goes as it is.

    Raises:
        TypeError: it cannot be pickled.
    """
    if local:
        return {"object": value}, ()
    import cloudpickle

    try:
        data = cloudpickle.dumps(value)
    except Exception as error:
        raise TypeError(
            f"{received(value)} cannot be sent to workers in other processes: {error}. What a function of a dataset "
            "uses is sent with it, or imported there; make what cannot be pickled inside of the function."
        ) from error
    return {}, [np.frombuffer(data, np.uint8)]


def unpacked(head: Mapping[str, object], arrays: Sequence[np.ndarray]) -> Any:
    """Returns the object that `packed` made this of."""
    if "object" in head:
        return head["object"]
    import cloudpickle

    return cloudpickle.loads(arrays[0].tobytes())
