"""`profile`: traces in which steps and replicas have their names."""

from __future__ import annotations

import gzip
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from strategies import WORKERS, mirrored, over, per_replica, replica_id

import replicax as rx
from replicax._report import profiling


def training(strategy):
    """A step that assigns a variable the sum over the replicas, and an element for it."""
    with strategy.scope():
        total = rx.Variable(0.0, aggregation=rx.VariableAggregation.SUM)

    @rx.function
    def train_step(x):
        def replica_step(x):
            total.assign_add(jnp.sum(x))

        strategy.run(replica_step, args=(x,))
        return total.read_value()

    n = strategy.num_replicas_in_sync
    return train_step, per_replica(strategy, np.ones((n, 2), np.float32)), total


def events_of(path):
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return json.load(file)["traceEvents"]


def steps_of(events):
    found = [event for event in events if "step_num" in event.get("args", {})]
    return [(event["name"], int(event["args"]["step_num"])) for event in sorted(found, key=lambda event: event["ts"])]


@over(one_of_each=True)
def test_the_trace_has_the_steps_and_the_replicas_by_name(make, n, tmp_path):
    strategy = make()
    train_step, x, total = training(strategy)
    train_step(x)
    with rx.profile(tmp_path, run="here") as profile:
        train_step(x)
        train_step(x)
    train_step(x)
    assert float(total) == 4 * 2 * n
    worker = f".worker-{jax.process_index()}" if WORKERS > 1 else ""
    xplane, trace = profile.files
    assert all(path.parent == tmp_path / "plugins" / "profile" / "here" for path in profile.files)
    host = xplane.name.removesuffix(f"{worker}.xplane.pb")
    assert trace.name == f"{host}{worker}.trace.json.gz"
    assert list(tmp_path.iterdir()) == [tmp_path / "plugins"]  # nothing is left of the writing
    assert b"train_step" in xplane.read_bytes()
    events = events_of(trace)
    assert steps_of(events) == [("train_step", 1), ("train_step", 2)]
    ran = {event["args"]["hlo_module"] for event in events if "hlo_op" in event.get("args", {})}
    assert "jit_train_step" in ran


def test_eager_replicas_appear_in_the_profile_by_number(tmp_path):
    strategy = mirrored(2)
    with rx.profile(tmp_path) as profile:
        strategy.run(replica_id)
    assert [path.suffixes[-1] for path in profile.files] == [".pb", ".gz"]
    names = [event.get("name") for event in events_of(profile.files[1])]
    assert names.count("replica 0") == names.count("replica 1") == 1


def test_the_operations_of_a_replica_are_named_after_its_function():
    train_step, x, _ = training(mirrored(2))
    names = re.findall(r'op_name="([^"]*)"', train_step.lower(x).compile().as_text())
    assert any("/replica/replica_step/" in name for name in names)
    assert any(name.endswith("/all_reduce/psum") for name in names)


def test_an_error_inside_ends_the_profile_and_keeps_it(tmp_path):
    double = rx.function(lambda x: x * 2)
    profile = rx.profile(tmp_path)
    with pytest.raises(KeyError), profile:
        double(jnp.ones(2))
        raise KeyError
    assert profiling.active is None
    assert steps_of(events_of(profile.files[1])) == [("function", 0)]


def test_an_interrupt_while_it_waits_for_the_devices_ends_the_trace(tmp_path, monkeypatch):
    def interrupted(arrays):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), rx.profile(tmp_path):
        monkeypatch.setattr(jax, "block_until_ready", interrupted)
    monkeypatch.undo()
    with rx.profile(tmp_path) as profile:
        pass
    assert profile.files


def test_there_is_one_profile_at_a_time(tmp_path):
    with rx.profile(tmp_path / "first") as profile:
        with pytest.raises(RuntimeError, match=r"on already, into .*first"):
            with rx.profile(tmp_path / "second"):
                pass
    assert profile.files and not (tmp_path / "second").exists()


def test_a_place_where_nothing_can_be_written_is_refused_before_anything_runs(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"A profile cannot be written to .*file"):
        with rx.profile(tmp_path / "file"):
            raise AssertionError("it began")
    with pytest.raises(ValueError, match="`run` is the name of a folder"):
        rx.profile(tmp_path, run="../elsewhere")
    assert profiling.active is None
    with rx.profile(tmp_path / "new" / "folder"):
        pass
