"""A recorder of training steps, which `replicax compare` loads in TensorFlow's Python and in its own.

TensorFlow's Python has no replicax: the modules here need nothing but NumPy and import each other alone.
"""
