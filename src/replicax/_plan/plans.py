"""`Plan`: the plans of a step for several topologies."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from replicax._plan import table
from replicax._plan.report import TopologyPlan


@dataclass(frozen=True)
class Plan:
    """The plans of one step for several topologies; `plan["v5e:2x4"]` is one of them. Printed, it is a table.

    Attributes:
        step: the function's name.
        topologies: a plan for each of them.

    >>> import jax.numpy as jnp, replicax as rx
    >>> plan = rx.plan(rx.function(lambda x: jnp.sum(x * x)), jnp.ones((8, 4)), topology=2)
    >>> [each.topology for each in plan], plan[2].memory.batch  # bytes of a device
    (['cpu:2'], 128)
    """

    step: str
    topologies: tuple[TopologyPlan, ...]

    def __getitem__(self, topology: str | int) -> TopologyPlan:
        names = str(topology), f"cpu:{topology}"
        found = [plan for plan in self.topologies if plan.topology in names]
        if not found:
            known = ", ".join(plan.topology for plan in self.topologies)
            raise KeyError(f"The plan is for {known}, not for {topology!r}.")
        return found[0]

    def __str__(self) -> str:
        return table.text(self.step, self.topologies)

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Draws the memory of a device, the bounds of a step's time, and the timeline of a step, for each topology.

        The timeline has the operations in the order of the compiled program: computation above, collectives below. Each
        bar is as long as the operation takes at least. Communication that the computation waits for is marked.
        Topologies of CPU devices have none.

        Args:
            path: the file. With the ending ".svg" it needs no library. ".html" is a page that names an
                operation when you point at its bar; it needs none, either. ".png" and others need matplotlib.

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
