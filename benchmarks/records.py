"""Records of `tf.train.Example` through `tf.data`: replicax beside TensorFlow, in records a second.

    python benchmarks/records.py --tensorflow PYTHON      # an interpreter that has TensorFlow

The records have 10 to 40 features, a third each of floats, integers and strings, as wide and deep models take them.
They are read from a TFRecord file, and parsed in batches by `parse_example`, or one by one by `parse_single_example`,
on both sides by the same program. The sides take turns; the table has the best of the rounds, their ratio, and the
ratio of the CPU time for a record: TensorFlow parses a batch in several threads.

    python benchmarks/records.py --messages               # `parse_example` beside the classes of protobuf

compares the time of a batch with that of parsing each record as a message, whose values then become arrays.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
import time
import timeit
from pathlib import Path

import numpy as np

RECORDS, FEATURES, ROUNDS = 6_400, (10, 20, 40), 3


def name(j: int) -> str:
    return ("dense_%d", "id_%d", "cat_%d")[j % 3] % j


def write(tf, path: Path, count: int) -> None:
    numbers = np.random.default_rng(0)
    train = tf.train
    with tf.io.TFRecordWriter(str(path)) as writer:
        for _ in range(RECORDS):
            features = {}
            for j in range(count):
                if j % 3 == 0:
                    feature = train.Feature(float_list=train.FloatList(value=[numbers.random()]))
                elif j % 3 == 1:
                    feature = train.Feature(int64_list=train.Int64List(value=[int(numbers.integers(100_000))]))
                else:
                    feature = train.Feature(bytes_list=train.BytesList(value=[b"v%d" % numbers.integers(5000)]))
                features[name(j)] = feature
            writer.write(train.Example(features=train.Features(feature=features)).SerializeToString())


def pipelines(tf, path: Path, count: int):
    fixed = {name(j): tf.io.FixedLenFeature([], (tf.float32, tf.int64, tf.string)[j % 3]) for j in range(count)}
    several = {key: tf.io.VarLenFeature(feature.dtype) for key, feature in fixed.items()}
    records = tf.data.TFRecordDataset(str(path))
    for size in (32, 128, 512):
        yield f"parse_example, {size}", records.batch(size).map(lambda x: tf.io.parse_example(x, fixed))
    batches = records.batch(128)
    yield (
        "parse_example, 128, AUTOTUNE",
        batches.map(lambda x: tf.io.parse_example(x, fixed), num_parallel_calls=tf.data.AUTOTUNE).prefetch(2),
    )
    yield "parse_example, 128, VarLen", batches.map(lambda x: tf.io.parse_example(x, several))
    one = records.map(lambda x: tf.io.parse_single_example(x, fixed))
    yield "parse_single_example, batch 128", one.batch(128)
    one = records.map(lambda x: tf.io.parse_single_example(x, fixed), num_parallel_calls=tf.data.AUTOTUNE)
    yield "parse_single_example, AUTOTUNE, batch 128", one.batch(128).prefetch(2)


def side(module: str, folder: Path, features: list[int]) -> None:
    """Answers each line of the standard input with the rates of one round, by the clock and by the CPU."""
    tf = importlib.import_module(module)
    if not (folder / f"records.{features[-1]}").exists():
        for count in features:
            write(tf, folder / f"records.{count}", count)
    made = {(n, what): d for n in features for what, d in pipelines(tf, folder / f"records.{n}", n)}
    for _ in sys.stdin:
        rates = {}
        for (count, what), dataset in made.items():
            start, cpu = time.perf_counter(), time.process_time()
            for _element in dataset:
                pass
            each = RECORDS / (time.perf_counter() - start), RECORDS / (time.process_time() - cpu)
            rates[f"{count} features: {what}"] = each
        print(json.dumps(rates), flush=True)


def messages(counts: list[int]) -> None:
    """Prints the time of `parse_example` for batches in memory, and of protobuf's own parser."""
    tf = importlib.import_module("replicax.tf")
    lists = {tf.float32: "float_list", tf.int64: "int64_list", tf.string: "bytes_list"}

    def parse(records, fixed):
        features = [tf.train.Example.FromString(record).features.feature for record in records]
        return {
            key: np.array([getattr(own[key], lists[feature.dtype]).value for own in features], feature.dtype)
            for key, feature in fixed.items()
        }

    print(f"{'microseconds a batch of 128':40} {'replicax':>10} {'protobuf':>10}")
    for count in counts:
        with tempfile.TemporaryDirectory() as folder:
            write(tf, path := Path(folder) / "records", count)
            records = [bytes(record) for record in tf.data.TFRecordDataset(str(path)).take(128).as_numpy_iterator()]
        fixed = {name(j): tf.io.FixedLenFeature([], (tf.float32, tf.int64, tf.string)[j % 3]) for j in range(count)}
        batch = np.array(records, object)
        ours = min(timeit.repeat(lambda: tf.io.parse_example(batch, fixed), number=20, repeat=7)) / 20  # noqa: B023
        theirs = min(timeit.repeat(lambda: parse(records, fixed), number=5, repeat=7)) / 5  # noqa: B023
        print(f"{f'{count} features':40} {ours * 1e6:10,.0f} {theirs * 1e6:10,.0f} {theirs / ours:5.1f} x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensorflow", help="an interpreter that has TensorFlow")
    parser.add_argument("--features", type=int, nargs="+", default=FEATURES, help="how many features records have")
    parser.add_argument("--side", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--messages", action="store_true", help="compare with the classes of protobuf")
    options = parser.parse_args()
    if options.messages:
        return messages(options.features)
    if options.side:
        return side(options.side[0], Path(options.side[1]), [int(count) for count in options.side[2:]])
    with tempfile.TemporaryDirectory() as folder:
        commands = {"replicax": [sys.executable, "replicax.tf"]}
        if options.tensorflow:
            commands["TensorFlow"] = [options.tensorflow, "tensorflow"]
        processes = {}
        rates: dict[str, dict[str, tuple[float, float]]] = {who: {} for who in commands}
        for who, (python, module) in commands.items():
            processes[who] = subprocess.Popen(
                [python, __file__, "--side", module, folder, *map(str, options.features)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            )  # fmt: skip
            ask(processes[who])  # the files are written, and functions compiled
        for _ in range(ROUNDS):
            for who, process in processes.items():
                for what, (clock, cpu) in ask(process).items():
                    best = rates[who].get(what, (0.0, 0.0))
                    rates[who][what] = max(clock, best[0]), max(cpu, best[1])
        for process in processes.values():
            process.stdin.close()
            process.wait()
    print(f"{'records a second':55} {'replicax':>10} {'TensorFlow':>10}   clock     CPU")
    for what, (clock, cpu) in rates["replicax"].items():
        line = f"{what:55} {clock:10,.0f}"
        if (theirs := rates.get("TensorFlow", {}).get(what)) is not None:
            line += f" {theirs[0]:10,.0f} {clock / theirs[0]:5.2f} x {cpu / theirs[1]:5.2f} x"
        print(line)


def ask(process: subprocess.Popen[str]) -> dict[str, tuple[float, float]]:
    process.stdin.write("\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


if __name__ == "__main__":
    main()
