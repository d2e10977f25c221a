"""Exceptions of replicax. The type names the phase; each is also a builtin type, so that either can be caught."""

from __future__ import annotations

from collections.abc import Sequence


class ReplicaxError(Exception):
    """The base of replicax's own exceptions. Those that TensorFlow has too can be made of its arguments as well.

    >>> import replicax as rx
    >>> try:
    ...     rx.OneDeviceStrategy("GPU:99")
    ... except rx.ReplicaxError as error:
    ...     print(type(error).__name__)
    DeviceError
    """

    def __init__(self, *args: object) -> None:
        if len(args) in (3, 4) and not isinstance(args[0], (int, str)) and isinstance(args[2], str):
            args = args[2:3]  # TensorFlow's arguments: a node, an operation, the message and sometimes a code
        super().__init__(*args)

    @property
    def message(self) -> str:
        """The text of the error.

        >>> import replicax as rx
        >>> rx.DeviceError("no such device").message
        'no such device'
        """
        return str(self)


class InvalidArgumentError(ReplicaxError, ValueError):
    """Values that do not fit together: shapes, dtypes or an axis out of range.

    >>> import replicax as rx
    >>> try:
    ...     rx.data.Dataset.range(3).shard(num_shards=2, index=5)
    ... except rx.InvalidArgumentError as error:
    ...     print(error)
    index must be between 0 and 1 = num_shards - 1, got 5.
    """

    error_code = 3


class InvalidOperandError(InvalidArgumentError, TypeError):
    """Operands that JAX refuses: shapes that do not fit together, an axis out of range, a value of all replicas."""


class OutOfRangeError(ReplicaxError, IndexError):
    """An iterator has no more elements.

    >>> import replicax as rx
    >>> try:
    ...     iter(rx.data.Dataset.range(0)).get_next()
    ... except rx.OutOfRangeError as error:
    ...     print(error)
    End of sequence
    """

    error_code = 11


class DataLossError(ReplicaxError, OSError):
    """A file is damaged, or of something else than it is read for.

    >>> import tempfile, replicax as rx
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     _ = file.write(b"this is no TFRecord file"), file.flush()
    ...     try:
    ...         list(rx.data.TFRecordDataset(file.name))
    ...     except rx.DataLossError as error:
    ...         print(type(error).__name__)
    DataLossError
    """

    error_code = 15


class CancelledError(ReplicaxError, RuntimeError):
    """Work was given up before it was done, for another error or because it was asked for.

    >>> import replicax as rx
    >>> def result_of_a_step():
    ...     raise rx.CancelledError("The function was cancelled before it ran, since another one failed.")
    >>> try:
    ...     result_of_a_step()
    ... except rx.CancelledError as error:
    ...     print(error)
    The function was cancelled before it ran, since another one failed.
    """

    error_code = 1


class DeadlineExceededError(ReplicaxError, TimeoutError):
    """No answer came in time."""

    error_code = 4


class NotFoundError(ReplicaxError, FileNotFoundError):
    """A file or another object does not exist."""

    error_code = 5


class FailedPreconditionError(ReplicaxError, RuntimeError):
    """Something is not in the state that a call requires."""

    error_code = 9


class InternalError(ReplicaxError, RuntimeError):
    """A task or a job of a cluster is not what another one takes it for."""

    error_code = 13


class UnavailableError(ReplicaxError, ConnectionError):
    """Another process is gone or does not answer.

    >>> import replicax as rx
    >>> def read_from_server():
    ...     raise rx.UnavailableError("The server at host:8470 does not answer.")
    >>> try:
    ...     read_from_server()
    ... except ConnectionError as error:  # the builtin type catches it too
    ...     print(type(error).__name__)
    UnavailableError
    """

    error_code = 14


class DeviceError(ReplicaxError, ValueError, RuntimeError):
    """A device that is not there, is named twice, or is asked for too late.

    >>> import replicax as rx
    >>> try:
    ...     rx.OneDeviceStrategy("TPU:0")
    ... except rx.DeviceError as error:
    ...     print(str(error).partition(".")[0])
    There is no device TPU:0
    """


class ReplicaError(ReplicaxError, RuntimeError):
    """Replicas went different ways: they met in different calls, or one returned while others waited.

    >>> import jax.numpy as jnp, replicax as rx
    >>> strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"])
    >>> def fn():
    ...     context = rx.get_replica_context()
    ...     if int(context.replica_id_in_sync_group) == 0:  # the other replica does not come
    ...         context.all_reduce("SUM", jnp.ones(2))
    >>> try:
    ...     strategy.run(fn)
    ... except rx.ReplicaError as error:
    ...     print(type(error).__name__)
    ReplicaError
    """


class StepError(ReplicaxError, RuntimeError):
    """A variable has no value: the step that was to assign it failed, for its cause.

    >>> import replicax as rx
    >>> def read_variable():
    ...     raise rx.StepError("w:0 has no value: train_step, which assigns it, failed.")
    >>> try:
    ...     read_variable()
    ... except rx.StepError as error:
    ...     print(error)
    w:0 has no value: train_step, which assigns it, failed.
    """


class JobError(ReplicaxError, RuntimeError):
    """The processes of a job did not come together: one is missing, or does not fit.

    >>> import os, replicax as rx
    >>> from unittest import mock
    >>> try:
    ...     with mock.patch.dict(os.environ, REPLICAX_JOB_SECRET="short"):
    ...         rx.coordinator.Server.create_local_server()
    ... except rx.JobError as error:
    ...     print(str(error).partition(".")[0])
    The secret of REPLICAX_JOB_SECRET has 5 bytes, and can be guessed: it needs at least 16
    """


class FailedElsewhere(JobError):
    """A step failed on another worker, so that it counts for none."""


class CheckpointError(ReplicaxError, RuntimeError):
    """A checkpoint is damaged, or of another format, or could not be written by the worker that has to.

    >>> import os, tempfile, replicax as rx
    >>> checkpoint = rx.train.Checkpoint(v=rx.Variable(1.0))
    >>> path = checkpoint.write(tempfile.mkdtemp() + "/ckpt")
    >>> for name in os.listdir(path):
    ...     if os.path.isfile(os.path.join(path, name)):
    ...         os.truncate(os.path.join(path, name), 0)
    >>> try:
    ...     checkpoint.read(path)
    ... except rx.CheckpointError as error:
    ...     print(type(error).__name__)
    CheckpointError
    """


class CheckpointFailedElsewhere(CheckpointError, FailedElsewhere):
    """A checkpoint was not written or restored because another worker could not, which raises its own error."""


CROSS_REPLICA_NEEDED = "Method requires being in cross-replica context, use get_replica_context().merge_call()"
REPLICA_NEEDED = "Need to be inside `call_for_each_replica()`"
NOT_A_TENSOR = (
    "It looks like you are using a PerReplica object while not inside a replica context, which is not supported. "
    "Try running your op or function inside a replica context by using `strategy.run`, or join the parts: "
    "`strategy.gather(value, axis=0)`."
)
MERGE_IN_TRACE = (
    "`merge_call` called while defining a new graph or a tf.function. This can often happen if the function `fn` "
    "passed to `strategy.run()` contains a nested `@tf.function`, and the nested `@tf.function` contains a "
    "synchronization point, such as aggregating gradients (e.g, optimizer.apply_gradients), or if the function `fn` "
    "uses a control flow statement which contains a synchronization point in the body. In replicax this holds only "
    "while replicas run eagerly, which they do outside of `rx.function` and for some batches whose parts differ in "
    "size. In compiled replicas such functions, branches and loops may contain synchronization points."
)


def listed(words: Sequence[str]) -> str:
    """Returns words as one text.

    >>> listed(["worker 1", "worker 2", "worker 3"])
    'worker 1, worker 2 and worker 3'
    """
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def mixing(one: object, other: object) -> RuntimeError:
    """Returns the error for a strategy used where another one is current."""
    return RuntimeError(f"Mixing different tf.distribute.Strategy objects: {one!r} is not {other!r}")


def not_plugged_in(what: str) -> RuntimeError:
    """Returns the error for modules of replicax that were imported without those that plug into them."""
    return RuntimeError(
        f"{what} is missing: modules of replicax whose names begin with an underscore were imported by themselves. Use "
        "a name of `replicax` first, such as `replicax.function`, which puts its parts together."
    )
