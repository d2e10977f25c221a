"""Random numbers that are the same in TensorFlow and replicax, and data in their order.

A draw returns numbers of one fixed list, whose beginning is repeated to the shape that is asked for. They do not depend
on the seed, the call or the step, since the two libraries trace and call functions in different ways.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from .recorder import Recorder

_COUNT = 65537  # a prime, so that rows of a usual length do not repeat
_NORMAL = np.random.default_rng(0).standard_normal(_COUNT)
_TRUNCATED = np.where(abs(_NORMAL) < 2, _NORMAL, _NORMAL / 4)
_UNIFORM = np.random.default_rng(1).random(_COUNT)
_OTHERS = "categorical gamma poisson stateless_categorical stateless_gamma stateless_poisson stateless_binomial"
_OF_KERAS = "beta binomial categorical gamma"
_LISTS = {"normal": _NORMAL, "truncated_normal": _TRUNCATED, "uniform": _UNIFORM}

Original = Callable[..., object]


def fix_in_tensorflow(tf: ModuleType, recorder: Recorder, is_creating: Callable[[], bool]) -> None:
    """Have random functions of TensorFlow return fixed numbers, and datasets keep their order.

    Args:
        tf: TensorFlow.
        recorder: gets a note of each.
        is_creating: whether a variable is being created; its initial value is drawn as ever.
    """
    fixed: dict[tuple[object, str], Callable[..., object]] = {
        (tf.random, "shuffle"): functools.partial(_in_order, recorder, "tf.random.shuffle"),
        (tf.data.Dataset, "shuffle"): functools.partial(_in_order, recorder, "Dataset.shuffle"),
        (tf.data.Dataset, "list_files"): functools.partial(_list_files, recorder),
        (tf.nn, "dropout"): functools.partial(_drop, lambda: tf, recorder),
    }
    for name in [name for name in dir(tf.image) if name.startswith(("random_", "stateless_random_"))]:
        image = functools.partial(_crop, lambda: tf) if name.endswith("crop") else _keep_image
        fixed[tf.image, name] = functools.partial(image, recorder, f"tf.image.{name}")
    for name, numbers in _LISTS.items():
        for owner, attribute in ((tf.random, name), (tf.random, f"stateless_{name}"), (tf.random.Generator, name)):
            fixed[owner, attribute] = functools.partial(_draw, lambda: tf, recorder, f"tf.random.{attribute}", numbers)
    for (owner, attribute), function in fixed.items():
        _replace(owner, attribute, function, is_creating)
    names = [(tf.random, f"tf.random.{name}") for name in _OTHERS.split()]
    names += [(tf.nn, f"tf.nn.{name}") for name in ("nce_loss", "sampled_softmax_loss")]
    names += [(tf.random, f"tf.random.{name}") for name in dir(tf.random) if name.endswith("candidate_sampler")]
    names.append((tf.data.Dataset, "Dataset.sample_from_datasets"))
    for owner, shown in names:
        _replace(owner, shown.rpartition(".")[2], functools.partial(_note, recorder, shown), is_creating)


def fix_in_keras(
    keras: ModuleType, tf: Callable[[], ModuleType], recorder: Recorder, is_creating: Callable[[], bool]
) -> None:
    """Have random functions of Keras's backend return fixed numbers; the arguments are those of `fix_in_tensorflow`."""
    fixed: dict[str, Callable[..., object]] = {
        name: functools.partial(_note, recorder, f"keras.random.{name}") for name in _OF_KERAS.split()
    }
    for name, numbers in [*_LISTS.items(), ("randint", _UNIFORM)]:
        fixed[name] = functools.partial(_draw, tf, recorder, f"keras.random.{name}", numbers)
    fixed["shuffle"] = functools.partial(_in_order, recorder, "keras.random.shuffle")
    fixed["dropout"] = functools.partial(_drop, tf, recorder)
    for name, function in fixed.items():
        _replace(keras.src.backend.random, name, function, is_creating)


def _replace(owner: object, name: str, function: Callable[..., object], is_creating: Callable[[], bool]) -> None:
    """Replace an attribute by a function that gets the original first and then the arguments."""
    if not hasattr(owner, name):
        return
    original = getattr(owner, name)
    is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)

    @functools.wraps(original)
    def call_replacement(*args: object, **kwargs: object) -> object:
        return original(*args, **kwargs) if is_creating() else function(original, *args, **kwargs)

    call_replacement.autograph_info__ = {}  # type: ignore[attr-defined]  # AutoGraph's mark of functions that it leaves alone
    setattr(owner, name, staticmethod(call_replacement) if is_static else call_replacement)


def _note(recorder: Recorder, shown: str, draw: Original, *args: object, **kwargs: object) -> object:
    recorder.note("random", name=shown)
    return draw(*args, **kwargs)


def _in_order(recorder: Recorder, shown: str, _: Original, value: object, *args: object, **kwargs: object) -> object:
    recorder.note("unshuffled", name=shown)
    return value


def _keep_image(recorder: Recorder, shown: str, _: Original, image: object, *args: object, **kwargs: object) -> object:
    recorder.note("unchanged", name=shown)
    return image


def _crop(
    load: Callable[[], ModuleType],
    recorder: Recorder,
    shown: str,
    _: Original,
    value: object,
    size: object,
    *args: object,
    **kwargs: object,
) -> object:
    recorder.note("first corner", name=shown)
    tf = load()
    return tf.slice(value, tf.zeros_like(size), size)


def _list_files(recorder: Recorder, list_files: Original, pattern: object, *args: object, **kwargs: object) -> object:
    recorder.note("unshuffled", name="Dataset.list_files")
    kwargs.pop("shuffle", None)
    return list_files(pattern, shuffle=False, **kwargs)


def _draw(
    load: Callable[[], ModuleType],
    recorder: Recorder,
    shown: str,
    numbers: np.ndarray,
    draw: Original,
    *args: object,
    **kwargs: object,
) -> object:
    """Return fixed numbers in place of what a function with TensorFlow's or Keras's arguments would draw."""
    tf = load()
    recorder.note("fixed", name=shown)
    bound = inspect.signature(draw).bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = bound.arguments
    dtype = tf.as_dtype(arguments["dtype"] or "float32")
    if "stddev" in arguments:
        shift, scale = arguments["mean"], arguments["stddev"]
    else:
        shift = 0 if arguments["minval"] is None else arguments["minval"]
        scale = (1 if arguments["maxval"] is None else arguments["maxval"]) - shift
    values = _repeat(tf, numbers, arguments["shape"])
    if dtype.is_integer:
        return tf.cast(tf.floor(values * tf.cast(scale, values.dtype)), dtype) + tf.cast(shift, dtype)
    return tf.cast(values, dtype) * tf.cast(scale, dtype) + tf.cast(shift, dtype)


def _repeat(tf: ModuleType, numbers: np.ndarray, shape: object) -> Any:
    """Return a list of numbers, repeated to a shape that may be known only when a compiled function runs."""
    numbers = numbers.astype(np.float32)
    shape = tf.convert_to_tensor(shape, tf.int32)
    static_shape = tf.get_static_value(shape)
    if static_shape is not None:
        return tf.constant(np.resize(numbers, static_shape))
    positions = tf.math.floormod(tf.range(tf.reduce_prod(shape)), _COUNT)
    return tf.reshape(tf.gather(tf.constant(numbers), positions), shape)


def _drop(
    load: Callable[[], ModuleType],
    recorder: Recorder,
    _: Original,
    x: Any,
    rate: Any,
    noise_shape: Any = None,
    seed: object = None,
    name: object = None,
) -> object:
    """Return the input of a dropout without the units that a fixed mask leaves out."""
    tf = load()
    recorder.note("fixed", name="dropout")
    x = tf.convert_to_tensor(x)
    shape = list(x.shape) if all(size is not None for size in x.shape) else tf.unstack(tf.shape(x))
    if noise_shape is not None:
        shape = [whole if size is None else size for size, whole in zip(noise_shape, shape)]
    keep = _repeat(tf, _UNIFORM, shape) >= rate
    return tf.where(keep, x / tf.cast(1 - rate, x.dtype), tf.zeros([], x.dtype))
