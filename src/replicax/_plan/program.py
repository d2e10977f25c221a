"""Runs a program up to its training step, and plans the step. `replicax plan` starts this module:

    python -m replicax._plan.program OPTIONS PROGRAM ARGUMENTS...

The process has as many virtual devices as the first topology, and its variables have no values. The first call of a
compiled function that assigns variables, or of the one that `--step` names, is the step. Compiled functions that are
called before it return zeros.
"""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import sys

from replicax._base import planning
from replicax._plan import compiler
from replicax._plan.options import Options


def run(options: Options, program: str, arguments: list[str]) -> None:
    """Run the program up to its step; raise `SystemExit` with an error if it ends without one."""
    _check_program(options, program)
    planning.takes_all_devices = True
    sys.argv = [program, *arguments]
    from replicax._base import jax_internals
    from replicax._plan import interception  # and JAX, which has its devices now

    try:
        planner = interception.Planner(options)
        with planning.abstract_variables(), planner.in_calls(), jax_internals.assume_cudnn():
            if options.module:
                sys.path.insert(0, os.getcwd())
                runpy.run_module(program, run_name="__main__", alter_sys=True)
            else:
                sys.path.insert(0, os.path.dirname(os.path.abspath(program)))
                runpy.run_path(program, run_name="__main__")
    except planning.PlanError as error:
        sys.exit(f"replicax plan: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    except SystemExit as ended:
        if ended.code and not planner.is_planned:
            raise
        # Otherwise the program has ended as without `sys.exit`.
    except Exception as error:
        if not planner.is_planned:
            error.add_note(
                "`replicax plan` runs a program up to its step without values: variables have only shapes, and "
                "compiled functions return zeros. Code that needs values fails, and so does a step that is not "
                "compiled."
            )
            raise
    if not planner.is_planned:
        sys.exit(f"replicax plan: {planner.advice()}")


def _check_program(options: Options, program: str) -> None:
    """Raises `SystemExit` if there is no such file or module."""
    if not options.module and not os.path.exists(program):
        sys.exit(f"replicax plan: There is no file {program} in {os.getcwd()}. For a module write -m {program}.")
    package = program.partition(".")[0]  # alone: to look further would run it
    if options.module and importlib.util.find_spec(package) is None:
        sys.exit(f"replicax plan: There is no module {program}: no {package!r} in {os.getcwd()} or in this Python.")


if __name__ == "__main__":
    compiler.die_with_parent()
    run(Options(**json.loads(sys.argv[1])), sys.argv[2], sys.argv[3:])
