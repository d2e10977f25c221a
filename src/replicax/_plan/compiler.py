"""Compiles an exported program and measures it. This file runs as a program, and needs only JAX:

    python compiler.py REQUEST.json

For TPUs and GPUs the Python of an environment with their compiler runs it (see `apart`), so it imports nothing of
replicax.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Answers to what libtpu asks a machine with TPUs. Here it is loaded only for its compiler.
_WITHOUT_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
}
# Autotuning needs a GPU. Without it, XLA would use its Triton kernels for all products, while programs on real GPUs
# mostly call cuBLAS.
_GPU_OPTIONS = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
_MODULES = {"tpu": [["libtpu"]], "cuda": [["jax_cuda12_plugin", "jax_cuda13_plugin"], ["nvidia"]]}
_SIZES = {
    "arguments": "argument_size_in_bytes",
    "outputs": "output_size_in_bytes",
    "aliased": "alias_size_in_bytes",
    "temporaries": "temp_size_in_bytes",
    "code": "generated_code_size_in_bytes",
}


def measure(compiled: Any, seconds: float) -> dict[str, Any]:
    """Return the figures of a compiled program, in types of JSON."""
    memory, costs = compiled.memory_analysis(), compiled.cost_analysis() or {}
    return {
        "memory": {name: int(getattr(memory, attribute)) for name, attribute in _SIZES.items()},
        "flops": float(costs.get("flops", 0.0)),
        "bytes": float(costs.get("bytes accessed", 0.0)),
        "seconds": seconds,
        "text": compiled.as_text(),
    }


def compile_request(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the measurements of a request's program, or the error of XLA.

    The request names the file of the exported program, the devices, the axes of the mesh, each argument's dimensions
    as the mesh splits them, and the donated arguments.
    """
    import jax
    import numpy as np
    from jax import export
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    devices = _devices(request)
    exported = export.deserialize(bytearray((folder / request["program"]).read_bytes()))
    sizes = tuple(request["axes"].values())
    order = request["order"] or range(math.prod(sizes))
    mesh = Mesh(np.array([devices[i] for i in order]).reshape(sizes), tuple(request["axes"]))
    arguments = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=NamedSharding(mesh, PartitionSpec(*_spec(each))))
        for aval, each in zip(exported.in_avals, request["specs"], strict=True)
    ]

    def step(*flat: Any) -> Any:
        args, kwargs = jax.tree.unflatten(exported.in_tree, flat)
        return exported.call(*args, **kwargs)

    traced = jax.jit(step, donate_argnums=tuple(request["donated"])).trace(*arguments)
    began = time.perf_counter()
    try:
        lowered = traced.lower(lowering_platforms=(request["platform"],))
        compiled = lowered.compile(_GPU_OPTIONS if request["platform"] == "cuda" else None)
    except jax.errors.JaxRuntimeError as error:
        return {"error": str(error), "seconds": time.perf_counter() - began}
    return measure(compiled, time.perf_counter() - began)


def _devices(request: dict[str, Any]) -> Sequence[Any]:
    """Return the devices of the request's topology."""
    import jax

    if request["platform"] == "cpu":
        return jax.devices()
    from jax.experimental import topologies

    if request["platform"] == "cuda":
        grid, target = request["grid"], request["target"]
        return topologies.get_topology_desc(platform="cuda", topology=grid, target_config=target).devices
    name, options = request["topology"], {}
    sides = [int(side) for side in name.partition(":")[2].split("x")]
    if any(side % 2 for side in sides[:2]):  # without the option, a host has 2x2 chips
        options["chips_per_host_bounds"] = [2 - side % 2 for side in (*sides[:2], 1)]
    return topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices


def _spec(dimensions: list[Any]) -> list[Any]:
    return [tuple(each) if isinstance(each, list) else each for each in dimensions]


def die_with_parent() -> None:
    """Let Linux kill this process when its parent ends, which would leave a compiler running for nobody."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


def main(path: str) -> None:
    """Compile the request in this file, and write its measurements beside it."""
    die_with_parent()
    file = Path(path)
    request = json.loads(file.read_text())
    needed = [["jax"], ["flatbuffers"], *_MODULES.get(request["platform"], [])]
    missing = [names[0] for names in needed if not any(importlib.util.find_spec(name) for name in names)]
    if missing:
        file.with_suffix(".result").write_text(json.dumps({"missing": missing}))
        return
    os.environ.update({**_WITHOUT_TPU, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"})
    import jax

    jax.config.update("jax_enable_x64", True)  # the program says which of its numbers have 64 bits
    if request["platform"] == "cpu":
        jax.config.update("jax_num_cpu_devices", math.prod(request["axes"].values()))
    result = compile_request(request, file.parent)
    result["jax"] = jax.__version__
    file.with_suffix(".result").write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
