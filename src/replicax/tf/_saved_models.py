"""`tf.saved_model`: the functions and classes that users call."""

from __future__ import annotations

import enum
import functools
from typing import Any

from replicax.tf._core import AnyPath, Asset, doc_pages, loading, saving, tracebacks


class VariablePolicy(enum.Enum):
    """What is saved of the devices of variables; accepted for compatibility."""

    NONE = None
    SAVE_VARIABLE_DEVICES = "save_variable_devices"
    EXPAND_DISTRIBUTED_VARIABLES = "expand_distributed_variables"


class SaveOptions:
    """Options of `save`: accepted for compatibility, without effect."""

    def __init__(
        self,
        namespace_whitelist: Any = None,
        save_debug_info: bool = False,
        function_aliases: Any = None,
        experimental_debug_stripper: bool = False,
        experimental_io_device: str | None = None,
        experimental_variable_policy: Any = None,
        experimental_custom_gradients: bool = True,
        experimental_image_format: bool = False,
        experimental_skip_saver: bool = False,
        experimental_sharding_callback: Any = None,
        extra_tags: Any = None,
    ):
        self.namespace_whitelist = list(namespace_whitelist or [])
        self.save_debug_info = save_debug_info
        self.function_aliases = function_aliases or {}
        self.experimental_debug_stripper = experimental_debug_stripper
        self.experimental_io_device = experimental_io_device
        self.experimental_variable_policy = experimental_variable_policy
        self.experimental_custom_gradients = experimental_custom_gradients
        self.experimental_image_format = experimental_image_format
        self.experimental_skip_saver = experimental_skip_saver
        self.experimental_sharding_callback = experimental_sharding_callback
        self.extra_tags = extra_tags


class LoadOptions:
    """Options of `load`. With `experimental_skip_checkpoint` variables are zeros; the others have no effect."""

    def __init__(
        self,
        allow_partial_checkpoint: bool = False,
        experimental_io_device: str | None = None,
        experimental_skip_checkpoint: bool = False,
        experimental_variable_policy: Any = None,
        experimental_load_function_aliases: bool = False,
    ):
        self.allow_partial_checkpoint = allow_partial_checkpoint
        self.experimental_io_device = experimental_io_device
        self.experimental_skip_checkpoint = experimental_skip_checkpoint
        self.experimental_variable_policy = experimental_variable_policy
        self.experimental_load_function_aliases = experimental_load_function_aliases


def save(obj: object, export_dir: AnyPath, signatures: object = None, options: SaveOptions | None = None) -> None:
    """Saves an object's variables and compiled functions, so that they can be loaded without its code.

    What is saved are the variables that can be reached from the object, the programs of its functions for the arguments
    that these were called with or declared for, and assets. Attributes of other kinds are not saved.

    Args:
        obj: a `tf.Module`, a Keras model, or another object of variables and functions.
        export_dir: the path of a folder that is written, in place of a saved model that is there.
        signatures: a function with an `input_signature`, a concrete function, or a dict from names to such. By default
            the object's one function that has an `input_signature`.
        options: accepted for compatibility.

    Raises:
        ValueError: the object is nothing that can be saved; a function has no program that can be, or a signature
            returns other things than tensors.
        KeyError: a function uses a variable that cannot be reached from the object.
        FileExistsError: there is something at the path that is no saved model, or has other files in it.
    """
    saving.save(obj, export_dir, signatures)
    _warn_of_format()


@functools.cache
def _warn_of_format() -> None:
    """Warn, once in a process, that TensorFlow's tools do not read what has been written."""
    tracebacks.warn(
        "This saved model has replicax's format, without a saved_model.pb: TensorFlow, TensorFlow Serving and "
        "TensorFlow Lite cannot read it. `replicax export DIR OUT --to tensorflow` converts it for them; "
        f"`tf.saved_model.load` of replicax.tf reads it as it is. See {doc_pages.page('how-to/saved-models')}."
    )


def load(export_dir: AnyPath, tags: object = None, options: LoadOptions | None = None) -> Any:
    """Loads what `save` has written: an object with the same attributes, and `signatures`.

    In the scope of a strategy, its variables are the strategy's.

    Args:
        export_dir: the folder.
        tags: None or "serve".
        options: see `LoadOptions`.

    Raises:
        OSError: there is no saved model.
        NotImplementedError: it is one of TensorFlow's.
        CheckpointError: it is damaged, or of a newer format.
    """
    return loading.load(export_dir, tags, options is not None and options.experimental_skip_checkpoint)


def contains_saved_model(export_dir: AnyPath) -> bool:
    """Returns whether there is a saved model at a path that `load` can read."""
    return loading.has_saved_model(export_dir)


ASSETS_DIRECTORY = "assets"
ASSETS_KEY = "saved_model_assets"
CLASSIFY_INPUTS = "inputs"
CLASSIFY_METHOD_NAME = "tensorflow/serving/classify"
CLASSIFY_OUTPUT_CLASSES = "classes"
CLASSIFY_OUTPUT_SCORES = "scores"
DEBUG_DIRECTORY = "debug"
DEBUG_INFO_FILENAME_PB = "saved_model_debug_info.pb"
DEFAULT_SERVING_SIGNATURE_DEF_KEY = "serving_default"
GPU = "gpu"
PREDICT_INPUTS = "inputs"
PREDICT_METHOD_NAME = "tensorflow/serving/predict"
PREDICT_OUTPUTS = "outputs"
REGRESS_INPUTS = "inputs"
REGRESS_METHOD_NAME = "tensorflow/serving/regress"
REGRESS_OUTPUTS = "outputs"
SAVED_MODEL_FILENAME_PB = "saved_model.pb"
SAVED_MODEL_FILENAME_PBTXT = "saved_model.pbtxt"
SAVED_MODEL_SCHEMA_VERSION = 1
SERVING = "serve"
TPU = "tpu"
TRAINING = "train"
VARIABLES_DIRECTORY = "variables"
VARIABLES_FILENAME = "variables"

__all__ = ["Asset", "LoadOptions", "SaveOptions", "contains_saved_model", "load", "save"] + [
    name for name in dir() if name.isupper()
]
