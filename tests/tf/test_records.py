"""Records, text, tables and ragged values of `replicax.tf` against TensorFlow's.

The `.txt` files in tests/tf/tf_records have expressions, and tests/recorded/records.json what TensorFlow 2.21 gives for
them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from evaluation import Expressions, difference

FOLDER = Path(__file__).parent / "tf_records"


def expressions_of(files: Sequence[Path], record: str) -> Expressions:
    """Return the expressions of files; a result depends on the statements before it, too."""
    texts = {}
    for file in files:
        prepared = ""
        for line in file.read_text(encoding="utf-8").splitlines():
            if line.startswith("let: "):
                prepared += line + "\n"
            elif line and not line.startswith("#"):
                texts[line] = prepared + line
    return Expressions(record, FOLDER / "run.py", texts, files)


RECORDS = expressions_of(sorted(FOLDER.glob("*.txt")), "records")
# The beginning of a program: `sizes` gets how many records are parsed together each time.
COUNTED = """
        from replicax.tf import _parse
        sizes = []
        original = _parse._Batch.__init__
        def counted(self, plan, records, *rest):
            sizes.append(len(records))
            original(self, plan, records, *rest)
        _parse._Batch.__init__ = counted
"""


def without_text(result):
    """A result without the text of an error, which differs."""
    return {part: value for part, value in result.items() if part != "text"}


@pytest.fixture(scope="module")
def results(request):
    return RECORDS.results(request)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("expression", RECORDS.all)
def test_an_expression_gives_what_tensorflow_gives(expression, results):
    theirs, ours = (without_text(side[expression]) for side in results)
    assert difference(theirs, ours, rel=1e-4, abs=1e-6) is None
    if expression.startswith("parameters("):
        assert theirs["value"] == ours["value"]
    text = results.tensorflow[expression].get("text", "")
    if "data type" in text.lower():  # which says which feature is wrong
        words = re.compile(r"(?:Key|Feature): \w+|Data types don't match|required but could not be found|size: \d+")
        assert words.findall(results.replicax[expression]["text"]) == words.findall(text)


def test_the_record_is_what_tensorflow_gives(request, tensorflow_python):
    recorded, live = RECORDS.sample(request)
    for expression, found in live.items():
        assert difference(without_text(recorded[expression]), without_text(found)) is None, expression


def test_checkpoints_have_tables_that_change(run_tf):
    run_tf(
        """
        import tempfile
        import replicax.tf as tf
        def table():
            return tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, -1)
        first, second = table(), table()
        first.insert(["a", "b"], [1, 2])
        path = tf.train.Checkpoint(words=first).save(tempfile.mkdtemp() + "/c")
        second.insert(["z"], [5])
        tf.train.Checkpoint(words=second).restore(path)
        assert second.lookup(["a", "b", "z"]).numpy().tolist() == [1, 2, -1]
        """
    )


def test_single_records_are_parsed_with_their_neighbors(run_tf):
    run_tf(
        COUNTED
        + """
        from replicax.tf import _record_blocks as record_blocks

        def example(**features):
            kinds = {int: ("int64_list", tf.train.Int64List), bytes: ("bytes_list", tf.train.BytesList)}
            made = {}
            for key, value in features.items():
                name, kind = kinds[type(value)]
                made[key] = tf.train.Feature(**{name: kind(value=[value])})
            return tf.train.Example(features=tf.train.Features(feature=made)).SerializeToString()
        path = tempfile.mkdtemp() + "/records"
        with tf.io.TFRecordWriter(path) as writer:
            for i in range(300):
                writer.write(example(number=i, text=b"t%d" % i) if i != 150 else example(text=b"none"))
        features = {
            "number": tf.io.FixedLenFeature([], tf.int64, 7), "text": tf.io.FixedLenFeature([1], tf.string),
        }
        parsed = []
        def parse(record):
            parsed.append(1)
            return tf.io.parse_single_example(record, features)

        expected = [7 if i == 150 else i for i in range(300)]
        for dataset in (
            tf.data.TFRecordDataset(path).map(parse),
            tf.data.TFRecordDataset(path).shuffle(100, seed=1).map(parse, num_parallel_calls=3),
        ):
            del sizes[:]
            found = list(dataset.as_numpy_iterator())
            assert sorted(int(x["number"]) for x in found) == sorted(expected)
            assert all(x["text"].tolist() == [b"none" if x["number"] == 7 and x["text"][0] == b"none" else
                                              b"t%d" % x["number"]] for x in found)
            assert found[0]["number"].dtype == np.int64 and found[0]["number"].shape == ()
            assert sum(sizes) < 700 and len(sizes) < 20, sizes  # groups of 128, not one by one

        # A record that is not as asked for fails by itself.
        strict = {"number": tf.io.FixedLenFeature([], tf.int64)}
        one = tf.data.TFRecordDataset(path).map(lambda record: tf.io.parse_single_example(record, strict))
        iterator, numbers, failed = one.as_numpy_iterator(), [], 0
        while True:
            try:
                numbers.append(int(next(iterator)["number"]))
            except StopIteration:
                break
            except tf.errors.InvalidArgumentError as error:
                failed += 1
                assert "number" in str(error)
        assert failed == 1 and numbers == [i for i in range(300) if i != 150]

        # What is returned is the caller's own, strings too.
        (record,) = tf.data.TFRecordDataset(path).take(1)
        for key, value in ("number", 99), ("text", b"other"):
            mine = np.asarray(tf.io.parse_single_example(record, features)[key])
            if mine.flags.writeable:
                mine[...] = value
            assert np.asarray(tf.io.parse_single_example(record, features)[key]) != value
        def add_one(x):
            x += 1
            return x
        def added(record):
            number = tf.io.parse_single_example(record, {"number": tf.io.FixedLenFeature([1], tf.int64)})["number"]
            return tf.numpy_function(add_one, [number], tf.int64)
        twice = tf.data.TFRecordDataset(path).take(3).cache().map(added).repeat(2)
        assert [int(x[0]) for x in twice] == [1, 2, 3, 1, 2, 3]
        texts = np.array([b"a", b"b"], object)
        tensor = tf.constant(texts)
        texts[0] = b"z"
        assert tensor.numpy().tolist() == [b"a", b"b"]

        # Where few of the neighbors are asked for, most records are parsed by themselves.
        many = path + ".many"
        with tf.io.TFRecordWriter(many) as writer:
            for i in range(64 * 200):
                writer.write(example(number=i, text=b"t"))
        del sizes[:]
        number = {"number": tf.io.FixedLenFeature([], tf.int64)}
        few = tf.data.TFRecordDataset(many).shard(64, 1).map(lambda record: tf.io.parse_single_example(record, number))
        found = [int(x["number"]) for x in few]
        assert found == list(range(1, 64 * 200, 64)) and sum(size > 1 for size in sizes) < 110, sizes

        # What is known about records, and what they have become, is bounded, also before anything asks for neighbors.
        record_blocks._is_used = False
        for records in ([], [bytes(1 << 16)] * 3, [b"a", b"b"]):
            record_blocks.note(records)
        assert list(record_blocks._recent) == [[b"a", b"b"]]
        record_blocks._begin()
        assert not record_blocks._recent
        record_blocks._MOST_BYTES = 1000
        for _ in range(20):
            record_blocks.note([bytes([i]) * 100 for i in range(5)])
        assert record_blocks._bytes <= 1500 and len(record_blocks._places) <= 15
        record_blocks._MOST_BYTES, record_blocks._MOST_FOUND = 1 << 25, 3 * 128 * 10
        neighbors, records = record_blocks.Neighbors(list, 10), [b"record %d" % i for i in range(128 * 9)]
        record_blocks.note(records)
        for i in range(0, 128 * 9, 128):
            rows, within = neighbors.of(records[i])
            assert rows[within] is records[i] and len(neighbors._groups) <= 3
        assert record_blocks.Neighbors(list, 1 << 20).of(records[0]) is None
        """
    )


def test_preprocessing_layers_stay_on_the_host_in_functions_of_datasets(run_tf):
    run_tf(
        """
        import jax
        from replicax.tf import _hashes, _host
        keras = tf.keras
        layers = {
            "hash": keras.layers.Hashing(16), "lookup": keras.layers.StringLookup(vocabulary=["a", "b"]),
            "hot": keras.layers.Hashing(3, output_mode="one_hot"),
        }
        cross = keras.layers.HashedCrossing(8)
        kinds = set()
        def features(words):
            found = {name: layer(words) for name, layer in layers.items()}
            found["cross"] = cross((words, words))
            kinds.update(type(found[name]) for name in ("hash", "lookup", "cross"))
            kinds.add(type(tf.cast(found["hash"], tf.float32)))
            return found
        words = [b"a", b"c", b"", b"a longer word", b"a", b"b"]
        (found,) = tf.data.Dataset.from_tensor_slices(words).batch(6).map(features)
        assert kinds == {_host.HostTensor}
        for name, layer in layers.items():
            assert np.array_equal(found[name], layer(tf.constant(words))), name
        assert np.array_equal(found["cross"], cross((tf.constant(words), tf.constant(words))))

        # Hashes are kept, of short strings and up to a number, and are the same afterwards.
        table = _hashes._known[_hashes.fingerprint64]
        assert {*words} <= {*table}
        table.clear()
        _hashes._MOST_KNOWN = 20
        hashed = lambda *texts: _hashes.of_strings(_hashes.fingerprint64, np.array(texts, object))
        numbers = [b"%d" % i for i in range(18)]
        first = hashed(*numbers)
        assert {*numbers} == {*table}
        more = hashed(b"new", *numbers[::-1], b"x" * 100)
        assert (more[1:-1] == first[::-1]).all() and {*numbers} == {*table}
        again = hashed([b"new", b"newer"], numbers[:2], numbers[2:4])
        assert again.shape == (3, 2) and again[0, 0] == more[0] and (again[1] == first[:2]).all() and len(table) == 20
        many = [b"m%d" % i for i in range(100)]
        assert hashed(*many, *numbers)[7] == hashed(many[7])[0] and len(table) == 20
        assert more[0] == int(tf.strings.to_hash_bucket_fast("new", 2**62)) + (int(more[0]) >> 62 << 62)
        """
    )


def test_rows_of_records_parsed_together_are_apart(run_tf):
    run_tf(
        COUNTED
        + """
        from replicax._base import thread_state
        from replicax._data.nodes.node import node_of
        from replicax._data.reading import Reading

        def example(i):
            made = {
                "number": tf.train.Feature(int64_list=tf.train.Int64List(value=[i])),
                "text": tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"t%d" % i])),
                "large": tf.train.Feature(float_list=tf.train.FloatList(value=[i] * 40)),
            }
            return tf.train.Example(features=tf.train.Features(feature=made)).SerializeToString()
        path = tempfile.mkdtemp() + "/records"
        with tf.io.TFRecordWriter(path) as writer:
            for i in range(200):
                writer.write(example(i))
        features = {
            "text": tf.io.FixedLenFeature([], tf.string), "number": tf.io.FixedLenFeature([], tf.int64),
            "large": tf.io.FixedLenFeature([40], tf.float32),
        }
        parse = lambda record: tf.io.parse_single_example(record, features)
        records = tf.data.TFRecordDataset(path)
        def check(found, numbers):
            assert [int(x["number"]) for x in found] == numbers
            assert [x["text"] for x in found] == [b"t%d" % i for i in numbers]
            assert all(x["large"].tolist() == [i] * 40 for x, i in zip(found, numbers, strict=True))
        order = list(range(200))
        check(list(records.map(parse).as_numpy_iterator()), order)
        check(list(records.map(parse).repeat(2).as_numpy_iterator()), 2 * order)

        # Whoever changes the array of a tensor changes no tensor.
        def changed(record):
            found = parse(record)
            for key, value in ("number", -1), ("large", 7):
                mine = found[key].numpy()
                if mine.ndim:
                    assert mine.flags.writeable
                    mine[...] = value
                assert not np.asarray(found[key]).flags.writeable
            return found
        check(list(records.map(changed).as_numpy_iterator()), order)

        # Tensors that are left out, renamed, swapped, computed with, or nested.
        def swap(record):
            found = parse(record)
            return {"number": found["large"][0], "large": found["number"]}
        (swapped,) = records.map(swap).batch(200).as_numpy_iterator()
        assert swapped["number"].tolist() == order and swapped["large"].tolist() == order
        assert swapped["number"].dtype == np.float32 and swapped["large"].dtype == np.int64
        def nested(record):
            found = parse(record)
            label = found.pop("number")
            return found, (label, label + 1, found["text"] + b"!")
        (rest, (label, more, text)), = records.map(nested, num_parallel_calls=4).batch(200).as_numpy_iterator()
        assert list(rest) == ["large", "text"] and label.tolist() == order and more.tolist() == order[1:] + [200]
        assert rest["text"].tolist() == [b"t%d" % i for i in order] and text[3] == b"t3!"
        assert rest["large"].shape == (200, 40) and rest["large"].sum(1).tolist() == [40 * i for i in order]
        def together(record):
            both = [parse(record), parse(record)]
            return both[0]["number"], both[1]["number"], both[0]["text"]
        assert [x[:2] for x in records.map(together).as_numpy_iterator()] == [(i, i) for i in order]
        last = []
        def one_before(record):
            last.append(parse(record))
            return last[-2:][0]
        check(list(records.map(one_before).as_numpy_iterator()), [0, *order[:-1]])

        # Small batches are parsed with their neighbors too, but for those whose records were not read together.
        def parse_batch(batch):
            found = tf.io.parse_example(batch, features)
            mine = found["number"].numpy()
            mine[...] = -1
            return found
        for size in 1, 7, 30:
            del sizes[:]
            found = list(records.batch(size).map(parse_batch).unbatch().as_numpy_iterator())
            check(found, order)
            assert len(sizes) <= 4, sizes
        first, second = [tf.io.parse_example(next(iter(records.batch(7))), features) for _ in range(2)]
        assert first["number"].numpy().tolist() == second["number"].numpy().tolist() == order[:7]
        picked = records.filter(lambda record: tf.io.parse_single_example(record, features)["number"] % 3 > 0).batch(5)
        found = list(picked.map(parse_batch).unbatch().as_numpy_iterator())
        check(found, [i for i in order if i % 3])
        # One that lacks a feature fails alone.
        lacking = tempfile.mkdtemp() + "/records"
        with tf.io.TFRecordWriter(lacking) as writer:
            for i in range(40):
                writer.write(example(i) if i != 21 else b"")
        strict = {"number": features["number"]}
        batches = tf.data.TFRecordDataset(lacking).batch(4).map(lambda batch: tf.io.parse_example(batch, strict))
        found = [batch["number"].tolist() for batch in batches.ignore_errors().as_numpy_iterator()]
        assert sum(found, []) == [i for i in range(40) if i // 4 != 5]
        names = tf.constant(["one", "two"])
        raises(tf.errors.InvalidArgumentError, lambda: tf.io.parse_example([b"", b""], strict, names), "Name: one")

        # What is kept of a few records does not keep much of the others.
        kept = [x for x in node_of(records.map(parse)).iterate(Reading()) if x["number"] % 64 == 3]
        check(kept, [3, 67, 131, 195])
        def bytes_behind(array):
            return array.nbytes if array.base is None else bytes_behind(array.base)
        assert all(bytes_behind(x) <= max(x.nbytes, 128 * 8) for element in kept for x in element.values())
        assert not thread_state.current.handed[0]
        """
    )


def test_batches_have_what_was_written_whatever_its_length(run_tf):
    run_tf(
        """
        numbers = [0, 1, -1, 127, 128, 2**63 - 1, -(2**63)] + [2**i + d for i in range(7, 63, 7) for d in (-1, 0, 1)]
        texts = [b"x" * n for n in (0, 1, 120, 125, 126, 127, 128, 200)]
        def example(**lists):
            made = {}
            for key, (kind, values) in lists.items():
                name = {int: "int64_list", float: "float_list", bytes: "bytes_list"}[kind]
                make = {int: tf.train.Int64List, float: tf.train.FloatList, bytes: tf.train.BytesList}[kind]
                made[key] = tf.train.Feature(**{name: make(value=values)})
            return tf.train.Example(features=tf.train.Features(feature=made)).SerializeToString()
        F, V = tf.io.FixedLenFeature, tf.io.VarLenFeature
        fixed = {"i": F([], tf.int64), "a name of more than 8 bytes": F([], tf.string), "f": F([1], tf.float32)}
        several = {key: V(feature.dtype) for key, feature in fixed.items()}
        def check(count, number, text, real):
            records = [
                example(**{"i": (int, [number(n)]), "a name of more than 8 bytes": (bytes, [text(n)]),
                           "f": (float, [real(n)])})
                for n in range(count)
            ]
            wanted = [number(n) for n in range(count)], [text(n) for n in range(count)], [real(n) for n in range(count)]
            found = tf.io.parse_example(records, fixed)
            assert list(found) == list(fixed)
            assert tuple(np.ravel(x.numpy()).tolist() for x in found.values()) == wanted
            sparse = tf.io.parse_example(records, several)
            assert tuple(x.values.numpy().tolist() for x in sparse.values()) == wanted
            for x in sparse.values():
                assert x.indices.numpy().tolist() == [[n, 0] for n in range(count)]
                assert x.dense_shape.numpy().tolist() == [count, 1]
        for number in numbers:  # all of one length, alone and with the short ones
            check(3, lambda n: number, lambda n: b"t", float)
        check(len(numbers), lambda n: numbers[n], lambda n: b"t", float)
        for text in texts:
            check(3, lambda n: n, lambda n: text, float)
        check(len(texts), lambda n: n, lambda n: texts[n], float)
        check(1, lambda n: 5, lambda n: b"", float)

        # Records of other layouts among them: a feature too many, none, two values, another order, another type.
        usual = {"i": (int, [1]), "s": (bytes, [b"a"])}
        others = [usual | {"more": (int, [9])}, {"s": (bytes, [b"a"])}, usual | {"i": (int, [1, 2])},
                  {"s": usual["s"], "i": usual["i"]}, usual | {"i": (int, [])}]
        values = [[1], [], [1, 2], [1], []]
        for other, value in zip(others, values):
            records = [example(**usual), example(**other), example(**usual)]
            found = tf.io.parse_example(records, {"i": V(tf.int64), "s": F([], tf.string)})
            assert found["i"].values.numpy().tolist() == [1, *value, 1] and found["s"].numpy().tolist() == [b"a"] * 3
            assert found["i"].indices.numpy()[:, 0].tolist() == [0, *[1] * len(value), 2]
        records = [example(**usual), example(**usual | {"i": (float, [1.0])})]
        integers = {"i": V(tf.int64)}
        raises(tf.errors.InvalidArgumentError, lambda: tf.io.parse_example(records, integers), "Key: i, Index: 1")
        # The arrays of one sparse tensor are not another one's.
        def changed(records):
            found = tf.io.parse_example(records, several)
            mine = np.array(found["f"].indices)
            mine[...] = 7
            return found
        records = [example(**{key: (kind, [kind()]) for key, kind in zip(fixed, (int, bytes, float))})] * 4
        (batch,) = tf.data.Dataset.from_tensor_slices(records).batch(4).map(changed)
        assert all(x.indices.numpy()[:, 0].tolist() == [0, 1, 2, 3] for x in batch.values())
        """
    )
