"""Diagrams of the documentation, each from a short description. `python scripts/pictures.py NAME ...` draws them.

All are 440 wide: a page of a phone, 358 wide, then shows letters of size 13 in size 10.6.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from replicax._report.drawing import HUES, Bars, Circle, Drawing, Line, Rect, Shape, Text, width_of

WIDTH, SIZE, LINE = 440.0, 13.0, 17.0  # of a drawing, its letters and the distance of their lines
DOCS = Path(__file__).parents[1] / "docs"
REPLICAS = [f"replica {i}" for i in range(4)]


DIAGRAMS: dict[str, Callable[[], Drawing]] = {}


class Diagram(Drawing):
    """A drawing of boxes, cells, arrows and texts, which raises ValueError for a text that does not fit."""

    def text(self, x: float, y: float, text: str, anchor: str = "middle", fill: str = "ink", bold: bool = False,
             mono: bool = False, room: tuple[float, float] = (0, WIDTH)) -> None:  # fmt: skip
        """Write lines of text, the first with its baseline at y, within the room from left to right."""
        for i, line in enumerate(text.split("\n")):
            wide = width_of(line, SIZE, mono)
            left = x - wide * {"start": 0, "middle": 0.5, "end": 1}[anchor]
            if left < room[0] or left + wide > room[1]:
                raise ValueError(f"{self.title}: no room for {line!r}, {left:.0f} to {left + wide:.0f} of {room}")
            self.add(Text(x, y + LINE * i, line, SIZE, anchor, fill, bold, mono))

    def label(self, x: float, y: float, text: str, fill: str = "muted", bold: bool = False) -> None:
        """Write lines that begin at x."""
        self.text(x, y, text, "start", fill, bold)

    def box(self, x: float, y: float, width: float, height: float, text: str = "", *, fill: str = "card",
            stroke: str = "faint", top: bool = False, bold: bool = False, mono: bool = False) -> None:  # fmt: skip
        """Draw a box with lines of text in its middle or at its top."""
        self.add(Rect(x, y, width, height, fill=fill, stroke=stroke, radius=6))
        first = y + 17 if top else y + height / 2 + 4.5 - LINE / 2 * text.count("\n")
        if text:
            self.text(x + width / 2, first, text, bold=bold, mono=mono, room=(x, x + width))

    def values(self, x: float, y: float, texts: Sequence[str], hues: Sequence[str], wide: float, step: float) -> None:
        """Draw a row of values: small boxes, each with an edge of its colour."""
        spans = [(x + i * step, wide) for i in range(len(texts))]
        self.add(Bars(y, 20, spans, "card"))
        for hue in dict.fromkeys(hues):
            self.add(Bars(y + 20, 4, [span for span, other in zip(spans, hues) if other == hue], hue))
        for (left, _), text in zip(spans, texts):
            self.text(left + wide / 2, y + 15, text, room=(left, left + wide))

    def cells(self, x: float, y: float, hues: Sequence[str | None], size: float = 15) -> None:
        """Draw a row of cells; those without a colour are dashed outlines."""
        for hue in dict.fromkeys(hues):
            spans = [(x + i * size + 1, size - 2) for i, other in enumerate(hues) if other == hue]
            if hue is not None:
                self.add(Bars(y, size, spans, hue))
            else:
                self.add(*(Rect(left, y, wide, size, stroke="edge", dashed=True) for left, wide in spans))

    def grid(self, x: float, y: float, hues: Sequence[str], columns: int, size: float) -> None:
        """Draw a matrix, with a colour for each of its rows."""
        spans = [(x + i * size + 0.5, size - 1) for i in range(columns)]
        self.add(*(Bars(y + i * size + 0.5, size - 1, spans, hue) for i, hue in enumerate(hues)))

    def arrow(self, *points: tuple[float, float], hue: str = "edge", dashed: bool = False) -> None:
        """Draw an arrow through points."""
        self.add(Line(points, hue, 1.5, arrow=True, dashed=dashed))

    def collective(self, xs: Sequence[float], y: float) -> None:
        """Draw a message among all: a red line with a dot for each member."""
        self.add(Line([(xs[0], y), (xs[-1], y)], "red", 3), *(Circle(x, y, 5, "red") for x in xs))

    def number(self, x: float, y: float, number: int) -> None:
        """Draw a number in a disc."""
        self.add(Circle(x, y, 10, "ink"), Text(x, y + 4.5, str(number), SIZE, "middle", "page", bold=True))


def bottom_of(shape: Shape) -> float:
    """Return the y of the lowest point of a shape."""
    if isinstance(shape, Line):
        return max(y for _, y in shape.points)
    return shape.y + getattr(shape, "height", getattr(shape, "radius", 5.0))


def diagram(draw: Callable[[Diagram], None]) -> Callable[[Diagram], None]:
    """Register a function that draws.

    Its docstring is the picture's title. The description is the alternative text of the page that shows the picture.
    """
    name = draw.__name__

    def make() -> Drawing:
        pages = "\n".join(page.read_text(encoding="utf-8") for page in sorted(DOCS.rglob("*.md")))
        texts = re.findall(rf"!\[(.*)\]\(\.\./images/{name}\.svg\)", pages)
        if not texts or not draw.__doc__:
            raise ValueError(f"No page shows {name}.svg with an alternative text, or {name} has no docstring.")
        drawing = Diagram(draw.__doc__.rstrip("."), texts[0], WIDTH)
        draw(drawing)
        drawing.height = max(map(bottom_of, drawing.shapes)) + 10
        return drawing

    DIAGRAMS[name] = make
    return draw


def sequence(drawing: Diagram, columns: dict[str, float], events: Sequence[tuple]) -> None:
    """Draw messages between members, from top to bottom.

    Args:
        columns: the x of each member.
        events: in order; texts may have several lines:
            ("at", text): a time, at the left of the next event;
            ("do", member, text, ...) or ("stop", ...): boxes at members, in one row; red where they stop;
            ("send", from, to, text): an arrow with a text above it;
            ("all", text): a box over all members;
            ("meet", text): a message among all members.
    """
    xs, y = list(columns.values()), 44.0
    first, last = xs[0] - 46, xs[-1] + 46
    for kind, *words in events:
        tall = LINE * (max(str(word).count("\n") for word in words) + 1)
        if kind == "at":
            drawing.label(4, y + 14, words[0])
        elif kind in ("do", "stop"):
            for member, text in zip(words[::2], words[1::2]):
                wide = max(width_of(line, SIZE) for line in text.split("\n")) + 12
                stroke = "red" if kind == "stop" else "edge"
                drawing.box(columns[member] - wide / 2, y, wide, tall + 8, text, fill="page", stroke=stroke)
            y += tall + 20
        elif kind == "send":
            sender, receiver = columns[words[0]], columns[words[1]]
            middle, away = (sender + receiver) / 2, 3 if receiver > sender else -3
            for i, line in enumerate(words[2].split("\n")):
                wide = width_of(line, SIZE)
                drawing.add(Rect(middle - wide / 2, y + LINE * i, wide, LINE, fill="page"))
            drawing.text(middle, y + 12, words[2])
            y += tall + 3
            drawing.arrow((sender + away, y), (receiver - away, y), hue="blue")
            y += 12
        elif kind == "all":
            drawing.box(first, y, last - first, tall + 8, words[0])
            y += tall + 20
        else:
            drawing.add(Rect(first, y, last - first, tall, fill="page"))
            drawing.text((first + last) / 2, y + 12, words[0])
            drawing.collective(xs, y + tall + 7)
            y += tall + 24
    drawing.shapes[:0] = [Line([(x, 34), (x, y - 8)], "faint", 1.5) for x in xs]
    for name, x in columns.items():
        drawing.box(x - 46, 8, 92, 26, name, bold=True)


@diagram
def strategies(drawing: Diagram) -> None:
    """Six strategies side by side."""
    drawing.add(Circle(16, 18, 7, "blue"), Bars(11, 14, [(192, 14)], "purple"))
    drawing.label(30, 23, "replica")
    drawing.label(214, 23, "variables: a copy, or a part")
    gpus = ["GPU 0", "GPU 1", "GPU 2", "GPU 3"]
    cards: list[tuple[str, str, list[tuple[str, str]]]] = [
        ("OneDeviceStrategy", "one replica on one device", [("GPU 0", "rv")]),
        ("MirroredStrategy", "a copy on each device\nof one machine", [(gpu, "rv") for gpu in gpus]),
        ("CentralStorageStrategy", "one copy, which each step\nreads and writes",
         [*((gpu, "r") for gpu in gpus[:3]), ("CPU 0", "v")]),
        ("MultiWorkerMirroredStrategy", "a copy on each device\nof each worker",
         [(gpus[0], "rv"), (gpus[1], "rv"), (gpus[0], "rv"), (gpus[1], "rv")]),
        ("TPUStrategy", "a copy on each core", [(f"TPU {i}", "rv") for i in range(4)]),
        ("ParameterServerStrategy", "workers run on their own,\nservers keep the variables",
         [("chief", ""), ("worker", "r"), ("worker", "r"), ("ps", "p"), ("ps", "q")]),
    ]  # fmt: skip
    for i, (title, caption, devices) in enumerate(cards):
        left, top = 4 + 220.0 * (i % 2), 36 + 154.0 * (i // 2)
        drawing.box(left, top, 212, 146, title, top=True, bold=True)
        drawing.text(left + 106, top + 36, caption, fill="muted", room=(left, left + 212))
        if title.startswith("Multi"):
            for half in (0, 100):
                drawing.add(Rect(left + 7 + half, top + 66, 97, 72, stroke="edge", radius=4, dashed=True))
        wides = [28.0 if name == "ps" else 37.0 if name == "chief" else 46.0 for name, _ in devices]
        x = left + 106 - (sum(wides) + 3 * len(wides) - 3) / 2
        for number, ((name, parts), wide) in enumerate(zip(devices, wides)):
            drawing.add(Rect(x, top + 72, wide, 60, fill="page", stroke="faint", radius=4))
            drawing.text(x + wide / 2, top + 90, name, room=(x, x + wide))
            middle = x + wide / 2
            if "r" in parts:
                drawing.add(Circle(middle - 10 * ("v" in parts), top + 112, 7, HUES[number % 4]))
            if "v" in parts:
                drawing.add(Bars(top + 105, 14, [(middle + (2 if "r" in parts else -7), 14)], "purple"))
            if parts in ("p", "q"):
                drawing.add(Bars(top + 105, 14, [(middle - 7 + 7 * (parts == "q"), 7)], "purple"))
                drawing.add(Rect(middle - 7, top + 105, 14, 14, stroke="edge", dashed=True))
            x += wide + 3


@diagram
def two_ways(drawing: Diagram) -> None:
    """Eager threads in turn, and one compiled program."""
    drawing.label(8, 22, "Eagerly: Python, one thread at a time", "ink", bold=True)
    drawing.label(8, 176, "Compiled: one program, all replicas at a time", "ink", bold=True)
    for i, (name, hue) in enumerate(zip(REPLICAS, HUES)):
        for y in (36 + 24 * i, 190 + 24 * i):
            drawing.label(8, y + 13, name)
            drawing.add(Line([(76, y + 8), (432, y + 8)], "faint", 1))
        drawing.add(Bars(36 + 24 * i, 16, [(80 + 41 * i, 39), (262 + 41 * i, 39)], hue))
        drawing.add(Bars(190 + 24 * i, 16, [(190, 50), (256, 50), (318, 50), (384, 44)], hue))
    drawing.add(Bars(34, 92, [(248, 10)], "red"), Bars(188, 92, [(242, 10), (370, 10)], "red"))
    drawing.text(253, 144, "all_reduce: the replicas meet")
    drawing.box(80, 188, 104, 92, "trace once,\ncompile", stroke="edge")
    for left, right, name in ((80, 306, "first call"), (318, 430, "further calls")):
        drawing.add(Line([(left, 292), (right, 292)], "edge"))
        drawing.text((left + right) / 2, 310, name)


@diagram
def values(drawing: Diagram) -> None:
    """Values and variables on four replicas."""
    xs = [158 + 78.0 * i for i in range(4)]
    for x, name in zip(xs, REPLICAS):
        drawing.text(x, 20, name, bold=True)
    for y, title, note, row, hues in (
        (34, "PerReplica x", "one part each", (1, 2, 3, 4), HUES[:4]),
        (142, "mirrored\nvariable", "outside: 10", (10, 10, 10, 10), ["purple"] * 4),
        (246, "on-read\nvariable", "outside: 30", (3, 6, 9, 12), HUES[:4]),
    ):
        drawing.label(8, y + 14, title, "ink", bold=True)
        drawing.label(8, y + 14 + LINE * (title.count("\n") + 1), note)
        drawing.values(xs[0] - 20, y, [str(number) for number in row], hues, 40, 78)
    drawing.text(275, 82, "total.assign_add(x): one message, the sum")
    drawing.text(275, 218, "seen.assign_add(x), three times: no message")
    drawing.collective(xs, 106)
    for x in xs:
        drawing.add(Line([(x, 88), (x, 101)], "edge"))
        drawing.arrow((x, 113), (x, 139))
        drawing.arrow((x, 224), (x, 243))
    drawing.add(Line([(8, 200), (432, 200)], "faint", 1))


@diagram
def uneven(drawing: Diagram) -> None:
    """Ten rows on four replicas."""
    owners = [0, 0, 0, 1, 1, 1, 2, 2, 2, 3]
    drawing.label(8, 47, "a batch", "ink", bold=True)
    drawing.values(90, 30, [str(row) for row in range(10)], [HUES[owner] for owner in owners], 32, 34)
    drawing.text(256, 20, "ceil(10 / 4) = 3 rows each; the rest for the last", fill="muted")
    xs = [132 + 86.0 * i for i in range(4)]
    drawing.label(8, 106, "replica", "ink", bold=True)
    drawing.label(8, 142, "its rows", "ink", bold=True)
    for name, y in (("its mean", 180), ("its share", 212)):
        drawing.label(8, y, name, "ink", bold=True)
    for i, x in enumerate(xs):
        rows = [row for row, owner in enumerate(owners) if owner == i]
        drawing.arrow((90 + 34 * sum(rows) / len(rows) + 16, 58), (x, 88))
        drawing.text(x, 106, str(i))
        drawing.values(x - 13 * len(rows) + 1, 124, [str(row) for row in rows], [HUES[i]] * len(rows), 24, 26)
        drawing.text(x, 180, f"{sum(rows) / len(rows):g}", fill="muted")
        drawing.text(x, 212, f"{sum(rows) / 10:g}")
    drawing.box(4, 228, 432, 50)
    drawing.label(14, 249, "sum of the shares: 4.5, the mean of all ten rows", "ink", bold=True)
    drawing.label(14, 249 + LINE, "mean of the means: 5.25, which counts row 9 three times")


@diagram
def communication(drawing: Diagram) -> None:
    """How gradients travel."""
    xs = [158 + 78.0 * i for i in range(4)]
    for x, name in zip(xs, REPLICAS):
        drawing.text(x, 48, name)

    def row(y: float, title: str, hue: str | None = None, whole: bool = True) -> None:
        drawing.label(8, y + 12, title)
        for i, x in enumerate(xs):
            drawing.cells(x - 30, y, [hue or HUES[i] if whole or part == i else None for part in range(4)])

    def message(y: float, name: str) -> None:
        drawing.label(8, y + 5, name, "ink", bold=True)
        drawing.collective(xs, y)
        for x in xs:
            drawing.arrow((x, y + 8), (x, y + 24))

    drawing.label(8, 22, "By default: each updates all variables", "ink", bold=True)
    row(60, "gradient")
    message(96, "all-reduce")
    row(124, "sum", "green")
    row(152, "variables", "purple")
    drawing.add(Line([(8, 184), (432, 184)], "faint", 1))
    drawing.label(8, 208, "shard_optimizer_state=True: each updates a part", "ink", bold=True)
    row(224, "gradient")
    message(260, "reduce-scatter")
    row(288, "sum", "green", whole=False)
    row(316, "variables", "purple", whole=False)
    message(352, "all-gather")
    row(380, "variables", "purple")
    drawing.add(Line([(8, 412), (432, 412)], "faint", 1))
    drawing.label(8, 436, "Gradients in messages (CPU)", "ink", bold=True)
    for x, wide, gradients, text in (
        (12, 172, (20, 34, 14, 44, 24), "each below 1 MB:\nin messages of up to 4 MB"),
        (196, 232, (220,), "larger: a message of its own\n"),
    ):
        drawing.add(Rect(x, 452, wide, 32, stroke="red", radius=6))
        spans, left = [], x + 6.0
        for size in gradients:
            spans.append((left, size))
            left += size + 6
        drawing.add(Bars(460, 16, spans, "blue"))
        drawing.text(x + wide / 2, 506, text.rstrip("\n"))


@diagram
def failure(drawing: Diagram) -> None:
    """A worker fails, and its job ends."""
    blames = "names worker 1,\nexits with 70"
    sequence(
        drawing,
        {"worker 0": 126, "worker 1": 248, "worker 2": 370},
        [
            ("meet", "call 40 of train_step"),
            ("at", "0 s"),
            ("stop", "worker 1", "ValueError:\nits traceback"),
            ("send", "worker 1", "worker 0", "failed"),
            ("at", "0.3 s"),
            ("do", "worker 0", "which failure\nwas first?"),
            ("send", "worker 0", "worker 1", "diagnosis"),
            ("send", "worker 0", "worker 2", "diagnosis"),
            ("at", "\u2264 5 s"),
            ("do", "worker 0", blames, "worker 1", "exits with 1", "worker 2", blames),
            ("at", "then"),
            ("all", "the launcher sees the first process end"),
            ("at", "+ 2 s"),
            ("all", "it sends SIGTERM to those that still run"),
            ("at", "+ 2 s"),
            ("all", "and SIGKILL"),
            ("at", "at last"),
            ("all", "worker 1 failed first, ... : exit status 1"),
        ],
    )


@diagram
def preemption(drawing: Diagram) -> None:
    """A worker is preempted, and its job starts again."""
    workers = ("worker 0", "worker 1", "worker 2")

    def all_of(*texts: str) -> tuple[str, ...]:
        return tuple(word for pair in zip(workers, texts) for word in pair)

    sequence(
        drawing,
        {"worker 0": 126, "worker 1": 248, "worker 2": 370},
        [
            ("do", *all_of("in step 41", "in step 41", "in step 40")),
            ("stop", "worker 2", "SIGTERM"),
            ("at", "notice"),
            ("send", "worker 2", "worker 0", "I am to end soon"),
            ("at", "hold"),
            ("send", "worker 0", "worker 1", "how many steps\nhave you begun?"),
            ("send", "worker 0", "worker 2", "how many steps have you begun?"),
            ("send", "worker 1", "worker 0", "41"),
            ("send", "worker 2", "worker 0", "40"),
            ("at", "stop"),
            ("send", "worker 0", "worker 1", "stop after 42"),
            ("send", "worker 0", "worker 2", "stop after 42"),
            ("meet", "steps 41 and 42, all together"),
            ("at", "save"),
            ("all", "all save one checkpoint, of step 42"),
            ("at", "go"),
            ("do", *all_of(*["exits with 42"] * 3)),
            ("at", "restart"),
            ("all", "the launcher starts all again, and they\nrestore step 42 and go on with step 43"),
        ],
    )


@diagram
def checkpoints(drawing: Diagram) -> None:
    """A job saves a checkpoint."""
    sequence(
        drawing,
        {"worker 0": 110, "worker 1": 210, "folder": 366},
        [
            ("do", "worker 0", "save()", "worker 1", "save()", "folder", "ckpt-2"),
            ("send", "worker 0", "folder", "writes arrays and record"),
            ("do", "worker 1", "waits", "folder", ".replicax-\nunfinished-..."),
            ("send", "worker 0", "worker 1", "digests"),
            ("send", "worker 1", "worker 0", "digests"),
            ("do", "worker 0", "equal?", "worker 1", "equal?"),
            ("send", "worker 0", "folder", "fsync of all files"),
            ("send", "worker 0", "folder", "one rename"),
            ("do", "folder", "ckpt-3"),
            ("send", "worker 0", "folder", "adds it to the list"),
            ("do", "worker 0", "returns", "worker 1", "returns", "folder", "list: ckpt-3"),
            ("all", "killed before the rename: restores ckpt-2;\nafter it: ckpt-3. Never a half one."),
        ],
    )


@diagram
def packages(drawing: Diagram) -> None:
    """The layers of packages, and the path of a step through them."""
    layers = [
        ("what users import", "replicax.tf config data launch _commands"),
        ("strategies, tools", "_plan _placement _benchmark 1_strategies _integrations _saved_model"),
        ("run, save, serve", "26_engine _optim _checkpoint _parameter_server _rpc _autograph"),
        ("inside a step", "3_tracing 4_collectives 5_passes 7_variables _control_flow"),
        ("data, devices", "_input _data _values _cluster"),
        ("base, jobs", "_base _report _job _transport"),
    ]
    y = 8.0
    for title, names in layers:
        x, rows = 150.0, 0
        for name in names.split():
            label = name.lstrip("1234567")
            numbers = name.removesuffix(label)
            wide = width_of(label, SIZE) + 24 * len(numbers)
            if x + wide > WIDTH - 12:
                x, rows = 150.0, rows + 1
            for i, number in enumerate(numbers):
                drawing.number(x + 10 + 24 * i, y + 16 + 24 * rows, int(number))
            drawing.label(x + 24 * len(numbers), y + 21 + 24 * rows, label)
            x += wide + 8
        drawing.shapes.insert(0, Rect(4, y, 432, 32 + 24 * rows, fill="card", stroke="faint", radius=6))
        drawing.label(14, y + 21, title, "ink", bold=True)
        y += 38 + 24 * rows
    path = (
        "strategy.run, in an rx.function or jax.jit",
        "traces the replica function once",
        "frames: reads become inputs, writes outputs",
        "an all_reduce becomes one equation",
        "merge messages and small updates",
        "compiles the program, and calls it",
        "keep the new arrays until the next read",
    )
    for i, text in enumerate(path):
        drawing.number(24, y + 12 + 24 * i, i + 1)
        drawing.label(44, y + 17 + 24 * i, text, "ink")


@diagram
def launch(drawing: Diagram) -> None:
    """Launchers and workers on two machines."""
    for machine in range(2):
        left = 4 + 222.0 * machine
        drawing.box(left, 8, 210, 232, f"machine {machine}: 10.0.0.{machine + 1}", top=True, bold=True)
        drawing.box(left + 14, 36, 182, 44, f"replicax launch\n--worker-rank {2 * machine}", fill="page", stroke="edge")
        for i in range(2):
            x, hue = left + 57 + 96 * i, HUES[2 * machine + i]
            drawing.arrow((x - 16, 82), (x - 16, 111))
            drawing.arrow((x + 16, 112), (x + 16, 83), dashed=True)
            drawing.box(x - 44, 114, 88, 60, f"worker {2 * machine + i}\ntrain.py", fill="page", stroke="edge")
            drawing.add(Bars(165, 5, [(x - 38, 76)], hue), Line([(x, 176), (x, 201)], "edge"))
    drawing.arrow((200, 54), (238, 54))
    drawing.arrow((238, 64), (200, 64))
    drawing.collective([61, 157, 283, 379], 206)
    drawing.text(109, 230, "one all-reduce", room=(4, 214))
    drawing.text(331, 230, "in each step", room=(226, 436))
    lines = "Down: TF_CONFIG. Up: output and exit status. Between", "launchers: addresses, heartbeats, the first error."
    drawing.label(8, 262, "\n".join(lines))


@diagram
def servers(drawing: Diagram) -> None:
    """A scheduled function with parameter servers."""
    drawing.box(90, 8, 260, 66, "coordinator: a queue of closures", top=True, bold=True)
    drawing.cells(145, 44, ["blue", "orange", "teal", *["edge"] * 7])
    for i, x in enumerate((76, 220, 364)):
        drawing.box(x - 66, 136, 132, 66, f"worker {i}\nits own dataset", top=True, fill="page", stroke="edge")
        drawing.add(Bars(190, 5, [(x - 58, 116)], HUES[i]))
    drawing.arrow((150, 76), (98, 133), dashed=True)
    drawing.arrow((290, 76), (342, 133), dashed=True)
    drawing.arrow((206, 76), (206, 133))
    drawing.arrow((234, 133), (234, 77))
    drawing.box(10, 266, 420, 82, "parameter servers: each has half of the table", top=True, bold=True)
    for i, x in enumerate((116, 324)):
        drawing.box(x - 92, 292, 184, 48, fill="page", stroke="edge")
        drawing.label(x - 80, 320, f"ps {i}", "ink")
        drawing.cells(x - 40, 308, [*["purple"] * 4, *[None] * 4] if i == 0 else [*[None] * 4, *["purple"] * 4])
    for x, y0, y1 in ((196, 204, 263), (220, 264, 205), (244, 204, 263)):
        drawing.arrow((x, y0), (x, y1))
    for number, x, y in ((1, 206, 104), (5, 234, 104), (2, 196, 224), (3, 220, 242), (4, 244, 224)):
        drawing.number(x, y, number)
    texts = (
        "a closure and its arguments, to any free worker",
        "the ids to look up, and other variables to read",
        "these rows, and the values of these variables",
        "gradients of the rows; the servers update them",
        "the closure's result",
    )
    for i, text in enumerate(texts):
        drawing.number(24, 372 + 24 * i, i + 1)
        drawing.label(44, 377 + 24 * i, text, "ink")


@diagram
def resume(drawing: Diagram) -> None:
    """A killed job goes on exactly."""
    first, last = 10, 24
    xs = {step: 8 + 28.4 * (step - first) for step in range(first, last + 1)}
    for y, title, steps, again in (
        (34, "never interrupted", range(10, 25), ()),
        (110, "killed after step 18", range(10, 19), ()),
        (186, "started again", range(17, 25), (17, 18)),
    ):
        drawing.label(8, y - 10, title, "ink", bold=True)
        hues = ["teal" if step in again else "blue" for step in steps]
        drawing.values(xs[steps[0]], y, [str(step) for step in steps], hues, 26, 28.4)
    for step in (11, 16):
        for y in (34, 110):
            drawing.add(Circle(xs[step] + 13, y + 32, 4, "purple"))
    drawing.arrow((xs[16] + 13, 148), (xs[16] + 13, 198), (xs[17] - 4, 198), hue="purple")
    drawing.add(
        Line([(xs[19] + 4, 112), (xs[19] + 20, 130)], "red", 3), Line([(xs[19] + 20, 112), (xs[19] + 4, 130)], "red", 3)
    )
    drawing.add(Circle(16, 228, 4, "purple"))
    drawing.label(28, 233, "saved")
    drawing.text(432, 233, "17 and 18 come again, equal to the last bit", "end")


@diagram
def shards(drawing: Diagram) -> None:
    """The share of each of four replicas, by option."""
    for x, name in ((8, "variables"), (136, "gradients"), (264, "Adam's two moments")):
        drawing.label(x, 22, name)
    for y, title, parts in (
        (44, "MirroredStrategy()", (4, 4, 4)),
        (124, "shard_optimizer_state=True", (4, 4, 1)),
        (204, "shard_variables=True", (1, 1, 1)),
    ):
        drawing.label(8, y + 12, title, "ink", bold=True)
        for x, hue, part, copies in (
            (8, "purple", parts[0], 1),
            (136, "green", parts[1], 1),
            (264, "orange", parts[2], 2),
        ):
            for copy in range(copies):
                drawing.cells(x + 84 * copy, y + 24, [hue if i < part else None for i in range(4)], 20)
    drawing.add(Line([(8, 268), (432, 268)], "faint", 1))
    lines = (
        "Filled: what one replica keeps. With shard_variables a",
        "layer is gathered (dashed) while it is computed, and",
        "its gradient is reduced and scattered.",
    )
    drawing.label(8, 286, "\n".join(lines))


@diagram
def times(drawing: Diagram) -> None:
    """The times of a benchmark."""
    for y, name in ((40, "host"), (96, "devices"), (152, "input")):
        drawing.label(8, y + 14, name, "ink", bold=True)
        drawing.add(Line([(80, y + 10), (432, y + 10)], "faint", 1))
    drawing.add(Bars(40, 20, [(80, 40), (124, 40), (326, 40)], "purple"))
    drawing.add(Bars(96, 20, [(96, 70), (198, 70), (342, 60)], "blue"))
    drawing.add(Bars(96, 20, [(168, 28), (270, 28), (404, 28)], "red"))
    drawing.add(Bars(152, 20, [(80, 40), (124, 200)], "teal"))
    drawing.add(Rect(300, 96, 40, 20, stroke="edge", dashed=True))
    drawing.text(100, 32, "dispatch")
    drawing.add(Line([(198, 86), (298, 86)], "edge"))
    drawing.text(248, 80, "a step")
    drawing.text(130, 134, "compute")
    drawing.text(224, 134, "communication")
    drawing.text(346, 134, "input wait")
    drawing.text(224, 190, "the next batch is late")


@diagram
def pipeline(drawing: Diagram) -> None:
    """From a dataset to the replicas."""
    for x, wide, text in (
        (8, 118, "a Dataset of\nfiles or arrays"),
        (152, 90, "map, shuffle"),
        (268, 164, "batch(32):\nthe global batch"),
    ):
        drawing.box(x, 12, wide, 46, text, fill="page", stroke="edge")
    drawing.arrow((128, 35), (149, 35))
    drawing.arrow((244, 35), (265, 35))
    xs = [62 + 105.0 * i for i in range(4)]
    drawing.text(220, 88, "experimental_distribute_dataset: split, move to devices")
    for i, x in enumerate(xs):
        drawing.arrow((x, 98), (x, 116))
        drawing.box(x - 48, 120, 96, 50, f"replica {i}", top=True, bold=True)
        drawing.cells(x - 44, 146, [HUES[i]] * 8, 11)
    drawing.add(Line([(8, 192), (432, 192)], "faint", 1))
    drawing.label(8, 216, "Ahead of time: a background thread", "ink", bold=True)
    for y, name in ((234, "thread"), (274, "devices")):
        drawing.label(8, y + 15, name)
        drawing.add(Line([(76, y + 11), (432, y + 11)], "faint", 1))
    drawing.values(80, 234, ["batch 1", "batch 2", "batch 3", "batch 4"], ["teal"] * 4, 68, 84)
    drawing.values(164, 274, ["step 1", "step 2", "step 3"], ["blue"] * 3, 82, 84)
    drawing.text(256, 320, "each step finds its batch on its devices", fill="muted")


def stack(drawing: Diagram, rows: Sequence[tuple[str, str]], arrows: Sequence[str]) -> None:
    """Draw layers from top to bottom: a title and a line for each, and the calls between them."""
    for i, (name, text) in enumerate(rows):
        y = 6 + 92.0 * i
        drawing.box(24, y, 392, 54)
        drawing.text(220, y + 22, name, bold=True)
        drawing.text(220, y + 41, text, fill="muted")
        if i < len(arrows):
            drawing.arrow((60, y + 57), (60, y + 88))
            drawing.label(76, y + 78, arrows[i], "ink")


@diagram
def keras(drawing: Diagram) -> None:
    """Keras under a strategy."""
    stack(
        drawing,
        [
            ("your program", "makes the model in the scope, calls fit"),
            ("Keras 3", "layers, losses, optimizers, callbacks, epochs"),
            ("replicax", "replicas, shares of the batch, mirrored weights"),
            ("JAX and XLA", "one program for all devices"),
        ],
        ["model.fit, or a loop of your own", "train_step, on each replica; apply_gradients", "the step, traced once"],
    )


@diagram
def devices(drawing: Diagram) -> None:
    """Two replicas of two devices each."""
    for replica in range(2):
        left = 4 + 220.0 * replica
        drawing.box(left, 8, 212, 150, f"replica {replica}", top=True, bold=True)
        drawing.text(left + 106, 148, "axis \u201cmodel\u201d", fill="muted")
        for part in range(2):
            x = left + 8 + 100 * part
            drawing.box(x, 34, 96, 96, f"GPU {2 * replica + part}", top=True, fill="page")
            drawing.add(Bars(60, 60, [(x + 14 + 34 * part, 34)], HUES[part]))
            drawing.add(Rect(x + 14, 60, 68, 60, stroke="edge"))
    for part in range(2):
        y, first = 176 + 16.0 * part, 60 + 100.0 * part
        drawing.add(Line([(first, y), (first + 220, y)], HUES[part], 3))
        drawing.add(*(Circle(x, y, 5, HUES[part]) for x in (first, first + 220)))
    drawing.text(220, 222, "axis \u201creplica\u201d: gradients of equal halves are summed", fill="muted")


@diagram
def security(drawing: Diagram) -> None:
    """Who can do what at which connection."""
    for y, title, names, hue, rows in (
        (
            8.0,
            "Parameter servers: TLS with the job's secret",
            ("coordinator", "worker 0", "ps 0"),
            "green",
            (
                "is refused before anything is parsed",
                "sees sizes and times of messages",
                "can cut a connection, no more",
            ),
        ),
        (
            190.0,
            "Start, reports, collectives: plain connections",
            ("worker 0", "worker 1", "worker 2"),
            "orange",
            ("can end the job", "reads gradients, addresses, errors", "can change gradients, end the job"),
        ),
    ):
        drawing.box(4, y, 432, 92, title, top=True, bold=True)
        for i, name in enumerate(names):
            x = 76 + 144.0 * i
            drawing.box(x - 48, y + 42, 96, 32, name, fill="page", stroke="edge")
            if i < 2:
                drawing.add(Line([(x + 50, y + 58), (x + 94, y + 58)], hue, 3))
                if hue == "green":  # a lock
                    drawing.add(Rect(x + 64, y + 48, 16, 20, fill="card"))
                    drawing.add(Line([(x + 68, y + 56), (x + 68, y + 49), (x + 76, y + 49), (x + 76, y + 56)], hue, 2))
                    drawing.add(Rect(x + 64, y + 55, 16, 12, fill=hue, radius=2))
        for i, (who, what) in enumerate(zip(("a stranger", "a listener", "in between"), rows)):
            drawing.add(Circle(16, y + 112 + 22 * i, 5, "red"))
            drawing.label(28, y + 117 + 22 * i, who, "ink", bold=True)
            drawing.label(122, y + 117 + 22 * i, what, "ink")
    drawing.add(Rect(10, 222, 420, 52, stroke="orange", radius=6, dashed=True))
    drawing.label(8, 377, "A private network (dashed) keeps all three out.")
