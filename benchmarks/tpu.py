"""A training step compiled for TPUs that are not there: replicax beside the same step written by hand in JAX.

    REPLICAX_PLAN_PYTHON=/path/to/python/with/jax[tpu] python benchmarks/tpu.py

The real compiler for TPUs says what each program takes: the memory of its temporaries on a chip, its collectives, and
how many of these overlap with computation. Nothing runs, so nothing here depends on the machine. The page on
performance has the table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import models
import numpy as np
from sides import BY_HAND, Table, Target, finish, names, parsed, parser

TOPOLOGIES = ["v5e:2x4", "v5p:2x2x4", "v6e:4x4"]
CONTENDERS = ["replicax", *BY_HAND]


class LanguageModel(models.LanguageModel):
    """The language model with 67 million parameters."""

    batch, length, inputs, width, heads, blocks = 4, 512, 8192, 1024, 16, 4
    optimizer = ("momentum", 1e-3)

    def x(self, rng: Any) -> Any:
        return np.zeros((self.batch, self.length), np.int32)

    def y(self, rng: Any) -> Any:
        return np.broadcast_to(np.zeros((), np.float32), (self.batch, self.length, self.inputs))


class Images(models.LargeCNN):
    """The CNN with more images than the memory beside a chip's arithmetic holds."""

    batch = 2048


MODELS = {"language model": LanguageModel(), "wide": models.MODELS["wide"], "images": Images()}


def planned(name: str, model: Any, topology: str) -> dict[str, Any]:
    """What the compiler says of one contender's step; `model.batch` is the number of rows of one replica."""
    plan = ours(model, topology) if name == "replicax" else by_hand(name, model, topology)
    if plan.memory is None:
        raise SystemExit(f"The step {name!r} does not compile for {topology}: {plan.error}")
    return {
        "temporaries": plan.memory.temporaries,
        "flops": plan.flops,
        "collectives": sum(each.times for each in plan.collectives),
        "overlapping": sum(each.times for each in plan.collectives if each.overlaps),
        "bytes": sum(each.bytes * each.times for each in plan.collectives),
    }


def ours(model: Any, topology: str) -> Any:
    import side_jax

    import replicax as rx

    with rx.experimental.abstract_variables():
        contender = side_jax.Replicax(model, 1)
    return rx.plan(contender.step, tuple(contender.batch), topology=topology)[topology]


def by_hand(name: str, model: Any, topology: str) -> Any:
    """The plan of a contender's step that is written by hand, which is lowered without any value."""
    import jax
    import side_jax
    from jax import export
    from jax.sharding import AbstractMesh, AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    from replicax._plan import apart, chips
    from replicax._plan.exports import Lowered
    from replicax._plan.report import Inputs, report

    where = chips.parse(topology)
    size = where.size
    mesh = AbstractMesh((size,), ("replica",), (AxisType.Auto,))
    state = jax.eval_shape(lambda: (p := model.parameters(), side_jax.transformation(model).init(p)))
    batch = [(len(part) * size, *part.shape[1:]) for part in models.batch(model, 1)]
    kinds = [part.dtype for part in models.batch(model, 1)]

    def placed(kind: Any, spec: P) -> Any:
        return jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=NamedSharding(mesh, spec))

    state = jax.tree.map(lambda kind: placed(kind, P()), state)
    inputs = [placed(jax.ShapeDtypeStruct(shape, kind), P("replica")) for shape, kind in zip(batch, kinds, strict=True)]
    step = side_jax.step_by_hand(name, model, mesh, size)
    leaves, tree = jax.tree.flatten((state, *inputs))  # as types of Optax cannot be exported

    def flat(*leaves: Any) -> list[Any]:
        return jax.tree.leaves(step(*jax.tree.unflatten(tree, leaves)))

    exported = export.export(jax.jit(flat), platforms=[where.compiler])(*leaves)
    specs = [list(leaf.sharding.spec) for leaf in leaves]
    donated = list(range(len(jax.tree.leaves(state))))
    lowered = Lowered(bytes(exported.serialize()), {"replica": size}, specs, donated, size, Inputs())
    return report(where, size, Inputs(), apart.compile_apart(lowered, where))


def tables(found: dict[str, Any]) -> dict[str, Table]:
    head = ["model", "topology", "contender", "temporaries, MB", "collectives", "of them overlap", "MB sent"]
    rows = [
        [r["model"], r["topology"], name, f"{of['temporaries'] / 1e6:.1f}"]
        + [str(of["collectives"]), str(of["overlapping"]), f"{of['bytes'] / 1e6:.1f}"]
        for r in found["tpu"]
        for name, of in r["of"].items()
    ]
    return {"tpu": ("A step on TPUs, by the compiler", head, rows)}


def targets(found: dict[str, Any]) -> list[Target]:
    def against_best(count: Callable[[dict[str, int]], int]) -> dict[str, str]:
        cases = {}
        for r in found["tpu"]:
            by_hand = [of for name, of in r["of"].items() if name != "replicax"]
            best = min(by_hand, key=lambda of: of["temporaries"])
            cases[f"{r['model']}, {r['topology']}"] = f"{count(r['of']['replicax']) / max(1, count(best)):.2f}"
        return cases

    title = "a step on TPUs against the form by hand with the least memory: "
    return [
        Target(title + "temporaries", 1.02, against_best(lambda of: of["temporaries"])),
        Target(title + "collectives", 1, against_best(lambda of: of["collectives"])),
        Target(
            title + "collectives that nothing overlaps",
            1,
            against_best(lambda of: of["collectives"] - of["overlapping"]),
        ),
    ]


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--models", type=names, default=list(MODELS))
    made.add_argument("--topologies", type=lambda text: text.split(","), default=TOPOLOGIES)
    options = parsed(made)
    found = {
        "tpu": [
            {"model": m, "topology": t, "of": {name: planned(name, MODELS[m], t) for name in CONTENDERS}}
            for m in options.models
            for t in options.topologies
        ]
    }
    finish(options, "the compiler for TPUs", ("jax", "optax"), found, tables(found), targets(found))


if __name__ == "__main__":
    main()
