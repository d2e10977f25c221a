"""`tf.keras`, which is Keras itself."""

from __future__ import annotations


def test_another_backend_is_refused(run_python):
    ended = run_python(
        """
        import os
        os.environ["KERAS_BACKEND"] = "numpy"
        import keras
        import replicax.tf as tf
        try:
            tf.keras
        except RuntimeError as error:
            print(error)
        """
    )
    assert ended.stdout.startswith("Keras runs on its backend 'numpy' already, and replicax needs 'jax'."), ended.stderr
    assert "KERAS_BACKEND=jax" in ended.stdout


def test_the_namespace_is_keras_itself_loaded_on_use(run_python):
    """With the names that TensorFlow has in `tf.keras`, and its callback for TensorBoard without TensorFlow."""
    ended = run_python(
        """
        import glob, sys
        import numpy as np
        import replicax.tf as tf
        assert "keras" not in sys.modules
        from replicax.tf.keras import layers
        from replicax.tf.keras.losses import MeanSquaredError
        import keras
        assert layers.Dense is keras.layers.Dense and MeanSquaredError is keras.losses.MeanSquaredError
        assert tf.keras.backend.backend() == "jax" and tf.keras.losses.Reduction.NONE == "none"
        assert tf.losses.MSE is tf.keras.losses.MSE and tf.metrics.Mean is keras.metrics.Mean
        assert tf.optimizers.Adam is keras.optimizers.Adam and tf.initializers.Zeros is keras.initializers.Zeros

        with tf.distribute.MirroredStrategy().scope():
            model = tf.keras.Sequential([layers.Dense(1)])
            model.compile("sgd", "mse")
        logs = tf.keras.callbacks.TensorBoard("logs", histogram_freq=1, profile_batch=(1, 2))
        model.fit(np.ones((4, 2)), np.ones((4, 1)), validation_split=0.5, epochs=3, callbacks=[logs], verbose=0)
        profiled = glob.glob("logs/train/plugins/profile/*/*.xplane.pb")
        assert profiled or sys.version_info < (3, 12), glob.glob("logs/**", recursive=True)  # as Keras requires
        written = {path: open(path, "rb").read() for path in glob.glob("logs/*/events*")}
        assert len(written) == 2 and any(b"epoch_loss" in events and b"kernel" in events for events in written.values())
        print("fine")
        """,
        env={"KERAS_BACKEND": None},
    )
    assert ended.stdout == "fine\n", ended.stderr
