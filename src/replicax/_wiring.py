"""The functions of upper packages that lower packages call are registered here, and nowhere else.

Public modules that use them import this module.
"""

from typing import Any

from replicax._base import foreign_state, tracebacks
from replicax._report import notebooks
from replicax._report.benchmark import Benchmark
from replicax._report.placement import Placement
from replicax._strategies import default, tools
from replicax._tracing import autograph_switch, context, dataset_reads, frames
from replicax._values import errors, mesh


def _converter() -> autograph_switch.Converter:
    from replicax._autograph import convert  # and the library that rewrites Python code

    return convert


def _join_keras() -> None:
    from replicax._integrations import keras

    keras.join()


def _join_nnx() -> None:
    from replicax._integrations import nnx

    nnx.join()


def _to_html(value: object) -> tuple[str, str] | None:
    from replicax._placement import visualize

    return visualize.to_html(value)


def _benchmark(*arguments: Any) -> Benchmark:
    from replicax._benchmark import measure  # which few programs need

    return measure.benchmark(*arguments)


def _visualize(*arguments: Any) -> Placement:
    from replicax._placement import visualize  # which few programs need

    return visualize.visualize(*arguments)


notebooks.set_to_html(_to_html)
tools.plug_in("benchmark", _benchmark)
tools.plug_in("visualize", _visualize)
context.set_default_context(default._DefaultReplicaContext(default._DefaultDistributionStrategy(), 0))
autograph_switch.set_converter(_converter)
tracebacks.set_advice(autograph_switch.advise)
errors.set_in_replica_function(context.in_replica_function)
mesh.set_local_replica(lambda replicas: frames.frame().replica_on(replicas))
dataset_reads.install()
foreign_state.plug_in("keras", _join_keras)
foreign_state.plug_in("flax.nnx", _join_nnx)
