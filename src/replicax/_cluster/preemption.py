"""Platforms' notices that a machine is to end soon, and `PreemptionWatcher`, which says that there was one."""

from __future__ import annotations

import http.client

import jax

from replicax._cluster import gce
from replicax._job.agree_on_step import GATE
from replicax._job.notices import Look, Notice, Watch

_BEFORE_MAINTENANCE = 3600.0  # seconds from Google's notice to the end of a machine with GPUs


def platform_looks(grace: float | None) -> list[Look]:
    """Returns functions that ask the platform of this machine for a notice: one on Google Cloud, none elsewhere.

    Args:
        grace: seconds from the notice to the end; None for those of the platform.
    """
    return [lambda: google_notice(grace)] if gce.on_google_cloud() else []


def google_notice(grace: float | None = None) -> Notice | None:
    """Returns a notice once Google's metadata server announces the end of this machine: maintenance, or preemption.

    A machine with GPUs ends an hour after the announcement of maintenance; without them, and where it is preempted, in
    less than a minute. A server that does not answer, or answers with what is no text, has announced nothing.
    """
    try:
        if gce.metadata("instance/preempted") == "TRUE":
            return Notice("is on a machine that Google Cloud preempts", grace)
        if gce.metadata("instance/maintenance-event") != "TERMINATE_ON_HOST_MAINTENANCE":
            return None
    except (OSError, http.client.HTTPException, ValueError):
        return None
    if grace is None and jax.local_devices()[0].platform == "gpu":
        grace = _BEFORE_MAINTENANCE
    return Notice("is on a machine that Google Cloud ends for maintenance", grace)


class PreemptionWatcher:
    """Tells whether a worker of the job is to end soon.

    It hears of notices of Google Cloud on this machine, and of all notices of workers with a
    `PreemptionCheckpointHandler`, such as SIGTERM. It saves nothing, and leaves it to the program what to do.

    >>> import replicax as rx
    >>> watcher = rx.experimental.PreemptionWatcher()
    >>> watcher.preemption_message is None
    True
    """

    def __init__(self) -> None:
        self._watch = Watch(platform_looks(None), signals=False)
        self._known = len(GATE.notices)

    @property
    def preemption_message(self) -> str | None:
        """The first notice since this object was made: which worker, and what has happened to it; None before.

        >>> import replicax as rx
        >>> print(rx.experimental.PreemptionWatcher().preemption_message)
        None
        """
        return next(iter(GATE.notices[self._known :]), None)

    def block_until_worker_exit(self) -> None:
        """Returns at once: no process of a job connects to workers, so that none could come back to one that is ending.

        TensorFlow's waits for that on TPUs alone.

        >>> import replicax as rx
        >>> rx.experimental.PreemptionWatcher().block_until_worker_exit()
        """
