"""The report of `replicax compare`, as text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from replicax.tf._programs.compare._replicax_recorder import recorder
from replicax.tf._programs.compare.comparison import Comparison, Difference, Step

_DRIFT = 1e-5  # a difference of variables, relative to their change, that is more than rounding at the first step
_CONSTANT = "constant in TensorFlow"  # so that a difference has no change to be relative to
_SHOWN = 5  # variables and places of a list


def text(comparison: Comparison, keep_random: bool = False) -> str:
    """Return the table of steps, the first difference, and what was made equal."""
    parts = [_table(comparison.steps), _verdict(comparison), "\n".join(_conditions(comparison, keep_random))]
    return "\n\n".join(part for part in parts if part)


def _table(steps: Sequence[Step]) -> str:
    names = [result.name for step in steps for result in step.results if result.theirs or result.ours]  # without zeros
    rows = [("step", "result", "TensorFlow", "replicax", "difference")]
    for step in steps:
        rows += [
            (
                str(step.number),
                result.name,
                f"{result.theirs:.7g}",
                f"{result.ours:.7g}",
                _mark(result.difference, step),
            )
            for result in step.results
            if result.name in names
        ]
        mark = " <" if step.differing_variables else ""
        rows.append((str(step.number), "variables", "", "", f"{_of_variables(step)}{mark}"))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = []
    for number, result, theirs, ours, difference in rows:
        numbers = f"{theirs:>{widths[2]}}  {ours:>{widths[3]}}  {difference}"
        lines.append(f"{number:>{widths[0]}}  {result:<{widths[1]}}  {numbers}".rstrip())
    return "\n".join(lines) if steps else ""


def _of_variables(step: Step) -> str:
    differing = [difference for difference in step.variables if difference.mean and not difference.is_rounding]
    if any(difference.change == 0 for difference in differing):
        return _CONSTANT
    return f"{step.largest_difference:.1e}"


def _mark(difference: float, step: Step) -> str:
    return f"{difference:.1e}{' <' if difference > step.rtol else ''}"


def _verdict(comparison: Comparison) -> str:
    theirs, ours = len(comparison.theirs.steps), len(comparison.ours.steps)
    first = comparison.first
    if not comparison.steps:
        return _no_steps(comparison)
    if first is not None:
        before = comparison.steps[comparison.steps.index(first) - 1].largest_difference if first.number > 1 else 0.0
        counts = [f"TensorFlow made {theirs} steps, replicax {ours}."] if theirs != ours else []
        return "\n".join([*_first_difference(first), *_drift(before, first), *counts])
    if theirs != ours:
        return f"The steps agree, but TensorFlow made {theirs} and replicax {ours}."
    return f"All {ours} steps agree, within {comparison.rtol:g}." + _rounding(comparison)


def _no_steps(comparison: Comparison) -> str:
    if not comparison.theirs.is_complete or not comparison.ours.is_complete:
        return ""  # the command has said which program failed
    counts = f"TensorFlow made {len(comparison.theirs.steps)} and replicax {len(comparison.ours.steps)} steps"
    return (
        f"There is nothing to compare: {counts}. A step is a batch of Keras's fit, train_on_batch, a call of a "
        "tf.function or of strategy.run that changes trainable variables, or a call of a Keras optimizer."
    )


def _first_difference(step: Step) -> Iterator[str]:
    place = f" ({step.place})" if step.place else ""
    yield f"First difference: step {step.number}{place}."
    for result in step.differing_results:
        yield f"  {result.name}: TensorFlow {result.theirs:.7g}, replicax {result.ours:.7g}"
    differing = step.differing_variables
    if step.results and not step.differing_results:
        yield "  The results of this step agree, the variables after it do not: look at the gradients and the update."
    elif not differing:
        yield "  The variables after this step agree: look at how the result is computed."
    elif step.number == 1:
        yield "  The results of the first step differ: look at the input and the forward pass."
    for difference in differing[:_SHOWN]:
        yield f"  variable {_variable(difference)}"
    if len(differing) > _SHOWN:
        yield f"  and {len(differing) - _SHOWN} more variables"


def _drift(before: float, step: Step) -> Iterator[str]:
    """Yield a hint if the variables have drifted apart over several steps."""
    if step.differing_variables and not step.differing_results and before > _DRIFT:
        yield (
            f"  The variables had differed by {before:.1e} a step before: rounding can grow like this in deep "
            "networks, while a fault usually shows at once. Try a larger --rtol."
        )


def _variable(difference: Difference) -> str:
    entry = difference.variable
    created = f", created at {entry['place']}" if entry["place"] else ""
    largest = f"{difference.largest:.1e} (TensorFlow {difference.theirs:.7g}, replicax {difference.ours:.7g})"
    relative = f"{difference.relative:.1e} of its change so far" if difference.change else _CONSTANT
    return f"{entry['name']}, shape {tuple(entry['shape'])}{created}: largest difference {largest}; {relative}"


def _rounding(comparison: Comparison) -> str:
    small = [
        difference.variable for step in comparison.steps for difference in step.variables if difference.is_rounding
    ]
    names = sorted({variable["name"] for variable in small if variable["trainable"]})
    if not names:
        return ""
    return (
        f"\nNot counted, because the change is small and differs: {', '.join(names)}. The gradient is probably zero "
        "but for rounding, as that of a bias before BatchNormalization."
    )


def _conditions(comparison: Comparison, keep_random: bool) -> Iterator[str]:
    matched = [entry for entry in comparison.ours.variables.values() if "match" in entry]
    if matched:
        yield f"Made equal: the initial values of {len(matched)} variables"
    both = [*comparison.theirs.notes, *comparison.ours.notes]
    for name, places in _places(both, "unshuffled").items():
        yield f"Made equal: {name} does not shuffle{places}"
    for name, places in _places(both, "fixed").items():
        yield f"Made equal: {name} gives the same numbers in every call{places}"
    for name, places in _places(both, "unchanged").items():
        yield f"Made equal: {name} returns the image as it is{places}"
    for name, places in _places(both, "first corner").items():
        yield f"Made equal: {name} returns the first corner{places}"
    if keep_random:
        yield "Not made equal: random numbers and shuffled data (--keep-random)"
    for name, places in _places(both, "random").items():
        yield f"Not made equal: {name} draws other numbers{places}"
    if comparison.steps or (comparison.theirs.is_complete and comparison.ours.is_complete):
        yield from _differences_of_runs(comparison)


def _differences_of_runs(comparison: Comparison) -> Iterator[str]:
    """Yield the checkpoints, variables and replicas of one run alone."""
    written = {note["name"] for note in comparison.theirs.notes if note["what"] == "written"}
    for name, places in _places(comparison.ours.notes, "restored").items():
        if name in written:
            yield (
                f"Not made equal: replicax restored {name}{places}, which the run under TensorFlow wrote. "
                "Remove it, or give the program a new folder for each run."
            )
    for name, entries in zip(("TensorFlow", "replicax"), comparison.without_match):
        for entry in entries[:_SHOWN]:
            yield f"Not made equal: only {name} has the variable {entry['name']}, shape {tuple(entry['shape'])}"
        if len(entries) > _SHOWN:
            yield f"Not made equal: {len(entries) - _SHOWN} more variables of {name}"
    theirs, ours = (
        max((note["number"] for note in run.notes if note["what"] == "replicas"), default=1)
        for run in (comparison.theirs, comparison.ours)
    )
    if theirs != ours:
        cure = "Set CUDA_VISIBLE_DEVICES or REPLICAX_VIRTUAL_DEVICES"
        yield f"Not made equal: TensorFlow has {theirs} replicas, replicax {ours}. {cure}"


def _places(notes: Sequence[recorder.Entry], kind: str) -> dict[str, str]:
    """Return the lines that call each function named by notes of one kind, as text."""
    places: dict[str, dict[str, None]] = defaultdict(dict)
    for note in notes:
        if note["what"] == kind:
            places[note["name"]] |= {note["place"]: None} if note["place"] else {}
    return {name: f" ({', '.join(list(lines)[:_SHOWN])})" if lines else "" for name, lines in places.items()}
