"""Runs the parts of a cut program on arrays of the host, as a worker and servers would, and the whole program."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import replicax as rx
from replicax._engine.argument_layout import leaves_of
from replicax._engine.function import program_of
from replicax._parameter_server.cut import cut
from replicax._parameter_server.cut_graph import nbytes
from replicax._parameter_server.cut_types import Cut, ServedLeaf
from replicax._parameter_server.places import Part, Place
from replicax._tracing.dataset_reads import element_arrays


@pytest.fixture(autouse=True)
def unpacked():
    """Has each leaf of a variable go in and come out by itself."""
    rx.config.optimize_programs(False)
    yield
    rx.config.optimize_programs(True)


def normal(*shape, seed=0):
    """Numbers that are the same in each run."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def variable(value):
    """A variable that stands on one device."""
    with rx.OneDeviceStrategy("CPU:0").scope():
        return rx.Variable(value)


class Outcome(NamedTuple):
    """What a run of the parts gave, and what travelled for it, in bytes."""

    cut: Cut
    news: dict[int, jax.Array]  # by the number of the leaf
    results: list[jax.Array]
    whole_news: dict[int, jax.Array]
    whole_results: list[jax.Array]
    shipped: int  # to all servers
    read: int
    gathered: int
    operands: list[list[jax.Array]]  # of the callbacks


def served(program, servers=1, sharded=(), together=False):
    """The leaves of a program: those of a shape in `sharded` over all servers, the others on one of them.

    The leaves of one variable are together or, with `together`, those of one shape.
    """
    keys, found = {}, []
    for leaf in leaves_of(program.level):
        aval = leaf.storage.home.leaf_types(False)[leaf.leaf]
        server = keys.setdefault(aval.shape if together else id(leaf.variable), len(keys)) % servers
        size = aval.shape[0] if aval.shape else 1
        parts = (Part(server, 0, size),)
        if tuple(aval.shape) in sharded and servers > 1:
            bounds = np.cumsum([0, *(len(rows) for rows in np.array_split(np.arange(size), servers))]).tolist()
            parts = tuple(Part(i, start, stop) for i, (start, stop) in enumerate(zip(bounds, bounds[1:])))
        names = tuple(f"{len(found)}/{number}" for number in range(len(parts)))
        place = Place(names, jax.ShapeDtypeStruct(aval.shape, aval.dtype), parts)
        found.append(ServedLeaf(leaf.slot, leaf.output, place))
    return found


def cut_of(function, args, servers=1, sharded=(), together=False, leaves=None):
    """The parts of a `rx.function` with these arguments, the program, its leaves and its call."""
    program, call = program_of(function, args, {})
    leaves = served(program, servers, sharded, together) if leaves is None else leaves
    others = [slot for read in program.reads for slot in read.slots]
    outputs = range(program.state_count, len(program.jaxpr.out_avals))
    return cut(program.jaxpr, leaves, others, list(outputs)), program, leaves, call


def simulate(function, args=(), servers=1, sharded=(), exported=False, together=False):
    """Runs the parts and the whole for the variables' present values."""
    parts, program, leaves, call = cut_of(function, args, servers, sharded, together)
    values = [leaf.variable._storage.read()[leaf.leaf] for leaf in leaves_of(program.level)]
    pulled = [jnp.asarray(x) for read in program.reads for x in element_arrays(read.element)]
    read = [x for leaf, x in zip(leaves, values) if leaf.slot is not None]
    news, results = program.executable.taped.function([], read, pulled, call.dynamic)
    runner = _Exported() if exported else jax.jit
    exchange, gathered = parts.exchange, []
    if parts.index is not None:
        ids = runner(parts.index.function)(*_of_kind(parts.index, [pulled, call.dynamic]))
        for gather in exchange.gathers:
            i, value = np.asarray(ids[gather.ids]), values[_leaf_of(gather.place)]
            assert i.dtype == np.int32 and (i >= 0).all() and (i < value.shape[0]).all()
            gathered.append(value[i])
            assert gathered[-1].shape == gather.aval.shape and gathered[-1].dtype == gather.aval.dtype
    read = [values[_leaf_of(place)] for place in exchange.reads]
    assert not parts.has_callbacks or not exported
    out = runner(parts.compute.function)(*_of_kind(parts.compute, [pulled, call.dynamic, gathered, read]))
    shipped, behind = [], out
    for avals in exchange.shipped:
        arrays, behind = behind[: len(avals)], behind[len(avals) :]
        assert [(x.shape, x.dtype) for x in arrays] == [(x.shape, x.dtype) for x in avals]
        shipped.append(arrays)
    found = dict(zip(exchange.computed, behind))
    operands, behind = [], behind[len(exchange.computed) :]
    for callback in parts.callbacks:
        operands.append(behind[: callback.count])
        behind = behind[callback.count :]
    assert not behind
    stored, answers, travelled = _updated(parts, leaves, values, shipped, runner)
    for result in sorted({result for result, _, _ in exchange.answers}):
        pieces = [answers[update, k] for r, update, k in exchange.answers if r == result]
        found[result] = jnp.concatenate(pieces) if len(pieces) > 1 else pieces[0]
    return Outcome(
        parts, stored, [found[result] for result in sorted(found)],
        {i: news[leaf.output] for i, leaf in enumerate(leaves) if leaf.output is not None}, results,
        travelled, sum(map(nbytes, read)), sum(map(nbytes, gathered)), operands,
    )  # fmt: skip


def _updated(parts, leaves, values, shipped, runner):
    """The new values of all leaves, the answers of the updates, and the bytes of what they took."""
    news, answers, travelled = {}, {}, 0
    pieces, servers = {}, {}
    for leaf, value in zip(leaves, values):
        for name, part in zip(leaf.place.names, leaf.place.parts):
            pieces[name] = value[part.start : part.stop] if leaf.place.is_sharded else value
            servers[name] = part.server
    replaced = {}
    for number, (update, program) in enumerate(zip(parts.exchange.updates, parts.programs, strict=True)):
        assert all(servers[name] == update.server for name in (*update.reads, *update.writes))
        taken = [array for take in update.takes for array in _taken(take, shipped)]
        travelled += sum(x.nbytes for x in taken)
        lists = [[pieces[name] for name in names] for names in (update.writes, update.reads)]
        out, answered = runner(program.function)(*lists, taken)
        answers.update(((number, k), x) for k, x in enumerate(answered))
        replaced.update(zip(update.writes, out))
    for i, leaf in enumerate(leaves):
        if leaf.output is not None:
            new = [replaced[name] for name in leaf.place.names]
            news[i] = jnp.concatenate(new) if len(new) > 1 else new[0]
    return news, answers, travelled


def _leaf_of(place):
    """The number of a leaf, of its place."""
    return int(place.names[0].partition("/")[0])


def _taken(take, shipped):
    if take.stop is None:
        return shipped[take.shipped]
    return [jnp.asarray(x) for x in take.of([np.asarray(x) for x in shipped[take.shipped]])]


def _of_kind(stage, lists):
    """The inputs of a stage, checked: with those that it says that it takes, it can be traced."""
    assert [len(avals) for avals in stage.avals] == list(map(len, lists))
    uses_of(stage)
    return lists


def uses_of(stage):
    """Which inputs of each list a stage uses."""
    traced = jax.make_jaxpr(stage.function)(*stage.avals).jaxpr
    used = {id(x) for eqn in traced.eqns for x in eqn.invars} | {id(x) for x in traced.outvars}
    inputs = iter(traced.invars)
    return tuple(tuple(i for i, _ in enumerate(avals) if id(next(inputs)) in used) for avals in stage.avals)


class _Exported:
    """Runs a stage as it was exported, serialized and read again."""

    def __call__(self, function):
        def run(*lists):
            kinds = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), lists)
            text = export.export(jax.jit(function))(*kinds).serialize()
            return export.deserialize(text).call(*lists)

        return run


def check(outcome: Outcome, rtol=1e-6, exact=False):
    """Compares the parts with the whole program."""
    pairs = [(outcome.news[i], new) for i, new in outcome.whole_news.items()]
    for one, other in [*pairs, *zip(outcome.results, outcome.whole_results, strict=True)]:
        one, other = jnp.asarray(one), jnp.asarray(other)
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        one, other = (np.asarray(x, np.float32) if x.dtype == jnp.bfloat16 else np.asarray(x) for x in (one, other))
        if exact or not np.issubdtype(one.dtype, np.inexact):
            np.testing.assert_array_equal(one, other)
        else:
            np.testing.assert_allclose(one, other, rtol=rtol, atol=rtol * (np.abs(other).max(initial=0) or 1))
    return outcome
