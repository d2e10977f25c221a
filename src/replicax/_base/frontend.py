"""The changes of a front end to the core, in one record. `replicax.tf` is a front end, and fills it at its import.

The core reads `current` and never asks which front end filled it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from replicax._base.tracebacks import Origin
from replicax._base.types import Leaf, Tree


class RandomNumbers(Protocol):
    """The counters of a front end's random functions.

    Attributes:
        name: the key of their state in checkpoints.
        functions: the name of the functions in messages, for example "tf.random".
    """

    name: str
    functions: str

    def save(self) -> Any:
        """Return all counters, as numbers, strings and arrays in dicts, lists and tuples."""

    def restore(self, state: Any) -> None:
        """Set the counters, also those of functions that are not traced yet."""

    def in_dataset(self) -> Origin | None:
        """Return where a function of a dataset drew with them; None if no function did."""


@dataclass(frozen=True)
class Frontend:
    """The choices of a front end. The defaults hold for a program without a front end.

    Attributes:
        module: the module of the front end, which workers of parameter servers import too.
        dtype_prefix: the text before the name of a dtype in a printed spec.
        dtypes: further names of dtypes; NumPy's own are always accepted.
        variable_class: the name of the class in `repr(variable)`.
        array_str, array_repr: the texts of arrays of strings.
        strings_are_tensors: whether a compiled function returns a string as an array of strings.
        random_numbers: the counters that `RandomState` saves.
        note_records: called with the records of one read from a file.
        note_part: called after a program has indexed a variable, with the result, the variable and the index.
    """

    module: str | None = None
    dtype_prefix: str = ""
    dtypes: Mapping[object, np.dtype] = field(default_factory=lambda: {"string": np.dtype(object)})
    variable_class: str = "Variable"
    array_str: Callable[[np.ndarray], str] = str
    array_repr: Callable[[np.ndarray], str] = repr
    strings_are_tensors: bool = False
    random_numbers: RandomNumbers | None = None
    note_records: Callable[[Sequence[bytes]], None] = lambda records: None
    note_part: Callable[[Leaf, Any, Tree], None] | None = None


current = Frontend()


def install(frontend: Frontend) -> None:
    """Have the core follow a front end.

    Raises:
        RuntimeError: another front end has been installed.
    """
    global current
    if current.module not in (None, frontend.module):
        raise RuntimeError(f"{frontend.module} cannot be used in a program that has imported {current.module}.")
    current = frontend
