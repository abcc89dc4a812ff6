"""All checks of one machine, in the order of the report."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from evenstep.doctor import Check, Finding, Number, environment, gpus, limits, network, worst
from evenstep.doctor.bandwidth import Pair, schedule, try_pairs
from evenstep.doctor.environment import variables
from evenstep.doctor.remedies import Reference, TimeBudget, Trial, judge, rate_in_words
from evenstep.predict.typical_network import PARAMETERS, STEP_SECONDS, expected_over, link_of_pair, shared_memory
from evenstep.report.prediction import Expectation


@dataclass
class MachineChecks:
    """The checks of this machine; later ones compare with what earlier ones measured."""

    environment: Mapping[str, str]
    budget: TimeBudget = field(default_factory=TimeBudget)
    loopback: network.Loopback | None = None
    gpu_facts: Mapping[str, Finding] = field(default_factory=dict)
    copies: Mapping[tuple[str, str], float] = field(default_factory=dict)

    def checks(self) -> list[Check]:
        num_gpus = gpus.num_gpus()
        nvml = gpus.open_driver()
        static = [
            _one("python", environment.python),
            _one("torch", lambda: environment.torch_build(num_gpus)),
            _one("back ends", lambda: environment.back_ends(num_gpus)),
            Check("driver", lambda: gpus.driver(nvml, self.environment)),
            *([Check("GPUs", lambda: self._gpus(nvml), is_trial=True)] if num_gpus else []),
            _one("cores", limits.cores),
            _one("threads", lambda: limits.threads(self.environment)),
            _one("memory", limits.memory),
            _one("shared memory", limits.shared_memory),
            _one("open files", limits.open_files),
            *([_one("locked memory", limits.locked_memory)] if num_gpus else []),
            Check("loopback", self._loopback),
            _one("ports", network.ports),
            _one("host name", network.host_name),
            Check("environment", lambda: variables(self.environment)),
        ]
        return [*static, *(self._pairs(pairs) for pairs in schedule(num_gpus))]

    def _gpus(self, nvml: Any) -> list[Finding]:
        found = gpus.look_at_gpus(nvml, self.budget.allowed(gpus.LOOK_SECONDS))
        self.gpu_facts = {one.name: one for one in found}
        seconds = self.budget.allowed(gpus.LOOK_SECONDS)
        # Copies to a broken GPU would fail too, and the pairs need the time.
        if seconds and worst(found) != "bad":
            self.copies = gpus.copies_between_gpus(seconds)
        return found + gpus.unequal(found)

    def _loopback(self) -> list[Finding]:
        finding, self.loopback = network.loopback()
        return [finding]

    def _pairs(self, pairs: Sequence[Pair]) -> Check:
        def look() -> list[Finding]:
            trials = try_pairs(pairs, self.environment, self.budget)
            return [judge(trial, self._reference(pair, trial)) for pair, trial in zip(pairs, trials, strict=True)]

        return Check(f"all-reduce: {'; '.join(pair.name for pair in pairs)}", look, is_trial=True)

    def _reference(self, pair: Pair, trial: Trial) -> Reference:
        """The expected speed of a pair, and its source."""
        if pair.back_end == "nccl":
            return self._gpu_reference(pair.devices)
        if self.loopback is None:
            return Reference()
        words = f"a plain socket: {rate_in_words(self.loopback.bytes_per_second)}"
        if trial.ended.returned and pair.devices[0] == "cpu":
            words += f", a copy in memory: {rate_in_words(trial.ended.returned[0]['copy_bytes_per_second'])}"
        return Reference(words, self.loopback.bytes_per_second, self.loopback.latency_seconds)

    def _gpu_reference(self, devices: tuple[str, ...]) -> Reference:
        if len(devices) < 2:
            return Reference()
        copied = self.copies.get((devices[0], devices[1]))
        link = self.gpu_facts[devices[0]].numbers.get("nvlink_bytes_per_second") if self.gpu_facts else None
        words = f"a plain copy: {rate_in_words(copied)}" if copied else ""
        if isinstance(link, float):
            words += f"{', ' * bool(words)}NVLink, nominal: {rate_in_words(link)}"
        return Reference(words, copied)


def _one(name: str, look: Callable[[], Finding]) -> Check:
    return Check(name, lambda: [look()])


@dataclass(frozen=True)
class CheckStarted:
    name: str
    number: int
    total: int
    is_trial: bool


@dataclass(frozen=True)
class Report:
    findings: tuple[Finding, ...]
    seconds: float
    is_first: bool = True
    """Whether this is the first machine, which prints the findings of all."""


Examination = Generator[CheckStarted | Report, None, None]


def examine(environment: Mapping[str, str]) -> Examination:
    """Run all checks: yields the name of each before it starts, and finally the report."""
    began = time.monotonic()
    checks = MachineChecks(environment).checks()
    found: list[Finding] = []
    for number, check in enumerate(checks, 1):
        yield CheckStarted(check.name, number, len(checks), check.is_trial)
        found += check.findings()
    yield Report((*found, *expected(found, _devices(found))), time.monotonic() - began)


def _devices(found: Sequence[Finding]) -> int:
    """GPUs of this machine, else its cores; two at least."""
    cores = next((one.numbers.get("cores") for one in found if one.name == "cores"), 1)
    return max(2, gpus.num_gpus() or int(cores or 1))


def expected(found: Sequence[Finding], devices: int, name: str = "scaling") -> list[Finding]:
    """What this number of devices would give over the slowest of the links that were measured; nothing if none was."""
    measured = [one for one in found if one.status != "bad" and one.numbers.get("bytes_per_second")]
    pairs = [one for one in measured if one.name.endswith(", nccl")]
    # A link of CPUs says nothing about GPUs, nor do two processes on one of them.
    if not any("cuda" in one.name for one in found):
        pairs = pairs or [one for one in measured if one.name.endswith(", gloo")]
    if not pairs:
        return []
    gives, over = _over(min(pairs, key=lambda one: _number(one, "bytes_per_second")), devices)
    network = f"a network of {PARAMETERS / 1e6:g} M parameters, {STEP_SECONDS * 1000:g} ms a step"
    about = f"assuming {network}, and gradients averaged {over}"
    numbers: dict[str, Number] = {
        "devices": devices,
        "times": gives.times.middle,
        "times_low": gives.times.low,
        "times_high": gives.times.high,
        "limit": gives.limit,
        "limit_from": gives.limit_from,
    }
    return [Finding(name, "good", f"{gives.sentence} ({about}); your task: evenstep predict", numbers=numbers)]


def _over(pair: Finding, devices: int) -> tuple[Expectation, str]:
    """What devices give over the link of this pair, and what that is, in words."""
    if pair.name == Pair(("cpu", "cpu")).name:
        # Ranks of one machine average in shared memory.
        link = shared_memory(_number(pair, "copy_bytes_per_second"))
        return expected_over(link, devices, on_gpus=False, shares_memory=True), "at the speed of a memory copy"
    link = link_of_pair(_number(pair, "latency_seconds"), _number(pair, "bytes_per_second"))
    return expected_over(link, devices, on_gpus=pair.name.endswith(", nccl")), "over the slowest link above"


def _number(finding: Finding, name: str) -> float:
    return float(finding.numbers.get(name) or 0.0)
