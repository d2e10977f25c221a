"""Plans beside the published measurements of others: a step takes at least as long as its plan says.

    replicax plan --install gpu                              # the compiler for GPUs, once
    python benchmarks/published.py                           # all cases
    python benchmarks/published.py --only "MPT 1B;MPT 7B"

Each case is a training run of others. They have published the model, the batch, the sharding, the types of numbers, the
time of a step and, for some cases, the memory. `decoders` has the same step in plain JAX. Nothing runs here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import decoders
from decoders import Decoder, Training
from sides import Table, finish, parsed, parser

_GITHUB = "https://github.com/"
LITGPT = f"{_GITHUB}Lightning-AI/litgpt/blob/101e31d2e4d430b818e7e69974de6139800a36b9/extensions/thunder/README.md"
FOUNDRY = (
    f"{_GITHUB}mosaicml/llm-foundry/blob/061f2c7ce64e655100286584a7629e2a09f827ba/scripts/train/benchmarking/README.md"
)
TITAN_A100 = f"{_GITHUB}pytorch/torchtitan/blob/041336434916bdc0f88c1f89fda176fd3c2092e4/docs/performance.md"
TITAN = (
    f"{_GITHUB}pytorch/torchtitan/blob/31a17bfdb70bab6f62a13d21816a5339b911d6e3/"
    "benchmarks/llama3_h100_202412_torchtitan.md"
)
TOOLBOX = f"{_GITHUB}NVIDIA/JAX-Toolbox/blob/67b79492ff12a40fc2ab73a8ff3db0704f78a32a/docs/frameworks/maxtext/README.md"
MAXTEXT = (
    f"{_GITHUB}AI-Hypercomputer/maxtext/blob/efb6d9e4a2856198f8272dcbfb7d9c91eda0728e/"
    "MaxText/configs/a3/llama_2_7b/README.md"
)

TINYLLAMA = Decoder(22, 2048, 32, 4, 5632, 32000, 2048, head_size=64)
LLAMA2 = Decoder(32, 4096, 32, 32, 11008, 32000, 4096)
LLAMA3 = Decoder(32, 4096, 32, 8, 14336, 128256, 8192)
MPT_1B = Decoder(24, 2048, 16, 16, 8192, 50368, 2048, mpt=True)
MPT_7B = Decoder(32, 4096, 32, 32, 16384, 50368, 2048, mpt=True)

# PyTorch keeps these values for the backward pass.
_NORMS = ("wide1", "normal1", "normalized1", "wide2", "normal2", "normalized2")
EAGER_LLAMA = (*_NORMS, "query", "key", "value", "context", "gate", "silu", "up", "hidden")
EAGER_MPT = ("normalized1", "query", "key", "value", "context", "middle", "normalized2", "up", "hidden")
PRODUCTS = ("query", "key", "value", "context", "out", "up", "gate", "down")  # MaxText's policy "minimal_flash"
SELECTED = ("query", "value", "context", "gate", "down")  # torchtitan: attention, and every second matrix product

_LITGPT = Training(4, "bfloat16", saved=EAGER_LLAMA, eager_loss="bfloat16", repeats_keys=True)
_TITAN = Training(2, reduced="float32", saved=SELECTED, eager_loss="float32")
# As MaxText counts: six for each parameter and token, and half of the attention.
_MAXTEXT_OPERATIONS = 6 * LLAMA2.parameters() * 4 * 4096 + 6 * 32 * 32 * 128 * 4096**2 * 4
_MPT_1B = Training(14, reduced="float32", saved=EAGER_MPT)
_MPT_7B = Training(6, reduced="float32", saved=EAGER_MPT)


@dataclass(frozen=True)
class Case:
    """A published measurement.

    Args:
        topology: the devices.
        model: the decoder.
        training: how it is trained.
        seconds: the time of a step.
        source: the page with the measurement.
        memory: the bytes of a device, None if they are not published.
    """

    topology: str
    model: Decoder
    training: Training
    seconds: float
    source: str
    memory: float | None = None


# A step that adds up the gradients of several parts of its rows is planned for one part.
CASES = {
    "TinyLlama 1.1B, FSDP": Case("a100-40gb:8", TINYLLAMA, _LITGPT, 0.45657, LITGPT, 22.13e9),
    "TinyLlama 1.1B, replicated": Case(
        "a100-40gb:8", TINYLLAMA, replace(_LITGPT, sharded=False, accumulates=True), 0.56946, LITGPT, 32.04e9
    ),
    "TinyLlama 1.1B, one GPU": Case(
        "a100-40gb:1", TINYLLAMA, replace(_LITGPT, accumulates=True), 0.44765, LITGPT, 29.84e9
    ),
    "MPT 1B on A100": Case("a100-80gb:8", MPT_1B, replace(_MPT_1B, accumulates=True), 917504 / 164109 / 4, FOUNDRY),
    "MPT 7B on A100": Case("a100-80gb:8", MPT_7B, replace(_MPT_7B, accumulates=True), 196608 / 37130 / 2, FOUNDRY),
    "MPT 1B": Case("h100:8", MPT_1B, _MPT_1B, 229376 / 363645, FOUNDRY),
    "MPT 7B": Case("h100:8", MPT_7B, _MPT_7B, 98304 / 85144, FOUNDRY),
    "Llama 2 7B, 2 rows": Case("h100:8", LLAMA2, Training(2, saved=PRODUCTS), 0.721, TOOLBOX),
    "Llama 2 7B, 4 rows": Case("h100:8", LLAMA2, Training(4, saved=PRODUCTS), _MAXTEXT_OPERATIONS / 492e12, MAXTEXT),
    "Llama 3 8B": Case("a100-80gb:8x8", LLAMA3, replace(_TITAN, rows=1), 8192 / 2973, TITAN_A100),
    "Llama 3.1 8B": Case("h100:8", LLAMA3, _TITAN, 2 * 8192 / 6667, TITAN, 77.0 * 2**30),
}


def plan_case(case: Case) -> Any:
    """Return the plan of a published step."""
    import jax
    import numpy as np

    import replicax as rx

    size = math.prod(int(side) for side in case.topology.partition(":")[2].split("x"))
    one = jax.sharding.Mesh(np.array(jax.devices()[:1]), (decoders.AXIS,))
    mesh = jax.sharding.AbstractMesh((size,), (decoders.AXIS,), (jax.sharding.AxisType.Auto,)) if size > 1 else one
    step, arguments = decoders.training_step(case.model, case.training, mesh)
    return rx.plan(step, arguments, topology=case.topology)[case.topology]


def describe(name: str, case: Case) -> dict[str, Any]:
    plan = plan_case(case)
    if plan.memory is None:
        raise SystemExit(f"{name} does not compile for {case.topology}: {plan.error}")
    return {
        "case": name,
        "topology": case.topology,
        "source": case.source,
        "batch": f"{case.training.rows} x {case.model.length}",
        "bounds": dict(plan.bounds),
        "least": plan.bound[1],
        "timeline": max(event.end for event in plan.timeline),
        "seconds": case.seconds,
        "products": sum(plan.products.values()),
        "planned": plan.memory.total,
        "memory": case.memory,
    }


def table(cases: list[dict[str, Any]]) -> Table:
    head = ["step", "topology", "rows x tokens", "measured, s", "least, s", "ratio", "in order, s", "ratio"]
    head += ["memory, GB", "planned, GB", "ratio"]
    rows = []
    for of in cases:
        texts = [of["case"], of["topology"], of["batch"], f"{of['seconds']:.3f}"]
        texts += [f"{of['least']:.3f}", f"{of['least'] / of['seconds']:.2f}"]
        texts += [f"{of['timeline']:.3f}", f"{of['timeline'] / of['seconds']:.2f}"]
        if of["memory"]:
            texts += [f"{of['memory'] / 1e9:.2f}", f"{of['planned'] / 1e9:.2f}", f"{of['planned'] / of['memory']:.2f}"]
        else:
            texts += ["–", f"{of['planned'] / 1e9:.2f}", "–"]
        rows.append(texts)
    return "Published steps beside their plans", head, rows


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--only", type=lambda text: text.split(";"), default=list(CASES), metavar="NAME;NAME")
    options = parsed(arguments)
    cases = [describe(name, CASES[name]) for name in options.only]
    finish(options, "the compilers", ("jax",), {"published": cases}, {"published": table(cases)})


if __name__ == "__main__":
    main()
