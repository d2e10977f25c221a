"""Older names of methods that strategies do not have: the error says what to use."""

from __future__ import annotations

import pytest
from strategies import central, mirrored


@pytest.mark.parametrize("make", [lambda: mirrored(2), central], ids=["mirrored", "central"])
def test_removed_names_say_what_to_use(make):
    """Fact 90."""
    for name, now in {"experimental_run_v2": "`run`", "experimental_make_numpy_dataset": "from_tensor_slices"}.items():
        assert not hasattr(make(), name)
        with pytest.raises(AttributeError, match=f"{type(make()).__name__}.* has no attribute '{name}': it is .*{now}"):
            getattr(make(), name)
    with pytest.raises(AttributeError, match="has no attribute 'unwrap': `import replicax.tf` adds TensorFlow's older"):
        getattr(make(), "unwrap")  # noqa: B009
    with pytest.raises(AttributeError, match="has no attribute 'broadcast'$"):
        getattr(make(), "broadcast")  # noqa: B009
