"""`rx.Optimizer`: the same parameters as optax on the whole batch, for any number of replicas, both ways."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_ways import (
    SUM,
    a_few_strategies,
    ctx,
    few,
    mirrored,
    one_device,
    packing,
    parts,
    per_replica,
    replica_id,
    several,
    several_mirroring,
    strategies,
    ways,
)

import replicax as rx

rng = np.random.default_rng(0)
X = rng.normal(size=(8, 3)).astype(np.float32)
Y = rng.normal(size=(8, 2)).astype(np.float32)
START = {"w": rng.normal(size=(3, 2)).astype(np.float32), "b": np.zeros(2, np.float32)}
STEPS = 4

transformations = pytest.mark.parametrize(
    "make_optax",
    few(
        [
            lambda: optax.sgd(0.1),
            lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
            lambda: optax.adam(0.05),
            lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(optax.linear_schedule(0.1, 0.01, 4))),
        ]
    ),
    ids=few(["sgd", "momentum", "adam", "chain"]),
)


def sum_of_squares(params, x, y):
    return jnp.sum((x @ params["w"] + params["b"] - y) ** 2)


def by_hand(transformation, steps=STEPS):
    """Optax on the whole batch, without replicax."""
    params, state = START, transformation.init(START)
    for _ in range(steps):
        gradients = jax.grad(lambda p: sum_of_squares(p, X, Y) / len(X))(params)
        updates, state = transformation.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    return jax.tree.map(np.asarray, params)


def batch(strategy):
    (element,) = strategy.experimental_distribute_dataset([(X, Y)])
    return element


def same(got, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), got, expected)


@a_few_strategies
@ways
@transformations
@pytest.mark.parametrize("mean", [False, True], ids=["sum", "mean"])
def test_a_pytree_variable(make, way, make_optax, mean):
    """Fact 164: gradients summed of losses over the global batch, or averaged of means over the parts."""
    strategy = make()
    with strategy.scope():
        params = rx.Variable(START)
        optimizer = rx.Optimizer(make_optax(), params, reduce_op="MEAN" if mean else "SUM")

    def replica(x, y):
        share = x.shape[0] if mean else len(X)
        loss, gradients = jax.value_and_grad(lambda p: sum_of_squares(p, x, y) / share)(params.value())
        optimizer.apply_gradients(gradients)
        return loss

    step = way(lambda element: strategy.run(replica, args=element))
    for _ in range(STEPS):
        step(batch(strategy))
    same(params.numpy(), by_hand(make_optax()))
    for component in getattr(params, "values", (params,)):
        same(component.numpy(), params.numpy())


@a_few_strategies
@ways
@pytest.mark.parametrize("form", few(["list", "dict", "pairs", "zip", "nested"]))
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
    same({"w": w.numpy(), "b": b.numpy()}, by_hand(optax.adam(0.05)))


@strategies
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


@several_mirroring
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
        optimizer.apply_gradients(jax.grad(lambda p: sum_of_squares(p, X, Y) / len(X))(params.value()))

    run = way(step)
    for _ in range(STEPS):
        run()
    same(params.numpy(), by_hand(optax.adam(0.05)))


@packing
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
    optimizer = rx.Optimizer(optax.sgd(0.1), {"w": w})
    for way in (lambda f: f, rx.function):
        with pytest.raises(ValueError, match="structure"):
            way(lambda: mirrored(2).run(lambda: optimizer.apply_gradients([replica_id()])))()
        with pytest.raises(ValueError, match="other:0 is not among the variables of this optimizer"):
            way(lambda: mirrored(2).run(lambda: optimizer.apply_gradients([(replica_id(), other)])))()
    with pytest.raises(ValueError, match="'MAX' is not a valid ReduceOp"):
        rx.Optimizer(optax.sgd(0.1), w, reduce_op="max")
    assert float(w) == 1.0


@several_mirroring
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


class Params(NamedTuple):
    w: object
    b: object


@strategies
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
