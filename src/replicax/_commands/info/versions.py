"""Versions of what replicax runs on, and the libraries of its extras."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import replicax
from replicax._base import doc_pages, quantities
from replicax._commands.info.section import Section

# Shown where they are installed. JAX's plugins are named after the version of CUDA or ROCm.
_ACCELERATORS = re.compile(r"jax-(cuda\d+|rocm\d+)-(plugin|pjrt)|libtpu")
_FOR_DEVELOPERS = {"test", "test-tf", "examples", "docs", "all"}
_MOST_SHOWN = 8
_DRIVER = Path("/proc/driver/nvidia/version")
_REQUIREMENT = re.compile(r"([\w.-]+)(?:\[([\w,\s-]+)\])?\s*([^;]*?)\s*(?:;(.*))?")


def installed(library: str) -> str | None:
    """Returns the version of an installed library, or None.

    >>> installed("no-such-library") is None
    True
    """
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(library)
    return None


def satisfies(version: str, wanted: str) -> bool:
    """Returns whether a version is what a requirement such as ">=0.12.8" or "==2.4.*" asks for.

    >>> satisfies("0.12.10", ">=0.12.8"), satisfies("0.9", ">=0.12.8"), satisfies("2.4.1", "==2.4.*")
    (True, False, True)
    """

    def numbers(text: str) -> list[int]:
        found = [int(part) for part in re.match(r"\d+(\.\d+)*", text.strip())[0].split(".")]  # type: ignore[index]
        return found + [0] * (8 - len(found))

    for clause in filter(None, map(str.strip, wanted.split(","))):
        match = re.fullmatch(r"(>=|==|<|!=)\s*(\d[\w.]*?)(\.\*)?", clause)
        if match is None:  # another form: only pip can tell
            continue
        size = len(match[2].split(".")) if match[3] else 8
        have, limit = numbers(version)[:size], numbers(match[2])[:size]
        if not {">=": have >= limit, "==": have == limit, "<": have < limit, "!=": have != limit}[match[1]]:
            return False
    return True


def versions() -> Section:
    """Returns the versions of Python, JAX, the libraries that belong to it, and the system."""
    section = Section("Versions")
    own = Path(replicax.__file__).parent

    def add(label: str, version: str, more: str = "") -> None:
        section.data[label] = version
        section.rows.append((label, f"{version}  {more}".rstrip()))

    add("replicax", replicax.__version__, str(own))
    add("Python", platform.python_version(), sys.executable)
    for library in ("jax", "jaxlib", "numpy"):
        add(library, installed(library) or "not installed")
    names = {str(each.metadata["Name"]) for each in importlib.metadata.distributions() if each.metadata["Name"]}
    for library in sorted(name for name in names if _ACCELERATORS.fullmatch(name.lower())):
        add(library, installed(library) or "")
    with contextlib.suppress(OSError, IndexError):
        add("NVIDIA driver", _DRIVER.read_text(encoding="utf-8").splitlines()[0].partition(":")[2].strip())
    add("system", platform.platform())
    add("processor", f"{os.cpu_count()} cores, {platform.machine()}", _memory())
    for requirement in _requirements(""):
        section.problems += _faults(requirement, "replicax")
    return section


def _memory() -> str:
    with contextlib.suppress(ValueError, OSError, AttributeError):
        return f"{quantities.size(os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES'))} of memory"
    return ""


def _requirements(extra: str) -> list[tuple[str, str, str]]:
    """Returns the libraries of an extra (empty for those that replicax always needs): name, extras, version."""
    found = []
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for text in importlib.metadata.requires("replicax") or ():
            match = _REQUIREMENT.fullmatch(text.strip())
            wanted = re.search(r"extra\s*==\s*['\"]([\w-]+)['\"]", (match and match[4]) or "")
            if match and (wanted[1] if wanted else "") == extra:
                found.append((match[1], match[2] or "", match[3]))
    return found


def _faults(requirement: tuple[str, str, str], needed_by: str) -> list[str]:
    library, _, wanted = requirement
    version = installed(library)
    fix = f"pip install '{library}{wanted}'"
    if version is None:
        return [f"{library} is not installed, and {needed_by} needs it: {fix}"]
    if not satisfies(version, wanted):
        return [f"{library} {version} is not what {needed_by} needs ({wanted}): {fix}"]
    return []


def extras() -> Section:
    """Returns replicax's extras: the libraries that are there, and the command that installs what is missing."""
    section = Section("Extras")
    names: Sequence[str] = ()
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        names = importlib.metadata.metadata("replicax").get_all("Provides-Extra") or ()
    for name in (each for each in names if each not in _FOR_DEVELOPERS):
        own = [each for each in _requirements(name) if each[0] != "replicax"]
        there = {library: found for library, _, _ in own if (found := installed(library))}
        missing = [library for library, _, _ in own if library not in there]
        install = doc_pages.install(name).partition(" (")[0]
        for requirement in own:
            if requirement[0] in there:
                section.problems += _faults(requirement, f"the extra {name!r}")
        if own:
            section.data[name] = {"installed": there, "missing": missing, "install": install}
            shown = ", ".join(f"{library} {version}" for library, version in there.items())
            if len(there) > _MOST_SHOWN:  # an extra that is made of others
                shown = f"{len(there)} of {len(own)} libraries, which are those of other extras"
            lacking = f"missing: {', '.join(missing)}" if missing else ""
            section.rows.append((name, "; ".join(filter(None, [shown, lacking]))))
            if missing:
                section.rows.append(("", f"$ {install}"))
    return section
