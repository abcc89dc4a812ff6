"""The parts of verify that need no training: cutting up, noise, limits, words, and what is seen of the user's code."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.utils.data import DataLoader

from evenstep.checkpoint import files
from evenstep.errors import PlanError, TrainingError
from evenstep.plan import Plan
from evenstep.record import FILE
from evenstep.verify import recorder
from evenstep.verify.causes import Case, _config_not_repeated, by_rank, find_cause, gathered, loss, problems_of
from evenstep.verify.configurations import configs_of, usual_on
from evenstep.verify.differences import COARSE, FINE, STEP, Differ, Difference, differs, first_beyond, saved_as_trained
from evenstep.verify.one_batch import SUBSETS, CutUp, Outcome, Rounding, Workbench, cut_up
from evenstep.verify.recorder import (
    MOST_ELEMENTS,
    MOST_TRIED,
    STRENGTH,
    DowncastDetector,
    DrawDetector,
    Evidence,
    Failure,
    fewer,
    perturbed,
    sampled,
)
from evenstep.verify.run_configurations import Budget, OutOfTime, Runs
from evenstep.verify.task_experiments import plain
from evenstep.verify.tolerance import NOT_COMPARED, PerturbedLimit, RoundingLimit, exact, parts_of
from evenstep.verify.verdict_table import Configuration, PartVerdict, Verdict, lines, table
from evenstep.verify.verify_strategies import ConfigurationCheck, Depth, judged, settled
from tests.small_tasks import small_task

VALUES = [torch.tensor([1.0, 2.0, 4.0]), torch.tensor([3.0, 3.5]), torch.tensor([0.5, 9.0, 2.0, 7.0])]
TOKENS = [torch.tensor([5.0, 1.0, 1.0]), torch.tensor([2.0, 2.0]), torch.tensor([1.0, 3.0, 1.0, 4.0])]


def joined(parts: list[torch.Tensor], chosen: Sequence[int]) -> torch.Tensor:
    return torch.cat([parts[part] for part in chosen]).double()


def cut(value: Callable[[Sequence[int]], float], **gradients: Callable[[Sequence[int]], torch.Tensor]) -> CutUp:
    """Three parts of 3, 2 and 4 samples, cut up by what some of them give."""
    given = {chosen: Outcome(value(chosen), {name: of(chosen) for name, of in gradients.items()}) for chosen in SUBSETS}
    return cut_up(given, [3, 2, 4], Rounding(1e-9, 1e-8, 1e-6))


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def mean(chosen: Sequence[int]) -> float:
    return float(joined(VALUES, chosen).mean())


def token_mean(chosen: Sequence[int]) -> float:
    tokens = joined(TOKENS, chosen)
    return float((joined(VALUES, chosen) * tokens).sum() / tokens.sum())


def test_a_mean_over_samples_is_sound() -> None:
    found = cut(mean, w=lambda chosen: vector(1.0, mean(chosen)))
    assert (found.kind, found.unlike) == ("sound", ())


def test_a_sum_over_samples_is_found() -> None:
    assert cut(lambda chosen: float(joined(VALUES, chosen).sum())).kind == "sum"


def test_a_mean_over_tokens_is_found_with_its_factor() -> None:
    found = cut(token_mean)
    assert found.kind == "weighted"
    # 7, 4 and 9 of 20 tokens, in 3, 2 and 4 of 9 samples: the second part is furthest off.
    assert found.factor == pytest.approx((4 / 20) / (2 / 9))


def test_a_mean_over_tokens_that_all_have_the_same_loss_is_found_by_its_gradients() -> None:
    found = cut(lambda chosen: math.log(50), w=lambda chosen: vector(1.0, token_mean(chosen)))
    assert found.kind == "weighted"
    assert found.factor == pytest.approx((4 / 20) / (2 / 9))


def test_samples_that_depend_on_each_other_are_found() -> None:
    assert cut(lambda chosen: float(joined(VALUES, chosen).var())).kind == "mixed"


def test_gradients_that_do_not_add_up_where_the_loss_does_are_named() -> None:
    found = cut(
        mean,
        fine=lambda chosen: vector(mean(chosen)),
        spoilt=lambda chosen: vector(1.0, mean(chosen)) / math.hypot(1.0, mean(chosen)),
    )
    assert (found.kind, found.unlike) == ("sound", ("spoilt",))


def test_a_gradient_that_only_a_part_has_does_not_add_up() -> None:
    given = {chosen: Outcome(1.0, {"w": torch.ones(3).double()} if chosen == (0,) else {}) for chosen in SUBSETS}
    assert cut_up(given, [3, 2, 4], Rounding(1e-9, 1e-8, 1e-6)).unlike == ("w",)


def test_what_rounding_moves_is_no_difference() -> None:
    given = {chosen: Outcome(1.0, {"w": torch.tensor([1e-7 * len(chosen)])}) for chosen in SUBSETS}
    assert cut_up(given, [3, 2, 4], Rounding(1e-6, 1e-5, 1e-3)).unlike == ("w",)
    assert cut_up(given, [3, 2, 4], Rounding(1e-6, 1e-5, 1e-3, moved={"w": 1e-6})).unlike == ()


def test_a_part_without_a_number_is_no_mean_of_anything() -> None:
    assert cut(lambda chosen: math.nan if chosen == (1,) else 1.0).kind == "mixed"


# Noise


def write_run(name: str, *steps: dict[str, torch.Tensor] | None, begin: int = 0, **more: Any) -> Evidence:
    """A run as a watched one leaves it: a step that is None was not taken; `more` are losses, evaluations and facts."""
    folder = Path(name)
    (folder / "witness").mkdir(parents=True)
    for number, tensors in enumerate(steps, begin + 1):
        if tensors is not None:
            save_file(tensors, folder / "witness" / f"step-{number:08d}.safetensors")
    facts = {"dropout": False, "narrow": None, "parameters": ["w"], "passing": [], "aliases": {}}
    (folder / "witness" / "facts.json").write_text(json.dumps(facts | more.get("facts", {})))
    plan = Plan(batch=2, steps=len(steps)).to_json()
    rows: list[dict[str, Any]] = [{"kind": "start", "plan": plan, "machine": {}, "data": {"step": begin}}]
    for number, loss_value in enumerate(more.get("losses", [1.0] * len(steps)), begin + 1):
        step = {"step": number, "epoch": 0, "loss": loss_value, "samples": 2, "count": 2, "seconds": 1}
        rows.append({"kind": "step", "lr": 0.1, "peak_bytes": {}, "input_seconds": 0, **step})
    for values in more.get("evaluations", []):
        rows.append({"kind": "evaluation", "step": begin + 1, "epoch": 0, "samples": 8, "seconds": 1, **values})
    (folder / FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Evidence(folder)


def trained(gradient: object, weight: object, **more: object) -> dict[str, torch.Tensor]:
    """One step of the parameter w; `optimizer__w__m=` is `optimizer/w/m`."""
    values = {"gradient/w": gradient, "weight/w": weight}
    values |= {name.replace("__", "/"): value for name, value in more.items()}
    return {name: torch.as_tensor(value) for name, value in values.items()}


def sizes(one: Evidence, other: Evidence) -> dict[tuple[str, str], float]:
    """The last difference of each thing."""
    return {(each.part, each.name): each.size for each in Differ(FINE).all(one, other)}


def test_a_weight_whose_gradient_is_noise_is_not_judged() -> None:
    """Adam makes full steps of it, in whichever direction the noise pointed."""
    one = write_run("one", trained([1.0, 1e-18], [2.0, 0.001]))
    other = write_run("other", trained([1.0, -1e-18], [2.0, -0.001]))
    differ = Differ(FINE)
    assert max(found.size for found in differ.all(one, other)) < 1e-9
    assert differ.silent == []


def test_a_state_of_another_shape_is_judged_unless_all_of_the_gradient_is_noise() -> None:
    for second, expected in ((1.0, 0.5), (1e-18, 0.0)):
        gradient = [1e-18, second]
        runs = [
            write_run(f"{number}-{second}", trained(gradient, [1.0, 1.0], gradient__b=[1.0], optimizer__w__row=[row]))
            for number, row in enumerate((1.0, 2.0))
        ]
        assert sizes(*runs)["optimizer", "w/row"] == expected


def test_the_digits_of_a_type_excuse_a_scalar_of_the_optimizer_alone() -> None:
    for shape, expected in (((), 0.0), ((2,), 2**-6)):
        one, other = (torch.full(shape, value, dtype=torch.bfloat16) for value in (1.0, 1 - 2**-6))
        runs = [
            write_run(f"{number}-{len(shape)}", trained([1.0, 1.0], [1.0, 1.0], optimizer__w__m=state))
            for number, state in enumerate((one, other))
        ]
        assert sizes(*runs)["optimizer", "w/m"] == expected


def test_a_weight_with_a_gradient_is_judged() -> None:
    one = write_run("one", trained([1.0, 0.5], [2.0, 0.001]))
    other = write_run("other", trained([1.0, 0.5], [2.0, -0.001]))
    found = sizes(one, other)
    assert found["weights", "w"] == pytest.approx(0.001)
    assert found["gradients", "w"] == found["loss", "loss"] == 0


def test_a_gradient_that_is_missing_is_as_good_as_zeros_and_nothing_else() -> None:
    bare = write_run("bare", {"weight/w": torch.ones(2)})
    for name, gradient, size in (("zeros", 0.0, 0.0), ("ones", 1.0, math.inf)):
        assert sizes(write_run(name, trained([gradient] * 2, [1.0] * 2)), bare)["gradients", "w"] == size


def test_a_number_that_sums_up_a_weight_of_noise_is_not_judged() -> None:
    """Adafactor keeps the root mean square of a weight: a key's bias is moved by noise alone."""
    largest = {"gradient/v": torch.tensor([1.0])}
    one, other = (
        write_run(name, trained([noise, 1e-18], [noise, 0.0], optimizer__w__RMS=size) | largest)
        for name, noise, size in (("one", 1e-18, 0.5), ("other", -1e-18, 0.7))
    )
    assert sizes(one, other)["optimizer", "w/RMS"] == 0
    sound, spoilt = (
        write_run(name, trained([1.0, 0.5], [1.0, 1.0], optimizer__w__RMS=size))
        for name, size in (("sound", 0.5), ("spoilt", 0.7))
    )
    assert sizes(sound, spoilt)["optimizer", "w/RMS"] == pytest.approx(0.2 / 0.7)


def test_a_float32_beside_float64_weights_agrees_as_far_as_its_digits_go() -> None:
    """NAdam's product, say."""
    product = torch.tensor(0.4)
    runs = [
        write_run(name, trained([1.0], [1.0], optimizer__w__mu=value))
        for name, value in (("one", product), ("next", product.nextafter(torch.tensor(1.0))), ("far", product * 1.001))
    ]
    assert sizes(runs[0], runs[1])["optimizer", "w/mu"] == 0
    assert sizes(runs[0], runs[2])["optimizer", "w/mu"] == pytest.approx(0.001, rel=0.01)


def test_complex_numbers_are_compared_as_two() -> None:
    one, other = torch.tensor([1 + 1j, 2 - 1j]), torch.tensor([1 + 1j, 2 - 1.5j])
    runs = [write_run(name, sampled("weight/w", value)) for name, value in (("one", one), ("other", other))]
    assert sizes(*runs)["weights", "w"] == pytest.approx(0.25)


# What must never be lost in a comparison


def test_a_step_that_one_run_alone_took_is_a_difference_and_ends_the_comparison() -> None:
    """fp16's scaler skips some."""
    step = trained([1.0], [1.0])
    whole, skipped = write_run("whole", step, step), write_run("skipped", None, step)
    assert sizes(whole, skipped)["optimizer", STEP] == math.inf
    assert ("weights", "w") not in sizes(whole, skipped)
    also_skipped = write_run("also", None, step)
    assert set(sizes(skipped, also_skipped).values()) == {0.0}


def test_a_run_that_goes_on_from_a_checkpoint_is_compared_from_there() -> None:
    step = trained([1.0], [1.0])
    whole, resumed = write_run("whole", step, step), write_run("resumed", step, begin=1)
    assert {found.step for found in Differ(FINE).all(whole, resumed)} == {2}
    assert sizes(whole, write_run("short", step))["optimizer", STEP] == math.inf


def test_no_number_on_one_side_is_an_infinite_difference_and_on_both_sides_none() -> None:
    nan, norm = math.nan, "norm/gradient/w"
    sound = trained([1.0, 2.0], [1.0]) | {norm: torch.tensor(2.0)}
    spoilt = sound | {norm: torch.tensor(nan)}
    one = write_run("one", sound, losses=[1.0])
    assert sizes(one, write_run("norm", spoilt, losses=[1.0]))["gradients", "w"] == math.inf
    assert sizes(write_run("first", spoilt, losses=[1.0]), one)["gradients", "w"] == math.inf
    no_loss = write_run("loss", sound, losses=[nan])
    assert sizes(one, no_loss)["loss", "loss"] == sizes(no_loss, one)["loss", "loss"] == math.inf
    assert sizes(no_loss, write_run("loss2", sound, losses=[nan]))["loss", "loss"] == 0
    element = write_run("element", trained([nan, 2.0], [1.0]))
    assert sizes(write_run("full", trained([1.0, 2.0], [1.0])), element)["gradients", "w"] == math.inf
    assert sizes(element, write_run("element2", trained([nan, 2.0], [1.0])))["gradients", "w"] == 0


def test_a_mask_hides_no_difference_of_another_buffer() -> None:
    least = torch.finfo(torch.float32).min
    one, other = (
        write_run(name, trained([1.0], [1.0], buffer__mask=[least, 0.0], buffer__bn_running_mean=[mean]))
        for name, mean in (("one", 0.5), ("other", 0.25))
    )
    assert sizes(one, other)["weights", "bn_running_mean"] == pytest.approx(0.5)


def test_a_running_mean_of_noise_is_measured_in_deviations() -> None:
    one, other = (
        write_run(name, trained([1.0], [1.0], **{"buffer__b.running_mean": [mean], "buffer__b.running_var": [0.9]}))
        for name, mean in (("one", 1e-17), ("other", -1e-17))
    )
    assert sizes(one, other)["weights", "b.running_mean"] < 1e-9


@pytest.mark.parametrize(
    ("tensors", "state", "size"),
    [
        (trained([1.0], [1.0]), 0.5, math.inf),
        (trained([1.0], [1.0]), 0.0, 0.0),
        ({"weight/w": torch.ones(1)}, 0.5, 0.0),
    ],
    ids=["lost", "zeros", "no-gradient"],
)
def test_optimizer_state_is_missing_only_where_nothing_was_learned(
    tensors: dict[str, torch.Tensor], state: float, size: float
) -> None:
    whole = write_run("whole", trained([1.0], [1.0], optimizer__w__m=[state]))
    assert sizes(whole, write_run("bare", tensors))["optimizer", "w/m"] == size


@pytest.mark.parametrize(
    ("evaluations", "name"),
    [
        ([], "outcome (only one of them has one)"),
        ([{"values": {"loss": 1.0}}], "accuracy"),
        ([{"values": {"loss": 1.0, "accuracy": 0.5, "f1": 1.0}}], "f1"),
        ([{"values": {"loss": 1.0, "accuracy": 0.5}, "samples": 9}], "number of samples"),
        ([{"values": {"loss": math.nan, "accuracy": 0.5}}], "loss"),
    ],
    ids=["evaluation", "metric", "more-metrics", "samples", "nan"],
)
def test_what_an_evaluation_lacks_is_an_infinite_difference(evaluations: list[Any], name: str) -> None:
    step = trained([1.0], [1.0])
    one = write_run("one", step, evaluations=[{"values": {"loss": 1.0, "accuracy": 0.5}}])
    found = sizes(one, write_run("other", step, evaluations=evaluations))
    assert found["evaluation", name] == math.inf
    assert first_beyond([Difference("evaluation", 1, name, math.inf)], RoundingLimit([], "fp32")) is not None


@pytest.mark.parametrize(
    ("weights", "moments", "lost"),
    [
        ({"w": [1.0], "tied": [1.0], "seen": [math.nan]}, {"w/m": [2.0]}, []),
        ({"w": [1.0], "tied": [1.0]}, {"w/m": [2.0]}, ["seen"]),
        ({"w": [1.0], "tied": [1.0], "seen": [0.0]}, {"w/m": [2.0]}, ["seen"]),
        ({"w": [1.0], "tied": [1.0], "seen": [math.nan]}, {}, ["w/m"]),
        ({"w": [1.0], "tied": [1.0], "seen": [math.nan], "more": [1.0]}, {"w/m": [2.0]}, ["more"]),
    ],
    ids=["whole", "buffer", "nan", "state", "more"],
)
def test_a_checkpoint_holds_all_that_was_trained_and_nothing_else(
    weights: dict[str, Any], moments: dict[str, Any], lost: list[str]
) -> None:
    tensors = trained([1.0], [1.0], buffer__seen=[math.nan], buffer__cache=[5.0], optimizer__w__m=[2.0])
    run = write_run("run", tensors, facts={"passing": ["cache"], "aliases": {"tied": "w"}})
    run.checkpoint(1).mkdir(parents=True)
    for file, values in ((files.WEIGHTS, weights), (files.OPTIMIZER, moments)):
        save_file({name: torch.tensor(value) for name, value in values.items()}, run.checkpoint(1) / file)
    assert [one.name for one in saved_as_trained(run, 1) if one.size > 0] == lost


class Stepper:
    """An optimizer that learns nothing; torch's own import seconds of other things first."""

    def __init__(self) -> None:
        self.param_groups: list[dict[str, Any]] = []
        self.state: dict[Any, Any] = {}
        self.hooks: list[Any] = []
        self.register_step_pre_hook = self.register_step_post_hook = self.hooks.append

    def step(self) -> None:
        for hook in self.hooks:
            hook()


def test_a_watched_step_is_numbered_by_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that the scaler skips never reaches the optimizer."""
    monkeypatch.setattr(recorder, "DropoutOff", lambda: SimpleNamespace(in_layers=lambda model: model, was_used=False))
    watch = recorder.Watch(Plan(batch=2, steps=3), Path("witness"))
    task = watch.over(replace(small_task("mlp/sgd/mean"), optimizer=lambda parameters: Stepper()), "own")  # type: ignore
    model = task.model()
    optimizer = task.optimizer(model)
    for step in (1, 2, 3):
        for weight in model.parameters():
            weight.grad = torch.ones_like(weight)
        if step != 2:
            optimizer.step()
        watch.write(step)
    watch.finish()
    assert Evidence(Path(".")).steps == [1, 3]
    assert Evidence(Path(".")).facts["passing"] == []


def test_runs_are_the_same_only_if_all_about_them_is(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(None, Path("runs"), 4)  # type: ignore[arg-type]
    made: list[Path] = []

    def run(self: Runs, folder: Path, *_: object) -> Evidence:
        folder.mkdir(parents=True)
        made.append(folder)
        return Evidence(folder)

    monkeypatch.setattr(Runs, "_run", run)
    here, there = Configuration("ddp", ("cuda:0", "cuda:0")), Configuration("ddp", ("cuda:0", "cuda:1"))
    for config in (here, there, here):
        runs.watched(config, "fp64")
        runs.watched(config, "fp64", is_saved=True)
        runs.watched(config, "fp64", sync_batchnorm=True)
        runs.watched(config, "fp64", again="again", resume="a")
        runs.watched(config, "fp64", again="again", resume="b")
    assert len(made) == len(set(made)) == 10
    assert made[0].name == "ddp-cuda-0-2-fp64"
    assert made[5].name == "ddp-cuda-0-cuda-1-fp64"


def of(part: str, name: str, step: int = 1) -> Difference:
    return Difference(part, step, name, 0.0)


def test_rounding_of_the_task_itself_is_the_yardstick() -> None:
    noise = [Difference("gradients", 1, "a", 1e-4), Difference("gradients", 1, "b", 1e-6)]
    limit = RoundingLimit(noise, "fp32")
    assert limit(of("gradients", "a")) == pytest.approx(3e-3)
    assert limit(of("gradients", "b")) == pytest.approx(1e-3)
    assert limit(of("weights", "a")) == 1e-5
    assert limit(of("samples", "samples")) == 0
    assert limit(of("checkpoint", "a")) == pytest.approx(3e-3)
    assert limit(of("evaluation", "accuracy")) == NOT_COMPARED
    loose = RoundingLimit([*noise, Difference("evaluation", 1, "accuracy", 0.5)], "fp32")
    assert loose(of("checkpoint", "accuracy")) == limit(of("checkpoint", "accuracy"))


def test_without_a_yardstick_the_rule_of_thumb_counts() -> None:
    assert RoundingLimit([], "fp16")(of("gradients", "a")) == 5e-2
    assert RoundingLimit([Difference("optimizer", 1, STEP, math.inf)], "fp16")(of("gradients", "a")) == 5e-2


# Rounding that jumps


def test_how_far_one_device_is_moved_until_a_step_is_the_limit_of_that_step() -> None:
    limit = PerturbedLimit(RoundingLimit([], "fp32"))
    limit.add([Difference("gradients", 3, "a", 0.01), Difference("optimizer", 3, STEP, math.inf)])
    limit.add([Difference("gradients", 4, "a", 0.005)])
    assert limit.num_tried == 2
    assert limit(of("gradients", "a", step=2)) == 1e-4
    assert limit(of("gradients", "a", step=3)) == limit(of("gradients", "a", step=4)) == pytest.approx(0.02)
    assert limit(of("checkpoint", "a", step=3)) == pytest.approx(0.02)
    assert limit(of("gradients", "b", step=3)) == limit(of("weights", "a", step=3)) == 1e-4
    assert limit(of("samples", "samples")) == 0


class FakeRuns:
    """PerturbedLimit runs, made before; remembers which were asked for."""

    def __init__(self, *runs: Evidence | Failure) -> None:
        self._runs = runs
        self.asked: list[int] = []
        self.most = MOST_TRIED

    def watched(self, config: Configuration, precision: str, *, perturbation: int) -> Evidence | Failure:
        assert (config.label, precision) == ("single", "fp32")
        if len(self.asked) == self.most:
            raise OutOfTime
        self.asked.append(perturbation)
        return self._runs[(perturbation - 1) % len(self._runs)]


def eased(runs: FakeRuns, reference: Evidence, run: Evidence) -> tuple[bool, list[str]]:
    """Whether it passes, and what is said about it."""
    runs.base = SimpleNamespace(plan=reference.record.plan)  # type: ignore[attr-defined]
    judge = ConfigurationCheck(runs, runs, Configuration("ddp", ("cpu", "cpu")), Depth())  # type: ignore[arg-type]
    judge._is_rough = True
    found = Differ(COARSE).all(reference, run)
    return first_beyond(found, judge._eased(RoundingLimit([], "fp32"), found, reference)) is None, judge._notes


def test_a_way_that_is_off_as_far_as_one_device_that_was_disturbed_passes() -> None:
    still, moved = trained([1.0, 1.0], [2.0]), trained([1.0, 1.1], [2.0])
    reference, run = write_run("one", still, still), write_run("other", still, moved)
    calm, jumping = write_run("calm", still, still), write_run("jumping", still, moved)
    runs = FakeRuns(calm, jumping, calm)
    passes, (note,) = eased(runs, reference, run)
    assert passes
    assert runs.asked == [1, 2]
    assert note.startswith("in fp32, from step 2 on, the gradient of w differs by 9.09 %: rounding flips")


def test_a_way_that_is_off_where_one_device_is_not_moved_does_not_pass() -> None:
    still, moved = trained([1.0, 1.0], [2.0]), trained([1.0, 1.1], [2.0])
    reference, run = write_run("one", still, still), write_run("other", moved, moved)
    runs = FakeRuns(write_run("later", still, moved))
    assert eased(runs, reference, run) == (False, [])
    assert runs.asked == list(range(1, MOST_TRIED + 1))
    assert eased(FakeRuns(Failure("no room")), reference, run) == (False, [])
    runs = FakeRuns(write_run("still", still, still))
    runs.most = 2
    assert eased(runs, reference, run) == (False, [])
    assert runs.asked == [1, 2]


def test_nothing_is_disturbed_where_all_is_rounding_or_something_is_missing() -> None:
    still = trained([1.0], [2.0])
    reference, runs = write_run("one", still), FakeRuns()
    assert eased(runs, reference, write_run("same", still)) == (True, [])
    assert eased(runs, reference, write_run("spoilt", trained([math.nan], [2.0]))) == (False, [])
    assert runs.asked == []


def test_a_disturbed_model_is_off_by_next_to_nothing_and_nothing_else_is_drawn() -> None:
    def model(change: Callable[[torch.nn.Module], torch.nn.Module]) -> tuple[torch.Tensor, float]:
        torch.manual_seed(0)
        made = change(torch.nn.Linear(50, 50))
        return made.weight.detach(), float(torch.rand(()))

    (plain_one, drawn), (first, also_drawn) = model(lambda made: made), model(lambda made: perturbed(made, 1))
    assert drawn == also_drawn
    off = ((first - plain_one) / plain_one).abs()
    assert 0.9 * STRENGTH < float(off.max()) < 1.1 * STRENGTH
    assert torch.equal(first, model(lambda made: perturbed(made, 1))[0])
    assert not torch.equal(first, model(lambda made: perturbed(made, 2))[0])
    narrow = torch.nn.Linear(50, 50).bfloat16()
    before = narrow.weight.detach().clone()
    assert 0.1 < float((perturbed(narrow, 1).weight != before).float().mean()) < 0.9


# What is seen


def test_sees_who_draws_and_where() -> None:
    seen = DrawDetector()
    with seen.watching():
        torch.rand(2)
        random.random()
    assert seen.generators == ["Python's", "torch's"]
    assert len(seen.lines) == 2
    assert seen.lines[0].endswith("torch.rand(2)")
    with seen.watching():
        torch.ones(2).sum()
        np.random.rand()
    assert seen.generators == ["NumPy's"]


def test_a_complex_parameter_is_known_to_have_few_digits() -> None:
    seen = DowncastDetector()
    seen.check_parameters(torch.nn.Linear(2, 2))
    assert seen.line is None
    seen.check_parameters(torch.nn.Linear(2, 2, dtype=torch.complex64))
    assert seen.line == "the parameter weight is complex64"


def test_sees_a_float64_made_narrower_and_no_other_cast() -> None:
    seen = DowncastDetector()
    with seen:
        torch.zeros(2).double() + torch.arange(2).float()
    assert seen.line is None
    with seen:
        torch.zeros(2, dtype=torch.float64).float()
    assert seen.line is not None
    assert seen.line.endswith("torch.zeros(2, dtype=torch.float64).float()")


def test_keeps_a_part_of_a_large_tensor_and_its_norm() -> None:
    small, large = torch.ones(3), torch.ones(3 * MOST_ELEMENTS)
    assert sampled("a", small).keys() == {"a"}
    kept = sampled("a", large)
    assert kept["a"].numel() == MOST_ELEMENTS
    assert float(kept["norm/a"]) == pytest.approx(math.sqrt(3 * MOST_ELEMENTS))


@pytest.mark.parametrize(
    "data",
    [
        (torch.arange(9), np.arange(9)),
        {"x": torch.arange(9)},
        torch.arange(9),
        DataLoader(torch.utils.data.TensorDataset(torch.arange(9)), 3),
    ],
    ids=["tuple", "dict", "tensor", "loader"],
)
def test_evaluates_on_the_first_samples_alone(data: object) -> None:
    few = fewer(data, 4)
    if isinstance(few, DataLoader):
        assert len(few.dataset) == 4
        return
    columns = list(few.values()) if isinstance(few, dict) else list(few) if isinstance(few, tuple) else [few]
    assert [len(column) for column in columns] == [4] * len(columns)


@pytest.mark.parametrize(
    ("column", "is_alike"),
    [
        (lambda ids: torch.where(ids > 2, math.nan, ids.double()), True),
        (lambda ids: torch.tensor([len(ids)]), True),
        (lambda ids: ids - ids[0], False),
    ],
    ids=["nan", "of-the-batch", "by-place"],
)
def test_samples_are_laid_side_by_side_with_those_of_theparts_of(column: Any, is_alike: bool) -> None:
    ids = torch.arange(6)
    bench = SimpleNamespace(
        thirds=lambda: list(ids.split(2)), data=lambda part=None: (column(ids if part is None else part), ids[:1])
    )
    assert Workbench.is_cut_alike(bench) is is_alike  # type: ignore[arg-type]


# Words


def test_a_mean_of_means_is_explained_with_its_factor() -> None:
    found = {"cut": {"kind": "weighted", "whole": 1.0, "by_parts": 1.2, "factor": 1.31, "sizes": [5, 4, 7]}}
    cause = loss(found)
    assert cause is not None
    assert "one part of the batch weighs 1.31 times as much as its samples do" in cause.sentence
    assert cause.evidence == ("one batch in parts of 5 + 4 + 7: loss 1 as a whole, 1.2 from its parts",)


def test_gathering_is_named_only_where_the_parts_of_a_batch_clearly_give_another_loss() -> None:
    """A router's loss is a thousandth of all: that the ranks' loss is one device's says nothing there."""
    cut = {"kind": "mixed", "whole": 2.5, "by_parts": 1.5, "sizes": [5, 4, 7], "unlike": [], "has_slope": None}
    cause = gathered({"cut": cut}, loss_limit=1e-4)
    assert cause is not None
    assert cause.name == "gather"
    assert gathered({"cut": cut | {"by_parts": 2.5001}}, loss_limit=1e-4) is None
    assert gathered({"cut": cut | {"kind": "weighted"}}, loss_limit=1e-4) is None


def test_ranks_that_compute_the_same_are_no_cause() -> None:
    found = {"settings": [{"lr": 0.1}], "batch": {"data": "a", "loss": 1.0, "gradients": {"w": 2.0}}}
    assert by_rank(found, [found, found], "ddp x 2", is_rough=False) is None
    assert by_rank(found, [], "dp x 2", is_rough=False) is None
    assert by_rank({}, [found], "ddp x 2", is_rough=False) is None


def test_a_rank_whose_test_failed_is_no_cause_but_is_told_of() -> None:
    found = {"settings": [{"lr": 0.1}], "batch": {"data": "a", "loss": 1.0, "gradients": {"w": 2.0}}}
    failed = {"settings": None, "batch": None, "problems": {"batch": "RuntimeError: no"}}
    assert by_rank(found, [found, failed], "ddp x 2", is_rough=False) is None
    assert problems_of(found, [found, failed]) == ("could not be tested on rank 1: batch (RuntimeError: no)",)
    assert problems_of({"failure": "no room"}, []) == ("the task could not be analysed: no room",)


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ([{"betas": [0.9, 0.99]}], "betas depends on the rank or the world size: [0.9, 0.999] on single"),
        ([{"betas": [0.9, 0.999]}] * 2, "number of groups depends on the rank or the world size: 1 on single"),
        ([{"betas": [0.9, 0.999], "nesterov": True}], "nesterov depends on the rank or the world size: None"),
    ],
    ids=["tuple", "groups", "name"],
)
def test_settings_that_depend_on_the_rank_are_found(groups: list[Any], words: str) -> None:
    cause = by_rank({"settings": [{"betas": [0.9, 0.999]}]}, [{"settings": groups}], "ddp x 2", is_rough=False)
    assert cause is not None
    assert words in cause.sentence


def test_settings_are_told_as_json_can_hold_them() -> None:
    assert plain((0.9, torch.tensor(0.5))) == [0.9, 0.5]
    assert plain(None) is None
    assert plain(object()) == "object"


def test_says_step_tensor_and_size() -> None:
    sentence = differs("ddp x 2", Difference("gradients", 3, "head.bias", 0.125), "fp64")
    assert sentence == ("ddp x 2 does not match single: at step 3, the gradient of head.bias differs by 12.5 % (fp64)")


def test_a_step_that_one_alone_took_is_told_as_such() -> None:
    sentence = differs("ddp x 2", Difference("optimizer", 3, STEP, math.inf), "fp16")
    assert sentence == "ddp x 2 does not match single: only one of them took step 3 (fp16)"


def test_a_repeat_that_fails_is_told_as_such() -> None:
    run = write_run("one", trained([1.0], [1.0]))
    runs = SimpleNamespace(watched=lambda *_, **__: Failure("no room"))
    case = Case(runs, Configuration("ddp", ("cpu", "cpu")), "fp32", run, run, exact)  # type: ignore[arg-type]
    cause = _config_not_repeated(case)
    assert cause is not None
    assert cause.name == "not-repeatable"
    assert cause.evidence[0] == "ddp x 2, run twice, fails: no room"
    assert case.compare(run, run).agrees


def test_a_search_that_takes_too_long_names_no_cause() -> None:
    budget = Budget(seconds=0.0)
    runs = Runs(None, Path("runs"), 4, budget=budget)  # type: ignore[arg-type]
    run = write_run("one", trained([1.0], [1.0]))
    case = Case(runs, Configuration("ddp", ("cpu", "cpu")), "fp32", run, run, exact)
    with pytest.raises(OutOfTime):
        runs.watched(case.config, "fp32")
    cause = find_cause(case, None)
    assert (cause.name, cause.sentence) == (
        "unknown",
        "the cause was not found: the time for the search ran out",
    )
    failed = find_cause(case, Failure("rank 0 failed\nIndexError"))
    assert (failed.name, failed.sentence, failed.advice) == ("failed", "rank 0 failed", "IndexError")


@pytest.mark.parametrize(("skips", "name"), [(True, "draws"), (False, "failed")])
def test_draws_make_a_way_fail_only_where_they_leave_parameters_out(skips: bool, name: str) -> None:
    seen = {"generators": ["torch's"], "places": [], "apart": 1.0, "by_itself": 0.0, "skips": skips}
    runs = SimpleNamespace(examined=lambda *_: [{"draws": seen}])
    run = write_run("one", trained([1.0], [1.0]))
    case = Case(runs, Configuration("dp", ("cpu", "cpu")), "fp32", run, None, exact)  # type: ignore[arg-type]
    assert find_cause(case, Failure("no progress for 30 s")).name == name


def test_what_was_tested_before_names_the_cause_though_time_is_up() -> None:
    def watched(*_: object, **__: object) -> Evidence:
        raise OutOfTime

    cut = {"kind": "sum", "whole": 3.0, "by_parts": 1.0, "sizes": [5, 4, 7]}
    runs = SimpleNamespace(examined=lambda *_: [{"cut": cut}], watched=watched)
    run = write_run("one", trained([1.0], [1.0]))
    case = Case(runs, Configuration("dp", ("cpu", "cpu")), "fp32", run, run, exact, frozenset([of("loss", "loss")]))  # type: ignore[arg-type]
    assert find_cause(case, None).name == "sum"


def test_a_way_stands_still_for_as_long_as_one_device_makes_likely() -> None:
    runs, config = Runs(None, Path("runs"), 4), Configuration("fsdp", ("cpu", "cpu"))  # type: ignore[arg-type]
    assert runs._patience(config) is None
    runs._made[Configuration("single", ("cpu",)), "fp64"] = write_run("one", trained([1.0], [1.0]))
    assert runs._patience(config) == 30.0
    assert runs._patience(Configuration("single", ("cpu",))) is None


def test_a_failure_is_told_without_its_logs() -> None:
    assert Failure("no gradient\nuse it\nfull logs: runs/x/logs").first_lines == "no gradient\nuse it"


def test_markup_in_names_stays_text() -> None:
    verdict = Verdict(is_same=False, sentence="", parts={"loss": PartVerdict(math.inf, False)})
    (label, *_), *_ = [
        [cell.plain for cell in column.cells] for column in table({Configuration("[red]", ("cpu",)): verdict}).columns
    ]
    assert "[red]" in label
    assert verdict.to_json()["parts"]["loss"]["difference"] is None


def failing(config: Configuration, **more: str) -> Verdict:
    return Verdict(is_same=False, sentence=f"{config.label} differs", evidence=("one test",), **more)  # type: ignore[arg-type]


def test_ways_with_one_cause_get_one_paragraph() -> None:
    configs = configs_of("dp,ddp,fsdp", "2", 1)
    verdicts = {
        config: failing(config, cause="cut", why=f"single gives what {config.label} gives") for config in configs
    }
    said = [line for line, _ in lines(verdicts, configs, 16, 1.0)]
    assert said[:6] == [
        "",
        "dp x 2 differs.",
        "ddp x 2 differs.",
        "fsdp x 2 differs.",
        "  why: single gives what each of them gives.",
        "  tested: one test",
    ]
    verdicts[configs[1]] = failing(configs[1], cause="rank", why="it depends on the rank")
    said = [line for line, _ in lines(verdicts, configs, 16, 1.0)]
    assert [line for line in said if "why" in line] == [
        "  why: single gives what each of them gives.",
        "  why: it depends on the rank.",
    ]


def test_who_cannot_see_the_whole_batch_is_sent_to_a_way_that_can() -> None:
    dp, ddp = configs_of("dp,ddp", "2", 1)
    dependent = failing(dp, cause="batch-dependent", advice="or single.")
    passed = Verdict(is_same=True, sentence="")
    found = settled({dp: dependent, ddp: passed})
    assert found[dp].advice == "Use ddp x 2: there the loss sees the whole batch and matches single."
    assert found[ddp] == passed
    assert settled({dp: dependent}) == {dp: dependent}


def test_a_part_that_was_not_judged_has_no_tick() -> None:
    found = [Difference("evaluation", 1, "accuracy", 0.5), Difference("loss", 1, "loss", 1e-9)]
    parts = parts_of(found, RoundingLimit([], "fp32"))
    assert parts["evaluation"] == PartVerdict(None, True)
    assert parts["loss"] == PartVerdict(1e-9, True)
    missing = [Difference("evaluation", 1, "accuracy", math.inf)]
    assert parts_of(missing, RoundingLimit([], "fp32"))["evaluation"] == PartVerdict(math.inf, False)


def test_verdicts_that_were_reached_are_kept_when_a_later_way_cannot_be_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def verdict(judge: ConfigurationCheck) -> Verdict:
        if judge._config.strategy == "fsdp":
            raise TrainingError("single itself does not run")
        return Verdict(is_same=True, sentence="")

    monkeypatch.setattr(ConfigurationCheck, "verdict", verdict)
    configs = configs_of("ddp,fsdp", "2", 1)
    base = SimpleNamespace(plan=Plan(batch=2, steps=1))
    reached = []
    with pytest.raises(TrainingError, match="does not run"):
        for config, _ in judged(base, configs, Path("runs"), Depth()):  # type: ignore[arg-type]
            reached.append(config.label)
    assert reached == ["ddp x 2"]
    said = [line for line, _ in lines({configs[0]: Verdict(is_same=True, sentence="")}, configs, 16, 1.0)]
    assert said[-2:] == ["1 of 2 strategies were checked: all match single (batch 16, 1 s)", "not checked: fsdp x 2"]


def test_a_plan_that_is_refused_is_bad_input_and_no_difference(evenstep: Callable[..., Any]) -> None:
    ended = evenstep("verify", "digits", "--batch", "1", "--devices", "cpu,cpu")
    assert ended.code == 2
    assert ended.err.count("a global batch of 1 is too small for 2 devices") == 1
    assert not Path("runs").exists()


def test_fsdp_is_not_looked_at_by_itself_where_processes_share_a_gpu() -> None:
    assert usual_on(("cuda:0", "cuda:0")) == ["dp", "ddp"]
    assert usual_on(("cuda:0", "cuda:1")) == usual_on(("cpu", "cpu")) == ["dp", "ddp", "fsdp"]


def test_ways_are_every_strategy_on_every_number_of_devices() -> None:
    assert [config.label for config in configs_of("ddp, fsdp", "2,3", 1)] == [
        "ddp x 2",
        "fsdp x 2",
        "ddp x 3",
        "fsdp x 3",
    ]
    assert configs_of("single,dp", "cpu,cpu", 2) == [
        Configuration("single", ("cpu",), 2),
        Configuration("dp", ("cpu", "cpu"), 2),
    ]
    with pytest.raises(PlanError, match="unknown strategy"):
        configs_of("", None, 1)
    with pytest.raises(PlanError, match="is the reference that others are compared with"):
        configs_of("single", "2", 1)


# The command


def test_bad_input_is_refused_before_anything_is_started(evenstep: Any) -> None:
    done = evenstep("verify", "digits", "--strategies", "dpp")
    assert done.code == 2
    assert "unknown strategy 'dpp'; choose from single, dp, ddp, fsdp" in done.err
    assert not Path("runs").exists()


@pytest.mark.parametrize("as_json", [False, True], ids=["table", "json"])
def test_what_is_known_is_said_before_the_error_that_ends_it(
    evenstep: Any, monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    def judged(prepared: object, configs: list[Configuration], *_: object) -> Iterator[tuple[Configuration, Verdict]]:
        yield configs[0], Verdict(is_same=True, sentence="the same", parts={"loss": PartVerdict(1e-16, True)})
        raise TrainingError("single itself does not run, so there is nothing to compare with:\nno room")

    monkeypatch.setattr("evenstep.verify.judged", judged)
    task = f"{Path(__file__).parents[1] / 'process' / 'mistakes' / 'planted.py'}:sound"
    done = evenstep("verify", task, "--strategies", "ddp,fsdp", "--devices", "2", *["--json"] * as_json)
    assert done.code == 1
    assert "single itself does not run" in done.err
    if as_json:
        said = json.loads(done.out)
        assert (said["is_same"], [config["way"] for config in said["ways"]]) == (False, ["ddp x 2"])
    else:
        assert "1 of 2 strategies were checked: all match single" in done.out
        assert "not checked: fsdp x 2" in done.out
    assert not Path("runs").exists()
