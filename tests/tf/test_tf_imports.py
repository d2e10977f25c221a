"""TensorFlow's names under TensorFlow's own module names: `replicax.tf.install()`."""

from __future__ import annotations


def test_all_forms_of_import_give_one_set_of_modules(run_tf):
    run_tf("""
import importlib, importlib.metadata, importlib.util
tf.install()
tf.install()
import tensorflow
import tensorflow as again
import tensorflow.compat.v2 as v2
import tensorflow.compat.v1 as v1
import tensorflow.io.gfile as files
from tensorflow import keras, data
from tensorflow.keras import layers
from tensorflow.keras.layers import Dense
from tensorflow.math import add
from replicax.tf.math import add as ours
import tensorflow.keras as again_keras
import tensorflow.keras.layers as again_layers
import keras as of_its_own
assert tensorflow is again is v2 is tf and v1 is tf.compat.v1 and files is tf.io.gfile and data is tf.data
assert keras is again_keras is tf.keras and layers is again_layers is keras.layers
assert Dense is layers.Dense is of_its_own.layers.Dense and add is ours is tf.math.add
assert keras.backend.backend() == "jax"
assert tf.__version__ == tf.version.VERSION == importlib.metadata.version("tensorflow") == "2.21.0"
assert importlib.util.find_spec("tensorflow") and tf.__spec__.name == "replicax.tf"

# Keras goes on as though TensorFlow were not there.
from keras.src.utils import backend_utils, module_utils
assert not module_utils.tensorflow.available
asked = []
tf.function(lambda x: asked.append(backend_utils.in_tf_graph()) or x)(tf.ones([2]))
assert asked == [False]
assert keras.utils.timeseries_dataset_from_array(np.arange(4.0), None, 2).cardinality() == 1  # by tf.data
keras.utils.set_random_seed(1)
first = tf.random.normal([2])
keras.utils.set_random_seed(1)
np.testing.assert_array_equal(tf.random.normal([2]), first)
model = keras.Sequential([layers.Dropout(0.5), Dense(2)])
model.compile("sgd", "mse")
model.fit(np.ones((8, 3)), np.ones((8, 2)), verbose=0)

# Private modules that libraries use are made of the public names.
from tensorflow.python.framework import dtypes, ops
from tensorflow.python.framework.smart_cond import smart_cond
from tensorflow.python.ops import array_ops, math_ops
from tensorflow.python.util import deprecation, nest, tf_export, tf_inspect
from tensorflow.python.distribute import distribution_strategy_context as context, values
import tensorflow.python.distribute.values as same_values
from tensorflow.python.keras.layers import Dense as private_dense
from tensorflow.python.keras.utils.np_utils import to_categorical
from tensorflow.python.client import device_lib
import tensorflow.experimental.numpy as tnp
tnp.experimental_enable_numpy_behavior()
assert isinstance(tnp.ones([2]), tnp.ndarray) and tnp.random.randn(2, 3).shape == (2, 3)
assert isinstance(tnp.ones([2]), tf.__internal__.types.Tensor)
raises(AttributeError, lambda: tnp.nosuch, "experimental.numpy.nosuch")
assert ops.convert_to_tensor is tf.convert_to_tensor and isinstance(tf.ones([]), ops.EagerTensor)
assert array_ops.reshape is tf.reshape and math_ops.reduce_sum is tf.reduce_sum and dtypes is tf.dtypes
assert nest is tf.nest and tf_inspect.signature(tf.reshape) and context.get_strategy is tf.distribute.get_strategy
assert values is same_values and private_dense is Dense and to_categorical is keras.utils.to_categorical
assert smart_cond(True, lambda: 1, lambda: 2) == 1 and smart_cond(tf.constant(False), lambda: 1, lambda: 2) == 2
assert [each.device_type for each in device_lib.list_local_devices()] == ["CPU", "CPU"]
assert deprecation.deprecated(None, "text")(len) is tf_export.tf_export("len")(len) is len

tf.uninstall()
assert "tensorflow" not in sys.modules and "tensorflow.io.gfile" not in sys.modules
sys.modules["tensorflow"] = type(sys)("tensorflow")
raises(RuntimeError, tf.install, "imported already", "replicax run-tf")
""")


def test_names_of_tensorflow_1_take_its_arguments_and_are_functions_of_tensorflow_2(run_tf):
    run_tf("""
v1 = tf.compat.v1
x = tf.constant([[1.0, 3.0], [2.0, 0.0]])
same = np.testing.assert_array_equal
same(v1.reduce_sum(x, reduction_indices=[1], keep_dims=True), [[4], [2]])
same(v1.reduce_sum(x, 0, True), [[3, 3]])
same(v1.argmax(x, dimension=1), [1, 0])
same(v1.math.in_top_k(x, tf.constant([1, 1]), 1), [True, False])
same(v1.nn.softmax(x, dim=0), tf.nn.softmax(x, axis=0))
same(v1.nn.dropout(x, 1.0), x)
same(v1.nn.conv2d(x[None, ..., None], filter=tf.ones([2, 2, 1, 1]), strides=[1] * 4, padding="VALID"), [[[[6]]]])
same(v1.log(v1.to_float(1)), 0)
same(v1.where(tf.constant([True, False]), x[0], x[1]), [1, 0])
assert v1.expand_dims(x, dim=0).shape == (1, 2, 2) and v1.transpose(x, None, "name").shape == (2, 2)
assert v1.keras is tf.keras and v1.VERSION == tf.__version__ and v1.train.Checkpoint is tf.train.Checkpoint
v1.set_random_seed(1)
first = v1.random_normal([2])
tf.random.set_seed(1)
same(first, tf.random.normal([2]))
assert v1.gfile.Exists(".") and v1.flags.DEFINE_string and v1.app.run
raises(TypeError, lambda: v1.argmax(x, nosuch=1), "argmax", "'nosuch'", "dimension")
raises(AttributeError, lambda: v1.layers.dense, "compat.v1.layers", "tf.keras.layers")
raises(AttributeError, lambda: v1.nn.static_rnn, "compat.v1.nn.static_rnn")
raises(AttributeError, lambda: v1.image.resize, "compat.v1.image")

# How programs of TensorFlow 2 set the options of GPUs' memory.
config = v1.ConfigProto(allow_soft_placement=True)
config.gpu_options.allow_growth = True
with v1.Session(config=config) as session:
    raises(RuntimeError, lambda: session.run(x), "tf.function")
""")


def test_what_is_not_there_is_an_error_that_says_where_it_was_used_and_what_to_use(run_tf):
    run_tf("""
tf.install()
def imports(text):
    return lambda: exec(compile(text, "train.py", "exec"), {"tf": tf})
raises(ImportError, imports("from tensorflow import audio"), "'audio' (train.py:1)", "librosa")
raises(ImportError, imports("from replicax.tf import audio"), "'audio' (train.py:1)", "librosa")
raises(ImportError, imports("\\nfrom tensorflow.nn import RNNCell"), "'nn.RNNCell' (train.py:2)", "flax.nnx.RNN")
raises(ModuleNotFoundError, imports("import tensorflow.contrib.slim"), "'contrib' (train.py:1)", "reference/tf-names")
raises(ModuleNotFoundError, imports("import tensorflow.python.nosuch"), "'python.nosuch' (train.py:1)")
raises(ImportError, imports("from tensorflow.python.ops.math_ops import nosuch"), "python.ops.math_ops.nosuch")
raises(ModuleNotFoundError, imports("import tensorflow.Tensor"), "no module")
raises(AttributeError, imports("tf.audio.decode_wav"), "'audio' (train.py:1)", "librosa")
config = "from tensorflow.core.protobuf import config_pb2; config_pb2.GraphDef()"
raises(AttributeError, imports(config), "config_pb2.GraphDef", "reference/tf-names")
""")
