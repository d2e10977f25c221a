"""`tf.errors`: TensorFlow's exceptions and their codes, in one table.

Exceptions that replicax raises itself are its own classes; some are subclasses of Python's, so that either can be
caught.
"""

from __future__ import annotations

from typing import Any

from replicax._base.errors import DataLossError, InvalidArgumentError, OutOfRangeError, ReplicaxError

# Name, code, docstring, and Python's exception of which it is a subclass.
_TABLE: list[tuple[str, int, str, type[Exception] | None]] = [
    ("Cancelled", 1, "An operation was cancelled.", None),
    ("Unknown", 2, "An error of unknown cause.", None),
    ("DeadlineExceeded", 4, "An operation was not done in time.", TimeoutError),
    ("NotFound", 5, "A file or another thing is not there.", FileNotFoundError),
    ("AlreadyExists", 6, "A file or another thing is there already.", FileExistsError),
    ("PermissionDenied", 7, "The program may not do that.", PermissionError),
    ("ResourceExhausted", 8, "Memory or another resource is used up.", None),
    ("FailedPrecondition", 9, "The system is not in a state in which that can be done.", None),
    ("Aborted", 10, "An operation was ended early.", None),
    ("Unimplemented", 12, "An operation is not there.", None),
    ("Internal", 13, "An error inside of the system.", None),
    ("Unavailable", 14, "A service or another process is not there.", None),
    ("Unauthenticated", 16, "The program did not say who it is.", None),
]


def _exception(name: str, code: int, doc: str, builtin: type[Exception] | None) -> Any:
    bases = (ReplicaxError,) if builtin is None else (ReplicaxError, builtin)
    return type(f"{name}Error", bases, {"__doc__": doc, "__module__": "replicax.tf.errors", "error_code": code})


ERRORS: dict[str, Any] = {
    "OpError": ReplicaxError,
    "InvalidArgumentError": InvalidArgumentError,
    "OutOfRangeError": OutOfRangeError,
    "DataLossError": DataLossError,
    **{f"{name}Error": _exception(name, code, doc, builtin) for name, code, doc, builtin in _TABLE},
}
CODES = {"OK": 0, "INVALID_ARGUMENT": 3, "OUT_OF_RANGE": 11, "DATA_LOSS": 15} | {
    "".join(f"_{c}" if c.isupper() and i else c for i, c in enumerate(name)).upper(): code
    for name, code, _, _ in _TABLE
}
AlreadyExistsError, NotFoundError = ERRORS["AlreadyExistsError"], ERRORS["NotFoundError"]
FailedPreconditionError = ERRORS["FailedPreconditionError"]
