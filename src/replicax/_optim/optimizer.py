"""Optax transformations on variables: gradients reduced over the replicas once, then the same update everywhere."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from replicax._base import nest, planning
from replicax._base.messages import received
from replicax._base.tracebacks import Living
from replicax._base.types import CommunicationOptions, Leaf, ReduceOp, Tree, as_options, as_reduce_op
from replicax._collectives import sharding
from replicax._collectives.reducer import Reducer
from replicax._engine import modes
from replicax._engine.function import Function, program_of
from replicax._engine.replica_trace import SpmdContext
from replicax._optim.initial_state import InitialState, initial_state
from replicax._optim.reduce_value_fn import NOT_COMPILED, reduce_value_fn
from replicax._passes import sharded_eval
from replicax._tracing import context, protocols
from replicax._tracing.context import ReplicaContext, StrategyLike
from replicax._values import Kind, PerReplica, is_number, rows_of, traced_component, warn_of_mean
from replicax._variables.assigned_alike import CopiesMayDiffer, MayDiffer
from replicax._variables.distributed import MirroredVariable
from replicax._variables.sharded import ShardedVariable
from replicax._variables.variable import Variable

# The extra arguments of Optax that belong to a replica's own gradients: the loss, and its gradient.
_OF_GRADIENTS = ("value", "grad")
living: Living[Optimizer] = Living()


class GradientTransformation(Protocol):
    """A transformation of Optax."""

    init: Callable[[Tree], Tree]
    update: Callable[..., tuple[Tree, Tree]]


class Optimizer:
    """An Optax optimizer of variables.

    `apply_gradients` reduces the replicas' gradients in one batched all-reduce; then every replica makes the same
    update of its copies, without further communication. The optimizer's state is a variable of the same strategy.

    Under a strategy with `shard_optimizer_state=True` each replica keeps a part of the state, gets the same part of the
    reduced gradients, and updates that part of the variables, which are then gathered. Seen from outside, all is the
    same.

    Args:
        transformation: the result of `optax.adam(...)` or the like: a pair of functions `init` and `update`.
        variables: a variable (which may hold a whole pytree) or a nest of them.
        reduce_op: SUM, for losses that are the replica's share of the mean over the global batch (`share_of_mean`, or
            a sum divided by the *global* batch size), or MEAN, for losses that are means over the rows of the
            replica's part. MEAN weighs the gradients by the replicas' numbers of rows, as far as the arguments of
            `strategy.run` tell them; a replica without rows does not count. So both give the gradients of the mean
            over the global batch.
        options: of the all-reduce; see `CommunicationOptions`.

    Raises:
        TypeError: `transformation` is no Optax transformation, `variables` has something else in it than variables, or
            `options` are no `CommunicationOptions`.
        ValueError: the state is to be sharded, and a variable has no copy on each replica of the strategy.
        RuntimeError: it is made by a replica.

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
        transformation: GradientTransformation,
        variables: Tree,
        reduce_op: ReduceOp | str = ReduceOp.SUM,
        options: CommunicationOptions | None = None,
    ):
        if not all(callable(getattr(transformation, method, None)) for method in ("init", "update")):
            raise TypeError(
                "An Optimizer takes an Optax transformation, such as optax.sgd(0.1), with methods `init` and `update`; "
                f"got {received(transformation)}."
            )
        self._transformation, self._variables = transformation, variables
        self._reduce_op, self._options = as_reduce_op(reduce_op), as_options(options, None)
        self._flat = nest.values(variables)
        for leaf in self._flat:
            if not isinstance(leaf, Variable):
                raise TypeError(f"An Optimizer takes variables, got {received(leaf)}.")
        if not self._flat:
            raise TypeError("An Optimizer takes at least one variable, got none.")
        if context.get_replica_context() is not None and context.has_strategy():
            raise RuntimeError(
                "An Optimizer is made by a replica. Make it outside of `strategy.run`, in the strategy's scope, and "
                "call its `apply_gradients` in the replica function."
            )
        self._strategy = self._flat[0].distribute_strategy
        self._update = jax.jit(self._new_values)  # one program, also where replicas run eagerly
        self._sharded = self._is_sharded()
        self._run_compiled = Function(lambda *args: self._strategy.run(self._apply, args=args))
        strategy = self._strategy or context.get_strategy()
        divided = strategy.extended._divided if self._state_may_differ() is not True else _leave_whole
        with strategy.scope(), protocols.colocate_state(strategy, variables):
            made = initial_state(transformation.init, variables, self._sharded, divided)
            state = transformation.init(self._parameters()) if made is None else None
            self.state = self._create_state(made, state)
        living.add(self)

    def _create_state(self, made: InitialState | None, state: Tree = None) -> Variable:
        """Return a variable of the transformation's state, which is `state` where its arrays are not placed yet."""
        kwargs: dict[str, Any] = {"trainable": False, "name": "optimizer_state"}
        if self._sharded:
            modes.note_creation()
            kwargs |= {"strategy": self._strategy, "reducer": self._reducer}
            return ShardedVariable(lambda: state, **kwargs) if made is None else ShardedVariable.of(*made, **kwargs)
        kwargs["copies_may_differ"] = self._state_may_differ()
        if made is None:
            return Variable(lambda: state, **kwargs)
        variable = Variable(lambda: jax.tree.unflatten(made.tree, made.arrays), **kwargs)
        protocols.storage_of(variable).lent = False  # nobody else refers to these arrays
        return variable

    @contextlib.contextmanager
    def _with_planned_state(self) -> Iterator[None]:
        """Return a context for plans: the state has no values, and is sharded if the strategy's options say so now.

        Raises:
            ValueError: the options say so, and a variable has no copy on each replica.
        """
        before, kinds, tree = (self._sharded, self.state), protocols.types_of(self.state), protocols.tree_of(self.state)
        strategy = self._strategy or context.get_strategy()
        try:
            self._sharded = self._is_sharded()
            with planning.abstract_variables(), strategy.scope(), protocols.colocate_state(strategy, self._variables):
                self.state = self._create_state(InitialState([*kinds], kinds, tree))  # type: ignore[list-item]
            yield
        finally:
            self._sharded, self.state = before

    def _state_may_differ(self) -> CopiesMayDiffer:
        """Return the state's `copies_may_differ`.

        Whether the state can be divided does not depend on the number of replicas, since a plan is for another number.
        """
        if all(variable._equal_by_contract for variable in self._flat):
            return False
        can_be_divided = [isinstance(v, MirroredVariable) and v._can_be_divided for v in self._flat]
        return MayDiffer.UNLESS_DIVIDED if any(can_be_divided) else True

    @property
    def variables(self) -> list[Variable]:
        """The variables that are optimized, in order.

        >>> import optax, replicax as rx
        >>> w = rx.Variable(1.0)
        >>> rx.Optimizer(optax.sgd(0.1), w).variables[0] is w
        True
        """
        return list(self._flat)

    def _tracked(self) -> dict[str, Variable]:
        return {"state": self.state}

    def _parameters(self) -> Tree:
        return nest.map_values(lambda v: v.value(), self._variables)

    def apply_gradients(self, gradients: Tree, **extra_args: Tree) -> None:
        """Reduces the gradients over the replicas and updates the variables.

        Args:
            gradients: in the structure of `variables` (of the variables' values), or a sequence of pairs (gradient,
                variable) as Keras takes it. None stands for a zero gradient. In cross-replica context its leaves are
                per-replica values.
            **extra_args: pass on to the transformation's `update`, if it takes them (Optax's
                `GradientTransformationExtraArgs`), for example `value=loss` for `optax.contrib.reduce_on_plateau`, or
                `value`, `grad` and `value_fn` for `optax.lbfgs` and line searches. These three belong to the replica's
                own gradients and are reduced like these, by `reduce_op`, so that `value` is the loss that the update
                minimizes. Pass the replica's part, which is not reduced yet: `value_fn` computes it from the
                parameters. All others are passed unchanged and must be the same on every replica.

        Raises:
            ValueError: the structure is another one, or a pair has a variable that is not optimized here.
            TypeError: the transformation takes no argument with this name.
            RuntimeError: several replicas that are not compiled together pass a `value_fn`.

        >>> import jax.numpy as jnp, optax, replicax as rx
        >>> w = rx.Variable([1.0, 2.0])
        >>> rx.Optimizer(optax.sgd(0.5), w).apply_gradients(jnp.array([1.0, 1.0]))
        >>> w.numpy().tolist()
        [0.5, 1.5]
        """
        self._check_extra_args(extra_args)
        gradients = self._in_order(gradients)
        replica_context = context.get_replica_context()
        in_own_replica = replica_context is not None and replica_context.strategy is self._strategy
        if self._strategy is None or in_own_replica:
            if replica_context is not None:
                own = {name: extra_args[name] for name in _OF_GRADIENTS if name in extra_args}
                gradients, own = self._weigh_by_rows((gradients, own), replica_context)
                extra_args = extra_args | own
                if callable(value_fn := extra_args.get("value_fn")) and replica_context.num_replicas_in_sync > 1:
                    live_once = protocols.variables_live_once(replica_context.strategy)
                    if not isinstance(replica_context, SpmdContext) or live_once:
                        raise RuntimeError(NOT_COMPILED)

                    @functools.wraps(value_fn)  # a line search reads the names of the arguments
                    def weigh(*args: Tree, **kwargs: Tree) -> Tree:
                        return self._weigh_by_rows(value_fn(*args, **kwargs), replica_context)

                    extra_args["value_fn"] = weigh
            self._apply(gradients, extra_args)
        else:
            if self._reduce_op is ReduceOp.MEAN:
                warn_of_mean(map(rows_of, nest.leaves(gradients)), _MEAN)
            self._strategy.run(self._apply, args=(gradients, extra_args))

    def _weigh_by_rows(self, gradients: Tree, replica_context: ReplicaContext) -> Tree:
        """Return gradients whose mean over the replicas is weighted by the replicas' numbers of rows."""
        if self._reduce_op is not ReduceOp.MEAN or replica_context.num_replicas_in_sync == 1:
            return gradients
        share = replica_context._share_of_rows()
        if share is None:
            warn_of_mean([replica_context._part_rows], _MEAN)
            return gradients
        weight = share * replica_context.num_replicas_in_sync

        def weigh(gradient: Leaf) -> Leaf:
            if isinstance(weight, float) and not weight:  # the mean of no rows is NaN, and so is its gradient
                return jnp.zeros_like(gradient)
            return (jnp.asarray(gradient) * weight).astype(jnp.result_type(gradient))

        return jax.tree.map(weigh, gradients)

    def _check_extra_args(self, extra_args: dict[str, Tree]) -> None:
        """Raise `TypeError` for an argument that the transformation's `update` does not take."""
        try:
            inspect.signature(self._transformation.update).bind(None, None, None, **extra_args)
        except TypeError as error:
            raise TypeError(
                f"The transformation's `update` does not take the arguments of apply_gradients ({error}). Pass extra "
                "arguments to transformations that use them, such as optax.contrib.reduce_on_plateau()."
            ) from None

    def _apply(self, gradients: Tree, extra_args: dict[str, Tree]) -> None:
        parameters = self._parameters()
        expected: object = jax.tree.structure(parameters)
        if jax.tree.structure(gradients) != expected:
            raise _structure_error(gradients, parameters)
        for leaf, parameter in zip(jax.tree.leaves(gradients), jax.tree.leaves(parameters)):
            if jnp.shape(leaf) != jnp.shape(parameter):
                raise ValueError(
                    f"A gradient has the shape {jnp.shape(leaf)}, and its variable's value {jnp.shape(parameter)}."
                )
        replica_context = context.get_replica_context()
        if self._sharded:
            assert replica_context is not None
            return self._apply_parts(replica_context, gradients, parameters, extra_args)
        if replica_context is not None and replica_context.num_replicas_in_sync > 1:
            gradients = replica_context._reduce_nest(self._reduce_op, gradients, self._options)
            extra_args = extra_args | self._reduce_own(replica_context, extra_args)
        if replica_context is not None and self._strategy is not None and protocols.variables_live_once(self._strategy):
            replica_context.merge_call(self._assign_once, (gradients, extra_args))
        else:
            self._assign(gradients, parameters, extra_args)

    def _assign_once(self, strategy: StrategyLike, gradients: Tree, extra_args: dict[str, Tree]) -> None:
        """Updates variables that have one copy, in cross-replica context, from reduced gradients."""

        def one(x: Leaf) -> Leaf:
            own = traced_component(x)
            return own if own is not None else x.values[0] if isinstance(x, PerReplica) else x

        self._assign(nest.map_structure(one, gradients), self._parameters(), nest.map_structure(one, extra_args))

    def _assign(self, gradients: Tree, parameters: Tree, extra_args: dict[str, Tree]) -> None:
        # A program takes no functions, for example the `value_fn` of a line search.
        update = self._update if all(map(is_number, jax.tree.leaves(extra_args))) else self._new_values
        new, state = update(gradients, self.state.value(), parameters, extra_args)
        self.state.assign(state)
        self._assign_values(new)

    def _assign_values(self, new: Tree) -> None:
        jax.tree.map(lambda variable, value: variable._assign_alike(value), self._variables, new, is_leaf=nest.is_leaf)

    # With the state sharded over the replicas.

    def _is_sharded(self) -> bool:
        if self._strategy is None or not protocols.shards_optimizer_state(self._strategy):
            return False
        for variable in self._flat:
            if not isinstance(variable, MirroredVariable) or variable.distribute_strategy is not self._strategy:
                raise ValueError(
                    "An Optimizer whose state is sharded (shard_optimizer_state=True) takes variables that have a copy "
                    f"on each replica of its strategy, got {variable!r}."
                )
        return True

    def _apply_parts(
        self, replica_context: ReplicaContext, gradients: Tree, parameters: Tree, extra_args: dict[str, Tree]
    ) -> None:
        leaves, tree = jax.tree.flatten(gradients)
        leaves = [context.exchangeable(leaf, "apply_gradients", sparse=False) for leaf in leaves]
        if not isinstance(replica_context, SpmdContext):
            replica_context.merge_call(self._apply_compiled, (jax.tree.unflatten(tree, leaves), extra_args))
            return
        options = self._options or self._reducer.options
        totals = replica_context._reduce_to_parts(self._reduce_op, leaves, options)
        extra_args = extra_args | self._reduce_own(replica_context, extra_args)
        new, state = self._new_parts(totals, parameters, extra_args)
        self._sharded_state.put_parts(state)
        self._assign_values(jax.tree.unflatten(tree, self._reducer.gather_parts(new, options)))

    def _reduce_own(self, replica_context: ReplicaContext, extra_args: dict[str, Tree]) -> dict[str, Tree]:
        """Return the arguments that belong to a replica's gradients, reduced like these."""
        own = {name: jax.tree.map(jnp.asarray, extra_args[name]) for name in _OF_GRADIENTS if name in extra_args}
        reduce = functools.partial(replica_context._reduce_nest, self._reduce_op, options=self._options)
        reduced: dict[str, Tree] = reduce(own)
        if callable(value_fn := extra_args.get("value_fn")):
            reduced["value_fn"] = reduce_value_fn(value_fn, reduce)
        return reduced

    def _apply_compiled(self, strategy: StrategyLike, *args: Tree) -> None:
        """Applies the gradients of eager replicas, in cross-replica context, by one program for all replicas."""
        program, call = program_of(self._run_compiled, args, {})
        program.run(call, (), taped=False)

    def _new_parts(
        self, gradients: Sequence[jax.Array | sharding.Part], parameters: Tree, extra_args: dict[str, Tree]
    ) -> tuple[Sequence[sharding.Value], list[jax.Array]]:
        """Returns the new parameters and this replica's part of the new state; of gradients, its parts suffice."""
        count, sharded_state = self._reducer.mesh.size, self._sharded_state
        kinds = protocols.types_of(sharded_state)
        leaves, tree = jax.tree.flatten(parameters)
        wide = [jax.ShapeDtypeStruct(x.shape, (x.part if isinstance(x, sharding.Part) else x).dtype) for x in gradients]
        update = functools.partial(self._new_values, extra_args=extra_args)
        closed, (_, after) = jax.make_jaxpr(update, return_shape=True)(
            jax.tree.unflatten(tree, wide),
            protocols.tree_of(sharded_state).unflatten(kinds),
            jax.tree.unflatten(tree, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]),
        )
        if jax.tree.structure(after) != protocols.tree_of(sharded_state):
            raise ValueError(
                f"The optimizer's state had the structure {protocols.tree_of(sharded_state)}; an update gives "
                f"{jax.tree.structure(after)}."
            )
        cut = [protocols.storage_of(sharded_state).home.has_rows(i) for i in range(len(kinds))]
        state = [
            sharding.Part(x, kind.shape) if is_part else x
            for x, kind, is_part in zip(sharded_state.parts(), kinds, cut)
        ]
        known = [sharding.known_part(x, count) for x in leaves]
        results = sharded_eval.evaluate(closed, [*gradients, *state, *known], count)
        new_state = []
        for value, kind, is_part in zip(results[len(leaves) :], kinds, cut):
            if tuple(value.shape) != kind.shape:
                raise ValueError(
                    f"An array of the optimizer's state had shape {kind.shape}; an update gives {value.shape}."
                )
            new = sharding.own_part(value, count) if is_part else sharding.whole(value)
            new_state.append(new.astype(kind.dtype))
        return results[: len(leaves)], new_state

    @property
    def _sharded_state(self) -> ShardedVariable:
        assert isinstance(self.state, ShardedVariable)
        return self.state

    @property
    def _reducer(self) -> Reducer:
        """The reducer of the strategy, which is there where the state is sharded."""
        reducer = self._strategy.extended._reducer
        assert isinstance(reducer, Reducer)
        return reducer

    def _new_values(
        self, gradients: Tree, state: Tree, parameters: Tree, extra_args: dict[str, Tree]
    ) -> tuple[Tree, Tree]:
        updates, after = self._transformation.update(gradients, state, parameters, **extra_args)
        structure: object = jax.tree.structure(after)
        if structure == jax.tree.structure(state):  # otherwise it is refused when it is assigned
            after = jax.tree.map(_of_dtype, after, state)
        return jax.tree.map(lambda p, u: jnp.asarray(p + u).astype(p.dtype), parameters, updates), after

    def _in_order(self, gradients: Tree) -> Tree:
        """Returns the gradients in the structure of the variables' values, with zeros for None."""
        if isinstance(gradients, zip):
            gradients = list(gradients)
        pairs = (
            isinstance(gradients, (list, tuple))
            and gradients
            and all(isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], Variable) for pair in gradients)
        )
        if pairs:
            known = {id(variable) for variable in self._flat}
            for _, variable in gradients:
                if id(variable) not in known:
                    raise ValueError(f"{variable.name} is not among the variables of this optimizer.")
            by_id = {id(variable): gradient for gradient, variable in gradients}
            gradients = nest.map_structure(lambda v: by_id.get(id(v)), self._variables)
        if not any(leaf is None for leaf in nest.leaves(gradients)):
            return gradients
        parameters = self._parameters()
        try:
            return jax.tree.map(
                lambda g, p: jax.tree.map(jnp.zeros_like, p) if g is None else g,
                gradients,
                parameters,
                is_leaf=lambda x: x is None or isinstance(x, PerReplica),
            )
        except ValueError:
            raise _structure_error(gradients, parameters) from None


def _structure_error(gradients: Tree, parameters: Tree) -> ValueError:
    structures = jax.tree.structure(gradients), jax.tree.structure(parameters)
    return ValueError("The gradients' structure is {}, that of the variables' values is {}.".format(*structures))


_MEAN = "Optimizer(reduce_op='MEAN')"


def _leave_whole(kind: Kind, layout: PartitionSpec | None) -> PartitionSpec | None:
    """Return the layout of an array that is not divided among the replicas: as it is."""
    return layout


def _of_dtype(new: Leaf, old: jax.Array) -> jax.Array:
    """Returns a floating-point leaf of the state in its old dtype, which an update may have widened."""
    new = jnp.asarray(new)
    floating = all(jnp.issubdtype(x.dtype, jnp.floating) for x in (new, old))
    return jnp.asarray(new, old.dtype) if floating else new
