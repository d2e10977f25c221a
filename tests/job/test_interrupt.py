"""Ctrl-C: the process ends with KeyboardInterrupt, whatever its replicas are at, and does not hang."""

from __future__ import annotations

import pytest

_HEAD = """
import os, signal, sys, threading, time
import jax.numpy as jnp
import numpy as np
import replicax as rx

strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"])
ctx = rx.get_replica_context

def interrupt_soon():  # as a terminal would, once the program is where it should be
    os.read(read_end, 1)
    os.kill(os.getpid(), signal.SIGINT)

def ready():  # a pipe and no threading.Event, whose lock the interrupt could leave locked
    os.write(write_end, b"x")

read_end, write_end = os.pipe()
threading.Thread(target=interrupt_soon, daemon=True).start()
"""

_PROGRAMS = {
    "a replica in a Python loop": """
def replica():
    k = 0
    while True:
        k += 1
        if k == 1000:
            ready()
strategy.run(replica)
""",
    "the second replica in a loop while the first waits": """
def replica():
    if int(ctx().replica_id_in_sync_group) == 1:
        ready()
        while True:
            pass
    ctx().all_reduce("SUM", jnp.ones(1) * 1.0)
strategy.run(replica)
""",
    "replicas that meet again and again": """
def replica():
    k = 0
    while True:
        ctx().all_reduce("SUM", jnp.ones(1) * 1.0)
        k += 1
        if k == 20:
            ready()
strategy.run(replica)
""",
    "an eager loop over a distributed dataset": """
class Endless:
    def __iter__(self):
        while True:
            yield np.ones(4, np.float32)
for k, x in enumerate(strategy.experimental_distribute_dataset(Endless())):
    strategy.run(lambda a: ctx().all_reduce("SUM", a.sum()), args=(x,))
    if k == 20:
        ready()
""",
    "a compiled loop over a distributed dataset": """
class Endless:
    def __iter__(self):
        while True:
            yield np.ones(4, np.float32)
step = rx.function(lambda x: strategy.run(lambda a: ctx().all_reduce("SUM", a.sum()), args=(x,)))
for k, x in enumerate(strategy.experimental_distribute_dataset(Endless())):
    step(x)
    if k == 20:
        ready()
""",
    "a host-driven loop inside of a function": """
class Endless:
    def __iter__(self):
        k = 0
        while True:
            k += 1
            if k == 30:
                ready()
            yield np.ones(4, np.float32)
@rx.function
def epoch(d):
    for x in d:
        strategy.run(lambda a: ctx().all_reduce("SUM", a.sum()), args=(x,))
epoch(strategy.experimental_distribute_dataset(Endless()))
""",
    "a dataset that never gives an element": """
class Stuck:
    def __iter__(self):
        ready()
        while True:
            time.sleep(0.05)
        yield
next(iter(strategy.experimental_distribute_dataset(Stuck())))
""",
}


@pytest.mark.parametrize("name", _PROGRAMS)
def test_an_interrupt_ends_the_program(run_python, name):
    finished = run_python(_HEAD + _PROGRAMS[name], timeout=40)
    assert finished.stderr.rstrip().splitlines()[-1] == "KeyboardInterrupt", finished.stderr
    assert finished.returncode != 0
    assert "Fatal Python error" not in finished.stderr


def test_after_an_interrupt_the_strategy_is_usable(run_python):
    program = """
for _ in range(3):
    threading.Thread(target=interrupt_soon, daemon=True).start()
    def replica():
        ctx().all_reduce("SUM", jnp.ones(1) * 1.0)
        if int(ctx().replica_id_in_sync_group) == 0:
            ready()
        while True:
            pass
    try:
        strategy.run(replica)
    except KeyboardInterrupt:
        pass
    else:
        sys.exit("no interrupt")
    assert not rx.has_strategy()
    total = strategy.run(lambda: ctx().all_reduce("SUM", jnp.ones(1) * 1.0))
    assert [p.tolist() for p in total.values] == [[2.0]] * 2
left = [t for t in threading.enumerate() if t.name.startswith("replicax")]
for thread in left:
    thread.join(10)
print("usable", sum(t.is_alive() for t in left))
"""
    head = _HEAD.replace("threading.Thread(target=interrupt_soon, daemon=True).start()\n", "")
    finished = run_python(head + program, timeout=40)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.split() == ["usable", "0"], finished.stdout + finished.stderr
