"""The door of the package, and what stands around it: documentation, README, hints."""

from __future__ import annotations

import ast
import doctest
import enum
import functools
import importlib
import inspect
import json
import re
import sys
import tomllib
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# The devices that a reader of the README has who follows it.
README_DEVICES = "GPU:4,CPU:1"


def test_public_names_are_sorted_and_complete():
    import replicax
    from replicax import _api

    assert list(replicax.__all__) == sorted(replicax.__all__)
    absent = [name for name in replicax.__all__ if not hasattr(replicax, name)]
    assert not absent, f"In replicax.__all__ and not there: {absent}"
    public = {
        name
        for name, value in (vars(_api) | vars(replicax)).items()
        if not name.startswith("_") and name != "annotations" and not isinstance(value, types.ModuleType)
    }
    assert public <= set(replicax.__all__), f"Public, and not in replicax.__all__: {public - set(replicax.__all__)}"


@pytest.mark.parametrize("namespace", ["replicax", "replicax.cluster_resolver"])
def test_every_public_name_is_documented(namespace):
    module = importlib.import_module(namespace)
    undocumented = []
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isclass(value):
            if not value.__dict__.get("__doc__"):
                undocumented.append(name)
            undocumented += [
                f"{name}.{member}"
                for member, part in vars(value).items()
                if not member.startswith("_")
                and isinstance(part, types.FunctionType | property | classmethod | staticmethod)
                and not inspect.getdoc(getattr(value, member))
            ]
        elif (callable(value) or inspect.ismodule(value)) and not inspect.getdoc(value):
            undocumented.append(name)
    assert not undocumented, f"Without a docstring: {undocumented}"


WALK = """
import inspect, re, types
seen, docs, waiting = set(), {}, [ROOT]
while waiting:
    owner = waiting.pop()
    for name, value in inspect.getmembers(owner):
        if name.startswith("_") or id(value) in seen or not (callable(value) or isinstance(value, types.ModuleType)):
            continue
        home = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
        if not str(home).startswith("replicax"):
            continue
        seen.add(id(value))
        docs[home, name] = inspect.getdoc(value) or ""
        if inspect.isclass(value) or inspect.ismodule(value):
            waiting.append(value)
private = [name for name, text in docs.items() if re.search(r"(import|from) replicax\\._", text)]
assert not private and len(docs) > LEAST, (private, len(docs))
"""


def test_no_public_docstring_shows_private_modules(run_python, run_tf):
    for run, start, least in ((run_python, "import replicax\nROOT = replicax", 300), (run_tf, "ROOT = tf", 1200)):
        done = run(f"{start}\nLEAST = {least}\n{WALK}")
        assert done.returncode == 0, done.stderr
    run_tf("""
text = tf.autograph.experimental.set_loop_options.__doc__
assert "tf.autograph.experimental.set_loop_options" in text and "malt" not in text, text
""")


def public_objects(namespace: types.ModuleType, prefix: str) -> Iterator[tuple[str, object]]:
    """Yields the public names of a namespace of replicax, and of the namespaces and classes in it, with their objects.

    Members that are data, such as those of an enumeration, belong to their class. Constants are not among the objects.
    """
    for name in namespace.__all__:
        value = getattr(namespace, name)
        if isinstance(value, types.ModuleType):
            yield f"{prefix}.{name}", value
            yield from public_objects(value, f"{prefix}.{name}")
        elif callable(value):
            yield f"{prefix}.{name}", value
            if inspect.isclass(value):
                yield from ((f"{prefix}.{name}.{member}", part) for member, part in public_members(value))


def public_members(kind: type) -> Iterator[tuple[str, object]]:
    """Yields the public methods, properties and nested classes of a class that are defined in replicax."""
    for name in dir(kind):
        owner = next((base for base in kind.__mro__ if name in vars(base)), None)
        if name.startswith("_") or owner is None or not owner.__module__.startswith("replicax"):
            continue
        part = getattr(kind, name)
        is_property = isinstance(inspect.getattr_static(kind, name), property | functools.cached_property)
        if is_property or (callable(part) and not isinstance(part, enum.Enum)):
            yield name, part


def examples_that_run() -> set[str]:
    """Returns the docstrings of replicax with examples that `pytest --doctest-modules` runs, and skips nothing of."""
    modules = [
        module
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == "replicax" and not name.startswith("replicax.tf")
    ]
    tests = [test for module in modules for test in doctest.DocTestFinder().find(module) if test.examples]
    skips = {id(test) for test in tests if any(example.options.get(doctest.SKIP) for example in test.examples)}
    return {inspect.cleandoc(test.docstring) for test in tests if id(test) not in skips}


def test_every_public_name_has_an_example_that_runs():
    import replicax

    found = dict(public_objects(replicax, "rx"))
    assert {"rx.Variable.value", "rx.data.Dataset.map", "rx.experimental.rpc.Server.create"} <= set(found)
    examples = examples_that_run()
    without = [name for name, value in found.items() if inspect.getdoc(value) not in examples]
    assert not without, f"Without an example in the docstring that runs (`>>> ...`): {without}"


def test_every_public_constant_is_used_in_an_example():
    import replicax

    modules = {"rx": replicax} | {
        name: value for name, value in public_objects(replicax, "rx") if isinstance(value, types.ModuleType)
    }
    constants = {
        (module, name) for module in modules.values() for name in module.__all__ if is_constant(getattr(module, name))
    }
    assert constants
    unused = [
        f"{module.__name__}.{name}"
        for module, name in constants
        if not re.search(rf"^(>>>|\.\.\.).*\b{name}\b", inspect.getdoc(module) or "", re.MULTILINE)
    ]
    assert not unused, f"Not used in an example of their namespace's docstring: {unused}"


def is_constant(value: object) -> bool:
    """Returns whether a public value is data."""
    return not callable(value) and not isinstance(value, types.ModuleType)


def test_a_name_without_an_example_that_runs_is_found():
    class Checked:
        __module__ = "replicax.checked"

        def new(self):
            """Returns nothing."""

        @property
        def skipped(self):
            """Nothing.

            >>> None  # doctest: +SKIP
            """

        def _private(self):
            pass

    module = types.ModuleType("replicax.checked")
    module.Checked, module.__all__ = Checked, ["Checked"]
    sys.modules["replicax.checked"] = module
    try:
        examples = examples_that_run()
    finally:
        del sys.modules["replicax.checked"]
    found = {name: inspect.getdoc(value) for name, value in public_objects(module, "checked")}
    assert set(found) == {"checked.Checked", "checked.Checked.new", "checked.Checked.skipped"}
    assert examples and not examples & set(found.values())


DOCUMENTS = [
    path.relative_to(ROOT).as_posix()
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if re.search(r"^```python$", path.read_text(encoding="utf-8"), re.MULTILINE)
]


# Runs the blocks of a document, and holds what a line prints against the comment behind it or below it.
RUNNER = r'''
import builtins, linecache, re, sys

linecache.cache[document] = (0, None, lines, document)  # AutoGraph reads the source of functions
wrong = []
printed = {}

def record(*values, sep=" ", end="\n", file=None):
    show(*values, sep=sep, end=end, file=file)
    frame = sys._getframe(1)
    if file is None and frame.f_code.co_filename == document:
        printed.setdefault(frame.f_lineno, []).append(sep.join(map(str, values)))

def comment(number):
    """The comment behind a line, or the lines of comment below it."""
    behind = re.search(r"\S.*?  # (.*)$", lines[number - 1])
    if behind:
        return behind.group(1)
    below = []
    while number < len(lines) and re.match(r"# ", lines[number]):
        below.append(lines[number].strip()[2:])
        number += 1
    return " ".join(below)

show, builtins.print = print, record
for source in sources:
    exec(compile(source, document, "exec"))
for number, texts in printed.items():
    said = " ".join(comment(number).split())
    # "..." stands for what is left out, and a remark may follow the output. What is printed again is shown once.
    elided = ".*".join(re.escape(part.strip()) for part in said.split("..."))
    shown = [" ".join(" ".join(each).split()) for each in (texts, dict.fromkeys(texts))]
    if said and not any(each and (said.startswith(each) or re.fullmatch(elided, each)) for each in shown):
        wrong.append(f"line {number} prints {shown[0]!r}, and its comment says {said!r}")
if wrong:
    sys.exit("\n".join(wrong))
'''


@pytest.mark.sampled(4, others="thorough")
@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_examples_of_the_documents_run(document, run_python):
    """The ```python blocks, one after the other in one program. A ```py block is not run."""
    text = (ROOT / document).read_text(encoding="utf-8")
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    # Blank lines in front of a block: an error then names the document's own line.
    sources = ["\n" * text.count("\n", 0, block.start(1)) + block.group(1) for block in blocks]
    for source in sources:
        ast.parse(source, document)
    program = f"document, lines, sources = {document!r}, {text.splitlines(keepends=True)!r}, {sources!r}\n{RUNNER}"
    done = run_python(program, timeout=180, env={"REPLICAX_VIRTUAL_DEVICES": README_DEVICES})
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_every_optional_library_is_in_the_extra_all():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    (everything,) = extras["all"]
    named = set(everything.removeprefix("replicax[").removesuffix("]").split(","))
    assert named == set(extras) - {"all", "docs", "test", "test-tf", "examples"}


def test_hints_to_install_name_libraries_and_work_without_replicax_on_an_index():
    from replicax._base import doc_pages

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert doc_pages.install("flax") == "pip install 'flax>=0.12.8' (replicax's extra 'flax')"
    assert doc_pages.install("data") == "pip install google-crc32c grain protobuf (replicax's extra 'data')"
    sources = [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    texts = {path: path.read_text(encoding="utf-8") for path in sources if path.name != "doc_pages.py"}
    assert not [path for path, text in texts.items() if re.search(r"pip install '?replicax\[", text)]
    called = {name for text in texts.values() for name in re.findall(r"\binstall\(['\"](\w+)", text)}
    assert called and called <= set(extras)


def anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, as forges and the site make them."""
    from replicax._base import doc_pages

    return {doc_pages.anchor(title) for _, _, title in doc_pages.headings(page.read_text(encoding="utf-8"))}


def test_messages_and_docstrings_name_pages_and_sections_that_are_there():
    named = set()
    for path in (ROOT / "src").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"docs/[\w/-]+\.md", text), f"{path} names a file of the repository"
        named |= set(re.findall(r"replicax docs ([\w/#-]+)|doc_pages\.page\(['\"]([\w/#-]+)", text))
    named = {command or call for command, call in named}
    assert len(named) > 5
    for name in named:
        page, _, anchor = name.partition("#")
        path = ROOT / "docs" / f"{page}.md"
        assert path.is_file(), f"There is no page {page}"
        assert not anchor or anchor in anchors(path), f"{page} has no section {anchor}"


def test_a_page_is_cited_by_its_address_where_the_package_knows_the_site(monkeypatch):
    import email.message
    import importlib.metadata

    from replicax._base import doc_pages

    assert doc_pages.page("how-to/launch") == "`replicax docs how-to/launch`"
    metadata = email.message.Message()
    metadata["Version"] = "1.2.3"
    metadata["Project-URL"] = "Documentation, https://example.org/replicax/"
    monkeypatch.setattr(importlib.metadata, "metadata", lambda name: metadata)
    assert doc_pages.page("how-to/launch") == "https://example.org/replicax/1.2.3/how-to/launch.html"
    assert doc_pages.page("how-to/launch#slurm") == "https://example.org/replicax/1.2.3/how-to/launch.html#slurm"


def test_import_is_light(run_python):
    """`import replicax` brings no library besides JAX, NumPy and theirs, starts no backend and leaves no thread.

    The launcher does without those as well.
    """
    done = run_python(
        """
        import json, sys, threading
        import replicax._commands, replicax._launch._cli
        launcher = {"jax", "numpy"} & set(sys.modules)
        import jax, jax.numpy, numpy

        def libraries():
            return {name.partition(".")[0] for name in sys.modules}

        before = libraries() | sys.stdlib_module_names | {"replicax"}
        from replicax import *
        import replicax.tf
        from jax._src import xla_bridge

        print(json.dumps({
            "launcher": sorted(launcher),
            "libraries": sorted(libraries() - before),
            "backends": sorted(xla_bridge._backends),
            "threads": [thread.name for thread in threading.enumerate()],
        }))
        """,
        env={"REPLICAX_VIRTUAL_DEVICES": None},
        fresh=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"launcher": [], "libraries": [], "backends": [], "threads": ["MainThread"]}


@pytest.mark.parametrize(
    "name", ["replicax.cluster_resolver", "replicax.config", "replicax.data", "replicax.tf", "replicax.tf.distribute"]
)
def test_every_namespace_can_be_imported_alone(name, run_python):
    # In a process of its own: `replicax.tf` changes how JAX's arrays print.
    done = run_python(f"import importlib\nassert importlib.import_module({name!r}).__doc__")
    assert done.returncode == 0, done.stderr


def test_faults_can_be_planted():
    """scripts/faults.toml follows the source: texts that are no longer there plant nothing."""
    faults = tomllib.loads((ROOT / "scripts" / "faults.toml").read_text(encoding="utf-8"))["fault"]
    stale = [
        fault["name"]
        for fault in faults
        if not (ROOT / fault["file"]).is_file()
        or (ROOT / fault["file"]).read_text(encoding="utf-8").count(fault["before"]) != 1
        or not all((ROOT / path.partition("::")[0]).exists() for path in fault["tests"])
    ]
    assert not stale, f"scripts/faults.toml names files, tests or texts that are not there: {stale}"
