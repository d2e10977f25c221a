"""The rule for elementwise operations on ragged and sparse tensors: they compute with the values, in the same rows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

import jax
import numpy as np

from replicax.tf import _debugging
from replicax.tf._core import InvalidArgumentError, RaggedTensor, SparseTensor
from replicax.tf._host import jnp
from replicax.tf._op_tables import beside
from replicax.tf._ops import convert_to_tensor, is_known, known
from replicax.tf._types import Composed, Rows, TensorLike


def operands_of(op: Callable[..., object], call: inspect.BoundArguments) -> dict[str, TensorLike]:
    """Return the operands of a call of an elementwise operation, by the names of their parameters."""
    names = list(call.signature.parameters)[: op.operands]  # type: ignore[attr-defined]
    return {key: call.arguments[key] for key in names if key in call.arguments}


def on_values(op: Callable[..., Rows], name: str, call: inspect.BoundArguments) -> RaggedTensor | None:
    """Compute an elementwise operation with the values of its ragged operands, and return a RaggedTensor.

    Other operands are broadcast: scalars, tensors with one element for each row, `[rows, 1]`, and tensors of the
    dimensions inside of the ragged ones.

    Raises:
        InvalidArgumentError: the operands cannot be broadcast, or have different row splits.
    """
    operands = operands_of(op, call)
    first = next(x for x in operands.values() if isinstance(x, RaggedTensor))
    for key, operand in operands.items():
        call.arguments[key] = None if operand is None else _values_beside(operand, first, name)
    values = op(*call.args, **call.kwargs)
    return None if values is None else first.with_flat_values(values)  # an assertion returns None


def _values_beside(value: TensorLike, ragged: RaggedTensor, name: str) -> TensorLike:
    """Return an operand in the form that the values of `ragged` take."""
    values = ragged.flat_values
    if isinstance(value, RaggedTensor):
        check_splits([ragged, value], name)
        if value.flat_values.ndim == values.ndim:
            return value.flat_values
        raise _mismatch(name, ragged, value)
    rank = np.ndim(value)  # type: ignore[arg-type]  # an array, a number or a list
    if rank == 0 or rank < values.ndim:
        return value
    tensor = beside(value, values)
    outer = ragged.ragged_rank + 1  # the dimensions that `flat_values` has as one
    missing = outer + values.ndim - 1 - tensor.ndim
    if missing < 0:
        raise _mismatch(name, ragged, tensor)
    sizes = (1,) * missing + tuple(tensor.shape)
    if any(n != 1 for n in sizes[1:outer]):  # rows of one length
        whole = jnp.broadcast_to(tensor.reshape(sizes), (ragged.nrows() if sizes[0] == 1 else sizes[0], *sizes[1:]))
        return _values_beside(RaggedTensor.from_tensor(whole, ragged_rank=ragged.ragged_rank), ragged, name)
    column = tensor.reshape(sizes[0], *sizes[outer:])
    if sizes[0] == 1:
        return column
    if sizes[0] != ragged.nrows():
        raise _mismatch(name, ragged, tensor)
    return column[ragged.merge_dims(1, ragged.ragged_rank).value_rowids()]


def check_splits(ragged: Sequence[RaggedTensor], name: str) -> None:
    """Raise InvalidArgumentError if RaggedTensors differ in their row splits; in compiled code when it runs."""
    first = ragged[0].nested_row_splits
    for other in ragged[1:]:
        if len(first) != len(other.nested_row_splits):
            raise _mismatch(name, ragged[0], other)
        for ours, theirs in zip(first, other.nested_row_splits):
            if ours is theirs:
                continue
            if ours.shape != theirs.shape:
                raise InvalidArgumentError(_different_splits(name, ours, theirs))
            if is_known(ours) and is_known(theirs):
                ours, theirs = known(ours, "Splits", ""), known(theirs, "Splits", "")
            same: jax.Array = (np if type(ours) is type(theirs) is np.ndarray else jnp).all(ours == theirs)
            _debugging.check(same, lambda a, b: _different_splits(name, a, b), ours, theirs)


def _different_splits(name: str, ours: jax.Array | np.ndarray, theirs: jax.Array | np.ndarray) -> str:
    texts = [
        f"[{x.shape[0]}]" if isinstance(x, jax.core.Tracer) else str(np.asarray(x).tolist()) for x in (ours, theirs)
    ]
    return (
        f"{name}: Condition x == y did not hold for the row splits of two RaggedTensors: {texts[0]} and {texts[1]}. "
        "Their rows must have the same lengths."
    )


def _mismatch(name: str, ragged: RaggedTensor, other: Rows) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{name}: Incompatible shapes: a RaggedTensor of shape {list(ragged.shape)} vs. {list(other.shape)}. The other "
        "operand must be a scalar, a tensor with one element for each row, [rows, 1], or a RaggedTensor with the same "
        "row splits."
    )


def scale(op: Callable[..., Composed], sparse: SparseTensor, dense: TensorLike) -> SparseTensor:
    """Return `op` of the values of a sparse tensor and of the elements of a dense one at the same places.

    Raises:
        InvalidArgumentError: the dense tensor cannot be broadcast to the shape of the sparse one.
    """
    tensor = convert_to_tensor(beside(dense, sparse.values))
    sizes, rank = tuple(tensor.shape), sparse.indices.shape[1]
    fits = tensor.ndim <= rank
    if fits and is_known(sparse.dense_shape):
        shape = np.asarray(known(sparse.dense_shape, "The shape", "")).tolist()
        fits = all(n in (1, other) for n, other in zip(sizes[::-1], shape[::-1]))
    if not fits:
        raise InvalidArgumentError(
            "SparseDenseBinaryOpShared broadcasts dense to sparse only; got incompatible shapes: "
            f"{sparse.shape} vs. {list(sizes)}"
        )
    columns = [sparse.indices[:, rank - len(sizes) + axis] if n != 1 else 0 for axis, n in enumerate(sizes)]
    return sparse.with_values(op(sparse.values, tensor[tuple(columns)]))
