"""The server of remote calls: it runs registered functions for clients."""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from replicax._base.errors import FailedPreconditionError, InvalidArgumentError
from replicax._base.messages import received
from replicax._base.specs import TensorSpec
from replicax._base.types import Leaf, Tree
from replicax._engine.concrete_function import ConcreteFunction
from replicax._engine.function import Function, is_function
from replicax._rpc.structures import described, is_leaf, leaves
from replicax._tracing import frames
from replicax._transport.handlers import Answer, Request
from replicax._transport.service import Service
from replicax._values import DistributedValues
from replicax._variables.variable import Variable


class Server:
    """Runs functions that are registered with it for `Client`s in other processes.

    Everything that goes over the network is encrypted, and only clients that have the server's secret can call (see
    `replicax docs how-to/remote-calls`). The server stops when it is deleted, or by `stop`.

    >>> import replicax as rx
    >>> server = rx.experimental.rpc.Server.create("grpc", "localhost:0")
    >>> server.register("seven", rx.function(lambda: 7))
    >>> server.start()
    >>> rx.experimental.rpc.Client.create("grpc", server.address).seven_blocking().item()
    7
    >>> server.stop()
    """

    @staticmethod
    def create(rpc_layer: str, address: str) -> Server:
        """Returns a server, which listens once it is started.

        Args:
            rpc_layer: "grpc".
            address: `"host:port"` at which it will listen; port 0 stands for any free port.

        Raises:
            ValueError: another layer than "grpc".

        >>> import replicax as rx
        >>> rx.experimental.rpc.Server.create("grpc", "localhost:8470").address
        'localhost:8470'
        """
        if rpc_layer != "grpc":
            raise ValueError("Only GRPC backend is supported at the moment.")
        return GrpcServer(address)

    def register(self, method_name: str, func: Function | ConcreteFunction) -> None:
        """Has clients call a function by a name.

        Args:
            method_name: the name for clients.
            func: a `function` with an `input_signature`, or one without parameters, or what `get_concrete_function`
                returns. It takes and returns structures of tensors, and may read and assign variables.

        Raises:
            ValueError: the function is no such function.
            InvalidArgumentError: the name is registered already.
            FailedPreconditionError: the server has been started.

        >>> import replicax as rx
        >>> server = rx.experimental.rpc.Server.create("grpc", "localhost:0")
        >>> server.register("double", rx.function(lambda x: 2 * x, input_signature=[rx.TensorSpec([])]))
        """
        raise NotImplementedError("Use Server.create.")

    def start(self) -> None:
        """Begins to listen at the address, and to run functions for clients.

        >>> import replicax as rx
        >>> server = rx.experimental.rpc.Server.create("grpc", "localhost:0")
        >>> server.start()
        >>> server.stop()
        """
        raise NotImplementedError("Use Server.create.")

    def stop(self) -> None:
        """Stops listening. Calls under way end with an error for their clients.

        >>> import replicax as rx
        >>> server = rx.experimental.rpc.Server.create("grpc", "localhost:0")
        >>> server.start()
        >>> server.stop()
        """
        raise NotImplementedError("Use Server.create.")


class GrpcServer(Server):
    """A `Server` over gRPC."""

    def __init__(self, address: str):
        if frames.is_tracing():
            raise NotImplementedError("Please create the server outside tf.function.")
        self.address = address
        self._functions: dict[str, _Registered] = {}
        self._service: Service | None = None

    def register(self, method_name: str, func: Function | ConcreteFunction) -> None:
        if self._service is not None:
            raise FailedPreconditionError(
                "All methods must be registered before starting the server. Method registration after starting the "
                "server is not supported."
            )
        registered = _Registered(method_name, func)
        if method_name in self._functions:
            raise InvalidArgumentError(f"{method_name} is already registered.")
        self._functions[method_name] = registered

    def start(self) -> None:
        if self._service is not None:
            raise FailedPreconditionError(f"The server at {self.address} has been started already.")
        functions = self._functions
        service = Service(self.address, {"list": lambda _: _listed(functions), "call": lambda r: _called(functions, r)})
        service.start()
        self.address, self._service = service.address, service
        # In a thread: what is deleted may be so in any thread, also in one for which stopping would wait.
        stop = threading.Thread(target=service.stop, name="replicax-rpc-stop", daemon=True)
        weakref.finalize(self, stop.start).atexit = False

    def stop(self) -> None:
        if self._service is not None:
            self._service.stop()


class _Registered:
    """A registered function, the specs of what it takes, and their structure."""

    def __init__(self, name: str, function: Function | ConcreteFunction):
        if is_function(function):
            if function.input_signature is None and _has_parameters(function):
                raise ValueError("Input signature not specified for the function.")
            function = function.get_concrete_function()
        elif not isinstance(function, ConcreteFunction):
            raise ValueError("Only TF functions are supported with Register method")
        by_position, by_name = function.structured_input_signature
        takes = tuple(part for part in by_position if any(isinstance(leaf, TensorSpec) for leaf in leaves(part)))
        self.name = name
        self.specs: list[TensorSpec] = leaves(takes)
        self.takes = described(takes)
        self._tree = jax.tree.structure(takes, is_leaf=is_leaf)
        self._function = function
        if leaves(by_name) or not all(isinstance(spec, TensorSpec) for spec in self.specs):
            raise ValueError(f"Clients give tensors by position alone; {function!r} takes other arguments, too.")

    def __call__(self, tensors: Sequence[Leaf]) -> Tree:
        if len(tensors) != len(self.specs):
            raise InvalidArgumentError(f"{self.name!r} takes {len(self.specs)} tensors, got {len(tensors)}.")
        for index, (tensor, spec) in enumerate(zip(tensors, self.specs)):
            if not spec.is_compatible_with(found := TensorSpec(np.shape(tensor), tensor.dtype)):
                raise InvalidArgumentError(f"Argument {index} of {self.name!r} is {spec}, got {found}.")
        return self._function(*jax.tree.unflatten(self._tree, tensors))


def _has_parameters(function: Function) -> bool:
    return bool(inspect.signature(function.python_function).parameters)


def _listed(functions: dict[str, _Registered]) -> Answer:
    return {name: function.takes for name, function in functions.items()}, []


def _called(functions: dict[str, _Registered], request: Request) -> Answer:
    name = request.head["method"]
    if name not in functions:
        known = ", ".join(sorted(functions)) or "none"
        raise InvalidArgumentError(f"{name} is not registered. The registered functions are: {known}.")
    result = functions[name](request.arrays)
    return {"returns": described(result)}, [_sent(leaf) for leaf in leaves(result)]


def _sent(leaf: Leaf) -> Any:
    if isinstance(leaf, Variable):
        leaf = leaf.value()
    if isinstance(leaf, DistributedValues):
        raise InvalidArgumentError(f"A function for remote calls returns tensors, got {received(leaf)}.")
    return leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
