"""A training loop of one's own, as TensorFlow's guides write it, on 4 virtual devices.

    python examples/custom_training.py

The only line that is not TensorFlow's is the import. docs/how-to/migrate-from-tensorflow.md shows both side by side.
"""

import numpy as np
from sklearn.datasets import load_digits

import replicax.tf as tf

BATCH, EPOCHS = 64, 5

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 4)
strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(4)])
print("replicas:", strategy.num_replicas_in_sync)

digits = load_digits()
images = (digits.images[..., np.newaxis] / 16).astype("float32")
labels = digits.target.astype("int32")
train = tf.data.Dataset.from_tensor_slices((images[:1500], labels[:1500])).shuffle(1500, seed=1).batch(BATCH)
test = tf.data.Dataset.from_tensor_slices((images[1500:], labels[1500:])).batch(BATCH)
train_batches = strategy.experimental_distribute_dataset(train)
test_batches = strategy.experimental_distribute_dataset(test)

tf.keras.utils.set_random_seed(1)
with strategy.scope():
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Conv2D(16, 3, activation="relu"),
            tf.keras.layers.BatchNormalization(),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dropout(0.2),
            tf.keras.layers.Dense(10),
        ]
    )
    optimizer = tf.keras.optimizers.Adam(1e-3)
    loss_object = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
    train_accuracy = tf.keras.metrics.SparseCategoricalAccuracy()
    test_accuracy = tf.keras.metrics.SparseCategoricalAccuracy()


def train_step(inputs):
    images, labels = inputs
    with tf.GradientTape() as tape:
        predictions = model(images, training=True)
        loss = tf.reduce_sum(loss_object(labels, predictions)) / BATCH  # of the global batch
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    train_accuracy.update_state(labels, predictions)
    return loss


def test_step(inputs):
    images, labels = inputs
    test_accuracy.update_state(labels, model(images, training=False))


@tf.function
def distributed_train_step(inputs):
    losses = strategy.run(train_step, args=(inputs,))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)


@tf.function
def distributed_test_step(inputs):
    strategy.run(test_step, args=(inputs,))


for epoch in range(EPOCHS):
    losses = [distributed_train_step(inputs) for inputs in train_batches]
    for inputs in test_batches:
        distributed_test_step(inputs)
    print(
        f"epoch {epoch + 1}: loss {np.mean(losses):.4f}, accuracy {float(train_accuracy.result()):.3f}, "
        f"test accuracy {float(test_accuracy.result()):.3f}"
    )
    train_accuracy.reset_state()
    test_accuracy.reset_state()
