"""The table of all names of `replicax.tf` by namespace, from which the modules of the namespaces are built.

A name is imported from its module on first use, so that importing `replicax.tf` imports few modules.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable
from typing import Any, NamedTuple

from replicax.tf import _absent, _core, _dtypes, _host
from replicax.tf._core import __version__, specs


class _At(NamedTuple):
    """A value in a module, or in a table of that module."""

    module: str
    name: str
    table: str | None = None

    def value(self) -> object:
        module = _import(self.module)
        return getattr(module, self.name) if self.table is None else _table(module, self.table)[self.name]


class _All(NamedTuple):
    """All names of a module's table."""

    module: str
    table: str


def _table(module: types.ModuleType, name: str) -> dict[str, object]:
    """Returns a table of a module as a dict; a table that is a string lists names of the module itself."""
    table = getattr(module, name)
    names = table.split() if isinstance(table, str) else table
    return table if isinstance(table, dict) else {key: getattr(module, key) for key in names}


def _from(module: str, names: str, table: str | None = None) -> dict[str, object]:
    return {name: _At(module, name, table) for name in names.split()}


def _all(module: str, *tables: str) -> dict[str, object]:
    return {f"*{table}": _All(module, table) for table in tables}


def _import(module: str) -> Any:
    """Import a module of `replicax.tf`; with `_core.` before its name, one of the modules that the core offers."""
    name = module.removeprefix("_core.")
    return importlib.import_module(f"replicax.tf.{module}") if name == module else getattr(_core, name)


# The version of TensorFlow that the names follow.
VERSION = "2.21.0"

_ELEMENTWISE = """abs acos acosh add add_n asin asinh atan atan2 atanh cos cosh cumsum divide equal exp floor greater
greater_equal less less_equal logical_and logical_not logical_or maximum minimum multiply negative not_equal pow round
scalar_mul sigmoid sign sin sinh sqrt square subtract tan tanh truediv"""
_REDUCTIONS = "reduce_all reduce_any reduce_logsumexp reduce_max reduce_mean reduce_min reduce_prod reduce_sum"
_MATH = """accumulate_n angle bessel_i0 bessel_i0e bessel_i1 bessel_i1e betainc ceil conj count_nonzero cumprod
cumulative_logsumexp digamma divide_no_nan erf erfc erfcinv erfinv expm1 floordiv floormod igamma igammac imag
invert_permutation is_finite is_inf is_nan is_non_decreasing is_strictly_increasing lbeta lgamma log log1p log_sigmoid
logical_xor mod multiply_no_nan ndtri nextafter polygamma polyval real reciprocal reciprocal_no_nan
reduce_euclidean_norm reduce_std reduce_variance rint rsqrt squared_difference xdivy xlog1py xlogy zero_fraction zeta"""
_ARRAYS = """broadcast_to concat ensure_shape expand_dims eye fill
get_static_value identity_n linspace meshgrid one_hot ones ones_like pad parallel_stack range repeat reshape
reverse reverse_sequence roll sequence_mask slice split squeeze stack strided_slice tile transpose
unstack zeros zeros_like"""
_SHAPES = "broadcast_dynamic_shape broadcast_static_shape rank shape shape_n size"
_INDEXING = """argmax argmin argsort boolean_mask dynamic_partition dynamic_stitch gather gather_nd scatter_nd
searchsorted sort tensor_scatter_nd_add tensor_scatter_nd_max tensor_scatter_nd_min tensor_scatter_nd_sub
tensor_scatter_nd_update unique unique_with_counts unravel_index where"""
_FLOW = """case cond control_dependencies custom_gradient device executing_eagerly foldl foldr get_current_name_scope
get_logger grad_pass_through group init_scope inside_function is_symbolic_tensor map_fn no_op recompute_grad scan
stop_gradient switch_case timestamp tuple vectorized_map while_loop"""
_INITIALIZERS = """constant_initializer ones_initializer random_normal_initializer random_uniform_initializer
zeros_initializer"""
_LINALG = """adjoint band_part cholesky cholesky_solve cross det diag diag_part eig eigh eigvals eigvalsh expm inv
logdet lstsq matrix_rank matrix_transpose matvec normalize pinv qr set_diag slogdet solve svd tensor_diag
tensor_diag_part trace triangular_solve"""
_NN = """batch_normalization bias_add compute_average_loss crelu dropout elu gelu l2_loss leaky_relu
local_response_normalization log_poisson_loss log_softmax lrn moments relu relu6 scale_regularization_loss selu
sigmoid_cross_entropy_with_logits silu softmax softmax_cross_entropy_with_logits softplus softsign
sparse_softmax_cross_entropy_with_logits swish weighted_cross_entropy_with_logits weighted_moments"""
_CANDIDATES = """all_candidate_sampler compute_accidental_hits fixed_unigram_candidate_sampler
learned_unigram_candidate_sampler"""
_CONVOLUTIONS = """atrous_conv2d conv1d conv1d_transpose conv2d conv2d_transpose conv3d conv3d_transpose conv_transpose
convolution depthwise_conv2d pool separable_conv2d"""
_EXAMPLES = "BytesList Example Feature FeatureList FeatureLists Features FloatList Int64List SequenceExample"
_FEATURES = "FixedLenFeature FixedLenSequenceFeature RaggedFeature SparseFeature VarLenFeature"
_TABLES = "StaticHashTable StaticVocabularyTable"
_INITIALIZED = "KeyValueTensorInitializer TextFileIndex TextFileInitializer"
_STATISTICS = "batch_norm_with_global_normalization normalize_moments sufficient_statistics"
_SPECS = "IndexedSlicesSpec NoneTensorSpec OptionalSpec TensorArraySpec TypeSpec type_spec_from_value"
_STRINGS = "decode_base64 decode_compressed decode_json_example encode_base64"
_JPEG = "decode_and_crop_jpeg encode_jpeg extract_jpeg_shape is_jpeg"
_FORMATS = "decode_bmp decode_gif decode_image decode_jpeg decode_png decode_webp encode_png"
_SIZES = "AUTOTUNE INFINITE_CARDINALITY UNKNOWN_CARDINALITY"
_CLIPS = "clip_by_global_norm clip_by_norm clip_by_value"

NAMESPACES: dict[str, tuple[str, dict[str, object]]] = {
    "": (
        "",
        {
            **_dtypes.DTYPES,
            **_from("_ops", "constant convert_to_tensor identity is_tensor"),
            **_from("_math", f"{_ELEMENTWISE} {_REDUCTIONS} {_CLIPS} realdiv truncatediv truncatemod"),
            **_from("_arrays", _ARRAYS),
            **_from("_shapes", _SHAPES),
            **_from("_casts", "bitcast cast complex saturate_cast"),
            **_from("_indexing", _INDEXING),
            **_from("_flow", _FLOW),
            **_from("_linalg", "eig eigvals einsum matmul norm tensordot"),
            **_from("_initializers", _INITIALIZERS),
            **_from("_debugging", "Assert assert_rank"),
            **_from("_debugging", "assert_equal assert_greater assert_less", "COMPARISONS"),
            "DType": _dtypes.DType,
            "Tensor": _host.Tensor,
            "TensorShape": specs.TensorShape,
            "as_dtype": _dtypes.as_dtype,
            **_from("_callbacks", "numpy_function py_function"),
            **_from("_conversions", "register_tensor_conversion_function"),
            **_from("_device_specs", "DeviceSpec"),
            **_from("_module", "Module"),
            **_from("_tensor_array", "TensorArray"),
            **_from("_type_specs", _SPECS),
            **_from("_strings", "as_string print"),
            **_from("_serialization", "make_ndarray make_tensor_proto"),
            **_from("_paddings", "batch_to_space required_space_to_batch_paddings space_to_batch"),
            **_from("_statistics", "histogram_fixed_width histogram_fixed_width_bins"),
            "matrix_square_root": _At("_factorizations", "sqrtm"),
            "space_to_batch_nd": _At("_paddings", "space_to_batch"),
            **_from("_core", "SparseTensor SparseTensorSpec"),
            "newaxis": None,
        },
    ),
    "math": (
        "Mathematics.",
        {
            **_from("_math", f"{_ELEMENTWISE} {_REDUCTIONS} {_MATH}"),
            **_from("_indexing", "argmax argmin"),
            **_from("_linalg", "l2_normalize"),
            **_from("_nn", "log_softmax softmax softplus softsign"),
            **_from("_segments", "bincount confusion_matrix in_top_k top_k"),
            **_all("_segments", "SEGMENTS"),
        },
    ),
    "nn": (
        "Neural networks.",
        {
            **_from("_nn", _NN),
            **_from("_convolutions", _CONVOLUTIONS),
            **_all("_convolutions", "POOLING"),
            **_from("_math", "sigmoid tanh zero_fraction"),
            **_from("_linalg", "l2_normalize"),
            **_from("_segments", "in_top_k top_k"),
            **_from("_indexing", "embedding_lookup"),
            **_from("_sparse_embeddings", "embedding_lookup_sparse safe_embedding_lookup_sparse"),
            **_from("_arrays", "depth_to_space space_to_depth"),
            **_from("_sampled_losses", "nce_loss sampled_softmax_loss"),
            **_from("_candidates", _CANDIDATES),
            **_all("_ctc", "CTC"),
            **_from("_morphology", "dilation2d erosion2d max_pool_with_argmax"),
            **_from("_paddings", "space_to_batch"),
            **_from("_statistics", _STATISTICS),
        },
    ),
    "nn.experimental": ("Names that TensorFlow keeps under `experimental`.", _from("_nn", "stateless_dropout")),
    "linalg": (
        "Linear algebra.",
        {
            **_from("_linalg", f"{_LINALG} einsum l2_normalize matmul norm tensordot"),
            **_from("_arrays", "eye"),
            **_from("_math", "global_norm"),
            **_all("_factorizations", "FACTORS"),
        },
    ),
    "random": ("Random numbers.", {**_all("_random", "RANDOM"), **_all("_candidates", "SAMPLERS")}),
    "signal": ("Signals.", {**_all("_fourier", "FOURIER"), **_all("_signal", "SIGNAL")}),
    "quantization": ("Rounding to few bits.", _all("_quantization", "QUANTIZATION")),
    "sets": ("Sets in rows.", _all("_sets", "SETS")),
    "random.experimental": (
        "Names that TensorFlow keeps under `experimental`.",
        {
            **_from("_random", "Algorithm Generator get_global_generator set_global_generator stateless_shuffle"),
            "stateless_fold_in": _At("_random", "fold_in"),
            "stateless_split": _At("_random", "split"),
        },
    ),
    "raw_ops": ("Operations under the names of TensorFlow's kernels.", _all("_raw_ops", "RAW_OPS")),
    "xla": ("What XLA compiles.", {}),
    "xla.experimental": ("What XLA compiles.", _from("_xla", "compile jit_scope")),
    "bitwise": ("Bitwise operations on integers.", _all("_math", "BITWISE")),
    "strings": ("Strings.", {**_all("_strings", "STRINGS"), **_all("_text", "TEXT")}),
    "lookup": ("Tables.", {**_from("_tables", _TABLES), **_from("_table_initializers", _INITIALIZED)}),
    "lookup.experimental": ("Tables that can be changed.", _from("_tables", "DenseHashTable MutableHashTable")),
    "sparse": (
        "Sparse tensors.",
        {**_all("_sparse", "SPARSE"), **_from("_core", "SparseTensor")},
    ),
    "ragged": ("Rows of different lengths.", _all("_ragged", "RAGGED")),
    "io": (
        "Files.",
        {
            **_from("_gfile", "matching_files read_file write_file"),
            **_from("_core", "TFRecordOptions TFRecordWriter"),
            **_from("_features", _FEATURES),
            **_from("_parse", "parse_example parse_single_example"),
            **_from("_csv", "decode_csv"),
            **_from("_sequences", "parse_sequence_example parse_single_sequence_example"),
            **_from("_serialization", f"{_STRINGS} decode_raw parse_tensor serialize_tensor"),
            **_from("_images.jpeg", _JPEG),
            **_from("_images.formats", _FORMATS),
        },
    ),
    "image": (
        "Images.",
        {
            **_from("_images.jpeg", _JPEG),
            **_from("_images.formats", _FORMATS),
            **_all("_images.geometry", "GEOMETRY"),
            **_all("_images.colors", "COLORS"),
            **_all("_images.resizing", "RESIZING"),
            **_all("_images.randoms", "RANDOMS"),
            **_all("_images.boxes", "BOXES"),
            **_all("_images.quality", "QUALITY"),
        },
    ),
    "io.gfile": ("Files on any file system.", _all("_gfile", "GFILE")),
    "debugging": ("Assertions.", _all("_debugging", "COMPARISONS", "DEBUGGING")),
    "nest": (
        "Structures.",
        _from("_nests", "assert_same_structure flatten is_nested map_structure pack_sequence_as"),
    ),
    "errors": ("Exceptions.", _all("_exceptions", "ERRORS", "CODES")),
    "dtypes": (
        "Dtypes.",
        {
            **_dtypes.DTYPES,
            **_from("_casts", "cast complex saturate_cast"),
            "as_dtype": _dtypes.as_dtype,
            "DType": _dtypes.DType,
        },
    ),
    "summary": ("Summaries for TensorBoard.", _all("_summary", "SUMMARY")),
    "summary.experimental": (
        "Names that TensorFlow keeps under `experimental`.",
        _from("_summary", "get_step set_step summary_scope"),
    ),
    "config": ("Devices, and eager execution of functions.", _all("_config", "CONFIG")),
    "config.experimental": ("Names that TensorFlow keeps under `experimental`.", _all("_config", "EXPERIMENTAL")),
    "config.optimizer": ("Settings of compilation.", _all("_config", "OPTIMIZER")),
    "config.threading": ("Settings of threads.", _all("_config", "THREADING")),
    "test": ("Helpers for tests.", {**_all("_config", "TEST"), **_from("_test_case", "TestCase main")}),
    "version": (
        "The version of TensorFlow that these names follow.",
        {"VERSION": VERSION, "GIT_VERSION": f"replicax {__version__}"},
    ),
    "data": (
        "Datasets.",
        {
            **_from("_core.data", f"{_SIZES} DatasetSpec NumpyIterator Options ThreadingOptions"),
            "Iterator": _At("_core.data", "DatasetIterator"),
            **_from("_type_specs", "IteratorSpec"),
            **_from("_datasets", "Dataset FixedLengthRecordDataset TFRecordDataset TextLineDataset"),
        },
    ),
    "data.experimental": (
        "Options of datasets.",
        {
            **_from("_core.data", f"{_SIZES} AutoShardPolicy DistributeOptions Optional"),
            **_from("_core", "to_variant"),
            **_from("_datasets", "Counter from_variant"),
            **_from("_csv", "CsvDataset make_batched_features_dataset make_csv_dataset"),
            **_all("_data_experimental", "EXPERIMENTAL"),
        },
    ),
    "experimental": (
        "A value that may be missing, and NumPy's functions.",
        {
            **_from("_core.data", "Optional"),
            **_from("_numpy_names", "numpy"),
            **_from("_experimental", "async_clear_error async_scope"),
            **_from("_extension_types", "BatchableExtensionType ExtensionType ExtensionTypeSpec"),
        },
    ),
    "experimental.extension_type": ("Helpers for extension types.", _from("_extension_types", "as_dict")),
    "autograph": ("Control flow on tensors.", _from("_conversion", "to_graph")),
    "autograph.experimental": (
        "Control flow on tensors.",
        {
            **_from("_core.autograph_switch", "do_not_convert"),
            **_from("_loop_options", "set_loop_options"),
        },
    ),
    "train": (
        "Checkpoints and cluster descriptions.",
        {
            **_all("_core.train", "__all__"),
            **_from("_core.cluster_resolver", "ClusterDef ClusterSpec JobDef"),
            **_from("_protos", _EXAMPLES),
            **_from("_moving_averages", "ExponentialMovingAverage"),
        },
    ),
    "saved_model": (
        "Functions and variables in a folder.",
        {**_all("_saved_models", "__all__")},
    ),
    "saved_model.experimental": (
        "Names that TensorFlow keeps under `experimental`.",
        _from("_saved_models", "VariablePolicy"),
    ),
    "tpu": ("TPU systems.", {}),
    "tpu.experimental": ("TPU systems.", _all("_core.tpu", "__all__")),
    "profiler": ("Profiles.", {}),
    "profiler.experimental": ("Profiles that show steps and replicas by name.", _all("_profiler", "PROFILER")),
}


def names(namespace: str) -> list[str]:
    """Returns the names of a namespace of the table."""
    found: set[str] = set()
    for name, value in NAMESPACES[namespace][1].items():
        found |= _table(_import(value.module), value.table).keys() if isinstance(value, _All) else {name}
    return sorted(found)


def lookup(namespace: str, target: dict[str, object]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Returns `__getattr__` and `__dir__` for a module with the attributes `target`, which keep names once used."""
    table = NAMESPACES[namespace][1]
    missing = _absent.missing_from(namespace)

    def __getattr__(name: str) -> object:
        if isinstance(at := table.get(name), _At):
            target[name] = at.value()
        elif not name.startswith("_"):
            for of in table.values():
                if isinstance(of, _All):
                    target.update(_table(_import(of.module), of.table))
        return target[name] if name in target else missing(name)

    def __dir__() -> list[str]:
        return sorted({*target, *names(namespace)})

    return __getattr__, __dir__


def namespace(name: str, doc: str, **members: object) -> types.ModuleType:
    """Returns a module with these names; any other name raises an error that says what to use."""
    module = types.ModuleType(f"replicax.tf.{name}", doc)
    module.__dict__.update(members, __getattr__=_absent.missing_from(name))
    return module


def install(target: dict[str, object]) -> None:
    """Adds the modules of the namespaces, and the names whose values are in the table, to those of `replicax.tf`."""
    made = {"": target}
    for name, (doc, values) in NAMESPACES.items():
        if name:
            outer, _, inner = name.rpartition(".")
            made[outer][inner] = module = namespace(name, doc)
            made[name] = vars(module)
            made[name]["__getattr__"], made[name]["__dir__"] = lookup(name, made[name])
        made[name].update((key, value) for key, value in values.items() if not isinstance(value, (_At, _All)))
