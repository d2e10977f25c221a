"""Writes the reference of `replicax.tf`, a page for each namespace: `python site/tf_reference.py FOLDER`."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import markup  # noqa: E402
import tf_examples  # noqa: E402
import tf_names  # noqa: E402
from reference import heading  # noqa: E402
from sphinx.ext.napoleon import Config, GoogleDocstring  # noqa: E402
from sphinx.util.inspect import signature, stringify_signature  # noqa: E402

import replicax.tf as tf  # noqa: E402
from replicax.tf import _absent  # noqa: E402

NAPOLEON = Config(napoleon_use_ivar=True, napoleon_use_rtype=False)


def signature_of(value: object) -> str:
    """Returns the signature of a function or class, without types: those of operations say little."""
    try:
        return stringify_signature(signature(value), show_annotation=False, show_return_annotation=False)
    except (TypeError, ValueError):
        return "(...)"


def entry(full: str, value: object, others: list[str]) -> list[str]:
    """Returns the lines that describe one name."""
    if inspect.isclass(value):
        lines = [f".. py:class:: {full}{signature_of(value)}"]
    elif callable(value):
        lines = [f".. py:function:: {full}{signature_of(value)}"]
    else:
        lines = [f".. py:data:: {full}"]
    text = inspect.getdoc(value) if callable(value) or inspect.isclass(value) else ""
    body = text.splitlines() if text else []
    body = str(GoogleDocstring(markup.as_markup(body), NAPOLEON, what="function")).splitlines()
    if others:
        body += ["", "Other names: " + ", ".join(f"``{name}``" for name in others) + "."]
    if difference := _absent.difference(full.partition(".")[2]):
        body += ["", f"Differs from TensorFlow: {difference.rstrip('.')}."]
    if example := EXAMPLES.get(full):
        body += ["", *markup.as_markup(example.text.splitlines()), "", *example.code.splitlines()]
    return [*lines, "", *(f"   {line}" if line else "" for line in body), ""]


EXAMPLES = tf_examples.load()


def write(folder: Path) -> None:
    """Writes the pages."""
    folder.mkdir(parents=True, exist_ok=True)
    namespaces = [(name, module) for name, module in tf_names.namespaces(tf, "tf", set()) if tf_names.public(module)]
    called: dict[int, list[str]] = {}
    for name, module in namespaces:
        for key in tf_names.public(module):
            called.setdefault(id(getattr(module, key)), []).append(f"{name}.{key}")
    index = heading("replicax.tf by name")
    index += [
        "``import replicax.tf as tf``: every name, by namespace. :doc:`../tf-names` has the names of TensorFlow that"
    ]
    index += ["are missing, with what stands for them; :doc:`../differences` explains what differs.", ""]
    index += [".. list-table::", "   :widths: 30 70", ""]
    for name, module in namespaces:
        index += [f"   * - :doc:`{name}`", f"     - {summary_of(module)} {len(tf_names.public(module))} names."]
        lines = [*heading(name), summary_of(module), "", ".. py:currentmodule:: None", ""]
        for key in tf_names.public(module):
            value, full = getattr(module, key), f"{name}.{key}"
            same = [other for other in called[id(value)] if other != full] if callable(value) else []
            first = min([full, *same], key=lambda other: (other.startswith("tf.compat"), len(other), other))
            if first == full:
                lines += entry(full, value, same)
            else:
                lines += [f".. py:data:: {full}", "", f"   The same as ``{first}``.", ""]
        (folder / f"{name}.rst").write_text("\n".join(lines) + "\n", encoding="utf-8")
    index += ["", ".. toctree::", "   :hidden:", "", *(f"   {name}" for name, _ in namespaces)]
    (folder / "index.rst").write_text("\n".join(index) + "\n", encoding="utf-8")


def summary_of(module: object) -> str:
    """Returns the first line of a namespace's docstring."""
    return " ".join(markup.as_markup([(inspect.getdoc(module) or "").partition("\n")[0]]))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
