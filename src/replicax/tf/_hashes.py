"""Hashes of strings with TensorFlow's numbers, of many strings at once.

FarmHash's Fingerprint64 (https://github.com/google/farmhash), SipHash-2-4 (https://www.aumasson.jp/siphash) and
MurmurHash64A. Strings of one length are hashed together, as rows of words of 64 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

_Words: TypeAlias = np.ndarray  # uint64, one for each string

_K0, _K1, _K2 = (np.uint64(k) for k in (0xC3A5C85C97CB3127, 0xB492B66FBE98F273, 0x9AE16A3B2F90404F))
_MURMUR = np.uint64(0xC6A4A7935BD1E995)
_DECAF = 0xDECAFCAFFE  # TensorFlow's seed
_MOST_KNOWN, _LONGEST_KNOWN = 1 << 16, 64  # how many hashes are kept, and of strings of how many bytes


def of_strings(hashed: Callable[[np.ndarray], _Words], strings: np.ndarray) -> _Words:
    """Returns the hashes of an array of bytes objects, in its shape.

    Those of the first short strings are kept: the values of a category come again and again.

    Args:
        hashed: a function of the bytes of strings of one length, uint8 `[strings, length]`.
        strings: the array.
    """
    flat = strings.ravel().tolist()
    known = _known.get(hashed)
    if known is None or max(map(len, flat), default=0) > _LONGEST_KNOWN:
        return _of_list(hashed, flat).reshape(strings.shape)
    if missing := [text for text in {*flat} if text not in known]:
        if len(known) + len(missing) > _MOST_KNOWN:
            return _of_list(hashed, flat).reshape(strings.shape)
        known.update(zip(missing, _of_list(hashed, missing).tolist()))
    return np.fromiter(map(known.__getitem__, flat), np.uint64, len(flat)).reshape(strings.shape)


def _of_list(hashed: Callable[[np.ndarray], _Words], strings: list[bytes]) -> _Words:
    """Returns the hashes of some strings: of those of one length together."""
    lengths = np.fromiter(map(len, strings), np.intp, len(strings))
    out = np.empty(len(strings), np.uint64)
    with np.errstate(over="ignore"):  # of numbers modulo 2**64, where they are scalars
        for length in np.unique(lengths).tolist():
            (which,) = np.nonzero(lengths == length)
            joined = b"".join([strings[i] for i in which.tolist()])
            out[which] = hashed(np.frombuffer(joined, np.uint8).reshape(len(which), length))
    return out


def _rotate(x: _Words, bits: int) -> _Words:
    """Rotates to the right."""
    return x >> np.uint64(bits) | x << np.uint64(64 - bits)


def _mix(x: _Words) -> _Words:
    result: _Words = x ^ x >> np.uint64(47)
    return result


def _word(rows: np.ndarray, place: int, size: int = 8) -> _Words:
    """Returns the little-endian number of `size` bytes at a place in each row."""
    cut = np.ascontiguousarray(rows[:, place : place + size])
    if size == 8:
        return cut.view("<u8")[:, 0].astype(np.uint64)
    return cut.view("<u4")[:, 0].astype(np.uint64) if size == 4 else cut[:, 0].astype(np.uint64)


def _pair(u: _Words, v: _Words, mul: np.uint64 | _Words) -> _Words:
    a = _mix((u ^ v) * mul)
    return _mix((v ^ a) * mul) * mul


def fingerprint64(rows: np.ndarray) -> _Words:
    """Returns FarmHash's Fingerprint64."""
    count, n = rows.shape
    mul = _K2 + np.uint64(2 * n)
    if n == 0:
        return np.full(count, _K2)
    if n < 4:
        y = _word(rows, 0, 1) + (_word(rows, n >> 1, 1) << np.uint64(8))
        z = np.uint64(n) + (_word(rows, n - 1, 1) << np.uint64(2))
        return _mix(y * _K2 ^ z * _K0) * _K2
    if n < 8:
        return _pair(np.uint64(n) + (_word(rows, 0, 4) << np.uint64(3)), _word(rows, n - 4, 4), mul)
    if n <= 16:
        a, b = _word(rows, 0) + _K2, _word(rows, n - 8)
        return _pair(_rotate(b, 37) * mul + a, (_rotate(a, 25) + b) * mul, mul)
    if n > 64:
        return _long_fingerprint(rows)
    b, d = _word(rows, 8), _word(rows, n - 16) * _K2
    a, c = _word(rows, 0) * (_K1 if n <= 32 else _K2), _word(rows, n - 8) * mul
    y, z = _rotate(a + b, 43) + _rotate(c, 30) + d, a + _rotate(b + _K2, 18) + c
    if n <= 32:
        return _pair(y, z, mul)
    z = _pair(y, z, mul)
    e, f = _word(rows, 16) * mul, _word(rows, 24)
    g, h = (y + _word(rows, n - 32)) * mul, (z + _word(rows, n - 24)) * mul
    return _pair(_rotate(e + f, 43) + _rotate(g, 30) + h, e + _rotate(f + a, 18) + g, mul)


def _weak(rows: np.ndarray, at: int, a: _Words, b: _Words) -> tuple[_Words, _Words]:
    """Returns the hash of 32 bytes and of two seeds, in two words."""
    w, x, y, z = (_word(rows, at + 8 * i) for i in range(4))
    a = a + w
    b = _rotate(b + a + z, 21)
    total = a + x + y
    return total + z, b + _rotate(total, 44) + a


def _long_fingerprint(rows: np.ndarray) -> _Words:
    """Returns Fingerprint64 of strings of more than 64 bytes."""
    count, n = rows.shape
    seed = np.full(count, 81, np.uint64)
    y = seed * _K1 + np.uint64(113)
    z = _mix(y * _K2 + np.uint64(113)) * _K2
    x = seed * _K2 + _word(rows, 0)
    v = w = (np.zeros(count, np.uint64), np.zeros(count, np.uint64))

    def block(at: int, mul: Any, nine: np.uint64) -> None:
        nonlocal x, y, z, v, w
        x = _rotate(x + y + v[0] + _word(rows, at + 8), 37) * mul
        y = _rotate(y + v[1] + _word(rows, at + 48), 42) * mul
        x = x ^ w[1] * nine
        y = y + v[0] * nine + _word(rows, at + 40)
        z = _rotate(z + w[0], 33) * mul
        v = _weak(rows, at, v[1] * mul, x + w[0])
        w = _weak(rows, at + 32, z + w[1], y + _word(rows, at + 16))
        z, x = x, z

    for at in range(0, (n - 1) // 64 * 64, 64):
        block(at, _K1, np.uint64(1))
    mul = _K1 + ((z & np.uint64(255)) << np.uint64(1))
    w = w[0] + np.uint64((n - 1) & 63), w[1]
    v = v[0] + w[0], v[1]
    w = w[0] + v[0], w[1]
    block(n - 64, mul, np.uint64(9))
    return _pair(_pair(v[0], w[0], mul) + _mix(y) * _K0 + z, _pair(v[1], w[1], mul) + x, mul)


# The hashes that are kept, by their function.
_known: dict[Callable[[np.ndarray], _Words], dict[bytes, int]] = {fingerprint64: {}}


def murmur64(rows: np.ndarray) -> _Words:
    """Returns MurmurHash64A with TensorFlow's seed, which `tf.strings.to_hash_bucket` is made of."""
    count, n = rows.shape
    h = np.full(count, (_DECAF ^ (n * int(_MURMUR))) % 2**64, np.uint64)
    for at in range(0, n - 7, 8):
        h = (h ^ _mix(_word(rows, at) * _MURMUR) * _MURMUR) * _MURMUR
    if n % 8:
        h = (h ^ _last_word(rows)) * _MURMUR
    return _mix(_mix(h) * _MURMUR)


def _last_word(rows: np.ndarray) -> _Words:
    """Returns the bytes behind the last whole word as a word."""
    count, n = rows.shape
    filled = np.zeros((count, 8), np.uint8)
    filled[:, : n % 8] = rows[:, n - n % 8 :]
    return filled.view("<u8")[:, 0].astype(np.uint64)


def siphash(key: Sequence[int]) -> Callable[[np.ndarray], _Words]:
    """Returns a function for SipHash-2-4 with a key of two numbers."""
    k0, k1 = (np.uint64(int(k) % 2**64) for k in key)

    def hashed(rows: np.ndarray) -> _Words:
        count, n = rows.shape
        starts = (0x736F6D6570736575, 0x646F72616E646F6D, 0x6C7967656E657261, 0x7465646279746573)
        v = [np.full(count, np.uint64(start) ^ (k0, k1)[i % 2]) for i, start in enumerate(starts)]
        words = [_word(rows, at) for at in range(0, n - 7, 8)]
        for word in [*words, _last_word(rows) | np.uint64((n & 255) << 56)]:
            v[3] = v[3] ^ word
            _sip_rounds(v, 2)
            v[0] = v[0] ^ word
        v[2] = v[2] ^ np.uint64(255)
        _sip_rounds(v, 4)
        return v[0] ^ v[1] ^ v[2] ^ v[3]

    return hashed


def _sip_rounds(v: list[_Words], rounds: int) -> None:
    for _ in range(rounds):
        for a, b, c, d, left, right in ((0, 1, 2, 3, 13, 16), (2, 1, 0, 3, 17, 21)):
            v[a] = v[a] + v[b]
            v[b] = _rotate(v[b], 64 - left) ^ v[a]
            v[c] = v[c] + v[d]
            v[d] = _rotate(v[d], 64 - right) ^ v[c]
            if a == 0:
                v[0] = _rotate(v[0], 32)
            else:
                v[2] = _rotate(v[2], 32)


def crossed(columns: Sequence[np.ndarray], key: int = _DECAF) -> _Words:
    """Returns the hash of the values at the same index of several columns: integers, or hashes of strings."""
    with np.errstate(over="ignore"):
        total = np.full(np.shape(columns[0]), np.uint64(key))
        for column in columns:
            total = total ^ _MURMUR
            total = (total ^ _mix(column.astype(np.uint64) * _MURMUR) * _MURMUR) * _MURMUR
            total = _mix(_mix(total) * _MURMUR)
    return total
