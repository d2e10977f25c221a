"""Which other processes of the job this one cannot reach: asked only when a call that all have reached does not end."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence

from replicax._job.channel import connected_host, parse

SECONDS = 3.0  # for an answer
_MOST = 64  # processes that one process tries to reach, of very many


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
    import asyncio  # an import of replicax does without it

    async def connect(address: str) -> str:
        host, port = parse(address)
        try:
            found = socket.getaddrinfo(connected_host(host), port, type=socket.SOCK_STREAM)
            family, kind, protocol, _, at = found[0]
            with socket.socket(family, kind, protocol) as connection:
                connection.setblocking(False)
                async with asyncio.timeout(seconds):
                    await asyncio.get_running_loop().sock_connect(connection, at)
        except (ConnectionRefusedError, ConnectionResetError):
            pass
        except TimeoutError:
            return f"no answer for {seconds:g} s"
        except OSError as error:
            return error.strerror or str(error)
        return ""

    async def connect_to_all() -> list[str]:
        return await asyncio.gather(*map(connect, addresses.values()))

    return {process: why for process, why in zip(addresses, asyncio.run(connect_to_all())) if why}
