"""`map` in several threads and `prefetch`: order, bounds, errors, and threads that end."""

import gc
import os
import threading
import time
import traceback
import types

import jax
import numpy as np
import pytest

from replicax._data import parallel_map
from replicax._data.prefetch import Buffer
from replicax.data import AUTOTUNE, Dataset

R = Dataset.range


def listed(dataset):
    return [np.asarray(e).tolist() for e in dataset]


def meeting(threads):
    """A function of elements that returns once it is being called in so many threads."""
    barrier = threading.Barrier(threads, timeout=20)
    return lambda x: (barrier.wait(), x)[1]


def test_calls_run_side_by_side_and_keep_the_order():
    assert listed(R(12).map(meeting(3), num_parallel_calls=3)) == list(range(12))


def test_a_slow_call_delays_others_only_in_deterministic_order():
    for deterministic in (True, False):
        others_done, count = threading.Event(), iter(range(6))

        def first_waits(x, others_done=others_done, count=count):
            if int(x) == 0:
                assert others_done.wait(20)
            elif next(count) == 4:
                others_done.set()
            return x

        found = listed(R(6).map(first_waits, num_parallel_calls=3, deterministic=deterministic))
        assert sorted(found) == list(range(6)) and (found == list(range(6))) is deterministic


def test_calls_run_ahead_within_a_bound():
    called = []
    iterator = iter(R(1000).map(lambda x: (called.append(1), x)[1], num_parallel_calls=2))
    next(iterator)
    del iterator
    gc.collect()
    assert 1 <= len(called) <= 4


def test_autotune_has_a_thread_a_core():
    names = set()
    listed(R(50).map(lambda x: (names.add(threading.current_thread().name), x)[1], num_parallel_calls=AUTOTUNE))
    assert names and all(name.startswith("replicax-map") for name in names)


def failing(x):
    if int(x) == 2:
        raise KeyError("here")
    return x


@pytest.mark.parametrize(
    "make",
    [
        lambda: R(5).map(failing),
        lambda: R(5).map(failing, num_parallel_calls=2),
        lambda: R(5).map(failing).prefetch(2),
        lambda: R(5).map(failing, num_parallel_calls=2).prefetch(1).prefetch(2),
    ],
)
def test_a_prefetched_error_is_raised_at_its_element_with_its_traceback(make):
    iterator = iter(make())
    assert [int(next(iterator)), int(next(iterator))] == [0, 1]
    with pytest.raises(KeyError, match="here") as caught:
        next(iterator)
    assert "failing" in [frame.name for frame in traceback.extract_tb(caught.tb)]


def test_a_restored_iterator_of_pairs_goes_on_after_an_error():
    def fail_at_3(x):
        if int(x) == 3:
            raise ValueError("three")
        return x

    dataset = R(6).map(fail_at_3, num_parallel_calls=2).enumerate()
    first = iter(dataset)
    next(first)
    second = iter(dataset)
    second.restore_state(first.save_state())
    found = []
    while True:
        try:
            found.append(int(next(second)[1]))
        except ValueError:
            found.append(None)
        except StopIteration:
            break
    assert found == [1, 2, None, 4, 5]


def test_ignore_errors_goes_on_after_them():
    bad = lambda x: 6 // (int(x) % 3)  # noqa: E731
    for threads in (None, 2):
        assert listed(R(7).map(bad, num_parallel_calls=threads).ignore_errors()) == [6, 3, 6, 3]
    assert listed(R(7).map(bad).batch(2).ignore_errors()) == [[6, 3], [6, 3]]
    assert listed(R(7).map(bad).shuffle(1).repeat(2).prefetch(1).ignore_errors()) == [6, 3, 6, 3] * 2
    assert listed(R(7).map(bad).enumerate().ignore_errors()) == [[1, 6], [2, 3], [4, 6], [5, 3]]
    assert listed(R(3).filter(lambda x: 1 // int(x) > 0).ignore_errors()) == [1]
    with pytest.raises(ZeroDivisionError):
        listed(R(3).map(bad))


def test_ignore_errors_logs_errors_if_requested(caplog):
    dataset = R(3).map(failing)
    listed(dataset.ignore_errors())
    assert not caplog.records
    listed(dataset.ignore_errors(log_warning=True))
    assert len(caplog.records) == 1 and "KeyError('here')" in caplog.text


def test_prefetch_runs_ahead_within_its_bound():
    made, third = [], threading.Event()

    def note(x):
        made.append(int(x))
        if len(made) == 3:
            third.set()
        return x

    iterator = iter(R(100).map(note).prefetch(3))
    assert not made  # it begins with the first element that is asked for
    next(iterator)
    assert third.wait(20)  # nobody asked for these
    del iterator
    gc.collect()
    [t.join(20) for t in threading.enumerate() if t.name == "replicax-input"]
    assert len(made) <= 5  # one taken, three that wait, one on its way
    assert listed(R(5).map(lambda x: x).prefetch(2)) == [0, 1, 2, 3, 4]


def test_rows_in_memory_are_not_prefetched(monkeypatch):
    monkeypatch.setattr(Buffer, "start", lambda self: pytest.fail("a thread"))
    assert listed(R(5).shuffle(5, seed=0).prefetch(2).batch(5))[0] == listed(R(5).shuffle(5, seed=0).batch(5))[0]
    assert listed(R(5).map(lambda x: x).prefetch(0)) == [0, 1, 2, 3, 4]
    assert R(5).map(lambda x: x).prefetch(2).element_spec.shape == ()


def test_a_generator_is_closed_when_its_iterator_is_freed():
    closed = threading.Event()

    def generator():
        try:
            yield from range(1000)
        finally:
            closed.set()

    spec = jax.eval_shape(lambda: np.int32(0))
    dataset = Dataset.from_generator(generator, output_types=spec.dtype).prefetch(2).map(lambda x: x).prefetch(2)
    iterator = iter(dataset)
    next(iterator)
    del iterator
    gc.collect()
    assert closed.wait(20)


def test_prefetch_in_the_middle_and_in_every_part():
    inner = lambda i: R(3).map(lambda x: x + 10 * i).prefetch(2)  # noqa: E731
    expected = listed(R(4).interleave(lambda i: R(3).map(lambda x: x + 10 * i), cycle_length=2))
    assert listed(R(4).interleave(inner, cycle_length=2).prefetch(1)) == expected


def _shuffled():
    return R(6).shuffle(6, seed=4).map(lambda x: x)


AHEAD = {
    "parts that are read to their end, or not": lambda ahead: ahead(_shuffled().repeat(2)).take(5).repeat(3),
    "several in one another": lambda ahead: ahead(ahead(_shuffled().repeat()).take(8).repeat()).take(30).repeat(2),
    "beside a shorter one": lambda ahead: Dataset.zip(R(10), ahead(_shuffled().repeat())).map(lambda a, b: b).repeat(3),
    "one behind the other": lambda ahead: ahead(_shuffled()).concatenate(ahead(_shuffled()).take(3)).repeat(3),
}


@pytest.mark.parametrize("name", AHEAD)
def test_orders_do_not_depend_on_how_far_a_thread_reads_ahead(name):
    """With a thread there are the elements that there are without one, also after a position is restored."""
    alone, ahead = AHEAD[name](lambda dataset: dataset), AHEAD[name](lambda dataset: dataset.prefetch(4))
    for _ in range(3):  # each reading has another order
        expected = [int(x) for x in alone]
        iterator, found, states = iter(ahead), [], []
        for element in iterator:
            found.append(int(element))
            states.append(iterator.save_state())
        assert found == expected
        for start in (1, 7, len(found) // 2, len(found) - 1):
            again = iter(AHEAD[name](lambda dataset: dataset.prefetch(4)))
            again.restore_state(states[start - 1])
            assert [int(x) for x in again] == found[start:], start


def test_orders_of_later_readings_do_not_depend_on_how_far_a_thread_has_read_ahead():
    def first_of_each(dataset):
        return [[int(next(iterator)) for _ in range(4)] for _ in range(3) for iterator in [iter(dataset)]]

    alone = first_of_each(_shuffled().repeat())
    assert first_of_each(_shuffled().repeat().prefetch(8)) == alone
    assert len({tuple(order) for order in alone}) > 1


@pytest.mark.parametrize("kind", ["waits", "makes large arrays", "does neither"])
def test_autotune_takes_several_threads_where_these_do_not_wait_for_each_other(kind, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    together, threads, clock = threading.Barrier(2), set(), [0.0]
    # A call that waits takes a second of the clock, and none of the processor.
    clocks = types.SimpleNamespace(perf_counter=lambda: clock[0], thread_time=lambda: 0.0, monotonic=time.monotonic)
    monkeypatch.setattr(parallel_map, "time", clocks)

    def function(number):
        number = int(number)
        clock[0] += kind == "waits"
        if number >= 20:
            threads.add(threading.get_ident())
            if kind != "does neither":
                together.wait(60)  # which takes two threads
        return np.full(1 << 15 if kind == "makes large arrays" else 1, number, np.float32)

    dataset = Dataset.range(40).map(function, num_parallel_calls=AUTOTUNE)
    assert [x[0] for x in dataset.as_numpy_iterator()] == list(range(40))
    assert len(threads) == (1 if kind == "does neither" else 2)


def test_an_error_in_a_first_call_comes_in_its_place():
    def function(number):
        if int(number) == 1:
            raise ValueError("one")
        return number

    iterator, found = Dataset.range(8).map(function, num_parallel_calls=AUTOTUNE).as_numpy_iterator(), []
    while True:
        try:
            found.append(int(next(iterator)))
        except StopIteration:
            break
        except ValueError as error:
            found.append(str(error))
    assert found == [0, "one", 2, 3, 4, 5, 6, 7]
