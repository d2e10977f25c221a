"""word2vec: skip-grams of a made-up language, sampled softmax (or noise-contrastive estimation), and neighbors."""

import argparse
import time

import numpy as np
import tensorflow as tf

VOCABULARY, TOPICS, LENGTH, WINDOW = 4000, 40, 20, 2
BATCH, EMBEDDING, SAMPLED = 512, 96, 64


def make_sentences(count, seed):
    """Sentences about one topic each; word 0 is the most frequent one, as the samplers expect."""
    random = np.random.default_rng(seed)
    topics = random.integers(TOPICS, size=[count, 1])
    ranks = np.minimum(random.zipf(1.3, [count, LENGTH]) - 1, VOCABULARY // TOPICS - 1)
    return (ranks * TOPICS + topics).astype(np.int64)


def skip_grams(sentence):
    """All pairs of a word and one of its neighbors."""
    pairs = []
    for distance in range(1, WINDOW + 1):
        left, right = sentence[:-distance], sentence[distance:]
        pairs.append(tf.stack([left, right], axis=1))
        pairs.append(tf.stack([right, left], axis=1))
    return tf.concat(pairs, axis=0)


class Word2Vec(tf.Module):
    def __init__(self, loss, name=None):
        super().__init__(name)
        self.loss = loss
        self.embeddings = tf.Variable(tf.random.uniform([VOCABULARY, EMBEDDING], -0.5, 0.5), name="embeddings")
        self.weights = tf.Variable(
            tf.random.truncated_normal([VOCABULARY, EMBEDDING], stddev=1 / EMBEDDING**0.5), name="weights"
        )
        self.biases = tf.Variable(tf.zeros([VOCABULARY]), name="biases")

    def __call__(self, words, neighbors):
        inputs = tf.nn.embedding_lookup(self.embeddings, words)
        labels = tf.expand_dims(neighbors, 1)
        sampled = tf.random.log_uniform_candidate_sampler(labels, 1, SAMPLED, True, VOCABULARY)
        function = tf.nn.nce_loss if self.loss == "nce" else tf.nn.sampled_softmax_loss
        losses = function(
            self.weights,
            self.biases,
            labels,
            inputs,
            num_sampled=SAMPLED,
            num_classes=VOCABULARY,
            sampled_values=sampled,
        )
        return tf.reduce_mean(losses)

    @tf.function
    def nearest(self, words, count):
        normed = tf.math.l2_normalize(self.embeddings, axis=1)
        similarity = tf.matmul(tf.gather(normed, words), normed, transpose_b=True)
        return tf.math.top_k(similarity, count + 1).indices[:, 1:]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--sentences", type=int, default=5000)
    parser.add_argument("--loss", choices=["sampled_softmax", "nce"], default="sampled_softmax")
    arguments = parser.parse_args()
    tf.random.set_seed(1)
    sentences = make_sentences(arguments.sentences, 1)
    dataset = (
        tf.data.Dataset.from_tensor_slices(sentences)
        .map(skip_grams, num_parallel_calls=tf.data.AUTOTUNE)
        .unbatch()
        .shuffle(20000, seed=2)
        .batch(BATCH, drop_remainder=True)
        .prefetch(tf.data.AUTOTUNE)
    )
    model = Word2Vec(arguments.loss)
    optimizer = tf.keras.optimizers.Adam(0.01)

    @tf.function
    def train_step(pairs):
        with tf.GradientTape() as tape:
            loss = model(pairs[:, 0], pairs[:, 1])
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    mean = tf.keras.metrics.Mean()
    asked = tf.range(TOPICS * 3)
    first = True
    for epoch in range(1, arguments.epochs + 1):
        start = time.time()
        mean.reset_state()
        for pairs in dataset:
            loss = train_step(pairs)
            if first:
                print(f"first step: loss {loss.numpy():.4f}", flush=True)
                first = False
            mean.update_state(loss)
        same_topic = tf.reduce_mean(tf.cast(model.nearest(asked, 5) % TOPICS == asked[:, None] % TOPICS, tf.float32))
        print(
            f"epoch {epoch}: loss {mean.result():.4f}, neighbors of the topic {same_topic:.3f}, "
            f"{time.time() - start:.2f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
