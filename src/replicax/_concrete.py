"""`ConcreteFunction`: a function of which some arguments are fixed, and the others declared by specs."""

from __future__ import annotations

import inspect
from typing import Any

import jax

from replicax._errors import InvalidArgumentError
from replicax._specs import TensorSpec, conform, spec_of
from replicax._variables import Variable


class ConcreteFunction:
    """What `get_concrete_function` of a `function` returns.

    Arguments that were given as arrays, specs or variables are its own; the others keep the values that they had.

    >>> import jax.numpy as jnp, replicax as rx
    >>> power = rx.function(lambda a, b: a**b).get_concrete_function(rx.TensorSpec([None]), b=2)
    >>> power(jnp.arange(3.0)).tolist(), power
    ([0.0, 1.0, 4.0], <ConcreteFunction <lambda>(a=TensorSpec(shape=(None,), dtype=float32, name='a'))>)
    """

    def __init__(self, function: Any, python_function: Any, args: Any, kwargs: Any):
        self._function = function
        self._signature = inspect.signature(python_function)
        self._bound = self._signature.bind(*args, **kwargs)
        self._bound.apply_defaults()
        self._open = {name: _declared(v, name) for name, v in self._bound.arguments.items() if _is_open(v)}
        self.name = getattr(python_function, "__name__", "function")

    @property
    def structured_input_signature(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The specs of its arguments, and an empty dict."""
        return tuple(self._open.values()), {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arguments = dict(self._bound.arguments)
        given = dict(zip(self._open, args), **kwargs)
        if len(args) > len(self._open) or set(self._open) - set(given) or len(args) + len(kwargs) != len(given):
            raise TypeError(f"{self!r} takes {list(self._open) or 'no arguments'}, got {args} and {kwargs}.")
        for name, value in given.items():
            if name in self._open:
                arguments[name] = self._fitting(name, value)
            elif name not in arguments or arguments[name] is not value and arguments[name] != value:
                raise TypeError(
                    f"{self!r} was made for {name}={arguments.get(name)!r}, got {value!r}. Make another one, by "
                    "`get_concrete_function`, for another value."
                )
        bound = inspect.BoundArguments(self._signature, arguments)  # type: ignore[arg-type]
        return self._function(*bound.args, **bound.kwargs)

    def _fitting(self, name: str, value: Any) -> Any:
        if isinstance(value, Variable):
            return value
        try:
            return conform(value, self._open[name])
        except (TypeError, ValueError) as error:
            raise InvalidArgumentError(f"The argument {name!r} of {self!r} does not fit: {error}") from error

    def __getattr__(self, name: str) -> Any:
        if name in ("graph", "inputs", "outputs", "captured_inputs", "structured_outputs"):
            raise AttributeError(
                f"A ConcreteFunction has no {name!r}: there are no graphs. `lower(...)` of the function shows its "
                "program, `jax.export` writes it."
            )
        raise AttributeError(name)

    def __repr__(self) -> str:
        return f"<ConcreteFunction {self.name}({', '.join(f'{k}={v!r}' for k, v in self._open.items())})>"


def _leaves(value: Any) -> list[Any]:
    return jax.tree.leaves(value, is_leaf=lambda x: isinstance(x, (TensorSpec, Variable)))


def _is_open(value: Any) -> bool:
    return any(isinstance(leaf, (TensorSpec, Variable, jax.Array)) for leaf in _leaves(value))


def _declared(value: Any, name: str) -> Any:
    def spec(leaf: Any) -> Any:
        if isinstance(leaf, Variable):
            return TensorSpec(leaf.shape, leaf.dtype, name)
        found = leaf if isinstance(leaf, TensorSpec) else spec_of(leaf)
        return TensorSpec(found.shape, found.dtype, found.name or name)

    return jax.tree.map(spec, value, is_leaf=lambda x: isinstance(x, (TensorSpec, Variable)))
