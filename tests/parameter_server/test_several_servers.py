"""Closures that update variables on several servers: at all of them or at none, whatever happens in between."""

from __future__ import annotations

import pytest
from ps_clusters import HEAD

from replicax._parameter_server import execution
from replicax._parameter_server.servers import Servers

OWN = """
    from replicax._parameter_server.servers import Servers
    from replicax._parameter_server.worker import SessionEndedError
    real, seen = Servers.all, []
    def lost_after(method):
        '''Has the first worker that has asked servers for this be lost then.'''
        def all_(self, calls):
            answers = real(self, calls)
            methods = [call.method for call in calls.values()]
            if methods[:1] == [method] and method not in seen:
                seen.append(method)
                raise SessionEndedError("the worker is lost here")
            return answers
        Servers.all = all_
"""


@pytest.fixture
def run(run_here, monkeypatch):
    for owner, name in (Servers, "all"), (execution, "update"):  # which programs replace
        monkeypatch.setattr(owner, name, getattr(owner, name))
    return lambda code: run_here(code, head=HEAD + OWN)


@pytest.mark.parametrize("method", ["fetch", "keep", "update", "apply"])
def test_a_closure_that_runs_again_goes_on_where_the_servers_have_decided(run, method):
    """What is subtracted here is added there, though the second run reads what the first has left."""
    run(f"""
        with Cluster(workers=2, servers=3) as cluster:
            with cluster.strategy.scope():
                a, b, c = rx.Variable(10.0), rx.Variable(0.0), rx.Variable(0)
            @rx.function
            def transfer():
                amount = jnp.minimum(a.value(), 7.0)
                a.assign_sub(amount)
                b.assign_add(amount)
                c.assign_add(1)
            lost_after("{method}")
            cluster.coordinator.schedule(transfer)
            cluster.coordinator.join()
            assert seen == ["{method}"]
            assert (a.numpy(), b.numpy(), c.numpy()) == (3.0, 7.0, 1), (a.numpy(), b.numpy(), c.numpy())
            cluster.coordinator.schedule(transfer)
            cluster.coordinator.join()
            assert (a.numpy(), b.numpy(), c.numpy()) == (0.0, 10.0, 2), (a.numpy(), b.numpy(), c.numpy())
    """)


@pytest.mark.parametrize("method", ["keep", "update", "apply"])
def test_a_value_computed_of_all_of_the_old_one_is_replaced_on_all_servers_at_once(run, method):
    """Other closures, which add, come before or behind it, and never in between."""
    run(f"""
        halves = rx.experimental.partitioners.FixedShardsPartitioner(2)
        with Cluster(workers=3, servers=2, partitioner=halves) as cluster:
            co = cluster.coordinator
            with cluster.strategy.scope():
                v = rx.Variable(jnp.arange(4.0))
            @rx.function
            def turn():
                v.assign(jnp.roll(v.value(), 2))
            @rx.function
            def add(x):
                v.assign_add(x)
            lost_after("{method}")
            for i in range(40):
                co.schedule(add, args=(jnp.ones(4),))
                if i % 10 == 0:
                    co.schedule(turn)
            co.join()
            assert seen == ["{method}"]
            assert v.numpy().tolist() == [40.0, 41.0, 42.0, 43.0], v.numpy()
    """)


def test_what_somebody_else_assigns_meanwhile_is_not_mixed_with_the_old_value(run):
    run("""
        from replicax._parameter_server import execution
        real_update = execution.update
        def update(*args):
            if not seen:
                seen.append("update")
                b.assign(b.value() + 100)
            return real_update(*args)
        execution.update = update
        with Cluster(workers=1, servers=2) as cluster:
            with cluster.strategy.scope():
                a, b = rx.Variable(jnp.zeros(10)), rx.Variable(jnp.zeros(10))
            @rx.function
            def step():
                x, y = a.value(), b.value()
                a.assign(jnp.sort(x) + 1)
                b.assign(jnp.sort(y) + jnp.sort(x))
            for call in (lambda: cluster.coordinator.schedule(step).fetch()), step:
                a.assign(jnp.zeros(10))
                b.assign(jnp.zeros(10))
                seen.clear()
                call()
                assert (a.numpy() == 1).all() and (b.numpy() == 100).all(), (a.numpy(), b.numpy())
    """)
