"""Which part of a global batch each replica gets: equal shares, or given ones; every sample once."""

from __future__ import annotations

from itertools import accumulate as accumulate_sums


def share(num: int, replica: int, num_replicas: int) -> range:
    """The contiguous share of `num` samples that one replica gets; the sizes of shares differ by at most one.

    >>> [len(share(10, replica, 3)) for replica in range(3)]
    [4, 3, 3]
    """
    size, extra = divmod(num, num_replicas)
    start = replica * size + min(replica, extra)
    return range(start, start + size + (replica < extra))


Shares = tuple[int, ...]
"""What each replica gets of every global batch, as a proportion."""


def in_proportion(num: int, shares: Shares) -> list[range]:
    """The contiguous shares of `num` samples in these proportions, by largest remainder; equal ones give `share`.

    >>> [len(own) for own in in_proportion(64, (5, 3))], [len(own) for own in in_proportion(10, (1, 1, 1))]
    ([40, 24], [4, 3, 3])
    """
    total = sum(shares)
    sizes = [num * one // total for one in shares]
    by_remainder = sorted(range(len(shares)), key=lambda replica: -(num * shares[replica] % total))
    for replica in by_remainder[: num - sum(sizes)]:
        sizes[replica] += 1
    starts = accumulate_sums(sizes, initial=0)
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=False)]


def enough_for_all(shares: Shares, each: int = 1) -> int:
    """A number of samples from which on every replica gets at least `each`."""
    return -(-each * sum(shares) // min(shares))


def smallest_micro_batch(num: int, shares: Shares, accumulate: int) -> int:
    """The size of the smallest micro-batch of a global batch; a replica without samples still runs one.

    >>> smallest_micro_batch(65, (1, 1), 1), smallest_micro_batch(65, (1, 1), 10), smallest_micro_batch(1, (1, 1), 1)
    (32, 3, 1)
    """
    sizes = [len(own) for own in in_proportion(num, shares)]
    return max(1, min(sizes) // min(accumulate, max(sizes)))
