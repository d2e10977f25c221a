"""The recorder: variables as they are created, and the results and variables after each training step.

Everything is written to a folder as it happens, so that a program may end in any way: `events.jsonl` has a line for
each variable, step and note, `initial` the initial values of variables, `steps` the variables after each step.
"""

from __future__ import annotations

import json
import os
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import numpy as np

LARGEST = 1 << 20  # elements of a variable that are recorded of each step; of a larger variable, evenly spaced ones
_NOT_THE_PROGRAM = "site-packages", "dist-packages"

Entry: TypeAlias = "dict[str, Any]"


class EnoughSteps(BaseException):
    """Ends the program after the last step to be recorded."""


def match(variable: Entry, unused: Iterable[Entry]) -> Entry | None:
    """Return the first unused variable of the other run that has the same kind, shape, and name where one has it.

    >>> others = [{"kind": "keras", "shape": [2], "name": name, "trainable": True} for name in ("a/bias", "b/bias")]
    >>> match({"kind": "keras", "shape": [2], "name": "b/bias", "trainable": True}, others)["name"]
    'b/bias'
    >>> match({"kind": "keras", "shape": [2], "name": "c/bias", "trainable": True}, others)["name"]
    'a/bias'
    >>> match({"kind": "keras", "shape": [3], "name": "a/bias", "trainable": True}, others)
    """
    alike = [other for other in unused if all(other[key] == variable[key] for key in ("kind", "shape", "trainable"))]
    last_part = [other for other in alike if other["name"].split("/")[-1] == variable["name"].split("/")[-1]]
    same_name = [other for other in last_part if other["name"] == variable["name"]]
    return next(iter(same_name or last_part or alike), None)


class Recorder:
    """Writes the steps of a program to a folder.

    Args:
        folder: where to write.
        steps: after how many steps the program ends.
        replay: the folder of another run, whose initial values the variables get.
        program_folder: the folder of the program's files, to tell its lines from those of libraries.
    """

    def __init__(self, folder: str, steps: int, program_folder: str, replay: str | None = None) -> None:
        self.steps = 0
        self.pending: dict[str, float] = {}  # losses of eager code, which belong to the next step
        self._folder, self._limit, self._program_folder = folder, steps, os.path.abspath(program_folder)
        for name in ("initial", "steps"):
            os.makedirs(os.path.join(folder, name), exist_ok=True)
        self._events = open(os.path.join(folder, "events.jsonl"), "w", encoding="utf-8")  # noqa: SIM115
        self._variables: list[tuple[Entry, Callable[[], Any]]] = []
        self._metrics: list[weakref.ref[Any]] = []
        self._notes: set[str] = set()
        self._replay = replay
        self._unused: list[Entry] = [] if replay is None else list(events(replay, "variable"))
        self._last: dict[int, np.ndarray] | None = None

    # Variables.

    def new_variable(self, kind: str, name: str, shape: Iterable[int], trainable: bool) -> Entry:
        """Return the entry of a variable that is about to be created, with the number of its match in the other run."""
        shape = [int(size) for size in shape]
        entry = {"kind": kind, "name": name.removesuffix(":0"), "shape": shape, "trainable": bool(trainable)}
        entry |= {"number": len(self._variables), "place": self.place()}
        self._variables.append((entry, lambda: None))
        other = match(entry, self._unused)
        if other is not None:
            self._unused.remove(other)
            entry["match"] = other["number"]
        return entry

    def add_variable(self, entry: Entry, variable: Any) -> None:
        """Note that a variable exists now."""
        self._variables[entry["number"]] = entry, weakref.ref(variable)
        self._write("variable", **entry)

    def save_initial(self, entry: Entry, value: Any) -> None:
        """Save the initial value of a variable, unless a function that is being traced computes it."""
        array = as_array(value)
        if array is not None:
            np.save(os.path.join(self._folder, "initial", f"{entry['number']}.npy"), array)

    def initial(self, entry: Entry) -> np.ndarray | None:
        """Return the initial value that the other run had; None if it had none."""
        if self._replay is None or "match" not in entry:
            return None
        path = os.path.join(self._replay, "initial", f"{entry['match']}.npy")
        return np.load(path) if os.path.exists(path) else None

    def new_metric(self, metric: Any) -> None:
        """Read this metric after each step."""
        self._metrics.append(weakref.ref(metric))

    # Steps.

    def trainable(self) -> dict[int, np.ndarray]:
        """Return the trainable variables by number, and the counters of optimizers, which tell that a step was made."""
        return self._values(lambda entry: entry["trainable"] or entry["name"].endswith("/iteration"))

    def has_changed(self) -> bool:
        """Return whether a step was made since the last call, and look at the variables anew."""
        before, self._last = self._last, self.trainable()
        return before is not None and not all(
            np.array_equal(before[number], value, equal_nan=True)
            for number, value in self._last.items()
            if number in before
        )

    def record_step(self, results: dict[str, float], metrics: bool = True) -> None:
        """Record a step: its results, metrics and variables. Raise `EnoughSteps` after the last one."""
        self.steps += 1
        results = {**self.pending, **results, **(self._metric_results() if metrics else {})}
        self.pending = {}
        values = self._values(lambda entry: entry["kind"] != "optimizer")
        arrays: dict[str, Any] = {str(number): value for number, value in values.items()}
        np.savez(os.path.join(self._folder, "steps", f"{self.steps}.npz"), **arrays)
        self._write("step", number=self.steps, results=results, place=self.place())
        if self.steps == self._limit:
            self._end()
            raise EnoughSteps
        self._last = self.trainable()

    def flush(self) -> None:
        """Record a step that the program made after a tape's gradient, without an optimizer."""
        if self.has_changed() and self.pending:
            self.record_step({})

    def finish(self) -> None:
        """Record the last step of the program's own code, and the program's end."""
        if self.steps < self._limit:
            self.flush()
        self._end()

    def _end(self) -> None:
        self._write("end")
        self._events.close()

    def _values(self, is_selected: Callable[[Entry], bool]) -> dict[int, np.ndarray]:
        values = {}
        for entry, variable in list(self._variables):
            if (
                is_selected(entry)
                and (array := as_array(current(variable()))) is not None
                and array.dtype.kind in "fiu"
            ):
                values[entry["number"]] = sample(array).copy()
        return values

    def _metric_results(self) -> dict[str, float]:
        values: dict[str, float] = {}
        for metric in filter(None, (reference() for reference in self._metrics)):
            try:
                result = metric.result()
            except Exception:  # the metric was not built
                continue
            for name, value in scalars(result, f"metric {metric.name}"):
                values[unique(name, values)] = value
        return values

    # Notes.

    def note(self, what: str, **details: Any) -> None:
        """Write a note once for each line of the program."""
        entry = {"what": what, **details, "place": self.place()}
        key = json.dumps(entry)
        if key not in self._notes:
            self._notes.add(key)
            self._write("note", **entry)

    def place(self) -> str:
        """Return the file and line of the program that is running, or an empty text."""
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None:
            file = frame.f_code.co_filename
            inside = os.path.abspath(file).startswith(self._program_folder + os.sep) and os.path.exists(file)
            if inside and not any(part in file for part in _NOT_THE_PROGRAM) and os.path.dirname(file) != _HERE:
                return f"{os.path.relpath(file, self._program_folder)}:{frame.f_lineno}"
            frame = frame.f_back
        return ""

    def _write(self, event: str, **details: Any) -> None:
        self._events.write(json.dumps({"event": event, **details}) + "\n")
        self._events.flush()


_HERE = os.path.dirname(os.path.abspath(__file__))


def events(folder: str, kind: str) -> Iterator[Entry]:
    """Yield the events of a kind that a run has written."""
    with open(os.path.join(folder, "events.jsonl"), encoding="utf-8") as file:
        for line in file:
            entry: Entry = json.loads(line)
            if entry["event"] == kind:
                yield entry


def as_array(value: Any) -> np.ndarray | None:
    """Return an array of a variable or tensor, float32 for narrower floats; None if it has no value now."""
    if value is None:
        return None
    try:
        array = np.asarray(value.numpy() if hasattr(value, "numpy") else value)
        return array.astype(np.float32) if array.dtype.kind == "V" or array.dtype == np.float16 else array
    except Exception:  # each library has errors of its own for a value that is not known while it traces
        return None


def current(variable: Any) -> Any:
    """Return the value of a variable, or the mean over the replicas if each has its own, as in replicax."""
    inner = getattr(variable, "value", None)  # of Keras's variables on TensorFlow a variable, of TensorFlow's a method
    inner = variable if inner is None or callable(inner) else inner
    if type(inner).__name__ == "MirroredVariable" and type(inner).__module__.startswith("tensorflow."):
        return np.mean([copy.numpy() for copy in inner.values], axis=0, dtype=inner.dtype.as_numpy_dtype)
    return variable


def sample(array: np.ndarray) -> np.ndarray:
    """Return the elements of an array that are recorded of each step.

    >>> sample(np.zeros([3, 2])).shape, sample(np.zeros(LARGEST + 1)).shape
    ((6,), (524289,))
    """
    flat = array.ravel()
    return flat[:: max(1, -(-flat.size // LARGEST))]


def scalars(result: Any, name: str = "result") -> Iterator[tuple[str, float]]:
    """Yield the numbers among the results of a function, with names made of keys and positions.

    >>> dict(scalars({"loss": np.float32(0.5), "images": np.zeros([2, 2])}))
    {'loss': 0.5}
    >>> dict(scalars((1.0, [2.0])))
    {'result 1': 1.0, 'result 2 1': 2.0}
    """
    if isinstance(result, dict):
        for key, value in result.items():
            yield from scalars(value, str(key))
    elif isinstance(result, (list, tuple)) or "PerReplica" in type(result).__name__:
        for position, value in enumerate(getattr(result, "values", result), 1):
            yield from scalars(value, f"{name} {position}")
    elif not isinstance(result, (str, bytes)):
        array = as_array(result)
        if array is not None and array.size == 1 and array.dtype.kind in "fiu":
            yield name, float(array.item())


def unique(name: str, names: Iterable[str]) -> str:
    """Return a name with a number behind it if there is one of that name.

    >>> unique("loss", ["loss", "loss 2"])
    'loss 3'
    """
    names, number, candidate = list(names), 1, name
    while candidate in names:
        number += 1
        candidate = f"{name} {number}"
    return candidate
