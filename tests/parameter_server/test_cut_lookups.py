"""Lookups of rows: what a worker asks for, and that it gets what `jnp` would give."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cut_simulator import check, normal, simulate, unpacked, uses_of, variable
from jax import lax

import replicax as rx

__all__ = ["unpacked"]
ROWS, DIM = 300, 8
IDS = np.array([[1, 5, 5], [-1, 2000, -3000]])
BYTES = 4 * ROWS * DIM


def looked_up(look_up, table=None, ids=IDS):
    table = variable(normal(ROWS, DIM) if table is None else table)

    @rx.function
    def read(ids):
        return look_up(table.value(), ids)

    outcome = check(simulate(read, (jnp.asarray(ids),), exported=True), exact=True)
    return outcome.gathered, outcome.read


# The value that is filled in depends on the dtype.
FILLED = [("fill", dtype) for dtype in (np.float32, jnp.bfloat16, np.int32, np.uint8, np.int8, np.complex64)]
OTHERS = [("clip", np.float32), ("wrap", jnp.bfloat16), ("promise_in_bounds", np.int8)]


@pytest.mark.parametrize(("mode", "dtype"), FILLED + OTHERS)
def test_ids_out_of_range_give_what_they_give_in_jax(mode, dtype):
    table = (100 * normal(ROWS, DIM)).astype(dtype)
    ids = np.clip(IDS, 0, ROWS - 1) if mode == "promise_in_bounds" else IDS
    look_up = functools.partial(jnp.take, axis=0, mode="wrap")
    if mode != "wrap":

        def look_up(table, ids):
            return table.at[ids].get(mode=mode)

    gathered, read = looked_up(look_up, table, ids)
    assert (gathered, read) == (IDS.size * DIM * np.dtype(dtype).itemsize, 0)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint32, np.int32])
def test_ids_of_any_dtype(dtype):
    ids = np.arange(0, 120, 11).astype(dtype)
    assert looked_up(lambda t, i: jnp.take(t, i, axis=0), ids=ids) == (ids.size * DIM * 4, 0)


def test_a_value_to_fill_in():
    looked_up(lambda table, ids: table.at[ids].get(mode="fill", fill_value=7))


def test_rows_of_other_forms():
    assert looked_up(lambda t, i: t[i[0, 0]])[0] == DIM * 4
    assert looked_up(lambda t, i: t[3])[0] == DIM * 4
    assert looked_up(lambda t, i: t[3:20:4])[0] == 5 * DIM * 4
    assert looked_up(lambda t, i: lax.dynamic_slice(t, (i[1, 1], 0), (20, DIM)))[0] == 20 * DIM * 4
    assert looked_up(lambda t, i: jax.vmap(lambda i: t[i])(i))[0] == IDS.size * DIM * 4
    assert looked_up(lambda t, i: t.astype(jnp.bfloat16)[i])[0] == IDS.size * DIM * 4
    assert looked_up(lambda t, i: jnp.copy(t)[i])[0] == IDS.size * DIM * 4
    table = normal(ROWS, 2, 3, 4)
    assert looked_up(lambda t, i: t[i], table)[0] == IDS.size * 24 * 4
    assert looked_up(lambda t, i: t[i], table[:, 0, 0, 0])[0] == IDS.size * 4


def test_the_same_rows_are_asked_for_once():
    assert looked_up(lambda t, i: (t[i] * 2, t[i] + 1)) == (2 * IDS.size * DIM * 4, 0)  # other ids, for all JAX knows

    def twice(table, ids):
        rows = table.at[ids].get(mode="clip")
        return rows, jnp.sin(rows), table.at[ids].get(mode="promise_in_bounds")

    gathered, read = looked_up(twice, ids=np.clip(IDS, 0, ROWS - 1))
    assert (gathered, read) == (2 * IDS.size * DIM * 4, 0)


def test_a_table_that_is_read_whole_anyway_is_read_once():
    assert looked_up(lambda t, i: (t[i], jnp.sum(t))) == (0, BYTES)


def test_more_rows_than_the_table_has_are_no_lookup():
    assert looked_up(lambda t, i: t[i], ids=np.arange(ROWS)) == (0, BYTES)
    assert looked_up(lambda t, i: (t[i], t[i + 1]), ids=np.arange(ROWS // 2)) == (0, BYTES)


def test_ids_that_a_variable_gives_are_no_lookup():
    place = variable(3)
    assert looked_up(lambda t, i: t[i + place.value()]) == (0, BYTES + 4)


def test_parts_of_rows_are_no_lookup():
    assert looked_up(lambda t, i: t[i, 1:3])[1] == BYTES
    assert looked_up(lambda t, i: t[:, 3])[1] == BYTES
    assert looked_up(lambda t, i: t[i, i % DIM])[1] == BYTES


def test_elements_of_a_dataset_give_the_ids():
    table = variable(normal(ROWS, DIM))
    data = rx.data.Dataset.from_tensor_slices(({"ids": np.arange(20), "not used": np.ones(20)}, np.ones(20)))

    @rx.function
    def step(iterator):
        x, y = next(iterator)
        rows = table.value()[x["ids"]]
        return jnp.sum(rows * y[:, None])

    outcome = check(simulate(step, (iter(data.batch(4)),)))
    assert (outcome.gathered, outcome.read) == (4 * DIM * 4, 0)
    assert uses_of(outcome.cut.index) == ((0,), ()) and uses_of(outcome.cut.compute)[0] == (0, 2)
