"""Which other processes of the job this one cannot reach: asked only when a call that all have reached does not end."""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import time
from collections.abc import Mapping, Sequence

from replicax._job.channel import connected_host, parse

SECONDS = 3.0  # for an answer
_MOST = 64  # processes that one process tries to reach, of very many
_REACHED = (0, errno.ECONNREFUSED, errno.ECONNRESET)


def out_of_reach(addresses: Sequence[str], me: int) -> dict[int, str]:
    """Return the processes that do not answer this one (`me`), with the reasons. May take `SECONDS`.

    Connects to the address of each other process. Nothing listens there after the start of the job, so a machine that
    can be reached refuses the connection. This process has a connection to process 0: if process 0 does not answer
    either, the network drops attempts to connect, and the result is empty.
    """
    count = len(addresses)
    if count < 3:
        return {}
    following = [(me + step) % count for step in range(1, min(count, _MOST + 1))]
    silent = try_to_reach({process: addresses[process] for process in {0, *following} - {me}}, SECONDS)
    return {} if 0 in silent else silent


def try_to_reach(addresses: Mapping[int, str], seconds: float) -> dict[int, str]:
    """Connect to all addresses at once and return why some did not answer. To refuse the connection is an answer."""
    silent: dict[int, str] = {}
    end = time.monotonic() + seconds
    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        for process, address in addresses.items():
            host, port = parse(address)
            try:
                results = socket.getaddrinfo(connected_host(host), port, type=socket.SOCK_STREAM)
                family, kind, protocol, _, at = results[0]
                connection = stack.enter_context(socket.socket(family, kind, protocol))
            except OSError as error:
                silent[process] = error.strerror or str(error)
                continue
            connection.setblocking(False)
            number = connection.connect_ex(at)
            if number == errno.EINPROGRESS:
                selector.register(connection, selectors.EVENT_WRITE, process)
            elif number not in _REACHED:
                silent[process] = os.strerror(number)
        while selector.get_map() and (left := end - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                selector.unregister(key.fileobj)
                assert isinstance(key.fileobj, socket.socket)
                if (number := key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)) not in _REACHED:
                    silent[key.data] = os.strerror(number)
        silent |= dict.fromkeys((key.data for key in selector.get_map().values()), f"no answer for {seconds:g} s")
    return silent
