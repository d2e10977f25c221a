"""The peers of a service, as its handlers see them."""

from __future__ import annotations

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
