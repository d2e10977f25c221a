"""Looking at an address from this machine: whose it is, whether its port is free, and whether a proxy is in the way."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from replicax._job.channel import is_own

_PROC = Path("/proc")
_PROXY_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")
_NO_PROXY_VARIABLES = ("no_grpc_proxy", "no_proxy")


def split_address(address: str) -> tuple[str, int | None, str | None]:
    """Returns host, port, and what is wrong with an address; `a:1` and `[::1]:1` are right."""
    if "://" in address:
        return *split_address(address.partition("://")[2])[:2], "has a scheme in front; write it as HOST:PORT"
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
    if not port.isdecimal() or not host or (":" in host and not address.startswith("[")):
        wrong = "has a port that is not a number" if host and ":" not in host else "has no port; write it as HOST:PORT"
        return (address if ":" in host or not host else host), None, wrong
    if any(letter.isspace() or letter == "/" for letter in host):
        return host, int(port), "has a blank or a slash in its host; write it as HOST:PORT"
    if not 0 < int(port) < 65536:
        return host, None, "has a port that is not between 1 and 65535"
    return host, int(port), None


def is_loopback(host: str) -> bool:
    """Returns whether a host is each machine itself: `localhost` and its numbers."""
    if host.lower().rstrip(".") in ("localhost", "localhost.localdomain", "ip6-localhost"):
        return True
    number = _number(host)
    return number is not None and number.is_loopback


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


def within(seconds: float, *calls: Callable[[], Any]) -> list[tuple[str, Any]]:
    """Makes the calls side by side: ("done", result), ("failed", exception) or ("late", None) for each.

    A call that is late goes on in its thread, which does not keep the process from ending.
    """
    outcomes: list[tuple[str, Any]] = [("late", None)] * len(calls)

    def call(place: int) -> None:
        try:
            outcomes[place] = ("done", calls[place]())
        except BaseException as error:
            outcomes[place] = ("failed", error)

    threads = [
        threading.Thread(target=call, args=(place,), name="replicax-explain", daemon=True)
        for place in range(len(calls))
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return list(outcomes)


def look_up(hosts: Iterable[str], seconds: float) -> dict[str, list[str] | str]:
    """Returns the IP addresses of each host, or text on what is wrong with it."""
    hosts = list(hosts)

    def numbers(host: str) -> list[str]:
        if _number(host) is not None:
            return [host]
        return sorted({str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)})

    found: dict[str, list[str] | str] = {}
    for host, (how, result) in zip(hosts, within(seconds, *(lambda host=host: numbers(host) for host in hosts))):
        if how == "done":
            found[host] = result
        elif how == "late":
            found[host] = f"was not resolved within {seconds:g} s"
        else:
            found[host] = f"cannot be resolved on this machine ({result})"
    return found


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
    """Returns why this process could not listen at a port; None if it could, or does already."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # Connections that have ended may hold a port for a minute; a listener can still have it.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            return None
        except OSError as error:
            if error.errno == errno.EACCES:
                return f"port {port} may not be opened by this user; take one above 1023"
            if error.errno != errno.EADDRINUSE:
                return f"port {port} cannot be opened: {error.strerror}"
    holders = list(_listeners(port))
    if os.getpid() in holders:
        return None
    by = f" by process {holders[0]} ({_command(holders[0])[:80]})" if holders else ""
    return f"port {port} is in use{by}; end that program, or take another port"


def _listeners(port: int) -> Iterator[int]:
    """Yields the processes that listen at a port, as far as this user may see them, this one first."""
    sockets = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (_PROC / "net" / table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    sockets.add(f"socket:[{fields[9]}]")
    pids = [int(path.name) for path in _PROC.iterdir() if path.name.isdecimal()] if sockets else []
    for pid in sorted(pids, key=lambda pid: pid != os.getpid()):
        with contextlib.suppress(OSError):
            for link in (_PROC / str(pid) / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if os.readlink(link) in sockets:
                        yield pid
                        break


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return (_PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").rstrip("\0").replace("\0", " ")
    return ""


def proxied(hosts: Iterable[str]) -> tuple[str, str, list[str]] | None:
    """Returns the variable that makes gRPC use a proxy, the proxy, and the hosts it would reach through that.

    gRPC takes the first variable that is set, in small letters; it leaves out hosts that end in an entry of
    `no_proxy` or whose number is in a range given there. `localhost` is no exception, and `*` means nothing to it.
    """
    variable = next((name for name in _PROXY_VARIABLES if name in os.environ), None)
    if variable is None or not os.environ[variable]:
        return None
    exceptions = next((os.environ[name] for name in _NO_PROXY_VARIABLES if name in os.environ), "")
    entries = [entry.strip() for entry in exceptions.split(",") if entry.strip()]
    through = [host for host in hosts if not any(_excepted(host, entry) for entry in entries)]
    proxy = re.sub(r"//[^/@]*@", "//***@", os.environ[variable])
    return (variable, proxy, through) if through else None


def _excepted(host: str, entry: str) -> bool:
    if host.lower().endswith(entry.lower()):
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host) in ipaddress.ip_network(entry, strict=False)
    return False
