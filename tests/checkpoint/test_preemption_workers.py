"""Preempted jobs of several processes: all stop at one step, nothing is lost, and nobody waits for ever."""

from __future__ import annotations

import os
import random
import re
import signal
import textwrap

import pytest
from preemptions import finish, preempt
from processes import Workers

# `step()` needs all workers. A worker that is told to reads a line from its FIFO at the places that a test names.
START = """
import os, sys
import jax.numpy as jnp
import replicax as rx
from processes import mark

strategy = rx.MultiWorkerMirroredStrategy()
me = strategy.cluster_resolver.task_id
folder = os.environ["FOLDER"]
with strategy.scope():
    v = rx.Variable(0.0)
checkpoint = rx.train.Checkpoint(v=v)
Handler, Config = rx.experimental.PreemptionCheckpointHandler, rx.experimental.TerminationConfig

def make(**config):
    return Handler(strategy.cluster_resolver, checkpoint, os.path.join(folder, "ck"), Config(**config))

def step():
    strategy.run(lambda: v.assign_add(rx.get_replica_context().all_reduce("SUM", jnp.float32(1.0))))

def wait(name):
    mark(name)
    with open(os.path.join(folder, "fifo")) as file:
        file.read()
"""


@pytest.fixture
def folder(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    return tmp_path


def job(folder, program, count=3, **options):
    return Workers(folder / "job", count, START + textwrap.dedent(program), env={"FOLDER": str(folder)}, **options)


def let_go(folder):
    """Lets the worker that waits in `wait` go on."""
    with open(folder / "fifo", "w"):
        pass


def statuses(done):
    return [ended.returncode for ended in done.values()]


def last_lines(done):
    return [ended.stdout.splitlines()[-1] for ended in done.values()]


@pytest.mark.thorough
def test_at_random_moments_all_stop_at_one_step_and_nothing_is_lost(tmp_path):
    """SIGTERM to one worker or two; the last weights are those of a job that nobody has disturbed."""
    choice, expected = random.Random(5), [0, ["0x0.0p+0"] * 3]
    for run in range(2):
        seen, output = preempt(tmp_path / "preempted", run, choice)
        assert seen.at_one_step, output
        assert seen.begun == (expected,) * 3, output
        expected = seen.stopped[0]
    last = expected[0] + 5
    assert finish(tmp_path / "preempted", last) == finish(tmp_path / "undisturbed", last)


def test_the_step_that_some_have_begun_is_made_by_all(folder):
    """Worker 0 is between two steps; the others stand in the next one, in a collective that needs worker 0.

    All make that step and one more.
    """
    program = """
    def begun():
        mark("begun")
        step()

    handler = make(exit_fn=lambda: (print("at", handler.total_run_calls, float(v), flush=True), os._exit(7)))
    for number in range(1000):
        if me == 0 and number == 3:
            wait("begun")
        handler.run(begun if me and number == 3 else step)
    """
    with job(folder, program) as workers:
        workers.wait_for("begun")
        workers.send(1, signal.SIGTERM)
        workers.send(2, signal.SIGTERM)
        let_go(folder)
        done = workers.join()
    # Worker 0 may have gone on before it was asked.
    assert statuses(done) == [7, 7, 7] and len(set(last_lines(done))) == 1, workers.output()
    assert re.fullmatch(r"at \d+ [\d.]+", last_lines(done)[0]), workers.output()
    assert sorted(os.listdir(folder / "ck")) == ["checkpoint", "ckpt-1"]


def test_signals_while_saving_are_part_of_the_same_notice(folder):
    """A save that stands until all signals have come: a second one to the same worker, and one to another."""
    program = """
    saves = []
    def save():
        saves.append(1)
        if me == 1:
            wait("saving")
        manager.save()
    manager = rx.train.CheckpointManager(checkpoint, os.path.join(folder, "ck"), max_to_keep=None)
    handler = Handler(strategy.cluster_resolver, manager, termination_config=Config(save_fn=save))
    handler.run(step)
    mark("ready")
    try:
        while True:
            handler.run(step)
    finally:
        print(saves, handler.total_run_calls, float(v), flush=True)
    """
    with job(folder, program) as workers:
        workers.wait_for("ready")
        workers.send(1, signal.SIGTERM)
        workers.wait_for("saving", 1)
        for worker in (1, 1, 2, 0):
            workers.send(worker, signal.SIGTERM)
        let_go(folder)
        done = workers.join()
    assert statuses(done) == [42, 42, 42], workers.output()
    assert len(set(last_lines(done))) == 1 and last_lines(done)[0].startswith("[1] ")
    assert sorted(os.listdir(folder / "ck")) == ["checkpoint", "ckpt-1"]


FREE = """
    import time
    handler = make()
    mark("ready")
    while True:
        handler.run(lambda: time.sleep(0.01))  # so that a worker that goes on for a while leaves time to the others
"""


@pytest.mark.sampled(4, others="thorough")
@pytest.mark.parametrize("frozen", [2, 0])
@pytest.mark.parametrize("then", [None, signal.SIGKILL])
def test_a_worker_that_is_frozen_or_killed_during_the_agreement_is_named(folder, frozen, then):
    """The steps of this program need nobody, so the others wait for it at their gates alone."""
    with job(folder, FREE) as workers:
        workers.wait_for("ready")
        workers.send(frozen, signal.SIGSTOP)
        workers.send(1, signal.SIGTERM)
        if then is not None:
            workers.send(frozen, then)
        done = workers.join(timeout=60)
    for index, ended in done.items():
        if index != frozen:
            assert ended.returncode == 70, workers.output()
            assert f"worker {frozen} (127.0.0.1:" in ended.stderr, workers.output()
    assert not (folder / "ck" / "checkpoint").exists()


def test_a_worker_that_fails_while_the_others_save_is_named(folder):
    program = """
    def save():
        if me == 1:
            raise OSError(28, "No space left on device")
        checkpoint.save(os.path.join(folder, f"own{me}", "ck"))
    handler = make(save_fn=save)
    mark("ready")
    while True:
        handler.run(step)
    """
    with job(folder, program) as workers:
        workers.wait_for("ready")
        workers.send(2, signal.SIGTERM)
        done = workers.join()
    assert statuses(done) == [70, 1, 70], workers.output()
    assert all("worker 1 failed: OSError: [Errno 28]" in done[index].stderr for index in (0, 2)), workers.output()


def test_an_interrupt_while_saving_ends_all(folder):
    program = """
    def save():
        if me == 1:
            wait("saving")
        checkpoint.save(os.path.join(folder, "ck", "ckpt"))
    handler = make(save_fn=save)
    handler.run(step)
    mark("ready")
    while True:
        handler.run(step)
    """
    with job(folder, program) as workers:
        workers.wait_for("ready")
        workers.send(0, signal.SIGTERM)
        workers.wait_for("saving", 1)
        workers.send(1, signal.SIGINT)
        done = workers.join()
    assert statuses(done) == [70, -signal.SIGINT, 70], workers.output()
    assert "worker 1 failed: KeyboardInterrupt" in done[0].stderr, workers.output()


@pytest.mark.sampled(2, others="thorough")
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_signal_before_the_first_and_after_the_last_step(folder, when):
    program = """
    handler = make(exit_fn=lambda: (print("left at", handler.total_run_calls, flush=True), sys.exit(42)))
    if os.environ["WHEN"] == "before":
        mark("ready") if me else wait("ready")
    for _ in range(3):
        handler.run(step)
    if os.environ["WHEN"] == "after":
        mark("ready") if me else wait("ready")
        strategy.run(lambda: rx.get_replica_context().all_reduce("SUM", jnp.float32(1.0)))
    print("ends at", handler.total_run_calls, flush=True)
    """
    with job(folder, program, count=2, each=[{"WHEN": when}] * 2) as workers:
        workers.wait_for("ready")
        workers.send(0, signal.SIGTERM)
        let_go(folder)
        done = workers.join()
    assert len(set(last_lines(done))) == 1, workers.output()
    if when == "before":  # the others may have begun their first step
        assert statuses(done) == [42] * 2 and last_lines(done)[0] in ("left at 1", "left at 2"), workers.output()
    else:
        assert statuses(done) == [0] * 2 and last_lines(done)[0] == "ends at 3", workers.output()


@pytest.mark.thorough
def test_a_function_on_one_worker_ends_a_loop_of_ones_own_whose_variables_nobody_shares(folder):
    """Though each worker could save alone, they save one checkpoint together; then both go on as one."""
    program = """
    checkpoint = rx.train.Checkpoint(steps=(steps := rx.Variable(0)))
    def make(**config):
        return Handler(strategy.cluster_resolver, checkpoint, os.path.join(folder, "ck"), Config(**config))
    handler = make(termination_watcher_fn=(lambda: int(steps) >= 10) if me == 1 else None)
    print("begins at", handler.total_run_calls, int(steps), flush=True)
    if handler.total_run_calls:
        sys.exit()
    try:
        while True:
            step()
            steps.assign_add(1)
            handler.save_checkpoint_if_preempted()
    finally:
        print("stops at", handler.total_run_calls, int(steps), flush=True)
    """
    with job(folder, program, count=2) as workers:
        done = workers.join()
    assert statuses(done) == [42] * 2 and len(set(last_lines(done))) == 1, workers.output()
    calls, steps = last_lines(done)[0].removeprefix("stops at ").split()
    assert calls == steps and int(steps) >= 10
    assert sorted(os.listdir(folder / "ck")) == ["checkpoint", "ckpt-1"]
    with job(folder, program, count=2) as workers:
        done = workers.join()
    assert last_lines(done) == [f"begins at {calls} {steps}"] * 2, workers.output()


@pytest.mark.thorough
def test_a_grace_period_is_used_on_all_workers(folder):
    """The second signal to the worker that was told first ends it."""
    program = """
    def save():
        print("saves", handler.total_run_calls, flush=True)
        manager.save()
        mark("saved")
    manager = rx.train.CheckpointManager(checkpoint, os.path.join(folder, "ck"), max_to_keep=None)
    config = Config(save_fn=save, grace_period=3600.0)
    handler = Handler(strategy.cluster_resolver, manager, termination_config=config)
    handler.run(step)
    mark("ready")
    while True:
        handler.run(step)
    """
    with job(folder, program, count=2) as workers:
        workers.wait_for("ready")
        for worker in (1, 0):  # one each, as from the launcher
            workers.send(worker, signal.SIGTERM)
        workers.wait_for("saved")
        workers.send(1, signal.SIGTERM)
        done = workers.join()
    assert statuses(done) == [42] * 2, workers.output()
    saves = [[line for line in ended.stdout.splitlines() if line.startswith("saves")] for ended in done.values()]
    assert saves[0] == saves[1] and len(saves[0]) == 2, workers.output()
    assert sorted(os.listdir(folder / "ck")) == ["checkpoint", "ckpt-1", "ckpt-2"]


def test_a_forked_child_of_a_worker_ends_by_the_signal(folder):
    """As data loaders are ended."""
    program = """
    import multiprocessing, signal, threading
    handler = make()
    handler.run(step)
    context = multiprocessing.get_context("fork")
    begun = context.Event()
    child = context.Process(target=lambda: (begun.set(), threading.Event().wait()))
    child.start()
    begun.wait()
    child.terminate()
    child.join()
    handler.run(step)
    print(child.exitcode, signal.getsignal(signal.SIGTERM).__name__, flush=True)
    """
    with job(folder, program, count=2) as workers:
        done = workers.join()
    assert last_lines(done) == ["-15 on_sigterm"] * 2 and statuses(done) == [0, 0], workers.output()


def test_one_worker_alone(folder):
    program = """
    handler = make()
    handler.run(step)
    mark("ready")
    while True:
        handler.run(step)
    """
    with job(folder, program, count=1) as workers:
        workers.wait_for("ready")
        workers.send(0, signal.SIGTERM)
        done = workers.join()
    assert statuses(done) == [42], workers.output()
    assert (folder / "ck" / "ckpt-1").exists()


def test_a_watcher_on_every_worker_hears_of_a_notice(folder):
    program = """
    import time
    watcher = rx.experimental.PreemptionWatcher()
    handler = make()
    handler.run(step)
    mark("ready")
    while watcher.preemption_message is None:
        time.sleep(0.01)
    print(watcher.preemption_message, flush=True)
    watcher.block_until_worker_exit()  # on all workers
    """
    with job(folder, program, count=2) as workers:
        workers.wait_for("ready")
        workers.send(1, signal.SIGTERM)
        done = workers.join()
    assert last_lines(done) == ["worker 1 has received SIGTERM"] * 2 and statuses(done) == [0, 0], workers.output()


def test_a_signal_to_a_worker_that_is_ending_begins_nothing(folder):
    """As the launcher sends it to a worker whose `exit_fn` takes long."""
    program = """
    handler = make(exit_fn=lambda: (me or wait("leaving"), sys.exit(42)))
    mark("ready")
    while True:
        handler.run(step)
    """
    with job(folder, program, count=2) as workers:
        workers.wait_for("ready")
        workers.send(1, signal.SIGTERM)
        workers.wait_for("leaving", 0)
        workers.send(0, signal.SIGTERM)
        let_go(folder)
        done = workers.join()
    assert statuses(done) == [42, 42], workers.output()
    assert done[0].stderr.count("has received SIGTERM") == 1, workers.output()
