"""What this process of a job knows of itself, and tells the others."""

from __future__ import annotations

from typing import Any

from replicax._job import process_exit
from replicax._job.call_log import CallLog
from replicax._job.diagnosis import Peer

_LATEST = 64  # calls that are told where processes differ


class OwnState:
    """The state of this process.

    Args:
        process_id: the number of this process.
        peer: the record of this process.
        calls: the calls that it makes.
    """

    def __init__(self, process_id: int, peer: Peer, calls: CallLog):
        self.process_id, self.peer, self.calls = process_id, peer, calls
        self.step_timeout: float | None = None
        self.differs = False  # some process has made other calls than another one

    def update(self, now: float) -> None:
        """Record the calls that are made and the one that is not done."""
        peer, oldest = self.peer, self.calls.oldest()
        peer.heard, (peer.count, peer.digest, _) = now, self.calls.last
        peer.compiling = oldest is not None and oldest.compiling  # looked at before its age, which ends with it
        peer.oldest = (oldest.number, oldest.label, self.calls.age(oldest)) if oldest is not None else None
        peer.waits, peer.order = self.calls.waits, oldest.order if oldest is not None else 0

    def see_end(self, is_decided: bool) -> BaseException | None:
        """Record whether the main program has ended while its threads keep the process alive and make no calls.

        Args:
            is_decided: True if the process ends already.

        Returns:
            The exception with which the main program has ended.
        """
        peer = self.peer
        threads = process_exit.lasting_threads() if not peer.left and process_exit.main_has_ended() else []
        peer.ended = ", ".join(repr(thread.name) for thread in threads)
        if not peer.ended or is_decided or any(thread.ident in self.calls.threads for thread in threads):
            peer.ended = ""
        elif (error := process_exit.uncaught()) is not None:
            return error
        else:
            peer.stack = process_exit.lasting_stacks()
        return None

    def late(self) -> float | None:
        """Return the deadline that the oldest call has missed; None if it has not."""
        oldest, timeout = None if self.peer.compiling else self.peer.oldest, self.step_timeout
        return timeout if timeout is not None and oldest is not None and oldest[2] > timeout else None

    def record(self) -> dict[str, Any]:
        """Return what the others are told about once a second."""
        peer = self.peer
        return {
            "count": peer.count, "digest": peer.digest, "waits": peer.waits, "differs": self.differs,
            "oldest": peer.oldest, "compiling": peer.compiling, "order": peer.order, "late": self.late(),
            "ended": peer.ended, "stack": peer.stack if peer.ended else "",
        }  # fmt: skip

    def record_details(self) -> dict[str, Any]:
        """Record the main thread's stack and the latest calls; return them with `record`."""
        self.peer.stack = process_exit.main_stack()
        self.peer.made = dict(list(self.calls.made().items())[-_LATEST:])
        self.peer.detailed = True
        return {**self.record(), "stack": self.peer.stack, "made": list(self.peer.made.values())}

    def write_report(self, kind: str, message: str, text: str, caused_by: int | None = None) -> None:
        """Leave a report of this process; see `process_exit.write_report`."""
        step = self.calls.step()
        process_exit.write_report(self.process_id, self.peer.name, kind, message, text, step, caused_by)
