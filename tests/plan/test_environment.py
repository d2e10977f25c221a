"""The environments of the compilers for GPUs and TPUs, which `replicax plan --install` makes."""

import importlib.metadata
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from replicax._base.planning import PlanError
from replicax._plan import apart, command, environment
from replicax._plan.chips import parse

GPU, TPU = map(environment.compiler, environment.KINDS)
JAX = importlib.metadata.version("jax")


@pytest.fixture
def commands(monkeypatch, tmp_path):
    """The commands that are run, which make an empty environment; those that have a word of `failing` fail."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("REPLICAX_PLAN_PYTHON", raising=False)

    class Commands(list):
        failing = ()

        def run(self, command, **_):
            self.append(command)
            if command[1:3] == ["-m", "venv"]:
                python = Path(command[-1], "bin", "python")
                python.parent.mkdir(parents=True, exist_ok=True)
                python.write_text("#!/bin/sh\n")
                python.chmod(0o755)
            return subprocess.CompletedProcess(command, int(any(word in command for word in self.failing)))

    found = Commands()
    monkeypatch.setattr(subprocess, "run", found.run)
    return found


@pytest.mark.parametrize(("kind", "topology"), [("gpu", "h100:8"), ("tpu", "v5e:2x4")])
def test_the_command_installs_the_compiler_where_plans_find_it(commands, tmp_path, monkeypatch, capsys, kind, topology):
    with pytest.raises(PlanError, match=f"replicax plan --install {kind}"):
        apart.python_for(parse(topology))
    with pytest.raises(SystemExit) as ended:
        command.main(["--install", kind], "replicax plan")
    assert ended.value.code == 0
    folder = tmp_path / "replicax" / "plan" / f"jax-{JAX}-{kind}"
    python = str(folder / "bin" / "python")
    assert commands[0] == [sys.executable, "-m", "venv", "--clear", str(folder)]
    assert all(each[0] == python for each in commands[1:])
    if kind == "tpu":
        assert [each[-2:] for each in commands[1:]] == [[f"jax[tpu]=={JAX}", "flatbuffers"]]
    else:  # without CUDA's libraries
        plugin = [f"jax-cuda12-plugin=={JAX}", f"jax-cuda12-pjrt=={JAX}", "nvidia-cuda-nvcc-cu12"]
        assert commands[1][-2:] == [f"jax=={JAX}", "flatbuffers"]
        assert commands[2][-4:] == ["--no-deps", *plugin] and len(commands) == 3
    assert f"{kind.upper()}s are compiled there from now on" in capsys.readouterr().out
    assert apart.python_for(parse(topology)) == python
    assert apart.python_for(parse(4)) == sys.executable
    monkeypatch.setenv("REPLICAX_PLAN_PYTHON", sys.executable)
    assert apart.python_for(parse(topology)) == sys.executable


def test_of_several_pythons_the_one_with_the_compiler_is_used(tmp_path, monkeypatch):
    pythons = {}
    for name in ("jax_cuda12_plugin", "libtpu"):
        (tmp_path / name / f"{name}.py").parent.mkdir()
        (tmp_path / name / f"{name}.py").touch()
        pythons[name] = tmp_path / f"python-{name}"
        pythons[name].write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path / name} exec {sys.executable} "$@"\n')
        pythons[name].chmod(0o755)
    monkeypatch.setenv("REPLICAX_PLAN_PYTHON", f"{pythons['jax_cuda12_plugin']}:{pythons['libtpu']}")
    assert apart.python_for(parse("v5e:2x4")) == str(pythons["libtpu"])
    assert apart.python_for(parse("h100:8")) == str(pythons["jax_cuda12_plugin"])
    monkeypatch.setenv("REPLICAX_PLAN_PYTHON", f"{pythons['libtpu']}:/nowhere/python")
    with pytest.raises(PlanError, match="names '/nowhere/python', which is not an executable file"):
        apart.python_for(parse("h100:8"))


def test_a_full_disk_is_reported_before_anything_is_installed(commands, monkeypatch, capsys):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=100 * 2**20))
    with pytest.raises(SystemExit) as ended:
        command.main(["--install", "gpu"], "replicax plan")
    assert ended.value.code == 1 and not commands
    assert "takes 1.21 GiB, and the disk of" in (said := capsys.readouterr().err) and "has 100.00 MiB left" in said


@pytest.mark.parametrize("failing", ["venv", "pip"])
def test_what_is_not_installed_whole_is_not_used(commands, capsys, failing):
    GPU.install()
    assert GPU.find_python() is not None and TPU.find_python() is None
    commands.failing = (failing,)
    with pytest.raises(SystemExit) as ended:
        command.main(["--install", "gpu"], "replicax plan")
    assert ended.value.code == 1 and "has not been installed" in capsys.readouterr().err
    assert GPU.find_python() is None


def test_processes_that_install_at_once_take_turns(commands, monkeypatch):
    entered, go_on, run = threading.Event(), threading.Event(), commands.run

    def slow(command, **options):
        entered.set()
        assert go_on.wait(60)
        return run(command, **options)

    monkeypatch.setattr(subprocess, "run", slow)
    first, second = (threading.Thread(target=TPU.install) for _ in range(2))
    first.start()
    assert entered.wait(60)
    second.start()
    second.join(0.2)
    assert second.is_alive() and TPU.find_python() is None
    go_on.set()
    for each in (first, second):
        each.join(60)
    assert len(commands) == 2 and TPU.find_python() is not None  # the second one found it installed
    TPU.install()
    assert len(commands) == 4  # which makes it anew
