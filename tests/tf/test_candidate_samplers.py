"""Samplers of classes: their distributions, seeds and counts. tf_ops/cases.txt compares their expected counts."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.processes


def test_classes_are_drawn_with_the_probabilities_of_each_distribution(run_tf):
    run_tf("""
tf.random.set_seed(1)
true, n = tf.constant([[0], [3]], tf.int64), 40000

def near(sampler, expected, **options):
    draw = lambda: sampler(true, 1, n, False, 5, **options)
    for call in (draw, tf.function(draw)):
        ids, of_true, of_sampled = call()
        assert ids.dtype == tf.int64 and ids.shape == [n]
        counts = np.bincount(ids.numpy(), minlength=5)
        deviation = np.sqrt(n * expected * (1 - expected))
        assert (abs(counts - n * expected) <= 4.5 * deviation).all(), (sampler, counts, n * expected)
        np.testing.assert_allclose(of_true.numpy()[:, 0], n * expected[[0, 3]], rtol=1e-4)
        np.testing.assert_allclose(of_sampled.numpy(), n * expected[ids.numpy()], rtol=1e-4)

near(tf.random.log_uniform_candidate_sampler, np.log1p(1 / np.arange(1, 6)) / np.log(6))
near(tf.random.uniform_candidate_sampler, np.full(5, 0.2))
near(tf.random.fixed_unigram_candidate_sampler, np.asarray([1, 2, 0, 3, 4]) / 10, unigrams=[1.0, 2.0, 0.0, 3.0, 4.0])
with open("vocabulary.txt", "w") as file:
    file.write("a,1\\nb,4\\nc,0\\nd,9\\ne,16\\n")
shares = np.asarray([1, 2, 0, 3, 4]) / 10
near(tf.nn.fixed_unigram_candidate_sampler, shares, vocab_file="vocabulary.txt", distortion=0.5)

# Each call counts the true classes of the calls before it.
learn = lambda: tf.nn.learned_unigram_candidate_sampler(tf.constant([[1], [1]], tf.int64), 1, 8, False, 4, seed=9)
np.testing.assert_allclose(learn()[1], [[2.0], [2.0]])
np.testing.assert_allclose(learn()[1], [[4.0], [4.0]])
compiled = tf.function(learn)
np.testing.assert_allclose([compiled()[1][0, 0], compiled()[1][0, 0]], [8 * 5 / 8, 8 * 7 / 10])
""")


def test_samples_without_repetition_differ_and_seeds_repeat_them(run_tf):
    run_tf("""
true = tf.constant([[0]], tf.int64)
draw = lambda **options: tf.random.log_uniform_candidate_sampler(true, 1, 50, True, 60, **options)
compiled = tf.function(draw)
tf.random.set_seed(4)
ids = [draw()[0].numpy() for _ in range(3)] + [compiled()[0].numpy() for _ in range(3)]
assert all(len(set(one)) == 50 and one.min() >= 0 and one.max() < 60 for one in ids)
assert len({one.tobytes() for one in ids}) == 6
tf.random.set_seed(4)
assert [draw()[0].numpy().tobytes() for _ in range(3)] == [one.tobytes() for one in ids[:3]]
assert [compiled()[0].numpy().tobytes() for _ in range(3)] == [one.tobytes() for one in ids[3:]]

# How often a class is drawn, and the mean of how often it is expected, beside TensorFlow's in 2,000 calls.
drawn, expected = np.zeros(60), np.zeros(60)
few = tf.function(lambda true: tf.random.log_uniform_candidate_sampler(true, 60, 8, True, 60))
for _ in range(400):
    ids, of_true, _ = few(tf.reshape(tf.range(60, dtype=tf.int64), [1, 60]))
    drawn[ids.numpy()] += 1 / 400
    expected += of_true.numpy()[0] / 400
np.testing.assert_allclose(drawn[:4], [0.8235, 0.6195, 0.518, 0.4105], atol=0.11)
np.testing.assert_allclose(expected[:4], [0.9586, 0.6872, 0.5361, 0.4393], atol=0.02)

# Ids far beyond the precision of a float32 number are drawn, too: even and odd ones.
large = tf.random.log_uniform_candidate_sampler(true, 1, 4000, False, 2**30)[0].numpy()
large = large[large > 2**22]
assert len(large) > 500 and 0.4 < (large % 2).mean() < 0.6

strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
step = tf.function(lambda: strategy.run(lambda: tf.random.uniform_candidate_sampler(true, 1, 5, True, 1000)[0]))
a, b = strategy.experimental_local_results(step())
assert not np.array_equal(a, b)
learned = lambda: tf.random.learned_unigram_candidate_sampler(true, 1, 5, True, 1000)
raises(NotImplementedError, lambda: strategy.run(learned), "several replicas")
many = lambda: tf.random.uniform_candidate_sampler(true, 1, 7, True, 6)
raises(tf.errors.InvalidArgumentError, many, "too small")
""")
