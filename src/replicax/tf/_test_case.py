"""`tf.test.TestCase`, which is absl's test case with assertions about tensors; and `tf.test.main`."""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from replicax.tf import _nests, _random_keys
from replicax.tf._assertions import TensorAssertions
from replicax.tf._core import DistributedValues, IndexedSlices, Leaf, Mirrored, PerReplica, SparseTensor, Tree, Variable

try:
    from absl.testing import absltest
except ImportError as error:
    raise ImportError("tf.test.TestCase is made of absl's test case: pip install absl-py.", name="absl") from error

if TYPE_CHECKING:
    from replicax.tf.compat.v1 import Session

# The seed that every test begins with, which is TensorFlow's.
_SEED = 87654321


class TestCase(TensorAssertions, absltest.TestCase):  # type: ignore[misc]  # contexts of other classes
    """A test case of unittest and absl that compares tensors, and seeds all generators before each test."""

    def setUp(self) -> None:
        """Seeds Python's, NumPy's and TensorFlow's random numbers."""
        super().setUp()
        random.seed(_SEED)
        np.random.seed(_SEED)
        _random_keys.set_seed(_SEED)

    def get_temp_dir(self) -> str:
        """Returns a folder of this test, the same in each call."""
        if not hasattr(self, "_temp_dir"):
            parent = absltest.get_default_test_tmpdir()
            os.makedirs(parent, exist_ok=True)
            self._temp_dir = tempfile.mkdtemp(dir=parent)
        return self._temp_dir

    def evaluate(self, tensors: Tree) -> Tree:
        """Returns the values of a structure of tensors as NumPy's arrays; functions in it are called."""
        return None if tensors is None else _nests.map_structure(self._evaluated, tensors)

    def _evaluated(self, value: Leaf) -> Leaf:
        if value is None:
            return None
        if isinstance(value, SparseTensor):
            return SparseTensor(*(np.asarray(part) for part in (value.indices, value.values, value.dense_shape)))
        if isinstance(value, IndexedSlices):
            shape = None if value.dense_shape is None else np.asarray(value.dense_shape)
            return IndexedSlices(np.asarray(value.values), np.asarray(value.indices), shape)  # type: ignore[arg-type]
        if isinstance(value, DistributedValues) and not isinstance(value, Variable):
            components = [self._evaluated(component) for component in value.values]
            return components[0] if isinstance(value, Mirrored) else PerReplica(components)
        if hasattr(value, "numpy"):
            return value.numpy()
        if callable(value):
            return self.evaluate(value())
        raise ValueError(f"Unsupported type {type(value).__name__!r}: `evaluate` takes tensors.")

    @contextlib.contextmanager
    def session(
        self, graph: object = None, config: object = None, use_gpu: bool = True, force_gpu: bool = False
    ) -> Iterator[Session]:
        """Returns a context, for tests that were written for sessions. Its value is a session that runs nothing."""
        from replicax.tf.compat.v1 import Session

        yield Session()

    cached_session = session
    test_session = session

    assertItemsEqual = absltest.TestCase.assertCountEqual
    assertRaisesRegexp = absltest.TestCase.assertRaisesRegex


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the tests of the module that is the program, as `absltest.main` does."""
    absltest.main(argv=argv)
