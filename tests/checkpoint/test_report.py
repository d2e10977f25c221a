"""`Checkpoint.report` names what of a program's state is not in the checkpoint, and nothing else."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

import replicax as rx
from replicax._checkpoint import random_state
from replicax._parameter_server.datasets import PerWorkerDistributedIterator

HEAD = """
import json, random, tempfile
import jax, jax.numpy as jnp, numpy as np
import replicax as rx

strategy = rx.MirroredStrategy(["cpu:0"])
folder = tempfile.mkdtemp()
with strategy.scope():
    w, step = rx.Variable(jnp.ones(3), name="w"), rx.Variable(0, name="step")
rows = rx.data.Dataset.range(40)

@rx.function
def train(batch):
    w.assign_add(jnp.ones(3) * jnp.sum(batch))
    step.assign_add(1)

def told(checkpoint):
    checkpoint.save(folder + "/ckpt")
    report = checkpoint.report()
    print(json.dumps([[e.kind, e.what, e.place, str(report).count(e.advice)] for e in report.entries]), flush=True)
"""

COVERED = """
w.assign(np.full(3, 2.0))  # before there is a checkpoint: the program does it again
random.seed(3); np.random.seed(3); random.random()
base, parts = jax.random.key(1), jax.random.split(jax.random.key(2), 3)
rng = np.random.default_rng(0)
init = rng.normal(size=3)
iterator = iter(strategy.experimental_distribute_dataset(rows.map(lambda x: x + 1).shuffle(9).repeat().batch(4)))
constant = rx.Variable([1.0, 2.0])
checkpoint = rx.train.Checkpoint(w=w, step=step, iterator=iterator)
manager = rx.train.CheckpointManager(checkpoint, folder + "/m", max_to_keep=2)
manager.restore_or_initialize()
later = jax.random.key(5)
total = rx.Variable(0.0)
for _ in range(5):
    key = jax.random.fold_in(later, int(step))
    one, other = jax.random.split(jax.random.fold_in(base, int(step)))
    train(next(iterator))
    manager.save()
    for batch in rows.batch(10):  # an evaluation, which ends
        total.assign_add(1.0)
    total.assign(0.0)
told(checkpoint)
"""

UNCOVERED = {
    "a variable": ("""
total = rx.Variable(0.0, name="total")
other = [rx.Variable(1.0, name=f"other{i}") for i in range(5)]
checkpoint = rx.train.Checkpoint(w=w, step=step)
total.assign_add(1.0)
for one in other: one.assign_add(1.0)
""", [("variable", "the variable 'total:0'", 2),
      ("variable", "5 variables, 'other0:0', 'other1:0', 'other2:0', ...", 3)]),
    "a variable that a function assigns": ("""
checkpoint = rx.train.Checkpoint(step=step)
train(jnp.ones(2))
""", [("variable", "the variable 'w:0'", -9)]),
    "an iterator": ("""
checkpoint = rx.train.Checkpoint(w=w, step=step)
for batch in rows.batch(4):
    told(checkpoint)
    break
""", [("iterator", "the position of an iterator, after 1 elements", 3)]),
    "the passes of a shuffle": ("""
data = rows.shuffle(10, seed=1)
checkpoint = rx.train.Checkpoint(w=w, step=step)
for epoch in range(2):
    for batch in data: pass
""", [("shuffle", "the number of passes over a shuffled dataset, 2, and its seed", 2)]),
    "a generator": ("""
def numbers():
    yield from range(30)
iterator = iter(rx.data.Dataset.from_generator(numbers).map(lambda x: x).batch(2))
checkpoint = rx.train.Checkpoint(w=w, step=step, iterator=iterator)
next(iterator)
""", [("source", "the generator `numbers` (program.py:LINE), from which a dataset is made", 4)]),
    "Python's and NumPy's random numbers": ("""
checkpoint = rx.train.Checkpoint(w=w, step=step)
random.random(), np.random.normal()
""", [("random", "the state of Python's `random`, which was drawn from", None),
      ("random", "the state of `numpy.random`, which was drawn from", None)]),
    "and with a RandomState": ("""
checkpoint = rx.train.Checkpoint(w=w, step=step, random=rx.train.RandomState())
random.random(), np.random.normal()
""", []),
    "a NumPy generator": ("""
rng, known = np.random.default_rng(0), np.random.default_rng(1)
checkpoint = rx.train.Checkpoint(w=w, step=step, random=rx.train.RandomState(known))
rng.normal(), known.normal()
""", [("generator", "the numpy.random.Generator rng", None)]),
    "a key": ("""
key = jax.random.key(0)
checkpoint = rx.train.Checkpoint(w=w, step=step)
key, used = jax.random.split(key)
key, used = jax.random.split(key)
""", [("key", "2 keys of jax.random that Python holds, key, used", None)]),
    "and a key in the checkpoint": ("""
checkpoint = rx.train.Checkpoint(w=w, step=step, key=jax.random.key(0))
checkpoint.key, used = jax.random.split(checkpoint.key)
""", []),
}  # fmt: skip


KERAS = """
import keras
with strategy.scope():
    model = keras.Sequential([keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dropout(0.1),
                              keras.layers.Dense(1)])
    model.compile("adam", "mse", metrics=["mae"])
x = np.ones((20, 3), np.float32)
model.fit(x, x[:, :1], verbose=0, batch_size=10, shuffle=False)
checkpoint = rx.train.Checkpoint(model=model)
model.fit(x, x[:, :1], verbose=0, batch_size=10, shuffle=False)
told(checkpoint)
"""

# Runs programs one after the other, each as if it were alone.
SEVERAL = """
import gc, json, sys
from replicax._checkpoint import report
from replicax._tracing import frames
own = vars(sys.modules["__main__"])
before = {*own, "before", "name", "code"}
for name, code in json.load(open("programs.json")).items():
    for other in [*own]:
        if other not in before:
            del own[other]
    gc.collect()
    report._baseline, frames.notes_changes = None, False
    print(name, end=" ", flush=True)
    exec(compile(code, "program.py", "exec"), own)
"""


def entries_of(run_python, tmp_path, programs):
    """Returns what each of these programs reports."""
    file = tmp_path / "programs.json"
    file.write_text(json.dumps({name.replace(" ", "_"): HEAD + code for name, code in programs.items()}))
    done = run_python(SEVERAL.replace("programs.json", str(file)), timeout=120)
    assert done.returncode == 0, done.stderr
    found = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    return {name: json.loads(found[name.replace(" ", "_")]) for name in programs}


def test_a_program_whose_state_is_saved_has_nothing_to_report(run_python, tmp_path):
    assert entries_of(run_python, tmp_path, {"covered": COVERED}) == {"covered": []}


def test_a_model_of_keras_that_is_saved_has_nothing_to_report(run_python, tmp_path):
    pytest.importorskip("keras")
    assert entries_of(run_python, tmp_path, {"keras": KERAS}) == {"keras": []}


def test_what_is_not_saved_is_named(run_python, tmp_path):
    programs = {name: code + "told(checkpoint)\n" * ("told(" not in code) for name, (code, _) in UNCOVERED.items()}
    found = entries_of(run_python, tmp_path, programs)
    first = HEAD.count("\n")
    of_w = HEAD.split("\n").index('    w, step = rx.Variable(jnp.ones(3), name="w"), rx.Variable(0, name="step")') + 1
    for name, (_, expected) in UNCOVERED.items():
        places = [line and f"program.py:{first + line if line > 0 else of_w}" or "" for _, _, line in expected]
        whats = [(kind, what.replace("LINE", str(first + 2))) for kind, what, _ in expected]
        assert [(kind, what) for kind, what, _, _ in found[name]] == whats, name
        assert [place for _, _, place, _ in found[name]] == places, name
        assert all(count for *_, count in found[name])


def test_random_states_go_on(tmp_path):
    own, other = np.random.default_rng(3), random.Random(4)

    def drawn():
        return random.random(), np.random.normal(), own.normal(), other.random()

    kept = random.getstate(), np.random.get_state()
    try:
        drawn()
        path = rx.train.Checkpoint(random=rx.train.RandomState(own, other)).save(tmp_path / "ckpt")
        expected = drawn()
        own, other = np.random.default_rng(0), random.Random(0)
        rx.train.Checkpoint(random=rx.train.RandomState(own, other)).restore(path).assert_consumed()
        assert drawn() == expected
        with pytest.raises(ValueError, match="has 1 generators .PCG64., and .* had 2 .PCG64, random.Random."):
            rx.train.Checkpoint(random=rx.train.RandomState(own)).restore(path)
    finally:
        random.setstate(kept[0]), np.random.set_state(kept[1])
    with pytest.raises(TypeError, match="takes numpy.random.Generators and random.Randoms, got 3"):
        rx.train.RandomState(3)


@pytest.mark.parametrize(
    "other", [np.random.Generator(np.random.MT19937(1)), random.Random(1)], ids=["MT19937", "random"]
)
def test_a_state_of_another_kind_of_generator_is_refused_and_nothing_is_set(other, tmp_path):
    kept = random.getstate(), np.random.get_state()
    try:
        path = rx.train.Checkpoint(random=rx.train.RandomState(np.random.default_rng(3))).save(tmp_path / "ckpt")
        random.seed(5), np.random.seed(6)
        state = rx.train.RandomState(other)
        before = state.save_state()
        with pytest.raises(ValueError, match="and that which was saved had 1 .PCG64."):
            rx.train.Checkpoint(random=state).restore(path)
        assert random_state.same(state.save_state(), before)
    finally:
        random.setstate(kept[0]), np.random.set_state(kept[1])


def test_an_iterator_that_could_not_be_made_is_no_state():
    checkpoint = rx.train.Checkpoint(v=rx.Variable(0.0))
    with pytest.raises(TypeError, match="got 5") as raised:
        rx.data.NumpyIterator(5)
    checkpoint.report()
    assert raised.tb  # which keeps the iterator


def test_an_iterator_that_workers_have_is_no_state_of_the_coordinator():
    iterator = PerWorkerDistributedIterator(None)
    assert "iterator" not in {entry.kind for entry in rx.train.Checkpoint(v=rx.Variable(0.0)).report().entries}
    del iterator
