"""What torchrun's variables say, as Kubeflow Trainer and JobSets set them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from evenstep.errors import BadInput
from evenstep.launcher.rendezvous.pods import ElasticNode, find_elastic_node
from evenstep.launcher.variables import elastic_variables
from tests.pure.conftest import Ended

# As set by Kubeflow Trainer 2.3 in the second pod of two.
POD = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "mine-node-0-0.mine",
    "PET_MASTER_PORT": "29500",
    "JOB_COMPLETION_INDEX": "1",
}


def found(**changes: str) -> ElasticNode | None:
    return find_elastic_node(elastic_variables({**POD, **changes}))


def test_a_pod_of_a_trainjob_knows_its_place() -> None:
    assert found() == ElasticNode("2", 1, "4", "mine-node-0-0.mine:29500")
    node = found(PET_NODE_RANK="0")
    assert node is not None
    assert (node.has_several, node.is_head) == (True, True)


def test_a_pod_of_an_indexed_job_takes_its_index_for_the_rank() -> None:
    node = found(PET_NODE_RANK="")
    assert node is not None
    assert (node.rank, node.is_head) == (1, False)


def test_without_either_the_address_decides_which_machine_is_the_first() -> None:
    node = found(PET_NODE_RANK="", JOB_COMPLETION_INDEX="")
    assert node is not None
    assert node.is_head is None


def test_a_single_pod_needs_no_address() -> None:
    node = found(PET_NNODES="1", PET_NODE_RANK="0", PET_MASTER_ADDR="")
    assert node is not None
    assert not node.has_several


@pytest.mark.parametrize("environment", [{}, {"PET_NNODES": ""}, {"JOB_COMPLETION_INDEX": "3"}])
def test_elsewhere_there_is_no_node(environment: dict[str, str]) -> None:
    assert find_elastic_node(elastic_variables(environment)) is None


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("PET_NNODES", "two", "the variable PET_NNODES is 'two'"),
        ("PET_NPROC_PER_NODE", "0", "the variable PET_NPROC_PER_NODE is '0'"),
        ("PET_NODE_RANK", "2", "the variable PET_NODE_RANK is 2 and PET_NNODES is 2: ranks go from 0 to 1"),
        ("PET_MASTER_PORT", "70000", "the variable PET_MASTER_PORT is '70000'"),
        ("PET_MASTER_ADDR", "", "PET_NNODES is 2, and PET_MASTER_ADDR is not set"),
    ],
)
def test_what_makes_no_sense_is_refused(name: str, text: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        found(**{name: text})


def test_the_command_refuses_it_before_anything_starts(
    evenstep: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PET_NNODES", "2")
    for command in (["train", "digits"], ["run", __file__]):
        ended = evenstep(*command)
        assert (ended.code, "PET_MASTER_ADDR is not set" in ended.err) == (2, True), ended
