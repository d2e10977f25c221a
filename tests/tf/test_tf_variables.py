"""The methods of variables against TensorFlow's: values, dtypes and classes of errors.

tests/tf/tf_variables/cases.txt has expressions, with the kinds and the dtypes of the variables, and
tests/recorded/variables.json the results of TensorFlow 2.21.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from evaluation import Expressions, difference

FOLDER = Path(__file__).parent / "tf_variables"
SCRIPT = (FOLDER / "run.py").read_text(encoding="utf-8")


def programs_of(lines):
    """Return the programs of cases.txt, one for each kind of variables."""
    rows = [[part.strip() for part in line.split(" | ", 3)] for line in lines if line and not line.startswith("#")]
    return [
        f"{kind}: {how}: {group}: {expression}" for kinds, how, group, expression in rows for kind in kinds.split(", ")
    ]


PROGRAMS = programs_of((FOLDER / "cases.txt").read_text(encoding="utf-8").splitlines())
VARIABLES = Expressions("variables", FOLDER / "run.py", {program: SCRIPT + program for program in PROGRAMS})


@pytest.fixture(scope="module")
def results(request):
    return VARIABLES.results(request)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("expression", VARIABLES.all)
def test_a_variable_does_what_tensorflows_does(expression, results):
    expected, got = results.tensorflow[expression]["eager"], results.replicax[expression]
    assert set(got) == ({"eager", "function"} if ": both: " in expression else {"eager"})
    for way, outcomes in got.items():
        assert outcomes and set(outcomes) <= set(expected)
        for dtype, ours in outcomes.items():
            theirs = dict(expected[dtype])
            said = ours.pop("says", "")
            if theirs.get("raises") in ours.get("raises", ()):  # also an instance of TensorFlow's class
                ours["raises"] = theirs["raises"]
            text = difference(theirs, ours, rel=1e-2)
            assert text is None, f"{way}, {dtype}: {text} {said}"


def test_the_record_is_what_tensorflow_gives(request, tensorflow_python):
    recorded, live = VARIABLES.sample(request)
    for expression, result in live.items():
        assert difference(recorded[expression], result) is None, expression
