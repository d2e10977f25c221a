"""Keras models under a strategy."""
