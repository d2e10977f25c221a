"""Variables on parameter servers, and functions that workers run when they are free."""

from __future__ import annotations

import contextlib
import functools
import numbers
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from numpy.typing import DTypeLike

from replicax._base import devices as _devices
from replicax._base import doc_pages, nest
from replicax._base.specs import TensorShape, as_dtype
from replicax._base.types import Args, InputContext, InputOptions, Kwargs, Tree
from replicax._cluster.resolver import ClusterResolver
from replicax._cluster.spec import ClusterSpec
from replicax._collectives import cross_device_ops
from replicax._input.distributed_dataset import for_workers
from replicax._input.placement import Placement
from replicax._parameter_server.cluster import Cluster, aside
from replicax._parameter_server.coordinator import ClusterCoordinator
from replicax._parameter_server.places import Near, Part, initial_value_of_parts
from replicax._parameter_server.planner import RunsHere
from replicax._parameter_server.variables import ServedVariable, ShardedVariable
from replicax._strategies.one_device import OneDeviceContext, OneDeviceStrategy
from replicax._strategies.single_replica import SingleReplicaExtended
from replicax._strategies.strategy import Strategy
from replicax._tracing import context as _context
from replicax._tracing.context import StrategyLike
from replicax._tracing.protocols import storage_of, tree_of
from replicax._values import ReplicaMesh
from replicax._variables import creators
from replicax._variables.leaves import ARRAY, initial_tree
from replicax._variables.variable import Variable

_JOBS = ("chief", "worker", "evaluator", "ps", None)
_SERVES = "Have it call `rx.coordinator.Server(resolver.cluster_spec(), resolver.task_type, resolver.task_id).join()`"
_INSTEAD = {  # tasks that must not coordinate, and what they do
    "worker": _SERVES,
    "ps": _SERVES,
    "evaluator": "Have it evaluate each checkpoint of `rx.train.checkpoints_iterator` under another strategy, and end",
}


class ParameterServerExtended(SingleReplicaExtended):
    """The extended methods of `ParameterServerStrategy`."""

    def __init__(
        self,
        container_strategy: StrategyLike,
        resolver: ClusterResolver,
        cluster: Cluster,
        partitioner: Callable[..., Sequence[int]] | None,
    ):
        super().__init__(container_strategy)
        self._mesh = ReplicaMesh([_devices.find_device("CPU:0")])
        self._placement = Placement(self._mesh)
        self._cluster_resolver = resolver
        self._cluster, self._partitioner = cluster, partitioner
        self._near: list[Near] = []

    def _device_text(self) -> str:
        return f"{len(self._cluster.worker_addresses)} workers, {len(self._cluster.server_addresses)} parameter servers"

    @property
    def worker_devices(self) -> Sequence[str]:
        return ("/device:CPU:0",)

    @property
    def parameter_devices(self) -> Sequence[str]:
        return ("/job:chief/replica:0/task:0/device:CPU:0",)

    def _call(self, fn: Callable[..., Tree], args: Args, kwargs: Kwargs) -> Tree:
        with _context.entered(self._container, OneDeviceContext(self._container, None)):
            return fn(*args, **kwargs)

    def _distribute_dataset(self, dataset: object, options: InputOptions) -> Tree:
        return for_workers(super()._distribute_dataset(dataset, options))

    def _datasets_from_function(self, dataset_fn: Callable[[InputContext], object], options: InputOptions) -> Tree:
        return for_workers(super()._datasets_from_function(dataset_fn, options))

    def _broadcast(self, tensor: Tree, destinations: object) -> Tree:
        cross_device_ops.check_destinations(destinations)
        return tensor

    @contextlib.contextmanager
    def colocate_vars_with(self, colocate_with_variable: Variable) -> Iterator[None]:  # type: ignore[override]
        with super().colocate_vars_with(colocate_with_variable), self._colocate_state(colocate_with_variable):
            yield

    @contextlib.contextmanager
    def _colocate_state(self, variables: Tree) -> Iterator[None]:
        self._near.append(Near(nest.map_values(self._places, variables)))
        try:
            yield
        finally:
            self._near.pop()

    def _places(self, variable: Variable) -> Tree:
        """Returns where the leaves of a variable lie; None where that is not in this cluster."""
        if not isinstance(variable, ServedVariable) or variable._cluster is not self._cluster:
            return None
        return tree_of(variable).unflatten(storage_of(variable).places)

    def _new_variable(self, **kwargs: Tree) -> Variable:
        with creators.outside(self._container):
            initial, counts = self._initial_value(**kwargs)
            leaves, tree, _ = initial_tree(initial, kwargs.get("dtype"))
            value = kwargs["initial_value"] = tree.unflatten(leaves)
            paths, _ = jax.tree.flatten_with_path(value)
            parts = [self._parts(path, leaf, tree == ARRAY, counts) for path, leaf in paths]
            kind = ShardedVariable if tree == ARRAY and len(parts[0]) > 1 else ServedVariable
            variable = kind(**kwargs, cluster=self._cluster, parts=parts)
        variable._strategy = self._container
        return variable

    def _initial_value(
        self, initial_value: Tree, shape: Any = None, dtype: DTypeLike | None = None, **_: Tree
    ) -> tuple[Tree, int | None]:
        """Return an initial value, and the number of its parts if the partitioner was asked for it.

        As in TensorFlow, a function is called for each part where the shape and dtype are known before.
        """
        shape = TensorShape(shape)
        is_known = dtype is not None and shape.is_fully_defined() and shape.rank
        if self._partitioner is None or not callable(initial_value) or not is_known or self._near:
            return initial_value, None
        count = self._count_parts(shape, as_dtype(dtype))
        if count == 1:
            return initial_value, count
        return functools.partial(initial_value_of_parts, initial_value, tuple(shape), count), count

    def _count_parts(self, shape: TensorShape, dtype: np.dtype) -> int:
        """Return the number of parts of axis 0 that the partitioner asks for, at most the number of rows."""
        assert self._partitioner is not None
        counts = self._partitioner(shape, dtype)
        is_list = isinstance(counts, (list, tuple)) and all(isinstance(count, numbers.Integral) for count in counts)
        if not is_list or not counts or counts[0] < 1 or any(count != 1 for count in counts[1:]):
            raise ValueError(
                "variable_partitioner must return a list/tuple whose elements are 1 besides the first element "
                f"(non-zero), got: {counts!r}"
            )
        return max(1, min(int(counts[0]), int(shape[0])))

    def _parts(
        self, path: tuple[object, ...], array: jax.Array, may_be_divided: bool, count: int | None
    ) -> Sequence[Part]:
        """Return where a leaf of a new variable goes; `count` is its number of parts if it is known."""
        shape = array.shape
        near = self._near[-1].parts(path, shape) if self._near else None
        if near is not None:
            return near
        if self._partitioner is None or not shape or not may_be_divided:
            return self._cluster.in_turn(shape)
        count = self._count_parts(TensorShape(shape), array.dtype) if count is None else count
        return self._cluster.shards(shape, count) if count > 1 else self._cluster.in_turn(shape)


class ParameterServerStrategy(Strategy):
    """Keeps variables on parameter servers, and has workers run functions when they are free: asynchronous training.

    The program of the coordinator makes the strategy, variables in its scope, and a `ClusterCoordinator`, which
    schedules functions. Workers and parameter servers run a `Server`. Each function that a worker runs reads the values
    that variables have then, and updates them at once when it ends: workers do not wait for each other, and may come
    and go.

    Args:
        cluster_resolver: tells the addresses of all tasks: jobs `"worker"` and `"ps"`, and perhaps `"chief"`, this one.
        variable_partitioner: says into how many parts variables are divided along axis 0, each on a server; see
            `replicax.partitioners`. By default they are not divided, and go to the servers in turn. An initial value
            that is a function is called for each part, with `partition_shape` and `partition_offset`, if it takes
            them and the variable's `shape` and `dtype` are given.

    Raises:
        ValueError: the cluster has no worker or no parameter server, several chiefs, or other jobs; or this task is a
            worker, a parameter server, an evaluator or of an unknown type.

    >>> import replicax as rx
    >>> from replicax.coordinator import Server
    >>> worker, server = Server.create_local_server(), Server.create_local_server()  # here, in this process
    >>> addresses = {"worker": [worker.target.removeprefix("grpc://")], "ps": [server.target.removeprefix("grpc://")]}
    >>> resolver = rx.cluster_resolver.SimpleClusterResolver(rx.ClusterSpec(addresses), rpc_layer="grpc")
    >>> strategy = rx.ParameterServerStrategy(resolver)
    >>> with strategy.scope():
    ...     steps = rx.Variable(0)
    >>> coordinator = rx.coordinator.ClusterCoordinator(strategy)
    >>> step = rx.function(lambda: steps.assign_add(1))
    >>> _ = [coordinator.schedule(step) for _ in range(3)]
    >>> coordinator.join()
    >>> int(steps)
    3
    """

    _cluster_coordinator: ClusterCoordinator | None

    def __init__(
        self,
        cluster_resolver: ClusterResolver,
        variable_partitioner: Callable[..., Sequence[int]] | None = None,
    ):
        spec = cluster_resolver.cluster_spec()
        _check(spec, cluster_resolver)
        self._cluster = Cluster(spec)
        self._cluster.runner = RunsHere(self._cluster)
        self._cluster_coordinator = None
        weakref.finalize(self, aside, self._cluster.close)
        super().__init__(ParameterServerExtended(self, cluster_resolver, self._cluster, variable_partitioner))

    def __reduce__(self) -> Any:  # type: ignore[override]
        return OneDeviceStrategy, ("CPU:0",)  # what it is for functions of datasets, in a worker's process


def _check(spec: ClusterSpec, resolver: ClusterResolver) -> None:
    """Raises `ValueError` for a cluster that cannot be."""
    if not spec:
        raise ValueError("Cluster spec must be non-empty in `tf.distribute.cluster_resolver.ClusterResolver`.")
    if any(job not in _JOBS for job in spec.jobs):
        raise ValueError(
            f"Disallowed task type found in cluster spec. Allowed types are {_JOBS} and the cluster spec is {spec}."
        )
    if resolver.task_type not in _JOBS:
        raise ValueError(f"Unrecognized task_type: {resolver.task_type}, valid task types are: {_JOBS}.")
    if "chief" in spec.jobs and spec.num_tasks("chief") > 1:
        raise ValueError("There must be at most one 'chief' job.")
    for job, name in (("ps", "ps"), ("worker", "worker")):
        if job not in spec.jobs or not spec.num_tasks(job):
            raise ValueError(f"There must be at least one {name}.")
    kind, number = resolver.task_type, resolver.task_id
    if kind in spec.jobs and number is not None and number >= spec.num_tasks(kind):
        raise ValueError(f"The `task_id` {number} exceeds the maximum id of {kind}.")
    if kind in _INSTEAD:
        raise ValueError(
            f"Only the coordinator, the 'chief', makes a ParameterServerStrategy; this task is {kind} {number or 0}: "
            f"it would train by itself. {_INSTEAD[kind]}, before the program comes to the strategy. "
            f"See {doc_pages.page('how-to/parameter-servers#over-processes-and-machines')}."
        )
