"""Placements as text and as pictures."""

from __future__ import annotations

import importlib.util
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from strategies import grouped, mirrored

import replicax as rx
from replicax._report.drawing import COLOURS, HUES
from replicax._report.placement import Placement
from replicax._report.placement_data import Collective, Part, Place, PlacedArray
from replicax._report.placement_text import can_show

SVG = "{http://www.w3.org/2000/svg}"


def placement_of(devices=2, arrays=1, collectives=()):
    places = tuple(Place(f"GPU:{i}", i) for i in range(devices))

    def array(number):  # of so many columns and one, of which each device has a row
        parts = [Part((slice(i, i + 1), slice(0, number + 1)), 4 * (number + 1)) for i in range(devices)]
        held = {place.name: part for place, part in zip(places, parts)}
        return PlacedArray(f"w{number}", "float32", (devices, number + 1), held)

    made = [array(number) for number in range(arrays)]
    return Placement("step", places, tuple(made), tuple(collectives), {"arguments": 8} if collectives else {})


def test_devices_that_do_not_fit_have_a_table_of_their_own():
    lines = placement_of(devices=8).text(width=60, lines=False).splitlines()
    assert max(map(len, lines)) <= 60
    assert sum(line.startswith("w0") for line in lines) > 1
    assert re.findall(r"GPU:\d", "\n".join(lines)) == [f"GPU:{i}" for i in range(8)]
    whole = placement_of(devices=8).text(width=200, lines=False).splitlines()
    assert sum(line.startswith("w0") for line in whole) == 1


def test_the_largest_arrays_are_listed_and_the_others_are_summed():
    placement = placement_of(arrays=10)
    text = placement.text(arrays=3, width=100, lines=False)
    assert re.findall(r"^w\d", text, re.M) == ["w7", "w8", "w9"]
    assert re.search(r"^7 smaller ones +112 B +112 B$", text, re.M)  # 4 * (1 + ... + 7)
    assert "10 arrays" in text and len(re.findall(r"^w\d", placement.text(arrays=None), re.M)) == 10


def test_rules_are_plain_where_boxes_cannot_be_shown():
    assert can_show("utf-8") and not can_show("ascii") and not can_show(None) and not can_show("no such")
    placement = placement_of()
    assert placement.text(lines=False).isascii() and "─" in placement.text(lines=True)


def test_many_devices_are_counted():
    assert "24 more devices are not shown: GPU:39 is the last one" in str(placement_of(devices=40))


def test_a_name_finds_its_array():
    placement = placement_of(arrays=2)
    assert placement["w1"].shape == (2, 2)
    with pytest.raises(KeyError, match="There is no array 'w2'; there are w0, w1"):
        placement["w2"]


def root_of(placement):
    return ET.fromstring(placement.svg())


def filled(root, hue):
    return [each for each in root.iter(f"{SVG}rect") if each.get("class") == f"f-{hue}"]


def test_a_picture_fills_the_part_that_a_device_has():
    root = root_of(placement_of(devices=2))
    first, second = filled(root, HUES[0])[0], filled(root, HUES[1])[0]
    assert float(first.get("height")) == float(second.get("height")) == 14.0  # half of 28
    assert float(second.get("y")) - float(first.get("y")) == 14.0
    assert first.get("x") != second.get("x")


def test_equal_parts_have_the_same_colour():
    strategy = grouped(2, model=2)
    with strategy.scope():
        w = rx.Variable(strategy.split_to_devices(jnp.zeros((4, 6)), (None, "model")), name="w")
    root = root_of(strategy.visualize(w))
    assert [len(filled(root, hue)) for hue in HUES[:3]] == [2, 2, 0]


def test_collectives_join_the_devices_that_take_part():
    groups = (("GPU:0", "GPU:2"), ("GPU:1", "GPU:3"))
    placement = placement_of(4, 1, [Collective("all-gather", ("float32[4]",), 16, groups)])
    root = root_of(placement)
    dots = [(each.get("cx"), each.get("cy"), each.get("class")) for each in root.iter(f"{SVG}circle")]
    assert len(dots) == 4 and dots[0][1] == dots[1][1] != dots[2][1] == dots[3][1]
    assert dots[0][2] == dots[1][2] != dots[2][2]
    assert "among GPU:0, GPU:2; GPU:1, GPU:3" in root.find(f"{SVG}desc").text
    moved = placement_of(
        3, 1, [Collective("collective-permute", ("float32[4]",), 16, (("GPU:0", "GPU:1"), ("GPU:2", "GPU:0")))]
    )
    assert len([*root_of(moved).iter(f"{SVG}polygon")]) == 2  # heads of arrows
    assert "from GPU:0 to GPU:1, GPU:2 to GPU:0" in str(moved)


def test_a_picture_tells_those_who_cannot_see_it():
    root = root_of(placement_of())
    assert root.get("role") == "img" and root.find(f"{SVG}title").text == "step"
    assert "w0 float32[2, 1]: [0:1] on GPU:0, [1:2] on GPU:1." in root.find(f"{SVG}desc").text


def test_texts_stay_inside_of_the_picture():
    strategy = mirrored(8)
    with strategy.scope():
        w = rx.Variable(jnp.zeros((12345, 678)), name="a_name/that_is/very_long/" * 4)
    root = root_of(strategy.visualize(w))
    width, height = float(root.get("width")), float(root.get("height"))
    for text in root.iter(f"{SVG}text"):
        long = 0.56 * float(text.get("font-size")) * len(text.text)
        start = float(text.get("x")) - (long / 2 if text.get("text-anchor") == "middle" else 0)
        assert start >= 0 and start + long <= width, text.text
        assert 0 < float(text.get("y")) < height


def contrast(one, other):
    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted([luminance(one), luminance(other)], reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("mode", [0, 1], ids=["light", "dark"])
def test_colours_can_be_told_from_the_page(mode):
    page = COLOURS["page"][mode], COLOURS["card"][mode]
    assert all(contrast(COLOURS[name][mode], behind) >= 4.5 for name in ("ink", "muted") for behind in page)
    assert all(contrast(COLOURS[hue][mode], page[0]) >= 3 for hue in HUES)
    svg = placement_of().svg()
    assert f".f-ink{{fill:{COLOURS['ink'][mode]}}}" in svg and "prefers-color-scheme: dark" in svg


def test_a_picture_is_an_svg_file(tmp_path):
    placement = placement_of(2, 1, [Collective("all-reduce", ("float32[4]",), 16, (("GPU:0", "GPU:1"),))])
    placement.save(tmp_path / "a.svg")
    ET.parse(tmp_path / "a.svg")
    for name in ("a.png", "a"):
        with pytest.raises(rx.InvalidArgumentError, match=r"cannot have the ending '(.png)?'. Use '.svg'"):
            placement.save(tmp_path / name)
    with pytest.raises(rx.InvalidArgumentError, match="There is no folder"):
        placement.save(tmp_path / "missing" / "a.svg")


def test_notebooks_show_the_picture():
    placement = placement_of()
    assert placement.svg() in placement._repr_html_()
    assert repr(placement) == str(placement)


def test_empty_parts_are_outlined():
    strategy = mirrored(4)
    dataset = rx.data.Dataset.from_tensor_slices(np.ones((2, 3), np.float32)).batch(2)
    (batch,) = strategy.experimental_distribute_dataset(dataset)
    placement = strategy.visualize(batch)
    assert [placement["PerReplica"].text(f"GPU:{i}") for i in range(4)] == ["[0:1]", "[1:2]", "[2:2]", "[2:2]"]
    assert sum(each.get("stroke-dasharray") is not None for each in root_of(placement).iter(f"{SVG}rect")) == 2


def test_drawings_of_the_documentation_are_those_that_the_script_makes(monkeypatch):
    root = Path(__file__).parents[2]
    monkeypatch.syspath_prepend(root / "scripts")  # the script imports the module beside it
    spec = importlib.util.spec_from_file_location("pictures_of_documentation", root / "scripts" / "pictures.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    drawn = {name: make().svg() + "\n" for name, make in script.DRAWINGS.items()}
    kept = {name: (script.IMAGES / f"{name}.svg").read_text(encoding="utf-8") for name in drawn}
    assert drawn == kept, "Draw them anew, with `python scripts/pictures.py`."
    for name, svg in drawn.items():
        root = ET.fromstring(svg)
        assert root.find(f"{SVG}title").text and root.find(f"{SVG}desc").text, name
