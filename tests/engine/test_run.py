"""`Strategy.run`: what the replicas get, what becomes of what they return, and what is refused."""

from __future__ import annotations

import collections
import functools
import threading
import types
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from strategies import (
    SUM,
    another,
    comes_per_replica,
    compiled,
    counts,
    ctx,
    device_names,
    each,
    eager,
    local_ids,
    mirrored,
    one_device,
    over,
    parts,
    per_replica,
    replica_id,
    several,
    ways,
)

import replicax as rx

Point = collections.namedtuple("Point", "x y")


class Typed(NamedTuple):
    a: object
    b: object


class Box:
    """A class as the library attrs makes them, with a constructor that the program's values alone pass through."""

    __attrs_attrs__ = (types.SimpleNamespace(name="a"), types.SimpleNamespace(name="b"))

    def __init__(self, a, b):
        assert not isinstance(a, str)
        self.a, self.b = a, b


class Failure(Exception):
    __attrs_attrs__ = (types.SimpleNamespace(name="a"),)


# What a replica gets.


@over()
@ways
def test_a_replica_gets_its_component_and_everything_else_as_it_is(make, n, way):
    """Fact 17."""
    strategy = make()
    values = [10.0 * (i + 1) for i in range(n)]
    x, nested, key = (per_replica(strategy, [v + k for v in values]) for k in (0, 1, 2))
    plain = jnp.float32(100.0)

    def replica(x, plain, nest, text, *, key):
        assert text == "text" and nest["b"][0] == 5
        return x + plain, nest["a"][0] * 2, key - 1

    def program(x, nested, key):
        return strategy.run(replica, args=(x, plain, {"a": [nested], "b": (5,)}, "text"), kwargs={"key": key})

    a, b, c = way(program)(x, nested, key)
    assert parts(strategy, a) == [v + 100 for v in values]
    assert parts(strategy, b) == [(v + 1) * 2 for v in values]
    assert parts(strategy, c) == [v + 1 for v in values]


@over(copies=True)
@ways
def test_objects_and_variables_are_passed_unchanged(make, n, way):
    """Fact 17: a distributed variable is passed whole, not as a component."""
    strategy = make()
    thing = object()
    with strategy.scope():
        v = rx.Variable(1.0)
    seen = []

    def replica(got_thing, got_variable):
        seen.append((got_thing is thing, got_variable is v, type(got_variable).__name__))
        return got_variable + 1.0

    result = way(lambda: strategy.run(replica, args=(thing, v)))()
    assert set(seen) == {(True, True, "MirroredVariable")}
    assert parts(strategy, result) == [2.0] * n


@over()
@ways
def test_args_may_be_a_list(make, n, way):
    """Fact 27."""
    strategy = make()
    result = way(lambda x: strategy.run(lambda a, b=0.0: a + b, args=[x], kwargs={"b": jnp.float32(2)}))
    assert parts(strategy, result(per_replica(strategy, [float(i) for i in range(n)]))) == [i + 2.0 for i in range(n)]


@pytest.mark.parametrize("args", [1, "ab", {"a": 1}, np.array([1, 2])], ids=str)
@ways
def test_args_of_another_kind_are_refused(args, way):
    """Fact 27."""
    with pytest.raises(ValueError, match=r"positional args must be a list or tuple, got <class .*write args=\(x,\)"):
        way(lambda: mirrored(2).run(lambda x: x, args=args))()


@over()
@ways
def test_wrong_calls_raise_what_python_raises(make, n, way):
    """Fact 27."""
    strategy = make()
    with pytest.raises(TypeError, match="'int' object is not callable"):
        way(lambda: strategy.run(5))()
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        way(lambda: strategy.run(lambda x: x))()
    with pytest.raises(TypeError, match="takes from 2 to 5 positional arguments but 6 were given"):
        strategy.run(lambda x: x, (1,), {}, None, None)


@over(plain=True)
def test_options_are_accepted(make):
    """Fact 27."""
    options = rx.RunOptions(experimental_enable_dynamic_batch_size=False)
    assert make().run(lambda: 1, options=options) == 1


@over()
@ways
def test_arguments_keep_their_dtype_and_shape(make, n, way):
    strategy = make()
    for dtype in (np.float16, jnp.bfloat16, np.float32, np.int8, np.int32, np.uint8, np.bool_, np.complex64):
        x = per_replica(strategy, [np.zeros((2, 3), dtype)] * n)
        for part in strategy.experimental_local_results(way(lambda x: strategy.run(lambda a: a[:1], args=(x,)))(x)):
            assert part.dtype == dtype and part.shape == (1, 3)


@over()
@ways
def test_run_takes_empty_and_large_structures(make, n, way):
    strategy = make()
    x = per_replica(strategy, [np.zeros((0, 3), np.float32)] * n)
    many = {f"k{i}": per_replica(strategy, [float(i + r) for r in range(n)]) for i in range(50)}
    program = way(lambda x, m: strategy.run(lambda a, b: (a.sum(), {k: v * 2 for k, v in b.items()}, ()), args=(x, m)))
    total, doubled, nothing = program(x, many)
    assert parts(strategy, total) == [0.0] * n and nothing == ()
    assert {k: parts(strategy, v) for k, v in doubled.items()} == {
        f"k{i}": [2.0 * (i + r) for r in range(n)] for i in range(50)
    }


# What becomes of the results.


@over(at_least=2)
@ways
def test_arrays_that_replicas_compute_become_per_replica(make, n, way):
    """Fact 18: also where they are equal."""
    strategy = make()
    result = way(lambda: strategy.run(lambda: jnp.asarray(5) + 0 * ctx().replica_id_in_sync_group))()
    assert comes_per_replica(strategy, result) and parts(strategy, result) == [5] * n


@ways
def test_numpy_numbers_such_as_a_number_of_rows_become_per_replica(way):
    strategy = mirrored(2)
    step = way(lambda: strategy.reduce("SUM", strategy.run(lambda: np.int32(3)), axis=None))
    assert int(step()) == 6


@over(at_least=2)
@ways
def test_the_same_object_on_every_replica_comes_back_bare(make, n, way):
    """Fact 18."""
    strategy, shared = make(), jnp.asarray([5.0])
    array, none, text = way(lambda: strategy.run(lambda: (shared, None, "a")))()
    assert isinstance(array, jax.Array) and array.tolist() == [5.0]
    assert none is None and text == "a"
    number = way(lambda: strategy.run(lambda: 3))()
    assert not isinstance(number, rx.PerReplica) and int(number) == 3


@over(at_least=2)
def test_eager_runs_return_a_shared_object_itself(make, n):
    """Fact 18."""
    shared, marker = jnp.asarray(5), object()
    assert make().run(lambda: shared) is shared
    assert make().run(lambda: [marker])[0] is marker


@over(at_least=2)
@ways
def test_nests_are_walked(make, n, way):
    """Fact 18."""
    strategy = make()

    def replica():
        r = replica_id()
        return {"z": r, "a": [2, (r + 1, None)], "p": Point(r * 2, "x"), "t": Typed(1, r)}, (), [], {}

    result, *empty = way(lambda: strategy.run(replica))()
    ids = [float(i) for i in range(n)]
    assert empty == [(), [], {}]
    assert list(result) == ["z", "a", "p", "t"]  # in the order of the replica function
    assert parts(strategy, result["z"]) == ids and parts(strategy, result["a"][1][0]) == [i + 1 for i in ids]
    assert int(result["a"][0]) == 2 and result["a"][1][1] is None
    assert isinstance(result["p"], Point) and parts(strategy, result["p"].x) == [i * 2 for i in ids]
    assert result["p"].y == "x" and isinstance(result["t"], Typed) and parts(strategy, result["t"].b) == ids


@over()
@ways
def test_objects_of_attrs_classes_are_structures(make, n, way):
    strategy = make()
    x = per_replica(strategy, [float(i) for i in range(n)])
    failure = Failure("as it is")

    def replica(box, error):
        assert error is failure
        return Box(box.a + box.b[0], {"twice": box.a * 2, "text": "as it is"})

    result = way(lambda box: strategy.run(replica, args=(box, failure)))(Box(x, [x, None]))
    assert type(result) is Box and result.b["text"] == "as it is"
    assert parts(strategy, result.a) == parts(strategy, result.b["twice"]) == [i * 2 for i in range(n)]
    total = strategy.reduce("SUM", Box(result.a, None), axis=None)
    assert type(total) is Box and float(total.a) == n * (n - 1) and total.b is None


@over(at_least=2, logical=False)
def test_eager_replicas_may_return_anything(make, n):
    """Fact 18."""
    strategy = make()

    def rid():
        return int(ctx().replica_id_in_sync_group)

    def returned(make):
        return each(strategy, strategy.run(make), lambda part: part)

    ids = range(n)
    assert returned(rid) == list(ids)
    assert returned(lambda: f"r{rid()}") == [f"r{i}" for i in ids]
    assert returned(lambda: {rid()}) == [{i} for i in ids]
    assert returned(lambda: None if rid() % 2 else 1) == [1, None] * (n // 2)
    assert returned(lambda: "a" if rid() % 2 else 1) == [1, "a"] * (n // 2)
    assert returned(lambda: float(rid() * 0 + 1.5)) == [1.5] * n
    assert each(strategy, strategy.run(lambda: np.array([rid()])), type) == [np.ndarray] * n
    assert parts(strategy, strategy.run(lambda: np.array([rid()]))) == [[i] for i in ids]
    assert each(strategy, strategy.run(lambda: jnp.zeros(rid() + 1)), np.shape) == [(i + 1,) for i in ids]


@several
@pytest.mark.parametrize(
    "make",
    [
        lambda r: [0] * (1 + r),
        lambda r: {f"a{r}": 1},
        lambda r: [1] if r else (1,),
        lambda r: {"a": [1]} if r else {"a": (1,)},
        lambda r: Point(1, 2) if r else (1, 2),
        lambda r: 1 if r else [1],
    ],
    ids=["lengths", "keys", "list or tuple", "deep", "namedtuple or tuple", "leaf or list"],
)
def test_different_structures_are_refused(n, make):
    """Fact 18."""
    with pytest.raises(AssertionError):
        mirrored(n).run(lambda: make(int(ctx().replica_id_in_sync_group)))
    assert not rx.has_strategy()


@over()
@ways
def test_a_returned_variable_is_the_variable(make, n, way):
    """Fact 19."""
    strategy = make()
    with strategy.scope():
        v = rx.Variable(1.0)
        w = rx.Variable(1.0, synchronization=rx.VariableSynchronization.ON_READ, aggregation=rx.VariableAggregation.SUM)
    plain = rx.Variable(1.0)
    for variable in (v, w, plain):
        assert way(lambda variable=variable: strategy.run(lambda: variable))() is variable
        assert way(lambda variable=variable: strategy.run(lambda: [variable, replica_id()]))()[0] is variable


@over(at_least=2)
@ways
def test_a_read_variable_is_per_replica(make, n, way):
    """Fact 19."""
    strategy = make()
    with strategy.scope():
        v = rx.Variable(1.0)
    for read in (lambda: v.read_value(), lambda: v + 0, lambda: v.value()):
        result = way(lambda read=read: strategy.run(read))()
        assert comes_per_replica(strategy, result) and parts(strategy, result) == [1.0] * n


@pytest.mark.parametrize("make", [one_device, functools.partial(mirrored, 1)], ids=["one_device", "mirrored"])
@ways
def test_one_replica_returns_plain_values(make, way):
    """Facts 10, 20, 115."""
    strategy = make()
    array, text, none, one = way(lambda: strategy.run(lambda: (jnp.ones(2) * 3, "a", None, [replica_id()])))()
    assert isinstance(array, jax.Array) and array.tolist() == [3.0, 3.0]
    assert text == "a" and none is None and one[0].tolist() == 0.0


def test_one_mirrored_replica_still_has_per_replica_values_and_mirrored_variables():
    """Fact 20."""
    strategy = mirrored(1)
    with strategy.scope():
        v = rx.Variable(2.0)
    assert type(v).__name__ == "MirroredVariable" and len(v.values) == 1
    x = strategy.experimental_distribute_values_from_function(lambda c: jnp.asarray(4))
    assert isinstance(x, rx.PerReplica) and parts(strategy, x) == [4]
    (part,) = strategy.experimental_local_results(strategy.run(lambda: jnp.asarray(1)))
    assert int(part) == 1


# Who the replica is.


@over()
@ways
def test_the_replica_context_tells_who_the_replica_is(make, n, way):
    """Facts 4, 11."""
    strategy, seen = make(), []

    def replica():
        c = ctx()
        seen.append(
            (
                c.strategy is strategy,
                rx.get_strategy() is strategy,
                c.num_replicas_in_sync,
                type(c.num_replicas_in_sync),
            )
        )
        assert c is ctx() and not rx.in_cross_replica_context() and rx.has_strategy()
        assert c.replica_id_in_sync_group.shape == () and c.replica_id_in_sync_group.dtype == np.int32
        return c.replica_id_in_sync_group

    assert parts(strategy, way(lambda: strategy.run(replica))()) == list(range(n))
    assert set(seen) == {(True, True, n, int)} and strategy.num_replicas_in_sync == n


@over(copies=True, processes=1, logical=False)
def test_eager_replicas_know_their_number_and_compute_on_their_device(make, n):
    """Facts 4, 28."""
    strategy = make()
    ids = strategy.run(lambda: ctx().replica_id_in_sync_group)
    assert parts(strategy, ids) == list(range(n))
    assert [int(i) for i in strategy.experimental_local_results(ids)] == local_ids(strategy)
    names = strategy.run(lambda: ctx().devices[0][0])
    assert list(strategy.experimental_local_results(names)) == device_names(strategy)
    table = dict(zip(rx.config.list_devices(), jax.local_devices()))
    for i, part in enumerate(strategy.experimental_local_results(strategy.run(lambda: jnp.ones(2) + 1))):
        assert part.devices() == {table[f"GPU:{i}"]}


@over(at_least=2)
@ways
def test_results_lie_on_their_replicas_devices(make, n, way):
    """Fact 28."""
    strategy = make()
    result = way(lambda: strategy.run(lambda: ctx().all_reduce(SUM, replica_id())))()
    assert len(set(each(strategy, result, lambda part: next(iter(part.devices())).id))) == n
    assert parts(strategy, result) == [n * (n - 1) / 2] * n


@over(here=2)
def test_components_of_different_devices_combine_outside(make, n):
    """The user may compute with two components, although they lie on two devices."""
    strategy = make()
    a, b, *_ = strategy.run(lambda: replica_id() + 1).values
    assert float(a + b) == 2 * local_ids(strategy)[0] + 3.0


# Order, and errors.


@over(at_least=2)
def test_eager_replicas_run_in_order_up_to_each_meeting_point(make, n):
    """Fact 15."""
    log = []

    def replica():
        r = int(ctx().replica_id_in_sync_group)
        log.append(("a", r))
        ctx().merge_call(lambda strategy: log.append("merge"))
        log.append(("b", r))
        ctx().all_reduce(SUM, jnp.float32(1) * r)
        log.append(("c", r))

    strategy = make()
    strategy.run(replica)
    ids = local_ids(strategy)
    assert log == [*(("a", i) for i in ids), "merge", *(("b", i) for i in ids), *(("c", i) for i in ids)]


class Mine(Exception):
    pass


@over()
@ways
def test_an_exception_comes_out_as_it_is_and_leaves_the_strategy_usable(make, n, way):
    """Fact 13."""
    strategy, error = make(), Mine("mine")

    def replica():
        raise error

    with pytest.raises(Mine) as caught:
        way(lambda: strategy.run(replica))()
    assert caught.value is error
    assert not rx.has_strategy() and not rx.in_cross_replica_context()
    assert parts(strategy, way(lambda: strategy.run(replica_id))()) == [float(i) for i in range(n)]


@over(at_least=2, processes=1)
@pytest.mark.parametrize("where", ["before", "after"])
def test_one_eager_replica_that_raises_ends_all(make, n, where):
    """Facts 13, 21."""
    strategy = make()
    for culprit in range(n):

        def replica(culprit=culprit):
            if where == "before" and int(ctx().replica_id_in_sync_group) == culprit:
                raise Mine(culprit)
            total = ctx().all_reduce(SUM, replica_id())
            if int(ctx().replica_id_in_sync_group) == culprit:
                raise Mine(culprit)
            return ctx().all_reduce(SUM, total)

        with pytest.raises(Mine, match=str(culprit)):
            strategy.run(replica)
        assert not rx.has_strategy()


@over(at_least=2)
def test_a_nested_run_is_refused(make, n):
    """Fact 8."""
    strategy, other = make(), another()
    for way in (eager, compiled):
        with pytest.raises(RuntimeError, match="Method requires being in cross-replica context"):
            way(lambda: strategy.run(lambda: strategy.run(lambda: 1)))()
        with pytest.raises(RuntimeError, match="Mixing different tf.distribute.Strategy objects"):
            way(lambda: strategy.run(lambda: other.run(lambda: 1)))()
        with other.scope(), pytest.raises(RuntimeError, match="Mixing different tf.distribute.Strategy objects"):
            way(lambda: strategy.run(lambda: 1))()


@over(at_least=2, processes=1)
def test_different_numbers_of_merge_calls_are_refused(make, n):
    """Fact 21."""
    strategy = make()

    def replica():
        if int(ctx().replica_id_in_sync_group) == 0:
            ctx().merge_call(lambda strategy: None)

    with pytest.raises(RuntimeError, match=r"Some replicas made a different number of replica_context\(\).merge_call"):
        strategy.run(replica)


@over(at_least=2, processes=1)
def test_the_first_replicas_merge_function_runs(make, n):
    """Fact 21."""
    strategy = make()

    def replica():
        first = int(ctx().replica_id_in_sync_group) == 0
        return ctx().merge_call((lambda strategy: "first") if first else (lambda strategy: "other"))

    assert strategy.run(replica) == "first"


# Per-replica values are no tensors.


@over(at_least=2)
def test_per_replica_values_are_no_arrays(make, n):
    """Fact 22."""
    x = per_replica(make(), [1.0] * n)
    for wrong in (lambda: x + 1, lambda: float(x), lambda: list(x), lambda: len(x)):
        with pytest.raises(TypeError):
            wrong()
    for name in ("shape", "dtype", "numpy"):
        with pytest.raises(AttributeError):
            getattr(x, name)
    with pytest.raises(ValueError, match="It looks like you are using a PerReplica object while not inside a replica"):
        jnp.add(x, 1)
    with pytest.raises(ValueError, match="It looks like you are using a PerReplica object while not inside a replica"):
        jnp.asarray(x)
    assert bool(x) and np.asarray(x).dtype == object


@over(at_least=2)
@ways
def test_a_captured_per_replica_value_is_not_unwrapped(make, n, way):
    """Fact 22."""
    x = per_replica(make(), [1.0] * n)
    with pytest.raises(TypeError):
        way(lambda: make().run(lambda: x + 1))()


@over(at_least=2)
@ways
def test_the_result_of_one_run_is_the_argument_of_the_next(make, n, way):
    strategy = make()

    def program():
        a = strategy.run(lambda: {"x": replica_id(), "y": 3})
        b = strategy.run(lambda d: d["x"] * d["y"], args=(a,))
        return strategy.run(lambda p, q: p + q["x"], args=(b, a))

    assert parts(strategy, way(program)()) == [i * 4.0 for i in range(n)]


@over(at_least=2, logical=False)
def test_shares_of_different_shapes_go_in_and_out_eagerly(make, n):
    strategy = make()
    x = strategy.experimental_distribute_values_from_function(
        lambda c: jnp.arange(c.replica_id_in_sync_group + 1, dtype=jnp.float32)
    )
    result = strategy.run(lambda a: (a * 2, a.sum()), args=(x,))
    assert parts(strategy, result[0]) == [[2.0 * k for k in range(i + 1)] for i in range(n)]
    assert parts(strategy, result[1]) == [i * (i + 1) / 2 for i in range(n)]


@over(at_least=2, processes=1)
def test_a_value_of_a_smaller_strategy_raises_index_error(make, n):
    """Fact 33."""
    small, large = make(), mirrored(n + 1)
    x = per_replica(small, [float(i) for i in range(n)])
    with pytest.raises(IndexError):
        large.run(lambda a: a + 1, args=(x,))
    assert parts(large, x) == [float(i) for i in range(n)]
    assert float(large.reduce(SUM, x, axis=None)) == sum(range(n))
    assert one_device().run(lambda a: a, args=(x,)) is x


# Variables that replicas make.


@several
def test_a_variable_made_in_run_is_one_for_all_replicas(n):
    """Fact 24: with the first replica's initial value."""
    strategy, seen = mirrored(n), []

    def replica():
        v = rx.Variable(float(ctx().replica_id_in_sync_group) + 5)
        seen.append((v, float(v.read_value())))
        return v

    v = strategy.run(replica)
    assert type(v).__name__ == "MirroredVariable" and parts(strategy, v) == [5.0] * n
    assert all(made is v and value == 5.0 for made, value in seen) and len(seen) == n


@over(at_least=2, processes=1)
def test_names_of_a_variable_may_differ_in_a_number(make, n):
    variable = make().run(lambda: rx.Variable(1.0, name=f"layer_1/table_{int(ctx().replica_id_in_sync_group)}"))
    assert variable.name == "layer_1/table_0:0"


@over(at_least=2, processes=1)
def test_variables_of_different_names_are_refused(make, n):
    """Fact 24."""

    def replica():
        return rx.Variable(1.0, name="other" if int(ctx().replica_id_in_sync_group) == n - 1 else "mine")

    with pytest.raises(RuntimeError, match=f"Tried to create variable other with mismatching name on device {n - 1}"):
        make().run(replica)


# Under JAX's own transformations.


@over(at_least=2)
def test_run_works_under_jit_and_grad(make, n):
    strategy = make()
    x = per_replica(strategy, [float(i + 1) for i in range(n)])

    def loss(w, x):
        y = strategy.run(lambda a: (w * a) ** 2, args=(x,))
        return strategy.reduce(SUM, y, axis=None)

    squares = sum((i + 1.0) ** 2 for i in range(n))
    assert float(jax.jit(loss)(jnp.float32(3.0), x)) == 9 * squares
    assert float(jax.jit(jax.grad(loss))(jnp.float32(3.0), x)) == 6 * squares
    assert float(jax.grad(loss)(jnp.float32(3.0), x)) == 6 * squares


@over()
def test_a_function_handed_to_run_is_compiled(make, n):
    """Facts 16, 25: it may contain meeting points and is traced once."""
    strategy, calls = make(), []

    @rx.function
    def replica(x):
        calls.append(1)
        return ctx().all_reduce(SUM, x * 1.0)

    x = per_replica(strategy, [float(i + 1) for i in range(n)])
    for _ in range(3):
        assert parts(strategy, strategy.run(replica, args=(x,))) == [n * (n + 1) / 2] * n
    assert len(calls) == 1


@over(here=2)
@ways
def test_printing_a_per_replica_value(make, n, way):
    """Fact 30."""
    strategy = make()
    value = way(lambda: strategy.run(lambda: replica_id() + 1))()
    lines = [f"  {i}: {float(r + 1)}" for i, r in enumerate(local_ids(strategy))]
    assert str(value) == "PerReplica:{\n" + ",\n".join(lines) + "\n}"
    first = float(local_ids(strategy)[0] + 1)
    assert repr(value).startswith(f"PerReplica:{{\n  0: Array({first:.0f}., dtype=float32),\n  1: ")


# Values made for each replica.


@pytest.mark.across_processes
@over()
def test_values_from_a_function_are_stored_as_they_are(make, n):
    """Facts 34, 35."""
    strategy, seen, same = make(), [], jnp.asarray(1)

    def value(c):
        seen.append((c.replica_id_in_sync_group, c.num_replicas_in_sync))
        return [c.replica_id_in_sync_group, {"a": "text"}, None, same]

    number, nest, none, array = strategy.experimental_distribute_values_from_function(value)
    ids = local_ids(strategy)
    assert seen == [(i, n) for i in ids] and all(type(i) is int for i, _ in seen) and number.values == tuple(ids)
    assert nest["a"].values == ("text",) * len(ids) and none.values == (None,) * len(ids)
    assert all(part is same for part in array.values)


@ways
def test_values_of_another_strategy_are_refused(way):
    """Eager replicas take components by their number, as in TensorFlow; a program needs them on its devices."""
    two, four = mirrored(2), mirrored(4)
    other = rx.MirroredStrategy(["GPU:2", "GPU:3"])
    (batch,) = two.experimental_distribute_dataset([np.arange(4.0)])
    fact = r"A {} value with {} components.* is passed to MirroredStrategy.*, which has {} replicas. Values belong"
    for strategy, value, kind in (
        (four, batch, "PerReplica"),
        (two, per_replica(four, [1, 2, 3, 4]), "PerReplica"),
        (four, two.extended.broadcast_to(jnp.ones(2), rx.PerReplica([jnp.ones(2)] * 2)), "Mirrored"),
    ):
        count, replicas = len(value.values), strategy.num_replicas_in_sync
        with pytest.raises((IndexError, ValueError), match=fact.format(kind, count, replicas)):
            way(lambda value, strategy=strategy: strategy.run(lambda x: x * 2, args=(value,)))(value)
    program = way(lambda value: other.run(lambda x: x * 2, args=(value,)))
    if way is eager:
        assert parts(other, program(batch)) == [[0.0, 2.0], [4.0, 6.0]]
    else:
        with pytest.raises(ValueError, match="with 2 components, on the devices GPU:0, GPU:1, is passed to"):
            program(batch)
    same = rx.MirroredStrategy(["GPU:0", "GPU:1"])
    assert parts(same, way(lambda value: same.run(lambda x: x * 2, args=(value,)))(batch)) == [[0.0, 2.0], [4.0, 6.0]]


@over()
def test_an_exception_of_the_value_function_comes_out(make, n):
    """Fact 34."""

    def value(c):
        raise Mine

    with pytest.raises(Mine):
        make().experimental_distribute_values_from_function(value)


def test_local_results():
    """Fact 32."""
    strategy = mirrored(2)
    x = per_replica(strategy, [1, 2])
    local = strategy.experimental_local_results
    assert [int(i) for i in local(x)] == [1, 2] and local(3) == (3,) and local("a") == ("a",) and local(None) == (None,)
    assert [[int(i) for i in p] for p in local([x, jnp.asarray(3)])] == [[1, 3], [2, 3]]
    assert [{k: int(v) for k, v in p.items()} for p in local({"a": x, "b": 7})] == [{"a": 1, "b": 7}, {"a": 2, "b": 7}]
    assert [[int(i) for i in p] for p in local((x,))] == [[1], [2]] and type(local((x,))[0]) is tuple
    assert local([1, 2]) == ([1, 2], [1, 2]) and local([]) == ([], []) and local(()) == ((), ())
    assert one_device().experimental_local_results([1, 2]) == ([1, 2],)
    assert rx.get_strategy().experimental_local_results(x) == (x,)
    with strategy.scope():
        v = rx.Variable(1.0)
    assert local(v) == v.values


@counts
def test_eagerly_the_function_runs_once_for_each_replica_and_compiled_once_at_all(n):
    """Facts 15, 16: in compiled code the function is traced once whatever the number of replicas."""
    strategy, calls = mirrored(n), []

    def replica():
        calls.append(threading.current_thread())
        return replica_id() + 1

    for way, expected in ((eager, n), (compiled, 1)):
        calls.clear()
        run = way(lambda: strategy.run(replica))
        assert parts(strategy, run()) == [i + 1.0 for i in range(n)]
        assert len(calls) == expected
        assert parts(strategy, run()) == [i + 1.0 for i in range(n)]
        assert len(calls) == (2 * n if way is eager else 1)


def test_eager_replicas_have_a_thread_each():
    """Fact 12."""
    seen = []
    mirrored(2).run(lambda: seen.append(threading.current_thread()))
    assert len(set(seen)) == 2 and threading.main_thread() not in seen
