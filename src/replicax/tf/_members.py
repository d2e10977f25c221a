"""Members of objects of Keras 2 that Keras 3 lacks, and tests for files of TensorFlow, which `check-tf` finds by name.

The class of an object is not known without running the program. A name is therefore reported where it is Keras's alone,
or where the expression in front of it says what the object is, as `self.optimizer.minimize` does.
"""

from __future__ import annotations

import ast
import re
from typing import NamedTuple

_OPTIMIZER = r"optimi[sz]ers?|\b(\w+_)?opt(_\w+|\d*)\b"
_OPTIONS = r"cfg|conf|args|param|flags|settings|opts"  # objects with hyperparameters, such as `config.optimizer.lr`


class _Member(NamedTuple):
    """A member that Keras 3 lacks.

    Attributes:
        instead: what to write.
        of: a pattern that the expression of the object contains.
        not_of: a pattern that it does not contain.
    """

    instead: str
    of: str = ""
    not_of: str = r"(?!)"


_MEMBERS = {
    "minimize": _Member(
        "Keras 3's optimizers have no minimize: use tf.GradientTape and optimizer.apply_gradients", _OPTIMIZER
    ),
    "lr": _Member("Write optimizer.learning_rate", "optimi[sz]er", _OPTIONS),
    "_decayed_lr": _Member("Read optimizer.learning_rate, which is the value of the schedule at this step"),
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
    "compiled_loss": _Member("Write model.compute_loss(x, y, y_pred)", "self|model"),
    "compiled_metrics": _Member("Write model.compute_metrics(x, y, y_pred)", "self|model"),
}
_TEXTS = {name: member.instead for name, member in _MEMBERS.items()} | {
    "add_weight": "Pass the name by keyword: add_weight(shape=..., name=...)",
    "experimental_autocast": "Write autocast",
    ".index": "A checkpoint is a folder here, without a file .index: use tf.train.latest_checkpoint(folder)",
}
# Functions that ask for files by their names.
_ASKING = {"exists", "Exists", "isfile", "is_file", "glob", "Glob", "endswith"}


def text(name: str) -> str:
    """Return what to write in place of a member that `of_attribute` or `of_call` returned."""
    return _TEXTS[name]


def of_attribute(node: ast.Attribute) -> str | None:
    """Return the name of an attribute that objects of Keras 3 lack, None for any other."""
    member = _MEMBERS.get(node.attr)
    if member is None or (isinstance(node.ctx, ast.Store) and node.attr != "lr"):
        return None
    owner = ast.unparse(node.value)
    missing = re.search(member.of, owner, re.IGNORECASE) and not re.search(member.not_of, owner, re.IGNORECASE)
    return node.attr if missing else None


def of_call(node: ast.Call) -> str | None:
    """Return the name of an entry about the arguments of a call, None for any other call."""
    if any(keyword.arg == "experimental_autocast" for keyword in node.keywords):
        return "experimental_autocast"
    if not isinstance(node.func, ast.Attribute):
        return None
    match node:
        case ast.Call(func=ast.Attribute(attr="add_weight"), args=[ast.Constant(value=str()), *_]):
            return "add_weight"
    texts = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)]
    return ".index" if node.func.attr in _ASKING and any(value.endswith(".index") for value in texts) else None
