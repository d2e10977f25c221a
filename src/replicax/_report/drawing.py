"""Drawings of rectangles, lines and texts, as SVG.

Colours have names, for each of which there is one on light pages and one on dark pages.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import TypeAlias

from replicax._base.errors import InvalidArgumentError

# On light and on dark pages.
COLOURS = {
    "page": ("#ffffff", "#0d1117"),
    "card": ("#f3f5f8", "#1a212b"),
    "edge": ("#8c959f", "#6e7681"),
    "faint": ("#d0d7de", "#30363d"),
    "ink": ("#1f2328", "#e6edf3"),
    "muted": ("#57606a", "#9ba5b0"),
    "blue": ("#2f6fd6", "#5b9bff"),
    "orange": ("#d9730d", "#f0993e"),
    "teal": ("#0f8a7e", "#3cc2b4"),
    "pink": ("#c2408a", "#ef7fb8"),
    "yellow": ("#a67c00", "#dcb63c"),
    "purple": ("#7a52c7", "#ab8bf0"),
    "green": ("#3d8c35", "#6cc463"),
    "red": ("#c93c37", "#f47067"),
}
HUES = ("blue", "orange", "teal", "pink", "yellow", "purple", "green", "red")
# The width of a letter against the size of the font, for the fonts that browsers take.
_WIDE = {False: 0.56, True: 0.61}


def width_of(text: str, size: float, mono: bool = False) -> float:
    """Returns about how wide a text is."""
    return len(text) * size * _WIDE[mono]


def shortened(text: str, most: int) -> str:
    """Returns a text of so many letters at the most, without its middle if it is longer.

    >>> shortened("encoder/layers/0/attention/kernel", 16)
    'encoder/…/kernel'
    """
    if len(text) <= most:
        return text
    keep = most - 1
    return f"{text[: (keep + 1) // 2]}…{text[len(text) - keep // 2 :]}"


@dataclass(frozen=True)
class Rect:
    x: float
    y: float
    width: float
    height: float
    fill: str | None = None
    stroke: str | None = None
    radius: float = 0
    dashed: bool = False


@dataclass(frozen=True)
class Bars:
    """Many rectangles in a row, each with its x and its width. They take a third of the space of as many `Rect`."""

    y: float
    height: float
    spans: Sequence[tuple[float, float]]
    fill: str


@dataclass(frozen=True)
class Line:
    points: Sequence[tuple[float, float]]
    stroke: str = "edge"
    width: float = 1.5
    arrow: bool = False
    dashed: bool = False


@dataclass(frozen=True)
class Circle:
    x: float
    y: float
    radius: float
    fill: str


@dataclass(frozen=True)
class Text:
    x: float
    y: float
    text: str
    size: float = 12
    anchor: str = "start"
    fill: str = "ink"
    bold: bool = False
    mono: bool = False


Shape: TypeAlias = Rect | Bars | Line | Circle | Text


class Drawing:
    """Shapes, with a title and a description for those who cannot see them.

    Args:
        title: what it is, in a few words.
        description: what there is to see.

    Attributes:
        shapes: they are drawn in this order.
        width, height: the size.
    """

    def __init__(self, title: str, description: str, width: float = 0, height: float = 0):
        self.title, self.description, self.width, self.height = title, description, width, height
        self.shapes: list[Shape] = []

    def add(self, *shapes: Shape) -> None:
        """Adds shapes on top of those that are there."""
        self.shapes += shapes

    def svg(self) -> str:
        """Returns the drawing in the format SVG."""
        size = f'width="{_n(self.width)}" height="{_n(self.height)}" viewBox="0 0 {_n(self.width)} {_n(self.height)}"'
        style = (
            'style="max-width: 100%; height: auto" font-family="-apple-system, Segoe UI, Helvetica, Arial, sans-serif"'
        )
        head = f'<svg xmlns="http://www.w3.org/2000/svg" class="replicax" role="img" {size} {style}>'
        words = [f"<title>{escape(self.title)}</title>", f"<desc>{escape(self.description)}</desc>"]
        page = Rect(0, 0, self.width, self.height, fill="page", radius=6)
        body = [_svg(shape) for shape in [page, *self.shapes]]
        return "\n".join([head, *words, f"<style>{_style(self.shapes)}</style>", *body, "</svg>"])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the drawing to an SVG file.

        Raises:
            InvalidArgumentError: the file has another ending than ".svg", or there is no such folder.
        """
        check(path)
        Path(path).write_text(self.svg() + "\n", encoding="utf-8")

    def put_below(self, other: Drawing) -> None:
        """Adds the shapes of another drawing below those of this one."""
        for shape in other.shapes:
            if isinstance(shape, Line):
                points = [(x, y + self.height) for x, y in shape.points]
                self.shapes.append(replace(shape, points=points))
            else:
                self.shapes.append(replace(shape, y=shape.y + self.height))
        self.description = f"{self.description} {other.title}. {other.description}"
        self.width, self.height = max(self.width, other.width), self.height + other.height


def check(path: str | os.PathLike[str], endings: Sequence[str] = (".svg",)) -> None:
    """Raise `InvalidArgumentError` if there is no folder for a picture, or it has none of these endings."""
    kind = Path(path).suffix
    if not Path(path).parent.is_dir():
        raise InvalidArgumentError(f"There is no folder {Path(path).parent} to write {Path(path).name} to.")
    if kind.lower() not in endings:
        names = " or ".join(map(repr, endings))
        raise InvalidArgumentError(
            f"A picture cannot have the ending {kind!r}. Use {names}; browsers show such files, and tools such as "
            "rsvg-convert make PNG or PDF of an SVG file."
        )


def _n(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")


def _style(shapes: Sequence[Shape]) -> str:
    """Returns the rules of the colours that are used: those of light pages, and of dark ones where these are wanted."""
    used = {"page"}
    for shape in shapes:
        used |= {name for name in (getattr(shape, "fill", None), getattr(shape, "stroke", None)) if name}

    def rules(number: int) -> str:
        names = [name for name in COLOURS if name in used]
        return "".join(
            f".replicax .f-{name}{{fill:{COLOURS[name][number]}}}.replicax .s-{name}{{stroke:{COLOURS[name][number]}}}"
            for name in names
        )

    return f"{rules(0)}@media (prefers-color-scheme: dark){{{rules(1)}}}"


def _classes(fill: str | None, stroke: str | None) -> str:
    names = [f"f-{fill}"] if fill else []
    names += [f"s-{stroke}"] if stroke else []
    none = ' fill="none"' if not fill else ""
    return f'class="{" ".join(names)}"{none}' if names else 'fill="none"'


def _svg(shape: Shape) -> str:
    if isinstance(shape, Rect):
        place = f'x="{_n(shape.x)}" y="{_n(shape.y)}" width="{_n(shape.width)}" height="{_n(shape.height)}"'
        more = (f' rx="{_n(shape.radius)}"' if shape.radius else "") + (' stroke-dasharray="4 3"' * shape.dashed)
        return f"<rect {place}{more} {_classes(shape.fill, shape.stroke)}/>"
    if isinstance(shape, Bars):
        top, tall = _n(shape.y), _n(shape.height)
        path = "".join(f"M{_n(x)} {top}h{_n(width)}v{tall}H{_n(x)}z" for x, width in shape.spans)
        return f'<path d="{path}" {_classes(shape.fill, None)}/>'
    if isinstance(shape, Circle):
        return f'<circle cx="{_n(shape.x)}" cy="{_n(shape.y)}" r="{_n(shape.radius)}" {_classes(shape.fill, None)}/>'
    if isinstance(shape, Line):
        points = " ".join(f"{_n(x)},{_n(y)}" for x, y in shape.points)
        more = ' stroke-dasharray="4 3"' * shape.dashed
        line = f'<polyline points="{points}" stroke-width="{_n(shape.width)}"{more} {_classes(None, shape.stroke)}/>'
        if not shape.arrow:
            return line
        head = " ".join(f"{_n(x)},{_n(y)}" for x, y in _arrow_head(shape))
        return f'{line}<polygon points="{head}" {_classes(shape.stroke, None)}/>'
    weight = ' font-weight="600"' if shape.bold else ""
    family = ' font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"' if shape.mono else ""
    anchor = f' text-anchor="{shape.anchor}"' if shape.anchor != "start" else ""
    place = f'x="{_n(shape.x)}" y="{_n(shape.y)}" font-size="{_n(shape.size)}"'
    return f"<text {place}{anchor}{weight}{family} {_classes(shape.fill, None)}>{escape(shape.text)}</text>"


def _arrow_head(line: Line) -> list[tuple[float, float]]:
    (x0, y0), (x1, y1) = line.points[-2:]
    length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5 or 1.0
    dx, dy, long, wide = (x1 - x0) / length, (y1 - y0) / length, 8.0, 4.0
    back = x1 - dx * long, y1 - dy * long
    end = x1 + dx, y1 + dy
    return [end, (back[0] - dy * wide, back[1] + dx * wide), (back[0] + dy * wide, back[1] - dx * wide)]
