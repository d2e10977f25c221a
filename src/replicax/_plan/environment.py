"""The environments of the compilers for GPUs and TPUs, apart from the user's.

With libtpu or the plugin for GPUs beside it, JAX starts more slowly, takes more memory and prints messages. So each
compiler has an environment, for each version of JAX.
"""

from __future__ import annotations

import importlib.metadata

from replicax._base.environments import Environment
from replicax._base.planning import PlanError

KINDS = ("gpu", "tpu")
VARIABLE = "REPLICAX_PLAN_PYTHON"


def compiler(kind: str) -> Environment:
    """Return the environment of the compiler for "gpu" or "tpu", for the version of JAX that is installed here."""
    jax = importlib.metadata.version("jax")
    title = f"{kind.upper()}s"
    if kind == "gpu":  # the plugin depends on CUDA's libraries, 4 GB, which only running programs need
        packages: tuple[str, ...] = (f"jax=={jax}", "flatbuffers")
        alone: tuple[str, ...] = (f"jax-cuda12-plugin=={jax}", f"jax-cuda12-pjrt=={jax}", "nvidia-cuda-nvcc-cu12")
    else:
        packages, alone = (f"jax[tpu]=={jax}", "flatbuffers"), ()
    return Environment(
        folder=f"plan/jax-{jax}-{kind}",
        contents=f"XLA's compiler for {title}",
        packages=packages,
        alone=alone,
        space=1.3e9 if kind == "gpu" else 1.4e9,
        module="jax_cuda12_plugin" if kind == "gpu" else "libtpu",
        variable=VARIABLE,
        purpose=f"Plans for {title} are compiled there from now on.",
        limits="It exists only for Linux.",
        error=PlanError,
    )
