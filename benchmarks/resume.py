"""What it takes to go on after a million elements of a dataset: from `restore_state` to the next element.

    python benchmarks/resume.py                 # all sources
    python benchmarks/resume.py --elements 100000 --only records

The map costs 20 microseconds an element where it is called, which is little for a function that decodes or augments.
The processor time is good on a busy machine, too.
Sources that cannot leave elements out are gone through again; they are the last of the table.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
import warnings
from collections.abc import Callable

import numpy as np

import replicax as rx
from replicax.data import Dataset

SHUFFLED, BATCH = 10_000, 100


def costly(*element: object) -> object:
    until = time.thread_time() + 20e-6
    while time.thread_time() < until:
        pass
    return element[0] if len(element) == 1 else element


def mapped(dataset: Dataset) -> Dataset:
    return dataset.map(costly).shuffle(SHUFFLED, seed=1).batch(BATCH)


def files(folder: str, count: int) -> tuple[list[str], list[str], list[str]]:
    """Returns files of records, of lines and of records of one length, ten of each, with `count` elements in all."""
    names = [[os.path.join(folder, f"{kind}{i}") for i in range(10)] for kind in ("records", "lines", "fixed")]
    data = bytes(range(65, 91)) * 4
    for number in range(10):
        with rx.data.TFRecordWriter(names[0][number]) as writer:
            for _ in range(count // 10):
                writer.write(data)
        for kind, text in ((1, data + b"\n"), (2, data)):
            with open(names[kind][number], "wb") as file:
                file.write(text * (count // 10))
    return names[0], names[1], names[2]


def datasets(folder: str, count: int) -> dict[str, Callable[[], Dataset]]:
    rows = np.zeros((count + 50_000, 8), np.float32)
    records, lines, fixed = files(folder, count + 50_000)
    few = np.zeros((1000, 8), np.float32)
    whole = Dataset.from_tensor_slices(rows)
    shard = lambda name: rx.data.TFRecordDataset(name)  # noqa: E731
    return {
        "range, batch": lambda: Dataset.range(count + 50_000).batch(BATCH),
        "arrays, shuffle, repeat, batch": lambda: whole.shuffle(SHUFFLED, seed=1).repeat().batch(BATCH),
        "1000 rows, shuffle, repeat, batch": lambda: (
            Dataset.from_tensor_slices(few).shuffle(1000, seed=1).repeat().batch(BATCH)
        ),
        "arrays, map, shuffle, batch": lambda: mapped(whole),
        "arrays, map, batch, prefetch": lambda: whole.map(costly).batch(BATCH).prefetch(2),
        "arrays, map in threads, shuffle, batch": lambda: (
            whole.map(costly, num_parallel_calls=2).shuffle(SHUFFLED, seed=1).batch(BATCH)
        ),
        "TFRecord files, map, shuffle, batch": lambda: mapped(rx.data.TFRecordDataset(records)),
        "TFRecord files interleaved, map, shuffle, batch": lambda: mapped(
            Dataset.from_tensor_slices(np.array(records, object)).interleave(shard, cycle_length=4)
        ),
        "text files, map, shuffle, batch": lambda: mapped(rx.data.TextLineDataset(lines)),
        "files of fixed length, map, shuffle, batch": lambda: mapped(rx.data.FixedLengthRecordDataset(fixed, 104)),
        "zip of two, map, shuffle, batch": lambda: mapped(Dataset.zip(whole, whole.map(lambda x: x[0]))),
        "again: filter, map, shuffle, batch": lambda: mapped(whole.filter(lambda x: True)),
        "again: generator, map, shuffle, batch": lambda: mapped(Dataset.from_generator(lambda: iter(rows))),
    }


def position_after(dataset: Dataset, count: int) -> bytes:
    """Returns the state of an iterator that has given `count` elements, without having it give them."""
    state: bytes = iter(dataset)._state_at(count // BATCH)
    return state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--elements", type=int, default=1_000_000)
    parser.add_argument("--only", default="", help="a part of a row's name")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        for name, make in datasets(folder, arguments.elements).items():
            if arguments.only not in name:
                continue
            state = position_after(make(), arguments.elements)
            iterator, begun, spent = iter(make()), time.perf_counter(), time.process_time()
            iterator.restore_state(state)
            next(iterator)
            took, spent = time.perf_counter() - begun, time.process_time() - spent
            print(f"{took:8.2f} s, {spent:7.2f} s of processor time  {name}", flush=True)


if __name__ == "__main__":
    main()
