"""Optax transformations on variables: gradients reduced over the replicas once, then the same update everywhere."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from replicax import _context, _nest
from replicax._types import CommunicationOptions, ReduceOp, as_reduce_op
from replicax._values import PerReplica
from replicax._variables import Variable


class Optimizer:
    """An Optax optimizer of variables.

    `apply_gradients` reduces the replicas' gradients in one batched all-reduce; then every replica makes the same
    update of its copies, without further communication. The optimizer's state is a variable of the same strategy.

    Args:
        transformation: what `optax.adam(...)` and the like return: a pair of functions `init` and `update`.
        variables: a variable (which may hold a whole pytree) or a nest of them.
        reduce_op: SUM, for losses divided by the *global* batch size, or MEAN, for losses that are means over each
            replica's part.
        options: of the all-reduce; see `CommunicationOptions`.

    Raises:
        TypeError: `variables` has something else in it than variables.

    >>> import jax.numpy as jnp, optax, replicax as rx
    >>> strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"])
    >>> with strategy.scope():
    ...     w = rx.Variable(10.0)
    ...     optimizer = rx.Optimizer(optax.sgd(0.1), w)
    >>> @rx.function
    ... def step():
    ...     strategy.run(lambda: optimizer.apply_gradients(w * 1.0))
    >>> step()
    >>> float(w)
    8.0
    """

    def __init__(
        self,
        transformation: Any,
        variables: Any,
        reduce_op: ReduceOp | str = ReduceOp.SUM,
        options: CommunicationOptions | None = None,
    ):
        self._transformation, self._variables = transformation, variables
        self._reduce_op, self._options = as_reduce_op(reduce_op), options
        self._flat = [leaf for leaf in _nest.leaves(variables) if leaf is not None]
        for leaf in self._flat:
            if not isinstance(leaf, Variable):
                raise TypeError(f"An Optimizer takes variables, got {leaf!r} of type {type(leaf).__name__}.")
        if not self._flat:
            raise TypeError("An Optimizer takes at least one variable, got none.")
        self._strategy = self._flat[0].distribute_strategy
        self._update = jax.jit(self._new_values)  # one program, also where replicas run eagerly
        state = transformation.init(self._parameters())
        with (self._strategy or _context.get_strategy()).scope():
            self.state = Variable(lambda: state, trainable=False, name="optimizer_state")

    @property
    def variables(self) -> list[Variable]:
        """The variables that are optimized, in order."""
        return list(self._flat)

    def _tracked(self) -> dict[str, Any]:
        return {"state": self.state}

    def _parameters(self) -> Any:
        return _nest.map_structure(lambda v: v if v is None else v.value(), self._variables)

    def apply_gradients(self, gradients: Any) -> None:
        """Reduces the gradients over the replicas and updates the variables.

        Args:
            gradients: in the structure of `variables` (of the variables' values), or a sequence of pairs (gradient,
                variable) as Keras takes it. None stands for a zero gradient. In cross-replica context its leaves are
                per-replica values.

        Raises:
            ValueError: the structure is another one, or a pair has a variable that is not optimized here.
        """
        gradients = self._in_order(gradients)
        replica_context = _context.get_replica_context()
        in_own_replica = replica_context is not None and replica_context.strategy is self._strategy
        if self._strategy is None or in_own_replica:
            self._apply(gradients)
        else:
            self._strategy.run(self._apply, args=(gradients,))

    def _apply(self, gradients: Any) -> None:
        parameters = self._parameters()
        wanted: Any = jax.tree.structure(parameters)
        got: Any = jax.tree.structure(gradients)
        if wanted != got:
            raise ValueError(f"The gradients' structure is {got}, that of the variables' values is {wanted}.")
        replica_context = _context.get_replica_context()
        if replica_context is not None and replica_context.num_replicas_in_sync > 1:
            gradients = replica_context.all_reduce(self._reduce_op, gradients, options=self._options)
        live_once = self._strategy is not None and self._strategy.extended._variables_live_once
        if replica_context is not None and live_once:
            return replica_context.merge_call(self._assign_once, (gradients,))
        self._assign(gradients, parameters)

    def _assign_once(self, strategy: Any, gradients: Any) -> None:
        """In cross-replica context, with the reduced gradients, of which each replica has the same."""
        one = lambda x: (x.values[0] if x._local is None else x._local) if isinstance(x, PerReplica) else x  # noqa: E731
        self._assign(_nest.map_structure(one, gradients), self._parameters())

    def _assign(self, gradients: Any, parameters: Any) -> None:
        new, state = self._update(gradients, self.state.value(), parameters)
        self.state.assign(state)
        values = _values_of(self._variables, new)
        for variable, value in zip(self._flat, values):
            variable.assign(value)

    def _new_values(self, gradients: Any, state: Any, parameters: Any) -> tuple[Any, Any]:
        updates, state = self._transformation.update(gradients, state, parameters)
        return jax.tree.map(lambda p, u: jnp.asarray(p + u).astype(p.dtype), parameters, updates), state

    def _in_order(self, gradients: Any) -> Any:
        """The gradients in the structure of the variables' values, zeros for None."""
        if isinstance(gradients, zip):
            gradients = list(gradients)
        pairs = (
            isinstance(gradients, (list, tuple))
            and gradients
            and all(isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], Variable) for pair in gradients)
        )
        if pairs:
            by_id = {id(variable): gradient for gradient, variable in gradients}
            known = {id(variable) for variable in self._flat}
            for _, variable in gradients:
                if id(variable) not in known:
                    raise ValueError(f"{variable.name} is not among the variables of this optimizer.")
            gradients = _nest.map_structure(lambda v: by_id.get(id(v)), self._variables)
        if any(leaf is None for leaf in _nest.leaves(gradients)) and len(self._flat) > 0:
            gradients = self._with_zeros(gradients)
        return gradients

    def _with_zeros(self, gradients: Any) -> Any:
        if gradients is None:
            return jax.tree.map(jnp.zeros_like, self._parameters())
        is_none = lambda x: x is None or isinstance(x, PerReplica)  # noqa: E731
        return jax.tree.map(
            lambda g, p: jax.tree.map(jnp.zeros_like, p) if g is None else g,
            gradients,
            self._parameters(),
            is_leaf=is_none,
        )


def _values_of(variables: Any, values: Any) -> list[Any]:
    """For each variable of the nest its part of `values`, in order."""
    found: list[Any] = []

    def take(variable: Any, value: Any) -> None:
        found.append(value)

    _zip_structure(take, variables, values)
    return found


def _zip_structure(fn: Any, variables: Any, values: Any) -> None:
    if isinstance(variables, Variable):
        fn(variables, values)
    elif isinstance(variables, dict):
        for key in variables:
            _zip_structure(fn, variables[key], values[key])
    elif isinstance(variables, (list, tuple)):
        for variable, value in zip(variables, values):
            _zip_structure(fn, variable, value)
    elif variables is not None:
        one_level = lambda node: node is not variables  # noqa: E731
        tree: Any
        children, tree = jax.tree.flatten(variables, is_leaf=one_level)
        for variable, value in zip(children, tree.flatten_up_to(values)):
            _zip_structure(fn, variable, value)
