"""Asynchronous saves: what they write, what waits for them, and where their errors are raised."""

from __future__ import annotations

import contextlib
import os
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from processes import Workers, told_by
from strategies import WORKERS, mirrored

import replicax as rx
from replicax._checkpoint import files
from replicax._job import background

pytestmark = pytest.mark.skipif(WORKERS > 1, reason="jobs have tests of their own")

Checkpoint, CheckpointManager = rx.train.Checkpoint, rx.train.CheckpointManager
ASYNC = rx.train.CheckpointOptions(enable_async=True)
stage = files.stage


@pytest.fixture
def disk(monkeypatch):
    """An event that has to be set for a checkpoint to be written."""
    ready = threading.Event()

    @contextlib.contextmanager
    def stage_later(*args, **kwargs):
        assert ready.wait(60)
        with stage(*args, **kwargs):
            yield

    monkeypatch.setattr(files, "stage", stage_later)
    yield ready
    ready.set()
    with contextlib.suppress(Exception):  # of a test that has failed
        background.wait()


def bits(arrays):
    return [np.asarray(array).tobytes() for array in arrays]


def test_both_spellings_of_the_option_are_one():
    """As in TensorFlow 2.21."""
    for options in (ASYNC, rx.train.CheckpointOptions(experimental_enable_async_checkpoint=True)):
        assert options.enable_async and options.experimental_enable_async_checkpoint
    assert not rx.train.CheckpointOptions().enable_async


@pytest.mark.parametrize("shard", [False, True])
def test_what_changes_after_the_save_does_not_change_the_checkpoint(shard, tmp_path, disk):
    strategy = rx.MirroredStrategy([f"CPU:{i}" for i in range(4)], shard_variables=shard)
    with strategy.scope():
        weights = rx.Variable(jnp.arange(4 * 1024.0).reshape(4, 1024))
        local = rx.Variable(
            jnp.zeros(2), synchronization=rx.VariableSynchronization.ON_READ, aggregation=rx.VariableAggregation.SUM
        )
        optimizer = rx.Optimizer(optax.adam(0.1), weights, reduce_op="MEAN")
    host, donated = np.arange(3.0), jnp.arange(5.0)
    checkpoint = Checkpoint(weights=weights, local=local, optimizer=optimizer, host=host, donated=donated)

    def replica_step():
        optimizer.apply_gradients(jnp.sin(weights.value()))
        local.assign_add(jnp.ones(2) * (1 + rx.get_replica_context().replica_id_in_sync_group))

    step = rx.function(lambda: strategy.run(replica_step))

    def values():
        arrays = [variable.numpy() for variable in (weights, local, *optimizer.variables)]
        return bits([*jax.tree.leaves(arrays), checkpoint.host, checkpoint.donated])

    step()
    before = values()
    path = checkpoint.write(tmp_path / "ckpt", ASYNC)
    assert not os.path.exists(path)
    for _ in range(2):
        step()
    host[:] = -1
    jax.jit(lambda x: x + 1, donate_argnums=0)(donated)
    weights.assign(weights.value() * 2)
    checkpoint.donated = jnp.zeros(5)
    disk.set()
    checkpoint.read(path).assert_consumed()
    assert values() == before


def test_a_second_save_waits_for_the_first_and_a_manager_deletes_what_is_older_than_a_whole_one(tmp_path, monkeypatch):
    v = rx.Variable(0.0)
    manager = CheckpointManager(Checkpoint(v=v), tmp_path, max_to_keep=1)
    under_way, folders = [], []

    @contextlib.contextmanager
    def watched_stage(path, *args, **kwargs):
        under_way.append(path)
        assert len(under_way) == 1
        folders.append(sorted(name for name in os.listdir(tmp_path) if name.startswith("ckpt")))
        with stage(path, *args, **kwargs):
            folders.append(sorted(name for name in os.listdir(tmp_path) if name.startswith("ckpt")))
            under_way.remove(path)
            yield

    monkeypatch.setattr(files, "stage", watched_stage)
    for number in range(1, 4):
        v.assign(number)
        assert manager.save(options=ASYNC) == str(tmp_path / f"ckpt-{number}")
    assert [os.path.basename(path) for path in manager.checkpoints] == ["ckpt-3"]
    assert folders == [[], [], ["ckpt-1"], ["ckpt-1"], ["ckpt-2"], ["ckpt-2"]]
    manager.restore_or_initialize()
    assert float(v) == 3.0


WAITING_CALLS = {
    "save": lambda checkpoint, manager, path: checkpoint.save(f"{path}-next"),
    "write": lambda checkpoint, manager, path: checkpoint.write(f"{path}-next"),
    "restore": lambda checkpoint, manager, path: checkpoint.restore(path),
    "read": lambda checkpoint, manager, path: checkpoint.read(path),
    "sync": lambda checkpoint, manager, path: checkpoint.sync(),
    "load_checkpoint": lambda checkpoint, manager, path: rx.train.load_checkpoint(path),
    "latest_checkpoint": lambda checkpoint, manager, path: rx.train.latest_checkpoint(os.path.dirname(path)),
    "get_checkpoint_state": lambda checkpoint, manager, path: rx.train.get_checkpoint_state(os.path.dirname(path)),
    "manager.save": lambda checkpoint, manager, path: manager.save(),
    "manager.sync": lambda checkpoint, manager, path: manager.sync(),
    "manager.checkpoints": lambda checkpoint, manager, path: manager.checkpoints,
    "manager.latest_checkpoint": lambda checkpoint, manager, path: manager.latest_checkpoint,
    "manager.restore_or_initialize": lambda checkpoint, manager, path: manager.restore_or_initialize(),
}


@pytest.mark.parametrize("call", WAITING_CALLS)
def test_an_error_is_raised_once_by_the_next_call(call, tmp_path):
    checkpoint = Checkpoint(v=rx.Variable(1.0))
    manager = CheckpointManager(checkpoint, tmp_path / "managed", max_to_keep=2)
    path = tmp_path / "ckpt"
    path.mkdir()
    (path / "of the user").touch()
    assert checkpoint.write(path, ASYNC) == str(path)
    with pytest.raises(FileExistsError, match="is no checkpoint") as raised:
        WAITING_CALLS[call](checkpoint, manager, str(path))
    assert raised.value.__notes__[0].startswith(f"This is the error of the asynchronous save of {path}.")
    checkpoint.sync()
    (path / "of the user").unlink()
    checkpoint.write(path, ASYNC)
    WAITING_CALLS[call](checkpoint, manager, str(path))


def test_a_wait_after_an_interrupted_one_still_waits(tmp_path, disk):
    """A `Thread.join` that Ctrl-C interrupts marks a running thread as ended, before Python 3.13."""
    checkpoint = Checkpoint(v=rx.Variable(1.0))
    path = checkpoint.save(tmp_path / "ckpt", ASYNC)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        checkpoint.sync()
    threading.Timer(0.2, disk.set).start()
    checkpoint.sync()
    assert rx.train.latest_checkpoint(tmp_path) == path


def test_a_relative_path_is_that_of_the_folder_at_the_save(tmp_path, disk, monkeypatch):
    for name in "ab":
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "a")
    checkpoint = Checkpoint(v=rx.Variable(1.0))
    checkpoint.save("ckpt", ASYNC)
    monkeypatch.chdir(tmp_path / "b")
    disk.set()
    with pytest.raises(rx.CheckpointError, match=r"changed from \S+a to \S+b .* is whole, but not in the list"):
        checkpoint.sync()
    assert os.listdir(tmp_path / "b") == []
    v = rx.Variable(0.0)
    Checkpoint(v=v).restore(tmp_path / "a" / "ckpt-1")
    assert float(v) == 1.0


def test_a_failed_save_keeps_its_number_and_what_was_there(tmp_path, monkeypatch):
    v = rx.Variable(1.0)
    manager = CheckpointManager(Checkpoint(v=v), tmp_path, max_to_keep=1)
    manager.save(options=ASYNC)
    manager.sync()
    full = OSError(28, "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(files, "checksums", lambda folder: (_ for _ in ()).throw(full))
        manager.save(options=ASYNC)
        pytest.raises(rx.CheckpointError, manager.sync).match("ckpt-2 could not be written, and what was there is as")
    assert manager.checkpoints == [str(tmp_path / "ckpt-1")] and sorted(os.listdir(tmp_path)) == [
        "checkpoint",
        "ckpt-1",
    ]
    assert manager.save() == str(tmp_path / "ckpt-3") == manager.latest_checkpoint


def test_a_save_that_is_not_due_does_not_wait(tmp_path, disk):
    steps = rx.Variable(0)
    manager = CheckpointManager(
        Checkpoint(steps=steps), tmp_path, max_to_keep=2, step_counter=steps, checkpoint_interval=10
    )
    assert manager.save(options=ASYNC)
    steps.assign_add(1)
    assert manager.save(options=ASYNC) is None and os.listdir(tmp_path) == []


def test_callbacks_run_once_the_checkpoint_is_whole(tmp_path, disk):
    seen = []
    options = rx.train.CheckpointOptions(
        enable_async=True,
        experimental_write_callbacks=[
            lambda path: seen.append(path == rx.train.latest_checkpoint(tmp_path)),
            lambda: seen.append(threading.current_thread() is threading.main_thread()),
            lambda: Checkpoint(v=rx.Variable(2.0)).write(tmp_path / "by callback", ASYNC),
        ],
    )
    checkpoint = Checkpoint(v=rx.Variable(1.0))
    checkpoint.save(tmp_path / "ckpt", options)
    assert seen == []
    disk.set()
    checkpoint.sync()
    assert seen == [True, False] and os.path.isdir(tmp_path / "by callback")


def test_a_preempted_program_ends_when_its_last_save_is_whole(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    v = rx.Variable(0.0)
    manager = CheckpointManager(Checkpoint(v=v), tmp_path / "managed", max_to_keep=2)
    there = []
    config = rx.experimental.TerminationConfig(exit_fn=lambda: there.append(os.listdir(tmp_path / "managed")))
    handler = rx.experimental.PreemptionCheckpointHandler(None, manager, termination_config=config)
    (tmp_path / "of the user").mkdir()
    (tmp_path / "of the user" / "file").touch()
    try:
        signal.raise_signal(signal.SIGTERM)
        handler.save_checkpoint_if_preempted(options=ASYNC)
        manager.checkpoint.write(tmp_path / "of the user", ASYNC)  # fails, which must not prevent the last save
        v.assign(1.0)
        with pytest.warns(
            UserWarning, match="An asynchronous save failed before this worker's last one. .*no checkpoint"
        ):
            handler.save_checkpoint_if_preempted(options=ASYNC)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert [sorted(names) for names in there] == [["checkpoint", "ckpt-1"]]
    v.assign(5.0)
    manager.restore_or_initialize()
    assert float(v) == 1.0


PROGRAM = """
import os, sys
import jax.numpy as jnp
import replicax as rx

v = rx.Variable(jnp.arange(1000.0))
checkpoint = rx.train.Checkpoint(v=v)
checkpoint.save(os.environ["FOLDER"] + "/ckpt", rx.train.CheckpointOptions(enable_async=True))
v.assign(v.value() * 0)
"""


@pytest.mark.parametrize("end", ["", "1 / 0", "sys.exit(3)"])
def test_the_end_of_the_program_waits(end, tmp_path, run_python):
    done = run_python(PROGRAM + end, env={"FOLDER": str(tmp_path / "saved")})
    assert done.returncode == {"": 0, "1 / 0": 1, "sys.exit(3)": 3}[end], done.stderr
    assert ("ZeroDivisionError" in done.stderr) == (end == "1 / 0")
    path = rx.train.latest_checkpoint(tmp_path / "saved")
    assert rx.train.load_variable(path, "v/.ATTRIBUTES/VARIABLE_VALUE").tolist() == list(range(1000))


def test_a_save_after_the_main_thread_raises(tmp_path, run_python):
    done = run_python(
        f"""
        import sys, threading
        import replicax as rx
        checkpoint, options = rx.train.Checkpoint(v=rx.Variable(1.0)), rx.train.CheckpointOptions(enable_async=True)
        checkpoint.save({str(tmp_path / "first")!r}, options)
        def save():
            threading.main_thread().join()
            checkpoint.sync()  # the end waits for the first save, too
            try:
                checkpoint.save({str(tmp_path / "late")!r}, options)
            except rx.CheckpointError as error:
                print(error, flush=True)
        threading.Thread(target=save).start()
        """
    )
    assert "The main thread ended before the asynchronous save of" in done.stdout, done.stdout + done.stderr


def test_a_program_whose_last_save_fails_shows_the_error_and_ends_with_status_1(tmp_path, run_python):
    (tmp_path / "saved" / "ckpt-1").mkdir(parents=True)
    (tmp_path / "saved" / "ckpt-1" / "of the user").touch()
    hook = "import atexit; atexit.register(print, 'the hook of the program')"
    done = run_python(PROGRAM + hook, env={"FOLDER": str(tmp_path / "saved")})
    assert done.returncode == 1 and done.stdout == "the hook of the program\n", done.stderr
    assert "FileExistsError" in done.stderr and "the asynchronous save of" in done.stderr


JOB = """
import json, os, pathlib, sys
import jax, jax.numpy as jnp, numpy as np
import replicax as rx
from replicax._checkpoint import files

strategy = rx.MultiWorkerMirroredStrategy()
me = strategy.cluster_resolver.task_id
folder = pathlib.Path(os.environ["FOLDER"])
ASYNC = rx.train.CheckpointOptions(enable_async=True)

def told(name, value):
    print("told", json.dumps(["", name, value]), flush=True)

with strategy.scope():
    v = rx.Variable([1.0, 2.0])
    total = rx.Variable(
        0.0, synchronization=rx.VariableSynchronization.ON_READ, aggregation=rx.VariableAggregation.SUM
    )
checkpoint = rx.train.Checkpoint(v=v, total=total)

@rx.function
def step():
    def replica_step():
        context = rx.get_replica_context()
        v.assign_add(context.all_reduce("SUM", jnp.ones(2)))
        total.assign_add(context.replica_id_in_sync_group + 1.0)
    strategy.run(replica_step)

def values():
    return [v.numpy().tolist(), float(total)]

def caught(call, *args):
    try:
        return call(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"

# Steps go on during a save to one path for all; `latest_checkpoint` waits on the worker that does not write, too.
manager = rx.train.CheckpointManager(checkpoint, folder / "shared", max_to_keep=2)
for _ in range(3):
    step()
    saved, path = values(), manager.save(options=ASYNC)
    for _ in range(5):
        step()
latest = rx.train.latest_checkpoint(folder / "shared")
checkpoint.restore(latest)
told("shared", [os.path.basename(latest), sorted(os.listdir(folder / "shared")), values() == saved])

# To paths of their own.
saved = values()
path = checkpoint.write(folder / f"of{me}" / "ckpt", ASYNC)
step()
checkpoint.read(path)
told("own", values()[0] == saved[0])

# To one path where the disk is not shared (which is played here): each worker has a copy.
written, stage, token_at = [], files.stage, files.token_at
files.token_at = lambda path: None
files.stage = lambda path, *rest, **kw: (written.append(path), stage(path, *rest, **kw))[1]
checkpoint.write(folder / "disks", ASYNC)
step()
checkpoint.sync()
told("disks", [os.path.basename(path) for path in written])
files.stage, files.token_at = stage, token_at

# An error of one worker is raised on all by their next calls.
def fail(*args, **kwargs):
    raise OSError(28, "No space left on device")
files.stage = fail if me == 0 else stage
manager.save(options=ASYNC)
step()
told("error", caught(rx.train.latest_checkpoint, folder / "shared"))
files.stage = stage
told("again", [os.path.basename(manager.save(options=ASYNC)), os.path.basename(manager.latest_checkpoint)])
told("options", caught(checkpoint.write, folder / "one", ASYNC if me else None))

# A worker that fails waits for the save before it tells the others.
v.assign([7.0, 8.0])
checkpoint.write(folder / "last", ASYNC)
if me == 1:
    raise ArithmeticError("worker 1 is at its end")
while True:
    step()
"""


def test_workers_save_together_while_they_train(tmp_path):
    folder = tmp_path / "out"
    with Workers(tmp_path / "job", 2, JOB, devices=2, env={"FOLDER": str(folder)}) as workers:
        done = workers.join(timeout=120)
    assert [done[index].returncode for index in (0, 1)] == [70, 1], workers.output()
    told = told_by({index: worker._replace(returncode=0) for index, worker in done.items()})[""]
    for worker, value in enumerate(told):
        assert value["shared"] == ["ckpt-3", ["checkpoint", "ckpt-2", "ckpt-3"], True]
        assert value["own"] is True and value["disks"] == ["disks"]
        assert "worker 0: OSError: [Errno 28] No space left on device" in value["error"]
        assert value["error"].startswith(["CheckpointError", "CheckpointFailedElsewhere"][worker])
        assert value["again"] == ["ckpt-5", "ckpt-5"]
        assert "All workers must save with the same `enable_async`" in value["options"]
    assert "ArithmeticError: worker 1 is at its end" in done[1].stderr
    with mirrored(2).scope():
        v = rx.Variable([0.0, 0.0])
    Checkpoint(v=v).read(folder / "last").expect_partial()
    assert v.numpy().tolist() == [7.0, 8.0]
