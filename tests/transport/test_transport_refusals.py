"""Who is refused: other secrets, none, plain text, other versions, and whatever else comes to the port."""

from __future__ import annotations

import pytest
from tasks import ENVIRONMENT

# Runs with a task that has the right secret, and looks afterwards whether that goes on.
PROGRAM = """
    import os, sys
    from tasks import echo, raised, task
    def told(request):
        print("a handler was called")
        return {}, []
    with task({"echo": echo, "told": told}, env={"REPLICAX_JOB_SECRET": %(server)r}) as other:
        from replicax._transport.errors import Refused
        from replicax._transport.peer import Peer
        right = os.environ["REPLICAX_JOB_SECRET"]
        os.environ["REPLICAX_JOB_SECRET"] = %(client)r
        peer = Peer(other.address)
        for call in (lambda: peer.wait_until_ready(60), lambda: peer.call("told"), lambda: peer.wait_until_ready(60)):
            error = raised(call)
            assert isinstance(error, Refused) and %(says)r in str(error), error
        peer.close()
        os.environ["REPLICAX_JOB_SECRET"] = %(server)r
        peer = Peer(other.address)
        assert peer.call("echo", {"a": 1}) == ({"a": 1}, [])
        peer.close()
"""


@pytest.mark.parametrize(
    ("server", "client", "says"),
    [
        ("the right secret", "the wrong secret", "has another secret than this one. All tasks of a job have the same"),
        ("the right secret", "none", "has a secret, and REPLICAX_JOB_SECRET is 'none' here"),
        ("none", "the right secret", "sends plain text, and this one has a secret"),
    ],
)
def test_another_secret_and_plain_text_are_refused_and_both_sides_say_so(run_python, server, client, says):
    done = run_python(PROGRAM % {"server": server, "client": client, "says": says}, env=ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a handler was called" not in done.stdout
    if server != "none":
        assert "PEER_DID_NOT_RETURN_A_CERTIFICATE" in done.stderr or "WRONG_VERSION_NUMBER" in done.stderr


SHOWN = {"jax": "JAX", "python": "Python"}


@pytest.mark.parametrize("kind", ["jax", "python"])
def test_another_version_is_refused_and_both_sides_say_which(run_python, kind):
    """Python's too: functions travel as its bytecode, and that of another version can crash it."""
    done = run_python(
        """
        import os
        kind, name = os.environ["KIND"], os.environ["SHOWN"]
        from tasks import echo, raised, task
        with task({"echo": echo}, name="ps 0") as other:
            from replicax._transport import peer as peers
            from replicax._transport.errors import Refused
            own = peers.versions()
            peers.versions = lambda: {**own, kind: "0.0.1"}
            peer = peers.Peer(other.address)
            error = raised(lambda: peer.call("echo"))
            assert isinstance(error, Refused) and "ps 0" in str(error), error
            here, there = str(error).split(", the task that calls it has ")
            assert f"{name} {own[kind]}" in here and f"{name} 0.0.1" in there, error
            peers.versions = lambda: own
            assert peer.call("echo") == ({}, [])
            peer.close()
        """,
        env={**ENVIRONMENT, "KIND": kind, "SHOWN": SHOWN[kind]},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "was refused: ps 0 (" in done.stderr and f"{SHOWN[kind]} 0.0.1" in done.stderr


def test_connection_to_another_task_of_the_cluster_is_refused(run_well):
    """All tasks share a certificate: a swapped address or a redirected connection would mix up their variables."""
    run_well(
        """
        from tasks import echo, raised, task
        with task({"echo": echo}, name="ps 1") as other, task({"echo": echo}, name="a server of functions") as free:
            from replicax._transport.errors import Refused
            from replicax._transport.peer import Peer
            wrong = Peer(other.address, task="ps 0")
            for call in (lambda: wrong.call("echo"), lambda: wrong.wait_until_ready(60)):
                error = raised(call)
                assert isinstance(error, Refused) and "is 'ps 1', expected 'ps 0'. Compare" in str(error), error
            wrong.close()
            for address, expected in ((other.address, "ps 1"), (other.address, None), (free.address, "ps 0")):
                peer = Peer(address, task=expected)
                assert peer.call("echo", {"a": 1}) == ({"a": 1}, [])
                peer.close()
        """,
        env=ENVIRONMENT,
    )


def test_peers_speak_tls_13_and_lanes_nothing_older(run_well):
    """A client that has the secret may choose TLS 1.2 at gRPC's port: gRPC has no setting for the oldest version."""
    run_well(
        """
        import os, ssl, socket, tempfile
        from tasks import SECRET, echo, raised, task
        with task({"echo": echo}) as other:
            from replicax._job.channel import parse
            from replicax._transport.peer import Peer
            from replicax._transport.secret import identity
            peer = Peer(other.address)
            host, port = parse(other.address)
            lanes = peer.wait_until_ready(60)["port"]
            key, certificate = identity(SECRET.encode())
            def version_with(number, newest):
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
                context.check_hostname = False
                context.load_verify_locations(cadata=certificate.decode())
                context.maximum_version = newest
                context.set_alpn_protocols(["h2"])
                with tempfile.NamedTemporaryFile() as file:
                    file.write(key + certificate)
                    file.flush()
                    context.load_cert_chain(file.name)
                with socket.create_connection((host, number), timeout=10) as connection:
                    with context.wrap_socket(connection) as tls:
                        return tls.version()
            for number in (port, lanes):
                assert version_with(number, ssl.TLSVersion.TLSv1_3) == "TLSv1.3"
            assert isinstance(raised(lambda: version_with(lanes, ssl.TLSVersion.TLSv1_2)), ssl.SSLError)
            peer.close()
        """,
        env=ENVIRONMENT,
    )


@pytest.mark.parametrize("which", ["the task's port", "the port of its lanes"])
def test_rubbish_at_a_port_is_ignored(run_python, which):
    done = run_python(
        """
        import os, random, socket, ssl, struct
        from tasks import echo, task
        def told(request):
            print("a handler was called")
            return {}, []
        with task({"echo": echo, "told": told}) as other:
            from replicax._job.channel import parse
            from replicax._transport.peer import Peer
            peer = Peer(other.address)
            at = parse(other.address)
            if os.environ["WHICH"] == "the port of its lanes":
                at = at[0], peer.wait_until_ready(60)["port"]
            peer.close()
            draw = random.Random(0)
            unverified = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
            unverified.set_alpn_protocols(["h2"])
            begun = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
            half = begun.wrap_bio(incoming, outgoing, server_hostname="replicax-job")
            try:
                half.do_handshake()
            except ssl.SSLWantReadError:
                hello = outgoing.read()
            open_ones = []
            for data in (
                b"", b"\\0", draw.randbytes(10), draw.randbytes(100_000), b"GET / HTTP/1.1\\r\\nHost: a\\r\\n\\r\\n",
                b"PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n" + bytes(9), hello, hello[: len(hello) // 2],
                b"\\x16\\x03\\x01\\xff\\xff" + draw.randbytes(100), struct.pack("<Q", 1 << 62),
                b'{"method": "told"}\\n',
            ):
                connection = socket.create_connection(at, timeout=60)
                open_ones.append(connection)  # some stay open, as somebody's would who says nothing
                try:
                    connection.sendall(data)
                except OSError:
                    pass  # it has been closed already
            for _ in range(20):  # TLS without the certificate: the handshake fails at the latest when something is read
                try:
                    with socket.create_connection(at, timeout=60) as connection:
                        with unverified.wrap_socket(connection) as over:
                            over.sendall(b"PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n" + bytes(9))
                            assert not over.recv(1 << 16), "it was answered"
                except OSError:
                    pass
            peer = Peer(other.address)
            assert peer.call("echo", {"a": 1}, timeout=60) == ({"a": 1}, [])
            peer.close()
            for connection in open_ones:
                connection.close()
        """,
        env={**ENVIRONMENT, "WHICH": which},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a handler was called" not in done.stdout


@pytest.mark.parametrize(
    "secret", [ENVIRONMENT["REPLICAX_JOB_SECRET"], pytest.param("none", marks=pytest.mark.thorough)]
)
def test_silent_strangers_beyond_the_limit_of_open_files_do_not_keep_new_clients_out(run_well, secret):
    run_well(
        """
        import resource, socket
        from tasks import echo, started
        LIMIT = 100
        def start():
            from replicax._transport.service import Service
            resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
            service = Service("127.0.0.1:0", {"echo": echo})
            service.start()
            return service.address
        with started(start) as other:
            from replicax._job.channel import parse
            from replicax._transport.peer import Peer
            strangers = [socket.create_connection(parse(other.address), timeout=60) for _ in range(LIMIT + 20)]
            peer = Peer(other.address)
            peer.wait_until_ready(60)
            assert peer.call("echo", {"a": 1}) == ({"a": 1}, [])
            peer.close()
            for stranger in strangers:
                stranger.close()
        """,
        env={**ENVIRONMENT, "REPLICAX_JOB_SECRET": secret, "PYTHONWARNINGS": "ignore"},
    )


def test_who_has_the_secret_and_sends_no_message_of_ours_ends_nothing(run_python):
    done = run_python(
        """
        import struct
        from tasks import SECRET, echo, raised, task
        with task({"echo": echo}) as other:
            import grpc
            from replicax._transport import grpc_settings
            from replicax._transport.peer import Peer
            credentials = grpc_settings.channel_credentials(SECRET.encode())
            with grpc.secure_channel(other.address, credentials, grpc_settings.of_calls()) as channel:
                for data in (b"", b"\\xff" * 100, struct.pack("<I", 1 << 31), b"\\2\\0\\0\\0{}", b"\\2\\0\\0\\0[]"):
                    error = raised(lambda: list(channel.stream_stream("/replicax.Tasks/lane")(iter([data]))))
                    assert error.code() == grpc.StatusCode.UNKNOWN, error
                total = lambda size: struct.pack("<IQ", 0, size)
                for parts in ([total(1 << 62)], [total(10), b"abc"], [total(2), b"abc"]):
                    raised(lambda: list(channel.stream_stream("/replicax.Tasks/lane")(iter(parts))))
                assert not list(channel.stream_stream("/replicax.Tasks/lane")(iter([])))
                raised(lambda: channel.unary_unary("/replicax.Tasks/nothing")(b""))
                raised(lambda: next(channel.unary_stream("/replicax.Tasks/greet")(b"{")))
            peer = Peer(other.address)
            assert peer.call("echo", {"a": 1}) == ({"a": 1}, [])
            peer.close()
        """,
        env=ENVIRONMENT,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_beyond_the_loopback_nothing_is_unpickled_without_a_secret(run_well):
    run_well(
        """
        import os, warnings
        from tasks import raised
        warnings.simplefilter("ignore")
        import replicax as rx
        from replicax.coordinator import Server
        for address in ("0.0.0.0:0", "192.0.2.77:2222"):  # any interface, and an address that this machine lacks
            os.environ["REPLICAX_JOB_SECRET"] = "none"
            error = raised(lambda: Server({"worker": [address]}))
            assert isinstance(error, rx.JobError), error
            for words in ("run code for whoever can reach it", "REPLICAX_JOB_SECRET is 'none'. Make one with `python"):
                assert words in str(error), error
        remote = rx.experimental.rpc.Server.create("grpc", "0.0.0.0:0")  # registered functions alone
        remote.start()
        remote.stop()
        os.environ["REPLICAX_JOB_SECRET"] = "with a secret it may"
        Server({"worker": ["0.0.0.0:0"]})._service.stop()
        """,
        env=ENVIRONMENT,
    )


def test_on_the_loopback_functions_of_datasets_are_sent_without_a_secret_too(run_well):
    run_well(
        """
        from ps_clusters import Cluster
        import replicax as rx
        with Cluster(workers=1, servers=1, processes=True) as cluster:
            coordinator = cluster.coordinator
            iterator = iter(coordinator.create_per_worker_dataset(lambda: rx.data.Dataset.range(3)))
            take = rx.function(lambda iterator: next(iterator))
            assert coordinator.schedule(take, args=(iterator,)).fetch() == 0
        """,
        env={**ENVIRONMENT, "REPLICAX_JOB_SECRET": "none"},
    )
