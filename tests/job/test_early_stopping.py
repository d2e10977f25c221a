"""`rx.train.EarlyStopping` and `rx.train.agree_to_stop`: when to stop, and that all workers stop together."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest
from processes import Workers
from strategies import mirrored, per_replica

import replicax as rx


@pytest.mark.parametrize(
    "options, values, stops, best",
    [
        ({"patience": 1}, [3.0, 2.0, 2.0], [False, False, True], 2.0),
        ({"patience": 2}, [3.0, 4.0, 2.0, 5.0, 5.0], [False, False, False, False, True], 2.0),
        ({"patience": 1, "mode": "max"}, [0.5, 0.6, 0.4], [False, False, True], 0.6),
        ({"patience": 2, "min_delta": 0.5}, [3.0, 2.6, 2.5], [False, False, True], 3.0),
        ({"patience": 2}, [math.nan, 1.0, math.nan, math.nan], [False, False, False, True], 1.0),
    ],
)
def test_it_stops_after_updates_without_improvement(options, values, stops, best):
    early_stopping = rx.train.EarlyStopping(**options)
    assert [early_stopping.update(jnp.float32(value)) for value in values] == stops
    assert early_stopping.best == pytest.approx(best) and early_stopping.should_stop and not early_stopping.improved


def test_a_checkpoint_keeps_the_count(tmp_path):
    early_stopping = rx.train.EarlyStopping(patience=3)
    for value in (1.0, 2.0, 2.0):
        early_stopping.update(value)
    path = rx.train.Checkpoint(early_stopping=early_stopping).save(str(tmp_path / "ckpt"))
    resumed = rx.train.EarlyStopping(patience=3)
    rx.train.Checkpoint(early_stopping=resumed).restore(path)
    assert (resumed.best, resumed.wait, resumed.should_stop) == (1.0, 2, False)
    assert resumed.update(2.0)


def test_wrong_arguments_are_named():
    for options, told in (
        ({"patience": 0}, "patience must be a whole number of at least 1, got 0"),
        ({"min_delta": -1.0}, "min_delta must be a number of at least 0, got -1.0"),
        ({"mode": "auto"}, "mode must be 'min' or 'max', got 'auto'"),
    ):
        with pytest.raises(ValueError, match=told):
            rx.train.EarlyStopping(**options)
    for value in (per_replica(mirrored(2), [1.0, 2.0]), np.ones(2), None):
        with pytest.raises(TypeError, match=r"(?s)takes a number, got .*strategy\.reduce"):
            rx.train.EarlyStopping().update(value)


def test_all_workers_stop_together(tmp_path):
    program = """
        import replicax as rx

        strategy = rx.MultiWorkerMirroredStrategy()
        worker = strategy.cluster_resolver.task_id
        assert [rx.train.agree_to_stop(worker == 1), rx.train.agree_to_stop(False)] == [True, False]
        assert not rx.train.EarlyStopping().update(0.0 if worker else -0.0)
        early_stopping = rx.train.EarlyStopping(patience=1)
        assert [early_stopping.update(value) for value in (1.0, 2.0)] == [False, True]
        try:
            early_stopping.update(worker / 2)
        except ValueError as error:
            print(error)
        """
    with Workers(tmp_path, 2, program) as workers:
        for done in workers.join(timeout=60).values():
            assert done.returncode == 0, done.stderr
            assert "same value on all workers, got worker 0: 0.0, worker 1: 0.5." in done.stdout
