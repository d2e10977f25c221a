"""`replicax info`: what it finds, what it says is wrong, and what it never shows."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from replicax._base import environment_variables, exit_codes
from replicax._base.commands import front_ends
from replicax._checkpoint import preemption
from replicax._commands import main, table
from replicax._commands.info import cluster, command, devices, settings, versions
from replicax._commands.info.section import Section
from replicax._job import background, process_exit
from replicax._report.terminal import Style

ROOT = Path(__file__).parents[2]
ONE_CPU = {"platform": "cpu", "devices": [{"name": "CPU:0", "kind": "cpu", "platform": "cpu", "memory": None}],
           "virtual": {}}  # fmt: skip
_OF_CLUSTERS = re.compile("TF_CONFIG|SLURM_|SM_|TPU_|KUBE|REPLICAX_|JOB_COMPLETION|CUDA_VISIBLE")


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@pytest.fixture
def alone(monkeypatch):
    """An environment that says nothing of clusters and settings."""
    for name in os.environ:
        if _OF_CLUSTERS.match(name):
            monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(devices, "PROBE", python(f"print({json.dumps(ONE_CPU)!r})"))
    monkeypatch.setattr(devices, "visible_gpus", lambda environment: [])
    return monkeypatch


def workers(*addresses, task=0, kind="worker"):
    return json.dumps({"cluster": {"worker": list(addresses)}, "task": {"type": kind, "index": task}})


def test_everything_is_shown_and_the_status_is_0(alone, capsys):
    assert main(["info"]) == 0
    shown = capsys.readouterr().out
    for title in ("Versions", "Devices", "Extras", "Cluster", "Settings"):
        assert f"{title}\n" in shown
    for word in ("Python", "jax", "jaxlib", "numpy", "CPU:0", "compilation cache", "No problem was found."):
        assert word in shown
    to_read = [line for line in shown.splitlines() if not line.lstrip().startswith("$ ")]  # not the commands to copy
    assert "\x1b" not in shown and max(map(len, to_read)) <= 120


def test_json_has_the_same(alone, capsys):
    assert main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is True and found["problems"] == []
    assert found["versions"]["jax"] == versions.installed("jax")
    assert found["devices"]["devices"] == ONE_CPU["devices"]
    assert set(found) == {"ok", "problems", "versions", "devices", "extras", "cluster", "settings"}


def test_a_problem_is_listed_and_the_status_is_1(alone, capsys):
    alone.setenv("REPLICAX_STEP_TIMOUT", "60")
    assert main(["info"]) == 1
    shown = capsys.readouterr().out
    assert "1 problem was found:" in shown and "Did you mean REPLICAX_STEP_TIMEOUT?" in shown
    assert main(["info", "--json"]) == 1
    assert len(json.loads(capsys.readouterr().out)["problems"]) == 1


# Devices.


def test_devices_come_from_jax(alone, run_python):
    done = run_python(
        "from replicax._commands.info import devices; import json; print(json.dumps(devices.devices(60).data))",
        env={"REPLICAX_VIRTUAL_DEVICES": "GPU:3", "JAX_NUM_CPU_DEVICES": None},
    )
    found = json.loads(done.stdout)
    assert found["virtual"] == {"GPU": 3}
    assert [each["name"] for each in found["devices"]] == ["GPU:0", "GPU:1", "GPU:2", "CPU:0"]


def test_an_accelerator_that_hangs_does_not_hang_the_command(alone):
    section = devices.devices(0.5, python("import threading; threading.Event().wait()"))
    (problem,) = section.problems
    assert "did not list its devices within 0.5 s" in problem and "JAX_PLATFORMS=cpu" in problem


def test_an_error_of_jax_is_shown(alone):
    section = devices.devices(60, python("raise SystemExit('no driver')"))
    assert section.rows == [("", "no driver")]
    assert "exit status 1" in section.problems[0]


def test_gpus_that_jax_does_not_use_are_a_problem(alone):
    alone.setattr(devices, "visible_gpus", lambda environment: ["0", "1"])
    (problem,) = devices.devices(60).problems
    assert "has 2 NVIDIA GPUs, and JAX uses the CPU" in problem and "pip install 'jax[cuda" in problem


def test_devices_that_are_alike_share_a_line(alone):
    gpus = [{"name": f"GPU:{i}", "kind": "H100", "platform": "gpu", "memory": 80 << 30} for i in range(8)]
    found = {"platform": "gpu", "devices": gpus, "virtual": {}}
    section = devices.devices(60, python(f"print({json.dumps(found)!r})"))
    assert section.rows == [("platform", "gpu"), ("GPU:0 to GPU:7", "H100, 80.00 GiB of memory each")]


# Versions and extras.


def test_what_an_extra_lacks_comes_with_the_command_that_installs_it(monkeypatch):
    real = versions.installed
    monkeypatch.setattr(versions, "installed", lambda name: None if name == "kubernetes" else real(name))
    section = versions.extras()
    row = section.rows.index(("kubernetes", "missing: kubernetes"))
    assert section.rows[row + 1] == ("", "$ pip install kubernetes")
    assert not section.problems  # an extra is no duty


def test_a_library_that_is_too_old_is_a_problem(monkeypatch):
    real = versions.installed
    monkeypatch.setattr(versions, "installed", lambda name: {"flax": "0.11.0", "jax": "0.9"}.get(name) or real(name))
    assert "flax 0.11.0 is not what the extra 'flax' needs (>=0.12.8): pip install 'flax>=0.12.8'" in (
        versions.extras().problems
    )
    (problem,) = versions.versions().problems
    assert re.fullmatch(r"jax 0\.9 is not what replicax needs \((>=[\d.]+)\): pip install 'jax\1'", problem)


# Clusters.


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ("{'cluster': {}}", "TF_CONFIG is not JSON"),
        ('{"cluster": {"worker": ["a:1",]}}', "comma"),  # each Python says it in other words
        (workers("localhost:1", "localhost:2", task=2), "there is no task 2 in job 'worker', whose tasks are 0 and 1"),
        (workers("localhost:1", kind="wroker"), "this process is of job 'wroker', but the cluster has the jobs"),
        (workers("localhost:7", "localhost:7"), "worker 0 and worker 1 claim one address, localhost:7"),
        (workers("localhost", "localhost:2"), "the address of worker 0 is none"),
        (workers("no-such-host.invalid:1", "localhost:2", task=1), "the host 'no-such-host.invalid' "),
        ('{"task": {"type": "worker", "index": 0}}', "missing: 'cluster' in TF_CONFIG"),
    ],
)
def test_a_wrong_tf_config_is_told(alone, config, told):
    alone.setenv("TF_CONFIG", config)
    problems = cluster.cluster().problems
    assert any(told in problem for problem in problems), problems
    assert all(problem.startswith("TF_CONFIG: ") for problem in problems)
    assert "How a cluster is described: " in problems[-1]


def test_a_port_in_use_is_told(alone):
    import socket

    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        alone.setenv("TF_CONFIG", workers(f"localhost:{port}", "localhost:1"))
        assert any(f"port {port} cannot be opened" in problem for problem in cluster.cluster().problems)


def test_a_right_tf_config_is_no_problem(alone):
    import socket

    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    alone.setenv("TF_CONFIG", workers(f"localhost:{port}"))
    section = cluster.cluster()
    assert not section.problems and ("TF_CONFIG", "strategies of several workers read it by default") in section.rows


def test_other_descriptions_are_found(alone):
    alone.setenv("SLURM_PROCID", "0")
    (problem,) = cluster.cluster().problems
    assert problem.startswith("Slurm: SLURM_") and "not found in environment" in problem
    alone.delenv("SLURM_PROCID")
    alone.setenv("SM_HOSTS", '["algo-1"]')
    alone.setenv("SM_CURRENT_HOST", "algo-2")
    alone.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    alone.setenv("REPLICAX_RESTART_COUNT", "2")
    section = cluster.cluster()
    assert any("the current host 'algo-2' is not among the hosts" in problem for problem in section.problems)
    assert {"SageMaker", "Kubernetes", "replicax launch"} <= section.data.keys()


# Settings.


def test_secrets_are_never_shown(alone, capsys):
    secret = "correct-horse-battery"
    alone.setenv("REPLICAX_JOB_SECRET", secret)
    alone.setenv("REPLICAX_JOB_SECRETT", secret)  # a misspelled name
    for arguments in ([], ["--json"]):
        main(["info", *arguments])
        shown = capsys.readouterr()
        assert secret not in shown.out + shown.err
        assert "REPLICAX_JOB_SECRET" in shown.out and "Did you mean REPLICAX_JOB_SECRET?" in shown.out


def test_wrong_values_are_told(alone, tmp_path):
    wrong = {
        "REPLICAX_STEP_TIMEOUT": "a minute",
        "REPLICAX_PREFLIGHT": "loud",
        "REPLICAX_TPU_PORT": "8482/tcp",
        "REPLICAX_JOB_SECRET_FILE": str(tmp_path / "not-there"),
    }
    for name, value in wrong.items():
        alone.setenv(name, value)
    problems = settings.settings().problems
    assert [name for name in wrong if not any(name in problem for problem in problems)] == []
    assert len(problems) == len(wrong)


@pytest.mark.sampled(3, others="thorough")
@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("REPLICAX_VIRTUAL_DEVICES", "GPU-4", "such as GPU:4; got 'GPU-4'"),
        ("REPLICAX_VIRTUAL_DEVICES", "GPU:4,GPU:2", "each type once, such as 'GPU:4,CPU:2'; got 'GPU:4,GPU:2'"),
        ("REPLICAX_COMPILATION_CACHE", __file__, f"{__file__} is a file or lies in one"),
    ],
)
def test_settings_that_programs_refuse_do_not_stop_the_commands_that_help(variable, value, told, run_python):
    command = "import sys; from replicax._commands import main; sys.exit(main(sys.argv[1:] or {}))"
    done = run_python(command.format(["info"]), env={variable: value}, fresh=True)
    assert done.returncode == 1 and told in " ".join(done.stdout.split()) and "Traceback" not in done.stderr, (
        done.stderr
    )
    done = run_python(command.format(["docs", "how-to/launch#slurm"]), env={variable: value}, fresh=True)
    assert done.returncode == 0 and done.stdout.startswith("## Slurm"), done.stderr
    done = run_python("import replicax as rx; rx.MirroredStrategy()", env={variable: value}, fresh=True)
    assert done.returncode == 1 and value in done.stderr.splitlines()[-1], done.stderr


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("REPLICAX_STEP_TIMEOUT", "None"),
        ("REPLICAX_STEP_TIMEOUT", "2.5"),
        ("REPLICAX_LOG_COMPILES", "off"),
        ("REPLICAX_PREFLIGHT", "QUIET"),
        ("REPLICAX_VIRTUAL_DEVICES", "GPU:4,CPU:2"),
        ("REPLICAX_COMPILATION_CACHE", "gs://bucket/folder"),
        ("MY_VARIABLE", "x"),
        ("REPLICAX_OF_MY_PROGRAM", "x"),
    ],
)
def test_right_values_are_no_problem(name, value):
    assert environment_variables.problems({name: value}) == []


def test_the_folder_of_compiled_programs_is_measured(alone, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "program").write_bytes(bytes(3000))
    alone.setenv("REPLICAX_COMPILATION_CACHE", str(tmp_path))
    section = settings.settings()
    assert section.data["compilation cache"] == {"folder": str(tmp_path), "files": 1, "bytes": 3000}
    assert section.rows[-1] == ("compilation cache", f"{tmp_path}, 2.93 KiB in 1 file")


def test_commands_to_copy_are_not_folded():
    row = ("", "$ pip install " + " ".join(["a-library"] * 20))
    assert row[1] in command.as_text([Section("Extras", rows=[row])], Style(False), 80)


# The lists that the reference page is made from.


def test_every_variable_in_the_source_is_in_the_list_and_the_other_way_round():
    lists = [ROOT / "src/replicax" / name for name in ("_base/environment_variables.py", "tf/_programs/__init__.py")]
    files = [path for path in (ROOT / "src").rglob("*.py") if path not in lists]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    read = set(re.findall(r"REPLICAX_[A-Z][A-Z_]*[A-Z]", text))
    of_front_ends = [variable for added in front_ends() for variable in added.variables]
    assert read == {variable.name for variable in (*environment_variables.VARIABLES, *of_front_ends)}


def test_the_list_of_exit_codes_has_every_command_and_the_constants():
    of_front_ends = [code for added in front_ends() for code in added.exit_codes]
    commands = {code.command for code in (*exit_codes.EXIT_CODES, *of_front_ends)}
    assert commands >= {f"replicax {each.name}" for each in table.COMMANDS}
    of_programs = {code.status for code in exit_codes.EXIT_CODES if code.command == "a program"}
    constants = (
        preemption.RESTART,
        preemption.RESTART_ON_GOOGLE_CLOUD,
        process_exit.BECAUSE_OF_ANOTHER,
        background.FAILED,
    )
    assert of_programs == set(map(str, constants))
