"""TensorFlow 1's names that are functions of `replicax.tf` with other orders and names of arguments."""

from __future__ import annotations

import functools
import importlib
import inspect
import types
from collections.abc import Callable
from typing import Any, TypeVar

from replicax.tf import _absent, _names
from replicax.tf.compat.v1 import _functions

# The order of TensorFlow 1's arguments, where it differs, in all namespaces that have a function of this name.
_ORDERS = """
argmax input axis name dimension output_type
argmin input axis name dimension output_type
assert_all_finite t msg name x message
assert_equal x y data summarize message name
assert_greater x y data summarize message name
assert_greater_equal x y data summarize message name
assert_less x y data summarize message name
assert_less_equal x y data summarize message name
assert_near x y rtol atol data summarize message name
assert_negative x data summarize message name
assert_non_negative x data summarize message name
assert_non_positive x data summarize message name
assert_none_equal x y data summarize message name
assert_positive x data summarize message name
assert_rank x rank data summarize message name
assert_rank_at_least x rank data summarize message name
assert_rank_in x ranks data summarize message name
assert_scalar tensor name message
avg_pool value ksize strides padding data_format name input
avg_pool2d value ksize strides padding data_format name input
boolean_mask tensor mask name axis
cond pred true_fn false_fn strict name fn1 fn2
confusion_matrix labels predictions num_classes dtype name weights
constant value dtype shape name verify_shape
conv1d value filters stride padding use_cudnn_on_gpu data_format name input dilations
conv2d input filter strides padding use_cudnn_on_gpu data_format dilations name filters
conv2d_transpose value filter output_shape strides padding data_format name input filters dilations
conv3d input filter strides padding data_format dilations name filters
conv3d_transpose value filter output_shape strides padding data_format name input filters dilations
convert_to_tensor value dtype name preferred_dtype dtype_hint
convolution input filter padding strides dilation_rate name data_format filters dilations
count_nonzero input_tensor axis keepdims dtype name reduction_indices keep_dims input
crelu features name axis
depth_to_space input block_size name data_format
depthwise_conv2d input filter strides padding rate name data_format dilations
dropout x keep_prob noise_shape seed name rate
embedding_lookup params ids partition_strategy name validate_indices max_norm
expand_dims input axis name dim
gather params indices validate_indices name axis batch_dims
gather_nd params indices name batch_dims bad_indices_policy
in_top_k predictions targets k name
length input name unit
log_softmax logits axis name dim
max_pool value ksize strides padding data_format name input
moments x axes shift name keep_dims keepdims
name_scope name default_name values
norm tensor ord axis keepdims name keep_dims
ones_like tensor dtype name optimize
pad tensor paddings mode name constant_values
poisson lam shape dtype seed name
pool input window_shape pooling_type padding dilation_rate strides name data_format dilations
reduce_all input_tensor axis keepdims name reduction_indices keep_dims
reduce_any input_tensor axis keepdims name reduction_indices keep_dims
reduce_join inputs axis keep_dims separator name reduction_indices keepdims
reduce_logsumexp input_tensor axis keepdims name reduction_indices keep_dims
reduce_max input_tensor axis keepdims name reduction_indices keep_dims
reduce_mean input_tensor axis keepdims name reduction_indices keep_dims
reduce_min input_tensor axis keepdims name reduction_indices keep_dims
reduce_prod input_tensor axis keepdims name reduction_indices keep_dims
reduce_sum input_tensor axis keepdims name reduction_indices keep_dims
reverse_sequence input seq_lengths seq_axis batch_axis name seq_dim batch_dim
separable_conv2d input depthwise_filter pointwise_filter strides padding rate name data_format dilations
shape input name out_type
size input name out_type
softmax logits axis name dim
softmax_cross_entropy_with_logits labels logits dim name axis
space_to_depth input block_size name data_format
squeeze input axis name squeeze_dims
substr input pos len name unit
to_number string_tensor out_type name input
transpose a perm name conjugate
tuple tensors name control_inputs
weighted_cross_entropy_with_logits labels logits pos_weight name targets
weighted_moments x axes frequency_weights name keep_dims keepdims
zeros_like tensor dtype name optimize
"""
ORDERS = {words[0]: words[1:] for line in _ORDERS.strip().splitlines() if (words := line.split())}

# Arguments that have another name in TensorFlow 2; of several that a function may have, it has one.
_RENAMED = {
    "dilation_rate": "dilations", "dim": "axis", "dimension": "axis", "filter": "filters", "fn1": "true_fn",
    "fn2": "false_fn", "input_tensor": "input", "keep_dims": "keepdims", "msg": "message",
    "preferred_dtype": "dtype_hint", "rate": "dilations", "reduction_indices": "axis", "batch_dim": "batch_axis",
    "seq_dim": "seq_axis", "squeeze_dims": "axis", "string_tensor": "input", "t": "x", "targets": "labels",
    "tensor": "input", "value": "input",
}  # fmt: skip
# Arguments that say how a graph is built or run, or what is always so.
_WITHOUT_EFFECT = """bad_indices_policy data default_name optimize partition_strategy strict summarize use_cudnn_on_gpu
validate_indices values verify_shape"""

# TensorFlow 1's names that are public names of TensorFlow 2 elsewhere; alone: the same name in that namespace.
_ELSEWHERE = """
compat: dimension_value
debugging: assert_greater_equal assert_integer assert_less_equal assert_near assert_negative assert_non_negative
debugging: assert_non_positive assert_none_equal assert_positive assert_rank_at_least assert_rank_in
debugging: assert_same_float_dtype assert_scalar assert_type check_numerics
errors: OpError
io: FixedLenFeature FixedLenSequenceFeature SparseFeature VarLenFeature decode_base64 decode_csv decode_raw
io: encode_base64 matching_files parse_example parse_single_example parse_tensor read_file serialize_tensor
io: write_file
linalg: cholesky cholesky_solve cross diag=tensor_diag diag_part=tensor_diag_part global_norm matrix_band_part=band_part
linalg: matrix_determinant=det matrix_diag=diag matrix_diag_part=diag_part matrix_inverse=inv matrix_set_diag=set_diag
linalg: matrix_solve=solve matrix_solve_ls=lstsq matrix_transpose matrix_triangular_solve=triangular_solve qr
linalg: self_adjoint_eig=eigh self_adjoint_eigvals=eigvalsh svd trace
math: accumulate_n angle arg_max=argmax arg_min=argmin betainc bincount ceil confusion_matrix conj count_nonzero cumprod
math: digamma div_no_nan=divide_no_nan erf erfc expm1 floor_div=floordiv floordiv floormod igamma igammac imag
math: invert_permutation is_finite is_inf is_nan is_non_decreasing is_strictly_increasing lbeta lgamma log log1p
math: log_sigmoid logical_xor mod polygamma real reciprocal rint rsqrt segment_max segment_mean segment_min segment_prod
math: segment_sum squared_difference unsorted_segment_max unsorted_segment_mean unsorted_segment_min
math: unsorted_segment_prod unsorted_segment_sqrt_n unsorted_segment_sum zeta
nn: depth_to_space space_to_depth
random: random_crop random_gamma=gamma random_normal=normal random_poisson=poisson random_shuffle=shuffle
random: random_uniform=uniform set_random_seed=set_seed truncated_normal
strings: reduce_join regex_replace string_join=join string_strip=strip string_to_number=to_number substr
version: GIT_VERSION VERSION
.: lin_space=linspace py_func=numpy_function reverse_v2=reverse tensor_scatter_add=tensor_scatter_nd_add
.: tensor_scatter_sub=tensor_scatter_nd_sub tensor_scatter_update=tensor_scatter_nd_update where_v2=where
"""


def _elsewhere() -> dict[str, str]:
    found = {}
    for line in _ELSEWHERE.strip().splitlines():
        namespace, _, names = line.partition(": ")
        for entry in names.split():
            old, _, new = entry.partition("=")
            found[old] = (new or old) if namespace == "." else f"{namespace}.{new or old}"
    return found


ELSEWHERE = _elsewhere()
# Names that mean something else in TensorFlow 2.
OTHERS = {"constant_initializer", "image", "initializers", "losses", "metrics", "ones_initializer", "optimizers"}
OTHERS |= {"random_normal_initializer", "random_uniform_initializer", "saved_model", "summary", "zeros_initializer"}

_R = TypeVar("_R")


def find(namespace: str, name: str) -> Any:
    """Returns a name of `tf.compat.v1`, or of one of its namespaces, made of that of TensorFlow 2.

    Raises:
        AttributeError: there is none.
    """
    full = f"{namespace}.{name}" if namespace else name
    if full in _functions.BY_NAME:
        return _functions.BY_NAME[full]
    public = ELSEWHERE.get(full, full)
    try:
        if name.startswith("_") or full in OTHERS or f"compat.v1.{full}" in _absent.ABSENT:
            raise AttributeError
        value: Any = functools.reduce(getattr, public.split("."), importlib.import_module("replicax.tf"))
    except AttributeError:
        error = _absent.message(f"compat.v1.{full}", _absent.alternative(public) or "")
        raise AttributeError(error, name=name) from None
    if isinstance(value, types.ModuleType):
        return _namespace(public) if public in _names.NAMESPACES and public != "io.gfile" else value
    last = public.rpartition(".")[2]
    return _with_order(value, ORDERS[last]) if last in ORDERS else value


@functools.cache
def _namespace(name: str) -> types.ModuleType:
    module = types.ModuleType(f"replicax.tf.compat.v1.{name}", _names.NAMESPACES[name][0])
    module.__dict__["__getattr__"] = functools.partial(find, name)
    return module


def _with_order(function: Callable[..., _R], order: list[str]) -> Callable[..., _R]:
    """Returns a function whose arguments have the order and the names that they had in TensorFlow 1."""
    parameters = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> _R:
        given = {**dict(zip(order, args)), **kwargs}
        if (keep := given.pop("keep_prob", None)) is not None:
            given["rate"] = 1 - keep
        final = {}
        for name, value in given.items():
            new = name if name in parameters else _RENAMED.get(name, name)
            if new in parameters and not (value is None and new in final):
                final[new] = value
            elif new not in parameters and name not in _WITHOUT_EFFECT.split():
                raise TypeError(f"tf.compat.v1.{function.__name__} has no argument {name!r}; it has {', '.join(order)}")
        return function(**final)

    call.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None) for name in order]
    )
    return call
