"""One contender's steps in a fresh process, and what they hold. Run by memory.py."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import inspect
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import jax
import models
import numpy as np
from side_jax import Loop, set_devices

import replicax as rx


def forget_peak() -> None:
    """What was freed goes back to the system, and Linux counts the process's peak anew."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # elsewhere it stays the peak since the start
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")


def peak() -> int:
    """The most bytes of memory that the process held since then."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    except OSError:
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def live(device: Any) -> int:
    """The bytes of all buffers on a device; arrays that share one count it once."""
    gc.collect()
    found = {}
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            if shard.device == device:
                found[shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    return sum(found.values())


def measured(name: str, model: Any, replicas: int, steps: int) -> dict[str, float] | None:
    if name == "sharded" and "shard_optimizer_state" not in inspect.signature(rx.MirroredStrategy.__init__).parameters:
        return None
    loop = Loop(name, model, replicas)
    loop.run(3)
    program = loop.contender.lower().compile().memory_analysis()
    held = sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(model.parameters()))
    batch = sum(part.nbytes for part in models.batch(model, replicas)) // replicas
    since_start = peak()
    forget_peak()
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    loop.run(steps)
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    host, alive = peak(), live(jax.devices()[0])
    arguments, results = program.argument_size_in_bytes, program.output_size_in_bytes
    return {
        "arguments": arguments,
        "temp": program.temp_size_in_bytes,
        "device": arguments + results - program.alias_size_in_bytes + program.temp_size_in_bytes,
        "live": alive,
        "optimizer": max(0, alive - held - batch),
        "host": host,
        "process": max(host, since_start),
        "seconds": seconds / steps,
        "faults": (after.ru_minflt - before.ru_minflt) / steps,
        "system": (after.ru_stime - before.ru_stime) / steps,
    }


if __name__ == "__main__":
    contender, model_name, replicas_, steps_ = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    set_devices("cpu", replicas_)
    print(json.dumps(measured(contender, models.MODELS[model_name], replicas_, steps_)))
