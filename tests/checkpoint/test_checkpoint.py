"""Checkpoints: what is saved, into what it is restored, and that damage is noticed. Compared with TensorFlow 2.21."""

from __future__ import annotations

import collections
import gc
import glob
import os
import signal
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from strategies import WORKERS, compiled, counts, eager, mirrored, one_device, over, parts, replica_id, several, tpu

import replicax as rx
from replicax._base import atomic_files
from replicax._checkpoint import files as files
from replicax._checkpoint import object_graph

pytestmark = pytest.mark.skipif(WORKERS > 1, reason="jobs have tests of their own")

Checkpoint, CheckpointManager = rx.train.Checkpoint, rx.train.CheckpointManager
S, A = rx.VariableSynchronization, rx.VariableAggregation


def names(folder):
    return sorted(os.listdir(folder))


def numbers(paths):
    return [int(path.rpartition("-")[2]) for path in paths]


class Module:
    """An object that names its children itself, as `replicax.tf.Module` does."""

    def __init__(self, **children):
        vars(self).update(children)

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        object_graph.attached(value)

    def _tracked(self):
        return vars(self)


# Values and strategies.


@over(plain=True)
def test_a_variable_passes_from_every_strategy_to_every_other(make, tmp_path):
    """Fact 74."""
    with make().scope():
        v = rx.Variable([1.0, 2.0], name="v")
    path = Checkpoint(v=v).save(tmp_path / "ckpt")
    for other in (make, one_device, lambda: mirrored(2), lambda: mirrored(4)):
        with other().scope():
            w = rx.Variable([0.0, 0.0], aggregation=A.SUM)
        Checkpoint(v=w).restore(path).assert_consumed()
        assert w.numpy().tolist() == [1.0, 2.0]
        assert parts(other(), w) == [[1.0, 2.0]] * len(parts(other(), w))
    v.assign([0.0, 0.0])
    with mirrored(2).scope():  # where another strategy is current
        Checkpoint(v=v).restore(path).assert_consumed()
    assert v.numpy().tolist() == [1.0, 2.0]


@counts
def test_an_on_read_variable_is_saved_as_its_aggregate(n, tmp_path):
    """Fact 74: a sum is divided among the replicas, a mean and the first replica's value go to each."""
    strategy = mirrored(n)

    def made(strategy):
        with strategy.scope():
            return {
                op.name: rx.Variable(0.0, synchronization=S.ON_READ, aggregation=op)
                for op in (A.SUM, A.MEAN, A.ONLY_FIRST_REPLICA)
            }

    old = made(strategy)
    strategy.run(lambda: [v.assign(replica_id() + 1) for v in old.values()])
    path = Checkpoint(**old).save(tmp_path / "ckpt")
    total = n * (n + 1) / 2
    for m in (1, 2, 4):
        new = made(mirrored(m))
        Checkpoint(**new).restore(path).assert_consumed()
        assert parts(mirrored(m), new["SUM"]) == [total / m] * m
        assert parts(mirrored(m), new["MEAN"]) == [total / n] * m
        assert parts(mirrored(m), new["ONLY_FIRST_REPLICA"]) == [1.0] * m


def test_a_manager_restores_what_each_of_as_many_replicas_had(tmp_path):
    def managed(strategy):
        with strategy.scope():
            v = rx.Variable({"a": 0.0, "b": np.zeros(2)}, synchronization=S.ON_READ, aggregation=A.SUM)
        return v, CheckpointManager(Checkpoint(v=v), tmp_path, max_to_keep=1)

    strategy = mirrored(2)
    old, manager = managed(strategy)
    strategy.run(lambda: old.assign({"a": replica_id() + 0.5, "b": jnp.stack([replica_id(), 5]) * 1.0}))
    path = manager.save()
    keys = [f"{key}/.ATTRIBUTES/VARIABLE_VALUE" for key in ("save_counter", "v/a", "v/b")]
    assert [key for key, _ in rx.train.list_variables(path)] == ["_CHECKPOINTABLE_OBJECT_GRAPH", *keys]

    new, manager = managed(strategy)
    manager.restore_or_initialize()
    values = [jax.tree.map(lambda a: np.asarray(a).tolist(), v) for v in strategy.experimental_local_results(new)]
    assert values == [{"a": 0.5, "b": [0.0, 5.0]}, {"a": 1.5, "b": [1.0, 5.0]}]
    single, manager = managed(mirrored(1))
    manager.restore_or_initialize()
    assert manager.checkpoint.restore(path).assert_consumed() is not None
    assert jax.tree.map(lambda a: a.tolist(), single.numpy()) == {"a": 2.0, "b": [1.0, 10.0]}


def test_an_on_read_variable_without_aggregation_cannot_be_saved(tmp_path):
    with mirrored(2).scope():
        v = rx.Variable(0.0, synchronization=S.ON_READ, aggregation=A.NONE)
    checkpoint = Checkpoint(v=v)
    with pytest.raises(ValueError, match="Could not convert"):
        checkpoint.save(tmp_path / "ckpt")
    assert names(tmp_path) == [] and int(checkpoint.save_counter) == 0


def test_a_variable_that_is_laid_out_keeps_its_layout(tmp_path):
    strategy = tpu(2, 4)
    with strategy.scope():
        v = rx.Variable(np.arange(16.0, dtype=np.float32).reshape(4, 4))
    v = strategy.experimental_split_to_logical_devices(v, [2, 2])
    path = Checkpoint(v=v).save(tmp_path / "ckpt")
    before = v._storage.read()[0].sharding
    v.assign(jnp.zeros((4, 4)))
    Checkpoint(v=v).restore(path).assert_consumed()
    assert v.numpy().tolist() == np.arange(16.0).reshape(4, 4).tolist() and v._storage.read()[0].sharding == before


KINDS = {
    "float32": np.float32([1.5, -2.0]),
    "bfloat16": jnp.ones(3, jnp.bfloat16) * 1.25,
    "float8": jnp.ones(3, jnp.float8_e4m3fn),
    "int4": jnp.arange(4).astype(jnp.int4),
    "uint8": np.uint8([[1], [255]]),
    "bool": np.array([True, False]),
    "complex64": np.complex64([1 + 2j]),
    "scalar": np.int32(7),
    "empty": np.zeros((0, 3), np.float32),
    "not contiguous": np.arange(6, dtype=np.float32).reshape(2, 3).T,
    "nan": np.float32([np.nan, np.inf, -0.0]),
    "negative zeros": np.float32([-0.0, -0.0]),
    "zeros": np.zeros((2, 3), np.float16),
}


def test_all_kinds_of_arrays_are_restored_bit_for_bit(tmp_path):
    variables = {kind: rx.Variable(value) for kind, value in KINDS.items()}
    path = Checkpoint(kinds=variables).write(tmp_path / "ckpt")
    new = {kind: rx.Variable(jnp.zeros_like(value)) for kind, value in KINDS.items()}
    Checkpoint(kinds=new).read(path).assert_consumed()
    for kind, value in KINDS.items():
        got = new[kind].numpy()
        assert got.dtype == value.dtype and got.tobytes() == np.asarray(value).tobytes(), kind


def test_a_random_key_in_a_variable_or_beside_it(tmp_path):
    old = Checkpoint(v=rx.Variable(jax.random.key(3)), key=jax.random.key(5))
    path = old.write(tmp_path / "ckpt")
    new = Checkpoint(v=rx.Variable(jax.random.key(0)), key=jax.random.key(0))
    new.read(path).assert_consumed()
    assert jax.random.normal(new.key) == jax.random.normal(jax.random.key(5))
    assert jax.random.normal(new.v.value()) == jax.random.normal(jax.random.key(3))


def test_arrays_strings_are_refused(tmp_path):
    with pytest.raises(TypeError, match=r"\(root\).words is an array of <U3"):
        Checkpoint(words=np.array(["one"])).save(tmp_path / "ckpt")
    assert names(tmp_path) == []


# Objects.

State = collections.namedtuple("State", "step params")


def test_pytrees_of_arrays_are_replaced_in_the_attribute(tmp_path):
    tree = {"w": jnp.ones(2), "inner": [np.zeros(3), State(1, (jnp.int32(4),))]}
    path = Checkpoint(tree=tree, array=jnp.arange(3)).save(tmp_path / "ckpt")
    zeros = jax.tree.map(lambda x: x * 0, tree)
    new = Checkpoint(tree=zeros, array=jnp.zeros(3, jnp.int32))
    new.restore(path).assert_consumed()
    assert jax.tree.structure(new.tree) == jax.tree.structure(tree)
    for got, expected in zip(jax.tree.leaves(new.tree), jax.tree.leaves(tree)):
        assert type(got) is type(expected) and np.array_equal(got, expected)
    assert new.array.tolist() == [0, 1, 2]
    assert float(zeros["w"][0]) == 0.0  # the given pytree is not changed


def test_a_variable_with_a_pytree_and_a_dict_of_variables_are_the_same(tmp_path):
    params = {"w": jnp.ones(2), "layers": [jnp.zeros(1), jnp.ones(1)]}
    path = Checkpoint(params=rx.Variable(params)).write(tmp_path / "ckpt")
    apart = {"w": rx.Variable([0.0, 0.0]), "layers": [rx.Variable([5.0]), rx.Variable([5.0])]}
    Checkpoint(params=apart).read(path).assert_consumed()
    assert [v.numpy().tolist() for v in (apart["w"], *apart["layers"])] == [[1.0, 1.0], [0.0], [1.0]]
    arrays = Checkpoint(params=jax.tree.map(jnp.zeros_like, params))
    arrays.read(path).assert_consumed()
    assert arrays.params["layers"][1].tolist() == [1.0]


def test_an_optimizer_goes_on_where_it_was(tmp_path):
    def made(n):
        with mirrored(n).scope():
            w = rx.Variable([1.0, -1.0])
            return w, rx.Optimizer(optax.adam(0.1), w)

    def steps(w, optimizer, count):
        for _ in range(count):
            optimizer.apply_gradients(w.value() * 2)

    w, optimizer = made(1)
    steps(w, optimizer, 3)
    path = Checkpoint(model={"w": w}, optimizer=optimizer).save(tmp_path / "ckpt")
    steps(w, optimizer, 2)
    w2, optimizer2 = made(1)
    Checkpoint(model={"w": w2}, optimizer=optimizer2).restore(path).assert_consumed()
    steps(w2, optimizer2, 2)
    assert w2.numpy().tolist() == w.numpy().tolist()
    w3, optimizer3 = made(2)
    Checkpoint(model={"w": w3}, optimizer=optimizer3).restore(path).assert_consumed()
    assert int(optimizer3.state.value()[0].count) == 3


@pytest.mark.parametrize("make", [rx.get_strategy, lambda: mirrored(2)], ids=["default", "mirrored"])
def test_a_step_donates_restored_buffers_but_not_buffers_read_since(make, tmp_path):
    path = Checkpoint(a=rx.Variable(np.arange(5000.0)), b=rx.Variable(np.arange(5000.0) + 1)).save(tmp_path / "ckpt")
    strategy = make()
    with strategy.scope():
        a, b = rx.Variable(np.zeros(5000)), rx.Variable(np.zeros(5000))
    step = rx.function(lambda: strategy.run(lambda: [v.assign(v + 1) for v in (a, b)] and None))
    step()
    for _ in range(2):
        Checkpoint(a=a, b=b).restore(path).expect_partial()
        (restored,), read = a._storage.read(), b.value()
        step()
        step()
        assert restored.is_deleted() and read[:3].tolist() == [1, 2, 3]
        assert a.numpy()[:3].tolist() == [2, 3, 4] and b.numpy()[:3].tolist() == [3, 4, 5]


def test_an_object_with_two_names_is_saved_once_and_found_by_either(tmp_path):
    v = rx.Variable(5.0)
    path = Checkpoint(a=v, b=v).write(tmp_path / "ckpt")
    reader = rx.train.load_checkpoint(path)
    assert reader.has_tensor("a/.ATTRIBUTES/VARIABLE_VALUE") and not reader.has_tensor("b/.ATTRIBUTES/VARIABLE_VALUE")
    w = rx.Variable(0.0)
    Checkpoint(b=w).read(path).assert_consumed()
    assert float(w) == 5.0


def test_a_root_s_children_are_the_checkpoint_s(tmp_path):
    root = Module(v=rx.Variable(1.0), constant=jnp.ones(3), inner=Module(w=[rx.Variable(2.0)]), text="no value")
    root.itself = root
    path = Checkpoint(root, more=rx.Variable(3.0)).save(tmp_path / "ckpt")
    keys = rx.train.load_checkpoint(path).get_variable_to_shape_map()
    assert [key.partition("/.")[0] for key in keys if "ATTR" in key] == ["v", "more", "save_counter", "inner/w/0"]
    new = Module(v=rx.Variable(0.0), inner=Module(w=[rx.Variable(0.0)]))
    Checkpoint(new).restore(path).assert_existing_objects_matched().expect_partial()
    assert [float(new.v), float(new.inner.w[0])] == [1.0, 2.0]
    with pytest.raises(ValueError, match="root.v already exists"):
        Checkpoint(root, v=rx.Variable(1.0))


class Layer:
    """What Keras' layers look like to a checkpoint; built late, as they are."""

    def __init__(self, build=True):
        self._kernel = KerasVariable("dense/kernel") if build else None
        self._config = {"units": 3}

    def build(self):
        self._kernel = KerasVariable("dense/kernel")

    @property
    def variables(self):
        return [self._kernel]


class KerasVariable:
    def __init__(self, path):
        self.path, self._inner = path, rx.Variable(np.zeros(2, np.float32))
        self.shape, self.dtype = (2,), "float32"

    @property
    def value(self):
        return self._inner.value()

    def assign(self, value):
        self._inner.assign(value)


def test_objects_like_those_of_keras_are_tracked_by_their_attributes(tmp_path):
    model = Layer()
    model.layers = [Layer(), Layer()]
    model.layers[1]._kernel.assign([1.0, 2.0])
    path = Checkpoint(model=model).write(tmp_path / "ckpt")
    new = Layer()
    new.layers = [Layer(), Layer(build=False)]
    status = Checkpoint(model=new).read(path)
    with pytest.raises(AssertionError, match="model/layers/1/_kernel/.ATTRIBUTES"):
        status.assert_consumed()
    new.layers[1].build()
    assert new.layers[1]._kernel.value.tolist() == [1.0, 2.0]  # found before it is read
    status.assert_consumed()


class Counting:
    """An iterator that can tell where it stands."""

    def __init__(self):
        self.at = 0

    def __next__(self):
        self.at += 1
        return self.at

    def save_state(self):
        return {"at": self.at, "text": "a", "bytes": b"\0\1", "list": [np.arange(2), (np.int64(3), None, 1.5)],
                "objects": np.array([b"x", "y"], object), 5: True}  # fmt: skip

    def restore_state(self, state):
        self.state, self.at = state, state["at"]


def test_an_iterator_goes_on_where_it_was(tmp_path):
    iterator = Counting()
    next(iterator), next(iterator)
    path = Checkpoint(data=iterator).save(tmp_path / "ckpt")
    new = Counting()
    Checkpoint(data=new).restore(path).assert_consumed()
    assert next(new) == 3
    assert repr(new.state) == repr(iterator.save_state())


@pytest.mark.parametrize("value", [3, "text", None, object(), (1, 2), {"lr": 0.1}])
def test_checkpoint_refuses_objects_without_a_value(value):
    with pytest.raises(ValueError, match="`Checkpoint` was expecting v to be a trackable object, got"):
        Checkpoint(v=value)


def test_keys_with_the_same_text_are_refused(tmp_path):
    with pytest.raises(ValueError, match="same name"):
        Checkpoint(d={1: rx.Variable(0.0), "1": rx.Variable(0.0)}).save(tmp_path / "ckpt")
    with pytest.raises(ValueError, match="Use a list"):
        Checkpoint(d=(rx.Variable(0.0), jnp.ones(2))).save(tmp_path / "ckpt")
    assert names(tmp_path) == []


def test_names_with_dots_and_slashes_stay_apart(tmp_path):
    old = {"x/y": rx.Variable(1.0), "x": {"y": rx.Variable(2.0)}, "x.Sy": rx.Variable(3.0)}
    path = Checkpoint(a=old).write(tmp_path / "ckpt")
    keys = rx.train.load_checkpoint(path).get_variable_to_shape_map()
    assert "a/x.Sy/.ATTRIBUTES/VARIABLE_VALUE" in keys  # as TensorFlow writes x/y
    new = {"x/y": rx.Variable(0.0), "x": {"y": rx.Variable(0.0)}, "x.Sy": rx.Variable(0.0)}
    Checkpoint(a=new).read(path).assert_consumed()
    assert [float(v) for v in (new["x/y"], new["x"]["y"], new["x.Sy"])] == [1.0, 2.0, 3.0]


# Paths, counting, and what does not fit.


def test_save_counts_and_write_does_not(tmp_path):
    checkpoint = Checkpoint(v=rx.Variable(1.0))
    assert checkpoint.write(tmp_path / "w") == str(tmp_path / "w")
    assert checkpoint.save(tmp_path / "s") == str(tmp_path / "s-1") and int(checkpoint.save_counter) == 1
    assert checkpoint.save(str(tmp_path / "deep/er/s")) == str(tmp_path / "deep/er/s-2")
    assert names(tmp_path) == ["checkpoint", "deep", "s-1", "w"]
    assert rx.train.latest_checkpoint(tmp_path) == str(tmp_path / "s-1")
    assert rx.train.latest_checkpoint(tmp_path / "none") is None
    other = Checkpoint(v=rx.Variable(0.0))
    other.restore(tmp_path / "deep/er/s-2").assert_consumed()
    assert other.save(tmp_path / "s") == str(tmp_path / "s-3")


def test_a_relative_path_and_a_folder_that_is_moved(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoint = Checkpoint(v=rx.Variable(1.0))
    assert checkpoint.save("ckpt") == "ckpt-1" and checkpoint.save("run/ckpt") == "run/ckpt-2"
    os.rename("run", "moved")
    assert rx.train.latest_checkpoint("moved") == "moved/ckpt-2" and rx.train.latest_checkpoint(".") == "./ckpt-1"
    checkpoint.restore("moved/ckpt-2").assert_consumed()


def test_writing_over_a_checkpoint_replaces_it_or_leaves_it(tmp_path, monkeypatch):
    v, w = rx.Variable(1.0), rx.Variable(2.0)
    Checkpoint(v=v, w=w).write(tmp_path / "ckpt")
    v.assign(3.0)
    path = Checkpoint(v=v).write(tmp_path / "ckpt")
    assert names(tmp_path) == ["ckpt"]
    Checkpoint(v=w).read(path).assert_consumed()
    assert float(w) == 3.0
    rename, fails = os.rename, iter([True])

    def full(source, destination):
        if not os.path.exists(destination) and "unfinished" not in destination and next(fails, False):
            raise OSError("no space")
        rename(source, destination)

    monkeypatch.setattr(atomic_files, "_try_exchange", lambda one, other: False)
    monkeypatch.setattr(os, "rename", full)
    with pytest.raises(OSError, match="no space"):
        Checkpoint(v=rx.Variable(4.0)).write(tmp_path / "ckpt")
    monkeypatch.undo()
    Checkpoint(v=v).read(path).assert_consumed()
    assert (names(tmp_path), float(v)) == (["ckpt"], 3.0)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError, match="file is a file"):
        Checkpoint(v=v).write(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_assertions_name_what_is_unmatched_on_either_side(tmp_path):
    path = Checkpoint(v=rx.Variable([1.0, 2.0])).save(tmp_path / "ckpt")
    more = Checkpoint(v=rx.Variable([0.0, 0.0]), w=rx.Variable(1.0, name="extra")).restore(path)
    for check in (more.assert_consumed, more.assert_existing_objects_matched):
        with pytest.raises(AssertionError, match=r"Found 1 Python objects .*\(root\).w \(.*'extra:0'\)$"):
            check()
    assert more.assert_nontrivial_match() is more
    other = Checkpoint(x=rx.Variable(1.0)).restore(path)
    with pytest.raises(AssertionError, match="Nothing except the root object matched a checkpointed value"):
        other.assert_nontrivial_match()
    read = Checkpoint(v=rx.Variable([0.0, 0.0])).read(path)
    with pytest.raises(AssertionError, match="Unresolved object in checkpoint .*: save_counter/"):
        read.assert_consumed()
    assert read.assert_existing_objects_matched() is read
    nothing = Checkpoint(v=rx.Variable(0.0)).restore(None)
    assert nothing.expect_partial() is nothing
    for name in ("assert_consumed", "assert_existing_objects_matched", "assert_nontrivial_match"):
        with pytest.raises(AssertionError, match="No checkpoint specified"):
            getattr(nothing, name)()


def test_values_without_an_object_warn_unless_expected(tmp_path):
    path = Checkpoint(v=rx.Variable(1.0), w=rx.Variable(2.0)).write(tmp_path / "ckpt")

    def restored(expect):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            status = Checkpoint(v=rx.Variable(0.0)).read(path)
            if expect:
                status.expect_partial()
            del status
            gc.collect()
        return [str(warning.message) for warning in said]

    assert restored(True) == []
    [text] = restored(False)
    assert "1 values" in text and "w/.ATTRIBUTES" in text and "expect_partial" in text


def test_restoring_values_that_do_not_fit_changes_nothing(tmp_path):
    path = Checkpoint(a=rx.Variable(5.0), b=rx.Variable([1.0, 2.0])).save(tmp_path / "ckpt")
    a = rx.Variable(0.0)
    for b, error, text in [
        (
            rx.Variable([0.0] * 3),
            ValueError,
            r"Received incompatible tensor with shape \(2,\) .* shape \(3,\) .*root\).b",
        ),
        (rx.Variable([0, 0]), rx.InvalidArgumentError, "expected dtype int32 does not equal original dtype float32"),
    ]:
        with pytest.raises(error, match=text):
            Checkpoint(a=a, b=b).restore(path)
        assert float(a) == 0.0
    counting, data = Counting(), iter(rx.data.Dataset.range(3))
    next(counting)
    path = Checkpoint(a=a, counting=counting, data=iter(rx.data.Dataset.range(3).shuffle(3))).save(tmp_path / "ckpt")
    a.assign(2.0), next(counting), next(data)
    with pytest.raises(rx.InvalidArgumentError, match="over another dataset"):  # the last to be restored
        Checkpoint(a=a, counting=counting, data=data).restore(path)
    assert (float(a), next(counting), int(next(data))) == (2.0, 3, 1)
    late = rx.Variable(1.0)  # nobody waits for it
    assert late._late is False


def test_paths_that_are_no_checkpoints(tmp_path):
    checkpoint = Checkpoint(v=rx.Variable(0.0))
    with pytest.raises(FileNotFoundError, match="Is the number at its end missing"):
        checkpoint.restore(tmp_path / "ckpt")
    (tmp_path / "folder").mkdir()
    with pytest.raises(rx.CheckpointError, match="was not written by replicax"):
        checkpoint.restore(tmp_path / "folder")


@pytest.mark.parametrize("method", ["save", "write", "read", "restore"])
def test_saving_and_restoring_in_compiled_code_is_refused(method, tmp_path):
    checkpoint = Checkpoint(v=rx.Variable(0.0))
    path = checkpoint.write(tmp_path / "ckpt")
    call = lambda: getattr(checkpoint, method)(path)  # noqa: E731
    for program in (rx.function(call), jax.jit(call), lambda: rx.function(lambda: mirrored(2).run(call))()):
        with pytest.raises(RuntimeError, match=f"Checkpoint.{method} is called in a function that is being compiled"):
            program()
    with pytest.raises(RuntimeError, match=f"Checkpoint.{method} is called by a replica"):
        mirrored(2).run(call)
    assert names(tmp_path) == ["ckpt"]


# Objects that are made later.


def saved(tmp_path, **values):
    return Checkpoint(**{name: rx.Variable(value) for name, value in values.items()}).save(tmp_path / "ckpt")


def test_an_attribute_that_is_set_later_gets_its_value(tmp_path):
    path = saved(tmp_path, v=[1.0, 2.0])
    checkpoint = Checkpoint()
    status = checkpoint.restore(path)
    checkpoint.v = rx.Variable([0.0, 0.0])
    assert checkpoint.v.numpy().tolist() == [1.0, 2.0]
    status.assert_consumed()
    module = Module()
    status = Checkpoint(module).restore(path)
    with mirrored(2).scope():
        module.v = v = rx.Variable([0.0, 0.0])
        v.assign_add([1.0, 1.0])
    assert v.numpy().tolist() == [2.0, 3.0]
    status.assert_consumed()


@several
@pytest.mark.parametrize("way", [eager, compiled], ids=["eager", "compiled"])
def test_a_variable_that_is_made_in_the_first_step_gets_its_value_before_it_is_used(n, way, tmp_path):
    path = Checkpoint(layers=[rx.Variable(10.0)]).save(tmp_path / "ckpt")
    layers = []
    checkpoint = Checkpoint(layers=layers)
    status = checkpoint.restore(path)
    strategy = mirrored(n)

    def replica_step():
        if not layers:
            v = rx.Variable(0.0, aggregation=A.SUM)
            if not layers:
                layers.append(v)
        layers[0].assign_add(replica_id() * 0 + 1.0)

    for _ in range(2):
        way(lambda: strategy.run(replica_step))()
    status.assert_consumed()
    assert float(layers[0]) == 10.0 + 2 * n
    path = checkpoint.save(tmp_path / "ckpt")  # what was restored is not restored again
    assert float(layers[0]) == 10.0 + 2 * n


def test_pending_values_are_dropped_with_their_objects(tmp_path):
    path = saved(tmp_path, v=1.0, w=2.0)
    module = Module()
    Checkpoint(module).restore(path).expect_partial()  # the checkpoint itself is gone
    assert rx.Variable(0.0)._late
    module.v = rx.Variable(0.0)
    assert float(module.v) == 1.0
    del module
    gc.collect()
    assert rx.Variable(0.0)._late is False


def test_save_does_not_bring_back_what_training_has_changed(tmp_path):
    path = saved(tmp_path, v=1.0)
    made_before = rx.Variable(0.0)
    holder = {}
    checkpoint = Checkpoint(holder=holder, v=rx.Variable(0.0))
    Checkpoint(holder={"x": rx.Variable(7.0)}).write(tmp_path / "with_x")
    checkpoint.read(tmp_path / "with_x").expect_partial()
    holder["x"] = made_before  # not noticed
    made_before.assign(3.0)
    checkpoint.write(tmp_path / "new")
    assert float(made_before) == 3.0
    checkpoint.restore(path).expect_partial()


# The manager.


def test_the_manager_keeps_the_newest(tmp_path):
    checkpoint = Checkpoint(v=rx.Variable(1.0))
    manager = CheckpointManager(checkpoint, tmp_path, max_to_keep=2)
    assert manager.latest_checkpoint is None and manager.checkpoints == [] and manager.restore_or_initialize() is None
    assert numbers(manager.save() for _ in range(4)) == [1, 2, 3, 4]
    assert numbers(manager.checkpoints) == [3, 4] and names(tmp_path) == ["checkpoint", "ckpt-3", "ckpt-4"]
    assert manager.save(checkpoint_number=77) == manager.latest_checkpoint == str(tmp_path / "ckpt-77")
    assert int(checkpoint.save_counter) == 5 and rx.train.latest_checkpoint(tmp_path) == str(tmp_path / "ckpt-77")
    again = CheckpointManager(Checkpoint(v=rx.Variable(0.0)), str(tmp_path), max_to_keep=1)
    assert numbers(again.checkpoints) == [4, 77]  # nothing is deleted before the next one is there
    assert again.restore_or_initialize() == str(tmp_path / "ckpt-77")
    assert again.save() == str(tmp_path / "ckpt-6") and names(tmp_path) == ["checkpoint", "ckpt-6"]
    assert numbers([again.save(rx.Variable(6))]) == [6] and numbers(again.checkpoints) == [6]
    assert (again.directory, again.checkpoint_interval, again.checkpoint.sync(), again.sync()) == (
        str(tmp_path), None, None, None)  # fmt: skip


def test_the_manager_keeps_one_checkpoint_every_n_hours(tmp_path, monkeypatch):
    now = [1e9]
    monkeypatch.setattr("time.time", lambda: now[0])
    manager = CheckpointManager(Checkpoint(), tmp_path, 1, keep_checkpoint_every_n_hours=2.0, checkpoint_name="c")
    for _ in range(6):
        now[0] += 3600.0
        manager.save()
    # c-2 is the first that is two hours newer than the manager, c-4 two hours newer than c-2.
    assert names(tmp_path) == ["c-2", "c-4", "c-6", "checkpoint"] and numbers(manager.checkpoints) == [6]


def test_the_manager_waits_for_the_interval(tmp_path):
    step, calls = rx.Variable(0), []

    def manager(**more):
        return CheckpointManager(Checkpoint(step=step), tmp_path, 9, step_counter=step, checkpoint_interval=3, **more)

    one = manager(init_fn=lambda: calls.append("init"))
    assert one.restore_or_initialize() is None and calls == ["init"]
    saves = []
    for _ in range(8):
        saves.append(one.save() is not None)
        step.assign_add(1)
    assert saves == [True, False, False, True, False, False, True, False]
    assert one.save(check_interval=False) and one.save(check_interval=False) is None and one.checkpoint_interval == 3
    two = manager()
    step.assign(0)
    assert numbers([two.restore_or_initialize()]) == [4] and int(step) == 8 and two.save() is None
    assert manager(last_checkpoint_step=7).save() is None


def test_bad_arguments_of_the_manager(tmp_path):
    with pytest.raises(ValueError, match="Expected a positive integer or `None` for `max_to_keep`, got 0"):
        CheckpointManager(Checkpoint(), tmp_path, 0)
    with pytest.raises(ValueError, match="`step_counter` should be passed"):
        CheckpointManager(Checkpoint(), tmp_path, 1, checkpoint_interval=2)
    with pytest.raises(TypeError, match="`checkpoint` is a Checkpoint"):
        CheckpointManager(rx.Variable(1.0), tmp_path, 1)


# Damage.


def flipped(path):
    """The same file with one bit of its middle changed."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def truncated(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def three_checkpoints(folder):
    # Numbers that cannot be compressed, so that no bit of the files is without meaning.
    v = rx.Variable(np.random.default_rng(0).normal(size=20_000).astype(np.float32))
    manager = CheckpointManager(Checkpoint(v=v), folder, 9)
    for number in range(3):
        v.assign(v + np.float32(number))
        manager.save()
    return v.numpy()


def largest(folder):
    return max(
        (Path(file) for file in glob.glob(f"{folder}/**/d/*", recursive=True)), key=lambda file: file.stat().st_size
    )


@pytest.mark.parametrize("damage", [flipped, truncated, Path.unlink])
def test_the_newest_whole_checkpoint_is_used(damage, tmp_path):
    newest = three_checkpoints(tmp_path)
    for number in (3, 2):
        damage(largest(tmp_path / f"ckpt-{number}"))
    v = rx.Variable(newest * 0)
    with pytest.raises(rx.CheckpointError, match="ckpt-3 is damaged"):
        Checkpoint(v=v).restore(tmp_path / "ckpt-3")
    assert not v.numpy().any()
    both = [
        pytest.warns(UserWarning, match=f"passed over for an older one.*ckpt-{number} is damaged") for number in (2, 3)
    ]
    manager = CheckpointManager(Checkpoint(v=v), tmp_path, 9)
    for use in (rx.train.latest_checkpoint, lambda _: manager.latest_checkpoint):
        with both[0], both[1]:
            assert use(tmp_path) == str(tmp_path / "ckpt-1")
    manager = CheckpointManager(Checkpoint(v=v), tmp_path, 9)
    with both[0], both[1]:
        assert numbers([manager.restore_or_initialize()]) == [1]
    assert v.numpy().any() and int(manager.checkpoint.save_counter) == 1
    assert numbers([manager.save(), manager.latest_checkpoint]) == [2, 2]  # in place of the damaged one


def test_any_changed_byte_of_any_file_is_noticed_or_means_nothing(tmp_path):
    three_checkpoints(tmp_path)
    whole = rx.train.load_checkpoint(tmp_path / "ckpt-3").get_tensor("v/.ATTRIBUTES/VARIABLE_VALUE")
    noticed = 0
    for file in sorted(path for path in (tmp_path / "ckpt-3").rglob("*") if path.is_file() and path.stat().st_size):
        content = file.read_bytes()
        for at in sorted({0, len(content) // 3, len(content) // 2, len(content) - 1}):
            file.write_bytes(content[:at] + bytes([content[at] ^ 0x41]) + content[at + 1 :])
            try:
                got = rx.train.load_checkpoint(tmp_path / "ckpt-3").get_tensor("v/.ATTRIBUTES/VARIABLE_VALUE")
                assert np.array_equal(got, whole)
            except rx.CheckpointError:
                noticed += 1
        file.write_bytes(content)
    assert noticed > 10


def test_restoring_only_damaged_checkpoints_is_an_error(tmp_path):
    three_checkpoints(tmp_path)
    for number in (1, 2, 3):
        truncated(largest(tmp_path / f"ckpt-{number}"))
    manager = CheckpointManager(Checkpoint(v=rx.Variable(0.0)), tmp_path, 9, init_fn=lambda: pytest.fail("begun anew"))
    with (
        pytest.warns(UserWarning, match="passed over"),
        pytest.raises(rx.CheckpointError, match="None of the checkpoints"),
    ):
        manager.restore_or_initialize()


def test_a_damaged_list_of_checkpoints_is_rebuilt(tmp_path):
    three_checkpoints(tmp_path)
    for number in range(1, 4):  # in this order
        os.utime(tmp_path / f"ckpt-{number}", (number, number))
    (tmp_path / "checkpoint").write_text('{"model_check')
    with pytest.warns(UserWarning, match="checkpoint is damaged"):
        assert rx.train.latest_checkpoint(tmp_path) == str(tmp_path / "ckpt-3")
    with pytest.warns(UserWarning, match="checkpoint is damaged"):
        manager = CheckpointManager(Checkpoint(), tmp_path, 9)
    assert numbers(manager.checkpoints) == [1, 2, 3]
    manager.save(4)
    assert files.read_record(tmp_path / "checkpoint")["model_checkpoint_path"] == "ckpt-4"


def test_a_save_that_fails_leaves_nothing(tmp_path, monkeypatch):
    checkpoint = Checkpoint(v=rx.Variable(1.0))
    checkpoint.save(tmp_path / "ckpt")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "rename", full)
    with pytest.raises(rx.CheckpointError, match="ckpt-2 could not be written, and .* as before: No space left"):
        checkpoint.save(tmp_path / "ckpt")
    assert names(tmp_path) == ["checkpoint", "ckpt-1"] and int(checkpoint.save_counter) == 1


KILLED = """
import os, signal, threading
from pathlib import Path
import numpy as np
import replicax as rx

folder = Path({folder!r})
v = rx.Variable(np.random.default_rng(0).normal(size=4_000_000).astype(np.float32))
manager = rx.train.CheckpointManager(rx.train.Checkpoint(v=v), folder, 2)
manager.save()
v.assign(v * 2)

def watch():
    while not list(folder.glob(".replicax-unfinished-*/**/d/*")):
        pass
    os.kill(os.getpid(), signal.SIGKILL)

threading.Thread(target=watch).start()
manager.save()
"""


def test_a_process_that_is_killed_while_it_saves_leaves_whole_checkpoints(run_python, tmp_path):
    folder = tmp_path / "run"
    done = run_python(KILLED.format(folder=str(folder)))
    assert done.returncode == -signal.SIGKILL, done.stderr
    latest = rx.train.latest_checkpoint(folder)
    assert latest == str(folder / "ckpt-1") and len(names(folder)) == 3  # and what was unfinished
    v = rx.Variable(np.zeros(4_000_000, np.float32))
    manager = CheckpointManager(Checkpoint(v=v), folder, 2)
    assert manager.restore_or_initialize() == latest and v.numpy().any()
    manager.save()
    assert names(folder) == ["checkpoint", "ckpt-1", "ckpt-2"]  # and what was left is gone
    assert rx.train.latest_checkpoint(folder) == str(folder / "ckpt-2")


def test_orbax_is_imported_only_on_use(run_python):
    done = run_python("""
        import sys
        import replicax
        assert not [name for name in sys.modules if name.partition(".")[0] in ("orbax", "tensorstore")]
        sys.modules["orbax"] = None
        v = replicax.Variable(1.0)
        try:
            replicax.train.Checkpoint(v=v).save("/nowhere/ckpt")
        except ImportError as error:
            assert "pip install " in str(error) and "orbax-checkpoint" in str(error)
        else:
            raise AssertionError
    """)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("distributed", [False, True], ids=["dataset", "distributed"])
def test_a_dataset_iterator_goes_on_in_the_middle_of_an_epoch(tmp_path, distributed):
    def iterator():
        dataset = rx.data.Dataset.range(20).shuffle(20, seed=3).batch(2)
        return iter(mirrored(2).experimental_distribute_dataset(dataset) if distributed else dataset)

    def rows(element):
        parts = mirrored(2).experimental_local_results(element) if distributed else [element]
        return [int(row) for part in parts for row in np.asarray(part)]

    first = iterator()
    seen = [rows(next(first)) for _ in range(4)]
    path = Checkpoint(iterator=first).save(tmp_path / "ckpt")
    rest = [rows(element) for element in first]
    again = iterator()
    Checkpoint(iterator=again).restore(path).assert_consumed()
    assert [rows(element) for element in again] == rest
    assert sorted(sum(seen + rest, [])) == list(range(20))


def test_the_checkpoints_of_a_folder_are_listed(tmp_path):
    v = rx.Variable([1.0, 2.0])
    manager = CheckpointManager(Checkpoint(v=v), tmp_path, max_to_keep=2)
    assert rx.train.get_checkpoint_state(tmp_path) is None
    waiting = rx.train.checkpoints_iterator(tmp_path, timeout=0)
    paths = [manager.save() for _ in range(3)]
    assert dict(rx.train.list_variables(tmp_path))["v/.ATTRIBUTES/VARIABLE_VALUE"] == [2]
    assert rx.train.load_variable(paths[-1], "v/.ATTRIBUTES/VARIABLE_VALUE").tolist() == [1.0, 2.0]
    state = rx.train.get_checkpoint_state(tmp_path)
    assert state.model_checkpoint_path == paths[-1] and state.all_model_checkpoint_paths == paths[1:]
    assert next(waiting) == paths[-1]
    assert next(waiting, None) is None  # nothing new within the time
