"""Objects that live, listed while others are made."""

from __future__ import annotations

import gc
import sys
import threading

from replicax._base import tracebacks
from replicax._base.tracebacks import Living


class Thing:
    """May be referred to weakly."""

    __hash__ = None


def test_objects_are_listed_in_order_for_as_long_as_they_live():
    things, made = Living(), [Thing() for _ in range(3)]
    for one in made:
        things.add(one)
    assert [one for one, _ in things] == made
    del made[1], one
    gc.collect()
    assert [one for one, _ in things] == made


def test_an_object_that_is_being_added_is_listed_with_its_place_or_not_at_all(monkeypatch):
    things, seen, real = Living(), [], tracebacks.origin
    monkeypatch.setattr(tracebacks, "origin", lambda: (seen.append(list(things)), real())[1])
    made = [Thing(), Thing()]
    for one in made:
        things.add(one)
    assert [len(listed) for listed in seen] == [0, 1] and len(list(things)) == 2


def test_objects_are_made_in_other_threads_while_they_are_listed():
    things, begun, ended = Living(), threading.Event(), threading.Event()

    def make():
        kept = []
        while not ended.is_set():
            kept.append(Thing())
            things.add(kept[-1])
            del kept[:-500]
            begun.set()

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=make)
    thread.start()
    try:
        sys.setswitchinterval(1e-6)
        assert begun.wait(60.0)
        for _ in range(300):
            list(things)
    finally:
        ended.set()
        sys.setswitchinterval(interval)
        thread.join()
