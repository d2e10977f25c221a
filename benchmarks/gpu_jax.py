"""One contender of gpu.py on JAX: a strategy of replicax's, or by hand."""

from __future__ import annotations

import contextlib
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import gpu_models
import jax
import optax
import serving

import replicax as rx


def transformation(model: Any) -> optax.GradientTransformation:
    return optax.sgd(0.01, momentum=0.9) if model.optimizer == "momentum" else optax.adam(3e-4)


def strategy_named(name: str) -> Any:
    device = rx.config.list_devices()[0]
    if name == "OneDevice":
        return rx.OneDeviceStrategy(device)
    if name == "Mirrored":
        return rx.MirroredStrategy([device])
    return rx.experimental.CentralStorageStrategy([device], parameter_device="CPU:0")  # pinned memory of the host


class OnReplicax:
    """The step as a user of replicax writes it."""

    def __init__(self, name: str, model: Any):
        strategy = strategy_named(name)
        with strategy.scope():
            parameters = rx.Variable(model.parameters())
            optimizer = rx.Optimizer(transformation(model), parameters)

        def replica(x, y):
            loss, gradients = jax.value_and_grad(lambda p: gpu_models.loss(model, p, x, y))(parameters.value())
            optimizer.apply_gradients(gradients)
            return loss

        @rx.function
        def step(x, y):
            return strategy.reduce("MEAN", strategy.run(replica, args=(x, y)), axis=None)

        (self.batch,) = list(strategy.experimental_distribute_dataset([model.data()]))
        self.step = step

    def __call__(self) -> jax.Array:
        return self.step(*self.batch)


class ByHand:
    """`jax.jit` with its state donated."""

    def __init__(self, model: Any):
        update = transformation(model)
        device = jax.devices()[0]
        parameters = jax.device_put(model.parameters(), device)
        self.state = parameters, update.init(parameters)
        self.batch = jax.device_put(model.data(), device)

        def step(state, x, y):
            parameters, inner = state
            loss, gradients = jax.value_and_grad(lambda p: gpu_models.loss(model, p, x, y))(parameters)
            updates, inner = update.update(gradients, inner, parameters)
            return (optax.apply_updates(parameters, updates), inner), loss

        self.step = jax.jit(step, donate_argnums=0)

    def __call__(self) -> jax.Array:
        self.state, loss = self.step(self.state, *self.batch)
        return loss


def installed() -> dict[str, str]:
    found = {}
    for name in ("jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def answering(device: str, size: str, name: str, model_name: str) -> serving.Answering:
    if device == "cpu":
        jax.config.update("jax_platforms", "cpu")
    elif jax.default_backend() != "gpu":
        sys.exit("JAX sees no GPU here.")
    model = gpu_models.made(model_name, size == "quick")
    contender: Any = None

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        nonlocal contender
        if request["do"] == "build":
            contender = ByHand(model) if name == "by hand" else OnReplicax(name, model)
            losses = [float(contender()) for _ in range(4)]
            return {"losses": losses, "device": jax.devices()[0].device_kind, "versions": installed()}
        if request["do"] == "memory":
            stats = jax.devices()[0].memory_stats() or {}
            return {"peak": stats.get("peak_bytes_in_use", 0)}
        start = time.perf_counter()
        for _ in range(request["steps"]):
            loss = contender()
        loss.block_until_ready()
        return {"seconds": time.perf_counter() - start}

    return answer


if __name__ == "__main__":
    serving.serve(lambda: answering(*sys.argv[1:]))
