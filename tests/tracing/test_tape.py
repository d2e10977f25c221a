"""`GradientTape` against `jax.grad`, and against arithmetic by hand."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import replicax as rx
from replicax import GradientTape, UnconnectedGradients
from replicax._base.jax_internals import current_trace
from replicax._tracing import active_tapes

X = jnp.array([1.0, 2.0, 3.0])
W = jnp.array([0.5, -1.0, 2.0])
EYE = jnp.eye(3) + 0.1


class FakeVariable:
    """What tapes need to know of a variable."""

    _replicax_variable = True

    def __init__(self, value, trainable=True):
        self.stored, self._treedef = jax.tree.flatten(value)
        self.trainable = trainable

    def read_value(self):
        return jax.tree.unflatten(self._treedef, active_tapes.on_read(self, self.stored))

    def assign(self, value):
        self.stored = jax.tree.leaves(value)


def taped(f):
    """As `jax.grad(f)`, with a tape."""

    def gradient(x):
        with GradientTape() as tape:
            tape.watch(x)
            y = f(x)
        return tape.gradient(y, x)

    return gradient


@jax.custom_jvp
def cubed(x):
    return x**3


@cubed.defjvp
def _cubed_jvp(primals, tangents):
    return cubed(primals[0]), 30.0 * primals[0] ** 2 * tangents[0]  # ten times too much, so that it shows


@jax.custom_vjp
def doubled(x, y):
    return 2.0 * x, y


doubled.defvjp(lambda x, y: (doubled(x, y), x), lambda x, cts: (7.0 * x * cts[0], cts[1]))

FUNCTIONS = {
    "product": lambda x: (x * x).sum(),
    "one array twice": lambda x: jnp.dot(x, x) * x[0],
    "relu": lambda x: (jax.nn.relu(x - 1.5) * x).sum(),
    "gelu": lambda x: jax.nn.gelu(x).sum(),
    "softmax": lambda x: jax.nn.softmax(x)[0],
    "logsumexp": jax.scipy.special.logsumexp,
    "norm": jnp.linalg.norm,
    "inverse": lambda x: jnp.linalg.inv(EYE * x).sum(),
    "sort": lambda x: (jnp.sort(-x) * W).sum(),
    "indices": lambda x: x[1] * x[jnp.array([0, 2, 2])].sum() + x.at[1].set(0.0).sum(),
    "where": lambda x: jnp.where(x > 1, x**2, 0.0).sum(),
    "integers on the way": lambda x: (x * jnp.argmax(x) * jnp.round(x).astype(int)).sum(),
    "scan": lambda x: jax.lax.scan(lambda c, i: (c * x + i, c), x, jnp.arange(3.0))[0].sum(),
    "scan, outputs": lambda x: jax.lax.scan(lambda c, i: (c * x + i, c), x, jnp.arange(3.0))[1].sum(),
    "fori_loop": lambda x: jax.lax.fori_loop(0, 3, lambda i, c: c * x, x).sum(),
    "cond": lambda x: jax.lax.cond(x[0] > 0, lambda y: y * y * x, lambda y: y, x).sum(),
    "jit": lambda x: jax.jit(lambda y: (jnp.sin(y) * y, y))(x)[0].sum(),
    "jit over x": lambda x: jax.jit(lambda y: y * x)(W).sum(),
    "jit in jit over x": lambda x: jax.jit(lambda y: jax.jit(lambda z: z * x)(y))(W).sum(),
    "jit of scan": lambda x: jax.jit(lambda y: jax.lax.scan(lambda c, _: (c * y, c), y, None, 3))(x)[0].sum(),
    "outputs that are inputs": lambda x: sum(y.sum() for y in jax.jit(lambda y: (y, jnp.sin(y), y, 2 * y))(x)),
    "checkpoint": lambda x: jax.checkpoint(lambda y: jnp.sin(y * x))(x).sum(),
    "vmap": lambda x: jax.vmap(lambda y: y * x)(x).sum(),
    "grad": lambda x: jax.grad(lambda y: (y**3 * x).sum())(x).sum(),
    "stop_gradient": lambda x: (jax.lax.stop_gradient(x) * x + x).sum(),
    "custom_jvp": lambda x: cubed(x).sum(),
    "custom_vjp": lambda x: doubled(x, x)[0].sum() + doubled(x, W)[1].sum(),
    "custom_vjp in jit": lambda x: jax.jit(doubled)(x, x)[0].sum(),
    "bfloat16": lambda x: (x.astype(jnp.bfloat16) * 2).sum().astype(jnp.float32),
    "complex": lambda x: jnp.abs(jnp.fft.fft(x.astype(jnp.complex64)))[1],
    "dropout": lambda x: jnp.where(jax.random.bernoulli(jax.random.key(0), 0.5, x.shape), x * x, 0.0).sum(),
    "noise": lambda x: (x * jax.random.normal(jax.random.key(1), x.shape)).sum(),
    "constant": lambda x: (W * W).sum() + x[0],
}


@pytest.fixture(params=["eager", "jit"])
def run(request):
    """`run(f, *args)`: `f(*args)`, as it is and compiled."""
    return (lambda f, *args: f(*args)) if request.param == "eager" else (lambda f, *args: jax.jit(f)(*args))


def product(grad, f):
    return lambda x: (grad(f)(x) * W).sum()


# As one program each, which compiles sooner than the operations one by one.


@functools.cache
def gradient_of_jax(name):
    return jax.jit(jax.grad(FUNCTIONS[name]))(X)


@functools.cache
def second_derivative_of_jax(name):
    return jax.jit(jax.grad(product(jax.grad, FUNCTIONS[name])))(X)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradient_is_that_of_jax(name, run):
    np.testing.assert_allclose(run(taped(FUNCTIONS[name]), X), gradient_of_jax(name), rtol=1e-5, atol=1e-6)


def test_closing_over_an_array_where_it_cannot_be_followed():
    def f(x):
        with GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = jax.lax.scan(lambda c, _: (jax.jit(lambda c: c * x)(c), None), W, None, length=2)[0]
            z = x * 2.0
        return y, tape.gradient(z, x), tape

    y, gradient, tape = f(X)
    np.testing.assert_allclose(y, W * X * X)
    assert gradient.tolist() == [2.0, 2.0, 2.0]
    with pytest.raises(NotImplementedError, match="as an argument"):
        tape.gradient(y, X)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_second_derivative_is_that_of_jax(name, run):
    actual = run(taped(product(taped, FUNCTIONS[name])), X)
    expected = second_derivative_of_jax(name)
    np.testing.assert_allclose(np.zeros(3) if actual is None else actual, expected, rtol=1e-4, atol=1e-5)


def test_gradients_equal_those_by_hand(run):
    def f(x, y):
        with GradientTape() as tape:
            tape.watch([x, y])
            z = x * x * y
        return z, tape.gradient(z, {"x": x, "y": [y]})

    z, gradients = run(f, jnp.float32(3.0), jnp.float32(5.0))
    assert z == 45 and gradients == {"x": 30, "y": [9]}


def test_values_stay_plain_arrays():
    with GradientTape() as tape:
        tape.watch(X)
        y = X * 2.0
        assert not isinstance(y, jax.core.Tracer) and float(y[0]) == 2.0
        z = y.sum() if y[1] > 0 else -y.sum()
    assert tape.gradient(z, X).tolist() == [2.0, 2.0, 2.0]


def test_intermediate_source_and_source_as_target():
    with GradientTape(persistent=True) as tape:
        tape.watch(X)
        y = X * X
        z = y * 3.0
    dx, dy = tape.gradient(z, [X, y])
    assert dx.tolist() == [6.0, 12.0, 18.0] and dy.tolist() == [3.0, 3.0, 3.0]
    assert tape.gradient(X, X).tolist() == [1.0, 1.0, 1.0]
    assert tape.gradient([z, X, X], X).tolist() == [8.0, 14.0, 20.0]


def test_output_gradients():
    def gradient(target, weights):
        return tape.gradient(target, X, output_gradients=weights)

    with GradientTape(persistent=True) as tape:
        tape.watch(X)
        y, z = X * X, X * 3.0
    assert gradient(y, W).tolist() == [1.0, -4.0, 12.0]
    assert gradient({"y": y, "z": z}, {"y": W, "z": None}).tolist() == [4.0, -1.0, 15.0]
    assert gradient(y, jnp.array([1, 0, 1])).tolist() == [2.0, 0.0, 6.0]
    with pytest.raises(ValueError, match="structure"):
        gradient([y, z], [W])
    with pytest.raises(ValueError, match="shape"):
        gradient(y, jnp.ones(2))


def test_unconnected():
    with GradientTape(persistent=True) as tape:
        tape.watch([X, W])
        y = X * X
        stopped = jax.lax.stop_gradient(X) * 2.0
    other = jnp.ones((2, 2))
    assert tape.gradient(y, [W, other]) == [None, None]
    assert tape.gradient(other, X) is None
    assert tape.gradient(stopped, X) is None
    for zero in ("zero", UnconnectedGradients.ZERO):
        dw, dother = tape.gradient(y, [W, other], unconnected_gradients=zero)
        assert dw.tolist() == [0.0, 0.0, 0.0] and dother.tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert tape.gradient(y, (X, None))[1] is None
    with pytest.raises(ValueError, match="nothing"):
        tape.gradient(y, X, unconnected_gradients="nothing")


def test_integers():
    n = jnp.arange(3)
    with GradientTape(persistent=True) as tape:
        with pytest.warns(UserWarning, match="watched tensor must be floating"):
            tape.watch(n)
        tape.watch(X)
        y = X * n
        m = jnp.argmax(X)
    assert tape.gradient(y, [X, n])[0].tolist() == [0.0, 1.0, 2.0]
    assert tape.gradient(y, n) is None
    with pytest.warns(UserWarning, match="target tensor must be floating"):
        assert tape.gradient(m, X) is None
    with pytest.warns(UserWarning, match="target tensor must be floating"):
        assert tape.jacobian(m, X, unconnected_gradients="zero").tolist() == [0.0, 0.0, 0.0]


def test_complex_follows_jax():
    z = jnp.array([1 + 2j])

    def f(z):
        return (jnp.abs(z) ** 2).sum()

    np.testing.assert_allclose(taped(f)(z), jax.grad(f)(z), rtol=1e-6)


def test_a_while_loop_runs_under_a_tape():
    with GradientTape() as tape:
        tape.watch(X)
        y = jax.lax.while_loop(lambda c: c.sum() < 50, lambda c: c * X, X)
        z = y.sum() + X[0]
    assert y.tolist() == [1.0, 16.0, 81.0]
    with pytest.raises(ValueError, match="while_loop"):
        tape.gradient(z, X)


def test_operation_without_gradient_fails_only_where_it_is_differentiated():
    seen = []
    with GradientTape(persistent=True) as tape:
        tape.watch(X)
        y = X * X
        jax.experimental.io_callback(lambda v: seen.append(v.tolist()), None, y)
        z = jax.pure_callback(lambda v: np.asarray(v), jax.ShapeDtypeStruct((3,), jnp.float32), y)
    jax.effects_barrier()
    assert seen == [[1.0, 4.0, 9.0]] and z.tolist() == [1.0, 4.0, 9.0]
    assert tape.gradient(y, X).tolist() == [2.0, 4.0, 6.0]
    with pytest.raises(ValueError, match="JVP"):
        tape.gradient(z, X)


# The tape's life.


def test_a_tape_is_used_once():
    with GradientTape() as tape:
        tape.watch(X)
        y = X * X
    tape.gradient(y, X)
    message = "A non-persistent GradientTape can only be used to compute one set of gradients"
    for method in (tape.gradient, tape.jacobian, tape.batch_jacobian):
        with pytest.raises(RuntimeError, match=message):
            method(y, X)
    with pytest.raises(RuntimeError, match=message):
        GradientTape().gradient(y, X)


def test_a_wrong_call_does_not_use_up_the_tape():
    with GradientTape() as tape:
        tape.watch(X)
        y = X * X
    with pytest.raises(TypeError, match="'name' of type str"):
        tape.gradient(y, ["name"])
    assert tape.gradient(y, X) is not None


def test_a_persistent_tape_gives_several_gradients(run):
    def f(x):
        with GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = x * x
            z = y * y
        return tape.gradient(z, x), tape.gradient(y, x), tape.gradient(z, y)

    dz_dx, dy_dx, dz_dy = run(f, jnp.float32(3.0))
    assert (dz_dx, dy_dx, dz_dy) == (108, 6, 18)


def test_gradient_in_its_own_context():
    x = jnp.float32(3.0)
    with GradientTape(persistent=True) as tape:
        tape.watch(x)
        square = x**2
        first = tape.gradient(square * x, x)
        with tape.stop_recording():
            unrecorded = tape.gradient(square, x)
        second = tape.gradient(first, x)
        third = tape.gradient(second, x)
    assert (first, unrecorded, second, third) == (27, 6, 18, 6)
    assert tape.gradient(unrecorded, x) is None
    with GradientTape() as tape:
        tape.watch(x)
        y = x**3
        first = tape.gradient(y, x)
        assert not tape._recorder.on
    assert first == 27
    with pytest.raises(RuntimeError):
        tape.gradient(first, x)


def test_stop_recording():
    with GradientTape(persistent=True) as tape:
        tape.watch(X)
        with tape.stop_recording():
            y = X * X
            with pytest.raises(ValueError, match="Attempted to stop recording on a tape which is not recording."):
                tape.stop_recording().__enter__()
        z = y * X
    assert tape.gradient(y, X) is None
    assert tape.gradient(z, X).tolist() == y.tolist()
    with pytest.raises(ValueError, match="not recording"):
        tape.stop_recording().__enter__()


def test_stop_recording_of_the_outer_of_two_tapes():
    with GradientTape() as outer, GradientTape() as inner:
        outer.watch(X)
        inner.watch(X)
        with outer.stop_recording():
            y = X * X
        z = y * X
    assert outer.gradient(z, X).tolist() == [1.0, 4.0, 9.0]
    assert inner.gradient(z, X).tolist() == [3.0, 12.0, 27.0]


def test_reset():
    with GradientTape() as tape:
        tape.watch(X)
        y = X * X
        tape.reset()
        z = X * 3.0
        tape.watch(X)
        u = X * 5.0
    assert tape.gradient([y, z, u], X).tolist() == [5.0, 5.0, 5.0]
    with pytest.raises(ValueError, match="not recording"):
        tape.reset()


def test_a_tape_that_records_cannot_be_entered_again():
    tape = GradientTape()
    with tape:
        tape.watch(X)
        y = X * X
        with pytest.raises(ValueError, match="Tape is already recording."):
            tape.__enter__()
    with tape:
        z = y * 2.0
    assert tape.gradient(z, X).tolist() == [4.0, 8.0, 12.0]
    with tape:
        z = y * 2.0
    assert tape.gradient(z, X) is None


def test_tapes_left_in_another_order():
    before = current_trace()
    first, second = GradientTape().__enter__(), GradientTape().__enter__()
    first.watch(X)
    second.watch(X)
    y = X * X
    first.__exit__(None, None, None)
    z = y * X
    second.__exit__(None, None, None)
    assert current_trace() is before
    assert first.gradient([y, z], X).tolist() == [2.0, 4.0, 6.0]
    assert second.gradient(z, X).tolist() == [3.0, 12.0, 27.0]


def test_an_exception_leaves_the_tape():
    before = current_trace()
    with pytest.raises(ZeroDivisionError), GradientTape():
        raise ZeroDivisionError
    assert current_trace() is before and not active_tapes.entered()


def test_memory_is_released():
    with GradientTape() as tape:
        tape.watch(X)
        y = X * X
        unneeded = weakref.ref(y)
        y = (y * y).sum()
    assert unneeded() is not None
    tape.gradient(y, X)
    gc.collect()
    assert unneeded() is None


@pytest.mark.parametrize("wrong", ["text", 1.0, np.ones(3), object()], ids=lambda value: type(value).__name__)
def test_wrong_types(wrong):
    with GradientTape(persistent=True) as tape:
        tape.watch(X)
        with pytest.raises(TypeError, match=f"of (type|class) .?{type(wrong).__name__}"):
            tape.watch([X, wrong])
    with pytest.raises(TypeError, match=f"of (type|class) .?{type(wrong).__name__}"):
        tape.gradient(wrong, X)
    with pytest.raises(TypeError, match=f"of (type|class) .?{type(wrong).__name__}"):
        tape.gradient(X, [wrong])
    with pytest.raises(TypeError, match="None"):
        tape.gradient(None, X)


def test_distributed_values_are_refused():
    from replicax._base import nest

    class PerReplica(nest.LeafBase):
        pass

    with GradientTape() as tape, pytest.raises(TypeError, match="of type PerReplica"):
        tape.watch(PerReplica())
    with pytest.raises(TypeError, match="of type PerReplica"), tape:
        tape.gradient(X, PerReplica())


def test_watch_outside_of_the_context():
    with pytest.raises(ValueError, match="context"):
        GradientTape().watch(X)


# Functions with gradients of their own.


class Counted(NamedTuple):
    """A function whose parts say how often they ran, and on what."""

    function: object
    calls: list[tuple[str, bool]]


def counted() -> Counted:
    calls: list[tuple[str, bool]] = []

    def note(name, *values):
        calls.append((name, any(isinstance(value, jax.core.Tracer) for value in values)))

    @jax.custom_vjp
    def f(x, y):
        note("f", x, y)
        return x * y

    def fwd(x, y):
        note("fwd", x, y)
        return x * y, (x, y)

    def bwd(residual, ct):
        note("bwd", *residual, ct)
        return ct * residual[1], ct * residual[0]

    f.defvjp(fwd, bwd)
    return Counted(f, calls)


def test_custom_vjp_runs_its_parts_once_on_concrete_values():
    f, calls = counted()
    with GradientTape() as tape:
        tape.watch(X)
        f(W, W)
        assert calls == [("f", False)]
        calls.clear()
        y = f(X, W).sum()
        assert calls == [("fwd", False)]
    assert tape.gradient(y, X).tolist() == W.tolist()
    assert calls == [("fwd", False), ("bwd", False)]


def test_custom_vjp_is_not_run_backwards_where_nothing_depends_on_it():
    f, calls = counted()
    with GradientTape(persistent=True) as tape:
        tape.watch([X, W])
        y = f(W, W).sum()
        z = X.sum() + y
        f(X, X)
    assert tape.gradient(z, X).tolist() == [1.0, 1.0, 1.0]
    assert [name for name, _ in calls] == ["fwd", "fwd"]


def test_custom_vjp_in_two_tapes():
    """The outer tape differentiates the inner one's `fwd` and `bwd`."""
    f, calls = counted()
    with GradientTape() as outer:
        outer.watch(X)
        with GradientTape() as inner:
            inner.watch(X)
            y = f(X, X).sum()
        first = inner.gradient(y, X)
    assert first.tolist() == [2.0, 4.0, 6.0]
    assert outer.gradient(first, X).tolist() == [2.0, 2.0, 2.0]
    assert calls == [("fwd", False), ("bwd", False)]


def test_custom_vjp_under_jit():
    f, calls = counted()
    assert jax.jit(taped(lambda x: f(x, x).sum()))(X).tolist() == [2.0, 4.0, 6.0]
    assert calls == [("fwd", True), ("bwd", True)]


def test_custom_vjp_may_wait_for_other_threads():
    """As eager replicas do, which meet in a collective and then in its gradient."""
    count = 3
    barrier = threading.Barrier(count, timeout=20)
    slots: list[object] = [None] * count

    def meet(i, value):
        assert not isinstance(value, jax.core.Tracer)
        slots[i] = value
        barrier.wait()
        total = sum(slots)
        barrier.wait()
        return total

    results: list[object] = [None] * count

    def replica(i):
        @jax.custom_vjp
        def all_sum(x):
            return meet(i, x)

        all_sum.defvjp(lambda x: (meet(i, x), None), lambda _, ct: (meet(i, ct),))
        x = jnp.float32(i + 1)
        with GradientTape() as tape:
            tape.watch(x)
            y = all_sum(x * x) * x
        results[i] = float(tape.gradient(y, x))

    threads = [threading.Thread(target=replica, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    # y_i = x_i (x_0² + x_1² + x_2²); the sum of all y_i is differentiated.
    assert results == [14.0 + 2 * x * 6.0 for x in (1.0, 2.0, 3.0)]


def test_threads_have_tapes_of_their_own():
    ready, seen = threading.Barrier(2, timeout=20), {}

    def other():
        seen["entered"] = list(active_tapes.entered())
        with GradientTape() as tape:
            tape.watch(W)
            ready.wait()
            y = W * W
            ready.wait()
        seen["gradient"] = tape.gradient(y, W).tolist()

    with GradientTape() as tape:
        tape.watch([X, W])
        thread = threading.Thread(target=other)
        thread.start()
        ready.wait()
        y = X * W
        ready.wait()
        thread.join(20)
    assert seen == {"entered": [], "gradient": [1.0, -2.0, 4.0]}
    assert tape.gradient(y, X).tolist() == W.tolist()
    assert len(tape._recorder.watched) == 0


# Under other transformations.


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices("cpu")[:4]), ("i",))


@pytest.mark.parametrize("compiled, check_vma", [(False, True), (True, False), (True, True)])  # JAX is slow eagerly
def test_inside_of_shard_map(compiled, check_vma):
    n = mesh().size
    x = jnp.arange(2.0 * n) + 1

    def local(x):
        with GradientTape() as tape:
            tape.watch(x)
            y = (x**2).sum() * x[0] / jax.lax.psum(1, "i")
        return tape.gradient(y, x)

    def with_jax(x):
        return jax.grad(lambda x: (x**2).sum() * x[0] / jax.lax.psum(1, "i"))(x)

    def sharded(f):
        f = jax.shard_map(f, mesh=mesh(), in_specs=P("i"), out_specs=P("i"), check_vma=check_vma)
        return jax.jit(f) if compiled else f

    np.testing.assert_allclose(sharded(local)(x), sharded(with_jax)(x), rtol=1e-6)


@pytest.mark.parametrize("compiled", [False, True])
def test_collective_inside_of_shard_map(compiled):
    def f(w, x):
        return (jax.lax.pmean(w * x, "i") ** 2).sum()

    def local(w, x):
        with GradientTape() as tape:
            tape.watch(w)
            y = f(w, x)
        return jax.lax.pmean(tape.gradient(y, w), "i")

    def with_jax(w, x):
        return jax.lax.pmean(jax.grad(f)(w, x), "i")

    def sharded(f):
        f = jax.shard_map(f, mesh=mesh(), in_specs=(P(), P("i")), out_specs=P(), check_vma=False)
        return jax.jit(f) if compiled else f

    x = jnp.arange(2.0 * mesh().size)
    np.testing.assert_allclose(sharded(local)(3.0, x), sharded(with_jax)(3.0, x), rtol=1e-6)


def test_around_shard_map(run):
    x = jnp.arange(2.0 * mesh().size)

    def f(x):
        parts, total = jax.shard_map(
            lambda x: (x * x, jax.lax.psum(x.sum(), "i")),
            mesh=mesh(),
            in_specs=P("i"),
            out_specs=(P("i"), P()),
            check_vma=False,
        )(x)
        return parts.sum() + 3.0 * total

    np.testing.assert_allclose(run(taped(f), x), jax.grad(f)(x), rtol=1e-6)


def test_inside_of_vmap_and_grad():
    xs = jnp.stack([X, W])
    f = FUNCTIONS["product"]
    np.testing.assert_allclose(jax.vmap(taped(f))(xs), 2 * xs)
    np.testing.assert_allclose(jax.grad(lambda x: (taped(f)(x) * W).sum())(X), 2 * W)


def test_inside_of_scan():
    def step(x, _):
        return x - 0.1 * taped(lambda x: (x**2).sum())(x), None

    np.testing.assert_allclose(jax.lax.scan(step, X, None, length=2)[0], X * 0.64, rtol=1e-6)


def test_recorded_eagerly_and_differentiated_under_jit():
    with GradientTape() as tape:
        tape.watch(X)
        y = X * X
    assert jax.jit(lambda weights: tape.gradient(y, X, weights))(W).tolist() == [1.0, -4.0, 12.0]


def test_compiled_program_is_no_larger_than_with_grad():
    def mlp(parameters, x):
        for w, b in parameters:
            x = jax.nn.relu(x @ w + b)
        return (x**2).mean()

    def with_tape(parameters, x):
        with GradientTape() as tape:
            tape.watch(parameters)
            y = mlp(parameters, x)
        return tape.gradient(y, parameters)

    args = [(jnp.eye(8), jnp.zeros(8)) for _ in range(4)], jnp.ones((2, 8))
    flops = [jax.jit(f).lower(*args).compile().cost_analysis()["flops"] for f in (with_tape, jax.grad(mlp))]
    assert flops[0] <= 1.01 * flops[1]


# Jacobians.


@pytest.mark.parametrize("pfor", [True, False])
def test_jacobian(pfor, run):
    def f(x):
        return jnp.outer(x, jnp.sin(x)) * x.sum()

    def jacobian(x, w):
        with GradientTape() as tape:
            tape.watch([x, w])
            y = f(x)
        return tape.jacobian(y, [x, w], experimental_use_pfor=pfor)

    actual, unconnected = run(jacobian, X, W)
    np.testing.assert_allclose(actual, jax.jacrev(f)(X), rtol=1e-5)
    assert actual.shape == (3, 3, 3) and unconnected is None


def test_jacobian_of_a_scalar_and_unconnected():
    with GradientTape(persistent=True) as tape:
        tape.watch(X)
        y = (X * X).sum()
    assert tape.jacobian(y, X).tolist() == [2.0, 4.0, 6.0]
    zeros = tape.jacobian(X * 1.0, EYE, unconnected_gradients="zero")
    assert zeros.shape == (3, 3, 3) and not zeros.any()
    with pytest.raises(TypeError, match="one array, got 2"):
        tape.jacobian([y, y], X)


def test_hessian():
    def f(x):
        return (x**3).sum() * x[0]

    with GradientTape() as outer:
        outer.watch(X)
        with GradientTape() as inner:
            inner.watch(X)
            y = f(X)
        first = inner.gradient(y, X)
    np.testing.assert_allclose(outer.jacobian(first, X), jax.hessian(f)(X), rtol=1e-5)


def test_jacobian_of_a_variable():
    v = FakeVariable({"a": X, "b": jnp.float32(2.0)})
    with GradientTape() as tape:
        value = v.read_value()
        y = value["a"] * value["b"]
    jacobian = tape.jacobian(y, v)
    assert jacobian["a"].tolist() == [[2.0, 0.0, 0.0], [0.0, 2.0, 0.0], [0.0, 0.0, 2.0]]
    assert jacobian["b"].tolist() == X.tolist()


@pytest.mark.parametrize("pfor", [True, False])
def test_batch_jacobian(pfor, run):
    x = jnp.arange(12.0).reshape(2, 3, 2) + 1

    def f(x):  # of one example
        return jnp.sin(x[0]) * (x**2).sum()

    def jacobian(x):
        with GradientTape() as tape:
            tape.watch(x)
            y = jax.vmap(f)(x)
        return tape.batch_jacobian(y, x, experimental_use_pfor=pfor)

    np.testing.assert_allclose(run(jacobian, x), jax.vmap(jax.jacrev(f))(x), rtol=1e-4)


def test_batch_jacobian_of_what_does_not_fit():
    with GradientTape(persistent=True) as tape:
        tape.watch(X)
        y = X * X
    assert tape.batch_jacobian(y, X).tolist() == [2.0, 4.0, 6.0]
    assert tape.batch_jacobian(EYE, X).tolist() == [[0.0] * 3] * 3
    with pytest.raises(ValueError, match="first dimension"):
        tape.batch_jacobian(y, jnp.ones((2, 3)))
    with pytest.raises(TypeError, match="one array, got 2"):
        tape.batch_jacobian(y, [X, X])


# Variables.


def test_variables_are_watched_when_read(run):
    def f(x):
        v = FakeVariable(x)
        with GradientTape() as tape:
            y = v.read_value() * v.read_value() + x
        assert tape.watched_variables() == (v,)
        return tape.gradient(y, v)

    assert run(f, X).tolist() == [2.0, 4.0, 6.0]


def test_every_read_counts():
    v = FakeVariable(X)
    with GradientTape() as tape:
        first = v.read_value()
        v.stored = [jnp.copy(X)]  # a read that gives another array
        second = v.read_value()
        y = first * W + second * 2.0
    assert tape.gradient(y, v).tolist() == (W + 2.0).tolist()


def test_a_tape_watches_trainable_variables_unless_told_otherwise():
    trainable, frozen = FakeVariable(X), FakeVariable(W, trainable=False)

    def use(**options):
        tape = GradientTape(**options)
        with tape:
            before = frozen.read_value()
            tape.watch([frozen])
            y = trainable.read_value() * frozen.read_value()
        watched = tape.watched_variables()
        return before is not None, tape.gradient(y, [trainable, frozen]), watched

    _, (dt, df), watched = use()
    assert dt.tolist() == W.tolist() and df.tolist() == X.tolist() and watched == (frozen, trainable)
    _, (dt, df), watched = use(watch_accessed_variables=False)
    assert dt is None and df.tolist() == X.tolist() and watched == (frozen,)

    with GradientTape() as tape:
        y = frozen.read_value() * 2.0
    assert tape.watched_variables() == ()
    assert tape.gradient(y, frozen) is None


def test_a_variable_is_not_watched_while_the_tape_does_not_record():
    v = FakeVariable(X)
    with GradientTape() as tape:
        with tape.stop_recording():
            v.read_value()
    v.read_value()
    assert tape.watched_variables() == ()


def test_variable_of_a_pytree():
    v = FakeVariable({"b": jnp.float32(2.0), "a": (X, jnp.arange(2), W)})
    with GradientTape(persistent=True) as tape:
        value = v.read_value()
        y = value["a"][0] * value["b"]
    gradient = tape.gradient(y, v)
    assert gradient["a"][0].tolist() == [2.0, 2.0, 2.0] and gradient["a"][1:] == (None, None)
    assert gradient["b"] == 6.0
    gradient = tape.gradient(y, {"v": v}, unconnected_gradients="zero")["v"]
    assert gradient["a"][1].tolist() == [0, 0] and gradient["a"][2].tolist() == [0.0, 0.0, 0.0]


def test_unconnected_variables():
    v, unread = FakeVariable(X), FakeVariable((X, W))
    with GradientTape(persistent=True) as tape:
        v.read_value()
        y = W * 2.0
    assert tape.gradient(y, [v, unread]) == [None, None]
    dv, du = tape.gradient(y, [v, unread], unconnected_gradients="zero")
    assert dv.tolist() == [0.0] * 3 and [part.tolist() for part in du] == [[0.0] * 3] * 2


def test_variable_as_target():
    v = FakeVariable(X)
    with GradientTape() as tape:
        v.read_value()
    assert tape.gradient(v, v).tolist() == [1.0, 1.0, 1.0]


def test_two_variables_of_one_array(run):
    """Each has a gradient of its own, and the array itself, watched or not, a third."""

    def f(x):
        v, w = FakeVariable(x), FakeVariable(x)
        with GradientTape() as outer, GradientTape() as tape:
            tape.watch(x)
            y = v.read_value() * 2.0 + w.read_value() * 3.0 + x * 5.0
        return tape.gradient(y, [v, w, x]), outer.gradient(y, [v, w, x])

    inner, outer = run(f, X)
    assert [g.tolist() for g in inner] == [[2.0] * 3, [3.0] * 3, [5.0] * 3]
    assert [g.tolist() for g in outer[:2]] == [[2.0] * 3, [3.0] * 3] and outer[2] is None


def test_a_value_read_before_is_a_constant(run):
    """As in a proximal term, which has the variable's own earlier value in it."""

    def f(x):
        v = FakeVariable(x)
        before = v.read_value()
        with GradientTape() as tape:
            y = (v.read_value() - before + 1.0) ** 2 * before
        return tape.gradient(y, v)

    assert run(f, X).tolist() == [2.0, 4.0, 6.0]


def test_reads_share_one_copy():
    v = FakeVariable(X)
    with GradientTape(), GradientTape():
        assert v.read_value() is v.read_value()
    assert v.read_value() is X


def test_variable_in_a_jit_inside_of_a_tape_inside_of_a_jit():
    v = FakeVariable(X)

    def inner(x):
        with GradientTape() as tape:
            y = v.read_value() * x
        return tape.gradient(y, v)

    with GradientTape() as tape:
        y = jax.jit(inner)(W) * v.read_value()
    assert tape.gradient(y, v).tolist() == W.tolist()


def test_assignment_ends_the_way_of_the_gradient(run):
    """As in TensorFlow, what a variable is assigned has no gradient through the variable."""

    def f(x):
        v = FakeVariable(x * 1.0)
        with GradientTape() as tape:
            tape.watch(x)
            y = x * x
            v.assign(y)
            z = v.read_value() * 3.0
        return tape.gradient(z, [x, v])

    dx, dv = run(f, X)
    assert dx is None and dv.tolist() == [3.0, 3.0, 3.0]


def test_a_tape_around_run():
    """It sees what compiled replicas compute; where they run eagerly, `gradient` says so."""
    strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"])
    with strategy.scope():
        v = rx.Variable(3.0)
    x = strategy.experimental_distribute_values_from_function(lambda c: jnp.float32(c.replica_id_in_sync_group + 1))

    def gradients(x, replica=lambda x: v.value() * x):
        with rx.GradientTape() as tape:
            y = strategy.reduce("SUM", strategy.run(replica, args=(x,)), axis=None) + v.value()
        return tape.gradient(y, v)

    assert float(rx.function(gradients)(x)) == 1 + 2 + 1
    assert float(gradients(x, rx.function(lambda x: v.value() * x))) == 1 + 2 + 1
    with pytest.raises(RuntimeError, match="from what eager replicas computed"):
        gradients(x)
    assert float(gradients(x, lambda x: x)) == 1  # which depends on `v` beside the replicas alone


def test_second_derivative_of_a_variable():
    v = FakeVariable(jnp.float32(3.0))
    with GradientTape() as outer:
        with GradientTape() as inner:
            y = v.read_value() ** 3
        first = inner.gradient(y, v)
    assert first == 27 and outer.gradient(first, v) == 18


def test_variable_read_in_control_flow(run):
    def f(x):
        v = FakeVariable(x)
        with GradientTape() as tape:
            y, _ = jax.lax.scan(lambda c, _: (c * v.read_value(), None), W, None, length=2)
            z = jax.lax.cond(True, lambda: v.read_value() * 2.0, lambda: W)
            u = jax.jit(lambda: v.read_value() * 3.0)()
        return tape.gradient([y, z, u], v)

    np.testing.assert_allclose(run(f, X), W * 2 * X + 5.0)
