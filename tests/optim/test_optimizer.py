"""`rx.Optimizer`: the same parameters as optax on the whole batch, for any number of replicas, both ways."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from strategies import (
    SUM,
    ctx,
    dealt,
    few,
    last,
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
from replicax._base.indexed_slices import IndexedSlices
from replicax._benchmark import hlo
from replicax._collectives import sharding

rng = np.random.default_rng(0)
X = rng.normal(size=(8, 3)).astype(np.float32)
Y = rng.normal(size=(8, 2)).astype(np.float32)
START = {"w": rng.normal(size=(3, 2)).astype(np.float32), "b": np.zeros(2, np.float32)}
STEPS = 4

TRANSFORMATIONS = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(0.05),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(optax.linear_schedule(0.1, 0.01, 4))),
}


def sum_of_squares(params, x, y):
    return jnp.sum((x @ params["w"] + params["b"] - y) ** 2)


# Each is one program, also where the replicas run eagerly, which would compile its operations one by one.
mean_square = jax.jit(jax.value_and_grad(lambda params, x, y, count: sum_of_squares(params, x, y) / count))


@functools.cache
def by_hand(make_optax, steps=STEPS):
    """Optax on the whole batch, without replicax."""
    transformation = make_optax()

    @jax.jit
    def step(params, state):
        gradients = jax.grad(lambda p: sum_of_squares(p, X, Y) / len(X))(params)
        updates, state = transformation.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    params, state = START, jax.jit(transformation.init)(START)
    for _ in range(steps):
        params, state = step(params, state)
    return jax.tree.map(np.asarray, params)


def adam():
    return optax.adam(0.05)


def batch(strategy):
    (element,) = strategy.experimental_distribute_dataset([(X, Y)])
    return element


def same(got, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), got, expected)


@pytest.mark.across_processes
@dealt(
    "name, mean",
    list(itertools.product(few(list(TRANSFORMATIONS)), last([False, True]))),
    plain=True,
    one_of_each=True,
)
@ways
def test_a_pytree_variable(make, way, name, mean):
    """Fact 164: gradients summed of losses over the global batch, or averaged of means over the parts."""
    strategy = make()
    with strategy.scope():
        params = rx.Variable(START)
        optimizer = rx.Optimizer(TRANSFORMATIONS[name](), params, reduce_op="MEAN" if mean else "SUM")

    def replica(x, y):
        loss, gradients = mean_square(params.value(), x, y, x.shape[0] if mean else len(X))
        optimizer.apply_gradients(gradients)
        return loss

    step = way(lambda element: strategy.run(replica, args=element))
    for _ in range(STEPS):
        step(batch(strategy))
    same(params.numpy(), by_hand(TRANSFORMATIONS[name]))
    for component in getattr(params, "values", (params,)):
        same(component.numpy(), params.numpy())


@dealt("form", few(["list", "dict", "pairs", "zip", "nested"]), plain=True, one_of_each=True)
@ways
def test_several_variables_in_each_form(make, way, form):
    strategy = make()
    with strategy.scope():
        w, b = rx.Variable(START["w"], name="w"), rx.Variable(START["b"], name="b")
        variables = {"list": [w, b], "dict": {"w": w, "b": b}, "nested": (w, {"b": [b]})}.get(form, [w, b])
        optimizer = rx.Optimizer(optax.adam(0.05), variables)
    assert [v.name for v in optimizer.variables] == ["w:0", "b:0"] or form == "dict"

    def replica(x, y):
        with rx.GradientTape() as tape:
            loss = sum_of_squares({"w": w.value(), "b": b.value()}, x, y) / len(X)
        gw, gb = tape.gradient(loss, [w, b])
        optimizer.apply_gradients(
            {
                "list": [gw, gb],
                "dict": {"b": gb, "w": gw},
                "pairs": [(gb, b), (gw, w)],
                "zip": zip([gw, gb], [w, b]),
                "nested": (gw, {"b": [gb]}),
            }[form]
        )

    step = way(lambda element: strategy.run(replica, args=element))
    for _ in range(STEPS):
        step(batch(strategy))
    same({"w": w.numpy(), "b": b.numpy()}, by_hand(adam))


@over(plain=True)
@ways
def test_none_stands_for_no_gradient(make, way):
    strategy = make()
    with strategy.scope():
        a, b = rx.Variable(1.0), rx.Variable(jnp.ones(2))
        optimizer = rx.Optimizer(optax.sgd(1.0), [a, b])
    for gradients in (
        lambda: [jnp.ones(()) / strategy.num_replicas_in_sync + 0 * a, None],
        lambda: [(None, b), (jnp.ones(()) / strategy.num_replicas_in_sync + 0 * a, a)],
        lambda: [(jnp.ones(()) / strategy.num_replicas_in_sync + 0 * a, a)],
    ):
        before = float(a)
        way(lambda gradients=gradients: strategy.run(lambda: optimizer.apply_gradients(gradients())))()
        assert float(a) == pytest.approx(before - 1) and b.numpy().tolist() == [1.0, 1.0]


@pytest.mark.across_processes
@dealt("form", few(["tree", "pairs", "missing"]), plain=True, one_of_each=True)
@ways
def test_none_in_a_variable_stays_none(make, n, way, form):
    """As in models that `equinox.partition` or `optax.masked` has taken apart; for JAX it is an empty subtree."""
    strategy = make()
    with strategy.scope():
        v = rx.Variable({"a": jnp.ones(2), "b": None, "c": [None, jnp.ones(())]})
        optimizer = rx.Optimizer(optax.chain(optax.clip_by_global_norm(1e6), optax.sgd(0.5, momentum=0.0)), v)

    def replica():
        gradients = jax.tree.map(lambda x: x * (replica_id() + 1.0), v.value())
        if form == "missing":
            gradients["c"] = None
        optimizer.apply_gradients([(gradients, v)] if form == "pairs" else gradients)

    way(lambda: strategy.run(replica))()
    step = 0.5 * n * (n + 1) / 2
    expected = {"a": np.full(2, 1 - step), "b": None, "c": [None, np.float32(1 if form == "missing" else 1 - step)]}
    jax.tree.map(np.testing.assert_allclose, v.numpy(), expected)
    with pytest.raises(ValueError, match=r"gradients' structure is .*'d'.*variables' values is .*'b': None"):
        strategy.run(lambda: optimizer.apply_gradients({"a": None, "d": jnp.ones(2)}))


@over(at_least=2, copies=True)
@ways
def test_in_cross_replica_context(make, n, way):
    strategy = make()
    with strategy.scope():
        w = rx.Variable(10.0)
        optimizer = rx.Optimizer(optax.sgd(0.1), [w])
    gradients = per_replica(strategy, [r + 1.0 for r in range(n)])
    way(lambda g: optimizer.apply_gradients([g]))(gradients)
    expected = 10.0 - 0.1 * n * (n + 1) / 2
    assert parts(strategy, w) == pytest.approx([expected] * n)

    def inside(g):
        with strategy.scope():
            optimizer.apply_gradients([(g, w)])

    way(inside)(gradients)
    assert float(w) == pytest.approx(expected - 0.1 * n * (n + 1) / 2)


@ways
def test_without_a_strategy(way):
    params = rx.Variable(START)
    optimizer = rx.Optimizer(optax.adam(0.05), params)

    def step():
        optimizer.apply_gradients(mean_square(params.value(), X, Y, len(X))[1])

    run = way(step)
    for _ in range(STEPS):
        run()
    same(params.numpy(), by_hand(adam))


@pytest.mark.across_processes
@over(at_least=2, copies=True, logical=False)
def test_one_step_is_one_all_reduce(make, n):
    strategy = make()
    with strategy.scope():
        params = rx.Variable({f"w{i}": jnp.ones((i + 1, 3)) for i in range(6)})
        optimizer = rx.Optimizer(optax.adam(0.05), params)

    def replica():
        gradients = jax.tree.map(lambda p: p * (replica_id() + 1) + p.shape[0], params.value())
        optimizer.apply_gradients(gradients)

    step = rx.function(lambda: strategy.run(replica))
    text = step.lower().compile().as_text()
    lines = [line for line in text.splitlines() if " all-reduce(" in line or " all-reduce-start(" in line]
    assert len(lines) == 1 and lines[0].split(" all-reduce")[1].startswith(("(", "-start("))
    assert "= (" not in lines[0]  # one vector, no tuple of several


@several
@ways
def test_the_state_is_a_variable_of_the_strategy(n, way):
    strategy = mirrored(n)
    with strategy.scope():
        w = rx.Variable(jnp.ones(2), name="w")
    optimizer = rx.Optimizer(optax.adam(0.1), w)
    state = optimizer.state
    assert state.distribute_strategy is strategy and not state.trainable and len(state.values) == n
    for _ in range(2):
        way(lambda: strategy.run(lambda: optimizer.apply_gradients(w * 1.0)))()
    counts = [int(c.value()[0].count) for c in state.values]
    assert counts == [2] * n and optimizer.state is state and optimizer.variables[0] is w


def test_wrong_arguments():
    with mirrored(2).scope():
        w, other = rx.Variable(1.0, name="w"), rx.Variable(1.0, name="other")
    for wrong in ([w, jnp.ones(1)], jnp.ones(1), [], {"a": 3.0}):
        with pytest.raises(TypeError, match="An Optimizer takes"):
            rx.Optimizer(optax.sgd(0.1), wrong)
    with pytest.raises(
        TypeError, match=r"takes an Optax transformation, such as optax.sgd\(0.1\).* got 0.1 of type float"
    ):
        rx.Optimizer(0.1, w)
    with pytest.raises(TypeError, match=r"CommunicationOptions.* got \{'bytes_per_pack': 1\} of type dict"):
        rx.Optimizer(optax.sgd(0.1), w, options={"bytes_per_pack": 1})
    optimizer = rx.Optimizer(optax.sgd(0.1), {"w": w})
    for way in (lambda f: f, rx.function):
        with pytest.raises(ValueError, match="structure"):
            way(lambda: mirrored(2).run(lambda: optimizer.apply_gradients([replica_id()])))()
        with pytest.raises(ValueError, match="other:0 is not among the variables of this optimizer"):
            way(lambda: mirrored(2).run(lambda: optimizer.apply_gradients([(replica_id(), other)])))()
    with pytest.raises(ValueError, match="'MAX' is not a valid ReduceOp") as error:
        rx.Optimizer(optax.sgd(0.1), w, reduce_op="max")
    assert "'SUM' and 'MEAN'" in error.value.__notes__[0]
    assert float(w) == 1.0


@pytest.mark.parametrize("make", [lambda: mirrored(2), one_device], ids=["mirrored", "one device"])
def test_an_optimizer_is_created_outside_of_replicas(make):
    strategy, made = make(), []
    with strategy.scope():
        w = rx.Variable(jnp.ones(2))

    def new():
        return rx.Optimizer(optax.sgd(0.1, momentum=0.9), w)

    def step():
        new().apply_gradients(w.value())

    inside, outside = rx.function(step), rx.function(lambda: strategy.run(step))
    for call in (lambda: strategy.run(step), lambda: strategy.run(inside), outside):
        with pytest.raises(RuntimeError, match=r"made by a replica.*outside of `strategy.run`"):
            call()
    with pytest.raises(ValueError, match=r"created on the first call.*An Optimizer makes one for its state"):
        rx.function(lambda: strategy.run(new().apply_gradients, args=(w.value(),)))()
    w.assign(jnp.ones(2))  # the first call, which makes variables, has run

    @rx.function
    def first_call_makes_it():
        made.extend([new()] if not made else [])
        strategy.run(lambda: made[0].apply_gradients(w.value() / strategy.num_replicas_in_sync))

    first_call_makes_it()
    first_call_makes_it()
    assert w.numpy().tolist() == pytest.approx([0.9 - 0.1 * (0.9 + 0.9)] * 2)


@pytest.mark.across_processes
@over(at_least=2, copies=True)
@ways
def test_gradients_reduced_by_the_user(make, n, way):
    """Clipping after the reduction: MEAN of what is the same everywhere leaves it as it is."""
    strategy = make()
    with strategy.scope():
        w = rx.Variable(10.0)
        optimizer = rx.Optimizer(optax.sgd(1.0), w, reduce_op="mean")

    def replica():
        total = ctx().all_reduce(SUM, replica_id() + 1)
        optimizer.apply_gradients(jnp.minimum(total, 2.0))

    way(lambda: strategy.run(replica))()
    assert parts(strategy, w) == [8.0] * n


@pytest.mark.across_processes
@over(plain=True)
@ways
@pytest.mark.parametrize("op", few(["SUM", "MEAN"]))
def test_extra_arguments_reach_the_transformation(make, n, way, op):
    """`value` is a replica's own loss and is reduced as its gradients are; `scale` is the same on every replica."""

    def update(updates, state, params, *, value, scale, **_):
        return jax.tree.map(lambda g: -g * scale, updates), state + value

    strategy = make()
    with strategy.scope():
        w = rx.Variable(jnp.zeros(2))
        transformation = optax.GradientTransformationExtraArgs(lambda _: jnp.zeros(()), update)
        optimizer = rx.Optimizer(transformation, w, reduce_op=op)

    def replica():
        own = replica_id() + 1.0
        optimizer.apply_gradients(jnp.ones(2) * own, value=own, scale=2.0)

    way(lambda: strategy.run(replica))()
    total = n * (n + 1) / 2 / (n if op == "MEAN" else 1)
    assert w.numpy().tolist() == [-2 * total] * 2 and float(optimizer.state) == total


@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
@ways
def test_plateau_of_the_loss_lowers_the_learning_rate(way, sharded):
    """As Optax alone does with the loss of the global batch."""
    strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"], shard_optimizer_state=sharded)
    transformation = optax.chain(optax.adam(0.1), optax.contrib.reduce_on_plateau(factor=0.5, patience=1, cooldown=0))
    losses = [4.0, 3.0, 3.0, 3.0, 3.0, 3.0]
    start = jnp.linspace(1.0, 2.0, 600)
    with strategy.scope():
        w = rx.Variable(start)
        optimizer = rx.Optimizer(transformation, w)
    step = way(lambda x: strategy.run(lambda x: optimizer.apply_gradients(w.value() * x, value=x), args=(x,)))
    params, state = start, transformation.init(start)
    for loss in losses:
        step(per_replica(strategy, [np.float32(loss * 0.25), np.float32(loss * 0.75)]))
        updates, state = transformation.update(params * loss, state, params, value=loss)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(w.numpy(), params, rtol=1e-5)
    assert float(optimizer.state.value()[1].scale) == 0.5**4


TRANSFORMATIONS_WITH_EXTRAS = {
    "plateau": lambda: optax.chain(optax.adam(0.3), optax.contrib.reduce_on_plateau(factor=0.5, patience=1)),
    "lbfgs": optax.lbfgs,
    "schedule_free": lambda: optax.contrib.schedule_free_adamw(0.1),
}


@pytest.mark.across_processes
@dealt(
    "name, op",
    few([("lbfgs", "SUM"), ("plateau", "SUM"), ("schedule_free", "SUM"), ("lbfgs", "MEAN")]),
    copies=True,
    one_of_each=True,
)
def test_transformations_that_evaluate_the_loss_give_those_of_the_whole_batch(make, n, op, name):
    """For batches of seven and three rows, whose parts have other sizes on 2 and 4 replicas."""
    strategy = make()
    transformation = TRANSFORMATIONS_WITH_EXTRAS[name]()
    extras = {"lbfgs": ("value", "grad", "value_fn"), "plateau": ("value",)}.get(name, ())
    x, y = jnp.asarray(X[:, :3]), jnp.asarray(X @ np.float32([1, -2, 3]))
    with strategy.scope():
        w = rx.Variable(jnp.zeros(3))
        optimizer = rx.Optimizer(transformation, w, reduce_op=op)

    def errors(w, x, y):
        return (x @ w - y) ** 2

    def replica(batch):
        x, y = batch
        mean = jnp.mean if op == "MEAN" else rx.share_of_mean
        value_fn = lambda w: mean(errors(w, x, y))  # noqa: E731
        value, grad = jax.value_and_grad(value_fn)(w.value())
        known = {"value": value, "grad": grad, "value_fn": value_fn}
        optimizer.apply_gradients(grad, **{name: known[name] for name in extras})

    step = rx.function(lambda batch: strategy.run(replica, args=(batch,)))
    parts = [slice(0, 7), slice(7, 8)]
    dataset = rx.data.Dataset.from_tensor_slices((x, y)).batch(7)
    options = rx.InputOptions(pad_last_batch=True)
    params, state = jnp.zeros(3), transformation.init(jnp.zeros(3))
    for batch, rows in zip(strategy.experimental_distribute_dataset(dataset, options), parts):
        step(batch)
        value_fn = lambda w: jnp.mean(errors(w, x[rows], y[rows]))  # noqa: B023, E731
        value, grad = jax.value_and_grad(value_fn)(params)
        known = {"value": value, "grad": grad, "value_fn": value_fn}
        updates, state = transformation.update(grad, state, params, **{name: known[name] for name in extras})
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(w.numpy(), params, rtol=1e-4, atol=1e-5)


def test_a_line_search_over_several_replicas_needs_a_compiled_step():
    strategy = mirrored(2)
    with strategy.scope():
        w = rx.Variable(1.0)
        optimizer = rx.Optimizer(optax.lbfgs(), w)
    with pytest.raises(RuntimeError, match="`value_fn`.*rx.function.*pad_last_batch=True"):
        strategy.run(lambda: optimizer.apply_gradients(1.0, value=1.0, grad=1.0, value_fn=lambda w: w**2))
    central = rx.experimental.CentralStorageStrategy(["GPU:0", "GPU:1"])
    with central.scope():
        w = rx.Variable(1.0)
        optimizer = rx.Optimizer(optax.lbfgs(), w)
    step = rx.function(
        lambda: central.run(lambda: optimizer.apply_gradients(1.0, value=1.0, grad=1.0, value_fn=lambda w: w**2))
    )
    with pytest.raises(RuntimeError, match="`value_fn`.*variables have a copy on each replica"):
        step()


@ways
def test_extra_arguments_in_cross_replica_context_and_wrong_ones(way):
    strategy = mirrored(2)
    with strategy.scope():
        w = rx.Variable(0.0)
        plain = rx.Optimizer(optax.scale(-1.0), w)
        optimizer = rx.Optimizer(optax.polyak_sgd(max_learning_rate=10.0), w)
    x = per_replica(strategy, [1.0, 3.0])
    way(lambda x: optimizer.apply_gradients(x, value=x))(x)
    assert float(w) == -4.0 / 4.0**2 * 4.0  # the step of Polyak: loss / gradient**2
    with pytest.raises(TypeError, match="does not take .*'value'.*Pass extra arguments to transformations that use"):
        way(lambda: strategy.run(lambda: plain.apply_gradients(w.value(), value=1.0)))()
    with pytest.raises(TypeError, match="missing 1 required .*'value'"):
        way(lambda: strategy.run(lambda: optimizer.apply_gradients(w.value())))()


class Params(NamedTuple):
    w: object
    b: object


@over(plain=True)
@ways
def test_named_tuples_and_mixed_dtypes(make, way):
    strategy = make()
    with strategy.scope():
        params = rx.Variable(Params(jnp.ones(2, jnp.bfloat16), {"x": jnp.ones((), jnp.float32)}))
        optimizer = rx.Optimizer(optax.sgd(0.5), params)
    n = strategy.num_replicas_in_sync

    def replica():
        optimizer.apply_gradients(jax.tree.map(lambda p: p / n, params.value()))

    way(lambda: strategy.run(replica))()
    value = params.value()
    assert isinstance(value, Params) and value.w.dtype == jnp.bfloat16 and value.b["x"].dtype == np.float32
    assert value.w.tolist() == [0.5, 0.5] and float(value.b["x"]) == 0.5


@ways
def test_replicas_update_variables_alike_whatever_their_aggregation(way):
    strategy = mirrored(2)
    with strategy.scope():
        variables = [rx.Variable(4.0, aggregation=aggregation) for aggregation in rx.VariableAggregation]
        optimizer = rx.Optimizer(optax.sgd(0.5), variables)
    step = way(lambda: strategy.run(lambda: optimizer.apply_gradients([v * 0 + 1 for v in variables])))
    step()
    step()
    assert [float(v) for v in variables] == [2.0] * 4


@ways
def test_a_state_keeps_its_dtypes_and_gradients_have_the_shapes_of_variables(way):
    strategy = mirrored(2)
    with strategy.scope():
        both = [rx.Variable(1.0), rx.Variable(jnp.ones(3, jnp.bfloat16))]
        optimizer = rx.Optimizer(optax.inject_hyperparams(optax.adam)(0.5), both)  # hyperparameters are float32
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(optimizer.state.value())]
    for _ in range(2):
        way(lambda: strategy.run(lambda: optimizer.apply_gradients([v * 0 + 1 for v in both])))()
    assert [leaf.dtype for leaf in jax.tree.leaves(optimizer.state.value())] == dtypes
    np.testing.assert_allclose(both[1].numpy().astype(float), 0.0, atol=0.02)
    with pytest.raises(ValueError, match=r"A gradient has the shape \(\), and its variable's value \(3,\)"):
        way(lambda: strategy.run(lambda: optimizer.apply_gradients([both[0] * 1, both[1].value().sum()])))()


def test_one_device_state_lies_on_its_device():
    one = one_device()
    with one.scope():
        w = rx.Variable(jnp.ones(3))
        optimizer = rx.Optimizer(optax.adam(0.1), w)
    one.run(lambda: optimizer.apply_gradients(w * 1.0))
    assert w.device.endswith("GPU:1") and optimizer.state.device.endswith("GPU:1")


@ways
def test_central_storage_with_one_device(way):
    one = rx.experimental.CentralStorageStrategy(["GPU:0"], parameter_device="CPU:0")
    with one.scope():
        w = rx.Variable(10.0)
        optimizer = rx.Optimizer(optax.sgd(0.1, momentum=0.5), w)
    step = way(lambda: one.run(lambda: optimizer.apply_gradients(w * 1.0)))
    step()
    step()
    assert float(w) == pytest.approx(10 - 1 - (0.9 + 0.5))  # the momentum is 1 * 10, then 9 + 0.5 * 10


KINDS = {
    "none": lambda: contextlib.nullcontext(),
    "one device": lambda: one_device().scope(),
    "mirrored": lambda: mirrored(3).scope(),
    "sharded": lambda: rx.MirroredStrategy(["GPU:0", "GPU:1", "GPU:2"], shard_optimizer_state=True).scope(),
}


@pytest.mark.parametrize("looks", [False, True], ids=["compiled", "eager"])
@pytest.mark.parametrize("scope", KINDS)
def test_the_initial_state_shares_no_buffers(scope, looks):
    """Steps take its buffers over, whatever it was made of; those of the variables and of the user stay theirs."""
    theirs, calls = jnp.arange(5.0), []

    def init(params):
        calls.append(float(params.sum()) if looks else None)
        zeros = jnp.zeros(params.shape)
        return {"same": [params, params], "zeros": [zeros, zeros], "kept": theirs, "host": np.ones(5), "number": 2}

    def update(gradients, state, params):
        return gradients, jax.tree.map(lambda x: x + 1, state)

    with KINDS[scope]():
        w = rx.Variable(np.arange(6.0, dtype=np.float32))
        seen = w.value()
        optimizer = rx.Optimizer(optax.GradientTransformation(init, update), w, "MEAN")
    strategy = w.distribute_strategy or rx.get_strategy()
    step = rx.function(lambda: strategy.run(lambda: optimizer.apply_gradients(jnp.ones(6))))
    step()
    step()
    state = optimizer.state.value()
    assert [x.tolist() for x in [*state["same"], *state["zeros"]]] == 2 * [[2, 3, 4, 5, 6, 7]] + 2 * [[2] * 6]
    assert state["kept"].tolist() == [2, 3, 4, 5, 6] and state["host"].tolist() == [3] * 5 and state["number"] == 4
    assert not state["number"].weak_type and state["number"].dtype == jnp.int32
    assert theirs.tolist() == [0, 1, 2, 3, 4] and seen.tolist() == [0, 1, 2, 3, 4, 5]
    assert w.numpy().tolist() == [2, 3, 4, 5, 6, 7] and calls == ([15.0] if looks else [None])


@pytest.mark.parametrize("scope", KINDS)
def test_the_first_step_donates_initial_buffers(scope):
    with KINDS[scope]():
        variables = [rx.Variable(np.ones(5000, np.float32)), rx.Variable(np.ones(5000, np.float32))]
        optimizer = rx.Optimizer(optax.adam(0.1), variables)
    before = [x for v in [*variables, optimizer.state] for x in v._storage.read() if x.size > 1]
    strategy = variables[0].distribute_strategy or rx.get_strategy()
    rx.function(lambda: strategy.run(lambda: optimizer.apply_gradients([jnp.ones(5000)] * 2)))()
    assert len(before) == 6 and all(array.is_deleted() for array in before)


# With the state sharded over the replicas.


@pytest.fixture(autouse=True)
def small_arrays_are_cut(monkeypatch):
    """As large ones are, which would take longer."""
    monkeypatch.setattr(sharding, "FEWEST", 0)


class Sharded(NamedTuple):
    """A model trained for some steps under `shard_optimizer_state`, or not."""

    strategy: rx.MirroredStrategy
    parameters: rx.Variable
    optimizer: rx.Optimizer
    step: Callable[..., None]
    inputs: list[rx.PerReplica]

    @property
    def collectives(self) -> dict[str, int]:
        """How many of each kind the program of a step has."""
        text = self.step.lower(*self.inputs).compile().as_text()
        return dict(Counter(one.kind for one in hlo.collectives(text)))


# 35 and 80 elements, of which 4 replicas get 9 and 20; a bias, and one number for all.
SHAPES = {"w": (7, 5), "b": (5,), "scale": (), "v": (5, 16)}


def trained(make_optax, n=4, sharded=True, way=rx.function, steps=3, restore=None, dtype=np.float32, **options):
    made = np.random.default_rng(1)
    start = {name: made.normal(size=shape).astype(dtype) for name, shape in SHAPES.items()}
    x, y = (made.normal(size=(12, size)).astype(dtype) for size in (7, 16))
    strategy = rx.MirroredStrategy([f"GPU:{i}" for i in range(n)], shard_optimizer_state=sharded)
    with strategy.scope():
        parameters = rx.Variable(start)
        optimizer = rx.Optimizer(make_optax(), parameters, options=rx.CommunicationOptions(**options))
    if restore is not None:
        restore(parameters, optimizer)

    def loss(p, x, y):
        return jnp.sum((jnp.tanh(x @ p["w"] + p["b"]) * p["scale"] @ p["v"] - y) ** 2) / 12

    def replica(x, y):
        optimizer.apply_gradients(gradient(parameters.value(), x, y))

    gradient = jax.jit(jax.grad(loss))  # one program also for eager replicas
    step = way(lambda x, y: strategy.run(replica, args=(x, y)))
    inputs = [per_replica(strategy, np.split(array, n)) for array in (x, y)]
    for _ in range(steps):
        step(*inputs)
    return Sharded(strategy, parameters, optimizer, step, inputs)


def alike(one, other, rtol=2e-5, atol=1e-6):
    bits = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x  # noqa: E731
    state, same_state = (jax.tree.map(bits, each.optimizer.state.value()) for each in (one, other))
    assert jax.tree.structure(state) == jax.tree.structure(same_state)
    near = lambda a, b: np.testing.assert_allclose(  # noqa: E731
        np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=rtol, atol=atol
    )
    jax.tree.map(near, (one.parameters.numpy(), state), (other.parameters.numpy(), same_state))


def not_elementwise():
    """Sorts, counts along one axis, walks through rows, and asks for what JAX's operations ask for seldom."""

    def update(gradients, state, parameters):
        def one(g, s, p):
            ranks = jnp.argsort(g, axis=None).reshape(g.shape) / 10
            rows = jax.lax.scan(lambda c, row: (c + jnp.sum(row), c * row), 0.0, s.T)[1].T if s.ndim else s
            least = jnp.where(jnp.any(g > 1e9), 0.0, jnp.min(g) + jnp.max(p) + jnp.vdot(g, p) + jnp.mean(s))
            return jnp.tanh(g.T).T * 0.01 + 0.001 * (ranks + rows + least)

        new = jax.tree.map(one, gradients, state, parameters)
        return jax.tree.map(jnp.negative, new), new

    return optax.GradientTransformation(lambda parameters: jax.tree.map(jnp.ones_like, parameters), update)


def clipped(optimizer):
    return optax.chain(optax.clip_by_global_norm(0.1), optimizer)


def decayed(optimizer):
    matrices = {name: len(shape) > 1 for name, shape in SHAPES.items()}
    return optax.chain(optax.masked(optax.add_decayed_weights(0.1), matrices), optimizer)


# How many all-reduces each needs beside that of the gradient which is not cut, with which sums of squares of the others
# travel; None where it is not counted.
SHARDED = {
    "schedule": (lambda: optax.inject_hyperparams(optax.adamw)(optax.linear_schedule(0.1, 0.01, 4)), 0),
    "clipped": (lambda: clipped(optax.adam(0.01, mu_dtype=jnp.bfloat16)), 0),
    "lamb": (lambda: optax.lamb(0.01), 1),
    "every_other_step": (lambda: optax.MultiSteps(clipped(optax.adam(0.01)), 2), 0),
    "finite": (lambda: optax.apply_if_finite(optax.lion(0.01), 3), 1),
    "noise": (lambda: optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.sgd(0.01)), 0),
    "factored": (lambda: optax.adafactor(0.01, min_dim_size_to_factor=4), None),
    "masked": (lambda: decayed(optax.amsgrad(0.01)), 0),
    "anything": (not_elementwise, None),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", SHARDED)
def test_a_sharded_state_gives_the_same(name):
    make_optax, more = SHARDED[name]
    sharded = trained(make_optax)
    alike(sharded, trained(make_optax, sharded=False), rtol=2e-2 if name == "clipped" else 1e-4)
    if more is not None:
        assert sharded.collectives == {"reduce-scatter": 1, "all-gather": 1, "all-reduce": 1 + more}
    for component in sharded.parameters.values:
        jax.tree.map(np.testing.assert_array_equal, component.numpy(), sharded.parameters.numpy())


@pytest.mark.parametrize("functions_too", [False, True], ids=["replicas", "all functions"])
def test_eager_replicas_with_a_sharded_state(functions_too):
    make_optax, _ = SHARDED["lamb"]
    rx.config.run_functions_eagerly(functions_too)
    try:
        sharded = trained(make_optax, 3, way=lambda f: f, steps=2)
    finally:
        rx.config.run_functions_eagerly(False)
    alike(sharded, trained(make_optax, 3, sharded=False, steps=2), rtol=1e-4)


@pytest.mark.across_processes
@over(at_least=2, copies=True)
@ways
def test_a_sharded_state_in_jobs_of_several_workers(make, n, way, monkeypatch):
    """As in `test_a_pytree_variable`; the strategies of these tests are made once, without the option."""
    strategy = make()
    monkeypatch.setattr(strategy.extended, "_shards_optimizer_state", True)

    def clipped_adam():
        return optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.05))

    def of_this_worker(params):
        return jnp.full((3, 2), jax.process_index())

    with strategy.scope():
        params = rx.Variable(START)
        optimizer = rx.Optimizer(clipped_adam(), params)
        first = rx.Optimizer(optax.GradientTransformation(of_this_worker, clipped_adam().update), params)
    assert not optimizer.state._storage.lent  # made where it stays
    assert not first.state.numpy().any()  # the first worker's

    def replica(x, y):
        optimizer.apply_gradients(mean_square(params.value(), x, y, len(X))[1])

    step = way(lambda element: strategy.run(replica, args=element))
    for _ in range(2):
        step(batch(strategy))
    same(params.numpy(), by_hand(clipped_adam, 2))
    assert optimizer.state.value()[1][0].mu["w"].shape == (3, 2)


def test_each_device_has_a_part_of_the_state():
    sharded, whole = trained(lambda: optax.adam(0.01), 6), trained(lambda: optax.adam(0.01), 6, sharded=False)

    def held(made, replica):
        return sum(array.addressable_shards[replica].data.nbytes for array in made.optimizer.state._storage.read())

    # ceil(35 / 6) + ceil(80 / 6) numbers of the weights, 5 of the bias, 1 of the scale, each twice; and the count.
    assert [held(sharded, replica) for replica in range(6)] == [4 * (2 * (6 + 14 + 5 + 1) + 1)] * 6
    assert held(whole, 0) == 4 * (2 * (35 + 80 + 5 + 1) + 1)


def test_small_arrays_of_a_sharded_state_stay_whole_in_packs(monkeypatch):
    monkeypatch.undo()  # of `small_arrays_are_cut`
    start = [np.ones(5000, np.float32), *(np.full(i, i, np.float32) for i in range(1, 6))]

    def stepped(sharded):
        strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"], shard_optimizer_state=sharded)
        with strategy.scope():
            variables = [rx.Variable(array) for array in start]
            optimizer = rx.Optimizer(optax.sgd(0.1, momentum=0.9), variables)

        def replica():
            optimizer.apply_gradients([v * (replica_id() + 1.0) for v in variables])

        step = rx.function(lambda: strategy.run(replica))
        step()
        step()
        return step, optimizer, [v.numpy() for v in variables]

    (step, optimizer, got), (_, _, expected) = stepped(True), stepped(False)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, expected)
    assert sorted(optimizer.state._storage.slots) == [1, 2, 3, 4, 5]
    assert [array.shape for array in optimizer.state._storage.read()] == [(2, 2500), *((i,) for i in range(1, 6))]
    collectives = Counter(one.kind for one in hlo.collectives(step.lower().compile().as_text()))
    assert collectives == {"reduce-scatter": 1, "all-reduce": 1, "all-gather": 1}
    optimizer.state.assign(jax.tree.map(jnp.ones_like, optimizer.state.value()))
    step()
    gradients = [3 * array for array in got]
    jax.tree.map(
        lambda v, g, w: np.testing.assert_allclose(w.numpy(), v - 0.1 * (g + 0.9), rtol=1e-6),
        got,
        gradients,
        optimizer.variables,
    )


@pytest.mark.numbers
def test_packs_and_narrow_gradients_of_a_sharded_state():
    def adam():
        return optax.adam(0.01)

    expected = trained(adam, sharded=False)
    packs = trained(adam, bytes_per_pack=200)  # of 20, 320 and 140 bytes; and 4 that are not cut
    alike(packs, expected)
    assert packs.collectives == {"reduce-scatter": 3, "all-gather": 3, "all-reduce": 1}
    narrow = trained(lambda: optax.sgd(0.01), reduction_dtype="float16")
    alike(narrow, trained(lambda: optax.sgd(0.01), sharded=False), rtol=1e-3, atol=1e-3)
    alike(trained(adam, dtype=jnp.bfloat16), trained(adam, sharded=False, dtype=jnp.bfloat16), rtol=0.05, atol=0.05)


def test_a_sharded_state_is_read_assigned_and_saved_as_a_whole(tmp_path):
    def adam():
        return optax.adam(0.01)

    def saved(name, made):
        return rx.train.Checkpoint(p=made.parameters, o=made.optimizer).save(str(tmp_path / name))

    def restored(path):
        return lambda p, o: rx.train.Checkpoint(p=p, o=o).restore(path).assert_consumed()

    expected = trained(adam, sharded=False, steps=4)
    paths = saved("sharded", trained(adam, steps=2)), saved("whole", trained(adam, sharded=False, steps=2))
    alike(trained(adam, 3, steps=2, restore=restored(paths[0])), expected)
    alike(trained(adam, 1, steps=2, restore=restored(paths[0])), expected)
    alike(trained(adam, 2, steps=2, restore=restored(paths[1])), expected)

    strategy, _, optimizer, *_ = trained(adam)
    state = optimizer.state.value()
    assert state[0].mu["w"].shape == (7, 5) and optimizer.state.shape[0].nu["v"] == (5, 16)
    optimizer.state.assign(jax.tree.map(jnp.ones_like, state))

    @rx.function
    def doubled():
        seen = strategy.run(lambda: optimizer.state.value()[0].mu["w"])
        optimizer.state.assign(jax.tree.map(lambda x: 2 * x, optimizer.state.value()))
        strategy.run(lambda: optimizer.state.assign_add(jax.tree.map(jnp.ones_like, optimizer.state.value())))
        return seen

    assert parts(strategy, doubled()) == [np.ones((7, 5)).tolist()] * 4
    assert all((leaf == 3).all() for leaf in jax.tree.leaves(optimizer.state.numpy()))
    assert strategy.run(lambda: optimizer.state.value()[0].mu["b"]).values[2].tolist() == [3.0] * 5


def test_another_thread_may_assign_what_eager_replicas_are_about_to_update():
    strategy, assigned = rx.MirroredStrategy(["GPU:0", "GPU:1"], shard_optimizer_state=True), []
    sgd = optax.sgd(1.0)

    def update(gradients, state, parameters=None):
        if not assigned:  # a compiled step of another thread takes the arrays away, while this one is traced
            thread = threading.Thread(target=lambda: assigned.append(rx.function(lambda: w.assign_add(jnp.ones(4)))()))
            thread.start()
            thread.join()
        return sgd.update(gradients, state, parameters)

    with strategy.scope():
        w = rx.Variable(jnp.ones(4))
        optimizer = rx.Optimizer(optax.GradientTransformation(sgd.init, update), w)
    strategy.run(lambda: optimizer.apply_gradients(replica_id() * jnp.ones(4)))
    assert w.numpy().tolist() == [1.0] * 4 and len(assigned) == 1


def test_a_sharded_state_refuses_unsupported_options():
    with pytest.raises(ValueError, match="reduced and scattered in one.*HierarchicalCopyAllReduce"):
        rx.MirroredStrategy(["GPU:0", "GPU:1"], rx.HierarchicalCopyAllReduce(), shard_optimizer_state=True)
    strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"], shard_optimizer_state=True)
    outside = rx.Variable(jnp.ones(4))
    with strategy.scope():
        w = rx.Variable(jnp.ones(4))
        optimizer = rx.Optimizer(optax.sgd(0.1, momentum=0.9), w)
        with pytest.raises(ValueError, match="takes variables that have a copy on each replica"):
            rx.Optimizer(optax.sgd(0.1), [w, outside])
    for way in (rx.function, lambda f: f):
        with pytest.raises(ValueError, match=r"A gradient has the shape \(2,\).*value \(4,\)"):
            way(lambda: strategy.run(lambda: optimizer.apply_gradients(replica_id() * jnp.ones(2))))()
    with pytest.raises(RuntimeError, match="assigned by one eager replica"):
        strategy.run(lambda: optimizer.state.assign(optimizer.state.value()))
    assert w.numpy().tolist() == [1.0] * 4


def test_gradients_that_are_one_value_for_all_replicas_are_not_added_up():
    strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"], shard_optimizer_state=True)
    with strategy.scope():
        w = rx.Variable(jnp.ones(4))
        optimizer = rx.Optimizer(optax.sgd(1.0), w)
    gradient = jnp.arange(4.0)
    rx.function(lambda: strategy.run(lambda: optimizer.apply_gradients(gradient)))()
    strategy.run(lambda: optimizer.apply_gradients(gradient))
    assert w.numpy().tolist() == [1.0, -1.0, -3.0, -5.0]


# Micro-batches.


@over(plain=True, one_of_each=True)
@ways
@pytest.mark.parametrize("mean", last([False, True]), ids=last(["sum", "mean"]))
def test_micro_batches_come_to_the_same(make, way, mean):
    strategy = make()
    op = "MEAN" if mean else "SUM"
    with strategy.scope():
        params = rx.Variable(START)
        optimizer = rx.Optimizer(optax.adam(0.05), params, reduce_op=op)

    def loss(params, x, y, whole):
        share = len(x) if mean else whole
        return sum_of_squares(params, x, y) / share, {"rows": jnp.ones(2, jnp.int32) * len(x), "mean": jnp.mean(x, 0)}

    gradient = rx.accumulate_gradients(jax.jit(jax.value_and_grad(loss, has_aux=True)), 2, op)

    def replica(x, y):
        (value, aux), gradients = gradient(params.value(), x, y, whole=len(X))
        optimizer.apply_gradients(gradients)
        return value, aux

    step = way(lambda element: strategy.run(replica, args=element))
    for _ in range(STEPS):
        value, aux = step(batch(strategy))
    same(params.numpy(), by_hand(adam))
    rows = [part.shape[0] for part in parts_of(strategy, batch(strategy)[0])]
    assert [part.tolist() for part in parts_of(strategy, aux["rows"])] == [[n / 2 if mean else n] * 2 for n in rows]
    means = [np.asarray(part).mean(0) * (1 if mean else 2) for part in parts_of(strategy, batch(strategy)[0])]
    same([np.asarray(part) for part in strategy.experimental_local_results(aux["mean"])], means)


def parts_of(strategy, value):
    return strategy.experimental_local_results(value)


@ways
def test_micro_batches_with_a_tape_and_collectives(way):
    """The tape's gradients need no parameters among the arguments; means over all replicas stand in the loss."""
    strategy = mirrored(2)
    with strategy.scope():
        w, b = rx.Variable(START["w"]), rx.Variable(START["b"])
        optimizer = rx.Optimizer(optax.sgd(0.1), [w, b])

    def gradients_of(x, y):
        with rx.GradientTape() as tape:
            middle = ctx().all_reduce("MEAN", jnp.mean(x, 0))
            loss = sum_of_squares({"w": w.value(), "b": b.value()}, x - middle, y) / len(X)
        return loss, tape.gradient(loss, [w, b])

    def replica(x, y):
        loss, gradients = rx.accumulate_gradients(gradients_of, 2, batch_argnums=(0, 1))(x, y)
        optimizer.apply_gradients(gradients)
        return loss

    loss = strategy.reduce("SUM", way(lambda element: strategy.run(replica, args=element))(batch(strategy)), axis=None)
    # Micro-batch i has rows 2i, 2i + 1 of the first replica and 4 + 2i, 5 + 2i of the second.
    rows = np.stack([X[[2 * i, 2 * i + 1, 4 + 2 * i, 5 + 2 * i]] for i in range(2)])
    centred = jnp.concatenate(rows - rows.mean(1, keepdims=True))
    targets = jnp.concatenate([Y[[2 * i, 2 * i + 1, 4 + 2 * i, 5 + 2 * i]] for i in range(2)])
    value, expected = jax.value_and_grad(sum_of_squares)(START, centred, targets)
    same({"w": w.numpy(), "b": b.numpy()}, jax.tree.map(lambda p, g: p - 0.1 * g / len(X), START, expected))
    np.testing.assert_allclose(loss, value / len(X), rtol=1e-5)


@ways
def test_micro_batches_assign_variables_one_after_the_other(way):
    strategy = mirrored(2)
    with strategy.scope():
        seen = rx.Variable(
            0.0, synchronization=rx.VariableSynchronization.ON_READ, aggregation=rx.VariableAggregation.SUM
        )

    def noisy(x):
        seen.assign(seen * 2.0 + x.sum())
        return x.sum() + seen.value()

    def replica(x):
        return rx.accumulate_gradients(noisy, 3, batch_argnums=0)(x)

    (x,) = strategy.experimental_distribute_dataset([np.arange(6, dtype=np.float32)])
    found = way(lambda x: strategy.run(replica, args=(x,)))(x)
    assert [float(part) for part in found.values] == [0 + 1 + 2 + (0 + 1 + 4), 3 + 4 + 5 + (3 + 10 + 25)]
    assert [float(part) for part in seen.values] == [0 * 4 + 1 * 2 + 2, 3 * 4 + 4 * 2 + 5]


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["one by one", "looped"])
def test_rows_of_micro_batches_are_added_up_where_they_belong(jit):
    def rows(indices):
        return IndexedSlices(jnp.ones((2, 3)), indices, (5, 3))

    total = jit(rx.accumulate_gradients(rows, 2, batch_argnums=0))(jnp.array([0, 1, 3, 1]))
    assert total[:, 0].tolist() == [1, 2, 0, 1, 0]


def test_micro_batches_need_one_reduction_and_less_memory():
    strategy = mirrored(2)
    with strategy.scope():
        params = rx.Variable({"a": jnp.ones((16, 64)) / 16, "b": jnp.ones((64, 1)) / 64})
        optimizer = rx.Optimizer(optax.sgd(0.1), params)

    def loss(p, x):
        return jnp.sum(jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"]))

    def compiled_with(micro_batches):
        gradient = rx.accumulate_gradients(jax.grad(loss), micro_batches)

        @rx.function
        def step(x):
            strategy.run(lambda x: optimizer.apply_gradients(gradient(params.value(), x)), args=(x,))

        return step.lower(per_replica(strategy, [np.ones((4096, 16), np.float32)] * 2)).compile()

    one, four = compiled_with(1), compiled_with(4)
    for program in (one, four):
        assert [one.kind for one in hlo.collectives(program.as_text())] == ["all-reduce"]
    # One activation of 4096 x 64 numbers takes 1 MiB; of a fourth of the rows, 256 KiB.
    assert four.memory_analysis().temp_size_in_bytes < 0.5 * one.memory_analysis().temp_size_in_bytes


def test_accumulate_gradients_refuses_wrong_arguments():
    def refused(error, match, *args, fn=lambda w, *x: w, micro_batches=2, **options):
        with pytest.raises(error, match=match):
            rx.accumulate_gradients(fn, micro_batches, **options)(*args)

    x, w = jnp.ones((4, 2)), jnp.float32(1)
    refused(ValueError, "at least 1, got 0", micro_batches=0)
    absent = r"names the positional arguments \[2\], .* and there are 2"
    refused(rx.InvalidArgumentError, absent, w, x, batch_argnums=(1, 2))
    refused(TypeError, "got True", micro_batches=True)
    refused(TypeError, "is an int, got 2.0", micro_batches=2.0)
    refused(TypeError, "is a function.*got 3", fn=3)
    refused(TypeError, "got 'x'", batch_argnums="x")
    refused(ValueError, "'MAX' is not a valid ReduceOp", reduce_op="max")
    refused(rx.InvalidArgumentError, r"into 3 micro-batches.*\(4, 2\), \(5,\)", w, x, jnp.ones(5), micro_batches=3)
    refused(rx.InvalidArgumentError, r"shape \(\) cannot", w, x, jnp.float32(8))
    refused(TypeError, "by keyword.*", w, x, 8)
    refused(rx.InvalidArgumentError, "nothing to split.*batch_argnums=0", x)
    refused(TypeError, "returns arrays, got 'text'", w, x, fn=lambda w, x: "text")
    refused(rx.InvalidArgumentError, "bool cannot be added up", w, x, fn=lambda w, x: x > 0)
    with pytest.raises(TypeError, match="returns arrays, got 'text'"):
        jax.jit(rx.accumulate_gradients(lambda w, x: "text", 2))(w, x)


def test_sums_of_micro_batches_are_kept_in_float32():
    x = jnp.asarray([2048.0] + [1.0] * 7, jnp.float16)  # 2048 + 1 is 2048 in float16

    def total(x):
        return jnp.sum(x)

    accumulated = rx.accumulate_gradients(total, 8, batch_argnums=0)
    for one in (accumulated(x), jax.jit(accumulated)(x)):
        assert one.dtype == jnp.float16 and float(one) == 2056.0  # of 2055, which is no float16
