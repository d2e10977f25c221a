"""Names of TensorFlow that `replicax.tf` lacks, and names that differ: the tables of the page of names.

`ABSENT` maps a name, or the beginning of one, to a replacement, which the error for that name shows. The error for any
other missing name points to the page that lists all names.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from replicax.tf._core import doc_pages, tracebacks

_GRAPHS = "There are no graphs and sessions: call operations directly, and @tf.function compiles them"
_JPEG_XL = "Decode JPEG XL with the library pillow-jxl-plugin, in tf.numpy_function"
_OPERATIONS = "The operations of jax.numpy, jax.nn and jax.lax work on its tensors too"
# The namespaces of operations; names that begin with a small letter there are operations.
_NAMESPACES = {"", "bitwise", "experimental.numpy", "image", "linalg", "math", "nn", "random", "signal", "sparse"}
_OLD = "compat.v1."
_RECURRENT = "Write the cell as a function and loop with tf.scan, or use flax.nnx.RNN"

ABSENT: dict[str, str] = {
    "Graph": _GRAPHS,
    "Operation": _GRAPHS,
    "RegisterGradient": "Use tf.custom_gradient",
    "ConfigProto": "There are no sessions to configure: leave it out",
    "CriticalSection": "JAX runs side effects in the program's order; use threading.Lock between threads",
    "Session": _GRAPHS,
    "AggregationMethod": "JAX adds gradients up itself: leave it out",
    "approx_top_k": "Use tf.math.top_k, or jax.lax.approx_max_k",
    "autograph.to_code": "Errors show the line of your code; the converted source is not kept",
    "audio": "Use librosa or soundfile in the input pipeline",
    "autodiff.ForwardAccumulator": "Use jax.jvp",
    "compat.v1.global_variables": "Read model.variables",
    "compat.v1.global_variables_initializer": "Variables are always initialized: leave it out",
    "compat.v1.placeholder": _GRAPHS,
    "compat.v1.train.AdamOptimizer": "Use tf.keras.optimizers, or Optax with rx.Optimizer",
    "compat.v1.train.GradientDescentOptimizer": "Use tf.keras.optimizers, or Optax with rx.Optimizer",
    "compat.v1.train.MomentumOptimizer": "Use tf.keras.optimizers, or Optax with rx.Optimizer",
    "compat.v1.estimator": "TensorFlow has removed it too: write the loop with tf.function and strategy.run",
    "compat.v1.get_variable": "Use tf.Variable, which keeps its own name",
    "compat.v1.layers": "Use tf.keras.layers",
    "compat.v1.local_variables_initializer": "Variables are always initialized: leave it out",
    "compat.v1.losses": "Use tf.keras.losses",
    "compat.v1.metrics": "Use tf.keras.metrics",
    "compat.v1.summary": "Use tf.summary, with its steps",
    "compat.v1.variable_scope": "Use tf.name_scope, and keep variables in a tf.Module",
    "contrib": "TensorFlow 2 has no contrib",
    "debugging.experimental": "Use jax.debug.print, or tf.debugging.enable_check_numerics",
    "dtypes.variant": "There are no variant tensors",
    "edit_distance": "Compute it outside of compiled code, for example with rapidfuzz",
    "estimator": "TensorFlow has removed it too: write the loop with tf.function and strategy.run",
    "feature_column": "Use keras.layers.Discretization and CategoryEncoding for numbers, a Python dict for strings",
    "fftnd": "Use tf.signal.fftnd",
    "fingerprint": "Use hashlib in the input pipeline",
    "global_variables_initializer": "Variables are always initialized: leave it out",
    "gradients": "Use tf.GradientTape",
    "graph_util": _GRAPHS,
    "hessians": "Use two tf.GradientTape, one in the other, or jax.hessian",
    "hub": "Load weights with the library that publishes them, as NumPy arrays",
    "image.decode_jxl": _JPEG_XL,
    "image.extract_glimpse": "Use tf.image.crop_and_resize",
    "image.generate_bounding_box_proposals": "Use tf.image.non_max_suppression",
    "import_graph_def": _GRAPHS,
    "io.decode_jxl": _JPEG_XL,
    "io.write_graph": _GRAPHS,
    "linalg.LinearOperator": "Use plain matrices with tf.linalg.matmul and tf.linalg.solve, or the library lineax",
    "lite": "Save the model, convert it by `replicax export`, and give the result to TensorFlow's converter",
    "load_library": "Use jax.ffi",
    "load_op_library": "Use jax.ffi",
    "math.approx_max_k": "Use jax.lax.approx_max_k",
    "math.approx_min_k": "Use jax.lax.approx_min_k",
    "math.sobol_sample": "Use scipy.stats.qmc.Sobol",
    "math.special": "Use jax.scipy.special",
    "mlir": "jax.jit(f).lower(...).as_text() shows the program",
    "nn.RNNCell": _RECURRENT,
    "nn.ctc_beam_search_decoder": "Decode outside of compiled code, for example with pyctcdecode",
    "nn.fractional_avg_pool": "Use tf.nn.avg_pool",
    "nn.fractional_max_pool": "Use tf.nn.max_pool",
    "nn.rnn_cell": "Write tf.keras.layers.LSTMCell or GRUCell",
    "placeholder": _GRAPHS,
    "quantization.dequantize": "Use the library qwix, or jax.lax with int8 operands",
    "quantization.experimental": "Use the library qwix",
    "quantization.quantize": "Use the library qwix, or jax.lax with int8 operands",
    "queue": "Use queue.Queue of Python, and datasets for input",
    "saved_model.experimental.Fingerprint": "The record of a saved model has a checksum of each file",
    "saved_model.experimental.TrackableResource": "Keep tables and other resources out of functions that are saved",
    "saved_model.experimental.read_fingerprint": "The record of a saved model has a checksum of each file",
    "strings.unicode_script": "Use Python's str in the input pipeline",
    "summary.audio": "Use tensorboardX itself",
    "summary.graph": _GRAPHS,
    "summary.write": "Use tensorboardX itself",
    "sysconfig": "There is no library of TensorFlow to compile with: use jax.ffi",
    "train.AdamOptimizer": "Use tf.optimizers, or Optax with rx.Optimizer",
    "train.GradientDescentOptimizer": "Use tf.optimizers, or Optax with rx.Optimizer",
    "train.MomentumOptimizer": "Use tf.optimizers, or Optax with rx.Optimizer",
    "types.experimental.TraceType": "Arguments that are not tensors are compared by value or identity: leave it out",
    "types.experimental": "tf.function returns a `replicax.Function`",
}

# The differences of names from TensorFlow's.
DIFFERS: dict[str, str] = {
    "compat.v1.ConfigProto": "no effect: JAX is configured by its environment variables",
    "compat.v1.GPUOptions": "no effect: JAX is configured by its environment variables",
    "compat.v1.InteractiveSession": "can be made and closed; `run` raises an error, since there are no graphs",
    "compat.v1.Session": "can be made and closed; `run` raises an error, since there are no graphs",
    "DType": "numpy's dtypes with TensorFlow's attributes; they print as in numpy",
    "TensorArray": "all tensors have one shape; a function in which one grows in a compiled loop runs on the host",
    "Tensor": "JAX's arrays, NumPy's in datasets; different dtypes are promoted, where TensorFlow raises an error",
    "boolean_mask": "only outside of compiled code, since its shapes are static",
    "control_dependencies": "no effect: operations run in the program's order",
    "custom_gradient": "does not return gradients of variables: pass their values as arguments",
    "debugging.enable_check_numerics": "`jax_debug_nans`: finds NaN, not infinity",
    "debugging.Assert": "in compiled code the error is raised when the call of the `tf.function` ends",
    "dynamic_partition": "only outside of compiled code, since its shapes are static",
    "experimental.numpy": "`jax.numpy`: dtypes are its defaults, such as float32",
    "gather": "in compiled code an index out of range returns zeros, as in TensorFlow on GPUs",
    "gather_nd": "in compiled code an index out of range returns zeros, as in TensorFlow on GPUs",
    "group": "returns None: the operations have run already",
    "image.adjust_jpeg_quality": "only outside of compiled code",
    "image.decode_and_crop_jpeg": "colors at the edges of the window are interpolated with the pixels outside",
    "image.non_max_suppression": "only outside of compiled code; use `non_max_suppression_padded` there",
    "image.non_max_suppression_overlaps": "only outside of compiled code",
    "image.non_max_suppression_with_scores": "only outside of compiled code",
    "image.random_jpeg_quality": "only outside of compiled code",
    "image.stateless_random_jpeg_quality": "only outside of compiled code",
    "init_scope": "operations run immediately, also while tracing",
    "io.gfile": "uses fsspec",
    "linalg.diag": "a single diagonal, not a band",
    "linalg.diag_part": "a single diagonal, not a band",
    "linalg.eig": "only on CPU, as in JAX",
    "linalg.eigvals": "only on CPU, as in JAX",
    "linalg.set_diag": "a single diagonal, not a band",
    "math.segment_sum": "only outside of compiled code; use `unsorted_segment_sum` there",
    "nn.weighted_cross_entropy_with_logits": "the gradient is also right at logits of 0",
    "nn.softmax_cross_entropy_with_logits": "the gradient is also right if the labels do not sum to 1",
    "numpy_function": "in compiled code `Tout` must have shapes: pass tf.TensorSpec",
    "py_function": "in compiled code `Tout` must have shapes: pass tf.TensorSpec; not differentiable",
    "print": "in compiled code, the output of several calls may appear in another order",
    "random": "JAX's generators: other numbers than TensorFlow's for the same seed, the same on all devices",
    "saved_model": "a format of replicax's own, with programs of jax.export, which `replicax export` converts",
    "scan": "compiled as `lax.scan`: all iterations have the same shapes",
    "shape": "in compiled code a numpy array, which can be used as a shape",
    "slice": "in compiled code, sizes must be known if `begin` is a tracer",
    "summary": "uses tensorboardX",
    "test.is_gpu_available": "virtual GPUs count",
    "unique": "only outside of compiled code, since its shapes are static",
    "where": "without `x` and `y` only outside of compiled code, since its shapes are static",
    "while_loop": "in compiled code it has no second derivative",
}


def difference(name: str) -> str | None:
    """Returns the entry of the table `DIFFERS` for a name, or for its namespace."""
    parts = name.split(".")
    found = (DIFFERS.get(".".join(parts[:end])) for end in range(len(parts), 0, -1))
    return next((text for text in found if text), None)


def alternative(name: str) -> str | None:
    """Returns the entry of the table `ABSENT` for a name, or for its beginning: "image.resize" is found as "image"."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        if (found := ABSENT.get(".".join(parts[:end]))) is not None:
            return found
    stems = [stem for stem in ABSENT if "." in stem and name.startswith(stem)]
    if stems:
        return ABSENT[max(stems, key=len)]
    return alternative(name.removeprefix(_OLD)) if name.startswith(_OLD) else None


# The names that were asked for and are not there, with the places in the user's code, in their order.
asked: dict[tuple[str, str], None] = {}


def hint(name: str) -> str:
    """Returns what to do about a name that has no entry in `ABSENT`; an empty text for names other than operations."""
    namespace, _, last = name.removeprefix("compat.v1.").rpartition(".")
    return _OPERATIONS if namespace in _NAMESPACES and last[:1].islower() else ""


def message(name: str, otherwise: str | None = None) -> str:
    """Returns the text of the error for a name that is not there: where it was used, and what stands for it."""
    place = _place()
    if not name.startswith("_"):  # Python asks for modules of ours as for attributes
        asked[name, place] = None
    instead = alternative(name) or (hint(name) if otherwise is None else otherwise)
    text = [f"replicax.tf has no {name!r} ({place}).", instead]
    return " ".join(
        [*(f"{part.rstrip('.')}." for part in text if part), f"{doc_pages.page('reference/tf-names')} lists all names."]
    )


def _place() -> str:
    """Returns the file and line from which `replicax.tf` was called or imported."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and (
        frame.f_code.co_filename.startswith(_IMPORTING) or tracebacks.is_hidden_file(frame.f_code.co_filename)
    ):
        frame = frame.f_back
    if frame is None:
        return "from Python itself"
    path = Path(frame.f_code.co_filename)
    with contextlib.suppress(ValueError, OSError):
        path = path.relative_to(Path.cwd())
    return f"{path}:{frame.f_lineno}"


_IMPORTING = ("<frozen importlib", importlib.__file__.removesuffix("__init__.py"))


def missing_from(namespace: str, otherwise: str | None = None) -> Callable[[str], NoReturn]:
    """Returns a `__getattr__` for a module: its error names the alternative, or else `otherwise` or `hint`."""

    def __getattr__(name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(f"module 'replicax.tf' has no attribute {name!r}")
        raise AttributeError(message(f"{namespace}.{name}" if namespace else name, otherwise), name=name)

    return __getattr__
