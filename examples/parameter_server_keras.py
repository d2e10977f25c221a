"""TensorFlow's tutorial on parameter server training, on a Keras model whose embedding is divided over two servers.

replicax launch --workers 3 --ps 2 examples/parameter_server_keras.py
python examples/parameter_server_keras.py   # the same tasks, in one process

It differs from the tutorial (https://www.tensorflow.org/tutorials/distribute/parameter_server_training) where Keras 3
does: words are looked up by plain Python in `Dataset.map`, since `StringLookup` needs TensorFlow; the table is one
weight, whose `variables` are its parts; and `fit` takes the function that makes a dataset as it is.
"""

import argparse
import os
import random
import tempfile

import numpy as np

import replicax.tf as tf

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=16384, help="of the embedding")
options = parser.parse_args()

# All tasks run this program. Workers and parameter servers serve the chief until the launcher ends them.
if "TF_CONFIG" in os.environ:
    cluster_resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if cluster_resolver.task_type in ("worker", "ps"):
        server = tf.distribute.Server(
            cluster_resolver.cluster_spec(),
            job_name=cluster_resolver.task_type,
            task_index=cluster_resolver.task_id,
            protocol="grpc",
        )
        server.join()
    if cluster_resolver.task_type == "evaluator":
        print("The chief and the workers evaluate: there is nothing for an evaluator to do.")
        raise SystemExit
else:
    servers = [tf.distribute.Server.create_local_server() for _ in range(5)]
    addresses = [server.target.removeprefix("grpc://") for server in servers]
    cluster_spec = tf.train.ClusterSpec({"worker": addresses[:3], "ps": addresses[3:]})
    cluster_resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(cluster_spec, rpc_layer="grpc")

keras = tf.keras  # which parameter servers and workers need not import

NUM_PS = cluster_resolver.cluster_spec().num_tasks("ps")
variable_partitioner = tf.distribute.experimental.partitioners.MinSizePartitioner(
    min_shard_bytes=(256 << 10), max_shards=NUM_PS
)
strategy = tf.distribute.ParameterServerStrategy(cluster_resolver, variable_partitioner=variable_partitioner)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)

# Training with Model.fit.


def fit_dataset_fn(input_context):
    batch_size = input_context.get_per_replica_batch_size(64)
    x = np.random.default_rng(0).uniform(size=(10, 10)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(10).repeat()
    dataset = dataset.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)
    return dataset.batch(batch_size).prefetch(2)


with strategy.scope():
    model = keras.Sequential([keras.layers.Dense(10), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), loss="mse", steps_per_execution=10)

working_dir = tempfile.mkdtemp()
checkpoints = keras.callbacks.ModelCheckpoint(
    os.path.join(working_dir, "ckpt-{epoch}.weights.h5"), save_weights_only=True
)
history = model.fit(fit_dataset_fn, epochs=5, steps_per_epoch=20, callbacks=[checkpoints], verbose=0)
print(f"Model.fit: loss {history.history['loss'][0]:.4f}, then {history.history['loss'][-1]:.4f}")
print("saved:", sorted(os.listdir(working_dir)))

# Training with a loop of one's own: does a set of three figures have an avenger?

feature_vocab = ["avenger", "ironman", "batman", "hulk", "spiderman", "kingkong", "wonder_woman"]
label_vocab = ["yes", "no"]


def feature_and_label_gen(num_examples, seed):
    rng = random.Random(seed)
    examples = {"features": [], "label": []}
    for _ in range(num_examples):
        features = rng.sample(feature_vocab, 3)
        examples["features"].append(features)
        examples["label"].append(["yes"] if "avenger" in features else ["no"])
    return examples


def preprocessed(x):
    """Returns ids of words: of features from 1 on, since 0 is that of other words; of a label 0 for "yes"."""
    features = [feature_vocab.index(word.decode()) + 1 for word in x["features"].numpy()]
    labels = [label_vocab.index(word.decode()) for word in x["label"].numpy()]
    return {"features": np.array(features, "int32")}, np.array(labels, "int32")


def dataset_fn(_):
    raw_dataset = tf.data.Dataset.from_tensor_slices(feature_and_label_gen(200, seed=1))
    return raw_dataset.map(preprocessed).shuffle(200).batch(32).repeat()


with strategy.scope():
    model_input = keras.layers.Input(shape=(3,), dtype="int32", name="features")
    emb_layer = keras.layers.Embedding(input_dim=len(feature_vocab) + 1, output_dim=options.width)
    emb_output = keras.ops.mean(emb_layer(model_input), axis=1)
    dense_output = keras.layers.Dense(units=1, activation="sigmoid")(emb_output)
    model = keras.Model({"features": model_input}, dense_output)
    optimizer = keras.optimizers.RMSprop(learning_rate=0.001)
    accuracy = keras.metrics.Accuracy()

(table,) = emb_layer.weights
if options.width >= 16384:
    assert [part.shape for part in table.variables] == [(4, options.width)] * 2
    print("parts of the table:", [part.device for part in table.variables])


@tf.function
def step_fn(iterator):
    def replica_fn(batch_data, labels):
        with tf.GradientTape() as tape:
            pred = model(batch_data, training=True)
            per_example_loss = keras.losses.BinaryCrossentropy(reduction=None)(labels, pred)
            loss = tf.nn.compute_average_loss(per_example_loss)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        accuracy.update_state(labels, tf.cast(tf.greater(pred, 0.5), tf.int32))
        return loss

    batch_data, labels = next(iterator)
    losses = strategy.run(replica_fn, args=(batch_data, labels))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)


@tf.function
def per_worker_dataset_fn():
    return strategy.distribute_datasets_from_function(dataset_fn)


per_worker_iterator = iter(coordinator.create_per_worker_dataset(per_worker_dataset_fn))
num_epochs, steps_per_epoch = 4, 5
for epoch in range(num_epochs):
    accuracy.reset_state()
    for _ in range(steps_per_epoch):
        coordinator.schedule(step_fn, args=(per_worker_iterator,))
    # Wait at epoch boundaries.
    coordinator.join()
    print(f"Finished epoch {epoch}, accuracy is {float(accuracy.result()):.3f}.")

loss = coordinator.schedule(step_fn, args=(per_worker_iterator,))
print(f"Final loss is {loss.fetch():.4f}")

# Evaluation in the coordinator's process.


def eval_dataset_fn():
    examples = feature_and_label_gen(16, seed=2)
    return tf.data.Dataset.from_tensor_slices(examples).map(preprocessed).repeat().batch(8)


with strategy.scope():
    eval_accuracy = keras.metrics.Accuracy()

for batch_data, labels in eval_dataset_fn().take(2):
    pred = model(batch_data, training=False)
    eval_accuracy.update_state(labels, tf.cast(tf.greater(pred, 0.5), tf.int32))
print(f"Evaluation accuracy: {float(eval_accuracy.result()):.3f}")


# Evaluation by the workers.


@tf.function
def eval_step(iterator):
    def replica_fn(batch_data, labels):
        pred = model(batch_data, training=False)
        eval_accuracy.update_state(labels, tf.cast(tf.greater(pred, 0.5), tf.int32))

    batch_data, labels = next(iterator)
    strategy.run(replica_fn, args=(batch_data, labels))


eval_accuracy.reset_state()
per_worker_eval_iterator = iter(coordinator.create_per_worker_dataset(eval_dataset_fn))
for _ in range(4):
    coordinator.schedule(eval_step, args=(per_worker_eval_iterator,))
coordinator.join()
print(f"Evaluation accuracy of the workers: {float(eval_accuracy.result()):.3f}")
