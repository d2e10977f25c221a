"""The settings in the environment, and the folder of compiled programs."""

from __future__ import annotations

import contextlib
import os
import warnings
from pathlib import Path

import replicax
from replicax._base import environment_variables, quantities
from replicax._base.commands import front_ends
from replicax._base.environment_variables import VARIABLES
from replicax._base.errors import JobError
from replicax._commands.info.section import Section
from replicax._transport import secret

# Variables of others that change how replicax's programs run.
_OTHERS = ("CUDA_VISIBLE_DEVICES", "JAX_COMPILATION_CACHE_DIR", "JAX_NUM_CPU_DEVICES", "JAX_PLATFORMS", "NPROC",
           "XLA_FLAGS", "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE")  # fmt: skip


def settings() -> Section:
    """Returns the environment variables that are set and what is wrong with them. Secrets are not shown."""
    section = Section("Settings")
    known_variables = (*VARIABLES, *(variable for added in front_ends() for variable in added.variables))
    variables: dict[str, str] = {}
    for name in sorted(os.environ):
        if name.startswith(environment_variables.PREFIX):
            known = environment_variables.find(name, known_variables)
            # The value of an unknown variable may be a secret under a misspelled name.
            variables[name] = known.shown(os.environ[name]) if known else "(unknown, not shown)"
        elif name in _OTHERS:
            variables[name] = os.environ[name]
    section.data["variables"] = variables
    section.rows += variables.items()
    section.problems += environment_variables.problems(os.environ, known_variables)
    for name, error in replicax._unusable.items():  # what importing replicax has found, unless it is told already
        if not any(problem.startswith(name) for problem in section.problems):
            section.problems.append(f"{name}: {error}")
    if secret.is_given():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                secret.job_secret(())
            except JobError as error:
                section.problems.append(str(error))
    _add_cache(section)
    return section


def _add_cache(section: Section) -> None:
    """Adds where compiled programs are kept, and how much there is."""
    chosen = os.environ.get("REPLICAX_COMPILATION_CACHE") or "off"
    folder: Path | None = None
    if chosen == "off":
        other = os.environ.get("JAX_COMPILATION_CACHE_DIR")
        folder = Path(other) if other else None
    elif "://" not in chosen and chosen != "default":
        folder = Path(chosen)
    try:
        from replicax._base import compilation_cache  # it imports JAX

        default: Path | None = compilation_cache.default_folder().parent
    except (ImportError, RuntimeError):  # RuntimeError: there is no home directory
        default = None
    folder = default if chosen == "default" else folder
    if folder is None:
        text = chosen if chosen != "off" else "off"
        if chosen == "off" and default is not None and default.is_dir():
            text += f"; run-tf keeps {_content(default)} in {default}"
        section.data["compilation cache"] = {"folder": None if chosen == "off" else chosen}
    else:
        count, size = _size(folder)
        section.data["compilation cache"] = {"folder": str(folder), "files": count, "bytes": size}
        text = f"{folder}, {_content(folder)}"
    section.rows.append(("compilation cache", text))


def _content(folder: Path) -> str:
    count, size = _size(folder)
    return f"{quantities.size(size)} in {count} file{'s' * (count != 1)}"


def _size(folder: Path) -> tuple[int, int]:
    """Returns how many files a folder has, and their bytes."""
    sizes = []
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # another process removes it meanwhile
                sizes.append(os.stat(os.path.join(place, name)).st_size)
    return len(sizes), sum(sizes)
