"""The record of the changes of `replicax.tf` to the core."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replicax.tf import _dtypes, _record_blocks, _texts, _variable_slices
from replicax.tf._core import frontend, tracebacks

if TYPE_CHECKING:
    from replicax.tf import _random_keys


class _RandomNumbers:
    """The counters of `tf.random`. Their module is imported when a checkpoint asks for them."""

    name = "tf"
    functions = "tf.random"

    def save(self) -> dict[str, object]:
        return self._counters().save()

    def restore(self, state: dict[str, object]) -> None:
        self._counters().restore(state)

    def in_dataset(self) -> tracebacks.Origin | None:
        return self._counters().drawn_by_input

    def _counters(self) -> _random_keys.AllCounters:
        from replicax.tf import _random_keys

        return _random_keys.all_counters


def install() -> None:
    """Have the core follow `replicax.tf`."""
    frontend.install(
        frontend.Frontend(
            module="replicax.tf",
            dtype_prefix="tf.",
            dtypes={**frontend.current.dtypes, **_dtypes.ALIASES},
            variable_class="tf.Variable",
            array_str=_texts.tensor_str,
            array_repr=_texts.tensor_repr,
            strings_are_tensors=True,
            random_numbers=_RandomNumbers(),
            note_records=_record_blocks.note,
            note_part=_variable_slices.note_part,
        )
    )
