"""A small ResNet on 32 x 32 images of textures, with augmentation, a class for training, and checkpoints."""

import argparse
import os
import tempfile
import time

import numpy as np
import tensorflow as tf

CLASSES, BATCH, WEIGHT_DECAY = 10, 128, 1e-4


def make_images(count, seed):
    """Upright and level stripes of five widths, with noise, in random colors."""
    random = np.random.default_rng(seed)
    labels = random.integers(CLASSES, size=count).astype(np.int64)
    y, x = np.mgrid[:32, :32].astype(np.float32)
    angle = (labels // 5)[:, None, None] * np.pi / 2
    width = (0.4 + 0.3 * (labels % 5))[:, None, None]
    phase = random.uniform(0, 2 * np.pi, [count, 1, 1])
    waves = np.sin((x * np.cos(angle) + y * np.sin(angle)) * width + phase)
    colors = random.uniform(0.2, 1.0, [count, 1, 1, 3])
    images = 128 + 80 * waves[..., None] * colors + random.normal(0, 30, [count, 32, 32, 3])
    return np.clip(images, 0, 255).astype(np.uint8), labels


def augment(image, label):
    image = tf.image.convert_image_dtype(image, tf.float32)
    image = tf.image.resize_with_crop_or_pad(image, 40, 40)
    image = tf.image.random_crop(image, [32, 32, 3])
    image = tf.image.random_flip_left_right(image)
    image = tf.image.random_brightness(image, 0.1)
    image = tf.image.random_contrast(image, 0.8, 1.2)
    return tf.image.per_image_standardization(image), label


def prepare(image, label):
    return tf.image.per_image_standardization(tf.image.convert_image_dtype(image, tf.float32)), label


class Block(tf.keras.layers.Layer):
    def __init__(self, filters, strides=1):
        super().__init__()
        options = {"padding": "same", "use_bias": False, "kernel_initializer": "he_normal"}
        self.conv1 = tf.keras.layers.Conv2D(filters, 3, strides, **options)
        self.norm1 = tf.keras.layers.BatchNormalization(momentum=0.9)
        self.conv2 = tf.keras.layers.Conv2D(filters, 3, **options)
        self.norm2 = tf.keras.layers.BatchNormalization(momentum=0.9)
        self.shortcut = tf.keras.layers.Conv2D(filters, 1, strides, **options) if strides > 1 else None

    def call(self, inputs, training=False):
        x = tf.nn.relu(self.norm1(self.conv1(inputs), training=training))
        x = self.norm2(self.conv2(x), training=training)
        return tf.nn.relu(x + (inputs if self.shortcut is None else self.shortcut(inputs)))


class ResNet(tf.keras.Model):
    def __init__(self, filters=(16, 32, 64), blocks=2):
        super().__init__()
        self.stem = tf.keras.layers.Conv2D(filters[0], 3, padding="same", use_bias=False)
        self.norm = tf.keras.layers.BatchNormalization(momentum=0.9)
        self.stack = [
            Block(width, strides=2 if index == 0 and width != filters[0] else 1)
            for width in filters
            for index in range(blocks)
        ]
        self.pool = tf.keras.layers.GlobalAveragePooling2D()
        self.head = tf.keras.layers.Dense(CLASSES)

    def call(self, inputs, training=False):
        x = tf.nn.relu(self.norm(self.stem(inputs), training=training))
        for block in self.stack:
            x = block(x, training=training)
        return self.head(self.pool(x))


class Trainer:
    def __init__(self, steps_per_epoch, folder):
        self.model = ResNet()
        schedule = tf.keras.optimizers.schedules.PiecewiseConstantDecay(
            [2 * steps_per_epoch, 4 * steps_per_epoch], [0.1, 0.02, 0.004]
        )
        self.optimizer = tf.keras.optimizers.SGD(schedule, momentum=0.9, nesterov=True)
        self.loss_fn = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.train_loss = tf.keras.metrics.Mean("loss")
        self.train_accuracy = tf.keras.metrics.SparseCategoricalAccuracy("accuracy")
        self.test_accuracy = tf.keras.metrics.SparseCategoricalAccuracy("test_accuracy")
        self.epoch = tf.Variable(0, dtype=tf.int64, trainable=False)
        self.model(tf.zeros([1, 32, 32, 3]))
        self.optimizer.build(self.model.trainable_variables)
        self.checkpoint = tf.train.Checkpoint(model=self.model, optimizer=self.optimizer, epoch=self.epoch)
        self.manager = tf.train.CheckpointManager(self.checkpoint, folder, max_to_keep=2)
        if self.manager.restore_or_initialize():
            print("restored from", self.manager.latest_checkpoint)

    @tf.function
    def train_step(self, images, labels):
        with tf.GradientTape() as tape:
            logits = self.model(images, training=True)
            loss = self.loss_fn(labels, logits)
            kernels = [v for v in self.model.trainable_variables if v.shape.rank > 1]
            total = loss + WEIGHT_DECAY * tf.add_n([tf.nn.l2_loss(kernel) for kernel in kernels])
        gradients = tape.gradient(total, self.model.trainable_variables)
        gradients, _ = tf.clip_by_global_norm(gradients, 5.0)
        self.optimizer.apply_gradients(zip(gradients, self.model.trainable_variables))
        self.train_loss.update_state(loss)
        self.train_accuracy.update_state(labels, logits)

    @tf.function
    def test_step(self, images, labels):
        self.test_accuracy.update_state(labels, self.model(images, training=False))

    def train(self, train_data, test_data, epochs):
        while self.epoch < epochs:
            start = time.time()
            self.train_loss.reset_state()
            self.train_accuracy.reset_state()
            self.test_accuracy.reset_state()
            for step, (images, labels) in enumerate(train_data):
                self.train_step(images, labels)
                if step == 0 and self.epoch == 0:
                    print(f"first step: loss {self.train_loss.result().numpy():.4f}", flush=True)
            for images, labels in test_data:
                self.test_step(images, labels)
            self.epoch.assign_add(1)
            self.manager.save()
            loss, accuracy = self.train_loss.result().numpy(), self.train_accuracy.result().numpy()
            test = self.test_accuracy.result().numpy()
            print(
                f"epoch {self.epoch.numpy()}: loss {loss:.4f}, accuracy {accuracy:.4f}, test accuracy {test:.4f}, "
                f"{time.time() - start:.2f} s",
                flush=True,
            )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--images", type=int, default=2560)
    parser.add_argument("--folder")
    arguments = parser.parse_args()
    tf.random.set_seed(1)
    train_images, test_images = make_images(arguments.images, 1), make_images(512, 2)
    train_data = (
        tf.data.Dataset.from_tensor_slices(train_images)
        .shuffle(arguments.images, seed=3)
        .map(augment, num_parallel_calls=tf.data.AUTOTUNE)
        .batch(BATCH, drop_remainder=True)
        .prefetch(tf.data.AUTOTUNE)
    )
    test_data = tf.data.Dataset.from_tensor_slices(test_images).map(prepare, tf.data.AUTOTUNE).batch(BATCH)
    with tempfile.TemporaryDirectory() as temporary:
        trainer = Trainer(arguments.images // BATCH, os.path.join(arguments.folder or temporary, "checkpoints"))
        trainer.train(train_data, test_data, arguments.epochs)


if __name__ == "__main__":
    main()
