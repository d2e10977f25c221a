"""Iterators over datasets are saved in the middle of an epoch, and restored: here and in another process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import replicax as rx
from replicax._base.errors import InvalidArgumentError
from replicax._data import reading
from replicax.data import Dataset

R = Dataset.range


def arrays(n=23):
    return Dataset.from_tensor_slices({"x": np.arange(n), "y": np.arange(n, dtype=np.float32)})


def by_element(dataset):
    """The same elements without rows behind them."""
    return dataset.map(lambda e: e)


def parts(i):
    return R(3).map(lambda x: x + 10 * i).shuffle(3)


def used_again(*datasets):
    """What a function returns that makes no dataset of its own."""
    return R(4).flat_map(lambda i: datasets[int(i) % 2]).repeat(2)


PIPELINES = {
    "rows": lambda: arrays().shuffle(7).repeat(3).batch(4),
    "batches again and again": lambda: arrays().shuffle(30).batch(4).repeat(3),
    "seeded": lambda: arrays().shuffle(7, seed=3).batch(4, drop_remainder=True).repeat(),
    "one order": lambda: arrays().shuffle(30, reshuffle_each_iteration=False).batch(5).repeat(3),
    "by element": lambda: by_element(arrays()).shuffle(7).repeat(3).batch(4),
    "map": lambda: arrays().shuffle(30).batch(4).map(lambda e: e["x"] * 2).repeat(2),
    "map in threads": lambda: arrays().shuffle(30).map(lambda e: e["x"] * 2, num_parallel_calls=2).repeat(2).batch(5),
    "prefetch": lambda: arrays().shuffle(30).batch(4).map(lambda e: e["x"]).prefetch(3).repeat(3).prefetch(2),
    "filter": lambda: R(40).shuffle(40).filter(lambda x: x % 3 > 0).repeat(2),
    "zip": lambda: Dataset.zip(R(9).shuffle(9), by_element(R(7).shuffle(7))).repeat(3),
    "zip, the shorter first": lambda: Dataset.zip(by_element(R(4)).shuffle(4), R(9).shuffle(9)).repeat(3),
    "a dataset made before": lambda: used_again(by_element(R(4)).shuffle(4), by_element(R(3).shuffle(3)).cache()),
    "concatenate": lambda: R(5).shuffle(5).concatenate(by_element(R(6).shuffle(6))).repeat(3),
    "take, skip, shard": lambda: by_element(R(40).shuffle(40)).skip(3).take(20).shard(2, 1).repeat(3),
    "take of a mapped shuffle": lambda: by_element(R(9)).shuffle(9).take(4).repeat(5),
    "interleave": lambda: R(4).shuffle(4).interleave(parts, cycle_length=2, block_length=2).repeat(2),
    "flat_map": lambda: R(4).flat_map(parts).shuffle(5).repeat(2),
    "nested": lambda: R(2).flat_map(lambda i: R(2).flat_map(parts)).repeat(2),
    "cache": lambda: by_element(R(9).shuffle(9)).cache().repeat(4),
    "shuffle after cache": lambda: by_element(R(9)).shuffle(9).cache().shuffle(9).batch(2).repeat(4),
    "cache of rows": lambda: R(9).shuffle(9).cache().repeat(3).batch(2),
    "cache of parts": lambda: R(4).shuffle(4).flat_map(parts).cache().repeat(3),
    "cache of a cache": lambda: by_element(R(5).shuffle(5).cache()).cache().repeat(3),
    "sampled": lambda: Dataset.sample_from_datasets([R(9).shuffle(9), R(20, 29)], [0.3, 0.7]).repeat(2),
    "chosen": lambda: Dataset.choose_from_datasets([R(5), R(9, 12)], R(2).shuffle(2).repeat()),
    "random": lambda: Dataset.random().take(20),
    "generator": lambda: Dataset.from_generator(lambda: iter(range(9))).shuffle(4).repeat(2),
    "windows": lambda: R(12).shuffle(12).window(3, shift=2).flat_map(lambda w: w.batch(3)).repeat(2),
    "groups": lambda: R(12).shuffle(12).group_by_window(lambda x: x % 2, lambda k, w: w.shuffle(3), 3).repeat(2),
    "rejected": lambda: R(30).rejection_resample(lambda x: x % 2, [0.8, 0.2]).repeat(2),
    "scan, unique": lambda: R(9).shuffle(9).scan(np.int64(0), lambda s, x: (s + x, s)).unique().repeat(2),
    "padded": lambda: R(1, 9).shuffle(8).map(lambda n: np.ones(int(n))).padded_batch(2).repeat(2),
    "unbatch": lambda: R(9).shuffle(9).batch(2).unbatch().repeat(2),
    "counter": lambda: R(9).shuffle(9).enumerate(5).repeat(2),
}  # fmt: skip


def plain(element):
    return json.dumps(jax.tree.map(lambda a: np.asarray(a).tolist(), element))


def listed(elements, most=70):
    return [plain(element) for element, _ in zip(elements, range(most))]


@pytest.mark.sampled(2, others="thorough")
@pytest.mark.parametrize("name", PIPELINES)
def test_a_restored_iterator_goes_on_where_the_saved_one_stood(name):
    for warm in (0, 1):
        original, elsewhere = PIPELINES[name](), PIPELINES[name]()
        for _ in range(warm):  # passes before count, and fill caches
            listed(original, most=40)
        iterator, states, seen = iter(original), [], []
        for number, element in enumerate(iterator):
            seen.append(plain(element))
            if number in ((7, 16) if name == "a dataset made before" else (0, 3, 7, 16)):  # once both were come to
                states.append((number + 1, iterator.save_state()))
            if number == 40:
                break
        states.append((len(seen), iterator.save_state()))
        listed(elsewhere, most=3)  # whatever another process did before
        for position, state in states:
            for dataset in (original, elsewhere, PIPELINES[name]()):
                restored = iter(dataset)
                restored.restore_state(state)
                assert listed(restored, len(seen) - position) == seen[position:], (name, warm, position)


def test_the_state_is_small_and_says_nothing_of_the_data():
    dataset = arrays(100_000).shuffle(100_000).repeat().batch(100)
    iterator = iter(dataset)
    for _ in range(1500):
        next(iterator)
    state = iterator.save_state()
    assert isinstance(state, bytes) and len(state) < 300


def test_skipped_elements_are_not_computed():
    """Neither rows nor the functions of `map` are gone through for what an iterator has behind it."""
    calls = []
    dataset = arrays(1000).shuffle(1000).batch(10).map(lambda e: (calls.append(1), e["x"])[1]).repeat(3)
    iterator = iter(dataset)
    for _ in range(250):
        next(iterator)
    state, before = iterator.save_state(), len(calls)
    restored = iter(dataset)
    restored.restore_state(state)
    assert plain(next(restored)) == plain(next(iterator)) and len(calls) == before + 2


def test_later_passes_after_a_restore_have_their_own_order():
    dataset = R(50).shuffle(50)
    iterator = iter(dataset)
    next(iterator)
    state, rest = iterator.save_state(), listed(iterator)
    second = listed(dataset)
    fresh = R(50).shuffle(50)
    restored = iter(fresh)
    restored.restore_state(state)
    assert listed(restored) == rest
    # An epoch that follows is the one that followed the saved one.
    assert listed(fresh) == second != rest


def test_iterators_do_not_disturb_each_other():
    dataset = R(20).shuffle(20, seed=1).repeat(3)
    alone = listed(R(20).shuffle(20, seed=1).repeat(3))
    one, other = iter(dataset), iter(dataset)
    found = [[], []]
    for _ in range(60):
        found[0].append(plain(next(one)))
        found[1].append(plain(next(other)))
    assert found[0] == alone and len(set(found[1])) == 20


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing():
    iterator = iter(R(6).shuffle(6, seed=0))
    first, state = next(iterator), iter(R(6)).save_state()
    rest = [x for x in listed(R(6).shuffle(6, seed=0)) if x != plain(first)]
    with pytest.raises(
        InvalidArgumentError, match="another dataset: its shuffles and caches are not those of this one, ...Seeds"
    ):
        iterator.restore_state(state)
    with pytest.raises(InvalidArgumentError, match="another dataset"):
        iterator.restore_state(iter(R(6).map(lambda x: x).cache()).save_state())
    with pytest.raises(InvalidArgumentError, match="another dataset"):
        told = json.loads(iterator.save_state().replace(b'"nodes":[[', b'"nodes":[["x",'))
        iterator.restore_state(json.dumps({**told, "checksum": reading._checksum(told["state"])}))
    for wrong in (b"", b"{}", b'{"format": 1}', "x", None, 7, [b"x"]):
        with pytest.raises(InvalidArgumentError, match="what save_state returned"):
            iterator.restore_state(wrong)
    assert listed(iterator) == rest


def test_numpy_iterators_too():
    iterator = R(5).as_numpy_iterator()
    next(iterator)
    state, rest = iterator.save_state(), list(iterator)
    restored = R(5).as_numpy_iterator()
    restored.restore_state(state)
    assert list(restored) == rest == [1, 2, 3, 4] and type(rest[0]) is np.int64


@pytest.mark.sampled(3, others="thorough")
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("name", ["rows", "batches again and again", "prefetch", "cache of rows", "generator"])
@pytest.mark.parametrize("buffer", [0, 2])
def test_distributed_iterators(name, replicas, buffer):
    """What waits in buffers is neither lost nor repeated."""
    strategy = rx.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])
    options = rx.InputOptions(experimental_per_replica_buffer_size=buffer)
    batched = (lambda d: d.batch(2)) if name == "generator" else lambda d: d

    def distributed():
        return strategy.experimental_distribute_dataset(batched(PIPELINES[name]()), options)

    def shares(element):
        return plain(strategy.experimental_local_results(element))

    iterator = iter(distributed())
    seen = [shares(next(iterator)) for _ in range(3)]
    state = iterator.save_state()
    seen += [shares(element) for element in iterator]
    end = iterator.save_state()
    again = iter(distributed())
    next(again)
    again.restore_state(state)
    assert [shares(element) for element in again] == seen[3:]
    again.restore_state(end)
    assert not again.get_next_as_optional().has_value()
    iterator.restore_state(state)
    assert [shares(element) for element in iterator] == seen[3:]


def test_distributed_datasets_of_other_kinds():
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    off = rx.data.Options()
    off.experimental_distribute.auto_shard_policy = rx.data.AutoShardPolicy.OFF
    for make in (
        lambda: strategy.experimental_distribute_dataset([np.arange(4), np.arange(4, 8), np.arange(8, 10)]),
        lambda: strategy.experimental_distribute_dataset(R(11).shuffle(11).batch(4).with_options(off)),
        lambda: strategy.distribute_datasets_from_function(lambda context: R(11).shuffle(11).batch(2)),
        lambda: strategy.distribute_datasets_from_function(
            lambda context: R(11).shuffle(11).batch(2).shard(context.num_input_pipelines, context.input_pipeline_id),
            rx.InputOptions(
                experimental_replication_mode=rx.InputReplicationMode.PER_REPLICA, experimental_fetch_to_device=False
            ),
        ),
    ):
        iterator = iter(make())
        next(iterator)
        state = iterator.save_state()
        rest = [plain(e.values) for e in iterator]
        restored = iter(make())
        restored.restore_state(state)
        assert rest and [plain(e.values) for e in restored] == rest


def test_an_element_that_a_function_gave_back_is_not_lost():
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    iterator = iter(strategy.experimental_distribute_dataset(R(8).batch(2)))
    element = iterator._pull()
    iterator._push_back(element)
    restored = iter(strategy.experimental_distribute_dataset(R(8).batch(2)))
    restored.restore_state(iterator.save_state())
    assert plain(next(restored).values) == plain(element.values)


def test_after_a_state_of_another_process():
    program = (
        "import sys, tests_state as t\n"
        "it = iter(t.PIPELINES['cache of parts']())\n"
        "head = [t.plain(next(it)) for _ in range(20)]\n"
        "state = it.save_state()\n"
        "print(t.json.dumps([state.decode(), t.listed(it)]))\n"
    ).replace("tests_state", Path(__file__).stem)
    path = os.pathsep.join([*map(str, Path(__file__).parents[:2]), os.environ.get("PYTHONPATH", "")])
    found = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    state, rest = json.loads(found.stdout)
    iterator = iter(PIPELINES["cache of parts"]())
    iterator.restore_state(state.encode())
    assert rest and listed(iterator) == rest
