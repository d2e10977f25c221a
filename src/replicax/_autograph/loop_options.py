"""Options of loops, which a call in the loop gives: `tf.autograph.experimental.set_loop_options`."""

from __future__ import annotations

from typing import Any

try:
    # AutoGraph finds the calls of this very function in a loop and takes them out of the code.
    from malt.lang.directives import set_loop_options
except ImportError:

    def set_loop_options(
        parallel_iterations: Any = None,
        swap_memory: Any = None,
        maximum_iterations: Any = None,
        shape_invariants: Any = None,
    ) -> None:
        """Does nothing: without AutoGraph, no loop is part of a program."""
