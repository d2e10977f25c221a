"""Which processes of a job cannot reach each other."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest
from processes import Workers, free_ports

from replicax._job import reach


@contextlib.contextmanager
def silent_address() -> Iterator[str]:
    """An address that does not answer: the queue of its listener is full, and Linux drops further attempts."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            connection = stack.enter_context(socket.socket())
            connection.setblocking(False)
            connection.connect_ex(listener.getsockname())
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def test_a_refused_connection_is_an_answer_and_silence_is_none(monkeypatch):
    def look_up(host: str, *args: object, real=socket.getaddrinfo, **options: object) -> object:
        if host == "unknown":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real(host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    (closed,) = free_ports(1)
    with silent_address() as silent, socket.create_server(("127.0.0.1", 0)) as open_one:
        addresses = {0: f"127.0.0.1:{closed}", 1: silent, 2: f"localhost:{open_one.getsockname()[1]}", 3: "unknown:1"}
        unreached = reach.try_to_reach(addresses, 0.2)
    assert unreached == {1: "no answer for 0.2 s", 3: "Name or service not known"}


def test_results_count_only_if_process_0_which_is_reached_answers(monkeypatch):
    monkeypatch.setattr(reach, "SECONDS", 0.2)
    closed = [f"127.0.0.1:{port}" for port in free_ports(2)]
    with silent_address() as silent:
        assert reach.out_of_reach([*closed, silent], 1) == {2: "no answer for 0.2 s"}
        assert reach.out_of_reach([silent, closed[0], silent], 1) == {}
        assert reach.out_of_reach([silent, closed[0]], 1) == {}


@pytest.mark.parametrize("process", [1, 70, 199])
def test_a_process_of_many_tries_the_next_ones_and_process_0(process, monkeypatch):
    tried = []
    monkeypatch.setattr(reach, "try_to_reach", lambda addresses, seconds: tried.extend(addresses) or {})
    assert reach.out_of_reach([f"10.0.0.1:{i + 1}" for i in range(200)], process) == {}
    assert sorted(tried) == sorted({0, *((process + step) % 200 for step in range(1, 65))})


STUCK = """
    import threading
    from processes import join
    from replicax._job import reach, state
    # Before the job starts, since process 2 may fail at once. Process 1 alone tries to reach process 2.
    reach.try_to_reach = lambda addresses, seconds: {{2: "No route to host"}} if 2 in addresses else {{}}
    job = join()
    state.begin("a call that does not end")
    if {fails} and job.process_id == 2:
        raise ValueError("UNKNOWN: Gloo: timed out")
    if not {fails}:
        state.set_step_timeout(1.0)
    threading.Event().wait()
"""


@pytest.mark.parametrize(
    "fails, message",
    [
        (False, "which every process has reached"),
        (True, "worker 2 could not go on: ValueError: UNKNOWN: Gloo: timed out"),
    ],
)
def test_processes_that_cannot_reach_each_other_are_named_when_a_call_does_not_end(fails, message, tmp_path):
    with Workers(tmp_path, 3, STUCK.format(fails=fails)) as workers:
        done = workers.join(timeout=60)
    for index, ended in done.items():
        assert ended.returncode == (1 if fails and index == 2 else 70), workers.output()
        if fails and index == 2:  # it prints its own exception
            continue
        (line,) = (line for line in ended.stderr.splitlines() if "; worker 1 cannot reach worker 2 at " in line)
        before, address = line.split("; worker 1 cannot reach worker 2 at ")
        assert before.endswith(message)
        assert address.startswith("127.0.0.1:") and address.endswith(" (No route to host)")
