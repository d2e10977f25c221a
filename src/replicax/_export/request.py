"""A saved model as files that a Python without JAX and replicax can read: the request to `to_tensorflow`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np

from replicax._base import jax_internals
from replicax._base.atomic_files import AnyPath
from replicax._export.errors import ExportError
from replicax._saved_model import loading, structures


def write(model: AnyPath, folder: Path) -> Path:
    """Write a saved model into a folder as a request to convert it, and return the path of the request.

    Raises:
        OSError: there is no saved model.
        NotImplementedError: it is one of TensorFlow's.
        CheckpointError: it is damaged, or of a newer format.
        ExportError: a function of it cannot be converted.
    """
    saved = loading.SavedFiles(model)
    nodes: list[dict[str, Any]] = []
    for number, node in enumerate(saved.record["nodes"]):
        if node["kind"] == "variable":
            files = [folder / f"variable-{number}-{i}" for i in range(len(node["keys"]))]
            values = map(saved.values.get_tensor, node["keys"])
            node = {**node, "arrays": [_array(value, file) for value, file in zip(values, files)]}
        elif node["kind"] == "asset":
            node = {**node, "file": os.path.abspath(saved.path(node["file"]))}
        nodes.append(node)
    modules: dict[bytes, str] = {}
    programs = [_program(entry, saved, modules) for entry in saved.record["functions"]]
    for module, name in modules.items():
        (folder / name).write_bytes(module)
    request = folder / "request.json"
    content = {"nodes": nodes, "programs": programs, "signatures": saved.record["signatures"]}
    request.write_text(json.dumps(content), encoding="utf-8")
    return request


def _array(value: Any, file: Path) -> dict[str, Any]:
    array = np.asarray(value)
    array.tofile(file)
    return {"file": file.name, "shape": list(array.shape), "dtype": array.dtype.name}


def _program(entry: dict[str, Any], saved: loading.SavedFiles, modules: dict[bytes, str]) -> dict[str, Any]:
    """Return the entry of a program, and put its module among the modules, by content."""
    program = saved.program(entry)
    if program.ordered_effects or program.unordered_effects:
        effects = ", ".join(map(str, (*program.ordered_effects, *program.unordered_effects)))
        raise ExportError(
            f"{entry['name']} cannot be converted: it has effects that only JAX carries out ({effects}). Leave "
            "callbacks and prints out of functions that are served."
        )
    module = jax_internals.in_oldest_stablehlo(program.mlir_module_serialized)
    args, kwargs = structures.decoded(entry["args"])
    tensors = len(structures.places([args, kwargs]))
    states = len(program.in_avals) - tensors
    return {
        **entry,
        "module": modules.setdefault(module, f"module-{len(modules)}"),
        "version": program.calling_convention_version,
        "platforms": list(program.platforms),
        "kept": list(program.module_kept_var_idx),
        "tensors": [_type(kind) for kind in program.in_avals[states:]],
        "outputs": [_type(kind) for kind in program.out_avals],
    }


def _type(kind: jax.core.ShapedArray) -> list[Any]:
    """Return shape and dtype as TensorFlow has them: None for a size that is open, and keys as their numbers."""
    if jax.dtypes.issubdtype(kind.dtype, jax.dtypes.prng_key):
        raw = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), kind.dtype))
        kind = jax.core.ShapedArray((*kind.shape, *raw.shape), raw.dtype)
    return [[size if isinstance(size, int) else None for size in kind.shape], kind.dtype.name]
