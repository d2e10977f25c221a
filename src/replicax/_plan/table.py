"""Plans as text: a column for each topology."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

from replicax._base.quantities import number, seconds, size
from replicax._benchmark.hlo_collectives import Collective
from replicax._plan import chips
from replicax._plan.report import Memory, TopologyPlan
from replicax._report.columns import columns

_PREALLOCATED = 0.75  # the share of a GPU's memory that JAX takes by default
_LISTED = 10  # collectives of each topology, the largest first

Row = tuple[str, list[str]]


def text(step: str, plans: Sequence[TopologyPlan]) -> str:
    """Returns the table of a step's plans, and the list of their collectives."""
    rows: list[Row] = [(f"plan of {step}", [plan.topology for plan in plans])]
    rows.append(("replicas", [str(plan.replicas) for plan in plans]))
    if any(plan.layout for plan in plans):
        rows.append(("axes (hosts x devices)", [plan.layout or "-" for plan in plans]))
    rows.append(("fits the memory", [_fits(plan) for plan in plans]))
    rows += _memory_rows(plans)
    rows += _collective_rows(plans)
    rows += _time_rows(plans)
    first, *others = [[name, *cells] for name, cells in rows]
    lines = columns([first, None, *others], left=[0])
    return "\n".join(
        [*lines, *_advice(plans), *_savings(plans), *_largest(plans), *_collectives(plans), *_errors(plans)]
    )


def _fits(plan: TopologyPlan) -> str:
    if plan.available is None:
        return "host's memory"
    return "yes" if plan.fits else "NO"


def _memory_rows(plans: Sequence[TopologyPlan]) -> list[Row]:
    parts: dict[str, Callable[[Memory], int]] = {
        "  variables": lambda memory: memory.variables,
        "  optimizer and other state": lambda memory: memory.state,
        "  batch": lambda memory: memory.batch,
        "  padding, less what is unused": lambda memory: memory.padding,
        "  results": lambda memory: memory.outputs,
        "  temporaries": lambda memory: memory.temporaries,
        "  program": lambda memory: memory.code,
    }
    rows: list[Row] = [("memory of a device", [])]
    arguments = dict.fromkeys(name for plan in plans for name in plan.arguments)
    for name in arguments:
        sizes = [plan.arguments.get(name) for plan in plans]
        rows.append((f"  argument {name}", ["-" if count is None else size(count) for count in sizes]))
    for name, part in list(parts.items())[3 if arguments else 0 :]:
        rows.append((name, [size(part(plan.memory)) if plan.memory else "-" for plan in plans]))
    rows.append(("  needed", [size(plan.needed) for plan in plans]))
    rows.append(("  there is", [size(plan.available) if plan.available else "-" for plan in plans]))
    return rows


def _collective_rows(plans: Sequence[TopologyPlan]) -> list[Row]:
    kinds = dict.fromkeys(collective.kind for plan in plans for collective in plan.collectives)
    none = ["none" if plan.memory else "-" for plan in plans]
    rows: list[Row] = [("collectives (that overlap)", [] if kinds else none)]
    for kind in kinds:
        cells = []
        for plan in plans:
            alike = [collective for collective in plan.collectives if collective.kind == kind]
            count, total = sum(x.times for x in alike), sum(x.times * x.bytes for x in alike)
            cells.append(f"{count} ({sum(x.times for x in alike if x.overlaps)}), {size(total)}" if alike else "-")
        rows.append((f"  {kind}", cells))
    return rows


def _time_rows(plans: Sequence[TopologyPlan]) -> list[Row]:
    rows: list[Row] = [
        ("operations of a device", [number(plan.flops) if plan.memory else "-" for plan in plans]),
    ]
    for kind in dict.fromkeys(kind for plan in plans for kind in plan.products):
        cells = [number(plan.products[kind]) if kind in plan.products else "-" for plan in plans]
        rows.append((f"  products of {kind}", cells))
    rows.append(("bytes read and written", [size(plan.bytes_moved) if plan.memory else "-" for plan in plans]))
    names = dict.fromkeys(name for plan in plans for name in plan.bounds)
    if names:
        rows.append(("a step takes at least", [seconds(plan.bound[1]) if plan.bound else "-" for plan in plans]))
    for name in names:
        cells = [seconds(plan.bounds[name]) if name in plan.bounds else "-" for plan in plans]
        rows.append((f"  for {name}", cells))
    if any(plan.timeline for plan in plans):
        rows.append(("in the compiler's order", [_order_cell(plan) for plan in plans]))
        rows.append(("  waiting for collectives", [_waiting_cell(plan) for plan in plans]))
    rows.append(("compiled in", [seconds(plan.compile_seconds) for plan in plans]))
    return rows


def _order_cell(plan: TopologyPlan) -> str:
    return seconds(plan.scheduled_seconds) if plan.timeline else "-"


def _waiting_cell(plan: TopologyPlan) -> str:
    if not plan.timeline:
        return "-"
    return f"{size(plan.exposed)}, {seconds(plan.exposed_seconds)}" if plan.exposed else "none"


def _advice(plans: Sequence[TopologyPlan]) -> list[str]:
    """Return advice, and a line for each topology if the step needs more memory than JAX takes by default."""
    lines = [line for advice in dict.fromkeys(text for plan in plans for text in plan.advice) for line in ("", advice)]
    for plan in plans:
        chip = chips.parse(plan.topology).chip
        share = plan.needed / plan.available if plan.available else 0.0
        if isinstance(chip, chips.Gpu) and _PREALLOCATED < share <= 1:
            lines += [
                "",
                f"On {plan.topology} the step needs {share:.0%} of a GPU's memory. JAX takes 75 % by default:",
            ]
            lines.append(f"  set XLA_PYTHON_CLIENT_MEM_FRACTION={min(0.98, share + 0.03):.2f} there.")
    return lines


def _largest(plans: Sequence[TopologyPlan]) -> list[str]:
    lines: list[str] = []
    for plan in plans:
        if plan.largest:
            lines += ["", f"Largest temporaries at the peak on {plan.topology}:"]
        for buffer in plan.largest:
            count = f"{buffer.count} × " if buffer.count > 1 else ""
            operation = "/".join(buffer.operation.split("/")[-2:]) or buffer.name
            role = "workspace of " if buffer.is_workspace else ""
            lines.append(f"  {count}{size(buffer.size)}: {role}{operation}{f', {buffer.line}' if buffer.line else ''}")
    return lines


def _savings(plans: Sequence[TopologyPlan]) -> list[str]:
    first = plans[0]
    if not first.savings:
        return []
    lines = [f"  {name}: {size(saved)}" for name, saved in first.savings]
    return ["", f"With shard_variables these would save most on each device of {first.topology}:", *lines]


def _collectives(plans: Sequence[TopologyPlan]) -> list[str]:
    lines: list[str] = []
    for plan in plans:
        if not plan.collectives:
            continue
        lines += ["", f"Collectives on {plan.topology}:"]
        ordered = sorted(plan.collectives, key=lambda collective: -collective.bytes * collective.times)
        alike = [list(same) for _, same in groupby(ordered, key=lambda collective: _describe(collective, 1))]
        grouped = [(same[0], len(same)) for same in alike]
        lines += [f"  {_describe(first, count)}" for first, count in grouped[:_LISTED]]
        if more := sum(count for _, count in grouped[_LISTED:]):
            lines.append(f"  and {more} smaller ones")
    return lines


def _describe(collective: Collective, count: int) -> str:
    times = count * collective.times
    often = f"{times} × " if times > 1 else ""
    beside = "overlaps" if collective.overlaps else "does not overlap"
    source = f", {'/'.join(collective.source.split('/')[-2:])}" if collective.source else ""
    return f"{often}{collective.kind} of {size(collective.bytes)} among {collective.devices} devices, {beside}{source}"


def _errors(plans: Sequence[TopologyPlan]) -> list[str]:
    return [
        line for plan in plans if plan.error for line in ("", f"{plan.topology}: {plan.error.strip().splitlines()[0]}")
    ]
