"""Variables without values, and programs that are planned with them."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax as rx
from replicax._base.planning import PlanError
from replicax._plan.chips import parse
from replicax._plan.lowering import Step

LARGE = 1 << 20  # rows of 1 MiB each: 1 TiB


def large():
    return {"table": jnp.ones((LARGE, 1 << 18)), "scale": np.float32(2), "count": 3}


@pytest.mark.filterwarnings("ignore:.* were not distributed")
@pytest.mark.parametrize("strategy", ["none", "mirrored", "sharded"])
def test_a_model_that_fits_no_machine_is_lowered(strategy):
    options = {"shard_optimizer_state": True} if strategy == "sharded" else {}
    scope = rx.get_strategy() if strategy == "none" else rx.MirroredStrategy(["CPU:0", "CPU:1"], **options)
    with scope.scope(), rx.experimental.abstract_variables():
        v = rx.Variable(large, name="model")
        counter = rx.Variable(0, trainable=False)
        optimizer = rx.Optimizer(optax.adam(0.1), rx.Variable(lambda: jnp.zeros((LARGE, 1 << 18)), name="w"))
    assert v.shape == {"table": (LARGE, 1 << 18), "scale": (), "count": ()}
    assert v.dtype == {"table": np.float32, "scale": np.float32, "count": np.int32}
    assert jax.tree.map(lambda kind: kind.shape, v.value()) == v.shape
    counter.assign(5)  # which nobody keeps
    assert isinstance(counter.value(), jax.ShapeDtypeStruct)

    @rx.function
    def step(x):
        def replica_step(x):
            model = v.value()
            counter.assign_add(1)
            optimizer.apply_gradients(model["table"] * model["scale"] * x.sum())

        scope.run(replica_step, args=(x,))

    found = Step(step, (np.ones(4, np.float32),)).lowered(parse("v5p:4x4x8"))
    whole = LARGE * (1 << 20)
    assert found.inputs.variables == 2 * whole + 4 + 4
    shards = 128 if strategy == "sharded" else 1
    assert found.inputs.state == 2 * whole // shards + 4 + 4  # Adam's moments and count, and the counter


def test_initial_values_that_need_numbers_are_computed():
    with rx.experimental.abstract_variables():
        v = rx.Variable(lambda: np.asarray(jnp.ones(3)) * float(jnp.ones(())))
    assert v.shape == (3,)
    assert float(rx.Variable(1.0)) == 1.0  # as before, outside


def test_contexts_of_several_threads_may_overlap():
    first, second = rx.experimental.abstract_variables(), rx.experimental.abstract_variables()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert isinstance(rx.Variable(1.0).value(), jax.ShapeDtypeStruct)
    second.__exit__(None, None, None)
    assert float(rx.Variable(1.0)) == 1.0


def test_what_is_assigned_is_ignored_and_nothing_is_saved(tmp_path):
    rx.train.Checkpoint(v=rx.Variable(3.0)).save(tmp_path / "before")
    with rx.experimental.abstract_variables():
        v = rx.Variable(1.0)
        checkpoint = rx.train.Checkpoint(v=v)
        v.assign_add(2.0)
        v.assign(2.0)
        checkpoint.restore(tmp_path / "before-1")
        for save in (checkpoint.save, checkpoint.write):
            with pytest.raises(PlanError, match="no values.*Call it after the step"):
                save(tmp_path / "ckpt")
    assert isinstance(v.value(), jax.ShapeDtypeStruct)
    assert "shape=()" in repr(v)
    with pytest.raises(PlanError, match="no value"):
        np.savez(tmp_path / "ckpt.npz", v=v.numpy())
    assert not list(tmp_path.glob("ckpt*"))


def test_a_keras_model_is_not_saved_over_another(tmp_path):
    keras = pytest.importorskip("keras")
    path = tmp_path / "model.keras"
    with rx.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]).save(path)
        before = path.read_bytes()
        with rx.experimental.abstract_variables():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
            for save, name in ((model.save, "model.keras"), (model.save_weights, "model.weights.h5")):
                with pytest.raises(PlanError, match="no values.*Call it after the step"):
                    save(tmp_path / name)
    assert path.read_bytes() == before and [*tmp_path.iterdir()] == [path]


def test_state_that_each_replica_has_for_itself_is_read_by_shapes():
    with rx.MirroredStrategy(["CPU:0", "CPU:1"]).scope(), rx.experimental.abstract_variables():
        total = rx.Variable(
            jnp.zeros(3),
            synchronization=rx.VariableSynchronization.ON_READ,
            aggregation=rx.VariableAggregation.SUM,
        )
    for found in (total.value(), total.assign(jnp.ones(3))):
        assert isinstance(found, jax.ShapeDtypeStruct) and found.shape == (3,)


@pytest.mark.parametrize("replicas", [1, 8])
def test_a_keras_model_is_divided_by_the_planned_replicas(replicas):
    keras = pytest.importorskip("keras")
    strategy = rx.MirroredStrategy([f"GPU:{i}" for i in range(replicas)], shard_variables=True)
    with strategy.scope(), rx.experimental.abstract_variables():
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(1024, use_bias=False)])
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        optimizer.build(model.trainable_variables)

    @rx.function
    def step():
        strategy.run(lambda: optimizer.apply([model.weights[0].value]))

    found = Step(step, ()).lowered(parse(8)).inputs
    part = 4 * 64 * 1024 // 8
    assert found.variables == part and part <= found.state < part + 100  # momentum, with the optimizer's numbers


def test_the_training_step_of_keras_fit_is_planned(command, tmp_path):
    pytest.importorskip("keras")
    example = Path(__file__).parents[2] / "examples" / "keras_fit.py"
    done = command("--topology", "8", str(example))
    assert done.returncode == 0 and "sequential/dense/kernel" in done.stdout, done.stdout + done.stderr


PROGRAM = """
import sys
import jax.numpy as jnp, numpy as np, optax, replicax as rx

rx.config.set_virtual_devices({"GPU": 3})
strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"])
print("replicas", strategy.num_replicas_in_sync, sys.argv[1:])
with strategy.scope():
    w = rx.Variable(lambda: jnp.zeros((1 << 20, 1 << 20)), name="w")
    optimizer = rx.Optimizer(optax.sgd(0.1), w)
dataset = rx.data.Dataset.from_tensor_slices(np.ones((20, 4), "float32")).batch(10)

@rx.function
def total(x):
    return strategy.reduce("SUM", strategy.run(lambda x: x.sum(), args=(x,)), axis=None)

@rx.function
def train_step(x):
    def replica_step(x):
        optimizer.apply_gradients(w.value() * x.sum())
    strategy.run(replica_step, args=(x,))

for batch in strategy.experimental_distribute_dataset(dataset):
    assert float(total(batch)) == 0  # which is not the step
    train_step(batch)
print("it has run")
"""


@pytest.fixture
def command(run_python, tmp_path):
    """`command(arguments)` runs `replicax plan` with them and PROGRAM."""
    file = tmp_path / "train.py"
    file.write_text(PROGRAM)
    env = {"REPLICAX_VIRTUAL_DEVICES": None, "REPLICAX_PLAN_PYTHON": None, "XDG_CACHE_HOME": str(tmp_path)}

    def run(*arguments):
        given = ["plan", *arguments, str(file), "-x"]
        code = f"import sys; from replicax._commands import main; sys.exit(main({given!r}))"
        return run_python(code, timeout=120, env=env)

    return run


@pytest.mark.thorough
def test_the_command_plans_a_program_for_several_topologies(command, tmp_path):
    done = command("--topology", "4", "--topology", "2", "--picture", str(tmp_path / "plan.svg"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "replicas 4 ['-x']" in done.stdout and "it has run" not in done.stdout
    lines = {" ".join(line.split()[:-2]): line.split() for line in done.stdout.splitlines()}
    assert lines["plan of train_step"][-2:] == ["cpu:4", "cpu:2"]
    assert any(line.split() == ["variables", "4.00", "TiB", "4.00", "TiB"] for line in done.stdout.splitlines())
    # Ten rows for four replicas are three for the first of them.
    assert any(line.split() == ["batch", "48", "B", "48", "B"] for line in done.stdout.splitlines())
    assert "w float32[1048576, 1048576]: 3.00 TiB" in done.stdout
    assert (tmp_path / "plan.svg").read_text().startswith("<svg")


@pytest.mark.thorough
def test_the_command_compares_the_variants_of_a_step(command):
    done = command("--topology", "4", "--compare")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in done.stdout[done.stdout.index("variants on cpu:4") :].splitlines()[2:]]
    assert [line[0] for line in lines] == ["shard_variables", "both", "shard_optimizer_state", "replicated"]
    assert lines[3][-3:] == ["as", "it", "is"]
    done = command("--topology", "4", "--largest-batch")
    assert done.returncode == 1 and "cpu:4 has no largest batch" in done.stderr and "replicas" not in done.stdout


@pytest.mark.thorough
def test_the_command_says_which_steps_there_are(command):
    done = command("--topology", "2", "--step", "nosuch")
    assert done.returncode == 1 and "--step NAME from: total, train_step." in done.stderr, done.stderr
    done = command("--topology", "v5e:2by4")
    assert done.returncode == 2 and "such as 'h100:8'" in done.stderr
    for name, reason in (
        ("nofolder/plan.svg", "There is no folder nofolder"),
        ("plan.doc", "cannot have the ending '.doc'"),
    ):
        done = command("--topology", "2", "--picture", name)
        assert done.returncode == 1 and reason in done.stderr, done.stderr
    done = command("--topology", "2", "nosuch.py")
    assert done.returncode == 1 and "There is no file nosuch.py in" in done.stderr
    done = command("--topology", "2", "-m", "no_such.module")
    assert done.returncode == 1 and "no 'no_such' in" in done.stderr
    done = command("--topology", "v5e:2x4")
    assert done.returncode == 1 and "replicax plan: To plan for TPUs" in done.stderr, done.stderr


def test_a_program_that_needs_values_before_its_step_is_told_that_there_are_none(command, tmp_path):
    file = tmp_path / "eager.py"
    file.write_text("import replicax as rx\nprint(rx.Variable(1.0).value() + 1)\n")
    done = command("--topology", "2", str(file))
    assert done.returncode == 1 and "TypeError" in done.stderr
    assert "variables have only shapes" in done.stderr, done.stderr


@pytest.mark.sampled(2, others="thorough")
@pytest.mark.parametrize("status", [0, 3])
def test_a_program_that_exits_before_its_step_is_not_taken_for_planned(command, tmp_path, status):
    file = tmp_path / "exits.py"
    file.write_text(f"import sys\nsys.exit({status})\n")
    done = command("--topology", "2", str(file))
    assert done.returncode == (status or 1)
    assert ("there is no step to plan" in done.stderr) == (status == 0), done.stderr
