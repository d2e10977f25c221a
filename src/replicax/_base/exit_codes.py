"""The exit statuses of replicax's commands and of programs: one list, for the reference page."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ExitCode:
    """An exit status.

    Attributes:
        command: the command that ends with it, or "a program" for a user's program that uses replicax.
        status: the number, or how it is made, such as "128 + N".
        meaning: what it says.
    """

    command: str
    status: str
    meaning: str


_PROGRAM, _LAUNCH = "a program", "replicax launch"

EXIT_CODES = (
    ExitCode(_PROGRAM, "42", "the program was preempted and has saved its state: start it again"),
    ExitCode(_PROGRAM, "143", "the same, on Google Cloud"),
    ExitCode(_PROGRAM, "70", "another process of the job has failed, and this one has ended because of it"),
    ExitCode(_PROGRAM, "1", "an asynchronous save failed at the end, where no call of the program raises its error"),
    ExitCode("replicax", "0", "help or the version was shown"),
    ExitCode("replicax", "2", "there is no such command"),
    ExitCode(_LAUNCH, "0", "every worker ended with 0"),
    ExitCode(_LAUNCH, "N", "a worker failed first, with exit status N; with --ps, the status of the chief"),
    ExitCode(_LAUNCH, "128 + N", "signal N killed the worker that failed first, or ended the launcher"),
    ExitCode(_LAUNCH, "1", "a worker ended with 0 before it joined the job, while others waited for it"),
    ExitCode(_LAUNCH, "2", "an option is wrong, nothing could be started, or worker 0's launcher was lost"),
    ExitCode(_LAUNCH, "42, 143", "workers were preempted and have saved their state, and no restart is left"),
    ExitCode(_LAUNCH, "127", "the program could not be started on this machine"),
    ExitCode("replicax plan", "0", "the plan was made"),
    ExitCode("replicax plan", "1", "no plan could be made; the message says why"),
    ExitCode("replicax plan", "2", "an option is wrong"),
    ExitCode("replicax plan", "130", "it was interrupted (Ctrl-C)"),
    ExitCode("replicax export", "0", "the model was converted, or TensorFlow installed"),
    ExitCode("replicax export", "1", "the model could not be converted; the message says why"),
    ExitCode("replicax export", "2", "an option is wrong"),
    ExitCode("replicax info", "0", "no problem was found"),
    ExitCode("replicax info", "1", "a problem was found; the output lists it, with what to do"),
    ExitCode("replicax info", "2", "an option is wrong"),
    ExitCode("replicax docs", "0", "the page, or a section with the words, was shown"),
    ExitCode("replicax docs", "1", "there is no such page or section, or no page has the words"),
    ExitCode("replicax docs", "2", "an option is wrong"),
    ExitCode("replicax completion", "0", "the script was printed"),
    ExitCode("replicax completion", "2", "an option is wrong, or there is no such shell"),
)
