"""`compile` and `fit` of a Keras model under a strategy, on 2 virtual devices.

python examples/keras_fit.py
"""

import numpy as np
from sklearn.datasets import load_digits

import replicax as rx
from replicax.tf import keras  # Keras itself, on its JAX backend

rx.config.set_virtual_devices({"CPU": 2})
strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])

digits = load_digits()
images = (digits.images[..., np.newaxis] / 16).astype("float32")
labels = digits.target

keras.utils.set_random_seed(1)
with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(3e-3, 50, 0.9)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

history = model.fit(
    images[:1500],
    labels[:1500],
    batch_size=64,
    epochs=5,
    validation_data=(images[1500:], labels[1500:]),
    callbacks=[keras.callbacks.EarlyStopping(monitor="val_loss", patience=2)],
    verbose=2,
)
loss, accuracy = model.evaluate(images[1500:], labels[1500:], batch_size=64, verbose=0)
predictions = model.predict(images[1500:], batch_size=64, verbose=0).argmax(axis=1)
print(f"test accuracy {accuracy:.3f}, and {np.mean(predictions == labels[1500:]):.3f} of the predictions are right")
