"""Loads what save.py has saved, and writes what is in it: `python load.py MODULE FOLDER RESULT`."""

import importlib
import json
import pathlib
import sys

import numpy as np

tf = importlib.import_module(sys.argv[1])
folder = pathlib.Path(sys.argv[2])
results = {}


def plain(value):
    if isinstance(value, dict):
        return {key: plain(value[key]) for key in sorted(value)}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, (np.ndarray, np.generic)):
        return plain(value.tolist())
    if hasattr(value, "numpy"):
        return plain(np.asarray(value.numpy()).tolist())
    return value


def note(name, compute):
    try:
        results[name] = plain(compute())
    except Exception as error:
        results[name] = f"{type(error).__name__}: {' '.join(str(error).split()[:6])}"


loaded = tf.saved_model.load(str(folder / "model"))
ones, three = tf.ones([2]), tf.ones([3])
note("variables", lambda: [loaded.weight, loaded.count, loaded.inner.bias, loaded.layers[1], loaded.named["a"]])
note("trainable", lambda: [loaded.weight.trainable, loaded.count.trainable])
note("name", lambda: loaded.weight.name)
note("the same object twice", lambda: loaded.layers[2] is loaded.inner)
note("a dict keeps what is tracked", lambda: list(loaded.named))
note("attributes", lambda: [hasattr(loaded, name) for name in ("number", "text", "constant", "never", "serve")])
note("call", lambda: loaded(ones))
note("call with a list", lambda: loaded([1.0, 2.0])["y"])
note("call with an array", lambda: loaded(np.ones(2, np.float32))["y"])
note("call by name", lambda: loaded(x=three, scale=3.0)["y"])
note("training", lambda: [loaded(ones, training=True)["y"], loaded(ones, True)["y"], loaded.count])
note("another shape", lambda: loaded(tf.ones([4])))
note("another dtype", lambda: loaded(tf.ones([2], tf.int32)))
note("another value", lambda: loaded(ones, scale=3.0))
note("no argument", lambda: loaded())
note("never traced", lambda: loaded.never(1.0))
note("choose", lambda: [loaded.choose({"a": ones, "b": [ones * 3]}, how) for how in ("add", "mul")])
note("another structure", lambda: loaded.choose({"a": ones, "b": (ones,)}, "add"))
note("method of a child", lambda: loaded.inner.add(ones))
note("serve", lambda: [loaded.serve(tf.ones([n, 2])) for n in (1, 3)])
note("serve by name", lambda: loaded.serve(x=[[1.0, 2.0]]))
note("input signature", lambda: [list(spec.shape) for spec in loaded.serve.input_signature])
note("signatures", lambda: list(loaded.signatures))
signature = loaded.signatures["serving_default"]
note("call of the signature", lambda: signature(inputs=tf.ones([2, 2])))
note("signature's input", lambda: list(signature.structured_input_signature[1]["inputs"].shape))
note("signature's output", lambda: list(signature.structured_outputs["output_0"].shape))
note("signature without input", lambda: signature(x=tf.ones([2, 2])))
note("no such signature", lambda: loaded.signatures["other"])

with tf.GradientTape() as tape:
    y = loaded(ones)["y"] * loaded.inner.add(ones)
note("gradients", lambda: tape.gradient(y, [loaded.weight, loaded.inner.bias]))
loaded.weight.assign(10.0)
note("assigned", lambda: loaded(ones)["y"])
tf.saved_model.save(loaded, str(folder / "again"))
again = tf.saved_model.load(str(folder / "again"))
note("saved again", lambda: [again(ones)["y"], again.serve(tf.ones([3, 2])), list(again.signatures)])

other = tf.saved_model.load(str(folder / "other"))
several, pair = other.signatures["several"], other.signatures["pair"]
note("sizes", lambda: [several(x=tf.ones([n, 3]), rows=tf.range(n)[:2]) for n in (2, 3)])
note("a tuple is numbered", lambda: pair(z=tf.constant([1.0, 2.0])))
note("a loop", lambda: [other.loops(n) for n in (5, 100)])
note("random numbers", lambda: bool(np.all(other.random().numpy() != other.random().numpy())))
kept = other.get()
other.state.assign(5.0)
note("a variable that is returned", lambda: [kept, other.get(), isinstance(kept["state"], tf.Variable)])

asset = tf.saved_model.load(str(folder / "with_file")).words
note("asset", lambda: tf.io.read_file(asset.asset_path))
note("where it is", lambda: asset.asset_path.numpy().decode() == str(folder / "with_file" / "assets" / "words.txt"))

batches = tf.saved_model.load(str(folder / "batches"))
x, y = tf.constant([[1.0, 2.0], [3.0, 4.0], [0.0, 1.0]]), tf.constant([[1.0], [0.0], [2.0]])
note("steps of a saved step", lambda: [batches.step(x[:n], y[:n]) for n in (3, 2, 3)])
note("what they have assigned", lambda: [batches.weight, batches.speed])


@tf.function
def step(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((batches.predict(x) - y) ** 2)
    (gradient,) = tape.gradient(loss, [batches.weight])
    batches.weight.assign_sub(0.01 * gradient)
    return loss


note("training of what was loaded", lambda: [step(x, y), step(x, y), batches.weight])
note("nothing there", lambda: tf.saved_model.load(str(folder / "nowhere")))
note("contains", lambda: [tf.saved_model.contains_saved_model(str(folder / name)) for name in ("other", "nowhere")])
note("other tags", lambda: tf.saved_model.load(str(folder / "other"), tags="train"))
note("checkpoint", lambda: tf.train.list_variables(str(folder / "with_file" / "variables" / "variables"))[:1])
note(
    "values",
    lambda: tf.train.load_variable(
        str(folder / "model" / "variables" / "variables"), "weight/.ATTRIBUTES/VARIABLE_VALUE"
    ),
)

lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in results.items()]
pathlib.Path(sys.argv[3]).write_text("{\n" + ",\n".join(lines) + "\n}\n")
