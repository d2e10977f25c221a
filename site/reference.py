"""Writes the pages of the reference: one for each public name of replicax, one for each namespace of `replicax.tf`.

What they say comes from the docstrings. `TOPICS` says where each name stands; a public name that no topic has, and a
name that is not there, end the build.
"""

from __future__ import annotations

import functools
import inspect
import subprocess
import sys
import types
from pathlib import Path

import markup
import terminal_reference

import replicax as rx

# For each topic, the names of `rx` in it. "data.*" stands for all names of `rx.data` that no topic has by themselves.
TOPICS = {
    "Strategies": "MirroredStrategy OneDeviceStrategy MultiWorkerMirroredStrategy TPUStrategy ParameterServerStrategy "
    "experimental.CentralStorageStrategy Strategy StrategyExtended RunOptions get_strategy has_strategy "
    "experimental_set_strategy",
    "In a replica function": "ReplicaContext get_replica_context in_cross_replica_context",
    "Functions": "function Function accumulate_gradients share_of_mean GradientTape UnconnectedGradients",
    "Values": "DistributedValues PerReplica Mirrored IndexedSlices TensorSpec PerReplicaSpec ValueContext",
    "Variables": "Variable VariableAggregation VariableSynchronization variable_creator_scope name_scope "
    "experimental.abstract_variables experimental.partitioners.*",
    "Optimizers": "Optimizer",
    "Input": "DistributedDataset DistributedIterator InputContext InputOptions InputReplicationMode data.*",
    "Communication": "ReduceOp CommunicationOptions CommunicationImplementation CrossDeviceOps NcclAllReduce "
    "HierarchicalCopyAllReduce ReductionToOneDevice",
    "Checkpoints": "train.*",
    "Early stopping": "train.EarlyStopping train.agree_to_stop",
    "Preemption": "experimental.PreemptionCheckpointHandler experimental.PreemptionWatcher "
    "experimental.TerminationConfig",
    "Seeing what happens": "plan Plan profile Benchmark Benchmarks show Placement",
    "Saved models": "experimental.save_model experimental.load_model",
    "Settings": "config.*",
    "Clusters and jobs": "launch ClusterSpec cluster_resolver.*",
    "Parameter servers": "coordinator.*",
    "Remote calls": "experimental.rpc.*",
    "TPUs": "tpu.*",
    "Errors": "ReplicaxError InvalidArgumentError DeviceError ReplicaError StepError JobError UnavailableError "
    "CancelledError OutOfRangeError DataLossError CheckpointError",
}
MODULES = ("cluster_resolver", "config", "coordinator", "data", "experimental", "tpu", "train")


def value_of(name: str) -> object:
    """Returns what a name such as "data.Dataset" of `rx` is."""
    value: object = rx
    for part in name.split("."):
        value = getattr(value, part)
    return value


@functools.cache
def public() -> dict[str, object]:
    """Returns all public names of `rx` and of its modules, without the second names of one thing."""
    found: dict[str, object] = {}

    def add(prefix: str, module: object) -> None:
        for name in getattr(module, "__all__", None) or [name for name in dir(module) if not name.startswith("_")]:
            value = getattr(module, name)
            if isinstance(value, types.ModuleType):
                if prefix and value.__name__.startswith("replicax"):
                    add(f"{prefix}{name}.", value)
            elif getattr(value, "__module__", None) not in ("__future__", "typing", "collections.abc"):
                found[f"{prefix}{name}"] = value

    add("", rx)
    for module in MODULES:
        __import__(f"replicax.{module}")
        add(f"{module}.", sys.modules[f"replicax.{module}"])
    # One thing has one page, under the name that a topic gives it, or its first.
    chosen: dict[int, str] = {}
    listed = [name for names in TOPICS.values() for name in names.split() if not name.endswith("*")]
    for name in sorted(found, key=lambda name: name not in listed):
        chosen.setdefault(id(found[name]) if callable(found[name]) else id(name), name)
    return {name: found[name] for name in found if name in chosen.values()}


def topics(names: dict[str, object]) -> dict[str, list[str]]:
    """Returns the names of each topic, and refuses names that are nowhere or not there."""
    result: dict[str, list[str]] = {}
    placed: set[str] = set()
    single = {name for text in TOPICS.values() for name in text.split() if not name.endswith("*")}
    for topic, text in TOPICS.items():
        result[topic] = []
        for name in text.split():
            prefix = name.removesuffix("*")
            some = [n for n in names if n.startswith(prefix) and n not in single] if prefix != name else [name]
            result[topic] += some
        placed |= set(result[topic])
    if gone := placed - set(names):
        raise SystemExit(f"site/reference.py names what replicax does not have: {', '.join(sorted(gone))}")
    if lost := set(names) - placed:
        raise SystemExit(f"site/reference.py gives no topic to these public names: {', '.join(sorted(lost))}")
    return result


def directive(name: str, value: object) -> list[str]:
    """Returns the lines of autodoc's directive for a name, with its full path."""
    path = f"replicax.{name}"
    if inspect.isclass(value):
        # Members that another public class has are on that class's page.
        bases = [base for base in value.__mro__[1:] if base in PUBLIC_CLASSES or not _ours(base)]
        ignored = ", ".join(dict.fromkeys(base.__name__ for base in bases))
        members = [f"   :inherited-members: {ignored}", "   :members:"]
        derived = any(base in PUBLIC_CLASSES or issubclass(base, BaseException) for base in value.__mro__[1:])
        members += ["   :show-inheritance:"] * derived
        if fields := getattr(value, "_fields", None):  # of a named tuple, of which the class's docstring tells
            members.append(f"   :exclude-members: {', '.join(fields)}")
        return [f".. autoclass:: {path}", *members]
    if callable(value):
        return [f".. autofunction:: {path}"]
    # A number has no docstring of its own: that of its namespace explains it, with an example.
    text = inspect.getdoc(sys.modules[path.rpartition(".")[0]]) or ""
    explained = ["", *(f"   {line}" for line in markup.as_markup(text.splitlines()))]
    return [f".. py:data:: {path}", f"   :value: {value!r}", *explained]


def _ours(value: type) -> bool:
    return value.__module__.startswith("replicax")


PUBLIC_CLASSES: set[type] = set()


def summary(value: object) -> str:
    """Returns the first line of a docstring."""
    text = value.__doc__ if callable(value) else None
    return " ".join(markup.as_markup([inspect.cleandoc(text).partition("\n")[0]])) if text else ""


def heading(text: str, line: str = "=") -> list[str]:
    """Returns the lines of a heading."""
    return [text, line * len(text), ""]


def write(folder: Path) -> None:
    """Writes the pages of the reference into a folder."""
    names = public()
    PUBLIC_CLASSES.update(value for value in names.values() if inspect.isclass(value))
    places = folder / "api"
    places.mkdir(parents=True, exist_ok=True)
    index = heading("The API of replicax")
    index += ["``import replicax as rx``: every public name, by topic.", ""]
    for topic, listed in topics(names).items():
        index += [*heading(topic, "-"), ".. list-table::", "   :widths: 35 65", ""]
        for name in listed:
            index += [f"   * - :doc:`rx.{name} <replicax.{name}>`", f"     - {summary(names[name])}"]
            page = [*heading(f"rx.{name}"), *directive(name, names[name])]
            (places / f"replicax.{name}.rst").write_text("\n".join(page) + "\n", encoding="utf-8")
        index += ["", ".. toctree::", "   :hidden:", "", *(f"   replicax.{name}" for name in listed), ""]
    (places / "index.rst").write_text("\n".join(index) + "\n", encoding="utf-8")
    terminal_reference.write(folder)
    # `replicax.tf` changes how JAX's arrays print, so it is read in a process of its own.
    here = Path(__file__)
    subprocess.run([sys.executable, str(here.with_name("tf_reference.py")), str(folder / "tf")], check=True)
