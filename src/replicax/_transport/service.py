"""A task's service: methods that other tasks call over gRPC, and those of the same process directly."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from replicax._base.version import __version__
from replicax._job.channel import interface, is_own, join_address, parse
from replicax._transport import grpc_settings
from replicax._transport.direct import Listener
from replicax._transport.errors import described
from replicax._transport.handlers import Caller, Handler, Request, handle, instance
from replicax._transport.secret import job_secret, refuse_pickles
from replicax._transport.wire import Bytes, Message, parsed, received

# What an answer begins with: the handler's answer; its exception; the caller is not known here (any more).
ANSWER, RAISED, UNKNOWN = range(3)

_local: dict[str, Service] = {}  # services of this process that have started, by their address


def local_service(address: str) -> Service | None:
    """Returns the service of this process that has started at an address; None if there is none."""
    found = _local.get(_key(address))
    return found if found is not None and found.pid == os.getpid() else None  # not in a forked process


def _key(address: str) -> str:
    return grpc_settings.target(*parse(address))


def versions() -> dict[str, str]:
    """Returns what must be equal on both sides of a connection: Python too, since it reads pickled functions' code."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return {"replicax": __version__, "jax": jax.__version__, "python": python}


class Service:
    """A gRPC server of one task.

    Args:
        address: `"host:port"` of the task; port 0 stands for any free port.
        methods: what other tasks can call, by name. Handlers run at the same time, each in a thread.
        job: the addresses of all tasks, from which `job_secret` sees whether a secret is needed.
        name: what messages call the task, such as "worker 1".
        unpickles: whether methods unpickle what comes, which lets whoever can connect run code.

    Attributes:
        address: the address with the port at which the service listens.

    Raises:
        JobError: there is no secret where one is needed, or `unpickles` beyond the loopback without a secret.
        OSError: nothing can listen at the address.
    """

    def __init__(
        self,
        address: str,
        methods: Mapping[str, Handler],
        *,
        job: Sequence[str] = (),
        name: str = "",
        unpickles: bool = False,
    ):
        self.pid = os.getpid()
        self.name = name
        self.methods = dict(methods)
        self._secret = job_secret([address, *job])
        self._unpickles = unpickles
        self._stopped = threading.Event()
        self._callers: dict[str, Caller] = {}
        self._threads = grpc_settings.Threads("replicax-service")
        grpc = grpc_settings.grpc()
        self._server = grpc.server(self._threads, options=grpc_settings.of_server())
        self._server.add_generic_rpc_handlers(
            [
                grpc.method_handlers_generic_handler(
                    grpc_settings.SERVICE,
                    {
                        "greet": grpc.unary_stream_rpc_method_handler(self._greet),
                        "lane": grpc.stream_stream_rpc_method_handler(self._lane),
                    },
                )
            ]
        )
        self.address = self._listen(address)
        self._lanes = Listener(
            interface(parse(self.address)[0]),
            self._secret,
            admit=self._callers.get,
            answer=self._answer,
            start=self._threads.submit,
        )

    @property
    def where(self) -> str:
        """The task as messages call it: its name and address."""
        return f"{self.name} ({self.address})" if self.name else self.address

    def _listen(self, address: str) -> str:
        host, port = (address.rpartition(":")[0].strip("[]"), 0) if address.endswith(":0") else parse(address)
        host = host or "localhost"
        at = join_address(interface(host), port)
        if self._unpickles:
            refuse_pickles(self._secret, at)
        try:
            if self._secret is None:
                found = self._server.add_insecure_port(at)
            else:
                found = self._server.add_secure_port(at, grpc_settings.server_credentials(self._secret))
        except RuntimeError as error:
            why = "another program listens there" if is_own(interface(host)) else "this machine does not have it"
            raise OSError(f"The service of this task cannot listen at {address} ({at}): {why}.") from error
        return join_address(host, found)

    def start(self) -> None:
        """Begins to take calls."""
        self._lanes.start()  # first: greetings tell of its port
        self._server.start()
        _local[_key(self.address)] = self

    def stop(self) -> None:
        """Ends all connections. Handlers that run go on, and nobody gets their answers."""
        if _local.get(_key(self.address)) is self:
            del _local[_key(self.address)]
        self._server.stop(None).wait()
        self._lanes.stop()
        for caller in list(self._callers.values()):
            caller.close()
        self._threads.shutdown()
        self._stopped.set()

    def wait(self) -> None:
        """Waits until the service is stopped."""
        self._stopped.wait()

    def greeting(self) -> dict[str, Any]:
        """Returns what the service says of itself."""
        return {**versions(), "instance": instance(), "name": self.name, "port": self._lanes.port}

    def know(self, caller: Caller, link: str) -> None:
        """Takes calls of a caller from now on, under the name of its connection."""
        self._callers[link] = caller

        def forgotten() -> None:
            self._callers.pop(link, None)

        caller.on_close(forgotten)

    def _greet(self, request: bytes, context: Any) -> Iterator[bytes]:
        """Answers a greeting in the metadata, yields nothing, and ends with the connection."""
        grpc = grpc_settings.grpc()
        told = json.loads(request)
        ours = versions()
        theirs = {name: told.get(name) for name in ours}
        if theirs != ours:
            text = f"{self.where} has {_listed(ours)}, the task that calls it has {_listed(theirs)}"
            print(f"replicax: a task at {context.peer()} was refused: {text}.", file=sys.stderr, flush=True)
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)
        ended = threading.Event()
        if not context.add_callback(ended.set):
            return
        caller = Caller()
        self.know(caller, str(told["link"]))
        try:
            greeting = json.dumps(self.greeting()).encode()
            with contextlib.suppress(ValueError):  # it has ended already
                context.send_initial_metadata([(grpc_settings.GREETING, greeting)])
            ended.wait()
        finally:
            caller.close()
        yield from ()

    def _lane(self, parts: Iterator[bytes], context: Any) -> Iterator[bytes]:
        """Answers the calls that come over a stream, one after the other."""
        while (request := received(parts)) is not None:
            answer = self._answer(request)
            del request  # it is not kept until the next one comes
            yield from answer.parts()
            del answer

    def _answer(self, request: Bytes) -> Message:
        (link, method, head), arrays = parsed(request)
        caller = self._callers.get(link)
        if caller is None:
            return Message([UNKNOWN, {}])
        try:
            answer, values = handle(self.methods, method, Request(head, arrays, caller))
            return Message([ANSWER, answer], values)
        except BaseException as error:  # SystemExit, too, ends neither the service nor its process
            head, arrays = described(error, trusted=self._secret is not None)
            return Message([RAISED, head], arrays)


def _listed(found: Mapping[str, str | None]) -> str:
    return f"replicax {found['replicax']}, JAX {found['jax']} and Python {found['python']}"
