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


# A user's environment, but for the secret, which would be made in the user's home.
OWN = {key: None for key in os.environ if key.startswith(("REPLICAX_", "KERAS_")) and key != "REPLICAX_JOB_SECRET"}


@pytest.fixture
def output_of(run_well):
    """`output_of(name, *arguments, **env)` runs an example, which is to end well, and returns its output."""

    def run(name: str, *arguments: str, **env: str) -> str:
        head = f"import sys\nsys.argv[1:] = {arguments!r}\n"
        return run_well((EXAMPLES / name).read_text(encoding="utf-8"), head=head, env={**OWN, **env}).stdout

    return run


def launched(options: str, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Has the launcher run an example, which is to end well."""
    env = {key: value for key, value in os.environ.items() if key not in OWN}
    command = [sys.executable, "-m", "replicax.launch", *options.split(), str(EXAMPLES / name), *arguments]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended


@pytest.mark.sampled(4, others="thorough")
@pytest.mark.parametrize(
    "name, least",
    [("custom_training.py", 0.8), ("keras_fit.py", 0.8), ("tpu.py", 0.8), ("nnx.py", 0.8), ("equinox_mlp.py", 0.8)],
)
def test_examples_reach_their_accuracy(output_of, name, least):
    accuracies = re.findall(r"test accuracy ([\d.]+)", output_of(name))
    assert float(accuracies[-1]) > least


@pytest.mark.thorough
def test_a_model_of_which_a_device_has_an_eighth(output_of):
    output = output_of("large_model.py")
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", output)]
    assert losses[0] > losses[1] > losses[2] and losses[2] < 2.8  # log(64) is 4.2
    [share] = re.findall(r"a device has ([\d.]+) of the model", output)
    assert 0.125 <= float(share) < 0.135  # with what is small
    assert "up/kernel (128, 512): layout ('replica', 'model'), (32, 256) on a device" in output


def test_every_kind_of_input_gives_the_same_sum(output_of):
    sums = dict(re.findall(r"^(.*?): +([\d.]+)$", output_of("distributed_input.py"), re.MULTILINE))
    assert len(sums) == 6
    assert sums["a dataset of global batches"] == sums["a function of the worker"] == sums["a list of arrays"]
    assert sums["a list of arrays"] == sums["the sum of all rows by numpy"]


@pytest.mark.thorough
def test_workers_go_on_from_their_checkpoints(output_of, tmp_path):
    """Two workers first, then one process alone."""
    options = ["--folder", str(tmp_path / "checkpoints"), "--epochs", "1"]
    together = launched("--workers 2", "multi_worker.py", *options).stdout
    alone = output_of("multi_worker.py", *options)
    assert "2 replicas; starting anew" in together and "epoch 1: " in together
    assert f"1 replicas; going on from {options[1]}/ckpt-1 after 1 epochs" in alone and "epoch 2: " in alone
    losses = [float(re.search(r"loss ([\d.]+)", text)[1]) for text in (together, alone)]
    assert losses[0] > 1.2 * losses[1]


@pytest.mark.thorough
def test_a_preempted_job_ends_as_an_undisturbed_one(output_of, tmp_path):
    """Two workers with one replica each, and one process that has both."""
    options = ["--steps", "120", "--folder"]
    alone = output_of("preemption.py", *options, str(tmp_path / "alone"), JAX_NUM_CPU_DEVICES="2")
    command = ["preemption.py", *options, str(tmp_path / "workers"), "--interrupt-at", "10"]
    workers = launched("--workers 2 --max-restarts 1", *command)
    assert workers.stderr.count("restart after a preemption") == 1
    begun = [int(step) for step in re.findall(r"2 replicas; beginning at step (\d+)", workers.stdout)]
    assert begun[0] == 0 and 10 <= begun[1] < 120
    begin, end = alone.splitlines()
    assert begin == "2 replicas; beginning at step 0" and end.startswith("step 120: ")
    assert workers.stdout.splitlines()[-1].removeprefix("[worker 0] ") == end


@pytest.mark.thorough
def test_parameter_servers_train_a_recommender_and_a_second_run_goes_on(output_of, tmp_path):
    """Over processes first, then with all tasks in one, from the checkpoint of those."""
    options = ["--folder", str(tmp_path / "checkpoints"), "--steps"]
    together = launched("--workers 2 --ps 2", "parameter_server.py", *options, "150").stdout
    cluster = {"chief": ["localhost:1"], "worker": ["localhost:2"], "ps": ["localhost:3"]}
    place = json.dumps({"cluster": cluster, "task": {"type": "evaluator", "index": 0}})
    evaluated = output_of("parameter_server.py", *options, "150", TF_CONFIG=place)
    alone = output_of("parameter_server.py", *options, "250")
    (begun,) = re.findall("^.*starting anew after 0 steps", together, re.MULTILINE)
    assert begun.startswith("[chief 0]")
    (hits,) = re.findall(r"\[chief 0\] +hits of the recommender: ([\d.]+)", together)
    assert evaluated == f"hits after 150 steps: {hits}\n"  # the evaluator does not train
    assert f"going on from {options[1]}/ckpt-1 after 150 steps" in alone
    for text in (together, alone):
        popular, found = map(float, re.findall(r"^.*hits of .*: ([\d.]+)$", text, re.MULTILINE))
        assert found > 1.2 * popular


@pytest.mark.parametrize(
    "processes", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["one process", "processes"]
)
def test_the_tutorial_on_parameter_servers_trains(output_of, processes):
    """TensorFlow's, with Keras: `fit`, a loop of its own, and evaluation by the coordinator and by the workers."""
    name = "parameter_server_keras.py"
    out = launched("--workers 2 --ps 2", name).stdout if processes else output_of(name)
    assert "parts of the table: ['/job:ps/replica:0/task:0" in out
    assert re.search(r"Model.fit: loss [\d.]+, then 0\.\d+", out), out
    assert re.search(r"Finished epoch 3, accuracy is (1.0|0.9)", out), out
    assert len(re.findall(r"Evaluation accuracy.*: (1.0|0.9)", out)) == 2, out


@pytest.fixture
def outputs_of(run_well):
    """`outputs_of(name, option, *arguments)` runs an example with 4, 2 and 1 as the option, in one process."""

    def run(name: str, option: str, *arguments: str) -> list[str]:
        path = str(EXAMPLES / name)
        program = f"""
            import runpy, sys
            for count in "421":
                sys.argv = [{path!r}, {option!r}, count, *{arguments!r}]
                runpy.run_path({path!r}, run_name="__main__")
                print("=====", flush=True)
            """
        return run_well(program, env=OWN).stdout.split("=====\n")[:3]

    return run


def numbers_after(words: str, outputs: list[str]) -> list[float]:
    """Return the last number that follows the words in each output."""
    return [float(re.findall(rf"{words} ([\d.]+)", output)[-1]) for output in outputs]


def test_a_gpt_trains_alike_on_4_2_and_1_replicas(outputs_of):
    sizes = ["--steps", "4", "--layers", "1", "--width", "32", "--length", "32", "--batch", "8"]
    outputs = outputs_of("gpt.py", "--replicas", *sizes, "--prompt", "def read(")
    assert [f"parameters on {n} replicas" in output for n, output in zip((4, 2, 1), outputs)] == [True] * 3
    for losses in (numbers_after(r"step 4: loss", outputs), numbers_after("test loss", outputs)):
        assert losses == pytest.approx([losses[-1]] * 3, rel=2e-5)
        assert 3 < losses[-1] < 6  # log(97) is 4.6
    assert [len(output.partition("def read(")[2]) for output in outputs] == [601] * 3  # a newline ends them


def test_a_vae_trains_alike_on_4_2_and_1_replicas(outputs_of, tmp_path):
    picture = tmp_path / "vae.png"
    outputs = outputs_of("vae.py", "--replicas", "--steps", "4", "--picture", str(picture))
    losses = numbers_after("step 4: loss", outputs)
    assert losses == pytest.approx([losses[-1]] * 3, rel=2e-5)
    assert losses[-1] < 44.4  # 64 log(2), of an image without a description
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_4_2_and_1_asynchronous_workers_train_equally_good_recommenders(outputs_of):
    outputs = outputs_of("recommender.py", "--workers", "--steps", "500")
    errors = numbers_after("test error of the recommender:", outputs)
    # Workers compute with rows that others are updating, so that the figures differ a little in each run.
    assert errors == pytest.approx([errors[-1]] * 3, rel=0.03)
    averages = numbers_after("test error of averages of users and films:", outputs)
    assert max(errors) < 0.9 * min(averages)
    assert min(errors) > 0.5  # the noise of the ratings
