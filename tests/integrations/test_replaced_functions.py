"""Libraries that are imported when a strategy is there."""

from __future__ import annotations


def test_libraries_imported_inside_of_a_scope_make_variables_of_the_strategy(run_well):
    run_well(
        """
import sys
import numpy as np
import replicax as rx
assert not {"keras", "flax"} & set(sys.modules)
strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])
with strategy.scope(), strategy.scope():
    import keras
    from flax import nnx
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    layer = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
assert not any("Join" in type(finder).__name__ for finder in [*sys.meta_path, keras.__loader__])
assert keras.__spec__.loader is keras.__loader__
assert all(variable.__replicax_variable__.distribute_strategy is strategy for variable in model.variables)
assert layer.kernel.__replicax_variable__.distribute_strategy is strategy
dataset = rx.data.Dataset.from_tensors((np.ones((4, 4), "float32"), np.ones((4, 1), "float32")))
assert np.isfinite(model.fit(dataset, verbose=0).history["loss"][0])
"""
    )
