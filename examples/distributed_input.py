"""The ways to give each replica its part of the input, on 2 virtual devices.

python examples/distributed_input.py
"""

import numpy as np
from sklearn.datasets import load_digits

import replicax.tf as tf

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
images = (load_digits().data / 16).astype("float32")


@tf.function
def sum_of_batch(batch):
    sums = strategy.run(lambda part: tf.reduce_sum(part), args=(batch,))
    return strategy.reduce("SUM", sums, axis=None)


def total(batches):
    return sum(float(sum_of_batch(batch)) for batch in batches)


# 1. A dataset of global batches, each of which is divided. The last one has 5 rows, for two replicas.
dataset = tf.data.Dataset.from_tensor_slices(images).batch(64)
print(f"a dataset of global batches:   {total(strategy.experimental_distribute_dataset(dataset)):.1f}")


# 2. A function that makes each worker's dataset, of batches for one replica.
def dataset_fn(context):
    batch_size = context.get_per_replica_batch_size(64)
    dataset = tf.data.Dataset.from_tensor_slices(images).batch(batch_size)
    return dataset.shard(context.num_input_pipelines, context.input_pipeline_id).prefetch(2)


print(f"a function of the worker:      {total(strategy.distribute_datasets_from_function(dataset_fn)):.1f}")

# 3. Values that are given to each replica by hand.
halves = np.array_split(images, 2)
by_hand = strategy.experimental_distribute_values_from_function(lambda c: halves[c.replica_id_in_sync_group][:898])
print(f"values by hand (1,796 rows):   {float(sum_of_batch(by_hand)):.1f}")

# 4. Anything else that can be gone through again, such as a list of arrays.
parts = strategy.experimental_distribute_dataset([images[:900], images[900:]])
print(f"a list of arrays:              {total(parts):.1f}")

# 5. An iterator, from which the function itself takes batches.
iterator = iter(strategy.experimental_distribute_dataset(dataset))


@tf.function
def next_two(iterator):
    return sum_of_batch(next(iterator)) + sum_of_batch(next(iterator))


print(f"two batches of an iterator:    {float(next_two(iterator)):.1f}")
print(f"the spec of its elements:      {iterator.element_spec}")
print(f"the sum of all rows by numpy:  {images.sum():.1f}")
