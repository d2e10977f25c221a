"""Compiles that take long are told in one line."""

from __future__ import annotations

import re

import jax.numpy as jnp
import numpy as np
import pytest
from strategies import mirrored

import replicax as rx
from replicax._engine import program
from replicax._job import state


@pytest.fixture
def told(capfd, monkeypatch):
    """The lines since the last time, without the seconds; every compile is told."""
    monkeypatch.setattr(program, "_limit", 0.0)

    def lines():
        return [re.sub(r"in \d+\.\d s", "in _ s", line) for line in capfd.readouterr().err.splitlines()]

    return lines


def test_a_compile_names_the_function_its_inputs_and_what_has_changed(told):
    @rx.function
    def train_step(x, number, y=None):
        return x.sum() * number + (0 if y is None else y["labels"].sum())

    for rows in (32, 32, 7):
        train_step(jnp.ones((rows, 4)), 2, {"labels": jnp.ones(rows, jnp.int32)})
    train_step(jnp.ones((7, 4)), 3, {"labels": jnp.ones(7, jnp.int32)})
    assert told() == [
        "replicax: compiled train_step in _ s for (float32[32,4], int32[32])",
        "replicax: compiled train_step in _ s for (float32[7,4], int32[7]). The last time, argument 0 changed from an "
        "array of shape (32, 4) and dtype float32 to an array of shape (7, 4) and dtype float32.",
        "replicax: compiled train_step in _ s for (float32[7,4], int32[7]). The last time, argument 1 changed from 2 "
        "to 3.",
    ]


def test_compiles_for_elements_and_replicas_and_several_steps(told):
    strategy = mirrored(2)
    rows = rx.data.Dataset.from_tensor_slices(np.ones((12, 3), np.float32)).batch(8)
    iterator = iter(strategy.experimental_distribute_dataset(rows))

    @rx.function
    def epoch_step():
        return strategy.run(lambda x: x.sum(), args=(next(iterator),))

    epoch_step()
    epoch_step()
    numbers = iter(rx.data.Dataset.range(8))
    rx.function(lambda: next(numbers) + 1, steps_per_call=4)()
    lines = told()
    assert lines[0] == "replicax: compiled epoch_step in _ s for (float32[4,3] per replica)"
    assert lines[1] == (
        "replicax: compiled epoch_step in _ s for (float32[2,3] per replica). The elements of a dataset differ from "
        "those of the last time in shape, dtype or structure: there was float32[4,3] per replica where float32[2,3] "
        "per replica is now."
    )
    assert re.fullmatch(r"replicax: compiled \S+, 4 steps a call, in _ s for \(int\d\d\[\]\)", lines[2])


def test_compile_reports_can_be_switched_off_and_skip_short_compiles(told, run_python, monkeypatch):
    step = rx.function(lambda x: x + 1)
    rx.config.log_compiles(None)
    step(jnp.ones(1))
    rx.config.log_compiles(1e6)  # seconds
    step(jnp.ones(2))
    assert told() == []
    rx.config.log_compiles(0)
    step(jnp.ones(3))
    assert len(told()) == 1
    with pytest.raises(ValueError, match="not below 0, or None; got -1"):
        rx.config.log_compiles(-1)
    monkeypatch.setattr(state, "_job", state.Job((("worker", 0), ("worker", 1)), ("a:1", "b:1"), 1))
    step(jnp.ones(4))
    assert told() == []  # the first worker of a job says it
    program = """
    import jax.numpy as jnp, replicax as rx
    rx.function(lambda x: x + 1)(jnp.ones(3))
    """
    for value, count in [("0", 1), ("off", 0)]:
        done = run_python(program, env={"REPLICAX_LOG_COMPILES": value, "PYTHONWARNINGS": "error"})
        assert done.returncode == 0 and done.stderr.count("replicax: compiled") == count, done.stderr
