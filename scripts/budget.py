"""Prints modules over 450 lines and functions over 60: places to look at, not errors.

python scripts/budget.py [FOLDER ...]
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

MODULE_LINES = 450
FUNCTION_LINES = 60


def over_budget(path: Path) -> list[str]:
    """One line of text for each thing in a file that is over the budget."""
    text = path.read_text(encoding="utf-8")
    found = []
    if (lines := text.count("\n")) > MODULE_LINES:
        found.append(f"{path}: {lines} lines (budget {MODULE_LINES})")
    for node in ast.walk(ast.parse(text, str(path))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = node.end_lineno - node.lineno + 1 - docstring_lines(node)
            if lines > FUNCTION_LINES:
                found.append(f"{path}:{node.lineno}: {node.name} has {lines} lines (budget {FUNCTION_LINES})")
    return found


def docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How many lines a function's docstring takes: the budget is for code."""
    if ast.get_docstring(node) is None:
        return 0
    return node.body[0].end_lineno - node.body[0].lineno + 1


def main() -> None:
    """Look at every module under the folders named on the command line, or under `src`."""
    found = [
        line
        for folder in sys.argv[1:] or ["src"]
        for path in sorted(Path(folder).rglob("*.py"))
        for line in over_budget(path)
    ]
    print(
        "\n".join(found)
        if found
        else f"Every module is within {MODULE_LINES} lines, every function within {FUNCTION_LINES}."
    )


if __name__ == "__main__":
    main()
