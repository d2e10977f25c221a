"""The contenders on JAX: replicax, and the same step written by hand. Run by step.py in a process of its own.

All of them compute the same: the gradients of the mean loss of one global batch, added up over the replicas, an Optax
update, and the loss. All are dispatched asynchronously, and wait for the call before the last eight where several CPU
devices take part (JAX 0.10 deadlocks on more): replicax by itself, the hand-written loops in `Loop.run`.
"""

from __future__ import annotations

import collections
import functools
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import serving
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from sides import BY_HAND

import replicax as rx

OPS = models.jax_ops()
IN_FLIGHT = 8


def transformation(model: Any) -> optax.GradientTransformation:
    kind, rate = model.optimizer
    return {"sgd": optax.sgd(rate), "momentum": optax.sgd(rate, momentum=0.9), "adam": optax.adam(rate)}[kind]


def workers() -> int:
    return len(serving.task()[1]) or 1


def devices(count: int) -> list[jax.Device]:
    return jax.devices()[:count]


def placed(array: Any, mesh: Mesh, spec: P) -> jax.Array:
    """An array of which every process has the whole, on the mesh's devices."""
    array = np.asarray(array)
    return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), lambda index: array[index])


class OnStrategy:
    """A step around `strategy.run` of a replica function of inputs and labels, and its batch."""

    def __init__(self, strategy: Any, model: Any, replicas: int, replica: Callable[[Any, Any], Any]):
        self.strategy = strategy

        def step(x, y):
            return strategy.reduce("SUM", strategy.run(replica, args=(x, y)), axis=None)

        parts = [np.split(part, replicas) for part in models.batch(model, replicas)]
        self.batch = [
            strategy.experimental_distribute_values_from_function(lambda c, p=p: p[c.replica_id_in_sync_group])
            for p in parts
        ]
        self.unfunctioned, self.step = step, rx.function(step)

    def __call__(self) -> jax.Array:
        return self.step(*self.batch)

    def lower(self) -> Any:
        return self.step.lower(*self.batch)


def strategy_of(replicas: int, **options: Any) -> Any:
    return rx.MultiWorkerMirroredStrategy() if workers() > 1 else rx.MirroredStrategy(devices(replicas), **options)


class Replicax(OnStrategy):
    """The step as a user of replicax writes it."""

    def __init__(self, model: Any, replicas: int, tape: bool = False, **options: Any):
        strategy = strategy_of(replicas, **options)
        with strategy.scope():
            self.parameters = parameters = rx.Variable(model.parameters())
            optimizer = rx.Optimizer(transformation(model), parameters)

        def by_function(x, y):
            loss, gradients = jax.value_and_grad(lambda p: models.loss(OPS, model, p, x, y, replicas))(
                parameters.value()
            )
            optimizer.apply_gradients(gradients)
            return loss

        def by_tape(x, y):
            with rx.GradientTape() as tape:
                loss = models.loss(OPS, model, parameters.value(), x, y, replicas)
            optimizer.apply_gradients(tape.gradient(loss, parameters))
            return loss

        super().__init__(strategy, model, replicas, by_tape if tape else by_function)


class Keras(OnStrategy):
    """The MLP's step with Keras: layers, optimizer, tape, as `Replicax`."""

    def __init__(self, model: Any, replicas: int):
        import keras

        if not isinstance(model, models.MLP):
            sys.exit("Keras is measured with the MLP alone.")
        strategy, given = strategy_of(replicas), model.parameters()
        with strategy.scope():
            activations = ["relu"] * (model.layers - 1) + ["linear"]
            layers = [
                keras.layers.Dense(given[f"w{i}"].shape[1], activation=activation)
                for i, activation in enumerate(activations)
            ]
            net = keras.Sequential([keras.Input((model.inputs,)), *layers])
            for i, layer in enumerate(layers):
                layer.kernel.assign(given[f"w{i}"])
            optimizer = keras.optimizers.SGD(model.optimizer[1])
            optimizer.build(net.trainable_variables)
        self.net = net

        class Logits:
            """The model, for `models.loss`."""

            def logits(self, ops: Any, p: Any, x: Any) -> Any:
                return net(x, training=True)

        def replica(x, y):
            with rx.GradientTape() as tape:
                loss = models.loss(OPS, Logits(), {}, x, y, replicas)
            optimizer.apply_gradients(zip(tape.gradient(loss, net.trainable_variables), net.trainable_variables))
            return loss

        super().__init__(strategy, model, replicas, replica)


def step_by_hand(name: str, model: Any, mesh: Any, replicas: int) -> Any:
    """The step with `jax.jit` alone, which takes and donates parameters and the optimizer's state.

    "by hand, packed", all gradients are raveled into one vector for one all-reduce, and one device does without
    `shard_map`. "by hand, apart" is the usual form, a `psum` of each gradient. "by hand, NamedSharding" is the step of
    the whole batch, whose arrays have a `NamedSharding`: XLA adds up the gradients.
    """
    packed, whole = name == "by hand, packed", name == "by hand, NamedSharding"
    update = transformation(model)

    def step(state, x, y):
        parameters, inner = state
        parts = 1 if whole else replicas
        loss, gradients = jax.value_and_grad(lambda p: models.loss(OPS, model, p, x, y, parts))(parameters)
        if packed and replicas > 1:
            vector, unravel = ravel_pytree(gradients)
            gradients = unravel(lax.psum(vector, "replica"))
            loss = lax.psum(loss, "replica")
        elif not (packed or whole):
            gradients = jax.tree.map(lambda g: lax.psum(g, "replica"), gradients)
            loss = lax.psum(loss, "replica")
        updates, inner = update.update(gradients, inner, parameters)
        return (optax.apply_updates(parameters, updates), inner), loss

    if whole:
        same = NamedSharding(mesh, P())
        return jax.jit(step, donate_argnums=0, out_shardings=(same, same))
    if replicas > 1 or not packed:
        split_over = (P(), P("replica"), P("replica"))
        step = jax.shard_map(step, mesh=mesh, in_specs=split_over, out_specs=(P(), P()), check_vma=False)
    return jax.jit(step, donate_argnums=0)


class ByHand:
    """A form of `step_by_hand`, its state and its batch."""

    def __init__(self, name: str, model: Any, replicas: int):
        self.mesh = mesh = Mesh(np.array(devices(replicas)), ("replica",))
        parameters = model.parameters()
        state = parameters, transformation(model).init(parameters)
        self.state = jax.tree.map(lambda part: placed(part, mesh, P()), state)
        self.batch = [placed(part, mesh, P("replica")) for part in models.batch(model, replicas)]
        self.step = step_by_hand(name, model, mesh, replicas)

    def __call__(self) -> jax.Array:
        self.state, loss = self.step(self.state, *self.batch)
        return loss

    def lower(self) -> Any:
        return self.step.lower(self.state, *self.batch)


CONTENDERS: dict[str, Callable[[Any, int], Any]] = {
    "replicax": lambda model, replicas: Replicax(model, replicas),
    "replicax tape": lambda model, replicas: Replicax(model, replicas, tape=True),
    "sharded": lambda model, replicas: Replicax(model, replicas, shard_optimizer_state=True),
    "Keras": Keras,
    **{name: functools.partial(ByHand, name) for name in BY_HAND},
    "by hand, alone": functools.partial(ByHand, BY_HAND[0]),  # in processes without replicax's job
}


class Loop:
    """A contender, and how its steps are called and awaited."""

    def __init__(self, name: str, model: Any, replicas: int):
        self.contender = CONTENDERS[name](model, replicas)
        jax.block_until_ready(jax.tree.leaves(self.contender.__dict__))
        self.bound = isinstance(self.contender, ByHand) and replicas > 1 and jax.default_backend() == "cpu"

    def run(self, steps: int) -> tuple[float, float]:
        """The seconds that so many steps take, awaited at the end, and the last loss."""
        in_flight: collections.deque[jax.Array] = collections.deque()
        start = time.perf_counter()
        for _ in range(steps):
            loss = self.contender()
            if self.bound:
                in_flight.append(loss)
                if len(in_flight) > IN_FLIGHT:
                    in_flight.popleft().block_until_ready()
        loss.block_until_ready()
        return time.perf_counter() - start, float(loss)


def set_devices(device: str, replicas: int) -> None:
    if device == "cpu":
        jax.config.update("jax_platforms", "cpu")
        rx.config.set_virtual_devices({"CPU": replicas})
    if len(jax.devices()) < replicas:
        sys.exit(f"There are {len(jax.devices())} devices here, {replicas} replicas need as many.")


def warm_up() -> None:
    """What a process does once, so that no contender pays for it."""
    jax.jit(jax.grad(lambda x: jnp.sum(jnp.tanh(x @ x))))(jnp.ones((8, 8))).block_until_ready()
    rx.function(lambda x: x + 1)(jnp.ones(2)).block_until_ready()


class Compiling:
    """Adds up what JAX says of compiling, in seconds."""

    def __init__(self) -> None:
        self.seconds: collections.Counter[str] = collections.Counter()
        self.ended = 0.0  # when XLA compiled last
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event: str, duration: float, **_: Any) -> None:
        self.seconds[event.rsplit("/", 1)[-1]] += duration
        if event.endswith("backend_compile_duration"):
            self.ended = time.perf_counter()

    def of(self, function: Callable[[], Any]) -> tuple[float, float]:
        """The seconds of XLA's compiling, and those of lowering to it, while the function runs."""
        self.seconds.clear()
        function()
        return self.seconds["backend_compile_duration"], self.seconds["jaxpr_to_mlir_module_duration"]


def first_step(name: str, model_name: str, replicas: int) -> dict[str, Any]:
    """The time to the first step, in parts. The part that is not compiling, lowering or running is tracing.

    Running is what follows when the step has been compiled: the devices take longer for it than for later ones, as its
    memory is touched for the first time.
    """
    warm_up()
    compiling = Compiling()
    start = time.perf_counter()
    contender = CONTENDERS[name](models.MODELS[model_name], replicas)
    jax.block_until_ready(jax.live_arrays())  # of variables, their values would be handed out, and be copied at once
    setup = time.perf_counter() - start
    start = time.perf_counter()
    compile_, lower = compiling.of(lambda: contender().block_until_ready())
    end = time.perf_counter()
    total, run = end - start, end - compiling.ended
    text = contender.lower().compile().as_text()
    return {
        "setup": setup,
        "total": total,
        "trace": total - compile_ - lower - run,
        "lower": lower,
        "compile": compile_,
        "run": run,
        "traces": contender.step.experimental_get_tracing_count() if isinstance(contender, Replicax) else 1,
        "all_reduces": text.count(" all-reduce(") + text.count(" all-reduce-start("),
    }


def join(alone: bool) -> None:
    """Becomes a worker of the job in `TF_CONFIG`: as replicax does it or, alone, by hand."""
    index, addresses = serving.task()
    if alone:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(addresses[0], len(addresses), index)
    else:
        rx.MultiWorkerMirroredStrategy()


def watch() -> dict[str, float]:
    """Seconds that it takes to tell the job's watch that a call begins and that it has been dispatched."""
    from replicax._collectives import in_flight as _in_flight
    from replicax._job import state as _state

    mesh = rx.MultiWorkerMirroredStrategy().extended._mesh
    done, many = jnp.zeros(()).block_until_ready(), 2000

    def runtime() -> None:
        call = _state.begin("step")
        assert call is not None
        call.dispatched(done)

    def dispatch() -> None:
        with _in_flight.dispatching(mesh, "step") as call:
            call.output = done

    def took(call: Callable[[], None]) -> float:
        start = time.perf_counter()
        for _ in range(many):
            call()
        return (time.perf_counter() - start) / many

    calls = {"_runtime.calling": runtime, "_dispatch.calling": dispatch}
    return {name: min(took(call) for _ in range(10)) for name, call in calls.items()}


def answering(device: str, replicas: int, alone: bool) -> serving.Answering:
    """What answers step.py's requests."""
    if workers() > 1:
        join(alone)
    else:
        set_devices(device, replicas)
    warm_up()
    loops: dict[str, Loop] = {}

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        if request["do"] == "watch":
            return watch()
        name = request["contender"]
        if request["do"] == "first":
            # Clearing the caches costs other functions their fast path, so this one is made anew for the rounds.
            jax.clear_caches()
            loop = Loop(name, models.MODELS[request["model"]], replicas)
            return dict(zip(("first", "loss"), loop.run(1)), later_loss=loop.run(4)[1])
        if request["do"] == "build":
            loops[name] = Loop(name, models.MODELS[request["model"]], replicas)
            return {"seconds": loops[name].run(1)[0]}
        return {"seconds": loops[name].run(request["steps"])[0]}

    return answer


if __name__ == "__main__":
    what, device, replicas = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if what in ("serve", "alone"):
        serving.serve(lambda: answering(device, replicas, what == "alone"))
    elif what == "first":
        set_devices(device, replicas)
        print(json.dumps(first_step(sys.argv[4], sys.argv[5], replicas)))
    else:
        sys.exit(__doc__)
