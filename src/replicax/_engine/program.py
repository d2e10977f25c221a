"""One compiled program of a `function`: what goes in and comes out, and a call of it.

A program takes the variables' current values, donates those that it replaces, and puts the new ones in their place. An
array that somebody outside may hold is copied before it would be donated. Small variables that are updated alike go in
and come out side by side, in vectors that they share (see `_variables.packed_storage`).
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from replicax._base import errors, nest
from replicax._base.optimizing import optimizes_programs
from replicax._base.types import Tree
from replicax._collectives import cross_process, in_flight
from replicax._collectives.all_reduce import packing_for
from replicax._engine import compile_log
from replicax._engine.program_inputs import Arrays, ProgramInputs, leaves_of, meshes_of
from replicax._engine.program_outputs import ProgramOutputs
from replicax._engine.repeated_program import RepeatedProgram, Returned, Step, token_of
from replicax._engine.signature import CallSignature
from replicax._passes import cpu_convolutions, merge_all_reduces, nan_checks, scatters_in_turn, vectorize, work
from replicax._tracing import active_tapes, frames, lost_values, step_failures, undo
from replicax._tracing.dataset_reads import DatasetRead, element_arrays
from replicax._tracing.state import Stored
from replicax._values import PerReplica
from replicax._variables import packed_storage
from replicax._variables.storage import LeafOf

_nowhere = contextlib.nullcontext()
_PER_ARRAY = 1 << 24  # multiplications, which take a hundred times as long as to hand over an array


def _repeats_shapes(leaves: Sequence[LeafOf]) -> bool:
    """Returns whether there are few shapes among leaves of variables, as in a model of many alike layers."""
    return 2 * len({storage.types[leaf].shape for storage, leaf in leaves}) <= len(leaves)


class Program:
    """One compiled program: of one signature, in one context.

    Attributes:
        name: the function's.
        label: the same, with the shapes of its input.
        level: what it reads and writes of variables.
        jaxpr: what it computes.
        reads: the elements of datasets that it takes.
        results: what it returns.
        compile_note: says what is compiled, in the line of `compile_log`.
        compiled: the function that JAX compiles.
        is_compiled: whether it has been called.
        token: which result tells that a call has ended.
        plan: how several tasks run it together, kept here by who has made that.
    """

    compiled: jax.stages.Wrapped
    _inputs: ProgramInputs

    def __init__(
        self,
        name: str,
        level: frames.TraceFrame,
        jaxpr: jex.ClosedJaxpr,
        call: CallSignature,
        reads: list[DatasetRead],
        results: ProgramOutputs,
    ):
        self.level, self.reads, self.results = level, reads, results
        self.jaxpr, self._guard = step_failures.guarded(jaxpr)
        # Whether variables keep their arrays until a call has ended, in place of being donated.
        self._keeps = self._guard is not None and self._guard.keeps
        self._keep_alive = call.statics  # the objects whose identity is part of the key
        meshes = meshes_of(level, call, reads)
        # A program that no strategy has put elsewhere runs where the variables are that stay on a device.
        places = {v._storage.device for v in level.variables.values()} - {None}
        if level.device is None and len(places) == 1:
            (level.device,) = places
        self._over_devices = any(mesh.mesh.size > 1 for mesh in meshes) or not places <= {level.device}
        meshes = [] if level.local else meshes
        self._optimized = optimizes_programs()
        placed = meshes[0] if meshes else level.device
        self._on_cpu = (jax.default_backend() if placed is None else placed.platform) == "cpu"
        if self._optimized and self._on_cpu:
            self.jaxpr = cpu_convolutions.in_faster_forms(self.jaxpr)
        self._packing = packing_for(meshes[0] if meshes else None) if self._optimized else None
        if self._packing is not None and self._packing.fit.ahead:
            self.jaxpr = scatters_in_turn.in_turn(self.jaxpr, self._packing.fit.ahead)
        # Of replicas whose calls in flight are bounded, or watched by the workers of a job; these count first.
        meshes = sorted((mesh for mesh in meshes if mesh.needs_bound or not mesh.all_local), key=lambda m: m.all_local)
        self._mesh = meshes[0] if meshes else None
        # The jaxpr's first outputs are the new leaves of variables, the results stand behind them.
        self.state_count = sum(len(variable._types) for variable in level.written.values())
        self.compile_note = compile_log.CompileNote()
        self._checks = False  # whether its results are looked at for NaN
        self._with_checks: Program | None = None  # the program that does so
        self.token = token_of(results.leaves)
        self.name = name
        lost_values.programs.add(self)
        inputs = [*call.dynamic, *(leaf for read in reads for leaf in element_arrays(read.element))]
        self.label = f"{self.name}({in_flight.shapes((x.dtype, x.shape) for x in inputs)})"
        self.is_compiled = False
        self.plan: object = None
        self._moved = False  # whether leaves of its variables have come to stand elsewhere
        self._several: dict[int, RepeatedProgram] = {}  # programs of several steps, by how many
        self._taped = jax.jit(self._named(self._compute_taped))  # for calls under a gradient tape
        # Runs it, where variables lie in other processes.
        self._runner = next((run for v in level.variables.values() if (run := v._storage.runner) is not None), None)
        if not level.local and self._runner is None:
            self._pack()
        self._arrange(None)

    @property
    def is_guarded(self) -> bool:
        """Whether each call is waited for, since it may fail."""
        return self._guard is not None

    @property
    def assigns(self) -> bool:
        """Whether a call assigns variables."""
        return bool(self.level.written)

    @property
    def is_repeatable(self) -> bool:
        """Whether it can be part of a program of several steps."""
        # What it prints or asserts is to come out after each step.
        alone = self.level.local or self._runner is not None
        return not self.jaxpr.effects and not alone and self.results.stackable

    def result_specs(self) -> Tree:
        """Returns the specs of what a call returns."""
        return self.results.specs(self.jaxpr.out_avals[self.state_count :])

    def _named(self, method: Step) -> Step:
        def program(*args: Arrays) -> Returned:
            return method(*args)

        program.__name__ = program.__qualname__ = self.name
        return program

    def _pack(self) -> None:
        """Has small variables that it updates alike share vectors."""
        if self.jaxpr.effects or not self._optimized:
            return
        replaced = {
            x.output: (x.slot, (x.storage, x.leaf))
            for x in leaves_of(self.level)
            if x.slot is not None and x.output is not None
        }
        if len(replaced) >= packed_storage.FEWEST:
            slots = {output: slot for output, (slot, _) in replaced.items()}
            alike = merge_all_reduces.updated_alike(self.jaxpr, slots)
            groups = [[replaced[output][1] for output in group] for group in alike]
            if self._on_cpu and not self._over_devices and self._computes_for_long(len(replaced)):
                # XLA compiles layers of the same shape once, unless their variables are cut out of a vector, each at
                # another place. A short program that compiles longer is worth it, but not one that takes its time.
                groups = [group for group in groups if not _repeats_shapes(group)]
            packed_storage.arrange(groups)

    def _computes_for_long(self, arrays: int) -> bool:
        """Returns whether a call takes so long that to hand over so many arrays does not count."""
        return work.multiplications(self.jaxpr) >= arrays * _PER_ARRAY

    def _arrange(self, before: ProgramInputs | None) -> None:
        """Makes the program for where the variables' leaves are now, if they are elsewhere than before."""
        with frames.lock:
            self._moved = False
            for variable in self.level.variables.values():
                variable._storage.watch(self)
            self._inputs = ProgramInputs(self.level, self._over_devices)
        if before is None or not self._inputs.are_as(before):
            self.is_compiled, self._several = False, {}
            self.compiled = jax.jit(self._named(self._compute), donate_argnums=self._donated())

    def leaves_moved(self) -> None:
        """Notes that leaves of its variables have come to stand elsewhere: the next call looks where they are."""
        self._moved = True

    def layouts_changed(self) -> None:
        """Notes that arrays of its variables are split in another way: JAX compiles the program again."""
        self.is_compiled = False
        for repeated in self._several.values():
            repeated.is_compiled = False

    def _donated(self) -> tuple[int, ...]:
        """Returns which arguments the compiled program takes over."""
        return () if self.level.local or self._keeps else (0, 1)

    def computing(self, jaxpr: jex.ClosedJaxpr) -> Program:
        """Returns the same program with another jaxpr, of the same inputs and outputs."""
        other = copy.copy(self)
        other.jaxpr = jaxpr
        other._arrange(None)
        return other

    # What is compiled.

    def _compute(
        self, replaced: Arrays, donated: Arrays, read: Arrays, kept: Arrays, pulled: Arrays, dynamic: Arrays
    ) -> Returned:
        """Returns the vectors and leaves that replace those that went in, and the results."""
        inputs, vectors = self._inputs, [*replaced, *read]
        supplied = self._supplied(inputs.by_themselves, [*donated, *kept], pulled, vectors)
        written = [inputs.outputs_of(vector) for vector in inputs.vectors[: inputs.replaced]]
        whole = [[place for place in each if place is not None] if None not in each else [] for each in written]
        if vectors or (self._mesh is not None and self._mesh.needs_bound):
            wanted = [places for places in whole if places]
            out, made = merge_all_reduces.evaluate(self.level, self.jaxpr, supplied, dynamic, self._packing, wanted)
        else:
            out, made = self.level.replay(self.jaxpr, supplied, *dynamic), []
        new: Arrays = []
        remaining = iter(made)
        for shared, vector, each, all_of_it in zip(inputs.vectors, replaced, written, whole):
            if all_of_it:
                vector = next(remaining)
            else:  # only some of its leaves are replaced
                for part, leaf in zip(shared.slots, (None if i is None else out[i] for i in each)):
                    if leaf is not None:
                        vector = jax.lax.dynamic_update_slice(vector, jnp.ravel(leaf), (part.start,))
            new.append(shared.home.leaving(vector))
        in_vectors = {place for each in written for place in each}
        arrays = {place: leaf for place, leaf in enumerate(out) if leaf is not None and place not in in_vectors}
        new += [leaf for place, leaf in arrays.items() if place < self.state_count]
        return new, self._results([leaf for place, leaf in arrays.items() if place >= self.state_count])

    def _compute_taped(self, values: Arrays, pulled: Arrays, dynamic: Arrays) -> Returned:
        """Returns the same for a tape, which sees every variable by itself, and nothing donated."""
        inputs = self.level.inputs.items()
        slots = [(self.level.variables[key]._storage, slot) for key, slots in inputs for slot in slots]
        out = self.level.replay(self.jaxpr, self._supplied(slots, values, pulled), *dynamic)
        return out[: self.state_count], self._results(out[self.state_count :])

    def _supplied(
        self, slots: Sequence[tuple[Stored, int]], values: Arrays, pulled: Arrays, vectors: Sequence[jax.Array] = ()
    ) -> dict[int, vectorize.Value]:
        supplied: dict[int, vectorize.Value] = dict(zip((slot for read in self.reads for slot in read.slots), pulled))
        for (storage, slot), value in zip(slots, values):
            supplied[slot] = value if self.level.local else storage.entering(value)
        for slot, (number, place) in self._inputs.pieces.items() if vectors else ():
            supplied[slot] = vectorize.Piece(vectors[number], place.start, place.shape)
        return supplied

    def _results(self, results: Arrays) -> Arrays:
        return [*results, jnp.zeros((), jnp.int8)] if self._mesh is not None and self.token == -1 else results

    def _repeated(self, steps: int) -> RepeatedProgram:
        """Returns the program of several steps."""
        if steps not in self._several:
            inputs, donors = self._inputs, {id(arrays.storage) for arrays in self._inputs.donors}
            fresh = [arrays for arrays in inputs.written if id(arrays.storage) not in donors]
            types = [arrays.storage.leaf_types(False)[i] for arrays in fresh for i in arrays.leaves]
            rows = [isinstance(leaf, PerReplica) for read in self.reads for leaf in nest.values(read.element)]
            kinds = self.jaxpr.out_avals[self.state_count :]
            repeated = RepeatedProgram(steps, kinds, self._mesh is not None)
            slow = self._optimized and self._on_cpu and cpu_convolutions.convolves(self.jaxpr)
            step = cpu_convolutions.in_loop(self._compute) if slow else self._compute
            program = repeated.function(step, types, rows, self.results.over_steps)
            repeated.compiled = jax.jit(self._named(program), donate_argnums=self._donated())
            self._several[steps] = repeated
        return self._several[steps]

    # A call.

    def run(self, call: CallSignature, pulled: Sequence[Tree], taped: bool, steps: int = 1) -> Tree:
        """Runs it with the arguments of a call and the elements that it pulled; a gradient tape may look on.

        With more than one of `steps` it is the program of so many, and the elements are those of all of them (see
        `_engine.multi_step`).
        """
        if self._runner is not None and not taped:
            return self._runner(self, call, pulled)
        if nan_checks.are_looked_for() and not self._checks and not taped:
            with jax.debug_nans(False):  # JAX would name neither the operation nor the line
                return self._checking().run(call, pulled, taped, steps)
        if self._guard is None:
            return self._run(call, pulled, taped, steps)
        awaited: set[int] = set()
        with self._guard:
            try:
                return self._run(call, pulled, taped, steps, awaited if self._keeps else None)
            finally:
                frames.free(awaited)

    def _run(
        self,
        call: CallSignature,
        pulled: Sequence[Tree],
        taped: bool,
        steps: int,
        awaited: set[int] | None = None,
    ) -> Tree:
        if call.probe is not None:
            call.probe.entered(self)
        frame, level, mesh = frames.frame(), self.level, self._mesh
        label = self.label if steps == 1 else f"{steps} steps of {self.label}"
        chosen: Program | RepeatedProgram = self
        with (
            in_flight.dispatching(mesh, label, small=True) if mesh is not None else _nowhere as under_way,
            frames.lock,
        ):
            if frames.awaited and not step_failures.in_callback():
                frames.wait_until_free(self._assigned())
            if lost_values.any_lost:
                for key in level.inputs:
                    level.variables[key]._storage.refuse_lost()
            undo.note(level.written.values())
            elements = [leaf for element in pulled for leaf in element_arrays(element)] if pulled else []
            program: Callable[..., Returned]
            arguments: tuple[Arrays, ...]
            if taped:
                program, arguments = self._taped, (self._tape_reads(frame), elements, call.dynamic)
            else:
                arguments = (*self._variables(frame), elements, call.dynamic)
                chosen = self if steps == 1 else self._repeated(steps)
                program = chosen.compiled
            if awaited is not None:
                awaited.update(self._assigned() - frames.awaited)
                frames.awaited.update(awaited)
            compiles = not (chosen.is_compiled or taped)
            placed = _nowhere if level.device is None else jax.default_device(level.device)
            with placed, compile_log.begin(self.name) if compiles else _nowhere:
                if compiles:
                    if under_way is not None:
                        under_way.compile(program, *arguments)
                elif call.probe is not None:
                    program = call.probe.watched(program)
                if taped or self._keeps:
                    new, results = program(*arguments)
                else:
                    new, results = self._carried_out(program, arguments, frame)
            if compiles:
                chosen.is_compiled = True
                self._log_compile(steps)
            if taped and not self._keeps:
                self._store_taped(frame, new)
            if under_way is not None:
                under_way.output = results[chosen.token]
        if self._guard is not None:  # what it prints comes out before the call returns
            self._end(frame, new, results, arguments, taped)
        return self.results.rebuilt(results)

    def _log_compile(self, steps: int) -> None:
        name = self.name if steps == 1 else f"{self.name}, {steps} steps a call,"
        name = f"{name} with a look for NaN" if self._checks else name
        compile_log.end(name, self.compile_note)
        self.compile_note = self.compile_note._replace(traced=0.0, cause="It had been compiled for these before. ")

    def _checking(self) -> Program:
        """Returns the same program, whose results are looked at for NaN before they replace anything."""
        if self._with_checks is None:
            other = copy.copy(self)
            other._guard, other._keeps, other._checks = self._guard or step_failures.Guard(), True, True
            other._arrange(None)
            self._with_checks = other
        return self._with_checks

    def _nan_error(self, arguments: tuple[Arrays, ...]) -> FloatingPointError:
        replaced, donated, read, kept, elements, dynamic = arguments
        own = self._inputs.by_themselves
        supplied = self._supplied(own, [*donated, *kept], elements, [*replaced, *read])
        arrays = {slot: vectorize.whole(value) for slot, value in supplied.items()}
        return nan_checks.error(self.name, self.level, self.jaxpr, arrays, dynamic)

    def _end(
        self, frame: frames.Frame, new: Arrays, results: Arrays, arguments: tuple[Arrays, ...], taped: bool
    ) -> None:
        """Waits for the end of a call that may fail. Only if it did not, the variables that it keeps change."""
        assert self._guard is not None
        interrupt = step_failures.wait_for([new, results] if self._keeps else [])
        error = self._guard.error(self.name)
        if self._keeps and self._is_anywhere(error is not None, f"the end of {self.name}") and error is None:
            error = errors.FailedElsewhere(
                f"A function that the compiled {self.name} calls back raised an error on another worker, which "
                "tells it. The variables keep the values that they had before."
            )
        if error is None and self._checks:
            there = self._is_anywhere(nan_checks.are_in([*new, *results]), f"the look for NaN in {self.name}")
            error = self._nan_error(arguments) if there else None
        if error is None and self._keeps:
            with frames.lock:
                if taped:
                    self._store_taped(frame, new)
                else:
                    self._inputs.put(frame, new)
        if error is not None or interrupt is not None:
            raise error or interrupt  # type: ignore[misc]

    def _is_anywhere(self, here: bool, what: str) -> bool:
        """Returns whether something is so on this worker or, in a program of several, on any of them."""
        if self._mesh is None or self._mesh.all_local:
            return here
        with frames.lock:
            return cross_process.any_worker(self._mesh, here, what)

    def _store_taped(self, frame: frames.Frame, new: Arrays) -> None:
        leaves = iter(new)
        for variable in self.level.written.values():
            frame.store(variable, list(itertools.islice(leaves, len(variable._types))))
            variable._storage.lent = True  # the tape holds on to what it saw

    def _assigned(self) -> set[int]:
        """Returns the ids of the variables that it assigns, and of the shared stores that they stand in."""
        written = [leaf.storage for leaf in self._inputs.leaves if leaf.output is not None]
        stores = {id(slot.store) for storage in written for slot in storage.slots.values()}
        return stores | {id(variable) for variable in self.level.written.values()}

    def _carried_out(
        self, program: Callable[..., Returned], arguments: tuple[Arrays, ...], frame: frames.Frame
    ) -> Returned:
        """Runs a program that takes over arrays of variables, which have the new ones afterwards, come what may.

        A KeyboardInterrupt comes as soon as the program has returned, since Python does nothing else most of the time.
        By then what it returned is in a list, as both are one step for Python.
        """
        returned: list[Returned] = []
        try:
            returned.extend(itertools.starmap(program, (arguments,)))
            self._inputs.put(frame, returned[0][0])
        except BaseException as error:
            if returned:
                self._inputs.put(frame, returned[0][0])
            elif any(array.is_deleted() for arrays in arguments[:2] for array in arrays):
                lost_values.lose(self._inputs.lost(), self.name, error)
                error.add_note(
                    f"When {self.name} failed, its program had already taken over the values of the variables that it "
                    "assigns. They are lost: restore them from a checkpoint, or assign all of them."
                )
            raise
        return returned[0]

    def lower(self, call: CallSignature) -> jax.stages.Lowered:
        """Returns what JAX makes of it for these arguments; nothing is run."""
        return self.compiled.lower(*self.arguments(call))

    def arguments(self, call: CallSignature) -> tuple[Arrays, ...]:
        """Returns what the compiled program takes in such a call, with the elements that it was traced with."""
        elements = [leaf for read in self.reads for leaf in element_arrays(read.element)]
        with frames.lock:
            return (*self._variables(frames.frame()), elements, call.dynamic)

    def state(self) -> tuple[Arrays, ...]:
        """Returns arrays that are there once the last call has ended: variables, as the next one would take them."""
        with frames.lock:
            return self._variables(frames.frame())

    def _variables(self, frame: frames.Frame) -> tuple[Arrays, Arrays, Arrays, Arrays]:
        """Returns the first arguments of the compiled program."""
        if self._moved:
            self._arrange(self._inputs)
        return self._inputs.taken(frame)

    def _tape_reads(self, frame: frames.Frame) -> Arrays:
        variables = (self.level.variables[key] for key in self.level.inputs)
        return [leaf for variable in variables for leaf in active_tapes.on_read(variable, frame.read(variable))]
