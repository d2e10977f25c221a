"""Hooks in TensorFlow and Keras, or in replicax.tf, that tell the recorder of variables and training steps.

| in TensorFlow or Keras | what is recorded |
|---|---|
| `tf.Variable`, `keras.Variable` | a variable and its initial value, which a second run gets from the first |
| `fit` | a step after each batch, with Keras's logs |
| `train_on_batch` | a step |
| a call of a `tf.function`, `strategy.run` | a step, if trainable variables or an optimizer's counter have changed |
| `optimizer.apply` outside of these | a step |
| `GradientTape.gradient` outside of these | the loss of the step that follows |
| `Checkpoint`, `CheckpointManager` | the paths that are written, and restored paths that the run did not write |

Only the outermost call of these counts, and only in the main thread.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import os
import random
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import numpy as np

from . import randomness
from .recorder import EnoughSteps, Entry, Recorder, scalars, unique

__all__ = ["EnoughSteps", "install"]


def install(program_folder: str, folder: str, steps: int, keep_random: bool, replay: str | None = None) -> Recorder:
    """Return a recorder that records a program as soon as it has imported TensorFlow or Keras."""
    recorder = Recorder(folder, steps, program_folder, replay)
    hooks = _Hooks(recorder, keep_random)
    sys.meta_path.insert(0, _AfterImport({"tensorflow": hooks.into_tensorflow, "keras": hooks.into_keras}))
    return recorder


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function with a module once it is imported."""

    def __init__(self, waiting: dict[str, Callable[[ModuleType], None]]) -> None:
        self._waiting = waiting
        self._is_searching = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self._waiting or self._is_searching:
            return None
        states = random.getstate(), np.random.get_state()
        self._is_searching = True  # other finders search like this one, and ask it
        try:
            finders = [finder for finder in sys.meta_path if hasattr(finder, "find_spec")]
            specs = (finder.find_spec(name, path, target) for finder in finders)
            spec: ModuleSpec | None = next((spec for spec in specs if spec is not None), None)
        finally:
            self._is_searching = False
        sys.meta_path.remove(self)
        sys.meta_path.insert(0, self)  # a finder of replicax has gone to the front
        loader: Any = spec and spec.loader
        if loader is not None:
            load = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                then = self._waiting.pop(name, None)  # not before: some code only asks whether there is a module
                load(module)
                random.setstate(states[0])  # the libraries draw different numbers while they are imported
                np.random.set_state(states[1])
                if then is not None:
                    then(sys.modules[name])

            loader.exec_module = exec_module
        return spec


class _Hooks:
    def __init__(self, recorder: Recorder, keep_random: bool) -> None:
        self._recorder = recorder
        self._keep_random = keep_random
        self._call, self._creation = _Nesting(), _Nesting()  # of hooked calls, and of variables
        self._written: set[str] = set()  # checkpoints
        self._in_optimizer = False  # whether the variable that is created belongs to the state of an optimizer

    def into_tensorflow(self, tf: ModuleType) -> None:
        """Hook TensorFlow's functions."""
        _wrap(type(tf.Variable), "__call__", self._create_tf_variable)
        _wrap(type(tf.function(lambda: None)), "__call__", self._call_function)
        _wrap(tf.distribute.Strategy, "run", self._run)
        _wrap(tf.GradientTape, "gradient", self._gradient)
        checkpoint, manager = tf.train.Checkpoint, tf.train.CheckpointManager
        for owner, name in ((checkpoint, "save"), (checkpoint, "write"), (manager, "save")):
            _wrap(owner, name, self._write_checkpoint)
        _wrap(checkpoint, "read", self._restore)
        _wrap(checkpoint, "restore", self._restore)
        _wrap(manager, "restore_or_initialize", self._restore_newest)
        if not self._keep_random:
            randomness.fix_in_tensorflow(tf, self._recorder, self._is_creating)

    def into_keras(self, keras: ModuleType) -> None:
        """Hook Keras's functions."""
        _wrap(keras.Variable, "__init__", self._create_keras_variable)
        _wrap(keras.Variable, "_deferred_initialize", self._initialize_keras_variable)
        _wrap(keras.Metric, "__init__", self._create_metric)
        _wrap(keras.Model, "fit", self._fit)
        _wrap(keras.Model, "train_on_batch", self._train_on_batch)
        _wrap(keras.callbacks.CallbackList, "on_train_batch_end", self._end_batch)
        _wrap(keras.optimizers.Optimizer, "apply", self._apply)
        _wrap(keras.optimizers.Optimizer, "add_variable_from_reference", self._add_slot)
        if not self._keep_random:
            randomness.fix_in_keras(keras, _tensorflow, self._recorder, self._is_creating)

    # Variables.

    def _create_tf_variable(self, create: Callable[..., object], kind: type, *args: object, **kwargs: Any) -> object:
        if (
            kind is not _tensorflow().Variable
            or self._creation
            or threading.current_thread() is not threading.main_thread()
        ):
            return create(kind, *args, **kwargs)
        if "initial_value" in kwargs:
            args = (kwargs.pop("initial_value"), *args)
        value: Any = args[0] if args else None
        if callable(value):
            with self._creation, _tensorflow().init_scope():
                value = value()
        shape = value.shape if hasattr(value, "shape") else np.shape(value)
        trainable = kwargs.get("trainable", args[1] if len(args) > 1 else True)
        name = kwargs.get("name") or "Variable"
        entry = self._recorder.new_variable("tf", name, shape, trainable is not False)
        initial = self._recorder.initial(entry)
        if initial is not None:
            value = _tensorflow().cast(initial, kwargs.get("dtype") or getattr(value, "dtype", None) or initial.dtype)
        with self._creation:
            variable = create(kind, value, *args[1:], **kwargs)
        self._recorder.save_initial(entry, variable)
        self._recorder.add_variable(entry, variable)
        return variable

    def _create_keras_variable(self, init: Callable[..., None], variable: Any, *args: object, **kwargs: Any) -> None:
        names = ("initializer", "shape", "dtype", "trainable")
        arguments: dict[str, Any] = {**dict(zip(names, args)), **kwargs}
        if isinstance(arguments.get("initializer"), str):
            arguments["initializer"] = sys.modules["keras"].initializers.get(arguments["initializer"])
        initializer = arguments["initializer"]
        shape: Any = arguments.get("shape")
        if shape is None:
            shape = getattr(initializer, "shape", ())
        elif isinstance(shape, int):
            shape = (shape,)
        path = "/".join(filter(None, [_keras_path(), arguments.get("name") or type(variable).__name__.lower()]))
        kind = "optimizer" if self._in_optimizer else "keras"
        entry = self._recorder.new_variable(kind, path, shape, arguments.get("trainable", True))
        if callable(initializer):
            arguments["initializer"] = self._initializer(entry, initializer)
        with self._creation:
            init(variable, **arguments)
        self._recorder.add_variable(entry, variable)

    def _initialize_keras_variable(self, initialize: Callable[..., None], variable: object) -> None:
        with self._creation:
            initialize(variable)

    def _initializer(self, entry: Entry, initializer: Callable[..., object]) -> Callable[..., object]:
        """Return an initializer that saves its value, or that returns the value of the other run."""

        def initialize(shape: object, dtype: object = None, **kwargs: object) -> object:
            initial = self._recorder.initial(entry)
            with self._creation:
                if initial is not None:
                    return sys.modules["keras"].ops.convert_to_tensor(initial, dtype=dtype)
                with _tensorflow().init_scope():  # a function that is being traced would compute it later
                    value = initializer(shape, dtype=dtype, **kwargs)
            self._recorder.save_initial(entry, value)
            return value

        return initialize

    def _add_slot(self, add: Callable[..., object], *args: object, **kwargs: object) -> object:
        self._in_optimizer = True
        try:
            return add(*args, **kwargs)
        finally:
            self._in_optimizer = False

    def _create_metric(self, init: Callable[..., None], metric: object, *args: object, **kwargs: object) -> None:
        init(metric, *args, **kwargs)
        self._recorder.new_metric(metric)

    # Steps.

    def _call_function(self, call: Callable[..., object], *args: object, **kwargs: object) -> object:
        if self._is_inside():
            return call(*args, **kwargs)
        self._recorder.flush()
        with self._call:
            result = call(*args, **kwargs)
        if self._recorder.has_changed():
            self._recorder.record_step(dict(scalars(result)))
        return result

    def _run(self, run: Callable[..., object], strategy: Any, *args: object, **kwargs: object) -> object:
        self._recorder.note("replicas", number=int(strategy.num_replicas_in_sync))
        return self._call_function(run, strategy, *args, **kwargs)

    def _gradient(
        self, gradient: Callable[..., object], tape: object, target: object, *args: object, **kwargs: object
    ) -> object:
        if not self._is_inside():
            self._recorder.flush()
            for name, value in scalars(target, "loss"):
                self._recorder.pending[unique(name, self._recorder.pending)] = value
        return gradient(tape, target, *args, **kwargs)

    def _apply(self, apply: Callable[..., object], *args: object, **kwargs: object) -> object:
        if self._is_inside():
            return apply(*args, **kwargs)
        with self._call:
            result = apply(*args, **kwargs)
        self._recorder.record_step({})
        return result

    def _fit(self, fit: Callable[..., object], model: object, *args: object, **kwargs: object) -> object:
        if not self._keep_random:
            args, kwargs = args[:8], {**kwargs, "shuffle": False}  # `shuffle` is the ninth argument
            self._recorder.note("unshuffled", name="model.fit")
        self._recorder.flush()
        with self._call:
            return fit(model, *args, **kwargs)

    def _end_batch(self, end: Callable[..., None], callbacks: Any, batch: int, logs: object = None) -> None:
        end(callbacks, batch, logs)
        if hasattr(callbacks._model, "jax_state_sync"):  # Keras's variables are empty while `fit` runs on JAX
            callbacks._model.jax_state_sync()
        self._recorder.record_step(dict(scalars(logs)), metrics=False)

    def _train_on_batch(self, train: Callable[..., object], *args: object, **kwargs: object) -> object:
        if self._is_inside():
            return train(*args, **kwargs)
        self._recorder.flush()
        with self._call:
            result = train(*args, **kwargs)
        self._recorder.record_step(dict(scalars(result, "loss")), metrics=False)
        return result

    # Checkpoints.

    def _write_checkpoint(self, write: Callable[..., object], *args: object, **kwargs: object) -> object:
        result = write(*args, **kwargs)
        if path := _path(result):
            self._written.add(path)
            self._recorder.note("written", name=path)
        return result

    def _restore(self, restore: Callable[..., object], checkpoint: object, *args: object, **kwargs: object) -> object:
        self._note_restored(args[0] if args else kwargs.get("save_path"))
        return restore(checkpoint, *args, **kwargs)

    def _restore_newest(self, restore: Callable[..., object], *args: object, **kwargs: object) -> object:
        result = restore(*args, **kwargs)
        self._note_restored(result)
        return result

    def _note_restored(self, path: object) -> None:
        name = _path(path)
        if name and name not in self._written:
            self._recorder.note("restored", name=name)

    # Where a call is.

    def _is_inside(self) -> bool:
        in_thread = threading.current_thread() is not threading.main_thread()
        return bool(self._call) or in_thread or self._inside_function()

    def _is_creating(self) -> bool:
        return bool(self._creation)

    def _inside_function(self) -> bool:
        return bool(_tensorflow().inside_function())


class _Nesting:
    """A context that counts how deep it is entered; true inside of it."""

    def __init__(self) -> None:
        self._depth = 0

    def __bool__(self) -> bool:
        return self._depth > 0

    def __enter__(self) -> None:
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1


def _wrap(owner: object, name: str, hook: Callable[..., object]) -> None:
    """Have an attribute of a class or module call a hook, which gets the original first and then the arguments."""
    original = getattr(owner, name)

    @functools.wraps(original)  # with the module of the original, whose functions AutoGraph does not convert
    def call_hook(*args: object, **kwargs: object) -> object:
        return hook(original, *args, **kwargs)

    call_hook.autograph_info__ = {}  # type: ignore[attr-defined]  # AutoGraph's mark of functions that it leaves alone
    setattr(owner, name, call_hook)


def _path(path: object) -> str:
    """Return the path of a checkpoint as seen from the current folder; an empty text for None and for tensors."""
    return os.path.relpath(path) if isinstance(path, (str, os.PathLike)) and os.fspath(path) else ""


def _tensorflow() -> ModuleType:
    """Return the module that the program imports as TensorFlow."""
    return importlib.import_module("tensorflow")


def _keras_path() -> str:
    """Return the path of the layer that is being built."""
    try:
        scope = importlib.import_module("keras.src.backend.common.name_scope")
        return scope.current_path() or ""
    except (ImportError, AttributeError):
        return ""
