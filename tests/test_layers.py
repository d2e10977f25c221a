"""Packages import from those below them only, and no module is in a circle of imports."""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from import_graph import Graph, Import, circles

PACKAGE = Path(__file__).parents[1] / "src" / "replicax"

# How often `replicax.tf` may say `Any` in 1,000 lines. Lower it when the number falls.
MOST_ANY = 15

# The packages from the lowest to the highest; each imports only from those before it. Above them are the modules at the
# top, with the names that users import.
PACKAGES = (
    "_base",
    "_report",
    "_job",
    "_transport",
    "_values",
    "_cluster",
    "_data",
    "_input",
    "_tracing",
    "_collectives",
    "_passes",
    "_control_flow",
    "_variables",
    "_engine",
    "_checkpoint",
    "_autograph",
    "_parameter_server",
    "_rpc",
    "_optim",
    "_saved_model",
    "_export",
    "_integrations",
    "_strategies",
    "_benchmark",
    "_placement",
    "_plan",
    "_launch",
)
PROGRAMS = ("tf", "_commands")  # packages that import from all others

# The modules that may use what JAX does not document.
MAY_USE_JAX_SRC = {"_base.jax_internals", "_base.jax_internals.runtime"}

# The module that keeps what belongs to a thread or a context, and what the others therefore do not use.
THREAD_STATE = "_base.thread_state"
KEEPS_FOR_THREADS = {"threading.local", "contextvars.ContextVar", "contextvars.copy_context", "_thread._local"}

# The most uses of private attributes of objects other than `self`, per 1,000 lines of the core. It is to fall to 3.
MOST_PRIVATE_USES = 4.1

# The module through which `replicax.tf` imports the others, and that of its commands, which run without JAX.
THE_DOOR = "tf._core"
DOORS = {THE_DOOR, "tf._programs._core"}

IMPORT_OF_TF = re.compile(r"^ *(import|from) .*\breplicax\.tf(?!\._programs)\b", re.MULTILINE)

# Libraries that nobody needs for `import replicax`: they are imported where they are used, if at all.
NOT_AT_TOP_LEVEL = {
    "flax",
    "fsspec",
    "cloudpickle",
    "cryptography",
    "flatbuffers",
    "googleapiclient",
    "google_crc32c",
    "grain",
    "grpc",
    "keras",
    "kubernetes",
    "malt",
    "optax",
    "orbax",
    "tensorboardX",
    "tensorflow",
    "tensorstore",
    "torch",
}
NEVER = {"tensorflow"}
# Files that a Python with TensorFlow runs. No module imports them.
RUN_WITH_TENSORFLOW = {"_export.to_tensorflow"}
# Modules that are imported where they are used as well, and the libraries that they may therefore import.
IMPORTED_WHERE_USED = {name: {"malt"} for name in ("_autograph.convert", "_autograph.rewriting", "tf._loop_options")}


GRAPH = Graph(PACKAGE)
MODULES = GRAPH.paths


def place_of(module: str) -> int:
    """Returns the number of a module's package; the modules at the top come after all packages."""
    if MODULES[module].parent == PACKAGE:
        return len(PACKAGES) + 2 * (module == "__main__")
    package = module.partition(".")[0]
    if package in PROGRAMS:
        return len(PACKAGES) + 1
    assert package in PACKAGES, f"Add the package {package} to PACKAGES in tests/test_layers.py, at its place."
    return PACKAGES.index(package)


def test_packages_import_from_those_below_them():
    wrong = []
    for module, found in GRAPH.imports.items():
        own = place_of(module)
        for imported in found:
            target = GRAPH.own_module(imported.module)
            place = None if target is None else place_of(target)
            if place is not None and place > own:
                wrong.append(f"{module}, line {imported.line}: {target}")
    assert not wrong, f"A package may not import from those above it, for types and inside functions included: {wrong}"


def is_of_tf(module: str) -> bool:
    return module.partition(".")[0] == "tf"


def test_tf_imports_the_core_through_one_module():
    wrong = [
        f"{module}, line {found.line}: {found.module}"
        for module, imports in GRAPH.imports.items()
        if is_of_tf(module) and module not in DOORS
        for found in imports
        if (target := GRAPH.own_module(found.module)) is not None and not is_of_tf(target)
    ]
    wrong += [
        f"{module}, line {node.lineno}: {node.value!r}"
        for module, tree in GRAPH.trees.items()
        if is_of_tf(module) and module not in DOORS
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and names_the_core(node.value)
    ]
    assert not wrong, f"replicax.tf imports the core through {THE_DOOR} alone; add the names there: {wrong}"


def test_the_core_runs_without_the_folder_of_tf(run_python, tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "replicax", ignore=shutil.ignore_patterns("tf", "__pycache__"))
    done = run_python(
        """
        import replicax as rx
        from replicax._commands import main, table

        assert main(["run-tf"]) == 2 and "launch" in table.parsers()
        for name in rx.__all__:
            getattr(rx, name)
        strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"])
        with strategy.scope():
            v = rx.Variable(1.0)
        rx.function(lambda: strategy.run(lambda: v.assign_add(1.0)))()
        print(rx.__file__, v.numpy())
        """,
        path=str(tmp_path),
        fresh=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(tmp_path / "replicax" / "__init__.py"), "2.0"]


def test_the_tests_of_tf_are_in_its_folder():
    """All others run where replicax is installed without the libraries that only tf needs."""
    tests = Path(__file__).parent
    mixed = {"test_repository.py", "test_exact_resume.py"}  # which import replicax.tf beside replicax
    wrong = [
        path.relative_to(tests)
        for path in sorted(tests.rglob("test_*.py"))
        if tests / "tf" not in path.parents and path.name not in mixed
        if IMPORT_OF_TF.search(path.read_text(encoding="utf-8"))
    ]
    assert not wrong, f"move the tests of replicax.tf to tests/tf: {wrong}"


def names_the_core(text: str) -> bool:
    """Whether a string is the name of a module outside of tf, or the start of such a name in an f-string."""
    package, _, module = text.partition(".")
    return package == "replicax" and (text == "replicax." or (module in MODULES and not is_of_tf(module)))


def test_tf_uses_each_name_that_the_door_offers():
    for door in DOORS:
        offered = {
            alias.asname or alias.name
            for node in ast.walk(GRAPH.trees[door])
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("replicax")
            for alias in node.names
        }
        of_tf = (tree for module, tree in GRAPH.trees.items() if is_of_tf(module))
        used = {name for tree in of_tf for name in names_from(door, tree)}
        assert sorted(offered - used) == [], f"no module of replicax.tf uses these names of {door}"


def names_from(door: str, tree: ast.Module) -> Iterator[str]:
    """Yields what a module takes: `from ._core import name`, `_core.name`, and `_from("_core", "name")` of a table."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == f"replicax.{door}":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "_core":
            yield node.attr
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            first = str(node.args[0].value)
            if first == "_core":
                yield from ast.literal_eval(node.args[1]).split()
            elif first.startswith("_core."):
                yield first.removeprefix("_core.")


def test_tf_says_any_in_few_places():
    sources = [path.read_text(encoding="utf-8") for path in (PACKAGE / "tf").rglob("*.py")]
    count, lines = len(re.findall(r"\bAny\b", "".join(sources))), "".join(sources).count("\n")
    assert count <= MOST_ANY * lines / 1000, (
        f"replicax.tf says `Any` {count} times in {lines} lines, expected at most {MOST_ANY} per 1,000: use the types "
        "of `tf/_types.py`, a type variable or a protocol."
    )


def test_no_module_is_in_a_circle():
    found = circles(GRAPH.edges())
    assert not found, (
        "These modules import each other in a circle; imports inside functions and for type checkers count. Move what "
        f"they share to a module below them, or have the upper one plug in what the lower one calls: {found}"
    )


def test_only_one_module_uses_what_jax_does_not_document():
    wrong = []
    for module in MODULES.keys() - MAY_USE_JAX_SRC:
        lines = [found.line for found in GRAPH.imports[module] if found.module.startswith("jax._src")]
        lines += [node.lineno for node in ast.walk(GRAPH.trees[module]) if getattr(node, "attr", None) == "_src"]
        wrong += [f"{module}, line {line}" for line in lines]
    assert not wrong, f"jax._src is used by {wrong}; move that to {sorted(MAY_USE_JAX_SRC)}."


def test_one_module_has_the_state_of_threads():
    wrong, named, read = [], set(), set()
    for module in MODULES.keys() - {THREAD_STATE}:
        for node in ast.walk(GRAPH.trees[module]):
            if (isinstance(node, ast.Attribute) and ast.unparse(node) in KEEPS_FOR_THREADS) or (
                isinstance(node, ast.ImportFrom)
                and {f"{node.module}.{alias.name}" for alias in node.names} & KEEPS_FOR_THREADS
            ):
                wrong.append(f"{module}, line {node.lineno}")
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("entered", "thread_state.entered"):
                named |= {keyword.arg for keyword in node.keywords}
            elif isinstance(node, ast.Attribute):
                read.add(node.attr)
    assert not wrong, f"What a thread or a context keeps is a slot of {THREAD_STATE}, not a variable of {wrong}."
    (record,) = (node for node in GRAPH.trees[THREAD_STATE].body if getattr(node, "name", None) == "ThreadState")
    assigned = [node for node in ast.walk(record) if isinstance(node, ast.Assign | ast.AnnAssign)]
    targets = [node.target if isinstance(node, ast.AnnAssign) else node.targets[0] for node in assigned]
    slots = {target.attr if isinstance(target, ast.Attribute) else target.id for target in targets}
    assert named <= slots, f"`entered` is called with names that are no slots: {sorted(named - slots)}"
    assert slots <= read, f"Nobody reads the slots {sorted(slots - read)}."


def test_few_uses_of_what_is_private_to_others():
    uses: dict[str, int] = {}
    lines = 0
    for module, path in MODULES.items():
        if module.partition(".")[0] != "tf":
            lines += len(path.read_text(encoding="utf-8").splitlines())
            uses[module] = sum(map(_is_private_to_another, ast.walk(GRAPH.trees[module])))
    most = sorted(uses, key=lambda module: -uses[module])[:10]
    assert 1000 * sum(uses.values()) <= MOST_PRIVATE_USES * lines, (
        f"The core uses {sum(uses.values())} names that are private to other objects, in {lines} lines. Give their "
        f"owner a method, or move the function to where the data is. Most are in {most}."
    )


def _is_private_to_another(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    )


def test_optional_libraries_are_imported_where_they_are_used():
    wrong = [
        f"{module}, line {found.line}: {found.module}"
        for module, all_of_them in GRAPH.imports.items()
        if module not in RUN_WITH_TENSORFLOW
        for found in all_of_them
        if not found.for_types and _is_wrong_there(module, found)
    ]
    assert not wrong, f"Libraries that replicax does not need are imported: {wrong}"


def _is_wrong_there(module: str, found: Import) -> bool:
    library = found.module.partition(".")[0]
    return (
        library in NEVER
        or GRAPH.own_module(found.module) in RUN_WITH_TENSORFLOW
        or (
            found.top_level
            and (
                library in NOT_AT_TOP_LEVEL - IMPORTED_WHERE_USED.get(module, set())
                or (GRAPH.own_module(found.module) in IMPORTED_WHERE_USED and module not in IMPORTED_WHERE_USED)
            )
        )
    )


def test_a_hook_that_is_not_registered_is_named_in_the_error(run_python):
    program = """
        from replicax._data.dataset import Dataset
        from replicax._tracing import context
        from replicax._tracing import autograph_switch
        from replicax._tracing import dataset_reads
        from replicax._base import foreign_state
        from replicax._strategies import tools

        assert list(Dataset.range(3).as_numpy_iterator()) == [0, 1, 2]  # which needs nothing of the others

        def missed(call, what):
            try:
                call()
            except RuntimeError as error:
                assert str(error).startswith(f"{what} is missing: modules of replicax"), error
            else:
                raise AssertionError(f"nothing said that {what} is missing")

        missed(context.get_strategy, "The default strategy")
        missed(lambda: dataset_reads.reading_by(id).__enter__(), "The reading of datasets by compiled functions")
        missed(foreign_state.join, "The joining of Keras and Flax NNX")
        missed(lambda: tools.find("benchmark"), "The function of Strategy.benchmark")
        if autograph_switch.available():
            missed(lambda: autograph_switch.call(id, (), {}), "AutoGraph's converter")

        import replicax as rx

        rx.function
        assert context.get_strategy().num_replicas_in_sync == 1
        with dataset_reads.reading_by(id):
            assert dataset_reads.reader() is id
        foreign_state.join()
        assert autograph_switch.call(lambda x: x + 1, (1,), {}) == 2
        """
    done = run_python(program, fresh=True)
    assert done.returncode == 0, done.stderr


def test_public_modules_need_no_name_of_the_package_first(run_python):
    for module, name in (("train", "Checkpoint"), ("experimental", "CentralStorageStrategy")):
        done = run_python(f"""
            from replicax.{module} import {name}
            {name}()
            from replicax._tracing.context import get_strategy
            assert get_strategy().num_replicas_in_sync == 1
            """)
        assert done.returncode == 0, done.stderr
