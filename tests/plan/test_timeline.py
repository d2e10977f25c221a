"""The timeline of a step, as a picture and as a page."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from replicax._base.planning import PlanError
from replicax._plan import picture, timeline
from replicax._plan.plans import Plan
from replicax._plan.report import Memory, TopologyPlan
from replicax._plan.schedule import Event

SVG = "{http://www.w3.org/2000/svg}"
FORWARD, BACKWARD, UPDATE = "jit(step)/jvp()/dot_general", "jit(step)/transpose(jvp())/dot_general", "jit(step)/sub"
# Ten ms of computation. It waits 2 ms for the second all-gather, of 3 ms, and 1 ms for all of the all-reduce.
EVENTS = (
    Event("dot.1", "product", 0.000, 0.004, operation=FORWARD, line="train.py:31", size=2e9),
    Event("all-gather-start.1", "all-gather", 0.000, 0.002, size=2**20),
    Event("all-gather-start.2", "all-gather", 0.003, 0.006, exposed=0.002, size=2**20),
    Event("fusion.1", "other", 0.006, 0.007, operation=FORWARD, size=2**20),
    Event("dot.2", "product", 0.007, 0.010, operation=BACKWARD, size=2e9),
    Event("all-reduce-start", "all-reduce", 0.010, 0.011, exposed=0.001, size=2**20),
    Event("fusion.2", "other", 0.011, 0.013, operation=UPDATE, size=2**20),
)
MEMORY = Memory(2**30, 2**31, 2**20, 3 * 2**30 + 2**20, 2**10, 2**30, 2**20)


def plan_of(*timelines):
    plan = TopologyPlan("h100:8", 8, MEMORY, MEMORY.total, 80e9, (), 1e12, 1e9, 1.0, (), bounds={"computation": 0.01})
    return Plan("step", tuple(replace(plan, topology=f"h100:{8 * i}", timeline=t) for i, t in enumerate(timelines, 1)))


def tracks_of(svg):
    """The lanes as (x, y, width, height)."""
    shapes = [shape for shape in ET.fromstring(svg).iter(f"{SVG}rect") if shape.get("class") == "f-card"]
    return [tuple(float(shape.get(name)) for name in ("x", "y", "width", "height")) for shape in shapes]


def bars_of(svg, hue):
    """The bars of one colour as (x, y, width, height)."""
    paths = [shape.get("d") for shape in ET.fromstring(svg).iter(f"{SVG}path") if shape.get("class") == f"f-{hue}"]
    matches = [re.match(r"M(.+) (.+)h(.+)v(.+)H", bar) for path in paths for bar in path.split("z")[:-1]]
    return [(float(bar[1]), float(bar[2]), float(bar[3]), float(bar[4])) for bar in matches]


def draw(tmp_path, plan, name):
    plan.draw(tmp_path / name)
    return (tmp_path / name).read_text(encoding="utf-8")


def test_bars_are_as_long_as_their_least_time():
    svg = timeline.chart("step", "h100:8", EVENTS).svg()
    (whole, *_), products, others = tracks_of(svg), bars_of(svg, "blue"), bars_of(svg, "edge")
    ms = whole[2] / 13  # pixels
    assert [width / ms for _, _, width, _ in products] == pytest.approx([4, 3], abs=0.01)
    assert [width / ms for _, _, width, _ in others] == pytest.approx([1, 2], abs=0.01)
    assert [(x - whole[0]) / ms for x, *_ in products] == pytest.approx([0, 7], abs=0.01)


def test_exposed_parts_of_collectives_are_marked_and_the_computation_waits_there():
    svg = timeline.chart("step", "h100:8", EVENTS).svg()
    whole, overlapped, exposed = tracks_of(svg)[0], bars_of(svg, "teal"), bars_of(svg, "red")
    ms = whole[2] / 13
    assert [round(width / ms, 1) for _, _, width, _ in overlapped] == [2, 1]  # none of the all-reduce
    marks = [(round((x - whole[0]) / ms, 1), round(width / ms, 1)) for x, _, width, _ in exposed]
    assert marks == [(4, 2), (10, 1)] * 2  # as lines in the lane of computation, then in the lanes of collectives
    assert all(whole[1] < y < whole[1] + whole[3] for _, y, _, _ in exposed[:2])
    assert exposed[2][3] > overlapped[0][3]  # visible without colours


def test_the_summary_says_how_much_of_the_communication_is_exposed():
    assert "6.00 ms of communication, 3.00 ms (50 %) are exposed" in timeline.summary(EVENTS)
    hidden = [replace(event, exposed=0.0) for event in EVENTS]
    assert timeline.summary(hidden) == "All 6.00 ms of communication overlap with computation."
    assert "(less than 1 %)" in timeline.summary([*hidden, Event("a", "all-gather", 0.012, 0.013, exposed=1e-5)])
    assert timeline.summary(EVENTS[:1]) == "The step has no communication."


def test_computation_is_above_collectives_and_lanes_do_not_overlap():
    more = Event("all-gather-start.3", "all-gather", 0.001, 0.004)
    rows = timeline.lanes([*EVENTS, more], 0.0)
    assert [row.name for row in rows] == ["computation", "all-gather", "", "all-reduce"]
    assert [event.name for bar in rows[2].bars for event in bar.events] == ["all-gather-start.3"]
    for row in rows:
        assert all(bar.end <= following.start for bar, following in zip(row.bars, row.bars[1:]))
    tracks = tracks_of(timeline.chart("step", "h100:8", [*EVENTS, more]).svg())
    assert all(y + height <= below for (_, y, _, height), (_, below, _, _) in zip(tracks, tracks[1:]))


def test_merging_keeps_the_time_of_every_kind():
    short = [Event(f"e{i}", ("product", "other")[i % 2], i * 1e-6, (i + 1) * 1e-6, size=1.0) for i in range(1000)]
    gathers = [Event(f"g{i}", "all-gather", i * 1e-6, (i + 0.5) * 1e-6, 0.2e-6) for i in range(1000)]
    events = [*short, Event("long", "product", 0.001, 0.002), *gathers]
    rows = timeline.lanes(events, 2e-6)
    assert sum(len(row.bars) for row in rows) < 1200
    bars = [bar for row in rows for bar in row.bars]
    for kind, expected in (("product", 0.0015), ("other", 0.0005), ("all-gather", 0.0005)):
        assert sum(bar.length for bar in bars if bar.kind == kind) == pytest.approx(expected)
    assert sum(bar.exposed for bar in bars) == pytest.approx(0.0002)
    assert sorted(e.name for bar in bars for e in bar.events) == sorted(e.name for e in events)
    for row in rows:
        assert all(bar.end <= following.start + 1e-12 for bar, following in zip(row.bars, row.bars[1:]))


def test_a_long_step_is_a_small_picture():
    kinds = "product", "other", "convolution"
    events = [Event(f"e{i}", kinds[i % 3], i * 1e-5, (i + 1) * 1e-5) for i in range(20_000)]
    events += [Event(f"g{i}", "all-gather", i * 1e-4, i * 1e-4 + 9e-5, 1e-5) for i in range(2_000)]
    assert len(timeline.chart("step", "h100:8", events).svg()) < 100_000


def test_phases_are_named_as_far_as_the_operations_say():
    assert [name for name, *_ in timeline.phases(EVENTS)] == ["forward", "backward", "update"]
    assert timeline.phases(EVENTS)[1][1:] == (0.007, 0.010)
    brief = Event("dot.3", "product", 0.0040, 0.0041, operation=BACKWARD)  # in the middle of the forward pass
    assert [name for name, *_ in timeline.phases([*EVENTS, brief])] == ["forward", "backward", "update"]
    assert timeline.phases([replace(event, operation=UPDATE) for event in EVENTS]) == []


def test_a_plan_draws_one_timeline_for_each_topology_that_has_one(tmp_path):
    several = draw(tmp_path, plan_of(EVENTS, (), EVENTS[:1]), "step.svg")
    assert "h100:8: 13.00 ms" in several and "h100:24: 4.00 ms" in several
    assert "step on h100:16" not in several
    titles = [shape.text for shape in ET.fromstring(several).iter(f"{SVG}text") if shape.get("font-size") == "15"]
    assert ["memory" in titles[0], "takes at least" in titles[1]] == [True, True] and len(titles) == 4
    page = draw(tmp_path, plan_of((), EVENTS), "step.html")
    assert page.count("<section>") == 1 and "step on h100:16: 13.00 ms" in page


def test_a_plan_without_events_draws_no_timeline(tmp_path):
    nothing = (Event("fusion", "other", 0.0, 0.0),)
    assert "overlap" not in draw(tmp_path, plan_of((), nothing), "step.svg")
    page = draw(tmp_path, plan_of((), nothing), "step.html")
    assert "<section>" not in page and "step: memory of a device" in page


def test_a_page_names_operations_and_their_lines(tmp_path):
    page = ET.fromstring(draw(tmp_path, plan_of(EVENTS), "step.html"))
    bars = {bar.find("span/b").text: bar for bar in page.iter("i") if bar.get("class", "").startswith("bar")}
    assert list(bars) == [
        "dot.1", "fusion.1", "dot.2", "fusion.2", "all-gather-start.1", "all-gather-start.2", "all-reduce-start",
    ]  # fmt: skip
    text = "".join(bars["dot.1"].itertext())
    assert text == f"dot.1\nmatrix product: 4.00 ms, 2.00 G operations\n{FORWARD}, train.py:31"
    assert "".join(bars["all-gather-start.2"].itertext()).endswith("3.00 ms, exposed 2.00 ms, 1.00 MiB sent")
    assert bars["dot.1"].get("style") == "left:0%;width:30.7692%"  # of 13 ms
    assert bars["all-gather-start.2"].find("u").get("style") == "width:66.6667%"
    assert bars["all-gather-start.2"].get("tabindex") == "0"


def test_a_page_lists_the_operations_of_a_merged_bar(tmp_path):
    short = tuple(Event(f"dot.{i}", "product", i * 1e-9, (i + 1) * 1e-9, size=1e6) for i in range(20))
    page = draw(tmp_path, plan_of((*short, Event("dot", "product", 1e-3, 2e-3))), "step.html")
    assert "<b>20 × matrix product</b>\ndot.0, dot.1, dot.2, dot.3, dot.4, …: 0.02 µs, 20.00 M operations" in page


def test_texts_are_escaped(tmp_path):
    bad = '<b>&"'
    events = (*EVENTS, Event(bad, bad, 0.0, 0.001, operation=bad, line=bad))
    plan = replace(plan_of(events), step=bad)
    for name in ("step.svg", "step.html"):
        text = draw(tmp_path, plan, name)
        ET.fromstring(text)
        assert bad not in text and "&lt;b&gt;&amp;&quot;" in text


def test_a_page_needs_no_other_file(tmp_path):
    page = draw(tmp_path, plan_of(EVENTS), "STEP.HTML")
    assert not any(word in page for word in ("<script", "<link", "<img", "src=", "url(", "@import", "href="))


def test_other_endings_are_refused(tmp_path):
    for name in ("step.doc", "step"):
        with pytest.raises(PlanError, match=r"ending '(\.doc)?'.* '.svg' or '.html'"):
            picture.check(tmp_path / name)
    with pytest.raises(PlanError, match="There is no folder .*none"):
        picture.check(tmp_path / "none" / "step.html")
