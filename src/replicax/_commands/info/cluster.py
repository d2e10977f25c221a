"""The cluster that this process would be part of, and what is wrong with its description."""

from __future__ import annotations

import os
from collections.abc import Callable

from replicax._base import doc_pages
from replicax._commands.info.section import Section


def cluster() -> Section:
    """Returns the descriptions of a cluster in the environment, as the cluster resolvers read them."""
    section = Section("Cluster")
    if "REPLICAX_RESTART_COUNT" in os.environ:
        count = os.environ["REPLICAX_RESTART_COUNT"]
        section.data["replicax launch"] = {"restarts": count}
        section.rows.append(("replicax launch", f"started this process; restarts so far: {count}"))
    for source, make, use in _sources():
        _describe(section, source, make, use)
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        index = os.environ.get("JOB_COMPLETION_INDEX")
        section.data["Kubernetes"] = {"JOB_COMPLETION_INDEX": index}
        number = "not set" if index is None else index
        section.rows.append(("Kubernetes", f"this is a pod; JOB_COMPLETION_INDEX is {number}"))
        if not os.environ.get("TF_CONFIG"):
            section.rows.append(("", f"for workers in several pods, set TF_CONFIG: {_page()}"))
    if _is_google():
        section.data["Google Cloud"] = True
        section.rows.append(("Google Cloud", "this is a machine of Google Cloud"))
    if not section.rows:
        section.rows.append(("", "none is described: a program runs on this machine alone"))
        section.rows.append(("", "$ replicax launch --workers 2 train.py   starts several workers"))
    return section


def _page() -> str:
    return doc_pages.page("how-to/launch")


def _sources() -> list[tuple[str, Callable[[], object], str]]:
    """Returns each description that is there: its name, what makes its resolver, and how a program uses it."""
    from replicax._cluster.environment import _SAGEMAKER_FILE, SageMakerClusterResolver, TFConfigClusterResolver
    from replicax._cluster.slurm import SlurmClusterResolver

    given = "{}() given to the strategy reads it; without it, a program runs alone".format
    found: list[tuple[str, Callable[[], object], str]] = []
    if os.environ.get("TF_CONFIG"):
        found.append(("TF_CONFIG", TFConfigClusterResolver, "strategies of several workers read it by default"))
    if "SLURM_PROCID" in os.environ:
        found.append(("Slurm", lambda: SlurmClusterResolver(auto_set_gpu=False), given("SlurmClusterResolver")))
    if "SM_HOSTS" in os.environ or _SAGEMAKER_FILE.exists():
        found.append(("SageMaker", SageMakerClusterResolver, given("SageMakerClusterResolver")))
    # A name (TPU_NAME) would have the resolver ask the Cloud TPU service, with the user's credentials.
    if os.environ.get("TPU_PROCESS_ADDRESSES") or os.environ.get("TPU_WORKER_HOSTNAMES"):
        found.append(("TPU", _tpu, "TPUStrategy reads it by default"))
    return found


def _tpu() -> object:
    from replicax._cluster.tpu import TPUClusterResolver

    return TPUClusterResolver()


def _is_google() -> bool:
    from replicax._cluster import gce

    return gce.on_google_cloud()


def _describe(section: Section, source: str, make: Callable[[], object], use: str) -> None:
    try:
        resolver = make()
        report = resolver.explain()  # type: ignore[attr-defined]
    except Exception as error:  # whatever a description makes of a resolver, it is told
        section.data[source] = {"error": str(error)}
        section.rows.append((source, f"cannot be read: {error}"))
        section.problems.append(f"{source}: {error}")
        return
    section.data[source] = {
        "found": report.found,
        "missing": report.missing,
        "contradictions": report.contradictions,
        "use": use,
    }
    section.rows.append((source, use))
    section.rows += [("", line) for line in report.found]
    found = [f"{source}: missing: {each}." for each in report.missing]
    found += [f"{source}: {each}." for each in report.contradictions]
    if found:
        found[-1] += f" How a cluster is described: {_page()}"
    section.problems += found
