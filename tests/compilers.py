"""Whether XLA's compilers for TPUs and GPUs are there for the tests of plans."""

import functools
import os
import subprocess

import pytest

_MODULES = {"gpu": "jax_cuda12_plugin", "tpu": "libtpu"}


def needs_compiler(kind):
    """Return the mark of a test that compiles for "gpu" or "tpu", by a Python that `REPLICAX_PLAN_PYTHON` names."""
    reason = f"needs XLA's compiler for {kind.upper()}s: make plan installs it, and make check uses it"
    return pytest.mark.skipif(not _is_there(_MODULES[kind]), reason=reason)


@functools.cache
def _is_there(module):
    code = f"import importlib.util as u, sys; sys.exit(u.find_spec({module!r}) is None)"
    pythons = [each for each in os.environ.get("REPLICAX_PLAN_PYTHON", "").split(os.pathsep) if each]
    return any(subprocess.run([python, "-c", code], check=False).returncode == 0 for python in pythons)
