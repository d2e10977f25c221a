"""A loop of one's own in several worker processes, with checkpoints from which it goes on.

replicax launch --workers 2 examples/multi_worker.py --folder checkpoints
replicax launch --workers 2 examples/multi_worker.py --folder checkpoints    # goes on where the first one ended
python examples/multi_worker.py --folder checkpoints                         # so does one process alone
"""

import argparse

import numpy as np
from sklearn.datasets import load_digits

import replicax.tf as tf

BATCH = 64

parser = argparse.ArgumentParser()
parser.add_argument("--folder", default="checkpoints", help="where the checkpoints are")
parser.add_argument("--epochs", type=int, default=2, help="how many more")
options = parser.parse_args()

strategy = tf.distribute.MultiWorkerMirroredStrategy()  # before anything else
chief = strategy.extended.should_checkpoint

digits = load_digits()
images, labels = (digits.images[..., np.newaxis] / 16).astype("float32"), digits.target.astype("int32")
dataset = tf.data.Dataset.from_tensor_slices((images[:1536], labels[:1536])).shuffle(1536, seed=1).batch(BATCH)
batches = strategy.experimental_distribute_dataset(dataset)

tf.keras.utils.set_random_seed(1)
with strategy.scope():
    model = tf.keras.Sequential(
        [
            tf.keras.Input((8, 8, 1)),
            tf.keras.layers.Conv2D(16, 3, activation="relu"),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(10),
        ]
    )
    optimizer = tf.keras.optimizers.Adam(1e-3)
    optimizer.build(model.trainable_variables)
    loss_object = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
    accuracy = tf.keras.metrics.SparseCategoricalAccuracy()
    epoch = tf.Variable(0, trainable=False)

checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, epoch=epoch)
manager = tf.train.CheckpointManager(checkpoint, options.folder, max_to_keep=2)
path = manager.restore_or_initialize()
if chief:
    print(f"{strategy.num_replicas_in_sync} replicas; ", end="")
    print(f"going on from {path} after {int(epoch)} epochs" if path else "starting anew")


@tf.function
def train_step(batch):
    def replica_step(images, labels):
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            loss = tf.reduce_sum(loss_object(labels, logits)) / BATCH
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        accuracy.update_state(labels, logits)
        return loss

    return strategy.reduce("SUM", strategy.run(replica_step, args=batch), axis=None)


for _ in range(options.epochs):
    losses = [train_step(batch) for batch in batches]
    epoch.assign_add(1)
    reached = float(accuracy.result())  # on all workers: it adds up what they have counted
    accuracy.reset_state()
    saved = manager.save()  # on all workers, of which one writes
    if chief:
        print(f"epoch {int(epoch)}: loss {np.mean(losses):.4f}, accuracy {reached:.3f}, saved {saved}")
