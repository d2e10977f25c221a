"""The small examples run as commands, and come to what they should. (examples/digits.py has tests of its own.)"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def output_of(name: str, *arguments: str) -> str:
    env = {key: value for key, value in os.environ.items() if not key.startswith(("REPLICAX_", "KERAS_"))}
    ended = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments], env=env, capture_output=True, text=True, timeout=180
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


@pytest.mark.parametrize(
    "name, least",
    [("custom_training.py", 0.8), ("keras_fit.py", 0.8), ("tpu.py", 0.8), ("nnx.py", 0.8)],
)
def test_examples_reach_their_accuracy(name, least):
    accuracies = re.findall(r"test accuracy ([\d.]+)", output_of(name))
    assert float(accuracies[-1]) > least


def test_every_kind_of_input_gives_the_same_sum():
    sums = dict(re.findall(r"^(.*?): +([\d.]+)$", output_of("distributed_input.py"), re.MULTILINE))
    assert len(sums) == 6
    assert sums["a dataset of global batches"] == sums["a function of the worker"] == sums["a list of arrays"]
    assert sums["a list of arrays"] == sums["the sum of all rows by numpy"]


def test_workers_go_on_from_their_checkpoints(tmp_path):
    """Two workers, then two again, then one process alone."""
    folder = str(tmp_path / "checkpoints")

    def launched() -> str:
        env = {key: value for key, value in os.environ.items() if not key.startswith(("REPLICAX_", "KERAS_"))}
        command = [sys.executable, "-m", "replicax.launch", "--workers", "2", str(EXAMPLES / "multi_worker.py")]
        ended = subprocess.run(
            [*command, "--folder", folder, "--epochs", "1"], env=env, capture_output=True, text=True, timeout=240
        )
        assert ended.returncode == 0, ended.stderr[-3000:]
        return ended.stdout

    first, second = launched(), launched()
    alone = output_of("multi_worker.py", "--folder", folder, "--epochs", "1")
    assert "2 replicas; starting anew" in first and "epoch 1: " in first
    assert f"2 replicas; going on from {folder}/ckpt-1 after 1 epochs" in second and "epoch 2: " in second
    assert f"1 replicas; going on from {folder}/ckpt-2 after 2 epochs" in alone and "epoch 3: " in alone
    losses = [float(re.search(r"loss ([\d.]+)", text)[1]) for text in (first, second, alone)]
    assert losses[0] > 1.2 * losses[1] > 1.2 * 1.2 * losses[2]


def test_a_preempted_job_ends_as_an_undisturbed_one(tmp_path):
    def launched(folder: str, *options: str) -> subprocess.CompletedProcess[str]:
        env = {key: value for key, value in os.environ.items() if not key.startswith(("REPLICAX_", "KERAS_"))}
        command = [sys.executable, "-m", "replicax.launch", "--workers", "2", "--max-restarts", "1"]
        command += [str(EXAMPLES / "preemption.py"), "--folder", str(tmp_path / folder), "--steps", "120", *options]
        ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
        assert ended.returncode == 0, ended.stderr[-3000:]
        return ended

    undisturbed, preempted = launched("a"), launched("b", "--interrupt-at", "40")
    assert "restart after a preemption" in preempted.stderr and "restart" not in undisturbed.stderr
    begun = [int(step) for step in re.findall(r"2 replicas; beginning at step (\d+)", preempted.stdout)]
    assert begun[0] == 0 and 40 <= begun[1] < 120
    assert preempted.stdout.splitlines()[-1] == undisturbed.stdout.splitlines()[-1]


def test_parameter_servers_train_a_recommender_and_a_second_run_goes_on(tmp_path):
    """Over processes first, then with all tasks in one, from the checkpoint of those."""
    options = ["--folder", str(tmp_path / "checkpoints"), "--steps"]
    env = {key: value for key, value in os.environ.items() if not key.startswith(("REPLICAX_", "KERAS_"))}
    env |= {"REPLICAX_JOB_SECRET": os.environ["REPLICAX_JOB_SECRET"]}
    command = [sys.executable, "-m", "replicax.launch", "--workers", "3", "--ps", "2", "--evaluator"]
    command += [str(EXAMPLES / "parameter_server.py"), *options, "300"]
    launched = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert launched.returncode == 0, launched.stderr[-3000:]
    cluster = {"chief": ["localhost:1"], "worker": ["localhost:2"], "ps": ["localhost:3"]}
    place = {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "evaluator", "index": 0}})}
    evaluated = subprocess.run(
        [sys.executable, *command[-5:]], env=env | place, capture_output=True, text=True, timeout=180
    )
    assert evaluated.returncode == 0, evaluated.stderr[-3000:]
    command = [sys.executable, str(EXAMPLES / "parameter_server.py"), *options, "450"]
    alone = subprocess.run(command, env=env, capture_output=True, text=True, timeout=180)
    assert alone.returncode == 0, alone.stderr[-3000:]
    (begun,) = re.findall(
        "^.*starting anew after 0 steps", launched.stdout, re.MULTILINE
    )  # the evaluator does not train
    assert begun.startswith("[chief 0]")
    (hits,) = re.findall(r"\[chief 0\] +hits of the recommender: ([\d.]+)", launched.stdout)
    assert evaluated.stdout == f"hits after 300 steps: {hits}\n"
    assert f"going on from {tmp_path}/checkpoints/ckpt-2 after 300 steps" in alone.stdout
    for text in (launched.stdout, alone.stdout):
        popular, found = map(float, re.findall(r"^.*hits of .*: ([\d.]+)$", text, re.MULTILINE))
        assert found > 1.2 * popular


@pytest.mark.parametrize("launched", [False, True], ids=["one process", "processes"])
def test_the_tutorial_on_parameter_servers_trains(launched):
    """TensorFlow's, with Keras: `fit`, a loop of its own, and evaluation by the coordinator and by the workers."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("REPLICAX_", "KERAS_"))}
    env |= {"REPLICAX_JOB_SECRET": os.environ["REPLICAX_JOB_SECRET"]}
    by_launcher = ["-m", "replicax.launch", "--workers", "3", "--ps", "2"] if launched else []
    command = [sys.executable, *by_launcher, str(EXAMPLES / "parameter_server_keras.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "parts of the table: ['/job:ps/replica:0/task:0" in done.stdout
    assert re.search(r"Model.fit: loss [\d.]+, then 0\.\d+", done.stdout), done.stdout
    assert re.search(r"Finished epoch 3, accuracy is (1.0|0.9)", done.stdout), done.stdout
    assert len(re.findall(r"Evaluation accuracy.*: (1.0|0.9)", done.stdout)) == 2, done.stdout
