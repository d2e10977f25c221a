"""Arguments and calls that make no sense are refused at once, with errors that say what is wrong."""

from __future__ import annotations

import _thread
import ctypes
import functools
import sys
import threading

import jax
import jax.numpy as jnp
import pytest
from strategies import mirrored, one_device

import replicax as rx

R = rx.cluster_resolver


def pytree():
    return rx.Variable({"a": jnp.ones(2)}, name="tree")


def left_in_another_thread():
    scope, errors = mirrored(2).scope(), []

    def leave():
        try:
            scope.__exit__(None, None, None)
        except RuntimeError as error:
            errors.append(error)

    with scope:
        thread = threading.Thread(target=leave)
        thread.start()
        thread.join()
        assert rx.get_strategy() is mirrored(2)
    raise errors[0]


def kept_context(before):
    kept = []

    def replica_step():
        context = rx.get_replica_context()
        kept.append(context)
        return context.replica_id_in_sync_group if before else 1

    rx.function(lambda: mirrored(2).run(replica_step))()
    return kept[0].replica_id_in_sync_group


class Holder:
    __slots__ = ("__dict__", "tensor")


def tensor_left_on_an_object():
    holder = Holder()

    def replica_step(x):
        holder.tensor = x * 2

    def step(x):
        mirrored(2).run(replica_step, args=(x,))
        return holder.tensor + 1

    return rx.function(step)(jnp.float32(1))


def object_with_tensors(in_replica):
    def made(x):
        holder = Holder()
        holder.name, holder.tensor, holder.several = "name", x * 2, [x, 1]
        return holder

    return rx.function(lambda x: mirrored(2).run(made, args=(x,)) if in_replica else made(x))(jnp.float32(1))


def dead_tracer():
    kept = []
    jax.jit(lambda x: kept.append(x) or x)(1.0)
    return rx.Variable(kept[0])


CASES = [
    (tensor_left_on_an_object, jax.errors.UnexpectedTracerError, "replica function .* Return it from that function"),
    *(
        (
            functools.partial(object_with_tensors, in_replica),
            TypeError,
            "Could not build a TypeSpec for a Holder of unsupported type .* in tensor, several. Return",
        )
        for in_replica in (False, True)
    ),
    (lambda: mirrored(2).scope().__exit__(None, None, None), RuntimeError, "without having been entered"),
    (left_in_another_thread, RuntimeError, "left in another thread"),
    (lambda: mirrored(2).extended.read_var(5), TypeError, "`read_var` takes a variable, got 5"),
    (lambda: rx.get_strategy().extended.variable_created_in_scope(5), AttributeError, "5 is no variable"),
    (lambda: rx.name_scope(5), ValueError, "name for name_scope must be a string, got 5"),
    (lambda: R.TPUClusterResolver(5), TypeError, "name or address of a TPU, or None, got 5"),
    (lambda: R.GCEClusterResolver("p", "z", "g", 1, credentials=5), TypeError, "`credentials` of the GCE"),
    (lambda: rx.Variable([1.0]).batch_scatter_update(5), TypeError, "sparse_delta is not IndexedSlices: 5"),
    (lambda: pytree().scatter_nd_add([[0]], [1.0]), TypeError, "`scatter_nd_add` .* tree:0 holds a pytree"),
    (lambda: pytree().scatter_add(rx.IndexedSlices([1.0], [0])), TypeError, "`scatter_add` .* tree:0 holds a pytree"),
    (lambda: pytree().gather_nd([[0]]), TypeError, "`gather_nd` is for variables of one array"),
    (lambda: pytree().sparse_read([0]), TypeError, "`sparse_read` is for variables of one array"),
    (lambda: rx.NcclAllReduce("x"), TypeError, "`num_packs` is an int, got 'x'"),
    (lambda: rx.HierarchicalCopyAllReduce(1.5), TypeError, "`num_packs` is an int, got 1.5"),
    (lambda: rx.CommunicationOptions("x"), TypeError, "`bytes_per_pack` is an int, got 'x'"),
    (lambda: rx.CommunicationOptions(timeout_seconds="x"), TypeError, "`timeout_seconds` is a number of seconds"),
    (lambda: kept_context(before=False), RuntimeError, "which has ended"),
    (lambda: kept_context(before=True), RuntimeError, "which has ended"),
    (lambda: rx.function(3), TypeError, "`function` compiles a Python function, got 3"),
    (lambda: rx.function(autograph=False)(3), TypeError, "`function` compiles a Python function, got 3"),
    (dead_tracer, RuntimeError, "initial value of a variable is a traced value"),
    (lambda: jax.jit(lambda x: rx.Variable(x) and x)(1.0), RuntimeError, "initial value of a variable is a traced"),
]


@pytest.mark.parametrize(("call", "kind", "message"), CASES)
def test_wrong_calls_are_refused_at_once(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


def test_one_device_broadcasts_to_itself():
    assert one_device().extended.broadcast_to(jnp.arange(2.0), ["GPU:1"]).tolist() == [0.0, 1.0]


def test_an_interrupt_that_comes_while_an_eager_replica_returns_is_raised_by_the_caller_alone(monkeypatch):
    elsewhere, replicas, sent = [], [], threading.Event()
    send = ctypes.pythonapi.PyThreadState_SetAsyncExc
    monkeypatch.setattr(threading, "excepthook", elsewhere.append)

    def send_late(*args):
        while replicas[-1].state == "running":
            pass
        send(*args)
        sent.set()

    def step():
        replicas.append(rx.get_replica_context()._replica)
        turn = replicas[-1].run.turn
        monkeypatch.setattr(turn, "release", lambda release=turn.release: (sent.wait(60), release()))
        _thread.interrupt_main()
        while not replicas[-1].run.abandoned:
            pass

    monkeypatch.setattr(ctypes.pythonapi, "PyThreadState_SetAsyncExc", send_late)
    with pytest.raises(KeyboardInterrupt):
        mirrored(2).run(step)
    for replica in replicas:
        replica.thread.join(60)
    assert sent.is_set() and not elsewhere


def test_a_profile_function_works_after_eager_replicas():
    """CPython 3.11 stands still in a traced call once an asynchronous exception was taken back in the process."""
    mirrored(2).run(lambda: None)
    seen = []
    sys.setprofile(lambda frame, event, argument: seen.append(event))
    try:
        (lambda: None)()
    finally:
        sys.setprofile(None)
    assert seen[:2] == ["call", "return"]
