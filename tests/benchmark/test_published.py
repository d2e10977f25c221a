"""The decoders of `benchmarks/published.py`: their sizes are the published ones. Nothing is compiled."""

import math
import sys
from pathlib import Path

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType

from replicax._base.jax_internals import assume_cudnn
from replicax._base.jaxprs import jaxprs_in, opened


@pytest.fixture(scope="module")
def benchmark():
    folder = str(Path(__file__).parents[2] / "benchmarks")
    sys.path.insert(0, folder)
    try:
        import published

        yield published
    finally:
        sys.path.remove(folder)


def test_decoders_have_the_published_numbers_of_parameters(benchmark):
    assert benchmark.TINYLLAMA.parameters() == 1_100_048_384
    assert benchmark.LLAMA2.parameters() == 6_738_415_616
    assert benchmark.LLAMA3.parameters() == 8_030_261_248
    assert benchmark.MPT_1B.parameters() == 1_315_950_592
    assert benchmark.MPT_7B.parameters() == 6_658_859_008


@pytest.mark.parametrize("mpt", [False, True])
def test_step_has_six_operations_for_each_parameter_and_token(benchmark, mpt):
    model = benchmark.Decoder(3, 64, 2, 2, 96, 256, 32, head_size=32, mpt=mpt)
    saved = benchmark.EAGER_MPT if mpt else benchmark.EAGER_LLAMA
    step, arguments = benchmark.decoders.training_step(model, benchmark.Training(4, saved=saved), _mesh(benchmark, 2))
    with assume_cudnn():
        jaxpr = jax.make_jaxpr(step)(*arguments)
    products = 3 * (4 * 64 * 64 + (2 if mpt else 3) * 64 * 96) + 64 * 256
    assert _operations(jaxpr) == 6 * products * 2 * 4 * 32


def test_state_is_divided_among_the_devices(benchmark):
    case = benchmark.CASES["Llama 2 7B, 2 rows"]
    step, (state, tokens, _) = benchmark.decoders.training_step(case.model, case.training, _mesh(benchmark, 2))
    shards = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * 4 for leaf in jax.tree.leaves(state))
    assert shards == 3 * 4 * case.model.parameters() // 2
    assert tokens.shape == (4, 4096)


def _mesh(benchmark, size):
    return AbstractMesh((size,), (benchmark.decoders.AXIS,), (AxisType.Auto,))


def _operations(jaxpr, times=1):
    """Count the operations of the matrix products of a program, in loops as often as they run."""
    total = 0
    for eqn in opened(jaxpr)[0].eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            terms = math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
            total += 2 * times * terms * math.prod(eqn.outvars[0].aval.shape)
        rounds = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        total += sum(_operations(part, times * rounds) for part in jaxprs_in([*eqn.params.values()]))
    return total
