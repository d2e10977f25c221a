"""A resolver for instance groups of Google Compute Engine, and Google's metadata server."""

from __future__ import annotations

import os
import urllib.request
from pathlib import Path
from typing import Any

from replicax._base import doc_pages
from replicax._base.messages import received
from replicax._cluster.explain import Explanation
from replicax._cluster.resolver import TaskClusterResolver
from replicax._cluster.spec import ClusterSpec

_METADATA_SECONDS = 3.0
_PRODUCT_FILE = Path("/sys/class/dmi/id/product_name")


def on_google_cloud() -> bool:
    """Returns whether there is a metadata server to ask: a machine of Google's has one, and the environment may."""
    if os.environ.get("GCE_METADATA_HOST") or os.environ.get("GCE_METADATA_IP"):
        return True
    try:
        return _PRODUCT_FILE.read_text(encoding="utf-8").startswith("Google")
    except OSError:
        return False


def metadata(path: str) -> str:
    """Returns what the metadata server says of a path such as `project/project-id`; asks without a proxy."""
    server = os.environ.get("GCE_METADATA_HOST") or os.environ.get("GCE_METADATA_IP") or "169.254.169.254"
    request = urllib.request.Request(
        f"http://{server}/computeMetadata/v1/{path}", headers={"Metadata-Flavor": "Google"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=_METADATA_SECONDS) as answer:
        text: bytes = answer.read()
        return text.decode().strip()


def client(name: str, version: str, credentials: Any, needed_by: str, **options: Any) -> Any:
    """Returns a client for one of Google's services, with these credentials or those that Google's library finds."""
    try:
        from googleapiclient import discovery
    except ImportError as error:
        missing = ImportError(f"googleapiclient must be installed before using the {needed_by}")
        missing.add_note(f"Install it: {doc_pages.install('gce')}")  # the message itself is TensorFlow's
        raise missing from error
    chosen = {} if credentials in (None, "default") else {"credentials": credentials}
    if chosen and not (hasattr(credentials, "before_request") or hasattr(credentials, "authorize")):
        raise TypeError(
            f"`credentials` of the {needed_by} are 'default' or Google credentials, as google.auth gives them; got "
            f"{received(credentials)}."
        )
    return discovery.build(name, version, cache_discovery=False, **chosen, **options)


class GCEClusterResolver(TaskClusterResolver):
    """A resolver that asks Google Compute Engine for the running instances of a group, anew each time.

    Instances are sorted by their internal addresses; `task_id` is this one's place among them.

    Args:
        project: the project's name.
        zone: the group's zone.
        instance_group: the group's name.
        port: the port of every task.
        task_type: the job that the instances are.
        task_id: the index of this one.
        rpc_layer: what `master` puts in front.
        credentials: Google credentials; by default those that Google's library finds.
        service: the service as `googleapiclient.discovery.build("compute", "v1")` makes it; made by default.

    Raises:
        ImportError: no service is given, and `googleapiclient` (the extra `gce`) is not there.

    >>> from unittest import mock
    >>> import replicax as rx
    >>> compute = mock.Mock()
    >>> answer = {"items": [{"instance": "zones/z/instances/a"}]}
    >>> compute.instanceGroups().listInstances().execute.return_value = answer
    >>> compute.instanceGroups().listInstances_next.return_value = None
    >>> compute.instances().get().execute.return_value = {"networkInterfaces": [{"networkIP": "10.0.0.1"}]}
    >>> rx.cluster_resolver.GCEClusterResolver("project", "zone", "group", 8470, service=compute).master()
    'grpc://10.0.0.1:8470'
    """

    def __init__(
        self,
        project: str,
        zone: str,
        instance_group: str,
        port: int,
        task_type: str = "worker",
        task_id: int = 0,
        rpc_layer: str | None = "grpc",
        credentials: Any = "default",
        service: Any = None,
    ):
        self._where = {"project": project, "zone": zone}
        self._group, self._port = instance_group, port
        self._task_type, self._task_id, self._rpc_layer = task_type, task_id, rpc_layer
        self._service = client("compute", "v1", credentials, "GCE cluster resolver") if service is None else service

    def cluster_spec(self) -> ClusterSpec:
        """Returns the instances that run now.

        >>> from unittest import mock
        >>> import replicax as rx
        >>> compute = mock.Mock()  # in place of the service of Google
        >>> answer = {"items": [{"instance": "zones/z/instances/a"}]}
        >>> compute.instanceGroups().listInstances().execute.return_value = answer
        >>> compute.instanceGroups().listInstances_next.return_value = None
        >>> compute.instances().get().execute.return_value = {"networkInterfaces": [{"networkIP": "10.0.0.1"}]}
        >>> rx.cluster_resolver.GCEClusterResolver("project", "zone", "group", 8470, service=compute).cluster_spec()
        ClusterSpec({'worker': ['10.0.0.1:8470']})
        """
        groups, addresses = self._service.instanceGroups(), []
        request = groups.listInstances(
            **self._where, instanceGroup=self._group, body={"instanceState": "RUNNING"}, orderBy="name"
        )
        while request is not None:
            answer = request.execute()
            for item in answer.get("items", ()):
                name = item["instance"].rpartition("/")[2]
                instance = self._service.instances().get(**self._where, instance=name).execute()
                addresses.append(f"{instance['networkInterfaces'][0]['networkIP']}:{self._port}")
            request = groups.listInstances_next(previous_request=request, previous_response=answer)
        return ClusterSpec({self._task_type: sorted(addresses)})

    @property
    def task_type(self) -> str | None:
        """The job that was given. It cannot be set: `RuntimeError`.

        >>> from unittest import mock
        >>> import replicax as rx
        >>> rx.cluster_resolver.GCEClusterResolver("project", "zone", "group", 8470, service=mock.Mock()).task_type
        'worker'
        """
        return self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        raise RuntimeError(
            f"The task_type of a GCEClusterResolver, here {self._task_type!r}, is given when it is made."
        )

    def _describe(self, report: Explanation) -> None:
        where = f"project {self._where['project']!r}, zone {self._where['zone']!r}"
        report.found.append(f"Google Compute Engine: {where}, instance group {self._group!r}")
