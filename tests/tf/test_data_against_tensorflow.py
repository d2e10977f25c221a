"""The same datasets under TensorFlow and under `replicax.tf`: elements, cardinality, specs, and kinds of errors."""

from __future__ import annotations

import json
import sys

import programs
import pytest
from recorded import from_tensorflow, selected

# Prints, for each expression of a file, what a dataset yields and says of itself, or the error's kind.
_RUNNER = """
import importlib, json, sys
import numpy as np
tf = importlib.import_module(sys.argv[1])
folder = sys.argv[3]
D = tf.data.Dataset
R, S, T = D.range, D.from_tensor_slices, D.from_tensors
I64 = np.int64

def plain(x):
    if isinstance(x, D):
        return ["dataset", [plain(e) for e in x.take(20)]]
    if isinstance(x, dict):
        return {k: plain(v) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
        return [plain(v) for v in x]
    x = np.asarray(x.numpy() if hasattr(x, "numpy") else x)
    return ["string" if x.dtype.kind in "OS" else str(x.dtype), str(x.tolist())]

def kind(e):
    named = {"NotFoundError": "FileNotFoundError", "InternalError": "InvalidArgumentError"}
    return "raises " + named.get(type(e).__name__, type(e).__name__)

LENGTHS = [[0], [1, 2, 3, 4], [5, 6, 7], [7, 8, 9, 10, 11], [13, 14, 15, 16, 19, 20], [21, 22]]
ragged = D.from_generator(lambda: iter(LENGTHS), tf.int64, output_shapes=[None])
length = lambda e: len(e) if tf.__name__ != "tensorflow" else tf.shape(e)[0]

def checked(x):
    tf.debugging.assert_positive(x)
    return x

some = S(np.array([1, 2, 0, 4])).map(checked)
for name in "ba":
    open(f"{folder}/{name}.txt", "w").write(name)
open(folder + "/records.bin", "wb").write(b"HHaabbccF")
with tf.io.TFRecordWriter(folder + "/records") as writer:
    for record in (b"hello", b"", b"x" * 1000):
        writer.write(record)
records = open(folder + "/records", "rb").read()
open(folder + "/damaged", "wb").write(records[:13] + b"?" + records[14:])
open(folder + "/cut", "wb").write(records[:-3])
R(3).save(folder + "/saved")

results = {}
for expression in json.load(open(sys.argv[2])):
    try:
        found = eval(expression)
        if isinstance(found, D):
            found = [plain(list(found.take(30))), int(found.cardinality()), str(found.element_spec)]
        else:
            found = plain(found)
    except Exception as e:
        found = kind(e)
    results[expression] = found
json.dump([results, list(records)], open(sys.argv[4], "w"))
"""

EXPRESSIONS = """
R(7).window(3)
R(7).window(3, shift=2, stride=2)
R(7).window(3, shift=1, drop_remainder=True)
R(10).window(2, shift=4, drop_remainder=True)
R(10).window(3, 5, 2)
R(3).window(5)
R(0).window(5)
S((np.arange(4), np.arange(4.))).window(2)
S({"a": np.arange(4)}).window(2)
R(7).window(0)
R(7).window(2, shift=0)
R(7).window(3).flat_map(lambda w: w.batch(3))
R(7).window(3).map(lambda w: w.reduce(I64(0), lambda s, x: s + x))
R(4).map(lambda x: R(x))
R(10).take_while(lambda x: x < 4)
R(10).take_while(lambda x: x)
R(10).filter(lambda x: x)
R(5).scan(I64(0), lambda s, x: (s + x, s + x))
R(3).scan((I64(0), I64(1)), lambda s, x: ((s[1], s[0] + s[1]), (s[0], x)))
S((np.arange(3), np.arange(3))).scan(I64(0), lambda s, x: (s + x[0] * x[1], s))
R(3).scan(I64(0), lambda s, x: s)
R(3).scan(I64(0), lambda s, x: (tf.cast(s, tf.float32), x))
S([1, 37, 2, 37, 2, 1]).unique()
S(["a", "b", "a"]).unique()
S([[1, 2], [1, 2], [2, 1]]).unique()
S(([1, 1, 2], [1, 1, 2])).unique()
S([1., 1., 2.]).unique()
D.random(seed=4).take(0)
D.counter(5, 2).take(3)
D.counter(dtype=tf.int32).take(2)
D.counter(step=-1).take(3)
D.choose_from_datasets([R(0, 3), R(10, 12), R(20, 21)], S(np.array([0, 2, 2, 1, 0, 0, 0, 1, 1])))
D.choose_from_datasets([R(3), R(10, 12), R(20, 21)], S(np.array([0, 2, 2, 1, 0, 0, 0, 1])), False)
D.choose_from_datasets([R(0, 3)], S(np.array([0, 5])))
D.choose_from_datasets([R(0, 3)], S(np.array([0, 5], np.int32)))
D.choose_from_datasets([], R(3))
D.choose_from_datasets([R(3), T(1.)], R(2))
D.sample_from_datasets([R(2), R(10, 12)], weights=[1., 0.])
D.sample_from_datasets([R(2), R(10, 12)], weights=[1., 0.], stop_on_empty_dataset=True)
D.sample_from_datasets([R(2), R(10, 12)], weights=[1.])
D.sample_from_datasets([R(2), R(10, 12)], weights=[0., 0.])
D.sample_from_datasets([])
D.sample_from_datasets([R(2)])
D.sample_from_datasets([R(2).repeat(), R(3)], weights=[0.5, 0.5]).take(0)
int(D.sample_from_datasets([R(2).repeat(), R(3)], weights=[0.5, 0.5]).cardinality())
int(D.sample_from_datasets([R(2), R(3)], weights=[0.5, 0.5]).cardinality())
R(10).group_by_window(lambda x: x % 2, lambda k, w: w.batch(3), window_size=3)
R(10).group_by_window(lambda x: x % 2, lambda k, w: w.batch(10), window_size_func=lambda k: k + 1)
R(10).group_by_window(lambda x: x % 3, lambda k, w: w.map(lambda x: x + 100 * k), 2)
R(10).group_by_window(lambda x: x % 2, lambda k, w: w.batch(10))
R(10).group_by_window(lambda x: x % 2, lambda k, w: w.batch(10), window_size=0)
R(10).group_by_window(lambda x: 1.0, lambda k, w: w.batch(10), window_size=2)
R(10).group_by_window(lambda x: x % 2, lambda k, w: k, window_size=2)
ragged.bucket_by_sequence_length(length, [3, 5], [2, 2, 2])
ragged.bucket_by_sequence_length(length, [3, 5], [2, 1, 2], drop_remainder=True)
ragged.bucket_by_sequence_length(length, [3, 5], [2, 2, 2], padding_values=I64(-1))
ragged.bucket_by_sequence_length(length, [3, 5], [2, 2, 2], no_padding=True)
ragged.bucket_by_sequence_length(length, [3, 5], [2, 2, 2], pad_to_bucket_boundary=True)
R(10).group_by_window(lambda x: x % 2, lambda k, w: w.batch(4), window_size_func=lambda k: k + 2)
ragged.padded_batch(2, padding_values=-1.5)
ragged.padded_batch(2, padded_shapes=[2, 2])
R(2).concatenate(S([1.5]))
R(2).concatenate(T((1, 2)))
T([1, 2]).concatenate(T(1))
R(2).batch(2.5)
R(1, 4).map(lambda n: tf.range(n)).element_spec.shape.rank
str(R(1, 4).map(lambda n: tf.range(n)).element_spec.shape)
some.ignore_errors()
some.shuffle(1).ignore_errors()
some.batch(1).unbatch().ignore_errors()
some.repeat(2).prefetch(1).ignore_errors()
some.concatenate(some).cache().ignore_errors()
some.enumerate().ignore_errors()
D.zip((R(4).batch(1), some.batch(1), some)).ignore_errors()
R(3).flat_map(lambda x: some).ignore_errors()
R(3).interleave(lambda x: some, cycle_length=2).ignore_errors()
some.scan(I64(0), lambda s, x: (s + x, s + x)).ignore_errors()
some.group_by_window(lambda x: x % 2, lambda k, w: w.batch(4), 2).ignore_errors()
some.unique().ignore_errors()
tf.data.TFRecordDataset([folder + "/damaged", folder + "/cut", folder + "/records"]).ignore_errors()
S([folder + "/damaged", folder + "/records"]).interleave(tf.data.TFRecordDataset, cycle_length=2).ignore_errors()
ragged.take(3).bucket_by_sequence_length(length, [3, 5], [2, 2, 2], pad_to_bucket_boundary=True)
ragged.bucket_by_sequence_length(length, [3, 5], [2, 2])
R(1).get_single_element()
R(0).get_single_element()
R(2).get_single_element()
R(4).map(lambda x: x, num_parallel_calls=2)
R(4).map(lambda x: x, num_parallel_calls=2, deterministic=False).reduce(I64(0), lambda s, x: s + x)
R(4).map(lambda x: x, num_parallel_calls=0)
R(4).map(lambda x: x, num_parallel_calls=-3)
R(4).map(lambda x: x, num_parallel_calls=tf.data.AUTOTUNE, use_unbounded_threadpool=True)
R(4).map(lambda x: x, num_parallel_calls=2, synchronous=True)
R(4).map(lambda x: x, synchronous=True)
R(3).prefetch(-5)
R(3).prefetch(0)
R(3).batch(2).prefetch(tf.data.AUTOTUNE)
S(np.array([0] * 6 + [1] * 6)).rejection_resample(lambda x: x, [0., 1.], [0.5, 0.5])
D.load(folder + "/saved")
D.load(folder + "/saved", element_spec=tf.TensorSpec((), tf.int64))
D.load(folder + "/saved", element_spec=tf.TensorSpec((), tf.int32))
D.load(folder + "/nothing")
R(3).snapshot(folder + "/snapshot")
R(3).cache(folder + "/cache").repeat(2)
R(3).cache(folder + "/no folder/cache")
S((np.arange(3), ["a", "b", "c"])).cache(folder + "/strings")
D.list_files(folder + "/*.txt", shuffle=False).enumerate().map(lambda i, name: i)
int(D.list_files(folder + "/*.txt").cardinality())
D.list_files(folder + "/*.none")
D.list_files([folder + "/b*.txt", folder + "/a*.txt"], shuffle=False).interleave(tf.data.TextLineDataset)
tf.data.FixedLengthRecordDataset(folder + "/records.bin", 2, header_bytes=2, footer_bytes=1)
tf.data.FixedLengthRecordDataset([folder + "/a.txt", folder + "/b.txt"], 1)
tf.data.FixedLengthRecordDataset(folder + "/records.bin", 2, header_bytes=2)
tf.data.TFRecordDataset(folder + "/records")
tf.data.TFRecordDataset([folder + "/records"] * 2).batch(4)
tf.data.TFRecordDataset(folder + "/nothing")
tf.data.TFRecordDataset(folder + "/damaged")
tf.data.TFRecordDataset(folder + "/cut")
tf.experimental.Optional.from_value(tf.constant(3)).get_value()
bool(tf.experimental.Optional.empty(tf.TensorSpec((), tf.int32)).has_value())
tf.experimental.Optional.empty(tf.TensorSpec((), tf.int32)).get_value()
str(tf.experimental.Optional.empty(tf.TensorSpec((), tf.int32)).element_spec)
[tf.data.AUTOTUNE, tf.data.INFINITE_CARDINALITY, tf.data.UNKNOWN_CARDINALITY]
""".strip().splitlines()


RECORDS = "a file of records"


@pytest.fixture(scope="module")
def results_of(tmp_path_factory):
    """`results_of(python, module, expressions)`: what each gives, and the bytes of a file of records."""

    def run(python, module, expressions):
        folder = tmp_path_factory.mktemp("side")
        (folder / "run.py").write_text(_RUNNER)
        (folder / "expressions.json").write_text(json.dumps(expressions))
        (folder / "data").mkdir()
        theirs = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1", "KERAS_BACKEND": None}
        programs.run_well(
            folder / "run.py",
            [module, *(folder / name for name in ("expressions.json", "data", "results.json"))],
            folder=folder,
            timeout=120.0,
            env=theirs if module == "tensorflow" else {},
            python=python,
            imports="replicax.tf",
        )
        found, records = json.loads((folder / "results.json").read_text())
        return {**found, RECORDS: records}

    return run


@pytest.fixture(scope="module")
def both(request, once, results_of):
    """What each expression gives under TensorFlow, as it is recorded (see recorded.py), and under replicax."""

    def live(names):
        return results_of(
            request.getfixturevalue("tensorflow_python"), "tensorflow", [n for n in names if n != RECORDS]
        )

    chosen = selected(request, "expression")
    theirs = from_tensorflow("datasets", {name: _RUNNER + name for name in [*EXPRESSIONS, RECORDS]}, live, chosen)
    expressions = [expression for expression in chosen if expression != RECORDS]
    return theirs, once("datasets", lambda: results_of(sys.executable, "replicax.tf", expressions))


@pytest.mark.parametrize("expression", [*EXPRESSIONS, RECORDS])
def test_the_same_as_tensorflow(both, expression):
    expected, found = both
    assert found[expression] == expected[expression]
