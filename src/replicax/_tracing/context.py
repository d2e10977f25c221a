"""Which strategy is current, and whether the program stands inside of one replica or above all of them.

Each thread has a stack of contexts. In a *cross-replica* context (a strategy's scope, a merge function) values
have a component per replica; in a *replica* context (the function given to `run`) they are one replica's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import numpy as np

from replicax._base import errors, nest, thread_state, tracebacks
from replicax._base.array_conversion import as_array
from replicax._base.indexed_slices import IndexedSlices, dense
from replicax._base.messages import received
from replicax._base.types import (
    CommunicationOptions,
    Leaf,
    ReduceOp,
    Tree,
    as_integer,
    as_options,
    as_reduce_op,
)
from replicax._data import calls
from replicax._tracing import autograph_switch
from replicax._tracing.protocols import StrategyLike as StrategyLike
from replicax._values import DistributedValues, PartRows, ReplicaMesh, is_array, warn_of_mean


def mesh_of(strategy: StrategyLike) -> ReplicaMesh | None:
    """Return the mesh of a strategy's replicas; None if it has none."""
    return strategy.extended._mesh


class ReplicaContext:
    """What the function given to `Strategy.run` can ask and do: who it is, and how to meet the other replicas.

    Get it with `get_replica_context()`. Every replica must make the same calls in the same order.

    >>> import replicax as rx
    >>> strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"])
    >>> def total(x):
    ...     return rx.get_replica_context().all_reduce("SUM", x)
    >>> x = strategy.experimental_distribute_values_from_function(lambda c: np.float32(c.replica_id_in_sync_group + 1))
    >>> [float(part) for part in strategy.run(total, args=(x,)).values]
    [3.0, 3.0]
    """

    _options = CommunicationOptions()  # of collectives where none are given
    _part_rows: PartRows | None = None  # of all replicas, where the numbers differ
    _own_rows = 0  # of this replica, where `_part_rows` is not None

    def __init__(self, strategy: StrategyLike, replica_id_in_sync_group: int | None):
        self._strategy = strategy
        self._replica_id: int | jax.Array | None = replica_id_in_sync_group

    @property
    def strategy(self) -> StrategyLike:
        """The strategy that runs the function.

        >>> import replicax as rx
        >>> strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"])
        >>> strategy.run(lambda: rx.get_replica_context().strategy) is strategy
        True
        """
        return self._strategy

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas run the function, on all workers together.

        >>> import replicax as rx
        >>> strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"])
        >>> strategy.run(lambda: rx.get_replica_context().num_replicas_in_sync)
        2
        """
        return self._strategy.num_replicas_in_sync

    @property
    def replica_id_in_sync_group(self) -> int | jax.Array:
        """This replica's number, from 0: an int32 scalar array inside of `run`, symbolic in compiled code.

        >>> import replicax as rx
        >>> strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"])
        >>> strategy.run(lambda: int(rx.get_replica_context().replica_id_in_sync_group)).values
        (0, 1)
        """
        assert self._replica_id is not None  # else a subclass finds it out
        return self._replica_id

    @property
    def devices(self) -> Sequence[str | Sequence[str]]:
        """The full names of the replica's devices.

        >>> import replicax as rx
        >>> strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"])
        >>> strategy.run(lambda: rx.get_replica_context().devices)
        [[PerReplica:{
          0: '/job:localhost/replica:0/task:0/device:GPU:0',
          1: '/job:localhost/replica:0/task:0/device:GPU:1'
        }]]
        """
        raise NotImplementedError

    @tracebacks.boundary
    def merge_call(
        self, merge_fn: Callable[..., Tree], args: Sequence[Tree] = (), kwargs: dict[str, Tree] | None = None
    ) -> Tree:
        """Calls `merge_fn(strategy, *args, **kwargs)` once, in cross-replica context, for all replicas together.

        Args:
            merge_fn: its arguments are the replicas' merged: leaves are `PerReplica`, unless all replicas
                passed the very same object.
            args, kwargs: this replica's.

        Returns:
            This replica's component of what `merge_fn` returned.

        Raises:
            RuntimeError: this is not the context of the running replica, or the replicas do not all meet.

        >>> import jax.numpy as jnp, replicax as rx
        >>> strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"])
        >>> def total(strategy, x):
        ...     return strategy.reduce("SUM", x, axis=None)
        >>> strategy.run(lambda: rx.get_replica_context().merge_call(total, (jnp.ones(2),))).tolist()
        [2.0, 2.0]
        """
        self._check_current()
        converted = autograph_switch.converted(merge_fn)

        def merge(*args: Tree, **kwargs: Tree) -> Tree:
            try:
                return converted(*args, **kwargs)
            except StopIteration as error:
                calls.refuse_stop(error, "`merge_fn` of `merge_call`", merge_fn)
                raise

        return self._merge(merge, tuple(args), kwargs or {}, ("merge_call",))

    @tracebacks.boundary
    def all_reduce(self, reduce_op: ReduceOp | str, value: Tree, options: CommunicationOptions | None = None) -> Tree:
        """Returns the sum or the mean of all replicas' values, on every replica.

        Args:
            reduce_op: `ReduceOp` or its name.
            value: a nest of arrays, variables or `IndexedSlices`, of equal shapes and dtypes on all replicas.
                All tensors of one dtype are reduced together, in one collective. None in a nest stays None.
            options: see `CommunicationOptions`.

        Returns:
            The same nest. The mean of integers is floating point. It is differentiable: the gradient is the
            same `all_reduce` of the incoming gradients. A value that is the very same object on every replica
            (captured, or passed to `run` undistributed) counts as one value and is returned as it is.

        Raises:
            InvalidArgumentError: shapes or dtypes differ between the replicas.
            TypeError: a leaf is no array.

        >>> import jax.numpy as jnp, replicax as rx
        >>> strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"])
        >>> result = strategy.run(lambda: rx.get_replica_context().all_reduce("SUM", jnp.ones(2)))
        >>> [part.tolist() for part in result.values]
        [[2.0, 2.0], [2.0, 2.0]]
        """
        op, options = as_reduce_op(reduce_op), as_options(options, self._options)
        self._check_current()
        if op is ReduceOp.MEAN and self._part_rows is not None:
            warn_of_mean([self._part_rows], "all_reduce('MEAN', ...)")
        return self._reduce_nest(op, value, options)

    def _reduce_nest(self, op: ReduceOp, value: Tree, options: CommunicationOptions | None) -> Tree:
        """Returns what `all_reduce` does, without its warning."""
        leaves = exchangeable_leaves(value, "all_reduce")
        results = iter(self._all_reduce(op, leaves, options or self._options) if leaves else [])
        return nest.map_structure(lambda _: next(results), value)

    @tracebacks.boundary
    def all_gather(self, value: Tree, axis: int, options: CommunicationOptions | None = None) -> Tree:
        """Returns all replicas' values, concatenated along `axis` in replica order, on every replica.

        Args:
            value: a nest of arrays of at least one dimension. Sizes along `axis` may differ between the replicas, as
                those of an uneven batch's parts do; every other dimension must agree. None in a nest stays None.
            axis: negative ones count from the end.
            options: see `CommunicationOptions`.

        Raises:
            InvalidArgumentError: scalars, an axis out of range, or shapes or dtypes that do not fit.
            TypeError: a leaf is no array of a numeric type, or `axis` is no int.

        >>> import replicax as rx
        >>> strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"])
        >>> def fn():
        ...     context = rx.get_replica_context()
        ...     return context.all_gather(context.replica_id_in_sync_group[None] + 7, axis=0)
        >>> [part.tolist() for part in strategy.run(fn).values]
        [[7, 8], [7, 8]]
        """
        options, axis = as_options(options, self._options), as_integer("axis", axis)
        self._check_current()
        leaves = exchangeable_leaves(value, "all_gather", sparse=False)
        results = iter(self._all_gather(leaves, axis, options) if leaves else [])
        return nest.map_structure(lambda _: next(results), value)

    def _total_size(self, size: int) -> int | jax.Array:
        """Returns the sum of the sizes that the replicas pass."""
        return size if self.num_replicas_in_sync == 1 else self.all_reduce("SUM", np.float32(size))

    def _share_of_rows(self) -> float | jax.Array | None:
        """Returns this replica's share of the rows; None if all have as many, or if their numbers are not known."""
        rows = self._part_rows
        if rows is None or (rows.counts is None and not rows.padded):
            return None
        total = sum(rows.counts) if rows.counts else self.all_reduce("SUM", np.float32(self._own_rows))
        return self._own_rows / total

    # How the replicas meet: one implementation for each way to run.

    def _merge(
        self, fn: Callable[..., Tree], args: tuple[Tree, ...], kwargs: dict[str, Tree], tag: tuple[object, ...]
    ) -> Tree:
        raise NotImplementedError

    def _all_reduce(self, op: ReduceOp, leaves: list[Leaf], options: CommunicationOptions) -> list[Leaf]:
        raise NotImplementedError

    def _all_gather(self, leaves: list[Leaf], axis: int, options: CommunicationOptions) -> list[Leaf]:
        raise NotImplementedError

    def _check_current(self) -> None:
        current = get_replica_context()
        if current is None:
            raise RuntimeError(errors.REPLICA_NEEDED)
        if current.strategy is not self._strategy:
            raise RuntimeError(
                f"Mismatching tf.distribute.Strategy objects: {current.strategy!r} is not {self._strategy!r}."
            )


_NOT_NUMERIC = "OSUMmV"


def exchangeable(leaf: Leaf, what: str, sparse: bool = True) -> Leaf:
    """Returns a leaf that replicas can exchange, a variable read; raises an error that names the type otherwise."""
    if isinstance(leaf, IndexedSlices):
        return leaf if sparse else dense(leaf, what)
    if getattr(leaf, "_replicax_variable", False):
        leaf = leaf.read_value()
    if isinstance(leaf, DistributedValues):
        raise TypeError(
            f"{what} takes this replica's own value, got a {type(leaf).__name__} value. Pass it to the replica "
            "function through `args` of `strategy.run`, where it becomes the replica's component."
        )
    if not is_array(leaf):
        raise TypeError(f"{what} takes arrays, got {received(leaf)}. Make an array of it: jnp.asarray(...).")
    if isinstance(leaf, (np.ndarray, np.generic)):
        if leaf.dtype.kind in _NOT_NUMERIC:
            error = TypeError if what.endswith("gather") else errors.InvalidArgumentError
            raise error(f"{what} takes numeric arrays, got dtype {leaf.dtype}.")
        leaf = as_array(leaf)
    if what.endswith("gather") and leaf.dtype == bool:
        raise TypeError(f"{what} takes floating and integer arrays, got dtype bool.")
    return leaf


def exchangeable_leaves(value: Tree, what: str, sparse: bool = True) -> list[Leaf]:
    """Return the leaves of a structure, each as `exchangeable` returns it, and None for each empty subtree.

    Raise `TypeError` for a bare None, which more likely comes from a function without `return`.
    """
    if value is None:
        exchangeable(value, what, sparse)
    return [leaf if leaf is None else exchangeable(leaf, what, sparse) for leaf in nest.leaves(value)]


_Entry = tuple[StrategyLike, ReplicaContext | None]  # the current strategy, and the replica context in a replica


_state = thread_state.current
_default: _Entry | None = None


def set_default_context(replica_context: ReplicaContext) -> None:
    """Plugs in the context outside of any scope: that of the only replica of the default strategy."""
    global _default
    _default = replica_context.strategy, replica_context


def _default_entry() -> _Entry:
    if _default is None:
        raise errors.not_plugged_in("The default strategy")
    return _default


def default_strategy() -> StrategyLike:
    """Returns the strategy that is current outside of any scope."""
    return _default_entry()[0]


def current() -> _Entry:
    """Returns the current strategy, and the replica context in a replica."""
    stack = _state.contexts
    return stack[-1] if stack else _state.default_context or _default_entry()


def in_replica_function() -> bool:
    """Returns whether a replica function of a strategy runs in this thread."""
    return bool(_state.contexts) and _state.contexts[-1][1] is not None


class entered:
    """A context manager: this strategy is current, in this replica context or, with None, in cross-replica context."""

    def __init__(self, strategy: StrategyLike, replica_context: ReplicaContext | None):
        self._entry = (strategy, replica_context)

    def __enter__(self) -> StrategyLike:
        _state.contexts.append(self._entry)
        return self._entry[0]

    def __exit__(self, *_: object) -> None:
        _state.contexts.pop()


def get_strategy() -> StrategyLike:
    """Returns the current strategy, as modules below the strategies see it; users call `_default.get_strategy`."""
    return current()[0]


def has_strategy() -> bool:
    """Returns whether a strategy other than the default one is current.

    >>> import replicax as rx
    >>> with rx.MirroredStrategy(["GPU:0", "GPU:1"]).scope():
    ...     inside = rx.has_strategy()
    >>> inside, rx.has_strategy()
    (True, False)
    """
    return current()[0] is not default_strategy()


def get_replica_context() -> ReplicaContext | None:
    """Returns the replica context that the program is in, None in cross-replica context.

    >>> import replicax as rx
    >>> strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"])
    >>> with strategy.scope():
    ...     print(rx.get_replica_context())
    None
    >>> strategy.run(lambda: rx.get_replica_context() is None)
    False
    """
    return current()[1]


def in_cross_replica_context() -> bool:
    """Returns whether the program is above the replicas: in a strategy's scope or a merge function.

    >>> import replicax as rx
    >>> strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"])
    >>> with strategy.scope():
    ...     inside = rx.in_cross_replica_context()
    >>> inside, strategy.run(rx.in_cross_replica_context)
    (True, False)
    """
    return current()[1] is None


def experimental_set_strategy(strategy: StrategyLike | None) -> None:
    """Makes a strategy current without a `with` block, until the next call; None takes it away.

    Raises:
        RuntimeError: inside of a strategy's scope or of `run`.

    >>> import replicax as rx
    >>> rx.experimental_set_strategy(rx.MirroredStrategy(["GPU:0", "GPU:1"]))
    >>> len(rx.Variable(1.0).values)
    2
    >>> rx.experimental_set_strategy(None)
    """
    if _state.contexts:
        raise RuntimeError("Must not be called inside a `tf.distribute.Strategy` scope.")
    _state.default_context = None if strategy is None or strategy is default_strategy() else (strategy, None)


def require_cross_replica(strategy: StrategyLike, message: str = errors.CROSS_REPLICA_NEEDED) -> None:
    """Raises `RuntimeError` in a replica, or in the scope of another strategy."""
    strategy_here, replica_context = current()
    if default_strategy() in (strategy_here, strategy):
        return
    if strategy_here is not strategy:
        raise errors.mixing(strategy_here, strategy)
    if replica_context is not None:
        raise RuntimeError(message)
