"""What goes wrong in input is an exception where it happened, and never the end of the data."""

import functools
import itertools
import operator

import jax.numpy as jnp
import numpy as np
import pytest
from strategies import mirrored, one_device

import replicax as rx
from replicax.data import Dataset

R = Dataset.range


def ends(x):
    """Returns `x`, but for 7, where the iterator of nothing that it asks is at its end."""
    if int(x) == 7:
        next(iter(()))
    return x


def one(x):
    return Dataset.from_tensors(ends(x))


class Source:
    """A source of the user's, whose `__iter__` asks an iterator that is at its end."""

    def __iter__(self):
        next(iter(()))


def group(which):
    functions = {
        "key_func": lambda x: x % 2,
        "reduce_func": lambda key, window: window.batch(2),
        "window_size_func": lambda key: 2,
    }
    fails = {
        "key_func": ends,
        "reduce_func": lambda key, window: next(iter(())),
        "window_size_func": lambda key: next(iter(())),
    }
    return R(12).group_by_window(**(functions | {which: fails[which]}))


# The datasets whose function raises StopIteration, and what the error calls the function. The elements are scalars.
DATASETS = {
    "map": (lambda: R(12).map(ends), "`map_func` of `Dataset.map`, `ends` (test_input_errors.py:"),
    "map in threads": (lambda: R(12).map(ends, num_parallel_calls=3), "`map_func` of `Dataset.map`"),
    "map in threads, in any order": (
        lambda: R(12).map(ends, num_parallel_calls=3, deterministic=False),
        "`map_func` of `Dataset.map`",
    ),
    "map and prefetch": (lambda: R(12).map(ends).prefetch(2), "`map_func` of `Dataset.map`"),
    "filter": (lambda: R(12).filter(lambda x: bool(ends(x)) or True), "`predicate` of `Dataset.filter`"),
    "take_while": (lambda: R(12).take_while(lambda x: ends(x) >= 0), "`predicate` of `Dataset.take_while`"),
    "scan": (lambda: R(12).scan(0, lambda s, x: (s, ends(x))), "`scan_func` of `Dataset.scan`"),
    "flat_map": (lambda: R(12).flat_map(one), "`map_func` of `Dataset.flat_map`, `one` (test_input_errors.py:"),
    "interleave": (lambda: R(12).interleave(one, cycle_length=2), "`map_func` of `Dataset.interleave`"),
    "bucket_by_sequence_length": (
        lambda: R(12).map(lambda x: jnp.zeros(1)).bucket_by_sequence_length(lambda x: next(iter(())), [2], [2, 2]),
        "`element_length_func` of `Dataset.bucket_by_sequence_length`",
    ),
    "rejection_resample": (
        lambda: R(12).rejection_resample(lambda x: ends(x) * 0, [1.0]).map(lambda label, x: x),
        "`class_func` of `Dataset.rejection_resample`",
    ),
    "generator": (
        lambda: Dataset.from_generator(lambda: next(iter(())), output_signature=rx.TensorSpec((), np.int64)),
        "`generator` of `Dataset.from_generator`",
    ),
} | {
    f"group_by_window, {which}": (lambda which=which: group(which), f"`{which}` of `Dataset.group_by_window`")
    for which in ("key_func", "reduce_func", "window_size_func")
}


@pytest.mark.parametrize("name", DATASETS)
def test_stop_iteration_in_a_users_function_is_an_error_that_names_the_function(name):
    make, message = DATASETS[name]
    strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"])

    def passes(dataset):
        yield lambda: list(dataset)
        yield lambda: list(dataset.as_numpy_iterator())
        if name.startswith(("group_by_window", "bucket")):
            batches = dataset
        else:
            batches = dataset.batch(2)
            yield lambda: list(batches)
        for buffered in (1, 0):
            options = rx.InputOptions(experimental_per_replica_buffer_size=buffered)
            distributed = strategy.experimental_distribute_dataset(batches, options)
            yield lambda distributed=distributed: list(distributed)

    for run in passes(make()):
        with pytest.raises(RuntimeError) as caught:
            run()
        assert message in str(caught.value) and "raised StopIteration" in str(caught.value)
        assert isinstance(caught.value.__cause__, StopIteration)


def test_stop_iteration_in_a_users_function_comes_out_of_a_compiled_loop():
    strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"])
    batches = strategy.experimental_distribute_dataset(R(12).map(ends).batch(2))

    @rx.function
    def total():
        sums = 0
        for batch in batches:
            sums += strategy.reduce("SUM", strategy.run(jnp.sum, args=(batch,)), axis=None)
        return sums

    with pytest.raises(RuntimeError, match="`map_func` of `Dataset.map`"):
        total()


def _steps_that_raise_stop_iteration(strategy):
    """For each, what is called, and what the error calls the user's function that raised StopIteration."""

    def step(*args):
        return next(iter(()))  # of Python, where no dataset ends

    def merge(strategy):
        return next(iter(()))

    def meets():
        return rx.get_replica_context().merge_call(merge)

    def after_an_element(iterator):
        return step(next(iterator))

    def driven_from_the_host():
        for batch in strategy.experimental_distribute_dataset(R(8).batch(4)):
            if np.asarray(strategy.reduce("SUM", batch, axis=0)) > 0:
                strategy.run(step, args=(batch,))

    replica, merged = ("The replica function", step), ("`merge_fn` of `merge_call`", merge)
    yield lambda: strategy.run(step), replica
    yield lambda: strategy.run(meets), merged
    yield lambda: rx.function(step).get_concrete_function(), ("The compiled function", step)
    yield rx.function(driven_from_the_host, autograph=True), replica
    for autograph, steps in itertools.product((False, True), (1, 3)):
        compiled = functools.partial(rx.function, autograph=autograph, steps_per_call=steps)
        yield compiled(lambda: strategy.run(step)), replica
        yield compiled(lambda: strategy.run(meets)), merged
        yield compiled(step), ("The compiled function", step)
        yield lambda compiled=compiled: strategy.run(compiled(step)), ("", step)
        with_elements = compiled(after_an_element)
        yield lambda f=with_elements: f(iter(R(6))), ("The compiled function", after_an_element)


@pytest.mark.filterwarnings("ignore:.*needs the value of a tensor")
@pytest.mark.parametrize("eagerly", [False, True])
@pytest.mark.parametrize("make", [lambda: mirrored(2), one_device])
def test_stop_iteration_in_a_step_is_an_error_that_names_the_function(make, eagerly):
    rx.config.run_functions_eagerly(eagerly)
    try:
        for call, (role, function) in _steps_that_raise_stop_iteration(make()):
            with pytest.raises(RuntimeError, match="raised StopIteration") as caught:
                call()
            name = function.__qualname__.rpartition(".")[2]
            assert str(caught.value).startswith(role) and f"`{name}` (test_input_errors.py:" in str(caught.value)
            assert type(caught.value.__cause__) is StopIteration
    finally:
        rx.config.run_functions_eagerly(False)


@pytest.mark.parametrize("steps", [1, 2])
def test_the_end_of_a_dataset_in_a_step_is_no_error_of_its_function(steps):
    """Facts 12 and 106: `next` raises StopIteration at the end, and OutOfRangeError out of a compiled function."""
    strategy = mirrored(2)
    step = rx.function(lambda iterator: strategy.run(lambda x: x, args=(next(iterator),)), steps_per_call=steps)
    iterator = iter(strategy.experimental_distribute_dataset(R(8).batch(4)))
    for _ in range(2 // steps):
        step(iterator)
    with pytest.raises(rx.OutOfRangeError, match="End of sequence"):
        step(iterator)
    elements = iter(R(1))
    strategy.run(lambda: next(elements, None))
    with pytest.raises(StopIteration) as caught:
        strategy.run(lambda: next(elements))
    assert type(caught.value) is StopIteration
    assert rx.function(lambda: next(elements, "none"))() == "none"


def test_stop_iteration_elsewhere_in_input_names_its_function(tmp_path):
    strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"])
    ended = lambda *args: next(iter(()))  # noqa: E731
    R(4).save(str(tmp_path / "saved"))
    cases = {
        "`reduce_func` of `reduce`": lambda: R(3).reduce(np.int64(0), ended),
        "`transformation_func` of `Dataset.apply`": lambda: R(3).apply(ended),
        "`shard_func`": lambda: R(3).save(str(tmp_path / "other"), shard_func=ended),
        "`reader_func`": lambda: Dataset.load(str(tmp_path / "saved"), reader_func=ended),
        "`dataset_fn` of `distribute_datasets_from_function`": lambda: strategy.distribute_datasets_from_function(
            ended
        ),
        "The `__iter__` of the dataset": lambda: list(strategy.experimental_distribute_dataset(Source())),
    }
    for name, run in cases.items():
        with pytest.raises(RuntimeError) as caught:
            run()
        assert name in str(caught.value) and "raised StopIteration" in str(caught.value)
    distributed = strategy.experimental_distribute_dataset(R(4).batch(2))
    with pytest.raises(RuntimeError, match="`reduce_func` of `reduce`"):
        distributed.reduce(np.int64(0), ended)


def test_iterators_that_end_in_their_own_next_just_end():
    class Once:
        def __iter__(self):
            self.left = iter(range(3))
            return self

        def __next__(self):
            return np.int64(next(self.left))

    found = Dataset.from_generator(Once, output_signature=rx.TensorSpec((), np.int64))
    assert list(map(operator.index, found.as_numpy_iterator())) == [0, 1, 2]


def test_wrong_arguments_are_named():
    strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"])
    batches = strategy.experimental_distribute_dataset(R(4).batch(2))
    value = strategy.experimental_distribute_values_from_function(lambda context: jnp.ones(2))
    gathered = lambda x: rx.get_replica_context().all_gather(x, axis="x")  # noqa: E731
    dataset_fn = lambda context: R(4)  # noqa: E731
    cases = [
        (lambda: R(4).concatenate(5), "`dataset` is a Dataset, got 5 of type int"),
        (lambda: R(4).with_options(5), "`options` is an `rx.data.Options`, got 5 of type int"),
        (lambda: type(iter(R(4)))(5), "made of a Dataset, got 5 of type int"),
        (lambda: type(iter(batches))(5), "made of a distributed dataset, got 5 of type int"),
        (
            lambda: strategy.experimental_distribute_dataset(R(4).batch(2), options=5),
            "`options` is an `InputOptions` or None, got 5 of type int",
        ),
        (
            lambda: strategy.distribute_datasets_from_function(dataset_fn, options=5),
            "`options` is an `InputOptions` or None, got 5 of type int",
        ),
        (lambda: strategy.gather(value, axis=None), "`axis` is an int, got None"),
        (lambda: strategy.run(gathered, args=(value,)), "`axis` is an int, got 'x'"),
        (
            lambda: strategy.reduce("SUM", value, axis=[0, 1]),
            r"`axis` is None, an int or a tuple of ints, got \[0, 1\] of type list",
        ),
    ]
    for run, message in cases:
        with pytest.raises(TypeError, match=message):
            run()
