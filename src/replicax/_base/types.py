"""Enumerations and option records of the API, without behaviour of their own, and names of types."""

from __future__ import annotations

import dataclasses
import enum
import numbers
import operator
from typing import Any, NamedTuple, SupportsIndex, TypeAlias, TypeVar

from replicax._base.messages import received

_T = TypeVar("_T")
_E = TypeVar("_E", bound=enum.Enum)

# A user's pytree: any nesting of containers that JAX knows, with anything as its leaves.
Tree: TypeAlias = Any
# A leaf of a user's pytree: an array, a number, a string, or an object that JAX does not look into.
Leaf: TypeAlias = Any
# The arguments of a user's function.
Args: TypeAlias = tuple[Tree, ...]
Kwargs: TypeAlias = dict[str, Tree]


class ReduceOp(enum.Enum):
    """The reduction of the replicas' values to one.

    Wherever a `ReduceOp` is expected, its name in any case (`"sum"`, `"MEAN"`) does as well.

    >>> import replicax as rx
    >>> rx.ReduceOp("SUM")
    <ReduceOp.SUM: 'SUM'>
    """

    SUM = "SUM"
    MEAN = "MEAN"

    @staticmethod
    def from_variable_aggregation(aggregation: VariableAggregation) -> ReduceOp:
        """Returns the `ReduceOp` of an aggregation; raises `ValueError` for NONE and ONLY_FIRST_REPLICA.

        >>> import replicax as rx
        >>> rx.ReduceOp.from_variable_aggregation(rx.VariableAggregation.MEAN)
        <ReduceOp.MEAN: 'MEAN'>
        """
        if aggregation == VariableAggregation.SUM:
            return ReduceOp.SUM
        if aggregation == VariableAggregation.MEAN:
            return ReduceOp.MEAN
        raise ValueError(
            f"Could not convert from `tf.VariableAggregation` {aggregation} to`tf.distribute.ReduceOp` type"
        )


def as_reduce_op(reduce_op: object) -> ReduceOp:
    """Returns a `ReduceOp` that is given as such, or by its name in any case."""
    if isinstance(reduce_op, ReduceOp):
        return reduce_op
    if isinstance(reduce_op, str):
        try:
            return ReduceOp(reduce_op.upper())
        except ValueError as error:  # whose text is TensorFlow's
            error.add_note("Pass `ReduceOp.SUM` or `ReduceOp.MEAN`, or their names 'SUM' and 'MEAN'.")
            raise
    raise AssertionError(
        f"reduce_op must be a ReduceOp or one of the names 'SUM' and 'MEAN', got {received(reduce_op)}."
    )


def check_reduction_axis(axis: object) -> None:
    """Raises `TypeError` for what is not None, an int or a tuple of ints."""
    for one in axis if isinstance(axis, tuple) else () if axis is None else (axis,):
        if isinstance(one, bool) or not isinstance(one, numbers.Integral):
            raise TypeError(f"`axis` is None, an int or a tuple of ints, got {received(axis)}.")


class VariableSynchronization(enum.Enum):
    """When the copies of a variable are brought into step.

    AUTO: as the strategy sees fit (ON_WRITE). ON_WRITE: at each assignment. ON_READ: each replica keeps
    a value of its own, and they are aggregated when the variable is read outside of `run`. NONE: never;
    strategies of several devices refuse it.

    >>> import replicax as rx
    >>> strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"])
    >>> on_read, total = rx.VariableSynchronization.ON_READ, rx.VariableAggregation.SUM
    >>> with strategy.scope():
    ...     count = rx.Variable(0, synchronization=on_read, aggregation=total)
    >>> _ = strategy.run(lambda: count.assign_add(1))
    >>> int(count)
    2
    """

    AUTO = 0
    NONE = 1
    ON_WRITE = 2
    ON_READ = 3


class VariableAggregation(enum.Enum):
    """The reduction of the values that replicas assign to one variable: none, sum, mean, or the first replica's.

    >>> import jax.numpy as jnp, replicax as rx
    >>> strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"])
    >>> with strategy.scope():
    ...     total = rx.Variable(0.0, aggregation=rx.VariableAggregation.SUM)
    >>> _ = strategy.run(lambda: total.assign_add(jnp.ones(())))
    >>> float(total)
    2.0
    """

    NONE = 0
    SUM = 1
    MEAN = 2
    ONLY_FIRST_REPLICA = 3

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


# The class prints under the name it has in TensorFlow 2, where VariableAggregation is the v1 enumeration.
VariableAggregation.__name__ = "VariableAggregationV2"


def as_variable_option(kind: type[_E], value: object, name: str | None) -> _E:
    """Returns the member that is `value` or has it as its number, AUTO or NONE for None.

    Raises:
        ValueError: there is no such member; the message names the variable.
    """
    try:
        return kind(0 if value is None else value)
    except ValueError:
        mode = kind.__name__.removeprefix("Variable").removesuffix("V2").lower()
        raise ValueError(f"Invalid variable {mode} mode: {value} for variable: {name}") from None


class RunOptions(NamedTuple):
    """Options of `Strategy.run`. They are accepted for compatibility; XLA's static shapes leave them no effect.

    >>> import replicax as rx
    >>> strategy = rx.OneDeviceStrategy("cpu:0")
    >>> strategy.run(lambda: 1, options=rx.RunOptions(experimental_enable_dynamic_batch_size=False))
    1
    """

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False
    experimental_xla_options: object = None


class InputReplicationMode(enum.Enum):
    """The number of calls of `dataset_fn`: one for each worker or one for each replica.

    >>> import replicax as rx
    >>> options = rx.InputOptions(experimental_replication_mode=rx.InputReplicationMode.PER_REPLICA)
    >>> options.experimental_replication_mode.name
    'PER_REPLICA'
    """

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


class _InputOptions(NamedTuple):
    experimental_fetch_to_device: bool
    experimental_replication_mode: InputReplicationMode
    experimental_place_dataset_on_device: bool
    experimental_per_replica_buffer_size: int
    pad_last_batch: bool


class InputOptions(_InputOptions):
    """Options of a distributed dataset: how its elements come to the devices.

    Args:
        experimental_fetch_to_device: whether elements are moved to the replicas' devices (default) or stay
            on the host.
        experimental_replication_mode: with `distribute_datasets_from_function`, one dataset for each worker
            or for each replica.
        experimental_place_dataset_on_device: accepted for compatibility; datasets run on the host.
        experimental_per_replica_buffer_size: how many batches are prefetched to the devices; a few more where they are
            small and their rows lie in arrays, so that nobody sees it.
        pad_last_batch: whether the replicas' parts of smaller batches are padded to the size of the others on the
            devices, so that a compiled function has one program for all of them. Results are those without padding.
            See `replicax docs explanation/uneven-batches`.

    >>> import replicax as rx
    >>> strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"])
    >>> options = rx.InputOptions(pad_last_batch=True)
    >>> batches = strategy.experimental_distribute_dataset(rx.data.Dataset.range(3).batch(2), options)
    >>> [[part.tolist() for part in batch.values] for batch in batches]
    [[[0], [1]], [[2], []]]
    """

    __slots__ = ()

    def __new__(
        cls,
        experimental_fetch_to_device: bool | None = None,
        experimental_replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER,
        experimental_place_dataset_on_device: bool = False,
        experimental_per_replica_buffer_size: int = 1,
        pad_last_batch: bool = False,
    ) -> InputOptions:
        fetch = True if experimental_fetch_to_device is None else experimental_fetch_to_device
        return super().__new__(
            cls,
            fetch,
            experimental_replication_mode,
            experimental_place_dataset_on_device,
            experimental_per_replica_buffer_size,
            as_flag("pad_last_batch", pad_last_batch),
        )

    def __repr__(self) -> str:
        """Returns TensorFlow's text, which has no `pad_last_batch`, where that has its default."""
        shown = {name: value for name, value in self._asdict().items() if name != "pad_last_batch" or value}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


def as_input_options(options: object) -> InputOptions:
    """Returns `options`, or the defaults for None; raises `TypeError` for what is no `InputOptions`.

    TensorFlow's own ones are taken too, which have no `pad_last_batch`.
    """
    if options is None:
        return InputOptions()
    if isinstance(options, InputOptions):
        return options
    found = {name: getattr(options, name) for name in InputOptions._fields if hasattr(options, name)}
    if set(InputOptions._fields) - set(found) - {"pad_last_batch"}:
        raise TypeError(f"`options` is an `InputOptions` or None, got {received(options)}.")
    return InputOptions(**found)


class CommunicationImplementation(enum.Enum):
    """The collective implementation to ask for. XLA chooses by itself; the members are accepted as hints.

    >>> import replicax as rx
    >>> rx.CommunicationOptions(implementation=rx.CommunicationImplementation.NCCL).implementation.name
    'NCCL'
    """

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


def as_integer(argument: str, value: object) -> int:
    """Returns an argument that is an integer as an int; raises `TypeError` for anything else."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError(f"`{argument}` is an int, got {received(value)}.")
    return operator.index(value)


class CommunicationOptions:
    """Options of one collective.

    Args:
        bytes_per_pack: how many bytes of small tensors one all-reduce carries at the most. 0 packs tensors as it suits
            the devices. `replicax docs explanation/communication#the-number-of-all-reduces` has the sizes.
        timeout_seconds: how long a step may wait for another process before all of them report where they stand and
            end; None for no limit.
        implementation: a `CommunicationImplementation` or its name.
        reduction_dtype: bfloat16 or float16, to send and add up wider floating point numbers in half the bytes or
            less; they come back in their own dtype. None adds up every dtype as it is. It holds for `all_reduce`,
            `reduce_to` and what makes use of them, such as optimizers; what `Strategy.reduce` and variables'
            aggregation give stays exact. `replicax docs explanation/communication#the-dtype-of-the-reduction` has a
            bound of the error.

    Raises:
        ValueError: `bytes_per_pack` is negative, the implementation is unknown, or `reduction_dtype` is another one.

    >>> import replicax as rx
    >>> rx.CommunicationOptions(bytes_per_pack=1 << 20).bytes_per_pack
    1048576
    >>> rx.CommunicationOptions(reduction_dtype="bfloat16").reduction_dtype
    dtype(bfloat16)
    """

    def __init__(
        self,
        bytes_per_pack: int = 0,
        timeout_seconds: float | None = 300.0,
        implementation: CommunicationImplementation | str = CommunicationImplementation.AUTO,
        reduction_dtype: Any = None,
    ):
        if (
            timeout_seconds is not None
            and type(timeout_seconds) is not int
            and not hasattr(timeout_seconds, "is_integer")
        ):
            raise TypeError(f"`timeout_seconds` is a number of seconds or None, got {timeout_seconds!r}.")
        if as_integer("bytes_per_pack", bytes_per_pack) < 0:
            raise ValueError(f"Argument `bytes_per_pack` must be >=0, Received {bytes_per_pack}.")
        if reduction_dtype is not None:
            import jax.numpy as jnp

            name = getattr(reduction_dtype, "name", None) or getattr(reduction_dtype, "__name__", reduction_dtype)
            if name not in ("bfloat16", "float16"):
                raise ValueError(f"`reduction_dtype` is 'bfloat16' or 'float16', or None, got {reduction_dtype!r}.")
            reduction_dtype = jnp.dtype(name)
        if isinstance(implementation, str):
            implementation = CommunicationImplementation(implementation.upper())
        self.bytes_per_pack = bytes_per_pack
        self.timeout_seconds = timeout_seconds
        self.implementation = implementation
        self.reduction_dtype = reduction_dtype

    def __repr__(self) -> str:
        narrow = "" if self.reduction_dtype is None else f", reduction_dtype={self.reduction_dtype}"
        return (
            f"Options(bytes_per_pack={self.bytes_per_pack},timeout_seconds={self.timeout_seconds}, "
            f"implementation={self.implementation}{narrow})"
        )


# The name under which it prints, as TensorFlow's does.
CommunicationOptions.__name__ = "Options"


def exact(options: CommunicationOptions) -> CommunicationOptions:
    """Returns the same options without `reduction_dtype`."""
    return CommunicationOptions(options.bytes_per_pack, options.timeout_seconds, options.implementation)


def as_options(options: object, default: _T) -> CommunicationOptions | _T:
    """Returns `options` if they are CommunicationOptions, the default for None; raises `TypeError` for others."""
    if options is None or isinstance(options, CommunicationOptions):
        return default if options is None else options
    raise TypeError(
        "Options of a collective are CommunicationOptions, such as rx.CommunicationOptions(bytes_per_pack=1 << 20), "
        f"got {received(options)}."
    )


def as_flag(name: str, value: object) -> bool:
    """Returns `value` as a bool if it is True or False, NumPy's too; raises `TypeError` for anything else."""
    if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):
        return bool(value)
    raise TypeError(f"`{name}` is True or False, got {received(value)}.")


@dataclasses.dataclass(frozen=True, eq=False)
class ValueContext:
    """The argument of `value_fn` of `experimental_distribute_values_from_function`: which replica it is for.

    Attributes:
        replica_id_in_sync_group: the replica to fill, from 0.
        num_replicas_in_sync: the number of replicas.

    >>> import replicax as rx
    >>> rx.ValueContext(2, 4)
    tf.distribute.ValueContext(replica id 2,  total replicas in sync: 4)
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1

    def __repr__(self) -> str:
        return (
            f"tf.distribute.ValueContext(replica id {self.replica_id_in_sync_group},  "
            f"total replicas in sync: {self.num_replicas_in_sync})"
        )


@dataclasses.dataclass(frozen=True, eq=False)
class InputContext:
    """The argument of `dataset_fn` of `distribute_datasets_from_function`: which part of the input it makes.

    Attributes:
        num_input_pipelines: the number of pipelines in all.
        input_pipeline_id: the number of this pipeline, from 0.
        num_replicas_in_sync: the number of replicas in all.

    >>> import replicax as rx
    >>> rx.InputContext(num_input_pipelines=2, input_pipeline_id=1, num_replicas_in_sync=4)
    tf.distribute.InputContext(input pipeline id 1, total: 2)
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Returns the batch size of one replica; raises `ValueError` if the replicas do not divide the global one.

        >>> import replicax as rx
        >>> rx.InputContext(num_replicas_in_sync=4).get_per_replica_batch_size(64)
        16
        """
        if global_batch_size % self.num_replicas_in_sync:
            raise ValueError(
                f"The `global_batch_size` {global_batch_size} is not divisible by "
                f"`num_replicas_in_sync` {self.num_replicas_in_sync}"
            )
        return global_batch_size // self.num_replicas_in_sync

    def __repr__(self) -> str:
        return (
            f"tf.distribute.InputContext(input pipeline id {self.input_pipeline_id}, total: {self.num_input_pipelines})"
        )


class AutoShardPolicy(enum.IntEnum):
    """The policy by which input is divided among workers. Each but OFF and FILE also keeps the batches' boundaries.

    >>> import replicax as rx
    >>> options = rx.data.Options()
    >>> options.experimental_distribute.auto_shard_policy = rx.data.AutoShardPolicy.DATA
    >>> rx.data.Dataset.range(8).with_options(options).options().experimental_distribute.auto_shard_policy.name
    'DATA'
    """

    OFF = -1
    AUTO = 0
    FILE = 1
    DATA = 2
    HINT = 3


class StepContext:
    """The context of `StrategyExtended.experimental_run_steps_on_iterator`."""

    def __init__(self) -> None:
        self.last_step_outputs: dict[str, Tree] = {}

    def set_last_step_output(self, name: str, output: Tree, reduce_op: ReduceOp | str | None = None) -> None:
        """Keeps an output under this name."""
        self.last_step_outputs[name] = output
