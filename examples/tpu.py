"""TPUStrategy with two devices for each replica, over which the weights of a layer are split; on virtual TPUs.

    python examples/tpu.py

On a TPU machine, leave out the line that makes virtual devices.
"""

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

import replicax as rx

rx.config.set_virtual_devices({"TPU": 8})
topology = rx.tpu.initialize_tpu_system()
assignment = rx.tpu.DeviceAssignment.build(topology, computation_shape=[1, 1, 1, 2], num_replicas=4)
strategy = rx.TPUStrategy(experimental_device_assignment=assignment)
print(f"{strategy.num_replicas_in_sync} replicas with {assignment.num_cores_per_replica} devices each")

digits = load_digits()
images, labels = (digits.data / 16).astype(np.float32), digits.target.astype(np.int32)
dataset = rx.data.Dataset.from_tensor_slices((images[:1536], labels[:1536])).shuffle(1536, seed=1)
batches = strategy.experimental_distribute_dataset(dataset.batch(64, drop_remainder=True))

rng = np.random.default_rng(0)
with strategy.scope():
    wide = rx.Variable(rng.normal(0, 0.1, (64, 512)).astype(np.float32))  # half of its columns on each device
    narrow = rx.Variable(rng.normal(0, 0.05, (512, 10)).astype(np.float32))
strategy.experimental_split_to_logical_devices(wide, [1, 2])


def logits_of(wide, narrow, images):
    return jax.nn.relu(images @ wide) @ narrow


@rx.function
def train_step(images, labels):
    def replica_step(images, labels):
        with rx.GradientTape() as tape:
            logits = logits_of(wide.value(), narrow.value(), images)
            chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)
            loss = -chosen.sum() / 64
        gradients = rx.get_replica_context().all_reduce("SUM", tape.gradient(loss, [wide, narrow]))
        for variable, gradient in zip([wide, narrow], gradients):
            variable.assign_sub(0.5 * gradient)
        return loss

    return strategy.reduce("SUM", strategy.run(replica_step, args=(images, labels)), axis=None)


for epoch in range(5):
    losses = [float(train_step(*batch)) for batch in batches]
    print(f"epoch {epoch + 1}: loss {np.mean(losses):.4f}")
right = np.mean(np.asarray(logits_of(wide.numpy(), narrow.numpy(), images[1536:])).argmax(axis=1) == labels[1536:])
print(f"test accuracy {right:.3f}")
