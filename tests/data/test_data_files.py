"""Datasets on disk: caches, saved datasets and snapshots, records, and how files are divided among workers."""

import collections
import gzip
import os
import threading
import zipfile
import zlib

import jax
import ml_dtypes
import numpy as np
import pytest

from replicax import data
from replicax._base.atomic_files import write_record
from replicax._base.errors import DataLossError, InvalidArgumentError
from replicax._data.nodes.node import node_of
from replicax._data.reading import Reading
from replicax.data import Dataset

R = Dataset.range
Pair = collections.namedtuple("Pair", "a b")


def listed(dataset):
    return [jax.tree.map(lambda a: np.asarray(a).tolist(), e) for e in dataset.as_numpy_iterator()]


def counting(n=4):
    """A dataset, and the list to which each element made adds one."""
    calls = []
    return R(n).map(lambda x: (calls.append(1), x)[1]), calls


EVERYTHING = {
    "pair": Pair(np.ones((3, 2), ml_dtypes.bfloat16), np.array(["x", "é", ""])),
    "nested": (np.arange(3), np.zeros((3, 0)), np.array([True, False, True])),
    "wide": np.array([1 + 2j, 0, 1e-300]),
}


def same(a, b):
    return all(
        x.dtype == y.dtype and x.shape == y.shape and (x == y).all()
        for x, y in zip(map(np.asarray, jax.tree.leaves(a)), map(np.asarray, jax.tree.leaves(b)), strict=True)
    )


# --- cache -----------------------------------------------------------------------------------------------------------


def test_a_cache_file_is_there_after_a_complete_pass_and_read_from_then_on(tmp_path):
    path = tmp_path / "cache"
    dataset, calls = counting()
    cached = dataset.cache(str(path))
    iterator = iter(cached)
    next(iterator)
    del iterator
    assert os.listdir(tmp_path) == []
    assert listed(cached) == listed(cached) == [0, 1, 2, 3] and os.listdir(tmp_path) == ["cache"]
    assert len(calls) == 5
    other, other_calls = counting()
    assert listed(other.cache(path)) == [0, 1, 2, 3] and not other_calls
    assert cached.cardinality() == 4 and cached.element_spec == dataset.element_spec


def test_an_error_leaves_no_file(tmp_path):
    dataset = R(3).map(lambda x: 1 // (1 - int(x))).cache(str(tmp_path / "cache"))
    with pytest.raises(ZeroDivisionError):
        listed(dataset)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("keep", [lambda d, p: d.cache(str(p)), lambda d, p: d.snapshot(str(p))])
def test_elements_of_every_kind_are_restored_unchanged(tmp_path, keep):
    plain = Dataset.from_tensor_slices(EVERYTHING)
    kept = keep(plain, tmp_path / "kept")
    for _ in range(2):
        for a, b in zip(plain.as_numpy_iterator(), kept.as_numpy_iterator(), strict=True):
            assert same(a, b)
    assert kept.element_spec == plain.element_spec
    ragged = keep(R(3).map(lambda n: np.arange(int(n))), tmp_path / "ragged")
    assert listed(ragged) == listed(ragged) == [[], [0], [0, 1]]


def test_reading_element_spec_writes_nothing(tmp_path):
    dataset = R(3).map(lambda x: np.asarray(x)[None] if x > -1 else 1 / 0).filter(lambda x: True)
    for kept in (dataset.cache(str(tmp_path / "a")), dataset.snapshot(str(tmp_path / "b"))):
        _ = kept.map(lambda x: [int(x[0])]).element_spec
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("count", [0, 1, 1023, 1024, 1025, 3000])
def test_a_file_has_all_elements_whatever_their_number_and_shapes(tmp_path, count):
    texts = R(count).map(lambda n: (n, np.array(b"x" * int(n % 5)), np.zeros((int(n % 3), 2), np.int8)))
    kept = texts.cache(str(tmp_path / "cache"))
    assert listed(kept) == listed(kept) == listed(texts)


def test_elements_of_several_ranks_have_files_and_those_of_several_dtypes_have_not(tmp_path):
    ranks = Dataset.from_generator(lambda: iter([1, [2], [[3]], [[4]], 5])).cache(str(tmp_path / "ranks"))
    assert listed(ranks) == listed(ranks) == [1, [2], [[3]], [[4]], 5]
    with pytest.raises(InvalidArgumentError, match="one structure and its dtypes"):
        listed(Dataset.from_generator(lambda: iter([1, 2.0])).cache(str(tmp_path / "dtypes")))


def test_a_cache_of_numbers_in_the_other_byte_order_has_their_values(tmp_path):
    kept = Dataset.from_tensor_slices(np.arange(3, dtype=">f4")).cache(str(tmp_path / "cache"))
    assert listed(kept) == listed(kept) == [0, 1, 2]


def test_numpy_reads_the_files_of_elements(tmp_path):
    listed(R(3).map(lambda n: np.full(int(n), n)).cache(str(tmp_path / "cache")))
    with np.load(tmp_path / "cache") as arrays:
        assert arrays["0.0.values"].tolist() == [1, 2, 2] and arrays["0.0.shapes"].tolist() == [[0], [1], [2]]


def test_damaged_files_are_named(tmp_path):
    path = tmp_path / "cache"
    dataset = R(3).cache(str(path))
    listed(dataset)
    whole = path.read_bytes()
    place = whole.index(np.arange(3).tobytes())
    for damaged in (whole[:-12], whole[:place] + b"\x01" + whole[place + 1 :], b"hello", b""):
        path.write_bytes(damaged)
        with pytest.raises(DataLossError, match=f"{path} is damaged, or is no file of elements that replicax wrote"):
            listed(dataset)
    with pytest.raises(IsADirectoryError, match="is a folder. Give the name of a file"):
        listed(R(3).cache(str(tmp_path)))


# --- save, load, snapshot --------------------------------------------------------------------------------------------


def test_save_and_load(tmp_path):
    plain = Dataset.from_tensor_slices(EVERYTHING)
    plain.save(tmp_path / "new" / "saved", compression="GZIP")
    assert os.listdir(tmp_path / "new") == ["saved"]
    loaded = Dataset.load(tmp_path / "new" / "saved")
    assert loaded.cardinality() == 3
    for a, b in zip(plain.as_numpy_iterator(), loaded.as_numpy_iterator(), strict=True):
        assert same(a, b) and b["pair"]._fields == ("a", "b")
    assert jax.tree.leaves(loaded.element_spec) == jax.tree.leaves(plain.element_spec)
    known = Dataset.load(tmp_path / "new" / "saved", element_spec=plain.element_spec)
    assert known.element_spec == plain.element_spec and type(next(iter(known))["pair"]) is Pair
    with pytest.raises(InvalidArgumentError, match="was saved with elements"):
        Dataset.load(tmp_path / "new" / "saved", element_spec={"x": data.Dataset.range(1).element_spec})


def test_saving_again_replaces_and_saving_elsewhere_does_not(tmp_path):
    R(3).save(tmp_path / "saved")
    R(2).save(tmp_path / "saved")
    assert listed(Dataset.load(tmp_path / "saved")) == [0, 1]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("keep")
    with pytest.raises(FileExistsError, match="is there and is no saved dataset: it is left as it is"):
        R(2).save(tmp_path / "mine")
    with pytest.raises(ZeroDivisionError):
        R(2).map(lambda x: 1 // int(x)).save(tmp_path / "saved")
    assert sorted(os.listdir(tmp_path)) == ["mine", "saved"] and os.listdir(tmp_path / "mine") == ["notes"]
    assert listed(Dataset.load(tmp_path / "saved")) == [0, 1]
    R(0).save(tmp_path / "nothing")
    assert listed(Dataset.load(tmp_path / "nothing")) == [] and Dataset.load(tmp_path / "nothing").element_spec


def test_a_dataset_that_is_saved_anew_is_not_read_as_the_one_before(tmp_path):
    R(3).save(tmp_path / "saved")
    before = Dataset.load(tmp_path / "saved")
    R(3).save(tmp_path / "saved")
    with pytest.raises(DataLossError, match="it was written anew since it was opened"):
        listed(before)
    assert listed(Dataset.load(tmp_path / "saved")) == [0, 1, 2]


def test_all_parts_are_read_from_one_open_file(tmp_path, monkeypatch):
    R(100).save(tmp_path / "saved", shard_func=lambda x: x % 50)
    opened = []
    zip_file = zipfile.ZipFile
    monkeypatch.setattr(zipfile, "ZipFile", lambda path: opened.append(path) or zip_file(path))
    together = Dataset.load(tmp_path / "saved")
    in_turn = Dataset.load(tmp_path / "saved", reader_func=lambda parts: parts.flat_map(lambda part: part))
    for _ in range(2):
        assert sorted(listed(together)) == sorted(listed(in_turn)) == list(range(100))
    assert len(opened) == 2  # one of each dataset


def test_a_file_that_was_copied_over_itself_is_read_on(tmp_path):
    R(2000).save(tmp_path / "saved")
    dataset = Dataset.load(tmp_path / "saved")
    elements = iter(dataset)
    assert int(next(elements)) == 0
    os.utime(tmp_path / "saved" / "elements.npz", (0, 0))
    assert listed(dataset) == list(range(2000))
    assert [int(x) for x in elements] == list(range(1, 2000))


def test_files_by_a_function_and_read_by_a_function(tmp_path):
    R(7).save(tmp_path / "saved", shard_func=lambda x: x % 2)
    assert listed(Dataset.load(tmp_path / "saved")) == [0, 1, 2, 3, 4, 5, 6]
    assert len(Dataset.load(tmp_path / "saved")) == 7
    one_by_one = Dataset.load(tmp_path / "saved", reader_func=lambda files: files.flat_map(lambda file: file))
    assert listed(one_by_one) == [0, 2, 4, 6, 1, 3, 5]
    with pytest.raises(TypeError, match="`shard_func` must return a scalar integer, got one of float32"):
        R(7).save(tmp_path / "wrong", shard_func=lambda x: 1.0)
    with pytest.raises(TypeError, match="`reader_func` must return a Dataset"):
        Dataset.load(tmp_path / "saved", reader_func=lambda files: 3)


def test_snapshot_is_made_once(tmp_path):
    dataset, calls = counting()
    _ = dataset.element_spec
    calls.clear()
    taken = dataset.snapshot(tmp_path / "snapshot", shard_func=lambda x: x // 2)
    next(iter(taken))
    assert os.listdir(tmp_path) == []
    assert listed(taken) == [0, 1, 2, 3] and len(calls) == 5
    assert listed(taken) == [0, 2, 1, 3] and len(calls) == 5  # two files, read in turn
    with pytest.raises(InvalidArgumentError, match="was saved with elements"):
        listed(R(3).map(lambda x: (x, x)).snapshot(tmp_path / "snapshot"))


@pytest.mark.parametrize(
    "wrong",
    [lambda p: R(2).save(p, "ZIP"), lambda p: Dataset.load(p, compression="?"), lambda p: R(2).snapshot(p, "x")],
)
def test_supported_compressions(tmp_path, wrong):
    with pytest.raises(ValueError, match='The compression is "GZIP" or None, got'):
        wrong(tmp_path / "saved")


def test_damaged_folders_are_named(tmp_path):
    R(3).save(tmp_path / "saved")
    (tmp_path / "saved" / "replicax-dataset.json").write_text("{}")
    with pytest.raises(DataLossError, match="is no dataset that replicax saved"):
        Dataset.load(tmp_path / "saved")
    with pytest.raises(FileNotFoundError, match="There is no saved dataset"):
        Dataset.load(tmp_path / "other")
    write_record(str(tmp_path / "saved" / "replicax-dataset.json"), {"format": "replicax dataset 3", "files": []})
    with pytest.raises(DataLossError, match="another version of replicax: its format is 'replicax dataset 3'"):
        Dataset.load(tmp_path / "saved")
    with pytest.raises(TypeError, match="strings for the keys of dicts"):
        Dataset.from_tensors({1: 2}).save(tmp_path / "keys")


# --- records ---------------------------------------------------------------------------------------------------------


def records(path, *texts, options=None):
    with data.TFRecordWriter(path, options) as writer:
        for text in texts:
            writer.write(text)


class TFRecordOptions:
    compression_type = "GZIP"


def test_records_with_and_without_compression(tmp_path):
    records(tmp_path / "plain", b"a", "é")
    records(tmp_path / "zipped", b"a", "é", options=TFRecordOptions())
    assert gzip.decompress((tmp_path / "zipped").read_bytes()) == (tmp_path / "plain").read_bytes()
    for name, kind in (("plain", None), ("plain", ""), ("zipped", "GZIP")):
        assert listed(data.TFRecordDataset(tmp_path / name, kind)) == [b"a", "é".encode()]
    with pytest.raises(DataLossError):
        listed(data.TFRecordDataset(tmp_path / "zipped"))
    with pytest.raises(DataLossError, match="cannot be read"):
        listed(data.TFRecordDataset(tmp_path / "plain", "GZIP"))


def test_files_larger_than_what_is_read_at_once_give_the_same_strings_in_batches(tmp_path):
    numbers = np.random.default_rng(0)
    texts = [numbers.bytes(n).translate(bytes.maketrans(b"\n\r\0", b"???")) for n in numbers.integers(0, 3000, 500)]
    texts[7] = b"x" * 700_000
    names = {kind: [str(tmp_path / f"{kind}{i}") for i in range(2)] for kind in ("lines", "records", "fixed")}
    for lines, records, fixed, part in zip(*names.values(), (texts[:200], texts[200:])):
        with open(lines, "wb") as file:
            file.writelines(text + b"\r\n" for text in part)
        with data.TFRecordWriter(records) as writer:
            for text in part:
                writer.write(text)
        with open(fixed, "wb") as file:
            file.write(b"head" + b"".join(text[:50].ljust(50, b".") for text in part) + b"foot!")
    datasets = {
        "lines": data.TextLineDataset(names["lines"]),
        "records": data.TFRecordDataset(names["records"]),
        "fixed": data.FixedLengthRecordDataset(names["fixed"], 50, header_bytes=4, footer_bytes=5),
    }
    for kind, dataset in datasets.items():
        expected = texts if kind != "fixed" else [text[:50].ljust(50, b".") for text in texts]
        assert listed(dataset) == expected
        for size in (1, 64, 333):  # of which some have strings of both files
            batches = listed(dataset.batch(size))
            assert [len(batch) for batch in batches] == [size] * (500 // size) + [500 % size] * (500 % size > 0)
            assert [text for batch in batches for text in batch] == expected
        assert listed(dataset.batch(64).skip(3).unbatch()) == expected[192:]
        iterator = iter(dataset.batch(64))
        next(iterator)
        state = iterator.save_state()
        following = next(iterator).tolist()
        again = iter(dataset.batch(64))
        again.restore_state(state)
        assert next(again).tolist() == following == expected[64:128]


def test_a_file_that_fails_gives_the_strings_before_and_the_next_file_goes_on(tmp_path):
    paths = [str(tmp_path / name) for name in "ab"]
    for path in paths:
        with data.TFRecordWriter(path) as writer:
            for i in range(4):
                writer.write(f"{os.path.basename(path)}{i}")
    content = bytearray((tmp_path / "a").read_bytes())
    content[18 * 2 + 12] ^= 1  # the third record
    (tmp_path / "a").write_bytes(content)
    iterator, found = data.TFRecordDataset(paths).as_numpy_iterator(), []
    while True:
        try:
            found.append(next(iterator))
        except StopIteration:
            break
        except DataLossError as error:
            found.append(str(error))
    assert found == [b"a0", b"a1", f"Corrupted record at byte 36 of {paths[0]!r}.", b"b0", b"b1", b"b2", b"b3"]
    assert listed(data.TFRecordDataset(paths).ignore_errors().batch(3)) == [
        [b"a0", b"a1", b"b0"],
        [b"b1", b"b2", b"b3"],
    ]


@pytest.mark.parametrize("compression", ["GZIP", "ZLIB"])
def test_what_comes_before_the_end_of_a_compressed_file_that_was_cut_off_is_read(tmp_path, compression):
    text = b"".join(b"%d %d\n" % (i, i * 7919 % 65521) for i in range(20000))
    whole = gzip.compress(text) if compression == "GZIP" else zlib.compress(text)
    path = str(tmp_path / "cut")
    with open(path, "wb") as file:
        file.write(whole[: len(whole) // 2])
    for dataset, least in (
        (data.TextLineDataset(path, compression), 5000),
        (data.FixedLengthRecordDataset(path, 5, compression_type=compression), 15000),
    ):
        found = list(dataset.ignore_errors().as_numpy_iterator())
        joined = (b"\n" if least == 5000 else b"").join(found)
        assert len(found) > least and text.startswith(joined)
        iterator = dataset.as_numpy_iterator()
        for _ in found:
            next(iterator)
        with pytest.raises(DataLossError, match="cut' cannot be read"):
            next(iterator)


def test_a_pipe_gives_each_line_as_it_comes(tmp_path):
    path = str(tmp_path / "pipe")
    os.mkfifo(path)
    read = threading.Event()

    def write():
        with open(path, "wb", buffering=0) as pipe:
            pipe.write(b"first\n")
            read.wait(60)
            pipe.write(b"second\n")

    writer = threading.Thread(target=write)
    writer.start()
    try:
        lines = data.TextLineDataset(path).as_numpy_iterator()
        assert next(lines) == b"first"
    finally:
        read.set()
    assert list(lines) == [b"second"]
    writer.join()


def test_a_damaged_record_is_found_where_it_is(tmp_path):
    path = tmp_path / "records"
    records(path, b"one", b"two")
    whole = path.read_bytes()
    for place in (0, 8, 13, 17):
        path.write_bytes(whole[: 19 + place] + bytes([whole[19 + place] ^ 4]) + whole[19 + place + 1 :])
        iterator = data.TFRecordDataset([path]).as_numpy_iterator()
        assert next(iterator) == b"one"
        with pytest.raises(DataLossError, match="Corrupted record at byte 19|Truncated record at byte 19"):
            next(iterator)
    path.write_bytes(whole[:25])
    with pytest.raises(DataLossError, match="Truncated record at byte 19"):
        listed(data.TFRecordDataset(path))


def test_without_checksums_records_are_read_and_not_written(tmp_path, monkeypatch):
    records(tmp_path / "records", b"one")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert listed(data.TFRecordDataset(tmp_path / "records")) == [b"one"]
    with pytest.raises(ImportError, match="pip install google-crc32c grain"):
        data.TFRecordWriter(tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_files_are_divided_among_workers(tmp_path):
    names = [tmp_path / f"{n}.txt" for n in range(4)]
    for name in names:
        name.write_text(f"{name.stem}a\n{name.stem}b\n")
    by_name = Dataset.list_files(f"{tmp_path}/*.txt", shuffle=False)
    for dataset in (
        data.TextLineDataset(names),
        data.TextLineDataset(Dataset.from_tensor_slices([str(name) for name in names])),
        by_name.flat_map(data.TextLineDataset),
        by_name.interleave(data.TextLineDataset, cycle_length=1).map(lambda line: line),
    ):
        assert node_of(dataset).files == 4 and len(listed(dataset)) == 8
        shares = [list(node_of(dataset).iterate(Reading(share=(2, index)))) for index in range(2)]
        assert [[e.item() for e in share] for share in shares] == [
            [b"0a", b"0b", b"2a", b"2b"],
            [b"1a", b"1b", b"3a", b"3b"],
        ]


def test_list_files_shuffles_anew_in_each_pass(tmp_path):
    for n in range(20):
        (tmp_path / f"{n:02d}").write_text("")
    files = Dataset.list_files(f"{tmp_path}/*", seed=3)
    one, two = listed(files), listed(files)
    assert one != two and sorted(one) == sorted(two) and len(one) == 20
    assert listed(Dataset.list_files(f"{tmp_path}/*", seed=3)) == one
    assert listed(Dataset.list_files([tmp_path / "0?"], shuffle=False)) == sorted(one)[:10]
