"""Decoders of published training runs in plain JAX, as steps that are compiled but never run.

A `Decoder` has the sizes of a model, a `Training` the numbers and the memory of its step. `training_step` returns the
jitted step and its arguments, without any value.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

AXIS = "fsdp"


@dataclass(frozen=True)
class Decoder:
    """The sizes of a decoder: of the family of Llama, or of MPT with `mpt=True`.

    MPT has biases, learned positions, an MLP without a gate, and one matrix for embedding and logits.
    """

    layers: int
    width: int
    heads: int
    groups: int
    hidden: int
    vocabulary: int
    length: int
    head_size: int = 128
    mpt: bool = False

    def shapes(self) -> dict[str, Any]:
        """Return the shapes of the variables. Variables of layers are stacked."""
        width, queries, keys = self.width, self.heads * self.head_size, self.groups * self.head_size
        products = {"query": (width, queries), "key": (width, keys), "value": (width, keys), "out": (queries, width)}
        products |= {"up": (width, self.hidden), "down": (self.hidden, width)}
        layer = products | {"norm1": (width,), "norm2": (width,)}
        shapes = {"embedding": (self.vocabulary, width), "norm": (width,)}
        if self.mpt:
            layer |= {f"{name}_bias": shape[-1:] for name, shape in layer.items()}
            shapes |= {"positions": (self.length, width), "norm_bias": (width,)}
        else:
            layer["gate"] = (width, self.hidden)
            shapes["logits"] = (width, self.vocabulary)
        return {"layers": {name: (self.layers, *shape) for name, shape in layer.items()}, **shapes}

    def parameters(self) -> int:
        return sum(math.prod(shape) for shape in jax.tree.leaves(self.shapes(), is_leaf=_is_shape))


@dataclass(frozen=True)
class Training:
    """How a decoder is trained.

    Args:
        rows: the sequences of a device.
        weights: the type of the variables and of the optimizer's moments.
        reduced: the type of gradients that are sent.
        saved: the values that a layer keeps for the backward pass, by name; the others are computed again.
        sharded: whether variables and moments are divided among the devices.
        accumulates: whether the gradients are added to gradients of earlier rows.
        eager_loss: the type of the loss's intermediate values if each operation writes its result to memory, as a
            framework without a compiler does; empty if XLA may fuse them.
        repeats_keys: whether grouped keys and values are repeated for each head.
    """

    rows: int
    weights: str = "float32"
    reduced: str = "bfloat16"
    saved: tuple[str, ...] = ()
    sharded: bool = True
    accumulates: bool = False
    eager_loss: str = ""
    repeats_keys: bool = False


def training_step(model: Decoder, how: Training, mesh: Any) -> tuple[Any, tuple[Any, Any, Any]]:
    """Return the jitted step, AdamW included, and its arguments: the state, the tokens and the targets."""
    size = mesh.shape[AXIS]
    shapes = model.shapes()
    specs = {
        name: {part: _spec(shape, how, size, 1) for part, shape in of.items()}
        if name == "layers"
        else _spec(of, how, size)
        for name, of in shapes.items()
    }
    loss = functools.partial(_loss, model, how, mesh, specs)

    def step(state: dict[str, Any], tokens: Any, targets: Any) -> tuple[dict[str, Any], Any]:
        value, gradients = jax.value_and_grad(loss)(state["variables"], tokens, targets)
        if how.accumulates:
            gradients = jax.tree.map(jnp.add, gradients, state["gradients"])
        return _adamw(state, gradients), value

    def variables() -> Any:
        return jax.tree.map(
            lambda shape, spec: jax.ShapeDtypeStruct(shape, how.weights, sharding=NamedSharding(mesh, spec)),
            shapes,
            specs,
            is_leaf=_is_shape,
        )

    names = ["variables", "first", "second"] + ["gradients"] * how.accumulates
    state = {name: variables() for name in names}
    batch = jax.ShapeDtypeStruct((how.rows * size, model.length), jnp.int32, sharding=NamedSharding(mesh, P(AXIS)))
    results = (jax.tree.map(lambda leaf: leaf.sharding, state), NamedSharding(mesh, P()))
    return jax.jit(step, donate_argnums=0, out_shardings=results), (state, batch, batch)


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple)


def _spec(shape: tuple[int, ...], how: Training, size: int, skip: int = 0) -> P:
    """Divide the first axis, after the `skip` first ones, that has a multiple of `size` elements."""
    axes: list[str | None] = [None] * len(shape)
    for axis in range(skip, len(shape) if how.sharded else 0):
        if shape[axis] % size == 0:
            axes[axis] = AXIS
            break
    return P(*axes)


def _adamw(state: dict[str, Any], gradients: Any) -> dict[str, Any]:
    def update(variable: Any, first: Any, second: Any) -> Any:
        return (variable - 4e-4 * (first / (jnp.sqrt(second) + 1e-8) + 0.1 * variable)).astype(variable.dtype)

    first = jax.tree.map(lambda m, g: (0.9 * m + 0.1 * g).astype(m.dtype), state["first"], gradients)
    second = jax.tree.map(lambda m, g: (0.95 * m + 0.05 * g * g).astype(m.dtype), state["second"], gradients)
    variables = jax.tree.map(update, state["variables"], first, second)
    zeros = {"gradients": jax.tree.map(jnp.zeros_like, gradients)} if "gradients" in state else {}
    return {"variables": variables, "first": first, "second": second, **zeros}


def _gather(variable: Any, spec: P, how: Training, mesh: Any) -> Any:
    """Return the whole variable in bfloat16; its gradient is divided again."""

    @jax.custom_vjp
    def gather(variable: Any) -> Any:
        return lax.with_sharding_constraint(variable.astype(jnp.bfloat16), NamedSharding(mesh, P()))

    def backward(_: None, gradient: Any) -> tuple[Any]:
        gradient = lax.with_sharding_constraint(gradient.astype(how.reduced), NamedSharding(mesh, spec))
        return (gradient.astype(how.weights),)

    gather.defvjp(lambda variable: (gather(variable), None), backward)
    return gather(variable)


def _loss(model: Decoder, how: Training, mesh: Any, specs: dict[str, Any], variables: Any, tokens: Any, targets: Any):
    divided = NamedSharding(mesh, P(AXIS))

    def whole(name: str) -> Any:
        return _gather(variables[name], specs[name], how, mesh)

    def one_layer(x: Any, parts: dict[str, Any]) -> tuple[Any, None]:
        parts = {name: _gather(part, P(*specs["layers"][name][1:]), how, mesh) for name, part in parts.items()}
        return lax.with_sharding_constraint(_layer(model, how, mesh, x, parts), divided), None

    embedding = whole("embedding")
    x = jnp.take(embedding, tokens, axis=0)
    if model.mpt:
        x = x + whole("positions")
    one_layer = jax.checkpoint(one_layer, policy=_policy(how), prevent_cse=False)
    x, _ = lax.scan(one_layer, lax.with_sharding_constraint(x, divided), variables["layers"])
    x = _norm(x, whole("norm"), whole("norm_bias") if model.mpt else None)
    logits = lax.with_sharding_constraint(x @ (embedding.T if model.mpt else whole("logits")), divided)
    if how.eager_loss:
        return jnp.mean(_eager_cross_entropy(logits, targets, how.eager_loss))
    picked = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0].astype(jnp.float32)
    return jnp.mean(jax.nn.logsumexp(logits.astype(jnp.float32), -1) - picked)


def _policy(how: Training) -> Callable[..., Any]:
    """Return which values of a layer are kept. The attention kernel's own result is kept with "context"."""
    named = jax.checkpoint_policies.save_only_these_names(*how.saved)

    def keeps(primitive: Any, *inputs: Any, **parameters: Any) -> Any:
        if "context" in how.saved and primitive.name.startswith("dot_product_attention_fwd"):
            return True
        return named(primitive, *inputs, **parameters)

    return keeps


def _layer(model: Decoder, how: Training, mesh: Any, x: Any, parts: dict[str, Any]) -> Any:
    rows, length, _ = x.shape

    def product(x: Any, name: str) -> Any:
        return x @ parts[name] + (parts[f"{name}_bias"] if model.mpt else 0)

    y = checkpoint_name(_norm(x, parts["norm1"], parts.get("norm1_bias"), "1"), "normalized1")
    heads = {name: product(y, name).reshape(rows, length, -1, model.head_size) for name in ("query", "key", "value")}
    if not model.mpt:
        heads |= {name: _rotate(heads[name]) for name in ("query", "key")}
    if how.repeats_keys:
        heads |= {name: jnp.repeat(heads[name], model.heads // model.groups, 2) for name in ("key", "value")}
    context = _attend(mesh, *(checkpoint_name(heads[name], name) for name in ("query", "key", "value")))
    x = x + checkpoint_name(product(checkpoint_name(context.reshape(rows, length, -1), "context"), "out"), "out")
    x = checkpoint_name(x, "middle")
    y = checkpoint_name(_norm(x, parts["norm2"], parts.get("norm2_bias"), "2"), "normalized2")
    up = checkpoint_name(product(y, "up"), "up")
    if model.mpt:
        hidden = jax.nn.gelu(up, approximate=False)
    else:
        hidden = checkpoint_name(jax.nn.silu(checkpoint_name(product(y, "gate"), "gate")), "silu") * up
    return x + checkpoint_name(product(checkpoint_name(hidden, "hidden"), "down"), "down")


def _norm(x: Any, scale: Any, bias: Any = None, name: str = "") -> Any:
    """Normalize in float32: by the root of the mean square, or as LayerNorm where there is a bias."""
    wide = checkpoint_name(x.astype(jnp.float32), f"wide{name}")
    if bias is not None:
        wide = wide - wide.mean(-1, keepdims=True)
    normal = wide * lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-5)
    return checkpoint_name(normal.astype(x.dtype), f"normal{name}") * scale + (0 if bias is None else bias)


def _rotate(x: Any) -> Any:
    """Rotate queries or keys by their positions."""
    length, size = x.shape[1], x.shape[3]
    angles = jnp.arange(length)[:, None] * 10000.0 ** (-jnp.arange(0, size, 2) / size)
    cos, sin = (jnp.tile(part, 2)[None, :, None, :].astype(x.dtype) for part in (jnp.cos(angles), jnp.sin(angles)))
    low, high = jnp.split(x, 2, axis=-1)
    return x * cos + jnp.concatenate([-high, low], -1) * sin


def _attend(mesh: Any, *heads: Any) -> Any:
    """Let each device attend to its own sequences, because cuDNN's kernel, which keeps no scores, is not divided."""

    def attend(query: Any, key: Any, value: Any) -> Any:
        return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn")

    return jax.shard_map(attend, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False)(*heads)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _eager_cross_entropy(logits: Any, targets: Any, kind: str) -> Any:
    return _eager_forward(logits, targets, kind)[0]


def _eager_forward(logits: Any, targets: Any, kind: str) -> Any:
    """Compute one operation at a time: the barriers keep XLA from fusing them."""
    logits = lax.optimization_barrier(logits.astype(kind))
    logarithms = lax.optimization_barrier(jax.nn.log_softmax(logits))
    return -jnp.take_along_axis(logarithms, targets[..., None], -1)[..., 0].astype(jnp.float32), (logarithms, targets)


def _eager_backward(kind: str, residuals: Any, gradient: Any) -> Any:
    logarithms, targets = residuals
    rows, length = jnp.indices(targets.shape)
    picked = jnp.zeros_like(logarithms).at[rows, length, targets].set(-gradient.astype(kind))
    logarithms, picked = lax.optimization_barrier((logarithms, picked))
    wrong = picked - jnp.exp(logarithms) * picked.sum(-1, keepdims=True)
    wrong, _, _ = lax.optimization_barrier((wrong, logarithms, picked))
    return wrong.astype(jnp.bfloat16), None


_eager_cross_entropy.defvjp(_eager_forward, _eager_backward)
