"""Settings: virtual devices, compiled programs kept on disk, how functions run, and time limits of several processes.

>>> import replicax as rx
>>> rx.config.functions_run_eagerly()
False
"""

from __future__ import annotations

from replicax._base.compilation_cache import set_compilation_cache
from replicax._base.devices import device_table, set_virtual_devices
from replicax._base.thread_state import optimize_programs, optimizes_programs
from replicax._cluster.tpu_system import experimental_connect_to_cluster, experimental_connect_to_host
from replicax._engine.modes import functions_run_eagerly, run_functions_eagerly
from replicax._engine.program import log_compiles
from replicax._engine.step_hints import hint_short_steps
from replicax._job.state import set_timeouts as set_job_timeouts
from replicax._job.state import timeouts as job_timeouts
from replicax._report.terminal import show_progress
from replicax._variables.assigned_alike import refuse_different_assignments

__all__ = [
    "experimental_connect_to_cluster",
    "experimental_connect_to_host",
    "functions_run_eagerly",
    "hint_short_steps",
    "job_timeouts",
    "list_devices",
    "log_compiles",
    "optimize_programs",
    "optimizes_programs",
    "refuse_different_assignments",
    "run_functions_eagerly",
    "set_compilation_cache",
    "set_job_timeouts",
    "set_virtual_devices",
    "show_progress",
]


def list_devices() -> list[str]:
    """Returns the short names of all devices of this process, such as `"GPU:0"`. Starts JAX.

    >>> import replicax as rx
    >>> "GPU:0" in rx.config.list_devices()
    True
    """
    return list(device_table())
