"""Neural networks: activations, losses, normalization."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import SupportsFloat, SupportsInt

import jax
import numpy as np
from jax.typing import ArrayLike

from replicax.tf import _random
from replicax.tf._core import InvalidArgumentError, context
from replicax.tf._host import jnp, lax
from replicax.tf._op_tables import namespace_of, no_nan, pair
from replicax.tf._operations import on_values, operations
from replicax.tf._ops import as_axis, as_shape, convert_to_tensor
from replicax.tf._types import TensorLike

# Activations.


def _activation(compute: Callable[[jax.Array], jax.Array], doc: str) -> Callable[..., jax.Array]:
    def of_dtype(x: jax.Array) -> jax.Array:
        return compute(x).astype(x.dtype)

    at_once: Callable[[jax.Array], jax.Array]
    at_once = jax.jit(of_dtype, inline=True)  # eager code would compile each operation in it for each shape

    def op(features: TensorLike, name: str | None = None) -> jax.Array:
        x = convert_to_tensor(features)
        result: jax.Array = at_once(x) if isinstance(x, jax.Array) else of_dtype(x)
        return result

    op.__doc__ = doc
    return on_values(1)(op)


def _selu(x: jax.Array) -> jax.Array:
    scale, alpha = 1.0507009873554805, 1.6732632423543772
    return jnp.where(x < 0, scale * alpha * jnp.expm1(jnp.minimum(x, 0)), scale * x)  # at 0 the gradient is `scale`


ACTIVATIONS = {
    "elu": _activation(jax.nn.elu, "Returns x where it is positive, else exp(x) - 1."),
    "relu": _activation(lambda x: jnp.where(x < 0, jnp.zeros_like(x), jax.nn.relu(x)), "Returns the positive part."),
    "relu6": _activation(jax.nn.relu6, "Returns min(max(x, 0), 6)."),
    "selu": _activation(_selu, "Returns the scaled exponential linear unit."),
    "softplus": _activation(jax.nn.softplus, "Returns log(exp(x) + 1)."),
    "softsign": _activation(jax.nn.soft_sign, "Returns x / (|x| + 1)."),
}
namespace_of(ACTIVATIONS, globals())


@on_values(1)
def leaky_relu(features: TensorLike, alpha: ArrayLike = 0.2, name: str | None = None) -> jax.Array:
    """Returns x where x is positive, else `alpha` x."""
    x = _floating(features)
    return jnp.where(x > 0, x, alpha * x)  # at 0 the gradient is `alpha`


@on_values(1)
def gelu(features: TensorLike, approximate: bool = False, name: str | None = None) -> jax.Array:
    """Returns the Gaussian error linear unit."""
    return jax.nn.gelu(convert_to_tensor(features), approximate)


@on_values(1)
def silu(features: TensorLike, beta: ArrayLike = 1.0) -> jax.Array:
    """Returns x sigmoid(beta x)."""
    x = convert_to_tensor(features)
    return x * jax.nn.sigmoid(jnp.asarray(beta, x.dtype) * x)


swish = silu


def crelu(features: TensorLike, axis: int = -1, name: str | None = None) -> jax.Array:
    """Returns relu(x) and relu(-x), concatenated along an axis."""
    x = convert_to_tensor(features)
    return jax.nn.relu(jnp.concatenate([x, -x], axis))


def softmax(logits: TensorLike, axis: TensorLike | None = None, name: str | None = None) -> jax.Array:
    """Returns exp(x) divided by its sum along an axis, by default the last."""
    return jax.nn.softmax(convert_to_tensor(logits), -1 if axis is None else as_axis(axis))


def log_softmax(logits: TensorLike, axis: TensorLike | None = None, name: str | None = None) -> jax.Array:
    """Returns the logarithm of softmax along an axis, by default the last."""
    return jax.nn.log_softmax(convert_to_tensor(logits), -1 if axis is None else as_axis(axis))


def _floating(x: TensorLike) -> jax.Array:
    tensor = convert_to_tensor(x)
    return tensor.astype(np.float32) if jnp.issubdtype(tensor.dtype, jnp.integer) else tensor


# Losses. Those of floating-point dtypes with fewer than 32 bits are computed in float32.


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(np.float32) if x.dtype in (np.float16, jnp.bfloat16) else x


def softmax_cross_entropy_with_logits(
    labels: TensorLike, logits: TensorLike, axis: int = -1, name: str | None = None
) -> jax.Array:
    """Returns the cross entropy of `labels`, distributions over classes along `axis`, and softmax of the logits."""
    scores = convert_to_tensor(logits)
    shares = convert_to_tensor(labels).astype(scores.dtype)
    entropy = -jnp.sum(_wide(shares) * jax.nn.log_softmax(_wide(scores), axis), axis)
    return entropy.astype(scores.dtype)


def sparse_softmax_cross_entropy_with_logits(
    labels: TensorLike, logits: TensorLike, name: str | None = None
) -> jax.Array:
    """Returns the cross entropy of softmax of the logits, `[..., classes]`, at the class `labels`, `[...]`.

    Raises:
        InvalidArgumentError: in eager code, a label is not a class. In compiled code the result for it is NaN.
    """
    scores, numbers = convert_to_tensor(logits), convert_to_tensor(labels)
    if numbers.shape != scores.shape[:-1]:
        raise ValueError(
            f"`labels.shape` must equal `logits.shape` except for the last dimension, got {tuple(numbers.shape)} and "
            f"{tuple(scores.shape)}."
        )
    classes = scores.shape[-1]
    if not isinstance(numbers, jax.core.Tracer):
        found = np.asarray(numbers)
        if found.size and (found.min() < 0 or found.max() >= classes):
            raise InvalidArgumentError(
                f"Received a label value of {found.max() if found.max() >= classes else found.min()} which is outside "
                f"the valid range of [0, {classes})."
            )
    safe = jnp.where(
        (numbers >= 0) & (numbers < classes), numbers, classes
    )  # a negative label would count from the end
    each = jax.nn.log_softmax(_wide(scores))
    return -jnp.take_along_axis(each, safe[..., None], -1, mode="fill", fill_value=np.nan)[..., 0].astype(scores.dtype)


@on_values(2)
def sigmoid_cross_entropy_with_logits(
    labels: TensorLike | None = None, logits: TensorLike | None = None, name: str | None = None
) -> jax.Array:
    """Returns the cross entropy of probabilities `labels` and of the logistic function of the logits, elementwise."""
    shares, scores = pair(labels, logits)
    _same_shapes(scores, shares)
    positive, _, rest = _softplus_parts(scores)
    return positive - scores * shares + rest


def _softplus_parts(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns relu(x) and relu(-x), and the term that added to them gives log(1 + exp(x)) and log(1 + exp(-x)).

    Small results are therefore exact. At 0 the gradients of the parts are arbitrary, and their sum is right.
    """
    zero = jnp.zeros_like(x)
    return jnp.where(x < 0, zero, x), jnp.where(x < 0, -x, zero), jnp.log1p(jnp.exp(jnp.where(x < 0, x, -x)))


def weighted_cross_entropy_with_logits(
    labels: TensorLike, logits: TensorLike, pos_weight: ArrayLike, name: str | None = None
) -> jax.Array:
    """Returns `sigmoid_cross_entropy_with_logits` with a weight for positive labels."""
    shares, scores = pair(labels, logits)
    _same_shapes(scores, shares)
    weight = 1 + (pos_weight - 1) * shares
    _, negative, rest = _softplus_parts(scores)
    return (1 - shares) * scores + weight * (rest + negative)


def _same_shapes(logits: jax.Array, labels: jax.Array) -> None:
    if jnp.shape(logits) != jnp.shape(labels):
        raise ValueError(f"logits and labels must have the same shape ({jnp.shape(logits)} vs {jnp.shape(labels)}).")


def log_poisson_loss(
    targets: TensorLike, log_input: TensorLike, compute_full_loss: bool = False, name: str | None = None
) -> jax.Array:
    """Returns the loss of Poisson-distributed targets, optionally with the terms that do not depend on the input."""
    counts, log_rate = pair(targets, log_input)
    loss = jnp.exp(log_rate) - log_rate * counts
    if not compute_full_loss:
        return loss
    stirling = counts * jnp.log(counts) - counts + 0.5 * jnp.log(2 * np.pi * counts)
    return loss + jnp.where((counts >= 0) & (counts <= 1), jnp.zeros_like(counts), stirling)


def l2_loss(t: TensorLike, name: str | None = None) -> jax.Array:
    """Returns half the sum of squares."""
    return jnp.sum(jnp.square(convert_to_tensor(t))) / 2


def compute_average_loss(
    per_example_loss: TensorLike, sample_weight: TensorLike | None = None, global_batch_size: TensorLike | None = None
) -> jax.Array:
    """Returns the sum of a replica's losses divided by the size of the *global* batch, so that gradients can be summed.

    Args:
        per_example_loss: `[batch, ...]`.
        sample_weight: a weight for each example, of a shape that broadcasts.
        global_batch_size: by default the size of the first dimension times the number of replicas. If it is 0, the
            result is 0.

    Raises:
        RuntimeError: `global_batch_size` is None in cross-replica context.
        ValueError: the loss is a scalar, or `global_batch_size` is not a non-negative integer.
    """
    losses = convert_to_tensor(per_example_loss)
    if losses.ndim == 0:
        raise ValueError(
            "Invalid value passed for `per_example_loss`. Expected a tensor with at least rank 1, got a scalar tensor."
        )
    if sample_weight is not None:
        losses = (losses * _fitting(convert_to_tensor(sample_weight), losses)).astype(losses.dtype)
    if global_batch_size is None:
        _in_replica("compute_average_loss")
        global_batch_size = losses.shape[0] * context.get_strategy().num_replicas_in_sync
    size = convert_to_tensor(global_batch_size)
    if size.ndim or not jnp.issubdtype(size.dtype, jnp.integer):
        raise ValueError(f"global_batch_size must be scalar and an integer, got {global_batch_size!r}.")
    if not isinstance(size, jax.core.Tracer) and int(size) < 0:
        raise InvalidArgumentError(f"global_batch_size must be non-negative, got {int(size)}.")
    size = size.astype(losses.dtype)
    return jnp.where(size == 0, jnp.zeros((), losses.dtype), jnp.sum(losses) / jnp.where(size == 0, 1, size))


def _fitting(weight: jax.Array, losses: jax.Array) -> jax.Array:
    """Adds a last dimension of size 1 to weights, or removes it, so that they have the rank of the losses."""
    if weight.ndim == losses.ndim + 1 and weight.shape[-1] == 1:
        return weight[..., 0]
    return weight[..., None] if weight.ndim and weight.ndim == losses.ndim - 1 else weight


def scale_regularization_loss(regularization_loss: TensorLike) -> jax.Array:
    """Returns a regularization loss divided by the number of replicas, since gradients are summed over them.

    Raises:
        RuntimeError: called in cross-replica context.
    """
    _in_replica("scale_regularization_loss")
    total = jnp.sum(convert_to_tensor(regularization_loss))
    return total / context.get_strategy().num_replicas_in_sync


def _in_replica(what: str) -> None:
    if context.has_strategy() and context.in_cross_replica_context():
        raise RuntimeError(
            f"You are calling `{what}` in cross replica context, while it was expected to be called in replica "
            "context: call it in the function given to `strategy.run`."
        )


# Normalization.


def moments(
    x: TensorLike, axes: TensorLike, shift: TensorLike | None = None, keepdims: bool = False, name: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """Returns mean and variance along the axes."""
    tensor, along = convert_to_tensor(x), as_axis(axes)
    wide = _wide(tensor)
    mean = jnp.mean(wide, along, keepdims=True)
    variance = jnp.mean(jnp.square(wide - lax.stop_gradient(mean)), along, keepdims=True)
    kept = [m if keepdims else jnp.squeeze(m, along) for m in (mean, variance)]
    return kept[0].astype(tensor.dtype), kept[1].astype(tensor.dtype)


def weighted_moments(
    x: TensorLike, axes: TensorLike, frequency_weights: TensorLike, keepdims: bool = False, name: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """Returns weighted mean and variance along the axes."""
    tensor, weights = pair(x, frequency_weights)
    along = as_axis(axes)
    weights = jnp.broadcast_to(weights, tensor.shape).astype(tensor.dtype)
    total = jnp.sum(weights, along, keepdims=True)
    mean = no_nan(jnp.divide)(jnp.sum(weights * tensor, along, keepdims=True), total)
    variance = no_nan(jnp.divide)(jnp.sum(weights * jnp.square(tensor - mean), along, keepdims=True), total)
    return (mean, variance) if keepdims else (jnp.squeeze(mean, along), jnp.squeeze(variance, along))


def batch_normalization(
    x: TensorLike,
    mean: TensorLike,
    variance: TensorLike,
    offset: TensorLike | None,
    scale: TensorLike | None,
    variance_epsilon: ArrayLike,
    name: str | None = None,
) -> jax.Array:
    """Returns `(x - mean) / sqrt(variance + epsilon)`, times `scale` and plus `offset` if they are given."""
    tensor, center = convert_to_tensor(x), convert_to_tensor(mean)
    factor = lax.rsqrt(convert_to_tensor(variance) + variance_epsilon)
    factor = factor if scale is None else factor * convert_to_tensor(scale)
    shift = -center * factor if offset is None else convert_to_tensor(offset) - center * factor
    return tensor * factor.astype(tensor.dtype) + shift.astype(tensor.dtype)


def bias_add(value: TensorLike, bias: TensorLike, data_format: str | None = None, name: str | None = None) -> jax.Array:
    """Adds the bias, `[channels]`, along the last axis, or along the second if `data_format` begins with "NC"."""
    tensor, added = convert_to_tensor(value), convert_to_tensor(bias)
    if data_format is not None and data_format.startswith("NC"):
        added = added.reshape(-1, *[1] * (tensor.ndim - 2))
    return tensor + added


def local_response_normalization(
    input: TensorLike,
    depth_radius: int = 5,
    bias: ArrayLike = 1,
    alpha: ArrayLike = 1,
    beta: ArrayLike = 0.5,
    name: str | None = None,
) -> jax.Array:
    """Divides each channel by `(bias + alpha * sum of squares of the channels near it) ** beta`."""
    x = convert_to_tensor(input)
    window = (1, 1, 1, 2 * depth_radius + 1)
    padding = [(0, 0)] * 3 + [(depth_radius, depth_radius)]
    squares = lax.reduce_window(x * x, np.zeros((), x.dtype), jax.lax.add, window, (1, 1, 1, 1), padding)
    result: jax.Array = x / (bias + alpha * squares) ** beta
    return result


lrn = local_response_normalization


def _dropped(
    x: TensorLike,
    rate: SupportsFloat,
    noise_shape: Iterable[TensorLike] | None,
    uniform: Callable[[tuple[int, ...], np.dtype], jax.Array],
) -> jax.Array:
    tensor = convert_to_tensor(x)
    if not jnp.issubdtype(tensor.dtype, jnp.floating):
        raise ValueError(f"x has to be a floating point tensor since it's going to be scaled, got {tensor.dtype}.")
    if not isinstance(rate, jax.core.Tracer) and not 0 <= float(rate) < 1:
        if float(rate) != 1:
            raise ValueError(f"`rate` must be a scalar or a float in the range [0, 1], got {rate}.")
        return jnp.zeros_like(tensor)
    shape = (
        tensor.shape
        if noise_shape is None
        else tuple(n if s is None else as_shape(s)[0] for s, n in zip(noise_shape, tensor.shape))
    )
    kept = uniform(shape, tensor.dtype) >= jnp.asarray(rate, tensor.dtype)
    return jnp.where(kept, tensor / (1 - jnp.asarray(rate, tensor.dtype)), jnp.zeros_like(tensor))


@on_values(1)
def dropout(
    x: TensorLike,
    rate: SupportsFloat,
    noise_shape: Iterable[TensorLike] | None = None,
    seed: SupportsInt | None = None,
    name: str | None = None,
) -> jax.Array:
    """Sets elements to 0 with the probability `rate`, and multiplies the others by `1 / (1 - rate)`."""
    return _dropped(x, rate, noise_shape, lambda shape, dtype: _random.uniform(shape, dtype=dtype, seed=seed))


def stateless_dropout(
    x: TensorLike,
    rate: SupportsFloat,
    seed: TensorLike,
    rng_alg: object = None,
    noise_shape: Iterable[TensorLike] | None = None,
    name: str | None = None,
) -> jax.Array:
    """Computes `dropout` with random numbers that depend on `seed` (two integers) alone."""
    return _dropped(x, rate, noise_shape, lambda shape, dtype: _random.stateless_uniform(shape, seed, dtype=dtype))


operations(globals())
