"""A program for any number of rows computes what the function computes of the rows that count."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from replicax._passes import padded_rows
from replicax._passes.row_dims import NotExact, Sizes

RANDOM = np.random.default_rng(0)
MOST = 5


def floats(*shape):
    return RANDOM.normal(size=shape).astype(np.float32)


X, IMAGES = floats(MOST, 3), floats(MOST, 6, 6, 2)
CLASSES, WORDS = (RANDOM.integers(0, 4, shape, np.int32) for shape in [(MOST,), (MOST, 4)])
KERNEL, FILTERS, TABLE = floats(3, 4), floats(3, 3, 2, 4), floats(7, 3)


def traced(function, others, batch, rows):
    return jax.make_jaxpr(function)(*others, *(jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype) for x in batch))


def padded(function, others, batch):
    """The function as one program, to be called with the number of rows."""
    sizes = Sizes.of(MOST)
    one, other, alone = (traced(function, others, batch, rows) for rows in (*sizes, 1))
    structure = jax.tree.structure(jax.eval_shape(function, *others, *batch))
    program = jax.jit(functools.partial(padded_rows.evaluated, one, other=other, alone=alone, sizes=sizes))

    def call(rows):
        # What does not count is NaN where it can be, so that nothing of it goes unseen.
        filled = [np.full_like(x, np.nan if x.dtype.kind == "f" else 3) for x in batch]
        for full, x in zip(filled, batch):
            full[:rows] = x[:rows]
        results = program(*others, *filled, count=jnp.int32(rows))
        return jax.tree.unflatten(structure, results)

    return call


def check(function, others, batch):
    call, alone = padded(function, others, batch), jax.jit(function)
    for rows in (1, 2, MOST):
        found, expected = call(rows), alone(*others, *(x[:rows] for x in batch))
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            own = np.asarray(one)[tuple(map(slice, other.shape))]
            np.testing.assert_allclose(own, other, rtol=2e-5, atol=1e-5, err_msg=f"{rows} rows")


def classifier(kernel, x, classes):
    h = jax.nn.relu(x @ kernel)
    h = (h - jnp.mean(h, 0)) / jnp.sqrt(jnp.var(h, 0) + 1e-2)
    h = h * jax.random.bernoulli(jax.random.key(0), 0.5, h.shape)
    return optax.softmax_cross_entropy_with_integer_labels(h, classes).mean()


def convolutional(filters, images):
    h = jax.lax.conv_general_dilated(images, filters, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    h = jax.lax.reduce_window(jax.nn.gelu(h), -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    h = h.reshape(h.shape[0], -1)
    return jnp.sum(h**2) / h.size, h


def depthwise(filters, images):
    filters = filters.reshape(3, 3, 1, 8)
    h = jax.lax.conv_general_dilated(
        images, filters, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=2
    )
    return jnp.mean(h**2)


def attention(table, words):
    e = table[words]
    scores = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", e, e))

    def step(carry, x):
        return jnp.tanh(carry + x), jnp.sum(carry)

    carry, sums = jax.lax.scan(step, jnp.zeros((words.shape[0], 3)), jnp.swapaxes(e, 0, 1))
    return jnp.mean(carry**2) + jnp.sum(scores**3) / words.size + jnp.sum(sums) / words.shape[0]


def attention_by_matmul(kernel, images):
    h = images.reshape(images.shape[0], 36, 2) @ kernel[:2]
    weights = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", h, h))
    return jnp.mean(jnp.stack([jnp.matmul(weights, h), h], 1) ** 2)


LOSSES = {
    "attention by matmul": (attention_by_matmul, [KERNEL], [IMAGES]),
    "classifier": (classifier, [KERNEL], [X, CLASSES]),
    "convolutional": (lambda *args: convolutional(*args)[0], [FILTERS], [IMAGES]),
    "depthwise": (depthwise, [floats(3, 3, 2, 4)], [IMAGES]),
    "attention": (attention, [TABLE], [WORDS]),
    "remat": (jax.checkpoint(classifier), [KERNEL], [X, CLASSES]),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_gradients_are_those_of_the_rows_that_count(name):
    function, others, batch = LOSSES[name]
    check(jax.value_and_grad(function), others, batch)


FUNCTIONS = {
    "a result for each row": lambda x: (jnp.argmax(x, 1), jnp.sort(x, 1), jnp.cumsum(x, 0)),
    "the largest and least": lambda x: (jnp.max(x, 0), jnp.min(x), jnp.argmax(x[:, 0]), jnp.any(x > 1), jnp.all(x < 9)),
    "constants of the number of rows": lambda x: (x.shape[0] * 2.0 + jnp.sum(x), x.size, jnp.ones(x.shape[0]).sum()),
    "products": lambda x: (x.T @ x, jnp.prod(x), jnp.einsum("ni,nj->nij", x, x), x @ x.T),
    "two axes of rows": lambda x: jnp.sum(jnp.exp(-((x[:, None] - x[None]) ** 2)), axis=(1, 2)),
    "a branch": lambda x: jax.lax.cond(jnp.sum(x) > 0, lambda: jnp.mean(x), lambda: jnp.sum(x)),
    "a loop": lambda x: jax.lax.fori_loop(0, 3, lambda i, y: y / 2 + jnp.mean(y), x),
    "linear algebra": lambda x: jnp.linalg.cholesky(jnp.einsum("ni,nj->nij", x, x) + 9 * jnp.eye(3)),
    "random numbers": lambda x: x + jax.random.normal(jax.random.key(1), x.shape),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_rows(name):
    check(lambda x: jax.tree.map(jnp.asarray, FUNCTIONS[name](x)), [], [X])


def test_of_no_rows_sums_and_means_are_zero():
    call = padded(lambda x: (jnp.sum(x), jnp.mean(x, 0), x.shape[0] + 0.0 * x[..., 0].sum()), [], [X])
    assert [np.asarray(leaf).tolist() for leaf in call(0)] == [0.0, [0.0] * 3, 0.0]


REFUSED = {
    "sort": (lambda x: jnp.sort(x, 0), "'sort'"),
    "median": (lambda x: jnp.median(x, 0), "."),
    "reversed": (lambda x: x[::-1], "'rev'"),
    "first": (lambda x: x[0], "'slice'|'dynamic_slice'"),
    "joined": (lambda x: jnp.concatenate([x, x]), "'concatenate'"),
    "root of the rows": (
        lambda x: jnp.sum(x) * x.shape[0] ** 1.5,
        "a constant is 11.18.* with 5 rows and 2.82.* with 2",
    ),
    "half of the rows": (lambda x: jnp.sum(x) * (x.shape[0] // 2), "a constant"),
    "another way": (lambda x: x if x.shape[0] > 4 else x + 1, "another"),
    "row by row": (lambda x: jax.lax.scan(lambda c, row: (c + row, None), jnp.zeros(3), x)[0], "one by one"),
    "by the last row": (lambda x: x - x[-1], "."),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_not_be_exact_is_refused(name):
    function, message = REFUSED[name]
    with pytest.raises(NotExact, match=message):
        padded(function, [], [X])(MOST)


def test_the_error_knows_the_users_line():
    with pytest.raises(NotExact) as error:
        padded(lambda x: jnp.flip(x, 0), [], [X])(MOST)
    assert "test_padded_rows.py" in error.value.where


def test_what_is_recomputed_for_derivatives_stays_so():
    loss = jax.grad(lambda kernel, x: jnp.mean(jax.checkpoint(lambda y: jnp.sin(jnp.sin(y @ kernel)))(x)))
    traces = [traced(loss, [KERNEL], [X], rows) for rows in (*Sizes.of(MOST), 1)]
    program = functools.partial(
        padded_rows.evaluated, traces[0], other=traces[1], alone=traces[2], sizes=Sizes.of(MOST)
    )
    names = [eqn.primitive.name for eqn in jax.make_jaxpr(program)(KERNEL, X, count=jnp.int32(2)).eqns]
    assert names.count("remat2") == [eqn.primitive.name for eqn in traces[0].eqns].count("remat2") == 1
