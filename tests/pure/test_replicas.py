"""The checksum sees every bit of every kind of tensor, and the message names what differs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from evenstep.distributed.world import World
from evenstep.monitor.replica_check import ReplicaCheck, checksums, combined, differing

KINDS = {
    "fp32": torch.arange(6.0).reshape(2, 3),
    "odd fp32": torch.arange(5.0),
    "fp64": torch.arange(3.0, dtype=torch.float64),
    "bf16": torch.arange(8.0, dtype=torch.bfloat16),
    "odd fp16": torch.arange(3.0, dtype=torch.float16),
    "fp8": torch.arange(3.0).to(torch.float8_e4m3fn),
    "complex": torch.arange(3.0) * 1j,
    "complex128": torch.ones(2, dtype=torch.complex128),
    "bool": torch.tensor([True, False, True]),
    "one number": torch.tensor(3.0),
    "turned": torch.arange(6.0).reshape(2, 3).t(),
    "a slice": torch.arange(9.0)[1:],
    "channels last": torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
    "repeated": torch.ones(1).expand(4),
}


@pytest.mark.parametrize("kind", KINDS)
def test_one_flipped_bit_changes_the_sum(kind: str) -> None:
    tensor = KINDS[kind]
    before = checksums([tensor])
    assert before == checksums([tensor])
    changed = tensor.clone(memory_format=torch.contiguous_format)
    changed.view(-1)[-1:].view(torch.uint8)[0] ^= 1
    same_order = torch.empty_like(tensor).copy_(changed) if kind != "repeated" else changed
    assert before != checksums([same_order])


def test_parameters_and_empty_tensors_have_one_too() -> None:
    assert checksums([]) == []
    assert checksums([torch.empty(0), nn.Parameter(torch.zeros(2)), torch.empty(0, 3, dtype=torch.bool)]) == [0, 0, 0]


def test_opposite_drifts_do_not_cancel() -> None:
    assert combined([5, 5]) != combined([6, 4])
    assert combined([1, 2]) != combined([2, 1])
    assert -(2**63) <= combined([2**63 - 1, -(2**63)]) < 2**63


def test_the_first_differing_tensor_is_named_with_its_ranks_and_steps() -> None:
    told = [{"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 7, "c": 8}]
    message = differing(told, set(), step=300, last_equal=200)
    assert message is not None
    assert message.splitlines()[0] == (
        "replicas differ: b on rank 2 is not that of the other ranks (the first of 2 tensors that differ), seen after "
        "step 300; they were still equal at step 200."
    )
    assert "--check-every 0" in message
    assert 2 <= len(message.splitlines()) <= 5


def test_without_a_majority_rank_0_is_the_measure() -> None:
    message = differing([{"a": 1}, {"a": 2}], set(), step=100, last_equal=None)
    assert message is not None
    assert message.startswith(
        "replicas differ: a on rank 1 is not that of rank 0, seen after step 100; it is the first"
    )


def test_a_tensor_that_one_rank_lacks_differs() -> None:
    assert "b on rank 1 " in (differing([{"a": 1, "b": 2}, {"a": 1}], set(), 1, None) or "")


def test_what_training_changes_on_its_own_is_let_be() -> None:
    assert differing([{"a": 1, "b": 2}, {"a": 1, "b": 3}], {"b"}, 1, None) is None


def test_alone_there_is_nothing_to_compare() -> None:
    model = nn.Linear(2, 2)
    check = ReplicaCheck(World(0, 1, (torch.device("cpu"),)), model)
    with torch.no_grad():
        model.weight += 1
    assert check.compare(1) is None
