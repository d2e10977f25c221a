"""Tasks that are killed, stopped, or started again, as the other side notices it."""

from __future__ import annotations

import pytest
from tasks import ENVIRONMENT


@pytest.fixture
def run(run_well):
    return lambda code: run_well(code, env=ENVIRONMENT)


@pytest.mark.parametrize("number", ["SIGKILL", "SIGSTOP"])
def test_a_task_that_is_killed_or_stopped_is_noticed(run, number):
    run(f"""
        import signal, threading
        from tasks import echo, raised, task
        arrived = threading.Event()
        def forever(request):
            threading.Event().wait()
        with task({{"echo": echo, "forever": forever}}, name="worker 1") as other:
            from replicax._base.errors import UnavailableError
            from replicax._transport.peer import Peer
            peer = Peer(other.address)
            peer.wait_until_ready(60)
            lost, failed = [], []
            noticed = threading.Event()
            def on_lost(error):
                lost.append(error)
                failed.append(raised(lambda: peer.call("echo", timeout=60)))  # who is told may call
                noticed.set()
            peer.watch(on_lost)
            waiting = []
            thread = threading.Thread(target=lambda: waiting.append(raised(lambda: peer.call("forever"))))
            thread.start()
            other.send(signal.{number})
            assert noticed.wait(60)
            thread.join(60)
            for error in (*lost, *failed, *waiting):
                assert isinstance(error, UnavailableError) and other.address in str(error), error
            assert "worker 1" in str(lost[0]) and len(lost) == len(failed) == len(waiting) == 1, (lost, failed, waiting)
            told = threading.Event()
            peer.watch(lambda error: told.set())
            assert told.wait(60)  # of a task that is gone already
            peer.close()
        """)


@pytest.mark.thorough
def test_a_task_that_is_busy_is_not_taken_for_dead(run):
    run("""
        import ctypes
        from tasks import task
        def busy(request):
            ctypes.PyDLL(None).sleep(request.head["seconds"])  # holds Python's lock all the time
            return {}, []
        with task({"busy": busy}) as other:
            from replicax._transport.peer import Peer
            peer = Peer(other.address)
            lost = []
            peer.wait_until_ready(60)
            peer.watch(lost.append)
            peer.call("busy", {"seconds": 8})  # silent tasks are taken for dead after 5
            assert not lost
            peer.close()
        """)


@pytest.mark.thorough
def test_a_slow_network_is_not_taken_for_a_dead_task(run):
    run("""
        import socket, threading, time
        from tasks import task
        SIZE = 8 << 20  # for which the network takes 8 s in each direction
        def put(request):
            return {"size": request.arrays[0].nbytes}, []
        def get(request):
            import numpy as np
            return {}, [np.ones(SIZE, np.uint8)]
        with task({"put": put, "get": get}, port=None) as other:
            from replicax._job.channel import parse
            from replicax._transport.peer import Peer
            listener = socket.create_server(("127.0.0.1", 0))
            def pass_on(source, sink):
                while data := source.recv(1 << 16):
                    time.sleep(len(data) / 1e6)
                    sink.sendall(data)
            def accept():
                while True:
                    near, far = listener.accept()[0], socket.create_connection(parse(other.address))
                    for pair in ((near, far), (far, near)):
                        threading.Thread(target=pass_on, args=pair, daemon=True).start()
            threading.Thread(target=accept, daemon=True).start()
            import numpy as np
            peer = Peer("127.0.0.1:%d" % listener.getsockname()[1])
            peer.wait_until_ready(60)
            lost, found = [], []
            peer.watch(lost.append)
            back = threading.Thread(target=lambda: found.extend(peer.call("get")[1]))
            back.start()
            assert peer.call("put", {}, [np.ones(SIZE, np.uint8)])[0] == {"size": SIZE}
            back.join()
            assert found[0].nbytes == SIZE and not lost
        """)


def test_a_task_that_is_started_again_is_another_instance_and_is_called_again(run):
    run("""
        import signal, threading
        from tasks import echo, raised, task
        # Forked before gRPC is used here; it waits for the address to become free.
        import os
        reading, writing = os.pipe()
        def second(address):
            from replicax._transport.service import Service
            assert os.read(reading, 1) == b"g"
            service = Service(address, {"echo": echo, "who": who}, name="again")
            service.start()
            service.wait()
        def who(request):
            return {"pid": os.getpid()}, []
        with task({"echo": echo, "who": who}) as other:
            address = other.address
            child = os.fork()
            if not child:
                second(address)
            try:
                from replicax._base.errors import UnavailableError
                from replicax._transport.peer import Peer
                peer, early = Peer(address), Peer(address)
                first = peer.wait_until_ready(60)
                assert peer.call("who")[0]["pid"] == other.pid and early.call("echo")
                lost = threading.Event()
                peer.watch(lambda error: lost.set())
                other.end()
                assert lost.wait(60)
                os.write(writing, b"g")
                found = peer.wait_until_ready(60)
                assert found["instance"] != first["instance"] and found["name"] == "again", found
                assert peer.call("who")[0]["pid"] == child
                peer.close(), early.close()
            finally:
                os.kill(child, signal.SIGKILL)
        """)


def test_a_service_that_was_started_again_refuses_calls_that_were_meant_for_the_one_before(run):
    run("""
        from tasks import echo, raised, task
        with task({"echo": echo}) as other:
            from replicax._base.errors import UnavailableError
            from replicax._transport.peer import Peer
            peer = Peer(other.address)
            assert peer.call("echo", {"a": 1}) == ({"a": 1}, [])
            peer._link._name = "as it was called by the task before"
            error = raised(lambda: peer.call("echo"))
            assert isinstance(error, UnavailableError) and "was started again" in str(error), error
            assert peer.call("echo", {"a": 1}) == ({"a": 1}, [])  # greets it anew
            peer.close()
        """)


def test_a_service_is_told_when_a_caller_is_gone(run):
    run("""
        import os, signal, threading
        from tasks import started
        reading, writing = os.pipe()
        def stay(request):
            request.on_close(lambda: os.write(writing, b"c"))
            return {}, []
        def start():
            from replicax._transport import grpc_settings
            from replicax._transport.service import Service
            grpc_settings._MUCH = 3000  # milliseconds of silence, in place of 20 s
            service = Service("127.0.0.1:0", {"stay": stay})
            service.start()
            return service.address
        with started(start) as other:
            for way in ("SIGKILL", "SIGSTOP", "close"):
                if not (caller := os.fork()):
                    from replicax._transport.peer import Peer
                    peer = Peer(other.address)
                    peer.call("stay")
                    if way == "close":
                        peer.close()
                    os.write(writing, b"r")
                    threading.Event().wait()
                if way != "close":
                    assert os.read(reading, 1) == b"r"
                    os.kill(caller, getattr(signal, way))
                assert {os.read(reading, 1) for _ in range(1 + (way == "close"))} >= {b"c"}
                os.kill(caller, signal.SIGKILL)
                os.waitpid(caller, 0)
        """)


def test_a_task_that_does_not_come_up_is_named_with_the_reason(run):
    run("""
        from tasks import raised
        from replicax._base.errors import DeadlineExceededError, UnavailableError
        from replicax._transport.peer import Peer
        import socket
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = "127.0.0.1:%d" % free.getsockname()[1]
        peer = Peer(address)
        error = raised(lambda: peer.wait_until_ready(1))
        assert isinstance(error, DeadlineExceededError), error
        assert address in str(error) and "Connection refused" in str(error), error
        error = raised(lambda: peer.call("anything"))
        assert isinstance(error, UnavailableError) and address in str(error), error
        peer.close()
        assert "was closed here" in str(raised(lambda: peer.call("anything")))
        assert "was closed here" in str(raised(lambda: peer.wait_until_ready(60)))
        """)


def test_a_stopped_task_is_lost_after_the_heartbeat_timeout_of_all_jobs(monkeypatch):
    from replicax._transport import grpc_settings

    def silences() -> list[int]:
        of = grpc_settings.of_greetings(), grpc_settings.of_calls(), grpc_settings.of_server()
        found = [dict(options) for options in of]
        names = "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms"
        assert all(len({options[name] for name in names}) == 1 for options in found)
        return [options[names[0]] for options in found]

    monkeypatch.delenv("REPLICAX_HEARTBEAT_TIMEOUT", raising=False)
    assert silences() == [28_000] * 3  # after a ping's interval of 2 s
    for seconds, found in (("2", [3000, 20_000, 20_000]), ("60", [58_000] * 3), ("1e9", [2**31 - 1] * 3)):
        monkeypatch.setenv("REPLICAX_HEARTBEAT_TIMEOUT", seconds)
        assert silences() == found
