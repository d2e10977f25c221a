"""The leader of a job with parameter servers, without processes: members are lists of what they are told."""

from __future__ import annotations

import asyncio
import functools
import signal

import pytest

from replicax._launch._cluster_leader import ClusterLeader


class Member:
    """A launcher that has joined."""

    def __init__(self, leader, first, workers, host, ps):
        self.told = []
        self.leader = leader
        self._join = {
            "op": "join", "workers": workers, "first": first, "host": host, "ps": ps, "secret": "s", "job": "",
            "addresses": [f"{host}:{100 + first}"], "offered": [f"{host}:{200 + index}" for index in range(ps + 1)],
        }  # fmt: skip

    def send(self, message):
        self.told.append(message)

    def join(self):
        self.leader.receive(self, self._join)
        return self

    def tells(self, op, **fields):
        self.leader.receive(self, {"op": op, **fields})

    def done(self, *outcomes):
        """Each outcome is the kind of the task, its number, its exit status, and whether the launcher has ended it."""
        fields = [
            {"worker": number, "host": "", "status": status, "when": 0.1, "ended": ended, "kind": kind,
             "preempted": status == 42}
            for kind, number, status, ended in outcomes
        ]  # fmt: skip
        self.tells("done", outcomes=fields)

    def last(self, op):
        return [message for message in self.told if message["op"] == op][-1]

    def notes(self):
        return [message["text"] for message in self.told if message["op"] == "note"]

    def ops(self):
        return [message["op"] for message in self.told]


def with_leader(test):
    """Runs a test in an event loop, with a function that makes members of a leader of two workers and a server."""

    @functools.wraps(test)
    def run(**arguments):
        async def main():
            leader = ClusterLeader(2, 3, 60.0, 1, "s")
            try:
                test(lambda first, host: Member(leader, first, 2, host, 1), **arguments)
            finally:
                leader.close()

        asyncio.run(main())

    del run.__wrapped__  # pytest would read the signature there
    return run


def _preempted(chief):
    chief.tells("failed", interrupt=None)
    chief.done(("chief", 0, 42, False), ("worker", 0, -15, True), ("ps", 0, -15, True))


def _leaves(member):
    member.tells("failed", interrupt=int(signal.SIGTERM))
    member.done(("worker", 1, -15, True))
    member.leader.left(member)


@pytest.mark.parametrize("name", ["leaves", "is lost"])
def test_an_attempt_does_not_wait_for_a_machine_that_left_before(name):
    check_the_next_attempt(leave=_leaves if name == "leaves" else lambda member: member.leader.left(member))


@with_leader
def check_the_next_attempt(member, leave):
    zero, one = member(0, "a").join(), member(1, "b").join()
    leave(one)
    for attempt in (1, 2):
        _preempted(zero)
        zero.join()
        start = zero.last("start")
        assert start["attempt"] == attempt and start["ps"] == [0]
        assert start["cluster"] == {"chief": ["a:201"], "worker": ["a:100", "b:101"], "ps": ["a:200"]}
        assert zero.notes()[-1] == "worker 1 on b left before this attempt. The job goes on."
    back = member(1, "b").join()
    assert back.last("start")["cluster"] == start["cluster"]
    assert zero.notes()[-1] == "worker 1 on b came back."
    # The only worker beside it has used up its restarts, and the job goes on with the one that came back.
    zero.tells("down", kind="worker", index=0)
    assert zero.ops()[-1] == "note"
    leave(back)
    assert "stop" in zero.ops()[-2:]


@with_leader
def test_a_machine_that_left_may_come_back_before_the_next_attempt(member):
    zero, one = member(0, "a").join(), member(1, "b").join()
    _leaves(one)
    _preempted(zero)
    back = member(1, "elsewhere").join()
    assert back.ops() == []
    zero.join()
    assert back.last("start")["cluster"]["worker"] == ["a:100", "elsewhere:101"]


def _given_up(member):
    member.leader.lost(member, "its launcher has not answered for 30 s")


@with_leader
def test_a_launcher_that_is_heard_again_has_its_tasks_still(member):
    zero, one = member(0, "a").join(), member(1, "b").join()
    _given_up(one)
    one.leader.heard(one)
    assert [note.partition(" on b ")[2] for note in zero.notes()] == [
        "left: its launcher has not answered for 30 s. The job goes on.", "came back."
    ]  # fmt: skip
    zero.tells("down", kind="worker", index=0)
    assert "stop" not in zero.ops()  # worker 1 is there
    one.tells("down", kind="worker", index=1)
    assert "stop" in zero.ops()


@with_leader
def test_tasks_that_were_down_before_their_launcher_was_silent_stay_so(member):
    zero, one = member(0, "a").join(), member(1, "b").join()
    one.tells("down", kind="worker", index=1)
    _given_up(one)
    one.leader.heard(one)
    zero.tells("down", kind="worker", index=0)
    assert "stop" in zero.ops()


@with_leader
def test_a_launcher_is_let_in_when_the_loss_of_the_one_before_is_noticed(member):
    zero, one = member(0, "a").join(), member(1, "b").join()
    back = member(1, "b").join()
    assert back.notes() == ["worker 1 on b still runs, as far as is known. This launcher waits for its end."]
    _given_up(one)
    assert back.ops() == ["note", "start", "note"] and one.last("outcome")["text"] == "another one has its place."
    assert zero.notes()[-1] == "worker 1 on b came back."
    one.leader.heard(one)
    assert zero.notes()[-1] == "worker 1 on b came back." and len(zero.notes()) == 2


@with_leader
def test_a_launcher_that_waits_for_a_place_is_refused_at_the_end_of_the_job(member):
    zero, one = member(0, "a").join(), member(1, "b").join()
    second = member(1, "b").join()
    zero.tells("failed", interrupt=int(signal.SIGINT))
    zero.done(("chief", 0, -2, True), ("worker", 0, -2, True), ("ps", 0, -2, True))
    assert second.ops() == ["note"]
    one.done(("worker", 1, -2, True))
    assert second.last("refused")["message"] == "All workers of this job have been started already."
    assert one.last("outcome")["status"] == 130


@with_leader
def test_a_launcher_does_not_take_the_place_of_one_that_begins_again(member):
    zero, one = member(0, "a").join(), member(1, "b").join()
    second = member(1, "b").join()
    zero.tells("failed", interrupt=None)
    one.done(("worker", 1, -15, True))
    _preempted(zero)
    assert second.last("refused")
    for launcher in (zero, one):
        launcher.join()
    assert one.last("start")["attempt"] == 1


@with_leader
def test_a_launcher_of_another_job_does_not_wait(member):
    member(0, "a").join(), member(1, "b").join()
    for host, field, value, text in (
        ("c", "host", "c", "were at b"), ("b", "secret", "t", "another secret"), ("b", "workers", 3, "--workers 3")
    ):  # fmt: skip
        other = member(1, host)
        other._join[field] = value
        assert text in other.join().last("refused")["message"]
