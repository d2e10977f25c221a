"""Where a NaN comes from, with `jax_debug_nans` on: the operation, the user's line and the replica.

The program runs as it always does, but that variables keep their arrays until its results were looked at. If there is a
NaN among them, its parts run once more with a check behind each operation (`jax.experimental.checkify`).
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify
from jax.sharding import PartitionSpec

from replicax._base import jax_internals, tracebacks
from replicax._passes.interpret import Environment, Interpreter, Rule, part_of
from replicax._tracing import frames
from replicax._values import AXIS


def are_in(arrays: Iterable[object]) -> bool:
    """Returns whether there is a NaN in what this process has of some arrays."""
    return any(_has_nan(shard.data) for array in arrays for shard in getattr(array, "addressable_shards", ()))


def _has_nan(array: jax.Array) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.inexact) and np.isnan(np.asarray(array)).any())


def error(
    name: str,
    level: frames.TraceFrame,
    closed: jex.ClosedJaxpr,
    supplied: Mapping[int, jax.Array],
    args: Sequence[jax.Array],
) -> FloatingPointError:
    """Returns the exception for a call that gave NaN.

    Args:
        name: of the function.
        level: whose program it is.
        closed: its jaxpr.
        supplied: the values of the level's inputs, by their slots.
        args: the jaxpr's own inputs.
    """
    search = _Search(supplied)
    search.environment(closed, args)
    slots = {slot: level.variables[key].name for key, slots in level.inputs.items() for slot in slots}
    before = sorted({slots.get(slot, "its input") for slot, value in supplied.items() if are_in([value])})
    before += ["an argument"] if are_in(args) else []
    had = f" There was a NaN before the call in {', '.join(before)}." if before else ""
    kept = "The variables keep the values that they had before."
    if not search.found:
        return FloatingPointError(f"There is a NaN in what {name} gives.{had} {kept}")
    found, replicas = search.found[0]
    where = "" if replicas is None else f" on {replicas}"
    text = f"In {name}, the operation {found.prim} gives NaN{where}{_line(found.traceback_info)}.{had} {kept}"
    return FloatingPointError(text)


def _line(traceback: Any) -> str:
    """Returns the user's line in a traceback of JAX, in words."""
    for frame in getattr(traceback, "frames", ()):
        if not tracebacks.is_hidden_file(frame.file_name):
            source = linecache.getline(frame.file_name, frame.line_num).strip()
            return f", at {frame.file_name}:{frame.line_num}{f' ({source})' if source else ''}"
    return ""


class _Search(Interpreter[jax.Array]):
    """Runs a program part by part. `found` are the first NaN of each part, with the replicas that have it."""

    def __init__(self, supplied: Mapping[int, jax.Array]):
        self._supplied = supplied
        self.found: list[tuple[Any, str | None]] = []

    def rule(self, eqn: jex.JaxprEqn) -> Rule[jax.Array] | None:
        if frames.is_input(eqn):
            return self._input
        return self._replicas if eqn.primitive.name == "shard_map" else None

    def _input(self, eqn: jex.JaxprEqn, _: list[jax.Array]) -> list[jax.Array]:
        return [self._supplied[eqn.params["slot"]]]

    def compute(self, environment: Environment[jax.Array], eqns: Sequence[jex.JaxprEqn]) -> None:
        """Computes equations that are the same for all replicas."""
        if not eqns:
            return
        part, needed, made = part_of(environment.jaxpr, eqns)
        found, results = jax.jit(_checked(part))(*environment.of(needed))
        environment.set(made, results)
        if (error := found.get_exception()) is not None:
            self.found.append((error, None))

    def _replicas(self, eqn: jex.JaxprEqn, operands: list[jax.Array]) -> list[jax.Array]:
        """Computes an equation that runs replicas, each of which tells its own first NaN."""
        body = jex.ClosedJaxpr(eqn.params["jaxpr"], [])
        form: list[Any] = []

        def replica(*blocks: jax.Array) -> list[jax.Array]:
            found, results = _checked(body)(*blocks)
            leaves, tree = jax.tree.flatten(found)
            form[:] = [tree, [(leaf.shape, leaf.dtype) for leaf in leaves]]
            row = jnp.concatenate([jnp.zeros(0, jnp.int32), *(jnp.ravel(x).astype(jnp.int32) for x in leaves)])
            return [*results, row[None]]

        specs = [*eqn.params["out_specs"], PartitionSpec(AXIS)]
        results: list[jax.Array]
        *results, rows = jax.jit(jax_internals.shard_map_like(eqn, replica, eqn.params["in_specs"], specs))(*operands)
        tree, kinds = form
        first: dict[int, tuple[Any, set[int]]] = {}  # by their order in the program
        for shard in rows.addressable_shards:
            row, leaves = np.asarray(shard.data)[0], []
            for shape, dtype in kinds:
                size = int(np.prod(shape))
                leaves.append(row[:size].reshape(shape).astype(dtype))
                row = row[size:]
            found = jax.tree.unflatten(tree, leaves)
            if (error := found.get_exception()) is not None:
                order = jax_internals.order_of_check(found)
                first.setdefault(order, (error, set()))[1].add(shard.index[0].start or 0)
        if first:
            error, replicas = first[min(first)]
            listed = f"replica{'s' * (len(replicas) > 1)} {', '.join(map(str, sorted(replicas)))}"
            self.found.append((error, "all replicas" if len(replicas) == rows.shape[0] > 1 else listed))
        return results


def _checked(closed: jex.ClosedJaxpr) -> Callable[..., tuple[checkify.Error, list[jax.Array]]]:
    """Returns a function that computes a jaxpr: it gives the first NaN, and the results."""

    def run(*args: jax.Array) -> list[jax.Array]:
        results: list[jax.Array] = jex.jaxpr_as_fun(closed)(*args)
        return results

    return checkify.checkify(run, errors=checkify.nan_checks)
