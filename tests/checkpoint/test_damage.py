"""Damaged files of each format that replicax stores: a value is the one that was written, or there is an error.

`python scripts/storage.py` does the same with 300 damaged files of each, and prints what became of them.
"""

from __future__ import annotations

import collections
import json
import os
import random
import shutil
import warnings

import numpy as np
import pytest
from strategies import WORKERS

import replicax as rx

pytestmark = pytest.mark.skipif(WORKERS > 1, reason="no matter of jobs")

Dataset = rx.data.Dataset
TIMES = int(os.environ.get("REPLICAX_DAMAGES", "25"))
VALUES = np.random.default_rng(0).normal(size=300).astype(np.float32)


def flip(rng, content):
    at, bit = rng.randrange(len(content)), 1 << rng.randrange(8)
    return content[:at] + bytes([content[at] ^ bit]) + content[at + 1 :]


def truncate(rng, content):
    return content[: rng.randrange(len(content))]


def extend(rng, content):
    return content + rng.choice([b"\0", b"\0" * 4096, b"\n", content, rng.randbytes(50)])


def overwrite(rng, content):
    at, count = rng.randrange(len(content)), rng.randrange(1, 40)
    return content[:at] + rng.choice([bytes(count), rng.randbytes(count)])[: len(content) - at] + content[at + count :]


def swap(rng, content):
    """Exchanges two parts of the same length."""
    count = rng.randrange(1, len(content) // 2)
    first = rng.randrange(len(content) - 2 * count + 1)
    second = rng.randrange(first + count, len(content) - count + 1)
    parts = content[:first], content[first : first + count], content[first + count : second]
    return parts[0] + content[second : second + count] + parts[2] + parts[1] + content[second + count :]


DAMAGES = [flip, flip, flip, truncate, extend, overwrite, swap]


def damage(rng, folder):
    """Damages one file of a folder, or has two change places, and says how."""
    every = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    file, how = rng.choice(every), rng.choice([*DAMAGES, "missing", "exchange", "a folder"])
    if how == "exchange" and len(every) > 1:
        other = rng.choice([path for path in every if path != file])
        ours, theirs = file.read_bytes(), other.read_bytes()
        file.write_bytes(theirs)
        other.write_bytes(ours)
        return f"{file.name} and {other.name} exchanged"
    if how == "missing" or how == "exchange":
        file.unlink()
    elif how == "a folder":
        file.unlink()
        file.mkdir()
    else:
        file.write_bytes(how(rng, file.read_bytes()))
    return f"{file.name}: {getattr(how, '__name__', how)}"


# Each format: what writes it into a folder, and what reads it, which returns whether the value is the one written.


def elements():
    return Dataset.from_tensor_slices((VALUES, [b"text %d" % i for i in range(300)])).batch(30)


def same(dataset):
    seen = list(dataset.as_numpy_iterator())
    texts = [bytes(text) for _, block in seen for text in block]
    return texts == [b"text %d" % i for i in range(300)] and np.array_equal(
        np.concatenate([x for x, _ in seen]), VALUES
    )


def write_checkpoint(folder):
    rx.train.Checkpoint(v=rx.Variable(VALUES), w=rx.Variable(VALUES[:7])).write(folder / "model")


def read_checkpoint(folder):
    v, w = rx.Variable(VALUES * 0), rx.Variable(VALUES[:7] * 0)
    rx.train.Checkpoint(v=v, w=w).read(folder / "model").assert_consumed()
    return np.array_equal(v.numpy(), VALUES) and np.array_equal(w.numpy(), VALUES[:7])


def write_dataset(folder, compression=None):
    elements().enumerate().save(folder / "saved", compression=compression, shard_func=lambda i, _: i % 2)


def read_dataset(folder):
    return same(Dataset.load(folder / "saved").map(lambda i, element: element))


def write_cache(folder):
    same(elements().cache(str(folder / "cache")))


def read_cache(folder):
    return same(elements().cache(str(folder / "cache")))  # made anew where the file is missing


def write_snapshot(folder):
    same(elements().snapshot(folder / "snapshot"))


def read_snapshot(folder):
    return same(elements().snapshot(folder / "snapshot"))


def write_index(folder):
    v = rx.Variable(0.0)
    manager = rx.train.CheckpointManager(rx.train.Checkpoint(v=v), folder / "run", 9)
    for number in (1.0, 2.0, 3.0):
        v.assign(number)
        manager.save()
    os.makedirs(folder / "damaged")
    os.replace(folder / "run" / "checkpoint", folder / "damaged" / "checkpoint")


def read_index(folder):
    v = rx.Variable(0.0)
    if os.path.lexists(folder / "damaged" / "checkpoint"):
        os.replace(folder / "damaged" / "checkpoint", folder / "run" / "checkpoint")
    found = rx.train.latest_checkpoint(folder / "run")
    manager = rx.train.CheckpointManager(rx.train.Checkpoint(v=v), folder / "run", 9)
    assert manager.restore_or_initialize() == found
    return float(v) == 3.0


def stream():
    return iter(Dataset.range(1000).shuffle(64, seed=3).repeat(2).batch(10))


def write_state(folder):
    iterator = stream()
    for _ in range(17):
        next(iterator)
    (folder / "state").write_bytes(iterator.save_state())


def read_state(folder):
    iterator, expected = stream(), stream()
    for _ in range(17):
        next(expected)
    iterator.restore_state((folder / "state").read_bytes())
    return [np.asarray(x).tolist() for x in iterator] == [np.asarray(x).tolist() for x in expected]


NO_RECORD = FileNotFoundError, FileExistsError  # without its record a folder is no saved dataset

FORMATS = {
    "checkpoint": (write_checkpoint, read_checkpoint, rx.CheckpointError),
    "saved dataset": (write_dataset, read_dataset, (rx.DataLossError, *NO_RECORD)),
    "saved dataset, GZIP": (lambda folder: write_dataset(folder, "GZIP"), read_dataset, (rx.DataLossError, *NO_RECORD)),
    "cache file": (write_cache, read_cache, (rx.DataLossError, IsADirectoryError)),
    "snapshot": (write_snapshot, read_snapshot, (rx.DataLossError, *NO_RECORD)),
    "list of checkpoints": (write_index, read_index, ()),  # the newest is found whatever it says
    "state of an iterator": (write_state, read_state, (rx.InvalidArgumentError, FileNotFoundError, IsADirectoryError)),
}


@pytest.mark.parametrize("name", FORMATS)
def test_damage_raises_an_error_and_never_returns_a_wrong_value(name, tmp_path):
    write, read, errors = FORMATS[name]
    (tmp_path / "whole").mkdir()
    write(tmp_path / "whole")
    warnings.simplefilter("ignore")
    counts = collections.Counter()
    for number in range(TIMES):
        rng, folder = random.Random(f"{name} {number}"), tmp_path / str(number)
        shutil.copytree(tmp_path / "whole", folder)
        where = folder / "damaged" if (folder / "damaged").is_dir() else folder
        how = damage(rng, where)
        try:
            right = read(folder)
        except errors as error:
            counts[type(error).__name__] += 1
        except Exception as error:
            raise AssertionError(f"number {number}, {how}: {type(error).__name__}: {error}") from error
        else:
            assert right, f"number {number}, {how}: another value was read without an error"
            counts["right value"] += 1
        shutil.rmtree(folder)
    assert sum(counts.values()) == TIMES
    if "REPLICAX_FIGURES" in os.environ:
        with open(os.environ["REPLICAX_FIGURES"], "a", encoding="utf-8") as figures:
            figures.write(json.dumps([name, counts]) + "\n")
