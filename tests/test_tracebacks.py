"""What errors and warnings show of a user's program: its own frames, lines, functions and arguments."""

from __future__ import annotations

import os
import tempfile
import traceback

import jax
import jax.numpy as jnp
import pytest
from test_ways import mirrored

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


PLACES = [
    in_run,
    in_a_function,
    in_a_converted_function,
    in_run_in_a_function,
    in_a_merge_function,
    in_a_dataset,
    in_a_distributed_dataset,
    in_a_gradient,
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
    assert any(file.endswith("_spmd.py") for file in files) and os.path.dirname(jax.__file__) in " ".join(files)


def test_rewritten_code_leaves_no_files_and_has_the_users_lines(tmp_path, monkeypatch):
    def branch(x, scale=2):
        if x > 0:
            x = x * scale
        return x

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    program = rx.function(branch, autograph=True).lower(jnp.float32(1)).as_text(debug_info=True)
    assert not list(tmp_path.iterdir())
    assert f'{os.path.basename(__file__)}":{branch.__code__.co_firstlineno + 2}:' in program
