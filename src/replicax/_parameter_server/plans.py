"""The programs of scheduled functions, as coordinator, workers and parameter servers have them."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from replicax._parameter_server.cut_types import Cut, Gather, Shipped, Stage, Take
from replicax._parameter_server.places import Place
from replicax._parameter_server.scheduling import Kinds

Arrays = Sequence[np.ndarray | jax.Array]
_Kinds = Sequence[Sequence[jax.ShapeDtypeStruct]]
Compiled = Callable[..., list[jax.Array]]


def _nothing(*arrays: object) -> list[jax.Array]:
    """Stands for a stage that there is not, or not yet."""
    return []


@dataclass(frozen=True)
class WorkerUpdate:
    """An update of one server, as a worker asks for it.

    Args:
        server: its number.
        takes: which shipped values go there.
        compared: the names of the parts that must not have been replaced since they were read.
    """

    server: int
    takes: tuple[Take, ...]
    compared: tuple[str, ...]


@dataclass(frozen=True)
class WorkerPlan:
    """What a worker needs to run a function.

    Args:
        key: by which the tasks know the program.
        kinds: of the elements that it takes.
        index_dtype: of the worker's index, which it takes behind the elements; None if it takes none.
        gathers: the rows to be looked up.
        reads: the leaves to be read whole.
        shipped: what travels to servers.
        updates: of servers.
        computed: which results the worker computes.
        answers: which results come from updates, see `Cut`.
        local: how many of the arrays that come with a call are values of variables that are in the coordinator's
            process.
        asks_first: whether the coordinator is asked before anything is updated.
        index, compute: the compiled stages.
    """

    key: str
    kinds: tuple[Kinds, ...]
    index_dtype: str | None
    gathers: tuple[tuple[Place, Gather], ...]
    reads: tuple[Place, ...]
    shipped: tuple[Shipped, ...]
    updates: tuple[WorkerUpdate, ...]
    computed: tuple[int, ...]
    answers: tuple[tuple[int, int, int], ...]
    local: int
    asks_first: bool
    index: Compiled = _nothing
    compute: Compiled = _nothing

    def split(self, arrays: Arrays) -> tuple[Arrays, Arrays]:
        """Returns the arrays that come with a call apart: those of the call, and the values of variables."""
        count = len(arrays) - self.local
        return arrays[:count], arrays[count:]

    @property
    def compares(self) -> bool:
        """Whether versions of what is read matter."""
        return any(update.compared for update in self.updates)

    @property
    def runs_alone(self) -> bool:
        """Whether nothing else may be updated from when several servers keep an update until all have applied it."""
        return self.compares and len(self.updates) > 1


@dataclass(frozen=True)
class UpdateProgram:
    """What one server does to update variables for a function.

    Args:
        writes: the names of the parts that it replaces.
        reads: the names of other parts that it reads.
        takes: for each array that comes, None; for ids and rows of which there may be any number, one entry for both:
            the id of no row.
        compiled: the program.
    """

    writes: tuple[str, ...]
    reads: tuple[str, ...]
    takes: tuple[int | None, ...]
    compiled: Compiled = _nothing

    def __call__(self, olds: Arrays, read: Arrays, shipped: Arrays) -> tuple[list[jax.Array], list[jax.Array]]:
        remaining, arrays = iter(shipped), list[np.ndarray | jax.Array]()
        for nothing in self.takes:
            arrays += [next(remaining)] if nothing is None else _padded(next(remaining), next(remaining), nothing)
        arrays += remaining
        new, answers = self.compiled(list(olds), list(read), arrays)
        return new, answers  # type: ignore[return-value]


def _padded(ids: Any, rows: Any, nothing: int) -> list[np.ndarray]:
    """Returns ids and rows, with some behind them that are left out, so that there are few different numbers."""
    count = len(ids)
    size = 8
    while size < count:
        size = size * 3 // 2 if size & (size - 1) == 0 else size // 3 * 4
    more = size - count
    ids = np.concatenate([ids, np.full(more, nothing, ids.dtype)])
    return [ids, np.concatenate([rows, np.zeros((more, *rows.shape[1:]), rows.dtype)])]


# Stages, compiled here or sent elsewhere.


def compiled(stage: Stage, donates: bool = False) -> Compiled:
    """Returns a stage, compiled for this process."""
    return _with_64_bits(stage.function, donates)


def exported(stage: Stage, platform: str, donates: bool = False, avals: _Kinds | None = None) -> np.ndarray:
    """Returns a stage as bytes, for a process that computes on this platform.

    Args:
        stage: the stage.
        platform: `"cpu"` or the like.
        donates: whether it takes over its first list of arrays.
        avals: of its inputs, if not the stage's.
    """
    program = jax.jit(stage.function, donate_argnums=(0,) if donates else ())
    kinds = [list(group) for group in (stage.avals if avals is None else avals)]
    with jax.enable_x64(True):
        data = jax.export.export(program, platforms=[platform])(*kinds).serialize()
    return np.frombuffer(data, np.uint8)


def _any_number(takes: Sequence[int | None], avals: Sequence[jax.ShapeDtypeStruct]) -> list[jax.ShapeDtypeStruct]:
    """Returns what an update takes, with a dimension of any size where there may be any number of rows."""
    scope, remaining = jax.export.SymbolicScope(), iter(avals)
    found = []
    for number, nothing in enumerate(takes):
        if nothing is None:
            found.append(next(remaining))
        else:
            (size,) = jax.export.symbolic_shape(f"n{number}", scope=scope)
            for kind in (next(remaining), next(remaining)):
                found.append(jax.ShapeDtypeStruct((size, *kind.shape[1:]), kind.dtype))
    return found


def _loaded(data: np.ndarray, donates: bool = False) -> Compiled:
    return _with_64_bits(jax.export.deserialize(bytearray(data.tobytes())).call, donates)


def _with_64_bits(function: Callable[..., Any], donates: bool) -> Compiled:
    """Returns a function compiled; the types of its arrays are its own, whatever a process has for defaults."""
    program = jax.jit(function, donate_argnums=(0,) if donates else ())

    def call(*arrays: Arrays) -> list[jax.Array]:
        with jax.enable_x64(True):
            return program(*arrays)  # type: ignore[no-any-return]

    return call


def sent_plan(plan: WorkerPlan, cut: Cut, platform: str, local: bool) -> tuple[dict[str, object], Sequence[np.ndarray]]:
    """Returns a plan as the head and the arrays of a call."""
    if local:
        index = compiled(cut.index) if cut.index is not None else plan.index
        return {"plan": replace(plan, index=index, compute=compiled(cut.compute))}, ()
    stages = [cut.compute] if cut.index is None else [cut.compute, cut.index]
    return {}, [_pickled(plan), *(exported(stage, platform) for stage in stages)]


def loaded_plan(head: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> WorkerPlan:
    """Returns the plan that `sent_plan` made this of."""
    if "plan" in head:
        return head["plan"]  # type: ignore[no-any-return]
    plan: WorkerPlan = pickle.loads(arrays[0].tobytes())
    stages = [_loaded(data) for data in arrays[1:]]
    return replace(plan, compute=stages[0], index=stages[1] if len(stages) > 1 else plan.index)


def sent_update(
    update: UpdateProgram, stage: Stage, platform: str, local: bool
) -> tuple[dict[str, object], Sequence[np.ndarray]]:
    """Returns an update as the head and the arrays of a call."""
    if local:
        return {"update": replace(update, compiled=compiled(stage, donates=True))}, ()
    olds, read, shipped = stage.avals
    avals = olds, read, _any_number(update.takes, shipped)
    return {}, [_pickled(update), exported(stage, platform, donates=True, avals=avals)]


def loaded_update(head: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> UpdateProgram:
    """Returns the update that `sent_update` made this of."""
    if "update" in head:
        return head["update"]  # type: ignore[no-any-return]
    update: UpdateProgram = pickle.loads(arrays[0].tobytes())
    return replace(update, compiled=_loaded(arrays[1], donates=True))


def _pickled(value: object) -> np.ndarray:
    return np.frombuffer(pickle.dumps(value), np.uint8)
