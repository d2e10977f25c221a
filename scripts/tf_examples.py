"""Runs the examples of the names of `replicax.tf`, which docs/reference/examples has, one file for each namespace.

python scripts/tf_examples.py [--check | --write | --names | --tensorflow PYTHON] [FILE ...]

--check (the default) compares what the examples print with what the files record; --write records it; --names lists
the public names that have no example, neither there nor in their docstrings; --tensorflow runs the examples with
TensorFlow, in an interpreter that has it, and lists those that print something else. Numbers may be a little off.

A file has a section for each name. It may begin with text, and goes on as a session of the Python prompt, in which
`tf` and `np` are imported:

    ## tf.square
    >>> tf.square([1.0, -3.0])
    <tf.Tensor: shape=(2,), dtype=float32, numpy=array([1., 9.], dtype=float32)>

A section whose text begins with "TensorFlow" says how TensorFlow differs, and is not compared with it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import doctest
import importlib
import io
import json
import linecache
import math
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "docs" / "reference" / "examples"
NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?")
EXACT = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
TOLERANCE = 1e-5


@dataclasses.dataclass(frozen=True)
class Example:
    """The example of a name: `text` stands before `code`, a session of the Python prompt."""

    name: str
    text: str
    code: str
    file: Path

    @property
    def differs(self) -> bool:
        """Whether TensorFlow prints something else, or lacks the name; the text says so."""
        return self.text.startswith("TensorFlow")

    def steps(self) -> list[doctest.Example]:
        return doctest.DocTestParser().get_examples(self.code)


def load(files: Iterable[Path] | None = None) -> dict[str, Example]:
    """Returns the examples of all names, or of those in some files; does not import replicax."""
    examples: dict[str, Example] = {}
    for file in sorted(FOLDER.glob("*.txt")) if files is None else files:
        for section in re.split(r"^## ", file.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
            name, _, body = section.partition("\n")
            text, prompt, code = body.partition(">>> ")
            if name in examples:
                raise ValueError(f"{file}: {name} has an example in {examples[name].file} too; leave one out")
            examples[name] = Example(name, text.strip(), (prompt + code).strip() + "\n", file)
    return examples


def dump(file: Path, examples: Iterable[Example]) -> None:
    """Writes the examples of a file."""
    sections = ["\n".join(part for part in (f"## {e.name}", e.text, e.code) if part) for e in examples]
    file.write_text("\n".join(sections), encoding="utf-8")


def record(source: str, output: str) -> str:
    """Returns a step of a session as it is written, with its output."""
    first, *rest = source.rstrip("\n").split("\n")
    code = "\n".join([f">>> {first}"] + [f"... {line}".rstrip() for line in rest])
    return f"{code}\n{output}"


def same(want: str, got: str) -> bool:
    """Returns whether two outputs are the same but for white space and for the last digits of numbers."""
    if "..." in want:
        return doctest.OutputChecker().check_output(want, got, EXACT)
    texts = ["".join(NUMBER.sub("#", output).split()) for output in (want, got)]
    numbers = [[float(number) for number in NUMBER.findall(output)] for output in (want, got)]
    close = (math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=TOLERANCE) for a, b in zip(*numbers, strict=False))
    return texts[0] == texts[1] and all(close)


# In the process that runs the examples


def run_step(step: doctest.Example, names: dict[str, Any]) -> str:
    """Returns what a step prints, or the kind and the first line of its error, as doctest shows it."""
    output = io.StringIO()
    file = f"<example {len(linecache.cache)}>"
    linecache.cache[file] = (len(step.source), None, step.source.splitlines(keepends=True), file)  # for AutoGraph
    try:
        with contextlib.redirect_stdout(output):
            exec(compile(step.source, file, "single", dont_inherit=True), names)
    except Exception as error:
        text = traceback.format_exception_only(error)[0].strip().partition("\n")[0]
        kind, colon, message = text.partition(": ")
        return f"Traceback (most recent call last):\n    ...\n{kind.rpartition('.')[2]}{colon}{message}\n"
    return re.sub(r"^[ \t]*$(?=\n)", "<BLANKLINE>", output.getvalue(), flags=re.MULTILINE)


def run_all(module: str, files: Sequence[str], chosen: Sequence[str] | None = None) -> dict[str, list[str]]:
    """Return what the steps of each example print, or of the chosen examples, with `module` as `tf`."""
    tf, np = importlib.import_module(module), importlib.import_module("numpy")
    if module == "tensorflow":
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    results = {}
    for name, example in load(map(Path, files)).items():
        if (example.differs and module == "tensorflow") or (chosen is not None and name not in chosen):
            continue
        names = {"tf": tf, "np": np, "__name__": "__main__"}
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            results[name] = [run_step(step, names) for step in example.steps()]
    return results


# In the process that compares


def outputs(python: str, module: str, files: Sequence[Path]) -> dict[str, list[str]]:
    """Returns what the steps of each example print, with `module` as `tf`, in a process of an interpreter."""
    env = os.environ | {"REPLICAX_VIRTUAL_DEVICES": "CPU:2", "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    env |= {"CUDA_VISIBLE_DEVICES": "-1"}
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [python, __file__, "--run", module, "--result", str(result), *map(str, files)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
        if not result.exists():
            sys.exit(f"{' '.join(command)}\nended with exit status {done.returncode}:\n{done.stdout}\n{done.stderr}")
        return json.loads(result.read_text(encoding="utf-8"))


def differences(example: Example, got: Sequence[str]) -> list[str]:
    """Returns the steps of an example that print something else than the file says."""
    return [
        f"{example.name} ({example.file.name})\n{record(step.source, step.want)}but got\n{output}"
        for step, output in zip(example.steps(), got, strict=True)
        if not same(step.want, output)
    ]


def names_without_example(examples: dict[str, Example]) -> list[str]:
    """Returns the public names that have no example, and examples of what is no public name."""
    import tf_names

    import replicax.tf as tf

    names: dict[object, list[str]] = {}
    documented = set()
    for namespace, module in tf_names.namespaces(tf, "tf", set()):
        for key in tf_names.public(module):
            value, name = getattr(module, key), f"{namespace}.{key}"
            constant = value is None or isinstance(value, (bool, int, str))  # equal ones are one object
            names.setdefault(name if constant else id(value), []).append(name)
            documented |= {name} if not constant and ">>> " in (getattr(value, "__doc__", None) or "") else set()
    known = examples.keys() | documented
    missing = [f"no example: {' = '.join(aliases)}" for aliases in names.values() if not known & {*aliases}]
    every = {name for aliases in names.values() for name in aliases}
    return missing + [f"no public name: {name}" for name in examples if name not in every]


def without_message(output: str) -> str:
    """Returns an output without the message of an error, which TensorFlow words differently."""
    return re.sub(r"(\n\w+):.*", r"\1", output, flags=re.DOTALL) if output.startswith("Traceback") else output


def write(examples: Iterable[Example], results: dict[str, list[str]]) -> None:
    """Records what the examples print, where it is not what the files say."""
    for file in {example.file for example in examples}:
        new = []
        for example in load([file]).values():
            pairs = list(zip(example.steps(), results[example.name], strict=True))
            code = "".join(record(step.source, step.want if same(step.want, out) else out) for step, out in pairs)
            new.append(dataclasses.replace(example, code=code))
        dump(file, new)


def compare_with_tensorflow(examples: Iterable[Example], results: dict[str, list[str]]) -> list[str]:
    """Returns the examples that print something else with TensorFlow, but for those that say so."""
    found = []
    for example in examples:
        steps = zip(example.steps(), results.get(example.name, ()), strict=not example.differs)
        found += [
            f"{example.name} ({example.file.name})\n{record(step.source, step.want)}but TensorFlow\n{output}"
            for step, output in steps
            if not same(without_message(step.want), without_message(output))
        ]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--check", action="store_true", help="compare with what the files record (the default)")
    way.add_argument("--write", action="store_true", help="record what the examples print")
    way.add_argument("--names", action="store_true", help="list the public names that have no example")
    way.add_argument("--tensorflow", metavar="PYTHON", help="compare with TensorFlow, in this interpreter")
    way.add_argument("--run", metavar="MODULE", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    parser.add_argument("--chosen", help=argparse.SUPPRESS)  # a JSON file of the names whose examples run
    parser.add_argument("files", nargs="*", type=Path)
    options = parser.parse_args()
    files = [file.absolute() for file in options.files] or sorted(FOLDER.glob("*.txt"))
    if options.run:
        chosen = json.loads(Path(options.chosen).read_text(encoding="utf-8")) if options.chosen else None
        Path(options.result).write_text(json.dumps(run_all(options.run, files, chosen)), encoding="utf-8")
        return
    examples = load(files).values()
    if options.names:
        found = names_without_example(load())
    elif options.tensorflow:
        found = compare_with_tensorflow(examples, outputs(options.tensorflow, "tensorflow", files))
    else:
        results = outputs(sys.executable, "replicax.tf", files)
        if options.write:
            write(examples, results)
        found = [] if options.write else [d for e in examples for d in differences(e, results[e.name])]
    print(*found, sep="\n")
    sys.exit(f"{len(found)} in all" if found else None)


if __name__ == "__main__":
    main()
