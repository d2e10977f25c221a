"""Copies of a mirrored variable that must stay equal: replicas that assign different values to them are refused.

That is what a forgotten `all_reduce` of gradients comes to. Compiled replicas are checked while they are traced, from
where the values come (see `_engine.compiled`); eager ones when they have ended, by the values themselves.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterable
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from replicax._base import doc_pages
from replicax._collectives import cross_process
from replicax._tracing.protocols import State
from replicax._values import ReplicaMesh, cut_axis
from replicax._variables.storage import MirroredStorage
from replicax._variables.variable import Variable

refuses_different = True


class MayDiffer(enum.Enum):
    """Further values of `copies_may_differ`, for variables that another library or an optimizer creates.

    UNLESS_DIVIDED: the copies may differ, unless the strategy divides the variable among the replicas.
    REDUCED_AS_EQUAL: the copies may differ, but `strategy.reduce` takes the first one for their mean.
    """

    UNLESS_DIVIDED = enum.auto()
    REDUCED_AS_EQUAL = enum.auto()


CopiesMayDiffer: TypeAlias = bool | MayDiffer | None


def refuse_different_assignments(refuse: bool) -> None:
    """Sets whether replicas may assign different values to a variable without an aggregation.

    By default they may not: `strategy.run` raises ValueError, and all variables keep the values that they had. The
    setting holds for variables made from then on that are not given `copies_may_differ`. A variable in which each
    replica keeps a value of its own is better made with `synchronization=VariableSynchronization.ON_READ`.

    >>> import replicax as rx
    >>> rx.config.refuse_different_assignments(False)  # as in TensorFlow
    >>> rx.config.refuse_different_assignments(True)
    """
    global refuses_different
    refuses_different = bool(refuse)


def error(variable: State, found: str = "") -> ValueError:
    """Returns the error for a variable to which the replicas assign different values; `found` says which replicas."""
    return ValueError(
        f"The replicas assign different values to {variable.name} of shape {variable.shape}, which is to have "
        f"the same value on all of them{found}. Reduce gradients before the update, "
        "`gradients = replicax.get_replica_context().all_reduce('SUM', gradients)`: SUM if the loss is divided by the "
        "size of the global batch (`replicax.share_of_mean`), MEAN if it is the mean over the replica's own rows and "
        "all replicas have as many. Reduce in the same way whatever else depends on a replica's own data, random "
        "numbers or statistics. A variable in which each replica keeps a value of its own is made with "
        "`synchronization=replicax.VariableSynchronization.ON_READ`, and one whose copies may come to differ with "
        "`copies_may_differ=True`. "
        f"See {doc_pages.page('explanation/values-and-variables#variables')}."
    )


def refuse_cut(leaves: Iterable[object], mesh: ReplicaMesh, name: str) -> None:
    """Raises `ValueError` if an initial value is divided among the replicas of a variable whose copies may differ."""
    for leaf in leaves:
        if cut_axis(mesh.layout_of(leaf, name)) is not None:
            raise ValueError(
                f"The initial value of {name} is an array of which each replica has a part, and replicas may assign "
                "different values to it, each to a copy of its own (`copies_may_differ`). Leave that out, or pass "
                "`numpy.asarray(array)`."
            )


def check(mesh: ReplicaMesh, variables: Iterable[object]) -> None:
    """Checks that the copies of each variable that eager replicas assigned are equal. NaN equals NaN, and -0.0 0.0.

    Workers whose replicas assigned such variables call it together, and all of them raise.

    Raises:
        ValueError: copies differ, or the replicas of one worker assigned other variables than those of another.
    """
    required = [
        v for v in variables if isinstance(v, Variable) and v._equal_by_contract and v._mesh is mesh and v._types
    ]
    required.sort(key=lambda variable: variable.name)  # workers may come with another order
    unlike = [_unlike(variable) for variable in required]
    if mesh.all_local:
        for variable, others in zip(required, unlike):
            if others:
                verb = "replica {} differs" if len(others) == 1 else "replicas {} differ"
                listed = ", ".join(str(mesh.local_ids[i]) for i in others)
                raise error(variable, f": {verb.format(listed)} from replica {mesh.local_ids[0]}")
    elif required:
        _check_workers(mesh, required, [not others for others in unlike])


def _check_workers(mesh: ReplicaMesh, required: list[Variable], alike: list[bool]) -> None:
    """Checks the copies of all workers; `alike` says of which variables the copies of this one are equal."""
    names = "\n".join(f"{variable.name} {variable._types}" for variable in required)
    digests = [_digest(variable) for variable in required]
    if cross_process.same_on_all_workers(mesh, "\n".join([names, *digests]), all(alike)):
        return
    if not cross_process.same_on_all_workers(mesh, names, True):
        raise ValueError(
            "The replicas of one worker assign other variables without an aggregation than those of another. All "
            "replicas must assign the same ones; those of this worker assign "
            f"{', '.join(variable.name for variable in required)}."
        )
    for variable, digest, here in zip(required, digests, alike):
        if not cross_process.same_on_all_workers(mesh, digest, here):
            raise error(variable, ": the copies of the workers' replicas differ")


def _copies(variable: Variable) -> list[tuple[jax.Array, ...]]:
    """Returns each leaf's copies on the replicas of this process."""
    assert isinstance(variable._storage, MirroredStorage)
    return [value.values for value in variable._storage.values()]


def _unlike(variable: Variable) -> list[int]:
    """Returns the numbers of the local copies that differ from the first."""
    first, *others = zip(*_copies(variable))
    return [i for i, copy in enumerate(others, 1) if not all(map(_is_same, first, copy))]


def _raw(leaf: jax.Array) -> jax.Array:
    return jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def _is_same(one: jax.Array, other: jax.Array) -> bool:
    """Returns whether two copies on different devices are equal, compared where the first is."""
    here, there = _raw(one), _raw(other)
    (device,) = here.devices()
    if device.platform == "cpu":  # NumPy sees the same memory
        return _equals(np.asarray(here), np.asarray(there))
    return _equals(here, jax.device_put(there, device))


def _equals(here: jax.Array | np.ndarray, there: jax.Array | np.ndarray) -> bool:
    return bool((here == there).all() or ((here == there) | ((here != here) & (there != there))).all())


def _digest(variable: Variable) -> str:
    """Returns a digest of the value of the first local copy."""
    found = hashlib.blake2b(digest_size=16)
    for copies in _copies(variable):
        array = np.asarray(_raw(copies[0]))
        if jnp.issubdtype(array.dtype, jnp.inexact):  # one form of NaN, and one of zero
            array = np.where(array != array, np.full_like(array, np.nan), array + np.zeros_like(array))
        found.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return found.hexdigest()
