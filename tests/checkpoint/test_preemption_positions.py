"""Where iterators are saved at a preemption: at the end of the last step, and only by the handler's own save."""

from __future__ import annotations

import signal

import pytest

import replicax as rx

Handler, Config = rx.experimental.PreemptionCheckpointHandler, rx.experimental.TerminationConfig


@pytest.fixture(autouse=True)
def sigterm():
    """SIGTERM as it was, when the test is over."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


class Left(Exception):
    """Raised by an exit_fn."""


def leave():
    raise Left


class Program:
    """A program that adds up the elements of `iterator`, and is told to end before the call number `notice_at`."""

    def __init__(self, folder, **config):
        self.total, self.iterator = rx.Variable(0), iter(rx.data.Dataset.range(100))
        self.checkpoint = rx.train.Checkpoint(total=self.total, iterator=self.iterator)
        self.manager = rx.train.CheckpointManager(self.checkpoint, folder, max_to_keep=9)
        self.handler = Handler(None, self.manager, termination_config=Config(**{"exit_fn": leave, **config}))

    def train(self, calls, notice_at=None):
        for call in range(calls):
            if call == notice_at:
                signal.raise_signal(signal.SIGTERM)
            self.handler.run(self.total.assign_add, next(self.iterator))

    def restored_from(self, path):
        """Restores a checkpoint; returns whether the next element is the one that is not in the total yet."""
        self.checkpoint.restore(path)
        following = int(next(self.iterator))
        return int(self.total) == sum(range(following))


def test_a_later_save_in_a_grace_period_has_the_later_positions(tmp_path):
    program = Program(tmp_path, grace_period=3600.0, save_fn=lambda: program.manager.save(check_interval=False))
    program.train(10, notice_at=3)
    own = program.manager.save()
    first, _ = program.manager.checkpoints
    assert program.restored_from(first) and program.restored_from(own)


def test_a_save_after_a_failed_one_has_its_own_positions(tmp_path, monkeypatch):
    program = Program(tmp_path)
    save = program.manager.save
    monkeypatch.setattr(program.manager, "save", lambda **kwargs: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        program.train(5, notice_at=3)
    monkeypatch.undo()
    next(program.iterator)
    own = save()
    with pytest.raises(Left):  # the handler's own save is at the end of the last step, as before
        program.train(1)
    assert program.restored_from(program.manager.latest_checkpoint)
    program.checkpoint.restore(own)
    assert int(next(program.iterator)) == 6  # 4 elements trained on, and two that were taken and lost


def test_a_save_after_the_loop_has_the_later_positions(tmp_path):
    program = Program(tmp_path)
    program.train(4, notice_at=3)
    program.total.assign_add(next(program.iterator))
    assert program.restored_from(program.manager.save())
    with pytest.raises(Left):  # the notice counts in this process until it has been heeded
        program.train(1)


@pytest.mark.parametrize("notice_at", [1, 2, 3, 4, 5])
def test_no_batch_is_lost_where_each_epoch_has_a_new_iterator(tmp_path, notice_at):
    """The batch that was taken of the new iterator for the next step is taken again after the restart."""
    dataset, seen = rx.data.Dataset.range(4).shuffle(4, seed=1), []

    def train(notice_at=None):
        epoch = rx.Variable(0)
        checkpoint = rx.train.Checkpoint(epoch=epoch, iterator=iter(dataset))
        manager = rx.train.CheckpointManager(checkpoint, tmp_path / str(notice), max_to_keep=2)
        handler = Handler(None, manager, termination_config=Config(exit_fn=leave))
        while int(epoch) < 2:
            for element in checkpoint.iterator:
                if handler.total_run_calls == notice_at:
                    signal.raise_signal(signal.SIGTERM)
                handler.run(lambda x: seen.append(int(x)), element)
            epoch.assign_add(1)
            checkpoint.iterator = iter(dataset)

    notice = "none"
    train()
    whole, seen[:], notice = list(seen), [], "one"
    assert len(whole) == 8
    dataset = rx.data.Dataset.range(4).shuffle(4, seed=1)
    with pytest.raises(Left):
        train(notice_at)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert len(seen) < 8
    dataset = rx.data.Dataset.range(4).shuffle(4, seed=1)
    train()
    assert seen == whole
