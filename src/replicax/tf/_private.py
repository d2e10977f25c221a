"""TensorFlow's private modules, as far as public libraries use them: `tensorflow.python...`, `tensorflow.core...`.

They have public names of `replicax.tf`, and a few functions that no public name stands for.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import types
from collections.abc import Callable
from typing import Any, TypeVar

from replicax.tf import _absent
from replicax.tf._core import Tree
from replicax.tf._types import TensorLike

_T = TypeVar("_T")

# The modules in `tensorflow` whose names are private.
ROOTS = ("__internal__", "core", "python", "tools")

# Packages, their modules, and the namespaces where the modules' names are looked up ("." is `tf` itself). A single
# namespace after "=" is the module. `private=public` is a name that is another one in public.
_TABLE = """
__internal__ | decorator |
__internal__ | tracking | . train AutoTrackable=Module
__internal__ | types | . types.experimental
core.example | example_pb2 feature_pb2 | train
core.framework | attr_value_pb2 graph_pb2 node_def_pb2 summary_pb2 tensor_pb2 tensor_shape_pb2 types_pb2 | compat.v1
core.protobuf | config_pb2 meta_graph_pb2 rewriter_config_pb2 saved_model_pb2 saver_pb2 struct_pb2 | compat.v1
core.protobuf | tensorflow_server_pb2 | train
core.util | event_pb2 | compat.v1
python | tf2 pywrap_tensorflow | compat.v1
python | keras | =keras
python.autograph | operators | autograph.experimental
python.autograph.core | ag_ctx converter | autograph autograph.experimental
python.autograph.impl | api | autograph autograph.experimental
python.checkpoint | checkpoint checkpoint_management | train train.experimental
python.client | device_lib session | compat.v1
python.compat | compat v2_compat | compat.v1
python.data.experimental.ops | cardinality distribute interleave_ops | data.experimental data
python.data.ops | dataset_ops iterator_ops multi_device_iterator_ops options readers | data data.experimental
python.data.util | nest | =nest
python.distribute | central_storage_strategy cross_device_ops input_lib | distribute distribute.experimental
python.distribute | distribute_lib | distribute distribute.experimental
python.distribute | distribute_utils distribution_strategy_context one_device_strategy | distribute
python.distribute | collective_all_reduce_strategy mirrored_strategy reduce_util | distribute distribute.experimental
python.distribute | combinations device_util multi_worker_util strategy_combinations test_util | distribute test
python.distribute | parameter_server_strategy_v2 sharded_variable | distribute distribute.experimental.partitioners
python.distribute | cluster_resolver | =distribute.cluster_resolver
python.distribute | tpu_strategy | distribute
python.distribute | values | types.experimental.distributed distribute . DistributedVariable=Variable
python.distribute.cluster_resolver | cluster_resolver tfconfig_cluster_resolver | distribute.cluster_resolver
python.distribute.cluster_resolver | slurm_cluster_resolver gce_cluster_resolver | distribute.cluster_resolver
python.distribute.cluster_resolver | kubernetes_cluster_resolver tpu_cluster_resolver | distribute.cluster_resolver
python.distribute.coordinator | cluster_coordinator | distribute.coordinator
python.eager | backprop | .
python.eager | context | . distribute config config.experimental
python.eager | def_function function monitoring polymorphic_function remote test wrap_function | . config test
python.eager.polymorphic_function | concrete_function polymorphic_function | . types.experimental
python.framework | composite_tensor constant_op device_spec function importer indexed_slices | .
python.framework | extension_type | experimental
python.framework | config | config config.experimental
python.framework | dtypes | =dtypes
python.framework | errors errors_impl | =errors
python.framework | graph_util sparse_tensor tensor tensor_conversion tensor_shape tensor_spec | . compat.v1
python.framework | ops | . compat.v1 EagerTensor=Tensor
python.framework | random_seed | random compat.v1
python.framework | tensor_conversion_registry type_spec type_spec_registry versions smart_cond | . version
python.framework | tensor_util | . constant_value=get_static_value is_tf_type=is_tensor
python.framework | test_util | test TensorFlowTestCase=test.TestCase
python.keras | activations applications backend callbacks constraints datasets initializers | =keras.
python.keras | layers losses metrics models optimizers preprocessing regularizers utils | =keras.
python.keras.engine | base_layer input_spec sequential training functional | keras.layers keras.models keras
python.keras.layers | convolutional core embeddings merge normalization pooling recurrent | keras.layers
python.keras.layers | advanced_activations dense_attention einsum_dense wrappers | keras.layers
python.keras.optimizer_v2 | adadelta adagrad adam adamax ftrl nadam rmsprop | keras.optimizers
python.keras.optimizer_v2 | gradient_descent optimizer_v2 | keras.optimizers
python.keras.optimizer_v2 | learning_rate_schedule | keras.optimizers.schedules
python.keras.preprocessing | image sequence text | =keras.preprocessing.
python.keras.saving | save hdf5_format | keras.models keras.saving
python.keras.utils | conv_utils data_utils generic_utils layer_utils losses_utils metrics_utils | keras.utils
python.keras.utils | np_utils tf_utils vis_utils | keras.utils
python.lib.io | file_io tf_record | io io.gfile
python.module | module | .
python.ops | array_ops array_ops_stack check_ops clip_ops control_flow_ops | . math debugging nn
python.ops | control_flow_switch_case | .
python.ops | cond control_flow_assert control_flow_case while_loop map_fn functional_ops script_ops | . debugging
python.ops | custom_gradient gradients gradients_impl logging_ops sort_ops string_ops tensor_array_ops | . strings io
python.ops | data_flow_ops lookup_ops | . lookup
python.ops | image_ops image_ops_impl | image io
python.ops | init_ops init_ops_v2 resource_variable_ops state_ops variable_scope variables | . compat.v1
python.ops | io_ops parsing_ops | io .
python.ops | linalg_ops special_math_ops bitwise_ops | linalg . math bitwise
python.ops | math_ops gen_array_ops gen_math_ops gen_nn_ops nn nn_impl nn_ops embedding_ops | . math nn
python.ops | candidate_sampling_ops ctc_ops | nn
python.ops | random_ops stateless_random_ops stateful_random_ops | random random.experimental
python.ops | sparse_ops | sparse
python.ops | summary_ops_v2 | summary summary.experimental
python.ops.linalg | linalg linalg_impl | linalg
python.ops.losses | loss_reduction losses_impl util | keras.losses compat.v1
python.ops.ragged | ragged_factory_ops ragged_tensor ragged_tensor_shape | . ragged
python.platform | app flags resource_loader | compat.v1
python.platform | gfile | compat.v1.gfile io.gfile
python.platform | test googletest | test
python.platform | tf_logging | =compat.v1.logging
python.profiler | profiler_v2 trace | profiler.experimental
python.saved_model | load save loader_impl save_options load_options signature_constants tag_constants | saved_model
python.summary | summary summary_iterator writer | summary compat.v1
python.tpu | device_assignment topology | tpu.experimental
python.tpu | embedding_context_utils |
python.trackable | autotrackable base data_structures resource | . train train.experimental AutoTrackable=Module
python.training | checkpoint_management checkpoint_utils moving_averages saver server_lib | train distribute compat.v1
python.training | optimizer training training_util py_checkpoint_reader coordinator | train compat.v1
python.training.tracking | base data_structures tracking util | . train train.experimental AutoTrackable=Module
python.types | core data distribute | types.experimental . types.experimental.distributed
python.util | compat | =compat
python.util | nest | =nest
python.util | deprecation dispatch function_utils object_identity tf_contextlib tf_decorator tf_export tf_inspect | .
tools.docs | doc_controls |
"""


def _modules() -> dict[str, str]:
    """Returns where to look for the names of each module; packages have no names but their modules'."""
    found: dict[str, str] = {}
    for row in _TABLE.strip().splitlines():
        package, modules, places = (part.strip() for part in row.split("|"))
        parts = package.split(".")
        for end in range(1, len(parts) + 1):
            found.setdefault(".".join(parts[:end]), "")
        for name in modules.split():
            found[f"{package}.{name}"] = places + name if places.endswith(".") and places != "." else places
    return found


MODULES = _modules()


def module(name: str) -> types.ModuleType:
    """Returns the module with a name in `tensorflow`, such as "python.framework.ops".

    Raises:
        ModuleNotFoundError: there is none.
    """
    if name not in MODULES:
        raise ModuleNotFoundError(_absent.message(name), name=f"tensorflow.{name}")
    return _made(name)


@functools.cache
def _made(name: str) -> types.ModuleType:
    places = MODULES[name].split()
    if places and places[0].startswith("="):
        same: types.ModuleType = _public(places[0][1:])
        return same
    renamed = dict(place.split("=") for place in places if "=" in place)
    made = types.ModuleType(f"replicax.tf.{name}", "A private module of TensorFlow's, made of public names.")
    made.__dict__.update(_own().get(name, {}))

    def __getattr__(attribute: str) -> Any:
        if not attribute.startswith("__"):
            if f"{name}.{attribute}" in MODULES:
                return _made(f"{name}.{attribute}")
            for public in [renamed[attribute]] if attribute in renamed else _in_places(places, attribute):
                try:
                    return _public(public)
                except AttributeError:
                    pass
        found = (_absent.alternative(public) for public in _in_places(places, attribute))
        return _absent.missing_from(name, next(filter(None, found), ""))(attribute)

    made.__dict__["__getattr__"] = __getattr__
    return made


def _in_places(places: list[str], name: str) -> list[str]:
    return [name if place == "." else f"{place}.{name}" for place in places if "=" not in place]


def _public(name: str) -> Any:
    return functools.reduce(getattr, name.split("."), importlib.import_module("replicax.tf"))


# What no public name stands for.


def _decorator(*_: object, **__: object) -> Callable[[_T], _T]:
    """Returns a decorator that leaves what it decorates as it is."""
    return lambda decorated: decorated


def _smart_cond(pred: TensorLike, true_fn: Tree = None, false_fn: Tree = None, name: str | None = None) -> Tree:
    """Calls one of two functions where the condition is known, and is `tf.cond` where not."""
    known = _smart_constant_value(pred)
    return _public("cond")(pred, true_fn, false_fn) if known is None else (true_fn if known else false_fn)()


def _smart_constant_value(pred: TensorLike) -> object:
    """Returns the value of a condition where it is known while a function is traced, and None where not."""
    return pred if isinstance(pred, (bool, int)) else _public("get_static_value")(pred)


def _list_local_devices(session_config: object = None) -> list[types.SimpleNamespace]:
    """Lists the devices of this process, as objects with a `name` and a `device_type`."""
    devices = _public("config.list_logical_devices")()
    return [types.SimpleNamespace(name=each.name, device_type=each.device_type, memory_limit=0) for each in devices]


def _num_gpus() -> int:
    return len(_public("config.list_logical_devices")("GPU"))


def _context() -> types.SimpleNamespace:
    """Returns the state of this thread: where operations run is JAX's choice, also while a function is traced."""
    device = types.SimpleNamespace(device_type=None)
    return types.SimpleNamespace(executing_eagerly=lambda: True, device_spec=device, num_gpus=_num_gpus)


def _make_decorator(
    target: Callable[..., object], decorator_func: Callable[..., object], *_: object, **__: object
) -> Callable[..., object]:
    """Returns `decorator_func` as a decorated form of `target`."""
    functools.update_wrapper(decorator_func, target)
    return decorator_func


class _Metric:
    """A count or a value of TensorFlow's monitoring, which nobody reads."""

    def __init__(self, *_: object, **__: object) -> None:
        self._value: Any = None

    def get_cell(self, *labels: str) -> _Metric:
        """Returns the metric itself, whatever the labels."""
        return self

    def set(self, value: object) -> None:
        """Sets the value."""
        self._value = value

    def value(self) -> object:
        """Returns the value."""
        return self._value

    def increase_by(self, value: int | float) -> None:
        """Adds to the value."""
        self._value = (self._value or 0) + value

    def add(self, value: object) -> None:
        """Does nothing: samples are not kept."""


@functools.cache
def _own() -> dict[str, dict[str, Any]]:
    inspection = {name: getattr(inspect, name) for name in dir(inspect) if not name.startswith("_")}
    unwrapping = {"unwrap": lambda function: ([], inspect.unwrap(function)), "make_decorator": _make_decorator}
    deprecations = ["deprecated", "deprecated_args", "deprecated_arg_values", "deprecated_alias"]
    kinds = ["BoolGauge", "IntGauge", "StringGauge", "Counter", "Sampler", "Buckets", "ExponentialBuckets"]
    exports = ["tf_export", "keras_export", "estimator_export"]
    return {
        "__internal__.decorator": unwrapping,
        "python.tf2": {"enabled": lambda: True, "enable": lambda: None},
        "python.client.device_lib": {"list_local_devices": _list_local_devices},
        "python.eager.context": {"context": _context, "num_gpus": _num_gpus},
        "python.eager.monitoring": dict.fromkeys(kinds, _Metric),
        "python.tpu.embedding_context_utils": {"SequentialEmbeddingContext": lambda: contextlib.nullcontext()},
        "python.framework.smart_cond": {"smart_cond": _smart_cond, "smart_constant_value": _smart_constant_value},
        "python.util.deprecation": {"_PRINT_DEPRECATION_WARNINGS": False, **dict.fromkeys(deprecations, _decorator)},
        "python.util.tf_contextlib": {"contextmanager": contextlib.contextmanager},
        "python.util.tf_decorator": unwrapping,
        "python.util.tf_export": dict.fromkeys(exports, _decorator),
        "python.util.tf_inspect": inspection,
    }
