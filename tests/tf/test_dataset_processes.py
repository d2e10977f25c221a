"""Functions of `tf.data` with the processes that the environment asks for: the elements are the same."""

from __future__ import annotations

import pytest

LIMIT = 300.0  # seconds of a program: processes take long to start on a busy machine

START = """
import os, random, time, types
from replicax._data import parallel_map, worker_processes

# No call waits for anything, however busy the machine is.
parallel_map.time = types.SimpleNamespace(perf_counter=time.thread_time, thread_time=time.thread_time)
worker_processes.WORTHWHILE = 0.0  # processes start after the first calls
os.environ["REPLICAX_INPUT_PROCESSES"] = "2"
HERE = os.getpid()
WORDS = [b"%d" % i * (i % 3 + 1) for i in range(60)]

def mapped(function, calls=tf.data.AUTOTUNE):
    return tf.data.Dataset.from_tensor_slices(WORDS).map(function, num_parallel_calls=calls)

def process(word):
    return tf.strings.length(word) * 0 + os.getpid()
"""


def test_a_function_of_tensors_gets_processes_and_gives_the_same(run_tf):
    run_tf(
        START
        + """
def drawn(word):
    noise = tf.random.uniform([3]) + tf.random.normal([3], seed=5)
    if tf.strings.length(word) > 2:
        noise = tf.sort(noise)
    return tf.strings.length(word), noise, tf.strings.join([word, b"!"]), tf.random.uniform([], 0, 1000, tf.int32)

def passes(function, calls=tf.data.AUTOTUNE):
    tf.random.set_seed(7)
    dataset = mapped(function, calls).batch(8)
    while True:
        yield list(dataset.as_numpy_iterator())

def told(batches):
    return [[np.asarray(part).tolist() for part in batch[:4]] for batch in batches]

alone, parallel = passes(drawn, None), passes(lambda word: (*drawn(word), process(word)))
deadline, elsewhere = time.monotonic() + 120, set()
while not elsewhere and time.monotonic() < deadline:
    found = next(parallel)
    elsewhere |= {int(p) for batch in found for p in batch[4]} - {HERE}
    assert told(found) == told(next(alone))
assert 1 <= len(elsewhere) <= 2, elsewhere
found = next(parallel)  # all of a later pass is computed there
assert HERE not in {int(p) for batch in found for p in batch[4]} and told(found) == told(next(alone))
""",
        timeout=LIMIT,
        fresh=True,
    )


@pytest.mark.thorough
def test_what_is_compiled_here_is_computed_here(run_tf):
    """XLA and NumPy differ in the last bits: which of them computes an element does not depend on processes."""
    run_tf(
        START
        + """
def shares(x):
    return tf.reduce_sum(tf.exp(x) * x) / tf.cast(tf.size(x), tf.float32)

def positive(x):
    y = tf.exp(x) * x
    if tf.reduce_sum(y) > 0:
        y = y + tf.tanh(y) / 3
    return y, tf.reduce_sum(y)

numbers = np.random.default_rng(0)
vectors = [numbers.random(n + 3).astype(np.float32) for n in range(40)] * 3  # too many shapes to compile for each
large = [numbers.random(300_000).astype(np.float32) for _ in range(4)]
spec = tf.TensorSpec([None], tf.float32)
sent = []
call = worker_processes.Processes.call
worker_processes.Processes.call = lambda self, draws, group: (sent.append(len(group)), call(self, draws, group))[1]
for function, arrays, some_are_sent in [(shares, vectors, True), (positive, large, False)]:
    source = tf.data.Dataset.from_generator(lambda: iter(arrays), output_signature=spec)
    # Traced in the same order in both datasets, since the first shapes are those that are compiled.
    alone = [repr(e) for e in source.map(function).as_numpy_iterator()]
    dataset = source.map(function, num_parallel_calls=tf.data.AUTOTUNE)
    if not some_are_sent:
        dataset = source.map(function, num_parallel_calls=2, use_processes=True)
    deadline = time.monotonic() + 120
    sent.clear()
    while True:
        assert [repr(e) for e in dataset.as_numpy_iterator()] == alone
        if sent or not some_are_sent or time.monotonic() > deadline:
            break
    assert bool(sent) == some_are_sent
""",
        timeout=LIMIT,
        fresh=True,
    )


WATCHED = (
    START
    + """
started, given_up = [], []
give_up, joined = worker_processes.Processes.give_up, worker_processes._shared.joined
worker_processes.Processes.give_up = lambda self, why: (given_up.append(why), give_up(self, why))[1]
worker_processes._shared.joined = lambda user, count: (started.append(user), joined(user, count))[1]

def until_given_up(function):
    "Returns a pass over the elements, one in which it turned out that processes cannot have the function."
    given_up.clear()
    dataset, deadline = mapped(function), time.monotonic() + 120
    while time.monotonic() < deadline:
        found = [int(p) for p in dataset.as_numpy_iterator()]
        if given_up:
            return found
    raise AssertionError("nothing has given up")

def in_python(word):
    return tf.py_function(lambda w: os.getpid() + 0 * len(w.numpy()), [word], tf.int32)

def integer(value):
    return tf.cast(value, tf.int32)
"""
)


@pytest.mark.thorough
def test_a_function_with_state_is_called_here(run_tf):
    """A function that keeps something from call to call sees each element once, in this process."""
    run_tf(
        WATCHED
        + """
calls = []
def counted(word):
    calls.append(word)
    return process(word)

variable = tf.Variable(1)
table = tf.lookup.experimental.MutableHashTable(tf.string, tf.int32, 1)
generator = tf.random.Generator.from_seed(1)
for function in [
    counted,
    lambda word: process(word) * variable,
    lambda word: process(word) * table.lookup(word),
    lambda word: process(word) + integer(generator.uniform([])),
    lambda word: process(word) + 0 * np.random.randint(9),
    lambda word: process(word) + int(random.random()),
]:
    assert set(until_given_up(function)) == {HERE}
assert not started
assert len(calls) % len(WORDS) == 0 and calls == WORDS * (len(calls) // len(WORDS))
""",
        timeout=LIMIT,
        fresh=True,
    )


@pytest.mark.thorough
def test_what_a_process_refuses_is_done_here(run_tf):
    """Some of what a function does shows only when a process calls it: the elements are the same all the same."""
    run_tf(
        WATCHED
        + """
@tf.function
def noisy():
    return tf.random.uniform([])

def sometimes(word):
    return in_python(word) if tf.strings.length(word) > 2 else process(word)

found = until_given_up(sometimes)
assert len(found) == 60 and all(p == HERE for p, word in zip(found, WORDS) if len(word) > 2)
assert len(started) == 1
def shuffled(word):
    return process(word) + 0 * next(iter(tf.data.Dataset.range(9, output_type=tf.int32).shuffle(9)))

for number, function in enumerate([
    in_python,
    shuffled,
    lambda word: process(word) + integer(tf.random.get_global_generator().uniform([])),
]):
    assert set(until_given_up(function)) == {HERE}
    assert len(started) == number + 2 and "cannot do all" in given_up[0], given_up
assert set(until_given_up(lambda word: process(word) + integer(tf.keras.random.uniform([])))) == {HERE}
assert set(until_given_up(lambda word: process(word) + integer(noisy()))) == {HERE}
""",
        timeout=LIMIT,
        fresh=True,
    )
