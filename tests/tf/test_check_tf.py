"""`replicax check-tf`: what code uses of TensorFlow, found without running it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

GOOD = """
import tensorflow as tf
from tensorflow.keras import layers as L
from tensorflow import data

K = tf.keras.backend

def step(x, layers):
    K.mean(x)
    for layer in layers:
        layers.append(layer.nosuch)
    tf = x
    tf.nosuch
    return L.Dense(units=3)(x)

class Model(tf.keras.Model):
    tf = None

    def call(self, x, audio=tf.float32.as_numpy_dtype):
        return tf.reshape(tensor=x, shape=[-1], name="flat")

try:
    from tensorflow import nosuch
except ImportError:
    nosuch = None
if hasattr(tf, "quux"):
    tf.quux()
getattr(tf, "quux", None)
data.Dataset.range(3)
"""

BAD = """
import tensorflow.compat.v2 as tf2
import tensorflow_hub as hub
import tensorflow_datasets.public_api as tfds
import tensorflow_probability.substrates.jax as tfp
from tensorflow.core.protobuf import config_pb2 as config
from tensorflow.python.framework import ops, dtypes
from tensorflow.nn import ctc_beam_search_decoder as loss

tf2.reshape([1], shape=[1], nosuch=3)
loss(labels=1)
tf2.data.Dataset.nosuch(3)
config.GraphDef()
ops.convert_to_tensor(1)
ops.RegisterNothing()
x = lambda self: tf2.keras.layers.Nosuch()
getattr(tf2.audio, "decode_wav")
tf2.random.normal([2])
"""

OLD_KERAS = """
import os
import tensorflow as tf
from scipy import optimize

opt = tf.keras.optimizers.Adam(lr=0.1)
opt.minimize(loss, [])
tf.keras.optimizers.SGD(0.1).minimize(loss, [])
self.optimizers["g"].minimize(loss)
optimize.minimize(loss), adopt.minimize(loss)
model.optimizer.lr = 3
tf.keras.backend.set_value(model.optimizer.lr, 3), config.optimizer.lr, options.lr
opt._decayed_lr(tf.float32)
train_loss.reset_states(), lstm.reset_states()
opt.get_unscaled_gradients(opt.get_scaled_loss(loss))

class Layer(tf.keras.layers.Layer):
    def __init__(self):
        super().__init__(experimental_autocast=False)
        self.distribute_reduction_method = "sum"

    def build(self, shape):
        self.add_weight("w", shape=(2,))
        self.add_weight(name="w", shape=(2,)), self.add_weight((2,))

    def fit_generator(self):
        self.fit_generator(self.model.distribute_reduction_method)

if os.path.exists(prefix + ".index") or os.path.isfile(f"{prefix}.index") or tf.io.gfile.exists(p + ".index"):
    frame.index, frame.exists("x")
if hasattr(model, "compiled_loss"):
    model.compiled_loss(1, 2)
"""

DROPPED = """
import tensorflow as tf
from tensorflow.keras.callbacks import ModelCheckpoint

tf.keras.optimizers.legacy.Adam(0.1)
tf.keras.optimizers.SGD(0.1, decay=1e-4)
tf.keras.layers.BatchNormalization(fused=True)
tf.keras.layers.experimental.preprocessing.Rescaling(2.0)
tf.keras.experimental.CosineDecay(0.1, 10)
ModelCheckpoint("weights-{epoch}"), ModelCheckpoint(filepath=folder + "/w.ckpt", save_weights_only=True)
model.compile("sgd", "mse", experimental_run_tf_function=False)
model.fit(x, y, workers=2, use_multiprocessing=True)
model.train_on_batch(x, y, reset_metrics=False)
optimizer.apply_gradients(pairs, experimental_aggregate_gradients=False)
optimizer.get_updates(loss, variables), self.opt._create_slots(variables)
model.save("model"), model.save_weights(f"{folder}/weights"), model.load_weights(os.path.join(folder, "w"))
tf.keras.models.load_model("model"), tf.keras.models.save_model(model, "model")
model.predict_classes(x), layer.add_update(op), model.layers[0].output_shape

class Layer(tf.keras.layers.Layer):
    def build(self, shape):
        self.w = self.add_weight(name="w", shape=(2,), synchronization=1, aggregation=tf.VariableAggregation.MEAN)
        self.add_metric(1, name="m")

path = "saved_model/my_model"
model.save(path), tf.keras.models.load_model(path)
opt.lr = 0.5
model.predict_proba(x), optimizer.get_weights(), strategy.experimental_run_v2(step)
tf.keras.optimizers.Adam(lr=0.1, decay=0.1)
tf.keras.layers.experimental.preprocessing.RandomFlip()
tf.contrib.layers, tf.compat.v1.nn.rnn_cell.LSTMCell, tf.compat.v1.global_variables()
"""

KEPT = """
import tensorflow as tf
from torch.optim import Adam
from tensorflow.keras.callbacks import ModelCheckpoint

Adam(lr=0.1), Trainer(lr=0.1, decay=0.1), dict(lr=1), tf.keras.optimizers.AdamW(0.1, weight_decay=0.1)
ModelCheckpoint("model.keras"), ModelCheckpoint(path), ModelCheckpoint("m.weights.h5", save_weights_only=True)
tf.keras.preprocessing.image.load_img, tf.keras.losses.Reduction.NONE, tf.keras.layers.LeakyReLU(alpha=0.1)
model.save("model.keras"), model.save(path), figure.save("figure"), model.save_weights("m.weights.h5")
tf.saved_model.save(model, "folder"), tf.train.Checkpoint(model=model).save("ckpt")
model.input_shape, model.output_shape, self.input_shape, cache.get_updates(), repository.add_metric("m")
forest.fit(x, y, sample_weight=1), re.compile("workers"), store.get_slot(1)
model.compile("sgd", "mse", run_eagerly=True), tf.keras.layers.Layer().add_weight(name="w", aggregation="mean")
opt = parser.parse_args()
opt.lr, Adam(opt.lr)
model = RandomForestClassifier()
model.predict_proba(x), model.get_weights()
file = "model.keras"
for twice in ["model", "model.h5"]:
    model.save(file), model.save(twice)
twice = "model"
strategy = tf.compat.v1.distribute.MirroredStrategy()
strategy.experimental_run_v2(step)
"""

NOTEBOOK = {
    "cells": [
        {"cell_type": "markdown", "source": ["tf.audio"]},
        {"cell_type": "code", "source": ["!pip install \\\n", "   tensorflow\n", "import tensorflow as tf"]},
        {"cell_type": "code", "source": ["%%bash\n", "not python"]},
        {"cell_type": "code", "source": ["%time\n", "if True:\n", "  !ls\n", "tf.audio.decode_wav"]},
    ]
}


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """The exit status and the output of the command, as JSON and as text, on the code above and on the good file."""
    folder = tmp_path_factory.mktemp("code")
    for name, text in {
        "good.py": GOOD,
        "bad.py": BAD,
        "broken.py": "def (",
        "book.ipynb": json.dumps(NOTEBOOK),
        "old_keras.py": OLD_KERAS,
        "dropped.py": DROPPED,
        "kept.py": KEPT,
        "other.py": OLD_KERAS.replace("import tensorflow as tf", "import torch as tf"),
    }.items():
        (folder / name).write_text(text)
    hidden = folder / ".hidden"
    hidden.mkdir()
    (hidden / "file.py").write_text(BAD)
    environment = {**os.environ, "KERAS_BACKEND": "jax"}

    def run(*arguments: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "replicax", "check-tf", *arguments]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
        assert not done.stderr, done.stderr
        return done.returncode, done.stdout

    return run("--json", "."), run("good.py")


@pytest.fixture(scope="module")
def found(checked):
    """The findings of each file: (line, name, status, text, caught)."""
    status, text = checked[0]
    assert status == 1
    content = json.loads(text)
    assert list(content["unreadable"]) == ["broken.py"]
    files = content["files"]
    keys = ("line", "name", "status", "text", "caught")
    return {Path(file).name: [tuple(each[key] for key in keys) for each in found] for file, found in files.items()}


def names(found, status, *, caught=False):
    return [(line, name) for line, name, given, _, is_caught in found if given == status and is_caught == caught]


def test_aliases_scopes_and_guards_are_followed(found):
    assert set(found) == {"good.py", "bad.py", "book.ipynb", "old_keras.py", "dropped.py", "kept.py"}
    good = found["good.py"]
    assert names(good, "missing") == [] and names(good, "differs") == []
    assert names(good, "missing", caught=True) == [("23", "nosuch"), ("27", "quux"), ("28", "quux")]
    used = dict.fromkeys(name for _, name in names(good, "runs"))
    wanted = ["keras.layers", "data", "keras.backend", "keras.backend.mean", "keras.layers.Dense", "keras.Model"]
    assert list(used) == [*wanted, "float32.as_numpy_dtype", "reshape", "data.Dataset.range"]


def test_what_is_missing_is_found_with_what_stands_for_it(found):
    bad = found["bad.py"]
    assert names(bad, "missing") == [
        ("3", "tensorflow_hub"),
        ("4", "tensorflow_datasets"),
        ("8", "nn.ctc_beam_search_decoder"),
        ("10", "reshape"),
        ("11", "nn.ctc_beam_search_decoder"),
        ("12", "data.Dataset.nosuch"),
        ("13", "core.protobuf.config_pb2.GraphDef"),
        ("15", "python.framework.ops.RegisterNothing"),
        ("16", "keras.layers.Nosuch"),
        ("17", "audio"),
        ("17", "audio.decode_wav"),
    ]
    texts = {name: text for _, name, status, text, _ in bad if status == "missing"}
    assert texts["reshape"] == "It has no argument 'nosuch'" and "pyctcdecode" in texts["nn.ctc_beam_search_decoder"]
    assert "librosa" in texts["audio"]
    assert "Keras 3" in texts["keras.layers.Nosuch"] and "data_source" in texts["tensorflow_datasets"]
    assert names(bad, "differs") == [("18", "random.normal")]


def test_members_that_keras_3_lacks_are_found_by_their_names(found):
    old = found["old_keras.py"]
    assert names(old, "missing") == [
        ("6", "keras.optimizers.Adam"),
        *[(line, "minimize") for line in ("7", "8", "9")],
        *[(line, "lr") for line in ("11", "12")],
        ("13", "_decayed_lr"),
        ("14", "reset_states"),
        *[("15", name) for name in ("get_scaled_loss", "get_unscaled_gradients")],
        ("19", "experimental_autocast"),
        ("23", "add_weight"),
        ("27", "distribute_reduction_method"),
        *[("29", ".index")] * 3,
    ]
    assert names(old, "missing", caught=True) == [("32", "compiled_loss")]
    texts = {name: text for _, name, status, text, _ in old if status == "missing"}
    assert "learning_rate" in texts["keras.optimizers.Adam"] and "GradientTape" in texts["minimize"]
    assert "tf.train.latest_checkpoint" in texts[".index"] and "name=..." in texts["add_weight"]


def test_names_and_arguments_that_keras_3_dropped_are_found_with_a_replacement(found):
    dropped = found["dropped.py"]
    assert names(dropped, "missing") == [
        ("5", "keras.optimizers.legacy.Adam"),
        ("7", "keras.layers.BatchNormalization"),
        ("8", "keras.layers.experimental.preprocessing.Rescaling"),
        ("9", "keras.experimental.CosineDecay"),
        *[("10", "ModelCheckpoint")] * 2,
        ("11", "compile(experimental_run_tf_function=)"),
        *[("12", f"fit({argument}=)") for argument in ("use_multiprocessing", "workers")],
        ("13", "train_on_batch(reset_metrics=)"),
        ("14", "apply_gradients(experimental_aggregate_gradients=)"),
        *[("15", name) for name in ("_create_slots", "get_updates")],
        *[("16", name) for name in ("load_weights", "save", "save_weights")],
        *[("17", name) for name in ("load_model", "save_model")],
        *[("18", name) for name in ("add_update", "output_shape", "predict_classes")],
        *[("22", f"add_weight({argument}=)") for argument in ("aggregation", "synchronization")],
        ("23", "add_metric"),
        *[("26", name) for name in ("load_model", "save")],
        ("27", "lr"),
        *[("28", name) for name in ("experimental_run_v2", "get_weights", "predict_proba")],
        ("29", "keras.optimizers.Adam"),
        ("30", "keras.layers.experimental.preprocessing.RandomFlip"),
        *[("31", name) for name in ("compat.v1.global_variables", "compat.v1.nn.rnn_cell.LSTMCell", "contrib.layers")],
    ]
    texts = {name: text for _, name, status, text, _ in dropped if status == "missing"}
    assert "'lr': write learning_rate. `decay` is ignored" in texts["keras.optimizers.Adam"]
    assert "Write tf.keras.layers.RandomFlip," in texts["keras.layers.experimental.preprocessing.RandomFlip"]
    assert "LSTMCell" in texts["compat.v1.nn.rnn_cell.LSTMCell"] and "no contrib" in texts["contrib.layers"]
    assert texts["compat.v1.global_variables"] == "Read model.variables"
    assert names(dropped, "differs") == [("6", "keras.optimizers.SGD")]
    assert all(text for _, _, status, text, _ in dropped if status != "runs")


def test_what_keras_3_still_has_is_no_finding(found):
    assert names(found["kept.py"], "missing") == [] and names(found["kept.py"], "differs") == [
        ("10", "saved_model.save")
    ]


def test_what_is_found_by_its_name_fails_indeed(run_tf):
    """A member that Keras gets again is to leave the table."""
    run_tf("""
from replicax.tf import _members
keras = tf.keras
optimizer = keras.mixed_precision.LossScaleOptimizer(keras.optimizers.Adam())
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile(optimizer, "mse")
layer = keras.layers.Dense(1)
objects = [optimizer, optimizer.inner_optimizer, keras.metrics.Mean(), layer]
assert len(_members._MEMBERS) > 10
for name in _members._MEMBERS:
    of_optimizers = name == "get_weights"  # layers and models keep it
    assert not any(hasattr(each, name) for each in (objects[:2] if of_optimizers else objects)), name
    assert of_optimizers or not hasattr(model, name) or name.endswith("put_shape"), name
optimizer.scale_loss, optimizer.learning_rate, keras.metrics.Mean().reset_state, model.reset_metrics
raises(ValueError, lambda: keras.optimizers.SGD(lr=0.1), "lr")
raises(ValueError, lambda: keras.layers.Layer().add_weight("w", shape=(2,)), "name")
raises(ValueError, lambda: keras.layers.Layer(experimental_autocast=False), "experimental_autocast")
raises(NotImplementedError, lambda: layer.add_metric(1), "add_metric")
raises(ValueError, lambda: layer.add_weight(name="w", shape=(2,), aggregation=tf.VariableAggregation.MEAN), "mean")
x = np.zeros((4, 2), "float32")
pairs = [(tf.constant([1.0]), keras.Variable([1.0]))]
arguments = {
    "fit": (x, x[:, :1]), "evaluate": (x, x[:, :1]), "predict": (x,), "compile": ("sgd", "mse"),
    "save_weights": ("w.weights.h5",),
    "train_on_batch": (x, x[:, :1]), "test_on_batch": (x, x[:, :1]), "apply_gradients": (pairs,), "add_weight": ((2,),),
    "save_model": (model, "folder"),
}
owners = {"apply_gradients": keras.optimizers.SGD(), "add_weight": layer, "save_model": keras.models}
for entry in _members._CALLS:
    method, argument = entry.removesuffix("=)").split("(")
    function = getattr(owners.get(method, model), method)
    raises((TypeError, ValueError), lambda: function(*arguments[method], **{argument: "tf"}))
for name in _members.NAMES:
    try:
        value = __import__("functools").reduce(getattr, name.split(".")[1:], keras)
        assert name == "keras.optimizers.legacy", name
    except AttributeError:
        pass
raises(ImportError, lambda: keras.optimizers.legacy.Adam(0.1), "legacy")
for kind, argument in [(keras.optimizers.SGD, "gradient_transformers"), (keras.layers.BatchNormalization, "fused"),
                       (keras.layers.BatchNormalization, "virtual_batch_size"), (keras.layers.ReLU, "weights"),
                       (keras.layers.ReLU, "dynamic"), (keras.initializers.Ones, "dtype")]:
    raises((TypeError, ValueError), lambda: kind(**{argument: "float32"}))
for call, argument in [(model.save, "folder"), (model.save_weights, "w"), (model.load_weights, "w"),
                       (keras.models.load_model, "folder"), (keras.callbacks.ModelCheckpoint, "w")]:
    raises(ValueError, lambda: call(argument))
keras.layers.Layer(autocast=False).add_weight(name="w", shape=(2,))
folder = tempfile.mkdtemp()
path = tf.train.Checkpoint(v=tf.Variable(1.0)).save(folder + "/ckpt")
assert not os.path.exists(path + ".index") and tf.train.latest_checkpoint(folder) == path
""")


def test_cells_of_a_notebook_are_one_program(found):
    assert found["book.ipynb"] == [("3:4", "audio.decode_wav", "missing", found["book.ipynb"][0][3], False)]


def test_the_exit_status_is_zero_where_everything_is_there(checked):
    status, text = checked[1]
    assert status == 0 and text.endswith("0 run and differ, 0 are missing.\n")
    assert "nosuch, line 23: missing, which the code expects" in text
