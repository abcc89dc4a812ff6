"""What tensor parallelism splits, where a pipeline is cut, and what both refuse; no processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from evenstep.distributed.parameter_slices import ParameterSlice, cuts
from evenstep.distributed.world import World
from evenstep.errors import PlanError, TaskError
from evenstep.mesh import arrange, take_sizes
from evenstep.pipeline_balance import balanced
from evenstep.pipeline_schedule import bubble_share, chunks_of, most_held, order_of, simulated_bubble
from evenstep.plan import Plan, ScheduleName
from evenstep.strategies.pipeline_cut import find_cut
from evenstep.strategies.split_backward import SplitBackward
from evenstep.strategies.tensor_plan import SplitPlan, plan_of
from evenstep.strategy_facts import STRATEGIES
from evenstep.tasks.digits import DigitNet
from evenstep.training.precision import Precision
from evenstep.training.step import reads_late
from evenstep.training.team import Team
from evenstep.verify.configurations import with_mesh
from evenstep.verify.verdict_table import Configuration
from tests.small_tasks import Encoder, Gated, Tied, decayed_loss, mlp, tied_loss, vectors

HALF = World(0, 1, (torch.device("cpu"),), ranks_per_replica=2)
BATCH = vectors(6, torch.Generator().manual_seed(0))


def mean(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def planned(model: nn.Module, loss: Callable[..., Any] = mean) -> SplitPlan:
    return plan_of(model, HALF, lambda copy: loss(copy, BATCH))


def test_gates_are_split_and_a_packed_linear_stays_whole() -> None:
    plan = planned(Gated())
    assert plan.pairs == [(("gate", "up"), "down")]
    assert plan.dropouts == {"dropout": "gate"}
    assert set(plan.whole) == {"packed", "out"}


def test_attention_and_the_pair_of_an_encoder_are_split() -> None:
    tokens = torch.randint(0, 11, (3, 8))
    plan = plan_of(Encoder(), HALF, lambda model: model(tokens).sum())
    assert plan.attentions == [f"encoder.layers.{layer}.self_attn" for layer in range(2)]
    assert plan.pairs == [
        ((f"encoder.layers.{layer}.linear1",), f"encoder.layers.{layer}.linear2") for layer in range(2)
    ]


def test_weights_that_are_shared_or_used_outside_stay_whole() -> None:
    assert planned(mlp(), decayed_loss).pairs == []
    assert planned(Tied(), tied_loss).pairs == []


def test_without_a_sample_a_sequential_is_read() -> None:
    model = nn.Sequential(
        nn.Linear(4, 8), nn.GELU(), nn.Dropout(0.1), nn.Linear(8, 4), nn.LayerNorm(4), nn.Linear(4, 2)
    )
    plan = plan_of(model, HALF, None)
    assert (plan.pairs, plan.dropouts) == ([(("0",), "3")], {"2": "0"})


class Between(nn.Module):
    """Something between two Linears that ranks with parts of them would compute wrongly."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.one, self.two, self.three = nn.Linear(20, 16), nn.Linear(16, 16), nn.Linear(16, 5)
        self.gate, self.scale = nn.Linear(20, 1), nn.Parameter(torch.ones(1))
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("factor", torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        between = {
            "scale": lambda one: one * self.scale,
            "computed": lambda one: one * self.scale.exp(),
            "gate": lambda one: one * self.gate(x).sigmoid(),
            "dropout": self.dropout,
            "buffer": lambda one: one * self.factor,
        }
        hidden = self.two(between[self.what](torch.tanh(self.one(x))))
        # Dropout here gets whole outputs; elsewhere, it is not used.
        return self.three(self.dropout(hidden).softmax(-1) if self.what == "dropout" else hidden.softmax(-1))


@pytest.mark.parametrize("what", ["scale", "computed", "gate", "dropout"])
def test_what_would_be_computed_from_parts_stays_whole(what: str) -> None:
    assert planned(Between(what)).pairs == []
    assert planned(Between("buffer")).pairs == [(("one",), "two")]


def test_a_sequential_is_read_with_its_repetitions_and_hooks() -> None:
    softmax, dropout = nn.Softmax(-1), nn.Dropout(0.1)
    again = nn.Sequential(nn.Linear(4, 8), softmax, nn.Linear(8, 8), softmax, nn.Linear(8, 2))
    shared = nn.Sequential(nn.Linear(4, 8), dropout, nn.Linear(8, 8), dropout, nn.Softmax(-1), nn.Linear(8, 2))
    hooked = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    hooked[1].register_forward_hook(lambda _, __, out: out / out.sum())
    for model in (again, shared, hooked):
        assert plan_of(model, HALF, None).pairs == []


def test_losses_of_split_models_are_not_read_late() -> None:
    gpu = (torch.device("cuda"),)
    whole, split = (World(0, 2, gpu, ranks_per_replica=num) for num in (1, 2))
    assert [reads_late(as_team(world), []) for world in (whole, split)] == [True, False]


def as_team(world: World) -> Team:
    return Team(world, "tensor", Precision("fp32", torch.device("cpu")), 0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"gaet": "colwise"}, "has 'gaet', and no layer has that name"),
        ({"gate": "colwise", "up": "sideways"}, "'sideways', which evenstep does not know"),
        ({"gate": "colwise"}, "splits gate by columns, and nothing beside it by rows"),
        ({"dropout": "colwise"}, "splits dropout, a Dropout; nn.Linear alone is split"),
    ],
)
def test_a_plan_of_the_model_is_checked(given: dict[str, str], message: str) -> None:
    model = Gated()
    model._tp_plan = given
    with pytest.raises(TaskError, match=message):
        planned(model)


def test_a_plan_of_the_model_is_used() -> None:
    model = Gated()
    model._tp_plan = {"gate": "colwise", "up": "colwise", "down": "rowwise"}
    assert planned(model).pairs == [(("gate", "up"), "down")]


class Blocks(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.blocks = nn.ModuleList(nn.Linear(20, 20) for _ in range(4))
        self.out = nn.Linear(20, 5)
        if what == "tied":
            self.blocks[3].weight = self.blocks[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x)) if self.what == "between" else block(x)
        return self.out(x)


def twice(model: nn.Module, batch: Any) -> torch.Tensor:
    return mean(model, batch) + model(-batch[0]).mean()


@pytest.mark.parametrize(
    ("model", "loss", "message"),
    [
        (Blocks("tied"), mean, "weight is used in several parts of the model, as tied weights are"),
        (Blocks("between"), mean, "something is computed between two of its blocks"),
        (Blocks(""), twice, "the loss calls the model more than once"),
        (Blocks(""), decayed_loss, "is used outside of forward"),
        (nn.Linear(20, 5), mean, "this model has no such list;\nput its layers into one nn.Sequential"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused(model: nn.Module, loss: Callable[..., Any], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        find_cut(model, HALF, lambda copy: loss(copy, BATCH))


def test_a_list_that_is_too_short_is_refused_with_what_helps() -> None:
    four = replace(HALF, size=4, ranks_per_replica=4, schedule="interleaved")
    with pytest.raises(TaskError, match=r"has 4;\nuse --pipeline-schedule 1f1b, .*, or use --stages 2"):
        find_cut(Blocks(""), four, lambda copy: mean(copy, BATCH))
    with pytest.raises(TaskError, match="the longest list of this model has 4;\nuse --stages 4"):
        find_cut(Blocks(""), replace(HALF, size=8, ranks_per_replica=8), lambda copy: mean(copy, BATCH))
    # Five ranks cannot be divided into fewer stages.
    with pytest.raises(TaskError, match="the longest list of this model has 4;\nput its layers"):
        find_cut(Blocks(""), replace(HALF, size=5, ranks_per_replica=5), lambda copy: mean(copy, BATCH))


def test_chunks_of_a_rank_are_not_adjacent() -> None:
    cut = find_cut(Blocks(""), replace(HALF, schedule="interleaved"), lambda copy: mean(copy, BATCH))
    assert cut.stage_of == [0, 1, 2, 3]
    assert [cut.owners[f"blocks.{index}.weight"] for index in range(4)] == [0, 1, 0, 1]


def test_the_built_in_digits_can_be_cut() -> None:
    images = torch.zeros(2, 8, 8, dtype=torch.uint8)
    cut = find_cut(DigitNet(), HALF, lambda model: model(images).sum())
    assert cut.blocks[0] == "conv1"
    assert {cut.owners["conv1.weight"], cut.owners["output.weight"]} == {0, 1}


def test_zero_bubble_refuses_activation_checkpointing() -> None:
    plan = Plan(strategy="pipeline", devices=("cpu", "cpu"), batch=8, steps=1)
    with pytest.raises(PlanError, match="each layer would compute its whole block again; use 1f1b"):
        replace(plan, pipeline_schedule="zero-bubble", checkpoint_activations=True)


def test_a_model_is_cut_between_blocks() -> None:
    cut = find_cut(Blocks(""), HALF, lambda copy: mean(copy, BATCH))
    assert cut.blocks == [f"blocks.{index}" for index in range(4)]
    assert (cut.stage_of[0], cut.stage_of[-1], cut.owners["out.weight"]) == (0, 1, 1)
    assert cut.stage_of == sorted(cut.stage_of)


@pytest.mark.parametrize("num", [1, 2, 3, 7, 12])
@pytest.mark.parametrize("schedule", get_args(ScheduleName))
def test_each_micro_batch_goes_forward_and_back_once_in_order(num: int, schedule: str) -> None:
    for rank in range(4):
        steps = list(order_of(schedule, 4, rank, num))
        for chunk in range(chunks_of(schedule)):
            for name in ("forward", "backward", *["weights"] * (schedule == "zero-bubble")):
                done = [one.micro_batch for one in steps if (one.name, one.chunk) == (name, chunk)]
                assert done == list(range(num))
        held = {"gpipe": num, "1f1b": min(num, 4 - rank), "zero-bubble": min(num, 4)}
        assert most_held(schedule, 4, rank, num) == held.get(schedule, most_held(schedule, 4, rank, num))


@pytest.mark.parametrize("schedule", get_args(ScheduleName))
def test_no_rank_waits_forever_and_the_bubble_is_as_small_as_it_can_be(schedule: str) -> None:
    parts = {"interleaved": 2, "zero-bubble": 3}.get(schedule, 1)
    for stages in (2, 3, 4, 7):
        for num in range(stages, 3 * stages + 2):
            share = (stages - 1) / (parts * num + stages - 1)
            assert simulated_bubble(schedule, stages, num) == pytest.approx(share)
            assert bubble_share(schedule, stages, num) == share
        fewer = [bubble_share(schedule, stages, num) for num in range(1, stages)]
        assert all(0 < one < 1 for one in fewer)


@pytest.mark.parametrize("schedule", get_args(ScheduleName))
@pytest.mark.parametrize("step", [1, -1])
def test_messages_are_read_in_the_order_in_which_they_are_sent(schedule: str, step: int) -> None:
    stages, num = 3, 8
    name, last = ("forward", chunks_of(schedule) * stages - 1) if step > 0 else ("backward", 0)
    for rank in range(stages):
        sent = [
            (one.chunk * stages + rank, one.micro_batch)
            for one in order_of(schedule, stages, rank, num)
            if one.name == name
        ]
        to = (rank + step) % stages
        read = [
            (one.chunk * stages + to, one.micro_batch)
            for one in order_of(schedule, stages, to, num)
            if one.name == name
        ]
        expected = [(stage + step, micro_batch) for stage, micro_batch in sent if stage != last]
        assert [one for one in read if 0 <= one[0] - step < chunks_of(schedule) * stages] == expected


class Mixed(nn.Module):
    """Weights that a split backward must find: used once, twice, frozen, beside the path, and not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.1, batch_first=True)
        self.twice, self.frozen, self.unused = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(2, 2)
        self.beside = nn.Parameter(torch.ones(8))
        self.frozen.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(torch.tanh(self.twice(self.twice(self.attention(x)))) + self.beside.exp())


@pytest.mark.parametrize("is_mixed", [False, True])
def test_a_backward_in_two_halves_gives_the_same_bits(is_mixed: bool) -> None:
    model, gradient = nn.Sequential(Mixed(), Mixed()), torch.randn(3, 5, 8)
    data = torch.randn(3, 5, 8)

    def gradients(splits: bool) -> list[torch.Tensor | None]:
        model.zero_grad()
        received = data.clone().requires_grad_()
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16, enabled=is_mixed):
            output = model(received)
        if splits:
            half = SplitBackward(output, received)
            half.of_inputs(gradient.to(output.dtype))
            # What was received has its gradient, of the weights those alone that are used twice.
            assert received.grad is not None
            assert {name for name, one in model.named_parameters() if one.grad is not None} == {
                f"{block}.twice.{name}" for block in range(2) for name in ("weight", "bias")
            }
            half.of_weights()
        else:
            output.backward(gradient.to(output.dtype))
        return [received.grad, *(weight.grad for weight in model.parameters())]

    for whole, split in zip(gradients(False), gradients(True), strict=True):
        assert (whole is None and split is None) or torch.equal(whole, split)


def test_a_backward_in_two_halves_where_nothing_leads_back() -> None:
    layer, received = nn.Linear(4, 2), torch.randn(3, 4, requires_grad=True)
    half = SplitBackward(layer(received.detach()), received)
    half.of_inputs(torch.ones(3, 2))
    half.of_weights()
    assert received.grad is None
    assert torch.equal(layer.bias.grad, torch.full((2,), 3.0))


class ScaledInPlace(torch.autograd.Function):
    """As fused losses do: the gradients are made in forward, and scaled in place in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.gradients = weight.detach().clone(), x.detach().clone()
        return (x * weight).sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        return tuple(one.mul_(gradient) for one in ctx.gradients)


@pytest.mark.parametrize("kind", ["a hook on an activation", "a backward in Python"])
def test_a_backward_in_two_halves_changes_no_gradient_twice(kind: str) -> None:
    def gradients(splits: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        first, last, weight = nn.Linear(4, 4), nn.Linear(4, 1), nn.Parameter(torch.randn(3, 4))
        received = torch.randn(3, 4, requires_grad=True)
        hidden = first(received)
        if kind == "a backward in Python":
            output = ScaledInPlace.apply(hidden, weight)
        else:
            hidden.register_hook(lambda gradient: gradient * 0.5)
            output = (last(hidden.tanh()) * weight).sum()
        if splits:
            half = SplitBackward(output, received)
            half.of_inputs(torch.tensor(0.25))
            half.of_weights()
        else:
            output.backward(torch.tensor(0.25))
        return [received.grad, first.weight.grad, weight.grad]

    for whole, split in zip(gradients(False), gradients(True), strict=True):
        assert torch.equal(whole, split)


def test_blocks_are_balanced() -> None:
    assert balanced([1.0] * 40, 4) == [index // 10 for index in range(40)]
    assert balanced([5, 1, 1, 1], 2) == [0, 1, 1, 1]


@pytest.mark.parametrize(("dim", "unit", "blocks"), [(0, 1, 1), (1, 2, 1), (0, 2, 3)])
def test_slices_of_all_ranks_are_the_whole(dim: int, unit: int, blocks: int) -> None:
    whole = torch.randn(12, 10)
    size = whole.shape[dim] // blocks
    found = []
    for rank in range(2):
        ranks = World(rank, 2, (torch.device("cpu"),))
        found.append(ParameterSlice(ranks, tuple(whole.shape), dim, unit, blocks).take(whole).chunk(blocks, dim))
    joined = torch.cat([part for of_block in zip(*found, strict=True) for part in of_block], dim)
    assert torch.equal(joined, whole)
    assert sum(map(len, cuts(size, 2, unit))) == size


def test_a_mesh_is_arranged_and_checked() -> None:
    facts = STRATEGIES["tensor"]
    assert str(arrange("tensor=2", facts, 8)) == "data=4,tensor=2"
    assert str(arrange("data=2", facts, 8)) == "data=2,tensor=4"
    for text, message in {
        "tensor=3": "is for a multiple of 3 ranks, and there are 8",
        "data=2,tensor=2": "is for 4 ranks, and there are 8",
        "tensor=2,tensor=2": "is not an axis and its size",
        "pipeline=2": "the axes of tensor are data, fsdp and tensor",
        "tensor=0": "is not an axis and its size",
    }.items():
        with pytest.raises(PlanError, match=message):
            arrange(text, facts, 8)
    for text, expected in {"fsdp=2": "data=1,fsdp=2,tensor=4", "fsdp=2,tensor=2": "data=2,fsdp=2,tensor=2"}.items():
        arranged = arrange(text, facts, 8)
        assert arranged is not None
        assert (str(arranged), arranged.num_shards) == (expected, 2)
    with pytest.raises(PlanError, match="ddp has one axis alone"):
        Plan(batch=8, steps=1, strategy="ddp", devices=("cpu",) * 2, mesh="tensor=2")


def test_a_mesh_of_one_axis_fits_any_number_of_machines() -> None:
    given = {"machines": "1:3", "rendezvous": "node0:29400", "devices": ("cpu",) * 2}
    assert Plan(batch=8, steps=1, strategy="fsdp", mesh="fsdp=2", **given).num_shards == 2
    assert Plan(batch=8, steps=1, strategy="tensor", **given).num_replicas == 1


def test_the_shards_of_a_copy_are_an_axis_that_changes_no_samples() -> None:
    facts = STRATEGIES["fsdp"]
    assert arrange(None, facts, 4) is None
    arranged = arrange("fsdp=2", facts, 8)
    assert arranged is not None
    assert (str(arranged), arranged.num_shards, arranged.ranks_per_replica) == ("data=4,fsdp=2", 2, 1)


def test_a_mesh_goes_to_the_strategies_that_have_its_axes() -> None:
    configs = [Configuration(name, ("cpu",) * 4) for name in ("ddp", "fsdp", "tensor")]
    assert [one.mesh for one in with_mesh(configs, "fsdp=2")] == [None, "fsdp=2", None]
    assert [one.mesh for one in with_mesh(configs, "tensor=2")] == [None, None, "tensor=2"]
    assert [one.mesh for one in with_mesh(configs, "data=2")] == [None, "data=2", "data=2"]
    assert [one.mesh for one in with_mesh(configs, "fsdp=2,tensor=2")] == [None, None, "fsdp=2,tensor=2"]
    with pytest.raises(PlanError, match="for strategies with these axes; name one: --strategies pipeline"):
        with_mesh(configs, "pipeline=2")
    with pytest.raises(PlanError, match="the stages of a pipeline are not sharded"):
        with_mesh([Configuration("pipeline", ("cpu",) * 4)], "fsdp=2,pipeline=2")


def test_shards_and_stages_are_a_mesh() -> None:
    choices: dict[str, Any] = {"shards": 2, "stages": None, "strategy": None}
    take_sizes(choices)
    assert choices == {"strategy": "tensor", "mesh": "tensor=2"}
    with pytest.raises(PlanError, match="--stages is for --strategy pipeline, and tensor was given"):
        take_sizes({"stages": 2, "strategy": "tensor"})
    with pytest.raises(PlanError, match="--shards 2 is --mesh tensor=2; give one of them"):
        take_sizes({"shards": 2, "mesh": "tensor=2"})


def test_a_batch_is_divided_by_replicas_not_by_ranks() -> None:
    plan = Plan(batch=8, steps=1, strategy="pipeline", devices=("cpu",) * 4, mesh="pipeline=2", accumulate=4)
    assert (plan.num_replicas, plan.num_parts) == (2, 2)
    with pytest.raises(PlanError, match="too small for 2 replicas x 5 micro-batches; use --batch 10 or more"):
        Plan(batch=8, steps=1, strategy="pipeline", devices=("cpu",) * 4, mesh="pipeline=2", accumulate=5)
