"""A restored iterator leaves out what it has behind it: no function is called, and nothing read, without need."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path

import numpy as np
import pytest

import replicax as rx
from replicax._base.errors import DataLossError, InvalidArgumentError
from replicax._data import skipping
from replicax.data import Dataset

R = Dataset.range
COUNT = 60


def files(folder, kind, number):
    """Returns files with COUNT strings of different lengths, and the strings."""
    texts = [b"%d" % i * (i % 3 + 1) for i in range(COUNT)]
    if kind == "fixed":
        texts = [b"%04d" % i for i in range(COUNT)]
    names = []
    for part in range(number):
        names.append(str(folder / f"{kind}{part}"))
        own = texts[part * COUNT // number : (part + 1) * COUNT // number]
        if kind.startswith("records"):
            with rx.data.TFRecordWriter(names[-1], "GZIP" if kind == "records.gz" else None) as writer:
                for text in own:
                    writer.write(text)
        else:
            with open(names[-1], "wb") as file:
                file.write(b"".join(text + b"\n" for text in own) if kind == "lines" else b"##" + b"".join(own) + b"#")
    return names


READERS = {
    "records": rx.data.TFRecordDataset,
    "records.gz": lambda names: rx.data.TFRecordDataset(names, "GZIP"),
    "lines": rx.data.TextLineDataset,
    "fixed": lambda names: rx.data.FixedLengthRecordDataset(names, 4, header_bytes=2, footer_bytes=1),
}
AFTER = {
    "as they come": lambda dataset: dataset,
    "repeat": lambda dataset: dataset.repeat(2),
    "shuffle": lambda dataset: dataset.shuffle(20, seed=1).repeat(2).batch(4),
    "map, batch, shuffle": lambda dataset: dataset.map(lambda x: x).batch(7).shuffle(3, seed=1).repeat(2),
}


def plain(element):
    return np.asarray(element).tolist() if not hasattr(element, "tolist") else element.tolist()


def check_restored_everywhere(make):
    """Restores at each position."""
    iterator, states, seen = make().as_numpy_iterator(), [], []
    for _ in range(200):
        states.append(iterator.save_state())
        if (element := next(iterator, None)) is None:
            break
        seen.append(plain(element))
    for position, state in enumerate(states):
        restored = make().as_numpy_iterator()
        restored.restore_state(state)
        assert [plain(element) for element in restored] == seen[position:], position


@pytest.mark.sampled(3, others="thorough")
@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("kind", READERS)
def test_files_go_on_at_each_place(tmp_path, kind, number, after):
    names = files(tmp_path, kind, number)
    check_restored_everywhere(lambda: AFTER[after](READERS[kind](names)))


@pytest.mark.parametrize("kind", READERS)
def test_interleaved_files_go_on_at_each_place(tmp_path, kind):
    names = Dataset.from_tensor_slices(np.array(files(tmp_path, kind, 3), object))
    read = READERS[kind]
    check_restored_everywhere(lambda: names.interleave(read, cycle_length=2, block_length=3).shuffle(9, seed=4))


COUNTED = {
    "map, shuffle": lambda d: d.shuffle(10, seed=1),
    "map, batch": lambda d: d.batch(1),
    "map, batch, shuffle": lambda d: d.batch(1).shuffle(10, seed=1),
    "map, padded batch, shuffle": lambda d: d.padded_batch(1).shuffle(10, seed=1),
    "map, prefetch, shuffle": lambda d: d.prefetch(3).shuffle(7, seed=1),
    "map, zip, shuffle": lambda d: Dataset.zip(d, R(1000).shuffle(9, seed=1)).shuffle(9, seed=1),
    "map, repeat, take, skip": lambda d: d.repeat(3).skip(3).take(990),
    "map, concatenate": lambda d: d.take(10).concatenate(d),
    "map, shard, shuffle": lambda d: d.shard(2, 1).shuffle(10, seed=1),
    "map, sampled": lambda d: Dataset.sample_from_datasets([d, d], seed=3),
    "map, chosen": lambda d: Dataset.choose_from_datasets([d, d], R(2).repeat()),
    "map, interleave": lambda d: R(3).interleave(lambda i: d, cycle_length=2).shuffle(10, seed=1),
}


@pytest.mark.sampled(2, others="thorough")
@pytest.mark.parametrize("threads", [None, 2])
@pytest.mark.parametrize("name", COUNTED)
def test_functions_are_not_called_for_what_is_skipped(name, threads):
    calls = []

    def counted(x):
        calls.append(int(x))
        return x * 2

    def make():
        return COUNTED[name](R(500).map(counted, num_parallel_calls=threads))

    iterator = make().as_numpy_iterator()
    for _ in range(200):
        next(iterator)
    state = iterator.save_state()
    expected = [str(element) for element in itertools.islice(iterator, 20)]
    del iterator
    calls.clear()
    restored = make().as_numpy_iterator()
    restored.restore_state(state)
    assert [str(element) for element in itertools.islice(restored, 20)] == expected
    ahead = 0 if threads is None else 2 * threads * 3
    assert len(calls) <= 20 * 2 + 15 + ahead


def test_what_is_skipped_of_a_file_of_records_is_not_read(tmp_path):
    (name,) = files(tmp_path, "records", 1)
    dataset = rx.data.TFRecordDataset(name).shuffle(2, seed=0)
    iterator = dataset.as_numpy_iterator()
    for _ in range(30):
        next(iterator)
    state, rest = iterator.save_state(), list(iterator)
    path = Path(name)
    data = bytearray(path.read_bytes())
    data[12] ^= 1  # the first record's text, which its checksum no longer fits
    path.write_bytes(data)
    iterator.restore_state(state)
    assert list(iterator) == rest
    with pytest.raises(DataLossError, match="Corrupted record"):
        list(rx.data.TFRecordDataset(name).as_numpy_iterator())


def test_an_exception_of_a_source_while_skipping_comes_up_and_the_rest_follows(tmp_path):
    names = files(tmp_path, "records", 3)
    dataset = rx.data.TFRecordDataset(names)
    iterator = dataset.as_numpy_iterator()
    for _ in range(50):
        next(iterator)
    state = iterator.save_state()
    (tmp_path / "records1").unlink()
    iterator.restore_state(state)
    with pytest.raises(FileNotFoundError, match="records1"):
        next(iterator)
    with pytest.raises(StopIteration):  # there are not as many as were skipped
        next(iterator)


def test_an_exception_of_a_function_comes_in_place_of_its_element():
    def failing(x):
        if x == 7:
            raise InvalidArgumentError("seven")
        return x

    order = [int(x) for x in R(12).shuffle(4, seed=1)]
    place = order.index(7)
    dataset = R(12).map(lambda x: x).shuffle(4, seed=1)
    iterator = iter(dataset)
    for _ in range(place - 1):
        next(iterator)
    restored = iter(R(12).map(failing).shuffle(4, seed=1))
    restored.restore_state(iterator.save_state())
    assert int(next(restored)) == order[place - 1]
    with pytest.raises(InvalidArgumentError, match="seven"):
        for _ in range(12):
            next(restored)


@pytest.mark.thorough
def test_the_order_of_a_shuffle_is_one_whatever_it_shuffles():
    for count, size in ((20_000, 9000), (8200, 8), (30_000, 1)):
        rows = [int(x) for x in R(count).shuffle(size, seed=2).as_numpy_iterator()]
        elements = R(count).window(1).flat_map(lambda w: w).shuffle(size, seed=2)
        assert [int(x) for x in elements.as_numpy_iterator()] == rows


def test_what_cannot_be_skipped_is_named(monkeypatch):
    monkeypatch.setattr(skipping, "MANY", 5)

    def going_on(dataset):
        iterator = dataset.as_numpy_iterator()
        for _ in range(9):
            next(iterator)
        state = iterator.save_state()
        iterator.restore_state(state)
        return next(iterator)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        going_on(R(90).map(lambda x: x).shuffle(20, seed=1).repeat(2))
    text = r"after its element 9\..*since `{}` \(test_data_skipping.py:\d+\) cannot leave them out"
    with pytest.warns(UserWarning, match=text.format("filter")):
        going_on(R(90).filter(lambda x: x % 2 == 0))
    with pytest.warns(UserWarning, match=text.format("filter")):
        going_on(R(90).filter(lambda x: x % 2 == 0).map(lambda x: x).shuffle(4, seed=1))
    with pytest.warns(UserWarning, match=text.format("from_generator")):
        going_on(Dataset.from_generator(lambda: iter(range(20))).batch(1).prefetch(1))


BATCHES_OF_ROWS = {
    "shuffle": lambda batches: batches.shuffle(3, seed=1).repeat(2),
    "interleave": lambda batches: batches.interleave(Dataset.from_tensor_slices, cycle_length=2),
    "flat_map": lambda batches: batches.flat_map(Dataset.from_tensor_slices),
    "sampled": lambda batches: Dataset.sample_from_datasets([batches, batches], seed=2),
    "chosen": lambda batches: Dataset.choose_from_datasets([batches, batches], R(2).repeat()),
}


@pytest.mark.sampled(2, others="thorough")
@pytest.mark.parametrize("drop_remainder", [False, True])
@pytest.mark.parametrize("name", BATCHES_OF_ROWS)
def test_batches_of_rows_go_on_at_each_place(name, drop_remainder):
    rows = Dataset.from_tensor_slices(np.arange(17)).shuffle(9, seed=5)
    check_restored_everywhere(lambda: BATCHES_OF_ROWS[name](rows.batch(4, drop_remainder)))


@pytest.mark.parametrize("name", AFTER)
def test_compressed_files_are_named(name, tmp_path, monkeypatch):
    """And the same files that are not compressed are not."""
    monkeypatch.setattr(skipping, "MANY", 3)

    def going_on(kind):
        iterator = AFTER[name](READERS[kind](files(tmp_path, kind, 2))).as_numpy_iterator()
        for _ in range(4):
            next(iterator)
        iterator.restore_state(iterator.save_state())
        return next(iterator)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = going_on("records")
    text = r"element \d+\..*since `TFRecordDataset` \(test_data_skipping.py:\d+\), whose files are compressed"
    with pytest.warns(UserWarning, match=text):
        assert plain(going_on("records.gz")) == plain(expected)


def test_batches_that_are_cut_anew_are_named(monkeypatch):
    monkeypatch.setattr(skipping, "MANY", 3)
    strategy, options = rx.MirroredStrategy(["cpu:0", "cpu:1"]), rx.data.Options()

    def going_on(policy):
        options.experimental_distribute.auto_shard_policy = policy
        iterator = iter(strategy.experimental_distribute_dataset(R(60).batch(4).with_options(options)))
        for _ in range(4):
            next(iterator)
        iterator.restore_state(iterator.save_state())
        return [np.asarray(part).tolist() for part in next(iterator).values]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert going_on(rx.data.AutoShardPolicy.DATA) == [[16, 17], [18, 19]]
    text = r"after its element 4\..*`batch` \(test_data_skipping.py:\d+\), whose batches are cut anew for the replicas,"
    with pytest.warns(UserWarning, match=text):
        assert going_on(rx.data.AutoShardPolicy.OFF) == [[16, 17], [18, 19]]


@pytest.mark.thorough
def test_elements_that_fail_and_are_ignored_fail_and_are_ignored_after_a_restore_too():
    """Without `ignore_errors` an exception is not counted, so that the element after it would come again."""

    def failing(x):
        if x % 5 == 3:
            raise InvalidArgumentError("three")
        return x

    def make():
        return R(40).map(failing).ignore_errors()

    assert [int(x) for x in make()] == [x for x in range(40) if x % 5 != 3]
    for after in AFTER.values():
        check_restored_everywhere(lambda after=after: after(make()))
