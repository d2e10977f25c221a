"""The outcomes of the workers, and which of them failed first."""

from __future__ import annotations

import contextlib
import json
import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from replicax._base.errors import listed
from replicax._launch._environment import Task

# So many lines of its standard error are shown of a worker that ended without a report.
TAIL_LINES = 30
# And so many characters of each line, and of a traceback its last ones: they may go to other machines.
_LINE = 2000
_OF_THE_START = re.compile(r"replicax: (a job of \d+ processes|process +address|\w+ \d+  \S+:\d+  )")  # the table
_TRACEBACK = 100_000


@dataclass
class Outcome:
    """The end of a worker, or of another task."""

    worker: int  # its number, or that of another task
    host: str  # the address of its machine
    status: int | None  # negative for the signal that killed it; None if nobody knows any more
    when: float  # seconds since the epoch
    ended: bool = False  # by the launcher
    report: dict[str, Any] | None = None  # of its failure, if it wrote one
    tail: list[str] = field(default_factory=list)  # the last lines of its standard error
    lost: str = ""  # why nobody knows how it ended
    address: str = ""  # in the cluster
    joins: list[str] = field(default_factory=list)  # the addresses of the job that it has begun to join
    joined: bool = False  # and all of that job were there
    preempted: bool = False  # it has ended, by itself, with an exit status that says that it has saved its state
    kind: str = "worker"  # of the task
    stopped: bool = False  # as by SIGSTOP, when the launcher ended it

    @property
    def name(self) -> str:
        """The name of the task."""
        return Task(self.kind, self.worker).name

    @property
    def failed(self) -> bool:
        """True if it failed by itself."""
        return self.report is not None or (self.status != 0 and not self.ended and not self.preempted)

    @property
    def failed_at(self) -> float:
        """When it failed: a report is written before the process has ended."""
        return self.report["time"] if self.report else self.when

    def to_message(self, now: float) -> dict[str, Any]:
        """Returns it for another machine, whose clock may differ: times become ages."""
        message = asdict(self) | {"when": now - self.when}
        if self.report:
            message["report"] = self.report | {"time": now - self.report["time"]}
        return message

    @classmethod
    def from_message(cls, message: dict[str, Any], now: float) -> Outcome:
        """Reverses `to_message`; ValueError for anything else."""
        try:
            outcome = cls(**message)
            outcome.when = now - float(outcome.when)
            if outcome.report is not None:
                outcome.report = _report(outcome.report)
                outcome.report["time"] = now - outcome.report["time"]
            texts = (outcome.kind, outcome.host, outcome.lost, outcome.address, *outcome.tail, *outcome.joins)
            numbers = (outcome.worker, 0 if outcome.status is None else outcome.status)
            for kind, values in (
                (list, (outcome.tail, outcome.joins)),
                (str, texts),
                (int, numbers),
                (bool, (outcome.ended, outcome.stopped, outcome.joined, outcome.preempted)),
            ):
                if {*map(type, values)} != {kind}:
                    raise TypeError(f"{values} are not all of type {kind.__name__}")
        except _NOT_SO as error:
            raise ValueError("no outcome of a worker") from error
        return outcome


_NOT_SO = (ValueError, KeyError, TypeError, AttributeError, OverflowError)


def _report(fields: Any) -> dict[str, Any]:
    """Returns a worker's report with fields of the right types; raises one of `_NOT_SO` if it is none."""
    caused_by, step = fields.get("caused_by"), fields.get("step")
    return {
        "time": float(fields["time"]),
        "kind": str(fields["kind"]),
        "message": str(fields["message"])[:_LINE],
        "traceback": str(fields.get("traceback") or "")[-_TRACEBACK:],
        "step": None if step is None else int(step),
        "call": None if fields.get("call") is None else str(fields["call"])[:_LINE],
        "caused_by": None if caused_by is None else int(caused_by),
    }


def read_report(folder: Path, worker: int) -> dict[str, Any] | None:
    """Returns the report of a worker that failed, if it wrote one that can be read."""
    try:
        return _report(json.loads((folder / f"{worker}.json").read_text(encoding="utf-8", errors="replace")))
    except (OSError, *_NOT_SO):
        return None


def read_mark(folder: Path, worker: int) -> tuple[list[str], bool]:
    """Returns the addresses of the job that a worker has begun to join, and whether all of that job were there."""
    for name in ("joined", "waits"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            text = (folder / f"{worker}.{name}").read_text(encoding="utf-8", errors="replace")
            return [str(address) for address in json.loads(text)], name == "joined"
    return [], False


def readable(lines: Iterable[bytes]) -> list[str]:
    """Decodes lines of output, and cuts the long ones."""
    return [line[:_LINE].decode(errors="replace") for line in lines]


def signal_name(number: int) -> str:
    """Returns the name of a signal, such as `"SIGKILL"`."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def describe(outcome: Outcome) -> str:
    """Describes how a worker ended, in a few words."""
    status = outcome.status
    if status is None:
        return outcome.lost or "its launcher was lost"
    if status == 0:
        return "ended with exit status 0"
    how = f"killed by {signal_name(-status)}" if status < 0 else f"exit status {status}"
    if outcome.stopped:
        return f"was stopped, as by SIGSTOP or a debugger, until the launcher ended it ({how})"
    return f"ended by the launcher ({how})" if outcome.ended else how


def exit_status(status: int) -> int:
    """Returns the status that a shell gives: 128 and the signal's number for a process that a signal killed."""
    return 128 - status if status < 0 else status


def job_outcome(outcomes: Sequence[Outcome]) -> tuple[int, str]:
    """Returns the launcher's exit status, and which worker failed first, and why; 0 and no text if all went well.

    Where none failed and some were preempted, it is the status of the first of these, and who they are.
    """
    failures = sorted((outcome for outcome in outcomes if outcome.failed), key=lambda outcome: outcome.failed_at)
    first = min([*_absent(outcomes), *failures], key=lambda outcome: outcome.failed_at, default=None)
    if first is None:
        return _preempted(outcomes)
    cause = _follow(first, {outcome.worker: outcome for outcome in outcomes})
    statuses = [outcome.status for outcome in (cause, first, *failures) if outcome.status and not outcome.ended]
    text = tell(cause, first, outcomes)
    if (cause.status is None or (cause.report or {}).get("kind") == "lost") and (host := _cut_off(outcomes)):
        text = f"{host} has lost contact with all other machines: its network is cut, or theirs."
        text = "\n".join([text, *_others(None, outcomes, "")])
    return exit_status(statuses[0]) if statuses else 1, text


def _cut_off(outcomes: Sequence[Outcome]) -> str | None:
    """Return the only machine of three or more whose workers' ends are known; None if there are others."""
    lost = {outcome.host for outcome in outcomes if outcome.status is None}
    known = {outcome.host for outcome in outcomes} - lost
    return known.pop() if len(known) == 1 and len(lost) > 1 else None


def was_preempted(outcomes: Sequence[Outcome]) -> bool:
    """Returns whether the job has ended because of a preemption: workers have saved its state, and none failed."""
    return any(o.preempted for o in outcomes) and not any(o.failed for o in outcomes)


def _preempted(outcomes: Sequence[Outcome]) -> tuple[int, str]:
    workers = [outcome for outcome in outcomes if outcome.preempted]
    if not workers:
        return 0, ""
    status = workers[0].status or 0
    names = listed([outcome.name for outcome in workers])
    return status, f"preempted: {names} ended with exit status {status}."


def _absent(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Returns the workers that ended with 0 and never began to join the job in which others waited for them."""
    awaited = {address for outcome in outcomes if not outcome.joined for address in outcome.joins}
    return [o for o in outcomes if o.status == 0 and not o.ended and not o.joins and o.address in awaited]


def _follow(witness: Outcome, by_worker: dict[int, Outcome]) -> Outcome:
    """Returns the worker whom the first report names as the cause, or whom that one's report names, and so on."""
    cause, seen = witness, set()
    while cause.worker not in seen and cause.report and cause.report["caused_by"] in by_worker:
        seen.add(cause.worker)
        cause = by_worker[cause.report["caused_by"]]
    return cause


def tell(cause: Outcome, witness: Outcome, outcomes: Sequence[Outcome]) -> str:
    """Describes the cause, as the report of the first failure (of the witness) shows it, and how the others ended."""
    where = f" on {cause.host}" if len({outcome.host for outcome in outcomes}) > 1 else ""
    report = cause.report
    said = ""
    how = f"failed first{_step(report)}" if cause is witness or report else "is the cause"
    if report and report["caused_by"] not in (None, *(outcome.worker for outcome in outcomes)):
        how = f"ended because of worker {report['caused_by']}{_step(report)}"  # of another machine
    if _is_of_all(cause, outcomes):
        how = f"ended as all did, and no single worker is the cause{_step(report)}"
    lines = [f"{cause.name}{where} {how}: {_describe_cause(cause, witness)}"]
    if cause.status == 0 and cause is witness and not report:
        waited = listed([o.name for o in outcomes if cause.address in o.joins and not o.joined])
        lines[0] += f" before it joined the job, that is, before it made its strategy; {waited} waited for it"
    if cause.status == -signal.SIGKILL and not cause.ended:
        lines[0] += " (the kernel does so when memory runs out)"
    if report:
        text = report["traceback"].rstrip()
        if report["message"].strip() not in text:
            lines.append(f"  {report['message']}")
        lines += _indent(text.splitlines())
    else:
        if witness is not cause and witness.report:
            said = witness.report["message"]
            lines.append(f"  {witness.name} says: {said}")
        if tail := [line for line in cause.tail if not _OF_THE_START.match(line)]:
            lines.append("  The last lines of its standard error:")
            starts = (n for n, line in enumerate(tail) if line.startswith("Traceback (most recent call last)"))
            # From the first one on: exceptions that led to one another are printed one after the other.
            lines += _indent(tail[next(starts, 0) :])
    lines += _others(cause, outcomes, said)
    return "\n".join(lines)


def _is_of_all(cause: Outcome, outcomes: Sequence[Outcome]) -> bool:
    """Return whether the workers report that the job as a whole went wrong, and blame none of them."""
    reports = [outcome.report for outcome in outcomes if outcome.report]
    if cause.report is None or len(reports) < 2:
        return False
    return all(report["caused_by"] is None and report["kind"] in ("stuck", "diverged") for report in reports)


def _describe_cause(cause: Outcome, witness: Outcome) -> str:
    """Describe how the cause ended. A signal of the launcher is no cause: say what the worker did until it came."""
    if not cause.ended or cause.stopped or cause.report or witness.report is None:
        return describe(cause)
    did = "stopped responding" if witness.report["kind"] == "lost" else "still ran"
    return f"{did}, until it was {describe(cause)}"


def _step(report: dict[str, Any] | None) -> str:
    if report is None or report["step"] is None:
        return ""
    step, call = report["step"], report.get("call")
    return f", at step {step}" if call is None else f', after {step} call{"s" if step != 1 else ""} of "{call}"'


def _others(cause: Outcome | None, outcomes: Sequence[Outcome], said: str) -> list[str]:
    """Returns a line for each way in which other workers ended, without what has been said before."""
    groups: dict[str, list[str]] = {}
    for outcome in outcomes:
        if outcome is not cause:
            message = outcome.report["message"] if outcome.report else ""
            what = describe(outcome) + (f", {message}" if message not in ("", said) else "")
            groups.setdefault(what, []).append(outcome.name)
    return [f"  {listed(names)}: {what}" for what, names in groups.items()]


def _indent(lines: Sequence[str]) -> list[str]:
    return [f"    {line}".rstrip() for line in lines]
