"""A resolver for Cloud TPUs."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from replicax._base import devices as _devices
from replicax._base.errors import DeviceError
from replicax._base.messages import received
from replicax._cluster import gce
from replicax._cluster.explain import Explanation
from replicax._cluster.resolver import ClusterResolver, master_url
from replicax._cluster.spec import ClusterSpec
from replicax._job.channel import join_address, parse

_PORT = 8470  # of a TPU whose address comes without one
_OWN_PORT = "REPLICAX_TPU_PORT"  # where the first worker listens for the others; as JAX's coordinator on TPU VMs
_OWN_PORT_DEFAULT = 8482


class TPUSystemMetadata(NamedTuple):
    """The TPUs of all connected processes.

    Args:
        num_cores: how many, in all.
        num_hosts: how many processes have them.
        num_of_cores_per_host: how many each of these has.
        topology: not known here: None.
        devices: their names.

    >>> TPUSystemMetadata(8, 2, 4, None, ()).num_cores
    8
    """

    num_cores: int
    num_hosts: int
    num_of_cores_per_host: int
    topology: Any
    devices: tuple[str, ...]


class TPUHardwareFeature(NamedTuple):
    """The hardware features that a TPU system's topology tells.

    Args:
        embedding_feature: a number: 0 for unsupported, 1 for version 1, 2 for version 2.

    >>> TPUHardwareFeature(2).embedding_feature
    2
    """

    embedding_feature: int = 0


class _Workers(NamedTuple):
    """The workers that a TPU's name stands for."""

    name: str
    addresses: list[str] | None  # None: ask the Cloud TPU service
    own: int | None  # None: it was named, and this may be none of its machines
    source: str


class TPUClusterResolver(ClusterResolver):
    """A resolver for Cloud TPUs.

    Args:
        tpu: `"local"` for the TPUs of this machine alone; `"grpc://HOST:PORT"`, several separated by commas; or the
            name of a TPU, for which the Cloud TPU service is asked. Empty or None: what the environment says, which
            is the first that is set of KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS, TPU_NAME, TPU_CONFIG,
            TPU_PROCESS_ADDRESSES and TPU_WORKER_HOSTNAMES, then virtual TPU devices (as `"local"`), and then the
            metadata of the TPU VM. On a TPU VM the task is this machine's.
        zone: the TPU's zone; by default this machine's.
        project: the TPU's project; by default this machine's.
        job_name: the job that the TPU's workers are.
        coordinator_name: a name for a job of one more task, the coordinator; None for no such job.
        coordinator_address: its address; by default a free port of this machine.
        credentials: Google credentials; by default those that Google's library finds.
        service: the service as `googleapiclient.discovery.build("tpu", "v2")` makes it; made when it is needed.
        discovery_url: where the description of that service is; TPU_API_DISCOVERY_URL takes precedence.

    Raises:
        ValueError: no name is given, and the environment says nothing.
        NotImplementedError: more than one name is given.

    >>> import replicax as rx
    >>> resolver = rx.cluster_resolver.TPUClusterResolver("grpc://10.1.2.3:8470")
    >>> resolver.cluster_spec(), resolver.master()
    (ClusterSpec({'worker': ['10.1.2.3:8470']}), 'grpc://10.1.2.3:8470')
    """

    def __init__(
        self,
        tpu: Any = None,
        zone: str | None = None,
        project: str | None = None,
        job_name: str = "worker",
        coordinator_name: str | None = None,
        coordinator_address: str | None = None,
        credentials: Any = "default",
        service: Any = None,
        discovery_url: str | None = None,
    ):
        config = json.loads(os.environ.get("TPU_CONFIG") or "{}")
        self._workers = _find(tpu, config)
        self._zone, self._project = zone or config.get("zone"), project or config.get("project")
        self._credentials, self._service = credentials, service
        self._discovery_url = os.environ.get("TPU_API_DISCOVERY_URL") or discovery_url
        self._task_type, self._task_id = job_name, self._workers.own or 0
        self._coordinator_name, self._coordinator_address = coordinator_name, coordinator_address
        if coordinator_name and not coordinator_address:
            self._coordinator_address = _free_address(self._workers.addresses or ["192.0.2.1:1"])
        self._topology: bytes | None = None

    @staticmethod
    def connect(tpu: Any = None, zone: str | None = None, project: str | None = None) -> TPUClusterResolver:
        """Returns a resolver whose TPUs are ready: joins the machines of the slice, starts JAX's backend and looks.

        The arguments are those of the class. `DeviceError` if this process has no TPU, `JobError` if the machines do
        not come together.

        >>> import replicax as rx
        >>> rx.config.set_virtual_devices({"TPU": 8, "CPU": 4})  # not on a TPU
        >>> rx.cluster_resolver.TPUClusterResolver.connect("local").num_accelerators()
        {'TPU': 8}
        """
        resolver = TPUClusterResolver(tpu, zone, project)
        resolver._connect()
        if not _tpus():
            raise DeviceError(
                f"There is no TPU here. This process has: {', '.join(_devices.device_table())}. On a TPU VM, install "
                "jax[tpu]; to try a program without a TPU, ask for virtual ones: REPLICAX_VIRTUAL_DEVICES=TPU:8."
            )
        return resolver

    def cluster_spec(self) -> ClusterSpec:
        """Returns the TPU's workers; an empty cluster for `"local"`.

        `RuntimeError` if the TPU is not ready, `ValueError` if the Cloud TPU service does not know it.

        >>> import replicax as rx
        >>> rx.cluster_resolver.TPUClusterResolver("grpc://10.1.2.3:8470,grpc://10.1.2.4:8470").cluster_spec()
        ClusterSpec({'worker': ['10.1.2.3:8470', '10.1.2.4:8470']})
        """
        if self._workers.name == "local":
            return ClusterSpec({})
        cluster = {self._task_type: self._addresses()}
        if self._coordinator_name and self._coordinator_address:
            cluster[self._coordinator_name] = [self._coordinator_address]
        return ClusterSpec(cluster)

    def _connect(self) -> None:
        """Joins the job of the slice's machines, where there are several and it is known which of them this is."""
        if self._workers.name == "local":
            return
        hosts = [parse(address)[0] for address in self._addresses()]
        if len(hosts) > 1 and (own := self._number_of_this_machine(hosts)) is not None:
            self._task_id = own
            self._join([(self._task_type, i) for i in range(len(hosts))], _own_addresses(hosts), own)
            _devices.set_task(str(self._task_type), own)

    def _number_of_this_machine(self, hosts: list[str]) -> int | None:
        """Returns the number of this machine in the slice; None if nothing says so, as on a machine outside of it."""
        if self._workers.own is not None:
            return self._workers.own
        text, source = os.environ.get("TPU_WORKER_ID", ""), f"{self._workers.source} and TPU_WORKER_ID"
        if not text and gce.on_google_cloud():
            source = f"{self._workers.source} and the metadata of this machine"
            with contextlib.suppress(OSError):
                text = gce.metadata("instance/attributes/agent-worker-number")
        return _number(text, hosts, source) if text else None

    def _addresses(self) -> list[str]:
        if self._workers.addresses is not None:
            return self._workers.addresses
        node = self._node()
        if node.get("state") != "READY":
            raise RuntimeError(f'TPU "{self._workers.name}" is not ready; its state is "{node.get("state")}".')
        ends = node.get("networkEndpoints") or [{"ipAddress": node.get("ipAddress"), "port": node.get("port")}]
        return [join_address(end["ipAddress"], end.get("port") or _PORT) for end in ends]

    def _node(self) -> dict[str, Any]:
        """Returns what the Cloud TPU service says about this TPU."""
        self._project = self._project or gce.metadata("project/project-id")
        self._zone = self._zone or gce.metadata("instance/zone").rpartition("/")[2]
        if self._service is None:
            options = {"discoveryServiceUrl": self._discovery_url} if self._discovery_url else {}
            self._service = gce.client("tpu", "v2", self._credentials, "TPU cluster resolver", **options)
        name = f"projects/{self._project}/locations/{self._zone}/nodes/{self._workers.name}"
        try:
            node: dict[str, Any] = self._service.projects().locations().nodes().get(name=name).execute()
            return node
        except Exception as error:
            raise ValueError(
                f"The Cloud TPU service does not tell about {name}. Check the arguments tpu, zone and project. It "
                f"answers: {error}"
            ) from error

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Returns the address of a worker, with `grpc://` in front; by default of the first. Empty for `"local"`.

        The arguments are those of `ClusterResolver.master`, of which `rpc_layer` is not used; ValueError if there is no
        such worker.

        >>> import replicax as rx
        >>> rx.cluster_resolver.TPUClusterResolver("grpc://10.1.2.3:8470").master()
        'grpc://10.1.2.3:8470'
        """
        if self._workers.name == "local":
            return ""
        if task_type is None or task_id is None:
            task_type, task_id = self._task_type, self._task_id or 0
        return master_url(self.cluster_spec().task_address(task_type, task_id), "grpc")  # type: ignore[arg-type]

    def get_master(self) -> str:
        """Returns `master()`.

        >>> import replicax as rx
        >>> rx.cluster_resolver.TPUClusterResolver("grpc://10.1.2.3:8470").get_master()
        'grpc://10.1.2.3:8470'
        """
        return self.master()

    def get_job_name(self) -> str | None:
        """Returns the job that the TPU's workers are.

        >>> import replicax as rx
        >>> rx.cluster_resolver.TPUClusterResolver("local").get_job_name()
        'worker'
        """
        return self._task_type

    def get_coordination_service_leader(self) -> str:
        """Returns the name of the task that leads: the first worker.

        >>> import replicax as rx
        >>> rx.cluster_resolver.TPUClusterResolver("local").get_coordination_service_leader()
        '/job:worker/task:0'
        """
        return f"/job:{self._task_type}/task:0"

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: object = None
    ) -> Mapping[str, int]:
        """Returns how many TPU devices this process has; all workers have as many. **Starts JAX's backend.**

        >>> import replicax as rx
        >>> rx.config.set_virtual_devices({"TPU": 8, "CPU": 4})  # not on a TPU
        >>> rx.cluster_resolver.TPUClusterResolver("local").num_accelerators()
        {'TPU': 8}
        """
        return {"TPU": len(_tpus())}

    def get_tpu_system_metadata(self) -> TPUSystemMetadata:
        """Returns how many TPU devices all connected processes have. **Starts JAX's backend.**

        >>> import replicax as rx
        >>> rx.config.set_virtual_devices({"TPU": 8, "CPU": 4})  # not on a TPU
        >>> rx.cluster_resolver.TPUClusterResolver("local").get_tpu_system_metadata().num_cores
        8
        """
        own, hosts = len(_tpus()), jax.process_count()
        job = self._task_type if hosts > 1 else "localhost"
        names = [f"/job:{job}/replica:0/task:{task}/device:TPU:{at}" for task in range(hosts) for at in range(own)]
        return TPUSystemMetadata(own * hosts, hosts, own, None, tuple(names))

    def set_tpu_topology(self, serialized_tpu_topology: bytes) -> None:
        """Keeps a topology, as `Topology.serialized()` gives it.

        >>> import replicax as rx
        >>> rx.config.set_virtual_devices({"TPU": 8, "CPU": 4})  # not on a TPU
        >>> topology, resolver = rx.tpu.initialize_tpu_system(), rx.cluster_resolver.TPUClusterResolver("local")
        >>> resolver.set_tpu_topology(topology.serialized())
        >>> resolver.tpu_hardware_feature
        TPUHardwareFeature(embedding_feature=0)
        """
        self._topology = serialized_tpu_topology

    @property
    def tpu_hardware_feature(self) -> TPUHardwareFeature | None:
        """Returns that embeddings have no hardware of their own, once there is a topology; None without one.

        >>> import replicax as rx
        >>> rx.cluster_resolver.TPUClusterResolver("local").tpu_hardware_feature is None
        True
        """
        return None if self._topology is None else TPUHardwareFeature()

    def _describe(self, report: Explanation) -> None:
        name, addresses, own, source = self._workers
        report.found.append(f"TPU {name!r}, from {source}" if name else f"a TPU, from {source}")
        hosts = [host for host in os.environ.get("TPU_WORKER_HOSTNAMES", "").split(",") if host]
        if name == "local" and len(hosts) > 1:
            report.contradictions.append(
                f"the TPU was given as 'local', but its slice has {len(hosts)} machines (TPU_WORKER_HOSTNAMES"
                f"={','.join(hosts)}): each would train alone. Give tpu=''"
            )
        if addresses is None and name != "local":
            node = self._node()
            facts = {key: node.get(key) for key in ("acceleratorType", "state", "health")}
            report.found.append(f"Cloud TPU service: {', '.join(f'{key} {value}' for key, value in facts.items())}")
            if facts["health"] not in (None, "HEALTHY"):
                detail = node.get("healthDescription", "")
                report.contradictions.append(f"the TPU is not healthy: {facts['health']} {detail}".rstrip())


def _tpus() -> list[str]:
    return [name for name in _devices.device_table() if name.startswith("TPU:")]


def _find(tpu: Any, config: dict[str, Any]) -> _Workers:
    """Returns the workers that the given name, or the environment, stands for."""
    if isinstance(tpu, (list, tuple)):
        if len(tpu) != 1:
            kind = NotImplementedError if tpu else ValueError
            raise kind(f"One TPU can be used at a time; got {len(tpu)}: {', '.join(map(str, tpu))}.")
        (tpu,) = tpu
    names = {
        "the argument `tpu`": tpu,
        "KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS in the environment": os.environ.get("KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS"),
        "TPU_NAME in the environment": os.environ.get("TPU_NAME"),
        "TPU_CONFIG in the environment": config.get("tpu_node_name"),
    }
    source, tpu = next(((source, name) for source, name in names.items() if name), ("", None))
    if tpu and not isinstance(tpu, (str, bytes)):
        raise TypeError(f"`tpu` is the name or address of a TPU, or None, got {received(tpu)}.")
    if tpu:
        tpu = tpu.decode() if isinstance(tpu, bytes) else tpu
        return _Workers(tpu, _given_addresses(tpu) if tpu.startswith("grpc://") else None, None, source)
    for variable in ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES"):
        if hosts := os.environ.get(variable):
            own = os.environ.get("TPU_WORKER_ID", "0")
            return _vm_workers(hosts.split(","), own, f"{variable} and TPU_WORKER_ID in the environment")
    if _devices.virtual_count("TPU"):
        return _Workers("local", None, 0, "the virtual TPU devices")
    if gce.on_google_cloud():
        try:
            hosts = gce.metadata("instance/attributes/worker-network-endpoints")
            own = gce.metadata("instance/attributes/agent-worker-number")
        except OSError as error:
            raise ValueError(f"Please provide a TPU Name to connect to. (The metadata has none: {error}.)") from error
        # An entry is a host, or name:id:number.
        return _vm_workers([part.rpartition(":")[2] for part in hosts.split(",")], own, "the metadata of the TPU VM")
    raise ValueError("Please provide a TPU Name to connect to.")


def _given_addresses(text: str) -> list[str]:
    parts = [part.strip().removeprefix("grpc://") for part in text.split(",")]
    return [part if ":" in part else f"{part}:{_PORT}" for part in parts]


def _vm_workers(hosts: list[str], own: str, source: str) -> _Workers:
    names = [host.strip().partition(":")[0] for host in hosts]
    return _Workers("", _own_addresses(names), _number(own, names, source), source)


def _number(own: str, hosts: list[str], source: str) -> int:
    if not own.isdecimal() or int(own) >= len(hosts):
        raise ValueError(f"{source} do not fit together: worker {own!r} of the {len(hosts)} hosts {','.join(hosts)}.")
    return int(own)


def _own_addresses(hosts: list[str]) -> list[str]:
    """Returns addresses of replicax's processes on these hosts: those that share a host have ports of their own."""
    text = os.environ.get(_OWN_PORT) or str(_OWN_PORT_DEFAULT)
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise ValueError(f"{_OWN_PORT} is the number of a port; got {text!r}.")
    return [join_address(host, int(text) + hosts[:i].count(host)) for i, host in enumerate(hosts)]


def _free_address(others: list[str]) -> str:
    """Returns an address of this machine at which nothing listens, on the way to the others."""
    host = parse(others[0])[0]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way, socket.socket() as free:
        try:
            way.connect((host if host.replace(".", "").isdecimal() else "192.0.2.1", 1))  # sends nothing
            own = way.getsockname()[0]
        except OSError:  # without a network
            own = "127.0.0.1"
        free.bind(("", 0))
        return f"{own}:{free.getsockname()[1]}"
