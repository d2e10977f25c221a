"""The same program text under TensorFlow and under `replicax.tf`: same values, same dtypes, same errors.

Each program of `PROGRAMS` is a few lines that append to `out`. All of them run in one process; each is a test of its
own, which compares what it found with what TensorFlow gave (see recorded.py).
"""

from __future__ import annotations

import json
import math
import sys

import programs
import pytest
from recorded import from_tensorflow, sample, selected

_RUNNER = """
import collections, importlib, json, os, sys, traceback
import numpy as np
np.random.seed(0)

tf = importlib.import_module(sys.argv[1])
if sys.argv[1] == "tensorflow":
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 4)
MODULE = tf
D = tf.distribute
SUM, MEAN = D.ReduceOp.SUM, D.ReduceOp.MEAN
A, S = tf.VariableAggregation, tf.VariableSynchronization
ctx = D.get_replica_context
STRATEGIES = {
    n: D.OneDeviceStrategy("CPU:1") if n == "one" else D.MirroredStrategy(["CPU:%d" % i for i in range(n)])
    for n in json.loads(sys.argv[4])}

def plain(x):
    "A value as JSON: its class where it is distributed, dtype and numbers where it is an array."
    if isinstance(x, tf.IndexedSlices):
        return ["slices", plain(x.values), plain(x.indices)]
    if isinstance(x, (D.DistributedValues, tf.Variable)) and hasattr(x, "values"):
        return [type(x).__name__, [plain(v) for v in x.values]]
    if isinstance(x, tf.Variable) or type(x).__name__ in ("_UnreadVariable",) or isinstance(x, tf.Tensor):
        x = np.asarray(x.numpy())
    if isinstance(x, (np.ndarray, np.generic)):
        x = np.asarray(x)
        floating = x.dtype.kind == "V" or "float" in x.dtype.name
        wide = x.astype(np.complex128 if x.dtype.kind == "c" else np.float64 if floating else x.dtype)
        values = wide.tolist()
        if x.dtype.kind == "c":
            values = [wide.real.tolist(), wide.imag.tolist()]
        if x.dtype.kind in "OS":
            values = str(values)
        return [x.dtype.name, list(x.shape), values]
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return {k: plain(v) for k, v in x._asdict().items()}
    if isinstance(x, (list, tuple)):
        return [plain(v) for v in x]
    if isinstance(x, dict):
        return {str(k): plain(v) for k, v in x.items()}
    if x is None or isinstance(x, (bool, int, float, str)):
        return x
    return type(x).__name__

def components(s, x):
    return [np.asarray(c.numpy() if hasattr(c, "numpy") else c) for c in s.experimental_local_results(x)]

def kind_of(error):
    "An exception's class by its nearest name that both sides have."
    for cls in type(error).__mro__:
        name = {"StagingError": None}.get(cls.__name__, cls.__name__)
        if name in ("InvalidArgumentError", "OutOfRangeError", "StopIteration") or cls.__module__ == "builtins":
            return name
    return "Exception"

def execute(text, s, n, way):
    out = []
    def err(fn):
        try:
            out.append(plain(fn()))
        except Exception as error:
            out.append("raises " + kind_of(error))
    def pr(*values, dtype=None):
        return s.experimental_distribute_values_from_function(
            lambda c: tf.constant(values[c.replica_id_in_sync_group % len(values)], dtype))
    def rid(dtype=tf.float32):
        return tf.cast(ctx().replica_id_in_sync_group, dtype)
    def var(value, **more):
        with s.scope():
            return tf.Variable(value, **more)
    names = dict(globals(), out=out, err=err, pr=pr, rid=rid, var=var, s=s, n=n, way=way,
                 put=lambda x: out.append(plain(x)), parts=lambda x: out.append([plain(c) for c in components(s, x)]))
    try:
        exec(text, names)
    except Exception as error:
        out.append("ends with " + kind_of(error) + ": " + "".join(traceback.format_exception(error))[-1500:])
    return out

with open(sys.argv[2]) as file:
    programs, ways = json.load(file)
results = {}
for name, text in programs.items():
    for n, s in STRATEGIES.items():
        for how in ways[name][str(n)]:
            way = tf.function if how == "function" else (lambda f: f)
            results[f"{name} | {n} | {how}"] = execute(text, s, n, way)
with open(sys.argv[3], "w") as file:
    json.dump(results, file)
"""

PROGRAMS = {
    "results of run": """
Point = collections.namedtuple("Point", "x y")
def f(x):
    return {"z": x * 2, "a": [x + rid(), (x - 1,)], "p": Point(x, rid() * 10)}
def g(x): return s.run(f, args=(x,))
put(way(g)(pr(1., 2., 3.)))
""",
    "arguments of run": """
def f(a, nest, *, k):
    return a + nest["q"][0] + nest["q"][1] * k
def g(a, b): return s.run(f, args=(a, {"q": [b, tf.constant(3.)]}), kwargs={"k": tf.constant(2.)})
put(way(g)(pr(1., 2., 3.), pr([1., 2.], [3., 4.], [5., 6.])))
""",
    "replica ids": """
put(way(lambda: s.run(lambda: ctx().replica_id_in_sync_group))())
put(s.num_replicas_in_sync)
""",
    "dtypes through run": """
for t in (tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int8, tf.int32, tf.int64, tf.uint8, tf.bool):
    put(way(lambda: s.run(lambda: tf.cast(rid(), t)))())
""",
    "reduce": """
x = pr([[1., 2., 3.], [4., 5., 6.]], [[7., 8., 9.], [1., 1., 2.]], [[0., -1., 5.], [2., 2., 2.]])
for axis in (None, 0, 1, -1, (0, 1)):
    for op in (SUM, MEAN):
        put(way(lambda x: s.reduce(op, x, axis=axis))(x))
""",
    "reduce of dtypes": """
for t in (tf.float16, tf.bfloat16, tf.float64, tf.int8, tf.uint8, tf.int16, tf.int32, tf.int64, tf.complex64):
    x = s.run(lambda: tf.cast(rid(tf.int32) + 1, t))
    y = s.run(lambda: tf.cast([rid(tf.int32) + 1, tf.constant(2)], t))
    if n in (2, 3):
        for op in (SUM, MEAN):
            put(s.reduce(op, x, axis=None))
            put(s.reduce(op, y, axis=0))
""",
    "reduce of odd shares": """
if n in (2, 3):
    x = pr([1., 2., 3., 4.], [5., 6.], [7.])
    put(s.reduce(SUM, x, axis=0)); put(s.reduce(MEAN, x, axis=0))
    y = pr([1., 2.], [], [3.], dtype=tf.float32)
    put(s.reduce(SUM, y, axis=0)); put(s.reduce(MEAN, y, axis=0))
    err(lambda: s.reduce(SUM, x, axis=None))
    put(s.gather(x, axis=0))
""",
    "reduce refuses": """
if n in (2, 3):
    x = pr(1., 2., 3.)
    err(lambda: s.reduce(SUM, x, axis=0))
    err(lambda: s.reduce("max", x, axis=None))
    err(lambda: s.reduce(None, x, axis=None))
    err(lambda: s.reduce(SUM, tf.constant(1.), axis=None))
    err(lambda: s.reduce(MEAN, tf.constant(1.), axis=None))
    err(lambda: s.reduce(SUM, tf.constant([1., 3.]), axis=0))
    err(lambda: s.reduce(SUM, pr(True, False, True), axis=None))
    err(lambda: s.reduce(SUM, s.run(lambda: 3), axis=None))
    err(lambda: s.reduce(SUM, var(1.), axis=None))
    err(lambda: s.run(lambda: s.reduce(SUM, x, axis=None)))
""",
    "gather": """
x = pr([[1, 2]], [[3, 4]], [[5, 6]])
for axis in (0, 1, -1):
    put(way(lambda x: s.gather(x, axis=axis))(x))
if n in (2, 3):
    err(lambda: s.gather(pr([True], [False], [True]), axis=0))
""",
    "all_reduce": """
def f(x):
    c = ctx()
    return c.all_reduce(SUM, x * 1.), c.all_reduce("mean", {"a": [x * rid(), rid()]})
put(way(lambda x: s.run(f, args=(x,)))(pr([1., 2.], [3., 4.], [5., 6.])))
""",
    "all_reduce of dtypes": """
for t in (tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int32, tf.int64):
    put(way(lambda: s.run(lambda: ctx().all_reduce(SUM, tf.cast(rid() + 1., t))))())
    if n in (2, 3) or t not in (tf.int32, tf.int64):  # with one replica TensorFlow's dtype depends on the way
        put(way(lambda: s.run(lambda: ctx().all_reduce(MEAN, tf.cast(rid() + 1., t))))())
""",
    "all_reduce of one tensor": """
shared = tf.constant([5.])
for f in (lambda x: ctx().all_reduce(SUM, shared), lambda x: ctx().all_reduce(MEAN, shared),
          lambda x: ctx().all_reduce(SUM, x), lambda x: ctx().all_reduce(SUM, tf.identity(x)),
          lambda x: ctx().all_reduce(SUM, x * 1.), lambda x: ctx().all_gather(shared, axis=0),
          lambda x: ctx().all_gather(tf.identity(x), axis=0)):
    parts(way(lambda: s.run(f, args=(shared,)))())
""",
    "all_gather": """
def f(x):
    c = ctx()
    return c.all_gather(x, axis=0), c.all_gather({"a": x, "b": (x * rid(),)}, axis=0), c.all_gather(x, axis=1)
put(way(lambda x: s.run(f, args=(x,)))(pr([[1., 2.]], [[3., 4.]], [[5., 6.]])))
""",
    "all_gather of odd shares": """
if n in (2, 3):
    put(s.run(lambda x: ctx().all_gather(x, axis=0), args=(pr([1.], [2., 3.], [4., 5., 6.]),)))
    err(lambda: s.run(lambda: ctx().all_reduce("max", rid())))
""",
    "sparse": """
def f():
    x = tf.IndexedSlices(tf.reshape(rid() + 1., [1, 1]), tf.reshape(rid(tf.int32), [1]), tf.constant([4, 1]))
    return ctx().all_reduce(SUM, x), ctx().all_reduce(MEAN, [x, rid()])
if n in (2, 3):
    for part in s.experimental_local_results(way(lambda: s.run(f))()):
        put(part)
""",
    "sparse of a computed shape": """
def f(rows):
    x = tf.IndexedSlices(tf.reshape(rid() + 1., [1, 1]), tf.reshape(rid(tf.int32), [1]), tf.stack([rows, 1]))
    return ctx().all_reduce(SUM, x), tf.cond(rows > 4, lambda: x, lambda: x)
total, own = way(lambda rows: s.run(f, args=(rows,)))(tf.constant(4))
for part in [*s.experimental_local_results(total), *s.experimental_local_results(own)]:
    put(tf.convert_to_tensor(part))
if n in (2, 3):
    put(tf.convert_to_tensor(way(lambda rows: s.reduce(MEAN, s.run(f, args=(rows,))[0], axis=None))(tf.constant(4))))
    put(s.gather(own, axis=0))
slices = tf.IndexedSlices(tf.ones([1, 1]), tf.constant([0]), tf.constant([4, 1]))
put(tf.convert_to_tensor(way(lambda x: tf.IndexedSlices(x.values * 2., x.indices, x.dense_shape + [4, 0]))(slices)))
err(lambda: s.gather(slices, axis=0))
""",
    "merge_call": """
def merge(st, per, k):
    return {"per": per, "sum": st.reduce(SUM, per, axis=None) if n in (2, 3) else 0., "k": k}
def f(x): return ctx().merge_call(merge, args=(x * 2, 5.))
if n in (2, 3):
    r = way(lambda x: s.run(f, args=(x,)))(pr(1., 2., 3.))
    put(r["per"]); parts(r["sum"])
""",
    "merge_call to gather": """
def merge(st, x): return st.gather(x, axis=0)
if n in (2, 3):
    parts(way(lambda x: s.run(lambda a: ctx().merge_call(merge, args=(a,)) * 1., args=(x,)))(pr([1.], [2.], [3.])))
""",
    "errors in replicas": """
if n in (2, 3):
    def f():
        raise KeyError("x")
    err(lambda: s.run(f)); err(lambda: s.run(5)); err(lambda: s.run(lambda x: x))
    err(lambda: s.run(lambda x: x, args=1))
    err(lambda: s.run(lambda: s.run(lambda: 1)))
    err(lambda: s.run(lambda: [0] * (1 + int(rid())))); err(lambda: s.run(lambda: {"a%d" % int(rid()): 1}))
    err(lambda: s.run(lambda: ctx().merge_call(lambda st: None) if int(rid()) == 0 else None))
    err(lambda: s.run(lambda: ctx().merge_call(lambda st: 1 // 0)))
""",
    "gradients in replicas": """
v = var(3.)
def f(x):
    with tf.GradientTape() as tape:
        loss = v * v * x
    return tape.gradient(loss, v)
put(way(lambda x: s.run(f, args=(x,)))(pr(1., 2., 3.)))
""",
    "gradients through all_reduce": """
for op in (SUM, MEAN):
    def f(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = ctx().all_reduce(op, x * x) * (rid() + 1.)
        return tape.gradient(y, x)
    put(way(lambda x: s.run(f, args=(x,)))(pr(1., 2., 3.)))
""",
    "gradients through all_gather": """
def f(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.reduce_sum(ctx().all_gather(x, axis=0) ** 3.) * (rid() + 1.)
    return tape.gradient(y, x)
if n in (2, 3):
    put(way(lambda x: s.run(f, args=(x,)))(pr([1., 4.], [2., 5.], [3., 6.])))
""",
    "several gradients": """
v, w = var([1., 2.]), var(3.)
def f(x):
    with tf.GradientTape(persistent=True) as tape:
        y = tf.reduce_sum(v * x) * w
        z = w * w
    return tape.gradient(y, [v, w]), tape.gradient(z, {"a": w, "b": v}), tape.gradient(y, v)
put(way(lambda x: s.run(f, args=(x,)))(pr(1., 2., 3.)))
""",
    "what a variable is": """
for kw in ({}, {"aggregation": A.SUM}, {"aggregation": A.MEAN, "trainable": False},
           {"synchronization": S.ON_READ, "aggregation": A.SUM},
           {"synchronization": S.ON_READ, "aggregation": A.MEAN, "trainable": True}):
    v = var([1., 2.], name="w", **kw)
    put([type(v).__name__, v.name, list(v.shape), v.dtype.name, v.trainable])
    put([v.synchronization.name, v.aggregation.name])
    put(v)
    put([v.numpy(), v + 1, v * v, 2. / v, v[0], -v, v ** 2.])
""",
    "wrong variables": """
with s.scope():
    err(lambda: tf.Variable(1., aggregation="sum")); err(lambda: tf.Variable(1., synchronization="x"))
    if n in (2, 3):
        err(lambda: tf.Variable(0, aggregation=A.MEAN)); err(lambda: tf.Variable(1., synchronization=S.NONE))
    v = tf.Variable(1.)
err(lambda: v.assign([1., 2.])); err(lambda: v.assign("a")); err(lambda: v.assign(tf.constant(1))); err(lambda: hash(v))
""",
    "assigning outside": """
v = var([1., 2.])
def f():
    v.assign([3., 4.]); v.assign_add([1., 1.]); v.assign_sub(tf.constant([0.5, 2.]))
    return v.read_value()
put(way(f)()); put(v)
v.assign(v + 1.); put(v)
put(v.assign([0., 0.], read_value=False))
""",
    "assigning a per-replica value outside": """
v = var(1.)
if n in (2, 3):
    x = pr(1., 2., 3.)
    v.assign(x); put(v); v.assign_add(x); put(v); put(v.numpy())
""",
    "assigning in replicas": """
for a in (A.NONE, A.SUM, A.MEAN, A.ONLY_FIRST_REPLICA):
    for method in ("assign", "assign_add", "assign_sub"):
        v = var(10., aggregation=a)
        def f(): return getattr(v, method)(rid() * 2. + 1.)
        parts(way(lambda: s.run(lambda: f() + 0.))()); put(v); put(v.numpy())
""",
    "assigning literals in replicas": """
for a in (A.NONE, A.SUM, A.MEAN, A.ONLY_FIRST_REPLICA):
    v = var(10., aggregation=a)
    def f():
        v.assign_add(1.)
    err(lambda: s.run(f)); put(v)
    shared = tf.constant(2.)
    def g():
        v.assign(shared)
    err(lambda: s.run(g)); put(v)
""",
    "assigning integers": """
v = var(0, aggregation=A.SUM)
def f():
    v.assign_add(rid(tf.int32) + 1)
way(lambda: s.run(f))(); put(v)
""",
    "assigning vectors": """
v = var([[1., 2.], [3., 4.]], aggregation=A.MEAN)
def f():
    v.assign(v * (rid() + 1.)); v.assign_sub(v / 2.)
    return v + 0.
parts(way(lambda: s.run(f))()); put(v)
""",
    "on-read variables": """
for a in (A.SUM, A.MEAN, A.ONLY_FIRST_REPLICA):
    v = var(1., synchronization=S.ON_READ, aggregation=a)
    def f():
        v.assign_add(rid() * 2. + 1.)
        return v.read_value() * 1.
    parts(way(lambda: s.run(f))()); put(v); put(way(lambda: v.read_value())()); put(v.numpy()); put(v + 1.)
    v.assign(6.); put(v); put(v.numpy())
    err(lambda: (v.assign_add(2.), None)[1]); put(v)
    err(lambda: (v.assign_sub(1.), None)[1]); put(v)
    put(s.reduce(MEAN, v, axis=None) if n in (2, 3) else 0)
""",
    "on-read without aggregation": """
v = var(1., synchronization=S.ON_READ)
if n in (2, 3):
    way(lambda: s.run(lambda: v.assign(rid())))(); parts(v)
    err(lambda: v.read_value()); err(lambda: v.numpy()); err(lambda: v.assign(1.)); err(lambda: v.assign_add(1.))
""",
    "on-read integers": """
v = var(1, synchronization=S.ON_READ, aggregation=A.SUM)
way(lambda: s.run(lambda: v.assign_add(rid(tf.int32))))(); put(v); put(v.numpy())
v.assign(5); put(v); put(v.numpy())
""",
    "an ordinary variable in replicas": """
v = tf.Variable(1.)
def f():
    v.assign_add(rid() + 1.)
way(lambda: s.run(f))(); put(v.numpy())
""",
    "variables that a function returns": """
v, total, plain_one = var([1.]), var(0., synchronization=S.ON_READ, aggregation=A.SUM), tf.Variable(1)
s.run(lambda: total.assign(rid() + 1.))
inner = tf.function(lambda: v)
@tf.function
def get():
    return {"v": v, "more": (plain_one, [total, None])}
@tf.function
def changing():
    before = inner()
    v.assign(v + 1.)
    return before, v
class Model(tf.Module):
    @tf.function
    def __call__(self):
        return v
made = []
@tf.function
def making():
    made or made.append(tf.Variable(2.))
    return made[0]
put([not isinstance(x, tf.Variable) for x in (inner(), get()["v"], get()["more"][0], Model()(), making(), making())])
kept = get(); v.assign([5.]); put(kept); put(changing()); put(v); put(Model()())
for replica in (lambda: v, lambda: total, lambda: (v, plain_one), inner, tf.function(lambda: total)):
    put(tf.function(lambda: s.run(replica))())
put(s.run(inner)); put(s.run(tf.function(lambda: (total, plain_one))))
put(isinstance(s.run(lambda: v), tf.Variable))
with tf.GradientTape() as tape:
    y = inner() ** 2
put(tape.gradient(y, v))
tf.config.run_functions_eagerly(True); put(inner() is v); tf.config.run_functions_eagerly(False)
""",
    "scatter": """
for name in ["scatter_" + x for x in ("add", "sub", "mul", "div", "update", "max", "min")]:
    for a in (A.NONE, A.SUM, A.MEAN, A.ONLY_FIRST_REPLICA):
        v = var([1., 2., 3.], aggregation=a)
        def f():
            getattr(v, name)(tf.IndexedSlices(tf.reshape(10. * (rid() + 1.), [1]), tf.reshape(rid(tf.int32), [1])))
        err(lambda: way(lambda: s.run(f))()); put(v)
    v = var([1., 2., 3.])
    getattr(v, name)(tf.IndexedSlices(tf.constant([5., 7.]), tf.constant([0, 2]))); put(v)
""",
    "variables made in replicas": """
made = {}
def f():
    if ctx() not in made:
        v = tf.Variable(tf.cast(5., tf.float32), name="made")
        made[ctx()] = v
        return v
put(s.run(f))
""",
    "update and reduce_to": """
v = var(1.)
if n in (2, 3):
    x = pr(1., 2., 3.)
    def g(x):
        m = s.extended.reduce_to(SUM, x, destinations=v)
        s.extended.update(v, lambda c, y: c.assign_add(y), args=(m,))
        return v.read_value()
    put(way(g)(x)); put(v)
    r = s.extended.batch_reduce_to(MEAN, [(x, v), (pr([1.], [5.], [9.]), v)])
    put(r)
    put(s.extended.reduce_to(SUM, x, destinations="CPU:1"))
    err(lambda: s.extended.reduce_to(SUM, tf.constant(1.), destinations=v))
    err(lambda: s.extended.update(5, lambda c: c))
    put(s.extended.update(v, lambda c: 5)); put(s.extended.update(v, lambda c: None))
""",
    "gradients by hand": """
v = var(10.)
def merge(st, g):
    total = st.extended.reduce_to(SUM, g, destinations=v)
    st.extended.update(v, lambda c, g: c.assign_sub(0.1 * g), args=(total,))
def f():
    ctx().merge_call(merge, args=(rid() + 1.,))
    return v.read_value() * 1.
if n in (2, 3):
    step = way(lambda: s.run(f))
    for _ in range(3):
        parts(step())
    put(v)
""",
    "local results": """
x = pr(1, 2, 3)
for value in (x, 3, "a", None, [x, 5], {"a": x}, (x,), [], ()):
    put(s.experimental_local_results(value))
def value(c): return {"a": c.replica_id_in_sync_group, "b": [c.num_replicas_in_sync]}
put(s.experimental_distribute_values_from_function(value))
""",
    "contexts": """
def look():
    return [D.has_strategy(), D.in_cross_replica_context(), ctx() is None, D.get_strategy().num_replicas_in_sync]
put(look())
with s.scope():
    put(look())
seen = []
s.run(lambda: seen.append(look())); put(seen)
def nested():
    with D.MirroredStrategy(["CPU:3"]).scope(): pass
def inside():
    with s.scope(): nested()
err(inside); err(lambda: s.run(nested)); put(look())
""",
    "a training step": """
X = np.linspace(-1, 1, 48, dtype=np.float32).reshape(12, 4)
Y = np.stack([X.sum(1), X[:, 0] * X[:, 1]], 1).astype(np.float32)
W1 = (np.arange(20, dtype=np.float32).reshape(4, 5) % 7 - 3) / 5
W2 = (np.arange(10, dtype=np.float32).reshape(5, 2) % 3 - 1) / 2
with s.scope():
    params = [tf.Variable(x) for x in (W1, np.zeros(5, np.float32), W2, np.zeros(2, np.float32))]
    loss_sum = tf.Variable(0., synchronization=S.ON_READ, aggregation=A.SUM)
    steps = tf.Variable(0, aggregation=A.ONLY_FIRST_REPLICA, trainable=False)
def replica(x, y):
    w1, b1, w2, b2 = params
    with tf.GradientTape() as tape:
        h = tf.tanh(tf.matmul(x, w1) + b1)
        loss = tf.reduce_sum((tf.matmul(h, w2) + b2 - y) ** 2) / 12.
    gradients = ctx().all_reduce(SUM, tape.gradient(loss, params))
    for p, g in zip(params, gradients):
        p.assign_sub(0.3 * g)
    loss_sum.assign_add(loss)
    steps.assign_add(1)
    return loss
step = way(lambda x, y: s.run(replica, args=(x, y)))
d = s.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((X, Y)).batch(12).repeat(5))
for x, y in d:
    loss = step(x, y)
    put(s.reduce(SUM, loss, axis=None))
for p in params:
    put(p)
put(loss_sum.numpy()); put(steps.numpy())
""",
    "an epoch with an uneven end": """
w = var([[1.], [1.]])
x = np.array([[1., 2.], [3., 4.], [5., 6.], [0., 1.], [2., 0.]], np.float32)
y = np.array([[1.], [2.], [3.], [0.], [1.]], np.float32)
d = s.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((x, y)).batch(3))
def replica(a, b):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum((tf.matmul(a, w) - b) ** 2) / 3.
    w.assign_sub(0.01 * ctx().all_reduce(SUM, tape.gradient(loss, w)))
    return loss
total = 0.
for batch in d:
    total += s.reduce(SUM, s.run(replica, args=batch), axis=None)
put(total); put(w)
""",
    "next in a function": """
v = var(0., aggregation=A.SUM)
it = iter(s.experimental_distribute_dataset(tf.data.Dataset.range(1, 13).batch(6, drop_remainder=True)))
def f(x):
    v.assign_add(tf.cast(tf.reduce_sum(x), tf.float32))
@tf.function
def step(it): s.run(f, args=(next(it),))
step(it); put(v); step(it); put(v)
err(lambda: step(it)); put(v)
""",
    "a dataset from a function": """
def make(c):
    out.append([c.num_input_pipelines, c.input_pipeline_id, c.num_replicas_in_sync])
    return tf.data.Dataset.range(8).batch(c.get_per_replica_batch_size(6))
for x in s.distribute_datasets_from_function(make):
    put(x)
""",
}

# A batch of n is split into parts of ceil(n / replicas), the last ones smaller or empty.
for _count, _batch in ((1, 4), (7, 1), (7, 3), (7, 4), (12, 6)):
    for _drop in (False, True):
        PROGRAMS[f"dataset of {_count} in batches of {_batch}{', dropping' if _drop else ''}"] = f"""
it = iter(s.experimental_distribute_dataset(tf.data.Dataset.range({_count}).batch({_batch}, drop_remainder={_drop})))
taken = 0
try:
    while True:
        put(next(it)); taken += 1
except StopIteration:
    put(taken)
"""

# TensorFlow's collectives are of no use any more in a process where one has failed, so these come last.
PROGRAMS["partitioners"] = """
P = D.experimental.partitioners
rules = [P.FixedShardsPartitioner(4), P.MinSizePartitioner(), P.MinSizePartitioner(12, 50), P.MinSizePartitioner(8, 5),
         P.MaxSizePartitioner(3), P.MaxSizePartitioner(16), P.MaxSizePartitioner(100, 2), P.MaxSizePartitioner(20, 3)]
for rule in rules:
    for shape, axis in (((10,), 0), ((10, 3), 0), ((10, 3), 1), ((3, 10), -1), ((300, 1000), 0), ((1,), 0)):
        put([list(rule(tf.TensorShape(shape), dtype, axis=axis)) for dtype in (tf.float32, tf.float64, tf.string)])
for make in (lambda: P.MinSizePartitioner(0), lambda: P.MinSizePartitioner(1, 0), lambda: P.MaxSizePartitioner(1, 1, 0),
             lambda: rules[1](tf.TensorShape([2]), tf.float32, axis=1)):
    err(make)
"""

PROGRAMS["collectives that are refused"] = """
if n in (2, 3):
    err(lambda: s.gather(pr([[1, 2]], [[3, 4]], [[5, 6]]), axis=2))
    err(lambda: s.gather(pr(1, 2, 3), axis=0))
    err(lambda: s.gather(pr([[1.]], [[1., 2.]], [[1.]]), axis=0))
    err(lambda: s.run(lambda x: ctx().all_gather(x, axis=0), args=(pr([[1.]], [[1., 2.]], [[1.]]),)))
    err(lambda: s.run(lambda x: ctx().all_reduce(SUM, x), args=(pr([1.], [1., 2.], [1.]),)))
"""

# `letters` has one letter for each value, the same for the same value: "ABA" is a value that comes again.
PROGRAMS["random numbers that come again"] = """
def letters(*values):
    keys = [np.asarray(x).tobytes() for x in values]
    return "".join(chr(65 + keys.index(key)) for key in keys)

def results(seed):
    u = lambda: tf.random.uniform([3], seed=seed)
    begin = lambda: tf.random.set_seed(1)
    two = lambda: (u(), u())
    begin(); f, g = tf.function(two), tf.function(two)
    put(letters(u(), u(), *f(), *f(), *g(), *g(), u()))
    begin(); put(letters(u(), u(), *f(), *f(), *g(), *tf.function(two)()))
    begin(); first = u(); begin(); put(letters(first, u(), u()))
    inner = tf.function(u); outer = tf.function(lambda: inner())
    begin(); put(letters(inner(), outer(), outer(), inner()))
    begin(); h = tf.function(u); c = h.get_concrete_function(); put(letters(h(), c(), h(), c()))
    @tf.function
    def loop():
        body = lambda i, rows: (i + 1, tf.concat([rows[1:], u()[None]], 0))
        return tf.while_loop(lambda i, rows: i < 3, body, [0, tf.zeros([3, 3])])[1]
    begin(); put(letters(*loop(), *loop()))
    drop = lambda: tf.nn.dropout(tf.ones([30]), 0.5, seed=seed)
    d = tf.function(drop); begin(); put(letters(drop(), drop(), d(), d()))
    shuffle = lambda: tf.random.shuffle(tf.range(30), seed=seed)
    d = tf.function(shuffle); begin(); put(letters(shuffle(), shuffle(), d(), d()))
    make = tf.random_uniform_initializer(seed=seed)
    begin(); put(letters(make([3]), make([3]), tf.function(lambda: make([3]))()))
    rows = lambda: list(tf.data.Dataset.range(30).shuffle(30, seed=seed).as_numpy_iterator())
    orders = []
    for _ in range(2):
        begin(); orders += [rows(), rows()]
    put(letters(*orders))
    passes = tf.data.Dataset.range(30).shuffle(30, seed=seed)
    put(letters(*[list(passes.as_numpy_iterator()) for _ in range(2)]))
    one = D.MirroredStrategy(["CPU:0"])
    begin(); put(letters(u(), one.run(u), tf.function(lambda: one.run(u))(), one.run(u)))
    whole = lambda: tf.random.uniform([3], 0, 10000, tf.int32, seed=seed)
    begin(); put(letters(u(), whole(), whole(), tf.random.uniform([3], dtype=tf.float64, seed=seed), u()))
    tf.random.set_seed(2); put(letters(first, u()))

def made_in(seed):
    made = []
    @tf.function
    def f():
        if not made:
            made.append(tf.Variable(0.0))
        return tf.random.uniform([3], seed=seed)
    tf.random.set_seed(1); put(letters(f(), f(), f(), tf.random.uniform([3], seed=seed)))

if n == 2:
    for seed in (42, None):
        results(seed)
    made_in(42)
    g1, g2 = tf.random.Generator.from_seed(3), tf.random.Generator.from_seed(3)
    f = tf.function(lambda: (g2.uniform([3]), g2.uniform([3])))
    put(letters(g1.uniform([3]), g1.uniform([3]), g1.uniform([3]), *f(), *f()))
    x = tf.random.stateless_uniform([3], [1, 2])
    put(letters(x, tf.function(lambda: tf.random.stateless_uniform([3], [1, 2]))()))
    tf.random.set_seed(5); a = tf.random.uniform([3])
    tf.random.set_global_generator(tf.random.Generator.from_seed(3))
    tf.random.set_seed(5); put(letters(a, tf.random.uniform([3]), tf.random.get_global_generator().uniform([3])))
    ops = []
    for _ in range(2):
        tf.random.set_seed(None)
        ops += [tf.random.uniform([3]), tf.random.uniform([3]), tf.random.uniform([3], seed=1)]
    put(letters(*ops))
    f = tf.function(lambda: tf.random.uniform([3])); put(letters(f(), f(), tf.random.uniform([3])))
    tf.random.set_seed(1)
"""


COUNTS = ["1", "2", "3", "one"]


def ways_of(name, n):
    """Each program runs both ways with one replica and with several, each number of replicas in one of the ways.

    Reading a dataset and cutting a variable are the same both ways.
    """
    if name.startswith(("dataset of", "partitioners", "random numbers")):
        return ["eager"]
    return {"1": ["eager"], "one": ["function"], "2": ["eager"], "3": ["function"]}[n]


KEYS = [f"{name} | {n} | {way}" for name in PROGRAMS for n in COUNTS for way in ways_of(name, n)]
SAMPLE = sample([key for key in KEYS if key.split(" | ")[1] == "2"], 4)


def _run(python, module, keys, folder):
    """What the programs of these keys give, in one process."""
    source, table, result = folder / "run.py", folder / "programs.json", folder / f"{module}.json"
    source.write_text(_RUNNER)
    wanted = [key.split(" | ") for key in keys]
    counts = [n if n == "one" else int(n) for n in COUNTS if any(n == count for _, count, _ in wanted)]
    ways = {name: {n: [] for n in COUNTS} for name, _, _ in wanted}
    for name, n, way in wanted:
        ways[name][n].append(way)
    table.write_text(json.dumps([{name: PROGRAMS[name] for name in ways}, ways]))
    ours = {"REPLICAX_VIRTUAL_DEVICES": "CPU:4"}
    theirs = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1", "KERAS_BACKEND": None}
    programs.run_well(
        source,
        [module, table, result, json.dumps(counts)],
        folder=folder,
        timeout=220.0,
        env=theirs if module == "tensorflow" else ours,
        python=python,
        imports="replicax.tf",
    )
    return json.loads(result.read_text())


@pytest.fixture(scope="module")
def live(request, tmp_path_factory):
    """`live(keys)`: what TensorFlow gives for the programs of these keys."""

    def run(keys):
        python, found = request.getfixturevalue("tensorflow_python"), {}
        # Collectives of strategies of different sizes get into each other's way in one process of TensorFlow.
        for three in (False, True):
            if some := [key for key in keys if (key.split(" | ")[1] == "3") == three]:
                found |= _run(python, "tensorflow", some, tmp_path_factory.mktemp("side"))
        return found

    return run


@pytest.fixture(scope="module")
def theirs(request, live):
    """What each program gives under TensorFlow."""
    texts = {key: _RUNNER + PROGRAMS[key.split(" | ")[0]] for key in KEYS}
    return from_tensorflow("programs", texts, live, {*selected(request, "key"), *SAMPLE})


@pytest.fixture(scope="module")
def ours(request, once, tmp_path_factory):
    """What each program gives under replicax."""
    keys, folder = selected(request, "key"), tmp_path_factory.mktemp("side")
    return once("programs", lambda: _run(sys.executable, "replicax.tf", keys, folder))


def _difference(expected, got, where=""):
    """What differs, None where nothing does; numbers may be a little off."""
    if isinstance(expected, float) and isinstance(got, (int, float)) and not isinstance(got, bool):
        same = math.isclose(expected, got, rel_tol=2e-5, abs_tol=1e-6) or (math.isnan(expected) and math.isnan(got))
        return None if same else f"{where}: TensorFlow {expected}, replicax {got}"
    if isinstance(expected, list) and isinstance(got, list) and len(expected) == len(got):
        return next(
            (d for i, (a, b) in enumerate(zip(expected, got)) if (d := _difference(a, b, f"{where}[{i}]"))), None
        )
    if isinstance(expected, dict) and isinstance(got, dict) and list(expected) == list(got):
        return next((d for k in expected if (d := _difference(expected[k], got[k], f"{where}.{k}"))), None)
    return (
        None if expected == got and type(expected) is type(got) else f"{where}: TensorFlow {expected}, replicax {got}"
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("key", KEYS)
def test_the_same_as_tensorflow(theirs, ours, key):
    expected, got = theirs[key], ours[key]
    assert not any(isinstance(x, str) and x.startswith("ends with") for x in expected), expected[-1]
    difference = _difference(expected, got)
    assert difference is None, f"{difference}\nTensorFlow: {expected}\nreplicax:   {got}"


def test_the_record_is_what_tensorflow_gives(theirs, live, tensorflow_python):
    for key, found in live(SAMPLE).items():
        assert _difference(theirs[key], found) is None, key
