"""Errors for values of replicas that are used as if they were plain tensors or numbers."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import NoReturn

import numpy as np
from numpy.typing import DTypeLike

from replicax._base import errors, nest

_in_replica_function: Callable[[], bool] = bool

_LIBRARIES = ("replicax", "jax", "jaxlib", "numpy")


def set_in_replica_function(ask: Callable[[], bool]) -> None:
    """Plugs in the function that tells whether a replica function of a strategy runs in this thread."""
    global _in_replica_function
    _in_replica_function = ask


def not_a_tensor(value: object) -> ValueError:
    """Returns the error for a PerReplica value in an operation."""
    return _captured(value) if _in_replica_function() else ValueError(errors.NOT_A_TENSOR)


class NotATensor:
    """The base of values with a component for each replica: used as a tensor, they raise errors that say what to do.

    In a replica function that did not get such a value as an argument, every use of it raises: it does not know which
    component is the replica's own. Elsewhere an operator raises an error that begins as Python's own, and the value is
    true, as objects are.
    """

    __slots__ = ()

    def __jax_array__(self) -> NoReturn:
        raise not_a_tensor(self)

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        _refuse_captured(self)
        if dtype is not None and np.dtype(dtype).kind in "biufc":
            float(self)  # which says what is wrong
        array = np.empty(1, object)  # of this object, as numpy makes of any that it does not know
        array[0] = self
        return array.reshape(())

    def __bool__(self) -> bool:
        _refuse_captured(self)
        return True

    def __float__(self) -> NoReturn:
        raise self._no("A float cannot be made of a PerReplica value")

    def __int__(self) -> NoReturn:
        raise self._no("An int cannot be made of a PerReplica value")

    def __complex__(self) -> NoReturn:
        raise self._no("A complex number cannot be made of a PerReplica value")

    def __format__(self, spec: str) -> str:
        if spec:
            raise self._no(f"Text of the format {spec!r} cannot be made of a PerReplica value")
        return str(self)

    def __len__(self) -> NoReturn:
        raise self._no("object of type 'PerReplica' has no len()")

    def __iter__(self) -> NoReturn:
        raise self._no("'PerReplica' object is not iterable")

    def __contains__(self, item: object) -> NoReturn:
        raise self._no("argument of type 'PerReplica' is not iterable")

    def __getitem__(self, index: object) -> NoReturn:
        raise self._no("'PerReplica' object is not subscriptable")

    def __getattr__(self, name: str) -> NoReturn:  # called for missing ones
        text = f"{type(self).__name__!r} object has no attribute {name!r}"
        if _in_replica_function() and not name.startswith("_"):
            text += f". {_captured(self)}"
        raise AttributeError(text, name=name, obj=self)

    def _no(self, said: str) -> TypeError:
        """Returns the error for an operation that the value does not support; it begins as Python's own."""
        _refuse_captured(self)
        return TypeError(
            f"{said}. It has a component for each replica{_if_equal(self)}. Combine them, "
            '`strategy.reduce("MEAN", value, axis=None)`, or take one of them, '
            "`strategy.experimental_local_results(value)[0]`."
        )


def _binary(symbol: str, reflected: bool = False) -> Callable[[NotATensor, object], NoReturn]:
    def operator(self: NotATensor, other: object) -> NoReturn:
        left, right = (type(value).__name__ for value in ((other, self) if reflected else (self, other)))
        if symbol[0] in "<>":
            raise self._no(f"{symbol!r} not supported between instances of {left!r} and {right!r}")
        raise self._no(f"unsupported operand type(s) for {symbol}: {left!r} and {right!r}")

    return operator


def _unary(name: str) -> Callable[[NotATensor], NoReturn]:
    def operator(self: NotATensor) -> NoReturn:
        raise self._no(f"bad operand type for {name}: {type(self).__name__!r}")

    return operator


_BINARY = {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "matmul": "@"}
for _name, _symbol in {**_BINARY, "pow": "** or pow()", "and": "&", "or": "|", "xor": "^"}.items():
    setattr(NotATensor, f"__{_name}__", _binary(_symbol))
    setattr(NotATensor, f"__r{_name}__", _binary(_symbol, reflected=True))
for _name, _symbol in {"lt": "<", "le": "<=", "gt": ">", "ge": ">="}.items():  # equal is what is the same object
    setattr(NotATensor, f"__{_name}__", _binary(_symbol))
for _name, _text in {"neg": "unary -", "pos": "unary +", "invert": "unary ~", "abs": "abs()"}.items():
    setattr(NotATensor, f"__{_name}__", _unary(_text))


def _refuse_captured(value: object) -> None:
    if _in_replica_function():
        raise _captured(value)


def _captured(value: object) -> errors.InvalidOperandError:
    """Returns the error for a value that a replica function did not get as an argument."""
    captures = list(_captures(type(value)))
    # JAX rebuilds the arguments of its functions, and then any captured one may be the value.
    same = [capture for capture in captures if capture[2] is value]
    name, where = "value", "a replica function that did not get it as an argument"
    if captures:
        name, function, _ = (same or captures)[0]
        where = f"the replica function {function!r}, which takes `{name}` from outside"
    return errors.InvalidOperandError(
        f"A PerReplica value is used in {where}. It has a component for each replica, and a replica function gets its "
        f"own component of what it is passed: pass it in args= of strategy.run, as in run(fn, args=({name},))."
    )


def _captures(kind: type) -> Iterator[tuple[str, str, object]]:
    """Yields the values of this kind that the functions that run here, the innermost first, took from outside.

    With each its name, or that of the container it is in, and that of the function.
    """
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        code, module = frame.f_code, frame.f_globals.get("__name__", "")
        if module.partition(".")[0] not in _LIBRARIES:
            for names, scope in ((code.co_freevars, frame.f_locals), (code.co_names, frame.f_globals)):
                for name in names:
                    held = scope.get(name)
                    for leaf in nest.leaves(held) if isinstance(held, dict | list | tuple) else [held]:
                        if isinstance(leaf, kind):
                            yield name, re.sub("^(ag__|tf__)", "", code.co_name), leaf
        frame = frame.f_back


def _if_equal(value: NotATensor) -> str:
    """Returns words that tell the number that all components here are, if they are one number."""
    try:
        components = [component.item() for component in getattr(value, "values", ())]
    except Exception:  # they are traced, no scalars, or lost
        return ""
    return f", here {components[0]!r} each" if len(set(components)) == 1 else ""


ROWS_NOT_KNOWN = (
    "The numbers of rows of the replicas' parts of a padded batch (InputOptions(pad_last_batch=True)) are known only "
    "when the compiled function runs, so that one program serves all of them. Pass the value to `strategy.run`, reduce "
    "it with `strategy.reduce(..., axis=0)`, or return it from the function, and gather it or look at its components."
)
