"""The workers of this machine: started together, watched, and ended together."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import math
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import IO

from replicax._job.channel import Message
from replicax._launch import _guard
from replicax._launch._environment import Task
from replicax._launch._outcome import TAIL_LINES, Outcome, read_mark, read_report, readable
from replicax._launch._output import Lines, Screen

# Seconds that the others have, once a worker has failed, to say what they know of it before they are ended.
SETTLE = 2.0
# Seconds after which a worker that has written a report, and not ended, is taken for failed.
_REPORTED_AND_ALIVE = 5.0
# Seconds that the others have to end once a worker was preempted: the state is saved, and they leave in their own way.
_LEAVE = 30.0
# Seconds between two looks for reports and marks.
_LOOK = 0.5
# The first colour of a kind of task other than workers.
_COLOUR_OF = {"chief": 9, "ps": 5, "evaluator": 4}


class Worker:
    """The process of a worker or of another task, with the guard that runs it.

    Args:
        task: which one it is.
        command: runs its program.
        environment: its variables.
        screen: for its output.
        width: the number of characters of the longest task's name.
        address: its own in the cluster; empty for one that is no part of it.
    """

    def __init__(
        self,
        task: Task,
        command: Sequence[str],
        environment: Mapping[str, str],
        screen: Screen,
        width: int,
        address: str,
    ):
        self.task, self.number = task, task.number
        self.address = address
        self._screen = screen
        self._ended = False
        self.asked_to_end: float | None = None  # when
        self.was_stopped = False  # as by SIGSTOP, when it was first asked to end; known once it has ended
        self.tail: deque[bytes] = deque(maxlen=TAIL_LINES)
        shown = task.name, task.number + _COLOUR_OF.get(task.kind, 0), width
        self._lines = [Lines(screen.writer(*shown, 1)), Lines(screen.writer(*shown, 2, self.tail))]
        self._control, theirs = socket.socketpair()
        guard = [sys.executable, "-I", "-S", _guard.__file__, str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                [*guard, *command],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def signal(self, number: int) -> None:
        """Sends it a signal; SIGKILL also to everything below it."""
        self.asked_to_end = self.asked_to_end or time.time()
        # A stopped process acts on no signal but these two, and a stopped guard passes none on.
        with contextlib.suppress(OSError):
            self._control.send(bytes([number] if number == signal.SIGKILL else [number, signal.SIGCONT]))
        self._process.send_signal(signal.SIGCONT)

    async def wait(self) -> tuple[int | None, float, float | None]:
        """Passes its output on until it has ended; returns its exit status, when that was, and when it was asked to."""
        streams = (self._process.stdout, self._process.stderr)
        pumps = [asyncio.create_task(self._pump(stream, lines)) for stream, lines in zip(streams, self._lines)]
        reader, writer = await asyncio.open_unix_connection(sock=self._control)
        try:
            words = (await reader.readline()).split()
            asked, self._ended = self.asked_to_end, True
            # Everything below the guard has ended: nobody but a process that nobody found can hold the pipes.
            await asyncio.wait(pumps, timeout=2.0)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            for lines in self._lines:
                lines.close()
            writer.close()
            self._process.wait()
        if words:
            self.was_stopped = words[2] == b"1"
            return int(words[0]), float(words[1]), asked
        return self._process.returncode, time.time(), asked  # the guard itself was killed, and the worker with it

    async def _pump(self, stream: IO[bytes] | None, lines: Lines) -> None:
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), stream)
        try:
            while data := await reader.read(1 << 16):
                lines.feed(data)
                while self._screen.behind and not self._ended:  # the worker waits in its own `print` then
                    await asyncio.sleep(0.01)
        finally:
            transport.close()


class LocalProcesses(abc.ABC):
    """The processes of a job on this machine, from their start to the end of all."""

    settle: float  # seconds that the others have, once one has failed, before they are asked to end
    _running: Collection[asyncio.Task[Outcome]]

    async def wait(self) -> list[Outcome]:
        """Waits for all of them, and returns how they ended, in order."""
        return list(await asyncio.gather(*self._running))

    async def end(self, number: int, *, settle: float, grace: float) -> None:
        """Ends those that still run: they have `settle` seconds, get the signal, and `grace` seconds later SIGKILL."""
        await self._all_ended(settle)
        for patience, kind in ((grace, number), (None, signal.SIGKILL)):
            for worker in self._alive():
                worker.signal(kind)
            await self._all_ended(patience)

    @abc.abstractmethod
    def _alive(self) -> list[Worker]:
        """Returns those that run."""

    async def _all_ended(self, timeout: float | None) -> None:
        if alive := [task for task in self._running if not task.done()]:
            await asyncio.wait(alive, timeout=timeout)


class LocalWorkers(LocalProcesses):
    """The workers of a job in which all compute together: the failure of one ends all.

    Args:
        workers: they have been started.
        host: the address of this machine.
        folder: for the workers' reports.
        tell: sends the leader what is known of the workers before all have ended.
        preempt_codes: exit statuses of workers that were preempted.
    """

    settle = SETTLE

    def __init__(
        self,
        workers: Sequence[Worker],
        host: str,
        folder: Path,
        tell: Callable[[Message], None],
        preempt_codes: Collection[int] = (),
    ):
        self._host = host
        self._folder = folder
        self._tell = tell
        self._preempt_codes = preempt_codes
        self._failed = False
        self._leave_by = math.inf
        self._running: dict[asyncio.Task[Outcome], Worker] = {
            asyncio.create_task(self._attend(worker)): worker for worker in workers
        }

    async def wait(self) -> list[Outcome]:
        watch = asyncio.create_task(self._watch())
        try:
            return await super().wait()
        finally:
            watch.cancel()

    def _alive(self) -> list[Worker]:
        return [worker for task, worker in self._running.items() if not task.done()]

    async def _attend(self, worker: Worker) -> Outcome:
        status, when, asked = await worker.wait()
        report = read_report(self._folder, worker.number)
        if report and asked is not None and report["time"] >= asked:
            report = None  # it tells of the launcher's own signal
        ended = asked is not None
        joins, joined = read_mark(self._folder, worker.number)
        outcome = Outcome(
            worker.number, self._host, status, when, ended, report, readable(worker.tail),
            address=worker.address, joins=joins, joined=joined,
            preempted=status in self._preempt_codes and not ended and report is None, stopped=worker.was_stopped,
        )  # fmt: skip
        if outcome.failed:
            self._fail()
        elif not ended and not joins:
            self._stands(worker, "ended", [worker.address])
        if outcome.preempted:
            self._leave_by = min(self._leave_by, time.monotonic() + _LEAVE)
        return outcome

    def _fail(self) -> None:
        if not self._failed:
            self._failed = True
            self._tell({"op": "failed", "interrupt": None})

    def _stands(self, worker: Worker, how: str, addresses: list[str]) -> None:
        self._tell({"op": "stands", "worker": worker.number, "how": how, "addresses": addresses})

    async def _watch(self) -> None:
        """Tells which workers wait for their job, and looks for one that has reported its failure and does not end."""
        told: dict[int, bool] = {}
        reported: float | None = None  # when a report was first seen
        while True:
            for worker in self._alive():
                joins, joined = read_mark(self._folder, worker.number)
                if joins and told.get(worker.number) is not joined:
                    told[worker.number] = joined
                    self._stands(worker, "joined" if joined else "waits", joins)
            if reported is None and any(self._folder.glob("*.json")):  # the folder itself may have been deleted
                reported = time.monotonic()
            if reported is not None and time.monotonic() - reported > _REPORTED_AND_ALIVE:
                self._fail()
            if time.monotonic() > self._leave_by:
                self._fail()
            await asyncio.sleep(_LOOK)
