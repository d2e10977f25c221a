"""Diagrams of the first pages: the idea, and one for each of the two kinds of readers."""

from __future__ import annotations

from diagrams import Diagram, diagram

from replicax._report.drawing import HUES, Bars, Circle, Line, Rect

CODE_LINE = 19.0  # the distance of lines of code


def code(drawing: Diagram, x: float, y: float, lines: str) -> None:
    """Write lines of code, the first with its baseline at y."""
    for i, line in enumerate(lines.split("\n")):
        indent = len(line) - len(line.lstrip())
        drawing.text(x + 8 * indent, y + CODE_LINE * i, line.lstrip(), "start", mono=True)


def device(drawing: Diagram, x: float, y: float, number: int, wide: float = 52) -> None:
    """Draw a device with a replica and a copy of the variables."""
    middle = x + wide / 2
    drawing.add(Rect(x, y, wide, 46, fill="page", stroke="edge", radius=5))
    drawing.text(middle, y + 17, f"GPU {number}", room=(x, x + wide))
    drawing.add(Circle(middle - 10, y + 32, 7, HUES[number]), Bars(y + 25, 14, [(middle + 3, 14)], "purple"))


def legend(drawing: Diagram, x: float, y: float, name: str) -> None:
    """Explain a device's disc or square."""
    drawing.add(Bars(y - 11, 12, [(x, 12)], "purple") if name == "variables" else Circle(x + 6, y - 5, 6, "blue"))
    drawing.label(x + 18, y, name)


@diagram
def idea(drawing: Diagram) -> None:
    """A training step on four devices."""
    middles = [168 + 77.0 * i for i in range(4)]
    steps = (
        (24, "Split", "64 rows"),
        (104, "Run", ""),
        (269, "Add up", "the gradients,\nin one all-reduce"),
        (344, "Update", "every copy,\nin the same way"),
        (424, "Return", "one mean loss"),
    )
    for number, (y, title, text) in enumerate(steps, 1):
        drawing.number(18, y - 5, number)
        drawing.label(36, y, title, "ink", bold=True)
        drawing.label(36, y + 17, text)
    for y, text in ((128, "its rows"), (146, "its variables"), (185, "the same step"), (228, "its gradient")):
        drawing.label(36, y, text)
    drawing.grid(12, 116, HUES[:2], 1, 6)
    drawing.grid(18, 116, HUES[2:4], 1, 6)
    drawing.grid(12, 134, ["purple"] * 2, 2, 6)
    for i, (hue, x) in enumerate(zip(HUES, middles)):
        drawing.grid(195.5 + 44 * i, 10, [hue] * 4, 4, 11)
        drawing.arrow((217.5 + 44 * i, 57), (x, 84))
        drawing.box(x - 36, 88, 72, 158, f"GPU {i}", top=True, bold=True)
        drawing.grid(x - 33, 114, [hue] * 4, 4, 7.5)
        drawing.grid(x + 3, 118, ["purple"] * 3, 4, 7.5)
        drawing.arrow((x - 18, 147), (x - 18, 163))
        drawing.arrow((x + 18, 147), (x + 18, 163))
        drawing.box(x - 32, 167, 64, 26, "step(x)", fill="page", stroke="edge", mono=True)
        drawing.arrow((x, 195), (x, 209))
        drawing.grid(x - 15, 214, [hue] * 3, 4, 7.5)
        drawing.add(Line([(x, 240), (x, 278)], "edge"))
        drawing.arrow((x, 290), (x, 324))
        drawing.grid(x - 24, 329, ["purple"] * 3, 4, 12)
        drawing.add(Line([(x, 372), (x, 388)], "edge"))
    drawing.collective(middles, 282)
    center = sum(middles) / 4
    drawing.add(Line([(middles[0], 388), (middles[-1], 388)], "edge"))
    drawing.arrow((center, 388), (center, 406))
    drawing.add(Rect(center - 62, 410, 124, 30, fill="card", stroke="edge", radius=15))
    drawing.text(center, 430, "loss = 0.42", mono=True)


@diagram
def doors_tf(drawing: Diagram) -> None:
    """A TensorFlow program on all devices."""
    drawing.box(4, 8, 200, 74, "train.py, unchanged", top=True, bold=True)
    code(drawing, 13, 48, "import tensorflow as tf\ntf.distribute, tf.keras")
    drawing.box(232, 8, 204, 74, "one command", top=True, bold=True)
    code(drawing, 240, 57, "replicax run-tf train.py")
    drawing.arrow((206, 45), (229, 45))
    drawing.arrow((334, 84), (334, 103))
    drawing.box(4, 107, 432, 83)
    drawing.label(16, 129, "replicax.tf", "ink", bold=True)
    drawing.label(16, 147, "TensorFlow's names\non JAX and XLA,\nwithout TensorFlow")
    for i in range(4):
        device(drawing, 208 + 56.0 * i, 115, i)
    legend(drawing, 222, 178, "replica")
    legend(drawing, 322, 178, "variables")


@diagram
def doors_jax(drawing: Diagram) -> None:
    """A JAX program on all devices."""
    drawing.box(4, 8, 170, 180, "one device", top=True, bold=True)
    code(drawing, 13, 48, "for x in data:\n    loss = step(x)")
    drawing.box(202, 8, 234, 180, "every device", top=True, bold=True)
    code(drawing, 209, 48, "for x in split_data:\n    strategy.run(step, (x,))")
    drawing.arrow((176, 55), (199, 55))
    device(drawing, 63, 84, 0)
    for i in range(4):
        device(drawing, 209 + 56.0 * i, 84, i)
    legend(drawing, 56, 158, "step")
    legend(drawing, 56, 176, "variables")
    drawing.collective([235 + 56.0 * i for i in range(4)], 140)
    drawing.text(319, 162, "gradients added up,\nvariables kept equal", fill="muted")
