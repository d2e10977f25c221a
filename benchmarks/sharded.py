"""Variables in parts: replicax with `shard_variables=True` beside the same step written by hand in JAX.

    python benchmarks/sharded.py                        # all models, 4 and 8 virtual CPU devices
    python benchmarks/sharded.py --models mlp --replicas 4
    python benchmarks/sharded.py --memory               # memory alone, which takes no quiet machine

Each model is written four times: with replicax; with `jax.jit` of the whole batch and arrays that have a
`NamedSharding`; in `jax.shard_map`, where `jax.checkpoint` has the backward pass repeat the gathers; and the same,
which keeps what it has gathered. For each number of replicas one process holds all four, which take turns; the medians
of the rounds are shown, and those of the rounds' ratios. benchmarks/RESULTS.md says what came out.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import models
from sides import HERE, Table, Target, environment, finish, parsed, parser, ratio

REPLICAX, SHARDING, REPEATED, KEPT = "replicax", "NamedSharding", "shard_map, gathers repeated", "shard_map, kept"
CONTENDERS = [REPLICAX, SHARDING, REPEATED, KEPT]
MODELS = ["mlp", "language model", "scan", "embedding"]


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    made.add_argument("--replicas", nargs="+", type=int, default=[4, 8])
    made.add_argument("--memory", action="store_true", help="compile alone")
    made.add_argument("--measure", help=argparse.SUPPRESS)  # for a process of its own
    options = parsed(made)
    if options.measure:
        print(json.dumps(measured(**json.loads(options.measure))))
        return
    found = []
    for model, replicas in itertools.product(options.models, options.replicas):
        told = json.dumps({"model": model, "replicas": replicas, "rounds": 0 if options.memory else options.rounds})
        command = [sys.executable, str(HERE / "sharded.py"), "--measure", told]
        done = subprocess.run(command, env=environment(), stdout=subprocess.PIPE, text=True, check=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
    results = {"sharded": found}
    finish(options, "cpu", ("jax", "optax", "numpy"), results, tables(results), targets(results))


def tables(results: dict[str, Any]) -> dict[str, Table]:
    head = ["model", "replicas", "contender", "ms a step", "replicax / it", "temporaries MB", "state MB", "collectives"]
    rows = []
    for found in results["sharded"]:
        for name, of in found["contenders"].items():
            times = found["rounds"].get(name)
            ms = f"{1e3 * statistics.median(times):.1f}" if times else "–"
            sizes = [f"{of[what] / 1e6:.1f}" for what in ("temporaries", "state")]
            sent = ", ".join(f"{count} {kind}" for kind, count in sorted(of["collectives"].items()))
            case = [found["model"], str(found["replicas"]), name]
            rows.append([*case, ms, ratio(found["rounds"], REPLICAX, name), *sizes, sent])
    return {"sharded": ("Variables in parts; sizes are those of a device", head, rows)}


def targets(results: dict[str, Any]) -> list[Target]:
    cases = {f"{found['model']}, {found['replicas']}": found for found in results["sharded"]}

    def sizes(what: str, of: str) -> dict[str, str]:
        pairs = {case: found["contenders"] for case, found in cases.items()}
        return {case: f"{both[REPLICAX][what] / both[of][what]:.2f}" for case, both in pairs.items()}

    times = {case: ratio(found["rounds"], REPLICAX, SHARDING) for case, found in cases.items()}
    state = {
        case: f"{found['contenders'][REPLICAX]['state'] * found['replicas'] / found['whole']:.3f}"
        for case, found in cases.items()
    }
    return [
        Target("step in parts against jit with NamedSharding", 1, times),
        Target("its temporaries against shard_map that repeats gathers", 1.05, sizes("temporaries", REPEATED)),
        Target("its variables and optimizer on a device, times the number of devices, against all", 1.05, state),
    ]


class Model:
    """Sizes, and arithmetic of one's own rows. `gather` is called for a parameter in parts where it is used."""

    layers, width, rows = 8, 512, 32

    def parameters(self) -> dict[str, Any]:
        import numpy as np

        rng = np.random.default_rng(0)
        return {
            f"{name}{i}": rng.normal(0.0, 0.03, shape).astype("f4")
            for i in range(self.layers)
            for name, shape in (("a", (self.width, 2 * self.width)), ("b", (2 * self.width, self.width)))
        }

    def x(self, replicas: int) -> Any:
        import numpy as np

        return np.random.default_rng(1).normal(size=(replicas * self.rows, self.width)).astype("f4")

    def loss(self, p: Any, x: Any, gather: Callable[..., Any], wrap: Callable[..., Any]) -> Any:
        import jax
        import jax.numpy as jnp

        def block(x, a, b):
            return x + jax.nn.relu(x @ gather(a)) @ gather(b)

        for i in range(self.layers):
            x = wrap(block)(x, p[f"a{i}"], p[f"b{i}"])
        return jnp.mean(x**2)

    def axis(self, name: str) -> int | None:
        """Along which a parameter is divided, None for one that is not."""
        return 0


class Language(Model):
    """A transformer of 4 M parameters, of which vectors are not divided."""

    def __init__(self) -> None:
        self.model = models.LanguageModel()
        self.vectors = {name for name, value in self.model.parameters().items() if value.ndim == 1}

    def parameters(self) -> dict[str, Any]:
        return self.model.parameters()

    def x(self, replicas: int) -> Any:
        import numpy as np

        self.rows = self.model.batch // replicas
        return self.model.x(np.random.default_rng(1))

    def loss(self, p: Any, x: Any, gather: Callable[..., Any], wrap: Callable[..., Any]) -> Any:
        import jax
        import jax.numpy as jnp

        class Gathered(dict):  # at each use
            def __getitem__(self, name):
                value = super().__getitem__(name)
                return value if value.ndim == 1 else gather(value)

        def of(p, x):
            found = jax.nn.log_softmax(self.model.logits(models.jax_ops(), Gathered(p), x))
            return -jnp.mean(jnp.take_along_axis(found, jnp.roll(x, -1, 1)[..., None], -1))

        return wrap(of)(p, x)

    def axis(self, name: str) -> int | None:
        return None if name in self.vectors else 0


class Scan(Model):
    """Layers in a loop."""

    layers = 16

    def parameters(self) -> dict[str, Any]:
        import numpy as np

        rng, d = np.random.default_rng(0), self.width
        shapes = {"a": (self.layers, d, 2 * d), "b": (self.layers, 2 * d, d)}
        return {name: rng.normal(0.0, 0.03, shape).astype("f4") for name, shape in shapes.items()}

    def loss(self, p: Any, x: Any, gather: Callable[..., Any], wrap: Callable[..., Any]) -> Any:
        import jax
        import jax.numpy as jnp

        def layer(x, both):
            return x + jax.nn.relu(x @ gather(both[0])) @ gather(both[1]), None

        return jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, (p["a"], p["b"]))[0] ** 2)

    def axis(self, name: str) -> int | None:
        return 1


class Embedding(Model):
    """Lookups in a large table, before a few layers."""

    layers, width, rows, words = 2, 256, 32, 1 << 16

    def parameters(self) -> dict[str, Any]:
        import numpy as np

        table = np.random.default_rng(2).normal(0.0, 1.0, (self.words, self.width)).astype("f4")
        return {"table": table, **super().parameters()}

    def x(self, replicas: int) -> Any:
        import numpy as np

        return np.random.default_rng(1).integers(0, self.words, (replicas * self.rows,)).astype("i4")

    def loss(self, p: Any, x: Any, gather: Callable[..., Any], wrap: Callable[..., Any]) -> Any:
        return super().loss(p, gather(p["table"])[x], gather, wrap)


KINDS = {"mlp": Model, "language model": Language, "scan": Scan, "embedding": Embedding}


class OfReplicax:
    """The step as a user of replicax writes it."""

    def __init__(self, model: Model, replicas: int):
        import jax
        import optax

        import replicax as rx

        strategy = rx.MirroredStrategy(jax.devices()[:replicas], shard_variables=True)
        with strategy.scope():
            parameters = rx.Variable(model.parameters())
            optimizer = rx.Optimizer(optax.adam(1e-4), parameters, reduce_op="mean")

        def same(value):
            return value

        def replica(x):
            loss, gradients = jax.value_and_grad(lambda p: model.loss(p, x, same, same))(parameters.value())
            optimizer.apply_gradients(gradients)
            return loss

        step = rx.function(lambda x: strategy.reduce("MEAN", strategy.run(replica, args=(x,)), axis=None))
        x = model.x(replicas).reshape(replicas, model.rows, *model.x(1).shape[1:])
        batch = strategy.experimental_distribute_values_from_function(lambda c: x[c.replica_id_in_sync_group])
        self.state = [leaf for v in (parameters, optimizer.state) for leaf in v._storage.read()]
        self.compiled = step.lower(batch).compile()
        self.call = functools.partial(step, batch)


class ByHand:
    """The step in JAX, in one of three forms."""

    def __init__(self, model: Model, replicas: int, form: str):
        import jax
        import numpy as np
        import optax
        from jax import lax
        from jax.ad_checkpoint import checkpoint_name
        from jax.sharding import Mesh, NamedSharding
        from jax.sharding import PartitionSpec as P

        mesh, update = Mesh(np.array(jax.devices()[:replicas]), ("r",)), optax.adam(1e-4)
        parameters = model.parameters()
        axes = {name: model.axis(name) for name in parameters}
        specs = {name: P() if axis is None else P(*[None] * axis, "r") for name, axis in axes.items()}
        inner = update.init(parameters)
        inner_specs = optax.tree.map_params(
            update, lambda _, spec: spec, inner, specs, transform_non_params=lambda _: P()
        )
        both = specs, inner_specs
        where = jax.tree.map(lambda spec: NamedSharding(mesh, spec), both)
        self.state = jax.tree.map(jax.device_put, (parameters, inner), where)
        self.batch = jax.device_put(model.x(replicas), NamedSharding(mesh, P("r")))
        repeating = jax.checkpoint_policies.save_anything_except_these_names("gathered")

        def same(value):
            return value

        def updated(state, loss, gradients):
            parameters, inner = state
            updates, inner = update.update(gradients, inner, parameters)
            return (optax.apply_updates(parameters, updates), inner), loss

        def by_sharding(state, x):
            loss, gradients = jax.value_and_grad(model.loss)(state[0], x, same, same)
            gradients = jax.tree.map(lambda g, w: lax.with_sharding_constraint(g, w), gradients, where[0])
            return updated(state, loss, gradients)

        def replica(state, x):
            def gather(part):
                return checkpoint_name(lax.all_gather(part, "r", tiled=True), "gathered")

            wrap = functools.partial(jax.checkpoint, policy=repeating) if form == REPEATED else same
            loss, gradients = jax.value_and_grad(model.loss)(state[0], x, gather, wrap)
            gradients = {
                name: lax.pmean(g, "r") if axes[name] is None else g / replicas for name, g in gradients.items()
            }
            return updated(state, lax.pmean(loss, "r"), gradients)

        if form == SHARDING:
            step = jax.jit(by_sharding, donate_argnums=0, out_shardings=(where, NamedSharding(mesh, P())))
        else:
            mapped = jax.shard_map(replica, mesh=mesh, in_specs=(both, P("r")), out_specs=(both, P()), check_vma=False)
            step = jax.jit(mapped, donate_argnums=0)
        self.compiled = step.lower(self.state, self.batch).compile()

    def call(self) -> Any:
        self.state, loss = self.compiled(self.state, self.batch)
        return loss


def measured(model: str, replicas: int, rounds: int) -> dict[str, Any]:
    """Sizes of each contender's program, and the seconds of a step in each round."""
    import jax

    import replicax as rx

    jax.config.update("jax_platforms", "cpu")
    rx.config.set_virtual_devices({"CPU": replicas})
    from replicax._benchmark import hlo

    of = KINDS[model]()
    made: dict[str, Any] = {name: ByHand(of, replicas, name) for name in CONTENDERS[1:]}
    made = {REPLICAX: OfReplicax(of, replicas), **made}
    contenders = {}
    for name, one in made.items():
        leaves = jax.tree.leaves(one.state)
        counts: dict[str, int] = {}
        for found in hlo.collectives(one.compiled.as_text()):
            counts[found.kind] = counts.get(found.kind, 0) + 1
        contenders[name] = {
            "temporaries": one.compiled.memory_analysis().temp_size_in_bytes,
            "state": sum(x.addressable_shards[0].data.nbytes for x in leaves),
            "collectives": counts,
        }
        whole = sum(x.nbytes for x in leaves)
    times: dict[str, list[float]] = {}
    if rounds:
        losses = {name: [float(one.call()) for _ in range(3)] for name, one in made.items()}
        for name, seen in losses.items():
            if any(abs(a - b) > 1e-4 * abs(b) for a, b in zip(seen, losses[SHARDING])):
                raise SystemExit(f"{name} computes something else: {losses}")
        for round_ in range(rounds):
            for name in list(made)[:: 1 if round_ % 2 == 0 else -1]:
                start = time.perf_counter()
                jax.block_until_ready(made[name].call())
                times.setdefault(name, []).append(time.perf_counter() - start)
    return {"model": model, "replicas": replicas, "whole": whole, "contenders": contenders, "rounds": times}


if __name__ == "__main__":
    main()
