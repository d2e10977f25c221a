"""Messages: heads and arrays of every dtype, as they were after the bytes went over."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicax._transport import wire
from replicax._transport.wire import Message, parsed, received

PLAIN = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128"
OF_JAX = [name for name, kind in vars(ml_dtypes).items() if isinstance(kind, type) and issubclass(kind, np.generic)]
DTYPES = [*PLAIN.split(), *OF_JAX]


def over(message: Message) -> tuple[list, list]:
    """What arrives, in one piece and in parts, which are equal."""
    whole = received(message.parts())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "LARGE", 0)
        in_parts = received(message.parts())
    assert len(whole) == message.size and bytes(in_parts) == whole
    return parsed(in_parts)


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_comes_back(name):
    dtype = np.dtype(getattr(ml_dtypes, name, None) or name)
    numbers = np.arange(8).astype(dtype).reshape(2, 4)
    sent = [numbers, numbers.T, numbers[:, ::2], numbers[1, 1], np.zeros((0, 3), dtype)]
    for one, two in zip(sent, over(Message([], sent))[1], strict=True):
        assert two.dtype == one.dtype and two.shape == one.shape and not two.flags.writeable
        assert two.tobytes() == one.tobytes()


def test_arrays_of_jax_come_back():
    sent = [jnp.arange(3), jnp.ones((2, 2), jnp.bfloat16), jnp.arange(4).astype(jnp.int4), jnp.float32(1), 2.5, True]
    for one, two in zip(sent, over(Message([], sent))[1], strict=True):
        assert two.dtype == np.asarray(one).dtype and np.array_equal(np.asarray(one), two)


@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg"])
def test_typed_keys_come_back(implementation):
    keys = jax.random.split(jax.random.key(1, impl=implementation), (2, 3))
    _, (back, single) = over(Message([], [keys, keys[0, 0]]))
    assert back.dtype == keys.dtype and back.shape == (2, 3) and single.shape == ()
    assert (jax.random.key_data(back) == jax.random.key_data(keys)).all()


def test_texts_come_back():
    sent = [
        np.array([[b"a", b""], [b"\0\xff", b"long" * 10]], object),
        np.array(["ü", "b"], object),
        np.array(b"one", object),
        np.array([], object),
        np.array([b"ab", b"c"]),
        np.array(["ü", "bc"]),
    ]
    for one, two in zip(sent, over(Message([], sent))[1], strict=True):
        assert two.dtype == one.dtype and two.shape == one.shape and two.tolist() == one.tolist()


def test_numbers_of_another_byte_order_keep_their_values():
    _, (back,) = over(Message([], [np.arange(5, dtype=">i4")]))
    assert back.dtype == np.int32 and back.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "array", [np.array([b"a", "b"], object), np.array([1, None]), np.array([{}]), np.array("2020", "M8[D]")]
)
def test_python_objects_are_refused(array):
    with pytest.raises(TypeError, match="cannot be sent to another task"):
        Message([], [array])


def test_heads_are_json():
    assert over(Message([{"a": [1, None, 2.5, "ü"]}, "b"]))[0] == [{"a": [1, None, 2.5, "ü"]}, "b"]
    with pytest.raises(TypeError, match="JSON does not have"):
        Message([{"a": object()}])


def test_arrays_lie_aligned_in_a_message_that_came_in_parts():
    message = Message([{}], [np.arange(3, dtype=np.int8), np.zeros(3 << 20), np.arange(7)])
    parts = list(message.parts())
    assert max(map(len, parts)) <= 2 * wire.CHUNK and len(parts) > 20
    for array in parsed(received(iter(parts)))[1]:
        assert array.ctypes.data % 64 == 0


def test_parts_that_are_too_few_or_too_long_are_an_error():
    parts = list(Message([{}], [np.zeros(3 << 20)]).parts())
    for wrong in (parts[:-1], [*parts[:-1], parts[-1] + b"x"], parts[:1], [b"\0" * 4 + b"\xff" * 8]):
        with pytest.raises(ValueError):
            received(iter(wrong))


def test_messages_follow_each_other():
    parts = [part for size in (0, 3 << 20, 1) for part in Message([size], [np.zeros(size)]).parts()]
    stream = iter(parts)
    assert [parsed(received(stream))[0] for _ in range(3)] == [[0], [3 << 20], [1]]
    assert received(stream) is None


@settings(deadline=None, derandomize=True)
@given(st.binary(max_size=300))
def test_what_is_no_message_is_an_error(data):
    for wrong in (data, len(data).to_bytes(4, "little") + data, b"\x08\0\0\0[0,[[" + data):
        with contextlib.suppress(ValueError):
            parsed(wrong)


@settings(deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3), st.integers(0, 2**32 - 1)),
        max_size=5,
    )
)
def test_any_arrays_come_back_in_their_order(described):
    sent = []
    for name, shape, seed in described:
        dtype = np.dtype(getattr(ml_dtypes, name, None) or name)
        sent.append(np.random.default_rng(seed).integers(0, 2, shape).astype(dtype))
    back = over(Message([len(sent)], sent))[1]
    assert [(a.dtype, a.shape, a.tobytes()) for a in sent] == [(a.dtype, a.shape, a.tobytes()) for a in back]
