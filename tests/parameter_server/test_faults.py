"""Tasks that are killed, stopped or cut off, and closures that fail; each program has a deadline."""

from __future__ import annotations

import textwrap

import pytest
from ps_clusters import ENVIRONMENT, HEAD, UPDATES, in_turn

# That a task is killed is noticed at once; that one is stopped, by its silence.
KILLED, STOPPED = {"REPLICAX_HEARTBEAT_TIMEOUT": "600"}, {"REPLICAX_HEARTBEAT_TIMEOUT": None}


@pytest.fixture
def run(run_well):
    return lambda code, env=KILLED: run_well(code, head=HEAD, env={**ENVIRONMENT, **env})


@pytest.fixture
def run_here(run_here):
    return lambda code: run_here(code, head=HEAD)


# Programs that leave tasks as they were, but for some that have ended.
WORKERS_GO_AND_COME = {
    # Killed before its update, or when that has arrived and the answer has not.
    "a closure whose worker is killed runs again and updates once": """
        for moment in ("before", "after"):
            with Cluster(workers=2, servers=2) as cluster:
                co = cluster.coordinator
                with cluster.strategy.scope():
                    first, second = rx.Variable(0), rx.Variable(0)
                @rx.function
                def watched():
                    first.assign_add(1)
                    second.assign_add(1)
                    return first.read_value()
                value = co.schedule(watched)
                one, other = cluster.first_to_speak()
                assert cluster.line("worker", one) == "updates"
                if moment == "after":
                    cluster.say("worker", one)
                    assert cluster.line("worker", one) == "updated"
                cluster.kill("worker", one)
                for line in ("updates", "updated"):
                    assert cluster.line("worker", other) == line
                    cluster.say("worker", other)
                assert value.fetch() == 1
                co.join()
                assert first.numpy() == second.numpy() == 1, (first.numpy(), second.numpy())
    """,
    # Also one that was killed while it had nothing to do.
    "a worker that comes back gets programs and datasets again": """
        with Cluster(workers=1, servers=1) as cluster:
            co = cluster.coordinator
            count, step = counting(cluster)
            data = iter(co.create_per_worker_dataset(lambda: rx.data.Dataset.range(5)))
            @rx.function
            def of_data(iterator):
                step()
                return next(iterator)
            for restarts in range(3):
                assert [int(co.schedule(of_data, args=(data,)).fetch()) for _ in range(3)] == [0, 1, 2]
                assert count.numpy() == 3 * (restarts + 1)
                if restarts < 2:
                    cluster.restart("worker", 0)
    """,
    "nothing is lost or counted twice when workers are killed": """
        with Cluster(workers=3, servers=1) as cluster:
            co = cluster.coordinator
            count, step = counting(cluster)
            values = [co.schedule(step) for _ in range(400)]
            values[30].fetch()
            cluster.kill("worker", 0)
            values[100].fetch()
            cluster.start("worker", 0)
            cluster.wait_until_up("worker", 0)
            cluster.kill("worker", 0)
            co.join()
            assert count.numpy() == 400, count.numpy()
            assert sorted(map(int, co.fetch(values))) == list(range(1, 401))
    """,
    "without workers a program waits, says so and ends with an error": """
        from replicax._parameter_server import closures
        before, closures._REMINDER = closures._REMINDER, 0.2
        with Cluster(workers=2, servers=1) as cluster:
            co = cluster.coordinator
            count, step = counting(cluster)
            assert co.schedule(step).fetch() == 1
            cluster.kill("worker", 0)
            cluster.kill("worker", 1)
            value = co.schedule(step)
            cluster.patience(1.0)
            for wait in (co.join, value.fetch):
                kind, text, _ = raised(wait)
                assert kind == "UnavailableError" and "REPLICAX_START_TIMEOUT" in text and "1 scheduled" in text, text
            cluster.patience(60.0)
            cluster.start("worker", 1)
            cluster.wait_until_up("worker", 1)
            assert value.fetch() == 2
            co.join()
        closures._REMINDER = before
    """,
    "a worker with another secret is refused and the error says so": """
        from replicax._parameter_server.closures import ClosureQueue
        refused, refuses = threading.Event(), ClosureQueue.refuses
        def refuses_and_tells(queue, link, why):
            refuses(queue, link, why)
            if "another secret" in why and not queue.stopped:  # an earlier cluster's may still try
                refused.set()
        ClosureQueue.refuses = refuses_and_tells
        with Cluster(workers=1, servers=1) as cluster:
            co = cluster.coordinator
            count, step = counting(cluster)
            assert co.schedule(step).fetch() == 1
            given = dict(cluster._env)
            cluster._env["REPLICAX_JOB_SECRET"] = "another than the coordinator's"
            cluster.restart("worker", 0)
            value = co.schedule(step)
            assert refused.wait(60)
            cluster.patience(0.5)
            kind, text, _ = raised(value.fetch)
            cluster.patience(60.0)
            assert kind == "UnavailableError" and "another secret" in text and "worker 0 at" in text, text
            cluster._env = given
            cluster.restart("worker", 0)
            assert value.fetch() == 2
    """,
    "two coordinators use the same tasks at once": """
        with Cluster(workers=2, servers=2) as cluster:
            second = rx.ParameterServerStrategy(cluster.strategy.cluster_resolver)
            values = []
            for strategy in (cluster.strategy, second):
                co = ClusterCoordinator(strategy)
                with strategy.scope():
                    count = rx.Variable(0)
                def step(count=count):
                    return count.assign_add(1)
                step = rx.function(step)
                values.append((co, count, [co.schedule(step) for _ in range(100)]))
            for co, count, found in values:
                co.join()
                assert count.numpy() == 100
            second._cluster.close()
            co, count, _ = values[0]
            assert co.schedule(rx.function(lambda: count.assign_add(1))).fetch() == 101
    """,
    "a closure that ends every worker is an error after so many": """
        from replicax._parameter_server import worker_links
        worker_links.MOST_LOST = 2
        def data():
            def generate():
                os.kill(os.getpid(), signal.SIGKILL)
                yield np.float32(1)
            return rx.data.Dataset.from_generator(generate, output_signature=rx.TensorSpec([]))
        with Cluster(workers=3, servers=1) as cluster:
            co = cluster.coordinator
            iterator = iter(co.create_per_worker_dataset(data))
            take = rx.function(lambda it: next(it))
            _, step = counting(cluster)
            co.schedule(take, args=(iterator,))
            kind, text, _ = raised(co.join)
            assert kind == "UnavailableError" and "lost 2 times" in text, text
            assert co.schedule(step).fetch() == 1  # the third worker
    """,
}


def test_workers_go_and_come(run):
    program = in_turn(WORKERS_GO_AND_COME, workers=3, servers=2, spares=10, hooks={"worker": UPDATES})
    stderr = run(program).stderr
    assert "No worker is there" in stderr and "replicax: the coordinator cannot use worker 0 at " in stderr


# Parameter servers.


# A server that is gone is named by every call; `number` is the signal that it was sent.
SERVER_GONE = """
    with Cluster(workers=2, servers=2) as cluster:
        co = cluster.coordinator
        with cluster.strategy.scope():
            variables = [rx.Variable(0), rx.Variable(0)]
        @rx.function
        def step():
            for variable in variables:
                variable.assign_add(1)
        @rx.function
        def other():
            return variables[1].assign_add(1)
        for _ in range(50):
            co.schedule(step)
        co.join()
        values = [co.schedule(step) for _ in range(2000)]
        cluster.kill("ps", 1, number)
        def check(function, *args):
            kind, text, _ = raised(function, *args)
            assert kind == "UnavailableError" and "arameter server 1 at" in text, (function, kind, text)
        check(co.join)
        check(values[-1].fetch)
        for _ in range(2):
            for function in (co.join, co.done, variables[1].numpy):
                check(function)
            check(co.schedule, step)
            check(co.schedule, other)
            check(variables[1].assign, 1)
            check(step)
        # A report still has the variables, whose server may come back.
        entries = rx.train.Checkpoint(other=rx.Variable(0)).report().entries
        assert any(entry.kind == "variable" and "2 variables" in entry.what for entry in entries), entries
"""


def test_a_parameter_server_that_is_killed_is_named_by_every_call(run):
    run(in_turn({"a server is gone": f"number = signal.SIGKILL\n{textwrap.dedent(SERVER_GONE)}"}, workers=2, servers=2))


# By its silence a task is taken for stopped, and not where it only has much to send.
STOPPED_TASKS = {
    "a result of many bytes is no false death": """
        with Cluster(workers=1, servers=1) as cluster:
            co = cluster.coordinator
            with cluster.strategy.scope():
                large = rx.Variable(np.zeros(5_000_000, "f4"))
            step = rx.function(lambda: large.assign_add(jnp.ones(5_000_000)) * 1)
            found = co.schedule(step).fetch()
            assert found.nbytes == 20_000_000 and found.min() == found.max() == 1
            assert large.numpy()[-1] == 1
    """,
    "a worker that wakes up late updates nothing": """
        with Cluster(workers=2, servers=1) as cluster:
            co = cluster.coordinator
            count, step = counting(cluster)
            @rx.function
            def watched():
                return step()
            value = co.schedule(watched)
            one, other = cluster.first_to_speak()
            assert cluster.line("worker", one) == "updates"
            cluster.kill("worker", one, signal.SIGSTOP)
            for line in ("updates", "updated"):
                assert cluster.line("worker", other) == line
                cluster.say("worker", other)
            assert value.fetch() == 1
            co.join()
            cluster.say("worker", one)
            cluster.kill("worker", one, signal.SIGCONT)
            late = cluster.line("worker", one)
            assert late.startswith(("updated", "failed")), late
            assert count.numpy() == 1, (count.numpy(), late)
            cluster.kill("worker", one)
    """,
    "a server is gone": f"number = signal.SIGSTOP\n{textwrap.dedent(SERVER_GONE)}",
}


@pytest.mark.thorough
def test_tasks_that_are_stopped(run):
    run(in_turn(STOPPED_TASKS, workers=2, servers=2, hooks={"worker": UPDATES}), STOPPED)


# The coordinator.


def test_a_coordinator_that_is_killed_leaves_nothing_behind_and_another_may_come(run):
    run("""
        worker = '''
            from replicax._parameter_server.worker import Worker
            end = Worker._end
            def ends(self, name):
                end(self, name)
                print("ended", flush=True)
            Worker._end = ends
        '''
        with Cluster(workers=1, servers=1, processes=True, hooks={"ps": FORGETS, "worker": worker}) as cluster:
            killed = cluster.start_coordinator()
            killed.kill()
            killed.wait()
            assert cluster.line("ps", 0) == "forgotten, 0 left"
            assert cluster.line("worker", 0) == "ended"
            count, step = counting(cluster)
            assert cluster.coordinator.schedule(step).fetch() == 1
    """)


# Closures that fail, in one process.


def test_an_error_cancels_what_waits_and_is_raised_once_more(run_here):
    """Fact 142."""
    run_here("""
        with Cluster(workers=1) as cluster:
            co = cluster.coordinator
            count, step = counting(cluster)
            waits = rx.function(lambda it: next(it))
            @rx.function
            def bad(x):
                checks(x == 2, "went wrong")
                return x
            for call in (co.join, co.done, lambda: co.schedule(step)):
                blocked = Blocked()
                values = [co.schedule(waits, args=(iter(co.create_per_worker_dataset(blocked)),))]
                blocked.begun.wait()
                values += [co.schedule(bad, args=(jnp.int32(1),)) for _ in range(2)]
                values += [co.schedule(step) for _ in range(3)]
                blocked.go.set()
                for _ in range(2):
                    kind, text, _ = raised(values[1].fetch)
                    assert kind == "InvalidArgumentError" and "went wrong" in text
                for value in values[2:]:
                    assert raised(value.get)[0] == "CancelledError"
                assert values[0].fetch() == 1.0
                assert raised(call)[:1] == ("InvalidArgumentError",)
                co.join()
                assert co.done()
                assert count.numpy() == 0
            assert co.schedule(step).fetch() == 1
    """)


def test_errors_while_tracing_are_raised_by_schedule_and_leave_nothing_behind(run_here):
    run_here("""
        with Cluster(workers=1) as cluster:
            co = cluster.coordinator
            count, step = counting(cluster)
            @rx.function
            def wrong(x):
                count.assign_add(1)
                return x @ x
            kind, text, _ = raised(co.schedule, wrong, args=(jnp.ones(3, "int32").reshape(1, 3),))
            assert kind == "TypeError", (kind, text)
            here = rx.data.Dataset.range(3)
            kind, text, _ = raised(co.schedule, rx.function(lambda it: next(it)), args=(iter(here),))
            assert kind in ("TypeError", "RuntimeError"), (kind, text)
            co.join()
            assert co.done() and count.numpy() == 0
            assert co.schedule(step).fetch() == 1
    """)


def test_an_element_of_another_shape_that_cannot_be_traced_fails_its_closure_alone(run_here):
    run_here("""
        with Cluster(workers=1) as cluster:
            co = cluster.coordinator
            count, step = counting(cluster)
            def data():
                return rx.data.Dataset.from_tensor_slices(np.arange(10.0, dtype="f4")).batch(4)  # 4, 4 and 2 elements
            @rx.function
            def only_four(iterator):
                count.assign_add(1)
                return next(iterator) + jnp.arange(4.0)
            iterator = iter(co.create_per_worker_dataset(data))
            assert co.schedule(only_four, args=(iterator,)).fetch().tolist() == [0.0, 2.0, 4.0, 6.0]
            assert co.schedule(only_four, args=(iterator,)).fetch().tolist() == [4.0, 6.0, 8.0, 10.0]
            kind, text, _ = raised(co.schedule(only_four, args=(iterator,)).fetch)
            assert kind == "TypeError", (kind, text)
            assert raised(co.join)[0] == "TypeError"
            assert count.numpy() == 2
            kind, _, _ = raised(co.schedule(only_four, args=(iterator,)).fetch)
            assert kind == "OutOfRangeError", kind
            assert raised(co.join)[0] == "OutOfRangeError"
            assert co.schedule(step).fetch() == 3
    """)


def test_closures_before_the_end_of_a_dataset_are_not_cancelled_by_it(run_here):
    """Fact 147."""
    run_here("""
        with Cluster(workers=1) as cluster:
            co = cluster.coordinator
            with cluster.strategy.scope():
                total = rx.Variable(0.0)
            step = rx.function(lambda it: total.assign_add(next(it)))
            for round in range(10):
                total.assign(0.0)
                iterator = iter(co.create_per_worker_dataset(lambda: rx.data.Dataset.range(10).map(jnp.float32)))
                while raised(co.schedule, step, args=(iterator,))[0] == "nothing":
                    pass
                assert total.numpy() == 45.0, (round, total.numpy())
                assert raised(co.join)[0] in ("nothing", "OutOfRangeError")
    """)


def test_an_argument_that_cannot_be_sent_fails_and_leaves_the_worker_usable(run_here):
    run_here("""
        with Cluster(workers=1) as cluster:
            co = cluster.coordinator
            count, step = counting(cluster)
            blocked = Blocked()
            waits, add = rx.function(lambda it: next(it)), rx.function(lambda x: x + 1)
            first = co.schedule(waits, args=(iter(co.create_per_worker_dataset(blocked)),))
            blocked.begun.wait()
            gone = jnp.ones(3)
            value = co.schedule(add, args=(gone,))
            gone.delete()
            blocked.go.set()
            assert first.fetch() == 1.0
            kind, text, _ = raised(value.fetch)
            assert kind == "RuntimeError" and "deleted" in text, (kind, text)
            raised(co.join)
            assert [int(co.schedule(step).fetch()) for _ in range(4)] == [1, 2, 3, 4]
    """)


def test_what_is_gone_in_the_coordinators_process_is_dropped_by_its_tasks(run_here):
    """Functions with their programs, datasets with their iterators, and at last the strategy."""
    run_here("""
        def use(cluster, count):
            co = cluster.coordinator
            numbers = co.create_per_worker_dataset(lambda: rx.data.Dataset.range(10))
            step = rx.function(lambda it: count.assign_add(1) + jnp.int32(next(it)))
            assert co.schedule(step, args=(iter(numbers),)).fetch() > 0
            co.join()
        def programs():
            owners = [owner for server in servers for owner in server._owners.values()]
            sessions = [session for worker in workers for session in worker._sessions.values()]
            kept = [(s.plans, s.datasets, s.iterators) for s in sessions]
            return sum(len(owner.programs) for owner in owners), [len(each) for (three,) in [kept] for each in three]
        cluster = Cluster(workers=1, servers=2)
        servers, workers = cluster.local("ps"), cluster.local("worker")
        count, _ = counting(cluster)
        for _ in range(5):
            use(cluster, count)
            gc.collect()
        count_of_programs, kept = programs()
        assert count_of_programs <= 1 and max(kept) <= 1, programs()  # those of the last use
        ended = threading.Semaphore(0)
        for worker in workers:
            for session in worker._sessions.values():
                weakref.finalize(session, ended.release)
        for server in servers:
            for owner in server._owners.values():
                weakref.finalize(owner, ended.release)
        del session, owner
        gone = weakref.ref(cluster.coordinator), weakref.ref(cluster.strategy)
        local = cluster._local
        del cluster, count, _
        gc.collect()
        assert [ref() for ref in gone] == [None, None]
        for _ in range(3):
            assert ended.acquire(timeout=60)
        for server in local:
            server._service.stop()
    """)


def test_ctrl_c_while_waiting_leaves_the_coordinator_usable(run):
    run("""
        with Cluster(workers=1) as cluster:
            co = cluster.coordinator
            count, step = counting(cluster)
            blocked = Blocked(elements=2)
            waits = rx.function(lambda it: next(it))
            iterator = iter(co.create_per_worker_dataset(blocked))
            for _ in range(2):
                blocked.begun.clear(), blocked.go.clear()
                value = co.schedule(waits, args=(iterator,))
                for wait in (co.join, value.fetch):
                    blocked.begun.wait()
                    here = threading.main_thread().ident
                    interrupt = threading.Timer(0.2, signal.pthread_kill, [here, signal.SIGINT])
                    try:
                        interrupt.start()
                        wait()
                    except KeyboardInterrupt:
                        pass
                    else:
                        raise AssertionError("not interrupted")
                blocked.go.set()
                assert value.fetch() == 1.0
                co.join()
            assert co.schedule(step).fetch() == 1
    """)


@pytest.mark.sampled(2, others="thorough")
@pytest.mark.parametrize("processes", [False, True])
def test_a_program_may_end_while_functions_run(run, processes):
    run(f"""
        cluster = Cluster(workers=2, servers=1, processes={processes})
        import atexit
        for task in cluster.tasks.values():
            atexit.register(task.kill)
        co = cluster.coordinator
        count, step = counting(cluster)
        values = [co.schedule(step) for _ in range(3000)]
        values[50].fetch()
    """)


def test_many_threads_schedule_and_fetch(run_here):
    run_here("""
        with Cluster(workers=3, servers=2) as cluster:
            co = cluster.coordinator
            count, step = counting(cluster)
            found = []
            def work(number):
                values = [co.schedule(step) for _ in range(20)]
                values.append(co.schedule(rx.function(lambda: count.assign_add(1))))
                co.join()
                found.extend(map(int, co.fetch(values)))
            threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert sorted(found) == list(range(1, 16 * 21 + 1)) and count.numpy() == 16 * 21
    """)
