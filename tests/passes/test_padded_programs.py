"""Programs on which rows that do not count could have a part: each has exact results, or is refused.

Those in `EXACT` are not refused. Functions of the number of rows are taken apart in Python, where a trace sees nothing.
"""

from __future__ import annotations

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from test_padded_rows import traced

from replicax._passes import padded_rows
from replicax._passes.row_dims import NotExact, Sizes

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(8, 6)).astype(np.float32)
K = RANDOM.normal(size=(6, 6)).astype(np.float32)
Q = RANDOM.normal(size=(64, 6)).astype(np.float32)


def results(function, most):
    """For each number of rows, what one program computes and what the function does of the rows alone."""
    sizes, batch = Sizes.of(most), X[:most]
    one, other, alone = (traced(function, [], [X], rows) for rows in (*sizes, 1))
    unforeseen = []
    program = jax.jit(
        functools.partial(
            padded_rows.evaluated,
            one,
            other=other,
            alone=alone,
            sizes=sizes,
            unforeseen=lambda: unforeseen.append(sizes.between),
        )
    )
    jax.eval_shape(program, batch, count=jnp.int32(most))
    for between in unforeseen[:1]:  # is computed as well, and may be refused
        more = traced(function, [], [X], between.other)
        again = functools.partial(padded_rows.evaluated, one, other=more, alone=alone, sizes=between)
        jax.eval_shape(again, batch, count=jnp.int32(most))
    for rows in (1, 2, 5, 8) if most == 8 else range(1, most + 1):
        filled = np.full_like(batch, np.nan)
        filled[:rows] = X[:rows]
        yield rows, program(filled, count=jnp.int32(rows)), jax.tree.leaves(jax.jit(function)(X[:rows]))


def check(name, function, most):
    for rows, found, expected in results(lambda x: jax.tree.map(jnp.asarray, function(x)), most):
        for one, other in zip(found, expected, strict=True):
            assert one.ndim == other.ndim
            own = np.asarray(one)[tuple(map(slice, other.shape))]
            np.testing.assert_allclose(own, other, rtol=2e-5, atol=1e-5, err_msg=f"{name}, {rows} of {most} rows")


EXACT = {
    "queue at add arange": lambda x: jnp.asarray(Q).at[jnp.arange(x.shape[0])].add(x),
    "at[-1]add": lambda x: x.at[-1].add(1.0),
    "ddof": lambda x: jnp.var(x, 0, ddof=1),
    "max(n-1,1)": lambda x: jnp.sum(x) / max(x.shape[0] - 1, 1),
    "n*n": lambda x: jnp.sum(x @ x.T) / x.shape[0] ** 2,
    "mean sim": lambda x: jnp.mean(x @ x.T),
    "offdiag": lambda x: (jnp.sum(x @ x.T) - jnp.trace(x @ x.T)) / (x.shape[0] * (x.shape[0] - 1)),
    "ntxent": lambda x: -jnp.mean(jnp.diag(jax.nn.log_softmax(x @ x.T))),
    "clip loss": lambda x: jnp.mean(jax.nn.logsumexp(x @ x.T, 1) - jnp.diagonal(x @ x.T)),
    "clip take": lambda x: (
        -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(x @ x.T), jnp.arange(x.shape[0])[:, None], 1))
    ),
    "eye": lambda x: jnp.sum((x @ x.T) * jnp.eye(x.shape[0])),
    "top_k row": lambda x: lax.top_k(x, 2),
    "argmax all": lambda x: jnp.argmax(x),
    "argmin0": lambda x: jnp.argmin(x, 0),
    "merge BT": lambda x: jnp.mean((x.reshape(-1, 3) @ K[:3, :3]).reshape(x.shape) ** 2),
    "flat slice": lambda x: jnp.sum(x.reshape(-1)[: x.shape[0] * 2]),
    "attn over batch": lambda x: jnp.sum(jax.nn.softmax(x @ x.T / 2, axis=-1) @ x),
    "dyn slice n": lambda x: lax.dynamic_slice_in_dim(x, 0, x.shape[0]),
    "dropout": lambda x: x * jax.random.bernoulli(jax.random.key(0), 0.5, x.shape),
    "split keys": lambda x: jax.vmap(lambda k, r: r + jax.random.normal(k, r.shape))(
        jax.random.split(jax.random.key(0), x.shape[0]), x
    ),
    "key n": lambda x: jax.random.normal(jax.random.key(x.shape[0]), (3,)) + jnp.sum(x),
    "fold n": lambda x: jax.random.normal(jax.random.fold_in(jax.random.key(0), x.shape[0]), (3,)) + jnp.sum(x),
    "vmap cond": lambda x: jax.vmap(lambda r: lax.cond(r[0] > 0, lambda: r, lambda: -r))(x),
    "while n": lambda x: lax.while_loop(lambda c: c < x.shape[0], lambda c: c + 1, 0) + jnp.sum(x) * 0,
    "fori mean": lambda x: lax.fori_loop(0, jnp.asarray(3), lambda i, y: y / 2 + jnp.mean(y), x),
    "arange rev": lambda x: jnp.sum(x * (x.shape[0] - 1 - jnp.arange(x.shape[0]))[:, None]),
    "last mask": lambda x: jnp.sum(x * (jnp.arange(x.shape[0]) == x.shape[0] - 1)[:, None]),
    "arange%2": lambda x: jnp.sum(x * (jnp.arange(x.shape[0]) % 2)[:, None]),
    "int sum": lambda x: jnp.sum(jnp.ones(x.shape[0], jnp.int32)) + jnp.sum((x > 0).astype(jnp.int8)),
    "bf16 mean": lambda x: jnp.mean(x[:, 0] * 0 + 2, dtype=jnp.bfloat16),
    "max(n,2)": lambda x: jnp.sum(x) * max(x.shape[0], 2),
    "hinge n<2": lambda x: jnp.where(x.shape[0] < 2, 0.0, jnp.sum(x)),
    "corr": lambda x: jnp.corrcoef(x.T),
    "cov": lambda x: jnp.cov(x.T),
    "mean squeeze": lambda x: jnp.squeeze(jnp.mean(x, 0, keepdims=True)),
    "nonzero": lambda x: jnp.sum(jnp.where(x > 0, 1, 0)),
    "seg sum": lambda x: jax.ops.segment_sum(x, (x[:, 0] > 0).astype(int), 2),
    "seg max": lambda x: jax.ops.segment_max(x, (x[:, 0] > 0).astype(int), 2),
    "bincount": lambda x: jnp.bincount((x[:, 0] > 0).astype(int), length=3),
    "det": lambda x: jnp.linalg.det(jnp.einsum("ni,nj->nij", x, x) + jnp.eye(6)),
    "norm": lambda x: jnp.linalg.norm(x),
    "matmul of rows": lambda x: jnp.matmul(x[:, :, None], x[:, None]) @ K,
    "tile of others": lambda x: x * jnp.tile(K[:1], (x.shape[0], 1)) + jnp.tile(x, (1, 2))[:, :6],
    "fft": lambda x: jnp.abs(jnp.fft.fft(x, axis=1)).sum(),
    "repeat": lambda x: jnp.repeat(x, 2, 0).sum(),
    "repeat1": lambda x: jnp.repeat(x, 2, 1).sum(),
    "remat grad": jax.grad(lambda x: jnp.mean(jax.checkpoint(lambda y: jnp.sin(jnp.sin(y @ K)))(x) ** 2)),
    "cummax": lambda x: lax.cummax(x, 0),
    "logcumsumexp": lambda x: lax.cumlogsumexp(x, 0),
    "prod n": lambda x: jnp.prod(jnp.abs(x), 0),
    "any all": lambda x: (jnp.all(x > -9), jnp.any(jnp.isnan(x)), jnp.all(x > 0, 0)),
    "reduce_and int": lambda x: lax.reduce((x * 10).astype(jnp.int32), np.int32(-1), lax.bitwise_and, (0,)),
    "stop n": lambda x: lax.stop_gradient(x).mean() + jnp.nanmean(x),
    "ratio k/n": lambda x: jnp.sum(x) * (32 / x.shape[0]),
    "n+1": lambda x: jnp.sum(x) / (x.shape[0] + 1),
    "n+2": lambda x: jnp.sum(x) / (x.shape[0] + 2),
    "2n-1": lambda x: jnp.sum(x) / (2 * x.shape[0] - 1),
    "index beyond": lambda x: (x[jnp.array([50, 0])], (x[:, 0] * 10).astype(jnp.int32)[jnp.array([-1, 7])]),
    "index beyond grad": jax.grad(lambda x: jnp.sum(x[(jnp.abs(x[:, 0]) * 9).astype(jnp.int32)] ** 2)),
    "pick shard": lambda x: jnp.sum(x.reshape(x.shape[0], 2, 3)[:, 0]),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", EXACT)
def test_what_is_exact_is_not_refused(name):
    check(name, EXACT[name], 8)


UNSURE = {
    "a power": lambda x: jnp.sum(lax.integer_pow(x, x.shape[0])),
    "an integer power": lambda x: jnp.sum(x ** x.shape[0]),
    "lax.pad to P": lambda x: lax.pad(x, np.float32(7), [(0, 8 - x.shape[0], 0), (0, 0, 0)]).sum(),
    "jnp.pad to P": lambda x: jnp.pad(x, [(0, 8 - x.shape[0]), (0, 0)], constant_values=7).sum(),
    "queue dus": lambda x: lax.dynamic_update_slice(jnp.asarray(Q), x, (0, 0)),
    "queue at set slice": lambda x: jnp.asarray(Q).at[: x.shape[0]].set(x),
    "queue at set arange": lambda x: jnp.asarray(Q).at[jnp.arange(x.shape[0])].set(x),
    "queue at max": lambda x: jnp.asarray(Q).at[: x.shape[0]].max(x),
    "scatter clip": lambda x: jnp.zeros(x.shape[0]).at[jnp.array([0, 50])].add(1.0, mode="clip"),
    "gather clip": lambda x: jnp.take(x.sum(1), jnp.array([50]), mode="clip"),
    "if n==1": lambda x: jnp.sum(x) * 2 if x.shape[0] == 1 else jnp.sum(x),
    "n%2": lambda x: jnp.sum(x) * (x.shape[0] % 2),
    "if n%2": lambda x: jnp.sum(x) * 2 if x.shape[0] % 2 else jnp.sum(x),
    "n//2": lambda x: jnp.sum(x) * (x.shape[0] // 2),
    "ceil n/4": lambda x: jnp.sum(x) * (-(-x.shape[0] // 4)),
    "trim": lambda x: jnp.sum(x[: x.shape[0] // 3 * 3]),
    "trim2": lambda x: jnp.sum(x[: x.shape[0] // 2 * 2]),
    "log n": lambda x: jnp.sum(x) * np.log(x.shape[0]),
    "bf16 const": lambda x: jnp.sum(x).astype(jnp.bfloat16) * jnp.bfloat16(x.shape[0] ** 1.05),
    "sqrt n": lambda x: jnp.sum(x) / np.sqrt(x.shape[0]),
    "simclr 2n": lambda x: jnp.sum(jnp.concatenate([x, x]) @ x.T),
    "argsort": lambda x: jnp.argsort(x, 0),
    "top_k b": lambda x: lax.top_k(x[:, 0], 1)[0],
    "cumsum rev": lambda x: lax.cumsum(x, 0, reverse=True),
    "grad cumsum": jax.grad(lambda x: jnp.sum(jnp.cumsum(x, 0) ** 2)),
    "argmax T": lambda x: jnp.argmax(x.T),
    "T flat": lambda x: jnp.sum(x.T.reshape(-1) * jnp.arange(x.size)),
    "dyn idx": lambda x: lax.dynamic_index_in_dim(x, 0, 0),
    "perm": lambda x: x[jax.random.permutation(jax.random.key(0), x.shape[0])],
    "gamma": lambda x: jax.random.gamma(jax.random.key(0), jnp.abs(x)),
    "rbg": lambda x: x * jax.random.bernoulli(jax.random.key(0, impl="rbg"), 0.5, x.shape),
    "T random": lambda x: x.T * jax.random.uniform(jax.random.key(0), x.T.shape),
    "scan batch": lambda x: lax.scan(lambda c, r: (c + r, c), jnp.zeros(6), x)[0],
    "map": lambda x: lax.map(lambda r: r * 2, x),
    "map bs": lambda x: lax.map(lambda r: r * 2, x, batch_size=2),
    "vmap while": lambda x: jax.vmap(lambda r: lax.while_loop(lambda c: jnp.abs(c[0]) > 0.1, lambda c: c / 2, r))(x),
    "fori n": lambda x: lax.fori_loop(0, x.shape[0], lambda i, a: a + 1, 0.0) + jnp.sum(x) * 0,
    "linspace": lambda x: jnp.sum(x * jnp.linspace(0, 1, x.shape[0])[:, None]),
    "np linspace": lambda x: jnp.sum(x * np.linspace(0, 1, x.shape[0], dtype=np.float32)[:, None]),
    "np mask half": lambda x: jnp.sum(x * (np.arange(x.shape[0]) < x.shape[0] / 2)[:, None]),
    "min(n,4)": lambda x: jnp.sum(x) * min(x.shape[0], 4),
    "max(n,4)": lambda x: jnp.sum(x) * max(x.shape[0], 4),
    "min(n,3)": lambda x: jnp.sum(x) * min(x.shape[0], 3),
    "max(n,3)": lambda x: jnp.sum(x) * max(x.shape[0], 3),
    "hinge n<3": lambda x: jnp.where(x.shape[0] < 3, 0.0, jnp.sum(x)),
    "cond n>2": lambda x: lax.cond(x.shape[0] > 2, lambda: jnp.sum(x), lambda: jnp.zeros(())),
    "n%5": lambda x: jnp.sum(x) * (x.shape[0] % 5),
    "min(1,n/3)": lambda x: jnp.sum(x) * min(1.0, x.shape[0] / 3),
    "hinge n<4": lambda x: jnp.where(x.shape[0] < 4, 0.0, jnp.sum(x)),
    "roll": lambda x: jnp.sum(jnp.roll(x, 1, 0) * x),
    "mixup": lambda x: x * 0.5 + x[::-1] * 0.5,
    "x[0]": lambda x: x[0],
    "x-x[:1]": lambda x: x - x[:1],
    "squeeze all": lambda x: jnp.squeeze(x[:, :1]),
    "solve": lambda x: jnp.linalg.solve(jnp.einsum("ni,nj->nij", x, x) + jnp.eye(6), x[..., None]),
    "svd": lambda x: jnp.linalg.svd(x, compute_uv=False),
    "fft0": lambda x: jnp.abs(jnp.fft.fft(x, axis=0)).sum(),
    "conv kernels in groups": lambda x: lax.conv_general_dilated(
        jnp.asarray(K)[None, :4],
        jnp.repeat(x.reshape(-1, 2, 3), 2, 0),
        (1,),
        "VALID",
        feature_group_count=2,
        dimension_numbers=("NCW", "OIW", "NCW"),
    ).sum(0),
    "conv over batch": lambda x: jnp.convolve(x[:, 0], jnp.array([1.0, 2.0]), mode="same"),
    "tile": lambda x: jnp.tile(x, (2, 1)).sum(),
    "assoc scan": lambda x: lax.associative_scan(jnp.add, x),
    "reduce generic": lambda x: lax.reduce(x, np.float32(0), lambda a, b: a + b, (0,)),
    "quantile": lambda x: jnp.quantile(x, 0.5),
    "bitlen": lambda x: jnp.sum(x) * x.shape[0].bit_length(),
    "gcd": lambda x: jnp.sum(x) * np.gcd(x.shape[0], 4),
    "n//3*3": lambda x: jnp.sum(x) * (x.shape[0] // 3 * 3),
    "ceil n/3": lambda x: jnp.sum(x) * (-(-x.shape[0] // 3) * 3),
    "n%3": lambda x: jnp.sum(x) * (x.shape[0] % 3),
    "min(1,2/n)": lambda x: jnp.sum(x) * min(1.0, 2 / x.shape[0]),
    "groups": lambda x: jnp.sum(jnp.mean(x.reshape(-1, 2, 6), 1) ** 2),
    "microbatch": lambda x: lax.scan(lambda c, m: (c + jnp.sum(m) ** 2, None), 0.0, x.reshape(2, -1, 6))[0],
}


@pytest.mark.parametrize("name", UNSURE)
def test_what_cannot_be_exact_is_refused(name):
    with pytest.raises((NotExact, TypeError)):  # TypeError by the function itself, for some numbers of rows
        check(name, UNSURE[name], 8)


NUMBERS = [name for name in {**EXACT, **UNSURE} if "n" in name.split() or any(c in name for c in "*()%</")]


@pytest.mark.sampled(4, others="thorough")
@pytest.mark.parametrize("most", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("name", NUMBERS)
def test_of_few_rows_too_results_are_exact_or_refused(name, most):
    with contextlib.suppress(NotExact, TypeError):
        check(name, {**EXACT, **UNSURE}[name], most)
