"""Strategies that shared tests run over, the two ways to run a program, and what tests ask of values.

A test that takes `n` and `way` runs with 1, 2 and 4 replicas, eagerly (`strategy.run` called directly, one thread a
replica) and compiled (inside of `rx.function`). One with `@over(...)` runs over the strategies of the table below.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from replicax._base import devices
from replicax._benchmark import hlo
from replicax._job import exchange

SUM, MEAN = rx.ReduceOp.SUM, rx.ReduceOp.MEAN


def _all_that_can_be(shape: Sequence[int], _: np.dtype) -> Sequence[int]:
    """A partitioner that divides all variables that can be divided."""
    return [2] * len(shape)


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


@functools.cache
def sharded_multi_worker() -> rx.MultiWorkerMirroredStrategy:
    return rx.MultiWorkerMirroredStrategy(shard_variables=_all_that_can_be)


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
def grouped(n: int, **axes: int) -> rx.MirroredStrategy:
    """A strategy of `n` replicas with several virtual GPUs each, along these axes."""
    return rx.MirroredStrategy([f"GPU:{i}" for i in range(n * math.prod(axes.values()))], devices_per_replica=axes)


@functools.cache
def sharded(n: int) -> rx.Strategy:
    """Replicas that each have a part of every variable that can be divided."""
    return rx.MirroredStrategy([f"GPU:{i}" for i in range(n)], shard_variables=_all_that_can_be)


@functools.cache
def another() -> rx.MirroredStrategy:
    """A strategy that is none of the table's."""
    return rx.MirroredStrategy(["CPU:0"])


class Kind(NamedTuple):
    r"""A strategy that the shared tests run over.

    `changes` has the tests whose behaviour the strategy changes on purpose, each with the reason: the name of a test,
    or a regular expression for the beginning of its name with parameters, such as r"test_x\[eager". These tests have to
    fail under the strategy (see `selection.excuse`).
    """

    replicas: int
    make: Callable[[], rx.Strategy]
    plain: bool = False  # values are plain ones, not per replica
    copies: bool = True  # each replica has a copy of a variable
    logical: bool = False  # a replica has several devices, and all have values of the same shapes
    size: bool = False  # as another one, but for the number of replicas
    changes: Mapping[str, str] = {}

    @property
    def marks(self) -> list[pytest.MarkDecorator]:
        """The marks that every test of this strategy gets."""
        return [pytest.mark.changes(self.changes)] if self.changes else []


# The one table: a strategy that is new takes one line here.
STRATEGIES: dict[str, Kind] = {
    "one_device": Kind(1, one_device, plain=True, copies=False),
    "1": Kind(1, functools.partial(mirrored, 1), size=True),
    "2": Kind(2, functools.partial(mirrored, 2)),
    "4": Kind(4, functools.partial(mirrored, 4)),
    "sharded": Kind(2, functools.partial(sharded, 2)),
    "central": Kind(2, central, copies=False),
    "pairs": Kind(2, functools.partial(grouped, 2, model=2), logical=True),
    "tpu_logical": Kind(2, functools.partial(tpu, 2, 4, shard_variables=_all_that_can_be), logical=True),
}

# Two replicas, of which the newest JAX has all (see Makefile), are tried on the oldest where a test counts replicas.
# A TPU's replicas of one device each are MirroredStrategy's: test_tpu.py shows that nothing differs.
_NAMES = os.environ.get("REPLICAX_TEST_STRATEGIES", "one_device,1,4,sharded,central,pairs,tpu_logical")
STRATEGIES = {name: STRATEGIES[name] for name in _NAMES.split(",")}

# In the workers of a job (see test_multi_worker_suite.py) there is one strategy, over all of them.
WORKERS = int(os.environ.get("REPLICAX_SUITE_WORKERS", "1"))
if WORKERS > 1:
    _here = int(os.environ["REPLICAX_SUITE_DEVICES"].split(":")[1])
    STRATEGIES = {"multi_worker": Kind(WORKERS * _here, multi_worker)}
    if os.environ.get("REPLICAX_SUITE_SHARDED"):
        STRATEGIES = {"multi_worker": Kind(WORKERS * _here, sharded_multi_worker)}


# A test calls `make` several times, for one strategy.
STRATEGIES = {name: kind._replace(make=functools.cache(kind.make)) for name, kind in STRATEGIES.items()}


def over(
    *,
    plain: bool = False,
    at_least: int = 1,
    here: int = 1,
    copies: bool = False,
    logical: bool = True,
    one_of_each: bool = False,
    processes: int | None = None,
) -> Callable[[Callable[..., None]], Any]:
    """Has a test run over the strategies of the table that these facts hold of.

    The test takes `make`, which makes the strategy, and `n`, the number of its replicas, where it needs that.

    Args:
        plain: also those whose values are plain ones, not per replica.
        at_least: how many replicas there are.
        here: how many there are in each process.
        copies: only those whose variables have a copy on each replica.
        logical: also those whose replicas have several devices each, and values of the same shapes.
        one_of_each: one of each kind and no other sizes, for a test that has many cases of its own.
        processes: 1 for those of one process alone, where a replica may do something else than the others, and no
            other process waits for it.
    """
    chosen = _that_have(plain, at_least, here, copies, logical, one_of_each, processes)

    def mark(test: Callable[..., None]) -> Any:
        counts = "n" in inspect.signature(test).parameters
        values = [
            pytest.param(
                *((kind.make, kind.replicas) if counts else (kind.make,)),
                id=name,
                marks=[pytest.mark.strategy(name), *kind.marks],
            )
            for name, kind in chosen.items()
        ]
        return pytest.mark.parametrize("make, n" if counts else "make", values)(test)

    return mark


def dealt(names: str, cases: Sequence[Any], *, ids: Callable[[Any], Any] = str, **facts: Any) -> Callable[..., Any]:
    """Deals a test's own cases out among the strategies that `over(**facts)` has, and which `facts` describes.

    Each case runs on one strategy and each strategy has some of the cases, for tests in which case and strategy have
    nothing to do with each other: all pairs would take several times as long and prove the same.

    Args:
        names: of the test's parameters, as `pytest.mark.parametrize` has them.
        cases: their values, tuples where there are several names.
        ids: gives a value's part of the test's name.
        **facts: what `over` takes.
    """
    count = len(names.split(","))
    chosen = list(_that_have(**facts).items())
    values, titles = [], []
    for i in range(max(len(cases), len(chosen))):
        title, kind = chosen[(i + i // len(chosen)) % len(chosen)]
        case = cases[i % len(cases)] if count > 1 else (cases[i % len(cases)],)
        values.append((kind, case))
        titles.append("-".join([title, *(str(ids(value)) for value in case)]))

    def mark(test: Callable[..., None]) -> Any:
        counts = "n" in inspect.signature(test).parameters
        given = [
            pytest.param(kind.make, *([kind.replicas] if counts else []), *case, marks=kind.marks)
            for kind, case in values
        ]
        return pytest.mark.parametrize(f"make, n, {names}" if counts else f"make, {names}", given, ids=titles)(test)

    return mark


def _that_have(
    plain: bool = False,
    at_least: int = 1,
    here: int = 1,
    copies: bool = False,
    logical: bool = True,
    one_of_each: bool = False,
    processes: int | None = None,
) -> dict[str, Kind]:
    """Returns the strategies that have what `over` asks for, by their names."""

    def fits(kind: Kind) -> bool:
        return (
            (plain or not kind.plain)
            and kind.replicas >= at_least
            and kind.replicas // WORKERS >= here
            and (kind.copies or not copies)
            and (logical or not kind.logical)
            and not (one_of_each and kind.size)
            and processes in (None, WORKERS)
        )

    return {name: kind for name, kind in STRATEGIES.items() if fits(kind)}


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


counts, several = (
    pytest.mark.parametrize("n", [pytest.param(n, marks=pytest.mark.strategy(str(n))) for n in numbers])
    for numbers in ([1, 2, 4], [2, 4])
)
ways = pytest.mark.parametrize("way", [eager, compiled], ids=["eager", "compiled"])


def check_refused(
    strategy: rx.Strategy, way: Callable[..., Any], kind: type[Exception], match: str, call: Callable[[], Any]
) -> None:
    """Checks that a call is refused with an error, outside of replicas and in each."""
    with pytest.raises(kind, match=match):
        call()
    with pytest.raises(kind, match=match):
        way(lambda: strategy.run(call))()


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
    told = exchange.all_gather(pickle.dumps(local).hex(), "tests")
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
