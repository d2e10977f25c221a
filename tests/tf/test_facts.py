"""What TensorFlow does, program by program: facts.json holds programs and what TensorFlow 2.21 prints for them.

Each program runs on `replicax.tf`. Either it prints the same to the letter, or what differs is written down: in
facts/NUMBER.diff (lines of TensorFlow's with `-`, ours with `+`), with the reason in docs/reference/differences.md;
facts/differences.toml has the section of each number.

To look at the differences anew after a change: REPLICAX_WRITE_FACTS=1 pytest tests/tf/test_facts.py
"""

import difflib
import json
import os
import pathlib
import re
import tomllib

import programs
import pytest
from recorded import selected

from replicax._base import doc_pages

HERE = pathlib.Path(__file__).parent / "facts"
FACTS = {fact["number"]: fact for fact in json.loads((HERE / "facts.json").read_text())["facts"]}
DIFFERENCES = pathlib.Path(__file__).parents[2] / "docs" / "reference" / "differences.md"

# Names of JAX's own that differ from one of its versions to the next.
VERSIONS = [
    (r"'jaxlib._jax.Device'", "'Device'"),
    (r"jaxlib\._jax\.ArrayImpl|jax\.Array", "jax.Array"),
    (r"JitTracer\(", "Tracer("),
]


# A section's programs start several processes, which see one CPU device each.
OF_WORKERS = [number for number, fact in FACTS.items() if fact["section"] == "MultiWorkerMirroredStrategy"]


def what_programs_print(folder, devices, numbers):
    """Return what the programs of facts print, run in one process, since `replicax.tf` changes how arrays are shown."""
    arguments = [HERE / "facts.json", folder / "printed.json", json.dumps(numbers)]
    # Resolvers read the visible devices.
    env = {"REPLICAX_VIRTUAL_DEVICES": devices, "REPLICAX_PREFLIGHT": "quiet", "CUDA_VISIBLE_DEVICES": None}
    program = HERE / "run_facts.py"
    programs.run_well(program, arguments, folder=folder, timeout=300.0, env=env, imports="replicax.tf")
    return json.loads((folder / "printed.json").read_text())


@pytest.fixture(scope="module")
def printed(request, once, tmp_path_factory):
    numbers, folder = selected(request, "number"), tmp_path_factory.mktemp("facts")
    return once("facts", lambda: what_programs_print(folder, "CPU:4,GPU:4", numbers))


def in_words_of_311(text):
    """Return a text as Python 3.11 words it: later ones have other messages of abstract classes and of `1 // 0`."""
    text = text.replace("ZeroDivisionError: division by zero", "ZeroDivisionError: integer division or modulo by zero")
    pattern = r"without an implementation for abstract (methods?) (.*)"
    return re.sub(pattern, lambda found: f"with abstract {found[1]} {found[2]}".replace("'", ""), text)


def difference(expected, got):
    got = in_words_of_311(got)
    lines = difflib.unified_diff(expected.splitlines(), got.splitlines(), lineterm="", n=0)
    text = "\n".join(line.rstrip() for line in lines if not line.startswith(("---", "+++", "@@")))
    for pattern, name in VERSIONS:
        text = re.sub(pattern, name, text)
    return text.replace(str(DIFFERENCES.parents[1]), "docs")


def check(fact, text):
    """Holds what a program printed against what TensorFlow prints, or against the recorded difference."""
    found = difference(fact["observed"], text)
    recorded = HERE / f"{fact['number']:03d}.diff"
    if os.environ.get("REPLICAX_WRITE_FACTS"):
        recorded.unlink(missing_ok=True)
        if found:
            recorded.write_text(found + "\n")
    assert found == (recorded.read_text().rstrip("\n") if recorded.exists() else "")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "number",
    [number for number in FACTS if number not in OF_WORKERS],
    ids=lambda number: f"{number}: {FACTS[number]['title']}",
)
def test_fact(number, printed):
    check(FACTS[number], printed[str(number)])


@pytest.mark.numbers
def test_facts_of_several_workers(tmp_path, subtests):
    """Facts 130 to 139, in one test, since each of their programs takes seconds."""
    printed = what_programs_print(tmp_path, "CPU:4", OF_WORKERS)
    for number in OF_WORKERS:
        with subtests.test(FACTS[number]["title"]):
            check(FACTS[number], printed[str(number)])


def test_every_difference_is_explained():
    """Each fact that differs has a section of docs/reference/differences.md, and no other fact has one."""
    sections = tomllib.loads((HERE / "differences.toml").read_text(encoding="utf-8"))
    titles = [title for _, _, title in doc_pages.headings(DIFFERENCES.read_text(encoding="utf-8"))]
    assert set(sections) <= {doc_pages.anchor(title) for title in titles}
    explained = {number for numbers in sections.values() for number in numbers}
    assert explained == {int(path.stem) for path in HERE.glob("*.diff")}
