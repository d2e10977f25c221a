"""Distributed datasets over the workers of a job: who gets what, how they end together, and what ends them all."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from processes import Workers, told_by
from strategies import mirrored

import replicax as rx

# What the programs begin with. `told(name, value)` hands a value to the test of this program.
START = """
import json, os, sys, threading
import jax, jax.numpy as jnp, numpy as np
import replicax as rx
from processes import mark

strategy = rx.MultiWorkerMirroredStrategy()
me = strategy.cluster_resolver.task_id
Dataset = rx.data.Dataset

program = ""

def told(name, value):
    print("told", json.dumps([program, name, value]), flush=True)

def lists(element):
    return [[x.decode() if isinstance(x, bytes) else x for x in np.asarray(part).tolist()]
            for part in strategy.experimental_local_results(element)]

def with_policy(dataset, policy):
    options = rx.data.Options()
    options.experimental_distribute.auto_shard_policy = getattr(rx.data.AutoShardPolicy, policy)
    return dataset.with_options(options)

def shown(name, dataset):
    told(name, [lists(element) for element in strategy.experimental_distribute_dataset(dataset)])
"""


# Programs that end well, each in front of its test. A job runs all of them, since its processes take long to start.
PROGRAMS: dict[str, str] = {}


class Job(NamedTuple):
    """What two workers with so many devices each told, by the program: of each worker the values by their names."""

    devices: int
    told: dict[str, list[dict[str, Any]]]


def run(folder, devices, program, timeout=120.0):
    with Workers(folder, 2, START + program, devices=devices) as workers:
        return workers.join(timeout=timeout)


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.thorough), 2], ids="{} devices".format)
def job(request, once, tmp_path_factory) -> Job:
    told = once(f"input-{request.param}", lambda: _told(request.param, tmp_path_factory.mktemp("job")))
    return Job(request.param, told)


def _told(devices: int, folder: Path) -> dict[str, list[dict[str, Any]]]:
    programs = "".join(f"program = {name!r}\n{text}\n" for name, text in PROGRAMS.items())
    for i in range(4):
        (folder / f"f{i}.txt").write_text("".join(f"{i}{c}\n" for c in "abcd"))
    with Workers(folder, 2, START + programs, devices=devices) as workers:
        workers.wait_for("done", timeout=150)
        return told_by(workers.join(timeout=10))


def in_one_process(dataset, n) -> list[list[Any]]:
    """The replicas' parts of each element, where one process has all replicas."""
    strategy = mirrored(n)
    distributed = strategy.experimental_distribute_dataset(dataset)
    return [[part.tolist() for part in strategy.experimental_local_results(x)] for x in distributed]


def of_worker(rank: int, elements: list[list[Any]]) -> list[list[Any]]:
    """Of all shares those of one of two workers: they are dealt out in turn."""
    return [shares[rank::2] for shares in elements]


CASES = [(8, 4, False), (10, 4, False), (6, 3, False), (3, 1, False), (5, 4, False), (10, 4, True), (16, 8, False)]
PROGRAMS["data"] = f"""
for case in {CASES!r}:
    rows, batch, drop = case
    for policy in ("AUTO", "DATA"):
        shown(f"{{case}} {{policy}}", with_policy(Dataset.range(rows).batch(batch, drop_remainder=drop), policy))
shown("list", [np.arange(4.0), np.arange(4.0, 7.0)])
spec = strategy.experimental_distribute_dataset(Dataset.range(8).batch(8, drop_remainder=True)).element_spec
told("spec", [type(spec).__name__, [list(s.shape) for s in spec._value_specs]])
"""


def test_sharding_by_data(job):
    """Facts 135, 165: the shares of one process's replicas, dealt out; who is left over gets empty ones."""
    devices, told = job.devices, job.told["data"]
    n = 2 * devices
    for rank in range(2):
        for rows, batch, drop in CASES:
            expected = of_worker(rank, in_one_process(rx.data.Dataset.range(rows).batch(batch, drop_remainder=drop), n))
            for policy in ("AUTO", "DATA"):
                assert told[rank][f"{(rows, batch, drop)} {policy}"] == expected
        assert told[rank]["list"] == of_worker(rank, in_one_process([np.arange(4.0), np.arange(4.0, 7.0)], n))
        assert told[rank]["spec"] == ["PerReplicaSpec", [[8 // n]] * devices]


PROGRAMS["off"] = """
shown("even", with_policy(Dataset.range(8).batch(4), "OFF"))
shown("uneven", with_policy(Dataset.range(10).batch(4), "OFF"))
endless = with_policy(Dataset.range(10).batch(5, drop_remainder=True).repeat(), "OFF")  # of shapes that are all fixed
iterator = iter(strategy.experimental_distribute_dataset(endless))
step = rx.function(lambda x: strategy.reduce("SUM", x, axis=0))
told("endless", [[len(part) for part in lists(next(iterator))], int(step(next(iterator)))])
iterator.close()
"""


def test_without_sharding_every_worker_sees_all(job):
    """Fact 135: cut to the size of its shares."""
    devices, told = job.devices, job.told["off"]
    for worker in told:
        for name, rows in (("even", 8), ("uneven", 10)):
            shares = [share for shares in worker[name] for share in shares]
            assert [x for share in shares for x in share] == list(range(rows))
            assert {len(share) for share in shares[: rows * devices // (2 * devices)]} == {4 // (2 * devices)}
    # Of its own five rows the first worker gets 0 to 2 and then 3 and 4, the other one 0 and 1 and then 2 to 4.
    total = 3 + 4 + 2 + 3 + 4
    first, other = {1: ([3], [2]), 2: ([2, 1], [1, 1])}[devices]
    assert [worker["endless"] for worker in told] == [[first, total], [other, total]]


PROGRAMS["file"] = """
def lines(count):
    return rx.data.TextLineDataset([f"f{i}.txt" for i in range(count)]).batch(4)
for count, policy in ((4, "FILE"), (4, "AUTO"), (4, "DATA"), (4, "OFF"), (3, "FILE")):
    shown(f"{policy} {count}", with_policy(lines(count), policy))
for files, dataset in ((1, lines(1)), (0, Dataset.range(8).batch(4))):
    try:
        strategy.experimental_distribute_dataset(with_policy(dataset, "FILE"))
    except rx.InvalidArgumentError as error:
        told(f"refused {files}", str(error))
"""


def test_sharding_by_file(job):
    """Fact 136: a file goes whole to one worker; who runs out gets empty batches until the others are done."""
    devices, told = job.devices, job.told["file"]
    per = 4 // (2 * devices)  # rows of a replica in a round

    def rounds(names):
        shares = [names[i : i + per] for i in range(0, len(names), per)]
        return [shares[i : i + devices] for i in range(0, len(shares), devices)]

    everything = [f"{i}{c}" for i in range(4) for c in "abcd"]
    mine = [[f"{i}{c}" for i in (rank, rank + 2) for c in "abcd"] for rank in range(2)]
    for rank, worker in enumerate(told):
        assert worker["FILE 4"] == worker["AUTO 4"] == rounds(mine[rank])
        assert worker["OFF 4"] == rounds(everything)
        by_data = [everything[i : i + 4] for i in range(0, 16, 4)]
        assert worker["DATA 4"] == of_worker(
            rank, [[batch[i : i + per] for i in range(0, 4, per)] for batch in by_data]
        )
        short = rounds(mine[rank][:8] if rank == 0 else mine[rank][:4])
        assert worker["FILE 3"] == short + [[[]] * devices] * (len(rounds(mine[0])) - len(short))
        for files in (1, 0):
            assert f"FILE based sharding: the dataset only has {files} file(s)" in worker[f"refused {files}"]


PROGRAMS["function"] = """
def fn(c):
    batch_size = c.get_per_replica_batch_size(8)
    told("context", [c.num_input_pipelines, c.input_pipeline_id, c.num_replicas_in_sync, batch_size])
    return Dataset.range(16).shard(c.num_input_pipelines, c.input_pipeline_id).batch(2)
told("sharded", [lists(x) for x in strategy.distribute_datasets_from_function(fn)])

def counted(size):  # its length is not known
    def generate():
        yield from np.arange(size)
    return Dataset.from_generator(generate, output_signature=rx.TensorSpec((), np.int64)).batch(2)
for name, make in (("known", lambda size: Dataset.range(size).batch(2)), ("unknown", counted)):
    uneven = strategy.distribute_datasets_from_function(lambda c: make(2 if c.input_pipeline_id else 5))
    for again in range(2):
        told(f"{name} {again}", [lists(x) for x in uneven])
    iterator, seen = iter(uneven), []
    while bool((element := iterator.get_next_as_optional()).has_value()):
        seen.append(lists(element.get_value()))
    told(f"{name} optional", seen)
fixed = strategy.distribute_datasets_from_function(
    lambda c: Dataset.range(2 if c.input_pipeline_id else 6).batch(1, drop_remainder=True)
)
told("fixed", [lists(x) for x in fixed])
"""


def test_datasets_from_a_function(job):
    """Fact 137: each worker's function knows which it is; the iteration ends for all where the last one ends."""
    devices, told = job.devices, job.told["function"]
    rows = {0: 5, 1: 2}

    def rounds(values, batch):
        shares = [values[i : i + batch] for i in range(0, len(values), batch)]
        shares += [[]] * (-len(shares) % devices)
        return [shares[i : i + devices] for i in range(0, len(shares), devices)]

    longest = len(rounds(list(range(5)), 2))
    for rank, worker in enumerate(told):
        assert worker["context"] == [2, rank, 2 * devices, 8 // (2 * devices)]
        assert worker["sharded"] == rounds(list(range(rank, 16, 2)), 2)
        mine = rounds(list(range(rows[rank])), 2)
        for name in ("known 0", "known 1", "known optional", "unknown 0", "unknown 1", "unknown optional"):
            assert worker[name] == mine + [[[]] * devices] * (longest - len(mine))
        # Where all shapes are fixed there is no empty batch, and the first that ends ends all.
        assert worker["fixed"] == rounds(list(range(2)), 1)


PROGRAMS["unknown"] = """
def generate():
    for k in range(3):
        yield np.arange(10 * k, 10 * k + (8 if k < 2 else 5))
shown("generator", Dataset.from_generator(generate, output_signature=rx.TensorSpec((None,), np.int64)))

class Batches:
    def __iter__(self):
        return generate()
shown("foreign", Batches())
"""


def test_a_dataset_of_unknown_length_is_sharded_by_data(job):
    """Fact 135: as many rounds on both, the last one uneven."""
    devices, told = job.devices, job.told["unknown"]
    reference = in_one_process([np.arange(10 * k, 10 * k + (8 if k < 2 else 5)) for k in range(3)], 2 * devices)
    for rank, worker in enumerate(told):
        assert worker["generator"] == worker["foreign"] == of_worker(rank, reference)


PROGRAMS["chance"] = """
rows = Dataset.range(9)
datasets = {
    "rows": rows.shuffle(9).batch(4),
    "padded": rows.map(lambda k: np.full(int(k) + 1, k)).shuffle(9).padded_batch(4),
    "batches": rows.batch(4).shuffle(3),
    "kept": rows.shuffle(9).cache().batch(4),
    "inner": Dataset.range(1).flat_map(lambda _: rows.shuffle(9)).batch(4),
}
first = rx.function(lambda x: strategy.run(lambda x: x if x.ndim == 1 else x[:, 0], args=(x,)))
for name, dataset in datasets.items():
    if me == 1:
        next(iter(dataset))  # another order than that of the other worker begins here
    distributed = strategy.experimental_distribute_dataset(dataset)
    told(name, [[row for element in distributed for part in lists(first(element)) for row in part] for _ in range(2)])
"""


def test_random_orders_are_the_same_on_all_workers(job):
    """So each example comes once in an epoch, and parts are of the shapes that each worker expects of the others."""
    one, other = job.told["chance"]
    for name in ("rows", "padded", "batches", "kept", "inner"):
        for mine, theirs in zip(one[name], other[name], strict=True):
            assert sorted(mine + theirs) == list(range(9)), name


# Rows that each replica draws a mask for, as dropout does, and the rows as they were gathered.
IN_ORDER = """
BATCH = 8
rows = rx.data.Dataset.from_tensor_slices(np.arange(24, dtype=np.float32))

def masked(strategy, distributed):
    def replica(x):
        key = jax.random.fold_in(jax.random.key(0), rx.get_replica_context().replica_id_in_sync_group)
        return jnp.sum(jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0.0) ** 2)

    @rx.function
    def step(x):
        return strategy.reduce("SUM", strategy.run(replica, args=(x,)), axis=None), strategy.gather(x, 0)

    return [[float(loss), gathered.tolist()] for loss, gathered in map(step, distributed)]

def in_order(context):
    count = BATCH // context.num_input_pipelines
    first = count * context.input_pipeline_id
    own = rows.batch(BATCH, drop_remainder=True).map(lambda batch: batch[first : first + count])
    return own.unbatch().batch(context.get_per_replica_batch_size(BATCH))
"""
PROGRAMS["in order"] = (
    IN_ORDER
    + """
told("function", masked(strategy, strategy.distribute_datasets_from_function(in_order)))
told("dataset", masked(strategy, strategy.experimental_distribute_dataset(rows.batch(BATCH))))
told("length", len(strategy.experimental_distribute_dataset(rows.batch(5))))
"""
)


def test_losses_with_masks_do_not_depend_on_the_processes_where_rows_are_dealt_in_order(job):
    """Fact 135: the workers take shares in turn, so that `experimental_distribute_dataset` deals a batch in order where
    each worker has one replica, and otherwise gives the same rows of a batch in another order.
    """
    space: dict[str, Any] = {}
    exec("import jax, jax.numpy as jnp, numpy as np, replicax as rx\n" + IN_ORDER, space)
    alone = mirrored(2 * job.devices)
    expected = space["masked"](alone, alone.experimental_distribute_dataset(space["rows"].batch(8)))
    assert [gathered for _, gathered in expected] == np.arange(24.0).reshape(3, 8).tolist()
    for worker in job.told["in order"]:
        assert worker["length"] == 5
        for way in ("function", "dataset"):
            same = way == "function" or job.devices == 1
            for (loss, gathered), (expected_loss, rows) in zip(worker[way], expected, strict=True):
                assert sorted(gathered) == rows
                assert (gathered == rows) is same
                assert (loss == pytest.approx(expected_loss)) is same


# A linear model on batches of which the last is uneven: with two replicas one has fewer rows, with four one has none.
TRAINING = """
def train(strategy, program):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(21, 3)).astype(np.float32), rng.normal(size=(21,)).astype(np.float32)
    distributed = strategy.experimental_distribute_dataset(rx.data.Dataset.from_tensor_slices((x, y)).batch(8))
    with strategy.scope():
        w = rx.Variable(np.zeros(3, np.float32), aggregation=rx.VariableAggregation.SUM)
        seen = rx.Variable(0, synchronization=rx.VariableSynchronization.ON_READ,
                           aggregation=rx.VariableAggregation.SUM)
    ways = []  # of each run of the replica's Python code, whether it traces it
    slope = jax.jit(jax.value_and_grad(lambda w, x, y: jnp.sum((x @ w - y) ** 2) / 8))
    def replica(x, y):
        ways.append("traced" if isinstance(x, jax.core.Tracer) else "run")
        loss, gradient = slope(w.value(), x, y)
        w.assign_sub(0.1 * gradient)
        seen.assign_add(x.shape[0])
        return loss
    def step(element):
        losses = strategy.run(replica, args=element)
        return strategy.reduce("SUM", losses, axis=None), strategy.reduce("MEAN", element[1], axis=0)
    numbers = []
    compiled, pulled = rx.function(step), rx.function(lambda iterator: step(next(iterator)))
    epoch = rx.function(lambda distributed: [step(element) for element in distributed])
    for _ in range(2):  # epochs, of which the last batch is uneven
        if program == "eager":
            numbers += [step(element) for element in distributed]
        elif program == "compiled":
            numbers += [compiled(element) for element in distributed]
        elif program == "pulled":
            iterator = iter(distributed)
            numbers += [pulled(iterator) for _ in range(3)]
        else:
            numbers += epoch(distributed)
    return [[float(a), float(b)] for a, b in numbers], w.numpy().tolist(), int(seen), ways
"""


WAYS = {1: ["compiled", "pulled"], 2: ["eager", "epoch"]}  # by the devices of a worker
PROGRAMS["training"] = (
    TRAINING
    + f"""
for way in {WAYS!r}[jax.local_device_count()]:
    told(way, train(strategy, way))
"""
)


def test_training_over_an_uneven_last_batch(job):
    """Facts 39, 135, 165: the same numbers as with as many replicas in one process, in each way to write the loop."""
    space: dict[str, Any] = {}
    exec("import jax, jax.numpy as jnp, numpy as np, replicax as rx\n" + TRAINING, space)
    devices, told = job.devices, job.told["training"]
    numbers, w, seen, _ = space["train"](mirrored(2 * devices), "eager")
    assert seen == 42 and len(numbers) == 6
    shapes = {1: [4, 3, 2], 2: [2, 2, 1, 0]}[devices]  # rows of the parts of an even batch, and of the last one
    for worker in told:
        for way in WAYS[devices]:
            assert worker[way][2] == seen, way
            assert worker[way][3] == (["run"] * 6 * devices if way == "eager" else ["traced"] * len(shapes)), way
            np.testing.assert_allclose(worker[way][0], numbers, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(worker[way][1], w, rtol=1e-5, atol=1e-6)


ROWS = "x, y = np.arange(16, dtype=np.float32).reshape(8, 2), np.arange(8, dtype=np.float32)"
PROGRAMS["uneven"] = (
    f"""
import warnings
from replicax._engine import trace_function
{ROWS}
"""
    + """
def in_function(name, replica, elements, step=lambda run, element: run(element)):
    calls = []
    def noted(x, y):
        calls.append("traced" if isinstance(x, jax.core.Tracer) else "run")
        return replica(x, y)
    compiled = rx.function(lambda element: step(lambda element: strategy.run(noted, args=element), element))
    told(name, [[[np.asarray(leaf).tolist() for leaf in jax.tree.leaves(own)]
                 for own in strategy.experimental_local_results(compiled(element))]
                for _ in range(2) for element in elements])
    told(f"{name} calls", calls)

def outputs(x, y):
    context = rx.get_replica_context()
    slices = rx.IndexedSlices(x, jnp.arange(x.shape[0]), (9, 2))
    return (x.shape[0], x.shape[0] / 2, None, x * 2, (y * 3).astype(jnp.int8), slices,
            context.all_gather(x * context.all_reduce("SUM", y.sum()), axis=0))

def around(run, element):
    twice = run(jax.tree.map(lambda leaf: leaf + 1, element))
    again = strategy.run(lambda a, b: (a[:, 0] * b).sum(), args=(twice, element[1]))
    return strategy.gather(twice, axis=0), strategy.reduce("MEAN", element[0], axis=0), again, element

rows = Dataset.from_tensor_slices((x, y))
batches = strategy.experimental_distribute_dataset(rows.take(5).batch(5))
in_function("outputs", outputs, batches)
in_function("around", lambda x, y: x * 2, batches, around)

# Each worker has its own, and one comes to its end before the other.
own = strategy.distribute_datasets_from_function(lambda c: rows.take(1 if c.input_pipeline_id else 4).batch(2))
in_function("own", lambda x, y: rx.get_replica_context().all_reduce("SUM", y.sum()), own)

# Those that a worker does not know are told.
in_function("mapped", lambda x, y: x * 2, [jax.tree.map(lambda leaf: leaf + 1, element) for element in batches])
by_hand = strategy.experimental_distribute_values_from_function(
    lambda c: (x[: 1 + c.replica_id_in_sync_group], y[: 1 + c.replica_id_in_sync_group]))
in_function("by hand", lambda x, y: rx.get_replica_context().all_reduce("SUM", y.sum()), [by_hand])
in_function("of other ranks", lambda x, y: y.size, [strategy.experimental_distribute_values_from_function(
    lambda c: (x, np.ones([2] * (1 + c.replica_id_in_sync_group))))])
of_program = rx.function(lambda element: strategy.run(lambda x, y: (x, y * 2), args=element))(next(iter(batches)))
in_function("of a program", lambda x, y: rx.get_replica_context().all_reduce("SUM", y.sum()), [of_program])
computed = jax.tree.map(lambda leaf: leaf + 0, of_program)
in_function("computed", lambda x, y: rx.get_replica_context().all_reduce("SUM", y.sum()), [computed])
on_host = rx.InputOptions(experimental_fetch_to_device=False)
on_host = strategy.experimental_distribute_dataset(rows.take(5).batch(5), on_host)
in_function("on the host", lambda x, y: x * 2, on_host)

# What cannot be compiled is tried once, on all workers.
in_function("values", lambda x, y: x.sum() if float(y.sum()) > 3 else x, batches)

# Kinds of batches that keep changing: with programs for some, and eagerly for others.
trace_function.PROGRAMS = 1
changing = Dataset.from_generator(lambda: ((x[:n], y[:n]) for n in (5, 7)),
                                  output_signature=(rx.TensorSpec((None, 2), x.dtype), rx.TensorSpec((None,), y.dtype)))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    in_function("changing", lambda x, y: x * 2, strategy.experimental_distribute_dataset(changing))
told("warned", [str(w.message) for w in caught if "runs eagerly" in str(w.message)])
trace_function.PROGRAMS = 4
"""
)


def test_uneven_batches_are_compiled(job):
    """Each kind of parts is traced once; where there is no program, all workers run eagerly."""
    space: dict[str, Any] = {"np": np}
    exec(ROWS, space)
    x, y, devices = space["x"], space["y"], job.devices

    def by_worker(n):
        """The rows of each replica's part of so many, by worker."""
        size = -(-n // (2 * devices))
        shares = [np.arange(n)[i * size : (i + 1) * size] for i in range(2 * devices)]
        return [shares[0::2], shares[1::2]]

    everyones = np.concatenate([rows for shares in by_worker(5) for rows in shares])
    kinds = len({len(rows) for shares in by_worker(5) for rows in shares})
    once, eagerly = ["traced"] * kinds, ["run"] * 2 * devices
    for rank, worker in enumerate(job.told["uneven"]):
        mine, of_seven = by_worker(5)[rank], by_worker(7)[rank]
        expected: dict[str, list[list[list[Any]]]] = {
            "outputs": [
                [
                    [len(r), len(r) / 2, x[r] * 2, y[r] * 3, x[r], np.arange(len(r)), x[everyones] * y[:5].sum()]
                    for r in mine
                ]
            ],
            "around": [
                [[(x[everyones] + 1) * 2, x[:5].mean(0), ((x[r] + 1) * 2)[:, 0] @ y[r], x[r], y[r]] for r in mine]
            ],
            "own": [[[total]] * devices for total in {1: [0 + 1 + 0, 2 + 3], 2: [0 + 1 + 2 + 3 + 0]}[devices]],
            "values": [[[x[r].sum() if y[r].sum() > 3 else x[r]] for r in mine]],
            "mapped": [[[(x[r] + 1) * 2] for r in mine]],
            "by hand": [[[sum(y[:n].sum() for n in range(1, 2 * devices + 1))]] * devices],
            "of other ranks": [[[2 ** (1 + i)] for i in range(2 * devices)][rank * devices :][:devices]],
            "of a program": [[[2 * y[:5].sum()]] * devices],
            "computed": [[[2 * y[:5].sum()]] * devices],
            "on the host": [[[x[r] * 2] for r in mine]],
            "changing": [[[x[r] * 2] for r in mine], [[x[r] * 2] for r in of_seven]],
        }
        for name, elements in expected.items():
            assert worker[name] == jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), elements * 2), name
        assert worker["outputs calls"] == once * 2  # again, as they gather, when it is known what
        assert worker["around calls"] == once
        assert worker["own calls"] == ["traced"] * {1: 4, 2: 3}[devices]  # parts of 2 and 1, 2 and 0; 2, 2, 1 and 0
        assert worker["values calls"] == ["traced", *eagerly]
        assert worker["mapped calls"] == worker["on the host calls"] == once
        assert worker["by hand calls"] == ["traced"] * 2 * devices
        assert worker["of other ranks calls"] == eagerly
        # Where results are plain arrays, those that a program returned are known. Others are compared in each call.
        assert worker["of a program calls"] == (eagerly if devices == 1 else once)
        assert worker["computed calls"] == (["traced", "run"] * 2 if devices == 1 else once)
        assert worker["changing calls"] == [*once, *eagerly]
        (warning,) = worker["warned"]
        assert "drop_remainder" in warning


PROGRAMS["padded"] = (
    ROWS
    + """
padding = rx.InputOptions(pad_last_batch=True)

@rx.function
def step(element):
    doubled, total = strategy.run(lambda x, y: (x * 2, y.sum()), args=element)
    return doubled, strategy.reduce("SUM", total, axis=None), strategy.reduce("MEAN", element[1], axis=0)

def steps(name, elements):
    for _ in range(2):
        results = [step(element) for element in elements]
    told(name, [[lists(doubled), float(total), float(mean), np.asarray(strategy.gather(doubled, axis=0)).tolist()]
                for doubled, total, mean in results])

rows = Dataset.from_tensor_slices((x, y))
steps("shared", strategy.experimental_distribute_dataset(rows.take(7).batch(4), padding))
told("traces", step.experimental_get_tracing_count())
own = strategy.distribute_datasets_from_function(lambda c: rows.take(1 if c.input_pipeline_id else 4).batch(2), padding)
steps("own", own)
"""
)


def test_padded_batches_are_one_program(job):
    """Batches of 4 and 3 rows; then each worker has its own, and one comes to its end before the other."""
    space: dict[str, Any] = {"np": np}
    exec(ROWS, space)
    x, y, replicas = space["x"], space["y"], 2 * job.devices

    def shares(rows):
        size = -(-len(rows) // replicas)
        return [rows[i * size : (i + 1) * size] for i in range(replicas)]

    for rank, worker in enumerate(job.told["padded"]):
        batches = [np.arange(4), np.arange(4, 7)]
        of_all = [shares(rows)[0::2] + shares(rows)[1::2] for rows in batches]
        expected = [
            [
                [(2 * x[r]).tolist() for r in shares(rows)[rank::2]],
                y[rows].sum(),
                y[rows].mean(),
                (2 * x[np.concatenate(all_)]).tolist(),
            ]
            for rows, all_ in zip(batches, of_all)
        ]
        assert worker["shared"] == expected
        assert worker["traces"] == 1
        totals = {1: [0 + 1 + 0, 2 + 3], 2: [0 + 1 + 2 + 3 + 0]}[job.devices]
        assert [total for _, total, *_ in worker["own"]] == [float(total) for total in totals]


PROGRAMS["plain"] = """
def batches(sizes):
    rows = Dataset.from_generator(lambda: (np.arange(size) * 1.0 for size in sizes),
                                  output_signature=rx.TensorSpec((None,), np.float64))
    return strategy.experimental_distribute_dataset(rows)

def total(x):
    def replica(x):
        ways.append("traced" if isinstance(x, jax.core.Tracer) else "run")
        return rx.get_replica_context().all_reduce("SUM", x.sum())
    return strategy.run(replica, args=(x,))

doubled = lambda element: strategy.run(lambda x: x * 2, args=(element,))
makers = {"compiled": (rx.function(doubled), lambda x: x), "eager": (doubled, lambda x: x),
          "computed": (rx.function(doubled), lambda x: jax.tree.map(lambda leaf: leaf + 0, x))}
for maker, (make, change) in makers.items() if jax.local_device_count() == 1 else ():  # else they are not plain
    # What is computed of a result is not known to be one: its shape is compared where a worker traces for it.
    for name, sizes in {"even first": (8, 7, 8), "uneven first": (7, 8, 7, 8)}.items():
        if maker == "computed":
            sizes = (7, 8)
        ways, step = [], rx.function(total)
        sums = [step(change(make(element))) for element in batches(sizes)]
        told(f"{maker} {name}", [sizes, [float(strategy.experimental_local_results(x)[0]) for x in sums], ways])
"""


@pytest.mark.thorough
@pytest.mark.parametrize("job", [1], ids="{} devices".format, indirect=True)
def test_plain_results_whose_shapes_differ_between_workers_are_known_in_each_order(job):
    """One with the same shape as before on one worker only is no cached program's there, while another one traces."""
    for worker in job.told["plain"]:
        assert len(worker) == 6
        for name, (sizes, sums, ways) in worker.items():
            assert sums == [2.0 * sum(range(size)) for size in sizes], name
            if not name.startswith("computed"):
                assert (ways.count("run"), ways.count("traced")) == (sizes.count(7), 1), name
            else:
                assert ways == ["traced", "run", "traced"], name


PROGRAMS["tape"] = """
with strategy.scope():
    v = rx.Variable(3.0)
def replica(x):
    return (x * v.value() ** 2).sum()
def total(x, replica=replica):
    return strategy.reduce("SUM", strategy.run(replica, args=(x,)), axis=None)
def with_tape(x, total=total):
    with rx.GradientTape() as tape:
        value = 2 * total(x)
    return value, tape.gradient(value, v)
summed = lambda x: rx.get_replica_context().all_reduce("SUM", replica(x))
whole = lambda x: strategy.experimental_local_results(strategy.run(summed, args=(x,)))[0]
compiled, step = rx.function(total), rx.function(lambda x: strategy.run(replica, args=(x,)))
for rows in [8] if jax.local_device_count() == 1 else [5]:
    (x,) = strategy.experimental_distribute_dataset(Dataset.range(rows).map(lambda x: x * 1.0).batch(rows))
    told(f"inside {rows}", jax.tree.map(float, rx.function(with_tape)(x)))
    told(f"outside {rows}", jax.tree.map(float, with_tape(x, compiled)))
    with rx.GradientTape() as outer:
        _, slope = with_tape(x, compiled)
    told(f"second {rows}", float(outer.gradient(slope, v)))
    told(f"summed {rows}", jax.tree.map(float, rx.function(lambda x: with_tape(x, whole))(x)))
    ways = (total, whole, lambda x: strategy.experimental_local_results(step(x))[0])
    for name, way in zip(("reduce", "all_reduce", "component"), ways):
        try:
            told(f"{name} {rows}", jax.tree.map(float, with_tape(x, way)))
        except RuntimeError as error:
            told(f"{name} {rows}", str(error))
"""


def test_a_tape_around_run_sees_what_the_replicas_of_all_workers_compute(job):
    """Where it does not, as they run eagerly, `gradient` says so. With two replicas each the shares differ."""
    rows, total = {1: (8, 28), 2: (5, 10)}[job.devices]
    for worker in job.told["tape"]:
        for name in ("inside", "outside", "summed"):
            assert worker[f"{name} {rows}"] == [2 * total * 9, 2 * total * 6]  # of twice the sum times v squared
        assert worker[f"second {rows}"] == 2 * total * 2
        for name in ("reduce", "all_reduce", "component"):
            assert "A gradient is asked for" in worker[f"{name} {rows}"]


# The last one: the end of the job finds a thread at work.
PROGRAMS["leaving"] = """
import gc, time
def endless():
    k = 0
    while True:
        yield np.full(4, k)
        k += 1
source = Dataset.from_generator(endless, output_signature=rx.TensorSpec((None,), np.int64))
distributed = strategy.experimental_distribute_dataset(source)
for k in range(5):
    for count, element in enumerate(distributed):
        if count == k:
            break
    told(f"left {k}", lists(element)[0][0])
del element
kept = iter(distributed)
next(kept)
kept.close()
deadline = time.monotonic() + 20
while time.monotonic() < deadline and any(t.name == "replicax-input" for t in threading.enumerate()):
    gc.collect()
    time.sleep(0.01)
told("threads", [t.name for t in threading.enumerate() if t.name == "replicax-input"])
under_way = iter(distributed)  # which the end of the program finds with its thread at work
next(under_way)
mark("done")
"""


def test_leaving_loops_early_leaves_nothing_waiting(job):
    """All workers break out of loops over endless data: no thread waits for another worker, and they end at once."""
    for worker in job.told["leaving"]:
        assert [worker[f"left {k}"] for k in range(5)] == list(range(5))
        assert worker["threads"] == []


@pytest.mark.parametrize("buffer", [0, 2])
def test_an_exception_in_one_workers_dataset_ends_all(buffer, tmp_path):
    """It comes out of that worker's `next`, with the traceback of where it was raised; the other one names it."""
    program = f"""
def generate():
    for k in range(10):
        if me == 1 and k == 3:
            raise OSError("the disk of worker 1")
        yield np.full(2, k)
options = rx.InputOptions(experimental_per_replica_buffer_size={buffer})
distributed = strategy.distribute_datasets_from_function(
    lambda c: Dataset.from_generator(generate, output_signature=rx.TensorSpec((None,), np.int64)), options
)
for element in distributed:
    strategy.reduce("SUM", element, axis=None)
"""
    done = run(tmp_path, 1, program, timeout=60)
    assert done[1].returncode == 1 and done[0].returncode not in (0, None)
    trace = done[1].stderr
    assert trace.index("Traceback") < trace.index("in generate") < trace.index("OSError: the disk of worker 1")
    assert "worker 1" in done[0].stderr


def test_each_worker_saves_and_restores_its_own(tmp_path):
    """Together they go on where they stood: by data, cut anew, ahead in a thread, and where counts are not known."""
    program = """
cases = {
    "data": lambda: Dataset.range(22).shuffle(22, seed=1).batch(4).repeat(2),
    "off": lambda: with_policy(Dataset.range(22).shuffle(22).batch(4), "OFF"),
    "filter": lambda: Dataset.range(22).filter(lambda x: x % 5 > me).batch(4),
    "prefetch": lambda: Dataset.range(22).shuffle(9, seed=2).batch(4).prefetch(2),
}
for name, make in cases.items():
    dataset = strategy.experimental_distribute_dataset(make())
    iterator = iter(dataset)
    head = [lists(next(iterator)) for _ in range(2)]
    state = iterator.save_state()
    rest = [lists(element) for element in iterator]
    other = iter(strategy.experimental_distribute_dataset(make()))
    next(other)
    other.restore_state(state)
    told(name, [head, rest, [lists(element) for element in other]])
"""
    for told in told_by(run(tmp_path, 1, program))[""]:
        assert sorted(told) == ["data", "filter", "off", "prefetch"]
        for head, rest, restored in told.values():
            assert len(head) == 2 and rest and restored == rest
