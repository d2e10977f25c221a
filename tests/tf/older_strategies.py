"""The older spellings: each does what the name of now does, and warns once, naming it.

`test_older_strategies.py` runs these tests in a process that imports `replicax.tf`.
"""

from __future__ import annotations

import importlib
import warnings

import jax.numpy as jnp
import numpy as np
import pytest
from strategies import SUM, compiled, eager, mirrored, over, parts, per_replica, ways

import replicax as rx


@pytest.fixture(autouse=True)
def as_in_a_new_process(monkeypatch):
    """`replicax.tf` is imported, which adds the methods, and nothing has been warned of yet."""
    importlib.import_module("replicax.tf")
    monkeypatch.setattr(importlib.import_module("replicax.tf._older_strategies"), "_warned", set())


@pytest.fixture
def v1():
    return importlib.import_module("replicax.tf").compat.v1.distribute.MirroredStrategy(["GPU:0", "GPU:1"])


def one_warning(call, name, now):
    """What a call returns, which warns once of `name`, and not when it is made again."""
    with pytest.warns(DeprecationWarning, match=f"^`{name}` is an older spelling: .*{now}") as caught:
        result = call()
    assert len(caught) == 1 and caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call()
    return result


@over(plain=True)
def test_deprecated_methods_name_their_replacements(make):
    """Fact 90."""
    strategy = make()
    assert one_warning(lambda: strategy.experimental_run(lambda: 1), "experimental_run", "run") == 1
    x = strategy.run(lambda: jnp.ones(1) + 1)
    unwrapped = one_warning(lambda: strategy.unwrap(x), "unwrap", "experimental_local_results")
    assert [part.tolist() for part in unwrapped] == [[2.0]] * len(strategy.experimental_local_results(x))
    with strategy.scope():
        v = rx.Variable(1.0)
        beside = one_warning(
            lambda: strategy.colocate_vars_with(v), "colocate_vars_with", "strategy.extended.colocate_vars_with"
        )
        with beside:
            assert rx.Variable(2.0).device == v.device


@over(plain=True)
def test_deprecated_methods_without_effect_say_to_leave_them_out(make):
    """Fact 90: `group` of one tensor is that tensor."""
    strategy, x = make(), jnp.asarray(1)
    assert one_warning(strategy.configure, "configure", "leave it out") is None
    config = object()
    assert one_warning(lambda: strategy.update_config_proto(config), "update_config_proto", "leave it out") is config
    assert one_warning(lambda: strategy.group(x), "group", "leave it out") is x
    assert strategy.group(x, name="step") is None


def test_group_of_several_components_returns_none():
    assert one_warning(lambda: mirrored(2).group(per_replica(mirrored(2), [1, 2])), "group", "leave it out") is None


@over(plain=True)
@ways
def test_make_dataset_iterator(make, way):
    """The element goes to `fn`; at the end there is OutOfRangeError; `initialize` starts anew."""
    strategy = make()
    dataset = rx.data.Dataset.range(8).batch(4)
    iterator = one_warning(
        lambda: strategy.make_dataset_iterator(dataset), "make_dataset_iterator", "experimental_distribute_dataset"
    )
    one_warning(lambda: strategy.experimental_run(lambda x: x, iterator), "experimental_run", "run")
    with pytest.raises(rx.OutOfRangeError):
        iterator.get_next()
    iterator.initialize()
    step = way(lambda: strategy.reduce(SUM, strategy.experimental_run(lambda x: jnp.sum(x) + 0, iterator), axis=None))
    assert [int(step()), int(step())] == [6, 22]
    with pytest.raises(rx.OutOfRangeError):
        step()
    iterator.initialize()
    assert int(step()) == 6
    iterator.close()


@pytest.mark.parametrize("way", [eager, compiled], ids=["eager", "compiled"])
def test_make_input_fn_iterator(way):
    """From a dataset, whose batches are the replicas' parts, or from a function, called for each part."""
    strategy, calls = mirrored(2), iter(range(100))
    iterator = one_warning(
        lambda: strategy.make_input_fn_iterator(lambda context: rx.data.Dataset.range(8).batch(2)),
        "make_input_fn_iterator",
        "distribute_datasets_from_function",
    )
    assert parts(strategy, way(lambda: strategy.run(lambda x: x + 0, (next(iterator),)))()) == [[0, 1], [2, 3]]
    iterator.close()
    endless = strategy.make_input_fn_iterator(lambda context: lambda: np.float32([next(calls)]))
    assert parts(strategy, endless.get_next()) == [[0.0], [1.0]] and parts(strategy, next(endless)) == [[2.0], [3.0]]
    endless.close()
    mode = rx.InputReplicationMode.PER_REPLICA
    each = strategy.make_input_fn_iterator(
        lambda context: rx.data.Dataset.from_tensors(np.int32(context.input_pipeline_id)), mode
    )
    assert parts(strategy, next(each)) == [0, 1]
    each.close()


def test_the_older_name_of_distribute_datasets_from_function():
    strategy = mirrored(2)
    dataset = one_warning(
        lambda: strategy.experimental_distribute_datasets_from_function(lambda c: rx.data.Dataset.range(4).batch(2)),
        "experimental_distribute_datasets_from_function",
        "distribute_datasets_from_function",
    )
    assert [parts(strategy, x) for x in dataset] == [[[0, 1], [2, 3]]]


def test_compat_v1_strategies_have_extra_methods(v1):
    """`reduce` without an axis, and two names that other strategies have lost."""
    x = per_replica(v1, [1.0, 2.0])
    assert one_warning(lambda: float(v1.reduce(SUM, x)), "reduce without an axis", "axis=None") == 3.0
    assert float(v1.reduce(SUM, x, axis=None)) == float(v1.reduce("sum", x, None)) == 3.0
    y = per_replica(v1, [[1.0, 2.0], [3.0, 4.0]])
    assert float(v1.reduce(SUM, y, axis=0)) == 10.0
    assert one_warning(lambda: v1.experimental_run_v2(lambda a, b: a + b, (1,), {"b": 2}), "experimental_run_v2", "run")
    assert v1.experimental_run_v2(lambda a: a, args=(1,)) == 1
    arrays = {"x": np.arange(4.0), "y": np.arange(4)}
    dataset = one_warning(
        lambda: v1.experimental_make_numpy_dataset(arrays), "experimental_make_numpy_dataset", "from_tensor_slices"
    )
    assert [(float(e["x"]), int(e["y"])) for e in dataset] == [(i, i) for i in range(4)]


def test_a_warning_may_be_made_an_error():
    """The name works all the same afterwards."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(DeprecationWarning):
            mirrored(2).unwrap(1)
        assert mirrored(2).unwrap(1) == (1,)
