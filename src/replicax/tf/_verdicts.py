"""Says of a name of TensorFlow whether `replicax.tf` has it, how it differs, or what stands for it."""

from __future__ import annotations

import functools
import importlib
import inspect
import types
from typing import Any, NamedTuple

from replicax.tf import _absent, _members, _private

RUNS, DIFFERS, MISSING = "runs", "differs", "missing"

_PYTHON = "It is Python code on TensorFlow: run `replicax check-tf` on its folder, too"
# Libraries that need TensorFlow, and what to do.
LIBRARIES = {
    "dopamine": _PYTHON,
    "official": _PYTHON,
    "orbit": _PYTHON,
    "sonnet": _PYTHON,
    "tensor2tensor": "It needs TensorFlow 1's graphs",
    "tensorflow_addons": "It is no longer maintained: Keras 3 has most of it",
    "tensorflow_decision_forests": "Use its successor ydf, which does without TensorFlow",
    "tensorflow_datasets": "tfds.data_source(...) reads without TensorFlow; tfds.load(...) gives TensorFlow's datasets",
    "tensorflow_estimator": "TensorFlow has removed it too: write the loop with tf.function and strategy.run",
    "tensorflow_federated": "It needs TensorFlow's graphs",
    "tensorflow_hub": "Its models are SavedModels: use keras_hub, or a checkpoint of the weights",
    "tensorflow_io": "It needs TensorFlow's compiled operations: read with the library of the format",
    "tensorflow_model_optimization": "Use qwix, or Keras 3's quantization",
    "tensorflow_probability": "Import tensorflow_probability.substrates.jax instead",
    "tensorflow_recommenders": _PYTHON,
    "tensorflow_text": "It needs TensorFlow's compiled operations: use the library tokenizers or sentencepiece",
    "tensorflow_transform": "It needs TensorFlow's graphs",
    "tf_agents": _PYTHON,
    "tf_slim": _PYTHON,
    "tfx": "It needs TensorFlow's graphs",
    "trfl": _PYTHON,
}


_SHORT = ("optimizers.", "initializers.")  # names of Keras that TensorFlow has in its own namespace, too


class Verdict(NamedTuple):
    """What `replicax.tf` makes of a name: `status` is one of `RUNS`, `DIFFERS` and `MISSING`."""

    name: str
    status: str
    text: str = ""


def of_library(module: str) -> Verdict | None:
    """Returns the verdict on an imported library; None on one that does not need TensorFlow."""
    library = module.partition(".")[0]
    if module.startswith("tensorflow_probability.substrates.jax") or library not in LIBRARIES:
        return None
    return Verdict(library, DIFFERS if LIBRARIES[library] == _PYTHON else MISSING, LIBRARIES[library])


def of_member(name: str) -> Verdict:
    """Return the verdict on a member of an object that has been found by its name."""
    return Verdict(name, MISSING, _members.text(name))


def of_name(name: str, keywords: tuple[str, ...] = ()) -> Verdict:
    """Returns the verdict on a name in `tensorflow`, called with these arguments."""
    name = name.removeprefix("compat.v2.")
    if dropped := _of_keras(name):
        return dropped
    found = _of_name(name)
    if found.status == MISSING or not keywords:
        return found
    full = f"keras.{found.name}" if found.name.startswith(_SHORT) else found.name
    missing, ignored = (
        {argument: text for (start, argument), text in table.items() if argument in keywords and full.startswith(start)}
        for table in (_members.MISSING_ARGUMENTS, _members.IGNORED_ARGUMENTS)
    )
    texts = [f"It has no argument {argument!r}: {text}" for argument, text in missing.items()]
    if lacking := [name for name in _lacking(found.name, keywords) if name not in {**missing, **ignored}]:
        texts.append(f"It has no argument {', '.join(map(repr, lacking))}")
    status = MISSING if texts else DIFFERS
    texts += ignored.values()
    return Verdict(found.name, status, ". ".join(texts)) if texts else found


def _of_keras(name: str) -> Verdict | None:
    """Return the verdict on a name that Keras 3 dropped; None on any other."""
    parts = name.split(".")
    beginnings = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    dropped = next((beginning for beginning in beginnings if beginning in _members.NAMES), None)
    if dropped is None:
        return None
    text = _members.NAMES[dropped]
    return Verdict(name, MISSING, text if name == dropped else text.replace("NAME", parts[-1]))


@functools.cache
def _of_name(name: str) -> Verdict:
    parts = name.split(".")
    value: Any = importlib.import_module("replicax.tf")
    for index, part in enumerate(parts):
        here = ".".join(parts[: index + 1])
        if not isinstance(value, (types.ModuleType, type)):
            break  # an attribute of a value
        if here in _private.MODULES:
            value = _private.module(here)
            continue
        try:
            value = getattr(value, part)
        except AttributeError as error:
            return Verdict(name, MISSING, _replacement(here, name, error))
        except ImportError as error:  # of a library that is not installed
            return Verdict(here, MISSING, str(error))
    text = _absent.difference(name)
    return Verdict(name, DIFFERS, text) if text else Verdict(name, RUNS)


def _replacement(here: str, name: str, error: AttributeError) -> str:
    """Returns what stands for a name of which the beginning `here` is not there."""
    place = _private.MODULES.get(here.rpartition(".")[0])
    if place is not None:  # the error knows where the private module looks
        return str(error).partition("). ")[2].rpartition(" /")[0].rstrip(".") or _absent.hint(name)
    of_keras = "Keras 3 does not have it" if name.startswith("keras.") else _absent.hint(name)
    return _absent.alternative(name) or of_keras


@functools.cache
def _signature(name: str) -> inspect.Signature | None:
    try:
        value: Any = functools.reduce(getattr, name.split("."), importlib.import_module("replicax.tf"))
        return inspect.signature(value)
    except (AttributeError, ImportError, TypeError, ValueError):
        return None


def _lacking(name: str, keywords: tuple[str, ...]) -> list[str]:
    """Returns those of these arguments that a function does not take."""
    signature = _signature(name)
    if signature is None or any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values()):
        return []
    return sorted(set(keywords) - signature.parameters.keys())
