"""`resolver.explain()`: what was found where, what is missing and what contradicts, whatever happens."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from unittest import mock

import pytest

import replicax as rx
from replicax._cluster import explain
from replicax.cluster_resolver import ClusterResolver, SimpleClusterResolver, TFConfigClusterResolver, UnionResolver

NO_ADDRESS = "192.0.2.7"  # of a block that is kept for documents


@pytest.fixture(autouse=True)
def nothing_around():
    with mock.patch.dict(os.environ):  # which resolvers may set, as CUDA_VISIBLE_DEVICES
        os.environ.pop("TF_CONFIG", None)
        yield


@pytest.fixture
def free_port():
    with socket.socket() as listener:
        listener.bind(("", 0))
        port = listener.getsockname()[1]
    return port


def report_of(cluster, task_type=None, task_id=None):
    return SimpleClusterResolver(rx.ClusterSpec(cluster), task_type=task_type, task_id=task_id).explain()


def the_one(entries, part):
    """The only one of the entries with that part."""
    found = [entry for entry in entries if part in entry]
    assert len(found) == 1, f"{part!r} is in {len(found)} of {entries}"
    return found[0]


def test_a_cluster_that_is_right_is_reported_as_such(free_port, monkeypatch):
    config = {"cluster": {"worker": [f"localhost:{free_port}"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    report = TFConfigClusterResolver().explain()
    assert report.ok
    assert str(report) == repr(report)
    assert str(report) == "\n".join(
        [
            "TFConfigClusterResolver",
            "  found",
            f"    TF_CONFIG in the environment, {len(json.dumps(config))} characters",
            f"    cluster: worker 0 at localhost:{free_port}",
            "    this process: worker 0",
            "  missing",
            "    nothing",
            "  contradicts",
            "    nothing",
        ]
    )


def test_long_reports_are_folded_and_large_clusters_cut():
    report = report_of({"worker": [f"{NO_ADDRESS}:{port}" for port in range(1000, 1100)]})
    assert max(map(len, str(report).splitlines())) <= 116
    assert f"... and worker 99 at {NO_ADDRESS}:1099" in the_one(report.found, "cluster:")
    assert "worker 50 at" not in str(report)


# What is missing


def test_explain_lists_what_is_missing():
    assert report_of({}).missing == ["a cluster: without one, this process works alone"]
    assert report_of({"worker": ["a.invalid:1", "b.invalid:1"]}).missing == [
        "which task this process is: task_type and task_id"
    ]
    assert report_of({"worker": ["localhost:1"]}, "worker").missing == ["task_id: the other half, 'worker', is there"]
    assert report_of({"worker": ["localhost:1"]}, None, 3).missing == ["task_type: the other half, 3, is there"]


def test_incomplete_tf_config_is_reported(monkeypatch):
    example = 'it looks like {"cluster": {"worker": ["a:2222", "b:2222"]}, "task": {"type": "worker", "index": 0}}'
    assert f"TF_CONFIG is not set; {example}" in TFConfigClusterResolver().explain().missing
    monkeypatch.setenv("TF_CONFIG", "")
    assert f"TF_CONFIG is empty; {example}" in TFConfigClusterResolver().explain().missing
    monkeypatch.setenv("TF_CONFIG", '{"clusters": {"worker": ["a:1"]}}')
    report = TFConfigClusterResolver().explain()
    assert [text.partition(";")[0] for text in report.missing[:2]] == ["'cluster' in TF_CONFIG", "'task' in TF_CONFIG"]
    assert "TF_CONFIG: nobody reads its key 'clusters'; known are 'cluster' and 'task'" in report.contradictions


# What contradicts


@pytest.mark.parametrize(
    "text, place",
    [
        ("{'cluster': {}}", "line 1 column 2: {>>>'cluster': {}}; JSON needs double quotes"),
        ('{"cluster": {"worker": ["a:1",]}}', "comma...]}}"),  # the words and the column differ between Pythons
        ("{cluster: {worker: [a:1]}}", "line 1 column 2: {>>>cluster: {worker: [a:1]}}; were the quotes taken by"),
        ('{"cluster": {}', "line 1 column 15: {...>>>; it ends too early"),
        ('{"cluster": {},\n "task": 1 2}', 'line 2 column 12:  "task": 1 >>>2}'),
        ("\n", "line 2 column 1: >>>"),
    ],
)
def test_tf_config_that_is_not_json_is_shown_where_it_breaks(text, place, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", text)
    found = the_one(TFConfigClusterResolver().explain().contradictions, "TF_CONFIG is not JSON: ")
    before, _, after = place.partition("...")
    assert before in found and after in found


def test_one_index_that_is_claimed_twice_in_tf_config(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": {"0": "a:1", "0": "b:1"}}, "task": {}, "task": {}}')
    contradictions = TFConfigClusterResolver().explain().contradictions
    the_one(contradictions, "TF_CONFIG: two addresses claim one index: the key '0' stands twice in one object")
    the_one(contradictions, "TF_CONFIG: the key 'task' stands twice in one object; the last one counts")


def test_explain_reports_arguments_used_in_place_of_tf_config(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}')
    found = TFConfigClusterResolver(task_id=1, task_type="worker").explain().found
    assert "task_id: 1, given to the resolver, in place of 0 in TF_CONFIG" in found
    assert "task_type: 'worker', given to the resolver" in found


def test_tasks_that_are_not_in_the_cluster():
    two = {"worker": ["localhost:1", "localhost:2"]}
    text = "this process is worker 2, but there is no task 2 in job 'worker', whose tasks are 0 and 1"
    assert text in report_of(two, "worker", 2).contradictions
    text = "this process is of job 'ps', but the cluster has the jobs 'worker' alone"
    assert text in report_of(two, "ps", 0).contradictions
    assert report_of(two, "evaluator", 0).ok  # it watches a cluster and is not part of it
    the_one(report_of(two, "worker", "1").contradictions, "there is no task '1' in job 'worker'")


@pytest.mark.parametrize(
    "address",
    ["localhost", "localhost:", "localhost:http", "localhost:0", "localhost:65536", ":2222", "::1",
     "grpc://localhost:1", "local host:1", "a/b:1"],
)  # fmt: skip
def test_wrong_addresses_are_refused(address):
    text = the_one(report_of({"worker": [address]}).contradictions, "the address of worker 0")
    assert text.startswith("the address of worker 0 is none: An address reads HOST:PORT") and repr(address) in text


@pytest.mark.parametrize("address", ["localhost:1024", "127.0.0.1:1024", "[::1]:1024"])
def test_right_addresses_are_accepted(address):
    assert report_of({"worker": [address]}).ok


def test_one_address_that_is_claimed_twice():
    report = report_of({"worker": ["localhost:1", "localhost:2", "localhost:1"], "ps": ["localhost:1"]})
    assert report.contradictions == ["worker 0, worker 2 and ps 0 claim one address, localhost:1"]


@pytest.mark.parametrize("loopback", ["localhost:2222", "127.0.0.1:2222", "127.0.1.1:2222", "[::1]:2222"])
def test_localhost_on_a_cluster_of_several_hosts(loopback):
    text = the_one(report_of({"worker": [loopback, f"{NO_ADDRESS}:1"]}).contradictions, "localhost means each machine")
    assert text.startswith(f"worker 0 ({loopback}): localhost") and f"worker 1 ({NO_ADDRESS}:1)" in text
    alone = report_of({"worker": [loopback, "localhost:1"]})
    assert "hosts: all tasks are on this machine (localhost)" in alone.found
    assert not alone.contradictions


def test_explain_reports_an_address_that_others_cannot_reach():
    text = "the address of worker 0, 0.0.0.0:2222, is one to listen at; others cannot reach it. Give the machine's own"
    assert text in report_of({"worker": ["0.0.0.0:2222"]}).contradictions


def test_hosts_that_cannot_be_resolved():
    text = the_one(report_of({"worker": ["nobody.invalid:1"]}, "worker", 0).contradictions, "nobody.invalid")
    assert text.startswith("the host 'nobody.invalid' cannot be resolved on this machine (")


def test_a_task_whose_address_is_another_machine():
    cluster = {"worker": [f"{NO_ADDRESS}:1", f"{socket.gethostname()}:2", "localhost:3"]}
    text = the_one(report_of(cluster, "worker", 0).contradictions, "none of this machine's")
    assert text.startswith(f"this process is worker 0, whose host {NO_ADDRESS} is none of this machine's (")
    assert ", while worker 1 and worker 2 would be here." in text
    assert not [t for t in report_of(cluster, "worker", 1).contradictions if "none of this machine's" in t]


LISTEN = """
import socket, sys
with socket.socket() as listener:
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    print(listener.getsockname()[1], flush=True)
    sys.stdin.read()
"""


def test_a_port_that_another_program_holds():
    command = [sys.executable, "-c", LISTEN]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        port = int(other.stdout.readline())
        report = report_of({"worker": [f"localhost:{port}"]}, "worker", 0)
        elsewhere = report_of({"worker": [f"localhost:{port}", "localhost:1"]}, "worker", 1)
        other.stdin.close()
    text = the_one(report.contradictions, "the address of this process")
    assert text.startswith(f"the address of this process, localhost:{port}: port {port} cannot be opened (Address")
    assert f"port {port}" not in str(elsewhere.contradictions)  # another task's, which may well run already


def test_explain_of_a_union_reports_each_resolver(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["localhost:1"]}, "task": {"type": "worker", "index": 1}}')
    report = UnionResolver(TFConfigClusterResolver(), SimpleClusterResolver(rx.ClusterSpec({})), task_id=0).explain()
    assert report.found[0] == "a union of TFConfigClusterResolver and SimpleClusterResolver"
    the_one(report.found, "TF_CONFIG in the environment")
    the_one(report.contradictions, "task_id was set to 0, but the first resolver's 1 holds, as in TensorFlow")


# Whatever happens


class Odd(ClusterResolver):
    """A resolver that does what it is told."""

    def __init__(self, cluster_spec=lambda: rx.ClusterSpec({}), task=lambda: None):
        self._asked, self._task = cluster_spec, task

    def cluster_spec(self):
        return self._asked()

    def master(self, task_type=None, task_id=None, rpc_layer=None):
        return ""

    @property
    def task_type(self):
        return self._task()

    @property
    def task_id(self):
        return self._task()


def raises(error):
    raise error


@pytest.mark.parametrize(
    "resolver, text",
    [
        (Odd(lambda: raises(ValueError("no server"))), "cluster_spec() raised ValueError: no server"),
        (Odd(lambda: raises(SystemExit(3))), "cluster_spec() raised SystemExit: 3"),
        (Odd(lambda: None), "cluster_spec() returned a NoneType, not a ClusterSpec"),
        (Odd(lambda: {"worker": ["a:1"]}), "cluster_spec() returned a dict, not a ClusterSpec"),
        (Odd(task=lambda: raises(KeyError("x"))), "task_type and task_id raised KeyError: 'x'"),
        (Odd(lambda: rx.ClusterSpec({"worker": ["localhost:1"]}), lambda: []), "the explanation ended with TypeError"),
    ],
)
def test_explain_reports_errors_of_resolvers_without_raising(resolver, text):
    the_one(resolver.explain().contradictions, text)


def test_a_server_that_does_not_answer_is_reported(monkeypatch):
    monkeypatch.setattr(explain, "_ASK_SECONDS", 0.1)
    answered = threading.Event()
    try:
        report = Odd(answered.wait).explain()
    finally:
        answered.set()
    assert report.contradictions == ["cluster_spec() did not answer within 0.1 s"]


def test_a_name_server_that_does_not_answer_is_reported(monkeypatch):
    monkeypatch.setattr(explain, "_LOOK_UP_SECONDS", 0.1)
    answered = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: answered.wait() and [])
    try:
        report = report_of({"worker": ["a.example:1", "b.example:1"]}, "worker", 0)
    finally:
        answered.set()
    assert report.contradictions == [
        "the host 'a.example' was not resolved within 0.1 s",
        "the host 'b.example' was not resolved within 0.1 s",
    ]


def test_a_report_that_was_given_does_not_change(monkeypatch):
    """Also where the resolver answers after all."""
    monkeypatch.setattr(explain, "_ASK_SECONDS", 0.1)
    answered, told = threading.Event(), threading.Event()

    class Late(Odd):
        def _describe(self, report):
            report.found.append("early")
            answered.wait()
            report.found.append("late")
            told.set()

    try:
        report = Late().explain()
    finally:
        answered.set()
    assert told.wait(10)
    assert report.found == ["early"]
