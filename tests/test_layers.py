"""The modules of replicax stand in layers, and imports point one way: down, or sideways within a layer."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[1] / "src" / "replicax"

# From the lowest layer to the highest. A folder's name stands for all the modules in it.
LAYERS: dict[str, tuple[str, ...]] = {
    "words": (
        "_types",
        "_errors",
        "_specs",
        "_display",
        "_devices",
        "_accelerators",
        "_compilation_cache",
        "_compile_log",
        "_nest",
        "_recycled",
        "_dispatch",
        "_adapters",
        "_atomic_files",
        "_private",
        "_pickling",
        "_profiling",
        "_tracebacks",
        "_help",
        "_signatures",
        "_figures",
        "_hlo",
        "_channel",
        "_calls",
        "_verdict",
        "_ending",
        "_monitor",
        "_monitor_hub",
        "_preflight",
        "_runtime",
        "_joining",
        "_quiet",
        "_exchange",
        "_late",
        "_protobuf",
        "_topology",
        "partitioners",
        "_tpu_system",
    ),
    "clusters": ("_cluster",),
    "values": ("_value_errors", "_values", "_trace_caches", "_tape", "_indexed_slices", "_ragged"),
    "data": ("_data", "_files", "_sources", "_agreed_input", "_splits", "_input"),
    "engine": (
        "_levels",
        "_step_failures",
        "_nans",
        "_packs",
        "_vectors",
        "_stages",
        "_alone",
        "_pieces",
        "_convolutions",
        "_conversion",
        "_context",
        "_collectives",
        "_across",
        "_shards",
        "_cross_device_ops",
        "_assigned_alike",
        "_lockstep",
        "_replica_results",
        "_spmd",
        "_creation",
        "_older",
        "_variables",
        "_distributed_variables",
        "_sharded_variables",
        "_states",
        "_aggregating",
        "_accumulating",
        "_control_flow",
        "_arguments",
        "_pulls",
        "_uneven",
        "_blocks",
        "_while",
        "_staging",
        "_operators",
        "_rewriting",
        "_autograph",
        "_concrete",
        "_pure",
        "_several",
        "_programs",
        "_tracing",
        "_turns",
        "_function",
        "_compiled_runs",
        "_loops",
        "_host_maps",
        "_logical",
    ),
    "strategies": (
        "_extended",
        "_strategy",
        "_benchmark",
        "_default",
        "_mirrored",
        "_one_device",
        "_multi_worker",
        "_central",
        "_tpu",
        "_optimizer",
        "_tracking",
        "_checkpoint_files",
        "_restoring",
        "_checkpoint",
        "_checkpoint_manager",
    ),
    "adapters": ("_keras", "_keras_fit", "_keras_files", "_nnx"),
    "namespaces": (
        "__init__",
        "_door",
        "cluster_resolver",
        "config",
        "data",
        "experimental",
        "partitioners",
        "tf",
        "tpu",
        "train",
    ),
    "programs": ("launch", "__main__"),
}

# The modules that may use what JAX does not document.
MAY_USE_JAX_SRC = {"_private"}

# Libraries that nobody needs for `import replicax`: they are imported where they are used, if at all.
NOT_AT_TOP_LEVEL = {
    "flax",
    "fsspec",
    "googleapiclient",
    "google_crc32c",
    "grain",
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
# Modules that are imported where they are used as well, and the libraries that they may therefore import.
IMPORTED_WHERE_USED = {"_autograph": {"malt"}, "_rewriting": {"malt"}}


class Import(NamedTuple):
    """One imported module: its dotted name, the line, and whether importing the importer imports it."""

    module: str
    line: int
    top_level: bool


def modules() -> dict[str, Path]:
    """The modules of the package by their dotted name inside it; a folder's `__init__` has the folder's name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = path
    return found


MODULES = modules()
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}


def imports(module: str) -> Iterator[Import]:
    """The imports of a module. What only type checkers import runs nowhere and does not count."""
    here = ["replicax", *MODULES[module].relative_to(PACKAGE).with_suffix("").parts]
    waiting: list[tuple[ast.AST, bool]] = [(TREES[module], True)]
    while waiting:
        node, top = waiting.pop()
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(
                [*here[: len(here) - node.level], *filter(None, [node.module])] if node.level else [node.module]
            )
            # `from package import name` may import a module of the package.
            yield from (Import(f"{base}.{alias.name}", node.lineno, top) for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += [(child, top) for child in node.orelse]
        else:
            top = top and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            waiting += [(child, top) for child in ast.iter_child_nodes(node)]


IMPORTS = {name: list(imports(name)) for name in MODULES}


def layer_of(module: str) -> int | None:
    """The number of a module's layer, 0 for the lowest; None for a module that is not in the table."""
    for number, names in enumerate(LAYERS.values()):
        if module in names or module.partition(".")[0] in names:
            return number
    return None


def own_module(name: str) -> str | None:
    """The module of this package that importing `name` runs; None for other packages."""
    parts = name.split(".")
    if parts[0] != "replicax":
        return None
    for end in range(len(parts), 1, -1):
        if (module := ".".join(parts[1:end])) in MODULES:
            return module
    return "__init__"


def test_every_module_has_a_layer():
    missing = [name for name in MODULES if layer_of(name) is None]
    assert not missing, f"Add these modules to LAYERS in tests/test_layers.py, each to its layer: {missing}"


def test_imports_point_down():
    wrong = []
    for module, found in IMPORTS.items():
        own = layer_of(module)
        for imported in found:
            target = own_module(imported.module)
            layer = None if target is None else layer_of(target)
            if own is not None and layer is not None and layer > own:
                wrong.append(f"{module}, line {imported.line}: {target} ({list(LAYERS)[layer]})")
    assert not wrong, f"A module may not import from the layers above its own: {wrong}"


def test_only_one_module_uses_what_jax_does_not_document():
    wrong = []
    for module in MODULES.keys() - MAY_USE_JAX_SRC:
        lines = [found.line for found in IMPORTS[module] if found.module.startswith("jax._src")]
        lines += [node.lineno for node in ast.walk(TREES[module]) if getattr(node, "attr", None) == "_src"]
        wrong += [f"{module}, line {line}" for line in lines]
    assert not wrong, f"jax._src is used by {wrong}; move that to {sorted(MAY_USE_JAX_SRC)}."


def test_optional_libraries_are_imported_where_they_are_used():
    wrong = [
        f"{module}, line {found.line}: {library}"
        for module, all_of_them in IMPORTS.items()
        for found in all_of_them
        if (library := found.module.partition(".")[0]) in NEVER
        or (library in NOT_AT_TOP_LEVEL - IMPORTED_WHERE_USED.get(module, set()) and found.top_level)
        or (own_module(found.module) in IMPORTED_WHERE_USED and module not in IMPORTED_WHERE_USED and found.top_level)
    ]
    assert not wrong, f"Libraries that replicax does not need are imported: {wrong}"


def test_the_table_names_no_module_that_is_gone():
    there = {name.partition(".")[0] for name in MODULES} | set(MODULES)
    gone = [name for names in LAYERS.values() for name in names if name not in there]
    assert not gone, f"Remove from LAYERS in tests/test_layers.py: {gone}"
