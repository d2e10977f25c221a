"""The parts of `replicax launch` that need no process: lines, ports, GPUs, and which failure was the first."""

from __future__ import annotations

import signal
import socket

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replicax._job.channel import parse
from replicax._launch._environment import LaunchError, Ports, visible_gpus
from replicax._launch._outcome import Outcome, job_outcome, read_report
from replicax._launch._output import LONGEST_LINE, PROGRESS_INTERVAL, Lines

# Nothing by the clock: the machine may be busy.
untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def cut(chunks, clock=lambda: 0.0):
    lines = []
    cutter = Lines(lines.append, clock)
    for chunk in chunks:
        cutter.feed(chunk)
    cutter.close()
    return lines


@untimed
@given(st.lists(st.text("ab\n", max_size=8).map(str.encode), max_size=8))
def test_lines_do_not_depend_on_how_they_arrive(chunks):
    text = b"".join(chunks)
    assert cut(chunks) == text.removesuffix(b"\n").split(b"\n") if text else cut(chunks) == []


@untimed
@given(st.lists(st.text("ab\r\n", max_size=8).map(str.encode), max_size=8))
def test_a_line_rewritten_with_carriage_returns_shows_its_last_state(chunks):
    text = b"".join(chunks)
    lines = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in text.split(b"\n")]
    assert cut(chunks) == (lines if lines[-1] else lines[:-1])


def test_a_progress_bar_is_shown_at_intervals():
    now = [0.0]
    lines = []
    cutter = Lines(lines.append, lambda: now[0])
    for percent in range(0, 100):
        now[0] = percent * PROGRESS_INTERVAL / 10
        cutter.feed(b"\r%d%%" % percent)
    assert lines == [b"%d%%" % percent for percent in range(9, 99, 10)]
    cutter.feed(b"\r100%\nnext\r\n")
    assert lines[-2:] == [b"100%", b"next"]


def test_a_line_longer_than_the_limit_is_passed_on_in_parts():
    lines = []
    cutter = Lines(lines.append)
    cutter.feed(b"x" * LONGEST_LINE)
    assert not lines
    cutter.feed(b"x")
    assert lines == [b"x" * (LONGEST_LINE + 1)]


def test_ports_are_free_different_and_held():
    ports = Ports(20)
    assert len(set(ports.numbers)) == 20
    for port in ports.numbers:
        with pytest.raises(OSError), socket.create_server(("127.0.0.1", port)):
            pass
    ports.release()
    for port in ports.numbers:
        socket.create_server(("127.0.0.1", port)).close()


def test_a_port_in_use_is_not_taken(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr("replicax._launch._environment._ports_to_try", lambda: [server.getsockname()[1]])
        with pytest.raises(LaunchError, match="no 1 free ports"):
            Ports(1)


@pytest.mark.parametrize("text", ["host", "host:", ":1", "host:0", "host:65536", "fe80::1:4000", "a b:1", "[host]:1"])
def test_an_address_that_cannot_be_parsed_is_reported(text):
    with pytest.raises(ValueError, match="An address reads HOST:PORT"):
        parse(text)


def test_addresses_of_both_kinds():
    assert parse("node-1.example:4000") == ("node-1.example", 4000)
    assert parse("[fe80::1]:4000") == ("fe80::1", 4000)
    assert parse("[fe80::1%eth0.100]:4000") == ("fe80::1%eth0.100", 4000)  # an interface of a VLAN
    assert parse("[fe80::1%br-lan]:4000") == ("fe80::1%br-lan", 4000)


@pytest.mark.parametrize(
    "environment, gpus",
    [
        ({}, ["0", "1"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
        ({"CUDA_VISIBLE_DEVICES": "1,-1,0"}, ["1"]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-8a, 1"}, ["GPU-8a", "1"]),
        ({"JAX_PLATFORMS": "cpu"}, []),
        ({"JAX_PLATFORMS": "cuda,cpu"}, ["0", "1"]),
    ],
)
def test_visible_gpus_follow_the_environment_and_dev(environment, gpus, tmp_path):
    for name in ("nvidia0", "nvidia3", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert visible_gpus(environment, str(tmp_path)) == gpus


def outcome(worker, status, when, *, ended=False, **report):
    if report:
        report = {"time": when - 0.5, "kind": "exception", "message": "", "traceback": "", **report}
        report = {"step": None, "caused_by": None, **report}
    return Outcome(worker, "127.0.0.1", status, when, ended, report or None)


def first_line(*outcomes):
    status, text = job_outcome(outcomes)
    return status, text.partition("\n")[0]


def test_a_job_without_failure_has_status_0():
    assert job_outcome([outcome(0, 0, 1.0), outcome(1, 0, 2.0)]) == (0, "")


def test_the_first_to_fail_is_not_the_first_to_end():
    # Worker 0 crashed at once when worker 1, which had raised before, broke their connection while it was ending.
    found = first_line(outcome(0, -signal.SIGABRT, 1.2), outcome(1, 1, 1.5, message="ValueError: boom"))
    assert found == (1, "worker 1 failed first: exit status 1")


def test_a_killed_worker_is_first_though_it_could_not_report():
    found = first_line(outcome(0, 1, 9.0, message="Connection reset"), outcome(1, -signal.SIGKILL, 1.0))
    assert found == (137, "worker 1 failed first: killed by SIGKILL (the kernel does so when memory runs out)")


def test_the_outcome_follows_causes_through_reports():
    found = first_line(
        outcome(0, 70, 5.0, kind="lost", caused_by=1),
        outcome(1, 70, 6.0, kind="lost", caused_by=2),
        outcome(2, 3, 7.0, message="ValueError: boom", step=4),
    )
    assert found == (3, "worker 2 failed first, at step 4: exit status 3")


def test_workers_that_blame_each_other_have_a_named_cause():
    found = first_line(outcome(0, 70, 5.0, kind="stuck", caused_by=1), outcome(1, 71, 6.0, kind="stuck", caused_by=0))
    assert found == (70, "worker 0 failed first: exit status 70")


def test_a_worker_that_left_early_is_the_cause_by_its_exit_status():
    status, text = job_outcome(
        [outcome(0, 70, 5.0, kind="left", caused_by=1, message="worker 1 left"), outcome(1, 0, 1.0)]
    )
    assert status == 70
    assert text.splitlines()[:2] == [
        "worker 1 is the cause: ended with exit status 0",
        "  worker 0 says: worker 1 left",
    ]


@pytest.mark.parametrize("kind, did", [("lost", "stopped responding"), ("stuck", "still ran")])
def test_the_launchers_own_signal_is_not_told_as_the_cause(kind, did):
    ended = outcome(1, -signal.SIGTERM, 6.0, ended=True)
    found = first_line(outcome(0, 70, 5.0, kind=kind, caused_by=1), ended)
    assert found == (70, f"worker 1 is the cause: {did}, until it was ended by the launcher (killed by SIGTERM)")


def test_no_worker_failed_first_where_a_call_that_all_have_reached_does_not_end():
    reports = [outcome(worker, 70, 5.0 + worker, kind="stuck", message="stuck") for worker in range(2)]
    text = "worker 0 ended as all did, and no single worker is the cause: exit status 70"
    assert first_line(*reports) == (70, text)
    late = outcome(2, 70, 4.0, kind="stuck", message="stuck")
    reports[0].report["caused_by"] = 2
    assert first_line(*reports, late) == (70, "worker 2 failed first: exit status 70")


def of_machine(host, result, lost=""):
    result.host, result.lost = host, lost
    return result


@pytest.mark.parametrize("reported", [8.0, 10.0])
def test_a_machine_that_hears_of_no_other_one_has_lost_contact(reported):
    """Whether its worker's report or the silence of the other launchers is noticed first."""
    silent = [of_machine(f"b{i}", outcome(i, None, 9.2), "its launcher has not answered") for i in (1, 2)]
    here = of_machine("a", outcome(0, 70, reported, kind="lost", message="worker 1 is silent"))
    assert job_outcome([here, *silent]) == (
        70,
        "a has lost contact with all other machines: its network is cut, or theirs.\n"
        "  worker 0: exit status 70, worker 1 is silent\n"
        "  worker 1 and worker 2: its launcher has not answered",
    )
    other = of_machine("c", outcome(3, 70, 9.9, kind="lost", caused_by=1))
    assert first_line(here, *silent, other)[1].startswith(("worker 0 on a failed", "worker 1 on b1 failed"))
    failed = of_machine("a", outcome(0, 3, reported, message="ValueError: boom"))
    begin = "worker 0 on a failed first: exit" if reported == 8.0 else "a has lost contact with all other machines"
    assert first_line(failed, *silent)[1].startswith(begin)


def test_a_worker_that_blames_one_of_another_machine_did_not_fail_first():
    found = first_line(outcome(1, 70, 5.0, kind="lost", caused_by=0, message="worker 0 is silent", step=4))
    assert found == (70, "worker 1 ended because of worker 0, at step 4: exit status 70")


@pytest.mark.parametrize("failed_at, first", [(2.0, 1), (0.5, 2)])
def test_a_worker_that_ended_before_it_joined_is_first_unless_another_failed_earlier(failed_at, first):
    waits = Outcome(0, "127.0.0.1", -signal.SIGTERM, 5.0, True, address="a:1", joins=["a:1", "b:1", "c:1"])
    absent = Outcome(1, "127.0.0.1", 0, 1.0, address="b:1")
    failed = Outcome(2, "127.0.0.1", 3, failed_at, address="c:1")
    status, text = first_line(waits, absent, failed)
    assert (status, text.split(":")[0]) == (3, f"worker {first} failed first")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"time": "soon"}', '{"time": 1, "kind": "lost"}'])
def test_a_report_that_cannot_be_read_is_none(text, tmp_path):
    (tmp_path / "0.json").write_text(text, encoding="utf-8")
    assert read_report(tmp_path, 0) is None


def test_times_survive_clocks_that_differ():
    before = outcome(0, 1, 100.0, message="boom")
    after = Outcome.from_message(before.to_message(now=102.0), now=5000.0)
    assert (after.when, after.failed_at) == (4998.0, 4997.5)
