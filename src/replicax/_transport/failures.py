"""The errors of gRPC in the words of the transport."""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Mapping
from typing import Any

from replicax._job.channel import parse
from replicax._transport.errors import Refused, Unreachable
from replicax._transport.secret import SECRET, SECRET_FILE

_TASK = re.compile(r"(ps|worker|chief|evaluator) \d+")  # a task of a cluster; other servers may have any name
_SAME = f"All tasks of a job have the same {SECRET} or {SECRET_FILE}."


def failure(error: Any, address: str, where: str, secret: bytes | None) -> Exception:
    """Returns what a gRPC call has failed with.

    Args:
        error: the call, or the error that it raised.
        address: the other side's address.
        where: the other side as messages call it.
        secret: this side's secret.
    """
    code, details = error.code().name, str(error.details())
    if code == "FAILED_PRECONDITION":
        return Refused(f"Versions differ: {details}. Install the same on all machines.")
    if code == "UNIMPLEMENTED":
        return Refused(f"What listens at {where} is no task of replicax.")
    if code in ("UNAVAILABLE", "CANCELLED", "OK"):
        return _no_connection(details if code != "OK" else "its service has stopped", address, where, secret)
    return RuntimeError(f"The call of the task at {where} failed ({code}): {details}")


def _no_connection(details: str, address: str, where: str, secret: bytes | None) -> Exception:
    if "CERTIFICATE_VERIFY_FAILED" in details:
        speaks_tls(address)  # without a certificate, so that the other side's gRPC logs a refusal, too
        return Refused(f"The task at {where} has another secret than this one. {_SAME}")
    if "WRONG_VERSION_NUMBER" in details:
        return Refused(
            f"The task at {where} sends plain text, and this one has a secret: {SECRET}=none is set there and not "
            f"here, or another program listens at that address. {_SAME}"
        )
    cut_off = "failed to connect" in details and "Connection refused" not in details
    if secret is None and cut_off and speaks_tls(address):
        return Refused(f"The task at {where} has a secret, and {SECRET} is 'none' here. {_SAME}")
    why = details.rpartition("last error: ")[2]
    why = re.sub(r"^([A-Z]+: )?(ipv[46]:\S+: )?", "", why).rstrip(".")
    return Unreachable(f"The task at {where} is gone or does not answer: {why}.")


def another_task(greeting: Mapping[str, Any], expected: str | None, address: str) -> str:
    """Return a message if a greeting comes from another task of the cluster than the expected one; else `""`."""
    task = greeting.get("name") or ""
    if expected is None or task == expected or not _TASK.fullmatch(task):
        return ""
    return (
        f"The task at {address} is {task!r}, expected {expected!r}. Compare the addresses of the cluster with the "
        "TF_CONFIG of the task that listens there, and check where the network forwards its port."
    )


def speaks_tls(address: str) -> bool:
    """Returns whether what listens at an address begins a TLS connection."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # nothing is sent
    context.set_alpn_protocols(["h2"])
    try:
        with socket.create_connection(parse(address), timeout=2.0) as connection:
            with context.wrap_socket(connection):
                return True
    except OSError:
        return False
