"""TensorFlow 1's names, of which there is `distribute`."""

from replicax.tf.compat.v1 import distribute as distribute
