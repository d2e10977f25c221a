"""DCGAN: a generator and a discriminator of drawn shapes, trained with two tapes and two optimizers."""

import argparse
import time

import numpy as np
import tensorflow as tf
from tensorflow.keras import layers

BATCH, NOISE = 64, 64


def make_drawings(count, seed):
    """Rings and crosses, 28 x 28, between -1 and 1."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[:28, :28].astype(np.float32)
    center = random.uniform(11, 17, [2, count, 1, 1])
    radius, width = random.uniform(5, 9, [count, 1, 1]), random.uniform(1, 2, [count, 1, 1])
    dx, dy = x - center[0], y - center[1]
    rings = np.exp(-(((np.hypot(dx, dy) - radius) / width) ** 2))
    crosses = np.exp(-((np.minimum(abs(dx), abs(dy)) / width) ** 2)) * (np.maximum(abs(dx), abs(dy)) < radius)
    images = np.where(random.random([count, 1, 1]) < 0.5, rings, crosses)
    return (images * 2 - 1).astype(np.float32)[..., None]


def make_generator():
    return tf.keras.Sequential(
        [
            layers.Input([NOISE]),
            layers.Dense(7 * 7 * 64, use_bias=False),
            layers.BatchNormalization(),
            layers.LeakyReLU(),
            layers.Reshape((7, 7, 64)),
            layers.Conv2DTranspose(64, 5, strides=1, padding="same", use_bias=False),
            layers.BatchNormalization(),
            layers.LeakyReLU(),
            layers.Conv2DTranspose(32, 5, strides=2, padding="same", use_bias=False),
            layers.BatchNormalization(),
            layers.LeakyReLU(),
            layers.Conv2DTranspose(1, 5, strides=2, padding="same", use_bias=False, activation="tanh"),
        ]
    )


def make_discriminator():
    return tf.keras.Sequential(
        [
            layers.Input([28, 28, 1]),
            layers.Conv2D(32, 5, strides=2, padding="same"),
            layers.LeakyReLU(),
            layers.Dropout(0.3),
            layers.Conv2D(64, 5, strides=2, padding="same"),
            layers.LeakyReLU(),
            layers.Dropout(0.3),
            layers.Flatten(),
            layers.Dense(1),
        ]
    )


generator, discriminator = make_generator(), make_discriminator()
cross_entropy = tf.keras.losses.BinaryCrossentropy(from_logits=True)
generator_optimizer = tf.keras.optimizers.Adam(2e-4, beta_1=0.5)
discriminator_optimizer = tf.keras.optimizers.Adam(2e-4, beta_1=0.5)


def discriminator_loss(real, fake):
    return cross_entropy(tf.ones_like(real), real) + cross_entropy(tf.zeros_like(fake), fake)


def generator_loss(fake):
    return cross_entropy(tf.ones_like(fake), fake)


@tf.function
def train_step(images):
    noise = tf.random.normal([BATCH, NOISE])
    with tf.GradientTape() as gen_tape, tf.GradientTape() as disc_tape:
        generated = generator(noise, training=True)
        real = discriminator(images, training=True)
        fake = discriminator(generated, training=True)
        gen_loss, disc_loss = generator_loss(fake), discriminator_loss(real, fake)
    gen_gradients = gen_tape.gradient(gen_loss, generator.trainable_variables)
    disc_gradients = disc_tape.gradient(disc_loss, discriminator.trainable_variables)
    generator_optimizer.apply_gradients(zip(gen_gradients, generator.trainable_variables))
    discriminator_optimizer.apply_gradients(zip(disc_gradients, discriminator.trainable_variables))
    return gen_loss, disc_loss


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--images", type=int, default=5120)
    arguments = parser.parse_args()
    tf.random.set_seed(1)
    images = make_drawings(arguments.images, 1)
    dataset = (
        tf.data.Dataset.from_tensor_slices(images).shuffle(arguments.images, seed=2).batch(BATCH, drop_remainder=True)
    )
    seed = tf.random.normal([16, NOISE])
    first = True
    for epoch in range(1, arguments.epochs + 1):
        start = time.time()
        gen_losses, disc_losses = [], []
        for batch in dataset:
            gen_loss, disc_loss = train_step(batch)
            if first:
                print(f"first step: loss {disc_loss.numpy():.4f}", flush=True)
                first = False
            gen_losses.append(gen_loss)
            disc_losses.append(disc_loss)
        samples = generator(seed, training=False)
        print(
            f"epoch {epoch}: loss {tf.reduce_mean(disc_losses):.4f}, generator {tf.reduce_mean(gen_losses):.4f}, "
            f"ink {tf.reduce_mean(tf.cast(samples > 0, tf.float32)):.3f}, {time.time() - start:.2f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
