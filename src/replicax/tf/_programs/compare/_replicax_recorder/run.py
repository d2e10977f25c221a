"""Run a program under the recorder: `python run.py [-m] PROGRAM ARGUMENTS...`, with the options in REPLICAX_COMPARE."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import runpy
import sys
import traceback
from typing import Any

import numpy as np


def main(arguments: list[str]) -> int:
    """Run the program up to its last recorded step, and return its exit status."""
    options = json.loads(os.environ.pop("REPLICAX_COMPARE"))
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[0] = os.path.dirname(here)  # of this file before
    hooks: Any = importlib.import_module(f"{os.path.basename(here)}.hooks")
    is_module = arguments[0] == "-m"
    program, *program_arguments = arguments[is_module:]
    sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.abspath(program))
    sys.argv = [program, *program_arguments]
    random.seed(0)
    np.random.seed(0)
    recorder = hooks.install(program_folder=sys.path[0], **options)
    try:
        if is_module:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(program, run_name="__main__")
        recorder.finish()
    except hooks.EnoughSteps:
        pass
    except SystemExit as ended:
        with contextlib.suppress(hooks.EnoughSteps):
            recorder.finish()
        if ended.code is not None and not isinstance(ended.code, int):
            print(ended.code, file=sys.stderr)
            return 1
        return ended.code or 0
    except BaseException as error:
        traceback.print_exception(error.with_traceback(_without_runner(error.__traceback__)))
        return 1
    return 0


def _without_runner(trace: Any) -> Any:
    """Return the part of a traceback that begins in the program."""
    ours = (__file__, runpy.__file__, "<frozen runpy>")
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
