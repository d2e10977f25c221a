"""What both sides of parameter_servers.py share: their tasks, the data, and how they answer."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

WORKERS = 2
ROWS, WIDTH, BATCH = 100_000, 64, 1024  # of the embedding
DENSE = 512  # rows and columns of each of the two dense matrices, of 1 MB
RATE = 0.1

Works = Mapping[str, Callable[[int], None]]  # each does so many closures, or so many reads or writes


def embedding() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The table, and the ids and targets of 64 batches."""
    rng = np.random.default_rng(1)
    table = rng.uniform(-0.05, 0.05, (ROWS, WIDTH)).astype("float32")
    return table, rng.integers(0, ROWS, (64, BATCH)).astype("int32"), rng.random((64, BATCH, 1), dtype="float32")


def matrices() -> list[np.ndarray]:
    """The weights of the dense model."""
    rng = np.random.default_rng(2)
    return [0.05 * rng.normal(size=(DENSE, DENSE)).astype("float32") for _ in range(2)]


class Tasks:
    """The workers and parameter servers, each a process, which end with this one."""

    def __init__(self, script: str, servers: int):
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(1 + WORKERS + servers)]
        ports = [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]
        for one in sockets:
            one.close()
        self.spec = {"chief": ports[:1], "worker": ports[1 : 1 + WORKERS], "ps": ports[1 + WORKERS :]}
        self._processes = [
            subprocess.Popen(
                [sys.executable, script, "task", json.dumps(self.spec), job, str(n)], stdin=subprocess.PIPE
            )
            for job in ("worker", "ps")
            for n in range(len(self.spec[job]))
        ]

    def cpu(self) -> float:
        """The seconds of CPU time that all tasks and this process have had."""
        ticks = 0
        for number in (os.getpid(), *(process.pid for process in self._processes)):
            with open(f"/proc/{number}/stat") as file:
                ticks += sum(map(int, file.read().rsplit(")", 1)[1].split()[11:13]))
        return ticks / os.sysconf("SC_CLK_TCK")


def task() -> tuple[dict[str, list[str]], str, int]:
    """The cluster, and which task of it this process is. It ends when the one that started it has ended."""

    def end() -> None:
        sys.stdin.read()
        os._exit(0)

    threading.Thread(target=end, daemon=True).start()
    return json.loads(sys.argv[2]), sys.argv[3], int(sys.argv[4])


def answering(tasks: Tasks, works: Works, version: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """What answers the requests of parameter_servers.py."""

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        if request["do"] == "version":
            return {"version": version}
        cpu, since = tasks.cpu(), time.perf_counter()
        works[request["work"]](request["count"])
        return {"seconds": time.perf_counter() - since, "cpu": tasks.cpu() - cpu}

    return answer
