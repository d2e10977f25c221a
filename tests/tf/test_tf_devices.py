"""How programs of TensorFlow list devices, and begin on a TPU machine."""

from __future__ import annotations

import pytest


def test_listing_devices_leaves_them_to_be_configured(run_python):
    """The preambles that programs begin with, on a machine with two GPUs (as far as the CUDA driver says) and here."""
    done = run_python(
        """
        import os, warnings
        import jax, replicax.tf as tf
        from replicax._base import devices as _devices
        from replicax._base import jax_internals
        from replicax.tf import _accelerators as accelerators

        def names(kind, visible=False):
            listed = (tf.config.get_visible_devices if visible else tf.config.list_physical_devices)(kind)
            return [device.name.removeprefix("/physical_device:") for device in listed]

        here = accelerators._plugins, accelerators._cuda_devices
        accelerators._plugins, accelerators._cuda_devices = lambda: {"xla_cuda12"}, lambda: 2
        print(names("GPU"), names("TPU"), names("CPU"), names(None), tf.test.is_gpu_available())
        gpus = tf.config.list_physical_devices("GPU")
        for gpu in gpus:
            tf.config.experimental.set_memory_growth(gpu, True)
        tf.config.set_visible_devices(gpus[1], "GPU")
        print(os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"], names("GPU", visible=True), names("GPU"))
        print(jax.config.read("jax_cuda_visible_devices"))
        tf.config.set_visible_devices(gpus, "GPU")
        jax.config.update("jax_platforms", "cpu")
        print(names("GPU"), jax_internals.backend_started())
        jax.config.update("jax_platforms", None)

        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            part = tf.config.LogicalDeviceConfiguration(memory_limit=1024)
            tf.config.set_logical_device_configuration(gpus[0], [part])
            print(names("GPU"), _devices._virtual, "XLA_PYTHON_CLIENT_MEM_FRACTION" in str(told[-1].message))
            tf.config.set_logical_device_configuration(gpus[0], [part] * 2)
            print(_devices._virtual["GPU"], "/physical_device:GPU:0" in str(told[-1].message), len(told))
        _devices.set_virtual_devices({})

        accelerators._plugins, accelerators._cuda_devices = here
        tf.config.list_physical_devices()
        tf.config.set_visible_devices([], "GPU")
        cpus = tf.config.list_physical_devices("CPU")
        tf.config.set_logical_device_configuration(cpus[0], [tf.config.LogicalDeviceConfiguration()] * 2)
        print(jax_internals.backend_started(), len(tf.config.list_logical_devices("CPU")))
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        print(strategy.num_replicas_in_sync)
        """,
        env={"JAX_PLATFORMS": None, "REPLICAX_VIRTUAL_DEVICES": None},
    )
    assert done.stdout.splitlines() == [
        "['GPU:0', 'GPU:1'] [] ['CPU:0'] ['CPU:0', 'GPU:0', 'GPU:1'] True",
        "false ['GPU:1'] ['GPU:0', 'GPU:1']",
        "1",
        "[] False",
        "['GPU:0', 'GPU:1'] {} True",
        "2 True 2",
        "False 2",
        "2",
    ], done.stderr


def test_a_tensorflow_program_for_a_tpu_machine(run_python):
    done = run_python(
        """
        import replicax.tf as tf
        import jax.numpy as jnp

        resolver = tf.distribute.cluster_resolver.TPUClusterResolver("")
        tf.config.experimental_connect_to_cluster(resolver)
        topology = tf.tpu.experimental.initialize_tpu_system(resolver)
        assert tf.distribute.TPUStrategy(resolver).num_replicas_in_sync == resolver.num_accelerators()["TPU"] == 8
        older = tf.compat.v1.distribute.experimental.TPUStrategy(resolver, steps_per_run=2)
        assert (older.steps_per_run, older.num_replicas_in_sync) == (2, 8)
        pairs = tf.tpu.experimental.DeviceAssignment.build(topology, computation_shape=[1, 1, 1, 2], num_replicas=4)
        strategy = tf.distribute.TPUStrategy(experimental_device_assignment=pairs)
        assert tf.distribute.experimental.TPUStrategy is not tf.distribute.TPUStrategy
        with strategy.scope():
            w = tf.Variable(tf.ones([4, 8]))
        data = strategy.experimental_distribute_dataset(
            tf.data.Dataset.from_tensor_slices(tf.ones([16, 4])).batch(8, drop_remainder=True)
        )

        @tf.function
        def step(iterator):
            def replica(x):
                y = strategy.experimental_split_to_logical_devices(tf.matmul(x, w), [1, 2])
                return tf.reduce_sum(y)

            return strategy.reduce("SUM", strategy.run(replica, args=(next(iterator),)), axis=None)

        iterator = iter(data)
        print(strategy.num_replicas_in_sync, float(step(iterator)), float(step(iterator)))
        """,
        env={"REPLICAX_VIRTUAL_DEVICES": "TPU:8"},
    )
    assert (done.returncode, done.stdout.split()) == (0, ["4", "256.0", "256.0"]), done.stderr


@pytest.mark.parametrize(
    ("variable", "value"), [("REPLICAX_VIRTUAL_DEVICES", "GPU-4"), ("REPLICAX_COMPILATION_CACHE", __file__)]
)
def test_settings_that_are_wrong_stop_the_import(variable, value, run_python):
    done = run_python("import replicax.tf", env={variable: value}, fresh=True)
    assert done.returncode == 1 and value in done.stderr.splitlines()[-1], done.stderr
