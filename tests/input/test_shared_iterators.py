"""Iterators that several threads share: each element goes to one of them, and nobody waits for ever."""

import threading

import numpy as np
import pytest
from strategies import over, ways

import replicax as rx
from replicax.data import Dataset

ROWS, THREADS = 1200, 6


def strategy():
    return rx.MirroredStrategy(["GPU:0", "GPU:1"])


def distributed(dataset, buffered=1):
    options = rx.InputOptions(experimental_per_replica_buffer_size=buffered)
    return strategy().experimental_distribute_dataset(dataset, options)


def generated():
    return Dataset.from_generator(lambda: iter(range(ROWS)), output_signature=rx.TensorSpec((), np.int64))


R = Dataset.range
ITERATORS = {
    "range": lambda: iter(R(ROWS).batch(10)),
    "map": lambda: iter(R(ROWS).map(lambda x: x * 1).batch(10)),
    "map in threads": lambda: iter(R(ROWS).map(lambda x: x * 1, num_parallel_calls=3).batch(10)),
    "generator": lambda: iter(generated().batch(10)),
    "prefetched generator": lambda: iter(generated().batch(10).prefetch(2)),
    "numpy": lambda: generated().batch(10).as_numpy_iterator(),
    "flat_map": lambda: iter(R(ROWS).flat_map(Dataset.from_tensors).batch(10)),
    "distributed": lambda: iter(distributed(R(ROWS).batch(10))),
    "distributed without a buffer": lambda: iter(distributed(R(ROWS).batch(10), 0)),
    "distributed generator": lambda: iter(distributed(generated().batch(10))),
    "distributed generator without a buffer": lambda: iter(distributed(generated().batch(10), 0)),
}


def rows(batch):
    return np.concatenate([np.asarray(part) for part in getattr(batch, "values", (batch,))]).tolist()


@pytest.mark.parametrize("name", ITERATORS)
def test_threads_that_share_an_iterator_get_each_row_once(name):
    iterator, start = ITERATORS[name](), threading.Barrier(THREADS, timeout=60)
    taken, errors = [], []

    def take():
        try:
            start.wait()
            taken.extend([rows(batch) for batch in iterator])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=take) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert errors == []
    assert sorted(row for batch in taken for row in batch) == list(range(ROWS))


def test_a_state_restored_by_one_thread_ends_the_waiting_of_another():
    made, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def generator():
        yield np.int64(0)
        made.set()
        go_on.wait(60)
        yield np.int64(1)

    dataset = Dataset.from_generator(generator, output_signature=rx.TensorSpec((), np.int64)).batch(1)
    iterator = iter(rx.OneDeviceStrategy("cpu:0").experimental_distribute_dataset(dataset))
    state = iterator.save_state()
    assert next(iterator).tolist() == [0]

    def wait():
        next(iterator, None)
        ended.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert made.wait(60)
    iterator.restore_state(state)
    assert ended.wait(60)
    go_on.set()
    waiting.join(60)
    assert [batch.tolist() for batch in iterator] == [[0], [1]]
    iterator.close()


# Iterators whose own map function asks them for an element. What would wait for itself is an error instead; in a
# program of its own, which has a deadline.
OWN = """
import numpy as np, replicax as rx
from replicax.data import Dataset
strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"])
R = Dataset.range
def distributed(dataset, buffered=1):
    options = rx.InputOptions(experimental_per_replica_buffer_size=buffered)
    return iter(strategy.experimental_distribute_dataset(dataset.batch(2), options))
cases = {
    "map": lambda f: iter(R(8).map(f)),
    "map in threads": lambda f: iter(R(8).map(f, num_parallel_calls=2)),
    "prefetch": lambda f: iter(R(8).map(f).prefetch(2)),
    "threads and prefetch": lambda f: iter(R(8).map(f, num_parallel_calls=2).prefetch(2).batch(2)),
    "filter": lambda f: iter(R(8).filter(lambda x: f(x) >= 0)),
    "distributed": lambda f: distributed(R(8).map(f)),
    "distributed, threads": lambda f: distributed(R(8).map(f, num_parallel_calls=2)),
    "distributed, no buffer": lambda f: distributed(R(8).map(f), 0),
}
for name, make in cases.items():
    def own(x):
        next(iterators[0])
        return x
    iterators = []
    iterators.append(make(own))
    try:
        next(iterators[0])
    except RuntimeError as error:
        print(name, "|", error)
other = iter(R(100))
print("another", [int(x) for x in R(4).map(lambda x: next(other) + 10)])
"""


def test_an_iterator_that_its_own_functions_ask_is_an_error(run_python):
    lines = run_python(OWN, timeout=120).stdout.splitlines()
    assert len(lines) == 9 and lines[-1] == "another [10, 11, 12, 13]"
    assert all("the very iterator for which it is making one" in line for line in lines[:-1])


TAKE = {
    "next": next,
    "get_next": lambda iterator: iterator.get_next(),
    "optional": lambda iterator: iterator.get_next_as_optional().get_value(),
}


@pytest.mark.parametrize("take", TAKE)
@ways
@over(plain=True, one_of_each=True, processes=1)
def test_a_replica_function_takes_no_element_of_a_distributed_dataset(make, way, take):
    strategy = make()
    for dataset in (
        strategy.experimental_distribute_dataset(R(12).batch(4)),
        strategy.distribute_datasets_from_function(lambda _: R(12).batch(4)),
    ):
        iterator = iter(dataset)
        with pytest.raises(ValueError, match=r"next\(iterator\) should be called from outside of replica_fn"):
            way(lambda iterator: strategy.run(TAKE[take], args=(iterator,)))(iterator)
        assert rows(next(iterator))[0] == 0  # the call has taken nothing


def test_eager_replicas_take_elements_of_plain_iterators_and_merge_functions_of_any():
    plain, batches = iter(R(12).batch(4)), iter(distributed(R(12).batch(4)))
    assert [rows(part) for part in strategy().run(next, args=(plain,)).values] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    merged = strategy().run(lambda: rx.get_replica_context().merge_call(lambda _: next(batches)))
    assert rows(merged) == [0, 1, 2, 3]
