"""The environment that the compiler for TPUs is installed in, apart from the user's.

With libtpu beside it, JAX starts more slowly, takes more memory and prints messages. So libtpu is not installed where
programs run, but in a folder of the user's cache, one for each version of JAX.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

from replicax._base import atomic_files
from replicax._base.planning import PlanError

_STAMP = "installed"  # a file that is made last


def folder() -> Path:
    """Returns the folder of the environment, whether it exists or not."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(cache, "replicax", "plan", f"jax-{importlib.metadata.version('jax')}")


def installed() -> str | None:
    """Returns the environment's Python; None where it has not been installed."""
    return str(_python()) if (folder() / _STAMP).exists() and os.access(_python(), os.X_OK) else None


def _python() -> Path:
    return folder() / "bin" / "python"


def install() -> None:
    """Makes the environment, or makes it anew, with the version of JAX that is installed here.

    Processes that install at the same time take turns: each would delete what another one is installing. Those that
    have waited use what the first one has installed.

    Raises:
        PlanError: Python makes no environment, or pip does not install the compiler in it.
    """
    where, compiler, before = folder(), f"jax[tpu]=={importlib.metadata.version('jax')}", installed()
    text = "1.3 GB, which takes a minute, or longer if another process is installing there."
    print(f"Installing {compiler} in {where}: {text}", flush=True)
    where.parent.mkdir(parents=True, exist_ok=True)
    with atomic_files.changing(str(where.parent)):
        if before or not installed():
            _install(where, compiler)
    print("Plans for TPUs are compiled there from now on.", flush=True)


def _install(where: Path, compiler: str) -> None:
    (where / _STAMP).unlink(missing_ok=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    pip = [str(_python()), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    commands = [[sys.executable, "-m", "venv", "--clear", str(where)], [*pip, compiler, "flatbuffers"]]
    for command in commands:
        ended = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, check=False)
        if ended.returncode:
            raise PlanError(
                f"The compiler for TPUs has not been installed: `{' '.join(command)}` ended with status "
                f"{ended.returncode}. It exists only for Linux. You can also install {compiler} and flatbuffers in an "
                "environment of your own, and set REPLICAX_PLAN_PYTHON to its Python."
            )
    (where / _STAMP).touch()
