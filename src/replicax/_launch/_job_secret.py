"""The secret of a job with parameter servers, by which its tasks know each other and encrypt what they send."""

from __future__ import annotations

import hmac
import secrets
import warnings
from typing import NamedTuple

from replicax._job.channel import join_address
from replicax._transport.secret import SECRET, is_given, refuse_pickles, stretched
from replicax._transport.secret import job_secret as of_task


class Secret(NamedTuple):
    """The secret of the tasks of one machine.

    Args:
        digest: tells the launchers of several machines whether they have the same one, without giving it away.
        environment: variables that the tasks need beside the launcher's own.
    """

    digest: str
    environment: dict[str, str]


def job_secret(coordinator: tuple[str, int] | None) -> Secret:
    """Returns the secret that the user gave or, for a job on a single machine, a new one.

    The launchers' own connections are not encrypted, so that no secret travels by them.

    Raises:
        JobError: there are several machines, and no secret; or it cannot be read.
    """
    if coordinator is None and not is_given():
        return Secret("", {SECRET: secrets.token_hex(32)})
    where = join_address(*coordinator or ("127.0.0.1", 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # each task warns where there is none
        secret = of_task([where])
    refuse_pickles(secret, where)
    if secret is None:
        return Secret("none", {})
    return Secret(hmac.digest(stretched(secret), b"replicax launch", "sha256").hex(), {})
