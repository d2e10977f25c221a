"""TensorFlow's names of other versions: `compat.v1`, of which there is `distribute`."""

from replicax.tf.compat import v1 as v1
