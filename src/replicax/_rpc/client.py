"""The client of remote calls."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax._base import errors
from replicax._base.array_conversion import as_array
from replicax._base.errors import DeadlineExceededError, InvalidArgumentError, ReplicaxError
from replicax._base.messages import received
from replicax._base.types import Leaf, Tree
from replicax._data.elements import as_strings
from replicax._rpc.structures import described, is_leaf, leaves, rebuilt
from replicax._tracing import frames
from replicax._transport.errors import TimedOut, text_of
from replicax._transport.grpc_settings import Threads
from replicax._transport.handlers import Answer
from replicax._transport.peer import Peer
from replicax._variables.variable import Variable

_UNKNOWN = 2  # the code of errors that have none
_MOST = 1 << 20  # tensors that a function takes at most
_BY_CODE: dict[int, type[ReplicaxError]] = {
    kind.__dict__["error_code"]: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, ReplicaxError) and "error_code" in vars(kind)
}


class StatusOrResult:
    """The result of a remote call, or its error. Each method waits until the call is done.

    Args:
        answer: what becomes the server's answer.
        seconds: how long the call may take from now on; None for no limit.
        rebuild: makes the call's value of the answer.
    """

    def __init__(self, answer: futures.Future[Answer], seconds: float | None, rebuild: Callable[[Answer], Tree]):
        self._answer = answer
        self._seconds = seconds
        self._end = None if seconds is None else time.monotonic() + seconds
        self._rebuild = rebuild
        self._error: Exception | None = None
        self._found: Answer | None = None

    def _wait(self) -> None:
        if self._found is not None or self._error is not None:
            return
        left = None if self._end is None else max(self._end - time.monotonic(), 0.0)
        futures.wait([self._answer], left)
        try:
            if not self._answer.done():  # asked here, since the function itself may raise a TimeoutError
                raise TimedOut(f"The call was not done within {self._seconds:g} s.")
            self._found = self._answer.result()
        except TimedOut as error:
            self._error = DeadlineExceededError(str(error))
        except Exception as error:
            self._error = error

    def is_ok(self) -> jax.Array:
        """Returns whether the call was successful, as a tensor."""
        self._wait()
        return jnp.asarray(self._error is None)

    def get_error(self) -> tuple[jax.Array, Any]:
        """Returns the code of the call's error and its message, as tensors of int64 and of bytes; 0 and b"" if none."""
        self._wait()
        with jax.enable_x64(True):
            code = jnp.asarray(0 if self._error is None else _code(self._error), dtype=np.int64)
        return code, as_strings(b"" if self._error is None else text_of(self._error).encode())

    def get_value(self) -> Tree:
        """Returns what the function has returned.

        Raises:
            OpError: the call has failed, with the type of the error's code, such as InvalidArgumentError.
            InvalidArgumentError: `output_specs` do not fit the tensors that the function returned.
        """
        self._wait()
        if self._error is not None:
            raise _of_code(self._error) from None
        assert self._found is not None
        return self._rebuild(self._found)


def _code(error: Exception) -> int:
    code = getattr(error, "error_code", None)
    if isinstance(code, int):
        return code
    return InvalidArgumentError.error_code if isinstance(error, (TypeError, ValueError)) else _UNKNOWN


def _of_code(error: Exception) -> Exception:
    """Returns an error of the type that belongs to its code, with what it says of where it was raised."""
    kind = _BY_CODE.get(_code(error))
    if kind is None or type(error) is kind:
        return error
    found = kind(text_of(error))
    for note in getattr(error, "__notes__", ()):
        found.add_note(note)
    return found


class Client:
    """Calls functions of a `Server`.

    A client has two methods for each registered function: NAME returns a `StatusOrResult` at once, NAME_blocking waits
    and returns the value, or raises the call's error.

    >>> import jax.numpy as jnp, replicax as rx
    >>> server = rx.experimental.rpc.Server.create("grpc", "localhost:0")
    >>> server.register("double", rx.function(lambda x: 2 * x, input_signature=[rx.TensorSpec([])]))
    >>> server.start()
    >>> client = rx.experimental.rpc.Client.create("grpc", server.address)
    >>> client.double_blocking(3.0).item()
    6.0
    >>> server.stop()
    """

    @staticmethod
    def create(rpc_layer: str, address: str, name: str = "", timeout_in_ms: int = 0) -> Client:
        """Returns a client of the server at an address, and waits for that.

        Args:
            rpc_layer: "grpc".
            address: `"host:port"` of the server.
            name: not used.
            timeout_in_ms: how long creating the client and each call may take; 0 for no limit.

        Raises:
            ValueError: another layer than "grpc".
            DeadlineExceededError: no server answered in time.
            JobError: the server has another secret, or another version of replicax, JAX or Python.

        >>> import replicax as rx
        >>> server = rx.experimental.rpc.Server.create("grpc", "localhost:0")
        >>> server.start()
        >>> client = rx.experimental.rpc.Client.create("grpc", server.address, timeout_in_ms=60000)
        >>> client.list()
        []
        >>> server.stop()
        """
        if rpc_layer != "grpc":
            raise ValueError("Only GRPC backend is supported at the moment.")
        return GrpcClient(address, name, timeout_in_ms)

    def call(
        self, method_name: str, args: Sequence[Tree] | None = None, output_specs: Tree = None, timeout_in_ms: int = 0
    ) -> StatusOrResult:
        """Calls a function by its name, without waiting for it.

        Args:
            method_name: the name under which it was registered.
            args: its arguments: tensors, numbers and structures of them.
            output_specs: the specs of what it returns, in their structure; None where it returns nothing.
            timeout_in_ms: how long the call may take; 0 for the client's limit.

        >>> import replicax as rx
        >>> server = rx.experimental.rpc.Server.create("grpc", "localhost:0")
        >>> server.register("double", rx.function(lambda x: 2 * x, input_signature=[rx.TensorSpec([])]))
        >>> server.start()
        >>> client = rx.experimental.rpc.Client.create("grpc", server.address)
        >>> client.call("double", args=[3.0], output_specs=rx.TensorSpec([])).get_value().item()
        6.0
        >>> server.stop()
        """
        raise NotImplementedError("Use Client.create.")

    def list(self) -> list[str]:
        """Returns the names of the functions that are registered with the server.

        >>> import replicax as rx
        >>> server = rx.experimental.rpc.Server.create("grpc", "localhost:0")
        >>> server.register("double", rx.function(lambda x: 2 * x, input_signature=[rx.TensorSpec([])]))
        >>> server.start()
        >>> rx.experimental.rpc.Client.create("grpc", server.address).list()
        ['double']
        >>> server.stop()
        """
        raise NotImplementedError("Use Client.create.")


class GrpcClient(Client):
    """A `Client` over gRPC."""

    def __init__(self, address: str, name: str = "", timeout_in_ms: int = 0):
        if frames.is_tracing():
            raise NotImplementedError("Client creation is supported only in eager mode.")
        self._calls = _Calls(address, timeout_in_ms)
        for method, takes in self._calls.listed().items():
            self._add_methods(method, takes, f"RPC Call for {method} method to server {address}")

    def _add_methods(self, method: str, takes: Any, doc: str) -> None:
        calls = self._calls  # and not this client, which would then be part of a circle

        def call(*args: Tree, timeout_in_ms: int = 0) -> StatusOrResult:
            return calls.start(method, _fitting(method, args, takes), timeout_in_ms, _returned)

        def call_blocking(*args: Tree, timeout_in_ms: int = 0) -> Tree:
            return call(*args, timeout_in_ms=timeout_in_ms).get_value()

        for suffix, function in (("", call), ("_blocking", call_blocking)):
            function.__name__ = function.__qualname__ = method + suffix
            function.__doc__ = doc
            setattr(self, method + suffix, function)

    def call(
        self, method_name: str, args: Sequence[Tree] | None = None, output_specs: Tree = None, timeout_in_ms: int = 0
    ) -> StatusOrResult:
        def packed(answer: Answer) -> Tree:
            return _packed(answer, output_specs)

        return self._calls.start(method_name, leaves(list(args or ())), timeout_in_ms, packed)

    def list(self) -> list[str]:
        return sorted(self._calls.listed())


class _Calls:
    """The connection of a client, and the threads in which its calls wait."""

    def __init__(self, address: str, timeout_in_ms: int):
        self._timeout_in_ms = timeout_in_ms
        self._peer = Peer(address)
        self._threads = Threads("replicax-rpc")
        # In a thread: the last to refer to this may be any thread, also one of the connection, which waits for it.
        close = threading.Thread(
            target=_close, args=(self._peer, self._threads), name="replicax-rpc-close", daemon=True
        )
        weakref.finalize(self, close.start).atexit = False

    def _seconds(self, timeout_in_ms: int) -> float | None:
        milliseconds = timeout_in_ms or self._timeout_in_ms
        return milliseconds / 1000 if milliseconds else None

    def listed(self) -> dict[str, Any]:
        """Returns the registered functions by name, with the structures of what they take."""
        seconds = self._seconds(0)
        try:
            self._peer.wait_until_ready(seconds)
            return self._peer.call("list", timeout=seconds)[0]
        except TimedOut as error:
            raise DeadlineExceededError(str(error)) from None

    def start(
        self, method: str, args: Sequence[Leaf], timeout_in_ms: int, rebuild: Callable[[Answer], Tree]
    ) -> StatusOrResult:
        """Starts a call in a thread."""
        if frames.is_tracing():
            raise NotImplementedError(
                f"A remote call, here of {method!r}, is no part of compiled code: make it outside."
            )
        seconds, head = self._seconds(timeout_in_ms), {"method": method}
        tensors = [_tensor(value) for value in args]

        def call() -> Answer:  # refers to this object: the connection stays until the call is done
            return self._peer.call("call", head, tensors, seconds)

        return StatusOrResult(self._threads.submit(call), seconds, rebuild)


def _close(peer: Peer, threads: Threads) -> None:
    peer.close()
    threads.shutdown()


def _fitting(method: str, args: tuple[Tree, ...], takes: Any) -> list[Leaf]:
    """Returns the tensors of arguments, if they have the structure that a function takes."""
    values = leaves(args)
    try:
        fits = described(args) == takes
    except TypeError:  # such as a dataclass, which no function takes
        fits = False
    if not fits:
        wanted = rebuilt(takes, range(_MOST))
        raise ValueError(
            f"The arguments of {method!r} don't have the same nested structure as what it takes, {wanted}, in which "
            f"numbers stand for tensors; got {len(values)} tensors in {received(args)}."
        )
    return values


def _tensor(value: Leaf) -> Any:
    """Returns an argument as it is sent: with the 32-bit dtypes of tensors for Python's numbers."""
    if isinstance(value, Variable):
        value = value.value()
    if isinstance(value, (jax.Array, np.ndarray, np.generic)):
        return value
    if isinstance(value, (str, bytes)):
        return np.array(value if isinstance(value, bytes) else value.encode(), object)
    if isinstance(value, (bool, int, float, complex)) or hasattr(value, "__jax_array__"):
        return as_array(value)
    raise TypeError(f"Arguments of remote calls are tensors, numbers and strings, got {received(value)}.")


def _received(array: Any) -> Any:
    """Returns an array of an answer as a tensor, with the dtype that it has on the server."""
    if not isinstance(array, np.ndarray):
        return array  # of JAX: a server of this process, or keys
    if array.dtype == object:
        return as_strings(array)
    with jax.enable_x64(True):
        return jnp.asarray(array)


def _returned(answer: Answer) -> Tree:
    head, arrays = answer
    return rebuilt(head["returns"], [_received(array) for array in arrays])


def _packed(answer: Answer, specs: Tree) -> Tree:
    """Returns an answer in the structure of the caller's specs."""
    _, arrays = answer
    flat = leaves(specs)
    if len(flat) != len(arrays):
        raise InvalidArgumentError(f"Incorrect number of output types specified.{len(flat)} {len(arrays)}")
    for index, (spec, array) in enumerate(zip(flat, arrays)):
        if spec.dtype != array.dtype:
            raise InvalidArgumentError(f"Output {index} of the call is {array.dtype}, and {spec} was specified.")
    values = iter(arrays)
    return jax.tree.map(lambda _: _received(next(values)), specs, is_leaf=is_leaf)
