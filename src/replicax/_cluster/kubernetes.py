"""A resolver for pods of a Kubernetes cluster."""

from __future__ import annotations

import collections
import contextlib
import enum
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from replicax._cluster import local_processes
from replicax._cluster.explain import Explanation, listed
from replicax._cluster.resolver import TaskClusterResolver
from replicax._cluster.spec import ClusterSpec
from replicax._job.channel import join_address

_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_INDEX_KEY = "batch.kubernetes.io/job-completion-index"
_REQUEST_SECONDS = 30


class ExecutableLocation(enum.Enum):
    """The place where the program runs: in a pod of the cluster, or outside of it, with a kubeconfig file.

    >>> import replicax as rx
    >>> rx.cluster_resolver.KubernetesExecutableLocation.OFF_CLUSTER.value
    1
    """

    WITHIN_CLUSTER = 0
    OFF_CLUSTER = 1


class KubernetesClusterResolver(TaskClusterResolver):
    """A resolver that asks Kubernetes for the pods with certain labels, anew each time.

    Pods are taken in the order of their names, `train-2` before `train-10`. Which of them this process is, is to be
    set: `resolver.task_type, resolver.task_id = "worker", int(os.environ["JOB_COMPLETION_INDEX"])`.

    Args:
        job_to_label_mapping: for each job its label selectors; `{"worker": ["job-name=tensorflow"]}` by default.
        tf_server_port: the port of every task.
        rpc_layer: what `master` puts in front.
        override_client: a `kubernetes.client.CoreV1Api`, or something that has its `list_pod_for_all_namespaces`; by
            default one that is made from what the pod (or, outside, the kubeconfig file) has.
        executable_location: where the program runs.

    Raises:
        ImportError: no client is given, and the package `kubernetes` (the extra `kubernetes`) is not there.
        ValueError: no client is given, and `executable_location` is not one of KubernetesExecutableLocation.

    >>> from types import SimpleNamespace as Named
    >>> import replicax as rx
    >>> class Client:
    ...     def list_pod_for_all_namespaces(self, label_selector):
    ...         pod = Named(metadata=Named(name="a"), status=Named(phase="Running", pod_ip="10.0.0.1"))
    ...         return Named(items=[pod])
    >>> rx.cluster_resolver.KubernetesClusterResolver(override_client=Client()).cluster_spec()
    ClusterSpec({'worker': ['10.0.0.1:8470']})
    """

    def __init__(
        self,
        job_to_label_mapping: Mapping[str, Sequence[str]] | None = None,
        tf_server_port: int = 8470,
        rpc_layer: str | None = "grpc",
        override_client: Any = None,
        executable_location: ExecutableLocation = ExecutableLocation.WITHIN_CLUSTER,
    ):
        self._labels = job_to_label_mapping or {"worker": ["job-name=tensorflow"]}
        self._port, self._rpc_layer = tf_server_port, rpc_layer
        # A client that was given may know nothing of deadlines.
        self._options: dict[str, Any] = {} if override_client else {"_request_timeout": _REQUEST_SECONDS}
        self._client = override_client or _made_client(executable_location)
        within = executable_location == ExecutableLocation.WITHIN_CLUSTER
        made = "the pod's service account" if within else "the kubeconfig file"
        self._source = "the client that was given" if override_client else made

    def cluster_spec(self) -> ClusterSpec:
        """Returns the pods that there are now; `RuntimeError` if one of them is not running.

        >>> from types import SimpleNamespace as Named
        >>> import replicax as rx
        >>> class Client:
        ...     def list_pod_for_all_namespaces(self, label_selector):
        ...         pod = Named(metadata=Named(name="a"), status=Named(phase="Pending", pod_ip=None))
        ...         return Named(items=[pod])
        >>> rx.cluster_resolver.KubernetesClusterResolver(override_client=Client()).cluster_spec()
        Traceback (most recent call last):
        RuntimeError: Pod "a" is not running; phase: "Pending"
        """
        return ClusterSpec({job: [self._address(pod) for pod in self._pods(job)] for job in self._labels})

    def _pods(self, job: str) -> list[Any]:
        found = []
        for selector in self._labels[job]:
            found += sorted(self._list(selector).items, key=lambda pod: local_processes.natural(pod.metadata.name))
        return found

    def _list(self, selector: str) -> Any:
        try:
            return self._client.list_pod_for_all_namespaces(label_selector=selector, **self._options)
        except Exception as error:
            # The account of a pod is often allowed to look at its own namespace alone.
            if getattr(error, "status", None) != 403 or (namespace := _own_namespace()) is None:
                raise
            return self._client.list_namespaced_pod(namespace, label_selector=selector, **self._options)

    def _address(self, pod: Any) -> str:
        if pod.status.phase != "Running":
            raise RuntimeError(f'Pod "{pod.metadata.name}" is not running; phase: "{pod.status.phase}"')
        return join_address(pod.status.pod_ip, self._port)

    def _describe(self, report: Explanation) -> None:
        server = getattr(getattr(getattr(self._client, "api_client", None), "configuration", None), "host", None)
        report.found.append(f"Kubernetes, by {self._source}{f', at {server}' if server else ''}")
        for job in self._labels:
            pods = self._pods(job)
            selectors = ", ".join(self._labels[job])
            if not pods:
                report.missing.append(f"pods with the label {selectors}, for the job {job!r}")
                continue
            shown = [f"{pod.metadata.name} ({pod.status.phase})" for pod in pods]
            report.found.append(f"{len(pods)} pods with the label {selectors}: {listed(shown)}")
            claims = collections.defaultdict(list)
            for pod in pods:
                marks = {**(getattr(pod.metadata, "labels", None) or {}), **_annotations(pod)}
                if _INDEX_KEY in marks:
                    claims[marks[_INDEX_KEY]].append(pod.metadata.name)
            for index, claimants in claims.items():
                if len(claimants) > 1:
                    report.contradictions.append(f"{' and '.join(claimants)} claim one index, {job} {index}")
        index = os.environ.get("JOB_COMPLETION_INDEX")
        if index is not None and self._task_id is None:
            report.found.append(
                f"JOB_COMPLETION_INDEX={index} in the environment: the task_id to set in an indexed Job"
            )
        elif index is not None and str(self._task_id) != index:
            report.contradictions.append(f"JOB_COMPLETION_INDEX is {index}, but task_id was set to {self._task_id}")


def _annotations(pod: Any) -> dict[str, str]:
    return getattr(pod.metadata, "annotations", None) or {}


def _own_namespace() -> str | None:
    """Returns the namespace of this pod, or what POD_NAMESPACE says."""
    if namespace := os.environ.get("POD_NAMESPACE"):
        return namespace
    with contextlib.suppress(OSError):
        return _NAMESPACE_FILE.read_text(encoding="utf-8").strip()
    return None


def _made_client(location: Any) -> Any:
    try:
        from kubernetes import client, config
    except ImportError as error:
        raise ImportError(
            "The Kubernetes Python client must be installed before using the Kubernetes Cluster Resolver. To install "
            "the Kubernetes Python client, run `pip install kubernetes` on your command line."
        ) from error
    if location not in list(ExecutableLocation):
        raise ValueError(f"`executable_location` must be one of KubernetesExecutableLocation; got {location!r}.")
    configuration = client.Configuration()
    if location == ExecutableLocation.WITHIN_CLUSTER:
        try:
            config.load_incluster_config(configuration)
        except config.ConfigException as error:
            error.add_note(
                "The program does not run in a pod that has a service account. Outside of the cluster, give "
                "executable_location=KubernetesExecutableLocation.OFF_CLUSTER."
            )
            raise
    else:
        config.load_kube_config(client_configuration=configuration)
    return client.CoreV1Api(client.ApiClient(configuration))
