"""Functions of `tf.data` in TensorFlow's operations: replicax beside TensorFlow, in elements a second.

    python benchmarks/dataset_functions.py --tensorflow PYTHON      # an interpreter that has TensorFlow
    python benchmarks/dataset_functions.py --only "scalars,filter"  # some of them

Both sides run the same program. Each makes a dataset anew, takes its first batch (*first*, in milliseconds: functions
are traced and compiled in it), and then passes over the dataset, in turns with the other side. The table has the
medians of the rounds, and the median of the rounds' ratios: above 1 replicax is faster. *CPU* is the ratio of the CPU
times of the processes, which other load on the machine changes less.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

IMAGES, SCALARS, LINES, FILES = 5_000, 100_000, 20_000, 8
CASES: dict[str, tuple[int, Callable[[Any, Path], Any]]] = {}


def case(name: str, count: int) -> Callable[[Callable[[Any, Path], Any]], Callable[[Any, Path], Any]]:
    """Registers what makes a dataset of so many elements."""

    def register(make: Callable[[Any, Path], Any]) -> Callable[[Any, Path], Any]:
        CASES[name] = count, make
        return make

    return register


@functools.cache
def images() -> tuple[np.ndarray, np.ndarray]:
    numbers = np.random.default_rng(0)
    return numbers.integers(0, 256, (IMAGES, 32, 32, 3), np.uint8), numbers.integers(0, 10, IMAGES).astype(np.int64)


def augmenting(tf: Any) -> Callable[..., Any]:
    def augment(image, label):
        image = tf.cast(image, tf.float32) / 255.0
        image = tf.pad(image, [[4, 4], [4, 4], [0, 0]])
        corner = tf.random.uniform([2], 0, 9, tf.int32)
        image = tf.slice(image, tf.concat([corner, [0]], 0), [32, 32, 3])
        if tf.random.uniform([]) < 0.5:
            image = tf.reverse(image, [1])
        return (image - 0.5) / 0.25, label

    return augment


def rows(tf: Any) -> Any:
    return tf.data.Dataset.from_tensor_slices(images())


@case("augment images, batch", IMAGES)
def augment_serially(tf, folder):
    return rows(tf).map(augmenting(tf)).batch(128).prefetch(2)


@case("augment images, AUTOTUNE, batch", IMAGES)
def augment_in_parallel(tf, folder):
    return rows(tf).map(augmenting(tf), num_parallel_calls=tf.data.AUTOTUNE).batch(128).prefetch(tf.data.AUTOTUNE)


@case("shuffle, augment images, AUTOTUNE, batch, repeat 2", 2 * IMAGES)
def augment_shuffled(tf, folder):
    mapped = rows(tf).shuffle(IMAGES).map(augmenting(tf), num_parallel_calls=tf.data.AUTOTUNE)
    return mapped.batch(128).repeat(2).prefetch(tf.data.AUTOTUNE)


@case("augment images, cache, shuffle, batch", IMAGES)
def augment_cached(tf, folder):
    return rows(tf).map(lambda x, y: (tf.cast(x, tf.float32) / 255.0, y)).cache().shuffle(1000).batch(128).prefetch(2)


@case("batch, normalize", IMAGES)
def normalize_batches(tf, folder):
    def normalize(image, label):
        image = tf.cast(image, tf.float32) / 255.0
        return (image - tf.reduce_mean(image, [1, 2], keepdims=True)) / 0.25, tf.one_hot(label, 10)

    return rows(tf).batch(128).map(normalize, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)


@case("scalars, batch", SCALARS)
def scalars(tf, folder):
    return tf.data.Dataset.range(SCALARS).map(lambda x: x * 2 + 1).batch(256)


@case("scalars, AUTOTUNE, batch", SCALARS)
def scalars_in_parallel(tf, folder):
    mapped = tf.data.Dataset.range(SCALARS).map(lambda x: x * 2 + 1, num_parallel_calls=tf.data.AUTOTUNE)
    return mapped.batch(256).prefetch(tf.data.AUTOTUNE)


@case("scalars, shuffle, two maps, batch", SCALARS)
def scalars_shuffled(tf, folder):
    mapped = tf.data.Dataset.range(SCALARS).shuffle(1000).map(lambda x: (x, tf.cast(x, tf.float32) / 3.0))
    return mapped.map(lambda x, y: (x, tf.sqrt(y))).batch(256)


@case("scalars one by one", 20_000)
def scalars_one_by_one(tf, folder):
    return tf.data.Dataset.range(20_000).map(lambda x: x * 2 + 1)


@case("few scalars", 100)
def few_scalars(tf, folder):
    return tf.data.Dataset.range(100).map(lambda x: x * 2 + 1).batch(10)


@case("filter scalars, batch", SCALARS)
def filter_scalars(tf, folder):
    return tf.data.Dataset.range(SCALARS).filter(lambda x: x % 3 == 0).batch(256)


@case("filter images, map, batch", IMAGES)
def filter_images(tf, folder):
    chosen = rows(tf).filter(lambda x, y: y < 5)
    return chosen.map(lambda x, y: (tf.cast(x, tf.float32) / 255.0, y)).batch(128)


@case("windows, flat_map", 20_000)
def windows(tf, folder):
    made = tf.data.Dataset.range(20_000).window(16, shift=16, drop_remainder=True)
    return made.flat_map(lambda w: w.batch(16)).map(lambda x: (x[:-1], x[1:])).batch(32)


@case("interleave files of text", LINES)
def interleaved(tf, folder):
    files = tf.data.Dataset.from_tensor_slices(sorted(str(p) for p in folder.glob("lines*.txt")))
    lines = files.interleave(tf.data.TextLineDataset, cycle_length=4, num_parallel_calls=tf.data.AUTOTUNE)
    return lines.batch(256).prefetch(tf.data.AUTOTUNE)


@case("interleave ranges", SCALARS)
def interleaved_ranges(tf, folder):
    starts = tf.data.Dataset.range(100)
    return starts.interleave(
        lambda i: tf.data.Dataset.range(1000).map(lambda x: x + i * 1000), cycle_length=4, block_length=16
    ).batch(256)


@case("numpy_function", 5_000)
def numpy_functions(tf, folder):
    def scaled(x):
        return tf.numpy_function(lambda y: np.float32(y) / np.float32(255), [x], tf.float32)

    return tf.data.Dataset.from_tensor_slices(images()[0]).map(scaled, num_parallel_calls=tf.data.AUTOTUNE).batch(128)


@case("py_function", 5_000)
def py_functions(tf, folder):
    def scaled(x):
        return tf.py_function(lambda y: tf.cast(y, tf.float32) / 255.0, [x], tf.float32)

    return tf.data.Dataset.from_tensor_slices(images()[0]).map(scaled, num_parallel_calls=tf.data.AUTOTUNE).batch(128)


@case("generator, map, batch", 20_000)
def generated(tf, folder):
    def numbers():
        yield from map(np.float32, range(20_000))

    made = tf.data.Dataset.from_generator(numbers, output_signature=tf.TensorSpec([], tf.float32))
    return made.map(lambda x: x / 2.0).batch(256).prefetch(2)


@case("strings: split, look up, pad", LINES)
def strings(tf, folder):
    words = [f"word{i}" for i in range(1000)]
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(tf.constant(words), tf.range(1000, dtype=tf.int64)), -1
    )
    lines = tf.data.TextLineDataset(str(folder / "lines.txt"))
    tokens = lines.map(lambda line: table.lookup(tf.strings.split(line)), num_parallel_calls=tf.data.AUTOTUNE)
    return tokens.padded_batch(64).prefetch(tf.data.AUTOTUNE)


@case("strings: batch, to numbers", LINES)
def string_batches(tf, folder):
    lines = tf.data.TextLineDataset(str(folder / "numbers.txt")).batch(256)
    return lines.map(lambda x: tf.strings.to_number(x) * 2.0, num_parallel_calls=tf.data.AUTOTUNE).prefetch(2)


@case("strings: one by one, to numbers", LINES)
def string_numbers(tf, folder):
    lines = tf.data.TextLineDataset(str(folder / "numbers.txt"))
    return lines.map(lambda x: tf.strings.to_number(x) * 2.0, num_parallel_calls=tf.data.AUTOTUNE).batch(256)


@case("features in dictionaries", 20_000)
def dictionaries(tf, folder):
    numbers = np.random.default_rng(0)
    features = {f"f{i}": numbers.random(20_000).astype(np.float32) for i in range(20)}
    made = tf.data.Dataset.from_tensor_slices((features, numbers.integers(0, 2, 20_000)))

    def derived(x, y):
        return {**{k: v * 2.0 for k, v in x.items()}, "sum": x["f0"] + x["f1"]}, y

    return made.shuffle(1000).map(derived, num_parallel_calls=tf.data.AUTOTUNE).batch(256).prefetch(tf.data.AUTOTUNE)


def write(folder: Path) -> None:
    numbers = np.random.default_rng(0)
    lines = [" ".join(f"word{w}" for w in numbers.integers(0, 1200, numbers.integers(3, 20))) for _ in range(LINES)]
    (folder / "lines.txt").write_text("\n".join(lines))
    for part in range(FILES):
        (folder / f"lines{part}.txt").write_text("\n".join(lines[part::FILES]))
    (folder / "numbers.txt").write_text("\n".join(str(x) for x in numbers.random(LINES)))


def one_pass(dataset: Any) -> dict[str, float]:
    start, used, first = time.perf_counter(), cpu(), 0.0
    for _element in dataset:
        first = first or time.perf_counter() - start
    return {"first": first, "pass": time.perf_counter() - start, "cpu": cpu() - used}


def cpu() -> float:
    spent = resource.getrusage(resource.RUSAGE_SELF)
    return spent.ru_utime + spent.ru_stime


def side(module: str, folder: Path) -> None:
    """Answers each line of the standard input, which names a case, with the times of one pass over its dataset."""
    tf = importlib.import_module(module)
    held: dict[str, Any] = {}
    list(tf.data.Dataset.range(2).map(lambda x: x + 1))  # what is loaded and compiled once
    for line in sys.stdin:
        name = line.strip()
        start = time.perf_counter()
        fresh = name not in held
        if fresh:
            held.clear()
            held[name] = CASES[name][1](tf, folder)
        built = time.perf_counter() - start
        times = one_pass(held[name])
        times["first"] += built
        print(json.dumps(times), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensorflow", metavar="PYTHON", default=os.environ.get("REPLICAX_TENSORFLOW_PYTHON"))
    parser.add_argument("--only", help="parts of names of cases, with commas between them")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--side", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        return side(options.side[0], Path(options.side[1]))
    parts = options.only.split(",") if options.only else [""]
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        commands = {"replicax": [sys.executable, "replicax.tf"]}
        if options.tensorflow:
            commands["TensorFlow"] = [options.tensorflow, "tensorflow"]
        processes = {
            who: subprocess.Popen(
                [python, __file__, "--side", module, folder],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                stderr=None if module == "replicax.tf" else subprocess.DEVNULL,
            )  # fmt: skip
            for who, (python, module) in commands.items()
        }
        print(f"{'':52}{'first, ms':>20}{'elements a second':>26}{'ratio':>8}{'CPU':>8}")
        for name, (count, _) in CASES.items():
            if any(part in name for part in parts):
                measure(name, count, processes, options.rounds)
        for process in processes.values():
            process.stdin.close()
            process.wait()


def measure(name: str, count: int, processes: dict[str, subprocess.Popen[str]], rounds: int) -> None:
    """Prints the line of a case."""
    first = {who: ask(process, name)["first"] for who, process in processes.items()}
    times: dict[str, list[dict[str, float]]] = {who: [] for who in processes}
    for round_ in range(rounds):
        for who in list(processes)[:: 1 if round_ % 2 else -1]:
            times[who].append(ask(processes[who], name))
    rates = {who: count / statistics.median(t["pass"] for t in found) for who, found in times.items()}
    line = f"{name:52}" + "".join(f"{1e3 * seconds:10,.0f}" for seconds in first.values())
    line += "".join(f"{rate:13,.0f}" for rate in rates.values())
    if len(times) > 1:
        for what in ("pass", "cpu"):
            line += f"{statistics.median(b[what] / a[what] for a, b in zip(*times.values())):8.2f}"
    print(line, flush=True)


def ask(process: subprocess.Popen[str], name: str) -> dict[str, float]:
    process.stdin.write(name + "\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


if __name__ == "__main__":
    main()
