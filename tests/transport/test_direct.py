"""Lanes over connections of their own: who may open one, and what happens where none can be opened."""

from __future__ import annotations

import socket

import pytest
from tasks import ENVIRONMENT


@pytest.fixture
def run(run_well):
    return lambda code, **env: run_well(code, env={**ENVIRONMENT, **env})


def test_calls_that_follow_each_other_use_one_connection(run):
    run("""
        from tasks import echo, task
        with task({"echo": echo}) as other:
            from replicax._transport import peer as peers
            made, lane = [], peers.DirectLane
            peers.DirectLane = lambda *args: made.append(lane(*args)) or made[-1]
            peer = peers.Peer(other.address)
            for timeout in (None, 60, None, 60, 60):
                assert peer.call("echo", {"a": 1}, timeout=timeout) == ({"a": 1}, [])
            assert len(made) == 1, made
            peer.close()
        """)


def test_after_a_burst_of_calls_no_more_than_a_few_connections_stay(run):
    run("""
        import threading
        from tasks import task
        barrier = threading.Barrier(40)
        def together(request):
            barrier.wait(60)
            return {}, []
        with task({"together": together}) as other:
            from concurrent.futures import ThreadPoolExecutor
            from replicax._transport import lanes
            from replicax._transport.peer import Peer
            peer = Peer(other.address)
            for _ in range(2):
                with ThreadPoolExecutor(40) as pool:
                    list(pool.map(lambda _: peer.call("together"), range(40)))
                kept = peer._link._lanes
                assert len(kept._idle) == len(kept._all) == lanes._MOST_IDLE, (kept._idle, kept._all)
            peer.close()
        """)


STRANGERS = {
    "nobody": "at.close()",
    "who hangs up": "serve(lambda one: one.close())",
    "who says nothing": "serve(kept.append)",
    "who sends back what comes": "serve(lambda one: one.sendall(one.recv(32)))",
    "who speaks something else": "serve(lambda one: one.sendall(b'220 mail.example.org ESMTP' + bytes(100)))",
}


@pytest.mark.parametrize("secret", [ENVIRONMENT["REPLICAX_JOB_SECRET"], "none"], ids=["TLS", "plain"])
@pytest.mark.parametrize("who", STRANGERS)
def test_where_another_listens_at_the_port_of_the_lanes_calls_go_over_grpc(run, who, secret):
    done = run(
        f"""
        import socket, threading
        from tasks import echo, task
        kept = []
        def serve(greet):
            def accept():
                while True:
                    kept.append(at.accept()[0])
                    greet(kept[-1])
            threading.Thread(target=accept, daemon=True).start()
        at = socket.create_server(("127.0.0.1", 0))
        port = at.getsockname()[1]
        {STRANGERS[who]}
        with task({{"echo": echo}}, port=port) as other:
            import numpy as np
            from replicax._transport import lanes
            from replicax._transport.peer import Peer
            lanes.PATIENCE = 1.0
            peer = Peer(other.address)
            answer, (array,) = peer.call("echo", {{"a": 1}}, [np.arange(1000)])
            assert answer == {{"a": 1}} and (array == np.arange(1000)).all()
            peer.close()
        """,
        REPLICAX_JOB_SECRET=secret,
    )
    waits = who == "who says nothing" or (who == "who sends back what comes" and secret != "none")
    assert ("no connection to the second port of 127.0.0.1:" in done.stderr) == waits, done.stderr


@pytest.mark.parametrize("secret", [ENVIRONMENT["REPLICAX_JOB_SECRET"], "none"], ids=["TLS", "plain"])
def test_a_connection_that_names_no_greeting_is_closed_before_it_can_send_anything(run, secret):
    run(
        """
        import struct
        from tasks import echo, raised, task
        with task({"echo": echo}) as other:
            from replicax._job.channel import parse
            from replicax._transport.direct import DirectLane
            from replicax._transport.peer import Peer
            peer = Peer(other.address)
            host, port = parse(other.address)[0], peer.wait_until_ready(60)["port"]
            for name in ("0" * 32, "\\x00" * 32):
                assert isinstance(raised(lambda: DirectLane(host, port, peer._secret, name, 5.0)), OSError)
            assert peer.call("echo", {"a": 1}) == ({"a": 1}, [])
            peer.close()
        """,
        REPLICAX_JOB_SECRET=secret,
    )


def test_what_is_no_message_ends_its_connection_alone(run):
    done = run("""
        import struct
        from tasks import echo, task
        with task({"echo": echo}, name="ps 0") as other:
            from replicax._job.channel import parse
            from replicax._transport.direct import DirectLane
            from replicax._transport.peer import Peer
            peer = Peer(other.address)
            host, port = parse(other.address)[0], peer.wait_until_ready(60)["port"]
            listed = struct.pack("<I", 17) + b'[[],"echo",{},[]]'
            for data in (b"", b"\\xff" * 100, struct.pack("<I", 1 << 31), b"\\2\\0\\0\\0{}", b"\\2\\0\\0\\0[]", listed):
                lane = DirectLane(host, port, peer._secret, peer._link._name, 5.0)
                lane._connection.sendall(struct.pack("<Q", len(data)) + data)
                assert not lane._connection.recv(1)
                lane.close()
            lane = DirectLane(host, port, peer._secret, peer._link._name, 5.0)
            lane._connection.sendall(struct.pack("<Q", 1 << 62))  # bytes that no machine has
            assert not lane._connection.recv(1)
            lane.close()
            lane = DirectLane(host, port, peer._secret, peer._link._name, 5.0)
            lane._connection.sendall(struct.pack("<Q", 100) + b"abc")
            lane.close()  # in the middle of a message
            assert peer.call("echo", {"a": 1}) == ({"a": 1}, [])
            peer.close()
        """)
    assert done.stderr.count("replicax: the connection of a caller was ended: ") == 7, done.stderr


def test_a_lane_that_breaks_is_the_end_of_the_connection_and_the_next_call_greets_anew(run):
    run("""
        import socket
        from tasks import echo, raised, task
        with task({"echo": echo}, name="ps 0") as other:
            from replicax._transport.errors import Unreachable
            from replicax._transport.peer import Peer
            peer = Peer(other.address)
            peer.call("echo")
            (lane,) = peer._link._lanes._idle
            socket.socket.shutdown(lane._connection, socket.SHUT_RDWR)
            error = raised(lambda: peer.call("echo"))
            assert isinstance(error, Unreachable) and f"ps 0 ({other.address}) is gone" in str(error), error
            assert peer.call("echo", {"a": 1}) == ({"a": 1}, [])
            peer.close()
        """)


@pytest.mark.parametrize("secret", [ENVIRONMENT["REPLICAX_JOB_SECRET"], "none"], ids=["TLS", "plain"])
def test_a_connection_that_ends_while_a_message_is_sent_is_told_in_plain_words(run, secret):
    run(
        """
        from tasks import echo, raised, started
        def start():
            from replicax._transport import direct
            from replicax._transport.service import Service
            def nothing(size):
                raise ValueError(f"There is no memory for a message of {size} bytes.")
            service = Service("127.0.0.1:0", {"echo": echo}, name="ps 0")
            service.start()
            direct.room_for = nothing
            return service.address
        with started(start) as other:
            import numpy as np
            from replicax._transport.errors import Unreachable
            from replicax._transport.peer import Peer
            peer = Peer(other.address)
            error = raised(lambda: peer.call("echo", arrays=[np.ones(64 << 20, np.uint8)]))
            assert isinstance(error, Unreachable), error
            assert str(error).startswith(f"The task at ps 0 ({other.address}) is gone or does not answer: "), error
            assert "_ssl.c" not in str(error), error
            peer.close()
        """,
        REPLICAX_JOB_SECRET=secret,
    )


def test_a_service_that_has_stopped_answers_no_more_though_connections_are_not_cut_yet(run):
    run("""
        from tasks import raised, started
        def start():
            from replicax._transport.handlers import Caller
            from replicax._transport.service import Service
            def stop(request):
                service.stop()
                return {}, []
            Caller.close = lambda self: None  # which cuts connections, perhaps a moment later
            service = Service("127.0.0.1:0", {"stop": stop})
            service.start()
            return service.address
        with started(start) as other:
            from replicax._job.channel import parse
            from replicax._transport.direct import DirectLane
            from replicax._transport.peer import Peer
            from replicax._transport.wire import Message
            peer = Peer(other.address)
            host, port = parse(other.address)[0], peer.wait_until_ready(60)["port"]
            name = peer._link._name
            lane = DirectLane(host, port, peer._secret, name, 5.0)
            assert isinstance(raised(lambda: lane.call(Message([name, "stop", {}]))), ConnectionError)
            lane.close()
            peer.close()
        """)


@pytest.mark.thorough
def test_as_many_strangers_as_there_may_be_keep_nobody_out(run):
    run("""
        import socket
        from tasks import echo, task
        with task({"echo": echo}) as other:
            from replicax._job.channel import parse
            from replicax._transport import direct
            from replicax._transport.peer import Peer
            first = Peer(other.address)
            at = parse(other.address)[0], first.wait_until_ready(60)["port"]
            strangers = [socket.create_connection(at, timeout=60) for _ in range(direct._STRANGERS)]
            refused = socket.create_connection(at, timeout=60)
            assert not refused.recv(1)  # one more is closed
            second = Peer(other.address)
            for peer in (first, second):
                assert peer.call("echo", {"a": 1}, timeout=60) == ({"a": 1}, [])
                peer.close()
            for stranger in (*strangers, refused):
                stranger.close()
        """)


def test_callers_that_come_at_once_get_connections_one_after_the_other(run):
    run("""
        import threading
        from tasks import echo, started
        def start():
            import time
            from replicax._transport import direct
            from replicax._transport.service import Service
            prepare = direct._prepare
            def slowly(connection):
                time.sleep(0.05)
                prepare(connection)
            direct._STRANGERS, direct._TURN, direct._prepare = 1, 60.0, slowly
            service = Service("127.0.0.1:0", {"echo": echo})
            service.start()
            return service.address
        with started(start) as other:
            from concurrent.futures import ThreadPoolExecutor
            from replicax._transport.direct import DirectLane
            from replicax._transport.peer import Peer
            peers = [Peer(other.address) for _ in range(8)]
            barrier = threading.Barrier(len(peers))
            def call(peer):
                peer.wait_until_ready(60)
                barrier.wait(60)
                peer.call("echo", {"a": 1}, timeout=60)
                (lane,) = peer._link._lanes._all
                return type(lane)
            with ThreadPoolExecutor(len(peers)) as pool:
                assert set(pool.map(call, peers)) == {DirectLane}
            for peer in peers:
                peer.close()
        """)


def test_a_port_that_cannot_be_reached_takes_half_of_the_time_of_a_call_at_most(run):
    run("""
        import socket
        from tasks import echo, task
        silent = socket.create_server(("127.0.0.1", 0))
        with task({"echo": echo}, port=silent.getsockname()[1]) as other:
            from replicax._transport import lanes
            from replicax._transport.peer import Peer
            lanes.PATIENCE = 60.0
            peer = Peer(other.address)
            peer.wait_until_ready(60)
            assert peer.call("echo", {"a": 1}, timeout=10) == ({"a": 1}, [])
            peer.close()
        """)


@pytest.mark.parametrize("port", [0, None], ids=["direct lanes", "gRPC's streams"])
def test_a_process_that_is_forked_leaves_the_connections_of_its_parent_alone(run, port):
    """It has another process number, which is all that is tried here: gRPC itself may abort in a forked process."""
    run(f"""
        import os, types
        from tasks import echo, raised, task
        with task({{"echo": echo}}, port={port}) as other:
            from replicax._transport import lanes
            from replicax._transport.peer import Peer
            peer = Peer(other.address)
            peer.call("echo")
            lost = []
            peer.watch(lost.append)
            lanes.os = types.SimpleNamespace(getpid=lambda: 0)
            error = raised(lambda: peer.call("echo"))
            assert isinstance(error, RuntimeError) and "forked" in str(error), error
            peer._link._lanes.close()
            lanes.os = os
            for index in range(2):
                assert peer.call("echo", {{"a": index}}, timeout=60) == ({{"a": index}}, [])
            assert not lost, lost
            peer.close()
        """)


def test_a_service_keeps_nothing_of_lanes_that_have_ended(run):
    run("""
        import time
        from tasks import echo, raised, task
        def slow(request):
            time.sleep(1)
            return {}, []
        def kept(request):
            return {"count": len(request.caller._on_close)}, []
        with task({"slow": slow, "kept": kept}) as other:
            from replicax._transport.errors import TimedOut
            from replicax._transport.peer import Peer
            peer = Peer(other.address)
            before = peer.call("kept")
            for _ in range(3):
                assert isinstance(raised(lambda: peer.call("slow", timeout=0.2)), TimedOut)
            end = time.monotonic() + 60
            while (found := peer.call("kept")) != before:
                assert time.monotonic() < end, (before, found)
                time.sleep(0.1)
            peer.close()
        """)


def test_a_connection_that_a_service_ends_has_ended_though_a_forked_process_has_it_open(run):
    run("""
        import os, struct, time
        from tasks import forked, task
        def fork(request):
            return {"pid": forked(lambda: time.sleep(60), {})}, []
        with task({"fork": fork}) as other:
            import signal
            from replicax._job.channel import parse
            from replicax._transport.direct import DirectLane
            from replicax._transport.peer import Peer
            peer = Peer(other.address)
            host, port = parse(other.address)[0], peer.wait_until_ready(60)["port"]
            lane = DirectLane(host, port, peer._secret, peer._link._name, 5.0)
            pid = peer.call("fork")[0]["pid"]
            try:
                lane._connection.sendall(struct.pack("<Q", 1 << 62))
                lane._connection.settimeout(20)
                assert not lane._connection.recv(1)
            finally:
                os.kill(pid, signal.SIGKILL)
            lane.close()
            peer.close()
        """)


def test_the_key_is_never_on_disk_as_it_is(run):
    run("""
        import ssl
        from tasks import SECRET
        from replicax._transport import direct
        from replicax._transport.secret import identity
        load, seen = ssl.SSLContext.load_cert_chain, []
        def look(self, path, **options):
            seen.append(open(path, "rb").read())
            return load(self, path, **options)
        ssl.SSLContext.load_cert_chain = look
        for server in (False, True):
            direct._context(SECRET.encode(), server)
        key, certificate = identity(SECRET.encode())
        assert len(seen) == 2 and all(certificate in data and key not in data for data in seen), seen
        assert all(b"-----BEGIN PRIVATE KEY-----" not in data for data in seen), seen
        """)


def test_a_connection_over_which_nothing_comes_any_more_is_given_up_within_a_minute():
    from replicax._transport import direct

    with socket.socket() as connection:
        direct._prepare(connection)
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        options = [getattr(socket, name) for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")]
        idle, interval, count = [connection.getsockopt(socket.IPPROTO_TCP, option) for option in options]
        assert idle + interval * count <= 60


def test_a_service_that_is_dropped_before_it_starts_leaves_no_open_socket(run):
    run("""
        import gc, warnings
        from replicax._transport.service import Service
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            Service("127.0.0.1:0", {}).stop()  # as is one that is stopped then
            service = Service("127.0.0.1:0", {})
            del service
            gc.collect()
        assert not [one for one in seen if one.category is ResourceWarning], seen
        """)
