"""The command `replicax export`. Its options need no JAX; TensorFlow runs in another process alone."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from replicax._base import doc_pages, environments
from replicax._base.environments import Environment
from replicax._base.errors import CheckpointError
from replicax._export.errors import ExportError

_DESCRIPTION = """\
Convert a saved model, which tf.saved_model.save of replicax.tf, Keras's model.export or rx.experimental.save_model has
written, to a SavedModel of TensorFlow, for TensorFlow Serving and TensorFlow Lite. TensorFlow runs in a Python of its
own. See `replicax docs how-to/saved-models`.
"""

_EPILOG = """\
examples:
  replicax export --install tensorflow
  replicax export model served/model/1 --to tensorflow
  replicax export model served/model/1 --to tensorflow --python /opt/tensorflow/bin/python

TensorFlow runs in the Python of --python, in that of REPLICAX_TENSORFLOW_PYTHON, in the one that --install has set up,
or in this one, whichever comes first.
"""

VARIABLE = "REPLICAX_TENSORFLOW_PYTHON"
TENSORFLOW = Environment(
    folder="export/tensorflow-2",
    contents="TensorFlow",
    packages=("tensorflow-cpu>=2.21,<3",),
    space=1.7e9,
    module="tensorflow",
    variable=VARIABLE,
    purpose="`replicax export` uses it from now on.",
    limits="It exists for some systems and versions of Python only.",
    error=ExportError,
)
_SHOWN = 12  # lines of the output of a process that has failed


def parser(name: str) -> argparse.ArgumentParser:
    """Return the parser of the options."""
    result = argparse.ArgumentParser(
        name, description=_DESCRIPTION, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = result.add_argument
    add("model", metavar="PATH", type=Path, help="the folder of the saved model")
    add("out", metavar="OUT", type=Path, help="the folder to write, which must not exist")
    add("--to", choices=["tensorflow"], required=True, help="the format of the result")
    text = f"a Python that has TensorFlow (default: the one in {VARIABLE}, or the installed one)"
    add("--python", metavar="FILE", help=text)
    text = "install TensorFlow in an environment of its own, in the user's cache"
    add("--install", action=_Install, choices=["tensorflow"], help=text)
    return result


class _Install(argparse.Action):
    """Installs TensorFlow and ends the command, which needs no model for it."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        try:
            TENSORFLOW.install()
        except ExportError as error:
            parser.exit(1, f"{parser.prog}: {error}\n")
        parser.exit(0)


def main(arguments: Sequence[str], name: str) -> int:
    """Run the command, and return its exit status."""
    options = parser(name).parse_args(arguments)
    try:
        notes = convert(options.model, options.out, options.python)
    except (ExportError, CheckpointError, NotImplementedError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    for note in notes:
        print(f"note: {note}.")
    print(f"{options.out} is a SavedModel of TensorFlow.")
    return 0


def convert(model: Path, out: Path, python: str | None = None) -> list[str]:
    """Write a SavedModel of TensorFlow for a saved model, and return notes for the user.

    Args:
        model: the folder of the saved model.
        out: the folder to write.
        python: a Python that has TensorFlow; by default as `find_python` finds it.

    Raises:
        OSError: there is no saved model, or the disk is full.
        NotImplementedError: it is a SavedModel of TensorFlow already.
        CheckpointError: it is damaged.
        ExportError: `out` exists, there is no TensorFlow, or the model cannot be converted.
    """
    from replicax._export import request  # which imports JAX

    if os.path.lexists(out):
        raise ExportError(f"{out} exists already. Choose another path, or remove it first.")
    chosen = find_python(python)
    out.absolute().parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".replicax-export-", dir=out.absolute().parent) as folder:
        written = request.write(model, Path(folder))
        result = Path(folder, "model")
        notes = _run(chosen, written, result)
        result.rename(out)
    return notes


def find_python(python: str | None = None) -> str:
    """Return a Python that has TensorFlow: `python`, or the variable's, the installed one, or this one.

    Raises:
        ExportError: the first of them has no TensorFlow.
    """
    if named := python or os.environ.get(VARIABLE):
        chosen = TENSORFLOW.choose([named], "--python" if python else VARIABLE)
    else:
        chosen = TENSORFLOW.find_python() or sys.executable
    if environments.has_module(chosen, TENSORFLOW.module):
        return chosen
    raise ExportError(
        f"{chosen} has no TensorFlow. `replicax export --install tensorflow` installs it in an environment of its own, "
        f"{TENSORFLOW.path}. Or give a Python that has it by --python or {VARIABLE}. "
        f"See {doc_pages.page('how-to/saved-models#tensorflow-serving')}."
    )


def _run(python: str, request: Path, out: Path) -> list[str]:
    """Run the conversion, and return its notes."""
    ours = {"PYTHONPATH", "XLA_FLAGS"}
    variables = {key: value for key, value in os.environ.items() if key not in ours}
    variables |= {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1"}  # programs are tried on the CPU
    command = [python, str(Path(__file__).with_name("to_tensorflow.py")), str(request), str(out)]
    ended = subprocess.run(
        command, env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    result = request.with_suffix(".result")
    if not result.exists():
        said = "".join(f"\n  {line}" for line in (ended.stdout + ended.stderr).strip().splitlines()[-_SHOWN:])
        raise ExportError(f"The conversion by {python} ended with status {ended.returncode}:{said}")
    report = json.loads(result.read_text(encoding="utf-8"))
    if "error" in report:
        raise ExportError(report["error"])
    notes: list[str] = report["notes"]
    return notes
