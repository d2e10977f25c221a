"""The same programs with `if`, `while` and `for` on tensors under TensorFlow and under `replicax.tf`."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import programs
import pytest
from recorded import from_tensorflow


def test_the_library_is_imported_for_converted_functions_alone():
    program = textwrap.dedent("""
        import sys
        import replicax.tf as tf
        tf.function(lambda x: x, autograph=False)(tf.constant(1.))
        assert "malt" not in sys.modules
        tf.function(lambda x: x)(tf.constant(1.))
        assert "malt" in sys.modules
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


PROGRAMS = """
v = tf.Variable(1.)

def helper(x):
    if x > 1:
        return x * 10
    return x

def branches():
    @tf.function
    def f(x):
        if x > 0:
            v.assign_add(x)
            n = 1
        else:
            v.assign(helper(-x))
            n = 2
        return v * 2, n, x > 0 and x < 2, x > 5 or x < 0, -2 < x < 2, (x if x > 0 else -x)
    v.assign(1.)
    return [f(tf.constant(x)) for x in (1., -1., 3., -4.)], v, count(f)

def loops():
    @tf.function
    def f(xs, n):
        for x in xs:
            if x < 0: continue
            if x > 5: break
            v.assign_add(x)
        while v < 50.:
            v.assign(v * 2.)
        total = 0
        for i in tf.range(n):
            for j in range(i):
                if j == 3: break
                total += i * j
        for i in tf.range(2, 8, 3):
            last = i * 2
        state = (v * 1., [total])
        for _ in tf.range(2):
            state = (state[0] + 1., [state[1][0] * 2])
        return state, last, int(xs[0]), float(total), len(xs)
    v.assign(0.)
    return [f(tf.constant([1., -2., 3., 9., 4.]), tf.constant(n)) for n in (0, 6)], v, count(f)

def gradients():
    @tf.function
    def f(x, xs):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = v * v * x if x > 0 else v * 1.
            z = y
            for e in xs:
                if e > 10: break
                z = z * e * v
        with tf.GradientTape() as other:
            other.watch(x)
            u = helper(x)
        return tape.gradient(y, v), tape.gradient(z, [v, x]), other.gradient(u, x)
    v.assign(3.)
    return [f(tf.constant(x), tf.constant([2., 5., 20.])) for x in (2., -2.)]

def gradients_of_while():
    @tf.function
    def f(x, n):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = x
            while y < 100.:
                y = y * y * v
            z = x
            for i in tf.range(n):
                z = z * v
        return y, tape.gradient(y, [x, v]), tape.gradient(z, [x, v])
    v.assign(1.5)
    return [f(tf.constant(x), tf.constant(n)) for x, n in ((2., 3), (200., 0))]

def gradients_of_variables_assigned_on_the_way():
    @tf.function
    def f(x, n):
        v.assign(2.)
        with tf.GradientTape() as tape:
            total = v * 1.
            for i in tf.range(n):
                v.assign(v * x)
                total += v * v
                if x > 0:
                    v.assign_add(1.)
                    total += v
        return total, tape.gradient(total, v), v.read_value()
    return f(tf.constant(3.), tf.constant(3)), f(tf.constant(3.), 2), f(tf.constant(-1.), 2)

def replicas():
    s = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with s.scope():
        on_read = tf.Variable(0., synchronization=tf.VariableSynchronization.ON_READ,
                              aggregation=tf.VariableAggregation.SUM)
    def fn():
        r = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)
        on_read.assign_add(helper(r + 1.))
        if r > 0:
            on_read.assign_add(100.)
        return r
    @tf.function
    def f(n):
        for _ in tf.range(n):
            s.run(fn)
        return on_read.read_value()
    return [f(tf.constant(n)) for n in (1, 3)], f(2)

def steps():
    s = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    it = iter(s.experimental_distribute_dataset(tf.data.Dataset.range(20).batch(2)))
    @tf.function
    def f(iterator, n):
        total = 0.
        for _ in tf.range(n):
            parts = s.run(lambda x: helper(tf.cast(tf.reduce_sum(x), tf.float32)), args=(next(iterator),))
            total += s.reduce("SUM", parts, axis=None)
        return total
    out = [f(it, 3), f(it, 3), f(it, tf.constant(2))]
    try:
        f(it, 3)
    except tf.errors.OutOfRangeError:
        out.append("the end")
    return out, count(f)

def an_epoch():
    s = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    d = s.experimental_distribute_dataset(tf.data.Dataset.range(9).batch(2))
    @tf.function
    def f(d):
        total = 0.
        for x in d:
            part = s.reduce("SUM", s.run(lambda x: tf.cast(tf.reduce_sum(x), tf.float32) * 1., args=(x,)), axis=None)
            if part > 10.:
                total += part
            else:
                total -= part
        return total
    return f(d)

def a_dataset():
    @tf.function
    def f(x):
        for e in tf.data.Dataset.range(4):
            if e > 0:
                x += tf.cast(e, tf.float32)
        return x
    return f(tf.constant(1.))

class Model(tf.Module):
    def __init__(self):
        self.w = tf.Variable(2.)
    @tf.function
    def __call__(self, x):
        if x > 0:
            return self.grow(x)
        return -x
    def grow(self, x):
        while x < 100.:
            x = x * self.w
        return x

def a_module():
    model = Model()
    return [model(tf.constant(x)) for x in (1., -3.)]

def randomness():
    @tf.function
    def f(n):
        different, last = True, -1.
        for _ in tf.range(n):
            x = tf.random.uniform(())
            different = different and x != last
            last = x
        return different, last
    first, second = f(tf.constant(5)), f(tf.constant(5))
    return first[0], second[0], bool(first[1] != second[1])

def cond_with_variables():
    @tf.function
    def f(x):
        tf.cond(x > 0, lambda: v.assign_add(x), lambda: v.assign(0.))
        return v.read_value()
    v.assign(1.)
    return [f(tf.constant(x)) for x in (2., -2.)]

def loops_and_cases_with_variables():
    @tf.function
    def f(n):
        def body(i, y):
            v.assign_add(1.)
            return i + 1, y * v if i < 2 else y
        with tf.GradientTape() as tape:
            total = tf.while_loop(lambda i, y: i < n, body, (tf.constant(0), tf.constant(1.)))[1] * v
        tf.switch_case(n - 2, [lambda: v.assign(7.), lambda: v.assign_sub(1.)])
        return total, tape.gradient(total, v), v.read_value()
    v.assign(2.)
    return [f(tf.constant(n)) for n in (0, 1, 2, 3)]

def elements_of_a_dataset():
    iterator = iter(tf.data.Dataset.range(7))
    @tf.function
    def f(iterator, n):
        total = tf.constant(0, tf.int64)
        for _ in tf.range(n):
            total += next(iterator)
        return total
    return [f(iterator, 3) for _ in range(2)]

def outside_of_the_function():
    seen = []
    @tf.function
    def f(x):
        with tf.init_scope():
            seen.append(v.read_value().numpy())
        return x * v
    v.assign(2.)
    return f(tf.constant(3.)), seen

@tf.autograph.experimental.do_not_convert
def as_it_is(x):
    return 2. * x

def unconverted():
    return tf.function(lambda x: as_it_is(x) if x > 0 else x)(tf.constant(2.))

def printing():
    @tf.function
    def f(x):
        if x > 0:
            tf.print("positive", output_stream=sys.stdout)
        else:
            tf.print("negative", output_stream=sys.stdout)
        return x
    @tf.function
    def structures(x):
        tf.print({"x": x, "more": [x > 0, (tf.range(8), "text")]}, x / 3, output_stream=sys.stdout)
    structures(tf.constant(1.))
    tf.print(tf.constant(["a"]), tf.range(7), tf.zeros([2, 2]), None, sep="|", summarize=2, output_stream=sys.stdout)
    return f(tf.constant(1.)), f(tf.constant(-1.))

def arrays_of_tensors():
    @tf.function
    def recurrent(x):
        x = tf.transpose(x, [1, 0, 2])
        steps = tf.shape(x)[0]
        states, state = tf.TensorArray(tf.float32, size=steps), tf.zeros([2, 3])
        for i in tf.range(steps):
            state = 0.5 * state + x[i]
            states = states.write(i, state)
        return tf.transpose(states.stack(), [1, 0, 2])
    x = tf.reshape(tf.range(24.), [2, 4, 3])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.reduce_sum(recurrent(x) ** 2)
    @tf.function
    def until(limit):
        found, i = tf.TensorArray(tf.float32, size=8, element_shape=[]), 0
        while tf.cast(i, tf.float32) * 1.5 < limit:
            found = found.write(i, tf.cast(i, tf.float32) * 1.5)
            i += 1
        return found.stack(), i
    @tf.function
    def unrolled(x):
        array = tf.TensorArray(tf.float32, size=0, dynamic_size=True)
        for i in range(3):
            array = array.write(i, x * i)
        return array.stack(), array.size(), array.read(1), array.gather([2, 0]), array.concat()
    eager = tf.TensorArray(tf.int32, 2, dynamic_size=True).unstack([[1, 2], [3, 4]]).write(3, [5, 6])
    def kind(f):
        try: f()
        except Exception as error: return type(error).__name__
    wrong = [lambda: tf.TensorArray(tf.int32, 2).write(2, 1), lambda: tf.TensorArray(tf.int32, 2).write(0, 1.5),
             lambda: tf.TensorArray(tf.int32, 2).write(0, 1).write(1, [1])]
    return [recurrent(x), tape.gradient(y, x), until(tf.constant(4.)), unrolled(tf.constant([1., 2.])), eager.stack(),
            eager.size(), tf.TensorArray(tf.float32, 2).split(tf.range(4.), [2, 2]).stack(), [kind(f) for f in wrong]]

def refused():
    def missing(x):
        if x > 0: y = x
        return y
    def dtypes(x):
        if x > 0: y = 1
        else: y = 2.
        return y
    def shapes(x):
        y = tf.zeros(2)
        for i in tf.range(3): y = tf.concat([y, y], 0)
        return y
    def none(x):
        if x > 0: y = None
        else: y = x
        return y
    def returns(x):
        if x > 0: return x
    def vector(x):
        if tf.stack([x, x]) > 0: return x
        return -x
    def unread(x):
        for i in tf.range(int(x)): y = y + i
        return y
    def kind(f):
        try: tf.function(f)(tf.constant(1.))
        except Exception as error: return [type(error).__name__, [k for k in ("'y' has dtype", "'y' has shape (2,)",
            "'y' must also be initialized in the else branch", "'y' is None at the end of the main branch",
            "must also have a return statement", "'y' must be defined before the loop") if k in str(error)]]
    return [kind(f) for f in (missing, dtypes, shapes, none, returns, vector, unread)]
"""


RUNNER = """
import importlib, json, sys
import numpy as np
tf = importlib.import_module(sys.argv[1])
sys.modules["tensorflow"] = tf
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2)
import programs

def plain(x):
    if x is None:
        return None
    if isinstance(x, (list, tuple)):
        return [plain(v) for v in x]
    return np.asarray(x.numpy() if hasattr(x, "numpy") else x).tolist()

results = {name: plain(getattr(programs, name)()) for name in sys.argv[2:]}
print(json.dumps(results))
"""


NAMES = [line[4:-3] for line in PROGRAMS.splitlines() if line.startswith("def ") and line.endswith("():")]


@pytest.fixture(scope="module")
def results_of(tmp_path_factory):
    """`results_of(python, module)`: what each program gives under TensorFlow or replicax, and what they print."""

    def run(python, module):
        folder = tmp_path_factory.mktemp("autograph")
        head = "import sys\nimport tensorflow as tf\ncount = lambda f: f.experimental_get_tracing_count()\n"
        (folder / "programs.py").write_text(head + PROGRAMS)
        (folder / "run.py").write_text(RUNNER)
        theirs = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
        done = programs.run_well(
            folder / "run.py",
            [module, *NAMES],
            folder=folder,
            timeout=220.0,
            env={"REPLICAX_VIRTUAL_DEVICES": None, **(theirs if module == "tensorflow" else {})},
            python=python,
            imports="replicax.tf",
        )
        *printed, last = done.stdout.splitlines()
        return {**json.loads(last), "what it prints": printed}

    return run


@pytest.fixture(scope="module")
def both(request, once, results_of):
    """What each program gives under TensorFlow, as it is recorded (see recorded.py), and under replicax."""

    def live(names):
        found = results_of(request.getfixturevalue("tensorflow_python"), "tensorflow")
        return {name: found[name] for name in names}

    theirs = from_tensorflow("autograph", dict.fromkeys([*NAMES, "what it prints"], RUNNER + PROGRAMS), live)
    return theirs, once("autograph", lambda: results_of(sys.executable, "replicax.tf"))


@pytest.mark.parametrize("name", [*NAMES, "what it prints"])
def test_the_same_as_tensorflow(both, name):
    expected, got = (results[name] for results in both)
    assert got == expected
