"""Compiles exported programs, each in a process of its own.

For TPUs the process runs the Python of another environment, which has `jax[tpu]` (see `environment`).
"""

from __future__ import annotations

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
from replicax._plan.chips import Topology
from replicax._plan.lowering import Lowered

VARIABLE = "REPLICAX_PLAN_PYTHON"
_FRAME = re.compile(r"\s*@ |https?://symbolize")  # a line of the native stack that a failing compiler prints
AT_ONCE = 2  # libtpu's compiler uses several threads itself


def compiled(lowered: Lowered, topology: Topology) -> dict[str, Any]:
    """Compiles a program for these devices in another process, and returns the measurements.

    Raises:
        PlanError: the process fails, or there is no Python for it.
    """
    command = [python_for(topology), compiler.__file__]
    # These are for the programs of this process, such as its virtual devices, and not for the compiler.
    ours = {"XLA_FLAGS", "REPLICAX_VIRTUAL_DEVICES", "JAX_NUM_CPU_DEVICES", "PYTHONPATH"}
    variables = {name: value for name, value in os.environ.items() if name not in ours}
    with tempfile.TemporaryDirectory(prefix="replicax-plan-") as name:
        folder = Path(name)
        (folder / "program").write_bytes(lowered.program)
        request = {
            "program": "program",
            "platform": topology.platform,
            "topology": topology.name,
            "axes": lowered.axes,
            "specs": lowered.specs,
            "donated": lowered.donated,
        }
        file = folder / "request.json"
        file.write_text(json.dumps(request))
        ended = subprocess.run(
            [*command, str(file)],
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        result = file.with_suffix(".result")
        if ended.returncode == 0 and result.exists():
            measured: dict[str, Any] = json.loads(result.read_text())
            if missing := measured.get("missing"):
                raise PlanError(
                    f"{command[0]} cannot compile for {topology.name}: it lacks {', '.join(missing)}. `replicax plan "
                    f"--install` installs a Python that has them, which is used if {VARIABLE} is not set. "
                    f"See {doc_pages.page('how-to/planning#install')}."
                )
            return measured
    said = [line for line in (ended.stdout + ended.stderr).strip().splitlines() if not _FRAME.match(line)]
    lines = "".join(f"\n  {line}" for line in said[-12:])
    raise PlanError(f"The compiler for {topology.name}, {command[0]}, ended with status {ended.returncode}:{lines}")


def python_for(topology: Topology) -> str:
    """Returns the Python that compiles for such devices; raises `PlanError` if there is none."""
    if topology.platform == "cpu":
        return sys.executable
    if chosen := os.environ.get(VARIABLE):
        if not os.access(chosen, os.X_OK):
            raise PlanError(
                f"{VARIABLE} is {chosen!r}, which is not an executable file. Set it to a Python that has jax[tpu] and "
                "flatbuffers. "
                f"See {doc_pages.page('how-to/planning#install')}."
            )
        return chosen
    if found := environment.installed():
        return found
    if importlib.util.find_spec("libtpu") is not None:
        return sys.executable
    raise PlanError(
        "To plan for TPUs, install XLA's compiler for them: `replicax plan --install` puts it in an environment of its "
        f"own, {environment.folder()}, since it changes how JAX starts. Or set {VARIABLE} to a Python that has "
        f"jax[tpu] and flatbuffers. See {doc_pages.page('how-to/planning')}."
    )
