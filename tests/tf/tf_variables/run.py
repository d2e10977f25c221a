"""Evaluate expressions with variables: `python run.py MODULE PROGRAMS RESULTS`.

MODULE is `tensorflow` or `replicax.tf`, PROGRAMS a JSON file with a list of programs, "KIND: EXPRESSION" each (see
`programs`). An expression is evaluated with new variables of each dtype. RESULTS becomes a JSON object: for each
program, way to run and dtype, the result and the values of the variables behind it, or the class of the exception.
TensorFlow evaluates eagerly, `replicax.tf` also in functions, with several programs of a kind in each.

An expression may use `s`, `v` and `m`, variables of rank 0, 1 and 2; `a`, a tensor of their dtype and shape (2,);
`t(numbers)`, which makes a tensor of their dtype; and `rows(values, *indices)`, which makes IndexedSlices.
"""

import importlib
import json
import pathlib
import sys

import numpy as np

tf = importlib.import_module(sys.argv[1])
OURS = sys.argv[1] != "tensorflow"
if not OURS:
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)

CPUS = ["/cpu:0", "/cpu:1"]
DTYPES = {
    "bool": "bool",
    "ints": "uint8 int32 int64",
    "floats": "bfloat16 float32",
    "complex": "complex64",
}
COMPILED = ("int32", "float32")  # the dtypes in functions
AT_ONCE = 16  # programs in one function
GROUPS = {"any": [*DTYPES], "numbers": ["ints", "floats", "complex"], "reals": ["ints", "floats"]}
NUMBERS = {"b": [True, False, True], "c": [7 + 1j, 6, -1.5], "i": [7, -6, 1], "u": [7, 6, 1]}


def dtypes_of(group, kind):
    """Return the dtypes with which an expression is evaluated: all of a group, or some for variables of strategies."""
    names = [dtype for part in GROUPS.get(group, [group]) for dtype in DTYPES[part].split()]
    return names if kind == "plain" else [dtype for dtype in names if dtype in ("bool", "int32", "float32")]


class Names(dict):
    """The names that an expression may use; a variable is created when it is used first."""

    def __init__(self, dtype, kind):
        dtype = tf.as_dtype(dtype)
        self.kind, self.variables = kind, {}
        super().__init__(tf=tf, np=np, rows=rows, dtype=dtype, t=lambda x: tensor(x, dtype))
        numbers = NUMBERS.get(np.dtype(dtype.as_numpy_dtype).kind, [7.0, -6.0, 1.5])
        self["a"] = tensor(numbers[1::-1], dtype)
        for name, value in {"s": numbers[0], "v": numbers, "m": [numbers, numbers[::-1]]}.items():
            self[name] = self.variables[name] = create(kind, tensor(value, dtype))

    def changed(self):
        """Return the values of the variables that differ from their initial values."""
        initial = Names(self["dtype"].name, self.kind).variables
        values = {name: [plain(part) for part in components(x)] for name, x in self.variables.items()}
        return {k: v for k, v in values.items() if v != [plain(part) for part in components(initial[k])]}


def tensor(numbers, dtype):
    return tf.constant(np.asarray(numbers).astype(dtype.as_numpy_dtype))


def rows(values, *indices):
    return tf.IndexedSlices(values, tf.constant(indices or [0, 2]))


MIRRORED = tf.distribute.MirroredStrategy(CPUS)
CENTRAL = tf.distribute.experimental.CentralStorageStrategy(CPUS)
SHARDED = tf.distribute.MirroredStrategy(CPUS, **({"shard_variables": True} if OURS else {}))
STRATEGIES = {"mirrored": MIRRORED, "on_read": MIRRORED, "central": CENTRAL, "sharded": SHARDED}


def create(kind, value):
    """Return a variable of a kind, such as "mirrored SUM replicas"."""
    if kind == "plain":
        return tf.Variable(value)
    storage, aggregation, *_ = kind.split()
    options = {"aggregation": getattr(tf.VariableAggregation, aggregation)}
    if storage == "on_read":
        options["synchronization"] = tf.VariableSynchronization.ON_READ
    with STRATEGIES[storage].scope():
        return tf.Variable(value, **options)


def components(value):
    """Return the components of a distributed value; of another, a list with it alone."""
    values = getattr(value, "values", None)
    return list(values) if isinstance(values, tuple) else [value]


def plain(value):
    """Return a result as JSON: of a tensor its dtype, shape and numbers."""
    if isinstance(value, (tf.Tensor, tf.Variable)):
        value = value.numpy()
    if isinstance(value, (np.ndarray, np.generic)):
        array = np.asarray(value)
        if array.dtype.kind == "c":
            numbers = [array.real.astype(float).tolist(), array.imag.astype(float).tolist()]
        else:
            numbers = array.tolist() if array.dtype.kind in "iub" else array.astype(np.float64).tolist()
        return [array.dtype.name, list(array.shape), numbers]
    if isinstance(value, tf.TensorShape):
        return ["shape", value.as_list()]
    if isinstance(value, (list, tuple)):
        return [plain(child) for child in value]
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    assert isinstance(value, (bool, int, float, str, type(None))), type(value)
    return value


def exception(error, names):
    """Return the class of an exception under TensorFlow, and under `replicax.tf` all of its classes.

    After an exception the variables must have their values from before; TensorFlow's may be changed in part.
    """
    classes = [kind.__name__ for kind in type(error).__mro__]
    if OURS:
        return {"raises": classes, "says": str(error)[:300], **after(names)}
    builtin = next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")
    return {"raises": next((name for name in classes if name in ("InvalidArgumentError", "OutOfRangeError")), builtin)}


def evaluate(names, expression, run=lambda body: body()):
    try:
        result = run(lambda: eval(expression, {**names}))
        return {"value": [plain(part) for part in components(result)], **after(names)}
    except Exception as error:
        return exception(error, names)


def after(names):
    changed = names.changed()
    return {"changed": changed} if changed else {}


def in_replicas(kind):
    """Return a function that runs a function in the replicas of the kind's strategy, if the kind says so."""
    if not kind.endswith("replicas"):
        return lambda body: body()
    return STRATEGIES[kind.split()[0]].run


def in_function(kind, cases):
    """Return the results of programs of a kind that are evaluated in one function, by program and dtype."""
    names = {(program, dtype): Names(dtype, kind) for program, _, dtypes in cases for dtype in dtypes}
    values, errors = {}, {}

    def body():
        tensors = {}
        for program, expression, dtypes in cases:
            for dtype in dtypes:
                place = program, dtype
                try:
                    value = in_replicas(kind)(lambda: eval(expression, {**names[place]}))  # noqa: B023
                except Exception as error:
                    errors[place] = error
                    continue
                if any(isinstance(part, (tf.Tensor, tf.Variable)) for part in components(value)):
                    tensors[f"{program}|{dtype}"] = value
                else:
                    values[place] = value
        return tensors

    for key, value in tf.function(body, autograph=False)().items():
        values[tuple(key.rsplit("|", 1))] = value
    results = {place: exception(error, names[place]) for place, error in errors.items()}
    for place, value in values.items():
        results[place] = {"value": [plain(part) for part in components(value)], **after(names[place])}
    return results


def main():
    results = {}
    by_kind = {}
    for program in json.loads(pathlib.Path(sys.argv[2]).read_text(encoding="utf-8")):
        kind, how, group, expression = program.split(": ", 3)
        dtypes = dtypes_of(group, kind)
        run = in_replicas(kind)
        results[program] = {"eager": {dtype: evaluate(Names(dtype, kind), expression, run) for dtype in dtypes}}
        if how == "both":
            some = [dtype for dtype in dtypes if dtype in COMPILED] or dtypes[:1]
            by_kind.setdefault(kind, []).append((program, expression, some))
    for kind, cases in by_kind.items() if OURS else ():
        for start in range(0, len(cases), AT_ONCE):
            for (program, dtype), result in in_function(kind, cases[start : start + AT_ONCE]).items():
                results[program].setdefault("function", {})[dtype] = result
    pathlib.Path(sys.argv[3]).write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main()
