"""All uses of what JAX does not document: each function says why nothing else can do it.

Tested on the oldest and the newest JAX we support in `tests/base/test_jax_internals.py`. What concerns arrays, traces
and jaxprs is in this module; `runtime` has the rest. Other modules import all of it from here.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.extend.core as jex
import numpy as np

from replicax._base import thread_state
from replicax._base.jax_internals.runtime import assume_cudnn as assume_cudnn
from replicax._base.jax_internals.runtime import backend_started as backend_started
from replicax._base.jax_internals.runtime import coordination_client as coordination_client
from replicax._base.jax_internals.runtime import gloo_at as gloo_at
from replicax._base.jax_internals.runtime import in_oldest_stablehlo as in_oldest_stablehlo
from replicax._base.jax_internals.runtime import leave_distributed as leave_distributed
from replicax._base.jax_internals.runtime import lower_without_devices as lower_without_devices
from replicax._base.jax_internals.runtime import value_of_key as value_of_key
from replicax._base.jax_internals.runtime import wait_for_effects as wait_for_effects
from replicax._base.types import Leaf, Tree

if TYPE_CHECKING:
    from jax.experimental import checkify

Trace: TypeAlias = Any  # JAX exports no class of traces
Atom: TypeAlias = jex.Var | jex.Literal


def uncommitted(array: jax.Array) -> jax.Array:
    """Returns the same buffer as an array that JAX may move freely.

    JAX refuses to compute with two arrays *committed* to different devices, as the components of a
    distributed value would be. The flag cannot be cleared by a public function without a copy. The checks of the
    constructor, which an array on one device needs none of, would take longer than all the rest.
    """
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        keys: jax.Array = jax.random.wrap_key_data(
            uncommitted(jax.random.key_data(array)), impl=jax.random.key_impl(array)
        )
        return keys
    return _array(type(array), array.aval, array.sharding, array)


def _array(
    kind: Callable[..., Any], aval: jax.core.ShapedArray, sharding: jax.sharding.Sharding, buffer: jax.Array
) -> jax.Array:
    made: jax.Array = kind(aval, sharding, [buffer], committed=False, _skip_checks=True)
    return made


def first_copy(array: jax.Array) -> jax.Array:
    """Returns an array on one device, free to move: the first copy of a replicated one."""
    return uncommitted(array.addressable_data(0)) if len(array.sharding.device_set) > 1 else array


class FirstCopies:
    """Does as `first_copy` for one array after another, and looks up shape and sharding once for those that are alike.

    That is quicker: a training step of several processes hands out its results while its devices still need the cores.
    """

    __slots__ = ("_known",)

    def __init__(self) -> None:
        # The class, aval and sharding of the first copy, and the shape of the whole.
        self._known: tuple[type[jax.Array], Any, jax.sharding.Sharding, tuple[int, ...]] | None = None

    def __call__(self, array: jax.Array) -> jax.Array:
        first = array.addressable_data(0)
        if self._known is None or self._known[3] != array.shape:
            if len(array.sharding.device_set) == 1 or jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
                return first_copy(array)
            self._known = type(first), first.aval, first.sharding, array.shape
        kind, aval, sharding, _ = self._known
        return _array(kind, aval, sharding, first)


class FromHost:
    """Makes arrays of one sharding from NumPy arrays, one for each device, which must not be written afterwards.

    `jax.make_array_from_callback` does the same, but works out again for each array what follows from its shape and
    dtype. That takes two to four times as long as to make the array, for each leaf of each batch.

    Args:
        sharding: of the arrays to make.
        committed: whether they stay on their devices; see `uncommitted`.
    """

    __slots__ = ("_committed", "_known", "_put", "_sharding")

    def __init__(self, sharding: jax.sharding.Sharding, committed: bool):
        self._sharding, self._committed = sharding, committed
        self._known: dict[tuple[object, ...], tuple[Any, list[jax.Device], tuple[object, ...]]] = {}
        from jax._src.lib import xla_client

        self._put = xla_client.batched_device_put

    def __call__(
        self, shape: tuple[int, ...], dtype: np.dtype, part: Callable[[Any], np.ndarray], wide: bool = False
    ) -> jax.Array:
        """Returns the array of this shape whose part on a device is `part(index)`, of `dtype`.

        With `wide`, 64-bit dtypes are kept where JAX is set to cut them off.
        """
        config: Any = jax.config
        key = shape, dtype, wide or config.jax_enable_x64, config.jax_explicit_x64_dtypes
        known = self._known.get(key)
        if known is None:
            with jax.enable_x64(key[2]):
                array = jax.make_array_from_callback(shape, self._sharding, part)
            if len(self._known) >= 256:  # shapes that keep changing
                self._known.clear()
            by_device = self._sharding.addressable_devices_indices_map(shape)
            self._known[key] = array.aval, list(by_device), tuple(by_device.values())
            return array if self._committed else uncommitted(array)
        aval, devices, indices = known
        parts = list(map(part, indices))
        made: jax.Array = self._put(aval, self._sharding, parts, devices, self._committed, enable_x64=key[2])
        return made


@functools.cache
def from_host_to(device: jax.Device) -> FromHost:
    """Returns what makes arrays on one device, free to move."""
    return FromHost(jax.sharding.SingleDeviceSharding(device), committed=False)


def current_trace() -> Trace:
    """Returns the JAX trace that primitives are bound to in this thread."""
    with jex.take_current_trace() as trace:
        return trace


def _eager_trace() -> Trace:
    found: list[Trace] = []  # a new thread always starts without a trace, whoever imports us
    thread = threading.Thread(target=lambda: found.append(current_trace()))
    thread.start()
    thread.join()
    return found[0]


_EAGER = _eager_trace()


def is_eager(trace: Trace) -> bool:
    """Returns whether `trace` is JAX's top level, where primitives run at once."""
    return isinstance(trace, type(_EAGER))


def trace_of(tracer: jax.core.Tracer[Any]) -> Trace:
    """Returns the trace that a tracer belongs to; JAX tells only whether there is a trace at all."""
    return tracer._trace


def untraced() -> contextlib.AbstractContextManager[object]:
    """Returns a context in which primitives run at once, whatever is being traced.

    `jax.ensure_compile_time_eval` does not hold for all primitives: some are staged nevertheless.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return jex.set_current_trace(_EAGER)
    return _outside_of_the_mesh()


@contextlib.contextmanager
def _outside_of_the_mesh() -> Iterator[None]:
    """Does as `untraced` inside of `jax.shard_map`, whose mesh another one would have to be part of."""
    with jex.set_current_trace(_EAGER), jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        yield


class InputPrimitive(jex.Primitive):
    """A primitive without operands that stands for a value which is supplied when a jaxpr is replayed.

    A level of tracing finds out while it runs which variables its function reads. `bind` stages a
    placeholder into the level's jaxpr; `supplied` makes replaying that jaxpr use real values instead.
    """

    def __init__(self, name: str):
        super().__init__(name)
        self.def_abstract_eval(lambda *, slot, aval: aval)  # type: ignore[no-untyped-call]

    def bind(self, *args: object, slot: int, aval: jax.core.AbstractValue) -> Leaf:  # type: ignore[override]
        """Returns the value that is supplied for the slot, or else stages a placeholder."""
        supplied = thread_state.current.supplied
        return supplied[slot] if slot in supplied else super().bind(slot=slot, aval=aval)  # type: ignore[no-untyped-call]

    def supplied(self, values: dict[int, Leaf]) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the placeholders of these slots are these values."""
        return thread_state.entered(supplied={**thread_state.current.supplied, **values})


def is_staging(trace: Trace) -> bool:
    """Returns whether `trace` records a program, as under `jax.jit`, and not follows values, as under `jax.grad`."""
    return type(trace).__name__ == "DynamicJaxprTrace"


def origin_of(tracer: jax.core.Tracer[Any]) -> tuple[Any, int, Leaf]:
    """Return the equation that computes a tracer, the tracer's place among its results, and the constant it is.

    The equation of arguments and constants is None, and the constant of everything else. JAX has no public way to ask.
    """
    if not is_staging(trace_of(tracer)):
        return None, 0, None
    made: Any = tracer
    if made.parent is None:
        return None, 0, made._trace.get_const(made)
    return made.parent, [var is made.val for var in made.parent.outvars].index(True), None


def part_of_jaxpr(
    jaxpr: jex.Jaxpr,
    eqns: Iterable[jex.JaxprEqn],
    inputs: Iterable[jex.Var],
    outputs: Iterable[Atom],
    constants: Mapping[jex.Var, Any] = types.MappingProxyType({}),
) -> jex.ClosedJaxpr:
    """Return equations as a jaxpr, with the effects of `jaxpr`. JAX documents how jaxprs are read, not made."""
    lists = {"constvars": list(constants), "invars": list(inputs), "outvars": list(outputs), "eqns": list(eqns)}
    made = jaxpr.replace(**lists, debug_info=jaxpr.debug_info.with_unknown_names())
    return jex.ClosedJaxpr(made, list(constants.values()))


def append_jaxpr(eqns: list[jex.JaxprEqn], jaxpr: jex.Jaxpr, operands: Sequence[Atom]) -> list[Atom]:
    """Append the equations of a jaxpr, of these operands, to `eqns`, and return its results. See `part_of_jaxpr`."""
    known = {id(var): atom for var, atom in zip(jaxpr.invars, operands)}
    eqns += [eqn.replace(invars=[known.get(id(x), x) for x in eqn.invars]) for eqn in jaxpr.eqns]
    return [known.get(id(x), x) for x in jaxpr.outvars]


def rebind(eqn: jex.JaxprEqn, params: Mapping[str, Any], operands: Iterable[Leaf]) -> list[Leaf]:
    """Binds the primitive of an equation again, with these parameters in place of its own, and returns the results.

    JAX documents that only for equations without jaxprs among their parameters. Its errors and profiles then name the
    user's line of the equation, and not the one that binds it again.
    """
    from jax._src import source_info_util

    names = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with source_info_util.user_context(eqn.source_info.traceback, name_stack=names), eqn.ctx.manager:
        results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(params))
    return results if eqn.primitive.multiple_results else [results]


def shard_map_like(
    eqn: jex.JaxprEqn,
    function: Callable[..., Tree],
    in_specs: Iterable[jax.sharding.PartitionSpec],
    out_specs: Iterable[jax.sharding.PartitionSpec],
) -> Callable[..., Tree]:
    """Returns `function` mapped over the same mesh as a `shard_map` in a jaxpr.

    The names of the equation's parameters are documented nowhere.
    """
    params = eqn.params
    return jax.shard_map(
        function,
        mesh=params["mesh"],
        in_specs=tuple(in_specs),
        out_specs=list(out_specs),
        axis_names=params["newly_manual_axes"],
        check_vma=params["check_vma"],
    )


def named_axis_effect() -> type:
    """Returns the class of the effect of jaxprs that use a named axis, which JAX does not export."""
    from jax._src.core import NamedAxisEffect

    return NamedAxisEffect


def array_type() -> type:
    """Returns the class of concrete arrays, found without making one, which would start JAX's backend."""
    from jax._src.array import ArrayImpl

    return ArrayImpl


_CALLBACKS = {"pure_callback", "io_callback", "debug_callback", "debug_print"}


def with_callbacks(
    closed: jex.ClosedJaxpr, around: Callable[[Callable[..., Any], Sequence[Any], bool], Callable[..., Any]]
) -> tuple[jex.ClosedJaxpr, set[str]]:
    """Replaces the callbacks of a jaxpr, inner ones too; returns it and the names of the primitives in it.

    "callback" stands for all kinds of callbacks among the names. The names of these primitives' parameters are
    documented nowhere, nor how a jaxpr's equations are replaced.

    Args:
        closed: the jaxpr.
        around: takes the Python function that is called back, the avals of its results, and whether it only prints;
            returns the function to call in its place.
    """
    known: dict[int, jex.Jaxpr] = {}  # by id, since the same jaxpr is often a parameter of many equations
    names: set[str] = set()

    def of_params(value: Any) -> Any:
        if isinstance(value, jex.Jaxpr):
            return of_jaxpr(value)
        if isinstance(value, jex.ClosedJaxpr):
            inner = of_jaxpr(value.jaxpr)
            return value if inner is value.jaxpr else jex.ClosedJaxpr(inner, value.consts)
        if type(value) in (tuple, list):
            items = [of_params(item) for item in value]
            return value if all(one is other for one, other in zip(items, value)) else type(value)(items)
        return value

    def of_jaxpr(jaxpr: jex.Jaxpr) -> jex.Jaxpr:
        if id(jaxpr) not in known:
            eqns = [of_eqn(eqn) for eqn in jaxpr.eqns]
            changed = any(one is not other for one, other in zip(eqns, jaxpr.eqns))
            known[id(jaxpr)] = jaxpr.replace(eqns=eqns) if changed else jaxpr
        return known[id(jaxpr)]

    def of_eqn(eqn: Any) -> Any:
        name, params = eqn.primitive.name, eqn.params
        names.add("callback" if name in _CALLBACKS else name)
        if name == "debug_print":
            from jax._src.debugging import debug_callback_p

            (effect,) = eqn.effects
            function = around(functools.partial(eqn.primitive.impl, **params), [], True)
            params = {"callback": function, "effect": effect, "partitioned": params["partitioned"]}
            return eqn.replace(primitive=debug_callback_p, params=params)
        if name in _CALLBACKS:
            function = params["callback"]
            shows = any(
                getattr(cell.cell_contents, "_replicax_only_shows", False)
                for cell in getattr(function, "__closure__", None) or ()
            )
            return eqn.replace(params={**params, "callback": around(function, params.get("result_avals", ()), shows)})
        if name == "pallas_call":  # a kernel prints without Python
            return eqn
        changed = {key: of_params(value) for key, value in params.items()}
        same = all(changed[key] is value for key, value in params.items())
        return eqn if same else eqn.replace(params=changed)

    return of_params(closed), names


def callback_of(eqn: jex.JaxprEqn) -> tuple[Callable[..., Any], bool] | None:
    """Returns the Python function that an equation calls back with its operands, and whether it only prints.

    None where it is no callback. The names of these primitives' parameters are documented nowhere.
    """
    if eqn.primitive.name not in _CALLBACKS:
        return None
    if eqn.primitive.name == "debug_print":
        return functools.partial(eqn.primitive.impl, **eqn.params), True
    function = eqn.params["callback"]
    held = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    return function, any(getattr(one, "_replicax_only_shows", False) for one in (function, *held))


def hide_lines_of(folder: str) -> None:
    """Makes JAX's errors and programs' metadata name the line outside of a folder that an operation comes from.

    JAX names the innermost line that is not its own, which would always be one of ours. It keeps a list of its own
    files, and documents no way to add to it.
    """
    from jax._src import source_info_util

    source_info_util.register_exclusion(folder)


def order_of_check(error: checkify.Error) -> int:
    """Returns the position in the program of the check that failed, which `checkify` keeps to itself."""
    return min(int(code) for code in error._code.values())


def users_line(eqn: jex.JaxprEqn) -> str:
    """Returns the user's line that an equation comes from, as "file:line (function)". JAX documents no way to ask."""
    from jax._src import source_info_util

    line: str = source_info_util.summarize(eqn.source_info)
    return line
