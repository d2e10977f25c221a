"""The modules of replicax stand in layers, and imports point one way: down, or sideways within a layer."""

from __future__ import annotations

import ast
from pathlib import Path

from import_graph import Graph, Import, circles

PACKAGE = Path(__file__).parents[1] / "src" / "replicax"

# From the lowest layer to the highest. A folder's name stands for all the modules in it.
LAYERS: dict[str, tuple[str, ...]] = {
    "words": (
        "_types",
        "_errors",
        "_specs",
        "_array_conversion",
        "_display",
        "_devices",
        "_accelerators",
        "_compilation_cache",
        "_compile_log",
        "_optimizing",
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
        "_topology",
        "partitioners",
        "_tpu_system",
    ),
    "clusters": ("_cluster",),
    "values": ("_value_errors", "_values", "_trace_caches", "_tape", "_indexed_slices", "_ragged"),
    "data": ("_data", "_files", "_sources", "_agreed_input", "_splits", "_input", "_placement"),
    "engine": (
        "_levels",
        "_step_failures",
        "_primitives",
        "_interpret",
        "_nans",
        "_storage",
        "_packs",
        "_array_storage",
        "_mesh_storage",
        "_vectors",
        "_stages",
        "_alone",
        "_pieces",
        "_convolutions",
        "_conversion",
        "_context",
        "_collectives",
        "_all_reduce",
        "_across",
        "_shards",
        "_sharded_evaluation",
        "_cross_device_ops",
        "_reducer",
        "_assigned_alike",
        "_lockstep",
        "_replica_results",
        "_spmd",
        "_creation",
        "_older",
        "_array_protocol",
        "_as_leaves",
        "_scattering",
        "_graph_leftovers",
        "_variables",
        "_resource_variable",
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
        "_several",
        "_program_inputs",
        "_programs",
        "_step_hints",
        "_tracing",
        "_turns",
        "_function",
        "_compiled_runs",
        "_logical",
    ),
    "strategies": (
        "_run",
        "_extended",
        "_replicated",
        "_single_replica",
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
    "adapters": ("_keras", "_keras_losses", "_keras_fit", "_keras_files", "_nnx"),
    "namespaces": (
        "__init__",
        "_door",
        "_wiring",
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

# The packages from the lowest to the highest; each imports only from those before it. Above them are the modules at the
# top, with the names that users import.
PACKAGES = (
    "_base",
    "_job",
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
    "_optim",
    "_benchmark",
    "_integrations",
    "_strategies",
)
PROGRAMS = ("launch", "tf")  # packages that import from all others

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


GRAPH = Graph(PACKAGE)
MODULES, TREES, IMPORTS = GRAPH.paths, GRAPH.trees, GRAPH.imports

# A circle that is there still.
STILL_THERE = {"_extended", "_strategy"}


def layer_of(module: str) -> int | None:
    """The number of a module's layer, 0 for the lowest; None for a module that is not in the table."""
    for number, names in enumerate(LAYERS.values()):
        if module in names or module.partition(".")[0] in names:
            return number
    return None


def test_every_module_has_a_layer():
    missing = [name for name in MODULES if layer_of(name) is None]
    assert not missing, f"Add these modules to LAYERS in tests/test_layers.py, each to its layer: {missing}"


def test_imports_point_down():
    wrong = []
    for module, found in IMPORTS.items():
        own = layer_of(module)
        for imported in found:
            if imported.for_types:  # runs nowhere
                continue
            target = GRAPH.own_module(imported.module)
            layer = None if target is None else layer_of(target)
            if own is not None and layer is not None and layer > own:
                wrong.append(f"{module}, line {imported.line}: {target} ({list(LAYERS)[layer]})")
    assert not wrong, f"A module may not import from the layers above its own: {wrong}"


def place_of(module: str) -> int | None:
    """The number of a module's package, the modules at the top after all packages; None for one that LAYERS has."""
    if MODULES[module].parent == PACKAGE:
        if module == "__main__":
            return len(PACKAGES) + 2
        return None if module.startswith("_") and module not in ("__init__", "_door", "_wiring") else len(PACKAGES)
    package = module.partition(".")[0]
    if package in PROGRAMS:
        return len(PACKAGES) + 1
    assert package in PACKAGES, f"Add the package {package} to PACKAGES in tests/test_layers.py, at its place."
    return PACKAGES.index(package)


def test_packages_import_from_those_below_them():
    wrong = []
    for module, found in IMPORTS.items():
        own = place_of(module)
        for imported in found:
            target = GRAPH.own_module(imported.module)
            place = None if target is None else place_of(target)
            if own is not None and place is not None and place > own:
                wrong.append(f"{module}, line {imported.line}: {target}")
    assert not wrong, f"A package may not import from those above it, for types and inside functions included: {wrong}"


def test_no_module_is_in_a_circle():
    edges = GRAPH.edges()
    for module in STILL_THERE & edges.keys():
        edges[module] -= STILL_THERE
    found = circles(edges)
    assert not found, (
        "These modules import each other in a circle; imports inside functions and for type checkers count. Move what "
        f"they share to a module below them, or have the upper one plug in what the lower one calls: {found}"
    )


def test_only_one_module_uses_what_jax_does_not_document():
    wrong = []
    for module in MODULES.keys() - MAY_USE_JAX_SRC:
        lines = [found.line for found in IMPORTS[module] if found.module.startswith("jax._src")]
        lines += [node.lineno for node in ast.walk(TREES[module]) if getattr(node, "attr", None) == "_src"]
        wrong += [f"{module}, line {line}" for line in lines]
    assert not wrong, f"jax._src is used by {wrong}; move that to {sorted(MAY_USE_JAX_SRC)}."


def test_optional_libraries_are_imported_where_they_are_used():
    wrong = [
        f"{module}, line {found.line}: {found.module}"
        for module, all_of_them in IMPORTS.items()
        for found in all_of_them
        if not found.for_types and _is_wrong_there(module, found)
    ]
    assert not wrong, f"Libraries that replicax does not need are imported: {wrong}"


def _is_wrong_there(module: str, found: Import) -> bool:
    library = found.module.partition(".")[0]
    return library in NEVER or (
        found.top_level
        and (
            library in NOT_AT_TOP_LEVEL - IMPORTED_WHERE_USED.get(module, set())
            or (GRAPH.own_module(found.module) in IMPORTED_WHERE_USED and module not in IMPORTED_WHERE_USED)
        )
    )


def test_the_table_names_no_module_that_is_gone():
    there = {name.partition(".")[0] for name in MODULES} | set(MODULES)
    gone = [name for names in LAYERS.values() for name in names if name not in there]
    assert not gone, f"Remove from LAYERS in tests/test_layers.py: {gone}"


def test_what_is_not_plugged_in_is_missed_by_name(run_python):
    done = run_python("""
        from replicax import _adapters, _context, _conversion, _data, _pulls

        assert list(_data.Dataset.range(3).as_numpy_iterator()) == [0, 1, 2]  # which needs nothing of the others

        def missed(call, what):
            try:
                call()
            except RuntimeError as error:
                assert str(error).startswith(f"{what} is missing: modules of replicax"), error
            else:
                raise AssertionError(f"nothing said that {what} is missing")

        missed(_context.get_strategy, "The default strategy")
        missed(lambda: _pulls.lifts.push(id), "The reading of datasets by compiled functions")
        missed(_adapters.join, "The joining of Keras and Flax NNX")
        if _conversion.available():
            missed(lambda: _conversion.call(True, id, (), {}), "AutoGraph's converter")

        import replicax as rx

        rx.function
        assert _context.get_strategy().num_replicas_in_sync == 1
        _pulls.lifts.push(_pulls.lifts.stack.append)
        _adapters.join()
        assert _conversion.call(True, lambda x: x + 1, (1,), {}) == 2
        """)
    assert done.returncode == 0, done.stderr


def test_public_modules_need_no_name_of_the_package_first(run_python):
    for module, name in (("train", "Checkpoint"), ("experimental", "CentralStorageStrategy")):
        done = run_python(f"""
            from replicax.{module} import {name}
            {name}()
            from replicax._context import get_strategy
            assert get_strategy().num_replicas_in_sync == 1
            """)
        assert done.returncode == 0, done.stderr
