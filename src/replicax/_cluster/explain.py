"""Explaining a cluster resolver: what it found where, what is missing, and what contradicts."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from replicax._base import errors
from replicax._cluster import local_processes
from replicax._cluster.spec import ClusterSpec
from replicax._job.channel import parse

_ASK_SECONDS = 10.0  # for the resolver, which may ask a server
_LOOK_UP_SECONDS = 3.0  # for the names of hosts
_MOST_SHOWN = 16
_MAY_STAND_ALONE = ("evaluator",)  # jobs that watch a cluster and are not part of it

_Task: TypeAlias = tuple[str | None, int | None]
_Addresses: TypeAlias = dict[_Task, tuple[str, int]]


class Explanation:
    """A report on a cluster resolver: what it found where, what is missing, and what contradicts.

    Args:
        subject: what is explained.

    >>> import replicax as rx
    >>> cluster = rx.ClusterSpec({"worker": ["localhost:2222", "10.0.0.2:2222"]})
    >>> report = rx.cluster_resolver.SimpleClusterResolver(cluster, task_type="worker", task_id=2).explain()
    >>> report.ok
    False
    >>> print(report)
    SimpleClusterResolver
      found
        cluster: worker 0 at localhost:2222 and worker 1 at 10.0.0.2:2222
        this process: worker 2
      missing
        nothing
      contradicts
        this process is worker 2, but there is no task 2 in job 'worker', whose tasks are 0 and 1
        worker 0 (localhost:2222): localhost means each machine itself, so that other machines cannot reach it, but
          there are other hosts in the cluster: worker 1 (10.0.0.2:2222). Give an address that all of them reach
    """

    def __init__(self, subject: str):
        self.subject = subject
        self.found: list[str] = []
        self.missing: list[str] = []
        self.contradictions: list[str] = []

    @property
    def ok(self) -> bool:
        """True if nothing is missing and nothing contradicts.

        >>> import replicax as rx
        >>> cluster = rx.ClusterSpec({"worker": ["a:1", "b:2"]})
        >>> rx.cluster_resolver.SimpleClusterResolver(cluster, task_type="worker", task_id=1).explain().ok
        False
        """
        return not self.missing and not self.contradictions

    def __str__(self) -> str:
        parts = {"found": self.found, "missing": self.missing, "contradicts": self.contradictions}
        lines = [self.subject]
        for title, entries in parts.items():
            lines += [f"  {title}", *map(_folded, entries or ["nothing"])]
        return "\n".join(lines)

    __repr__ = __str__


def _folded(entry: str) -> str:
    return textwrap.fill(
        entry, 116, initial_indent=" " * 4, subsequent_indent=" " * 6, break_long_words=False, break_on_hyphens=False
    )


def explain(subject: str, asked: Mapping[str, Callable[[], object]], sources: Explanation) -> Explanation:
    """Returns the explanation of a resolver. Raises nothing, and returns within seconds whatever servers do.

    Args:
        subject: the resolver's name.
        asked: what to call for "task_type", "task_id" and "cluster_spec()", and what fills `sources`.
        sources: what the resolver itself reports.
    """
    report = Explanation(subject)
    answers: dict[str, Any] = {}
    failures: dict[str, str] = {}

    def ask() -> None:  # one after the other: clients of servers are seldom safe for threads
        for name, call in asked.items():
            try:
                answers[name] = call()
            except BaseException as error:  # also what would end the thread
                failures[name] = f"{type(error).__name__}: {error}"

    local_processes.within(_ASK_SECONDS, ask)
    answers, failures = dict(answers), dict(failures)  # the thread may go on
    report.found += sources.found
    report.missing += sources.missing
    report.contradictions += sources.contradictions
    for error in dict.fromkeys(failures.values()):
        report.contradictions.append(f"{listed([name for name in failures if failures[name] == error])} raised {error}")
    if silent := [name for name in asked if name not in answers and name not in failures]:
        report.contradictions.append(f"{silent[0]} did not answer within {_ASK_SECONDS:g} s")
    if "cluster_spec()" in answers:
        try:
            _explain_cluster(report, answers)
        except Exception as error:  # whatever a resolver answers, it is explained as far as it goes
            report.contradictions.append(f"the explanation ended with {type(error).__name__}: {error}")
    return report


def _explain_cluster(report: Explanation, answers: dict[str, Any]) -> None:
    spec = answers["cluster_spec()"]
    if not isinstance(spec, ClusterSpec):
        report.contradictions.append(f"cluster_spec() returned a {type(spec).__name__}, not a ClusterSpec")
        return
    tasks = [(job, at, spec.task_address(job, at)) for job in spec.jobs for at in spec.task_indices(job)]
    if tasks:
        shown = listed([f"{job} {at} at {address}" for job, at, address in tasks])
        report.found.append(f"cluster: {shown}")
    else:
        report.missing.append("a cluster: without one, this process works alone")
    own: _Task = answers.get("task_type"), answers.get("task_id")
    if "task_type" in answers and "task_id" in answers:
        _check_task(report, spec, *own, len(tasks))
    _check_reachability(report, _check_addresses(report, tasks), own)


def _check_task(report: Explanation, spec: ClusterSpec, kind: str | None, index: int | None, count: int) -> None:
    """Compares the task of this process with the cluster."""
    if kind is None and index is None:
        if count > 1:
            report.missing.append("which task this process is: task_type and task_id")
        return
    if kind is None or index is None:
        absent = "task_type" if kind is None else "task_id"
        report.missing.append(f"{absent}: the other half, {index if kind is None else kind!r}, is there")
        return
    report.found.append(f"this process: {kind} {index}")
    if not count or (kind in _MAY_STAND_ALONE and kind not in spec.jobs):
        return
    if kind not in spec.jobs:
        jobs = listed([repr(job) for job in spec.jobs])
        report.contradictions.append(f"this process is of job {kind!r}, but the cluster has the jobs {jobs} alone")
    elif index not in spec.task_indices(kind):
        have = listed([str(at) for at in spec.task_indices(kind)])
        report.contradictions.append(
            f"this process is {kind} {index}, but there is no task {index!r} in job {kind!r}, whose tasks are {have}"
        )


def listed(words: list[str]) -> str:
    """Returns the words as "a, b and c"; the middle is left out if there are many."""
    if len(words) > _MOST_SHOWN:
        return f"{', '.join(words[: _MOST_SHOWN - 1])}, ... and {words[-1]}"
    return errors.listed(words)


def _check_addresses(report: Explanation, tasks: list[tuple[str, int, str]]) -> _Addresses:
    """Checks what can be seen from the addresses alone. Returns host and port of each task."""
    claims: dict[str, list[str]] = defaultdict(list)
    near: list[str] = []
    far: list[str] = []
    addresses: _Addresses = {}
    for job, at, address in tasks:
        task = f"{job} {at}"
        claims[address].append(task)
        try:
            host, port = addresses[job, at] = parse(address)
        except ValueError as error:
            report.contradictions.append(f"the address of {task} is none: {error}")
            continue
        if local_processes.is_unspecified(host):
            report.contradictions.append(
                f"the address of {task}, {address}, is one to listen at; others cannot reach it. Give the machine's own"
            )
        (near if local_processes.is_loopback(host) else far).append(f"{task} ({address})")
    for address, claimants in claims.items():
        if len(claimants) > 1:
            report.contradictions.append(f"{listed(claimants)} claim one address, {address}")
    if near and far:
        report.contradictions.append(
            f"{listed(near)}: localhost means each machine itself, so that other machines cannot reach it, but there "
            f"are other hosts in the cluster: {listed(far)}. Give an address that all of them reach"
        )
    elif len(near) > 1:
        report.found.append("hosts: all tasks are on this machine (localhost)")
    return addresses


def _check_reachability(report: Explanation, addresses: _Addresses, own: _Task) -> None:
    """Checks the addresses on this machine: names of hosts, its own address and port."""
    mine = [addresses[own]] if own in addresses else []
    hosts = list(dict.fromkeys(host for host, _ in mine + list(addresses.values())))
    numbers = local_processes.look_up(hosts[:_MOST_SHOWN], _LOOK_UP_SECONDS)
    report.contradictions += [f"the host {host!r} {wrong}" for host, wrong in numbers.items() if isinstance(wrong, str)]
    if not mine:
        return
    here = {host: local_processes.is_here(host, numbers.get(host, "")) for host in hosts}
    ((host, port),) = mine
    if here[host] is False:
        others = [f"{job} {at}" for (job, at), (other, _) in addresses.items() if here[other]]
        instead = f", while {listed(others)} would be here" if others else ""
        report.contradictions.append(
            f"this process is {own[0]} {own[1]}, whose host {host} is none of this machine's "
            f"({listed(sorted(local_processes.names()))}){instead}. In a container with forwarded ports that may be "
            "right"
        )
    elif here[host] and (trouble := local_processes.port_trouble(port)):
        report.contradictions.append(f"the address of this process, {host}:{port}: {trouble}")
