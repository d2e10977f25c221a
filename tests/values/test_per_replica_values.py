"""PerReplica values where plain ones are expected, and those that users make of components."""

import copy
import operator
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from replicax._values import mesh


def mirrored():
    return rx.MirroredStrategy(["GPU:0", "GPU:1"])


def total():
    return rx.get_replica_context().all_reduce("SUM", jnp.float32(1.25))


USES = {
    "A float": float,
    "An int": int,
    "A complex number": complex,
    "A float, for numpy": lambda value: np.asarray(value, np.float32),
    "Text of the format '.3f'": lambda value: f"{value:.3f}",
}


@pytest.mark.parametrize("wanted", USES)
def test_a_number_or_array_of_a_per_replica_value_says_what_to_call(wanted):
    strategy = mirrored()
    same, use = strategy.run(total), USES[wanted]
    different = strategy.experimental_distribute_values_from_function(lambda c: jnp.arange(2.0))
    with pytest.raises(TypeError) as caught:
        use(same)
    message = str(caught.value)
    assert message.startswith(wanted.partition(",")[0]) and "here 2.5 each" in message
    assert 'strategy.reduce("MEAN", value, axis=None)' in message
    assert "strategy.experimental_local_results(value)[0]" in message
    assert use(strategy.reduce("MEAN", same, axis=None)) is not None
    assert use(strategy.experimental_local_results(same)[0]) is not None
    with pytest.raises(TypeError, match="^[AT]") as caught:
        use(different)
    assert "each replica. Combine" in str(caught.value)


def test_the_text_and_the_truth_of_a_per_replica_value_are_those_of_any_object():
    """Fact 22: a program may ask `if value:` for None."""
    same = mirrored().run(total)
    assert f"{same}" == str(same) and bool(same) is True and np.asarray(same).dtype == object


@pytest.mark.parametrize("compiled", [False, True])
def test_a_captured_per_replica_value_is_named_in_the_error(compiled):
    strategy = mirrored()
    batch = strategy.experimental_distribute_values_from_function(lambda c: jnp.ones(3))
    state = {"w": [batch]}

    def direct():
        return batch * jnp.ones(3)

    def held():
        return jnp.sum(state["w"][0])

    def number():
        return float(batch)

    class Model:
        weights = batch

        def step(self):
            return jnp.tanh(self.weights)

    cases = [(direct, "`batch`", ValueError), (held, "`state`", ValueError), (number, "`batch`", TypeError)]
    for function, name, kind in [*cases, (Model().step, None, ValueError)]:
        run = lambda function=function: strategy.run(function)  # noqa: E731
        with pytest.raises(kind, match="pass it in args= of strategy.run") as caught:
            (rx.function(run) if compiled else run)()
        if name is not None:
            assert f"the replica function {function.__name__!r}, which takes {name} from outside" in str(caught.value)
            assert f"run(fn, args=({name[1:-1]},))" in str(caught.value)
    with pytest.raises(ValueError, match="while not inside a replica context"):
        jnp.sum(batch)


# What a tensor can be asked for. A PerReplica value answers each with an error, whose text begins so outside of `run`.
OF_A_TENSOR = {
    "unsupported operand type(s) for *: 'PerReplica' and 'int'. It has": lambda p: p * 2,
    "unsupported operand type(s) for -: 'int' and 'PerReplica'. It has": lambda p: 1 - p,
    "unsupported operand type(s) for +: 'float' and 'PerReplica'. It has": lambda p: np.ones(3) + p,
    "unsupported operand type(s) for @: 'PerReplica' and 'PerReplica'. It has": lambda p: p @ p,
    "unsupported operand type(s) for +: 'PerReplica' and 'int'. It has": lambda p: operator.iadd(p, 1),
    "'<' not supported between instances of 'PerReplica' and 'int'. It has": lambda p: p < 2,
    "bad operand type for unary -: 'PerReplica'. It has": operator.neg,
    "bad operand type for abs(): 'PerReplica'. It has": abs,
    "'PerReplica' object is not subscriptable. It has": lambda p: p[0],
    "'PerReplica' object is not iterable. It has": list,
    "argument of type 'PerReplica' is not iterable. It has": lambda p: 1.0 in p,
    "object of type 'PerReplica' has no len(). It has": len,
    "'PerReplica' object has no attribute 'shape'": lambda p: p.shape,
    "'PerReplica' object has no attribute 'mean'": lambda p: p.mean(),
}


def test_using_a_per_replica_value_as_a_tensor_says_what_to_do():
    strategy = mirrored()
    p = strategy.experimental_distribute_values_from_function(lambda c: jnp.ones(3))
    kinds = (TypeError, AttributeError)
    for text, use in OF_A_TENSOR.items():
        with pytest.raises(kinds) as caught:
            use(p)
        assert str(caught.value).startswith(text)
        assert ("strategy.experimental_local_results(value)[0]" in str(caught.value)) == text.endswith("It has")
    for use in (*OF_A_TENSOR.values(), bool):
        for way in (lambda f: f, rx.function):
            with pytest.raises(kinds, match=r"takes `p` from outside.*args=\(p,\)") as caught:
                way(lambda use=use: strategy.run(lambda: use(p)))()
            # Where the value is passed, the same works, or fails as it does for any array.
            way(lambda: strategy.run(lambda p: p * 2, args=(p,)))()
    assert bool(p) is True and not hasattr(p, "shape") and (p == 2) is False


def test_per_replica_values_that_users_make_are_taken_by_compiled_functions():
    strategy, traces = mirrored(), []
    twice = lambda x: x * 2  # noqa: E731

    def everything(value):
        traces.append(1)
        result = strategy.run(twice, args=(value,))
        return strategy.gather(result, 0), strategy.reduce("SUM", value, axis=None), value

    compiled = rx.function(everything)
    one, two = jnp.array([1.0, 2.0]), jnp.array([3.0, 5.0])
    for parts in ([one, two], [two, one], [np.asarray(one), np.asarray(two)]):
        gathered, summed, given = compiled(rx.PerReplica(parts))
        np.testing.assert_array_equal(gathered, 2 * np.concatenate(parts))
        np.testing.assert_array_equal(summed, [4, 7])
        assert [part.tolist() for part in given.values] == [np.asarray(part).tolist() for part in parts]
    assert len(traces) == 1
    on_devices = rx.PerReplica([jax.device_put(one, jax.devices()[0]), jax.device_put(two, jax.devices()[1])])
    np.testing.assert_array_equal(compiled(on_devices)[0], [2, 4, 6, 10])

    @rx.function
    def made_inside(a, b):
        return strategy.run(twice, args=(rx.PerReplica([a, b]),))

    assert [part.tolist() for part in made_inside(one, two).values] == [[2, 4], [6, 10]]
    assert [part.tolist() for part in made_inside(one, jnp.ones(3)).values] == [[2, 4], [2, 2, 2]]
    with pytest.raises(ValueError, match=r"differ in shape or dtype.* replica 0: float32\[2\], replica 1: int32\[2\]"):
        made_inside(jnp.ones(2), jnp.ones(2, jnp.int32))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_made_value_has_a_component_for_each_replica(compiled):
    strategy = mirrored()
    run = lambda value: strategy.run(lambda x: x, args=(value,))  # noqa: E731
    for count, error in ((1, IndexError), (3, ValueError)):  # TensorFlow's classes
        with pytest.raises(error, match=f"with {count} components .* 2 replicas"):
            (rx.function(run) if compiled else run)(rx.PerReplica([jnp.ones(2)] * count))


@pytest.mark.parametrize("compiled", [False, True])
def test_per_replica_values_are_pickled_and_copied_without_their_devices(compiled):
    strategy = mirrored()
    replica = lambda: rx.get_replica_context().replica_id_in_sync_group  # noqa: E731
    value = (rx.function(strategy.run) if compiled else strategy.run)(replica)
    for other in (pickle.loads(pickle.dumps(value)), copy.deepcopy(value), copy.copy(value)):
        assert isinstance(other, rx.PerReplica) and [int(part) for part in other.values] == [0, 1]
        assert int(strategy.reduce("SUM", other, axis=None)) == 1


@pytest.mark.parametrize("number", [2**40 + 1, 1 / 3, 1 / 3 + 1j, np.uint64(2**64 - 1)])
def test_pickled_variables_and_per_replica_values_of_64_bits_load_where_jax_has_32(number):
    with jax.enable_x64(True):
        array = jnp.asarray(number)
        made = [rx.Variable(array), rx.Variable({"a": [array]}), rx.PerReplica([array, array])]
        stored = [pickle.dumps(value, protocol) for value in made for protocol in (2, 5)]
    for value in map(pickle.loads, [*stored, *map(pickle.dumps, made)]):
        value = value.values[0] if isinstance(value, rx.PerReplica) else value.value()
        (leaf,) = jax.tree.leaves(value)
        assert leaf.dtype == np.asarray(number).dtype and leaf.item() == number


def test_components_of_a_result_that_is_still_computed_are_taken_without_a_program(monkeypatch):
    strategy = mirrored()

    def multiplied(x):
        return jax.lax.fori_loop(0, 50, lambda _, y: y @ x / 300, x)

    step = rx.function(lambda x: strategy.run(multiplied, args=(x,)))
    ones = jnp.ones((300, 300))
    step(ones)

    def compiled(block, shape):
        raise AssertionError("which depends on how long the result takes")

    monkeypatch.setattr(mesh, "_part_of_row", compiled)
    for part in strategy.experimental_local_results(step(ones)):
        np.testing.assert_allclose(part, np.ones((300, 300)), rtol=1e-4)


def test_values_are_arguments_of_functions_that_jax_compiles_ahead():
    strategy = mirrored()
    batch = strategy.experimental_distribute_values_from_function(lambda context: jnp.ones((2, 3)))

    def step(x, batch):
        return x + strategy.reduce("SUM", strategy.run(lambda part: part.sum(), args=(batch,)), axis=None)

    compiled = jax.jit(step, donate_argnums=0).lower(jnp.float32(1.0), batch).compile()
    assert float(compiled(jnp.float32(1.0), batch)) == 1.0 + 6.0 * strategy.num_replicas_in_sync


@pytest.mark.parametrize("content", [np.ones((2, 3)), "text", jax.ShapeDtypeStruct((2, 3), jnp.float32)])
def test_what_jax_puts_in_the_place_of_an_array_stays_one_leaf(content):
    strategy = mirrored()
    value = strategy.experimental_distribute_values_from_function(lambda context: jnp.ones(3))
    leaves, structure = jax.tree.flatten(jax.tree.map(lambda array: content, value))
    assert leaves == [content] or leaves[0] is content
    assert structure == jax.tree.structure(value)
