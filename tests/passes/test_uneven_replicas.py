"""Batches whose parts differ in shape, compiled: the same results as eagerly, one trace a shape, one program."""

from __future__ import annotations

import functools
import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from strategies import MEAN, SUM, central, ctx, mirrored, over, parts, per_replica

import replicax as rx
from replicax._base.errors import InvalidArgumentError
from replicax._engine import trace_function
from replicax._passes import pipeline
from replicax._passes.facts import Facts, Stage

A, S = rx.VariableAggregation, rx.VariableSynchronization

# For jobs of several workers see test_multi_worker_input.py: nobody knows all shapes of values made by hand there.

DATA = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)


def variable(strategy, value, **more):
    with strategy.scope():
        return rx.Variable(value, **more)


def batches(strategy, data=DATA, size=5):
    """Two batches: for two replicas parts of 3, 2 and 1, 0 rows, for four ones of 2, 2, 1, 0 and 1, 0, 0, 0."""
    return strategy.experimental_distribute_dataset(rx.data.Dataset.from_tensor_slices(data).batch(size))


# What the replicas compute: for each its variables and the function that is given the batches.


def with_an_optimizer(strategy):
    live_once = strategy.extended._variables_live_once
    more = {"aggregation": A.SUM} if live_once else {}
    layers = [variable(strategy, jnp.ones((3, 4)), **more), variable(strategy, jnp.full(4, 0.1), **more)]
    with strategy.scope():
        optimizer = rx.Optimizer(optax.adam(0.1), layers)

    def replica(x):
        def loss(weights):
            return jnp.sum(jnp.tanh(x @ weights[0] + weights[1]) ** 2) / 6

        gradient = jax.value_and_grad(loss)
        if not isinstance(x, jax.core.Tracer):
            gradient = jax.jit(gradient)  # which compiles sooner for each eager replica than one operation at a time
        value, gradients = gradient([layer.value() for layer in layers])
        optimizer.apply_gradients(gradients)
        return value

    return layers, lambda x: strategy.reduce(SUM, strategy.run(replica, args=(x,)), axis=None)


def with_statistics_of_all(strategy):
    """The forward pass meets, so that values of different shapes live on to the backward pass."""
    weights = variable(strategy, jnp.ones((3, 4)), aggregation=A.MEAN)
    moving = variable(strategy, jnp.zeros(4), aggregation=A.MEAN)

    def replica(x):
        def loss(w):
            hidden = x @ w
            count = ctx().all_reduce(SUM, jnp.float32(x.shape[0]))
            mean = ctx().all_reduce(SUM, hidden.sum(0)) / count
            variance = ctx().all_reduce(SUM, ((hidden - mean) ** 2).sum(0)) / count
            return jnp.sum(jnp.sin((hidden - mean) / jnp.sqrt(variance + 1e-3)) * hidden) / 6, mean

        (value, mean), gradient = jax.value_and_grad(loss, has_aux=True)(weights.value())
        weights.assign_sub(0.1 * ctx().all_reduce(SUM, gradient))
        moving.assign(mean)
        return value, jax.nn.relu(x @ weights.value())

    return [weights, moving], lambda x: strategy.run(replica, args=(x,))


def with_variables(strategy):
    live_once = strategy.extended._variables_live_once
    total = variable(strategy, 0.0, synchronization=S.ON_READ, aggregation=A.SUM)
    mirrored_ones = [variable(strategy, jnp.zeros(3), aggregation=a) for a in (A.SUM, A.MEAN, A.ONLY_FIRST_REPLICA)]

    def replica(x):
        if live_once or x.shape[0] > 1:  # where it has replicas' values, those of others stay as they are
            total.assign_add(x.sum())
        for v in mirrored_ones:
            v.assign_add(x.sum(0))
        return {"rows": x.shape[0], "some": x[:1], "none": None, "text": "t"}

    return [total, *mirrored_ones], lambda x: strategy.run(replica, args=(x,))


def with_a_tape(strategy):
    v = variable(strategy, jnp.ones((3, 2)), aggregation=A.SUM)

    def replica(x):
        with rx.GradientTape() as tape:
            loss = jnp.sum((x @ v.value()) ** 2)
        v.assign_sub(0.01 * tape.gradient(loss, v))
        return loss

    return [v], lambda x: strategy.run(replica, args=(x,))


def with_random_numbers(strategy):
    """Keys, as many as there are rows, live on over a meeting."""

    def replica(x, key):
        own, mask = jax.random.split(jax.random.fold_in(key, ctx().replica_id_in_sync_group))
        keys = jax.random.split(own, x.shape[0])
        total = ctx().all_reduce(SUM, jnp.sum(x))
        return jax.random.key_data(keys) * total, jax.random.bits(mask, x.shape) * total

    return [], lambda x: strategy.run(replica, args=(x, jax.random.key(3)))


def with_gathering(strategy):
    def replica(x):
        twice = ctx().all_gather(ctx().all_gather(x * 2, axis=0).sum(1)[: x.shape[0]], axis=0)
        gradient = jax.grad(lambda x: jnp.sum(ctx().all_gather(x, axis=0) ** 3))(x)
        slices = ctx().all_reduce(SUM, rx.IndexedSlices(x, jnp.arange(x.shape[0]), (6, 3)))
        most = jnp.max(ctx().all_gather(x, axis=0), 0)  # of no rows there would be none
        nobodys = ctx().all_gather(x[:0], axis=0)
        return twice, gradient, most, nobodys, slices.values, rx.IndexedSlices(x, jnp.arange(x.shape[0]), (6, 3))

    return [], lambda x: strategy.run(replica, args=(x,))


def with_merging(strategy):
    def merge(strategy, x):
        means = strategy.reduce(MEAN, x, axis=0), strategy.reduce(MEAN, x, axis=(0, 1))
        return means, strategy.run(lambda own: ctx().all_reduce(SUM, own.sum(0)), args=(x,))

    return [], lambda x: strategy.run(lambda x: ctx().merge_call(merge, args=(x,)), args=(x,))


def with_more_around(strategy):
    """Values that differ in shape go from one run to another, and are put together in between."""

    def step(x):
        y, labels = strategy.run(lambda x: (x * 2, jnp.argmax(x, 1)), args=(x,))
        z = strategy.run(lambda a, b, k: (a + b[:, None]).sum() * k, args=(y, labels), kwargs={"k": 2.0})
        return strategy.gather(y, axis=0), strategy.reduce(MEAN, y, axis=0), z, strategy.experimental_local_results(y)

    return [], step


def with_different_dtypes(strategy):
    def replica(x):
        whole = (x * 10).astype(jnp.int32)
        sums = ctx().all_reduce(SUM, [whole.sum(), whole.astype(jnp.bfloat16).sum()])
        rows, last = lax.scan(lambda c, row: (c * 0.5 + row, c.sum()), jnp.zeros(3), x)
        return sums, whole, x > 0, ctx().all_reduce(MEAN, whole.sum()), rows, last

    return [], lambda x: strategy.run(replica, args=(x,))


PROGRAMS = [
    with_an_optimizer,
    with_statistics_of_all,
    with_variables,
    with_a_tape,
    with_random_numbers,
    with_gathering,
    with_merging,
    with_more_around,
    with_different_dtypes,
]


def look(strategy, nest):
    """All leaves of all replicas, IndexedSlices taken apart."""
    return [
        [np.asarray(part) if isinstance(part, jax.Array) else part for part in jax.tree.leaves(own)]
        for own in strategy.experimental_local_results(nest)
    ]


two, four = functools.partial(mirrored, 2), functools.partial(mirrored, 4)
CASES = [
    *((two, program) for program in PROGRAMS if program not in (with_an_optimizer, with_variables)),
    *((make, program) for make in (four, central) for program in (with_an_optimizer, with_variables)),
]


@pytest.mark.filterwarnings("ignore:.* gives every replica the same weight")
@pytest.mark.sampled(4)
@pytest.mark.parametrize("make, program", CASES)
def test_the_same_as_eagerly(make, program):
    strategy = make()
    eager_variables, eager_step = program(strategy)
    expected = [look(strategy, eager_step(x)) for x in batches(strategy)]
    variables, step = program(strategy)
    calls = []

    @rx.function
    def compiled(x):
        calls.append(x)
        return step(x)

    found = [look(strategy, compiled(x)) for x in batches(strategy)]
    assert len(calls) == len(found), "a call ran its Python code, instead of being traced once"
    for eager_ones, ones in zip(expected, found, strict=True):
        for eager_leaves, leaves in zip(eager_ones, ones, strict=True):
            for a, b in zip(eager_leaves, leaves, strict=True):
                assert not isinstance(a, np.ndarray) or (a.shape, a.dtype) == (b.shape, b.dtype)
                assert np.array_equal(a, b) or np.allclose(a, b, rtol=3e-5, atol=1e-6)
    for v, w in zip(variables, eager_variables):
        assert np.allclose(v.read_value(), w.read_value(), rtol=3e-5, atol=1e-6), v


@over(at_least=2, logical=False)
def test_each_shape_is_traced_once_and_each_batch_is_a_program(make, n):
    """Also of elements that the function pulls, and where the host drives the loop; in later epochs nothing runs."""
    strategy, traced = make(), []
    total = variable(strategy, 0.0, aggregation=A.SUM)

    def replica(x):
        traced.append(x.shape)
        total.assign_add(x.sum())
        return x * 1

    expected = [3, 2, 1, 0] if n == 2 else [2, 1, 0, 1, 0]
    dataset = batches(strategy)
    given = rx.function(lambda x: strategy.run(replica, args=(x,)))
    pulled = rx.function(lambda iterator: strategy.run(replica, args=(next(iterator),)))

    @rx.function
    def epoch(dataset):
        for x in dataset:
            strategy.run(replica, args=(x,))

    def by_argument():
        for x in dataset:
            given(x)

    def by_pull():
        iterator = iter(dataset)
        for _ in range(2):
            pulled(iterator)

    for one_epoch in (by_argument, by_pull, lambda: epoch(dataset)):
        for again in range(3):
            traced.clear()
            total.assign(0.0)
            one_epoch()
            assert np.isclose(float(total), DATA.sum(), rtol=1e-5)
            assert [shape[0] for shape in traced] == ([] if again else expected)
    assert given.experimental_get_tracing_count() == pulled.experimental_get_tracing_count() == 2


@over(at_least=2, logical=False)
def test_functions_take_and_return_values_of_different_shapes(make, n):
    """Of all shapes, with others, made by hand, and handed from one function to another; also under `jax.jit`."""
    strategy = make()
    rows = per_replica(strategy, [np.full((i + 1, 2 * n - i), i, np.int16) for i in range(n)])
    names = per_replica(strategy, [np.float32(i) for i in range(n)])
    scaled = rx.function(lambda a, b: strategy.run(lambda a, b: (a * 2, a.sum(1) * b), args=(a, b)))
    for way in (scaled, jax.jit(scaled.python_function)):
        twice, sums = way(rows, names)
        assert parts(strategy, twice) == [np.full((i + 1, 2 * n - i), 2 * i).tolist() for i in range(n)]
        assert [part.dtype for part in twice.values] == [jnp.int16] * n
        again = rx.function(lambda a, b: (strategy.gather(strategy.run(jnp.add, args=(a, a)), axis=0), b))(sums, rows)
        assert again[0].tolist() == [2.0 * i * i * (2 * n - i) for i in range(n) for _ in range(i + 1)]
        assert parts(strategy, again[1]) == parts(strategy, rows)
    assert [part.devices() for part in scaled(rows, names)[0].values] == [
        part.devices() for part in strategy.run(jnp.copy, args=(rows,)).values
    ]


def test_values_kept_across_collectives_may_differ_in_shape_between_replicas():
    """Also where only some replicas have it, and where it crosses several meetings."""
    strategy = mirrored(2)
    x = per_replica(strategy, [np.arange(6, dtype=np.float32).reshape(3, 2), np.ones((1, 2), np.float32)])

    def replica(x):
        kept = [jnp.sin(x), x.astype(jnp.int32), jnp.ones((1, 2)) + x.sum()]
        if x.shape[0] > 1:
            kept.append(jnp.cumsum(x, 0))
        first = ctx().all_reduce(SUM, x.sum())
        second = ctx().all_reduce(SUM, first * kept[-1].sum())
        third = ctx().all_reduce(SUM, jnp.cos(second) + first)  # of one value: twice that
        return [k * third for k in kept[:3]], sum(k.sum() for k in kept) * second

    expected, found = strategy.run(replica, args=(x,)), rx.function(lambda x: strategy.run(replica, args=(x,)))(x)
    for a, b in zip(jax.tree.leaves(look(strategy, expected)), jax.tree.leaves(look(strategy, found)), strict=True):
        assert a.shape == b.shape and np.allclose(a, b, rtol=1e-5)


# Where no program can be made the replicas run eagerly, and say what is wrong if that does not work either.


def meeting_more_often(x):
    for _ in range(x.shape[0]):
        ctx().all_reduce(SUM, x.sum())


def looking_at_components(x):
    return ctx().merge_call(lambda _, x: sum(part.shape[0] for part in x.values), args=(x,))


def asking_for_a_value(x):
    return x.sum() * 2 if float(x.sum()) > 1 else x.sum()


def printing(x):
    jax.debug.print("{}", x.sum())
    return x


@pytest.mark.parametrize("replica, error", [
    (looking_at_components, None),
    (asking_for_a_value, None),
    (printing, None),
    (meeting_more_often, "different number"),
    (lambda x: ctx().all_reduce(SUM, x), "differ in shape"),
    (lambda x: ctx().all_gather(x, axis=1), "differ in shape in another dimension than 1"),
])  # fmt: skip
def test_uncompilable_uneven_batches_run_eagerly(replica, error):
    strategy, calls = mirrored(2), []
    x = per_replica(strategy, [np.ones((2, 3), np.float32), np.ones((1, 3), np.float32)])

    @rx.function
    def step(x):
        calls.append(isinstance(jax.tree.leaves(x.values)[0], jax.core.Tracer))
        return strategy.run(replica, args=(x,))

    for _ in range(2):
        if error is None:
            result, expected = step(x), strategy.run(replica, args=(x,))
            assert str(look(strategy, result)) == str(look(strategy, expected))
        else:
            with pytest.raises((InvalidArgumentError, RuntimeError), match=error):
                step(x)
    assert calls == [True, False, False]  # it is tried once


def test_uncompilable_uneven_batches_are_tried_a_few_times():
    """Of other shapes each time; and what fails eagerly as well says why it was to run so."""
    strategy, compiled = mirrored(2), []

    def note(x):
        compiled.append(isinstance(x, jax.core.Tracer))
        return asking_for_a_value(x)

    def in_a_loop(x):
        return lax.scan(lambda c, _: (c + ctx().all_reduce(SUM, x.sum()), None), 0.0, None, length=2)[0]

    def parts_of(rows):
        return per_replica(strategy, [np.ones((rows, 3), np.float32), np.ones((1, 3), np.float32)])

    several = [parts_of(rows) for rows in range(2, 10)]
    given = rx.function(lambda x: strategy.run(note, args=(x,)))
    for x in several:
        given(x)
    assert sum(compiled) == trace_function.PROGRAMS == len(given._programs.uneven._eager)

    sizes = [3, 5, 7, 9, 11, 13] * 2
    generated = rx.data.Dataset.from_generator(
        lambda: (np.ones((size, 3), np.float32) for size in sizes),
        output_signature=rx.TensorSpec((None, 3), np.float32),
    )
    iterator = iter(strategy.experimental_distribute_dataset(generated))
    pulled = rx.function(lambda: strategy.run(note, args=(next(iterator),)))
    for _ in sizes:
        pulled()
    assert pulled.experimental_get_tracing_count() == trace_function.PROGRAMS == len(pulled._programs.uneven._eager)

    step = rx.function(lambda x: strategy.run(in_a_loop, args=(x,)))
    assert parts(strategy, step(parts_of(1))) == [12.0, 12.0]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="synchronization point") as caught:
            step(several[0])
        (text,) = [note for note in caught.value.__notes__ if "meet inside of a 'scan'" in note]
        assert "(2, 3), (1, 3)" in text and "drop_remainder" in text


def test_shapes_that_keep_changing_are_answered_with_a_warning():
    strategy, traced = mirrored(2), []
    step = rx.function(lambda x: strategy.run(lambda x: traced.append(isinstance(x, jax.core.Tracer)), args=(x,)))
    several = [per_replica(strategy, [np.ones(9), np.ones(i)]) for i in range(7)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x in several:
            step(x)
    (warning,) = [w for w in caught if "eagerly" in str(w.message)]
    assert "(9,), (4,)" in str(warning.message) and "drop_remainder" in str(warning.message)
    assert warning.filename == __file__
    assert traced == [True] * 8 + [False] * 6
    step(several[0])
    assert len(traced) == 14  # those that have programs keep them


@over(at_least=2, logical=False)
def test_gathering_an_empty_structure_returns_it(make, n):
    """Also where all parts are alike, which XLA has no collective for."""
    strategy = make()
    x = per_replica(strategy, [np.zeros((2, 0), np.float32)] * n)
    for way in (lambda f: f, rx.function):
        gathered = way(lambda x: strategy.run(lambda x: ctx().all_gather(x, axis=1), args=(x,)))(x)
        assert [np.shape(part) for part in parts(strategy, gathered)] == [(2, 0)] * n
        assert way(lambda x: strategy.gather(x, axis=1))(x).shape == (2, 0)


def test_an_outer_tape_and_a_nested_jit():
    """The gradient goes through the branches; a collective in a nested function is found."""
    strategy = mirrored(2)
    v = variable(strategy, 3.0)
    x = per_replica(strategy, [np.float32([1, 2]), np.float32([5])])

    @rx.function
    def loss(x):
        total = jax.jit(lambda y: ctx().all_reduce(SUM, jnp.sum(y)))
        return strategy.reduce(SUM, strategy.run(lambda x: jax.checkpoint(total)(x * v.value()) * x[0], (x,)), None)

    assert float(loss(x)) == 3 * 8 * 6
    with rx.GradientTape() as tape:
        value = loss(x)
    assert float(tape.gradient(value, v)) == 8 * 6
    assert loss.experimental_get_tracing_count() == 1


def test_convolutions_keep_their_values_in_the_order_for_the_cpu():
    random, count = np.random.default_rng(0), 0
    layouts = [("NCHW", "OIHW", "NCHW"), ("CNHW", "IHWO", "HWNC"), ("HNCW", "OHIW", "CHWN")]
    for (left, right, out), (groups, of_batch) in itertools.product(layouts, [(1, 1), (2, 1), (1, 2)]):
        x = random.normal(size=[{"N": 4, "C": 4, "H": 6, "W": 5}[d] for d in left]).astype(np.float32)
        w = random.normal(size=[{"O": 4, "I": 4 // groups, "H": 3, "W": 2}[d] for d in right]).astype(np.float32)
        convolve = jax.jit(functools.partial(
            lax.conv_general_dilated, window_strides=(2, 1), padding=[(1, 2), (0, 1)], lhs_dilation=(1, 2),
            dimension_numbers=(left, right, out), feature_group_count=groups, batch_group_count=of_batch,
        ))  # fmt: skip
        jaxpr = jax.make_jaxpr(convolve)(x, w)
        ordered = functools.partial(pipeline.evaluate, jaxpr, Facts(Stage.REPLICA, "cpu", True, is_branch=True))
        assert np.allclose(ordered([x, w])[0], convolve(x, w), rtol=1e-4, atol=1e-5)
        count += str(jax.make_jaxpr(ordered)([x, w])).count("lhs_spec=(0, 3, 1, 2), rhs_spec=(3, 2, 0, 1)")
    assert count == 9


def test_assignments_that_depend_on_a_replicas_own_rows_are_refused_and_others_are_not():
    """For replicas of 2 rows and 1 row. Eagerly the values decide, compiled how they come about."""
    strategy = mirrored(2)
    v = variable(strategy, 0.0)
    (batch,) = strategy.experimental_distribute_dataset(rx.data.Dataset.from_tensor_slices(DATA[:3]).batch(3))

    @jax.custom_jvp
    def doubled(x):
        return 2 * x

    def with_made_anew(x, total):
        """Constants, callbacks and custom derivatives are other objects in each trace."""
        own = jax.custom_jvp(lambda x: x)
        own.defjvp(lambda primals, tangents: (own(*primals), *tangents))
        seven = jax.pure_callback(lambda x: np.float32(7), jax.ShapeDtypeStruct((), jnp.float32), total)
        return own(seven) + jax.nn.relu(total) + jnp.sum(jnp.asarray(np.arange(300.0))) * 0

    def of_one_replica(x, total):
        if len(x) == 2:
            v.assign(total)

    def in_a_merge_function(x, total):
        ctx().merge_call(lambda _, rows: v.assign(rows), args=(float(len(x)),))

    doubled.defjvp(lambda primals, tangents: (doubled(*primals), doubled(*tangents)))
    right = {
        3.0: lambda x, total: total,
        6.0: lambda x, total: doubled(total),
        10.0: with_made_anew,
        1.0: lambda x, total: lax.cond(total > 0, lambda: 1.0, lambda: 2.0),
        9.0: lambda x, total: lax.fori_loop(0, 3, lambda _, y: y + total, jnp.float32(0)),
        2.0: lambda x, total: len(ctx().all_gather(x, 0)) - jnp.float32(1),
        4.0: lambda x, total: ctx().all_reduce(SUM, jnp.zeros(()) if len(x) == 2 else jnp.sum(x) * 0) + 4,
    }
    wrong = [
        lambda x, total: v.assign(total / len(x)),
        lambda x, total: v.assign(len(x)),
        lambda x, total: v.assign(jnp.sum(x)),
        of_one_replica,
        in_a_merge_function,
    ]

    def run(step):
        def replica(x):
            step(x, ctx().all_reduce(SUM, jnp.float32(len(x))))

        return strategy.run(replica, args=(batch,))

    for way in (rx.function, lambda function: function):
        for expected, value in right.items():
            way(lambda value=value: run(lambda x, total: (v.assign(value(x, total)), None)[-1]))()
            assert parts(strategy, v) == [expected] * 2
        for step in wrong:
            with pytest.raises(ValueError, match="assign different values to Variable:0"):
                way(lambda step=step: run(lambda x, total: (step(x, total), None)[-1]))()
            assert parts(strategy, v) == [4.0] * 2
