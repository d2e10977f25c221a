"""A convolutional variational autoencoder (VAE) that learns to write digits.

    python examples/vae.py                # on all accelerators or, without any, on 2 virtual devices
    python examples/vae.py --replicas 4   # on 4 virtual devices: the same losses, up to rounding

The 1,797 handwritten digits come with scikit-learn. The encoder describes an image by a few numbers, the decoder draws
an image from these numbers and a label. After training, vae.png shows images that the decoder draws from random
numbers. The model is an Equinox model, and the loss is written for one image, as Equinox does it.
"""

import argparse
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import replicax as rx

LATENT, CHANNELS = 8, 32

parser = argparse.ArgumentParser()
parser.add_argument("--replicas", type=int, default=2, help="virtual devices, used where there is no accelerator")
parser.add_argument("--steps", type=int, default=2000)
parser.add_argument("--batch", type=int, default=64, help="images of a step, of all replicas together")
parser.add_argument("--picture", default="vae.png", help="the picture to write")
options = parser.parse_args()

rx.config.set_virtual_devices({"CPU": options.replicas})
strategy = rx.MirroredStrategy()


class Encoder(eqx.Module):
    layers: eqx.nn.Sequential
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.layers = eqx.nn.Sequential(
            [
                eqx.nn.Conv2d(1, CHANNELS, 3, padding=1, key=keys[0]),
                eqx.nn.Lambda(jax.nn.gelu),
                eqx.nn.Conv2d(CHANNELS, 2 * CHANNELS, 3, stride=2, padding=1, key=keys[1]),
                eqx.nn.Lambda(jax.nn.gelu),
                eqx.nn.Lambda(jnp.ravel),
            ]
        )
        self.head = eqx.nn.Linear(2 * CHANNELS * 4 * 4 + 10, 2 * LATENT, key=keys[2])

    def __call__(self, image, label):
        """Return the mean and the log of the variance of the numbers that describe an image `[1, 8, 8]`."""
        features = jnp.concatenate([self.layers(image), jax.nn.one_hot(label, 10)])
        return jnp.split(self.head(features), 2)


class Decoder(eqx.Module):
    head: eqx.nn.Linear
    layers: eqx.nn.Sequential

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.head = eqx.nn.Linear(LATENT + 10, 2 * CHANNELS * 4 * 4, key=keys[0])
        self.layers = eqx.nn.Sequential(
            [
                eqx.nn.Lambda(jax.nn.gelu),
                eqx.nn.ConvTranspose2d(2 * CHANNELS, CHANNELS, 4, stride=2, padding=1, key=keys[1]),
                eqx.nn.Lambda(jax.nn.gelu),
                eqx.nn.Conv2d(CHANNELS, 1, 3, padding=1, key=keys[2]),
            ]
        )

    def __call__(self, latent, label):
        """Return the logits of the pixels of an image, `[1, 8, 8]`."""
        x = self.head(jnp.concatenate([latent, jax.nn.one_hot(label, 10)]))
        return self.layers(x.reshape(2 * CHANNELS, 4, 4))


def loss_of(model, image, label, key):
    """Return the negative of the evidence lower bound of one image, in nats."""
    encoder, decoder = model
    mean, log_variance = encoder(image, label)
    latent = mean + jnp.exp(log_variance / 2) * jax.random.normal(key, mean.shape)
    reconstruction = optax.sigmoid_binary_cross_entropy(decoder(latent, label), image).sum()
    divergence = 0.5 * jnp.sum(jnp.exp(log_variance) + mean**2 - 1 - log_variance)
    return reconstruction + divergence


digits = load_digits()
images, labels = (digits.images[:, None] / 16).astype(np.float32), digits.target.astype(np.int32)
# The number of each image makes its random numbers its own, whichever replica draws them.
elements = (images, labels, np.arange(len(images), dtype=np.int32))
dataset = rx.data.Dataset.from_tensor_slices(elements).shuffle(len(images), seed=0).repeat()
batches = strategy.experimental_distribute_dataset(dataset.batch(options.batch).take(options.steps))

keys = jax.random.split(jax.random.key(0))
arrays, static = eqx.partition((Encoder(keys[0]), Decoder(keys[1])), eqx.is_inexact_array)
with strategy.scope():
    parameters = rx.Variable(arrays)
    step = rx.Variable(0)
    optimizer = rx.Optimizer(optax.adam(optax.cosine_decay_schedule(2e-3, options.steps)), parameters)


@rx.function
def train_step(images, labels, numbers):
    def replica_step(images, labels, numbers):
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(jax.random.key(step.value()), numbers)

        def mean_loss(arrays):
            model = eqx.combine(arrays, static)
            return rx.share_of_mean(jax.vmap(loss_of, in_axes=(None, 0, 0, 0))(model, images, labels, keys))

        loss, gradients = jax.value_and_grad(mean_loss)(parameters.value())
        optimizer.apply_gradients(gradients)  # sums the gradients of the replicas
        step.assign_add(1)
        return loss

    return strategy.reduce("SUM", strategy.run(replica_step, args=(images, labels, numbers)), axis=None)


def draw(path, encoder, decoder):
    """Write a picture of digits from the data set, encoded and decoded again, and of digits from random numbers."""
    import matplotlib.figure

    chosen = np.argsort(labels, kind="stable")[:: len(labels) // 20][:20]
    means, _ = jax.vmap(encoder)(images[chosen], labels[chosen])
    decoded = jax.nn.sigmoid(jax.vmap(decoder)(means, labels[chosen]))
    latents = jax.random.normal(jax.random.key(1), (6, 20, LATENT))
    drawn = jax.nn.sigmoid(jax.vmap(jax.vmap(decoder), in_axes=(0, None))(latents, np.repeat(np.arange(10), 2)))
    figure = matplotlib.figure.Figure(figsize=(9, 4.5), layout="constrained")
    above, below = figure.subplots(2, height_ratios=(2, 6))
    for axes, rows, title in [
        (above, [images[chosen], decoded], "digits of the data set; below each, what is decoded from its 8 numbers"),
        (below, drawn, "digits decoded from random numbers, two columns for each label"),
    ]:
        rows = [np.pad(row[:, 0], ((0, 0), (1, 1), (1, 1))) for row in rows]  # a pixel of white around each
        together = np.concatenate([np.concatenate([*row], axis=1) for row in rows])
        axes.imshow(together, cmap="gray_r", vmin=0, vmax=1)
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_axis_off()
    figure.savefig(path, dpi=80)


losses, start = [], time.perf_counter()
for number, batch in enumerate(batches, 1):
    losses.append(train_step(*batch))
    if number % 500 == 0 or number == options.steps:
        loss, seconds = np.mean([float(loss) for loss in losses[-500:]]), time.perf_counter() - start
        print(f"step {number}: loss {loss:.5f}, {seconds:.0f} s", flush=True)
draw(options.picture, *eqx.combine(parameters.value(), static))
print(f"The digits are in {options.picture}.")
