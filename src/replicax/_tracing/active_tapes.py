"""The gradient tapes of a thread, and what the other parts of replicax tell them.

Reads of variables are told with `on_read`. Where arrays are made in a way that no tape sees, `renamed` and `lost` say
how they depend on others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TypeGuard

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from replicax._base import thread_state
from replicax._base.jax_internals import current_trace
from replicax._base.thread_state import current
from replicax._base.types import Leaf
from replicax._tracing.tape_trace import Recorder, TapedVariable, below, identity, is_inexact, raising


def enter(recorder: Recorder) -> None:
    """Has this thread tell a tape of what it reads."""
    current.tapes.append(recorder)


def leave(recorder: Recorder) -> None:
    """Ends what `enter` began; a tape that was not entered is ignored."""
    if recorder in current.tapes:
        current.tapes.remove(recorder)


def is_variable(value: Leaf) -> TypeGuard[TapedVariable]:
    """Returns whether a value is a variable; by a mark of its class, because variables are above tapes."""
    return bool(getattr(type(value), "_replicax_variable", False))


def on_read(variable: TapedVariable, leaves: Sequence[jax.Array]) -> list[jax.Array]:
    """Tells the thread's tapes that `variable` was read as these arrays; returns the arrays to hand out.

    Under a tape that follows the variable they are copies (which cost nothing in compiled code). The arrays
    themselves may be in use as something else: by another variable, or as a value that was read, or is about to be
    assigned, for which no gradient is wanted.
    """
    leaves = list(leaves)
    for tape in current.tapes_outside:
        if tape.on and tape.follows(variable) and id(variable) not in tape.read_beside:
            stand_ins = [jnp.zeros((), leaf.dtype) for leaf in leaves]
            tape.mark(variable, stand_ins)
            tape.read_beside[id(variable)] = stand_ins
    tapes = followers(variable)
    if not tapes:
        return leaves
    copies = tapes[0].copies
    for i, leaf in enumerate(leaves):
        key = id(variable), i, id(leaf)
        if key not in copies:
            copies[key] = leaf, _copy_below(tapes, leaf)
        leaves[i] = copies[key][1]
    for tape in tapes:
        tape.mark(variable, leaves)
    return leaves


def _copy_below(tapes: list[Recorder], leaf: jax.Array) -> jax.Array:
    """Returns a copy that no tape records, as an array of the trace that the tapes stand on."""
    if isinstance(leaf, jax.core.Tracer):
        trace = below(current_trace())
        if all(below(tape.trace) is not trace for tape in tapes):
            return leaf  # Inside of a `lax.scan`, say. Copied there, it would mean nothing to the tapes.
    else:
        trace = below(tapes[0].trace)
    assert trace is not None
    with jex.set_current_trace(trace):
        return jnp.copy(leaf)


def entered() -> list[Recorder]:
    """Returns the thread's tapes whose contexts are entered, the outermost first."""
    return list(current.tapes)


def followers(variable: TapedVariable) -> list[Recorder]:
    """Returns the thread's tapes that record and follow `variable`, the outermost first."""
    return [tape for tape in current.tapes if tape.on and tape.follows(variable)]


@contextlib.contextmanager
def beside_replicas(tapes: Sequence[Recorder]) -> Iterator[None]:
    """Returns a context for one of several eager replicas: `tapes`, entered outside of it, learn of reads only."""
    with thread_state.entered(tapes=[], tapes_outside=tapes), jex.set_current_trace(below(current_trace())):
        yield


def renamed(array: jax.Array, alias: jax.Array) -> jax.Array:
    """Returns `alias`, which has the values of `array` and was made where no tape saw it."""
    for tape in current.tapes:
        if tape.on and id(array) in tape.tracked:
            tape.add([array], [alias], identity)
    return alias


def lost(why: str, inputs: Sequence[jax.Array], outputs: Sequence[jax.Array], variables: bool = False) -> None:
    """Makes `gradient` raise an error that says why, where `outputs` were made of `inputs` and no tape saw how.

    Otherwise the gradient would be None, as if they did not depend on them. `variables`: those that eager replicas
    read count among the inputs.
    """
    for tape in current.tapes:
        if tape.on:
            reads = [x for leaves in tape.read_beside.values() for x in leaves] if variables else []
            known = [x for x in (*inputs, *reads) if id(x) in tape.tracked]
            unknown = [x for x in outputs if is_inexact(x) and id(x) not in tape.tracked]
            if known and unknown:
                tape.add(known, unknown, raising(RuntimeError(why)))
