"""What `_base/jax_internals` takes from JAX's inside does what its docstrings say, on every JAX that is tested."""

from __future__ import annotations

import inspect
import re
import threading

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from jax.core import ShapedArray
from jax.experimental import checkify, io_callback

import replicax as rx
from replicax._base import jax_internals

DEVICES = jax.devices()


def test_every_function_is_tested_here():
    public = {
        name
        for name, value in vars(jax_internals).items()
        if str(getattr(value, "__module__", None)).startswith(jax_internals.__name__) and not name.startswith("_")
    }
    tested = {name for name in public if name in inspect.getsource(inspect.getmodule(inspect.currentframe()))}
    assert tested == public, f"no test here names {public - tested}"
    assert all(inspect.getdoc(getattr(jax_internals, name)) for name in public)


def test_hide_lines_of_a_folder_names_the_line_that_calls_it(tmp_path):
    namespace = {}
    library = str(tmp_path / "library.py")
    exec(compile("def double(x):\n    return x * 2\n", library, "exec"), namespace)

    def step(x):
        return namespace["double"](x)

    assert library in jax.jit(step).lower(1.0).as_text(debug_info=True)  # what the function is for
    jax_internals.hide_lines_of(str(tmp_path))
    text = jax.jit(lambda x: step(x)).lower(1.0).as_text(debug_info=True)
    assert library not in text and f'"{__file__}":{step.__code__.co_firstlineno + 1}:' in text


def test_uncommitted_arrays_are_moved_freely():
    a = jax.device_put(jnp.arange(3.0), DEVICES[0])
    b = jax.device_put(jnp.arange(3.0), DEVICES[1])
    with pytest.raises(ValueError):  # what the function is for
        a + b
    x, y = jax_internals.uncommitted(a), jax_internals.uncommitted(b)
    assert (x + y).tolist() == [0.0, 2.0, 4.0] and (y + x).tolist() == [0.0, 2.0, 4.0]
    assert x.devices() == {DEVICES[0]} and y.devices() == {DEVICES[1]}


def test_uncommitted_keeps_the_buffer_and_the_type():
    for value in (
        jnp.arange(3),
        jnp.ones((2, 0), jnp.bfloat16),
        jnp.zeros((), bool),
        jax.random.normal(jax.random.key(0), (2, 2)),
    ):
        array = jax.device_put(value, DEVICES[2])
        loose = jax_internals.uncommitted(array)
        assert loose.shape == array.shape and loose.dtype == array.dtype and loose.tolist() == array.tolist()
        if array.size:
            assert loose.unsafe_buffer_pointer() == array.unsafe_buffer_pointer()
    array = jax.device_put(jnp.arange(1000.0), DEVICES[1])
    loose = jax_internals.uncommitted(array)
    del array
    assert float(loose.sum()) == 499500.0


def test_the_current_trace_is_eager_outside_of_transformations():
    assert jax_internals.is_eager(jax_internals.current_trace())
    seen = []

    def look(x):
        seen.append(jax_internals.is_eager(jax_internals.current_trace()))
        return x * 2

    jax.jit(look)(1.0)
    jax.make_jaxpr(look)(1.0)
    jax.eval_shape(look, 1.0)
    jax.grad(look)(1.0)
    jax.vmap(look)(jnp.ones(2))
    jax.lax.fori_loop(0, 2, lambda i, x: look(x), 1.0)
    assert seen and not any(seen)
    assert jax_internals.is_eager(jax_internals.current_trace())


def test_tracing_state_is_per_thread():
    seen = []

    def f(x):
        thread = threading.Thread(target=lambda: seen.append(jax_internals.is_eager(jax_internals.current_trace())))
        thread.start()
        thread.join()
        return x

    jax.jit(f)(1.0)
    assert seen == [True]


def test_trace_of_returns_the_trace_of_a_tracer():
    seen = []

    def f(x):
        seen.append(jax_internals.trace_of(x) is jax_internals.current_trace())
        y = x * 2

        def inner(z):
            seen.append(jax_internals.trace_of(z) is jax_internals.current_trace())
            seen.append(jax_internals.trace_of(y) is jax_internals.current_trace())
            return z * y

        return jax.jit(inner)(y)

    jax.make_jaxpr(f)(1.0)
    assert seen == [True, True, False]


def test_the_type_of_concrete_arrays():
    kind = jax_internals.array_type()
    assert isinstance(jnp.ones(2), kind) and type(jnp.ones(2)) is kind and issubclass(kind, jax.Array)
    seen = []
    jax.jit(lambda x: seen.append(isinstance(x, kind)))(1.0)
    assert seen == [False]


def test_at_once_runs_primitives_although_something_is_traced():
    seen = []

    def f(x):
        with jax_internals.untraced():
            made = jax.random.normal(jax.random.key(0), (3,)) * jnp.arange(3)
            seen.append((isinstance(made, jax.core.Tracer), jax_internals.is_eager(jax_internals.current_trace())))
        assert not jax_internals.is_eager(jax_internals.current_trace())
        return x + made

    expected = jax.random.normal(jax.random.key(0), (3,)) * jnp.arange(3)
    assert jax.jit(f)(1.0).tolist() == pytest.approx((expected + 1).tolist())
    assert seen == [(False, True)]


def test_inputs_are_placeholders_until_they_are_supplied():
    primitive = jax_internals.InputPrimitive("test_input")
    aval = ShapedArray((2,), jnp.float32)

    def f(x):
        return x + primitive.bind(slot=7, aval=aval) * primitive.bind(slot=8, aval=aval)

    jaxpr = jax.make_jaxpr(f)(jnp.ones(2))
    assert [e.params["slot"] for e in jaxpr.jaxpr.eqns if e.primitive.name == "test_input"] == [7, 8]

    def replay(x, a, b):
        with primitive.supplied({7: a, 8: b}):
            return jex.jaxpr_as_fun(jaxpr)(x)[0]

    a, b = jnp.array([1.0, 2.0]), jnp.array([3.0, 4.0])
    assert replay(jnp.ones(2), a, b).tolist() == [4.0, 9.0]
    assert jax.jit(replay)(jnp.ones(2), a, b).tolist() == [4.0, 9.0]
    gradient = jax.grad(lambda a: replay(jnp.ones(2), a, b).sum())(a)
    assert gradient.tolist() == [3.0, 4.0]  # what is supplied is differentiated


def test_supplied_inputs_nest_and_end_with_their_context():
    primitive = jax_internals.InputPrimitive("test_nested")
    aval = ShapedArray((), jnp.float32)
    with primitive.supplied({1: "outer", 2: "two"}):
        with primitive.supplied({1: "inner"}):
            assert primitive.bind(slot=1, aval=aval) == "inner" and primitive.bind(slot=2, aval=aval) == "two"
        assert primitive.bind(slot=1, aval=aval) == "outer"
        seen = []
        thread = threading.Thread(
            target=lambda: seen.append(jax.make_jaxpr(lambda: primitive.bind(slot=1, aval=aval))())
        )
        thread.start()
        thread.join()
        assert len(seen[0].jaxpr.eqns) == 1  # a supply belongs to its thread
    with pytest.raises(KeyError), primitive.supplied({1: "x"}):
        raise KeyError
    assert len(jax.make_jaxpr(lambda: primitive.bind(slot=1, aval=aval))().jaxpr.eqns) == 1


def test_first_copy_returns_one_array_on_one_device():
    """One array on one device, of a replicated one; another array itself."""
    mesh = rx.MirroredStrategy(["GPU:1", "GPU:2"]).extended._mesh
    replicated = mesh.mirror([jnp.arange(3.0), jnp.arange(3.0)])
    array = jax_internals.first_copy(replicated)
    assert array.devices() == {mesh.devices[0]} and array.tolist() == [0.0, 1.0, 2.0]
    assert jax_internals.first_copy(array) is array


def test_is_staging_is_true_only_under_jit():
    """True under jax.jit, False under jax.grad and at the top."""
    seen = []

    def f(x):
        seen.append(jax_internals.is_staging(jax_internals.current_trace()))
        return x

    f(1.0), jax.grad(f)(1.0), jax.jit(f)(1.0)
    assert seen == [False, False, True]


def test_the_coordination_service_keeps_keys_and_values(run_python):
    done = run_python(
        """
        import socket
        import jax
        from replicax._base import jax_internals

        with socket.socket() as found:
            found.bind(("localhost", 0))
            port = found.getsockname()[1]
        jax.distributed.initialize(f"localhost:{port}", 1, 0)
        client = jax_internals.coordination_client()
        assert jax_internals.value_of_key(client, "missing", 50) is None
        client.key_value_set("there", "text")
        print(jax_internals.value_of_key(client, "there", 50))
        jax.distributed.shutdown()
        """
    )
    assert done.returncode == 0 and done.stdout.strip().endswith("text"), done.stderr


_LEAVES = """
import sys, jax
from replicax._base import jax_internals
assert not jax_internals.backend_started()
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize("127.0.0.1:" + sys.argv[1], 2, int(sys.argv[2]), shutdown_timeout_seconds=600)
assert not jax_internals.backend_started()
assert len(jax.devices()) == 2 * jax.local_device_count()
assert jax_internals.backend_started() and jax.distributed.is_initialized()
jax_internals.leave_distributed()
assert not jax.distributed.is_initialized()
jax_internals.leave_distributed()
print("left", flush=True)
"""


def test_backend_started_and_leave_distributed(run_python):
    """Processes leave JAX's coordination service without a word and end at once, where JAX would wait for all."""
    done = run_python(f"""
        import socket, subprocess, sys
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        both = [subprocess.Popen([sys.executable, "-c", {_LEAVES!r}, port, str(i)]) for i in (0, 1)]
        print([process.wait(40) for process in both])
    """)
    # Where process 0 ends first, JAX's client aborts the other one: that is why jobs put a relay in between.
    assert done.stdout.count("left") == 2 and ("[0, 0]" in done.stdout or "[0, -6]" in done.stdout), done.stderr


def test_gloo_at_gives_gloo_an_address(run_python):
    done = run_python(
        """
        import socket
        import jax
        from jaxlib import _jax
        from replicax._base import jax_internals

        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", 1, 0)
        make, hosts = _jax.make_gloo_tcp_collectives, []

        def spy(hostname=None, **more):
            hosts.append(hostname)
            return make(hostname=hostname, **more)

        _jax.make_gloo_tcp_collectives = spy
        with jax_internals.gloo_at("127.0.0.5"):
            jax.devices()
        print(hosts)
        jax.distributed.shutdown()
        """
    )
    assert done.returncode == 0 and done.stdout.strip().endswith("['127.0.0.5']"), done.stdout + done.stderr


def test_first_copies_equal_first_copy():
    mesh = jax.sharding.Mesh(DEVICES[:2], "x")
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    for many in (jnp.arange(3.0), jnp.ones((), jnp.bfloat16), jax.random.key(0)):
        single = jax_internals.FirstCopies()
        for _ in range(3):
            own = single(jax.device_put(many, everywhere))
            assert own.devices() == {DEVICES[0]} and own.dtype == many.dtype and own.shape == many.shape
            assert own.tolist() == many.tolist() if many.dtype != jax.random.key(0).dtype else True
            assert not own.committed
        alone = jax.device_put(many, DEVICES[1])
        assert jax_internals.FirstCopies()(alone).devices() == {DEVICES[1]}


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.bool_, np.int64, np.complex128])
@pytest.mark.parametrize("shape", [(2,), (2, 3), (2, 0, 4)])
def test_arrays_from_the_host_are_as_jax_makes_them(shape, dtype):
    mesh = jax.sharding.Mesh(np.array(DEVICES[:4]).reshape(2, 2), ("x", "y"))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    make = jax_internals.FromHost(sharding, committed=True)
    onto = jax_internals.from_host_to(DEVICES[1])
    traces = []
    count = jax.jit(lambda x: (traces.append(x.aval), x)[1])
    for wide in (False, True):
        for turn in range(3):
            host = (np.arange(np.prod(shape)).reshape(shape) + turn).astype(dtype)
            with jax.enable_x64(wide):
                expected = jax.make_array_from_callback(shape, sharding, lambda index, host=host: host[index])
            made = make(shape, dtype, lambda index, host=host: host[index], wide)
            assert made.aval == expected.aval and made.sharding == expected.sharding and made.committed
            for shard, like in zip(made.addressable_shards, expected.addressable_shards, strict=True):
                assert shard.device == like.device and shard.data.dtype == expected.dtype
            np.testing.assert_array_equal(made, host.astype(expected.dtype))
            single = onto(shape, dtype, lambda _, host=host: host, wide)
            assert single.devices() == {DEVICES[1]} and not single.committed and single.dtype == expected.dtype
            np.testing.assert_array_equal(single, host.astype(expected.dtype))
            assert (single + jax.device_put(single, DEVICES[2])).devices() == {DEVICES[2]}
            count(expected), count(made)
    assert len(traces) == len(set(map(str, traces)))  # a program for the one is that for the other


def test_arrays_from_the_host_follow_what_jax_is_set_to():
    """One of JAX has 64 bits where that is allowed; afterwards those of numpy are cut, as JAX cuts them."""
    onto, before = jax_internals.from_host_to(DEVICES[1]), jax.config.jax_explicit_x64_dtypes
    host = np.full((3, 7), 5)
    try:
        jax.config.update("jax_explicit_x64_dtypes", "allow")
        own = jnp.asarray(host, dtype=jnp.int64)
        assert onto(host.shape, host.dtype, lambda _: own).dtype == np.int64
        jax.config.update("jax_explicit_x64_dtypes", "warn")
        for _ in range(2):
            made = onto(host.shape, host.dtype, lambda _: host)
            assert made.dtype == np.int32 and np.asarray(made).tolist() == host.tolist()
    finally:
        jax.config.update("jax_explicit_x64_dtypes", before.name.lower())


def test_parts_of_a_jaxpr_and_shard_map_again():
    """`named_axis_effect` is what the jaxpr of replicas has where it uses their axis."""
    mesh = jax.sharding.Mesh(DEVICES[:2], "x")
    split, same = jax.sharding.PartitionSpec("x"), jax.sharding.PartitionSpec()

    def replica(block):
        return jax.lax.psum(block[0] * 2.0, "x"), block + 1.0

    mapped = jax.shard_map(
        replica, mesh=mesh, in_specs=split, out_specs=(same, split), axis_names={"x"}, check_vma=False
    )
    jaxpr = jax.make_jaxpr(mapped)(jnp.ones((2, 3)))
    (eqn,) = jaxpr.eqns
    inside = eqn.params["jaxpr"]
    assert {type(effect) for effect in inside.effects} <= {jax_internals.named_axis_effect()}
    assert jax_internals.named_axis_effect() in {type(effect) for effect in inside.effects}
    doubled = [e for e in inside.eqns if e.primitive.name == "mul"]
    part = jax_internals.part_of_jaxpr(inside, doubled, [doubled[0].invars[0]], doubled[0].outvars)
    assert jex.jaxpr_as_fun(part)(jnp.arange(3.0))[0].tolist() == [0.0, 2.0, 4.0]

    def more(block):
        return [*jex.jaxpr_as_fun(jex.ClosedJaxpr(inside, []))(block), jax.lax.psum(block.sum(), "x")]

    total, rows, number = jax.jit(jax_internals.shard_map_like(eqn, more, [split], [same, split, same]))(
        jnp.arange(6.0).reshape(2, 3)
    )
    assert total.tolist() == [6.0, 10.0, 14.0] and rows.tolist() == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
    assert float(number) == 15.0


def test_jaxprs_are_put_together():
    first = jax.make_jaxpr(lambda x, y: (x * 2, y, 3.0))(1.0, 1.0)
    second = jax.make_jaxpr(lambda x, y, z: (x + y * z, x))(1.0, 1.0, 1.0)
    eqns = []
    results = jax_internals.append_jaxpr(eqns, first.jaxpr, first.jaxpr.invars)
    results = jax_internals.append_jaxpr(eqns, second.jaxpr, results)
    both = jax_internals.part_of_jaxpr(first.jaxpr, eqns, first.jaxpr.invars, results)
    assert [float(x) for x in jex.jaxpr_as_fun(both)(5.0, 7.0)] == [5.0 * 2 + 7.0 * 3, 5.0 * 2]


def test_untraced_code_inside_of_shard_map_may_call_shard_map():
    mesh = jax.sharding.Mesh(DEVICES[:2], "x")
    split = jax.sharding.PartitionSpec("x")
    mapped = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "x"), mesh=mesh, in_specs=split, out_specs=split))

    def replica(block):
        with jax_internals.untraced():
            total = mapped(jnp.arange(2.0)).tolist()
        assert not jax_internals.is_eager(jax_internals.current_trace())
        return block * total[0]

    program = jax.shard_map(replica, mesh=mesh, in_specs=split, out_specs=split)
    assert jax.jit(program)(jnp.ones(2)).tolist() == [1.0, 1.0]


def test_an_equation_is_computed_again_with_another_program_in_it():
    """`rebind`, on a loop whose body is replaced, a custom rule and a plain operation."""

    def looped(x):
        return jax.lax.fori_loop(0, 3, lambda _, y: y * 2.0, jax.nn.relu(x) + 1.0)

    other = jax.make_jaxpr(lambda i, y: (i + 1, y * 3.0))(0, 1.0)
    value = -1.0
    for eqn in jax.make_jaxpr(looped)(value).jaxpr.eqns:
        params = dict(eqn.params, **({"jaxpr": other} if eqn.primitive.name == "scan" else {}))
        operands = [atom.val if isinstance(atom, jex.Literal) else value for atom in eqn.invars]
        value = jax_internals.rebind(eqn, params, operands)[-1]
    assert float(value) == 27.0


def test_with_callbacks_replaces_the_functions_of_callbacks():
    """The functions that JAX's callbacks call, those of inner programs too, are others; debug_print is one as well."""

    def f(x):
        jax.debug.print("{x}", x=x)
        jax.debug.callback(marked, x)
        x = jax.jit(lambda x: jax.pure_callback(lambda x: x + 1, jax.ShapeDtypeStruct((), "float32"), x))(x)
        return jax.lax.cond(
            x > 0, lambda x: io_callback(lambda x: x, jax.ShapeDtypeStruct((), "float32"), x), jnp.sin, x
        )

    def marked(x):
        pass

    marked._replicax_only_shows = True
    calls, found = [], []

    def around(function, types, shows):
        found.append(([kind.shape for kind in types], shows))

        def called(*args):
            calls.append(len(found))
            return [np.float32(5) for _ in types]

        return called

    closed, names = jax_internals.with_callbacks(jax.make_jaxpr(f)(jnp.float32(1)), around)
    assert found == [([], True), ([], True), ([()], False), ([()], False)]
    assert {"callback", "cond", "sin"} <= names and "pure_callback" not in names
    assert [float(x) for x in jax.jit(jex.jaxpr_as_fun(closed))(jnp.float32(1))] == [5.0]
    jax.effects_barrier()
    assert len(calls) == 4
    same = jax.make_jaxpr(jnp.sin)(1.0)
    assert jax_internals.with_callbacks(same, around)[0] is same


def test_checkify_reports_the_first_failed_check():
    def f(x):
        for number in range(3):
            checkify.check(x[number] > 0, "too small")

    both = jax.jit(checkify.checkify(f))
    codes = [
        jax_internals.order_of_check(both(jnp.array(x))[0]) for x in ([0.0, 1.0, 1.0], [1.0, 0.0, 0.0], [1.0, 1.0, 0.0])
    ]
    assert codes == sorted(codes) and len(set(codes)) == 3


def test_wait_for_effects(capfd):
    """An error of a callback comes from whoever reads what that program returned, and from nowhere else."""
    failing = jax.jit(lambda x: (jax.debug.callback(lambda x: 1 / 0, x), x + 1)[1])
    with pytest.raises(jax.errors.JaxRuntimeError):
        failing(1.0).block_until_ready()
        jax.effects_barrier()  # where the program ran after the call had returned
    jax_internals.wait_for_effects()
    jax_internals.wait_for_effects()


def test_callback_of_names_the_function_that_is_called_back_and_whether_it_only_prints():
    def shown(x):
        return None

    def step(x):
        jax.debug.print("x is {}", x)
        jax.debug.callback(shown, x)
        return jax.pure_callback(np.sin, jax.ShapeDtypeStruct((), np.float32), x) + 1

    equations = jax.make_jaxpr(step)(np.float32(2)).jaxpr.eqns
    found = [called for eqn in equations if (called := jax_internals.callback_of(eqn)) is not None]
    assert len(found) == 3
    assert found[0][1] and not found[2][1]
    assert jax_internals.callback_of(equations[-1]) is None


def test_users_line_is_where_an_equation_comes_from():
    (eqn,) = jax.make_jaxpr(lambda x: jnp.sin(x))(1.0).eqns
    assert "test_jax_internals.py" in jax_internals.users_line(eqn)


def test_origin_of_a_tracer_is_its_equation_or_the_constant_that_it_stands_for():
    constant = jnp.arange(3.0)
    seen = []

    def f(x):
        seen.append(jax_internals.origin_of(x))
        both = jax.lax.sort((x + constant, x), num_keys=1)
        equation, place, none = jax_internals.origin_of(both[1])
        assert (equation.primitive.name, place, none) == ("sort", 1, None)
        added, place, _ = jax_internals.origin_of(equation.in_tracers[0])
        assert (added.primitive.name, place) == ("add", 0)
        seen.append(jax_internals.origin_of(added.in_tracers[1]))
        jax.grad(lambda y: seen.append(jax_internals.origin_of(y)) or y.sum())(constant)
        return both

    jax.jit(f)(jnp.ones(3))
    argument, captured, differentiated = seen
    assert argument == differentiated == (None, 0, None)
    assert captured[0] is None and captured[2] is constant


def attend(q):
    return jax.nn.dot_product_attention(q, q, q, implementation="cudnn")


def test_assume_cudnn_lets_attention_be_traced_without_the_library():
    q = jax.ShapeDtypeStruct((2, 128, 4, 64), jnp.bfloat16)
    with jax_internals.assume_cudnn():
        traced = jax.jit(attend).trace(q)
    assert traced.jaxpr.out_avals[0].shape == q.shape
    with pytest.raises(RuntimeError, match="cuDNN"):  # as before
        jax.jit(lambda q: attend(2 * q)).trace(q)


def test_lower_without_devices_lowers_attention_for_a_mesh_that_has_none():
    mesh = jax.sharding.AbstractMesh((2,), ("data",))
    rows = jax.sharding.PartitionSpec("data")
    sharding = jax.sharding.NamedSharding(mesh, rows)
    q = jax.ShapeDtypeStruct((2, 128, 4, 64), jnp.bfloat16, sharding=sharding)
    by_part = jax.jit(jax.shard_map(attend, mesh=mesh, in_specs=rows, out_specs=rows))
    with jax_internals.assume_cudnn():
        traced = by_part.trace(q)
        with jax_internals.lower_without_devices():
            assert "fmha" in traced.lower(lowering_platforms=("cuda",)).as_text()
        other = jax.jit(jax.shard_map(lambda q: attend(2 * q), mesh=mesh, in_specs=rows, out_specs=rows))
        with pytest.raises(ValueError, match="require devices"):  # as before
            other.trace(q).lower(lowering_platforms=("cuda",))


def test_assume_cudnn_is_for_one_thread_and_ends_with_the_last_context():
    q = jax.ShapeDtypeStruct((2, 128, 4, 64), jnp.bfloat16)
    first, second = jax_internals.assume_cudnn(), jax_internals.assume_cudnn()
    with first, second:
        others = []

        def trace():
            try:
                jax.jit(lambda q: attend(3 * q)).trace(q)
            except RuntimeError as error:
                others.append(str(error))

        thread = threading.Thread(target=trace)
        thread.start()
        thread.join()
    assert len(others) == 1 and "cuDNN" in others[0]
    with pytest.raises(RuntimeError, match="cuDNN"):
        jax.jit(lambda q: attend(4 * q)).trace(q)


def test_module_in_the_oldest_stablehlo_has_the_same_operations():
    from jax.interpreters import mlir
    from jaxlib.mlir.dialects import stablehlo

    def operations(artifact):
        context = mlir.make_ir_context()
        with context:
            text = str(stablehlo.deserialize_portable_artifact(context, artifact))
        return re.findall(r"stablehlo\.\w+", text)

    module = jax.export.export(jax.jit(lambda x: jnp.sin(x) @ x.T))(jnp.ones((2, 3))).mlir_module_serialized
    older = jax_internals.in_oldest_stablehlo(module)
    (before,), (after,) = (re.findall(rb"StableHLO_v1\.(\d+)\.\d+", artifact) for artifact in (module, older))
    assert int(after) < int(before)
    assert operations(older) == operations(module) != []


def test_append_jaxpr_continues_equations_with_those_of_another_jaxpr():
    before = jax.make_jaxpr(lambda a: a - 1.0)(0.0)
    after = jax.make_jaxpr(lambda a, b: ((a + b) * 2.0, b))(0.0, 0.0)
    eqns = list(before.eqns)
    (first,) = before.jaxpr.invars
    outputs = jax_internals.append_jaxpr(eqns, after.jaxpr, [first, *before.jaxpr.outvars])
    whole = jax_internals.part_of_jaxpr(before.jaxpr, eqns, [first], outputs)
    assert [float(x) for x in jex.jaxpr_as_fun(whole)(3.0)] == [10.0, 2.0]
