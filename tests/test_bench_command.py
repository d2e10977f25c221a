"""`replicax bench`: its table, its files, and what it refuses."""

from __future__ import annotations

import json

import pytest

import replicax as rx
from replicax.launch import main

PROGRAM = """
import jax.numpy as jnp
import replicax as rx

def make_step(strategy, batch_size):
    with strategy.scope():
        total = rx.Variable(0.0, aggregation=rx.VariableAggregation.SUM)

    @rx.function
    def my_step(x):
        strategy.run(lambda x: total.assign_add(jnp.sum(x), read_value=False), args=(x,))

    return my_step, rx.data.Dataset.from_tensors(jnp.ones(3)).repeat().batch(batch_size)

def nothing(strategy):
    pass
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(PROGRAM)
    return tmp_path


def test_it_measures_the_users_step_in_a_process_with_enough_devices(program, capsys):
    what = ["--program", "train.py:make_step", "--batch-size", "6"]
    how = ["--replicas", "3", "--rounds", "2", "--steps", "1", "--json", "bench.json", "--plot", "bench.png"]
    assert main(["bench", *what, *how]) == 0
    shown = capsys.readouterr().out
    assert "my_step, MirroredStrategy" in shown and "3 replicas" in shown and "1 of 4 B" in shown
    (figures,) = json.loads((program / "bench.json").read_text())["figures"]
    assert figures["devices"] == ["CPU:0", "CPU:1", "CPU:2"] and figures["seconds"]["input"] is not None
    assert rx.Benchmark(**figures).as_dict() == figures
    assert (program / "bench.png").stat().st_size > 1000


@pytest.mark.parametrize("model", ["mlp", "cnn", "transformer"])
def test_its_own_models_learn_what_they_are_given(model):
    """Each step lowers the loss of one batch, and reads all of its variables."""
    from replicax.launch._models import make_step

    strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"])
    step, dataset = make_step(strategy, model, 4)
    batch = next(iter(strategy.experimental_distribute_dataset(dataset)))
    losses = [float(step(*batch)) for _ in range(4)]
    assert losses == sorted(losses, reverse=True) and 1 < losses[0] < 6


@pytest.mark.parametrize(
    "options, message",
    [
        (["--replicas", "2,0"], "argument --replicas: expected a whole number, at least 1; got '0'"),
        (["--batch-size", "1", "--replicas", "1,2"], "2 replicas cannot share a batch of 1 examples"),
        (["--program", "train.py"], "--program is FILE.py:FUNCTION, such as train.py:make_step; got train.py."),
        (["--program", "absent.py:make_step"], "There is no file absent.py in "),
        (["--plot", "absent/bench.png"], "--plot names a file in a folder that can be written; got absent/bench.png."),
        (["--plot", "bench.doc"], "--plot names a picture of a kind that matplotlib draws ("),
        (["--json", "train.py/a.json"], "--json names a file in a folder that can be written; got train.py/a.json."),
        (["--json", "."], "--json names a file in a folder that can be written; got ."),
        (["--program", "train.py:make_step", "--model", "cnn"], "not allowed with argument --program"),
    ],
)
def test_options_that_make_no_sense_are_refused_before_anything_runs(options, message, program, capsys):
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(main(["bench", *options]))
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_program_that_makes_no_step_is_told_so(program):
    from replicax.launch._measure import _made

    with pytest.raises(SystemExit, match=r"train.py has no function absent"):
        _made(None, "train.py:absent", None)
    with pytest.raises(
        SystemExit, match=r"is called as nothing\(strategy, batch_size=\.\.\.\), which it does not take"
    ):
        _made(None, "train.py:nothing", 8)
    with pytest.raises(
        SystemExit, match=r"returns a tuple of a step, and of a batch or a dataset for it; got NoneType"
    ):
        _made(None, "train.py:nothing", None)


def test_libraries_that_are_missing_are_named(program, monkeypatch, capsys):
    found = __import__("importlib.util").util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "optax" else found(name))
    assert main(["bench"]) == 2
    assert "--model mlp needs optax: pip install matplotlib optax rich" in capsys.readouterr().err
