"""The ambient state of a thread: one record, of which each slot says what it holds.

Nothing else in replicax keeps state for a thread or a context. There are two sorts of slots:

- A slot of the *thread* holds in one thread alone, as JAX's current trace does.
- A slot of the *context* is a context variable (`contextvars`). Tasks of asyncio take it over, and so do threads that
  run in a copied context, such as those of `asyncio.to_thread`.

A thread that replicax starts takes over what it needs in one call, see `inherit`. It never takes over the stacks of
frames, contexts, tapes and readers, which describe the calls that run in their own thread, nor memory that one thread
uses at a time.

A slot is named where its owner reads it; the types of slots whose classes are in packages above this one are in words.
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
    """The slots. Each thread sees its own values; those that it has not set are the defaults."""

    def __init__(self) -> None:
        # Stacks, the innermost last.
        self.frames: list[Any] = []  # `Frame`s in which variables are read and written; below them is the global one
        self.contexts: list[tuple[Any, Any]] = []  # strategies that are current, each with its `ReplicaContext` or None
        self.trace_caches: list[Any] = []  # scopes of JAX's caches, see `_tracing.trace_caches`
        self.readers: list[Any] = []  # functions that give what is being traced the elements of datasets
        self.tapes: list[Any] = []  # gradient tapes that are entered
        self.undefined: list[Any] = []  # `Undefined` variables that a loop being traced is to define

    # Strategies, tracing and compiling.
    default_context: tuple[Any, Any] | None = None  # the strategy of `experimental_set_strategy`, and None
    tapes_outside: Sequence[Any] = ()  # tapes around the eager replica that runs here
    supplied: Mapping[int, Any] = {}  # arrays for the inputs, by their slots, of a jaxpr that is replayed
    autograph = False  # whether functions that are called are converted by AutoGraph
    negated: tuple[Any, object] = (None, None)  # the last tensor that `not` returned in converted code, and its operand
    callbacks = 0  # how many functions that compiled programs call back are running, one inside of the other
    driven: Any = None  # the `PythonCode` that the host drives: `strategy.run` compiles by itself in it
    replica_function: Any = None  # the function that such a `strategy.run` compiles
    no_creation = False  # whether a new variable is an error
    compiling: Any = None  # the `Compiling` of the program that is being compiled
    assumes_cudnn = False  # whether programs are traced for GPUs with cuDNN that are not there
    worker_trace: Any = None  # the `Tracing` of a function for the workers of a cluster with parameter servers

    # Variables that are made or restored.
    names: tuple[str, ...] = ()  # the name scopes
    creators: tuple[tuple[Any, Any], ...] = ()  # creators of variables, each after the strategy that was current then
    beside: Any = None  # a nest of the variables whose optimizer's state is made
    rule_name: str | None = None  # what partition rules call new variables, in place of their names
    restores = False  # whether this thread gives restored values to objects

    # Datasets.
    advancing: tuple[Any, ...] = ()  # locks of the iterators for which this thread makes an element
    worker: int | None = None  # the worker of a cluster with parameter servers whose iterators they are
    reads_ahead = False  # whether this thread only makes elements ahead of their use
    handed: tuple[Sequence[Any], Sequence[np.ndarray]] = (), ()  # tensors that a function was given last, as arrays too

    # Other libraries.
    keras_strategy: Any = None  # the strategy of the model whose loop runs
    keras_eagerly = False  # whether the steps of that loop run eagerly
    keras_own_state: Any = None  # the aggregation of a new variable of Keras that each replica has for itself
    keras_saves_by_all = False  # whether a callback of Keras saves, in all workers
    nnx_constructors = 0  # how many constructors of NNX objects are running, one inside of the other

    # Front ends.
    on_host = False  # whether operations compute with NumPy
    draws: Any = None  # the random numbers of the element of a dataset for which a function runs
    scratch: np.ndarray | None = None  # memory that a call uses and gives back

    # The context.
    undo_logs = _OfContext[tuple[Any, ...]](())  # `UndoLog`s of the variables that are written
    running = _OfContext[Any](None)  # the `Running` Python code of a compiled function, traced or as it is
    rehearses = _OfContext(False)  # whether functions run eagerly, for the variables that they make
    for_one_device = _OfContext(False)  # whether functions are traced for a model that one device runs
    assigns_alike = _OfContext(False)  # whether all replicas assign the same to variables without an aggregation
    is_detached = _OfContext(False)  # whether Orbax writes apart from the job; its own event loop asks


current = ThreadState()


class entered:
    """A context in which slots of this thread have these values: `entered(autograph=True)`."""

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


# What a thread that makes elements takes over, and a thread that takes part in a call besides.
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
    """What threads that this one starts take over of its state; `inherit().run(function)` is called in each.

    A thread that takes part in a call, and ends before it, takes over the context, JAX's settings, the scopes of names
    and the creators of variables. A thread that `outlives` the call only makes elements of datasets: it takes over for
    which iterators.
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
