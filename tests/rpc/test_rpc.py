"""Remote calls of registered functions: facts 155 and 156 over processes, and what they leave open."""

from __future__ import annotations

from concurrent import futures

import pytest
from tasks import ENVIRONMENT

from replicax._rpc.client import StatusOrResult

SERVER = """
    from tasks import raised, started
    import replicax as rx
    rpc = rx.experimental.rpc

    def serve():
        import collections, jax, jax.numpy as jnp
        Pair = collections.namedtuple("Pair", "first second")
        number = rx.TensorSpec([], "int32")
        count, table = rx.Variable(10), rx.Variable(jnp.arange(4.0))
        with jax.enable_x64(True):
            wide = rx.Variable(jnp.array([1 << 40, -3]))

        def add(a, b):
            return a + b
        def bump(x):
            count.assign_add(x)
            return count.read_value()
        def nested(x):
            return {"b": [x["v"] * 2, None], "a": Pair(x["u"][0], (count.read_value() * 0,))}
        def nothing():
            table.assign(table * 2)
        def fails(x):
            raise rx.InvalidArgumentError("not this one")
        def rounds(n):
            return jax.lax.while_loop(lambda i: i < n, lambda i: i + 1, 0)

        server = rpc.Server.create("grpc", "127.0.0.1:0")
        two = [number, number]
        server.register("add", rx.function(add, input_signature=two))
        server.register("concrete", rx.function(add).get_concrete_function(rx.TensorSpec([None]), 3))
        server.register("bump", rx.function(bump, input_signature=[number]))
        server.register("nested", rx.function(nested, input_signature=[{"v": rx.TensorSpec([2]), "u": [number]}]))
        server.register("nothing", rx.function(nothing))
        server.register("table", rx.function(lambda: table))
        server.register("bfloat16", rx.function(lambda x: x, input_signature=[rx.TensorSpec([None], jnp.bfloat16)]))
        server.register("wide", rx.function(lambda: wide))
        server.register("large", rx.function(lambda x: x + 1, input_signature=[rx.TensorSpec([None])]))
        pair, other = Pair(number, [number]), {"v": number, "u": number}
        server.register("pair", rx.function(lambda p, d: p.first + p.second[0] + d["u"], input_signature=[pair, other]))
        server.register("rounds", rx.function(rounds, input_signature=[number]))
        server.start()
        serve.kept = server
        return server.address
"""


@pytest.fixture
def run(run_well):
    return lambda code, server=SERVER: run_well(code, head=server, env=ENVIRONMENT)


def test_values_structures_and_variables_of_a_server_in_another_process(run):
    run("""
    with started(serve) as server:
        import jax, jax.numpy as jnp, numpy as np
        client = rpc.Client.create("grpc", server.address, timeout_in_ms=60_000)
        names = ["add", "bfloat16", "bump", "concrete", "large", "nested", "nothing", "pair", "rounds", "table", "wide"]
        assert client.list() == names and all(hasattr(client, name + "_blocking") for name in names)
        result = client.call("add", args=[jnp.int32(2), 3], output_specs=rx.TensorSpec([], "int32"))
        assert result.is_ok() and isinstance(result.is_ok(), jax.Array) and result.get_value() == 5
        code, message = result.get_error()
        assert code == 0 and code.dtype == np.int64 and message.item() == b""
        assert client.add_blocking(1, 2) == 3 and client.add(1, rx.Variable(4)).get_value() == 5
        assert client.concrete_blocking(jnp.arange(2.0)).tolist() == [3, 4]
        assert client.bump_blocking(5) == 15 and client.bump_blocking(5) == 20
        back = client.nested_blocking({"v": jnp.ones(2), "u": [7]})
        assert back["b"][0].tolist() == [2, 2] and back["b"][1] is None
        assert back["a"].first == 7 and back["a"].second[0] == 0 and type(back["a"]).__name__ == "Pair"
        assert client.nothing_blocking() is None and client.table_blocking().tolist() == [0, 2, 4, 6]
        numbers = jnp.arange(3, dtype=jnp.bfloat16)
        back = client.bfloat16_blocking(numbers)
        assert back.dtype == numbers.dtype and (back == numbers).all()
        wide = client.wide_blocking()
        assert wide.dtype == np.int64 and wide.tolist() == [1 << 40, -3]
        large = np.zeros(3 << 20, np.float32)
        assert (client.large_blocking(large) == 1).all()
        specs = {"a": (rx.TensorSpec([], "int32"), rx.TensorSpec([], "int32")), "b": [rx.TensorSpec([2])]}
        packed = client.call("nested", [{"v": jnp.ones(2), "u": [7]}], specs).get_value()
        assert packed["b"][0].tolist() == [2, 2] and packed["a"][0] == 7
    """)


@pytest.mark.parametrize("way", ["another process", "this one"])
def test_a_function_takes_named_tuples(run, way):
    run(f"""
    import collections, contextlib, types
    here = contextlib.nullcontext(types.SimpleNamespace(address=serve())) if {way == "this one"} else started(serve)
    with here as server:
        Pair = collections.namedtuple("Pair", "first second")
        Other = collections.namedtuple("Other", "first second")
        client = rpc.Client.create("grpc", server.address, timeout_in_ms=60_000)
        for last in ({{"u": 4, "v": 5}}, {{"v": 5, "u": 4}}):
            assert client.pair_blocking(Pair(1, [2]), last) == 7
        assert client.call("pair", [Pair(1, [2]), last], rx.TensorSpec([], "int32")).get_value() == 7
        for wrong in (Other(1, [2]), (1, [2]), Pair(1, (2,)), Pair(1, 2), 1):
            error = raised(lambda: client.pair_blocking(wrong, last))
            assert type(error) is ValueError and "nested structure as what it takes, (Pair(first=0" in str(error), error
    """)


def test_errors_have_tensorflows_codes_and_types(run):
    run("""
    with started(serve) as server:
        import jax.numpy as jnp
        from replicax._base.errors import DeadlineExceededError, UnavailableError
        client = rpc.Client.create("grpc", server.address)
        def check(result, code, kind, *words):
            assert not result.is_ok() and result.get_error()[0] == code, result.get_error()
            text = result.get_error()[1].item().decode()
            error = raised(result.get_value)
            assert type(error) is kind and str(error) == text and all(word in text for word in words), error
        invalid = rx.InvalidArgumentError
        check(client.call("unknown", [1]), 3, invalid, "unknown is not registered", "add, bfloat16")
        check(client.call("add", [1]), 3, invalid, "'add' takes 2 tensors, got 1")
        check(client.add(1.0, 2), 3, invalid, "Argument 0 of 'add'", "int32", "float32")
        check(client.call("add", [[1, 2]] * 2), 3, invalid, "takes 2 tensors, got 4")
        for call in (lambda: client.add_blocking(1), lambda: client.add(1, [2]), lambda: client.nothing(1)):
            assert type(raised(call)) is ValueError and "nested structure" in str(raised(call))
        assert type(raised(lambda: client.add(1, object()))) is TypeError
        specs = rx.TensorSpec([], "int32")
        wrong = client.call("add", [1, 2])
        assert wrong.is_ok() and str(raised(wrong.get_value)) == "Incorrect number of output types specified.0 1"
        wrong = client.call("add", [1, 2], [specs, specs])
        assert str(raised(wrong.get_value)) == "Incorrect number of output types specified.2 1"
        assert "float32" in str(raised(client.call("add", [1, 2], rx.TensorSpec([])).get_value))
        traced = rx.function(lambda x: client.add_blocking(x, x), autograph=False)
        assert "make it outside" in str(raised(lambda: traced(jnp.int32(1))))
        assert client.add_blocking(1, 2) == 3
        check(client.rounds(200_000_000, timeout_in_ms=20), 4, DeadlineExceededError, "0.02 s")
        assert client.add_blocking(1, 2) == 3
        server.end()
        check(client.add(1, 2), 14, UnavailableError, server.address)
    """)


def test_a_call_goes_on_when_its_client_is_deleted(run):
    run("""
    with started(serve) as server:
        import gc, threading, weakref
        n = 30_000_000
        assert rpc.Client.create("grpc", server.address).rounds(n).get_value() == n
        client = rpc.Client.create("grpc", server.address)
        deleted = threading.Event()
        weakref.finalize(client, deleted.set)
        pending = client.rounds(n)
        del client
        gc.collect()
        assert deleted.is_set() and pending.get_value() == n
    """)


def test_calls_from_many_threads_lose_no_update(run):
    run("""
    with started(serve) as server:
        from concurrent.futures import ThreadPoolExecutor
        client = rpc.Client.create("grpc", server.address)
        pending = [client.bump(1) for _ in range(100)]
        with ThreadPoolExecutor(10) as pool:
            list(pool.map(lambda _: rpc.Client.create("grpc", server.address).bump_blocking(1), range(20)))
        values = [int(result.get_value()) for result in pending]
        assert len(set(values)) == 100, values
        assert client.bump_blocking(0) == 10 + 120
    """)


def test_a_client_waits_for_its_server_and_uses_one_that_was_started_again(run):
    run("""
    import threading
    with started(serve) as server:
        address = server.address
    def later():
        import jax.numpy as jnp
        made = rpc.Server.create("grpc", address)
        made.register("one", rx.function(lambda: jnp.float32(1)))
        made.start()
        later.kept = made
        return made.address
    with started(later):
        client = rpc.Client.create("grpc", address)
        assert client.one_blocking() == 1
    """)


def test_a_server_that_is_deleted_or_stopped_listens_no_more(run):
    run(
        """
    import gc, socket
    from tasks import raised
    import replicax as rx
    rpc = rx.experimental.rpc
    for way in ("stop", "delete"):
        server = rpc.Server.create("grpc", "127.0.0.1:0")
        server.register("one", rx.function(lambda: 1.0))
        server.start()
        assert "started already" in str(raised(server.start))
        address = server.address
        client = rpc.Client.create("grpc", address)
        assert client.one_blocking() == 1
        if way == "stop":
            server.stop()
        service = server._service
        del server
        gc.collect()
        service.wait()
        assert not client.one().is_ok()
        late = raised(lambda: rpc.Client.create("grpc", address, timeout_in_ms=300))
        assert type(late).__name__ == "DeadlineExceededError", late
        server = rpc.Server.create("grpc", address)  # the port is free
        server.start()
        server.stop()
    """,
        server="",
    )


def test_what_cannot_be_registered_is_refused(run):
    run(
        """
    from tasks import raised
    import replicax as rx
    server = rx.experimental.rpc.Server.create("grpc", "127.0.0.1:0")
    both = rx.function(lambda x, y=1: x).get_concrete_function(rx.TensorSpec([]), y=rx.TensorSpec([]))
    server.register("both", both)
    def by_name(x, *, y):
        return x
    other = rx.function(by_name).get_concrete_function(rx.TensorSpec([]), y=rx.TensorSpec([]))
    assert "by position alone" in str(raised(lambda: server.register("other", other)))
    assert "Only TF functions" in str(raised(lambda: server.register("python", by_name)))
    """,
        server="",
    )


def test_a_client_with_another_secret_is_refused(run):
    run("""
    import os
    with started(serve) as server:
        os.environ["REPLICAX_JOB_SECRET"] = "another one than the server's"
        error = raised(lambda: rpc.Client.create("grpc", server.address, timeout_in_ms=60_000))
        assert isinstance(error, rx.JobError) and "another secret" in str(error), error
    """)


class Mute(Exception):
    def __str__(self):
        raise KeyError("in __str__")


@pytest.mark.parametrize(
    "error, text", [(TimeoutError("mine"), b"mine"), (Mute(), b"<Mute, whose text cannot be had>")]
)
def test_an_error_of_a_function_is_neither_a_time_limit_nor_lost(error, text):
    answer = futures.Future()
    answer.set_exception(error)
    result = StatusOrResult(answer, 60.0, lambda _: None)
    assert not result.is_ok() and [part.item() for part in result.get_error()] == [2, text]
    with pytest.raises(type(error)) as raised:
        result.get_value()
    assert raised.value is error
