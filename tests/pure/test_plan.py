"""A plan cuts up its batch in public, travels as JSON, and refuses what cannot run in words that help."""

from __future__ import annotations

import doctest
import json
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep import plan, strategy_facts
from evenstep.errors import PlanError
from evenstep.plan import Plan, PrecisionName, check_name, parse_devices, read_plan
from evenstep.report.terminal import batch_in_words
from evenstep.sampling import batch_shares
from evenstep.sampling.order import Lengths
from evenstep.strategy_facts import STRATEGIES
from evenstep.trackers import clients, once_per_step


def cpus(num: int) -> tuple[str, ...]:
    return ("cpu",) * num


def make(**values: Any) -> Plan:
    return Plan(**{"batch": 64, "steps": 1, **values})


@pytest.mark.parametrize(
    ("values", "num_samples", "line"),
    [
        (
            {"batch": 512, "strategy": "ddp", "devices": cpus(4), "accumulate": 2},
            60_000,
            "global batch 512 = 4 devices x 64 x 2 micro-batches; 118 steps per epoch (the last has 96 samples)",
        ),
        (
            {"batch": 17, "strategy": "ddp", "devices": cpus(2), "accumulate": 2, "virtual_replicas": 4},
            103,
            "global batch 17 = 4 virtual replicas x 2-3 x 2 micro-batches on 2 devices; 7 steps per epoch (the "
            "last has 1 samples)",
        ),
        (
            {"batch": 500, "strategy": "ddp", "devices": cpus(4)},
            60_000,
            "global batch 500 = 4 devices x 125; 120 steps per epoch",
        ),
        (
            {"batch": 10, "strategy": "dp", "devices": cpus(3)},
            100,
            "global batch 10 = 3 devices x 3-4; 10 steps per epoch",
        ),
        (
            {"batch": 11, "strategy": "ddp", "devices": cpus(2), "accumulate": 3},
            22,
            "global batch 11 = 2 devices x 1-2 x 3 micro-batches; 2 steps per epoch",
        ),
        ({"batch": 64}, 64, "global batch 64 = 1 device x 64; 1 step per epoch"),
        ({"batch": 64}, 65, "global batch 64 = 1 device x 64; 2 steps per epoch (the last has 1 samples)"),
    ],
)
def test_the_batch_is_cut_up_in_one_line(values: dict[str, Any], num_samples: int, line: str) -> None:
    assert batch_in_words(make(**values), Lengths(num_samples)) == line


@pytest.mark.parametrize("module", [plan, batch_shares, strategy_facts, once_per_step, clients])
def test_examples_in_docstrings_are_true(module: Any) -> None:
    results = doctest.testmod(module)
    assert results.attempted > 0
    assert results.failed == 0


@given(
    num_samples=st.integers(1, 10_000), batch=st.integers(1, 999), epochs=st.integers(1, 9), steps=st.integers(1, 999)
)
def test_a_run_is_so_many_steps_or_so_many_passes(num_samples: int, batch: int, epochs: int, steps: int) -> None:
    an_epoch = make(batch=batch).steps_an_epoch(num_samples)
    assert (an_epoch - 1) * batch < num_samples <= an_epoch * batch
    assert Plan(batch=batch, epochs=epochs).num_steps(Lengths(num_samples)) == epochs * an_epoch
    assert Plan(batch=batch, steps=steps).num_steps(Lengths(num_samples)) == steps


@given(
    first=st.lists(st.integers(1, 300), max_size=4),
    rest=st.integers(1, 300),
    batch=st.integers(1, 99),
    epochs=st.integers(1, 7),
    cut=st.integers(0, 50),
)
def test_steps_are_counted_over_epochs_of_unequal_length_from_anywhere(
    first: list[int], rest: int, batch: int, epochs: int, cut: int
) -> None:
    lengths, plan = Lengths(rest, tuple(first)), Plan(batch=batch, epochs=epochs)
    steps, position, at_cut = 0, 0, (0, 0)
    while lengths.locate(position)[0] < epochs:
        position += len(lengths.span(position, batch))
        steps += 1
        at_cut = (steps, position) if steps <= cut else at_cut
    assert plan.num_steps(lengths) == plan.num_steps(lengths, *at_cut) == steps


def test_a_stream_has_as_many_steps_as_it_has() -> None:
    assert Plan(batch=8, epochs=2).num_steps(Lengths(None)) is None
    assert Plan(batch=8, steps=5).num_steps(Lengths(None)) == 5
    assert (
        batch_in_words(Plan(batch=8, epochs=2), Lengths(None)) == "global batch 8 = 1 device x 8; until the stream ends"
    )


def test_a_growing_epoch_is_said() -> None:
    line = batch_in_words(Plan(batch=8, epochs=2), Lengths(20, (5, 10)))
    assert line == "global batch 8 = 1 device x 8; 1, 2, then 3 steps per epoch (the last has 4 samples)"


@pytest.mark.parametrize(
    "value",
    [
        make(),
        Plan(
            batch=96,
            task="my_task.py:small",
            strategy="fsdp",
            devices=cpus(3),
            epochs=7,
            seed=2**63 - 1,
            precision="bf16",
            accumulate=4,
            clip=0.5,
            name="été 1",
            checkpoint_every=10,
            keep=5,
            resume="runs/before",
            data="/data",
            threads=2,
            deterministic=True,
            cudnn_benchmark=True,
            compile=True,
            sync_batchnorm=True,
            allow_pickle=True,
        ),
        make(strategy="fsdp", devices=tuple(f"cuda:{index}" for index in range(4)), mesh="fsdp=2", cpu_offload=True),
    ],
    ids=["short", "full", "offloaded"],
)
def test_a_plan_comes_back_from_json_as_it_went(value: Plan, tmp_path: Path) -> None:
    text = json.dumps(value.to_json())
    assert Plan.from_json(json.loads(text)) == value
    (tmp_path / "plan.json").write_text(text)
    assert read_plan(tmp_path) == read_plan(str(tmp_path / "plan.json")) == value


def test_a_plan_that_was_saved_with_the_name_before_is_read() -> None:
    value = make(virtual_replicas=4, batch=64)
    saved = value.to_json()
    saved["replicas"] = saved.pop("virtual_replicas")
    assert Plan.from_json(saved) == value


def test_a_plan_that_measures_norms_without_clipping_is_valid_json() -> None:
    measures = make(clip=float("inf"))
    assert Plan.from_json(json.loads(json.dumps(measures.to_json(), allow_nan=False))) == measures
    assert "\nclip               inf" in measures.describe()


def test_describe_shows_what_is_chosen_and_hides_what_is_off() -> None:
    text = make(task="digits", devices=cpus(2), strategy="ddp", checkpoint_every=5, deterministic=True).describe()
    lines = dict(line.split(maxsplit=1) for line in text.replace("checkpoint every", "checkpoint_every").splitlines())
    assert lines == {
        "batch": "64",
        "task": "digits",
        "strategy": "ddp",
        "devices": "cpu, cpu",
        "steps": "1",
        "seed": "0",
        "precision": "fp32",
        "accumulate": "1",
        "name": "run",
        "checkpoint_every": "5",
        "keep": "2",
        "deterministic": "True",
    }


WHOLE = "it must be a whole number, 1 or more"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"strategy": "dpp"},
            "unknown strategy 'dpp'; choose single, dp, ddp, fsdp, tensor, pipeline or dp-torch; did you mean",
        ),
        ({"strategy": "horovod"}, "unknown strategy 'horovod'; choose single, dp, ddp, fsdp"),
        ({"precision": "fp23"}, "precision is 'fp23'; choose fp64, fp32, tf32, bf16 or fp16; did you mean"),
        ({"devices": ("gpu",)}, "unknown device 'gpu'; write cpu, mps or cuda:0, or a count such as --devices 2"),
        ({"devices": ("cuda:-1",)}, "unknown device 'cuda:-1'"),
        ({"devices": ("cpu\n",)}, "unknown device 'cpu\\n'"),
        ({"batch": 0}, f"batch is 0; {WHOLE}"),
        ({"batch": -8}, f"batch is -8; {WHOLE}"),
        ({"batch": 2.5}, f"batch is 2.5; {WHOLE}"),
        ({"batch": "64"}, f"batch is '64'; {WHOLE}"),
        ({"steps": 0}, f"steps is 0; {WHOLE}"),
        ({"steps": None, "epochs": -1}, f"epochs is -1; {WHOLE}"),
        ({"accumulate": 0}, f"accumulate is 0; {WHOLE}"),
        ({"checkpoint_every": 0}, f"checkpoint-every is 0; {WHOLE}"),
        ({"keep": 0}, f"keep is 0; {WHOLE}"),
        ({"threads": 0}, f"threads is 0; {WHOLE}"),
        ({"epochs": 1}, "exclude each other; give one of them"),
        ({"steps": None}, "exclude each other; give one of them"),
        ({"clip": 0.0}, "clip is 0.0; it must be greater than 0"),
        ({"clip": float("nan")}, "clip is nan; it must be greater than 0"),
        ({"seed": -1}, "seed is -1; it must be from 0 to 2**63 - 1"),
        ({"seed": 2**63}, f"seed is {2**63}; it must be from 0 to 2**63 - 1"),
        ({"devices": ()}, "no device given; try --devices 1"),
        ({"devices": cpus(2)}, "single runs on one device and 2 were given; use --strategy dp, ddp or fsdp"),
        ({"strategy": "ddp", "devices": ("cpu", "cuda:0")}, "devices of different kinds (cpu, cuda); ddp needs one"),
        ({"strategy": "ddp", "devices": ("mps",)}, "mps runs with --strategy single only, and ddp was given"),
        ({"precision": "tf32"}, "tf32 exists on CUDA devices only; on others use --precision fp32 or bf16"),
        ({"precision": "fp64", "devices": ("mps",)}, "mps has no float64; use --precision fp32"),
        ({"strategy": "dp", "compile": True}, "torch.compile does not trace in several threads"),
        ({"sync_batchnorm": True}, "--sync-batchnorm joins processes, and single has one; use --strategy ddp or fsdp"),
        (
            {"strategy": "ddp", "devices": cpus(4), "accumulate": 3, "batch": 11},
            "a global batch of 11 is too small for 4 devices x 3 micro-batches; use --batch 12 or more",
        ),
        (
            {"virtual_replicas": 4, "accumulate": 2, "batch": 7},
            "a global batch of 7 is too small for 4 virtual replicas x 2 micro-batches; use --batch 8 or more",
        ),
        (
            {"virtual_replicas": 4, "strategy": "dp-torch", "devices": ("cuda:0", "cuda:1")},
            "dp-torch does not sum gradients in the order of --virtual-replicas; use --strategy single, dp, ddp or",
        ),
        ({"virtual_replicas": 2, "cudnn_benchmark": True}, "--cudnn-benchmark picks kernels by timing them"),
        ({"replay_every": 5, "cudnn_benchmark": True}, "with --replay-every leave it out"),
        (
            {"virtual_replicas": 2, "strategy": "ddp", "devices": cpus(3)},
            "2 virtual replicas cannot be shared by 3 devices; use --virtual-replicas 3 or more, the same number",
        ),
        (
            {"strategy": "dp-torch"},
            "dp-torch is nn.DataParallel, which runs on CUDA devices only; use --strategy dp",
        ),
        ({"strategy": "fsdp", "devices": ("cuda:0", "cuda:0")}, "fsdp needs a separate GPU for each process"),
        ({"name": "a/b"}, "'a/b' cannot name a run; use letters, digits"),
        (
            {"link": "powersgd"},
            "link is 'powersgd'; write none, auto, bf16, powersgd:RANK, topk:FRACTION, local:STEPS",
        ),
        ({"link": "topk:1.5"}, "such as powersgd:2, topk:0.01 or local:50"),
        (
            {"link": "streaming:3:4"},
            "--link streaming:3:4 sends one fragment after a step, and has fewer steps than fragments; write "
            "streaming:4:4 or streaming:3",
        ),
        ({"link": "streaming"}, "diloco:STEPS or streaming:STEPS:FRAGMENTS, such as"),
        ({"link": "streaming:8:0"}, "link is 'streaming:8:0'; write none"),
        (
            {"link": "streaming:8", "strategy": "ddp", "devices": cpus(2), "sync_batchnorm": True},
            "--link streaming:8 does not synchronize ranks in forward; leave out --sync-batchnorm",
        ),
        ({"link": "bf16"}, "--link is how ddp sends gradients, and single was given; use --strategy ddp"),
        ({"link": "auto", "strategy": "ddp", "devices": ("cuda:0", "cuda:1")}, "--link auto is for CPU devices"),
        ({"link": "auto", "strategy": "ddp", "virtual_replicas": 4}, "--virtual-replicas sums gradients in one order"),
        (
            {"link": "local:8", "strategy": "ddp", "devices": cpus(2), "shares": "3,1"},
            "--link local:8 needs equal shares; leave out --shares",
        ),
        ({"link": "local:8", "strategy": "ddp", "precision": "fp16"}, "use --precision bf16 or fp32"),
        ({"cpu_offload": True}, "and single offloads none; use --strategy fsdp"),
        (
            {"cpu_offload": True, "strategy": "fsdp", "devices": cpus(2)},
            "--cpu-offload moves shards from GPUs to host memory, where those of CPU devices are already; leave it out",
        ),
        (
            {"cpu_offload": True, "strategy": "fsdp", "devices": ("cuda:0",), "precision": "fp16"},
            "fp16's GradScaler needs gradients on the GPU, and --cpu-offload keeps them in host memory",
        ),
        (
            {"cpu_offload": True, "strategy": "fsdp", "devices": ("cuda:0",), "virtual_replicas": 4},
            "--cpu-offload updates weights on the host, which rounds differently; leave one out",
        ),
        (
            {"strategy": "fsdp", "devices": cpus(4), "mesh": "data=2,fsdp=4"},
            "--mesh data=2,fsdp=4 is for 8 ranks, and there are 4; use --devices 8, or other sizes",
        ),
        (
            {
                "strategy": "fsdp",
                "devices": cpus(2),
                "mesh": "data=2,fsdp=2",
                "machines": "1:2",
                "rendezvous": "a:29400",
            },
            "--machines 1:2 may be 1 with 2 ranks, which --mesh data=2,fsdp=2 does not fit; give one axis whose size "
            "divides 2, or --machines 2",
        ),
        (
            {"strategy": "fsdp", "devices": cpus(2), "mesh": "fsdp=4", "machines": "2:4", "rendezvous": "a:29400"},
            "--machines 2:4 may be 3 with 6 ranks, which --mesh fsdp=4 does not fit",
        ),
        ({"strategy": "fsdp", "devices": cpus(4), "mesh": "rows=2"}, "the axes of fsdp are data and fsdp, each once"),
        (
            {"strategy": "fsdp", "devices": cpus(4), "mesh": "fsdp=2,tensor=2"},
            "what is left of them, use --strategy tensor",
        ),
        (
            {"strategy": "pipeline", "devices": cpus(4), "mesh": "fsdp=2,pipeline=2"},
            "--mesh fsdp=2,pipeline=2: the stages of a pipeline are not sharded: fully_shard frees a layer",
        ),
        (
            {"strategy": "tensor", "devices": ("cuda:0", "cuda:0") * 2, "mesh": "fsdp=2,tensor=2"},
            "tensor with --mesh fsdp=2,tensor=2 needs a separate GPU for each process",
        ),
        (
            {"strategy": "tensor", "devices": tuple(f"cuda:{one}" for one in range(4)), "cpu_offload": True},
            "tensor offloads none",
        ),
    ],
)
def test_helpful_errors(values: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError) as refused:
        make(**values)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("strategy", [row.name for row in STRATEGIES.values() if "cpu" in row.device_kinds])
@pytest.mark.parametrize("precision", [name for name in get_args(PrecisionName) if name != "tf32"])
def test_every_strategy_goes_with_every_precision_on_a_cpu(strategy: str, precision: str) -> None:
    if STRATEGIES[strategy].model_axis is not None and precision == "fp16":
        with pytest.raises(PlanError, match="fp16's GradScaler needs whole gradients"):
            make(strategy=strategy, precision=precision)
        return
    plan = make(strategy=strategy, precision=precision)
    assert (plan.strategy, plan.precision) == (strategy, precision)


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("2", 2),
        (" 16 ", 16),
        ("-1", -1),
        ("cpu", ("cpu",)),
        ("cuda:0,cuda:1", ("cuda:0", "cuda:1")),
        ("cpu, cpu", ("cpu", "cpu")),
        ("", ("",)),
    ],
)
def test_devices_are_a_count_or_a_list(text: str, devices: int | tuple[str, ...]) -> None:
    assert parse_devices(text) == devices


@pytest.mark.parametrize("name", ["a", "run-1_b", "2026-11-15-digits-ddp", "mit Leerzeichen", "v1.2", "x" * 100])
def test_a_plain_folder_name_names_a_run(name: str) -> None:
    check_name(name)


@pytest.mark.parametrize(
    "name",
    [
        *("", ".", "..", ".hidden", "a..b", "a/b", "/a", "a\\b", " a", "\ta", "a\nb", "a\n"),
        *("\x00", "\x1b[2J", "a\x7f", "a\x9b", "x" * 101),
    ],
)
def test_anything_else_does_not(name: str) -> None:
    with pytest.raises(PlanError, match="cannot name a run; use letters, digits, '-' and '_'"):
        check_name(name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "plan.json is not a plan: it is not JSON .Expecting property name"),
        ("[1]", "plan.json is not a plan: expected object, got array; give the plan.json of a run folder"),
        ("{}", "not a plan: it needs a batch and a list of devices"),
        ('{"devices": ["cpu"]}', "not a plan: it needs a batch and a list of devices"),
        ('{"devices": ["cpu"], "batch": 1, "warp": 9}', "the plan has warp, unknown here; a newer evenstep wrote it"),
        ('{"devices": ["cpu"], "batch": "1", "steps": 1}', "batch is '1'"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(text: str, message: str) -> None:
    Path("plan.json").write_text(text)
    with pytest.raises(PlanError, match=message):
        read_plan("plan.json")


def test_a_plan_that_is_not_there_is_refused() -> None:
    with pytest.raises(PlanError, match=r"nowhere\.json does not exist"):
        read_plan("nowhere.json")


def test_half_of_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(PlanError, match="batch is"):
        Plan.from_json({"batch": "\ud800", "devices": ["cpu"]})


def test_shards_of_a_copy_are_counted_over_machines() -> None:
    ranks = {"strategy": "fsdp", "devices": cpus(4)}
    far = {"machines": "2", "rendezvous": "head:29400"}
    assert [make(**ranks).num_shards, make(**ranks, mesh="data=2").num_shards] == [4, 2]
    assert [make(**ranks, **far).num_shards, make(**ranks, **far, mesh="fsdp=4").num_shards] == [8, 4]
    assert make(strategy="ddp", devices=cpus(4)).num_shards == 1
    # Every rank has its own samples, whatever it shards.
    assert make(**ranks, mesh="fsdp=2").num_replicas == 4
