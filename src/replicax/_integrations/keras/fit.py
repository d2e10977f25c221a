"""`compile`, `fit`, `evaluate` and `predict` of Keras models that were made under a strategy.

Keras's own loops on the JAX backend stay: epochs, callbacks, the progress bar. They pass a model's whole state through
a step function; for a model of a strategy that state is empty, and the step is a `function` around `strategy.run` that
touches the variables itself, written as on Keras's TensorFlow backend.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax._base import nest
from replicax._base.errors import OutOfRangeError
from replicax._base.foreign_state import around
from replicax._data import Dataset
from replicax._data.calls import ends_data
from replicax._engine import function
from replicax._input.distributed_dataset import DistributedDataset
from replicax._input.iterator import DistributedIterator
from replicax._integrations.keras.losses import scale_loss, unscale_loss
from replicax._tracing import context
from replicax._tracing.tape import GradientTape, UnconnectedGradients
from replicax._values import DistributedValues, PerReplica


class _Fitting(threading.local):
    def __init__(self) -> None:
        self.strategy: Any = None  # of the model whose loop runs


_fitting = _Fitting()


def join() -> None:
    """Changes Keras's trainer for models of a strategy; others keep theirs."""
    import keras
    from keras.src.backend.jax.trainer import JAXEpochIterator, JAXTrainer
    from keras.src.trainers import data_adapters

    around(JAXTrainer, "__init__", _init)
    JAXTrainer.distribute_strategy = property(lambda model: strategy_of(model) or context.get_strategy())
    for name in ("compile", "fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch"):
        around(JAXTrainer, name, _in_scope)
    around(data_adapters, "get_data_adapter", _adapted)
    for layer in (keras.layers.Normalization, keras.layers.Discretization):
        around(layer, "adapt", _adapt)
    made: dict[str, Callable[[Any], Callable[..., Any]]] = {
        "train_function": lambda model: _with_logs(model, "train_step", _train_step, 4),
        "test_function": lambda model: _with_logs(model, "test_step", _test_step, 3),
        "predict_function": _with_outputs,
    }
    for attribute, function_of in made.items():
        around(JAXTrainer, f"make_{attribute}", _maker(attribute, function_of))
    for name, ours in (("train_step", _train_step), ("test_step", _test_step), ("predict_step", _predict_step)):
        around(JAXTrainer, name, functools.partial(_by_super, ours))
    around(JAXTrainer, "_get_jax_state", _no_state)
    around(JAXTrainer, "_symbolic_build", _symbolic_build)
    around(JAXTrainer, "_aggregate_additional_loss", _additional_loss)
    JAXTrainer.__call__ = lambda model, *args, **kwargs: _call(super(JAXTrainer, model).__call__, model, args, kwargs)
    around(JAXEpochIterator, "_get_iterator", _distributed)


def strategy_of(model: Any) -> Any:
    """The strategy that a model was made under; None for none."""
    return model.__dict__.get("_replicax_strategy")


def _init(init: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> None:
    model.__dict__["_replicax_strategy"] = context.get_strategy() if context.has_strategy() else None
    init(model, *args, **kwargs)


def _in_scope(method: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    strategy = strategy_of(model)
    if strategy is None:
        return method(model, *args, **kwargs)
    before, _fitting.strategy = _fitting.strategy, strategy
    try:
        with strategy.scope() if not context.has_strategy() else contextlib.nullcontext():
            return method(model, *args, **kwargs)
    except StopIteration as error:
        raise ValueError("The data have no batch, from which the model would be built.") from error
    finally:
        _fitting.strategy = before


# Input.


def _adapted(adapter_of: Callable[..., Any], x: Any, *args: Any, **kwargs: Any) -> Any:
    """A dataset as something that Keras's loops take; all else as Keras has it."""
    if not isinstance(x, (Dataset, DistributedDataset)):
        return adapter_of(x, *args, **kwargs)
    given = inspect.signature(adapter_of).bind(x, *args, **kwargs).arguments
    for name in ("y", "sample_weight"):
        if given.get(name) is not None:
            raise ValueError(f"`{name}` is part of a dataset's elements, and is not given beside the dataset.")
    if given.get("class_weight") is None:
        return _adapter(x)
    if not isinstance(x, Dataset):
        raise ValueError("`class_weight` needs the rx.data.Dataset itself, and this one is distributed already.")
    return _adapter(x.map(lambda *data: _weighted(data, given["class_weight"])))


def _weighted(data: Any, class_weight: Any) -> Any:
    from keras.src.trainers.data_adapters.data_adapter_utils import class_weight_to_sample_weights

    x, y, sample_weight = _unpack(data)
    if y is None or sample_weight is not None:
        raise ValueError(
            "`class_weight` is for datasets of pairs: of inputs and classes, without weights of their own."
        )
    return x, y, class_weight_to_sample_weights(y, class_weight)


def _adapt(adapt: Callable[..., Any], layer: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
    """Keras knows arrays, and TensorFlow's datasets."""
    if isinstance(data, Dataset):
        data = np.concatenate(list(data.as_numpy_iterator()))
    return adapt(layer, data, *args, **kwargs)


def _adapter(value: Any) -> Any:
    from keras.src.trainers.data_adapters.data_adapter import DataAdapter

    class Adapter(DataAdapter):
        """A dataset, for Keras's loops."""

        def get_jax_iterator(self) -> Any:
            return value if _fitting.strategy is not None else (nest.map_structure(jnp.asarray, x) for x in value)

        get_numpy_iterator = get_jax_iterator

        @property
        def num_batches(self) -> int | None:
            count = int(value.cardinality() if isinstance(value, Dataset) else value.cardinality)
            return count if count >= 0 else None

        @property
        def batch_size(self) -> None:
            return None

        has_partial_batch = partial_batch_size = None

        def on_epoch_begin(self) -> None:
            pass

        on_epoch_end = on_epoch_begin

    return Adapter()


class _Batches:
    """What an adapter gives, as something that can be gone through again."""

    def __init__(self, adapter: Any):
        self._adapter = adapter

    def __iter__(self) -> Iterator[Any]:
        return iter(self._adapter.get_jax_iterator())


def _distributed(get: Callable[..., Any], epoch_iterator: Any) -> Any:
    strategy = _fitting.strategy
    if strategy is None:
        return get(epoch_iterator)
    source = epoch_iterator.data_adapter.get_jax_iterator()
    if isinstance(source, DistributedDataset):
        return source
    if not isinstance(source, Dataset):
        source = _Batches(epoch_iterator.data_adapter)
    return strategy.experimental_distribute_dataset(source)


def _symbolic_build(build: Callable[..., Any], model: Any, iterator: Any = None, data_batch: Any = None) -> Any:
    """Builds from one replica's part of a batch."""
    if strategy_of(model) is None:
        return build(model, iterator=iterator, data_batch=data_batch)
    if data_batch is None and iterator is not None:
        data_batch = _next_batch(iterator)
    return build(model, data_batch=_first_parts(data_batch))


def _next_batch(iterator: Any) -> Any:
    """The next batch of a loop; where the loop before took the last one, the first."""
    for attempt in range(2):
        for _, _, batches in iterator:
            with contextlib.suppress(*[StopIteration] * (attempt == 0)):
                return next(batches)
            break
        iterator._current_iterator = None
    return None


def _call(call: Callable[..., Any], model: Any, args: Any, kwargs: Any) -> Any:
    """Keras's loops call a model with a whole batch to build it."""
    from keras.src.backend import in_stateless_scope

    if strategy_of(model) is not None and in_stateless_scope():
        args, kwargs = _first_parts((args, kwargs))
    return call(*args, **kwargs)


def _first_parts(batch: Any) -> Any:
    """One replica's part of a batch; what is not divided as it is."""
    return nest.map_structure(lambda leaf: leaf.values[0] if isinstance(leaf, DistributedValues) else leaf, batch)


# Steps.


def _unpack(data: Any) -> tuple[Any, Any, Any]:
    from keras.utils import unpack_x_y_sample_weight

    return unpack_x_y_sample_weight(data)


def _called(model: Any, x: Any, training: bool) -> Any:
    return model(x, training=training) if model._call_has_training_arg else model(x)


def _rows(x: Any) -> Any:
    return next(leaf for leaf in jax.tree.leaves(x) if leaf is not None).shape[0]


def _track(model: Any, loss: Any, x: Any) -> None:
    whole = unscale_loss(loss) if loss.ndim == 0 else loss  # one for each row is of `reduction=None`, never scaled
    model._loss_tracker.update_state(whole, sample_weight=_rows(x))


def _train_step(model: Any, data: Any) -> Any:
    x, y, sample_weight = _unpack(data)
    weights = model.trainable_variables
    if _rows(x) == 0:
        _train_without_rows(model, weights)
        return model.get_metrics_result()
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


def _train_without_rows(model: Any, weights: Any) -> None:
    """The last batch has fewer rows than there are replicas: this one has its part in the regularization alone.

    A mean over no rows is no number, so that the model is not called.
    """
    with GradientTape() as tape:
        losses = [model._aggregate_additional_loss(loss) for loss in model._get_regularization_losses()]
        loss = model.optimizer.scale_loss(sum(losses, start=jnp.zeros(())))
    gradients = tape.gradient(loss, weights, unconnected_gradients=UnconnectedGradients.ZERO)
    if weights:
        model.optimizer.apply_gradients(zip(gradients, weights))


def _test_step(model: Any, data: Any) -> Any:
    x, y, sample_weight = _unpack(data)
    if _rows(x) == 0:
        return model.get_metrics_result()
    y_pred = _called(model, x, training=False)
    loss = model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=False)
    _track(model, loss, x)
    return model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)


def _predict_step(model: Any, data: Any) -> Any:
    return _called(model, _unpack(data)[0], training=False)


def _step_of(model: Any, name: str, ours: Callable[..., Any]) -> Callable[[Any], Any]:
    """What a replica does with its part of a batch: the model's own step where it has one, in TensorFlow's form."""
    from keras.src.backend.jax.trainer import JAXTrainer

    if getattr(type(model), name) is getattr(JAXTrainer, name):
        return lambda data: ours(model, data)
    own = getattr(model, name)
    if len(inspect.signature(own).parameters) != 1:
        raise TypeError(
            f"{type(model).__name__}.{name} takes the model's state, as Keras has it on JAX. Under a strategy it takes "
            f"the data alone and uses the variables: def {name}(self, data)."
        )
    return own


def _by_super(ours: Callable[[Any, Any], Any], step: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Keras's own step, or ours where a model's own one calls `super()` in TensorFlow's form."""
    if strategy_of(model) is not None and len(args) + len(kwargs) == 1:
        return ours(model, *args, *kwargs.values())
    return step(model, *args, **kwargs)


def _run_on_replicas(model: Any, step: Callable[[Any], Any], combine: Callable[[Any], Any]) -> Callable[[Any], Any]:
    strategy = strategy_of(model)

    return lambda data: combine(strategy.run(step, args=(data,)))


def _spread(model: Any, data: Any) -> Any:
    """A batch from the user's own hands, divided over the replicas."""
    if any(isinstance(leaf, DistributedValues) for leaf in nest.leaves(data)):
        return data
    return next(iter(strategy_of(model).experimental_distribute_dataset([data])))


def _loop(
    model: Any, step: Callable[[Any], Any], joined: Callable[[list[Any]], Any] | None, states: int
) -> Callable[..., Any]:
    """What Keras calls with a state, which is empty, and an iterator: as many steps as are one execution.

    `joined` makes one output of those of the steps. Without it the last one counts, and the steps are one program.
    """
    run: Any = step if model.run_eagerly else function.function(step)
    if not model.run_eagerly:
        run.step_hint = None  # Keras has `steps_per_execution` for this

    @functools.cache
    def program(count: int) -> Any:
        return function.function(lambda iterator: step(next(iterator)), steps_per_call=count)

    def one_by_one(iterator: Any) -> Any:
        outputs = [run(_spread(model, next(iterator)))]
        with contextlib.suppress(StopIteration):
            for _ in range(model.steps_per_execution - 1):
                outputs.append(run(_spread(model, next(iterator))))
        return outputs[-1] if joined is None else joined(outputs)

    def steps(state: Any, iterator: Any) -> Any:
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


def _log_names(logs: dict[str, Any]) -> set[str]:
    """The names under which Keras shows logs; those of `compile`'s metrics may come in a dict of their own."""
    return {name for key, log in logs.items() for name in (_log_names(log) if isinstance(log, dict) else {key})}


def _with_logs(model: Any, name: str, ours: Callable[..., Any], states: int) -> Callable[..., Any]:
    strategy = strategy_of(model)

    def logs_of(logs: Any) -> Any:
        # The metrics of all replicas together; of what the model computes by itself, the replicas' mean.
        whole = model.get_metrics_result() if isinstance(logs, dict) else {}
        if isinstance(logs, dict) and _log_names(logs) == set(whole):
            return whole

        def together(log: Any, name: str = "") -> Any:
            if isinstance(log, dict):
                return {key: together(value, key) for key, value in log.items()}
            return whole[name] if name in whole else nest.map_structure(mean, log)

        return together(logs)

    def mean(log: Any) -> Any:
        first = strategy.experimental_local_results(log)[0]
        if not isinstance(log, PerReplica) or not jnp.issubdtype(getattr(first, "dtype", bool), jnp.number):
            return first
        return strategy.reduce("MEAN", log, axis=None)

    step = _run_on_replicas(model, _step_of(model, name, ours), logs_of)
    return _loop(model, step, None, states)


def _with_outputs(model: Any) -> Callable[..., Any]:
    strategy = strategy_of(model)

    def gathered(outputs: Any) -> Any:
        return nest.map_structure(lambda x: strategy.gather(x, axis=0), outputs)

    def joined(outputs: list[Any]) -> Any:
        return outputs[0] if len(outputs) == 1 else jax.tree.map(lambda *x: jnp.concatenate(x), *outputs)

    step = _run_on_replicas(model, _step_of(model, "predict_step", _predict_step), gathered)
    return _loop(model, step, joined, 2)


def _maker(attribute: str, function_of: Callable[[Any], Callable[..., Any]]) -> Callable[..., Any]:
    """A `make_..._function` that keeps, in this attribute, what it made for a model of a strategy."""

    def make(original: Callable[..., Any], model: Any, force: bool = False) -> Any:
        if strategy_of(model) is None:
            return original(model, force=force)
        if getattr(model, attribute) is None or force:
            setattr(model, attribute, function_of(model))
        return getattr(model, attribute)

    return make


def _no_state(get: Callable[..., Any], model: Any, purge_model_variables: bool = False, **wanted: bool) -> Any:
    if strategy_of(model) is None:
        return get(model, purge_model_variables=purge_model_variables, **wanted)
    return (None,) * sum(wanted.values())


def _additional_loss(aggregate: Callable[..., Any], model: Any, loss: Any) -> Any:
    """Regularization counts once for all replicas together."""
    total = aggregate(model, loss)
    return scale_loss(total) if strategy_of(model) is not None else total
