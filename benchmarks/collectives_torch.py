"""PyTorch's contender: Gloo's `all_reduce` between processes. Run by collectives.py with an interpreter that has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import payloads
import serving
import torch
import torch.distributed


def contender(payload: str) -> Callable[[], Any]:
    """All arrays in one vector, as DistributedDataParallel packs gradients; the inputs stay as they are."""
    rank, _ = serving.task()
    values = [torch.from_numpy(array) for array in payloads.arrays(payload, rank)]
    sizes = [value.numel() for value in values]

    def all_reduce() -> list[torch.Tensor]:
        vector = torch.cat(values) if len(values) > 1 else values[0].clone()
        torch.distributed.all_reduce(vector)
        return list(vector.split(sizes))

    return all_reduce


def sums(found: list[torch.Tensor]) -> list[np.ndarray]:
    return [part.numpy() for part in found]


def answering() -> serving.Answering:
    rank, addresses = serving.task()
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://{addresses[0]}", rank=rank, world_size=len(addresses)
    )
    return payloads.Caller({"PyTorch": contender}, sums, torch.__version__)


if __name__ == "__main__":
    serving.serve(answering)
