"""Plans of steps that users compile themselves: `jax.jit`, `nnx.jit` and `eqx.filter_jit`."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import replicax as rx
from replicax._base import jax_internals
from replicax._base.planning import PlanError
from replicax._plan.chips import parse
from replicax._plan.exports import arrange, layout
from replicax._plan.jit_steps import JitStep
from replicax._plan.lowering import Step
from replicax._plan.source_lines import SourceLines

WIDTH, ROWS = 64, 32
MATRIX = WIDTH * WIDTH * 4


def update(w, x):
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
    return w - 0.1 * gradient, loss


def mesh_of(kind, sizes, names=("data", "model")):
    if kind == "abstract":
        return AbstractMesh(sizes, names)
    return Mesh(np.array(jax.devices("cpu")[: np.prod(sizes)]).reshape(sizes), names)


def arguments(mesh, of_weights=(None, "model"), of_rows=("data",)):
    def spec(shape, axes):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*axes)))

    return spec((WIDTH, WIDTH), of_weights), spec((ROWS, WIDTH), of_rows)


@pytest.mark.parametrize("kind", ["abstract", "devices"])
def test_a_step_is_planned_for_the_mesh_of_its_arrays(kind):
    step = jax.jit(update, donate_argnums=0)
    (plan,) = rx.plan(step, arguments(mesh_of(kind, (2, 2))), topology=4)
    assert plan.arguments == {"w": MATRIX // 2, "x": ROWS * WIDTH * 4 // 2} and plan.replicas == 4
    assert plan.memory.arguments == sum(plan.arguments.values()) and plan.memory.outputs < MATRIX // 2  # it is donated
    assert plan.layout == "data 1x2, model 1x2" and not plan.advice
    (gradient,) = [each for each in plan.collectives if each.bytes >= MATRIX // 2]
    assert (gradient.kind, gradient.devices) == ("all-reduce", 2) and gradient.bytes <= MATRIX // 2 + 4  # with the loss
    # The same figures as those of the step that runs here.
    compiled = step.lower(*arguments(mesh_of("devices", (2, 2)))).compile()
    assert plan.memory.arguments == compiled.memory_analysis().argument_size_in_bytes


def test_shardings_of_the_function_count_where_arrays_have_none():
    mesh = AbstractMesh((4,), ("data",))
    rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    step = jax.jit(update, in_shardings=(whole, rows), out_shardings=(whole, whole))
    w, x = np.zeros((WIDTH, WIDTH), np.float32), np.zeros((ROWS, WIDTH), np.float32)
    (plan,) = rx.plan(step, (w, x), topology=4)
    assert plan.arguments == {"w": MATRIX, "x": ROWS * WIDTH}
    (advice,) = plan.advice
    assert "new values of w. Donate them to save up to 16.00 KiB" in advice and advice in str(plan)


def test_a_step_without_shardings_is_planned_for_one_device():
    w, x = np.zeros((WIDTH, WIDTH), np.float32), np.zeros((ROWS, WIDTH), np.float32)
    plan = rx.plan(jax.jit(update, donate_argnames="w"), (w, x), topology=8)[8]
    assert (plan.replicas, plan.layout, plan.collectives) == (1, "1 of 8 devices", ())
    assert plan.memory.arguments == MATRIX + ROWS * WIDTH * 4


def nnx_step():
    model = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    @nnx.jit
    def train_step(model, optimizer, x):
        loss, gradients = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        optimizer.update(model, gradients)
        return loss

    return train_step, (model, optimizer), {"model": MATRIX + WIDTH * 4, "optimizer": 2 * (MATRIX + WIDTH * 4) + 8}


def equinox_step():
    model = eqx.nn.Linear(WIDTH, WIDTH, key=jax.random.key(0))

    @eqx.filter_jit
    def train_step(model, x):
        loss, gradients = eqx.filter_value_and_grad(lambda model: jnp.mean(jax.vmap(model)(x) ** 2))(model)
        return eqx.apply_updates(model, gradients), loss

    return train_step, (model,), {"model": MATRIX + WIDTH * 4}


@pytest.mark.parametrize("make", [nnx_step, equinox_step])
def test_steps_of_nnx_and_equinox_are_planned_like_those_of_jax(make):
    step, state, sizes = make()
    x = np.ones((ROWS, WIDTH), np.float32)
    before = jax.tree.map(np.array, eqx.filter(jax.tree.leaves(state), eqx.is_array))
    plan = rx.plan(step, (*state, x), topology=1)[1]
    assert plan.arguments == {**sizes, "x": ROWS * WIDTH * 4}
    assert plan.memory.variables == sum(sizes.values()) and plan.memory.outputs >= plan.memory.variables
    after = eqx.filter(jax.tree.leaves(state), eqx.is_array)
    assert all(map(np.array_equal, before, after)) and np.isfinite(step(*state, x)[-1] if make is equinox_step else 0)


def test_keys_and_static_arguments_are_arguments_like_others():
    @jax.jit
    def draw(key, scale):
        return jax.random.split(key)[0], scale * jax.random.normal(key, (4,))

    plan = rx.plan(draw, (jax.random.key(0), 2.0), topology=1)[1]
    assert plan.arguments == {"key": 8}
    power = jax.jit(lambda x, n: x**n, static_argnums=1)
    assert rx.plan(power, (jnp.ones(4), 3), topology=1)[1].arguments == {"x": 16}


def test_arrays_have_the_types_that_jax_gives_them():
    x, rate = np.ones((ROWS, WIDTH)), jnp.asarray(0.1)  # float64 without x64, and a weak type
    update_slowly = jax.jit(lambda w, x, rate: w - rate * jax.grad(lambda w: jnp.mean(x.astype(w.dtype) @ w))(w))
    step = JitStep(update_slowly, (jnp.ones((WIDTH, WIDTH), jnp.bfloat16), x, rate))
    assert step.gives_back  # in bfloat16, which a strong float32 would widen
    assert step.lowered(parse(1)).inputs.arguments == {"w": WIDTH * WIDTH * 2, "x": ROWS * WIDTH * 4, "rate": 4}


def test_a_step_with_64_bits_is_compiled_with_them():
    with jax.enable_x64(True):
        plan = rx.plan(jax.jit(update), (np.ones((WIDTH, WIDTH)), np.ones((ROWS, WIDTH))), topology=1)[1]
    assert plan.arguments == {"w": 2 * MATRIX, "x": 2 * ROWS * WIDTH * 4}


def test_rows_are_those_of_the_batch_and_not_of_a_key():
    @jax.jit
    def step(w, key, x):
        return update(w, x)[0], jax.random.uniform(key)

    traced = JitStep(step, (jnp.ones((WIDTH, WIDTH)), jax.random.PRNGKey(0), jnp.ones((ROWS, WIDTH))))
    assert traced.rows == ROWS and traced.with_rows(2 * ROWS).rows == 2 * ROWS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"time_limit": 0}, "positive number of seconds"),
        ({"time_limit": float("nan")}, "positive number of seconds"),
        ({"time_limit": "x"}, "positive number of seconds"),
        ({"axes": "data"}, "a list of the names of the mesh's axes"),
        ({"axes": [1]}, "a list of the names of the mesh's axes"),
        ({"batch": ()}, "The step needs arguments: .* as `batch`"),
    ],
)
def test_wrong_arguments_are_named(options, message):
    batch = options.pop("batch", (jnp.ones((WIDTH, WIDTH)), jnp.ones((ROWS, WIDTH))))
    with pytest.raises(PlanError, match=message):
        rx.plan(jax.jit(update), batch, topology=1, **options)


def test_the_axes_lie_on_hosts_in_their_order_or_as_told():
    step = JitStep(jax.jit(update), arguments(mesh_of("abstract", (2, 8))))
    topology = parse("h100:2x8")
    lowered = step.lowered(topology)
    assert layout(lowered, topology) == "data 2x1, model 1x8"
    turned = arrange(lowered, ["model", "data"])
    assert layout(turned, topology) == "data 1x2, model 2x4"
    assert turned.order[:4] == [0, 2, 4, 6] and turned.order[8] == 1  # place (0, 1) of the mesh is device 2
    assert arrange(lowered, ["data", "model"]).order == list(range(16)) and arrange(lowered, None) is lowered
    with pytest.raises(PlanError, match="The mesh has data, model; got data"):
        arrange(lowered, ["data"])


def test_a_mesh_that_does_not_fit_the_topology_is_refused():
    with pytest.raises(
        PlanError, match=r"h100:8, which has 8 devices: the mesh of its arrays has 4 \(data=2, model=2\)"
    ):
        JitStep(jax.jit(update), arguments(mesh_of("abstract", (2, 2)))).lowered(parse("h100:8"))
    w, _ = arguments(mesh_of("devices", (2, 2)))
    _, x = arguments(mesh_of("devices", (4, 1)))
    with pytest.raises(PlanError, match="its arrays are on 2 meshes"):
        JitStep(jax.jit(lambda w, x: (w, x)), (w, x)).lowered(parse(4))


def test_steps_that_call_python_are_refused():
    @jax.jit
    def step(x):
        jax.debug.print("{}", x)
        return x

    traced = JitStep(step, (jnp.ones(2),))  # a helper that is not planned may call Python
    with pytest.raises(PlanError, match="step cannot be planned: it calls Python while it runs, by debug_print in"):
        traced.lowered(parse(1))


@pytest.mark.parametrize(
    ("function", "args", "expected"),
    [
        (lambda w, x: update(w, x), (jnp.ones((4, 4)), jnp.ones((2, 4))), True),
        (lambda x: x * 2, (jnp.ones(3),), True),
        (lambda w, x: (x @ w).sum(), (jnp.ones((4, 4)), jnp.ones((2, 4))), False),
        (lambda key: (jax.random.normal(key, (2,)), jax.random.split(key)[0]), (jax.random.key(0),), False),
    ],
)
def test_a_step_gives_one_of_its_arguments_back(function, args, expected):
    assert JitStep(jax.jit(function), args).gives_back is expected


PROGRAM = """\
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

mesh = Mesh(np.array(jax.devices()).reshape(-1, 2), ("data", "model"))
columns = NamedSharding(mesh, P(None, "model"))
create = jax.jit(lambda key: jax.random.normal(key, (WIDTH, WIDTH)), out_shardings=columns)
weights = create(jax.random.key(0))

@jax.jit
def train_step(weights, rows):
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(rows @ w) ** 2))(weights)
    return weights - 0.1 * gradient, loss

rows = jax.device_put(np.ones((8 * len(jax.devices()), WIDTH), np.float32), NamedSharding(mesh, P("data")))
print("devices", len(jax.devices()))
weights, loss = train_step(weights, rows)
print("it has run")
"""


@pytest.mark.parametrize("width", [64, 2**14])  # the initial values of the larger are not computed: a GiB
def test_the_command_plans_a_program_of_plain_jax(run_python, tmp_path, width):
    file = tmp_path / "train.py"
    file.write_text(PROGRAM.replace("WIDTH", str(width)))
    given = ["plan", "--topology", "4", "--topology", "2", str(file)]
    code = f"import sys; from replicax._commands import main; sys.exit(main({given!r}))"
    done = run_python(code, timeout=180, env={"REPLICAX_VIRTUAL_DEVICES": None})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "devices 4" in done.stdout and "devices 2" in done.stdout and "it has run" not in done.stdout
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["plan", "of", "train_step", "cpu:4", "cpu:2"] in rows
    half = f"{width * width * 2 / 2**20:.2f}" if width > 64 else "8.00"
    unit = "MiB" if width > 64 else "KiB"
    assert ["argument", "weights", half, unit, half, unit] in rows


CATCHES = """\
import threading
import jax, jax.numpy as jnp

@jax.jit
def show(x):
    jax.debug.print("shown")
    return x.sum()

@jax.jit
def train_step(weights, rows):
    return weights - jax.grad(lambda w: jnp.mean(rows @ w))(weights), rows.sum()

def train():
    weights = jnp.ones((4, 4))
    show(weights)
    for _ in range(3):
        try:
            weights, _ = train_step(weights, jnp.ones((2, 4)))
        except BaseException:
            print("caught")
            raise

worker = threading.Thread(target=train)
worker.start()
worker.join()
try:
    train()
except BaseException:
    pass
"""


def test_a_program_is_planned_once_even_if_it_catches_its_end(run_python, tmp_path):
    file = tmp_path / "train.py"
    file.write_text(CATCHES)
    given = ["plan", "--topology", "1", str(file)]
    code = f"import sys; from replicax._commands import main; sys.exit(main({given!r}))"
    done = run_python(code, timeout=180, env={"REPLICAX_VIRTUAL_DEVICES": None})
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stdout + done.stderr
    assert done.stdout.count("plan of train_step") == 1 and "name that with --step NAME" in done.stdout
    assert "shown" in done.stdout  # the helper has run


def test_lines_of_libraries_are_left_out():
    def text(file):
        return f'add(%a), metadata={{op_name="jit(f)/add" source_file="{file}" source_line=7}}'

    lines = SourceLines("")
    assert lines.line_of(text("/home/me/train.py")) == "train.py:7"
    assert lines.line_of(text("/usr/lib/python3.11/site-packages/optax/losses.py")) == ""
    assert lines.line_of(text(rx.__file__)) == "" and lines.line_of("add(%a)") == ""


def test_calls_of_libraries_are_exported_and_what_jax_cannot_lower_is_named():
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    eigenvalues = JitStep(jax.jit(jnp.linalg.eigvals), (x,)).lowered(parse("h100:1"))
    assert eigenvalues.program  # although JAX promises nothing for cuSolver's calls of other versions
    from jax.experimental import pallas  # kernels for TPUs are lowered for TPUs alone

    def double(source, target):
        target[...] = 2 * source[...]

    kernel = jax.jit(lambda x: pallas.pallas_call(double, out_shape=x)(x))
    with pytest.raises(PlanError, match="cannot be planned for cpu:1: JAX does not lower it. "):
        JitStep(kernel, (x,)).lowered(parse(1))


def attend(q):
    return jax.nn.dot_product_attention(q, q, q, is_causal=True, implementation="cudnn")


def test_attention_of_cudnn_is_lowered_without_cudnn():
    q = jax.ShapeDtypeStruct((8, 128, 4, 64), jnp.bfloat16)
    with jax_internals.assume_cudnn():
        assert JitStep(jax.jit(attend), (q,)).lowered(parse("h100:1")).program
        strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])
        step = rx.function(lambda q: strategy.run(attend, args=(q,)))
        with strategy.scope():
            spec = rx.PerReplicaSpec(*[rx.TensorSpec(q.shape, q.dtype)] * 2)
            traced = Step(step, (spec,))
        assert traced.lowered(parse("h100:8")).program  # each replica attends to its own part
        mesh = AbstractMesh((8,), ("data",), (AxisType.Auto,))
        split = jax.ShapeDtypeStruct(q.shape, q.dtype, sharding=NamedSharding(mesh, P("data")))
        with pytest.raises(PlanError, match="a Python function partitions among devices .* in `jax.shard_map`"):
            JitStep(jax.jit(attend), (split,)).lowered(parse("h100:8"))
        by_part = jax.jit(lambda q: jax.shard_map(attend, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(q))
        assert JitStep(by_part, (split,)).lowered(parse("h100:8")).axes == {"data": 8}
        lone = AbstractMesh((1,), ("data",), (AxisType.Auto,))
        alone = jax.jit(lambda q: jax.shard_map(attend, mesh=lone, in_specs=P("data"), out_specs=P("data"))(q))
        assert JitStep(alone, (q,)).lowered(parse("h100:1")).axes == {"device": 1}
