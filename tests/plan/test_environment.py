"""The environment of the compiler for TPUs, which `replicax plan --install` makes."""

import importlib.metadata
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from replicax._base.planning import PlanError
from replicax._plan import apart, command, environment
from replicax._plan.chips import parse

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


def test_the_command_installs_the_compiler_where_plans_find_it(commands, tmp_path, monkeypatch, capsys):
    with pytest.raises(PlanError, match="replicax plan --install"):
        apart.python_for(parse("v5e:2x4"))
    with pytest.raises(SystemExit) as ended:
        command.main(["--install"], "replicax plan")
    assert ended.value.code == 0
    folder = tmp_path / "replicax" / "plan" / f"jax-{JAX}"
    python = str(folder / "bin" / "python")
    assert commands[0] == [sys.executable, "-m", "venv", "--clear", str(folder)]
    assert commands[1][0] == python and commands[1][-2:] == [f"jax[tpu]=={JAX}", "flatbuffers"]
    assert f"jax[tpu]=={JAX}" in capsys.readouterr().out
    assert apart.python_for(parse("v5e:2x4")) == python
    assert apart.python_for(parse(4)) == sys.executable
    monkeypatch.setenv("REPLICAX_PLAN_PYTHON", sys.executable)
    assert apart.python_for(parse("v5e:2x4")) == sys.executable


@pytest.mark.parametrize("failing", ["venv", "pip"])
def test_what_is_not_installed_whole_is_not_used(commands, capsys, failing):
    environment.install()
    assert environment.installed() is not None
    commands.failing = (failing,)
    with pytest.raises(SystemExit) as ended:
        command.main(["--install"], "replicax plan")
    assert ended.value.code == 1 and "has not been installed" in capsys.readouterr().err
    assert environment.installed() is None


def test_processes_that_install_at_once_take_turns(commands, monkeypatch):
    entered, go_on, run = threading.Event(), threading.Event(), commands.run

    def slow(command, **options):
        entered.set()
        assert go_on.wait(60)
        return run(command, **options)

    monkeypatch.setattr(subprocess, "run", slow)
    first, second = (threading.Thread(target=environment.install) for _ in range(2))
    first.start()
    assert entered.wait(60)
    second.start()
    second.join(0.2)
    assert second.is_alive() and environment.installed() is None
    go_on.set()
    for each in (first, second):
        each.join(60)
    assert len(commands) == 2 and environment.installed() is not None  # the second one found it installed
    environment.install()
    assert len(commands) == 4  # which makes it anew
