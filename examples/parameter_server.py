"""A recommender whose embeddings are divided over two parameter servers, trained by workers that do not wait.

replicax launch --workers 3 --ps 2 examples/parameter_server.py         # with --evaluator: each checkpoint is evaluated
python examples/parameter_server.py         # the same tasks, in one process

From the last four words of a session it recommends ten for the next one. The sessions are the pages of the Python
language reference, which come with Python. Always recommending the ten most frequent words hits in 24 of 100 cases, the
trained recommender in about 35. A restarted program goes on from its last checkpoint (--max-restarts of the launcher).
"""

import argparse
import collections
import os
import re
from pydoc_data import topics

import jax.numpy as jnp
import numpy as np
import optax

import replicax as rx
from replicax.coordinator import ClusterCoordinator, Server, experimental_get_current_worker_index

BATCH, NEGATIVES, HISTORY, WIDTH = 256, 256, 4, 32
TEST_EVERY = 10  # pages, of which one is not trained on

parser = argparse.ArgumentParser()
parser.add_argument("--folder", default="parameter-server-checkpoints", help="where the checkpoints are")
parser.add_argument("--steps", type=int, default=600, help="of all workers together")
options = parser.parse_args()

# All tasks run this program. Workers and parameter servers serve the chief until the launcher ends them.
evaluates = False
if "TF_CONFIG" in os.environ:
    resolver = rx.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type in ("worker", "ps"):
        Server(resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id).join()
    evaluates = resolver.task_type == "evaluator"
else:
    names = [("worker", 0), ("worker", 1), ("worker", 2), ("ps", 0), ("ps", 1)]
    local = [Server.create_local_server() for _ in names]
    addresses = [server.target.removeprefix("grpc://") for server in local]
    spec = rx.ClusterSpec({"worker": addresses[:3], "ps": addresses[3:]})
    resolver = rx.cluster_resolver.SimpleClusterResolver(spec, rpc_layer="grpc")


def sessions(test):
    """Returns histories of words and the words that follow, as ids, and how many words there are. 0 is a rare word."""
    pages = [re.findall(r"[a-z_]+", topics.topics[name].lower()) for name in sorted(topics.topics)]
    counts = collections.Counter(word for page in pages for word in page)
    ids = {word: i for i, (word, count) in enumerate(counts.most_common(), 1) if count >= 3}
    chosen = [page for i, page in enumerate(pages) if (i % TEST_EVERY == 0) == test]
    words = [np.array([ids.get(word, 0) for word in page], "int32") for page in chosen]
    histories = np.concatenate([np.lib.stride_tricks.sliding_window_view(page, HISTORY + 1) for page in words])
    histories = histories[histories[:, -1] > 0]
    return histories[:, :-1], histories[:, -1], len(ids) + 1


def batches():
    """Returns the dataset of one worker, which calls this itself: the data are not sent to it."""
    histories, following, count = sessions(test=False)
    chances = (np.bincount(following, minlength=count) + 1) ** 0.75
    chances /= chances.sum()
    rng = np.random.default_rng(int(experimental_get_current_worker_index()))

    def draw():
        while True:
            rows = rng.integers(0, len(following), BATCH)
            negatives = rng.choice(count, NEGATIVES, p=chances).astype("int32")
            words = np.concatenate([following[rows], negatives])
            yield histories[rows], words, np.log(chances[words]).astype("float32")

    shapes = ([BATCH, HISTORY], jnp.int32), ([BATCH + NEGATIVES], jnp.int32), ([BATCH + NEGATIVES], jnp.float32)
    specs = tuple(rx.TensorSpec(shape, dtype) for shape, dtype in shapes)
    return rx.data.Dataset.from_generator(draw, output_signature=specs).prefetch(2)


histories, following, count = sessions(test=True)
if evaluates:
    strategy = rx.OneDeviceStrategy("CPU:0")
else:
    strategy = rx.ParameterServerStrategy(resolver, rx.experimental.partitioners.FixedShardsPartitioner(2))
    coordinator = ClusterCoordinator(strategy)
rng = np.random.default_rng(0)
with strategy.scope():
    # A row for each word at each place of the history, and a row and a bias for each word that may follow.
    seen = rx.Variable(rng.normal(0, 0.1, (HISTORY * count, WIDTH)).astype("float32"), name="seen")
    offered = rx.Variable(rng.normal(0, 0.1, (count, WIDTH)).astype("float32"), name="offered")
    bias = rx.Variable(np.zeros(count, "float32"), name="bias")
    steps = rx.Variable(0, name="steps")
    optimizer = rx.Optimizer(optax.adam(0.01), [seen, offered, bias])

checkpoint = rx.train.Checkpoint(seen=seen, offered=offered, bias=bias, steps=steps, optimizer=optimizer)


def scores(histories, words, seen, offered, bias):
    """Returns how well words follow histories: of each history with each word."""
    session = seen[histories * HISTORY + jnp.arange(HISTORY)].sum(axis=1)
    return session @ offered[words].T + bias[words]


@rx.function
def train_step(iterator):
    # The words that follow, negatives that all histories of the batch share, and how often they are drawn as such.
    histories, words, log_chances = next(iterator)
    with rx.GradientTape() as tape:
        logits = scores(histories, words, seen.value(), offered.value(), bias.value()) - log_chances
        same = (words[None] == words[:BATCH, None]) & ~jnp.eye(BATCH, BATCH + NEGATIVES, dtype=bool)
        logits = jnp.where(same, -1e9, logits)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.arange(BATCH)).mean()
    optimizer.apply_gradients(tape.gradient(loss, [seen, offered, bias]))
    steps.assign_add(1)
    return loss


@rx.function
def hits(histories, following):
    """Returns in how many cases the word that follows is among the ten with the highest scores."""
    found = scores(histories, jnp.arange(1, count), seen.value(), offered.value(), bias.value())
    own = jnp.take_along_axis(found, following[:, None] - 1, axis=1)
    return jnp.sum(jnp.sum(found > own, axis=1) < 10)


if evaluates:
    for path in rx.train.checkpoints_iterator(options.folder):
        checkpoint.restore(path)
        print(f"hits after {int(steps)} steps: {int(hits(histories, following)) / len(following):.3f}")
        if int(steps) >= options.steps:
            break
    raise SystemExit

manager = rx.train.CheckpointManager(checkpoint, options.folder, 2)
restored = manager.restore_or_initialize()
print(f"{count} words; {'going on from ' + restored if restored else 'starting anew'} after {int(steps)} steps")
iterator = iter(coordinator.create_per_worker_dataset(batches))
while (done := int(steps)) < options.steps:
    losses = [coordinator.schedule(train_step, args=(iterator,)) for _ in range(min(150, options.steps - done))]
    coordinator.join()  # all workers are done with it: a checkpoint is of one moment
    loss = np.mean(coordinator.fetch(losses[-20:]))
    print(f"step {int(steps)}: loss {loss:.3f}, saved as {manager.save()}")

# The test data, a part for each closure, by whichever worker is free.
parts = zip(np.array_split(histories, 4), np.array_split(following, 4))
found = sum(coordinator.fetch([coordinator.schedule(hits, args=part) for part in parts]))
popular = np.argsort(-np.bincount(sessions(test=False)[1], minlength=count))[:10]
print(f"hits of the most frequent words: {np.isin(following, popular).mean():.3f}")
print(f"hits of the recommender: {found / len(following):.3f}")
