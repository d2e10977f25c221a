"""Python environments with packages that replicax needs in other processes and not in its own.

`replicax plan --install` and `replicax export --install` make them, each in a folder of the user's cache.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from replicax._base import atomic_files
from replicax._base.quantities import size

_STAMP = "installed"  # a file that is made last


@dataclass(frozen=True)
class Environment:
    """A Python environment with some packages.

    Args:
        folder: its path, relative to replicax's folder in the user's cache.
        contents: the noun phrase for messages, such as "XLA's compiler for GPUs".
        packages: the packages that are installed with their dependencies.
        alone: the packages that are installed without them.
        space: bytes that the environment takes.
        module: a module that only a Python with these packages has.
        variable: the environment variable that names another Python with them.
        purpose: the sentence that is printed after the installation.
        limits: the sentence about systems that lack these packages.
        error: the class of the errors that the methods raise.
    """

    folder: str
    contents: str
    packages: tuple[str, ...]
    space: float
    module: str
    variable: str
    purpose: str
    limits: str
    error: type[Exception]
    alone: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        """The environment's folder, whether it exists or not."""
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        return Path(cache, "replicax", self.folder)

    @property
    def _python(self) -> Path:
        return self.path / "bin" / "python"

    @property
    def needed(self) -> str:
        """The packages, for messages."""
        return " and ".join([*self.packages, *(f"{name} (with --no-deps)" for name in self.alone)])

    def find_python(self) -> str | None:
        """Return the environment's Python, or None if it has not been installed."""
        return str(self._python) if (self.path / _STAMP).exists() and os.access(self._python, os.X_OK) else None

    def install(self) -> None:
        """Make the environment, or make it anew.

        Processes that install at the same time take turns: each would delete another one's files. The later ones use
        the environment of the first.

        Raises:
            Exception: of the class `error`: the disk has too little space, or Python makes no environment, or pip does
                not install the packages.
        """
        before = self.find_python()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self.path.parent).free
        except OSError as error:
            raise self.error(
                f"{self.path.parent} cannot be made: {error.strerror}. Set XDG_CACHE_HOME to a folder."
            ) from None
        if free < self.space and not before:
            raise self.error(
                f"{self.contents} takes {size(self.space)}, and the disk of {self.path.parent} has {size(free)} left. "
                "Make room there, or set XDG_CACHE_HOME to a folder on another disk."
            )
        print(
            f"Installing {self.contents} in {self.path}: {size(self.space)}, in about a minute, or longer if another "
            "process is installing there.",
            flush=True,
        )
        with atomic_files.changing(str(self.path.parent)):
            if before or not self.find_python():
                self._install()
        print(self.purpose, flush=True)

    def _install(self) -> None:
        (self.path / _STAMP).unlink(missing_ok=True)
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        quiet = [] if sys.stderr and sys.stderr.isatty() else ["--quiet"]  # on a terminal pip shows its progress
        pip = [str(self._python), "-m", "pip", "--disable-pip-version-check", "install", *quiet]
        commands = [[sys.executable, "-m", "venv", "--clear", str(self.path)], [*pip, *self.packages]]
        if self.alone:
            commands.append([*pip, "--no-deps", *self.alone])
        for command in commands:
            print(f"  {' '.join(command[1:])}", flush=True)
            ended = subprocess.run(command, env=variables, stdin=subprocess.DEVNULL, check=False)
            if ended.returncode:
                raise self.error(
                    f"{self.contents} has not been installed: `{' '.join(command)}` ended with status "
                    f"{ended.returncode}. {self.limits} You can also install {self.needed} in an environment of your "
                    f"own, and set {self.variable} to its Python."
                )
        (self.path / _STAMP).touch()

    def choose(self, pythons: Sequence[str], source: str) -> str:
        """Return the first of these Pythons that has the packages; the first of all if none has.

        Args:
            pythons: paths; at least one.
            source: the variable or option that names them, for messages.

        Raises:
            Exception: of the class `error`: a path is not an executable file.
        """
        for python in pythons:
            if not (os.path.isfile(python) and os.access(python, os.X_OK)):
                raise self.error(
                    f"{source} names {python!r}, which is not an executable file. Give the path of a Python that has "
                    f"{self.needed}."
                )
        if len(pythons) == 1:
            return pythons[0]
        return next((python for python in pythons if has_module(python, self.module)), pythons[0])


@functools.cache
def has_module(python: str, module: str) -> bool:
    """Return whether a Python can import a module."""
    code = f"import importlib.util as u, sys; sys.exit(u.find_spec({module!r}) is None)"
    return subprocess.run([python, "-c", code], stdin=subprocess.DEVNULL, check=False).returncode == 0
