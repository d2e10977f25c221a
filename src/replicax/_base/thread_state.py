"""The ambient state of a thread, in one record with documented slots, and the settings that programs depend on.

No other module of replicax keeps state for a thread or a context. The record has two sorts of slots:

- A slot of the *thread* holds in one thread alone, like JAX's current trace.
- A slot of the *context* is a context variable (`contextvars`). It passes to asyncio's tasks and to threads that run in
  a copied context, for example by `asyncio.to_thread`.

A thread that replicax starts takes over its part of the state in one call, see `inherit`. The stacks of frames,
contexts, tapes and readers stay behind, because they describe calls of one thread, and so does its scratch memory.

The classes of most values are in packages above this one, so comments name the types.

A thread can also have JAX's settings for itself. Those that compiled programs depend on are read here, beside
replicax's own, `optimize_programs`, which holds for all threads.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, ParamSpec, TypeVar, overload

import jax
import numpy as np

_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T")


class _OfContext(Generic[_T]):
    """A slot of the context. As an attribute of the class it is the context variable, which is faster to read."""

    def __init__(self, default: _T):
        self._default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self._variable: contextvars.ContextVar[_T] = contextvars.ContextVar(name, default=self._default)

    @overload
    def __get__(self, state: None, owner: type) -> contextvars.ContextVar[_T]: ...
    @overload
    def __get__(self, state: ThreadState, owner: type) -> _T: ...
    def __get__(self, state: ThreadState | None, owner: type) -> contextvars.ContextVar[_T] | _T:
        return self._variable if state is None else self._variable.get()

    def __set__(self, state: ThreadState, value: _T) -> None:
        self._variable.set(value)


class ThreadState(threading.local):
    """The slots. Each thread sees its own values, which are the defaults at first."""

    def __init__(self) -> None:
        # Stacks, the innermost last.
        self.frames: list[Any] = []  # `Frame`s that read and write variables; the global one is below them
        self.contexts: list[tuple[Any, Any]] = []  # strategies that are current, each with its `ReplicaContext` or None
        self.trace_caches: list[Any] = []  # `TraceCaches`, the scopes of JAX's caches
        self.readers: list[Any] = []  # functions that give a trace the elements of datasets
        self.tapes: list[Any] = []  # gradient tapes that are entered
        self.undefined: list[Any] = []  # `Undefined` variables that a traced loop will define

    # Strategies, tracing and compiling.
    default_context: tuple[Any, Any] | None = None  # the strategy of `experimental_set_strategy`, and None
    tapes_outside: Sequence[Any] = ()  # tapes around the eager replica that runs here
    supplied: Mapping[int, Any] = {}  # arrays for the inputs, by their slots, of a jaxpr that is replayed
    autograph = False  # whether functions that are called are converted by AutoGraph
    negated: tuple[Any, object] = (None, None)  # the last tensor that `not` returned in converted code, and its operand
    callbacks = 0  # how many functions that compiled programs call back are running, one inside of the other
    driven: Any = None  # the `PythonCode` that the host drives: `strategy.run` compiles by itself in it
    replica_function: Any = None  # the function that a `strategy.run` in it compiles
    no_creation = False  # whether a new variable is an error
    compiling: Any = None  # the `Compiling` of the program that is being compiled
    assumes_cudnn = False  # whether programs are traced for GPUs with cuDNN that are not there
    worker_trace: Any = None  # the `Tracing` of a function for the workers of a cluster with parameter servers

    # Variables that are made or restored.
    names: tuple[str, ...] = ()  # the name scopes
    creators: tuple[tuple[Any, Any], ...] = ()  # creators of variables, each after the strategy that was current then
    beside: Any = None  # a nest of variables, while the state of their optimizer is made
    rule_name: str | None = None  # the name of new variables for partition rules
    restores = False  # whether this thread gives restored values to objects

    # Datasets.
    advancing: tuple[Any, ...] = ()  # locks of the iterators that this thread advances
    worker: int | None = None  # their worker, in a cluster with parameter servers
    reads_ahead = False  # whether this thread only makes elements ahead of their use
    handed: tuple[Sequence[Any], Sequence[np.ndarray]] = (), ()  # tensors that a function was given last, as arrays too

    # Other libraries.
    keras_strategy: Any = None  # the strategy of the model, while its loop runs
    keras_eagerly = False  # whether the steps of that loop run eagerly
    keras_own_state: Any = None  # the aggregation of a new variable of Keras that each replica has for itself
    keras_saves_by_all = False  # whether a callback of Keras saves, in all workers
    nnx_constructors = 0  # how many constructors of NNX objects are running, one inside of the other

    # Front ends.
    on_host = False  # whether operations compute with NumPy
    draws: Any = None  # the random numbers of a dataset's element, while a function computes it
    scratch: np.ndarray | None = None  # memory that a call uses and gives back

    # The context.
    undo_logs = _OfContext[tuple[Any, ...]](())  # `UndoLog`s of the variables that are written
    running = _OfContext[Any](None)  # the `Running` Python code of a compiled function, traced or eager
    rehearses = _OfContext(False)  # whether functions run eagerly, for the variables that they make
    for_one_device = _OfContext(False)  # whether functions are traced for a model that one device runs
    assigns_alike = _OfContext(False)  # whether all replicas assign the same to variables without an aggregation
    is_detached = _OfContext(False)  # whether Orbax writes apart from the job; its own event loop asks


current = ThreadState()


class entered:
    """A context that sets slots of this thread: `entered(autograph=True)`."""

    def __init__(self, **values: Any):
        self._values = values  # inside of the context, the values before

    def __enter__(self) -> None:
        values = self._values
        for name, value in values.items():
            values[name] = getattr(current, name)
            setattr(current, name, value)

    def __exit__(self, *error: object) -> None:
        for name, value in self._values.items():
            setattr(current, name, value)


# The slots for a thread that makes elements, and for a thread that takes part in a call.
_OF_INPUT = "advancing", "worker"
_OF_CALL = *_OF_INPUT, "names", "creators"

# JAX's settings that a thread can have for itself (`with jax.enable_x64(True)`).
_SETTINGS = {
    f"jax_{name}": getattr(jax, name)
    for name in (
        "enable_x64", "numpy_dtype_promotion", "numpy_rank_promotion", "default_matmul_precision", "default_prng_impl",
        "debug_nans", "debug_infs", "disable_jit",
    )
}  # fmt: skip


class inherit:
    """The state that new threads take over from this one; each of them calls `inherit().run(function)`.

    A thread that takes part in a call, and ends before it, takes over the context, JAX's settings, the name scopes, the
    creators of variables, and the iterators that this thread advances. A thread that `outlives` the call makes elements
    of datasets, and takes over those iterators alone.
    """

    def __init__(self, outlives: bool = False):
        self._slots = {name: getattr(current, name) for name in (_OF_INPUT if outlives else _OF_CALL)}
        self._context = None if outlives else contextvars.copy_context()
        self._settings = {} if outlives else {name: getattr(jax.config, name) for name in _SETTINGS}

    def run(self, function: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Return `function(*args, **kwargs)`, called in this thread with the state that it inherits."""
        with entered(**self._slots):
            if self._context is None:
                return function(*args, **kwargs)
            with contextlib.ExitStack() as settings:
                for name, value in self._settings.items():
                    if getattr(jax.config, name) != value:
                        settings.enter_context(_SETTINGS[name](value))
                return self._context.copy().run(function, *args, **kwargs)


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
