"""Keras 3 models under a strategy, on Keras's JAX backend.

Keras supports `tf.distribute` on its TensorFlow backend alone. Here its variables hold variables of the strategy in
whose scope they were made. All else of Keras stays as it is: it reads and assigns, and a `function` finds the variables
that a step uses. All functions of Keras that are replaced are listed at the top of `variables`, `losses`,
`initial_values`, `normalization` and `errors`, and in the function `join` of `loop_data`, `fit` and `files`.
"""

from replicax._integrations.keras import errors, files, fit, initial_values, loop_data, losses, normalization, variables


def join() -> None:
    """Changes Keras; called once, when Keras is loaded.

    Raises:
        RuntimeError: Keras runs on another backend.
    """
    import keras

    if (backend := keras.backend.backend()) != "jax":
        raise RuntimeError(
            f"Keras runs on its backend {backend!r} already, and replicax needs 'jax'. Import replicax (or "
            "replicax.tf) before Keras, or set the environment variable KERAS_BACKEND=jax, or `backend` in "
            "~/.keras/keras.json."
        )
    for part in (variables, initial_values, losses, normalization, errors, loop_data, fit, files):
        part.join()
