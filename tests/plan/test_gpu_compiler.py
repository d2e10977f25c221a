"""Steps compiled by XLA for GPUs that are not there: their memory, and the overlap of collectives with computation.

They need a Python with the compiler in `REPLICAX_PLAN_PYTHON` (see docs/how-to/planning.md); `make check` has it.
"""

import importlib
from pathlib import Path

import pytest
from compilers import needs_compiler

pytestmark = [pytest.mark.thorough, needs_compiler("gpu")]

REPLICATED, STATE, VARIABLES = "replicated", "sharded state", "sharded variables"
TOPOLOGY = "h100:8"


@pytest.fixture(scope="module")
def benchmark():
    """The benchmark of steps on GPUs, which has the steps by hand."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        yield importlib.import_module("gpu_compiler")


@pytest.fixture(scope="module")
def steps(benchmark):
    return importlib.import_module("gpu_steps")


@pytest.fixture(scope="module")
def model(steps):
    class Small(steps.MLP):
        layers = 6

    return Small()


@pytest.fixture(scope="module")
def by_hand(benchmark, steps, model):
    """Return the plans of all forms by hand of a step."""
    return lambda mode: [benchmark.plan_by_hand(model, mode, form, TOPOLOGY) for form in steps.FORMS[mode]]


def best(plans):
    return min(plans, key=lambda plan: (plan.exposed, plan.memory.temporaries))


def of_kind(plan, kind):
    return [collective for collective in plan.collectives if collective.kind == kind]


def overlap(plan, kind):
    """Return the share of the collectives of a kind that overlap with computation."""
    collectives = of_kind(plan, kind)
    return sum(collective.overlaps for collective in collectives) / len(collectives)


@pytest.mark.parametrize("mode", [REPLICATED, STATE, VARIABLES])
def test_a_step_takes_no_more_memory_and_exposes_no_more_than_the_best_by_hand(mode, steps, model, by_hand):
    plan = steps.plan_with_replicax(model, mode, TOPOLOGY)
    forms = by_hand(mode)
    other = best(forms)
    assert plan.memory.temporaries <= 1.02 * other.memory.temporaries
    assert plan.exposed <= other.exposed + 2e5  # a microsecond less of work exposes as much
    if mode == VARIABLES:
        assert overlap(plan, "all-gather") >= max(overlap(form, "all-gather") for form in forms)
    if mode != REPLICATED:
        messages = [message.bytes for message in of_kind(plan, "reduce-scatter")]
        assert len(messages) > 1 and max(messages) <= sum(messages) / 2  # not one of all gradients at the end
