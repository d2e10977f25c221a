"""Names of `replicax.tf` whose results are no tensors: what they do."""


def test_loop_options_bound_the_loops_of_a_program(run_tf):
    run_tf(
        """
        import replicax.tf as tf

        @tf.function
        def loop(numbers, limit):
            while_count, range_count, row_sum = 0, 0, 0.0
            while while_count < tf.size(numbers):
                tf.autograph.experimental.set_loop_options(maximum_iterations=limit)
                while_count += 1
            for _ in tf.range(tf.size(numbers)):
                tf.autograph.experimental.set_loop_options(parallel_iterations=1, maximum_iterations=limit)
                range_count += 1
            for number in numbers:
                tf.autograph.experimental.set_loop_options(maximum_iterations=limit)
                row_sum += number
            return while_count, range_count, row_sum

        numbers = tf.constant([1.0, 2.0, 4.0, 8.0])
        assert [int(x) for x in loop(numbers, 3)] == [3, 3, 7]
        assert [int(x) for x in loop(numbers, tf.constant(2))] == [2, 2, 3]
        assert [int(x) for x in loop(numbers, 9)] == [4, 4, 15]

        assert [int(x) for x in loop(numbers, -1)] == [0, 0, 0]
        assert [int(x) for x in loop(numbers[:0], 3)] == [0, 0, 0]
        assert [int(x) for x in loop(numbers[:0], tf.constant(3))] == [0, 0, 0]

        @tf.function
        def python_loop():  # which Python runs, as in TensorFlow
            count = 0
            while count < 5:
                tf.autograph.experimental.set_loop_options(maximum_iterations=3)
                count += 1
            return count
        assert int(python_loop()) == 5

        @tf.function
        def cube_gradient(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = x
                for _ in tf.range(1, 9):
                    tf.autograph.experimental.set_loop_options(maximum_iterations=2)
                    y *= x
            return tape.gradient(y, x)
        assert float(cube_gradient(tf.constant(2.0))) == 12.0

        count = tf.while_loop(lambda n: n < 9, lambda n: n + 1, [tf.constant(0)], maximum_iterations=4)
        assert int(count[0]) == 4
        """
    )


def test_names_that_public_libraries_use(run_tf):
    run_tf(
        """
        import tempfile
        import numpy as np
        import pytest
        import replicax.tf as tf

        with tf.experimental.async_scope():
            assert float(tf.ones([]) + 1) == 2
        tf.experimental.async_clear_error()

        # Callbacks of checkpoints get the path; a number may be a variable of Keras.
        written, folder = [], tempfile.mkdtemp()
        options = tf.train.CheckpointOptions(experimental_write_callbacks=[written.append, lambda: written.append(0)])
        checkpoint = tf.train.Checkpoint(x=tf.Variable(1.0))
        paths = [checkpoint.write(folder + "/w", options=options), checkpoint.save(folder + "/s", options=options)]
        manager = tf.train.CheckpointManager(checkpoint, folder, max_to_keep=2)
        iterations = tf.keras.optimizers.SGD().iterations
        iterations.assign(7)
        paths.append(manager.save(checkpoint_number=iterations, options=options))
        assert paths[-1].endswith("ckpt-7") and written == [x for path in paths for x in (path, 0)]

        # Summaries are in the file once they are flushed.
        writer = tf.summary.create_file_writer(folder + "/summaries")
        with writer.as_default():
            tf.summary.scalar("loss", 2.5, step=3)
            writer.flush()
        file = tf.io.gfile.glob(folder + "/summaries/*")[0]
        events = list(tf.compat.v1.train.summary_iterator(file))
        assert [(e.step, v.tag) for e in events for v in e.summary.value] == [(3, "loss")]

        # A vector chooses rows in TensorFlow 1.
        rows = tf.compat.v1.where([True, False], tf.ones([2, 2]), tf.zeros([2, 2]))
        assert rows.numpy().tolist() == [[1, 1], [0, 0]]
        assert tf.compat.v1.where([False, True]).numpy().tolist() == [[1]]

        records = tf.data.Dataset.from_tensor_slices([b"a", b"bc"])
        tf.data.experimental.TFRecordWriter(folder + "/records").write(records)
        assert [x.numpy() for x in tf.data.TFRecordDataset(folder + "/records")] == [b"a", b"bc"]
        """
    )


def test_tf_keras_and_private_modules_are_served(run_tf):
    run_tf(
        """
        import replicax.tf
        replicax.tf.install()
        import keras
        import tensorflow as tf
        import tf_keras
        from tf_keras import layers
        from tf_keras.layers import Dense
        import tf_keras.backend as K
        from tensorflow.python.eager import monitoring
        from tensorflow.python.tpu import embedding_context_utils

        # Variables and metrics are those of Keras 2 as far as programs can tell.
        iterations = tf_keras.optimizers.SGD().iterations
        assert isinstance(iterations, tf.Variable) and not isinstance(1, tf.Variable)
        metric = tf_keras.metrics.Mean()
        metric.update_state(4.0)
        metric.reset_states()
        assert float(metric.result()) == 0

        assert tf_keras is tf.keras and Dense is keras.layers.Dense is layers.Dense
        assert K.backend() == "jax"
        gauge = monitoring.BoolGauge("/tf/name", "What it says.", "label")
        gauge.get_cell("x").set(True)
        assert gauge.get_cell("x").value() is True
        with embedding_context_utils.SequentialEmbeddingContext():
            pass
        """
    )


def test_jax_numpy_is_the_hint_for_operations_alone(run_tf):
    run_tf(
        """
        for missing in ("math.approx_something", "signal.mdct", "image.unknown", "unknown"):
            raises(AttributeError, lambda: eval(f"tf.{missing}"), missing, "The operations of jax.numpy")
        for missing in ("sysconfig", "summary.FileWriter", "compat.v1.Summary", "raw_ops.Unknown", "train.Unknown"):
            try:
                eval(f"tf.{missing}")
            except AttributeError as error:
                assert missing in str(error) and "jax.numpy" not in str(error), error
            else:
                raise AssertionError(missing)
        """
    )
