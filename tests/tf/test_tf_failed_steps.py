"""Callbacks of a compiled step that fail, over several devices."""

from __future__ import annotations

TENSORFLOW = """
import numpy as np
import replicax.tf as tf

strategy = tf.distribute.MirroredStrategy(["GPU:0", "GPU:1"])
with strategy.scope():
    v = tf.Variable(tf.ones([3]))
    generator = tf.random.Generator.from_seed(1)
one = tf.TensorSpec((), tf.float32)

def boom(x):
    raise KeyError("record 57")

class Closed:
    def write(self, text):
        raise BrokenPipeError("nobody reads")

cases = {
    "py_function": lambda x: tf.py_function(boom, [x], Tout=one),
    "numpy_function": lambda x: tf.numpy_function(boom, [x], Tout=one),
    "shape": lambda x: tf.py_function(lambda x: np.ones(3), [x], Tout=one),
    "stop": lambda x: tf.py_function(lambda x: next(iter(())), [x], Tout=one),
    "assert_less": lambda x: (tf.debugging.assert_less(x, 0.0), x)[1],
    "check_numerics": lambda x: tf.debugging.check_numerics(x / 0.0, "loss"),
    "assert": None,
    "print": lambda x: (tf.print(x, output_stream=Closed()), x)[1],
}
for name, call in cases.items():

    @tf.function
    def step(x):
        def replica(x):
            y = x + 0.0
            if call is None:
                assert y < 0, "negative"
            else:
                y = call(y)
            total = tf.distribute.get_replica_context().all_reduce("SUM", y)
            v.assign_add(tf.ones([3]) * total)
            return generator.normal([]) + y

        return strategy.reduce("SUM", strategy.run(replica, args=(x,)), axis=None)

    state = np.asarray(generator.state)
    for _ in range(2):
        try:
            step(tf.constant(1.0))
        except Exception as error:
            kept = (np.asarray(generator.state) == state).all()
            print(name, type(error).__name__, str(error).splitlines()[0], v.numpy().tolist(), kept, sep="|")
"""


def test_every_callback_of_tensorflows_names_raises_from_its_own_step_over_several_devices(run_python):
    """Facts of callbacks in a program whose replicas meet: none of them waits for the one whose callback raised."""
    done = run_python(TENSORFLOW, timeout=240.0)
    assert done.returncode == 0, done.stderr
    lines = [line.split("|") for line in done.stdout.splitlines()]
    found = {name: (kind, text) for name, kind, text, _, _ in lines}
    assert len(lines) == 2 * len(found)
    assert found == {
        "py_function": ("KeyError", "'record 57'"),
        "numpy_function": ("KeyError", "'record 57'"),
        "shape": ("ValueError", "cannot reshape array of size 3 into shape ()"),
        "stop": ("RuntimeError", "A function that the compiled step calls back raised StopIteration."),
        "assert_less": ("InvalidArgumentError", "Condition x < y did not hold. x = [1.0], y = [0.0]"),
        "check_numerics": ("InvalidArgumentError", "loss : Tensor had Inf values"),
        "assert": ("AssertionError", found["assert"][1]),
        "print": ("BrokenPipeError", "nobody reads"),
    }
    assert found["assert"][1].endswith("negative")
    assert [line[3:] for line in lines[:-2]] == [["[1.0, 1.0, 1.0]", "True"]] * (len(lines) - 2)
    # Where nothing but a print fails, the step is done.
    assert [line[3] for line in lines[-2:]] == ["[3.0, 3.0, 3.0]", "[5.0, 5.0, 5.0]"]
    assert "Assertion failed" not in done.stderr
