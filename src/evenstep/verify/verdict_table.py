"""Configurations and verdicts as values, and as a table with messages below it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table
from rich.text import Text

from evenstep.report.terminal import plain

PARTS = ("loss", "gradients", "weights", "optimizer", "evaluation", "samples", "checkpoint")


@dataclass(frozen=True)
class Configuration:
    """A strategy, its devices, and the number of micro-batches per device and step."""

    strategy: str
    devices: tuple[str, ...]
    accumulate: int = 1
    virtual_replicas: int | None = None
    """Virtual replicas, where `compare` measures what they cost."""
    shares: str | None = None
    """Of the devices in a global batch, such as 5,3; None: equal."""
    mesh: str | None = None
    """How ranks are arranged, for a strategy that splits models."""

    schedule: str | None = None
    """In which order the ranks of a pipeline compute; None: as the plan has it."""

    link: str | None = None
    """How gradients are sent, as `--link` has it."""

    @property
    def label(self) -> str:
        name = f"{self.strategy} x {len(self.devices)}" if len(self.devices) > 1 else self.strategy
        name = f"{name}, {self.accumulate} micro-batches" if self.accumulate > 1 else name
        name = name if self.shares is None else f"{name}, shares {self.shares}"
        name = name if self.link is None else f"{name}, link {self.link}"
        name = name if self.mesh is None else f"{name}, {self.mesh}"
        name = name if self.schedule is None else f"{name}, {self.schedule}"
        return name if self.virtual_replicas is None else f"{name}, V={self.virtual_replicas}"


@dataclass(frozen=True)
class PartVerdict:
    """One thing that was compared: the largest difference, relative to its size; None where there is nothing."""

    difference: float | None
    is_same: bool


@dataclass(frozen=True, kw_only=True)
class DifferenceCause:
    """Why a configuration differs, and the tests that confirm it."""

    name: str
    """A short name for programs: `batchnorm`, `rank`, `mean-of-means` ..."""
    sentence: str
    evidence: tuple[str, ...] = ()
    """What was tested, and the outcome."""
    advice: str = ""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether a configuration matches `single`; if not, where it first differs, by how much, and why."""

    is_same: bool
    sentence: str
    cause: str = ""
    """`name` of the cause, where one was found."""
    why: str = ""
    evidence: tuple[str, ...] = ()
    advice: str = ""
    first_step: int | None = None
    first_tensor: str | None = None
    difference: float | None = None
    operation: str | None = None
    """With `--exact`, the first operation that gave other bits."""
    notes: tuple[str, ...] = ()
    parts: Mapping[str, PartVerdict] = field(default_factory=dict)

    @classmethod
    def because(cls, cause: DifferenceCause, sentence: str, notes: Iterable[str] = ()) -> Verdict:
        """A configuration that does not match, and why."""
        return cls(
            is_same=False,
            sentence=sentence,
            cause=cause.name,
            why=cause.sentence,
            evidence=cause.evidence,
            advice=cause.advice,
            notes=tuple(notes),
        )

    def to_json(self) -> dict[str, Any]:
        """For programs; a difference that is not finite is null."""
        values = asdict(self)
        for part in (values, *values["parts"].values()):
            if part["difference"] is not None and not math.isfinite(part["difference"]):
                part["difference"] = None
        return values


EACH = "each of them"
"""Replaces the label where several configurations have one cause."""


def table(verdicts: Mapping[Configuration, Verdict]) -> Table:
    """One row per configuration: the largest difference of each part, and whether it is rounding."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("", *PARTS):
        made.add_column(column, no_wrap=True)
    for config, verdict in verdicts.items():
        style = "bold" if verdict.is_same else "bold red"
        cells = [_cell(verdict.parts.get(name)) for name in PARTS]
        made.add_row(Text(plain(config.label), style=style), *cells)
    return made


def _cell(part: PartVerdict | None) -> Text:
    if part is None or part.difference is None:
        return Text("-", style="dim")
    size = "" if part.difference in (0.0, float("inf")) else f" {part.difference:.0e}"
    return Text(f"✓{size}", style="green") if part.is_same else Text(f"✗{size}", style="red")


def lines(
    verdicts: Mapping[Configuration, Verdict],
    configs: Sequence[Configuration],
    batch: int,
    seconds: float,
    virtual_replicas: int | None = None,
) -> Iterator[tuple[str, str]]:
    """The lines below the table: each configuration that differs, then notes and the result.

    Where an error has ended a comparison, some of the configurations have no verdict.
    """
    for alike in _by_cause(verdicts):
        yield from _paragraph(alike)
    notes = dict.fromkeys(note for verdict in verdicts.values() for note in verdict.notes)
    yield "", ""
    if legend := _legend(verdicts, virtual_replicas is None):
        yield legend, "dim"
    yield from ((f"note: {note}", "dim") for note in notes)
    unchecked = [config for config in configs if config not in verdicts]
    good = sum(verdict.is_same for verdict in verdicts.values())
    num, checked = len(configs), len(configs) - len(unchecked)
    number = "all" if good == checked else good if unchecked else f"{good} of {num}"
    match = "match single" if virtual_replicas is None else "are bit-identical to single"
    cut = "" if virtual_replicas is None else f" in {virtual_replicas} virtual replicas"
    what = f"{checked} of {num} strategies were checked: {number}" if unchecked else f"{number} strategies"
    yield f"{what} {match} (batch {batch}{cut}, {seconds:.0f} s)", "bold"
    if unchecked:
        yield f"not checked: {', '.join(config.label for config in unchecked)}", "bold"


def _legend(verdicts: Mapping[Configuration, Verdict], shows_numbers: bool) -> str:
    cells = [verdict.parts.get(name) for verdict in verdicts.values() for name in PARTS]
    differences = [part.difference if part is not None else None for part in cells]
    sentences = []
    if shows_numbers and any(differences):
        sentences.append("Numbers are the max relative difference from single; without a number: identical.")
    if None in differences and any(one is not None for one in differences):
        sentences.append("-: not compared.")
    return " ".join(sentences)


def _by_cause(verdicts: Mapping[Configuration, Verdict]) -> list[dict[Configuration, Verdict]]:
    """Configurations that differ, grouped by cause."""
    groups: dict[tuple[str, ...], dict[Configuration, Verdict]] = {}
    for config, verdict in verdicts.items():
        if not verdict.is_same:
            why = verdict.why.replace(config.label, EACH)
            groups.setdefault((verdict.cause, why, verdict.advice), {})[config] = verdict
    return list(groups.values())


def _paragraph(alike: Mapping[Configuration, Verdict]) -> Iterator[tuple[str, str]]:
    """Where each of them first differs; then why, once."""
    config, verdict = next(iter(alike.items()))
    yield "", ""
    yield from ((f"{one.sentence}.", "bold red") for one in alike.values())
    yield f"  why: {verdict.why if len(alike) == 1 else verdict.why.replace(config.label, EACH)}.", ""
    evidence = dict.fromkeys(line for one in alike.values() for line in one.evidence)
    yield from ((f"  tested: {line}", "dim") for line in evidence)
    if verdict.advice:
        yield f"  what to do: {verdict.advice}", "bold"
