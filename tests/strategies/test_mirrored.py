"""What `MirroredStrategy` says of the environment that it is made in."""

from __future__ import annotations

import json
import warnings

import pytest

import replicax as rx

WORKERS = {"worker": ["a:1", "b:2"]}


def config(cluster, kind="worker", index=1):
    return json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})


def test_a_worker_of_several_is_warned_that_it_trains_alone(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", config(WORKERS))
    with pytest.warns(UserWarning, match="worker 1 in a job of 2, but .* Use MultiWorkerMirroredStrategy"):
        strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"])
    assert strategy.num_replicas_in_sync == 2
    monkeypatch.setenv("TF_CONFIG", config({"chief": ["a:1"], "worker": ["b:2"]}, "chief", 0))
    with pytest.warns(UserWarning, match="chief 0 in a job of 2"):
        rx.MirroredStrategy(["GPU:0"])


@pytest.mark.parametrize(
    "described",
    [
        "",
        "{",
        "{}",
        '{"cluster": 5}',
        config({"worker": "a:1"}),
        config(WORKERS, index=[1]),
        config({"worker": ["a:1"]}, index=0),
        config(WORKERS, "evaluator", 0),
        config({**WORKERS, "chief": ["c:1"], "ps": ["d:1"]}, "chief", 0),
    ],
    ids=[
        "none",
        "no JSON",
        "nobody",
        "a number",
        "no list",
        "no index",
        "one worker",
        "evaluator",
        "parameter servers",
    ],
)
def test_who_is_meant_to_be_alone_is_not_warned(monkeypatch, described):
    monkeypatch.setenv("TF_CONFIG", described)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rx.MirroredStrategy(["GPU:0", "GPU:1"])
