"""What Keras 3 dropped: members of objects and arguments of methods, which `check-tf` finds by name; names of modules.

The class of an object is not known without running the program. A name is therefore reported where it is Keras's alone,
or where the expression in front of it says what the object is, as `self.optimizer.minimize` does. Tests for the file
`PATH.index` are found as well, which checkpoints of replicax do not have.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

_OPTIMIZER = r"optimi[sz]ers?|\b(\w+_)?opt(_\w+|\d*)\b"
_OPTIONS = r"cfg|conf|args|param|flags|settings|opts"  # objects with hyperparameters, such as `config.optimizer.lr`
_OTHER_MODELS = "classif|forest|regress|boost|bayes|svc|xgb|lgb|pipe|load"  # which have a predict_proba
_LAYER = r"\bself$|layer"
_HYPER = "Keep the number in an attribute of your own, and read optimizer.learning_rate"
_SLOTS = "Write optimizer.add_variable_from_reference(variable, name) in build(), and keep the result"
_NODES = "Write layer.input and layer.output, whose shapes are input.shape and output.shape"


class _Member(NamedTuple):
    """A member that Keras 3 lacks.

    Attributes:
        instead: what to write.
        of: a pattern that the expression of the object contains.
        not_of: a pattern that neither this expression contains nor the name of the function that makes the object.
    """

    instead: str
    of: str = ""
    not_of: str = r"(?!)"


_MEMBERS = {
    "minimize": _Member(
        "Keras 3's optimizers have no minimize: use tf.GradientTape and optimizer.apply_gradients", _OPTIMIZER
    ),
    "get_gradients": _Member("Write tape.gradient(loss, variables)", _OPTIMIZER),
    "get_updates": _Member("Use tf.GradientTape and optimizer.apply_gradients", _OPTIMIZER),
    "lr": _Member("Write optimizer.learning_rate", r"optimi[sz]er|\bopt(im)?\b", _OPTIONS),
    "get_slot": _Member("Read optimizer.variables", _OPTIMIZER),
    "get_weights": _Member("Read optimizer.variables", _OPTIMIZER),
    "experimental_run_v2": _Member("Write strategy.run", not_of=r"\bv1\b"),
    "_decayed_lr": _Member("Read optimizer.learning_rate, which is the value of the schedule at this step"),
    "_set_hyper": _Member(_HYPER),
    "_get_hyper": _Member(_HYPER),
    "_create_slots": _Member(_SLOTS, _OPTIMIZER),
    "get_scaled_loss": _Member("Write optimizer.scale_loss(loss)"),
    "get_unscaled_gradients": _Member("Leave it out: apply_gradients of Keras 3's LossScaleOptimizer divides them"),
    "reset_states": _Member(
        "Metrics of Keras 3 have reset_state(), models reset_metrics(); recurrent layers keep reset_states",
        not_of="lstm|gru|rnn|layer|cell",
    ),
    "distribute_reduction_method": _Member("Keras 3's models do not have it: leave it out"),
    "fit_generator": _Member("Write model.fit, which takes generators"),
    "evaluate_generator": _Member("Write model.evaluate, which takes generators"),
    "predict_generator": _Member("Write model.predict, which takes generators"),
    "predict_classes": _Member("Write model.predict(x).argmax(axis=-1)"),
    "predict_proba": _Member("Write model.predict(x)", "model", _OTHER_MODELS),
    "to_yaml": _Member("Write model.to_json()", "model"),
    "state_updates": _Member("Leave it out: layers assign their variables", "model"),
    "get_updates_for": _Member("Leave it out: layers assign their variables"),
    "add_update": _Member("Assign the variable in call()", _LAYER),
    "get_input_at": _Member(_NODES),
    "get_output_at": _Member(_NODES),
    "inbound_nodes": _Member(_NODES, "layer"),
    "input_shape": _Member(_NODES, r"\blayer(s\[.*\])?$"),
    "output_shape": _Member(_NODES, r"\blayer(s\[.*\])?$"),
    "compiled_loss": _Member("Write model.compute_loss(x, y, y_pred)", "self|model"),
    "compiled_metrics": _Member("Write model.compute_metrics(x, y, y_pred)", "self|model"),
}

_WORKERS = "Keras 3 takes it as an argument of keras.utils.PyDataset"
_VARIABLES_OF_TENSORFLOW = "Leave it out, or keep a tf.Variable in the layer"
_COMPILE = "compile of Keras 3 does not have it: leave it out"
_SUMS = "Keras 3's optimizers always sum over the replicas: leave it out"
# Arguments that methods of Keras 3 lack: by the names of the methods, the arguments and what to do.
_ARGUMENTS: dict[str, dict[str, str]] = {
    "fit evaluate predict": dict.fromkeys(["use_multiprocessing", "max_queue_size", "workers"], _WORKERS),
    "train_on_batch test_on_batch": {"reset_metrics": "Call model.reset_metrics()"},
    "compile": dict.fromkeys(["experimental_run_tf_function", "sample_weight_mode", "target_tensors"], _COMPILE),
    "apply_gradients": dict.fromkeys(["experimental_aggregate_gradients", "skip_gradients_aggregation"], _SUMS),
    "add_weight": dict.fromkeys(["use_resource", "partitioner", "synchronization"], _VARIABLES_OF_TENSORFLOW),
    "save_weights": {"save_format": "Leave it out, and end the path with .weights.h5"},
    "save_model": {"save_format": "Leave it out, and end the path with .keras or .h5"},
}
_CALLS = {
    f"{method}({argument}=)": text
    for methods, arguments in _ARGUMENTS.items()
    for method in methods.split()
    for argument, text in arguments.items()
}
_WHOLE_MODEL = "Keras 3 takes only files that end with .keras or .h5 here; model.export(folder) writes a saved model"
_WEIGHTS = "Keras 3 takes only files that end with .weights.h5 here; tf.train.Checkpoint takes other paths"
_TEXTS = {name: member.instead for name, member in _MEMBERS.items()} | {
    **_CALLS,
    "add_weight": "Pass the name by keyword: add_weight(shape=..., name=...)",
    "add_weight(aggregation=)": "Write the name in small letters, such as aggregation='mean'",
    "add_metric": "Call metric.update_state in call() or train_step(), and keep the metric in an attribute",
    "experimental_autocast": "Write autocast",
    "save": _WHOLE_MODEL,
    "save_model": _WHOLE_MODEL,
    "load_model": "Keras 3 loads only files that end with .keras or .h5; read a saved model with tf.saved_model.load",
    "save_weights": _WEIGHTS,
    "load_weights": _WEIGHTS,
    "ModelCheckpoint": "Keras 3 takes only paths that end with .keras, or .weights.h5 with save_weights_only=True",
    ".index": "A checkpoint is a folder here, without a file .index: use tf.train.latest_checkpoint(folder)",
}
# Functions that ask for files by their names.
_ASKING = {"exists", "Exists", "isfile", "is_file", "glob", "Glob", "endswith"}
# Methods that take a path, with the position of that argument, its endings, and a pattern of the object.
_ENDINGS = {
    "save": (0, (".keras", ".h5", ".hdf5"), r"\b(\w+_)?model$"),
    "save_model": (1, (".keras", ".h5", ".hdf5"), r"\b(keras|models)$"),
    "load_model": (0, (".keras", ".h5", ".hdf5"), r"\b(keras|models)$"),
    "save_weights": (0, (".weights.h5",), ""),
    "load_weights": (0, (".h5", ".hdf5", ".keras"), r"model|self|net"),
    "ModelCheckpoint": (0, (".keras", ".weights.h5"), "callbacks"),
}

# What stands for names below `keras` that Keras 3 lacks, or that only raise an error; NAME is the last part of a name.
_PREPROCESSING = "Write tf.keras.layers.NAME, without experimental.preprocessing"
NAMES = {
    "keras.optimizers.legacy": "Write tf.keras.optimizers.NAME: the classes of legacy only raise an error",
    "keras.optimizers.experimental": "Write tf.keras.optimizers.NAME, without experimental",
    "keras.mixed_precision.experimental": "Write tf.keras.mixed_precision.set_global_policy and Policy",
    "keras.mixed_precision.set_policy": "Write tf.keras.mixed_precision.set_global_policy",
    "keras.experimental.CosineDecay": "Write tf.keras.optimizers.schedules.CosineDecay",
    "keras.experimental": "Keras 3 has most of it without experimental",
    "keras.layers.experimental.preprocessing": _PREPROCESSING,
    "keras.layers.experimental.SyncBatchNormalization": "Write tf.keras.layers.BatchNormalization(synchronized=True)",
    "keras.layers.experimental": "Keras 3 has most of it without experimental",
    "keras.layers.CuDNNLSTM": "Write tf.keras.layers.LSTM",
    "keras.layers.CuDNNGRU": "Write tf.keras.layers.GRU",
    "keras.layers.DenseFeatures": "Use tf.keras.utils.FeatureSpace",
    "keras.estimator": "TensorFlow has removed estimators: use fit, or a loop of your own",
    "keras.wrappers.scikit_learn": "Write keras.wrappers.SKLearnClassifier or SKLearnRegressor",
    "keras.utils.multi_gpu_model": "Create the model in the scope of tf.distribute.MirroredStrategy",
    "keras.utils.np_utils": "Write tf.keras.utils.NAME, without np_utils",
    "keras.utils.generic_utils": "Write tf.keras.utils.NAME, without generic_utils",
    "keras.backend.get_session": "There are no graphs and sessions: leave it out",
    "keras.backend.set_session": "There are no graphs and sessions: leave it out",
    "keras.backend.function": "Write tf.keras.Model(inputs, outputs), and call it",
    "keras.backend.learning_phase": "Pass training=True or False to the model",
    "keras.backend.set_learning_phase": "Pass training=True or False to the model",
    "keras.models.model_from_yaml": "Write tf.keras.models.model_from_json",
}
# Arguments that functions of Keras 3 lack, or ignore, by the beginning of the functions' names.
MISSING_ARGUMENTS = {
    ("keras.optimizers.", "lr"): "write learning_rate",
    ("keras.optimizers.", "gradient_transformers"): "change the gradients before apply_gradients",
    ("keras.optimizers.", "gradient_aggregator"): "reduce the gradients before apply_gradients",
    ("keras.layers.BatchNormalization", "fused"): "leave it out",
    ("keras.layers.BatchNormalization", "virtual_batch_size"): "leave it out",
    ("keras.layers.", "time_major"): "transpose the input",
    ("keras.layers.", "weights"): "call layer.set_weights",
    ("keras.layers.", "dynamic"): "leave it out, or compile with run_eagerly=True",
    ("keras.callbacks.ModelCheckpoint", "period"): "write save_freq",
    ("keras.initializers.", "dtype"): "leave it out",
}
IGNORED_ARGUMENTS = {
    ("keras.optimizers.", "decay"): "`decay` is ignored: pass a schedule, such as schedules.InverseTimeDecay",
}


def text(name: str) -> str:
    """Return what to write in place of a member that `of_attribute` or `of_call` returned."""
    return _TEXTS[name]


def values(code: ast.Module) -> Mapping[str, ast.expr]:
    """Return the values of the names that code assigns once alone."""
    parts = list(ast.walk(code))
    stored = Counter(part.id for part in parts if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store))
    stored.update(part.arg for part in parts if isinstance(part, ast.arg))
    return {
        target.id: part.value
        for part in parts
        if isinstance(part, ast.Assign)
        for target in part.targets
        if isinstance(target, ast.Name) and stored[target.id] == 1
    }


def of_attribute(node: ast.Attribute, assigned: Mapping[str, ast.expr]) -> str | None:
    """Return the name of an attribute that objects of Keras 3 lack, None for any other.

    Args:
        node: the attribute of an object.
        assigned: the result of `values` for the code.
    """
    member = _MEMBERS.get(node.attr)
    if member is None or (isinstance(node.ctx, ast.Store) and node.attr != "lr"):
        return None
    owner = ast.unparse(node.value)
    value = assigned.get(owner)
    maker = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
    missing = re.search(member.of, owner, re.IGNORECASE) and not any(
        re.search(member.not_of, text, re.IGNORECASE) for text in (owner, maker)
    )
    return node.attr if missing else None


def of_call(node: ast.Call, assigned: Mapping[str, ast.expr]) -> Iterator[str]:
    """Yield the names of the entries about the arguments of a call; `assigned` as for `of_attribute`."""
    keywords = {keyword.arg: keyword.value for keyword in node.keywords}
    if "experimental_autocast" in keywords:
        yield "experimental_autocast"
    function = node.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    owner = ast.unparse(function.value) if isinstance(function, ast.Attribute) else None
    yield from (entry for argument in keywords if (entry := f"{name}({argument}=)") in _CALLS and owner is not None)
    if name in _ENDINGS and _has_other_ending(node, name, owner, keywords, assigned):
        yield name
    if owner is None:
        return
    match node:
        case ast.Call(func=ast.Attribute(attr="add_weight"), args=[ast.Constant(value=str()), *_]):
            yield "add_weight"
    if name == "add_weight" and "VariableAggregation" in ast.unparse(keywords.get("aggregation", ast.Constant(None))):
        yield "add_weight(aggregation=)"
    if name == "add_metric" and owner == "self":
        yield "add_metric"
    texts = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)]
    if name in _ASKING and any(value.endswith(".index") for value in texts):
        yield ".index"


def _has_other_ending(
    node: ast.Call,
    name: str,
    owner: str | None,
    keywords: dict[str | None, ast.expr],
    assigned: Mapping[str, ast.expr],
) -> bool:
    """Return whether the path among the arguments of a call ends with a text that Keras 3 does not take."""
    position, endings, pattern = _ENDINGS[name]
    if owner is None and name != "ModelCheckpoint":
        return False
    if owner is not None and not re.search(pattern, owner):
        return False
    path = node.args[position] if position < len(node.args) else keywords.get("filepath")
    if isinstance(path, ast.Name):
        path = assigned.get(path.id)
    end = _end(path)
    return end is not None and not end.endswith(endings)


def _end(path: ast.expr | None) -> str | None:
    """Return the text at the end of an expression for a path; None if another expression stands there."""
    match path:
        case ast.Constant(value=str(value)):
            return value
        case ast.JoinedStr(values=[*_, ast.Constant(value=str(value))]):
            return value
        case ast.BinOp(op=ast.Add(), right=right) | ast.BinOp(op=ast.Div(), right=right):
            return _end(right)
        case ast.Call(func=ast.Attribute(attr="join"), args=[_, *_, last]):
            return _end(last)
    return None
