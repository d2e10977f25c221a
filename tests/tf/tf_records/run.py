"""Evaluate expressions: `python run.py MODULE EXPRESSIONS RESULTS FILE ...`.

MODULE is `tensorflow` or `replicax.tf`, EXPRESSIONS a JSON file with the list of the expressions. Each FILE has
expressions, and statements that prepare them (`let: `), which run if one of the expressions of the file does. RESULTS
becomes a JSON object: for each expression its value, or the class and the text of its error.
"""

import importlib
import inspect
import json
import os
import pathlib
import re
import sys
import tempfile

import numpy as np

tf = importlib.import_module(sys.argv[1])

FOLDER = tempfile.mkdtemp()


def example(**features):
    """An example of lists of numbers or bytes."""
    return tf.train.Example(features=tf.train.Features(feature={k: feature(v) for k, v in features.items()}))


def feature(values):
    if values is None:
        return tf.train.Feature()
    if any(isinstance(v, float) for v in values):
        return tf.train.Feature(float_list=tf.train.FloatList(value=values))
    if any(isinstance(v, bytes) for v in values):
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
    return tf.train.Feature(int64_list=tf.train.Int64List(value=values))


def serialized(**features):
    return example(**features).SerializeToString()


def sequence(context, **lists):
    """A serialized sequence example."""
    return tf.train.SequenceExample(
        context=tf.train.Features(feature={k: feature(v) for k, v in context.items()}),
        feature_lists=tf.train.FeatureLists(
            feature_list={k: tf.train.FeatureList(feature=[feature(v) for v in vs]) for k, vs in lists.items()}
        ),
    ).SerializeToString()


def file(name, text):
    path = os.path.join(FOLDER, name)
    pathlib.Path(path).write_text(text, encoding="utf-8")
    return path


def records(name, *content, options=None):
    path = os.path.join(FOLDER, name)
    with tf.io.TFRecordWriter(path, options) as writer:
        for record in content:
            writer.write(record)
    return path


def parameters(function):
    return list(inspect.signature(function).parameters)


def elements(dataset):
    return list(dataset)


def plain(value):
    """A value as JSON: dtype, shape and content of a tensor."""
    if isinstance(value, tf.RaggedTensor):
        return ["ragged", str(value.shape), plain(value.flat_values), [plain(x)[2] for x in value.nested_row_splits]]
    if isinstance(value, tf.SparseTensor):
        return ["sparse", plain(value.indices), plain(value.values), plain(value.dense_shape)]
    if hasattr(value, "numpy"):
        value = value.numpy()
    if isinstance(value, bytes):
        return ["object", [], value.decode("latin1")]
    if isinstance(value, (np.ndarray, np.generic)):
        array = np.asarray(value)
        if array.dtype.kind in "OSU":
            flat = [x.decode("latin1") if isinstance(x, bytes) else str(x) for x in array.ravel()]
            return ["object", list(array.shape), np.array(flat, object).reshape(array.shape).tolist()]
        if array.dtype.kind == "f":
            array = array.astype(np.float64)
            return [value.dtype.name, list(array.shape), json.loads(json.dumps(rounded(array.tolist())))]
        return [array.dtype.name, list(array.shape), array.tolist()]
    if isinstance(value, tf.TensorShape):
        return ["shape", None if value.rank is None else value.as_list()]
    if isinstance(value, dict):
        return {str(key): plain(child) for key, child in sorted(value.items())}
    if isinstance(value, (list, tuple)):
        return [plain(child) for child in value]
    if isinstance(value, (int, float, str, bool)) or value is None:
        return value
    return str(value)


def rounded(nest):
    return [rounded(x) for x in nest] if isinstance(nest, list) else float(f"{nest:.6g}")


def outcome(expression):
    try:
        return {"value": plain(eval(expression, globals()))}
    except Exception as error:
        names = [kind.__name__ for kind in type(error).__mro__]
        wanted = (
            "InvalidArgumentError",
            "FailedPreconditionError",
            "DataLossError",
            "NotFoundError",
            "OutOfRangeError",
        )
        builtins = [k.__name__ for k in type(error).__mro__ if k.__module__ == "builtins"]
        kind = next((name for name in wanted if name in names), builtins[0])
        text = re.sub(r"\{\{.*?\}\} ?|\[Op:.*|\[\[.*?\]\]", "", str(error).replace(FOLDER, "")).split("\n")[0].strip()
        return {"raises": kind, "text": text}


def cases(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def main():
    chosen = set(json.loads(pathlib.Path(sys.argv[2]).read_text(encoding="utf-8")))
    results = {}
    for path in map(pathlib.Path, sys.argv[4:]):
        lines = cases(path)
        for line in lines if chosen & set(lines) else ():
            if line.startswith("let: "):
                exec(line.removeprefix("let: "), globals())
            elif line in chosen:
                results[line] = outcome(line)
    pathlib.Path(sys.argv[3]).write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main()
