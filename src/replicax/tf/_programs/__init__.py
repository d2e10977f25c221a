"""The commands that run programs of TensorFlow, check them, and compare them with TensorFlow. They need no JAX.

The command `replicax` imports this package without `replicax.tf`.
"""

from replicax.tf._programs import environment
from replicax.tf._programs._core import Command, ExitCode, FrontEnd, Variable

_GROUP = "Programs of TensorFlow"
_INTERNAL = "Set by replicax for processes that it starts"

ADDED = FrontEnd(
    commands=(
        Command(
            "check-tf",
            _GROUP,
            "list what a program needs of TensorFlow, and what is missing",
            "replicax check-tf train.py",
            "replicax.tf._programs.check_tf",
        ),
        Command(
            "run-tf",
            _GROUP,
            "run a program written for TensorFlow, unchanged",
            "replicax run-tf train.py",
            "replicax.tf._programs.run_tf",
        ),
        Command(
            "compare",
            _GROUP,
            "run a program under TensorFlow and here, and compare its training steps",
            "replicax compare --tensorflow ~/tensorflow/bin/python train.py",
            "replicax.tf._programs.compare.command",
        ),
    ),
    option="--tf",
    help="serve TensorFlow's names by replicax.tf, as replicax run-tf does",
    environment=environment.environment,
    exit_codes=(
        ExitCode("replicax check-tf", "0", "every name that the code uses is there"),
        ExitCode("replicax check-tf", "1", "a name is missing, or a file cannot be read"),
        ExitCode("replicax check-tf", "2", "an option is wrong, or there is no such path"),
        ExitCode("replicax run-tf", "N", "the program's own exit status"),
        ExitCode("replicax run-tf", "2", "an option is wrong"),
        ExitCode("replicax compare", "0", "all steps agree"),
        ExitCode("replicax compare", "1", "a step differs, or one of the runs made fewer steps"),
        ExitCode("replicax compare", "2", "an option is wrong, or no Python with TensorFlow is named"),
        ExitCode("replicax compare", "3", "the program failed, took too long or made no training step"),
        ExitCode("replicax compare", "130", "it was interrupted (Ctrl-C)"),
    ),
    variables=(
        Variable(
            "REPLICAX_COMPARE",
            _INTERNAL,
            "JSON",
            "not set",
            "what the recorder of replicax compare is to do, which the command sets",
            is_for_users=False,
        ),
        Variable(
            "REPLICAX_TF_REPORT",
            _INTERNAL,
            "a file, or -",
            "not set",
            "where replicax run-tf --report writes its report",
            is_for_users=False,
        ),
    ),
)
