"""Options of datasets."""

from __future__ import annotations

import copy
import types

from replicax._base.types import AutoShardPolicy


class DistributeOptions:
    """Options for dividing a dataset among workers: `Options.experimental_distribute`."""

    __slots__ = ("_auto_shard_policy", "num_devices")

    def __init__(self) -> None:
        self._auto_shard_policy: AutoShardPolicy | None = None
        self.num_devices: int | None = None

    @property
    def auto_shard_policy(self) -> AutoShardPolicy:
        """The policy, AUTO if not set."""
        return AutoShardPolicy.AUTO if self._auto_shard_policy is None else self._auto_shard_policy

    @auto_shard_policy.setter
    def auto_shard_policy(self, policy: AutoShardPolicy) -> None:
        self._auto_shard_policy = AutoShardPolicy(policy)


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
        "experimental_deterministic",
        "experimental_external_state_policy",
        "experimental_slack",
        "experimental_symbolic_checkpoint",
        "experimental_threading",
        "experimental_warm_start",
        "framework_type",
        "dataset_name",
    )
    _GROUPS = ("autotune", "threading", "experimental_optimization", "experimental_service")
    __slots__ = ("experimental_distribute", *_GROUPS, *_PLAIN)

    def __init__(self) -> None:
        self.experimental_distribute = DistributeOptions()
        for name in self._GROUPS:
            setattr(self, name, types.SimpleNamespace())
        for name in self._PLAIN:
            setattr(self, name, None)

    def merge(self, options: Options) -> Options:
        """Returns new options: these, overridden by what is set in `options`."""
        merged = copy.deepcopy(self)
        for name in self._PLAIN:
            if getattr(options, name) is not None:
                setattr(merged, name, getattr(options, name))
        for name in self._GROUPS:
            vars(getattr(merged, name)).update(vars(getattr(options, name)))
        for name in DistributeOptions.__slots__:
            if getattr(options.experimental_distribute, name) is not None:
                setattr(merged.experimental_distribute, name, getattr(options.experimental_distribute, name))
        return merged
