"""`replicax export`: what it refuses, and what it asks for. tests/tf/test_tf_export.py converts models."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import replicax as rx
from replicax._base import environments
from replicax._export import command


def test_what_cannot_be_converted_is_named(tmp_path, monkeypatch, capsys):
    def error_of(*arguments):
        assert command.main([*map(str, arguments), "--to", "tensorflow"], "replicax export") == 1
        return capsys.readouterr().err

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("REPLICAX_TENSORFLOW_PYTHON", raising=False)
    monkeypatch.setattr(environments, "has_module", lambda python, module: False)
    model, out = tmp_path / "model", tmp_path / "out"
    rx.experimental.save_model(model, lambda scale, x: x * scale, np.float32(2), rx.TensorSpec([None], name="x"))
    told = error_of(model, out)
    assert f"replicax export: {sys.executable} has no TensorFlow. `replicax export --install tensorflow`" in told
    assert "--python or REPLICAX_TENSORFLOW_PYTHON" in told and not out.exists()
    monkeypatch.setenv("REPLICAX_TENSORFLOW_PYTHON", "/nowhere/python")
    assert "REPLICAX_TENSORFLOW_PYTHON names '/nowhere/python', which is not an executable" in error_of(model, out)
    monkeypatch.setenv("REPLICAX_TENSORFLOW_PYTHON", sys.executable)
    assert f"{model} exists already" in error_of(model, model)
    monkeypatch.setattr(environments, "has_module", lambda python, module: True)
    assert "ended with status 1:" in (told := error_of(model, out)) and "No module named 'tensorflow'" in told
    (tmp_path / "empty").mkdir()
    assert "SavedModel file does not exist at: " in error_of(tmp_path / "empty", out)
    (tmp_path / "empty" / "saved_model.pb").touch()
    assert "is a SavedModel of TensorFlow" in error_of(tmp_path / "empty", out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "model"]


def test_tensorflow_is_installed_apart(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("REPLICAX_TENSORFLOW_PYTHON", raising=False)
    commands = []

    def run(arguments, **_):
        commands.append(arguments)
        python = tmp_path / "replicax" / "export" / "tensorflow-2" / "bin" / "python"
        python.parent.mkdir(parents=True, exist_ok=True)
        python.touch(mode=0o755)
        return subprocess.CompletedProcess(arguments, 0)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(SystemExit) as ended:
        command.main(["--install", "tensorflow"], "replicax export")
    assert ended.value.code == 0
    assert [each[-1] for each in commands] == [
        str(tmp_path / "replicax/export/tensorflow-2"),
        "tensorflow-cpu>=2.21,<3",
    ]
    assert command.find_python() == commands[1][0]


def test_a_model_whose_arrays_have_equal_paths_is_refused(tmp_path):
    """One variable would stand for both."""
    model = {"a": {"b": np.ones(2)}, "a/b": np.zeros(2)}
    with pytest.raises(ValueError, match="two arrays have the path 'a/b'"):
        rx.experimental.save_model(tmp_path / "model", lambda model, x: x, model, rx.TensorSpec([2]))
    assert not (tmp_path / "model").exists()
