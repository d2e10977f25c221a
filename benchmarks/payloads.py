"""What the replicas add up: so many arrays of so many numbers. And how a contender is asked to do it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

# Name -> arrays of a replica, and float32 numbers in each.
PAYLOADS = {
    "4 B": (1, 1),
    "1 KB": (1, 256),
    "64 KB": (1, 1 << 14),
    "1 MB": (1, 1 << 18),
    "16 MB": (1, 1 << 22),
    "64 MB": (1, 1 << 24),
    "100 x 1 KB": (100, 256),
}


def arrays(payload: str, replica: int) -> list[np.ndarray]:
    """A replica's arrays, which differ from all others'."""
    count, size = PAYLOADS[payload]
    rng = np.random.default_rng(replica)
    return [rng.standard_normal(size, np.float32) for _ in range(count)]


class Caller:
    """Answers collectives.py: a contender is made for each payload, and called so many times.

    Args:
        contenders: makes the function of a contender for a payload; it returns when the sums are there.
        sums: the sums as numpy arrays of what such a function returned.
        version: of the library.
    """

    def __init__(
        self,
        contenders: dict[str, Callable[[str], Callable[[], Any]]],
        sums: Callable[[Any], list[np.ndarray]],
        version: str,
    ):
        self._contenders, self._sums, self._version = contenders, sums, version
        self._calls: dict[str, Callable[[], Any]] = {}

    def __call__(self, request: dict[str, Any]) -> dict[str, Any]:
        name = request.get("contender", "")
        if request["do"] == "version":
            return {"version": self._version}
        if request["do"] == "build":
            self._calls[name] = self._contenders[name](request["payload"])
            sums = self._sums(self._calls[name]())
            return {"sums": [float(sums[0][0]), float(sums[-1][-1])]}
        if request["do"] == "drop":
            self._calls.clear()
            return {}
        call = self._calls[name]
        call()  # so that all processes are there when the time begins
        start = time.perf_counter()
        for _ in range(request["steps"]):
            call()
        return {"seconds": time.perf_counter() - start}
