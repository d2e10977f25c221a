"""Keras and Flax NNX."""
