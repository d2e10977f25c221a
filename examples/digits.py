"""Trains a small network on handwritten digits, on several devices at once.

    python examples/digits.py                 on all accelerators or, without any, 4 virtual devices
    python examples/digits.py --replicas 2    on two devices: the same losses, to rounding
    replicax launch --workers 2 examples/digits.py --strategy multi_worker    in two processes: the same again

The 1,797 images come with scikit-learn. A batch of 64 is split among the replicas, each of which computes the loss and
the gradients of its part; the gradients are summed over the replicas, and every replica makes the same update.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import rich.console
import rich.progress
import rich.table

import replicax as rx

LAYOUT = ("NHWC", "HWIO", "NHWC")  # of images, kernels, images


def initial_parameters(seed):
    rng = np.random.default_rng(seed)

    def layer(*shape):
        weights = rng.normal(0, np.sqrt(2 / np.prod(shape[:-1])), shape)
        return {"w": weights.astype(np.float32), "b": np.zeros(shape[-1], np.float32)}

    return [layer(3, 3, 1, 16), layer(3, 3, 16, 32), layer(4 * 4 * 32, 10)]


def logits_of(parameters, images):
    """The model: two convolutions and a dense layer, in plain JAX."""
    *convolutions, dense = parameters
    for layer, strides in zip(convolutions, [(1, 1), (2, 2)]):
        images = jax.lax.conv_general_dilated(images, layer["w"], strides, "SAME", dimension_numbers=LAYOUT)
        images = jax.nn.gelu(images + layer["b"])  # smooth, so that rounding stays rounding
    return images.reshape(len(images), 4 * 4 * 32) @ dense["w"] + dense["b"]


def loss_of(parameters, images, labels, batch_size):
    """A replica's share of the mean loss over a batch, and its sums: of losses, of right answers, of images."""
    logits = logits_of(parameters, images)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    right = logits.argmax(axis=-1) == labels
    return losses.sum() / batch_size, jnp.stack([losses.sum(), right.sum(), jnp.float32(len(labels))])


# Compiled on their own as well, for uneven batches of several workers: there the replicas run eagerly.
loss_and_gradients = jax.jit(jax.value_and_grad(loss_of, has_aux=True))
predicted_logits = jax.jit(logits_of)


def train(strategy, options, console):
    """Trains and tests; returns the history, and the test images with their labels and predictions."""
    images, labels = load_images()
    cut = len(images) * 4 // 5
    examples = rx.data.Dataset.from_tensor_slices((images[:cut], labels[:cut]))
    batches = examples.shuffle(cut, seed=options.seed).batch(options.batch_size)
    train_data = strategy.experimental_distribute_dataset(batches)
    test_images = next(iter(strategy.experimental_distribute_dataset([images[cut:]])))

    with strategy.scope():  # a copy on every replica's device
        parameters = rx.Variable(lambda: initial_parameters(options.seed))
        optimizer = rx.Optimizer(optax.sgd(0.05, momentum=0.9), parameters)

    @rx.function
    def train_step(images, labels):
        def replica_step(images, labels):
            batch_size = rx.get_replica_context().all_reduce("SUM", jnp.float32(len(labels)))
            (_, sums), gradients = loss_and_gradients(parameters.value(), images, labels, batch_size)
            optimizer.apply_gradients(gradients)
            return sums

        return strategy.reduce("SUM", strategy.run(replica_step, args=(images, labels)), axis=None)

    @rx.function
    def predict(images):
        logits = strategy.run(lambda images: predicted_logits(parameters.value(), images), args=(images,))
        return strategy.gather(logits, axis=0).argmax(axis=-1)

    console.print(table_of(strategy, train_data, parameters))
    history = {"loss": [], "accuracy": [], "test_accuracy": []}
    with progress_bar(console) as bar:
        task = bar.add_task("", total=options.epochs * -(-cut // options.batch_size), status="compiling")
        for epoch in range(1, options.epochs + 1):
            sums, start = np.zeros(3), time.perf_counter()
            for images_of_step, labels_of_step in train_data:
                sums += np.asarray(train_step(images_of_step, labels_of_step))
                if not bar.tasks[task].completed:
                    console.print(f"first step: {time.perf_counter() - start:.1f} s, to trace and to compile included")
                loss, accuracy, speed = *sums[:2] / sums[2], sums[2] / (time.perf_counter() - start)
                status = f"loss {loss:.4f}, accuracy {accuracy:.1%}, {speed:,.0f} images/s"
                bar.update(task, advance=1, description=f"epoch {epoch}/{options.epochs}", status=status)
            predictions = np.asarray(predict(test_images))
            test_accuracy = np.mean(predictions == labels[cut:])
            console.print(f"epoch {epoch:{len(str(options.epochs))}}: {status}, test {test_accuracy:.1%}")
            for name, value in zip(history, (loss, accuracy, test_accuracy)):
                history[name].append(float(value))
    return history, (images[cut:], labels[cut:], predictions)


def load_images():
    """All images, `[1797, 8, 8, 1]` from 0 to 1, and their labels, in an order that is always the same."""
    # The file that `sklearn.datasets.load_digits` reads: to import that takes longer than a second start compiles.
    file = importlib.metadata.distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
    rows = np.loadtxt(file, np.float32, delimiter=",")  # 64 pixels and the label
    rows = rows[np.random.default_rng(0).permutation(len(rows))]
    return rows[:, :-1].reshape(-1, 8, 8, 1) / 16, rows[:, -1].astype(np.int32)


def table_of(strategy, dataset, parameters):
    sizes = [[len(part) for part in strategy.experimental_local_results(images)] for images, _ in dataset]
    table = rich.table.Table("replica", "device", "images of a batch", "of the last batch", "parameters")
    for copy, *images in zip(parameters.values, sizes[0], sizes[-1]):
        count = sum(map(np.prod, jax.tree.leaves(copy.shape)))
        device = copy.device.rpartition("device:")[2]
        table.add_row(str(len(table.rows)), device, *map(str, images), f"{count:,}")
    return table


def progress_bar(console):
    columns = ("{task.description}", rich.progress.BarColumn(20), "{task.percentage:3.0f} %", "{task.fields[status]}")
    return rich.progress.Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def draw(path, history, images, labels, predictions):
    """Training curves on the left; on the right test images with their predictions, wrong ones first."""
    import matplotlib.figure  # only now: the first step does not wait for it

    figure = matplotlib.figure.Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(4, 7), wspace=0.04)
    above, below = left.subplots(2, sharex=True)
    epochs = np.arange(len(history["loss"])) + 1
    above.semilogy(epochs, history["loss"], "o-", color="tab:blue", markersize=4)
    above.set_title("loss", loc="left", fontsize=10)
    for key, name, color in (("accuracy", "training", "tab:blue"), ("test_accuracy", "test", "tab:orange")):
        below.plot(epochs, 100 * np.array(history[key]), "o-", color=color, markersize=4, label=name)
    below.set_title("accuracy in %", loc="left", fontsize=10)
    below.legend(frameon=False, fontsize=9, loc="lower right")
    below.set_xlabel("epoch")
    below.xaxis.get_major_locator().set_params(integer=True)
    for axes in (above, below):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    wrong = predictions != labels
    title = f"{wrong.sum()} of the {len(labels)} test images are read wrongly; they come first, in red"
    right.suptitle(title, x=0.02, ha="left", fontsize=10)
    for axes, i in zip(right.subplots(4, 10).flat, np.argsort(~wrong, kind="stable")):
        axes.imshow(images[i, :, :, 0], cmap="gray_r")
        axes.set(xticks=[], yticks=[])
        axes.set_title(predictions[i], fontsize=9, pad=3)
        axes.spines[:].set(color="lightgray")
        if wrong[i]:
            axes.set_title(f"{predictions[i]}, is {labels[i]}", fontsize=9, pad=3, color="tab:red")
            axes.spines[:].set(color="tab:red", linewidth=2.5)
    figure.savefig(path, dpi=110)


class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"{self.prog}: {message}\n")


def whole_number(at_least):
    def parse(text):
        if not text.isdecimal() or int(text) < at_least:
            raise argparse.ArgumentTypeError(f"expected a whole number, {at_least} or more, got {text!r}")
        return int(text)

    return parse


def devices_for(options, parser):
    if "REPLICAX_VIRTUAL_DEVICES" not in os.environ:  # used where there is no accelerator
        rx.config.set_virtual_devices({"CPU": options.replicas or 4})
    devices = [name for name in rx.config.list_devices() if not name.startswith("CPU:")] or rx.config.list_devices()
    if (options.replicas or 1) > len(devices):
        parser.error(f"argument --replicas: {options.replicas} is more than the devices here, {', '.join(devices)}")
    return devices[: options.replicas]


def main(arguments=None):
    parser = Parser(description=__doc__.partition("\n")[0])
    parser.add_argument("--strategy", choices=("mirrored", "multi_worker"), default="mirrored")
    parser.add_argument("--replicas", type=whole_number(1), help="default: one an accelerator, or 4 (mirrored only)")
    parser.add_argument("--epochs", type=whole_number(1), default=10)
    parser.add_argument("--batch-size", type=whole_number(1), default=64, help="of all replicas together")
    parser.add_argument("--seed", type=whole_number(0), default=0, help="of the parameters and the order of images")
    parser.add_argument("--output", type=Path, default=Path("digits.png"), help="the picture to write")
    options = parser.parse_args(arguments)
    if options.output.suffix != ".png" or options.output.is_dir() or not os.access(options.output.parent, os.W_OK):
        parser.error(f"argument --output: expected a name.png in a folder that can be written, got {options.output}")
    if (options.replicas or 1) > options.batch_size:
        parser.error(f"{options.replicas} replicas cannot share a batch of {options.batch_size} images")

    if options.strategy == "multi_worker":  # the workers and their devices are the launcher's business
        strategy = rx.MultiWorkerMirroredStrategy()
    else:
        strategy = rx.MirroredStrategy(devices_for(options, parser))
    first = strategy.extended.should_checkpoint  # whether this process is the one that writes
    console = rich.console.Console(highlight=False, emoji=False, soft_wrap=True, quiet=not first)
    history, tested = train(strategy, options, console)
    if first:
        draw(options.output, history, *tested)
    console.print(f"Test accuracy {history['test_accuracy'][-1]:.1%}; curves and images are in {options.output}.")
    return history


if __name__ == "__main__":
    main()
