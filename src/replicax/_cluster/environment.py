"""Resolvers that read the whole cluster from the environment: TF_CONFIG, and what SageMaker sets."""

from __future__ import annotations

import abc
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from replicax._cluster.explain import Explanation
from replicax._cluster.resolver import ClusterResolver, master_url
from replicax._cluster.spec import ClusterSpec
from replicax._job.channel import join_address

_T = TypeVar("_T", str, int)
_EXAMPLE = '{"cluster": {"worker": ["a:2222", "b:2222"]}, "task": {"type": "worker", "index": 0}}'
_KNOWN_KEYS = {"cluster", "task", "rpc_layer", "environment", "session_master", "job"}
_SAGEMAKER_FILE = Path("/opt/ml/input/config/resourceconfig.json")


class ConfigClusterResolver(ClusterResolver):
    """The base of resolvers that read the cluster and the task from one object; arguments take precedence over it."""

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ):
        self._task_type, self._task_id = task_type, task_id
        self._rpc_layer, self._environment = rpc_layer, environment

    @abc.abstractmethod
    def _config(self) -> dict[str, Any]:
        """Returns the configuration, in the form of TF_CONFIG."""

    def cluster_spec(self) -> ClusterSpec:
        """Returns the cluster; an empty one if none is described.

        >>> import os
        >>> from unittest import mock
        >>> import replicax as rx
        >>> with mock.patch.dict(os.environ, TF_CONFIG='{"cluster": {"worker": ["a:1"]}}'):
        ...     rx.cluster_resolver.TFConfigClusterResolver().cluster_spec()
        ClusterSpec({'worker': ['a:1']})
        """
        return ClusterSpec(self._config().get("cluster", {}))

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Returns the address of a task, by default of this process; empty where that is the only one.

        The arguments are those of `ClusterResolver.master`; ValueError if the cluster has no such task, or if it is not
        known which task this process is.

        >>> import os
        >>> from unittest import mock
        >>> import replicax as rx
        >>> with mock.patch.dict(os.environ, TF_CONFIG='{"cluster": {"worker": ["a:1", "b:2"]}}'):
        ...     rx.cluster_resolver.TFConfigClusterResolver().master("worker", 1)
        'b:2'
        """
        master: str | None = self._config().get("session_master")
        if master is not None:
            return master
        spec = self.cluster_spec()
        if sum(map(spec.num_tasks, spec.jobs)) <= 1:
            return ""
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        address = spec.task_address(task_type, task_id)  # type: ignore[arg-type]
        return master_url(address, self.rpc_layer if rpc_layer is None else rpc_layer)

    def _task(self) -> dict[str, Any]:
        task = self._config().get("task", {})
        if not isinstance(task, dict):
            raise ValueError(f'"task" must be an object such as {{"type": "worker", "index": 0}}; got {task!r}.')
        return task

    def _found(self, name: str, own: _T | None) -> _T | None:
        if own is not None:
            return own
        if name == "rpc_layer":
            return self._config().get("rpc_layer")
        read, key = {"task_type": (str, "type"), "task_id": (int, "index")}[name]
        return None if (value := self._task().get(key)) is None else read(value)

    def _describe_arguments(self, report: Explanation, theirs: Mapping[str, Any], source: str) -> None:
        """Says which arguments stand in place of what the source has."""
        for name, key, own in (("task_type", "type", self._task_type), ("task_id", "index", self._task_id)):
            if own is not None:
                instead = f", in place of {theirs[key]!r} in {source}" if theirs.get(key, own) != own else ""
                report.found.append(f"{name}: {own!r}, given to the resolver{instead}")


class TFConfigClusterResolver(ConfigClusterResolver):
    """A resolver that reads the environment variable TF_CONFIG, anew each time.

    Args:
        task_type: the job of this process, in place of TF_CONFIG's.
        task_id: its index.
        rpc_layer: what `master` puts in front.
        environment: a name for the environment.

    What TF_CONFIG holds is read when it is asked for; text that is not JSON raises `json.JSONDecodeError` then.

    >>> import os
    >>> from unittest import mock
    >>> import replicax as rx
    >>> config = '{"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": 1}}'
    >>> with mock.patch.dict(os.environ, TF_CONFIG=config):
    ...     resolver = rx.cluster_resolver.TFConfigClusterResolver()
    ...     resolver.task_type, resolver.task_id, resolver.master()
    ('worker', 1, 'b:2')
    """

    def _config(self) -> dict[str, Any]:
        text = os.environ.get("TF_CONFIG") or "{}"
        try:
            config = json.loads(text)
        except json.JSONDecodeError as error:
            error.add_note(f"The environment variable TF_CONFIG is not JSON. {_where(error)}")
            raise
        if not isinstance(config, dict):
            raise ValueError(f"TF_CONFIG must be a JSON object such as {_EXAMPLE}; got {text}.")
        return config

    def _describe(self, report: Explanation) -> None:
        text = os.environ.get("TF_CONFIG")
        if not text:
            report.missing.append(f"TF_CONFIG is {'not set' if text is None else 'empty'}; it looks like {_EXAMPLE}")
            return
        report.found.append(f"TF_CONFIG in the environment, {len(text)} characters")
        twice: list[str] = []

        def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
            keys = [key for key, _ in items]
            twice.extend(sorted({key for key in keys if keys.count(key) > 1}))
            return dict(items)

        try:
            config = json.loads(text, object_pairs_hook=pairs)
        except json.JSONDecodeError as error:
            report.contradictions.append(f"TF_CONFIG is not JSON: {_where(error)}")
            return
        for key in twice:
            claim = "two addresses claim one index: the key" if key.isdecimal() else "the key"
            report.contradictions.append(f"TF_CONFIG: {claim} {key!r} stands twice in one object; the last one counts")
        if not isinstance(config, dict):
            return
        for key in config.keys() - _KNOWN_KEYS:
            report.contradictions.append(f"TF_CONFIG: nobody reads its key {key!r}; known are 'cluster' and 'task'")
        for key in ("cluster", "task"):
            if key not in config:
                report.missing.append(f"{key!r} in TF_CONFIG; it looks like {_EXAMPLE}")
        self._describe_arguments(report, self._task(), "TF_CONFIG")


def _where(error: json.JSONDecodeError) -> str:
    """Returns the place of a fault in JSON, the text there, and its usual cause."""
    lines = error.doc.splitlines() or [""]
    line = lines[min(error.lineno, len(lines)) - 1]
    before, after = line[max(0, error.colno - 31) : error.colno - 1], line[error.colno - 1 : error.colno + 29]
    hint = ""
    if "'" in error.doc and '"' not in error.doc:
        hint = "; JSON needs double quotes"
    elif after.lstrip()[:1] in ("]", "}"):
        hint = "; a comma too many?"
    elif '"' not in error.doc:
        hint = "; were the quotes taken by the shell? Put single quotes around the whole"
    elif not after:
        hint = "; it ends too early"
    return f"{error.msg}, line {error.lineno} column {error.colno}: {before}>>>{after}{hint}"


class SageMakerClusterResolver(ConfigClusterResolver):
    """A resolver for Amazon SageMaker: every host of the training job is a worker.

    It reads SM_HOSTS and SM_CURRENT_HOST, or the file from which SageMaker's toolkit makes them,
    /opt/ml/input/config/resourceconfig.json.

    Args:
        port: the port of every worker.
        task_type: the job of this process, in place of `worker`.
        task_id: its index, in place of the host's.
        rpc_layer: what `master` puts in front.
        environment: a name for the environment.

    What is there is read when it is asked for; `RuntimeError` where this is no SageMaker job.

    >>> import os
    >>> from unittest import mock
    >>> import replicax as rx
    >>> with mock.patch.dict(os.environ, SM_HOSTS='["algo-1", "algo-2"]', SM_CURRENT_HOST="algo-2"):
    ...     resolver = rx.cluster_resolver.SageMakerClusterResolver()
    ...     resolver.task_id, resolver.cluster_spec()
    (1, ClusterSpec({'worker': ['algo-1:2223', 'algo-2:2223']}))
    """

    def __init__(
        self,
        port: int = 2223,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ):
        super().__init__(task_type, task_id, rpc_layer, environment)
        self._port = port

    def _resources(self) -> tuple[list[str], str, str]:
        """Returns the hosts in order, this one, and where they were found."""
        if "SM_HOSTS" in os.environ and "SM_CURRENT_HOST" in os.environ:
            hosts = json.loads(os.environ["SM_HOSTS"] or "[]")
            return sorted(hosts), os.environ["SM_CURRENT_HOST"], "SM_HOSTS and SM_CURRENT_HOST in the environment"
        if _SAGEMAKER_FILE.exists():
            resources = json.loads(_SAGEMAKER_FILE.read_text(encoding="utf-8"))
            return sorted(resources["hosts"]), resources["current_host"], str(_SAGEMAKER_FILE)
        absent = " and ".join(name for name in ("SM_HOSTS", "SM_CURRENT_HOST") if name not in os.environ)
        raise RuntimeError(
            f"{absent} not found in environment, and there is no file {_SAGEMAKER_FILE}. Not running inside a "
            "SageMaker training job?"
        )

    def _config(self) -> dict[str, Any]:
        hosts, current, _ = self._resources()
        if current not in hosts:
            return {}
        return {
            "cluster": {"worker": [join_address(host, self._port) for host in hosts]},
            "task": {"type": "worker", "index": hosts.index(current)},
        }

    def _describe(self, report: Explanation) -> None:
        hosts, current, source = self._resources()
        report.found.append(f"{source}: {len(hosts)} hosts, of which this one is {current!r}")
        if current not in hosts:
            report.contradictions.append(f"the current host {current!r} is not among the hosts {hosts}")
        for host in sorted({host for host in hosts if hosts.count(host) > 1}):
            report.contradictions.append(f"the host {host!r} is there twice: two workers claim one address")
        if "TF_CONFIG" in os.environ:
            report.found.append("TF_CONFIG is set too, and not read here")
        self._describe_arguments(report, self._task(), "SageMaker's")
