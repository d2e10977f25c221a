"""What calls between tasks take: empty ones, and arrays of 1 MB and of 100 MB to another process and back.

    python benchmarks/transport.py            # with TLS, over the loopback
    python benchmarks/transport.py --plain    # without (REPLICAX_JOB_SECRET=none)

`cpu` is the caller's processor time for a call.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable

import numpy as np

MB = 1 << 20
CALLS = {"empty": 300, "1 MB there": 50, "1 MB back": 50, "100 MB there": 1, "100 MB back": 1}  # in a round


def serve() -> None:
    from replicax._transport.service import Service

    arrays = {size: np.ones(size // 4, np.float32) for size in (MB, 100 * MB)}
    service = Service(
        "127.0.0.1:0",
        {"put": lambda request: ({}, []), "get": lambda request: ({}, [arrays[request.head["size"]]])},
    )
    service.start()
    print(service.address, flush=True)
    service.wait()


def calls_of(address: str) -> dict[str, Callable[[], object]]:
    from replicax._transport.peer import Peer

    peer = Peer(address)
    peer.wait_until_ready(60)
    small, large = (np.ones(size // 4, np.float32) for size in (MB, 100 * MB))
    return {
        "empty": lambda: peer.call("put"),
        "1 MB there": lambda: peer.call("put", {}, [small]),
        "1 MB back": lambda: peer.call("get", {"size": MB}),
        "100 MB there": lambda: peer.call("put", {}, [large]),
        "100 MB back": lambda: peer.call("get", {"size": 100 * MB}),
    }


def measured(call: Callable[[], object], times: int) -> tuple[float, float]:
    """Milliseconds of a call, and the caller's processor time in it."""
    start, cpu = time.perf_counter(), time.process_time()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times * 1e3, (time.process_time() - cpu) / times * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--plain", action="store_true", help="without TLS")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.serve:
        return serve()
    os.environ["REPLICAX_JOB_SECRET"] = "none" if options.plain else os.urandom(32).hex()
    server = subprocess.Popen([sys.executable, __file__, "--serve"], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        calls = calls_of(server.stdout.readline().strip())
        print(f"{'milliseconds':14}{'median':>10}{'least':>10}{'cpu':>10}")
        for name, call in calls.items():
            call()
            rounds = [measured(call, CALLS[name]) for _ in range(options.rounds)]
            times, cpu = zip(*rounds)
            figures = statistics.median(times), min(times), statistics.median(cpu)
            print(f"{name:14}" + "".join(f"{figure:10.3f}" for figure in figures), flush=True)
    finally:
        server.kill()
        server.wait()


if __name__ == "__main__":
    main()
