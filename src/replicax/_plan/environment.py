"""The environments of the compilers for GPUs and TPUs, apart from the user's.

With libtpu or the plugin for GPUs beside it, JAX starts more slowly, takes more memory and prints messages. So each
compiler has a folder of its own in the user's cache, for each version of JAX.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from replicax._base import atomic_files
from replicax._base.planning import PlanError
from replicax._base.quantities import size
from replicax._base.terminal import is_terminal

_STAMP = "installed"  # a file that is made last


@dataclass(frozen=True)
class Compiler:
    """A compiler that can be installed.

    Args:
        title: the devices that it compiles for.
        space: bytes that the environment takes.
        packages: the packages that are installed with their dependencies; "{jax}" is the version of JAX.
        alone: the packages that are installed without them. The plugin for GPUs depends on CUDA's libraries, 4 GB,
            which only running programs need.
    """

    title: str
    space: float
    packages: tuple[str, ...]
    alone: tuple[str, ...] = ()


COMPILERS = {
    "gpu": Compiler(
        "GPUs",
        1.3e9,
        ("jax=={jax}", "flatbuffers"),
        ("jax-cuda12-plugin=={jax}", "jax-cuda12-pjrt=={jax}", "nvidia-cuda-nvcc-cu12"),
    ),
    "tpu": Compiler("TPUs", 1.4e9, ("jax[tpu]=={jax}", "flatbuffers")),
}


def folder(kind: str) -> Path:
    """Return the folder of the environment for "gpu" or "tpu", whether it exists or not."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(cache, "replicax", "plan", f"jax-{_jax()}-{kind}")


def find_python(kind: str) -> str | None:
    """Return the environment's Python, or None if it has not been installed."""
    return str(_python(kind)) if (folder(kind) / _STAMP).exists() and os.access(_python(kind), os.X_OK) else None


def packages(kind: str) -> tuple[list[str], list[str]]:
    """Return the packages of a compiler: those with their dependencies, and those without."""
    compiler = COMPILERS[kind]
    return [name.format(jax=_jax()) for name in compiler.packages], [name.format(jax=_jax()) for name in compiler.alone]


def _jax() -> str:
    return importlib.metadata.version("jax")


def _python(kind: str) -> Path:
    return folder(kind) / "bin" / "python"


def install(kind: str) -> None:
    """Make the environment for "gpu" or "tpu", or make it anew, with the version of JAX that is installed here.

    Processes that install at the same time take turns: each would delete another one's files. The later ones use the
    environment of the first.

    Raises:
        PlanError: the disk has too little space, or Python makes no environment, or pip does not install the compiler.
    """
    where, compiler, before = folder(kind), COMPILERS[kind], find_python(kind)
    try:
        where.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(where.parent).free
    except OSError as error:
        raise PlanError(f"{where.parent} cannot be made: {error.strerror}. Set XDG_CACHE_HOME to a folder.") from None
    if free < compiler.space and not before:
        raise PlanError(
            f"The compiler for {compiler.title} takes {size(compiler.space)}, and the disk of {where.parent} has "
            f"{size(free)} left. Make room there, or set XDG_CACHE_HOME to a folder on another disk."
        )
    print(
        f"Installing XLA's compiler for {compiler.title} in {where}: {size(compiler.space)}, in about a minute, or "
        "longer if another process is installing there.",
        flush=True,
    )
    with atomic_files.changing(str(where.parent)):
        if before or not find_python(kind):
            _install(kind, where)
    print(f"Plans for {compiler.title} are compiled there from now on.", flush=True)


def _install(kind: str, where: Path) -> None:
    (where / _STAMP).unlink(missing_ok=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    quiet = [] if is_terminal(sys.stderr) else ["--quiet"]  # on a terminal pip shows its progress
    pip = [str(_python(kind)), "-m", "pip", "--disable-pip-version-check", "install", *quiet]
    whole, alone = packages(kind)
    commands = [[sys.executable, "-m", "venv", "--clear", str(where)], [*pip, *whole]]
    if alone:
        commands.append([*pip, "--no-deps", *alone])
    for command in commands:
        print(f"  {' '.join(command[1:])}", flush=True)
        ended = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, check=False)
        if ended.returncode:
            named = " and ".join([*whole, *(f"{name} (with --no-deps)" for name in alone)])
            raise PlanError(
                f"The compiler for {COMPILERS[kind].title} has not been installed: `{' '.join(command)}` ended with "
                f"status {ended.returncode}. It exists only for Linux. You can also install {named} in an environment "
                "of your own, and set REPLICAX_PLAN_PYTHON to its Python."
            )
    (where / _STAMP).touch()
