"""Compare the records of two runs: the results of each step, and the variables after it."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from replicax.tf._programs.compare._replicax_recorder import recorder

_OF_CHANGE = 10  # a variable may differ by so many times `rtol` of its change since the program began
_ROUNDING = 1e-6  # of a variable's largest element, and of the largest change of a trainable variable
_SMALL = 0.1  # of the largest change: a variable that changes less may have a gradient that is zero but for rounding


@dataclass(frozen=True)
class Run:
    """The record of a run.

    Attributes:
        folder: where the record is.
        variables: the entries of variables, by their numbers.
        steps: the entries of steps, in order.
        notes: the entries of notes.
        is_complete: whether the program ended without an error.
    """

    folder: str
    variables: dict[int, recorder.Entry]
    steps: list[recorder.Entry]
    notes: list[recorder.Entry]
    is_complete: bool

    @classmethod
    def read(cls, folder: str) -> Run:
        """Read a record, which may be empty."""
        if not os.path.exists(os.path.join(folder, "events.jsonl")):
            return cls(folder, {}, [], [], False)
        variables = {entry["number"]: entry for entry in recorder.events(folder, "variable")}
        steps, notes = list(recorder.events(folder, "step")), list(recorder.events(folder, "note"))
        return cls(folder, variables, steps, notes, any(True for _ in recorder.events(folder, "end")))

    def values(self, step: int) -> dict[int, np.ndarray]:
        """Return the variables after a step, by number."""
        with np.load(os.path.join(self.folder, "steps", f"{step}.npz")) as arrays:
            return {int(number): arrays[number] for number in arrays.files}

    def initial(self, number: int) -> np.ndarray | None:
        """Return the recorded elements of a variable's initial value; None where it was not recorded."""
        path = os.path.join(self.folder, "initial", f"{number}.npy")
        return recorder.sample(np.load(path)) if os.path.exists(path) else None


@dataclass(frozen=True)
class Result:
    """A number that a step returned in both runs."""

    name: str
    theirs: float
    ours: float

    @property
    def difference(self) -> float:
        """The difference, relative to TensorFlow's value; 0 where both are the same or not a number."""
        if self.theirs == self.ours or (math.isnan(self.theirs) and math.isnan(self.ours)):
            return 0.0
        difference = abs(self.theirs - self.ours) / max(abs(self.theirs), 1e-30)
        return math.inf if math.isnan(difference) else difference


@dataclass(frozen=True)
class Difference:
    """How a variable differs after a step.

    Attributes:
        variable: its entry in replicax's record.
        largest: the largest difference of an element.
        theirs, ours: the values of that element.
        change: the mean size of the change of an element since the beginning, in TensorFlow.
        mean: the mean size of the difference of an element.
        is_beyond: whether it is beyond the tolerance.
        is_rounding: whether the gradient may be rounding alone, as that of a bias before BatchNormalization.
    """

    variable: recorder.Entry
    largest: float
    theirs: float
    ours: float
    change: float
    mean: float
    is_beyond: bool = False
    is_rounding: bool = False

    @property
    def relative(self) -> float:
        """The difference, relative to the change since the beginning."""
        return self.mean / self.change if self.change else math.inf if self.mean else 0.0


@dataclass(frozen=True)
class Step:
    """A step of both runs."""

    number: int
    place: str
    results: list[Result]
    variables: list[Difference]
    rtol: float

    @property
    def differing_results(self) -> list[Result]:
        """The results beyond the tolerance."""
        return [result for result in self.results if result.difference > self.rtol]

    @property
    def differing_variables(self) -> list[Difference]:
        """The variables beyond the tolerance, those with the largest relative difference first."""
        beyond = [difference for difference in self.variables if difference.is_beyond and not difference.is_rounding]
        return sorted(beyond, key=lambda difference: -difference.relative)

    @property
    def largest_difference(self) -> float:
        """The largest relative difference of a variable, without those of rounding."""
        return max((difference.relative for difference in self.variables if not difference.is_rounding), default=0.0)

    @property
    def is_equal(self) -> bool:
        """Whether all results and variables agree."""
        return not self.differing_results and not self.differing_variables


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`."""

    theirs: Run
    ours: Run
    rtol: float
    steps: list[Step] = field(default_factory=list)

    @property
    def first(self) -> Step | None:
        """The first step that differs."""
        return next((step for step in self.steps if not step.is_equal), None)

    @property
    def is_equal(self) -> bool:
        """Whether both runs made the same number of steps, at least one, and all agree."""
        return bool(self.steps) and self.first is None and len(self.theirs.steps) == len(self.ours.steps)

    @property
    def without_match(self) -> tuple[list[recorder.Entry], list[recorder.Entry]]:
        """The trainable variables of TensorFlow and of replicax that the other run does not have."""
        matched = {entry["match"] for entry in self.ours.variables.values() if "match" in entry}
        theirs = [entry for number, entry in self.theirs.variables.items() if number not in matched]
        ours = [entry for entry in self.ours.variables.values() if "match" not in entry]
        return [entry for entry in theirs if entry["trainable"]], [entry for entry in ours if entry["trainable"]]


def compare(theirs: Run, ours: Run, rtol: float) -> Comparison:
    """Compare the steps that both runs have.

    Args:
        theirs, ours: the records of TensorFlow and of replicax.
        rtol: the tolerance: of results relative to their value, ten times that of variables relative to their change.
    """
    steps = [_step(theirs, ours, *pair, rtol) for pair in zip(theirs.steps, ours.steps)]
    return Comparison(theirs, ours, rtol, steps)


def _step(theirs: Run, ours: Run, their_step: recorder.Entry, our_step: recorder.Entry, rtol: float) -> Step:
    number = our_step["number"]
    names = [name for name in their_step["results"] if name in our_step["results"]]
    results = [Result(name, their_step["results"][name], our_step["results"][name]) for name in names]
    results_agree = all(result.difference <= rtol for result in results)
    judged = _judge(list(_differences(theirs, ours, number)), rtol, results_agree)
    return Step(number, our_step["place"], results, list(judged), rtol)


def _differences(theirs: Run, ours: Run, step: int) -> Iterator[Difference]:
    their_values, our_values = theirs.values(step), ours.values(step)
    for number, our_value in our_values.items():
        entry = ours.variables.get(number, {})
        their_value = their_values.get(entry.get("match", -1))
        is_counter = our_value.dtype.kind in "iu" and not entry.get("shape")
        if their_value is None or not (our_value.dtype.kind == "f" or is_counter):
            continue  # whole numbers with a shape are states of generators
        if their_value.size:
            yield _difference(entry, their_value.astype(float), our_value.astype(float), theirs.initial(entry["match"]))


def _difference(entry: recorder.Entry, theirs: np.ndarray, ours: np.ndarray, initial: np.ndarray | None) -> Difference:
    is_same = (theirs == ours) | (np.isnan(theirs) & np.isnan(ours))
    difference = np.where(is_same, 0.0, np.nan_to_num(np.abs(theirs - ours), nan=np.inf))
    changes = np.abs(theirs - (0.0 if initial is None else initial.astype(float)))
    changes = changes[np.isfinite(changes)]
    at = int(difference.argmax())
    change = float(changes.mean()) if changes.size else 0.0
    return Difference(
        entry, float(difference[at]), float(theirs[at]), float(ours[at]), change, float(difference.mean())
    )


def _judge(differences: list[Difference], rtol: float, results_agree: bool) -> Iterator[Difference]:
    """Yield the differences of a step, and mark the ones beyond the tolerance."""
    trainable = [difference for difference in differences if difference.variable["trainable"]]
    largest_change = max((difference.change for difference in trainable), default=0.0)
    from_rounding = 0.0
    for difference in sorted(differences, key=lambda difference: not difference.variable["trainable"]):
        rounding = _ROUNDING * (float(np.nan_to_num(abs(difference.theirs))) + largest_change)
        is_beyond = not difference.mean <= _OF_CHANGE * rtol * difference.change + rounding
        if difference.variable["trainable"]:
            is_rounding = results_agree and difference.change < _SMALL * largest_change
            if is_beyond and is_rounding:
                from_rounding = max(from_rounding, difference.mean)
        else:  # a moving mean has the rounding of a bias before it
            is_rounding = difference.mean <= from_rounding
        yield replace(difference, is_beyond=is_beyond, is_rounding=is_beyond and is_rounding)
