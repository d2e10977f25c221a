"""What JAX does not document of its processes, backends and compilers."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax

from replicax._base import thread_state


def coordination_client() -> Any:
    """Returns the client of the job's coordination service, whose key-value store `jax.distributed` keeps to itself."""
    from jax._src import distributed

    return distributed.global_state.client


def value_of_key(client: Any, key: str, milliseconds: int) -> str | None:
    """Returns the value of a key once another worker has set it; None if none has in this time."""
    try:
        value: str = client.blocking_key_value_get(key, milliseconds)
        return value
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        return None


def backend_started() -> bool:
    """Returns whether JAX has begun to compute, after which its settings for several processes come too late."""
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


@contextlib.contextmanager
def gloo_at(host: str) -> Iterator[None]:
    """Has Gloo listen at this address of the machine, if JAX starts on CPU in the `with`.

    JAX itself takes the address of the machine's own name, which is often 127.0.1.1, and has no setting for it.
    """
    from jaxlib import _jax

    make = _jax.make_gloo_tcp_collectives
    _jax.make_gloo_tcp_collectives = functools.partial(make, hostname=host)
    try:
        yield
    finally:
        _jax.make_gloo_tcp_collectives = make


def leave_distributed() -> None:
    """Lets this process end without telling JAX's coordination service.

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
    """Waits for the callbacks of programs. The error of a program that failed is left to whoever reads its outputs.

    `jax.effects_barrier` raises the error of any program, and again in each later call.
    """
    from jax._src import dispatch

    try:
        jax.effects_barrier()
    except jax.errors.JaxRuntimeError:
        dispatch.runtime_tokens.clear()


@contextlib.contextmanager
def assume_cudnn() -> Iterator[None]:
    """Return a context in which JAX traces cuDNN's attention without cuDNN, for a program that is compiled elsewhere.

    JAX asks the library for its version when it traces `jax.nn.dot_product_attention(implementation="cudnn")`, and
    documents no way to state it. Other threads still ask the library: they may trace programs that run here.
    """
    from jax._src.cudnn import fused_attention_stablehlo as attention

    with _cudnn_lock:
        check = attention.check_cudnn_version
        if not hasattr(check, "_replicax_asks"):
            attention.check_cudnn_version = _version_or(check)
    with thread_state.entered(assumes_cudnn=True):
        yield


_cudnn_lock = threading.Lock()


def _version_or(check: Callable[[], int]) -> Callable[[], int]:
    """Return a function that returns the version of the planned GPUs, 9.10, where it is assumed, or asks `check`."""

    def version() -> int:
        return 91000 if thread_state.current.assumes_cudnn else check()

    version._replicax_asks = check  # type: ignore[attr-defined]
    return version


@contextlib.contextmanager
def lower_without_devices() -> Iterator[None]:
    """Return a context in which JAX lowers all operations for a mesh without devices.

    It refuses some, such as cuDNN's attention, which need no device inside of `jax.shard_map`. It documents no way
    around.
    """
    from jax._src import dispatch

    needs_devices = dispatch.prim_requires_devices_during_lowering
    primitives = set(needs_devices)
    needs_devices.clear()
    try:
        yield
    finally:
        needs_devices.update(primitives)


def in_oldest_stablehlo(module: bytes) -> bytes:
    """Return a serialized module for one device in the oldest version of StableHLO that has its operations.

    Other programs, such as TensorFlow, read only versions that are older than themselves, and JAX writes the version of
    about three months ago. They also lack Shardy's operations, which do nothing on one device and are left out. JAX
    documents no way to do either.
    """
    from jax.interpreters import mlir
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    def drop_shardings(operation: ir.Operation) -> ir.WalkResult:
        if operation.name.startswith("sdy."):
            for result, operand in zip(operation.results, operation.operands):
                result.replace_all_uses_with(operand)
            operation.erase()
        return ir.WalkResult.ADVANCE

    context: Any = mlir.make_ir_context()
    with context, context.attach_diagnostic_handler(lambda diagnostic: True):  # which would be printed
        read = stablehlo.deserialize_portable_artifact(context, module)
        read.operation.walk(drop_shardings, ir.WalkOrder.POST_ORDER)
        newest = int(stablehlo.get_current_version().split(".")[1])
        for minor in range(newest + 1):
            try:
                older: bytes = stablehlo.serialize_portable_artifact(read, f"1.{minor}.0")
            except Exception:  # it has an operation that this version lacks
                continue
            return older
    return module
