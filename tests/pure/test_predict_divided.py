"""Steps of models that ranks divide: timelines by hand, sums of activations, refusals, and what Records say of them."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.nn import functional as F

from evenstep.compare.layer_costs import ModelLook
from evenstep.distributed.world import World
from evenstep.errors import BadInput, TaskError
from evenstep.pipeline_schedule import StageSeconds, bubble_share, play
from evenstep.plan import Plan, ScheduleName
from evenstep.predict.calibration import activations_link, calibrate
from evenstep.predict.communication_cost import Cluster, Link, parse_link
from evenstep.predict.forecast import Forecaster, Question
from evenstep.predict.forecast_table import show_forecast
from evenstep.predict.model_division import Arrangement, BlockShare, DividedStep, ModelDivision, TensorShare
from evenstep.predict.step_model import StepParts, Workload
from evenstep.record import PARTS, Lane, Record, Step, Timeline
from evenstep.strategies.pipeline_cut import find_cut
from evenstep.strategy_facts import STRATEGIES
from evenstep.task import Task
from evenstep.verify.causes import _from_message
from evenstep.verify.recorder import Failure
from tests.pure.test_predict import ten_steps

FREE = Link(latency=0.0, bandwidth=1e15)
WORK = Workload(fixed_seconds=0.0, sample_seconds=0.001, jitter=0.0)
EIGHT = ModelDivision(
    blocks=[BlockShare(parameters=10, forward=0.125, backward=0.125, output_bytes=1000)] * 8, parameters=80
)
SCHEDULES: list[ScheduleName] = ["gpipe", "1f1b", "interleaved", "zero-bubble"]


def step(
    strategy: str, arranged: Arrangement, division: ModelDivision = EIGHT, link: Link = FREE, work: Workload = WORK
) -> StepParts:
    cluster = Cluster(per_machine=arranged.devices, inside=FREE, between=FREE)
    samples = 8.0 * arranged.replicas * arranged.accumulate
    return DividedStep(
        work=work, division=division, arranged=arranged, cluster=cluster, link=link, samples=samples
    ).parts(STRATEGIES[strategy])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("stages", "num"), [(2, 2), (2, 8), (4, 4), (4, 16)])
def test_equal_stages_and_free_links_have_the_bubble_of_the_formula(schedule: str, stages: int, num: int) -> None:
    # Forward is a third of the computing, and so is each half of backward: what the formulas take.
    parts = step("pipeline", Arrangement(ranks=stages, replicas=1, accumulate=num, schedule=schedule))
    assert parts.bubble / parts.seconds == pytest.approx(bubble_share(schedule, stages, num))
    assert parts.communication == pytest.approx(0, abs=1e-9)
    assert parts.forward + parts.backward == pytest.approx(num * 0.008 / stages)


def test_a_step_of_one_micro_batch_can_be_followed_by_hand() -> None:
    first, second = play("1f1b", 2, 1, StageSeconds([1, 1], [2, 2], [0.5]))
    # There, 1 + 0.5 + 1, and back, 2 + 0.5 + 2.
    assert (first.end, second.end) == (7.0, 4.5)
    assert (first.communication, second.communication) == (0.5, 0.5)
    assert first.busy == second.busy == 3.5


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_messages_travel_while_ranks_compute(schedule: str) -> None:
    arranged = Arrangement(ranks=2, replicas=1, accumulate=8, schedule=schedule)
    free, slow = (step("pipeline", arranged, link=Link(latency=cost, bandwidth=1e15)) for cost in (0.0, 1e-4))
    assert 0 < slow.seconds - free.seconds < 2 * 8 * 1e-4
    assert slow.forward == free.forward
    assert slow.bubble >= 0


def test_messages_of_one_direction_follow_each_other() -> None:
    # Four outputs of 3 seconds each on a link whose sender needs 1 second for each.
    first, last = play("gpipe", 2, 4, StageSeconds([1, 0], [0, 0], [3]))
    assert last.end == pytest.approx(1 + 4 * 3)
    # All forwards come first; then as many gradients go back.
    assert first.end == pytest.approx(last.end + 4 * 3)


def test_the_slowest_stage_sets_the_pace() -> None:
    blocks = [BlockShare(parameters=1, forward=share, backward=share) for share in (0.7, 0.1, 0.1, 0.1)]
    division = ModelDivision(blocks=blocks)
    assert [round(one.forward, 6) for one in division.stages(2)] == [0.7, 0.3]
    parts = step("pipeline", Arrangement(ranks=2, replicas=1, accumulate=100), division)
    assert parts.seconds == pytest.approx(100 * 0.008 * 0.7, rel=0.02)
    assert parts.bubble == pytest.approx(parts.seconds - 100 * 0.008 / 2)


def test_what_is_outside_of_blocks_belongs_to_the_first_and_the_last_stage() -> None:
    outside = BlockShare(parameters=100, forward=0.2, backward=0.1)
    blocks = [BlockShare(parameters=100, forward=0.2, backward=0.2, output_bytes=index) for index in range(4)]
    first, last = ModelDivision(blocks=blocks, before=outside).stages(2)
    assert (first.parameters, last.parameters) == (pytest.approx(3 / 5), pytest.approx(2 / 5))
    assert (first.forward, first.backward) == (pytest.approx(0.6), pytest.approx(0.5))
    assert first.output_bytes == 1


HALF = ModelDivision(tensors=[TensorShare(ranks=2, forward=0.75, backward=0.75, parameters=0.75, sums=[1000.0] * 4)])


def test_tensor_repeats_what_is_whole_and_waits_for_every_sum() -> None:
    link = Link(latency=1e-3, bandwidth=1e6)
    parts = step("tensor", Arrangement(ranks=2, replicas=1, accumulate=1), HALF, link)
    assert parts.forward + parts.backward == pytest.approx(0.75 * 0.008)
    assert parts.communication == pytest.approx(4 * link.all_reduce(2, 8000))
    assert parts.bubble == 0
    twice = step("tensor", Arrangement(ranks=2, replicas=1, accumulate=2), HALF, link)
    assert twice.communication == pytest.approx(2 * parts.communication)


def test_of_more_ranks_each_repeats_the_same_and_computes_less_of_the_rest() -> None:
    four = HALF.tensor(4)
    assert four is not None
    # Half of the model is split.
    assert four.forward == pytest.approx(0.5 + 0.5 / 4)
    assert ModelDivision(why_no_tensors={"4": "no"}, tensors=HALF.tensors).tensor(4) is None


@pytest.mark.parametrize("strategy", ["pipeline", "tensor"])
def test_replicas_average_after_backward(strategy: str) -> None:
    division = replace(HALF, blocks=EIGHT.blocks)
    work = replace(WORK, gradient_bytes=8e6)
    link = Link(latency=0.0, bandwidth=1e9)
    one, two = (
        step(strategy, Arrangement(ranks=2, replicas=num, accumulate=4), division, link, work) for num in (1, 2)
    )
    # A rank has half of the blocks, or three quarters of split layers.
    share = 0.5 if strategy == "pipeline" else 0.75
    assert two.seconds - one.seconds == pytest.approx(link.all_reduce(2, share * 8e6))
    assert two.communication > one.communication


def record(strategy: str, devices: int, parts: dict[str, float], sent_bytes: int = 0, accumulate: int = 1) -> Record:
    """A block of a comparison on CPUs, of 64 samples."""
    plan = Plan(task="t", batch=64, strategy=strategy, devices=("cpu",) * devices, steps=10, accumulate=accumulate)
    parts = dict.fromkeys(PARTS, 0.0) | parts
    seconds = sum(parts.values())
    return Record(
        plan,
        machine={"cores": 16, "threads": 1},
        measurement=ten_steps(seconds, parts, sent_bytes),
    )


SINGLE = {"forward": 0.02, "backward": 0.04}


def test_without_a_look_or_a_record_both_are_refused_with_the_next_step() -> None:
    question = Question(devices=[2], strategies=["pipeline", "tensor"])
    found = Forecaster(calibrate([record("single", 1, SINGLE)]), question).forecast()
    for name in ("pipeline", "tensor"):
        assert f"evenstep predict TASK --strategies {name}" in found.left_out[f"{name} x 2"]
    assert all(row.is_measured for row in found.rows)


def test_what_cannot_be_divided_is_refused_with_its_reason() -> None:
    division = replace(EIGHT, why_no_tensors={"2": "nothing to split"})
    calibration = calibrate([record("single", 1, SINGLE)], division=division)
    asked = Question(devices=[1, 2, 16], machines=[1], strategies=["pipeline", "tensor"])
    left_out = Forecaster(calibration, asked).forecast().left_out
    assert "it divides a model over 2 ranks or more" in left_out["pipeline x 1"]
    assert "it needs 16 blocks, and the model has 8; use fewer stages: --mesh pipeline=8" in left_out["pipeline x 16"]
    assert left_out["tensor x 2"] == "nothing to split"
    few = Forecaster(calibration, Question(devices=[2], strategies=["pipeline"], accumulate=65)).forecast()
    assert "64 samples are not 65 micro-batches" in few.left_out["pipeline x 2"]
    odd = Forecaster(calibration, Question(devices=[3], strategies=["pipeline"], mesh="pipeline=2")).forecast()
    assert "there are 3" in odd.left_out["pipeline x 3"]
    far = Forecaster(calibration, Question(devices=[4], machines=[2], strategies=["pipeline"])).forecast()
    assert "say what connects them" in far.left_out["pipeline x 4"]


def test_a_comparison_with_a_pipeline_says_what_it_sends_and_stages_are_taken_to_be_equal(tmp_path: Path) -> None:
    measured = {"forward": 0.01, "backward": 0.02, "communication": 0.002, "bubble": 0.009}
    records = [record("single", 1, SINGLE), record("pipeline", 2, measured, 64_000, accumulate=4)]
    calibration = calibrate(records)
    assert calibration.division is not None
    assert calibration.division.boundary_bytes == 1000
    question = Question(devices=[2, 4], strategies=["pipeline"], accumulate=4)
    forecaster = Forecaster(calibration, question)
    found = forecaster.forecast()
    assert [(row.devices, row.is_measured) for row in found.rows] == [(1, True), (2, True), (2, False), (4, False)]
    two, four = found.rows[2:]
    assert two.step_seconds.middle == pytest.approx(0.041)
    assert sum(four.parts.values()) == pytest.approx(four.step_seconds.middle)
    assert four.parts["bubble"] > two.parts["bubble"] > 0
    assert four.samples_per_second.high / four.samples_per_second.low > 1.5
    assert any("equal stages, since no block was timed" in note for note in found.notes)
    assert found.errors.startswith("No published table covers pipeline: its interval comes from 1 run of it here")
    paths = forecaster.write_records(tmp_path, found)
    written = Record.read(paths[-1])
    assert written.measurement is not None
    assert set(written.measurement.parts) == set(PARTS)
    assert written.measurement.parts["bubble"] == four.parts["bubble"]
    assert (written.plan.mesh, written.plan.accumulate) == ("data=1,pipeline=4", 4)


def test_a_comparison_with_tensor_says_what_is_split_and_summed() -> None:
    measured = record("tensor", 2, {"forward": 0.015, "backward": 0.03, "communication": 0.008}, 4 * 64_000)
    spans = [("activations", 0.01 * at, 0.01 * at + 0.002) for at in range(4)]
    measured.timelines.append(Timeline(step=1, lanes=[Lane(rank=0, name="network", spans=spans)]))
    calibration = calibrate([record("single", 1, SINGLE), measured])
    assert calibration.division is not None
    (share,) = calibration.division.tensors
    assert share.forward == pytest.approx(0.75)
    assert share.sums == [1000.0] * 4
    link = activations_link(calibration.divided, calibration.division, "tensor")
    assert link is not None
    assert link.all_reduce(2, 64_000) == pytest.approx(0.002)
    (four,) = Forecaster(calibration, Question(devices=[4], strategies=["tensor"])).forecast().rows[2:]
    assert four.parts["forward"] == pytest.approx(0.02 * (0.5 + 0.5 / 4))
    assert four.parts["communication"] > 0.008


def test_a_trained_pipeline_alone_is_enough_for_others_on_one_machine() -> None:
    plan = Plan(task="t", batch=64, strategy="pipeline", devices=("cpu",) * 2, steps=10, accumulate=4)
    steps = [
        Step(step=at, epoch=0, loss=1.0, count=64.0, samples=64, lr=0.1, seconds=0.05, input_seconds=0.0, peak_bytes={})
        for at in range(1, 11)
    ]
    trained = Record(plan, machine={"cores": 16, "threads": 1}, steps=steps)
    calibration = calibrate([trained])
    # 4 micro-batches of 2 stages: a fifth of 50 ms is bubble, and two ranks compute for the rest.
    assert calibration.work.compute_seconds(64) == pytest.approx(2 * 0.04)
    found = Forecaster(calibration, Question(devices=[2, 4], strategies=["pipeline"], accumulate=4)).forecast()
    assert [(row.strategy, row.devices) for row in found.rows] == [("pipeline", 2), ("pipeline", 2), ("pipeline", 4)]
    assert any("no run is on one device" in note for note in found.notes)
    far = Question(devices=[4], machines=[2], strategies=["pipeline"], links=[parse_link("25gbit")])
    left_out = Forecaster(calibration, far).forecast().left_out
    assert "the run does not show what is sent between machines" in left_out["pipeline x 4"]


def test_interleaved_chunks_send_more_often_and_each_message_costs_less() -> None:
    parts = {"forward": 0.01, "backward": 0.02, "communication": 0.012}
    measured = record("pipeline", 2, parts, 3 * 64, accumulate=4)
    costs = {}
    for schedule in ("1f1b", "interleaved"):
        plan = replace(measured.plan, pipeline_schedule=schedule)
        calibration = calibrate([record("single", 1, SINGLE), replace(measured, plan=plan)], division=EIGHT)
        link = activations_link(calibration.divided, calibration.division, "pipeline")
        assert link is not None
        costs[schedule] = link.latency + 16 * 1000 / link.bandwidth
    # 4 micro-batches there and back, over one boundary or over three, of two ranks.
    assert costs == {"1f1b": pytest.approx(0.012 / 4), "interleaved": pytest.approx(0.012 / 12)}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_mesh_of_a_record_is_not_that_of_another_strategy(strategy: str, tmp_path: Path) -> None:
    measured = record("pipeline", 2, SINGLE, 64_000, accumulate=4)
    plan = replace(measured.plan, mesh="pipeline=2", pipeline_schedule="gpipe")
    forecaster = Forecaster(calibrate([replace(measured, plan=plan)]), Question(devices=[2], strategies=[strategy]))
    (path,) = forecaster.write_records(tmp_path, forecaster.forecast())
    assert (written := Record.read(path).plan).strategy == strategy
    assert written.mesh is None


def test_records_of_a_sharded_split_model_do_not_count_as_copies_of_it() -> None:
    sharded = record("tensor", 4, {"forward": 0.015, "backward": 0.03, "communication": 0.2}, 4 * 64_000)
    sharded = replace(sharded, plan=replace(sharded.plan, mesh="fsdp=2,tensor=2"))
    calibration = calibrate([record("single", 1, SINGLE), sharded], division=HALF)
    assert calibration.divided == []
    assert any("runs with --mesh fsdp=2,tensor=2 are not used" in note for note in calibration.notes)


def test_a_trained_tensor_run_alone_says_nothing_about_one_device() -> None:
    with pytest.raises(BadInput, match="measure one too: --strategy single"):
        calibrate([record("tensor", 2, SINGLE)])


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        pairs = [nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(4)]
        self.blocks = nn.ModuleList(pairs)
        self.norm, self.last = nn.LayerNorm(16), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(self.norm(x))


def stack_task(model: type[nn.Module] = Stack) -> Task:
    x, y = torch.randn(32, 6), torch.randint(0, 3, (32,))
    return Task(
        model=model,
        train=(x, y),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch=8,
    )


def test_a_look_finds_blocks_what_they_send_and_what_is_summed() -> None:
    look = ModelLook(Plan(task="t", batch=8, steps=1), stack_task(), 8)
    found = look.blocks()
    assert len(found.blocks) == 4
    assert {one.output_bytes for one in found.blocks} == {16 * 4}
    assert [one.parameters for one in found.blocks] == [32 + 16 * 64 + 64 + 64 * 16 + 16] * 4
    assert (found.before.parameters, found.behind.parameters) == (6 * 16 + 16, 32 + 16 * 3 + 3)
    every = [found.before, *found.blocks, found.behind]
    assert sum(one.forward for one in every) == pytest.approx(1)
    assert sum(one.backward for one in every) == pytest.approx(1)
    look.tensors([2, 128], found)
    (two,) = found.tensors
    # One sum in forward and one in backward for each pair.
    assert two.sums == [16 * 4.0] * 8
    assert 0.5 < two.parameters < 0.6
    assert "nothing to split" in found.why_no_tensors["128"]


def test_a_model_without_blocks_says_why() -> None:
    found = ModelLook(Plan(task="t", batch=8, steps=1), stack_task(lambda: nn.Linear(6, 3)), 8).blocks()  # type: ignore[arg-type]
    assert "this model has no such list" in found.why_no_blocks


def test_rows_of_one_label_are_told_apart_and_only_columns_that_are_shown_are_explained() -> None:
    half = record("single", 1, SINGLE)
    half = replace(half, plan=replace(half.plan, batch=half.plan.batch // 2))
    records = [record("single", 1, SINGLE), half, record("pipeline", 2, SINGLE, 64_000, accumulate=4)]
    found = Forecaster(calibrate(records), Question(devices=[2], strategies=["pipeline"], accumulate=4)).forecast()
    assert len(set(found.labels)) == len(found.labels)
    out = io.StringIO()
    show_forecast(found, Console(file=out, width=80))
    text = out.getvalue()
    assert [text.count(f"single, batch {row.batch:.0f}") for row in found.rows[:2]] == [1, 1]
    assert ("batch  samples/s" in text, "memory:" in text, "…" in text) == (True, False, False)


class ByKeyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(input=x)
        return x


def test_a_model_that_cannot_be_cut_says_why() -> None:
    found = ModelLook(Plan(task="t", batch=8, steps=1), stack_task(ByKeyword), 8).blocks()
    assert found.why_no_blocks.startswith("pipeline cannot cut this model: blocks: its blocks take other")


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(6, 1, 8) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(len(x), len(x))
        for block in self.blocks:
            x = block(x, mask, src_key_padding_mask=None)
        return x


def test_a_refusal_names_the_argument_and_has_its_remedy_on_a_line_of_its_own() -> None:
    world = World(0, 1, (torch.device("cpu"),), ranks_per_replica=2)
    with pytest.raises(TaskError) as refused:
        find_cut(Masked(), world, lambda model: model(torch.zeros(3, 6)).sum())
    why = "its blocks take other tensors than the output of the one before (src_mask)"
    assert str(refused.value) == f"pipeline cannot cut this model: blocks: {why};\nuse fsdp, or ddp"
    shown = _from_message(Failure(str(refused.value)), ())
    assert (shown.sentence, shown.advice) == (f"pipeline cannot cut this model: blocks: {why}", "use fsdp, or ddp")


def test_a_division_is_read_as_it_was_written(tmp_path: Path) -> None:
    found = replace(EIGHT, tensors=HALF.tensors, why_no_tensors={"8": "no"})
    found.write(tmp_path)
    assert ModelDivision.beside(tmp_path) == found
    assert ModelDivision.beside(tmp_path / "none") is None
