"""`replicax launch` on several machines, each of which is a launcher on loopback here."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from launching import Launch
from processes import free_ports

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")


@contextlib.contextmanager
def machines(
    folder: Path, ranks: list[str], program: str, options: str = "", env: Mapping[str, str | None] | None = None
) -> Iterator[list[Launch]]:
    """A launcher for each of `ranks`: the number of its first worker and options of its own."""
    coordinator = f"--coordinator 127.0.0.1:{free_ports(1)[0]}"
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(Launch(folder, f"{options} {coordinator} --worker-rank {rank}", program, env=env))
            for rank in ranks
        ]


def test_all_workers_get_one_cluster(tmp_path):
    # The first machine comes last: the others try until it is there.
    ranks = ["3", "1 --workers-here 2", "0"]
    with machines(tmp_path, ranks, "print(task, cluster)", "--workers 4") as launches:
        assert [launch.wait() for launch in launches] == [0, 0, 0], [launch.output for launch in launches]
    printed = sorted(line for launch in launches for line in launch.out.splitlines())
    cluster = printed[0].split(" ", 3)[3]
    assert printed == [f"[worker {worker}] {worker} {cluster}" for worker in range(4)]
    assert len(set(json.loads(cluster.replace("'", '"')))) == 4


def test_a_failure_on_one_machine_ends_all_and_is_told_on_all(tmp_path):
    program = """
    if task == 1:
        report(message="ValueError: boom", traceback="Traceback\\nValueError: boom", step=3)
        sys.exit(4)
    for_ever()
    """
    with machines(tmp_path, ["0", "1", "2"], program, "--workers 3") as launches:
        assert [launch.wait() for launch in launches] == [4, 4, 4], [launch.output for launch in launches]
    for launch in launches:
        assert launch.err.splitlines() == [
            "replicax launch: worker 1 failed first, at step 3: exit status 4",
            "    Traceback",
            "    ValueError: boom",
            "  worker 0 and worker 2: ended by the launcher (killed by SIGTERM)",
        ]


def test_restarts_happen_together(tmp_path):
    program = """
    print("attempt", attempt, cluster)
    if attempt == task:
        sys.exit(1)
    if attempt < 2:
        for_ever()
    """
    with machines(tmp_path, ["0", "1"], program, "--workers 2 --max-restarts 3") as launches:
        assert [launch.wait() for launch in launches] == [0, 0], [launch.output for launch in launches]
    for launch in launches:
        assert "restart 2 of at most 3" in launch.err
    first, second = ([line.partition("attempt")[2] for line in launch.out.splitlines()] for launch in launches)
    assert first == second
    assert len(set(first)) == 3


def test_a_preempted_job_is_restarted_on_all_machines(tmp_path):
    program = """
    if attempt < 2:
        sys.exit(42)
    """
    with machines(tmp_path, ["0", "1"], program, "--workers 2 --max-restarts 1") as launches:
        assert [launch.wait() for launch in launches] == [0, 0], [launch.output for launch in launches]
    for launch in launches:
        assert launch.err.count("restart after a preemption") == 2, launch.output
        assert launch.err.count("preempted: worker 0 and worker 1 ended with exit status 42.") == 2


def test_missing_workers_are_named_at_the_deadline(tmp_path):
    options = "--workers 4 --start-timeout 3"
    with machines(tmp_path, ["0", "2"], "print('started')", options) as launches:
        assert [launch.wait() for launch in launches] == [2, 2], [launch.output for launch in launches]
    for launch in launches:
        assert "After 3 s nobody has come for worker 1 and worker 3." in launch.err
        assert "Here are: worker 0 (127.0.0.1) and worker 2 (127.0.0.1)." in launch.err
        assert not launch.out


def test_two_launchers_cannot_have_one_rank(tmp_path):
    program = "print('started')"
    with contextlib.ExitStack() as stack:
        coordinator = f"--workers 3 --coordinator 127.0.0.1:{free_ports(1)[0]}"
        one, two = (stack.enter_context(Launch(tmp_path, f"{coordinator} --worker-rank 1", program)) for _ in range(2))
        zero = stack.enter_context(Launch(tmp_path, f"{coordinator} --worker-rank 0", program))
        # One of the two comes first, and then waits for worker 2 in vain or not: the other one is told.
        one.until(lambda: "Two launchers claim worker 1" in one.err + two.err, "the second one is refused")
        last = stack.enter_context(Launch(tmp_path, f"{coordinator} --worker-rank 2", program))
        assert sorted(launch.wait() for launch in (zero, one, two, last)) == [0, 0, 0, 2]


def test_launchers_that_disagree_on_the_number_of_workers_are_told(tmp_path):
    with machines(tmp_path, ["0 --workers 2 --start-timeout 5", "1 --workers 3"], "print('started')") as launches:
        assert [launch.wait() for launch in launches] == [2, 2], [launch.output for launch in launches]
    assert "It has --workers 3, but the launcher of worker 0 has 2." in launches[1].err


def test_a_coordinator_that_nobody_runs_is_told(tmp_path):
    with machines(tmp_path, ["1"], "print('started')", "--workers 2 --start-timeout 1") as (launch,):
        assert launch.wait() == 2
    assert "Nobody answers at the coordinator's address 127.0.0.1:" in launch.err
    assert "Connection refused" in launch.err
    unknown = "--workers 2 --coordinator nosuch.invalid:4000 --worker-rank 1 --start-timeout 1"
    with Launch(tmp_path, unknown, "print('started')") as launch:
        assert launch.wait() == 2
    assert "Nobody answers at the coordinator's address nosuch.invalid:4000" in launch.err
    assert "Unknown error" not in launch.err


def test_a_coordinator_port_that_is_taken_is_told(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        options = f"--workers 2 --worker-rank 0 --coordinator {address}"
        with Launch(tmp_path, options, "print('started')") as launch:
            assert launch.wait() == 2
    assert f"Cannot listen at the coordinator's address {address}" in launch.err


def test_a_coordinator_on_another_machine_is_told(tmp_path):
    # 192.0.2.0/24 is for documentation: no machine has such an address.
    options = "--workers 2 --worker-rank 0 --coordinator 192.0.2.1:4000"
    with Launch(tmp_path, options, "print('started')") as launch:
        assert launch.wait() == 2
    assert "192.0.2.1:4000 is not an address of this machine" in launch.err
    with Launch(tmp_path, options.replace("192.0.2.1", "nosuch.invalid"), "print('started')") as launch:
        assert launch.wait() == 2
    assert "The coordinator's name nosuch.invalid is not known on this machine: " in launch.err
    assert "nosuch.invalid is not known on this machine: None" not in launch.err


def test_a_launcher_of_another_job_is_refused_and_the_job_starts(tmp_path):
    job = f"--workers 2 --coordinator 127.0.0.1:{free_ports(1)[0]}"
    program = "import os\nprint(os.environ['REPLICAX_JOB_ID'])"
    named = "REPLICAX_JOB_ID"
    with Launch(tmp_path, f"{job} --worker-rank 0 --job-id first", program, env={named: "other"}) as zero:
        with Launch(tmp_path, f"{job} --worker-rank 1", program, "--lr", "0.1", "--rank", "1") as other:
            assert other.wait() == 2
        assert "of the job 'program.py --lr 0.1', but the launcher of worker 0 is of the job 'first'" in other.err
        assert "--job-id" in other.err and not other.out
        with Launch(tmp_path, f"{job} --worker-rank 1", program, env={named: "first"}) as one:
            assert [zero.wait(), one.wait()] == [0, 0], [zero.output, one.output]
    assert zero.out.split()[-1] == one.out.split()[-1] == "first"


NO_PS = {"ps": 0, "offered": [], "secret": ""}


def test_a_launched_job_starts_whatever_strangers_send_to_its_port(tmp_path):
    port = free_ports(1)[0]
    options = f"--workers 2 --coordinator 127.0.0.1:{port} --worker-rank"
    join = {
        "op": "join",
        "workers": 2,
        "first": 1,
        "host": "h",
        "addresses": ["a:1"],
        "ps": 0,
        "offered": [],
        "secret": "",
        "job": "program.py",
    }
    wrong = [
        {"workers": "2"},
        {"workers": 1},
        {"first": -5},
        {"first": 2},
        {"first": "a"},
        {"first": True},
        {"host": 1},
    ]
    wrong += [{"ps": -1}, {"ps": "1"}, {"ps": 1}, {"offered": ["a:1"]}, {"offered": 1}, {"secret": None}, {"job": None}]
    wrong += [{"addresses": wrong} for wrong in ([], [1], ["a"], ["a:1", "b:1"], "a:1", {}, None)]
    messages = [5, [1], None, "x", {}, {"op": 5}, {"op": []}, {"op": "join"}, {"op": "done"}, {"op": "failed"}]
    messages += [{"op": "done", "outcomes": [1]}, {"op": "outcome"}, {"op": "alive"}, *({**join, **w} for w in wrong)]
    words = [b"GET / HTTP/1.1\r\n\r\n", b"\xff\xfe\n", b"{" * 100_000, b"[" * 100_000 + b"\n", b"x" * (2 << 20)]
    with Launch(tmp_path, f"{options} 0", "print('hello')") as zero, contextlib.ExitStack() as stack:
        for word in [*words, *(json.dumps(message).encode() + b"\n" for message in messages)]:
            stranger = stack.enter_context(connect(zero, port))
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                stranger.sendall(word)
                with contextlib.suppress(OSError):  # it has been cut off already
                    stranger.shutdown(socket.SHUT_WR)
                while stranger.recv(4096):
                    pass
        for _ in range(400):  # more than are kept
            stack.enter_context(connect(zero, port))
        with Launch(tmp_path, f"{options} 1", "print('hello')") as one:
            assert [zero.wait(), one.wait()] == [0, 0], [zero.output, one.output]
    assert zero.err == one.err == ""


@pytest.mark.thorough
def test_a_member_that_sends_nonsense_is_lost_and_named(tmp_path):
    port = free_ports(1)[0]
    join = {
        "op": "join",
        "workers": 2,
        "first": 1,
        "host": "127.0.0.1",
        "addresses": ["127.0.0.1:9"],
        "ps": 0,
        "offered": [],
        "secret": "",
        "job": "program.py",
    }
    outcome = {"worker": 0, "host": "h", "status": 0, "when": 0.0}
    options = f"--workers 2 --coordinator 127.0.0.1:{port} --worker-rank 0"
    for nonsense in ({"worker": 0}, {"worker": 1, "report": [1]}, {"worker": 1, "tail": [5]}, {"worker": 1, "x": 1}):
        with Launch(tmp_path, options, "for_ever()") as zero, connect(zero, port) as member:
            done = {"op": "done", "outcomes": [{**outcome, **nonsense}]}
            member.sendall(b"".join(json.dumps(message).encode() + b"\n" for message in (join, done)))
            assert zero.wait() == 1, zero.output
        assert "worker 1 failed first: its launcher was lost" in zero.err and "Traceback" not in zero.err


def test_another_program_at_the_coordinators_address_is_reported(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        options = f"--workers 2 --worker-rank 1 --coordinator 127.0.0.1:{server.getsockname()[1]}"
        with Launch(tmp_path, options, "print('started')") as one:
            server.settimeout(60.0)
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                assert one.wait() == 2, one.output
    assert "What listens at the coordinator's address 127.0.0.1:" in one.err and "is no launcher of this job" in one.err


def connect(launch: Launch, port: int) -> socket.socket:
    """Connects when the launcher listens."""
    connections: list[socket.socket] = []

    def attempt() -> bool:
        with contextlib.suppress(ConnectionRefusedError):
            connections.append(socket.create_connection(("127.0.0.1", port), timeout=30.0))
        return bool(connections)

    launch.until(attempt, "a connection")
    return connections[0]


@pytest.mark.sampled(2, others="thorough")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_launcher_that_dies_ends_all(rank, tmp_path):
    program = "print('ready')\nfor_ever()"
    with machines(tmp_path, ["0", "1"], program, "--workers 2") as launches:
        for launch in launches:
            launch.wait_for("ready")
        launches[rank].signal(signal.SIGKILL)
        other = launches[1 - rank]
        assert other.wait() == (1 if rank else 2), other.output
    if rank:
        assert "worker 1 failed first: its launcher was lost" in other.err
    else:
        assert "The launcher of worker 0, at 127.0.0.1:" in other.err


def test_a_worker_that_ends_before_it_joins_is_named_on_all_machines(tmp_path):
    """The others' marks are those of `replicax`, which tells its launcher how it stands."""
    program = """
    if task == 1:
        sys.exit(0)
    path = Path(os.environ["REPLICAX_REPORT_DIR"], f"{task}.waits")
    path.with_suffix(".new").write_text(json.dumps(cluster))
    path.with_suffix(".new").rename(path)
    for_ever()
    """
    with machines(tmp_path, ["0", "1", "2"], program, "--workers 3") as launches:
        assert [launch.wait() for launch in launches] == [1, 1, 1], [launch.output for launch in launches]
    for launch in launches:
        assert "worker 1 failed first: ended with exit status 0 before it joined the job" in launch.err


SOON = {"REPLICAX_HEARTBEAT_TIMEOUT": "4"}


@pytest.mark.sampled(2, others="thorough")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_launcher_that_is_stopped_is_noticed_and_ends_when_it_is_continued(rank, tmp_path):
    """SIGSTOP: the system of its machine goes on to answer for it."""
    with machines(tmp_path, ["0", "1"], "print('ready')\nfor_ever()", "--workers 2", SOON) as launches:
        for launch in launches:
            launch.wait_for("ready")
        stopped, other = launches[rank], launches[1 - rank]
        stopped.signal(signal.SIGSTOP)
        assert other.wait() == (1 if rank else 2), other.output
        stopped.signal(signal.SIGCONT)
        assert stopped.wait() == 1, stopped.output
    if rank:
        assert "worker 1 failed first: its launcher has not answered for " in other.err
        assert "worker 1 failed first: its launcher has not answered for " in stopped.err
    else:
        assert "The launcher of worker 0, at 127.0.0.1:" in other.err and "has not answered for " in other.err
        assert "worker 1 failed first: its launcher was lost" in stopped.err


@pytest.mark.sampled(2, others="thorough")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL"])
def test_a_launcher_ends_its_own_workers_though_the_launcher_of_worker_0_is_stopped(name, tmp_path):
    """On a signal to the launcher itself (SIGTERM), and when its worker is killed (SIGKILL)."""
    number = getattr(signal, name)
    program = "print('I am', os.getpid(), 'here')\nfor_ever()"
    with machines(tmp_path, ["0", "1"], program, "--workers 2 --grace 5", SOON) as launches:
        for launch in launches:
            launch.wait_for("here")
        zero, one = launches
        zero.signal(signal.SIGSTOP)
        if name == "SIGTERM":
            one.signal(signal.SIGTERM)
        else:
            os.kill(int(one.out.split("I am ")[1].split()[0]), signal.SIGKILL)
        assert one.wait() == 128 + number, one.output
        zero.signal(signal.SIGCONT)
        assert zero.wait() in (1, 128 + number), zero.output
    assert "The launcher of worker 0, at 127.0.0.1:" in one.err and "has not answered for " in one.err
    assert {
        "SIGTERM": "interrupted by SIGTERM; all workers here have ended.",
        "SIGKILL": "worker 1 failed first: killed by SIGKILL",
    }[name] in one.err


@pytest.mark.sampled(2, others="thorough")
@pytest.mark.parametrize("rank", [0, 1])
def test_an_interrupt_on_one_machine_ends_all_without_a_restart(rank, tmp_path):
    program = """
    def save(number, frame):
        print("saved")
        sys.exit(0)
    signal.signal(signal.SIGTERM, save)
    print("ready")
    for_ever()
    """
    with machines(tmp_path, ["0", "1"], program, "--workers 2 --max-restarts 3") as launches:
        for launch in launches:
            launch.wait_for("ready")
        launches[rank].signal(signal.SIGTERM)
        assert [launch.wait() for launch in launches] == [143, 143], [launch.output for launch in launches]
    for launch in launches:
        assert "saved" in launch.out
        assert "interrupted by SIGTERM on 127.0.0.1; all workers have ended." in launch.err


def test_an_interrupt_while_waiting_for_the_others_ends_the_launcher(tmp_path):
    with machines(tmp_path, ["1"], "print('started')", "--workers 2") as (launch,):
        # It imports replicax before it handles signals; a descriptor for a socket shows that it has come to connecting.
        launch.until(lambda: any_socket(launch), "a socket")
        launch.signal(signal.SIGINT)
        assert launch.wait() == 130, launch.output
    assert launch.err == "replicax launch: interrupted by SIGINT.\n"


def any_socket(launch: Launch) -> bool:
    found = False
    for pid in launch.processes():
        with contextlib.suppress(OSError):
            found = found or any(
                str(entry.readlink()).startswith("socket:") for entry in Path(f"/proc/{pid}/fd").iterdir()
            )
    return found
