"""Steps that the user has compiled with `jax.jit`, `nnx.jit` or `eqx.filter_jit`, lowered for planned devices."""

from __future__ import annotations

import functools
import inspect
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from replicax._base.jaxprs import equations
from replicax._base.planning import PlanError
from replicax._base.quantities import size
from replicax._base.types import Leaf, Tree
from replicax._plan.chips import Topology
from replicax._plan.exports import Lowered, bytes_on_device, export_program, refuse_callbacks, spec_of
from replicax._plan.report import Inputs

_VARIADIC = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
Signature = tuple[tuple[int, ...], str]


def is_jitted(step: Callable[..., Tree]) -> bool:
    """Return whether a function is one of `jax.jit`, `nnx.jit` or `eqx.filter_jit`."""
    return callable(getattr(step, "lower", None))


class JitStep:
    """A compiled function of the user, traced unchanged, that can be lowered for devices that are not there.

    The arrays among the arguments may be `ShapeDtypeStruct`s. Their `NamedSharding`s, or the function's, name
    the axes of a mesh that has as many devices as the topology. Without any, the step is planned for one device.

    Args:
        function: the compiled function.
        args, kwargs: the arguments of a call.

    Attributes:
        name: the function's.
        donated: the numbers of the arrays that the function takes over.
        gives_back: whether it returns one of its arguments with new values, as a training step does.

    Raises:
        PlanError: there are fewer arguments than the function needs.
    """

    def __init__(self, function: Callable[..., Tree], args: tuple[Tree, ...], kwargs: Mapping[str, Tree] | None = None):
        self._function, self.name = function, _name_of(function)
        leaves, self._tree = jax.tree.flatten((args, dict(kwargs or {})))
        self._places = [place for place, leaf in enumerate(leaves) if _is_array(leaf)]
        self._constants = leaves
        arrays = [leaves[place] for place in self._places]
        self._jaxpr = jax.make_jaxpr(self._flat)(*(_spec(array, _sharding_of(array)) for array in arrays))
        calls = [eqn for eqn in self._jaxpr.eqns if "donated_invars" in eqn.params]
        self.donated = self._find_donated(calls)
        self._specs = self._with_shardings(arrays, calls)
        inner = [value for eqn in equations(self._jaxpr) for value in eqn.params.values()]
        inner = [value.mesh if isinstance(value, NamedSharding) else value for value in inner]
        self._inner_meshes = [mesh for mesh in inner if isinstance(mesh, (Mesh, AbstractMesh))]
        self._arguments = _names_of_arguments(function, args, kwargs or {})
        self.gives_back = any(self._returned_arguments()) or self._gives_half_back()

    @functools.cached_property
    def _mesh(self) -> Mesh | AbstractMesh | None:
        """The mesh of the arrays, or of the shardings inside of the step; None if all have one device."""
        of_arrays = [spec.sharding.mesh for spec in self._specs if isinstance(spec.sharding, NamedSharding)]
        meshes = [mesh for mesh in of_arrays + self._inner_meshes if mesh.size > 1]
        kinds = {(mesh.axis_names, mesh.axis_sizes): mesh for mesh in reversed(meshes)}
        if len(kinds) > 1:
            listed = " and ".join(str(dict(zip(names, sizes))) for names, sizes in kinds)
            raise PlanError(f"{self.name} cannot be planned: its arrays are on {len(kinds)} meshes, {listed}. Use one.")
        return meshes[0] if meshes else None

    @property
    def has_mesh(self) -> bool:
        """Whether the step names the axes of a mesh."""
        return self._mesh is not None

    @property
    def result_size(self) -> int:
        """The bytes of the results, on all devices together."""
        return sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in self._jaxpr.out_avals)

    def zeros(self) -> Tree:
        """Return zeros in place of the results, which take no memory."""
        args, kwargs = jax.tree.unflatten(self._tree, self._constants)
        return jax.tree.map(_zeros, jax.eval_shape(self._function, *args, **kwargs))

    def lowered(self, topology: Topology) -> Lowered:
        """Return it lowered for these devices.

        Raises:
            PlanError: the step calls Python while it runs, its arrays are on several meshes, or the mesh has another
                number of devices.
        """
        refuse_callbacks(self.name, self._jaxpr)
        axes = {"device": 1} if self._mesh is None else dict(zip(self._mesh.axis_names, self._mesh.axis_sizes))
        if self._mesh is not None and (devices := math.prod(axes.values())) != topology.size:
            listed = ", ".join(f"{name}={count}" for name, count in axes.items())
            raise PlanError(
                f"{self.name} cannot be planned for {topology.name}, which has {topology.size} devices: the mesh of "
                f"its arrays has {devices} ({listed}). Make a mesh of {topology.size} devices: "
                "`jax.sharding.AbstractMesh(sizes, names)` needs none of them. `replicax plan` gives a program as many "
                "virtual devices as the topology has."
            )
        exported = export_program(
            self.name,
            jax.jit(self._flat),
            self._specs,
            topology,
            has_devices=not any(isinstance(mesh, AbstractMesh) for mesh in (self._mesh, *self._inner_meshes)),
        )
        return Lowered(
            bytes(exported.serialize()),
            axes,
            [spec_of(leaf) for leaf in self._specs],
            self.donated,
            math.prod(axes.values()),
            self._inputs(),
            _order_of(self._mesh),
        )

    @property
    def rows(self) -> int | None:
        """The rows of each part of the batch: the first dimension of its first array; None without one."""
        batch = self._batch()
        return self._specs[batch[0]].shape[0] // self.parts() if batch else None

    def parts(self, _: int = 1) -> int:
        """Return the number of parts into which the mesh divides the rows of the batch."""
        first = self._specs[self._batch()[0]]
        if not isinstance(first.sharding, NamedSharding):
            return 1
        return int(first.shape[0] // first.sharding.shard_shape(first.shape)[0])

    def with_rows(self, rows: int) -> JitStep:
        """Return the step for a batch with so many rows in each part; other arrays stay."""
        batch, leaves = self._batch(), list(self._constants)
        before = self._specs[batch[0]].shape[0]
        for number in batch:
            spec = self._specs[number]
            if spec.shape[0] == before:
                shape = (rows * self.parts(), *spec.shape[1:])
                leaves[self._places[number]] = jax.ShapeDtypeStruct(shape, spec.dtype, sharding=spec.sharding)
        args, kwargs = jax.tree.unflatten(self._tree, leaves)
        return JitStep(self._function, args, kwargs)

    def _batch(self) -> list[int]:
        """Return the numbers of the arrays with rows: those without new values among the results.

        In a step that returns no argument with new values they are the arrays of the last argument.
        """
        outputs = Counter(_signature(aval) for aval in self._jaxpr.out_avals)
        batch = []
        for number, spec in enumerate(self._specs):
            outputs[_signature(spec)] -= 1
            if outputs[_signature(spec)] < 0 and spec.shape and not _is_key(spec):
                batch.append(number)
        if self.gives_back or not self._arguments:
            return batch
        *_, last = self._arguments.values()
        return [number for number in batch if number in last]

    def _flat(self, *arrays: Leaf) -> list[Leaf]:
        """Call the function with these arrays; return its arrays, and those that it has put into its arguments."""
        leaves = list(self._constants)
        for place, array in zip(self._places, arrays):
            leaves[place] = array
        args, kwargs = jax.tree.unflatten(self._tree, leaves)
        results = [leaf for leaf in jax.tree.leaves(self._function(*args, **kwargs)) if _is_array(leaf)]
        after = jax.tree.leaves((args, kwargs))
        return results + [new for new, old in zip(after, leaves) if new is not old and _is_array(new)]

    def _find_donated(self, calls: Sequence[jex.JaxprEqn]) -> list[int]:
        """Return the numbers of the arrays that the compiled function takes over."""
        donated = {
            variable
            for eqn in calls
            for variable, is_donated in zip(eqn.invars, eqn.params["donated_invars"])
            if is_donated and isinstance(variable, jex.Var)
        }
        return [i for i, variable in enumerate(self._jaxpr.jaxpr.invars) if variable in donated]

    def _with_shardings(self, arrays: Sequence[Leaf], calls: Sequence[jex.JaxprEqn]) -> list[jax.ShapeDtypeStruct]:
        """Return the arrays' shapes, with their own shardings or, where these are open, the function's."""
        of_function = {
            variable: sharding
            for eqn in calls
            for variable, sharding in zip(eqn.invars, eqn.params["in_shardings"])
            if isinstance(sharding, NamedSharding) and isinstance(variable, jex.Var)
        }
        specs = []
        for array, variable in zip(arrays, self._jaxpr.jaxpr.invars):
            specs.append(_spec(array, _sharding_of(array) or of_function.get(variable)))
        return specs

    def _returned_arguments(self) -> list[bool]:
        """Return for each argument with arrays of floats whether the results have new values for all its arrays."""
        outputs = Counter(_signature(aval) for aval in self._jaxpr.out_avals)
        are_returned = []
        for numbers in self._arguments.values():
            expected = Counter(_signature(self._specs[i]) for i in numbers)
            floats = any(_is_float(self._specs[i]) for i in numbers)
            is_back = floats and all(outputs[kind] >= count for kind, count in expected.items())
            outputs -= expected if is_back else Counter()
            are_returned.append(is_back)
        return are_returned

    def _gives_half_back(self) -> bool:
        """Return whether the results have new values for half of the arrays; `eqx.filter_jit` merges all arguments."""
        both = [[aval for aval in avals if _is_float(aval)] for avals in (self._specs, self._jaxpr.out_avals)]
        inputs, outputs = (Counter(map(_signature, avals)) for avals in both)
        return 2 * (inputs & outputs).total() >= inputs.total() > 0 and outputs.total() > 1

    def _inputs(self) -> Inputs:
        sizes = {name: sum(map(self._size, numbers)) for name, numbers in self._arguments.items() if numbers}
        back = [name for name, is_back in zip(self._arguments, self._returned_arguments()) if is_back]
        variables = sum(sizes[name] for name in back)
        kept = [name for name in back if not set(self._arguments[name]) <= set(self.donated)]
        advice: tuple[str, ...] = ()
        if kept and (saved := sum(sizes[name] for name in kept)) > 0.01 * sum(sizes.values()):
            names = ", ".join(kept)
            advice = (
                f"The step returns new values of {names}. Donate them to save up to {size(saved)} on each device: "
                "jax.jit(..., donate_argnames=...).",
            )
        return Inputs(variables, 0, sum(sizes.values()) - variables, arguments=sizes, advice=advice)

    def _size(self, number: int) -> int:
        spec = self._specs[number]
        return bytes_on_device(spec, spec.sharding)


def _name_of(function: Callable[..., Tree]) -> str:
    return getattr(function, "__name__", None) or type(function).__name__


def _is_array(leaf: object) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct))


def _is_key(spec: Any) -> bool:
    """Return whether an array is a key of random numbers, or has the form of a key of `jax.random.PRNGKey`."""
    is_extended = jnp.issubdtype(spec.dtype, jax.dtypes.extended)
    return bool(is_extended or (spec.dtype == np.uint32 and spec.shape in ((2,), (4,))))


def _is_float(spec: Any) -> bool:
    return bool(jnp.issubdtype(spec.dtype, np.inexact))


class _Zeros(np.ndarray[Any, Any]):
    """Zeros that take no memory, with the sharding of the array that they replace."""

    sharding: Any = None


def _zeros(spec: jax.ShapeDtypeStruct) -> _Zeros:
    zeros = np.broadcast_to(np.zeros((), spec.dtype), spec.shape).view(_Zeros)
    zeros.sharding = spec.sharding
    return zeros


def _sharding_of(leaf: Leaf) -> NamedSharding | None:
    """Return how an array is split over the devices of a mesh; None if it is on one device."""
    sharding = getattr(leaf, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1 else None


def _spec(leaf: Leaf, sharding: Any) -> jax.ShapeDtypeStruct:
    """Return the spec of an array as JAX takes it: without 64 bits unless they are enabled, and with its weak type."""
    is_extended = jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
    dtype = leaf.dtype if is_extended else jax.dtypes.canonicalize_dtype(leaf.dtype)
    return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding, weak_type=getattr(leaf, "weak_type", False))


def _signature(spec: Any) -> Signature:
    return tuple(spec.shape), str(spec.dtype)


def _names_of_arguments(
    function: Callable[..., Tree], args: tuple[Tree, ...], kwargs: Mapping[str, Tree]
) -> dict[str, list[int]]:
    """Return the numbers of the arrays of each argument, by its name."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    positional = [parameter for parameter in parameters if parameter.kind not in _VARIADIC]
    names = [parameter.name for parameter in positional[: len(args)]]
    names += [f"argument {i + 1}" for i in range(len(names), len(args))]
    numbers, start = dict[str, list[int]](), 0
    for name, tree in [*zip(names, args), *sorted(kwargs.items())]:
        count = sum(map(_is_array, jax.tree.leaves(tree)))
        numbers[name] = list(range(start, start + count))
        start += count
    return numbers


def _order_of(mesh: Mesh | AbstractMesh | None) -> list[int] | None:
    """Return the number of the device at each place of a mesh; None for a mesh without devices."""
    if not isinstance(mesh, Mesh):
        return None
    numbers = [device.id for device in mesh.devices.flat]
    return numbers if sorted(numbers) == list(range(len(numbers))) else None
