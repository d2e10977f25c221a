"""Sequence to sequence with Bahdanau's attention: dates as people write them into those of ISO 8601."""

import argparse
import datetime
import random
import time

import numpy as np
import tensorflow as tf

BATCH, UNITS, EMBEDDING = 64, 128, 32
FORMATS = ["%d %B %Y", "%B %d, %Y", "%d.%m.%Y", "%a %d %b %Y", "%A, %d %B %y", "%m/%d/%Y"]


class Vocabulary:
    def __init__(self, texts):
        self.characters = ["<pad>", "<start>", "<end>", *sorted(set("".join(texts)))]
        self.index = {character: number for number, character in enumerate(self.characters)}

    def encode(self, texts):
        rows = [[1, *(self.index[character] for character in text), 2] for text in texts]
        result = np.zeros([len(rows), max(map(len, rows))], np.int32)
        for number, row in enumerate(rows):
            result[number, : len(row)] = row
        return result

    def decode(self, row):
        text = []
        for number in row:
            if number == 2:
                break
            text.append(self.characters[number])
        return "".join(text)


def make_dates(count):
    generator = random.Random(1)
    dates = [datetime.date(1950, 1, 1) + datetime.timedelta(generator.randrange(36500)) for _ in range(count)]
    return [date.strftime(generator.choice(FORMATS)).lower() for date in dates], [date.isoformat() for date in dates]


class Encoder(tf.keras.Model):
    def __init__(self, size):
        super().__init__()
        self.embedding = tf.keras.layers.Embedding(size, EMBEDDING)
        self.gru = tf.keras.layers.GRU(UNITS, return_sequences=True, return_state=True)

    def call(self, x, state):
        return self.gru(self.embedding(x), initial_state=state)

    def initial_state(self, batch):
        return tf.zeros([batch, UNITS])


class BahdanauAttention(tf.keras.layers.Layer):
    def __init__(self, units):
        super().__init__()
        self.query = tf.keras.layers.Dense(units)
        self.keys = tf.keras.layers.Dense(units)
        self.score = tf.keras.layers.Dense(1)

    def call(self, state, values):
        score = self.score(tf.nn.tanh(self.query(tf.expand_dims(state, 1)) + self.keys(values)))
        weights = tf.nn.softmax(score, axis=1)
        return tf.reduce_sum(weights * values, axis=1), weights


class Decoder(tf.keras.Model):
    def __init__(self, size):
        super().__init__()
        self.embedding = tf.keras.layers.Embedding(size, EMBEDDING)
        self.attention = BahdanauAttention(UNITS)
        self.gru = tf.keras.layers.GRU(UNITS, return_sequences=True, return_state=True)
        self.output_layer = tf.keras.layers.Dense(size)

    def call(self, x, state, encoded):
        context, weights = self.attention(state, encoded)
        x = tf.concat([tf.expand_dims(context, 1), self.embedding(x)], axis=-1)
        output, state = self.gru(x, initial_state=state)
        return self.output_layer(tf.squeeze(output, axis=1)), state, weights


class Translator:
    def __init__(self, source_size, target_size, target_length):
        self.encoder, self.decoder = Encoder(source_size), Decoder(target_size)
        self.optimizer = tf.keras.optimizers.Adam(2e-3)
        self.loss_object = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
        self.target_length = target_length

    def loss_function(self, real, predicted):
        mask = tf.cast(tf.not_equal(real, 0), tf.float32)
        return tf.reduce_mean(self.loss_object(real, predicted) * mask)

    @tf.function
    def train_step(self, source, target):
        loss = 0.0
        with tf.GradientTape() as tape:
            encoded, state = self.encoder(source, self.encoder.initial_state(BATCH))
            inputs = target[:, :1]
            for t in range(1, target.shape[1]):
                logits, state, _ = self.decoder(inputs, state, encoded)
                loss += self.loss_function(target[:, t], logits)
                inputs = tf.expand_dims(target[:, t], 1)  # teacher forcing
        variables = self.encoder.trainable_variables + self.decoder.trainable_variables
        gradients = tape.gradient(loss, variables)
        self.optimizer.apply_gradients(zip(gradients, variables))
        return loss / int(target.shape[1])

    @tf.function
    def translate(self, source):
        batch = tf.shape(source)[0]
        encoded, state = self.encoder(source, self.encoder.initial_state(batch))
        token = tf.ones([batch, 1], tf.int32)
        result = tf.TensorArray(tf.int32, size=self.target_length)
        for t in tf.range(self.target_length):
            logits, state, _ = self.decoder(token, state, encoded)
            token = tf.argmax(logits, axis=-1, output_type=tf.int32)[:, tf.newaxis]
            result = result.write(t, token[:, 0])
        return tf.transpose(result.stack())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=4800)
    arguments = parser.parse_args()
    tf.random.set_seed(1)
    sources, targets = make_dates(arguments.pairs + 128)
    source_words, target_words = Vocabulary(sources), Vocabulary(targets)
    encoded, decoded = source_words.encode(sources), target_words.encode(targets)
    dataset = (
        tf.data.Dataset.from_tensor_slices((encoded[:-128], decoded[:-128]))
        .shuffle(arguments.pairs, seed=2)
        .batch(BATCH, drop_remainder=True)
    )
    translator = Translator(len(source_words.characters), len(target_words.characters), decoded.shape[1] - 1)
    first = True
    for epoch in range(1, arguments.epochs + 1):
        start = time.time()
        total, steps = 0.0, 0
        for source, target in dataset:
            loss = translator.train_step(source, target)
            if first:
                print(f"first step: loss {loss.numpy():.4f}", flush=True)
                first = False
            total += loss
            steps += 1
        found = translator.translate(tf.constant(encoded[-128:])).numpy()
        right = np.mean([target_words.decode(row) == text for row, text in zip(found, targets[-128:])])
        print(
            f"epoch {epoch}: loss {total / steps:.4f}, right {right:.3f}, {time.time() - start:.2f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
