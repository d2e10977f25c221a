"""Saves models: `python save.py MODULE FOLDER`, with `tensorflow` or `replicax.tf`. load.py says what is in them."""

import importlib
import pathlib
import sys

tf = importlib.import_module(sys.argv[1])
folder = pathlib.Path(sys.argv[2])
Spec = tf.TensorSpec


class Inner(tf.Module):
    def __init__(self):
        super().__init__()
        self.bias = tf.Variable([1.0, 2.0])

    @tf.function
    def add(self, x):
        return x + self.bias


class Model(tf.Module):
    def __init__(self):
        super().__init__()
        self.weight = tf.Variable(2.0, name="weight")
        self.count = tf.Variable(0, trainable=False)
        self.inner = Inner()
        self.layers = [Inner(), tf.Variable(3.0), self.inner]
        self.named = {"a": tf.Variable(4.0), "number": 5}
        self.number, self.text, self.constant = 3, "text", tf.constant(7.0)

    @tf.function
    def __call__(self, x, training=False, *, scale=1.0):
        if training:
            self.count.assign_add(1)
        return {"y": x * self.weight * scale, "rest": [x, (x, None)], "text": "abc"}

    @tf.function(input_signature=[Spec([None, 2], name="inputs")])
    def serve(self, x):
        return self.inner.add(x) * self.named["a"]

    @tf.function
    def choose(self, pair, how):
        return pair["a"] + pair["b"][0] if how == "add" else pair["a"] * pair["b"][0]

    @tf.function
    def never(self, x):
        return x


model = Model()
ones = tf.ones([2])
model(ones), model(ones, training=True), model(tf.ones([3]), scale=3.0)
model.inner.add(ones)
model.choose({"a": ones, "b": [ones]}, "add"), model.choose({"a": ones, "b": [ones]}, "mul")
tf.saved_model.save(model, str(folder / "model"))


@tf.function(input_signature=[Spec([None, None]), Spec([None], tf.int32)])
def several(x, rows):
    size = tf.shape(x)
    mean = tf.reduce_sum(x) / tf.cast(size[0] * size[1], tf.float32)
    return {"mean": mean, "rows": tf.gather(x, rows), "flat": tf.reshape(x, [size[0] * size[1]]), "size": size}


@tf.function
def pair(x):
    return x + 1.0, x * 2.0


other = tf.Module()
other.loops = tf.function(
    lambda n: tf.while_loop(lambda i: i < n, lambda i: i * 2, [1])[0], input_signature=[Spec([], tf.int32)]
)
other.random = tf.function(lambda: tf.random.uniform([3]), input_signature=[])
other.state = tf.Variable(4.0)
other.get = tf.function(lambda: {"state": other.state}, input_signature=[])
signatures = {"several": several, "pair": pair.get_concrete_function(Spec([None], name="z"))}
tf.saved_model.save(other, str(folder / "other"), signatures=signatures)

words = folder / "words.txt"
words.write_text("a\nb\n")
with_file = tf.Module()
with_file.words = tf.saved_model.Asset(str(words))
tf.saved_model.save(with_file, str(folder / "with_file"))
words.unlink()


class Batches(tf.Module):
    """A step of training, with the variables of an optimizer, in one function."""

    def __init__(self):
        super().__init__()
        self.weight = tf.Variable([[1.0], [2.0]])
        self.speed = tf.Variable(tf.zeros([2, 1]), trainable=False)

    @tf.function(input_signature=[Spec([None, 2])])
    def predict(self, x):
        return tf.nn.relu(x @ self.weight)

    @tf.function(input_signature=[Spec([None, 2]), Spec([None, 1])])
    def step(self, x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ self.weight - y) ** 2)
        (gradient,) = tape.gradient(loss, [self.weight])
        self.speed.assign(0.5 * self.speed + gradient)
        self.weight.assign_sub(0.1 * self.speed)
        return loss


tf.saved_model.save(Batches(), str(folder / "batches"))
