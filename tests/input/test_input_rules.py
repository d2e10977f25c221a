"""The rules of distributed datasets, fact by fact (97 to 112 of SEMANTICS.md), apart from any strategy.

`place` is a stand-in for a strategy's: it makes a `Parts` of the shares of each leaf.
"""

import collections
import collections.abc
import gc
import signal
import threading
import time

import jax
import numpy as np
import pytest

import replicax as rx
from replicax._base import frontend
from replicax._base.errors import InvalidArgumentError, OutOfRangeError
from replicax._base.specs import PerReplicaSpec, TensorSpec
from replicax._base.types import AutoShardPolicy, InputContext, InputOptions, InputReplicationMode
from replicax._data import iterators
from replicax._data.dataset import Dataset
from replicax._data.elements import as_tensor
from replicax._data.nodes.node import node_of
from replicax._data.options import Options
from replicax._input.distributed_dataset import DistributedDataset
from replicax._input.from_function import DistributedDatasetsFromFunction
from replicax._input.iterator import DistributedIterator
from replicax._input.split import split_batch

R = Dataset.range
LIMIT = 30  # seconds that a test may wait for a thread


class Parts(tuple):
    """One array a replica: a leaf for `jax.tree`, as it is a subclass of tuple."""

    def lists(self):
        return [np.asarray(part).tolist() for part in self]


def place(this_round, fetch_to_device):
    parts = this_round.parts
    if len(parts) == 1:
        return jax.tree.map(as_tensor, parts[0])
    return jax.tree.map(lambda *leaves: Parts(leaves), *parts)


def distribute(dataset, replicas=2, **kwargs):
    return DistributedDataset(dataset, replicas, place, **kwargs)


def from_function(dataset_fn, replicas=2, **kwargs):
    return DistributedDatasetsFromFunction(dataset_fn, replicas, place, **kwargs)


def batches(dataset, replicas=2):
    return [x.lists() for x in distribute(dataset, replicas)]


def with_policy(dataset, policy):
    options = Options()
    options.experimental_distribute.auto_shard_policy = policy
    return dataset.with_options(options)


def input_threads():
    return [t for t in threading.enumerate() if t.name == "replicax-input"]


@pytest.fixture(autouse=True)
def tensors_as_in_tensorflow(monkeypatch):
    before = jax.config.jax_explicit_x64_dtypes
    jax.config.update("jax_explicit_x64_dtypes", "allow")
    monkeypatch.setattr(frontend, "current", frontend.Frontend(dtype_prefix="tf."))
    yield
    jax.config.update("jax_explicit_x64_dtypes", before.name.lower())


@pytest.mark.parametrize(
    ("rows", "batch", "drop", "expected"),
    [
        (8, 4, False, [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]),
        (10, 4, False, [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8], [9]]]),
        (9, 4, False, [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8], []]]),
        (10, 4, True, [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]),
        (6, 3, False, [[[0, 1], [2]], [[3, 4], [5]]]),
        (7, 5, False, [[[0, 1, 2], [3, 4]], [[5], [6]]]),
        (6, 3, True, [[[0, 1], [2]], [[3, 4], [5]]]),
        (3, 1, False, [[[0], []], [[1], []], [[2], []]]),
        (3, 8, False, [[[0, 1], [2]]]),
        (1, 8, False, [[[0], []]]),
    ],
)
def test_fact_97_ceil_rule_for_two_replicas(rows, batch, drop, expected):
    assert batches(R(rows).batch(batch, drop_remainder=drop)) == expected


@pytest.mark.parametrize(
    ("rows", "batch", "replicas", "expected"),
    [
        (8, 6, 3, [[[0, 1], [2, 3], [4, 5]], [[6], [7], []]]),
        (10, 4, 3, [[[0, 1], [2, 3], []], [[4, 5], [6, 7], []], [[8], [9], []]]),
        (4, 2, 3, [[[0], [1], []], [[2], [3], []]]),
        (10, 8, 4, [[[0, 1], [2, 3], [4, 5], [6, 7]], [[8], [9], [], []]]),
        (7, 6, 4, [[[0, 1], [2, 3], [4, 5], []], [[6], [], [], []]]),
        (5, 8, 4, [[[0, 1], [2, 3], [4], []]]),
    ],
)
def test_fact_98_ceil_rule_for_three_and_four_replicas(rows, batch, replicas, expected):
    assert batches(R(rows).batch(batch), replicas) == expected


def test_fact_97_shares_are_views_in_order_and_complete():
    for rows in range(1, 12):
        for replicas in range(1, 6):
            x = np.arange(rows * 3).reshape(rows, 3)
            parts = split_batch({"x": x}, replicas)
            assert len(parts) == replicas
            np.testing.assert_array_equal(np.concatenate([p["x"] for p in parts]), x)
            assert all(p["x"].base is not None for p in parts)
            assert all(len(p["x"]) in (0, -(-rows // replicas)) for p in parts[: rows // -(-rows // replicas)])


SAME_UNDER_ALL_POLICIES = [
    (lambda: R(6).batch(4).map(lambda x: x - x[0]), [[[0, 1], [2, 3]], [[0], [1]]]),
    (lambda: R(8).batch(4).map(lambda x: x.sum()[None]), [[[6], []], [[22], []]]),
    (lambda: R(8).batch(4).filter(lambda x: x[0] > 0), [[[4, 5], [6, 7]]]),
]


@pytest.mark.parametrize("policy", list(AutoShardPolicy))
def test_fact_99_policies(policy):
    off = policy in (AutoShardPolicy.OFF, AutoShardPolicy.FILE)

    def check(dataset, replicas, split, cut_anew):
        assert batches(with_policy(dataset, policy), replicas) == (cut_anew if off else split)

    check(
        R(10).batch(4),
        2,
        [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8], [9]]],
        [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], []]],
    )
    check(R(9).batch(4), 2, *[[[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8], []]]] * 2)
    check(R(7).batch(5), 2, [[[0, 1, 2], [3, 4]], [[5], [6]]], [[[0, 1, 2], [3, 4]], [[5, 6], []]])
    check(
        R(10).batch(4),
        3,
        [[[0, 1], [2, 3], []], [[4, 5], [6, 7], []], [[8], [9], []]],
        [[[0, 1], [2], [3]], [[4, 5], [6], [7]], [[8, 9], [], []]],
    )
    check(R(8).batch(6), 3, [[[0, 1], [2, 3], [4, 5]], [[6], [7], []]], [[[0, 1], [2, 3], [4, 5]], [[6, 7], [], []]])
    check(
        R(6).batch(4).repeat(2),
        2,
        [[[0, 1], [2, 3]], [[4], [5]], [[0, 1], [2, 3]], [[4], [5]]],
        [[[0, 1], [2, 3]], [[4, 5], [0, 1]], [[2, 3], [4, 5]]],
    )
    for make, expected in SAME_UNDER_ALL_POLICIES:
        assert batches(with_policy(make(), policy)) == expected


def test_fact_99_off_needs_batches_too():
    with pytest.raises(InvalidArgumentError, match="Batch the dataset first"):
        batches(with_policy(R(4), AutoShardPolicy.OFF))


def test_fact_99_policy_argument_and_structures():
    pairs = Dataset.from_tensor_slices({"x": np.arange(12).reshape(6, 2), "y": ["a", "b", "c", "d", "e", "f"]})
    found = list(distribute(pairs.batch(4), policy=AutoShardPolicy.OFF))
    assert [e["y"].lists() for e in found] == [[[b"a", b"b"], [b"c", b"d"]], [[b"e", b"f"], []]]
    assert [p.shape for p in found[1]["x"]] == [(2, 2), (0, 2)]
    assert distribute(pairs.batch(4), policy=AutoShardPolicy.OFF).cardinality == -2


def test_fact_99_off_with_rows_that_do_not_join():
    ragged = Dataset.from_generator(lambda: iter([np.ones((3, 2)), np.ones((3, 1))]), output_types=np.float64)
    node_of(ragged).batch_size = 4
    with pytest.raises(InvalidArgumentError, match="cannot be joined"):
        list(distribute(ragged, policy=AutoShardPolicy.OFF))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: R(6).batch(4).map(lambda x: x * 10), [[[0, 10], [20, 30]], [[40], [50]]]),
        (lambda: R(6).batch(4).repeat(2), [[[0, 1], [2, 3]], [[4], [5]], [[0, 1], [2, 3]], [[4], [5]]]),
        (lambda: R(6).repeat(2).batch(4), [[[0, 1], [2, 3]], [[4, 5], [0, 1]], [[2, 3], [4, 5]]]),
        (lambda: R(12).batch(4).take(2), [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]),
        (lambda: R(12).batch(4).skip(2), [[[8, 9], [10, 11]]]),
        (lambda: R(8).batch(4).prefetch(1), [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]),
        (lambda: R(8).batch(4).map(lambda x: x.sum()[None]), [[[6], []], [[22], []]]),
        (lambda: R(8).batch(4).map(lambda x: x - x[0]), [[[0, 1], [2, 3]], [[0, 1], [2, 3]]]),
        (lambda: R(8).batch(2).batch(2), [[[[0, 1]], [[2, 3]]], [[[4, 5]], [[6, 7]]]]),
        (lambda: R(8).batch(4).filter(lambda x: x[0] > 0), [[[4, 5], [6, 7]]]),
        (lambda: Dataset.from_tensors(np.arange(6)), [[[0, 1, 2], [3, 4, 5]]]),
        (lambda: Dataset.from_tensor_slices(np.arange(8).reshape(2, 4)), [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]),
        (lambda: R(8).batch(4).unbatch().batch(2), [[[0], [1]], [[2], [3]], [[4], [5]], [[6], [7]]]),
        (lambda: R(8).padded_batch(4), [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]),
    ],
)
def test_fact_100_what_comes_after_batch_is_kept(make, expected):
    assert batches(make()) == expected


@pytest.mark.parametrize(
    "make",
    [
        lambda: R(4),
        lambda: Dataset.from_tensor_slices({"a": [1, 2]}),
        lambda: Dataset.from_tensors((1, [1, 2])),
    ],
)
def test_fact_101_scalars_fail_at_once(make):
    with pytest.raises(InvalidArgumentError, match=r"element.*: \(\).*Batch the dataset first"):
        distribute(make())


def test_fact_101_what_only_shows_at_iteration():
    late = distribute(R(4).map(lambda x: x + 1))
    with pytest.raises(InvalidArgumentError, match="2 replicas"):
        next(iter(late))
    with pytest.raises(InvalidArgumentError, match=r"element\['x'\]: \(4,\), element\['y'\]: \(3,\)"):
        next(iter(distribute([{"x": np.ones(4), "y": np.ones(3)}])))
    with pytest.raises(InvalidArgumentError, match="use `np.array`"):
        next(iter(distribute([[1, 2], [3, 4]])))
    with pytest.raises(InvalidArgumentError, match="no array"):
        next(iter(distribute([None])))


def test_fact_101_generators_of_vectors_are_split():
    declared = Dataset.from_generator(lambda: iter([[1, 2], [3, 4]]), output_signature=TensorSpec((2,), np.int32))
    assert batches(declared) == [[[1], [2]], [[3], [4]]]
    assert batches(Dataset.from_generator(lambda: iter([[1, 2], [3, 4]]), output_types=np.int32)) == [
        [[1], [2]],
        [[3], [4]],
    ]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: np.ones((4, 2)), "ndarray, which is data.*from_tensor_slices"),
        (lambda: jax.numpy.ones(4), "which is data"),
        (lambda: {"x": np.ones(4)}, "dict, which is data"),
        (lambda: (np.ones(4), np.ones(4)), "tuple, which is data"),
        (lambda: "abc", "str, which is data"),
        (lambda: iter(R(4).batch(2)), "iterator DatasetIterator, which runs once"),
        (lambda: (x for x in [np.ones(4)]), "iterator generator, which runs once.*from_generator"),
        (lambda: 5, "iterable of batches, got int"),
        (lambda: lambda: R(4), "got function.*call it"),
        (lambda: distribute(R(4).batch(2)), "distributed already: got a DistributedDataset"),
        (lambda: iter(distribute(R(4).batch(2))), "distributed already: got a DistributedIterator"),
        (lambda: from_function(lambda c: R(4).batch(2)), "distributed already"),
    ],
)
def test_fact_101_what_is_not_a_dataset(make, message):
    with pytest.raises(TypeError, match=message):
        distribute(make())


def test_fact_102_element_spec():
    def spec(dataset, replicas=2):
        return distribute(dataset, replicas).element_spec

    none = "TensorSpec(shape=(None,), dtype=tf.int64, name=None)"
    two = "TensorSpec(shape=(2,), dtype=tf.int64, name=None)"
    assert str(spec(R(8).batch(4))) == f"PerReplicaSpec({none}, {none})"
    assert str(spec(R(8).batch(4, drop_remainder=True))) == f"PerReplicaSpec({two}, {two})"
    assert str(spec(R(9).batch(3, drop_remainder=True))) == f"PerReplicaSpec({none}, {none})"
    pairs = Dataset.from_tensor_slices({"x": np.ones((4, 3), np.float32), "y": [1, 2, 3, 4]}).batch(2)
    assert spec(pairs) == {
        "x": PerReplicaSpec(*[TensorSpec((None, 3), np.float32)] * 2),
        "y": PerReplicaSpec(*[TensorSpec((None,), np.int32)] * 2),
    }
    assert iter(distribute(R(8).batch(4))).element_spec == spec(R(8).batch(4))
    assert spec(R(8).batch(4), replicas=1) == TensorSpec((None,), np.int64)
    assert str(from_function(lambda c: R(4).batch(2)).element_spec) == f"PerReplicaSpec({none}, {none})"
    assert spec(R(8).batch(4, drop_remainder=True).map(lambda x: x[:, None])).value_specs[0].shape == (2, 1)


def test_fact_102_spec_of_what_knows_none_is_read_off_the_first_element():
    dataset = distribute([np.ones((4, 2)), np.ones((3, 2))])
    assert dataset.element_spec == PerReplicaSpec(*[TensorSpec((None, 2), np.float64)] * 2)
    passes = []

    class Batches:
        def __iter__(self):
            passes.append(1)
            return iter([np.ones(4)])

    dataset = distribute(Batches())
    next(iter(dataset))
    assert dataset.element_spec.value_specs[0].shape == (None,)
    assert len(passes) == 1  # an element had been seen


def test_fact_102_spec_tells_what_comes_where_jax_has_no_int64():
    jax.config.update("jax_explicit_x64_dtypes", "warn")
    dataset = distribute(R(4).batch(2), replicas=1)
    assert dataset.element_spec.dtype == next(iter(dataset)).dtype == np.int32


@pytest.mark.parametrize("way", [lambda f: f, rx.function], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", [np.int64, np.float64])
@pytest.mark.parametrize("uneven", [0, 1])
def test_numpys_64_bits_come_whole_to_the_devices(dtype, uneven, way):
    """Where JAX has such types on demand alone, as after `import replicax.tf`."""
    strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"])
    value = strategy.experimental_distribute_values_from_function(
        lambda c: np.full(1 + uneven * c.replica_id_in_sync_group, 2**40, dtype)
    )
    found = way(lambda: strategy.run(lambda x: x + 1, args=(value,)))().values
    assert [(x.dtype, x.tolist()) for x in found] == [(dtype, [2**40 + 1] * n) for n in (1, 1 + uneven)]
    with strategy.scope():
        v = rx.Variable(np.zeros(1, dtype))
    alike = strategy.experimental_distribute_values_from_function(lambda _: np.full(1, 2**40, dtype))
    v.assign(strategy.extended.reduce_to("SUM", alike, v))
    assert v.numpy().tolist() == [2**41]


def test_fact_103_structures():
    found = next(iter(distribute(Dataset.from_tensor_slices(({"x": [1.0, 2.0, 3.0, 4.0]}, [5, 6, 7, 8])).batch(4))))
    assert type(found) is tuple
    assert (found[0]["x"].lists(), found[1].lists()) == ([[1, 2], [3, 4]], [[5, 6], [7, 8]])
    assert (found[0]["x"][0].dtype, found[1][0].dtype) == (np.float32, np.int32)
    assert batches(Dataset.from_tensor_slices(["a", "b"]).batch(2)) == [[[b"a"], [b"b"]]]
    Pair = collections.namedtuple("Pair", "a b")
    found = next(iter(distribute(Dataset.from_tensor_slices(Pair(np.arange(4), np.ones((4, 2)))).batch(4))))
    assert type(found) is Pair and found.b[1].shape == (2, 2)
    found = next(iter(distribute([[np.arange(4), {"y": np.arange(4)}]])))
    assert type(found) is list and found[1]["y"].lists() == [[0, 1], [2, 3]]


def test_fact_104_iterating():
    dataset = distribute(R(4).batch(2))
    assert not isinstance(dataset, Dataset) and isinstance(dataset, collections.abc.Iterable)
    iterator = iter(dataset)
    assert isinstance(iterator, DistributedIterator) and isinstance(iterator, collections.abc.Iterator)
    assert iter(iterator) is iterator
    assert (next(iterator).lists(), iterator.get_next().lists()) == ([[0], [1]], [[2], [3]])
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(iterator)
        with pytest.raises(OutOfRangeError, match="End of sequence"):
            iterator.get_next()
    assert [x.lists() for x in dataset] == [x.lists() for x in dataset]
    with pytest.raises(TypeError, match="not subscriptable"):
        dataset[0]
    assert not hasattr(dataset, "batch") and not hasattr(dataset, "map")
    assert type(dataset.cardinality) is np.int64 and dataset.cardinality == 2
    assert distribute(R(4).batch(2).repeat()).cardinality == -1


def test_a_distributed_dataset_has_a_length_where_it_is_known():
    """Unlike TensorFlow's (fact 104), so that progress bars have a total."""
    for dataset, length in ((R(4).batch(2), 2), (R(10).batch(4), 3), (R(10).batch(4, drop_remainder=True), 2)):
        dataset = distribute(dataset)
        assert len(dataset) == len(list(dataset)) == length
    empty = distribute(R(0).batch(2))
    assert len(empty) == 0 and bool(empty)
    assert len(distribute([np.arange(4), np.arange(3)])) == 2
    for unknown in (R(4).batch(2).filter(lambda x: True), Dataset.from_generator(lambda: iter([np.arange(4)]))):
        with pytest.raises(TypeError, match="length is unknown"):
            len(distribute(unknown))
        assert len(list(distribute(unknown))) > 0
    with pytest.raises(TypeError, match="is infinite"):
        len(distribute(R(4).batch(2).repeat()))
    strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"])
    assert len(strategy.distribute_datasets_from_function(lambda context: R(10).batch(2))) == 3


def test_fact_105_optionals():
    iterator = iter(distribute(R(3).batch(2)))
    found = [iterator.get_next_as_optional() for _ in range(4)]
    assert [bool(o.has_value()) for o in found] == [True, True, False, False]
    assert all(o.has_value().dtype == bool and o.has_value().shape == () for o in found)
    assert [o.get_value().lists() for o in found[:2]] == [[[0], [1]], [[2], []]]
    with pytest.raises(InvalidArgumentError, match="The given optional does not have a value."):
        found[2].get_value()


def test_fact_106_hooks_of_compiled_functions(monkeypatch):
    dataset = distribute(R(4).batch(2))
    iterator, told = iter(dataset), []
    monkeypatch.setattr(iterators, "lift_element", lambda it: "lifted" if it is iterator else NotImplemented)
    monkeypatch.setattr(iterators, "_on_iterate", lambda: told.append(1))
    assert (next(iterator), iterator.get_next(), iterator.get_next_as_optional().get_value()) == ("lifted",) * 3
    assert iterator._pull().lists() == [[0], [1]]
    assert [x.lists() for x in dataset] == [[[0], [1]], [[2], [3]]]
    assert told == [1]


def test_fact_107_reduce():
    dataset = distribute(R(6).batch(4))
    total = dataset.reduce(as_tensor(np.asarray(0)), lambda acc, x: acc + sum(int(p.sum()) for p in x))
    assert isinstance(total, jax.Array) and (total, total.dtype) == (15, np.int64)
    count = dataset.reduce(0, lambda acc, x: acc + 1)
    assert isinstance(count, jax.Array) and (count, count.dtype) == (2, np.int32)
    assert dataset.reduce((0, {"n": 1.0}), lambda s, x: (s[0] + 1, s[1]))[0] == 2


def test_fact_107_reduce_that_fails_ends_its_thread():
    with pytest.raises(ZeroDivisionError):
        distribute(R(8).batch(4).repeat()).reduce(0, lambda acc, x: 1 / 0)


def test_fact_108_from_function():
    seen = []

    def dataset_fn(c):
        seen.append(
            (c.num_input_pipelines, c.input_pipeline_id, c.num_replicas_in_sync, c.get_per_replica_batch_size(8))
        )
        return R(7).batch(2)

    dataset = from_function(dataset_fn)
    assert seen == [(1, 0, 2, 4)]
    assert [x.lists() for x in dataset] == [[[0, 1], [2, 3]], [[4, 5], [6]]]
    assert len(seen) == 1 and dataset.cardinality == 2
    assert type(dataset).__name__ == "DistributedDatasetsFromFunction" and isinstance(dataset, DistributedDataset)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: R(5).batch(2), [[[0, 1], [2, 3]], [[4], []]]),
        (lambda: R(6).batch(2, drop_remainder=True), [[[0, 1], [2, 3]]]),
        (lambda: R(6).map(lambda x: x).batch(2, drop_remainder=True), [[[0, 1], [2, 3]]]),
        (lambda: R(3), [[0, 1]]),
        (lambda: [np.arange(2), np.arange(2), np.arange(2)], [[[0, 1], [0, 1]], [[0, 1], []]]),
        (lambda: [1, 2, 3], [[1, 2]]),
        (lambda: [], []),
    ],
)
def test_fact_108_ends_within_a_round(make, expected):
    dataset = from_function(lambda c: make())
    assert [x.lists() for x in dataset] == expected
    assert dataset.cardinality in (len(expected), -2)


def test_fact_108_what_is_not_a_dataset_fn():
    with pytest.raises(TypeError, match="positional argument"):
        from_function(lambda: R(3))
    with pytest.raises(TypeError, match="'Dataset' object is not callable.*experimental_distribute_dataset"):
        from_function(R(3))
    with pytest.raises(TypeError, match="which is data"):
        from_function(lambda c: np.ones(3))


def test_fact_109_input_context():
    assert (InputContext().num_input_pipelines, InputContext().input_pipeline_id) == (1, 0)
    context = InputContext(num_input_pipelines=3, input_pipeline_id=1, num_replicas_in_sync=6)
    assert context.get_per_replica_batch_size(12) == 2
    with pytest.raises(ValueError, match="13 is not divisible by `num_replicas_in_sync` 6"):
        context.get_per_replica_batch_size(13)
    seen = []
    from_function(lambda c: (seen.append(c), R(4).batch(2))[1], context=context)
    assert seen == [context]


def test_fact_110_fetch_to_device_is_passed_on():
    fetched = []

    def spy(this_round, fetch_to_device):
        fetched.append(fetch_to_device)
        return place(this_round, fetch_to_device)

    for options in (None, InputOptions(), InputOptions(experimental_fetch_to_device=False)):
        next(iter(DistributedDataset(R(2).batch(2), 2, spy, options)))
    assert fetched == [True, True, False]


def test_fact_110_per_replica_mode():
    options = InputOptions(experimental_replication_mode=InputReplicationMode.PER_REPLICA)
    message = "InputReplicationMode.PER_REPLICA is only supported in `distribute_datasets_from_function`."
    with pytest.raises(NotImplementedError, match=message):
        distribute(R(8).batch(4), options=options)
    seen = []

    def dataset_fn(c):
        seen.append((c.num_input_pipelines, c.input_pipeline_id, c.num_replicas_in_sync))
        return R(4).batch(2)

    dataset = from_function(dataset_fn, options=options)
    assert seen == [(2, 0, 2), (2, 1, 2)]
    assert [x.lists() for x in dataset] == [[[0, 1], [0, 1]], [[2, 3], [2, 3]]]
    assert dataset.cardinality == 2
    # Of different lengths: all are read to the end, and those that are done give empty batches.
    uneven = from_function(lambda c: R(4 - 2 * c.input_pipeline_id).batch(2), options=options)
    assert [x.lists() for x in uneven] == [[[0, 1], [0, 1]], [[2, 3], []]]


@pytest.mark.parametrize(
    "fetch, mode, words",
    [
        (True, "PER_WORKER", "you must also specify `PER_REPLICA`"),
        (False, "PER_WORKER", "you must also specify `PER_REPLICA`"),
        (True, "PER_REPLICA", "can not be set to True when experimental_fetch_to_device is True"),
        (False, "PER_REPLICA", None),
    ],
)
def test_options_may_not_contradict_each_other_about_the_place_of_datasets(fetch, mode, words):
    """As in TensorFlow, where `experimental_distribute_dataset` takes them all but PER_REPLICA."""
    options = InputOptions(fetch, InputReplicationMode[mode], experimental_place_dataset_on_device=True)
    calls = []
    distribution = lambda: from_function(lambda c: calls.append(c) or R(4).batch(2), options=options)  # noqa: E731
    if words is None:
        assert next(iter(distribution())).lists() == [[0, 1], [0, 1]]
    else:
        with pytest.raises(ValueError, match=words):
            distribution()
        assert not calls
    if mode == "PER_WORKER":
        assert next(iter(distribute(R(4).batch(2), options=options))).lists() == [[0], [1]]


def test_fact_111_one_replica_passes_data_through():
    dataset = R(5).batch(2)
    found = list(distribute(dataset, replicas=1))
    assert all(isinstance(x, jax.Array) for x in found)
    assert [x.tolist() for x in found] == [[0, 1], [2, 3], [4]]
    assert [int(x) for x in distribute(R(2), replicas=1)] == [0, 1]
    mapped = from_function(lambda c: dataset.map(lambda x: x + c.num_replicas_in_sync), replicas=1)
    assert [x.tolist() for x in mapped] == [[1, 2], [3, 4], [5]]
    assert [x.tolist() for x in distribute(with_policy(dataset, AutoShardPolicy.OFF), replicas=1)] == [
        [0, 1],
        [2, 3],
        [4],
    ]


def test_fact_112_shuffled_datasets():
    def rows(dataset):
        return [row for x in dataset for part in x.lists() for row in part]

    dataset = distribute(R(50).shuffle(50).batch(4))
    once, again = rows(dataset), rows(dataset)
    assert sorted(once) == sorted(again) == list(range(50)) and once != again
    seeded = [rows(distribute(R(50).shuffle(50, seed=3).batch(4))) for _ in range(2)]
    assert seeded[0] == seeded[1] != list(range(50))


def test_fact_165_an_empty_share_has_the_shape_and_dtype_of_its_batch():
    found = next(iter(distribute(Dataset.from_tensor_slices(np.ones((1, 3, 2), np.float32)).batch(2))))
    assert (found[1].shape, found[1].dtype) == ((0, 3, 2), np.float32)


# --- other libraries' datasets ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["map", "iter", "loader"])
def test_grain_sources(kind):
    grain = pytest.importorskip("grain")
    rows = grain.MapDataset.source(np.arange(6)).map(lambda i: {"x": i})
    if kind == "loader":
        dataset = grain.DataLoader(
            data_source=np.arange(6),
            sampler=grain.samplers.IndexSampler(6, num_epochs=1, shuffle=False),
            operations=[grain.transforms.Batch(4)] if hasattr(grain, "transforms") else [grain.Batch(4)],
        )
        assert batches(dataset) == [[[0, 1], [2, 3]], [[4], [5]]]
        return
    dataset = rows.batch(4) if kind == "map" else rows.batch(4).to_iter_dataset()
    distributed = distribute(dataset)
    for _ in range(2):
        assert [x["x"].lists() for x in distributed] == [[[0, 1], [2, 3]], [[4], [5]]]
    assert distributed.cardinality == (2 if kind == "map" else -2)
    with pytest.raises(TypeError, match="runs once"):
        distribute(iter(dataset))


class FakeTorchTensor:
    """What counts of a torch tensor: it is no array for numpy's ufuncs, and has to leave the graph and the device."""

    def __init__(self, array):
        self._array = array

    def detach(self):
        return self

    cpu = detach

    def numpy(self):
        return self._array


def test_torch_like_loader():
    class Loader:
        def __iter__(self):
            return ([FakeTorchTensor(np.arange(4) + i), FakeTorchTensor(np.ones((4, 2)))] for i in range(2))

        def __len__(self):
            return 2

    dataset = distribute(Loader())
    assert [x[0].lists() for x in dataset] == [[[0, 1], [2, 3]], [[1, 2], [3, 4]]]
    assert dataset.cardinality == 2 and dataset.element_spec[1].value_specs[0].shape == (None, 2)


def test_tf_like_dataset():
    class Shape(tuple):
        rank = property(len)

        def as_list(self):
            return list(self)

    class Spec:
        shape = Shape((None,))

        class dtype:
            as_numpy_dtype = np.int64

    class TfDataset:
        element_spec = {"x": Spec()}

        def as_numpy_iterator(self):
            return iter([{"x": np.arange(4)}, {"x": np.arange(2)}])

        def cardinality(self):
            return np.int64(2)

        def options(self):
            return with_policy(R(1), AutoShardPolicy.DATA).options()

        def __iter__(self):
            raise AssertionError("tensors are not wanted")

    dataset = distribute(TfDataset())
    assert [e["x"].lists() for e in dataset] == [[[0, 1], [2, 3]], [[0], [1]]]
    assert dataset.element_spec["x"].value_specs == (TensorSpec((None,), np.int64),) * 2
    assert dataset.cardinality == 2


def test_sequence_protocol_and_bad_leaves():
    class Batches:
        def __getitem__(self, i):
            if i >= 2:
                raise IndexError
            return np.arange(2) + i

    assert batches(Batches()) == [[[0], [1]], [[1], [2]]]
    with pytest.raises(TypeError, match="neither an array, a number nor a string.*got object"):
        next(iter(distribute([{"x": object()}])))


# --- the background thread -------------------------------------------------------------------------------------------


class Counted:
    """Batches without end, which count how many were made; `on_close` is set when a pass over them is ended."""

    def __init__(self):
        self.made = 0
        self.on_close = threading.Event()

    def __iter__(self):
        try:
            while True:
                self.made += 1
                yield np.full(2, self.made)
        finally:
            self.on_close.set()


def test_leaving_a_loop_stops_the_thread_and_ends_the_source():
    source = Counted()
    for _ in distribute(source):
        (thread,) = input_threads()
        break
    thread.join(LIMIT)
    assert not thread.is_alive() and source.on_close.is_set()
    assert source.made <= 3  # the one taken, one in the buffer, and one under way


@pytest.mark.parametrize("size", [1, 3])
def test_the_buffer_is_bounded(size):
    source = Counted()
    iterator = iter(distribute(source, options=InputOptions(experimental_per_replica_buffer_size=size)))
    assert [next(iterator).lists() for _ in range(3)] == [[[i], [i]] for i in (1, 2, 3)]
    end = time.monotonic() + LIMIT
    while iterator._buffer._items.qsize() < size:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert source.made == 3 + size
    iterator.close()
    assert not iterator._buffer.thread.is_alive()
    with pytest.raises(StopIteration):
        next(iterator)


def test_elements_are_placed_by_the_thread_and_lazily():
    placed = []

    def spy(this_round, fetch_to_device):
        placed.append(threading.current_thread().name)
        return place(this_round, fetch_to_device)

    iterator = iter(DistributedDataset(R(2).batch(2), 2, spy))
    assert not placed and not input_threads()
    next(iterator)
    assert placed == ["replicax-input"]


def test_buffer_of_zero_has_no_thread():
    source = Counted()
    iterator = iter(distribute(source, options=InputOptions(experimental_per_replica_buffer_size=0)))
    assert source.made == 0
    assert next(iterator).lists() == [[1], [1]]
    assert source.made == 1 and not input_threads()
    iterator.close()
    assert source.on_close.is_set()
    with pytest.raises(StopIteration):
        next(iterator)


@pytest.mark.parametrize("size", [0, 1, 8])
def test_an_error_of_the_source_is_raised_in_order_with_its_traceback(size):
    def broken():
        yield np.arange(2)
        yield np.arange(2)
        raise KeyError("row 7")

    dataset = Dataset.from_generator(broken)
    iterator = iter(distribute(dataset, options=InputOptions(experimental_per_replica_buffer_size=size)))
    assert [next(iterator).lists() for _ in range(2)] == [[[0], [1]]] * 2
    with pytest.raises(KeyError, match="row 7") as caught:
        next(iterator)
    assert "broken" in [entry.name for entry in caught.traceback]
    with pytest.raises(StopIteration):
        next(iterator)


def test_errors_of_placing_and_of_iter_are_raised():
    class Broken:
        def __iter__(self):
            raise OSError("no such file")

    with pytest.raises(OSError, match="no such file"):
        next(iter(distribute(Broken())))

    def failing(this_round, fetch_to_device):
        raise MemoryError("out of device memory")

    with pytest.raises(MemoryError):
        next(iter(DistributedDataset(R(2).batch(2), 2, failing)))


def test_all_batches_come_where_several_are_made_in_a_row():
    arrays = Dataset.from_tensor_slices(np.zeros((64, 8), np.float32))
    for dataset in (arrays.batch(4), arrays.batch(48), arrays.batch(4, drop_remainder=True).take(3).repeat(5)):
        expected = [batch.shape[0] for batch in dataset.as_numpy_iterator()]
        iterator = iter(distribute(dataset))
        assert [sum(map(len, batch.lists())) for batch in iterator] == expected
        with pytest.raises(StopIteration):
            next(iterator)


def test_a_dropped_iterator_in_a_cycle_stops_its_thread():
    iterator = iter(distribute(Counted()))
    next(iterator)
    thread = iterator._buffer.thread
    iterator.itself = iterator
    del iterator
    gc.collect()
    thread.join(LIMIT)
    assert not thread.is_alive()


def test_ctrl_c_while_waiting_for_data():
    go_on, sent = threading.Event(), threading.Event()

    def slow():
        if not sent.is_set():
            sent.set()
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        go_on.wait(LIMIT)
        yield np.arange(2)

    iterator = iter(distribute(Dataset.from_generator(slow)))
    try:
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
    finally:
        go_on.set()
    assert next(iterator).lists() == [[0], [1]]  # and nothing is lost


def test_ctrl_c_while_the_thread_starts(monkeypatch):
    iterator = iter(distribute(R(4).batch(2)))

    def interrupted(thread):
        start(thread)
        raise KeyboardInterrupt

    start = threading.Thread.start
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
    assert [x.lists() for x in iterator] == [[[0], [1]], [[2], [3]]]


@pytest.mark.parametrize("last", ["yield np.arange(2)", "threading.Event().wait()"])
def test_the_interpreter_ends_while_a_thread_runs(last, run_python):
    done = run_python(
        f"""
        import threading, jax, numpy as np
        from replicax._input.distributed_dataset import DistributedDataset
        class Source:
            def __iter__(self):
                yield np.arange(2)
                while True:
                    {last}
        iterator = iter(DistributedDataset(Source(), 2, lambda parts, fetch: [jax.numpy.asarray(p) for p in parts]))
        print(next(iterator))
        """
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_many_short_loops_leave_no_threads():
    dataset = distribute(R(8).batch(2).repeat())
    threads = set()
    for _ in range(50):
        for _ in dataset:
            threads.update(input_threads())
            break
    for thread in threads:
        thread.join(LIMIT)
    assert not input_threads()


@pytest.mark.parametrize("size", [0, 1])
def test_an_element_pushed_back_comes_next(size):
    iterator = iter(distribute(R(6).batch(2), options=InputOptions(experimental_per_replica_buffer_size=size)))
    first, second = next(iterator), next(iterator)
    iterator._push_back(second)
    iterator._push_back(first)
    assert [x.lists() for x in iterator] == [[[0], [1]], [[2], [3]], [[4], [5]]]


def test_two_iterators_are_independent():
    dataset = distribute(R(6).batch(2))
    a, b = iter(dataset), iter(dataset)
    assert [next(a).lists(), next(b).lists(), next(a).lists()] == [[[0], [1]], [[0], [1]], [[2], [3]]]
