"""What a job of several processes is made of, each part by itself."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
import time
import types

import jax
import jax.numpy as jnp
import pytest

import replicax as rx
from replicax._job import diagnosis as _diagnosis
from replicax._job import join, process_exit, state
from replicax._job.call_log import CallLog
from replicax._job.channel import Channel, Messages, Relay, encoded, interface, parse, resolved, wait
from replicax._job.diagnosis import Peer
from replicax._job.monitor import Monitor
from replicax._job.preflight import Gathering
from replicax._job.state import Job
from replicax._launch._outcome import read_mark


def ready(calls: CallLog, label: str) -> None:
    calls.begin(label).dispatched(jnp.ones(2).block_until_ready())


class NeverReady:
    """An output of a call that waits for others."""

    nbytes = 8
    done = False

    def is_ready(self):
        return self.done

    def is_deleted(self):
        return False


def test_calls_are_counted_and_compared():
    one, other, swapped = CallLog(), CallLog(), CallLog()
    for label in ("a", "b", "c"):
        ready(one, label), ready(other, label)
    for label in ("b", "a", "c"):
        ready(swapped, label)
    assert one.last.number == 3 and one.last == other.last and other.digest_at(3) != swapped.last.digest
    assert [one.digest_at(n) == swapped.digest_at(n) for n in range(4)] == [True, False, False, False]
    assert one.digest_at(4) is None
    assert one.oldest() is None
    for _ in range(2000):
        ready(one, "more")
    assert one.digest_at(3) is None and one.digest_at(2003) == one.last.digest, "only the latest are remembered"
    assert len(one.made()) == 1024 and one.made()[2003].label == one.last.label == "more"


def test_the_call_log_knows_the_oldest_unfinished_call():
    calls = CallLog()
    first, second = NeverReady(), NeverReady()
    ready(calls, "zeroth")
    calls.begin("first").dispatched(first)
    calls.begin("second").dispatched(second)
    under_dispatch = calls.begin("third")
    wait = calls.begin_wait("a message")
    assert (calls.oldest().number, calls.oldest().label) == (2, "first")
    second.done = True
    assert calls.oldest().label == "first"
    first.done = True
    assert calls.oldest() is under_dispatch
    under_dispatch.dispatched(None)  # it has raised
    assert calls.oldest() is wait and calls.oldest(waits=False) is None and wait.number is None
    calls.end_wait(wait)
    calls.end_wait(wait)
    assert calls.oldest() is None


def test_a_call_is_not_late_because_those_before_it_were_slow():
    calls = CallLog()
    first = NeverReady()
    calls.begin("first").dispatched(first)
    second = calls.begin("second")
    second.since -= 100
    first.done = True
    assert calls.oldest() is second and calls.age(second) < 50


def test_large_outputs_are_watched_and_not_held():
    calls = CallLog()

    class Large(NeverReady):
        nbytes = 1 << 20

    output = Large()
    calls.begin("large").dispatched(output)
    assert calls.oldest().label == "large"
    del output
    assert calls.oldest() is None


def test_donated_outputs_are_no_longer_watched():
    calls = CallLog()
    call = calls.begin("step")
    array = jnp.ones(3)
    call.output = array
    array.delete()
    assert calls.oldest() is None


def test_without_a_job_nothing_is_counted():
    assert state.current() is None and state._calls is None
    with state.waiting("a message"):
        pass
    assert state.begin("step") is None
    alone = join.start([("worker", 0)], ["127.0.0.1:1"], 0)
    assert alone.name(0) == "worker 0" and state.current() is None and not jax.distributed.is_initialized()


def test_start_refuses_wrong_addresses_and_a_started_jax():
    with pytest.raises(ValueError, match="one address for each task.*got 2 tasks, 1 addresses and process id 0"):
        join.start([("worker", 0), ("worker", 1)], ["127.0.0.1:1"], 0)
    jnp.ones(1)
    with pytest.raises(RuntimeError, match="^Collective ops must be configured at program startup"):
        join.start([("worker", 0), ("worker", 1)], ["127.0.0.1:1", "127.0.0.1:2"], 0)


def test_time_limits(monkeypatch):
    monkeypatch.setattr(state, "_settings", {})
    monkeypatch.setenv("REPLICAX_STEP_TIMEOUT", "none")
    monkeypatch.setenv("REPLICAX_HEARTBEAT_TIMEOUT", "12.5")
    assert rx.config.job_timeouts() == {"heartbeat": 12.5, "start": 300.0, "step": None}
    rx.config.set_job_timeouts(heartbeat=2, step=7)
    assert rx.config.job_timeouts() == {"heartbeat": 2.0, "start": 300.0, "step": 7.0}
    rx.config.set_job_timeouts(step=float("inf"))
    assert rx.config.job_timeouts()["step"] is None
    state.set_step_timeout(4.0)  # as CommunicationOptions.timeout_seconds does
    assert rx.config.job_timeouts()["step"] == 4.0
    state.set_step_timeout(None)
    assert rx.config.job_timeouts()["step"] is None
    for bad in ({"start": 0}, {"heartbeat": float("inf")}, {"step": float("nan")}):
        with pytest.raises(ValueError, match="is a number of seconds above 0"):
            rx.config.set_job_timeouts(**bad)
    with pytest.raises(ValueError, match="`timeout_seconds` is a number of seconds above 0, or None"):
        state.set_step_timeout(-1)
    monkeypatch.setenv("REPLICAX_START_TIMEOUT", "soon")
    with pytest.raises(rx.JobError, match="REPLICAX_START_TIMEOUT is a number of seconds above 0; got 'soon'"):
        rx.config.job_timeouts()


def channels():
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    return Channel(near), Channel(far)


def received(channel: Channel, count: int) -> list:
    messages, deadline = [], time.monotonic() + 10
    while len(messages) < count and not channel.closed and time.monotonic() < deadline:
        wait([channel], [], 1.0)
        messages += channel.receive()
    return messages


def test_channels_never_block():
    near, far = channels()
    large = {"text": "x" * 1_000_000}
    for _ in range(20):
        near.send(large)
    assert near.unsent  # and the sender goes on
    got: list = []
    while len(got) < 20:
        near.flush()
        got += received(far, 1)
    assert got == [large] * 20 and not near.unsent
    far.close()
    assert received(near, 1) == [] and near.closed
    near.send({"to": "nobody"})
    near.close()


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_messages_do_not_depend_on_how_their_bytes_arrive(size):
    sent = [{"a": 1}, {}, {"text": "line\nbreak \u00e9" * 20}]
    data = b"".join(map(encoded, sent))
    incoming = Messages(longest=1000)
    got = [message for at in range(0, len(data), size) for message in incoming.feed(data[at : at + size])]
    assert got == sent


def test_messages_longer_than_the_limit_are_refused():
    incoming = Messages(longest=10)
    assert list(incoming.feed(b"x" * 10)) == []
    with pytest.raises(ValueError, match="too long a message"):
        list(incoming.feed(b"x"))


@pytest.mark.parametrize("text", [b"GET / HTTP/1.1\r\n\r\n", b"[1, 2]\n", b"\xff\xfe\n"])
def test_channels_close_on_data_that_is_not_a_message(text):
    near, far = channels()
    near.socket.sendall(b'{"a": 1}\n' + text)
    assert received(far, 2) == [{"a": 1}] and far.closed
    near.close()
    far.close()


def test_addresses():
    assert interface("localhost") == interface("127.0.0.1") == "127.0.0.1" and interface("::1") == "::1"
    assert interface(socket.gethostname()) == interface("no.such.host.invalid") == "0.0.0.0"
    assert interface("10.1.2.3") == "0.0.0.0" and interface("fd00::1") == "::"
    for bad in ("host", "host:", ":80", "host:0", "host:65536", "host:http", "a..b:80", "x" * 64 + ":80"):
        with pytest.raises(ValueError, match="An address reads HOST:PORT"):
            parse(bad)
    assert resolved("a..b") == resolved("x" * 64) == resolved("no.such.host.invalid") == []


@contextlib.contextmanager
def answering(*pieces):
    """A port whose holder reads a line of whoever connects, and sends these pieces as long as they are read."""

    def serve():
        connection, _ = server.accept()
        with connection, connection.makefile("rb") as lines, contextlib.suppress(OSError):
            lines.readline()
            for piece in pieces:
                connection.sendall(piece)
                time.sleep(0.01)
            while lines.readline():
                pass

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1]
    thread.join(60)
    assert not thread.is_alive()


def test_a_long_refusal_of_who_holds_the_own_address_is_read():
    gathering = Gathering(Job((("worker", 0), ("worker", 1)), ("127.0.0.1:1", "127.0.0.1:2"), 0), 60.0)
    with answering(encoded({"refused": "no " * 50_000})) as port:
        refused = gathering._refused_by_the_holder("127.0.0.1", port)
    assert refused is not None and refused.startswith("no no no") and len(refused) == 10_000


def test_who_holds_the_own_address_and_sends_byte_by_byte_is_not_waited_for():
    gathering = Gathering(Job((("worker", 0), ("worker", 1)), ("127.0.0.1:1", "127.0.0.1:2"), 0), 60.0)
    with answering(*[b"x"] * 100_000) as port:
        assert gathering._refused_by_the_holder("127.0.0.1", port) is None


def test_addresses_are_checked_before_anything_is_waited_for():
    with pytest.raises(ValueError, match="worker 1: An address reads HOST:PORT.*; got 'b'"):
        join.start([("worker", 0), ("worker", 1)], ["127.0.0.1:1", "b"], 0)


def test_a_relay_stays_open_when_the_other_end_is_gone():
    with socket.create_server(("127.0.0.1", 0)) as server:
        relay = Relay(server.getsockname())
        near = socket.create_connection(parse(relay.address), timeout=5)
        far, _ = server.accept()
        near.sendall(b"ping")
        assert far.recv(10) == b"ping"
        far.sendall(b"pong")
        assert near.recv(10) == b"pong"
        far.close()
    near.sendall(b"is anybody there")
    near.settimeout(0.2)
    with pytest.raises(TimeoutError):
        near.recv(10)
    near.close()


def peers(*counts: int) -> dict[int, Peer]:
    return {i: Peer(f"worker {i}", f"10.0.0.{i}:1", heard=100.0, count=count) for i, count in enumerate(counts)}


def test_the_first_failure_is_the_cause():
    job = peers(5, 5, 5)
    job[1].failed = {"kind": "exception", "message": "ValueError: late", "traceback": "T1", "time": 3.0}
    job[2].failed = {"kind": "exception", "message": "KeyError: early", "traceback": "T2\n", "time": 2.0}
    job[0].lost = "has ended without a word"
    diagnosis = _diagnosis.failure(job)
    assert diagnosis.cause == (2,) and diagnosis.kind == "exception"
    assert diagnosis.text.splitlines() == [
        "worker 2 failed: KeyError: early",
        "T2",
        "worker 1 failed too: ValueError: late",
        "worker 0 has ended without a word",
    ]


def test_a_process_that_hears_of_no_other_one_blames_none():
    job = peers(5, 5, 5)
    job[1].lose_silent(30.0)
    assert _diagnosis.failure(job).cause == (1,)
    job[2].lose_silent(30.0)
    diagnosis = _diagnosis.failure(job)
    assert diagnosis.cause == () and diagnosis.message == (
        "worker 0 has lost contact with all other processes: worker 1 (10.0.0.1:1) has not answered for 30 s; worker 2 "
        "(10.0.0.2:1) has not answered for 30 s"
    )
    job[2].lost, job[2].silent = "has ended without a word", False
    assert _diagnosis.failure(job).cause == (1, 2)


def test_the_diagnosis_names_the_late_process():
    job = peers(4, 3, 4)
    job[0].oldest, job[2].oldest = (4, "step", 9.0), (4, "step", 8.0)
    diagnosis = _diagnosis.stuck(job, 0, 9.0, 101.0)
    assert diagnosis.cause == (1,) and diagnosis.message.endswith('in call 4, "step", which worker 1 has not reached')
    job[1].count = 4
    diagnosis = _diagnosis.stuck(job, 0, 9.0, 101.0)
    assert diagnosis.cause == () and diagnosis.message.endswith("which every process has reached")
    job[1].out_of_reach = {2: "No route to host"}
    job[1].broken = {"message": "Gloo: timed out", "traceback": ""}
    assert _diagnosis.broken(job).message == (
        "worker 1 could not go on: Gloo: timed out; worker 1 cannot reach worker 2 at 10.0.0.2:1 (No route to host)"
    )
    assert _diagnosis.stuck(job, 0, 9.0, 101.0).message.endswith(
        "which every process has reached; worker 1 cannot reach worker 2 at 10.0.0.2:1 (No route to host)"
    )


@pytest.mark.parametrize("call", [(2, "step"), (None, "the end of the data")], ids=["call", "exchange"])
@pytest.mark.parametrize("age, heard, left", [(9.0, 100.0, False), (11.0, 100.0, True), (11.0, 89.5, False)])
def test_a_thread_that_outlives_its_program_has_time_for_its_first_call(age, heard, left, call):
    """And it is not judged by what was heard before the others began to wait."""
    job = peers(2, 0)
    job[0].oldest, job[0].order, job[1].ended, job[1].heard = (*call, age), 1, "'trainer'", heard
    diagnosis = _diagnosis.left(job, 100.5)
    assert (diagnosis is not None) is left
    if diagnosis:
        assert diagnosis.cause == (1,) and diagnosis.message.endswith("its thread 'trainer' still runs")
    job[1].ended, job[1].left = "", True
    assert _diagnosis.left(job, 100.5)


@pytest.mark.parametrize(
    "text, other",
    [
        ("UNKNOWN: Gloo all-reduce failed: Read error [127.0.0.1]:6041: Connection reset by peer", True),
        ("UNAVAILABLE: failed to connect to all addresses", True),
        ("INTERNAL: NCCL operation ncclAllReduce failed: remote process exited", True),
        ("RESOURCE_EXHAUSTED: Out of memory allocating 100 bytes", False),
        ("the connection refused to be made", False),
        ("INTERNAL: shape mismatch", False),
    ],
)
def test_exceptions_caused_by_another_process_are_recognized(text, other):
    assert process_exit.caused_by_another(ValueError(text)) is other
    try:
        try:
            raise RuntimeError(text)
        except RuntimeError as error:
            raise OSError("training failed") from error
    except OSError as error:
        assert process_exit.caused_by_another(error) is other


def test_an_exception_whose_str_raises_is_reported():
    class Failure(Exception):
        def __str__(self):
            raise RuntimeError("no text")

    assert process_exit.one_line(Failure()).endswith("Failure: <exception str() failed>")
    assert not process_exit.caused_by_another(Failure())


def test_a_process_that_is_ending_has_no_stack_to_show(run_python):
    """The program is in no frame of it while the hook prints the exception; it is before."""
    done = run_python(
        """
import sys
from replicax._job import process_exit
sys.excepthook = lambda *_: print(repr(process_exit.main_stack()))
hooks = process_exit.Hooks(None)
hooks._failed = hooks.show
print("program.py" in process_exit.main_stack())
raise ValueError
""",
        fresh=True,
    )
    assert done.stdout.split() == ["True", "''"], done.stdout + done.stderr


@pytest.mark.parametrize("stack", ["", "  File program.py\n"])
def test_a_process_says_where_it_stands_if_the_program_runs(monkeypatch, stack):
    said, reports = [], []

    def finish(status):
        raise SystemExit(status)

    monkeypatch.setattr(process_exit, "say", said.append)
    monkeypatch.setattr(process_exit, "finish", finish)
    process = types.SimpleNamespace(
        me=Peer("worker 0", "a:1", stack=stack),
        process_id=0,
        _signal=None,
        _status=None,
        own=types.SimpleNamespace(record_details=lambda: None, write_report=lambda *report: reports.append(report)),
    )
    with pytest.raises(SystemExit):
        Monitor._obey(process, _diagnosis.Diagnosis("stuck", (1,), "the job is stuck"))
    where = f"worker 0 waits in no call; its main thread:\n{stack.rstrip()}"
    assert said == ["\n".join(["the job is stuck", *([where] if stack else [])])]
    assert reports == [("stuck", "the job is stuck", stack and f"Its main thread:\n{stack}", 1)]


def test_a_worker_that_has_joined_says_so_on_a_full_disk_too(tmp_path, monkeypatch):
    resource = pytest.importorskip("resource")
    monkeypatch.setenv("REPLICAX_REPORT_DIR", str(tmp_path))
    process_exit.mark_waiting(1, ["a:1", "b:2"])
    assert read_mark(tmp_path, 1) == (["a:1", "b:2"], False)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))  # nothing can be written to a file
    try:
        process_exit.mark_joined(1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert read_mark(tmp_path, 1) == (["a:1", "b:2"], True)


def test_reports_are_written_to_the_given_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("REPLICAX_REPORT_DIR", raising=False)
    process_exit.write_report(1, "worker 1", "stuck", "one\ntwo", "", (57, "train"), 0)
    monkeypatch.setenv("REPLICAX_REPORT_DIR", str(tmp_path / "reports"))
    process_exit.write_report(1, "worker 1", "stuck", "one\ntwo", "", (57, "train"), 0)
    report = json.loads((tmp_path / "reports" / "1.json").read_text())
    assert abs(report.pop("time") - time.time()) < 60
    assert (report["process_id"], report["worker"], report["kind"]) == (1, "worker 1", "stuck")
    assert (report["message"], report["traceback"], report["caused_by"]) == ("one", "", 0)
    assert (report["step"], report["call"]) == (57, "train")
    assert [path.name for path in (tmp_path / "reports").iterdir()] == ["1.json"]


@pytest.mark.parametrize("place", range(1, 6))
def test_calls_agree_wherever_ctrl_c_comes(place):
    """The number and the digest belong together, so that the interrupted process is not taken for one that differs.

    Python looks for signals after each call of a C function; the interrupt is raised after one of them at a time.
    """
    calls, same = CallLog(), CallLog()
    for label in ("a", "b", "c"):
        same.begin(label)
    calls.begin("a")
    seen = []

    def profile(frame, event, function):
        if frame.f_code is CallLog.begin.__code__ and event == "c_return":
            seen.append(function)
            if len(seen) == place:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sys.setprofile(profile)
        try:
            calls.begin("b")
        finally:
            sys.setprofile(None)
    assert calls.last.number in (1, 2) and calls.last.digest == same.digest_at(calls.last.number)
    assert calls.begin("b" if calls.last.number == 1 else "c").number == calls.last.number
    assert calls.last.digest == same.digest_at(calls.last.number)


def test_calls_from_several_threads():
    calls = CallLog()
    threads = [threading.Thread(target=lambda: [ready(calls, "x") for _ in range(200)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    same = CallLog()
    for _ in range(800):
        ready(same, "x")
    assert calls.last == same.last and calls.last.number == 800 and calls.oldest() is None


JOB = Job((("chief", 0), ("worker", 0)), ("10.0.0.1:2222", "10.0.0.2:2222"), 0)


@pytest.mark.parametrize(
    "lines, allowed, different",
    [
        (["--lr 0.1", "--lr 0.1"], "", []),
        (["--lr=0.1", "--lr 0.1"], "", []),
        (["--lr 0.1", "--lr 0.2"], "", ["--lr"]),
        (["--shift -1", "--shift -2"], "", ["--shift"]),
        (["--lr 0.1 --amp", "--lr 0.1"], "", ["--amp"]),
        (["--lr 0.1", "--lr 0.2"], "--lr", []),
        (["--lr 0.1 --amp", "--lr 0.2"], "amp, lr", []),
        (["--lr 0.1 data/a", "--lr 0.1 data/b"], "", ["all"]),
        (["--a 1 --b 2", "--b 2 --a 1"], "", ["all"]),
        (["data/a x", "data/b"], "all", []),
        (["--worker_id 0", "--worker_id 1"], "", []),
        (["--job_name=chief --task_index=0", "--job_name=worker --task_index=0"], "", []),
        (["--host 10.0.0.1:2222", "--host 10.0.0.2:2222"], "", []),
        (["--num_workers 0", "--num_workers 2"], "", ["--num_workers"]),  # 2 is no number of a process here
        (["--seed 0", "--seed 1"], "", ["--seed"]),  # it does not say which process this is
    ],
)
def test_command_lines_must_agree_but_for_options_that_say_which_process_it_is(monkeypatch, lines, allowed, different):
    monkeypatch.setenv("REPLICAX_ARGUMENTS_MAY_DIFFER", allowed)
    gathering = Gathering(JOB, 1.0)
    gathering.said = {
        process: {**gathering.said[0], "program": "train.py (5b2c7a3e)", "arguments": line}
        for process, line in enumerate(lines)
    }
    if not different:
        gathering.compare()
        return
    with pytest.raises(rx.JobError, match=r"the command line: chief 0 has .*worker 0 has") as raised:
        gathering.compare()
    assert f"set REPLICAX_ARGUMENTS_MAY_DIFFER={','.join(different)} in the environment of chief 0" in str(raised.value)


@pytest.mark.parametrize("theirs, named", [("second", "'second'"), ("", "'(no name)'")])
def test_a_process_of_another_job_is_refused_with_both_names(monkeypatch, theirs, named):
    monkeypatch.setenv("REPLICAX_JOB_ID", "first")
    gathering = Gathering(JOB, 1.0)
    hello = {**gathering.said[0], "process_id": 1, "job": theirs}
    with contextlib.ExitStack() as stack:
        ours, others = (stack.enter_context(end) for end in socket.socketpair())
        gathering._admit(Channel(ours), hello)
        (answer,) = Messages(1 << 20).feed(others.recv(1 << 16))
    expected = f"chief 0 at 10.0.0.1:2222 belongs to another job: 'first', and this process to {named}."
    assert answer["refused"].startswith(expected) and not gathering.channels
    assert "belong to another job: " in gathering._missing([1])
