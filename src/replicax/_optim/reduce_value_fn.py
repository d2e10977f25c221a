"""The loss function that a line search of Optax evaluates, reduced over the replicas."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax

from replicax._base.types import Tree

NOT_COMPILED = (
    "apply_gradients got a `value_fn`, which is reduced over the replicas in each iteration of the line search. That "
    "needs replicas that are compiled together, and a strategy whose variables have a copy on each replica: call "
    "strategy.run in an rx.function, and give all replicas parts of the same size, with `drop_remainder=True` in "
    "`Dataset.batch` or with rx.InputOptions(pad_last_batch=True)."
)


def reduce_value_fn(value_fn: Callable[..., jax.Array], reduce: Callable[[Tree], Tree]) -> Callable[..., jax.Array]:
    """Return a function of the parameters whose value and gradient are those of `value_fn`, reduced.

    A gradient through the all-reduce itself would be that of the replica's own part.

    Args:
        value_fn: the loss of the replica's part; its first argument is the parameters.
        reduce: reduces a pytree of arrays over the replicas.
    """

    @functools.wraps(value_fn)
    def evaluate(parameters: Tree, *args: Tree, **kwargs: Tree) -> jax.Array:
        def local_loss(parameters: Tree) -> jax.Array:
            return value_fn(parameters, *args, **kwargs)

        @jax.custom_vjp
        def total(parameters: Tree) -> Tree:
            return reduce(local_loss(parameters))

        def forward(parameters: Tree) -> tuple[Tree, Tree]:
            return tuple(reduce(jax.value_and_grad(local_loss)(parameters)))  # in one all-reduce

        def backward(gradients: Tree, cotangent: jax.Array) -> tuple[Tree]:
            return (jax.tree.map(lambda gradient: gradient * cotangent, gradients),)

        total.defvjp(forward, backward)
        value: jax.Array = total(parameters)
        return value

    return evaluate
