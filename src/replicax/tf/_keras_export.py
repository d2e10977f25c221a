"""Keras's `model.export`, `ExportArchive` and `TFSMLayer` on the saved models of replicax.

Keras's own are written with TensorFlow, to which they bring the functions of other backends.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax

from replicax.tf import _saved_models as api
from replicax.tf._core import DEFAULT, Function, TensorSpec, Tree, function, is_function
from replicax.tf._types import DTypeLike

if TYPE_CHECKING:
    from keras import Layer
    from keras import Variable as KerasVariable


class _Root:
    """What is saved: endpoints and collections of variables in its attributes."""

    def __init__(self) -> None:
        self.variables: list[KerasVariable] = []
        self.trainable_variables: list[KerasVariable] = []
        self.non_trainable_variables: list[KerasVariable] = []

    def _tracked(self) -> dict[str, object]:
        return vars(self)


class ExportArchive:
    """Collects endpoints of models and layers, and writes them as a saved model.

    Args:
        format: "saved_model".
    """

    def __init__(self, format: str = "saved_model", **_: object):
        if format != "saved_model":
            raise ValueError(f"Unsupported format: {format}. The only one is 'saved_model'.")
        self._root = _Root()
        self._endpoints: dict[str, Function] = {}

    @property
    def variables(self) -> list[KerasVariable]:
        """The variables of what is tracked."""
        return self._root.variables

    @property
    def trainable_variables(self) -> list[KerasVariable]:
        """Those of them that are trained."""
        return self._root.trainable_variables

    @property
    def non_trainable_variables(self) -> list[KerasVariable]:
        """Those of them that are not trained."""
        return self._root.non_trainable_variables

    def track(self, resource: Layer) -> None:
        """Adds the variables of a layer or model to those that are saved."""
        if not hasattr(resource, "trainable_variables"):
            raise ValueError(f"Invalid resource type. Expected a Keras `Layer` or `Model`, got {resource!r}.")
        if not getattr(resource, "built", True):
            raise ValueError("The layer provided has not yet been built. It must be built before export.")
        self._root.trainable_variables += resource.trainable_variables
        self._root.non_trainable_variables += resource.non_trainable_variables
        self._root.variables = self._root.trainable_variables + self._root.non_trainable_variables

    def add_endpoint(
        self, name: str, fn: Callable[..., Tree], input_signature: Sequence[Tree] | None = None, **_: object
    ) -> Function:
        """Adds a function under a name, and returns it compiled.

        Args:
            name: the name by which the loaded model has it.
            fn: the function; without an `input_signature` a `tf.function` that has been called.
            input_signature: `keras.InputSpec`s, `tf.TensorSpec`s or Keras tensors, as the function takes its arguments.
        """
        from keras.src.export.export_utils import make_tf_tensor_spec

        if name in self._endpoints:
            raise ValueError(f"Endpoint name '{name}' is already taken.")
        if input_signature is not None:
            specs = jax.tree.map(make_tf_tensor_spec, list(input_signature), is_leaf=lambda x: hasattr(x, "shape"))
            endpoint: Function = function(fn, specs)
        elif not is_function(fn) or not fn.all_concrete_functions():
            raise ValueError(
                "If the `fn` argument provided is not a `tf.function` that has been called at least once, you must "
                "provide an `input_signature` argument to specify the shape and dtype of the function arguments."
            )
        else:
            endpoint = fn
        setattr(self._root, name, endpoint)
        self._endpoints[name] = endpoint
        return endpoint

    def track_and_add_endpoint(
        self, name: str, resource: Layer, input_signature: Sequence[Tree], **kwargs: object
    ) -> Function:
        """Adds a layer or model with its variables under a name, and returns its call, compiled."""
        self.track(resource)
        return self.add_endpoint(name, resource.__call__, input_signature, **kwargs)

    def add_variable_collection(self, name: str, variables: Sequence[KerasVariable]) -> None:
        """Adds a list of variables, which the loaded model has in the attribute of this name."""
        if not isinstance(variables, (list, tuple, set)):
            raise ValueError(
                f"Expected `variables` to be a list/tuple/set. Received object of type '{type(variables)}'."
            )
        setattr(self._root, name, list(variables))

    def write_out(
        self, filepath: str | os.PathLike[str], options: api.SaveOptions | None = None, verbose: bool = True
    ) -> None:
        """Writes the saved model; the first endpoint is the signature "serving_default" too."""
        if not self._endpoints:
            raise ValueError("No endpoints have been set yet. Call add_endpoint().")
        signatures = {name: endpoint.all_concrete_functions()[0] for name, endpoint in self._endpoints.items()}
        used = itertools.chain.from_iterable(signature.variables for signature in signatures.values())
        self._root._all_variables = list({id(variable): variable for variable in used}.values())  # type: ignore[attr-defined]
        signatures.setdefault(DEFAULT, next(iter(signatures.values())))
        api.save(self._root, filepath, signatures, options)
        if verbose:
            lines = "\n".join(f"* Endpoint '{name}': {signatures[name]!r}" for name in self._endpoints)
            print(f"Saved artifact at '{filepath}'. The following endpoints are available:\n\n{lines}")


def _layer(keras: Any) -> type:
    class TFSMLayer(keras.layers.Layer):  # type: ignore[misc]
        """A layer that calls an endpoint of a saved model."""

        def __init__(
            self,
            filepath: str | os.PathLike[str],
            call_endpoint: str = "serve",
            call_training_endpoint: str | None = None,
            trainable: bool = True,
            name: str | None = None,
            dtype: DTypeLike | None = None,
        ):
            super().__init__(trainable=trainable, name=name, dtype=dtype)
            self.filepath, self.call_endpoint = filepath, call_endpoint
            self.call_training_endpoint = call_training_endpoint
            self._loaded = api.load(filepath)
            self._function = self._endpoint(call_endpoint)
            self._training = self._endpoint(call_training_endpoint) if call_training_endpoint else self._function
            self._build_at_init()

        def _endpoint(self, name: str) -> Callable[..., Tree]:
            found = vars(self._loaded).get(name, self._loaded.signatures.get(name))
            if found is None:
                raise ValueError(
                    f"The endpoint '{name}' is neither an attribute of the reloaded SavedModel, nor an entry in the "
                    f"`signatures` field of the reloaded SavedModel: {list(self._loaded.signatures)}"
                )
            endpoint: Callable[..., Tree] = found
            return endpoint

        def call(self, inputs: Tree, training: bool = False, **kwargs: Tree) -> Tree:
            """Calls the endpoint."""
            return (self._training if training else self._function)(inputs, **kwargs)

        def get_config(self) -> dict[str, object]:
            """Returns the arguments that it was made with."""
            names = "filepath", "call_endpoint", "call_training_endpoint"
            return {**super().get_config(), **{name: getattr(self, name) for name in names}}

    return TFSMLayer


def _default_save_signature(model: Layer) -> Function | None:
    """Returns the call of a model for inputs of the shapes that it was built for; None before it was built."""
    from keras.src.export.export_utils import get_input_signature

    if not model.built:
        return None
    inputs = get_input_signature(model)
    specs = jax.tree.map(lambda x: TensorSpec(x.shape, x.dtype), inputs, is_leaf=lambda x: hasattr(x, "shape"))
    made: Function = function(lambda inputs: model(inputs), specs)
    return made


def serve(keras: Any) -> None:
    """Has Keras write and read saved models of replicax where it writes and reads those of TensorFlow."""
    sys.modules["keras.src.export.saved_model"].ExportArchive = ExportArchive  # type: ignore[attr-defined]
    keras.export.ExportArchive = ExportArchive
    keras.layers.TFSMLayer = _layer(keras)
    keras.Model._default_save_signature = property(_default_save_signature)
