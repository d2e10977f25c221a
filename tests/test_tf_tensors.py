"""Tensors of `replicax.tf` as libraries written for TensorFlow use them: dtypes, operators, arguments, errors.

What an expression gives stands in tests/tf_ops/cases.txt and is compared with TensorFlow by test_tf_ops.py; here is
what one expression does not show. `replicax.tf` changes JAX's arrays, so each program runs in a process of its own.
"""

from __future__ import annotations

import pytest

START = """
import copy, pickle, sys
import numpy as np
import replicax.tf as tf
def raises(kind, function, *words):
    try:
        function()
    except kind as error:
        assert all(word in str(error) for word in words), str(error)
    else:
        raise AssertionError(f"no {kind.__name__}")
"""


@pytest.fixture
def run(run_python):
    def run(program, timeout=120):
        done = run_python(START + program, timeout=timeout, env={"REPLICAX_VIRTUAL_DEVICES": "CPU:2"})
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    return run


def test_dtypes_are_numpys_objects_with_the_attributes_of_tensorflow(run_python):
    """And nothing of numpy's own is another than before."""
    done = run_python("""
import copy, pickle
import numpy as np
every = [np.dtype(c) for c in "?bhilqBHILQefdFDSUVOMm"] + [np.dtype([("a", "f4")]), np.dtype(">f4")]
own = {name: value for name, value in vars(np.dtype).items()}
said = [(repr(d), str(d), d.name, hash(d), pickle.dumps(d)) for d in every]
for d in every:
    assert not hasattr(d, "is_floating")  # looked up before, so that Python remembers that it is not there
import replicax.tf as tf
import jax, jax.numpy as jnp, ml_dtypes
assert all(vars(np.dtype)[name] is value for name, value in own.items())
assert said == [(repr(d), str(d), d.name, hash(d), pickle.dumps(d)) for d in every]
assert [d.is_floating for d in every[-2:]] == [False, True] and np.dtype("S3").is_numeric is False
assert np.dtype(ml_dtypes.bfloat16) is tf.bfloat16 and tf.bfloat16.is_floating

# One object, however a tensor came about, in code that JAX runs and in compiled code.
array = pickle.loads(pickle.dumps(np.ones(2, np.float32)))
assert array.dtype is not tf.float32  # numpy's way
tensor = tf.ones([2])
made = [array, copy.deepcopy(tensor), pickle.loads(pickle.dumps(tensor)), jnp.asarray(array), jax.device_put(array)]
seen = []
def look(x):
    seen.append(tf.convert_to_tensor(x).dtype is tf.float32 and x.dtype.is_floating and x.dtype.as_numpy_dtype)
    return x
for x in made:
    tf.function(look)(x), jax.jit(look)(x), jax.grad(lambda x: look(x).sum())(jnp.asarray(x)), tf.Variable(x)
    assert tf.Variable(x).dtype is tf.float32 and tf.TensorSpec.from_tensor(x).dtype is tf.float32
assert set(seen) == {np.float32}, seen
spec = pickle.loads(pickle.dumps(tf.TensorSpec([None], tf.int64)))
assert spec.dtype is tf.int64 and spec.dtype.is_integer
assert jnp.zeros(2, tf.bfloat16).astype(tf.int8).dtype is tf.int8 and np.zeros(2, tf.float16).dtype.size == 2
assert isinstance(tf.float32, tf.DType) and not isinstance("float32", tf.DType) and tf.DType(3) is tf.int32
assert isinstance(array.dtype, tf.DType) and issubclass(type(tf.bfloat16), tf.DType)
key = jax.random.key(0)  # of a dtype that numpy has not
assert key.dtype == jax.random.key(1).dtype and not isinstance(key.dtype, tf.DType)
""")
    assert done.returncode == 0, done.stderr
