"""`Dataset`, specs and options: tf.data's behaviour over host data."""

import collections
import pickle

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from replicax._base import frontend
from replicax._base.errors import InvalidArgumentError, OutOfRangeError
from replicax._base.specs import PerReplicaSpec, TensorShape, TensorSpec, conform, spec_of
from replicax._base.types import AutoShardPolicy
from replicax._data import elements, rows
from replicax._data.dataset import Dataset
from replicax._data.elements import as_host, as_tensor
from replicax._data.iterators import Optional
from replicax._data.nodes.node import node_of
from replicax._data.options import Options
from replicax._data.reading import Reading
from replicax._data.specs import AUTOTUNE

R = Dataset.range
Pair = collections.namedtuple("Pair", "a b")


@pytest.fixture(autouse=True)
def sixty_four_bits():
    before = jax.config.jax_explicit_x64_dtypes
    jax.config.update("jax_explicit_x64_dtypes", "allow")
    yield
    jax.config.update("jax_explicit_x64_dtypes", before.name.lower())


def listed(dataset):
    return [jax.tree.map(lambda a: a.tolist() if hasattr(a, "tolist") else a, e) for e in dataset.as_numpy_iterator()]


def slow(dataset):
    """The same elements without the rows behind them, so that the way element by element is taken."""
    return dataset.filter(lambda x: True)


BOTH_WAYS = pytest.mark.parametrize("way", [lambda d: d, slow], ids=["rows", "elements"])


@pytest.mark.parametrize("dtype", [">f4", "<i8", ">c8", "=u2"])
def test_arrays_in_any_byte_order_are_elements(dtype, tmp_path):
    array = np.arange(4).astype(dtype)
    dataset = Dataset.from_tensor_slices(array).batch(2)
    assert dataset.element_spec.dtype == np.dtype(dtype).newbyteorder("=")
    assert [x.tolist() for x in dataset] == listed(dataset) == [[0, 1], [2, 3]]
    assert [(x + 1).tolist() for x in dataset.map(lambda x: x)] == [[1, 2], [3, 4]]
    snapshot = dataset.snapshot(tmp_path / "snapshot")
    assert listed(snapshot) == listed(snapshot) == listed(dataset)
    generated = Dataset.from_generator(lambda: [array], dtype, (4,))
    assert [x.tolist() for x in generated] == [[0, 1, 2, 3]]


# --- specs -----------------------------------------------------------------------------------------------------------


def test_tensor_shape():
    shape = TensorShape([None, 3])
    assert (str(shape), repr(shape), shape.as_list(), shape.rank) == (
        "(None, 3)",
        "TensorShape([None, 3])",
        [None, 3],
        2,
    )
    assert (
        shape == (None, 3) == shape
        and shape == [None, 3]
        and shape != (2, 3)
        and hash(shape) == hash(TensorShape(shape))
    )
    assert shape[1:] == (3,) and isinstance(shape[1:], TensorShape) and shape[0] is None
    assert (
        shape.is_compatible_with((7, 3)) and not shape.is_compatible_with((7, 4)) and not shape.is_compatible_with((3,))
    )
    assert not shape.is_fully_defined() and shape.num_elements() is None and TensorShape((2, 3)).num_elements() == 6
    unknown = TensorShape(None)
    assert (unknown.rank, str(unknown)) == (None, "<unknown>")
    assert unknown != () and TensorShape(()) == () and unknown.is_compatible_with((1, 2))
    assert TensorShape(unknown) == unknown == unknown[1:] and not unknown.is_fully_defined()
    with pytest.raises(ValueError, match="unknown TensorShape"):
        unknown.as_list()
    with pytest.raises(ValueError, match=r"got \[-1, 2\]"):
        TensorShape([-1, 2])
    assert pickle.loads(pickle.dumps((shape, unknown))) == (shape, unknown)


def test_tensor_spec(monkeypatch):
    spec = TensorSpec((None, 3), "int64")
    assert str(spec) == "TensorSpec(shape=(None, 3), dtype=int64, name=None)"
    monkeypatch.setattr(frontend, "current", frontend.Frontend(dtype_prefix="tf."))
    assert str(spec) == "TensorSpec(shape=(None, 3), dtype=tf.int64, name=None)"
    assert str(TensorSpec((), jnp.bfloat16, "x")) == "TensorSpec(shape=(), dtype=tf.bfloat16, name='x')"
    for text in (str, bytes, object, "string", "U3"):
        assert str(TensorSpec((), text)) == "TensorSpec(shape=(), dtype=tf.string, name=None)"
    assert (
        spec == TensorSpec([None, 3], np.int64) != TensorSpec((None, 3))
        and len({spec, TensorSpec((None, 3), "int64")}) == 1
    )
    assert spec.is_compatible_with(np.zeros((5, 3), np.int64)) and not spec.is_compatible_with(np.zeros((5, 3)))
    assert spec.is_compatible_with(TensorSpec((2, None), np.int64))
    assert (
        TensorSpec.from_tensor(jnp.ones((2, 1)))
        == TensorSpec((2, 1))
        == TensorSpec.from_spec(jax.ShapeDtypeStruct((2, 1), "float32"))
    )
    assert pickle.loads(pickle.dumps(spec)) == spec


def test_per_replica_spec():
    a, b = TensorSpec((2,)), TensorSpec((None,), "int64")
    spec = PerReplicaSpec(a, b)
    assert str(spec) == f"PerReplicaSpec({a}, {b})" and spec.value_specs == (a, b)
    assert spec == PerReplicaSpec(a, b) != PerReplicaSpec(b, a) and hash(spec) == hash(PerReplicaSpec(a, b))
    value = PerReplica(np.ones(2, np.float32), np.arange(5))
    assert spec.is_compatible_with(value) and not spec.is_compatible_with(np.ones(2))
    assert not spec.is_compatible_with({}) and not spec.is_compatible_with(PerReplicaSpec(a))
    assert pickle.loads(pickle.dumps(spec)) == spec


class PerReplica:
    def __init__(self, *values):
        self.values = values


def test_spec_of():
    assert spec_of({"x": [1, 2.0], "y": (True, "a", np.ones((2, 3)))}) == {
        "x": [TensorSpec((), "int32"), TensorSpec((), "float32")],
        "y": (TensorSpec((), bool), TensorSpec((), "string"), TensorSpec((2, 3), "float64")),
    }
    with pytest.raises(TypeError, match="of type object: pass an array"):
        spec_of(object())


def test_fact_36_conform():
    spec = PerReplicaSpec(TensorSpec((None,), "int64"), TensorSpec((None,), "int64"))
    value = PerReplica(np.arange(2), np.arange(1))
    assert conform(value, spec) is value
    found = conform([1, np.ones((2, 3))], [TensorSpec((), "float32"), TensorSpec((None, 3), "float32")])
    assert all(isinstance(x, jax.Array) and x.dtype == np.float32 for x in found)
    with pytest.raises(TypeError, match="ndarray, which is no PerReplica value"):
        conform(np.arange(2), spec)
    with pytest.raises(TypeError, match="of 1 components"):
        conform(PerReplica(np.arange(2)), spec)
    with pytest.raises(
        TypeError, match=r"Can not cast TensorSpec\(shape=\(1,\), dtype=float32, name=None\) to TensorSpec"
    ):
        conform(PerReplica(np.ones(1, np.float32), np.ones(1, np.float32)), spec)
    with pytest.raises(TypeError, match="Can not cast"):
        conform(jnp.ones(3), TensorSpec((2,)))
    with pytest.raises(TypeError, match="Expected a TensorSpec"):
        conform(1, np.float32)


# --- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (1, "int32"),
        (2**40, "int64"),
        (1.5, "float32"),
        (True, "bool"),
        (1j, "complex64"),
        ([1, 2], "int32"),
        ([[1.0], [2.0]], "float32"),
        ([], "float32"),
        ([np.float64(1)], "float64"),
        ([np.arange(2), np.arange(2)], "int64"),
        (np.float64(1), "float64"),
        (np.ones(2, ml_dtypes.bfloat16), "bfloat16"),
        (jnp.ones(2), "float32"),
        ([jnp.ones(2), jnp.ones(2)], "float32"),
        ("a", "object"),
        ([b"a", b"\xff"], "object"),
        (np.array(["é"]), "object"),
    ],
)
def test_dtypes_of_host_values(value, dtype):
    array = as_host(value)
    assert isinstance(array, np.ndarray) and array.dtype == dtype


def test_strings_are_bytes_and_other_objects_are_refused():
    assert as_host([["é", "b"]]).tolist() == [["é".encode(), b"b"]]
    with pytest.raises(TypeError, match="got NoneType"):
        as_host(np.array([None]))


def test_tensors_are_wide_where_jax_allows_it():
    assert as_tensor(np.arange(2)).dtype == np.int64
    assert as_tensor(as_host("a")).dtype == object
    jax.config.update("jax_explicit_x64_dtypes", "warn")
    assert as_tensor(np.arange(2)).dtype == np.int32
    assert R(2).element_spec.dtype == next(iter(R(2))).dtype == np.int32
    assert next(R(2).as_numpy_iterator()).dtype == np.int64


# --- sources ---------------------------------------------------------------------------------------------------------


def test_from_tensors():
    dataset = Dataset.from_tensors((1, [1, 2]))
    assert listed(dataset) == [(1, [1, 2])] and dataset.cardinality() == 1
    assert dataset.element_spec == (TensorSpec((), "int32"), TensorSpec((2,), "int32"))


def test_from_tensor_slices_of_structures():
    dataset = Dataset.from_tensor_slices(({"x": [1.0, 2.0]}, Pair(["a", "b"], np.ones((2, 3)))))
    assert listed(dataset) == [({"x": 1.0}, (b"a", [1.0] * 3)), ({"x": 2.0}, (b"b", [1.0] * 3))]
    assert type(next(iter(dataset))[1]) is Pair
    assert dataset.element_spec[1].b == TensorSpec((3,), "float64") and len(dataset) == 2
    with pytest.raises(InvalidArgumentError, match=r"tensors\['x'\]: \(2,\), tensors\['y'\]: \(3,\)"):
        Dataset.from_tensor_slices({"x": [1, 2], "y": [1, 2, 3]})
    with pytest.raises(InvalidArgumentError, match="first dimension"):
        Dataset.from_tensor_slices(1)
    with pytest.raises(InvalidArgumentError, match="at least one array"):
        Dataset.from_tensor_slices({})


def test_elements_cannot_change_the_source():
    x = np.zeros((4, 2))
    for dataset in (Dataset.from_tensor_slices(x), Dataset.from_tensor_slices(x).batch(2), Dataset.from_tensors(x)):
        with pytest.raises(ValueError, match="read-only"):
            next(dataset.as_numpy_iterator())[...] = 1
    x[0] = 1  # the owner can


def test_range():
    assert listed(R(3)) == [0, 1, 2] and listed(R(5, 1, -2)) == [5, 3] and listed(R(0)) == []
    assert (
        R(2).element_spec == TensorSpec((), "int64") and R(2, output_type=np.float32).element_spec.dtype == np.float32
    )
    assert listed(R(10**12 - 20000, 10**12).shard(10000, 3).batch(2)) == [[10**12 - 19997, 10**12 - 9997]]


def test_from_generator():
    calls = []

    def generator(n=2):
        calls.append(n)
        yield from ({"x": i, "y": [i] * i} for i in range(1, n + 1))

    signature = {"x": TensorSpec((), "int64"), "y": TensorSpec((None,), "float32")}
    dataset = Dataset.from_generator(generator, output_signature=signature)
    assert listed(dataset) == listed(dataset) == [{"x": 1, "y": [1.0]}, {"x": 2, "y": [2.0, 2.0]}]
    assert dataset.element_spec == signature and dataset.cardinality() == -2 and calls == [2, 2]
    assert len(listed(Dataset.from_generator(generator, output_signature=signature, args=(3,)))) == 3
    by_types = Dataset.from_generator(generator, {"x": np.int32, "y": np.int32}, {"x": (), "y": (None,)})
    assert by_types.element_spec["y"] == TensorSpec((None,), "int32")
    assert Dataset.from_generator(generator, {"x": "int32", "y": "int32"}).element_spec["x"].shape.rank is None
    arrays = Dataset.from_generator(lambda: [np.ones(2)], output_signature=jax.ShapeDtypeStruct((2,), "float32"))
    assert arrays.batch(2).element_spec == TensorSpec((None, 2), "float32")
    plain = Dataset.from_generator(generator)
    assert plain.element_spec == {"x": TensorSpec((), "int32"), "y": TensorSpec((None,), "int32")}


@pytest.mark.parametrize(
    ("element", "signature", "message"),
    [
        (
            [1, 2, 3],
            TensorSpec((2,), "int32"),
            r"element of shape \(3,\) where an element of shape \(2,\) was expected",
        ),
        ("a", TensorSpec((), "int32"), "could not be converted to the expected type. The expected type was int32"),
        ((1, 2), (TensorSpec((), "int32"),), "did not match the expected structure"),
    ],
)
def test_from_generator_checks_what_comes(element, signature, message):
    with pytest.raises(TypeError, match=message):
        listed(Dataset.from_generator(lambda: iter([element]), output_signature=signature))


def test_from_generator_wants_a_function():
    with pytest.raises(TypeError, match="`output_signature` is a TensorSpec.* has a leaf 'float32' of type str"):
        Dataset.from_generator(generator=list, output_signature={"x": "float32"})
    with pytest.raises(TypeError, match="must be callable.*got list"):
        Dataset.from_generator([1])
    with pytest.raises(TypeError, match="drop them"):
        Dataset.from_generator(lambda: [], np.int32, output_signature=TensorSpec(()))


def test_zip():
    assert listed(Dataset.zip((R(2), {"a": R(5, 9)}))) == [(0, {"a": 5}), (1, {"a": 6})]
    assert listed(Dataset.zip(R(3), slow(R(2)))) == [(0, 0), (1, 1)]
    assert Dataset.zip(R(3), R(2)).cardinality() == 2 and Dataset.zip(R(3), R(2).repeat()).cardinality() == 3
    both = Dataset.zip(R(40), Dataset.from_tensor_slices(np.arange(40) * 2)).shuffle(40, seed=1).batch(8)
    for x, y in both.as_numpy_iterator():
        np.testing.assert_array_equal(x * 2, y)
    assert node_of(Dataset.zip(R(4).batch(2), R(4).batch(2))).batch_size == 2
    with pytest.raises(TypeError, match="got int"):
        Dataset.zip(R(2), 3)


# --- batches ---------------------------------------------------------------------------------------------------------


@BOTH_WAYS
def test_batch(way):
    assert listed(way(R(5)).batch(2)) == [[0, 1], [2, 3], [4]]
    assert listed(way(R(5)).batch(2, drop_remainder=True)) == [[0, 1], [2, 3]]
    assert listed(way(R(5)).batch(2).batch(2, drop_remainder=True)) == [[[0, 1], [2, 3]]]
    assert way(R(5)).batch(2).element_spec.shape == (None,)
    assert way(R(5)).batch(2, drop_remainder=True).element_spec.shape == (2,)
    with pytest.raises(InvalidArgumentError, match="batch_size must be greater than zero, got 0"):
        R(5).batch(0)


def test_batch_of_different_shapes():
    with pytest.raises(
        InvalidArgumentError, match=r"in component 0. First element had shape \[0\] and element 1 had shape \[1\]"
    ):
        listed(R(2).map(lambda i: np.arange(int(i))).batch(2))


def test_batch_moves_whole_blocks(monkeypatch):
    """From arrays through shuffle to batches no row is touched on its own."""
    x = np.arange(40000)
    dataset = Dataset.from_tensor_slices((x, x)).shuffle(5000, seed=1).repeat(2).batch(1000).map(lambda a, b: (a, b))
    steps = 0
    fetch = node_of(dataset).iterate

    def counted(*args, **kwargs):
        nonlocal steps
        steps += 1
        return original(*args, **kwargs)

    original = elements.cut
    monkeypatch.setattr(elements, "cut", counted)
    monkeypatch.setattr(rows.Rows, "elements", lambda self: pytest.fail("row by row"))
    found = [a for a, b in fetch(Reading())]
    assert steps < 300 and np.array_equal(np.sort(np.concatenate(found)), np.sort(np.concatenate([x, x])))


def test_batches_in_order_are_views():
    x = np.arange(10)
    assert all(np.shares_memory(b, x) for b in Dataset.from_tensor_slices(x).batch(4).as_numpy_iterator())


@BOTH_WAYS
def test_unbatch_and_rebatch(way):
    assert listed(way(R(5)).batch(2).unbatch()) == [0, 1, 2, 3, 4]
    assert listed(way(R(7)).batch(4).rebatch(3)) == [[0, 1, 2], [3, 4, 5], [6]]
    assert listed(way(R(7)).batch(4).rebatch(3, drop_remainder=True)) == [[0, 1, 2], [3, 4, 5]]
    assert listed(way(R(7)).batch(4).rebatch([1, 2])) == [[0], [1, 2], [3], [4, 5], [6]]
    assert R(7).batch(4).rebatch(3, drop_remainder=True).element_spec.shape == (3,)
    assert R(7).batch(4).unbatch().element_spec.shape == ()
    with pytest.raises(InvalidArgumentError, match="unbatch needs"):
        listed(R(2).unbatch())


def test_padded_batch():
    ragged = R(1, 4).map(lambda i: (np.arange(int(i)), "s"))
    assert listed(ragged.padded_batch(2)) == [([[0, 0], [0, 1]], [b"s", b"s"]), ([[0, 1, 2]], [b"s"])]
    found = listed(ragged.map(lambda a, b: a).padded_batch(2, padded_shapes=[4], padding_values=-1))
    assert found == [[[0, -1, -1, -1], [0, 1, -1, -1]], [[0, 1, 2, -1]]]
    found = listed(ragged.padded_batch(3, padded_shapes=([-1], []), padding_values=(7, b"")))
    assert found == [([[0, 7, 7], [0, 1, 7], [0, 1, 2]], [b"s"] * 3)]
    assert ragged.padded_batch(2).element_spec[0].shape == (None, None)
    numbers = ragged.map(lambda a, b: a)
    with pytest.raises(InvalidArgumentError, match="pad to a smaller size"):
        listed(numbers.padded_batch(3, padded_shapes=[2]))
    with pytest.raises(ValueError, match=r"padded shape \(2, 2\) is not compatible with the shape \(1,\)"):
        listed(numbers.padded_batch(1, padded_shapes=[2, 2]))
    with pytest.raises(TypeError, match="`padding_values` has -1.5 of float32 for a component of int64"):
        listed(numbers.padded_batch(2, padding_values=-1.5))
    with pytest.raises(TypeError, match="batch_size must be an integer, got 2.5"):
        numbers.batch(2.5)


# --- functions -------------------------------------------------------------------------------------------------------


def test_map_passes_tuples_as_arguments_and_gets_tensors():
    pairs = Dataset.from_tensor_slices((np.arange(3), np.ones(3, np.float32)))
    seen = []

    def function(a, b):
        seen.append((type(a), a.dtype, b.dtype))
        return {"sum": a + b, "n": 1, "text": "t"}

    assert listed(pairs.map(function))[2] == {"n": 1, "sum": 3.0, "text": b"t"}
    assert all(issubclass(kind, jax.Array) and a == np.int64 and b == np.float32 for kind, a, b in seen)
    assert listed(R(2).map(lambda x: [x, [x, x]])) == [(0, [0, 0]), (1, [1, 1])]
    assert listed(Dataset.from_tensor_slices({"x": [1, 2]}).map(lambda d: d["x"] * 2)) == [2, 4]
    assert R(3).map(lambda x: x).cardinality() == 3


def test_map_spec_is_found_without_data():
    def spec(dataset, function):
        return dataset.map(function).element_spec

    assert spec(R(6).batch(4), lambda x: x[:, None] * jnp.ones((1, x.shape[0]), "int64")) == TensorSpec(
        (None, None), "int64"
    )
    assert spec(R(6).batch(3, drop_remainder=True), lambda x: x * 1.5).shape == (3,)
    assert spec(R(6).batch(4), lambda x: (x, 1)) == (TensorSpec((None,), "int64"), TensorSpec((), "int32"))
    assert spec(R(6).batch(4), lambda x: np.asarray(x).astype(np.float32)) == TensorSpec((None,), "float32")
    # A function that fails on zeros is asked about the first element.
    names = Dataset.from_tensor_slices(["1,2", "3,4"])
    split = names.map(lambda s: np.array([int(n) for n in s.item().split(b",")], np.int32))
    assert split.element_spec == TensorSpec((None,), "int32")
    assert "?" in repr(R(3).map(lambda x: x)) and "(None,)" in repr(R(3).batch(2))


def test_reading_element_spec_does_not_start_a_pass():
    def orders(look):
        dataset = R(20).map(lambda x: x + 1).shuffle(20, seed=1)
        dataset = dataset.map(lambda x: np.asarray(x)[None] if x > 0 else 1 / 0)
        if look:
            assert dataset.element_spec.shape == (None,)
        return [listed(dataset), listed(dataset)]

    assert orders(look=True) == orders(look=False)


def test_no_element_and_no_spec():
    with pytest.raises(InvalidArgumentError, match="element_spec is not known"):
        _ = Dataset.from_generator(lambda: iter([])).element_spec


def test_filter_flat_map_interleave_reduce_apply():
    assert listed(R(6).filter(lambda x: x % 2 == 0)) == [0, 2, 4]
    three = lambda i: Dataset.from_tensors(i).repeat(3)  # noqa: E731
    assert listed(R(3).flat_map(three)) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert listed(R(3).interleave(three, cycle_length=2)) == [0, 1, 0, 1, 0, 1, 2, 2, 2]
    assert listed(R(3).interleave(three, cycle_length=2, block_length=2)) == [0, 0, 1, 1, 0, 1, 2, 2, 2]
    assert R(3).flat_map(three).element_spec == TensorSpec((), "int64")
    with pytest.raises(TypeError, match="must return a Dataset here"):
        listed(R(3).flat_map(lambda x: x))
    assert int(R(5).reduce(np.int64(0), lambda s, x: s + x)) == 10
    pair = R(5).reduce((0, 0.0), lambda s, x: (s[0] + 1, s[1]))
    assert int(pair[0]) == 5 and isinstance(pair[1], jax.Array)
    assert listed(R(5).apply(lambda d: d.take(1))) == [0]


def test_functions_run_on_the_cpu():
    where = []
    listed(R(1).map(lambda x: (where.append(x.devices()), x)[1]))
    assert {device.platform for devices in where for device in devices} == {"cpu"}


# --- number and order ------------------------------------------------------------------------------------------------


@BOTH_WAYS
def test_take_skip_shard_repeat_cache_concatenate(way):
    d = way(R(7))
    assert listed(d.take(3)) == [0, 1, 2] and listed(d.take(0)) == [] and len(listed(d.take(-1))) == 7
    assert listed(d.skip(5)) == [5, 6] and listed(d.skip(-1)) == [] and listed(d.skip(9)) == []
    assert listed(d.shard(3, 1)) == [1, 4] and listed(d.shard(9, 8)) == []
    assert listed(d.take(2).repeat(2)) == [0, 1, 0, 1] and listed(d.repeat(0)) == []
    assert listed(d.repeat().skip(6).take(3)) == [6, 0, 1] and listed(d.take(0).repeat()) == []
    assert listed(d.skip(1).take(4).shard(2, 1).repeat(2).batch(3)) == [[2, 4, 2], [4]]
    assert listed(d.take(2).concatenate(d.skip(6))) == [0, 1, 6]
    assert listed(d.take(2).enumerate(5)) == [(5, 0), (6, 1)]
    assert listed(d.prefetch(AUTOTUNE)) == listed(d)
    with pytest.raises(InvalidArgumentError, match="between 0 and 1"):
        d.shard(2, 2)


@BOTH_WAYS
def test_long_datasets_are_cut_right(way):
    n = 3 * rows.CHUNK + 5
    d = way(R(n)) if way is not slow else R(n).batch(1000).unbatch()
    whole = np.arange(n)
    for found, expected in [
        (d, whole),
        (d.skip(rows.CHUNK - 1).take(rows.CHUNK + 2), whole[rows.CHUNK - 1 :][: rows.CHUNK + 2]),
        (d.shard(7, 3), whole[3::7]),
        (d.repeat(2), np.concatenate([whole, whole])),
    ]:
        np.testing.assert_array_equal(np.concatenate(list(found.batch(1000).as_numpy_iterator())), expected)


def test_cardinality():
    unknown, endless = slow(R(7)), R(7).repeat()
    known = [R(7).take(3), R(7).skip(5), R(7).shard(3, 1), R(7).repeat(2), R(7).batch(2), R(7).batch(2, True)]
    for dataset in [*known, R(7).concatenate(R(2)), R(7).enumerate(), R(7).shuffle(3), R(0).repeat(), endless.take(4)]:
        assert dataset.cardinality() == len(dataset) == len(listed(dataset))
    for dataset in (unknown, unknown.take(2), unknown.batch(2), unknown.concatenate(R(2)), R(4).batch(2).unbatch()):
        assert dataset.cardinality() == -2
    for dataset in (endless, endless.skip(2), endless.batch(2), endless.concatenate(unknown), unknown.repeat()):
        assert dataset.cardinality() == -1
    assert type(R(3).cardinality()) is np.int64 and bool(R(0))
    with pytest.raises(TypeError, match="infinite"):
        len(endless)
    with pytest.raises(TypeError, match="unknown"):
        len(unknown)


@BOTH_WAYS
def test_cache_keeps_the_first_complete_pass(way):
    calls = []
    d = R(3).map(lambda x: (calls.append(1), x)[1]).cache()
    next(iter(d))
    assert listed(d) == listed(d) == [0, 1, 2] and len(calls) == 4
    shuffled = way(R(50)).shuffle(50).cache()
    assert listed(shuffled) == listed(shuffled)


@BOTH_WAYS
@pytest.mark.parametrize("size", [1, 2, 7, 100, 1000])
def test_shuffle(way, size):
    n = 100
    order = listed(way(R(n)).shuffle(size, seed=5))
    assert sorted(order) == list(range(n)) and (order == list(range(n))) == (size == 1)
    # What is drawn from the buffer has come in: element i comes out at i - size + 1 at the earliest.
    assert all(element - place < size for place, element in enumerate(order))
    assert order == listed(way(R(n)).shuffle(size, seed=5))
    again = way(R(n)).shuffle(size, seed=5)
    assert (listed(again) == listed(again)) == (size == 1)
    fixed = way(R(n)).shuffle(size, seed=5, reshuffle_each_iteration=False)
    assert listed(fixed) == listed(fixed) == listed(fixed.repeat(2))[:n] == listed(fixed.repeat(2))[n:]


def test_shuffle_by_chunks_is_even():
    """Where a number leaves a buffer of 10 is distributed as in the way element by element."""
    delays = []
    for seed, way in enumerate((lambda d: d, slow)):
        order = np.array(listed(way(R(12000)).shuffle(10, seed=seed)))
        delay = np.empty(len(order), int)
        delay[order] = np.arange(len(order)) - order
        delays.append(delay[100:-100])
    # The wait is geometric: mean 10, less the 10 that the buffer is ahead.
    for delay in delays:
        assert abs(delay.mean()) < 0.6 and abs(delay.std() - np.sqrt(90)) < 0.6 and delay.min() == -9


# --- options and iterators -------------------------------------------------------------------------------------------


def test_options():
    options = Options()
    assert options.experimental_distribute.auto_shard_policy is AutoShardPolicy.AUTO
    options.experimental_distribute.auto_shard_policy = -1
    options.threading.private_threadpool_size = 4
    options.deterministic = False
    dataset = R(4).with_options(options).batch(2).map(lambda x: x)
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy.DATA  # too late for the dataset
    found = dataset.options()
    assert found.experimental_distribute.auto_shard_policy is AutoShardPolicy.OFF
    assert found.deterministic is False and found.threading.private_threadpool_size == 4
    more = Options()
    more.deterministic = True
    found = dataset.with_options(more).options()
    assert found.deterministic is True and found.experimental_distribute.auto_shard_policy is AutoShardPolicy.OFF
    with pytest.raises(AttributeError):
        options.experimental_distribut = 1
    with pytest.raises(ValueError):
        options.experimental_distribute.auto_shard_policy = 17


@pytest.mark.parametrize(
    ("make", "size"),
    [
        (lambda d: d, 4),
        (lambda d: d.take(2).skip(1).repeat(2).shuffle(3).cache().prefetch(1).shard(1, 0), 4),
        (lambda d: d.filter(lambda x: True), 4),
        (lambda d: d.with_options(Options()), 4),
        (lambda d: d.concatenate(R(4).batch(4)), 4),
        (lambda d: d.concatenate(R(4).batch(2)), None),
        (lambda d: d.map(lambda x: x), None),
        (lambda d: d.unbatch(), None),
        (lambda d: d.rebatch(3), 3),
        (lambda d: d.batch(2), 2),
        (lambda d: d.enumerate(), None),
    ],
)
def test_fact_99_known_batch_sizes(make, size):
    assert node_of(make(R(12).batch(4))).batch_size == size


def test_iterators():
    iterator = iter(R(3))
    assert iter(iterator) is iterator and iterator.element_spec == TensorSpec((), "int64")
    assert [int(next(iterator)), int(iterator.get_next()), int(iterator.get_next_as_optional().get_value())] == [
        0,
        1,
        2,
    ]
    with pytest.raises(OutOfRangeError, match="End of sequence"):
        iterator.get_next()
    assert not iterator.get_next_as_optional().has_value()
    assert bool(Optional.from_value(3).has_value()) and not Optional.empty().has_value()


def test_elements_go_to_the_device_where_implicit_transfers_are_forbidden():
    dataset = Dataset.from_tensors((np.full(3, 7, np.float32), np.arange(2)))
    with jax.transfer_guard("disallow"):
        one, other = next(iter(dataset))
    assert one.tolist() == [7] * 3 and other.tolist() == [0, 1]
