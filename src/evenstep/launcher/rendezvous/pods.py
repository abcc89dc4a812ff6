"""torchrun's variables `PET_*`, detected from the environment: pods of a TrainJob or JobSet join into one run."""

from __future__ import annotations

from dataclasses import dataclass

from evenstep.errors import BadInput
from evenstep.launcher.variables import ElasticVariables, elastic_variables
from evenstep.plan import parse_machines


@dataclass(frozen=True)
class ElasticNode:
    """One pod, or machine, of those that are started with the same variables."""

    machines: str
    """`2`, or the least and the most, as `1:4`."""
    rank: int | None
    """None where only the address tells which one is the first."""
    processes: str
    """A number, or `auto`, `gpu` or `cpu`; empty if it is not set."""
    rendezvous: str

    @property
    def has_several(self) -> bool:
        """Whether there may be other machines."""
        return parse_machines(self.machines)[1] > 1

    @property
    def is_head(self) -> bool | None:
        return None if self.rank is None else self.rank == 0


def find_elastic_node(given: ElasticVariables | None = None) -> ElasticNode | None:
    """The node that this process was started as; None without PET_NNODES."""
    given = given or elastic_variables()
    if not given.PET_NNODES:
        return None
    most = parse_machines(given.PET_NNODES)[1]
    is_named = given.PET_NODE_RANK is not None
    rank = given.PET_NODE_RANK if is_named else given.JOB_COMPLETION_INDEX
    if rank is not None and rank >= most:
        name = "PET_NODE_RANK" if is_named else "JOB_COMPLETION_INDEX"
        raise BadInput(
            f"the variable {name} is {rank} and PET_NNODES is {given.PET_NNODES}: ranks go from 0 to {most - 1}; "
            "correct or unset both"
        )
    if most > 1 and not given.PET_MASTER_ADDR:
        raise BadInput(
            f"the variable PET_NNODES is {given.PET_NNODES}, and PET_MASTER_ADDR is not set; set it to the address of "
            "the first machine, on all of them, or unset PET_NNODES"
        )
    where = f"{given.PET_MASTER_ADDR}:{given.PET_MASTER_PORT}"
    return ElasticNode(given.PET_NNODES, rank, given.PET_NPROC_PER_NODE, where)
