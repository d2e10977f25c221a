"""The command `replicax info`: its options, and its output."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import textwrap
from collections.abc import Sequence

from replicax._commands.info import cluster, devices, settings, versions
from replicax._commands.info.section import Section
from replicax._report import terminal
from replicax._report.terminal import Style, has_colours, is_terminal

_DESCRIPTION = """\
Show what replicax has to work with: versions, the devices that JAX finds, the libraries of the extras, the cluster that
the environment describes, and settings. What is wrong comes at the end, with what to do about it. Secrets are not
shown.
"""

_EPILOG = """\
examples:
  replicax info
  replicax info --json > info.json
  srun replicax info

exit status:
  0 when no problem was found; 1 when one was; 2 when an option is wrong.
"""


def parser(program: str) -> argparse.ArgumentParser:
    """Returns the parser of the options."""
    result = argparse.ArgumentParser(
        program, description=_DESCRIPTION, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("--json", action="store_true", help="print everything as JSON")
    text = "how long JAX may take to list its devices (default: 60)"
    result.add_argument("--timeout", type=_seconds, default=60.0, metavar="SECONDS", help=text)
    terminal.add_option(result)
    return result


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected seconds above 0; got {text!r}")
    return value


def main(arguments: Sequence[str], program: str) -> int:
    """Runs the command, and returns its exit status."""
    given = parser(program).parse_args(arguments)
    sections = found(given.timeout)
    problems = [problem for section in sections for problem in section.problems]
    if given.json:
        parts = {section.title.lower(): section.data for section in sections}
        print(json.dumps({"ok": not problems, "problems": problems, **parts}, indent=2))
    else:
        style = Style(has_colours(is_terminal(sys.stdout), given.color))
        print(as_text(sections, style, min(max(shutil.get_terminal_size((120, 24)).columns, 60), 120)))
    return 1 if problems else 0


def found(timeout: float) -> list[Section]:
    """Returns all sections; `timeout` is the time for the devices, in seconds."""
    return [
        versions.versions(),
        devices.devices(timeout),
        versions.extras(),
        cluster.cluster(),
        settings.settings(),
    ]


def as_text(sections: Sequence[Section], style: Style, width: int) -> str:
    """Returns the sections and then the problems, as lines for people."""
    lines: list[str] = []
    for section in sections:
        lines += [style.bold(section.title), *_rows(section, style, width), ""]
    problems = [problem for section in sections for problem in section.problems]
    if not problems:
        return "\n".join([*lines, style.good("No problem was found.")])
    lines.append(style.alarm("1 problem was found:" if len(problems) == 1 else f"{len(problems)} problems were found:"))
    for number, problem in enumerate(problems, 1):
        lead = f"{number:3}. "
        lines += textwrap.wrap(
            problem, width, initial_indent=lead, subsequent_indent=" " * len(lead), break_on_hyphens=False
        )
    return "\n".join(lines)


def _rows(section: Section, style: Style, width: int) -> list[str]:
    labels = max([len(label) for label, _ in section.rows if len(label) <= 30] or [0])
    lines = []
    for label, text in section.rows:
        if text.startswith("$ "):  # a command stays in one line, to be copied
            lines.append(f"  {'':{labels}}  {style.dim(text)}")
            continue
        indent = " " * (labels + 4)
        wrapped = textwrap.wrap(
            text, width, initial_indent=f"  {label:{labels}}  ", subsequent_indent=indent, break_on_hyphens=False,
            break_long_words=False,
        )  # fmt: skip
        lines += wrapped or [f"  {label}"]
    return lines
