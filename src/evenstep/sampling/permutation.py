"""The order of shuffled samples: a random permutation as a pure function of its key, at any position."""

from __future__ import annotations

import numpy as np

from evenstep.sampling.rng import GOLDEN, HALF, MIX, Ids, Words

SORTED_UP_TO = 1 << 16
"""Permutations up to this length are made by sorting; longer ones are computed per position, without memory."""
_ROUNDS = 8
_WORD = 64
_INDEX = np.uint64(SORTED_UP_TO - 1)


def permuted(positions: Ids, num: int, key: tuple[int, int]) -> Ids:
    """The elements at `positions` of the random permutation of 0 to num - 1 that belongs to `key`."""
    if num <= SORTED_UP_TO:
        words = np.random.Philox(key=np.array(key, dtype=np.uint64)).random_raw(num)
        # The index is in the low bits: no two words are equal, and a plain sort is six times as fast as argsort.
        words &= ~_INDEX
        words |= np.arange(num, dtype=np.uint64)
        words.sort()
        words &= _INDEX
        return words.astype(np.int64)[positions]
    # A Feistel network permutes the numbers below a power of two; results outside the range go through it again.
    rounds = np.random.Philox(key=np.array(key, dtype=np.uint64)).random_raw(_ROUNDS)
    bits = (num - 1).bit_length()
    ids = _feistel(positions.astype(np.uint64), bits, rounds)
    outside = np.flatnonzero(ids >= num)
    while len(outside):
        ids[outside] = again = _feistel(ids[outside], bits, rounds)
        outside = outside[again >= num]
    return ids.astype(np.int64)


def _feistel(values: Words, bits: int, rounds: Words) -> Words:
    right_bits = bits // 2
    left_bits = bits - right_bits
    left = values >> np.uint64(right_bits)
    right = values & np.uint64((1 << right_bits) - 1)
    words, high = np.empty_like(values), np.empty_like(values)
    for number, key in enumerate(rounds):
        into, by, bits_ = (left, right, left_bits) if number % 2 == 0 else (right, left, right_bits)
        # rng's `_mixed` without new arrays; its last line does not change the upper half, and only that half is used.
        np.add(by, key, out=words)
        words *= GOLDEN
        words ^= np.right_shift(words, HALF, out=high)
        words *= MIX
        words >>= np.uint64(_WORD - bits_)
        into ^= words
    return (left << np.uint64(right_bits)) | right
