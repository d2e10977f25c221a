"""The contenders on JAX, replicax and by hand, and a plain copy of the same bytes. Run by collectives.py."""

from __future__ import annotations

import concurrent.futures
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import payloads
import serving
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import replicax as rx


def waited(sums: Any) -> Any:
    """The sums, once the first is there: one program computes all."""
    jax.block_until_ready(sums[0])
    return sums


class Contenders:
    """All on the devices of one strategy."""

    def __init__(self, replicas: int):
        if serving.task()[1]:
            self.strategy: Any = rx.MultiWorkerMirroredStrategy()
        else:
            jax.config.update("jax_platforms", "cpu")
            rx.config.set_virtual_devices({"CPU": replicas})
            self.strategy = rx.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
        self.replicas = replicas
        self.mesh = Mesh(np.array(jax.devices()[:replicas]), ("replica",))

    def compiled(self, payload: str) -> Callable[[], Any]:
        """`ReplicaContext.all_reduce` in a `function`."""
        strategy, values = self.strategy, self._per_replica(payload)

        def replica(values):
            return rx.get_replica_context().all_reduce("SUM", values)

        @rx.function
        def all_reduce(values):
            return strategy.run(replica, args=(values,))

        return lambda: waited(all_reduce(values))

    def eager(self, payload: str) -> Callable[[], Any]:
        """`Strategy.reduce` without a `function`."""
        values = self._per_replica(payload)
        return lambda: waited(self.strategy.reduce("SUM", values, axis=None))

    def by_hand(self, payload: str, packed: bool = False) -> Callable[[], Any]:
        """A `psum` of each array or, packed, of one vector that holds all."""
        split = NamedSharding(self.mesh, P("replica"))
        own_ids = [i for i, device in enumerate(self.mesh.devices) if device.process_index == jax.process_index()]
        own_rows = zip(*(payloads.arrays(payload, i) for i in own_ids))
        values = [jax.make_array_from_process_local_data(split, np.stack(rows)) for rows in own_rows]

        def replica(rows):
            own = [row[0] for row in rows]
            if not packed:
                return lax.psum(own, "replica")
            vector, unravel = ravel_pytree(own)
            return unravel(lax.psum(vector, "replica"))

        mapped = jax.shard_map(replica, mesh=self.mesh, in_specs=P("replica"), out_specs=P(), check_vma=False)
        all_reduce = jax.jit(mapped)
        return lambda: waited(all_reduce(values))

    def _per_replica(self, payload: str) -> list[Any]:
        def own(context):
            return payloads.arrays(payload, context.replica_id_in_sync_group)

        return self.strategy.experimental_distribute_values_from_function(own)


def copying(payload: str, replicas: int) -> Callable[[], Any]:
    """Copies the arrays of so many replicas to memory that is there already, on one thread or all, as is faster."""
    rows = [np.concatenate(payloads.arrays(payload, i)) for i in range(replicas)]
    copies = [row.copy() for row in rows]
    pool = concurrent.futures.ThreadPoolExecutor(min(replicas, os.cpu_count() or 1))

    def one_by_one() -> None:
        for copy, row in zip(copies, rows):
            np.copyto(copy, row)

    def at_once() -> None:
        list(pool.map(np.copyto, copies, rows))

    def took(way: Callable[[], None]) -> float:
        start = time.perf_counter()
        way()
        return time.perf_counter() - start

    ways = [one_by_one] if replicas == 1 else [one_by_one, at_once]
    fastest = min(ways, key=lambda way: min(took(way) for _ in range(5)))

    def copy() -> list[np.ndarray]:
        fastest()
        return copies

    return copy


def sums(found: list[Any]) -> list[np.ndarray]:
    """What a call returned, as numpy arrays; replicax's may have a component for each replica."""
    parts = [part.values[0] if isinstance(part, (rx.PerReplica, rx.Mirrored)) else part for part in found]
    return [np.asarray(part if isinstance(part, np.ndarray) else part.addressable_data(0)) for part in parts]


def answering(replicas: int) -> serving.Answering:
    contenders = Contenders(replicas)
    own = replicas // (len(serving.task()[1]) or 1)
    made = {
        "replicax": contenders.compiled,
        "replicax eager": contenders.eager,
        "by hand": contenders.by_hand,
        "by hand, packed": lambda payload: contenders.by_hand(payload, packed=True),
        "copy": lambda payload: copying(payload, own),
    }
    return payloads.Caller(made, sums, jax.__version__)


if __name__ == "__main__":
    serving.serve(lambda: answering(int(sys.argv[1])))
