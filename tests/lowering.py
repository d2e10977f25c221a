"""Contexts of MLIR that are used again: the oldest JAX makes one for each program, which takes 10 ms."""

from __future__ import annotations

import threading
from typing import Any

_USES = 10  # of a context, which keeps all types and constants that it has seen


def reuse_contexts() -> None:
    """Have JAX use each context for several programs, as newer versions do by themselves."""
    from jax._src.interpreters import mlir

    if hasattr(mlir, "_create_ir_context"):  # newer ones
        return
    create, local = mlir.make_ir_context, threading.local()

    def make_ir_context() -> Any:
        context, uses = getattr(local, "last", (None, _USES))
        context, uses = (context, uses + 1) if uses < _USES else (create(), 1)
        local.last = context, uses
        return context

    mlir.make_ir_context = make_ir_context
