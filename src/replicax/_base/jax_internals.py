"""The one place that uses what JAX does not document: each function says why nothing else can do it.

Tested on the oldest and the newest JAX we support in `tests/base/test_jax_internals.py`.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import Any

import jax
import jax.extend.core as jex


def uncommitted(array: jax.Array) -> jax.Array:
    """The same buffer as an array that JAX may move freely.

    JAX refuses to compute with two arrays *committed* to different devices, as the components of a
    distributed value would be. The flag cannot be cleared by a public function without a copy. An array on one device
    has nothing to be checked or put in order, which takes longer than all the rest.
    """
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(uncommitted(jax.random.key_data(array)), impl=jax.random.key_impl(array))
    return type(array)(array.aval, array.sharding, [array], committed=False, _skip_checks=True)  # type: ignore[call-arg]


def single(array: jax.Array) -> jax.Array:
    """An array on one device, free to move: the first copy of a replicated one."""
    return uncommitted(array.addressable_data(0)) if len(array.sharding.device_set) > 1 else array


class Singles:
    """`single` of one array after another, most of one program, whose shape and sharding are looked up only once.

    It is as `single` in each: only quicker, since a training step that several processes share hands out its results
    while its devices still need the processor's cores.
    """

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: Any = None  # class, aval and sharding, and the shape of the whole

    def __call__(self, array: jax.Array) -> jax.Array:
        first = array.addressable_data(0)
        if self._known is None or self._known[3] != array.shape:
            if len(array.sharding.device_set) == 1 or jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
                return single(array)
            self._known = type(first), first.aval, first.sharding, array.shape
        kind, aval, sharding, _ = self._known
        return kind(aval, sharding, [first], committed=False, _skip_checks=True)


class FromHost:
    """Makes arrays of one sharding of numpy arrays, one for each of its devices, which nobody may write afterwards.

    `jax.make_array_from_callback` does the same, and finds out for each array again what follows from its shape and
    dtype. That takes two to four times as long as to make the array, for each leaf of each batch.

    Args:
        sharding: of the arrays to make.
        committed: whether they stay on their devices; see `uncommitted`.
    """

    __slots__ = ("_committed", "_known", "_put", "_sharding")

    def __init__(self, sharding: Any, committed: bool):
        self._sharding, self._committed = sharding, committed
        self._known: dict[Any, Any] = {}
        from jax._src.lib import xla_client

        self._put = xla_client.batched_device_put

    def __call__(self, shape: tuple[int, ...], dtype: Any, part: Any, wide: bool = False) -> jax.Array:
        """The array of this shape whose part on a device, a numpy array of `dtype`, is `part(index)`.

        `wide` keeps 64 bits where JAX is set to cut them off.
        """
        config: Any = jax.config
        key = shape, dtype, wide or config.jax_enable_x64, config.jax_explicit_x64_dtypes
        known = self._known.get(key)
        if known is None:
            with jax.enable_x64(key[2]):
                array = jax.make_array_from_callback(shape, self._sharding, part)
            if len(self._known) >= 256:  # shapes that keep changing
                self._known.clear()
            places = self._sharding.addressable_devices_indices_map(shape)
            self._known[key] = array.aval, list(places), tuple(places.values())
            return array if self._committed else uncommitted(array)
        aval, devices, indices = known
        parts = list(map(part, indices))
        return self._put(aval, self._sharding, parts, devices, self._committed, enable_x64=key[2])


@functools.cache
def onto(device: jax.Device) -> FromHost:
    """Makes arrays on one device, free to move."""
    return FromHost(jax.sharding.SingleDeviceSharding(device), committed=False)


def current_trace():
    """The JAX trace that primitives are bound to in this thread."""
    with jex.take_current_trace() as trace:
        return trace


def _eager_trace():
    found: list = []  # a new thread always starts without a trace, whoever imports us
    thread = threading.Thread(target=lambda: found.append(current_trace()))
    thread.start()
    thread.join()
    return found[0]


_EAGER = _eager_trace()


def is_eager(trace) -> bool:
    """Whether `trace` is JAX's top level, where primitives run at once."""
    return isinstance(trace, type(_EAGER))


def trace_of(tracer: jax.core.Tracer):
    """The trace that a tracer belongs to; JAX tells only whether there is a trace at all."""
    return tracer._trace


def at_once():
    """A context in which primitives run at once, whatever is being traced.

    (`jax.ensure_compile_time_eval` keeps staging some primitives.)
    """
    if jax.sharding.get_abstract_mesh().empty:
        return jex.set_current_trace(_EAGER)
    return _outside_of_the_mesh()


@contextlib.contextmanager
def _outside_of_the_mesh():
    """`at_once` inside of `jax.shard_map`, whose mesh another one would have to be part of."""
    with jex.set_current_trace(_EAGER), jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        yield


class InputPrimitive(jex.Primitive):
    """A primitive without operands that stands for a value which is supplied when a jaxpr is replayed.

    A level of tracing finds out while it runs which variables its function reads. `bind` stages a
    placeholder into the level's jaxpr; `supplied` makes replaying that jaxpr use real values instead.
    """

    def __init__(self, name: str):
        super().__init__(name)
        self.def_abstract_eval(lambda *, slot, aval: aval)
        self._supply = threading.local()

    def bind(self, *args, slot, aval):
        supply = getattr(self._supply, "values", None)
        if supply is not None and slot in supply:
            return supply[slot]
        return super().bind(slot=slot, aval=aval)

    def supplied(self, values: dict[int, object]):
        """A context in which the placeholders of these slots are these values."""
        return _Supplied(self._supply, values)


class _Supplied:
    def __init__(self, local, values):
        self._local, self._values = local, values

    def __enter__(self):
        self._before = getattr(self._local, "values", None)
        self._local.values = {**(self._before or {}), **self._values}

    def __exit__(self, *_):
        self._local.values = self._before


def is_staging(trace) -> bool:
    """Whether `trace` records a program (as under `jax.jit`) rather than following values (as under `jax.grad`)."""
    return type(trace).__name__ == "DynamicJaxprTrace"


def part_of_jaxpr(jaxpr, eqns, inputs, outputs):
    """These equations of a jaxpr as one of their own. JAX documents how jaxprs are read, not how they are made."""
    debug_info = jaxpr.debug_info.with_unknown_names()
    replaced = jaxpr.replace(
        constvars=[], invars=list(inputs), outvars=list(outputs), eqns=list(eqns), debug_info=debug_info
    )
    return jex.ClosedJaxpr(replaced, [])


def bound_again(eqn, params, operands):
    """The results of a jaxpr's equation for these operands, with these parameters in place of its own.

    Only for equations without programs in their parameters is it documented how to bind them. JAX's errors and
    profiles name the user's line of the equation, and not the one that binds it again.
    """
    from jax._src import source_info_util

    names = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with source_info_util.user_context(eqn.source_info.traceback, name_stack=names), eqn.ctx.manager:
        results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(params))
    return results if eqn.primitive.multiple_results else [results]


def shard_map_again(eqn, function, in_specs, out_specs):
    """`function` mapped over the same mesh as a `shard_map` in a jaxpr.

    What the equation's parameters are called is documented nowhere.
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
    """The class of the effect that a jaxpr has where it uses a named axis, which JAX exports nowhere."""
    from jax._src.core import NamedAxisEffect

    return NamedAxisEffect


def array_type() -> type:
    """The class of concrete arrays, found without making one, which would start JAX's backend."""
    from jax._src.array import ArrayImpl

    return ArrayImpl


def coordination_client():
    """The client of the job's coordination service, whose key-value store `jax.distributed` keeps to itself."""
    from jax._src import distributed

    return distributed.global_state.client


def value_of_key(client, key: str, milliseconds: int) -> str | None:
    """The value of a key, once another worker has set it; None where it has not in this time."""
    try:
        return client.blocking_key_value_get(key, milliseconds)
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        return None


def backend_started() -> bool:
    """Whether JAX has begun to compute, after which its settings for several processes come too late."""
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


@contextlib.contextmanager
def gloo_at(host: str):
    """Has Gloo be reached at this address of the machine, if JAX starts on CPU in the `with`.

    JAX itself takes what the machine's own name stands for, which is often 127.0.1.1, and has no setting for it.
    """
    from jaxlib import _jax

    make = _jax.make_gloo_tcp_collectives
    _jax.make_gloo_tcp_collectives = functools.partial(make, hostname=host)
    try:
        yield
    finally:
        _jax.make_gloo_tcp_collectives = make


def leave_distributed() -> None:
    """Has JAX end this process without a word to its coordination service.

    `jax.distributed.shutdown` waits until all processes call it and, where the service ends first, the others'
    clients abort. Neither the client nor the service is destroyed, since their destructors do the same.
    """
    import ctypes

    from jax._src import distributed

    state = distributed.global_state
    for held in (state.preemption_sync_manager, state.client, state.service):
        if held is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
    state.preemption_sync_manager = state.client = state.service = None


def wait_for_effects() -> None:
    """Waits for what programs print or write. Where one of them failed, its error is left to who reads its outputs.

    `jax.effects_barrier` raises the error of any program, and again in each later call.
    """
    from jax._src import dispatch

    try:
        jax.effects_barrier()
    except jax.errors.JaxRuntimeError:
        dispatch.runtime_tokens.clear()


_CALLBACKS = {"pure_callback", "io_callback", "debug_callback", "debug_print"}


def with_callbacks(closed, around):
    """A jaxpr whose callbacks, inner ones too, are others, and the names of the primitives in it.

    "callback" stands for all kinds of callbacks among the names. What the parameters of these primitives are called is
    documented nowhere, nor how a jaxpr's equations are replaced.

    Args:
        closed: the jaxpr.
        around: of a Python function that is called back, the types of what it returns and whether it only shows
            something, makes the one that is to be called.
    """
    known: dict[int, Any] = {}  # by the ids of jaxprs, which are often the same object many times
    names: set[str] = set()

    def of_params(value):
        if hasattr(value, "eqns") and not hasattr(value, "consts"):
            return of_jaxpr(value)
        if hasattr(value, "jaxpr") and hasattr(value, "consts"):
            inner = of_jaxpr(value.jaxpr)
            return value if inner is value.jaxpr else jex.ClosedJaxpr(inner, value.consts)
        if type(value) in (tuple, list):
            items = [of_params(item) for item in value]
            return value if all(one is other for one, other in zip(items, value)) else type(value)(items)
        return value

    def of_jaxpr(jaxpr):
        if id(jaxpr) not in known:
            eqns = [of_eqn(eqn) for eqn in jaxpr.eqns]
            changed = any(one is not other for one, other in zip(eqns, jaxpr.eqns))
            known[id(jaxpr)] = jaxpr.replace(eqns=eqns) if changed else jaxpr
        return known[id(jaxpr)]

    def of_eqn(eqn):
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
        if name == "pallas_call":  # what a kernel prints is no Python
            return eqn
        changed = {key: of_params(value) for key, value in params.items()}
        same = all(changed[key] is value for key, value in params.items())
        return eqn if same else eqn.replace(params=changed)

    return of_params(closed), names


def hide_lines_of(folder: str) -> None:
    """Has JAX name the line outside of a folder that an operation comes from, in its errors and in programs' metadata.

    JAX names the innermost line that is not its own, which would always be one of ours. It keeps a list of its own
    files, and documents no way to add to it.
    """
    from jax._src import source_info_util

    source_info_util.register_exclusion(folder)


def order_of_check(error) -> int:
    """The place in the program of the check that failed, of an error of `checkify`, which tells it to nobody."""
    return min(int(code) for code in error._code.values())
