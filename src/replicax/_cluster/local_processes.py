"""Looking at hosts and ports from this machine, and the order of names."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from replicax._job.channel import is_own

_LOOPBACK = ("localhost", "localhost.localdomain", "ip6-localhost")


def is_loopback(host: str) -> bool:
    """Returns whether a host is each machine itself: `localhost` and its numbers."""
    number = _number(host)
    return number.is_loopback if number is not None else host.lower().rstrip(".") in _LOOPBACK


def is_unspecified(host: str) -> bool:
    """Returns whether a host is 0.0.0.0 or ::, at which one can listen but reach nobody."""
    number = _number(host)
    return number is not None and number.is_unspecified


def _number(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def natural(name: str) -> tuple[int | str, ...]:
    """Returns a key that sorts n2 before n10."""
    return (*(int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)), name)


def within(seconds: float, function: Callable[..., None], arguments: Iterable[Sequence[object]] = ((),)) -> None:
    """Calls a function with each of these arguments, side by side, and waits for so long at most.

    A call that is late goes on in its thread, which does not keep the process from ending.
    """
    threads = [threading.Thread(target=function, args=args, name="replicax-explain", daemon=True) for args in arguments]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def look_up(hosts: Sequence[str], seconds: float) -> dict[str, list[str] | str]:
    """Returns the IP addresses of each host, or text on what is wrong with it."""
    found: dict[str, list[str] | str] = dict.fromkeys(hosts, f"was not resolved within {seconds:g} s")

    def ask(host: str) -> None:
        try:
            known = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            found[host] = sorted({str(address[0]) for *_, address in known})
        except (OSError, UnicodeError) as error:
            found[host] = f"cannot be resolved on this machine ({error})"

    within(seconds, ask, [(host,) for host in hosts])
    return dict(found)


def names() -> set[str]:
    """Returns the names of this machine in lower case, with their domain and without."""
    given = [socket.gethostname(), os.environ.get("SLURMD_NODENAME"), os.environ.get("SM_CURRENT_HOST")]
    long = {name.lower() for name in given if name}
    return long | {name.partition(".")[0] for name in long}


def is_here(host: str, numbers: list[str] | str) -> bool | None:
    """Returns whether a host is this machine; None if its IP addresses are not known and its name is another."""
    if host.lower() in names() or is_loopback(host):
        return True
    if isinstance(numbers, str):
        return None
    return any(is_own(number) and not is_unspecified(number) for number in numbers)


def port_trouble(port: int) -> str | None:
    """Returns why this process could not listen at a port; None if it could."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # Connections that have ended may hold a port for a minute; a listener can still have it.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return (
                f"port {port} cannot be opened ({error.strerror}); end the program that uses it, or take another port, "
                "above 1023"
            )
    return None
