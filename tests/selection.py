"""Which cases run: `pytest` leaves out the cases that are marked `thorough`, `pytest --thorough` has them too.

A case is left out if it costs much and others show nearly the same. Tests over strategies run with each layout of
values, `sharded`, `pairs` and `tpu_logical` (see strategies.py). Where a test has several cases, each case keeps one of
the layouts, in turn, and the other layouts are `thorough`.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import pytest


def add_option(parser: pytest.Parser) -> None:
    """Add the option `--thorough`."""
    parser.addoption("--thorough", action="store_true", help="also run the cases that are marked `thorough`")


def deal_layouts(items: Sequence[pytest.Item]) -> None:
    """Mark all layouts of a case as thorough, except one."""
    tests: dict[str, dict[str, list[pytest.Item]]] = {}
    for item in items:
        if layout := item.get_closest_marker("layout"):
            test, _, parameters = item.nodeid.partition("[")
            case = "-".join(part for part in parameters.rstrip("]").split("-") if part != layout.args[0])
            tests.setdefault(test, {}).setdefault(case, []).append(item)
    for test, cases in tests.items():
        for turn, layouts in enumerate(cases.values(), zlib.crc32(test.encode())):
            for i, item in enumerate(layouts):
                if i != turn % len(layouts):
                    item.add_marker("thorough")


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the thorough cases, unless they are asked for."""
    if config.getoption("thorough"):
        return
    config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("thorough")])
    items[:] = [item for item in items if not item.get_closest_marker("thorough")]
