"""Memory of host batches is used again, but never while anything is in it; and no value shares memory that users write.

Arrays begin at a multiple of 64 bytes here: from there on JAX can share their memory on CPU devices.
"""

from __future__ import annotations

import gc
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from replicax._base import array_conversion
from replicax._base.host_memory import SMALL, Pool, is_settled, put, settle
from replicax._data.prefetch import SPARE
from replicax._values import global_array, mesh_of, of_array
from replicax.data import Dataset

ROWS, WIDTH, BATCH = 320, 32, 32


def aligned(shape, dtype=np.float32):
    """Zeros at an address of which JAX shares the memory."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


@pytest.fixture(scope="module")
def strategy():
    return rx.MirroredStrategy(["GPU:0", "GPU:1"])


def numbered():
    """Rows that say throughout which row they are, and their numbers."""
    return np.repeat(np.arange(ROWS, dtype=np.float32)[:, None], WIDTH, 1), np.arange(ROWS, dtype=np.int32)


def is_right(rows, numbers):
    return (np.asarray(rows) == np.asarray(numbers)[..., None]).all()


# The pool


def test_memory_is_used_again_once_nobody_holds_it():
    pool = Pool()
    first = pool.empty((64, 32), np.float32)
    address = first.ctypes.data
    view = settle(first)[3:5].reshape(-1)
    del first
    assert pool.empty((64, 32), np.float32).ctypes.data != address  # the view holds it
    array = jax.device_put(view, jax.devices("cpu")[0])
    del view
    assert pool.empty((64, 32), np.float32).ctypes.data != address or not is_shared(array, address)
    del array
    gc.collect()
    jnp.zeros(()).block_until_ready()  # JAX lets go of what its arrays held when it is called again
    assert pool.empty((60, 32), np.float32).ctypes.data == address  # of much the same size


def is_shared(array, address):
    return address <= array.unsafe_buffer_pointer() < address + 64 * 32 * 4


@pytest.mark.parametrize("dtype", [np.float32, np.int8, np.bool_, np.complex64, jnp.bfloat16, np.int64])
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (700, 3)])
def test_arrays_of_a_pool_are_as_asked_for_and_begin_where_jax_shares_memory(shape, dtype):
    array = Pool().empty(shape, dtype)
    assert array.shape == shape and array.dtype == dtype and array.ctypes.data % 64 == 0 and array.flags.writeable


def test_settle_marks_arrays_that_will_not_change():
    pool = Pool()
    own = np.arange(6.0)
    read_only = own.view()
    read_only.flags.writeable = False
    filled = settle(pool.empty((3, 2), np.float32))
    assert not is_settled(own) and not is_settled(read_only) and not is_settled(pool.empty((2,), np.int32))
    assert is_settled(filled) and is_settled(filled[1:].T)
    assert is_settled(np.asarray(jax.jit(lambda x: x + 1)(jnp.arange(3.0))))
    assert pool.settled(filled) is filled
    copy = pool.settled(own)
    own[:] = 9
    assert copy.tolist() == [0, 1, 2, 3, 4, 5] and is_settled(copy)
    words = np.array([b"a"], object)
    assert pool.settled(words) is words


@pytest.mark.parametrize(
    "make", [np.ascontiguousarray, np.asfortranarray, lambda a: a[::-1], lambda a: a.transpose(0, 2, 1)]
)
def test_rows_are_right_for_every_memory_layout(make):
    array = make(np.arange(40 * 3 * 5, dtype=np.int16).reshape(40, 3, 5))
    numbers = np.array([7, 0, 39, 7])
    found = Pool().rows(array, numbers)
    np.testing.assert_array_equal(found, array[numbers])
    assert is_settled(found)


# Datasets


def made(kind):
    dataset = Dataset.from_tensor_slices(numbered())
    if kind != "plain":
        dataset = dataset.shuffle(ROWS)
    dataset = dataset.batch(BATCH)
    maps = {"map": lambda x, y: (x + 0, y), "same": lambda x, y: (x, y), "numpy": lambda x, y: (np.asarray(x), y)}
    if kind in maps:
        dataset = dataset.map(maps[kind], num_parallel_calls=2)
    return dataset.prefetch(2) if kind == "prefetch" else dataset


@pytest.mark.parametrize("kind", ["plain", "shuffle", "map", "same", "numpy", "prefetch"])
def test_elements_that_are_kept_never_change(strategy, kind):
    donating = jax.jit(lambda x, y: (x * 2.0, y), donate_argnums=0)
    batches, kept, results = strategy.experimental_distribute_dataset(made(kind)), [], []
    for _ in range(3):
        for number, (rows, numbers) in enumerate(batches):
            if number % 3 == 0:
                kept.append((global_array(rows), global_array(numbers)))
            elif number % 3 == 1:
                results.append(donating(global_array(rows), global_array(numbers)))  # its memory is given away
            else:
                results.append(
                    (global_array(rows) * 2.0, global_array(numbers))
                )  # it is dropped while it is computed with
    assert all(is_right(rows, numbers) for rows, numbers in kept) and len(kept) == 12
    assert all(is_right(rows / 2, numbers) for rows, numbers in results) and len(results) == 18


@pytest.mark.parametrize("way", ["tensors", "numpy", "one device"])
def test_elements_of_datasets_that_are_kept_never_change(way):
    dataset = made("shuffle")
    if way == "one device":
        dataset = rx.OneDeviceStrategy("CPU:0").experimental_distribute_dataset(dataset)
    kept = [element for _ in range(3) for element in (dataset.as_numpy_iterator() if way == "numpy" else dataset)]
    assert all(is_right(rows, numbers) for rows, numbers in kept) and len(kept) == 30


def test_batches_reuse_few_buffers(strategy):
    batches, places = strategy.experimental_distribute_dataset(made("shuffle")), set()
    for _ in range(12):
        for rows, _ in batches:
            places.add(global_array(rows).addressable_shards[0].data.unsafe_buffer_pointer())
    assert len(places) < 40  # of 120 batches


def test_components_share_the_memory_of_their_value_and_outlive_it(strategy):
    donating = jax.jit(lambda x: x * 2.0, donate_argnums=0)
    for rows, numbers in strategy.experimental_distribute_dataset(made("shuffle").take(3)):
        value = of_array(rx.PerReplica, jax.block_until_ready(donating(global_array(rows))), mesh_of(rows))
        shards = [shard.data.unsafe_buffer_pointer() for shard in global_array(value).addressable_shards]
        assert [part.unsafe_buffer_pointer() for part in value.values] == shards  # no program has copied them
        assert [part.devices() for part in value.values] == [{device} for device in strategy.extended._mesh.devices]
        donating(global_array(value)), donating(value.values[0] + 0)
        assert is_right(np.concatenate(value.values) / 2, np.concatenate(numbers.values))


class SameBuffer:
    """Batches that come in one and the same array, filled anew for each."""

    def __init__(self):
        self.buffer = aligned((BATCH, 64))

    def __iter__(self):
        for number in range(4):
            self.buffer[:] = number
            yield self.buffer


@pytest.mark.parametrize("way", ["mirrored", "uneven", "one device", "on the host", "eager", "map"])
def test_a_generator_may_fill_one_buffer_again_and_again(strategy, way):
    source = SameBuffer() if way in ("mirrored", "one device") else Dataset.from_generator(SameBuffer)
    if way == "map":
        source = source.map(lambda x: x)
    if way == "uneven":
        strategy = rx.MirroredStrategy(["GPU:0", "GPU:1", "GPU:2"])
    options = rx.InputOptions(experimental_fetch_to_device=way != "on the host")
    if way == "one device":
        source = rx.OneDeviceStrategy("CPU:0").experimental_distribute_dataset(source)
    elif way not in ("eager", "map"):
        source = strategy.experimental_distribute_dataset(source, options)
    parts = [getattr(element, "values", (element,)) for element in source]
    assert [{float(x) for part in own for x in np.ravel(part)} for own in parts] == [{0.0}, {1.0}, {2.0}, {3.0}]


def test_a_source_may_reuse_its_buffer_when_several_elements_are_kept(strategy):
    buffer = np.zeros(3)

    def filled(_):
        return np.add(buffer, 1.0, out=buffer)

    for source in (SameBuffer(), Dataset.from_generator(SameBuffer)):
        iterator = iter(strategy.experimental_distribute_dataset(source))
        step = rx.function(lambda it: strategy.reduce("MEAN", next(it), axis=(0, 1)), steps_per_call=4)
        assert step(iterator).tolist() == [0.0, 1.0, 2.0, 3.0]
    (batch,) = Dataset.from_generator(SameBuffer).batch(4)
    assert batch[:, 0, 0].tolist() == [0.0, 1.0, 2.0, 3.0]
    (batch,) = Dataset.range(4).map(filled).batch(4)
    assert batch[:, 0].tolist() == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("allowed", [False, True])
def test_64_bits_stay_where_they_are_allowed_and_only_there(strategy, allowed):
    numbers = np.arange(8) + (1 << 40)
    options = rx.InputOptions(experimental_per_replica_buffer_size=0)  # in this thread, where the setting holds
    with jax.enable_x64(allowed):
        (element,) = strategy.experimental_distribute_dataset(Dataset.from_tensors(numbers), options)
        (mapped,) = Dataset.from_tensors(numbers).map(lambda x: x + 0)
        for array in (global_array(element), mapped):
            assert array.dtype == (np.int64 if allowed else np.int32)
            assert np.ravel(array).tolist() == (numbers if allowed else numbers.astype(np.int32)).tolist()


def test_jax_arrays_of_64_bits_keep_them_when_they_move():
    """Where JAX makes 64-bit arrays on demand, `jax.device_put` alone returns shards of 32 bits."""
    mesh = jax.sharding.Mesh(jax.devices()[:2], "x")
    rows, copies = (jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes)) for axes in (("x",), ()))
    with jax.enable_x64(True):
        arrays = [jax.device_put(np.full([2, 3], 1 / 3), where) for where in (rows, copies)]
    before = jax.config.jax_explicit_x64_dtypes
    jax.config.update("jax_explicit_x64_dtypes", "allow")
    try:
        moved = put(arrays, [copies, rows])
    finally:
        jax.config.update("jax_explicit_x64_dtypes", before)
    for array in moved:
        parts = [np.asarray(shard.data) for shard in array.addressable_shards]
        assert {part.dtype for part in parts} == {np.dtype(np.float64)}
        assert all((part == 1 / 3).all() for part in parts)


# Values


def in_scope(strategy, value):
    with strategy.scope():
        return rx.Variable(value)


WAYS = {
    "variable": lambda strategy, value: [rx.Variable(value)],
    "variable of a dtype": lambda strategy, value: [rx.Variable(value, dtype=np.float32)],
    "mirrored variable": lambda strategy, value: in_scope(strategy, value).values,
    "assign": lambda strategy, value: in_scope(strategy, np.ones_like(value)).assign(value).values,
    "tensor": lambda strategy, value: [array_conversion.as_array(value)],
    "argument": lambda strategy, value: [rx.function(lambda x: x)(value)],
    "typed argument": lambda strategy, value: [
        rx.function(lambda x: x, input_signature=[rx.TensorSpec([256], np.float32)])(value)
    ],
    "run": lambda strategy, value: strategy.run(lambda x: x + 0, args=(value,)).values,
    "per replica": lambda strategy, value: (
        rx.function(lambda x: strategy.run(lambda x: x + 0, args=(x,)))(
            strategy.experimental_distribute_values_from_function(lambda context: value)
        ).values
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_no_value_changes_with_the_array_that_it_was_made_of(strategy, way):
    value = aligned((256,))
    found = WAYS[way](strategy, value)
    value[:] = 5
    assert [float(np.max(np.asarray(x))) for x in found] == [0.0] * len(found)


@pytest.mark.parametrize("rows, most", [(4, 3 + SPARE), (SMALL // 4, 3)])
def test_small_batches_of_arrays_are_prefetched_beyond_the_buffer_size(strategy, rows, most):
    options = rx.InputOptions(experimental_per_replica_buffer_size=3)
    source = Dataset.range(4 * rows + 8).batch(rows + 2).repeat()  # of 4 or 8 bytes a number
    iterator = iter(strategy.experimental_distribute_dataset(source, options))
    assert next(iterator).values[0].shape == (rows // 2 + 1,)
    buffer = iterator._buffer
    end = time.monotonic() + 30
    while buffer._items.qsize() <= max(2, most - 2):
        assert time.monotonic() < end
        time.sleep(0.01)
    time.sleep(0.1)
    assert buffer._items.qsize() <= most
    iterator.close()
    assert not buffer.thread.is_alive()
