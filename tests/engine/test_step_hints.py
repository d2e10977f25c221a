"""A function whose short steps are called one by one says once how much `steps_per_call` would gain."""

from __future__ import annotations

import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from strategies import SUM, mirrored, one_device

import replicax as rx
from replicax._engine import step_hints

ENOUGH = step_hints.FIRST + step_hints.FREE + step_hints.WAITED + 10


@pytest.fixture
def hints(capfd, monkeypatch):
    """Returns the hints printed since the last time. How busy the machine is does not decide about them."""
    monkeypatch.setattr(step_hints, "_on", True)
    monkeypatch.setattr(step_hints, "LEAST", 0.0)
    return lambda: [line for line in capfd.readouterr().err.splitlines() if "takes one step a call" in line]


def batches(strategy, count=ENOUGH):
    data = rx.data.Dataset.from_tensor_slices(np.ones((2 * count, 3), np.float32)).batch(2)
    return strategy.experimental_distribute_dataset(data)


def training(strategy):
    with strategy.scope():
        w = rx.Variable(np.zeros(3, np.float32), aggregation=rx.VariableAggregation.SUM)
    return w, lambda x: w.assign_add(jnp.sum(x, axis=0) / 3)


@pytest.mark.parametrize("make", [lambda: mirrored(2), one_device], ids=["mirrored", "one device"])
def test_a_loop_around_calls_gets_one_line_with_its_place_and_its_figures(make, hints):
    strategy = make()
    w, replica = training(strategy)

    @rx.function
    def train_step(x):
        strategy.run(replica, args=(x,))

    for _ in range(2):
        for x in batches(strategy):
            train_step(x)
    (line,) = hints()
    number = train_step.python_function.__code__.co_firstlineno + 6
    figures = r"takes (\d+\.\d\d) ms: the devices compute for (\d+\.\d\d) ms, and the host takes (\d+\.\d\d) ms"
    assert line.startswith(f"replicax: {__file__}:{number}: `train_step` takes one step a call, 341 so far. ")
    step, _, host = map(float, re.search(figures, line).groups())
    assert step > 0 and host <= step
    assert "Have train_step call next(iterator) in place of taking its batch as an argument" in line
    assert "`steps_per_call=32`" in line and re.search(r"at least about \d+\.\d times as fast", line)
    assert w.numpy().tolist() == pytest.approx([ENOUGH * 4 / 3] * 3, rel=1e-4)


def test_a_loop_that_the_host_drives_gets_the_line_of_its_body(hints):
    strategy = mirrored(2)
    _, replica = training(strategy)

    @rx.function(autograph=True)
    def epoch(dataset):
        for x in dataset:
            strategy.run(replica, args=(x,))
            strategy.run(lambda x: replica(x + 1), args=(x,))

    for _ in range(2):
        epoch(batches(strategy))
    (line,) = hints()
    number = epoch.python_function.__code__.co_firstlineno + 3
    assert line.startswith(f"replicax: {__file__}:{number}: `epoch` takes one step a call")
    assert "Make the body of the loop a function of its own that calls next(iterator)" in line
    assert re.search(r"between \d+\.\d and \d+\.\d times as fast", line)


def test_a_function_that_calls_next_is_hinted_to_use_steps_per_call(hints):
    strategy = mirrored(2)
    iterator, total = iter(batches(strategy)), rx.Variable(0.0)
    step = rx.function(lambda: total.assign_add(strategy.reduce(SUM, next(iterator), axis=(0, 1))))
    for _ in range(ENOUGH):
        step()
    (line,) = hints()
    assert "Declare function with `steps_per_call=32`." in line


def test_no_hint_for_short_programs_several_steps_and_plain_functions(hints):
    strategy = mirrored(2)
    _, replica = training(strategy)
    step = rx.function(lambda x: strategy.run(replica, args=(x,)))
    for x in batches(strategy, step_hints.FIRST):
        step(x)
    several = rx.function(lambda iterator: strategy.run(replica, args=(next(iterator),)), steps_per_call=2)
    iterator = iter(batches(strategy, 2 * ENOUGH))
    for _ in range(ENOUGH):
        several(iterator)
    double = rx.function(lambda x: 2 * x)  # which nobody may be able to call for several arguments at once
    printing = rx.function(lambda x: jax.debug.callback(lambda x: None, x))
    for _ in range(ENOUGH):
        double(jnp.ones(3))
        printing(jnp.ones(3))
    assert hints() == []


def test_no_hint_when_hints_are_turned_off(hints):
    rx.config.hint_short_steps(False)
    step = rx.function(lambda: jnp.ones(()))
    for _ in range(ENOUGH):
        step()
    assert hints() == [] and step._calls.step_hint is None


@pytest.mark.parametrize("milliseconds, hinted", [(5, False), (0, True)])
def test_no_hint_for_steps_with_long_device_time(hints, monkeypatch, milliseconds, hinted):
    """By a clock that goes on while the host waits for a device, and 20 us whenever it is read."""
    seconds = [0.0]

    def passes(more):
        seconds[0] += more
        return seconds[0]

    def waits(values):
        passes(1e-3 * milliseconds)
        return jax.block_until_ready(values)

    monkeypatch.setattr(step_hints, "time", types.SimpleNamespace(perf_counter=lambda: passes(2e-5)))
    monkeypatch.setattr(step_hints, "jax", types.SimpleNamespace(**{**vars(jax), "block_until_ready": waits}))
    monkeypatch.setattr(step_hints, "LEAST", 1.2)
    monkeypatch.setattr(step_hints, "FIRST", 20)
    strategy = mirrored(2)
    total, iterator = rx.Variable(0.0), iter(batches(strategy))
    step = rx.function(lambda: total.assign_add(strategy.reduce(SUM, next(iterator), axis=(0, 1))))
    for _ in range(80):
        step()
    assert len(hints()) == hinted and step._calls.step_hint is None


def test_step_hints_do_not_change_results(hints):
    def trained(on):
        rx.config.hint_short_steps(on)
        strategy = mirrored(2)
        with strategy.scope():
            w = rx.Variable(np.ones(3, np.float32), aggregation=rx.VariableAggregation.MEAN)
        step = rx.function(lambda x: strategy.run(lambda x: w.assign(w.value() * 1.001 + x.sum(0) / 7), args=(x,)))
        for x in batches(strategy):
            step(x)
        return w.numpy().tobytes()

    assert trained(True) == trained(False) and len(hints()) == 1
