"""Batch normalization of Keras in replicas.

| in Keras | what changes |
|---|---|
| `BatchNormalization.__init__` | takes `synchronized=True`, which Keras has on its TensorFlow backend alone |
| `BatchNormalization.call` | a replica without rows keeps its statistics, unless they are those of all replicas |
| `BatchNormalization._moments` | so do those of masked inputs |
| `ops.moments` | with `synchronized=True`, mean and variance are over all replicas |
| `ops.batch_normalization` | is one program in eager code, in place of eight for each shape |
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from replicax._base.foreign_state import Original, wrap
from replicax._base.types import Tree
from replicax._integrations.moments import are_shared, moments_of_all, pads_rows
from replicax._tracing import frames

if TYPE_CHECKING:
    import keras


def join() -> None:
    """Changes Keras as the table above says."""
    import keras

    layer = keras.layers.BatchNormalization
    signature = inspect.signature(layer.__init__)
    wrap(layer, "__init__", _init)
    layer.__init__.__signature__ = signature  # Keras asks in a way that does not follow wrappers
    wrap(layer, "call", _normalize)
    wrap(layer, "_moments", _moments_of_layer)
    wrap(keras.src.backend.jax.nn, "moments", _moments)
    wrap(keras.src.backend.jax.nn, "batch_normalization", _at_once)


def synchronizes(model: keras.Model) -> bool:
    """Returns whether a layer of a model normalizes with the statistics of all replicas."""
    return any(getattr(layer, "synchronized", False) is True for layer in model._flatten_layers())


def _init(init: Original, layer: keras.layers.BatchNormalization, /, *args: object, **kwargs: object) -> None:
    given = inspect.signature(init).bind(layer, *args, **kwargs)
    synchronized = bool(given.arguments.get("synchronized", False))
    if synchronized:
        given.arguments["synchronized"] = False  # Keras refuses it on this backend
    init(*given.args, **given.kwargs)
    layer.synchronized = synchronized


def _normalize(
    call: Original, layer: keras.Layer, inputs: jax.Array, training: bool | None = None, mask: jax.Array | None = None
) -> Tree:
    if _is_over_replicas(layer):
        return call(layer, inputs, training=training, mask=mask)
    # The mean of no rows is NaN, and would stay in the statistics.
    training = training and inputs.size > 0
    with kept_without_rows(layer.non_trainable_variables if training else [], inputs.shape[0]):
        return call(layer, inputs, training=training, mask=mask)


@contextlib.contextmanager
def kept_without_rows(variables: Sequence[keras.Variable], rows: int) -> Iterator[None]:
    """Returns a context after which variables have the values that they had before, in a replica without rows.

    Of a padded batch that turns out when the program runs.
    """
    variables = variables if pads_rows() else []
    before = [jnp.asarray(variable) for variable in variables]
    yield
    has_rows = jnp.full((), rows) > 0
    for variable, value in zip(variables, before):
        if (new := jnp.asarray(variable)) is not value:
            variable.assign(jnp.where(has_rows, new, value))


def _is_over_replicas(layer: keras.Layer) -> bool:
    return layer.synchronized and are_shared()


def _moments_of_layer(
    moments: Original, layer: keras.layers.BatchNormalization, inputs: jax.Array, mask: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    if mask is None or not _is_over_replicas(layer) or _is_symbolic():
        of_own: tuple[jax.Array, jax.Array] = moments(layer, inputs, mask)
        return of_own
    return moments_of_all(inputs, layer._reduction_axes, jnp.expand_dims(mask, -1))


def _moments(
    moments: Original, x: Tree, axes: int | Sequence[int], keepdims: bool = False, synchronized: bool = False
) -> tuple[jax.Array, jax.Array]:
    over_replicas = synchronized and are_shared()
    if _is_symbolic() or not (over_replicas or pads_rows()):  # `jnp.var` of no rows is NaN
        of_own: tuple[jax.Array, jax.Array] = moments(x, axes, keepdims=keepdims)
        return of_own
    x = jnp.asarray(x)
    along = tuple(axis % x.ndim for axis in ([axes] if isinstance(axes, int) else axes))
    half = x.dtype in (jnp.float16, jnp.bfloat16)
    mean, variance = moments_of_all(x, along, own=not over_replicas)
    if half:  # as Keras does
        largest = np.finfo(np.float16).max
        mean, variance = (jnp.clip(m, -largest, largest).astype(x.dtype) for m in (mean, variance))
    if keepdims:
        mean, variance = jnp.expand_dims(mean, along), jnp.expand_dims(variance, along)
    return mean, variance


def _at_once(
    normalize: Original,
    x: Tree,
    mean: Tree,
    variance: Tree,
    axis: int,
    offset: Tree = None,
    scale: Tree = None,
    epsilon: float = 1e-3,
) -> Tree:
    arrays = x, mean, variance, offset, scale
    plain = isinstance(axis, int) and isinstance(epsilon, float)  # which are parts of the program
    if plain and all(each is None or isinstance(each, jax.Array) for each in arrays) and not frames.is_staging():
        normalize = _compiled(normalize)
    return normalize(x, mean, variance, axis, offset, scale, epsilon)


@functools.cache
def _compiled(normalize: Original) -> Original:
    return jax.jit(normalize, static_argnums=(3, 6))


def _is_symbolic() -> bool:
    """Returns whether Keras looks at shapes alone, which replicas do by themselves."""
    from keras.src.backend.common.symbolic_scope import in_symbolic_scope

    symbolic: bool = in_symbolic_scope()
    return symbolic
