"""Checkpoints (saving the state of a training, and restoring it) and early stopping.

>>> import os, tempfile
>>> import replicax as rx
>>> steps = rx.Variable(0)
>>> manager = rx.train.CheckpointManager(rx.train.Checkpoint(steps=steps), tempfile.mkdtemp(), max_to_keep=3)
>>> manager.restore_or_initialize() is None  # nothing is there yet
True
>>> steps.assign_add(5).item(), os.path.basename(manager.save())
(5, 'ckpt-1')
"""

from replicax import _wiring as _wiring  # puts the parts together
from replicax._checkpoint.checkpoint import Checkpoint
from replicax._checkpoint.lists import latest_checkpoint
from replicax._checkpoint.manager import CheckpointManager, checkpoints_iterator, get_checkpoint_state
from replicax._checkpoint.options import CheckpointOptions
from replicax._checkpoint.random_state import RandomState
from replicax._checkpoint.reader import list_variables, load_checkpoint, load_variable
from replicax._checkpoint.report import Report, Uncovered
from replicax._job.early_stopping import EarlyStopping, agree_to_stop

__all__ = [
    "Checkpoint",
    "CheckpointManager",
    "CheckpointOptions",
    "EarlyStopping",
    "RandomState",
    "Report",
    "Uncovered",
    "agree_to_stop",
    "checkpoints_iterator",
    "get_checkpoint_state",
    "latest_checkpoint",
    "list_variables",
    "load_checkpoint",
    "load_variable",
]
