"""The example: the same training whatever the number of replicas, and what it says and writes."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import struct
from pathlib import Path

import numpy as np
import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "digits.py"

pytest.importorskip("optax")
if importlib.util.find_spec("sklearn") is None:  # whose data the example reads, and which takes long to import
    pytest.skip("scikit-learn is not installed", allow_module_level=True)


@pytest.fixture(scope="module")
def digits():
    """The example as a module, which draws nothing: that takes longer than training."""
    spec = importlib.util.spec_from_file_location("digits", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.draw = lambda *_: None
    return module


@pytest.fixture
def train(digits, tmp_path):
    """`train("--replicas", "2")`: the history of the example with these arguments."""

    def run(*arguments):
        return digits.main([*arguments, "--output", str(tmp_path / "digits.png")])

    return run


def program(*arguments: str) -> str:
    """A program that runs the example as a command."""
    return f"""
        import runpy, sys
        sys.argv = [{str(EXAMPLE)!r}, *{list(arguments)!r}]
        runpy.run_path(sys.argv[0], run_name="__main__")
    """


@pytest.fixture(scope="module")
def alone(digits, tmp_path_factory):
    """The history of two epochs with one replica."""
    with contextlib.redirect_stdout(io.StringIO()):
        output = str(tmp_path_factory.mktemp("alone") / "digits.png")
        return digits.main(["--replicas", "1", "--epochs", "2", "--output", output])


def test_the_losses_do_not_depend_on_the_number_of_replicas(train, alone):
    history = train("--replicas", "4", "--epochs", "2")
    # Sums over a batch are added in another order, so that float32 results differ in the last bits, and so do the
    # next step's. After two epochs (46 steps) that has been up to 8e-7; a part weighed wrongly makes 1e-3 and more.
    np.testing.assert_allclose(history["loss"], alone["loss"], rtol=1e-5)
    # Counts of right answers: one image in the training set, none in the smaller test set.
    np.testing.assert_allclose(history["accuracy"], alone["accuracy"], atol=1.5 / 1437)
    np.testing.assert_allclose(history["test_accuracy"], alone["test_accuracy"], atol=1.5 / 360)


@pytest.mark.numbers
def test_two_workers_make_the_same_losses(run_python, alone, tmp_path):
    """Under the launcher, with a batch that does not divide evenly at the end of each epoch."""
    script = tmp_path / "workers.py"
    arguments = ["--strategy", "multi_worker", "--epochs", "2", "--output", str(tmp_path / "digits.png")]
    script.write_text(
        "import json, runpy\n"
        f"main = runpy.run_path({str(EXAMPLE)!r})['main']\n"
        "main.__globals__['draw'] = lambda *_: None\n"
        f"print(json.dumps(main({arguments!r})))\n"
    )
    done = run_python(
        f"""
        import sys
        from replicax._commands import main
        sys.exit(main(["launch", "--workers", "2", {str(script)!r}]))
        """,
        timeout=120,
        env={"REPLICAX_VIRTUAL_DEVICES": None, "REPLICAX_PREFLIGHT": "quiet"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    histories = dict(line.split("] ", 1) for line in done.stdout.splitlines() if line.endswith("}"))
    assert sorted(histories) == ["[worker 0", "[worker 1"], done.stdout
    assert histories["[worker 0"] == histories["[worker 1"]
    np.testing.assert_allclose(json.loads(histories["[worker 0"])["loss"], alone["loss"], rtol=1e-5)


def test_another_seed_trains_differently(train, alone):
    history = train("--replicas", "1", "--epochs", "1", "--seed", "1")
    assert abs(history["loss"][0] - alone["loss"][0]) > 1e-3


@pytest.mark.numbers
def test_replicas_without_an_image_change_nothing(train):
    """Of the last batch, of one image, three of four replicas get none."""
    options = "--epochs", "1", "--batch-size", "1436"
    np.testing.assert_allclose(
        train("--replicas", "4", *options)["loss"], train("--replicas", "1", *options)["loss"], rtol=1e-5
    )


def test_the_command_trains_well_and_draws(run_python, tmp_path):
    output = tmp_path / "picture.png"
    done = run_python(program("--output", str(output)), timeout=180, env={"REPLICAX_VIRTUAL_DEVICES": None})
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    table, lines = done.stdout.split("epoch  1:")
    assert [f"CPU:{i}" in table for i in range(5)] == [True] * 4 + [False], table
    assert "\x1b" not in done.stdout, "Where the output is no terminal it has no escape sequences"
    last = lines.splitlines()[-1]
    accuracy = float(last.removeprefix("Test accuracy ").partition("%")[0])
    assert accuracy >= 97, last
    picture = output.read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", picture[16:24])
    assert width > 1000 and height > 400


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epochs", "0"], "argument --epochs: expected a whole number, 1 or more, got '0'"),
        (["--epochs", "ten"], "argument --epochs: expected a whole number, 1 or more, got 'ten'"),
        (["--batch-size", "-1"], "argument --batch-size: expected a whole number, 1 or more, got '-1'"),
        (["--seed", "0.5"], "argument --seed: expected a whole number, 0 or more, got '0.5'"),
        (["--replicas", "0"], "argument --replicas: expected a whole number, 1 or more, got '0'"),
        (["--replicas", "9"], "argument --replicas: 9 is more than the devices here, GPU:0, GPU:1, "),
        (["--replicas", "4", "--batch-size", "3"], "4 replicas cannot share a batch of 3 images"),
        (["--output", "nowhere/digits.png"], "argument --output: expected a name.png in a folder"),
        (["--output", "digits.txt"], "argument --output: expected a name.png in a folder"),
        (["--images", "5"], "unrecognized arguments: --images 5"),
    ],
)
def test_a_wrong_value_is_an_error_of_one_line(arguments, message, digits, capsys):
    with pytest.raises(SystemExit) as end:
        digits.main(arguments)
    assert end.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert message in said.err
    assert said.err.count("\n") == 1


def test_a_wrong_value_ends_the_command_with_status_2(run_python):
    done = run_python(program("--replicas", "none"), timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "digits.py: argument --replicas: expected a whole number, 1 or more, got 'none'\n"
