"""The agreement of processes on a step at which all save, without processes: what is asked and what is answered."""

from __future__ import annotations

import signal
import threading

import pytest

from replicax._job import agree_on_step, coordinator, notices
from replicax._job.agree_on_step import Agreement, Gate
from replicax._job.call_log import CallLog
from replicax._job.coordinator import Coordinator
from replicax._job.diagnosis import Peer
from replicax._job.notices import Notice, Watch


@pytest.fixture(autouse=True)
def own_gate(monkeypatch):
    """A gate of this test's own, and SIGTERM as it was."""
    gate = Gate()
    monkeypatch.setattr(agree_on_step, "GATE", gate)
    monkeypatch.setattr(notices, "GATE", gate)
    monkeypatch.setattr(notices, "_ends", -1)
    monkeypatch.setattr(notices, "_watches", [])
    before = signal.getsignal(signal.SIGTERM)
    yield gate
    signal.signal(signal.SIGTERM, before)


def steps_until_saved(gate, most=100):
    """Steps that the gate lets through, up to `most`."""
    return next((count for count in range(most) if not gate.passes()), most)


def test_all_stop_one_step_after_the_most_that_anybody_has_begun():
    agreement, gates = Agreement(), {i: Gate() for i in range(3)}
    for i, gate in gates.items():
        gate.connect(lambda kind, message, i=i: agreement.take(i, kind, message, 0.0), f"worker {i}")
        assert steps_until_saved(gate, 5 + i) == 5 + i
    gates[0].notice("has received SIGTERM", 0.0)
    gates[2].notice("has received SIGTERM", 0.0)  # at once, on two
    everybody = set(gates)
    hold = agreement.next_order(everybody, 0.0)
    for i in gates:
        assert agreement.next_order(everybody, 0.0) is None  # not all have answered
        agreement.take(i, "passed", gates[i].obey(hold), 0.0)
    stop = agreement.next_order(everybody, 0.0)
    assert stop == {"order": "stop", "at": 8, "final": True}
    for i, gate in gates.items():
        gate.obey(stop)
        assert not gate.is_next_closed()
        assert steps_until_saved(gate) == 3 - i and gate.is_next_closed()
        own = ["worker 2 has received SIGTERM"] if i == 2 else []
        assert gate.notices == [*own, "worker 0 has received SIGTERM"]
    ends, posted = {}, threading.Semaphore(0)
    for i, gate in gates.items():

        def tell(kind, message, i=i):
            agreement.take(i, kind, message, 0.0)
            posted.release()

        gate.connect(tell, f"worker {i}")
    threads = [threading.Thread(target=lambda i=i: ends.update({i: gates[i].saved(0.0)})) for i in gates]
    for thread in threads:
        thread.start()
    for _ in gates:
        assert posted.acquire(timeout=60.0)
    go = agreement.next_order(everybody, 0.0)
    assert go == {"order": "go", "final": True}
    for gate in gates.values():
        gate.obey(go)
    for thread in threads:
        thread.join(60.0)
    assert ends == {0: True, 1: True, 2: True} and agreement.next_order(everybody, 0.0) is None


def test_nobody_begins_a_step_while_the_count_is_taken():
    gate = Gate()
    assert gate.obey({"order": "hold", "reason": "worker 1 is to end"}) == {"answer": 0}
    passed = []
    thread = threading.Thread(target=lambda: passed.append(gate.passes()))
    thread.start()
    thread.join(0.1)
    assert thread.is_alive() and not passed
    gate.obey({"order": "stop", "at": 1, "final": True})
    thread.join(60.0)
    assert passed == [True] and not gate.passes()


def test_nobody_waits_for_an_order_of_a_process_0_that_has_ended():
    gate = Gate()
    gate.obey({"order": "hold", "reason": "worker 1 is to end"})
    passed = []
    thread = threading.Thread(target=lambda: passed.append(gate.passes()))
    thread.start()
    gate.let_go()
    thread.join(60.0)
    assert passed == [True]


def test_a_process_that_has_ended_is_not_waited_for():
    agreement = Agreement()
    agreement.take(1, "noticed", {"reason": "worker 1 is to end", "grace": 0.0, "ends": 0}, 0.0)
    agreement.next_order({0, 1, 2}, 0.0)
    agreement.take(0, "passed", {"answer": 3}, 0.0)
    agreement.take(1, "passed", {"answer": 4}, 0.0)
    assert agreement.next_order({0, 1, 2}, 0.0) is None
    assert agreement.next_order({0, 1}, 0.0)["at"] == 5


def grace_period(agreement, now):
    """The orders at a time, with a process that answers 0 steps and 5 seconds for the last save."""
    orders = []
    while order := agreement.next_order({0}, now):
        orders.append((order["order"], order.get("final")))
        if order["order"] != "go":
            agreement.take(0, "answer", {"answer": 0 if order["order"] == "hold" else 5.0}, now)
    return orders


def test_a_grace_period_is_used_but_for_the_time_of_the_last_save():
    agreement = Agreement()
    agreement.take(0, "noticed", {"reason": "worker 0 is to end", "grace": 100.0, "ends": 0}, 1000.0)
    assert grace_period(agreement, 1000.0) == [("hold", None), ("stop", False), ("go", False)]
    assert grace_period(agreement, 1094.0) == []
    assert grace_period(agreement, 1095.0) == [("hold", None), ("stop", True), ("go", True)]
    assert grace_period(agreement, 2000.0) == []


@pytest.mark.parametrize("grace, at", [(10.0, 1015.0), (6.0, 1011.0), (500.0, 1095.0)])
def test_the_first_end_of_several_notices_counts(grace, at):
    agreement = Agreement()
    agreement.take(0, "noticed", {"reason": "worker 0 is to end", "grace": 100.0, "ends": 0}, 1000.0)
    assert grace_period(agreement, 1000.0)
    agreement.take(1, "noticed", {"reason": "worker 1 is to end", "grace": grace, "ends": 0}, 1010.0)
    assert grace_period(agreement, at - 0.1) == []
    assert grace_period(agreement, at)[-1] == ("go", True)


def test_alone_a_process_saves_after_its_next_step(own_gate):
    watch = Watch([])
    assert steps_until_saved(own_gate, 3) == 3
    signal.raise_signal(signal.SIGTERM)
    assert own_gate.passes() and not own_gate.passes() and not own_gate.passes()
    assert own_gate.saved(0.0)
    assert own_gate.notices == ["this process has received SIGTERM"]
    assert own_gate.passes()  # where the program goes on after all
    signal.raise_signal(signal.SIGTERM)
    assert own_gate.passes() and not own_gate.passes() and own_gate.saved(0.0)
    del watch


def test_a_second_signal_ends_the_grace_period(own_gate):
    watch = Watch([], grace=3600.0)
    signal.raise_signal(signal.SIGTERM)
    assert own_gate.passes() and not own_gate.passes()
    assert not own_gate.saved(1.0)
    assert steps_until_saved(own_gate, 5) == 5
    signal.raise_signal(signal.SIGTERM)
    assert own_gate.passes() and not own_gate.passes() and own_gate.saved(1.0)
    del watch


def test_without_a_watch_the_signal_does_what_it_did_before(own_gate):
    before = []
    signal.signal(signal.SIGTERM, lambda *_: before.append(1))
    watch = Watch([])
    signal.raise_signal(signal.SIGTERM)
    assert not before and own_gate.passes() and not own_gate.passes()
    del watch
    signal.raise_signal(signal.SIGTERM)
    assert before == [1]


def test_a_function_is_asked_until_it_has_a_notice_and_its_exception_is_kept(own_gate, monkeypatch):
    monkeypatch.setattr(notices, "_INTERVAL", 0.01)
    answers = iter([None, None, Notice("is to end", 7.0)])
    asked = threading.Event()
    monkeypatch.setattr(own_gate, "notice", lambda *notice: (got.append(notice), asked.set()))
    got = []
    watch = Watch([lambda: next(answers)])
    assert asked.wait(60.0) and got == [("is to end", 7.0)] and not watch.problems

    failing = Watch([lambda: 1 // 0])
    for thread in threading.enumerate():
        if thread.name == "replicax-preemption-notice":
            thread.join(60.0)
    assert [type(problem) for problem in failing.problems] == [ZeroDivisionError]


def test_a_watch_that_is_gone_asks_no_longer(monkeypatch):
    monkeypatch.setattr(notices, "_INTERVAL", 60.0)
    watch = Watch([lambda: None])
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "replicax-preemption-notice"]
    del watch
    thread.join(60.0)
    assert not thread.is_alive()


def test_a_notice_counts_for_nothing_once_all_end_until_a_step_begins(own_gate):
    watch = Watch([])
    signal.raise_signal(signal.SIGTERM)
    assert own_gate.passes() and not own_gate.passes() and own_gate.saved(0.0)
    signal.raise_signal(signal.SIGTERM)  # as the launcher does where an exit_fn takes long
    assert own_gate.notices == ["this process has received SIGTERM"]
    assert steps_until_saved(own_gate, 3) == 3
    signal.raise_signal(signal.SIGTERM)
    assert own_gate.passes() and not own_gate.passes() and own_gate.saved(0.0)
    Watch([])  # of a new handler: this program goes on too
    signal.raise_signal(signal.SIGTERM)
    assert own_gate.passes() and not own_gate.passes() and own_gate.saved(0.0)
    assert own_gate.notices == ["this process has received SIGTERM"] * 3
    del watch


def test_a_notice_that_comes_to_process_0_after_the_end_that_it_crossed_is_old():
    agreement = Agreement()
    agreement.take(0, "noticed", {"reason": "worker 0 is to end", "grace": 0.0, "ends": 0}, 0.0)
    assert grace_period(agreement, 0.0) == [("hold", None), ("stop", True), ("go", True)]
    agreement.take(1, "noticed", {"reason": "worker 1 is to end", "grace": 0.0, "ends": 0}, 1.0)
    assert grace_period(agreement, 1.0) == []
    agreement.take(1, "noticed", {"reason": "worker 1 is to end", "grace": 0.0, "ends": 1}, 2.0)
    assert grace_period(agreement, 2.0) == [("hold", None), ("stop", True), ("go", True)]


def test_process_0_looks_again_when_the_grace_period_is_nearly_over(own_gate, monkeypatch):
    monkeypatch.setattr(coordinator, "GATE", own_gate)
    process = Coordinator({0: Peer("worker 0", "")}, CallLog(), heartbeat=40.0, members={})
    try:
        usual = process.patience(1000.0)
        process._take_posted("noticed", {"reason": "worker 0 is to end", "grace": 100.0, "ends": 0}, 1000.0)
        process._agree(1000.0)
        process._take_posted("saved", {"answer": 5.0}, 1000.0)
        process._agree(1000.0)
        assert process.patience(1000.0) == usual > 0.5
        assert process.patience(1094.75) == 0.25
        process._agree(1095.0)
        assert own_gate.passes() and not own_gate.passes()
        assert process.patience(1095.0) == usual  # for what the processes say now
    finally:
        process.forget()


@pytest.mark.parametrize("begun, said", [(0, "It is to end soon."), (3, "All processes save their state at the same")])
def test_a_save_is_announced_once_a_step_has_begun(begun, said, capfd):
    """Before, there may be watchers alone, and no program that saves."""
    agreement = Agreement()
    agreement.take(1, "noticed", {"reason": "worker 1 has received SIGTERM", "grace": 0.0, "ends": 0}, 0.0)
    agreement.next_order({0, 1}, 0.0)
    for index, count in enumerate((0, begun)):
        agreement.take(index, "passed", {"answer": count}, 0.0)
    assert agreement.next_order({0, 1}, 0.0)["at"] == begun + 1
    assert f"worker 1 has received SIGTERM. {said}" in capfd.readouterr().err


@pytest.mark.parametrize("after", [1, 2, 3])
def test_one_signal_that_two_threads_hear_at_the_same_time_is_one(after, own_gate, monkeypatch):
    """The second thread hears of it after the first one has looked at the counts so many times."""

    class Counts(list):
        looked = 0

        def __getitem__(self, index):
            if threading.current_thread() is threading.main_thread():
                Counts.looked += 1
                if Counts.looked == after:
                    second.start()
                    second.join(0.2)  # unless it has to wait until this thread has counted
            return super().__getitem__(index)

    told = []
    monkeypatch.setattr(own_gate, "notice", lambda *notice: told.append(notice))
    monkeypatch.setattr(notices, "_told", 0)
    monkeypatch.setattr(notices, "_heard", Counts([0, 0]))
    second = threading.Thread(target=lambda: notices.heard_sigterm(1))
    watch = Watch([], grace=60.0)
    notices.heard_sigterm(0)
    second.join(60.0)
    notices.heard_sigterm(0), notices.heard_sigterm(1)
    assert told == [("has received SIGTERM", 60.0), ("has received SIGTERM", 0.0)]
    del watch


def test_a_notice_from_before_a_job_is_joined_is_told_to_its_processes(own_gate):
    told = []
    own_gate.notice("is to end", 30.0)
    own_gate.connect(lambda kind, message: told.append((kind, message)), "worker 1")
    assert told == [("noticed", {"reason": "worker 1 is to end", "grace": 30.0, "ends": 0})]
    own_gate.obey({"order": "hold", "reason": "worker 1 is to end"})
    assert own_gate.notices == ["worker 1 is to end"]
