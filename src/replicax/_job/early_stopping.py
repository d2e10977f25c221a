"""Early stopping in a loop of one's own: all workers of a job stop after the same step."""

from __future__ import annotations

import math
from typing import Any

from replicax._base.errors import InvalidArgumentError
from replicax._base.messages import received
from replicax._job import exchange, state

_MODES = ("min", "max")


def agree_to_stop(wants_to_stop: bool) -> bool:
    """Return on all workers of a job whether any of them wants to stop.

    Call it on all workers at the same place of the loop, for decisions that a worker makes by itself: a time limit, a
    loss that is not finite, a file. A worker that left the loop alone would end the job with an error. In a program of
    one process it returns its argument.

    Args:
        wants_to_stop: whether this worker wants to stop.

    >>> import time
    >>> import replicax as rx
    >>> deadline = time.monotonic() + 0.1
    >>> steps = 0
    >>> while not rx.train.agree_to_stop(time.monotonic() > deadline):
    ...     steps += 1
    >>> steps > 0
    True
    """
    return "True" in _exchange("agree_to_stop", str(bool(wants_to_stop)))


class EarlyStopping:
    """Tells when a value has stopped improving, on all workers of a job alike.

    Call `update` once an epoch, on all workers, with the same value: a loss over the data of all workers, as
    `strategy.reduce` returns it. In a `Checkpoint` it keeps the best value and the count, so that a resumed program
    stops at the same epoch.

    Args:
        patience: the number of updates in a row without improvement after which to stop, at least 1.
        min_delta: the least change that counts as an improvement, at least 0.
        mode: "min" if smaller values are better, as of a loss; "max" if larger ones are, as of an accuracy.

    Raises:
        ValueError: `patience`, `min_delta` or `mode` is out of range.

    >>> import replicax as rx
    >>> early_stopping = rx.train.EarlyStopping(patience=2)
    >>> [early_stopping.update(loss) for loss in (0.9, 0.5, 0.6, 0.7)]
    [False, False, False, True]
    >>> early_stopping.best, early_stopping.wait, early_stopping.improved
    (0.5, 2, False)
    """

    def __init__(self, patience: int = 1, min_delta: float = 0.0, mode: str = "min"):
        if isinstance(patience, bool) or not isinstance(patience, int) or patience < 1:
            raise InvalidArgumentError(f"patience must be a whole number of at least 1, got {received(patience)}.")
        if not 0 <= min_delta < math.inf:
            raise InvalidArgumentError(f"min_delta must be a number of at least 0, got {received(min_delta)}.")
        if mode not in _MODES:
            raise InvalidArgumentError(f"mode must be 'min' or 'max', got {received(mode)}.")
        self.patience, self.min_delta, self.mode = patience, float(min_delta), mode
        self._best: float | None = None
        self._wait = 0

    @property
    def best(self) -> float | None:
        """The best value so far; None before the first update.

        >>> import replicax as rx
        >>> print(rx.train.EarlyStopping().best)
        None
        """
        return self._best

    @property
    def wait(self) -> int:
        """The number of updates since the best value.

        >>> import replicax as rx
        >>> rx.train.EarlyStopping().wait
        0
        """
        return self._wait

    @property
    def improved(self) -> bool:
        """Whether the latest value is the best so far, for example to save the model.

        >>> import replicax as rx
        >>> early_stopping = rx.train.EarlyStopping(mode="max")
        >>> _ = early_stopping.update(0.8)
        >>> early_stopping.improved
        True
        """
        return self._best is not None and self._wait == 0

    @property
    def should_stop(self) -> bool:
        """Whether to stop: the result of the latest `update`, also after a restore.

        >>> import replicax as rx
        >>> rx.train.EarlyStopping().should_stop
        False
        """
        return self._wait >= self.patience

    def update(self, value: Any) -> bool:
        """Take the value of an epoch, and return whether to stop.

        Args:
            value: a number or a scalar array, equal on all workers. NaN is no improvement.

        Returns:
            True if the latest `patience` updates brought no improvement.

        Raises:
            ValueError: the workers pass different values. It is raised on all of them.
            TypeError: `value` is no number, for example a per-replica value that is not reduced yet.

        >>> import replicax as rx
        >>> rx.train.EarlyStopping(patience=1).update(0.5)
        False
        """
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(
                f"EarlyStopping.update takes a number, got {received(value)}. Reduce a per-replica value first: "
                "strategy.reduce('SUM', value, axis=None)."
            ) from None
        values = _exchange("EarlyStopping.update", repr(number + 0.0))  # which makes 0.0 of -0.0
        if len(set(values)) > 1:
            shown = ", ".join(f"{exchange.name(process)}: {text}" for process, text in enumerate(values))
            raise InvalidArgumentError(
                f"EarlyStopping.update needs the same value on all workers, got {shown}. Evaluate all data on each "
                "worker, or reduce the value over the workers: strategy.reduce('SUM', value, axis=None)."
            )
        better = -math.inf if self._best is None else (self._best - number) * (1 if self.mode == "min" else -1)
        if self._best is None and not math.isnan(number) or better > self.min_delta:
            self._best, self._wait = number, 0
        else:
            self._wait += 1
        return self.should_stop

    def save_state(self) -> dict[str, Any]:
        """Return the best value and the count, for a `Checkpoint`.

        >>> import replicax as rx
        >>> rx.train.EarlyStopping().save_state()
        {'best': None, 'wait': 0}
        """
        return {"best": self._best, "wait": self._wait}

    def restore_state(self, state: dict[str, Any]) -> None:
        """Set the best value and the count to those that `save_state` returned.

        >>> import replicax as rx
        >>> early_stopping = rx.train.EarlyStopping()
        >>> early_stopping.restore_state({"best": 0.5, "wait": 1})
        >>> early_stopping.best
        0.5
        """
        self._best, self._wait = state["best"], state["wait"]

    def _carried_over(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        """Return what to restore of the states of another number of workers, which are equal."""
        return states[0]


def _exchange(call_name: str, text: str) -> list[str]:
    """Return the texts of all workers, in a call that the job's monitor knows by its name."""
    call = state.begin(call_name)
    try:
        return exchange.all_gather(text, "stop")
    finally:
        if call is not None:
            call.ended()
