"""Compiles exported programs, each in a further process.

For GPUs and TPUs the process runs the Python of another environment, which has their compiler (see `environment`).
"""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from replicax._base import doc_pages
from replicax._base.planning import PlanError
from replicax._plan import compiler, environment
from replicax._plan.chips import Gpu, Topology
from replicax._plan.environment import VARIABLE
from replicax._plan.exports import Lowered
from replicax._plan.options import TIME_LIMIT

AT_ONCE = 2  # XLA's compilers use several threads themselves
_FRAME = re.compile(r"\s*@ |https?://symbolize")  # a line of the native stack that a failing compiler prints
Processes = set[subprocess.Popen[str]]  # the compilers that run for one plan


def compile_apart(
    lowered: Lowered, topology: Topology, time_limit: float = TIME_LIMIT, processes: Processes | None = None
) -> dict[str, Any]:
    """Compile a program for these devices in another process, and return the measurements.

    While the process runs, it is in `processes`, so that `stop` can end it from another thread.

    Raises:
        PlanError: there is no Python for it, the process fails or takes longer than `time_limit` seconds, or the disk
            of temporary files is full.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="replicax-plan-") as folder:
            return _compile_in(Path(folder), lowered, topology, time_limit, set() if processes is None else processes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise PlanError(
            f"The disk of temporary files, {tempfile.gettempdir()}, is full: {error.strerror}. Make room there, or set "
            "TMPDIR to a folder on another disk."
        ) from None


def _compile_in(
    folder: Path, lowered: Lowered, topology: Topology, time_limit: float, processes: Processes
) -> dict[str, Any]:
    command = [python_for(topology), compiler.__file__]
    # These are for the programs of this process and not for the compiler.
    ours = {"XLA_FLAGS", "REPLICAX_VIRTUAL_DEVICES", "JAX_NUM_CPU_DEVICES", "PYTHONPATH"}
    variables = {name: value for name, value in os.environ.items() if name not in ours}
    (folder / "program").write_bytes(lowered.program)
    file = folder / "request.json"
    file.write_text(json.dumps(_request(lowered, topology)))
    try:
        ended = _run([*command, str(file)], variables, time_limit, processes)
    except subprocess.TimeoutExpired:
        raise PlanError(
            f"Compiling for {topology.name} has taken longer than {time_limit:g} s and was stopped. A program that "
            "repeats its layers in `jax.lax.scan` compiles faster. `time_limit` of `plan`, and --time-limit of "
            "`replicax plan`, give it more seconds."
        ) from None
    result = file.with_suffix(".result")
    if ended.returncode == 0 and result.exists():
        measured: dict[str, Any] = json.loads(result.read_text())
        if missing := measured.get("missing"):
            raise PlanError(
                f"{command[0]} cannot compile for {topology.name}: it lacks {', '.join(missing)}. `replicax plan "
                f"--install {topology.platform}` installs a Python that has them, which is used if {VARIABLE} is not "
                f"set. See {doc_pages.page('how-to/planning#install')}."
            )
        return measured
    said = [line for line in (ended.stdout + ended.stderr).strip().splitlines() if not _FRAME.match(line)]
    lines = "".join(f"\n  {line}" for line in said[-12:])
    if not ended.returncode:
        raise PlanError(
            f"The compiler for {topology.name}, {command[0]}, has written no result. Is it a Python?{lines}"
        )
    raise PlanError(f"The compiler for {topology.name}, {command[0]}, ended with status {ended.returncode}:{lines}")


def _run(
    command: list[str], variables: dict[str, str], time_limit: float, processes: Processes
) -> subprocess.CompletedProcess[str]:
    """Run a compiler, which is among the processes meanwhile.

    Raises:
        PlanError: the system does not run the command.
        subprocess.TimeoutExpired: it takes longer than `time_limit` seconds.
    """
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(
            command, env=variables, text=True, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe
        )
    except OSError as error:
        raise PlanError(f"{command[0]} does not run: {error.strerror}. {VARIABLE} has to name a Python.") from None
    with process:
        processes.add(process)
        try:
            said, errors = process.communicate(timeout=time_limit)
        except BaseException:  # the time limit or the user's interrupt: nobody waits for it any more
            process.kill()
            raise
        finally:
            processes.discard(process)
    return subprocess.CompletedProcess(command, process.returncode, said, errors)


def stop(processes: Processes) -> None:
    """Kill compilers, since nobody waits for them any more."""
    for process in list(processes):
        process.kill()


def _request(lowered: Lowered, topology: Topology) -> dict[str, Any]:
    """Return the request that `compiler` reads beside the program."""
    gpu = topology.chip if isinstance(topology.chip, Gpu) else None
    return {
        "program": "program",
        "platform": topology.compiler,
        "topology": topology.name,
        "grid": f"1x{topology.hosts}x{topology.per_host}",  # slices, hosts, GPUs of a host
        "target": gpu.device.target_config(gpu) if gpu else None,
        "axes": lowered.axes,
        "order": lowered.order,
        "specs": lowered.specs,
        "donated": lowered.donated,
    }


def python_for(topology: Topology) -> str:
    """Return the Python that compiles for these devices; raise `PlanError` without one."""
    kind = topology.platform
    if kind == "cpu":
        return sys.executable
    compilers = environment.compiler(kind)
    if chosen := os.environ.get(VARIABLE):
        return compilers.choose([python for python in chosen.split(os.pathsep) if python], VARIABLE)
    if python := compilers.find_python():
        return python
    if importlib.util.find_spec(compilers.module) is not None:
        return sys.executable
    title = f"{kind.upper()}s"
    raise PlanError(
        f"To plan for {title}, install XLA's compiler for them: `replicax plan --install {kind}` puts it in an "
        f"environment of its own, {compilers.path}, since it changes how JAX starts. Or set {VARIABLE} to a Python "
        f"that has {compilers.needed}. See {doc_pages.page('how-to/planning#install')}."
    )
