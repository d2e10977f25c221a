"""What `replicax.tf` does besides computing: files, summaries, assertions in compiled code, random numbers ...

`replicax.tf` changes how JAX's arrays print, so each test runs its program in a process of its own.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STRATEGY = '\nstrategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])\n'


@pytest.fixture
def run(run_tf):
    return lambda program: run_tf(STRATEGY + program)


def test_an_absent_name_says_what_to_use(run):
    run("""
raises(AttributeError, lambda: tf.saved_model.experimental.read_fingerprint, "read_fingerprint", "checksum")
raises(AttributeError, lambda: tf.audio.decode_wav, "'audio'", "librosa")
raises(AttributeError, lambda: tf.lite, "replicax export")
raises(AttributeError, lambda: tf.distribute.experimental.nosuch, "experimental.nosuch", "reference/tf-names")
raises(AttributeError, lambda: tf.nn.ctc_beam_search_decoder, "nn.ctc_beam_search_decoder", "pyctcdecode")
raises(AttributeError, lambda: tf.math.nosuch, "math.nosuch", "reference/tf-names")
raises(AttributeError, lambda: tf.io.gfile.nosuch, "io.gfile.nosuch")
raises(AttributeError, lambda: tf.compat.v1.placeholder, "no graphs")
raises(AttributeError, lambda: tf.data.experimental.service, "data.experimental.service")
raises(RuntimeError, tf.compat.v1.disable_eager_execution, "disable_eager_execution", "@tf.function")
tf.compat.v1.enable_eager_execution()
assert not hasattr(tf, "hub") and tf.data.AUTOTUNE == tf.data.experimental.AUTOTUNE == -1
""")


def test_the_page_of_names_is_up_to_date():
    command = [sys.executable, str(ROOT / "scripts" / "tf_names.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_importing_costs_less_than_half_of_importing_jax(run_python):
    """In modules, since times differ from run to run: neither tensorboardX nor fsspec nor all of JAX's libraries."""
    done = run_python("""
import sys
import jax, jax.numpy, jax.nn
before = set(sys.modules)
import replicax.tf
new = {name for name in set(sys.modules) - before if not name.startswith("replicax")}
assert not {"tensorboardX", "fsspec", "google"} & {name.split(".")[0] for name in new}, new
assert len(new) < len(before) / 2, sorted(new)
""")
    assert done.returncode == 0, done.stderr


def test_a_device_that_is_not_there_is_replaced_where_tensorflow_does_so(run):
    run("""
with tf.device("/device:GPU:7"):
    assert float(tf.ones([]) + 1) == 2
tf.config.set_soft_device_placement(False)
raises(ValueError, lambda: tf.device("/device:GPU:7"), "no device GPU:7")
""")


def test_strings_and_functions_of_python(run):
    done = run("""
word = tf.constant("abc")
assert word.numpy() == b"abc" and word == "abc" and word != "b"
assert str(word) == "tf.Tensor(b'abc', shape=(), dtype=string)"
assert [w.numpy() for w in tf.constant(["a", "b"])] == [b"a", b"b"]
assert tf.constant(["a", "b"])[1].numpy() == b"b"
paths = tf.data.Dataset.from_tensor_slices(["cats/1.jpg", "dogs/2.jpg"])
def labelled(path):
    parts = tf.strings.split(path, "/")
    return tf.cast(parts[0] == "dogs", tf.int32), parts[-1]
assert [(int(a), b.numpy().decode()) for a, b in paths.map(labelled)] == [(0, "1.jpg"), (1, "2.jpg")]
assert isinstance(tf.strings.split(["a b", "c"]), tf.RaggedTensor)
raises(TypeError, lambda: tf.maximum("a", "b"), "strings")

calls = []
def seen(x):
    calls.append(x.numpy())
    return x * 2
@tf.function
def compiled(x):
    (y,) = tf.py_function(seen, [x], [tf.TensorSpec([2], tf.float32)])
    y.set_shape(x.shape)
    return y + 1
@tf.function
def without_shapes(x):
    return tf.numpy_function(lambda a: a * 2, [x], tf.float32)
for i in range(2):
    assert np.array_equal(compiled(tf.constant([1.0, i])), [3, 2 * i + 1]) and len(calls) == i + 1
    assert np.array_equal(without_shapes(tf.constant([1.0, i])), [2, 2 * i])
@tf.py_function(Tout=tf.float32)
def decorated(x):
    return x.numpy() + 1
assert float(decorated(tf.constant(1.0))) == 2
raises(ValueError, lambda: tf.py_function(lambda: (1, 2), [], [tf.int32]), "returned 2")
""")
    assert "driven from the host" in done.stderr


def test_files_of_any_filesystem(run):
    pytest.importorskip("fsspec")
    run("""
g = tf.io.gfile
os.chdir(tempfile.mkdtemp())
for root in (os.path.join(os.getcwd(), "here"), "relative", "memory://there"):
    g.makedirs(g.join(root, "a", "b"))
    g.makedirs(g.join(root, "a", "b"))
    g.mkdir(g.join(root, "a", "b"))  # nothing happens where the folder exists
    with g.GFile(g.join(root, "a", "f.txt"), "w") as f:
        f.write("one\\ntwo\\n")
    with g.GFile(g.join(root, "a", "f.txt")) as f:
        assert f.readline() == "one\\n" and f.read() == "two\\n"
    with g.GFile(g.join(root, "a", "f.txt")) as f:
        assert list(f) == ["one\\n", "two\\n"] and f.size() == 8
    assert g.GFile(g.join(root, "a", "f.txt"), "rb").read(3) == b"one"
    assert tf.io.read_file(g.join(root, "a", "f.txt")).numpy() == b"one\\ntwo\\n"
    assert tf.io.matching_files(g.join(root, "a", "*.txt")).numpy().tolist() == [g.join(root, "a", "f.txt").encode()]
    assert g.exists(g.join(root, "a", "f.txt")) and g.isdir(g.join(root, "a"))
    assert not g.isdir(g.join(root, "a", "f.txt")) and not g.exists(g.join(root, "nosuch"))
    assert sorted(g.listdir(g.join(root, "a"))) == ["b", "f.txt"]
    assert g.glob(g.join(root, "*", "*.txt")) == [g.join(root, "a", "f.txt")], g.glob(g.join(root, "*", "*.txt"))
    assert g.stat(g.join(root, "a", "f.txt")).length == 8
    g.copy(g.join(root, "a", "f.txt"), g.join(root, "c.txt"))
    raises(tf.errors.AlreadyExistsError, lambda: g.copy(g.join(root, "a", "f.txt"), g.join(root, "c.txt")), "overwrite")
    g.rename(g.join(root, "c.txt"), g.join(root, "d.txt"))
    assert not g.exists(g.join(root, "c.txt")) and g.GFile(g.join(root, "d.txt")).read() == "one\\ntwo\\n"
    tops = [(g.join(top, ""), folders, files) for top, folders, files in g.walk(root)]
    assert (tops[0][1], tops[0][2]) == (["a"], ["d.txt"]) and len(tops) == 3, tops
    g.remove(g.join(root, "d.txt"))
    raises(tf.errors.NotFoundError, lambda: g.remove(g.join(root, "d.txt")), "d.txt")
    raises(FileNotFoundError, lambda: g.GFile(g.join(root, "nosuch")).read(), "nosuch")
    raises(tf.errors.NotFoundError, lambda: g.listdir(g.join(root, "nosuch")))
    raises(tf.errors.NotFoundError, lambda: g.stat(g.join(root, "nosuch")))
    g.rmtree(root)
    assert not g.exists(root)
for name in ("a.txt", "b.txt", "d/e/c.txt"):  # names begin as the argument does, as in TensorFlow 2.21
    tf.io.write_file(name, b"")
for pattern, found in {
    "*.txt": ["./a.txt", "./b.txt"], "./*.txt": ["./a.txt", "./b.txt"], "d/../*.txt": ["d/../a.txt", "d/../b.txt"],
    "[a]*": ["./a.txt"], "*/*/c.txt": ["./d/e/c.txt"], "d/*/c.txt": ["d/e/c.txt"], "a.txt": ["a.txt"], "d/": ["d/"],
}.items():
    assert g.glob(pattern) == found, (pattern, g.glob(pattern))
    if pattern != "d/":
        listed = tf.data.Dataset.list_files(pattern, shuffle=False)
        assert [name.decode() for name in listed.as_numpy_iterator()] == found, pattern
for top, found in {
    ".": [".", "./d", "./d/e"], "d/": ["d/", "d/e"], "./d": ["./d", "./d/e"], "d/../d": ["d/../d", "d/../d/e"]
}.items():
    assert [folder for folder, _, _ in g.walk(top)] == found, top
assert g.glob("nosuch") == g.glob("nosuch*") == []
g.makedirs("memory://there/a")
assert g.glob("memory://*") == ["memory://there"] and [f for f, _, _ in g.walk("memory://there")][1] == "memory://there/a"
tf.io.write_file("x/y.bin", b"ab")
assert tf.io.read_file("x/y.bin").item() == b"ab" and tf.io.matching_files("x/*").tolist() == [b"x/y.bin"]
""")


def test_summaries_of_compiled_code_and_replicas(run):
    pytest.importorskip("tensorboardX")
    run("""
import struct
from tensorboardX.proto import event_pb2
folder = tempfile.mkdtemp()
writer = tf.summary.create_file_writer(folder)
step = tf.Variable(7, dtype=tf.int64)
assert tf.summary.scalar("nowhere", 1.0, step=0) is False

@tf.function
def compiled(x):
    tf.summary.scalar("total", tf.reduce_sum(x), step=step)
    with tf.summary.record_if(step > 7):
        tf.summary.scalar("sometimes", 5.0, step=step)
    return x

def replica(x):
    tf.summary.scalar("replica", x + tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32))

with writer.as_default(step=3):
    assert tf.summary.scalar("eager", 1.5) and tf.summary.experimental.get_step() == 3
    compiled(tf.constant([1.0, 2.0])); step.assign(8); compiled(tf.constant([3.0, 4.0]))
    strategy.run(replica, args=(tf.constant(10.0),))
    tf.function(lambda: strategy.run(replica, args=(tf.constant(20.0),)))()
    with tf.name_scope("scope"):
        tf.summary.histogram("h", [1.0, 2.0])
    tf.summary.image("picture", np.zeros([2, 4, 4, 3], np.float32), max_outputs=1)
    tf.summary.text("words", "hello")
    with tf.summary.record_if(False):
        assert not tf.summary.scalar("never", 1.0)
    raises(ValueError, lambda: tf.summary.scalar("vector", [1.0, 2.0]), "scalar")
with writer.as_default():
    raises(ValueError, lambda: tf.summary.scalar("stepless", 1.0), "No step set")
writer.close()
with tf.summary.create_noop_writer().as_default(step=1):
    tf.summary.scalar("nothing", 1.0)

(name,) = os.listdir(folder)
data, found = open(os.path.join(folder, name), "rb").read(), []
while data:
    (length,) = struct.unpack("<Q", data[:8])
    event = event_pb2.Event.FromString(data[12 : 12 + length])
    found += [(v.tag, event.step, v.simple_value) for v in event.summary.value]
    data = data[16 + length :]
scalars = sorted(row for row in found if row[2])
assert scalars == [("eager", 3, 1.5), ("replica", 3, 10.0), ("replica", 3, 20.0), ("sometimes", 8, 5.0),
                   ("total", 7, 3.0), ("total", 8, 7.0)], scalars
assert {row[0] for row in found} - {row[0] for row in scalars} == {"scope/h", "picture", "words/text_summary"}, found
""")


def test_assertions_in_compiled_code_are_raised_by_the_call(run):
    done = run("""
@tf.function
def f(x):
    tf.debugging.assert_positive(x, message="losses are positive")
    tf.debugging.assert_rank(x, 1)
    return x * 2
assert f(tf.constant([1.0])).numpy() == [2.0]
raises(tf.errors.InvalidArgumentError, lambda: f(tf.constant([-1.0])), "losses are positive", "-1.0")
assert f(tf.constant([1.0])).numpy() == [2.0]  # it is raised once
raises(ValueError, lambda: f(tf.constant(1.0)), "rank 1")

def replica(x):
    tf.debugging.assert_less(x, 2.0)
    return x
parts = strategy.experimental_distribute_values_from_function(
    lambda c: tf.constant(float(c.replica_id_in_sync_group) + 1))
compiled = tf.function(lambda x: strategy.run(replica, args=(x,)))
raises(tf.errors.InvalidArgumentError, lambda: compiled(parts), "x < y")
raises(Exception, lambda: strategy.run(replica, args=(parts,)), "x < y")  # eagerly in the replica

import jax
of_jax = jax.jit(lambda x: (tf.debugging.assert_positive(x, message="losses are positive"), x)[1])
raises(tf.errors.InvalidArgumentError, lambda: of_jax(tf.constant(-1.0)).numpy(), "losses are positive")
""")
    assert "Assertion failed in compiled code: losses are positive" in done.stderr


def test_print_shows_tensors_and_structures_of_them(run):
    done = run("""
import sys
def shown(x):
    tf.print("in", [x, {"also": x + 1, "name": "b"}], (x[0], None), tf.Variable(2.0), output_stream=sys.stdout, sep="|")
x = tf.constant([0.1, 0.25, 1.0])
shown(x)
tf.function(lambda x: tf.print("in", [x, {"also": x + 1, "name": "b"}], (x[0], None), x[2] * 2,
                               output_stream=sys.stdout, sep="|"))(x)
tf.print(tf.reshape(tf.range(20), [2, 10]), tf.range(7), tf.constant([True, False]), output_stream=sys.stdout)
tf.print(tf.range(7), tf.constant(1 / 3, tf.float64), output_stream=sys.stdout, summarize=-1)
tf.print(tf.constant("c"), "c", tf.constant(["a", "b"]), tf.constant(1e7), tf.constant(123456.789), tf.zeros([0]),
         output_stream=sys.stdout)
print(tf.constant([[1, 2], [3, 4]]), tf.constant(1.5))
optimizer = tf.keras.optimizers.SGD()
optimizer.iterations.assign(1)
step = lambda: tf.print("step", optimizer.iterations, [optimizer.iterations, tf.Variable(2)], output_stream=sys.stdout)
step()
iterations = tf.function(lambda: tf.print("step", optimizer.iterations, output_stream=sys.stdout))
iterations()
""")
    # As TensorFlow 2.21 prints them.
    assert (
        done.stdout
        == """\
in|[[0.1 0.25 1], {'also': [1.1 1.25 2], 'name': 'b'}]|(0.1, None)|2
in|[[0.1 0.25 1], {'also': [1.1 1.25 2], 'name': 'b'}]|(0.1, None)|2
[[0 1 2 ... 7 8 9]
 [10 11 12 ... 17 18 19]] [0 1 2 ... 4 5 6] [1 0]
[0 1 2 3 4 5 6] 0.33333333333333331
"c" c ["a" "b"] 1e+07 123456.789 []
tf.Tensor(
[[1 2]
 [3 4]], shape=(2, 2), dtype=int32) tf.Tensor(1.5, shape=(), dtype=float32)
step 1 [1, 2]
step 1
"""
    )


def test_losses_are_over_the_global_batch(run):
    run("""
def replica(x):
    return (tf.nn.compute_average_loss(x), tf.nn.compute_average_loss(x, global_batch_size=10),
            tf.nn.scale_regularization_loss(tf.reduce_sum(x)))
parts = strategy.experimental_distribute_values_from_function(
    lambda c: tf.constant([1.0, 2.0, 3.0]) * float(c.replica_id_in_sync_group + 1))
for way in (lambda f: f, tf.function):
    results = way(lambda x: strategy.run(replica, args=(x,)))(parts)
    # 6 and 12 over a batch of 6, and of 10; halved for each of two replicas
    assert np.allclose([[float(p) for p in r.values] for r in results], [[1, 2], [0.6, 1.2], [3, 6]])
assert float(tf.nn.compute_average_loss(tf.constant([1.0, 2.0]))) == 1.5
with strategy.scope():
    raises(RuntimeError, lambda: tf.nn.compute_average_loss(tf.constant([1.0])), "in cross replica context")
    raises(RuntimeError, lambda: tf.nn.scale_regularization_loss(tf.constant([1.0])), "in cross replica context")
    assert float(tf.nn.compute_average_loss(tf.constant([1.0]), global_batch_size=4)) == 0.25
""")


@pytest.mark.numbers
def test_random_numbers(run):
    run("""
r = tf.random
for make, dtype, shape in [
    (lambda: r.normal([2, 3]), "float32", (2, 3)), (lambda: r.truncated_normal([2], dtype=tf.float64), "float64", (2,)),
    (lambda: r.uniform([4], 1, 5, tf.int32), "int32", (4,)), (lambda: r.gamma([2], [1.0, 2.0]), "float32", (2, 2)),
    (lambda: r.poisson([2], [3.0, 4.0, 5.0]), "float32", (2, 3)),
    (lambda: r.categorical([[0.0, -50.0]], 5), "int64", (1, 5)), (lambda: r.shuffle([1, 2, 3]), "int32", (3,)),
    (lambda: tf.random_normal_initializer(seed=1)([2]), "float32", (2,)),
    (lambda: tf.random_uniform_initializer()([2]), "float32", (2,)),
    (lambda: tf.nn.dropout(tf.ones([50]), 0.5, seed=4), "float32", (50,)),
]:
    tf.config.run_functions_eagerly(True)
    r.set_seed(5); compiled = tf.function(make); one = compiled(); two = compiled()
    tf.config.run_functions_eagerly(False)
    r.set_seed(5); again = compiled()
    assert (one.dtype.name, one.shape) == (dtype, shape)
    assert np.allclose(one, again, atol=1e-6), (one, again)  # the same stream, compiled or not
assert set(np.asarray(tf.nn.dropout(tf.ones([50]), 0.5)).tolist()) == {0.0, 2.0}
r.set_seed(1); first = r.normal([3]); assert not np.array_equal(first, r.normal([3]))
r.set_seed(1); assert np.array_equal(r.normal([3]), first)
assert not np.array_equal(r.normal([3], seed=7), r.normal([3], seed=7))  # a stream of its own
for make in (lambda s: r.stateless_normal([3], s), lambda s: r.stateless_uniform([3], s), lambda s: r.split(s),
             lambda s: r.stateless_truncated_normal([3], s), lambda s: r.stateless_gamma([3], s, 2.0),
             lambda s: r.stateless_poisson([3], s, 50.0), lambda s: r.stateless_binomial([9], s, 20.0, 0.5),
             lambda s: r.stateless_categorical([[0.0] * 99], 3, s), lambda s: r.fold_in(s, 3),
             lambda s: r.experimental.stateless_shuffle(np.arange(99), s),
             lambda s: tf.nn.experimental.stateless_dropout(tf.ones([50]), 0.5, s)):
    assert np.array_equal(make([1, 2]), make([1, 2])) and not np.array_equal(make([1, 2]), make([1, 3]))
g = r.Generator.from_seed(3)
state = g.state.numpy(); a = g.normal([2]); g.reset(state); assert np.array_equal(g.normal([2]), a)
g.reset_from_seed(3); assert np.array_equal(g.normal([2]), a); g.reset_from_seed(3); g.skip(1)
assert not np.array_equal(g.normal([2]), a) and g.make_seeds(2).shape == (2, 2)
saved = tf.train.Checkpoint(g=g).write(os.path.join(tempfile.mkdtemp(), "g")); a3 = g.normal([2])
tf.train.Checkpoint(g=g).restore(saved); assert np.array_equal(g.normal([2]), a3)
wide = r.normal([20000], 1.0, 2.0, tf.float64)
assert wide.dtype == tf.float64 and abs(np.mean(wide) - 1) < 0.1 and abs(np.std(wide) - 2) < 0.1
one, two = g.split(2); assert not np.array_equal(one.uniform([2]), two.uniform([2]))
r.set_global_generator(r.Generator.from_seed(3)); assert np.array_equal(r.get_global_generator().normal([2]), a)
for way in (lambda f: f, tf.function):
    parts = way(lambda: strategy.run(lambda: tf.nn.dropout(tf.ones([64]), 0.5)))().values
    assert not np.array_equal(*parts)  # replicas drop different elements
""")


def test_shapes_are_known_in_compiled_code(run):
    run("""
import jax
@tf.function
def f(x):
    batch = tf.shape(x)[0]
    assert not tf.executing_eagerly() and tf.inside_function()
    with tf.init_scope():
        assert tf.executing_eagerly()
    rows = tf.range(batch * 2)
    flat = tf.reshape(x, [batch, tf.reduce_prod(tf.shape(x)[1:])])
    more = tf.zeros(tf.concat([tf.shape(x)[:1], tf.constant([4])], 0))
    mean = tf.reduce_sum(x) / tf.cast(tf.size(x), tf.float32)
    return rows, flat, more, mean
rows, flat, more, mean = f(tf.ones([2, 3, 2]))
assert rows.shape == (4,) and flat.shape == (2, 6) and more.shape == (2, 4) and float(mean) == 1.0

@tf.function
def of_64_bits(x):  # a compiled function of JAX's sees them as well
    return x * 2, jax.nn.one_hot(x, 3), strategy.run(lambda: tf.reduce_sum(x)).values[0]
doubled, rows, total = of_64_bits(tf.constant([0, 2**40], tf.int64))
assert doubled.dtype == total.dtype == tf.int64 and int(doubled[1]) == 2**41 and rows.tolist() == [[1, 0, 0], [0] * 3]
raises(TypeError, lambda: jax.jit(lambda x: tf.boolean_mask(x, x > 0))(tf.ones([2])), "tf.where(mask, x, 0)")
raises(TypeError, lambda: jax.jit(lambda x: tf.zeros([x]))(tf.constant(2)), "traced")
raises(TypeError, lambda: jax.jit(lambda x: tf.unique(x))(tf.constant([2])), "tf.unique")
v = tf.Variable(3.0)
@tf.custom_gradient
def scaled(x, by=1.0):
    return x * by, (lambda up: up * by * 10) if by != 1.0 else (lambda up, variables=None: (up, [up]))
with tf.GradientTape() as tape:
    y = scaled(v, by=2.0)
assert float(tape.gradient(y, v)) == 20.0
with tf.GradientTape() as tape:
    raises(NotImplementedError, lambda: scaled(v.read_value()), "`scaled` (program.py:")
assert tf.function(lambda n: tf.range(n))(tf.constant(3)).tolist() == [0, 1, 2]
with tf.control_dependencies([tf.no_op()]), tf.device("CPU:1"), tf.name_scope("scope"):
    assert tf.get_current_name_scope() == "scope" and tf.timestamp().dtype == tf.float64
assert tf.test.is_built_with_xla() and tf.get_logger().name == "tensorflow" and tf.version.VERSION >= "2"
assert tf.config.experimental.set_memory_growth(tf.config.list_physical_devices()[0], True) is None
raises(RuntimeError, lambda: tf.config.set_visible_devices([], "CPU"), "CUDA_VISIBLE_DEVICES")
assert issubclass(tf.errors.NotFoundError, (tf.errors.OpError, FileNotFoundError))
class Dense(tf.Module):
    @tf.Module.with_name_scope
    def build(self):
        self.w, self.steps = tf.Variable(1.0, name="w"), tf.Variable(0, trainable=False)
module = Dense(name="dense"); module.build()
assert module.w.name == "dense/w:0" and module.non_trainable_variables == (module.steps,)
with tf.name_scope("outer"), module.name_scope:  # that of its making
    assert tf.Variable(1.0, name="v").name == "dense/v:0" and module.name_scope.name == "dense/"
class DenseBlock2D(tf.Module):
    pass
assert DenseBlock2D().name == "dense_block2_d" and module.w.shape.as_list() == [] and tf.TensorSpec([1]).value_type
raises(ValueError, lambda: tf.Module("not ok"), "valid Python identifiers")

class Once(tf.Module):
    def __init__(self):
        self.count, self.made = tf.Variable(0), False
    @tf.function
    def __call__(self):
        before = self.count + 0
        if not self.made:
            with tf.init_scope():  # once, while tracing, on the variable as it is outside
                self.made = True
                self.count.assign_add(1)
                assert self.count.numpy() == 1
        self.count.assign_add(10)
        return before, self.count + 0
once = Once()
assert [[int(x) for x in once()] for _ in range(2)] == [[1, 11], [11, 21]]
slices = tf.IndexedSlices(tf.ones([1, 2]) * 3, tf.constant([1]), tf.constant([3, 2]))
(clipped,), norm = tf.clip_by_global_norm([slices], 1.0)
assert np.allclose(norm, np.sqrt(18)) and np.allclose(clipped.values, 1 / np.sqrt(2))
assert tf.nest.flatten(slices) == [slices] and len(tf.nest.flatten(slices, expand_composites=True)) == 3
""")


def test_variables_made_in_init_scope_of_a_replica_have_values_there(run):
    run("""
ON_READ = dict(synchronization=tf.VariableSynchronization.ON_READ, aggregation=tf.VariableAggregation.SUM)
def outcome(first, second, compiled_replica):
    made = []
    def train(x):
        with tf.init_scope():
            if not made:
                made.append(first())
                made.append(second(made[0]))
        return x + made[1]
    if compiled_replica:
        total = strategy.run(tf.function(train), args=(tf.constant(1.0),))
    else:
        total = tf.function(lambda x: strategy.run(train, args=(x,)))(tf.constant(1.0))
    assert len(made) == 2
    return [float(x) for x in strategy.experimental_local_results(total)]
def assigned(v):
    v.assign_add(1.0)
    return tf.Variable(v * 3.0)
for compiled_replica in (True, False):
    for second in (lambda v: tf.Variable(v * 3.0), lambda v: tf.Variable(v.read_value() * 3.0),
                   lambda v: tf.Variable(tf.function(lambda: v * 3.0)())):
        for options in ({}, ON_READ):  # the first replica's own value, not the sum
            assert outcome(lambda: tf.Variable(2.0, **options), second, compiled_replica) == [7.0, 7.0]
    assert outcome(lambda: tf.Variable(2.0), lambda v: tf.Variable(lambda: v * 3.0), compiled_replica) == [7.0, 7.0]
    assert outcome(lambda: tf.Variable(2.0), assigned, compiled_replica) == [10.0, 10.0]
    assert outcome(lambda: tf.Variable(2.0, **ON_READ), assigned, compiled_replica) == [10.0, 10.0]
""")


def test_arrays_of_tensors_that_grow(run):
    run("""
import warnings
def grown(n):
    array = tf.TensorArray(tf.float32, size=0, dynamic_size=True)
    for i in tf.range(n):
        array = array.write(i, tf.cast(i, tf.float32))
    return array.stack()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for way in (lambda f: f, tf.function):
        assert way(grown)(tf.constant(3)).numpy().tolist() == [0.0, 1.0, 2.0]
assert any("driven from the host" in str(w.message) for w in caught), [str(w.message) for w in caught]
array = tf.TensorArray(tf.float32, size=1)
array.write(0, 2.0)  # outside of compiled code the array itself has it, as TensorFlow's
assert float(array.read(0)) == 2.0
import jax.monitoring
compiled = []  # a program for each power of two, not for each size
jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: compiled.append(name))
array = tf.TensorArray(tf.float32, size=0, dynamic_size=True)
for i in range(70):
    array = array.write(i, float(i))
assert len([name for name in compiled if name.endswith("backend_compile_duration")]) < 40, len(compiled)
assert int(array.size()) == 70 and array.stack().numpy().tolist() == list(range(70))
assert array.gather([69, 0]).numpy().tolist() == [69.0, 0.0] and float(array.read(69)) == 69.0
raises(tf.errors.OutOfRangeError, lambda: array.read(70), "array size is: 70")
raises(ValueError, lambda: tf.TensorArray(tf.float32, 1, infer_shape=False), "tf.concat")
raises(tf.errors.OutOfRangeError, lambda: tf.TensorArray(tf.float32, 1).write(1, 1.0), "index 1", "dynamic_size=True")
raises(tf.errors.InvalidArgumentError, lambda: tf.TensorArray(tf.float32, 1).stack(), "element_shape")
""")
