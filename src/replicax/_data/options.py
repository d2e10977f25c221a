"""Options of datasets."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from replicax._base.types import AutoShardPolicy


class DistributeOptions:
    """Options for dividing a dataset among workers: `Options.experimental_distribute`.

    >>> import replicax as rx
    >>> options = rx.data.Options()
    >>> isinstance(options.experimental_distribute, rx.data.DistributeOptions)
    True
    """

    __slots__ = ("_auto_shard_policy", "num_devices")

    def __init__(self) -> None:
        self._auto_shard_policy: AutoShardPolicy | None = None
        self.num_devices: int | None = None

    @property
    def auto_shard_policy(self) -> AutoShardPolicy:
        """The policy, AUTO if not set.

        >>> import replicax as rx
        >>> options = rx.data.DistributeOptions()
        >>> options.auto_shard_policy = rx.data.AutoShardPolicy.DATA
        >>> options.auto_shard_policy.name
        'DATA'
        """
        return AutoShardPolicy.AUTO if self._auto_shard_policy is None else self._auto_shard_policy

    @auto_shard_policy.setter
    def auto_shard_policy(self, policy: AutoShardPolicy) -> None:
        self._auto_shard_policy = AutoShardPolicy(policy)


@dataclasses.dataclass(slots=True)
class ThreadingOptions:
    """Options for threads: `Options.threading`. They have no effect.

    >>> import replicax as rx
    >>> options = rx.data.Options()
    >>> options.threading.private_threadpool_size = 4
    >>> options.threading
    ThreadingOptions(max_intra_op_parallelism=None, private_threadpool_size=4)
    """

    max_intra_op_parallelism: int | None = None
    private_threadpool_size: int | None = None


@dataclasses.dataclass(slots=True)
class AutotuneOptions:
    """Options of the tuning at run time: `Options.autotune`. They have no effect."""

    autotune_algorithm: object = None
    cpu_budget: int | None = None
    enabled: bool | None = None
    initial_parallelism: int | None = None
    min_parallelism: int | None = None
    ram_budget: int | None = None


@dataclasses.dataclass(slots=True)
class OptimizationOptions:
    """Options of rewriting datasets: `Options.experimental_optimization`. They have no effect."""

    apply_default_optimizations: bool | None = None
    filter_fusion: bool | None = None
    filter_parallelization: bool | None = None
    inject_prefetch: bool | None = None
    map_and_batch_fusion: bool | None = None
    map_and_filter_fusion: bool | None = None
    map_fusion: bool | None = None
    map_parallelization: bool | None = None
    noop_elimination: bool | None = None
    parallel_batch: bool | None = None
    seq_interleave_prefetch: bool | None = None
    shuffle_and_repeat_fusion: bool | None = None


@dataclasses.dataclass(slots=True)
class ServiceOptions:
    """Options of tf.data's service: `Options.experimental_service`. They have no effect."""

    pinned: bool | None = None


class Options:
    """Options of a dataset. Only `experimental_distribute` takes effect; tf.data's others are accepted.

    >>> import replicax as rx
    >>> options = rx.data.Options()
    >>> options.experimental_distribute.auto_shard_policy = rx.data.AutoShardPolicy.OFF
    >>> dataset = rx.data.Dataset.range(4).batch(2).with_options(options)
    >>> dataset.options().experimental_distribute.auto_shard_policy.name
    'OFF'
    """

    _PLAIN = (
        "deterministic",
        "experimental_external_state_policy",
        "experimental_slack",
        "experimental_symbolic_checkpoint",
        "experimental_warm_start",
        "framework_type",
        "dataset_name",
    )
    _GROUPS = {
        "autotune": AutotuneOptions,
        "threading": ThreadingOptions,
        "experimental_optimization": OptimizationOptions,
        "experimental_service": ServiceOptions,
    }
    __slots__ = ("experimental_distribute", *_GROUPS, *_PLAIN)

    deterministic: bool | None
    threading: ThreadingOptions

    def __init__(self) -> None:
        self.experimental_distribute = DistributeOptions()
        for name, group in self._GROUPS.items():
            setattr(self, name, group())
        for name in self._PLAIN:
            setattr(self, name, None)

    @property
    def experimental_deterministic(self) -> Any:
        """`deterministic` under its former name.

        >>> import replicax as rx
        >>> options = rx.data.Options()
        >>> options.experimental_deterministic = False
        >>> options.deterministic
        False
        """
        return self.deterministic

    @experimental_deterministic.setter
    def experimental_deterministic(self, value: Any) -> None:
        self.deterministic = value

    @property
    def experimental_threading(self) -> ThreadingOptions:
        """`threading` under its former name.

        >>> import replicax as rx
        >>> options = rx.data.Options()
        >>> options.experimental_threading is options.threading
        True
        """
        return self.threading

    @experimental_threading.setter
    def experimental_threading(self, value: ThreadingOptions) -> None:
        self.threading = value

    def merge(self, options: Options) -> Options:
        """Returns new options: these, overridden by what is set in `options`.

        >>> import replicax as rx
        >>> options, others = rx.data.Options(), rx.data.Options()
        >>> others.deterministic = False
        >>> options.merge(others).deterministic, options.deterministic
        (False, None)
        """
        merged = copy.deepcopy(self)
        for name in self._PLAIN:
            if getattr(options, name) is not None:
                setattr(merged, name, getattr(options, name))
        for name in self._GROUPS:
            _merge_set(getattr(options, name), getattr(merged, name))
        _merge_set(options.experimental_distribute, merged.experimental_distribute)
        return merged


def _merge_set(options: Any, into: Any) -> None:
    """Sets those of a group of options that are not None in another group."""
    for name in options.__slots__:
        if getattr(options, name) is not None:
            setattr(into, name, getattr(options, name))
