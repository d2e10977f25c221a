"""Errors of programs that have to do with variables on parameter servers: what raises them, and who learns of them."""

from __future__ import annotations

import pytest
from ps_clusters import ENVIRONMENT, HEAD

import replicax as rx
from replicax._base import errors
from replicax._base.errors import CancelledError, UnavailableError
from replicax._parameter_server import closures, execution
from replicax._parameter_server.numbers import Numbers
from replicax._parameter_server.remote_value import RemoteValueImpl
from replicax._parameter_server.servers import Servers


@pytest.fixture
def run(run_here):
    return lambda code: run_here(code, head=HEAD)


def test_errors_of_callbacks_in_what_workers_compute_are_raised(run):
    run("""
        def host(x):
            if failing:
                raise KeyError("no such word")
            return np.float32(2 * x)
        with Cluster(workers=1, servers=1) as cluster:
            co = cluster.coordinator
            with cluster.strategy.scope():
                v = rx.Variable(1.0)
            @rx.function
            def step():
                v.assign(jax.pure_callback(host, jax.ShapeDtypeStruct((), "float32"), v.value() + 3))
                return v.value()
            @rx.function
            def loop():
                def body(i, x):
                    checks(x < 3.0, "grew")
                    return x + 1
                v.assign(jax.lax.fori_loop(0, 5, body, v.value()))
            for call in (step, lambda: co.schedule(step).fetch()):
                failing = True
                kind, text, note = raised(call)
                assert kind == "KeyError" and "no such word" in text and "calls back" in note, (kind, text, note)
                assert v.numpy() == 1
                raised(co.join)
                failing = False
                assert call() == 8 and v.numpy() == 8
                v.assign(1.0)
            for call in (loop, lambda: co.schedule(loop).fetch()):
                kind, text, _ = raised(call)
                assert kind == "InvalidArgumentError" and "grew" in text, (kind, text)
                assert v.numpy() == 1
    """)


@pytest.mark.parametrize("kind, does", [("worker", "join"), ("ps", "join"), ("evaluator", "checkpoints_iterator")])
def test_only_the_coordinator_makes_the_strategy(kind, does):
    """Any other task would train beside it, with variables of its own."""
    cluster = rx.ClusterSpec({"chief": ["localhost:1"], "worker": ["localhost:2"], "ps": ["localhost:3"]})
    resolver = rx.cluster_resolver.SimpleClusterResolver(cluster, task_type=kind, task_id=0)
    with pytest.raises(ValueError, match=rf"Only the coordinator.* this task is {kind} 0.*{does}"):
        rx.ParameterServerStrategy(resolver)


@pytest.mark.parametrize("kind", ["foobar", "Chief", ""])
def test_a_task_of_an_unknown_type_makes_no_strategy(kind):
    cluster = rx.ClusterSpec({"worker": ["localhost:2"], "ps": ["localhost:3"]})
    resolver = rx.cluster_resolver.SimpleClusterResolver(cluster, task_type=kind, task_id=0)
    with pytest.raises(ValueError, match=f"Unrecognized task_type: {kind}, valid task types are: .'chief', 'worker'"):
        rx.ParameterServerStrategy(resolver)


def test_a_coordinator_ends_at_once_while_a_worker_refuses_it(run_well):
    program = """
        from replicax._parameter_server import worker_links
        worker_links._PATIENCE = 1e6  # seconds to the next attempt
        refused = threading.Event()
        def begun(link):
            refused.set()
            raise ValueError("refused")
        worker_links.WorkerLink._begun = begun
        cluster = Cluster(workers=1)
        assert refused.wait(60)
    """
    run_well(program, head=HEAD, env=ENVIRONMENT)


def test_errors_of_the_page_have_public_names():
    for name in ("CancelledError", "InvalidArgumentError", "OutOfRangeError", "UnavailableError"):
        assert getattr(rx, name) is getattr(errors, name)


def test_threads_that_drop_variables_at_the_same_time_do_not_disturb_each_other(run):
    run("""
        from collections import deque
        from replicax._parameter_server.servers import Servers
        class Entries(deque):
            def __len__(self):  # another thread takes what was counted
                count = super().__len__()
                self.clear()
                return count
        with Cluster(workers=1) as cluster:
            with cluster.strategy.scope():
                v = rx.Variable(0)
            servers = v._cluster.servers
            servers._dead, servers._dead_programs = Entries(v._storage.places), Entries(["a program"])
            servers.create([], [])
    """)


def test_a_worker_that_cannot_reach_a_server_is_taken_for_lost(run, monkeypatch, capsys):
    """The server's variables are not: what the worker had runs again, and each update counts once."""
    monkeypatch.setattr(Servers, "reach", Servers.reach)  # which the program replaces
    run("""
        from replicax._parameter_server.servers import CutOffError, Servers
        from replicax._transport.errors import Unreachable
        def unreachable(*args):
            session.pulls.wait_for(3)  # until the next closure is there and waits for this one
            raise Unreachable("No route.")

        with Cluster(workers=1) as cluster:
            co = cluster.coordinator
            with cluster.strategy.scope():
                v = rx.Variable(0)
            @rx.function
            def add():
                v.assign_add(1)
            co.schedule(add)
            co.join()
            (session,) = cluster.local("worker")[0]._sessions.values()
            refused, reach = threading.Event(), Servers.reach
            def cut_off(servers, timeout):
                refused.set()
                raise CutOffError("It cannot reach parameter server 0.")
            Servers.reach = cut_off
            session.servers._peers[0].call = unreachable
            for _ in range(10):
                co.schedule(add)
            assert refused.wait(60)
            assert int(v.numpy()) == 1  # this process reaches it
            Servers.reach = reach
            co.join()
            assert int(v.numpy()) == 11
    """)
    said = capsys.readouterr().err
    assert "replicax: the coordinator cannot use worker 0 at " in said and "It cannot reach parameter server 0." in said


def test_a_server_that_cannot_be_reached_is_named(run_well):
    program = """
        from processes import free_ports
        from replicax._parameter_server.servers import Servers
        (port,) = free_ports(1)
        address = f"localhost:{port}"
        kind, text, _ = raised(Servers([address], [address], "no one", insists=True).reach, 0.1)
        assert kind == "CutOffError" and f"cannot reach parameter server 0 at {address}" in text, (kind, text)
    """
    run_well(program, head=HEAD, env=ENVIRONMENT)


def test_what_a_server_answers_says_once_what_to_do(run):
    run("""
        with Cluster(workers=1) as cluster:
            with cluster.strategy.scope():
                v = rx.Variable(0)
            place = v._storage.places[0]
            dropped = {"owner": v._cluster.name, "names": place.names, "programs": []}
            v._cluster.servers._peers[0].call("ps.drop", dropped)
            kind, text, _ = raised(v.numpy)
            assert kind == "UnavailableError" and text.count("tart the") == 1, text
            assert text.startswith("Parameter server 0 at "), text
    """)


def test_a_closure_that_may_have_run_runs_again_after_anothers_error(run, monkeypatch):
    monkeypatch.setattr(execution, "update", execution.update)  # which the program replaces
    run("""
        from replicax._parameter_server import execution
        from replicax._transport.errors import Unreachable
        with Cluster(workers=2, servers=1) as cluster:
            co = cluster.coordinator
            with cluster.strategy.scope():
                v = rx.Variable(0)
            @rx.function
            def adds():
                v.assign_add(1)
                return v.value()
            @rx.function
            def fails():
                checks(v.value() == 55)
            computed, cut, goes_on = threading.Event(), threading.Event(), threading.Event()
            real, late = execution.update, []
            def update(plan, *args):
                if " adds" in plan.key and not computed.is_set():  # of the worker that is about to be cut off
                    computed.set()
                    goes_on.wait()
                    try:
                        return real(plan, *args)
                    finally:
                        late.append(True)
                return real(plan, *args)
            execution.update = update
            calls, threads = [], []
            def cutting(call):
                def cut_off(method, head={}, arrays=(), **options):
                    if method == "worker.run" and " adds" in head["plan"] and not threads:
                        threads.append(threading.Thread(target=lambda: raised(call, method, head, arrays, **options)))
                        threads[0].start()
                        cut.wait()
                        raise Unreachable("cut off")
                    return call(method, head, arrays, **options)
                return cut_off
            for link in co._links:
                link._peer.call = cutting(link._peer.call)
            first = co.schedule(adds)
            computed.wait()
            assert raised(co.schedule(fails).fetch)[0] == "InvalidArgumentError"
            assert co.done() is False, "something runs, and the error comes out when nothing does"
            cut.set()
            assert raised(co.join)[0] == "InvalidArgumentError"
            assert first.fetch() == 1 and v.numpy() == 1, "it ran again"
            v.assign(100)
            goes_on.set()
            threads[0].join()
            assert late and v.numpy() == 100, "what the first worker sends late is refused"
            co.join()
    """)


def test_closures_that_come_back_keep_their_order_and_only_those_that_nobody_began_are_cancelled():
    class Link:
        running = 0

    queue, link = closures.ClosureQueue(numbers := Numbers(), None), Link()
    queue.joined(link)
    scheduled = [closures.Closure(numbers.open(), RemoteValueImpl(queue.wait_for)) for _ in range(5)]
    queue.put(scheduled)
    taken = [queue.take(link) for _ in range(4)]
    for number in (2, 0, 1):
        taken[number].may_have_run = number != 0
        queue.put_back(taken[number], link)
    again = [queue.take(link) for _ in range(3)]
    assert again == scheduled[:3]
    for closure in (again[1], again[0], again[2]):
        queue.put_back(closure, link)
    queue.failed(taken[3], link, ValueError("it failed"))
    assert not queue.is_done()
    for number in (0, 4):
        with pytest.raises(CancelledError):
            scheduled[number].value.get()
    for number in (1, 2):
        assert queue.take(link) is scheduled[number]
        queue.left_out(scheduled[number], link)  # by a worker that knows of the error only
        assert queue.take(link) is scheduled[number]
        queue.ended(scheduled[number], link, lambda: "ended")
    with pytest.raises(ValueError, match="it failed"):
        queue.is_done()
    assert queue.is_done() and scheduled[1].value.get() == "ended"


def test_a_closure_that_is_left_out_for_an_error_that_does_not_come_runs_again():
    """The worker is lost with the answer that says what failed there, and what failed runs well elsewhere."""

    class Link:
        running = 0

    queue, link = closures.ClosureQueue(numbers := Numbers(), None), Link()
    queue.joined(link)
    scheduled = [closures.Closure(numbers.open(), RemoteValueImpl(queue.wait_for)) for _ in range(2)]
    queue.put(scheduled)
    first, second = queue.take(link), queue.take(link)
    queue.left_out(second, link)
    queue.put_back(first, link)
    for closure in scheduled:
        assert queue.take(link) is closure
        queue.ended(closure, link, lambda: "ended")
    queue.join()
    assert [closure.value.get() for closure in scheduled] == ["ended", "ended"]


def test_waiting_for_what_runs_ends_where_no_worker_is_there_any_more():
    class Link:
        running = 0

    queue, link = closures.ClosureQueue(numbers := Numbers(), timeout=0.05), Link()
    queue.joined(link)
    queue.put([closures.Closure(numbers.open(), RemoteValueImpl(queue.wait_for))])
    closure = queue.take(link)
    queue.put_back(closure, link)
    queue.left(link)
    with pytest.raises(UnavailableError, match="No worker was there"), queue.alone():
        pytest.fail("it did not wait for the function that is to run again")
    queue.joined(link)
    assert queue.take(link) is closure, "nothing waits to be alone any more"
    queue.ended(closure, link, lambda: "ended")
    with queue.alone():
        assert closure.value.get() == "ended"


def test_a_closed_coordinator_says_nothing_of_a_worker_that_refuses(capsys):
    class Link:
        running = 0

        def __repr__(self):
            return "worker 0"

    queue = closures.ClosureQueue(Numbers(), None)
    queue.refuses(Link(), "another secret")
    assert capsys.readouterr().err == "replicax: the coordinator cannot use worker 0: another secret\n"
    queue.stop()
    queue.refuses(Link(), "another secret")
    assert not capsys.readouterr().err


def test_an_error_that_is_raised_again_does_not_grow(run):
    run("""
        def frames(error):
            count, tb = 0, error.__traceback__
            while tb is not None:
                count, tb = count + 1, tb.tb_next
            return count
        def counts(call):
            found = []
            for _ in range(20):
                try:
                    call()
                except Exception as error:
                    found.append(frames(error))
            return found
        with Cluster(workers=1, servers=1) as cluster:
            co = cluster.coordinator
            with cluster.strategy.scope():
                v = rx.Variable(0)
            @rx.function
            def fails():
                checks(v.value() == 55)
            value = co.schedule(fails)
            found = counts(value.fetch)
            assert len(found) == 20 and len(set(found)) == 1, found
            raised(co.join)
            lost = threading.Event()
            fail_all = cluster.strategy._cluster.on_lost
            cluster.strategy._cluster.on_lost = lambda error: (fail_all(error), lost.set())
            cluster._local[1]._service.stop()
            lost.wait()
            for call in (co.done, v.numpy):
                found = counts(call)
                assert len(found) == 20 and len(set(found[1:])) == 1, found
    """)
