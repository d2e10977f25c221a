"""ClusterSpec, and the resolvers that read the environment."""

from __future__ import annotations

import json
import os
from unittest import mock

import pytest

import replicax as rx
from replicax.cluster_resolver import (
    ClusterDef,
    ClusterResolver,
    JobDef,
    SageMakerClusterResolver,
    SimpleClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
    UnionResolver,
)

TWO = {"worker": ["a:1", "b:2"]}
OF_CLUSTERS = ("TF_CONFIG", "SLURM", "SM_", "CUDA_VISIBLE_DEVICES")


@pytest.fixture(autouse=True)
def no_cluster_around():
    with mock.patch.dict(os.environ):  # which resolvers may set, as CUDA_VISIBLE_DEVICES
        for name in [name for name in os.environ if name.startswith(OF_CLUSTERS)]:
            del os.environ[name]
        yield


@pytest.fixture
def tf_config(monkeypatch):
    """Sets TF_CONFIG to a text, or to an object as JSON."""
    return lambda value: monkeypatch.setenv("TF_CONFIG", value if isinstance(value, str) else json.dumps(value))


# ClusterSpec


def test_a_cluster_takes_lists_and_dicts_and_gives_back_what_it_took():
    """Fact 121."""
    cluster = rx.ClusterSpec({"worker": ["a:1", b"b:2"], "ps": {"3": "p:3"}})
    assert cluster.as_dict() == {"worker": ["a:1", "b:2"], "ps": {3: "p:3"}}
    assert cluster.jobs == ["worker", "ps"]
    assert (cluster.num_tasks("worker"), cluster.task_indices("ps")) == (2, [3])
    assert cluster.job_tasks("ps") == [None, None, None, "p:3"]
    assert repr(cluster) == "ClusterSpec({'ps': {3: 'p:3'}, 'worker': ['a:1', 'b:2']})"
    assert cluster and not rx.ClusterSpec({})
    for same in (rx.ClusterSpec(cluster), rx.ClusterSpec(cluster.as_dict()), rx.ClusterSpec(cluster.as_cluster_def())):
        assert same == cluster
    assert cluster != rx.ClusterSpec({})


def test_a_cluster_def_is_plain_data_that_can_be_written_by_hand():
    """Fact 121."""
    written = ClusterDef([JobDef("worker", {1: "b:2", 0: "a:1"}), JobDef("chief", {0: "c:1"})])
    assert rx.ClusterSpec(written).as_dict() == {"worker": ["a:1", "b:2"], "chief": ["c:1"]}
    given = rx.ClusterSpec(written).as_cluster_def()
    assert [job.name for job in given.job] == ["chief", "worker"]
    given.job[1].tasks[0] = "other:1"  # a copy
    assert rx.ClusterSpec(written).task_address("worker", 0) == "a:1"


@pytest.mark.parametrize(
    "cluster, kind, message",
    [
        (5, TypeError, "`cluster` must be a dictionary mapping one or more job names to lists"),
        ({"worker": "a:1"}, TypeError, "The tasks for job 'worker' must be a list or a dictionary"),
        ({"worker": [1, 2]}, TypeError, "Task address 1 must be bytes or unicode"),
        ({5: ["a:1"]}, TypeError, "Job name 5 must be bytes or unicode"),
        ({"worker": {"first": "a:1"}}, TypeError, "integers for indices; got 'first'"),
        ({"worker": {-1: "a:1"}}, ValueError, "numbered from 0; got the index -1"),
        ({"worker": {0: "a:1", "0": "b:1"}}, ValueError, "two addresses for task 0: 'a:1' and 'b:1'"),
    ],
)
def test_a_cluster_spec_refuses_wrong_descriptions(cluster, kind, message):
    """Fact 121."""
    with pytest.raises(kind, match=message):
        rx.ClusterSpec(cluster)


def test_a_cluster_spec_names_missing_jobs_and_tasks():
    """Fact 121."""
    cluster = rx.ClusterSpec(TWO)
    for ask in (cluster.num_tasks, cluster.task_indices, cluster.job_tasks, lambda job: cluster.task_address(job, 0)):
        with pytest.raises(ValueError, match="^No such job in cluster: 'chief'$"):
            ask("chief")
    with pytest.raises(ValueError, match="^No task with index 5 in job 'worker'$"):
        cluster.task_address("worker", 5)


# Resolvers that are told


def test_the_simple_resolver_returns_what_it_was_given():
    """Fact 122."""
    cluster = rx.ClusterSpec(TWO)
    resolver = SimpleClusterResolver(cluster, "m", "worker", 1, "e", {"GPU": 4}, "grpc")
    assert resolver.cluster_spec() is cluster
    assert (resolver.task_type, resolver.task_id, resolver.environment) == ("worker", 1, "e")
    assert resolver.num_accelerators("ps", 0) == {"GPU": 4}
    assert resolver.master() == resolver.master("worker") == "grpc://m"
    assert resolver.master("worker", 0, rpc_layer="x") == "x://a:1"
    resolver.task_type, resolver.task_id, resolver.rpc_layer = "ps", 0, None
    assert (resolver.task_type, resolver.task_id, resolver.master()) == ("ps", 0, "m")
    with pytest.raises(TypeError, match="cluster_spec must be a `tf.train.ClusterSpec`."):
        SimpleClusterResolver(TWO)
    with pytest.raises(TypeError, match="`master` must be a string; got a int"):
        SimpleClusterResolver(cluster, master=5)


def test_a_union_merges_clusters_and_delegates_the_rest_to_the_first_resolver():
    """Fact 125."""
    first = SimpleClusterResolver(rx.ClusterSpec(TWO), "m", "worker", 1, "one", {"GPU": 1}, "grpc")
    second = SimpleClusterResolver(rx.ClusterSpec({"ps": ["p:1"], "worker": ["b:2"]}), task_type="ps", task_id=0)
    union = UnionResolver(first, second)
    assert union.cluster_spec().as_dict() == {"worker": ["a:1", "b:2", "b:2"], "ps": ["p:1"]}
    assert (union.task_type, union.task_id, union.environment, union.rpc_layer) == ("worker", 1, "one", "grpc")
    assert (union.num_accelerators(), union.master(), union.master("ps", 0)) == ({"GPU": 1}, "grpc://m", "p:1")
    other = UnionResolver(first, second, rpc_layer="r", task_type="ps", task_id=2)
    assert (other.task_type, other.task_id, other.rpc_layer, other.master("ps", 0)) == ("ps", 2, "r", "r://p:1")
    assert UnionResolver(SimpleClusterResolver(rx.ClusterSpec(TWO)), task_id=0).task_id == 0
    with pytest.raises(ValueError, match="task_type, task_id and rpc_layer; got name too"):
        UnionResolver(first, name="x")


def test_a_union_merges_tasks_given_by_index_and_refuses_one_that_is_given_twice():
    """Fact 125."""
    sparse = SimpleClusterResolver(rx.ClusterSpec({"worker": {0: "a:1", 2: "c:3"}}))
    rest = SimpleClusterResolver(rx.ClusterSpec({"worker": {1: "b:2"}}))
    assert UnionResolver(sparse, rest).cluster_spec().as_dict() == {"worker": ["a:1", "b:2", "c:3"]}
    twice = UnionResolver(sparse, SimpleClusterResolver(rx.ClusterSpec(TWO)))
    with pytest.raises(KeyError, match=r"Duplicate keys detected when merging two ClusterSpecs: \{0\}"):
        twice.cluster_spec()
    assert any("Duplicate keys" in text for text in twice.explain().contradictions)


def test_a_resolver_of_ones_own_needs_two_methods():
    """Fact 129."""

    class Half(ClusterResolver):
        def cluster_spec(self):
            return rx.ClusterSpec(TWO)

    class Mine(Half):
        def master(self, task_type=None, task_id=None, rpc_layer=None):
            return "m"

    with pytest.raises(TypeError, match="abstract method '?master"):
        Half()
    resolver = Mine()
    assert (resolver.task_type, resolver.task_id, resolver.environment, resolver.rpc_layer) == (None, None, "", None)
    resolver.task_type, resolver.task_id = "worker", 0
    assert (resolver.task_type, resolver.task_id) == ("worker", 0)
    assert resolver.num_accelerators() == {"GPU": 8}  # the tests' virtual ones
    assert resolver.num_accelerators("worker", 1) == {}  # another process, of which nothing is known


# TF_CONFIG


@pytest.mark.parametrize("text", [None, "", "{}"])
def test_without_tf_config_there_is_no_cluster(text, tf_config):
    """Fact 123."""
    if text is not None:
        tf_config(text)
    resolver = TFConfigClusterResolver()
    assert not resolver.cluster_spec()
    assert (resolver.master(), resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("", None, None, None)
    assert resolver.environment is None


def test_tf_config_is_read_anew_each_time(tf_config):
    """Fact 124."""
    tf_config({"cluster": {**TWO, "ps": ["p:3"]}, "task": {"type": "worker", "index": 1}, "rpc_layer": "grpc"})
    resolver = TFConfigClusterResolver()
    assert (resolver.task_type, resolver.task_id, resolver.master()) == ("worker", 1, "grpc://b:2")
    assert resolver.master("ps", 0) == "grpc://p:3"
    tf_config({"cluster": {"worker": ["c:9"]}, "task": {"type": "worker", "index": "0"}})
    assert resolver.cluster_spec().as_dict() == {"worker": ["c:9"]}
    assert (resolver.task_id, resolver.master()) == (0, "")
    tf_config({"cluster": TWO})
    with pytest.raises(ValueError, match="^No such job in cluster: None$"):
        resolver.master()
    tf_config({"cluster": TWO, "session_master": "somewhere"})
    assert resolver.master() == "somewhere"


def test_arguments_take_precedence_over_tf_config(tf_config):
    """Fact 124."""
    tf_config({"cluster": {**TWO, "ps": ["p:3"]}, "task": {"type": "worker", "index": 1}, "rpc_layer": "grpc"})
    resolver = TFConfigClusterResolver(task_type="ps", task_id=0, rpc_layer="x", environment="y")
    assert (resolver.task_type, resolver.task_id, resolver.master()) == ("ps", 0, "x://p:3")
    assert resolver.environment == "y"
    resolver.task_type = "worker"
    resolver.rpc_layer = "z"
    assert resolver.master() == "z://a:1"


def test_wrong_tf_config_says_where_it_is_wrong(tf_config):
    """Fact 123."""
    tf_config('{"cluster": {"worker": ["a:1" "b:1"]}}')
    resolver = TFConfigClusterResolver()
    with pytest.raises(json.JSONDecodeError) as caught:
        resolver.cluster_spec()
    assert caught.value.__notes__ == [
        "The environment variable TF_CONFIG is not JSON. "
        """Expecting ',' delimiter, line 1 column 31: {"cluster": {"worker": ["a:1" >>>"b:1"]}}"""
    ]
    tf_config("[1]")
    with pytest.raises(ValueError, match=r"TF_CONFIG must be a JSON object such as .*; got \[1\]"):
        resolver.cluster_spec()
    tf_config({"task": "worker"})
    with pytest.raises(ValueError, match="\"task\" must be an object such as .*; got 'worker'"):
        print(resolver.task_type)


# SageMaker


def test_sagemaker_hosts_are_workers(monkeypatch):
    monkeypatch.setenv("SM_HOSTS", '["algo-2","algo-1"]')
    monkeypatch.setenv("SM_CURRENT_HOST", "algo-2")
    resolver = SageMakerClusterResolver(port=99, rpc_layer="grpc")
    assert resolver.cluster_spec().as_dict() == {"worker": ["algo-1:99", "algo-2:99"]}
    assert (resolver.task_type, resolver.task_id, resolver.master()) == ("worker", 1, "grpc://algo-2:99")
    monkeypatch.setenv("SM_HOSTS", '["fd00::1"]')
    monkeypatch.setenv("SM_CURRENT_HOST", "fd00::1")
    assert resolver.cluster_spec().as_dict() == {"worker": ["[fd00::1]:99"]}
    monkeypatch.setenv("SM_HOSTS", '["algo-2","algo-1"]')
    monkeypatch.setenv("SM_CURRENT_HOST", "algo-7")
    assert not resolver.cluster_spec()
    assert "the current host 'algo-7' is not among the hosts ['algo-1', 'algo-2']" in resolver.explain().contradictions


def test_sagemaker_is_found_by_its_file_too(monkeypatch, tmp_path):
    from replicax._cluster import environment

    file = tmp_path / "resourceconfig.json"
    monkeypatch.setattr(environment, "_SAGEMAKER_FILE", file)
    resolver = SageMakerClusterResolver()
    with pytest.raises(RuntimeError, match="SM_HOSTS and SM_CURRENT_HOST not found in environment, and there is no"):
        resolver.cluster_spec()
    # As SageMaker writes it.
    resources = {
        "current_host": "algo-1",
        "current_instance_type": "ml.p3.2xlarge",
        "current_group_name": "homogeneousCluster",
        "hosts": ["algo-1", "algo-2"],
        "instance_groups": [
            {
                "instance_group_name": "homogeneousCluster",
                "instance_type": "ml.p3.2xlarge",
                "hosts": ["algo-1", "algo-2"],
            }
        ],
        "network_interface_name": "eth0",
    }
    file.write_text(json.dumps(resources))
    assert (resolver.task_id, resolver.cluster_spec().num_tasks("worker")) == (0, 2)


# Slurm


@pytest.fixture
def step(monkeypatch):
    """Sets what `srun` sets for one task of a step, here rank 5 of 7 on the nodes n1, n2, n3 and m09."""

    def set_up(**changed):
        variables = {
            "SLURM_PROCID": "5",
            "SLURM_LOCALID": "0",
            "SLURM_STEP_NUM_TASKS": "7",
            "SLURM_STEP_NODELIST": "m09,n[1-3]",
            "SLURM_STEP_TASKS_PER_NODE": "1,2(x3)",
            **changed,
        }
        for name, value in variables.items():
            monkeypatch.setenv(name, value) if value is not None else monkeypatch.delenv(name, raising=False)

    return set_up


@pytest.mark.parametrize(
    "text, hosts",
    [
        ("n1", ["n1"]),
        ("n[1-3,7],m09", ["n1", "n2", "n3", "n7", "m09"]),
        ("gpu[098-101]", ["gpu098", "gpu099", "gpu100", "gpu101"]),
        ("rack[0-1]n[1-2]-ib", ["rack0n1-ib", "rack0n2-ib", "rack1n1-ib", "rack1n2-ib"]),
    ],
)
def test_slurm_lists_of_hosts(text, hosts):
    """Fact 126."""
    from replicax._cluster.slurm import expand_hosts

    assert expand_hosts(text) == hosts


@pytest.mark.parametrize("text", ["", "n[1-", "n[a]", "n1,,n2", "n]1[", "n[1-2]]"])
def test_wrong_slurm_host_lists_are_refused(text):
    from replicax._cluster.slurm import expand_hosts

    with pytest.raises(ValueError, match="A list of hosts looks like"):
        expand_hosts(text)


def test_a_slurm_step_is_a_cluster_of_workers(step):
    """Fact 126."""
    step(CUDA_VISIBLE_DEVICES="")
    resolver = SlurmClusterResolver()
    addresses = ["m09:8888", "n1:8888", "n1:8889", "n2:8888", "n2:8889", "n3:8888", "n3:8889"]
    assert resolver.cluster_spec().as_dict() == {"worker": addresses}
    assert (resolver.task_type, resolver.task_id, resolver.get_task_info()) == ("worker", 5, ("worker", 5))
    assert (resolver.master(), resolver.rpc_layer, resolver.num_accelerators()) == (
        "grpc://n3:8888",
        "grpc",
        {"GPU": 0},
    )


def test_slurm_tasks_are_divided_among_jobs(step):
    """Fact 126."""
    step(CUDA_VISIBLE_DEVICES="")
    resolver = SlurmClusterResolver({"worker": 5, "ps": 2}, port_base=9000, rpc_layer="x")
    cluster = {"ps": ["m09:9000", "n1:9000"], "worker": ["n1:9001", "n2:9000", "n2:9001", "n3:9000", "n3:9001"]}
    assert resolver.cluster_spec().as_dict() == cluster
    assert (resolver.get_task_info(), resolver.master()) == (("worker", 3), "x://n3:9000")


def test_slurm_hosts_are_in_the_order_in_which_slurm_numbers_tasks(step):
    """n9 comes before n10: rank 0 is on n9."""
    step(
        SLURM_PROCID="0",
        SLURM_STEP_NUM_TASKS="2",
        SLURM_STEP_NODELIST="n[9-10]",
        SLURM_STEP_TASKS_PER_NODE="1(x2)",
        SLURMD_NODENAME="n9",
        CUDA_VISIBLE_DEVICES="",
    )
    resolver = SlurmClusterResolver()
    assert resolver.master() == "grpc://n9:8888"
    assert not [text for text in resolver.explain().contradictions if "SLURM" in text]


@pytest.mark.parametrize(
    "environment, options, visible, each",
    [
        # What the step has on each node is divided among the tasks there; rank 5 is the first of two.
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, {}, "0,1", 2),
        ({"CUDA_VISIBLE_DEVICES": "4,5,6,7", "SLURM_STEP_GPUS": "4,5,6,7"}, {}, "4,5", 2),
        ({"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": None}, {}, "0,1", 2),
        ({"SLURM_STEP_GPUS": "0,3", "CUDA_VISIBLE_DEVICES": None}, {"gpus_per_task": 1}, "0", 1),
        # `srun --gpus-per-task`: Slurm has given the task its own already.
        ({"CUDA_VISIBLE_DEVICES": "2", "SLURM_STEP_GPUS": "0,1,2,3"}, {}, "2", 1),
        ({"CUDA_VISIBLE_DEVICES": "6,7"}, {"auto_set_gpu": False}, "6,7", 1),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, {}, "-1", 0),
        ({"CUDA_VISIBLE_DEVICES": None}, {"gpus_per_node": 6, "gpus_per_task": 3}, "0,1,2", 3),
    ],
)
def test_slurm_tasks_share_the_gpus_of_their_node(environment, options, visible, each, step):
    step(**environment)
    resolver = SlurmClusterResolver(**options)
    for _ in range(2):
        resolver.cluster_spec()
        assert os.environ["CUDA_VISIBLE_DEVICES"] == visible
    assert resolver.num_accelerators() == {"GPU": each}


@pytest.mark.parametrize(
    "environment, options, kind, message",
    [
        ({"SLURM_PROCID": None}, {}, RuntimeError, "^SLURM_PROCID not found in environment. Not running inside a"),
        ({"SLURM_STEP_NODELIST": None}, {}, RuntimeError, "^SLURM_STEP_NODELIST not found in environment"),
        ({"SLURM_PROCID": "x"}, {}, RuntimeError, "SLURM_PROCID must be a number; got 'x'"),
        ({}, {"jobs": {"worker": 9}}, RuntimeError, "^Requested 9 tasks but only 7 were assigned.$"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x3)"}, {}, RuntimeError, r"has 4 hosts \(m09,n\[1-3\]\), but .* is for 3"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(y3)"}, {}, ValueError, r"in which '2\(y3\)' does not"),
        ({}, {"gpus_per_node": 1, "gpus_per_task": 1}, RuntimeError, "^Requested more GPUs per node than available"),
    ],
)
def test_contradictory_slurm_steps_are_reported(environment, options, kind, message, step):
    """Fact 126."""
    step(CUDA_VISIBLE_DEVICES="", **environment)
    with pytest.raises(kind, match=message):
        SlurmClusterResolver(**options)


def test_a_slurm_resolver_says_where_slurm_put_the_task_elsewhere(step):
    step(CUDA_VISIBLE_DEVICES="", SLURMD_NODENAME="n1")
    resolver = SlurmClusterResolver()
    (text,) = [text for text in resolver.explain().contradictions if "SLURMD" in text]
    assert text.startswith("SLURMD_NODENAME is n1, but rank 5 was given to n3: tasks are taken to fill one node after")
    step(CUDA_VISIBLE_DEVICES="", SLURMD_NODENAME="n3", SLURM_LOCALID="1")
    assert "SLURM_LOCALID is 1, but rank 5 was taken to be 0" in resolver.explain().contradictions
    step(CUDA_VISIBLE_DEVICES="", SLURM_PROCID="7")
    assert "SLURM_PROCID is 7, but the last task has rank 6" in SlurmClusterResolver().explain().contradictions


def test_reading_a_cluster_starts_no_backend(run_python):
    done = run_python(
        """
        import os
        import replicax as rx
        from jax._src import xla_bridge

        os.environ["TF_CONFIG"] = '{"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": 1}}'
        os.environ.update(SM_HOSTS='["a"]', SM_CURRENT_HOST="a", SLURM_PROCID="0", SLURM_STEP_NUM_TASKS="1")
        os.environ.update(SLURM_STEP_NODELIST="a", SLURM_STEP_TASKS_PER_NODE="1")
        R = rx.cluster_resolver
        simple = R.SimpleClusterResolver(rx.ClusterSpec({"worker": ["a:1"]}), task_type="worker", task_id=0)
        for resolver in [
            R.TFConfigClusterResolver(), simple, R.UnionResolver(simple), R.SlurmClusterResolver(),
            R.SageMakerClusterResolver(), R.TPUClusterResolver("local"), R.TPUClusterResolver("grpc://a:1"),
        ]:
            resolver.cluster_spec(), resolver.task_type, resolver.task_id, resolver.master(), resolver.rpc_layer
            str(resolver.explain())
        assert not xla_bridge._backends
        assert R.TFConfigClusterResolver().num_accelerators() == {"GPU": 8}
        assert xla_bridge._backends
        """
    )
    assert done.returncode == 0, done.stderr
