import tensorflow as tf
from task import BATCH, CLASSES, EPOCHS, FEATURES, LEARNING_RATE, ROWS, WIDTH, data, record

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 4)
strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(4)])
tf.keras.utils.set_random_seed(0)

dataset = tf.data.Dataset.from_tensor_slices(data()).shuffle(ROWS).batch(BATCH)
batches = strategy.experimental_distribute_dataset(dataset)

with strategy.scope():
    model = tf.keras.Sequential(
        [
            tf.keras.Input((FEATURES,)),
            tf.keras.layers.Dense(WIDTH, activation="relu"),
            tf.keras.layers.Dense(WIDTH, activation="relu"),
            tf.keras.layers.Dense(CLASSES),
        ]
    )
    optimizer = tf.keras.optimizers.Adam(LEARNING_RATE)
    optimizer.build(model.trainable_variables)
    loss_object = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")


@tf.function
def train_step(x, y):
    def replica_step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(loss_object(y, model(x, training=True))) / BATCH
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    return strategy.reduce("SUM", strategy.run(replica_step, args=(x, y)), axis=None)


for _ in range(EPOCHS):
    for x, y in batches:
        record(train_step(x, y))
