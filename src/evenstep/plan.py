"""What to run, as one frozen value: the only thing that goes into a training."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from evenstep.errors import BREAKS_LINES, PlanError, shorten
from evenstep.link_method import parse_link
from evenstep.mesh import arrange, check_precision
from evenstep.sampling.batch_shares import Shares, enough_for_all, in_proportion, smallest_micro_batch
from evenstep.sampling.order import Lengths
from evenstep.strategy_facts import (
    DEFAULT,
    REFERENCE,
    STRATEGIES,
    UNKNOWN,
    StrategyFacts,
    one_of,
    usual_strategies,
    with_processes,
)
from evenstep.typed_values import LARGEST, Schema, check, check_choice, check_fields

PrecisionName = Literal["fp64", "fp32", "tf32", "bf16", "fp16"]
ScheduleName = Literal["1f1b", "gpipe", "interleaved", "zero-bubble"]
"""Of pipelines; see pipeline_schedule.py."""
FastName = Literal["auto", "off"]
TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")
MicroName = Literal["auto"]

_is_saved = ContextVar("is_saved", default=False)
"""Whether a plan is read that was checked when it was written."""
RUNS = "runs"
IN_THIS_PROCESS = "(in this process)"
"""For a task that nobody can find by a name."""
PLAN_FILE = "plan.json"
NAMES_BEFORE = {"replicas": "virtual_replicas"}
"""Fields that saved plans may have under another name."""
CUSTOM_LOOP = "(custom loop)"
"""For a loop of the user's own, whose length only the user knows."""

# A field's limits, and the message for a value outside of them.
Whole = Annotated[int, Meta(ge=1, le=LARGEST, description="it must be a whole number, 1 or more")]
Text = Annotated[
    str,
    Meta(
        pattern=f"^[^{BREAKS_LINES}]*$",
        max_length=4096,
        description="it must be one line of up to 4096 characters, without control characters",
    ),
]
Seed = Annotated[int, Meta(ge=0, le=LARGEST, description="it must be from 0 to 2**63 - 1")]
Workers = Annotated[
    int, Meta(ge=0, le=LARGEST, description="it must be a number of loader processes per rank, 0 or more")
]
Clip = Annotated[float, Meta(gt=0, le=sys.float_info.max, description="it must be greater than 0, such as 1.0")]
Restarts = Annotated[int, Meta(ge=0, le=LARGEST, description="it must be a number of crashes, 0 or more")]
StallAfter = Annotated[float, Meta(ge=1, le=sys.float_info.max, description="it must be 1 second or more")]
CheckEvery = Annotated[int, Meta(ge=0, le=LARGEST, description="it must be a number of steps, or 0 for never")]

# Not Text: msgspec 0.22 corrupts memory for a limited str in a union with a list of such.
OptionValue = str | int | float | bool | list[str | int | float | bool] | None

USUAL: dict[str, Any] = {"pipeline_schedule": "1f1b", "restarts": 0, "check_every": 100, "fast": "auto", "out": RUNS}
"""Defaults that are not shown."""
_DEVICE = re.compile(r"cpu|mps|cuda(:[0-9]{1,4})?")
_NAME = re.compile(rf"(?![\s.])[^/\\{BREAKS_LINES}]{{1,100}}")
MOST_NAME_BYTES = 200
"""File systems take 255; what is written beside a folder has a longer name than it."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run. The batch is global: strategy, devices and accumulation only cut it up.

    >>> Plan(task="digits", batch=512, strategy="ddp", devices=("cpu",) * 4, epochs=2).num_steps(Lengths(60_000))
    236
    """

    batch: Whole
    task: Text = IN_THIS_PROCESS
    strategy: Text = REFERENCE
    devices: tuple[Text, ...] = ("cpu",)
    mesh: Text | None = None
    """`data=2,tensor=2`: how ranks are arranged, where the strategy has more than one axis."""
    pipeline_schedule: ScheduleName = "1f1b"
    """In which order the stages of a pipeline run forwards and backwards."""
    epochs: Whole | None = None
    steps: Whole | None = None
    seed: Seed = 0
    precision: PrecisionName = "fp32"
    accumulate: Whole = 1
    micro: MicroName | None = None
    """`auto`: `accumulate` is chosen before the start, as the least with which a step fits in memory."""
    shares: Text | None = None
    """`5,3`: each device's part of every global batch, in the order of ranks; or `auto`."""
    virtual_replicas: Whole | None = None
    """Virtual replicas: the parts of a batch whose gradients are summed in one order, on any number of devices."""
    link: Text | None = None
    """How gradients cross the network: see `parse_link`. None: exactly, and once for each machine."""
    clip: Clip | None = None
    name: Text = "run"
    out: Text = RUNS
    """The folder in which the folder of the run is made."""
    checkpoint_every: Whole | None = None
    keep: Whole = 2
    resume: Text | None = None
    data: Text | None = None
    workers: Workers | None = None
    resident: bool = False
    audit: bool = False
    threads: Whole | None = None
    deterministic: bool = False
    cudnn_benchmark: bool = False
    compile: bool = False
    fast: FastName = "auto"
    channels_last: bool = False
    checkpoint_activations: bool = False
    """Blocks compute their activations again in backward, instead of keeping them."""
    cpu_offload: bool = False
    """Shards of parameters, gradients and optimizer state are in host memory, and the host updates them."""
    sync_batchnorm: bool = False
    allow_pickle: bool = False
    restarts: Restarts = 0
    stall_after: StallAfter | None = None
    check_every: CheckEvery = 100
    check_collectives: bool = False
    replay_every: Whole | None = None
    """Steps between two at which devices check each other."""
    machines: Text | None = None
    rendezvous: Text | None = None
    requeue: bool = False
    profile: Whole | None = None
    statistics: Whole | None = None
    """Steps between two that are looked into."""
    log: Text | None = None
    """Names of TRACKERS, separated by commas."""
    evaluate_every: Whole | None = None
    evaluate_first: bool = False
    best: Text | None = None
    stop_after: Whole | None = None
    options: dict[Text, OptionValue] = field(default_factory=dict, hash=False)
    """What the task's function is called with, besides `data`."""

    def __post_init__(self) -> None:
        # JSON has no infinity. No norm is larger than this one either: it is measured, and nothing is clipped.
        if self.clip == math.inf:
            object.__setattr__(self, "clip", sys.float_info.max)
        # Types first: what follows can rely on them.
        if not _is_saved.get():
            check_choice("strategy", self.strategy, STRATEGIES, PlanError)
        check_fields(self, PlanError)
        check("options", self.options_in_words, Text, PlanError)
        parse_log(self.log)
        check_device_names(self.devices)
        self._check_launch()
        self._check_devices()
        self._check_mesh()
        self._check_shares()
        self._check_replicas()
        self._check_link()
        self._check_micro()
        self._check_recomputed()
        if self.cpu_offload and self._facts is not UNKNOWN:
            check_offload(self._facts, self.devices, self.precision, self.virtual_replicas)
        self._check_cut()
        check_name(self.name)

    @property
    def most_devices(self) -> int:
        """Devices of all machines together, where as many take part as may."""
        return len(self.devices) * (parse_machines(self.machines)[1] if self.machines is not None else 1)

    @property
    def num_replicas(self) -> int:
        """Devices, or groups of devices that compute one replica together, where as many take part as may."""
        mesh = arrange(self.mesh, self._facts, self.most_devices) if self._facts.axes else None
        return self.most_devices // (mesh.ranks_per_replica if mesh is not None else 1)

    @property
    def num_shards(self) -> int:
        """Devices that hold the shards of one copy of the model together, where as many take part as may."""
        if not self._facts.shards:
            return 1
        mesh = arrange(self.mesh, self._facts, self.most_devices)
        return self.most_devices if mesh is None else mesh.num_shards or mesh.ranks_per_replica

    def _check_mesh(self) -> None:
        if self._facts is UNKNOWN:
            return
        arrange(self.mesh, self._facts, self.most_devices)
        self._check_fewer_machines()
        check_precision(self._facts, self.precision)
        if self._facts.schedules and self.pipeline_schedule == "zero-bubble" and self.checkpoint_activations:
            raise PlanError(
                "--pipeline-schedule zero-bubble computes gradients of weights layer by layer, and with "
                "--checkpoint-activations each layer would compute its whole block again; use 1f1b or interleaved"
            )

    def _check_fewer_machines(self) -> None:
        """Of --machines 2:4, any number may take part; if a mesh fits the first two and the last, it fits all."""
        least, most = parse_machines(self.machines) if self.machines is not None else (1, 1)
        each = len(self.devices)
        for num in range(least, most)[:2]:
            try:
                arrange(self.mesh, self._facts, num * each)
            except PlanError as error:
                raise PlanError(
                    f"--machines {self.machines} may be {num} with {num * each} ranks, which --mesh {self.mesh} does "
                    f"not fit; give one axis whose size divides {each}, or --machines {most}"
                ) from error

    @property
    def _facts(self) -> StrategyFacts:
        return STRATEGIES.get(self.strategy, UNKNOWN)

    def _check_launch(self) -> None:
        is_open = self.task == CUSTOM_LOOP and self.epochs is None
        if (self.epochs is None) == (self.steps is None) and not is_open:
            raise PlanError("--epochs and --steps exclude each other; give one of them")
        parse_rendezvous(self.machines, self.rendezvous)
        if self.machines is not None and not self._facts.several_machines:
            allowed = one_of(row for row in STRATEGIES.values() if row.several_machines)
            raise PlanError(f"{self.strategy} runs on one machine; use --strategy {allowed} with --machines")

    def _check_devices(self) -> None:
        kinds = {device.split(":")[0] for device in self.devices}
        self._check_placement(self._facts, kinds)
        if self.precision == "tf32" and kinds != {"cuda"}:
            raise PlanError("tf32 exists on CUDA devices only; on others use --precision fp32 or bf16")
        if self.precision == "fp64" and "mps" in kinds:
            raise PlanError("mps has no float64; use --precision fp32")
        for name, why in self._facts.refusals.items():
            if getattr(self, name):
                raise PlanError(why)
        if self.statistics is not None and self.compile:
            raise PlanError("--statistics looks at the output of every layer, which --compile merges; leave one out")
        if self.replay_every is not None and self.sync_batchnorm:
            raise PlanError(
                "--replay-every compares what devices compute alone, and --sync-batchnorm joins them; leave one out"
            )
        if self.replay_every is not None and self.cudnn_benchmark:
            raise PlanError(
                "--cudnn-benchmark picks kernels by timing them, and different kernels round differently; with "
                "--replay-every leave it out"
            )
        if self.sync_batchnorm and not self._facts.processes_per_device:
            raise PlanError(
                f"--sync-batchnorm joins processes, and {self.strategy} has one; use --strategy {with_processes()}"
            )

    def _check_placement(self, facts: StrategyFacts, kinds: set[str]) -> None:
        """Refuse devices that the strategy cannot use, or not together."""
        name, num = facts.name, len(self.devices)
        if num == 0:
            raise PlanError("no device given; try --devices 1")
        if facts.is_reference and num > 1:
            several = one_of(usual_strategies())
            raise PlanError(f"{name} runs on one device and {num} were given; use --strategy {several}")
        if len(kinds) > 1 and not facts.mixes_device_kinds:
            raise PlanError(f"devices of different kinds ({', '.join(sorted(kinds))}); {name} needs one kind")
        if not self._shares_gpu(facts) and "cuda" in kinds and len(set(self.devices)) < num:
            sharing = one_of(row for row in usual_strategies() if row.shares_gpu)
            mesh = "" if not facts.shares_gpu else f" with --mesh {self.mesh}"
            raise PlanError(
                f"{name}{mesh} needs a separate GPU for each process; to use one GPU twice, choose {sharing}"
            )
        for kind in sorted(kinds - set(facts.device_kinds)):
            running = one_of(row for row in STRATEGIES.values() if kind in row.device_kinds)
            refusal = f"{kind} runs with --strategy {running} only, and {name} was given"
            raise PlanError(facts.other_kinds_refusal or refusal)

    def _shares_gpu(self, facts: StrategyFacts) -> bool:
        """Whether one GPU can be given twice; what is sharded cannot be made whole there."""
        mesh = arrange(self.mesh, facts, self.most_devices) if facts.axes and facts.model_axis is not None else None
        return facts.shares_gpu and (mesh is None or (mesh.num_shards or 1) == 1)

    def _check_shares(self) -> None:
        if self.shares is None:
            return
        shares, num = parse_shares(self.shares), len(self.devices)
        least, most = parse_machines(self.machines) if self.machines is not None else (1, 1)
        if num * most == 1:
            raise PlanError("--shares divides a batch over several devices, and there is one; leave it out")
        if shares is None:
            self._check_measurable()
            return
        if least != most:
            raise PlanError(
                f"--shares has a number for each device, and --machines {self.machines} may be fewer or more; "
                "use --shares auto"
            )
        # Machines may have different numbers of devices: those are counted when they have met.
        if self.machines is None and len(shares) != num:
            given = f"--shares {shorten(self.shares)} has {len(shares)} number{'s' * (len(shares) > 1)}"
            raise PlanError(f"{given} for {num} devices; give one for each")
        if self.virtual_replicas is not None:
            if min(map(len, in_proportion(self.virtual_replicas, shares))) == 0:
                raise PlanError(
                    f"--shares {shorten(self.shares)} would leave a device without any of {self.virtual_replicas} "
                    f"virtual replicas; use --virtual-replicas {enough_for_all(shares)} or more, or shares that differ "
                    "less"
                )
            return
        smallest = enough_for_all(shares, self.accumulate)
        if min(map(len, in_proportion(self.batch, shares))) < self.accumulate:
            raise PlanError(
                f"a global batch of {self.batch} is too small for --shares {shorten(self.shares)}: a device would have "
                f"none of it, or too few for its micro-batches; use --batch {smallest} or more"
            )

    def _check_measurable(self) -> None:
        """Of --shares auto."""
        how = f"measure with --strategy {DEFAULT} --shares auto, and give the numbers that it finds"
        why = "where a fast device waits for a slow one, so that its speed is not known"
        if self._facts.shards:
            raise PlanError(f"{self.strategy} gathers layers in forward, {why};\n{how}")
        if self.sync_batchnorm:
            raise PlanError(f"--sync-batchnorm joins all devices in forward, {why};\n{how}, without --sync-batchnorm")

    @property
    def proportions(self) -> Shares:
        """What each device (or virtual replica) gets of a global batch, as far as it is known before the start."""
        if self.virtual_replicas is not None:
            return (1,) * self.virtual_replicas
        known = parse_shares(self.shares) if self.shares is not None else None
        return known or (1,) * self.num_replicas

    def _check_replicas(self) -> None:
        if self.virtual_replicas is None:
            return
        check_replicas(self.virtual_replicas, self.most_devices, self._facts)
        if self.sync_batchnorm:
            raise PlanError(
                "--sync-batchnorm computes with the statistics of the whole batch, which processes sum in no fixed "
                "order; with --virtual-replicas leave it out: BatchNorm uses a virtual replica's samples"
            )
        if self.cudnn_benchmark:
            raise PlanError(
                "--cudnn-benchmark picks kernels by timing them, and different kernels round differently; with "
                "--virtual-replicas leave it out"
            )

    def _check_link(self) -> None:
        method = parse_link(self.link)
        if method.is_plain:
            return
        if not self._facts.links:
            able = one_of(row for row in STRATEGIES.values() if row.links)
            raise PlanError(
                f"--link is how {able} sends gradients, and {self.strategy} was given; use --strategy {able}"
            )
        kinds = {device.split(":")[0] for device in self.devices} - {"cpu"}
        if kinds:
            raise PlanError(
                f"--link {self.link} is for CPU devices, and {kinds.pop()} was given: NCCL plans its own messages; "
                "leave it out"
            )
        if self.virtual_replicas is not None:
            raise PlanError("--virtual-replicas sums gradients in one order, which --link would change; leave one out")
        if method.is_local:
            self._check_local_steps()

    def _check_local_steps(self) -> None:
        joined = {
            "shares": "needs equal shares",
            "sync_batchnorm": "does not synchronize ranks in forward",
            "statistics": "keeps the gradients of each rank apart",
            "replay_every": "lets replicas differ between two exchanges",
        }
        for name, why in joined.items():
            if getattr(self, name):
                raise PlanError(f"--link {self.link} {why}; leave out --{name.replace('_', '-')}")
        if self.precision == "fp16":
            raise PlanError(
                f"--link {self.link} has no loss scale that all ranks agree on; use --precision bf16 or fp32"
            )

    def _check_micro(self) -> None:
        if self.micro is None:
            return
        if self.machines is not None:
            raise PlanError(
                "--micro auto tries steps on one machine; with --machines, run evenstep fit on one of them and give "
                "the --accumulate that it finds"
            )
        if self.virtual_replicas is not None:
            raise PlanError(
                "--micro auto chooses by the memory that is free, and with --virtual-replicas other micro-batches "
                "round differently; give --accumulate"
            )
        if self.shares == AUTO:
            raise PlanError("--micro auto needs to know the share of each device; give numbers, such as --shares 5,3")

    def _check_recomputed(self) -> None:
        if not self.checkpoint_activations:
            return
        if self.compile:
            raise PlanError(
                "--compile decides what backward computes again, and does not trace the blocks of "
                "--checkpoint-activations; leave one out"
            )
        if self.statistics is not None:
            raise PlanError(
                "--statistics looks at the output of every layer, of which --checkpoint-activations computes some "
                "twice; leave one out"
            )
        if not self._facts.processes_per_device and self.devices.count("cpu") > 1:
            raise PlanError(
                f"replicas of {self.strategy} on CPUs draw from one random generator at the same time, so that "
                "--checkpoint-activations could not repeat what dropout drew; use --strategy "
                f"{with_processes()}"
            )

    @property
    def num_parts(self) -> int:
        """Parts of a global batch that are cut into micro-batches: virtual replicas, or devices."""
        return self.virtual_replicas or self.num_replicas

    def _check_cut(self) -> None:
        smallest = self.num_parts * self.accumulate
        if self.batch < smallest:
            if self.virtual_replicas is not None:
                parts = f" x {self.accumulate} micro-batches" if self.accumulate > 1 else ""
                raise PlanError(
                    f"a global batch of {self.batch} is too small for {self.virtual_replicas} virtual replicas{parts}; "
                    f"use --batch {smallest} or more"
                )
            if self.num_replicas < self.most_devices:
                raise PlanError(
                    f"a global batch of {self.batch} is too small for {self.num_replicas} replicas x {self.accumulate} "
                    f"micro-batches; use --batch {smallest} or more"
                )
            machines = self.most_devices // len(self.devices)
            of_machines = f"{machines} machines x " if machines > 1 else ""
            num = len(self.devices)
            parts = f" x {self.accumulate} micro-batches" if self.accumulate > 1 else ""
            raise PlanError(
                f"a global batch of {self.batch} is too small for {of_machines}{num} device{'s' * (num > 1)}{parts}; "
                f"use --batch {smallest} or more"
            )

    def steps_an_epoch(self, num_samples: int) -> int:
        """Optimizer steps in one pass over the samples, a short last step included."""
        return math.ceil(num_samples / self.batch)

    def batch_sizes(self, lengths: Lengths) -> set[int]:
        """Samples of the steps that this run takes: the global batch, and what is left for the last of an epoch."""
        sizes, steps = {self.batch}, 0
        for epoch in range(min(self.epochs or sys.maxsize, len(lengths.first) + 1)):
            length = lengths.of(epoch)
            if length is None:
                break
            steps += self.steps_an_epoch(length)
            if self.steps is not None and self.steps < steps:
                break
            sizes.add(length % self.batch or self.batch)
        return sizes

    def smallest_micro_batch(self, size: int) -> int:
        """Samples that a device computes at once, where it has the fewest of a step of this size."""
        return smallest_micro_batch(size, self.proportions, self.accumulate)

    def num_steps(self, lengths: Lengths, step: int = 0, position: int = 0) -> int | None:
        """Optimizer steps of the whole run, of which `step` are done and have used `position` samples.

        Both are needed: the steps before may have been taken with another batch. None if only a stream's end will tell.
        """
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        if lengths.rest is None:
            return None
        epoch, start = lengths.locate(position)
        left = [lengths.of(later) or 0 for later in range(epoch, min(self.epochs, len(lengths.first)))]
        num_alike = max(0, self.epochs - max(epoch, len(lengths.first)))
        num = sum(map(self.steps_an_epoch, left)) + num_alike * self.steps_an_epoch(lengths.rest)
        if start and epoch < self.epochs:
            length = lengths.of(epoch) or 0
            num += self.steps_an_epoch(length - start) - self.steps_an_epoch(length)
        return step + num

    def describe(self) -> str:
        """The plan as a block for people; what is left at 'none' or 'off' is not shown."""
        shown = {name: value for name, value in asdict(self).items() if value is not None and value is not False}
        shown |= {"task": self.task_name, "devices": ", ".join(self.devices), "options": self.options_in_words}
        if not self.options:
            del shown["options"]
        if self.clip == sys.float_info.max:
            shown["clip"] = math.inf
        for name, usual in USUAL.items():
            if shown.get(name) == usual:
                del shown[name]
        return "\n".join(f"{name.replace('_', ' '):<18} {value}" for name, value in shown.items())

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return Path(self.out) / self.name

    @property
    def task_name(self) -> str:
        """`my_task.py:small`, without the folders above it."""
        return self.task.rpartition(os.sep)[2]

    @property
    def options_in_words(self) -> str:
        """`lr=0.1, width=64`"""
        return ", ".join(f"{name}={value}" for name, value in self.options.items())

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values; `from_json` reads them back."""
        return {**asdict(self), "devices": list(self.devices)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Plan:
        """The plan that `to_json` wrote; its strategy may be one that the task's file, not imported yet, adds."""
        values = {NAMES_BEFORE.get(name, name): value for name, value in values.items()}
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise PlanError(f"the plan has {shorten(', '.join(unknown))}, unknown here; a newer evenstep wrote it")
        if "batch" not in values or not isinstance(values.get("devices"), list | tuple):
            raise PlanError("not a plan: it needs a batch and a list of devices; a run folder's plan.json is one")
        token = _is_saved.set(True)
        try:
            return cls(**{**values, "devices": tuple(values["devices"])})
        finally:
            _is_saved.reset(token)


_FILE: Schema[dict[str, Any]] = Schema(dict[str, Any], "plan", PlanError, "give the plan.json of a run folder")


def read_plan(path: str | Path) -> Plan:
    """A plan.json, or the one in a run folder."""
    return Plan.from_json(_FILE.read(Path(path) / PLAN_FILE if os.path.isdir(path) else Path(path)))


def write_plan_file(folder: Path, plan: Plan) -> None:
    """The plan.json of a run folder."""
    # Written and renamed: this process may be stopped while it writes.
    beside = folder / f"{PLAN_FILE}.writing"
    beside.write_text(json.dumps(plan.to_json(), indent=2) + "\n")
    beside.replace(folder / PLAN_FILE)


def parse_devices(text: str) -> int | tuple[str, ...]:
    """`2` is a count; `cuda:0,cuda:1` or `cpu,cpu` is a list."""
    if re.fullmatch(r"-?[0-9]{1,4000}", text.strip()):
        return int(text)
    return tuple(part.strip() for part in text.split(","))


def check_replicas(num: int, num_devices: int, facts: StrategyFacts) -> None:
    """Refuse virtual replicas that the strategy, or the number of devices, does not allow."""
    check("virtual_replicas", num, Whole, PlanError)
    if not facts.virtual_replicas:
        able = one_of(row for row in STRATEGIES.values() if row.virtual_replicas)
        raise PlanError(
            f"{facts.name} does not sum gradients in the order of --virtual-replicas; use --strategy {able}"
        )
    if num < num_devices:
        raise PlanError(
            f"{num} virtual replica{'s' * (num > 1)} cannot be shared by {num_devices} devices; use --virtual-replicas "
            f"{num_devices} or more, the same number on any number of devices"
        )


def check_offload(facts: StrategyFacts, devices: Iterable[str], precision: str, virtual_replicas: int | None) -> None:
    """Refuse `--cpu-offload` where there is nothing to offload, or where the host cannot take over."""
    if not facts.offloads:
        able = one_of(row for row in STRATEGIES.values() if row.offloads)
        raise PlanError(
            f"--cpu-offload keeps shards in host memory, and {facts.name} offloads none; use --strategy {able}"
        )
    if any(not device.startswith("cuda") for device in devices):
        raise PlanError(
            "--cpu-offload moves shards from GPUs to host memory, where those of CPU devices are already; leave it out"
        )
    if precision == "fp16":
        raise PlanError(
            "fp16's GradScaler needs gradients on the GPU, and --cpu-offload keeps them in host memory; use "
            "--precision bf16"
        )
    if virtual_replicas is not None:
        raise PlanError(
            "--virtual-replicas matches one GPU bit for bit, and --cpu-offload updates weights on the host, which "
            "rounds differently; leave one out"
        )


def check_device_names(devices: Iterable[str]) -> None:
    """Refuse what names no device, on this machine or another."""
    for device in devices:
        if device.isdigit():
            raise PlanError("--devices takes a count, such as 2, or a list of names, such as cpu,cpu; not both in one")
        if not _DEVICE.fullmatch(device):
            raise PlanError(
                f"unknown device {shorten(repr(device))}; write cpu, mps or cuda:0, or a count such as --devices 2"
            )


def check_patience(restarts: int, stall_after: float | None) -> None:
    """Refuse a number of restarts, or a limit for stalls, that makes no sense."""
    check("restarts", restarts, Restarts, PlanError)
    check("stall_after", stall_after, StallAfter | None, PlanError)


def parse_rendezvous(machines: str | None, rendezvous: str | None) -> tuple[tuple[str, int], tuple[int, int]] | None:
    """The address of the first machine, and the least and most number of machines; None for one machine."""
    if machines is None and rendezvous is None:
        return None
    least_and_most = parse_machines(machines) if machines is not None else (1, 1)
    if machines is None or rendezvous is None:
        raise PlanError(
            "--machines and --rendezvous go together: --machines 2 --rendezvous node0:29400, where node0 is the first "
            "machine"
        )
    return parse_address(rendezvous), least_and_most


AUTO = "auto"
"""Shares that are measured in the first steps."""


def parse_log(given: str | None, name: str = "--log") -> tuple[str, ...]:
    """The trackers that `--log` names.

    >>> parse_log("mlflow, tensorboard"), parse_log(None)
    (('mlflow', 'tensorboard'), ())
    """
    names = tuple(dict.fromkeys(word.strip() for word in given.split(","))) if given is not None else ()
    for one in names:
        check(name, one, Literal[TRACKERS], PlanError)
    return names


def parse_shares(text: str) -> Shares | None:
    """`5,3` gives the first device 5 of 8 samples; None for `auto`.

    >>> parse_shares("5,3"), parse_shares("auto")
    ((5, 3), None)
    """
    words = text.split(",")
    if text.strip() == AUTO:
        return None
    if not all(re.fullmatch(r"\s*0*[1-9][0-9]{0,8}\s*", word) for word in words):
        raise PlanError(
            f"shares is {shorten(repr(text))}; write a whole number from 1 up for each device, such as 5,3, or auto"
        )
    return tuple(int(word) for word in words)


def parse_machines(text: str) -> tuple[int, int]:
    """`2:4` is at least 2 and at most 4; `2` is exactly 2."""
    match = re.fullmatch(r"([0-9]{1,9})(?::([0-9]{1,9}))?", text.strip())
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= least <= most:
        raise PlanError(
            f"machines is {shorten(repr(text))}; write a number such as 2, or the least and the most such as 2:4"
        )
    return least, most


def parse_address(text: str) -> tuple[str, int]:
    """`head:29400` is a machine and a port on it."""
    host, _, port = text.strip().rpartition(":")
    if not host or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        raise PlanError(
            f"rendezvous is {shorten(repr(text))}; write the first machine and a free port on it, such as head:29400"
        )
    return host.strip("[]"), int(port)


def check_name(name: str) -> None:
    """Refuse a run name that is no plain folder name."""
    if not _NAME.fullmatch(name) or ".." in name or len(name.encode()) > MOST_NAME_BYTES:
        raise PlanError(
            f"{shorten(repr(name))} cannot name a run; use letters, digits, '-' and '_', with no slash or leading dot"
        )
