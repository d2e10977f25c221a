"""Where the values of variables are read from and written to: frames.

Outside of any trace, a variable's value lies in the variable. While a function is traced, each level of
tracing is a frame of its own, laid over the one below: the first read of a variable makes an input of the
level, and a write stays in the level until its tracing ends; then the new values are outputs.

A frame is *global*, where a variable's leaf is its global array (see `_values.values`), or *local*, where it is the
component of one replica.
"""

from __future__ import annotations

import abc
import contextlib
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.extend.core as jex
from jax.core import ShapedArray
from jax.sharding import NamedSharding, PartitionSpec

from replicax._base import jax_internals, tracebacks
from replicax._base.thread_state import current
from replicax._base.types import Leaf
from replicax._tracing import step_failures
from replicax._tracing.protocols import Components, DistributedState, OneCopyState, State
from replicax._tracing.tape_trace import TapeTrace, below
from replicax._values import DistributedValues, Mirrored, PerReplica, ReplicaMesh, of_array, of_traced, own_component

_Kind = type[PerReplica] | type[Mirrored]

_slots = itertools.count()
_input = jax_internals.InputPrimitive("replicax_input")
_cache_scope: Any = jax.make_user_context(None)
_cache_numbers = itertools.count()


notes_changes = False  # whether variables that are written from now on have changed; before it, they are set up


def note_changes() -> None:
    """Has the variables that are written from now on count as changed."""
    global notes_changes
    notes_changes = True


def note(variable: State) -> None:
    """Notes a variable outside of any trace, which is about to be written."""
    if notes_changes:
        variable._changed = True
        variable._changed_by_input |= bool(current.advancing)
    step_failures.note([variable])


class Frame(abc.ABC):
    """Where variables are read from and written to now."""

    local = False
    mesh: ReplicaMesh | None = None
    gathers: Any = None  # how values are gathered where replicas with other shapes are traced apart
    compiles_runs = True  # whether `strategy.run` outside of any trace may have a program of its own

    def is_replica_of(self, mesh: ReplicaMesh) -> bool:
        """Returns whether the values are those of one replica of this mesh."""
        return self.local and self.mesh is mesh

    def run_on(self, device: jax.Device) -> None:  # noqa: B027 - only a trace has a program to place
        """Notes that a strategy of one device runs in the frame: a program of it is to run there."""

    def note_replicas(self, mesh: ReplicaMesh) -> None:  # noqa: B027
        """Notes that replicas of this mesh run in the frame."""

    @abc.abstractmethod
    def read(self, variable: State) -> list[jax.Array]:
        """Returns the variable's leaves, in the frame's form."""

    @abc.abstractmethod
    def write(self, variable: State, leaves: list[jax.Array]) -> None:
        """Replaces the variable's leaves."""

    def fetch(self, variable: State) -> list[jax.Array]:
        """Returns the leaves as a compiled program takes them, which moves them itself where they are elsewhere."""
        return self.read(variable)

    def store(self, variable: State, leaves: list[jax.Array]) -> None:
        """Replaces the leaves by those that a compiled program returned."""
        self.write(variable, leaves)

    # What depends on where variables are read and written.

    replaces_unread = True  # whether leaves that are replaced need not be read before

    def is_local(self, variable: State) -> bool:
        """Returns whether the variable's leaves are one replica's components in a program."""
        return False

    def replica_on(self, mesh: ReplicaMesh) -> int:
        """Returns which of the local replicas of this mesh reads and writes; 0 where none does."""
        return 0

    def lend(self, variable: State) -> None:
        """Notes that the variable's arrays are handed out: nobody may take them over from then on."""
        variable._storage.lent = True

    @abc.abstractmethod
    def in_form(self, storage: Components, leaf: Leaf, index: int) -> Leaf:
        """Returns a converted value for a leaf in the frame's form."""

    @abc.abstractmethod
    def distributed(self, variable: DistributedState, kind: _Kind) -> list[PerReplica | Mirrored]:
        """Returns the leaves as values with a component for each replica."""

    @abc.abstractmethod
    def read_one(self, variable: OneCopyState) -> list[jax.Array]:
        """Returns the leaves of a replica's own copy, or of any one."""

    @abc.abstractmethod
    def read_component(self, variable: State, replica: int) -> list[jax.Array]:
        """Returns one local replica's component; inside of a replica, that one's own."""

    @abc.abstractmethod
    def write_component(self, variable: State, replica: int, leaves: list[jax.Array]) -> None:
        """Replaces one local replica's component; inside of a replica, that one's own."""


class GlobalFrame(Frame):
    """The values outside of any trace, in global form."""

    def read(self, variable: State) -> list[jax.Array]:
        return variable._storage.read()

    def write(self, variable: State, leaves: list[jax.Array]) -> None:
        refuse_tracers(leaves)
        with lock:
            note(variable)
            variable._storage.write(leaves)

    def fetch(self, variable: State) -> list[jax.Array]:
        return variable._storage.stored()

    def store(self, variable: State, leaves: list[jax.Array]) -> None:
        variable._storage.write(leaves)

    def in_form(self, storage: Components, leaf: Leaf, index: int) -> Leaf:
        return storage.home.global_leaf(leaf, index, traced=False)

    def distributed(self, variable: DistributedState, kind: _Kind) -> list[PerReplica | Mirrored]:
        with lock:
            variable._storage.lent = True
            return variable._storage.values()

    def read_one(self, variable: OneCopyState) -> list[jax.Array]:
        return variable._storage.read_one()

    def read_component(self, variable: State, replica: int) -> list[jax.Array]:
        return variable._storage.read_component(replica)

    def write_component(self, variable: State, replica: int, leaves: list[jax.Array]) -> None:
        refuse_tracers(leaves)
        with lock:
            note(variable)
            variable._storage.write_component(replica, leaves)


class ReplicaFrame(Frame):
    """The values that one eager replica sees: its own components."""

    local = True
    compiles_runs = False

    def __init__(self, mesh: ReplicaMesh, replica: int):
        self.mesh, self.replica = mesh, replica  # the replica's number among the local ones

    def read(self, variable: State) -> list[jax.Array]:
        with lock:
            if variable._mesh is not self.mesh:
                return variable._storage.read()
            return variable._storage.read_component(self.replica)

    def write(self, variable: State, leaves: list[jax.Array]) -> None:
        refuse_tracers(leaves)
        with lock:
            note(variable)
            if variable._mesh is not self.mesh:
                return variable._storage.write(leaves)
            variable._storage.write_component(self.replica, leaves)

    def replica_on(self, mesh: ReplicaMesh) -> int:
        return self.replica if mesh is self.mesh else 0

    def in_form(self, storage: Components, leaf: Leaf, index: int) -> Leaf:
        return leaf.values[self.replica] if isinstance(leaf, DistributedValues) else leaf

    def distributed(self, variable: DistributedState, kind: _Kind) -> list[PerReplica | Mirrored]:
        return [of_traced(kind, leaf, variable._mesh) for leaf in self.read(variable)]

    def read_one(self, variable: OneCopyState) -> list[jax.Array]:
        return self.read(variable) if variable._mesh is self.mesh else variable._storage.read_one()

    def read_component(self, variable: State, replica: int) -> list[jax.Array]:
        return self.read(variable)

    def write_component(self, variable: State, replica: int, leaves: list[jax.Array]) -> None:
        self.write(variable, leaves)


class TraceFrame(Frame):
    """A level of tracing. `inputs` and `written` are what its function turned out to read and to write."""

    def __init__(self, local: bool, mesh: ReplicaMesh | None = None):
        self.local, self.mesh = local, mesh
        self.trace: jax.core.Trace | None = None  # set when the tracing starts
        self.values: dict[int, list[jax.Array]] = {}
        self.variables: dict[int, State] = {}
        self.inputs: dict[int, list[int]] = {}  # id of a variable -> the slots of its leaves
        self.written: dict[int, State] = {}
        self.device: jax.Device | None = None  # where a strategy of one device wants the program to run
        self.meshes: list[ReplicaMesh] = []  # of the strategies whose replicas run in it
        self.shared: list[tuple[State, str, list[jax.Array]]] = []  # assignments to variables that the replicas share
        self.passes: dict[tuple[Any, str], None] = {}  # stages and names of the passes that have rewritten its jaxprs
        self.pads_rows = False  # whether rows are computed that do not count, see `_passes.padded_rows`

    def run_on(self, device: jax.Device) -> None:
        self.device = device

    def note_replicas(self, mesh: ReplicaMesh) -> None:
        self.meshes.append(mesh)

    def is_local(self, variable: State) -> bool:
        """Returns whether the variable's leaves stand here as one replica's components."""
        return self.local and variable._mesh is self.mesh and self.mesh is not None

    def new_input(self, aval: jax.Array | jax.ShapeDtypeStruct) -> tuple[int, jax.Array]:
        """Adds an input to this level, and returns its slot and its tracer."""
        slot = next(_slots)
        # In replicas, the type has their mesh, as the types of computed values have: Equinox compares the two.
        sharding = NamedSharding(jax.sharding.get_abstract_mesh(), PartitionSpec())
        with jex.set_current_trace(self.trace):
            return slot, _input.bind(slot=slot, aval=ShapedArray(aval.shape, aval.dtype, sharding=sharding))

    def read(self, variable: State) -> list[jax.Array]:
        key = id(variable)
        if key not in self.values:
            pairs = [self.new_input(aval) for aval in variable._storage.home.leaf_types(self.is_local(variable))]
            self.variables[key] = variable
            self.inputs[key] = [slot for slot, _ in pairs]
            self.values[key] = [tracer for _, tracer in pairs]
        if untaped_trace() is not self.trace and current.trace_caches:
            current.trace_caches[-1].read.add(key)
        return self.values[key]

    def write(self, variable: State, leaves: list[jax.Array]) -> None:
        if untaped_trace() is not self.trace:
            raise RuntimeError(
                f"{variable!r} is assigned inside of a JAX transformation (jax.jit, jax.grad, lax.scan, lax.cond ...) "
                "within the function, where the new value would not come out. Return the value from the transformed "
                "function and assign it outside of it."
            )
        key = id(variable)
        self.variables[key] = self.written[key] = variable
        self.values[key] = list(leaves)
        variable._changed = True
        if current.trace_caches:
            current.trace_caches[-1].note_change(key)

    replaces_unread = False  # the program is to take over the old arrays

    def lend(self, variable: State) -> None:
        """Does nothing: what is handed out are tracers."""

    def in_form(self, storage: Components, leaf: Leaf, index: int) -> Leaf:
        return own_component(leaf) if self.local else storage.home.global_leaf(leaf, index, traced=True)

    def distributed(self, variable: DistributedState, kind: _Kind) -> list[PerReplica | Mirrored]:
        of_leaf = of_traced if self.local else of_array
        return [of_leaf(kind, leaf, variable._mesh) for leaf in self.read(variable)]

    def read_one(self, variable: OneCopyState) -> list[jax.Array]:
        return self.read(variable)

    def read_component(self, variable: State, replica: int) -> list[jax.Array]:
        leaves = self.read(variable)
        if self.local:
            return leaves
        return [leaf[replica] if variable._storage.home.has_rows(i) else leaf for i, leaf in enumerate(leaves)]

    def write_component(self, variable: State, replica: int, leaves: list[jax.Array]) -> None:
        if self.local:
            return self.write(variable, leaves)
        raise RuntimeError(
            f"One component of {variable.name} is assigned in compiled code, outside of any replica. Assign it in the "
            "replica function, or through `strategy.extended.update`."
        )

    @property
    def shared_leaves(self) -> list[jax.Array]:
        """The values that are assigned to variables that the replicas share, as each replica has them."""
        return [leaf for _, _, leaves in self.shared for leaf in leaves]

    def replay(
        self,
        jaxpr: jex.ClosedJaxpr,
        supplied: dict[int, Any],
        *args: jax.Array,
        evaluate: Callable[..., list[jax.Array]] | None = None,
    ) -> list[jax.Array]:
        """Evaluates the level's jaxpr with these values for its inputs, as JAX does or as `evaluate(jaxpr, *args)`."""
        with _input.supplied(supplied):
            return jex.jaxpr_as_fun(jaxpr)(*args) if evaluate is None else evaluate(jaxpr, *args)


def note_passes(applied: Iterable[tuple[Any, str]]) -> None:
    """Record stages and names of passes that have rewritten a part of the functions that are being traced."""
    applied = dict.fromkeys(applied)
    for level in levels():
        level.passes.update(applied)


def is_input(eqn: jex.JaxprEqn) -> bool:
    """Returns whether an equation of a level's jaxpr is one of its inputs, that of the slot in its parameters."""
    return eqn.primitive is _input


def with_arguments(closed: jex.ClosedJaxpr) -> tuple[jex.ClosedJaxpr, list[int]]:
    """Return a level's jaxpr with its inputs as the first arguments, and their slots in this order."""
    jaxpr = closed.jaxpr
    inputs = [eqn for eqn in jaxpr.eqns if is_input(eqn) and not isinstance(eqn.outvars[0], jex.DropVar)]
    variables = [*(eqn.outvars[0] for eqn in inputs), *jaxpr.invars]
    eqns = [eqn for eqn in jaxpr.eqns if not is_input(eqn)]
    constants = dict(zip(jaxpr.constvars, closed.consts))
    with_inputs = jax_internals.part_of_jaxpr(jaxpr, eqns, variables, jaxpr.outvars, constants)
    return with_inputs, [eqn.params["slot"] for eqn in inputs]


def untaped_trace() -> jax.core.Trace | None:
    """Returns the current JAX trace below any gradient tapes."""
    trace = jax_internals.current_trace()
    return below(trace) if isinstance(trace, TapeTrace) else trace


def is_staging() -> bool:
    """Returns whether a program is being recorded, as under `jax.jit`; `jax.grad` alone does not count."""
    return jax_internals.is_staging(untaped_trace())


def warn_of_constant(name: str) -> None:
    """Warns where a variable's value becomes a constant of a program that JAX records by itself."""
    if not isinstance(frame(), TraceFrame) and is_staging():
        tracebacks.warn(
            f"{name} is read inside of jax.jit or the like, which keeps the value that it has now as a constant. Use "
            "replicax.function in place of jax.jit, or pass the value as an argument.",
        )


def is_tracing() -> bool:
    """Returns whether the program is being traced by JAX (a gradient tape alone does not count)."""
    return not jax_internals.is_eager(untaped_trace())


def refuse_tracers(leaves: list[jax.Array]) -> None:
    """Raises `RuntimeError` where a value that JAX is tracing would be kept in a variable."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        raise RuntimeError(
            "A variable is assigned a traced value inside of jax.jit or another JAX transformation, where the new "
            "value would not come out. Use replicax.function in place of jax.jit, or return the value and assign it "
            "outside."
        )


lock = step_failures.lock

_outermost = GlobalFrame()


def frame() -> Frame:
    """Return the current frame of this thread."""
    stack: list[Frame] = current.frames
    return stack[-1] if stack else _outermost


def untraced_frame() -> Frame:
    """Return the innermost frame of this thread that is no level of tracing: an eager replica's, or the global one."""
    return next((frame for frame in reversed(current.frames) if not isinstance(frame, TraceFrame)), _outermost)


def levels() -> list[TraceFrame]:
    """Return the levels that this thread is tracing, the outermost first."""
    return [frame for frame in current.frames if isinstance(frame, TraceFrame)]


class TraceCaches:
    """A context in which JAX takes nothing from its caches that was traced outside of it.

    JAX keeps what it traced of jitted functions, checkpointed functions and loop bodies, and takes it again for the
    same function. What they read of variables is part of it. Its caches tell user contexts apart, so each level of
    tracing has its own, and gets another as soon as a variable that such a function read is assigned or a tape follows
    other variables. JAX keeps the contexts as well, which therefore are numbers.
    """

    def __enter__(self) -> None:
        self.read: set[int] = set()  # ids of the variables that functions read which JAX has traced
        self._current = _cache_scope(next(_cache_numbers))
        self._current.__enter__()
        current.trace_caches.append(self)

    def __exit__(self, *error: object) -> None:
        current.trace_caches.pop()
        self._current.__exit__(*error)

    def renew(self) -> None:
        """Let nothing be taken that was traced before. For the innermost context only."""
        self.__exit__(None, None, None)
        self.__enter__()

    def note_change(self, variable: int | None = None) -> None:
        """Note that a variable of this id, or what is known of all of them, has changed."""
        if variable in self.read or (variable is None and self.read):
            self.renew()


class entered:
    """A context in which this frame is the current one."""

    def __init__(self, frame: Frame):
        self._frame = frame
        self._caches = TraceCaches() if isinstance(frame, TraceFrame) else contextlib.nullcontext()

    def __enter__(self) -> Frame:
        self._caches.__enter__()
        current.frames.append(self._frame)
        return self._frame

    def __exit__(self, *error: object) -> None:
        current.frames.pop()
        self._caches.__exit__(*error)
