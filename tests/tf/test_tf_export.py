"""`replicax export` of models that are saved under `replicax.tf`, run by TensorFlow."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np

from replicax._export import command

_SAVE = """
import jax, jax.numpy as jnp
from flax import nnx
import replicax as rx
from pathlib import Path
from replicax._export import request

folder = {folder!r} + "/"
x = np.linspace(-1, 1, 20, dtype=np.float32).reshape(5, 4)
expected = {{}}

class TwoSignatures(tf.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.calls = tf.Variable([1.0, 2.0, 3.0, 4.0]), tf.Variable(0, trainable=False)
        self.offsets = {{"half": [tf.Variable(0.5, dtype=tf.bfloat16)]}}
        self.random = tf.random.Generator.from_seed(3)

    @tf.function(input_signature=[tf.TensorSpec([None, 4], name="x")])
    def scale(self, x):
        self.calls.assign_add(1)
        return {{"scaled": x * self.weight + tf.cast(self.offsets["half"][0], tf.float32), "calls": self.calls + 0}}

    @tf.function(input_signature=[tf.TensorSpec([None, 4], name="x"), tf.TensorSpec([], name="scale:0")])
    def noise(self, x, scale):
        return x + scale * self.random.normal([4])

    @tf.function
    def shift(self, x, negative=False):
        return [-x if negative else x, tf.reduce_sum(x)]

two = TwoSignatures()
expected["shift"], expected["negative"] = two.shift(x[0])[0], two.shift(x[:2], negative=True)[0]
tf.saved_model.save(two, folder + "two", {{"serving_default": two.scale, "noise": two.noise}})
expected["two"] = np.concatenate([two.scale(x[:rows])["scaled"] for rows in (1, 2, 5)])
expected["calls"], expected["noise"] = two.calls.numpy(), [two.noise(x[:1], 2.0), two.noise(x[:1], 2.0)]

layers = [tf.keras.layers.Dense(8, "relu"), tf.keras.layers.BatchNormalization(), tf.keras.layers.Dropout(0.5)]
keras = tf.keras.Sequential([tf.keras.Input((4,)), *layers, tf.keras.layers.Dense(3)])
keras.export(folder + "keras", verbose=False)
expected["keras"] = np.concatenate([keras(x[:rows]) for rows in (1, 2, 5)])

class Network(nnx.Module):
    def __init__(self, rngs):
        self.hidden, self.out = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 2, rngs=rngs)
        self.norm, self.dropout = nnx.BatchNorm(8, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(nnx.relu(self.norm(self.hidden(x)))))

with tf.distribute.MirroredStrategy().scope():
    network = Network(nnx.Rngs(0))
served = nnx.view(network, deterministic=True, use_running_average=True)
spec = rx.TensorSpec([None, 4], name="x")
rx.experimental.save_model(folder + "nnx", lambda model, x: model(x), served, spec)
expected["nnx"] = np.concatenate([served(x[:rows]) for rows in (1, 2, 5)])

class Eigenvalues(tf.Module):
    @tf.function(input_signature=[tf.TensorSpec([3, 3])])
    def __call__(self, x):
        return jnp.linalg.eigvalsh(x)

tf.saved_model.save(Eigenvalues(), folder + "eigenvalues")
for name in ("keras", "nnx", "eigenvalues"):
    Path(folder, name + "-request").mkdir()
    request.write(folder + name, Path(folder, name + "-request"))
np.savez(folder + "expected.npz", x=x, **expected)
"""


_LOAD = """
import json, sys
from pathlib import Path
import numpy as np
import tensorflow as tf

folder, scripts = Path(sys.argv[1]), sys.argv[2]
sys.path.insert(0, scripts)
import to_tensorflow

results = {}
for name in ("keras", "nnx", "eigenvalues"):
    request = folder / f"{name}-request" / "request.json"
    to_tensorflow.main(request, str(folder / f"{name}-out"))
    results[name] = json.loads(request.with_suffix(".result").read_text())
x = np.load(folder / "expected.npz")["x"]
outputs = {}
for name, key in (("two", "scaled"), ("keras", "output_0"), ("nnx", "output_0")):
    signature = tf.saved_model.load(str(folder / f"{name}-out")).signatures["serving_default"]
    argument, = signature.structured_input_signature[1]
    outputs[name] = np.concatenate([signature(**{argument: tf.constant(x[:rows])})[key] for rows in (1, 2, 5)])
two = tf.saved_model.load(str(folder / "two-out"))
noise = [two.signatures["noise"](x=tf.constant(x[:1]), scale_0=tf.constant(2.0))["output_0"] for _ in range(2)]
outputs.update(noise=noise, shift=two.shift(x[0])[0], negative=two.shift(x[:2], negative=True)[0])
for rows in (1, 2, 5):
    calls = two.scale(tf.constant(x[:rows]))["calls"]
outputs.update(calls=calls, variable=two.calls)
np.savez(folder / "outputs.npz", **outputs)
variables = [two.weight.shape.as_list(), two.offsets["half"][0].dtype.name, len(tf.saved_model.load(
    str(folder / "keras-out")).trainable_variables)]
converter = tf.lite.TFLiteConverter.from_saved_model(str(folder / "nnx-out"))
interpreter = tf.lite.Interpreter(model_content=converter.convert())
lite = interpreter.get_signature_runner("serving_default")(x=x)["output_0"]
results |= {"variables": variables, "lite": np.asarray(lite).tolist()}
(folder / "results.json").write_text(json.dumps(results))
"""


def test_tensorflow_runs_the_converted_models_with_the_same_results(
    tensorflow_python, run_tf, tmp_path, capsys, monkeypatch
):
    run_tf(_SAVE.format(folder=str(tmp_path)), timeout=230)
    monkeypatch.delenv("REPLICAX_TENSORFLOW_PYTHON")
    options = ["--to", "tensorflow", "--python", tensorflow_python]
    assert command.main([str(tmp_path / "two"), str(tmp_path / "two-out"), *options], "replicax export") == 0
    assert f"{tmp_path / 'two-out'} is a SavedModel of TensorFlow" in capsys.readouterr().out
    loading = [tensorflow_python, "-c", _LOAD, str(tmp_path), str(Path(command.__file__).parent)]
    loaded = subprocess.run(loading, capture_output=True, text=True, timeout=230, check=False)
    assert loaded.returncode == 0, loaded.stderr[-4000:]
    with np.load(tmp_path / "expected.npz") as file, np.load(tmp_path / "outputs.npz") as other:
        expected, outputs = dict(file), dict(other)
    for name in ("two", "keras", "nnx", "noise", "shift", "negative"):
        np.testing.assert_allclose(outputs[name], expected[name], rtol=1e-5, atol=1e-6, err_msg=name)
    assert outputs["calls"] == outputs["variable"] == expected["calls"] == 3
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert results["keras"] == results["nnx"] == {"notes": []}
    assert results["variables"] == [[4], "bfloat16", 6]
    np.testing.assert_allclose(results["lite"], expected["nnx"][3:], rtol=1e-4, atol=1e-5)
    refused = results["eigenvalues"]["error"]
    assert refused.startswith("__call__ cannot be converted: TensorFlow 2.") and "lapack" in refused
