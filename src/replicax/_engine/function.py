"""`function`: a Python function compiled as a whole, with the variables that it reads and writes.

The first call with arguments of some signature traces the Python code once, to a jaxpr. Variables that it reads turn
into inputs on the way, those that it assigns into outputs (see `_tracing.frames`), and `next(iterator)` of a dataset
into an input that each call pulls. The rest is that of the compiled program (see `_engine.program`).

Where one program cannot be had, the Python code itself runs: eagerly, where the replicas' parts of a batch differ in
shape and the function cannot be compiled so (see `uneven_policy`); and driven from the host where the function loops
over a distributed dataset, with each `strategy.run` in it compiled.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import functools
import inspect
import operator
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from replicax._base import foreign_state, jax_internals, profiling, specs, tracebacks
from replicax._base.errors import OutOfRangeError
from replicax._data import calls
from replicax._engine import multi_step, step_hints, turns
from replicax._engine.compile_log import Compiled
from replicax._engine.concrete_function import ConcreteFunction
from replicax._engine.program import Program
from replicax._engine.signature import Call, difference, inputs_of, is_python_iterator
from replicax._engine.trace_function import Tracing
from replicax._engine.uneven_policy import UnevenCalls
from replicax._passes import nan_checks
from replicax._tracing import autograph_switch, frames
from replicax._tracing.dataset_reads import (
    Abort,
    DrivenFromHost,
    Pull,
    RunEagerly,
    given_back,
    pull_from,
    push_back,
    same_elements,
    same_sources,
)
from replicax._values import PerReplica


class _Modes(threading.local):
    def __init__(self):
        self.host_driven = False  # whether `strategy.run` compiles by itself
        self.driven: Any = None  # the `Function` whose Python code runs
        self.running: Any = None  # the function that `strategy.run` compiles
        self.host_converts = False  # and whether it converts the replica function
        self.no_creation = False  # whether a new variable is an error


_modes = _Modes()


class Running:
    """A function whose Python code is being traced, or runs as it is."""

    def __init__(self, function: Function):
        self.function = function
        self._numbers: collections.Counter[Any] = collections.Counter()

    def number(self, what: Any) -> int:
        """How often this was asked for the same thing before."""
        self._numbers[what] += 1
        return self._numbers[what] - 1


_running: contextvars.ContextVar[Running | None] = contextvars.ContextVar("running", default=None)


def running() -> Running | None:
    """The function whose Python code is being traced, or runs as it is; the innermost that does so by itself."""
    return _running.get()


_run_eagerly = False
_rehearses: contextvars.ContextVar[bool] = contextvars.ContextVar("rehearses", default=False)  # with its eager replicas


def run_functions_eagerly(run_eagerly: bool) -> None:
    """Makes every `function` run its Python code as it is, without compiling; for debugging."""
    global _run_eagerly
    _run_eagerly = bool(run_eagerly)


def functions_run_eagerly() -> bool:
    """Whether functions run their Python code here: all of them, or those of one that is rehearsed."""
    return _run_eagerly or _rehearses.get()


class _CreatesVariables(Abort):
    pass


def host_driven() -> bool:
    """Whether `strategy.run` is to compile by itself."""
    return _modes.host_driven


def note_creation() -> None:
    """Called before a variable is made."""
    if frames.is_tracing():
        if _modes.no_creation:
            raise ValueError(
                "tf.function only supports singleton tf.Variables created on the first call. Make sure the tf.Variable "
                "is only created once or created outside tf.function. See "
                "https://www.tensorflow.org/guide/function#creating_tfvariables for more information. An Optimizer "
                "makes one for its state: make it once, too."
            )
        if any(isinstance(frame, frames.TraceFrame) for frame in frames._frames.stack):
            raise _CreatesVariables


class Function:
    """What `function` makes of a Python function. Call it as the function itself."""

    def __init__(
        self,
        python_function: Callable[..., Any],
        input_signature: Sequence[Any] | None = None,
        autograph: bool = False,
        compiled_only: bool = False,
        steps_per_call: int = 1,
    ):
        self._python_function, self._autograph = python_function, autograph
        self._steps = steps_per_call
        self._compiled_only = compiled_only  # whether the host drives what calls it, and never this
        self._falls_back = autograph and not compiled_only  # whether the host may drive it where it cannot be compiled
        self._input_signature = None if input_signature is None else tuple(input_signature)
        self._entries: dict[Any, list[Program]] = {}
        self._host: dict[Any, list[Any]] = {}  # signatures that are driven from the host, and objects they know by id
        self._methods: dict[int, Function] = {}
        self._bound = weakref.WeakValueDictionary[int, _Method]()  # `instance.method is instance.method`
        self._runs: dict[Any, tuple[Function, list[Any]]] = {}  # what it has `strategy.run` compile
        self._uneven = UnevenCalls(python_function)
        self._traces = self._calls = 0
        self._retraced = 0  # the calls for which it was traced; a program may also be asked for without a call
        self._last_call: tuple[Any, Any] | None = None  # structure and keys of the call that was traced last
        self._last_inputs: list[str] = []  # and what its program takes
        self._warned = 0
        self.step_hint = step_hints.StepHint() if steps_per_call == 1 else None  # as long as it is not decided
        self.told_of_steps = False  # whether the hint was printed
        self.random_numbers: Any = None  # what `replicax.tf` counts its random numbers with
        functools.update_wrapper(self, python_function, updated=())
        for name, value in getattr(python_function, "__dict__", {}).items():
            if not name.startswith("_") and not hasattr(self, name):
                setattr(self, name, value)

    @property
    def _name(self) -> str:
        """The Python function's name, where programs and steps go by it."""
        return profiling.identifier(self._python_function)

    @property
    def python_function(self) -> Callable[..., Any]:
        """The Python function itself."""
        return self._python_function

    @property
    def steps_per_call(self) -> int:
        """How many times a call runs the function."""
        return self._steps

    @property
    def input_signature(self) -> tuple[Any, ...] | None:
        """The specs that it was declared with, None without any."""
        return self._input_signature

    def get_concrete_function(self, *args: Any, **kwargs: Any) -> ConcreteFunction:
        """This function, traced for arguments of one kind: arrays or specs are its arguments, other values are kept.

        Nothing is run, but variables that the function makes are made now. For those the function's Python code runs
        with ones and zeros for its arguments, and what it assigns is taken back.

        Raises:
            TypeError: the arguments do not fit the function or its input signature.

        >>> import jax.numpy as jnp, replicax as rx
        >>> rx.function(lambda x, n: x * n).get_concrete_function(rx.TensorSpec([]), 3)(jnp.float32(2)).item()
        6.0
        """
        if self._input_signature is not None:
            if args or kwargs:
                self._check_declared(args, kwargs)
            args, kwargs = self._input_signature, {}
        return ConcreteFunction(self, self._python_function, args, kwargs)

    def pretty_printed_concrete_signatures(self, verbose: bool = True) -> str:
        """The names, dtypes and shapes of the programs that there are, one a line."""
        return "\n".join(entry.label for entries in self._entries.values() for entry in entries)

    def experimental_get_tracing_count(self) -> int:
        """How many times the Python code was traced."""
        return self._traces

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        try:
            reference = weakref.ref(instance)
        except TypeError:
            raise TypeError(
                f"A method of {type(instance).__name__} is compiled for each instance, which has to take weak "
                "references: add '__weakref__' to its __slots__."
            ) from None
        key = id(instance)
        if key not in self._methods:
            # Programs are kept for each instance, without keeping the instance alive.
            target = self._python_function

            @functools.wraps(target)
            def for_instance(*args: Any, **kwargs: Any) -> Any:
                return autograph_switch.converted(target)(reference(), *args, **kwargs)

            parameters = list(inspect.signature(target).parameters.values())
            for_instance.__signature__ = inspect.Signature(parameters[1:])  # type: ignore[attr-defined]
            made = Function(for_instance, self._input_signature, self._autograph, steps_per_call=self._steps)
            self._methods.setdefault(key, made)  # another thread may have been first
            weakref.finalize(instance, self._methods.pop, key, None)
        method = self._bound.get(key)
        if method is None:
            method = self._bound[key] = _Method(self._methods[key], instance)
        return method

    @tracebacks.boundary
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._input_signature is not None:
            args, kwargs = self._bind(args, kwargs)
        taped = not jax_internals.is_eager(jax_internals.current_trace())  # what stands there may also be a `jax.jit`
        if _run_eagerly or _rehearses.get():
            with self._runs_now(inside=True):
                return self._repeated(lambda: self._call_python(args, kwargs, converts=False))
        if taped and frames.is_tracing():
            return self._repeated(lambda: self._call_python(args, kwargs))
        self._calls += 1
        call = Call(args, kwargs)
        call.counts = True
        if self._steps == 1 and self._is_host_driven(call):
            return self._run_python(args, kwargs, host=True)
        called = self._called if self._steps == 1 else self._called_several
        hint = self.step_hint
        if hint is not None:
            hint.calls += 1
            if hint.calls > step_hints.FIRST and not taped and profiling.active is None:
                owner = _modes.driven if _modes.host_driven else self
                return hint.run(self, owner, call, lambda: called(call, args, kwargs, taped))
        if profiling.active is not None:
            with profiling.step(self._name, self._calls - 1):
                return called(call, args, kwargs, taped)
        return called(call, args, kwargs, taped)

    def _is_host_driven(self, call: Call) -> bool:
        return (call.has_dataset and not self._compiled_only) or call.key in self._host

    def _called(self, call: Call, args: tuple, kwargs: dict, taped: bool) -> Any:
        if call.ragged:
            return self._run_python(args, kwargs, host=False)
        entries = self._entries.get(call.key)
        if entries and not entries[0].pulls:
            return entries[0].run(call, (), taped)
        return self._run(call, args, kwargs)

    def _call_python(self, args: tuple, kwargs: dict, converts: bool = True) -> Any:
        """Calls the Python function; with `converts`, converted for tensors if it was declared so, and else not.

        Raises:
            RuntimeError: it raised StopIteration, and no dataset has ended.
        """
        try:
            if converts:
                return autograph_switch.call(self._autograph, self._python_function, args, kwargs)
            return self._python_function(*args, **kwargs)
        except StopIteration as error:
            calls.refuse_stop(error, "The compiled function", self._python_function)
            raise

    def _repeated(self, step: Callable[[], Any], more: Callable[[], bool] = lambda: True) -> Any:
        return step() if self._steps == 1 else multi_step.one_by_one(self._steps, step, more)

    def _called_several(self, call: Call, args: tuple, kwargs: dict, taped: bool) -> Any:
        """As many steps as are one call: in one program where it can be, and one by one elsewhere."""
        several = None
        if not (taped or call.ragged or self._is_host_driven(call)):
            several = self._found_several(call, args, kwargs)
        if several is not None:
            return several.entry.run(call, several.elements, taped, several.steps)

        def step() -> Any:
            if self._is_host_driven(call):
                return self._run_python(args, kwargs, host=True)
            return self._called(call, args, kwargs, taped)

        return self._repeated(step, lambda: multi_step.has_more(self._entries.get(call.key), call.iterators))

    def _found_several(self, call: Call, args: tuple, kwargs: dict) -> multi_step.Found | None:
        """The program of so many steps and its elements; None where there is none for the elements that come."""
        if nan_checks.are_looked_for():
            return None
        entries, count = self._entries.setdefault(call.key, []), self._steps
        several = multi_step.found(entries, count, call.iterators) if entries else multi_step.NOT_TRACED
        if several is not multi_step.NOT_TRACED:
            return several
        for iterator in call.iterators:
            iterator._ask_for(count)
        known = len(entries)
        with self._turn():
            if len(entries) == known and self._ahead(call, lambda: self._new_program(call, args, kwargs)) is None:
                return None
        several = multi_step.found(entries, count, call.iterators)
        return None if several is multi_step.NOT_TRACED else several  # other elements come than were just pushed back

    def _run(self, call: Call, args: tuple, kwargs: dict) -> Any:
        """Runs the program of such calls, traced first where there is none; the Python code where none can be."""
        entry, host = None, True
        with contextlib.ExitStack() as turn:  # it ends with the tracing
            try:
                entry, pulled = self._pulled_or_traced(call, args, kwargs, turn)
            except _CreatesVariables:  # in this function's turn, so that other threads find the variables
                return self._first_call_with_variables(call, args, kwargs)
            except StopIteration:
                pass  # The data end in the middle of the function: run it as it is, so that what it did stays.
            except DrivenFromHost as abort:
                if abort.always:
                    self._host[call.key] = call.statics
            except RunEagerly:
                host = False
            except jax.errors.ConcretizationTypeError as error:
                self._fall_back(call, error)
        if entry is not None:
            return entry.run(call, pulled, not jax_internals.is_eager(jax_internals.current_trace()))
        if host:
            return self._run_python(args, kwargs, host=True)
        with self._uneven.explained(call):
            return self._run_python(args, kwargs, host=False)

    def _fall_back(self, call: Call, error: jax.errors.ConcretizationTypeError) -> None:
        """Has the host drive such calls, with a warning; raises the error again where that is not allowed."""
        if not self._falls_back:
            raise error
        tracebacks.warn_of(
            error,
            f"{self._name} needs the value of a tensor at {{line}}, which is not known while it is traced, so it "
            f"is driven from the host, with each `strategy.run` in it compiled: it is right, but slower than one "
            f"program. {autograph_switch.hint(error)} JAX says: {str(error).splitlines()[0]}",
        )
        self._host[call.key] = call.statics

    @contextlib.contextmanager
    def _runs_now(self, inside: bool = False) -> Iterator[None]:
        """A context in which it is `running()`; with `inside`, only if no other one is."""
        token = _running.set((_running.get() if inside else None) or Running(self))
        try:
            yield
        finally:
            _running.reset(token)

    def _pulled_or_traced(
        self, call: Call, args: tuple, kwargs: dict, turn: contextlib.ExitStack
    ) -> tuple[Program, list[Any]]:
        """The program of such calls and the elements for it; traced, in this function's turn, where there is none."""
        entries = self._entries.setdefault(call.key, [])
        known = len(entries)
        entry, pulled = self._pulled(entries, call)
        if entry is None:
            turn.enter_context(self._turn())
            if len(entries) > known:  # another thread has traced one meanwhile
                push_back(entries[0].pulls if known else [], pulled, call.iterators)
                entry, pulled = self._pulled(entries, call)
        if entry is None:
            queue = list(zip(entries[0].pulls, pulled)) if entries else []
            entry, pulled = self._new_program(call, args, kwargs, queue)
        return entry, pulled

    def _new_program(
        self,
        call: Call,
        args: tuple,
        kwargs: dict,
        queue: Sequence[tuple[Pull, Any]] = (),
        creation: bool = True,
    ) -> tuple[Program, list[Any]]:
        """`_trace`, whose program further calls find."""
        entry, elements = self._trace(call, args, kwargs, list(queue), creation)
        self._entries.setdefault(call.key, []).append(entry)
        return entry, elements

    def _ahead(self, call: Call, find: Callable[[], tuple[Program, list[Any]]]) -> Program | None:
        """The program that `find` gives, without running it: its elements are to come yet. None where there is none.

        Raises:
            jax.errors.ConcretizationTypeError: it needs the value of a tensor, and may not be driven from the host.
        """
        try:
            entry, elements = find()
        except (Abort, StopIteration):
            return None
        except jax.errors.ConcretizationTypeError:
            if not self._falls_back:
                raise
            return None
        push_back(entry.pulls, elements, call.iterators)
        return entry

    def _turn(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which no other thread traces this function. Eager replicas run one at a time as it is."""
        eager_replica = isinstance(frames.frame(), frames.ReplicaFrame)
        return contextlib.nullcontext() if eager_replica else turns.turn(self)

    def _run_python(self, args: tuple, kwargs: dict, host: bool) -> Any:
        before = _modes.host_driven, _modes.host_converts, _modes.driven
        _modes.host_driven, _modes.host_converts, _modes.driven = host, self._autograph, self
        try:
            with self._runs_now():
                return self._call_python(args, kwargs, converts=host)
        except StopIteration as error:  # of a `next(iterator)` in it
            raise calls.ending(OutOfRangeError("End of sequence")) from error
        finally:
            _modes.host_driven, _modes.host_converts, _modes.driven = before

    def _first_call_with_variables(self, call: Call, args: tuple, kwargs: dict) -> Any:
        """Runs eagerly, so that the variables come into being, and then traces, where none may any more."""
        result = self._run_python(args, kwargs, host=False)
        self._ahead(call, lambda: self._new_program(call, args, kwargs, creation=False))
        return result

    def _trace(
        self, call: Call, args: tuple, kwargs: dict, queue: list[tuple[Pull, Any]], creation: bool = True
    ) -> tuple[Program, list[Any]]:
        """The program for this call, and the elements that it pulled; those in `queue` were pulled before."""
        call.uneven = call.uneven_arguments
        if self._uneven.run_eagerly(call):
            raise RunEagerly
        self._traces += 1
        foreign_state.join()
        tracing = Tracing(call, queue, lambda: self._uneven.run_eagerly(call))
        before, _modes.no_creation = _modes.no_creation, _modes.no_creation or not creation
        began = time.monotonic()
        try:
            with self._runs_now():
                jaxpr = tracing.run(self._call_python, self._python_function)
        except BaseException as error:
            self._traces -= tracing.hardly_begun
            self._uneven.failed(call, error, pulled=bool(tracing.elements))
            raise
        finally:
            _modes.no_creation = before
        self._warn_of_what_stays(call, tracing.pulls)
        traced = time.monotonic() - began - tracing.waited
        inputs = inputs_of(call, tracing.elements)
        cause = self._cause(call, inputs)
        self._retraced += call.counts
        call.counts = False
        self._warn_of_retracing(cause)
        self._last_call, self._last_inputs = (call._tree, call.keys), inputs
        entry = Program(self._name, tracing.level, jaxpr, call, tracing.pulls, tracing.results)
        entry.told_of = Compiled(traced, inputs, cause)
        self._uneven.traced(call)
        tracing.close()
        return entry, tracing.elements

    def traced(self, args: tuple, kwargs: dict) -> Program | None:
        """The program for these arguments, traced and its variables made if there is none; None where none can be."""
        call = Call(args, kwargs)
        if call.ragged or self._is_host_driven(call):
            return None

        def find() -> tuple[Program, list[Any]]:
            with contextlib.ExitStack() as turn:
                try:
                    return self._pulled_or_traced(call, args, kwargs, turn)
                except _CreatesVariables:
                    self._rehearse(args, kwargs)
                    return self._new_program(call, args, kwargs, creation=False)

        return self._ahead(call, find)

    def _rehearse(self, args: tuple, kwargs: dict) -> None:
        """Runs the Python code for the variables that it makes, and takes back what it assigns."""
        numbers = self.random_numbers
        token = _rehearses.set(True)  # a compiled function in it would take over the arrays that are to come back
        try:
            with frames.noted() as notes, given_back():
                try:
                    self._run_python(args, kwargs, host=False)
                finally:
                    notes.take_back()
        finally:
            _rehearses.reset(token)
            self.random_numbers = numbers

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """The program for these arguments as `jax.jit(...).lower` gives it, to look at; nothing is run.

        >>> import jax.numpy as jnp, replicax as rx
        >>> rx.function(lambda x: x + 1).lower(jnp.ones(2)).compile().as_text().startswith("HloModule")
        True
        """
        entry, call = self._program(args, kwargs)
        return entry.lower(call)

    def _program(self, args: tuple, kwargs: dict) -> tuple[Program, Call]:
        """The program for these arguments and the next elements of iterators, which stay there, and the call of it."""
        if self._input_signature is not None:
            args, kwargs = self._bind(args, kwargs)
        call = Call(args, kwargs)
        try:
            if call.ragged:
                raise RunEagerly
            with contextlib.ExitStack() as turn:
                entry, elements = self._pulled_or_traced(call, args, kwargs, turn)
        except StopIteration:  # at the end of the data, what there was
            entry, elements = self._entries[call.key][0], []
        except Abort as abort:
            raise RuntimeError(
                f"{self._python_function!r} has no program of its own for these arguments: it makes variables on "
                "its first call (call it once before), loops over a distributed dataset, or takes a batch of "
                "uneven parts in a way that cannot be compiled."
            ) from abort
        push_back(entry.pulls, elements, call.iterators)
        return entry, call

    def _pulled(self, entries: list[Program], call: Call) -> tuple[Program | None, list[Any]]:
        """The next elements, and the program that takes such; None where it is to be traced yet."""
        pulled: list[Any] = []
        if entries:
            try:
                for pull in entries[0].pulls:
                    pulled.append(pull_from(pull.source(call.iterators)))
            except StopIteration:
                push_back(entries[0].pulls, pulled, call.iterators)
                raise
        alike = (e for e in entries if same_sources(e.pulls, entries[0].pulls))
        return next((e for e in alike if same_elements(e.pulls, pulled)), None), pulled

    def _check_declared(self, args: tuple, kwargs: dict) -> None:
        """`TypeError` where arrays, specs or PerReplica values do not fit the input signature."""

        def fit(given: Any, declared: Any) -> bool:
            is_spec = isinstance(declared, (specs.TensorSpec, specs.PerReplicaSpec))
            return declared.is_compatible_with(given) if is_spec else given == declared

        given = jax.tree.leaves(args, is_leaf=lambda leaf: isinstance(leaf, PerReplica))
        declared = jax.tree.leaves(self._input_signature)
        if kwargs or len(given) != len(declared) or not all(map(fit, given, declared)):
            raise TypeError(
                f"Binding inputs to tf.function failed due to arguments that do not fit. Received args: {args} and "
                f"kwargs: {kwargs} for signature: {self._input_signature}."
            )

    def _bind(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Arguments checked against the input signature; numbers and numpy arrays become arrays of its dtypes."""
        assert self._input_signature is not None
        if kwargs or len(args) != len(self._input_signature):
            raise TypeError(
                f"Binding inputs to tf.function failed due to `{len(self._input_signature)} positional arguments "
                f"expected by input_signature`. Received args: {args} and kwargs: {kwargs}."
            )
        try:
            return tuple(specs.conform(arg, spec) for arg, spec in zip(args, self._input_signature)), {}
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"Binding inputs to tf.function failed due to `{error}`. Received args: {args} and kwargs: {kwargs} "
                f"for signature: {self._input_signature}."
            ) from error

    def _cause(self, call: Call, inputs: list[str]) -> str:
        """Why it is traced anew, in words; empty the first time."""
        if self._last_call is None:
            return ""
        if not self._entries.get(call.key):
            return difference(self._last_call, (call._tree, call.keys))
        # Of the same arguments: other elements come from an iterator.
        text = "The elements of a dataset differ from those of the last time in shape, dtype or structure"
        changed = [(was, now) for was, now in zip(self._last_inputs, inputs) if was != now]
        return f"{text}: there was {changed[0][0]} where {changed[0][1]} is now. " if changed else f"{text}. "

    def _warn_of_retracing(self, cause: str) -> None:
        if self._retraced < 5 or self._retraced * 2 <= self._calls or self._retraced < self._warned + 5:
            return
        self._warned = self._retraced
        tracebacks.warn(
            f"{self._retraced} out of the last {self._calls} calls to {self._python_function!r} triggered retracing, "
            f"which is slow. {cause}Pass numbers that change as arrays, keep shapes the same, and define the function "
            "outside of loops.",
        )

    def _warn_of_what_stays(self, call: Call, pulls: Sequence[Pull]) -> None:
        """Warns of data that are the same in every step, which is hardly what was meant."""
        for leaf in call.statics:
            if is_python_iterator(leaf):
                tracebacks.warn(
                    f"{self._python_function!r} is given a Python iterator, {leaf!r}. It is a constant of the compiled "
                    "program: what next() gives while tracing is used in all calls. Pass the elements, or an iterator "
                    "of `strategy.experimental_distribute_dataset(...)` or of an `rx.data.Dataset`.",
                )
        if self._steps > 1 and not pulls and call.meshes():
            tracebacks.warn(
                f"{self._python_function!r} takes {self._steps} steps a call, all of them with the batch that it was "
                "given. For a fresh batch in each step pass the dataset's iterator, and call next(iterator) in it.",
            )


class _Method(Function):
    """The `Function` of a method for one instance, which it keeps alive, as a bound method does.

    All that it knows is the function's, which is one for all of an instance's: programs stay when this is gone.
    """

    __slots__ = ("__self__", "_function")

    def __init__(self, function: Function, instance: Any):
        self.__dict__ = function.__dict__
        self._function, self.__self__ = function, instance

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def _turn(self) -> contextlib.AbstractContextManager[Any]:
        return self._function._turn()


def function(
    func: Callable[..., Any] | None = None,
    input_signature: Sequence[Any] | None = None,
    autograph: bool = False,
    jit_compile: bool | None = None,
    reduce_retracing: bool = False,
    experimental_implements: str | None = None,
    experimental_autograph_options: Any = None,
    experimental_attributes: Any = None,
    experimental_relax_shapes: bool | None = None,
    experimental_compile: bool | None = None,
    experimental_follow_type_hints: bool | None = None,
    steps_per_call: int = 1,
) -> Any:
    """Compiles a Python function as a whole; a decorator, with or without arguments.

    Arrays among the arguments are inputs; Python numbers, strings and other objects are constants of the program,
    which is traced anew for each of their values, and for each structure, shape and dtype of the arrays.
    Variables may be read, assigned and (on the first call only) made in it; `next(iterator)` of a dataset
    is pulled anew by each call. Inside of another traced function it is part of that one.

    Args:
        func: the function.
        input_signature: a `TensorSpec`, or a nest of them, for each argument, which the arguments must fit.
        autograph: whether `if`, `while`, `for`, `and`, `or` and `not` on arrays whose values only the compiled
            program will know are compiled, here and in the functions that this one calls, as far as they are the
            user's own. It needs diastatic-malt, the extra `autograph`. Where a function needs such a value in another
            way, or that is not installed, it is driven from the host, with a warning.
        jit_compile, reduce_retracing and the experimental ones: accepted for compatibility.
        steps_per_call: how many times a call runs the function, in one program, each time with the next element of
            `next(iterator)` and the same arguments. The call returns what the runs return, stacked along a new first
            axis, that of each component of PerReplica values; runs that differ in shape, as those of a smaller last
            batch may, come as a list. Where the data end before, there are fewer runs.

    Raises:
        TypeError: an argument does not fit the input signature, which is no list or tuple, or `steps_per_call` is no
            integer.
        ValueError: a call after the first makes a variable, or `steps_per_call` is not positive.

    >>> import jax.numpy as jnp, replicax as rx
    >>> count = rx.Variable(0)
    >>> @rx.function
    ... def step(x):
    ...     count.assign_add(1)
    ...     return x * 2
    >>> step(jnp.ones(2)).tolist(), step(jnp.ones(2)).tolist(), int(count), step.experimental_get_tracing_count()
    ([2.0, 2.0], [2.0, 2.0], 2, 1)
    >>> iterator = iter(rx.data.Dataset.range(5))
    >>> several = rx.function(lambda: next(iterator) + count, steps_per_call=3)
    >>> several().tolist(), several().tolist()
    ([2, 3, 4], [5, 6])
    """
    if isinstance(steps_per_call, bool) or not hasattr(steps_per_call, "__index__"):
        raise TypeError(f"`steps_per_call` is an int, got {steps_per_call!r}.")
    steps = operator.index(steps_per_call)
    if steps < 1:
        raise ValueError(f"`steps_per_call` says how many steps a call takes, 1 or more; got {steps_per_call}.")
    if not isinstance(input_signature, (list, tuple, type(None))):
        raise TypeError(
            f"`input_signature` is a list or tuple with a spec for each argument, got {input_signature!r}. For one "
            "argument write [spec]."
        )
    if func is not None and not callable(func):
        raise TypeError(f"`function` compiles a Python function, got {func!r} of type {type(func).__name__}.")
    if func is None:
        return lambda f: function(f, input_signature, autograph, steps_per_call=steps)
    return Function(func, input_signature, autograph, steps_per_call=steps)


def is_function(value: Any) -> bool:
    """Whether `value` was made by `function`, as a method of an instance or by itself."""
    return isinstance(value, Function)
