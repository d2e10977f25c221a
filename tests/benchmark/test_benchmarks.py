"""What becomes of the benchmarks' numbers: targets, tables, the page and its pictures. Nothing is measured here."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import replicax as rx

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def report():
    """The module, while those beside it can be imported."""
    before = set(sys.modules)
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module("report")
    finally:
        sys.path.remove(str(BENCHMARKS))
        for name in set(sys.modules) - before:
            if (file := getattr(sys.modules[name], "__file__", None)) and Path(file).parent == BENCHMARKS:
                del sys.modules[name]


def rounds(**times):
    return {name.replace("_", " "): [value, 2 * value, 3 * value] for name, value in times.items()}


def both(**times):
    """With the names of the contenders by hand that have a comma."""
    names = {"best": "by hand, packed", "usual": "by hand, apart", "packed": "by hand, packed", "hand": "by hand"}
    return {names.get(name, name): values for name, values in rounds(**times).items()}


def steps(**times):
    made = both(**times)
    return {"rounds": made, "step": {name: t[1] for name, t in made.items()}, "first": dict.fromkeys(made, 1.0)}


def first(contender, replicas, total):
    parts = {"run": 0.5, "trace": 0.1, "lower": 0.1, "compile": 0.3, "traces": 1, "all_reduces": 1}
    return {"model": "transformer", "contender": contender, "replicas": replicas, "total": total, **parts}


def runs(**device):
    keys = ("arguments", "temp", "live", "optimizer", "host", "process", "seconds", "faults", "system")
    return {name: [{**dict.fromkeys(keys, 1e6), "device": value}] for name, (value, *_) in both(**device).items()}


def in_parts(model, replicas, **times):
    contenders = {
        "replicax": {"temporaries": 1e6, "state": 3e6, "collectives": {"all-gather": 3}},
        "NamedSharding": {"temporaries": 4e6, "state": 3e6, "collectives": {"all-gather": 2}},
        "shard_map, gathers repeated": {"temporaries": 2e6, "state": 3e6, "collectives": {"all-gather": 3}},
    }
    made = rounds(**times)
    return {"model": model, "replicas": replicas, "whole": 12e6, "contenders": contenders, "rounds": made}


def memory_of(replicax, best):
    return {"model": "wide", "replicas": 2, "runs": runs(replicax=replicax, best=best)}


def step_on_gpus(temporaries, exposed, overlapping):
    sizes = {"temporaries": temporaries, "exposed": exposed, "sent": 8e6, "seconds": 1e-3}
    return {**sizes, "collectives": {"all-gather": (2, overlapping)}}


WORKS = ("up", "empty", "assign_add", "embedding", "dense, SGD", "dense, Adam", "fetch", "write", "read")

RESULTS = {
    "step": {
        "steps": [
            {"model": "mlp", "replicas": 1, **steps(replicax=0.9, best=1.0, usual=1.0)},
            {"model": "mlp", "replicas": 4, **steps(replicax=1.0, best=2.0, usual=5.0)},
        ]
    },
    "variables": {
        "variables": [
            {"program": "add", "variables": 500, "replicas": 4}
            | {"rounds": both(replicax=1.0, one_variable=1.0, hand=10.0, packed=1.0)}
        ]
    },
    "epoch": {
        "epochs": [
            {"replicas": 2}
            | {"rounds": {**both(replicax=6.0, several=2.0, hand=4.0), "TensorFlow, loop": [20.0, 40.0, 60.0]}}
        ]
    },
    "uneven": {
        "uneven": [
            {"model": "mlp", "replicas": 4, "first": rounds(even=1, uneven=3.1), "rounds": rounds(even=1, uneven=2)}
        ]
    },
    "first": {"first_steps": [first("replicax", 1, 1.5), first("replicax", 64, 2.0), first("TensorFlow", 64, 20.0)]},
    "servers": {
        "clusters": [
            {"servers": n, "cpu": {}, "rounds": {work: rounds(replicax=1.0, TensorFlow=1.4) for work in WORKS}}
            for n in (1, 2)
        ]
    },
    "memory": {
        "memory": [memory_of(2e6, 1e6)],
        "faults": [{"replicas": 2, "runs": {"replicax": {"huge pages": runs(replicax=1)["replicax"]}}}],
    },
    "sharded": {"sharded": [in_parts("mlp", 4, replicax=1.0, NamedSharding=2.0)]},
    "tpu": {
        "tpu": [
            {
                "model": "wide",
                "topology": "v5e:2x4",
                "of": {
                    "replicax": {"temporaries": 30, "collectives": 3, "overlapping": 1, "bytes": 8},
                    "by hand, packed": {"temporaries": 40, "collectives": 1, "overlapping": 0, "bytes": 8},
                    "by hand, apart": {"temporaries": 20, "collectives": 4, "overlapping": 3, "bytes": 8},
                },
            }
        ]
    },
    "gpu steps": {
        "gpu steps": [
            {
                "model": "mlp",
                "topology": "h100:8",
                "mode": "sharded variables",
                "of": {
                    "replicax": step_on_gpus(temporaries=30e6, exposed=1e6, overlapping=2),
                    "NamedSharding": step_on_gpus(temporaries=40e6, exposed=2e6, overlapping=1),
                    "shard_map, kept": step_on_gpus(temporaries=20e6, exposed=3e6, overlapping=1),
                },
            }
        ]
    },
    "start": {
        "rounds": rounds(jax=1.0, replicax=1.2),
        "processor": rounds(jax=1.0, replicax=1.1),
        "demo": {
            "first start": [{"imported": 1.0, "step": 4.0, "whole": 9.0}],
            "second start": [{"imported": 1.0, "step": 2.0, "whole": 5.0}],
        },
    },
    "gpu": {
        "date": "2026-11-01",
        "on_gpu": True,
        "gpu": [
            {"model": "cnn", "device": "G", "peak": dict.fromkeys(("OneDevice", "Mirrored", "by hand"), 1e6)}
            | {"rounds": {**rounds(OneDevice=1.0, Mirrored=1.1), **both(hand=1.0)}}
        ],
    },
}  # fmt: skip


def results():
    return {name: {"date": "2026-11-02", "machine": "m", "versions": {"jax": "1"}, **r} for name, r in RESULTS.items()}


def test_every_table_of_the_page_is_made_by_a_benchmark(report):
    page = report.PAGE.read_text(encoding="utf-8")
    wanted = set(re.findall(r"<!-- table: (.*) -->", page))
    made = results()
    made["train"] = made["variables"]
    blocks = report.blocks_of(made)
    assert wanted - set(blocks) == {"input", "input steps"}  # which input.py makes
    assert page.count("<!-- end -->") == len(wanted)
    filled = report.filled(page, blocks)
    assert all(blocks[name] in filled for name in wanted & set(blocks))
    assert report.filled(filled, blocks) == filled


def test_the_pictures_are_those_of_the_tables(report, tmp_path):
    pictures = importlib.import_module("pictures").PICTURES
    report.draw(report.PAGE.read_text(encoding="utf-8"), pictures, tmp_path)
    stale = [
        name for name in [*pictures, "summary"] if not _same(tmp_path / f"{name}.svg", report.IMAGES / f"{name}.svg")
    ]
    assert not stale, f"Draw these anew, with `python benchmarks/report.py --redraw`: {stale}"


def test_the_summary_is_that_of_the_tables(report):
    page = report.SUMMARY_PAGE.read_text(encoding="utf-8")
    summary = report.markdown(report.summary(report.PAGE.read_text(encoding="utf-8")))
    assert report.filled(page, {"summary": summary}) == page, "Write it anew: python benchmarks/report.py --redraw"


def _same(one, other):
    return one.read_text(encoding="utf-8") == other.read_text(encoding="utf-8")


def test_a_step_of_which_the_rounds_are_known_shows_their_middle_half(report, tmp_path):
    page = report.filled("<!-- table: steps -->\n<!-- end -->", report.blocks_of(results()))
    medians = re.sub(r" \([\d.]+–[\d.]+\)", "", page)
    assert medians != page
    for text in (page, medians):
        report.draw(text, ["step"], tmp_path)
        drawn = (tmp_path / "step.svg").read_text(encoding="utf-8")
        whiskers = drawn.count('stroke-width="1.5"')
        assert drawn.count("<circle") > 0 and (whiskers > 0) == (text is page)
        assert whiskers % 3 == 0  # a line and its two ends


def test_each_target_is_judged_by_its_worst_case(report):
    made = results()
    judged = {target.figure: target.row()[1:] for name in made for target in report.targets(name, made[name])}
    assert judged["compiled step against the best form by hand"] == ["at most 1.02", "0.70", "0.90 (mlp, 1)", "yes"]
    assert judged["MLP's step at 2 to 8 replicas against one psum a tensor"][2:] == ["0.20 (4 replicas)", "yes"]
    assert judged["dispatch-bound epoch against a loop by hand"][2:] == ["0.50 (2 replicas)", "yes"]
    assert judged["dispatch-bound epoch against TensorFlow's MirroredStrategy"][2:] == ["0.10 (2 replicas)", "yes"]
    assert judged["a call with 500 small variables, 4 replicas, against 500 arrays by hand"][3] == "yes"
    assert judged["first use of an uneven batch against that of an even one"][2:] == ["3.10 (mlp, 4)", "not yet"]
    assert judged["later uses of an uneven batch against those of an even one"][3] == "yes"
    assert judged["first step at 64 replicas against TensorFlow's"][2:] == ["0.10 (transformer, 64)", "yes"]
    # 1.5 s of 2 against 1 of 1.5, without half a second of running
    assert judged["first step against that at 1 replica, without the devices' run time"][2] == "1.50 (transformer, 64)"
    assert judged["peak memory of a step on a device"][2:] == ["2.00 (wide, 2)", "not yet"]
    on_tpus = "a step on TPUs against the form by hand with the least memory: "
    assert judged[on_tpus + "temporaries"][2:] == ["1.50 (wide, v5e:2x4)", "not yet"]
    assert judged[on_tpus + "collectives"][2:] == ["0.75 (wide, v5e:2x4)", "yes"]
    assert judged[on_tpus + "collectives that nothing overlaps"][2:] == ["2.00 (wide, v5e:2x4)", "not yet"]
    on_gpus = "a step on GPUs against the form by hand that exposes least: "
    assert judged[on_gpus + "temporaries"][2:] == ["0.75 (mlp, h100:8, sharded variables)", "yes"]
    assert judged[on_gpus + "further MB exposed"][1:] == ["0.00", "0.00 (mlp, h100:8, sharded variables)", "yes"]
    assert judged["optimizer memory of a device, sharded against not"][3] == "not measured"
    assert judged["step in parts against jit with NamedSharding"][2:] == ["0.50 (mlp, 4)", "yes"]
    assert judged["its temporaries against shard_map that repeats gathers"][2:] == ["0.50 (mlp, 4)", "yes"]
    assert judged["GPU step against JAX by hand"][2:] == ["1.10 (cnn, Mirrored)", "not yet"]
    assert judged["import against JAX's"] == ["at most 1.5", "1.20", "1.20 (replicax)", "yes"]
    seen = judged["first step of the demo: its second start is sooner by a factor of"]
    assert seen == ["at least 2", "2.50", "2.00 (with imports)", "yes"]
    _, _, rows = report.tables("start", made["start"])["demo"]
    assert [row[1:] for row in rows[:2]] == [["4.00", "2.00", "2.00"], ["3.00", "1.00", "3.00"]]  # without imports
    assert judged["empty closures: rate against TensorFlow's"] == [
        "at least 1.5",
        "1.40",
        "1.40 (servers: 1)",
        "not yet",
    ]
    assert judged["a large variable read: time against TensorFlow's"][2:] == ["0.71 (servers: 1)", "yes"]
    more = report.Target("x", 5, {"a": "6.00", "b": "4.00", "c": "–"}, least=True)
    assert more.row() == ["x", "at least 5", "5.00", "4.00 (b)", "not yet"]


@pytest.mark.thorough
def test_closures_of_a_cluster_are_measured(tmp_path):
    """Over processes, in one short round."""
    command = [sys.executable, BENCHMARKS / "parameter_servers.py", "--quick", "--rounds", "1", "--servers", "2"]
    environment = {name: value for name, value in os.environ.items() if name != "REPLICAX_TENSORFLOW_PYTHON"}
    file = tmp_path / "numbers.json"
    subprocess.run([*command, "--json", file], env=environment, check=True, timeout=240, capture_output=True)
    (cluster,) = json.loads(file.read_text())["clusters"]
    assert {work: len(times["replicax"]) for work, times in cluster["rounds"].items()} == dict.fromkeys(WORKS, 1)
    assert all(times["replicax"][0] > 0 for times in cluster["rounds"].values())


STEP_OF_ITS_OWN = """
import jax.numpy as jnp
import replicax as rx

def make_step(strategy, batch_size):
    with strategy.scope():
        total = rx.Variable(0.0, aggregation=rx.VariableAggregation.SUM)

    @rx.function
    def my_step(x):
        strategy.run(lambda x: total.assign_add(jnp.sum(x), read_value=False), args=(x,))

    return my_step, rx.data.Dataset.from_tensors(jnp.ones(3)).repeat().batch(batch_size)
"""


def scaling(folder, *arguments):
    """The figures of scaling.py, in a few short rounds, and what it printed."""
    (folder / "train.py").write_text(STEP_OF_ITS_OWN)
    command = [
        sys.executable,
        BENCHMARKS / "scaling.py",
        *arguments,
        "--rounds",
        "2",
        "--steps",
        "1",
        "--json",
        "a.json",
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=True)
    return [rx.Benchmark(**one) for one in json.loads((folder / "a.json").read_text())["figures"]], done.stdout


def test_a_step_of_the_users_is_measured_on_as_many_devices_as_asked_for(tmp_path):
    what = ["--program", "train.py:make_step", "--batch-size", "6", "--replicas", "3", "--plot", "a.svg"]
    (figures,), shown = scaling(tmp_path, *what)
    assert "my_step, MirroredStrategy" in shown and "3 replicas" in shown and "1 of 4 B" in shown
    assert figures.devices == ["CPU:0", "CPU:1", "CPU:2"] and figures.seconds["input"] is not None
    assert (tmp_path / "a.svg").read_text().startswith("<svg")


@pytest.mark.thorough
def test_a_model_is_measured_on_one_replica_and_on_two(tmp_path):
    figures, shown = scaling(tmp_path, "--model", "mlp")
    assert [one.replicas for one in figures] == [1, 2] and "a step, of the first" in shown
