"""The operators of ragged and sparse tensors, which `replicax.tf` adds to their classes.

The modules of operations are imported at the first use of one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from replicax.tf import _operations
from replicax.tf._core import RaggedTensor, SparseTensor
from replicax.tf._types import Composed, Rows, TensorLike

# The operation of each operator, by the operator's name; those with two operands have a reflected form as well.
_UNARY = {"abs": "abs", "invert": "logical_not", "neg": "negative"}
_BINARY = {
    "add": "add", "and": "logical_and", "floordiv": "floordiv", "mod": "floormod", "mul": "multiply",
    "or": "logical_or", "pow": "pow", "sub": "subtract", "truediv": "truediv", "xor": "logical_xor",
}  # fmt: skip
_COMPARISONS = {"ge": "greater_equal", "gt": "greater", "le": "less_equal", "lt": "less"}


def _operation(name: str) -> Callable[..., Composed]:
    from replicax.tf import _math

    operation: Callable[..., Composed] = getattr(_math, name)
    return operation


def _binary(name: str) -> Callable[[Composed, object], Composed]:
    return lambda self, other: _operation(name)(self, other)


def _reflect(name: str) -> Callable[[Composed, object], Composed]:
    return lambda self, other: _operation(name)(other, self)


def _unary(name: str) -> Callable[[Composed], Composed]:
    return lambda self: _operation(name)(self)


def _equality(name: str, otherwise: bool) -> Callable[[RaggedTensor, object], Composed | bool]:
    """Return a comparison of elements; operands that cannot be compared are not equal."""

    def compare(self: RaggedTensor, other: object) -> Composed | bool:
        if other is None:
            return otherwise
        try:
            return _operation(name)(self, other)
        except (TypeError, ValueError):
            return otherwise

    return compare


def _refuse_bool(self: RaggedTensor) -> bool:
    raise TypeError("RaggedTensor may not be used as a boolean. Use `nrows()`, or tf.reduce_any and tf.reduce_all.")


def _scaling(name: str) -> Callable[[SparseTensor, TensorLike], SparseTensor]:
    def scale(self: SparseTensor, other: TensorLike) -> SparseTensor:
        from replicax.tf import _composites

        return _composites.scale(_operation(name), self, other)

    return scale


def _compute(op: Callable[..., Rows], name: str, args: tuple[TensorLike, ...], kwargs: dict[str, TensorLike]) -> object:
    from replicax.tf import _ragged_operations

    return _ragged_operations.compute(op, name, args, kwargs)


def plug_in() -> None:
    """Add the operators, and tell `_operations` of the classes."""
    ragged: Any = RaggedTensor
    for key, name in _UNARY.items():
        setattr(ragged, f"__{key}__", _unary(name))
    for key, name in (_BINARY | _COMPARISONS).items():
        setattr(ragged, f"__{key}__", _binary(name))
    for key, name in _BINARY.items():
        setattr(ragged, f"__r{key}__", _reflect(name))
    ragged.__eq__, ragged.__ne__ = _equality("equal", False), _equality("not_equal", True)
    ragged.__hash__ = None
    ragged.__bool__ = _refuse_bool
    sparse: Any = SparseTensor
    sparse.__mul__ = sparse.__rmul__ = _scaling("multiply")
    sparse.__truediv__, sparse.__rtruediv__ = _scaling("divide"), _reflect("truediv")  # the latter refuses
    for kind in (ragged, sparse):
        kind.__array_ufunc__ = None  # NumPy leaves its operators to these classes
    _operations.composites_are((RaggedTensor, SparseTensor), _compute)
