"""`Plan`: the plans of a step for several topologies."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from replicax._base.planning import PlanError
from replicax._plan import chips, largest_batch, table, variants
from replicax._plan.jit_steps import JitStep
from replicax._plan.largest_batch import LargestBatch
from replicax._plan.lowering import Step
from replicax._plan.pool import Settings
from replicax._plan.report import TopologyPlan
from replicax._plan.variants import Variant


@dataclass(frozen=True)
class Plan:
    """The plans of one step for several topologies; `plan["v5e:2x4"]` is one of them. Printed, it is a table.

    Attributes:
        step: the function's name.
        topologies: a plan for each of them.
        variants: the same step with other options of its strategy, by name, if `plan` was to compare them.

    >>> import jax.numpy as jnp, replicax as rx
    >>> plan = rx.plan(rx.function(lambda x: jnp.sum(x * x)), jnp.ones((8, 4)), topology=2)
    >>> [each.topology for each in plan], plan[2].memory.batch  # bytes of a device
    (['cpu:2'], 128)
    """

    step: str
    topologies: tuple[TopologyPlan, ...]
    variants: Mapping[str, Variant] = field(default_factory=dict)
    _traced: Step | JitStep | None = field(default=None, repr=False, compare=False)
    _settings: Settings = field(default=Settings(), repr=False, compare=False)

    def __getitem__(self, topology: str | int) -> TopologyPlan:
        return variants.find(self.topologies, topology)

    def __str__(self) -> str:
        text = table.text(self.step, self.topologies)
        return f"{text}\n{variants.text(self.topologies, self.variants)}" if self.variants else text

    def largest_batch(self, topology: str | int | None = None) -> LargestBatch:
        """Search the largest batch of the step that fits the memory of a device.

        The step is compiled again with other numbers of rows, which are the first dimension of the batch's arrays. If
        the batch is divided among replicas, the rows of each replica's part count. The search ends when it knows the
        number to a sixteenth. Arrays with another first dimension than the batch's first array keep their shape.

        Args:
            topology: one of the plan's; by default the first one.

        Raises:
            PlanError: the topology is of CPU devices, which share the host's memory; the batch has no rows; or the
                step cannot be traced with another number of rows.

        >>> import jax.numpy as jnp, replicax as rx
        >>> plan = rx.plan(rx.function(lambda x: jnp.sum(x * x)), jnp.ones((8, 4)), topology=2)
        >>> plan.largest_batch()
        Traceback (most recent call last):
        replicax._base.planning.PlanError: cpu:2 has no largest batch: virtual CPU devices share the memory ...
        """
        plan = self.topologies[0] if topology is None else self[topology]
        if self._traced is None:
            raise PlanError("A plan that was pickled has lost its step. Call `largest_batch` where the plan is made.")
        return largest_batch.largest_batch(self._traced, chips.parse(plan.topology), plan, self._settings)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_traced": None}

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Draws the memory of a device, the bounds of a step's time, and the timeline of a step, for each topology.

        The timeline has the operations in the order of the compiled program: computation above, collectives below. Each
        bar is as long as the operation takes at least. Communication that the computation waits for is marked.
        Topologies of CPU devices have none.

        Args:
            path: the file, with the ending ".svg", or ".html" for a page that names an operation when you point at its
                bar.

        Raises:
            PlanError: the file has another ending, or there is no such folder.

        >>> import os, tempfile, jax.numpy as jnp, replicax as rx
        >>> path = tempfile.mkdtemp() + "/plan.svg"
        >>> rx.plan(rx.function(lambda x: jnp.sum(x * x)), jnp.ones((8, 4)), topology=2).draw(path)
        >>> os.path.exists(path)
        True
        """
        from replicax._plan import picture

        picture.draw(path, self.step, self.topologies)

    def __iter__(self) -> Iterator[TopologyPlan]:
        return iter(self.topologies)

    def __len__(self) -> int:
        return len(self.topologies)
