"""`rx.launch`: a function in the workers of a job, from a script or a notebook."""

from __future__ import annotations

import signal
import sys

import pytest
from launching import Launch

import replicax as rx

# What `launching.HEAD` reads; the program here is no worker itself.
NO_WORKER = {"TF_CONFIG": '{"task": {"index": 0}, "cluster": {"worker": []}}', "REPLICAX_RESTART_COUNT": "0"}


@pytest.fixture(autouse=True)
def _no_virtual_devices(monkeypatch):
    monkeypatch.delenv("REPLICAX_VIRTUAL_DEVICES", raising=False)


def test_functions_of_a_script_train_in_several_workers(run_well):
    done = run_well(
        """
        import os
        import jax.numpy as jnp
        import numpy as np
        import replicax as rx

        FACTOR = jnp.float32(2)

        class Result:
            def __init__(self, value):
                self.value = value

        def train(steps, *, start):
            strategy = rx.MultiWorkerMirroredStrategy()
            assert isinstance(FACTOR, np.ndarray) and isinstance(start, np.ndarray)
            with strategy.scope():
                v = rx.Variable(start)

            @rx.function(autograph=True)
            def step():
                def replica():
                    if v.value().sum() > 0:  # AutoGraph converts it, and needs the source
                        v.assign(v + FACTOR)
                strategy.run(replica)

            for _ in range(steps):
                step()
            print("trained", os.environ["MARK"])
            return strategy.num_replicas_in_sync, Result(v.read_value())

        os.environ["REPLICAX_VIRTUAL_DEVICES"] = "GPU:4"  # the notebook's own
        results = rx.launch(
            train, workers=2, args=(3,), kwargs={"start": jnp.ones(2)}, devices_per_worker=2, environment={"MARK": "so"}
        )
        for replicas, result in results:
            assert replicas == 4 and type(result) is Result and isinstance(result.value, np.ndarray)
            assert result.value.tolist() == [7.0, 7.0]
        """
    )
    assert sorted(done.stdout.splitlines()) == ["[worker 0] trained so", "[worker 1] trained so"]


def test_an_error_in_one_worker_ends_all_and_is_raised_with_its_traceback(run_well):
    done = run_well(
        """
        import sys, traceback
        import replicax as rx

        def train():
            strategy = rx.MultiWorkerMirroredStrategy()
            while True:
                if strategy.cluster_resolver.task_id == 1:
                    raise KeyError("no such label")
                strategy.reduce("SUM", strategy.run(lambda: 1.0), axis=None)

        try:
            rx.launch(train, workers=2)
        except KeyError as error:
            print("".join(traceback.format_exception(error)))
        """
    )
    told = done.stdout[done.stdout.index("KeyError: 'no such label'\nOn worker 1:") :]
    assert 'program.py", line 9, in train\n    raise KeyError("no such label")' in told
    assert "[worker 1]" in done.stderr and "replicax launch:" not in done.stderr


@pytest.mark.parametrize(
    "end, told",
    [
        ("os.kill(os.getpid(), 9)", "worker 1 failed first: killed by SIGKILL"),
        ("sys.exit(0)", "worker 1 ended with exit status 0 before the function returned"),
    ],
)
def test_a_worker_that_ends_without_an_exception_is_named(end, told):
    source = f"def fn(worker):\n    import json, os, sys\n    if worker() == 1:\n        {end}"
    names: dict = {}
    exec(source, names)
    with pytest.raises(rx.JobError, match=told):
        rx.launch(names["fn"], workers=2, args=(_worker,))


def _worker():
    import json
    import os

    return json.loads(os.environ["TF_CONFIG"])["task"]["index"]


def test_what_cannot_be_sent_is_named_with_the_remedy(monkeypatch):
    strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"])
    with pytest.raises(
        TypeError, match=r"(?s)`uses_strategy`.*cannot be sent.*MirroredStrategy.*inside of the function"
    ):

        def uses_strategy():
            return strategy.num_replicas_in_sync

        rx.launch(uses_strategy, workers=2)
    with pytest.raises(TypeError, match="The result of worker 0 cannot be sent") as caught:
        rx.launch(lambda: __import__("threading").Lock(), workers=1)
    assert "On worker 0:" in caught.value.__notes__[0]
    with pytest.raises(ValueError, match="workers must be a whole number of at least 1, got 0"):
        rx.launch(_worker, workers=0)
    with pytest.raises(TypeError, match="takes a function, got 3"):
        rx.launch(3, workers=2)
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(ImportError, match="pip install .*cloudpickle.*'ps'"):
        rx.launch(_worker, workers=2)


def test_an_import_of_the_command_leaves_the_function(run_well):
    run_well(
        """
        import replicax as rx
        import replicax.launch
        from replicax import launch
        assert rx.launch is launch and callable(launch) and launch.__name__ == "launch"
        """
    )


WAITING = """
import replicax as rx

def fn(folder):
    import os, signal
    print("ready", flush=True)
    try:
        signal.pause()
    finally:
        print("interrupted", flush=True)

try:
    rx.launch(fn, workers=2, args=(os.getcwd(),))
except KeyboardInterrupt:
    sys.exit("the notebook goes on")
"""


def test_ctrl_c_ends_the_workers(tmp_path):
    with Launch(tmp_path, "", WAITING, env=NO_WORKER, command=(sys.executable,)) as launch:
        launch.until(lambda: launch.out.count("ready") == 2, "both workers", 120.0)
        launch.signal(signal.SIGINT)
        assert launch.wait() == 1
        assert launch.err.endswith("the notebook goes on\n")
        assert launch.out.count("interrupted") == 2


def test_workers_end_with_the_process_that_launched_them(tmp_path):
    with Launch(tmp_path, "", WAITING, env=NO_WORKER, command=(sys.executable,)) as launch:
        launch.until(lambda: launch.out.count("ready") == 2, "both workers", 120.0)
        launch.signal(signal.SIGKILL)
        launch.nothing_left()
