"""`strategy.benchmark`: what it measures, what it leaves as it was, and how the figures are shown."""

from __future__ import annotations

import time
import xml.etree.ElementTree as ET

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from strategies import mirrored, one_device, over, per_replica

import replicax as rx
from replicax._benchmark import hlo, without_communication
from replicax._engine import modes
from replicax._engine.function import program_of
from replicax._report import benchmark as report
from replicax._values import AXIS

SUM = rx.VariableAggregation.SUM


def adding(strategy, start=1.0):
    """A step that adds the mean of the batch to a variable, and returns the sum of the batch."""
    with strategy.scope():
        total = rx.Variable(start, aggregation=SUM)

    @rx.function
    def train_step(x):
        def replica_step(x):
            total.assign_add(jnp.mean(x), read_value=False)
            return jnp.sum(x)

        return strategy.reduce("SUM", strategy.run(replica_step, args=(x,)), axis=None)

    return train_step, total


@over(one_of_each=True)
def test_benchmark_measures_a_step_and_restores_its_variables(make, n):
    strategy = make()
    train_step, total = adding(strategy)
    x = per_replica(strategy, np.ones((n, 3), np.float32))
    figures = strategy.benchmark(train_step, x, rounds=2, steps=2)
    assert float(total) == 1.0
    assert figures.step == "train_step" and figures.strategy == type(strategy).__name__ and figures.replicas == n
    seconds = figures.seconds
    assert seconds["input"] is None and seconds["dispatch"] > 0 and seconds["step"] > 0
    assert seconds["communication"] + seconds["compute"] == pytest.approx(seconds["step"])
    assert set(figures.spread) == {"step", "dispatch", "communication"}
    assert len(figures.devices) >= len(strategy.extended.worker_devices)
    assert {one["kind"] for one in figures.collectives} == {"all-reduce"} and figures.collectives_left == 0
    assert figures.bytes_per_device["variables"] == 4 and figures.bytes_per_device["arguments"] >= 4 + 3 * 4
    # And the step is still the one that communicates.
    assert float(train_step(x)) == 3.0 * n and float(total) == 1.0 + n
    assert train_step.experimental_get_tracing_count() == 1


@pytest.mark.parametrize("make", [one_device, rx.get_strategy])
def test_one_replica_has_no_communication(make):
    train_step, total = adding(make())
    figures = make().benchmark(train_step, jnp.ones(3), rounds=1, steps=1)
    assert figures.seconds["compute"] == figures.seconds["step"] and figures.seconds["communication"] == 0.0
    assert figures.collectives == [] and figures.spread == {} and float(total) == 1.0
    data = rx.data.Dataset.from_tensor_slices(np.ones((6, 3), np.float32))  # which starts anew on the way
    assert make().benchmark(train_step, data, rounds=2, steps=3).seconds["input"] >= 0.0


def test_without_communication_each_replica_takes_its_own_value():
    """In branches, loops, transformed functions, and in sums outside of the replicas."""
    strategy = mirrored(2)

    def replica(x):
        gathered = rx.get_replica_context().all_gather(x, axis=0)
        scattered = lax.psum_scatter(jnp.concatenate([x, x + 10]), AXIS, tiled=True)
        looped = lax.fori_loop(0, 3, lambda _, y: lax.psum(y, AXIS), x)
        chosen = lax.cond(lax.psum(x, AXIS)[0] > 0, lambda: lax.pmax(x, AXIS), lambda: x)
        again = jax.checkpoint(lambda x: jax.jit(lambda x: lax.psum(x, AXIS))(x))(x)
        return [gathered, scattered, looped, chosen, again]

    @rx.function
    def step(x):
        results = strategy.run(replica, args=(x,))
        return results, strategy.reduce("SUM", x_and_all(results), axis=0)

    def x_and_all(results):
        return strategy.run(lambda x: x * 2, args=(results[2],))

    x = per_replica(strategy, np.float32([[1, 2], [3, 4]]))
    program, call = program_of(step, (x,), {})
    alone = program.computing(without_communication.alone(program.jaxpr))
    assert hlo.collectives(alone.lower(call).compile().as_text()) == []
    results, total = alone.run(call, (), taped=False)
    shown = [[np.asarray(part).tolist() for part in value.values] for value in results]
    first, second = [1.0, 2.0], [3.0, 4.0]
    assert shown[0] == [first * 2, second * 2]  # as large as what is gathered
    assert shown[1:] == [[first, second]] * 4
    assert float(total) in (6.0, 14.0)  # one replica's part
    right, total = step(x)
    assert np.asarray(right[2].values[0]).tolist() == [16.0, 24.0] and float(total) == 2 * 2 * 40.0


def test_collectives_inserted_by_xla_are_counted_and_kept(monkeypatch):
    """Here those of values that are put together outside of the replicas."""
    strategy = mirrored(2)
    step = rx.function(lambda x: strategy.gather(strategy.run(lambda x: x + 1, args=(x,)), axis=0) * 2)
    figures = strategy.benchmark(step, per_replica(strategy, np.ones((2, 4), np.float32)), rounds=1, steps=1)
    assert figures.collectives_left == len(figures.collectives) > 0
    assert figures.seconds["compute"] is None and figures.seconds["communication"] is None
    assert "cannot be taken out" in str(figures)


def batches(count, wait=0.0):
    for number in range(count):
        time.sleep(wait)
        yield np.full(4, number, np.float32)


def test_the_wait_for_input_is_what_a_slow_dataset_adds():
    strategy = mirrored(2)
    train_step, total = adding(strategy)
    slow = rx.data.Dataset.from_generator(lambda: batches(7, 0.02), output_signature=rx.TensorSpec([4], jnp.float32))
    figures = strategy.benchmark(train_step, slow, rounds=2, steps=3)
    assert 0.01 < figures.seconds["input"] < 0.2
    assert float(total) == 1.0


@pytest.mark.parametrize("inside", [False, True])
def test_benchmark_gives_elements_back_to_the_iterator(inside):
    """It is the batch, or the step takes elements of it itself."""
    strategy = mirrored(2)
    train_step, total = adding(strategy)
    next_step = rx.function(lambda iterator: train_step(next(iterator)))
    iterator = iter(strategy.experimental_distribute_dataset(list(batches(40))))
    next(iterator)
    given = (next_step, (iterator,)) if inside else (train_step, iterator)
    figures = strategy.benchmark(*given, rounds=2, steps=3)
    assert figures.seconds["input"] is not None and float(total) == 1.0
    assert [float(strategy.reduce("SUM", x, axis=0)) for x in iterator] == [4.0 * number for number in range(1, 40)]


def test_batches_of_another_size_are_left_out():
    strategy = mirrored(2)
    train_step, _ = adding(strategy)
    dataset = rx.data.Dataset.from_tensor_slices(np.ones(10, np.float32)).batch(4)
    figures = strategy.benchmark(train_step, dataset, rounds=2, steps=3)
    assert figures.seconds["input"] is not None and train_step.experimental_get_tracing_count() == 1


def test_benchmark_refuses_steps_it_cannot_measure():
    strategy = mirrored(2)
    train_step, total = adding(strategy)
    x = per_replica(strategy, np.ones((2, 3), np.float32))
    with pytest.raises(ValueError, match="`rounds` is a whole number, at least 1; got 0"):
        strategy.benchmark(train_step, x, rounds=0)
    with pytest.raises(RuntimeError, match="no program of its own"):
        dataset = strategy.experimental_distribute_dataset(list(batches(2)))
        strategy.benchmark(rx.function(lambda x: [x.values[0] for x in dataset]), x)
    with pytest.raises(RuntimeError, match="cross-replica context"):
        strategy.run(lambda: strategy.benchmark(train_step, x))
    with pytest.raises(RuntimeError, match="runs its step, which cannot be done while another function is traced"):
        rx.function(lambda x: strategy.benchmark(train_step, x))(x)
    with pytest.raises(TypeError, match="is of a function, the step; got None"):
        strategy.benchmark(None, x)
    with pytest.raises(ValueError, match="has no elements"):
        strategy.benchmark(train_step, rx.data.Dataset.from_tensor_slices(np.ones(0, np.float32)).batch(2))
    iterator = iter(strategy.experimental_distribute_dataset(list(batches(3))))
    with pytest.raises(ValueError, match="too few elements for a benchmark"):
        strategy.benchmark(train_step, iterator, rounds=2, steps=3)
    with pytest.raises(ValueError, match="takes 3 steps"):
        strategy.benchmark(rx.function(lambda i: train_step(next(i)), steps_per_call=3), (iterator,))
    with pytest.raises(ValueError, match="takes 2 elements a call from iterators itself, of which .* has 1 to give"):
        strategy.benchmark(lambda i: [train_step(next(i)) for _ in range(2)], (iterator,))
    with pytest.raises(ValueError, match="takes 1 elements a call from iterators itself, of which .* has 0 to give"):
        strategy.benchmark(lambda: train_step(next(iterator)), ())
    modes.run_functions_eagerly(True)
    try:
        with pytest.raises(RuntimeError, match="Functions run eagerly now"):
            strategy.benchmark(train_step, x)
    finally:
        modes.run_functions_eagerly(False)
    assert len(list(iterator)) == 3 and float(total) == 1.0
    with pytest.raises(ValueError, match="train_step runs 2 replicas of another strategy.* has 1"):
        one_device().benchmark(train_step, x)


def test_the_program_is_that_of_the_next_element():
    """Also where others were traced before."""
    strategy = mirrored(2)
    train_step, _ = adding(strategy)
    step = rx.function(lambda iterator: train_step(next(iterator)))
    dataset = rx.data.Dataset.from_tensor_slices(np.ones(6, np.float32)).batch(4).repeat()
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    step(iterator)
    for batch in (2, 4):
        figures = strategy.benchmark(step, (iterator,), rounds=1, steps=1)
        assert figures.bytes_per_device["arguments"] == 4 + batch / 2 * 4
        assert step.lower(iterator).in_avals[0][2][0].shape == (2, batch // 2)
        step(iterator)
    assert step.experimental_get_tracing_count() == 2


FIGURES = {
    "step": "train_step",
    "strategy": "MirroredStrategy",
    "replicas": 1,
    "devices": ["GPU:0"],
    "worker": 0,
    "rounds": 20,
    "steps": 5,
    "seconds": {"step": 0.0123, "compute": 0.0123, "communication": 0.0, "input": None, "dispatch": 0.0001},
    "spread": {"step": 0.0005, "dispatch": 0.0},
    "bytes_per_device": {"variables": 1_234_567, "temporary": 999},
    "flops": 1e6,
    "page_faults": None,
    "collectives": [],
    "collectives_left": 0,
}
OF_TWO = {
    **FIGURES,
    "replicas": 2,
    "spread": {"step": 0.0012},
    "seconds": {"step": 0.2, "compute": 0.15, "communication": 0.05, "input": 0.001, "dispatch": 0.0002},
    "collectives": [
        {"kind": "all-reduce", "arrays": 2, "bytes": 4000},
        {"kind": "all-reduce", "arrays": 1, "bytes": 4},
    ],
}


def test_figures_are_shown_side_by_side():
    one, two = rx.Benchmark(**FIGURES), rx.Benchmark(**OF_TWO)
    assert rx.Benchmark(**one.as_dict()) == one
    assert str(one.beside(two)).splitlines() == [
        "train_step, MirroredStrategy",
        "                           1 replica  2 replicas",
        "a step                12.30 ±0.50 ms   200 ±1 ms",
        "a step, of the first            1.00       16.26",
        "compute                     12.30 ms      150 ms",
        "communication                   0 µs    50.00 ms",
        "input wait                         -     1.00 ms",
        "dispatch                   100 ±0 µs      200 µs",
        "variables, a device          1.23 MB     1.23 MB",
        "temporary, a device            999 B       999 B",
        "operations, a device       1,000,000   1,000,000",
        "all-reduce                      none   2 of 4 kB",
        "medians of 20 rounds of 5 steps ± spread",
    ]


def test_figures_of_different_steps_and_strategies_are_labelled():
    unknown = {**FIGURES["seconds"], "compute": None, "communication": None}
    others = [
        {"step": "other_step"},
        {"strategy": "OneDeviceStrategy", "rounds": 3, "bytes_per_device": {"variables": 5}, "seconds": unknown},
    ]
    figures = rx.Benchmark(**FIGURES).beside(*(rx.Benchmark(**{**FIGURES, **other}) for other in others))
    title, head, *_, note = str(figures).splitlines()
    assert title == "train_step, other_step, MirroredStrategy, OneDeviceStrategy"
    assert head.split("  ")[-3:] == [
        "train_step, MirroredStrategy, 1 replica",
        "other_step, MirroredStrategy, 1 replica",
        "train_step, OneDeviceStrategy, 1 replica",
    ]
    assert note == "medians of 20 rounds of 5 steps, 3 rounds of 5 steps ± spread"


def test_collectives_that_start_and_end_apart_count_once():
    text = """
      %start = ((f32[4]{0}), (f32[8]{0})) all-gather-start(%x), dimensions={0}
      %done = (f32[8]{0:T(256)}, bf16[2,2]{1,0}) all-gather-done(%start)
      ROOT %moved = pred[3]{0} collective-permute(%y), source_target_pairs={{0,1}}
    """
    gathered, moved = hlo.collectives(text)
    assert gathered == ("all-gather", (("f32", (8,)), ("bf16", (2, 2))), 40) and moved.bytes == 3


def figures_of(**changed):
    seconds = {"step": 0.010, "compute": 0.007, "communication": 0.003, "input": 0.002, "dispatch": 0.001}
    known = {"steps": 5, "rounds": 4, "bytes_per_device": {}, "flops": None, "page_faults": None, "collectives": []}
    known |= {"step": "f", "strategy": "S", "replicas": 2, "devices": [], "worker": 0, "collectives_left": 0}
    return rx.Benchmark(seconds={**seconds, **changed}, spread={"step": 0.001}, **known)


def test_the_parts_of_a_bar_add_up_to_the_step_and_its_end_shows_the_spread():
    step, wait = report.bars_of("2 replicas", figures_of())
    parts = list(step.values.values())
    assert sum(part.value for part in parts) == pytest.approx(10)
    assert parts[0].range is None and parts[-1].range == pytest.approx((9, 11))
    assert wait.values["input wait"].value == 2 and wait.values["input wait"].range is None
    (alone,) = report.bars_of("2 replicas", figures_of(communication=None, compute=None, input=None))
    assert {name: value.value for name, value in alone.values.items()} == {"compute and communication": 10}
    more = report.bars_of("2 replicas", figures_of(communication=0.011, compute=0.0))[0]  # by rounding of medians
    assert sum(part.value for part in more.values.values()) == pytest.approx(10)


def test_the_picture_has_its_legend_above_the_bars(tmp_path):
    both = figures_of().beside(figures_of(step=0.020))
    both.save(tmp_path / "a.svg")
    root = ET.parse(tmp_path / "a.svg").getroot()
    svg = "{http://www.w3.org/2000/svg}"
    texts = {text.text: float(text.get("y")) for text in root.iter(f"{svg}text")}
    legend = max(texts[name] for name in ("compute", "communication"))
    bars = [float(each.get("y")) for each in root.iter(f"{svg}rect") if each.get("height") == "18"]
    assert len(bars) == 6 and legend < min(bars)
    assert {"10", "20"} <= set(texts)  # the steps of the table
    assert "<svg" in both._repr_html_() and "<svg" in figures_of()._repr_html_()
