"""The devices that a program would find, asked for in another process with a deadline."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from replicax._base import quantities
from replicax._commands.info.section import Section
from replicax._launch._environment import visible_gpus

PROBE = (sys.executable, "-m", "replicax._commands.info.device_probe")
_LINES = 6  # of an error


def devices(timeout: float, command: Sequence[str] | None = None) -> Section:
    """Returns the devices that JAX finds.

    Args:
        timeout: seconds after which the process that asks is ended.
        command: the command line of that process, `PROBE` if none is given.
    """
    section = Section("Devices")
    # What JAX reserves of a GPU's memory by default may not be there while another program runs.
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    found, errors, ended = _asked(command or PROBE, environment, timeout)
    if found is None:
        section.data["error"] = errors[-_LINES:]
        section.rows = [("", line) for line in errors[-_LINES:]] or [("", "unknown")]
        section.problems.append(_failure(ended, timeout))
        return section
    section.data.update(found)
    section.rows.append(("platform", found["platform"]))
    section.rows += _rows(found["devices"])
    if found["virtual"]:
        virtual = ", ".join(f"{count} {kind}" for kind, count in found["virtual"].items())
        section.rows.append(("virtual", f"{virtual}: CPU devices under these names (REPLICAX_VIRTUAL_DEVICES)"))
    warnings = [line for line in errors if "warning" in line.lower() or line.startswith("E")]
    section.data["warnings"] = warnings
    section.rows += [("", line) for line in warnings[-_LINES:]]
    gpus = visible_gpus(os.environ)
    if found["platform"] == "cpu" and gpus and not found["virtual"]:
        section.problems.append(
            f"This machine has {len(gpus)} NVIDIA GPU{'s' * (len(gpus) > 1)}, and JAX uses the CPU. Install JAX for "
            "CUDA: pip install 'jax[cuda13]' (or 'jax[cuda12]' for an older driver). To use the CPU, set "
            "JAX_PLATFORMS=cpu."
        )
    return section


def _rows(found: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Returns a row for devices of one type that are alike."""
    alike: dict[tuple[str, str, int | None], list[str]] = {}
    for each in found:
        alike.setdefault((each["name"].partition(":")[0], each["kind"], each["memory"]), []).append(each["name"])
    return [
        (
            names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}",
            kind + (f", {quantities.size(memory)} of memory each" if memory else ""),
        )
        for (_, kind, memory), names in alike.items()
    ]


def _failure(ended: int | None, timeout: float) -> str:
    if ended is None:
        return (
            f"JAX did not list its devices within {timeout:g} s: an accelerator or its driver hangs, another program "
            "holds it, or other hosts of a TPU slice are awaited. JAX_PLATFORMS=cpu leaves accelerators out; "
            "--timeout gives it more time."
        )
    return (
        f"JAX could not list its devices (exit status {ended}). The lines under Devices are the end of its error. "
        "JAX_PLATFORMS=cpu leaves accelerators out."
    )


def _asked(
    command: Sequence[str], environment: dict[str, str], timeout: float
) -> tuple[dict[str, Any] | None, list[str], int | None]:
    """Runs the process; returns what it printed, its error lines, and its exit status (None: it was ended)."""
    # Files rather than pipes: what the process leaves behind could keep a pipe open.
    with tempfile.TemporaryDirectory(prefix="replicax-info-") as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        with out.open("wb") as output, err.open("wb") as error:
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=error, start_new_session=True
            )
            try:
                status: int | None = process.wait(timeout)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                if process.poll() is None:
                    _end(process)
        lines = err.read_text(encoding="utf-8", errors="replace").splitlines()
        with contextlib.suppress(ValueError, IndexError):
            if status == 0:
                return json.loads(out.read_text(encoding="utf-8").splitlines()[-1]), lines, status
    return None, lines, status


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):
        if os.name == "posix":
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):  # a driver that hangs holds it even then
        process.wait(2)
