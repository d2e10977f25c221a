"""Operations on ragged tensors in functions and replicas; records of single operations are in test_records.py."""

from __future__ import annotations

import pytest

import replicax as rx

# The beginning of a program: `evaluate(way, f, *args)` calls a function in one of the ways, and returns lists. In
# replicas, the result of the last one counts.
WAYS = """
        import jax
        tf.config.set_logical_device_configuration(
            tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
        )
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])

        def as_list(value):
            return value.to_list() if isinstance(value, tf.RaggedTensor) else np.asarray(value).tolist()

        def in_replicas(f, *args):
            # A replica's ragged tensor is a RaggedTensor of PerReplica values.
            parts = lambda *args: [tf.nest.flatten(value, expand_composites=True) for value in f(*args)]
            return strategy.run(parts, args=args)

        def evaluate(way, f, *args):
            if way in ("eager", "function"):
                return [as_list(value) for value in (f if way == "eager" else tf.function(f))(*args)]
            call = lambda *args: in_replicas(f, *args)
            found = (call if way == "replicas" else tf.function(call))(*args)
            parts = [[strategy.experimental_local_results(leaf)[-1] for leaf in leaves] for leaves in found]
            return [as_list(tf.RaggedTensor(*leaves) if len(leaves) == 2 else leaves[0]) for leaves in parts]

        x = tf.ragged.constant([[1., 2.], [], [3., 4., 5.]])
        y = tf.ragged.constant([[2., 1.], [], [3., 5., 4.]])
        ids = tf.ragged.constant([[1, 2], [], [0, 0, 1]])
        table = tf.constant([[0., 1.], [2., 3.], [4., 5.]])
"""


@pytest.mark.parametrize("way", ["eager", "function", "replicas", "function of replicas"])
def test_operations_keep_the_rows(run_tf, way):
    run_tf(
        WAYS
        + f"""
        way = {way!r}

        def f(x, y, ids):
            return [
                x * 2. - y, 1. / (x + 1.), -x, x > y, tf.square(x), tf.where(x > y, x, y),
                x * tf.constant([[1.], [10.], [100.]]),
                x / tf.reduce_sum(x, axis=1, keepdims=True),
                tf.gather(table[:, 0], ids),
                tf.reduce_sum(tf.nn.embedding_lookup(table, ids), axis=1),
                tf.reduce_sum(x), tf.reduce_max(x, axis=1), tf.reduce_prod(x, axis=-1), tf.reduce_any(x > 4., axis=1),
                tf.reduce_mean(x, axis=1, keepdims=True)[2],
                tf.concat([x, y], axis=0), tf.concat([x, y], axis=1),
                tf.cast(x, tf.int32),
            ]

        low = np.finfo(np.float32).min.item()
        expected = [
            [[0., 3.], [], [3., 3., 6.]], [[1 / 2, 1 / 3], [], [1 / 4, 1 / 5, 1 / 6]],
            [[-1., -2.], [], [-3., -4., -5.]], [[False, True], [], [False, False, True]],
            [[1., 4.], [], [9., 16., 25.]], [[2., 2.], [], [3., 5., 5.]],
            [[1., 2.], [], [300., 400., 500.]],
            [[1 / 3, 2 / 3], [], [3 / 12, 4 / 12, 5 / 12]],
            [[2., 4.], [], [0., 0., 2.]],
            [[6., 8.], [0., 0.], [2., 5.]],
            15., [2., low, 5.], [2., 1., 60.], [False, False, True],
            [4.],
            [[1., 2.], [], [3., 4., 5.], [2., 1.], [], [3., 5., 4.]],
            [[1., 2., 2., 1.], [], [3., 4., 5., 3., 5., 4.]],
            [[1, 2], [], [3, 4, 5]],
        ]
        found = evaluate(way, f, x, y, ids)
        for ours, theirs in zip(found, expected, strict=True):
            leaves, structure = jax.tree.flatten(ours)
            assert structure == jax.tree.structure(theirs), (ours, theirs)
            np.testing.assert_allclose(leaves, jax.tree.leaves(theirs), rtol=1e-6)
        """
    )


def test_results_that_depend_on_the_lengths_of_rows_are_computed_outside_of_programs(run_tf):
    run_tf(
        WAYS
        + """
        def f(x, y, ids):
            spec = tf.RaggedTensorSpec([None], tf.float32)
            return [
                tf.reduce_sum(x, axis=0), tf.gather(x, [2, 0]),
                tf.map_fn(tf.reduce_sum, x, fn_output_signature=tf.float32),
                tf.map_fn(lambda row: row[:1], x, fn_output_signature=spec),
            ]
        expected = [[4., 6., 5.], [[3., 4., 5.], [1., 2.]], [3., 0., 12.], [[1.], [], [3.]]]
        for way in "eager", "function", "replicas":
            assert evaluate(way, f, x, y, ids) == expected, way
        empty = x[:0]
        assert tf.map_fn(tf.reduce_sum, empty, fn_output_signature=tf.float32).shape == (0,)
        assert tf.map_fn(lambda row: row * 2, empty).to_list() == []
        """
    )


def test_different_row_splits_are_an_error_in_all_ways(run_tf):
    run_tf(
        WAYS
        + """
        other = tf.ragged.constant([[1.], [2., 3.], [3., 5.]])  # as many values in as many rows
        operations = {
            "add": lambda x, y: x + y, "map_flat_values": lambda x, y: tf.ragged.map_flat_values(tf.add, x, y),
            "where": lambda x, y: tf.where(x > 2., x, y),
        }
        for name, op in operations.items():
            for way in "eager", "function", "replicas", "function of replicas":
                try:
                    evaluate(way, lambda x, y: [op(x, y)], x, other)
                except tf.errors.InvalidArgumentError as error:
                    assert f"{name}: Condition x == y did not hold" in str(error), error
                    assert "[0, 2, 2, 5] and [0, 1, 3, 5]" in str(error), error
                else:
                    raise AssertionError((name, way))
        # the same rows in other arrays are no error
        again = tf.ragged.constant([[5., 5.], [], [5., 5., 5.]])
        assert evaluate("function", lambda x, y: [x + y], x, again) == [[[6., 7.], [], [8., 9., 10.]]]
        """
    )


def test_other_operations_name_themselves_and_say_what_to_do(run_tf):
    run_tf(
        """
        import replicax.tf as tf
        ragged = tf.ragged.constant([[1., 2.], [], [3., 4., 5.]])
        sparse = tf.SparseTensor([[0, 1], [2, 0]], [5.0, 7.0], [3, 2])
        calls = {
            "sort": tf.sort, "transpose": tf.transpose, "einsum": lambda x: tf.einsum("ij->i", x),
            "softmax": lambda x: tf.nn.softmax(logits=x), "inv": tf.linalg.inv, "where": tf.where,
            "pad": lambda x: tf.pad(x, [[0, 1]]), "boolean_mask": lambda x: tf.boolean_mask([1, 2, 3], x),
            "clip_by_value": lambda x: tf.clip_by_value(2., x, x), "parallel_stack": lambda x: tf.parallel_stack([x]),
        }
        for name, call in calls.items():
            for value, ways in (
                (ragged, ("map_flat_values", "to_tensor", "shape [3, None]")),
                (sparse, ("map_values", "to_dense", "shape [")),
            ):
                for f in call, tf.function(lambda x: call(x)):
                    try:
                        f(value)
                    except ValueError as error:
                        text = str(error)
                        assert f"`{name}` takes no {type(value).__name__}" in text, text
                        assert all(words in text for words in ways) and "sequence" not in text, text
                    else:
                        raise AssertionError(name)
        nested = lambda x: tf.convert_to_tensor([x, x])
        for convert in tf.convert_to_tensor, tf.constant, np.asarray, lambda x: tf.strings.join([x, x]), nested:
            try:
                convert(ragged)
            except ValueError as error:
                assert "map_flat_values" in str(error) and "to_tensor" in str(error), error
            else:
                raise AssertionError(convert)
        """
    )


def test_gradients_of_lookups_are_exact_if_a_replica_has_no_rows(run_tf):
    run_tf(
        WAYS
        + """
        ids = tf.ragged.constant([[1, 2], [3], [0, 0, 1], [2], [4, 4, 4, 4]], dtype=tf.int32)
        targets = tf.constant([1., 2., 3., 4., 5.])
        with strategy.scope():
            table = tf.Variable(tf.reshape(tf.range(10.), (5, 2)))

        def step(rows, targets):
            with tf.GradientTape() as tape:
                means = tf.reduce_sum(tf.reduce_mean(tf.gather(table, rows), axis=1), axis=-1)
                loss = tf.reduce_sum((means - targets) ** 2)
            gradient = tf.convert_to_tensor(tape.gradient(loss, table))
            return loss, tf.distribute.get_replica_context().all_reduce("SUM", gradient)

        # by hand, row by row
        values, total, gradient = np.arange(10.).reshape(5, 2), 0., np.zeros((5, 2))
        for row, target in zip(ids.to_list(), np.asarray(targets)):
            distance = values[row].mean(0).sum() - target
            total += distance ** 2
            for i in row:
                gradient[i] += 2 * distance / len(row)

        dataset = tf.data.Dataset.from_tensor_slices((ids, targets)).batch(4)  # 4 rows, then 1
        call = lambda rows, targets: strategy.run(step, args=(rows, targets))
        for f in call, tf.function(call):
            losses, gradients = 0., np.zeros((5, 2))
            for rows, part in strategy.experimental_distribute_dataset(dataset):
                loss, found = f(rows, part)
                losses += float(strategy.reduce("SUM", loss, axis=None))
                gradients += np.asarray(strategy.experimental_local_results(found)[0])
            np.testing.assert_allclose(losses, total, rtol=1e-6)
            np.testing.assert_allclose(gradients, gradient, rtol=1e-6)
        """
    )


def test_ellipsis_keeps_rows_without_elements():
    inner = rx.data.RaggedTensor.from_row_lengths([1, 2, 3, 4], [2, 1, 1])
    rows = rx.data.RaggedTensor.from_row_lengths(inner, [2, 0, 1])
    assert rows[..., :1].to_list() == [[[1], [3]], [], [[4]]] and rows[:, :, 1:].to_list() == [[[2], []], [], [[]]]
    assert rows[...].to_list() == rows.to_list() and rows[0, ..., 0, 1] == 2
    with pytest.raises(TypeError, match="indexed by integers, slices.* Got 'a' of type str"):
        rows["a"]
    with pytest.raises(IndexError, match="There is no row 7: the RaggedTensor has 3"):
        rows[7]
