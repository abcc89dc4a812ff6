"""Steps of models that ranks divide: how a model can be divided, as a value, and what its parts cost.

`evenstep.compare.layer_costs` makes the value by running the model once; a Record of such a run gives a rougher one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from json import dumps
from pathlib import Path
from statistics import fmean

from evenstep.mesh import arrange
from evenstep.pipeline_balance import balanced, block_costs
from evenstep.pipeline_schedule import RankTime, StageSeconds, chunks_of, play
from evenstep.predict.communication_cost import Cluster, Link
from evenstep.predict.step_model import StepParts, Workload, cores_shared, stragglers_seconds, with_ceiling
from evenstep.strategy_facts import StrategyFacts
from evenstep.typed_values import Schema

FILE = "division.json"


@dataclass(frozen=True, kw_only=True)
class BlockShare:
    """One block of a model, or what runs before the first one or behind the last one."""

    parameters: float = 0.0
    forward: float = 0.0
    """Its share of the forward of the whole model."""
    backward: float = 0.0
    output_bytes: float = 0.0
    """For each sample: what the next stage would get."""


@dataclass(frozen=True, kw_only=True)
class TensorShare:
    """What each of some ranks computes of a model whose layers are split."""

    ranks: int
    forward: float
    """Of the forward of the whole model."""
    backward: float
    parameters: float
    """The share that a rank holds and updates."""
    sums: list[float]
    """Bytes for each sample of every sum over the ranks, in forward and in backward."""


@dataclass(frozen=True, kw_only=True)
class ModelDivision:
    """How a model can be divided."""

    blocks: list[BlockShare] = field(default_factory=list)
    before: BlockShare = field(default_factory=BlockShare)
    behind: BlockShare = field(default_factory=BlockShare)
    why_no_blocks: str = ""
    tensors: list[TensorShare] = field(default_factory=list)
    why_no_tensors: dict[str, str] = field(default_factory=dict)
    """By the number of ranks."""
    parameters: float = 0.0
    """Of the whole model."""
    boundary_bytes: float | None = None
    """For each sample, where no block is known: what a Record says a rank sent."""

    def write(self, folder: Path) -> None:
        (folder / FILE).write_text(dumps(asdict(self)) + "\n")

    @classmethod
    def beside(cls, folder: Path) -> ModelDivision | None:
        """What was found when the Records of this folder were measured."""
        path = folder / FILE
        return _SCHEMA.read(path) if path.is_file() else None

    @property
    def is_equal(self) -> bool:
        """Whether stages are taken to be equal: no block was timed."""
        return not self.blocks

    def stages(self, num: int) -> list[BlockShare]:
        """The stages into which `pipeline` would cut the model, by its own rule."""
        if self.is_equal:
            share = 1 / num
            sent = self.boundary_bytes or 0.0
            return [BlockShare(parameters=share, forward=share, backward=share, output_bytes=sent)] * num
        costs = block_costs(
            [one.parameters for one in self.blocks],
            [one.forward for one in self.blocks],
            self.before.parameters,
            self.behind.parameters,
        )
        found = [[] for _ in range(num)]  # type: list[list[BlockShare]]
        for block, stage in zip(self.blocks, balanced(costs, num), strict=True):
            found[stage].append(block)
        found[0].insert(0, self.before)
        total = sum(one.parameters for of_stage in found for one in of_stage) + self.behind.parameters
        sent_bytes = [of_stage[-1].output_bytes for of_stage in found]
        found[-1].append(self.behind)
        return [
            BlockShare(
                parameters=sum(one.parameters for one in of_stage) / (total or 1.0),
                forward=sum(one.forward for one in of_stage),
                backward=sum(one.backward for one in of_stage),
                output_bytes=sent,
            )
            for of_stage, sent in zip(found, sent_bytes, strict=True)
        ]

    def tensor(self, ranks: int) -> TensorShare | None:
        """What each of these ranks has; between two numbers that were looked at, by what is split of the model."""
        exact = next((one for one in self.tensors if one.ranks == ranks), None)
        if exact is not None or not self.tensors or str(ranks) in self.why_no_tensors:
            return exact
        near = min(self.tensors, key=lambda one: abs(one.ranks - ranks))
        return replace(
            near,
            ranks=ranks,
            forward=_rescaled(near.forward, near.ranks, ranks),
            backward=_rescaled(near.backward, near.ranks, ranks),
            parameters=_rescaled(near.parameters, near.ranks, ranks),
        )


_SCHEMA: Schema[ModelDivision] = Schema(ModelDivision, "division of a model", advice="measure the task again")


def split_share(share: float, ranks: int) -> float:
    """Which part of a model is split, if each rank computes `share` of the whole.

    >>> split_share(0.625, 4), split_share(0.4, 2), split_share(1.2, 2)
    (0.5, 1.0, 0.0)
    """
    return min(1.0, max(0.0, (1 - share) / (1 - 1 / ranks)))


def _rescaled(share: float, known: int, ranks: int) -> float:
    split = split_share(share, known)
    return 1 - split + split / ranks


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """How a step is divided: ranks of a replica, replicas, micro-batches and their order."""

    ranks: int
    replicas: int
    accumulate: int
    schedule: str = "1f1b"
    shards: int = 1
    """Replicas that hold shards of what a rank has, instead of copies."""

    @classmethod
    def of(cls, strategy: StrategyFacts, devices: int, mesh: str | None, accumulate: int, schedule: str) -> Arrangement:
        found = arrange(mesh, strategy, devices)
        assert found is not None
        ranks, shards = found.ranks_per_replica, found.num_shards or 1
        return cls(ranks=ranks, replicas=devices // ranks, accumulate=accumulate, schedule=schedule, shards=shards)

    @property
    def devices(self) -> int:
        return self.ranks * self.replicas

    @property
    def in_words(self) -> str:
        replicas = f"{self.replicas:,} replicas of " if self.replicas > 1 else ""
        return f"{replicas}{self.ranks:,} ranks, {self.accumulate:,} micro-batch{'es' * (self.accumulate > 1)}"


@dataclass(frozen=True, kw_only=True)
class DividedStep:
    """One task on some devices whose ranks divide its model."""

    work: Workload
    division: ModelDivision
    arranged: Arrangement
    cluster: Cluster
    link: Link
    """Of activations inside a machine, which do not go where gradients go."""
    samples: float
    """Of the global batch."""

    def parts(self, strategy: StrategyFacts) -> StepParts:
        parts = self._pipeline() if strategy.schedules else self._tensor()
        return with_ceiling(parts, self.work, self.samples / self.cluster.machines(self.arranged.devices))

    @property
    def _sharing(self) -> float:
        return cores_shared(self.work, self.cluster.in_a_machine(self.arranged.devices))

    @property
    def _micro_batch(self) -> float:
        return self.samples / self.arranged.replicas / self.arranged.accumulate

    @property
    def _passes(self) -> tuple[float, float]:
        """Seconds of a micro-batch on one device: forward and backward."""
        computing = self.work.compute_seconds(self._micro_batch) * self._sharing
        return computing * (1 - self.work.backward), computing * self.work.backward

    def played(self) -> list[RankTime]:
        """The timeline of a pipeline's step, before replicas average."""
        arranged, (forward, backward) = self.arranged, self._passes
        stages = self.division.stages(arranged.ranks * chunks_of(arranged.schedule))
        sends = [self._send(index, one.output_bytes * self._micro_batch) for index, one in enumerate(stages[:-1])]
        forwards = [forward * one.forward for one in stages]
        backwards = [backward * one.backward for one in stages]
        return play(arranged.schedule, arranged.ranks, arranged.accumulate, StageSeconds(forwards, backwards, sends))

    def _send(self, stage: int, num_bytes: float) -> float:
        """From a stage to the next one, which may be on another machine."""
        first, second = (index % self.arranged.ranks // self.cluster.per_machine for index in (stage, stage + 1))
        link = self.link if first == second else self.cluster.between
        return link.latency + num_bytes / link.bandwidth

    def _pipeline(self) -> StepParts:
        ranks, chunks = self.played(), chunks_of(self.arranged.schedule)
        stages = self.division.stages(self.arranged.ranks * chunks)
        held = [sum(one.parameters for one in stages[rank :: self.arranged.ranks]) for rank in range(len(ranks))]
        averaging = [self._averaging(share) for share in held]
        end = max(rank.end + seconds for rank, seconds in zip(ranks, averaging, strict=True))
        sent = fmean(averaging) + fmean(rank.communication for rank in ranks)
        forward, backward = (fmean(getattr(rank, name) for rank in ranks) for name in ("forward", "backward"))
        return self._step(forward, backward, sent, max(held), bubble=end - forward - backward - sent)

    def _tensor(self) -> StepParts:
        found = self.division.tensor(self.arranged.ranks)
        assert found is not None
        num, (forward, backward) = self.arranged.accumulate, self._passes
        sums = num * self.sums_seconds(found.sums)
        return self._step(
            num * forward * found.forward,
            num * backward * found.backward,
            sums + self._averaging(found.parameters),
            found.parameters,
        )

    def sums_seconds(self, sums: Sequence[float]) -> float:
        """Of all sums of activations of one micro-batch: ranks wait for each of them."""
        inside = Cluster(per_machine=self.cluster.per_machine, inside=self.link, between=self.cluster.between)
        return sum(inside.all_reduce(self.arranged.ranks, size * self._micro_batch) for size in sums)

    def _averaging(self, held: float) -> float:
        """Gradients of a rank's part, over the ranks of other replicas with the same part, after backward."""
        arranged, cluster = self.arranged, self.cluster
        if arranged.replicas == 1 or not self.work.gradient_bytes:
            return 0.0
        num_bytes = held * self.work.gradient_bytes
        here = max(1, cluster.in_a_machine(arranged.devices) // arranged.ranks)
        machines = -(-arranged.replicas // here)
        # The ranks of a replica that are on one machine share its network.
        at_once = min(arranged.ranks, cluster.per_machine)
        inside = self.link.all_reduce(here, num_bytes) if here > 1 else 0.0
        between = cluster.between if cluster.machines(arranged.devices) > 1 else self.link
        return inside + (between.all_reduce(machines, num_bytes * at_once) if machines > 1 else 0.0)

    def _step(self, forward: float, backward: float, sent: float, held: float, bubble: float = 0.0) -> StepParts:
        optimizer = self.work.optimizer_seconds * self._sharing * held
        busy = forward + backward + optimizer
        return StepParts(
            # Every rank of a replica reads its samples.
            input=self.work.input_seconds * self.samples / self.arranged.replicas,
            forward=forward,
            backward=backward,
            communication=sent,
            handling=self.work.handling_seconds * held if self.arranged.replicas > 1 else 0.0,
            contention=0.0,
            stragglers=stragglers_seconds(self.work, busy, self.arranged.devices),
            optimizer=optimizer,
            waiting=0.0,
            bubble=bubble,
        )
