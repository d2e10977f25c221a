"""Plans the step of a program when the program calls it, and answers its other calls with zeros."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np

from replicax._base import jax_internals, nest
from replicax._base.planning import PlanError
from replicax._base.specs import PerReplicaSpec, TensorSpec
from replicax._base.types import Leaf, Tree
from replicax._engine.function import Function
from replicax._plan import api, chips, largest_batch
from replicax._plan import picture as drawing
from replicax._plan.jit_steps import JitStep
from replicax._plan.largest_batch import LargestBatch
from replicax._plan.lowering import Step
from replicax._plan.options import Options, virtual_devices
from replicax._plan.pool import Settings
from replicax._plan.report import TopologyPlan
from replicax._plan.source_lines import is_users
from replicax._tracing import frames
from replicax._values import PerReplica

_LARGE = 2**28  # bytes of results: a function that returns more is not run before the step


class Planned(SystemExit):
    """Ends a program after its step has been planned."""


class Planner:
    """Plans the step of a program when the program calls it."""

    def __init__(self, options: Options):
        self._options = options
        self._topologies = [chips.parse(name) for name in options.topologies]
        api.check(self._topologies)  # before anything takes time
        for topology in self._topologies if options.largest_batch else ():
            largest_batch.check(topology)
        if options.picture is not None:
            drawing.check(options.picture)
        self.is_planned = False
        self._not_seen: dict[
            str, None
        ] = {}  # the ways by which the program has compiled functions that are not planned
        self._passed: dict[str, None] = {}  # the names of the functions that were called and were not the step

    @contextlib.contextmanager
    def in_calls(self) -> Iterator[None]:
        """Return a context in which the planner handles every call of a compiled function from outside of a trace."""
        call, jit, pmap = Function.__call__, jax.jit, jax.pmap

        def plan_or_call(function: Function, *args: Tree, **kwargs: Tree) -> Tree:
            if frames.is_tracing():
                return call(function, *args, **kwargs)
            return self.call(function, args, kwargs)

        def intercept(*args: Any, **options: Any) -> Any:
            compiled = jit(*args, **options)
            is_users = _is_of_user(sys._getframe(1))
            if not args:  # it is a decorator
                return lambda function: _Jitted(compiled(function), self) if is_users else compiled(function)
            return _Jitted(compiled, self) if is_users else compiled

        def note_and_map(*args: Any, **options: Any) -> Any:
            self.note("`jax.pmap`")
            return pmap(*args, **options)

        with contextlib.ExitStack() as stack:
            stack.enter_context(_replace_member(Function, "__call__", plan_or_call))
            stack.enter_context(_replace_member(jax, "jit", intercept))
            stack.enter_context(_replace_member(jax, "pmap", note_and_map))
            for name in ("devices", "local_devices"):
                stack.enter_context(_replace_member(jax, name, self._devices(getattr(jax, name))))
            for name in ("device_count", "local_device_count"):
                stack.enter_context(_replace_member(jax, name, self._device_count(getattr(jax, name))))
            yield

    def _devices(self, devices: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        """Return `jax.devices` for a program that sees as many devices as the first topology has.

        JAX has one more: the CPU that the virtual devices of another platform come with.
        """
        number = self._topologies[0].size
        return lambda *args, **options: devices(*args, **options)[: None if args or options else number]

    def _device_count(self, count: Callable[..., int]) -> Callable[..., int]:
        number = self._topologies[0].size
        return lambda *args, **options: count(*args, **options) if args or options else min(number, count())

    def call(self, function: Function, args: tuple[Tree, ...], kwargs: dict[str, Tree]) -> Tree:
        """Plan the step and end the program; return zeros in place of the results of another function."""
        self._end_again()
        with jax_internals.assume_cudnn():  # in this thread, too
            step = Step(function, args, kwargs)
        if self._is_step(step.name, step.assigns):
            self._plan(step, self._topologies)
        return nest.map_structure(_zeros, step.results)

    def call_jitted(self, function: Callable[..., Tree], args: tuple[Tree, ...], kwargs: dict[str, Tree]) -> Tree:
        """Plan the step and end the program; run another function, or return zeros if its results are large."""
        self._end_again()
        with jax_internals.assume_cudnn():
            step = JitStep(function, args, kwargs)
        if not self._is_step(step.name, step.gives_back):
            return step.zeros() if step.result_size > _LARGE else function(*args, **kwargs)
        # The mesh of the step has as many devices as the program sees.
        size = self._topologies[0].size
        return self._plan(
            step, [topology for topology in self._topologies if topology.size == size or not step.has_mesh]
        )

    def _is_step(self, name: str, looks_like_one: bool) -> bool:
        is_step = looks_like_one if self._options.step is None else name == self._options.step
        if not is_step:
            self._passed[name] = None
        return is_step

    def _plan(self, step: Step | JitStep, topologies: Sequence[chips.Topology]) -> NoReturn:
        """Plan the step, in further processes for topologies of other sizes; print the plan, and end the program."""
        options = self._options
        settings = Settings(options.axes, options.time_limit)
        plan = api.plan_step(step, topologies, options.compare, settings)
        if options.result is not None:
            largest = [plan.largest_batch(topology.name) for topology in topologies] if options.largest_batch else []
            Path(options.result).write_bytes(pickle.dumps((plan.topologies, largest)))
            self._end()
        plans = {of_topology.topology: of_topology for of_topology in plan}
        batches: list[LargestBatch] = []
        missing = [topology for topology in self._topologies if topology.name not in plans]
        for size in dict.fromkeys(topology.size for topology in missing):
            further, largest = _plan_elsewhere(options, [topology for topology in missing if topology.size == size])
            plans.update({of_topology.topology: of_topology for of_topology in further})
            batches += largest
        plan = replace(plan, topologies=tuple(plans[topology.name] for topology in self._topologies))
        print(plan, flush=True)
        if options.picture is not None:
            plan.draw(options.picture)
        for topology in topologies if options.largest_batch else ():
            print(plan.largest_batch(topology.name), flush=True)
        for batch in batches:
            print(batch, flush=True)
        if isinstance(step, JitStep) and options.step is None:
            print(
                f"\n{step.name} is the first function of jax.jit that returns an argument with new values. If it is "
                "not the training step, name that with --step NAME.",
                flush=True,
            )
        self._end()

    def _end(self) -> NoReturn:
        """End the program, or the thread of it that has called the step."""
        self.is_planned = True
        raise Planned(0) if threading.current_thread() is threading.main_thread() else SystemExit(0)

    def _end_again(self) -> None:
        """End a program that has caught the first end and calls further functions."""
        if self.is_planned:
            self._end()

    def note(self, way: str) -> None:
        """Remember a way to compile functions that is not planned, for `advice`."""
        self._not_seen[way] = None

    def advice(self) -> str:
        """Return the message about a program that has ended without its step."""
        not_seen = f" It uses {', '.join(self._not_seen)}, which are not planned." if self._not_seen else ""
        if not self._passed:
            return (
                "The program has ended and called no function of `replicax.function` or `jax.jit`: there is no step to "
                f"plan.{not_seen}"
            )
        names = ", ".join(self._passed)
        expected = "assigns variables or returns an argument with new values"
        if self._options.step is not None:
            expected = f"has the name {self._options.step!r}"
        return (
            f"No compiled function that the program calls {expected}. Choose a step with --step NAME from: {names}."
            f"{not_seen}"
        )


@contextlib.contextmanager
def _replace_member(owner: object, name: str, value: object) -> Iterator[None]:
    """Return a context that replaces a member of a class or a module."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


class _Jitted:
    """A compiled function of the user's program, the calls of which the planner handles outside of traces."""

    def __init__(self, function: Callable[..., Tree], planner: Planner):
        functools.update_wrapper(self, function)
        self._function, self._planner = function, planner

    def __call__(self, *args: Tree, **kwargs: Tree) -> Tree:
        if frames.is_tracing():
            return self._function(*args, **kwargs)
        return self._planner.call_jitted(self._function, args, kwargs)

    def lower(self, *args: Tree, **kwargs: Tree) -> Any:
        """Lower the function as without a plan."""
        self._planner.note("functions compiled by `.lower().compile()`")
        return self._function.lower(*args, **kwargs)  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        if name == "_function":  # while it is copied
            raise AttributeError(name)
        return getattr(self._function, name)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)


def _is_of_user(frame: types.FrameType) -> bool:
    """Return whether the user's program calls `jax.jit` here, or a library's own `jit` on its behalf."""
    module = frame.f_globals.get("__name__", "")
    return module.startswith(("flax.nnx.", "equinox.")) or is_users(frame.f_code.co_filename)


def _plan_elsewhere(
    options: Options, topologies: Sequence[chips.Topology]
) -> tuple[Sequence[TopologyPlan], list[LargestBatch]]:
    """Run the program in another process, which has as many devices as these topologies; return their plans."""
    with tempfile.TemporaryDirectory(prefix="replicax-plan-") as folder:
        file = Path(folder, "plans")
        names = [topology.name for topology in topologies]
        further = replace(options, topologies=names, picture=None, result=str(file))
        variables = {**os.environ, "REPLICAX_VIRTUAL_DEVICES": virtual_devices(topologies[0])}
        command = [sys.executable, "-m", "replicax._plan.program", json.dumps(asdict(further)), *options.command]
        ended = subprocess.run(command, env=variables, stdin=subprocess.DEVNULL, check=False)
        if ended.returncode or not file.exists():
            raise PlanError(
                f"The program has no plan for {', '.join(names)}: run again with as many devices, it ended with status "
                f"{ended.returncode}. Its messages are above."
            )
        plans: tuple[Sequence[TopologyPlan], list[LargestBatch]] = pickle.loads(file.read_bytes())
        return plans


def _zeros(leaf: Leaf) -> Leaf:
    if isinstance(leaf, PerReplicaSpec):
        return PerReplica([_zeros(spec) for spec in leaf.value_specs])
    return np.zeros(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, TensorSpec) else leaf
