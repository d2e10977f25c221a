"""`tf.saved_model`: what is saved, and what a process that lacks the code has when it loads that.

The programs of tests/tf/tf_saved_models run under TensorFlow too, whose results are in tensorflow.json:

    python tests/tf/tf_saved_models/save.py tensorflow FOLDER
    python tests/tf/tf_saved_models/load.py tensorflow FOLDER tests/tf/tf_saved_models/tensorflow.json
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import programs
import pytest

FOLDER = Path(__file__).parent / "tf_saved_models"


def results_of(python, module, folder):
    """What load.py says of the models that save.py has saved, in two processes."""
    theirs = {"TF_CPP_MIN_LOG_LEVEL": "3", "XLA_FLAGS": None, "KERAS_BACKEND": None}
    options = {"folder": folder, "timeout": 230.0, "python": python, "imports": "replicax.tf"}
    options["env"] = theirs if module == "tensorflow" else {}
    programs.run_well(FOLDER / "save.py", [module, folder], **options)
    programs.run_well(FOLDER / "load.py", [module, folder, folder / "results.json"], **options)
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))


def is_close(one, other):
    """Whether results are the same; numbers may be a little off."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-4, abs_tol=1e-5)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_close(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(is_close, one, other))
    return one == other and type(one) is type(other)


def differences(expected, found):
    return {
        name: (expected.get(name), found.get(name))
        for name in {*expected, *found}
        if not is_close(expected.get(name), found.get(name))
    }


@pytest.fixture(scope="module")
def recorded():
    return json.loads((FOLDER / "tensorflow.json").read_text(encoding="utf-8"))


def test_a_process_without_the_code_has_what_tensorflow_gives(recorded, tmp_path):
    assert not differences(recorded, results_of(sys.executable, "replicax.tf", tmp_path))


def test_the_record_is_what_tensorflow_gives(tensorflow_python, recorded, tmp_path):
    assert not differences(recorded, results_of(tensorflow_python, "tensorflow", tmp_path))


def test_what_cannot_be_saved_or_loaded_is_named(run_tf, tmp_path):
    run_tf(
        f"""
import os, warnings
folder = {str(tmp_path)!r} + "/"
Spec = tf.TensorSpec

def module(function, specs, **attributes):
    made = tf.Module()
    made.f = tf.function(function, input_signature=specs)
    for name, value in attributes.items():
        setattr(made, name, value)
    return made

def save(*args):
    tf.saved_model.save(module(*args), folder + "refused")

outside = tf.Variable(1.0)
raises(AssertionError, lambda: save(lambda x: x * outside, [Spec([])]), "untracked", "reachable", "attribute")
raises(ValueError, lambda: save(lambda x: tf.strings.length(x), [Spec([None], tf.string)]), "strings", "host")
raises(ValueError, lambda: save(lambda x: x[int(x.shape[0]) - 1], [Spec([None])]), "all sizes", "dimensions of None")
raises(ValueError, lambda: tf.saved_model.save(3, folder + "refused"), "Trackable", "int")
raises(ValueError, lambda: tf.saved_model.save(tf.Module(), folder + "refused", signatures=lambda x: x), "signature")
raises(AssertionError, tf.function(lambda: save(lambda: 1, [])), "inside a traced @tf.function")
for returned, words in ((lambda x: None, "non-Tensor"), (lambda x: {{1: x}}, "non-string key")):
    refused = module(returned, [Spec([])])
    save = lambda: tf.saved_model.save(refused, folder + "refused", signatures=refused.f)
    raises(ValueError, save, words, "signature")
assert not os.path.exists(folder + "refused")

# The user's own files are left alone.
os.mkdir(folder + "mine")
open(folder + "mine/notes.txt", "w").close()
raises(FileExistsError, lambda: tf.saved_model.save(tf.Module(), folder + "mine"), "no saved model")

# What a program prints is not saved, and a function is saved for the shapes that it was called with if it must be.
def shows(x):
    tf.print(x)
    return x + 1.0

def last(x):
    return x[int(x.shape[0]) - 1]

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    printing = module(shows, [Spec([])])
    of_shape = module(last, [Spec([None])])
    of_shape.f(tf.range(4.0))
    tf.saved_model.save(printing, folder + "prints")
    tf.saved_model.save(of_shape, folder + "last")
texts = [str(each.message) for each in caught]
assert any("prints" in text for text in texts) and any("called with" in text for text in texts), texts
assert tf.saved_model.load(folder + "prints").f(1.0).numpy() == 2
assert tf.saved_model.load(folder + "last").f(tf.range(4.0)).numpy() == 3
raises(ValueError, lambda: tf.saved_model.load(folder + "last").f(tf.range(5.0)), "Could not find matching")

# Sizes that the program could not leave open.
tf.saved_model.save(module(lambda x, y: x + y, [Spec([None]), Spec([None])]), folder + "sum")
total = tf.saved_model.load(folder + "sum")
assert total.f(tf.ones([3]), tf.ones([3])).numpy().tolist() == [2.0] * 3
raises(tf.errors.InvalidArgumentError, lambda: total.f(tf.ones([3]), tf.ones([2])), "sizes", "equal", "(3,)")

# Folders of TensorFlow, and damaged ones.
os.mkdir(folder + "theirs")
open(folder + "theirs/saved_model.pb", "w").close()
raises(NotImplementedError, lambda: tf.saved_model.load(folder + "theirs"), "TensorFlow", "variables", "restore")
with open(folder + "sum/functions/0.bin", "r+b") as file:
    file.seek(100)
    file.write(b"damaged")
raises(Exception, lambda: tf.saved_model.load(folder + "sum"), "damaged", "functions/0.bin")
"""
    )


def test_models_of_strategies_are_saved_for_one_device_and_loaded_into_scopes(run_tf, tmp_path):
    run_tf(
        f"""
folder = {str(tmp_path / "model")!r}
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
saved = tf.Module()
with strategy.scope():
    saved.weight = tf.Variable([1.0, 2.0])
    kinds = tf.VariableSynchronization.ON_READ, tf.VariableAggregation
    saved.mean = tf.Variable(3.0, synchronization=kinds[0], aggregation=kinds[1].MEAN)
    saved.sum = tf.Variable(4.0, synchronization=kinds[0], aggregation=kinds[1].SUM)
strategy.run(lambda: saved.sum.assign_add(1.0))  # both replicas together have 10

def f(x):
    saved.mean.assign_add(1.0)
    return x * saved.weight + saved.mean + saved.sum

saved.f = tf.function(f, input_signature=[tf.TensorSpec([None, 2])])
tf.saved_model.save(saved, folder)
assert saved.mean.numpy() == 3

alone = tf.saved_model.load(folder)
assert alone.sum.numpy() == 10 and alone.f(tf.ones([1, 2])).numpy().tolist() == [[15.0, 16.0]]
assert alone.mean.numpy() == 4 and not isinstance(alone.weight, tf.types.experimental.distributed.Mirrored)

with strategy.scope():
    mirrored = tf.saved_model.load(folder)
assert isinstance(mirrored.weight, tf.types.experimental.distributed.Mirrored)
assert (mirrored.mean.numpy(), mirrored.sum.numpy()) == (3, 10)

@tf.function
def step(x):
    return strategy.run(mirrored.f, args=(x,))

batches = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensors(tf.ones([4, 2])))
rows = strategy.experimental_local_results(step(next(iter(batches))))
assert [row.numpy().tolist() for row in rows] == [[[10.0, 11.0]] * 2] * 2  # each replica has half of the sum
assert mirrored.mean.numpy() == 4
"""
    )


def test_the_first_save_of_a_process_warns_that_tensorflow_cannot_read_it(run_tf, tmp_path):
    run_tf(
        f"""
import warnings
folder = {str(tmp_path)!r} + "/"
model = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(1)])
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    raises(ValueError, lambda: tf.saved_model.save(5, folder + "number"))  # which writes nothing
    assert not caught, caught
    model.export(folder + "exported", verbose=False)
    tf.saved_model.save(tf.Variable(1.0), folder + "saved")
texts = [str(warning.message) for warning in caught if "saved_model.pb" in str(warning.message)]
assert len(texts) == 1 and "TensorFlow Serving" in texts[0], texts
assert "`replicax export DIR OUT --to tensorflow`" in texts[0], texts
assert os.path.exists(folder + "exported") and not os.path.exists(folder + "exported/saved_model.pb")
"""
    )


def test_any_variable_may_be_the_root(run_tf, tmp_path):
    run_tf(
        f"""
folder = {str(tmp_path / "model")!r}
on_read = dict(synchronization=tf.VariableSynchronization.ON_READ, aggregation=tf.VariableAggregation.SUM)
D = tf.distribute
for strategy in (D.get_strategy(), D.MirroredStrategy(["CPU:0", "CPU:1"])):
    with strategy.scope():
        saved = tf.Variable([1, 2], trainable=False, name="steps"), tf.Variable([5.0, 6.0], **on_read)
    for variable in saved:
        expected = variable.numpy().tolist()  # TensorFlow's, too
        tf.saved_model.save(variable, folder)
        loaded = tf.saved_model.load(folder)
        assert loaded.numpy().tolist() == expected and loaded.trainable == variable.trainable
        assert loaded.name == variable.name and loaded.dtype == variable.dtype
"""
    )


def test_functions_that_assign_on_read_variables_are_saved_for_one_value(run_tf, tmp_path):
    """The numbers are TensorFlow's."""
    run_tf(
        f"""
folder = {str(tmp_path / "model")!r}
A = tf.VariableAggregation

class Counter(tf.Module):
    def __init__(self, aggregation, dtype):
        super().__init__()
        self.seen = tf.Variable(
            tf.cast(3, dtype), synchronization=tf.VariableSynchronization.ON_READ, aggregation=aggregation
        )

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)])
    def count(self, x):
        self.seen.assign_add(tf.cast(tf.reduce_sum(x), self.seen.dtype))
        return x

    @tf.function(input_signature=[])
    def more(self):
        return self.seen.assign_add(tf.cast(1, self.seen.dtype))

    @tf.function(input_signature=[])
    def triple(self):
        self.seen.assign_sub(tf.cast(1, self.seen.dtype))
        self.seen.assign(self.seen * 3)
        return self.seen.read_value() + 0

strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
for aggregation, dtype, expected in (
    (A.SUM, tf.float32, [11, 14, 15, 15, 42, 42]),
    (A.SUM, tf.int32, [11, 14, 15, 15, 42, 42]),
    (A.MEAN, tf.float32, [5.5, 8.5, 9.5, 9.5, 25.5, 25.5]),
    (A.ONLY_FIRST_REPLICA, tf.int32, [5, 8, 9, 9, 24, 24]),
):
    with strategy.scope():
        counter = Counter(aggregation, dtype)
    strategy.run(lambda: counter.seen.assign_add(
        tf.cast(2 + tf.distribute.get_replica_context().replica_id_in_sync_group, dtype)
    ))
    for scope in (tf.name_scope("outside"), strategy.scope()):
        with scope:
            tf.saved_model.save(counter, folder)
        loaded = tf.saved_model.load(folder)
        seen = [loaded.seen.numpy()]
        loaded.count(tf.constant([1.0, 2.0]))
        seen += [loaded.seen.numpy(), loaded.more().numpy(), loaded.seen.numpy()]
        seen += [loaded.triple().numpy(), loaded.seen.numpy()]
        assert seen == expected, (aggregation, dtype, seen)
        assert counter.seen.numpy() == expected[0]
    if aggregation is A.SUM:  # what the model itself does is as before
        raises(ValueError, lambda: counter.count(tf.ones([1])), "assign_add", "cross-replica context")
"""
    )


def test_models_of_central_storage_over_two_kinds_of_devices_run_on_one(run_tf, tmp_path):
    run_tf(
        f"""
import replicax
folder = {str(tmp_path / "model")!r}

class Model(tf.Module):
    def __init__(self):
        super().__init__()
        self.weight = tf.Variable([1.0, 2.0])

    @tf.function(input_signature=[])
    def grow(self):
        for _ in tf.range(2):
            self.weight.assign_add([1.0, 1.0])
        return self.weight * 2.0

replicax.config.set_virtual_devices({{"CPU": 1, "GPU": 1}})
for devices in (["GPU:0", "CPU:0"], ["CPU:0", "GPU:0"]):
    with tf.distribute.experimental.CentralStorageStrategy(devices).scope():
        model = Model()
    model.grow()
    tf.saved_model.save(model, folder)
    loaded = tf.saved_model.load(folder)
    assert loaded.grow().numpy().tolist() == [10.0, 12.0] and loaded.weight.numpy().tolist() == [5.0, 6.0]
"""
    )


def test_a_function_of_unknown_rank_is_saved_for_each_rank_that_it_takes(run_tf, tmp_path):
    run_tf(
        f"""
folder = {str(tmp_path / "model")!r}

class Model(tf.Module):
    @tf.function(input_signature=[tf.TensorSpec(None, tf.float32)])
    def double(self, x):
        return x * 2.0

    @tf.function(input_signature=[tf.TensorSpec(None, tf.float32)])
    def first(self, x):
        return x[0]

    @tf.function(input_signature=[tf.TensorSpec([2], tf.float32)])
    def more(self, x):
        return x + 1.0

saved = Model()
tf.saved_model.save(saved, folder)
loaded = tf.saved_model.load(folder)
for shape in ([], [2], [1, 3], [2, 1, 1, 1, 1]):
    x = tf.random.normal(shape)
    assert np.array_equal(loaded.double(x), x * 2.0)
    if shape:
        assert np.array_equal(loaded.first(x), x[0])
assert loaded.more(tf.ones([2])).numpy().tolist() == [2.0, 2.0]
raises(ValueError, lambda: loaded.first(tf.constant(1.0)), "Could not find matching")
raises(ValueError, lambda: tf.saved_model.save(saved, folder, signatures=saved.double), "double", "unknown rank")
"""
    )


def test_models_of_keras_are_exported_and_used_as_layers(run_tf, tmp_path):
    run_tf(
        f"""
folder = {str(tmp_path)!r} + "/"
keras = tf.keras
model = keras.Sequential(
    [keras.Input((4,), name="features"), keras.layers.Dense(3, activation="relu"), keras.layers.BatchNormalization(),
     keras.layers.Dropout(0.5), keras.layers.Dense(2)]
)
model.layers[1].moving_mean.assign([1.0, 2.0, 3.0])
x = np.linspace(-1, 1, 20, dtype=np.float32).reshape(5, 4)
expected = model(x)
mean = tf.function(lambda: model.layers[1].moving_mean)()  # the value, as of any variable that a function returns
assert tf.is_tensor(mean) and not hasattr(mean, "assign") and mean.numpy().tolist() == [1.0, 2.0, 3.0]
model.export(folder + "model", verbose=False)
loaded = tf.saved_model.load(folder + "model")
for rows in (1, 5):
    np.testing.assert_allclose(loaded.serve(x[:rows]), expected[:rows], rtol=1e-6, atol=1e-6)
np.testing.assert_allclose(loaded.signatures["serving_default"](features=x)["output_0"], expected, rtol=1e-6, atol=1e-6)
counts = [len(each) for each in (loaded.variables, loaded.trainable_variables, loaded.non_trainable_variables)]
assert counts == [9, 6, 3] and set(loaded.signatures) == {{"serve", "serving_default"}}, counts

layer = keras.layers.TFSMLayer(folder + "model", call_endpoint="serve")
np.testing.assert_allclose(layer(x), expected, rtol=1e-6, atol=1e-6)
raises(ValueError, lambda: keras.layers.TFSMLayer(folder + "model", call_endpoint="other"), "endpoint", "serve")

tf.saved_model.save(model, folder + "saved")
again = tf.saved_model.load(folder + "saved").signatures["serving_default"]
np.testing.assert_allclose(again(inputs=x)["output_0"], expected, rtol=1e-6, atol=1e-6)

archive = keras.export.ExportArchive()
archive.track(model)
archive.add_endpoint("half", lambda x: model(x) / 2.0, [keras.InputSpec(shape=(None, 4), dtype="float32")])
archive.add_variable_collection("last", model.layers[-1].variables)
archive.write_out(folder + "archive", verbose=False)
loaded = tf.saved_model.load(folder + "archive")
np.testing.assert_allclose(loaded.half(x), expected / 2.0, rtol=1e-6, atol=1e-6)
assert [list(v.shape) for v in loaded.last] == [[3, 2], [2]]
"""
    )


def test_a_function_that_only_a_strategy_of_one_replica_ran_can_be_saved(run_tf):
    run_tf(
        """
        for strategy in tf.distribute.get_strategy(), tf.distribute.OneDeviceStrategy("/cpu:0"):
            module = tf.Module()
            module.f = tf.function(lambda x: x * 2)
            strategy.run(module.f, (tf.constant(1.0),))
            assert module.f.experimental_get_tracing_count() == 1
            folder = tempfile.mkdtemp()
            tf.saved_model.save(module, folder)
            assert tf.saved_model.load(folder).f(tf.constant(3.0)) == 6
        """
    )
