"""Neural networks: activations, losses, normalization."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from replicax._base.errors import InvalidArgumentError
from replicax._tracing import context
from replicax.tf import _random
from replicax.tf._operations import operations
from replicax.tf._ops import as_axis, as_shape, convert_to_tensor, namespace_of, pair

# Activations.


def _activation(compute: Callable[[Any], Any], doc: str) -> Callable[..., Any]:
    def op(features: Any, name: str | None = None) -> Any:
        features = convert_to_tensor(features)
        return compute(features).astype(features.dtype)

    op.__doc__ = doc
    return op


def _selu(x: Any) -> Any:
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


def leaky_relu(features: Any, alpha: Any = 0.2, name: str | None = None) -> Any:
    """Returns x where x is positive, else `alpha` x."""
    features = _floating(features)
    return jnp.where(features > 0, features, alpha * features)  # at 0 the gradient is `alpha`


def gelu(features: Any, approximate: bool = False, name: str | None = None) -> Any:
    """Returns the Gaussian error linear unit."""
    return jax.nn.gelu(convert_to_tensor(features), approximate)


def silu(features: Any, beta: Any = 1.0) -> Any:
    """Returns x sigmoid(beta x)."""
    features = convert_to_tensor(features)
    return features * jax.nn.sigmoid(jnp.asarray(beta, features.dtype) * features)


swish = silu


def crelu(features: Any, axis: int = -1, name: str | None = None) -> Any:
    """Returns relu(x) and relu(-x), concatenated along an axis."""
    features = convert_to_tensor(features)
    return jax.nn.relu(jnp.concatenate([features, -features], axis))


def softmax(logits: Any, axis: Any = None, name: str | None = None) -> Any:
    """Returns exp(x) divided by its sum along an axis, by default the last."""
    return jax.nn.softmax(convert_to_tensor(logits), -1 if axis is None else as_axis(axis))


def log_softmax(logits: Any, axis: Any = None, name: str | None = None) -> Any:
    """Returns the logarithm of softmax along an axis, by default the last."""
    return jax.nn.log_softmax(convert_to_tensor(logits), -1 if axis is None else as_axis(axis))


def _floating(x: Any) -> Any:
    tensor = convert_to_tensor(x)
    return tensor.astype(np.float32) if jnp.issubdtype(tensor.dtype, jnp.integer) else tensor


# Losses. Those of floating-point dtypes with fewer than 32 bits are computed in float32.


def _wide(x: Any) -> Any:
    return x.astype(np.float32) if x.dtype in (np.float16, jnp.bfloat16) else x


def softmax_cross_entropy_with_logits(labels: Any, logits: Any, axis: int = -1, name: str | None = None) -> Any:
    """Returns the cross entropy of `labels`, distributions over classes along `axis`, and softmax of the logits."""
    logits = convert_to_tensor(logits)
    labels = convert_to_tensor(labels).astype(logits.dtype)
    entropy = -jnp.sum(_wide(labels) * jax.nn.log_softmax(_wide(logits), axis), axis)
    return entropy.astype(logits.dtype)


def sparse_softmax_cross_entropy_with_logits(labels: Any, logits: Any, name: str | None = None) -> Any:
    """Returns the cross entropy of softmax of the logits, `[..., classes]`, at the class `labels`, `[...]`.

    Raises:
        InvalidArgumentError: in eager code, a label is not a class. In compiled code the result for it is NaN.
    """
    logits, labels = convert_to_tensor(logits), convert_to_tensor(labels)
    if labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"`labels.shape` must equal `logits.shape` except for the last dimension, got {tuple(labels.shape)} and "
            f"{tuple(logits.shape)}."
        )
    classes = logits.shape[-1]
    if not isinstance(labels, jax.core.Tracer):
        found = np.asarray(labels)
        if found.size and (found.min() < 0 or found.max() >= classes):
            raise InvalidArgumentError(
                f"Received a label value of {found.max() if found.max() >= classes else found.min()} which is outside "
                f"the valid range of [0, {classes})."
            )
    safe = jnp.where((labels >= 0) & (labels < classes), labels, classes)  # a negative label would count from the end
    each = jax.nn.log_softmax(_wide(logits))
    return -jnp.take_along_axis(each, safe[..., None], -1, mode="fill", fill_value=np.nan)[..., 0].astype(logits.dtype)


def sigmoid_cross_entropy_with_logits(labels: Any = None, logits: Any = None, name: str | None = None) -> Any:
    """Returns the cross entropy of probabilities `labels` and of the logistic function of the logits, elementwise."""
    labels, logits = pair(labels, logits)
    _same_shapes(logits, labels)
    positive, _, rest = _softplus_parts(logits)
    return positive - logits * labels + rest


def _softplus_parts(x: Any) -> tuple[Any, Any, Any]:
    """Returns relu(x) and relu(-x), and the term that added to them gives log(1 + exp(x)) and log(1 + exp(-x)).

    Small results are therefore exact. At 0 the gradients of the parts are arbitrary, and their sum is right.
    """
    zero = jnp.zeros_like(x)
    return jnp.where(x < 0, zero, x), jnp.where(x < 0, -x, zero), jnp.log1p(jnp.exp(jnp.where(x < 0, x, -x)))


def weighted_cross_entropy_with_logits(labels: Any, logits: Any, pos_weight: Any, name: str | None = None) -> Any:
    """Returns `sigmoid_cross_entropy_with_logits` with a weight for positive labels."""
    labels, logits = pair(labels, logits)
    _same_shapes(logits, labels)
    weight = 1 + (pos_weight - 1) * labels
    _, negative, rest = _softplus_parts(logits)
    return (1 - labels) * logits + weight * (rest + negative)


def _same_shapes(logits: Any, labels: Any) -> None:
    if jnp.shape(logits) != jnp.shape(labels):
        raise ValueError(f"logits and labels must have the same shape ({jnp.shape(logits)} vs {jnp.shape(labels)}).")


def log_poisson_loss(targets: Any, log_input: Any, compute_full_loss: bool = False, name: str | None = None) -> Any:
    """Returns the loss of Poisson-distributed targets, optionally with the terms that do not depend on the input."""
    targets, log_input = pair(targets, log_input)
    loss = jnp.exp(log_input) - log_input * targets
    if not compute_full_loss:
        return loss
    stirling = targets * jnp.log(targets) - targets + 0.5 * jnp.log(2 * np.pi * targets)
    return loss + jnp.where((targets >= 0) & (targets <= 1), jnp.zeros_like(targets), stirling)


def l2_loss(t: Any, name: str | None = None) -> Any:
    """Returns half the sum of squares."""
    return jnp.sum(jnp.square(convert_to_tensor(t))) / 2


def compute_average_loss(per_example_loss: Any, sample_weight: Any = None, global_batch_size: Any = None) -> Any:
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


def _fitting(weight: Any, losses: Any) -> Any:
    """Adds a last dimension of size 1 to weights, or removes it, so that they have the rank of the losses."""
    if weight.ndim == losses.ndim + 1 and weight.shape[-1] == 1:
        return weight[..., 0]
    return weight[..., None] if weight.ndim and weight.ndim == losses.ndim - 1 else weight


def scale_regularization_loss(regularization_loss: Any) -> Any:
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


def moments(x: Any, axes: Any, shift: Any = None, keepdims: bool = False, name: str | None = None) -> Any:
    """Returns mean and variance along the axes."""
    x, axes = convert_to_tensor(x), as_axis(axes)
    wide = _wide(x)
    mean = jnp.mean(wide, axes, keepdims=True)
    variance = jnp.mean(jnp.square(wide - lax.stop_gradient(mean)), axes, keepdims=True)
    kept = [m if keepdims else jnp.squeeze(m, axes) for m in (mean, variance)]
    return kept[0].astype(x.dtype), kept[1].astype(x.dtype)


def weighted_moments(x: Any, axes: Any, frequency_weights: Any, keepdims: bool = False, name: str | None = None) -> Any:
    """Returns weighted mean and variance along the axes."""
    x, weights = pair(x, frequency_weights)
    axes = as_axis(axes)
    weights = jnp.broadcast_to(weights, x.shape).astype(x.dtype)
    total = jnp.sum(weights, axes, keepdims=True)
    mean = jnp.sum(weights * x, axes, keepdims=True) / total
    variance = jnp.sum(weights * jnp.square(x - mean), axes, keepdims=True) / total
    return (mean, variance) if keepdims else (jnp.squeeze(mean, axes), jnp.squeeze(variance, axes))


def batch_normalization(
    x: Any, mean: Any, variance: Any, offset: Any, scale: Any, variance_epsilon: Any, name: str | None = None
) -> Any:
    """Returns `(x - mean) / sqrt(variance + epsilon)`, times `scale` and plus `offset` if they are given."""
    x, mean = convert_to_tensor(x), convert_to_tensor(mean)
    factor = lax.rsqrt(convert_to_tensor(variance) + variance_epsilon)
    factor = factor if scale is None else factor * convert_to_tensor(scale)
    shift = -mean * factor if offset is None else convert_to_tensor(offset) - mean * factor
    return x * factor.astype(x.dtype) + shift.astype(x.dtype)


def bias_add(value: Any, bias: Any, data_format: str | None = None, name: str | None = None) -> Any:
    """Adds the bias, `[channels]`, along the last axis, or along the second if `data_format` begins with "NC"."""
    value, bias = convert_to_tensor(value), convert_to_tensor(bias)
    if data_format is not None and data_format.startswith("NC"):
        bias = bias.reshape(-1, *[1] * (value.ndim - 2))
    return value + bias


def local_response_normalization(
    input: Any, depth_radius: int = 5, bias: Any = 1, alpha: Any = 1, beta: Any = 0.5, name: str | None = None
) -> Any:
    """Divides each channel by `(bias + alpha * sum of squares of the channels near it) ** beta`."""
    x = convert_to_tensor(input)
    window = (1, 1, 1, 2 * depth_radius + 1)
    padding = [(0, 0)] * 3 + [(depth_radius, depth_radius)]
    squares = lax.reduce_window(x * x, np.zeros((), x.dtype), lax.add, window, (1, 1, 1, 1), padding)
    return x / (bias + alpha * squares) ** beta


lrn = local_response_normalization


def _dropped(x: Any, rate: Any, noise_shape: Any, uniform: Callable[[tuple[int, ...], Any], Any]) -> Any:
    x = convert_to_tensor(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x has to be a floating point tensor since it's going to be scaled, got {x.dtype}.")
    if not isinstance(rate, jax.core.Tracer) and not 0 <= float(rate) < 1:
        if float(rate) != 1:
            raise ValueError(f"`rate` must be a scalar or a float in the range [0, 1], got {rate}.")
        return jnp.zeros_like(x)
    shape = (
        x.shape
        if noise_shape is None
        else tuple(n if s is None else as_shape(s)[0] for s, n in zip(noise_shape, x.shape))
    )
    kept = uniform(shape, x.dtype) >= jnp.asarray(rate, x.dtype)
    return jnp.where(kept, x / (1 - jnp.asarray(rate, x.dtype)), jnp.zeros_like(x))


def dropout(x: Any, rate: Any, noise_shape: Any = None, seed: Any = None, name: str | None = None) -> Any:
    """Sets elements to 0 with the probability `rate`, and multiplies the others by `1 / (1 - rate)`."""
    return _dropped(x, rate, noise_shape, lambda shape, dtype: _random.uniform(shape, dtype=dtype, seed=seed))


def stateless_dropout(
    x: Any, rate: Any, seed: Any, rng_alg: Any = None, noise_shape: Any = None, name: str | None = None
) -> Any:
    """Computes `dropout` with random numbers that depend on `seed` (two integers) alone."""
    return _dropped(x, rate, noise_shape, lambda shape, dtype: _random.stateless_uniform(shape, seed, dtype=dtype))


operations(globals())
