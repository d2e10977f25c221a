"""Variables of Keras as variables of a strategy, and state that each replica has for itself.

A Keras variable on the JAX backend keeps its array in one attribute, which here becomes a view of a `replicax.Variable`
of the strategy that was current when it was made.

| in Keras | what changes |
|---|---|
| `backend.Variable` | holds its value in a `replicax.Variable`; made inside of a traced step, it is made at once |
| `backend.Variable.variables` | new: the parts of one that is divided among parameter servers |
| `BaseOptimizer.apply` | refused outside of replicas; may assign plain variables that live once |
| `BaseOptimizer._clip_gradients` | gradients are summed over the replicas first, and then clipped |
| `SeedGenerator.__init__`, `next` | each replica draws other numbers |
| `Layer.add_weight` | state that is not trained (BatchNorm's) is each replica's own, and read as the mean |
| `BaseOptimizer.add_variable_from_reference` | so are an optimizer's accumulated gradients, but read as the sum |
| the same | slots lie on the parameter servers of their variable |
| `ops.cond` | its branches may assign variables, as those of `LossScaleOptimizer` do |
| `LossScaleOptimizer.check_finite` | gradients are finite where those of all replicas are |
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from replicax._base import foreign_state, thread_state, tracebacks
from replicax._base.foreign_state import Original
from replicax._base.types import Tree, VariableAggregation, VariableSynchronization
from replicax._collectives.reducer import Reducer
from replicax._control_flow import cond_and_loops
from replicax._integrations.keras.losses import replicas
from replicax._tracing import context as _context
from replicax._tracing import frames, protocols
from replicax._tracing.protocols import storage_of
from replicax._variables import creators
from replicax._variables.assigned_alike import MayDiffer
from replicax._variables.distributed import SyncOnReadVariable
from replicax._variables.variable import Variable

if TYPE_CHECKING:
    import keras

_AGGREGATION = {
    "none": VariableAggregation.NONE,
    "mean": VariableAggregation.MEAN,
    "sum": VariableAggregation.SUM,
    # Every replica computes the same number of steps, so it need not ask the first one.
    "only_first_replica": VariableAggregation.NONE,
}


_building = threading.RLock()  # eager replicas are threads, and one of them builds for all


def join() -> None:
    """Changes Keras as the table above says."""
    import keras
    from keras.src.backend.common.symbolic_scope import in_symbolic_scope
    from keras.src.optimizers.base_optimizer import BaseOptimizer

    kind = keras.src.backend.Variable
    kind._value = _Value(in_symbolic_scope)
    kind.__replicax_variable__ = property(_held)
    kind.variables = property(_parts)
    foreign_state.wrap(kind, "__init__", _made_at_once)
    foreign_state.wrap(kind, "_deferred_initialize", _made_at_once)
    foreign_state.wrap(keras.Layer, "add_weight", _add_weight)
    foreign_state.wrap(keras.Layer, "_maybe_build", _build_layer)
    foreign_state.wrap(BaseOptimizer, "build", _build_optimizer)
    foreign_state.wrap(BaseOptimizer, "apply", _apply)
    foreign_state.wrap(BaseOptimizer, "_clip_gradients", _clip_gradients)
    foreign_state.wrap(BaseOptimizer, "add_variable_from_reference", _add_slot)
    foreign_state.wrap(keras.optimizers.LossScaleOptimizer, "check_finite", _check_finite)
    foreign_state.wrap(keras.src.backend.jax.core, "cond", _cond)
    foreign_state.wrap(keras.random.SeedGenerator, "__init__", _new_seeds)
    foreign_state.wrap(keras.random.SeedGenerator, "next", _next_seed)


# Variables.


class _Value:
    """The attribute in which a Keras variable keeps its array, as a view of a `Variable`.

    Keras sets it to None to free the memory while its own `fit` has the arrays elsewhere.
    """

    def __init__(self, in_symbolic_scope: Callable[[], bool]):
        self._in_symbolic_scope = in_symbolic_scope

    def __get__(self, variable: keras.Variable, owner: type | None = None) -> Tree:
        if variable is None:
            return self
        held = _held(variable)
        if held is None or variable.__dict__.get("_replicax_emptied"):
            return None
        if not self._in_symbolic_scope():  # a stateless one is also around the loops of recurrent layers
            return held.value()
        if storage_of(held).is_abstract:
            return jnp.zeros(held.shape, held.dtype)  # traced, as Keras looks at shapes and dtypes
        with creators.outside():
            return held.value()

    def __set__(self, variable: keras.Variable, value: Tree) -> None:
        slots = variable.__dict__
        slots["_replicax_emptied"] = value is None
        if value is None:
            return
        held = _held(variable)
        if held is None:
            slots["_replicax_held"] = _new_variable(variable, value)
        else:
            held.assign(value)


def _held(variable: keras.Variable) -> Variable | None:
    """Returns the `Variable` of a Keras variable, and makes it for one from before Keras joined."""
    slots = variable.__dict__
    if "_value" in slots:
        value = slots.pop("_value")
        if value is not None:
            with creators.outside():
                slots["_replicax_held"] = _new_variable(variable, value)
    held: Variable | None = slots.get("_replicax_held")
    return held


def _parts(variable: keras.Variable) -> Sequence[Variable]:
    """Returns the parts of a variable that is divided among parameter servers."""
    parts: Sequence[Variable] | None = getattr(_held(variable), "variables", None)
    if parts is None:
        raise AttributeError(f"{type(variable).__name__!r} object has no attribute 'variables': it is not divided.")
    return parts


def _new_variable(variable: keras.Variable, value: Tree) -> Variable:
    strategy = _context.get_strategy()
    own = thread_state.current.keras_own_state
    own_state = own is not None and variable.aggregation == "none" and jnp.issubdtype(value.dtype, jnp.floating)
    on_read = own_state or variable.synchronization == "on_read"
    aggregation = own if own_state else _AGGREGATION[variable.aggregation]
    kind: Callable[..., Variable] = Variable
    if protocols.variables_live_once(strategy):
        if aggregation is VariableAggregation.NONE:
            aggregation = VariableAggregation.ONLY_FIRST_REPLICA  # all replicas assign the same
        if on_read or own is not None:
            # Keras assigns `total + x`, in which the total is the replica's own. A variable that lives once has the
            # sum of all, which would count again for each replica. Nor do replicas without rows come to assign it.
            on_read = True
            reducer = strategy.extended._reducer
            assert isinstance(reducer, Reducer)
            kind = functools.partial(SyncOnReadVariable, strategy=strategy, reducer=reducer)
    synchronization = VariableSynchronization.ON_READ if on_read else VariableSynchronization.AUTO
    with creators.outside():
        return kind(
            value,
            trainable=variable.trainable,
            name=variable.path,
            synchronization=synchronization,
            aggregation=aggregation,
            copies_may_differ=MayDiffer.UNLESS_DIVIDED,  # as with Keras on TensorFlow
        )


def _made_at_once(make: Original, variable: keras.Variable, /, *args: object, **kwargs: object) -> None:
    """Makes a variable outside of a step that is being traced, so that its value is no tracer."""
    with creators.outside():  # an initializer may draw from a generator, whose state is not the step's then
        make(variable, *args, **kwargs)


def _add_weight(add: Original, layer: keras.Layer, /, *args: object, **kwargs: object) -> Tree:
    own = None if kwargs.get("trainable", True) else VariableAggregation.MEAN
    with thread_state.entered(keras_own_state=own):
        return add(layer, *args, **kwargs)


def _new_seeds(init: Original, generator: keras.random.SeedGenerator, /, *args: object, **kwargs: object) -> None:
    with thread_state.entered(keras_own_state=VariableAggregation.MEAN):
        init(generator, *args, **kwargs)


def _add_slot(add: Original, optimizer: keras.Optimizer, /, *args: object, **kwargs: object) -> Tree:
    name = kwargs.get("name", args[1] if len(args) > 1 else None)
    # Their sum is what one device has, and what any number of replicas can go on with.
    own = VariableAggregation.SUM if name == "gradient_accumulator" else None
    beside = _beside(kwargs.get("reference_variable", args[0] if args else None))
    with thread_state.entered(keras_own_state=own), beside:
        return add(optimizer, *args, **kwargs)


def _beside(reference: object) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which new variables lie where a variable does, if the current strategy has made that."""
    held = getattr(reference, "__replicax_variable__", None)
    extended: Any = _context.get_strategy().extended
    if held is None or not _context.has_strategy() or not extended.variable_created_in_scope(held):
        return contextlib.nullcontext()
    beside: contextlib.AbstractContextManager[None] = extended.colocate_vars_with(held)
    return beside


def _one_at_a_time(build: Original, thing: keras.Layer | keras.Optimizer, *args: object, **kwargs: object) -> Tree:
    with _building:
        return build(thing, *args, **kwargs)


def _build_optimizer(build: Original, optimizer: keras.Optimizer, /, *args: object, **kwargs: object) -> Tree:
    if protocols.shards_optimizer_state(_context.get_strategy()) and not getattr(optimizer, "built", False):
        tracebacks.warn(
            f"shard_optimizer_state has no effect on Keras's optimizers: all state of {type(optimizer).__name__} is on "
            "each replica. `rx.Optimizer` with an Optax optimizer shards its state.",
        )
    return _one_at_a_time(build, optimizer, *args, **kwargs)


def _build_layer(build: Original, layer: keras.Layer, /, *args: object, **kwargs: object) -> Tree:
    # A layer's own `build` is told shapes alone, and computes variables' first values, which must not be traced ones:
    # nor is the state of the generator from which they may be drawn.
    own = not getattr(layer.build, "_is_default", False)
    with creators.outside() if own else contextlib.nullcontext():
        return _one_at_a_time(build, layer, *args, **kwargs)


# In a replica.


def _clip_gradients(clip: Original, optimizer: keras.Optimizer, grads: Tree) -> Tree:
    context = _context.get_replica_context()
    if context is not None and replicas() > 1:
        with_value = [i for i, grad in enumerate(grads) if grad is not None]
        grads = list(grads)
        for i, total in zip(with_value, context.all_reduce("SUM", [grads[i] for i in with_value])):
            grads[i] = total
    return clip(optimizer, grads)


def _apply(apply: Original, optimizer: keras.Optimizer, /, *args: object, **kwargs: object) -> Tree:
    from keras.src.backend import in_stateless_scope

    if _context.get_replica_context() is None and not in_stateless_scope():
        raise RuntimeError(
            f"{type(optimizer).__name__}.apply_gradients() cannot be called in cross-replica context. Call it in the "
            "function that `strategy.run` runs, where it sums the gradients of all replicas."
        )
    with thread_state.entered(assigns_alike=True):  # of the gradients' sums; the variables may be plain ones
        return apply(optimizer, *args, **kwargs)


def _check_finite(check: Original, optimizer: keras.Optimizer, grads: Tree) -> Tree:
    finite, context = check(optimizer, grads), _context.get_replica_context()
    if context is None or replicas() == 1:
        return finite
    return context.all_reduce("SUM", 1.0 - jnp.asarray(finite, jnp.float32)) == 0


def _cond(cond: Original, pred: jax.Array | bool, true_fn: Callable[[], Tree], false_fn: Callable[[], Tree]) -> Tree:
    from keras.src.backend import in_stateless_scope

    if in_stateless_scope():
        return cond(pred, true_fn, false_fn)
    if not isinstance(pred, jax.core.Tracer):
        return true_fn() if pred else false_fn()
    if not frames.is_tracing():
        return cond(pred, true_fn, false_fn)
    return cond_and_loops.cond(pred, lambda: (true_fn(),), lambda: (false_fn(),), ("the result",))[0]


def _next_seed(draw: Original, generator: keras.random.SeedGenerator, /, *args: object, **kwargs: object) -> Tree:
    seed = draw(generator, *args, **kwargs)
    context = _context.get_replica_context()
    if context is None or replicas() == 1:
        return seed
    replica = jnp.asarray(context.replica_id_in_sync_group, jnp.uint32)
    # The first replica keeps the seed, and draws what one replica alone would.
    other = jax.random.bits(jax.random.fold_in(jax.random.wrap_key_data(seed.astype(jnp.uint32)), replica), seed.shape)
    return jnp.where(replica == 0, seed, other.astype(seed.dtype))
