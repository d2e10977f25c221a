"""Checkpoints of jobs of several processes: who writes, to one path or to several, and what is told when that fails."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
from processes import Workers, told_by
from strategies import mirrored

import replicax as rx
from replicax._checkpoint import workers

START = """
import json, os, pathlib, sys
import jax, jax.numpy as jnp, numpy as np
import replicax as rx
from processes import mark
from replicax._checkpoint import files as files

strategy = rx.MultiWorkerMirroredStrategy()
me = strategy.cluster_resolver.task_id
folder = pathlib.Path(os.environ["FOLDER"])
S, A = rx.VariableSynchronization, rx.VariableAggregation
rid = lambda: rx.get_replica_context().replica_id_in_sync_group

def told(name, value):
    print("told", json.dumps(["", name, value]), flush=True)

def parts(v):
    return [np.asarray(part).tolist() for part in strategy.experimental_local_results(v)]

class Position:
    def __init__(self):
        self.at = 0
    def save_state(self):
        return {"at": np.int64(self.at)}
    def restore_state(self, state):
        self.at = int(state["at"])

def made():
    with strategy.scope():
        v = rx.Variable([1.0, 2.0])
        total = rx.Variable(0.0, synchronization=S.ON_READ, aggregation=A.SUM)
    return rx.train.Checkpoint(v=v, total=total, data=Position())

checkpoint = made()
written = []
write = files.stage
files.stage = lambda path, *rest, **kw: (written.append(os.path.relpath(path, folder)), write(path, *rest, **kw))[1]
"""

PROGRAM = """
strategy.run(lambda: checkpoint.total.assign(rid() + 1.0))
checkpoint.data.at = 10 + me

# As programs for TensorFlow do it: each worker has a path of its own, and the chief's is the one that counts.
own = folder / ("run" if strategy.extended.should_checkpoint else f"temporary{me}")
told("own", checkpoint.save(own / "ckpt")[-6:])

# One path for all: one writes. The number is counted by all.
manager = rx.train.CheckpointManager(checkpoint, folder / "shared", max_to_keep=1)
manager.save(), manager.save()
told("shared", [written, sorted(os.listdir(folder / "shared")), os.path.basename(manager.latest_checkpoint)])
strategy.run(lambda: rx.get_replica_context().all_reduce("SUM", jnp.ones(1)))  # nobody goes on before all have looked

# Each worker alone, with what is not of several: nobody waits.
if me == 1:
    kinds = [np.float32(3.0), np.float32([-0.0, np.nan]), np.float32([-0.0]), np.zeros((0, 2), np.int8),
             np.bool_([1, 0]), jnp.ones((2, 3), jnp.bfloat16) * 1.25, jnp.arange(4).astype(jnp.int4),
             np.complex64([1j]), np.zeros(5)]
    kinds += [np.random.default_rng(0).normal(size=(3, 100_000)), np.arange(6.0).reshape(2, 3).T]
    path = rx.train.Checkpoint(mine=kinds).save(folder / "alone" / "ckpt")
    reader = rx.train.load_checkpoint(path)
    got = [reader.get_tensor(f"mine/{i}/.ATTRIBUTES/VARIABLE_VALUE") for i in range(len(kinds))]
    bits = lambda x: (x.dtype, x.shape, np.asarray(x).tobytes())
    told("kinds", [bits(x) == bits(y) for x, y in zip(got, kinds)])

new = made()
new.v.assign([0.0, 0.0])
new.restore(rx.train.latest_checkpoint(folder / "shared")).assert_consumed()
told("restored", [parts(new.v), parts(new.total), float(new.total), new.data.at, int(new.save_counter)])

# One path where the disk is not shared (which is played here): each has a copy.
where = files.token_at
files.token_at = lambda path: None
checkpoint.write(folder / "disks" / "ckpt")
told("disks", written[-1])
files.token_at = where

# The disk of one is full, or its values cannot be taken: all count as before, and go on alike.
files.token_at = lambda path: None if me else where(path)
if me == 1:
    def full(*_, **kw):
        raise OSError(28, "No space left on device")
    kept, files.stage = files.stage, full
for what in ("copy", "values"):
    try:
        checkpoint.save(folder / "shared" / "ckpt")
    except Exception as error:
        told(what, [type(error).__name__, str(error), int(checkpoint.save_counter)])
    files.token_at = where
    checkpoint.text = np.zeros(1) if me == 0 else np.array(["text"])
del checkpoint.text
if me == 1:
    files.stage = kept
    checkpoint.more = Position()
try:
    checkpoint.save(folder / "shared" / "ckpt")
except rx.CheckpointError as error:
    told("iterators", str(error))
if me == 1:
    del checkpoint.more
told("then", [checkpoint.save(folder / "then" / "ckpt")[-6:], sorted(os.listdir(folder / "then"))])

# What fails for one fails for all.
if me == 0:
    def write(path, *rest, **kw):
        raise OSError(28, "No space left on device")
for path in (folder / "shared", folder / f"apart{me}"):
    try:
        checkpoint.save(path / "full")
    except rx.CheckpointError as error:
        told(f"error {path.name[:5]}", str(error))
told("counted", int(checkpoint.save_counter))
told("after", sum(parts(strategy.run(lambda: rx.get_replica_context().all_reduce("SUM", jnp.float32(1.0))))[:1]))
"""


def test_two_workers_save_to_paths_of_their_own_or_to_one(tmp_path):
    folder = tmp_path / "out"
    with Workers(tmp_path / "job", 2, START + PROGRAM, devices=2, env={"FOLDER": str(folder)}) as workers:
        done = workers.join(timeout=120)
    assert not any("WARNING" in worker.stderr for worker in done.values()), workers.output()
    told = told_by(done)[""]
    assert [worker["own"] for worker in told] == ["ckpt-1"] * 2
    assert sorted(os.listdir(folder / "run")) == sorted(os.listdir(folder / "temporary1")) == ["checkpoint", "ckpt-1"]
    there = ["checkpoint", "ckpt-3"]
    assert told[0]["shared"] == [["run/ckpt-1", "shared/ckpt-2", "shared/ckpt-3"], there, "ckpt-3"]
    assert told[1]["shared"] == [["temporary1/ckpt-1"], there, "ckpt-3"]
    assert all(told[1]["kinds"]) and len(told[1]["kinds"]) == 11
    total = 1.0 + 2 + 3 + 4
    for me, worker in enumerate(told):
        assert worker["restored"] == [[[1.0, 2.0]] * 2, [total / 4] * 2, total, 10 + me, 3]
        assert worker["disks"] == "disks/ckpt"
        assert "worker 0: OSError: [Errno 28] No space left on device" in worker["error share"]
        assert "worker 0: OSError" in worker["error apart"]
        own = "worker 1: OSError: [Errno 28]"
        assert worker["copy"][0] == ["CheckpointFailedElsewhere", "CheckpointError"][me]
        assert f"ckpt-4 was not copied to all disks. {own}" in worker["copy"][1] and worker["copy"][2] == 3
        assert worker["values"][0] == ["CheckpointFailedElsewhere", "TypeError"][me]
        assert "text is an array of <U4; checkpoints have numbers only" in worker["values"][1]
        text = f"worker {1 - me} and this worker must save the same iterators: only one of them has an iterator at "
        assert text in worker["iterators"] and "more" in worker["iterators"]
        assert worker["values"][2] == 3 and worker["then"] == ["ckpt-4", ["checkpoint", "ckpt-4"]]
        assert worker["counted"] == 4 and worker["after"] == 4.0
    # What the job has saved, in one process.
    with mirrored(2).scope():
        v = rx.Variable([0.0, 0.0])
        total_here = rx.Variable(
            0.0, synchronization=rx.VariableSynchronization.ON_READ, aggregation=rx.VariableAggregation.SUM
        )
    for path in (folder / "run" / "ckpt-1", folder / "temporary1" / "ckpt-1", folder / "disks" / "ckpt"):
        checkpoint = rx.train.Checkpoint(v=v, total=total_here)
        checkpoint.read(path).expect_partial().assert_existing_objects_matched()
        assert v.numpy().tolist() == [1.0, 2.0] and float(total_here) == total
        v.assign(np.zeros(2))
    position = Position()
    with pytest.warns(UserWarning, match="data was saved by 2 processes and there are 1 now"):
        status = rx.train.Checkpoint(data=position).read(folder / "run" / "ckpt-1").expect_partial()
    with pytest.raises(AssertionError, match="not bound to checkpointed values.*data"):
        status.assert_existing_objects_matched()


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, np.int64])
def test_digests_tell_arrays_apart_that_differ_in_signs_or_order(dtype):
    values = np.arange(1, 2**15 + 1, dtype=dtype).reshape(-1, 16)
    others = [-values, values[::-1], np.random.default_rng(0).permutation(values), values[:, ::-1]]
    others += [values ^ 1] if dtype in (np.int32, np.int64) else [np.where(values == 5, -values, values)]
    assert len({workers.checksum([array]) for array in [values, *others]}) == len(others) + 1
    assert workers.checksum([values]) == workers.checksum([values.copy(order="F")])


def test_each_element_is_compared_in_one_of_64_saves_and_small_arrays_in_all():
    small, large = np.arange(5000), np.arange(300_001, dtype=np.float32)
    for place in (0, 4999):
        other = small.copy()
        other[place] = -1
        assert all(workers.checksum([small], turn) != workers.checksum([other], turn) for turn in range(64))
    for place in (0, 1024, 123_456, 299_999, 300_000):
        other = large.copy()
        other[place] = -1
        differ = [workers.checksum([large], turn) != workers.checksum([other], turn) for turn in range(7, 71)]
        assert sum(differ) == (1 if place < 292 * 1024 else 64)  # the rest behind the last whole block counts always
    assert workers.checksum([large], 3) != workers.checksum([large[::-1]], 3)


class Position:
    def save_state(self):
        pytest.fail("nothing is saved")

    def restore_state(self, state):
        pytest.fail("its position is not known")


KILLED = """
import signal
checkpoint.save(folder / "ckpt")
checkpoint.v.assign([5.0, 5.0])
if me == 0:
    files.os.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
checkpoint.save(folder / "ckpt")
told("not here", True)
"""


def test_a_worker_does_not_wait_for_a_killed_writer(tmp_path):
    folder = tmp_path / "out"
    with Workers(tmp_path / "job", 2, START + KILLED, env={"FOLDER": str(folder)}) as workers:
        done = workers.join(timeout=60)
    assert done[0].returncode == -9 and done[1].returncode != 0
    assert "worker 0" in done[1].stderr and "not here" not in done[1].stdout
    latest = rx.train.latest_checkpoint(folder)
    assert latest == str(folder / "ckpt-1")
    v = rx.Variable([0.0, 0.0])
    rx.train.Checkpoint(v=v).restore(latest).expect_partial()
    assert v.numpy().tolist() == [1.0, 2.0]


OWN_FAILURE = """
import shutil, time
disk = folder / os.environ["WHAT"] / f"disk{me}"

def show_late(kind, error, trace, show=sys.excepthook):
    time.sleep(1.0)  # the other worker has time to tell of its error first
    show(kind, error, trace)

if me == 1:
    sys.excepthook = show_late
if os.environ["WHAT"] == "saves":
    manager = rx.train.CheckpointManager(checkpoint, disk / "saved", max_to_keep=3)
    if me == 1:
        shutil.rmtree(disk)
        disk.write_text("no folder")
    manager.save()
else:
    path = checkpoint.write(disk / "ckpt")
    checkpoint.restore(path if me == 0 else disk / "nothing")
told("not here", True)
"""


@pytest.mark.parametrize("what", ["saves", "restores"])
def test_a_failure_that_raises_on_all_workers_is_reported_as_that_of_the_worker_that_had_it(what, tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    env = {"FOLDER": str(folder), "WHAT": what, "REPLICAX_REPORT_DIR": str(tmp_path / "reports")}
    with Workers(tmp_path / "job", 2, START + OWN_FAILURE, env=env) as workers:
        done = workers.join(timeout=60)
    assert [done[index].returncode for index in (0, 1)] == [70, 1], workers.output()
    assert "worker 1 failed: " in done[0].stderr and "not here" not in done[0].stdout + done[1].stdout
    reports = [json.loads((tmp_path / "reports" / f"{index}.json").read_text()) for index in (0, 1)]
    assert [report["caused_by"] for report in reports] == [1, None]


DISKS = """
import builtins, contextlib, shutil, warnings

disk = folder / f"disk{me}"  # not shared by the workers
manager = rx.train.CheckpointManager(checkpoint, disk / "saved", max_to_keep=3)
for number in (1.0, 2.0, 3.0):
    checkpoint.v.assign([number, number])
    strategy.run(lambda: checkpoint.total.assign(number + rid()))
    checkpoint.data.at = int(number) * 10 + me
    manager.save()

def damage(path):
    (path / "replicax.json").write_text("{}")

def restore(case, directory, use_manager=True):
    new = made()
    new.v.assign([0.5, 0.5])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            if use_manager:
                at = rx.train.CheckpointManager(new, directory, max_to_keep=3).restore_or_initialize()
            else:
                at = rx.train.latest_checkpoint(directory)
                new.restore(at)
            at = at and os.path.relpath(at, directory)
        except (rx.CheckpointError, FileNotFoundError) as error:
            at = f"{type(error).__name__}: {error}"
    texts = [str(warning.message) for warning in caught]
    told(case, [at, parts(new.v), parts(new.total), new.data.at, int(new.save_counter), texts])

for case, worker, harm in [
    ("empty", 1, shutil.rmtree),
    ("missing", 1, lambda path: shutil.rmtree(path / "ckpt-3")),
    ("damaged", 1, lambda path: damage(path / "ckpt-3")),
    ("behind", 0, lambda path: shutil.rmtree(path / "ckpt-3")),
]:
    for use_manager in (True, False):
        directory = disk / f"{case}{use_manager}"
        shutil.copytree(disk / "saved", directory)
        if me == worker:
            harm(directory)
        restore(case + (" for a manager" if use_manager else " for restore"), directory, use_manager)

directory = disk / "lost"
shutil.copytree(disk / "saved", directory)
for path in directory.glob("ckpt-*") if me else ():
    damage(path)
if me == 0:
    shutil.rmtree(directory)
restore("lost", directory)
restore("nothing", disk / "nothing")

# One read fails in a folder that all share.
shared = rx.train.CheckpointManager(checkpoint, folder / "shared", max_to_keep=3)
for number in (4.0, 5.0):
    checkpoint.v.assign([number, number])
    shared.save()

@contextlib.contextmanager
def failing_reads(name):
    open_file = builtins.open
    def fail(file, *rest, **kw):
        if name in str(file):
            raise OSError(5, "Input/output error", str(file))
        return open_file(file, *rest, **kw)
    builtins.open = fail
    yield
    builtins.open = open_file

with failing_reads("ckpt-5/") if me == 1 else contextlib.nullcontext():
    restore("shared", folder / "shared")

# The number of calls that a handler restores, where nothing else belongs to several workers.
def handle():
    calls = rx.train.CheckpointManager(rx.train.Checkpoint(x=np.zeros(1)), disk / "calls", max_to_keep=1)
    return calls, rx.experimental.PreemptionCheckpointHandler(strategy.cluster_resolver, calls)

calls, handler = handle()
for _ in range(3):
    handler.run(lambda: None)
calls.save()
if me == 0:
    shutil.rmtree(disk / "calls")
told("calls", handle()[1].total_run_calls)
"""


def test_all_workers_restore_the_same_checkpoint_whatever_is_on_their_disks(tmp_path):
    folder = tmp_path / "out"
    with Workers(tmp_path / "job", 2, START + DISKS, devices=2, env={"FOLDER": str(folder)}) as workers:
        done = workers.join(timeout=120)
    assert [worker.returncode for worker in done.values()] == [0, 0], workers.output()
    told = told_by(done)[""]
    for case, lacking in (("empty", 1), ("missing", 1), ("damaged", 1), ("behind", 0)):
        for me, worker in enumerate(told):
            at, v, total, position, saves, warnings = worker[f"{case} for a manager"]
            assert (at, v, position, saves) == ("ckpt-3", [[3.0, 3.0]] * 2, 30 + me, 3), case
            assert total == [[3.0, 4.0], [5.0, 6.0]][me]
            received = [text for text in warnings if f"of worker {1 - lacking}, and received" in text]
            assert len(received) == (me == lacking) and len(warnings) == (me == lacking) * (1 + (case == "damaged"))
            # Each worker restores what it finds: an error on both, which names both, and nothing is changed.
            error, v, _, _, saves, _ = worker[f"{case} for restore"]
            assert error.startswith("CheckpointError: The workers restore different checkpoints: worker 0 restores ")
            assert "ckpt-3" in error and ("nothing" if case == "empty" else "ckpt-2") in error
            assert "differs between worker 0 and worker 1" in error
            assert (v, saves) == ([[0.5, 0.5]] * 2, 0)
    for worker in told:
        assert worker["lost"][0].startswith("CheckpointError: No worker has a checkpoint that is whole")
        assert "worker 1: The checkpoint " in worker["lost"][0]
        assert worker["nothing"] == [None, [[0.5, 0.5]] * 2, [0.0, 0.0], 0, 0, []]
        assert worker["shared"][:2] == ["ckpt-5", [[5.0, 5.0]] * 2]
        assert worker["calls"] == 3


ONE_RESTORES = """
latest = folder / "ckpt"
if me == 0:
    saved = files.Saved([{"children": {"v": 1}}, {"children": {}, "key": "v"}],
                        {"v": np.float32([3.0, 4.0])}, "token", "save")
    with files.stage(str(latest), saved):
        pass
    checkpoint.restore(latest).expect_partial()
strategy.run(lambda: checkpoint.v.assign_add(rx.get_replica_context().all_reduce("SUM", jnp.ones(2))))
told("not here", checkpoint.v.numpy().tolist())
"""


def test_a_worker_that_does_not_restore_is_named_before_the_next_step(tmp_path):
    with Workers(tmp_path / "job", 2, START + ONE_RESTORES, env={"FOLDER": str(tmp_path / "out")}) as workers:
        done = workers.join(timeout=60)
    for worker in done.values():
        assert worker.returncode and "not here" not in worker.stdout
        assert 'worker 0 makes "a restore of a checkpoint"' in worker.stderr and "worker 1 makes" in worker.stderr


DIFFERENT = """
import warnings

checkpoint.save(folder / "ckpt")
rate = 0.1 if me else 0.2  # as of other arguments

@rx.function
def step():
    total = lambda: rx.get_replica_context().all_reduce("SUM", checkpoint.v.value())
    strategy.run(lambda: checkpoint.v.assign_sub(rate * total()))

step()
try:
    checkpoint.save(folder / "ckpt")
except rx.CheckpointError as error:
    told("refused", str(error))
told("there", [sorted(os.listdir(folder)), int(checkpoint.save_counter)])

with strategy.scope():
    loose = rx.Variable(jnp.zeros(100_000), copies_may_differ=True)
strategy.run(lambda: loose.assign(jnp.zeros(100_000).at[99_999].set(rate)))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    path = rx.train.Checkpoint(loose=loose).write(folder / "loose")
told("warned", [str(warning.message) for warning in caught])
"""


def test_a_save_names_a_variable_whose_copies_differ_between_workers(tmp_path):
    folder = tmp_path / "out"
    with Workers(tmp_path / "job", 2, START + DIFFERENT, env={"FOLDER": str(folder)}) as workers:
        done = workers.join(timeout=60)
    assert [worker.returncode for worker in done.values()] == [0, 0], workers.output()
    train = "The workers do not train the same values: (root)."
    for worker in told_by(done)[""]:
        assert worker["refused"].startswith(f"{train}v differs between worker 0 and worker 1. Nothing has been saved.")
        assert worker["there"] == [["checkpoint", "ckpt-1"], 1]
        (warning,) = worker["warned"]
        assert warning.startswith(f"{train}loose differs between worker 0 and worker 1. The checkpoint has the values")


AFTER_PROCESS_0 = """
import fcntl
lock = open(folder.parent / f"ends{me}", "w")
fcntl.flock(lock, fcntl.LOCK_EX)  # until this process ends
strategy.run(lambda: checkpoint.v.assign_add(rx.get_replica_context().all_reduce("SUM", jnp.ones(2))))
if me:
    fcntl.flock(open(folder.parent / "ends0", "w"), fcntl.LOCK_EX)  # process 0 has ended
    with rx.OneDeviceStrategy("CPU:0").scope():
        alone = rx.train.Checkpoint(v=rx.Variable(1.0), empty=rx.Variable(jnp.zeros((0, 2))))
    path = alone.write(folder / "alone")
    alone.v.assign(2.0)
    alone.read(path).assert_consumed()
    told("alone", float(alone.v))
"""


def test_checkpoints_of_one_worker_do_not_wait_for_process_0_that_has_ended(tmp_path):
    """Orbax asks the coordination service of the job, which ends with process 0, and it waits for an answer."""
    with Workers(tmp_path / "job", 2, START + AFTER_PROCESS_0, env={"FOLDER": str(tmp_path / "out")}) as workers:
        done = workers.join(timeout=60)
    assert [worker.returncode for worker in done.values()] == [0, 0], workers.output()
    assert told_by(done)[""][1]["alone"] == 1.0
