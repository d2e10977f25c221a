"""`replicax compare`: the recorder, the comparison of two records, and the command without TensorFlow."""

from __future__ import annotations

import doctest
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import replicax
from replicax.tf._programs.compare import command, comparison, report
from replicax.tf._programs.compare._replicax_recorder import hooks, recorder
from replicax.tf._programs.compare._replicax_recorder.recorder import EnoughSteps, Recorder

SERVED = Path(replicax.__file__).parent / "tf" / "_at_start"


class Value:
    """A variable as the recorder sees it."""

    def __init__(self, value):
        self.value = np.asarray(value, np.float32)

    def numpy(self):
        return self.value


def record(
    folder, steps, names=("layer/kernel", "layer/bias"), replay=None, initial=((1.0, 2.0), (0.0, 0.0)), notes=()
):
    """Record a run: for each step the results, and what is added to each variable."""
    recorder = Recorder(str(folder), 100, os.getcwd(), replay and str(replay))
    variables = []
    for name, value in zip(names, initial):
        entry = recorder.new_variable("keras", name, [2], True)
        variables.append(Value(value if recorder.initial(entry) is None else recorder.initial(entry)))
        recorder.save_initial(entry, variables[-1])
        recorder.add_variable(entry, variables[-1])
    for what, name in notes:
        recorder.note(what, name=name)
    for results, changes in steps:
        for variable, change in zip(variables, changes):
            variable.value = variable.value + np.float32(change)
        recorder.record_step(results)
    recorder.finish()
    return comparison.Run.read(str(folder))


def both(tmp_path, theirs, ours, rtol=1e-3, **options):
    return comparison.compare(
        record(tmp_path / "theirs", theirs),
        record(tmp_path / "ours", ours, replay=tmp_path / "theirs", **options),
        rtol,
    )


SAME = [({"loss": 2.0}, (0.1, 0.1)), ({"loss": 1.5}, (0.1, 0.1))]


def test_equal_runs_are_equal_and_variables_begin_with_the_values_of_the_first_run(tmp_path):
    found = both(tmp_path, SAME, SAME, initial=((7.0, 7.0), (7.0, 7.0)))
    assert found.is_equal and [step.largest_difference for step in found.steps] == [0, 0]
    text = report.text(found)
    assert "All 2 steps agree, within 0.001." in text and "Made equal: the initial values of 2 variables" in text
    assert text.splitlines()[:2] == [
        "step  result     TensorFlow  replicax  difference",
        "   1  loss                2         2  0.0e+00",
    ]


def test_the_first_variable_that_differs_is_named(tmp_path):
    ours = [SAME[0], ({"loss": 1.5}, (0.1, 0.15))]
    found = both(tmp_path, SAME, ours)
    assert not found.is_equal and found.first.number == 2
    (difference,) = found.first.differing_variables
    assert difference.variable["name"] == "layer/bias" and difference.largest == pytest.approx(0.05)
    text = report.text(found)
    assert "First difference: step 2 (" in text and "test_compare.py:" in text  # the line that made the step
    assert "variable layer/bias, shape (2,)" in text and "TensorFlow 0.2, replicax 0.25" in text
    assert "layer/kernel" not in text and "look at the gradients and the update" in text


def test_variables_that_drift_apart_are_told_from_a_sudden_difference(tmp_path):
    theirs = [({"loss": 2.0}, (0.1, 0.1))] * 2
    ours = [({"loss": 2.0}, (0.1, 0.1005)), ({"loss": 2.0}, (0.1, 0.11))]
    assert "rounding can grow like this" in report.text(both(tmp_path / "drift", theirs, ours))
    ours[0] = theirs[0]
    assert "rounding can grow" not in report.text(both(tmp_path / "fault", theirs, ours))


def test_a_result_that_differs_alone_is_the_results_fault(tmp_path):
    ours = [({"loss": 2.1}, (0.1, 0.1)), SAME[1]]
    found = both(tmp_path, SAME, ours)
    text = report.text(found)
    assert found.first.number == 1 and [result.name for result in found.first.differing_results] == ["loss"]
    assert "loss: TensorFlow 2, replicax 2.1" in text and "look at how the result is computed" in text
    assert both(tmp_path, SAME, ours, rtol=0.1).is_equal


def test_not_a_number_in_one_run_alone_differs(tmp_path):
    broken = [({"loss": float("nan")}, (np.nan, 0.1))]
    assert both(tmp_path / "a", broken, broken).is_equal
    found = both(tmp_path / "b", SAME[:1], broken)
    assert found.first.number == 1 and len(found.first.differing_variables) == 1


def test_a_gradient_that_is_rounding_alone_is_not_counted_but_named(tmp_path):
    theirs, ours = [({"loss": 2.0}, (0.1, 1e-4))], [({"loss": 2.0}, (0.1, -1e-4))]
    found = both(tmp_path, theirs, ours)
    assert found.is_equal
    assert "Not counted, because the change is small and differs: layer/bias." in report.text(found)


def test_runs_of_different_length_differ(tmp_path):
    found = both(tmp_path, SAME, SAME[:1])
    assert not found.is_equal and "TensorFlow made 2 and replicax 1." in report.text(found)
    empty = both(tmp_path / "empty", [], SAME[:1])
    assert "TensorFlow made 0 and replicax 1 steps" in report.text(empty)


def test_what_is_not_equal_is_named(tmp_path):
    notes = [("fixed", "tf.random.normal"), ("random", "tf.random.gamma"), ("unshuffled", "Dataset.shuffle")]
    found = both(tmp_path, SAME, SAME, names=("layer/kernel",), notes=notes)
    text = report.text(found, keep_random=True)
    assert "Not made equal: only TensorFlow has the variable layer/bias, shape (2,)" in text
    assert "Not made equal: tf.random.gamma draws other numbers (tests/" in text
    assert "tf.random.normal gives the same numbers" in text and "Dataset.shuffle does not shuffle" in text
    assert "shuffled data (--keep-random)" in text


def test_a_program_that_failed_first_is_not_compared_with_one_that_never_ran(tmp_path):
    notes = [("random", "tf.random.gamma")]
    theirs = record(tmp_path / "theirs", SAME, notes=notes)
    never = comparison.Run.read(str(tmp_path / "never"))
    text = report.text(comparison.compare(theirs, never, 1e-3))
    assert "tf.random.gamma draws other numbers" in text and "only TensorFlow has" not in text


def test_runs_of_different_length_say_so_beside_the_first_difference(tmp_path):
    text = report.text(both(tmp_path, SAME, [({"loss": 2.1}, (0.1, 0.1))]))
    assert "First difference: step 1" in text and "TensorFlow made 2 steps, replicax 1." in text


def test_a_variable_that_is_constant_in_tensorflow_has_no_infinite_difference(tmp_path):
    text = report.text(both(tmp_path, [({"loss": 2.0}, (0.1, 0.0))], [({"loss": 2.1}, (0.1, 0.5))]))
    assert text.splitlines()[2] == "   1  variables                        constant in TensorFlow <"
    assert "; constant in TensorFlow" in text and "inf" not in text


def test_a_restored_checkpoint_of_the_first_run_is_named(tmp_path):
    theirs = record(tmp_path / "theirs", SAME, notes=[("written", "out/ckpt-1")])
    notes = [("restored", "out/ckpt-1"), ("restored", "pretrained/ckpt-9")]
    ours = record(tmp_path / "ours", SAME, replay=tmp_path / "theirs", notes=notes)
    text = report.text(comparison.compare(theirs, ours, 1e-3))
    assert "Not made equal: replicax restored out/ckpt-1 (" in text and "pretrained" not in text
    assert "which the run under TensorFlow wrote. Remove it, or give the program a new folder for each run." in text


def test_checkpoints_that_are_written_and_restored_are_noted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recorder = Recorder(str(tmp_path / "record"), 1, os.getcwd())
    made = hooks._Hooks(recorder, keep_random=False)
    made._restore(lambda checkpoint, save_path: None, "checkpoint", str(tmp_path / "out" / "ckpt-1"))
    made._restore(lambda checkpoint, save_path: None, "checkpoint", save_path=None)
    made._write_checkpoint(lambda prefix: f"{prefix}-2", Path("out") / "ckpt")
    made._restore(lambda checkpoint, save_path: None, "checkpoint", save_path="out/ckpt-2")  # its own
    made._restore_newest(lambda: "out/ckpt-3")
    recorder.finish()
    notes = [(note["what"], note["name"]) for note in comparison.Run.read(str(tmp_path / "record")).notes]
    assert notes == [("restored", "out/ckpt-1"), ("written", "out/ckpt-2"), ("restored", "out/ckpt-3")]


def test_the_program_ends_with_the_command(tmp_path, monkeypatch):
    made = []

    class Terminated(subprocess.Popen):
        """A process that is waited for when SIGTERM arrives."""

        def wait(self, timeout=None):
            made.append(self)
            if timeout is not None:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().wait(timeout)

    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 100\n")
    python.chmod(0o755)
    (tmp_path / "program.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", Terminated)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # without the command's handler, nothing would happen
    try:
        with pytest.raises(SystemExit, match="143"):
            command.main(["--tensorflow", str(python), "--time-limit", "20", "program.py"], "replicax compare")
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
    assert made[0].returncode == -signal.SIGKILL


def test_the_recorder_ends_the_program_after_the_last_step(tmp_path):
    recorder = Recorder(str(tmp_path), 1, os.getcwd())
    with pytest.raises(EnoughSteps):
        recorder.record_step({"loss": 1.0})
    assert comparison.Run.read(str(tmp_path)).is_complete


# The second run, which finds the file that the first has written, makes another update from the fifth step on.
PROGRAM = """
import os, numpy as np, tensorflow as tf
second = os.path.exists("seen")
open("seen", "w").close()
keras = tf.keras
x, y = np.random.rand(16, 3).astype("float32"), np.random.rand(16, 1).astype("float32")
w = tf.Variable(tf.random.normal([3, 1]), name="w")
for _ in range(2):  # steps 1 and 2: no optimizer
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((x @ w - y) ** 2)
    w.assign_sub(0.1 * tape.gradient(loss, w))
model = keras.Sequential([keras.Input((3,)), keras.layers.Dropout(0.2), keras.layers.Dense(1, name="last")])
model.compile(keras.optimizers.SGD(0.1), "mse")
model.train_on_batch(x[:8], y[:8])  # step 3
model.fit(x, y, batch_size=16, verbose=0)  # step 4
optimizer = keras.optimizers.Adam(0.1)
optimizer.build(model.trainable_variables)

@tf.function
def step(rows, labels):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(rows, training=True) - labels) ** 2)
    kernel, bias = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip([kernel, -bias if second else bias], model.trainable_variables))
    return {"loss": loss}

for rows, labels in tf.data.Dataset.from_tensor_slices((x, y)).shuffle(16).batch(8).repeat():  # steps 5 and 6
    step(rows, labels)
"""


def run_compare(folder, *arguments, served=True, timeout=200):
    """Run the command on `program.py`, with this Python in place of TensorFlow's."""
    environment = {**os.environ, "PYTHONPATH": str(SERVED) if served else ""}
    environment.pop("REPLICAX_TENSORFLOW_PYTHON", None)
    command = [sys.executable, "-m", "replicax", "compare", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout)


@pytest.mark.processes
def test_every_kind_of_step_is_recorded_and_the_first_difference_found(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    done = run_compare(tmp_path, "--tensorflow", sys.executable, "--steps", "6", "--folder", "kept", "program.py")
    assert done.returncode == 1, done.stdout + done.stderr
    lines = PROGRAM.splitlines()
    runs = [comparison.Run.read(str(tmp_path / "kept" / name)) for name in ("tensorflow", "replicax")]
    for run in runs:
        made_by = [lines[int(step["place"].split(":")[1]) - 1].split("(")[0].strip() for step in run.steps]
        # What the program assigns itself is noticed at the next hooked call.
        assert made_by == ["w.assign_sub", "model.train_on_batch", "model.train_on_batch", "model.fit", "step", "step"]
    assert "First difference: step 5 (program.py:" in done.stdout
    assert "variable sequential/last/bias, shape (1,), created at program.py:" in done.stdout
    assert "variable sequential/last/kernel" not in done.stdout
    for text in ("model.fit does not shuffle", "Dataset.shuffle does not shuffle", "dropout gives the same numbers"):
        assert text in done.stdout


@pytest.mark.processes
def test_the_error_of_a_program_is_shown_as_its_own(tmp_path):
    (tmp_path / "program.py").write_text("import tensorflow")
    done = run_compare(tmp_path, "--tensorflow", sys.executable, "program.py", served=False)
    assert done.returncode == 3
    assert "under TensorFlow, program.py ended with status 1, after 0 steps" in done.stderr
    assert 'File "' in done.stderr and "program.py" in done.stderr and "runpy" not in done.stderr
    assert "No module named 'tensorflow'" in done.stderr and "Install TensorFlow for the Python" in done.stderr


def test_a_python_with_tensorflow_has_to_be_named(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("REPLICAX_TENSORFLOW_PYTHON", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # without the one that `replicax export` has installed
    program = tmp_path / "program.py"
    program.touch()
    for arguments, words in [
        ([str(program)], ("replicax export --install tensorflow", "REPLICAX_TENSORFLOW_PYTHON")),
        (["--tensorflow", "/nowhere/python", str(program)], ("/nowhere/python cannot be run",)),
        (["nosuch.py"], ("There is no file nosuch.py",)),
    ]:
        assert command.main(arguments, "replicax compare") == 2
        error = capsys.readouterr().err
        assert all(word in error for word in words), error


@pytest.mark.parametrize("option", ["--rtol=nan", "--rtol=-1", "--rtol=0", "--steps=0"])
def test_numbers_that_compare_nothing_are_refused(option, capsys):
    from replicax.tf._programs.compare import command

    with pytest.raises(SystemExit) as ended:
        command.main([option, "program.py"], "replicax compare")
    assert ended.value.code == 2 and "must be" in capsys.readouterr().err


def test_a_record_of_an_earlier_comparison_is_not_read(tmp_path, monkeypatch, capsys):
    from replicax.tf._programs.compare import command

    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    Path("program.py").touch()
    old = tmp_path / "kept" / "replicax" / "events.jsonl"
    old.parent.mkdir(parents=True)
    old.write_text('{"event": "step"}\n')
    assert command.main(["--tensorflow", str(python), "--folder", "kept", "program.py"], "replicax compare") == 3
    assert "ended with status 1, after 0 steps" in capsys.readouterr().err
    assert not old.exists()


def test_examples_of_the_recorder():
    results = doctest.testmod(recorder)
    assert results.attempted and not results.failed
