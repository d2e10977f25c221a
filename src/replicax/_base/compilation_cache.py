"""Compiled programs, kept in a folder from one start of a program to the next: JAX's persistent compilation cache."""

from __future__ import annotations

import os

import jax
from jax.experimental.compilation_cache import compilation_cache

VARIABLE = "REPLICAX_COMPILATION_CACHE"


def set_compilation_cache(path: str | os.PathLike[str] | None) -> None:
    """Keeps all that is compiled from now on in a folder, for this program's next start and for other programs.

    JAX's persistent cache in one call, for small programs too, which JAX leaves out by itself. It may be called at any
    time; what this process has compiled before stays as it is. `REPLICAX_COMPILATION_CACHE` in the environment does the
    same from the start. Nothing is ever removed; `jax_compilation_cache_max_size` sets a limit.

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
    jax.config.update("jax_compilation_cache_dir", path)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    compilation_cache.reset_cache()  # JAX looks once, at the first compilation


def configure_from_environment() -> None:
    """Applies `REPLICAX_COMPILATION_CACHE`, if it is set."""
    if path := os.environ.get(VARIABLE):
        set_compilation_cache(path)
