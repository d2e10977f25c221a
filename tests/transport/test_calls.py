"""Calls between tasks: what arrives, in which process, and what comes back."""

from __future__ import annotations

import pytest
from tasks import ENVIRONMENT


@pytest.fixture
def run(run_well):
    return lambda code, **env: run_well(code, env={**ENVIRONMENT, **env})


@pytest.fixture(params=[0, None], ids=["direct lanes", "gRPC's streams"])
def run_over(run, request):
    """Runs a program in which the calls of a task with `port=PORT` go over the one kind of lane, or the other."""
    return lambda code: run(code.replace("PORT", str(request.param)))


def test_heads_and_arrays_come_back_as_they_were_sent(run_over):
    run_over("""
        from tasks import echo, task
        with task({"echo": echo}, name="worker 1", port=PORT) as other:
            import jax, jax.numpy as jnp, numpy as np
            from replicax._transport.peer import Peer
            peer = Peer(other.address)
            found = peer.wait_until_ready(60)
            assert found["name"] == "worker 1" and found["jax"] == jax.__version__, found
            assert peer.call("echo") == ({}, [])
            head = {"a": [1, 2.5, None, True], "text": "ü", "b": {"c": {}}}
            sent = [jnp.arange(6).reshape(2, 3), np.float64(2.5), np.zeros((0, 3)), jnp.ones(3, jnp.bfloat16),
                    np.array([b"x", b"yz"], object), jax.random.key(3)]
            answer, arrays = peer.call("echo", head, sent)
            assert answer == head, answer
            for one, two in zip(sent, arrays, strict=True):
                assert one.dtype == two.dtype and one.shape == two.shape, (one, two)
                if not jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
                    assert np.array_equal(np.asarray(one), two) and not two.flags.writeable, (one, two)
            assert (jax.random.key_data(arrays[-1]) == jax.random.key_data(sent[-1])).all()
            peer.close()
        """)


def test_large_arrays_go_both_ways_and_all_bytes_are_counted(run_over):
    run_over("""
        from tasks import task
        def first_and_last(request):
            (array,) = request.arrays
            assert not array.flags.writeable and array.ctypes.data % 64 == 0
            return {"size": array.nbytes, "sum": int(array[0]) + int(array[-1])}, []
        def twos(request):
            import numpy as np
            return {}, [np.full(request.head["count"], 2, np.uint8), np.arange(3)]
        with task({"count": first_and_last, "twos": twos}, port=PORT) as other:
            import numpy as np
            from replicax._transport.peer import Peer, _RemoteLink
            sizes, call = [], _RemoteLink._sent
            def counted(link, message, *args):
                data = call(link, message, *args)
                sizes.append((message.size, len(data)))
                return data
            _RemoteLink._sent = counted
            peer = Peer(other.address)
            array = np.zeros(20 << 20, np.uint8)
            array[0], array[-1] = 1, 2
            assert peer.call("count", {}, [array]) == ({"size": 20 << 20, "sum": 3}, [])
            ((sent, received),) = sizes
            assert array.nbytes < sent < array.nbytes + 1000 and received < 1000
            answer, (back, three) = peer.call("twos", {"count": 20 << 20})
            assert back.nbytes == 20 << 20 and (back == 2).all() and three.tolist() == [0, 1, 2]
            assert array.nbytes < sizes[1][1] < array.nbytes + 1000
            peer.close()
        """)


@pytest.mark.thorough
def test_many_threads_call_at_the_same_time(run_over):
    run_over("""
        import threading
        from tasks import task
        barrier = threading.Barrier(40)
        def together(request):
            barrier.wait(60)  # 40 calls are under way
            return {"index": request.head["index"]}, request.arrays
        with task({"together": together}, port=PORT) as other:
            import numpy as np
            from concurrent.futures import ThreadPoolExecutor
            from replicax._transport.peer import Peer
            peer = Peer(other.address)
            def call(index):
                answer, (array,) = peer.call("together", {"index": index}, [np.full(1000 + index * 30_000, index)])
                assert answer == {"index": index} and (array == index).all() and len(array) == 1000 + index * 30_000
            with ThreadPoolExecutor(40) as pool:
                list(pool.map(call, range(40)))
            peer.close()
        """)


def test_exceptions_of_handlers_come_out_of_the_call_and_the_service_goes_on(run):
    run("""
        import sys, traceback
        from tasks import echo, raised, task
        import replicax as rx
        class Own(Exception):
            def __init__(self, a, b):
                super().__init__(a, b)
                self.b = b
        class Locked(Exception):
            def __init__(self):
                import threading
                super().__init__("has a lock")
                self.lock = threading.Lock()
        class Mute(Exception):
            def __str__(self):
                raise KeyError("in __str__")
        def fails(request):
            kind = request.head["kind"]
            if kind == "exit":
                sys.exit(3)
            if kind == "cause":
                try:
                    {}["missing"]
                except KeyError as error:
                    raise ValueError("with a cause") from error
            errors = {"own": Own(1, [2]), "rx": rx.InvalidArgumentError("no"), "locked": Locked(), "mute": Mute()}
            raise errors[kind]
        with task({"fails": fails, "echo": echo}, name="worker 1") as other:
            from replicax._transport.peer import Peer
            peer = Peer(other.address)
            def kind(name):
                return raised(lambda: peer.call("fails", {"kind": name}))
            own = kind("own")
            assert type(own) is Own and own.args == (1, [2]) and own.b == [2]
            (note,) = own.__notes__
            assert note.startswith(f"On worker 1 ({other.address}):") and "in fails" in note, note
            assert type(kind("rx")) is rx.InvalidArgumentError
            error = kind("cause")
            assert type(error) is ValueError and "KeyError: 'missing'" in error.__notes__[0]
            error = kind("locked")
            assert isinstance(error, RuntimeError) and str(error) == "Locked: has a lock", error
            error = kind("mute")
            assert type(error) is Mute and "in fails" in error.__notes__[0] and "Mute" in error.__notes__[0], error
            error = kind("exit")
            assert isinstance(error, RuntimeError) and str(error) == "SystemExit: 3", error
            assert "no method 'nothing' here, but echo, fails" in str(raised(lambda: peer.call("nothing")))
            error = raised(lambda: peer.call("echo", {"a": b"bytes"}))
            assert isinstance(error, TypeError) and "JSON" in str(error), error
            assert peer.call("echo", {"a": 1}) == ({"a": 1}, [])
            peer.close()
        """)


def test_without_a_secret_nothing_is_unpickled(run):
    done = run(
        """
        from tasks import raised, task
        class Own(Exception):
            def __reduce__(self):
                return print, ("unpickled",)
        def fails(request):
            raise Own("no") if request.head["own"] else KeyError("k")
        with task({"fails": fails}) as other:
            from replicax._transport.peer import Peer
            peer = Peer(other.address)
            assert str(raised(lambda: peer.call("fails", {"own": True}))) == "Own: no"
            assert type(raised(lambda: peer.call("fails", {"own": False}))) is KeyError
            peer.close()
        """,
        REPLICAX_JOB_SECRET="none",
    )
    assert "unpickled" not in done.stdout
    assert done.stderr.count("neither authenticate each other nor encrypt") == 2  # once in each process


def test_a_call_that_takes_too_long_ends_by_its_timeout(run_over):
    run_over("""
        import threading
        from tasks import echo, raised, task
        def forever(request):
            threading.Event().wait()
        with task({"forever": forever, "echo": echo}, port=PORT) as other:
            from replicax._base.errors import DeadlineExceededError
            from replicax._transport.peer import Peer
            peer = Peer(other.address)
            error = raised(lambda: peer.call("forever", timeout=0.3))
            assert isinstance(error, DeadlineExceededError) and "call of 'forever' within 0.3 s" in str(error), error
            assert peer.call("echo", timeout=60) == ({}, [])
            peer.close()
        """)


def test_tasks_of_one_process_hand_over_arrays_as_they_are(run):
    run("""
        import threading
        import numpy as np
        from tasks import raised
        from replicax._base.errors import UnavailableError
        from replicax._transport.peer import Peer
        from replicax._transport.service import Service
        closed, lost = threading.Event(), threading.Event()
        def same(request):
            request.on_close(closed.set)
            return {"thread": threading.get_ident(), "local": request.caller.local}, request.arrays
        def fails(request):
            raise KeyError("k")
        service = Service("localhost:0", {"same": same, "fails": fails})
        peer = Peer(service.address)
        assert isinstance(raised(lambda: peer.call("same")), UnavailableError)  # it has not started
        service.start()
        assert peer.wait_until_ready(60)
        array = np.zeros(3)
        answer, (back,) = peer.call("same", {}, [array])
        assert back is array and answer == {"thread": threading.get_ident(), "local": True}
        assert type(raised(lambda: peer.call("fails"))) is KeyError
        assert Peer(service.address.replace("localhost", "127.0.0.1")).call("same", {}, [array])[1][0] is array
        peer.watch(lambda error: lost.set())
        service.stop()
        service.wait()
        assert lost.wait(60) and closed.wait(60)
        assert isinstance(raised(lambda: peer.call("same")), UnavailableError)
        again = Service(service.address, {"same": same})
        again.start()
        assert peer.wait_until_ready(60) and peer.call("same")
        again.stop()
        """)


def test_grpc_is_imported_where_it_is_used_alone(run):
    run("""
        import sys
        import replicax._transport.service, replicax._transport.peer
        replicax._transport.peer.Peer("127.0.0.1:1")
        assert not {"grpc", "cryptography"} & set(sys.modules)
        """)


def test_a_program_ends_although_its_service_still_runs(run):
    run("""
        from tasks import echo, task
        from replicax._transport.service import Service
        with task({"echo": echo}) as other:
            from replicax._transport.peer import Peer
            service = Service("127.0.0.1:0", {"echo": echo})
            service.start()
            Peer(other.address).call("echo")
            print("done")
        """)


def test_an_address_that_is_taken_or_not_of_this_machine_is_named(run):
    run("""
        from tasks import echo, raised
        from replicax._transport.service import Service
        first = Service("127.0.0.1:0", {"echo": echo})
        error = raised(lambda: Service(first.address, {"echo": echo}))
        assert isinstance(error, OSError) and f"listen at {first.address}" in str(error), error
        assert "another program listens there" in str(error), error
        """)


def test_a_service_can_be_stopped_by_a_call_and_ends_those_under_way(run):
    run("""
        import os, threading
        from tasks import echo, raised, started
        def start():
            from replicax._transport.service import Service
            def stop(request):
                service.stop()
                return {}, []
            def forever(request):
                os.write(writing, b"b")
                threading.Event().wait()
            service = Service("127.0.0.1:0", {"stop": stop, "forever": forever})
            service.start()
            return service.address
        reading, writing = os.pipe()
        with started(start) as other:
            from replicax._base.errors import UnavailableError
            from replicax._transport.peer import Peer
            peer, found, lost = Peer(other.address), [], threading.Event()
            thread = threading.Thread(target=lambda: found.append(raised(lambda: peer.call("forever"))))
            thread.start()
            assert os.read(reading, 1) == b"b"
            peer.watch(lambda error: lost.set())
            found.append(raised(lambda: peer.call("stop")))
            thread.join(60)
            assert lost.wait(60) and len(found) == 2
            assert all(isinstance(error, UnavailableError) and other.address in str(error) for error in found), found
            peer.close()
        """)


def test_closing_a_peer_ends_its_calls_and_waits(run_over):
    run_over("""
        import os, threading
        from tasks import raised, task
        reading, writing = os.pipe()
        def forever(request):
            os.write(writing, b"b")
            threading.Event().wait()
        with task({"forever": forever}, port=PORT) as other:
            from replicax._transport.peer import Peer
            found = []
            def ends(peer, call, begun):
                thread = threading.Thread(target=lambda: found.append(raised(call)))
                thread.start()
                begun()
                peer.close()
                thread.join(60)
                assert "was closed here" in str(found.pop())
            peer, nobody = Peer(other.address), Peer("127.0.0.1:1")
            ends(peer, lambda: peer.call("forever"), lambda: os.read(reading, 1))
            ends(nobody, nobody.wait_until_ready, lambda: None)
        """)


def test_a_connection_that_ends_while_a_message_is_made_is_said_to_be_gone(run):
    """A message waits for the arrays in it, which JAX may still compute."""
    run("""
        from tasks import echo, raised, task
        with task({"echo": echo}) as other:
            import numpy as np
            from replicax._transport.errors import Unreachable
            from replicax._transport.peer import Peer
            peer = Peer(other.address)
            peer.call("echo")
            class Late:
                def __array__(self, dtype=None, copy=None):
                    peer.close()
                    return np.zeros(3)
            error = raised(lambda: peer.call("echo", {}, [Late()]))
            assert isinstance(error, Unreachable) and other.address in str(error), repr(error)
        """)
