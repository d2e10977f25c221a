"""Images through `tf.data`: replicax beside TensorFlow, in images a second.

    python benchmarks/images.py --tensorflow PYTHON      # an interpreter that has TensorFlow

- decode: JPEG files of about 400 x 300 pixels are decoded, resized, cropped, flipped and standardized, as for ImageNet
- CIFAR: arrays of 32 x 32 are padded, cropped, flipped and standardized
- colors: brightness, contrast, saturation and hue of arrays of 128 x 128 are changed

Both sides run the same program, with `num_parallel_calls=AUTOTUNE`, `batch` and `prefetch`. The sides take turns; the
table has the median of the rounds, and the median of their ratios.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

FILES, CIFAR, COLORS, ROUNDS = 300, 10_000, 1_000, 5


def write(folder: Path) -> None:
    """Writes JPEG files of several sizes, which look like photographs to the codec."""
    from PIL import Image

    numbers = np.random.default_rng(0)
    for i in range(FILES):
        height, width = (int(size * numbers.uniform(0.75, 1.3)) for size in (300, 400))
        coarse = Image.fromarray(numbers.integers(0, 256, (height // 16, width // 16, 3)).astype(np.uint8))
        image = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)) + numbers.normal(0, 6, 3)
        Image.fromarray(image.clip(0, 255).astype(np.uint8)).save(folder / f"{i:03}.jpg", quality=90)


def pipelines(tf, folder: Path):
    def decode(path):
        image = tf.io.decode_jpeg(tf.io.read_file(path), channels=3)
        image = tf.image.resize(image, [256, 256])
        image = tf.image.random_crop(image, [224, 224, 3])
        image = tf.image.random_flip_left_right(image)
        return tf.image.per_image_standardization(image)

    def cifar(image):
        image = tf.image.convert_image_dtype(image, tf.float32)
        image = tf.image.resize_with_crop_or_pad(image, 40, 40)
        image = tf.image.random_crop(image, [32, 32, 3])
        image = tf.image.random_flip_left_right(image)
        return tf.image.per_image_standardization(image)

    def colors(image):
        image = tf.image.convert_image_dtype(image, tf.float32)
        image = tf.image.random_brightness(image, 0.2)
        image = tf.image.random_contrast(image, 0.7, 1.3)
        image = tf.image.random_saturation(image, 0.7, 1.3)
        image = tf.image.random_hue(image, 0.1)
        return tf.clip_by_value(image, 0.0, 1.0)

    def piped(elements, function, batch):
        return tf.data.Dataset.from_tensor_slices(elements).map(
            function, num_parallel_calls=tf.data.AUTOTUNE
        ).batch(batch).prefetch(2)  # fmt: skip

    numbers = np.random.default_rng(0)
    small = numbers.integers(0, 256, (CIFAR, 32, 32, 3)).astype(np.uint8)
    middle = numbers.integers(0, 256, (COLORS, 128, 128, 3)).astype(np.uint8)
    files = sorted(str(path) for path in folder.glob("*.jpg"))
    yield "decode", FILES, piped(files, decode, 32)
    yield "CIFAR", CIFAR, piped(small, cifar, 128)
    yield "colors", COLORS, piped(middle, colors, 64)


def side(module: str, folder: Path) -> None:
    """Answers each line of the standard input with the rates of one round."""
    tf = importlib.import_module(module)
    made = list(pipelines(tf, folder))
    for _ in sys.stdin:
        rates = {}
        for what, count, dataset in made:
            start = time.perf_counter()
            for _element in dataset:
                pass
            rates[what] = count / (time.perf_counter() - start)
        print(json.dumps(rates), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensorflow", help="an interpreter that has TensorFlow")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--side", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        return side(options.side[0], Path(options.side[1]))
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        commands = {"replicax": [sys.executable, "replicax.tf"]}
        if options.tensorflow:
            commands["TensorFlow"] = [options.tensorflow, "tensorflow"]
        rounds = measured(commands, folder, options.rounds)
    for what in rounds["replicax"][0]:
        rates = {who: [one[what] for one in found] for who, found in rounds.items()}
        text = "".join(f"{who} {statistics.median(found):8,.0f}   " for who, found in rates.items())
        if "TensorFlow" in rates:
            text += f"{statistics.median(a / b for a, b in zip(rates['replicax'], rates['TensorFlow'])):6.2f} x"
        print(f"{what:10} {text}")


def measured(commands: dict[str, list[str]], folder: str, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Returns the rates of each side in each round; the first round, which compiles, is left out."""
    processes = {
        who: subprocess.Popen(
            [python, __file__, "--side", module, folder],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )
        for who, (python, module) in commands.items()
    }  # fmt: skip
    found: dict[str, list[dict[str, float]]] = {who: [] for who in commands}
    for _ in range(rounds + 1):
        for who, process in processes.items():
            found[who].append(ask(process))
    for process in processes.values():
        process.stdin.close()
        process.wait()
    return {who: rates[1:] for who, rates in found.items()}


def ask(process: subprocess.Popen[str]) -> dict[str, float]:
    process.stdin.write("\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


if __name__ == "__main__":
    main()
