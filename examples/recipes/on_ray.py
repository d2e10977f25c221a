"""Runs a training program as the workers of one job on a Ray cluster.

    python on_ray.py --workers 2 --cpus 8 --gpus 4 train.py --epochs 10

Each worker is an actor with a bundle of resources of its own. They run the program with TF_CONFIG set, so that it has
no word about Ray in it: `replicax.MultiWorkerMirroredStrategy()` finds the others.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import socket
import sys

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


@ray.remote
class Worker:
    """A worker, on whichever machine Ray has put it."""

    def address(self):
        self.held = socket.socket()  # until the program starts, so that nobody else gets this port
        self.held.bind(("", 0))
        host = ray.util.get_node_ip_address()
        return f"{f'[{host}]' if ':' in host else host}:{self.held.getsockname()[1]}"

    def run(self, index, addresses, program, arguments):
        self.held.close()
        task = {"type": "worker", "index": index}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": task})
        sys.argv = [program, *arguments]
        runpy.run_path(program, run_name="__main__")


def run(options):
    """Runs the program once; raises the first error of a worker, with its traceback, after all have ended."""
    bundle = {"CPU": options.cpus, **({"GPU": options.gpus} if options.gpus else {})}
    group = placement_group([bundle] * options.workers, strategy="SPREAD")
    try:
        ray.get(group.ready(), timeout=options.start_timeout)
        workers = [
            Worker.options(
                num_cpus=options.cpus,
                num_gpus=options.gpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
            ).remote()
            for index in range(options.workers)
        ]
        addresses = ray.get([worker.address.remote() for worker in workers])
        running = [
            worker.run.remote(index, addresses, options.program, options.arguments)
            for index, worker in enumerate(workers)
        ]
        while running:
            done, running = ray.wait(running)
            ray.get(done)
    finally:
        remove_placement_group(group)  # which ends the workers in it


def main():
    """Reads the command line, and runs the program until it succeeds or has failed too often."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--cpus", type=int, default=1, help="of each worker")
    parser.add_argument("--gpus", type=int, default=0, help="of each worker")
    parser.add_argument("--max-restarts", type=int, default=0)
    parser.add_argument("--start-timeout", type=float, default=300.0, help="seconds until the cluster has room")
    parser.add_argument("program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    for attempt in range(options.max_restarts + 1):
        variables = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", "REPLICAX_RESTART_COUNT": str(attempt)}
        ray.init(runtime_env={"working_dir": ".", "env_vars": variables})
        try:
            return run(options)
        except ray.exceptions.RayError as error:
            if attempt == options.max_restarts:
                raise
            print(f"{error}\nRestart {attempt + 1} of at most {options.max_restarts}", file=sys.stderr)
        finally:
            ray.shutdown()


if __name__ == "__main__":
    main()
