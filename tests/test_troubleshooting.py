"""The page on troubleshooting: its headings are the messages of today, word for word."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "troubleshooting.md"
OTHERS = "JAX, XLA, Keras and TensorFlow"  # the section of messages that are not replicax's


def entries() -> dict[str, str]:
    """Returns the section of each entry: {"There is no device ...": "Devices", ...}."""
    found: dict[str, str] = {}
    section = ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if heading := re.fullmatch(r"## (.*)", line):
            section = heading[1]
        elif line.startswith("###"):
            heading = re.fullmatch(r"### (`+) ?(.+?)\1", line)
            assert heading, f"The heading of an entry is a message, in backticks; got {line}"
            assert heading[2] not in found, f"There are two entries for {heading[2]}"
            found[heading[2]] = section
    return found


def messages(paths: Iterator[Path]) -> set[str]:
    """Returns the texts of the source, with "..." for each field."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in paths]
    constants = dict(pair for tree in trees for pair in _constants(tree))
    return {text for tree in trees for text in _texts(tree, constants)}


def _texts(node: ast.AST, constants: dict[str, str]) -> Iterator[str]:
    """Yields whole strings: no docstrings, and not the parts of a string with fields."""
    if text := _text(node, constants):
        yield text
    elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
        for child in ast.iter_child_nodes(node):
            yield from _texts(child, constants)


def _constants(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yields the names of a module that stand for strings, such as those of environment variables."""
    for node in tree.body:
        if isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
            several = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
            for name, constant in zip(target.elts, value.elts, strict=False) if several else [(target, value)]:
                if (
                    isinstance(name, ast.Name)
                    and isinstance(constant, ast.Constant)
                    and isinstance(constant.value, str)
                ):
                    yield name.id, constant.value


def _text(node: ast.AST, constants: dict[str, str]) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if not isinstance(node, ast.JoinedStr):
        return ""
    parts = []
    for part in node.values:
        field = part.value if isinstance(part, ast.FormattedValue) else part
        name = field.id if isinstance(field, ast.Name) and field.id.isupper() else None
        parts.append(field.value if field is part else constants.get(name, "...") if name else "...")
    return "".join(parts)


def beginning(heading: str) -> str:
    """Returns what a message has to begin with: the heading without the dots at its end."""
    return re.sub(r"[. ]*\.\.\.$", "", heading)


def pattern(heading: str) -> re.Pattern[str]:
    """Returns the expression that a message of the heading matches."""
    return re.compile(".*".join(map(re.escape, beginning(heading).split("..."))), re.DOTALL)


# Programs that provoke the message of a heading; `strategy` has four replicas, and `x` a number for each of them.
PROVOKED = {
    "There is no device ...": "rx.MirroredStrategy(['GPU:99'])",
    "module 'replicax' has no attribute ...": "rx.no_such_name",
    "Virtual devices ... need ... CPU devices, but JAX has started already with ...": (
        "jax.devices(); rx.config.set_virtual_devices({'GPU': 999})"
    ),
    "A replica has ... devices (`devices_per_replica` is ...), which does not divide the ...": (
        "rx.MirroredStrategy(['GPU:0', 'GPU:1', 'GPU:2'], devices_per_replica=2)"
    ),
    "The replicas assign different values to ...": """
        with strategy.scope(): v = rx.Variable(0.0)
        strategy.run(lambda x: v.assign(x), args=(x,))
    """,
    "A float cannot be made of a PerReplica value": "float(x)",
    "A PerReplica value is used in ...": "strategy.run(lambda: x + 1)",
    "A replica function uses a copy of a ... that nnx.jit or another transformation around `strategy.run` made.": """
        from flax import nnx
        with strategy.scope(): model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
        gradient = nnx.grad(lambda model: model(jnp.ones(1)).sum())
        nnx.jit(lambda model: strategy.run(gradient, args=(model,)))(model)
    """,
    "It looks like you are using a PerReplica object while not inside a replica context, which is not supported.": (
        "jnp.sin(x)"
    ),
    "Cannot assign value to variable ' ...': Shape mismatch.": "rx.Variable(jnp.ones(2)).assign(jnp.ones(3))",
    "A variable is assigned a traced value inside of jax.jit or another JAX transformation, ...": (
        "v = rx.Variable(0.0); jax.jit(lambda x: v.assign(x))(1.0)"
    ),
    "The initial value of a variable is a traced value of jax.jit or another JAX transformation, ...": (
        "jax.jit(lambda x: rx.Variable(x).value())(1.0)"
    ),
    "tf.function only supports singleton tf.Variables created on the first call.": (
        "f = rx.function(lambda: rx.Variable(1.0).value()); f()"
    ),
    "numpy() has no value inside of compiled code; use value().": (
        "v = rx.Variable(0.0); rx.function(lambda: v.numpy())()"
    ),
    "A scope object is entered once.": """
        scope = strategy.scope()
        with scope: pass
        with scope: pass
    """,
    "An Optimizer is made by a replica.": """
        import optax
        with strategy.scope(): v = rx.Variable(0.0)
        strategy.run(lambda: rx.Optimizer(optax.sgd(0.1), v))
    """,
    "A non-persistent GradientTape can only be used to compute one set of gradients (or jacobians)": """
        v = rx.Variable(1.0)
        with rx.GradientTape() as tape: y = v * v
        tape.gradient(y, v); tape.gradient(y, v)
    """,
    "Binding inputs to tf.function failed due to ...": (
        "rx.function(lambda x: x, input_signature=[rx.TensorSpec([2])])(jnp.ones(3))"
    ),
    "The `global_batch_size` ... is not divisible by `num_replicas_in_sync` ...": (
        "rx.InputContext(num_replicas_in_sync=4).get_per_replica_batch_size(7)"
    ),
    "Expected a dataset, which yields batches; got ..., which is data.": (
        "strategy.experimental_distribute_dataset(np.ones((4, 2)))"
    ),
    "Expected a dataset, of which each iteration starts anew; got the iterator ..., which runs once.": (
        "strategy.experimental_distribute_dataset(iter([np.ones(4)]))"
    ),
    "The dataset is distributed already: ...": (
        "d = strategy.experimental_distribute_dataset([np.ones(4)]); strategy.experimental_distribute_dataset(d)"
    ),
    "An element of the dataset has a scalar in it, which cannot be split among ... replicas; ...": (
        "next(iter(strategy.experimental_distribute_dataset(rx.data.Dataset.range(3))))"
    ),
    "Cannot batch tensors with different shapes...": (
        "list(rx.data.Dataset.range(3).map(lambda n: np.ones(int(n))).batch(3))"
    ),
    "The replicas meet in different calls.": """
        def fn():
            c = rx.get_replica_context()
            if int(c.replica_id_in_sync_group): return c.all_reduce("SUM", jnp.ones(2))
            return c.all_gather(jnp.ones(2), axis=0)
        strategy.run(fn)
    """,
    "The replicas' values differ in shape...": (
        "strategy.run(lambda x: rx.get_replica_context().all_reduce('SUM', jnp.ones(int(x) + 1)), args=(x,))"
    ),
    "... takes this replica's own value, got a ... value.": (
        "v = rx.function(lambda x: strategy.run(lambda: rx.get_replica_context().all_reduce('SUM', x)))(x)"
    ),
    "There is no checkpoint at ...": "rx.train.Checkpoint(v=rx.Variable(0.0)).restore('nowhere/ckpt')",
    "Received incompatible tensor with shape ... when attempting to restore variable with shape ...": """
        path = rx.train.Checkpoint(v=rx.Variable(jnp.ones(2))).save(folder + "/ckpt")
        rx.train.Checkpoint(v=rx.Variable(jnp.ones(3))).restore(path)
    """,
    "... is of dtype ...; expected dtype ... does not equal original dtype ...": """
        path = rx.train.Checkpoint(v=rx.Variable(1)).save(folder + "/ckpt")
        rx.train.Checkpoint(v=rx.Variable(1.0)).restore(path)
    """,
    "Unresolved object in checkpoint ...": """
        path = rx.train.Checkpoint(v=rx.Variable(1)).save(folder + "/ckpt")
        rx.train.Checkpoint(w=rx.Variable(1)).restore(path).assert_consumed()
    """,
    "A topology is a kind of GPU and their number, ...": "rx.plan(lambda: 1, topology='x9:2')",
    "Attempted boolean conversion of traced array with shape ...": "rx.function(lambda x: 1 if x else 2)(jnp.ones(()))",
    "The numpy.ndarray conversion method __array__() was called on traced array with shape ...": (
        "rx.function(np.asarray)(jnp.ones(2))"
    ),
    "Found an unbound axis name: ...": "strategy.run(lambda: jax.lax.axis_index('replica'))",
    "Encountered an unexpected tracer.": """
        kept = []
        rx.function(lambda x: kept.append(x))(jnp.ones(2))
        kept[0] + 1
    """,
}


@pytest.mark.parametrize("heading", PROVOKED)
def test_the_error_begins_like_its_heading(heading, tmp_path):
    assert heading in entries()
    strategy = rx.MirroredStrategy([f"GPU:{i}" for i in range(4)])
    x = strategy.experimental_distribute_values_from_function(lambda c: np.float32(c.replica_id_in_sync_group))
    names = {"rx": rx, "jax": jax, "jnp": jnp, "np": np, "strategy": strategy, "x": x, "folder": str(tmp_path)}
    with pytest.raises(Exception) as caught:
        exec(textwrap.dedent(PROVOKED[heading]), names)
    assert pattern(heading).match(str(caught.value)), caught.value


def test_each_heading_is_the_beginning_of_a_message_in_the_source():
    texts = messages((ROOT / "src" / "replicax").rglob("*.py"))
    ours = [heading for heading, section in entries().items() if section != OTHERS]
    assert len(ours) > 60
    unknown = [heading for heading in ours if not any(text.startswith(beginning(heading)) for text in texts)]
    assert not unknown, f"No message of the source begins like this, with ... for each field: {unknown}"


def test_a_heading_has_words_to_search_for():
    for heading in entries():
        words = re.findall(r"[A-Za-z]{2,}", heading)
        assert len(words) >= 2, f"The heading {heading} says too little to be found"
