"""One launcher: joins the others, starts its workers, and follows what the leader decides."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path

from replicax._job.channel import HEARTBEAT, HEARTBEAT_SECONDS, Message, join_address, seconds_from_environment
from replicax._job.command_lines import JOB_ID
from replicax._launch import _guard
from replicax._launch._cluster_leader import ClusterLeader
from replicax._launch._connection import Connection, Listener, connect
from replicax._launch._environment import (
    LaunchError,
    Ports,
    Task,
    share_gpus,
    visible_gpus,
    worker_environment,
)
from replicax._launch._job_secret import Secret, job_secret
from replicax._launch._leader import Leader, LocalLink, offers
from replicax._launch._local_tasks import LocalTasks
from replicax._launch._local_workers import LocalProcesses, LocalWorkers, Worker
from replicax._launch._outcome import Outcome, exit_status, job_outcome, signal_name
from replicax._launch._output import Screen

# Seconds from the request to end to SIGKILL: after a failure, and when the launcher was asked to end, where a worker
# may want to save its state.
_GRACE_AFTER_FAILURE = 2.0
_GRACE_AFTER_SIGNAL = 30.0
TASK_RESTARTS = 3
_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


class Plan(argparse.Namespace):
    """The options of the command line, and the command that follows from them."""

    program: str
    arguments: list[str]  # the program's own
    module: bool  # the program is one
    command: tuple[str, ...]  # of each worker
    workers: int  # on all machines
    first: int  # the number of the first worker on this machine
    here: int  # workers on this machine
    coordinator: tuple[str, int] | None  # host and port of worker 0's launcher; None for a single machine
    job: str  # the name of the job
    host: str | None  # this machine's address; None for the one that the coordinator's machine reaches it by
    devices: int | None  # of each worker; None if nobody said
    max_restarts: int  # of all workers, after a failure
    ps: int  # parameter servers on all machines; with any, the first machine has a chief
    evaluator: bool  # whether the first machine has one
    max_task_restarts: int | None  # with parameter servers: of each task but the chief; None for the usual
    preempt_codes: frozenset[int]  # exit statuses of workers that have saved their state and want to be restarted
    start_timeout: float  # seconds for the launchers of all machines to come together
    grace: float | None  # seconds from the request to end to SIGKILL; None for the usual
    color: str  # "auto", "always" or "never"
    front_end: Callable[[Mapping[str, str]], dict[str, str]] | None  # makes the environment of its programs
    tuning: bool  # workers get the settings that make JAX safe and fast on CPU


class Launcher:
    """Starts the workers of this machine, until they are done or have failed for good."""

    def __init__(self, plan: Plan, screen: Screen):
        self._plan = plan
        self._screen = screen
        visible = visible_gpus(os.environ)
        self._gpus = share_gpus(visible, plan.here, plan.devices)
        self._secret = Secret("", {})
        if plan.ps:
            self._gpus = self._gpus or ([visible] if visible else None)  # no other task takes the only worker's
            self._secret = job_secret(plan.coordinator)
        self._local: LocalProcesses | None = None
        self._interrupts: list[int] = []
        self._loop: asyncio.AbstractEventLoop | None = None  # while it runs
        self._task: asyncio.Task[int] | None = None
        self._timeout = seconds_from_environment(HEARTBEAT, HEARTBEAT_SECONDS) or HEARTBEAT_SECONDS

    @property
    def interrupted(self) -> bool:
        """True once a signal has asked it to end."""
        return bool(self._interrupts)

    def run(self) -> int:
        """Runs everything, and returns the exit status."""
        # Where a shell has started something else and then become the launcher, that is its child.
        others = _guard.descendants(os.getpid())
        _guard.adopt_orphans()
        with self._signals():
            try:
                return asyncio.run(self._run())
            except asyncio.CancelledError:  # by a signal, before the workers were started or after they had ended
                number = self._interrupts[0]
                self._screen.say(f"interrupted by {signal_name(number)}.")
                return exit_status(-number)
            finally:
                _guard.end_descendants(spare=others)  # there are some if a guard was killed

    async def _run(self) -> int:
        self._inbox: asyncio.Queue[Message] = asyncio.Queue()
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        try:
            if self._interrupts:
                raise asyncio.CancelledError
            async with self._link() as (link, host):
                while (found := await self._attempt(link, host))["again"]:
                    pass
                status: int = found["status"]
                return status
        finally:
            self._loop = None

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Follows signals, but those that are ignored, such as SIGHUP under nohup."""

        def act(number: int) -> None:
            if self._local is not None:
                self._inbox.put_nowait({"op": "signal", "interrupt": number})
            elif self._task is not None:
                self._task.cancel()

        def handle(number: int, frame: object) -> None:
            self._interrupts.append(number)
            if self._interrupts.count(signal.SIGINT) > 1:
                # Even where output is blocked. The guards see that this process has gone, and end everything.
                os._exit(exit_status(-signal.SIGINT))
            if self._loop is not None:
                self._loop.call_soon_threadsafe(act, number)

        before = {number: signal.getsignal(number) for number in _SIGNALS}
        caught = [number for number in _SIGNALS if before[number] != signal.SIG_IGN]
        for number in caught:
            signal.signal(number, handle)
        try:
            yield
        finally:
            for number in caught:
                signal.signal(number, before[number])

    @contextlib.asynccontextmanager
    async def _link(self) -> AsyncIterator[tuple[LocalLink | Connection, str]]:
        """Yields the way to the leader, and the address of this machine."""
        plan = self._plan
        if plan.first > 0:
            assert plan.coordinator is not None
            connection = await connect(*plan.coordinator, plan.start_timeout, self._timeout, self._inbox)
            try:
                yield connection, plan.host or connection.host
            finally:
                await connection.close()
            return
        leader: Leader
        if plan.ps:
            leader = ClusterLeader(
                plan.workers,
                plan.max_restarts,
                plan.start_timeout,
                plan.ps,
                self._secret.digest,
                plan.evaluator,
                plan.job,
            )
        else:
            leader = Leader(plan.workers, plan.max_restarts, plan.start_timeout, job=plan.job)
        try:
            if plan.coordinator is None:
                yield LocalLink(leader, self._inbox), "127.0.0.1"
            else:
                host, port = plan.coordinator
                async with Listener(leader, host, port, self._timeout):
                    yield LocalLink(leader, self._inbox), plan.host or host
        finally:
            leader.close()

    async def _attempt(self, link: LocalLink | Connection, host: str) -> Message:
        """Starts the workers once, and returns the leader's outcome when all workers on all machines have ended."""
        plan = self._plan
        ports = Ports(plan.here + offers(plan.ps))
        try:
            addresses = [join_address(host, port) for port in ports.numbers]
            link.send_to_leader(
                {
                    "op": "join", "workers": plan.workers, "first": plan.first, "host": host,
                    "job": plan.job, "addresses": addresses[: plan.here],
                    "ps": plan.ps, "offered": addresses[plan.here :], "secret": self._secret.digest,
                }
            )  # fmt: skip
            start = await self._message("start")
        finally:
            ports.release()
        with tempfile.TemporaryDirectory(prefix="replicax-launch-") as folder:
            self._local = self._started(start, host, folder, link)
            following = asyncio.create_task(self._follow(self._local, link))
            outcomes = await self._local.wait()
            following.cancel()
            self._local = None
        if self._interrupts:
            link.send_to_leader({"op": "failed", "interrupt": self._interrupts[0]})
        now = time.time()
        link.send_to_leader({"op": "done", "outcomes": [outcome.to_message(now) for outcome in outcomes]})
        found = await self._job_outcome(outcomes)
        if found["text"]:
            self._screen.say(found["text"], alarm=True)
        if found["again"]:
            self._screen.say(found["restart"])
        return found

    async def _message(self, kind: str) -> Message:
        """Returns the leader's next message of that kind."""
        while (message := await self._inbox.get())["op"] != kind:
            if message["op"] == "refused":
                raise LaunchError(message["message"])
            if message["op"] == "lost":
                assert self._plan.coordinator is not None
                where = join_address(*self._plan.coordinator)
                if not message["how"]:
                    raise LaunchError(f"What listens at the coordinator's address {where} is no launcher of this job.")
                raise LaunchError(f"The launcher of worker 0, at {where}, {message['how']}.")
            if message["op"] == "note" and kind == "start":
                self._screen.say(message["text"])
        return message

    async def _job_outcome(self, outcomes: list[Outcome]) -> Message:
        """Returns the leader's outcome of the job or, where that does not come, one of the workers of this machine."""
        # The others have as long to end their workers as this launcher had, and then it waits for them no longer.
        patience = self._grace(_GRACE_AFTER_SIGNAL) + self._timeout if self._interrupts else None
        problem = "What has become of the workers of other machines is not known."
        try:
            async with asyncio.timeout(patience):
                return await self._message("outcome")
        except TimeoutError:
            pass
        except LaunchError as error:
            problem = f"{error} {problem}"
        if self._interrupts:
            number = self._interrupts[0]
            status, text = exit_status(-number), f"interrupted by {signal_name(number)}; all workers here have ended."
        else:
            status, text = job_outcome(outcomes)
            of_itself = any(o.failed and (o.report is None or o.report["caused_by"] is None) for o in outcomes)
            status = status if of_itself else 2
        return {"op": "outcome", "status": status, "text": f"{problem}\n{text}".rstrip(), "again": False}

    def _started(self, start: Message, host: str, folder: str, link: LocalLink | Connection) -> LocalProcesses:
        """Starts the tasks of this machine."""
        plan = self._plan
        workers = [Task("worker", plan.first + index) for index in range(plan.here)]
        if not plan.ps:
            processes = [self._process(task, start, folder) for task in workers]
            return LocalWorkers(processes, host, Path(folder), link.send_to_leader, plan.preempt_codes)
        beside = [Task("chief", 0), *[Task("evaluator", 0)] * plan.evaluator] if plan.first == 0 else []
        return LocalTasks(
            [*beside, *workers, *(Task("ps", index) for index in start["ps"])],
            lambda task, restarts: self._process(task, start, folder, restarts),
            host,
            link.send_to_leader,
            self._screen.say,
            TASK_RESTARTS if plan.max_task_restarts is None else plan.max_task_restarts,
            plan.preempt_codes,
        )

    def _process(self, task: Task, start: Message, folder: str, restarts: int | None = None) -> Worker:
        plan, cluster = self._plan, start["cluster"]
        works = task.kind == "worker"
        gpus: list[str] | None = []  # no accelerator of any kind
        if works:
            gpus = None if self._gpus is None else self._gpus[task.number - plan.first]
        environment = worker_environment(
            os.environ,
            cluster=cluster,
            task=task,
            devices=plan.devices if works else None,
            gpus=gpus,
            report_folder=folder,
            attempt=start["attempt"],
            tuning=plan.tuning,
        )
        environment[JOB_ID] = plan.job
        if restarts is not None:
            environment |= {**self._secret.environment, "REPLICAX_TASK_RESTART_COUNT": str(restarts)}
        counts = {kind: len(addresses) for kind, addresses in cluster.items()} | {"evaluator": plan.evaluator}
        width = max(len(Task(kind, count - 1).name) for kind, count in counts.items() if count)
        address = "" if task.kind == "evaluator" else cluster[task.kind][task.number]
        return Worker(task, plan.command, environment, self._screen, width, address)

    async def _follow(self, local: LocalProcesses, link: LocalLink | Connection) -> None:
        """Ends the workers when the leader or a signal says so, or when the leader is lost."""
        while (message := await self._inbox.get())["op"] not in ("signal", "stop", "lost"):
            if message["op"] == "note":
                self._screen.say(message["text"])
        if message["op"] == "lost":
            self._inbox.put_nowait(message)  # for whoever will wait for the outcome
        if message["op"] == "signal":  # the leader has the workers of other machines end in the same way
            link.send_to_leader({"op": "failed", "interrupt": message["interrupt"]})
        if message.get("interrupt") is None:
            await local.end(signal.SIGTERM, settle=local.settle, grace=self._grace(_GRACE_AFTER_FAILURE))
            return
        # A worker knows Ctrl-C and a request to end; the other signals are the launcher's business.
        number = signal.SIGINT if message["interrupt"] == signal.SIGINT else signal.SIGTERM
        grace = self._grace(_GRACE_AFTER_SIGNAL)
        more = "; press Ctrl-C again to kill them now" if self._interrupts == [signal.SIGINT] else ""
        who = "tasks" if self._plan.ps else "workers"
        self._screen.say(f"{signal_name(message['interrupt'])}: the {who} have {grace:g} s to end{more}.")
        await local.end(number, settle=0.0, grace=grace)

    def _grace(self, usual: float) -> float:
        return usual if self._plan.grace is None else self._plan.grace
