"""Specs, which tell shape and dtype of a value before it is there: of one tensor, or of one for each replica.

A dimension that may differ from element to element is None. Specs are leaves of `jax.tree`'s structures, so the
spec of a dict of arrays is a dict of specs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from replicax._base import frontend
from replicax._base.messages import received
from replicax._base.shape_checks import Dimension, ShapeChecks
from replicax._base.type_spec import TypeSpec
from replicax._base.types import Leaf, Tree

# The dtypes of Python's own numbers as tensors. bool comes first: a bool is an int as well.
PYTHON_DTYPES = {bool: np.bool_, int: np.int32, float: np.float32, complex: np.complex64}

# NumPy's own object of each dtype, for those that equal it: pickled and copied dtypes are other objects, and programs
# compare by identity (`x.dtype is tf.float32`).
SINGLE_DTYPES: dict[np.dtype, np.dtype] = {
    np.dtype(code): np.dtype(code) for code in np.typecodes["All"] if code not in "SUVMm"
}


def as_dtype(dtype: Any) -> np.dtype:
    """Returns `dtype` as a NumPy dtype. Strings of any length are the dtype object, written "string"."""
    try:
        found: np.dtype = np.dtype(frontend.current.dtypes.get(dtype, dtype))
    except TypeError:
        return cast(np.dtype, dtype)  # JAX has dtypes that NumPy has not, such as those of random keys
    if found.kind in "SU":
        return np.dtype(object)
    found = found if found.isnative else found.newbyteorder("=")
    return SINGLE_DTYPES.get(found, found)


def dtype_name(dtype: np.dtype) -> str:
    """Returns the name under which a spec prints `dtype`, such as float32, bfloat16 or string."""
    name = "string" if dtype == np.dtype(object) else getattr(dtype, "name", dtype)
    return f"{frontend.current.dtype_prefix}{name}"


# A shape as users give it.
ShapeLike: TypeAlias = Iterable[int | None] | int | None


class TensorShape(ShapeChecks, tuple[int | None, ...]):
    """The shape of a tensor: a tuple of dimensions, None where one is not known; or unknown as a whole.

    >>> import replicax as rx
    >>> shape = rx.TensorSpec([None, 3]).shape
    >>> shape.rank, shape.as_list(), shape.is_compatible_with((8, 3))
    (2, [None, 3], True)
    >>> rx.TensorSpec(None).shape.rank is None
    True
    """

    _known: bool = True

    def __new__(cls, dims: ShapeLike) -> TensorShape:
        known = dims is not None and getattr(dims, "_known", True)
        if isinstance(dims, list):
            dims = [d.value if isinstance(d, Dimension) else d for d in dims]
        if isinstance(dims, (int, np.integer)):
            dims = (int(dims),)
        values = tuple(map(_dimension, dims)) if known else ()  # type: ignore[arg-type]
        if any(isinstance(d, int) and d < 0 for d in values):
            raise ValueError(f"Dimensions must be >= 0, or None where they are not known, got {list(values)}.")
        self = super().__new__(cls, values)
        self._known = known
        return self

    @property
    def rank(self) -> int | None:
        """The number of dimensions, None where it is not known."""
        return len(self) if self._known else None

    ndims = rank

    def as_list(self) -> list[int | None]:
        """Returns the dimensions; raises `ValueError` for a shape of unknown rank."""
        if not self._known:
            raise ValueError("as_list() is not defined on an unknown TensorShape.")
        return list(map(_size, self))

    def is_fully_defined(self) -> bool:
        """Returns whether every dimension is known."""
        return self._known and None not in map(_size, self)

    def num_elements(self) -> int | None:
        """Returns the product of the dimensions, None where one is not known."""
        return int(np.prod(np.array(self, np.int64))) if self.is_fully_defined() else None

    def is_compatible_with(self, other: ShapeLike) -> bool:
        """Returns whether a tensor can have both shapes: equal in every dimension that both know."""
        other = TensorShape(other)
        if None in (self.rank, other.rank):
            return True
        pairs = zip(map(_size, self), map(_size, other))
        return len(self) == len(other) and all(a is None or b is None or a == b for a, b in pairs)

    def assert_is_compatible_with(self, other: ShapeLike) -> None:
        """Raises `ValueError` where a tensor cannot have both shapes."""
        if not self.is_compatible_with(other):
            raise ValueError(f"Shapes {self} and {other} are incompatible")

    def concatenate(self, other: ShapeLike) -> TensorShape:
        """Returns these dimensions and then those of `other`."""
        other = TensorShape(other)
        return TensorShape([*self, *other] if None not in (self.rank, other.rank) else None)

    def __add__(self, other: Any) -> Any:
        if not (self._known and getattr(other, "_known", True)):
            return TensorShape(None)
        dims = (*self, *other)  # what is no shape, such as that with -1 for `reshape`, stays a plain tuple
        known = all(d is None or (isinstance(d, (int, np.integer)) and d >= 0) for d in other)
        return tuple.__new__(TensorShape, dims) if known else dims

    def __radd__(self, other: Any) -> Any:
        # Of the other one's type: `dims += shape` of a list comes here too.
        return ShapeList([*other, *self]) if isinstance(other, list) else (*other, *self)

    def __getitem__(self, key: Any) -> Any:
        if not self._known:
            return TensorShape(None) if isinstance(key, slice) else None
        value = super().__getitem__(key)
        return tuple.__new__(TensorShape, value) if isinstance(key, slice) else value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (tuple, list)):
            return NotImplemented
        if self._known != getattr(other, "_known", True) or len(self) != len(other):
            return False
        return all(a == b or (a is None or b is None) and _size(a) is _size(b) for a, b in zip(self, other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return tuple.__hash__(self) if self._known else hash(TensorShape)

    def __str__(self) -> str:
        return repr(tuple(map(_size, self))) if self._known else "<unknown>"

    def __repr__(self) -> str:
        return f"TensorShape({self.as_list() if self._known else None})"

    def __reduce__(self) -> tuple[object, ...]:
        return TensorShape, (tuple(self) if self._known else None,)


class ShapeList(list[Any]):
    """What a list and a shape add up to: a list that has the methods of `TensorShape`, too.

    >>> ([1] + TensorShape([2, None])).is_fully_defined()
    False
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"A list has no attribute {name!r}.")
        return getattr(TensorShape(self), name)


jax.tree_util.register_pytree_node(ShapeList, lambda sizes: (tuple(sizes), None), lambda _, sizes: ShapeList(sizes))


def _dimension(size: Any) -> Any:
    """Returns a dimension as shapes have it: an int, None, or a dimension of JAX's symbolic shapes as it is."""
    return size if size is None or _is_symbolic(size) else int(size)


def _size(dimension: Any) -> int | None:
    """Returns a dimension if it is known; None for one that is not, or is one of JAX's symbolic shapes."""
    return None if dimension is None or _is_symbolic(dimension) else dimension


def _is_symbolic(size: Any) -> bool:
    return type(size) is not int and export.is_symbolic_dim(size)


class TensorSpec(TypeSpec):
    """The shape and dtype of a tensor.

    Args:
        shape: the dimensions, None for those not known; None as a whole where not even the rank is known.
        dtype: anything that numpy takes for a dtype; `str`, `bytes`, `object` and "string" are all strings.
        name: kept and printed, without effect.

    >>> import replicax as rx
    >>> rx.TensorSpec((None, 3), "int64")
    TensorSpec(shape=(None, 3), dtype=int64, name=None)
    >>> rx.TensorSpec((None,)).is_compatible_with(np.zeros(5, np.float32))
    True
    """

    __slots__ = ("_shape", "_dtype", "_name")

    def __init__(self, shape: ShapeLike, dtype: Any = np.float32, name: str | None = None):
        self._shape = TensorShape(shape)
        if self._shape.rank is not None and any(map(_is_symbolic, self._shape)):  # of a tensor in a trace for all sizes
            self._shape = TensorShape(self._shape.as_list())
        self._dtype = as_dtype(dtype)
        self._name = name

    @property
    def shape(self) -> TensorShape:
        """The shape.

        >>> import replicax as rx
        >>> rx.TensorSpec((None, 3)).shape
        TensorShape([None, 3])
        """
        return self._shape

    @property
    def dtype(self) -> np.dtype:
        """The dtype, as NumPy's.

        >>> import replicax as rx
        >>> rx.TensorSpec((None, 3), "int32").dtype
        dtype('int32')
        """
        return self._dtype

    @property
    def name(self) -> str | None:
        """The name, or None.

        >>> import replicax as rx
        >>> rx.TensorSpec((None, 3), name="x").name
        'x'
        """
        return self._name

    @property
    def value_type(self) -> type:
        """The type of the values that it describes.

        >>> import jax, replicax as rx
        >>> rx.TensorSpec((None, 3)).value_type is jax.Array
        True
        """
        return jax.Array

    @classmethod
    def from_tensor(cls, tensor: Leaf, name: str | None = None) -> TensorSpec:
        """Returns the spec of an array, a number or a string.

        >>> import numpy as np, replicax as rx
        >>> rx.TensorSpec.from_tensor(np.ones((2, 3), np.float32))
        TensorSpec(shape=(2, 3), dtype=float32, name=None)
        """
        spec = _leaf_spec(tensor)
        return cls(spec.shape, spec.dtype, name)

    @classmethod
    def from_spec(
        cls, spec: jax.ShapeDtypeStruct | jax.Array | np.ndarray | TensorSpec, name: str | None = None
    ) -> TensorSpec:
        """Returns the spec of anything that has a shape and a dtype, such as a `jax.ShapeDtypeStruct`.

        >>> import jax, replicax as rx
        >>> rx.TensorSpec.from_spec(jax.ShapeDtypeStruct((2, 3), "int32"), name="x")
        TensorSpec(shape=(2, 3), dtype=int32, name='x')
        """
        return cls(spec.shape, spec.dtype, name)

    def is_compatible_with(self, spec_or_value: Leaf) -> bool:
        """Returns whether a spec, an array or a number fits: the same dtype, and no dimension that differs.

        >>> import replicax as rx
        >>> spec = rx.TensorSpec((None, 3))
        >>> spec.is_compatible_with(rx.TensorSpec((2, 3))), spec.is_compatible_with(rx.TensorSpec((2, 4)))
        (True, False)
        """
        other = spec_or_value if isinstance(spec_or_value, TensorSpec) else _leaf_spec(spec_or_value)
        return self.dtype == other.dtype and self.shape.is_compatible_with(other.shape)

    def _serialize(self) -> tuple[Any, ...]:
        return self.shape, self.dtype, self.name

    def is_subtype_of(self, other: Any) -> bool:
        """Returns whether every tensor of this spec is one of the other; a name has to be the same.

        >>> import replicax as rx
        >>> rx.TensorSpec((2, 3)).is_subtype_of(rx.TensorSpec((None, 3)))
        True
        """
        if self.name is None and getattr(other, "name", None) is not None:
            return TensorSpec(self.shape, self.dtype, other.name).is_subtype_of(other)
        return super().is_subtype_of(other)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorSpec):
            return NotImplemented
        return (self.shape, self.dtype, self.name) == (other.shape, other.dtype, other.name)

    def __hash__(self) -> int:
        return hash((self.shape, self.dtype, self.name))

    def __repr__(self) -> str:
        return f"TensorSpec(shape={self.shape}, dtype={dtype_name(self.dtype)}, name={self.name!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return TensorSpec, (self.shape, self.dtype, self.name)


class PerReplicaSpec:
    """The specs of a PerReplica value's components, one for each replica.

    >>> import replicax as rx
    >>> rx.PerReplicaSpec(rx.TensorSpec((2,)), rx.TensorSpec((1,))).value_specs[1].shape
    TensorShape([1])
    """

    __slots__ = ("_value_specs",)

    def __init__(self, *value_specs: TensorSpec):
        self._value_specs = tuple(value_specs)

    @property
    def value_specs(self) -> tuple[TensorSpec, ...]:
        """The components' specs, in the order of the replicas.

        >>> import replicax as rx
        >>> len(rx.PerReplicaSpec(rx.TensorSpec((2,)), rx.TensorSpec((1,))).value_specs)
        2
        """
        return self._value_specs

    def is_compatible_with(self, spec_or_value: Leaf) -> bool:
        """Returns whether the components of a PerReplicaSpec, or of a value with `.values`, fit one by one.

        >>> import numpy as np, replicax as rx
        >>> spec = rx.PerReplicaSpec(rx.TensorSpec((2,)), rx.TensorSpec((1,)))
        >>> spec.is_compatible_with(rx.PerReplica([np.zeros(2, np.float32), np.zeros(1, np.float32)]))
        True
        """
        if isinstance(spec_or_value, PerReplicaSpec):
            others = spec_or_value.value_specs
        else:
            others = getattr(spec_or_value, "values", ())
        if callable(others) or len(others) != len(self.value_specs):
            return False
        return all(spec.is_compatible_with(other) for spec, other in zip(self.value_specs, others))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PerReplicaSpec):
            return NotImplemented
        return self.value_specs == other.value_specs

    def __hash__(self) -> int:
        return hash(self.value_specs)

    def __repr__(self) -> str:
        return f"PerReplicaSpec({', '.join(map(repr, self.value_specs))})"

    def __reduce__(self) -> tuple[object, ...]:
        return PerReplicaSpec, self.value_specs


def _leaf_spec(value: Leaf) -> TensorSpec:
    if isinstance(value, TensorSpec):
        return value
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return TensorSpec(value.shape, value.dtype)
    for kind, dtype in PYTHON_DTYPES.items():
        if isinstance(value, kind):
            return TensorSpec((), dtype)
    if isinstance(value, (str, bytes)):
        return TensorSpec((), object)
    raise TypeError(f"Could not build a TensorSpec for {received(value)}: pass an array or a number.")


def spec_of(value: Tree) -> Tree:
    """Returns the specs of a structure of arrays, numbers and strings, in the same structure.

    >>> spec_of({"x": np.ones((2, 3)), "y": 1})["y"]
    TensorSpec(shape=(), dtype=int32, name=None)
    """
    return jax.tree.map(_leaf_spec, value)


def conform(value: Tree, spec: Tree) -> Tree:
    """Returns `value` as an argument that was declared as `spec`, a structure of specs.

    Numbers and numpy arrays become arrays of the declared dtype; JAX arrays and PerReplica values must have it.

    Raises:
        TypeError: shape, dtype or kind do not fit.
        ValueError: the structure does not fit.

    >>> conform((1, np.ones(2)), (TensorSpec(()), TensorSpec((None,))))[0].dtype
    dtype('float32')
    """
    structure: Any = jax.tree.structure(spec)
    pairs = zip(structure.flatten_up_to(value), jax.tree.leaves(spec))
    return structure.unflatten([_conform_leaf(leaf, leaf_spec) for leaf, leaf_spec in pairs])


def _conform_leaf(value: Leaf, spec: Leaf) -> Leaf:
    if isinstance(spec, PerReplicaSpec):
        parts = getattr(value, "values", None)
        if not isinstance(parts, tuple):
            raise TypeError(f"Can not take a {type(value).__name__}, which is no PerReplica value, for {spec}")
        if len(parts) != len(spec.value_specs):
            raise TypeError(f"Can not take a PerReplica value of {len(parts)} components for {spec}")
        for part, part_spec in zip(parts, spec.value_specs):
            _check(_leaf_spec(part), part_spec)
        return value
    if not isinstance(spec, TensorSpec):
        raise TypeError(f"Expected a TensorSpec or a PerReplicaSpec, got {received(spec)}")
    from_host = isinstance(value, (*PYTHON_DTYPES, list, tuple, np.ndarray, np.generic))
    if from_host and spec.dtype != np.dtype(object):
        value = jnp.asarray(np.array(value), dtype=spec.dtype)
    _check(_leaf_spec(value), spec)
    return value


def _check(found: TensorSpec, spec: TensorSpec) -> None:
    if not spec.is_compatible_with(found):
        raise TypeError(f"Can not cast {found} to {spec}")
