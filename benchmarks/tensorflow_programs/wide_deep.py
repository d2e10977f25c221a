"""Wide and deep: records of tf.train.Example, preprocessing layers, and Model.fit with callbacks."""

import argparse
import os
import tempfile
import time

import numpy as np
import tensorflow as tf

BATCH = 256
OCCUPATIONS = ["baker", "carpenter", "doctor", "driver", "farmer", "nurse", "painter", "teacher"]
REGIONS = ["north", "east", "south", "west"]
NUMBERS = ["age", "hours", "savings"]


def bytes_feature(text):
    return tf.train.Feature(bytes_list=tf.train.BytesList(value=[text.encode()]))


def float_feature(value):
    return tf.train.Feature(float_list=tf.train.FloatList(value=[value]))


def int_feature(value):
    return tf.train.Feature(int64_list=tf.train.Int64List(value=[value]))


def write_records(path, count, seed):
    random = np.random.default_rng(seed)
    age, hours = random.uniform(18, 80, count), random.normal(38, 9, count)
    savings = random.lognormal(8, 1, count)
    occupation, region = random.integers(len(OCCUPATIONS), size=count), random.integers(len(REGIONS), size=count)
    city = random.zipf(1.4, count) % 500
    score = 0.05 * (age - 45) + 0.08 * (hours - 38) + 0.7 * (np.log(savings) - 8) + 0.6 * ((occupation * 3) % 5 - 2)
    score += np.where((occupation + region) % 3 == 0, 1.5, -0.7) + 0.8 * np.sin(city)
    label = random.random(count) < 1 / (1 + np.exp(-score))
    with tf.io.TFRecordWriter(path) as writer:
        for i in range(count):
            features = {
                "age": float_feature(age[i]),
                "hours": float_feature(hours[i]),
                "savings": float_feature(savings[i]),
                "occupation": bytes_feature(OCCUPATIONS[occupation[i]]),
                "region": bytes_feature(REGIONS[region[i]]),
                "city": bytes_feature(f"city {city[i]}"),
                "label": int_feature(int(label[i])),
            }
            example = tf.train.Example(features=tf.train.Features(feature=features))
            writer.write(example.SerializeToString())


DESCRIPTION = {
    **{name: tf.io.FixedLenFeature([], tf.float32) for name in NUMBERS},
    **{name: tf.io.FixedLenFeature([], tf.string, default_value="") for name in ("occupation", "region", "city")},
    "label": tf.io.FixedLenFeature([], tf.int64),
}

occupation_lookup = tf.keras.layers.StringLookup(vocabulary=OCCUPATIONS)
region_lookup = tf.keras.layers.StringLookup(vocabulary=REGIONS)
city_hash = tf.keras.layers.Hashing(num_bins=128)
cross = tf.keras.layers.HashedCrossing(num_bins=64)


def parse(records):
    found = tf.io.parse_example(records, DESCRIPTION)
    label = tf.cast(found.pop("label"), tf.float32)
    inputs = {
        "numbers": tf.stack([found["age"], found["hours"], tf.math.log1p(found["savings"])], axis=1),
        "occupation": occupation_lookup(found["occupation"]),
        "region": region_lookup(found["region"]),
        "city": city_hash(found["city"]),
        "occupation_in_region": cross((found["occupation"], found["region"])),
    }
    return inputs, label


def make_model(normalization):
    numbers = tf.keras.Input([3], name="numbers")
    sizes = {"occupation": len(OCCUPATIONS) + 1, "region": len(REGIONS) + 1, "city": 128, "occupation_in_region": 64}
    indices = {name: tf.keras.Input([], dtype="int64", name=name) for name in sizes}
    one_hot = [
        tf.keras.layers.CategoryEncoding(num_tokens=size, output_mode="one_hot")(indices[name])
        for name, size in sizes.items()
    ]
    wide = tf.keras.layers.Dense(1)(tf.keras.layers.Concatenate()(one_hot))
    embedded = [tf.keras.layers.Embedding(size, 8)(indices[name]) for name, size in sizes.items()]
    deep = tf.keras.layers.Concatenate()([normalization(numbers), *embedded])
    for units in (256, 128, 64):
        deep = tf.keras.layers.Dense(units, activation="relu")(deep)
        deep = tf.keras.layers.Dropout(0.1)(deep)
    deep = tf.keras.layers.Dense(1)(deep)
    output = tf.keras.layers.Activation("sigmoid")(tf.keras.layers.Add()([wide, deep]))
    return tf.keras.Model({"numbers": numbers, **indices}, output)


class Clock(tf.keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.first = True

    def on_epoch_begin(self, epoch, logs=None):
        self.start = time.time()

    def on_train_batch_end(self, batch, logs=None):
        if self.first:
            print(f"first step: loss {logs['loss']:.4f}", flush=True)
            self.first = False

    def on_epoch_end(self, epoch, logs=None):
        shown = ", ".join(f"{name} {value:.4f}" for name, value in logs.items())
        print(f"epoch {epoch + 1}: {shown}, {time.time() - self.start:.2f} s", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--records", type=int, default=40960)
    arguments = parser.parse_args()
    tf.keras.utils.set_random_seed(1)
    with tempfile.TemporaryDirectory() as folder:
        paths = [os.path.join(folder, f"{name}.tfrecord") for name in ("train", "test")]
        write_records(paths[0], arguments.records, 1)
        write_records(paths[1], 4096, 2)
        train_data = (
            tf.data.TFRecordDataset(paths[0])
            .shuffle(8192, seed=3)
            .batch(BATCH)
            .map(parse, num_parallel_calls=tf.data.AUTOTUNE)
            .prefetch(tf.data.AUTOTUNE)
        )
        test_data = tf.data.TFRecordDataset(paths[1]).batch(BATCH).map(parse, num_parallel_calls=tf.data.AUTOTUNE)
        normalization = tf.keras.layers.Normalization()
        normalization.adapt(train_data.take(16).map(lambda inputs, label: inputs["numbers"]))
        model = make_model(normalization)
        model.compile(
            tf.keras.optimizers.Adam(1e-3),
            "binary_crossentropy",
            metrics=["accuracy", tf.keras.metrics.AUC(name="auc")],
        )
        callbacks = [
            Clock(),
            tf.keras.callbacks.EarlyStopping("val_loss", patience=3, restore_best_weights=True),
            tf.keras.callbacks.ModelCheckpoint(os.path.join(folder, "best.keras"), save_best_only=True),
            tf.keras.callbacks.TensorBoard(os.path.join(folder, "logs")),
        ]
        model.fit(train_data, validation_data=test_data, epochs=arguments.epochs, callbacks=callbacks, verbose=0)
        best = tf.keras.models.load_model(os.path.join(folder, "best.keras"))
        print(f"the best model's test loss: {best.evaluate(test_data, verbose=0)[0]:.4f}", flush=True)


if __name__ == "__main__":
    main()
