"""`function`: a Python function compiled as a whole, with the variables that it reads and writes.

A call of it runs in one of these ways, see `Function.__call__`:

- *as Python code, eagerly*, after `run_functions_eagerly(True)`.
- *inline*, where JAX or another function is tracing already: it is part of what is traced.
- *compiled*: the first call with arguments of some signature traces the Python code once, to a jaxpr. Variables that
  it reads turn into inputs on the way, those that it assigns into outputs (see `_tracing.frames`), and
  `next(iterator)` of a dataset into an input that each call takes. Such calls run that program (see `_engine.program`).
- *compiled, several steps in one program* (`steps_per_call`), or one by one where no program takes the elements that
  come (see `_engine.multi_step`).
- *driven from the host*: the Python code runs as it is, with each `strategy.run` in it compiled, where the function
  loops over a distributed dataset, or needs a value that is not known while tracing.
- *eagerly, replica by replica*, where the replicas' parts of a batch differ in shape and no program can be made for
  them (see `_engine.programs`), and in the first call of a function that makes variables.
"""

from __future__ import annotations

import functools
import inspect
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import jax

from replicax._base import tracebacks
from replicax._base.messages import received
from replicax._base.types import Tree
from replicax._engine import modes
from replicax._engine.concrete_function import ConcreteFunction
from replicax._engine.program import Program
from replicax._engine.programs import Calls
from replicax._engine.signature import CallSignature, arguments_of, bind_declared, check_declared
from replicax._tracing import autograph_switch


class Function:
    """A compiled Python function, made by `function`. Call it as the function itself.

    >>> import jax.numpy as jnp, replicax as rx
    >>> square = rx.function(lambda x: x * x)
    >>> isinstance(square, rx.Function), square(jnp.float32(3)).item()
    (True, 9.0)
    """

    def __init__(
        self,
        python_function: Callable[..., Tree],
        input_signature: Sequence[Tree] | None = None,
        autograph: bool = False,
        compiled_only: bool = False,
        steps_per_call: int = 1,
        returned: Callable[[Tree], Tree] | None = None,
    ):
        self._input_signature = None if input_signature is None else tuple(input_signature)
        self._code = modes.PythonCode(python_function, autograph, returned)
        self._calls = Calls(self._code, compiled_only, steps_per_call)
        self._programs = self._calls.programs
        self._concrete: dict[str, ConcreteFunction] = {}  # by the text that shows their arguments
        self._methods: dict[int, Function] = {}
        self._for_replicas: Function | None = None
        self._bound = weakref.WeakValueDictionary[int, _Method]()  # `instance.method is instance.method`
        functools.update_wrapper(self, python_function, updated=())
        for name, value in getattr(python_function, "__dict__", {}).items():
            if not name.startswith("_") and not hasattr(self, name):
                setattr(self, name, value)

    def _decorate(self, decorator: Callable[[Callable[..., Tree]], Callable[..., Tree]]) -> None:
        """Decorates the Python function before the first call; libraries for TensorFlow use this private name."""
        Function.__init__(self, decorator(self._code.function), *self._declared, self._code.returned)

    @property
    def _declared(self) -> tuple[Sequence[Tree] | None, bool, bool, int]:
        return self._input_signature, self._code.autograph, self._calls.compiled_only, self._calls.steps

    # The ways in which a call runs.

    @tracebacks.boundary
    def __call__(self, *args: Tree, **kwargs: Tree) -> Tree:
        if self._input_signature is not None:
            args, kwargs = bind_declared(self._input_signature, args, kwargs, self._code.signature)
        return self._calls.run(args, kwargs)

    @property
    def _of_replicas(self) -> Function:
        """The function as several replicas call it.

        Of what they return together `PythonCode.result_of` makes the result of the call.
        """
        if self._code.returned is None:
            return self
        if self._for_replicas is None:
            self._for_replicas = Function(self._code.function, *self._declared)
        return self._for_replicas

    # Public properties and methods.

    @property
    def python_function(self) -> Callable[..., Tree]:
        """The Python function itself.

        >>> import replicax as rx
        >>> rx.function(lambda x: x + 1).python_function(2)
        3
        """
        return self._code.function

    @property
    def steps_per_call(self) -> int:
        """The number of times that a call runs the function.

        >>> import replicax as rx
        >>> rx.function(lambda: None, steps_per_call=4).steps_per_call
        4
        """
        return self._calls.steps

    @property
    def input_signature(self) -> tuple[Tree, ...] | None:
        """The specs that it was declared with, None without any.

        >>> import replicax as rx
        >>> rx.function(lambda x: x, input_signature=[rx.TensorSpec(())]).input_signature
        (TensorSpec(shape=(), dtype=float32, name=None),)
        """
        return self._input_signature

    @tracebacks.boundary
    def get_concrete_function(self, *args: Tree, **kwargs: Tree) -> ConcreteFunction:
        """Returns this function, traced for arguments of one kind.

        Arrays and specs are its arguments; it keeps the other values as they are. Nothing is run, but variables that
        the function makes are made now. For those the function's Python code runs with ones and zeros for its
        arguments, and what it assigns is taken back.

        Raises:
            TypeError: the arguments do not fit the function or its input signature.

        >>> import jax.numpy as jnp, replicax as rx
        >>> rx.function(lambda x, n: x * n).get_concrete_function(rx.TensorSpec([]), 3)(jnp.float32(2)).item()
        6.0
        """
        if self._input_signature is not None:
            if args or kwargs:
                check_declared(self._input_signature, args, kwargs)
            args, kwargs = self._input_signature, {}
        made = concrete_of(self, args, kwargs)
        if made.trace is not None:
            self._concrete.setdefault(repr(made), made)
        return made

    def all_concrete_functions(self) -> list[ConcreteFunction]:
        """Returns it for its input signature or, without any, for the arguments that it was traced for until now.

        Arguments that are objects of Python, but numbers and strings, are left out.

        >>> import replicax as rx
        >>> made = rx.function(lambda x: x, input_signature=[rx.TensorSpec(())]).all_concrete_functions()
        >>> [one.structured_input_signature[0] for one in made]
        [(TensorSpec(shape=(), dtype=float32, name='x'),)]
        """
        if self._input_signature is not None:
            return [self.get_concrete_function()]
        found = {repr(made): made for made in called_with(self)}
        return list({**found, **self._concrete}.values())

    def pretty_printed_concrete_signatures(self, verbose: bool = True) -> str:
        """Returns the names, dtypes and shapes of the programs that there are, one a line.

        >>> import jax.numpy as jnp, replicax as rx
        >>> fn = rx.function(lambda x: x + 1)
        >>> _ = fn(jnp.ones(2)), fn(jnp.ones(3))
        >>> print(fn.pretty_printed_concrete_signatures())
        function(float32[2])
        function(float32[3])
        """
        return "\n".join(entry.label for entries in self._programs.entries.values() for entry in entries)

    def pretty_printed_passes(self) -> str:
        """Return the passes that rewrite each program, one a line, in their order.

        Programs follow in the order of `pretty_printed_concrete_signatures`. The passes of the stage `program` are
        chosen when XLA compiles, which is in the first call. `rx.config.optimize_programs(False)` leaves out those that
        only make a program faster.

        >>> import jax.numpy as jnp, replicax as rx
        >>> strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"])
        >>> @rx.function
        ... def step(x):
        ...     sums = strategy.run(lambda x: rx.get_replica_context().all_reduce("sum", x), args=(x,))
        ...     return strategy.reduce("mean", sums, axis=None)
        >>> _ = step(jnp.float32(2))
        >>> print(step.pretty_printed_passes())
        step(float32[])
          replica function  sharded_variables  not needed
          replica function  open_calls         not needed
          replica function  cpu_forms          not needed
          function          scatters_in_turn   not needed
          function          cpu_forms          not needed
          program           merge_all_reduces  applied
          program           cpu_forms          not needed
        """
        return "\n".join(entry.pretty_printed_passes() for of in self._programs.entries.values() for entry in of)

    def experimental_get_tracing_count(self) -> int:
        """Returns how many times the Python code was traced.

        >>> import jax.numpy as jnp, replicax as rx
        >>> fn = rx.function(lambda x: x + 1)
        >>> _ = fn(jnp.ones(2)), fn(jnp.zeros(2))
        >>> fn.experimental_get_tracing_count()
        1
        """
        return self._programs.log.traces

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
            target = self.python_function

            @functools.wraps(target)
            def for_instance(*args: Tree, **kwargs: Tree) -> Tree:
                return autograph_switch.converted(target)(reference(), *args, **kwargs)

            parameters = list(inspect.signature(target).parameters.values())
            for_instance.__signature__ = inspect.Signature(parameters[1:])  # type: ignore[attr-defined]
            made = Function(for_instance, *self._declared, self._code.returned)
            self._methods.setdefault(key, made)  # another thread may have been first
            weakref.finalize(instance, self._methods.pop, key, None)
        method = self._bound.get(key)
        if method is None:
            method = self._bound[key] = _Method(self._methods[key], instance)
        return method

    @tracebacks.boundary
    def lower(self, *args: Tree, **kwargs: Tree) -> jax.stages.Lowered:
        """Returns the program for these arguments as `jax.jit(...).lower` gives it, to look at; runs nothing.

        >>> import jax.numpy as jnp, replicax as rx
        >>> rx.function(lambda x: x + 1).lower(jnp.ones(2)).compile().as_text().startswith("HloModule")
        True
        """
        entry, call = program_of(self, args, kwargs)
        return entry.lower(call)


def calls_of(function: Function) -> Calls:
    """Return what runs the calls of a function, for tools that look into it."""
    return function._calls


def program_of(function: Function, args: tuple[Tree, ...], kwargs: dict[str, Tree]) -> tuple[Program, CallSignature]:
    """Return the program for these arguments and the next elements of iterators, and the call; pull nothing."""
    calls = calls_of(function)
    if function.input_signature is not None:
        args, kwargs = bind_declared(function.input_signature, args, kwargs, calls.code.signature)
    return calls.find(args, kwargs)


def concrete_of(function: Function, args: tuple[Tree, ...], kwargs: dict[str, Tree]) -> ConcreteFunction:
    """Return a function for arguments of one kind, see `Function.get_concrete_function`."""
    calls = calls_of(function)
    return ConcreteFunction(function, calls.trace, calls.programs.general_for, function.python_function, args, kwargs)


def called_with(function: Function) -> list[ConcreteFunction]:
    """Return a function for the arguments of each program, without arguments that are objects of Python."""
    found, known = [], calls_of(function).programs
    for key, programs in list(known.entries.items()):
        called = key not in known.looked_at or any(program.is_compiled for program in programs)
        if programs and called and (arguments := arguments_of(key)) is not None:
            found.append(concrete_of(function, *arguments))
    return [made for made in found if made.trace is not None]


class _Method(Function):
    """The `Function` of a method for one instance, which it keeps alive, as a bound method does.

    All that it knows is the function's, which is one for all of an instance's: programs stay when this is gone.
    """

    __slots__ = ("__self__",)

    def __init__(self, function: Function, instance: object):
        self.__dict__ = function.__dict__
        self.__self__ = instance


def function(
    func: Callable[..., Tree] | None = None,
    input_signature: Sequence[Tree] | None = None,
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
        raise TypeError(f"`function` compiles a Python function, got {received(func)}.")
    if func is None:
        return lambda f: function(f, input_signature, autograph, steps_per_call=steps)
    return Function(func, input_signature, autograph, steps_per_call=steps)


def is_function(value: object) -> TypeGuard[Function]:
    """Returns whether a value was made by `function`, as a method of an instance or by itself."""
    return isinstance(value, Function)
