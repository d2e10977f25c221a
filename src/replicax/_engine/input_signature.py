"""The arguments of a function that was declared with an input signature."""

from __future__ import annotations

import jax

from replicax._base import specs
from replicax._base.types import Leaf, Tree
from replicax._values import PerReplica


def check_declared(signature: tuple[Tree, ...], args: tuple[Tree, ...], kwargs: dict[str, Tree]) -> None:
    """Raises `TypeError` where arrays, specs or PerReplica values do not fit the input signature."""

    def fit(given: Leaf, declared: Leaf) -> bool:
        is_spec = isinstance(declared, (specs.TensorSpec, specs.PerReplicaSpec))
        return bool(declared.is_compatible_with(given) if is_spec else given == declared)

    given = jax.tree.leaves(args, is_leaf=lambda leaf: isinstance(leaf, PerReplica))
    declared = jax.tree.leaves(signature)
    if kwargs or len(given) != len(declared) or not all(map(fit, given, declared)):
        raise TypeError(
            f"Binding inputs to tf.function failed due to arguments that do not fit. Received args: {args} and "
            f"kwargs: {kwargs} for signature: {signature}."
        )


def bind(
    signature: tuple[Tree, ...], args: tuple[Tree, ...], kwargs: dict[str, Tree]
) -> tuple[tuple[Tree, ...], dict[str, Tree]]:
    """Returns arguments that fit the input signature; numbers and numpy arrays become arrays of its dtypes.

    Raises:
        TypeError: they do not fit.
    """
    if kwargs or len(args) != len(signature):
        raise TypeError(
            f"Binding inputs to tf.function failed due to `{len(signature)} positional arguments "
            f"expected by input_signature`. Received args: {args} and kwargs: {kwargs}."
        )
    try:
        return tuple(specs.conform(arg, spec) for arg, spec in zip(args, signature)), {}
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"Binding inputs to tf.function failed due to `{error}`. Received args: {args} and kwargs: {kwargs} "
            f"for signature: {signature}."
        ) from error
