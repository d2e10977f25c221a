"""Copies of a mirrored variable that must stay equal: replicas that assign different values to them are refused.

That is what a forgotten `all_reduce` of gradients comes to. Compiled replicas are checked while they are traced, from
where the values come (see `_spmd`); eager ones when they have ended, by the values themselves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax import _across
from replicax._values import ReplicaMesh

_refuse_different = True


def refuse_different_assignments(refuse: bool) -> None:
    """Sets whether replicas may assign different values to a variable without an aggregation.

    By default they may not: `strategy.run` raises ValueError, and all variables keep the values that they had. The
    setting holds for variables made from then on that are not given `copies_may_differ`. A variable in which each
    replica keeps a value of its own is better made with `synchronization=VariableSynchronization.ON_READ`.

    >>> import replicax as rx
    >>> rx.config.refuse_different_assignments(False)  # as in TensorFlow
    >>> rx.config.refuse_different_assignments(True)
    """
    global _refuse_different
    _refuse_different = bool(refuse)


def is_required(copies_may_differ: bool | None) -> bool:
    """Whether the copies of a variable made with this argument must stay equal."""
    return _refuse_different if copies_may_differ is None else not copies_may_differ


def error(variable: Any, found: str = "") -> ValueError:
    """The error for a variable to which the replicas assign different values; `found` says which replicas."""
    return ValueError(
        f"The replicas assign different values to {variable.name} of shape {variable.shape}, which is to have "
        f"the same value on all of them{found}. Sum gradients up before the update, "
        "`gradients = replicax.get_replica_context().all_reduce('SUM', gradients)`, and reduce in the same way "
        "whatever else depends on a replica's own data, random numbers or statistics. A variable in which each "
        "replica keeps a value of its own is made with "
        "`synchronization=replicax.VariableSynchronization.ON_READ`, and one whose copies may come to differ with "
        "`copies_may_differ=True`."
    )


def check(mesh: ReplicaMesh, variables: Iterable[Any]) -> None:
    """`ValueError` where the copies of a variable that eager replicas assigned differ. NaN equals NaN.

    All workers call it with the same variables, and all of them raise.
    """
    required = [v for v in variables if v._equal_by_contract and v._mesh is mesh and v._types]
    contents = [_contents(variable) for variable in required]
    alike = [all(each == own[0] for each in own) for own in contents]
    if mesh.all_local:
        for variable, own in zip(required, contents):
            others = [str(i) for i, each in zip(mesh.local_ids, own) if each != own[0]]
            if others:
                verb = "replica {} differs" if len(others) == 1 else "replicas {} differ"
                raise error(variable, f": {verb.format(', '.join(others))} from replica {mesh.local_ids[0]}")
    elif required and not _is_everyones(mesh, [own[0] for own in contents], all(alike)):
        for variable, own, here in zip(required, contents, alike):
            if not _is_everyones(mesh, [own[0]], here):
                raise error(variable, ": the copies of the workers' replicas differ")


def _contents(variable: Any) -> list[bytes]:
    """The bytes of each local copy."""
    leaves = [value.values for value in variable._stored_values()]
    return [b"".join(_bytes(leaf) for leaf in copy) for copy in zip(*leaves)]


def _bytes(leaf: jax.Array) -> bytes:
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(jax.device_get(leaf))
    if jnp.issubdtype(array.dtype, jnp.inexact):  # one form of NaN, and one of zero
        array = np.where(array != array, np.full_like(array, np.nan), array + np.zeros_like(array))
    return array.tobytes()


def _is_everyones(mesh: ReplicaMesh, contents: list[bytes], alike: bool) -> bool:
    digest = hashlib.blake2b(b"".join(contents)).hexdigest()
    return _across.is_everyones(mesh, f"assigned values {digest}", alike)
