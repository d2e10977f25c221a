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
        pass  # without AutoGraph, no loop is part of a program


# The text of malt names functions that are not here.
set_loop_options.__doc__ = """Set options of the loop around the call, for loops that AutoGraph converts.

Args:
    parallel_iterations: accepted for compatibility.
    swap_memory: accepted for compatibility.
    maximum_iterations: the most rounds of the loop.
    shape_invariants: accepted for compatibility.

>>> import replicax.tf as tf
>>> @tf.function
... def count():
...     n = 0
...     for i in tf.range(10):
...         tf.autograph.experimental.set_loop_options(maximum_iterations=3)
...         n += 1
...     return n
>>> int(count())
3
"""
