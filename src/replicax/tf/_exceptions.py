"""`tf.errors`: TensorFlow's exceptions and their codes, in one table.

Exceptions that replicax raises itself are its own classes; some are subclasses of Python's, so that either can be
caught.
"""

from __future__ import annotations

from replicax.tf._core import (
    CancelledError,
    DataLossError,
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    OutOfRangeError,
    ReplicaxError,
    UnavailableError,
)

# Name, code, docstring, and Python's exception of which it is a subclass.
_TABLE: list[tuple[str, int, str, type[Exception] | None]] = [
    ("Unknown", 2, "An error of unknown cause.", None),
    ("AlreadyExists", 6, "A file or another object exists already.", FileExistsError),
    ("PermissionDenied", 7, "The program has no permission for the operation.", PermissionError),
    ("ResourceExhausted", 8, "Memory or another resource is exhausted.", None),
    ("Aborted", 10, "An operation was aborted.", None),
    ("Unimplemented", 12, "An operation is not implemented.", None),
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
    "CancelledError": CancelledError,
    "DeadlineExceededError": DeadlineExceededError,
    "NotFoundError": NotFoundError,
    "FailedPreconditionError": FailedPreconditionError,
    "InternalError": InternalError,
    "UnavailableError": UnavailableError,
    **{f"{name}Error": _exception(name, code, doc, builtin) for name, code, doc, builtin in _TABLE},
}
CODES = {
    "OK": 0,
    "CANCELLED": 1,
    "INVALID_ARGUMENT": 3,
    "DEADLINE_EXCEEDED": 4,
    "NOT_FOUND": 5,
    "FAILED_PRECONDITION": 9,
    "OUT_OF_RANGE": 11,
    "INTERNAL": 13,
    "UNAVAILABLE": 14,
    "DATA_LOSS": 15,
} | {
    "".join(f"_{c}" if c.isupper() and i else c for i, c in enumerate(name)).upper(): code
    for name, code, _, _ in _TABLE
}
AlreadyExistsError = ERRORS["AlreadyExistsError"]
