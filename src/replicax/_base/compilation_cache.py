"""Compiled programs, kept in a folder from one start of a program to the next: JAX's persistent compilation cache."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import warnings
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

VARIABLE = "REPLICAX_COMPILATION_CACHE"
DEFAULT, OFF = "default", "off"  # values of it that are no paths
LIMIT = 1 << 30  # bytes in the default folder

_log = logging.getLogger(__name__)


def set_compilation_cache(path: str | os.PathLike[str] | None) -> None:
    """Keeps all that is compiled from now on in a folder, for this program's next start and for other programs.

    JAX's persistent cache in one call, for small programs too, which JAX leaves out by itself. It may be called at any
    time; what this process has compiled before stays as it is. `REPLICAX_COMPILATION_CACHE` in the environment does the
    same from the start: `default` stands for a folder in the user's cache directory, which `replicax run-tf` uses, and
    `off` for none; see `replicax docs how-to/launch#compiled-programs`. Nothing is removed from a folder that is given;
    `jax_compilation_cache_max_size` sets a limit.

    Args:
        path: the folder, made where it is not there; a path of an object store, such as `gs://bucket/folder`, is left
            to JAX. None keeps nothing any more.

    Raises:
        TypeError: `path` is no path.
        ValueError: it is empty.
        NotADirectoryError: there is a file of that name, or on the way to it.
        OSError: the folder cannot be made.

    >>> import tempfile
    >>> before = jax.config.jax_compilation_cache_dir
    >>> set_compilation_cache(tempfile.mkdtemp())
    >>> set_compilation_cache(before)
    """
    if path is not None:
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"The compilation cache is given by the path of a folder, or None; got {path!r}.")
        path = os.fspath(path)
        if not path:
            raise ValueError("The path of the compilation cache is empty. None keeps nothing any more.")
        if "://" not in path:
            path = os.path.abspath(path)  # the program may change its folder
            try:
                os.makedirs(path, exist_ok=True)
            except (FileExistsError, NotADirectoryError) as error:
                raise NotADirectoryError(
                    f"The compilation cache needs a folder, and {path} is a file or lies in one. Name another path."
                ) from error
            except OSError as error:
                reason = error.strerror or str(error)
                raise OSError(
                    f"The folder {path} for compiled programs cannot be made: {reason}. Name another."
                ) from error
    jax.config.update("jax_compilation_cache_dir", path)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    compilation_cache.reset_cache()  # JAX looks once, at the first compilation


def configure_from_environment() -> None:
    """Applies `REPLICAX_COMPILATION_CACHE`, if it is set."""
    chosen = os.environ.get(VARIABLE)
    if chosen == DEFAULT:
        _use_default_folder()
    elif chosen and chosen != OFF:
        set_compilation_cache(chosen)


def default_folder() -> Path:
    """Returns the folder in the user's cache directory for programs of this JAX on a machine of this kind."""
    root = os.environ.get("XDG_CACHE_HOME") or ""
    base = Path(root) if os.path.isabs(root) else Path.home() / ".cache"
    # A program for the CPU has the instructions of the CPU that it was compiled for.
    kind = hashlib.sha256("\n".join([platform.machine(), platform.processor(), *_cpu_features()]).encode()).hexdigest()
    return base / "replicax" / "programs" / f"jax-{jax.__version__}-{kind[:16]}"


def _cpu_features() -> list[str]:
    """Returns what Linux tells of the instructions of the CPU; elsewhere its name has to do."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return sorted({line for line in lines if line.partition(":")[0].strip() in ("flags", "Features", "model name")})


def _use_default_folder() -> None:
    """Keeps programs in the default folder, where that is possible and safe: a program never fails for it."""
    try:
        folder = default_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Whoever can write there could have this process run anything.
        status = folder.stat()
        if os.name == "posix" and (status.st_uid != os.geteuid() or status.st_mode & 0o022):
            raise PermissionError(f"{folder} can be written by other users")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(f"{folder} cannot be written")
        _make_room(folder.parent)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
        _log.info("Compiled programs are not kept: %s", error)
        return
    for trouble in ("reading", "writing"):  # of a full disk, or of a file that another process is just writing
        warnings.filterwarnings("ignore", f"Error {trouble} persistent compilation cache entry")
    set_compilation_cache(folder)


def _make_room(folder: Path) -> None:
    """Removes the programs that were not used for longest, if those in a folder take more than `LIMIT` bytes."""
    found = []
    for path in folder.glob("*/*"):
        with contextlib.suppress(FileNotFoundError):  # another process makes room as well
            status = path.stat()
            found.append((max(status.st_atime, status.st_mtime), status.st_size, path))
    excess = sum(size for _, size, _ in found) - LIMIT
    if excess > 0:
        excess += LIMIT // 4  # so that this is seldom needed
        for _, size, path in sorted(found):
            path.unlink(missing_ok=True)
            excess -= size
            if excess <= 0:
                break
