"""`tf.errors`: TensorFlow's exceptions and their codes, in one table.

Exceptions that replicax raises itself are its own classes; some are subclasses of Python's, so that either can be
caught.
"""

from __future__ import annotations

from replicax._base.errors import DataLossError, InvalidArgumentError, OutOfRangeError, ReplicaxError

# Name, code, docstring, and Python's exception of which it is a subclass.
_TABLE: list[tuple[str, int, str, type[Exception] | None]] = [
    ("Cancelled", 1, "An operation was cancelled.", None),
    ("Unknown", 2, "An error of unknown cause.", None),
    ("DeadlineExceeded", 4, "An operation exceeded its time limit.", TimeoutError),
    ("NotFound", 5, "A file or another object does not exist.", FileNotFoundError),
    ("AlreadyExists", 6, "A file or another object exists already.", FileExistsError),
    ("PermissionDenied", 7, "The program has no permission for the operation.", PermissionError),
    ("ResourceExhausted", 8, "Memory or another resource is exhausted.", None),
    ("FailedPrecondition", 9, "The system is not in a state required for the operation.", None),
    ("Aborted", 10, "An operation was aborted.", None),
    ("Unimplemented", 12, "An operation is not implemented.", None),
    ("Internal", 13, "An internal error.", None),
    ("Unavailable", 14, "A service or another process is not available.", None),
    ("Unauthenticated", 16, "The program did not authenticate itself.", None),
]


def _exception(name: str, code: int, doc: str, builtin: type[Exception] | None) -> type[Exception]:
    bases = (ReplicaxError,) if builtin is None else (ReplicaxError, builtin)
    return type(f"{name}Error", bases, {"__doc__": doc, "__module__": "replicax.tf.errors", "error_code": code})


ERRORS: dict[str, type[Exception]] = {
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
