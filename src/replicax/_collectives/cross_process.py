"""Eager values whose components several processes hold: brought together, and checked to fit before.

A process sees its own components only. Where another's might have another shape, the workers first compare a digest of
what they hold and, if it differs, tell each other through the job's coordination service, so that a mismatch is an
error on all of them and not a collective that never ends.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from replicax._base import jax_internals, suppress_output
from replicax._base.array_conversion import as_array
from replicax._base.errors import ReplicaError
from replicax._base.indexed_slices import IndexedSlices
from replicax._base.types import Leaf, ReduceOp
from replicax._collectives import arithmetic, in_flight
from replicax._job import exchange, state
from replicax._values import (
    AXIS,
    Array,
    Kind,
    PerReplica,
    ReplicaMesh,
    as_rows,
    components_of,
    cut_axis,
    first_row,
    is_array,
    mesh_of,
    partition,
)

OfRows: TypeAlias = Callable[[jax.Array], jax.Array]


def _described(part: object) -> str:
    return f"{part.dtype}{list(part.shape)}" if is_array(part) else type(part).__name__


def _descriptions(mesh: ReplicaMesh, call: str, values: Sequence[Sequence[object]]) -> list[list[str]] | None:
    """Returns the dtypes and shapes of every replica's component, for each value given by its local components.

    None where each value's are alike everywhere. All workers are at the same call, or it raises.
    """
    mine = [";".join(_described(part) for part in parts) for parts in zip(*values)]
    text = f"{call}\n{'|'.join(mine)}"
    if same_on_all_workers(mesh, text, alike=len(set(mine)) == 1):
        return None
    told = [text.split("\n", 1) for text in exchange.all_gather(text)]
    workers = [[described.split(";") for described in what.split("|")] for _, what in told]
    replicas = [described for worker in workers for described in worker]
    if any(other != call for other, _ in told) or len({len(described) for described in replicas}) > 1:
        standings = "\n".join(f"  {exchange.name(i)} is at {other}({what})" for i, (other, what) in enumerate(told))
        raise ReplicaError(
            "The workers are at different calls. Every worker must make the same ones in the same order, but:\n"
            f"{standings}"
        )
    return [list(described) for described in zip(*mesh.by_replica(workers))]


def same_on_all_workers(mesh: ReplicaMesh, text: str, alike: bool) -> bool:
    """Returns whether all workers have the same text, and each says the same of all its replicas (`alike`: this one).

    A small collective tells, in a fraction of the time that messages between the processes take.
    """
    told = text.encode() + (b"" if alike else jax.process_index().to_bytes(4))  # a digest that no other worker has
    row = np.frombuffer(hashlib.blake2b(told, digest_size=8).digest(), np.int32)
    rows = _run(_rows, "comparison of shapes", mesh, [row] * len(mesh.local_ids))
    return bool((np.asarray(rows) == row).all())


def any_worker(mesh: ReplicaMesh, here: bool, label: str) -> bool:
    """Returns whether something is so on any worker; all of them call it."""
    return bool(np.asarray(_run(arithmetic.sum_of_rows, label, mesh, [np.int32(here)] * len(mesh.local_ids))))


def agree(mesh: ReplicaMesh, call: str, *values: Sequence[object]) -> None:
    """Raises, on all workers alike, unless each value's components have one shape and dtype everywhere.

    `values` has the local components of each value.
    """
    for described in _descriptions(mesh, call, values) or ():
        arithmetic.check_alike([_kind(text) for text in described])


def compare(value: PerReplica) -> None:
    """Exchanges the shapes and dtypes of a value's components with the other processes, and notes them in the value."""
    parts, mesh = value.values, mesh_of(value)
    assert mesh is not None
    with jax_internals.untraced():
        described = _descriptions(mesh, "the comparison of a PerReplica argument", [parts])
    components_of(value).note_kinds([_kind(text) for text in described[0]] if described else [parts[0]] * mesh.size)


def _kind(described: str) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of a component of another process."""
    dtype, bracket, shape = described.partition("[")
    if not bracket:
        raise TypeError(f"The workers' values are not all arrays: one is of type {described}.")
    return jax.ShapeDtypeStruct([int(n) for n in shape.rstrip("]").split(",") if n.strip()], jnp.dtype(dtype))


def _rows(rows: jax.Array) -> jax.Array:
    return rows


@functools.cache
def _program(mesh: ReplicaMesh, of_rows: OfRows) -> OfRows:
    """Compiles a function of the stacked components so that it takes what `given` returns."""

    def program(given: jax.Array) -> jax.Array:
        return of_rows(as_rows(given, mesh) if mesh.lone else given)

    return jax.jit(program, out_shardings=mesh.mirrored)


@functools.cache
def _first_to(sharding: NamedSharding) -> OfRows:
    return jax.jit(first_row, out_shardings=sharding)


def given(mesh: ReplicaMesh, parts: Sequence[Leaf]) -> jax.Array:
    """Returns the local components as a program's input: stacked, or a single one as it is, which is quickest."""
    if not mesh.lone:
        return mesh.stack(parts)
    return jax_internals.uncommitted(parts[0]) if getattr(parts[0], "committed", False) else parts[0]


def _run(of_rows: OfRows, label: str, mesh: ReplicaMesh, parts: Sequence[Array]) -> jax.Array:
    with in_flight.dispatching(mesh, f"{label}({in_flight.shapes([(parts[0].dtype, parts[0].shape)])})") as call:
        call.output = output = _program(mesh, of_rows)(given(mesh, parts))
    return mesh.copies(output)[0] if mesh.logical_axes else jax_internals.first_copy(output)


def connect(mesh: ReplicaMesh) -> None:
    """Runs a first all-reduce, in which the workers' devices connect, so that this takes no time of the first step."""
    if mesh.all_local:
        return
    ones = given(mesh, [np.ones((), np.int32)] * len(mesh.local_ids))
    with suppress_output.without_greetings(), state.waiting("the connection of the replicas' devices"):
        _program(mesh, arithmetic.sum_of_rows)(ones).block_until_ready()


def _through_bits(key: jax.Array, change: OfRows) -> jax.Array:
    """Returns random keys whose bits went through `change`."""
    changed: jax.Array = jax.random.wrap_key_data(change(jax.random.key_data(key)), impl=jax.random.key_impl(key))
    return changed


def _is_key(array: Array) -> TypeGuard[jax.Array]:
    return jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key)


def from_first(mesh: ReplicaMesh, part: jax.Array, what: str) -> jax.Array:
    """Returns replica 0's component on every worker; `part` is this worker's own."""
    if _is_key(part):
        return _through_bits(part, lambda bits: from_first(mesh, bits, what + "'s bits"))
    parts = [part] * len(mesh.local_ids)
    agree(mesh, what, parts)
    return _run(first_row, what, mesh, parts)


def from_first_laid_out(mesh: ReplicaMesh, whole: Array, layout: PartitionSpec) -> jax.Array:
    """Returns replica 0's array in a layout; no device holds more of it than its own part and one other."""
    if _is_key(whole):
        return _through_bits(whole, lambda bits: from_first_laid_out(mesh, bits, layout))
    host = np.asarray(whole)
    agree(mesh, "an array that is laid out", [host] * len(mesh.local_ids))
    axis = cut_axis(layout)
    if axis is None:
        return _first_laid_out(mesh, host, layout)
    within = partition.within_replica(layout) or PartitionSpec()
    own: list[jax.Array] = []
    for devices, part in zip(mesh.logical_devices, np.split(host, mesh.size, axis)):
        laid_out = _first_laid_out(mesh, part, within)
        own += [shard.data for shard in laid_out.addressable_shards if shard.device in devices]
    return jax.make_array_from_single_device_arrays(host.shape, NamedSharding(mesh.mesh, layout), own)


def _first_laid_out(mesh: ReplicaMesh, host: np.ndarray, layout: PartitionSpec) -> jax.Array:
    """Returns replica 0's array on every replica, split over its devices."""
    rows = NamedSharding(mesh.mesh, PartitionSpec(AXIS, *layout))

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        return host[index[1:]][None]

    stacked = jax.make_array_from_callback((mesh.size, *host.shape), rows, part)
    with in_flight.dispatching(mesh, "an array that is laid out", [stacked]) as call:
        call.output = laid_out = _first_to(NamedSharding(mesh.mesh, layout))(stacked)
    return laid_out


def all_parts(mesh: ReplicaMesh, parts: Sequence[jax.Array], axis: int) -> list[jax.Array]:
    """Returns the components of all workers, which may differ in size along `axis`."""
    described = _descriptions(mesh, "gather", [parts])
    shapes: Sequence[Kind] = [*parts[:1]] * mesh.size
    if described:
        shapes = [_kind(text) for text in described[0]]
    arithmetic.check_alike(shapes, free_axis=axis)
    longest = max(shape.shape[axis] for shape in shapes)
    padding = [(0, 0)] * parts[0].ndim
    padded = []
    for part in parts:
        padding[axis] = (0, longest - part.shape[axis])
        padded.append(jnp.pad(part, padding) if padding[axis][1] else part)
    rows = _run(_rows, "gather", mesh, padded)
    return [jax.lax.slice_in_dim(rows[i], 0, shape.shape[axis], axis=axis) for i, shape in enumerate(shapes)]


def gather_sizes(mesh: ReplicaMesh, sizes: Sequence[int]) -> list[int]:
    """Returns the numbers of all replicas; `sizes` are those of this worker's."""
    told = exchange.all_gather(",".join(map(str, sizes)))
    return [int(size) for size in mesh.by_replica([text.split(",") for text in told])]


def reduced(op: ReduceOp, parts: Sequence[Leaf], mesh: ReplicaMesh) -> arithmetic.Reducible:
    """Returns the sum or mean over all workers' components; sparse ones are concatenated."""
    if isinstance(parts[0], IndexedSlices):
        values = all_parts(mesh, [part.values for part in parts], 0)
        indices = all_parts(mesh, [jnp.asarray(part.indices) for part in parts], 0)
        joined = [IndexedSlices(v, i, parts[0].dense_shape) for v, i in zip(values, indices)]
        return arithmetic.reduce_parts(op, joined)
    total = _sum(parts, mesh)
    return arithmetic.divided(total, mesh.size, parts[0].dtype) if op is ReduceOp.MEAN else total


def _sum(parts: Sequence[Array], mesh: ReplicaMesh) -> jax.Array:
    agree(mesh, "reduce", parts)
    arithmetic.check_numeric(parts[0].dtype)
    return _run(arithmetic.sum_of_rows, "reduce", mesh, parts)


def reduced_along(op: ReduceOp, parts: Sequence[ArrayLike], axis: arithmetic.Axis, mesh: ReplicaMesh) -> jax.Array:
    """Reduces each component along `axis`, then all workers'; the mean weighs every element equally."""
    arrays = [as_array(part) for part in parts]
    total = _sum([arithmetic.reduce_along(ReduceOp.SUM, [array], axis) for array in arrays], mesh)
    if op is ReduceOp.SUM:
        return total
    counts = [arithmetic.count_along(array.shape, axis) for array in arrays]
    return arithmetic.divided(total, sum(gather_sizes(mesh, counts)), arrays[0].dtype)
