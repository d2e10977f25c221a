"""Makes plans of functions: traces them, cuts their programs, and hands the updates to the parameter servers."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Sequence
from typing import Any, TypeGuard, cast

import jax
import numpy as np

from replicax._base.errors import CancelledError
from replicax._base.messages import received, shown
from replicax._base.types import Tree
from replicax._engine.argument_layout import InputSlot, leaves_of
from replicax._engine.function import Function, calls_of
from replicax._engine.program import Program
from replicax._engine.programs import Programs
from replicax._engine.signature import CallSignature, bind_declared
from replicax._parameter_server import execution, scheduling
from replicax._parameter_server.arrays import Array, of_kind
from replicax._parameter_server.closures import Closure
from replicax._parameter_server.cluster import Cluster
from replicax._parameter_server.cut import cut
from replicax._parameter_server.cut_types import ServedLeaf
from replicax._parameter_server.datasets import PerWorkerDistributedIterator, kinds_of
from replicax._parameter_server.plans import Arrays, Compiled, WorkerPlan, pack_plan, pack_update, unpack_plan
from replicax._parameter_server.remote_value import RemoteValueImpl
from replicax._parameter_server.scheduling import Kinds
from replicax._parameter_server.servers import Call
from replicax._parameter_server.variables import ServedStorage
from replicax._parameter_server.worker_values import MadeValue, Placed, places_of
from replicax._tracing import frames, step_failures
from replicax._tracing.context import StrategyLike
from replicax._tracing.dataset_reads import element_arrays
from replicax._tracing.protocols import storage_of, types_of
from replicax._variables.storage import Storage

_keys = itertools.count()
_RETRIES = 100  # of an update of this process that is computed from a whole old value, which others replace meanwhile


class Plan:
    """A function's program as the coordinator keeps it.

    Args:
        program: the traced program.
        index_slot: the input that is the worker's index, None without.
        cluster: the cluster.

    Attributes:
        key: by which workers and servers know it.
        worker: what workers get.
    """

    def __init__(self, program: Program, index_slot: int | None, cluster: Cluster):
        self.program, self.key = program, f"function {next(_keys)} {program.name}"
        self._cluster, level = cluster, program.level

        def is_here(storage: object) -> TypeGuard[ServedStorage]:
            return isinstance(storage, ServedStorage) and storage.cluster is cluster

        served: list[ServedLeaf] = []
        self._local: list[InputSlot] = []  # leaves that are elsewhere, and come with each call
        results: list[int] = []
        for leaf in leaves_of(level):
            if is_here(leaf.storage):
                served.append(ServedLeaf(leaf.slot, leaf.output, leaf.storage.places[leaf.leaf]))
                continue
            if leaf.slot is not None:
                self._local.append(leaf)
            if leaf.output is not None:
                results.append(leaf.output)
        # Variables that are elsewhere and that the program assigns: their new values are among its results.
        self.assigned_elsewhere = [variable for variable in level.written.values() if not is_here(storage_of(variable))]
        others = [slot for read in program.reads for slot in read.slots]
        index_dtype = None
        if index_slot is not None:
            others.append(index_slot)
            index_dtype = scheduling.index_dtype().name
        others += [cast(int, leaf.slot) for leaf in self._local]
        self._kinds = program.jaxpr.out_avals
        self._results = [*sorted(results), *range(program.state_count, len(self._kinds))]
        self.cut = cut(program.jaxpr, served, others, self._results)
        self.worker = WorkerPlan(
            key=self.key,
            kinds=tuple(kinds_of(read.element) for read in program.reads),
            index_dtype=index_dtype,
            exchange=self.cut.exchange,
            local=len(self._local),
            asks_first=any(not callback.shows for callback in self.cut.callbacks),
        )
        self._sent = False
        self._lock = threading.Lock()

    # Sending it.

    def send_updates(self) -> None:
        """Sends the updates to the servers, the first time."""
        with self._lock:
            if not self._sent:
                servers, calls = self._cluster.servers, {}
                for update, program in zip(self.cut.exchange.updates, self.cut.programs):
                    number = update.server
                    head, arrays = pack_update(update, program, servers.platforms[number], servers.is_local(number))
                    calls[number] = Call("program", {"key": self.key, **head}, arrays)
                if calls:
                    servers.add_programs(calls)
                self._sent = True
                weakref.finalize(self, self._cluster.servers.drop_program, self.key).atexit = False

    def for_worker(self, platform: str, local: bool) -> tuple[dict[str, Any], Sequence[np.ndarray]]:
        """Returns what a worker gets, as the head and the arrays of a call."""
        if self.cut.has_callbacks and not local:
            raise NotImplementedError(
                f"{self.program.name} calls Python functions back in a loop or a branch, or uses what they return. "
                "Workers in other processes cannot do that: print or assert outside of loops, and make values in "
                "functions of datasets."
            )
        head, arrays = pack_plan(self.worker, self.cut, platform, local)
        if self.cut.has_callbacks and self.program.guard is not None:
            compute, *index = head["stages"]
            head["stages"] = [self._raising(compute, self.program.guard), *index]
        return head, arrays

    def _raising(self, compute: Compiled, guard: step_failures.Guard) -> Compiled:
        """Returns the same as a function that raises what the Python functions raise that it calls back."""
        name = self.program.name

        def raising(*arrays: Arrays) -> list[jax.Array]:
            with guard:
                found = compute(*arrays)
                interrupt = step_failures.wait_for(found)
                error = guard.error(name)
            if error is not None or interrupt is not None:
                raise cast(BaseException, error or interrupt)
            return found

        return raising

    def arguments(self, call: CallSignature) -> list[jax.Array]:
        """Returns the arrays of a call, and behind them the values of variables that are in this process."""
        if not self._local:
            return call.dynamic
        values: dict[Storage, list[jax.Array]] = {}
        with frames.lock:
            for storage in dict.fromkeys(leaf.storage for leaf in self._local):
                storage.lent = True  # the program may assign the variable before its value has been sent
                values[storage] = storage.read()
        return [*call.dynamic, *(values[leaf.storage][leaf.leaf] for leaf in self._local)]

    # What comes back.

    def result(self, arrays: Sequence[Array]) -> Tree:
        """Returns the function's result of what a worker has sent; assigns variables that are elsewhere."""
        kinds = [self._kinds[output] for output in self._results]
        leaves = [of_kind(array, kind) for array, kind in zip(arrays, kinds)]
        for variable in self.assigned_elsewhere:
            count = len(types_of(variable))
            frames.frame().store(variable, leaves[:count])
            leaves = leaves[count:]
        return self.program.results.rebuilt(leaves)

    def call_back(self, operands: Sequence[Any]) -> None:
        """Calls the functions that the program calls back; raises what one of them raises."""
        guard, values = self.program.guard, list(operands)
        assert guard is not None
        with guard:
            for callback in self.cut.callbacks:
                own, values = values[: callback.count], values[callback.count :]
                callback.function(*own)
            error = guard.error(self.program.name)
        if error is not None:
            raise error


class ScheduledCall(Closure):
    """A closure with what its workers need.

    Attributes:
        function, call: the function and its arguments.
        plan: the program for the elements that are expected to come.
        may_be_over: whether it is no error if there are no elements left for it.
        values: those among the arguments that workers make for themselves.
    """

    def __init__(
        self,
        number: int,
        value: RemoteValueImpl,
        function: Function,
        call: CallSignature,
        plan: Plan,
        may_be_over: bool,
        values: Sequence[MadeValue],
    ):
        super().__init__(number, value)
        self.function, self.call, self.plan = function, call, plan
        self.may_be_over = may_be_over
        self.values = values
        self._places = places_of(values, call.dynamic)

    def arrays(self) -> tuple[list[Placed], list[np.ndarray | jax.Array]]:
        """Returns where workers' own arrays go, and the arrays that travel, with nothing in those places."""
        arrays: list[np.ndarray | jax.Array] = [*self.plan.arguments(self.call)]
        for place, _, _ in self._places:
            arrays[place] = np.zeros(0)
        return self._places, arrays

    def iterators(self) -> list[PerWorkerDistributedIterator]:
        """Returns the iterators that the elements come from, in the order of the program's reads."""
        found = [read.source(self.call.iterators) for read in self.plan.program.reads]
        for iterator in found:
            if not isinstance(iterator, PerWorkerDistributedIterator):
                raise TypeError(
                    f"A scheduled function takes elements of {received(iterator)}, which is in this process alone. "
                    "Make a per-worker dataset: iter(coordinator.create_per_worker_dataset(dataset_fn))."
                )
        return cast(list[PerWorkerDistributedIterator], found)


class Planner:
    """Makes the plans of one coordinator.

    Args:
        cluster: the cluster.
        strategy: under which functions are traced.
    """

    def __init__(self, cluster: Cluster, strategy: StrategyLike):
        self._cluster = cluster
        self._strategy = weakref.ref(strategy)  # threads have the planner, and end when nobody has the strategy
        self._lock = threading.RLock()

    def planned(
        self, function: Function, args: tuple[Tree, ...], kwargs: dict[str, Tree]
    ) -> tuple[CallSignature, Plan]:
        """Returns the call of a function, and the plan for it and for elements like those that came last."""
        if function.input_signature is not None:
            args, kwargs = bind_declared(function.input_signature, args, kwargs, calls_of(function).code.signature)
        with self._lock, self._scope():
            call = CallSignature(args, kwargs)
            return call, self._plan(function, call, ())

    def planned_again(self, closure: ScheduledCall, kinds: Sequence[Kinds]) -> Plan:
        """Returns the plan of a closure for elements of these kinds."""
        with self._lock, self._scope():
            return self._plan(closure.function, closure.call, kinds)

    def _scope(self) -> contextlib.AbstractContextManager[object]:
        strategy = self._strategy()
        if strategy is None:
            raise CancelledError("The strategy is no more.")
        return strategy.scope()

    def _plan(self, function: Function, call: CallSignature, kinds: Sequence[Kinds]) -> Plan:
        # Not the programs that the same function has in this process.
        calls = calls_of(function)
        programs = calls.programs.elsewhere.get(self)
        if programs is None:
            programs = calls.programs.elsewhere[self] = Programs(calls.code, falls_back=False, steps=1)
        tracing = scheduling.Tracing(kinds)
        with scheduling.traced_by(tracing):
            program = None if call.ragged or call.has_dataset else programs.find_for(call)
        if program is None:
            raise RuntimeError(
                f"{shown(function.python_function)} has no program of its own for these arguments, so that workers "
                "cannot run it: it loops over a dataset, or takes strings or values that no program can take."
            )
        return self._plan_of(program, tracing.index_slot)

    def _plan_of(self, program: Program, index_slot: int | None) -> Plan:
        plan = program.plan
        if not isinstance(plan, Plan):
            plan = Plan(program, index_slot, self._cluster)
            if plan.assigned_elsewhere:
                names = ", ".join(variable.name for variable in plan.assigned_elsewhere)
                raise ValueError(
                    f"{program.name} is scheduled and assigns {names}, which is not on the parameter servers of its "
                    "coordinator. Make it in the scope of the coordinator's strategy."
                )
            plan.send_updates()
            program.plan = plan
        return plan


class RunsHere:
    """Runs the programs of this process that have to do with variables on parameter servers.

    Args:
        cluster: the cluster.
    """

    def __init__(self, cluster: Cluster):
        self._cluster = cluster
        self._lock = threading.RLock()

    def __call__(self, program: Program, call: CallSignature, elements: Sequence[Tree]) -> Tree:
        """Runs a program: reads what it needs, computes here, and has the servers update what is theirs."""
        with self._lock:
            if program.plan is None:
                made = Plan(program, None, self._cluster)
                made.send_updates()
                program.plan = made, unpack_plan(*made.for_worker("", local=True))
            plan, here = cast(tuple[Plan, WorkerPlan], program.plan)
        args, local = here.split(plan.arguments(call))
        others = [*(array for element in elements for array in element_arrays(element)), *local]
        servers = self._cluster.servers
        alone = self._cluster.alone if here.runs_alone else contextlib.nullcontext
        with alone(), self._cluster.numbers.opened() as number:  # one for all attempts, which servers know it by
            for _ in range(_RETRIES):
                computed = execution.compute(here, others, args, servers)
                if here.asks_first:
                    plan.call_back(computed.operands)
                results = execution.update(here, computed, servers, number, self._cluster.numbers.done)
                if results is not None:
                    if computed.operands and not here.asks_first:
                        plan.call_back(computed.operands)
                    return plan.result(results)
        raise RuntimeError(
            f"{program.name} assigns a variable a value that is computed of all of its old one, which workers replaced "
            f"{_RETRIES} times meanwhile. Call it while no function is scheduled."
        )
