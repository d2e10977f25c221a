"""`tf.train.ExponentialMovingAverage`: moving averages of variables."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from replicax.tf._core import PerReplica, Strategy, Variable, context, frames, get_strategy
from replicax.tf._flow import init_scope
from replicax.tf._host import jnp
from replicax.tf._ops import TENSORS, convert_to_tensor
from replicax.tf._types import TensorLike


class ExponentialMovingAverage:
    """Moving averages of variables: each call of `apply` moves them by `(1 - decay) * (variable - average)`.

    The averages are variables that are not trained. They are no part of a checkpoint unless it gets them from
    `average`. In replica context, an average moves by the mean of the replicas' values.

    Args:
        decay: a number, tensor or variable, near to 1.
        num_updates: how many updates there were, a number or variable. The decay is then at most
            `(1 + num_updates) / (10 + num_updates)`, so that averages move faster in the beginning.
        zero_debias: accepted for compatibility: it matters for tensors of TensorFlow 1 alone.
        name: the end of the averages' names.
    """

    def __init__(
        self,
        decay: TensorLike,
        num_updates: TensorLike | None = None,
        zero_debias: bool = False,
        name: str = "ExponentialMovingAverage",
    ):
        self._decay, self._num_updates, self._name = decay, num_updates, name
        self._averages: dict[Hashable, Variable] = {}

    @property
    def name(self) -> str:
        """The name."""
        return self._name

    def apply(self, var_list: Sequence[Variable] | None = None) -> None:
        """Moves the averages of variables, which begin with the values that the variables have outside of functions.

        Raises:
            TypeError: an element is no variable of floats.
            ValueError: no variables are given.
        """
        if var_list is None:
            raise ValueError("apply needs a list of variables: there are no collections of all variables.")
        for variable in var_list:
            self._check(variable)
        for variable in var_list:
            if variable.ref() not in self._averages:
                self._averages[variable.ref()] = self._new_average(variable)
        step = 1.0 - self._current_decay()
        for variable in var_list:
            _move(self._averages[variable.ref()], variable.read_value(), step)

    def average(self, var: Variable) -> Variable | None:
        """Returns the variable that holds the average of `var`, None if `apply` was not called with it."""
        return self._averages.get(var.ref())

    def average_name(self, var: Variable) -> str:
        """Returns the name of the average of a variable."""
        return f"{var.name.partition(':')[0]}/{self._name}"

    def variables_to_restore(self, moving_avg_variables: Iterable[Variable] | None = None) -> dict[str, Variable]:
        """Returns variables by the names of their averages."""
        return {self.average_name(variable): variable for variable in moving_avg_variables or ()}

    def _check(self, variable: object) -> None:
        if isinstance(variable, TENSORS):
            raise TypeError(
                "tf.train.ExponentialMovingAverage does not support non-Variable tensors when eager execution is "
                "enabled."
            )
        if not isinstance(variable, Variable):
            raise TypeError(f"apply takes a list of variables, got an element of type {type(variable).__name__}.")
        if not jnp.issubdtype(variable.dtype, np.floating):
            raise TypeError(f"The variables must be half, float, or double: {variable.name}")

    def _new_average(self, variable: Variable) -> Variable:
        staged = frames.is_staging()
        with init_scope():
            # Of what is being traced, a new variable can have no value.
            with frames.entered(frames.GlobalFrame()) if staged else contextlib.nullcontext():
                value = variable.read_value()
            return Variable(value, trainable=False, name=self.average_name(variable))

    def _current_decay(self) -> jax.Array:
        decay = _as_float(self._decay)
        if self._num_updates is None:
            return decay
        updates = _as_float(self._num_updates)
        return jnp.minimum(decay, (1.0 + updates) / (10.0 + updates))


def _as_float(value: TensorLike) -> jax.Array:
    return convert_to_tensor(value).astype(np.float32)


def _move(average: Variable, value: jax.Array, step: jax.Array) -> None:
    """Moves an average towards a value; in replica context, towards the mean of the replicas' values."""

    def move(strategy: Strategy, average: Variable, value: jax.Array | PerReplica, step: jax.Array) -> None:
        if isinstance(value, PerReplica):
            value = strategy.extended.reduce_to("MEAN", value, average)
        strategy.extended.update(average, subtract, args=(value, step))

    def subtract(component: Any, value: jax.Array, step: jax.Array) -> None:
        component.assign_sub((component - value) * step.astype(component.dtype), read_value=False)

    replica_context = context.get_replica_context()
    if replica_context is None:
        move(get_strategy(), average, value, step)
    else:
        replica_context.merge_call(move, args=(average, value, step))
