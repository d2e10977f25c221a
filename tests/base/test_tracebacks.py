"""What errors and warnings show of a user's program: its own frames, lines, functions and arguments."""

from __future__ import annotations

import os
import tempfile
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from strategies import mirrored

import replicax as rx


def fails(*_):
    raise KeyError("mine") from ValueError("the cause")


def in_run():
    strategy = mirrored(2)
    strategy.run(lambda: fails())


def in_a_function():
    rx.function(lambda x: fails(x))(jnp.ones(2))


def in_a_converted_function():
    def step(x):
        for _ in range(2):
            if x > 0:
                x = fails(x)
        return x

    rx.function(step, autograph=True)(jnp.float32(1))


def in_run_in_a_function():
    strategy = mirrored(2)
    rx.function(lambda x: strategy.run(lambda y: fails(y), args=(x,)))(jnp.ones(2))


def in_a_merge_function():
    strategy = mirrored(2)
    strategy.run(lambda: rx.get_replica_context().merge_call(lambda strategy, x: fails(x), args=(1,)))


def in_a_dataset():
    next(iter(rx.data.Dataset.range(2).map(lambda x: fails(x))))


def in_a_distributed_dataset():
    strategy = mirrored(2)
    for _ in strategy.experimental_distribute_dataset(rx.data.Dataset.range(2).map(lambda x: fails(x))):
        pass


def in_a_gradient():
    with rx.GradientTape() as tape:
        x = rx.Variable(1.0)
        y = rx.function(lambda: fails(x))()
    tape.gradient(y, x)


def in_a_function_that_is_shown():
    rx.show(rx.function(lambda x: fails(x)), jnp.ones(2))


def in_a_concrete_function():
    rx.function(lambda x: fails(x)).get_concrete_function(jnp.ones(2))


def in_a_function_that_is_lowered():
    rx.function(lambda x: fails(x)).lower(jnp.ones(2))


def in_a_plan():
    rx.plan(rx.function(lambda x: fails(x)), jnp.ones(2), topology=2)


PLACES = [
    in_run,
    in_a_function,
    in_a_converted_function,
    in_run_in_a_function,
    in_a_merge_function,
    in_a_dataset,
    in_a_distributed_dataset,
    in_a_gradient,
    in_a_function_that_is_shown,
    in_a_concrete_function,
    in_a_function_that_is_lowered,
    in_a_plan,
]


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_a_traceback_has_the_users_frames_alone(place):
    with pytest.raises(KeyError) as caught:
        place()
    frames = traceback.extract_tb(caught.tb)
    assert {frame.filename for frame in frames} == {__file__}
    names = [frame.name for frame in frames[1:]]
    assert names[0] == place.__name__ and names[-1] == "fails" and len(names) <= 6
    assert repr(caught.value.__cause__) == "ValueError('the cause')"


def test_the_cause_of_an_error_has_the_users_frames_alone():
    @rx.function
    def step(x):
        try:
            mirrored(2).run(lambda: fails())
        except KeyError as error:
            raise TypeError("found") from error

    with pytest.raises(TypeError, match="found") as caught:
        step(jnp.ones(2))
    assert {frame.filename for frame in traceback.extract_tb(caught.value.__cause__.__traceback__)} == {__file__}


def test_jax_traceback_filtering_off_shows_all_frames():
    jax.config.update("jax_traceback_filtering", "off")
    try:
        with pytest.raises(KeyError) as caught:
            in_run_in_a_function()
    finally:
        jax.config.update("jax_traceback_filtering", "auto")
    files = {frame.filename for frame in traceback.extract_tb(caught.tb)}
    assert any(file.endswith("compiled.py") for file in files) and os.path.dirname(jax.__file__) in " ".join(files)


def test_converted_code_leaves_no_files_and_keeps_line_numbers(tmp_path, monkeypatch):
    def branch(x, scale=2):
        if x > 0:
            x = x * scale
        return x

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    program = rx.function(branch, autograph=True).lower(jnp.float32(1)).as_text(debug_info=True)
    assert not list(tmp_path.iterdir())
    assert f'{os.path.basename(__file__)}":{branch.__code__.co_firstlineno + 2}:' in program


# Errors while tracing, and warnings.


def condition(x, n):
    return n if x > 0 else x


def number(batch, *more, scale):
    return float(batch["image"]) + scale


def loop(x, *more):
    return [x for _ in range(more[1])]


def as_numpy(x):
    return np.asarray(x[0])


def index(x):
    return [1, 2][x]


class Model:
    @rx.function
    def call(self, x):
        return 1 if x else 2


def in_a_replica(x):
    return mirrored(2).run(condition, args=(x,), kwargs={"n": x})


X = np.int32(1)
NEEDS_VALUES = [
    (rx.function(condition), (X, 3), {}, "condition", None, "autograph=True"),
    (rx.function(number), ({"image": X, "label": X}, X), {"scale": X}, "number", "batch['image']", "return it"),
    (rx.function(loop), (X, X, X), {}, "loop", "more[1]", "tf.range"),
    (rx.function(as_numpy), ([X],), {}, "as_numpy", "x[0]", "run_functions_eagerly"),
    (rx.function(index), (X,), {}, "index", "x", "return it"),
    (Model().call, (X,), {}, "call", "x", "autograph=True"),
    (rx.function(in_a_replica), (X,), {}, "condition", None, "tf.function"),
    (jax.jit(in_a_replica), (X,), {}, "condition", None, "tf.function"),
]


@pytest.mark.parametrize(("function", "args", "kwargs", "name", "argument", "advice"), NEEDS_VALUES)
def test_an_error_while_tracing_names_the_users_function_and_argument(function, args, kwargs, name, argument, advice):
    args, kwargs = jax.tree.map(lambda leaf: jnp.asarray(leaf) if leaf is X else leaf, (args, kwargs))
    with pytest.raises((jax.errors.JAXTypeError, jax.errors.JAXIndexError)) as caught:
        function(*args, **kwargs)
    text = "\n".join([str(caught.value), *caught.value.__notes__])
    assert f"while tracing the function {name} at {__file__}:" in text and os.path.dirname(rx.__file__) not in text
    assert argument is None or f"the value of the argument {argument}." in text
    assert advice in text


def test_a_replica_function_is_named_with_its_arguments():
    def replica_step(batch, scale):
        return [1, 2][batch["i"]] * scale

    with pytest.raises(jax.errors.JAXTypeError) as caught:
        rx.function(lambda x: mirrored(2).run(replica_step, args=({"i": x},), kwargs={"scale": 2}))(
            mirrored(2).experimental_distribute_values_from_function(lambda context: jnp.int32(1))
        )
    place = f"{__file__}:{replica_step.__code__.co_firstlineno}"
    assert f"the function replica_step at {place} for jit" in str(caught.value)
    assert "the argument batch['i']." in str(caught.value)


def test_operations_have_the_users_lines():
    """In JAX's errors, and in programs, where profilers find them."""
    strategy = mirrored(2)
    with strategy.scope():
        variable = rx.Variable(jnp.ones(2))

    def replica_step():
        y = variable * 2
        return 1 if y[0] > 2 else 2

    def step():
        return strategy.run(replica_step)

    first = replica_step.__code__.co_firstlineno
    with pytest.raises(jax.errors.JAXTypeError) as caught:
        rx.function(step)()
    lines = [line for line in str(caught.value).splitlines() if "from line" in line]
    assert [line.split(":")[1] for line in lines if f"{__file__}:" in line] == [str(first + 1), str(first + 2)]

    text = rx.function(lambda x: strategy.run(lambda: variable * x)).lower(jnp.ones(2)).as_text(debug_info=True)
    assert __file__ in text and "/replicax/_" not in text


def test_the_warning_of_a_function_driven_from_the_host_is_about_its_line():
    def step(x):
        y = x + 1
        return y * [1, 2, 3][int(np.asarray(0) + float_of(y))]

    def float_of(y):
        return float.__add__(y.item(), 0.0)

    with pytest.warns(UserWarning, match="step needs the value of a tensor at") as caught:
        assert rx.function(step, autograph=True)(jnp.float32(0)) == 2
    line = float_of.__code__.co_firstlineno + 1
    assert (caught[0].filename, caught[0].lineno) == (__file__, line) and f"{__file__}:{line}" in str(caught[0].message)
