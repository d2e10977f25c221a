"""The record of ambient state: what is set for a while, and what started threads and asyncio's tasks take over."""

from __future__ import annotations

import asyncio
import contextvars
import threading

import jax
import jax.numpy as jnp
import pytest

import replicax as rx
from replicax._base.thread_state import current, entered, inherit


def in_thread(function):
    """Returns the result of a function that a new thread calls."""
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def test_slots_have_their_former_values_after_the_context():
    with pytest.raises(KeyError), entered(autograph=True, undo_logs=(1,)), entered(autograph=False, worker=3):
        assert (current.autograph, current.worker, current.undo_logs) == (False, 3, (1,))
        raise KeyError
    assert (current.autograph, current.worker, current.undo_logs) == (False, None, ())


def test_a_name_that_is_no_slot_is_refused():
    with pytest.raises(AttributeError, match="no_slot"), entered(no_slot=1):
        pass


def test_threads_begin_with_the_defaults():
    with entered(autograph=True, advancing=(1,), names=("a",), running=2, tapes=[1]):
        seen = in_thread(lambda: (current.autograph, current.advancing, current.names, current.running, current.tapes))
    assert seen == (False, (), (), None, [])


USERS = contextvars.ContextVar("users", default=0)


def test_threads_of_a_call_inherit_what_holds_for_the_call():
    with entered(advancing=(1,), worker=2, names=("a",), creators=(("s", "c"),), running=3, autograph=True, tapes=[1]):
        with jax.enable_x64(not jax.config.jax_enable_x64):
            wide, token = jax.config.jax_enable_x64, USERS.set(5)
            inherited = inherit()
            USERS.reset(token)

    def look():
        call = current.advancing, current.worker, current.names, current.creators, current.running, USERS.get()
        return call, (current.autograph, current.tapes), jax.config.jax_enable_x64

    def run():  # after the slots and settings have changed again where they were taken from
        return inherited.run(look), look()

    inside, outside = in_thread(run)
    assert inside == (((1,), 2, ("a",), (("s", "c"),), 3, 5), (False, []), wide)
    assert outside == (((), None, (), (), None, 0), (False, []), not wide)


def test_several_threads_may_run_what_they_inherit_at_the_same_time():
    inherited, both = inherit(), threading.Barrier(2)
    threads = [threading.Thread(target=inherited.run, args=(both.wait, 10)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not both.broken


def test_threads_that_outlive_the_call_inherit_only_which_elements_they_make():
    with entered(advancing=(1,), worker=2, names=("a",), running=3, undo_logs=(4,)):
        inherited = inherit(outlives=True)
    look = lambda: (current.advancing, current.worker, current.names, current.running, current.undo_logs)  # noqa: E731
    assert in_thread(lambda: inherited.run(look)) == ((1,), 2, (), None, ())


def test_tasks_and_their_threads_have_the_slots_of_the_context_alone():
    async def look():
        here = current.is_detached, current.worker
        return here, await asyncio.to_thread(lambda: (current.is_detached, current.worker))

    async def main():
        with entered(is_detached=True, worker=2):
            task = asyncio.ensure_future(look())
        return await task, await look()

    inside, outside = asyncio.run(main())
    assert inside == ((True, None), (True, None)) and outside == ((False, None), (False, None))


def test_a_generator_that_suspends_in_a_scope_leaves_nothing_behind():
    strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"])

    def suspended():
        with strategy.scope():
            yield

    generator = suspended()
    next(generator)
    with strategy.scope():
        generator.close()
    assert not rx.has_strategy()


def test_eager_replicas_make_variables_under_the_callers_scopes():
    strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"])
    made = []

    def creator(make, **kwargs):
        made.append(kwargs["name"])
        return make(**kwargs)

    def replica():
        return rx.Variable(jnp.zeros(()), name="v").name

    with rx.name_scope("outer"), strategy.scope(), rx.variable_creator_scope(creator):
        assert set(strategy.run(replica).values) == {"outer/v:0"}
    assert made == ["v", "v"]
