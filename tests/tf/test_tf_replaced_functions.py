"""Functions of Keras, Flax, Optax and JAX that replicax replaces take all calls that the originals take."""

from __future__ import annotations

PROGRAM = """
import functools, inspect, sys
from inspect import Parameter as P

import flax.nnx, jax, keras, optax
import flax.nnx.nn.normalization, keras.src.backend.jax.trainer, keras.src.utils.tf_utils

LIBRARIES = ("keras", "flax", "optax", "jax")
OPERATORS = "add sub mul truediv floordiv mod pow matmul and or xor eq ne lt le gt ge".split()
NAMED = (P.POSITIONAL_ONLY, P.POSITIONAL_OR_KEYWORD)


def snapshot():
    # What every module and every class of the libraries has, by its place.
    modules = [module for name, module in sorted(sys.modules.items()) if name.split(".")[0] in LIBRARIES]
    classes = {x for module in modules for x in list(vars(module).values()) if isinstance(x, type)}
    own = [kind for kind in classes if kind.__module__.split(".")[0] in LIBRARIES]
    return {(owner, name): x for owner in [*modules, *own] for name, x in list(vars(owner).items())}


def sample_calls(original, own_names, is_method):
    # Arguments that the original takes: all and as few as possible, by position and by name.
    parameters = inspect.signature(original).parameters
    kinds = {p.kind for p in parameters.values()}
    named = [p for p in parameters.values() if p.kind in NAMED]
    options = {name: 0 for name, p in parameters.items() if p.kind is P.KEYWORD_ONLY}
    for chosen in (named, [p for p in named if p.default is P.empty]):
        by_position = max(is_method, sum(p.kind is P.POSITIONAL_ONLY for p in chosen))
        for count in {len(chosen), by_position}:
            args, kwargs = [0] * count, options | {p.name: 0 for p in chosen[count:]}
            yield args, kwargs
            if P.VAR_POSITIONAL in kinds and count >= len(named):
                yield [*args, 0, 0, 0], kwargs
            if P.VAR_KEYWORD in kinds:
                yield args, kwargs | {name: 0 for name in own_names if name not in parameters}


def refused_calls(original, replacement, is_method):
    wrapper = inspect.getclosurevars(replacement).nonlocals.get("wrapper")  # of `foreign_state.wrap`
    function, first = (replacement, []) if wrapper is None else (wrapper, [original])
    signature = inspect.signature(function, follow_wrapped=False)
    own_names = [*(name for name, p in signature.parameters.items() if p.kind in NAMED), "unknown"]
    for args, kwargs in sample_calls(original, own_names, is_method):
        try:
            signature.bind(*first, *args, **kwargs)
        except TypeError as error:
            yield f"{len(args)} by position, {list(kwargs)}: {error}"


before = snapshot()
import replicax.tf
replicax.tf.keras.layers
after = snapshot()
replaced = [(place, old, after[place]) for place, old in before.items() if after.get(place, old) is not old]
called_by_syntax = {f"__{name}__" for name in ("getitem", "abs", *OPERATORS, *("r" + name for name in OPERATORS))}
functions = [x for x in replaced if inspect.isfunction(x[2]) and callable(x[1]) and x[0][1] not in called_by_syntax]
for (owner, name), original, replacement in functions:
    for refused in refused_calls(original, replacement, isinstance(owner, type)):
        print(f"refused: {owner.__name__}.{name}{inspect.signature(original)}: {refused}")
print(*sorted(f"{owner.__name__}.{name}" for (owner, name), _, _ in functions))
"""


def test_replaced_functions_take_the_calls_of_the_originals(run_python):
    """The replaced functions are found by comparing all modules and classes before and after the import."""
    *refused, names = run_python(PROGRAM, timeout=120).stdout.splitlines()
    assert refused == []
    assert {"Layer.__call__", "BatchNormalization.call", "PytreeMeta.__call__"} <= set(names.split())
    assert len(names.split()) > 50


def test_objects_of_libraries_are_called_with_names_of_the_users(run_tf):
    run_tf(
        """
import flax.nnx
keras, x = tf.keras, tf.ones((2, 3, 4))
attention, recurrent = keras.layers.MultiHeadAttention(2, 2), keras.layers.GRU(2)
with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
    for layer, names in ((attention, ("query", "value")), (recurrent, ("sequences",))):
        by_name = layer(**dict.fromkeys(names, x))
        assert np.array_equal(by_name, layer(*[x] * len(names)))
crossing = keras.layers.HashedCrossing(5)
strings = (tf.constant(["a", "b"]), tf.constant(["c", "d"]))
assert np.array_equal(crossing(inputs=strings), crossing(strings))

class Named(flax.nnx.Module):
    def __init__(self, make, **others):
        self.total = make + sum(others.values())
assert Named(make=1, original=2).total == 3
assert flax.nnx.Param(np.ones(1), init=3, variable=4).get_metadata()["init"] == 3
"""
    )
