"""A training that may be interrupted at any step: it saves, ends, and goes on when it is started again.

replicax launch --workers 2 --max-restarts 3 examples/preemption.py
replicax launch --workers 2 --max-restarts 3 examples/preemption.py --interrupt-at 100    # as a scheduler would
python examples/preemption.py                                                             # one process

The last line is the same, to the last digit, however often the job was interrupted.
"""

import argparse
import os
import signal

import jax
import jax.numpy as jnp
import optax
from sklearn.datasets import load_digits

import replicax as rx

BATCH = 64

parser = argparse.ArgumentParser()
parser.add_argument("--folder", default="preemption-checkpoints", help="where the checkpoints are")
parser.add_argument("--steps", type=int, default=400)
parser.add_argument("--interrupt-at", type=int, help="the last worker gets SIGTERM at this step of its first start")
options = parser.parse_args()

strategy = rx.MultiWorkerMirroredStrategy()  # before anything else
chief = strategy.extended.should_checkpoint
task = strategy.cluster_resolver.task_id or 0
last_worker = strategy.num_replicas_in_sync == task + 1
first_start = os.environ.get("REPLICAX_RESTART_COUNT", "0") == "0"

digits = load_digits()
images, labels = digits.data.astype("float32") / 16, digits.target.astype("int32")
data = rx.data.Dataset.from_tensor_slices((images[:1536], labels[:1536])).shuffle(1536, seed=1).repeat().batch(BATCH)
batches = iter(strategy.experimental_distribute_dataset(data))

keys = jax.random.split(jax.random.key(0))
with strategy.scope():
    parameters = rx.Variable(
        {
            "hidden": jax.random.normal(keys[0], (64, 64)) / 8,
            "out": jax.random.normal(keys[1], (64, 10)) / 8,
        }
    )
    optimizer = rx.Optimizer(optax.adam(1e-3), parameters, reduce_op="SUM")

# Everything that is to go on, also the place in the data. The handler restores it, if it was saved before.
checkpoint = rx.train.Checkpoint(parameters=parameters, optimizer=optimizer, batches=batches)
handler = rx.experimental.PreemptionCheckpointHandler(strategy.cluster_resolver, checkpoint, options.folder)
if chief:
    print(f"{strategy.num_replicas_in_sync} replicas; beginning at step {handler.total_run_calls}")


def logits_of(values, x):
    return jax.nn.relu(x @ values["hidden"]) @ values["out"]


@rx.function
def train_step(batches):
    def replica_step(x, y):
        def loss(values):
            return rx.share_of_mean(optax.softmax_cross_entropy_with_integer_labels(logits_of(values, x), y))

        value, gradients = jax.value_and_grad(loss)(parameters.value())
        optimizer.apply_gradients(gradients)
        return value

    return strategy.reduce("SUM", strategy.run(replica_step, args=next(batches)), axis=None)


loss = None
for step in range(handler.total_run_calls, options.steps):
    if step == options.interrupt_at and last_worker and first_start:
        os.kill(os.getpid(), signal.SIGTERM)
    loss = handler.run(train_step, batches)

if chief:
    found = jnp.argmax(logits_of(parameters.numpy(), images[1536:]), axis=-1)
    print(f"step {handler.total_run_calls}: test accuracy {jnp.mean(found == labels[1536:]):.3f}, last loss {loss}")
