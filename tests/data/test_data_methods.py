"""Methods of `Dataset` that choose, group and leave out elements, as far as random numbers or options matter.

tests/tf/test_data_against_tensorflow.py has the rest, beside TensorFlow.
"""

import jax
import numpy as np
import pytest
from jax.experimental.sparse import BCOO

import replicax as rx
from replicax._base.errors import DataLossError, InvalidArgumentError
from replicax._base.specs import TensorSpec
from replicax._data.dataset import from_variant, to_variant
from replicax._data.nodes.node import node_of
from replicax._input import agreement
from replicax.data import Dataset, DatasetSpec, Optional, Options

R = Dataset.range


@pytest.fixture(autouse=True)
def sixty_four_bits():
    before = jax.config.jax_explicit_x64_dtypes
    jax.config.update("jax_explicit_x64_dtypes", "allow")
    yield
    jax.config.update("jax_explicit_x64_dtypes", before.name.lower())


def listed(dataset):
    return [jax.tree.map(lambda a: np.asarray(a).tolist(), e) for e in dataset.as_numpy_iterator()]


def test_random_numbers():
    fixed, changing = Dataset.random(seed=4).take(3), Dataset.random(seed=4, rerandomize_each_iteration=True).take(3)
    assert listed(fixed) == listed(fixed) == listed(Dataset.random(4).take(3)) != listed(Dataset.random(5).take(3))
    assert listed(changing) != listed(changing)
    assert listed(Dataset.random().take(3)) != listed(Dataset.random().take(3))
    numbers = np.array(listed(Dataset.random(seed=0).take(20_000)))
    assert numbers.min() >= 0 and numbers.max() < 2**32
    # Evenly spread over the whole range: 16 boxes of 1,250 each, give or take 5 standard deviations.
    assert abs(np.histogram(numbers, 16, (0, 2**32))[0] - 1250).max() < 175


def test_sampling_follows_the_weights():
    zeros, ones = Dataset.from_tensors(0).repeat(), Dataset.from_tensors(1).repeat()
    share = np.mean(listed(Dataset.sample_from_datasets([zeros, ones], [1, 3], seed=1).take(4000)))
    assert abs(share - 0.75) < 0.035
    changing = Dataset.from_tensor_slices([[1.0, 0.0], [0.0, 1.0]]).repeat()
    assert listed(Dataset.sample_from_datasets([zeros, ones], changing).take(6)) == [0, 1, 0, 1, 0, 1]
    fixed = Dataset.sample_from_datasets([zeros, ones], seed=3).take(50)
    assert listed(fixed) == listed(fixed)
    again = Dataset.sample_from_datasets([zeros, ones], seed=3, rerandomize_each_iteration=True).take(50)
    assert listed(again) != listed(again)


def test_sampling_where_one_ends():
    short, long = R(2), R(10, 200)
    stopped = listed(Dataset.sample_from_datasets([short, long], seed=0, stop_on_empty_dataset=True))
    assert stopped[:2] and len(stopped) < 100 and {0, 1} <= set(stopped)
    whole = listed(Dataset.sample_from_datasets([short, long], seed=0))
    assert sorted(whole) == [0, 1, *range(10, 200)]
    with pytest.raises(ValueError, match="numbers that are not negative, got .-1.0, 2.0."):
        Dataset.sample_from_datasets([short, long], [-1, 2])
    with pytest.raises(TypeError, match="a list of datasets, got a int in it"):
        Dataset.sample_from_datasets([short, 3])


@pytest.mark.parametrize("initial", [None, [0.9, 0.1]])
def test_resampling(initial):
    labels = np.random.default_rng(0).permutation(np.repeat([0, 1], [1800, 200]))
    resampled = Dataset.from_tensor_slices(labels).rejection_resample(lambda x: x, [0.5, 0.5], initial, seed=2)
    found = listed(resampled)
    assert all(label == x for label, x in found) and len(found) > 300
    assert abs(np.mean([x for _, x in found]) - 0.5) < 0.1
    assert resampled.element_spec == (TensorSpec((), np.int64), TensorSpec((), np.int64))
    with pytest.raises(ValueError, match="`target_dist` must be numbers of at least 0 that add up to 1"):
        R(3).rejection_resample(lambda x: x, [0.5, 0.6])
    with pytest.raises(ValueError, match="`initial_dist` has 1 classes, and `target_dist` 2"):
        R(3).rejection_resample(lambda x: x, [0.5, 0.5], [1.0])
    with pytest.raises(InvalidArgumentError, match="`class_func` returned 2, of 2 classes"):
        listed(R(3).rejection_resample(lambda x: x, [0.5, 0.5]))


def test_datasets_that_would_never_end_end_or_are_refused(tmp_path):
    numbers = R(2).repeat()
    chosen = Dataset.choose_from_datasets([R(2), R(5, 6)], numbers, stop_on_empty_dataset=False)
    assert listed(chosen) == [0, 5, 1]
    with pytest.raises(InvalidArgumentError, match="infinite dataset cannot be saved"):
        numbers.save(tmp_path / "saved")
    with pytest.raises(ValueError, match="leaves out all classes"):
        numbers.rejection_resample(lambda x: x, [1.0, 0.0], [0.0, 1.0])
    only_zero = R(1).repeat().rejection_resample(lambda x: x, [0.5, 0.5], [1.0, 0.0], seed=0)
    assert listed(only_zero.take(2)) == [(0, 0)] * 2


def test_windows_are_datasets():
    windows = R(5).window(2)
    assert windows.element_spec == DatasetSpec(TensorSpec((), np.int64)) != DatasetSpec(TensorSpec((), np.int32))
    assert [listed(window) for window in windows] == [[0, 1], [2, 3], [4]] and len(windows) == 3
    means = windows.map(lambda w: w.map(lambda x: x * 1.0).reduce(0.0, lambda s, x: s + x))
    assert listed(means) == [1.0, 5.0, 4.0] and means.element_spec.shape == ()
    pairs = Dataset.from_tensor_slices({"x": [1, 2], "y": [3.0, 4.0]}).window(2)
    both = pairs.flat_map(lambda w: Dataset.zip((w["x"].batch(2), w["y"].batch(2))))
    assert listed(both) == [([1, 2], [3.0, 4.0])]
    one = next(windows.as_numpy_iterator())
    assert one.cardinality() == 2 and listed(one.repeat(2)) == [0, 1, 0, 1]


def test_groups_with_keys_of_several_kinds():
    tuples = Dataset.from_tensor_slices((np.arange(6), np.arange(6) % 3))
    grouped = tuples.group_by_window(lambda x, k: k, lambda k, w: w.map(lambda x, _: x).batch(2), 2)
    assert listed(grouped) == [[0, 3], [1, 4], [2, 5]]
    with pytest.raises(ValueError, match="either `window_size` or `window_size_func`, and not both"):
        R(3).group_by_window(lambda x: x, lambda k, w: w, 1, lambda k: 1)
    with pytest.raises(TypeError, match="`key_func` must return a scalar integer"):
        listed(R(3).group_by_window(lambda x: [x, x], lambda k, w: w, 1))


def test_buckets_of_structures():
    words = R(1, 6).map(lambda n: {"word": np.ones(int(n), np.int32), "n": n})
    buckets = words.bucket_by_sequence_length(lambda e: e["n"], [3], [2, 2], padded_shapes={"word": [None], "n": []})
    assert [batch["word"].shape for batch in buckets] == [(2, 2), (2, 4), (1, 5)]
    assert buckets.element_spec["word"].shape == (None, None) and buckets.element_spec["n"].shape == (None,)


def test_scan_keeps_what_it_is_given():
    totals = R(3).scan({"sum": np.int64(0)}, lambda s, x: ({"sum": s["sum"] + x}, (s["sum"], x)))
    assert listed(totals) == listed(totals) == [(0, 0), (0, 1), (1, 2)] and len(totals) == 3
    with pytest.raises(TypeError, match="a state of the initial one's structure"):
        listed(R(3).scan((np.int64(0),), lambda s, x: (x, x)))


def test_enumerate_keeps_whole_blocks():
    numbered = Dataset.from_tensor_slices(np.arange(10.0)).enumerate(3)
    assert node_of(numbered).rows is not None and len(numbered) == 10
    assert listed(numbered.batch(4))[2] == ([11, 12], [8.0, 9.0])


def test_optionals():
    there, empty = Optional.from_value((np.int64(1), "a")), Optional.empty(TensorSpec((), np.float32))
    assert there.element_spec == (TensorSpec((), np.int64), TensorSpec((), "string")) and bool(there.has_value())
    assert empty.element_spec == TensorSpec((), np.float32) and not empty.has_value()
    with pytest.raises(InvalidArgumentError, match="does not have a value"):
        empty.get_value()


def test_options_of_a_service_are_kept():
    options = Options()
    options.experimental_service.pinned = True
    assert R(3).with_options(options).batch(2).options().experimental_service.pinned is True


def test_methods_keep_the_files_and_options_of_their_dataset():
    options = Options()
    options.experimental_distribute.auto_shard_policy = rx.data.AutoShardPolicy.OFF
    source = R(4).with_options(options)
    node_of(source).files = 3
    for made in (
        source.map(lambda x: x),
        source.scan(0, lambda s, x: (s, x)),
        source.group_by_window(lambda x: x, lambda k, w: w, 1),
        source.flat_map(lambda x: R(1)),
        source.window(2),
        source.unique(),
        source.take_while(lambda x: True),
        source.ignore_errors(),
        source.map(lambda x: x).prefetch(1),
        source.cache(),
    ):
        assert node_of(made).files == 3
        assert made.options().experimental_distribute.auto_shard_policy is rx.data.AutoShardPolicy.OFF


def counted(n):
    return np.arange(int(n), dtype=np.int32)


def test_ragged_tensors_have_the_rows_and_padding_of_tensorflows():
    # Rows, splits and what fills them up are what TensorFlow 2.21 gives.
    Ragged = rx.data.RaggedTensor
    ragged = Ragged.from_row_lengths([0, 1, 0, 1, 2], [2, 3])
    assert ragged.row_splits.tolist() == [0, 2, 5] and ragged.to_list() == [[0, 1], [0, 1, 2]]
    assert ragged.to_tensor(-1).tolist() == [[0, 1, -1], [0, 1, 2]] and ragged.shape.as_list() == [2, None]
    inner = Ragged(np.ones((3, 2)), np.array([0, 0, 1, 3]))
    assert inner.shape.as_list() == [3, None, 2]
    nested = Ragged(Ragged(np.ones(6), np.array([0, 0, 0, 1, 2, 4, 6])), np.array([0, 2, 4, 6]))
    assert [s.tolist() for s in nested.nested_row_splits] == [[0, 2, 4, 6], [0, 0, 0, 1, 2, 4, 6]]
    assert nested.to_list() == [[[], []], [[1.0], [1.0]], [[1.0, 1.0], [1.0, 1.0]]]
    assert nested.to_tensor().shape == (3, 2, 2) and nested[2].to_list() == [[1.0, 1.0], [1.0, 1.0]]
    words = Ragged(np.array([b"a", b"b", b"c"], object), np.array([0, 1, 3]))
    assert words.to_tensor().tolist() == [[b"a", b""], [b"b", b"c"]]
    compiled = jax.jit(lambda ragged: ragged.to_tensor(shape=[None, 4]))(ragged)
    assert compiled.tolist() == [[0, 1, 0, 0], [0, 1, 2, 0]]
    with pytest.raises(TypeError, match="shape=\\[None, 16\\]"):
        jax.jit(lambda ragged: ragged.to_tensor())(ragged)
    with pytest.raises(InvalidArgumentError, match="end with the number of values, 3"):
        Ragged.from_row_splits([1, 2, 3], [0, 2])


def test_ragged_batch_batches_elements_of_known_shapes():
    dataset = R(5).map(lambda n: {"n": n, "x": np.zeros(2)}).ragged_batch(2)
    assert dataset.element_spec["n"] == TensorSpec((None,), np.int64) and len(dataset) == 3
    assert [batch["n"].tolist() for batch in dataset] == [[0, 1], [2, 3], [4]]
    assert len(R(5).ragged_batch(2, drop_remainder=True)) == 2


def test_batches_of_elements_of_unknown_shapes_are_ragged_or_sparse():
    dataset = Dataset.from_generator(lambda: iter([[1], [2, 3], []]), "int32", [None])
    assert [batch.to_list() for batch in dataset.ragged_batch(2)] == [[[1], [2, 3]], [[]]]
    mapped = R(5).map(counted)
    assert [batch.to_list() for batch in mapped.ragged_batch(3).skip(1)] == [
        [counted(n).tolist() for n in (3, 4)],
    ]
    (sparse,) = mapped.sparse_batch(5, [6])
    assert sparse.dense_shape.tolist() == [5, 6] and len(sparse.values) == sum(len(counted(n)) for n in range(5))
    with pytest.raises(DataLossError, match=r"does not fit into the `row_shape` of `sparse_batch`, \(1,\)"):
        list(mapped.sparse_batch(5, [1]))


@pytest.mark.parametrize(
    "cut",
    [
        lambda d: list(d.batch(2)),
        lambda d: list(d.rebatch(1)),
        lambda d: list(d.unbatch()),
        lambda d: next(iter(rx.MirroredStrategy(["GPU:0", "GPU:1"]).experimental_distribute_dataset(d))),
    ],
)
def test_sparse_arrays_of_jax_are_not_cut_into_rows(cut):
    # Their leaves have one first dimension, and would be cut without an error.
    with pytest.raises(InvalidArgumentError, match="Make it dense first"):
        cut(R(2).map(lambda n: BCOO.fromdense(np.eye(3))))


@pytest.mark.parametrize("rows", [4, 3])
def test_the_rows_of_ragged_batches_are_split_among_replicas(rows):
    strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"])
    values = [[1], [2, 3], [], [4, 5, 6]][:rows]
    ragged = rx.data.RaggedTensor.from_row_lengths(np.concatenate(values), list(map(len, values)))
    dataset = Dataset.from_tensor_slices({"r": ragged, "n": np.arange(rows)}).batch(4)
    (element,) = strategy.experimental_distribute_dataset(dataset)
    first, second = strategy.experimental_local_results(element["r"])
    assert first.to_list() == values[:2] and second.to_list() == values[2:]

    def sums(element):
        return element["r"].to_tensor(shape=[None, 3]).sum(1), element["n"]

    found, _ = strategy.run(sums, args=(element,))
    assert np.concatenate(strategy.experimental_local_results(found)).tolist() == list(map(sum, values))


def test_a_worker_without_data_has_ragged_and_sparse_parts_without_rows():
    ragged = rx.data.RaggedTensor.from_row_lengths(np.arange(3), [1, 2])
    dataset = Dataset.from_tensor_slices({"r": ragged, "n": np.arange(2)}).batch(2)
    parts = agreement._nothing(node_of(dataset).spec(True))
    assert parts["r"].to_list() == [] and parts["r"].nrows() == 0 and parts["n"].shape == (0,)
    sparse = agreement._nothing(node_of(R(2).map(counted).sparse_batch(2, [3])).spec(True))
    assert sparse.dense_shape.tolist() == [0, 0] and not len(sparse.values)


def test_a_dataset_is_one_value():
    variant = to_variant(R(4).batch(2))
    again = Dataset(variant)
    assert [x.tolist() for x in again] == [[0, 1], [2, 3]]
    assert len(from_variant(variant, again.element_spec).skip(1)) == 1
    with pytest.raises(TypeError, match="from_tensor_slices"):
        Dataset([1, 2])
