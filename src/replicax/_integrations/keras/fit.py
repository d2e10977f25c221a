"""`compile`, `fit`, `evaluate` and `predict` of Keras models that were made under a strategy.

Keras's own loops on the JAX backend stay: epochs, callbacks, the progress bar. They pass a model's whole state through
a step function; for a model of a strategy that state is empty, and the step is a `function` around `strategy.run` that
touches the variables itself, written as on Keras's TensorFlow backend.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from replicax._base import errors, nest, thread_state
from replicax._base.errors import OutOfRangeError
from replicax._base.foreign_state import Original, wrap
from replicax._base.types import Leaf, ReduceOp, Tree
from replicax._data.calls import ends_data
from replicax._engine import function
from replicax._input.distributed_dataset import for_this_process
from replicax._input.iterator import DistributedIterator
from replicax._integrations.keras import scheduled
from replicax._integrations.keras.loop_data import unpack
from replicax._integrations.keras.losses import scale_loss, unscale_loss
from replicax._integrations.keras.normalization import kept_without_rows, synchronizes
from replicax._tracing import context
from replicax._tracing.tape import GradientTape, UnconnectedGradients
from replicax._values import DistributedValues, PerReplica, counted_form, is_differing

if TYPE_CHECKING:
    import keras
    from keras.src.trainers.epoch_iterator import EpochIterator


def join() -> None:
    """Changes Keras's trainer for models of a strategy; others keep theirs."""
    from keras.src.backend.jax.trainer import JAXTrainer

    wrap(JAXTrainer, "__init__", _init)
    JAXTrainer.distribute_strategy = property(lambda model: strategy_of(model) or context.get_strategy())
    wrap(JAXTrainer, "compile", _in_scope)
    for name in ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch"):
        wrap(JAXTrainer, name, functools.partial(_run_loop, name))
    made: dict[str, Callable[[keras.Model], Callable[..., Tree]]] = {
        "train_function": lambda model: _with_logs(model, "train_step", _train_step, 4),
        "test_function": lambda model: _with_logs(model, "test_step", _test_step, 3),
        "predict_function": _with_outputs,
    }
    for attribute, function_of in made.items():
        wrap(JAXTrainer, f"make_{attribute}", _maker(attribute, function_of))
    for name, ours in (("train_step", _train_step), ("test_step", _test_step), ("predict_step", _predict_step)):
        wrap(JAXTrainer, name, functools.partial(_by_super, ours))
    wrap(JAXTrainer, "_get_jax_state", _no_state)
    wrap(JAXTrainer, "_symbolic_build", _symbolic_build)
    wrap(JAXTrainer, "_aggregate_additional_loss", _additional_loss)
    wrap(JAXTrainer, "jax_state_sync", _synced)
    JAXTrainer.__call__ = _call_model


def strategy_of(model: keras.Model) -> Any:
    """Returns the strategy in whose scope a model was made; None for none."""
    return model.__dict__.get("_replicax_strategy")


def _init(init: Original, model: keras.Model, /, *args: object, **kwargs: object) -> None:
    model.__dict__["_replicax_strategy"] = context.get_strategy() if context.has_strategy() else None
    init(model, *args, **kwargs)


def _run_loop(name: str, method: Original, model: keras.Model, /, *args: object, **kwargs: object) -> Tree:
    if context.has_strategy() and not context.in_cross_replica_context():
        raise RuntimeError(
            f"{errors.CROSS_REPLICA_NEEDED}. model.{name} was called in a replica function, and divides the batch "
            f"among the replicas by itself: call model.{name} outside of strategy.run."
        )
    return _in_scope(method, model, *args, **kwargs)


def _in_scope(method: Original, model: keras.Model, /, *args: object, **kwargs: object) -> Tree:
    strategy = strategy_of(model)
    if strategy is None:
        return method(model, *args, **kwargs)
    fitting = thread_state.entered(keras_strategy=strategy, keras_eagerly=bool(model.run_eagerly))
    try:
        with fitting, strategy.scope() if not context.has_strategy() else contextlib.nullcontext():
            return method(model, *args, **kwargs)
    except StopIteration as error:
        raise ValueError("The data have no batch, from which the model would be built.") from error


def _synced(sync: Original, model: keras.Model, /, *args: object, **kwargs: object) -> Tree:
    """Waits for scheduled steps wherever Keras wants a model's state to be up to date."""
    scheduled.join(strategy_of(model))
    return sync(model, *args, **kwargs)


def _symbolic_build(
    build: Original, model: keras.Model, iterator: EpochIterator | None = None, data_batch: Tree = None
) -> Tree:
    """Builds from one replica's part of a batch."""
    if strategy_of(model) is None:
        return build(model, iterator=iterator, data_batch=data_batch)
    if data_batch is None and iterator is not None:
        data_batch = _next_batch(iterator)
    return build(model, data_batch=_first_parts(data_batch))


def _next_batch(iterator: EpochIterator) -> Tree:
    """Returns the next batch of a loop, the first one again after the last."""

    def first() -> Tree:
        _, _, batches = next(iter(iterator))
        return next(batches)

    try:
        return first()
    except StopIteration:
        iterator._current_iterator = None
        return first()


def _call_model(model: keras.Model, /, *args: Tree, **kwargs: Tree) -> Tree:
    """Call a model, with one replica's part where Keras's loops pass a whole batch to build it."""
    from keras.src.backend import in_stateless_scope
    from keras.src.backend.jax.trainer import JAXTrainer

    if strategy_of(model) is not None and in_stateless_scope():
        args, kwargs = _first_parts((args, kwargs))
    return super(JAXTrainer, model).__call__(*args, **kwargs)


def _first_parts(batch: Tree) -> Tree:
    """Returns the first replica's part of a batch; undistributed values as they are."""
    return nest.map_structure(lambda leaf: leaf.values[0] if isinstance(leaf, DistributedValues) else leaf, batch)


# Steps.


def _called(model: keras.Model, x: Tree, training: bool) -> Tree:
    return model(x, training=training) if model._call_has_training_arg else model(x)


def _rows(x: Tree) -> Tree:
    return next(leaf for leaf in jax.tree.leaves(x) if leaf is not None).shape[0]


def _track(model: keras.Model, loss: Tree, x: Tree) -> None:
    whole = unscale_loss(loss) if loss.ndim == 0 else loss  # one for each row is of `reduction=None`, never scaled
    model._loss_tracker.update_state(whole, sample_weight=_rows(x))


def _train_step(model: keras.Model, data: Tree) -> Tree:
    x, y, sample_weight = unpack(data)
    weights = model.trainable_variables
    if _rows(x) == 0:
        _train_without_rows(model, weights, x)
        return model.get_metrics_result()
    with _calling_none_without_rows(model, x):
        return _train_on_rows(model, weights, x, y, sample_weight)


def _calling_none_without_rows(model: keras.Model, x: Tree) -> contextlib.AbstractContextManager[None]:
    """Returns a context after which a model is as if it had not been called, in a replica without rows.

    It computes with the others there where the batch is padded. If all replicas meet in the model, each one calls it.
    """
    return kept_without_rows([] if synchronizes(model) else model.non_trainable_variables, _rows(x))


def _train_on_rows(
    model: keras.Model, weights: Sequence[keras.Variable], x: Tree, y: Tree, sample_weight: Tree
) -> Tree:
    with GradientTape() as tape:
        y_pred = _called(model, x, training=True)
        loss = model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True)
        _track(model, loss, x)
        if model.optimizer is not None:
            loss = model.optimizer.scale_loss(loss)
    if weights:
        model.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
    else:
        warnings.warn("The model does not have any trainable weights.", stacklevel=2)
    return model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)


def _train_without_rows(model: keras.Model, weights: Sequence[keras.Variable], x: Tree) -> None:
    """Applies the gradient of the regularization alone, on a replica that has no rows of the last batch.

    The model is not called, since a mean over no rows is NaN; unless it has layers in which all replicas meet.
    """
    with GradientTape() as tape:
        losses = [model._aggregate_additional_loss(loss) for loss in model._get_regularization_losses()]
        if synchronizes(model):
            # The others' gradients of what all replicas computed go through here, so it must depend on the outputs.
            outputs = jax.tree.leaves(_called(model, x, training=True))
            losses += [0.0 * jnp.sum(output).astype(jnp.float32) for output in outputs]
        loss = model.optimizer.scale_loss(sum(losses, start=jnp.zeros(())))
    gradients = tape.gradient(loss, weights, unconnected_gradients=UnconnectedGradients.ZERO)
    if weights:
        model.optimizer.apply_gradients(zip(gradients, weights))


def _test_step(model: keras.Model, data: Tree) -> Tree:
    x, y, sample_weight = unpack(data)
    if _rows(x) == 0:
        return model.get_metrics_result()
    with _calling_none_without_rows(model, x):
        y_pred = _called(model, x, training=False)
        loss = model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=False)
        _track(model, loss, x)
        return model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)


def _predict_step(model: keras.Model, data: Tree) -> Tree:
    return _called(model, unpack(data)[0], training=False)


def _step_of(model: keras.Model, name: str, ours: Callable[..., Tree]) -> Callable[[Tree], Tree]:
    """Returns the function of a replica: the model's own step where it has one, in TensorFlow's form, or ours."""
    from keras.src.backend.jax.trainer import JAXTrainer

    if getattr(type(model), name) is getattr(JAXTrainer, name):
        return lambda data: ours(model, data)
    own: Callable[[Tree], Tree] = getattr(model, name)
    if len(inspect.signature(own).parameters) != 1:
        raise TypeError(
            f"{type(model).__name__}.{name} takes the model's state, as Keras has it on JAX. Under a strategy it takes "
            f"the data alone and uses the variables: def {name}(self, data)."
        )
    return own


def _by_super(
    ours: Callable[[keras.Model, Tree], Tree], step: Original, model: keras.Model, /, *args: object, **kwargs: object
) -> Tree:
    """Runs Keras's own step, or ours where a model's own one calls `super()` in TensorFlow's form."""
    if strategy_of(model) is not None and len(args) + len(kwargs) == 1:
        return ours(model, *args, *kwargs.values())
    return step(model, *args, **kwargs)


def _spread(model: keras.Model, data: Tree) -> Tree:
    """Returns a batch that the user passed, distributed over the replicas."""
    if any(isinstance(leaf, DistributedValues) for leaf in nest.leaves(data)):
        return data
    distributed = strategy_of(model).experimental_distribute_dataset([data])
    return next(iter(for_this_process(distributed)))


def _loop(
    model: keras.Model, step: Callable[[Tree], Tree], joined: Callable[[list[Tree]], Tree] | None, states: int
) -> Callable[..., Tree]:
    """Returns the function that Keras calls with a state, which is empty, and an iterator, for one execution.

    `joined` combines the outputs of its steps. Without it, the result is the last one, and the steps are one program.
    """
    run = step
    if not model.run_eagerly:
        run = function.function(step)
        function.calls_of(run).step_hint = None  # Keras has `steps_per_execution` for this

    # Only training may take other elements than those that this process reads: others count each row once.
    by_workers = scheduled.Steps(step, reads_datasets=states == 4)

    @functools.cache
    def program(count: int) -> Tree:
        return function.function(lambda iterator: step(next(iterator)), steps_per_call=count)

    def one_by_one(iterator: Iterator[Tree]) -> Tree:
        outputs = [run(_spread(model, next(iterator)))]
        with contextlib.suppress(StopIteration):
            for _ in range(model.steps_per_execution - 1):
                outputs.append(run(_spread(model, next(iterator))))
        return outputs[-1] if joined is None else joined(outputs)

    def steps(state: object, iterator: Iterator[Tree]) -> tuple[Tree, tuple[None, ...]]:
        if isinstance(iterator, scheduled.Scheduled):
            results = iterator.results(by_workers, model.steps_per_execution)
            return results[-1] if joined is None else joined(results), (None,) * states
        several = joined is None and model.steps_per_execution > 1 and isinstance(iterator, DistributedIterator)
        if model.run_eagerly or not several:
            return one_by_one(iterator), (None,) * states
        try:
            outputs = program(model.steps_per_execution)(iterator)
        except OutOfRangeError as error:
            if not ends_data(error):
                raise
            raise StopIteration from error
        return nest.map_structure(lambda output: output[-1], outputs), (None,) * states

    return steps


def _log_names(logs: dict[str, Tree]) -> set[str]:
    """Returns the names under which Keras shows logs; those of `compile`'s metrics may be in an inner dict."""
    return {name for key, log in logs.items() for name in (_log_names(log) if isinstance(log, dict) else {key})}


def _with_logs(model: keras.Model, name: str, ours: Callable[..., Tree], states: int) -> Callable[..., Tree]:
    strategy = strategy_of(model)

    def logs_of(logs: Tree) -> Tree:
        # The metrics of all replicas together; of what the model computes by itself, the replicas' mean.
        whole = model.get_metrics_result() if isinstance(logs, dict) else {}
        if isinstance(logs, dict) and _log_names(logs) == set(whole):
            return whole

        def together(log: Tree, name: str = "") -> Tree:
            if isinstance(log, dict):
                return {key: together(value, key) for key, value in log.items()}
            return whole[name] if name in whole else nest.map_structure(mean, log)

        return together(logs)

    def mean(log: Tree) -> Tree:
        first = strategy.experimental_local_results(log)[0]
        if not isinstance(log, PerReplica) or not jnp.issubdtype(getattr(first, "dtype", bool), jnp.number):
            return first
        return strategy.extended._reduce(ReduceOp.MEAN, log, None)  # the user did not write it: no warning

    step = _step_of(model, name, ours)
    return _loop(model, lambda data: logs_of(strategy.run(step, args=(data,))), None, states)


def _with_outputs(model: keras.Model) -> Callable[..., Tree]:
    strategy = strategy_of(model)

    step = _step_of(model, "predict_step", _predict_step)

    def gathered(data: Tree) -> Tree:
        return nest.map_structure(gathered_rows, strategy.run(step, args=(data,)))

    def gathered_rows(x: Leaf) -> Leaf:
        form = counted_form(x)
        if form is not None and form.shapes() is None:  # which the program does not know
            return x
        return strategy.gather(x, axis=0)

    def joined(outputs: list[Tree]) -> Tree:
        outputs = nest.map_structure(lambda x: gathered_rows(x) if _is_padded(x) else x, outputs)
        return outputs[0] if len(outputs) == 1 else jax.tree.map(lambda *x: jnp.concatenate(x), *outputs)

    return _loop(model, gathered, joined, 2)


def _is_padded(x: Leaf) -> bool:
    return counted_form(x) is not None or is_differing(x)


def _maker(
    attribute: str, function_of: Callable[[keras.Model], Callable[..., Tree]]
) -> Callable[..., Callable[..., Tree]]:
    """Returns a `make_..._function` that keeps its function for a model of a strategy in this attribute."""

    def make(
        original: Callable[..., Callable[..., Tree]], model: keras.Model, force: bool = False
    ) -> Callable[..., Tree]:
        if strategy_of(model) is None:
            return original(model, force=force)
        if getattr(model, attribute) is None or force:
            setattr(model, attribute, function_of(model))
        made: Callable[..., Tree] = getattr(model, attribute)
        return made

    return make


def _no_state(get: Original, model: keras.Model, *args: bool, **kwargs: bool) -> Tree:
    if strategy_of(model) is None:
        return get(model, *args, **kwargs)
    flags = inspect.signature(get).bind(model, *args, **kwargs).arguments
    return (None,) * sum(flag for name, flag in flags.items() if name not in ("self", "purge_model_variables"))


def _additional_loss(aggregate: Original, model: keras.Model, loss: Tree) -> Tree:
    """Divides the regularization by the number of replicas, so that it counts once."""
    total = aggregate(model, loss)
    return scale_loss(total) if strategy_of(model) is not None else total
