"""The peers of a service, as its handlers see them, and the threads in which handlers run."""

from __future__ import annotations

import threading

import pytest

from replicax._transport.grpc_settings import Threads
from replicax._transport.handlers import Caller


def test_an_exception_of_a_function_that_is_called_at_the_end_of_a_connection_is_printed(capsys):
    called = []

    def fails():
        raise KeyError("of the function")

    caller = Caller()
    for callback in (fails, lambda: called.append(1), fails):
        caller.on_close(callback)
    caller.close()
    assert called == [1]
    printed = capsys.readouterr().err
    assert printed.count("KeyError: 'of the function'") == 2 and "in fails" in printed


def test_what_is_refused_since_no_thread_can_be_started_never_runs(monkeypatch):
    def cannot(thread):
        raise RuntimeError("can't start new thread")

    ran, threads = [], Threads("replicax-test")
    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="can't start"):
        patched.setattr(threading.Thread, "start", cannot)
        threads.submit(ran.append, "refused")
    for name in ("one", "two"):
        threads.submit(ran.append, name).result(60)
    threads.shutdown()
    assert ran == ["one", "two"]
