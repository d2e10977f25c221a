"""Evaluate expressions of cases.txt: `python run.py MODULE EXPRESSIONS RESULTS`.

MODULE is `tensorflow` or `replicax.tf`, EXPRESSIONS a JSON file with the list of the expressions. RESULTS becomes a
JSON object: for each expression and each way in which it is evaluated, its value and its gradients with respect to the
inputs. TensorFlow evaluates all expressions eagerly. `replicax.tf` evaluates one half in one compiled function and the
other half in the replicas of a strategy; expressions that raise, or that depend on values that compiled code does not
know, eagerly. It evaluates one half of all expressions also in a function of a dataset that runs in Python. An
operation has several expressions, next to each other.
"""

import importlib
import json
import pathlib
import sys

import numpy as np

tf = importlib.import_module(sys.argv[1])

INPUTS = {
    "x": tf.constant([[1.5, -2.0, 0.5], [3.0, -0.25, 2.0]]),
    "y": tf.constant([[0.5, 2.25, 1.5], [1.0, 3.0, 0.25]]),
    "v": tf.constant([0.5, -1.5, 2.0, 1.0]),
    "k": tf.constant([0.0, -1.0, 2.0, 0.0]),  # where functions have kinks
    "m": tf.constant([[[2.0, 0.5], [0.5, 1.0]], [[3.0, -1.0], [-1.0, 2.0]]]),
    "images": tf.constant(np.sin(np.arange(96) * 0.7).astype(np.float32).reshape(2, 4, 4, 3)),
    "filters": tf.constant(np.cos(np.arange(48) * 1.3).astype(np.float32).reshape(2, 2, 3, 4)),
    "i": tf.constant([[3, -1, 2], [0, 5, -4]]),
    "l": tf.constant([2**40, 3], tf.int64),
    "d": tf.constant([0.1, 3.0], tf.float64),
    "j": tf.constant([[1, 2, 3], [4, 5, 6]]),
    "b": tf.constant([[True, False, True], [False, False, True]]),
    "c": tf.constant([[1 + 2j, -1j], [0.5 + 0j, 2 - 1j]], tf.complex64),
}
CASES = pathlib.Path(__file__).parent / "cases.txt"
REPLICAS = True  # whether replicas have one half; without them a function has all, and so has Python
NAMES = {"tf": tf, "np": np}  # of expressions, beside the inputs
FLOATS = ("x", "y", "v", "k", "m", "images", "filters")


def cases():
    """Pairs of how to evaluate and of an expression."""
    for line in CASES.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            how, found, expression = line.partition(": ")
            plain = found and how in ("eager", "raises", "nograd")
            yield (how, expression) if plain else ("", line)


def rounded(nest):
    return [rounded(x) for x in nest] if isinstance(nest, list) else float(f"{nest:.6g}")


def plain(value):
    """A value as JSON: dtype, shape and numbers of a tensor."""
    if isinstance(value, tf.Tensor):
        value = value.numpy()
    if isinstance(value, bytes):
        return ["object", [], value.decode()]
    if isinstance(value, (np.ndarray, np.generic)):
        array = np.asarray(value)
        if array.dtype.kind == "c":
            numbers = rounded([array.real.astype(float).tolist(), array.imag.astype(float).tolist()])
        elif array.dtype.kind in "OSU":
            numbers = array.astype(str).tolist()
        else:
            numbers = array.tolist() if array.dtype.kind in "iub" else rounded(array.astype(np.float64).tolist())
        return [array.dtype.name, list(array.shape), numbers]
    if isinstance(value, tf.TensorShape):
        return ["shape", value.as_list()]
    if isinstance(value, dict):
        return {key: plain(child) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(child) for child in value]
    return value


def tensors(value):
    return [leaf for leaf in tf.nest.flatten(value) if isinstance(leaf, tf.Tensor)]


def evaluate(how, expression, inputs):
    """The value, and the gradients of its floating-point tensors by the name of the input."""
    watched = [inputs[name] for name in FLOATS]
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(watched)
        value = eval(expression, {**inputs, **NAMES})
    floating = [t for t in tensors(value) if t.dtype in (tf.float32, tf.float16, tf.bfloat16, tf.float64)]
    gradients = {}
    if not how:
        for target in floating:
            for name, gradient in zip(FLOATS, tape.gradient(target, watched)):
                if gradient is not None:
                    gradients.setdefault(name, []).append(tf.convert_to_tensor(gradient))
    return value, gradients


def eager(how, expression, inputs=INPUTS):
    if how != "raises":
        value, gradients = evaluate(how, expression, inputs)
        return {"value": plain(value), "gradients": plain(gradients)}
    try:
        eval(expression, {**inputs, **NAMES})
    except Exception as error:
        for kind in type(error).__mro__:
            if kind.__name__ == "InvalidArgumentError" or kind.__module__ == "builtins":
                return {"raises": kind.__name__}
    return {"raises": None}


def outcome(function):
    try:
        return function()
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {str(error)[:500]}"}


def compiled(cases, run):
    """What all expressions give in one compiled function: `run(f, inputs)` calls it."""
    results, structures = {}, {}

    def body(inputs):
        found = {}
        for how, expression in cases:

            def one():
                structures[expression] = evaluate(how, expression, inputs)  # noqa: B023
                found[expression] = tensors(structures[expression])  # noqa: B023

            if failed := outcome(one):
                results[expression] = failed
        return found

    for expression, found in run(body, INPUTS).items():
        rest = iter(found)
        value, gradients = tf.nest.map_structure(
            lambda leaf: next(rest) if isinstance(leaf, tf.Tensor) else leaf,  # noqa: B023
            structures[expression],
        )
        results[expression] = {"value": plain(value), "gradients": plain(gradients)}
    return results


def in_python(cases):
    """What all expressions give in a function of a dataset that runs in Python, where tensors are on the host."""
    results = {}

    def body(inputs):
        inputs["x"].numpy()  # which compiled code cannot do
        for how, expression in cases:
            if how == "raises":
                results[expression] = outcome(lambda: eager(how, expression, inputs))  # noqa: B023
            else:
                value = lambda: {"value": plain(eval(expression, {**inputs, **NAMES}))}  # noqa: B023, E731
                results[expression] = outcome(value)
        return 0

    list(tf.data.Dataset.from_tensors(INPUTS).map(body))
    return results


def main():
    chosen = set(json.loads(pathlib.Path(sys.argv[2]).read_text(encoding="utf-8")))
    table = list(cases())
    if sys.argv[1] == "tensorflow":
        results = {"eager": {case[1]: outcome(lambda: eager(*case)) for case in table if case[1] in chosen}}  # noqa: B023
    else:
        at_once = [case for case in table if case[0] in ("eager", "raises")]
        rest = [case for case in table if case not in at_once]
        # Where a function is told how many replicas share a loss, replicas differ from the rest.
        alone = [case for case in rest if "compute_average_loss" in case[1] or "scale_regularization" in case[1]]
        alike = [case for case in rest if case not in alone]
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])

        def in_replicas(f, inputs):
            returned = tf.function(lambda inputs: strategy.run(f, args=(inputs,)))(inputs)
            return tf.nest.map_structure(lambda leaf: strategy.experimental_local_results(leaf)[-1], returned)

        def those_of(cases):
            return [case for case in cases if case[1] in chosen]

        in_function = those_of(alone + alike[::2] if REPLICAS else rest)
        in_dataset = those_of(case for i, case in enumerate(table) if i % 4 in (0, 3) or not REPLICAS)
        results = {
            "eager": {case[1]: outcome(lambda: eager(*case)) for case in those_of(at_once)},  # noqa: B023
            "function": compiled(in_function, lambda f, inputs: tf.function(f)(inputs)),
            "replicas": compiled(those_of(alike[1::2]), in_replicas) if REPLICAS else {},
            "python": in_python(in_dataset),
        }
    found = {}
    for way, values in results.items():
        for expression, result in values.items():
            found.setdefault(expression, {})[way] = result
    pathlib.Path(sys.argv[3]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
