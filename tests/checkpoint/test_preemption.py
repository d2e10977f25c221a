"""`PreemptionCheckpointHandler` in one process: what is saved at a notice, and how a new handler goes on."""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import threading
import types

import jax.numpy as jnp
import pytest
from strategies import over

import replicax as rx

Handler, Config = rx.experimental.PreemptionCheckpointHandler, rx.experimental.TerminationConfig


@pytest.fixture(autouse=True)
def sigterm():
    """SIGTERM as it was, when the test is over."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def notice():
    signal.raise_signal(signal.SIGTERM)


class Left(Exception):
    """Raised by an exit_fn."""


def leave():
    raise Left


@over(processes=1)  # those of several agree on a step, which test_preemption_workers.py is about
def test_a_signal_saves_after_the_next_step_and_a_new_handler_goes_on(make, tmp_path):
    strategy = make()

    def made():
        with strategy.scope():
            variable = rx.Variable(jnp.zeros(2), aggregation=rx.VariableAggregation.MEAN)
        checkpoint = rx.train.Checkpoint(variable=variable)
        return variable, Handler(None, checkpoint, tmp_path), rx.function(lambda: strategy.run(increment, (variable,)))

    def increment(variable):
        variable.assign_add([1.0, 2.0])

    variable, handler, step = made()
    handler.run(step)
    handler.run(step)
    notice()
    handler.run(step)
    with pytest.raises(SystemExit) as ended:
        handler.run(step)
    assert ended.value.code == 42 and handler.total_run_calls == 3
    assert sorted(os.listdir(tmp_path)) == ["checkpoint", "ckpt-1"]
    variable, handler, step = made()
    assert handler.total_run_calls == 3 and variable.numpy().tolist() == [3.0, 6.0]
    handler.run(step)
    assert handler.total_run_calls == 4 and variable.numpy().tolist() == [4.0, 8.0]


def made(folder, *config, **more):
    variable = rx.Variable(0.0)
    return variable, Handler(None, rx.train.Checkpoint(v=variable), folder, Config(*config, **more))


def test_a_signal_before_the_first_step_saves_after_it(tmp_path):
    variable, handler = made(tmp_path, exit_fn=leave)
    notice()
    handler.run(variable.assign, 5.0)
    pytest.raises(Left, handler.run, variable.assign, 6.0)
    again, handler = made(tmp_path)
    assert float(again) == 5.0 and handler.total_run_calls == 1


def test_a_signal_during_a_step_lets_it_end(tmp_path):
    variable, handler = made(tmp_path, exit_fn=leave)

    def step():
        variable.assign_add(1.0)
        notice()
        return float(variable.assign_add(1.0))

    assert handler.run(step) == 2.0 and handler.total_run_calls == 1
    handler.run(lambda: None)
    variable.assign(2.5)  # between the steps
    pytest.raises(Left, handler.run, step)
    again, handler = made(tmp_path)
    assert float(again) == 2.5 and handler.total_run_calls == 2


def test_a_signal_after_the_last_step_is_heeded_at_the_end_of_the_scope_alone(tmp_path):
    variable, handler = made(tmp_path / "a", exit_fn=leave)
    handler.run(variable.assign, 1.0)
    notice()
    assert os.listdir(tmp_path / "a") == []
    with pytest.raises(Left), handler.watch_preemption_scope():
        handler.run(variable.assign, 2.0)
    assert float(made(tmp_path / "a")[0]) == 2.0
    variable, handler = made(tmp_path / "b", exit_fn=leave)
    with pytest.raises(Left), handler.watch_preemption_scope():
        handler.run(variable.assign, 3.0)
        notice()
    assert float(made(tmp_path / "b")[0]) == 3.0
    with pytest.raises(ZeroDivisionError), handler.watch_preemption_scope():
        notice()
        1 // 0  # noqa: B018
    handler.run(variable.assign, 4.0)
    pytest.raises(Left, handler.run, variable.assign, 5.0)


def test_a_loop_of_ones_own_counts_the_step_that_is_saved(tmp_path):
    variable, handler = made(tmp_path, exit_fn=leave)
    with pytest.raises(Left):
        for step in range(handler.total_run_calls, 9):
            variable.assign_add(1.0)
            if step == 4:
                notice()
            handler.save_checkpoint_if_preempted()
    variable, handler = made(tmp_path)
    assert handler.total_run_calls == 6 and float(variable) == 6.0


@pytest.mark.parametrize("taken", [False, True])
def test_a_batch_that_is_taken_and_not_trained_is_taken_again(taken, tmp_path):
    """Taken in the step, or as its argument; and the count between the steps is saved as it is then."""

    def train(interrupt_at=None):
        total, epochs = rx.Variable(0), rx.Variable(0)
        iterator = iter(rx.MirroredStrategy(["CPU:0"]).experimental_distribute_dataset(rx.data.Dataset.range(100)))
        checkpoint = rx.train.Checkpoint(total=total, epochs=epochs, iterator=iterator)
        handler = Handler(None, checkpoint, tmp_path, Config(exit_fn=leave))
        for step in range(handler.total_run_calls, 20):
            if step == interrupt_at:
                notice()
            if taken:
                handler.run(total.assign_add, next(iterator))
            else:
                handler.run(lambda: total.assign_add(next(iterator)))
            epochs.assign_add(1)
        return int(total), int(epochs)

    pytest.raises(Left, train, interrupt_at=4)
    pytest.raises(Left, train, interrupt_at=11)
    assert train() == (sum(range(20)), 20)


def test_the_manager_and_its_interval_and_arguments(tmp_path):
    variable, steps = rx.Variable(0.0), rx.Variable(0)
    checkpoint = rx.train.Checkpoint(v=variable, steps=steps)
    manager = rx.train.CheckpointManager(
        checkpoint, tmp_path, max_to_keep=3, step_counter=steps, checkpoint_interval=100
    )
    handler = Handler(None, manager, termination_config=Config(exit_fn=leave))
    assert manager.save() is not None
    handler.run(steps.assign_add, 1)
    handler.run(steps.assign_add, 1)
    notice()
    handler.run(steps.assign_add, 1)
    pytest.raises(Left, handler.save_checkpoint_if_preempted, checkpoint_number=77)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint", "ckpt-1", "ckpt-77"]
    assert rx.train.load_variable(tmp_path, "steps/.ATTRIBUTES/VARIABLE_VALUE") == 3


def test_the_programs_own_checkpoints_have_the_count_too(tmp_path):
    variable = rx.Variable(0.0)
    manager = rx.train.CheckpointManager(rx.train.Checkpoint(v=variable), tmp_path, max_to_keep=1)
    handler = Handler(None, manager)
    for _ in range(7):
        handler.run(variable.assign_add, 1.0)
    manager.save()
    assert made(tmp_path)[1].total_run_calls == 7


def test_a_save_fn_is_called_in_place_of_the_manager(tmp_path):
    got = []
    variable, handler = made(tmp_path, exit_fn=leave, save_fn=lambda *args, **kwargs: got.append((args, kwargs)))
    notice()
    handler.save_checkpoint_if_preempted(2, why="preempted")
    pytest.raises(Left, handler.save_checkpoint_if_preempted, 3, why="preempted")
    handler.run(variable.assign, 0.0)
    notice()
    handler.run(variable.assign, 1.0)
    pytest.raises(Left, handler.run, variable.assign, 1.0)
    assert got == [((3,), {"why": "preempted"}), ((), {})] and os.listdir(tmp_path) == []


def test_a_function_that_returns_true_is_a_notice(tmp_path):
    asked = threading.Event()

    def watcher():
        asked.set()
        return True

    variable, handler = made(tmp_path, watcher, leave)
    assert asked.wait(60.0)
    with pytest.raises(Left):
        while True:
            handler.run(variable.assign_add, 1.0)
    assert float(made(tmp_path)[0]) == float(variable)


def test_what_the_watcher_function_raises_comes_out_of_the_next_step(tmp_path):
    variable, handler = made(tmp_path, lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        while True:
            handler.run(variable.assign_add, 1.0)


def test_where_the_exit_fn_returns_the_step_is_made_and_a_later_signal_is_heeded(tmp_path):
    exits = []
    variable, handler = made(tmp_path, exit_fn=lambda: exits.append(float(variable)))
    for step in range(6):
        if step in (1, 3):
            notice()
        handler.run(variable.assign_add, 1.0)
    assert exits == [2.0, 4.0] and handler.total_run_calls == 6
    assert sorted(os.listdir(tmp_path)) == ["checkpoint", "ckpt-2"]


def test_in_a_grace_period_training_goes_on_and_a_second_signal_ends_it(tmp_path):
    variable, handler = made(tmp_path, exit_fn=leave, grace_period=3600.0)
    notice()
    for _ in range(5):
        handler.run(variable.assign_add, 1.0)
    assert float(made(tmp_path)[0]) == 1.0
    notice()
    handler.run(variable.assign_add, 1.0)
    pytest.raises(Left, handler.run, variable.assign_add, 1.0)
    again, handler = made(tmp_path)
    assert float(again) == 6.0 and handler.total_run_calls == 6


def test_a_grace_period_ends_by_itself(tmp_path, monkeypatch):
    """A clock that goes by a second at each look."""
    seconds = itertools.count()
    clock = types.SimpleNamespace(monotonic=lambda: float(next(seconds)))
    for module in ("_job.agree_on_step", "_checkpoint.preemption"):
        monkeypatch.setattr(f"replicax.{module}.time", clock)
    variable, handler = made(tmp_path, exit_fn=leave, grace_period=100.0)
    for _ in range(10):
        handler.run(variable.assign_add, 1.0)
    notice()
    with pytest.raises(Left):
        while True:
            handler.run(variable.assign_add, 1.0)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint", "ckpt-2"]
    # A save takes a second here, and a step one: three saves and six steps are left of the 100.
    assert 10 + 80 < float(variable) == float(made(tmp_path)[0]) < 10 + 100


def test_an_interrupt_during_the_save_comes_out_and_the_next_step_saves_again(tmp_path):
    interrupts = [KeyboardInterrupt]

    def save():
        if interrupts:
            raise interrupts.pop()
        saved.append(float(variable))

    saved = []
    variable, handler = made(tmp_path, exit_fn=leave, save_fn=save)
    notice()
    handler.run(variable.assign_add, 1.0)
    pytest.raises(KeyboardInterrupt, handler.run, variable.assign_add, 1.0)
    assert not saved and float(variable) == 1.0
    pytest.raises(Left, handler.run, variable.assign_add, 1.0)
    assert saved == [1.0]


def test_a_signal_during_the_save_is_part_of_the_same_notice(tmp_path):
    saves = []
    variable, handler = made(tmp_path, exit_fn=lambda: None, save_fn=lambda: (saves.append(1), notice(), notice()))
    notice()
    for _ in range(4):
        handler.run(variable.assign_add, 1.0)
    assert saves == [1] and float(variable) == 4.0


def test_a_signal_ends_the_process_when_the_handler_is_gone(run_python, tmp_path):
    done = run_python(f"""
import os, signal
import replicax as rx
handler = rx.experimental.PreemptionCheckpointHandler(None, rx.train.Checkpoint(v=rx.Variable(0.0)), {str(tmp_path)!r})
os.kill(os.getpid(), signal.SIGTERM)
print("alive", flush=True)
del handler
os.kill(os.getpid(), signal.SIGTERM)
print("not reached", flush=True)
""")
    assert done.returncode == -signal.SIGTERM and done.stdout == "alive\n", done.stderr


def test_made_in_another_thread_the_handler_leaves_the_signal_alone_and_says_so(tmp_path):
    before, made_there = signal.getsignal(signal.SIGTERM), []

    def make():
        with pytest.warns(UserWarning, match="only if it is made in the main thread"):
            made_there.append(made(tmp_path))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert made_there and signal.getsignal(signal.SIGTERM) is before


def test_a_watcher_tells_of_the_signal(tmp_path):
    earlier = rx.experimental.PreemptionWatcher()
    _, handler = made(tmp_path, exit_fn=lambda: None)
    notice()
    later = rx.experimental.PreemptionWatcher()
    assert earlier.preemption_message == "this process has received SIGTERM"
    assert later.preemption_message is None
    earlier.block_until_worker_exit()  # without a job there is nobody to wait for
    handler.save_checkpoint_if_preempted()
    handler.save_checkpoint_if_preempted()


def test_a_handler_refuses_what_cannot_be_saved_or_agreed(tmp_path):
    checkpoint = rx.train.Checkpoint(v=rx.Variable(0.0))
    with pytest.raises(rx.InvalidArgumentError, match="checkpoint_dir must be passed"):
        Handler(None, checkpoint)
    with pytest.raises(TypeError, match="Checkpoint or a CheckpointManager, got 5"):
        Handler(None, 5, tmp_path)
    resolver = rx.cluster_resolver.SimpleClusterResolver
    with pytest.raises(NotImplementedError, match="ParameterServerStrategy"):
        Handler(resolver(rx.ClusterSpec({"ps": ["a:1"]}), task_type="chief", task_id=0), checkpoint, tmp_path)
    with pytest.raises(ValueError, match="There is no id for task_type None"):
        Handler(resolver(rx.ClusterSpec({"worker": ["a:1"]})), checkpoint, tmp_path)
    two = rx.ClusterSpec({"worker": ["a:1", "a:2"]})
    with pytest.raises(RuntimeError, match="make the strategy before"):
        Handler(resolver(two, task_type="worker", task_id=1), checkpoint, tmp_path)
    Handler(resolver(two, task_type="evaluator", task_id=0), checkpoint, tmp_path)  # it works alone
    Handler(resolver(rx.ClusterSpec({"tpu": ["a:1"]}), task_type="tpu", task_id=0), checkpoint, tmp_path)
    checkpoint.checkpointed_runs = rx.Variable(1)
    with pytest.raises(ValueError, match="'checkpointed_runs'"):
        Handler(None, checkpoint, tmp_path)


def test_without_orbax_the_handler_is_refused_and_not_the_save(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(ImportError, match="written by Orbax"):
        made(tmp_path)
    made(tmp_path, save_fn=lambda: None)


@pytest.mark.parametrize("interrupt_at", [0, 2, 4])
def test_random_numbers_that_are_drawn_between_the_steps_go_on_with_what_came_of_them(interrupt_at, tmp_path):
    """They are saved as they are when the state is saved, and not as they were before that part of the program."""

    def train(folder, interrupt_at=None):
        rng, rate, rates = random.Random(3), rx.Variable(0.0), []
        handler = Handler(None, rx.train.Checkpoint(rate=rate, random=rx.train.RandomState(rng)), folder)
        while handler.total_run_calls < 6:
            if handler.total_run_calls == interrupt_at:
                notice()
                interrupt_at = None
            try:
                handler.run(lambda: rates.append((float(rate), rng.random())))
            except SystemExit:
                return rates
            rate.assign(rng.random())
        return rates

    whole = train(tmp_path / "whole")
    assert len(set(whole)) == 6
    assert train(tmp_path / "ended", interrupt_at) + train(tmp_path / "ended") == whole
