"""Calls with many small variables, by replicax and by hand. Run by variables.py."""

from __future__ import annotations

import collections
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import payloads
import serving
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from side_jax import IN_FLIGHT, devices, placed, set_devices

import replicax as rx

SIZE, ROWS = 4, 8
UPDATE = optax.sgd(1e-2, momentum=0.9)


def initial(count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(SIZE, np.float32) for _ in range(count)]


def rows(replicas: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((ROWS * replicas, SIZE), np.float32)


def loss(arrays: list[Any], x: Any, replicas: int) -> Any:
    """Of a model of many small parts side by side, each of which scales and shifts its input."""
    scales, shifts = jnp.stack(arrays[::2]), jnp.stack(arrays[1::2])
    return jnp.mean(jnp.tanh(x[:, None] * scales + shifts) ** 2) / replicas


class OnReplicax:
    """As many variables or, with `one`, one that holds all arrays."""

    def __init__(self, program: str, count: int, replicas: int, one: bool):
        strategy: Any = rx.MirroredStrategy(devices(replicas)) if replicas > 1 else rx.get_strategy()
        with strategy.scope():
            arrays = initial(count)
            self.variables: Any = rx.Variable(arrays) if one else [rx.Variable(array) for array in arrays]
        variables = self.variables

        def values() -> list[Any]:
            return variables.value() if one else [variable.value() for variable in variables]

        def add():
            if one:
                variables.assign([array + 1 for array in variables.value()])
            else:
                for variable in variables:
                    variable.assign_add(jnp.ones(SIZE))
            return values()[0][0]

        self.values = values
        self.arguments: tuple[Any, ...] = ()
        if program == "add":
            self.call = rx.function(add)
            return
        with strategy.scope():
            optimizer = rx.Optimizer(UPDATE, variables)

        def replica(x):
            value, gradients = jax.value_and_grad(loss)(values(), x, replicas)
            optimizer.apply_gradients(gradients)
            return value

        parts = np.split(rows(replicas), replicas)
        self.arguments = (
            strategy.experimental_distribute_values_from_function(lambda c: parts[c.replica_id_in_sync_group]),
        )
        self.call = rx.function(lambda x: strategy.reduce("SUM", strategy.run(replica, args=(x,)), axis=None))

    def __call__(self) -> Any:
        return self.call(*self.arguments)


class ByHand:
    """`jax.jit` with as many arrays, gradients raveled into one `psum`; or, `packed`, with all in one vector."""

    def __init__(self, program: str, count: int, replicas: int, packed: bool):
        mesh = Mesh(np.array(devices(replicas)), ("replica",))
        arrays: Any = initial(count)
        vector, self.unravel = ravel_pytree(arrays)
        arrays = vector if packed else arrays
        unravel = self.unravel if packed else lambda arrays: arrays
        self.packed = packed
        self.arguments: tuple[Any, ...] = ()
        if program == "add":

            def add(arrays):
                arrays = jax.tree.map(lambda array: array + 1, arrays)
                return arrays, arrays[0] if packed else arrays[0][0]

            self.state = jax.tree.map(lambda part: placed(part, mesh, P()), arrays)
            self.step = jax.jit(add, donate_argnums=0)
            return
        self.state = jax.tree.map(lambda part: placed(part, mesh, P()), (arrays, UPDATE.init(arrays)))
        self.arguments = (placed(rows(replicas), mesh, P("replica")),)

        def train(state, x):
            arrays, inner = state
            value, gradients = jax.value_and_grad(lambda arrays: loss(unravel(arrays), x, replicas))(arrays)
            if replicas > 1:
                whole, back = ravel_pytree((gradients, value))
                gradients, value = back(lax.psum(whole, "replica"))
            updates, inner = UPDATE.update(gradients, inner, arrays)
            return (optax.apply_updates(arrays, updates), inner), value

        if replicas > 1:
            specs = (P(), P("replica"))
            train = jax.shard_map(train, mesh=mesh, in_specs=specs, out_specs=(P(), P()), check_vma=False)
        self.step = jax.jit(train, donate_argnums=0)

    def __call__(self) -> Any:
        self.state, token = self.step(self.state, *self.arguments)
        return token

    def values(self) -> list[Any]:
        arrays = self.state[0] if self.arguments else self.state
        return self.unravel(arrays) if self.packed else arrays


class Calls(payloads.Caller):
    """Calls are dispatched one after the other, and the last is awaited; no more than `IN_FLIGHT` are on their way."""

    def __call__(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["do"] != "run":
            return super().__call__(request)
        contender = self._calls[request["contender"]]()
        in_flight: collections.deque[Any] = collections.deque()
        jax.block_until_ready(contender())
        start = time.perf_counter()
        for _ in range(request["steps"]):
            in_flight.append(contender())
            if len(in_flight) > IN_FLIGHT:
                in_flight.popleft().block_until_ready()
        in_flight[-1].block_until_ready()
        return {"seconds": time.perf_counter() - start}


def answering(replicas: int) -> serving.Answering:
    set_devices("cpu", replicas)

    def made(kind: Callable[..., Any], **which: bool) -> Callable[[str], Callable[[], Any]]:
        def contender(payload: str) -> Callable[[], Any]:
            program, count = payload.split()
            one = kind(program, int(count), replicas, **which)
            for _ in range(3):
                jax.block_until_ready(one())
            return lambda: one

        return contender

    contenders = {
        "replicax": made(OnReplicax, one=False),
        "one variable": made(OnReplicax, one=True),
        "by hand": made(ByHand, packed=False),
        "by hand, packed": made(ByHand, packed=True),
    }
    return Calls(contenders, lambda one: [np.asarray(value) for value in one.values()], jax.__version__)


if __name__ == "__main__":
    serving.serve(lambda: answering(int(sys.argv[1])))
