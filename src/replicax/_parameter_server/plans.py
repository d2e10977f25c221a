"""The programs of scheduled functions, as coordinator, workers and parameter servers have them."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np

from replicax._parameter_server.cut_types import Cut, Exchange, Stage, Take, Update
from replicax._parameter_server.scheduling import Kinds

Arrays = Sequence[np.ndarray | jax.Array]
Compiled = Callable[..., list[jax.Array]]


def _nothing(*arrays: object) -> list[jax.Array]:
    """Stands for a stage that there is not, or not yet."""
    return []


@dataclass(frozen=True)
class WorkerPlan:
    """What a worker needs to run a function.

    Args:
        key: by which the tasks know the program.
        kinds: of the elements that it takes.
        index_dtype: of the worker's index, which it takes behind the elements; None if it takes none.
        exchange: what travels between the worker and the servers.
        local: how many of the arrays that come with a call are values of variables that are in the coordinator's
            process.
        asks_first: whether the coordinator is asked before anything is updated.
        index, compute: the compiled stages.
    """

    key: str
    kinds: tuple[Kinds, ...]
    index_dtype: str | None
    exchange: Exchange
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
        return any(update.compared for update in self.exchange.updates)

    @property
    def runs_alone(self) -> bool:
        """Whether nothing else may be updated from when several servers keep an update until all have applied it."""
        return self.compares and len(self.exchange.updates) > 1


class UpdateProgram(NamedTuple):
    """The program by which one server updates variables for a function, and what it replaces, reads and takes."""

    update: Update
    compiled: Compiled

    def __call__(self, olds: Arrays, read: Arrays, shipped: Arrays) -> tuple[list[jax.Array], list[jax.Array]]:
        remaining, arrays = iter(shipped), list[np.ndarray | jax.Array]()
        for take in self.update.takes:
            taken = [next(remaining) for _ in range(1 + take.is_rows)]
            arrays += _pad(taken[0], taken[1], _unused_id(take)) if _unused_id(take) else taken
        new, answers = self.compiled(list(olds), list(read), arrays)
        return new, answers  # type: ignore[return-value]


def _unused_id(take: Take) -> int:
    """Return the id that stands for no row, where there may be any number of rows; 0 where their number is fixed."""
    return take.stop - take.start if take.is_rows and take.stop is not None else 0


def _pad(ids: Any, rows: Any, nothing: int) -> list[np.ndarray]:
    """Returns ids and rows, with some behind them that are left out, so that there are few different numbers."""
    count = len(ids)
    size = 8
    while size < count:
        size = size * 3 // 2 if size & (size - 1) == 0 else size // 3 * 4
    more = size - count
    ids = np.concatenate([ids, np.full(more, nothing, ids.dtype)])
    return [ids, np.concatenate([rows, np.zeros((more, *rows.shape[1:]), rows.dtype)])]


# Stages, compiled here or sent elsewhere.


def _export(stage: Stage, platform: str, donates: bool) -> np.ndarray:
    """Return a stage as bytes, for a process that computes on this platform (`"cpu"` or the like)."""
    program = jax.jit(stage.function, donate_argnums=(0,) if donates else ())
    with jax.enable_x64(True):
        data = jax.export.export(program, platforms=[platform])(*map(list, stage.avals)).serialize()
    return np.frombuffer(data, np.uint8)


def _with_64_bits(function: Callable[..., Any], donates: bool) -> Compiled:
    """Returns a function compiled; the types of its arrays are its own, whatever a process has for defaults."""
    program = jax.jit(function, donate_argnums=(0,) if donates else ())

    def call(*arrays: Arrays) -> list[jax.Array]:
        with jax.enable_x64(True):
            return program(*arrays)  # type: ignore[no-any-return]

    return call


def _pack(
    record: object, stages: Sequence[Stage], platform: str, local: bool, donates: bool = False
) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Return a record and its stages as the head and the arrays of a call.

    Args:
        record: the record, which is pickled.
        stages: the stages.
        platform: the platform of the process that receives them.
        local: whether that is this process: it gets the record itself, and the stages compiled.
        donates: whether stages take over their first list of arrays.
    """
    if local:
        return {"record": record, "stages": [_with_64_bits(stage.function, donates) for stage in stages]}, []
    pickled = np.frombuffer(pickle.dumps(record), np.uint8)
    return {}, [pickled, *(_export(stage, platform, donates) for stage in stages)]


def _unpack(head: Mapping[str, Any], arrays: Sequence[np.ndarray], donates: bool = False) -> tuple[Any, list[Compiled]]:
    """Return the record and the compiled stages of a call from `_pack`."""
    if "record" in head:
        return head["record"], head["stages"]
    record, *stages = (array.tobytes() for array in arrays)
    calls = [jax.export.deserialize(bytearray(stage)).call for stage in stages]
    return pickle.loads(record), [_with_64_bits(call, donates) for call in calls]


def pack_plan(plan: WorkerPlan, cut: Cut, platform: str, local: bool) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Return a plan as the head and the arrays of a call."""
    return _pack(plan, [cut.compute] if cut.index is None else [cut.compute, cut.index], platform, local)


def unpack_plan(head: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> WorkerPlan:
    """Return the plan of a call from `pack_plan`."""
    plan, (compute, *index) = _unpack(head, arrays)
    return replace(plan, compute=compute, index=index[0] if index else _nothing)


def pack_update(update: Update, stage: Stage, platform: str, local: bool) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Return an update as the head and the arrays of a call; there may be any number of ids and rows."""
    scope, remaining = jax.export.SymbolicScope(), iter(stage.avals[2])
    avals: list[jax.ShapeDtypeStruct] = []
    for number, take in enumerate(update.takes):
        taken = [next(remaining) for _ in range(1 + take.is_rows)]
        if _unused_id(take):
            (size,) = jax.export.symbolic_shape(f"n{number}", scope=scope)
            taken = [jax.ShapeDtypeStruct((size, *kind.shape[1:]), kind.dtype) for kind in taken]
        avals += taken
    return _pack(update, [Stage(stage.function, (*stage.avals[:2], tuple(avals)))], platform, local, donates=True)


def unpack_update(head: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> UpdateProgram:
    """Return the update of a call from `pack_update`."""
    update, (program,) = _unpack(head, arrays, donates=True)
    return UpdateProgram(update, program)
