"""Settings, of replicax and of JAX, that compiled programs depend on."""

from __future__ import annotations

from typing import Any

import jax

_optimizes = True


def optimize_programs(optimize: bool) -> None:
    """Sets whether compiled programs are rewritten to run faster, which they are by default.

    Switched off, programs are what was traced: each tensor of an `all_reduce` is an all-reduce by itself, variables are
    arrays of their own in every call, equations alike stay many, and batches whose parts differ in shape run eagerly.
    Results are the same but for the rounding of the last digits. Where a number differs by more, the fault is in
    replicax and not in your program: please report it.

    It may be called at any time. Functions that were compiled before are compiled anew with their next call; variables
    that share a vector already stay in it. What was asked for, such as `bytes_per_pack`, holds in any case.

    >>> import replicax as rx
    >>> rx.config.optimize_programs(False)
    >>> rx.config.optimizes_programs()
    False
    >>> rx.config.optimize_programs(True)
    """
    global _optimizes
    _optimizes = bool(optimize)


def optimizes_programs() -> bool:
    """Returns whether compiled programs are rewritten to run faster (see `optimize_programs`).

    >>> import replicax as rx
    >>> rx.config.optimizes_programs()
    True
    """
    return _optimizes


def has_64_bit_types() -> bool:
    """Return whether arrays may have 64-bit dtypes where these are asked for."""
    config: Any = jax.config  # its options are not declared
    allowed = config.jax_explicit_x64_dtypes
    return bool(config.jax_enable_x64) or str(getattr(allowed, "name", allowed)).lower() == "allow"


def looks_for_nans() -> bool:
    """Return whether `jax_debug_nans` is on."""
    config: Any = jax.config
    return bool(config.jax_debug_nans)
