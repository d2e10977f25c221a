"""The steps for gpu_compiler.py: with replicax, and by hand in JAX in the forms that users write.

All compute the same: the gradients of the mean loss of the global batch, reduced in the same dtype, an Optax update,
and the loss. The parameters and the optimizer's state are donated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.flatten_util import ravel_pytree
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from side_jax import transformation
from sides import BY_HAND

import replicax as rx
from replicax._collectives.sharding import cut_axis

OPS = models.jax_ops()
REPLICATED, STATE, VARIABLES = "replicated", "sharded state", "sharded variables"
SHARDING = "NamedSharding"
FORMS = {
    REPLICATED: BY_HAND,
    STATE: ["shard_map, scattered", SHARDING],
    VARIABLES: ["shard_map, gathers repeated", "shard_map, kept", SHARDING],
}
OPTIONS: dict[str, dict[str, Any]] = {
    REPLICATED: {},
    STATE: {"shard_optimizer_state": True},
    VARIABLES: {"shard_variables": True},
}


class MLP(models.WideMLP):
    """Twelve layers. A product of so many rows takes about as long as to gather its weights."""

    batch, inputs, width, layers = 2048, 2048, 2048, 12


class LanguageModel(models.LanguageModel):
    """The language model with 67 million parameters."""

    batch, length, inputs, width, heads, blocks = 4, 512, 8192, 1024, 16, 4

    def x(self, rng: Any) -> Any:
        return np.zeros((self.batch, self.length), np.int32)

    def y(self, rng: Any) -> Any:
        return np.broadcast_to(np.zeros((), np.float32), (self.batch, self.length, self.inputs))


class NarrowLanguageModel(LanguageModel):
    """The same, computed in bfloat16 from parameters in float32; gradients are added up in bfloat16."""

    narrow = jnp.bfloat16

    def logits(self, ops: Any, p: dict[str, Any], x: Any) -> Any:
        return super().logits(ops, _Narrow(p), x).astype(jnp.float32)


class _Narrow(dict[str, Any]):
    """Parameters that are cast where they are used."""

    def __init__(self, parameters: dict[str, Any]):
        super().__init__(parameters)
        self._parameters = parameters

    def __getitem__(self, name: str) -> Any:
        return self._parameters[name].astype(jnp.bfloat16)


MODELS = {
    "mlp": MLP(),
    "cnn": models.MODELS["large"],
    "language model": LanguageModel(),
    "language model; bfloat16": NarrowLanguageModel(),
}


def kinds_of_batch(model: Any) -> list[jax.ShapeDtypeStruct]:
    """The types of one replica's inputs and labels."""
    rng = np.random.default_rng(1)
    return [jax.ShapeDtypeStruct(part.shape, part.dtype) for part in (model.x(rng), model.y(rng))]


def plan_with_replicax(model: Any, mode: str, topology: str) -> Any:
    """The plan of the step as a user of replicax writes it."""
    strategy = rx.MirroredStrategy(jax.devices()[:2], **OPTIONS[mode])
    narrow = getattr(model, "narrow", None)
    with strategy.scope(), rx.experimental.abstract_variables():
        parameters = rx.Variable(model.parameters())
        options = None if narrow is None else rx.CommunicationOptions(reduction_dtype=narrow)
        optimizer = rx.Optimizer(transformation(model), parameters, options=options)
        specs = tuple(rx.PerReplicaSpec(rx.TensorSpec(kind.shape, kind.dtype)) for kind in kinds_of_batch(model))

    def replica(x, y):
        replicas = rx.get_strategy().num_replicas_in_sync
        loss, gradients = jax.value_and_grad(lambda p: models.loss(OPS, model, p, x, y, replicas))(parameters.value())
        optimizer.apply_gradients(gradients)
        return loss

    def step(x, y):
        return strategy.reduce("SUM", strategy.run(replica, args=(x, y)), axis=None)

    with strategy.scope():
        return rx.plan(rx.function(step), specs, topology=topology)[topology]


class ByHand(NamedTuple):
    """A step by hand: a function of the state and the batch, and the types of these with their shardings."""

    step: Callable[..., Any]
    state: Any
    batch: list[jax.ShapeDtypeStruct]


def step_by_hand(model: Any, mode: str, form: str, size: int) -> ByHand:
    """The step in a form by hand, for so many devices."""
    mesh = AbstractMesh((size,), ("replica",), (AxisType.Auto,))
    update = transformation(model)
    parameters = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, model.parameters()))
    inner = jax.eval_shape(update.init, parameters)

    def spec_of(kind: Any) -> P:
        axis = cut_axis(kind, size)
        return P() if axis is None else P(*[None] * axis, "replica")

    def specs(tree: Any, sharded: bool) -> Any:
        return jax.tree.map(lambda kind: spec_of(kind) if sharded else P(), tree)

    def with_sharding(kind: Any, spec: P) -> Any:
        return jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=NamedSharding(mesh, spec))

    both = specs(parameters, mode == VARIABLES), specs(inner, mode != REPLICATED)
    parts = specs(parameters, mode != REPLICATED)
    if form.endswith(SHARDING):
        step = _by_sharding(model, update, mesh, both, parts)
    else:
        replica = _Replica(model, update, size, parts)
        run = {
            REPLICATED: replica.step_replicated,
            STATE: replica.step_sharded_state,
            VARIABLES: replica.step_sharded_variables,
        }
        in_specs = (both, P("replica"), P("replica"))

        def of_form(*args: Any) -> Any:
            return run[mode](form, *args)

        step = jax.jit(
            jax.shard_map(of_form, mesh=mesh, in_specs=in_specs, out_specs=(both, P()), check_vma=False),
            donate_argnums=0,
        )
    state = jax.tree.map(with_sharding, (parameters, inner), both)
    batch = [
        with_sharding(jax.ShapeDtypeStruct((kind.shape[0] * size, *kind.shape[1:]), kind.dtype), P("replica"))
        for kind in kinds_of_batch(model)
    ]
    return ByHand(step, state, batch)


def _by_sharding(model: Any, update: Any, mesh: Any, both: Any, parts: Any) -> Any:
    """The step of the whole batch: XLA adds up gradients, and gathers and scatters, as shardings say."""

    def shardings(specs: Any) -> Any:
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)

    def step(state, x, y):
        parameters, inner = state
        loss, gradients = jax.value_and_grad(lambda p: models.loss(OPS, model, p, x, y, 1))(parameters)
        gradients = lax.with_sharding_constraint(gradients, shardings(parts))
        updates, inner = update.update(gradients, inner, parameters)
        return (optax.apply_updates(parameters, updates), inner), loss

    return jax.jit(step, donate_argnums=0, out_shardings=(shardings(both), NamedSharding(mesh, P())))


class _Replica:
    """One replica's step, in `jax.shard_map`."""

    def __init__(self, model: Any, update: Any, size: int, parts: Any):
        self._model, self._update, self._size = model, update, size
        self._narrow = getattr(model, "narrow", jnp.float32)
        self._axes = {name: list(spec).index("replica") if len(spec) else None for name, spec in parts.items()}

    def _loss(self, p: Any, x: Any, y: Any) -> Any:
        return models.loss(OPS, self._model, p, x, y, self._size)

    def _update_parameters(self, parameters: Any, inner: Any, gradients: Any) -> tuple[Any, Any]:
        updates, inner = self._update.update(gradients, inner, parameters)
        return optax.apply_updates(parameters, updates), inner

    def _reduce(self, gradient: Any, send: Callable[[Any], Any]) -> Any:
        return send(gradient.astype(self._narrow)).astype(gradient.dtype)

    def step_replicated(self, form: str, state: Any, x: Any, y: Any) -> Any:
        parameters, inner = state
        loss, gradients = jax.value_and_grad(self._loss)(parameters, x, y)
        if form.endswith("packed"):
            vector, unravel = ravel_pytree(gradients)
            gradients = unravel(self._reduce(vector, lambda v: lax.psum(v, "replica")))
        else:
            gradients = {n: self._reduce(g, lambda g: lax.psum(g, "replica")) for n, g in gradients.items()}
        return self._update_parameters(parameters, inner, gradients), lax.psum(loss, "replica")

    def step_sharded_state(self, form: str, state: Any, x: Any, y: Any) -> Any:
        parameters, inner = state
        loss, gradients = jax.value_and_grad(self._loss)(parameters, x, y)
        gradients = {name: self._reduce(gradient, self._scatter(name)) for name, gradient in gradients.items()}
        parts = {name: self._part(name, value) for name, value in parameters.items()}
        new, inner = self._update_parameters(parts, inner, gradients)
        gathered = {name: self._gather(name, value) for name, value in new.items()}
        return (gathered, inner), lax.psum(loss, "replica")

    def step_sharded_variables(self, form: str, state: Any, x: Any, y: Any) -> Any:
        parameters, inner = state
        replica = self

        class Gathered(dict[str, Any]):  # at each use, in the dtype of the computation
            def __getitem__(self, name: str) -> Any:
                value = super().__getitem__(name).astype(replica._narrow)
                return checkpoint_name(replica._gather(name, value), "gathered")

        def loss(p, x, y):
            return models.loss(OPS, _Plain(self._model), Gathered(p), x, y, self._size)

        if form.endswith("repeated"):
            policy = jax.checkpoint_policies.save_anything_except_these_names("gathered")
            loss = jax.checkpoint(loss, policy=policy)
        value, gradients = jax.value_and_grad(loss)(parameters, x, y)
        whole = {name for name, axis in self._axes.items() if axis is None}  # others are scattered where gathered
        gradients = {
            name: self._reduce(gradient, self._scatter(name)) if name in whole else gradient
            for name, gradient in gradients.items()
        }
        return self._update_parameters(parameters, inner, gradients), lax.psum(value, "replica")

    def _scatter(self, name: str) -> Callable[[Any], Any]:
        axis = self._axes[name]
        if axis is None:
            return lambda gradient: lax.psum(gradient, "replica")
        return lambda gradient: lax.psum_scatter(gradient, "replica", scatter_dimension=axis, tiled=True)

    def _gather(self, name: str, value: Any) -> Any:
        axis = self._axes[name]
        return value if axis is None else lax.all_gather(value, "replica", axis=axis, tiled=True)

    def _part(self, name: str, value: Any) -> Any:
        axis = self._axes[name]
        if axis is None:
            return value
        size = value.shape[axis] // self._size
        return lax.dynamic_slice_in_dim(value, lax.axis_index("replica") * size, size, axis)


class _Plain:
    """A model that computes in the dtype of its parameters, and returns float32."""

    def __init__(self, model: Any):
        self._model = model

    def logits(self, ops: Any, p: Any, x: Any) -> Any:
        of = LanguageModel.logits if isinstance(self._model, LanguageModel) else type(self._model).logits
        return of(self._model, ops, p, x).astype(jnp.float32)
