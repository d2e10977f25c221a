"""Random programs: however a program is cut, the parts together compute what the whole does."""

from __future__ import annotations

import random

import jax.numpy as jnp
import numpy as np
import pytest
from cut_simulator import check, simulate, unpacked, variable
from jax import lax

import replicax as rx

__all__ = ["unpacked"]


class RandomProgram:
    """A function of an array, ids and a scalar, that reads and assigns variables of several shapes."""

    def __init__(self, seed):
        choose, draw = random.Random(seed), np.random.default_rng(seed)
        self.rows, self.columns = choose.choice([(40, 3), (300, 8), (12, 5)])
        n, d = self.rows, self.columns
        self.sharded = [(n, d), (n,), (n, 1)]
        shapes = [(n, d), (n, d), (n,), (d,), (), (n, 1), (1, d), (3, n, d)]
        chosen = [choose.choice(shapes) for _ in range(choose.randint(2, 6))] + [(n, d)]
        self.variables = [variable(draw.normal(size=shape).astype(np.float32)) for shape in chosen]
        self.count = variable(3)
        ids = draw.integers(-n - 3, n + 3, 7).astype(np.int32)
        self.args = jnp.asarray(draw.normal(size=(n, d)).astype(np.float32)), jnp.asarray(ids), jnp.float32(0.3)
        self.operations = [[choose.randrange(10**6) for _ in range(4)] for _ in range(choose.randint(3, 22))]
        self.writes = [[choose.randrange(10**6) for _ in range(2)] for _ in range(choose.randint(1, 6))]
        self.function = rx.function(self.run)

    def table(self, a):
        n, d = self.rows, self.columns
        return a if a.ndim == 2 and a.shape[0] == n else jnp.broadcast_to(jnp.sum(a), (n, d))

    def run(self, x, ids, scalar):
        pool = [x, scalar, x[0], jnp.ones((self.rows, self.columns)), *(v.value() for v in self.variables)]
        for number, (which, i, j, k) in enumerate(self.operations):
            a, b = pool[i % len(pool)], pool[j % len(pool)]
            new = self.operation(which % 18, a, b, k, ids, scalar)
            pool.append(jnp.asarray(jnp.tanh(new) if number % 4 == 3 else new, jnp.float32))
        results = []
        for i, j in self.writes:
            v, new = self.variables[i % len(self.variables)], pool[j % len(pool)]
            fits = new.ndim <= len(v.shape) and all(
                size in (1, whole) for size, whole in zip(new.shape[::-1], v.shape[::-1])
            )
            new = new if fits else jnp.mean(new)
            [v.assign, v.assign_add, v.assign_sub][i % 3](jnp.broadcast_to(new, v.shape))
            results += ([v.value()] if j % 3 == 0 else []) + ([pool[(i + j) % len(pool)]] if j % 5 == 0 else [])
        self.count.assign_add(1)
        return [*results, self.count.value()]

    def operation(self, which, a, b, k, ids, scalar):
        try:
            one, other = jnp.broadcast_arrays(a, b)
        except ValueError:
            one, other = jnp.broadcast_arrays(jnp.sum(a), b)
        t = self.table(a)
        zeros = jnp.zeros_like(t)
        operations = [
            lambda: one + other,
            lambda: one * other,
            lambda: jnp.tanh(one) - other,
            lambda: jnp.where(one > other, one, other * 0.5),
            lambda: jnp.sum(a * 0.1),
            lambda: jnp.mean(t, axis=k % 2, keepdims=bool(k % 3)),
            lambda: jnp.sum(t[ids] @ jnp.ones((t.shape[1], 2)), 0),
            lambda: zeros.at[ids].add(t[:7] * scalar),
            lambda: t.at[ids[:3]].set(b.ravel()[0]),
            lambda: jnp.reshape(jnp.reshape(a, (-1,)), a.shape) * 2,
            lambda: jnp.sin(t.T).T,
            lambda: lax.cond(scalar > 0, lambda a, b: a + b, lambda a, b: a * 0.5, one, other),
            lambda: lax.fori_loop(0, 2, lambda i, y: jnp.sin(y) + i, a),
            lambda: jnp.clip(a, -1.0, 1.0) / (1 + jnp.abs(scalar)),
            lambda: lax.dynamic_update_slice(t, t[:2] * 2, (ids[0], 0)),
            lambda: jnp.nan_to_num(jnp.take(t, ids, axis=0, mode=["fill", "clip", "wrap"][k % 3]).sum(0)),
            lambda: a[..., ::-1] if a.ndim else a,
            lambda: t - 0.1 * (scalar * zeros.at[ids].add(t[:7]) + zeros.at[jnp.abs(ids[:4])].add(1.0)),
        ]
        return operations[which]()


@pytest.mark.parametrize("seed", range(12))
def test_random_programs(seed):
    """Each with whole variables and with divided ones."""
    program = RandomProgram(seed)
    places = [(1, ()), (2, ()), (2, program.sharded), (3, program.sharded[:1])]
    for servers, sharded in places[seed % 2 :: 2]:
        check(simulate(program.function, program.args, servers, sharded), 2e-5)
