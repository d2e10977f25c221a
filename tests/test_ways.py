"""What the behavioural tests share: strategies of each size, and the two ways to run a program; and that they are two.

A test that takes `n` and `way` runs with 1, 2 and 4 replicas, eagerly (`strategy.run` called directly, one thread a
replica) and compiled (inside of `rx.function`). One that takes `make` runs over all strategies of the table below.
"""

from __future__ import annotations

import functools
import os
import pickle
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from replicax._base import devices
from replicax._benchmark import hlo
from replicax._job import exchange

SUM, MEAN = rx.ReduceOp.SUM, rx.ReduceOp.MEAN


@functools.cache
def mirrored(n: int) -> rx.MirroredStrategy:
    return rx.MirroredStrategy([f"GPU:{i}" for i in range(n)])


@functools.cache
def one_device() -> rx.OneDeviceStrategy:
    return rx.OneDeviceStrategy("GPU:1")


@functools.cache
def central() -> rx.experimental.CentralStorageStrategy:
    return rx.experimental.CentralStorageStrategy(["GPU:0", "GPU:1"], "CPU:0")


@functools.cache
def multi_worker() -> rx.MultiWorkerMirroredStrategy:
    return rx.MultiWorkerMirroredStrategy()


# A replica's extent in x, y, z and cores on a mesh of 2 x 2 x 1 chips with two cores each.
SHAPES = {1: [1, 1, 1, 1], 2: [1, 1, 1, 2], 4: [2, 1, 1, 2], 8: [2, 2, 1, 2]}


def virtual_tpus() -> None:
    """Names the CPU devices of the tests TPU:0 to TPU:7, until the test ends (see conftest.py)."""
    rx.config.set_virtual_devices({"TPU": 8, "CPU": 4})


@functools.cache
def tpu(n: int, logical: int, **options: Any) -> rx.TPUStrategy:
    """A strategy of `n` replicas with so many logical devices each."""
    before = dict(devices._virtual)
    virtual_tpus()
    try:
        topology = rx.tpu.initialize_tpu_system()
        assignment = rx.tpu.DeviceAssignment.build(topology, computation_shape=SHAPES[logical], num_replicas=n)
        strategy = rx.TPUStrategy(experimental_device_assignment=assignment, **options)
        strategy.extended.worker_devices  # noqa: B018  # names are those that the devices have now
        return strategy
    finally:
        devices.set_virtual_devices(before)


@functools.cache
def another() -> rx.MirroredStrategy:
    """A strategy that is none of the table's."""
    return rx.MirroredStrategy(["CPU:0"])


# Every strategy that the shared tests run over: its name, how many replicas it has, and what makes it. A strategy that
# is new takes one line here.
STRATEGIES: dict[str, tuple[int, Callable[[], rx.Strategy]]] = {
    "one_device": (1, one_device),
    "1": (1, functools.partial(mirrored, 1)),
    "2": (2, functools.partial(mirrored, 2)),
    "4": (4, functools.partial(mirrored, 4)),
    "central": (2, central),
    "tpu_logical": (2, functools.partial(tpu, 2, 4)),
}

# Two replicas, of which the newest JAX has all (see Makefile), are tried on the oldest where a test counts replicas.
# A TPU's replicas of one device each are MirroredStrategy's: test_tpu.py shows that nothing differs.
_NAMES = os.environ.get("REPLICAX_TEST_STRATEGIES", "one_device,1,4,central,tpu_logical")
STRATEGIES = {name: STRATEGIES[name] for name in _NAMES.split(",")}

# In the workers of a job (see test_multi_worker_suite.py) there is one strategy, over all of them.
WORKERS = int(os.environ.get("REPLICAX_SUITE_WORKERS", "1"))
if WORKERS > 1:
    STRATEGIES = {"multi_worker": (WORKERS * int(os.environ["REPLICAX_SUITE_DEVICES"].split(":")[1]), multi_worker)}


def eager(program: Callable[..., Any]) -> Callable[..., Any]:
    """The program as it is: `strategy.run` in it runs a thread for each replica."""
    return program


def compiled(program: Callable[..., Any]) -> Callable[..., Any]:
    """The program as one `rx.function`."""
    return rx.function(program)


def few(cases: list[Any]) -> list[Any]:
    """Cases of one kind, of which the workers of a job try the first and the last."""
    return cases if WORKERS == 1 else [cases[0], cases[-1]]


def last(cases: list[Any]) -> list[Any]:
    """Cases of one kind, of which the workers of a job try the last alone."""
    return cases if WORKERS == 1 else cases[-1:]


counts = pytest.mark.parametrize("n", [1, 2, 4])
several = pytest.mark.parametrize("n", [2, 4])
ways = pytest.mark.parametrize("way", [eager, compiled], ids=["eager", "compiled"])
strategies = pytest.mark.parametrize("make", [make for _, make in STRATEGIES.values()], ids=list(STRATEGIES))
_FEW = {name: make for name, (_, make) in STRATEGIES.items() if name != "1"}
a_few_strategies = pytest.mark.parametrize("make", list(_FEW.values()), ids=list(_FEW))  # as `one_of_each`


def _with_counts(but_for: set[str] = frozenset(), at_least: int = 1, here: int = 1, workers: bool = True) -> Any:
    """A table of those with so many replicas, in all and in a process; `workers`: also those of several processes."""
    chosen = {
        name: (make, n)
        for name, (n, make) in STRATEGIES.items()
        if name not in but_for and n >= at_least and n // WORKERS >= here and (workers or WORKERS == 1)
    }
    return pytest.mark.parametrize("make, n", list(chosen.values()), ids=list(chosen))


PLAIN = {"one_device"}  # whose values are plain ones
ONE_COPY = {"one_device", "central"}  # whose variables are no copies on each replica
replicated = _with_counts(PLAIN)  # whose values are per replica, with the number of replicas
several_replicated = _with_counts(PLAIN, at_least=2)
# One of each kind, for tests that have many cases of their own.
one_of_each = _with_counts({"one_device", "1"})
mirroring = _with_counts(ONE_COPY)  # whose variables have a copy on each replica
several_mirroring = _with_counts(ONE_COPY, at_least=2)
# Several in each process: whose replicas' values are put together, and whose replicas may share an object.
several_here = _with_counts(PLAIN, here=2)
several_mirroring_here = _with_counts(ONE_COPY, here=2)
# All in this process, where one replica may do something else than the others, and no other process waits for it.
several_in_one_process = _with_counts(PLAIN, at_least=2, workers=False)
mirroring_in_one_process = _with_counts(ONE_COPY, workers=False)
several_mirroring_in_one_process = _with_counts(ONE_COPY, at_least=2, workers=False)
uneven = _with_counts({*PLAIN, "tpu_logical"}, at_least=2)  # whose shapes may differ from replica to replica
uneven_mirroring = _with_counts({*ONE_COPY, "tpu_logical"}, at_least=2)  # the same, where each replica has a copy
packing = _with_counts({*ONE_COPY, "tpu_logical"}, at_least=2)  # which reduce many tensors as one vector
on_gpus = _with_counts(
    {*ONE_COPY, "tpu_logical"}, workers=False
)  # whose devices are GPU:0, GPU:1 and so on, in this process


def ctx() -> rx.ReplicaContext:
    context = rx.get_replica_context()
    assert context is not None
    return context


def replica_id() -> jax.Array:
    """This replica's number as a float."""
    return ctx().replica_id_in_sync_group.astype(jnp.float32)


def per_replica(strategy: rx.Strategy, values: Any) -> Any:
    """A per-replica value with these components, as arrays."""
    return strategy.experimental_distribute_values_from_function(
        lambda context: jnp.asarray(values[context.replica_id_in_sync_group])
    )


def each(strategy: rx.Strategy, value: Any, look: Callable[[Any], Any]) -> list[Any]:
    """What `look` says of each component; those of all workers."""
    return everywhere([look(part) for part in strategy.experimental_local_results(value)])


def everywhere(local: list[Any]) -> list[Any]:
    """A list of what this worker's replicas have, as that of all."""
    told = exchange.everyones(pickle.dumps(local).hex(), "tests")
    return [part for text in told for part in pickle.loads(bytes.fromhex(text))]


def parts(strategy: rx.Strategy, value: Any) -> list[Any]:
    """The components, as lists."""
    return each(strategy, value, lambda part: np.asarray(part).tolist())


def leaves_of(strategy: rx.Strategy, value: Any) -> list[list[Any]]:
    """Of a nest: for each replica its leaves, as lists."""
    return each(strategy, value, lambda nest: [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(nest)])


def local_ids(strategy: rx.Strategy) -> list[int]:
    """The numbers of this process's replicas."""
    here = strategy.num_replicas_in_sync // WORKERS
    first = here * jax.process_index()
    return list(range(first, first + here))


def device_names(strategy: rx.Strategy) -> list[str]:
    """The full names of the devices that this process's replicas have, where these are the first ones."""
    task = f"worker/replica:0/task:{jax.process_index()}" if WORKERS > 1 else "localhost/replica:0/task:0"
    return [f"/job:{task}/device:GPU:{i}" for i in range(len(local_ids(strategy)))]


def carried(function: Any, *args: Any) -> list[int]:
    """How many arrays each all-reduce carries in the compiled program of a function."""
    found = hlo.collectives(function.lower(*args).compile().as_text())
    return [len(one.arrays) for one in found if one.kind == "all-reduce"]


def comes_per_replica(strategy: rx.Strategy, value: Any) -> bool:
    """Whether a result of `run` has the form of those: bare where one of several workers has one replica."""
    return isinstance(value, rx.PerReplica) is (WORKERS == 1 or len(local_ids(strategy)) > 1)


@counts
def test_eagerly_the_function_runs_once_for_each_replica_and_compiled_once_at_all(n):
    """Facts 15, 16: in compiled code the function is traced once whatever the number of replicas."""
    strategy, calls = mirrored(n), []

    def replica():
        calls.append(threading.current_thread())
        return replica_id() + 1

    for way, expected in ((eager, n), (compiled, 1)):
        calls.clear()
        run = way(lambda: strategy.run(replica))
        assert parts(strategy, run()) == [i + 1.0 for i in range(n)]
        assert len(calls) == expected
        assert parts(strategy, run()) == [i + 1.0 for i in range(n)]
        assert len(calls) == (2 * n if way is eager else 1)


def test_eager_replicas_have_a_thread_each():
    """Fact 12."""
    seen = []
    mirrored(2).run(lambda: seen.append(threading.current_thread()))
    assert len(set(seen)) == 2 and threading.main_thread() not in seen
