"""A study as values: the space in words, the rule of its rungs, suggestions as a pure function, and its file."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.errors import BadInput
from evenstep.task import Task
from evenstep.tune.scheduler import parse_metric, parse_rungs
from evenstep.tune.space import Dimension, grid, parse_search
from evenstep.tune.study import FILE, StudyLog, read_study
from evenstep.tune.study_rows import PrunerDecision, Reached, StudyRequest, SuggestedTrial, TrialFailed
from evenstep.tune.successive_halving import Study, TrialJob
from tests.marks import num_examples

SPACE = [Dimension("lr", "1e-4..1e-1:log", "float", 1e-4, 1e-1, True), Dimension("n", "1..4", "int", 1, 4)]
REQUEST = StudyRequest(
    task="my_task.py",
    space=SPACE,
    trials=12,
    rungs=[1, 3, 9],
    metric="loss:min",
    sampler="random",
    seed=0,
    slots=2,
    per_trial=1,
)


def task(
    lr: Annotated[float, "1e-4..1e-1:log"] = 0.1,
    width: int = 3,
    kind: Literal["tanh", "relu"] = "tanh",
    sizes: list[int] | None = None,
) -> Task:
    raise NotImplementedError


def test_a_space_is_plain_text() -> None:
    words = ["lr=1e-4..1e-1:log", "width=8..64", "kind", "sizes=1,2|3"]
    assert parse_search(words, task) == [
        Dimension("lr", "1e-4..1e-1:log", "float", 1e-4, 1e-1, True),
        Dimension("width", "8..64", "int", 8, 64),
        Dimension("kind", "tanh,relu", "choice", choices=("tanh", "relu")),
        Dimension("sizes", "1,2|3", "choice", choices=([1, 2], [3])),
    ]


def test_or_stands_in_the_annotations_of_the_task() -> None:
    assert [one.text for one in parse_search([], task)] == ["1e-4..1e-1:log"]
    assert [one.text for one in parse_search(["lr", "width=1,2"], task)] == ["1e-4..1e-1:log", "1,2"]


def test_an_option_is_given_or_searched() -> None:
    with pytest.raises(BadInput, match=r"lr is given \(lr=0.1\) and searched \(--search lr\); leave one of them out"):
        parse_search(["lr"], task, {"lr": "0.1"})
    with pytest.raises(BadInput, match="nothing to search: give --search"):
        parse_search([], task, {"lr": "0.1"})


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("rate=1..2", "the task has no such option; It has lr, width, kind, sizes"),
        ("wdth=1..2", "did you mean width?"),
        ("width", "has no range, and the task's annotation of width gives none; write lr=1e-4..1e-1:log"),
        ("width=1.5..2", "width is a whole number, and so are the ends of its range"),
        ("lr=1..1", "the range is empty"),
        ("lr=0..1:log", "begins above 0"),
        ("kind=1..2", "kind is no number; write choices: kind=a,b,c"),
        ("kind=tanh,gelu", "--search kind=tanh,gelu: kind is 'gelu'; choose tanh or relu$"),
        ("lr=abc", "--search lr=abc: lr is 'abc'; write a number, such as 0.1$"),
        ("width=1,1", "has a choice twice"),
        ("width=1,,2", "neither a range nor choices"),
        ("width=1..2..3", "neither a range nor choices"),
    ],
)
def test_a_search_that_makes_no_sense_is_refused(word: str, message: str) -> None:
    with pytest.raises(BadInput, match=message.replace("?", r"\?")):
        parse_search([word], task)


def test_a_task_without_options_cannot_be_searched() -> None:
    with pytest.raises(BadInput, match="nothing to search: the task has no options; give its function parameters"):
        parse_search([], lambda: task())


def test_a_grid_has_all_combinations_of_choices() -> None:
    space = [Dimension("a", "x,y", "choice", choices=("x", "y")), Dimension("n", "1..2", "int", 1, 2)]
    assert grid(space) == [{"a": "x", "n": 1}, {"a": "x", "n": 2}, {"a": "y", "n": 1}, {"a": "y", "n": 2}]
    with pytest.raises(BadInput, match="needs choices, and lr is a range"):
        grid(SPACE)


@pytest.mark.parametrize("text", ["3,1", "1,1", "0,2", "a", "1,", ""])
def test_rungs_grow(text: str) -> None:
    with pytest.raises(BadInput, match="write growing numbers of epochs, such as 1,3,9"):
        parse_rungs(text)


def test_a_metric_of_unknown_direction_is_refused() -> None:
    with pytest.raises(BadInput, match="Write --metric score:max or --metric score:min"):
        parse_metric("score")


def halved(values: Sequence[float], quotas: Sequence[int], failed: set[TrialJob]) -> dict[int, set[int]]:
    """Plain successive halving: a rung is complete before its best go on."""
    there, found = list(range(1, len(values) + 1)), {}
    for rung, quota in enumerate(quotas):
        ranked = sorted(there, key=lambda trial: (values[trial - 1], trial))[:quota] if rung else there
        found[rung] = {trial for trial in ranked if TrialJob(trial, rung) not in failed}
        there = sorted(found[rung])
    return found


@settings(max_examples=num_examples(60), deadline=None)
@given(st.integers(1, 30), st.integers(1, 5), st.sampled_from([[1, 3, 9], [1, 2], [2, 3, 4, 20], []]), st.randoms())
def test_whatever_the_order_of_results_the_same_trials_go_on_and_suggestions_see_the_same(
    num: int, slots: int, rungs: list[int], luck: random.Random
) -> None:
    request = replace(REQUEST, trials=num, slots=slots, rungs=rungs)
    values = [luck.choice([0.1, 0.2, 0.3, luck.random()]) for _ in range(num)]
    failed = {TrialJob(luck.randint(1, num), luck.randint(0, 2)) for _ in range(luck.randint(0, 3))}
    study, running, seen = Study(request), list[TrialJob](), {}
    while not study.is_over:
        while len(running) < slots:
            waiting = [job for job in study.jobs() if job.trial not in [one.trial for one in running]]
            number = study.next_number()
            if waiting:
                running.append(waiting[0])
            elif number is not None:
                seen[number] = [trial.number for trial in study.seen_by(number)]
                study.add(SuggestedTrial(trial=number, options={}))
            else:
                break
        assert running, "nothing runs, and nothing can start"
        job = running.pop(luck.randrange(len(running)))
        if job in failed:
            study.add(TrialFailed(trial=job.trial, rung=job.rung, why="boom"))
        else:
            study.add(Reached(trial=job.trial, rung=job.rung, value=values[job.trial - 1], step=1, epoch=1))
    assert seen == {number: list(range(1, number - 2 * slots + 1)) for number in range(1, num + 1)}
    reached = {rung: {trial.number for trial in study.ranking(rung)} for rung in range(request.num_rungs)}
    assert reached == halved(values, request.quotas, failed)


def test_a_device_does_not_wait_for_a_whole_rung() -> None:
    study = Study(replace(REQUEST, trials=6, rungs=[1, 3]))
    for number in range(1, 7):
        study.add(SuggestedTrial(trial=number, options={}))
    for number in range(1, 6):
        study.add(Reached(trial=number, rung=0, value=number / 10, step=1, epoch=1))
    # Two go on; whatever the sixth will reach, the first is one of them.
    assert study.request.quotas == [6, 2]
    assert study.jobs() == [TrialJob(1, 1), TrialJob(6, 0)]


def pruned(request: StudyRequest, luck: random.Random) -> tuple[dict[int, int], dict[int, dict[int, bool]]]:
    """Rungs of each trial, and decisions, of a study whose trials end in any order."""
    from evenstep.tune.optuna_pruner import goes_on

    curves = random.Random(request.seed)
    values = [sorted((curves.random() for _ in range(3)), reverse=True) for _ in range(request.trials)]
    study, running = Study(request), list[TrialJob]()
    while not study.is_over:
        for job in study.to_decide():
            study.add(PrunerDecision(trial=job.trial, rung=job.rung, goes_on=goes_on(study, job.trial)))
        while len(running) < request.slots:
            waiting = [job for job in study.jobs() if job.trial not in [one.trial for one in running]]
            if waiting:
                running.append(waiting[0])
            elif (number := study.next_number()) is not None:
                study.add(SuggestedTrial(trial=number, options={}))
            else:
                break
        if running:
            job = running.pop(luck.randrange(len(running)))
            value, epoch = values[job.trial - 1][job.rung], request.rungs[job.rung]
            study.add(Reached(trial=job.trial, rung=job.rung, value=value, step=epoch, epoch=epoch))
    trials = study.trials.values()
    return {one.number: len(one.reached) for one in trials}, {one.number: one.decisions for one in trials}


@pytest.mark.parametrize("pruner", ["median", "hyperband"])
def test_pruners_decide_the_same_whatever_the_order_of_results(pruner: str) -> None:
    pytest.importorskip("optuna")
    request = replace(REQUEST, trials=24, pruner=pruner, seed=3)
    first, decisions = pruned(request, random.Random(0))
    assert pruned(request, random.Random(1)) == pruned(request, random.Random(2)) == (first, decisions)
    # Some are paused early, some go on, and who was not paused has come to its end.
    assert {1, 3} <= set(first.values())
    assert all(num == 3 or decisions[trial][num - 1] is False for trial, num in first.items())


@pytest.mark.parametrize(
    ("name", "rungs", "message"),
    [
        ("best", [1, 3], "prune 'best'"),
        ("median", [], "give --rungs 1,3,9"),
        ("hyperband", [1, 3, 4], "they are 1,3,4"),
        ("hyperband", [2, 5], "they are 2,5"),
    ],
)
def test_a_pruner_without_its_rungs_is_refused(name: str, rungs: list[int], message: str) -> None:
    from evenstep.tune.optuna_pruner import check_pruner

    with pytest.raises(BadInput, match=message):
        check_pruner(name, rungs)


def test_cma_es_needs_two_ranges() -> None:
    from evenstep.tune.optuna_sampler import check_space

    check_space("cmaes", SPACE)
    check_space("tpe", SPACE[:1])
    with pytest.raises(BadInput, match="needs 2 ranges of numbers or more, and 1 of the options"):
        check_space("cmaes", SPACE[:1])


def test_a_file_with_a_torn_last_line_goes_on_without_it(tmp_path: Path) -> None:
    log = StudyLog(tmp_path, REQUEST)
    log.append(SuggestedTrial(trial=1, options={"lr": 0.1, "n": 2}))
    with pytest.raises(BadInput, match="is being run by another evenstep tune"):
        StudyLog(tmp_path, REQUEST)
    log.close()
    with (tmp_path / FILE).open("a") as file:
        file.write('{"kind": "reached", "tri')
    assert read_study(tmp_path).trials[1].options == {"lr": 0.1, "n": 2}
    again = StudyLog(tmp_path, REQUEST)
    again.append(Reached(trial=1, rung=0, value=0.5, step=3, epoch=1))
    again.close()
    assert read_study(tmp_path).trials[1].reached[0].value == 0.5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trials": 13}, "it has --trials 12, not --trials 13; give --name for a new one"),
        ({"choices": {"batch": 32}}, "it has no --batch, and --batch 32 was given"),
        ({"choices": {"options": {"kind": "relu"}}}, "it has no options, and kind=relu was given;"),
        ({"rungs": []}, "it has --rungs 1,3,9, which was not given;"),
        ({"space": SPACE[:1]}, "--search lr=1e-4..1e-1:log --search n=1..4, not --search lr=1e-4..1e-1:log;"),
    ],
)
def test_another_command_does_not_continue_a_study(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    StudyLog(tmp_path, REQUEST).close()
    with pytest.raises(BadInput, match=message):
        StudyLog(tmp_path, replace(REQUEST, **changes))
    StudyLog(tmp_path, replace(REQUEST, slots=3)).close()


@pytest.mark.parametrize("text", ["", "{}", '{"kind": "reached", "trial": 1}', "[1]", '{"kind": "studyrequest"}'])
def test_what_is_no_study_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(f"{text}\n")
    with pytest.raises(BadInput, match="is not a study"):
        read_study(tmp_path)


def played(request: StudyRequest, value: Callable[[SuggestedTrial], float], stops: set[int]) -> list[SuggestedTrial]:
    """The suggestions of a study that is read again from its rows wherever it was stopped."""
    from evenstep.tune.optuna_sampler import suggest

    study, rows = Study(request), []
    while (number := study.next_number()) is not None:
        rows.append(SuggestedTrial(trial=number, options=suggest(study, number)))
        rows.append(Reached(trial=number, rung=0, value=value(rows[-1]), step=1, epoch=1))
        study.add(rows[-2])
        study.add(rows[-1])
        if number in stops:
            study = Study(request)
            for row in rows:
                study.add(row)
    return [row for row in rows if isinstance(row, SuggestedTrial)]


@pytest.mark.parametrize("sampler", ["tpe", "random", "cmaes", pytest.param("gp", marks=pytest.mark.slow)])
def test_a_study_that_was_stopped_suggests_the_same(sampler: str) -> None:
    pytest.importorskip("cmaes" if sampler == "cmaes" else "optuna")
    request = replace(REQUEST, rungs=[], trials=18, sampler=sampler)
    space = [*SPACE, Dimension("kind", "a,b", "choice", choices=("a", "b"))]
    request = replace(request, space=space)

    def value(row: SuggestedTrial) -> float:
        return abs(float(row.options["lr"]) - 0.01) + 0.1 * float(row.options["n"])  # type: ignore[arg-type]

    found = played(request, value, set())
    assert found == played(request, value, {2, 9, 15, 16})
    assert len({repr(row.options) for row in found}) == 18
    assert found != played(replace(request, seed=1), value, set())
    if sampler == "cmaes":
        # Its generations move to where the metric is small.
        assert sum(map(value, found[-6:])) < sum(map(value, found[:6]))
