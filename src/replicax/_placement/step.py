"""`show`: the arrays of a step on the devices, and the collectives of its compiled program."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax

from replicax._base import tracebacks
from replicax._base.errors import InvalidArgumentError
from replicax._base.messages import received
from replicax._base.types import Tree
from replicax._benchmark import hlo_collectives
from replicax._engine import modes
from replicax._engine.argument_layout import meshes_of
from replicax._engine.function import Function, calls_of, function, is_function, program_of
from replicax._engine.program import Program
from replicax._engine.signature import CallSignature
from replicax._placement.arrays import Places
from replicax._placement.find import arrays_in
from replicax._report.placement import Placement
from replicax._report.placement_data import Collective, PlacedArray, titled
from replicax._tracing import context, frames
from replicax._variables.variable import Variable

# The names of JAX for dtypes, of which XLA has short forms.
_DTYPES = {"pred": "bool", "bf16": "bfloat16", "f": "float", "s": "int", "u": "uint", "c": "complex"}


@tracebacks.boundary
def show(step: Callable[..., Tree], *args: Tree, **kwargs: Tree) -> Placement:
    """Shows where the inputs and the variables of a step lie, and what its devices send each other.

    The step is traced and compiled for these arguments, and not run: variables, the states of optimizers and of random
    generators stay as they are, and an iterator keeps its next element.

    Args:
        step: a `function`, or a function that is then compiled as one.
        *args, **kwargs: the arguments of a call.

    Returns:
        A `Placement`: `print` shows a table, a notebook shows a picture, `save` writes one to a file.

    Raises:
        TypeError: `step` is no function.
        RuntimeError: functions run eagerly, another function is being traced, or the step has no program of its own for
            these arguments: it makes variables on its first call, loops over a dataset, or can take uneven parts only
            eagerly.
        InvalidArgumentError: a ValueError. The step uses variables on parameter servers, so that no single program
            computes it.

    >>> import jax.numpy as jnp, replicax as rx
    >>> strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"])
    >>> with strategy.scope():
    ...     total = rx.Variable(jnp.zeros(3), aggregation=rx.VariableAggregation.SUM, name="total")
    >>> @rx.function
    ... def step(x):
    ...     strategy.run(lambda x: total.assign_add(x.sum(0), read_value=False), args=(x,))
    >>> batch = strategy.experimental_distribute_values_from_function(lambda context: jnp.ones((4, 3)))
    >>> shown = rx.show(step, batch)
    >>> print(shown)
    step, MirroredStrategy, 2 replicas
    <BLANKLINE>
                                     GPU:0      GPU:1
                                     replica 0  replica 1
    -----------------------------------------------------
    inputs
      x               float32[8, 3]  [0:4]      [4:8]
    variables
      total           float32[3]     whole      whole
    -----------------------------------------------------
    inputs, bytes                    48 B       48 B
    variables, bytes                 12 B       12 B
    all bytes                        60 B       60 B
    <BLANKLINE>
    2 arrays, 120 B on all devices together
    memory of the program on each device, by XLA: arguments 60 B, ...
    <BLANKLINE>
    collectives of a call, in order
      1  all-reduce  float32[3]  12 B  among all 2 devices
    >>> shown.collectives[0].groups, total.numpy().tolist()
    ((('GPU:0', 'GPU:1'),), [0.0, 0.0, 0.0])
    """
    _check(step)
    compiled: Function = step if is_function(step) else function(step)
    program, call = program_of(compiled, args, kwargs)
    name = calls_of(compiled).code.name
    if program.runner is not None:
        raise InvalidArgumentError(
            f"{name} uses variables on parameter servers: a worker and the servers each run a part of it, "
            "and no single program computes it. `strategy.visualize(variable)` shows on which servers a variable lies."
        )
    meshes = meshes_of(program.level, call, program.reads)
    strategy = _strategy_of(program)
    places = Places(meshes[0] if meshes else context.mesh_of(strategy))
    arrays = _arrays(compiled, program, call, places)
    executable = program.lower(call).compile()
    text = executable.as_text() or ""
    devices = _devices_of(executable, places)
    return Placement(
        f"{name}, {_title(strategy, places, len(devices))}",
        places.with_others(arrays),
        tuple(arrays),
        _collectives(text, [places.name(device) for device in devices]),
        _memory(executable),
        0 if places.mesh is None else places.mesh.mesh.size - len(places.here()),
    )


def _check(step: Any) -> None:
    if not callable(step):
        raise TypeError(f"`show` takes a function, the step, and its arguments; got {received(step)}.")
    if frames.is_tracing():
        raise RuntimeError("`show` compiles its step, which cannot be done while another function is traced.")
    if modes.functions_run_eagerly():
        raise RuntimeError(
            "Functions run eagerly now, and `show` is of compiled ones: call rx.config.run_functions_eagerly(False)."
        )


def _arrays(compiled: Function, program: Program, call: CallSignature, places: Places) -> list[PlacedArray]:
    """Returns the inputs of a call and the variables of its program."""
    found: list[PlacedArray] = []
    names = _names(compiled, call)
    for name, value in names.items():
        found += arrays_in(value, places, name, "input", as_input=True)
    for i, read in enumerate(program.reads):
        name = "element" if len(program.reads) == 1 else f"element {i}"
        found += arrays_in(read.element, places, name, "input", as_input=True)
    for variable in program.level.variables.values():
        if isinstance(variable, Variable):
            found += arrays_in(variable, places, group="variable")
    return _distinct(found)


def _names(compiled: Function, call: CallSignature) -> dict[str, Tree]:
    """Returns the arguments of a call by the names of the step's parameters."""
    try:
        bound = inspect.signature(compiled.python_function).bind(*call.args, **call.kwargs)
    except TypeError:  # tracing has taken them: what the signature says is not what the function is
        return {**{f"argument {i}": value for i, value in enumerate(call.args)}, **call.kwargs}
    found: dict[str, Tree] = {}
    for name, value in bound.arguments.items():
        if bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            found |= value
        else:
            found[name] = value
    return found


def _distinct(arrays: list[PlacedArray]) -> list[PlacedArray]:
    """Returns the arrays with names that are all different."""
    seen: dict[str, int] = {}
    found = []
    for array in arrays:
        seen[array.name] = number = seen.get(array.name, 0) + 1
        found.append(array if number == 1 else replace(array, name=f"{array.name} ({number})"))
    return found


def _strategy_of(program: Program) -> context.StrategyLike:
    """Returns the strategy of a program's variables; the current one if it has none."""
    of_variables = (v.distribute_strategy for v in program.level.variables.values() if isinstance(v, Variable))
    return next((each for each in of_variables if each is not None), None) or context.get_strategy()


def _title(strategy: context.StrategyLike, places: Places, devices: int) -> str:
    """Returns on what a step runs: a program of plain JAX may have devices of its own choice, and no strategy."""
    if strategy is not context.default_strategy():
        return titled(strategy, places.mesh.size if places.mesh else 1)
    return f"{devices} device{'s' * (devices > 1)}"


def _devices_of(executable: jax.stages.Compiled, places: Places) -> Sequence[jax.Device]:
    """Returns the devices that a program runs on, in the order in which it numbers them."""
    if places.mesh is not None:
        return list(places.mesh.mesh.devices.flat)
    for sharding in jax.tree.leaves(executable.input_shardings):
        if isinstance(sharding, jax.NamedSharding):  # of all processes
            return list(sharding.mesh.devices.flat)
    runtime: Any = executable.runtime_executable()
    devices: Sequence[jax.Device] = runtime.local_devices()
    return devices


def _collectives(text: str, names: Sequence[str]) -> tuple[Collective, ...]:
    """Returns the collectives of a program on devices with these names."""
    return tuple(
        Collective(
            one.kind,
            tuple(f"{_dtype(dtype)}{list(shape)}" for dtype, shape in one.arrays),
            one.bytes,
            tuple(tuple(names[number] for number in group) for group in one.groups),
            one.times,
            one.overlaps,
            one.source,
        )
        for one in hlo_collectives.collectives(text, len(names))
    )


def _dtype(short: str) -> str:
    """Returns JAX's name for a dtype of XLA.

    >>> [_dtype(short) for short in ("f32", "bf16", "pred", "s8", "f8e4m3fn")]
    ['float32', 'bfloat16', 'bool', 'int8', 'float8e4m3fn']
    """
    if short in _DTYPES:
        return _DTYPES[short]
    return _DTYPES[short[0]] + short[1:] if short[0] in _DTYPES and short[1:2].isdigit() else short


def _memory(executable: jax.stages.Compiled) -> dict[str, int]:
    """Returns the bytes that a program takes on a device, as far as XLA says it."""
    if (found := executable.memory_analysis()) is None:
        return {}
    sizes = {
        "arguments": found.argument_size_in_bytes,
        "results": found.output_size_in_bytes - found.alias_size_in_bytes,
        "temporaries": found.temp_size_in_bytes,
    }
    # On CPU, XLA's peak can leave temporaries out, which take memory during the whole call.
    peak = getattr(found, "peak_memory_in_bytes", 0)
    return {**sizes, "peak": peak} if peak >= sizes["arguments"] + sizes["temporaries"] > 0 else sizes
