"""The all-reduce of the replicas' tensors as one equation, and how many messages it is: the one place that decides it.

While replica functions are traced, the tensors of an `all_reduce` become one equation, with what was asked (`Packing`)
among its parameters. `merge_all_reduces` puts all-reduces together that were left to it. In programs that it does not
rewrite, as those of eager replicas, loops and gradient tapes, an equation is lowered to the messages that it asks for
by itself.

If nothing was asked, small tensors of one dtype share a vector and one all-reduce, which is several times faster than
one each, and large ones travel by themselves, since packing copies them (see `Fit`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad, batching, mlir

from replicax._base import jax_internals
from replicax._base.thread_state import optimizes_programs
from replicax._collectives import arithmetic
from replicax._values import AXIS, Kind, ReplicaMesh


class Fit(NamedTuple):
    """The messages that suit a platform, where the user asks for none.

    Args:
        together: tensors of fewer bytes share messages.
        most: the largest size in bytes of a message that tensors share.
        ahead: the bytes of sharded variables to gather ahead of their use (see `_passes.sharded_variables`), and the
            bytes that close a message of scattered gradients (see `_passes.scatters_in_turn`); 0 to do neither.
    """

    together: int
    most: int
    ahead: int = 0


# On CPU devices XLA sends one buffer after another. Each costs as much as copying about a megabyte, whatever the number
# of devices: benchmarks/step.py compares steps with gradients packed and apart. For accelerators XLA combines
# all-reduces by itself, without a copy, and overlaps them with computation, so that a vector of all gradients costs
# memory and gains nothing (tests/plan).
_CPU = Fit(together=1 << 20, most=1 << 22)
_ACCELERATOR = Fit(together=1 << 14, most=1 << 20)
# XLA for GPUs runs one collective at a time beside the computation. Smaller messages wait for each other, larger ones
# take more memory (see benchmarks/gpu_compiler.py).
_GPU = _ACCELERATOR._replace(ahead=1 << 25)
# To pack tensors that are split over the devices of each replica would bring their parts together first.
_SPLIT = Fit(together=0, most=0)


class Packing(NamedTuple):
    """The way in which tensors are put into messages.

    Args:
        fit: the messages that suit the platform.
        packs: the largest number of messages for each dtype, of about equal size; 0 for a message for each tensor, 1 if
            no number was asked for.
        pack_bytes: the largest size of a message in bytes; if it is not 0, `packs` is ignored.
        halves: whether to add up within each half of the replicas first, and then across the halves.
    """

    fit: Fit
    packs: int = 1
    pack_bytes: int = 0
    halves: bool = False

    @property
    def apart(self) -> bool:
        """True if the user has asked for certain messages."""
        return self.packs != 1 or self.pack_bytes > 0

    @property
    def merges(self) -> bool:
        """True if the tensors may share messages with those of other all-reduces."""
        return not self.apart and not self.halves

    def groups(self, leaves: Sequence[Kind]) -> list[list[int]]:
        """Returns the indices of the leaves of each message."""
        if not self.apart:
            return _by_dtype(leaves, self.fit.most, self.fit.together)
        if self.pack_bytes:
            return _by_dtype(leaves, self.pack_bytes)
        if self.packs == 0:
            return [[i] for i in range(len(leaves))]
        largest = max((sum(_bytes(x) for x in leaves if x.dtype == leaf.dtype) for leaf in leaves), default=0)
        return _by_dtype(leaves, max(1, -(-largest // self.packs)))

    def add(self, leaf: jax.Array) -> jax.Array:
        """Returns the sum over the replicas of one message."""
        size = lax.axis_size(AXIS)
        with jax.named_scope("all_reduce"):
            if not self.halves or size < 4 or size % 2:
                return arithmetic.local_sum(leaf)
            half = size // 2
            within = arithmetic.local_sum(leaf, [list(range(half)), list(range(half, size))])
            return arithmetic.local_sum(within, [[i, i + half] for i in range(half)])


def _bytes(leaf: Kind) -> int:
    return leaf.size * leaf.dtype.itemsize


def _by_dtype(leaves: Sequence[Kind], most: int, together: float = math.inf) -> list[list[int]]:
    """Returns groups of leaves of one dtype, of at most so many bytes each; leaves of `together` bytes are alone."""
    groups: list[list[int]] = []
    open_group: dict[np.dtype, tuple[int, int]] = {}  # dtype -> (number of its last group, bytes in it)
    for i, leaf in enumerate(leaves):
        if _bytes(leaf) >= together:
            groups.append([i])
            continue
        where, filled = open_group.get(leaf.dtype, (-1, 0))
        if where < 0 or filled + _bytes(leaf) > most:
            groups.append([])
            where, filled = len(groups) - 1, 0
        groups[where].append(i)
        open_group[leaf.dtype] = (where, filled + _bytes(leaf))
    return groups


def packing_for(mesh: ReplicaMesh | None, packs: int = 1, pack_bytes: int = 0, halves: bool = False) -> Packing:
    """Returns the messages among the devices of a mesh, as they suit the devices or as the user has asked for.

    Without a mesh there are no messages to pack.
    """
    if mesh is None or mesh.logical_axes:
        return Packing(_SPLIT, packs, pack_bytes, halves)
    fit = {"cpu": _CPU, "gpu": _GPU}.get(mesh.platform, _ACCELERATOR)
    return Packing(fit, packs, pack_bytes, halves)


def all_reduce(leaves: Sequence[jax.Array], packing: Packing) -> list[jax.Array]:
    """Returns the sums over the replicas of one replica's leaves, inside of `shard_map`."""
    if not leaves or lax.axis_size(AXIS) == 1:
        return list(leaves)
    if not packing.apart and not optimizes_programs():
        return [packing.add(leaf) for leaf in leaves]
    sums: list[jax.Array] = all_reduce_p.bind(*leaves, packing=packing)
    return sums


def _messages(*leaves: jax.Array, packing: Packing) -> list[jax.Array]:
    """Computes the sums message by message, the tensors of each raveled into one vector.

    Messages that are to stay apart go one after the other, the last first: gradients come into being in that order.
    """
    results: dict[int, jax.Array] = {}
    groups = packing.groups(leaves)
    before: jax.Array | None = None
    for group in reversed(groups) if packing.apart else groups:
        vector = leaves[group[0]] if len(group) == 1 else jnp.concatenate([jnp.ravel(leaves[i]) for i in group])
        vector = packing.add(vector if before is None else after(before, vector))
        before = vector if packing.apart and vector.size else before
        if len(group) == 1:
            results[group[0]] = vector
            continue
        start = 0
        for i in group:
            end = start + leaves[i].size
            results[i] = jnp.reshape(lax.slice(vector, (start,), (end,)), leaves[i].shape)
            start = end
    return [results[i] for i in range(len(leaves))]


def after(before: jax.Array, value: jax.Array) -> jax.Array:
    """Returns `value`, made to depend on `before`.

    XLA combines all-reduces that do not depend on each other, after it has dropped optimization barriers. So the value
    itself depends on the former result, by a condition that is never true: no byte has more than eight ones. XLA does
    not know that.
    """
    if not value.size:
        return value
    new = _first(value)
    return lax.dynamic_update_slice(value, jnp.where(never(before), jnp.zeros_like(new), new), (0,) * value.ndim)


def never(before: jax.Array) -> jax.Array:
    """Returns False, for which XLA waits until `before` is there (see `after`)."""
    return lax.population_count(jnp.reshape(_first(before), ()).real.astype(jnp.uint8)) > 8


def _first(array: jax.Array) -> jax.Array:
    return lax.slice(array, (0,) * array.ndim, (1,) * array.ndim)


# The equation. It adds up each operand by itself, so its derivatives are all-reduces too, as those of `psum`.

all_reduce_p = jex.Primitive("replicax_all_reduce")
all_reduce_p.multiple_results = True
all_reduce_p.def_impl(_messages)


_Tangent = jax.Array | ad.Zero


def _sums_of(leaves: Sequence[_Tangent], packing: Packing) -> list[_Tangent]:
    """Returns the sums of leaves, some of which are symbolic zeros, and stay so."""
    there = [i for i, leaf in enumerate(leaves) if type(leaf) is not ad.Zero]
    results = list(leaves)
    for i, total in zip(there, all_reduce_p.bind(*(leaves[i] for i in there), packing=packing) if there else ()):
        results[i] = total
    return results


def _jvp(
    primals: Sequence[jax.Array], tangents: Sequence[_Tangent], *, packing: Packing
) -> tuple[list[jax.Array], list[_Tangent]]:
    return all_reduce_p.bind(*primals, packing=packing), _sums_of(tangents, packing)


def _transposed(cotangents: Sequence[_Tangent], *_: object, packing: Packing) -> list[_Tangent]:
    return _sums_of(cotangents, packing)


def _abstract(*kinds: jax.core.ShapedArray, packing: Packing) -> tuple[list[jax.core.ShapedArray], set[jex.Effect]]:
    return [kind.update(weak_type=False) for kind in kinds], {jax_internals.named_axis_effect()(AXIS)}


all_reduce_p.def_effectful_abstract_eval(_abstract)
ad.primitive_jvps[all_reduce_p] = _jvp
ad.primitive_transposes[all_reduce_p] = _transposed
batching.primitive_batchers[all_reduce_p] = lambda leaves, axes, *, packing: (
    all_reduce_p.bind(*leaves, packing=packing),
    axes,
)
mlir.register_lowering(all_reduce_p, mlir.lower_fun(_messages, multiple_results=True))
