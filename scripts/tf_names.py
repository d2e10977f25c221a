"""Writes docs/reference/tf-names.md from the tables of `replicax.tf`.

python scripts/tf_names.py [--check]
"""

from __future__ import annotations

import inspect
import json
import sys
import types
from pathlib import Path

import replicax.tf as tf
from replicax.tf import _absent

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "tf-names.md"
RECORD = ROOT / "tests" / "recorded" / "signatures.json"  # has TensorFlow's names

HEAD = """# TensorFlow API coverage

`python scripts/tf_names.py` writes this page from the tables of `replicax.tf`. `import replicax.tf as tf` has the names
below; `tests/tf/test_tf_ops.py` compares their results with TensorFlow 2.21. Any other name raises an `AttributeError`
that says what to use. `tf.keras` is Keras 3 itself, with the names that it has under TensorFlow; `tf.losses`,
`tf.metrics`, `tf.optimizers` and `tf.initializers` are modules of it.

For all operations: tensors are JAX arrays, and dtypes are numpy's; operands of different dtypes are promoted as in JAX,
where TensorFlow raises an error; compiled code has static shapes.
"""


def attributes(module: types.ModuleType) -> dict[str, object]:
    """Returns the attributes of a module, including those that it imports on first use."""
    return {name: getattr(module, name) for name in dir(module)}


def namespaces(module: types.ModuleType, name: str, seen: set[int]):
    """Yields all namespaces with their dotted names, each once."""
    seen.add(id(module))
    yield name, module
    for key, value in sorted(attributes(module).items()):
        inside = isinstance(value, types.ModuleType) and value.__name__.startswith("replicax.tf")
        if inside and not key.startswith("_") and id(value) not in seen:
            yield from namespaces(value, f"{name}.{key}", seen)


def public(module: types.ModuleType) -> list[str]:
    own = getattr(module, "__all__", None) if module.__name__.startswith("replicax.tf.distribute") else None
    return sorted(
        (
            key
            for key, value in attributes(module).items()
            if not key.startswith("_")
            and not isinstance(value, types.ModuleType)
            and key not in ("annotations", "Any")
            and (own is None or key in own)
        ),
        key=str.lower,
    )


def page() -> str:
    lines = [HEAD]
    there: set[str] = set()
    for name, module in namespaces(tf, "tf", set()):
        names = public(module)
        if not names:
            continue
        full = {key: f"{name}.{key}".partition(".")[2] for key in names}
        there |= set(full.values())
        differing = {key: text for key in names if (text := _absent.difference(full[key]))}
        lines += [f"## {name}", "", (inspect.getdoc(module) or "").partition("\n")[0], ""]
        lines += [", ".join(f"`{key}`" for key in names), ""]
        whole = set(differing.values())
        if len(whole) == 1 and len(differing) == len(names):
            lines += [f"Differs: {whole.pop()}.", ""]
        elif differing:
            lines += ["| differs | how |", "|---|---|"]
            lines += [f"| `{key}` | {text} |" for key, text in differing.items()] + [""]
    lines += ["## Missing names", "", "The table has names and beginnings of names.", ""]
    lines += ["| name | replacement |", "|---|---|"]
    lines += [
        f"| `tf.{key}` | {text} |" for key, text in sorted(_absent.ABSENT.items(), key=lambda row: row[0].lower())
    ]
    spaces = json.loads(RECORD.read_text(encoding="utf-8"))
    others = [f"{space}.{key}".strip(".") for space, (_, keys) in spaces.items() if space != "image" for key in keys]
    rest = sorted((key for key in others if key not in there and _absent.alternative(key) is None), key=str.lower)
    lines += [
        "",
        "The following names of TensorFlow's are missing too. Look for a replacement in `jax.numpy`, `jax.nn`",
    ]
    lines += ["and `jax.lax`, which work on the same tensors:", ""]
    lines += [", ".join(f"`tf.{key}`" for key in rest), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    text = page()
    if "--check" in sys.argv:
        sys.exit(None if PAGE.read_text(encoding="utf-8") == text else f"{PAGE.name} is out of date: run {sys.argv[0]}")
    PAGE.write_text(text, encoding="utf-8")
