"""Rules that say by name how variables are split over the devices of each replica."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import jax
from jax.sharding import PartitionSpec

from replicax._base import doc_pages
from replicax._base.messages import received
from replicax._strategies import logical_devices
from replicax._values import ReplicaMesh
from replicax._variables.layouts import PathsAndTypes

Dimensions: TypeAlias = Iterable[str | Sequence[str] | None]
_SHOWN = 20  # names in a message


class ShardingRules:
    """Layouts of variables by their names: of the patterns that are found in a name the first one counts.

    Args:
        rules: regular expressions, and for each the dimensions of `split_to_devices`.
        mesh: of the replicas.

    Raises:
        TypeError: `rules` are no mapping, a pattern is no string, or dimensions are of another type.
        ValueError: a pattern is no regular expression, or dimensions name an axis twice or one that is not there.
    """

    def __init__(self, rules: Mapping[str, Dimensions], mesh: ReplicaMesh):
        if not isinstance(rules, Mapping) or not all(isinstance(pattern, str) for pattern in rules):
            raise TypeError(
                "`sharding_rules` is a mapping from regular expressions to dimensions, such as "
                f'{{"attention/.*kernel": (None, "model")}}; got {received(rules)}.'
            )
        self._mesh, self._rules = mesh, {}
        for pattern, dimensions in rules.items():
            try:
                compiled = re.compile(pattern)
            except re.error as error:
                raise ValueError(
                    f"In `sharding_rules` the pattern {pattern!r} is no regular expression: {error}."
                ) from None
            what = f"`sharding_rules`[{pattern!r}]"
            self._rules[compiled] = logical_devices.checked_dimensions(mesh, dimensions, what)
        self._unused = set(self._rules)
        self._names: dict[str, re.Pattern[str] | None] = {}  # of the variables so far, and the rule of each
        self._may_check = False

    def layouts(self, name: str, leaves: PathsAndTypes, trainable: bool) -> list[PartitionSpec | None]:
        """Returns the layouts of a new variable's leaves.

        Raises:
            ValueError: a rule has more dimensions than a leaf, or one that cannot be divided so.
        """
        layouts = []
        for path, kind in leaves:
            rule = self.note(_joined(name, path), trainable)
            layouts.append(None if rule is None else self._layout(rule, _joined(name, path), kind.shape))
        return layouts

    def note(self, name: str, trainable: bool = True) -> re.Pattern[str] | None:
        """Returns the rule that counts for a variable of this name, which is there, or will be."""
        rule = next((rule for rule in self._rules if rule.search(name)), None)
        self._names[name] = rule
        self._unused.discard(rule)  # type: ignore[arg-type]
        self._may_check = self._may_check or trainable
        return rule

    def _layout(self, rule: re.Pattern[str], name: str, shape: tuple[int, ...]) -> PartitionSpec | None:
        if not self._mesh.logical_axes:
            return None
        what = f"the variable {name!r} (`sharding_rules`[{rule.pattern!r}])"
        layout = logical_devices.fitting_spec(self._mesh, shape, self._rules[rule], what)
        return layout if any(layout) else None

    def check_all_used(self) -> None:
        """Raises `ValueError` if there is a model and a rule that counts for no variable; then not again."""
        if not self._may_check or not self._unused:
            return
        unused, self._unused = sorted(rule.pattern for rule in self._unused), set()
        listed = ", ".join(list(self._names)[:_SHOWN])
        listed += f" and {len(self._names) - _SHOWN} more" if len(self._names) > _SHOWN else ""
        shadowed = [
            f" Every name in which {pattern!r} is found belongs to an earlier rule, {rule.pattern!r}: put the more "
            "particular rule first."
            for pattern in unused
            for rule in {rule for name, rule in self._names.items() if rule is not None and re.search(pattern, name)}
        ]
        raise ValueError(
            f"`sharding_rules` has patterns that count for no variable: {', '.join(map(repr, unused))}. The variables "
            f"made under the strategy so far are: {listed}.{''.join(shadowed)} Correct the patterns or leave them out; "
            "variables of a model are made before the first `run`, or in it. "
            f"See {doc_pages.page('how-to/large-models#rules-for-whole-models')}."
        )


def _joined(name: str, path: tuple[object, ...]) -> str:
    inner: str = jax.tree_util.keystr(path, simple=True, separator="/")
    return f"{name}/{inner}" if inner else name
