"""The recipes for Slurm, Kubernetes, Ray, SkyPilot and CI: well-formed, and what runs without those systems does."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "examples" / "recipes"
BASH = shutil.which("bash")
needs_bash = pytest.mark.skipif(BASH is None, reason="needs bash")


def fake(folder: Path, name: str, text: str) -> None:
    """A command that stands in for another one."""
    (folder / name).write_text(f"#!{BASH}\n{text}\n", encoding="utf-8")
    (folder / name).chmod(0o755)


@needs_bash
@pytest.mark.parametrize(
    "status, restarts, requeued", [(0, None, False), (3, None, True), (3, "2", True), (3, "3", False)]
)
def test_the_slurm_script_runs_its_arguments_in_a_step_and_queues_failed_jobs_again(
    status, restarts, requeued, tmp_path
):
    fake(tmp_path, "srun", f'echo "srun $SRUN_CPUS_PER_TASK $GLIBC_TUNABLES $REPLICAX_RESTART_COUNT $*"; exit {status}')
    fake(tmp_path, "scontrol", 'echo "scontrol $*"')
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "17", "SLURM_CPUS_PER_TASK": "8"}
    if restarts:
        env["SLURM_RESTART_COUNT"] = restarts
    command = [BASH, RECIPES / "slurm.sh", "train.py", "--name", "two words"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == status, done.stderr
    step = (
        f"srun 8 glibc.malloc.hugetlb=1 {restarts or 0} --kill-on-bad-exit=1 --label python train.py --name two words"
    )
    assert done.stdout.splitlines() == [step, *["scontrol requeue 17"] * requeued]


def jobset() -> dict:
    return yaml.safe_load((RECIPES / "jobset.yaml").read_text(encoding="utf-8"))


def worker_of(spec: dict) -> tuple[dict, dict]:
    (job,) = spec["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    return job["template"]["spec"], container


def test_the_jobset_restarts_all_workers_together():
    spec = jobset()
    job, container = worker_of(spec)
    assert (spec["apiVersion"], spec["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert spec["spec"]["network"] == {"enableDNSHostnames": True}
    assert spec["spec"]["failurePolicy"]["maxRestarts"] == 3
    assert (job["completionMode"], job["backoffLimit"]) == ("Indexed", 0)
    assert job["template"]["spec"]["restartPolicy"] == "Never"
    (workers,) = (variable["value"] for variable in container["env"] if variable["name"] == "WORKERS")
    assert job["completions"] == job["parallelism"] == int(workers)


@needs_bash
@pytest.mark.parametrize("index", [0, 2])
def test_the_jobsets_command_makes_the_cluster_that_a_resolver_reads(index, tmp_path):
    _, container = worker_of(jobset())
    fake(tmp_path, "python", 'echo "$TF_CONFIG"; echo "$*"')
    env = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "NAME": "deep",
        "WORKERS": "3",
        "JOB_COMPLETION_INDEX": str(index),
    }
    done = subprocess.run(container["command"], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    config, command = done.stdout.splitlines()
    assert json.loads(config) == {
        "cluster": {"worker": [f"deep-workers-0-{k}.deep:4000" for k in range(3)]},
        "task": {"type": "worker", "index": index},
    }
    assert command == "train.py --epochs 10"


def test_the_ray_script_compiles_and_imports_ray_alone():
    tree = ast.parse((RECIPES / "on_ray.py").read_text(encoding="utf-8"))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} - sys.stdlib_module_names == {"ray"}


@needs_bash
@pytest.mark.parametrize("rank", [0, 1])
def test_skypilot_starts_one_launcher_on_each_machine_with_the_first_as_coordinator(rank, tmp_path):
    spec = yaml.safe_load((RECIPES / "skypilot.yaml").read_text(encoding="utf-8"))
    fake(tmp_path, "replicax", 'echo "$*"')
    env = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SKYPILOT_NUM_NODES": str(spec["num_nodes"]),
        "SKYPILOT_NODE_RANK": str(rank),
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "SKYPILOT_TASK_ID": "sky-1",
    }
    done = subprocess.run([BASH, "-c", spec["run"]], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    where = f"--workers 2 --worker-rank {rank} --coordinator 10.0.0.1:4000 --job-id sky-1"
    assert done.stdout.strip() == f"launch {where} train.py --checkpoints /checkpoints"
    from replicax._launch._cli import parser

    known = parser("replicax launch").parse_args(done.stdout.split()[1:])
    assert (known.workers, known.first, known.coordinator) == (2, rank, ("10.0.0.1", 4000))


def test_the_recipes_install_extras_that_there_are():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for name in ("Dockerfile", "skypilot.yaml"):
        (named,) = re.findall(r"replicax-\*\.whl\)\[(.*?)\]", (RECIPES / name).read_text(encoding="utf-8"))
        assert set(named.split(",")) <= set(extras), name


TRAIN = """
import jax.numpy as jnp, optax, sys
import replicax as rx

strategy = rx.MultiWorkerMirroredStrategy()
with strategy.scope():
    w = rx.Variable(jnp.zeros(()))
    optimizer = rx.Optimizer(optax.sgd(0.1), w)

@rx.function
def step():
    strategy.run(lambda: optimizer.apply_gradients(w - 3.0))

for _ in range(int(sys.argv[sys.argv.index("--steps") + 1])):
    step()
print(strategy.num_replicas_in_sync, "replicas")
"""


@needs_bash
@pytest.mark.thorough
def test_the_commands_of_the_ci_job_run_a_loop_on_virtual_devices_and_in_two_workers(tmp_path):
    steps = yaml.safe_load((RECIPES / "ci.yaml").read_text(encoding="utf-8"))["jobs"]["loop"]["steps"]
    (tmp_path / "train.py").write_text(TRAIN)
    ours = ("JAX_", "XLA_", "REPLICAX_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    commands = "set -e\n" + "\n".join(step["run"] for step in steps if "run" in step and step["name"] != "Install")
    done = subprocess.run([BASH, "-c", commands], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"(\d) replicas", done.stdout) == ["1", "4", "2", "2"]


def test_the_page_names_files_and_options_that_there_are():
    path = ROOT / "docs" / "how-to" / "launch.md"
    page = path.read_text(encoding="utf-8")
    for target in re.findall(r"\]\((\.\./[^)]+)\)", page):
        assert (path.parent / target.partition("#")[0]).is_file(), target
    from replicax._launch._cli import parser

    options = set(re.findall(r"--[a-z][a-z-]+", parser("replicax launch").format_help()))
    before_recipes = page[: page.index("## Slurm")]
    assert set(re.findall(r"`(--[a-z][a-z-]+)", before_recipes)) <= options
    for block in re.findall(r"^```py\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        ast.parse(block)
