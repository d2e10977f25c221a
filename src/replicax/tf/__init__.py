"""TensorFlow's names on replicax: `import replicax.tf as tf` in place of `import tensorflow as tf`.

It has the names that distributed training loops use: `tf.distribute`, variables, functions, tapes, datasets, and the
operations of `tf`, `tf.math`, `tf.nn`, `tf.linalg` and `tf.random`. Tensors are JAX arrays. Importing this module adds
`numpy()` and `get_shape()` to them, makes them print as in TensorFlow, and allows 64-bit types where they are
requested. Random numbers of JAX compile faster on CPUs.
"""

from __future__ import annotations

import importlib as _importlib
from typing import Any

from replicax.tf import (
    _conversions,
    _dressing,
    _frontend,
    _graph_leftovers,
    _imports,
    _names,
    _older_strategies,
    _private,
    _ragged_operators,
    _threefry,
    distribute,
)
from replicax.tf._core import (
    DistributedDataset,
    DistributedIterator,
    DistributedValues,
    GradientTape,
    IndexedSlices,
    RaggedTensor,
    RaggedTensorSpec,
    TensorSpec,
    UnconnectedGradients,
    VariableAggregation,
    VariableSynchronization,
    name_scope,
    variable_creator_scope,
)
from replicax.tf._core import MayDiffer as _MayDiffer
from replicax.tf._core import Mirrored as _Mirrored
from replicax.tf._core import MirroredVariable as _MirroredVariable
from replicax.tf._core import PerReplica as _PerReplica
from replicax.tf._core import Tree as _Tree
from replicax.tf._core import Variable as _Variable
from replicax.tf._core import _api as _parts
from replicax.tf._core import function_module as _function
from replicax.tf._core import holds_variable as _holds_variable
from replicax.tf._core import nest as _nest
from replicax.tf._imports import install, uninstall
from replicax.tf._names import namespace as _namespace
from replicax.tf._ops import convert_to_tensor as _convert

_names.install(globals())


def function(func: Any = None, input_signature: Any = None, autograph: bool = True, **options: Any) -> Any:
    """Returns `replicax.function` of a function, with AutoGraph unless `autograph=False`.

    Where the function returns variables, a call returns the values that they have at its end.
    """
    made = _function.function(func, input_signature, autograph, **options)
    return _returning_values(made) if func is not None else lambda func: _returning_values(made(func))


def _returning_values(function: _function.Function) -> _function.Function:
    function._code.returned = _values_of_variables
    return function


def _values_of_variables(result: _Tree) -> _Tree:
    """Returns a structure with the values of the variables in it, those of Keras among them."""

    def is_variable(leaf: object) -> bool:
        return isinstance(leaf, _Variable) or _holds_variable(leaf)

    if not any(map(is_variable, _nest.leaves(result))):
        return result
    return _nest.map_structure(lambda leaf: _convert(leaf) if is_variable(leaf) else leaf, result)


function.__signature__ = __import__("inspect").signature(_function.function)  # type: ignore[attr-defined]


class _VariableType(type(_Variable)):  # type: ignore[misc]
    """Makes `Variable(...)` create a variable of the current strategy, and `isinstance` hold for it.

    A class that a program derives from `Variable` is a class like any other.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is not Variable:
            return super().__call__(*args, **kwargs)
        if args and _conversions.registered:
            args = (_conversions.converted(args[0]), *args[1:])
        return _Variable(*args, **{"copies_may_differ": _MayDiffer.REDUCED_AS_EQUAL, **kwargs})

    def __instancecheck__(cls, value: object) -> bool:
        if cls is not Variable:
            is_instance: bool = super().__instancecheck__(value)  # `bool` is a dtype here, but for type checkers
            return is_instance
        return isinstance(value, (_Variable, *_imports.variable_classes))

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, _Variable) if cls is Variable else super().__subclasscheck__(kind)


class Variable(_Variable, metaclass=_VariableType):
    """`replicax.Variable`, except that replicas may assign different values to its copies, as in TensorFlow."""


# tf.types


class _PerReplicaType(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, _PerReplica)


class _MirroredType(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, (_Mirrored, _MirroredVariable))


class _PerReplicaLike(metaclass=_PerReplicaType):
    """A class of which all per-replica values are instances."""


class _MirroredLike(metaclass=_MirroredType):
    """A class of which all mirrored values and variables are instances."""


types = _namespace(
    "types",
    "Types to check for.",
    experimental=_namespace(
        "types.experimental",
        "Types to check for.",
        distributed=_namespace(
            "types.experimental.distributed",
            "Types of distributed values.",
            PerReplica=_PerReplicaLike,
            Mirrored=_MirroredLike,
        ),
    ),
)


_frontend.install()
_dressing.dress()
_graph_leftovers.dress()
_older_strategies.dress()
_ragged_operators.plug_in()
_threefry.compile_quickly()

_imports.serve_own_names()

__version__ = _names.VERSION  # of TensorFlow, since programs compare it
_lookup, _listed = _names.lookup("", globals())


def __getattr__(name: str) -> Any:
    if name in ("compat", "keras"):  # imported on first use
        return _importlib.import_module(f"{__name__}.{name}")
    if name in ("initializers", "losses", "metrics", "optimizers"):  # Keras's, under a second name
        return getattr(_importlib.import_module(f"{__name__}.keras"), name)
    return _private.module(name) if name == "__internal__" else _lookup(name)


def __dir__() -> list[str]:
    return sorted({*_listed(), "compat"})


__all__ = [name for name in __dir__() if not name.startswith("_")]
