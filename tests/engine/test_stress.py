"""Ten thousand small steps that nobody waits for: JAX on several CPU devices must neither deadlock nor abort."""

from __future__ import annotations

import pytest

_STEPS = """
import jax.numpy as jnp
import replicax as rx

n, steps = {n}, {steps}
strategy = rx.MirroredStrategy(rx.config.list_devices()[:n])
with strategy.scope():
    v = rx.Variable(0.0, aggregation=rx.VariableAggregation.SUM)
    w = rx.Variable(jnp.zeros(16))

@rx.function
def step():
    def replica():
        context = rx.get_replica_context()
        r = context.replica_id_in_sync_group.astype(jnp.float32)
        w.assign_add(context.all_reduce("MEAN", r + jnp.ones(16)))
        v.assign_add(r + 1)
    strategy.run(replica)

for _ in range(steps):
    step()  # nothing is read until the end
assert float(v) == steps * n * (n + 1) / 2, float(v)
assert abs(float(w[3]) - steps * (n + 1) / 2) < 1e-3 * steps, w
print("done", step.experimental_get_tracing_count())
"""

_FIRST_JAX = """
import jax
jax.config.update("jax_num_cpu_devices", {n})
assert len(jax.devices()) == {n}  # JAX has started before replicax is imported
"""


def run(run_python, code, **env):
    finished = run_python(code, timeout=150, env=env)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.split() == ["done", "1"], finished.stdout + finished.stderr


# With as many devices as the tests have anywhere: the more there are, the sooner XLA's threads run out.
@pytest.mark.thorough
def test_ten_thousand_unawaited_steps(run_python):
    run(run_python, _STEPS.format(n=8, steps=10_000), REPLICAX_VIRTUAL_DEVICES="GPU:8")


@pytest.mark.thorough
def test_ten_thousand_unawaited_steps_where_the_user_started_jax(run_python):
    code = _FIRST_JAX.format(n=8) + _STEPS.format(n=8, steps=10_000)
    run(run_python, code, REPLICAX_VIRTUAL_DEVICES=None, NPROC=None)


def test_steps_from_several_threads(run_python):
    """Each thread its own strategy and devices; the bound holds over all of them."""
    run(
        run_python,
        """
import threading
import jax.numpy as jnp
import replicax as rx

names, results = rx.config.list_devices(), []

def work(k):
    strategy = rx.MirroredStrategy(names[2 * k : 2 * k + 2])
    with strategy.scope():
        v = rx.Variable(0.0, aggregation=rx.VariableAggregation.SUM)
    step = rx.function(lambda: strategy.run(lambda: v.assign_add(jnp.float32(1) + 0 * v, read_value=False)))
    for _ in range(2000):
        step()
    results.append(float(v))

threads = [threading.Thread(target=work, args=(k,)) for k in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert results == [4000.0] * 3, results
print("done", 1)
""",
        REPLICAX_VIRTUAL_DEVICES="GPU:6",
    )


def test_unawaited_reductions_and_results(run_python):
    """Not only steps: results of `run` that are kept, and reductions of them."""
    run(
        run_python,
        """
import jax.numpy as jnp
import replicax as rx

strategy = rx.MirroredStrategy(["GPU:0", "GPU:1", "GPU:2", "GPU:3"])

@rx.function
def step(x):
    return strategy.run(lambda a: rx.get_replica_context().all_reduce("SUM", a) / 4, args=(x,))

x = strategy.experimental_distribute_values_from_function(lambda c: jnp.full(4, c.replica_id_in_sync_group + 1.0))
total = jnp.zeros(4)
for k in range(2000):
    x = step(x)
    if k % 10 == 0:
        total = total + strategy.reduce("MEAN", x, axis=None)
assert total.tolist() == [500.0] * 4, total
eager = [strategy.run(lambda a: rx.get_replica_context().all_reduce("SUM", a), args=(x,)) for _ in range(200)]
assert [p.tolist() for p in eager[-1].values] == [[10.0] * 4] * 4
print("done", 1)
""",
        REPLICAX_VIRTUAL_DEVICES="GPU:4",
    )
