"""Plans as a page: the pictures of memory and bounds, and timelines with names on their bars.

The page is one file without scripts. Bars are placed in percent, so that a timeline can be widened and scrolled.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from replicax._base.quantities import number as count_of
from replicax._base.quantities import seconds, size
from replicax._plan import timeline
from replicax._plan.report import TopologyPlan
from replicax._plan.schedule import Event
from replicax._plan.timeline import COMPUTATION, Bar, Lane
from replicax._report.charts import number, steps
from replicax._report.drawing import COLOURS

_ZOOMS = (1, 4, 16)
_SHORT = 1 / 2000 / _ZOOMS[-1]  # of the step: half a pixel of a wide window at the largest zoom
_NAMED = 5  # operations of a bar
_LABEL = 0.03  # of the visible part: the room for the number of a tick
_FOCUSED = 0.01  # of the step: bars that are longer, and all exposed ones, can be reached with the Tab key

_STYLE = """
body{margin:0;background:var(--page);color:var(--ink);font:14px/1.5 -apple-system,Segoe UI,Helvetica,Arial,sans-serif}
main{max-width:1400px;margin:0 auto;padding:16px 16px 150px}main>svg{margin-left:-20px}
h2{font-size:18px;margin:32px 0 4px}p{margin:0 0 8px}.muted{color:var(--muted)}
.legend span{white-space:nowrap;margin-right:18px}.legend i{display:inline-block;width:11px;height:11px;
border-radius:2px;margin-right:6px}
input{accent-color:var(--blue);margin:0 5px 0 0;vertical-align:-1px}label{margin-right:14px}
.chart{display:flex;margin-top:12px}.names{flex:none;padding-right:10px;text-align:right}
.names div{height:22px;line-height:22px;margin-bottom:5px}.names .computation{height:56px;line-height:56px}
.names div,.tick,.phases{font-size:12px}.phases,.names .phases{position:relative;height:26px;margin:0}
.phases div{position:absolute;top:0;height:18px;line-height:18px;overflow:hidden;text-align:center;color:var(--muted);
border:solid var(--edge);border-width:0 0 1px 1px;box-sizing:border-box}
.scroll{flex:1;overflow-x:auto;min-width:0}.strip{position:relative;padding-bottom:24px}
.lane{position:relative;height:22px;margin-bottom:5px;background:var(--card)}.lane.computation{height:56px}
.bar,.wait{position:absolute;top:0;bottom:0}.wait{top:27px;bottom:27px;background:var(--red)}
.bar.overlapped{background:linear-gradient(var(--teal),var(--teal)) 0 50%/100% 12px no-repeat}
.z1:not(:checked)~.chart .bar:not(.overlapped){box-shadow:inset -1px 0 color-mix(in srgb,var(--page) 60%,transparent)}
.z1:not(:checked)~.chart .overlapped{background-size:calc(100% - 1px) 12px}
.bar u{position:absolute;right:0;top:0;bottom:0;background:var(--red)}
.bar:hover,.bar:focus{outline:2px solid var(--ink);z-index:2}
.bar span{display:none;position:fixed;left:50%;bottom:14px;transform:translateX(-50%);width:min(680px,92vw);
box-sizing:border-box;padding:10px 16px;border-radius:8px;border:1px solid var(--edge);background:var(--card);
color:var(--ink);font-style:normal;white-space:pre-line;overflow-wrap:anywhere;pointer-events:none;z-index:3;
box-shadow:0 4px 20px #0004}
.bar:hover span,.bar:focus span{display:block}.bar:hover span{z-index:4}
.tick{position:absolute;top:26px;bottom:0;border-left:1px solid var(--faint);color:var(--muted)}
.tick b{position:absolute;bottom:0;left:4px;font-weight:400}
"""


def write(path: str | os.PathLike[str], step: str, charts: str, plans: Sequence[TopologyPlan]) -> None:
    """Write the page of a step's plans to a file.

    Args:
        path: the file.
        step: the function's name.
        charts: the picture of memory and bounds, as SVG.
        plans: those with a timeline get one.
    """
    Path(path).write_text(text(step, charts, plans), encoding="utf-8")


def text(step: str, charts: str, plans: Sequence[TopologyPlan]) -> str:
    """Return the page, which is well-formed XML, too."""
    sections = [_section(i, step, plan) for i, plan in enumerate(plans) if timeline.has_bars(plan.timeline)]
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>',
            '<meta name="viewport" content="width=device-width, initial-scale=1"/>',
            f"<title>{escape(f'Plan of {step}')}</title><style>{_colours()}{_zoom_rules()}{_STYLE}</style></head>",
            f"<body><main>{charts}",
            *sections,
            "</main></body></html>\n",
        ]
    )


def _colours() -> str:
    light, dark = (";".join(f"--{name}:{pair[i]}" for name, pair in COLOURS.items()) for i in (0, 1))
    hues = "".join(f".{kind}{{background:var(--{hue})}}" for kind, (_, hue) in COMPUTATION.items())
    scheme = ":root{color-scheme:light dark}"
    return f"{scheme}:root{{{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}{hues}"


def _zoom_rules() -> str:
    """Return the rules that widen a timeline and show the ticks of its width."""
    return ".tick{display:none}" + "".join(
        f".z{zoom}:checked~.chart .strip{{width:{100 * zoom}%}}.z{zoom}:checked~.chart .t{zoom}{{display:block}}"
        for zoom in _ZOOMS
    )


def _section(i: int, step: str, plan: TopologyPlan) -> str:
    events = plan.timeline
    end = timeline.end_of(events)
    lanes = timeline.lanes(events, _SHORT * end)
    legend = "".join(
        f'<span><i style="background:var(--{hue})"></i>{words} {seconds(time)}</span>'
        for (words, hue), time in timeline.totals(events).items()
    )
    names = [f'<div class="{_class(lane)}">{escape(lane.name)}</div>' for lane in lanes]
    waits = [f'<i class="wait" style="{_place(start, stop, end)}"></i>' for start, stop in timeline.waits(lanes)]
    return "\n".join(
        [
            f"<section><h2>{escape(step)} on {escape(plan.topology)}: {seconds(end)} in the order of the compiler</h2>",
            f'<p>{escape(timeline.summary(events))}</p><p class="legend">{legend}</p>',
            '<p class="muted">Point at a bar to see its operation. The Tab key goes to long and to exposed ones.</p>',
            *(_zoom(f"zoom{i}", zoom) for zoom in _ZOOMS),
            f'<div class="chart"><div class="names"><div class="phases"></div>{"".join(names)}</div>',
            f'<div class="scroll"><div class="strip">{_phases(events)}',
            *_ticks(end),
            *(_lane(lane, waits, end) for lane in lanes),
            f'</div></div></div><p class="muted">{timeline.CAPTION}</p></section>',
        ]
    )


def _zoom(group: str, zoom: int) -> str:
    """Return the button for one width of a timeline."""
    name, label = f"{group}-{zoom}", f"{zoom} times as wide" if zoom > 1 else "whole step"
    checked = ' checked=""' if zoom == 1 else ""
    return (
        f'<input type="radio" name="{group}" id="{name}" class="z{zoom}"{checked}/><label for="{name}">{label}</label>'
    )


def _phases(events: Sequence[Event]) -> str:
    end = timeline.end_of(events)
    phases = timeline.phases(events)
    places = [f'<div style="{_place(start, stop, end)}">{name}</div>' for name, start, stop in phases]
    return f'<div class="phases">{"".join(places)}</div>'


def _class(lane: Lane) -> str:
    return "computation" if lane.computes else "collective"


def _ticks(end: float) -> Iterator[str]:
    for zoom in _ZOOMS:
        for tick in steps(1e3 * end, 10 * zoom):
            if tick < 1e3 * end * (1 - _LABEL / zoom):
                yield f'<div class="tick t{zoom}" style="left:{_percent(tick / 1e3, end)}"><b>{number(tick)}</b></div>'


def _lane(lane: Lane, waits: Sequence[str], end: float) -> str:
    bars = [*(waits if lane.computes else ()), *(_bar(bar, end) for bar in lane.bars)]
    return f'<div class="lane {_class(lane)}">{"".join(bars)}</div>'


def _bar(bar: Bar, end: float) -> str:
    exposed = f'<u style="width:{_percent(bar.exposed, bar.length)}"></u>' if bar.exposed else ""
    kind = bar.kind if bar.kind in COMPUTATION else "overlapped"
    focus = ' tabindex="0"' if bar.exposed or bar.length >= _FOCUSED * end else ""
    place = _place(bar.start, bar.end, end)
    return f'<i class="bar {kind}"{focus} style="{place}">{exposed}<span>{_description(bar)}</span></i>'


def _place(start: float, stop: float, end: float) -> str:
    return f"left:{_percent(start, end)};width:{_percent(stop - start, end)}"


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.4f}".rstrip("0").rstrip(".") + "%"


def _description(bar: Bar) -> str:
    """Return the text of a bar: its name, kind, least time, size and origin."""
    event, count = bar.events[0], len(bar.events)
    kind = {"product": "matrix product", "convolution": "convolution", "other": "computation"}.get(bar.kind, bar.kind)
    if count > 1:
        names = ", ".join(event.name for event in bar.events[:_NAMED]) + ", …" * (count > _NAMED)
        lines = [f"<b>{count} × {escape(kind)}</b>", escape(names)]
    else:
        lines = [f"<b>{escape(event.name)}</b>", escape(kind)]
    exposed = f", exposed {seconds(bar.exposed)}" if bar.exposed else ""
    lines[-1] += f": {seconds(bar.length)}{exposed}, {_amount(bar.kind, sum(event.size for event in bar.events))}"
    if count == 1:
        origin = ", ".join(part for part in (event.operation, event.line) if part)
        lines += [escape(origin)] if origin else []
    return "\n".join(lines)


def _amount(kind: str, total: float) -> str:
    if kind in COMPUTATION and kind != "other":
        return f"{count_of(total)} operations"
    return f"{size(total)} {'read and written' if kind == 'other' else 'sent'}"
