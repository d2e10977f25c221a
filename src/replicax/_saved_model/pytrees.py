"""`save_model` and `load_model`: a function of a pytree as a saved model, for programs of JAX, Flax and Equinox."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax

from replicax._base.atomic_files import AnyPath
from replicax._base.types import Tree
from replicax._engine.function import function
from replicax._saved_model import loading, saving
from replicax._values import is_array
from replicax._variables.variable import Variable


class _Root:
    """The object that is saved: the function, and the model's arrays as variables by their paths."""

    def __init__(self, call: Any, variables: dict[str, Variable]):
        self._children = {"__call__": call, "model": variables}

    def _tracked(self) -> dict[str, object]:
        return self._children


def save_model(path: AnyPath, fn: Callable[..., Tree], model: Tree, *specs: Tree) -> None:
    """Save a function of a model so that it can be loaded without its code.

    The arrays of the model become variables of the saved model, and the function becomes its signature
    "serving_default". `load_model` loads the result, and `replicax export` converts it to a SavedModel of TensorFlow.
    Changes that the function makes to the model are not kept.

    Args:
        path: the path of a folder that is written, in place of a saved model that is there.
        fn: takes the model and then arrays, and returns an array, or a list, tuple or dict of arrays.
        model: a pytree, such as an NNX or Equinox module, or a dict of parameters.
        *specs: a `TensorSpec`, or a nest of them, for each further argument of `fn`. A dimension of None stands for any
            size but 0.

    Raises:
        TypeError: `fn` does not take so many arguments, or a spec is none.
        ValueError: the function has no program for all sizes that the specs allow, or calls back to Python; or two
            leaves of the model have equal paths, such as `{"a": {"b": x}, "a/b": y}`.
        FileExistsError: there is something at the path that is no saved model, or has other files in it.

    >>> import tempfile, jax.numpy as jnp, replicax as rx
    >>> params = {"w": jnp.array([[2.0], [1.0]]), "b": jnp.array([0.5])}
    >>> folder = tempfile.mkdtemp() + "/model"
    >>> def predict(params, x):
    ...     return x @ params["w"] + params["b"]
    >>> rx.experimental.save_model(folder, predict, params, rx.TensorSpec([None, 2], name="x"))
    >>> rx.experimental.load_model(folder)(jnp.ones((3, 2))).tolist()
    [[3.5], [3.5], [3.5]]
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(model)
    names = [jax.tree_util.keystr(keys, simple=True, separator="/") for keys, _ in leaves]
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        raise ValueError(
            f"save_model names variables by their paths in the model, and two arrays have the path {repeated[0]!r}. "
            "Leave '/' out of its keys."
        )
    arrays: dict[str, Any] = {name: leaf for name, (_, leaf) in zip(names, leaves) if is_array(leaf)}
    keys = {name for name, array in arrays.items() if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key)}
    variables = {
        name: Variable(jax.random.key_data(array) if name in keys else array, name=name)  # files have no keys
        for name, array in arrays.items()
    }

    def value_of(name: str, leaf: Tree) -> Tree:
        if name in keys:
            return jax.random.wrap_key_data(variables[name].value(), impl=jax.random.key_impl(leaf))
        return variables[name].value() if name in variables else leaf

    def call(*inputs: Tree) -> Tree:
        values = [value_of(name, leaf) for name, (_, leaf) in zip(names, leaves)]
        return fn(jax.tree.unflatten(structure, values), *inputs)

    _, *parameters = inspect.signature(fn).parameters.values()
    call.__name__ = getattr(fn, "__name__", "call")
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    saving.save(_Root(function(call, list(specs)), variables), path)


def load_model(path: AnyPath) -> Any:
    """Load a saved model, which `save_model`, `tf.saved_model.save` or Keras's `model.export` has written.

    Args:
        path: the folder.

    Returns:
        An object with the functions and variables of the saved object. `signatures` has the functions that take and
        return tensors by name. What `save_model` has written can be called, and has the model's arrays in `model`, by
        their paths.

    Raises:
        OSError: there is no saved model.
        NotImplementedError: it is one of TensorFlow's.
        CheckpointError: it is damaged, or of a newer format.

    >>> import tempfile, jax.numpy as jnp, replicax as rx
    >>> folder = tempfile.mkdtemp() + "/model"
    >>> rx.experimental.save_model(folder, lambda scale, x: x * scale, jnp.array(2.0), rx.TensorSpec([None], name="x"))
    >>> loaded = rx.experimental.load_model(folder)
    >>> loaded.signatures["serving_default"](x=jnp.ones(3))["output_0"].tolist()
    [2.0, 2.0, 2.0]
    """
    return loading.load(path, None)
