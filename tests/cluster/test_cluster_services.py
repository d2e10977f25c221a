"""Resolvers that ask a service: its recorded answers come over HTTP, to the official client libraries."""

from __future__ import annotations

import http.server
import importlib.resources
import json
import os
import signal
import socket
import threading
from unittest import mock
from urllib.parse import parse_qs, urlsplit

import google.auth.credentials
import googleapiclient.discovery
import jax
import kubernetes
import pytest

import replicax as rx
from replicax._base import devices
from replicax._cluster import preemption
from replicax._job import notices
from replicax.cluster_resolver import (
    GCEClusterResolver,
    KubernetesClusterResolver,
    KubernetesExecutableLocation,
    TPUClusterResolver,
    TPUSystemMetadata,
)

OF_SERVICES = ("KUBE", "GCE_", "TPU", "POD_NAMESPACE", "JOB_COMPLETION_INDEX", "TF_CONFIG")


@pytest.fixture(autouse=True)
def no_service_around():
    with mock.patch.dict(os.environ):  # which resolvers may set, as CUDA_VISIBLE_DEVICES
        for name in list(os.environ):
            if name.startswith(OF_SERVICES) or name.lower().endswith("_proxy"):
                del os.environ[name]
        yield


class Service:
    """A server on this machine that answers requests from a table, and keeps what was asked."""

    def __init__(self):
        self.answers: dict[str, tuple[int, object]] = {}
        self.asked: list[tuple[str, str, dict, object]] = []
        service = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                address = urlsplit(self.path)
                query = {name: values[0] for name, values in parse_qs(address.query).items()}
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                service.asked.append((self.command, address.path, query, json.loads(body) if body else None))
                key = address.path if "pageToken" not in query else f"{address.path}?pageToken={query['pageToken']}"
                status, answer = service.answers.get(key, (404, {"error": {"code": 404, "message": f"no {key}"}}))
                text = isinstance(answer, str)
                data = (answer if text else json.dumps(answer)).encode()
                self.send_response(status)
                self.send_header("Content-Type", "text/plain" if text else "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_POST = do_GET

            def log_message(self, *args):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.host = f"127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), name="service")
        self.thread.start()

    def close(self):
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def service():
    service = Service()
    yield service
    service.close()


# Kubernetes


def pod(name, ip, phase="Running", index=None):
    """A pod as the API lists it, cut to what it always has."""
    marks = {"batch.kubernetes.io/job-completion-index": index} if index is not None else {}
    return {
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": "3d1c1f30-7c1e-4c35-9f7e-0b4f5a6f2c11",
            "resourceVersion": "4711",
            "creationTimestamp": "2026-07-01T09:00:00Z",
            "labels": {"job-name": "train", "batch.kubernetes.io/job-name": "train", **marks},
            "annotations": marks,
        },
        "spec": {"containers": [{"name": "train", "image": "train:1", "resources": {}}], "nodeName": "node-1"},
        "status": {
            "phase": phase,
            "hostIP": "192.168.49.2",
            **({"podIP": ip, "podIPs": [{"ip": ip}]} if ip else {}),
            "startTime": "2026-07-01T09:00:02Z",
            "qosClass": "BestEffort",
        },
    }


def pods(*items):
    return 200, {"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "4712"}, "items": [*items]}


FORBIDDEN = (
    403,
    {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": 'pods is forbidden: User "system:serviceaccount:default:default" cannot list resource "pods" in API '
        'group "" at the cluster scope',
        "reason": "Forbidden",
        "details": {"kind": "pods"},
        "code": 403,
    },
)


@pytest.fixture
def client(service):
    configuration = kubernetes.client.Configuration(host=f"http://{service.host}")
    with kubernetes.client.ApiClient(configuration) as api:
        yield kubernetes.client.CoreV1Api(api)


def test_kubernetes_pods_of_ipv6_come_in_brackets(service, client):
    service.answers["/api/v1/pods"] = pods(pod("train-0", "fd00::7"))
    resolver = KubernetesClusterResolver({"worker": ["job-name=train"]}, 99, override_client=client)
    assert resolver.cluster_spec().as_dict() == {"worker": ["[fd00::7]:99"]}


def test_kubernetes_pods_are_tasks_in_the_order_of_their_names(service, client):
    """Fact 127."""
    service.answers["/api/v1/pods"] = pods(
        pod("train-10-x7x2p", "10.0.0.3"), pod("train-2-9kk4d", "10.0.0.12"), pod("train-0-qq1zb", "10.0.0.7")
    )
    resolver = KubernetesClusterResolver({"worker": ["job-name=train"]}, 99, override_client=client)
    assert resolver.cluster_spec().as_dict() == {"worker": ["10.0.0.7:99", "10.0.0.12:99", "10.0.0.3:99"]}
    assert service.asked == [("GET", "/api/v1/pods", {"labelSelector": "job-name=train"}, None)]
    assert (resolver.task_type, resolver.task_id, resolver.master()) == (None, None, "")
    assert resolver.master("worker", 1) == "grpc://10.0.0.12:99"
    resolver.task_type, resolver.task_id = "worker", 2
    assert resolver.master() == "grpc://10.0.0.3:99"
    assert len(service.asked) == 3  # anew each time


def test_kubernetes_pods_that_do_not_run_are_named(service, client):
    """Fact 127."""
    service.answers["/api/v1/pods"] = pods(pod("train-0", "10.0.0.7"), pod("train-1", None, "Pending"))
    resolver = KubernetesClusterResolver(override_client=client)
    with pytest.raises(RuntimeError, match='^Pod "train-1" is not running; phase: "Pending"$'):
        resolver.cluster_spec()
    report = resolver.explain()
    assert "2 pods with the label job-name=tensorflow: train-0 (Running) and train-1 (Pending)" in report.found
    assert 'cluster_spec() raised RuntimeError: Pod "train-1" is not running; phase: "Pending"' in report.contradictions


def test_kubernetes_pods_are_found_by_an_account_that_sees_its_own_namespace_alone(service, client, monkeypatch):
    service.answers["/api/v1/pods"] = FORBIDDEN
    service.answers["/api/v1/namespaces/default/pods"] = pods(pod("train-0", "10.0.0.7"))
    resolver = KubernetesClusterResolver(override_client=client)
    with pytest.raises(kubernetes.client.ApiException, match="pods is forbidden"):
        resolver.cluster_spec()
    monkeypatch.setenv("POD_NAMESPACE", "default")
    assert resolver.cluster_spec().as_dict() == {"worker": ["10.0.0.7:8470"]}
    assert service.asked[-1] == (
        "GET",
        "/api/v1/namespaces/default/pods",
        {"labelSelector": "job-name=tensorflow"},
        None,
    )


def test_kubernetes_reports_what_it_found(service, client, monkeypatch):
    service.answers["/api/v1/pods"] = pods(
        pod("train-0-aaaaa", "10.0.0.7", index="0"),
        pod("train-1-bbbbb", "10.0.0.8", index="1"),
        pod("train-1-ccccc", "10.0.0.9", index="1"),
    )
    resolver = KubernetesClusterResolver({"worker": ["job-name=train"]}, override_client=client)
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
    report = resolver.explain()
    assert report.found[0] == f"Kubernetes, by the client that was given, at http://{service.host}"
    assert "JOB_COMPLETION_INDEX=1 in the environment: the task_id to set in an indexed Job" in report.found
    assert "train-1-bbbbb and train-1-ccccc claim one index, worker 1" in report.contradictions
    assert "which task this process is: task_type and task_id" in report.missing
    resolver.task_type, resolver.task_id = "worker", 0
    assert "JOB_COMPLETION_INDEX is 1, but task_id was set to 0" in resolver.explain().contradictions
    service.answers["/api/v1/pods"] = pods()
    assert "pods with the label job-name=train, for the job 'worker'" in resolver.explain().missing
    service.answers["/api/v1/pods"] = FORBIDDEN
    assert any("pods is forbidden" in text for text in resolver.explain().contradictions)


def test_kubernetes_outside_of_the_cluster_reads_the_kubeconfig_file(service, run_python, tmp_path):
    service.answers["/api/v1/pods"] = pods(pod("train-0", "10.0.0.7"))
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "clusters": [{"name": "here", "cluster": {"server": f"http://{service.host}"}}],
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
        "users": [{"name": "me", "user": {}}],
    }
    (tmp_path / "kubeconfig").write_text(json.dumps(config))
    done = run_python(
        """
        import replicax as rx
        from replicax.cluster_resolver import KubernetesClusterResolver, KubernetesExecutableLocation
        resolver = KubernetesClusterResolver(executable_location=KubernetesExecutableLocation.OFF_CLUSTER)
        print(resolver.cluster_spec())
        print(resolver.explain().found[0])
        """,
        env={"KUBECONFIG": str(tmp_path / "kubeconfig")},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "ClusterSpec({'worker': ['10.0.0.7:8470']})",
        f"Kubernetes, by the kubeconfig file, at http://{service.host}",
    ]


def test_kubernetes_inside_of_the_cluster_reads_the_account_of_the_pod(monkeypatch, tmp_path):
    from kubernetes.config import incluster_config

    for name in ("token", "ca.crt"):
        (tmp_path / name).write_text("secret")
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(tmp_path / "ca.crt"))
    with pytest.raises(kubernetes.config.ConfigException) as caught:
        KubernetesClusterResolver()
    assert caught.value.__notes__[0].startswith("The program does not run in a pod that has a service account.")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    configuration = KubernetesClusterResolver()._client.api_client.configuration
    assert configuration.host == "https://10.96.0.1:443"
    (token,) = [setting["value"] for setting in configuration.auth_settings().values()]
    assert token == "bearer secret"


def test_kubernetes_needs_its_library_or_a_client(monkeypatch):
    """Fact 127."""
    assert [place.value for place in KubernetesExecutableLocation] == [0, 1]
    with pytest.raises(ValueError, match="must be one of KubernetesExecutableLocation; got 'here'"):
        KubernetesClusterResolver(executable_location="here")
    monkeypatch.setitem(__import__("sys").modules, "kubernetes", None)
    with pytest.raises(ImportError, match="^The Kubernetes Python client must be installed before using"):
        KubernetesClusterResolver()
    KubernetesClusterResolver(executable_location="here", override_client=object())


# Google Compute Engine


def group_page(*names, token=None):
    """An answer of instanceGroups.listInstances."""
    where = "https://www.googleapis.com/compute/v1/projects/p/zones/z"
    page = {
        "id": "projects/p/zones/z/instanceGroups/g",
        "kind": "compute#instanceGroupsListInstances",
        "items": [{"instance": f"{where}/instances/{name}", "status": "RUNNING"} for name in names],
        "selfLink": f"{where}/instanceGroups/g/listInstances",
    }
    return 200, {**page, **({"nextPageToken": token} if token else {})}


def instance(name, ip):
    """An answer of instances.get, cut."""
    return 200, {
        "kind": "compute#instance",
        "id": "6181024857912345678",
        "name": name,
        "status": "RUNNING",
        "zone": "https://www.googleapis.com/compute/v1/projects/p/zones/z",
        "networkInterfaces": [
            {
                "kind": "compute#networkInterface",
                "name": "nic0",
                "networkIP": ip,
                "accessConfigs": [{"kind": "compute#accessConfig", "type": "ONE_TO_ONE_NAT", "natIP": "203.0.113.7"}],
            }
        ],
    }


@pytest.fixture
def compute(service):
    anonymous = google.auth.credentials.AnonymousCredentials()
    options = {"api_endpoint": f"http://{service.host}/compute/v1/"}
    with googleapiclient.discovery.build("compute", "v1", credentials=anonymous, client_options=options) as compute:
        yield compute


def test_gce_instances_of_a_group_are_tasks(service, compute):
    where = "/compute/v1/projects/p/zones/z"
    service.answers[f"{where}/instanceGroups/g/listInstances"] = group_page("b", "c", token="more")
    service.answers[f"{where}/instanceGroups/g/listInstances?pageToken=more"] = group_page("a")
    for name, ip in (("a", "10.0.0.4"), ("b", "10.0.0.2"), ("c", "10.0.0.3")):
        service.answers[f"{where}/instances/{name}"] = instance(name, ip)
    resolver = GCEClusterResolver("p", "z", "g", 8470, task_id=1, service=compute)
    assert resolver.cluster_spec().as_dict() == {"worker": ["10.0.0.2:8470", "10.0.0.3:8470", "10.0.0.4:8470"]}
    method, path, query, body = service.asked[0]
    assert (method, path) == ("POST", f"{where}/instanceGroups/g/listInstances")
    assert (query["orderBy"], body) == ("name", {"instanceState": "RUNNING"})
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 1, "grpc")
    assert resolver.master() == "grpc://10.0.0.3:8470"
    assert resolver.master(task_id=0, rpc_layer="x") == "x://10.0.0.2:8470"
    resolver.task_id = 2
    assert resolver.master() == "grpc://10.0.0.4:8470"
    with pytest.raises(RuntimeError, match="The task_type of a GCEClusterResolver, here 'worker', is given when"):
        resolver.task_type = "ps"
    found = "Google Compute Engine: project 'p', zone 'z', instance group 'g'"
    assert found in resolver.explain().found


def test_gce_groups_may_be_empty_or_absent(service, compute):
    path = "/compute/v1/projects/p/zones/z/instanceGroups/g/listInstances"
    _, page = group_page()
    service.answers[path] = (200, {key: value for key, value in page.items() if key != "items"})
    resolver = GCEClusterResolver("p", "z", "g", 8470, service=compute)
    assert resolver.cluster_spec().as_dict() == {"worker": {}}
    service.answers.clear()
    (text,) = resolver.explain().contradictions
    assert text.startswith("cluster_spec() raised HttpError") and f"no {path}" in text


def test_gce_needs_its_library_or_a_service(monkeypatch):
    """Fact 128."""
    monkeypatch.setitem(__import__("sys").modules, "googleapiclient", None)
    message = "googleapiclient must be installed before using the GCE cluster resolver"
    with pytest.raises(ImportError) as raised:
        GCEClusterResolver("p", "z", "g", 80)
    assert str(raised.value) == message
    assert raised.value.__notes__ == ["Install it: pip install google-api-python-client (replicax's extra 'gce')"]
    GCEClusterResolver("p", "z", "g", 80, service=object())


# Cloud TPU

NODE = {
    "name": "projects/p/locations/us-central2-b/nodes/mine",
    "acceleratorType": "v4-16",
    "state": "READY",
    "health": "HEALTHY",
    "runtimeVersion": "tpu-ubuntu2204-base",
    "createTime": "2026-07-01T09:00:00.123456789Z",
    "networkConfig": {"network": "projects/p/global/networks/default", "enableExternalIps": True},
    "networkEndpoints": [
        {"ipAddress": "10.130.0.9", "port": 8470, "accessConfig": {"externalIp": "203.0.113.8"}},
        {"ipAddress": "10.130.0.10", "port": 8470, "accessConfig": {"externalIp": "203.0.113.9"}},
    ],
    "schedulingConfig": {},
    "acceleratorConfig": {"type": "V4", "topology": "2x2x2"},
    "apiVersion": "V2",
}
NODE_PATH = "/v2/projects/p/locations/us-central2-b/nodes/mine"


@pytest.fixture
def tpu_api(service):
    anonymous = google.auth.credentials.AnonymousCredentials()
    options = {"api_endpoint": f"http://{service.host}/"}
    with googleapiclient.discovery.build("tpu", "v2", credentials=anonymous, client_options=options) as api:
        yield api


def test_a_named_tpu_is_looked_up_in_the_cloud(service, tpu_api):
    service.answers[NODE_PATH] = (200, NODE)
    resolver = TPUClusterResolver("mine", "us-central2-b", "p", job_name="tpu", service=tpu_api)
    assert not service.asked
    assert resolver.cluster_spec().as_dict() == {"tpu": ["10.130.0.9:8470", "10.130.0.10:8470"]}
    assert resolver.master() == resolver.get_master() == "grpc://10.130.0.9:8470"
    assert resolver.master("tpu", 1) == "grpc://10.130.0.10:8470"
    assert (resolver.get_job_name(), resolver.task_type, resolver.task_id) == ("tpu", "tpu", 0)
    assert resolver.get_coordination_service_leader() == "/job:tpu/task:0"
    report = resolver.explain()
    assert "TPU 'mine', from the argument `tpu`" in report.found
    assert "Cloud TPU service: acceleratorType v4-16, state READY, health HEALTHY" in report.found


def test_a_tpu_that_is_not_there_not_ready_or_not_healthy_is_reported(service, tpu_api):
    resolver = TPUClusterResolver("mine", "us-central2-b", "p", service=tpu_api)
    with pytest.raises(ValueError, match=r"does not tell about projects/p/locations/us-central2-b/nodes/mine\. Check"):
        resolver.cluster_spec()
    service.answers[NODE_PATH] = (200, {**NODE, "state": "CREATING"})
    with pytest.raises(RuntimeError, match='^TPU "mine" is not ready; its state is "CREATING".$'):
        resolver.cluster_spec()
    detail = {"health": "UNHEALTHY_MAINTENANCE", "healthDescription": "The TPU had a maintenance event."}
    service.answers[NODE_PATH] = (200, {**NODE, **detail})
    text = "the TPU is not healthy: UNHEALTHY_MAINTENANCE The TPU had a maintenance event."
    assert text in resolver.explain().contradictions


def test_a_tpu_of_which_only_the_name_is_known(service, monkeypatch):
    """Zone and project come from the metadata server, the service from its description."""
    documents = importlib.resources.files("googleapiclient.discovery_cache") / "documents"
    description = json.loads((documents / "tpu.v2.json").read_text(encoding="utf-8"))
    service.answers["/discovery/tpu/v2"] = (200, {**description, "rootUrl": f"http://{service.host}/"})
    service.answers["/computeMetadata/v1/project/project-id"] = (200, "p")
    service.answers["/computeMetadata/v1/instance/zone"] = (200, "projects/123456/zones/us-central2-b")
    service.answers[NODE_PATH] = (200, {key: NODE[key] for key in ("name", "state")} | {"ipAddress": "10.0.0.5"})
    monkeypatch.setenv("GCE_METADATA_HOST", service.host)
    monkeypatch.setenv("TPU_NAME", "mine")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # never for metadata
    resolver = TPUClusterResolver(
        "",
        credentials=google.auth.credentials.AnonymousCredentials(),
        discovery_url=f"http://{service.host}/discovery/{{api}}/{{apiVersion}}",
    )
    monkeypatch.delenv("http_proxy")
    assert resolver.cluster_spec().as_dict() == {"worker": ["10.0.0.5:8470"]}
    assert "TPU 'mine', from TPU_NAME in the environment" in resolver.explain().found
    resolver._service.close()


@pytest.mark.parametrize(
    "environment, addresses, own",
    [
        ({"KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS": "grpc://a:1,grpc://b"}, ["a:1", "b:8470"], 0),
        ({"TPU_WORKER_HOSTNAMES": "t-w0,t-w1", "TPU_WORKER_ID": "1"}, ["t-w0:8482", "t-w1:8482"], 1),
        ({"TPU_PROCESS_ADDRESSES": "t-w0:8476,t-w1:8476", "TPU_WORKER_ID": "0"}, ["t-w0:8482", "t-w1:8482"], 0),
    ],
)
def test_a_tpu_in_the_environment(environment, addresses, own, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    resolver = TPUClusterResolver()
    assert resolver.cluster_spec().as_dict() == {"worker": addresses}
    assert (resolver.task_type, resolver.task_id, resolver.master()) == ("worker", own, f"grpc://{addresses[own]}")
    assert any(next(iter(environment)) in text for text in resolver.explain().found)


@pytest.mark.parametrize(
    "endpoints",
    ["t-w0,t-w1", "unknown:unknown:t-w0,f00d:1:t-w1"],
)
def test_a_tpu_vm_knows_its_slice_from_the_metadata_server(endpoints, service, monkeypatch):
    monkeypatch.setenv("GCE_METADATA_HOST", service.host)
    with pytest.raises(ValueError, match="^Please provide a TPU Name to connect to. .The metadata has none: .*404"):
        TPUClusterResolver()
    service.answers["/computeMetadata/v1/instance/attributes/worker-network-endpoints"] = (200, endpoints)
    service.answers["/computeMetadata/v1/instance/attributes/agent-worker-number"] = (200, "1\n")
    resolver = TPUClusterResolver("")
    assert resolver.cluster_spec().as_dict() == {"worker": ["t-w0:8482", "t-w1:8482"]}
    assert resolver.task_id == 1


@pytest.mark.parametrize(
    "tpu, environment, addresses, own",
    [
        ("", {"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "1"}, ["a:8482", "b:8482"], 1),
        ("", {"TPU_PROCESS_ADDRESSES": "a:8476,a:8477", "TPU_WORKER_ID": "0"}, ["a:8482", "a:8483"], 0),
        ("mine", {"TPU_WORKER_ID": "1", "REPLICAX_TPU_PORT": "99"}, ["10.130.0.9:99", "10.130.0.10:99"], 1),
        ("grpc://a:8470,grpc://[::1]:1", {"TPU_WORKER_ID": "0"}, ["a:8482", "[::1]:8482"], 0),
        ("grpc://a:8470,grpc://b:1", {}, None, None),
        ("local", {"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "1"}, None, 0),
        ("", {"TPU_WORKER_HOSTNAMES": "a", "TPU_WORKER_ID": "0"}, None, None),
    ],
)
def test_the_machines_of_a_slice_are_joined(tpu, environment, addresses, own, service, tpu_api, monkeypatch):
    """Where it is known which of them this is. What follows is in tests/tf/test_tpu_hosts.py."""
    service.answers[NODE_PATH] = (200, NODE)
    joined = []
    monkeypatch.setattr(TPUClusterResolver, "_join", lambda self, *job: joined.append(job))
    monkeypatch.setattr(devices, "_task", devices._task)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    resolver = TPUClusterResolver(tpu, "us-central2-b", "p", service=tpu_api)
    rx.config.experimental_connect_to_cluster(resolver)
    assert joined == ([([("worker", 0), ("worker", 1)], addresses, own)] if addresses else [])
    assert resolver.task_id == (own or 0)


def test_a_machine_outside_of_a_slice_is_not_joined(service, tpu_api, monkeypatch):
    service.answers[NODE_PATH] = (200, NODE)
    monkeypatch.setenv("GCE_METADATA_HOST", service.host)  # which has no agent-worker-number
    resolver = TPUClusterResolver("mine", "us-central2-b", "p", service=tpu_api)
    rx.config.experimental_connect_to_cluster(resolver)
    service.answers["/computeMetadata/v1/instance/attributes/agent-worker-number"] = (200, "2")
    with pytest.raises(ValueError, match="the metadata of this machine do not fit together: worker '2' of the 2 hosts"):
        rx.config.experimental_connect_to_cluster(resolver)
    monkeypatch.setenv("REPLICAX_TPU_PORT", "http")
    monkeypatch.setenv("TPU_WORKER_ID", "1")
    with pytest.raises(ValueError, match="REPLICAX_TPU_PORT is the number of a port; got 'http'"):
        rx.config.experimental_connect_to_cluster(resolver)


def test_wrong_tpu_arguments_are_refused(monkeypatch):
    from replicax._cluster import gce as google_cloud

    monkeypatch.setattr(google_cloud, "_PRODUCT_FILE", google_cloud.Path("/nowhere"))
    with pytest.raises(ValueError, match="^Please provide a TPU Name to connect to.$"):
        TPUClusterResolver()
    with pytest.raises(NotImplementedError, match="One TPU can be used at a time; got 2: a, b"):
        TPUClusterResolver(["a", "b"])
    with pytest.raises(ValueError, match="One TPU can be used at a time; got 0"):
        TPUClusterResolver([])
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "a,b")
    monkeypatch.setenv("TPU_WORKER_ID", "2")
    with pytest.raises(ValueError, match="do not fit together: worker '2' of the 2 hosts a,b"):
        TPUClusterResolver()


def test_local_tpus_are_no_cluster(monkeypatch):
    """Fact 128."""
    resolver = TPUClusterResolver("local")
    assert not resolver.cluster_spec()
    assert (resolver.master(), resolver.task_type, resolver.task_id, resolver.environment) == ("", "worker", 0, "")
    assert resolver.num_accelerators() == {"TPU": 0}
    assert resolver.get_tpu_system_metadata() == TPUSystemMetadata(0, 1, 0, None, ())
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "a,b")
    (text,) = resolver.explain().contradictions
    assert text.startswith("the TPU was given as 'local', but its slice has 2 machines (TPU_WORKER_HOSTNAMES=a,b)")


def test_a_tpu_cluster_may_have_a_coordinator():
    given = TPUClusterResolver("grpc://10.1.2.3:8470", coordinator_name="chief", coordinator_address="c:1")
    assert given.cluster_spec().as_dict() == {"worker": ["10.1.2.3:8470"], "chief": ["c:1"]}
    chosen = TPUClusterResolver("grpc://127.0.0.1:8470", coordinator_name="chief")
    host, port = chosen.cluster_spec().task_address("chief", 0).split(":")
    assert host == "127.0.0.1" and 1024 <= int(port) < 65536


def test_a_topology_tells_of_no_hardware_for_embeddings():
    resolver = TPUClusterResolver("local")
    assert resolver.tpu_hardware_feature is None
    resolver.set_tpu_topology(b"{}")
    assert resolver.tpu_hardware_feature.embedding_feature == 0


def test_connect_without_a_tpu_is_an_error(run_python):
    with pytest.raises(rx.DeviceError, match=r"There is no TPU here. This process has: GPU:0, .*VIRTUAL_DEVICES=TPU:8"):
        TPUClusterResolver.connect("local")
    done = run_python(
        """
        import replicax as rx
        resolver = rx.cluster_resolver.TPUClusterResolver.connect("local")
        metadata = resolver.get_tpu_system_metadata()
        print(resolver.num_accelerators(), metadata.num_cores, metadata.num_hosts, metadata.devices[-1])
        """,
        env={"REPLICAX_VIRTUAL_DEVICES": "TPU:4"},
    )
    assert done.stdout == "{'TPU': 4} 4 1 /job:localhost/replica:0/task:0/device:TPU:3\n", done.stderr


# Notices that a machine is to end soon


INSTANCE = "/computeMetadata/v1/instance"
MAINTENANCE = "TERMINATE_ON_HOST_MAINTENANCE"


@pytest.mark.parametrize(
    "event, preempted, platform, given, expected",
    [
        ("NONE", "FALSE", "gpu", None, None),
        ("MIGRATE_ON_HOST_MAINTENANCE", "FALSE", "gpu", None, None),
        (MAINTENANCE, "FALSE", "cpu", None, ("ends for maintenance", None)),
        (MAINTENANCE, "FALSE", "gpu", None, ("ends for maintenance", 3600.0)),
        (MAINTENANCE, "FALSE", "gpu", 600.0, ("ends for maintenance", 600.0)),
        ("NONE", "TRUE", "gpu", None, ("preempts", None)),
        (MAINTENANCE, "TRUE", "gpu", 600.0, ("preempts", 600.0)),
    ],
)
def test_the_metadata_server_announces_the_end_of_a_machine(
    event, preempted, platform, given, expected, service, monkeypatch
):
    """Answers as in Google's documentation of `maintenance-event` and `preempted`."""
    service.answers[f"{INSTANCE}/maintenance-event"] = (200, event)
    service.answers[f"{INSTANCE}/preempted"] = (200, preempted)
    monkeypatch.setenv("GCE_METADATA_HOST", service.host)
    monkeypatch.setattr(jax, "local_devices", lambda: [mock.Mock(platform=platform)])
    notice = preemption.google_notice(given)
    assert (notice is None) == (expected is None)
    if expected is not None:
        assert notice.what == f"is on a machine that Google Cloud {expected[0]}" and notice.grace == expected[1]


def test_a_metadata_server_that_does_not_answer_has_announced_nothing(service, monkeypatch):
    monkeypatch.setenv("GCE_METADATA_HOST", service.host)
    assert preemption.google_notice() is None  # 404
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:9")
    assert preemption.google_notice() is None


def test_a_machine_that_google_cloud_preempts_saves_and_ends_with_143(service, monkeypatch, tmp_path):
    service.answers[f"{INSTANCE}/maintenance-event"] = (200, "NONE")
    service.answers[f"{INSTANCE}/preempted"] = (200, "FALSE")
    monkeypatch.setenv("GCE_METADATA_HOST", service.host)
    monkeypatch.setattr(notices, "_INTERVAL", 0.01)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the handler stays out of the tests' own signals
    watcher, steps = rx.experimental.PreemptionWatcher(), rx.Variable(0)
    handler = rx.experimental.PreemptionCheckpointHandler(None, rx.train.Checkpoint(steps=steps), tmp_path)
    handler.run(steps.assign_add, 1)
    service.answers[f"{INSTANCE}/preempted"] = (200, "TRUE")
    with pytest.raises(SystemExit) as ended:
        while True:
            handler.run(steps.assign_add, 1)
    assert ended.value.code == 143 and handler.total_run_calls == int(steps)
    assert watcher.preemption_message == "this process is on a machine that Google Cloud preempts"


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nFAL",
        b"rubbish\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n\xff",
    ],
    ids=["cut off", "no HTTP", "no text"],
)
def test_an_answer_that_is_damaged_has_announced_nothing(answer, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{server.getsockname()[1]}")

        def serve():
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        assert preemption.google_notice() is None
        thread.join()
